"""The kernels of ``weights``: one for the weight, one for the bound."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Uint8, const_expr
from torch import Tensor

from fused_ops.gemm_quantize.weights import WeightSpec, bound_factor
from lp_fa4.common.numbers import (
    byte_of_amax_bits,
    e4m3x4,
    e4m3x4_to_float,
    inverse_of_byte,
    magnitude_max,
    warp_max,
)
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol

THREADS = 128
WARPS = 4


class ProjectionWeight:
    """One CTA per head and 128 columns."""

    def __init__(self, spec: WeightSpec):
        self.spec = spec

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
            grid=[heads, self.spec.chunks, 1], block=[THREADS, 1, 1], stream=stream
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
        warp, lane = tid // 32, tid % 32
        row0, column = head * spec.rows, chunk * THREADS + tid
        within = column < spec.columns
        smem = cutlass.utils.SmemAllocator()
        maxima = smem.allocate_tensor(Int32, cute.make_layout((WARPS, spec.rows // 32)), byte_alignment=16)
        values = cute.make_rmem_tensor(spec.rows, Float32)
        for r in cutlass.range_constexpr(spec.rows):
            values[r] = Float32(0.0)
            if within:
                values[r] = w[row0 + r, column].to(Float32)
        if const_expr(spec.rotate):
            self.transform(values)
        scale = Float32(0.0)
        if within:
            scale = gain[column].to(Float32)
        for r in cutlass.range_constexpr(spec.rows):
            square = values[r] * scale * (values[r] * scale)
            for i in cutlass.range_constexpr(5):
                square = square + cute.arch.shuffle_sync_bfly(square, offset=1 << i)
            if lane == r % 32:
                squares[row0 + r, chunk * WARPS + warp] = square
        for r in cutlass.range_constexpr(spec.rows):
            if within:
                rounded[row0 + r, column] = values[r].to(BFloat16)
        if const_expr(spec.form != "bf16"):
            self.quantize(values, maxima, row0, column, within, first, second, scale_bytes)

    @cute.jit
    def transform(self, values: cute.Tensor):
        """Sylvester's matrix over ``sqrt(rows)`` times the column."""
        rows = self.spec.rows
        for step in cutlass.range_constexpr(rows.bit_length() - 1):
            half = 1 << step
            for r in cutlass.range_constexpr(rows):
                if const_expr(r & half == 0):
                    a, b = values[r], values[r + half]
                    values[r], values[r + half] = a + b, a - b
        for r in cutlass.range_constexpr(rows):
            values[r] = values[r] * rows**-0.5

    @cute.jit
    def quantize(self, values, maxima, row0, column, within, codes, rest, scales):
        """Codes and scales of 32-row blocks, and codes of what is left under the same scales where ``rest`` is asked for."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        groups, warps = spec.rows // 32, spec.width // 32
        for g in cutlass.range_constexpr(groups):
            top = Int32(0)
            for r in cutlass.range_constexpr(32):
                top = magnitude_max(top, values[32 * g + r])
            top = warp_max(top)
            if lane == 0:
                maxima[warp, g] = top
        cute.arch.sync_threads()
        for g in cutlass.range_constexpr(groups):
            top = Int32(0)
            for i in cutlass.range_constexpr(warps):
                top = cutlass.max(top, maxima[warp // warps * warps + i, g])
            byte = byte_of_amax_bits(top)
            inverse = inverse_of_byte(byte)
            if within & (tid % spec.width == 0):
                scales[row0 // 32 + g, column // spec.width] = Uint8(byte)
            for quad in cutlass.range_constexpr(8):
                at = 32 * g + 4 * quad
                scaled = [values[at + i] * inverse for i in range(4)]
                word = e4m3x4(*scaled)
                word = word if byte != 255 else Int32(0)
                left = Int32(0)
                if const_expr(spec.form == "e4m3x2"):
                    back = e4m3x4_to_float(word)
                    left = e4m3x4(*[scaled[i] - back[i] for i in range(4)])
                    left = left if byte != 255 else Int32(0)
                for i in cutlass.range_constexpr(4):
                    if within:
                        codes[row0 + at + i, column] = Uint8((word >> (8 * i)) & 255)
                        if const_expr(spec.form == "e4m3x2"):
                            rest[row0 + at + i, column] = Uint8((left >> (8 * i)) & 255)


class Bound:
    """Exponent of each head from its rows' squares: one warp a head."""

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
            out[head] = byte_of_amax_bits(top) - 127


@kernel_cache
def _compile_projection_weight(arch: str, spec: WeightSpec):
    rows, columns = symbol(), spec.columns
    bf16, pair = spec.form == "bf16", spec.form == "e4m3x2"
    codes = [fake("uint8", (symbol(), columns), align=1, compact=True) for _ in range(2)]
    scale = fake("uint8", (symbol(), columns // spec.width), align=1, compact=True)
    return build(
        arch,
        ProjectionWeight(spec),
        fake(spec.dtype, (rows, columns), align=2),
        fake(spec.gain_dtype, (columns,), align=2),
        fake("bfloat16", (symbol(), columns), align=2, compact=True),
        None if bf16 else codes[0],
        codes[1] if pair else None,
        None if bf16 else scale,
        fake("float32", (symbol(), WARPS * spec.chunks), compact=True),
        Int32(1),
    )


@kernel_cache
def _compile_projection_bound(arch: str, rows: int, parts: int):
    return build(
        arch, Bound(rows, parts), fake("float32", (symbol(), parts), compact=True), fake("int32", (symbol(),), align=4), Float32(1.0)
    )


def projection_weight(
    w: Tensor, gain: Tensor, heads: int, form: str, width: int, rotate: bool, centred: bool
) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor]:
    """BF16 of the weight, codes of each part, their scales, and int32 ``[heads]``."""
    rows, columns = w.shape
    w = w if w.stride(1) == 1 else w.contiguous()
    spec = WeightSpec(columns, rows // heads, form, width, rotate, dtype_name(w), dtype_name(gain))
    count = {"bf16": 0, "e4m3": 1, "e4m3x2": 2}[form]
    rounded = torch.empty(rows, columns, dtype=torch.bfloat16, device=w.device)
    parts = [torch.empty(rows, columns, dtype=torch.uint8, device=w.device) for _ in range(count)]
    scales = torch.empty(rows // 32, columns // width, dtype=torch.uint8, device=w.device) if count else None
    squares = torch.empty(rows, WARPS * spec.chunks, dtype=torch.float32, device=w.device)
    exponent = torch.empty(heads, dtype=torch.int32, device=w.device)
    arch = arch_of(w.device)
    first = [*parts, None, None][:2]
    launch(_compile_projection_weight(arch, spec), w.device, w, gain.contiguous(), rounded, *first, scales, squares, heads)
    bound = _compile_projection_bound(arch, spec.rows, WARPS * spec.chunks)
    launch(bound, w.device, squares, exponent, bound_factor(columns, centred))
    return rounded, parts, scales, exponent
