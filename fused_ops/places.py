"""Where a 128-token tile of the tile rule lies, found tile by tile by a warp that walks them in order; and bulk copies of rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from lp_fa4.common.numbers import inline_ptx
from lp_fa4.common.sequence import GROUP, TILE, find_sequence


@cute.jit
def first_sequence(dense: cutlass.Constexpr, offsets: cute.Tensor, tile: Int32) -> Int32:
    """Sequence of the first tile, by search. Called by a whole warp."""
    if cutlass.const_expr(dense):
        return Int32(0)
    return find_sequence(offsets, Int32(offsets.shape[0]) - 1, tile, TILE)


@cute.jit
def place(dense: cutlass.Constexpr, offsets: cute.Tensor, tokens: Int32, tile: Int32, near: Int32):
    """(first token, end, limit, row, region, sequence) of a tile. Called by a whole warp.

    Rows before ``end`` hold values, rows before ``limit`` are written; ``row``: the tile's first row of scales, ``region``: how many rows
    from there on are its sequence's. ``near``: a sequence that is not past the tile's, close before it: one load serves up to 32
    sequences on. ``dense``: one sequence of ``tokens`` rows.
    """
    if cutlass.const_expr(dense):
        first = TILE * tile
        return first, tokens, tokens, first // GROUP, cute.ceil_div(tokens, GROUP) - first // GROUP, Int32(0)
    batch, lane = Int32(offsets.shape[0]) - 1, cute.arch.lane_idx()
    hits, b, begin, end = Int32(32), near - 31, Int32(0), Int32(0)
    while hits == 32:
        b = b + 31
        bound = Int32(offsets[cutlass.min(b + lane, batch)])
        inside = (b + lane < batch) & (bound // TILE + b + lane <= tile)
        hits = cute.arch.popc(cute.arch.vote_ballot_sync(inside))
        begin = cute.arch.shuffle_sync(bound, cutlass.max(hits - 1, 0))
        end = cute.arch.shuffle_sync(bound, cutlass.min(hits, 31))
    b = b + hits - 1
    first = TILE * (tile - (begin // TILE + b))
    limit, grid_end = end, end // GROUP + b + 1
    if b == batch - 1:
        limit, grid_end = tokens, tokens // GROUP + batch  # slack past the last sequence: written, never read
    row = begin // GROUP + b + first // GROUP
    return begin + first, end, limit, row, grid_end - row, b


def bulk_copy(target, source, count, barrier):
    """Start a copy of ``count`` bytes to shared memory; one thread calls it. ``target``, ``barrier``: shared addresses; ``source``: a
    global one. Addresses and ``count`` are multiples of 16."""
    inline_ptx(
        None,
        [Int32(target), source, Int32(count), Int32(barrier)],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        side_effects=True,
    )
