"""Attention forward at the kernels' rounding points.

The running maximum is a short recursion over key tiles on ``[heads, queries]``; everything else is one pass over all tiles of a sequence,
with each tile's P taken against the maximum that was current at that tile and rescaled afterwards. That is the same arithmetic as the
kernel's loop ``O = O * alpha + P @ V`` up to the order of FP32 additions.
"""

import torch
from torch import Tensor

from lp_fa4.config import LN_2, LOG2_E, AttentionConfig
from lp_fa4.mx import GROUP
from lp_fa4.problem import AttentionProblem, ForwardResult
from lp_fa4.reference.rounding import CODE_UNIT, Chunk, Operand, Span, chunks, codes_to_float, fake_quantize, pad_keys, scores, spans


def forward(problem: AttentionProblem) -> ForwardResult:
    """Attention of every sequence. See :class:`ForwardResult` for shapes and domains, :class:`AttentionConfig` for the formulas.

    Each sequence is computed by itself from its own rows: its result is bitwise the same whatever else the batch holds.
    """
    p, cfg = problem, problem.config
    rows, heads, dim, device = p.rows, p.heads, p.head_dim, p.device
    out = torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device=device)
    saved = torch.zeros(rows, heads, dim, dtype=cfg.save_out_dtype, device=device)
    row_max = torch.full((heads, rows), -torch.inf, dtype=torch.float32, device=device)
    row_sum = torch.zeros(heads, rows, dtype=torch.float32, device=device)
    operands = [Operand(x) for x in (p.q, p.k, p.v)]
    shared = operands[0].rows(0, p.q.shape[0], 0) if p.shared_q else None
    for span in spans(p):
        if span.queries == 0 or span.keys == 0:
            continue
        q = shared if shared is not None else operands[0].rows(span.q0, span.q1, span.index)
        k = pad_keys(operands[1].rows(span.k0, span.k1, span.index)).repeat_interleave(p.group, 0)
        v = pad_keys(operands[2].rows(span.k0, span.k1, span.index)).repeat_interleave(p.group, 0)
        v_sum = p.v_sum[span.index].repeat_interleave(p.group, 0) if p.centred and p.v_sum is not None else None
        bias = score_bias(p, span, k)
        centred = torch.empty(heads, span.queries, dim, dtype=torch.float32, device=device)
        for piece in chunks(heads, span.queries, span.keys, p.causal):
            h, i = slice(piece.h0, piece.h1), slice(piece.i0, piece.i1)
            r = slice(span.r0 + piece.i0, span.r0 + piece.i1)
            if piece.keys == 0:  # causal rows before the first key
                centred[h, i] = 0.0
                continue
            s = scores(q, k, _alpha(p), bias, piece, span.queries, span.keys, p.causal)
            sums = None if v_sum is None else v_sum[h]
            centred[h, i], row_max[h, r], row_sum[h, r] = _attend(s, v[h, : piece.padded], sums, piece, cfg)
        result = centred.transpose(0, 1)
        saved[span.r0 : span.r1] = result
        if p.v_mean is not None:
            mean = p.v_mean[span.index].repeat_interleave(p.group, 0)
            sees = torch.isneginf(row_max[:, span.r0 : span.r1]).logical_not().t()[..., None]
            result = torch.where(sees, result + mean, 0.0)
        out[span.r0 : span.r1] = result
    lse = (row_max + torch.log2(row_sum)) * LN_2
    return ForwardResult(out, lse, saved, row_max, row_sum)


def _alpha(p: AttentionProblem) -> float:
    assert p.softmax_scale is not None
    return p.softmax_scale * LOG2_E


def score_bias(p: AttentionProblem, span: Span, k: Tensor) -> Tensor | None:
    """Scores of ``q_mean``, FP32 ``[H, padded keys]`` in the log2 domain; ``k [H, padded keys, D]``."""
    if p.q_mean is None:
        return None
    if p.mean_scores is not None:
        own = p.mean_scores[:, span.k0 : span.k1] * _alpha(p)
        return torch.nn.functional.pad(own, (0, k.shape[1] - span.keys))
    mean = p.q_mean if p.shared_q else p.q_mean[span.index]
    return torch.bmm(k, mean[:, :, None])[..., 0] * _alpha(p)


def tiles(x: Tensor, tile: int) -> list[tuple[Tensor, slice]]:
    """The last axis as views: ``[..., n, tile]`` of the whole tiles, ``[..., 1, rest]`` of a partial last one; with their tile indices."""
    whole = x.shape[-1] // tile
    views = []
    if whole:
        views.append((x[..., : whole * tile].unflatten(-1, (whole, tile)), slice(0, whole)))
    if x.shape[-1] % tile:
        views.append((x[..., whole * tile :].unsqueeze(-2), slice(whole, whole + 1)))
    return views


def _reference_maxima(s: Tensor, cfg: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Per key tile the maximum in force ``[h, r, n]``; the exact row maximum ``[h, r]``; the first tile's own maximum is its start."""
    parts = tiles(s, cfg.key_tile)
    tile_max = torch.cat([view.amax(-1) for view, _ in parts], -1)
    exact = tile_max.amax(-1)
    candidate = tile_max
    if cfg.softmax_stabilizer:
        several = torch.cat([(view == tile_max[..., t, None]).sum(-1) > 1 for view, t in parts], -1)
        candidate = tile_max + 0.5 * several
        exact = exact + 0.5 * ((s == exact[..., None]).sum(-1) > 1)
    current = candidate[..., 0]
    in_force = [current]
    for t in range(1, tile_max.shape[-1]):
        current = torch.where(tile_max[..., t] > current + cfg.rescale_threshold, candidate[..., t], current)
        in_force.append(current)
    maxima = torch.stack(in_force, -1)
    return maxima, exact, torch.isneginf(exact)


def _attend(s: Tensor, v: Tensor, v_sum: Tensor | None, piece: Chunk, cfg: AttentionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: centred output ``[h, r, D]``, exact row maximum and row sum ``[h, r]``. Overwrites ``s``."""
    m, exact, blind = _reference_maxima(s, cfg)
    m = torch.where(blind[..., None], 0.0, m)  # rows that see no key: every p is exp2(-inf) = 0
    last = m[..., -1]
    carry = torch.exp2(m - last[..., None])  # product of the rescalings after each tile
    c_tiles = None
    if v_sum is not None:
        first = min(cfg.key_tile, piece.keys)
        c_tiles = torch.exp2(s[..., :first].mean(-1) - m[..., 0])[..., None]
        if m.shape[-1] > 1:
            c_tiles = c_tiles * torch.exp2(m[..., :1] - m)
    partial = []
    rescaled = bool((carry != 1.0).any())
    for view, t in tiles(s, cfg.key_tile):
        view.sub_(m[..., t, None]).exp2_()
        partial.append(view.sum(-1))
        if c_tiles is not None:
            view.sub_(c_tiles[..., t, None])
    row_sum = (torch.cat(partial, -1) * carry).sum(-1)
    unit = 1.0
    if cfg.round_p and cfg.p_scale == "constant":
        s = codes_to_float(s.mul_(2.0**cfg.p_scale_log2))
        unit = CODE_UNIT * 2.0**-cfg.p_scale_log2
    elif cfg.round_p:
        s = fake_quantize(s, (1, GROUP))
    if rescaled:
        for view, t in tiles(s, cfg.key_tile):
            view.mul_(carry[..., t, None])
    acc = torch.bmm(s, v)
    if unit != 1.0:
        acc.mul_(unit)
    if c_tiles is not None and v_sum is not None:
        acc += c_tiles[..., -1, None] * v_sum[:, None, :]
    acc = torch.where(blind[..., None], 0.0, acc / row_sum[..., None])
    exact_sum = torch.where(blind, 0.0, row_sum * torch.exp2(last - exact))
    return acc, exact, exact_sum
