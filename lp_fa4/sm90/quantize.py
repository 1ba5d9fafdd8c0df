"""The quantize pass in front of attention: payload, scales and, where asked, the transposed copy, for all operands in one launch.

``x [T, H, D]`` (FP32, FP16 or BF16, any strides with D contiguous) minus its sequence's vector, in blocks of 32 or 128
tokens by D. A CTA takes one 128-token tile of one head: load, subtract, maximum, quantize, store; with the codes also
through shared memory for the copy (``tile_transpose``). The values stay in registers as they were loaded: half the
registers of FP32, twice the CTAs that have loads under way. What bounds the pass, next to memory, is instructions, so
maxima are taken two elements at a time, centring and scaling are one instruction (see ``measure`` and ``encode``), tensor
cores add up columns (``add_rows``), and a tile's sequence is guessed before it is searched for.
Optional by-products of the same read:

* ``sums``: FP32 column sums of the centred, unrounded values per tile, in a fixed order (``sequence_vectors`` adds
  the tiles of a sequence up);
* ``dots``: FP32 dot product of every row with a vector of its sequence, e.g. the scores that a subtracted mean of K
  would have had.

``bounded``: exponents are raised until no row's codes sum to more than 146 (``lp_fa4.mx.quantize``). A thread counts its
elements in units, eight rows of a row's threads are added up in eight shuffles, and the tile meets once more.

Bytes are those of ``lp_fa4.mx.quantize_mx`` for the same FP32 values. Every row, scale and position is written, pads
and slack included.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import T
from torch import Tensor

from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.matrices import warp_mma
from lp_fa4.common.numbers import (
    absolute,
    bits_of,
    byte_of_amax_bits,
    e4m3x4,
    effect,
    float_of,
    inline_ptx,
    inverse_of_byte,
    max3,
    scale_of_byte,
    warp_max,
)
from lp_fa4.common.rows import eight, elements, extreme, fma, wide, words_of
from lp_fa4.common.sequence import TILE, find_sequence, region_groups
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.mx import MXTensor
from lp_fa4.mx.layout import group_rows
from lp_fa4.mx.quantize import ROW_LIMIT, ROW_SHIFTS, ROW_UNITS
from lp_fa4.sm90.operands import MXTensorWithCopy
from lp_fa4.sm90.tile_transpose import THREADS, shared_words, store_columns, word_index

WARPS = THREADS // 32
CARVEOUT = 45
"""Percent of a multiprocessor's on-chip memory that is shared: three CTAs with a tile of codes and sums, 25 KB each, and four without."""


@dataclass(frozen=True)
class QuantizeSpec:
    """Compile key of one operand: see the module's docstring. ``offsets``: dtype of its sequences' offsets. ``order``: of the
    transposed copy, or None. ``group``: for ``dots``, heads of x per head of its vectors. ``bounded``: rows' sums of codes."""

    head_dim: int
    dtype: str
    offsets: str = "int32"
    block: int = 128
    order: str | None = None
    centred: bool = False
    sums: bool = False
    dots: bool = False
    group: int = 1
    bounded: bool = False

    @property
    def lanes(self) -> int:
        """Threads that share a row; each holds 8 of its columns."""
        return self.head_dim // 8

    @property
    def passes(self) -> int:
        """Rows a thread holds."""
        return TILE * self.lanes // THREADS

    @property
    def words(self) -> int:
        """32-bit words of a thread's elements of a row."""
        return words_of(self.dtype)

    @property
    def step(self) -> int:
        """Rows between two that a thread holds."""
        return THREADS // self.lanes

    @property
    def blocks(self) -> int:
        """Scale blocks of a tile."""
        return TILE // self.block

    @property
    def products(self) -> bool:
        """Whether tensor cores add up columns: 16-bit elements under one power of two a tile."""
        return self.sums and self.block == TILE and self.dtype != "float32"

    @property
    def parts(self) -> int:
        """Sums of a column that a tile's warps leave."""
        return WARPS * (32 // self.lanes if self.products else 1)

    @property
    def part_floats(self) -> int:
        """Distance between two parts in shared memory: lanes that store at once meet different banks."""
        return self.head_dim + (self.lanes // 4 if self.products else 0)

    @property
    def ctas(self) -> int:
        """CTAs that a multiprocessor should hold at once: four, three beside a copy, whose spills were slower than a fourth was worth, and
        two of FP32 values, which take twice the registers."""
        return 2 if self.dtype == "float32" else 4 if self.order is None else 3


class Place(NamedTuple):
    """Where a CTA works: ``head``; sequence ``b``; its first token and the end of its tokens; tokens of it before this tile; end of the
    rows that it writes (past ``end`` only for the last sequence); this thread's first row in the tile and first column."""

    head: Int32
    b: Int32
    begin: Int32
    end: Int32
    first: Int32
    limit: Int32
    row0: Int32
    column: Int32


class Quantize:
    """One CTA per 128-token tile (tile rule) and head of each operand in turn. ``specs``: one, or those of several operands with one
    head dimension; launch arguments are tuples with one tensor for each."""

    def __init__(self, specs: tuple[QuantizeSpec, ...]):
        self.specs = specs

    @cute.jit
    def __call__(self, operands, factor: Float32, stream):
        total, shares = Int32(0), []
        for i in cutlass.range_constexpr(len(self.specs)):
            tokens, heads, batch = (Int32(n) for n in (operands[i][0].shape[0], operands[i][0].shape[1], operands[i][1].shape[0] - 1))
            total = total + self.tiles(operands[i])
            shares.append((Float32(1.0) / Float32(heads), Float32(batch) / Float32((tokens >> 7) + batch)))
        self.kernel(operands, tuple(shares), factor).launch(
            grid=[total, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=min(s.ctas for s in self.specs),
            preferred_smem_carveout=CARVEOUT,
        )

    def tiles(self, operand):
        """CTAs of an operand."""
        x, offsets = operand[0], operand[1]
        return ((Int32(x.shape[0]) >> 7) + Int32(offsets.shape[0]) - 1) * Int32(x.shape[1])

    def thread(self):
        """Number of this thread among those of its tile."""
        return cute.arch.thread_idx()[0]

    def meet(self):
        """A barrier of the tile's threads."""
        cute.arch.sync_threads()

    @cute.kernel
    def kernel(self, operands, shares, factor: Float32):
        d = self.specs[0].head_dim
        index, _, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        shared = SimpleNamespace(
            maxima=smem.allocate_tensor(Int32, cute.make_layout((WARPS, 4)), byte_alignment=16), units=None, tile=None, parts=None
        )
        if const_expr(any(s.bounded for s in self.specs)):
            shared.units = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 4)), byte_alignment=16)
        if const_expr(any(s.order is not None for s in self.specs)):
            shared.tile = smem.allocate_tensor(Uint32, cute.make_layout(shared_words(d)), byte_alignment=16)
        if const_expr(any(s.sums for s in self.specs)):
            floats = max(s.parts * s.part_floats for s in self.specs if s.sums)
            shared.parts = smem.allocate_tensor(Float32, cute.make_layout(floats), byte_alignment=16)
        for i in cutlass.range_constexpr(len(self.specs)):
            tiles = self.tiles(operands[i])
            if (index >= 0) & (index < tiles):
                self.quantize_tile(self.specs[i], operands[i], shares[i], index, factor, shared)
            index = index - tiles

    @cute.jit
    def quantize_tile(self, spec: cutlass.Constexpr, operand, shares, index: Int32, factor: Float32, shared):
        """Everything of one tile and head. ``shares``: one over the heads; sequences a row of tiles, on average."""
        x, offsets = operand[0], operand[1]
        heads, batch = Int32(x.shape[1]), Int32(offsets.shape[0]) - 1
        tile_row = Int32(Float32(index) * shares[0])  # to one, for as many tiles as memory may hold
        head = index - tile_row * heads
        if head < 0:
            tile_row, head = tile_row - 1, head + heads
        if head >= heads:
            tile_row, head = tile_row + 1, head - heads
        b, begin, end = self.sequence_of(offsets, batch, tile_row, shares[1])
        self.quantize_at(spec, operand, tile_row, head, b, begin, end, factor, shared)

    @cute.jit
    def quantize_at(
        self, spec: cutlass.Constexpr, operand, tile_row: Int32, head: Int32, b: Int32, begin: Int32, end: Int32, factor: Float32, shared
    ):
        """Everything of a row of tiles of sequence ``b``, rows from ``begin`` to ``end``, and head."""
        x, offsets, scales, sums = operand[0], operand[1], operand[4], operand[6]
        tid, batch = self.thread(), Int32(offsets.shape[0]) - 1
        first = (tile_row - (begin >> 7) - b) << 7
        limit = end
        if b == batch - 1:
            limit = Int32(x.shape[0])  # slack past the last sequence: written, never read
        at = Place(head, b, begin, end, first, limit, tid // spec.lanes, 8 * (tid % spec.lanes))
        if begin + first < limit or const_expr(spec.order is not None):
            self.quantize_rows(spec, operand, at, tile_row, factor, shared)
        else:  # the tile rule's spare tile behind whole ones: no row, only pads
            bytes_ = cute.make_rmem_tensor(4, Int32)
            bytes_.fill(0)
            self.store_scales(spec, at, bytes_, offsets, batch, scales)
            if const_expr(spec.sums):  # noqa: SIM102 - known to the compiler, the other is not
                if tid < spec.head_dim:
                    sums[tile_row, head, tid] = Float32(0.0)

    @cute.jit
    def sequence_of(self, offsets, batch, tile_row, share):
        """Sequence of a row of tiles, its first token and its end: where it would be if all were as long, or found by search."""
        b = cutlass.min(Int32((Float32(tile_row) + 0.5) * share), batch - 1)
        begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
        if (begin >> 7) + b > tile_row or ((end >> 7) + b + 1 <= tile_row and b + 1 < batch):
            b = find_sequence(offsets, batch, tile_row, TILE)
            begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
        return b, begin, end

    @cute.jit
    def quantize_rows(self, spec: cutlass.Constexpr, operand, at, tile_row: Int32, factor: Float32, shared):
        """A tile that has rows."""
        x, offsets, means, codes, scales, transposed, sums, vectors, dots = operand
        batch = Int32(offsets.shape[0]) - 1
        mean = self.mean_of(spec, means, at)
        raw = cute.make_rmem_tensor((spec.words, spec.passes), Uint32)
        self.load(spec, x, at, raw)
        self.measure(spec, raw, mean, at, shared)
        bytes_, inverses = self.to_codes(spec, raw, mean, at, (codes, vectors, dots), factor, shared)
        self.store_scales(spec, at, bytes_, offsets, batch, scales)
        if const_expr(spec.sums or spec.order is not None):
            self.meet()
        if const_expr(spec.sums):
            self.store_sums(spec, at, shared, means, sums, tile_row, bytes_[0], inverses[0])
        if const_expr(spec.order is not None):
            region = region_groups(offsets, batch, at.b, Int32(scales.shape[0]))
            position = 32 * (at.begin // 32 + at.b) + at.first
            store_columns(shared.tile, transposed, at.head, position, 32 * region - at.first, spec.head_dim, spec.order)

    @cute.jit
    def mean_of(self, spec: cutlass.Constexpr, means, at):
        """What is subtracted from this thread's columns."""
        mean = cute.make_rmem_tensor(8, Float32)
        mean.fill(0.0)
        if const_expr(spec.centred):
            eight(means, (at.b, at.head, at.column), mean)
        return mean

    @cute.jit
    def to_codes(self, spec: cutlass.Constexpr, raw, mean, at, targets, factor: Float32, shared):
        """A measured tile's scale bytes and what its values are multiplied by; its codes leave. ``targets``: as of :meth:`encode`."""
        bytes_, inverses = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Float32)
        self.find_scales(spec, at, bytes_, inverses, shared)
        if const_expr(spec.bounded):
            self.bound_rows(spec, raw, bytes_, inverses, shared)
        self.encode(spec, raw, mean, at, bytes_, inverses, targets, factor, shared)
        if const_expr(spec.products):
            self.add_rows(spec, raw, at, bytes_[0], inverses[0], shared)
        return bytes_, inverses

    @cute.jit
    def load(self, spec: cutlass.Constexpr, x, at, raw):
        """This thread's part of the tile. Rows past the sequence's end are its last one again: no branch between the loads, and no maximum
        changes."""
        if at.begin + at.first + TILE <= at.end:
            source = (x.iterator + cute.crd2idx((at.begin + at.first + at.row0, at.head, at.column), x.layout)).toint()
            step = Int64(x.stride[0]) * (spec.step * x.element_type.width // 8)
            for p in cutlass.range_constexpr(spec.passes):
                elements(source, raw[None, p])
                source = source + step
        else:
            for p in cutlass.range_constexpr(spec.passes):
                token = cutlass.max(cutlass.min(at.begin + at.first + at.row0 + p * spec.step, at.end - 1), 0)
                eight(x, (token, at.head, at.column), raw[None, p])

    @cute.jit
    def measure(self, spec: cutlass.Constexpr, raw, mean, at, shared):
        """Maxima of the tile's blocks to shared memory, a warp's each.

        Rounding keeps order, so a column's largest ``|x - mean|`` is that of its largest or of its smallest element: those are found on the
        elements as they are, two an instruction.
        """
        tid = self.thread()
        warp, lane, maxima, dtype = tid // 32, tid % 32, shared.maxima, spec.dtype
        each = spec.passes // spec.blocks
        for g in cutlass.range_constexpr(spec.blocks):
            top = Int32(0)
            for w in cutlass.range_constexpr(spec.words):
                high, low = raw[w, each * g], raw[w, each * g]
                for p in cutlass.range_constexpr(each * g + 1, each * (g + 1)):
                    high, low = extreme(high, raw[w, p], dtype, "max"), extreme(low, raw[w, p], dtype, "min")
                for i, (most, least) in enumerate(zip(wide([high], dtype), wide([low], dtype), strict=True)):
                    middle = mean[8 // spec.words * w + i]
                    ends = (most - middle, middle - least) if spec.centred else (most, -least)
                    top = max3(top, *map(bits_of, ends))  # one of the two may be negative, and is no maximum then; a NaN is not
            most = warp_max(top)
            if lane == 0:
                maxima[warp, g] = most
        self.meet()

    @cute.jit
    def find_scales(self, spec: cutlass.Constexpr, at, bytes_, inverses, shared):
        """E8M0 bytes of the tile's blocks and what their values are multiplied by: 0 for a block of zeros, where ``2^127 * mean`` may be
        infinite. A block without a token is one."""
        maxima = shared.maxima
        for g in cutlass.range_constexpr(spec.blocks):
            most = maxima[0, g]
            for w in cutlass.range_constexpr(1, WARPS):
                most = cutlass.max(most, maxima[w, g])
            most = most if at.begin + at.first + g * spec.block < at.end else Int32(0)
            bytes_[g] = byte_of_amax_bits(most)
            inverses[g] = inverse_of_byte(bytes_[g]) if most > 0 else Float32(0.0)

    @cute.jit
    def bound_rows(self, spec: cutlass.Constexpr, raw, bytes_, inverses, shared):
        """Exponents raised until the codes of a row sum to at most ``ROW_SUM``. (Rows past a sequence's end are its last one again; a block
        without a token stays zeros.)"""
        tid = self.thread()
        warp, lane, each, units = tid // 32, tid % 32, spec.passes // spec.blocks, shared.units
        for g in cutlass.range_constexpr(spec.blocks):
            values = [wide([raw[w, p] for w in range(spec.words)], spec.dtype) for p in range(each * g, each * (g + 1))]
            rows = [row_units(row, inverses[g]) for row in values]
            for bit in cutlass.range_constexpr(int(math.log2(spec.lanes))):
                if const_expr(len(rows) > 1):  # each exchange halves the rows that a thread has
                    upper = (lane >> bit) & 1
                    half = len(rows) // 2
                    pairs = [(rows[half + i], rows[i]) if upper == 1 else (rows[i], rows[half + i]) for i in range(half)]
                    rows = [keep + cute.arch.shuffle_sync_bfly(send, offset=1 << bit) for keep, send in pairs]
                else:
                    rows = [rows[0] + cute.arch.shuffle_sync_bfly(rows[0], offset=1 << bit)]
            most = warp_max(rows[0])
            if lane == 0:
                units[warp, g] = most
        self.meet()
        for g in cutlass.range_constexpr(spec.blocks):
            most = units[0, g]
            for w in cutlass.range_constexpr(1, WARPS):
                most = cutlass.max(most, units[w, g])
            if bytes_[g] < 255 and inverses[g] > 0.0:
                byte = bytes_[g]
                for i in cutlass.range_constexpr(ROW_SHIFTS):
                    byte = byte + Int32(most > (ROW_LIMIT * ROW_UNITS << i))
                bytes_[g] = cutlass.min(byte, 254)
                inverses[g] = inverse_of_byte(bytes_[g])

    @cute.jit
    def encode(self, spec: cutlass.Constexpr, raw, mean, at, bytes_, inverses, results, factor, shared):
        """Codes to memory and, for the copy, to shared memory; dot products; the warps' column sums.

        ``(x - mean) * 2^-e`` is one instruction, ``x * 2^-e - mean * 2^-e``: a power of two changes no rounding. Sums and dot products are
        those of the scaled values, scaled back.
        """
        codes, vectors, dots = results
        each = spec.passes // spec.blocks
        total, shift, vector = (cute.make_rmem_tensor(8, Float32) for _ in range(3))
        total.fill(0.0)
        products = cute.make_rmem_tensor(spec.passes, Float32)
        nothing = Uint32(bytes_[0] >> 8)  # 0, which no compiler can know: else FP32 values are kept, or spilled, instead of widened again
        if const_expr(spec.dots):
            eight(vectors, (at.b, at.head // spec.group, at.column), vector)
        target = (codes.iterator + cute.crd2idx((at.begin + at.first + at.row0, at.head, at.column), codes.layout)).toint()
        step = Int64(codes.stride[0]) * spec.step
        clean = at.begin + at.first + TILE <= at.end
        for g in cutlass.range_constexpr(spec.blocks):
            byte, inverse = bytes_[g], inverses[g]
            clean = clean and byte != 255
            back = scale_of_byte(cutlass.min(byte, 254))
            sums = cute.make_rmem_tensor(8, Float32)
            sums.fill(0.0)
            if const_expr(spec.centred):
                for i in cutlass.range_constexpr(8):
                    shift[i] = -(mean[i] * inverse)
            for p in cutlass.range_constexpr(each * g, each * (g + 1)):
                row = at.row0 + p * spec.step
                token = at.begin + at.first + row
                values = wide_again([raw[w, p] for w in range(spec.words)], spec.dtype, nothing)
                values = [fma(v, inverse, shift[i]) if spec.centred else v * inverse for i, v in enumerate(values)]
                if const_expr(spec.sums and not spec.products):
                    inside = Float32(1.0) if token < at.end else Float32(0.0)
                    for i in cutlass.range_constexpr(8):
                        sums[i] = fma(values[i], inside, sums[i])
                if const_expr(spec.dots):
                    dot = Float32(0.0)
                    for i in cutlass.range_constexpr(8):
                        dot = fma(values[i], vector[i], dot)
                    products[p] = dot * back
                words = cute.make_rmem_tensor(2, Uint32)
                for w in cutlass.range_constexpr(2):
                    words[w] = Uint32(e4m3x4(*values[4 * w : 4 * w + 4]))
                self.put(spec, words, target, token, row, at, shared)
                target = target + step
            if const_expr(spec.sums and not spec.products):
                for i in cutlass.range_constexpr(8):
                    total[i] = sums[i] * back if const_expr(g == 0) else fma(sums[i], back, total[i])
        if not clean:
            self.blank(spec, at, bytes_, codes, shared)
        if const_expr(spec.dots):
            self.store_dots(spec, at, products, dots, factor)
        if const_expr(spec.sums and not spec.products):
            self.share_sums(spec, at, total, shared)

    @cute.jit
    def put(self, spec: cutlass.Constexpr, words, target, token: Int32, row: Int32, at, shared):
        """Eight codes of a row to where they belong."""
        text = "{.reg .pred p; setp.lt.s32 p, $3, $4; @p st.global.v2.b32 [$0], {$1, $2};}"  # a branch would cost more
        effect([target, words[0], words[1], token, at.end], text, "l,r,r,r,r")
        if const_expr(spec.order is not None):
            store8(words, shared_row(shared.tile, row, at.column, spec.head_dim), cute.AddressSpace.smem)

    @cute.jit
    def blank(self, spec: cutlass.Constexpr, at, bytes_, codes, shared):
        """Zeros for the codes that a tile has none of: rows past its sequence's end, blocks that are not finite."""
        words = cute.make_rmem_tensor(2, Uint32)
        words.fill(0)
        for p in cutlass.range_constexpr(spec.passes):
            row = at.row0 + p * spec.step
            token = at.begin + at.first + row
            if bytes_[p * spec.blocks // spec.passes] == 255 or token >= at.end:
                if token < at.limit:
                    target = (codes.iterator + cute.crd2idx((token, at.head, at.column), codes.layout)).toint()
                    store8(words, target, cute.AddressSpace.gmem)
                if const_expr(spec.order is not None):
                    store8(words, shared_row(shared.tile, row, at.column, spec.head_dim), cute.AddressSpace.smem)

    @cute.jit
    def add_rows(self, spec: cutlass.Constexpr, raw, at, byte, inverse, shared):
        """Column sums of a warp's rows of elements, in units of their codes, to shared memory.

        A row's words are B of a product whose A has the unit on its diagonal: the product adds up what lanes of one column hold, and
        leaves each sum in a lane of another. BF16 has every unit; FP16 has not, and is added up as it is."""
        tid = self.thread()
        warp, lane, parts = tid // 32, tid % 32, shared.parts
        group, quad, kind = lane // 4, lane % 4, "bf16" if spec.dtype == "bfloat16" else "f16"
        unit = (bits_of(inverse) >> 16) & 0xFFFF if const_expr(spec.dtype == "bfloat16") else Int32(0x3C00)
        diagonal = unit << 16 * (group % 2) if group // 2 == quad else Int32(0)
        nothing = byte >> 8, byte >> 9  # 0, as no compiler knows: it would copy what it knows before every product
        a = (diagonal, *nothing, diagonal | nothing[1])
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        if at.begin + at.first + TILE <= at.end:
            for p in cutlass.range_constexpr(spec.passes):
                for half in cutlass.range_constexpr(2):
                    warp_mma(kind, sums, 4 * half, a, raw[2 * half, p], raw[2 * half + 1, p])
        else:
            for p in cutlass.range_constexpr(spec.passes):
                keep = Uint32(0xFFFFFFFF) if at.begin + at.first + at.row0 + p * spec.step < at.end else Uint32(0)
                for half in cutlass.range_constexpr(2):
                    warp_mma(kind, sums, 4 * half, a, raw[2 * half, p] & keep, raw[2 * half + 1, p] & keep)
        for i in cutlass.range_constexpr(8):
            source = 4 * (2 * quad + i % 2) + group // 2
            column = 8 * (source % spec.lanes) + 4 * (i // 4) + 2 * (i // 2 % 2) + group % 2
            part = 32 // spec.lanes * warp + source // spec.lanes
            parts[part * spec.part_floats + self.part_place(spec, column)] = sums[i]

    def part_place(self, spec, column):
        """Where a part has its column: two halves of a row of 128 meet different banks."""
        return column ^ (column // 64 * 2) if spec.products else column

    @cute.jit
    def store_dots(self, spec: cutlass.Constexpr, at, products, dots, factor):
        """Dot products of this thread's rows, added up over the threads of a row: each exchange halves the rows that a thread has, so that
        eight rows take eight shuffles. Rows of no sequence get 0."""
        tid = self.thread()
        lane, count, row = tid % spec.lanes, spec.passes, Int32(0)
        for bit in cutlass.range_constexpr(int(math.log2(spec.lanes))):
            upper = (lane >> bit) & 1
            if const_expr(count > 1):
                count //= 2
                for i in cutlass.range_constexpr(count):
                    low, high = products[i], products[count + i]
                    keep, send = (high, low) if upper == 1 else (low, high)
                    products[i] = keep + cute.arch.shuffle_sync_bfly(send, offset=1 << bit)
                row = row + upper * count
            else:
                products[0] = products[0] + cute.arch.shuffle_sync_bfly(products[0], offset=1 << bit)
        token = at.begin + at.first + at.row0 + row * spec.step
        if (lane < spec.passes) & (token < at.limit):
            dots[at.head, token] = products[0] * factor if token < at.end else Float32(0.0)

    @cute.jit
    def share_sums(self, spec: cutlass.Constexpr, at, total, shared):
        """A warp's column sums to shared memory."""
        tid = self.thread()
        warp, lane, parts = tid // 32, tid % 32, shared.parts
        for i in cutlass.range_constexpr(8):
            part = total[i] + cute.arch.shuffle_sync_bfly(total[i], offset=16)
            if const_expr(spec.lanes == 8):
                part = part + cute.arch.shuffle_sync_bfly(part, offset=8)
            if lane < spec.lanes:
                parts[warp * spec.part_floats + at.column + i] = part

    @cute.jit
    def store_scales(self, spec: cutlass.Constexpr, at, bytes_, offsets, batch, scales):
        """One byte for each of the tile's groups that the sequence's region has."""
        tid = self.thread()
        if tid < 4:  # noqa: SIM102 - the others need not look for the region
            if (at.first >> 5) + tid < region_groups(offsets, batch, at.b, Int32(scales.shape[0])):
                group_byte = Int32(0)
                if at.begin + at.first + 32 * tid < at.end:
                    group_byte = bytes_[0]
                    for g in cutlass.range_constexpr(1, spec.blocks):
                        group_byte = bytes_[g] if tid == g else group_byte
                scales[(at.begin >> 5) + at.b + (at.first >> 5) + tid, at.head, 0] = cutlass.Uint8(group_byte)

    @cute.jit
    def store_sums(self, spec: cutlass.Constexpr, at, shared, means, sums, tile_row, byte, inverse):
        """The tile's FP32 column sums: over the parts in order; 0 for a tile without tokens."""
        tid = self.thread()
        parts = shared.parts
        if tid < spec.head_dim:
            at_column = self.part_place(spec, tid)
            total = parts[at_column]
            for part in cutlass.range_constexpr(1, spec.parts):
                total = total + parts[part * spec.part_floats + at_column]
            if const_expr(spec.products):  # so far of the elements, in the units of the product
                unit, back = Float32(1.0), Float32(1.0)
                if const_expr(spec.dtype == "bfloat16"):
                    unit, back = inverse, scale_of_byte(cutlass.min(byte, 254))
                if const_expr(spec.centred):
                    count = Float32(cutlass.min(at.end - at.begin - at.first, TILE))
                    total = fma(-count, means[at.b, at.head, tid] * unit, total)
                total = total * back
            sums[tile_row, at.head, tid] = total if at.begin + at.first < at.end else Float32(0.0)


def wide_again(words, dtype: str, nothing):
    """``wide`` of words that were widened before, by what no compiler can know to be the same. ``nothing``: a 0."""
    if dtype != "bfloat16":
        return wide([word | nothing for word in words], dtype)
    shift, mask = Uint32(0x10000) | nothing, Uint32(0xFFFF0000) | nothing
    return [float_of(Int32(half)) for word in words for half in (word * shift, word & mask)]


def store8(words, address, space):
    """Two words to an address that is a multiple of 8."""
    cute.autovec_copy(words, cute.make_tensor(cute.make_ptr(Uint32, address, space, assumed_align=8), cute.make_layout(2)))


def shared_row(tile, row, column, head_dim: int):
    """Shared address of eight codes of a row."""
    return (tile.iterator + word_index(row, column // 16, head_dim) + column // 8 % 2 * 2).toint()


def row_units(values, inverse):
    """Magnitudes of some values in units (``lp_fa4.mx.quantize.row_units``), added up."""
    total = Int32(0)
    for value in values:
        total = total + Int32(inline_ptx(T.i32(), [absolute(value) * inverse * float(ROW_UNITS)], "cvt.rzi.s32.f32 $0, $1;", "=r,f"))
    return total


@kernel_cache
def _compile_quantize(arch: str, *specs: QuantizeSpec):
    """One launch for operands with these choices; those with the same kind of offsets may share them or not."""
    d = specs[0].head_dim
    operands = []
    for spec in specs:
        tokens, heads, rows, vector_heads, batch = (symbol() for _ in range(5))
        operands.append(
            (
                fake(spec.dtype, (tokens, heads, d)),
                fake_offsets(spec.offsets),
                fake("float32", (batch, heads, d), compact=True) if spec.centred else None,
                fake("uint8", (tokens, heads, d), compact=True),
                fake("uint8", (rows, heads, 1), align=1, compact=True),
                fake("uint8", (heads, d, symbol(32)), compact=True) if spec.order is not None else None,
                fake("float32", (symbol(), heads, d), compact=True) if spec.sums else None,
                fake("float32", (symbol(), vector_heads, d), compact=True) if spec.dots else None,
                fake("float32", (heads, tokens), align=4, compact=True) if spec.dots else None,
            )
        )
    return build(arch, Quantize(specs), tuple(operands), Float32(1.0))


@dataclass
class Work:
    """An operand to quantize: arguments of :func:`quantize`, whose results :meth:`result` gives after the launch."""

    x: Tensor
    offsets: Tensor
    block: int = 128
    order: str | None = None
    means: Tensor | None = None
    sums: bool = False
    vectors: Tensor | None = None
    bounded: bool = False

    def __post_init__(self) -> None:
        x = self.x = aligned_rows(self.x)
        tokens, heads, head_dim = x.shape
        batch = self.offsets.shape[0] - 1
        empty, groups = x.new_empty, group_rows(tokens, batch)
        self.codes = empty((tokens, heads, head_dim), dtype=torch.uint8)
        self.scales = empty((groups, heads, 1), dtype=torch.uint8)
        self.copy = None if self.order is None else empty((heads, head_dim, 32 * groups), dtype=torch.uint8)
        self.parts = empty((group_rows(tokens, batch, TILE), heads, head_dim), dtype=torch.float32) if self.sums else None
        self.dots = None if self.vectors is None else empty((heads, tokens), dtype=torch.float32)

    @property
    def spec(self) -> QuantizeSpec:
        """Its compile key."""
        group = self.x.shape[1] // self.vectors.shape[1] if self.vectors is not None else 1
        kinds = (self.x.shape[2], dtype_name(self.x), dtype_name(self.offsets), self.block, self.order)
        return QuantizeSpec(*kinds, self.means is not None, self.sums, self.vectors is not None, group, self.bounded)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Its share of a launch's arguments."""
        return self.x, self.offsets, self.means, self.codes, self.scales, self.copy, self.parts, self.vectors, self.dots

    @property
    def made(self) -> MXTensor:
        """The quantized operand."""
        made = MXTensor.from_bytes(self.codes, self.scales, (self.block, self.x.shape[2]), self.offsets, 0)
        if self.copy is None:
            return made
        return MXTensorWithCopy(made.payload, made.scale, made.block, made.offsets, made.token_dim, self.copy)


def quantize_all(works: list[Work], factor: float = 1.0) -> None:
    """Quantize operands on one device with one head dimension in one launch."""
    device = works[0].x.device
    compiled = _compile_quantize(arch_of(device), *(w.spec for w in works))
    launch(compiled, device, tuple(w.arguments for w in works), factor)


def quantize(
    x: Tensor,
    offsets: Tensor,
    *,
    block: int = 128,
    order: str | None = None,
    means: Tensor | None = None,
    sums: bool = False,
    vectors: Tensor | None = None,
    bounded: bool = False,
    factor: float = 1.0,
) -> tuple[MXTensor, Tensor | None, Tensor | None]:
    """``x [T, H, D]`` in blocks ``(block, D)``, D 64 or 128, sequences by int ``offsets [B + 1]``, B >= 1, T >= 1.

    Args:
        order: also write the transposed copy (the result is then an ``MXTensorWithCopy``).
        means: fp32 ``[B, H, D]`` subtracted first.
        sums: also return the tiles' column sums of what is quantized, fp32 ``[T // 128 + B, H, D]`` (zeros for a tile
            without tokens).
        bounded: no row's codes sum to more than 146 (not with ``means``).
        vectors: fp32 ``[B, H / group, D]``; also return ``factor * x . vectors`` of every row, fp32 ``[H, T]``.
    """
    work = Work(x, offsets, block, order, means, sums, vectors, bounded)
    quantize_all([work], factor)
    return work.made, work.parts, work.dots
