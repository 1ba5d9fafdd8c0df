"""``dw_k = dk^T @ xn`` on Hopper where both are E4M3 codes, straight from compact jagged rows, summed in FP32 in a fixed order.

The contraction runs over tokens, along which exponents change at each group of 32 of one sequence. No Hopper MMA scales blocks, and FP8
wgmma would need both operands turned and a sum in FP32 for every 32 tokens; so codes become FP16: one instruction for two codes, a second
one for their exponent, and FP16 wgmma reads operands whose tokens are rows. Exponents count relative to the largest of a run of tokens
and 32 columns, which multiplies the sum at the end: FP16 holds 21 binary orders exactly, what falls under it is 2^-38 of the largest
product.

A CTA owns a tile of the result and a run of tokens:

* warp 0 asks for the codes of a step (64 tokens) by TMA, several steps ahead;
* warps 0 and 1 write the table of dk's exponents, half of the blocks each, with those of the next two steps on their way;
* warps 2 and 3 turn xn's codes into FP16 in shared memory, the B operand;
* each of the other warpgroups owns 64 columns of dk. Its A operand goes from shared memory to registers by the transposing ``ldmatrix``,
  which moves units of 16 bits: two columns of dk. A byte permutation parts them, so the rows of a warp's accumulators are even columns,
  then odd ones.

A run is cut into segments (``RUN``: tensor cores cut their additions), whose sums are added in FP32 in memory by the same threads. The
runs' sums are added by the caller, in order: the result is bitwise repeatable.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN as E4M3
from cutlass import Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fused_ops.gemm_norm_backward.arguments import fake_weight_gradient
from fused_ops.gemm_norm_backward.config import STAGES, TILE, WeightSpec
from fused_ops.gemm_norm_backward.rows import (
    GROUP,
    codes_to_f16,
    float_to_pair,
    load_byte,
    pinned64,
    scale_address,
    search,
    search_alone,
)
from fused_ops.rings import release
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.matrices import load_matrices, shared_words
from lp_fa4.common.numbers import float_of, inline_ptx, prmt, scale_of_byte
from lp_fa4.compile import build, kernel_cache

HEAD = 6
"""The largest codes of a run are multiplied by 2^6: 448 becomes 28,672 of FP16's 65,504."""
BOX = TILE * 64
"""Bytes of 64 tokens and 64 columns of codes."""
REGISTERS = {2: (208, 88), 3: (144, 80), 4: (104, 64)}
"""By the number of computing warpgroups: registers of a computing thread and of one of the first warpgroup."""
CONVERTERS = 2
"""Warps that make the B operand."""
BATCH = {1: 4, 2: 4, 3: 4, 4: 2}
"""By the number of computing warpgroups: pieces that a converting thread loads before it converts them. With four it has 64 registers, and
four pieces cost 7% of dW at 512 columns; two cost 5% at 384."""
SCAN, SCANNERS = 1, 128
"""Named barrier of the first warpgroup, which finds a segment's exponents; its threads."""


def part_codes(word):
    """Codes of two tokens and two columns, columns innermost, to tokens innermost."""
    return prmt(word, word, 0x3120)


@cute.jit
def pair_to_f16(word, upper: cutlass.Constexpr):
    """Two of four E4M3 codes as a pair of FP16."""
    text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {'lh'[upper]};}}"
    return Int32(inline_ptx(cutlass.cutlass_dsl.T.i32(), [Int32(word)], text, "=r,r"))


def times(pair, factors):
    """Product of two pairs of FP16."""
    return Int32(inline_ptx(cutlass.cutlass_dsl.T.i32(), [Int32(pair), Int32(factors)], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r"))


class WeightGradientOfCodes:
    """See the module's docstring; launch arguments: :func:`compile_weight_gradient_of_codes`."""

    def __init__(self, spec: WeightSpec):
        self.spec = spec
        self.left, self.right = spec.tile_rows // 64, spec.tile_columns // 64  # boxes of a step
        self.boxes = self.left + self.right
        self.threads = 128 * (spec.groups + 1)
        self.ahead = spec.code_stages - STAGES  # a table is written up to STAGES steps before its use
        self.rows_of_blocks, self.columns_of_blocks = spec.tile_rows // 32, spec.tile_columns // 32

    @cute.jit
    def __call__(
        self,
        dk: cute.Tensor,
        dk_scale: cute.Tensor,
        xn: cute.Tensor,
        xn_scale: cute.Tensor,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stream,
    ):
        spec = self.spec
        codes, operand = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()

        def boxes_of(matrix):
            tensor = cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=E4M3), matrix.layout)
            return cpasync.make_tiled_tma_atom(load, tensor, cute.select(codes, mode=[0, 1]), (TILE, 64))

        dk_atom, t_dk = boxes_of(dk)
        xn_atom, t_xn = boxes_of(xn)
        source = warpgroup.OperandSource.RMEM
        mma = hopper.make_trivial_tiled_mma(
            Float16, Float16, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (64, spec.tile_columns), source
        )
        self.kernel(mma, dk_atom, t_dk, xn_atom, t_xn, dk_scale, xn_scale, offsets, parts, Int32(dk.shape[0]), codes, operand).launch(
            grid=[spec.tiles * Int32(parts.shape[0]), 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    def layouts(self):
        """Layouts in shared memory: boxes of codes, 64 bytes a token, swizzled; FP16 of xn, 128 bytes a token and 64 columns, swizzled."""
        spec = self.spec
        atom = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, E4M3, 64)
        codes = cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, E4M3), (TILE, 64, spec.code_stages * self.boxes), order=(0, 1, 2))
        shape = (spec.tile_rows, spec.tile_columns, TILE)
        return codes, hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, Float16, STAGES)

    @cute.kernel
    def kernel(
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
        l_codes: cute.ComposedLayout,
        l_operand: cute.ComposedLayout,
    ):
        spec = self.spec
        bid, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            bars: cute.struct.Align[cute.struct.MemRange[Int64, 2 * spec.code_stages + 3 * STAGES], 16]
            tops: cute.struct.Align[cute.struct.MemRange[Int32, 2 * (self.rows_of_blocks + self.columns_of_blocks)], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Float16, STAGES * TILE * self.rows_of_blocks], 128]
            xn_factors: cute.struct.Align[cute.struct.MemRange[Float16, STAGES * TILE * self.columns_of_blocks], 128]
            codes: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_codes)], 1024]
            operand: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(l_operand)], 1024]

        store = cutlass.utils.SmemAllocator().allocate(Storage)
        base = store.bars.data_ptr()
        bars = Bundle(
            full=base,
            empty=base + spec.code_stages,
            table=base + 2 * spec.code_stages,
            made=base + 2 * spec.code_stages + STAGES,
            used=base + 2 * spec.code_stages + 2 * STAGES,
        )
        if warp == 0:
            cpasync.prefetch_descriptor(dk_atom)
            cpasync.prefetch_descriptor(xn_atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(spec.code_stages):
                    cute.arch.mbarrier_init(bars.full + i, 1)
                    cute.arch.mbarrier_init(bars.empty + i, CONVERTERS + 4 * spec.groups)
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(bars.table + i, 2)
                    cute.arch.mbarrier_init(bars.made + i, CONVERTERS)
                    cute.arch.mbarrier_init(bars.used + i, 4 * spec.groups)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        tile, split = bid % spec.tiles, bid // spec.tiles
        wide = spec.columns // spec.tile_columns
        row0, column0 = tile // wide * spec.tile_rows, tile % wide * spec.tile_columns
        batch, total = Int32(1), tokens
        if const_expr(not spec.dense):
            batch = Int32(offsets.shape[0]) - 1
            total = Int32(offsets[batch])
        steps, splits = cute.ceil_div(total, TILE), Int32(parts.shape[0])
        first = Int32(Int64(steps) * split // splits)
        last = Int32(Int64(steps) * (split + 1) // splits)
        segments = cutlass.max(cute.ceil_div(last - first, spec.run // TILE), 1)
        t = Bundle(
            dk_scale=dk_scale, xn_scale=xn_scale, offsets=offsets, parts=parts, row0=row0, column0=column0, batch=batch, total=total,
            first=first, last=last, segments=segments, split=split,
        )  # fmt: skip
        s = Bundle(
            tops=store.tops.get_tensor(cute.make_layout((self.rows_of_blocks + self.columns_of_blocks, 2))),
            top_pointer=store.tops.data_ptr(),
            factors=Int32(store.factors.data_ptr().toint()),
            xn_factors=Int32(store.xn_factors.data_ptr().toint()),
            codes=Int32(store.codes.data_ptr().toint()),
            operand=Int32(store.operand.data_ptr().toint()),
        )
        registers = REGISTERS.get(spec.groups, (0, 0))  # two warpgroups have as many registers each as instructions can name
        if warp < 4:
            if const_expr(spec.groups in REGISTERS):
                cute.arch.setmaxregister_decrease(registers[1])
            boxes = store.codes.get_tensor(l_codes.outer, swizzle=l_codes.inner)
            self.prepare(t, s, bars, boxes, (dk_atom, t_dk), (xn_atom, t_xn))
        else:
            if const_expr(spec.groups in REGISTERS):
                cute.arch.setmaxregister_increase(registers[0])
            thread = mma.get_slice(0)
            b = thread.make_fragment_B(thread.partition_B(store.operand.get_tensor(l_operand.outer, swizzle=l_operand.inner)))
            self.compute(t, s, bars, mma, b)

    # --- the first warpgroup ----------------------------------------------------------------------------------------------
    @cute.jit
    def prepare(self, t, s, bars, boxes: cute.Tensor, dk, xn):
        """All walk the run's segments, whose exponents they find first; warp 0 asks for what lies ahead beside its half of the tables."""
        spec = self.spec
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        place = cute.make_rmem_tensor(3, Int32)  # the sequence of a step's first row, where it begins and where it ends
        place.fill(0)
        ring = cute.make_rmem_tensor(4, Int32)  # stage of codes and its phase; stage of operands and its phase
        ring.fill(0)
        if warp == 0:  # of codes: the stage that is filled next
            ring[1] = Int32(1)
            for step in cutlass.range(t.first, cutlass.min(t.first + self.ahead, t.last), unroll=1):
                self.ask(bars, boxes, dk, xn, t, step, ring)
        for segment in cutlass.range(t.segments, unroll=1):
            begin = t.first + segment * (spec.run // TILE)
            end = cutlass.min(begin + spec.run // TILE, t.last)
            self.scan(t, s, begin, end, segment % 2)
            if warp == 0:
                self.tabulate(t, s, bars, begin, end, segment % 2, place, ring, 0, (boxes, dk, xn))
            elif warp == 1:
                self.tabulate(t, s, bars, begin, end, segment % 2, place, ring, 1, None)
            else:
                self.convert(t, s, bars, begin, end, ring)

    @cute.jit
    def ask(self, bars, boxes: cute.Tensor, dk, xn, t, step: Int32, ring: cute.Tensor):
        """Start the copies of a step's codes."""
        one, stage = cute.make_layout(1), ring[0]
        cute.arch.mbarrier_wait(bars.empty + stage, ring[1])
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, self.boxes * BOX)
        for (atom, tensor), column, first, count in ((dk, t.row0, 0, self.left), (xn, t.column0, self.left, self.right)):
            tiles = cute.local_tile(tensor, (TILE, 64), (None, None))
            target, source = cpasync.tma_partition(atom, 0, one, cute.group_modes(boxes, 0, 2), cute.group_modes(tiles, 0, 2))
            for i in cutlass.range_constexpr(count):
                cute.copy(
                    atom, source[None, step, column // 64 + i], target[None, stage * self.boxes + first + i], tma_bar_ptr=bars.full + stage
                )
        advance(ring, 0, self.spec.code_stages)

    @cute.jit
    def scale_row(self, t, place: cute.Tensor, high: Int32, token: Int32) -> Int32:
        """Row of a token's scales; its sequence is between that of ``place`` and ``high``."""
        row = token // GROUP
        if const_expr(self.spec.lookup):
            b, begin = place[0], place[1]
            if place[0] < high:
                b = search_alone(t.offsets, place[0], high, token)
                begin = Int32(t.offsets[b])
            row = (begin >> 5) + b + ((token - begin) >> 5)  # a group has 2^5 tokens; a division rounds the other way and costs more
        return row

    @cute.jit
    def locate(self, t, place: cute.Tensor, token: Int32, count: Int32) -> Int32:
        """Bring ``place`` to the sequence of a token; returns the sequence of the last of the ``count`` tokens from there on."""
        high = Int32(0)
        if const_expr(self.spec.lookup):
            if (token >= place[2]) & (token < t.total):
                place[0] = search(t.offsets, place[0], t.batch, token)
                place[1], place[2] = Int32(t.offsets[place[0]]), Int32(t.offsets[place[0] + 1])
            high = place[0]
            last = cutlass.min(token + count, t.total) - 1
            if last >= place[2]:
                high = search(t.offsets, place[0], t.batch, last)
        return high

    @cute.jit
    def scan(self, t, s, begin: Int32, end: Int32, parity: Int32):
        """The largest exponent of a segment in every 32 columns of either operand, NaN's aside, into shared memory.

        The rows of a jagged scale tensor that belong to no group hold 0 by contract, so rows are taken in one range.
        """
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        low, high = Int32(0), Int32(-1)
        if begin < end:
            near = cute.make_rmem_tensor(3, Int32)
            near.fill(0)
            token, last = begin * TILE, cutlass.min(end * TILE, t.total) - 1
            after = self.locate(t, near, token, last - token + 1)
            low = self.scale_row(t, near, near[0], token)
            high = self.scale_row(t, near, after, last)
        blocks = self.rows_of_blocks + self.columns_of_blocks
        tops = s.tops
        index = tid
        if index < blocks:
            tops[index, parity] = Int32(0)
        cute.arch.barrier(barrier_id=SCAN, number_of_threads=SCANNERS)
        for kind, scale, column, at, count in (
            (spec.dk, t.dk_scale, t.row0, 0, self.rows_of_blocks),
            (spec.xn, t.xn_scale, t.column0, self.rows_of_blocks, self.columns_of_blocks),
        ):
            if const_expr(kind.static):
                if index < count:
                    tops[at + index, parity] = load_byte(scale_address(scale, 0, True) + (column + 32 * index) // kind.width)
            else:
                found = cute.make_rmem_tensor(count, Int32)
                found.fill(0)
                for row in cutlass.range(low + index, high + 1, SCANNERS, unroll=2):
                    address = scale_address(scale, row, False)
                    for n in cutlass.range_constexpr(count):
                        byte = load_byte(address + (column + 32 * n) // kind.width)
                        found[n] = cutlass.max(found[n], byte if byte < 255 else Int32(0))
                for n in cutlass.range_constexpr(count):
                    cute.arch.atomic_max(s.top_pointer + (at + n + parity * blocks), found[n])
        cute.arch.barrier(barrier_id=SCAN, number_of_threads=SCANNERS)

    def blocks_of(self, half: int) -> list:
        """Blocks of either operand whose exponents a warp writes: operand, 0 (dk) or 1 (xn), the tile's blocks, the warp's."""
        spec = self.spec
        sides = [(spec.dk, 0, self.rows_of_blocks), (spec.xn, 1, self.columns_of_blocks)]
        return [(kind, side, count, range(half * count // 2, (half + 1) * count // 2)) for kind, side, count in sides if not kind.static]

    @cute.jit
    def load_bytes(self, t, place: cute.Tensor, step: Int32, bytes_, near: cute.Tensor, half: cutlass.Constexpr):
        """Exponents of a step. Where it lies in one sequence, as most do, three groups of tokens at most meet it: a lane loads one's
        exponent of one block (``near``: of dk, of xn, and the first token's place in its group). Else (``near[2]`` is -1) a lane loads
        those of its two tokens, which lie side by side."""
        token0, lane = step * TILE, cute.arch.lane_idx()
        high = self.locate(t, place, token0, Int32(TILE))
        begin, end = (place[1], place[2]) if const_expr(self.spec.lookup) else (Int32(0), t.total)
        near[2] = Int32(-1)
        if token0 + TILE <= end:
            near[2] = (token0 - begin) % GROUP
            if (near[2] + TILE - 1) >> 5 >= lane // 8:
                row = self.scale_row(t, place, place[0], token0) + lane // 8
                for kind, side, _, blocks in self.blocks_of(half):
                    address = scale_address(t.dk_scale if side == 0 else t.xn_scale, row, False)
                    block = blocks[0] + cutlass.min(lane % 8, len(blocks) - 1)
                    near[side] = load_byte(address + ((t.row0 if side == 0 else t.column0) + 32 * block) // kind.width)
        else:
            for i in cutlass.range_constexpr(2):
                token = token0 + 2 * lane + i
                if token < t.total:
                    row = self.scale_row(t, place, high, token)
                    for kind, side, count, blocks in self.blocks_of(half):
                        address = scale_address(t.dk_scale if side == 0 else t.xn_scale, row, False)
                        column = t.row0 if side == 0 else t.column0
                        even = 32 * count % kind.width == 0 or kind.width == 32  # then a tile begins with a block
                        if const_expr(even):
                            address = address + column // kind.width
                        for k, n in enumerate(blocks):
                            if const_expr(even):
                                bytes_[side][k, i] = load_byte(address + 32 * n // kind.width)
                            else:
                                bytes_[side][k, i] = load_byte(address + (column + 32 * n) // kind.width)

    @cute.jit
    def tabulate(
        self, t, s, bars, begin: Int32, end: Int32, parity: Int32, place: cute.Tensor, ring: cute.Tensor, half: cutlass.Constexpr, copies
    ):  # fmt: skip
        """Warps 0 and 1: tables of exponents, half of the blocks each. ``copies``: what warp 0 asks for ``ahead`` steps before."""
        # of two steps in turn: what is loaded now is used two steps later, since a step is shorter than the way to memory
        halves = self.rows_of_blocks // 2, self.columns_of_blocks // 2
        bytes_ = [[cute.make_rmem_tensor((n, 2), Int32) for n in halves] for _ in range(2)]
        near = [cute.make_rmem_tensor(3, Int32) for _ in range(2)]
        for tensor in (*bytes_[0], *bytes_[1], *near):
            tensor.fill(0)
        for i in cutlass.range_constexpr(2):
            if begin + i < end:
                self.load_bytes(t, place, begin + i, bytes_[i], near[i], half)
        for even in cutlass.range(begin, end, 2, unroll=1):
            for i in cutlass.range_constexpr(2):
                step = even + i
                if step < end:
                    self.write_table(t, s, bars, step, parity, bytes_[i], near[i], ring, half)
                    if step + 2 < end:
                        self.load_bytes(t, place, step + 2, bytes_[i], near[i], half)
                    if const_expr(copies is not None):  # noqa: SIM102 - one is decided at compile time
                        if step + self.ahead < t.last:
                            self.ask(bars, *copies, t, step + self.ahead, ring)

    @cute.jit
    def write_table(
        self, t, s, bars, step: Int32, parity: Int32, bytes_, near: cute.Tensor, ring: cute.Tensor, half: cutlass.Constexpr
    ):  # fmt: skip
        """A warp's part of the tables of one step."""
        lane = cute.arch.lane_idx()
        tops = s.tops
        slot = ring[2]
        cute.arch.mbarrier_wait(bars.used + slot, ring[3] ^ 1)
        for _, side, count, blocks in self.blocks_of(half):
            table = s.factors if side == 0 else s.xn_factors
            # of dk, 16 k + 8 h + 2 q + c lies in word 2 k + h of q
            table = table + slot * (TILE * 2 * count) + (lane % 4 * 32 + lane // 4 * 4 if side == 0 else 4 * lane)
            first = side * self.rows_of_blocks
            if near[2] >= 0:
                top = tops[first + blocks[0] + cutlass.min(lane % 8, len(blocks) - 1), parity]
                factor = relative_factors(near[side], near[side], top)
                source = [(near[2] + 2 * lane + i) // GROUP * 8 for i in range(2)]
                for k, n in enumerate(blocks):
                    low, high = (cute.arch.shuffle_sync(factor, source[i] + k) for i in range(2))
                    store_word(table + 2 * TILE * n, prmt(low, high, 0x5410))
            else:
                for k, n in enumerate(blocks):
                    words = []
                    for i in cutlass.range_constexpr(2):  # what is left of a step before, past the end, could be that of a NaN
                        words.append(bytes_[side][k, i] if step * TILE + 2 * lane + i < t.total else Int32(0))
                    store_word(table + 2 * TILE * n, relative_factors(words[0], words[1], tops[n + first, parity]))
        release(bars.table + slot)
        advance(ring, 2, STAGES)

    @cute.jit
    def convert(self, t, s, bars, begin: Int32, end: Int32, ring: cute.Tensor):
        """Warps 2 and 3: xn's codes to FP16, 16 of a token at a time; rows past the last token become 0."""
        spec = self.spec
        lane = cute.arch.lane_idx()
        worker = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 2
        for step in cutlass.range(begin, end, unroll=1):
            stage, slot = ring[0], ring[2]
            cute.arch.mbarrier_wait(bars.full + stage, ring[1])
            if const_expr(not spec.xn.static):
                cute.arch.mbarrier_wait(bars.table + slot, ring[3])
            cute.arch.mbarrier_wait(bars.used + slot, ring[3] ^ 1)
            # 8 tokens and 64 columns at a time, a thread 16 columns of a token; from unit to unit nothing changes but constant distances
            token, piece = 8 * worker + lane // 4, lane % 4
            source = s.codes + (stage * self.boxes + self.left) * BOX + token * 64 + ((piece ^ (token // 2 % 4)) << 4)
            target = s.operand + slot * (2 * TILE * spec.tile_columns) + token * 128
            chunks = [((2 * piece + h) ^ (token % 8)) << 4 for h in range(2)]
            factors = s.xn_factors + slot * (TILE * 2 * self.columns_of_blocks) + 2 * TILE * (piece // 2) + 2 * token
            batch = BATCH[spec.groups]
            for first in cutlass.range_constexpr(0, 8 * self.right // CONVERTERS, batch):
                units = []
                for i in cutlass.range_constexpr(first, first + batch):
                    block, after = i * CONVERTERS // 8, i * CONVERTERS % 8 * 8
                    units.append((block, after, shared_words(source + block * BOX + after * 64, 4)))
                for block, after, codes in units:
                    words = self.converted(codes, factors + 4 * TILE * block + 2 * after)
                    for h in cutlass.range_constexpr(2):
                        store_words(target + (block * 8192 + after * 128) + chunks[h], words[None, h])
            if step * TILE + TILE > t.total:  # rows past the end
                zeros = cute.make_rmem_tensor(4, Int32)
                zeros.fill(0)
                for i in cutlass.range_constexpr(8 * self.right // CONVERTERS):
                    block, after = i * CONVERTERS // 8, i * CONVERTERS % 8 * 8
                    if step * TILE + token + after >= t.total:
                        for h in cutlass.range_constexpr(2):
                            store_words(target + (block * 8192 + after * 128) + chunks[h], zeros)
            cute.arch.fence_view_async_shared()
            release(bars.made + slot)
            release(bars.empty + stage)
            advance(ring, 0, spec.code_stages)
            advance(ring, 2, STAGES)

    @cute.jit
    def converted(self, codes: cute.Tensor, factors: Int32):
        """16 codes as FP16, two pieces of 16 bytes. ``factors``: address of their exponent."""
        words = cute.make_rmem_tensor((4, 2), Int32)
        factor = Int32(0)
        if const_expr(not self.spec.xn.static):
            factor = load_half(factors)
            factor = prmt(factor, factor, 0x1010)
        for n in cutlass.range_constexpr(4):
            if const_expr(self.spec.xn.static):
                words[2 * n % 4, n // 2], words[2 * n % 4 + 1, n // 2] = pair_to_f16(codes[n], 0), pair_to_f16(codes[n], 1)
            else:
                words[2 * n % 4, n // 2], words[2 * n % 4 + 1, n // 2] = codes_to_f16(codes[n], factor)
        return words

    # --- the computing warpgroups -----------------------------------------------------------------------------------------
    @cute.jit
    def compute(self, t, s, bars, mma, b: cute.Tensor):
        """A warpgroup's 64 columns of dk against all of the tile's columns of xn."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tid // 128) - 1
        warp = cute.arch.make_warp_uniform(tid % 128 // 32)
        lane = cute.arch.lane_idx()
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, spec.tile_columns)), Float32)
        # Two operands in turn, of 32 tokens each or, where registers are few, of 16: with less room than that the products are serialized.
        depth = 1 if spec.groups == 4 else 2
        operands = [mma.make_fragment_A(mma.partition_shape_A((64, 16 * depth))) for _ in range(2)]
        block = 2 * group + warp // 2
        # matrices of 8 tokens and 16 columns: lane n holds the address of token n of 32
        source = s.codes + group * BOX + lane * 64 + ((warp ^ (lane // 2 % 4)) << 4)
        ring = cute.make_rmem_tensor(4, Int32)
        ring.fill(0)
        for segment in cutlass.range(t.segments, unroll=1):
            begin = t.first + segment * (spec.run // TILE)
            end = cutlass.min(begin + spec.run // TILE, t.last)
            acc.fill(0.0)
            before = Int32(-1)
            for step in cutlass.range(begin, end, unroll=1):
                stage, slot = ring[0], ring[2]
                cute.arch.mbarrier_wait(bars.full + stage, ring[1])
                cute.arch.mbarrier_wait(bars.table + slot, ring[3])
                cute.arch.mbarrier_wait(bars.made + slot, ring[3])
                # both halves at once, so that one's way from shared memory is the other's conversion
                fragments = [load_matrices(source + stage * (self.boxes * BOX) + h * 2048, transposed=True) for h in range(2)]
                for h in cutlass.range_constexpr(2):
                    words = cute.make_rmem_tensor(4, Int32)  # 8 tokens each
                    for k in cutlass.range_constexpr(4):
                        words[k] = part_codes(fragments[h][k])
                    factors: list = []
                    if const_expr(not spec.dk.static):
                        factors = shared_words(
                            s.factors + slot * (TILE * 2 * self.rows_of_blocks) + 128 * block + lane % 4 * 32 + 16 * h, 4
                        )
                    if step * TILE + TILE > t.total:
                        for k in cutlass.range_constexpr(4):
                            first = step * TILE + 32 * h + 8 * k + lane % 4 * 2
                            low, high = Int32(0x00FF00FF), Int32(0xFF00FF00 - (1 << 32))
                            mask = (low if first < t.total else Int32(0)) | (high if first + 1 < t.total else Int32(0))
                            words[k] = words[k] & mask
                    for part in cutlass.range_constexpr(2 // depth):
                        operand = operands[(2 // depth * h + part) % 2]
                        a = cute.recast_tensor(operand, Int32)
                        for k in cutlass.range_constexpr(2 * depth):
                            at = 2 * depth * part + k
                            for i in cutlass.range_constexpr(2):
                                pair = pair_to_f16(words[at], i)
                                if const_expr(not spec.dk.static):
                                    pair = times(pair, factors[at])
                                a[4 * (k // 2) + 2 * (k % 2) + i] = pair
                        warpgroup.fence()
                        atom = cute.make_mma_atom(mma.op)
                        atom.set(warpgroup.Field.ACCUMULATE, True)
                        for k in cutlass.range_constexpr(depth):
                            cute.gemm(atom, acc, operand[None, None, k], b[None, None, 2 * h + depth * part + k, slot], acc)
                        warpgroup.commit_group()
                        warpgroup.wait_group(1)
                        if const_expr(h == 0 and part == 0):
                            if before >= 0:
                                release(bars.used + before)
                            cute.arch.fence_view_async_shared()  # this warp's loads of the codes come before the copy that replaces them
                            release(bars.empty + stage)
                before = slot
                advance(ring, 0, spec.code_stages)
                advance(ring, 2, STAGES)
            warpgroup.wait_group(0)
            if before >= 0:
                release(bars.used + before)
            self.store(t, s, acc, segment, begin < end)

    @cute.jit
    def store(self, t, s, acc: cute.Tensor, segment: Int32, any_step):
        """Sums under their exponents, to memory; from the second segment on they are added to what is there."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        lane, row = tid % 32, tid // 32 - 4  # of 16 columns of dk
        tops = s.tops
        parity = segment % 2

        @cute.jit
        def unit(kind: cutlass.Constexpr, n):
            value = Float32(0.0)  # nobody has written exponents where there is no token
            if any_step:
                value = scale_of_byte(tops[n, parity])
            return value if const_expr(kind.static) else value * Float32(2.0**-HEAD)

        rows_unit = unit(spec.dk, row // 2)
        place = (Int64(t.split), t.row0 + 16 * row + lane // 4 * 2, t.column0 + 2 * (lane % 4))
        address = pinned64((t.parts.iterator + cute.crd2idx(place, t.parts.layout)).toint())
        for j in cutlass.range_constexpr(spec.tile_columns // 8):
            columns_unit = unit(spec.xn, self.rows_of_blocks + j // 4)
            for i in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32)
                for n in cutlass.range_constexpr(2):
                    pair[n] = acc[n + 2 * i + 4 * j] * rows_unit * columns_unit
                pointer = cute.make_ptr(Float32, address + 4 * (i * spec.columns + 8 * j), cute.AddressSpace.gmem, assumed_align=8)
                there = cute.make_tensor(pointer, cute.make_layout(2))
                if segment > 0:
                    old = cute.make_rmem_tensor(2, Float32)
                    cute.autovec_copy(there, old)
                    pair[0], pair[1] = old[0] + pair[0], old[1] + pair[1]
                cute.autovec_copy(pair, there)


@cute.jit
def store_words(address: Int32, words: cute.Tensor):
    """16 bytes to shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(4)))


def store_word(address, word):
    """A word to shared memory."""
    inline_ptx(None, [Int32(address), Int32(word)], "st.shared.b32 [$0], $1;", "r,r,~{memory}", side_effects=True)


@cute.jit
def relative_factors(first: Int32, second: Int32, top: Int32):
    """``2**(byte - top + HEAD)`` of two bytes as a pair of FP16; NaN for byte 255, 0 under 2^-25."""
    out = []
    for byte in (first, second):
        bits = cutlass.max(byte - top + (HEAD + 127), 87) << 23
        out.append(float_of(bits if byte < 255 else Int32(0x7FC00000)))
    return float_to_pair(out[0], out[1], True)


def load_half(address):
    """16 bits of shared memory."""
    text = "{.reg .b16 v; ld.shared.u16 v, [$1]; cvt.u32.u16 $0, v;}"
    return Int32(inline_ptx(cutlass.cutlass_dsl.T.i32(), [Int32(address)], text, "=r,r,~{memory}", side_effects=True))


@cute.jit
def advance(ring: cute.Tensor, at: cutlass.Constexpr, count: cutlass.Constexpr):
    """The next place of a ring: ``ring[at]`` is a stage, ``ring[at + 1]`` its phase."""
    ring[at] = ring[at] + 1
    if ring[at] == count:
        ring[at], ring[at + 1] = Int32(0), ring[at + 1] ^ 1


@kernel_cache
def compile_weight_gradient_of_codes(arch: str, offsets_dtype: str | None, spec: WeightSpec):
    """Compile for ``arch``. Arguments at launch: those of ``fake_weight_gradient``."""
    return build(arch, WeightGradientOfCodes(spec), *fake_weight_gradient(offsets_dtype, spec))
