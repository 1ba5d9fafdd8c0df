"""The roles of the kernel that normalizes and projects: rows and weight by one warp each, four warps that normalize, two warpgroups that
multiply and quantize."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from fused_ops.norm_projection.config import DEPTH, HALF, ITEMS, NORM_WARPS, RUN_COLUMNS, THREADS, ProjectionSpec
from fused_ops.places import bulk_copy, first_sequence, place
from fused_ops.rings import release, turn
from fused_ops.rmsnorm_quantize.arithmetic import bf16x2_mul, load8_float, mul, nan_unless_finite, prefetch, rsqrt, store, sub
from fused_ops.rmsnorm_quantize.staged import StagedNorm
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.halves import e4m3_of
from lp_fa4.common.matrices import load_matrices
from lp_fa4.common.numbers import bf16x2, bits_of, e4m3x4, f16x2, float_of, prmt
from lp_fa4.sm90.wgmma import issue

FIELDS = 6
"""int32 of an item: first token, end, limit, row, region, tile; the tile is ``MISSING`` for one that does not exist, ``OVER`` after the
last."""
MISSING, OVER = -1, -2
TOGETHER = 4
"""Rows of a lane that are normalized together: their operations hide each other's latency."""
DIRECT_ROWS = 2
"""Rows of a lane that are asked for together for their sums of squares, where they come from L2."""
PIECE = HALF * 128
"""Bytes of 64 rows under one swizzle."""


@cute.jit
def bring_rows(spec: cutlass.Constexpr, io, s, bars):
    """The warp that finds tiles and loads their halves. A CTA alone draws tiles, and passes over those without a row; CTAs of a cluster
    take equally many in turn, for the weight runs past both: of the last ones some do not exist."""
    item, one = s.item, cute.make_layout(1)
    x_atom, x_tensor = io.x
    mean = Int32(s.mean.toint())
    stage, phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(1)
    lane, drawn = cute.arch.lane_idx(), Int32(0)
    near = first_sequence(spec.dense, io.offsets, cutlass.min(io.first, io.tiles - 1))
    tile, past = Int32(io.first), io.tiles if const_expr(spec.cluster == 1) else io.count * io.step
    while tile < past:
        following = tile + io.step
        if const_expr(spec.cluster == 1):
            if lane == 0:
                drawn = cute.arch.atomic_add(io.ticket.iterator, Int32(1))
            following = io.step + cute.arch.shuffle_sync(drawn, 0)
        token, end, limit, row, region, near = place(spec.dense, io.offsets, io.tokens, cutlass.min(tile, io.tiles - 1), near)
        if const_expr(spec.cluster == 1):
            while (token >= limit) & (following < past):
                tile = following
                if lane == 0:
                    drawn = cute.arch.atomic_add(io.ticket.iterator, Int32(1))
                following = io.step + cute.arch.shuffle_sync(drawn, 0)
                token, end, limit, row, region, near = place(spec.dense, io.offsets, io.tokens, tile, near)
        number = tile
        if tile >= io.tiles:
            number, end, limit = Int32(MISSING), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
        cute.arch.fence_view_async_shared()
        with cute.arch.elect_one():
            for i, value in enumerate((token, end, limit, row, region, number)):
                item[i, slot] = value
            if const_expr(spec.centred):
                source = (io.means.iterator + cute.crd2idx((Int64(near), 0), io.means.layout)).toint()
                cute.arch.mbarrier_arrive_and_expect_tx(bars.item_full + slot, 4 * spec.contracted)
                bulk_copy(mean + slot * (4 * spec.contracted), source, 4 * spec.contracted, (bars.item_full + slot).toint())
            else:
                cute.arch.mbarrier_arrive(bars.item_full + slot)
        slot, slot_phase = turn(slot, slot_phase, ITEMS)
        if const_expr(spec.direct):
            for half in cutlass.range(2, unroll=1):
                cute.arch.mbarrier_wait(bars.empty + stage, phase)
                for i in cutlass.range_constexpr(HALF // 32):
                    if token + HALF * half + 32 * i + lane < end:
                        prefetch(x_tensor, token + HALF * half + 32 * i + lane, spec.contracted)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.full + stage)
                stage, phase = turn(stage, phase, spec.stages)
        else:
            x = cute.local_tile(cute.domain_offset((token, 0), x_tensor), (HALF, DEPTH), (None, None))
            target, source = cpasync.tma_partition(x_atom, 0, one, cute.group_modes(s.x, 0, 2), cute.group_modes(x, 0, 2))
            for half in cutlass.range(2, unroll=1):
                cute.arch.mbarrier_wait(bars.empty + stage, phase)
                cute.arch.fence_view_async_shared()  # rows there were written and read by threads
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, spec.stage_bytes)
                for k in cutlass.range_constexpr(spec.steps):
                    cute.copy(x_atom, source[None, half, k], target[None, stage * spec.steps + k], tma_bar_ptr=bars.full + stage)
                stage, phase = turn(stage, phase, spec.stages)
        tile = following
    cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
    with cute.arch.elect_one():
        item[5, slot] = Int32(OVER)
        cute.arch.mbarrier_arrive(bars.item_full + slot)


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
                cute.copy(w_atom, source[None, n, k], target[None, at], tma_bar_ptr=bars.w_full + at, mcast_mask=cutlass.Int16(3))
            else:
                cute.copy(w_atom, source[None, n, k], target[None, at], tma_bar_ptr=bars.w_full + at)
            at, phase = turn(at, phase, spec.pieces)
        n = n + 1
        if n == spec.column_tiles:
            n = Int32(0)
    return at, phase, n


class NormRole(StagedNorm):
    """Warps that turn halves of x into codes, in memory, and into 16-bit rows, in place, in the order of wgmma's operand. Rows that are
    not BF16 are not brought to that place; a thread leaves them there itself, as FP32 in halves (``ProjectionSpec.direct``).

    A half is read twice. First for its rows' factors: a warp's sums of squares are all on their way before the first is needed, and the
    factors of its 16 rows come from one evaluation, a row a lane (half as many as lanes share a row). Then slab by slab: a lane keeps
    weight and mean of its eight columns for all rows. Rows outside their sequence are noise to the product, whose rows are as much outside;
    sums and codes leave them out.
    """

    def __init__(self, spec: ProjectionSpec):
        self.spec, self.steps, self.direct, self.ring, self.halves = spec.norm, spec.steps, spec.direct, spec.stages, spec.halves
        self.compute_threads, self.warps = 32 * NORM_WARPS, NORM_WARPS
        self.row_step = self.compute_threads // self.spec.lanes
        self.passes = HALF // self.row_step
        self.together = min(TOGETHER, self.passes)
        self.element, self.row_bytes = 2, 2 * spec.contracted

    @cute.jit
    def run(self, io, s, bars):
        """Both halves of every tile."""
        spec, item = self.spec, s.item
        tid, _, _ = cute.arch.thread_idx()
        lane, row0 = tid % spec.lanes, tid // spec.lanes
        stage, phase, slot, slot_phase = (Int32(0) for _ in range(4))
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        tile = item[5, slot]
        while tile != OVER:
            token, end, limit = item[0, slot], item[1, slot], item[2, slot]
            totals = cute.make_rmem_tensor((8, spec.slabs), Float32)
            totals.fill(0.0)
            for half in cutlass.range(2, unroll=1):
                cute.arch.mbarrier_wait(bars.full + stage, phase)
                at = Bundle(token=token + HALF * half, end=end, limit=limit, slot=slot, stage=stage)
                self.factors_of_half(io, s, at, lane, row0)
                if at.token + HALF <= end:
                    self.normalise_half(io, s, at, lane, row0, totals, True)
                else:
                    self.normalise_half(io, s, at, lane, row0, totals, False)
                release(bars.normed + stage)
                stage, phase = turn(stage, phase, self.ring)
            if const_expr(spec.centred):  # noqa: SIM102 - one is decided at compile time
                if tile >= 0:
                    self.column_sums(io, s, slot, lane, totals)
            release(bars.item_empty + slot)
            slot, slot_phase = turn(slot, slot_phase, ITEMS)
            cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
            tile = item[5, slot]

    def cell(self, s, stage, row, chunk):
        """Shared address of eight columns of a half's row."""
        return s.rows.toint() + stage * (self.steps * PIECE) + self.place(row, chunk)

    def place(self, row, chunk):
        """Where they lie in a half, in bytes."""
        return chunk // 8 * PIECE + row * 128 + ((chunk % 8) ^ (row % 8)) * 16

    def words_at(self, address):
        """Four words of shared memory."""
        return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4))

    @cute.jit
    def chunk_of(self, s, at, row, chunk, out: cute.Tensor):
        """Eight columns of a half's row as FP32."""
        words = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(self.words_at(self.cell(s, at.stage, row, chunk)), words)
        if const_expr(self.direct):
            low = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(self.words_at(s.low.toint() + self.place(row, chunk)), low)
            for i in cutlass.range_constexpr(4):
                out[2 * i], out[2 * i + 1] = (float_of(prmt(low[i], words[i], selector)) for selector in (0x5410, 0x7632))
        else:
            for i in cutlass.range_constexpr(4):
                out[2 * i], out[2 * i + 1] = float_of(words[i] << 16), float_of(words[i] & Int32(-65536))

    @cute.jit
    def fetch_chunk(self, io, s, at, row, chunk, out: cute.Tensor):
        """The same of rows that are not BF16, from global memory, 0 outside the sequence; left where :meth:`chunk_of` finds them."""
        out.fill(0.0)
        if at.token + row < at.end:
            load8_float(io.x[1], at.token + row, 8 * chunk, out)
        bits = [bits_of(out[i]) for i in range(8)]
        for selector, address in ((0x5410, s.low.toint() + self.place(row, chunk)), (0x7632, self.cell(s, at.stage, row, chunk))):
            words = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                words[i] = prmt(bits[2 * i], bits[2 * i + 1], selector)
            cute.autovec_copy(words, self.words_at(address))

    @cute.jit
    def factors_of_half(self, io, s, at, lane, row0):
        """``rstd`` of a half's rows, to memory and to shared memory."""
        spec, factors, rstd = self.spec, s.factors, io.rstd
        mine = Float32(0.0)
        if const_expr(self.direct):  # a few rows at a time: what is on its way from L2 is in registers
            for p in cutlass.range(self.passes, unroll=DIRECT_ROWS):
                total = self.squares(io, s, at, lane, row0 + p * self.row_step)
                mine = total if lane == p else mine
        else:
            for p in cutlass.range_constexpr(self.passes):
                total = self.squares(io, s, at, lane, row0 + p * self.row_step)
                mine = total if lane == p else mine
        row = row0 + lane * self.row_step
        if lane < self.passes:
            factor = rsqrt(mine / Float32(spec.columns) + io.eps)
            factors[row] = factor
            if at.token + row < at.limit:
                rstd[Int64(at.token + row)] = factor if at.token + row < at.end else Float32(0.0)
        cute.arch.sync_warp()

    @cute.jit
    def first_look(self, io, s, at, row, chunk, out: cute.Tensor):
        """Eight columns of a half's row, which nobody has read yet."""
        if const_expr(self.direct):
            self.fetch_chunk(io, s, at, row, chunk, out)
        else:
            self.chunk_of(s, at, row, chunk, out)

    @cute.jit
    def squares(self, io, s, at, lane, row):
        """Sum of a row's squares, in all of its lanes."""
        spec, total = self.spec, Float32(0.0)
        for k in cutlass.range_constexpr(spec.slabs):
            chunk = lane + k * spec.lanes
            values = cute.make_rmem_tensor(8, Float32)
            if const_expr(spec.chunks % spec.lanes == 0):
                self.first_look(io, s, at, row, chunk, values)
            else:
                values.fill(0.0)
                if chunk < spec.chunks:
                    self.first_look(io, s, at, row, chunk, values)
            for i in cutlass.range_constexpr(8):
                total = total + values[i] * values[i]
        for j in cutlass.range_constexpr(spec.lanes.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << j)
        return total

    @cute.jit
    def normalise_half(self, io, s, at, lane, row0, totals: cute.Tensor, whole: cutlass.Constexpr):
        """Codes, 16-bit rows and column sums of a half. ``whole``: all of its rows are inside."""
        spec, together = self.spec, self.together
        for k in cutlass.range_constexpr(spec.slabs):
            chunk = lane + k * spec.lanes
            if const_expr(spec.chunks % spec.lanes == 0):
                self.slab(io, s, at, k, chunk, row0, totals, whole, together)
            else:
                if chunk < spec.chunks:
                    self.slab(io, s, at, k, chunk, row0, totals, whole, together)

    @cute.jit
    def slab(
        self, io, s, at, k: cutlass.Constexpr, chunk, row0, totals: cute.Tensor, whole: cutlass.Constexpr, together: cutlass.Constexpr
    ):
        """Eight columns of a lane's rows."""
        spec, factors, scales = self.spec, s.factors, s.pairs
        gain, mean = (cute.make_rmem_tensor(8, Float32) for _ in range(2))
        self.vector(s.gain.iterator.toint() + 16 * chunk, gain)
        if const_expr(spec.centred):
            self.vector(s.mean.toint() + 4 * at.slot * spec.columns + 16 * chunk, mean)
        scale = scales[8 * chunk // spec.width]
        for turn_of in cutlass.range(self.passes // together, unroll=1):
            for p in cutlass.range_constexpr(together):
                row = row0 + (turn_of * together + p) * self.row_step
                values = cute.make_rmem_tensor(8, Float32)
                self.chunk_of(s, at, row, chunk, values)
                factor = factors[row]
                for i in cutlass.range_constexpr(8):
                    value = mul(mul(values[i], factor), gain[i])
                    values[i] = sub(value, mean[i]) if const_expr(spec.centred) else value
                words = cute.make_rmem_tensor(2, Uint32)
                inside = at.token + row < at.end
                for w in cutlass.range_constexpr(2):
                    word = e4m3x4(*[values[4 * w + i] for i in range(4)])
                    words[w] = Uint32(word if const_expr(whole) else (word if inside else Int32(0)))
                if const_expr(whole):
                    store(words, io.codes, at.token + row, 8 * chunk, 8)
                else:
                    if at.token + row < at.limit:
                        store(words, io.codes, at.token + row, 8 * chunk, 8)
                if const_expr(spec.centred):
                    for i in cutlass.range_constexpr(8):
                        totals[i, k] = totals[i, k] + (values[i] if const_expr(whole) else (values[i] if inside else Float32(0.0)))
                rounded = cute.make_rmem_tensor(4, Int32)
                for i in cutlass.range_constexpr(4):
                    # The inverse of the codes' exponent is in the weight and the mean; a power of two, but it is taken out in BF16 exactly.
                    if const_expr(self.halves):  # the weight has the exponent
                        rounded[i] = f16x2(values[2 * i], values[2 * i + 1])
                    else:
                        rounded[i] = bf16x2_mul(bf16x2(values[2 * i], values[2 * i + 1]), scale)
                target = cute.make_ptr(Int32, self.cell(s, at.stage, row, chunk), cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def free_piece(spec: cutlass.Constexpr, bars, at, peer):
    """This warp's products have read a piece of the weight: both CTAs may replace theirs."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.w_empty + at)
        if const_expr(spec.cluster > 1):
            cute.arch.mbarrier_arrive(bars.w_empty + at, peer)


@cute.jit
def pass_over(spec: cutlass.Constexpr, bars, at: Int32, phase: Int32, peer):
    """Let the pieces of half a round go by."""
    for _ in cutlass.range(spec.offset * spec.steps, unroll=1):
        cute.arch.mbarrier_wait(bars.w_full + at, phase)
        free_piece(spec, bars, at, peer)
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
def multiply(spec: cutlass.Constexpr, io, s, bars, mma):
    """A multiplying warpgroup: every second half, times the weight that runs past. While one quantizes its sums the other multiplies."""
    tid, _, _ = cute.arch.thread_idx()
    item = s.item
    wg = cute.arch.make_warp_uniform((tid - (THREADS - 256)) // 128)
    warp, lane = cute.arch.make_warp_uniform(tid % 128 // 32), cute.arch.lane_idx()
    peer = io.rank ^ 1
    b = mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(s.w))
    operands = [mma.make_fragment_A(mma.partition_shape_A((HALF, DEPTH))) for _ in range(spec.steps)]
    total = cute.make_rmem_tensor(mma.partition_shape_C((HALF, spec.column_tile)), Float16 if const_expr(spec.halves) else Float32)
    row = 16 * warp + lane % 16
    rows = s.rows.toint() + row * 128
    stage, phase, slot, slot_phase, at, at_phase, n = wg, Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    if wg == 1:
        at, at_phase = pass_over(spec, bars, at, at_phase, peer)
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
        for _ in cutlass.range(spec.column_tiles, unroll=1):
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
                    free_piece(spec, bars, first, peer)
                    if const_expr(spec.whole):
                        first = first + 1
                    else:
                        first, _ = turn(first, Int32(0), spec.pieces)
            warpgroup.wait_group(0)
            free_piece(spec, bars, first, peer)
            if const_expr(spec.whole):  # noqa: SIM102 - one is decided at compile time
                if at == spec.pieces:
                    at, at_phase = Int32(0), at_phase ^ 1
            quantize(spec, io, s, Bundle(token=next_token, end=next_end, limit=next_limit), n, total)
            n = n + 1
            if n == spec.column_tiles:
                n = Int32(0)
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
    if wg == 0:
        pass_over(spec, bars, at, at_phase, peer)
