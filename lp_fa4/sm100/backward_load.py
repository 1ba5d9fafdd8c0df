"""Load warp of the backward: TMA of K, V, Q and dO, bulk copies of their scales (two atoms of what serves two products) and of statistics.

Payloads are addressed at their jagged offset, scales at the 128-row tile rule: a tile's payload may reach into the next sequence, its
scales never do. K and Q are contracted over tokens too, where a code of another row meets a 0 of dS: that is 0 unless the code is a NaN,
and past the last sequence it may be one. So the rows of a tile's last, partial block are overwritten with zeros before it is handed over.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.sm100.atoms import SF_BYTES, clear_block, load_scales, sides_of_copy
from lp_fa4.sm100.backward_config import TILE
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import arrive, drain, wait


@cute.jit
def load_role(kernel: cutlass.Constexpr, args, shared, bars):
    """Walk this CTA's key tiles: K and V (two buffers), then query tile by query tile."""
    spec, stages = kernel.spec, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0])
    turn, tiles, landed = Int32(0), Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, n)
            if item.steps > 0:
                landed = load_keys(kernel, args, shared, bars, item, tiles, landed)
                for s in cutlass.range(item.steps, unroll=1):
                    head, tile = query_step(spec, item, s)
                    stage, free = (turn + s) % stages, ((turn + s) // stages & 1) ^ 1
                    landed = load_queries(kernel, args, shared, bars, item, head, tile, stage, free, landed)
                turn += item.steps
                tiles += 1
        index += step
    drain(bars + kernel.barriers.kv_empty, tiles, 2)
    drain(bars + kernel.barriers.q_empty, turn, stages)
    drain(bars + kernel.barriers.do_empty, turn, stages)


@cute.jit
def load_keys(kernel: cutlass.Constexpr, args, shared, bars, item, tiles, landed):
    """K and V of a key tile, K's scales along both axes, V's along the head dimension."""
    bar, dim = kernel.barriers, kernel.spec.head_dim
    buffer = tiles & 1
    left = item.keys - item.row
    partial = is_partial(left)
    full = bars + (Int32(bar.landing) if partial else bar.kv_full + buffer)
    wait(bars + bar.kv_empty + buffer, (tiles >> 1 & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * TILE * dim + 3 * SF_BYTES)
    mma = kernel.atoms.scores().get_slice(0)
    for atom, tensor, target in ((args.tma_k, args.k, shared.k), (args.tma_v, args.v, shared.v)):
        rows = cute.domain_offset((item.first_key, 0), tensor[None, None, item.head])
        source = mma.partition_A(cute.local_tile(rows, (TILE, dim), (None, 0)))
        there, here = sides_of_copy(atom, target, source)
        cute.copy(atom, here[None, item.tile], there[None, buffer], tma_bar_ptr=full)
    tile = item.first_key // TILE + item.sequence + item.tile
    for scales, target in ((args.sf_k, shared.sf_k), (args.sf_kt, shared.sf_kt), (args.sf_v, shared.sf_v)):
        load_scales(scales, tile, item.head, target, buffer, full)
    if partial:
        clear_rows(kernel, shared.k, buffer, left, bars + bar.landing, landed, bars + bar.kv_full + buffer)
        landed += 1
    return landed


@cute.jit
def load_queries(kernel: cutlass.Constexpr, args, shared, bars, item, head, tile, stage, free, landed):
    """Q, statistics and dO of one query tile into ``stage``."""
    spec, bar, dim = kernel.spec, kernel.barriers, kernel.spec.head_dim
    mma = kernel.atoms.scores().get_slice(0)
    left = item.queries - tile * TILE
    partial = is_partial(left)
    if const_expr(spec.shared):  # past the last row TMA writes zeros
        partial = False
    full = bars + (Int32(bar.landing) if partial else bar.q_full + stage)
    wait(bars + bar.q_empty + stage, free)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * dim + 2 * SF_BYTES)
    rows = cute.domain_offset((item.first_query, 0), args.q[None, None, head])
    there, here = sides_of_copy(args.tma_q, shared.q, mma.partition_B(cute.local_tile(rows, (TILE, dim), (None, 0))))
    cute.copy(args.tma_q, here[None, tile], there[None, stage], tma_bar_ptr=full)
    row = tile
    if const_expr(not spec.shared):
        row = item.first_query // TILE + item.sequence + tile
    load_scales(args.sf_q, row, head, shared.sf_q, stage, full)
    load_scales(args.sf_qt, row, head, shared.sf_qt, stage, full)
    if partial:
        clear_rows(kernel, shared.q, stage, left, bars + bar.landing, landed, bars + bar.q_full + stage)
        landed += 1

    full = bars + bar.stat_full + stage
    wait(bars + bar.stat_empty + stage, free)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * spec.stats * TILE)
    load_stats(args.stats, item.tile_row + tile, head, shared.stats, stage, full, spec.stats * TILE)

    full = bars + bar.do_full + stage
    wait(bars + bar.do_empty + stage, free)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * dim + 2 * SF_BYTES)
    rows = cute.domain_offset((item.first_row, 0), args.do[None, None, head])
    there, here = sides_of_copy(args.tma_do, shared.do, mma.partition_B(cute.local_tile(rows, (TILE, dim), (None, 0))))
    cute.copy(args.tma_do, here[None, tile], there[None, stage], tma_bar_ptr=full)
    load_scales(args.sf_do, item.tile_row + tile, head, shared.sf_do, stage, full)
    load_scales(args.sf_dot, item.tile_row + tile, head, shared.sf_dot, stage, full)
    return landed


@cute.jit
def is_partial(left: Int32):
    """Whether a tile with ``left`` rows to the sequence's end has a block of 32 of which some rows are someone else's."""
    return left < TILE and left % 32 > 0


@cute.jit
def clear_rows(kernel: cutlass.Constexpr, tile, stage, left, landing, landed, full):
    """Wait until a tile is there, clear its rows from ``left`` to the end of their block of 32, and hand it over."""
    wait(landing, landed & 1)
    clear_block(tile, stage, left, kernel.spec.head_dim)
    arrive(full)


@cute.jit
def load_stats(source, row, head, target, stage, barrier, count: cutlass.Constexpr):
    """Bulk copy of a query tile's statistics, ``count`` values."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=count * 32)
    start = (source.iterator + cute.crd2idx((row, head, 0), source.layout)).align(16)
    there = cute.make_tensor((target.iterator + stage * count).align(16), cute.make_layout(count))
    with cute.arch.elect_one():
        cute.copy(atom, cute.make_tensor(start, cute.make_layout(count)), there, mbar_ptr=barrier)
