"""``balanced_coordinates``: checks, and the choice of backend. Not an operator: who calls it is inside one."""

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.coordinates import reference

WIDTHS = (32, 64, 128)
"""Channels of a head that the kernel serves."""


def unsupported(q: Tensor, w: Tensor, gain: Tensor) -> str:
    """Why the kernel cannot serve, "" if it can."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    if q.shape[2] not in WIDTHS:
        return f"q has {q.shape[2]} channels a head; the kernel serves {', '.join(map(str, WIDTHS))}"
    if w.shape[1] % 4:
        return f"w has {w.shape[1]} columns; the kernel serves multiples of 4"
    if q.dtype != torch.float32 or w.dtype not in kinds or gain.dtype not in kinds:
        return f"q, w and gain are {q.dtype}, {w.dtype} and {gain.dtype}; the kernel serves float32 queries"
    return "" if q.shape[0] < 2**31 - 256 else f"q has {q.shape[0]} rows; the kernel counts them in 32 bits"


def balanced_coordinates(q: Tensor, w: Tensor, gain: Tensor, *, rotate: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Two matrices a head, FP32 ``[H, D, D]``: ``keys`` for ``k -> keys k`` and ``queries`` for ``q -> queries q``, under which no score
    changes and E4M3 loses less of it (``fused_ops.coordinates.reference``). No gradient goes through them.

    Args:
        q: projected seeds ``[Q, H, D]``; w: key projection ``[H * D, C]`` behind a norm with weight ``gain [C]``.
        rotate: with the Hadamard matrix of ``D``, which must be a power of two then.
        backend: ``"auto"``, ``"reference"``, ``"sm90"`` or ``"sm100"``. The kernel's covariance of weights is a sum of BF16
            products, and ``keys^T queries`` is 1 within 2^-12 (reference: 2e-5).

    Raises: ``ValueError`` naming argument, value and what is allowed.
    """
    if q.dim() != 3 or q.numel() == 0:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [rows, heads, D] with at least one of each")
    heads, width = q.shape[1:]
    if w.dim() != 2 or w.shape[0] != heads * width or gain.shape != w.shape[1:]:
        raise ValueError(f"w is {list(w.shape)} and gain {list(gain.shape)}; allowed are [{heads * width}, C] and [C]")
    if rotate and width & (width - 1):
        raise ValueError(f"rotate is True but q has {width} channels a head; it must be a power of two")
    if choose("balanced_coordinates", q.device, backend, unsupported(q, w, gain)) == "reference":
        return reference.balanced_coordinates(q, w, gain, rotate)
    from fused_ops.coordinates import kernel

    return kernel.balanced_coordinates(q.detach(), w.detach(), gain.detach(), rotate)
