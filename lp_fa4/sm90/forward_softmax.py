"""Online softmax of one 64 x 128 tile of scores, in the registers of the warpgroup that computed it.

An accumulator fragment holds, per thread, rows ``lane // 4`` and ``+ 8`` of its warp's 16 and columns
``8 j + 2 (lane % 4) + c``: element ``c + 2 r + 4 j``. All row statistics are in log2 units.

Two maxima are kept. ``reference`` is what P is relative to: it moves only when a tile exceeds it by more than the
threshold, which a warp can see without a shuffle; P stays below ``2**(p_scale_log2 + threshold) <= 448``. ``maximum``
is the true running maximum of the scores, per thread until the end, for the backward. Exponents of V are folded into P
(``s + e_v``), so the reference bounds those sums, and the row sum takes them out again; the centre is folded alike and
therefore bounds the reference too.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import e4m3x4, exp2, max3_bits, quad_max, quad_sum
from lp_fa4.sm90.forward_config import KEY_TILE

GROUPS = KEY_TILE // 32
COLUMN_PAIRS = KEY_TILE // 8


class RowState:
    """Registers of a thread's two rows; every member is a fragment, mutated in place."""

    def __init__(self):
        self.reference, self.maximum, self.alpha, self.sum, self.mean = (cute.make_rmem_tensor(2, Float32) for _ in range(5))


@cute.jit
def mask_scores(scores: cute.Tensor, column: Int32, limit0: Int32, limit1: Int32):
    """Scores of keys at or past a row's limit (counted from the tile's first key) become -inf."""
    for j in cutlass.range_constexpr(COLUMN_PAIRS):
        for c in cutlass.range_constexpr(2):
            at = 8 * j + c + column
            scores[c + 4 * j] = scores[c + 4 * j] if at < limit0 else -Float32.inf
            scores[c + 2 + 4 * j] = scores[c + 2 + 4 * j] if at < limit1 else -Float32.inf


@cute.jit
def mask_codes(codes: cute.Tensor, column: Int32, limit: Int32):
    """Codes of keys at or past the limit become 0: a masked key has p = 0, but p minus the centre is not."""
    for q in cutlass.range_constexpr(KEY_TILE // 16):
        keep = Int32(0)
        for i in cutlass.range_constexpr(4):
            at = 16 * q + 8 * (i // 2) + (i % 2) + column
            byte = 0xFF << (8 * i) if i < 3 else -(1 << 24)
            keep = keep | (Int32(byte) if at < limit else Int32(0))
        for r in cutlass.range_constexpr(2):
            codes[r + 2 * q] = codes[r + 2 * q] & keep


@cute.jit
def row_maxima(spec: cutlass.Constexpr, scores: cute.Tensor, scale, out: cute.Tensor, raised: cute.Tensor, exponents):
    """Per thread: ``out`` = the largest scaled score of each row; ``raised`` = the largest with V's exponent added.

    ``scale``, ``exponents``: one FP32 per group of 32 keys (or a single one each).
    """
    groups = GROUPS if const_expr(spec.key_scale == 32 or spec.value_scale == 32) else 1
    pairs = COLUMN_PAIRS // groups
    best = cute.make_rmem_tensor((2, groups), Float32)
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(groups):
            best[r, g] = bit_maximum(scores, r, g * pairs, pairs)
    lowest = best[0, 0]
    for g in cutlass.range_constexpr(groups):
        for r in cutlass.range_constexpr(2):
            if const_expr(r + g > 0):
                lowest = cute.arch.fmin(lowest, best[r, g])
    if lowest < 0.0:
        for r in cutlass.range_constexpr(2):
            for g in cutlass.range_constexpr(groups):
                best[r, g] = float_maximum(scores, r, g * pairs, pairs)
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(groups):
            value = best[r, g] * scale[g % len(scale)]
            high = value
            if const_expr(spec.value_scale > 0):
                high = value + exponents[g % len(exponents)]
            if const_expr(g == 0):
                out[r], raised[r] = value, high
            else:
                out[r] = cute.arch.fmax(out[r], value)
                raised[r] = cute.arch.fmax(raised[r], high)


@cute.jit
def bit_maximum(scores: cute.Tensor, r: cutlass.Constexpr, first: cutlass.Constexpr, pairs: cutlass.Constexpr):
    """Maximum by three-input integer maxima: right if it is >= 0, negative (as a float) if every score is."""
    chains = 4 if const_expr(pairs >= 8) else 2
    at = [c + 2 * r + 4 * (first + j) for j in range(pairs) for c in range(2)]
    best = [scores[at[i]] for i in range(chains)]
    rest = at[chains:]
    for i in cutlass.range_constexpr(len(rest) // 2):
        best[i % chains] = max3_bits(best[i % chains], scores[rest[2 * i]], scores[rest[2 * i + 1]])
    if const_expr(chains == 4):
        return max3_bits(max3_bits(best[0], best[1], best[2]), best[3], best[3])
    return max3_bits(best[0], best[1], best[1])


@cute.jit
def float_maximum(scores: cute.Tensor, r: cutlass.Constexpr, first: cutlass.Constexpr, pairs: cutlass.Constexpr):
    """Maximum by float comparison; NaN is ignored."""
    best = scores[2 * r + 4 * first]
    for j in cutlass.range_constexpr(pairs):
        for c in cutlass.range_constexpr(2):
            best = cute.arch.fmax(best, scores[c + 2 * r + 4 * (first + j)])
    return best


@cute.jit
def first_mean(scores: cute.Tensor, scale, r: cutlass.Constexpr, keys: Int32):
    """Mean of the scaled scores of the first tile's keys (masked ones hold -inf and are left out); 0 of no key."""
    total = Float32(0.0)
    pairs = COLUMN_PAIRS // len(scale)
    for g in cutlass.range_constexpr(len(scale)):
        part = Float32(0.0)
        for j in cutlass.range_constexpr(pairs):
            for c in cutlass.range_constexpr(2):
                value = scores[c + 2 * r + 4 * (g * pairs + j)]
                part = part + (Float32(0.0) if value == -Float32.inf else value)
        total = total + part * scale[g]
    count = cutlass.max(cutlass.min(keys, KEY_TILE), 1)
    return quad_sum(total) / Float32(count)


@cute.jit
def online_softmax(spec: cutlass.Constexpr, scores, state, scale, exponents, first: cutlass.Constexpr, keys: Int32):
    """Scores to P (times ``2**p_scale_log2``, minus the centre), and the row state moved on.

    ``scale``: FP32 factors from raw score to log2 units, one per exponent group of K; ``exponents``: of V, or empty.
    ``keys``: the sequence's number of keys (first tile only).
    """
    local, raised = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    row_maxima(spec, scores, scale, local, raised, exponents)
    top = Float32(0.0)
    if const_expr(spec.value_scale > 0):
        top = exponents[0]
        for g in cutlass.range_constexpr(1, len(exponents)):
            top = cute.arch.fmax(top, exponents[g])
    for r in cutlass.range_constexpr(2):
        if const_expr(first):
            state.maximum[r] = local[r]
            if const_expr(spec.centred):
                state.mean[r] = first_mean(scores, scale, r, keys)
        else:
            state.maximum[r] = cute.arch.fmax(state.maximum[r], local[r])
        if const_expr(spec.centred and spec.value_scale > 0):
            raised[r] = cute.arch.fmax(raised[r], state.mean[r] + top)
    if const_expr(first):
        for r in cutlass.range_constexpr(2):
            high = quad_max(raised[r])
            state.reference[r] = Float32(0.0) if high == -Float32.inf else high
            state.alpha[r] = Float32(1.0)
    else:
        state.alpha[0], state.alpha[1] = Float32(1.0), Float32(1.0)
        reference, alpha = state.reference, state.alpha
        over0 = raised[0] > reference[0] + spec.threshold
        over1 = raised[1] > reference[1] + spec.threshold
        if cute.arch.vote_any_sync(over0 | over1):
            for r in cutlass.range_constexpr(2):
                high = quad_max(raised[r])
                old = reference[r]
                new = high if high > old + spec.threshold else old
                alpha[r] = exp2(old - new)
                reference[r] = new
    for r in cutlass.range_constexpr(2):
        probabilities(spec, scores, state, scale, exponents, r, first)


@cute.jit
def probabilities(spec: cutlass.Constexpr, scores, state, scale, exponents, r: cutlass.Constexpr, first: cutlass.Constexpr):
    """One row of :func:`online_softmax` after its reference is known."""
    parts = max(len(scale), max(len(exponents), 1))
    pairs = COLUMN_PAIRS // parts
    total = Float32(0.0)
    for g in cutlass.range_constexpr(parts):
        offset = spec.p_scale_log2 - state.reference[r]
        undo = Float32(1.0)
        if const_expr(spec.value_scale > 0):
            offset = offset + exponents[g % len(exponents)]
            undo = exp2(-exponents[g % len(exponents)])
        center = Float32(0.0)
        if const_expr(spec.centred):
            center = exp2(state.mean[r] + offset)
        factor = scale[g % len(scale)]
        sums = [Float32(0.0), Float32(0.0)]
        for j in cutlass.range_constexpr(g * pairs, (g + 1) * pairs):
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                p = exp2(scores[i] * factor + offset)
                if const_expr(not spec.mma_sum):
                    sums[c] = sums[c] + p
                scores[i] = p - center if const_expr(spec.centred) else p
        if const_expr(not spec.mma_sum):
            total = total + (sums[0] + sums[1]) * undo
    if const_expr(not spec.mma_sum):
        state.sum[r] = total if const_expr(first) else state.sum[r] * state.alpha[r] + total


@cute.jit
def to_codes(scores: cute.Tensor, codes: cute.Tensor):
    """P to the FP8 A operand: columns 2t, 2t+1, 8+2t, 9+2t of each 16 are bytes 4t .. 4t+3 ("accumulator" order)."""
    for q in cutlass.range_constexpr(KEY_TILE // 16):
        for r in cutlass.range_constexpr(2):
            a, b = 2 * r + 8 * q, 2 * r + 8 * q + 4
            codes[r + 2 * q] = e4m3x4(scores[a], scores[a + 1], scores[b], scores[b + 1])
