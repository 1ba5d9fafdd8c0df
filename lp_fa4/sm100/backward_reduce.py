"""Reduction warps of the backward: dQ of every query tile from tensor memory to its sums in global memory, by bulk reductions; dV and dK at
a key tile's end (``backward_store``).

Four warps; a thread owns a query's row. A warp stages 32 rows by 32 columns and sends them with one bulk reduction. Every such piece of a
tile has a buffer of its own, so tensor memory is drained without a wait for reductions of the same tile, and warps never wait for one
another. The sums lie as tile images (``dq_place``), which the post-pass turns into rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from lp_fa4.common.numbers import effect, f16x2
from lp_fa4.sm100.atoms import load_columns
from lp_fa4.sm100.backward_config import DQ_COLUMNS, STAT_POWER, TILE
from lp_fa4.sm100.backward_store import store_gradients, store_zeros
from lp_fa4.sm100.backward_work import dq_row, fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import arrive_tensor, wait_tensor


def staging_floats(spec) -> int:
    """32-bit words of staging: a query tile's dQ."""
    return TILE * spec.head_dim // (2 if spec.dq_half else 1)


@cute.jit
def reduce_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, thread: Int32):
    """Serve this CTA's key tiles. ``thread``: 0..127, the row of a query tile.

    An image holds, for each of 4 x 32 rows, chunks of 16 bytes (four columns, eight in FP16): a chunk of a row, then that of the next of
    its 32 rows, then the next chunk.
    """
    spec, bar = kernel.spec, kernel.barriers
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0])
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    size = 2 if spec.dq_half else 4
    piece_bytes = 32 * DQ_COLUMNS * size
    staging = Int32(shared.staging.iterator.toint()) + warp * (spec.head_dim // DQ_COLUMNS * piece_bytes)
    image = TILE * spec.head_dim * size
    heads = args.kv_heads * spec.group
    turn, tiles = Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, n)
            if const_expr(spec.deterministic):
                if lane == 0:
                    cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.sync_warp()
            for s in cutlass.range(item.steps, unroll=1):
                head, tile = query_step(spec, item, s)
                place = Int64(dq_row(spec, args, item, tile)) * heads + head
                target = args.dq + place * image + Int64(warp * (image // 4))
                factor = None
                if const_expr(spec.dq_half):
                    factor = args.dk_factor * args.stats[item.tile_row + tile, head, STAT_POWER * TILE + thread]
                wait_tensor(bars + bar.dq_full, (turn + s) & 1)
                for c in cutlass.range_constexpr(spec.head_dim // DQ_COLUMNS):
                    values = load_columns(tmem, kernel.plan["dQ"].start + c * DQ_COLUMNS, DQ_COLUMNS, thread)
                    cute.arch.fence_view_async_tmem_load()
                    if const_expr(c == spec.head_dim // DQ_COLUMNS - 1):
                        arrive_tensor(bars + bar.dq_read)
                    send(spec, values, factor, staging + c * piece_bytes, target + c * piece_bytes, lane, spec.head_dim // DQ_COLUMNS - 1)
            turn += item.steps
            if item.steps > 0:
                wait_tensor(bars + bar.dkv_full, tiles & 1)
                store_gradients(kernel, args, bars, tmem, item, thread)
                tiles += 1
            else:
                store_zeros(kernel, args, item, thread)
        index += step
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def send(spec: cutlass.Constexpr, values, factor, buffer, target, lane, pending: cutlass.Constexpr):
    """Add a warp's piece of dQ, 32 rows of 32 columns, times ``factor`` (None: 1), to ``target`` through ``buffer``, which the reduction
    before the ``pending`` last ones read."""
    add = "add.noftz.f16" if spec.dq_half else "add.f32"
    if lane == 0:
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
    cute.arch.sync_warp()
    if const_expr(factor is not None):
        for i in cutlass.range_constexpr(DQ_COLUMNS):
            values[i] = values[i] * factor
    if const_expr(spec.dq_half):
        for i in cutlass.range_constexpr(DQ_COLUMNS // 8):
            four = [f16x2(values[8 * i + 2 * j], values[8 * i + 2 * j + 1]) for j in range(4)]
            effect([buffer + (512 * i + 16 * lane), *four], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    else:
        for i in cutlass.range_constexpr(DQ_COLUMNS // 4):
            four = [values[4 * i + j] for j in range(4)]
            effect([buffer + (512 * i + 16 * lane), *four], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f")
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if lane == 0:
        size = Int32(32 * DQ_COLUMNS * (2 if spec.dq_half else 4))
        effect([target, buffer, size], f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{add} [$0], [$1], $2;", "l,r,r")
        cute.arch.cp_async_bulk_commit_group()
