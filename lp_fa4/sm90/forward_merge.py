"""Splits of a sequence's keys merged into one result, in a fixed order.

Every split left O, row sum, reference and maximum of its keys, each relative to its own reference; with centred P all
splits of a sequence share the mean that gives the centre. One warp merges one query row of one head.
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

WARPS = 4


class Output:
    """The statistics' tensors by the names that ``store_statistics`` expects."""

    def __init__(self, lse, maximum, total):
        self.lse, self.maximum, self.sum = lse, maximum, total


class Merge:
    """Rows of a grid ``[batch, heads, queries]``, one warp each."""

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
        self.kernel(offsets, parts, stats, v_sum, v_mean, out, centred, lse, maximum, total, rows, heads, queries).launch(
            grid=[cute.ceil_div(rows, WARPS), 1, 1], block=[32 * WARPS, 1, 1], stream=stream
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
        rows: Int32,
        heads: Int32,
        queries: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        index, lane = bid * WARPS + tid // 32, tid % 32
        width = spec.head_dim // 32
        if index < rows:
            row, rest = index % queries, index // queries
            head, b = rest % heads, rest // heads
            first_key = Int32(offsets[b])
            keys = Int32(offsets[b + 1]) - first_key
            slot = first_key // spec.split_keys + b
            splits = cutlass.max(cute.ceil_div(keys, spec.split_keys), 1)
            reference, highest = -Float32.inf, -Float32.inf
            for i in cutlass.range(splits, unroll=4):
                reference = cute.arch.fmax(reference, stats[1, slot + i, head, row])
                highest = cute.arch.fmax(highest, stats[2, slot + i, head, row])
            values = cute.make_rmem_tensor(width, Float32)
            values.fill(0.0)
            value = Float32(0.0)
            for i in cutlass.range(splits, unroll=2):
                weight = exp2(stats[1, slot + i, head, row] - reference)
                value = value + stats[0, slot + i, head, row] * weight
                for c in cutlass.range_constexpr(width):
                    values[c] = values[c] + parts[slot + i, head, row, lane + 32 * c] * weight
            empty = value == 0.0
            inverse = Float32(0.0) if empty else cute.arch.rcp_approx(value)
            center = Float32(0.0)
            if const_expr(spec.centred):
                center = exp2(stats[3, slot, head, row] - reference) if keys > 0 else Float32(0.0)
            out_row = b * queries + row
            for c in cutlass.range_constexpr(width):
                column = lane + 32 * c
                o = values[c]
                if const_expr(spec.centred):
                    o = o + center * v_sum[b, head // spec.group, column]
                o = o * inverse
                if const_expr(spec.mean):
                    centred[out_row, head, column] = o.to(BFloat16)
                    o = o + (Float32(0.0) if empty else v_mean[b, head // spec.group, column])
                out[out_row, head, column] = o.to(BFloat16)
            if lane == 0:
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
        out if spec.mean else None,
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
        result.centred_out if spec.mean else None,
        result.lse,
        result.row_max,
        result.row_sum,
    )
