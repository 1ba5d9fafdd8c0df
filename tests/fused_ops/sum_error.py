"""How far sums of E4M3 products and sums in FP16 may be off on Hopper's tensor cores, element by element.

An instruction adds 32 products to a running sum. It aligns all of them to the largest exponent among them and cuts each off 13 places
below it; what comes out is cut off again, to 14 significant bits (DeepSeek-V3, 2024, section 3.3.2; Xie et al., "MMA-Sim", 2025, which also
has the exponent of a product: the sum of its factors', a subnormal one's counted as the smallest normal one's; the emulator's
``wgmma.narrow_product`` sums so, and its sums are an H200's bit for bit). So each summand that is not zero loses less than a unit of 2^-13
of that power of two, and the result less than 2^-13 of its own. The bound adds these up; the running sum it takes for the exact one and
all that may have been lost of it.

In ``gemm_quantize`` sums of a chunk start from zero, and are then scaled, exactly, and added in FP32.

A sum in FP16 of products of FP16 is rounded to nearest once an instruction, of 16 products; what is cut off before is under 2^-20 of the
largest.
"""

import torch
from torch import Tensor

from fused_ops.gemm_quantize.config import spec_of
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
    out = [_bound(spec.chunk, spec.one_scale, x, parts, scales, some[:, 0], some[:, 1]) for some in at.split(ROWS)]
    return torch.cat(out) if out else torch.zeros(0, dtype=torch.float64, device=at.device)


def _spread(part: MXTensor, offsets: Tensor | None) -> Tensor:
    """A scale for each element of ``part``, FP32."""
    return expand_scale(decode_scale(part.scale_bytes), part.shape, part.block, offsets, 0).expand(part.shape)


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
                u, v = a[:, k : k + TERMS], b[:, k : k + TERMS]
                terms = u * v
                powers = torch.where(terms == 0, 0.0, _power(u.abs().clamp(min=SMALLEST)) * _power(v.abs().clamp(min=SMALLEST)))
                before = running.abs() + lost
                unit = torch.maximum(powers.amax(dim=1), _power(before)) * 2.0**-PLACES
                running = running + terms.sum(dim=1)
                lost = lost + unit * ((terms != 0).sum(dim=1) + (before != 0))
                lost = lost + _power(running.abs() + lost) * 2.0**-PLACES
                magnitude = magnitude + terms.abs().sum(dim=1) * factor
            if not together or p == len(parts) - 1:
                error, promotions = error + lost * factor, promotions + 1
    return error + promotions * 2.0**-24 * magnitude


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
