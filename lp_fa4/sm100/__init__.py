"""Attention on Blackwell (sm_100a, sm_103a): block-scaled MXFP8 products, scales in tensor memory.

``forward`` has the reference's signature; ``unsupported`` says in words what is not served. Compiled for both targets and executed in the
emulator of ``tests/emulator``; not yet run on hardware. README.md of this folder has the facts and the log.
"""

from lp_fa4.sm100.forward_host import forward, unsupported

__all__ = ["forward", "unsupported"]
