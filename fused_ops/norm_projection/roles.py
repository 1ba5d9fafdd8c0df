"""The warp that brings the weight, and two warpgroups that find rows' factors, multiply and quantize."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from fused_ops.norm_projection.config import DEPTH, HALF, ITEMS, RUN_COLUMNS, THREADS
from fused_ops.norm_projection.norm import PIECE, NormRole
from fused_ops.norm_projection.tiles import OVER
from fused_ops.rings import release, turn
from fused_ops.rmsnorm_quantize.arithmetic import nan_unless_finite, store
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.halves import e4m3_of
from lp_fa4.common.matrices import load_matrices
from lp_fa4.common.numbers import e4m3x4
from lp_fa4.sm90.wgmma import issue


@cute.jit
def bring_weight(spec: cutlass.Constexpr, io, s, bars):
    """The warp that brings the weight, piece by piece, for as many rounds as there are tiles, and what the second warpgroup lags behind."""
    w_atom, w_tensor = io.w
    w = cute.local_tile(w_tensor, (spec.column_tile, DEPTH), (None, None))
    sharing = cute.make_layout(spec.cluster)
    target, source = cpasync.tma_partition(w_atom, io.rank, sharing, cute.group_modes(s.w, 0, 2), cute.group_modes(w, 0, 2))
    at, phase, n, slot, slot_phase, item = Int32(0), Int32(1), Int32(0), Int32(0), Int32(0), s.item
    rounds, over = Int32(0), False
    while not over:
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        over = item[5, slot] == OVER
        release(bars.item_empty + slot)
        slot, slot_phase = turn(slot, slot_phase, ITEMS)
        rounds = Int32(spec.offset) if over else Int32(spec.column_tiles)
        at, phase, n = send_rounds(spec, bars, io, w_atom, source, target, rounds, at, phase, n)


@cute.jit
def send_rounds(spec: cutlass.Constexpr, bars, io, w_atom, source, target, rounds: Int32, at: Int32, phase: Int32, n: Int32):
    """Pieces of the weight for the products of ``rounds`` runs of columns."""
    for _ in cutlass.range(rounds, unroll=1):
        for k in cutlass.range(spec.steps, unroll=1):
            cute.arch.mbarrier_wait(bars.w_empty + at, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.w_full + at, spec.piece_bytes)
            if const_expr(spec.cluster > 1):
                everybody = cutlass.Int16((1 << spec.cluster) - 1)
                cute.copy(w_atom, source[None, n, k], target[None, at], tma_bar_ptr=bars.w_full + at, mcast_mask=everybody)
            else:
                cute.copy(w_atom, source[None, n, k], target[None, at], tma_bar_ptr=bars.w_full + at)
            at, phase = turn(at, phase, spec.pieces)
        n = n + 1
        if n == spec.column_tiles:
            n = Int32(0)
    return at, phase, n


@cute.jit
def free_piece(spec: cutlass.Constexpr, bars, at):
    """This warp's products have read a piece of the weight: all CTAs of the cluster may replace theirs."""
    if const_expr(spec.cluster > 1):
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < spec.cluster:
            cute.arch.mbarrier_arrive(bars.w_empty + at, lane)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.w_empty + at)


@cute.jit
def pass_over(spec: cutlass.Constexpr, bars, at: Int32, phase: Int32):
    """Let the pieces of half a round go by."""
    for _ in cutlass.range(spec.offset * spec.steps, unroll=1):
        cute.arch.mbarrier_wait(bars.w_full + at, phase)
        free_piece(spec, bars, at)
        at, phase = turn(at, phase, spec.pieces)
    return at, phase


@cute.jit
def piece(
    spec: cutlass.Constexpr, s, bars, mma, b, total: cute.Tensor, operand: cute.Tensor, at: Int32, phase: Int32, k: cutlass.Constexpr
):
    """Start the products of a piece of the weight."""
    cute.arch.mbarrier_wait(bars.w_full + at, phase)
    issue(mma, total, operand, b[None, None, None, at], zero=k == 0)


@cute.jit
def quantize(spec: cutlass.Constexpr, io, s, at, n: Int32, total: cute.Tensor):
    """Codes of a product's columns to memory: of every 64 of a row a thread has 16 consecutive ones (``NormProjection.__call__``)."""
    if at.token + HALF <= at.end:
        store_codes(spec, io, s, at, n, total, True)
    else:
        store_codes(spec, io, s, at, n, total, False)


@cute.jit
def store_codes(spec: cutlass.Constexpr, io, s, at, n: Int32, total: cute.Tensor, whole: cutlass.Constexpr):
    """A thread's two rows of :func:`quantize`. ``whole``: all rows of the half are inside."""
    tid, _, _ = cute.arch.thread_idx()
    inverse, run = s.inverse, RUN_COLUMNS // 4
    pairs = cute.recast_tensor(total, Int32) if const_expr(spec.halves) else total
    first = tid % 128 // 32 * 16 + tid % 32 // 4
    for b in cutlass.range_constexpr(spec.column_tile // RUN_COLUMNS):
        column = n * spec.column_tile + RUN_COLUMNS * b + run * (tid % 4)
        factor = Float32(1.0)
        if const_expr(not spec.halves):
            factor = inverse[column // 32]
        for r in cutlass.range_constexpr(2):
            token = at.token + first + 8 * r
            words = cute.make_rmem_tensor(run // 4, Uint32)
            for w in cutlass.range_constexpr(run // 4):
                places = [2 * r + 4 * (8 * b + 2 * w + i) for i in range(2)]
                word = Int32(0)
                if const_expr(spec.halves):  # sums are in units of the codes
                    word = e4m3_of(*[pairs[i // 2] for i in places])
                else:
                    values = [total[c + i] * factor for i in places for c in range(2)]
                    word = e4m3x4(*[nan_unless_finite(v) for v in values])
                words[w] = Uint32(word if const_expr(whole) else (word if token < at.end else Int32(0)))
            if const_expr(whole):
                store(words, io.keys, token, column, run)
            else:
                if token < at.limit:
                    store(words, io.keys, token, column, run)


@cute.jit
def look_ahead(spec: cutlass.Constexpr, io, s, bars, wg, slot: Int32, slot_phase: Int32, stage: Int32, phase: Int32):
    """A multiplying warpgroup finds the factors of the rows of its next half, if there is one, for the warps that normalize."""
    item = s.item
    tid, _, _ = cute.arch.thread_idx()
    tid = tid % 128
    cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
    if item[5, slot] != OVER:
        at = Bundle(token=item[0, slot] + HALF * wg, end=item[1, slot], limit=item[2, slot], slot=slot, stage=stage)
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        NormRole(spec).factors_of_half(io, s, at, tid % spec.norm.lanes, tid // spec.norm.lanes)
        release(bars.factored + stage)


@cute.jit
def multiply(spec: cutlass.Constexpr, io, s, bars, mma):
    """A multiplying warpgroup: every second half, times the weight that runs past. While one quantizes its sums the other multiplies."""
    tid, _, _ = cute.arch.thread_idx()
    item = s.item
    wg = cute.arch.make_warp_uniform((tid - (THREADS - 256)) // 128)
    warp, lane = cute.arch.make_warp_uniform(tid % 128 // 32), cute.arch.lane_idx()
    b = mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(s.w))
    operands = [mma.make_fragment_A(mma.partition_shape_A((HALF, DEPTH))) for _ in range(spec.steps)]
    total = cute.make_rmem_tensor(mma.partition_shape_C((HALF, spec.column_tile)), Float16 if const_expr(spec.halves) else Float32)
    row = 16 * warp + lane % 16
    rows = s.rows.toint() + row * 128
    stage, phase, slot, slot_phase, at, at_phase, n = wg, Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if const_expr(not spec.direct):
        look_ahead(spec, io, s, bars, wg, slot, slot_phase, stage, phase)
    if wg == 1:
        at, at_phase = pass_over(spec, bars, at, at_phase)
        n = Int32(spec.offset)
    cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
    while item[5, slot] != OVER:
        next_token, next_end, next_limit = item[0, slot] + HALF * wg, item[1, slot], item[2, slot]
        release(bars.item_empty + slot)
        slot, slot_phase = turn(slot, slot_phase, ITEMS)
        cute.arch.mbarrier_wait(bars.normed + stage, phase)
        for k in cutlass.range_constexpr(spec.steps):
            a = cute.recast_tensor(operands[k], Int32)
            for i in cutlass.range_constexpr(4):
                chunk = (lane // 16 + 2 * i) ^ (row % 8)
                words = load_matrices(Int32(rows + (stage * spec.steps + k) * PIECE + 16 * chunk))
                for j in cutlass.range_constexpr(4):
                    a[4 * i + j] = words[j]
        release(bars.empty + stage)
        stage = stage + 2
        if stage >= spec.stages:
            stage, phase = stage - spec.stages, phase ^ 1
        for turn_of in cutlass.range(spec.column_tiles, unroll=1):
            if const_expr(spec.pieces == spec.steps):
                at = Int32(0)
            first = at  # the oldest piece that is still read
            for k in cutlass.range_constexpr(spec.steps):
                piece(spec, s, bars, mma, b, total, operands[k], at, at_phase, k)
                if const_expr(spec.whole):
                    at = at + 1
                else:
                    at, at_phase = turn(at, at_phase, spec.pieces)
                if const_expr(k > 0):
                    warpgroup.wait_group(1)
                    free_piece(spec, bars, first)
                    if const_expr(spec.whole):
                        first = first + 1
                    else:
                        first, _ = turn(first, Int32(0), spec.pieces)
            warpgroup.wait_group(0)
            free_piece(spec, bars, first)
            if const_expr(spec.whole):  # noqa: SIM102 - one is decided at compile time
                if at == spec.pieces:
                    at, at_phase = Int32(0), at_phase ^ 1
            quantize(spec, io, s, Bundle(token=next_token, end=next_end, limit=next_limit), n, total)
            n = n + 1
            if n == spec.column_tiles:
                n = Int32(0)
            if const_expr(not spec.direct):  # noqa: SIM102 - one is decided at compile time
                if turn_of == spec.looks:
                    look_ahead(spec, io, s, bars, wg, slot, slot_phase, stage, phase)
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
    if wg == 0:
        pass_over(spec, bars, at, at_phase)
