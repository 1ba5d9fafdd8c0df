"""Splits of a sequence's keys merged into one result, in a fixed order.

Every split left O, row sum, reference and maximum of its keys, each relative to its own reference; with centred P all
splits of a sequence share the mean that gives the centre. One CTA merges one query row of one head: its warps take
splits in turn, each adds its own up, and their sums are added in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from torch import Tensor

from lp_fa4.common.numbers import exp2, log2
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol
from lp_fa4.problem import ForwardResult
from lp_fa4.sm90.forward_config import ForwardSpec
from lp_fa4.sm90.forward_epilogue import store_statistics

WARPS = 8
CHUNK = 8
"""Splits whose loads a warp has under way at once."""


class Output:
    """The statistics' tensors by the names that ``store_statistics`` expects."""

    def __init__(self, lse, maximum, total):
        self.lse, self.maximum, self.sum = lse, maximum, total


@cute.jit
def load_columns(parts: cute.Tensor, index, out: cute.Tensor):
    """The lane's neighbouring columns of one part."""
    width = cute.size(out)
    pointer = parts.iterator + cute.crd2idx(index, parts.layout)
    source = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=4 * width)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(width)), out)


class Merge:
    """Rows of a grid ``[batch, heads, queries]``, one CTA each."""

    def __init__(self, spec: ForwardSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        out: cute.Tensor,
        centred: cute.Tensor,
        lse: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        stream,
    ):
        heads, queries = Int32(parts.shape[1]), Int32(parts.shape[2])
        rows = (Int32(offsets.shape[0]) - 1) * heads * queries
        self.kernel(offsets, parts, stats, v_sum, v_mean, out, centred, lse, maximum, total, heads, queries).launch(
            grid=[rows, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        out: cute.Tensor,
        centred: cute.Tensor,
        lse: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        heads: Int32,
        queries: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        warp, lane = tid // 32, tid % 32
        width = spec.head_dim // 32
        smem = cutlass.utils.SmemAllocator()
        scratch = smem.allocate_tensor(Float32, cute.make_layout((WARPS, 4)), byte_alignment=16)
        partial = smem.allocate_tensor(Float32, cute.make_layout((spec.head_dim, WARPS)), byte_alignment=16)
        row, rest = bid % queries, bid // queries
        head, b = rest % heads, rest // heads
        first_key = Int32(offsets[b])
        keys = Int32(offsets[b + 1]) - first_key
        slot = first_key // spec.split_keys + b
        splits = cutlass.max(cute.ceil_div(keys, spec.split_keys), 1)
        sums, mean = Float32(0.0), Float32(0.0)
        if tid < spec.head_dim:
            if const_expr(spec.centred):
                sums = v_sum[b, head // spec.group, tid]
            if const_expr(spec.mean):
                mean = v_mean[b, head // spec.group, tid]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        first = stats[3, slot, head, row] if const_expr(spec.centred) else Float32(0.0)
        # a warp's splits in chunks, all loads of a chunk at once; sums relative to the largest reference so far
        reference, highest, value = Float32(-1.0e30), -Float32.inf, Float32(0.0)
        values = cute.make_rmem_tensor(width, Float32)
        values.fill(0.0)
        for begin in cutlass.range(warp, splits, CHUNK * WARPS, unroll=1):
            columns = cute.make_rmem_tensor((width, CHUNK), Float32)
            totals, references, maxima = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(3))
            for j in cutlass.range_constexpr(CHUNK):
                i = slot + cutlass.min(begin + j * WARPS, splits - 1)
                load_columns(parts, (i, head, row, width * lane), columns[None, j])
                totals[j], references[j], maxima[j] = stats[0, i, head, row], stats[1, i, head, row], stats[2, i, head, row]
            top = reference
            for j in cutlass.range_constexpr(CHUNK):
                top = cute.arch.fmax(top, references[j])
                highest = cute.arch.fmax(highest, maxima[j])
            weight = exp2(reference - top)
            reference, value = top, value * weight
            for c in cutlass.range_constexpr(width):
                values[c] = values[c] * weight
            for j in cutlass.range_constexpr(CHUNK):
                weight = exp2(references[j] - top)
                if begin + j * WARPS >= splits:
                    weight = Float32(0.0)
                value = value + totals[j] * weight
                for c in cutlass.range_constexpr(width):
                    values[c] = values[c] + columns[c, j] * weight
        for c in cutlass.range_constexpr(width):
            partial[width * lane + c, warp] = values[c]
        if lane == 0:
            scratch[warp, 0], scratch[warp, 1], scratch[warp, 2] = reference, highest, value
        cute.arch.sync_threads()
        reference, highest = scratch[0, 0], scratch[0, 1]
        for w in cutlass.range_constexpr(1, WARPS):
            reference, highest = cute.arch.fmax(reference, scratch[w, 0]), cute.arch.fmax(highest, scratch[w, 1])
        weights = [exp2(scratch[w, 0] - reference) for w in range(WARPS)]
        value = Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            value = value + scratch[w, 2] * weights[w]
        empty = value == 0.0
        inverse = Float32(0.0) if empty else cute.arch.rcp_approx(value)
        center = Float32(0.0)
        if const_expr(spec.centred):
            center = exp2(first - reference) if keys > 0 else Float32(0.0)
        out_row = b * queries + row
        if tid < spec.head_dim:
            o = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                o = o + partial[tid, w] * weights[w]
            if const_expr(spec.centred):
                o = o + center * sums
            o = o * inverse
            if const_expr(spec.outputs == 2):
                centred[out_row, head, tid] = o.to(BFloat16)
            if const_expr(spec.mean):
                o = o + (Float32(0.0) if empty else mean)
            out[out_row, head, tid] = o.to(BFloat16)
        if tid == 0:
            exponent = log2(value) + (reference - highest)
            store_statistics(Output(lse, maximum, total), (head, out_row), empty, highest, exponent)


@kernel_cache
def _compile_merge(arch: str, offsets_dtype: str, spec: ForwardSpec):
    d = spec.head_dim
    slots, heads, kv_heads, queries, batch, rows = (symbol() for _ in range(6))
    vectors = fake("float32", (batch, kv_heads, d), compact=True)
    out = fake("bfloat16", (rows, heads, d), compact=True)
    row_stats = fake("float32", (heads, rows), align=4, compact=True)
    return build(
        arch,
        Merge(spec),
        fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8),
        fake("float32", (slots, heads, queries, d), compact=True),
        fake("float32", (4, slots, heads, queries), align=4, compact=True),
        vectors if spec.centred else None,
        vectors if spec.mean else None,
        out,
        out if spec.outputs == 2 else None,
        row_stats,
        row_stats,
        row_stats,
    )


def merge(
    spec: ForwardSpec,
    offsets: Tensor,
    parts: Tensor,
    stats: Tensor,
    v_sum: Tensor | None,
    v_mean: Tensor | None,
    result: ForwardResult,
) -> None:
    """Fill ``result`` from the splits' ``parts [slots, H, Q, D]`` and ``stats [4, slots, H, Q]``, both fp32."""
    launch(
        _compile_merge(arch_of(parts.device), dtype_name(offsets), spec),
        parts.device,
        offsets,
        parts,
        stats,
        v_sum,
        v_mean,
        result.out,
        result.centred_out if spec.outputs == 2 else None,
        result.lse,
        result.row_max,
        result.row_sum,
    )
