"""Rows of a query tile shared by threads, eight columns each: sums and maxima over a row by as few shuffles as there can be."""

import math

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import absolute, inline_ptx
from lp_fa4.common.rows import fma
from lp_fa4.sm90.backward_layout import QUERY_TILE


class SharedRows:
    """``lanes``: threads of a row; ``rows``: rows that ``threads`` have a part of at once."""

    def __init__(self, head_dim: int, threads: int):
        self.lanes = head_dim // 8
        self.rows = threads // self.lanes

    @property
    def parts(self) -> int:
        """Rows of a tile that a thread has a part of."""
        return QUERY_TILE // self.rows

    def own_part(self):
        """Which of these it gets the whole of (:meth:`of_rows`): the lowest bits of its lane, the other way round."""
        tid, _, _ = cute.arch.thread_idx()
        bits, own = int(math.log2(self.parts)), Int32(0)
        for bit in range(bits):
            own = own | (((tid >> bit) & 1) << (bits - 1 - bit))
        return own

    def of_rows(self, values, join):
        """``join`` over a row's threads, for the row of :meth:`own_part`, of one value for each of a thread's rows: exchanges halve the
        rows that a thread has, so that four rows take five or six shuffles instead of twelve or sixteen."""
        tid, _, _ = cute.arch.thread_idx()
        for bit in range(int(math.log2(self.lanes))):
            half = len(values) // 2
            if half:
                upper = (tid >> bit) & 1
                kept = [self.pick(upper, values[half + i], values[i]) for i in range(half)]
                sent = [self.pick(upper, values[i], values[half + i]) for i in range(half)]
            else:
                kept = sent = values
            values = [join(a, cute.arch.shuffle_sync_bfly(b, offset=1 << bit)) for a, b in zip(kept, sent, strict=True)]
        return values[0]

    @cute.jit
    def pick(self, upper, a, b):
        """a if ``upper``, else b."""
        return a if upper == 1 else b

    def from_row(self, value, part: int):
        """A value of the thread of this row that looks after the row of a part."""
        tid, _, _ = cute.arch.thread_idx()
        bits = int(math.log2(self.parts))
        place = sum(((part >> (bits - 1 - bit)) & 1) << bit for bit in range(bits))
        return cute.arch.shuffle_sync(value, (tid % 32 // self.lanes) * self.lanes + place)


def norm_of(values):
    """Magnitudes of eight BF16 values times 2^-8 (so that no finite row's sum is infinite), added up; a NaN wins."""
    x = [absolute(Float32(values[i])) for i in range(8)]
    parts = [x[0] * 2.0**-8, x[1] * 2.0**-8]
    for i in range(2, 8):
        parts[i % 2] = fma(x[i], Float32(2.0**-8), parts[i % 2])
    return parts[0] + parts[1]


def widest_pair(values):
    """Largest magnitudes of eight BF16 values at even and at odd places; a NaN wins."""
    words = cute.recast_tensor(values, Int32)
    pair = words[0] & 0x7FFF7FFF
    for i in range(1, 4):
        pair = larger_pair(pair, words[i] & 0x7FFF7FFF)
    return pair


def larger_pair(a, b):
    """The larger of two packed BF16 each; NaN wins."""
    return Int32(inline_ptx(T.i32(), [a, b], "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r"))
