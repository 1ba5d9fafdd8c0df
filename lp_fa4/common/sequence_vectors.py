"""Vectors of a sequence: the mean of a few of its rows, and sums of per-tile sums. One CTA per sequence and head."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from lp_fa4.common.sequence import TILE
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol

SAMPLES = 64
"""Rows that a mean is taken over: any vector near the mean serves (softmax and the output are corrected exactly), so a
bounded number of evenly spaced rows does."""


class SampleMean:
    """Mean of at most 64 evenly spaced rows of each sequence, FP32, added in order; 0 for an empty sequence."""

    def __init__(self, head_dim: int):
        self.head_dim = head_dim

    @cute.jit
    def __call__(self, x: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, stream):
        heads, batch = Int32(x.shape[1]), Int32(offsets.shape[0]) - 1
        self.kernel(x, offsets, out, heads).launch(grid=[batch * heads, 1, 1], block=[self.head_dim, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, heads: Int32):
        column, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        b, head = bid // heads, bid % heads
        begin = Int32(offsets[b])
        length = Int32(offsets[b + 1]) - begin
        count = cutlass.min(length, SAMPLES)
        total = Float32(0.0)
        for i in cutlass.range(count, unroll=8):
            row = begin + Int32(cutlass.Int64(i) * cutlass.Int64(length) // cutlass.Int64(count))
            total = total + x[row, head, column].to(Float32)
        out[b, head, column] = total / Float32(cutlass.max(count, 1))


RUNS = 4
"""Runs of a sequence's tiles that are summed side by side."""
MAX_SUMMED = 512
"""Columns that one CTA sums at most, four a thread."""


class SumTiles:
    """``out[b] = sum of parts`` over the tiles that hold tokens of sequence ``b``: four runs of them in order, then their sums in order."""

    def __init__(self, head_dim: int):
        self.head_dim = head_dim

    @cute.jit
    def __call__(self, parts: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, stream):
        heads, batch = Int32(parts.shape[1]), Int32(offsets.shape[0]) - 1
        self.kernel(parts, offsets, out, heads).launch(
            grid=[batch * heads, 1, 1], block=[RUNS * self.head_dim // 4, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, parts: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, heads: Int32):
        tid, _, _ = cute.arch.thread_idx()
        quads = self.head_dim // 4
        quad, run = tid % quads, tid // quads
        sums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout((4, quads, RUNS)), byte_alignment=16)
        cute.arch.griddepcontrol_wait()  # what came before on the stream is over from here on
        bid, _, _ = cute.arch.block_idx()
        b, head = bid // heads, bid % heads
        begin = Int32(offsets[b])
        tiles = cute.ceil_div(Int32(offsets[b + 1]) - begin, TILE)
        row, each = begin // TILE + b, cute.ceil_div(tiles, RUNS)
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        for i in cutlass.range(cutlass.min(each * run, tiles), cutlass.min(each * (run + 1), tiles), unroll=4):
            piece = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(cute.local_tile(parts[row + i, head, None], (4,), (quad,)), piece)
            for j in cutlass.range_constexpr(4):
                total[j] = total[j] + piece[j]
        cute.autovec_copy(total, sums[None, quad, run])
        cute.arch.sync_threads()
        if run == 0:
            for i in cutlass.range_constexpr(1, RUNS):
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + sums[j, quad, i]
            cute.autovec_copy(total, cute.local_tile(out[b, head, None], (4,), (quad,)))


@kernel_cache
def _compile_mean(arch: str, dtype: str, offsets_dtype: str, head_dim: int):
    heads = symbol()
    return build(
        arch,
        SampleMean(head_dim),
        fake(dtype, (symbol(), heads, head_dim), align=2),
        fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8),
        fake("float32", (symbol(), heads, head_dim), compact=True),
    )


@kernel_cache
def _compile_sum(arch: str, offsets_dtype: str, head_dim: int):
    heads = symbol()
    return build(
        arch,
        SumTiles(head_dim),
        fake("float32", (symbol(), heads, head_dim), compact=True),
        fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8),
        fake("float32", (symbol(), heads, head_dim), compact=True),
    )


def sample_mean(x: Tensor, offsets: Tensor) -> Tensor:
    """fp32 ``[B, H, D]`` of ``x [T, H, D]``, any strides with D contiguous; B >= 1."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(offsets.shape[0] - 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    launch(_compile_mean(arch_of(x.device), dtype_name(x), dtype_name(offsets), x.shape[2]), x.device, x, offsets, out)
    return out


def sum_tiles(parts: Tensor, offsets: Tensor) -> Tensor:
    """fp32 ``[B, H, D]`` of per-tile sums ``[T // 128 + B, H, D]`` (tile rule)."""
    out = torch.empty(offsets.shape[0] - 1, *parts.shape[1:], dtype=torch.float32, device=parts.device)
    launch(_compile_sum(arch_of(parts.device), dtype_name(offsets), parts.shape[2]), parts.device, parts, offsets, out)
    return out
