"""Consumer role of the backward's main kernel: two warpgroups, 64 keys each, loop over the query tiles.

Rows of the accumulators are keys. Per query tile (64 queries), warpgroup and thread::

    S  = K Q^T                  64 x 64      p = exp2(S * s + a[q])         a = 8 + e_dO - e_ref - m
    dV += E4M3(p - c[q]) dO     64 x D       c = (l / K) * 2^(8 + e_dO - e_ref), or 0
    dP = V dO^T                 64 x 64      dS = p * (dP * v + b[q])       b = -rowsum(dO8 * Oc)
    dK += E4M3(dS * x) Q        64 x D
    dQ = E4M3(dS * x)^T K       each warpgroup half of D, all 128 keys, two steps later; reduced into global memory

The exponents of dO ride in the statistics; those of K and V are one factor a warp. ``x`` is the power of two under which dS is coded:
dK contracts over the queries and dQ over the keys, and no Hopper MMA scales blocks, so one ``x`` must hold for all keys of the tile and
all queries summed so far. It is found online: from the first query tile's absolute maximum (one barrier), then kept while nothing
overflows. A warp whose values pass 448 lowers its own ``x`` and its share of dK at once, without waiting for the others, and publishes
it beside its codes; the warpgroups compare the eight values before they use the codes for dQ, and bring them to the smallest in the rare
case that they differ.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.numbers import bits_of, exp2, scale_of_byte
from lp_fa4.sm90.backward_layout import (
    KEY_TILE,
    QUERY_TILE,
    STAT_A,
    STAT_B,
    STAT_C,
    STAT_DK,
    STAT_DQ,
    STAT_DV,
    STAT_FLOATS,
    STAT_Q0,
    STAT_S0,
)
from lp_fa4.sm90.backward_load import shared_ints
from lp_fa4.sm90.backward_ops import (
    absolute,
    accumulate,
    arrive,
    effect,
    f16x2,
    half2,
    pick_pairs,
    power_for,
    reciprocal_power,
    redux_max,
    release,
    rescale_codes,
    shared_floats,
    to_codes,
)

CODE_TARGET = 7
"""dS is brought to [128, 256) at the first tile: a factor of 1.75 to 3.5 is left under 448 before ``x`` must move."""
FIRST, SECOND, STEADY = range(3)
BARRIER_ALL = 1
TURN = 4  # first of two named barriers
CONSUMERS = 256


@cute.jit
def key_factors(spec, w, item):
    """(factor of K in S, factor of V in dP, factor of K in dQ) of this warp's 16 keys. Their share in the codes that meet K goes to shared
    memory."""
    at = item.record + 32 + 4 * (w.warp // 2)  # of this warp's group of 32
    fk, fv = scale_of_byte(shared_ints(at, 1)[0]), scale_of_byte(shared_ints(at + 16, 1)[0])
    top = fk
    if const_expr(spec.fold and not spec.k_static):
        four = shared_ints(item.record + 32, 4)
        top = Float32(0.0)
        for g in cutlass.range_constexpr(4):
            top = cute.arch.fmax(top, scale_of_byte(four[g]))
        effect([w.factors + 8, fk / top], "st.shared.f32 [$0], $1;", "r,f")
    if const_expr(spec.fold):  # registers are short
        effect([w.factors + 16, fk, fv], "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f")
    return fk, fv, top


@cute.jit
def take_turn(w):
    """Wait until the other warpgroup has done its stretch of arithmetic: one computes while the products of the other run. Left alone,
    both compute and both wait at the same time."""
    cute.arch.barrier(barrier_id=TURN + w.group, number_of_threads=CONSUMERS)


@cute.jit
def pass_turn(w):
    """Let the other warpgroup compute."""
    cute.arch.barrier_arrive(barrier_id=TURN + 1 - w.group, number_of_threads=CONSUMERS)


@cute.jit
def probabilities(spec, w, S, P, stat, fk, limits):
    """S (scores) becomes p in place; P gets the codes that meet dO."""
    s = shared_floats(stat + 4 * STAT_S0, 2, 8)
    if const_expr(spec.fold):
        fk = shared_floats(w.factors + 16, 1, 4)[0]
    columns = stat + 8 * (w.lane % 4)
    ready = 0 if spec.fold or spec.causal else 2  # registers are short there
    ahead = [shared_floats(columns + 4 * STAT_A + 32 * j, 2, 8) for j in range(ready)]  # while waiting
    take_turn(w)
    for q in cutlass.range_constexpr(4):
        factor = s[q // 2] * fk
        for j in cutlass.range_constexpr(2 * q, 2 * q + 2):
            a = ahead[j] if const_expr(j < ready) else shared_floats(columns + 4 * STAT_A + 32 * j, 2, 8)
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    S[i] = exp2(S[i] * factor + a[c])
        if const_expr(spec.causal):
            diagonal_mask(w, S, limits, q)
        for r in cutlass.range_constexpr(2):
            b0, b1 = 2 * r + 8 * q, 2 * r + 8 * q + 4
            x = [S[b0], S[b0 + 1], S[b1], S[b1 + 1]]
            if const_expr(spec.centred):
                c0 = shared_floats(columns + 4 * STAT_C + 64 * q, 2, 8)
                c1 = shared_floats(columns + 4 * STAT_C + 64 * q + 32, 2, 8)
                x = [x[0] - c0[0], x[1] - c0[1], x[2] - c1[0], x[3] - c1[1]]
            P[r + 2 * q] = code4(x)


def code4(x):
    """Four FP32 to one word of codes."""
    from lp_fa4.common.numbers import e4m3x4

    return e4m3x4(*x)


@cute.jit
def diagonal_mask(w, S, limits, q: cutlass.Constexpr):
    """Zero what causality forbids in quarter ``q`` (16 queries). ``limits[1]``: this thread's first key minus the tile's first query,
    minus (keys - queries): key row r, query column c is allowed if ``limits[1] + r <= c``."""
    if limits[2]:
        for j in cutlass.range_constexpr(2 * q, 2 * q + 2):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    allowed = limits[1] + 8 * r <= 8 * j + c + 2 * (w.lane % 4)
                    S[i] = S[i] if allowed else Float32(0.0)


@cute.jit
def score_gradients(spec, w, S, dP, stat, fv, x, limits, turn: cutlass.Constexpr):
    """S (p) becomes dS * x in place, in ``turn`` or at once. ``limits[0]``: keys left at this thread's first row, ``limits[3]``: the tile
    has a tail here."""
    columns = stat + 4 * STAT_B + 8 * (w.lane % 4)
    if const_expr(spec.fold):
        fv = shared_floats(w.factors + 20, 1, 4)[0]
    factor = fv * x
    ready = 0 if spec.fold or spec.causal else 2
    ahead = [shared_floats(columns + 32 * j, 2, 8) for j in range(ready)]
    if const_expr(turn):
        take_turn(w)
    for j in cutlass.range_constexpr(8):
        b = ahead[j] if const_expr(j < ready) else shared_floats(columns + 32 * j, 2, 8)
        b0, b1 = b[0] * x, b[1] * x
        for r in cutlass.range_constexpr(2):
            i = 2 * r + 4 * j
            S[i] = S[i] * (dP[i] * factor + b0)
            S[i + 1] = S[i + 1] * (dP[i + 1] * factor + b1)
    if limits[3]:  # rows past the sequence's end hold a neighbour's keys, NaN perhaps: replaced, not multiplied
        for r in cutlass.range_constexpr(2):
            keep = 8 * r < limits[0]
            for j in cutlass.range_constexpr(8):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    S[i] = S[i] if keep else Float32(0.0)


def largest(S):
    """Largest magnitude of this thread's values, over four chains."""
    tops = [absolute(S[i]) for i in range(4)]
    for i in range(4, 32):
        tops[i % 4] = cute.arch.fmax(tops[i % 4], absolute(S[i]))
    return cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))


@cute.jit
def first_exponent(w, S):
    """Scale of dS codes for a fresh sum: from the absolute maximum over all 128 keys and 64 queries. Scales S."""
    bits = redux_max(largest(S))
    if w.lane == 0:
        effect([w.peak + 4 * w.warp, bits], "st.shared.b32 [$0], $1;", "r,r")
    cute.arch.barrier(barrier_id=BARRIER_ALL, number_of_threads=CONSUMERS)
    peaks = shared_floats(w.peak, 8, 16)
    top = peaks[0]
    for i in cutlass.range_constexpr(1, 8):
        top = cute.arch.fmax(top, peaks[i])
    x = power_for(bits_of(top), CODE_TARGET)
    for i in cutlass.range_constexpr(32):
        S[i] = S[i] * x
    return x


@cute.jit
def keep_in_range(S, x):
    """If any of this warp's values passes 448, lower its scale: (new x, factor that brings the sums so far to it)."""
    down = Float32(1.0)
    top = largest(S)
    if cute.arch.vote_any_sync(top > 448.0):
        down = power_for(redux_max(top), CODE_TARGET)
        for i in cutlass.range_constexpr(32):
            S[i] = S[i] * down
    return x * down, down


@cute.jit
def recode_if_full(S, codes, x):
    """As :func:`keep_in_range` after ``S`` was coded: looks for 448 (or NaN) among the codes, a third fewer instructions."""
    full = (codes[0] & 0x7F7F7F7F) + 0x02020202
    for i in cutlass.range_constexpr(1, 8):
        full = full | ((codes[i] & 0x7F7F7F7F) + 0x02020202)
    down = Float32(1.0)
    if cute.arch.vote_any_sync((full & -0x7F7F7F80) != 0):
        down = power_for(redux_max(largest(S)), CODE_TARGET)
        for i in cutlass.range_constexpr(32):
            S[i] = S[i] * down
        to_codes(S, codes)
    return x * down, down


@cute.jit
def agree(w, x, buffer):
    """Before the codes in ``buffer`` are used for dQ: bring all eight warps' scales there to the smallest, if they differ.
    Returns (scale of the codes, new x, factor that brings this warp's sums of dK to it)."""
    xs = shared_floats(w.scales + 32 * buffer, 8, 16)
    differ = bits_of(xs[0]) ^ bits_of(xs[1])
    for i in cutlass.range_constexpr(2, 8):
        differ = differ | (bits_of(xs[0]) ^ bits_of(xs[i]))
    low, down = xs[0], Float32(1.0)
    if differ != 0:
        for i in cutlass.range_constexpr(1, 8):
            low = cute.arch.fmin(low, xs[i])
        own = shared_floats(w.scales + 32 * buffer + 4 * w.warp, 1, 4)[0]  # x may have moved since these codes were made
        factor = half2(low * reciprocal_power(own))
        for half in cutlass.range_constexpr(2):
            address = w.strip + buffer * (QUERY_TILE * KEY_TILE) + half * (32 * KEY_TILE)
            words = shared_floats(address, 4, 16)
            out = [rescale_codes(bits_of(words[i]), factor) for i in range(4)]
            effect([address, *out], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BARRIER_ALL, number_of_threads=CONSUMERS)
        down = cute.arch.fmin(low, x) * reciprocal_power(x)
    return low, x * down, down


@cute.jit
def publish(spec, w, S, codes, buffer, x):
    """dS codes to shared memory with keys contiguous (for dQ), this warp's scale beside them."""
    if const_expr(spec.fold and not spec.k_static):
        codes = cute.make_rmem_tensor(8, Int32)
        share = shared_floats(w.factors + 8, 1, 4)[0]
        to_codes(S, codes, (share, share))
    units = [pick_pairs(codes[2 * (j // 2)], codes[2 * (j // 2) + 1], "5140" if j % 2 == 0 else "7362") for j in range(8)]
    address = w.strip + buffer * (QUERY_TILE * KEY_TILE)
    for half in cutlass.range_constexpr(2):
        effect(
            [address + half * (32 * KEY_TILE), *units[4 * half : 4 * half + 4]],
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
            "r,r,r,r,r",
        )
    if w.lane == 0:
        effect([w.scales + 32 * buffer + 4 * w.warp, x], "st.shared.f32 [$0], $1;", "r,f")
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    arrive(w.bars.ds_full + buffer)


@cute.jit
def stage_dq(spec, w, dQ, factor):
    """This warp's 16 x D/2 share of a dQ tile to its staging, in accumulator order."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
    if const_expr(spec.dq_half):
        for j in cutlass.range_constexpr(spec.head_dim // 32):
            words = [f16x2(dQ[8 * j + i] * factor, dQ[8 * j + i + 1] * factor) for i in (0, 2, 4, 6)]
            effect([w.staging + (512 * j + 16 * w.lane), *words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    else:
        for j in cutlass.range_constexpr(spec.head_dim // 16):
            four = [dQ[4 * j + i] * factor for i in range(4)]
            effect([w.staging + (512 * j + 16 * w.lane), *four], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f")


@cute.jit
def send_dq(spec, w, target: Int64):
    """Add the staged share to global memory by one bulk reduction. After a proxy fence and a warp's barrier."""
    if w.lane == 0:
        kind = "noftz.f16" if const_expr(spec.dq_half) else "f32"
        size = Int32(spec.dq_tile_bytes // 8)
        effect([target, w.staging, size], f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [$0], [$1], $2;", "l,r,r")
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def reduce_dq(spec, w, dQ, factor, target: Int64):
    """Stage and send: the unit takes some 2,000 clocks to read an FP32 tile, so that a send at the step's end delays the next staging."""
    stage_dq(spec, w, dQ, factor)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    send_dq(spec, w, target)


@cute.jit
def finish_tiles(spec, w, dK, x, dq_factor, now, more, targets):
    """What is left of a segment's last two query tiles: dQ of both (``more``: there is more than one), dK of the last. ``targets``: this
    warp's addresses in their dQ tiles. dK is rescaled last: its codes were made under the x that came in."""
    down = Float32(1.0)
    if more:
        x, down = finish_two(spec, w, dK, x, dq_factor, now, targets)
    else:
        x, down = finish_one(spec, w, dK, x, dq_factor, now, targets[1])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    send_dq(spec, w, targets[1])
    rescale(dK, down)
    return x


@cute.jit
def finish_one(spec, w, dK, x, dq_factor, now, target: Int64):
    """dK and dQ of a segment's only query tile; dQ is staged. Returns as :func:`keep_in_range`."""
    out, out_phase, buffer, ds_phase = now[2:]
    dQ = cute.make_rmem_tensor(w.mma_q.partition_shape_C((QUERY_TILE, spec.head_dim // 2)), Float32)
    cute.arch.mbarrier_wait(w.bars.t_full + out, out_phase)
    accumulate(w.mma_g, dK, w.dS_operand, w.qt[None, None, None, out], True)
    cute.arch.mbarrier_wait(w.bars.ds_full + buffer, ds_phase)
    low, x, down = agree(w, x, buffer)
    accumulate(w.mma_q, dQ, w.ds[None, None, None, buffer], w.kt, True)
    warpgroup.wait_group(0)
    arrive(w.bars.ds_empty + buffer)
    release(spec, w.bars.t_empty + out, w.peer)
    stage_dq(spec, w, dQ, dq_factor * reciprocal_power(low))
    return x, down


@cute.jit
def finish_two(spec, w, dK, x, dq_factor, now, targets):
    """dQ of the last two query tiles (the second is staged), dK of the last. Returns as :func:`keep_in_range`."""
    out, out_phase, buffer, ds_phase = now[2:]
    other = buffer ^ 1
    first, second = (cute.make_rmem_tensor(w.mma_q.partition_shape_C((QUERY_TILE, spec.head_dim // 2)), Float32) for _ in range(2))
    cute.arch.mbarrier_wait(w.bars.ds_full + other, ds_phase ^ other)
    low, x, down = agree(w, x, other)
    factor = dq_factor * reciprocal_power(low)
    accumulate(w.mma_q, first, w.ds[None, None, None, other], w.kt, True)
    cute.arch.mbarrier_wait(w.bars.t_full + out, out_phase)
    accumulate(w.mma_g, dK, w.dS_operand, w.qt[None, None, None, out], False)
    cute.arch.mbarrier_wait(w.bars.ds_full + buffer, ds_phase)
    low, x, more = agree(w, x, buffer)
    accumulate(w.mma_q, second, w.ds[None, None, None, buffer], w.kt, True)
    warpgroup.wait_group(2)
    arrive(w.bars.ds_empty + other)
    reduce_dq(spec, w, first, factor, targets[0])  # under dK and the other dQ
    warpgroup.wait_group(0)
    arrive(w.bars.ds_empty + buffer)
    release(spec, w.bars.t_empty + out, w.peer)
    stage_dq(spec, w, second, dq_factor * reciprocal_power(low))
    return x, down * more


@cute.jit
def rescale(dK, down):
    """Bring dK's sums to a new scale, in the rare case that it moved."""
    if down < 1.0:
        for i in cutlass.range_constexpr(cute.size(dK)):
            dK[i] = dK[i] * down


@cute.jit
def step(spec, kind: cutlass.Constexpr, w, dV, dK, x, keys, limits, now, last, target: Int64):
    """One query tile. ``kind``: FIRST and SECOND of a segment, or STEADY; ``keys``: factors of :func:`key_factors`, K and V operands;
    ``now``: (stage and phase of Q, dO and dO^T, of Q^T, of dS) of this tile; ``last``: stage and phase of Q^T of the one before, whose dK
    is done here; ``target``: this warp's address in the dQ tile of two before, which is done here too (so that
    neither warpgroup waits for the other unless it is more than a step ahead). Returns x.

    Every MMA is issued and awaited inside one step: ptxas cannot follow a group across the loop's back edge and serializes every wgmma
    as soon as dK is read there (C7514).
    """
    fk, fv, dq_factor, k, v = keys
    bars = w.bars
    stage, phase, buffer, ds_phase = now[0], now[1], now[4], now[5]
    stat = w.stat + stage * (4 * STAT_FLOATS)
    down = Float32(1.0)
    late = spec.causal and spec.fold  # too few registers for S beside dQ, and for dP beside S
    S = cute.make_rmem_tensor(w.score_shape, Float32)
    cute.arch.mbarrier_wait(bars.a_full + stage, phase)
    if const_expr(not late):
        accumulate(w.mma_s, S, k, w.q[None, None, None, stage], True)
    low = Float32(1.0)
    if const_expr(kind == STEADY):
        cute.arch.mbarrier_wait(bars.ds_full + buffer, ds_phase ^ 1)
        low, x, down = agree(w, x, buffer)
        dQ = cute.make_rmem_tensor(w.mma_q.partition_shape_C((QUERY_TILE, spec.head_dim // 2)), Float32)
        accumulate(w.mma_q, dQ, w.ds[None, None, None, buffer], w.kt, True)
    if const_expr(kind != FIRST):
        cute.arch.mbarrier_wait(bars.t_full + last[0], last[1])
        accumulate(w.mma_g, dK, w.dS_operand, w.qt[None, None, None, last[0]], kind == SECOND)
    if const_expr(kind == STEADY):
        warpgroup.wait_group(1)
        arrive(bars.ds_empty + buffer)
        reduce_dq(spec, w, dQ, dq_factor * reciprocal_power(low), target)  # under dK; at once, for it is read out slowly
    dP = cute.make_rmem_tensor(w.score_shape, Float32)
    if const_expr(late):
        accumulate(w.mma_s, S, k, w.q[None, None, None, stage], True)
        warpgroup.wait_group(0)
    else:
        accumulate(w.mma_s, dP, v, w.do[None, None, None, stage], True)
        if const_expr(kind != STEADY):  # S is there, dK may not be
            warpgroup.wait_group(1 if const_expr(kind == FIRST) else 2)
    probabilities(spec, w, S, w.P, stat, fk, limits)  # under dK and dP
    pass_turn(w)
    if const_expr(late):
        accumulate(w.mma_s, dP, v, w.do[None, None, None, stage], True)
    accumulate(w.mma_g, dV, w.P_operand, w.dot[None, None, None, stage], kind == FIRST)
    warpgroup.wait_group(0)
    if const_expr(kind != FIRST):
        release(spec, bars.t_empty + last[0], w.peer)
    first = const_expr(kind == FIRST)  # the first exponent wants both warpgroups at once
    score_gradients(spec, w, S, dP, stat, fv, Float32(1.0) if first else x, limits, not first)
    more = Float32(1.0)
    if const_expr(kind == FIRST):
        x = first_exponent(w, S)
    elif const_expr(spec.fold):
        x, more = keep_in_range(S, x)
    if const_expr(spec.fold):
        e = shared_floats(stat + 4 * STAT_Q0, 2, 8)
        to_codes(S, w.dS, (e[0], e[1]))
    else:
        to_codes(S, w.dS)
        if const_expr(kind != FIRST):
            x, more = recode_if_full(S, w.dS, x)
    if const_expr(kind != FIRST):
        pass_turn(w)
        rescale(dK, down * more)
    cute.arch.mbarrier_wait(bars.ds_empty + buffer, ds_phase ^ 1)
    publish(spec, w, S, w.dS, buffer, x)
    release(spec, bars.a_empty + stage, w.peer)  # after publish's proxy fence: the next copy overwrites statistics that were read here
    return x


def segment_factors(w, stage, top):
    """Factor of dQ, constant over a segment: read from its first tile's statistics. Those of dV and dK are kept in shared memory."""
    four = shared_floats(w.stat + stage * (4 * STAT_FLOATS) + 4 * STAT_DQ, 4, 16)
    effect([w.factors, four[STAT_DV - STAT_DQ], four[STAT_DK - STAT_DQ]], "st.shared.v2.f32 [$0], {$1, $2};", "r,f,f")
    return four[0] * top
