"""Load warp of a CTA of a pair: its half of every operand by TMA, statistics and factors of the query tile by bulk copies.

Q, dO and K serve two products and a CTA brings another half to each, so each comes twice. Every load of an operand counts at the leader's
barrier, whichever CTA it fills. Payloads are addressed at their jagged offset and may reach into the next sequence. Where tokens are
contracted, a code of another row meets a 0 of dS: that is 0 unless the code is a NaN, and past the last sequence it may be one. So a tile
that reaches past its sequence's end is written by this warp instead, with zeros there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from lp_fa4.common.numbers import effect
from lp_fa4.sm100.atoms import sides_of_copy
from lp_fa4.sm100.backward_atoms import BLOCKS
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, PAIR, TILE
from lp_fa4.sm100.backward_load import load_stats
from lp_fa4.sm100.backward_pair_sync import LEADER, cta_rank
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import drain, wait


@cute.jit
def load_role(kernel: cutlass.Constexpr, args, shared, bars):
    """Walk this pair's items: K and V (two buffers), then query tile by query tile."""
    rank = cta_rank()
    spec, stages = kernel.spec, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0]) // 2
    index = Int32(cute.arch.block_idx()[0]) // 2
    turn, tiles = Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, 2 * n)
            if item.steps > 0:
                load_keys(kernel, args, shared, bars, item, n, tiles, rank)
                for s in cutlass.range(item.steps, unroll=1):
                    head, tile = query_step(spec, item, s)
                    stage, free = (turn + s) % stages, ((turn + s) // stages & 1) ^ 1
                    load_queries(kernel, args, shared, bars, item, head, tile, stage, free, rank)
                turn += item.steps
                tiles += 1
        index += step
    drain(bars + kernel.barriers.kv_empty, tiles, 2)
    drain(bars + kernel.barriers.q_empty, turn, stages)
    drain(bars + kernel.barriers.do_empty, turn, stages)


@cute.jit
def load_keys(kernel: cutlass.Constexpr, args, shared, bars, item, pair, tiles, rank):
    """K and V of this CTA's 128 keys, and its half of the columns of K of all 256."""
    bar, atoms, dim = kernel.barriers, kernel.atoms, kernel.spec.head_dim
    buffer = tiles & 1
    full = bars + bar.kv_full + buffer
    wait(bars + bar.kv_empty + buffer, (tiles >> 1 & 1) ^ 1)
    scores, queries = atoms.scores().get_slice(rank), atoms.query_gradient().get_slice(rank)
    for atom, tensor, target in ((args.tma_k, args.k, shared.k), (args.tma_v, args.v, shared.v)):
        rows = cute.domain_offset((item.first_key, 0), tensor[None, None, item.head])
        load_tile(atom, scores.partition_A(cute.local_tile(rows, (PAIR, dim), (None, 0))), pair, target, buffer, full)
    size = Int32(2 * TILE * dim)
    left = item.keys - item.row
    if left < PAIR:
        first = (item.first_key + item.row, item.head, rank * (dim // 2))
        write_tile(args.k_codes, first, shared.kt_bytes, buffer, PAIR, left, dim // 2)
    else:
        columns = cute.domain_offset((0, item.first_key), args.kt[None, None, item.head])
        load_tile(args.tma_kt, queries.partition_B(cute.local_tile(columns, (dim, PAIR), (0, None))), pair, shared.kt, buffer, full)
        size += TILE * dim
    arrive_full(full, size)


@cute.jit
def load_queries(kernel: cutlass.Constexpr, args, shared, bars, item, head, tile, stage, free, rank):
    """Q, statistics and dO of one query tile into ``stage``: 64 rows and half of the columns of each."""
    spec, bar, atoms, dim = kernel.spec, kernel.barriers, kernel.atoms, kernel.spec.head_dim
    scores, keys = atoms.scores().get_slice(rank), atoms.key_gradient().get_slice(rank)
    left = item.queries - tile * TILE
    full = bars + bar.q_full + stage
    wait(bars + bar.q_empty + stage, free)
    rows = cute.domain_offset((item.first_query, 0), args.q[None, None, head])
    load_tile(args.tma_q, scores.partition_B(cute.local_tile(rows, (TILE, dim), (None, 0))), tile, shared.q, stage, full)
    size = Int32(TILE // 2 * dim)
    partial = left < TILE
    if const_expr(spec.shared):  # past the last row TMA writes zeros
        partial = False
    if partial:
        first = (item.first_query + tile * TILE, head, rank * (dim // 2))
        write_tile(args.q_codes, first, shared.qt_bytes, stage, TILE, left, dim // 2)
    else:
        columns = cute.domain_offset((0, item.first_query), args.qt[None, None, head])
        load_tile(args.tma_qt, keys.partition_B(cute.local_tile(columns, (dim, TILE), (0, None))), tile, shared.qt, stage, full)
        size += TILE // 2 * dim
    arrive_full(full, size)

    full = bars + bar.stat_full + stage
    wait(bars + bar.stat_empty + stage, free)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * (spec.stats * TILE + BLOCKS * BLOCK_FACTORS))
    load_stats(args.stats, item.tile_row + tile, head, shared.stats, stage, full, spec.stats * TILE)
    load_stats(args.factors, item.tile_row + tile, head, shared.factors, stage, full, BLOCKS * BLOCK_FACTORS)

    full = bars + bar.do_full + stage
    wait(bars + bar.do_empty + stage, free)
    rows = cute.domain_offset((item.first_row, 0), args.do[None, None, head])
    load_tile(args.tma_do, scores.partition_B(cute.local_tile(rows, (TILE, dim), (None, 0))), tile, shared.do, stage, full)
    columns = cute.domain_offset((0, item.first_row), args.dot[None, None, head])
    load_tile(args.tma_dot, keys.partition_B(cute.local_tile(columns, (dim, TILE), (0, None))), tile, shared.dot, stage, full)
    arrive_full(full, TILE * dim)


@cute.jit
def arrive_full(barrier, size):
    """This CTA's arrival at the leader's barrier: ``size`` bytes of its loads count there. They may have come already: a phase without its
    arrivals stays open."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size, LEADER)


@cute.jit
def write_tile(source, first, target, stage, rows: cutlass.Constexpr, left, width: cutlass.Constexpr):
    """Half rows of a tile from global to shared memory, zeros from row ``left``. ``first``: token, head and column of its corner. A half
    row is 64 bytes (32 at head dimension 64), its 16-byte chunks swizzled as operands of that width are."""
    token, head, column = first
    chunks = width // 16
    base = Int32(target.toint()) + stage * (rows * width)
    for i in cutlass.range(cute.arch.lane_idx(), rows * chunks, 32, unroll=4):
        row, chunk = i // chunks, i % chunks
        words = cute.make_rmem_tensor(4, Int32)
        words.fill(0)
        if row < left:
            at = source.iterator + cute.crd2idx((Int64(token + row), head, column + 16 * chunk), source.layout)
            pointer = cute.make_ptr(Int32, at.toint(), cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
        offset = row * width + 16 * chunk
        offset = offset ^ (offset >> 3 & (width - 16))
        four = [words[j] for j in range(4)]
        effect([base + offset, *four], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    cute.arch.fence_proxy("async.shared", space="cta")


def load_tile(atom, tiles, index, target, stage, barrier):
    """TMA of tile ``index`` of this CTA's part of ``tiles``."""
    there, here = sides_of_copy(atom, target, tiles)
    cute.copy(atom, here[None, index], there[None, stage], tma_bar_ptr=barrier)
