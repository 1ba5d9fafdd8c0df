"""Online softmax of one 64 x 128 tile of scores, in the registers of the warpgroup that computed it.

An accumulator fragment holds, per thread, rows ``lane // 4`` and ``+ 8`` of its warp's 16 and columns
``8 j + 2 (lane % 4) + c``: element ``c + 2 r + 4 j``. All row statistics are in log2 units.

Two maxima are kept. ``reference`` is what P is relative to: it moves only when a tile exceeds it by more than the
threshold; P stays below ``2**(p_scale_log2 + threshold) <= 448``. ``maximum`` is the true running maximum of the
scores, per thread until the end, for the backward. Exponents of V are folded into P (``s + e_v``), so the reference
bounds those sums, and the row sum takes them out again; the centre is folded alike and therefore bounds the reference
too.

There is no branch here: the two rows of a thread are independent chains, and ptxas fills one's waits with the other
only inside one basic block. A vote that skips the shuffles (and integer maxima, half as many) was 8% slower.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import e4m3x4, exp2, order_after, quad_max, quad_sum
from lp_fa4.sm90.forward_config import KEY_TILE

COLUMN_PAIRS = KEY_TILE // 8


class RowState:
    """Registers of a thread's two rows; every member is a fragment, mutated in place.

    ``sum``: of unrounded P. ``mean``: of the first tile's scores. ``alpha``: what the last move of the reference
    multiplies earlier sums by.
    """

    def __init__(self):
        self.reference, self.maximum, self.sum, self.mean = (cute.make_rmem_tensor(2, Float32) for _ in range(4))
        self.alpha = cute.make_rmem_tensor(2, Float32)

    @property
    def members(self):
        """Reference, maximum, sum, mean."""
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
        if const_expr(spec.value_scale > 0):
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
    reference, maximum, sums, mean = state.members
    alpha = state.alpha
    top = top_exponent(spec, exponents)
    for r in cutlass.range_constexpr(2):
        value, high = row_maximum(spec, scores, scale, exponents, r)
        maximum[r], sums[r], alpha[r] = value, Float32(0.0), Float32(1.0)
        if const_expr(spec.centred):
            mean[r] = first_mean(scores, scale, r, keys)
            if const_expr(spec.value_scale > 0):
                high = cute.arch.fmax(high, mean[r] + top)
        high = quad_max(high)
        reference[r] = Float32(0.0) if high == -Float32.inf else high


@cute.jit
def move_reference(spec: cutlass.Constexpr, scores, state, scale, exponents, r: cutlass.Constexpr):
    """Row r of a later tile: maxima, the reference moved if they exceed it by the threshold, ``alpha`` and sum set."""
    reference, maximum, sums, mean = state.members
    alpha = state.alpha
    value, high = row_maximum(spec, scores, scale, exponents, r)
    maximum[r] = cute.arch.fmax(maximum[r], value)
    if const_expr(spec.centred and spec.value_scale > 0):
        high = cute.arch.fmax(high, mean[r] + top_exponent(spec, exponents))
    high = quad_max(high)
    old = reference[r]
    new = high if high > old + spec.threshold else old
    alpha[r] = exp2(old - new)
    reference[r] = new
    sums[r] = sums[r] * alpha[r]


@cute.jit
def exponentiate(spec: cutlass.Constexpr, scores, codes, state, scale, exponents, after):
    """Scores to P (times ``2**p_scale_log2``, minus the centre), P to codes, and the row sums of unrounded P.

    ``after``: None, or (an FP32 to wait for, a run-time zero): left alone, ptxas may pull the exponentials above the
    wait for P V, and with them the moment when the other warpgroup gets its turn.

    Columns 2t, 2t+1, 8+2t, 9+2t of each 16 are bytes 4t .. 4t+3 of the A operand ("accumulator" order). By runs of 16
    keys, so that one run's conversions are there to fill the issue slots between the next run's exponentials.
    """
    groups = max(len(scale), len(exponents), 1)
    row_sums = state.sum
    offsets, centers, undo = {}, {}, {}
    for g in cutlass.range_constexpr(groups):
        for r in cutlass.range_constexpr(2):
            offset = spec.p_scale_log2 - state.reference[r]
            if const_expr(after is not None):
                offset = order_after(offset, *after)
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
                    sums[r][i % 2] = sums[r][i % 2] + p
                    scores[at[i]] = p - centers[g, r] if const_expr(spec.centred) else p
                codes[r + 2 * q] = e4m3x4(*[scores[i] for i in at])
        for r in cutlass.range_constexpr(2):
            part = sums[r][0] + sums[r][1]
            row_sums[r] = row_sums[r] + (part * undo[g] if const_expr(spec.value_scale > 0) else part)
