"""From an accumulator in tensor memory to codes, scales and swizzled scales: four warps, a row a thread.

A warp's 32 lanes are the 32 rows of one scale group, so a square block is 32 registers of each lane: a maximum per thread and one across
the warp. Codes reach memory 16 bytes a thread through a warp's own 4 KiB of shared memory, rows of 128 bytes together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr

from fused_ops.gemm_quantize.config import TILE
from fused_ops.places import first_sequence, place
from fused_ops.rmsnorm_quantize.arithmetic import nan_unless_finite
from fused_ops.scale_layout.kernel import WORDS, atom_source
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte, magnitude_max, warp_max
from lp_fa4.common.sequence import GROUP
from lp_fa4.sm100.atoms import load_columns
from lp_fa4.sm100.sync import arrive_tensor, wait_tensor

MEET = 1
"""Named barrier of the four warps."""
ROW_WORDS = TILE // 4


@cute.jit
def store_role(spec: cutlass.Constexpr, t, s, full, empty, tmem):
    """Walk the CTA's tiles; ``full``, ``empty``: barriers of the two accumulators."""
    tid, _, _ = cute.arch.thread_idx()
    warp, lane = tid // 32, tid % 32
    count, near = Int32(0), first_sequence(spec.dense, t.offsets, t.first)
    for tile in cutlass.range(t.first, t.tiles, t.step, unroll=1):
        token, end, limit, row, region, near = place(spec.dense, t.offsets, t.tokens, tile, near)
        if spec.want_atoms | (token < limit) | (region > 0):
            buffer, parity = count % 2, count & 1
            wait_tensor(full + buffer, count // 2 & 1)
            sums = load_columns(tmem + buffer * TILE, 0, TILE, tid)
            cute.arch.fence_view_async_tmem_load()
            arrive_tensor(empty + buffer)
            at = Bundle(token=token, end=end, limit=limit, row=row, region=region, tile=tile)
            finish(spec, t, s, at, sums, warp, lane, parity)
            count = count + 1


@cute.jit
def block_bytes(spec: cutlass.Constexpr, s, sums: cute.Tensor, inside, warp, lane, parity: Int32, bytes_: cute.Tensor):
    """Scale bytes of this warp's group, one for each block of the tile, into ``bytes_``."""
    maxima = s.maxima
    for n in cutlass.range_constexpr(spec.blocks):
        top = Int32(0)
        for i in cutlass.range_constexpr(spec.width):
            top = magnitude_max(top, sums[n * spec.width + i])
        top = warp_max(top if inside else Int32(0))
        bytes_[n] = top
        if const_expr(spec.block_tokens != GROUP):  # noqa: SIM102 - one is decided at compile time
            if lane == 0:
                maxima[warp, n, parity] = top
    if const_expr(spec.block_tokens != GROUP):
        cute.arch.barrier(barrier_id=MEET, number_of_threads=TILE)
        for n in cutlass.range_constexpr(spec.blocks):
            top = maxima[0, n, parity]
            for w in cutlass.range_constexpr(1, 4):
                top = cutlass.max(top, maxima[w, n, parity])
            bytes_[n] = top
    for n in cutlass.range_constexpr(spec.blocks):
        bytes_[n] = byte_of_amax_bits(bytes_[n])


@cute.jit
def finish(spec: cutlass.Constexpr, t, s, at, sums: cute.Tensor, warp, lane, parity: Int32):
    """Quantize and store a tile. ``sums``: this thread's row."""
    inside = at.token + GROUP * warp + lane < at.end
    holds = at.token + GROUP * warp < at.end  # the group has rows of the sequence
    bytes_ = cute.make_rmem_tensor(spec.blocks, Int32)
    first_column = t.column * TILE
    if const_expr(spec.static):
        for n in cutlass.range_constexpr(spec.blocks):
            bytes_[n] = Int32(t.given[0, cutlass.min(first_column + n * spec.unit, spec.columns - 1) // spec.width])
    else:
        block_bytes(spec, s, sums, inside, warp, lane, parity, bytes_)
        scales = t.scales
        if (lane == 0) & (warp < at.region):
            for n in cutlass.range_constexpr(spec.blocks):
                block = t.column * spec.blocks + n
                if block < spec.columns // spec.width:
                    scales[Int64(at.row + warp), block] = Uint8(bytes_[n] if holds else Int32(0))
    if const_expr(spec.want_atoms):
        write_atoms(spec, t, s, at, holds, warp, lane, parity, bytes_)
    words = []
    for i in cutlass.range_constexpr(TILE // 4):
        column = 4 * i
        byte = bytes_[column // spec.unit]
        inverse = inverse_of_byte(byte)
        values = [sums[column + j] * inverse for j in range(4)]
        if const_expr(spec.static):
            word = e4m3x4(*[nan_unless_finite(v) for v in values])
            words.append(word if inside else Int32(0))
        else:
            word = e4m3x4(*values)
            words.append(word if inside & (byte != 255) else Int32(0))
    staged = s.staging + warp * (GROUP * ROW_WORDS)
    cute.arch.sync_warp()  # what was staged before has been read
    for chunk in cutlass.range_constexpr(TILE // 16):
        piece = cute.make_rmem_tensor(4, Uint32)
        for i in cutlass.range_constexpr(4):
            piece[i] = Uint32(words[4 * chunk + i])
        address = (staged + lane * ROW_WORDS + 4 * (chunk ^ (lane % 8))).toint()
        target = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(4)))
    cute.arch.sync_warp()
    codes, row0 = t.codes, at.token + GROUP * warp
    for i in cutlass.range_constexpr(TILE // 16):
        row, chunk = 4 * i + lane // 8, lane % 8
        if (row0 + row < at.limit) & (first_column + 16 * chunk < spec.columns):
            piece = cute.make_rmem_tensor(4, Uint32)
            address = (staged + row * ROW_WORDS + 4 * (chunk ^ (row % 8))).toint()
            source = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), piece)
            pointer = codes.iterator + cute.crd2idx((Int64(row0 + row), first_column + 16 * chunk), codes.layout)
            out = cute.make_ptr(Uint32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
            cute.autovec_copy(piece, cute.make_tensor(out, cute.make_layout(4)))


@cute.jit
def write_atoms(spec: cutlass.Constexpr, t, s, at, holds, warp, lane, parity: Int32, bytes_: cute.Tensor):
    """The tile's atom of each layout asked for: a word a thread, from all groups' bytes in shared memory."""
    found, word = s.found, GROUP * warp + lane
    if lane == 0:
        for n in cutlass.range_constexpr(4):
            found[warp, n, parity] = bytes_[n * 32 // spec.unit] if holds else Int32(0)
    cute.arch.barrier(barrier_id=MEET, number_of_threads=TILE)
    for axis in cutlass.range_constexpr(2):
        if const_expr(spec.sf_columns if axis == 1 else spec.sf_tokens):
            made = Int32(0)
            for byte in cutlass.range_constexpr(4):
                group, column = atom_source(axis, Int32(0), word, byte)
                if t.column * TILE + column < spec.columns:
                    made = made | (found[group, column // 32, parity] << (8 * byte))
            if const_expr(axis == 1):
                by_columns = t.atoms_columns
                by_columns[Int64(at.tile), t.column, word] = made
            else:
                by_tokens = t.atoms_tokens
                by_tokens[Int64(t.column), at.tile, word] = made


assert WORDS == TILE
