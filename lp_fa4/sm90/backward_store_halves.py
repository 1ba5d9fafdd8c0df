"""How a key tile's dK and dV leave as MXFP8 where their sums are FP16: two columns a register to the codes, nothing in FP32 but scales.

As ``backward_store.store_mxfp8``, whose rows and bytes these are. Word ``8 x + 4 p + 2 i + r`` of a thread's sums holds columns
``32 x + 16 p + 8 i + 2 (lane % 4)`` and the next, of row ``lane // 4 + 8 r``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from lp_fa4.common.halves import e4m3_of, mul2, pair
from lp_fa4.sm90.backward_halves import largest2, report, rows_left, wider
from lp_fa4.sm90.backward_ops import effect, pinned, redux_max
from lp_fa4.sm90.backward_store import BARRIER_PAIR, scale_bytes, send_rows, staged_row

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
def store_mxfp8_halves(
    spec, w, which: cutlass.Constexpr, words, factor, rows: Int64, scales: Int64, stride: Int32, left: Int32, grads, tag
):
    """FP16 sums (``words``, packed) times ``factor`` as E4M3 rows at ``rows`` and E8M0 bytes at ``scales``. Sums that are not finite leave
    the item (``tag``) to the form with FP32 sums."""
    lane, blocks = pinned(w.lane), spec.head_dim // 32
    if left < 16:  # rows past the end carry garbage
        keep = rows_left(w)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = words[i] & keep[i % 2]
    tops = block_tops(words, blocks)
    peaks = [redux_max(top * factor) for top in tops]
    place = w.block_peaks + 128 * which + 16 * w.warp
    if lane == 0:
        effect([place, *peaks], f"st.shared.v{blocks}.b32 [$0], {{{', '.join(f'${i + 1}' for i in range(blocks))}}};", "r" + ",r" * blocks)
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
