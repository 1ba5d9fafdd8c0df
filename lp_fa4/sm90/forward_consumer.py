"""The forward's consumers: two warpgroups of 64 query rows, scores and softmax of tile n beside P V of tile n - 1.

The order inside the loop (measured best on an H200, README.md): wait for K(n) and for the turn, issue Q K(n), issue
P(n-1) V(n-1), wait for the scores, maxima, wait for P V, pass the turn, exponentials, convert P(n), add the partial O.

Two levels of accumulation: FP8 wgmma keeps some 14 bits of its sums, so P V starts from zero every ``spec.promote``
tiles and is added to O in FP32. A new reference rescales both, in the softmax's slow path.

The loop over whole tiles holds no code for masks: instructions that are jumped over cost fetches. Tiles that a
sequence's end or the causal diagonal cuts come last and have a loop of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import exponent_of_byte, scale_of_byte, volatile_shared
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_epilogue import finish
from lp_fa4.sm90.forward_producer import key_tiles
from lp_fa4.sm90.forward_softmax import (
    RowState,
    exponentiate,
    mask_codes,
    mask_scores,
    move_reference,
    rounding_of_sums,
    start_state,
)
from lp_fa4.sm90.worklist import FIELDS

TURN = 2  # first of two named barriers


@cute.jit
def issue(mma, accumulator, a, b, accumulate):
    """Start ``accumulator = a @ b`` (plus itself if ``accumulate``) as one wgmma group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
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
def add_partial(spec: cutlass.Constexpr, total: cute.Tensor, partial: cute.Tensor):
    """``total += partial``."""
    for i in cutlass.range_constexpr(spec.value_rows // 2):
        total[i] = total[i] + partial[i]


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
    """``softmax_scale * log2(e) * 2^e`` of query row ``row`` of the item's sequence."""
    if const_expr(spec.query_static):
        byte = item[FIELDS]
    else:
        start = Int32(0) if const_expr(spec.shared) else item[3] // 32 + item[0]
        byte = Int32(t.q_scale[start + cutlass.min(row, item[4] - 1) // 32, item[1]])
    return t.scale_log2 * scale_of_byte(byte)


@cute.jit
def load_exponents(spec: cutlass.Constexpr, t, item, tile: Int32, key_bytes, value_bytes):
    """Scale bytes of key tile ``tile`` of the item's sequence (static ones came with the item)."""
    if const_expr(spec.key_scale + spec.value_scale > 0):
        kv_head = item[1] // spec.group
        row, last = item[5] // 32 + item[0], cutlass.max(cute.ceil_div(item[6], 32) - 1, 0)
        if const_expr(spec.key_scale > 0):
            load_bytes(spec.key_scale, t.k_scale, kv_head, row, tile, last, key_bytes)
        if const_expr(spec.value_scale > 0):
            load_bytes(spec.value_scale, t.v_scale, kv_head, row, tile, last, value_bytes)


@cute.jit
def start_item(spec: cutlass.Constexpr, t, item, row_in_tile: Int32, wg: Int32, key_bytes, value_bytes):
    """What the loop keeps of an item: tiles, key limits of this thread's rows and its warpgroup, the query factor."""
    first, tiles = key_tiles(spec, item[2], item[4], item[6], item[7])
    limit0, limit1 = tile_limits(spec, item[2] + row_in_tile, item[4], item[6])
    lowest = tile_limits(spec, item[2] + wg * 64, item[4], item[6])[0]
    factor = query_factor_of(spec, t, item, item[2] + row_in_tile)
    if const_expr(spec.key_scale == 0):
        key_bytes[0] = item[FIELDS + 1]
    load_exponents(spec, t, item, first, key_bytes, value_bytes)
    return first, tiles, limit0, limit1, lowest, factor


@cute.jit
def first_tile(spec: cutlass.Constexpr, t, s, c, scores, item, tile: Int32, limits, factor: Float32, bytes_):
    """Softmax of an item's first tile (its scores are there): statistics and codes set up."""
    key_bytes, value_bytes = bytes_
    scale, exponents = factors_of(spec, factor, key_bytes, value_bytes)
    load_exponents(spec, t, item, tile + 1, key_bytes, value_bytes)
    limit0, limit1, lowest = limits
    masked = (tile + 1) * KEY_TILE > lowest
    if masked:
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)
    start_state(spec, scores, c.state, scale, exponents, item[6])
    exponentiate(spec, scores, c.codes, c.state, scale, exponents, Float32(spec.p_scale_log2))
    mend_codes(spec, scores, c.codes, c.state, masked, item[6], c.column, limit0 - tile * KEY_TILE)


@cute.jit
def next_tile(
    spec: cutlass.Constexpr, t, s, bars, mma, c, item, tile: Int32, limits, factor: Float32, bytes_, ring, held: Int32,
    masked: cutlass.Constexpr,
):  # fmt: skip
    """One turn of the loop: scores and softmax of ``tile`` beside P V of the tile before. Returns the ring and ``held``."""
    qi, ki, kp = ring
    key_bytes, value_bytes = bytes_
    vi, vp = ki, kp
    ki = ki + 1
    if ki == spec.stages:
        ki, kp = Int32(0), kp ^ 1
    scale, exponents = factors_of(spec, factor, key_bytes, value_bytes)
    scores = cute.make_rmem_tensor(c.score_shape, Float32)
    cute.arch.mbarrier_wait(bars.k_full + ki, kp)
    cute.arch.barrier(barrier_id=TURN + c.wg, number_of_threads=256)
    issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, ki], False)
    cute.arch.mbarrier_wait(bars.v_full + vi, vp)
    partial = c.partial if const_expr(spec.promote > 1) else cute.make_rmem_tensor(c.out_shape, Float32)
    accumulate = held > 0 if const_expr(spec.promote > 1) else False
    issue(mma.pv, partial, c.p, c.v[None, None, None, vi], accumulate)
    load_exponents(spec, t, item, tile + 1, key_bytes, value_bytes)
    warpgroup.wait_group(1)
    release(bars.k_empty + ki)
    limit0, limit1, _ = limits
    if const_expr(masked):
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)
    move_reference(spec, scores, c.state, scale, exponents, (c.total, partial))
    warpgroup.wait_group(0)
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - c.wg, number_of_threads=256)
    release(bars.v_empty + vi)
    base = volatile_shared(s.base) if const_expr(spec.early_turn) else Float32(spec.p_scale_log2)
    exponentiate(spec, scores, c.codes, c.state, scale, exponents, base)
    mend_codes(spec, scores, c.codes, c.state, masked, item[6], c.column, limit0 - tile * KEY_TILE)
    held = held + 1
    if const_expr(spec.promote == 1):
        add_partial(spec, c.total, partial)
    elif held == spec.promote:
        add_partial(spec, c.total, partial)
        held = Int32(0)
    return ki, kp, held


@cute.jit
def consume(spec: cutlass.Constexpr, t, s, bars, mma):
    """Consumer loop of one thread. ``t``, ``s``, ``bars`` as in the producer; ``mma``: the tiled MMAs."""
    tid, _, _ = cute.arch.thread_idx()
    thread = tid - 128
    wg = cute.arch.make_warp_uniform(thread // 128)
    row_in_tile = wg * 64 + (thread % 128) // 32 * 16 + tid % 32 // 4
    qk, pv = mma.qk.get_slice(wg * 128), mma.pv.get_slice(wg * 128)
    score_shape = mma.qk.partition_shape_C((QUERY_TILE, KEY_TILE))
    out_shape = mma.pv.partition_shape_C((QUERY_TILE, spec.value_rows))
    total, partial = cute.make_rmem_tensor(out_shape, Float32), cute.make_rmem_tensor(out_shape, Float32)
    p_frag = mma.pv.make_fragment_A(mma.pv.partition_shape_A((QUERY_TILE, KEY_TILE)))
    c = Bundle(
        wg=wg,
        column=2 * (tid % 4),
        q=qk.make_fragment_A(qk.partition_A(s.q)),
        k=qk.make_fragment_B(qk.partition_B(s.k)),
        v=pv.make_fragment_B(pv.partition_B(s.v)),
        p=p_frag,
        codes=cute.recast_tensor(p_frag, Int32),
        total=total,
        partial=partial,
        state=RowState(),
        score_shape=score_shape,
        out_shape=out_shape,
    )
    key_bytes = cute.make_rmem_tensor(4 if const_expr(spec.key_scale == 32) else 1, Int32)
    value_bytes = cute.make_rmem_tensor(4 if const_expr(spec.value_scale == 32) else 1, Int32)
    bytes_ = (key_bytes, value_bytes)
    items = s.item
    if wg == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    qi, qp, ki, kp = Int32(0), Int32(0), Int32(0), Int32(0)
    cute.arch.mbarrier_wait(bars.q_full + qi, qp)
    sequence = items[0, qi]
    while sequence >= 0:
        item = items[None, qi]
        first, tiles, limit0, limit1, lowest, factor = start_item(spec, t, item, row_in_tile, wg, *bytes_)
        limits = (limit0, limit1, lowest)
        total.fill(0.0)
        cute.arch.mbarrier_wait(bars.k_full + ki, kp)
        scores = cute.make_rmem_tensor(score_shape, Float32)
        issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, ki], False)
        warpgroup.wait_group(0)
        release(bars.k_empty + ki)
        first_tile(spec, t, s, c, scores, item, first, limits, factor, bytes_)
        held = Int32(0)
        end = first + tiles
        whole = cutlass.max(cutlass.min(end, lowest // KEY_TILE), first + 1)
        for tile in cutlass.range(first + 1, whole, unroll=1):
            ki, kp, held = next_tile(spec, t, s, bars, mma, c, item, tile, limits, factor, bytes_, (qi, ki, kp), held, False)
        for tile in cutlass.range(whole, end, unroll=1):
            ki, kp, held = next_tile(spec, t, s, bars, mma, c, item, tile, limits, factor, bytes_, (qi, ki, kp), held, True)
        cute.arch.mbarrier_wait(bars.v_full + ki, kp)
        last = partial if const_expr(spec.promote > 1) else cute.make_rmem_tensor(out_shape, Float32)
        accumulate = held > 0 if const_expr(spec.promote > 1) else False
        issue(mma.pv, last, c.p, c.v[None, None, None, ki], accumulate)
        warpgroup.wait_group(0)
        release(bars.v_empty + ki)
        ki = ki + 1
        if ki == spec.stages:
            ki, kp = Int32(0), kp ^ 1
        add_partial(spec, total, last)
        finish(spec, t, s, mma, total, c.state, item, qi)
        release(bars.q_empty + qi)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        cute.arch.mbarrier_wait(bars.q_full + qi, qp)
        sequence = items[0, qi]


@cute.jit
def mend_codes(spec: cutlass.Constexpr, scores, codes, state, masked, keys: Int32, column: Int32, limit: Int32):
    """Masked keys to 0; rounding kept out of the row sum of short sequences, where it does not average out."""
    if const_expr(spec.centred):  # noqa: SIM102 (the outer one is resolved at compile time)
        if masked:
            mask_codes(scores, codes, column, limit)
    if const_expr(spec.mma_sum and spec.exact_sum_keys > 0):  # noqa: SIM102
        if keys <= spec.exact_sum_keys:
            rounding_of_sums(scores, codes, state)
