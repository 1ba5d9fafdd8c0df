"""dQ role of the backward's main kernel: one warpgroup that turns K, multiplies and sends dQ away.

Per query tile, with the codes of dS that the computing warpgroups left in shared memory (keys contiguous)::

    dQ = dS K       64 x D, two products of half of D (one of all where the other roles leave registers), each in two steps of 64 keys

The computing warpgroups choose the scale of their codes independently (``backward_compute``), so the sum over one's keys is brought to
the scale of the other's between the steps where they differ: a power of two, exact. A warp's scale differs from that of its warpgroup only
where its values left the range: then the codes are brought to the smallest first.

FP8 wgmma takes K-major operands only: K^T is made here, in shared memory, once a key tile. Sums leave by one bulk reduction a warp and
half, in accumulator order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import bits_of, scale_of_byte
from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE, STAT_DQ, STAT_FLOATS
from lp_fa4.sm90.backward_load import PAIRS_ORDER, RECORD_BYTES, Item, query_span, segment, turn_tiles
from lp_fa4.sm90.backward_ops import (
    advance,
    arrive,
    effect,
    f16x2,
    half2,
    leave_keys,
    reciprocal_power,
    rescale_codes,
    shared_floats,
)
from lp_fa4.sm90.wgmma import issue

BARRIER_DQ = 3
FLT_MAX = 3.4028234663852886e38
WARPS = 4


@cute.jit
def dq_warps(spec, w, dq, stats, powers, kv_heads, replicas, tile_rows):
    """Walk the items as the other roles do. ``w``: barriers, operands, addresses of this warp. ``powers``: of ``dq_grouped``."""
    bars = w.bars
    bid, _, _ = cute.arch.block_idx()
    heads = kv_heads * spec.group
    dq_bytes = spec.dq_tile_bytes
    kv, kv_phase, buffer, ds_phase, more = Int32(0), Int32(0), Int32(0), Int32(0), Int32(1)
    for i in cutlass.range_constexpr(2 if spec.one_segment else 0):  # free from the start (``backward_compute.free_phase``)
        arrive(bars.ds_empty + i)
    while more > 0:
        cute.arch.mbarrier_wait(bars.k_full + kv, kv_phase)
        item = Item(w.record + RECORD_BYTES * kv)
        more = item.b + 1
        if more > 0:
            dq_row = item.qrow
            if const_expr(spec.shared):
                share = item.b if const_expr(spec.dq_half) else bid % replicas
                if const_expr(spec.dq_grouped):
                    share = item.b // replicas
                dq_row = share * tile_rows
            first, chunk, chunks = query_span(spec, item)
            if chunks > 0:
                top = largest_scale(spec, item)
                silent = item.tag if const_expr(spec.instead) else Int32(0)
                cute.arch.barrier(barrier_id=BARRIER_DQ, number_of_threads=32 * WARPS)  # every warp is done with the K^T before
                source = w.k_address + (kv if const_expr(spec.key_stages == 2) else 0) * (KEY_TILE * spec.head_dim)
                left = item.klen - item.n * KEY_TILE
                turn_tiles(((source, w.kt_address),), spec.head_dim, KEY_TILE, PAIRS_ORDER, w.warp, WARPS, left)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=BARRIER_DQ, number_of_threads=32 * WARPS)
                leave_keys(spec, bars)
                arrive(bars.k_empty + kv)
                if const_expr(spec.deterministic):  # those of the next key tile come after those of this one
                    cute.arch.cp_async_bulk_wait_group(0)
                for s in cutlass.range(chunks * spec.group, unroll=1):
                    head, low, count, turn = segment(spec, item, first, chunk, chunks, s)
                    factor = global_float(stats + (Int64(item.qrow + low) * heads + head) * (4 * STAT_FLOATS) + 4 * STAT_DQ) * top
                    limits = Int64(0)
                    if const_expr(spec.dq_grouped):
                        row = 16 * w.warp + w.lane // 4
                        limits = powers + ((Int64(dq_row + low) * heads + head) * QUERY_TILE + row) * 4
                    target = dq + (Int64(dq_row + low) * heads + head) * dq_bytes + Int64(w.warp) * (dq_bytes // 8)
                    for _ in cutlass.range(count, unroll=1):
                        rows = None
                        if const_expr(spec.dq_grouped):  # of the two rows that this lane holds; wanted when the product is there
                            at = limits + Int64(turn) * (heads * (4 * QUERY_TILE))
                            rows = global_float(at), global_float(at + 32)
                        multiply(spec, w, factor, rows, target + Int64(turn) * (heads * dq_bytes), buffer, ds_phase, silent)
                        buffer, ds_phase = advance(buffer, ds_phase, 2)
                        turn = turn + 1
                        if turn == count:
                            turn = Int32(0)
            else:
                cute.arch.sync_warp()  # all lanes have read the record
                leave_keys(spec, bars)
                arrive(bars.k_empty + kv)
        kv, kv_phase = advance(kv, kv_phase, 2)
    cute.arch.cp_async_bulk_wait_group(0)


def global_float(address):
    """One FP32 word of global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@cute.jit
def finite(factor):
    """An infinity as a finite number: others' power may be too large for a sequence without gradients, whose sums are 0. NaN stays."""
    return Float32(FLT_MAX) if factor > FLT_MAX else factor


@cute.jit
def largest_scale(spec, item):
    """Factor of K in dQ: the largest of the tile's exponents (each warp's codes of dS carry its share of it)."""
    if const_expr(spec.k_static or not spec.fold):
        return scale_of_byte(shared_words(item.record + 32, 1)[0])
    four = shared_words(item.record + 32, 4)
    top = Float32(0.0)
    for g in cutlass.range_constexpr(4):
        top = cute.arch.fmax(top, scale_of_byte(four[g]))
    return top


@cute.jit
def multiply(spec, w, factor, rows, target: Int64, buffer, ds_phase, silent):
    """One query tile: dQ, times ``factor``, into ``target``, in two halves of D. ``rows``: what the sums of a lane's first and second row
    must be multiplied by when they are read, or None."""
    cute.arch.mbarrier_wait(w.bars.ds_full + buffer, ds_phase)
    lows = agree(w, buffer)
    # the sum of larger scale first: it is brought down to the other, which cannot overflow
    x = cute.arch.fmin(lows[0], lows[1])
    ratio = x * reciprocal_power(cute.arch.fmax(lows[0], lows[1]))
    first = Int32(2) * Int32(lows[1] > lows[0])
    factor = factor * reciprocal_power(x)
    dS = w.ds[None, None, None, buffer]
    parts = len(w.kt)
    for part, kt in enumerate(w.kt):
        dQ = cute.make_rmem_tensor(w.mma_q.partition_shape_C((QUERY_TILE, spec.head_dim // parts)), Float32)
        issue(w.mma_q, dQ, dS, kt, (first, first + 1), True)
        if ratio < 1.0:
            warpgroup.wait_group(0)
            for i in cutlass.range_constexpr(cute.size(dQ)):
                dQ[i] = dQ[i] * ratio
        issue(w.mma_q, dQ, dS, kt, (2 - first, 3 - first), False)
        warpgroup.wait_group(0)
        if const_expr(part == parts - 1):
            cute.arch.sync_warp()  # all lanes have read the scales
            arrive(w.bars.ds_empty + buffer)
        factors = (factor, factor) if const_expr(rows is None) else tuple(finite(factor * reciprocal_power(row)) for row in rows)
        for half in cutlass.range_constexpr(2 * part // parts, 2 * (part + 1) // parts):
            columns = [dQ[(half - 2 * part // parts) * (spec.head_dim // 4) + i] for i in range(spec.head_dim // 4)]
            slot = half + 2 * buffer if const_expr(w.buffers == 4) else half
            send(spec, w, columns, factors, target + half * (spec.dq_tile_bytes // 2), slot, silent)


@cute.jit
def agree(w, buffer):
    """Scale of each computing warpgroup's codes in ``buffer``. Where its warps differ their codes are brought to the smallest."""
    xs = shared_floats(w.scales + 32 * buffer, 8, 16)
    lows = [cute.arch.fmin(cute.arch.fmin(xs[4 * g], xs[4 * g + 1]), cute.arch.fmin(xs[4 * g + 2], xs[4 * g + 3])) for g in range(2)]
    differ = Int32(0)
    for i in cutlass.range_constexpr(8):
        differ = differ | (bits_of(lows[i // 4]) ^ bits_of(xs[i]))
    if differ != 0:
        row, group = w.thread % QUERY_TILE, w.thread // QUERY_TILE  # a thread takes one query, the keys of one warpgroup
        scales = w.scales + 32 * buffer + 16 * group
        own = shared_floats(scales, 4, 16)
        low = cute.arch.fmin(cute.arch.fmin(own[0], own[1]), cute.arch.fmin(own[2], own[3]))
        line = w.ds_address + buffer * (QUERY_TILE * KEY_TILE) + row * KEY_TILE
        for c in cutlass.range(4, unroll=1):  # rare: little code in the loop over the tiles counts, which jumps over it
            at = line + (((4 * group + c) ^ (row % 8)) << 4)
            down = half2(low * reciprocal_power(shared_floats(scales + 4 * c, 1, 4)[0]))
            words = shared_words(at, 4)
            out = [rescale_codes(words[i], down) for i in range(4)]
            effect([at, *out], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_DQ, number_of_threads=32 * WARPS)
    return lows


@cute.jit
def send(spec, w, dQ, factors, target: Int64, slot, silent):
    """Add this warp's 16 x D/2 sums, times ``factors``, to global memory through its staging, unless ``silent``."""
    staging = w.staging + slot * (WARPS * (spec.dq_tile_bytes // 8))
    cute.arch.cp_async_bulk_wait_group(w.buffers - 1, read=True)
    cute.arch.sync_warp()
    if const_expr(spec.dq_half):
        for j in cutlass.range_constexpr(spec.head_dim // 32):
            words = [f16x2(*(dQ[8 * j + i + c] * factors[i // 2 % 2] for c in range(2))) for i in (0, 2, 4, 6)]
            effect([staging + (512 * j + 16 * w.lane), *words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    else:
        for j in cutlass.range_constexpr(spec.head_dim // 16):
            four = [dQ[4 * j + i] * factors[i // 2] for i in range(4)]
            effect([staging + (512 * j + 16 * w.lane), *four], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f")
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if w.lane + silent == 0:
        kind = "noftz.f16" if const_expr(spec.dq_half) else "f32"
        size = Int32(spec.dq_tile_bytes // 8)
        effect([target, staging, size], f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [$0], [$1], $2;", "l,r,r")
        cute.arch.cp_async_bulk_commit_group()
