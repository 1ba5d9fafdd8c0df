"""Attention backward at the kernels' rounding points.

Recomputes P from the same reconstructed q and k as the forward, takes dO through one quantization that serves all its products, and rounds
P and dS to E4M3 before their products. :class:`lp_fa4.config.AttentionConfig` has the formulas.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lp_fa4.config import LOG2_E, AttentionConfig
from lp_fa4.mx import quantize_mx
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients
from lp_fa4.reference.forward import score_bias
from lp_fa4.reference.rounding import (
    CODE_UNIT,
    WHOLE_ELEMENTS,
    Chunk,
    Operand,
    Span,
    chunks,
    codes_to_float,
    fake_quantize,
    pad_keys,
    scores,
    spans,
)

FP16_ROOM_LOG2 = 15
"""Bounded FP16 partials stay under 2^15: half of FP16's largest value, which leaves room for what rounding adds to the bound."""

QUERY_TILE = 64
"""Queries under one scale of dS where ``config.ds_block`` is None."""


def backward(
    problem: AttentionProblem,
    result: ForwardResult,
    dout: Tensor,
    *,
    deterministic: bool = False,
    dlse: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to the (centred) operands.

    Args:
        result: of the forward of the same problem. dout: ``[R, H, D]``, any float dtype and strides.
        deterministic: accepted for the kernels' sake; this function always is.
        dlse: ``[H, R]`` or None.
        needs: which of dq, dk, dv are wanted; the others are 0 and cost nothing.

    Everything but a shared dQ is computed per sequence from that sequence's rows alone; a shared dQ is summed in batch order in FP32.
    """
    del deterministic
    p, cfg = problem, problem.config
    if list(dout.shape) != list(result.out.shape):
        raise ValueError(f"dout has shape {list(dout.shape)}; it must be that of the output, {list(result.out.shape)}")
    heads, dim, device = p.heads, p.head_dim, p.device
    dq = torch.zeros(p.q.shape, dtype=torch.float32, device=device)
    dk = torch.zeros(p.tokens, p.kv_heads, dim, dtype=torch.float32, device=device)
    dv = torch.zeros_like(dk)
    dv_mean = torch.zeros(p.batch, p.kv_heads, dim, dtype=torch.float32, device=device) if p.centred_backward else None
    operands = [Operand(x) for x in (p.q, p.k, p.v)]
    shared = operands[0].rows(0, p.q.shape[0], 0) if p.shared_q else None
    row_sides = _row_sides(p, result, dout, dlse)
    for span in spans(p):
        if span.queries == 0 or span.keys == 0:
            continue
        q = shared if shared is not None else operands[0].rows(span.q0, span.q1, span.index)
        k = pad_keys(operands[1].rows(span.k0, span.k1, span.index)).repeat_interleave(p.group, 0)
        v = pad_keys(operands[2].rows(span.k0, span.k1, span.index)).repeat_interleave(p.group, 0)
        side = row_sides(span)
        dqb = torch.zeros(heads, span.queries, dim, dtype=torch.float32, device=device)
        dkb, dvb = torch.zeros_like(k), torch.zeros_like(v)
        _gradients(p, span, q, k, v, side, dqb, dkb, dvb, needs)
        keys = slice(span.k0, span.k1)
        dk[keys] = _over_group(dkb, p)[:, : span.keys].transpose(0, 1)
        dv[keys] = _over_group(dvb, p)[:, : span.keys].transpose(0, 1)
        if dv_mean is not None:
            dv_mean[span.index] = _over_group(side.do, p).sum(1) / span.keys
        if p.shared_q:
            dq += dqb.transpose(0, 1)
        else:
            dq[span.q0 : span.q1] = dqb.transpose(0, 1)
    if cfg.grad_format == "bf16":
        return Gradients(dq, dk.to(torch.bfloat16), dv.to(torch.bfloat16), dv_mean)
    offsets = p.offsets_k
    return Gradients(
        dq, quantize_mx(dk, cfg.grad_block, offsets, token_dim=0), quantize_mx(dv, cfg.grad_block, offsets, token_dim=0), dv_mean
    )


def _over_group(x: Tensor, p: AttentionProblem) -> Tensor:
    """Sum the query heads of each key/value head: ``[H, ...]`` to ``[Hkv, ...]``."""
    return x if p.group == 1 else x.unflatten(0, (p.kv_heads, p.group)).sum(1)


@dataclass(frozen=True)
class _RowSide:
    """What the pre-pass makes of rows: dO and dO8 ``[..., H, Q, D]``; per row ``[..., H, Q]`` the maximum, sum and D."""

    do: Tensor
    do8: Tensor
    row_max: Tensor
    row_sum: Tensor
    delta: Tensor

    @classmethod
    def make(cls, cfg: AttentionConfig, do: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, dlse: Tensor | None) -> "_RowSide":
        """From dO and the saved centred output, FP32 ``[..., H, Q, D]``, and rows ``[..., H, Q]``."""
        blind = torch.isneginf(row_max)
        row_max, row_sum = torch.where(blind, 0.0, row_max), torch.where(blind, 1.0, row_sum)
        if cfg.align_do:
            share = mantissa_share(do.abs().amax(-1) / row_sum)
            row_max, row_sum = row_max - torch.log2(share), row_sum * share
        folded = do / row_sum[..., None] if cfg.fold_l_into_do else do
        do8 = fake_quantize(folded, cfg.do_block) if cfg.round_do else folded
        delta = ((do8 if cfg.delta_from == "quantized" else folded) * out).sum(-1)
        if dlse is not None:
            delta = delta - (dlse / row_sum if cfg.fold_l_into_do else dlse)
        return cls(do, do8, row_max, row_sum, delta)

    def of(self, sequence: int) -> "_RowSide":
        """One sequence of a batch."""
        return _RowSide(*(getattr(self, f.name)[sequence] for f in fields(self)))


def mantissa_share(x: Tensor) -> Tensor:
    """f in (1/2, 1] for which ``x / f`` is a power of two, of FP32 ``x >= 0``; 1 where x is 0, subnormal or not finite."""
    mantissa, _ = torch.frexp(x)  # in [1/2, 1)
    usable = torch.isfinite(x) & (x >= torch.finfo(torch.float32).tiny) & (mantissa > 0.5)
    return torch.where(usable, mantissa, 1.0)


def _row_sides(p: AttentionProblem, result: ForwardResult, dout: Tensor, dlse: Tensor | None) -> Callable[[Span], _RowSide]:
    """The pre-pass of each sequence; equal query counts of moderate size go through at once (rows and blocks never cross sequences)."""
    cfg = p.config

    def make(lead: tuple[int, ...], rows: slice) -> _RowSide:
        def by_head(x: Tensor) -> Tensor:
            return x[rows].to(torch.float32).reshape(*lead, -1, *x.shape[1:]).transpose(-3, -2).contiguous()

        def per_row(x: Tensor) -> Tensor:
            return x[:, rows].to(torch.float32).reshape(p.heads, *lead, -1).movedim(0, -2).contiguous()

        shift = None if dlse is None else per_row(dlse)
        return _RowSide.make(cfg, by_head(dout), by_head(result.centred_out), per_row(result.row_max), per_row(result.row_sum), shift)

    if p.offsets_q is None and p.batch > 1 and 0 < dout.numel() <= WHOLE_ELEMENTS:
        whole = make((p.batch,), slice(0, p.rows))
        return lambda span: whole.of(span.index)
    return lambda span: make((), slice(span.r0, span.r1))


def _gradients(
    p: AttentionProblem, span: Span, q: Tensor, k: Tensor, v: Tensor, side: _RowSide, dq: Tensor, dk: Tensor, dv: Tensor, needs: tuple
) -> None:
    """Fill ``dq`` and add to ``dk``, ``dv`` (all by query head) for one sequence."""
    cfg = p.config
    assert p.softmax_scale is not None
    block = (QUERY_TILE, cfg.key_tile) if cfg.ds_block is None else cfg.ds_block
    bias = score_bias(p, span, k)
    mean = None if p.q_mean is None else (p.q_mean if p.shared_q else p.q_mean[span.index])
    step = 0 if block[0] == 0 else -(-128 // block[0]) * block[0]
    exponent = _fp16_exponent(p, side, k, v, span) if cfg.dq_dtype == torch.float16 else None
    for piece in chunks(p.heads, span.queries, span.keys, p.causal, step):
        h, i, seen = slice(piece.h0, piece.h1), slice(piece.i0, piece.i1), slice(0, piece.padded)
        if piece.keys == 0:
            continue
        s = scores(q, k, p.softmax_scale * LOG2_E, bias, piece, span.queries, span.keys, p.causal)
        prob = s.sub_(side.row_max[h, i, None]).exp2_()
        if not cfg.fold_l_into_do:
            prob.div_(side.row_sum[h, i, None])
        do8 = side.do8[h, i]
        ds = torch.bmm(do8, v[h, seen].transpose(1, 2)).sub_(side.delta[h, i, None]).mul_(prob)
        if needs[2]:
            _add_dv(p, span, prob, side.row_sum[h, i], do8, dv[h, seen])
        if cfg.round_ds:
            ds = fake_quantize(ds, block)
        if needs[1]:
            dk[h, seen] += torch.bmm(ds.transpose(1, 2), q[h, i]).mul_(p.softmax_scale)
            if mean is not None:
                dk[h, seen] += ds.sum(1)[..., None] * (mean[h, None, :] * p.softmax_scale)
        if needs[0]:
            dq[h, i] = _dq(p, ds, k[h, seen], piece, exponent)


def _add_dv(p: AttentionProblem, span: Span, prob: Tensor, row_sum: Tensor, do8: Tensor, dv: Tensor) -> None:
    """``dv += P8^T @ dO8``. Overwrites ``prob``."""
    cfg = p.config
    if p.centred_backward:
        prob.sub_((row_sum / span.keys)[..., None])
    unit = 1.0
    if cfg.round_p:
        prob = codes_to_float(prob.mul_(2.0**cfg.p_scale_backward_log2))
        unit = CODE_UNIT * 2.0**-cfg.p_scale_backward_log2
    dv += torch.bmm(prob.transpose(1, 2), do8).mul_(unit)


def _dq(p: AttentionProblem, ds: Tensor, k: Tensor, piece: Chunk, exponent: Tensor | None) -> Tensor:
    """dQ of one chunk, FP32: one product, or FP16 partials per key tile added in FP16 in key order."""
    assert p.softmax_scale is not None
    if exponent is None:
        return torch.bmm(ds, k).mul_(p.softmax_scale)
    scale = exponent[piece.h0 : piece.h1, piece.i0 : piece.i1, None]
    total = torch.zeros(ds.shape[0], ds.shape[1], k.shape[2], dtype=torch.float16, device=ds.device)
    factor = torch.ldexp(torch.full_like(scale, p.softmax_scale, dtype=torch.float32), scale)
    for lo in range(0, piece.padded, p.config.key_tile):
        part = slice(lo, min(lo + p.config.key_tile, piece.padded))
        total = total + (torch.bmm(ds[..., part], k[:, part]) * factor).to(torch.float16)
    return torch.ldexp(total.to(torch.float32), -scale)


def _fp16_exponent(p: AttentionProblem, side: _RowSide, k: Tensor, v: Tensor, span: Span) -> Tensor:
    """Power of two on FP16 partials of dQ, int32 ``[H, Q]``.

    ``|dQ| <= 2 * |dO_q| * max|v_j| * max|k| * softmax_scale`` because the absolute row sum of dS is at most ``2 |dO_q| max|v_j|``, and
    the same holds for every sum of key tiles. One number a sequence and head; causal rows take the maxima over the keys that they see.
    """
    cfg = p.config
    assert p.softmax_scale is not None
    norm = torch.linalg.vector_norm(side.do, dim=-1)
    shape = norm.shape
    if isinstance(cfg.dq_scale, int):
        return torch.full(shape, cfg.dq_scale, dtype=torch.int32, device=k.device)
    v_norm, k_max = torch.linalg.vector_norm(v, dim=-1), k.abs().amax(-1)
    if p.causal:
        last = torch.arange(span.queries, device=k.device) + (span.keys - span.queries)
        column = last.clamp(min=0)
        reach = norm * v_norm.cummax(-1).values[:, column] * k_max.cummax(-1).values[:, column]
    else:
        reach = (norm.amax(-1) * v_norm.amax(-1) * k_max.amax(-1))[:, None].expand(shape)
    bound = 2.0 * abs(p.softmax_scale) * reach
    _, exponent = torch.frexp(bound)
    usable = torch.isfinite(bound) & (bound > 0)
    return torch.where(usable, (FP16_ROOM_LOG2 - exponent).clamp(-100, 100), 0).to(torch.int32)
