"""Pooling by multi-head attention in plain differentiable PyTorch, one sequence at a time: the truth that everything is judged by.

In float64 it is exact for our purposes; the low-precision module must agree with it to a stated SQNR, value and gradients.

    q = RMSNorm(seeds) Wq^T;  xn = RMSNorm(events);  k = xn Wk^T;  v = xn (or xn Wv^T);  out = softmax(q k^T / sqrt(D)) v
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` in the inputs' dtype."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def pool_sequence(events: Tensor, q: Tensor, kv_norm: Tensor, key_proj: Tensor, value_proj: Tensor | None, eps: float) -> Tensor:
    """One sequence ``events [K, dim]`` pooled by ``q [H, Q, D]`` to ``[Q, dim]``; zeros for no events."""
    heads, queries, head_dim = q.shape
    xn = rms_norm(events, kv_norm, eps)
    k = (xn @ key_proj.t()).unflatten(1, (heads, head_dim)).transpose(0, 1)
    v = (xn if value_proj is None else xn @ value_proj.t()).unflatten(1, (heads, head_dim)).transpose(0, 1)
    if events.shape[0] == 0:
        # A product over no keys: exact zeros that stay attached to every parameter.
        return ((q @ k.transpose(1, 2)) @ v).transpose(0, 1).reshape(queries, heads * head_dim)
    p = torch.softmax(q @ k.transpose(1, 2) * head_dim**-0.5, dim=-1)
    return (p @ v).transpose(0, 1).reshape(queries, heads * head_dim)


def seed_queries(seeds: Tensor, query_norm: Tensor, query_proj: Tensor, heads: int, eps: float) -> Tensor:
    """``[H, Q, D]`` from ``seeds [Q, dim]``."""
    return (rms_norm(seeds, query_norm, eps) @ query_proj.t()).unflatten(1, (heads, -1)).transpose(0, 1)


def sequences(offsets: Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) of each sequence, read on the host."""
    return pairwise(offsets.tolist())


def pma(
    values: Tensor,
    offsets: Tensor,
    seeds: Tensor,
    query_norm: Tensor,
    kv_norm: Tensor,
    query_proj: Tensor,
    key_proj: Tensor,
    value_proj: Tensor | None = None,
    *,
    heads: int,
    eps: float = 1e-6,
) -> Tensor:
    """The module's forward, ``[B, Q, dim]``, in the dtype of its inputs; differentiable in all of them."""
    q = seed_queries(seeds, query_norm, query_proj, heads, eps)
    rows = [pool_sequence(values[a:b], q, kv_norm, key_proj, value_proj, eps) for a, b in sequences(offsets)]
    if not rows:
        return values.new_zeros(0, *seeds.shape) + 0 * (seeds.sum() + values[:0].sum())
    return torch.stack(rows)
