"""Online softmax of one 64 x 128 tile of scores, in the registers of the warpgroup that computed it.

An accumulator fragment holds, per thread, rows ``lane // 4`` and ``+ 8`` of its warp's 16 and columns
``8 j + 2 (lane % 4) + c``: element ``c + 2 r + 4 j``. All row statistics are in log2 units.

Two maxima are kept. ``reference`` is what P is relative to: it moves only when a tile exceeds it by more than the
threshold; P stays below ``2**(p_scale_log2 + threshold) <= 448``. ``maximum`` is the true running maximum of the
scores, per thread until the end, for the backward. Exponents of V are folded into P (``s + e_v``), so the reference
bounds those sums, and the row sum takes them out again; the centre is folded alike and therefore bounds the reference
too.

The fast path has no shuffle and one branch: maxima by three-input integer instructions, which are right wherever a
thread's running maximum is >= 0, and a vote on whether any row of the warp exceeds its threshold. Rows whose scores are
all negative so far, and rising maxima, take the slow path.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from lp_fa4.common.numbers import e4m3x4, e4m3x4_to_float, exp2, max3_bits, quad_max, quad_sum
from lp_fa4.sm90.forward_config import KEY_TILE

GROUPS = KEY_TILE // 32
COLUMN_PAIRS = KEY_TILE // 8


class RowState:
    """Registers of a thread's two rows; every member is a fragment, mutated in place.

    ``sum``: FP32 row sum (or what rounding took from it, where the tensor core sums P). ``mean``: of the first tile's
    scores.
    """

    def __init__(self):
        self.reference, self.maximum, self.sum, self.mean = (cute.make_rmem_tensor(2, Float32) for _ in range(4))

    @property
    def members(self):
        """All fragments."""
        return self.reference, self.maximum, self.sum, self.mean


@cute.jit
def mask_scores(scores: cute.Tensor, column: Int32, limit0: Int32, limit1: Int32):
    """Scores of keys at or past a row's limit (counted from the tile's first key) become -inf."""
    for j in cutlass.range_constexpr(COLUMN_PAIRS):
        for c in cutlass.range_constexpr(2):
            at = 8 * j + c + column
            scores[c + 4 * j] = scores[c + 4 * j] if at < limit0 else -Float32.inf
            scores[c + 2 + 4 * j] = scores[c + 2 + 4 * j] if at < limit1 else -Float32.inf


@cute.jit
def mask_codes(scores: cute.Tensor, codes: cute.Tensor, column: Int32, limit: Int32):
    """P and its codes become 0 at keys at or past the limit: a masked key has p = 0, but p minus the centre is not."""
    for q in cutlass.range_constexpr(KEY_TILE // 16):
        keep = Int32(0)
        for i in cutlass.range_constexpr(4):
            at = 16 * q + 8 * (i // 2) + (i % 2) + column
            byte = 0xFF << (8 * i) if i < 3 else -(1 << 24)
            keep = keep | (Int32(byte) if at < limit else Int32(0))
            for r in cutlass.range_constexpr(2):
                e = 8 * q + 4 * (i // 2) + (i % 2) + 2 * r
                scores[e] = scores[e] if at < limit else Float32(0.0)
        for r in cutlass.range_constexpr(2):
            codes[r + 2 * q] = codes[r + 2 * q] & keep


@cute.jit
def row_maxima(spec: cutlass.Constexpr, scores, scale, exponents, fast: cutlass.Constexpr, out, raised):
    """Per thread: ``out`` = the largest scaled score of each row; ``raised`` = the largest with V's exponent added.

    ``scale``, ``exponents``: one FP32 per group of 32 keys (or a single one each). ``fast``: by integer maxima.
    """
    groups = GROUPS if const_expr(spec.key_scale == 32 or spec.value_scale == 32) else 1
    pairs = COLUMN_PAIRS // groups
    for r in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(groups):
            maximum_of = bit_maximum if const_expr(fast) else float_maximum
            value = maximum_of(scores, r, g * pairs, pairs) * scale[g % len(scale)]
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
    return quad_sum(total) * cute.arch.rcp_approx(Float32(count))


@cute.jit
def top_exponent(spec: cutlass.Constexpr, exponents) -> Float32:
    """Largest exponent of V in the tile; 0 where V's is static."""
    top = Float32(0.0)
    if const_expr(spec.value_scale > 0):
        top = exponents[0]
        for g in cutlass.range_constexpr(1, len(exponents)):
            top = cute.arch.fmax(top, exponents[g])
    return top


@cute.jit
def start_state(spec: cutlass.Constexpr, scores, state, scale, exponents, keys: Int32):
    """Row state from an item's first tile. ``keys``: the sequence's number of keys."""
    raised = cute.make_rmem_tensor(2, Float32)
    reference, maximum, sums, mean = state.members
    row_maxima(spec, scores, scale, exponents, False, maximum, raised)
    top = top_exponent(spec, exponents)
    for r in cutlass.range_constexpr(2):
        sums[r] = Float32(0.0)
        high = raised[r]
        if const_expr(spec.centred):
            mean[r] = first_mean(scores, scale, r, keys)
            if const_expr(spec.value_scale > 0):
                high = cute.arch.fmax(high, mean[r] + top)
        high = quad_max(high)
        reference[r] = Float32(0.0) if high == -Float32.inf else high


@cute.jit
def move_reference(spec: cutlass.Constexpr, scores, state, scale, exponents, accumulators):
    """First half of a later tile's softmax: maxima, and the reference moved where they ask for it.

    ``scale``: FP32 factors from raw score to log2 units, one per exponent group of K; ``exponents``: of V, or empty.
    ``accumulators``: what a new reference rescales; one of them may still be written by a wgmma group.
    """
    local, raised = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    reference, maximum, sums, mean = state.members
    row_maxima(spec, scores, scale, exponents, True, local, raised)
    top = top_exponent(spec, exponents)
    slow = cute.arch.fmin(maximum[0], maximum[1]) < 0.0
    for r in cutlass.range_constexpr(2):
        if const_expr(spec.centred and spec.value_scale > 0):
            raised[r] = cute.arch.fmax(raised[r], mean[r] + top)
        slow = slow | (raised[r] > reference[r] + spec.threshold)
        if const_expr(spec.value_scale > 0):
            slow = slow | (reference[r] + spec.threshold < top)
        maximum[r] = cute.arch.fmax(maximum[r], local[r])
    if cute.arch.vote_any_sync(slow):
        row_maxima(spec, scores, scale, exponents, False, local, raised)
        alpha = cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            high = raised[r]
            if const_expr(spec.centred and spec.value_scale > 0):
                high = cute.arch.fmax(high, mean[r] + top)
            high = quad_max(high)
            old = reference[r]
            new = high if high > old + spec.threshold else old
            reference[r] = new
            maximum[r] = cute.arch.fmax(maximum[r], local[r])
            alpha[r] = exp2(old - new)
            sums[r] = sums[r] * alpha[r]
        warpgroup.wait_group(0)
        for values in accumulators:
            rescale(spec, values, alpha)


@cute.jit
def rescale(spec: cutlass.Constexpr, values: cute.Tensor, alpha: cute.Tensor):
    """``values *= alpha`` by rows."""
    for j in cutlass.range_constexpr(spec.value_rows // 8):
        for r in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                values[i] = values[i] * alpha[r]


@cute.jit
def exponentiate(spec: cutlass.Constexpr, scores, codes, state, scale, exponents, base: Float32):
    """Second half: scores to P (times ``2**base``, minus the centre), P to codes, and the FP32 row sum.

    Columns 2t, 2t+1, 8+2t, 9+2t of each 16 are bytes 4t .. 4t+3 of the A operand ("accumulator" order). By runs of 16
    keys, so that conversions of one run are there to fill the issue slots between the next run's exponentials.
    """
    groups = max(len(scale), len(exponents), 1)
    row_sums = state.sum
    offsets, centers, undo = {}, {}, {}
    for g in cutlass.range_constexpr(groups):
        for r in cutlass.range_constexpr(2):
            offset = base - state.reference[r]
            if const_expr(spec.value_scale > 0):
                offset = offset + exponents[g % len(exponents)]
                undo[g] = exp2(-exponents[g % len(exponents)])
            offsets[g, r] = offset
            if const_expr(spec.centred):
                centers[g, r] = exp2(state.mean[r] + offset)
    for g in cutlass.range_constexpr(groups):
        factor = scale[g % len(scale)]
        sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
        for q in cutlass.range_constexpr(g * (8 // groups), (g + 1) * (8 // groups)):
            for r in cutlass.range_constexpr(2):
                a, b = 2 * r + 8 * q, 2 * r + 8 * q + 4
                at = (a, a + 1, b, b + 1)
                for i in cutlass.range_constexpr(4):
                    p = exp2(scores[at[i]] * factor + offsets[g, r])
                    if const_expr(not spec.mma_sum):
                        sums[r][i % 2] = sums[r][i % 2] + p
                    scores[at[i]] = p - centers[g, r] if const_expr(spec.centred) else p
                codes[r + 2 * q] = e4m3x4(*[scores[i] for i in at])
        if const_expr(not spec.mma_sum):
            for r in cutlass.range_constexpr(2):
                part = sums[r][0] + sums[r][1]
                row_sums[r] = row_sums[r] + (part * undo[g] if const_expr(spec.value_scale > 0) else part)


@cute.jit
def rounding_of_sums(scores: cute.Tensor, codes: cute.Tensor, state):
    """Add to ``state.sum`` what the rounding of P to its codes took from each row's sum."""
    sums = state.sum
    for r in cutlass.range_constexpr(2):
        lost = Float32(0.0)
        for q in cutlass.range_constexpr(KEY_TILE // 16):
            a, b = 2 * r + 8 * q, 2 * r + 8 * q + 4
            rounded = e4m3x4_to_float(codes[r + 2 * q])
            for i, at in enumerate((a, a + 1, b, b + 1)):
                lost = lost + (scores[at] - rounded[i])
        sums[r] = sums[r] + lost
