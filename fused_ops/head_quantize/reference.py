"""The definition: one exponent for all rows of a head, then a static quantization.

The exponent is the smallest under which no element clips and, as ``lp_fa4.mx.quantize`` has it of bounded rows, the magnitudes of no row's
codes sum to more than ``ROW_SUM``, so that attention may take its scores from FP16 sums.
"""

import torch
from torch import Tensor

from lp_fa4.mx import encode_scale, inverse_scale, quantize_mx
from lp_fa4.mx.quantize import row_shift, row_units


def head_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[T, H, D]`` and scale ``[1, H, 1]``, uint8, of ``x [T, H, D]``.

    Where a head holds a NaN or an infinity its byte is 254, that element's code is NaN, and the others are rounded under 2^127. Elements
    past 2^125 may break the bound on sums, as no exponent is larger.
    """
    byte = encode_scale(x.abs().amax(dim=(0, 2))).clamp(max=254)
    units = row_units(x.to(torch.float32) * inverse_scale(byte)[:, None]).sum(dim=2, dtype=torch.int32)
    exponent = byte.to(torch.int32) + row_shift(units.amax(dim=0)) - 127
    made = quantize_mx(x, (0, x.shape[2]), token_dim=0, exponent=exponent)
    return made.codes.contiguous(), made.scale_bytes
