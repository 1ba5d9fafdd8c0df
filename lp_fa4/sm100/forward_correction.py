"""Correction warps of the forward: keep O on the scale of the running maximum, and write the results.

They serve both Q tiles. A softmax warpgroup posts one message per key tile after the first, the factor of its rows, and at an item's end
the row sums and maxima. Only a warp with a row that moved its maximum touches O (rare with a lazy maximum).

O may be touched as soon as the message for key tile n is there: the scores of tile n were issued after the product P V of tile n - 1, and
the softmax waited for those scores.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import scale_of_byte
from lp_fa4.sm100.atoms import load_columns, store_columns
from lp_fa4.sm100.config import QUERY_TILE
from lp_fa4.sm100.sync import arrive, arrive_tensor, wait, wait_tensor
from lp_fa4.sm100.work import fetch, first_index, item_steps, next_index

LN_2 = math.log(2.0)
CHUNK = 16
"""Columns of O in registers at a time."""


@cute.jit
def correction_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, warp: Int32, thread: Int32):
    """Serve this CTA's items. ``warp``: 0..3; ``thread``: 0..127, the row of a tile."""
    spec, bar = kernel.spec, kernel.barriers
    index, end = first_index(kernel, args)
    turn = Int32(0)
    base0, base1, items0, items1 = Int32(0), Int32(0), Int32(0), Int32(0)
    while index < end:
        item = fetch(spec, args.records, index)
        for n in cutlass.range(1, item.steps, unroll=1):
            for i in cutlass.range_constexpr(2):
                if n < item_steps(item, i):
                    message = (base0 if i == 0 else base1) + n - 1
                    wait_tensor(bars + bar.mail_full + i, message & 1)
                    factor = shared.mail[thread, 0, i]
                    arrive(bars + bar.mail_empty + i)
                    if cute.arch.vote_any_sync(factor < 1.0):
                        rescale(kernel, tmem, i, warp * 32, factor)
                    arrive_tensor(bars + bar.o_ready + i)
        for i in cutlass.range_constexpr(2):
            steps = item_steps(item, i)
            if steps > 0:
                message = (base0 if i == 0 else base1) + steps - 1
                wait(bars + bar.mail_full + i, message & 1)
                total, lazy, exact, centre = [shared.mail[thread, j, i] for j in range(4)]
                arrive(bars + bar.mail_empty + i)
                wait_tensor(bars + bar.o_full + i, (items0 if i == 0 else items1) & 1)
                epilogue(kernel, args, bars, tmem, i, warp * 32, thread, item, (total, lazy, exact, centre))
        base0 += item.steps0
        base1 += item.steps1
        items0 += Int32(1) if item.steps0 > 0 else Int32(0)
        items1 += Int32(1) if item.steps1 > 0 else Int32(0)
        index = next_index(kernel, shared, bars, index, turn)
        turn += 1


@cute.jit
def rescale(kernel: cutlass.Constexpr, tmem, tile: cutlass.Constexpr, lanes, factor):
    """Multiply this thread's row of O by ``factor``. ``lanes``: first lane of the warp."""
    start = kernel.plan[f"O{tile}"].start
    for c in cutlass.range_constexpr(kernel.spec.head_dim // CHUNK):
        o = load_columns(tmem, start + c * CHUNK, CHUNK, lanes)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(0, CHUNK, 2):
            o[j], o[j + 1] = cute.arch.mul_packed_f32x2((o[j], o[j + 1]), (factor, factor))
        store_columns(tmem, start + c * CHUNK, CHUNK, lanes, o)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def epilogue(kernel: cutlass.Constexpr, args, bars, tmem, tile: cutlass.Constexpr, lanes, thread, item, stats):
    """Write one row: ``Oc = (O + c * v_sum) / l``, ``out = Oc + v_mean``, lse, exact maximum and its row sum.

    The row sum and c carry P's constant scale, as O does, so no power of two is undone here. A row that saw no key has O undefined (its
    products were skipped): it is selected away, not multiplied.
    """
    spec = kernel.spec
    total, lazy, exact, centre = stats
    start = kernel.plan[f"O{tile}"].start
    local = item.row + tile * QUERY_TILE + thread
    live = local < item.queries
    row = item.first_query + local
    if const_expr(spec.shared_q):
        row = item.sequence * item.queries + local
    blind = exact == -Float32.inf
    inverse = Float32(1.0) / total
    kv_head = item.head // spec.group
    if const_expr(not spec.block_scaled and not spec.fold_v):
        factor = scale_of_byte(Int32(args.sf_v[0, kv_head]))
    for c in cutlass.range_constexpr(spec.head_dim // CHUNK):
        o = load_columns(tmem, start + c * CHUNK, CHUNK, lanes)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(c == spec.head_dim // CHUNK - 1):
            arrive_tensor(bars + kernel.barriers.o_ready + tile)
        if live:
            if const_expr(not spec.block_scaled and not spec.fold_v):
                for j in cutlass.range_constexpr(CHUNK):
                    o[j] = o[j] * factor
            values = cute.make_rmem_tensor(CHUNK, Float32)
            if const_expr(spec.centred):
                sums = _read(args.v_sum, item.sequence, kv_head, c)
                for j in cutlass.range_constexpr(CHUNK):
                    values[j] = (o[j] + centre * sums[j]) * inverse
            else:
                for j in cutlass.range_constexpr(CHUNK):
                    values[j] = o[j] * inverse
            for j in cutlass.range_constexpr(CHUNK):
                values[j] = Float32(0.0) if blind else values[j]
            if const_expr(spec.save):
                _write(args.saved, row, item.head, c, values)
            if const_expr(spec.v_mean):
                mean = _read(args.v_mean, item.sequence, kv_head, c)
                for j in cutlass.range_constexpr(CHUNK):
                    values[j] = Float32(0.0) if blind else values[j] + mean[j]
            _write(args.out, row, item.head, c, values)
    if live:
        lse = (lazy + cute.math.log2(total, fastmath=True) - spec.p_shift) * LN_2
        rebased = total * Float32(2.0**-spec.p_shift) * cute.math.exp2(lazy - exact, fastmath=True)
        args.lse[item.head, row] = -Float32.inf if blind else lse
        args.row_max[item.head, row] = exact
        args.row_sum[item.head, row] = Float32(0.0) if blind else rebased


@cute.jit
def _read(source: cute.Tensor, sequence, head, chunk: cutlass.Constexpr):
    values = cute.make_rmem_tensor(CHUNK, Float32)
    cute.autovec_copy(cute.local_tile(source[sequence, head, None], (CHUNK,), (chunk,)), values)
    return values


@cute.jit
def _write(target: cute.Tensor, row, head, chunk: cutlass.Constexpr, values):
    there = cute.local_tile(target[row, head, None], (CHUNK,), (chunk,))
    rounded = cute.make_rmem_tensor(CHUNK, target.element_type)
    rounded.store(values.load().to(target.element_type))
    cute.autovec_copy(rounded, there)
