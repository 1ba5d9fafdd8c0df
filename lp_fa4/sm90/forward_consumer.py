"""The forward's consumers: two warpgroups of 64 query rows, scores and softmax of tile n beside P V of tile n - 1.

The order inside the loop (measured best on an H200, README.md): wait for K(n) and for the turn, issue Q K(n), issue
P(n-1) V(n-1), wait for both, add the partial O, exponentials and codes of P(n), the turn passed among them; the maxima of the
scores stand before the wait for P V where the softmax needs them first.

Two levels of accumulation: FP8 wgmma keeps some 14 bits of its sums, so each key tile's P V starts from zero and is
added to O in FP32; that addition is also where O is rescaled, for a moved reference or another exponent of V's next tile.

The loop over whole tiles holds no code for masks: instructions that are jumped over cost fetches. Tiles that a
sequence's end or the causal diagonal cuts come last and have a loop of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import exp2, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_epilogue import finish, finish_split, row_numbers
from lp_fa4.sm90.forward_producer import key_tiles
from lp_fa4.sm90.forward_softmax import (
    RowState,
    exponentiate,
    exponentiate_folded,
    mask_scores,
    move_reference,
    over_range,
    prepare,
    start_state,
    take_tile,
)
from lp_fa4.sm90.wgmma import issue, low_half, product
from lp_fa4.sm90.worklist import FIELDS

TURN = 2  # first of two named barriers
K_FULL, K_EMPTY, V_FULL, V_EMPTY = range(4)
"""A stage's barriers: in this order, all stages of one behind one another (``forward_kernel``)."""


@cute.jit
def release(barrier, was_read: cutlass.Constexpr = False):
    """One arrival per warp. ``was_read``: its lanes loaded what the stage holds, so all of them must have come here first."""
    if const_expr(was_read):
        cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def factors_of(spec: cutlass.Constexpr, query_factor: Float32, exponents: cute.Tensor, stage: Int32):
    """(factors from raw scores to log2 units, folded exponents of V, V's one exponent) of the tile in ``stage``: two lists and an FP32.

    Read before K is released: the producer then writes the next tile's. ``query_factor`` already holds a static exponent of K; a
    static one of V enters in the epilogue.
    """
    scale, values = [query_factor], []
    if const_expr(spec.key_scale > 0):
        scale = []
        for g in cutlass.range_constexpr(4 if const_expr(spec.key_scale == 32) else 1):
            scale.append(visible_factor(query_factor * exponents[g, stage]))
    if const_expr(spec.folded):
        values = [exponents[4 + g, stage] for g in range(4)]
    return scale, values, exponents[4, stage] if const_expr(spec.value_scale == 128) else Float32(0.0)


@cute.jit
def visible_factor(factor: Float32) -> Float32:
    """Never 0, or a masked score of -inf would become NaN; NaN stays."""
    return Float32(1.0e-37) if factor < 1.0e-37 else factor


@cute.jit
def add_partial(spec: cutlass.Constexpr, total: cute.Tensor, partial: cute.Tensor, factors: cute.Tensor):
    """``total = total * factors + partial`` by rows."""
    for j in cutlass.range_constexpr(spec.head_dim // 8):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                total[i] = total[i] * factors[r] + partial[i]


@cute.jit
def take_factors(spec: cutlass.Constexpr, state, factors: cute.Tensor):
    """What the pending tile's addition multiplies O by; then no move of the reference is pending.

    O is kept in units of the last added tile's exponent of V, so that one multiply-add an element serves moves and exponents.
    """
    ratio = Float32(1.0)
    if const_expr(spec.value_scale == 128):
        ratio = exp2(state.exponents[0] - state.exponents[1])
        state.exponents[0] = state.exponents[1]
    for r in cutlass.range_constexpr(2):
        factors[r] = state.alpha[r] * ratio if const_expr(spec.value_scale == 128) else state.alpha[r]
        state.alpha[r] = Float32(1.0)


@cute.jit
def mask_tile(spec: cutlass.Constexpr, c, scores, tile: Int32, limits, qi: Int32):
    """Masks a tile that the sequence's end or the diagonal cuts."""
    limit0, limit1, lowest = limits
    if (tile + 1) * KEY_TILE > lowest:
        if const_expr(spec.causal):  # read again: they would hold registers all through the loop over whole tiles
            item = c.s.item[None, qi]
            limit0, limit1 = tile_limits(spec, item[2] + c.row, item[4], item[6])
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)


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
def first_tile(spec: cutlass.Constexpr, c, scores, factors, item, tile: Int32, limits):
    """Softmax of an item's first tile (its scores are there): statistics and codes set up."""
    scale, exponents, exponent = factors
    limit0, limit1, lowest = limits
    if (tile + 1) * KEY_TILE > lowest:
        mask_scores(scores, c.column, limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE)
    started = Boolean(False)
    if const_expr(spec.resumes):
        started = item[7] > 0  # by the sequence's first tile
    if not started:
        start_state(spec, scores, c.state, scale, exponents, item[6])
    else:
        for r in cutlass.range_constexpr(2):
            move_reference(spec, scores, c.state, scale, exponents, r, spec.growth)
    if const_expr(spec.folded):
        exponentiate_folded(spec, scores, c.codes, c.state, scale, exponents, None)
    else:
        exponentiate(spec, scores, c.codes, c.state, scale, None)
    take_tile(spec, c.state)
    c.state.exponents[0], c.state.exponents[1] = exponent, exponent


@cute.jit
def retry(spec: cutlass.Constexpr, scores, codes, state, scale):
    """A tile once more, with the references of this warp's rows moved to their maxima."""
    for r in cutlass.range_constexpr(2):
        move_reference(spec, scores, state, scale, [], r, 0.0)
    exponentiate(spec, scores, codes, state, scale, None)


@cute.jit
def next_place(spec: cutlass.Constexpr, place):
    """The ring's place behind ``place``: (stage, phase, lower half of the descriptor of the stage's K, address of its first barrier).

    V lies behind K, by a constant. All of it is carried along: made from the stage at every use, descriptors and addresses are twenty
    instructions, a chain of eight of them between the turn and the first product.
    """
    stage, phase, low, barriers = place
    last = stage == spec.stages - 1
    step = Int32(1 - spec.stages) if last else Int32(1)
    flip = Int32(1) if last else Int32(0)
    return stage + step, phase ^ flip, low + step * (KEY_TILE * spec.head_dim // 16), barriers + 8 * step


def barrier_at(spec, place, which: int):
    """One of a stage's barriers."""
    return cute.make_ptr(Int64, place[3] + 8 * spec.stages * which, cute.AddressSpace.smem, assumed_align=8)


@cute.jit
def next_tile(spec: cutlass.Constexpr, c, tile: Int32, work, ring, whole: cutlass.Constexpr):
    """One turn of the loop: scores and softmax of ``tile`` beside P V of the tile before. Returns the next turn's ``ring``: (place of its
    K, place of its V, whether that K was seen to be there: looked at under the exponentials, the barrier's latency is hidden).

    ``work``: (key limits of the rows, query factor, stage of the item, its Q's descriptor). ``whole``: no mask can cut the tile.
    """
    s, mma, state, d = c.s, c.mma, c.state, spec.head_dim
    limits, factor, qi, q_low = work
    place, before, ready = ring
    following = next_place(spec, place)
    # wgmma's accumulators are in/out operands: made anew, so that they are not live through the back edge
    scores = cute.make_rmem_tensor(c.score_shape, Float32)
    partial = cute.make_rmem_tensor(c.out_shape, Float32)
    first = (None, None, None, 0)
    if not ready:
        cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
    cute.arch.barrier(barrier_id=TURN + c.wg, number_of_threads=256)
    product(mma.qk, scores, c.q[first], c.k[first], True, place[2], d, q_low, d)
    cute.arch.mbarrier_wait(barrier_at(spec, before, V_FULL), before[1])
    product(mma.pv, partial, c.p, c.v[first], True, before[2] + s.k_bytes // 16, KEY_TILE)
    scale, exponents, exponent = factors_of(spec, factor, s.exponents, place[0])
    warpgroup.wait_group(1)
    release(barrier_at(spec, place, K_EMPTY), spec.scaled)
    factors = cute.make_rmem_tensor(2, Float32)
    take_factors(spec, state, factors)
    state.exponents[1] = exponent
    looks = const_expr(spec.folded or not whole)
    if const_expr(looks):  # the maxima stand under P V
        if const_expr(not whole):
            mask_tile(spec, c, scores, tile, limits, qi)
        for r in cutlass.range_constexpr(2):
            move_reference(spec, scores, state, scale, exponents, r, spec.growth)
    elif const_expr(not spec.retries):
        prepare(spec, scores, state, scale)
    warpgroup.wait_group(0)
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - c.wg, number_of_threads=256)
    release(barrier_at(spec, before, V_EMPTY))
    ready = cute.arch.mbarrier_test_wait(barrier_at(spec, following, K_FULL), following[1])
    after = (partial[0], c.t.zero)
    if const_expr(not looks):
        add_partial(spec, c.total, partial, factors)
    if const_expr(spec.folded):
        exponentiate_folded(spec, scores, c.codes, state, scale, exponents, after)
    elif const_expr(not whole and not spec.causal):
        if limits[2] - tile * KEY_TILE <= KEY_TILE // 2:
            exponentiate(spec, scores, c.codes, state, scale, after, 4)
        else:
            exponentiate(spec, scores, c.codes, state, scale, after)
    elif const_expr(looks or spec.retries):
        exponentiate(spec, scores, c.codes, state, scale, after)
    else:
        exponentiate(spec, scores, c.codes, state, None, after)
    if const_expr(looks):
        add_partial(spec, c.total, partial, factors)
    elif const_expr(spec.retries):  # noqa: SIM102
        if cute.arch.vote_any_sync(over_range(state)):
            retry(spec, scores, c.codes, state, scale)
    take_tile(spec, state)
    return following, place, ready


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
        t=t,
        s=s,
        bars=bars,
        mma=mma,
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
    q_first = low_half(Int32(s.q_at.toint())) + wg * (64 * spec.head_dim // 16)
    if wg == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    qi, qp = Int32(0), Int32(0)
    place = (Int32(0), Int32(0), low_half(Int32(s.k_at.toint())), Int32(bars.k_full.toint()))
    cute.arch.mbarrier_wait(bars.q_full + qi, qp)
    sequence = items[0, qi]
    while sequence >= 0:
        item = items[None, qi]
        first, tiles, limit0, limit1, lowest, factor = start_item(spec, t, item, row_in_tile, wg)
        limits = (limit0, limit1, lowest)
        total.fill(0.0)
        if const_expr(spec.resumes):  # noqa: SIM102
            if item[7] > 0:
                cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
                scores = cute.make_rmem_tensor(score_shape, Float32)
                issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, place[0]])
                scale, exponents, _ = factors_of(spec, factor, s.exponents, place[0])
                warpgroup.wait_group(0)
                release(barrier_at(spec, place, K_EMPTY), spec.scaled)
                start_state(spec, scores, c.state, scale, exponents, item[6])
                cute.arch.mbarrier_wait(barrier_at(spec, place, V_FULL), place[1])
                release(barrier_at(spec, place, V_EMPTY))
                place = next_place(spec, place)
        cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
        scores = cute.make_rmem_tensor(score_shape, Float32)
        issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, place[0]])
        tile_factors = factors_of(spec, factor, s.exponents, place[0])
        warpgroup.wait_group(0)
        release(barrier_at(spec, place, K_EMPTY), spec.scaled)
        first_tile(spec, c, scores, tile_factors, item, first, limits)
        ring = (next_place(spec, place), place, Boolean(False))
        work = (limits, factor, qi, q_first + qi * (QUERY_TILE * spec.head_dim // 16))
        end = first + tiles
        whole = cutlass.max(cutlass.min(end, lowest // KEY_TILE), first + 1)
        for tile in cutlass.range(first + 1, whole, unroll=1):
            ring = next_tile(spec, c, tile, work, ring, True)
        for tile in cutlass.range(whole, end, unroll=1):
            ring = next_tile(spec, c, tile, work, ring, False)
        place, before, _ = ring
        cute.arch.mbarrier_wait(barrier_at(spec, before, V_FULL), before[1])
        partial = cute.make_rmem_tensor(out_shape, Float32)
        issue(mma.pv, partial, c.p, c.v[None, None, None, before[0]])
        numbers = None
        if const_expr(spec.split_keys == 0):
            numbers = row_numbers(spec, c.state, item)
        warpgroup.wait_group(0)
        release(barrier_at(spec, before, V_EMPTY))
        factors = cute.make_rmem_tensor(2, Float32)
        take_factors(spec, c.state, factors)
        add_partial(spec, total, partial, factors)
        if const_expr(spec.split_keys > 0):
            finish_split(spec, t, total, c.state, item, row_in_tile, c.column)
        else:
            finish(spec, t, s, mma, total, numbers, item, qi)
        release(bars.q_empty + qi, True)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        cute.arch.mbarrier_wait(bars.q_full + qi, qp)
        sequence = items[0, qi]
