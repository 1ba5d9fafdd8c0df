"""RMSNorm + quantize with the loads decoupled: persistent CTAs, one warp that keeps rows coming, eight that compute.

The same operation and the same bytes as ``kernel.NormQuantize``, for rows whose groups of 32 fit shared memory several times
(``NormSpec.stages``). The loading warp finds the places of the CTA's tiles and copies groups of 32 rows (one bulk copy a row, a lane each;
one for all where they lie together) and the sequence's mean into rings of stages; so memory is busy whatever the others do.

Static blocks need no maximum: there the inverse of the given exponent, a power of two, is folded into the weight and the mean, which
changes no rounding (but that of numbers under 2^-126), and a value is ``(x * rstd) * weight' - mean'`` and its conversion. A weight of
2^120 or more counts as not finite there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr

from fused_ops.places import bulk_copy, first_sequence, place
from fused_ops.rings import release
from fused_ops.rmsnorm_quantize.arithmetic import half_place, mul, row_rstd, store, sub
from fused_ops.rmsnorm_quantize.config import ROWS, NormSpec
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte, magnitude_max, scale_of_byte, transpose4x4
from lp_fa4.mx import GROUP
from lp_fa4.sm90.tile_transpose import ORDERS

FIELDS = 6
"""int32 of an item: first token, end, limit, row, region, tile."""
MEET = 1
"""Named barrier of the computing warps."""


class StagedNorm:
    """See the module's docstring; thread layout: ``config.NormSpec``."""

    def __init__(self, spec: NormSpec):
        self.spec, self.stages = spec, spec.stages
        self.layout = layout = spec.staged
        self.compute_threads, self.warps, self.items = layout.threads, layout.threads // 32, layout.items
        self.threads = layout.threads + 32 * (1 + layout.turners)
        self.row_step = layout.threads // spec.lanes
        self.passes = GROUP * spec.lanes // layout.threads
        self.element = 4 if spec.dtype == "float32" else 2
        self.row_bytes = spec.columns * self.element

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        normed: cute.Tensor,
        copy: cute.Tensor,
        ticket: cute.Tensor,
        eps: Float32,
        ctas: Int32,
        stream,
    ):
        tokens = Int32(x.shape[0])
        tiles = cute.ceil_div(tokens, ROWS)
        if const_expr(not self.spec.dense):
            tiles = tokens // ROWS + Int32(offsets.shape[0]) - 1
        self.kernel(x, weight, offsets, means, given, codes, scales, rstd, sums, normed, copy, ticket, eps, tokens, tiles).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.layout.ctas,
            preferred_smem_carveout=100,  # left open, the compiler would ask a device for its size
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        normed: cute.Tensor,
        copy: cute.Tensor,
        ticket: cute.Tensor,
        eps: Float32,
        tokens: Int32,
        tiles: Int32,
    ):
        spec, stages, columns, items, layout = self.spec, self.stages, self.spec.columns, self.items, self.layout
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slots = layout.slots

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * (stages + items + slots)]
            item: cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * items], 16]
            maxima: cute.struct.Align[cute.struct.MemRange[Int32, 3 * spec.blocks], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, GROUP], 16]
            gain: cute.struct.Align[cute.struct.MemRange[Float32, columns], 128]
            mean: cute.struct.Align[cute.struct.MemRange[Float32, items * columns if spec.centred else 4], 128]
            parts: cute.struct.Align[cute.struct.MemRange[Float32, self.warps * columns if spec.centred else 4], 128]
            words: cute.struct.Align[cute.struct.MemRange[Uint32, max(slots * spec.slot_words, 4)], 128]
            rows: cute.struct.Align[cute.struct.MemRange[x.element_type, stages * GROUP * columns], 128]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        base = storage.barriers.data_ptr()
        item_base, word_base = base + 2 * stages, base + 2 * (stages + items)
        bars = Bundle(
            full=base, empty=base + stages, item_full=item_base, item_empty=item_base + items, word_full=word_base,
            word_empty=word_base + slots,
        )  # fmt: skip
        s = Bundle(
            item=storage.item.get_tensor(cute.make_layout((FIELDS, items))),
            maxima=storage.maxima.get_tensor(cute.make_layout((spec.blocks, 3))),
            factors=storage.factors.get_tensor(cute.make_layout(GROUP)),
            gain=storage.gain.get_tensor(cute.make_layout(columns)),
            mean=storage.mean.data_ptr(),
            parts=storage.parts.get_tensor(cute.make_layout((columns, self.warps if spec.centred else 1)))
            if const_expr(spec.centred)
            else None,
            words=storage.words.data_ptr(),
            rows=storage.rows.data_ptr(),
        )
        io = Bundle(
            x=x, offsets=offsets, means=means, given=given, codes=codes, scales=scales, rstd=rstd, sums=sums, normed=normed, copy=copy,
            ticket=ticket, tokens=tokens, tiles=tiles, first=cute.arch.block_idx()[0], step=cute.arch.grid_dim()[0], eps=eps,
        )  # fmt: skip
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(bars.full + i, 1)
                    cute.arch.mbarrier_init(bars.empty + i, self.warps)
                for i in cutlass.range_constexpr(items):
                    cute.arch.mbarrier_init(bars.item_full + i, 1)
                    cute.arch.mbarrier_init(bars.item_empty + i, self.warps + layout.turners)
                for i in cutlass.range_constexpr(slots):
                    cute.arch.mbarrier_init(bars.word_full + i, self.warps)
                    cute.arch.mbarrier_init(bars.word_empty + i, layout.turners)
            cute.arch.mbarrier_init_fence()
        # What came before on the stream is over from here on; what comes next may be put in place (and waits in the same way).
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        gain, maxima = s.gain, s.maxima
        for i in cutlass.range(tid, columns, self.threads, unroll=1):
            value = weight[0, i].to(Float32)
            if const_expr(spec.static):
                value = value * inverse_of_byte(Int32(given[0, i // spec.width])) if cute.math.absf(value) < 2.0**120 else Float32.nan
            gain[half_place(i, columns)] = value
        if const_expr(not spec.static):
            for i in cutlass.range(tid, 3 * spec.blocks, self.threads, unroll=1):
                maxima[i % spec.blocks, i // spec.blocks] = 0
        cute.arch.sync_threads()
        if warp < self.warps:
            self.compute(io, s, bars)
        else:
            if warp == self.warps:
                self.load(io, s, bars)
            else:
                if const_expr(spec.copy > 0):
                    self.turn(io, s, bars)

    @cute.jit
    def load(self, io, s, bars):
        """The loading warp."""
        spec, item = self.spec, s.item
        lane = cute.arch.lane_idx()
        rows, mean = Int32(s.rows.toint()), Int32(s.mean.toint())
        row_step = Int64(io.x.stride[0]) * self.element
        stage, phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(1)
        near = first_sequence(spec.dense, io.offsets, io.first)
        tile, drawn, ticket = Int32(io.first), Int32(0), io.ticket.iterator
        while tile < io.tiles:
            # Drawn, and early: some multiprocessors are a third faster than others at moving the same bytes.
            if lane == 0:
                drawn = cute.arch.atomic_add(ticket, Int32(1))
            following = io.step + cute.arch.shuffle_sync(drawn, 0)
            token, end, limit, row, region, near = place(spec.dense, io.offsets, io.tokens, tile, near)
            cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
            cute.arch.fence_view_async_shared()
            item_full, source = (bars.item_full + slot).toint(), Int64(0)
            if const_expr(spec.centred):
                source = (io.means.iterator + cute.crd2idx((Int64(near), 0), io.means.layout)).toint()
            with cute.arch.elect_one():
                for i, value in enumerate((token, end, limit, row, region, tile)):
                    item[i, slot] = value
                if const_expr(spec.centred):
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.item_full + slot, 4 * spec.columns)
                    bulk_copy(mean + slot * (4 * spec.columns), source, 4 * spec.columns, item_full)
                else:
                    cute.arch.mbarrier_arrive(bars.item_full + slot)
            slot = slot + 1
            if slot == self.items:
                slot, slot_phase = Int32(0), slot_phase ^ 1
            count = self.groups(token, limit, region)
            for group in cutlass.range(count, unroll=1):
                valid = cutlass.max(cutlass.min(end - token - GROUP * group, GROUP), 0)
                cute.arch.mbarrier_wait(bars.empty + stage, phase)
                # Between the readers of what was there and the copy: here, because a fence waits for its thread's own stores, of which
                # this warp has none.
                cute.arch.fence_view_async_shared()
                full = (bars.full + stage).toint()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, valid * self.row_bytes)
                cute.arch.sync_warp()
                source = (io.x.iterator + cute.crd2idx((Int64(token) + GROUP * group + lane, 0), io.x.layout)).toint()
                target = rows + (stage * GROUP + lane) * self.row_bytes
                if (valid == GROUP) & (row_step == self.row_bytes):
                    if lane == 0:
                        bulk_copy(target, source, GROUP * self.row_bytes, full)
                else:
                    if lane < valid:
                        bulk_copy(target, source, self.row_bytes, full)
                stage = stage + 1
                if stage == self.stages:
                    stage, phase = Int32(0), phase ^ 1
            tile = following
        cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
        with cute.arch.elect_one():
            item[5, slot] = Int32(-1)
            cute.arch.mbarrier_arrive(bars.item_full + slot)

    @cute.jit
    def groups(self, token: Int32, limit: Int32, region: Int32) -> Int32:
        """Groups of a tile that something is written for."""
        return cutlass.min(cutlass.max(cute.ceil_div(limit - token, GROUP), cutlass.max(region, 0)), ROWS // GROUP)

    @cute.jit
    def turn(self, io, s, bars):
        """A turning warp's share of the copy: codes of ``copied_rows`` tokens at a time, while the computing warps fill the other slots."""
        spec, item, together = self.spec, s.item, self.spec.copied_rows // GROUP
        slot, slot_phase, word, word_phase = (Int32(0) for _ in range(4))
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        while item[5, slot] >= 0:
            token, limit, row, region = item[0, slot], item[2, slot], item[3, slot], item[4, slot]
            parts = cute.ceil_div(self.groups(token, limit, region), together)
            for part in cutlass.range(parts, unroll=1):
                cute.arch.mbarrier_wait(bars.word_full + word, word_phase)
                self.store_copy(io, s.words + word * spec.slot_words, row, region, part)
                release(bars.word_empty + word)
                word = word + 1
                if word == self.layout.slots:
                    word, word_phase = Int32(0), word_phase ^ 1
            release(bars.item_empty + slot)
            slot = slot + 1
            if slot == self.items:
                slot, slot_phase = Int32(0), slot_phase ^ 1
            cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)

    @cute.jit
    def compute(self, io, s, bars):
        """A computing warp's share of every group."""
        spec, item = self.spec, s.item
        tid, _, _ = cute.arch.thread_idx()
        lane, row0 = tid % spec.lanes, tid // spec.lanes
        stage, phase, slot, slot_phase, turn = (Int32(0) for _ in range(5))
        word, word_phase, together = Int32(0), Int32(1), spec.copied_rows // GROUP
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        tile = item[5, slot]
        while tile >= 0:
            token, end, limit = item[0, slot], item[1, slot], item[2, slot]
            totals = cute.make_rmem_tensor((8, spec.slabs), Float32)
            totals.fill(0.0)
            count = self.groups(token, limit, item[4, slot])
            for group in cutlass.range(count, unroll=1):
                if const_expr(spec.copy):  # noqa: SIM102 - one is decided at compile time
                    if group % together == 0:
                        cute.arch.mbarrier_wait(bars.word_empty + word, word_phase)
                cute.arch.mbarrier_wait(bars.full + stage, phase)
                # What is needed once a tile or once a group is read again there: registers are scarce.
                at = Bundle(token=token, end=end, limit=limit, slot=slot, word=word)
                self.group_of(io, s, bars, at, group, stage, turn, lane, row0, totals)
                if const_expr(spec.copy):  # noqa: SIM102
                    if (group % together == together - 1) | (group == count - 1):
                        release(bars.word_full + word)
                        word = word + 1
                        if word == self.layout.slots:
                            word, word_phase = Int32(0), word_phase ^ 1
                stage = stage + 1
                if stage == self.stages:
                    stage, phase = Int32(0), phase ^ 1
                if const_expr(not spec.static):
                    turn = turn + 1
                    if turn == 3:
                        turn = Int32(0)
            if const_expr(spec.centred):
                self.column_sums(io, s, slot, lane, totals)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.item_empty + slot)
            slot = slot + 1
            if slot == self.items:
                slot, slot_phase = Int32(0), slot_phase ^ 1
            cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
            tile = item[5, slot]

    @cute.jit
    def group_of(self, io, s, bars, at, group: Int32, stage: Int32, turn: Int32, lane, row0, totals: cute.Tensor):
        """Rows of one group: factors, values, codes. Rows of static blocks are independent: two at a time hide latency and share loads of
        weight and mean."""
        spec, passes = self.spec, self.passes
        empty = bars.empty + stage
        if const_expr(spec.reread):
            self.group_twice(io, s, at, group, stage, turn, lane, row0, empty, totals)
        elif const_expr(not spec.static):
            self.rows_of(io, s, at, group, stage, turn, lane, row0, 0, passes, empty, totals)
        elif const_expr(spec.keep and spec.columns > 384):  # no registers for two
            for first in cutlass.range(passes, unroll=1):
                self.rows_of(io, s, at, group, stage, turn, lane, row0, first, 1, None, totals)
            release(empty)
        else:
            for first in cutlass.range_constexpr(0, passes, 2):
                together = min(2, passes - first)
                done = empty if const_expr(first + together == passes) else None
                self.rows_of(io, s, at, group, stage, turn, lane, row0, first, together, done, totals)

    @cute.jit
    def group_twice(self, io, s, at, group: Int32, stage: Int32, turn: Int32, lane, row0, empty, totals: cute.Tensor):
        """A group of data-dependent blocks that the registers do not hold: read once for its factors and maxima and, when all warps have
        contributed, again for its codes. Normed values are made twice, by the same operations."""
        spec, slabs, passes = self.spec, self.spec.slabs, self.passes
        step = 1 if spec.keep else min(2, passes)
        factors = s.factors
        tops = cute.make_rmem_tensor(slabs, Int32)
        tops.fill(0)
        for turn_of in cutlass.range(passes // step, unroll=1):  # not unrolled: loads ahead would take the registers
            first = step * turn_of
            values = cute.make_rmem_tensor((8, slabs, step), Float32)
            inside = self.fetch(io, s, at, group, stage, lane, row0, first, values)
            factor = self.factors_of(io, at, group, lane, row0, first, inside, values)
            if lane == 0:
                for p in cutlass.range_constexpr(step):
                    factors[row0 + (first + p) * self.row_step] = factor[p]
            for k in cutlass.range_constexpr(slabs):
                chunk = lane + k * spec.lanes
                if chunk < spec.chunks:
                    self.normalise(s, at, k, 8 * chunk, factor, values)
                    self.add_columns(k, inside, values, totals)
                tops[k] = self.largest(tops[k], values, inside, k)
        for k in cutlass.range_constexpr(slabs):
            self.contribute(s, tops[k], lane + k * spec.lanes, turn)
        self.meet(io, s, at, group, turn)
        for turn_of in cutlass.range(passes // step, unroll=1):
            first = step * turn_of
            values = cute.make_rmem_tensor((8, slabs, step), Float32)
            inside = self.fetch(io, s, at, group, stage, lane, row0, first, values)
            factor = [factors[row0 + (first + p) * self.row_step] for p in range(step)]
            for k in cutlass.range_constexpr(slabs):
                chunk = lane + k * spec.lanes
                if chunk < spec.chunks:
                    self.normalise(s, at, k, 8 * chunk, factor, values)
            self.emit_blocks(io, s, at, group, turn, lane, row0, first, inside, values)
        release(empty)

    @cute.jit
    def rows_of(self, io, s, at, group, stage, turn, lane, row0, first, together: cutlass.Constexpr, empty, totals: cute.Tensor):
        """Passes ``first`` … ``first + together - 1`` of a group; ``empty``: barrier to arrive at once x is in registers, or None."""
        spec, slabs = self.spec, self.spec.slabs
        values = cute.make_rmem_tensor((8, slabs, together), Float32)
        inside = self.fetch(io, s, at, group, stage, lane, row0, first, values)
        if const_expr(empty is not None):
            release(empty)
        factor = self.factors_of(io, at, group, lane, row0, first, inside, values)
        for k in cutlass.range_constexpr(slabs):
            chunk = lane + k * spec.lanes
            if chunk < spec.chunks:
                self.normalise(s, at, k, 8 * chunk, factor, values)
                self.add_columns(k, inside, values, totals)
                if const_expr(spec.static):
                    for p in cutlass.range_constexpr(together):
                        row = GROUP * group + row0 + (first + p) * self.row_step
                        self.emit(io, s, at, values[None, k, p], inside[p], Int32(0), row, 8 * chunk)
            if const_expr(not spec.static):
                self.contribute(s, self.largest(Int32(0), values, inside, k), chunk, turn)
        if const_expr(not spec.static):
            self.meet(io, s, at, group, turn)
            self.emit_blocks(io, s, at, group, turn, lane, row0, first, inside, values)

    def fetch(self, io, s, at, group, stage, lane, row0, first, values: cute.Tensor) -> list:
        """Rows of passes ``first`` … into ``values``; which of them are inside the sequence."""
        inside = []
        for p in range(values.shape[2]):
            row = row0 + (first + p) * self.row_step
            inside.append(at.token + GROUP * group + row < at.end)
            self.read(io, s, stage, row, lane, inside[p], values[None, None, p])
        return inside

    def factors_of(self, io, at, group, lane, row0, first, inside: list, values: cute.Tensor) -> list:
        """``rstd`` of these rows, stored too."""
        factor = []
        for p in range(len(inside)):
            total = Float32(0.0)
            for k in range(self.spec.slabs):
                for i in range(8):
                    total = total + values[i, k, p] * values[i, k, p]
            factor.append(row_rstd(total, self.spec.lanes, self.spec.columns, io.eps))
            token = at.token + GROUP * group + row0 + (first + p) * self.row_step
            self.store_rstd(io, at, lane, token, factor[p], inside[p])
        return factor

    @cute.jit
    def store_rstd(self, io, at, lane, token, factor, inside):
        """A row's factor to memory, by its first lane."""
        rstd = io.rstd
        if (lane == 0) & (token < at.limit):
            rstd[Int64(token)] = factor if inside else Float32(0.0)

    @cute.jit
    def add_columns(self, k: cutlass.Constexpr, inside, values: cute.Tensor, totals: cute.Tensor):
        """Slab ``k`` of the rows that are inside to the tile's column sums."""
        if const_expr(self.spec.centred):
            for p in cutlass.range_constexpr(len(inside)):
                if inside[p]:
                    for i in cutlass.range_constexpr(8):
                        totals[i, k] = totals[i, k] + values[i, k, p]

    @cute.jit
    def read(self, io, s, stage: Int32, row, lane, inside, values: cute.Tensor):
        """A row's chunks from shared memory, as FP32; 0 where there is no row."""
        spec = self.spec
        kind, rows = io.x.element_type, s.rows.toint()
        for k in cutlass.range_constexpr(spec.slabs):
            raw = cute.make_rmem_tensor(8, kind)
            raw.fill(0)
            chunk = lane + k * spec.lanes
            if inside & (chunk < spec.chunks):
                place_ = rows + ((stage * GROUP + row) * spec.columns + 8 * chunk) * self.element
                source = cute.make_ptr(kind, place_, cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw)
            for i in cutlass.range_constexpr(8):
                values[i, k] = raw[i].to(Float32)

    @cute.jit
    def normalise(self, s, at, k: cutlass.Constexpr, column: Int32, factor, values: cute.Tensor):
        """``x * rstd * weight - mean`` of slab ``k`` in place, each step rounded as the definition has it."""
        gain, mean = (cute.make_rmem_tensor(8, Float32) for _ in range(2))
        self.vector(s.gain.iterator.toint() + 2 * column, gain)
        if const_expr(self.spec.centred):
            self.vector(s.mean.toint() + 4 * at.slot * self.spec.columns + 2 * column, mean)
        for p in cutlass.range_constexpr(len(factor)):
            for i in cutlass.range_constexpr(8):
                value = mul(mul(values[i, k, p], factor[p]), gain[i])
                values[i, k, p] = sub(value, mean[i]) if const_expr(self.spec.centred) else value

    @cute.jit
    def vector(self, address, out: cute.Tensor):
        """Eight FP32 of shared memory, as ``half_place`` has them: neighbours' fours lie side by side, so that banks are read in turn."""
        for i in cutlass.range_constexpr(2):
            source = cute.make_ptr(Float32, address + 2 * i * self.spec.columns, cute.AddressSpace.smem, assumed_align=16)
            piece = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), piece)
            for j in cutlass.range_constexpr(4):
                out[4 * i + j] = piece[j]

    @cute.jit
    def largest(self, top: Int32, values: cute.Tensor, inside, k: cutlass.Constexpr):
        """The larger of ``top`` and the magnitude bits of slab ``k`` of the rows that are inside."""
        for p in cutlass.range_constexpr(len(inside)):
            of_row = Int32(0)
            for i in cutlass.range_constexpr(8):
                of_row = magnitude_max(of_row, values[i, k, p])
            top = cutlass.max(top, of_row if inside[p] else Int32(0))
        return top

    @cute.jit
    def contribute(self, s, top: Int32, chunk: Int32, turn: Int32):
        """A slab's largest magnitude bits into its block's. Four lanes hold a run of 32 columns, which no block divides; lanes
        ``spec.lanes`` apart hold other rows of it."""
        spec, maxima = self.spec, s.maxima
        for i in cutlass.range_constexpr(5):
            if const_expr(1 << i < 4 or 1 << i >= spec.lanes):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
        lane = cute.arch.lane_idx()
        if (lane < spec.lanes) & (lane % 4 == 0) & (chunk < spec.chunks):
            cute.arch.atomic_max(maxima.iterator + cute.crd2idx((8 * chunk // spec.width, turn), maxima.layout), top)

    @cute.jit
    def meet(self, io, s, at, group: Int32, turn: Int32):
        """Once all warps have contributed: a group's scales. Three sets of maxima: one is read, the next may already be written, the one
        after is cleared; so one barrier a group is enough."""
        spec, maxima, scales, item = self.spec, s.maxima, io.scales, s.item
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.barrier(barrier_id=MEET, number_of_threads=self.compute_threads)
        cleared = turn + 2
        if cleared >= 3:
            cleared = cleared - 3
        for i in cutlass.range(tid, spec.blocks, self.compute_threads, unroll=1):
            maxima[i, cleared] = 0
            if group < item[4, at.slot]:
                scales[Int64(item[3, at.slot] + group), i] = Uint8(byte_of_amax_bits(maxima[i, turn]))

    @cute.jit
    def emit_blocks(self, io, s, at, group: Int32, turn: Int32, lane, row0, first: cutlass.Constexpr, inside, values: cute.Tensor):
        """Codes of the rows of passes ``first`` …, once the group's maxima are known."""
        spec, maxima = self.spec, s.maxima
        for k in cutlass.range_constexpr(spec.slabs):
            chunk = lane + k * spec.lanes
            if chunk < spec.chunks:
                byte = byte_of_amax_bits(maxima[8 * chunk // spec.width, turn])
                for p in cutlass.range_constexpr(len(inside)):
                    row = GROUP * group + row0 + (first + p) * self.row_step
                    self.emit(io, s, at, values[None, k, p], inside[p], byte, row, 8 * chunk)

    @cute.jit
    def emit(self, io, s, at, values: cute.Tensor, inside, byte: Int32, row: Int32, column: Int32):
        """Quantize a chunk of the tile's row ``row`` and store it if the row is to be written; 0 where it is not ``inside``."""
        spec, given = self.spec, io.given
        words = cute.make_rmem_tensor(2, Uint32)
        for w in cutlass.range_constexpr(2):
            if const_expr(spec.static):
                word = e4m3x4(*[values[4 * w + i] for i in range(4)])
                words[w] = Uint32(word if inside else Int32(0))
            else:
                inverse = inverse_of_byte(byte)
                word = e4m3x4(*[mul(values[4 * w + i], inverse) for i in range(4)])
                words[w] = Uint32(word if inside & (byte != 255) else Int32(0))
        if at.token + row < at.limit:
            store(words, io.codes, at.token + row, column, 8)
            if const_expr(spec.keep):
                factor = scale_of_byte(Int32(given[0, column // spec.width])) if const_expr(spec.static) else Float32(1.0)
                rounded = cute.make_rmem_tensor(8, BFloat16)
                for i in cutlass.range_constexpr(8):
                    rounded[i] = (values[i] * factor if inside else Float32(0.0)).to(BFloat16)
                store(rounded, io.normed, at.token + row, column, 16)
        if const_expr(spec.copy):
            local = row % spec.copied_rows
            cell = s.words + at.word * spec.slot_words + self.code_word(local, column // 16) + column // 8 % 2 * 2
            pair = cute.make_ptr(Uint32, cell.toint(), cute.AddressSpace.smem, assumed_align=8)
            cute.autovec_copy(words, cute.make_tensor(pair, cute.make_layout(2)))

    def code_word(self, row, chunk):
        """First word of a row's 16-byte chunk of codes: chunks are exchanged by run of 16 rows, so that runs lie in other banks. Within
        eights, or within fours where a row has no whole eights (it has whole fours: heads are 64 or 128 columns)."""
        runs, span = self.spec.copied_rows // 16, 8 if self.spec.columns % 128 == 0 else 4
        return row * (self.spec.columns // 4) + 4 * (chunk ^ (max(span // runs, 1) * (row // 16 % min(runs, span))))

    @cute.jit
    def store_copy(self, io, staged, row: Int32, region: Int32, part: Int32):
        """A slot's codes with tokens innermost, by all turning warps: a thread takes four columns of a run of 16 tokens."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        tid = tid - self.compute_threads - 32
        position = GROUP * row
        order = ORDERS["accumulator"]
        rows = spec.copied_rows
        runs = rows // 16
        limit = GROUP * region - rows * part
        pitch = Int64(io.copy.shape[2])  # heads and columns are compact: a column is a row of positions
        start = io.copy.iterator.toint() + position + rows * part
        for unit in cutlass.range(tid, spec.columns // 4 * runs, 32 * self.layout.turners, unroll=1):
            run, quad = unit % runs, unit // runs
            if 16 * run < limit:
                words = cute.make_rmem_tensor((4, 4), Uint32)
                for i in cutlass.range_constexpr(4):
                    found = []
                    for j in cutlass.range_constexpr(4):
                        at_row = 16 * run + order[4 * i + j]
                        cell = cute.make_tensor(staged + self.code_word(at_row, quad // 4) + quad % 4, cute.make_layout(1))
                        found.append(Int32(cell[0]))
                    turned = transpose4x4(*found)
                    for d in cutlass.range_constexpr(4):
                        words[i, d] = Uint32(turned[d])
                address = start + Int64(4 * quad) * pitch + 16 * run
                for d in cutlass.range_constexpr(4):
                    target = cute.make_ptr(Uint32, address + d * pitch, cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(words[None, d], cute.make_tensor(target, cute.make_layout(4)))

    @cute.jit
    def column_sums(self, io, s, slot: Int32, lane, totals: cute.Tensor):
        """The tile's column sums: over a warp's rows by butterfly, then over the warps, in order."""
        spec, columns, given, sums, item = self.spec, self.spec.columns, io.given, io.sums, s.item
        tid, _, _ = cute.arch.thread_idx()
        parts = s.parts
        for k in cutlass.range_constexpr(spec.slabs):
            for i in cutlass.range_constexpr(8):
                total = totals[i, k]
                for j in cutlass.range_constexpr(5):
                    if const_expr(1 << j >= spec.lanes):
                        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << j)
                totals[i, k] = total
            column = 8 * (lane + k * spec.lanes)
            if (tid % 32 < spec.lanes) & (column < columns):
                for i in cutlass.range_constexpr(8):
                    parts[column + i, tid // 32] = totals[i, k]
        cute.arch.barrier(barrier_id=MEET, number_of_threads=self.compute_threads)
        for column in cutlass.range(tid, columns, self.compute_threads, unroll=1):
            total = parts[column, 0]
            for w in cutlass.range_constexpr(1, self.warps):
                total = total + parts[column, w]
            if const_expr(spec.static):
                total = total * scale_of_byte(Int32(given[0, column // spec.width]))
            sums[Int64(item[5, slot]), column] = total
        cute.arch.barrier(barrier_id=MEET, number_of_threads=self.compute_threads)
