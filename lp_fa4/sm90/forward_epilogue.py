"""The end of a query tile: row sums and maxima out of registers, O divided, centred part added, stored as BF16."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.common.numbers import exp2, log2, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, QUERY_TILE
from lp_fa4.sm90.forward_softmax import center_of, maximum_of, mean_of, sum_of
from lp_fa4.sm90.worklist import FIELDS

LN_2 = math.log(2.0)
EPILOGUE = 8  # first of two named barriers, one per warpgroup


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
def store_tile(spec: cutlass.Constexpr, output, tile: cute.Tensor, head: Int32, out_row: Int32, rows: Int32):
    """One warpgroup's staged 64 rows to ``out[out_row :, head]``: by TMA where all are the sequence's, else row by row.

    ``output``: (TMA atom, its tensor, the plain tensor).
    """
    atom, by_tma, out = output
    tid, _, _ = cute.arch.thread_idx()
    if rows >= 64:
        if tid % 128 < 32:
            target = cute.domain_offset((out_row, 0), by_tma[None, None, head])
            target = cute.local_tile(target, (64, spec.head_dim), (0, 0))
            one = cute.make_layout(1)
            source, target = cpasync.tma_partition(atom, 0, one, cute.group_modes(tile, 0, 2), cute.group_modes(target, 0, 2))
            cute.copy(atom, source, target)
    else:
        store_rows(out, tile, head, out_row, rows, tid % 128, spec.head_dim)


@cute.jit
def store_statistics(t, index, empty, maximum: Float32, exponent: Float32):
    """lse (natural), row maximum (log2) and row sum ``2**exponent`` relative to it; a row without keys: -inf, -inf, 0."""
    t.maximum[index] = -Float32.inf if empty else maximum
    t.sum[index] = Float32(0.0) if empty else exp2(exponent)
    t.lse[index] = -Float32.inf if empty else (maximum + exponent) * LN_2


@cute.jit
def value_factor(spec: cutlass.Constexpr, state, item: cute.Tensor) -> Float32:
    """Power of two that O lacks: V's exponent where that is static, or the last tile's."""
    if const_expr(spec.value_scale == 0):
        return scale_of_byte(item[FIELDS + 2])
    return exp2(state.exponents[1]) if const_expr(spec.value_scale == 128) else Float32(1.0)


@cute.jit
def row_numbers(spec: cutlass.Constexpr, state, item: cute.Tensor):
    """Of a thread's two rows, lists of FP32: factor of O, centre over sum, 1 where a key was seen, maximum, log2 of the sum relative to it.

    Taken while the last P V runs.
    """
    factor = Float32(2.0**-spec.p_log2) * value_factor(spec, state, item)
    scale, centers, seen, maxima, exponents = [], [], [], [], []
    for r in cutlass.range_constexpr(2):
        maximum, value = maximum_of(spec, state, r), sum_of(spec, state, r)
        empty = value == 0.0
        inverse = Float32(0.0) if empty else cute.arch.rcp_approx(value)
        center = Float32(0.0)
        if const_expr(spec.centred):
            center = center_of(spec, state, r) if item[6] > 0 else Float32(0.0)
        scale.append(factor * inverse)
        centers.append(center * inverse)
        seen.append(Float32(0.0) if empty else Float32(1.0))
        maxima.append(maximum)
        exponent = log2(value) + (state.reference[r] - maximum)
        exponents.append(exponent + state.cut[0] if const_expr(spec.halves) else exponent)
    return scale, centers, seen, maxima, exponents


@cute.jit
def finish(spec: cutlass.Constexpr, t, s, mma, total: cute.Tensor, numbers, item: cute.Tensor, qi: Int32):
    """Write out, centred out, lse, row maximum and row sum of this warpgroup's rows of the item in stage ``qi``.

    ``numbers``: of ``row_numbers``. The maximum is returned in the exact scale (``ForwardSpec.halves`` rounds it).
    """
    tid, _, _ = cute.arch.thread_idx()
    thread, lane = tid % 128, tid % 32
    wg = cute.arch.make_warp_uniform((tid - 128) // 128)
    b, head, row0, first_row = item[0], item[1], item[2], item[3]
    queries = end = item[4]
    if const_expr(spec.half_sums):
        other = (item[7] > 0) & (item[7] != wg + 1)  # the second launch has one warpgroup's rows to do again
        end = Int32(0) if other else end
    tile_row = row0 + wg * 64
    first_out = b * queries if const_expr(spec.shared) else first_row
    scale, centers, seen, maxima, exponents = numbers
    copy = mma.store.get_slice(thread)
    staged = copy.partition_D(s.o)
    if thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)  # what was staged before has been read
    values = cute.make_rmem_tensor(mma.out.partition_shape_C((64, spec.head_dim)), BFloat16)
    column = 2 * (lane % 4)
    for output in cutlass.range_constexpr(spec.outputs):
        last = const_expr(output == spec.outputs - 1)
        for j in cutlass.range_constexpr(spec.head_dim // 8):
            sums, means = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
            if const_expr(spec.centred and output == 0):
                load_pair(s.vectors, 8 * j + column, 0, qi, sums)
            if const_expr(spec.mean and last):
                load_pair(s.vectors, 8 * j + column, spec.vectors - 1, qi, means)
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    if const_expr(output == 0):
                        total[i] = total[i] * scale[r]
                        if const_expr(spec.centred):
                            total[i] = total[i] + centers[r] * sums[c]
                    value = total[i]
                    if const_expr(spec.mean and last):
                        value = value + means[c] * seen[r]
                    values[i] = value.to(BFloat16)
        cute.copy(copy, copy.retile(values), staged[None, None, None, 2 * output + wg])
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)
    rows, out_row = end - tile_row, first_out + tile_row
    if const_expr(spec.outputs == 2):
        store_tile(spec, t.centred, s.o[None, None, wg], head, out_row, rows)
        store_tile(spec, t.out, s.o[None, None, 2 + wg], head, out_row, rows)
    else:
        store_tile(spec, t.out, s.o[None, None, wg], head, out_row, rows)
    if thread < 32:
        cute.arch.cp_async_bulk_commit_group()
    # behind the fence, which would wait for them
    for r in cutlass.range_constexpr(2):
        row = tile_row + thread // 32 * 16 + lane // 4 + 8 * r
        if (lane % 4 == 0) & (row < end):
            store_statistics(t, (head, first_out + row), seen[r] == 0.0, maxima[r] * t.stretch, exponents[r])


@cute.jit
def finish_split(spec: cutlass.Constexpr, t, total: cute.Tensor, state, item, row_in_tile: Int32, column: Int32):
    """A split's part of its rows, relative to each row's reference: O in FP32, sum, reference, maximum and mean."""
    head, queries = item[1], item[4]
    slot = item[5] // spec.split_keys + item[0] + item[7]
    scale = Float32(2.0**-spec.p_log2) * value_factor(spec, state, item)
    parts, stats = t.parts, t.part_stats
    for r in cutlass.range_constexpr(2):
        maximum, value = maximum_of(spec, state, r), sum_of(spec, state, r)
        row = item[2] + row_in_tile + 8 * r
        if row < queries:
            if column == 0:
                stats[0, slot, head, row], stats[1, slot, head, row] = value, state.reference[r]
                stats[2, slot, head, row] = maximum
                stats[3, slot, head, row] = mean_of(spec, state, r) if const_expr(spec.centred) else Float32(0.0)
            for j in cutlass.range_constexpr(spec.head_dim // 8):
                pair = cute.make_rmem_tensor(2, Float32)
                for c in cutlass.range_constexpr(2):
                    pair[c] = total[c + 2 * r + 4 * j] * scale
                pointer = parts.iterator + cute.crd2idx((slot, head, row, 8 * j + column), parts.layout)
                target = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def load_pair(vectors: cute.Tensor, column: Int32, which: cutlass.Constexpr, stage: Int32, pair: cute.Tensor):
    """Two neighbouring FP32 of a vector in shared memory."""
    pointer = vectors.iterator + cute.crd2idx((column, which, stage), vectors.layout)
    source = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=8)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)


assert KEY_TILE == QUERY_TILE == 128
