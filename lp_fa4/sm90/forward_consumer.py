"""The forward's consumers: two warpgroups of 64 query rows, scores and softmax of tile n beside P V of tile n - 1.

The order inside the loop (measured best on an H200, README.md): wait for K(n) and for the turn, issue Q K(n), issue
P(n-1) V(n-1), wait for the scores, maxima, wait for P V, pass the turn, exponentials and codes of P(n), add the partial O.

Two levels of accumulation: FP8 wgmma keeps some 14 bits of its sums, so each key tile's P V starts from zero and is
added to O in FP32; that addition is also where O is rescaled.

The loop over whole tiles holds no code for masks: instructions that are jumped over cost fetches. Tiles that a
sequence's end or the causal diagonal cuts come last and have a loop of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_epilogue import finish, finish_split
from lp_fa4.sm90.forward_producer import key_tiles
from lp_fa4.sm90.forward_softmax import (
    RowState,
    exponentiate,
    mask_codes,
    mask_scores,
    move_reference,
    start_state,
)
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
def factors_of(spec: cutlass.Constexpr, query_factor: Float32, exponents: cute.Tensor, stage: Int32):
    """(factors from raw scores to log2 units, exponents of V) of the tile in ``stage`` as lists of FP32.

    ``query_factor`` already holds a static exponent of K; one of V enters in the epilogue.
    """
    scale, values = [query_factor], []
    if const_expr(spec.key_scale > 0):
        scale = []
        for g in cutlass.range_constexpr(4 if const_expr(spec.key_scale == 32) else 1):
            scale.append(visible_factor(query_factor * exponents[g, stage]))
    if const_expr(spec.value_scale > 0):
        for g in cutlass.range_constexpr(4 if const_expr(spec.value_scale == 32) else 1):
            values.append(exponents[4 + g, stage])
    return scale, values


@cute.jit
def visible_factor(factor: Float32) -> Float32:
    """Never 0, or a masked score of -inf would become NaN; NaN stays."""
    return Float32(1.0e-37) if factor < 1.0e-37 else factor


@cute.jit
def add_partial(spec: cutlass.Constexpr, total: cute.Tensor, partial: cute.Tensor, alpha: cute.Tensor):
    """``total = total * alpha + partial`` by rows."""
    for j in cutlass.range_constexpr(spec.head_dim // 8):
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
def query_factor_of(spec: cutlass.Constexpr, t, item, row: Int32) -> Float32:
    """``softmax_scale * log2(e) * 2^e`` of query row ``row`` of the item's sequence, times K's scale if that is static."""
    if const_expr(spec.query_static):
        byte = item[FIELDS]
    else:
        start = Int32(0) if const_expr(spec.shared) else item[3] // 32 + item[0]
        byte = Int32(t.q_scale[start + cutlass.min(row, item[4] - 1) // 32, item[1]])
    factor = t.scale_log2 * scale_of_byte(byte)
    if const_expr(spec.key_scale == 0):
        factor = visible_factor(factor * scale_of_byte(item[FIELDS + 1]))
    return factor


@cute.jit
def start_item(spec: cutlass.Constexpr, t, item, row_in_tile: Int32, wg: Int32):
    """What the loop keeps of an item: tiles, key limits of this thread's rows and its warpgroup, the query factor."""
    first, tiles = key_tiles(spec, item[2], item[4], item[6], item[7])
    limit0, limit1 = tile_limits(spec, item[2] + row_in_tile, item[4], item[6])
    lowest = tile_limits(spec, item[2] + wg * 64, item[4], item[6])[0]
    factor = query_factor_of(spec, t, item, item[2] + row_in_tile)
    return first, tiles, limit0, limit1, lowest, factor


@cute.jit
def first_tile(spec: cutlass.Constexpr, c, scores, scale, exponents, item, tile: Int32, limits):
    """Softmax of an item's first tile (its scores are there): statistics and codes set up."""
    limit0, limit1, lowest = limits
    masked = (tile + 1) * KEY_TILE > lowest
    if masked:
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)
    if const_expr(spec.resumes):
        if item[7] > 0:
            for r in cutlass.range_constexpr(2):
                move_reference(spec, scores, c.state, scale, exponents, r)
        else:
            start_state(spec, scores, c.state, scale, exponents, item[6])
    else:
        start_state(spec, scores, c.state, scale, exponents, item[6])
    exponentiate(spec, scores, c.codes, c.state, scale, exponents, None)
    if const_expr(spec.centred):  # noqa: SIM102 (the outer one is resolved at compile time)
        if masked:
            mask_codes(c.codes, c.column, limit0 - tile * KEY_TILE)


@cute.jit
def next_tile(spec: cutlass.Constexpr, t, s, bars, mma, c, tile: Int32, limits, factor: Float32, ring, masked: cutlass.Constexpr):
    """One turn of the loop: scores and softmax of ``tile`` beside P V of the tile before. Returns the ring's place."""
    qi, ki, kp = ring
    vi, vp = ki, kp
    ki = ki + 1
    if ki == spec.stages:
        ki, kp = Int32(0), kp ^ 1
    # wgmma's accumulators are in/out operands: made anew, so that they are not live through the back edge
    scores = cute.make_rmem_tensor(c.score_shape, Float32)
    partial = cute.make_rmem_tensor(c.out_shape, Float32)
    cute.arch.mbarrier_wait(bars.k_full + ki, kp)
    cute.arch.barrier(barrier_id=TURN + c.wg, number_of_threads=256)
    issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, ki])
    cute.arch.mbarrier_wait(bars.v_full + vi, vp)
    issue(mma.pv, partial, c.p, c.v[None, None, None, vi])
    scale, exponents = factors_of(spec, factor, s.exponents, ki)
    warpgroup.wait_group(1)
    release(bars.k_empty + ki)
    limit0, limit1, _ = limits
    if const_expr(masked):
        if const_expr(spec.causal):  # read again: they would hold registers all through the loop over whole tiles
            item = s.item[None, qi]
            limit0, limit1 = tile_limits(spec, item[2] + c.row, item[4], item[6])
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)
    before = cute.make_rmem_tensor(2, Float32)
    before[0], before[1] = c.state.alpha[0], c.state.alpha[1]
    for r in cutlass.range_constexpr(2):
        move_reference(spec, scores, c.state, scale, exponents, r)
    warpgroup.wait_group(0)
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - c.wg, number_of_threads=256)
    release(bars.v_empty + vi)
    exponentiate(spec, scores, c.codes, c.state, scale, exponents, (partial[0], t.zero))
    if const_expr(spec.centred and masked):
        mask_codes(c.codes, c.column, limit0 - tile * KEY_TILE)
    add_partial(spec, c.total, partial, before)
    return ki, kp


@cute.jit
def consume(spec: cutlass.Constexpr, t, s, bars, mma):
    """Consumer loop of one thread. ``t``, ``s``, ``bars`` as in the producer; ``mma``: the tiled MMAs."""
    tid, _, _ = cute.arch.thread_idx()
    thread = tid - 128
    wg = cute.arch.make_warp_uniform(thread // 128)
    row_in_tile = wg * 64 + (thread % 128) // 32 * 16 + tid % 32 // 4
    qk, pv = mma.qk.get_slice(wg * 128), mma.pv.get_slice(wg * 128)
    score_shape = mma.qk.partition_shape_C((QUERY_TILE, KEY_TILE))
    out_shape = mma.pv.partition_shape_C((QUERY_TILE, spec.head_dim))
    total = cute.make_rmem_tensor(out_shape, Float32)
    p_frag = mma.pv.make_fragment_A(mma.pv.partition_shape_A((QUERY_TILE, KEY_TILE)))
    c = Bundle(
        wg=wg,
        row=row_in_tile,
        column=2 * (tid % 4),
        q=qk.make_fragment_A(qk.partition_A(s.q)),
        k=qk.make_fragment_B(qk.partition_B(s.k)),
        v=pv.make_fragment_B(pv.partition_B(s.v)),
        p=p_frag,
        codes=cute.recast_tensor(p_frag, Int32),
        total=total,
        state=RowState(),
        score_shape=score_shape,
        out_shape=out_shape,
    )
    items = s.item
    if wg == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    qi, qp, ki, kp = Int32(0), Int32(0), Int32(0), Int32(0)
    cute.arch.mbarrier_wait(bars.q_full + qi, qp)
    sequence = items[0, qi]
    while sequence >= 0:
        item = items[None, qi]
        first, tiles, limit0, limit1, lowest, factor = start_item(spec, t, item, row_in_tile, wg)
        limits = (limit0, limit1, lowest)
        total.fill(0.0)
        if const_expr(spec.resumes):  # noqa: SIM102
            if item[7] > 0:
                cute.arch.mbarrier_wait(bars.k_full + ki, kp)
                scores = cute.make_rmem_tensor(score_shape, Float32)
                issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, ki])
                scale, exponents = factors_of(spec, factor, s.exponents, ki)
                warpgroup.wait_group(0)
                release(bars.k_empty + ki)
                start_state(spec, scores, c.state, scale, exponents, item[6])
                cute.arch.mbarrier_wait(bars.v_full + ki, kp)
                release(bars.v_empty + ki)
                ki = ki + 1
                if ki == spec.stages:
                    ki, kp = Int32(0), kp ^ 1
        cute.arch.mbarrier_wait(bars.k_full + ki, kp)
        scores = cute.make_rmem_tensor(score_shape, Float32)
        issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, ki])
        scale, exponents = factors_of(spec, factor, s.exponents, ki)
        warpgroup.wait_group(0)
        release(bars.k_empty + ki)
        first_tile(spec, c, scores, scale, exponents, item, first, limits)
        end = first + tiles
        whole = cutlass.max(cutlass.min(end, lowest // KEY_TILE), first + 1)
        for tile in cutlass.range(first + 1, whole, unroll=1):
            ki, kp = next_tile(spec, t, s, bars, mma, c, tile, limits, factor, (qi, ki, kp), False)
        for tile in cutlass.range(whole, end, unroll=1):
            ki, kp = next_tile(spec, t, s, bars, mma, c, tile, limits, factor, (qi, ki, kp), True)
        cute.arch.mbarrier_wait(bars.v_full + ki, kp)
        partial = cute.make_rmem_tensor(out_shape, Float32)
        issue(mma.pv, partial, c.p, c.v[None, None, None, ki])
        warpgroup.wait_group(0)
        release(bars.v_empty + ki)
        ki = ki + 1
        if ki == spec.stages:
            ki, kp = Int32(0), kp ^ 1
        add_partial(spec, total, partial, c.state.alpha)
        if const_expr(spec.split_keys > 0):
            finish_split(spec, t, total, c.state, item, row_in_tile, c.column)
        else:
            finish(spec, t, s, mma, total, c.state, item, qi)
        release(bars.q_empty + qi)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        cute.arch.mbarrier_wait(bars.q_full + qi, qp)
        sequence = items[0, qi]
