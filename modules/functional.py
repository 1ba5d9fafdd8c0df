"""The pieces of PMA below ``nn.Module``: the query side in plain PyTorch, and the two key/value sides (``mxfp8``, ``bf16``) behind them."""

import torch
from torch import Tensor

from lp_fa4 import dispatch
from lp_fa4.problem import check_head_dim
from modules.bf16 import pma_bf16
from modules.mxfp8 import pma_attention
from modules.numerics import Numerics
from modules.queries import query_heads

__all__ = ["check_backend", "pma_bf16", "pma_mxfp8", "query_heads"]

BF16_BACKENDS = ("auto", "fa4", "sdpa")
MX_BACKENDS = ("auto", *dispatch.BACKENDS)


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
    backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (values, q, norm_weight, w_k, w_v))
    return pma_attention(
        values, offsets, q, norm_weight, w_k, w_v, eps, numerics.key, backend, out_dtype, backward
    )[0]  # fmt: skip
