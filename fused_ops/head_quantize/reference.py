"""The definition: one exponent for all rows of a head, then a static quantization.

The exponent is the smallest under which no element clips and no row's codes have magnitudes that sum to more than ``ROW_SUM``. Whatever
E4M3 codes such a row meets, its product stays under ``448 * ROW_SUM = 65408``, in FP16's range, so that attention may take its scores from
FP16 sums. E4M3 loses nothing by it: codes are of magnitude 1 instead of 2^6, what falls under the least normal number, 2^-6, is off by
2^-10 at most, far less than larger elements are by their rounding, and a score adds them all up.

Codes do not exist before the exponent does, so the sum is that of the elements, counted in whole units of 2^-9 under the exponent of the
largest magnitude: integers, which every device adds up alike in any order. Rounding to a code adds 1/17 at most, 2^-10 to a subnormal one:
``ROW_LIMIT`` leaves room for both, and for what counting left out, up to 256 elements.
"""

import torch
from torch import Tensor

from lp_fa4.mx import encode_scale, inverse_scale, quantize_mx

ROW_SUM = 146
ROW_LIMIT = 137
UNITS = 2**9
SHIFTS = 10
"""Most that an exponent is raised by: ``448 * 256 <= ROW_LIMIT * 2**SHIFTS``."""


def head_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[T, H, D]`` and scale ``[1, H, 1]``, uint8, of ``x [T, H, D]``.

    Where a head holds a NaN or an infinity its byte is 254, that element's code is NaN, and the others are rounded under 2^127. Elements
    past 2^125 may break the bound on sums, as no exponent is larger.
    """
    byte = encode_scale(x.abs().amax(dim=(0, 2))).clamp(max=254)
    scaled = x.abs().to(torch.float32) * inverse_scale(byte)[:, None]
    units = (torch.where(scaled.isfinite(), scaled, 0.0) * UNITS).to(torch.int32).sum(dim=2, dtype=torch.int32).amax(dim=0)
    shift = sum((units > ROW_LIMIT * UNITS << i).to(torch.int32) for i in range(SHIFTS))
    made = quantize_mx(x, (0, x.shape[2]), token_dim=0, exponent=byte.to(torch.int32) + shift - 127)
    return made.codes.contiguous(), made.scale_bytes
