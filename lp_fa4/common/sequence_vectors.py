"""Vectors of a sequence: the mean of a few of its rows, and sums of per-tile sums. One CTA per sequence and head."""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32
from torch import Tensor

from lp_fa4.common.rows import eight, wide, words_of
from lp_fa4.common.sequence import TILE
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol

SAMPLES = 64
"""Rows that a mean is taken over: any vector near the mean serves (softmax and the output are corrected exactly), so a
bounded number of evenly spaced rows does."""


SAMPLE_THREADS = 256


class SampleMeans:
    """Means of at most 64 evenly spaced rows of each sequence, FP32, in a fixed order; 0 for an empty sequence. ``dtypes``: one for each
    tensor; all have the same sequences. A CTA takes a sequence and head of one of them."""

    def __init__(self, head_dim: int, dtypes: tuple[str, ...]):
        self.head_dim, self.dtypes = head_dim, dtypes
        self.lanes = head_dim // 8  # threads of a row
        self.rows = SAMPLE_THREADS // self.lanes  # rows at once

    @cute.jit
    def __call__(self, xs, offsets: cute.Tensor, outs, stream):
        heads, batch = Int32(xs[0].shape[1]), Int32(offsets.shape[0]) - 1
        self.kernel(xs, offsets, outs, heads).launch(
            grid=[len(self.dtypes) * batch * heads, 1, 1], block=[SAMPLE_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, xs, offsets: cute.Tensor, outs, heads: Int32):
        bid, _, _ = cute.arch.block_idx()
        parts = cutlass.utils.SmemAllocator().allocate_tensor(
            Float32, cute.make_layout((self.rows, self.head_dim), stride=(self.head_dim, 1)), byte_alignment=16
        )
        each = (Int32(offsets.shape[0]) - 1) * heads
        for i in cutlass.range_constexpr(len(self.dtypes)):
            if bid // each == i:
                self.mean(self.dtypes[i], xs[i], offsets, outs[i], bid % each // heads, bid % heads, parts)

    @cute.jit
    def mean(self, dtype: cutlass.Constexpr, x, offsets, out, b, head, parts):
        """Mean of one sequence and head."""
        tid, _, _ = cute.arch.thread_idx()
        row, column = tid // self.lanes, 8 * (tid % self.lanes)
        begin = Int32(offsets[b])
        length = Int32(offsets[b + 1]) - begin
        count = cutlass.min(length, SAMPLES)
        steps = SAMPLES // self.rows
        whole, rest = length // cutlass.max(count, 1), length % cutlass.max(count, 1)
        raw = cute.make_rmem_tensor((words_of(dtype), steps), Uint32)
        raw.fill(0)
        for s in cutlass.range_constexpr(steps):
            at = row + s * self.rows
            if at < count:
                token = begin + at * whole + at * rest // count  # at * length // count, which might not fit
                eight(x, (token, head, column), raw[None, s])
        for i in cutlass.range_constexpr(8):
            total = Float32(0.0)
            for s in cutlass.range_constexpr(steps):
                total = total + wide([raw[w, s] for w in range(words_of(dtype))], dtype)[i]
            parts[row, column + i] = total
        cute.arch.sync_threads()
        if tid < self.head_dim:
            total = Float32(0.0)
            for r in cutlass.range_constexpr(self.rows):
                total = total + parts[r, tid]
            out[b, head, tid] = total / Float32(cutlass.max(count, 1))


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
def _compile_means(arch: str, offsets_dtype: str, head_dim: int, *dtypes: str):
    heads, batch = symbol(), symbol()
    return build(
        arch,
        SampleMeans(head_dim, dtypes),
        tuple(fake(dtype, (symbol(), heads, head_dim)) for dtype in dtypes),
        fake_offsets(offsets_dtype),
        tuple(fake("float32", (batch, heads, head_dim), compact=True) for _ in dtypes),
    )


@kernel_cache
def _compile_sum(arch: str, offsets_dtype: str, head_dim: int):
    heads = symbol()
    return build(
        arch,
        SumTiles(head_dim),
        fake("float32", (symbol(), heads, head_dim), compact=True),
        fake_offsets(offsets_dtype),
        fake("float32", (symbol(), heads, head_dim), compact=True),
    )


def sample_means(xs: Sequence[Tensor], offsets: Tensor) -> list[Tensor]:
    """fp32 ``[B, H, D]`` of each of ``xs``, ``[T, H, D]`` with ``aligned_rows``, H and D (64 or 128) alike; B >= 1."""
    first = xs[0]
    outs = [torch.empty(offsets.shape[0] - 1, *x.shape[1:], dtype=torch.float32, device=x.device) for x in xs]
    compiled = _compile_means(arch_of(first.device), dtype_name(offsets), first.shape[2], *map(dtype_name, xs))
    launch(compiled, first.device, tuple(xs), offsets, tuple(outs))
    return outs


def sum_tiles(parts: Tensor, offsets: Tensor) -> Tensor:
    """fp32 ``[B, H, D]`` of per-tile sums ``[T // 128 + B, H, D]`` (tile rule)."""
    out = torch.empty(offsets.shape[0] - 1, *parts.shape[1:], dtype=torch.float32, device=parts.device)
    launch(_compile_sum(arch_of(parts.device), dtype_name(offsets), parts.shape[2]), parts.device, parts, offsets, out)
    return out
