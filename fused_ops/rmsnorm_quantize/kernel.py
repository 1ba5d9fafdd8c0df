"""RMSNorm + quantize on a GPU, one source for sm_90a and sm_100a: every byte that leaves is the reference's, given ``rstd`` and the mean.

Three kernels:

* :class:`NormQuantize`: one CTA per 128-token tile (tile rule). It reads ``x``, writes codes, scales, ``rstd`` and, where asked, both
  swizzled scale layouts, BF16 of the normed rows and the tile's column sums. Every row, scale and atom is written, pads included.
* ``vectors.SampledMean``: one CTA per sequence, before it: the FP32 mean of at most 64 normed rows.
* ``sum_tiles`` (``lp_fa4.common.sequence_vectors``), after it: a sequence's sum over its tiles, in order.

What the definition leaves open is the order of three FP32 sums, so ``rstd``, mean and total differ from the reference's in their last
bits: of a row's squares (8-column chunks per thread, then a butterfly over the row's threads), of the sampled rows (in order), and of a
sequence's rows (per thread, over the warps, over the tiles). Everything after them is exact: products and differences are rounded one by
one (``mul.rn``, ``sub.rn``: never contracted to a fused multiply-add), so codes and scales are those of the reference for that ``rstd``
and mean.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from torch import Tensor

from fused_ops.rmsnorm_quantize.arithmetic import load8, load8_float, mul, nan_unless_finite, prefetch, row_rstd, store, sub
from fused_ops.rmsnorm_quantize.config import MAX_COPIED, ROWS, NormSpec, unsupported
from fused_ops.rmsnorm_quantize.staged import StagedNorm
from fused_ops.rmsnorm_quantize.vectors import bound_bytes, sampled_mean
from fused_ops.scale_layout.kernel import WORDS, atom_source
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte, magnitude_max
from lp_fa4.common.sequence import find_sequence, region_groups
from lp_fa4.common.sequence_vectors import MAX_SUMMED, sum_tiles
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.mx import GROUP, scale_rows, sf_tiles
from lp_fa4.mx.quantize import static_bytes
from lp_fa4.sm90.tile_transpose import shared_words, store_columns, word_index
from lp_fa4.sm90.transpose import transposed_copy

SHARED_PERCENT = 25
"""Share of a multiprocessor's L1 to set aside as shared memory: 3 CTAs of 16 KiB; the rest caches weights and means."""


class NormQuantize:
    """See the module's docstring; thread layout: ``config.NormSpec``."""

    def __init__(self, spec: NormSpec):
        self.spec, self.threads = spec, spec.tuning.threads
        self.warps = self.threads // 32
        self.row_step = self.threads // spec.lanes
        self.want_atoms = spec.sf_columns or spec.sf_tokens

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        normed: cute.Tensor,
        atoms_columns: cute.Tensor,
        atoms_tokens: cute.Tensor,
        copy: cute.Tensor,
        length: Int32,
        eps: Float32,
        stream,
    ):
        if const_expr(self.spec.dense):
            tiles = Int32(x.shape[0]) // length * cute.ceil_div(length, ROWS)
        else:
            tiles = Int32(x.shape[0]) // ROWS + Int32(offsets.shape[0]) - 1
        self.kernel(
            x, weight, offsets, means, given, codes, scales, rstd, sums, normed, atoms_columns, atoms_tokens, copy, length, eps
        ).launch(
            grid=[tiles, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.spec.tuning.ctas,
            preferred_smem_carveout=100 if self.spec.copy else SHARED_PERCENT,  # left open, the compiler would ask a device for its size
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        normed: cute.Tensor,
        atoms_columns: cute.Tensor,
        atoms_tokens: cute.Tensor,
        copy: cute.Tensor,
        length: Int32,
        eps: Float32,
    ):
        spec = self.spec
        tile, _, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        if const_expr(spec.dense):
            tiles = cute.ceil_div(length, ROWS)
            b, first = tile // tiles, ROWS * (tile % tiles)
            begin = b * length
            end, limit = begin + length, begin + length
            row, region = b * cute.ceil_div(length, GROUP) + first // GROUP, cute.ceil_div(length, GROUP) - first // GROUP
        else:
            batch = Int32(offsets.shape[0]) - 1
            b = find_sequence(offsets, batch, tile, ROWS)
            begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
            first = ROWS * (tile - (begin // ROWS + b))
            limit = end
            if b == batch - 1:
                limit = Int32(x.shape[0])  # slack past the last sequence: written, never read
            row = begin // GROUP + b + first // GROUP
            region = region_groups(offsets, batch, b, Int32(x.shape[0]) // GROUP + batch) - first // GROUP
        # token: the tile's first row in x; end, limit: rows of x with values, to be written; row: the tile's first row of scales,
        # region: how many of them to write (up to 4).
        at = Bundle(tile=tile, sequence=b, token=begin + first, end=end, limit=limit, row=row, region=region)
        tid, _, _ = cute.arch.thread_idx()
        if const_expr(spec.tuning.prefetch):
            for i in cutlass.range(tid, ROWS, self.threads, unroll=1):
                if at.token + i < at.end:
                    prefetch(x, at.token + i, spec.columns)
        turned = None
        if const_expr(spec.copy):
            heads = spec.columns // spec.copy
            turned = smem.allocate_tensor(Uint32, cute.make_layout((shared_words(spec.copy), heads)), byte_alignment=16)
        io = Bundle(
            x=x, weight=weight, means=means, given=given, codes=codes, scales=scales, rstd=rstd, sums=sums, normed=normed, turned=turned
        )
        found = smem.allocate_tensor(Uint8, cute.make_layout((4, spec.blocks)), byte_alignment=16) if const_expr(self.want_atoms) else None
        if const_expr(spec.tuning.resident):
            self.resident(smem, at, io, found, eps)
        else:
            self.rereading(smem, at, io, found, eps)
        if const_expr(self.want_atoms):
            cute.arch.sync_threads()
            if const_expr(spec.sf_columns):
                self.write_atoms(1, at, found, atoms_columns)
            if const_expr(spec.sf_tokens):
                self.write_atoms(0, at, found, atoms_tokens)
        if const_expr(spec.copy):
            cute.arch.sync_threads()
            position = GROUP * at.row if const_expr(not spec.dense) else at.token
            for head in cutlass.range_constexpr(spec.columns // spec.copy):
                store_columns(turned[None, head], copy, Int32(head), position, GROUP * at.region, spec.copy, "accumulator")

    # -- parts of a row ---------------------------------------------------------------------------------------------
    @cute.jit
    def normalise(self, raw, factor: Float32, gain: cute.Tensor, mean: cute.Tensor, out: cute.Tensor):
        """``x * rstd * weight - mean`` of a chunk, each step rounded as the definition has it."""
        for i in cutlass.range_constexpr(8):
            value = mul(mul(raw[i].to(Float32), factor), gain[i])
            out[i] = sub(value, mean[i]) if const_expr(self.spec.centred) else value

    @cute.jit
    def chunk_vectors(self, at, io, column: Int32, gain: cute.Tensor, mean: cute.Tensor):
        """Weight and mean of a chunk."""
        load8_float(io.weight, 0, column, gain)
        if const_expr(self.spec.centred):
            load8_float(io.means, at.sequence, column, mean)

    @cute.jit
    def contribute(self, top: Int32, maxima: cute.Tensor, index, chunk: Int32):
        """A thread's largest magnitude bits over its rows of a chunk into the block's. 4 lanes hold a run of 32 columns, which no block
        divides; lanes ``spec.lanes`` apart hold other rows of it."""
        spec = self.spec
        offset = 1
        for i in cutlass.range_constexpr(5):
            offset = 1 << i
            if const_expr(offset < 4 or offset >= spec.lanes):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
        lane = cute.arch.lane_idx()
        if (lane < spec.lanes) & (lane % 4 == 0) & (chunk < spec.chunks):
            cute.arch.atomic_max(maxima.iterator + cute.crd2idx((index, chunk * 8 // spec.width), maxima.layout), top)

    @cute.jit
    def emit(self, at, io, values: cute.Tensor, byte: Int32, row, column: Int32):
        """Quantize a chunk of the tile's row ``row`` and store it if the row is to be written; ``values`` are 0 in rows past the end."""
        inverse = inverse_of_byte(byte)
        words = cute.make_rmem_tensor(2, Uint32)
        for w in cutlass.range_constexpr(2):
            scaled = [mul(values[4 * w + i], inverse) for i in range(4)]
            if const_expr(self.spec.static):
                words[w] = Uint32(e4m3x4(*[nan_unless_finite(s) for s in scaled]))
            else:
                words[w] = Uint32(e4m3x4(*scaled) if byte != 255 else Int32(0))
        if at.token + row < at.limit:
            store(words, io.codes, at.token + row, column, 8)
            if const_expr(self.spec.keep):
                rounded = cute.make_rmem_tensor(8, BFloat16)
                for i in cutlass.range_constexpr(8):
                    rounded[i] = values[i].to(BFloat16)
                store(rounded, io.normed, at.token + row, column, 16)
        if const_expr(self.spec.copy):
            dim = self.spec.copy
            within = column % dim
            turned = io.turned
            cell = word_index(Int32(row), within // 16, dim) + within // 8 % 2 * 2
            for w in cutlass.range_constexpr(2):
                turned[cell + w, column // dim] = words[w]

    @cute.jit
    def write_scales(self, at, io, found, maxima, index, group: Int32, count: cutlass.Constexpr):
        """Scale bytes of ``count`` groups from ``group`` on: to the compact grid and, for atoms, to shared memory. A static block's are
        given, and belong to groups that hold tokens."""
        spec, scales = self.spec, io.scales
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tid, count * spec.blocks, self.threads):
            g, block = group + i // spec.blocks, i % spec.blocks
            byte = Int32(0)
            if at.token + GROUP * g < at.end:
                if const_expr(spec.static):
                    byte = Int32(io.given[0, block])
                else:
                    byte = byte_of_amax_bits(maxima[index if const_expr(spec.block_tokens == GROUP) else 0, block])
            if const_expr(self.want_atoms):
                found[g, block] = Uint8(byte)
            if const_expr(not spec.static):  # noqa: SIM102 - one is decided at compile time
                if g < at.region:
                    scales[Int64(at.row + g), block] = Uint8(byte)

    @cute.jit
    def write_atoms(self, axis: cutlass.Constexpr, at, found: cute.Tensor, atoms: cute.Tensor):
        """The tile's atoms from its bytes in shared memory."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tid, -(-spec.columns // ROWS) * WORDS, self.threads):
            k_tile, word = i // WORDS, i % WORDS
            made = Int32(0)
            for byte in cutlass.range_constexpr(4):
                group, column = atom_source(axis, k_tile, word, byte)
                if column < spec.columns:
                    made = made | (Int32(found[group, column // spec.width]) << (8 * byte))
            if const_expr(axis == 1):
                atoms[Int64(at.tile), k_tile, word] = made
            else:
                atoms[Int64(k_tile), at.tile, word] = made

    # -- a group at a time, held in registers -----------------------------------------------------------------------
    @cute.jit
    def resident(self, smem, at, io, found, eps: Float32):
        """Load a group, reduce its rows, reduce its blocks (one barrier), store it."""
        spec, rstd = self.spec, io.rstd
        slabs, passes = spec.slabs, spec.passes
        tid, _, _ = cute.arch.thread_idx()
        lane, row0 = tid % spec.lanes, tid // spec.lanes
        # Three sets of maxima: one is read, the next may already be written, the one after is cleared; so one barrier a group is enough.
        maxima = None
        if const_expr(not spec.static):
            maxima = smem.allocate_tensor(Int32, cute.make_layout((3, spec.blocks)), byte_alignment=16)
            for i in cutlass.range(tid, 3 * spec.blocks, self.threads):
                maxima[i // spec.blocks, i % spec.blocks] = 0
            cute.arch.sync_threads()
        gain, mean = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float32)
        totals = cute.make_rmem_tensor((8, slabs), Float32)
        totals.fill(0.0)
        # Groups past the sequence's end have nothing but pads: of the last tile, and of a tile of slack.
        count = cutlass.max(cute.ceil_div(at.limit - at.token, GROUP), at.region)
        if const_expr(self.want_atoms):
            count = Int32(4)
        for group in cutlass.range(cutlass.min(count, 4), unroll=1):
            raw = cute.make_rmem_tensor((8, slabs, passes), io.x.element_type)
            raw.fill(0)
            factor = cute.make_rmem_tensor(passes, Float32)
            token0 = at.token + GROUP * group + row0
            for p in cutlass.range_constexpr(passes):
                if token0 + p * self.row_step < at.end:
                    for k in cutlass.range_constexpr(slabs):
                        if lane + k * spec.lanes < spec.chunks:
                            load8(io.x, token0 + p * self.row_step, 8 * (lane + k * spec.lanes), raw[None, k, p])
            for p in cutlass.range_constexpr(passes):
                total = Float32(0.0)
                for k in cutlass.range_constexpr(slabs):
                    for i in cutlass.range_constexpr(8):
                        value = raw[i, k, p].to(Float32)
                        total = total + value * value
                factor[p] = row_rstd(total, self.spec.lanes, self.spec.columns, eps)
                token = token0 + p * self.row_step
                if (lane == 0) & (token < at.limit):
                    rstd[Int64(token)] = factor[p] if token < at.end else Float32(0.0)
            values = cute.make_rmem_tensor((8, passes, slabs), Float32)
            for k in cutlass.range_constexpr(slabs):
                chunk = lane + k * spec.lanes
                top = Int32(0)
                if chunk < spec.chunks:
                    self.chunk_vectors(at, io, 8 * chunk, gain, mean)
                for p in cutlass.range_constexpr(passes):
                    token = token0 + p * self.row_step
                    self.normalise(raw[None, k, p], factor[p], gain, mean, values[None, p, k])
                    for i in cutlass.range_constexpr(8):
                        values[i, p, k] = values[i, p, k] if (token < at.end) & (chunk < spec.chunks) else Float32(0.0)
                        if const_expr(not spec.static):
                            top = magnitude_max(top, values[i, p, k])
                        if const_expr(spec.centred):
                            totals[i, k] = totals[i, k] + values[i, p, k]
                    if const_expr(spec.static):  # noqa: SIM102
                        if chunk < spec.chunks:
                            byte = Int32(io.given[0, 8 * chunk // spec.width])
                            self.emit(at, io, values[None, p, k], byte, GROUP * group + row0 + p * self.row_step, 8 * chunk)
                if const_expr(not spec.static):
                    self.contribute(top, maxima, group % 3, chunk)
            if const_expr(not spec.static):
                cute.arch.sync_threads()
                for i in cutlass.range(tid, spec.blocks, self.threads):
                    maxima[(group + 2) % 3, i] = 0
                for k in cutlass.range_constexpr(slabs):
                    chunk = lane + k * spec.lanes
                    if chunk < spec.chunks:
                        byte = byte_of_amax_bits(maxima[group % 3, 8 * chunk // spec.width])
                        for p in cutlass.range_constexpr(passes):
                            self.emit(at, io, values[None, p, k], byte, GROUP * group + row0 + p * self.row_step, 8 * chunk)
            if const_expr(not spec.static or self.want_atoms):
                self.write_scales(at, io, found, maxima, group % 3, group, 1)
        if const_expr(spec.centred):
            parts = smem.allocate_tensor(Float32, cute.make_layout((self.warps, spec.columns), stride=(spec.columns, 1)), byte_alignment=16)
            for k in cutlass.range_constexpr(slabs):
                self.warp_sums(totals[None, k], parts, 8 * (lane + k * spec.lanes), spec.columns)
            cute.arch.sync_threads()
            for column in cutlass.range(tid, spec.columns, self.threads):
                self.sum_warps(at, io, parts, column, column)

    @cute.jit
    def warp_sums(self, totals: cute.Tensor, parts: cute.Tensor, column: Int32, columns: cutlass.Constexpr):
        """Eight column sums over the warp's rows, to ``parts[warp, column:]``."""
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(8):
            total = totals[i]
            for j in cutlass.range_constexpr(5):
                if const_expr(1 << j >= self.spec.lanes):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << j)
            if (tid % 32 < self.spec.lanes) & (column < columns):
                parts[tid // 32, column + i] = total

    @cute.jit
    def sum_warps(self, at, io, parts: cute.Tensor, index: Int32, column: Int32):
        """One column's sum over the warps, in order, to global memory."""
        total = parts[0, index]
        for w in cutlass.range_constexpr(1, self.warps):
            total = total + parts[w, index]
        io.sums[Int64(at.tile), column] = total

    # -- a tile at a time, read again by each pass ------------------------------------------------------------------
    @cute.jit
    def rereading(self, smem, at, io, found, eps: Float32):
        """Three passes over the tile: row sums, block maxima, codes. Shared memory holds 128 factors and the blocks' maxima."""
        spec, rstd = self.spec, io.rstd
        groups = 4 if const_expr(spec.block_tokens == GROUP) else 1
        tid, _, _ = cute.arch.thread_idx()
        lane, row0 = tid % spec.lanes, tid // spec.lanes
        factors = smem.allocate_tensor(Float32, cute.make_layout(ROWS), byte_alignment=16)
        maxima = None
        if const_expr(not spec.static):
            maxima = smem.allocate_tensor(Int32, cute.make_layout((groups, spec.blocks)), byte_alignment=16)
            for i in cutlass.range(tid, groups * spec.blocks, self.threads):
                maxima[i // spec.blocks, i % spec.blocks] = 0
        raw = cute.make_rmem_tensor(8, io.x.element_type)
        for step in cutlass.range(ROWS // self.row_step, unroll=1):
            row = row0 + step * self.row_step
            token = at.token + row
            total = Float32(0.0)
            for k in cutlass.range(spec.slabs, unroll=4):
                chunk = lane + k * spec.lanes
                raw.fill(0)
                if (token < at.end) & (chunk < spec.chunks):
                    load8(io.x, token, 8 * chunk, raw)
                for i in cutlass.range_constexpr(8):
                    value = raw[i].to(Float32)
                    total = total + value * value
            factor = row_rstd(total, self.spec.lanes, self.spec.columns, eps)
            if lane == 0:
                factors[row] = factor
                if token < at.limit:
                    rstd[Int64(token)] = factor if token < at.end else Float32(0.0)
        cute.arch.sync_threads()
        gain, mean = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, Float32)
        values = cute.make_rmem_tensor(8, Float32)
        if const_expr(not spec.static):
            for k in cutlass.range(spec.slabs, unroll=1):
                chunk = lane + k * spec.lanes
                if chunk < spec.chunks:
                    self.chunk_vectors(at, io, 8 * chunk, gain, mean)
                for group in cutlass.range_constexpr(4):
                    top = Int32(0)
                    for p in cutlass.range_constexpr(spec.passes):
                        self.read_values(at, io, factors, GROUP * group + row0 + p * self.row_step, chunk, gain, mean, values)
                        for i in cutlass.range_constexpr(8):
                            top = magnitude_max(top, values[i])
                    self.contribute(top, maxima, group if const_expr(groups == 4) else 0, chunk)
            cute.arch.sync_threads()
        parts = None
        if const_expr(spec.centred):
            layout = cute.make_layout((2 * self.warps, 8 * spec.lanes), stride=(8 * spec.lanes, 1))
            parts = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        totals = cute.make_rmem_tensor(8, Float32)
        for k in cutlass.range(spec.slabs, unroll=1):
            chunk = lane + k * spec.lanes
            totals.fill(0.0)
            if chunk < spec.chunks:
                self.chunk_vectors(at, io, 8 * chunk, gain, mean)
            for group in cutlass.range(4, unroll=1):
                byte = Int32(0)
                if chunk < spec.chunks:
                    if const_expr(spec.static):
                        byte = Int32(io.given[0, 8 * chunk // spec.width])
                    else:
                        byte = byte_of_amax_bits(maxima[group if const_expr(groups == 4) else 0, 8 * chunk // spec.width])
                for p in cutlass.range_constexpr(spec.passes):
                    row = GROUP * group + row0 + p * self.row_step
                    self.read_values(at, io, factors, row, chunk, gain, mean, values)
                    for i in cutlass.range_constexpr(8):
                        totals[i] = totals[i] + values[i]
                    if chunk < spec.chunks:
                        self.emit(at, io, values, byte, row, 8 * chunk)
            if const_expr(spec.centred):
                # Two sets: one is summed while the next slab's is written; a barrier a slab is enough.
                half = cute.domain_offset(((k % 2) * self.warps, 0), parts)
                self.warp_sums(totals, half, 8 * lane, 8 * spec.lanes)
                cute.arch.sync_threads()
                if (tid < 8 * spec.lanes) & (8 * spec.lanes * k + tid < spec.columns):
                    self.sum_warps(at, io, half, tid, 8 * spec.lanes * k + tid)
        if const_expr(not spec.static or self.want_atoms):
            for group in cutlass.range_constexpr(4):
                self.write_scales(at, io, found, maxima, group, Int32(group), 1)

    @cute.jit
    def read_values(self, at, io, factors: cute.Tensor, row, chunk: Int32, gain: cute.Tensor, mean: cute.Tensor, values: cute.Tensor):
        """The normed chunk of a row of the tile; 0 where there is none."""
        values.fill(0.0)
        if (at.token + row < at.end) & (chunk < self.spec.chunks):
            raw = cute.make_rmem_tensor(8, io.x.element_type)
            load8(io.x, at.token + row, 8 * chunk, raw)
            self.normalise(raw, factors[row], gain, mean, values)


@kernel_cache
def _compile_norm_quantize(arch: str, offsets_dtype: str | None, spec: NormSpec):
    columns, tokens = spec.columns, symbol()
    tiles = (symbol(), symbol(), WORDS)
    return build(
        arch,
        NormQuantize(spec),
        fake(spec.dtype, (tokens, columns)),
        fake(spec.weight_dtype, (1, columns)),
        fake_offsets(offsets_dtype),
        fake("float32", (symbol(), columns), compact=True) if spec.centred else None,
        fake("uint8", (1, spec.blocks), align=1, compact=True) if spec.static else None,
        fake("uint8", (tokens, columns), compact=True),
        None if spec.static else fake("uint8", (symbol(), spec.blocks), align=1, compact=True),
        fake("float32", (tokens,), align=4),
        fake("float32", (symbol(), columns), compact=True) if spec.centred else None,
        fake("bfloat16", (tokens, columns), compact=True) if spec.keep else None,
        fake("int32", tiles, compact=True) if spec.sf_columns else None,
        fake("int32", (symbol(), symbol(), WORDS), compact=True) if spec.sf_tokens else None,
        fake("uint8", (columns // spec.copy, spec.copy, symbol(32)), compact=True) if spec.copy else None,
        Int32(1),
        Float32(0.0),
    )


@kernel_cache
def _compile_staged_norm(arch: str, offsets_dtype: str | None, spec: NormSpec):
    columns, tokens = spec.columns, symbol()
    return build(
        arch,
        StagedNorm(spec),
        fake(spec.dtype, (tokens, columns)),
        fake(spec.weight_dtype, (1, columns)),
        fake_offsets(offsets_dtype),
        fake("float32", (symbol(), columns), compact=True) if spec.centred else None,
        fake("uint8", (1, spec.blocks), align=1, compact=True) if spec.static else None,
        fake("uint8", (tokens, columns), compact=True),
        None if spec.static else fake("uint8", (symbol(), spec.blocks), align=1, compact=True),
        fake("float32", (tokens,), align=4),
        fake("float32", (symbol(), columns), compact=True) if spec.centred else None,
        fake("bfloat16", (tokens, columns), compact=True) if spec.keep else None,
        fake("uint8", (columns // spec.copy, spec.copy, symbol(32)), compact=True) if spec.copy else None,
        fake("int32", (1,), align=4),
        Float32(0.0),
        Int32(1),
    )


class KernelOutput(NamedTuple):
    """Plain tensors, bytes for FP8; what was not asked for is None. ``atoms``: the swizzled scales of axis 0 and of axis 1, uint8;
    ``copy``: uint8 ``[H, D, 32 * rows]``, see ``reference.transposed``."""

    codes: Tensor
    scales: Tensor
    rstd: Tensor
    mean: Tensor | None
    total: Tensor | None
    normed: Tensor | None
    atoms: tuple[Tensor | None, Tensor | None]
    copy: Tensor | None


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offsets: Tensor | None,
    block: tuple[int, int],
    exponent: Tensor | None,
    center: bool,
    keep: bool,
    scale_axes: tuple[int, ...] = (),
    copy_heads: int = 0,
) -> KernelOutput:
    """The reference's operation on a GPU. ``scale_axes`` (0, 1 or both, 2-D ``x``): also the swizzled scales for these axes.
    ``copy_heads`` (2-D ``x``): also the copy with tokens innermost.

    Raises: ``ValueError`` for what :func:`unsupported` names.
    """
    *lead, tokens, columns = x.shape
    head_dim = columns // copy_heads if copy_heads else 0
    reason = unsupported(columns, x.numel() // columns if columns else 0, dtype_name(x), block[1], head_dim)
    if reason:
        raise ValueError(reason)
    copied = copy_heads > 0 and columns <= MAX_COPIED
    empty = x.new_empty
    blocks, dense = columns // block[1], offsets is None
    sequences = 1 if offsets is None else offsets.shape[0] - 1
    rows = scale_rows(tokens, offsets)
    spec = NormSpec(
        columns, dtype_name(x), dtype_name(weight), *block, dense=dense, centred=center, keep=keep,
        sf_columns=1 in scale_axes, sf_tokens=0 in scale_axes, copy=head_dim if copied else 0,
    )  # fmt: skip
    staged = spec.stages > 0 and (not dense or x.numel() == tokens * columns)
    given, bound = None, False
    if block[0] == 0 and exponent is None and center and staged and sequences and tokens:  # the mean's kernel makes them
        given, bound = empty((1, blocks), dtype=torch.uint8), True
    elif block[0] == 0:
        given = bound_bytes(weight, block[1], center) if exponent is None else static_bytes(exponent, blocks, x.device)[None]
    token_tiles, column_tiles = sf_tiles(tokens, offsets), -(-columns // ROWS)
    atoms = (
        empty((column_tiles, token_tiles, 32, 4, 4), dtype=torch.uint8) if 0 in scale_axes else None,
        empty((token_tiles, column_tiles, 32, 4, 4), dtype=torch.uint8) if 1 in scale_axes else None,
    )
    made = KernelOutput(
        empty(x.shape, dtype=torch.uint8),
        empty((*lead, rows, blocks), dtype=torch.uint8) if given is None else given.expand(*lead, 1, blocks).contiguous(),
        empty((*lead, tokens), dtype=torch.float32),
        empty((sequences, columns), dtype=torch.float32) if center else None,
        empty((sequences, columns), dtype=torch.float32) if center else None,
        empty(x.shape, dtype=torch.bfloat16) if keep else None,
        atoms,
        empty((copy_heads, head_dim, 32 * rows), dtype=torch.uint8) if copied else None,
    )
    if copy_heads and not copied and (sequences == 0 or x.numel() == 0):
        made = made._replace(copy=empty((copy_heads, head_dim, 32 * rows), dtype=torch.uint8))
    if sequences == 0 or x.numel() == 0:  # no token belongs to a sequence: everything but given scales is 0
        for tensor in (
            made.codes,
            made.rstd,
            made.mean,
            made.total,
            made.normed,
            made.copy,
            *atoms,
            *((made.scales,) if given is None else ()),
        ):
            if tensor is not None:
                tensor.zero_()
        return made
    flat, gain = aligned_rows(x.reshape(-1, columns)), aligned_rows(weight.reshape(1, columns))
    mean, ordered, parts, bounds = None, None, None, offsets
    ticket = None
    if staged:  # of the tiles that are drawn; the mean's kernel makes it 0
        ticket = empty(1, dtype=torch.int32) if center else x.new_zeros(1, dtype=torch.int32)
    if center:
        bounds = torch.arange(0, 2 * tokens, tokens, device=x.device) if offsets is None else offsets
        mean, ordered = sampled_mean(flat, gain, eps, bounds, given if staged else None, bound=bound, ticket=ticket)
        parts = empty((token_tiles, columns), dtype=torch.float32)
        made = made._replace(mean=mean)
    arch, kind = arch_of(x.device), None if offsets is None else dtype_name(offsets)
    outputs = (
        made.codes.view(-1, columns),
        made.scales.view(-1, blocks) if given is None else None,
        made.rstd.view(-1),
        parts,
        made.normed.view(-1, columns) if made.normed is not None else None,
    )
    if staged:
        ctas = min(spec.staged.ctas * multiprocessors(x.device), token_tiles)
        compiled = _compile_staged_norm(arch, kind, spec)
        launch(compiled, x.device, flat, gain, offsets, ordered, given, *outputs, made.copy, ticket, eps, ctas)
    else:
        words = [None if a is None else a.view(torch.int32).reshape(a.shape[0], a.shape[1], WORDS) for a in atoms]
        compiled = _compile_norm_quantize(arch, kind, spec)
        launch(compiled, x.device, flat, gain, offsets, mean, given, *outputs, words[1], words[0], made.copy, tokens, eps)
    if copy_heads and not copied:
        starts = torch.arange(0, 2 * tokens, tokens, device=x.device) if offsets is None else offsets
        made = made._replace(copy=transposed_copy(made.codes.unflatten(1, (copy_heads, head_dim)), starts, "accumulator"))
    if parts is None:
        return made
    # A CTA sums so many columns of a sequence.
    width = columns if columns <= MAX_SUMMED else next(n for n in (MAX_SUMMED, 128, 64, 32) if columns % n == 0)
    total = sum_tiles(parts.unflatten(1, (columns // width, width)), bounds)
    return made._replace(total=total.flatten(1))
