"""GEMM + quantize: the definition, in plain PyTorch.

    y = x @ w^T            products of the operands as they are (E4M3 * 2^e, or BF16), summed in FP32
    out = E4M3 blocks of y     amax and rounding from FP32: y is never BF16

``w`` as a pair ``(hi, lo)`` is two FP8 products into one accumulator.
"""

import torch
from torch import Tensor

from fused_ops.operands import Matrix, Weight, to_float
from lp_fa4.mx import MXTensor, quantize_mx


def gemm_quantize(x: Matrix, w: Weight, block: tuple[int, int], offsets: Tensor | None, exponent: Tensor | None) -> MXTensor:
    """See the module's docstring: ``x [T, C]``, ``w [N, C]`` to MXTensor ``[T, N]`` with groups by ``offsets``."""
    xf = to_float(x)
    if offsets is not None and isinstance(x, Tensor):
        rows = torch.arange(xf.shape[0], device=xf.device)
        xf = torch.where((rows < offsets[-1])[:, None], xf, 0.0)
    return quantize_mx(xf @ to_float(w).t(), block, offsets, token_dim=0, exponent=exponent)
