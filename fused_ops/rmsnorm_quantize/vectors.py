"""What the norm kernel needs before it starts: the mean of a few rows of every sequence, and the exponents that bound its output."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from torch import Tensor

from fused_ops.rmsnorm_quantize.arithmetic import half_place, load, load8, mul, row_rstd
from fused_ops.rmsnorm_quantize.reference import MEAN_ROWS
from lp_fa4.common.numbers import bits_of, byte_of_amax_bits, float_of, inverse_of_byte, magnitude_max, pinned, warp_max
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol

THREADS = 256
WARPS = THREADS // 32
HELD_COLUMNS = 1024
"""Rows of a sequence up to so wide stay in registers between their two uses; wider ones are read twice from global memory."""
HELD_WORDS = 12
"""Chunks of four columns of BF16 that a thread asks for at once, and of rows of BF16 keeps until they are summed."""


class SampledMean:
    """FP32 mean of ``n = min(64, K)`` normed rows ``start + i * K // n`` of each sequence; 0 for an empty one.

    One CTA a sequence, a warp a row; the warps' sums are added in order. ``staged``: what the staged kernel needs too: a second copy in its
    order (``arithmetic.half_place``), and a ``ticket`` of 0. ``width``: columns under a given exponent, by whose inverse the second copy is
    multiplied; 0 for none. ``factor``: not 0: nothing is given, the exponents are those of :class:`BoundBytes` and are written. ``once``: x
    is BF16.
    """

    def __init__(self, columns: int, width: int, element: int, staged: bool, factor: float = 0.0, once: bool = False):
        self.columns, self.width, self.staged, self.factor, self.once = columns, width, staged, factor, once and columns <= HELD_COLUMNS
        self.slabs = -(-columns // 128)
        self.held = columns <= HELD_COLUMNS
        self.ctas = 4 if self.slabs <= 4 else 2
        self.rows = next(n for n in (8, 4, 2, 1) if n == 1 or n * self.slabs * element // 2 <= HELD_WORDS)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        out: cute.Tensor,
        scaled: cute.Tensor,
        ticket: cute.Tensor,
        eps: Float32,
        stream,
    ):
        batch = Int32(offsets.shape[0]) - 1
        self.kernel(x, weight, offsets, given, out, scaled, ticket, eps).launch(
            grid=[batch, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=self.ctas, preferred_smem_carveout=25, stream=stream, use_pdl=True
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
        ticket: cute.Tensor,
        eps: Float32,
    ):
        b, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if const_expr(self.staged):  # noqa: SIM102 - one is decided at compile time
            if (b == 0) & (tid == 0):
                ticket[0] = 0
        begin = Int32(offsets[b])
        length = Int32(offsets[b + 1]) - begin
        count = cutlass.min(length, MEAN_ROWS)
        smem = cutlass.utils.SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout((self.columns, WARPS if self.held else 1)), byte_alignment=16)
        places = smem.allocate_tensor(Int32, cute.make_layout(MEAN_ROWS), byte_alignment=16)
        factors = smem.allocate_tensor(Float32, cute.make_layout(MEAN_ROWS), byte_alignment=16)
        tops = smem.allocate_tensor(Int32, cute.make_layout(max(self.columns // max(self.width, 1), 4)), byte_alignment=16)
        if tid < MEAN_ROWS:
            place = begin + tid
            if length > MEAN_ROWS:
                place = begin + Int32(Int64(tid) * Int64(length) // MEAN_ROWS)
            places[tid] = place
        if const_expr(self.factor > 0.0):
            for i in cutlass.range(tid, self.columns // self.width, THREADS, unroll=1):
                tops[i] = 0
        cute.arch.sync_threads()
        if const_expr(self.factor > 0.0):
            self.bound(weight, tops)
        if const_expr(self.once):
            self.sum_once(x, weight, places, count, eps, parts)
        elif const_expr(self.held):
            self.sum_held(x, weight, places, factors, count, eps, parts)
        else:
            self.sum_twice(x, weight, places, factors, count, eps, parts)
        cute.arch.sync_threads()
        if const_expr(self.factor > 0.0):  # noqa: SIM102 - one is decided at compile time
            if b == 0:
                for i in cutlass.range(tid, self.columns // self.width, THREADS, unroll=1):
                    given[0, i] = Uint8(self.byte(tops[i]))
        for column in cutlass.range(tid, self.columns, THREADS, unroll=1):
            total = parts[column, 0]
            for w in cutlass.range_constexpr(1, WARPS if self.held else 1):
                total = total + parts[column, w]
            total = total / Float32(cutlass.max(count, 1))
            out[Int64(b), column] = total
            if const_expr(self.staged):
                self.second(given, scaled, tops, b, column, total)

    @cute.jit
    def second(self, given, scaled: cute.Tensor, tops: cute.Tensor, b: Int32, column: Int32, total: Float32):
        """A column of the mean as the staged kernel reads it."""
        if const_expr(self.width):
            byte = self.byte(tops[column // self.width]) if const_expr(self.factor > 0.0) else Int32(given[0, column // self.width])
            total = total * inverse_of_byte(byte)
        scaled[Int64(b), half_place(column, self.columns)] = total

    @cute.jit
    def bound(self, weight: cute.Tensor, tops: cute.Tensor):
        """Largest magnitudes' bits of the weight, by block: four columns a thread."""
        tid, _, _ = cute.arch.thread_idx()
        for chunk in cutlass.range(tid, self.columns // 4, THREADS, unroll=1):
            gain = cute.make_rmem_tensor(4, weight.element_type)
            load(weight, 0, 4 * chunk, gain)
            top = Int32(0)
            for i in cutlass.range_constexpr(4):
                top = magnitude_max(top, gain[i].to(Float32))
            cute.arch.atomic_max(tops.iterator + cute.crd2idx(4 * chunk // self.width, tops.layout), top)

    @cute.jit
    def byte(self, top: Int32) -> Int32:
        """Scale byte of the bound under a block's largest weight."""
        return bound_byte(top, Float32(self.factor))

    @cute.jit
    def some_rows(self, x, places, first: Int32, count: Int32):
        """A lane's four columns of every slab of a warp's next ``rows`` rows, in registers; zeros past the last row or column."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        raw = cute.make_rmem_tensor((4, self.slabs, self.rows), x.element_type)
        raw.fill(0)
        for r in cutlass.range_constexpr(self.rows):
            i = warp + WARPS * (first + r)
            if i < count:
                for k in cutlass.range_constexpr(self.slabs):
                    if lane + 32 * k < self.columns // 4:
                        load(x, places[i], 4 * (lane + 32 * k), raw[None, k, r])
        return raw

    @cute.jit
    def hand_over(self, totals: cute.Tensor, parts: cute.Tensor):
        """A lane's sums to ``parts[:, warp]``."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        for k in cutlass.range_constexpr(self.slabs):
            if lane + 32 * k < self.columns // 4:
                for j in cutlass.range_constexpr(4):
                    parts[4 * (lane + 32 * k) + j, warp] = totals[j, k]

    @cute.jit
    def sum_held(self, x, weight, places, factors: cute.Tensor, count: Int32, eps: Float32, parts: cute.Tensor):
        """A warp's rows, every eighth: several at once for their factors, then again, from L1; its sums to ``parts[:, warp]``."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        slabs, rows, chunks = self.slabs, self.rows, self.columns // 4
        for first in cutlass.range(0, MEAN_ROWS // WARPS, rows, unroll=1):
            raw = self.some_rows(x, places, first, count)
            for r in cutlass.range_constexpr(rows):
                total = Float32(0.0)
                for k in cutlass.range_constexpr(slabs):
                    for j in cutlass.range_constexpr(4):
                        value = raw[j, k, r].to(Float32)
                        total = total + value * value
                factor = row_rstd(total, 32, self.columns, eps)
                if lane == 0:
                    factors[warp + WARPS * (first + r)] = factor
        cute.arch.sync_warp()
        totals, gain = cute.make_rmem_tensor((4, slabs), Float32), cute.make_rmem_tensor((4, slabs), weight.element_type)
        totals.fill(0.0)
        gain.fill(0)
        for k in cutlass.range_constexpr(slabs):
            if lane + 32 * k < chunks:
                load(weight, 0, 4 * (lane + 32 * k), gain[None, k])
        for i in cutlass.range(warp, count, WARPS, unroll=2):
            for k in cutlass.range_constexpr(slabs):
                if lane + 32 * k < chunks:
                    again = cute.make_rmem_tensor(4, x.element_type)
                    load(x, places[i], 4 * (lane + 32 * k), again)
                    for j in cutlass.range_constexpr(4):
                        totals[j, k] = totals[j, k] + mul(mul(again[j].to(Float32), factors[i]), gain[j, k].to(Float32))
        self.hand_over(totals, parts)

    @cute.jit
    def sum_once(self, x, weight, places, count: Int32, eps: Float32, parts: cute.Tensor):
        """The same sums of rows of BF16, which stay as they are in registers from their factors to their sums."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        slabs, rows, chunks = self.slabs, self.rows, self.columns // 4
        totals = cute.make_rmem_tensor((4, slabs), Float32)
        totals.fill(0.0)
        for first in cutlass.range(0, MEAN_ROWS // WARPS, rows, unroll=1):
            words = cute.recast_tensor(self.some_rows(x, places, first, count), Int32)
            sums = []
            for r in cutlass.range_constexpr(rows):
                total = Float32(0.0)
                for k in cutlass.range_constexpr(slabs):
                    for j in cutlass.range_constexpr(2):
                        word = words[j, k, r]
                        low, high = float_of(word << 16), float_of(word & Int32(-65536))
                        total = total + low * low
                        total = total + high * high
                sums.append(total)
            factors = [row_rstd(total, 32, self.columns, eps) for total in sums]
            for k in cutlass.range_constexpr(slabs):
                gain = cute.make_rmem_tensor(4, weight.element_type)
                gain.fill(0)
                if lane + 32 * k < chunks:  # again for every few rows: there are no registers to keep it
                    load(weight, 0, 4 * (lane + 32 * k), gain)
                for r in cutlass.range_constexpr(rows):
                    if warp + WARPS * (first + r) < count:
                        for j in cutlass.range_constexpr(2):
                            word = pinned(words[j, k, r])
                            for h, value in enumerate((float_of(word << 16), float_of(word & Int32(-65536)))):
                                gained = mul(mul(value, factors[r]), gain[2 * j + h].to(Float32))
                                totals[2 * j + h, k] = totals[2 * j + h, k] + gained
        self.hand_over(totals, parts)

    @cute.jit
    def sum_twice(self, x, weight, places, factors: cute.Tensor, count: Int32, eps: Float32, parts: cute.Tensor):
        """A warp a row for its factor, then threads own pairs of columns and read the rows again."""
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        for i in cutlass.range(warp, count, WARPS, unroll=2):
            total = Float32(0.0)
            for chunk in cutlass.range(lane, self.columns // 8, 32):
                raw = cute.make_rmem_tensor(8, x.element_type)
                load8(x, places[i], 8 * chunk, raw)
                for j in cutlass.range_constexpr(8):
                    value = raw[j].to(Float32)
                    total = total + value * value
            factor = row_rstd(total, 32, self.columns, eps)
            if lane == 0:
                factors[i] = factor
        cute.arch.sync_threads()
        for pair in cutlass.range(tid, self.columns // 2, THREADS):
            total = cute.make_rmem_tensor(2, Float32)
            total.fill(0.0)
            gain0, gain1 = weight[0, 2 * pair].to(Float32), weight[0, 2 * pair + 1].to(Float32)
            for i in cutlass.range(count, unroll=8):
                row = Int64(places[i])
                total[0] = total[0] + mul(mul(x[row, 2 * pair].to(Float32), factors[i]), gain0)
                total[1] = total[1] + mul(mul(x[row, 2 * pair + 1].to(Float32), factors[i]), gain1)
            for j in cutlass.range_constexpr(2):
                parts[2 * pair + j, 0] = total[j]


@cute.jit
def bound_byte(top: Int32, factor: Float32) -> Int32:
    """Scale byte of ``factor`` times the magnitude with bits ``top``."""
    return cutlass.min(byte_of_amax_bits(bits_of(float_of(top) * factor)), 254)


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
            out[0, block] = Uint8(bound_byte(top, factor))


@kernel_cache
def _compile_norm_mean(
    arch: str, offsets_dtype: str, dtype: str, weight_dtype: str, columns: int, width: int = 0, bounded: bool = False, staged: bool = False
):
    return build(
        arch,
        SampledMean(columns, width, 4 if dtype == "float32" else 2, staged, columns**0.5 * 2 if bounded else 0.0, dtype == "bfloat16"),
        fake(dtype, (symbol(), columns)),
        fake(weight_dtype, (1, columns)),
        fake_offsets(offsets_dtype),
        fake("uint8", (1, columns // width), align=1, compact=True) if width else None,
        fake("float32", (symbol(), columns), compact=True),
        fake("float32", (symbol(), columns), compact=True) if staged else None,
        fake("int32", (1,), align=4) if staged else None,
        Float32(0.0),
    )


@kernel_cache
def _compile_norm_bound(arch: str, weight_dtype: str, columns: int, width: int):
    out = fake("uint8", (1, columns // width), align=1, compact=True)
    return build(arch, BoundBytes(columns, width), fake(weight_dtype, (1, columns), align=2, stride=(columns, 1)), out, Float32(1.0))


def sampled_mean(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offsets: Tensor,
    given: Tensor | None = None,
    *,
    bound: bool = False,
    ticket: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """FP32 ``[B, C]`` of aligned ``x [T, C]`` and ``weight [1, C]``; and, where a ``ticket`` of one int32 is given, which becomes 0, what
    the staged kernel reads: the same over the scales ``given [1, blocks]``, in another order. See :class:`SampledMean`. ``bound``: the
    scales are written, not read: what :func:`bound_bytes` makes. ``B >= 1``."""
    out, staged = torch.empty(offsets.shape[0] - 1, x.shape[1], dtype=torch.float32, device=x.device), ticket is not None
    second = torch.empty_like(out) if staged else None
    width = 0 if given is None else x.shape[1] // given.shape[1]
    key = dtype_name(offsets), dtype_name(x), dtype_name(weight), x.shape[1], width, bound, staged
    launch(_compile_norm_mean(arch_of(x.device), *key), x.device, x, weight, offsets, given, out, second, ticket, eps)
    return out, second


def bound_bytes(weight: Tensor, width: int, center: bool) -> Tensor:
    """Scale bytes ``[1, C / width]`` of ``interface.norm_exponent``: the bytes that it would become."""
    columns = weight.shape[-1]
    out = torch.empty(1, columns // width, dtype=torch.uint8, device=weight.device)
    compiled = _compile_norm_bound(arch_of(weight.device), dtype_name(weight), columns, width)
    launch(compiled, weight.device, weight.reshape(1, columns), out, columns**0.5 * (2 if center else 1))
    return out
