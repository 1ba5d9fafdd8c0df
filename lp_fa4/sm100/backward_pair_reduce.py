"""Reduction warps of the two-CTA backward: a CTA's half of dQ of every query tile, summed over the pair's 256 keys, to its sums in global
memory; dV and dK of its keys at an item's end.

Tensor memory holds 64 rows of dQ twice: lanes 0 to 63 the first half of the columns, 64 to 127 the second. So a warp owns 32 queries and
half of the head dimension. Images and their bulk reductions are those of ``backward_reduce``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from lp_fa4.sm100.atoms import load_columns
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, DQ_COLUMNS, STAT_POWER, TILE
from lp_fa4.sm100.backward_pair_sync import arrive_leader, cta_rank
from lp_fa4.sm100.backward_reduce import send
from lp_fa4.sm100.backward_store import store, store_zeros
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import wait_tensor


@cute.jit
def reduce_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, thread: Int32):
    """Serve this CTA's half of the pair's items. ``thread``: 0..127, a lane of tensor memory."""
    rank = cta_rank()
    spec, bar = kernel.spec, kernel.barriers
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0]) // 2
    cluster = Int32(cute.arch.block_idx()[0]) // 2
    index = cluster
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    size = 2 if spec.dq_half else 4
    pieces = spec.head_dim // DQ_COLUMNS // 2
    piece_bytes = 32 * DQ_COLUMNS * size
    staging = Int32(shared.staging.iterator.toint()) + warp * (pieces * piece_bytes)
    image = TILE * spec.head_dim * size
    block = 2 * rank + warp % 2  # of 32 queries
    heads = args.kv_heads * spec.group
    turn, tiles = Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, 2 * n)
            if const_expr(spec.deterministic):
                if lane == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.sync_warp()
            for s in cutlass.range(item.steps, unroll=1):
                head, tile = query_step(spec, item, s)
                row = item.tile_row + tile
                factor = args.factors[row, head, block * BLOCK_FACTORS + 3]
                if const_expr(spec.dq_half):
                    factor = factor * args.stats[row, head, STAT_POWER * TILE + block * 32 + lane]
                if const_expr(spec.shared):
                    row = cluster % args.replicas * args.dq_rows + tile
                place = (Int64(row) * heads + head) * image + block * (image // 4) + warp // 2 * (pieces * piece_bytes)
                wait_tensor(bars + bar.dq_full, (turn + s) & 1)
                for c in cutlass.range_constexpr(pieces):
                    values = load_columns(tmem, kernel.plan["dQ"].start + c * DQ_COLUMNS, DQ_COLUMNS, thread)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(c == pieces - 1):
                        arrive_leader(bars + bar.dq_read)
                    send(spec, values, factor, staging + c * piece_bytes, args.dq + place + c * piece_bytes, lane, pieces - 1)
            turn += item.steps
            own = item._replace(row=item.row + rank * TILE)
            if item.steps > 0:
                wait_tensor(bars + bar.dkv_full, tiles & 1)
                live = own.row + thread < own.keys
                dv_factor, dk_factor = args.results[item.sequence, item.head, 0], args.results[item.sequence, item.head, 1]
                store(kernel, args.dv, args.dv_scale, args, tmem, "dV", dv_factor, own, thread, live, bars + bar.dv_read)
                store(kernel, args.dk, args.dk_scale, args, tmem, "dK", dk_factor, own, thread, live, bars + bar.dk_read)
                tiles += 1
            else:
                store_zeros(kernel, args, own, thread)
        index += step
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(0)
