"""Warps of the forward that turn V's tiles, where it has no copy with tokens innermost: three of the producer warpgroup, or a warpgroup.

A tile ``[128 keys, D]`` becomes a stage of V^T ``[D, 128]``, each run of 16 keys in the accumulator's order, in blocks of 16 keys x 32
columns: a 16-bit transposing ``ldmatrix``, four byte permutations and a ``stmatrix``. A word that was loaded holds two columns, of which
the upper half of the lanes stores the second first: so the eight rows that go out together lie in all eight chunks of the swizzle.
A warp takes whole columns of blocks, whose addresses differ by constants, and its share of the blocks of the columns that are left.

The loop is written out for each pair of a buffer and a stage: then places and barriers are constants, of two base addresses a block each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from lp_fa4.common.matrices import load_matrices
from lp_fa4.common.numbers import effect, pick
from lp_fa4.sm90.backward_ops import arrive
from lp_fa4.sm90.forward_config import KEY_TILE, PLAIN_TILES

BARRIER = 10
RUNS = KEY_TILE // 16
IN_FLIGHT = 3
"""Blocks loaded before the first is stored."""


@cute.jit
def turn_values(spec: cutlass.Constexpr, s, bars, warp: Int32):
    """Loop of one of the warps; ends with the producer's record of -1 valid keys. ``warp``: its number among them."""
    head_dim, warps = spec.head_dim, spec.turning_warps
    tile_bytes = KEY_TILE * head_dim
    column = warp if const_expr(own_columns(head_dim, warps) > 0) else Int32(0)
    plain = Int32(s.plain.iterator.toint())
    source, target = plain + loaded_from(column, head_dim), Int32(s.v.iterator.toint()) + stored_to(column)
    valids, selector = s.valid, selector_of()
    phase, empty = Int32(0), Int32(1)
    cute.arch.mbarrier_wait(bars.plain_full, phase)
    valid = valids[0]
    while valid >= 0:
        for n in cutlass.range_constexpr(PLAIN_TILES * spec.stages):
            if valid >= 0:
                buffer, stage = n % PLAIN_TILES, n % spec.stages
                if valid < KEY_TILE:
                    clear_rows(plain + buffer * tile_bytes, valid, warp, head_dim, warps)
                cute.arch.mbarrier_wait(bars.v_empty + stage, empty)
                turn_tile(head_dim, source + buffer * tile_bytes, target, stage * tile_bytes, column, warp, selector, warps)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                arrive(bars.v_full + stage)
                if const_expr(stage == spec.stages - 1):
                    empty = empty ^ 1
                if const_expr(buffer == PLAIN_TILES - 1):
                    phase = phase ^ 1
                following = (buffer + 1) % PLAIN_TILES
                cute.arch.mbarrier_wait(bars.plain_full + following, phase)
                valid = valids[following]


def loaded_from(column, head_dim: int):
    """This lane's byte in a plain tile for ``ldmatrix`` of the block (run 0, ``column``), in the swizzle of its rows."""
    matrix, row = cute.arch.lane_idx() // 8, cute.arch.lane_idx() % 8
    high, low = matrix >> 1, matrix & 1
    return (8 * low + row) * head_dim + (((2 * column + high) ^ (row if head_dim == 128 else row >> 1)) << 4)


def selector_of():
    """What picks a lane's first column from two words of keys ``2t, 2t+1`` and ``8+2t, 8+2t+1``; 0x1111 more or less picks the other."""
    return Int32(0x6420) + 0x1111 * (cute.arch.lane_idx() >> 4)


def stored_to(column):
    """The same in a turned tile for ``stmatrix``."""
    matrix, row = cute.arch.lane_idx() // 8, cute.arch.lane_idx() % 8
    d = 16 * (matrix >> 1) + 2 * row + ((matrix & 1) ^ (row >> 2))
    return (32 * column + d) * KEY_TILE + ((d & 7) << 4)


def own_columns(head_dim: int, warps: int) -> int:
    """Columns of blocks that are a warp's as a whole."""
    return head_dim // 32 // warps * warps


@cute.jit
def clear_rows(tile: Int32, valid: Int32, warp: Int32, head_dim: cutlass.Constexpr, warps: cutlass.Constexpr):
    """Zero a plain tile from key ``valid`` on: other sequences' keys, whose NaN codes would meet P = 0. Called by all the warps."""
    zero, chunks = Uint32(0), head_dim // 16
    for i in cutlass.range(valid * chunks + 32 * warp + cute.arch.lane_idx(), KEY_TILE * chunks, 32 * warps, unroll=1):
        effect([tile + 16 * i, zero, zero, zero, zero], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=32 * warps)


@cute.jit
def turn_tile(
    head_dim: cutlass.Constexpr, source: Int32, target: Int32, stage: cutlass.Constexpr, column: Int32, warp: Int32, selector: Int32,
    warps: cutlass.Constexpr,
):  # fmt: skip
    """This warp's blocks of a tile. ``source``, ``target``: this lane's addresses in the first block of ``column``, the latter in the first
    stage; ``stage``: how far on the tile's stage is."""
    last = RUNS // warps * warps
    own = [(source + run * (16 * head_dim), target ^ (run << 4)) for run in range(RUNS)] if own_columns(head_dim, warps) > 0 else []
    turn_blocks(own + shared_blocks(head_dim, source, target, column, warp, range(0, last, warps), warps), selector, stage)
    if const_expr(last < RUNS):  # noqa: SIM102
        if last + warp < RUNS:
            turn_blocks(shared_blocks(head_dim, source, target, column, warp, [last], warps), selector, stage)


def shared_blocks(head_dim: int, source, target, column, warp, first_runs, warps: int):
    """(address to load from, to store to) of the columns that the warps share: this warp's block of as many runs as there are warps."""
    blocks = []
    for other in range(own_columns(head_dim, warps), head_dim // 32):
        start, end = (source ^ ((column ^ other) << 5)) + warp * (16 * head_dim), target + (other - column) * (32 * KEY_TILE)
        blocks += [(start + first * (16 * head_dim), end ^ ((first + warp) << 4)) for first in first_runs]
    return blocks


def turn_blocks(blocks, selector, stage: int):
    """Turn blocks (address to load from, address to store to but for ``stage``), some at a time: one by one the latencies would add up."""
    for begin in range(0, len(blocks), IN_FLIGHT):
        group = blocks[begin : begin + IN_FLIGHT]
        for words, (_, end) in zip([load_matrices(start, transposed=True) for start, _ in group], group, strict=True):
            store_block(words, end, selector, stage)


def store_block(words, address, selector, further: int = 0):
    """The block with its keys innermost, ``further`` bytes behind ``address``: part of the instruction, as a sum ptxas would keep it."""
    turned = [pick(words[i], words[i + 1], x) for i in (0, 2) for x in (selector, selector ^ 0x1111)]
    effect([address, *turned], f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{further}], {{$1, $2, $3, $4}};", "r,r,r,r,r")
