"""Consumer role of the backward's main kernel: two warpgroups, 64 keys each, loop over the query tiles.

Rows of the accumulators are keys. Per query tile (64 queries), warpgroup and thread::

    S  = K Q^T                  64 x 64      p = exp2(S * s + a[q])         a = 8 + e_dO - e_ref - m
    dV += E4M3(p - c[q]) dO     64 x D       c = (l / K) * 2^(8 + e_dO - e_ref), or 0
    dP = V dO^T                 64 x 64      dS = p * (dP * v + b[q])       b = -rowsum(dO8 * Oc)
    dK += E4M3(dS * x) Q        64 x D

and the codes of dS go to shared memory, keys contiguous, for the dQ warpgroup (``backward_dq``). p meets dS cut to BF16: two in one
register, or dS, P and both gradients would not fit in 208.

The exponents of dO ride in the statistics; those of K and V are one factor a warp. ``x`` is the power of two under which dS is coded:
dK contracts over the queries and dQ over the keys, and no Hopper MMA scales blocks, so one ``x`` must hold for a warp's keys and all
queries summed so far. It is found online: from the absolute maximum of the first query tile over the warpgroup's keys, then kept while
nothing overflows. A warp whose values pass 448 lowers its own ``x`` and its share of dK at once, without waiting for the others, and
publishes it beside its codes. In long loops the other warps of its warpgroup take that scale a turn of the ring of query tiles later: what
they read then has been handed over for certain, so results repeat.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.halves import mul2, pair
from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import bits_of, exp2, float_of, scale_of_byte
from lp_fa4.sm90.backward_layout import (
    KEY_TILE,
    QUERY_TILE,
    STAT_A,
    STAT_B,
    STAT_C,
    STAT_DK,
    STAT_DQ,
    STAT_DV,
    STAT_Q0,
    STAT_S0,
)
from lp_fa4.sm90.backward_ops import (
    PAIR_LOSS,
    absolute,
    arrive,
    effect,
    high_of,
    low_of,
    mask_from,
    pair_of,
    pick_pairs,
    pinned,
    power_for,
    reciprocal_power,
    redux_max,
    redux_min,
    release,
    shared_floats,
    to_codes,
)
from lp_fa4.sm90.wgmma import product

CODE_TARGET = 7
"""dS is brought to [128, 256) at the first tile: a factor of 1.75 to 3.5 is left under 448 before ``x`` must move."""
SMALL_SHARE = 2.0**-6
"""Shares of a query tile in the scale of q under which dS is coded for dK and for dQ separately (``BackwardSpec.tiles``)."""
FIRST, STEADY = range(2)
NO_SCALE = 2.0**100
"""Scale that no other is above."""
BARRIER_GROUP = 1
"""First of two named barriers, one a warpgroup."""


@cute.jit
def key_factors(spec, w, item):
    """(factor of K in S, factor of V in dP) of this warp's 16 keys. Their share in the codes that meet K, the scale of dS while all of it
    is zero, and the keys left go to shared memory."""
    at = item.record + 32 + 4 * (w.warp // 2)  # of this warp's group of 32
    fk, fv = scale_of_byte(shared_words(at, 1)[0]), scale_of_byte(shared_words(at + 16, 1)[0])
    if const_expr(not spec.halves):  # there it comes with the statistics
        idle = float_of(cutlass.max(cutlass.min(314 - shared_words(item.record + 48, 1)[0], Int32(227)), Int32(27)) << 23)
        effect([w.factors + 12, idle], "st.shared.f32 [$0], $1;", "r,f")
    if const_expr(spec.fold and not spec.k_static):
        four = shared_words(item.record + 32, 4)
        top = Float32(0.0)
        for g in cutlass.range_constexpr(4):
            top = cute.arch.fmax(top, scale_of_byte(four[g]))
        effect([w.factors + 8, fk / top], "st.shared.f32 [$0], $1;", "r,f")
    if const_expr(spec.fold or spec.group > 1):  # registers are short
        effect([w.factors + 16, fk, fv], "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f")
    left = item.klen - item.n * KEY_TILE - 16 * w.warp
    effect([w.factors + 24, left], "st.shared.b32 [$0], $1;", "r,r")
    cute.arch.sync_warp()  # each lane wrote all of it, the same values: a lane may read what another writes
    return fk, fv


@cute.jit
def probabilities(spec, w, S, P, pairs, stat, fk, diagonal):
    """From S (scores) the codes P that meet dO, and p in ``pairs`` for dS: sixteen registers where FP32 takes 32."""
    s = shared_floats(stat + 4 * STAT_S0, 2, 8)
    if const_expr(spec.fold or spec.group > 1):
        fk = shared_floats(w.factors + 16, 1, 4)[0]
    columns = stat + 8 * (w.lane % 4)
    whole = Float32(1.0) if diagonal + 15 <= 0 else Float32(0.0)  # all of this warp's keys are seen
    ready = 0 if spec.fold or spec.causal else 2  # registers are short there
    ahead = [shared_floats(columns + 4 * STAT_A + 32 * j, 2, 8) for j in range(ready)]  # while waiting
    for q in cutlass.range_constexpr(4):
        factor = s[q // 2] * fk
        for j in cutlass.range_constexpr(2 * q, 2 * q + 2):
            a = ahead[j] if const_expr(j < ready) else shared_floats(columns + 4 * STAT_A + 32 * j, 2, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    S[i] = exp2(S[i] * factor + a[c])
        for r in cutlass.range_constexpr(2):
            b0, b1 = 2 * r + 8 * q, 2 * r + 8 * q + 4
            x = [S[b0], S[b0 + 1], S[b1], S[b1 + 1]]
            pairs[b0 // 2], pairs[b1 // 2] = pair_of(x[0], x[1]), pair_of(x[2], x[3])
            if const_expr(spec.centred or spec.suffix):
                c0 = shared_floats(columns + 4 * STAT_C + 64 * q, 2, 8)
                c1 = shared_floats(columns + 4 * STAT_C + 64 * q + 32, 2, 8)
                c = [c0[0], c0[1], c1[0], c1[1]]
                x = [x[i] - (c[i] * whole if const_expr(spec.causal) else c[i]) for i in range(4)]
            P[r + 2 * q] = code4(x)
    if const_expr(spec.causal):
        diagonal_mask(w, P, pairs, diagonal)


def code4(x):
    """Four FP32 to one word of codes."""
    from lp_fa4.common.numbers import e4m3x4

    return e4m3x4(*x)


@cute.jit
def diagonal_mask(w, P, pairs, diagonal):
    """Zero what causality forbids. ``diagonal``: the warp's first key minus the tile's first query, minus (keys - queries): key row r,
    query column c is allowed if ``diagonal + r <= c``."""
    if diagonal + 15 > 0:
        first = diagonal + w.lane // 4 - 2 * (w.lane % 4)
        for q in cutlass.range_constexpr(4):
            for r in cutlass.range_constexpr(2):
                masks = [mask_from(first + 8 * r - 8 * j) for j in (2 * q, 2 * q + 1)]
                for i in cutlass.range_constexpr(2):
                    at = r + 2 * (2 * q + i)
                    pairs[at] = pairs[at] & masks[i]
                P[r + 2 * q] = P[r + 2 * q] & pick_pairs(masks[0], masks[1], "6420")


@cute.jit
def score_gradients(spec, w, pairs, dP, stat, fv, x):
    """dP becomes dS * x in place."""
    columns = stat + 4 * STAT_B + 8 * (w.lane % 4)
    if const_expr(spec.fold or spec.group > 1):
        fv = shared_floats(w.factors + 20, 1, 4)[0]
    left = shared_words(w.factors + 24, 1)[0]
    x = x * PAIR_LOSS
    factor = fv * x
    for j in cutlass.range_constexpr(8):
        b = shared_floats(columns + 32 * j, 2, 8)
        b0, b1 = b[0] * x, b[1] * x
        for r in cutlass.range_constexpr(2):
            i = 2 * r + 4 * j
            dP[i] = low_of(pairs[i // 2]) * (dP[i] * factor + b0)
            dP[i + 1] = high_of(pairs[i // 2]) * (dP[i + 1] * factor + b1)
    if left < 16:  # rows past the sequence's end hold a neighbour's keys, NaN perhaps: replaced, not multiplied
        for r in cutlass.range_constexpr(2):
            keep = w.lane // 4 + 8 * r < left
            for j in cutlass.range_constexpr(8):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    dP[i] = dP[i] if keep else Float32(0.0)


def largest(S):
    """Largest magnitude of this thread's values, over four chains."""
    tops = [absolute(S[i]) for i in range(4)]
    for i in range(4, 32):
        tops[i % 4] = cute.arch.fmax(tops[i % 4], absolute(S[i]))
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def warpgroup_maximum(spec, w, value, stage, phase):
    """Largest of the warpgroup's ``value`` (FP32, not negative; NaN wins), for a fresh sum: what was left of earlier scales is forgotten.
    The maxima of its warps belong to the tile's ``stage``, which every warp has released since they were read there."""
    bits = redux_max(value)
    if w.lane == 0:
        effect([w.peak + 32 * stage + 4 * w.warp, bits], "st.shared.b32 [$0], $1;", "r,r")
        if const_expr(spec.follows):
            forget_scales(w, stage, phase)
    cute.arch.barrier(barrier_id=BARRIER_GROUP + w.group, number_of_threads=128)
    peaks = shared_floats(w.peak + 32 * stage + 16 * w.group, 4, 16)
    return cute.arch.fmax(cute.arch.fmax(peaks[0], peaks[1]), cute.arch.fmax(peaks[2], peaks[3]))


@cute.jit
def first_exponent(spec, w, S, stage, phase):
    """Scale of dS codes for a fresh sum: from the absolute maximum over the warpgroup's 64 keys and 64 queries. Scales S."""
    top = warpgroup_maximum(spec, w, largest(S), stage, phase)
    idle = shared_floats(w.factors + 12, 1, 4)[0]
    x = cute.arch.fmin(power_for(bits_of(top), CODE_TARGET), idle)
    if top == 0.0:  # nothing seen yet: so large that whatever comes is seen to overflow, so small that it is finite
        x = idle
    for i in cutlass.range_constexpr(32):
        S[i] = S[i] * x
    return x


@cute.jit
def lower(S, x, dK):
    """Bring this warp's values of dS, their scale and its sums of dK down to the range of codes. Returns the new scale. Rare: all of it in
    one place, out of the way of the instructions around it."""
    down = power_for(redux_max(largest(S)), CODE_TARGET)
    for i in cutlass.range_constexpr(32):
        S[i] = S[i] * down
    for i in cutlass.range_constexpr(cute.size(dK)):
        dK[i] = dK[i] * down
    return x * down


@cute.jit
def keep_in_range(S, x, dK):
    """If any of this warp's values passes 448: :func:`lower`. Returns the scale."""
    if cute.arch.vote_any_sync(largest(S) > 448.0):
        x = lower(S, x, dK)
    return x


def full_codes(codes):
    """Not 0 if a code of this thread is 448 or NaN: two more then flips the bit of the sign (as a carry from such a code below may)."""
    full = [Int32(0), Int32(0)]
    for i in range(8):
        full[i % 2] = full[i % 2] | (codes[i] ^ (codes[i] + 0x02020202))
    return (full[0] | full[1]) & -0x7F7F7F80


@cute.jit
def publish_in_range(spec, w, S, codes, buffer, x, dK, common):
    """:func:`publish` under ``x`` times ``common`` (None: 1), then, if a code of this warp is full, :func:`lower` and once more: nothing
    waits for the vote. Returns x."""
    full = full_codes(codes)
    publish(spec, w, S, codes, buffer, x if const_expr(common is None) else x * common)
    if cute.arch.vote_any_sync(full != 0):
        x = lower(S, x, dK)
        to_codes(S, codes)
        publish(spec, w, S, codes, buffer, x if const_expr(common is None) else x * common)
    return x


@cute.jit
def publish(spec, w, S, codes, buffer, x):
    """dS codes to shared memory with keys contiguous (for dQ), this warp's scale beside them."""
    if const_expr(spec.fold and not spec.k_static):
        codes = cute.make_rmem_tensor(8, Int32)
        share = shared_floats(w.factors + 8, 1, 4)[0]
        to_codes(S, codes, (share, share))
    store_codes(w, codes, buffer, x)


@cute.jit
def store_codes(w, codes, buffer, x):
    """What :func:`publish` stores."""
    units = [pick_pairs(codes[2 * (j // 2)], codes[2 * (j // 2) + 1], "5140" if j % 2 == 0 else "7362") for j in range(8)]
    # this lane's row in a transposing stmatrix of dS: query lane (+ 32), 16-byte chunk of this warp's keys
    if const_expr(w.ds_line is not None):
        address = w.ds_line + buffer * (QUERY_TILE * KEY_TILE)
    else:
        lane = pinned(w.lane)
        address = w.ds_address + buffer * (QUERY_TILE * KEY_TILE) + lane * KEY_TILE + ((w.warp ^ (lane % 8)) << 4)
    for half in cutlass.range_constexpr(2):
        effect(
            [address + half * (32 * KEY_TILE), *units[4 * half : 4 * half + 4]],
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
            "r,r,r,r,r",
        )
    if const_expr(w.ds_line is not None):  # all lanes store the same
        effect([w.scale_line + 32 * buffer, x], "st.shared.f32 [$0], $1;", "r,f")
    elif w.lane == 0:
        effect([w.scales + 32 * buffer + 4 * w.warp, x], "st.shared.f32 [$0], $1;", "r,f")


def scale_slot(w, stage, phase):
    """Where the warps leave their scale of the tile at this place of the ring of Q, and, under the other phase, of the tile one turn of the
    ring before. Whoever holds a tile of Q knows that all eight warps have handed over the one before it there; none is two turns ahead."""
    return w.history + 32 * pinned(stage + w.a_stages * phase)  # hoisted addresses would spill


def forget_scales(w, stage, phase):
    """At a segment's first tile: what this warp left for the tiles less than a turn before, which its warpgroup has not read yet."""
    for back in range(1, w.a_stages):
        place = stage + w.a_stages * phase - back
        place = place + ((place >> 31) & (2 * w.a_stages))
        effect([w.history + 32 * pinned(place) + 4 * w.warp, Float32(NO_SCALE)], "st.shared.f32 [$0], $1;", "r,f")


@cute.jit
def note_scale(w, stage, phase, x):
    """Leave this warp's scale for :func:`follow_scales`."""
    if w.lane == 0:
        effect([scale_slot(w, stage, phase) + 4 * pinned(w.warp), x], "st.shared.f32 [$0], $1;", "r,f")


@cute.jit
def scale_sums(sums, factor):
    """FP16 sums times a power of two."""
    words, factor = cute.recast_tensor(sums, Int32), pair(factor)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = mul2(words[i], factor)


@cute.jit
def follow_scales(spec, w, stage, phase, x, dK):
    """Take the smallest scale that the warpgroup's warps had one turn of the ring before, if that tile is of this segment. Else a warp
    that lowered its scale would stay apart for the rest of the segment, and the dQ warpgroup would rewrite the codes of every tile of it.
    Returns the scale."""
    at = scale_slot(w, stage, phase ^ 1) + 16 * w.group + 4 * (pinned(w.lane) % 4)
    least = redux_min(shared_words(at, 1)[0])
    if least < bits_of(x):
        low = float_of(least)
        down = low * reciprocal_power(x)
        if const_expr(spec.halves):
            scale_sums(dK, down)
        else:
            for i in cutlass.range_constexpr(cute.size(dK)):
                dK[i] = dK[i] * down
        x = low
    return x


@cute.jit
def hand_over(spec, w, stage, buffer):
    """dS of a tile goes to the dQ warpgroup, its Q, dO and statistics back to the copy warp. The fence waits for the stores of
    :func:`publish`, so this comes when the next products are under way."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if const_expr(spec.halves):  # never a cluster; the lane is known, an election is an instruction more
        if w.lane == 0:
            cute.arch.mbarrier_arrive(w.bars.ds_full + buffer)
            cute.arch.mbarrier_arrive(w.bars.a_empty + stage)
    else:
        arrive(w.bars.ds_full + buffer)
        release(spec, w.bars.a_empty + stage, w.peer)  # after a proxy fence: the next copy overwrites statistics that were read here


def free_phase(spec, phase):
    """Phase of ``ds_empty`` that a warp waits for in this phase of its ring: with one more arrival from the start the same, which saves the
    other's three instructions, and costs a register in the steps of all forms but this."""
    return phase if spec.one_segment else phase ^ 1


@cute.jit
def pass_tile(spec, w, now):
    """One query tile of a warpgroup without keys: codes of 0, under a scale that no other is above."""
    stage, phase, out, out_phase = now
    cute.arch.mbarrier_wait(w.bars.ds_empty + out, free_phase(spec, out_phase))
    codes = cute.make_rmem_tensor(8, Int32)
    codes.fill(0)
    store_codes(w, codes, out, Float32(NO_SCALE))
    cute.arch.mbarrier_wait(w.bars.a_full + stage, phase)
    if const_expr(spec.follows):
        note_scale(w, stage, phase, Float32(NO_SCALE))
    hand_over(spec, w, stage, out)
    cute.arch.mbarrier_wait(w.bars.t_full + out, out_phase)
    release(spec, w.bars.t_empty + out, w.peer)


@cute.jit
def start_last(spec, w, dK, last, summed=None):
    """Issue dK of a segment's last query tile; dV is done. ``last``: as in :func:`step`; ``summed``: as in ``wgmma.product``."""
    stage, _, out, out_phase = last
    cute.arch.mbarrier_wait(w.bars.t_full + out, out_phase)
    product(w.mma_g, dK, w.dS_operand, w.qt, False, w.low + w.places["qt"] + out * w.tile, QUERY_TILE, zero=w.zero, summed=summed)
    hand_over(spec, w, stage, out)


@cute.jit
def end_last(spec, w, out):
    """Wait for it."""
    warpgroup.wait_group(0)
    cute.arch.sync_warp()  # dV left meanwhile
    release(spec, w.bars.t_empty + out, w.peer)


@cute.jit
def step(spec, kind: cutlass.Constexpr, w, dV, dK, x, keys, diagonal, now, last):
    """One query tile. ``kind``: FIRST of a segment (dK is all zeros), or STEADY; ``keys``: factors of :func:`key_factors`, lower halves of
    the descriptors of K and V; ``diagonal``: for :func:`diagonal_mask`; ``now``: stage and phase of Q, dO and dO^T, then of Q^T and dS;
    ``last``: those of the tile before, whose dK is done here, and whose Q and dS are handed over here. Returns x.

    Every MMA is issued and awaited inside one step: ptxas cannot follow a group across the loop's back edge and serializes every wgmma
    as soon as dK is read there (C7514). dK runs under the exponentials where registers allow.
    """
    fk, fv, k, v, *_ = keys
    bars, under = w.bars, not spec.causal or spec.group == 1
    stage, phase, out, out_phase = now
    last_stage, _, last_out, last_phase = last
    stat = w.stat + stage * (4 * spec.stat_span[1])
    S = cute.make_rmem_tensor(w.score_shape, Float32)
    cute.arch.mbarrier_wait(bars.a_full + stage, phase)
    ring = w.low + stage * w.tile
    product(w.mma_s, S, w.k, w.q, True, ring, spec.head_dim, k, spec.head_dim)
    if const_expr(kind == FIRST):
        warpgroup.wait_group(0)
    else:
        cute.arch.mbarrier_wait(bars.t_full + last_out, last_phase)
        product(w.mma_g, dK, w.dS_operand, w.qt, False, w.low + w.places["qt"] + last_out * w.tile, QUERY_TILE)
        hand_over(spec, w, last_stage, last_out)
        if const_expr(under):
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
            release(spec, bars.t_empty + last_out, w.peer)
    pairs = cute.make_rmem_tensor(16, Int32)
    probabilities(spec, w, S, w.P, pairs, stat, fk, diagonal)
    dP = cute.make_rmem_tensor(w.score_shape, Float32)
    product(w.mma_s, dP, w.v, w.do, True, ring + w.places["do"], spec.head_dim, v, spec.head_dim)
    product(w.mma_g, dV, w.P_operand, w.dot, kind == FIRST, ring + w.places["dot"], QUERY_TILE)
    warpgroup.wait_group(0)
    if const_expr(kind != FIRST and under):
        release(spec, bars.t_empty + last_out, w.peer)
    if const_expr(kind != FIRST and spec.follows):
        x = follow_scales(spec, w, stage, phase, x, dK)
    share = common = Float32(1.0)
    if const_expr(spec.tiles):  # of this tile's q in dK: in the codes of dS, and taken out again with their scale in dQ
        share = shared_floats(stat + 4 * STAT_Q0, 1, 4)[0]
        common = share if share >= SMALL_SHARE else Float32(1.0)
    scale = Float32(1.0) if const_expr(kind == FIRST) else x
    score_gradients(spec, w, pairs, dP, stat, fv, scale * common if const_expr(spec.tiles) else scale)
    if const_expr(kind == FIRST):
        x = first_exponent(spec, w, dP, stage, phase)
    elif const_expr(spec.fold):
        x = keep_in_range(dP, x, dK)
    if const_expr(spec.fold):
        e = shared_floats(stat + 4 * STAT_Q0, 2, 8)
        to_codes(dP, w.dS, (e[0], e[1]))
    else:
        to_codes(dP, w.dS)
    cute.arch.mbarrier_wait(bars.ds_empty + out, free_phase(spec, out_phase))
    if const_expr(kind == FIRST or spec.fold):
        publish(spec, w, dP, w.dS, out, x * common if const_expr(spec.tiles) else x)
    else:
        x = publish_in_range(spec, w, dP, w.dS, out, x, dK, common if const_expr(spec.tiles) else None)
    if const_expr(spec.tiles):  # noqa: SIM102 - known to the compiler, the other is not
        if share < SMALL_SHARE:
            to_codes(dP, w.dS, (share, share))
    if const_expr(spec.follows):
        note_scale(w, stage, phase, x)
    return x


def segment_factors(spec, w, stage):
    """Factors of dV and dK, constant over a segment: from its first tile's statistics to shared memory."""
    four = shared_floats(w.stat + stage * (4 * spec.stat_span[1]) + 4 * STAT_DQ, 4, 16)
    effect([w.factors, four[STAT_DV - STAT_DQ], four[STAT_DK - STAT_DQ]], "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f")
