"""GEMM + norm backward: the definition, in plain PyTorch. FP32 throughout, operands dequantized as they are stored.

    dxn    = dk @ w_k + dv + dv_mean_b          the dequantize-and-add of dv inside the norm; dv_mean: one row per sequence
    dw_k   = dk^T @ xn                          each sequence is a segment of its own: no group of 32 crosses sequences
    xhat   = x * rstd
    dgamma = sum_t dxn * xhat
    dx     = rstd * (g * dxn - xhat * mean_c(g * dxn * xhat))

``xn`` may be centred: the columns of ``dk`` sum to 0 (softmax gradients do), so the centre adds nothing to ``dw_k``.
Rows past ``offsets[-1]`` are not read and get 0.
"""

from itertools import pairwise

import torch
from torch import Tensor

from fused_ops.operands import Matrix, Weight, to_float
from fused_ops.rmsnorm_quantize.reference import inside, per_token


def _rows(matrix: Matrix, valid: Tensor | None) -> Tensor:
    """FP32; rows past the last offset become 0, whatever lies there (an MXTensor's scale of 0 does not silence a code that is NaN)."""
    values = to_float(matrix)
    return values if valid is None else torch.where(valid, values, 0.0)


def weight_gradient(dy: Matrix, x: Matrix, offsets: Tensor | None, per_sequence: bool = False) -> Tensor:
    """``dy^T @ x`` ``[N, C]`` in FP32 over ``dy [T, N]``, ``x [T, C]``; ``per_sequence`` keeps the ``[B, N, C]`` segments
    apart (an empty sequence's is 0)."""
    tokens = dy.shape[0]
    valid = inside(offsets, tokens)
    left, right = _rows(dy, valid), _rows(x, valid)
    if offsets is not None and not left.is_cuda:  # a BLAS adds up in an order that depends on the number of rows, also of zeros
        left, right = left[: int(offsets[-1])], right[: int(offsets[-1])]
    if not per_sequence or offsets is None:
        return left.t() @ right
    bounds = offsets.tolist()
    out = left.new_zeros(len(bounds) - 1, left.shape[1], right.shape[1])
    for b, (start, stop) in enumerate(pairwise(bounds)):
        out[b] = left[start:stop].t() @ right[start:stop]
    return out


def norm_backward(dxn: Tensor, x: Tensor, norm_weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """``(dx, dgamma)`` in FP32 from ``dxn``, ``x`` ``[T, C]`` in FP32."""
    xhat = x * rstd[:, None]
    scaled = dxn * norm_weight.to(torch.float32)
    dx = rstd[:, None] * (scaled - xhat * (scaled * xhat).mean(dim=1, keepdim=True))
    return dx, (dxn * xhat).sum(dim=0)


def gemm_norm_backward(
    dk: Matrix,
    dv: Matrix | None,
    dv_mean: Tensor | None,
    w_k: Weight,
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    xn: Matrix | None,
    offsets: Tensor | None,
    need_x: bool,
    need_norm: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See the module's docstring; what is not needed comes back as None. ``xn`` is read for ``dw_k`` alone."""
    valid = inside(offsets, x.shape[0])
    dw = weight_gradient(dk, xn, offsets) if need_w and xn is not None else None
    if not (need_x or need_norm):
        return None, None, dw
    dxn = _rows(dk, valid) @ to_float(w_k)
    if dv is not None:
        dxn += _rows(dv, valid)
    if dv_mean is not None:
        bounds = torch.tensor([0, x.shape[0]], device=x.device) if offsets is None else offsets
        dxn += per_token(dv_mean.to(torch.float32), bounds, x.shape[0])
    xf = _rows(x, valid)
    rstd = rstd if valid is None else torch.where(valid[:, 0], rstd, 0.0)
    dx, dgamma = norm_backward(dxn, xf, norm_weight, rstd)
    return dx.to(x.dtype) if need_x else None, dgamma if need_norm else None, dw
