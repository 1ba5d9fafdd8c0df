"""Which backend serves a fused operation: the kernels of the device's architecture, or the reference.

The kernels have one source for every architecture, so a choice is a device that can run them and arguments that they serve. Names are
those of ``lp_fa4``: ``"auto"``, ``"reference"``, ``"sm90"``, ``"sm100"``.
"""

import logging
from collections.abc import Mapping

import torch

from lp_fa4.dispatch import BACKENDS, device_reason

log = logging.getLogger("fused_ops")
_announced: set[tuple[str, str, str]] = set()


def choose(operation: str, device: torch.device, backend: str, unsupported: str | Mapping[str, str]) -> str:
    """Backend of a call. ``unsupported``: why the kernels cannot serve its arguments, "" if they can; by backend where they differ.

    ``"auto"`` on an accelerator that ends at the reference says so, once for each reason. An explicit choice is never replaced.

    Raises: ``ValueError`` if ``backend`` is unknown, or cannot serve, with the reason.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend is {backend!r}; allowed are 'auto', {', '.join(repr(b) for b in reversed(BACKENDS))}")
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        return "reference"
    names = [b for b in BACKENDS if b != "reference"] if backend == "auto" else [backend]
    words = unsupported if isinstance(unsupported, Mapping) else dict.fromkeys(names, unsupported)
    reasons = {name: device_reason(name, device) or words[name] for name in names}
    for name, reason in reasons.items():
        if not reason:
            return name
    why = "; ".join(reasons.values())
    if backend != "auto":
        raise ValueError(f"backend={backend!r} cannot serve {operation}: {why}")
    if (operation, device.type, why) not in _announced:
        _announced.add((operation, device.type, why))
        log.warning("fused_ops: %s on %s runs on backend 'reference' (plain PyTorch, slow): %s", operation, device.type, why)
    return "reference"
