"""``head_quantize`` in one launch: a CTA a head reads its rows three times: for the maximum and, from cache, for sums and codes.

There are as many rows as seeds, once a step: what counts is the one launch in place of some thirty of plain PyTorch.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.cutlass_dsl import T
from torch import Tensor

from fused_ops.rmsnorm_quantize.arithmetic import nan_unless_finite
from lp_fa4.common.numbers import absolute, byte_of_amax_bits, e4m3x4, inline_ptx, inverse_of_byte, magnitude_max, warp_max
from lp_fa4.compile import arch_of, build, fake, kernel_cache, launch, symbol
from lp_fa4.mx.quantize import ROW_LIMIT, ROW_SHIFTS, ROW_UNITS

THREADS = 1024
WARPS = THREADS // 32
AHEAD = 8
"""Pieces of four elements that a thread asks for at once; past the end, the last one again (the same code to the same place)."""


def truncated(x):
    """FP32 to Int32 towards 0; a NaN is 0."""
    return Int32(inline_ptx(T.i32(), [x], "cvt.rzi.s32.f32 $0, $1;", "=r,f"))


def warp_sum(x):
    """Sum of a warp's Int32."""
    return Int32(inline_ptx(T.i32(), [x], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", side_effects=True))


class HeadQuantize:
    """``width`` elements of a head's row: a thread takes four at a time."""

    def __init__(self, width: int):
        self.quads = width // 4

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, scale: cute.Tensor, stream):
        self.kernel(x, codes, scale).launch(grid=[Int32(x.shape[1]), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, codes: cute.Tensor, scale: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        maxima = cutlass.utils.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        count, top = Int32(x.shape[0]) * self.quads, Int32(0)
        for base in cutlass.range(tid, count, AHEAD * THREADS, unroll=1):
            pieces = [self.four(x, cutlass.min(base + i * THREADS, count - 1), head) for i in range(AHEAD)]
            for values in pieces:
                for i in cutlass.range_constexpr(4):
                    top = magnitude_max(top, values[i])
        byte = cutlass.min(byte_of_amax_bits(self.largest(maxima, top, tid)), 254)
        inverse, units = inverse_of_byte(byte), Int32(0)
        for base in cutlass.range(tid // 32, Int32(x.shape[0]), AHEAD * WARPS, unroll=1):
            rows = [cutlass.min(base + i * WARPS, Int32(x.shape[0]) - 1) for i in range(AHEAD)]
            for pieces in [self.row(x, row, head, tid % 32) for row in rows]:
                units = cutlass.max(units, warp_sum(self.units(pieces, inverse, tid % 32)))
        cute.arch.sync_threads()
        units = self.largest(maxima, units, tid)
        for i in cutlass.range_constexpr(ROW_SHIFTS):
            byte += Int32(units > (ROW_LIMIT * ROW_UNITS << i))
        byte = cutlass.min(byte, 254)
        if tid == 0:
            scale[head] = Uint8(byte)
        inverse = inverse_of_byte(byte)
        for base in cutlass.range(tid, count, AHEAD * THREADS, unroll=1):
            places = [cutlass.min(base + i * THREADS, count - 1) for i in range(AHEAD)]
            for at, values in zip(places, [self.four(x, at, head) for at in places], strict=True):
                word = cute.make_rmem_tensor(1, Uint32)
                word[0] = Uint32(e4m3x4(*[nan_unless_finite(values[i] * inverse) for i in range(4)]))
                pointer = cute.make_ptr(Uint32, self.address(codes, at, head), cute.AddressSpace.gmem, assumed_align=4)
                cute.autovec_copy(word, cute.make_tensor(pointer, cute.make_layout(1)))

    @cute.jit
    def largest(self, maxima: cute.Tensor, value: Int32, tid: Int32) -> Int32:
        """Maximum of a non-negative value over the CTA."""
        value = warp_max(value)
        if tid % 32 == 0:
            maxima[tid // 32] = value
        cute.arch.sync_threads()
        return warp_max(maxima[tid % 32])

    def row(self, x: cute.Tensor, row: Int32, head: Int32, lane: Int32) -> list[cute.Tensor]:
        """A lane's fours of a row, the last one of the row where it has none."""
        places = [cutlass.min(lane + first, self.quads - 1) for first in range(0, self.quads, 32)]
        return [self.four(x, row * self.quads + at, head) for at in places]

    def units(self, pieces: list[cute.Tensor], inverse: Float32, lane: Int32) -> Int32:
        """Their magnitudes in units of the definition, 0 for what is not the lane's own or not finite."""
        found = Int32(0)
        for first, piece in zip(range(0, self.quads, 32), pieces, strict=True):
            count = Float32(ROW_UNITS) if first + 32 <= self.quads else Float32(ROW_UNITS) * Float32(lane + first < self.quads)
            for i in range(4):
                found += truncated(nan_unless_finite(absolute(piece[i]) * inverse * count))
        return found

    def four(self, x: cute.Tensor, at: Int32, head: Int32) -> cute.Tensor:
        """Elements ``4 * at`` … of the head's rows laid end to end."""
        values = cute.make_rmem_tensor(4, Float32)
        source = cute.make_ptr(Float32, self.address(x, at, head), cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), values)
        return values

    def address(self, x: cute.Tensor, at: Int32, head: Int32):
        """Byte address of these four elements."""
        return (x.iterator + cute.crd2idx((Int64(at // self.quads), head, 4 * (at % self.quads)), x.layout)).toint()


@kernel_cache
def _compile_head_quantize(arch: str, width: int):
    rows, heads = symbol(), symbol()
    return build(
        arch,
        HeadQuantize(width),
        fake("float32", (rows, heads, width)),
        fake("uint8", (rows, heads, width), align=4, compact=True),
        fake("uint8", (heads,), align=1, compact=True),
    )


def head_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's operation on a GPU, the same bytes; FP32 ``x`` with ``D % 4 == 0``."""
    rows, heads, width = x.shape
    if x.stride(2) != 1 or x.stride(0) % 4 or x.stride(1) % 4 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    codes = torch.empty(rows, heads, width, dtype=torch.uint8, device=x.device)
    scale = torch.empty(heads, dtype=torch.uint8, device=x.device)
    launch(_compile_head_quantize(arch_of(x.device), width), x.device, x, codes, scale)
    return codes, scale.view(1, heads, 1)
