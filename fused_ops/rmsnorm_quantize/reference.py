"""RMSNorm + quantize: the definition, in plain PyTorch.

    rstd = 1 / sqrt(mean(x^2) + eps)                                  FP32
    xf   = (x * rstd) * weight                                        FP32, through gamma: no BF16 in between
    xn   = E4M3 blocks of xf                                          one rounding

The centred form also takes ``mean_b``, the mean of at most 64 evenly spaced rows of ``xf`` in sequence ``b``, away before
any rounding. A constant per sequence is free downstream: it shifts every score of a row alike (softmax ignores it), and
attention's rows sum to one, so the values' mean comes back by an addition. What remains to be rounded is smaller.

(The variant of many model libraries, which casts to BF16 before it multiplies by gamma, is a different function: its codes differ.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor, quantize_mx, scale_rows, sequence_ids

MEAN_ROWS = 64
"""Rows of a sequence that its centre is taken from: enough to catch a common mean, cheap enough to read twice."""


class NormOutput(NamedTuple):
    """What the operation returns; ``mean``, ``total`` ``[B, C]`` and ``normed`` are empty unless asked for."""

    xn: MXTensor
    rstd: Tensor
    mean: Tensor
    total: Tensor
    normed: Tensor


def sampled_mean(xf: Tensor, offsets: Tensor) -> Tensor:
    """Mean of ``n = min(64, K)`` rows ``start + i * K // n`` of each sequence: ``[T, C]`` to ``[B, C]``; 0 where K is 0."""
    start = offsets[:-1].to(torch.int64)
    length = offsets[1:].to(torch.int64) - start
    count = length.clamp(max=MEAN_ROWS)
    total = xf.new_zeros(start.shape[0], xf.shape[1])
    if xf.shape[0] == 0:
        return total
    for first in range(0, MEAN_ROWS, 16):  # a few rows of every sequence at a time: many short sequences must not cost 64 rows each
        step = torch.arange(first, first + 16, device=xf.device)
        rows = start[:, None] + step * length[:, None] // count.clamp(min=1)[:, None]
        used = step < count[:, None]
        total += torch.where(used[..., None], xf[torch.where(used, rows, 0)], 0.0).sum(dim=1)
    return total / count.clamp(min=1)[:, None]


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum of the rows of each sequence, FP32: ``[T, C]`` to ``[B, C]``. One sequence's NaN stays its own."""
    if offsets.shape[0] == 1:
        return x.new_zeros(0, x.shape[1])
    # `unsafe` skips a check that reads the offsets on the host and forbids rows past offsets[-1].
    return torch.segment_reduce(x, "sum", offsets=offsets.to(torch.int64), axis=0, unsafe=True, initial=0.0)


def per_token(rows: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """Spread one row per sequence ``[B, C]`` over its tokens ``[tokens, C]``; 0 past ``offsets[-1]``."""
    return torch.cat([rows, torch.zeros_like(rows[:1]) if rows.shape[0] else rows.new_zeros(1, *rows.shape[1:])])[
        sequence_ids(offsets, tokens)
    ]


def transposed(codes: Tensor, offsets: Tensor | None, heads: int) -> Tensor:
    """Codes ``[T, C]`` with tokens innermost, as Hopper's attention reads them: uint8 ``[H, D, 32 * rows]``, rows by ``scale_rows``.

    Sequence ``b`` starts at position ``32 * (offsets[b] // 32 + b)``; in each run of 16, position ``4 t + i`` holds token
    ``2 t + (i & 1) + 8 (i >> 1)``, which is how an accumulator's registers hold the other operand. Positions without a token are 0.
    """
    tokens, columns = codes.shape
    rows = torch.arange(tokens, device=codes.device)
    if offsets is None:
        within, first, used = rows, torch.zeros_like(rows), rows >= 0
    else:
        sequence = sequence_ids(offsets, tokens)
        used = sequence < offsets.shape[0] - 1
        start = offsets.to(torch.int64)[sequence.clamp(max=offsets.shape[0] - 1)]
        within, first = rows - start, 32 * (start // 32 + sequence)
    run, token = within // 16 * 16, within % 16
    place = first + run + 4 * (token % 8 // 2) + token % 2 + 2 * (token // 8)
    out = codes.new_zeros(32 * scale_rows(tokens, offsets) + 1, columns)  # the last one takes what belongs to no sequence
    out[torch.where(used, place, out.shape[0] - 1)] = codes
    return out[:-1].t().reshape(heads, columns // heads, -1).contiguous()


def inside(offsets: Tensor | None, tokens: int) -> Tensor | None:
    """Bool ``[tokens, 1]``: rows before ``offsets[-1]``; None when every row counts."""
    if offsets is None:
        return None
    return (torch.arange(tokens, device=offsets.device) < offsets[-1])[:, None]


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offsets: Tensor | None,
    block: tuple[int, int],
    exponent: Tensor | None,
    center: bool,
    keep: bool,
) -> NormOutput:
    """See the module's docstring. ``x [..., T, C]``; ``center`` needs 2-D ``x`` (``offsets=None``: one sequence); ``keep``
    returns ``BF16`` of the normed (centred) rows, the operand of a BF16 projection. Rows past ``offsets[-1]`` are not read."""
    xf = x.to(torch.float32).contiguous()  # strided rows would add up in another order
    valid = inside(offsets, x.shape[0])
    if valid is not None:
        xf = torch.where(valid, xf, 0.0)
    rstd = torch.rsqrt(xf.square().mean(dim=-1) + eps)
    xf = xf * rstd[..., None] * weight.to(torch.float32)
    if valid is not None:
        rstd = torch.where(valid[:, 0], rstd, 0.0)
    mean = total = normed = x.new_empty(0, dtype=torch.float32)
    if center:
        bounds = torch.tensor([0, x.shape[0]], device=x.device) if offsets is None else offsets
        mean = sampled_mean(xf, bounds)
        xf = xf - per_token(mean, bounds, x.shape[0])
        total = segment_sum(xf, bounds)
    if keep:
        normed = xf.to(torch.bfloat16)
    xn = quantize_mx(xf, block, offsets, token_dim=0 if offsets is not None else -2, exponent=exponent)
    return NormOutput(xn, rstd, mean, total, normed)
