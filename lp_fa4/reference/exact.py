"""Attention with no rounding beyond its dtype, FP64 unless told otherwise: what errors are measured against."""

import math

import torch
from torch import Tensor


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_k: Tensor | None = None,
    offsets_q: Tensor | None = None,
    shared_q: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every sequence; differentiable.

    Args:
        q: ``[N, H, D]`` (``[Q, H, D]`` if shared); k, v: ``[T, Hkv, D]``; any float dtypes. offsets: as in ``AttentionProblem``.
    Returns: ``out [R, H, D]`` and ``lse [H, R]`` (natural), in ``dtype``; a row that sees no key is 0 with lse -inf.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    bounds = [0, k.shape[0]] if offsets_k is None else offsets_k.tolist()
    batch = len(bounds) - 1
    group = q.shape[1] // k.shape[1]
    if offsets_q is not None:
        rows = offsets_q.tolist()
    else:
        per = q.shape[0] if shared_q else q.shape[0] // max(batch, 1)
        rows = [b * per for b in range(batch + 1)]
    total = batch * q.shape[0] if shared_q else q.shape[0]
    outs, lses = [], []
    for b in range(batch):
        qb = (q if shared_q else q[rows[b] : rows[b + 1]]).to(dtype).transpose(0, 1)
        kb = k[bounds[b] : bounds[b + 1]].to(dtype).transpose(0, 1).repeat_interleave(group, 0)
        vb = v[bounds[b] : bounds[b + 1]].to(dtype).transpose(0, 1).repeat_interleave(group, 0)
        n, m = qb.shape[1], kb.shape[1]
        blind = n if m == 0 else max(0, n - m) if causal else 0  # leading queries that see no key
        o = qb.new_zeros(qb.shape[0], blind, qb.shape[2])
        lse = qb.new_full((qb.shape[0], blind), -torch.inf)
        if blind < n:
            s = qb[:, blind:] @ kb.transpose(1, 2) * scale
            if causal:
                hidden = torch.arange(m, device=q.device) > torch.arange(blind, n, device=q.device)[:, None] + (m - n)
                s = s.masked_fill(hidden, -torch.inf)
            lse = torch.cat([lse, torch.logsumexp(s, -1)], 1)
            o = torch.cat([o, torch.softmax(s, -1) @ vb], 1)
        outs.append(o.transpose(0, 1))
        lses.append(lse)
    done = sum(o.shape[0] for o in outs)
    outs.append(q.new_zeros(total - done, *q.shape[1:], dtype=dtype))
    lses.append(q.new_full((q.shape[1], total - done), -torch.inf, dtype=dtype))
    return torch.cat(outs, 0), torch.cat(lses, 1)


def exact_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, **arguments) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` of ``sum(dout * exact_attention(q, k, v, **arguments)[0])``, FP64 unless ``dtype`` is given."""
    dtype = arguments.get("dtype", torch.float64)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out, _ = exact_attention(*leaves, **arguments)
        grads = torch.autograd.grad(out, leaves, dout.to(dtype), allow_unused=True)
    dq, dk, dv = (torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))
    return dq, dk, dv
