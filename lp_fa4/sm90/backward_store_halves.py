"""How a key tile's dK and dV leave right from FP16 sums: as MXFP8, two columns a register to the codes, nothing in FP32 but scales; as BF16
rows by TMA.

MXFP8: as ``backward_store.store_mxfp8``, whose rows and bytes these are. Both gradients of a key tile leave together where both are like
that (:func:`store_pair`): one barrier and one chain of latencies.

BF16 (:func:`stage_rows`, :func:`send_staged`): a warp's 16 rows lie in its staging as the TMA unit wants them, in its swizzle, and leave in
one copy a gradient, which nothing waits for but the next gradient in that place: no row is read back.

Word ``8 x + 4 p + 2 i + r`` of a thread's sums holds columns ``32 x + 16 p + 8 i + 2 (lane % 4)`` and the next, of row ``lane // 4 + 8 r``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.common.halves import e4m3_of, half_of, mul2, pair
from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import bf16x2, byte_of_amax_bits, inverse_of_byte
from lp_fa4.common.rows import fma
from lp_fa4.sm90.backward_halves import clear_rows, largest2, report, top_of, wider
from lp_fa4.sm90.backward_layout import KEY_TILE
from lp_fa4.sm90.backward_ops import effect, pinned, redux_max, shared_floats
from lp_fa4.sm90.backward_store import BARRIER_PAIR, read_rows, scale_bytes, send_rows, staged_row, write_rows

LIFT = 2.0**15
"""Factor at a time on sums so small that what brings them to codes is no FP16 number; twice reaches FP16's smallest."""

PIECE = 64
"""Columns of a gradient that are staged together as BF16: a row of 128 bytes."""
PIECE_BYTES = 16 * 2 * PIECE


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
    clear_rows(w, words, left)
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


@cute.jit
def finite_top(w, words, left: Int32):
    """Largest magnitude of a thread's sums, FP32; NaN wins. Rows past the sequence's end become 0."""
    clear_rows(w, words, left)
    return top_of([words[i] for i in range(cute.size(words))])


def slots(spec) -> int:
    """Pieces in a warp's staging: dV's are the first, dK's the last; they share the one in the middle."""
    return spec.head_dim // PIECE + 1


@cute.jit
def stage_rows(spec, w, which: cutlass.Constexpr, words, factor, mean):
    """FP16 sums of dV (``which`` 0) or dK times ``factor`` as BF16 to the staging, with a row of means (its address in shared memory) or
    None."""
    column, pieces = 8 * (pinned(w.lane) & 3), spec.head_dim // PIECE
    for turn in cutlass.range_constexpr(pieces):
        piece = pieces - 1 - turn if which else turn
        if const_expr(which * turn > 0):  # dV's copy has read what they share
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
        for j in cutlass.range_constexpr(PIECE // 16):
            out = []
            for i in cutlass.range_constexpr(4):
                block = PIECE // 16 * piece + j
                two = [half_of(words[4 * block + i], c) for c in range(2)]
                if const_expr(mean is None):
                    two = [two[c] * factor for c in range(2)]
                else:
                    more = shared_floats(mean + column + 32 * (2 * block + i // 2), 2, 8)
                    two = [fma(two[c], factor, more[c]) for c in range(2)]
                out.append(bf16x2(*two))
            at = (w.staged_line ^ (32 * j)) + (which + piece) * PIECE_BYTES
            effect([at, *out], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")


@cute.jit
def send_staged(spec, w, which: cutlass.Constexpr, item, left: Int32, grads, kv_heads):
    """The staged rows of dV (``which`` 0) or dK that exist to global memory: in one copy by TMA where all do."""
    row, pieces = item.k0 + item.n * KEY_TILE + 16 * w.warp, spec.head_dim // PIECE
    if left >= 16:
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        atom, staged = grads.rows.atoms[which], grads.rows.staged
        first = cute.slice_(staged, (None, None, which + w.warp * slots(spec)))
        inner = cute.slice_(staged.layout, (None, None, 0))
        source = cute.make_tensor(first.iterator, cute.append(inner, cute.make_layout(pieces, stride=PIECE_BYTES // 2)))
        there = cute.domain_offset((row, 0, 0), grads.rows.there[which][None, None, None, item.hk])
        there = cute.local_tile(there, (16, PIECE, pieces), (0, 0, 0))
        one, flat = cute.make_layout(1), [cute.group_modes(x, 0, 3) for x in (source, there)]
        cute.copy(atom, *cpasync.tma_partition(atom, 0, one, *flat))
        cute.arch.cp_async_bulk_commit_group()
    else:
        cute.arch.sync_warp()
        lane, stride = pinned(w.lane), Int64(kv_heads) * (2 * spec.head_dim)
        target = (grads.dk if const_expr(which) else grads.dv) + (Int64(row) * kv_heads + item.hk) * (2 * spec.head_dim) + 16 * (lane & 7)
        for piece in cutlass.range_constexpr(pieces):
            source = w.staging + (which + piece) * PIECE_BYTES
            for r in cutlass.range(lane >> 3, left, 4, unroll=1):
                words = shared_words(source + r * (2 * PIECE) + (((lane ^ r) & 7) << 4), 4)
                at = target + (r * stride + 2 * PIECE * piece)
                effect([at, *(words[i] for i in range(4))], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")
        cute.arch.sync_warp()
