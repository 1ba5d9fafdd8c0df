"""Compute warps of the backward: P from scores, dS from P and dP, both to E4M3.

Two warpgroups of four warps. A thread owns a row (key) and 64 queries: warpgroup 0 the first half of the query tile, 1 the second. With
the statistics of each query (``backward_prepass``) and s = p_scale_log2::

    p  = exp2(S * softmax_scale * log2(e) + a)      a = s - m: P leaves exp2 with the power of two that E4M3 wants
    P8 = E4M3(p - c)                                c = 2^s l / K, 0 unless centred; its scale is the constant 2^-s
    dS = p (dP - D)                                 carries 2^s, undone in the results

dS is quantized once per 32 x 32 block: a thread's largest magnitude of 32, then one ``redux.sync`` across the warp, which owns 32 keys.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte
from lp_fa4.sm100.atoms import F8, SF_BYTES, load_columns, store_columns
from lp_fa4.sm100.backward_config import TILE
from lp_fa4.sm100.backward_plan import BLOCK_COLUMNS
from lp_fa4.sm100.backward_work import block_amax, fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import arrive, arrive_tensor, wait, wait_tensor

HALF = TILE // 2
BLOCK = 32


class Place(NamedTuple):
    """Where a compute thread is. ``tmem``: shifted to its warpgroup's columns. ``group``: warpgroup. ``thread``: 0..127, the key's row.
    ``warp``, ``lane``: of the warpgroup's four warps."""

    kernel: Any
    bars: Any
    tmem: Any
    group: Int32
    thread: Int32
    warp: Int32
    lane: Int32


@cute.jit
def compute_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, group: Int32, thread: Int32):
    """Serve this CTA's key tiles."""
    spec, stages = kernel.spec, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0])
    here = Place(kernel, bars, tmem + group * HALF, group, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)
    turn = Int32(0)
    if const_expr(not kernel.aliased):
        store_constant_scale(here)
        cute.arch.fence_view_async_tmem_store()  # a CTA without a key tile stores nothing else before tensor memory is given back
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, n)
            live = item.row + thread < item.keys
            if item.steps > 0:
                for s in cutlass.range(item.steps, unroll=1):
                    now = turn + s
                    _, tile = query_step(spec, item, s)
                    # columns of this warpgroup that this key may see: low <= column < high
                    high = item.queries - tile * TILE - group * HALF
                    low, masked = Int32(0), tile * TILE + TILE > item.queries
                    if const_expr(spec.causal):
                        diagonal = item.row - item.keys + item.queries - tile * TILE
                        low = diagonal + thread - group * HALF
                        masked = masked or diagonal + (TILE - 1) > 0
                    if masked:
                        query_tile(here, args, shared, now, now % stages, live, low, high, True)
                    else:
                        query_tile(here, args, shared, now, now % stages, live, low, high, False)
                turn += item.steps
        index += step


@cute.jit
def query_tile(here, args, shared, now, stage, live, low, high, masked: cutlass.Constexpr):
    """P and dS of this thread's row and one query tile."""
    kernel, bars, tmem = here.kernel, here.bars, here.tmem
    bar, plan, stages = kernel.barriers, kernel.plan, kernel.tuning.stages
    phase = now & 1
    wait_tensor(bars + bar.s_full, phase)
    r = load_columns(tmem, plan["S"].start, HALF, here.thread)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(kernel.aliased):
        arrive_tensor(bars + bar.s_read)
    wait(bars + bar.stat_full + stage, now // stages & 1)
    stats = shared.stats.iterator + (stage * (kernel.spec.stats * TILE) + here.group * HALF)
    for b in cutlass.range_constexpr(2):
        probabilities(here, args.scale, here.tmem, stats, r, b, low, high, masked)
    if const_expr(kernel.aliased):
        store_constant_scale(here)
    cute.arch.fence_view_async_tmem_store()
    arrive_tensor(bars + bar.p_ready)

    wait_tensor(bars + bar.dp_full, phase)
    scales = cute.make_rmem_tensor(2, Int32)
    for b in cutlass.range_constexpr(2):
        d = load_columns(tmem, plan["dP"].start + BLOCK * b, BLOCK, here.thread)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(b == 1 and kernel.aliased):
            arrive_tensor(bars + bar.dp_read)
        score_gradients(here, shared, stats, r, d, b, live, scales)
    share_scales(here, shared, scales)
    cute.arch.fence_view_async_tmem_store()
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive(bars + bar.stat_empty + stage)
    arrive_tensor(bars + bar.ds_ready)


@cute.jit
def four(stats, kind: cutlass.Constexpr, column: cutlass.Constexpr):
    """Statistics ``kind`` of four queries from ``column`` (the same for all lanes: a broadcast)."""
    values = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.make_tensor((stats + (kind * TILE + column)).align(16), cute.make_layout(4)), values)
    return values


@cute.jit
def probabilities(here, scale, tmem, stats, r, b: cutlass.Constexpr, low, high, masked: cutlass.Constexpr):
    """Scores of block ``b`` to p in place, and P8 to its columns, counted from ``tmem``. Hidden and missing queries give p = 0 by
    selection: their scores may be NaN."""
    values = cute.make_rmem_tensor(BLOCK, Float32)
    for j in cutlass.range_constexpr(0, BLOCK, 4):
        a = four(stats, 0, BLOCK * b + j)
        for i in cutlass.range_constexpr(0, 4, 2):
            at = BLOCK * b + j + i
            x, y = cute.arch.fma_packed_f32x2((r[at], r[at + 1]), (scale, scale), (a[i], a[i + 1]))
            r[at], r[at + 1] = cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
            if const_expr(masked):
                for c in cutlass.range_constexpr(2):
                    seen = at + c < high
                    if const_expr(here.kernel.spec.causal):
                        seen = seen and at + c >= low
                    r[at + c] = r[at + c] if seen else Float32(0.0)
            values[j + i], values[j + i + 1] = r[at], r[at + 1]
        if const_expr(here.kernel.spec.centred):
            c = four(stats, 2, BLOCK * b + j)
            for i in cutlass.range_constexpr(0, 4, 2):
                pair = (values[j + i], values[j + i + 1])
                values[j + i], values[j + i + 1] = cute.arch.sub_packed_f32x2(pair, (c[i], c[i + 1]))
    packed = cute.make_rmem_tensor(BLOCK_COLUMNS, Float32)
    codes = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=F8), cute.make_layout(BLOCK))
    codes.store(values.load().to(F8))
    store_columns(tmem, here.kernel.plan["P0"].start + BLOCK_COLUMNS * b, BLOCK_COLUMNS, here.thread, packed)


@cute.jit
def store_constant_scale(here):
    """Scale 2^-s of P: one store of four words per lane of warpgroup 0, the same in all lane quadrants."""
    byte = 127 - here.kernel.spec.p_scale_log2
    if here.group == 0:
        words = cute.make_rmem_tensor(4, Float32)
        bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Int32), words.layout)
        for j in cutlass.range_constexpr(4):
            bits[j] = Int32(byte * 0x01010101)
        store_columns(here.tmem, here.kernel.plan["SFP"].start, 4, here.thread, words)


@cute.jit
def score_gradients(here, shared, stats, r, d, b: cutlass.Constexpr, live, scales):
    """dS of block ``b``: one 32 x 32 block a warp, its codes to tensor memory (for dK) and to shared memory (for dQ), its byte to
    ``scales[b]``. A row past the sequence's end is 0: its key belongs to another sequence."""
    for j in cutlass.range_constexpr(0, BLOCK, 4):
        delta = four(stats, 1, BLOCK * b + j)
        for i in cutlass.range_constexpr(0, 4, 2):
            at = BLOCK * b + j + i
            pair = cute.arch.sub_packed_f32x2((d[j + i], d[j + i + 1]), (delta[i], delta[i + 1]))
            d[j + i], d[j + i + 1] = cute.arch.mul_packed_f32x2(pair, (r[at], r[at + 1]))
    byte = byte_of_amax_bits(block_amax(d, live))
    scales[b] = byte
    inverse = inverse_of_byte(byte)
    keep = live and byte < 255
    words = cute.make_rmem_tensor(BLOCK_COLUMNS, Float32)
    bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Int32), words.layout)
    for i in cutlass.range_constexpr(BLOCK_COLUMNS):
        x, y = cute.arch.mul_packed_f32x2((d[4 * i], d[4 * i + 1]), (inverse, inverse))
        z, w = cute.arch.mul_packed_f32x2((d[4 * i + 2], d[4 * i + 3]), (inverse, inverse))
        word = e4m3x4(x, y, z, w)
        bits[i] = word if keep else Int32(0)
    store_columns(here.tmem, here.kernel.plan["dS0"].start + BLOCK_COLUMNS * b, BLOCK_COLUMNS, here.thread, words)
    # a row of 128 bytes per key, 16-byte chunks swizzled as shared memory operands are
    start = cute.recast_ptr(shared.ds_bytes, dtype=Int32) + here.thread * (TILE // 4)
    for half in cutlass.range_constexpr(2):
        chunk = (here.group * 4 + (2 * b + half)) ^ (here.thread % 8)
        there = cute.make_tensor((start + chunk * 4).align(16), cute.make_layout(4))
        cute.autovec_copy(cute.make_tensor(bits.iterator + 4 * half, cute.make_layout(4)), there)


@cute.jit
def share_scales(here, shared, scales):
    """Bytes of this warp's two blocks into the atoms of both products. Every lane quadrant wants every row's byte, and a warp reaches only
    its own: the MMA warp copies the atoms with ``tcgen05.cp``. Rows of dK's atom are keys, of dQ's queries (32 to a block, one a
    lane)."""
    one, two = scales[0], scales[1]
    atom = cute.recast_ptr(shared.sf_ds_k.iterator, dtype=Int32) + here.group * (SF_BYTES // 4)
    pair = one | (two << 8)
    target = cute.make_tensor(atom, cute.make_layout(SF_BYTES // 4))
    target[here.lane * 4 + here.warp] = pair | (pair << 16)
    atom = cute.recast_ptr(shared.sf_ds_q.iterator, dtype=Int32) + here.warp * (SF_BYTES // 4)
    target = cute.make_tensor(atom, cute.make_layout(SF_BYTES // 4))
    for b in cutlass.range_constexpr(2):
        byte = scales[b]
        byte = byte | (byte << 8)
        target[here.lane * 4 + here.group * 2 + b] = byte | (byte << 16)
