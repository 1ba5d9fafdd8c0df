"""Online softmax of one 64 x 128 tile of scores, in the registers of the warpgroup that computed it.

An accumulator fragment holds, per thread, rows ``lane // 4`` and ``+ 8`` of its warp's 16 and columns
``8 j + 2 (lane % 4) + c``: element ``c + 2 r + 4 j``. All row statistics are in log2 units.

P is relative to ``reference``, which moves only when a score exceeds it by more than a threshold, so that
``2**(p_log2 + growth) <= 448``. The threshold is wide, so that few tiles move a reference. Tiles that a mask may cut look for FP32 maxima
first. A whole tile goes one of two ways, by ``spec.retries``, as measured:

* It is *assumed* that no reference moves. The largest P is followed by integer maxima of FP32 bits (P is not negative; three operands an
  instruction), which also give the row's true maximum at the end; a warp that finds one past E4M3's range does its tile again with the
  references moved (``retry`` in ``forward_consumer``).
* The scores become the exponents of P in place while P V of the tile before runs (``prepare``), and the maxima of their bits are checked
  against E4M3's range before any exponential.

Exponents of V under 32 keys are folded into P (``s + e_v``): the reference then bounds those sums, the row sum takes them out again,
and the centre is folded alike and bounds the reference too. P of a block may then be far below its largest, so such tiles always look
at their scores first.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import bits_of, e4m3x4, exp2, float_of, log2, max3, order_after, quad_max, quad_sum
from lp_fa4.sm90.forward_config import KEY_TILE

COLUMN_PAIRS = KEY_TILE // 8


LARGEST_CODE = 0x43D74000
"""FP32 bits of 430.5, some way below E4M3's largest, 448: a P above it moves its row's reference."""
LARGEST_EXPONENT = 0x410C0000
"""FP32 bits of 8.75, some way below the logarithm of 448: an exponent of P above it does."""


class RowState:
    """Registers of a thread's two rows; every member is a fragment, mutated in place.

    ``sum``: of unrounded P; ``center``: what is taken off P; ``tile_sum``, ``tile_peak``: of one tile, which may be done again (in units of
    ``2**p_log2``). ``peak``, per thread: FP32 bits of the largest P, or, where tiles are not done again, of its exponent, which is at
    least ``p_log2`` once a key was seen, since the reference is a score. ``maximum``: of the scores, per thread, and ``mean``: of the first
    tile's scores (both folded). ``alpha``: what the last move of the reference multiplies O by. ``exponents``: of V: O's unit and the
    pending tile's.
    """

    def __init__(self):
        self.reference, self.maximum, self.sum, self.mean = (cute.make_rmem_tensor(2, Float32) for _ in range(4))
        self.alpha, self.center, self.tile_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
        self.peak, self.tile_peak = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
        self.exponents = cute.make_rmem_tensor(2, Float32)


@cute.jit
def mask_scores(scores: cute.Tensor, column: Int32, limit0: Int32, limit1: Int32):
    """Scores of keys at or past a row's limit (counted from the tile's first key) become -inf.

    Their codes become those of minus the centre, and meet zeros: V's copy holds 0 where there is no token, and the producer clears
    what belongs to other sequences. (Causal rows are not centred.)
    """
    for j in cutlass.range_constexpr(COLUMN_PAIRS):
        for c in cutlass.range_constexpr(2):
            at = 8 * j + c + column
            scores[c + 4 * j] = scores[c + 4 * j] if at < limit0 else -Float32.inf
            scores[c + 2 + 4 * j] = scores[c + 2 + 4 * j] if at < limit1 else -Float32.inf


@cute.jit
def row_maximum(spec: cutlass.Constexpr, scores, scale, exponents, r: cutlass.Constexpr):
    """Per thread: (largest scaled score of row r, the largest with V's exponent added).

    ``scale``: FP32 factors from raw score to log2 units, one per exponent group of K; ``exponents``: of V, or empty.
    """
    groups = max(len(scale), len(exponents), 1)
    pairs = COLUMN_PAIRS // groups
    chains = 4
    value, high = -Float32.inf, -Float32.inf
    for g in cutlass.range_constexpr(groups):
        at = [c + 2 * r + 4 * j for j in range(g * pairs, (g + 1) * pairs) for c in range(2)]
        best = [scores[at[i]] for i in range(chains)]
        for i in cutlass.range_constexpr(chains, len(at)):
            best[i % chains] = cute.arch.fmax(best[i % chains], scores[at[i]])
        part = cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3]))
        part = part * scale[g % len(scale)]
        value = part if const_expr(g == 0) else cute.arch.fmax(value, part)
        if const_expr(spec.folded):
            part = part + exponents[g % len(exponents)]
            high = part if const_expr(g == 0) else cute.arch.fmax(high, part)
        else:
            high = value
    return value, high


@cute.jit
def first_mean(scores: cute.Tensor, scale, r: cutlass.Constexpr, keys: Int32):
    """Mean of the scaled scores of the first tile's keys (masked ones hold -inf and are left out); 0 of no key."""
    total = Float32(0.0)
    pairs = COLUMN_PAIRS // len(scale)
    whole = keys >= KEY_TILE
    if const_expr(len(scale) > 1):  # a second version of this costs their loop registers
        whole = False
    if whole:
        parts = [scores[c + 2 * r] for c in range(2)]
        for j in cutlass.range_constexpr(1, COLUMN_PAIRS):
            for c in cutlass.range_constexpr(2):
                parts[c] = parts[c] + scores[c + 2 * r + 4 * j]
        total = (parts[0] + parts[1]) * scale[0]
    else:
        for g in cutlass.range_constexpr(len(scale)):
            part = Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                for c in cutlass.range_constexpr(2):
                    value = scores[c + 2 * r + 4 * (g * pairs + j)]
                    part = part + (Float32(0.0) if value == -Float32.inf else value)
            total = total + part * scale[g]
    count = cutlass.max(cutlass.min(keys, KEY_TILE), 1)
    return quad_sum(total) * cute.arch.rcp_approx(Float32(count))


@cute.jit
def top_exponent(spec: cutlass.Constexpr, exponents) -> Float32:
    """Largest folded exponent of V in the tile; 0 where none is folded."""
    top = Float32(0.0)
    if const_expr(spec.folded):
        top = exponents[0]
        for g in cutlass.range_constexpr(1, len(exponents)):
            top = cute.arch.fmax(top, exponents[g])
    return top


@cute.jit
def start_state(spec: cutlass.Constexpr, scores, state, scale, exponents, keys: Int32):
    """Row state from an item's first tile. ``keys``: the sequence's number of keys."""
    top = top_exponent(spec, exponents)
    for r in cutlass.range_constexpr(2):
        value, high = row_maximum(spec, scores, scale, exponents, r)
        mean = first_mean(scores, scale, r, keys) if const_expr(spec.centred) else Float32(0.0)
        if const_expr(spec.centred and spec.folded):
            high = cute.arch.fmax(high, mean + top)
        high = quad_max(high)
        reference = Float32(0.0) if high == -Float32.inf else high
        state.reference[r], state.sum[r], state.alpha[r] = reference, Float32(0.0), Float32(1.0)
        if const_expr(spec.folded):
            state.maximum[r], state.mean[r] = value, mean
        else:
            state.peak[r] = Int32(0) if const_expr(spec.retries) else bits_of(high - reference + spec.p_log2)
            state.center[r] = exp2(mean - reference + spec.p_log2)


@cute.jit
def shift_reference(spec: cutlass.Constexpr, state, high: Float32, r: cutlass.Constexpr, growth: cutlass.Constexpr):
    """Row r's reference moved to ``high``, the tile's largest score of the row, if that exceeds it by ``growth``; ``alpha`` set, what is
    kept follows. Returns the move."""
    old = state.reference[r]
    new = high if high > old + growth else old
    alpha = exp2(old - new)
    state.alpha[r], state.reference[r] = alpha, new
    state.sum[r] = state.sum[r] * alpha
    if const_expr(not spec.folded):
        state.center[r] = state.center[r] * alpha
        if const_expr(spec.retries):
            state.peak[r] = bits_of(float_of(state.peak[r]) * alpha)
        else:
            state.peak[r] = cutlass.max(bits_of(float_of(state.peak[r]) + (old - new)), bits_of(high - new + spec.p_log2))
    return old - new


@cute.jit
def move_reference(spec: cutlass.Constexpr, scores, state, scale, exponents, r: cutlass.Constexpr, growth: cutlass.Constexpr):
    """Row r of a later tile: maxima, the reference moved if they exceed it by ``growth``."""
    value, high = row_maximum(spec, scores, scale, exponents, r)
    if const_expr(spec.folded):
        state.maximum[r] = cute.arch.fmax(state.maximum[r], value)
    if const_expr(spec.centred and spec.folded):
        high = cute.arch.fmax(high, state.mean[r] + top_exponent(spec, exponents))
    shift_reference(spec, state, quad_max(high), r, growth)


@cute.jit
def prepare(spec: cutlass.Constexpr, scores, state, scale):
    """Scores of a whole tile to the exponents of P, in place, and the references moved where one is past what E4M3 takes.

    Integer maxima of FP32 bits order the positive ones, three an instruction; where all are negative any negative result does.
    """
    groups = len(scale)
    tops = [Int32(0), Int32(0)]
    for r in cutlass.range_constexpr(2):
        offset = spec.p_log2 - state.reference[r]
        for q in cutlass.range_constexpr(8):
            a = 2 * r + 8 * q
            for i in (a, a + 1, a + 4, a + 5):
                scores[i] = scores[i] * scale[q * groups // 8] + offset
            tops[r] = max3(tops[r], bits_of(scores[a]), bits_of(scores[a + 1]))
            tops[r] = max3(tops[r], bits_of(scores[a + 4]), bits_of(scores[a + 5]))
    for r in cutlass.range_constexpr(2):
        state.peak[r] = cutlass.max(state.peak[r], tops[r])
    if cute.arch.vote_any_sync(cutlass.max(tops[0], tops[1]) > LARGEST_EXPONENT):
        raise_references(spec, scores, state)


@cute.jit
def raise_references(spec: cutlass.Constexpr, scores, state):
    """References of this warp's rows moved to the tile's maxima; the exponents follow."""
    for r in cutlass.range_constexpr(2):
        at = [c + 2 * r + 4 * j for j in range(COLUMN_PAIRS) for c in range(2)]
        best = [scores[at[i]] for i in range(4)]
        for i in cutlass.range_constexpr(4, len(at)):
            best[i % 4] = cute.arch.fmax(best[i % 4], scores[at[i]])
        top = quad_max(cute.arch.fmax(cute.arch.fmax(best[0], best[1]), cute.arch.fmax(best[2], best[3])))
        shift = shift_reference(spec, state, top + (state.reference[r] - spec.p_log2), r, 0.0)
        for i in at:
            scores[i] = scores[i] + shift


@cute.jit
def exponentiate(spec: cutlass.Constexpr, scores, codes, state, scale, after, runs: cutlass.Constexpr = 8):
    """Scores to P (times ``2**p_log2``), P minus the centre to codes; ``tile_sum`` and, where a tile may be done again, ``tile_peak`` of P.
    Scores stay. ``scale``: None where ``prepare`` has seen the scores.

    ``after``: None, or (an FP32 to wait for, a run-time zero): left alone, ptxas may pull the exponentials above the wait for P V, and
    with them the moment when the other warpgroup gets its turn; or all of them in front of what uses them. So a group of four starts
    behind the codes of the group ``lag`` before it (its first does; the rest follow), in every ``tied``-th run of 16 keys.

    Columns 2t, 2t+1, 8+2t, 9+2t of each 16 are bytes 4t .. 4t+3 of the A operand ("accumulator" order). ``runs``: of 16 keys.
    """
    offsets = [spec.p_log2 - state.reference[r] for r in range(2)]
    if const_expr(spec.retries and after is not None):
        offsets = [order_after(x, *after) for x in offsets]
    sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
    peaks, made = [Int32(0), Int32(0)], []
    for q in cutlass.range_constexpr(runs):
        for r in cutlass.range_constexpr(2):
            a = 2 * r + 8 * q
            if const_expr(spec.retries and after is not None and len(made) >= spec.lag > 0 and q % spec.tied == 0):
                offsets[r] = order_after(offsets[r], float_of(made[len(made) - spec.lag]), after[1])
            x = [scores[i] for i in (a, a + 1, a + 4, a + 5)]
            if const_expr(scale is not None):
                x = [y * scale[q * len(scale) // 8] + offsets[r] for y in x]
            if const_expr(not spec.retries and after is not None and q % spec.tied == 0):
                earlier = float_of(made[len(made) - spec.lag]) if len(made) >= spec.lag else after[0]
                x[0] = order_after(x[0], earlier, after[1])
            p = [exp2(y) for y in x]
            for i in cutlass.range_constexpr(4):
                sums[r][i % 2] = sums[r][i % 2] + p[i]
            if const_expr(spec.retries):
                for i in cutlass.range_constexpr(2):
                    peaks[r] = max3(peaks[r], bits_of(p[2 * i]), bits_of(p[2 * i + 1]))
            made.append(e4m3x4(*[y - state.center[r] if const_expr(spec.centred) else y for y in p]))
            codes[r + 2 * q] = made[-1]
    for i in cutlass.range_constexpr(2 * runs, 16):
        codes[i] = Int32(0)
    for r in cutlass.range_constexpr(2):
        state.tile_sum[r], state.tile_peak[r] = sums[r][0] + sums[r][1], peaks[r]


@cute.jit
def exponentiate_folded(spec: cutlass.Constexpr, scores, codes, state, scale, exponents, after):
    """The same with V's exponents inside P; no peaks."""
    for r in cutlass.range_constexpr(2):
        state.tile_sum[r] = Float32(0.0)
    for g in cutlass.range_constexpr(len(exponents)):
        for r in cutlass.range_constexpr(2):
            offset = spec.p_log2 - state.reference[r]
            if const_expr(after is not None):
                offset = order_after(offset, *after)
            offset = offset + exponents[g]
            center = exp2(state.mean[r] + offset)
            part = Float32(0.0)
            for q in cutlass.range_constexpr(2 * g, 2 * g + 2):
                a = 2 * r + 8 * q
                p = [exp2(scores[i] * scale[g % len(scale)] + offset) for i in (a, a + 1, a + 4, a + 5)]
                part = part + ((p[0] + p[1]) + (p[2] + p[3]))
                codes[r + 2 * q] = e4m3x4(*[x - center if const_expr(spec.centred) else x for x in p])
            state.tile_sum[r] = state.tile_sum[r] + part * exp2(-exponents[g])


@cute.jit
def over_range(state):
    """Whether a P of this thread's tile is near E4M3's end, or NaN."""
    return cutlass.max(state.tile_peak[0], state.tile_peak[1]) > LARGEST_CODE


@cute.jit
def take_tile(spec: cutlass.Constexpr, state):
    """The tile's sums and peaks into the rows'."""
    for r in cutlass.range_constexpr(2):
        state.sum[r] = state.sum[r] + state.tile_sum[r]
        if const_expr(spec.retries and not spec.folded):
            state.peak[r] = cutlass.max(state.peak[r], state.tile_peak[r])


@cute.jit
def center_of(spec: cutlass.Constexpr, state, r: cutlass.Constexpr) -> Float32:
    """What was taken off P of row ``r``, relative to its reference."""
    return exp2(state.mean[r] - state.reference[r]) if const_expr(spec.folded) else state.center[r] * 2.0**-spec.p_log2


@cute.jit
def mean_of(spec: cutlass.Constexpr, state, r: cutlass.Constexpr) -> Float32:
    """Mean of the first tile's scores of row ``r``: what its centre is the exponential of."""
    return state.mean[r] if const_expr(spec.folded) else state.reference[r] + log2(center_of(spec, state, r))


@cute.jit
def maximum_of(spec: cutlass.Constexpr, state, r: cutlass.Constexpr) -> Float32:
    """Largest score of row ``r``."""
    if const_expr(spec.folded):
        return quad_max(state.maximum[r])
    top = quad_max(float_of(state.peak[r]))
    return (log2(top) if const_expr(spec.retries) else top) + (state.reference[r] - spec.p_log2)


@cute.jit
def sum_of(spec: cutlass.Constexpr, state, r: cutlass.Constexpr) -> Float32:
    """Sum of P of row ``r``, relative to its reference."""
    return quad_sum(state.sum[r]) * 2.0**-spec.p_log2
