"""The forward's consumers: two warpgroups of 64 query rows, scores and softmax of tile n beside P V of tile n - 1.

The order inside the loop (measured best on an H200, README.md): wait for K(n) and for the turn, issue Q K(n), issue
P(n-1) V(n-1), wait for the scores, softmax, wait for P V, pass the turn, convert P(n), add the partial O in FP32.

Two levels of accumulation: FP8 wgmma keeps some 14 bits of its sums, so each key tile's P V starts from zero and is
added to O in FP32; that addition is also where O is rescaled. Fragments that wgmma writes are made inside the loop:
its accumulators are in/out operands, and a fragment made outside would stay live through the back edge.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.numbers import exponent_of_byte, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_epilogue import finish
from lp_fa4.sm90.forward_producer import key_tiles
from lp_fa4.sm90.forward_softmax import RowState, mask_codes, mask_scores, online_softmax, to_codes
from lp_fa4.sm90.worklist import FIELDS

TURN = 2  # first of two named barriers


@cute.jit
def issue(mma, accumulator, a, b):
    """Start ``accumulator = a @ b`` (from zero) as one wgmma group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for i in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, accumulator, a[None, None, i], b[None, None, i], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def release(barrier):
    """One arrival per warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def load_bytes(block: cutlass.Constexpr, scales: cute.Tensor, kv_head: Int32, row: Int32, tile: Int32, last: Int32, out):
    """Scale bytes of a key tile into ``out``; rows past the sequence's last are replaced by it."""
    if const_expr(block == 0):
        out[0] = Int32(scales[0, kv_head])
    elif const_expr(block == 128):
        out[0] = Int32(scales[row + cutlass.min(4 * tile, last), kv_head])
    else:
        for g in cutlass.range_constexpr(4):
            out[g] = Int32(scales[row + cutlass.min(4 * tile + g, last), kv_head])


@cute.jit
def factors_of(spec: cutlass.Constexpr, query_factor: Float32, key_bytes, value_bytes):
    """(factors from raw scores to log2 units, exponents of V) of one tile as lists of FP32."""
    scale, exponents = [], []
    for g in cutlass.range_constexpr(cute.size(key_bytes)):
        factor = query_factor * scale_of_byte(key_bytes[g])
        # never 0, or a masked score of -inf would become NaN; NaN stays
        scale.append(Float32(1.0e-37) if factor < 1.0e-37 else factor)
    if const_expr(spec.value_scale > 0):
        for g in cutlass.range_constexpr(cute.size(value_bytes)):
            exponent = exponent_of_byte(value_bytes[g])
            # a block of zeros (byte 0) must not push P out of FP32, whose sum still needs it
            exponents.append(Float32(-100.0) if exponent < -100.0 else exponent)
    return scale, exponents


@cute.jit
def add_partial(spec: cutlass.Constexpr, total: cute.Tensor, partial: cute.Tensor, alpha: cute.Tensor):
    """``total = total * alpha + partial`` by rows."""
    for j in cutlass.range_constexpr(spec.value_rows // 8):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                total[i] = total[i] * alpha[r] + partial[i]


@cute.jit
def tile_limits(spec: cutlass.Constexpr, row: Int32, queries: Int32, keys: Int32):
    """Keys visible to query rows ``row`` and ``row + 8``."""
    limit0, limit1 = keys, keys
    if const_expr(spec.causal):
        limit0 = cutlass.min(keys, row + 1 + keys - queries)
        limit1 = cutlass.min(keys, row + 9 + keys - queries)
    return limit0, limit1


@cute.jit
def consume(spec: cutlass.Constexpr, t, s, bars, mma):
    """Consumer loop of one thread. ``t``, ``s``, ``bars`` as in the producer; ``mma``: the tiled MMAs."""
    stages = spec.stages
    tid, _, _ = cute.arch.thread_idx()
    thread = tid - 128
    wg = cute.arch.make_warp_uniform(thread // 128)
    lane = tid % 32
    column = 2 * (lane % 4)
    row_in_tile = wg * 64 + (thread % 128) // 32 * 16 + lane // 4
    qk, pv = mma.qk.get_slice(wg * 128), mma.pv.get_slice(wg * 128)
    q_frag, k_frag = qk.make_fragment_A(qk.partition_A(s.q)), qk.make_fragment_B(qk.partition_B(s.k))
    v_frag = pv.make_fragment_B(pv.partition_B(s.v))
    score_shape = mma.qk.partition_shape_C((QUERY_TILE, KEY_TILE))
    out_shape = mma.pv.partition_shape_C((QUERY_TILE, spec.value_rows))
    total = cute.make_rmem_tensor(out_shape, Float32)
    p_frag = mma.pv.make_fragment_A(mma.pv.partition_shape_A((QUERY_TILE, KEY_TILE)))
    codes = cute.recast_tensor(p_frag, Int32)
    state = RowState()
    alpha, row_sums = state.alpha, state.sum  # a loop may assign to a fragment by its own name only
    before = cute.make_rmem_tensor(2, Float32)
    key_bytes = cute.make_rmem_tensor(4 if const_expr(spec.key_scale == 32) else 1, Int32)
    value_bytes = cute.make_rmem_tensor(4 if const_expr(spec.value_scale == 32) else 1, Int32)
    item = cute.make_rmem_tensor(FIELDS, Int32)
    if wg == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    qi, qp, ki, kp = Int32(0), Int32(0), Int32(0), Int32(0)
    cute.arch.mbarrier_wait(bars.q_full + qi, qp)
    sequence = s.item[0, qi]
    while sequence >= 0:
        for i in cutlass.range_constexpr(FIELDS):
            item[i] = s.item[i, qi]
        b, head, row0, first_row = item[0], item[1], item[2], item[3]
        queries, first_key, keys, split = item[4], item[5], item[6], item[7]
        kv_head = head // spec.group
        first, tiles = key_tiles(spec, row0, queries, keys, split)
        row = row0 + row_in_tile
        limit0, limit1 = tile_limits(spec, row, queries, keys)
        lowest = tile_limits(spec, row0 + wg * 64, queries, keys)[0]  # of this warpgroup's rows
        scale_row, last_row = first_key // 32 + b, cutlass.max(cute.ceil_div(keys, 32) - 1, 0)
        query_byte = Int32(0)
        if const_expr(spec.query_static):
            query_byte = Int32(t.q_scale[0, head])
        else:
            start = Int32(0) if const_expr(spec.shared) else first_row // 32 + b
            query_byte = Int32(t.q_scale[start + cutlass.min(row, queries - 1) // 32, head])
        query_factor = t.scale_log2 * scale_of_byte(query_byte)
        load_bytes(spec.key_scale, t.k_scale, kv_head, scale_row, first, last_row, key_bytes)
        load_bytes(spec.value_scale, t.v_scale, kv_head, scale_row, first, last_row, value_bytes)
        scale, exponents = factors_of(spec, query_factor, key_bytes, value_bytes)
        total.fill(0.0)
        before[0], before[1] = Float32(1.0), Float32(1.0)
        row_sums[0], row_sums[1] = Float32(0.0), Float32(0.0)
        cute.arch.mbarrier_wait(bars.k_full + ki, kp)
        scores = cute.make_rmem_tensor(score_shape, Float32)
        issue(mma.qk, scores, q_frag[None, None, None, qi], k_frag[None, None, None, ki])
        load_bytes(spec.key_scale, t.k_scale, kv_head, scale_row, first + 1, last_row, key_bytes)
        load_bytes(spec.value_scale, t.v_scale, kv_head, scale_row, first + 1, last_row, value_bytes)
        warpgroup.wait_group(0)
        release(bars.k_empty + ki)
        start_key = first * KEY_TILE
        if start_key + KEY_TILE > lowest:
            mask_scores(scores, column, limit0 - start_key, limit1 - start_key)
        online_softmax(spec, scores, state, scale, exponents, True, keys)
        to_codes(scores, codes)
        if const_expr(spec.centred):  # noqa: SIM102 (the outer one is resolved at compile time)
            if start_key + KEY_TILE > lowest:
                mask_codes(codes, column, limit0 - start_key)
        for n in cutlass.range(1, tiles, unroll=1):
            vi, vp = ki, kp
            ki = ki + 1
            if ki == stages:
                ki, kp = Int32(0), kp ^ 1
            scale, exponents = factors_of(spec, query_factor, key_bytes, value_bytes)
            scores = cute.make_rmem_tensor(score_shape, Float32)
            partial = cute.make_rmem_tensor(out_shape, Float32)
            cute.arch.mbarrier_wait(bars.k_full + ki, kp)
            cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)
            issue(mma.qk, scores, q_frag[None, None, None, qi], k_frag[None, None, None, ki])
            cute.arch.mbarrier_wait(bars.v_full + vi, vp)
            issue(mma.pv, partial, p_frag, v_frag[None, None, None, vi])
            if const_expr(spec.key_scale > 0):
                load_bytes(spec.key_scale, t.k_scale, kv_head, scale_row, first + n + 1, last_row, key_bytes)
            if const_expr(spec.value_scale > 0):
                load_bytes(spec.value_scale, t.v_scale, kv_head, scale_row, first + n + 1, last_row, value_bytes)
            warpgroup.wait_group(1)
            release(bars.k_empty + ki)
            before[0], before[1] = alpha[0], alpha[1]
            start_key = (first + n) * KEY_TILE
            masked = start_key + KEY_TILE > lowest
            if masked:
                mask_scores(scores, column, limit0 - start_key, limit1 - start_key)
            online_softmax(spec, scores, state, scale, exponents, False, keys)
            warpgroup.wait_group(0)
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - wg, number_of_threads=256)
            release(bars.v_empty + vi)
            to_codes(scores, codes)
            if const_expr(spec.centred):  # noqa: SIM102
                if masked:
                    mask_codes(codes, column, limit0 - start_key)
            add_partial(spec, total, partial, before)
        cute.arch.mbarrier_wait(bars.v_full + ki, kp)
        partial = cute.make_rmem_tensor(out_shape, Float32)
        issue(mma.pv, partial, p_frag, v_frag[None, None, None, ki])
        warpgroup.wait_group(0)
        release(bars.v_empty + ki)
        add_partial(spec, total, partial, alpha)
        ki = ki + 1
        if ki == stages:
            ki, kp = Int32(0), kp ^ 1
        finish(spec, t, s, mma, total, state, item, qi)
        release(bars.q_empty + qi)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        cute.arch.mbarrier_wait(bars.q_full + qi, qp)
        sequence = s.item[0, qi]
