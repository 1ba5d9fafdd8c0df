"""From 64 rows of FP32 sums in a warpgroup's registers to codes and scales in memory.

An accumulator holds, per thread, rows ``lane // 4`` and ``+ 8`` of its warp's 16 and columns ``8 j + 2 (lane % 4) + c``: element
``c + 2 r + 4 j``. A scale group of 32 rows belongs to two warps, which exchange their maxima through shared memory; codes reach memory
16 bytes a thread through a warp's own 2 KiB of it. Where all exponents are known before the first tile (``GemmSpec.direct``) the weight's
rows are brought in an order that makes a thread's quarter of 64 (or 32) columns consecutive (``sm90.GemmQuantize.ordered``), and it stores
them itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr

from fused_ops.rmsnorm_quantize.arithmetic import nan_unless_finite, store
from lp_fa4.common.halves import e4m3_of, mul2, pair
from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte, magnitude_max, pick, warp_max
from lp_fa4.common.sequence import GROUP

HALF = 64
"""Rows of a warpgroup's half tile."""
MEET = 3
"""First of three named barriers: one for each warpgroup's maxima, one for both's."""


@cute.jit
def block_bytes(spec: cutlass.Constexpr, s, total: cute.Tensor, inside, wg: Int32, parity: Int32, bytes_: cute.Tensor):
    """Scale bytes of this warp's rows, one for each block of the tile, into ``bytes_``. ``inside``: which of this thread's rows count."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid % 128 // 32, tid % 32
    maxima = s.maxima
    blocks, columns = spec.column_tile // spec.width, spec.width // 8
    for n in cutlass.range_constexpr(blocks):
        top = Int32(0)
        for r in cutlass.range_constexpr(2):
            of_row = Int32(0)
            for j in cutlass.range_constexpr(columns):
                for c in cutlass.range_constexpr(2):
                    of_row = magnitude_max(of_row, total[c + 2 * r + 4 * (n * columns + j)])
            top = cutlass.max(top, of_row if inside[r] else Int32(0))
        top = warp_max(top)
        if lane == 0:
            maxima[n, warp + 4 * wg, parity] = top
    if const_expr(spec.block_tokens == GROUP):
        cute.arch.barrier(barrier_id=MEET + wg, number_of_threads=128)
        first, count = warp // 2 * 2 + 4 * wg, 2
    else:
        cute.arch.barrier(barrier_id=MEET + 2, number_of_threads=256)
        first, count = Int32(0), 8
    for n in cutlass.range_constexpr(blocks):
        top = maxima[n, first, parity]
        for w in cutlass.range_constexpr(1, count):
            top = cutlass.max(top, maxima[n, first + w, parity])
        bytes_[n] = byte_of_amax_bits(top)


@cute.jit
def encode(spec: cutlass.Constexpr, total: cute.Tensor, j: cutlass.Constexpr, row: cutlass.Constexpr, inside, inverse, byte):
    """Codes of row ``row`` in column groups ``j`` and ``j + 1``, two bytes each, as one word; 0 for a row that is not ``inside``."""
    values = [total[c + 2 * row + 4 * (j + i)] for i in range(2) for c in range(2)]
    values = [v * inverse for v in values]
    word = Int32(0)
    if const_expr(spec.static):
        word = e4m3x4(*[nan_unless_finite(v) for v in values])
        word = word if inside else Int32(0)
    else:
        word = e4m3x4(*values)
        word = word if inside & (byte != 255) else Int32(0)
    return word


def block_of(spec, n: int):
    """Which 32 columns of the tile the sums ``16 n`` … of a thread are of, where it has a quarter of ``GemmSpec.run`` in order."""
    return n // 2 * 2 + cute.arch.lane_idx() % 4 // 2 if spec.run == 64 else n


@cute.jit
def finish_direct(spec: cutlass.Constexpr, t, s, at, total: cute.Tensor, careful: Int32):
    """:func:`finish` of ``GemmSpec.direct``. ``careful``: the inverse of the exponents is not in ``total`` yet."""
    slow = careful != 0
    if const_expr(spec.wide):
        # Two values at a time: no sum of products of finite ones is not finite, short of FP32's end, which costs time only.
        checks = [Float32(0.0) for _ in range(4)]
        for i in cutlass.range_constexpr(spec.column_tile // 4):
            checks[i % 4] = total[2 * i] * total[2 * i + 1] + checks[i % 4]
        check = (checks[0] + checks[1]) + (checks[2] + checks[3])
        slow = slow | (check - check != 0.0)
    if slow:
        store_codes(spec, t, s, at, total, False, careful)
    else:
        if at.token + HALF <= at.end:
            store_codes(spec, t, s, at, total, True)
        else:
            store_codes(spec, t, s, at, total, False)


@cute.jit
def store_codes(spec: cutlass.Constexpr, t, s, at, total: cute.Tensor, whole: cutlass.Constexpr, careful=None):
    """Codes of a thread's two rows, a quarter of ``GemmSpec.run`` columns at a time. ``whole``: all rows of the half are inside.
    ``careful``: None if sums are as they are to be rounded, and finite."""
    tid, _, _ = cute.arch.thread_idx()
    codes, inverse, run = t.codes, s.inverse, spec.run
    row0, first_column = tid % 128 // 32 * 16 + tid % 32 // 4, t.column * spec.column_tile
    for r in cutlass.range_constexpr(2):
        token = at.token + row0 + 8 * r
        for n in cutlass.range_constexpr(spec.column_tile // run):
            factor = Float32(1.0)
            if const_expr(careful is not None):
                factor = inverse[block_of(spec, n * run // 32)] if careful != 0 else Float32(1.0)
            words = cute.make_rmem_tensor(run // 16, Uint32)
            for w in cutlass.range_constexpr(run // 16):
                values = [total[c + 2 * r + 4 * (n * run // 8 + 2 * w + i)] for i in range(2) for c in range(2)]
                if const_expr(careful is not None):
                    values = [nan_unless_finite(v * factor) for v in values]
                word = e4m3x4(*values)
                words[w] = Uint32(word if const_expr(whole) else (word if token < at.end else Int32(0)))
            column = first_column + run * n
            if const_expr(whole and spec.columns % spec.column_tile == 0):
                store(words, codes, token, column + run // 4 * (tid % 4), run // 4)
            else:
                if (column < spec.columns) & (token < at.limit):
                    store(words, codes, token, column + run // 4 * (tid % 4), run // 4)


@cute.jit
def finish_halves(spec: cutlass.Constexpr, t, s, at, total: cute.Tensor):
    """:func:`finish` of FP16 sums, which are finite where no code of x is a NaN (``sm90_roles.sums_fit``)."""
    if at.token + HALF <= at.end:
        store_halves(spec, t, s, at, total, True)
    else:
        store_halves(spec, t, s, at, total, False)


@cute.jit
def store_halves(spec: cutlass.Constexpr, t, s, at, total: cute.Tensor, whole: cutlass.Constexpr):
    """:func:`store_codes` of FP16 sums. A factor is a power of two, and a product that FP16 does not have exactly is far below E4M3's
    least code, or past its largest."""
    tid, _, _ = cute.arch.thread_idx()
    codes, factors, run = t.codes, s.w_factors, spec.run
    pairs = cute.recast_tensor(total, Int32)
    row0, first_column = tid % 128 // 32 * 16 + tid % 32 // 4, t.column * spec.column_tile
    for n in cutlass.range_constexpr(spec.column_tile // run):
        factor = pair(factors[block_of(spec, n * run // 32)])
        column = first_column + run * n
        for r in cutlass.range_constexpr(2):
            token = at.token + row0 + 8 * r
            words = cute.make_rmem_tensor(run // 16, Uint32)
            for w in cutlass.range_constexpr(run // 16):
                first = r + 2 * (n * run // 8 + 2 * w)
                word = e4m3_of(mul2(pairs[first], factor), mul2(pairs[first + 2], factor))
                words[w] = Uint32(word if const_expr(whole) else (word if token < at.end else Int32(0)))
            if const_expr(whole and spec.columns % spec.column_tile == 0):
                store(words, codes, token, column + run // 4 * (tid % 4), run // 4)
            else:
                if (column < spec.columns) & (token < at.limit):
                    store(words, codes, token, column + run // 4 * (tid % 4), run // 4)


@cute.jit
def finish(spec: cutlass.Constexpr, t, s, at, total: cute.Tensor, wg: Int32, parity: Int32):
    """Quantize and store a warpgroup's half tile. ``at``: its place, as ``places.place`` has it, moved to the half."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid % 128 // 32, tid % 32
    quad = lane % 4
    row0 = 16 * warp + lane // 4
    inside = [at.token + row0 + 8 * r < at.end for r in range(2)]
    blocks = max(spec.column_tile // spec.width, 1)
    bytes_ = cute.make_rmem_tensor(blocks, Int32)
    if const_expr(not spec.static):
        block_bytes(spec, s, total, inside, wg, parity, bytes_)
        group, scales = warp // 2, t.scales
        if (lane == 0) & (warp % 2 == 0) & (group < at.region):
            for n in cutlass.range_constexpr(blocks):
                block = t.column * blocks + n
                if block < spec.columns // spec.width:
                    byte = bytes_[n] if at.token + GROUP * group < at.end else Int32(0)
                    scales[Int64(at.row + group), block] = Uint8(byte)
    staged = s.staging + (wg * 4 + warp) * 512  # words: 16 rows of 128 bytes, 16-byte chunks exchanged by row
    word_in_chunk = quad // 2 + 2 * (quad % 2)
    selector = Int32(0x5410) if quad % 2 == 0 else Int32(0x3276)
    # All of a kind together: one warp a scheduler hides no latency, so each step's results have to be independent.
    inverses, given = [], s.inverse
    for n in cutlass.range_constexpr(spec.column_tile // 32):
        inverses.append(given[n] if const_expr(spec.static) else inverse_of_byte(bytes_[32 * n // spec.width]))
    places = [(j, r) for j in range(0, spec.column_tile // 8, 2) for r in range(2)]
    words = []
    for j, r in places:
        words.append(encode(spec, total, j, r, inside[r], inverses[j // 4], bytes_[8 * j // spec.width % blocks]))
    others = [cute.arch.shuffle_sync_bfly(word, offset=1) for word in words]
    cute.arch.sync_warp()  # what was staged before has been read
    for i, (j, r) in enumerate(places):
        row = lane // 4 + 8 * r
        at_word = 32 * row + 4 * ((j // 2) ^ (row % 8)) + word_in_chunk
        cell = cute.make_tensor(staged + at_word, cute.make_layout(1))
        cell[0] = Uint32(pick(words[i], others[i], selector))
    cute.arch.sync_warp()
    per_row = spec.column_tile // 16
    codes, first_column = t.codes, t.column * spec.column_tile
    for i in cutlass.range_constexpr(per_row // 2):
        row, chunk = (32 * i + lane) // per_row, (32 * i + lane) % per_row
        token, column = at.token + 16 * warp + row, first_column + 16 * chunk
        if (token < at.limit) & (column < spec.columns):
            piece = cute.make_rmem_tensor(4, Uint32)
            source = cute.make_ptr(Uint32, (staged + 32 * row + 4 * (chunk ^ (row % 8))).toint(), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), piece)
            pointer = codes.iterator + cute.crd2idx((Int64(token), column), codes.layout)
            target = cute.make_ptr(Uint32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(4)))
