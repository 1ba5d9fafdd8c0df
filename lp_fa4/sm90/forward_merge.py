"""Splits of a sequence's keys merged into one result, in a fixed order.

Every split left O, row sum, reference and maximum of its keys, each relative to its own reference; with centred P all
splits of a sequence share the mean that gives the centre. One CTA merges one query row of one head: its warps take
splits in turn, each adds its own up, and their sums are added in order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from torch import Tensor

from lp_fa4.common.halves import half_of
from lp_fa4.common.numbers import exp2, log2, scale_of_byte
from lp_fa4.common.rows import fma
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.problem import ForwardResult
from lp_fa4.sm90.forward_config import ForwardSpec
from lp_fa4.sm90.forward_epilogue import store_statistics
from lp_fa4.sm90.forward_few import place_of

WARPS = 8
CHUNK = 8
"""Splits whose loads a warp has under way at once."""


class Output:
    """The statistics' tensors by the names that ``store_statistics`` expects."""

    def __init__(self, lse, maximum, total):
        self.lse, self.maximum, self.sum = lse, maximum, total


@cute.jit
def load_run(place: Int64, out: cute.Tensor):
    """Neighbouring elements of device memory, four bytes each of ``out``, in one load."""
    size = cute.size(out)
    source = cute.make_ptr(out.element_type, place, cute.AddressSpace.gmem, assumed_align=4 * size)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(size)), out)


def column_of(lane, i: int, width: int, few: bool):
    """Column of O that is a lane's ``i``-th of a part; ``forward_few`` leaves its threads' columns side by side."""
    return 64 * (i // 2) + 16 * (lane // 8) + lane % 8 + 8 * (i % 2) if few else width * lane + i


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
        v_scale: cute.Tensor,
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
        self.kernel(offsets, parts, stats, v_scale, v_sum, v_mean, out, centred, lse, maximum, total, heads, queries).launch(
            grid=[rows, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        v_scale: cute.Tensor,
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
        few, halves = spec.parts != "", spec.parts == "float16"
        words = width // 2 if halves else width
        unit = Float32(2.0 ** -(spec.p_scale_log2 + spec.parts_log2))
        if const_expr(few and spec.value_scale == 0):
            unit = unit * scale_of_byte(Int32(v_scale[0, head // spec.group]))
        # from split to split an address grows by a constant: by their indices, addresses were half of what came before the loads
        part_place, part_step = place_of(parts, (slot, head, row, width * lane)), heads * queries * (4 * words * 32)
        record_place, record_step = Int64(0), heads * queries * 16
        if const_expr(few):
            record_place = place_of(stats, (slot, head, row, 0))
        sums, mean = Float32(0.0), Float32(0.0)
        if tid < spec.head_dim:
            if const_expr(spec.centred):
                sums = v_sum[b, head // spec.group, tid]
            if const_expr(spec.mean):
                mean = v_mean[b, head // spec.group, tid]
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        first = Float32(0.0)
        if const_expr(spec.centred):
            first = stats[slot, head, row, 3] if const_expr(few) else stats[3, slot, head, row]
        # a warp's splits in chunks, all loads of a chunk at once; sums relative to the largest reference so far
        reference, highest, value = Float32(-1.0e30), -Float32.inf, Float32(0.0)
        values = cute.make_rmem_tensor(width, Float32)
        values.fill(0.0)
        for begin in cutlass.range(warp, splits, CHUNK * WARPS, unroll=1):
            columns = cute.make_rmem_tensor((words, CHUNK), Int32 if halves else Float32)
            totals, references, maxima = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(3))
            for j in cutlass.range_constexpr(CHUNK):
                split = cutlass.min(begin + j * WARPS, splits - 1)
                load_run(part_place + Int64(split) * Int64(part_step), columns[None, j])
                if const_expr(few):
                    record = cute.make_rmem_tensor(4, Float32)
                    load_run(record_place + Int64(split) * Int64(record_step), record)
                    totals[j], references[j], maxima[j] = record[0], record[1], record[2]
                else:
                    i = slot + split
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
                    if const_expr(halves):
                        values[c] = values[c] + half_of(columns[c // 2, j], c % 2) * weight
                    else:
                        values[c] = values[c] + columns[c, j] * weight
        for c in cutlass.range_constexpr(width):
            place = column_of(lane, c, width, few)
            partial[place, warp] = values[c]
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
            if const_expr(few):
                o = o * unit
            if const_expr(spec.centred):
                o = o + center * sums
            whole = o * inverse
            if const_expr(spec.outputs == 2):
                centred[out_row, head, tid] = whole.to(BFloat16)
            if const_expr(spec.mean):  # rounded once in either form, so that the output has the same bits with and without the centred
                whole = fma(o, inverse, Float32(0.0) if empty else mean)
            out[out_row, head, tid] = whole.to(BFloat16)
        if tid == spec.head_dim:  # of a warp that stores no O
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
        fake_offsets(offsets_dtype),
        fake(spec.parts or "float32", (slots, heads, queries, d), compact=True),
        fake("float32", (slots, heads, queries, 4), compact=True)
        if spec.parts
        else fake("float32", (4, slots, heads, queries), align=4, compact=True),
        fake("uint8", (symbol(), kv_heads), align=1) if spec.parts and spec.value_scale == 0 else None,
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
    v_scale: Tensor,
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
        v_scale if spec.parts and spec.value_scale == 0 else None,
        v_sum,
        v_mean,
        result.out,
        result.centred_out if spec.outputs == 2 else None,
        result.lse,
        result.row_max,
        result.row_sum,
    )
