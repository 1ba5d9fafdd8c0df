"""What the backward's pre- and post-pass know of queries, the same on every architecture: where they lie, their statistics, powers of two.

With l and m of the forward, K keys, and s = p_scale_log2, a query's statistics begin with::

    a = s - m              so that exp2(S + a) is P * 2^s   (and - log2 l where dO is not divided by l)
    c = (l / K) * 2^s      what is subtracted from P in dV, 0 unless centred
"""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import bits_of, log2
from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import fake


class QueryUnit(NamedTuple):
    """A run of queries that owns a workspace row. ``sequence``; ``start``, ``queries``: of that sequence; ``index``: which run of it."""

    sequence: Int32
    start: Int32
    queries: Int32
    index: Int32


@cute.jit
def query_unit(jagged: cutlass.Constexpr, offsets_q, batch: Int32, row: Int32, size: cutlass.Constexpr, queries: Int32):
    """The unit of ``size`` queries that owns workspace row ``row`` (tile rule). ``queries``: of every sequence where not ``jagged``."""
    if const_expr(jagged):
        b = find_sequence(offsets_q, batch, row, size)
        start = Int32(offsets_q[b])
        length, index = Int32(offsets_q[b + 1]) - start, row - (start // size + b)
    else:
        per = (queries + (size - 1)) // size
        b, index = row // per, row % per
        start, length = b * queries, queries
    return QueryUnit(b, start, length, index)


def first_unit(jagged: bool, unit: QueryUnit, size: int):
    """Workspace row of the first unit of ``size`` queries of a unit's sequence."""
    if jagged:
        return unit.start // size + unit.sequence
    return unit.sequence * ((unit.queries + (size - 1)) // size)


@cute.jit
def eight_columns(x: cute.Tensor, row: Int32, head: Int32, column: Int32):
    """Eight columns of a row of ``x [rows, heads, D]`` from ``column``, one load, as they are."""
    at = x.iterator + cute.crd2idx((row, head, column), x.layout)
    pointer = cute.make_ptr(x.element_type, at.toint(), cute.AddressSpace.gmem, assumed_align=16)
    values = cute.make_rmem_tensor(8, x.element_type)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(8)), values)
    return values


def statistics(fold_l: bool, centred: bool, total, m, keys, shift, unit):
    """``(a, c)`` of a query that sees ``keys`` keys. ``fold_l``: dO is divided by l (``total``). ``shift``: s; ``unit``: 2^s."""
    a = shift - m
    if not fold_l:
        a = a - log2(total)
    return a, total / Float32(keys) * unit if centred else Float32(0.0)


def power_of_sums(head_dim: int, softmax_scale, largest, exponents, norms: bool = False):
    """Exponent of the power of two under which no FP16 sum of dQ, nor any partial sum of key tiles, can pass 2^15.

    ``|dQ| <= 2 max|dO_q v_j| max|k| softmax_scale``, because the absolute row sum of dS is at most ``2 max|dO_q v_j|``. Here with
    ``|dO_q v_j| <= |dO_q|_1 max|v|``, ``|v| <= 448 * 2^e_v`` and ``|k| <= 448 * 2^e_k`` (``exponents``: e_k + e_v): no pass over K and V.
    ``norms``: ``largest`` is 2^-8 of the largest L1 norm; else it is the largest magnitude (bits of the FP32 both), D of which bound it.
    """
    above = lambda bits: (bits >> 23) - 126  # noqa: E731  2^above is more than the value
    rows = 8 if norms else int(math.log2(head_dim))
    bound = 1 + above(bits_of(softmax_scale)) + rows + above(largest) + exponents + 2 * 9
    return cutlass.max(cutlass.min(15 - bound, 100), -100)


def fake_results(heads: Any, rows: Any, head_dim: int, out_fp32: bool, has_dlse: bool) -> list[Any]:
    """Descriptions of what a pre-pass reads of the forward: dout bf16 ``[R, H, D]``; out bf16 or fp32, the same shape; row_max, row_sum,
    dlse (or None) fp32 ``[H, R]``."""
    shape = (rows, heads, head_dim)
    per_row = lambda: fake("float32", (heads, rows), align=4)  # noqa: E731
    return [
        fake("bfloat16", shape),
        fake("float32" if out_fp32 else "bfloat16", shape),
        per_row(),
        per_row(),
        per_row() if has_dlse else None,
    ]
