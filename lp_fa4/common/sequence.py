"""Where a sequence's rows lie, computed on the device (the group and tile rules of ``lp_fa4.mx.layout``).

Unit ``i`` of ``size`` tokens of sequence ``b`` owns row ``offsets[b] // size + b + i`` of a grid with
``tokens // size + batch`` rows. A kernel with one CTA per row of that grid needs the inverse: which sequence owns a
row. :func:`find_sequence` answers with a warp-wide search: 2 rounds of loads for 1,000 sequences, 4 for a million.

A copy whose token axis must be aligned (the transposed operands) places sequence ``b`` at position
``32 * (offsets[b] // 32 + b)`` and owns the positions up to the next sequence's: its *region*. Every tile of 128
tokens of the tile rule covers its part of the region, so that grid writes every position exactly once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

GROUP = 32
TILE = 128


@cute.jit
def find_sequence(offsets: cute.Tensor, batch: Int32, row: Int32, size: cutlass.Constexpr) -> Int32:
    """The largest ``b < batch`` with ``offsets[b] // size + b <= row``. Called by whole warps with a uniform ``row``."""
    lane = cute.arch.lane_idx()
    low, count = Int32(0), batch
    while count > 1:
        step = (count + 31) // 32
        probe = low + lane * step
        inside = False
        if probe < low + count:
            inside = Int32(offsets[probe]) // size + probe <= row
        hits = cute.arch.popc(cute.arch.vote_ballot_sync(inside))
        first = low + (hits - 1) * step
        count = cutlass.min(step, low + count - first)
        low = first
    return low


@cute.jit
def region_groups(offsets: cute.Tensor, batch: Int32, b: Int32, rows: Int32) -> Int32:
    """32-token groups of sequence ``b``'s region; the last sequence's reaches to the grid's end (``rows`` groups)."""
    here = Int32(offsets[b]) // GROUP + b
    end = rows
    if b + 1 < batch:
        end = Int32(offsets[b + 1]) // GROUP + b + 1
    return end - here
