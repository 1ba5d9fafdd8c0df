"""What the norm kernel needs before it starts: the mean of a few rows of every sequence, and the exponents that bound its output."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from torch import Tensor

from fused_ops.places import bulk_copy
from fused_ops.rmsnorm_quantize.arithmetic import load8, mul, rsqrt
from fused_ops.rmsnorm_quantize.reference import MEAN_ROWS
from lp_fa4.common.numbers import bits_of, byte_of_amax_bits, float_of, inverse_of_byte, magnitude_max, warp_max
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol

THREADS = 256
WARPS = THREADS // 32
STAGED_BYTES = 100 * 1024
"""Rows of a sequence that are read through shared memory; wider ones twice from global memory."""


class SampledMean:
    """FP32 mean of ``n = min(64, K)`` normed rows ``start + i * K // n`` of each sequence, added in order; 0 for an empty one.

    One CTA a sequence: all rows are asked for at once, a warp takes a row for its factor, then threads own pairs of columns. ``width``:
    columns under a given exponent, by whose inverse a second copy is multiplied; 0 for none.
    """

    def __init__(self, columns: int, width: int, element: int):
        self.columns, self.width = columns, width
        self.row_bytes = columns * element
        self.staged = MEAN_ROWS * self.row_bytes <= STAGED_BYTES

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        out: cute.Tensor,
        scaled: cute.Tensor,
        eps: Float32,
        stream,
    ):
        batch = Int32(offsets.shape[0]) - 1
        self.kernel(x, weight, offsets, given, out, scaled, eps).launch(
            grid=[batch, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, preferred_smem_carveout=100, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        out: cute.Tensor,
        scaled: cute.Tensor,
        eps: Float32,
    ):
        b, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        begin = Int32(offsets[b])
        length = Int32(offsets[b + 1]) - begin
        count = cutlass.min(length, MEAN_ROWS)
        smem = cutlass.utils.SmemAllocator()
        factors = smem.allocate_tensor(Float32, cute.make_layout(MEAN_ROWS), byte_alignment=16)
        places = smem.allocate_tensor(Int32, cute.make_layout(MEAN_ROWS), byte_alignment=16)
        rows = x
        if const_expr(self.staged):
            barrier = smem.allocate_array(Int64, 1)
            layout = cute.make_layout((MEAN_ROWS, self.columns), stride=(self.columns, 1))
            rows = smem.allocate_tensor(x.element_type, layout, byte_alignment=128)
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_init(barrier, 1)
                    cute.arch.mbarrier_init_fence()
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * self.row_bytes)
            cute.arch.sync_threads()
            target, full = rows.iterator.toint() + tid * self.row_bytes, barrier.toint()
            if tid < count:
                row = begin + Int32(Int64(tid) * Int64(length) // Int64(count))
                source = (x.iterator + cute.crd2idx((Int64(row), 0), x.layout)).toint()
                bulk_copy(target, source, self.row_bytes, full)
                places[tid] = tid
        elif tid < count:
            places[tid] = begin + Int32(Int64(tid) * Int64(length) // Int64(count))
        cute.arch.sync_threads()
        if const_expr(self.staged):
            cute.arch.mbarrier_wait(barrier, 0)
        for i in cutlass.range(warp, count, WARPS, unroll=2):
            total = Float32(0.0)
            for chunk in cutlass.range(lane, self.columns // 8, 32):
                raw = cute.make_rmem_tensor(8, x.element_type)
                if const_expr(self.staged):
                    cute.autovec_copy(cute.local_tile(rows[i, None], (8,), (chunk,)), raw)
                else:
                    load8(x, places[i], 8 * chunk, raw)
                for j in cutlass.range_constexpr(8):
                    value = raw[j].to(Float32)
                    total = total + value * value
            for j in cutlass.range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << j)
            if lane == 0:
                factors[i] = rsqrt(total / Float32(self.columns) + eps)
        cute.arch.sync_threads()
        for pair in cutlass.range(tid, self.columns // 2, THREADS):
            total = cute.make_rmem_tensor(2, Float32)
            total.fill(0.0)
            gain0, gain1 = weight[0, 2 * pair].to(Float32), weight[0, 2 * pair + 1].to(Float32)
            for i in cutlass.range(count, unroll=8):
                row = Int64(places[i])
                total[0] = total[0] + mul(mul(rows[row, 2 * pair].to(Float32), factors[i]), gain0)
                total[1] = total[1] + mul(mul(rows[row, 2 * pair + 1].to(Float32), factors[i]), gain1)
            for j in cutlass.range_constexpr(2):
                total[j] = total[j] / Float32(cutlass.max(count, 1))
                out[Int64(b), 2 * pair + j] = total[j]
                if const_expr(self.width):
                    scaled[Int64(b), 2 * pair + j] = total[j] * inverse_of_byte(Int32(given[0, (2 * pair + j) // self.width]))


class BoundBytes:
    """Scale bytes of the bound ``max|weight| * factor`` over each run of ``width`` columns: a warp a run."""

    def __init__(self, columns: int, width: int):
        self.columns, self.width = columns, width

    @cute.jit
    def __call__(self, weight: cute.Tensor, out: cute.Tensor, factor: Float32, stream):
        self.kernel(weight, out, factor).launch(grid=[self.columns // self.width, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, weight: cute.Tensor, out: cute.Tensor, factor: Float32):
        block, _, _ = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        top = Int32(0)
        for i in cutlass.range(lane, self.width, 32, unroll=4):
            top = magnitude_max(top, weight[0, block * self.width + i].to(Float32))
        top = warp_max(top)
        if lane == 0:
            out[0, block] = Uint8(cutlass.min(byte_of_amax_bits(bits_of(float_of(top) * factor)), 254))


@kernel_cache
def _compile_norm_mean(arch: str, offsets_dtype: str, dtype: str, weight_dtype: str, columns: int, width: int = 0):
    return build(
        arch,
        SampledMean(columns, width, 4 if dtype == "float32" else 2),
        fake(dtype, (symbol(), columns)),
        fake(weight_dtype, (1, columns)),
        fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8),
        fake("uint8", (1, columns // width), align=1, compact=True) if width else None,
        fake("float32", (symbol(), columns), compact=True),
        fake("float32", (symbol(), columns), compact=True) if width else None,
        Float32(0.0),
    )


@kernel_cache
def _compile_norm_bound(arch: str, weight_dtype: str, columns: int, width: int):
    out = fake("uint8", (1, columns // width), align=1, compact=True)
    return build(arch, BoundBytes(columns, width), fake(weight_dtype, (1, columns), align=2, stride=(columns, 1)), out, Float32(1.0))


def sampled_mean(x: Tensor, weight: Tensor, eps: float, offsets: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """FP32 ``[B, C]`` of aligned ``x [T, C]`` and ``weight [1, C]``, and the same over the scales ``given [1, blocks]`` (the mean itself
    without them); see :class:`SampledMean`. ``B >= 1``."""
    out = torch.empty(offsets.shape[0] - 1, x.shape[1], dtype=torch.float32, device=x.device)
    scaled = out if given is None else torch.empty_like(out)
    width = 0 if given is None else x.shape[1] // given.shape[1]
    compiled = _compile_norm_mean(arch_of(x.device), dtype_name(offsets), dtype_name(x), dtype_name(weight), x.shape[1], width)
    launch(compiled, x.device, x, weight, offsets, given, out, None if given is None else scaled, eps)
    return out, scaled


def bound_bytes(weight: Tensor, width: int, center: bool) -> Tensor:
    """Scale bytes ``[1, C / width]`` of ``interface.norm_exponent``: the bytes that it would become."""
    columns = weight.shape[-1]
    out = torch.empty(1, columns // width, dtype=torch.uint8, device=weight.device)
    compiled = _compile_norm_bound(arch_of(weight.device), dtype_name(weight), columns, width)
    launch(compiled, weight.device, weight.reshape(1, columns), out, columns**0.5 * (2 if center else 1))
    return out
