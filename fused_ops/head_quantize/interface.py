"""``head_quantize``: checks, and the choice of backend. Not an operator: who calls it is inside one."""

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.head_quantize import reference
from lp_fa4.mx import MXTensor


def head_quantize(x: Tensor, *, backend: str = "auto") -> MXTensor:
    """MXFP8 of ``x [T, H, D]``, ``D`` at most 256, in static blocks ``(0, D)``: a head's exponent is the smallest under which none of its
    elements clips and the magnitudes of no row's codes sum to more than 146, so that their product with any codes is in FP16's range.

    ``backend``: ``"auto"``, ``"reference"``, ``"sm90"`` or ``"sm100"``; the bytes are the same.

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
    if not x.dtype.is_floating_point or x.element_size() == 1:
        raise TypeError(f"x has dtype {x.dtype}; allowed are float32, float64, bfloat16 and float16")
    if x.dim() != 3 or x.numel() == 0 or x.shape[2] > 256:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [rows, heads, D] with at least one of each, D at most 256")
    reason = "" if x.shape[2] % 4 == 0 else f"x has {x.shape[2]} columns a head; the kernel serves multiples of 4"
    if x.dtype != torch.float32:
        reason = f"x has dtype {x.dtype}; the kernel serves float32"
    if x.shape[0] * x.shape[2] >= 2**31:
        reason = f"x has {x.shape[0]} rows; the kernel counts a head's elements in 32 bits"
    if choose("head_quantize", x.device, backend, reason) == "reference":
        codes, scale = reference.head_quantize(x)
    else:
        from fused_ops.head_quantize import kernel

        codes, scale = kernel.head_quantize(x.detach())
    return MXTensor.from_bytes(codes, scale, (0, x.shape[2]))
