"""Online softmax of a 64 x 128 tile of FP16 scores, two of a register and instruction.

The fragment holds, per thread, columns ``8 j + 2 (lane % 4)`` and the next of row ``lane // 4 + 8 r`` in word ``2 j + r``. Per pair: one
FMA to the exponent of P, two exponentials and their packing, one FMA that scales P and takes the centre off it, an addition, a
conversion to codes, half a maximum.

A product of E4M3 rows with FP16 sums stays in FP16 for certain where the magnitudes of one row's codes sum to at most
``65504 / 448 = 146``: whatever the other's codes are, no sum on the way can leave it. ``rows_fit`` looks at the queries of a warpgroup
once an item; rows past that bound, and factors outside ``SMALLEST_FACTOR`` to ``LARGEST_FACTOR``, go through the loop with FP32 scores.

What is rounded, beside E4M3's 2^-4: a score to 2^-11 of itself, its factor (``half_scale``: 2^-11 of the factor, the same for all
scores; the row maximum is returned in the exact scale), the exponent of P to 2^-10 where P is near its row's largest, P to 2^-10 (the unit
cuts, 3.5e-4 on average, in P and in its row sum alike; LSE and row sum are returned without that).

References are FP16 numbers, near the largest score as in ``forward_softmax``: so offsets are exact, and the largest P is coded as the
power of two that it stands for. The centre is FP16 as well; where a reference moves, it is rounded again (2^-12 of it).
"""

import struct

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import T

from lp_fa4.common.halves import add2, bits_from, chosen, e4m3_of, exp2_2, floor, fma2, half_of, max2, max3_2, mul2, pair, tied
from lp_fa4.common.numbers import absolute, bits_of, exp2, inline_ptx, log2, quad_max, quad_sum, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, LOWER
from lp_fa4.sm90.forward_softmax import RowState
from lp_fa4.sm90.worklist import AGAIN, FIELDS

COLUMN_PAIRS = KEY_TILE // 8
LARGEST_ROW = 145.0
"""Of the magnitudes of a row's codes, as ``rows_fit`` adds them up: its FP16 sums may be off by 0.7."""
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-14, 1.0
"""From scores to log2 units: what FP16 rounds off a score of usual codes stays small, and a static factor keeps all of its bits (a
tile's may be smaller: an exponent of P is then off by 2^-9 at most)."""
FINE = 2000.0
"""Up to here FP16 holds an offset to within 1/2; beyond it multiples of 32 are taken."""
LARGEST_P = 430.5
"""Some way below E4M3's largest, 448: a P above it moves its row's reference."""
CUT = 5.08e-4
"""log2 units by which P and its sum are too small on average: the unit cuts at FP16 (2^-11 at most 1, on average 0.72 of it)."""
INFINITY = 0xFC00FC00 - (1 << 32)
"""Minus infinity twice."""


def packed(x: float) -> int:
    """``x`` in FP16, twice."""
    word = struct.unpack("<H", struct.pack("<e", x))[0]
    return word * 0x10001


def lift(spec) -> int:
    """Power of two that the exponential already gives P: all of it where nothing is taken off P."""
    return 0 if spec.centred else spec.p_log2


class HalfState(RowState):
    """``offset``: what is added to a scaled score, ``lift`` less the reference; ``minus``: minus what is taken off P; ``top``: largest P
    as the exponential gives it, per half; ``before``: that without the tile under way. All FP16, twice, one word a row. ``cut``: log2
    units that the item's row sums lack."""

    def __init__(self):
        super().__init__()
        self.offset, self.minus, self.top, self.before = (cute.make_rmem_tensor(2, Int32) for _ in range(4))
        self.cut = cute.make_rmem_tensor(1, Float32)


@cute.jit
def rows_fit(spec: cutlass.Constexpr, t, item, warpgroup_rows, factor: Float32, barrier: Int32):
    """Whether FP16 holds every score of a warpgroup's rows, and their factor. Called by all its threads.

    ``warpgroup_rows``: (address of the 64 rows of Q in shared memory, how many of them are the sequence's). ``factor``: from scores to
    log2 units, without K's exponents where these are a tile's: then the largest of the whole sequence counts.
    """
    tile, rows = warpgroup_rows
    thread = cute.arch.thread_idx()[0] % 128
    if const_expr(spec.key_scale > 0):
        byte, row0 = Int32(0), item[5] // 32 + item[0]
        for i in cutlass.range(thread, cute.ceil_div(item[6], KEY_TILE), 128, unroll=1):
            byte = cutlass.max(byte, Int32(t.k_scale[row0 + (KEY_TILE // 32) * i, item[1] // spec.group]))
        factor = factor * scale_of_byte(byte)
    row, part = thread // 2, thread % 2
    chunks = spec.head_dim // 32  # 16 bytes each: half a row
    sums = [None] * 4
    for i in cutlass.range_constexpr(chunks):
        words = cute.make_rmem_tensor(4, Int32)
        chunk = part * chunks + ((i + row) & (chunks - 1))  # in any order, so that lanes meet no bank twice
        pointer = cute.make_ptr(Int32, tile + row * spec.head_dim + 16 * chunk, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
        for n in cutlass.range_constexpr(8):
            value = magnitudes(words[n // 2], n % 2)
            sums[n % 4] = value if const_expr(sums[n % 4] is None) else add2(sums[n % 4], value)
    total = add2(add2(sums[0], sums[1]), add2(sums[2], sums[3]))
    norm = half_of(total, 0) + half_of(total, 1)
    norm = norm + cute.arch.shuffle_sync_bfly(norm, offset=1)
    fits = (row >= rows) | (norm <= LARGEST_ROW)  # not of a NaN
    fits = fits & (factor <= LARGEST_FACTOR)
    if const_expr(spec.half_sums):
        fits = fits & (t.wide == 0)
    if const_expr(spec.key_scale == 0):
        fits = fits & (factor >= SMALLEST_FACTOR)
    return cute.arch.vote_any_sync(all_of(barrier, fits))  # a vote's result is the warp's: descriptors keep their uniform registers


def magnitudes(word, upper: int):
    """Magnitudes of two E4M3 codes, half a word, in FP16."""
    text = f"{{.reg .b16 l, h; .reg .b32 x; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 x, {'lh'[upper]}; abs.f16x2 $0, x;}}"
    return Int32(inline_ptx(T.i32(), [word], text, "=r,r"))


def all_of(barrier, fits):
    """Whether all 128 threads at a barrier say so."""
    text = "{.reg .pred p, q; setp.ne.b32 p, $2, 0; barrier.cta.red.and.pred q, $1, 128, p; selp.b32 $0, 1, 0, q;}"
    return Int32(inline_ptx(T.i32(), [barrier, Int32(fits)], text, "=r,r,r,~{memory}", side_effects=True)) != 0


@cute.jit
def mask_halves(spec: cutlass.Constexpr, scores, column: Int32, limit0: Int32, limit1: Int32):
    """As ``mask_scores``."""
    limits = (limit0,) if const_expr(not spec.causal) else (limit0, limit1)
    for j in cutlass.range_constexpr(COLUMN_PAIRS):
        hidden = [bits_from(16 * cutlass.max(limit - column - 8 * j, 0)) for limit in limits]
        for r in cutlass.range_constexpr(2):
            scores[2 * j + r] = chosen(hidden[r % len(hidden)], Int32(INFINITY), scores[2 * j + r])


@cute.jit
def largest_half(scores, r: cutlass.Constexpr, scale: Float32):
    """Largest scaled score of row r, per thread."""
    best = [scores[2 * j + r] for j in range(4)]
    for j in cutlass.range_constexpr(4, COLUMN_PAIRS):
        best[j % 4] = max2(best[j % 4], scores[2 * j + r])
    top = max2(max2(best[0], best[1]), max2(best[2], best[3]))
    return cute.arch.fmax(half_of(top, 0), half_of(top, 1)) * scale


@cute.jit
def mean_half(scores, r: cutlass.Constexpr, scale: Float32, keys: Int32):
    """Mean of the scaled scores of the first tile's keys; 0 of no key. Of a whole tile in FP16: a centre may be any number."""
    total = Float32(0.0)
    if keys >= KEY_TILE:
        sums = [Int32(0), Int32(0)]
        for j in cutlass.range_constexpr(COLUMN_PAIRS):
            sums[j % 2] = fma2(scores[2 * j + r], Int32(packed(1.0 / 16)), sums[j % 2])  # at most 8 / 16 of a score
        total = (half_of(sums[0], 0) + half_of(sums[0], 1) + half_of(sums[1], 0) + half_of(sums[1], 1)) * 16.0
    else:
        for j in cutlass.range_constexpr(COLUMN_PAIRS):
            for c in cutlass.range_constexpr(2):
                value = half_of(scores[2 * j + r], c)
                total = total + (Float32(0.0) if value == -Float32.inf else value)
    count = cutlass.max(cutlass.min(keys, KEY_TILE), 1)
    return quad_sum(total) * scale * cute.arch.rcp_approx(Float32(count))


@cute.jit
def offset_for(spec: cutlass.Constexpr, high: Float32) -> Float32:
    """The offset, exact in FP16, that brings a score of ``high`` to ``lift``: the nearest (beyond ``FINE``, where that may be 16 off, the
    next below)."""
    wanted = lift(spec) - high
    value = half_of(pair(wanted), 0)
    if absolute(high) > FINE:
        value = floor(wanted * (1.0 / 32)) * 32.0
    return value


@cute.jit
def start_halves(spec: cutlass.Constexpr, scores, state, scale: Float32, keys: Int32):
    """Row state from an item's first tile. ``scale``: the factor as FP16 has it; ``keys``: of the sequence."""
    for r in cutlass.range_constexpr(2):
        high = quad_max(largest_half(scores, r, scale))
        high = Float32(0.0) if high == -Float32.inf else high
        offset = offset_for(spec, high)
        state.offset[r] = pair(offset)
        state.sum[r], state.alpha[r] = Float32(0.0), Float32(1.0)
        state.top[r], state.before[r], state.minus[r] = Int32(0), Int32(0), Int32(0)
        if const_expr(spec.centred):
            mean = mean_half(scores, r, scale, keys)
            state.minus[r] = pair(-exp2(mean + offset + spec.p_log2))


@cute.jit
def half_factor(factor: Float32):
    """A factor as FP16, twice; never 0, or a masked score of -inf would become NaN."""
    word = pair(factor)
    return Int32(0x00010001) if word == 0 else word


@cute.jit
def move_halves(spec: cutlass.Constexpr, scores, state, scale: Float32, r: cutlass.Constexpr, growth: cutlass.Constexpr):
    """Row r's reference moved to the tile's largest score if that exceeds it by ``growth``; ``alpha`` set, what is kept follows."""
    high = quad_max(largest_half(scores, r, scale))
    old = half_of(state.offset[r], 0)
    new = offset_for(spec, high) if high + old > lift(spec) + growth else old
    alpha = exp2(new - old)
    state.alpha[r], state.sum[r], state.offset[r] = alpha, state.sum[r] * alpha, pair(new)
    factor = pair(alpha)
    state.minus[r], state.top[r] = mul2(state.minus[r], factor), mul2(state.top[r], factor)
    state.before[r] = state.top[r]


@cute.jit
def exponentiate_halves(
    spec: cutlass.Constexpr, scores, codes, state, scale: Int32, after, whole: cutlass.Constexpr, runs: cutlass.Constexpr = 8
):
    """Scores to P, P minus the centre to codes; ``tile_sum`` and ``top`` of P. Scores stay. ``scale``: the factor, twice. ``whole``: no
    score is masked; then what was taken off P counts as often in the sum. (Of masked ones that would leave rounding errors of zeros.)
    ``after``, ``runs``: as in ``exponentiate``, and so is the order of codes."""
    gain = Int32(packed(2.0**spec.p_log2))
    offsets = [state.offset[r] for r in range(2)]
    if const_expr(after is not None):
        offsets = [tied(x, bits_of(after[0]), after[1]) for x in offsets]
    sums = [[None, None], [None, None]]
    tops, made = [state.top[r] for r in range(2)], []
    for q in cutlass.range_constexpr(runs):
        for r in cutlass.range_constexpr(2):
            if const_expr(after is not None and len(made) >= spec.lag > 0 and q % spec.tied == 0):
                offsets[r] = tied(offsets[r], made[len(made) - spec.lag], after[1])
            p = [exp2_2(fma2(scores[4 * q + 2 * i + r], scale, offsets[r])) for i in range(2)]
            tops[r] = max3_2(tops[r], p[0], p[1])
            taken, summed = p, p
            if const_expr(spec.centred):
                taken = [fma2(x, gain, state.minus[r]) for x in p]
                summed = taken if const_expr(whole) else [mul2(x, gain) for x in p]
            part = add2(summed[0], summed[1])
            sums[r][q % 2] = part if const_expr(q < 2) else add2(sums[r][q % 2], part)
            made.append(e4m3_of(taken[0], taken[1]))
            codes[r + 2 * q] = made[-1]
    for i in cutlass.range_constexpr(2 * runs, 16):
        codes[i] = Int32(0)
    for r in cutlass.range_constexpr(2):
        total = add2(sums[r][0], sums[r][1])
        state.top[r] = tops[r]
        state.tile_sum[r] = half_of(total, 0) + half_of(total, 1)
        if const_expr(spec.centred and whole):
            state.tile_sum[r] = state.tile_sum[r] - half_of(state.minus[r], 0) * (2.0 * COLUMN_PAIRS)


@cute.jit
def past_range(spec: cutlass.Constexpr, state):
    """Whether a P of this thread's rows is past E4M3's range (with ``half_sums`` a fourth of it), or NaN."""
    limit = Int32(packed(LARGEST_P * 2.0 ** (lift(spec) - spec.p_log2 - (LOWER if spec.half_sums else 0))))
    return max3_2(state.top[0], state.top[1], limit) != limit


@cute.jit
def retry_halves(spec: cutlass.Constexpr, scores, codes, state, scale: Float32, scale2: Int32):
    """A whole tile once more, with the references of this warp's rows moved to their maxima; ``alpha`` set."""
    for r in cutlass.range_constexpr(2):
        state.top[r] = state.before[r]
        move_halves(spec, scores, state, scale, r, 0.0)
    exponentiate_halves(spec, scores, codes, state, scale2, None, True)


@cute.jit
def rescale(state, totals: cutlass.Constexpr, words: cutlass.Constexpr = None):
    """Accumulators brought to the moved references; then no move is pending. ``words``: of FP16 sums, or None."""
    if const_expr(words is not None):
        factors = [pair(state.alpha[r]) for r in range(2)]
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = mul2(words[i], factors[i % 2])
    for total in totals:
        for i in cutlass.range_constexpr(cute.size(total)):
            total[i] = total[i] * state.alpha[i // 2 % 2]
    for r in cutlass.range_constexpr(2):
        state.alpha[r] = Float32(1.0)


def widened(words):
    """FP16 sums as FP32, in the fragment's order."""
    return [half_of(words[i // 2], i % 2) for i in range(2 * cute.size(words))]


def tree_sum(parts: list):
    """Sum of FP32 in registers, pair by pair."""
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


@cute.jit
def do_again(spec: cutlass.Constexpr, t, total: cute.Tensor, item, wg: Int32, fit, barrier: Int32):
    """Note an item whose FP16 sums left FP16 (O is not finite then, whatever was added) for the second launch, which takes the loop with
    FP32 scores and sums: this warpgroup's rows. Called by all its threads."""
    kept = all_of(barrier, absolute(tree_sum([total[i] for i in range(cute.size(total))])) < Float32.inf)  # not of a NaN
    if fit & (not kept):  # noqa: SIM102
        if cute.arch.thread_idx()[0] % 128 == 0:
            index = cute.arch.atomic_add(t.state.iterator + AGAIN, Int32(1), sem="relaxed", scope="gpu")
            record = cute.make_rmem_tensor(FIELDS, Int32)
            for i in cutlass.range_constexpr(FIELDS - 1):
                record[i] = item[i]
            record[FIELDS - 1] = wg + 1
            cute.autovec_copy(record, t.again[index, None])


@cute.jit
def take_halves(state):
    """The tile's sums into the rows'."""
    for r in cutlass.range_constexpr(2):
        state.sum[r] = state.sum[r] + state.tile_sum[r]
        state.before[r] = state.top[r]


@cute.jit
def settle(spec: cutlass.Constexpr, state):
    """What the epilogue reads, in FP32 (``RowState``)."""
    state.cut[0] = Float32(CUT)
    for r in cutlass.range_constexpr(2):
        state.reference[r] = lift(spec) - half_of(state.offset[r], 0)
        state.center[r] = absolute(half_of(state.minus[r], 0))
        top = cute.arch.fmax(half_of(state.top[r], 0), half_of(state.top[r], 1)) * 2.0 ** (spec.p_log2 - lift(spec))
        state.peak[r] = bits_of(top) if const_expr(spec.retries) else bits_of(log2(top))
