"""How dK and dV leave the backward's main kernel: BF16 rows, MXFP8 in 32 x 32 blocks, partial sums over long query loops.

All functions run on whole warps of the consumer role; an accumulator of a warp is 16 keys (rows ``lane // 4`` and ``+ 8``) x D.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte
from lp_fa4.sm90.backward_layout import CHUNK, CHUNK_TILES, KEY_TILE, QUERY_TILE
from lp_fa4.sm90.backward_ops import absolute, bf16x2, effect, larger, pick_pairs, pinned, redux_max, shared_floats, strong_floats

BARRIER_PAIR = 4
"""First of four named barriers, one for two warps (32 keys)."""


@cute.jit
def add_partial(spec, w, acc, factor, scratch: Int64, fresh):
    """Add ``acc * factor`` to this warp's share of the CTA's FP32 sums (``fresh``: start them), by bulk reductions through the staging.

    Vector reductions from registers took twice the time of the whole kernel on long query loops. The sums of the segment before must
    have been performed (``settle_partial``): then every word is a plain FP32 sum in program order.
    """
    pieces = 2 if const_expr(spec.dq_half) else 4  # of a staging
    base = scratch + Int64(pinned(w.warp)) * (64 * spec.head_dim)
    size, blocks = 64 * spec.head_dim // pieces, spec.head_dim // (8 * pieces)
    for piece in cutlass.range_constexpr(pieces):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(blocks):
            at = 4 * (piece * blocks + j)
            four = [acc[at + i] * factor for i in range(4)]
            effect([w.staging + (512 * j + 16 * w.lane), *four], "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "r,f,f,f,f")
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if w.lane == 0:
            target = base + piece * size
            if fresh:
                effect([target, w.staging, Int32(size)], "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r")
            else:
                reduction = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
                effect([target, w.staging, Int32(size)], reduction, "l,r,r")
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def settle_partial(w):
    """Wait until the sums of the segment before are performed."""
    if w.lane == 0:
        cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()


@cute.jit
def take_partial(spec, w, acc, scratch: Int64):
    """Add the sums of :func:`add_partial` to ``acc``. They lie in L2: the first-level cache may hold those of an earlier item."""
    base = scratch + Int64(pinned(w.warp)) * (64 * spec.head_dim) + Int64(16 * w.lane)
    for j in cutlass.range_constexpr(spec.head_dim // 8):
        four = strong_floats(base + 512 * j)
        for i in cutlass.range_constexpr(4):
            acc[4 * j + i] = acc[4 * j + i] + four[i]


@cute.jit
def add_suffix(spec, w, dV, item, kv_heads, suffix: Int64):
    """Add the coherent part of dV: suffix sums (``backward_suffix``) from the first query tile on that sees all of this warp's keys."""
    lane, tile = pinned(w.lane), Int32(0)
    if const_expr(spec.causal):  # query i sees key j if j <= i + klen - qlen
        first = item.n * KEY_TILE + 16 * w.warp + 15 - item.klen + item.qlen
        tile = (cutlass.max(first, Int32(0)) + (QUERY_TILE - 1)) // QUERY_TILE
    if tile < item.tiles:
        for g in cutlass.range(spec.group, unroll=1):
            row = Int64(item.qrow + tile) * (kv_heads * spec.group) + item.hk * spec.group + g
            add_row(spec, lane, dV, suffix + row * (4 * spec.head_dim))


@cute.jit
def add_mean(spec, w, dV, item, kv_heads, sums: Int64):
    """Add the coherent part of dV where P is centred by the caller: the sequence's shares of column sums of dO, a row a chunk."""
    lane = pinned(w.lane)
    if const_expr(spec.mean_row):
        for j in cutlass.range_constexpr(spec.head_dim // 8):
            two = shared_floats(item.mean + 8 * (lane % 4) + 32 * j, 2, 8)
            for i in cutlass.range_constexpr(4):
                dV[4 * j + i] = dV[4 * j + i] + two[i % 2]
    else:
        chunks = (item.qlen + (CHUNK - 1)) // CHUNK
        first = item.b * chunks
        if const_expr(spec.jagged):
            first = (item.qrow - item.b) // CHUNK_TILES + item.b
        for c in cutlass.range(chunks, unroll=1):
            for g in cutlass.range(spec.group, unroll=1):
                row = Int64(first + c) * (kv_heads * spec.group) + item.hk * spec.group + g
                add_row(spec, lane, dV, sums + row * (4 * spec.head_dim))


@cute.jit
def add_row(spec, lane, dV, row: Int64):
    """Add the FP32 row at byte address ``row`` to every key's row of an accumulator."""
    at = row + 8 * (lane % 4)
    for j in cutlass.range_constexpr(spec.head_dim // 8):
        pointer = cute.make_ptr(Float32, at + 32 * j, cute.AddressSpace.gmem, assumed_align=8)
        two = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), two)
        for i in cutlass.range_constexpr(4):
            dV[4 * j + i] = dV[4 * j + i] + two[i % 2]


def staged_row(spec) -> int:
    """Bytes of a row that are staged at a time: a row of MXFP8, half a row of BF16. Rows lie 16 bytes further apart, so that eight rows
    are in different banks."""
    return spec.head_dim


@cute.jit
def send_rows(spec, lane, staging, rows: Int64, stride: Int32, left: Int32, split: cutlass.Constexpr):
    """Copy the staged rows that exist to global memory, whole sectors at a time. ``split``: even and odd pairs of bytes are the columns of
    two neighbouring blocks of eight (:func:`encode_blocks`). Bulk copies, one a row, occupied the unit that also brings the operands and
    takes dQ away."""
    write_rows(spec, lane, read_rows(spec, lane, staging), rows, stride, left, split)


def read_rows(spec, lane, staging):
    """Staged rows as :func:`write_rows` takes them: 16 bytes a lane and time."""
    pitch, chunks = staged_row(spec) + 16, staged_row(spec) // 16
    at_once, shift = 32 // chunks, chunks.bit_length() - 1
    source = staging + (lane >> shift) * pitch + 16 * (lane & (chunks - 1))
    return [shared_words(source + at_once * i * pitch, 4) for i in range(16 // at_once)]


@cute.jit
def write_rows(spec, lane, read, rows: Int64, stride: Int32, left: Int32, split: cutlass.Constexpr):
    """Those to global memory, as :func:`send_rows` does."""
    chunks = staged_row(spec) // 16
    at_once, first = 32 // chunks, lane >> (chunks.bit_length() - 1)
    target = rows + Int64(first) * stride + 16 * (lane & (chunks - 1))
    for i in cutlass.range_constexpr(16 // at_once):
        words = [read[i][j] for j in range(4)]
        if const_expr(split):
            words = [pick_pairs(words[j % 2 * 2], words[j % 2 * 2 + 1], "5410" if j < 2 else "7632") for j in range(4)]
        if at_once * i + first < left:
            effect([target + Int64(at_once * i) * stride, *words], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")


@cute.jit
def store_bf16(spec, w, acc, factor, rows: Int64, stride: Int32, left: Int32):
    """``acc * factor`` as BF16 rows at byte address ``rows`` (row stride in bytes); only the first ``left`` of 16 rows exist."""
    lane = pinned(w.lane)
    at = w.staging + lane % 16 * (staged_row(spec) + 16) + 16 * (lane // 16)
    for half in cutlass.range_constexpr(2):
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(spec.head_dim // 32):
            a = spec.head_dim // 4 * half + 8 * j
            words = [bf16x2(acc[a + o] * factor, acc[a + o + 1] * factor) for o in (0, 2, 4, 6)]
            effect([at + 32 * j, *words], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        cute.arch.sync_warp()
        send_rows(spec, lane, w.staging, rows + half * staged_row(spec), stride, left, False)


@cute.jit
def store_mxfp8(spec, w, which: cutlass.Constexpr, acc, factor, rows: Int64, scales: Int64, stride: Int32, left: Int32):
    """``acc * factor`` as E4M3 rows at ``rows`` and E8M0 bytes at ``scales``; ``which`` gradient. The maximum of a 32 x 32 block is taken
    over two warps. (Each gradient has its peaks: those of the item before are read, both warps have passed the other's barrier since.)"""
    block_peaks(spec, w, acc, factor, which, left)
    cute.arch.barrier(barrier_id=BARRIER_PAIR + w.warp // 2, number_of_threads=64)
    inverses = block_scales(spec, w, which, acc, factor, scales, left)
    cute.arch.sync_warp()
    encode_blocks(spec, w, acc, inverses, w.staging)
    cute.arch.sync_warp()
    send_rows(spec, pinned(w.lane), w.staging, rows, stride, left, True)


@cute.jit
def scale_bytes(spec, w, which: cutlass.Constexpr, factor, scales: Int64, left: Int32):
    """Bytes of the blocks to global memory, a lane a block. Returns a lane's byte, and what its block's sums are multiplied by: 0 where
    the block is 0 or not finite."""
    lane, blocks = pinned(w.lane), spec.head_dim // 32
    at = w.block_peaks + 128 * which + 32 * (w.warp // 2) + 4 * (lane % blocks)
    top = cutlass.max(shared_words(at, 1)[0], shared_words(at + 16, 1)[0])
    byte = byte_of_amax_bits(top)
    inverse = inverse_of_byte(byte) * factor  # a power of two times the factor: rounds once, as two products would
    inverse = Float32(0.0) if top == 0 or byte == 255 else inverse  # 2^127 times a large factor is infinite, times 0 NaN
    if lane < blocks and w.warp % 2 == 0 and left > 0:
        effect([scales + lane, byte], "{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h;}", "l,r")
    return byte, inverse


@cute.jit
def block_scales(spec, w, which: cutlass.Constexpr, acc, factor, scales: Int64, left: Int32):
    """As :func:`scale_bytes`; returns the factors of all blocks, for all lanes. The sums of a block that is not finite become 0, as its
    codes are."""
    blocks = spec.head_dim // 32
    byte, inverse = scale_bytes(spec, w, which, factor, scales, left)
    if cute.arch.vote_any_sync(byte == 255):
        for x in cutlass.range_constexpr(blocks):
            finite = cute.arch.shuffle_sync(byte, x) != 255
            for i in cutlass.range_constexpr(16 * x, 16 * x + 16):
                acc[i] = acc[i] if finite else Float32(0.0)
    return [cute.arch.shuffle_sync(inverse, x) for x in range(blocks)]


@cute.jit
def block_peaks(spec, w, acc, factor, which: cutlass.Constexpr, left: Int32):
    """Largest magnitude of this warp's half of each 32 x 32 block, times ``factor``, to shared memory; NaN wins. (Two warps may code dS
    under different scales, so the factors may differ.) Zeroes the rows past the end, which carry garbage."""
    lane = pinned(w.lane)
    if left < 16:
        for r in cutlass.range_constexpr(2):
            keep = lane // 4 + 8 * r < left
            for j in cutlass.range_constexpr(spec.head_dim // 8):
                for c in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    acc[i] = acc[i] if keep else Float32(0.0)
    blocks = spec.head_dim // 32
    tops = [absolute(acc[16 * x]) for x in range(blocks)]
    for i in cutlass.range_constexpr(1, 16):
        tops = [larger(tops[x], absolute(acc[16 * x + i])) for x in range(blocks)]
    for x in cutlass.range_constexpr(blocks):
        peak = redux_max(tops[x] * factor)
        if lane == 0:
            effect([w.block_peaks + 128 * which + 16 * w.warp + 4 * x, peak], "st.shared.b32 [$0], $1;", "r,r")


@cute.jit
def encode_blocks(spec, w, acc, inverses, staging):
    """Codes of ``acc`` times its blocks' factors (:func:`block_scales`) to the staging."""
    lane = pinned(w.lane)
    at = staging + lane % 16 * (staged_row(spec) + 16) + 16 * (lane // 16)
    for x in cutlass.range_constexpr(spec.head_dim // 32):
        words = []
        for p in cutlass.range_constexpr(2):  # 16 columns: a word is columns 2t, 2t + 1 of both their blocks of eight
            for r in cutlass.range_constexpr(2):
                i = 16 * x + 8 * p + 2 * r
                words.append(e4m3x4(*[acc[i + o] * inverses[x] for o in (0, 1, 4, 5)]))
        effect([at + 32 * x, *words], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")


@cute.jit
def store_zeros(spec, w, item, heads: Int32, grads):
    """dK and dV of a key tile that no query meets."""
    width = spec.head_dim if const_expr(spec.mxfp8) else 2 * spec.head_dim
    chunks = width // 16
    rows = cutlass.min(item.klen - item.n * KEY_TILE, Int32(KEY_TILE))
    first = Int64(item.k0 + item.n * KEY_TILE)
    for at in cutlass.range(w.thread, rows * chunks, 256, unroll=1):
        offset = ((first + at // chunks) * heads + item.hk) * width + 16 * (at % chunks)
        for target in (grads.dk, grads.dv):
            effect([target + offset], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")
