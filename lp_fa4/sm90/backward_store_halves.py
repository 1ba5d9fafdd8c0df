"""How a key tile's dK and dV leave as MXFP8 where their sums are FP16: two columns a register to the codes, nothing in FP32 but scales.

As ``backward_store.store_mxfp8``, whose rows and bytes these are. Both gradients of a key tile leave together where both are like that
(:func:`store_pair`): one barrier and one chain of latencies. Word ``8 x + 4 p + 2 i + r`` of a thread's sums holds columns
``32 x + 16 p + 8 i + 2 (lane % 4)`` and the next, of row ``lane // 4 + 8 r``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from lp_fa4.common.halves import e4m3_of, mul2, pair
from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import byte_of_amax_bits, inverse_of_byte
from lp_fa4.sm90.backward_halves import largest2, report, rows_left, wider
from lp_fa4.sm90.backward_ops import effect, pinned, redux_max
from lp_fa4.sm90.backward_store import BARRIER_PAIR, read_rows, scale_bytes, send_rows, staged_row, write_rows

LIFT = 2.0**15
"""Factor at a time on sums so small that what brings them to codes is no FP16 number; twice reaches FP16's smallest."""


def block_tops(words, blocks: int):
    """Largest magnitude of a thread in each block of 32 columns, FP32; NaN wins."""
    tops = []
    for x in range(blocks):
        top = largest2(words[8 * x], words[8 * x + 1])
        for i in range(2, 8):
            top = largest2(top, words[8 * x + i])
        tops.append(wider(top))
    return tops


def block_codes(words, x: int, scale):
    """Codes of a thread in block ``x``, times ``scale``: a word is columns 2t, 2t + 1 of two neighbouring blocks of eight."""
    places = [8 * x + 4 * p + r for p in range(2) for r in range(2)]
    return [e4m3_of(mul2(words[i], scale), mul2(words[i + 2], scale)) for i in places]


@cute.jit
def note_peaks(w, which: cutlass.Constexpr, words, factor, blocks: cutlass.Constexpr, left: Int32):
    """Largest magnitudes of a gradient's blocks, times ``factor``, to shared memory. Returns this thread's, without it."""
    if left < 16:  # rows past the end carry garbage
        keep = rows_left(w)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] & keep[i % 2]
    tops = block_tops(words, blocks)
    peaks = [redux_max(top * factor) for top in tops]
    if pinned(w.lane) == 0:
        place = w.block_peaks + 128 * which + 16 * w.warp
        effect([place, *peaks], f"st.shared.v{blocks}.b32 [$0], {{{', '.join(f'${i + 1}' for i in range(blocks))}}};", "r" + ",r" * blocks)
    return tops


@cute.jit
def store_mxfp8_halves(
    spec, w, which: cutlass.Constexpr, words, factor, rows: Int64, scales: Int64, stride: Int32, left: Int32, grads, tag
):
    """FP16 sums (``words``, packed) times ``factor`` as E4M3 rows at ``rows`` and E8M0 bytes at ``scales``. Sums that are not finite leave
    the item (``tag``) to the form with FP32 sums."""
    lane, blocks = pinned(w.lane), spec.head_dim // 32
    tops = note_peaks(w, which, words, factor, blocks, left)
    report(grads, tag, tops)
    cute.arch.barrier(barrier_id=BARRIER_PAIR + w.warp // 2, number_of_threads=64)
    byte, inverse = scale_bytes(spec, w, which, factor, scales, left)
    if cute.arch.vote_any_sync(byte == 255):
        for x in cutlass.range_constexpr(blocks):
            finite = cute.arch.shuffle_sync(byte, x) != 255
            for i in cutlass.range_constexpr(8 * x, 8 * x + 8):
                words[i] = words[i] if finite else Int32(0)
    for _ in cutlass.range_constexpr(2):
        if cute.arch.vote_any_sync(inverse > LIFT):
            up = Float32(LIFT) if inverse > LIFT else Float32(1.0)
            inverse = inverse * (Float32(1.0 / LIFT) if inverse > LIFT else Float32(1.0))
            for x in cutlass.range_constexpr(blocks):
                lift = pair(cute.arch.shuffle_sync(up, x))
                for i in cutlass.range_constexpr(8 * x, 8 * x + 8):
                    words[i] = mul2(words[i], lift)
    inverse = cute.arch.fmin(inverse, Float32(LIFT))  # only where all sums are 0
    cute.arch.sync_warp()
    at = w.staging + lane % 16 * (staged_row(spec) + 16) + 16 * (lane // 16)
    for x in cutlass.range_constexpr(blocks):
        out = block_codes(words, x, pair(cute.arch.shuffle_sync(inverse, x)))
        effect([at + 32 * x, *out], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
    cute.arch.sync_warp()
    send_rows(spec, lane, w.staging, rows, stride, left, True)


@cute.jit
def pair_bytes(spec, w, factors, targets, left: Int32):
    """As ``backward_store.scale_bytes``, of both gradients at once: a lane a block of dV, then of dK. ``targets``: where their bytes go."""
    lane, blocks = pinned(w.lane), spec.head_dim // 32
    block, second = lane & (blocks - 1), lane & blocks != 0
    factor = factors[1] if second else factors[0]
    target = targets[1] if second else targets[0]
    at = w.block_peaks + (Int32(128) if second else Int32(0)) + 32 * (w.warp >> 1) + 4 * block
    top = cutlass.max(shared_words(at, 1)[0], shared_words(at + 16, 1)[0])
    byte = byte_of_amax_bits(top)
    inverse = inverse_of_byte(byte) * factor  # a power of two times the factor: rounds once, as two products would
    inverse = Float32(0.0) if top == 0 or byte == 255 else inverse  # 2^127 times a large factor is infinite, times 0 NaN
    if lane < 2 * blocks and w.warp & 1 == 0 and left > 0:
        effect([target + block, byte], "{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h;}", "l,r")
    return byte, inverse


@cute.jit
def pair_scales(spec, w, gradients, factors, tops, scales, left: Int32, grads, tag):
    """Bytes of both gradients' blocks to ``scales``, once the other warp's peaks are there. ``gradients``: dV's and dK's words, of which
    ``factors`` are; ``tops``: of :func:`note_peaks` of both. Returns what a lane's block is multiplied by (dV's blocks, then dK's)."""
    blocks = spec.head_dim // 32
    report(grads, tag, tops)
    cute.arch.barrier(barrier_id=BARRIER_PAIR + (w.warp >> 1), number_of_threads=64)
    byte, inverse = pair_bytes(spec, w, factors, scales, left)
    if cute.arch.vote_any_sync(byte == 255):
        for which in cutlass.range_constexpr(2):
            for x in cutlass.range_constexpr(blocks):
                finite = cute.arch.shuffle_sync(byte, which * blocks + x) != 255
                for i in cutlass.range_constexpr(8 * x, 8 * x + 8):
                    gradients[which][i] = gradients[which][i] if finite else Int32(0)
    if cute.arch.vote_any_sync(inverse > LIFT):
        for _ in cutlass.range(2, unroll=1):
            up = Float32(LIFT) if inverse > LIFT else Float32(1.0)
            inverse = inverse * (Float32(1.0 / LIFT) if inverse > LIFT else Float32(1.0))
            for which in cutlass.range_constexpr(2):
                for x in cutlass.range_constexpr(blocks):
                    lift = pair(cute.arch.shuffle_sync(up, which * blocks + x))
                    for i in cutlass.range_constexpr(8 * x, 8 * x + 8):
                        gradients[which][i] = mul2(gradients[which][i], lift)
    return cute.arch.fmin(inverse, Float32(LIFT))  # only where all sums are 0


@cute.jit
def store_pair(spec, w, gradients, inverse, rows, stride: Int32, left: Int32):
    """Codes of both gradients (``inverse``: of :func:`pair_scales`) to their ``rows``; dV's are on their way from the staging while dK's
    are made."""
    lane, blocks = pinned(w.lane), spec.head_dim // 32
    cute.arch.sync_warp()
    at = w.staging + (lane & 15) * (staged_row(spec) + 16) + (lane & 16)
    read = None
    for which in cutlass.range_constexpr(2):
        for x in cutlass.range_constexpr(blocks):
            out = block_codes(gradients[which], x, pair(cute.arch.shuffle_sync(inverse, which * blocks + x)))
            effect([at + 32 * x, *out], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        cute.arch.sync_warp()
        if const_expr(which == 1):
            write_rows(spec, lane, read, rows[0], stride, left, True)
        read = read_rows(spec, lane, w.staging)
        if const_expr(which == 0):
            cute.arch.sync_warp()
    write_rows(spec, lane, read, rows[1], stride, left, True)
