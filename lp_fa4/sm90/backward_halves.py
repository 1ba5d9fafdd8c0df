"""A query tile of the backward's computing warpgroups with sums in FP16: packed arithmetic, two queries a register.

As ``backward_compute``, whose roles, hand-over and scale of dS these are, where exponents do not differ inside a tile::

    S  = K Q^T                  p = exp2(S * s + a[q])                              packed FP16, as is all that follows
    dV += E4M3(p - c[q]) dO
    dP = V dO^T                 dS * x = p * (dP * f + b[q] * g)                    f = x 2^e_v, g = x 2^(largest e_v)
    dK += E4M3(dS * x) Q

FP16 sums take half of the registers and of what ``wgmma`` reads and writes of them. So K and V stay in registers for an item, as A operands
(shared memory has no time for them), dP is issued with S, before the exponentials, and dV is awaited behind the codes of dS.

Range. No row of the codes of q and dO has an L1 norm above 146, so ``|S|, |dP| <= 448 * 146 < 65504``; else the pre-pass says so and the
form with FP32 sums takes the sequence. ``b`` is a mean of dP's over keys, in units of the largest exponent of v, and ``g <= 1/2``, so the
bracket stays finite. What leaves FP16 after that is p times it: an infinity, whose code is full and seen like any other; then dS is made
again from p and dP, which are kept until the vote. A sum of dV or dK that overflows stays an infinity or NaN: the item is left to the form
with FP32 sums, all but its dQ (:func:`widened`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T

from lp_fa4.common.halves import e4m3_of, exp2_2, fma2, half_of, mul2, pair
from lp_fa4.common.matrices import load_matrices, shared_words
from lp_fa4.common.numbers import bits_of, float_of, inline_ptx, pinned
from lp_fa4.sm90.backward_compute import (
    FIRST,
    diagonal_mask,
    follow_scales,
    free_phase,
    full_codes,
    hand_over,
    note_scale,
    scale_sums,
    store_codes,
    warpgroup_maximum,
)
from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE, REDO, STAT_AC2, STAT_B2, STAT_S0, STAT_VT, TROUBLE
from lp_fa4.sm90.backward_ops import effect, larger, power_for, redux_max, shared_floats
from lp_fa4.sm90.wgmma import product

CODE_TARGET = 5
"""dS is brought to [32, 64) at the first tile: a sum of dK over 2,048 queries overflows from 32 a query on."""
TOP_SCALE = 0.5
"""Largest factor on b: its sum with dP stays under 448 * 146."""
PROBE = 2.0**-10
"""Factor under which the first tile's dS is looked at: ``256 * 2^17`` of it is finite."""
FAR = 2.0**-14
"""Further factor where dS left FP16: it did so under a factor of at least 2^-9, which stays a FP16 number with this."""


def packed(text: str, *operands):
    """One instruction on packed FP16."""
    return Int32(inline_ptx(T.i32(), list(operands), text, "=r" + ",r" * len(operands)))


def sub2(a, b):
    """``a - b``."""
    return packed("sub.rn.f16x2 $0, $1, $2;", a, b)


def largest2(a, b):
    """The larger magnitude of each half; NaN wins."""
    return packed("{.reg .b32 x, y; abs.f16x2 x, $1; abs.f16x2 y, $2; max.NaN.f16x2 $0, x, y;}", a, b)


def wider(x):
    """The larger half of packed FP16 of at least 0, in FP32; NaN wins."""
    text = "{.reg .b16 l, h; mov.b32 {l, h}, $1; max.NaN.f16 l, l, h; cvt.f32.f16 $0, l;}"
    return Float32(inline_ptx(T.f32(), [x], text, "=f,r"))


def all_finite(tops):
    """Whether none of some magnitudes, FP32, is an infinity or NaN."""
    top = tops[0]
    for more in tops[1:]:
        top = larger(top, more)
    return top < Float32.inf


@cute.jit
def report(grads, tag, tops):
    """Leave the item (``tag``: its number) to the form with FP32 sums if one of this thread's largest magnitudes, FP32, is not finite."""
    if not all_finite(tops):
        for place in (TROUBLE, REDO + tag):
            effect([grads.state + 4 * Int64(place), Int32(1)], "st.relaxed.gpu.global.b32 [$0], $1;", "l,r")


def row_tops(w, words):
    """Largest magnitude of each of a thread's rows, FP32, 0 for one past the sequence's end; NaN wins."""
    keep = rows_left(w)
    tops = [largest2(words[r] & keep[r], words[r + 2] & keep[r]) for r in range(2)]
    for i in range(4, cute.size(words)):
        tops[i % 2] = largest2(tops[i % 2], words[i] & keep[i % 2])
    return [wider(top) for top in tops]


@cute.jit
def widened(spec, w, sums, grads, tag):
    """A segment's FP16 sums as FP32 (FP32 ones as they are). An infinity or NaN stayed one: then the item is left to the form with FP32
    sums. ``tag``: its number."""
    if const_expr(not spec.halves):
        return sums
    words, out = cute.recast_tensor(sums, Int32), cute.make_rmem_tensor(cute.size(sums), Float32)
    report(grads, tag, row_tops(w, words))
    for i in cutlass.range_constexpr(cute.size(words)):
        out[2 * i], out[2 * i + 1] = half_of(words[i], 0), half_of(words[i], 1)
    return out


@cute.jit
def load_keys(spec, w):
    """This warp's 16 keys of K and V from shared memory to the A operands: once an item instead of once a query tile."""
    lane = pinned(w.lane)
    row = 16 * w.warp + (lane & 15)
    swizzle = row & 7 if const_expr(spec.head_dim == 128) else (row >> 1) & 3
    line = w.kv_address + row * spec.head_dim
    for operand, base in ((w.k, 0), (w.v, KEY_TILE * spec.head_dim)):
        words = cute.recast_tensor(operand, Int32)
        for k in cutlass.range_constexpr(spec.head_dim // 32):
            four = load_matrices(line + base + (((2 * k + (lane >> 4)) ^ swizzle) << 4))
            for i in cutlass.range_constexpr(4):
                words[4 * k + i] = four[i]


@cute.jit
def probabilities(spec, w, S, p, P, statistics, scale, diagonal):
    """From S (scores) p, and P, their codes, under ``scale``, packed. Word ``r + 2 j`` holds queries ``8 j + 2 (lane % 4)`` and the next of
    row r. ``statistics``: of 16 queries each, a twice, c twice."""
    seen = Int32(0) if const_expr(not spec.causal) else (Int32(-1) if diagonal + 15 <= 0 else Int32(0))  # all of this warp's keys are
    for q in cutlass.range_constexpr(4):
        a = statistics[q]
        for r in cutlass.range_constexpr(2):
            t = []
            for i in cutlass.range_constexpr(2):
                at = r + 4 * q + 2 * i
                p[at] = exp2_2(fma2(S[at], scale, a[i]))
                if const_expr(spec.centred or spec.suffix):
                    t.append(sub2(p[at], a[2 + i] & seen if const_expr(spec.causal) else a[2 + i]))
                else:
                    t.append(p[at])
            P[r + 2 * q] = e4m3_of(*t)
    if const_expr(spec.causal):
        diagonal_mask(w, P, p, diagonal)


def score_scale(stat, fk):
    """Packed factor of a query tile's scores."""
    return pair(shared_floats(stat + 4 * STAT_S0, 1, 4)[0] * fk)


def rows_left(w):
    """Masks of a thread's two rows: 0 past the sequence's end. What is there is a neighbour's, NaN perhaps: replaced, not multiplied."""
    left = shared_words(w.factors + 24, 1)[0] - (pinned(w.lane) >> 2)
    return [(Int32(8 * r) - left) >> 31 for r in range(2)]


@cute.jit
def clear_rows(w, words, left):
    """Words of rows past the sequence's end, codes or packed numbers, become 0. ``left``: rows up to there."""
    if left < 16:
        keep = rows_left(w)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] & keep[i % 2]


def means(w, stat):
    """b of a tile, of 32 queries each."""
    return [shared_words(stat + 4 * STAT_B2 + w.column + 64 * half, 4) for half in range(2)]


@cute.jit
def score_gradients(w, p, dP, b_of, f, g):
    """dS under the packed factors f and g (see above); p and dP stay. ``b_of``: of :func:`means`."""
    dS = [None] * 16
    for half in cutlass.range_constexpr(2):
        b = b_of[half]
        for i in cutlass.range_constexpr(4):
            shift = mul2(b[i], g)
            for r in cutlass.range_constexpr(2):
                at = r + 2 * (4 * half + i)
                dS[at] = mul2(p[at], fma2(dP[at], f, shift))
    return dS


def to_codes(dS, codes):
    """Packed dS to eight words of the A operand."""
    for word in range(8):
        at = word % 2 + 4 * (word // 2)
        codes[word] = e4m3_of(dS[at], dS[at + 2])


def top_of(words):
    """Largest magnitude of packed FP16, FP32, over two chains; NaN wins."""
    tops = [largest2(words[i], words[i + 2]) for i in range(2)]
    for i in range(4, len(words)):
        tops[i % 2] = largest2(tops[i % 2], words[i])
    return wider(largest2(tops[0], tops[1]))


@cute.jit
def largest(w, dS, left):
    """Largest magnitude of this thread's values, FP32. ``left``: rows up to the sequence's end."""
    words = cute.make_rmem_tensor(16, Int32)
    for i in cutlass.range_constexpr(16):
        words[i] = dS[i]
    clear_rows(w, words, left)
    return top_of([words[i] for i in range(16)])


@cute.jit
def first_exponent(spec, w, dS, stat, stage, phase, left):
    """Scale of dS for a fresh sum, from its absolute maximum over the warpgroup's keys and the tile's queries under ``PROBE``."""
    top = warpgroup_maximum(spec, w, largest(w, dS, left), stage, phase)
    factor = cute.arch.fmin(power_for(bits_of(top), CODE_TARGET) * PROBE, Float32(TOP_SCALE))
    if top == 0.0:  # nothing seen yet
        factor = Float32(TOP_SCALE)
    return factor * inverse_unit(shared_floats(stat + 4 * STAT_VT, 1, 4)[0])


def inverse_unit(power):
    """Reciprocal of a power of two, at most 2^100."""
    return float_of(cutlass.max(cutlass.min(Int32(0x7F000000) - bits_of(power), Int32(227 << 23)), Int32(1 << 23)))


@cute.jit
def lower(w, p, dP, dK, codes, stat, x, fv, unit):
    """Bring this warp's scale of dS, its codes and its sums of dK down to the range of codes. ``x``: the scale; ``fv``, ``unit``: 2^e_v
    of these keys and the largest. Returns the new scale. Rare, so one piece of code looks at dS and makes the codes at last: it lies in
    the loop over the tiles, whose turns jump over it."""
    left, b_of = shared_words(w.factors + 24, 1)[0], means(w, stat)
    down, known, more = Float32(1.0), Int32(0), Int32(1)
    while more > 0:
        dS = score_gradients(w, p, dP, b_of, pair(x * fv * down), pair(x * unit * down))
        to_codes(dS, codes)
        more = known ^ 1
        if known == 0:
            bits = redux_max(largest(w, dS, left))
            far = (bits == 0x7F800000) & (down == 1.0)  # it left FP16
            known = Int32(0) if far else Int32(1)
            down = Float32(FAR) if far else down * power_for(bits, CODE_TARGET)
    clear_rows(w, codes, left)
    scale_sums(dK, down)
    return x * down


@cute.jit
def start_scores(spec, w, S, dP, stage, phase, there=None):
    """Issue S and dP of a query tile, once its operands are there. ``there``: not 0 if they are known to be."""
    ring = w.low + stage * w.tile
    if const_expr(there is None):  # noqa: SIM114 - known to the compiler, the other is not
        cute.arch.mbarrier_wait(w.bars.a_full + stage, phase)
    elif there == 0:
        cute.arch.mbarrier_wait(w.bars.a_full + stage, phase)
    product(w.mma_s, S, w.k, w.q, True, ring, spec.head_dim, zero=w.zero)
    product(w.mma_s, dP, w.v, w.do, True, ring + w.places["do"], spec.head_dim, zero=w.zero, fence=False)


@cute.jit
def step(
    spec, kind: cutlass.Constexpr, w, dV, dK, x, factors, keys, diagonal, now, last, scores=None, summed=None, following=None, there=None
):
    """As ``backward_compute.step``, with dP issued before the exponentials and dV awaited at the end. ``factors``: packed, of dP and of b,
    as the step before left them; ``keys``: as there, then the rows up to the sequence's end and the packed factor of scores (None: each
    tile has its own). ``scores``: S and dP, issued already (None: issued here); ``summed``: whether dK holds a sum; ``there``: whether Q
    and dO were there when the step before looked; ``following``: stage and phase of the next tile's, or None. Returns x, ``factors`` and,
    with ``following``, whether those are there.

    What would cost a latency is asked for before something else is awaited: statistics behind the hand-over (any earlier they queue up
    behind the operands of products), barriers before products and before the last wait.
    """
    fk, fv, _, _, left, scale = keys
    bars = w.bars
    stage, phase, out, out_phase = now
    last_stage, _, last_out, last_phase = last
    stat = w.stat + stage * (4 * spec.stat_span[1])
    ring = w.low + stage * w.tile
    turned_there = None
    if const_expr(kind != FIRST and there is not None):
        turned_there = cute.arch.mbarrier_test_wait(bars.t_full + last_out, last_phase)
    if const_expr(scores is None):
        S, dP = cute.make_rmem_tensor(w.score_shape, Float16), cute.make_rmem_tensor(w.score_shape, Float16)
        start_scores(spec, w, S, dP, stage, phase, there)
    else:
        S, dP = scores
    if const_expr(kind != FIRST):
        if const_expr(turned_there is None):  # noqa: SIM114 - as above
            cute.arch.mbarrier_wait(bars.t_full + last_out, last_phase)
        elif not turned_there:
            cute.arch.mbarrier_wait(bars.t_full + last_out, last_phase)
        turned = w.low + w.places["qt"] + last_out * w.tile
        product(w.mma_g, dK, w.dS_operand, w.qt, False, turned, QUERY_TILE, zero=w.zero, fence=False, summed=summed)
        hand_over(spec, w, last_stage, last_out)
    if const_expr(scale is None):
        scale = score_scale(stat, fk)
    statistics = [shared_words(stat + 4 * STAT_AC2 + w.column + 64 * q, 4) for q in range(4)]
    warpgroup.wait_group(1 if const_expr(kind == FIRST) else 2)
    p = cute.make_rmem_tensor(16, Int32)
    S, dP = cute.recast_tensor(S, Int32), cute.recast_tensor(dP, Int32)
    probabilities(spec, w, S, p, w.P, statistics, scale, diagonal)
    product(w.mma_g, dV, w.P_operand, w.dot, kind == FIRST, ring + w.places["dot"], QUERY_TILE, zero=w.zero)
    b_of = means(w, stat)
    warpgroup.wait_group(1)
    if const_expr(kind != FIRST):
        if w.lane == 0:
            cute.arch.mbarrier_arrive(bars.t_empty + last_out)
        if const_expr(spec.follows):
            x = follow_scales(spec, w, stage, phase, x, dK)
            factors = both_factors(spec, stat, x, fv)
    else:
        unit = unit_of(spec, stat, fv)
        probe = inverse_unit(unit) * PROBE
        looked = score_gradients(w, p, dP, b_of, pair(probe * fv), pair(probe * unit))
        x = first_exponent(spec, w, looked, stat, stage, phase, left)
        factors = both_factors(spec, stat, x, fv)
    dS = score_gradients(w, p, dP, b_of, *factors)
    to_codes(dS, w.dS)
    clear_rows(w, w.dS, left)
    full = Int32(0) if const_expr(kind == FIRST) else full_codes(w.dS)
    cute.arch.mbarrier_wait(bars.ds_empty + out, free_phase(spec, out_phase))
    store_codes(w, w.dS, out, x)
    if const_expr(kind != FIRST):  # noqa: SIM102 - known to the compiler, the other is not
        if cute.arch.vote_any_sync(full != 0):
            x = lower(w, p, dP, dK, w.dS, stat, x, fv, unit_of(spec, stat, fv))
            factors = both_factors(spec, stat, x, fv)
            store_codes(w, w.dS, out, x)
    if const_expr(spec.follows):
        note_scale(w, stage, phase, x)
    if const_expr(following is not None):
        there = Int32(cute.arch.mbarrier_test_wait(bars.a_full + following[0], following[1]))
    warpgroup.wait_group(0)
    if const_expr(following is not None):
        return x, factors, there
    return x, factors


def unit_of(spec, stat, fv):
    """2^e_v, e_v the largest exponent of v in the sequence and head. ``fv``: that of these keys."""
    return fv if spec.v_static else shared_floats(stat + 4 * STAT_VT, 1, 4)[0]


def both_factors(spec, stat, x, fv):
    """Packed factors of dP and of b under scale ``x``."""
    factor = pair(x * fv)
    return factor, factor if spec.v_static else pair(x * unit_of(spec, stat, fv))
