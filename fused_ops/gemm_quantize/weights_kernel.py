"""The kernels of ``weights``: one for the weight, one for the bound, one for bounded rows."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Uint8, Uint32, const_expr
from torch import Tensor

from fused_ops.gemm_quantize.weights import WeightSpec, bound_factor
from fused_ops.operands import PAIR_LIMIT, PAIR_SHIFTS
from fused_ops.rmsnorm_quantize.arithmetic import load, store
from lp_fa4.common.numbers import (
    byte_of_amax_bits,
    e4m3x4,
    e4m3x4_to_float,
    inverse_of_byte,
    magnitude_max,
    warp_max,
)
from lp_fa4.common.sequence import GROUP
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol
from lp_fa4.mx.quantize import ROW_UNITS

COLUMNS = 128
"""Columns of a CTA."""
WARPS = COLUMNS // 32
BOUNDED_WARPS = 8
"""Of a CTA that codes bounded rows."""


class ProjectionWeight:
    """One CTA per head and 128 columns; a thread holds 32 rows of a column. (A thread with all 128 rows of it ran 7,600 instructions, once
    each: 33 us, most of it fetching them.)"""

    def __init__(self, spec: WeightSpec):
        self.spec, self.groups = spec, spec.rows // GROUP

    @cute.jit
    def __call__(
        self,
        w: cute.Tensor,
        gain: cute.Tensor,
        rounded: cute.Tensor,
        first: cute.Tensor,
        second: cute.Tensor,
        scale_bytes: cute.Tensor,
        squares: cute.Tensor,
        heads: Int32,
        stream,
    ):
        self.kernel(w, gain, rounded, first, second, scale_bytes, squares).launch(
            grid=[heads, self.spec.chunks, 1], block=[COLUMNS * self.groups, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        w: cute.Tensor,
        gain: cute.Tensor,
        rounded: cute.Tensor,
        first: cute.Tensor,
        second: cute.Tensor,
        scale_bytes: cute.Tensor,
        squares: cute.Tensor,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        head, chunk, _ = cute.arch.block_idx()
        group, place = tid // COLUMNS, tid % COLUMNS
        row0, column = head * spec.rows + GROUP * group, chunk * COLUMNS + place
        within = column < spec.columns
        smem = cutlass.utils.SmemAllocator()
        maxima = smem.allocate_tensor(Int32, cute.make_layout((WARPS, self.groups)), byte_alignment=16)
        values = cute.make_rmem_tensor(GROUP, Float32)
        values.fill(0.0)
        if within:
            for r in cutlass.range_constexpr(GROUP):
                values[r] = w[row0 + r, column].to(Float32)
        if const_expr(spec.rotate):
            shared = None
            if const_expr(self.groups > 1):
                shared = smem.allocate_tensor(Float32, cute.make_layout((COLUMNS, GROUP, self.groups)), byte_alignment=16)
            self.transform(values, shared, place, group)
        self.add_squares(values, gain, squares, row0, column, within, chunk * WARPS + place // 32)
        if within:
            for r in cutlass.range_constexpr(GROUP):
                rounded[row0 + r, column] = values[r].to(BFloat16)
                if const_expr(spec.bounded):
                    first[row0 + r, column] = values[r]
        if const_expr(spec.form != "bf16" and not spec.bounded):
            self.quantize(values, maxima, group, place, row0, column, within, first, second, scale_bytes)

    @cute.jit
    def transform(self, values: cute.Tensor, shared: cute.Tensor, place, group):
        """Sylvester's matrix over ``sqrt(rows)`` times the column: within a thread's rows, then across its column's threads."""
        groups = self.groups
        for step in cutlass.range_constexpr(GROUP.bit_length() - 1):
            half = 1 << step
            for r in cutlass.range_constexpr(GROUP):
                if const_expr(r & half == 0):
                    a, b = values[r], values[r + half]
                    values[r], values[r + half] = a + b, a - b
        if const_expr(groups > 1):
            for r in cutlass.range_constexpr(GROUP):
                shared[place, r, group] = values[r]
            cute.arch.sync_threads()
            for r in cutlass.range_constexpr(GROUP):
                sums = []
                for g in cutlass.range_constexpr(0, groups, 2):
                    other = shared[place, r, g + 1]
                    sums.append(shared[place, r, g] + (other if group % 2 == 0 else -other))
                if const_expr(groups == 4):
                    sums = [sums[0] + (sums[1] if group < 2 else -sums[1])]
                values[r] = sums[0]
        for r in cutlass.range_constexpr(GROUP):
            values[r] = values[r] * self.spec.rows**-0.5

    @cute.jit
    def add_squares(self, values: cute.Tensor, gain: cute.Tensor, squares: cute.Tensor, row0, column, within, part):
        """``squares[row, part]``: of a row times the gain, over a warp's 32 columns; lane ``r`` ends with row ``r``'s."""
        lane = cute.arch.lane_idx()
        scale = Float32(0.0)
        if within:
            scale = gain[column].to(Float32)
        sums = [values[r] * scale * (values[r] * scale) for r in range(GROUP)]
        for step in cutlass.range_constexpr(GROUP.bit_length() - 1):
            half = GROUP >> (step + 1)
            upper = (lane & half) != 0
            kept = [sums[i + half] if upper else sums[i] for i in range(half)]
            sent = [sums[i] if upper else sums[i + half] for i in range(half)]
            sums = [kept[i] + cute.arch.shuffle_sync_bfly(sent[i], offset=half) for i in range(half)]
        squares[row0 + lane, part] = sums[0]

    @cute.jit
    def quantize(self, values, maxima, group, place, row0, column, within, codes, rest, scales):
        """Codes and scales of 32-row blocks, and codes of what is left under the same scales where ``rest`` is asked for."""
        spec = self.spec
        warp, lane = place // 32, place % 32
        warps = spec.width // 32
        top = Int32(0)
        for r in cutlass.range_constexpr(GROUP):
            top = magnitude_max(top, values[r])
        top = warp_max(top)
        if lane == 0:
            maxima[warp, group] = top
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(warps):
            top = cutlass.max(top, maxima[warp // warps * warps + i, group])
        byte = byte_of_amax_bits(top)
        inverse = inverse_of_byte(byte)
        if within & (place % spec.width == 0):
            scales[row0 // GROUP, column // spec.width] = Uint8(byte)
        for quad in cutlass.range_constexpr(GROUP // 4):
            scaled = [values[4 * quad + i] * inverse for i in range(4)]
            word = e4m3x4(*scaled)
            word = word if byte != 255 else Int32(0)
            left = Int32(0)
            if const_expr(spec.form == "e4m3x2"):
                back = e4m3x4_to_float(word)
                left = e4m3x4(*[scaled[i] - back[i] for i in range(4)])
                left = left if byte != 255 else Int32(0)
            if within:
                for i in cutlass.range_constexpr(4):
                    codes[row0 + 4 * quad + i, column] = Uint8((word >> (8 * i)) & 255)
                    if const_expr(spec.form == "e4m3x2"):
                        rest[row0 + 4 * quad + i, column] = Uint8((left >> (8 * i)) & 255)


class Bound:
    """Scale byte of each head from its rows' squares: one warp a head."""

    def __init__(self, rows: int, parts: int):
        self.rows, self.parts = rows, parts

    @cute.jit
    def __call__(self, squares: cute.Tensor, out: cute.Tensor, factor: Float32, stream):
        self.kernel(squares, out, factor).launch(grid=[Int32(out.shape[0]), 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, squares: cute.Tensor, out: cute.Tensor, factor: Float32):
        head, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        top = Int32(0)
        for i in cutlass.range_constexpr(self.rows // 32):
            total = Float32(0.0)
            for p in cutlass.range(self.parts, unroll=4):
                total = total + squares[head * self.rows + 32 * i + lane, p]
            top = magnitude_max(top, cute.math.sqrt(total) * factor)
        top = warp_max(top)
        if lane == 0:
            out[head] = Uint8(cutlass.min(byte_of_amax_bits(top), 254))


class BoundedRows:
    """Codes and scales of FP32 rows as :func:`fused_ops.operands.split_e4m3` has them in bounded rows: one CTA for 32 of them, a warp for
    four, read three times (from L2): for their largest magnitude, for their sums under its exponent, for their codes."""

    def __init__(self, columns: int, form: str):
        self.columns, self.pair = columns, form == "e4m3x2"

    @cute.jit
    def __call__(self, exact: cute.Tensor, first: cute.Tensor, second: cute.Tensor, scale_bytes: cute.Tensor, stream):
        self.kernel(exact, first, second, scale_bytes).launch(
            grid=[Int32(scale_bytes.shape[0]), 1, 1], block=[32 * BOUNDED_WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, exact: cute.Tensor, first: cute.Tensor, second: cute.Tensor, scale_bytes: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        row0 = GROUP * block + warp
        smem = cutlass.utils.SmemAllocator()
        tops = smem.allocate_tensor(Int32, cute.make_layout((BOUNDED_WARPS, 2)), byte_alignment=16)
        values = cute.make_rmem_tensor(4, Float32)
        top = Int32(0)
        for r in cutlass.range(0, GROUP, BOUNDED_WARPS, unroll=1):
            for chunk in cutlass.range(lane, self.columns // 4, 32, unroll=2):
                load(exact, row0 + r, 4 * chunk, values)
                for i in cutlass.range_constexpr(4):
                    top = magnitude_max(top, values[i])
        byte = byte_of_amax_bits(self.largest(tops, 0, warp, lane, top))
        inverse, most = inverse_of_byte(byte), Int32(0)
        if byte != 255:
            for r in cutlass.range(0, GROUP, BOUNDED_WARPS, unroll=1):
                units = Int32(0)
                for chunk in cutlass.range(lane, self.columns // 4, 32, unroll=2):
                    load(exact, row0 + r, 4 * chunk, values)
                    for i in cutlass.range_constexpr(4):
                        units = units + (cute.math.absf(values[i] * inverse) * Float32(ROW_UNITS)).to(Int32)
                for step in cutlass.range_constexpr(5):
                    units = units + cute.arch.shuffle_sync_bfly(units, offset=1 << step)
                most = cutlass.max(most, units)
        most = self.largest(tops, 1, warp, lane, most)
        raised = byte
        for i in cutlass.range_constexpr(PAIR_SHIFTS):
            raised = raised + Int32(most > PAIR_LIMIT * ROW_UNITS << i)
        byte = cutlass.min(raised, 254) if byte != 255 else byte
        inverse = inverse_of_byte(byte)
        if tid == 0:
            scale_bytes[block, 0] = Uint8(byte)
        for r in cutlass.range(0, GROUP, BOUNDED_WARPS, unroll=1):
            for chunk in cutlass.range(lane, self.columns // 4, 32, unroll=2):
                load(exact, row0 + r, 4 * chunk, values)
                scaled = [values[i] * inverse for i in range(4)]
                word = e4m3x4(*scaled)
                word = word if byte != 255 else Int32(0)
                self.put(first, row0 + r, chunk, word)
                if const_expr(self.pair):
                    back = e4m3x4_to_float(word)
                    left = e4m3x4(*[scaled[i] - back[i] for i in range(4)])
                    self.put(second, row0 + r, chunk, left if byte != 255 else Int32(0))

    @cute.jit
    def largest(self, tops: cute.Tensor, turn: cutlass.Constexpr, warp, lane, value: Int32) -> Int32:
        """Largest of all threads' values."""
        value = warp_max(value)
        if lane == 0:
            tops[warp, turn] = value
        cute.arch.sync_threads()
        for w in cutlass.range_constexpr(BOUNDED_WARPS):
            value = cutlass.max(value, tops[w, turn])
        return value

    @cute.jit
    def put(self, codes: cute.Tensor, row, chunk, word: Int32):
        """Four codes to memory."""
        words = cute.make_rmem_tensor(1, Uint32)
        words[0] = Uint32(word)
        store(words, codes, row, 4 * chunk, 4)


@kernel_cache
def _compile_projection_weight(arch: str, spec: WeightSpec):
    rows, columns = symbol(), spec.columns
    plain = spec.form == "bf16" or spec.bounded
    codes = [fake("uint8", (symbol(), columns), align=1, compact=True) for _ in range(2)]
    scale = fake("uint8", (symbol(), columns // spec.width), align=1, compact=True)
    exact = fake("float32", (symbol(), columns), compact=True) if spec.bounded else None
    return build(
        arch,
        ProjectionWeight(spec),
        fake(spec.dtype, (rows, columns), align=2),
        fake(spec.gain_dtype, (columns,), align=2),
        fake("bfloat16", (symbol(), columns), align=2, compact=True),
        exact if plain else codes[0],
        codes[1] if spec.form == "e4m3x2" and not plain else None,
        None if plain else scale,
        fake("float32", (symbol(), WARPS * spec.chunks), compact=True),
        Int32(1),
    )


@kernel_cache
def _compile_projection_bound(arch: str, rows: int, parts: int):
    return build(
        arch, Bound(rows, parts), fake("float32", (symbol(), parts), compact=True), fake("uint8", (symbol(),), align=1), Float32(1.0)
    )


@kernel_cache
def _compile_bounded_rows(arch: str, columns: int, form: str):
    codes = [fake("uint8", (symbol(), columns), compact=True) for _ in range(2)]
    return build(
        arch,
        BoundedRows(columns, form),
        fake("float32", (symbol(), columns), compact=True),
        codes[0],
        codes[1] if form == "e4m3x2" else None,
        fake("uint8", (symbol(), 1), align=1, compact=True),
    )


def projection_weight(
    w: Tensor, gain: Tensor, heads: int, form: str, width: int, rotate: bool, centred: bool, bounded: bool = False
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor]:
    """BF16 of the weight, codes of each part, their scales, and the bound's scale bytes ``[heads]``."""
    rows, columns = w.shape
    w = w if w.stride(1) == 1 else w.contiguous()
    bounded = bounded and form != "bf16"
    spec = WeightSpec(columns, rows // heads, form, width, rotate, dtype_name(w), dtype_name(gain), bounded)
    count = {"bf16": 0, "e4m3": 1, "e4m3x2": 2}[form]
    rounded = torch.empty(rows, columns, dtype=torch.bfloat16, device=w.device)
    parts = [torch.empty(rows, columns, dtype=torch.uint8, device=w.device) for _ in range(count)]
    scales = torch.empty(rows // 32, columns // width, dtype=torch.uint8, device=w.device) if count else None
    squares = torch.empty(rows, WARPS * spec.chunks, dtype=torch.float32, device=w.device)
    bytes_ = torch.empty(heads, dtype=torch.uint8, device=w.device)
    arch = arch_of(w.device)
    first = [*parts, None, None][:2]
    exact = torch.empty(rows, columns, dtype=torch.float32, device=w.device) if bounded else None
    coded = (exact, None, None) if bounded else (*first, scales)
    launch(_compile_projection_weight(arch, spec), w.device, w, gain.contiguous(), rounded, *coded, squares, heads)
    if bounded:
        launch(_compile_bounded_rows(arch, columns, form), w.device, exact, *first, scales)
    bound = _compile_projection_bound(arch, spec.rows, WARPS * spec.chunks)
    launch(bound, w.device, squares, bytes_, bound_factor(columns, centred))
    return rounded, parts, scales, bytes_
