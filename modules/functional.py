"""The pieces of PMA below ``nn.Module``: the query side in plain PyTorch, and the two key/value sides (``mxfp8``, ``bf16``) behind them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.hadamard import hadamard_matrix
from lp_fa4 import dispatch
from lp_fa4.mx import quantize_mx
from lp_fa4.operator import custom_op
from lp_fa4.problem import check_head_dim
from modules.bf16 import pma_bf16
from modules.mxfp8 import pma_attention
from modules.numerics import Numerics

__all__ = ["check_backend", "pma_bf16", "pma_mxfp8", "query_heads", "round_mxfp8"]

BF16_BACKENDS = ("auto", "fa4", "sdpa")
MX_BACKENDS = ("auto", *dispatch.BACKENDS)


@custom_op("modules::round_mxfp8", mutates_args=())
def round_mxfp8(x: Tensor) -> Tensor:
    """``x [T, C]`` rounded to MXFP8 in 32×32 blocks and back to FP32. No gradient."""
    return quantize_mx(x).dequantize()


@round_mxfp8.register_fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.float32)


def query_heads(seeds: Tensor, norm_weight: Tensor, proj: Tensor, heads: int, eps: float, numerics: Numerics | None) -> Tensor:
    """``RMSNorm(seeds) @ Wq^T`` as ``[Q, H, D]`` FP32, before it is quantized; differentiable.

    There are ``Q`` rows, once a step, so FP32 costs nothing; and with no rounding before the one to E4M3 a compiler that keeps
    intermediates in FP32 cannot change the codes. With ``query_projection="e4m3"`` the forward product takes both operands in MXFP8;
    its gradient passes straight through to the FP32 product. ``numerics=None`` is BF16 attention.
    """
    s = seeds.to(torch.float32)
    qn = s * torch.rsqrt(s.square().mean(dim=-1, keepdim=True) + eps) * norm_weight.to(torch.float32)
    q = F.linear(qn, proj.to(torch.float32))
    if numerics is not None and numerics.query_projection == "e4m3":
        low = F.linear(round_mxfp8(qn.detach()), round_mxfp8(proj.detach().to(torch.float32)))
        q = q + (low - q.detach())
    q = q.unflatten(1, (heads, -1))
    if numerics is not None and numerics.rotates(q.shape[-1]):
        q = q @ hadamard_matrix(q.shape[-1], q.device)
    return q


def check_backend(precision: str, backend: str, head_dim: int, numerics: Numerics) -> None:
    """Refuse, at construction, what no device can serve: a ``ValueError`` that names argument, value and what is allowed."""
    allowed = BF16_BACKENDS if precision == "bf16" else MX_BACKENDS
    if backend not in allowed:
        raise ValueError(f"backend is {backend!r} with precision={precision!r}; allowed are {', '.join(map(repr, allowed))}")
    if precision == "bf16":
        return
    check_head_dim(head_dim)
    if numerics.hadamard and head_dim & (head_dim - 1):
        raise ValueError(f"numerics.hadamard is True but the head dimension is {head_dim}; it must be a power of two")
    if numerics.attention.center_p and not numerics.center:
        raise ValueError(
            "numerics.center is False but numerics.attention.center_p is True, which needs the sums that centring makes; change one of them"
        )


def pma_mxfp8(
    values: Tensor, offsets: Tensor, q: Tensor, norm_weight: Tensor, w_k: Tensor, w_v: Tensor | None, eps: float,
    numerics: Numerics, backend: str, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The key/value side in MXFP8: ``modules::pma_attention``, of whose results only ``out [B, Q, dim]`` is for the caller."""
    return pma_attention(
        values, offsets, q, norm_weight, w_k, w_v, eps, numerics.key, backend, out_dtype
    )[0]  # fmt: skip
