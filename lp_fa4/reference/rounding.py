"""E4M3 rounding of tensors that attention makes on the fly (P, dO, dS), and the operands of one sequence.

Rounding to E4M3 and back is the inner cost of the reference. The way back goes through FP16 bits: an E4M3 code shifted into FP16's exponent
and mantissa fields reads as the value times 2^-8, subnormals included, so no table and no slow FP8-to-float conversion is needed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lp_fa4.mx import GROUP, MXTensor, decode_scale, inverse_scale
from lp_fa4.problem import AttentionProblem

CODE_UNIT = 256.0
"""``codes_to_float`` returns values divided by this."""

CHUNK_ELEMENTS = 1 << 21
"""Scores computed at once. A constant, so that a sequence's result never depends on its batch mates."""


def codes_to_float(x: Tensor) -> Tensor:
    """Round FP32 ``x`` (at most 448 in magnitude, no NaN) to E4M3; FP32 values **divided by 256** come back."""
    wide = x.to(torch.float8_e4m3fn).view(torch.int8).to(torch.int16)
    # sign-extended code << 7: sign at bit 15 (and a copy at bit 14, cleared), exponent at 13..10, mantissa at 9..7
    return wide.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16).to(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value in FP32, saturating at 448; NaN stays NaN."""
    rounded = codes_to_float(x.clamp(-448.0, 448.0)).mul_(CODE_UNIT)
    return torch.where(torch.isnan(x), x, rounded)


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of the last two axes, ``[..., ceil(R/br), ceil(C/bc)]``; 0 in ``block`` means the whole axis."""
    rows, columns = x.shape[-2:]
    br, bc = block[0] or max(rows, 1), block[1] or max(columns, 1)
    x = x.abs()
    if columns % bc:
        x = torch.nn.functional.pad(x, (0, bc - columns % bc))
    x = x.unflatten(-1, (-1, bc)).amax(-1)
    if rows % br:
        x = torch.nn.functional.pad(x, (0, 0, 0, br - rows % br))
    return x.unflatten(-2, (-1, br)).amax(-2)


@functools.cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """By a maximum's exponent field, rounded up past 448's mantissa: ``2**-e``, and ``2**e * CODE_UNIT``, both from the byte rules."""
    byte = (torch.arange(257) - 8).clamp(0, 247).to(torch.uint8)
    return inverse_scale(byte).to(device), (decode_scale(byte) * CODE_UNIT).to(device)


_ABOVE_448 = 0x7FFFFF - 0x600000  # added to the bits of a maximum: carries into the exponent if its mantissa is above 448's, 1.75


def fake_quantize(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Quantize FP32 ``[..., R, C]`` to MXFP8 in blocks of the last two axes and back, by the byte rules of ``lp_fa4.mx``.

    A block with a NaN or infinity comes back NaN.
    """
    rows, columns = x.shape[-2:]
    if x.numel() == 0:
        return x
    br, bc = block[0] or rows, block[1] or columns
    maxima = block_amax(x, block)
    up, down = _factors(x.device)
    field = (maxima.view(torch.int32) + _ABOVE_448).bitwise_right_shift_(23).bitwise_and_(0x1FF)
    up, down = up[field], down[field] + maxima * 0.0  # NaN where the block is not finite

    def spread(factor: Tensor) -> Tensor:  # [..., R, blocks along C, 1]
        return factor.repeat_interleave(br, dim=-2)[..., :rows, :].unsqueeze(-1)

    up, down = spread(up), spread(down)
    if columns % bc == 0:
        return codes_to_float(x.unflatten(-1, (-1, bc)) * up).mul_(down).flatten(-2)
    whole = columns // bc * bc
    out = torch.empty_like(x)
    for lo, hi, width, b0, b1 in ((0, whole, bc, 0, whole // bc), (whole, columns, columns - whole, whole // bc, maxima.shape[-1])):
        if lo < hi:
            scaled = x[..., lo:hi].unflatten(-1, (-1, width)) * up[..., b0:b1, :]
            out[..., lo:hi].unflatten(-1, (-1, width)).copy_(codes_to_float(scaled).mul_(down[..., b0:b1, :]))
    return out


WHOLE_ELEMENTS = 1 << 24
"""Operands up to this size are dequantized at once, larger ones sequence by sequence: the same values, less time or less memory."""


class Operand:
    """FP32 values of a jagged, dense-single or static operand, one sequence at a time."""

    def __init__(self, mx: MXTensor) -> None:
        self.mx = mx
        self.values = mx.dequantize() if mx.payload.numel() <= WHOLE_ELEMENTS else None

    def rows(self, start: int, end: int, sequence: int) -> Tensor:
        """``[H, end - start, D]``, contiguous."""
        values = self._piece(start, end, sequence) if self.values is None else self.values[start:end]
        return values.transpose(0, 1).contiguous()

    def _piece(self, start: int, end: int, sequence: int) -> Tensor:
        mx = self.mx
        scale = mx.scale_bytes
        if mx.is_static:
            factor = decode_scale(scale[:1])
        else:
            first = 0 if mx.offsets is None else start // GROUP + sequence
            factor = decode_scale(scale[first : first + -(-(end - start) // GROUP)]).repeat_interleave(GROUP, dim=0)[: end - start]
        if factor.shape[-1] != 1:
            factor = factor.repeat_interleave(mx.block[1], dim=-1)
        return mx.payload[start:end].to(torch.float32) * factor


def pad_keys(x: Tensor) -> Tensor:
    """Zero rows up to a multiple of 32 on axis -2."""
    short = -x.shape[-2] % GROUP
    return torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x


@dataclass(frozen=True)
class Span:
    """Rows of one sequence: queries ``q0:q1`` of q, output rows ``r0:r1``, keys ``k0:k1``."""

    index: int
    q0: int
    q1: int
    r0: int
    r1: int
    k0: int
    k1: int

    @property
    def queries(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return self.k1 - self.k0


def spans(problem: AttentionProblem) -> Iterator[Span]:
    """Each sequence's rows. Reads the offsets on the host: this is the reference."""
    offsets_k = [0, problem.tokens] if problem.offsets_k is None else problem.offsets_k.tolist()
    offsets_q = None if problem.offsets_q is None else problem.offsets_q.tolist()
    dense = problem.queries
    for b in range(problem.batch):
        if offsets_q is not None:
            q0, q1 = offsets_q[b], offsets_q[b + 1]
            r0, r1 = q0, q1
        else:
            assert dense is not None
            r0, r1 = b * dense, (b + 1) * dense
            q0, q1 = (0, dense) if problem.shared_q else (r0, r1)
        yield Span(b, q0, q1, r0, r1, offsets_k[b], offsets_k[b + 1])


@dataclass(frozen=True)
class Chunk:
    """Heads ``h0:h1``, queries ``i0:i1`` and the keys ``0:keys`` (padded to ``padded``) that those queries can see."""

    h0: int
    h1: int
    i0: int
    i1: int
    keys: int
    padded: int


def chunks(heads: int, queries: int, keys: int, causal: bool, step: int = 128) -> Iterator[Chunk]:
    """Cut a sequence into pieces of about ``CHUNK_ELEMENTS`` scores; a function of the sequence's own shape alone. ``step``: rows that stay
    together (a multiple of every block of queries), 0 for all."""
    padded = -(-keys // GROUP) * GROUP
    rows = min(queries, step) if step else queries
    per = max(1, min(heads, CHUNK_ELEMENTS // max(rows * padded, 1)))
    if step:
        rows = max(step, CHUNK_ELEMENTS // max(per * padded, 1) // step * step)
    for h0 in range(0, heads, per):
        for i0 in range(0, queries, max(rows, 1)):
            i1 = min(i0 + rows, queries)
            seen = min(keys, max(0, i1 + keys - queries)) if causal else keys
            yield Chunk(h0, min(h0 + per, heads), i0, i1, seen, -(-seen // GROUP) * GROUP)


def scores(q: Tensor, k: Tensor, alpha: float, bias: Tensor | None, piece: Chunk, queries: int, keys: int, causal: bool) -> Tensor:
    """``alpha * q @ k^T`` of one chunk, FP32 ``[heads, rows, padded keys]``, -inf where a key is a pad or hidden by the causal mask."""
    qc, kc = q[piece.h0 : piece.h1, piece.i0 : piece.i1], k[piece.h0 : piece.h1, : piece.padded]
    s = torch.empty(qc.shape[0], qc.shape[1], piece.padded, dtype=torch.float32, device=q.device)
    s = torch.baddbmm(s, qc, kc.transpose(1, 2), beta=0, alpha=alpha)
    if bias is not None:
        s += bias[piece.h0 : piece.h1, None, : piece.padded]
    s[..., piece.keys :] = -torch.inf
    if causal:
        column = torch.arange(piece.padded, device=q.device)
        last = torch.arange(piece.i0, piece.i1, device=q.device)[:, None] + (keys - queries)
        s.masked_fill_(column > last, -torch.inf)
    return s
