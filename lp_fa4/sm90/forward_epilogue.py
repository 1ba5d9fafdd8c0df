"""The end of a query tile: row sums and maxima out of registers, O divided, centred part added, stored as BF16."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr

from lp_fa4.common.numbers import exp2, log2, quad_max, quad_sum, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.worklist import FIELDS

LN_2 = math.log(2.0)
EPILOGUE = 8  # first of two named barriers, one per warpgroup


@cute.jit
def row_sum(spec: cutlass.Constexpr, total: cute.Tensor, state, r: cutlass.Constexpr, center: Float32, keys: Int32) -> Float32:
    """Sum of p relative to the row's reference (not scaled)."""
    value = quad_sum(state.sum[r])
    if const_expr(spec.mma_sum):
        value = value + total[2 * r + 4 * (spec.head_dim // 8)]
    value = value * 2.0**-spec.p_scale_log2
    if const_expr(spec.mma_sum and spec.centred):
        value = value + center * Float32(keys)
    return value


@cute.jit
def store_rows(out: cute.Tensor, tile: cute.Tensor, head: Int32, out_row: Int32, rows: Int32, thread: Int32, head_dim: cutlass.Constexpr):
    """Shared BF16 tile ``[64, D]`` (swizzled) to ``out[out_row + i, head, :]`` for ``i < rows``, 16 bytes a thread."""
    lanes = head_dim // 8
    per_pass = 128 // lanes
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=128)
    layout = cute.make_layout((per_pass, lanes), stride=(lanes, 1))
    copy = cute.make_tiled_copy_tv(atom, layout, cute.make_layout((1, 8))).get_slice(thread)
    source = copy.partition_S(tile)
    values = cute.make_fragment_like(source)
    cute.copy(atom, source, values)
    words = cute.recast_tensor(values, Uint32)
    for i in cutlass.range_constexpr(64 // per_pass):
        row = i * per_pass + thread // lanes
        if row < rows:
            index = (out_row + row, head, 8 * (thread % lanes))
            address = (out.iterator + cute.crd2idx(index, out.layout)).toint()
            pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=16)
            piece = cute.make_rmem_tensor(4, Uint32)
            for w in cutlass.range_constexpr(4):
                piece[w] = words[4 * i + w]
            cute.autovec_copy(piece, cute.make_tensor(pointer, cute.make_layout(4)))


@cute.jit
def stage_and_store(
    spec: cutlass.Constexpr, s, mma, values: cute.Tensor, out: cute.Tensor, wg: Int32, head: Int32, out_row: Int32, rows: Int32
):
    """One warpgroup's 64 rows through its part of shared memory to global memory."""
    tid, _, _ = cute.arch.thread_idx()
    thread = tid % 128
    copy = mma.store.get_slice(thread)
    cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)  # the last read of the staging tile is over
    cute.copy(copy, copy.retile(values), copy.partition_D(s.o)[None, None, None, wg])
    cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)
    store_rows(out, s.o[None, None, wg], head, out_row, rows, thread, spec.head_dim)


@cute.jit
def store_statistics(t, index, empty, maximum: Float32, exponent: Float32):
    """lse (natural), row maximum (log2) and row sum ``2**exponent`` relative to it; a row without keys: -inf, -inf, 0."""
    t.maximum[index] = -Float32.inf if empty else maximum
    t.sum[index] = Float32(0.0) if empty else exp2(exponent)
    t.lse[index] = -Float32.inf if empty else (maximum + exponent) * LN_2


@cute.jit
def finish(spec: cutlass.Constexpr, t, s, mma, total: cute.Tensor, state, item: cute.Tensor, qi: Int32):
    """Write out, centred out, lse, row maximum and row sum of this warpgroup's rows of the item in stage ``qi``."""
    tid, _, _ = cute.arch.thread_idx()
    thread, lane = tid % 128, tid % 32
    wg = cute.arch.make_warp_uniform((tid - 128) // 128)
    b, head, row0, first_row = item[0], item[1], item[2], item[3]
    queries, keys = item[4], item[6]
    tile_row = row0 + wg * 64
    first_out = b * queries if const_expr(spec.shared) else first_row
    factor = Float32(2.0**-spec.p_scale_log2)
    if const_expr(spec.value_scale == 0):
        factor = factor * scale_of_byte(item[FIELDS + 2])
    inverse, centers, seen = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    for r in cutlass.range_constexpr(2):
        maximum = quad_max(state.maximum[r])
        center = Float32(0.0)
        if const_expr(spec.centred):
            center = exp2(state.mean[r] - state.reference[r]) if keys > 0 else Float32(0.0)
        value = row_sum(spec, total, state, r, center, keys)
        empty = value == 0.0
        inverse[r] = Float32(0.0) if empty else cute.arch.rcp_approx(value)
        seen[r] = Float32(0.0) if empty else Float32(1.0)
        centers[r] = center * inverse[r]
        row = tile_row + thread // 32 * 16 + lane // 4 + 8 * r
        if (lane % 4 == 0) & (row < queries):
            exponent = log2(value) + (state.reference[r] - maximum)
            store_statistics(t, (head, first_out + row), empty, maximum, exponent)
    values = cute.make_rmem_tensor(mma.out.partition_shape_C((64, spec.head_dim)), BFloat16)
    vectors = s.vectors
    column = 2 * (lane % 4)
    for j in cutlass.range_constexpr(spec.head_dim // 8):
        for c in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                i = c + 2 * r + 4 * j
                o = total[i] * (factor * inverse[r])
                if const_expr(spec.centred):
                    o = o + centers[r] * vectors[8 * j + c + column, 0, qi]
                total[i] = o
                values[i] = o.to(BFloat16)
    rows = queries - tile_row
    if const_expr(spec.mean):
        stage_and_store(spec, s, mma, values, t.centred, wg, head, first_out + tile_row, rows)
        for j in cutlass.range_constexpr(spec.head_dim // 8):
            for c in cutlass.range_constexpr(2):
                mean = vectors[8 * j + c + column, spec.vectors - 1, qi]
                for r in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    values[i] = (total[i] + mean * seen[r]).to(BFloat16)
    stage_and_store(spec, s, mma, values, t.out, wg, head, first_out + tile_row, rows)


assert KEY_TILE == QUERY_TILE == 128
