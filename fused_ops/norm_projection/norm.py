"""The warps that normalize."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from fused_ops.norm_projection.config import HALF, ITEMS, NORM_WARPS, ProjectionSpec
from fused_ops.norm_projection.tiles import OVER
from fused_ops.rings import release, turn
from fused_ops.rmsnorm_quantize.arithmetic import bf16x2_mul, load8_float, mul, rsqrt, sub
from fused_ops.rmsnorm_quantize.staged import StagedNorm
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import bf16x2, bits_of, e4m3x4, f16x2, float_of, prmt

GROUP = 4
"""Rows that a lane loads together, before it needs them."""
DIRECT_ROWS = 2
"""Rows of a lane that are asked for together for their sums of squares, where they come from L2."""
PIECE = HALF * 128
"""Bytes of 64 rows under one swizzle."""


class NormRole(StagedNorm):
    """Warps that turn halves of x into codes, in memory, and into 16-bit rows, in place, in the order of wgmma's operand. Rows that are
    not BF16 are not brought to that place; a thread leaves them there itself, as FP32 in halves (``ProjectionSpec.direct``).

    A half is read twice. First for its rows' factors, by the warpgroup that will multiply it, between two products of the half before
    (where rows are not BF16, by these warps): sums of squares of a warp's 16 rows are added up together, and their factors come from one
    evaluation, a row a lane (half as many as lanes share a row). Then slab by slab: a lane keeps weight and mean of its eight columns for
    all rows. Rows outside their sequence are noise to the product, whose rows are as much outside;
    sums and codes leave them out.
    """

    def __init__(self, spec: ProjectionSpec):
        self.spec, self.steps, self.direct, self.ring, self.halves = spec.norm, spec.steps, spec.direct, spec.stages, spec.halves
        self.compute_threads, self.warps = 32 * NORM_WARPS, NORM_WARPS
        self.row_step = self.compute_threads // self.spec.lanes
        self.passes = HALF // self.row_step
        self.group = 1 if spec.direct else GROUP
        self.element, self.row_bytes = 2, 2 * spec.contracted

    @cute.jit
    def run(self, io, s, bars):
        """Both halves of every tile."""
        spec, item = self.spec, s.item
        tid, _, _ = cute.arch.thread_idx()
        lane, row0 = tid % spec.lanes, tid // spec.lanes
        stage, phase, slot, slot_phase = (Int32(0) for _ in range(4))
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        tile = item[5, slot]
        while tile != OVER:
            token, end, limit = item[0, slot], item[1, slot], item[2, slot]
            totals = cute.make_rmem_tensor((8, spec.slabs), Float32)
            totals.fill(0.0)
            for half in cutlass.range(2, unroll=1):
                cute.arch.mbarrier_wait(bars.full + stage, phase)
                at = Bundle(token=token + HALF * half, end=end, limit=limit, slot=slot, stage=stage)
                if const_expr(self.direct):
                    self.factors_of_half(io, s, at, lane, row0)
                else:
                    cute.arch.mbarrier_wait(bars.factored + stage, phase)
                if at.token + HALF <= end:
                    self.normalise_half(io, s, at, lane, row0, totals, True)
                else:
                    self.normalise_half(io, s, at, lane, row0, totals, False)
                release(bars.normed + stage)
                stage, phase = turn(stage, phase, self.ring)
            if const_expr(spec.centred):  # noqa: SIM102 - one is decided at compile time
                if tile >= 0:
                    self.column_sums(io, s, slot, lane, totals)
            release(bars.item_empty + slot)
            slot, slot_phase = turn(slot, slot_phase, ITEMS)
            cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
            tile = item[5, slot]

    def cell(self, s, stage, row, chunk):
        """Shared address of eight columns of a half's row."""
        return s.rows.toint() + stage * (self.steps * PIECE) + self.place(row, chunk)

    def place(self, row, chunk):
        """Where they lie in a half, in bytes."""
        return chunk // 8 * PIECE + row * 128 + ((chunk % 8) ^ (row % 8)) * 16

    def words_at(self, address):
        """Four words of shared memory."""
        return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4))

    @cute.jit
    def raw_chunk(self, s, at, row, chunk):
        """Eight columns of a half's row as they lie: four words, and four of lower halves where rows are not BF16."""
        words = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(self.words_at(self.cell(s, at.stage, row, chunk)), words)
        low = None
        if const_expr(self.direct):
            low = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(self.words_at(s.low.toint() + self.place(row, chunk)), low)
        return words, low

    @cute.jit
    def floats_of(self, raw, out: cute.Tensor):
        """They as FP32."""
        words, low = raw
        for i in cutlass.range_constexpr(4):
            if const_expr(self.direct):
                out[2 * i], out[2 * i + 1] = (float_of(prmt(low[i], words[i], selector)) for selector in (0x5410, 0x7632))
            else:
                out[2 * i], out[2 * i + 1] = float_of(words[i] << 16), float_of(words[i] & Int32(-65536))

    @cute.jit
    def fetch_chunk(self, io, s, at, row, chunk, out: cute.Tensor):
        """The same of rows that are not BF16, from global memory, 0 outside the sequence; left where :meth:`raw_chunk` finds them."""
        out.fill(0.0)
        if at.token + row < at.end:
            load8_float(io.x[1], at.token + row, 8 * chunk, out)
        bits = [bits_of(out[i]) for i in range(8)]
        for selector, address in ((0x5410, s.low.toint() + self.place(row, chunk)), (0x7632, self.cell(s, at.stage, row, chunk))):
            words = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                words[i] = prmt(bits[2 * i], bits[2 * i + 1], selector)
            cute.autovec_copy(words, self.words_at(address))

    @cute.jit
    def factors_of_half(self, io, s, at, lane, row0):
        """``rstd`` of a half's rows, to memory and to shared memory, by 128 threads; a thread's rows lie one after the other there."""
        spec, factors, rstd = self.spec, s.factors, io.rstd
        mine = Float32(0.0)
        if const_expr(self.direct):  # a few rows at a time: what is on its way from L2 is in registers
            for p in cutlass.range(self.passes, unroll=DIRECT_ROWS):
                total = self.squares(io, s, at, lane, row0 + p * self.row_step)
                for j in cutlass.range_constexpr(spec.lanes.bit_length() - 1):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << j)
                mine = total if lane == p else mine
        else:
            totals = cute.make_rmem_tensor(self.passes, Float32)
            for p in cutlass.range_constexpr(self.passes):
                totals[p] = self.squares(io, s, at, lane, row0 + p * self.row_step)
            mine = self.of_rows(totals, lane)
        row = row0 + lane * self.row_step
        if lane < self.passes:
            factor = rsqrt(mine / Float32(spec.columns) + io.eps)
            factors[at.stage * HALF + row0 * self.passes + lane] = factor
            if at.token + row < at.limit:
                rstd[Int64(at.token + row)] = factor if at.token + row < at.end else Float32(0.0)
        cute.arch.sync_warp()

    @cute.jit
    def first_look(self, io, s, at, row, chunk, out: cute.Tensor):
        """Eight columns of a half's row, which nobody has read yet."""
        if const_expr(self.direct):
            self.fetch_chunk(io, s, at, row, chunk, out)
        else:
            self.floats_of(self.raw_chunk(s, at, row, chunk), out)

    @cute.jit
    def squares(self, io, s, at, lane, row):
        """A lane's part of the sum of a row's squares."""
        spec, total = self.spec, Float32(0.0)
        for k in cutlass.range_constexpr(spec.slabs):
            chunk = lane + k * spec.lanes
            values = cute.make_rmem_tensor(8, Float32)
            if const_expr(spec.chunks % spec.lanes == 0):
                self.first_look(io, s, at, row, chunk, values)
            else:
                values.fill(0.0)
                if chunk < spec.chunks:
                    self.first_look(io, s, at, row, chunk, values)
            for i in cutlass.range_constexpr(8):
                total = total + values[i] * values[i]
        return total

    @cute.jit
    def of_rows(self, totals: cute.Tensor, lane) -> Float32:
        """From a lane's parts of the sums of ``passes`` rows: in lane ``p`` (of the first, and again in those behind) the sum of row ``p``.
        As many additions as lanes have a step, each time half as many rows; in the order in which each alone would be added up."""
        count = self.passes
        for j in cutlass.range_constexpr(self.spec.lanes.bit_length() - 1):
            if const_expr(count > 1):
                count //= 2
                odd = (lane >> j) % 2 == 1
                for i in cutlass.range_constexpr(count):
                    one, other = totals[2 * i], totals[2 * i + 1]
                    kept = other if odd else one
                    sent = one if odd else other
                    totals[i] = kept + cute.arch.shuffle_sync_bfly(sent, offset=1 << j)
            else:
                totals[0] = totals[0] + cute.arch.shuffle_sync_bfly(totals[0], offset=1 << j)
        return totals[0]

    @cute.jit
    def normalise_half(self, io, s, at, lane, row0, totals: cute.Tensor, whole: cutlass.Constexpr):
        """Codes, 16-bit rows and column sums of a half. ``whole``: all of its rows are inside."""
        spec, ahead = self.spec, whole and self.halves  # beside sums in FP32 there are no registers for it
        even = spec.chunks % spec.lanes == 0
        if const_expr(even and ahead):
            self.slabs_ahead(io, s, at, lane, row0, totals, 0, spec.slabs)
        else:
            for k in cutlass.range_constexpr(spec.slabs):
                if const_expr(even):
                    self.slab(io, s, at, k, lane + k * spec.lanes, row0, totals, whole)
                else:
                    if lane + k * spec.lanes < spec.chunks:
                        if const_expr(ahead):
                            self.slabs_ahead(io, s, at, lane, row0, totals, k, k + 1)
                        else:
                            self.slab(io, s, at, k, lane + k * spec.lanes, row0, totals, whole)

    @cute.jit
    def slabs_ahead(self, io, s, at, lane, row0, totals: cute.Tensor, first: cutlass.Constexpr, end: cutlass.Constexpr):
        """Eight columns of a lane's rows, of some slabs; all rows are inside. A group of rows is loaded before the one in front of it is
        computed. The barrier keeps the assembler from loading it later, as late as shared memory that nobody else reads would allow."""
        spec, passes, group = self.spec, self.passes, self.group
        units = [(k, p) for k in range(first, end) for p in range(0, passes, group)]
        gain, mean, scale = self.vectors_of_slab(s, at, lane + first * spec.lanes)
        codes = self.code_of(io, at, row0, lane + first * spec.lanes)
        following = self.raw_group(s, at, row0, lane, first, 0)
        for unit in cutlass.range_constexpr(len(units)):
            k, start = units[unit]
            chunk = lane + k * spec.lanes
            raws, factors = following
            if const_expr(unit + 1 < len(units)):
                following = self.raw_group(s, at, row0, lane, *units[unit + 1])
                cute.arch.sync_warp()
            for i in cutlass.range_constexpr(group):
                p = start + i
                values = self.normed(raws[i], factors[i], gain, mean)
                of_rows = scale
                if const_expr(p == passes - 1 and k + 1 < end):
                    gain, mean, scale = self.vectors_of_slab(s, at, chunk + spec.lanes)
                place = codes + (8 * spec.lanes * (k - first) + self.row_step * spec.columns * p)
                self.put(s, at, row0 + p * self.row_step, chunk, place, values, of_rows, True)
                if const_expr(spec.centred):
                    for c in cutlass.range_constexpr(8):
                        totals[c, k] = totals[c, k] + values[c]

    @cute.jit
    def raw_group(self, s, at, row0, lane, k: cutlass.Constexpr, p: cutlass.Constexpr):
        """A group of rows as they lie in slab ``k``, and their factors."""
        raws = [self.raw_chunk(s, at, row0 + (p + i) * self.row_step, lane + k * self.spec.lanes) for i in range(self.group)]
        factors = cute.make_rmem_tensor(self.group, Float32)
        address = s.factors.iterator.toint() + 4 * (at.stage * HALF + row0 * self.passes + p)
        source = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4 * self.group)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(self.group)), factors)
        return raws, factors

    @cute.jit
    def slab(self, io, s, at, k: cutlass.Constexpr, chunk, row0, totals: cute.Tensor, whole: cutlass.Constexpr):
        """The same of one slab, row by row, some of them outside unless ``whole``."""
        factors = s.factors
        gain, mean, scale = self.vectors_of_slab(s, at, chunk)
        for p in cutlass.range(self.passes, unroll=2 if whole and not self.direct else 1):
            row = row0 + p * self.row_step
            values = self.normed(self.raw_chunk(s, at, row, chunk), factors[at.stage * HALF + row0 * self.passes + p], gain, mean)
            self.put(s, at, row, chunk, self.code_of(io, at, row, chunk), values, scale, whole)
            if const_expr(self.spec.centred):
                inside = at.token + row < at.end
                for i in cutlass.range_constexpr(8):
                    totals[i, k] = totals[i, k] + (values[i] if const_expr(whole) else (values[i] if inside else Float32(0.0)))

    @cute.jit
    def normed(self, raw, factor: Float32, gain: cute.Tensor, mean):
        """Eight columns of a row as they are to be rounded."""
        values = cute.make_rmem_tensor(8, Float32)
        self.floats_of(raw, values)
        for i in cutlass.range_constexpr(8):
            value = mul(mul(values[i], factor), gain[i])
            values[i] = sub(value, mean[i]) if const_expr(self.spec.centred) else value
        return values

    @cute.jit
    def put(self, s, at, row, chunk, place: Int64, values: cute.Tensor, scale: Int32, whole: cutlass.Constexpr):
        """Codes of eight columns of a row to address ``place``, and the columns as 16-bit numbers to theirs in the half. ``whole``: the row
        is inside."""
        words = cute.make_rmem_tensor(2, Uint32)
        for w in cutlass.range_constexpr(2):
            word = e4m3x4(*[values[4 * w + i] for i in range(4)])
            words[w] = Uint32(word if const_expr(whole) else (word if at.token + row < at.end else Int32(0)))
        target = cute.make_tensor(cute.make_ptr(Uint32, place, cute.AddressSpace.gmem, assumed_align=8), cute.make_layout(2))
        if const_expr(whole):
            cute.autovec_copy(words, target)
        else:
            if at.token + row < at.limit:
                cute.autovec_copy(words, target)
        rounded = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(4):
            # The inverse of the codes' exponent is in the weight and the mean; a power of two, but it is taken out in BF16 exactly.
            if const_expr(self.halves):  # the weight has the exponent
                rounded[i] = f16x2(values[2 * i], values[2 * i + 1])
            else:
                rounded[i] = bf16x2_mul(bf16x2(values[2 * i], values[2 * i + 1]), scale)
        cute.autovec_copy(rounded, self.words_at(self.cell(s, at.stage, row, chunk)))

    def code_of(self, io, at, row, chunk) -> Int64:
        """Address of a row's codes of eight columns."""
        return (io.codes.iterator + cute.crd2idx((Int64(at.token + row), 8 * chunk), io.codes.layout)).toint()

    def vectors_of_slab(self, s, at, chunk):
        """Weight and mean of eight columns (the latter None unless centred), and the scale of their codes, twice in BF16."""
        spec, scales = self.spec, s.pairs
        gain, mean = cute.make_rmem_tensor(8, Float32), None
        self.vector(s.gain.iterator.toint() + 16 * chunk, gain)
        if spec.centred:
            mean = cute.make_rmem_tensor(8, Float32)
            self.vector(s.mean.toint() + 4 * at.slot * spec.columns + 16 * chunk, mean)
        return gain, mean, scales[8 * chunk // spec.width]
