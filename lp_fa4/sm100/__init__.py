"""Attention on Blackwell (sm_100a, sm_103a): block-scaled MXFP8 products, scales in tensor memory.

``forward`` and ``backward`` have the reference's signatures; ``unsupported`` says in words what is not served. Compiled for both targets
and executed in the emulator of ``tests/emulator``; not yet run on hardware. README.md of this folder has the facts and the log.
"""

from typing import Any

from lp_fa4.sm100.backward_host import backward, reason_against_backward
from lp_fa4.sm100.forward_host import forward
from lp_fa4.sm100.forward_host import unsupported as _forward_unsupported

__all__ = ["backward", "forward", "unsupported"]


def unsupported(features: Any) -> str:
    """Why a call with these ``lp_fa4.dispatch.Features`` is not served here; "" if it is."""
    reason = _forward_unsupported(features)
    if not reason and features.backward:
        reason = reason_against_backward(features.head_dim, features.config)
    return reason
