"""How far sums of E4M3 products and sums in FP16 may be off on Hopper's tensor cores, element by element.

An instruction adds 32 products to a running sum. It aligns all of them to the largest exponent among them and cuts each off 13 places
below it; what comes out is cut off again, to 14 significant bits (DeepSeek-V3, 2024, section 3.3.2; Xie et al., "MMA-Sim", 2025, which also
has the exponent of a product: the sum of its factors', a subnormal one's counted as the smallest normal one's; the emulator's
``wgmma.narrow_product`` sums so, and its sums are an H200's bit for bit). So each summand that is not zero loses less than a unit of 2^-13
of that power of two, and the result less than 2^-13 of its own. The bound adds these up; the running sum it takes for the exact one and
all that may have been lost of it.

In ``gemm_quantize`` sums of a chunk start from zero, and are then scaled, exactly, and added in FP32; where the weight allows it
(``GemmSpec.halves``) all of a row's are taken in one FP16 sum, rounded to nearest once an instruction.

A sum in FP16 of products of FP16 is rounded to nearest once an instruction, of 16 products; what is cut off before is under 2^-20 of the
largest.
"""

import torch
from torch import Tensor

from fused_ops.gemm_quantize.config import LARGEST_ROW, GemmSpec, spec_of
from fused_ops.operands import flatten
from lp_fa4.mx import MXTensor, decode_scale, expand_scale

TERMS = 32
"""Products of an instruction."""
PLACES = 13
"""Binary places behind the largest exponent."""
SMALLEST = 2.0**-6
"""E4M3's smallest normal number."""
ROWS = 4096
"""Elements at a time: K products each."""


def sum_error(x: MXTensor, w: MXTensor | tuple[MXTensor, MXTensor], offsets: Tensor | None, at: Tensor) -> Tensor:
    """Bound of the error of the elements ``at`` (int64 ``[S, 2]``: rows of x, rows of w) of ``x @ w^T``, FP64 ``[S]``."""
    parts = [w] if isinstance(w, MXTensor) else [w[1], w[0]]  # in the order in which they are added up
    left, right = flatten(x), flatten(w)
    spec, _ = spec_of(left.payloads, left.blocks, right.payloads, right.blocks, (0, 32), offsets is None, right.scales)
    assert spec is not None
    scales = [_spread(part, offsets if part is x else None) for part in (x, *parts)]
    narrow = _narrow_columns(spec, x, parts)
    out = torch.zeros(len(at), dtype=torch.float64, device=at.device)
    for some in torch.arange(len(at), device=at.device).split(ROWS):
        rows, columns = at[some, 0], at[some, 1]
        half = narrow[columns]
        out[some[~half]] = _bound(spec.chunk, spec.one_scale, x, parts, scales, rows[~half], columns[~half])
        out[some[half]] = _narrow_bound(spec.stage_columns, x, parts, scales, rows[half], columns[half])
    return out


def _narrow_columns(spec: GemmSpec, x: MXTensor, parts: list[MXTensor]) -> Tensor:
    """Columns of the product whose CTA may take sums in FP16, bool ``[N]``."""
    rows = sum(part.codes.view(torch.float8_e4m3fn).double().abs().sum(dim=1) for part in parts)
    if not spec.halves or not bool((x.scale_bytes == x.scale_bytes[0, 0]).all()):
        return torch.zeros_like(rows, dtype=torch.bool)
    tiles = torch.nn.functional.pad(rows, (0, -len(rows) % spec.column_tile)).unflatten(0, (-1, spec.column_tile))
    return (tiles.amax(dim=1) <= LARGEST_ROW).repeat_interleave(spec.column_tile)[: len(rows)]


def _spread(part: MXTensor, offsets: Tensor | None) -> Tensor:
    """A scale for each element of ``part``, FP32."""
    return expand_scale(decode_scale(part.scale_bytes), part.shape, part.block, offsets, 0).expand(part.shape)


def _instruction(u: Tensor, v: Tensor, running: Tensor, lost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An instruction's products ``u * v`` (FP64 ``[S, TERMS]``) added to ``running``: they, the sum, and ``lost`` with what is cut off as
    they are aligned; how the sum itself is rounded is the caller's."""
    terms = u * v
    powers = torch.where(terms == 0, 0.0, _power(u.abs().clamp(min=SMALLEST)) * _power(v.abs().clamp(min=SMALLEST)))
    before = running.abs() + lost
    unit = torch.maximum(powers.amax(dim=1), _power(before)) * 2.0**-PLACES
    return terms, running + terms.sum(dim=1), lost + unit * ((terms != 0).sum(dim=1) + (before != 0))


def _bound(chunk: int, together: bool, x: MXTensor, parts: list[MXTensor], scales: list[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """:func:`sum_error` of ``rows`` and ``columns``. ``parts``: of w, in the order in which they are added up, ``together`` in one sum."""
    a = x.codes[rows].view(torch.float8_e4m3fn).double()
    (count, contracted), promotions = a.shape, 0
    error, magnitude = a.new_zeros(count), a.new_zeros(count)
    for first in range(0, contracted, chunk):
        running, lost = a.new_zeros(count), a.new_zeros(count)
        for p, part in enumerate(parts):
            b = part.codes[columns].view(torch.float8_e4m3fn).double()
            factor = scales[0][rows, first].double() * scales[1 + p][columns, first].double()
            if not together:
                running, lost = torch.zeros_like(running), torch.zeros_like(lost)
            for k in range(first, min(first + chunk, contracted), TERMS):
                terms, running, lost = _instruction(a[:, k : k + TERMS], b[:, k : k + TERMS], running, lost)
                lost = lost + _power(running.abs() + lost) * 2.0**-PLACES
                magnitude = magnitude + terms.abs().sum(dim=1) * factor
            if not together or p == len(parts) - 1:
                error, promotions = error + lost * factor, promotions + 1
    return error + promotions * 2.0**-24 * magnitude


def _narrow_bound(stage: int, x: MXTensor, parts: list[MXTensor], scales: list[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """:func:`sum_error` of sums in FP16: of a ``stage`` of K, the parts one after the other."""
    a = x.codes[rows].view(torch.float8_e4m3fn).double()
    b = [part.codes[columns].view(torch.float8_e4m3fn).double() for part in parts]
    running, lost = a.new_zeros(a.shape[0]), a.new_zeros(a.shape[0])
    for first in range(0, a.shape[1], stage):
        for part in b:
            for k in range(first, min(first + stage, a.shape[1]), TERMS):
                _, running, lost = _instruction(a[:, k : k + TERMS], part[:, k : k + TERMS], running, lost)
                lost = lost + _power(running.abs() + lost).clamp(min=2.0**-14) * 2.0**-11
    return lost * (scales[0][rows, 0].double() * scales[1][columns, 0].double())


def _power(x: Tensor) -> Tensor:
    """Largest power of two that is no more than ``x``; 0 for 0."""
    return torch.where(x == 0, 0.0, torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1))


def half_sum_error(x: Tensor, w: Tensor, at: Tensor) -> Tensor:
    """:func:`sum_error` of ``x @ w^T`` summed in FP16; x and w hold FP16 numbers."""
    parts = []
    for some in at.split(ROWS):
        terms = (x[some[:, 0]].double() * w[some[:, 1]].double()).unflatten(1, (-1, 16))
        running = terms.sum(dim=2).cumsum(dim=1).abs()
        lost = torch.zeros_like(running[:, 0])
        for i in range(terms.shape[1]):
            cut = 2.0**-20 * torch.maximum(terms[:, i].abs().amax(dim=1), running[:, max(i - 1, 0)] + lost)
            lost = lost + cut
            lost = lost + 2.0**-11 * _power(running[:, i] + lost).clamp(min=2.0**-14)
        parts.append(lost)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=at.device)
