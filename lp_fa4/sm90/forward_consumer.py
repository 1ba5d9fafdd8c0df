"""The forward's consumers: two warpgroups of 64 query rows, scores and softmax of tile n beside P V of tile n - 1.

The order inside the loop (measured best on an H200, README.md): wait for K(n) and for the turn, issue Q K(n), issue
P(n-1) V(n-1), wait for both, add the partial O, exponentials and codes of P(n), the turn passed among them; the maxima of the
scores stand before the wait for P V where the softmax needs them first.

An item's scores are FP16 (``next_halves``, where the codes of its queries allow it) or FP32 (``next_tile``), each with a loop of its own.

Two levels of accumulation: FP8 wgmma keeps some 14 bits of its sums, so each key tile's P V starts from zero and is
added to O in FP32; that addition is also where O is rescaled, for a moved reference or another exponent of V's next tile. Centred P V of
a group of tiles is summed in FP16 instead (``ForwardSpec.half_sums``); an item that leaves FP16 is noted for a second launch.

The loop over whole tiles holds no code for masks: instructions that are jumped over cost fetches. Tiles that a
sequence's end or the causal diagonal cuts come last and have a loop of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.bundle import Bundle
from lp_fa4.common.halves import half_of
from lp_fa4.common.numbers import effect, exp2, float_of, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_epilogue import EPILOGUE, finish, finish_split, row_numbers
from lp_fa4.sm90.forward_halves import (
    HalfState,
    do_again,
    exponentiate_halves,
    half_factor,
    mask_halves,
    move_halves,
    past_range,
    rescale,
    retry_halves,
    rows_fit,
    settle,
    start_halves,
    take_halves,
    widened,
)
from lp_fa4.sm90.forward_producer import key_tiles
from lp_fa4.sm90.forward_ring import K_EMPTY, K_FULL, V_EMPTY, V_FULL, barrier_at, next_place, release
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
def add_partial(spec: cutlass.Constexpr, total: cute.Tensor, partial, factors: cute.Tensor):
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
def mask_tile(spec: cutlass.Constexpr, c, scores, tile: Int32, limits, qi: Int32, halves: cutlass.Constexpr = False):
    """Masks a tile that the sequence's end or the diagonal cuts."""
    limit0, limit1, lowest = limits
    if (tile + 1) * KEY_TILE > lowest:
        if const_expr(spec.causal):  # read again: they would hold registers all through the loop over whole tiles
            item = c.s.item[None, qi]
            limit0, limit1 = tile_limits(spec, item[2] + c.row, item[4], item[6])
        limit0, limit1 = limit0 - tile * KEY_TILE, limit1 - tile * KEY_TILE
        if const_expr(halves):
            mask_halves(spec, scores, c.column, limit0, limit1)
        else:
            mask_scores(scores, c.column, limit0, limit1)


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
def clear_foreign_rows(spec: cutlass.Constexpr, rows: Int32, valid: Int32, wg: Int32):
    """Zero a warpgroup's rows of Q from row ``valid`` on, at ``rows`` in shared memory: they are the next sequence's. What these hold, NaN
    say, must not reach this one's rows by a vote (a tile, or an item, done again for any row is so for all). Called by all its threads."""
    zero = Uint32(0)
    if valid < 64:
        chunks = spec.head_dim // 16
        for i in cutlass.range(cutlass.max(valid, 0) * chunks + cute.arch.thread_idx()[0] % 128, 64 * chunks, 128, unroll=1):
            effect([rows + 16 * i, zero, zero, zero, zero], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)


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
def issue_products(spec: cutlass.Constexpr, c, qk, scores, partial, work, ring, fresh: cutlass.Constexpr):
    """Q K of the next tile and P V of the tile before: waits for their operands and for the turn."""
    q_low, d = work[3], spec.head_dim
    place, before, ready = ring
    zero = c.t.zero if const_expr(spec.halves) else None
    first = (None, None, None, 0)
    if not ready:
        cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
    cute.arch.barrier(barrier_id=TURN + c.wg, number_of_threads=256)
    product(qk, scores, c.q[first], c.k[first], True, place[2], d, q_low, d, zero)
    cute.arch.mbarrier_wait(barrier_at(spec, before, V_FULL), before[1])
    pv = c.mma.half_sums if const_expr(partial.element_type is Float16) else c.mma.pv
    product(pv, partial, c.p, c.v[first], fresh, before[2] + c.s.k_bytes // 16, KEY_TILE, zero=zero)


@cute.jit
def end_products(spec: cutlass.Constexpr, c, ring, following):
    """Both products awaited, the turn and V handed over. Returns whether the next K was seen to be there: looked at under the
    exponentials, the barrier's latency is hidden."""
    warpgroup.wait_group(0)
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - c.wg, number_of_threads=256)
    release(barrier_at(spec, ring[1], V_EMPTY))
    return cute.arch.mbarrier_test_wait(barrier_at(spec, following, K_FULL), following[1])


@cute.jit
def next_tile(spec: cutlass.Constexpr, c, tile: Int32, work, ring, whole: cutlass.Constexpr):
    """One turn of the loop: scores and softmax of ``tile`` beside P V of the tile before. Returns the next turn's ``ring``: (place of its
    K, place of its V, whether that K was seen to be there).

    ``work``: (key limits of the rows, query factor, stage of the item, its Q's descriptor). ``whole``: no mask can cut the tile.
    """
    s, state = c.s, c.state
    limits, factor, qi, _ = work
    place = ring[0]
    following = next_place(spec, place)
    # wgmma's accumulators are in/out operands: made anew, so that they are not live through the back edge
    scores = cute.make_rmem_tensor(c.score_shape, Float32)
    partial = cute.make_rmem_tensor(c.out_shape, Float32)
    issue_products(spec, c, c.mma.qk, scores, partial, work, ring, True)
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
    ready = end_products(spec, c, ring, following)
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
def next_halves(spec: cutlass.Constexpr, c, tile: Int32, work, ring, whole: cutlass.Constexpr, partial=None, part=(True, True)):
    """:func:`next_tile` with FP16 scores. ``work`` ends with the factor as FP16, twice. ``partial``, ``part``: the accumulator of a group
    of tiles, and whether the P V under way is the group's first, and its last."""
    state = c.state
    limits, factor, qi, _, factor2 = work
    opens, closes = part
    following = next_place(spec, ring[0])
    raw = cute.make_rmem_tensor(c.score_shape, Float16)
    if const_expr(partial is None):
        partial = cute.make_rmem_tensor(c.out_shape, sums_of(spec))
    issue_products(spec, c, c.mma.halves, raw, partial, work, ring, opens)
    scale, _, exponent = factors_of(spec, factor, c.s.exponents, ring[0][0])
    warpgroup.wait_group(1)
    release(barrier_at(spec, ring[0], K_EMPTY), spec.scaled)
    if const_expr(spec.key_scale > 0):
        factor2 = half_factor(scale[0])
        factor = half_of(factor2, 0)
    scores = cute.recast_tensor(raw, Int32)
    factors = cute.make_rmem_tensor(2, Float32)
    if const_expr(not whole or spec.value_scale > 0):
        take_factors(spec, state, factors)
        state.exponents[1] = exponent
    if const_expr(not whole):
        mask_tile(spec, c, scores, tile, limits, qi, True)
        for r in cutlass.range_constexpr(2):
            move_halves(spec, scores, state, factor, r, spec.growth)
    ready = end_products(spec, c, ring, following)
    words, first = None, partial[0]
    if const_expr(spec.half_sums):
        words = cute.recast_tensor(partial, Int32)
        first = float_of(words[0])
        if const_expr(closes):
            partial = widened(words)
    after = (first, c.t.zero)
    if const_expr(whole):
        if const_expr(spec.value_scale > 0):
            add_partial(spec, c.total, partial, factors)
        elif const_expr(closes):
            add(c.total, partial)
        exponentiate_halves(spec, scores, c.codes, state, factor2, after, True)
        if cute.arch.vote_any_sync(past_range(spec, state)):
            retry_halves(spec, scores, c.codes, state, factor, factor2)
            if const_expr(closes):
                rescale(state, [c.total])
            elif const_expr(spec.half_sums):
                rescale(state, [c.total], words)
            else:
                rescale(state, [c.total, partial])
    else:
        if const_expr(spec.causal):
            exponentiate_halves(spec, scores, c.codes, state, factor2, after, False)
        else:
            if limits[2] - tile * KEY_TILE <= KEY_TILE // 2:
                exponentiate_halves(spec, scores, c.codes, state, factor2, after, False, 4)
            else:
                exponentiate_halves(spec, scores, c.codes, state, factor2, after, False)
        add_partial(spec, c.total, partial, factors)
    take_halves(state)
    return following, ring[0], ready


def sums_of(spec):
    """What P V of FP16 scores is summed in."""
    return Float16 if spec.half_sums else Float32


@cute.jit
def add(total: cute.Tensor, partial):
    """``total += partial``."""
    for i in cutlass.range_constexpr(cute.size(total)):
        total[i] = total[i] + partial[i]


@cute.jit
def tiles_of_item(spec: cutlass.Constexpr, c, item, numbers, query, place, halves: cutlass.Constexpr, scores=None):
    """Scores, softmax and P V of an item's tiles but for the last one's P V, whose codes are left. Returns ``ring`` as behind a turn.

    ``numbers``: of ``start_item``; ``query``: (stage of the item, its Q's descriptor). ``halves``: with FP16 scores; the
    first tile's are in ``scores``.
    """
    first, tiles, limit0, limit1, lowest, factor = numbers
    qi, q_low = query
    limits = (limit0, limit1, lowest)
    if const_expr(not halves):
        cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
        scores = cute.make_rmem_tensor(c.score_shape, Float32)
        issue(c.mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, place[0]])
    tile_factors = factors_of(spec, factor, c.s.exponents, place[0])
    if const_expr(not halves):
        warpgroup.wait_group(0)
    release(barrier_at(spec, place, K_EMPTY), spec.scaled)
    ring = (next_place(spec, place), place, Boolean(False))
    begin, end = first + 1, first + tiles
    whole = cutlass.max(cutlass.min(end, lowest // KEY_TILE), begin)
    if const_expr(halves):
        factor2 = half_factor(tile_factors[0][0])
        first_factor = half_of(factor2, 0)
        words = cute.recast_tensor(scores, Int32)
        if (first + 1) * KEY_TILE > lowest:
            mask_halves(spec, words, c.column, limit0 - first * KEY_TILE, limit1 - first * KEY_TILE)
            start_halves(spec, words, c.state, first_factor, item[6])
            exponentiate_halves(spec, words, c.codes, c.state, factor2, None, False)
        else:
            start_halves(spec, words, c.state, first_factor, item[6])
            exponentiate_halves(spec, words, c.codes, c.state, factor2, None, True)
        take_halves(c.state)
        c.state.exponents[0], c.state.exponents[1] = tile_factors[2], tile_factors[2]
        work = (limits, factor, qi, q_low, factor2)
        if const_expr(spec.together > 1):
            groups = (whole - begin) // spec.together
            for i in cutlass.range(groups, unroll=1):
                partial = cute.make_rmem_tensor(c.out_shape, sums_of(spec))
                for n in cutlass.range_constexpr(spec.together):
                    part = (n == 0, n == spec.together - 1)
                    ring = next_halves(spec, c, begin + spec.together * i + n, work, ring, True, partial, part)
            begin = begin + spec.together * groups
        for tile in cutlass.range(begin, whole, unroll=1):
            ring = next_halves(spec, c, tile, work, ring, True)
        for tile in cutlass.range(whole, end, unroll=1):
            ring = next_halves(spec, c, tile, work, ring, False)
        settle(spec, c.state)
    else:
        if const_expr(spec.halves):
            c.state.cut[0] = Float32(0.0)
        first_tile(spec, c, scores, tile_factors, item, first, limits)
        work = (limits, factor, qi, q_low)
        for tile in cutlass.range(begin, whole, unroll=1):
            ring = next_tile(spec, c, tile, work, ring, True)
        for tile in cutlass.range(whole, end, unroll=1):
            ring = next_tile(spec, c, tile, work, ring, False)
    return ring


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
        state=HalfState() if const_expr(spec.halves) else RowState(),
        score_shape=score_shape,
        out_shape=out_shape,
    )
    items = s.item
    q_rows = Int32(s.q_at.toint()) + wg * (64 * spec.head_dim)
    q_first = low_half(Int32(s.q_at.toint())) + wg * (64 * spec.head_dim // 16)
    if wg == 0:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    qi, qp = Int32(0), Int32(0)
    place = (Int32(0), Int32(0), low_half(Int32(s.k_at.toint())), Int32(bars.k_full.toint()))
    cute.arch.mbarrier_wait(bars.q_full + qi, qp)
    sequence = items[0, qi]
    while sequence >= 0:
        item = items[None, qi]
        numbers = start_item(spec, t, item, row_in_tile, wg)
        rows, valid = q_rows + qi * (QUERY_TILE * spec.head_dim), item[4] - item[2] - wg * 64
        if const_expr(not spec.shared):
            clear_foreign_rows(spec, rows, valid, wg)
        total.fill(0.0)
        if const_expr(spec.resumes):  # noqa: SIM102
            if item[7] > 0:
                cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
                scores = cute.make_rmem_tensor(score_shape, Float32)
                issue(mma.qk, scores, c.q[None, None, None, qi], c.k[None, None, None, place[0]])
                scale, exponents, _ = factors_of(spec, numbers[5], s.exponents, place[0])
                warpgroup.wait_group(0)
                release(barrier_at(spec, place, K_EMPTY), spec.scaled)
                start_state(spec, scores, c.state, scale, exponents, item[6])
                cute.arch.mbarrier_wait(barrier_at(spec, place, V_FULL), place[1])
                release(barrier_at(spec, place, V_EMPTY))
                place = next_place(spec, place)
        query = (qi, q_first + qi * (QUERY_TILE * spec.head_dim // 16))
        ring, fit = (place, place, Boolean(False)), Boolean(False)
        if const_expr(spec.halves):
            cute.arch.mbarrier_wait(barrier_at(spec, place, K_FULL), place[1])
            scores = cute.make_rmem_tensor(score_shape, Float16)
            issue(mma.halves, scores, c.q[None, None, None, qi], c.k[None, None, None, place[0]])
            fit = rows_fit(spec, t, item, (rows, valid), numbers[5], Int32(EPILOGUE) + wg)  # under the product
            warpgroup.wait_group(0)
            if fit:
                ring = tiles_of_item(spec, c, item, numbers, query, place, True, scores)
            else:
                ring = tiles_of_item(spec, c, item, numbers, query, place, False)
        else:
            ring = tiles_of_item(spec, c, item, numbers, query, place, False)
        place, before, _ = ring
        cute.arch.mbarrier_wait(barrier_at(spec, before, V_FULL), before[1])
        partial = cute.make_rmem_tensor(out_shape, Float32)
        issue(mma.pv, partial, c.p, c.v[None, None, None, before[0]])
        results = None
        if const_expr(spec.split_keys == 0):
            results = row_numbers(spec, c.state, item)
        warpgroup.wait_group(0)
        release(barrier_at(spec, before, V_EMPTY))
        factors = cute.make_rmem_tensor(2, Float32)
        take_factors(spec, c.state, factors)
        add_partial(spec, total, partial, factors)
        if const_expr(spec.half_sums):
            do_again(spec, t, total, item, wg, fit, Int32(EPILOGUE) + wg)
        if const_expr(spec.split_keys > 0):
            finish_split(spec, t, total, c.state, item, row_in_tile, c.column)
        else:
            finish(spec, t, s, mma, total, results, item, qi)
        release(bars.q_empty + qi, True)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        cute.arch.mbarrier_wait(bars.q_full + qi, qp)
        sequence = items[0, qi]
