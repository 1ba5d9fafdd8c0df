"""Largest Euclidean norm among each group of 32 rows of V: what bounds dP, and so dS, before it is known (``backward_pair_tables``)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lp_fa4.common.numbers import e4m3x4_to_float, scale_of_byte
from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol

WARPS = 4
COLUMNS = 16
"""Codes of a load."""


class ValueNorms:
    """One warp per group and head. Launch arguments: :func:`compile_norms`."""

    def __init__(self, head_dim: int):
        self.lanes = head_dim // COLUMNS  # threads of a row
        self.rows = 32 // self.lanes  # rows of a warp at once

    @cute.jit
    def __call__(self, v: cute.Tensor, scale: cute.Tensor, offsets: cute.Tensor, norms: cute.Tensor, stream):
        grid = (Int32(norms.shape[0]) * Int32(norms.shape[1]) + (WARPS - 1)) // WARPS
        self.kernel(v, scale, offsets, norms).launch(grid=[grid, 1, 1], block=[32 * WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, v: cute.Tensor, scale: cute.Tensor, offsets: cute.Tensor, norms: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        heads, batch = Int32(norms.shape[1]), Int32(offsets.shape[0]) - 1
        place = cute.arch.make_warp_uniform(cute.arch.block_idx()[0] * WARPS + thread // 32)
        if place < Int32(norms.shape[0]) * heads:
            group, head = place // heads, place % heads
            b = find_sequence(offsets, batch, group, 32)
            first = Int32(offsets[b]) + 32 * (group - Int32(offsets[b]) // 32 - b)
            end = Int32(offsets[b + 1])
            largest = Float32(0.0)
            for i in cutlass.range_constexpr(32 // self.rows):
                row = first + i * self.rows + lane // self.lanes
                total = Float32(0.0)
                if row < end:
                    at = v.iterator + cute.crd2idx((row, head, lane % self.lanes * COLUMNS), v.layout)
                    pointer = cute.make_ptr(Int32, at.toint(), cute.AddressSpace.gmem, assumed_align=16)
                    words = cute.make_rmem_tensor(COLUMNS // 4, Int32)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(COLUMNS // 4)), words)
                    for j in cutlass.range_constexpr(COLUMNS // 4):
                        for x in e4m3x4_to_float(words[j]):
                            total = total + x * x
                for shift in range(self.lanes.bit_length() - 1):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << shift)
                largest = cute.arch.fmax(largest, total)
            for shift in range(self.lanes.bit_length() - 1, 5):
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << shift))
            if lane == 0:
                factor = Float32(0.0)
                if first < end:
                    factor = scale_of_byte(Int32(scale[group, head]))
                norms[group, head] = cute.math.sqrt(largest) * factor


@kernel_cache
def compile_norms(arch: str, head_dim: int, offsets_dtype: str):
    """Compile for ``arch``. Arguments at launch: v: uint8 codes ``[T, Hkv, D]``; scale: uint8 ``[groups, Hkv]``, a byte for 32 rows of a
    head (any strides); offsets ``[B + 1]``; norms: fp32 ``[T // 32 + B, Hkv]``, 0 for a group without rows, NaN for a block that is."""
    heads, groups = symbol(), symbol()
    return build(
        arch,
        ValueNorms(head_dim),
        fake("uint8", (symbol(), heads, head_dim), align=16),
        fake("uint8", (symbol(), heads), align=1, stride=(symbol(), symbol())),
        fake_offsets(offsets_dtype),
        fake("float32", (groups, heads), compact=True),
    )
