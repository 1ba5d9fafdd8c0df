"""The definition: one exponent for all rows of a head, from the largest magnitude, then a static quantization."""

import torch
from torch import Tensor

from lp_fa4.mx import encode_scale, quantize_mx


def head_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[T, H, D]`` and scale ``[1, H, 1]``, uint8, of ``x [T, H, D]``.

    Where a head holds a NaN or an infinity its byte is 254, that element's code is NaN, and the others are rounded under 2^127.
    """
    exponent = encode_scale(x.abs().amax(dim=(0, 2))).to(torch.int32) - 127
    made = quantize_mx(x, (0, x.shape[2]), token_dim=0, exponent=exponent)
    return made.codes.contiguous(), made.scale_bytes
