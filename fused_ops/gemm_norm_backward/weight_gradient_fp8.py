"""``dw_k = dk^T @ xn`` on Hopper where both are E4M3 codes and xn's exponents are static: FP8 products, straight from compact jagged rows.

The contraction runs over tokens, along which dk's exponents change at each group of 32 of one sequence, and FP8 wgmma reads operands whose
tokens are innermost. So a CTA, which owns a tile of the result and a run of tokens, takes them 128 at a time:

* warp 0 asks for the codes of a step by TMA and turns a quarter of xn's;
* warp 1 writes a table: for every 32 columns of dk the largest exponent of the step, and each token's relative to it;
* warps 2 and 3 turn the rest, the B operand: transposing ``ldmatrix``, byte permutations, ``stmatrix``;
* each of the other warpgroups owns 64 columns of dk. Its A operand goes from shared memory to registers by the transposing ``ldmatrix``,
  which moves units of 16 bits: two columns of dk. A byte permutation parts them, so the rows of a warp's accumulators are even columns,
  then odd ones. There codes are brought under the step's exponent: rounded to E4M3 again where theirs is smaller, by at most 2^-10 of a
  range that ends at 448.

FP8 tensor cores keep 13 bits under the largest of what they add, so no sum of theirs is longer than a step: it is added, under its
exponent, to FP32 sums in registers, some columns of xn at a time. Both operands hold each run of 16 tokens in the order 0, 1, 8, 9, 2,
3, ..., which is that of the permutations. The runs' sums are added by the caller, in order: the result is bitwise repeatable.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN as E4M3
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fused_ops.gemm_norm_backward.arguments import fake_weight_gradient
from fused_ops.gemm_norm_backward.config import FP8_SLOTS, FP8_STEP, SHARES, WeightSpec
from fused_ops.gemm_norm_backward.rows import (
    GROUP,
    load_byte,
    pinned64,
    relative_factor,
    scale_address,
)
from fused_ops.gemm_norm_backward.weight_gradient_codes import WeightGradientOfCodes, advance, store_word
from fused_ops.rings import release
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.matrices import load_matrices, shared_words
from lp_fa4.common.numbers import bits_of, effect, float_of, inline_ptx, prmt, scale_of_byte, warp_max
from lp_fa4.common.rows import fma
from lp_fa4.compile import build, kernel_cache
from lp_fa4.sm90.wgmma import low_half, product

BOX = FP8_STEP * 64
"""Bytes of a step's 64 columns of codes, and of 64 columns of the turned operand."""
REGISTERS = {2: (232, 40), 3: (160, 32)}
"""By the number of computing warpgroups: registers of a computing thread and of one of the first warpgroup."""
TURNERS = 3
"""Warps that turn xn."""
IN_FLIGHT = 3
"""Blocks of 16 tokens x 32 columns that a warp loads before it stores the first."""
EVEN = -(1 << 31)
"""Bit of a step's exponent of 32 columns that says: all of its tokens have it, no code needs to be rounded again."""
FACTORS = 2 * FP8_STEP
"""Bytes of the factors of a step and 32 columns."""


class WeightGradientFp8(WeightGradientOfCodes):
    """See the module's docstring; launch arguments: :func:`compile_weight_gradient_fp8`."""

    def __init__(self, spec: WeightSpec):
        self.spec = spec
        self.left, self.right = spec.tile_rows // 64, spec.tile_columns // 64  # boxes of a step
        self.boxes = self.left + self.right
        self.threads = 128 * (spec.groups + 1)
        self.rows_of_blocks = spec.tile_rows // 32
        self.sets = -(-self.rows_of_blocks // 4)
        self.table_bytes = self.rows_of_blocks * FACTORS + 32

    @cute.jit
    def __call__(
        self,
        dk: cute.Tensor,
        dk_scale: cute.Tensor,
        xn: cute.Tensor,
        xn_scale: cute.Tensor,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        share: Int32,
        stream,
    ):
        spec = self.spec
        codes, operand = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(spec.pair > 1) else load

        def boxes_of(matrix, op, ctas):
            tensor = cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=E4M3), matrix.layout)
            return cpasync.make_tiled_tma_atom(op, tensor, cute.select(codes, mode=[0, 1]), (FP8_STEP, 64), num_multicast=ctas)

        dk_atom, t_dk = boxes_of(dk, load, 1)
        xn_atom, t_xn = boxes_of(xn, shared, spec.pair)
        major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        mma = hopper.make_trivial_tiled_mma(E4M3, E4M3, major, major, Float32, (1, 1, 1), (64, spec.part), source)
        tokens, units = Int32(dk.shape[0]), spec.crossing + spec.units * (Int32(parts.shape[0]) - spec.crossing_parts)
        self.kernel_fp8(mma, dk_atom, t_dk, xn_atom, t_xn, dk_scale, xn_scale, offsets, parts, tokens, share, codes, operand).launch(
            grid=[spec.pair * units, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[spec.pair, 1, 1] if spec.pair > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=spec.beside,
        )

    def layouts(self):
        """Layouts in shared memory: boxes of codes, 64 bytes a token; parts of xn turned, 128 bytes a column; swizzled."""
        spec = self.spec
        made = []
        shapes = ((FP8_STEP, 64), spec.fp8_stages * self.boxes), ((spec.part, FP8_STEP), FP8_SLOTS * spec.tile_columns // spec.part)
        for shape, count in shapes:
            atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, E4M3, shape[1])
            made.append(cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, E4M3), (*shape, count), order=(0, 1, 2)))
        return made

    @cute.kernel
    def kernel_fp8(
        self,
        mma: cute.TiledMma,
        dk_atom: cute.CopyAtom,
        t_dk: cute.Tensor,
        xn_atom: cute.CopyAtom,
        t_xn: cute.Tensor,
        dk_scale: cute.Tensor,
        xn_scale: cute.Tensor,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        tokens: Int32,
        share: Int32,
        l_codes: cute.ComposedLayout,
        l_operand: cute.ComposedLayout,
    ):
        spec = self.spec
        bid, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            bars: cute.struct.Align[cute.struct.MemRange[Int64, 2 * spec.fp8_stages + 3 * FP8_SLOTS], 16]
            tables: cute.struct.Align[cute.struct.MemRange[Int32, FP8_SLOTS * self.table_bytes // 4], 128]
            codes: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_codes)], 1024]
            operand: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_operand)], 1024]

        store = cutlass.utils.SmemAllocator().allocate(Storage)
        base = store.bars.data_ptr()
        place, made = base, {}
        counts = dict(full=spec.fp8_stages, empty=spec.fp8_stages, table=FP8_SLOTS, made=FP8_SLOTS, used=FP8_SLOTS)
        for name, count in counts.items():
            made[name] = place
            place = place + count
        bars = Bundle(**made)
        if warp == 0:
            cpasync.prefetch_descriptor(dk_atom)
            cpasync.prefetch_descriptor(xn_atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(spec.fp8_stages):
                    cute.arch.mbarrier_init(bars.full + i, 1)
                    cute.arch.mbarrier_init(bars.empty + i, TURNERS * spec.pair + 4 * spec.groups)
                for i in cutlass.range_constexpr(FP8_SLOTS):
                    cute.arch.mbarrier_init(bars.table + i, 1)
                    cute.arch.mbarrier_init(bars.made + i, TURNERS)
                    cute.arch.mbarrier_init(bars.used + i, 4 * spec.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(spec.pair > 1):  # no arrival before the other CTA's barriers exist
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        batch, total = Int32(1), tokens
        if const_expr(not spec.dense):
            batch = Int32(offsets.shape[0]) - 1
            total = Int32(offsets[batch])
        unit = cute.arch.make_warp_uniform(bid // spec.pair)
        runs = Int32(parts.shape[0]) - spec.crossing_parts
        steps, across = cute.ceil_div(total, FP8_STEP), spec.across * share
        t = Bundle(
            dk_scale=dk_scale, xn_scale=xn_scale, offsets=offsets, parts=parts, batch=batch, total=total, steps=steps, runs=runs, unit=unit,
            crossed=Int32(Int64(steps) * across // (across + 2 * SHARES * runs)), rank=bid % spec.pair,
        )  # fmt: skip
        if const_expr(spec.across % 2 == 0):
            t = self.run(t, Int32(0))
        s = Bundle(
            tables=Int32(store.tables.data_ptr().toint()),
            codes=Int32(store.codes.data_ptr().toint()),
            operand=Int32(store.operand.data_ptr().toint()),
        )
        registers = REGISTERS.get(spec.groups, (0, 0))  # two warpgroups have as many registers each as instructions can name
        if warp < 4:
            if const_expr(spec.groups in REGISTERS):
                cute.arch.setmaxregister_decrease(registers[1])
            if warp == 0:
                boxes = store.codes.get_tensor(l_codes.outer, swizzle=l_codes.inner)
                self.turn(t, s, bars, Int32(6), 2, (boxes, (dk_atom, t_dk), (xn_atom, t_xn)))
            elif warp == 1:
                self.tabulate_steps(t, s, bars)
            else:
                self.turn(t, s, bars, 3 * (warp - 2), 3, None)
        else:
            if const_expr(spec.groups in REGISTERS):
                cute.arch.setmaxregister_increase(registers[0])
            thread = mma.get_slice(0)
            b = thread.make_fragment_B(thread.partition_B(store.operand.get_tensor(l_operand.outer, swizzle=l_operand.inner)))
            self.sum_steps(t, s, bars, mma, b)
        if const_expr(spec.pair > 1):  # the other CTA may still write and arrive here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def runs(self, t):
        """How many tiles a unit has a run of: one, but for the middle one of an odd number of crossing units of two tiles."""
        count = Int32(1)
        if (t.unit < self.spec.crossing) & (t.unit % self.spec.across == self.spec.across // 2):
            count = Int32(2)
        return count

    @cute.jit
    def run(self, t, n: Int32):
        """The ``n``-th run of this CTA's unit: its tile of the result, its steps, its place among the tile's parts.

        Two tiles share ``across`` units of the first ones, which take the first ``crossed`` steps of each; others share the rest.
        """
        spec = self.spec
        run, tile = (t.unit - spec.crossing) // spec.units, (t.unit - spec.crossing) % spec.units
        rest = t.steps - t.crossed
        first = t.crossed + Int32(Int64(rest) * run // t.runs)
        last = t.crossed + Int32(Int64(rest) * (run + 1) // t.runs)
        split = spec.crossing_parts + run
        if const_expr(spec.across > 0):  # noqa: SIM102 - one is decided at compile time
            if t.unit < spec.crossing:
                i = t.unit % spec.across
                side = 2 * i // spec.across + n
                tile = t.unit // spec.across * 2 + side
                first = Int32(Int64(2 * t.crossed) * i // spec.across)
                last = Int32(Int64(2 * t.crossed) * (i + 1) // spec.across)
                first = cutlass.max(first, side * t.crossed) - side * t.crossed
                last = cutlass.min(last, (side + 1) * t.crossed) - side * t.crossed
                split = i - side * (spec.across // 2)
        tall = spec.rows // spec.tile_rows
        tile = tile * spec.pair + t.rank
        first, last = cute.arch.make_warp_uniform(first), cute.arch.make_warp_uniform(last)
        row0, column0 = tile % tall * spec.tile_rows, tile // tall * spec.tile_columns  # a pair has the same columns
        return Bundle(**{name: getattr(t, name) for name in KEPT}, row0=row0, column0=column0, first=first, last=last, split=split)

    # --- the first warpgroup ----------------------------------------------------------------------------------------------
    @cute.jit
    def ask(self, t, bars, boxes: cute.Tensor, dk, xn, step: Int32, ring: cute.Tensor):
        """Start the copies of a step's codes; a pair's CTAs ask for half of xn's each, for both. ``ring``: stage and phase."""
        stage, pair = ring[0], self.spec.pair
        cute.arch.mbarrier_wait(bars.empty + stage, ring[1])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, self.boxes * BOX)
        sides = (dk, t.row0, 0, self.left, 1), (xn, t.column0, self.left, self.right, pair)
        for (atom, tensor), column, first, count, ctas in sides:
            tiles = cute.local_tile(tensor, (FP8_STEP, 64), (None, None))
            rank, sharing = t.rank if ctas > 1 else 0, cute.make_layout(ctas)
            target, source = cpasync.tma_partition(atom, rank, sharing, cute.group_modes(boxes, 0, 2), cute.group_modes(tiles, 0, 2))
            for i in cutlass.range_constexpr(count):
                place, full = target[None, stage * self.boxes + first + i], bars.full + stage
                if const_expr(ctas > 1):
                    mask = cutlass.Int16(3)
                    cute.copy(atom, source[None, step, column // 64 + i], place, tma_bar_ptr=full, mcast_mask=mask)
                else:
                    cute.copy(atom, source[None, step, column // 64 + i], place, tma_bar_ptr=full)
        advance(ring, 0, self.spec.fp8_stages)

    @cute.jit
    def tabulate_steps(self, t, s, bars):
        """Warp 1: the tables."""
        place = cute.make_rmem_tensor(3, Int32)  # the sequence of a step's first row, where it begins and where it ends
        near = cute.make_rmem_tensor(self.sets + 1, Int32)
        rows = cute.make_rmem_tensor(4, Int32)
        ring = cute.make_rmem_tensor(2, Int32)
        for tensor in (near, rows, ring):
            tensor.fill(0)
        if const_expr(self.spec.across % 2 == 0):
            self.tabulate_run(t, s, bars, place, near, rows, ring)
        else:
            for n in cutlass.range(self.runs(t), unroll=1):
                self.tabulate_run(self.run(t, n), s, bars, place, near, rows, ring)

    @cute.jit
    def tabulate_run(self, t, s, bars, place: cute.Tensor, near: cute.Tensor, rows: cute.Tensor, ring: cute.Tensor):
        """Tables of a run."""
        place.fill(0)
        if t.first < t.last:
            self.find_scales(t, place, t.first, near, rows)
        for step in cutlass.range(t.first, t.last, unroll=1):
            self.write_step(t, s, bars, near, rows, ring)
            if step + 1 < t.last:
                self.find_scales(t, place, step + 1, near, rows)

    @cute.jit
    def find_scales(self, t, place: cute.Tensor, step: Int32, near: cute.Tensor, rows: cute.Tensor):
        """Exponents of a step. Where it lies in one sequence, as most do, five groups of tokens at most meet it: a lane loads one's
        exponents of every fourth block (``near``: by block, then the first token's place in its group). Else (the last of ``near`` is -1)
        a lane finds the ``rows`` of its tokens' scales, -1 past the end."""
        token0, lane = step * FP8_STEP, cute.arch.lane_idx()
        high = self.locate(t, place, token0, Int32(FP8_STEP))
        begin, end = (place[1], place[2]) if const_expr(self.spec.lookup) else (Int32(0), t.total)
        for i in cutlass.range_constexpr(self.sets):
            near[i] = Int32(0)
        near[self.sets] = Int32(-1)
        if token0 + FP8_STEP <= end:
            near[self.sets] = (token0 - begin) % GROUP
            if (near[self.sets] + FP8_STEP - 1) >> 5 >= lane // 4:
                row = self.scale_row(t, place, place[0], token0) + lane // 4
                address = scale_address(t.dk_scale, row, False)
                for i in cutlass.range_constexpr(self.sets):
                    block = cutlass.min(4 * i + lane % 4, self.rows_of_blocks - 1)
                    near[i] = load_byte(address + (t.row0 + 32 * block) // self.spec.dk.width)
        else:
            for i in cutlass.range_constexpr(4):
                token = token0 + 64 * (i // 2) + 2 * lane + i % 2
                rows[i] = Int32(-1)
                if token < t.total:
                    rows[i] = self.scale_row(t, place, high, token)

    @cute.jit
    def write_step(self, t, s, bars, near: cute.Tensor, rows: cute.Tensor, ring: cute.Tensor):
        """The table of a step: factors of the pairs of tokens of each block, then the exponents that they are relative to, as FP32;
        negative where all tokens have them (``EVEN``)."""
        lane, slot = cute.arch.lane_idx(), ring[0]
        cute.arch.mbarrier_wait(bars.used + slot, ring[1] ^ 1)
        table = s.tables + slot * self.table_bytes
        units = table + self.rows_of_blocks * FACTORS
        # of 32 tokens, 8 n + 2 q + c lies in word n of q: what the lanes of a warp load together lies side by side
        mine = table + (lane // 16 * 64 + lane % 4 * 16 + lane // 4 % 4 * 4)
        offset = near[self.sets]
        if offset >= 0:
            beyond = lane // 4 > (offset + FP8_STEP - 1) >> 5
            groups = [[(offset + 64 * w + 2 * lane + i) // GROUP * 4 for i in range(2)] for w in range(2)]
            for i in cutlass.range_constexpr(self.sets):
                top = near[i] if near[i] < 255 else Int32(0)
                for distance in (4, 8, 16):
                    top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
                factor = relative_factor(near[i], top, 0)
                even = cute.arch.vote_ballot_sync(beyond | (near[i] == top)) >> lane
                if (lane < 4) & (4 * i + lane < self.rows_of_blocks):
                    sign = Int32(EVEN) if (even & 0x11111111) == 0x11111111 else Int32(0)
                    store_word(units + 4 * (4 * i + lane), bits_of(scale_of_byte(top)) | sign)
                for k in cutlass.range_constexpr(min(4, self.rows_of_blocks - 4 * i)):
                    for w in cutlass.range_constexpr(2):
                        low, high = (cute.arch.shuffle_sync(factor, groups[w][n] + k) for n in range(2))
                        store_word(mine + ((4 * i + k) * FACTORS + 128 * w), prmt(low, high, 0x5410))
        else:
            for k in cutlass.range(self.rows_of_blocks, unroll=1):
                bytes_ = cute.make_rmem_tensor(4, Int32)
                top = Int32(0)
                for i in cutlass.range_constexpr(4):
                    bytes_[i] = Int32(0)
                    if rows[i] >= 0:
                        bytes_[i] = load_byte(scale_address(t.dk_scale, rows[i], False) + (t.row0 + 32 * k) // self.spec.dk.width)
                for i in cutlass.range_constexpr(4):
                    top = cutlass.max(top, bytes_[i] if bytes_[i] < 255 else Int32(0))
                top = warp_max(top)
                if lane == 0:
                    store_word(units + 4 * k, bits_of(scale_of_byte(top)))
                for w in cutlass.range_constexpr(2):
                    low, high = (relative_factor(bytes_[2 * w + n], top, 0) for n in range(2))
                    store_word(mine + (k * FACTORS + 128 * w), prmt(low, high, 0x5410))
        release(bars.table + slot)
        advance(ring, 0, FP8_SLOTS)

    @cute.jit
    def turn(self, t, s, bars, first: Int32, count: cutlass.Constexpr, copies):
        """xn's codes with tokens innermost: ``count`` runs of 16 tokens of each step, from run ``first`` on; tokens past the last become 0.
        ``copies``: what warp 0 asks for, all stages but one ahead."""
        spec = self.spec
        lane = cute.arch.lane_idx()
        matrix, row = lane // 8, lane % 8
        low, high = matrix % 2, matrix // 2
        # blocks of 16 tokens and 32 columns: a lane's row of 16 bytes where it loads, and where it stores the columns that it has then
        plain = s.codes + self.left * BOX + first * 1024
        source = plain + (8 * low + row) * 64 + ((high ^ (row // 2)) << 4)
        column = 16 * high + 2 * row + (low ^ (row // 4))
        target = s.operand + column * FP8_STEP
        selector = Int32(0x6420) + 0x1111 * (lane // 16)
        ring = cute.make_rmem_tensor(6, Int32)  # stage and its phase, slot and its phase; the stage that is filled next
        ring.fill(0)
        if const_expr(copies is not None):
            ring[5] = Int32(1)
        if const_expr(spec.across % 2 == 0):
            self.turn_run(t, bars, plain, source, target, selector, column, ring, first, count, copies)
        else:
            for n in cutlass.range(self.runs(t), unroll=1):
                self.turn_run(self.run(t, n), bars, plain, source, target, selector, column, ring, first, count, copies)

    @cute.jit
    def turn_run(
        self, t, bars, plain: Int32, source: Int32, target: Int32, selector: Int32, column: Int32, ring: cute.Tensor, first: Int32,
        count: cutlass.Constexpr, copies,
    ):  # fmt: skip
        """Those of a run."""
        spec = self.spec
        lane, ahead = cute.arch.lane_idx(), spec.fp8_stages - 1
        if const_expr(copies is not None):
            for step in cutlass.range(t.first, cutlass.min(t.first + ahead, t.last), unroll=1):
                self.ask(t, bars, *copies, step, ring_of(ring, 4))
        for step in cutlass.range(t.first, t.last, unroll=1):
            stage, slot = ring[0], ring[2]
            cute.arch.mbarrier_wait(bars.full + stage, ring[1])
            cute.arch.mbarrier_wait(bars.used + slot, ring[3] ^ 1)
            begin, end = source + stage * (self.boxes * BOX), target + slot * (self.right * BOX)
            left = t.total - step * FP8_STEP - 16 * first  # of this warp's tokens
            if left < 16 * count:  # other tokens' codes, or NaN
                for box in cutlass.range_constexpr(self.right):
                    for i in cutlass.range(4 * cutlass.max(left, 0) + lane, 64 * count, 32, unroll=1):
                        zero, place = Int32(0), plain + stage * (self.boxes * BOX) + (box * BOX + 16 * i)
                        effect([place, zero, zero, zero, zero], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
                cute.arch.sync_warp()
            blocks = [(r, c) for r in range(count) for c in range(spec.tile_columns // 32)]
            for i in cutlass.range_constexpr(0, len(blocks), IN_FLIGHT):
                some = []
                for r, c in blocks[i : i + IN_FLIGHT]:
                    some.append(load_matrices((begin ^ (c % 2 * 32)) + (c // 2 * BOX + r * 1024), transposed=True))
                for words, (r, c) in zip(some, blocks[i : i + IN_FLIGHT], strict=True):
                    turned = [pick(words[m], words[m + 1], x) for m in (0, 2) for x in (selector, selector ^ 0x1111)]
                    effect(
                        [(end + (((column % 8) ^ (first + r)) << 4)) + c * (32 * FP8_STEP), *turned],
                        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
                        "r,r,r,r,r",
                    )
            cute.arch.fence_view_async_shared()
            release(bars.made + slot)
            release(bars.empty + stage)
            if const_expr(spec.pair > 1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars.empty + stage, t.rank ^ 1)
            advance(ring, 0, spec.fp8_stages)
            advance(ring, 2, FP8_SLOTS)
            if const_expr(copies is not None):  # noqa: SIM102 - one is decided at compile time
                if step + ahead < t.last:
                    self.ask(t, bars, *copies, step + ahead, ring_of(ring, 4))

    # --- the computing warpgroups -----------------------------------------------------------------------------------------
    @cute.jit
    def sum_steps(self, t, s, bars, mma, b: cute.Tensor):
        """A warpgroup's 64 columns of dk against all of the tile's columns of xn."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // 128) - 1
        warp = cute.arch.make_warp_uniform(tid % 128 // 32)
        lane = cute.arch.lane_idx()
        pieces = spec.tile_columns // spec.part
        acc = cute.make_rmem_tensor((spec.part // 2, pieces), Float32)
        partial = cute.make_rmem_tensor(mma.partition_shape_C((64, spec.part)), Float32)
        operand = mma.make_fragment_A(mma.partition_shape_A((64, FP8_STEP)))
        block = 2 * group + warp // 2
        # matrices of 8 tokens and 16 columns: lane n holds the address of token n of 32
        source = s.codes + group * BOX + lane * 64 + ((warp ^ (lane // 2 % 4)) << 4)
        factors_at = s.tables + block * FACTORS + lane % 4 * 16
        unit_at = s.tables + self.rows_of_blocks * FACTORS + 4 * block
        ring = cute.make_rmem_tensor(4, Int32)
        ring.fill(0)
        held = Bundle(source=source, factors_at=factors_at, unit_at=unit_at)
        if const_expr(spec.across % 2 == 0):
            self.sum_run(t, s, bars, mma, b, acc, partial, operand, held, ring)
        else:
            for n in cutlass.range(self.runs(t), unroll=1):
                self.sum_run(self.run(t, n), s, bars, mma, b, acc, partial, operand, held, ring)
        if const_expr(spec.beside):  # who comes after waits for the launch before, too
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def sum_run(
        self, t, s, bars, mma, b: cute.Tensor, acc: cute.Tensor, partial: cute.Tensor, operand: cute.Tensor, held, ring: cute.Tensor
    ):  # fmt: skip
        """Sums of a run, to memory."""
        spec = self.spec
        lane, pieces = cute.arch.lane_idx(), spec.tile_columns // spec.part
        a = cute.recast_tensor(operand, Int32)
        acc.fill(0.0)
        for step in cutlass.range(t.first, t.last, unroll=1):
            stage, slot = ring[0], ring[2]
            cute.arch.mbarrier_wait(bars.full + stage, ring[1])
            fragments = [load_matrices(held.source + stage * (self.boxes * BOX) + h * 2048, transposed=True) for h in range(FP8_STEP // 32)]
            cute.arch.mbarrier_wait(bars.table + slot, ring[3])
            word = shared_words(held.unit_at + slot * self.table_bytes, 1)[0]
            early = None
            if const_expr(spec.groups == 3):  # on their way beside it (two groups have no registers left)
                early = shared_words(held.factors_at + slot * self.table_bytes, 4)
            unit, even = float_of(word & ~EVEN), cute.arch.vote_all_sync(word < 0)
            left = t.total - step * FP8_STEP
            if left < FP8_STEP:
                for h in cutlass.range_constexpr(FP8_STEP // 32):
                    for k in cutlass.range_constexpr(4):
                        fragments[h][k] = fragments[h][k] & mask_of(left - (32 * h + 8 * k + lane % 4 * 2))
            place = low_half(s.operand + slot * (self.right * BOX))
            if even:
                for h in cutlass.range_constexpr(FP8_STEP // 32):
                    self.take(a, fragments[h], h, None)
            else:
                for h in cutlass.range_constexpr(FP8_STEP // 32):
                    at = held.factors_at + (slot * self.table_bytes + 64 * h)
                    self.take(a, fragments[h], h, early if const_expr(h == 0 and early is not None) else shared_words(at, 4))
            cute.arch.fence_view_async_shared()  # this warp's loads of the codes come before the copy that replaces them
            release(bars.empty + stage)
            cute.arch.mbarrier_wait(bars.made + slot, ring[3])
            for p in cutlass.range_constexpr(pieces):
                product(mma, partial, operand, b[None, None, None, 0], True, place + p * (spec.part * FP8_STEP // 16), FP8_STEP)
                warpgroup.wait_group(0)
                if const_expr(p == pieces - 1):
                    release(bars.used + slot)
                for n in cutlass.range_constexpr(spec.part // 2):
                    acc[n, p] = fma(partial[n], unit, acc[n, p])
            advance(ring, 0, spec.fp8_stages)
            advance(ring, 2, FP8_SLOTS)
        self.store_sums(t, acc)

    def take(self, a: cute.Tensor, words, h: int, factors):
        """The operand's words of 32 tokens, of which ``words`` hold 8 each; under the step's exponent by ``factors``, unless None."""
        for k in range(2):
            for i, selector in enumerate((0x6420, 0x7531)):
                four = prmt(words[2 * k], words[2 * k + 1], selector)
                a[4 * h + 2 * k + i] = four if factors is None else rounded(four, factors[2 * k], factors[2 * k + 1])

    @cute.jit
    def store_sums(self, t, acc: cute.Tensor):
        """Sums under xn's exponents, to memory."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        lane, row = tid % 32, tid // 32 - 4  # of 16 columns of dk
        place = (Int64(t.split), t.row0 + 16 * row + lane // 4 * 2, t.column0 + 2 * (lane % 4))
        address = pinned64((t.parts.iterator + cute.crd2idx(place, t.parts.layout)).toint())
        scales = scale_address(t.xn_scale, 0, True)
        for j in cutlass.range_constexpr(spec.tile_columns // 8):
            unit = Float32(0.0)
            if t.first < t.last:
                unit = scale_of_byte(load_byte(scales + (t.column0 + 8 * j) // spec.xn.width))
            for i in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32)
                for n in cutlass.range_constexpr(2):
                    pair[n] = acc[n + 2 * i + 4 * (j % (spec.part // 8)), j // (spec.part // 8)] * unit
                pointer = cute.make_ptr(Float32, address + 4 * (i * spec.columns + 8 * j), cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))


KEPT = ("dk_scale", "xn_scale", "offsets", "parts", "batch", "total", "rank")
"""What a run has of its unit."""


def ring_of(ring: cute.Tensor, at: int):
    """The two entries of a ring from ``at`` on."""
    return cute.make_tensor(ring.iterator + at, cute.make_layout(2))


@cute.jit
def mask_of(left: Int32) -> Int32:
    """What keeps of a word (two tokens of two columns each) its first ``left`` tokens."""
    low, high = Int32(0x0000FFFF), Int32(0xFFFF0000 - (1 << 32))
    return (low if left > 0 else Int32(0)) | (high if left > 1 else Int32(0))


def pick(a, b, selector):
    """Four bytes of two words."""
    return Int32(inline_ptx(cutlass.cutlass_dsl.T.i32(), [a, b, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def rounded(codes, first, second):
    """Four E4M3 codes times factors, given as FP16 pairs, as E4M3 codes."""
    text = (
        "{.reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;\n"
        " mul.rn.f16x2 a, a, $2; mul.rn.f16x2 b, b, $3;\n"
        " cvt.rn.satfinite.e4m3x2.f16x2 l, a; cvt.rn.satfinite.e4m3x2.f16x2 h, b; mov.b32 $0, {l, h};}"
    )
    return Int32(inline_ptx(cutlass.cutlass_dsl.T.i32(), [codes, first, second], text, "=r,r,r,r"))


@kernel_cache
def compile_weight_gradient_fp8(arch: str, offsets_dtype: str | None, spec: WeightSpec):
    """Compile for ``arch``. Arguments at launch: those of ``fake_weight_gradient``, and how much longer runs of crossing
    units are than others\', times ``SHARES``."""
    return build(arch, WeightGradientFp8(spec), *fake_weight_gradient(offsets_dtype, spec), Int32(1))
