"""``dx`` and ``dnorm_weight`` on Hopper where the gradients are E4M3 codes: the pass of ``input_gradient``, by roles.

Formulas, FP16 operands and exponents, and the cluster that shares the columns: ``input_gradient``. What differs is who does what. A cluster
walks a run of tiles of 64 tokens; its computing warpgroups take them in turn, so that one's products run under another's norm, and
everything they read is on its way long before:

* warp 0 asks for codes of dk by TMA, 128 columns at a time, warp 1 for those of ``x`` and dv that belong to this CTA, 64 columns at a time:
  two rings, both in the order in which they are used, so that most of shared memory beside the weight is always being filled;
* warps 2 and 3 look up whose row it is and write a table of what belongs to it: ``rstd``, sequence, exponents;
* a computing warpgroup multiplies from registers, keeps ``x`` in registers from its first use to its second, and stores ``dx`` from there;
  sums for ``dnorm_weight`` stay in registers for the whole run: a row of them for each warp is added up by the caller, in order.

What limits it is the way between shared memory and registers (128 bytes a clock and multiprocessor, three quarters of it in use): the
operands of the products take 40% of that. So nothing is read that two rows can share, and no sum passes through shared memory.

Where ``x`` is BF16, products are summed in FP16, rounded once an instruction of 16: arithmetic beside such sums is slowed down less, and dv
is added to two of them at once. No sum can leave FP16: codes are 448 at most, times 1 under a row's largest exponent, and a CTA multiplies
its weight by the power of two that keeps every column's magnitudes from adding up to more than 64 (``HALVES_TOP``). Nothing is lost at the
lower end: E4M3's smallest code times the mean of a column whose magnitudes add up to the CTA's largest sum is 2^11 times FP16's smallest
number or more, so that a column 2^-12 of the largest still has BF16's accuracy. Rows whose exponents are all one need no factor.

No two lanes that are served together meet in a bank: a thread's codes are 32 consecutive ones of dk (one exponent), its columns runs of 8,
and its rows are those that the swizzle of TMA puts side by side (:func:`row_in_eight`; which row of a product is which token is free).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass import Float8E4M3FN as E4M3
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import T
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from fused_ops.gemm_norm_backward.arguments import fake_operand
from fused_ops.gemm_norm_backward.config import TILE, InputSpec
from fused_ops.gemm_norm_backward.input_gradient import (
    HEAD,
    PIECES,
    InputGradient,
    load_generic,
    load_shared,
)
from fused_ops.gemm_norm_backward.rows import (
    GROUP,
    address_of,
    codes_as_f16,
    codes_to_f16,
    float_to_pair,
    load_byte,
    load_words,
    pair_to_float,
    relative_factor,
    scale_address,
    search,
    search_alone,
)
from fused_ops.gemm_norm_backward.weight_gradient_codes import advance, load_half
from fused_ops.rings import release
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.halves import fma2, mul2
from lp_fa4.common.matrices import shared_words
from lp_fa4.common.numbers import bits_of, e4m3x4_to_float, effect, float_of, inline_ptx, pinned, prmt, quad_sum, scale_of_byte
from lp_fa4.common.rows import fma
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol
from lp_fa4.sm90.wgmma import low_half, product

CODES = 128
"""Columns of dk of a stage."""
EXPONENTS = 10 * TILE
"""Where exponents begin in a table, after the rows' ``rstd``, sequences and places of their exponents (halves)."""
HALVES_HEAD, HALVES_TOP = 0, 5
"""With FP16 sums: codes stay as they are where the row's exponents are largest, and the weight is multiplied so that its columns'
magnitudes add up to 64 at most: 448 * 64 is 28,672, 64 roundings by 2^-11 make of that 29,600 at most, and dv adds 448 * 2^6, where FP16
ends at 65,504."""
LEAST_RATIO, LARGEST_RATIO = -14, 6
"""Of dv's exponents to that of the sums, as powers of two: between these FP16 adds dv to the sums."""
APART = 1
"""Bit of the factor of a row's products that says: an exponent of dv is not between those, dv's are BF16 and not such ratios."""
EVEN = -(1 << 31)
"""Bit of the factor of a row's products that says: all of its exponents are the largest, with FP16 sums no code needs to be scaled."""
CODE_BOX, X_BOX, DV_BOX = TILE * CODES, TILE * 128, TILE * 64
"""Bytes of a stage of dk's codes, and of one of 64 columns of ``x`` and of dv."""


class InputGradientOfCodes(InputGradient):
    """See the module's docstring; launch arguments: :func:`compile_input_gradient_of_codes`."""

    def __init__(self, spec: InputSpec):
        super().__init__(spec)
        self.threads = 128 * (spec.groups + 1)
        self.chunks, self.subs = spec.rows // CODES, spec.slab // 64
        self.head = HALVES_HEAD if spec.halves else HEAD

    @cute.jit
    def __call__(
        self,
        dk: cute.Tensor,
        dk_scale: cute.Tensor,
        dv: cute.Tensor,
        dv_scale: cute.Tensor,
        mean: cute.Tensor,
        w: cute.Tensor,
        x: cute.Tensor,
        gain: cute.Tensor,
        rstd: cute.Tensor,
        offsets: cute.Tensor,
        dx: cute.Tensor,
        parts: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        spec = self.spec
        load = cpasync.CopyBulkTensorTileG2SOp()
        codes, rows, extra = self.layouts()

        def boxes_of(matrix, dtype, layout, width):
            tensor = cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=dtype), matrix.layout)
            return cpasync.make_tiled_tma_atom(load, tensor, cute.select(layout, mode=[0, 1]), (TILE, width))

        dk_copy = boxes_of(dk, E4M3, codes, CODES)
        x_copy = boxes_of(x, self.x_type(), rows, 64)
        dv_copy = (None, None) if const_expr(spec.dv is None) else boxes_of(dv, E4M3, extra, 64)
        self.kernel_of_codes(
            self.products(), *dk_copy, *x_copy, *dv_copy, dk_scale, dv_scale, mean, w, gain, rstd, offsets, dx, parts, Int32(x.shape[0])
        ).launch(
            grid=[clusters * spec.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[spec.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def x_type(self):
        """Element type of ``x``."""
        return Float16 if self.half else BFloat16

    def layouts(self):
        """Layouts in shared memory of the rings: dk's codes, ``x``, dv; rows of 128, 128 and 64 bytes, swizzled."""
        spec = self.spec
        made = []
        for dtype, width, stages in ((E4M3, CODES, spec.dk_stages), (self.x_type(), 64, spec.x_stages), (E4M3, 64, spec.x_stages)):
            atom = warpgroup.make_smem_layout_atom(hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, width), dtype)
            made.append(cute.tile_to_shape(atom, (TILE, width, stages), order=(0, 1, 2)))
        return made

    def weight_place(self, k):
        """k = 128 b + 32 t + 16 h + 4 s + 2 u + i of a thread's codes lies at 128 b + 64 h + 16 s + 8 u + 2 t + i of the contraction."""
        return k // 128 * 128 + k // 16 % 2 * 64 + k // 4 % 4 * 16 + k // 2 % 2 * 8 + k // 32 % 4 * 2

    @cute.jit
    def column_unit(self, w: cute.Tensor, top, slab: Int32, column0: Int32):
        """With FP16 sums: the power of two that brings the largest sum of a column's magnitudes (finite ones) to ``2**HALVES_TOP`` or
        more, less than twice that, and its reciprocal. The slab, not yet loaded, holds threads' sums."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        eighths = spec.slab // 8
        count, sharing = spec.rows * eighths, self.threads // eighths
        assert self.threads % eighths == 0 and spec.rows * spec.slab * 2 >= 32 * self.threads  # a thread stays in its columns
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        for first in cutlass.range(tid, count, PIECES * self.threads, unroll=1):
            pieces = []
            for m in cutlass.range_constexpr(PIECES):
                i = cutlass.min(first + m * self.threads, count - 1)
                words = cute.make_rmem_tensor(4, Int32)
                load_words(address_of(w, i // eighths, column0 + 8 * (i % eighths)), words)
                pieces.append(words)
            for m in cutlass.range_constexpr(PIECES):
                if first + m * self.threads < count:
                    for n in cutlass.range_constexpr(4):
                        for i, bits in enumerate(((pieces[m][n] << 16) & 0x7FFF0000, pieces[m][n] & 0x7FFF0000)):
                            sums[2 * n + i] = sums[2 * n + i] + float_of(bits if bits < 0x7F800000 else Int32(0))
        for n in cutlass.range_constexpr(8):
            store_word(slab + 4 * (8 * tid + n), bits_of(sums[n]))
        if tid == 0:
            cute.make_tensor(top, cute.make_layout(4))[0] = Int32(0)
        cute.arch.sync_threads()
        if tid < spec.slab:
            total = Float32(0.0)
            for n in cutlass.range(sharing, unroll=1):
                total = total + float_of(load_word(slab + 4 * (8 * (n * eighths + tid // 8) + tid % 8)))
            cute.arch.atomic_max(top, bits_of(total))
        cute.arch.sync_threads()
        exponent = cute.make_tensor(top, cute.make_layout(4))[0] >> 23
        unit = cutlass.min(cutlass.max(254 + HALVES_TOP - exponent, 8), 239)
        return float_of(unit << 23), float_of((254 - unit) << 23)

    @cute.kernel
    def kernel_of_codes(
        self,
        mma: cute.TiledMma,
        dk_atom: cute.CopyAtom,
        t_dk: cute.Tensor,
        x_atom: cute.CopyAtom,
        t_x: cute.Tensor,
        dv_atom,
        t_dv,
        dk_scale: cute.Tensor,
        dv_scale: cute.Tensor,
        mean: cute.Tensor,
        w: cute.Tensor,
        gain: cute.Tensor,
        rstd: cute.Tensor,
        offsets: cute.Tensor,
        dx: cute.Tensor,
        parts: cute.Tensor,
        limit: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = bid % spec.cluster
        layout = self.weight_layout()
        l_codes, l_rows, l_extra = self.layouts()
        counts = dict(
            table=spec.groups, used=spec.groups, dk_empty=spec.dk_stages, x_empty=spec.x_stages,
            dk_full=spec.groups * spec.dk_stages, x_full=spec.groups * spec.x_stages,
        )  # fmt: skip

        @cute.struct
        class Storage:
            bars: cute.struct.Align[cute.struct.MemRange[Int64, 4 * spec.groups + sum(counts.values())], 16]
            top: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * spec.groups * spec.cluster * TILE], 16]
            gain: cute.struct.Align[cute.struct.MemRange[Float32, spec.slab], 16]
            means: cute.struct.Align[cute.struct.MemRange[Float32, spec.groups * spec.slab if spec.mean else 4], 16]
            table: cute.struct.Align[cute.struct.MemRange[Int32, spec.groups * spec.table_words], 16]
            w: cute.struct.Align[cute.struct.MemRange[Float16, cute.cosize(layout)], 1024]
            codes: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_codes)], 1024]
            rows: cute.struct.Align[cute.struct.MemRange[self.x_type(), cute.cosize(l_rows)], 1024]
            extra: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_extra) if spec.dv is not None else 16], 1024]

        store = cutlass.utils.SmemAllocator().allocate(Storage)
        base = store.bars.data_ptr()
        place, made = base + 4 * spec.groups, {}
        for name, count in counts.items():
            made[name] = place
            place = place + count
        bars = Bundle(**made)
        slab = Int32(store.w.data_ptr().toint())
        gains = store.gain.get_tensor(cute.make_layout(spec.slab))
        column0 = rank * spec.slab
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(4 * spec.groups):
                    cute.arch.mbarrier_init(base + i, 1 if i % 4 < 2 else 4 * spec.cluster)
                for i in cutlass.range_constexpr(spec.dk_stages + spec.x_stages):
                    cute.arch.mbarrier_init(bars.dk_empty + i, 4)
                for i in cutlass.range_constexpr(spec.groups * (spec.dk_stages + spec.x_stages)):
                    cute.arch.mbarrier_init(bars.dk_full + i, 1)
                for i in cutlass.range_constexpr(spec.groups):
                    cute.arch.mbarrier_init(bars.table + i, 2)
                    cute.arch.mbarrier_init(bars.used + i, 4)
            cute.arch.mbarrier_init_fence()
        if const_expr(spec.halves):
            unit, back = self.column_unit(w, store.top.data_ptr(), slab, column0)
        else:
            unit, back = self.weight_unit(w, store.top.data_ptr(), column0)
        self.load_weight(w, gain, slab, gains, column0, unit)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if const_expr(spec.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        if const_expr(spec.beside):  # of the multiprocessors that no cluster fits into
            cute.arch.griddepcontrol_launch_dependents()
        batch, total = Int32(1), limit
        if const_expr(not spec.dense):
            batch = Int32(offsets.shape[0]) - 1
            total = Int32(offsets[batch])
        # Each cluster takes a run of tiles, so that it seldom meets another sequence; its warpgroups take them in turn.
        runs, tiles, run = grid // spec.cluster, cute.ceil_div(limit, TILE), bid // spec.cluster
        first, last = Int32(Int64(tiles) * run // runs), Int32(Int64(tiles) * (run + 1) // runs)
        io = Bundle(dk_scale=dk_scale, dv_scale=dv_scale, mean=mean, rstd=rstd, offsets=offsets, dx=dx, parts=parts)
        s = Bundle(
            gains=gains,
            w=slab,
            means=store.means.data_ptr(),
            table=Int32(store.table.data_ptr().toint()),
            codes=Int32(store.codes.data_ptr().toint()),
            rows=Int32(store.rows.data_ptr().toint()),
            extra=Int32(store.extra.data_ptr().toint()),
        )
        at = Bundle(
            batch=batch, total=total, limit=limit, column0=column0, rank=rank, warp=warp, unit=back, first=first, last=last, run=run
        )  # fmt: skip
        codes = store.codes.get_tensor(l_codes.outer, swizzle=l_codes.inner)
        rows = store.rows.get_tensor(l_rows.outer, swizzle=l_rows.inner)
        extra = None
        if const_expr(spec.dv is not None):
            extra = store.extra.get_tensor(l_extra.outer, swizzle=l_extra.inner)
        registers = spec.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(registers[1])
            if warp == 0:
                self.ask(at, bars.dk_full, bars.dk_empty, spec.dk_stages, self.chunks, Int32(0), CODE_BOX, CODES, ((codes, dk_atom, t_dk),))
            elif warp == 1:
                sides = ((rows, x_atom, t_x), (extra, dv_atom, t_dv))[: 1 if spec.dv is None else 2]
                size = X_BOX + (0 if spec.dv is None else DV_BOX)
                self.ask(at, bars.x_full, bars.x_empty, spec.x_stages, self.subs, at.column0 // 64, size, 64, sides)
            else:
                self.tabulate(io, at, s, bars)
        else:
            cute.arch.setmaxregister_increase(registers[0])
            thread = mma.get_slice(0)
            b = thread.make_fragment_B(thread.partition_B(store.w.get_tensor(layout.outer, swizzle=layout.inner)))
            group = cute.arch.make_warp_uniform(tid // 128) - 1
            exchange = Bundle(bars=base + 4 * group, sums=store.sums.data_ptr() + 2 * spec.cluster * TILE * group)
            self.compute(mma, b, io, at, s, bars, exchange, group)
        if const_expr(spec.cluster > 1):  # nobody leaves while another may still send to it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    # --- the first warpgroup ----------------------------------------------------------------------------------------------
    @cute.jit
    def ask(
        self, at, full, empty, stages: cutlass.Constexpr, count: cutlass.Constexpr, first: Int32, size: cutlass.Constexpr,
        width: cutlass.Constexpr, sides,
    ):  # fmt: skip
        """Warps 0 and 1: copies of dk's codes; of this CTA's columns of ``x`` and dv. A copying warp fences: the loads that found a stage
        full come before the copy."""
        one = cute.make_layout(1)
        made = []
        for boxes, atom, tensor in sides:
            tiles = cute.local_tile(tensor, (TILE, width), (None, None))
            made.append((atom, *cpasync.tma_partition(atom, 0, one, cute.group_modes(boxes, 0, 2), cute.group_modes(tiles, 0, 2))))
        ring = cute.make_rmem_tensor(2, Int32)
        ring[0], ring[1] = Int32(0), Int32(1)
        group = Int32(0)
        # Loops over fillings are not unrolled: what the roles run at once must fit the instruction cache.
        for tile in cutlass.range(at.first, at.last, unroll=1):
            for c in cutlass.range(count, unroll=1):
                stage = ring[0]
                ready = full + (group * stages + stage)
                cute.arch.mbarrier_wait(empty + stage, ring[1])
                cute.arch.fence_view_async_shared()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, size)
                for atom, target, source in made:
                    cute.copy(atom, source[None, tile, first + c], target[None, stage], tma_bar_ptr=ready)
                advance(ring, 0, stages)
            group = group + 1 if group + 1 < self.spec.groups else Int32(0)

    @cute.jit
    def tabulate(self, io, at, s, bars):
        """Warps 2 and 3, a row a lane. A table: ``rstd`` (0 past the end), where the row's exponents lie, the row's sequence (its
        complement if it is that of the tile's first row, whose mean lies beside the table); then exponents, side by side: dk's as FP16,
        relative to the row's largest, the factor of the row's products, dv's as BF16. Rows of a group of 32 tokens share theirs where a
        tile lies in one sequence, as most do."""
        spec = self.spec
        row = 32 * (at.warp - 2) + cute.arch.lane_idx()
        place = cute.make_rmem_tensor(3, Int32)  # the sequence of a tile's first row, where it begins and where it ends
        place.fill(0)
        ring = cute.make_rmem_tensor(2, Int32)  # slot and phase
        ring.fill(0)
        ring[1] = Int32(1)
        for tile in cutlass.range(at.first, at.last, unroll=1):
            token0 = tile * TILE
            token = cutlass.max(cutlass.min(token0 + row, at.total - 1), 0)
            if const_expr(spec.lookup):  # noqa: SIM102 - one is decided at compile time
                if (token0 >= place[2]) & (token0 < at.total):
                    place[0] = search(io.offsets, place[0], at.batch, token0)
                    place[1], place[2] = Int32(io.offsets[place[0]]), Int32(io.offsets[place[0] + 1])
            scale = io.rstd[Int64(token)]
            mean = cute.make_rmem_tensor(spec.slab // 64, Float32)
            if const_expr(spec.mean):
                for n in cutlass.range_constexpr(spec.slab // 64):
                    mean[n] = io.mean[Int64(place[0]), at.column0 + 64 * n + row]
            slot = ring[0]
            table = s.table + slot * (4 * spec.table_words)
            if token0 + TILE <= (place[2] if const_expr(spec.lookup) else at.total):
                self.write_groups(io, at, bars, place, token0, table, row, ring)
            else:
                self.write_rows(io, at, bars, place, token0, token, table, row, ring)
            store_word(table + 4 * row, bits_of(scale if token0 + row < at.total else Float32(0.0)))
            if const_expr(spec.mean):
                means = cute.make_tensor(s.means + slot * spec.slab, cute.make_layout(spec.slab))
                for n in cutlass.range_constexpr(spec.slab // 64):
                    means[64 * n + row] = mean[n]
            release(bars.table + slot)
            advance(ring, 0, spec.groups)

    @cute.jit
    def write_groups(self, io, at, bars, place: cute.Tensor, token0: Int32, table: Int32, row: Int32, ring: cute.Tensor):
        """Exponents of a tile within one sequence, at most three groups of tokens, eight lanes each: one warp those of dk,
        the other of dv."""
        spec = self.spec
        dv: Any = spec.dv
        lane, begin = cute.arch.lane_idx(), place[1]
        offset = (token0 - begin) & (GROUP - 1)
        group = cutlass.min(lane // 8, (offset + TILE - 1) >> 5)  # a group has 2^5 tokens; a division rounds the other way and costs more
        scales = (begin >> 5) + place[0] + ((token0 - begin) >> 5) + group
        many, few = spec.rows // 32, spec.slab // 32
        entry, here = (EXPONENTS + g * (4 * spec.entry_words) for g in (group, (offset + row) >> 5))
        entry = table + entry
        if (at.warp + (token0 >> 6)) % 2 == 0:  # in turn: what one has to do is four times the other's
            address, top = scale_address(io.dk_scale, scales, spec.dk.static), Int32(0)
            bytes_ = cute.make_rmem_tensor((2, -(-many // 16)), Int32)
            for k in cutlass.range_constexpr(-(-many // 16)):
                for i in cutlass.range_constexpr(2):
                    n = cutlass.min(16 * k + 2 * (lane % 8) + i, many - 1)
                    bytes_[i, k] = load_byte(address + 32 * n // spec.dk.width)
            extra = cute.make_rmem_tensor(2, Int32)
            if const_expr(spec.folds):
                address = scale_address(io.dv_scale, scales, dv.static)
                for i in cutlass.range_constexpr(2):
                    n = cutlass.min(2 * (lane % 8) + i, few - 1)
                    extra[i] = load_byte(address + (at.column0 + 32 * n) // dv.width)
            cute.arch.mbarrier_wait(bars.used + ring[0], ring[1])
            for k in cutlass.range_constexpr(-(-many // 16)):
                for i in cutlass.range_constexpr(2):
                    top = cutlass.max(top, bytes_[i, k] if bytes_[i, k] < 255 else Int32(0))
            for distance in (1, 2, 4):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
            sign = Int32(0)
            if const_expr(spec.halves):
                even = cutlass.Boolean(True)
                for k in cutlass.range_constexpr(-(-many // 16)):
                    for i in cutlass.range_constexpr(2):
                        even = even & (bytes_[i, k] == top)
                if (cute.arch.vote_ballot_sync(even) >> lane) & 255 == 255:  # of the lanes of a group, for the first of them
                    sign = Int32(EVEN)
            if const_expr(spec.folds):
                powers, ratios, apart = [], [], cutlass.Boolean(False)
                for i in cutlass.range_constexpr(2):
                    ratio, far = self.ratio_of(at, top, extra[i])
                    ratios.append(ratio)
                    apart = apart | far
                    powers.append(bits_of(scale_of_byte(extra[i])))
                apart = (cute.arch.vote_ballot_sync(apart) >> (lane & 24)) & 255 != 0
                word = prmt(powers[0], powers[1], 0x7632) if apart else prmt(ratios[0], ratios[1], 0x5410)
                sign = sign | (Int32(APART) if apart else Int32(0))
                if 2 * (lane % 8) < few:
                    store_word(entry + 4 * (many // 2 + 1 + lane % 8), word)
            for k in cutlass.range_constexpr(-(-many // 16)):
                low, high = (relative_factor(bytes_[i, k], top, self.head) for i in range(2))
                if 16 * k + 2 * (lane % 8) < many:
                    store_word(entry + 4 * (8 * k + lane % 8), prmt(low, high, 0x5410))
            if lane % 8 == 0:
                store_word(entry + 4 * (many // 2), bits_of(scale_of_byte(top) * (at.unit * Float32(2.0**-self.head))) | sign)
        else:
            bytes_ = cute.make_rmem_tensor(2, Int32)
            if const_expr(spec.dv is not None and not spec.folds):
                address = scale_address(io.dv_scale, scales, dv.static)
                for i in cutlass.range_constexpr(2):
                    n = cutlass.min(2 * (lane % 8) + i, few - 1)
                    bytes_[i] = load_byte(address + (at.column0 + 32 * n) // dv.width)
            cute.arch.mbarrier_wait(bars.used + ring[0], ring[1])
            if const_expr(spec.dv is not None and not spec.folds):
                low, high = (bits_of(scale_of_byte(bytes_[i])) for i in range(2))
                if 2 * (lane % 8) < few:
                    store_word(entry + 4 * (many // 2 + 1 + lane % 8), prmt(low, high, 0x7632))
        store_half(table + (8 * TILE + 2 * row), here)
        if const_expr(spec.mean):
            store_word(table + 4 * (TILE + row), place[0] ^ -1)

    @cute.jit
    def ratio_of(self, at, top: Int32, byte: Int32):
        """An exponent of dv over that of a row's sums, whose largest of dk is ``top``, as FP16, and whether that is out of FP16's hands."""
        ratio = byte - (top + (bits_of(at.unit) >> 23) - 127)
        known = (byte == 0) | (byte == 255)  # as a factor of zeros; as NaN
        special = Int32(0) if byte == 0 else Int32(0x7E00)
        return special if known else (ratio + 15) << 10, ((ratio < LEAST_RATIO) | (ratio > LARGEST_RATIO)) & ~known

    @cute.jit
    def write_rows(self, io, at, bars, place: cute.Tensor, token0: Int32, token: Int32, table: Int32, row: Int32, ring: cute.Tensor):
        """Exponents of a tile of several sequences, or with rows past the end: each lane its row's."""
        spec = self.spec
        dv: Any = spec.dv
        many, few = spec.rows // 32, spec.slab // 32
        b, scales = Int32(0), token // GROUP
        if const_expr(spec.lookup):
            high = place[0]
            if cutlass.min(token0 + TILE, at.total) > place[2]:
                high = search(io.offsets, place[0], at.batch, token0 + TILE - 1)
            b, begin = place[0], place[1]
            if place[0] < high:
                b = search_alone(io.offsets, place[0], high, token)
                begin = Int32(io.offsets[b])
            scales = begin // GROUP + b + (token - begin) // GROUP
        inside = token0 + row < at.total
        here = EXPONENTS + row * (4 * spec.entry_words)
        entry = table + here
        cute.arch.mbarrier_wait(bars.used + ring[0], ring[1])
        address, top = scale_address(io.dk_scale, scales, spec.dk.static), Int32(0)
        for n in cutlass.range(many, unroll=4):
            byte = load_byte(address + 32 * n // spec.dk.width)
            top = cutlass.max(top, byte if byte < 255 else Int32(0))
        for n in cutlass.range(0, many, 2, unroll=2):
            low, high_ = (relative_factor(load_byte(address + 32 * (n + i) // spec.dk.width), top, self.head) for i in range(2))
            store_word(entry + 2 * n, prmt(low, high_, 0x5410))
        factor = bits_of(scale_of_byte(top) * (at.unit * Float32(2.0**-self.head)))
        if const_expr(spec.dv is not None):
            address = scale_address(io.dv_scale, scales, dv.static)
            apart = cutlass.Boolean(False)
            if const_expr(spec.folds):
                for n in cutlass.range_constexpr(few):
                    apart = apart | self.ratio_of(at, top, load_byte(address + (at.column0 + 32 * n) // dv.width))[1]
                factor = factor | (Int32(APART) if apart else Int32(0))
            for n in cutlass.range_constexpr(0, few, 2):
                bytes_ = [load_byte(address + (at.column0 + 32 * (n + i)) // dv.width) for i in range(2)]
                low, high_ = (bits_of(scale_of_byte(byte)) for byte in bytes_)
                word = prmt(low, high_, 0x7632)
                if const_expr(spec.folds):
                    near, near_ = (self.ratio_of(at, top, byte)[0] for byte in bytes_)
                    word = word if apart else prmt(near, near_, 0x5410)
                store_word(entry + 4 * (many // 2 + 1 + n // 2), word if inside else Int32(0))
        store_word(entry + 4 * (many // 2), factor)
        store_half(table + (8 * TILE + 2 * row), here)
        if const_expr(spec.mean):
            store_word(table + 4 * (TILE + row), b if b != place[0] else b ^ -1)

    # --- the computing warpgroups -----------------------------------------------------------------------------------------
    @cute.jit
    def compute(self, mma, b: cute.Tensor, io, at, s, bars, exchange, group: Int32):
        """Every ``groups``-th tile of the run."""
        spec = self.spec
        lane = cute.arch.lane_idx()
        warp = at.warp % 4
        acc = cute.make_rmem_tensor(mma.partition_shape_C((TILE, spec.slab)), Float16 if const_expr(spec.halves) else Float32)
        operands = [mma.make_fragment_A(mma.partition_shape_A((TILE, 64))) for _ in range(2)]
        row = 16 * warp + row_in_eight(lane // 4)
        phases = cute.make_rmem_tensor(2, Int32)  # a bit for each stage of dk and of x
        phases.fill(0)
        columns = cute.make_rmem_tensor((8, self.runs), Float32)  # sums over this thread's rows, for ``dnorm_weight``
        columns.fill(0.0)
        for tile in cutlass.range(at.first + group, at.last, spec.groups, unroll=1):
            turn = tile - at.first
            table = s.table + group * (4 * spec.table_words)
            cute.arch.mbarrier_wait(bars.table + group, turn // spec.groups % 2)
            self.multiply(mma, b, acc, operands, s, bars, table, tile, turn, row, at, group, phases)
            self.norm(io, at, s, bars, exchange, acc, columns, table, tile, turn, group, phases)
        if const_expr(spec.need_norm):
            row, parts, column0 = 4 * (spec.groups * at.run + group) + warp, io.parts, at.column0
            for q in cutlass.range_constexpr(self.runs):
                for e in cutlass.range_constexpr(8):
                    total = columns[e, q]
                    for distance in (4, 8, 16):
                        total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
                    total = total if at.total > 0 else Float32(0.0)
                    if lane < 4:
                        parts[row, column0 + 32 * q + 8 * lane + e] = total

    @cute.jit
    def multiply(
        self, mma, b, acc: cute.Tensor, operands, s, bars, table: Int32, tile: Int32, turn: Int32, row: Int32, at, group: Int32,
        phases: cute.Tensor,
    ):  # fmt: skip
        """``acc`` = the tile's codes times the slab; the last products run on, under which :meth:`norm` asks for ``x``, where registers
        are enough for both."""
        spec = self.spec
        quad = cute.arch.lane_idx() % 4
        place = low_half(s.w)
        source = s.codes + row * CODES + (((2 * quad) ^ (row % 8)) << 4)
        entries = [table + load_half(table + (8 * TILE + 2 * (row + 8 * i))) for i in range(2)]
        factors_at = [entry + 2 * quad for entry in entries]
        if const_expr(spec.halves):
            signs = [load_word(entry + 2 * (spec.rows // 32)) for entry in entries]
            even = cute.arch.vote_all_sync((signs[0] & signs[1]) < 0)
        for c in cutlass.range_constexpr(self.chunks):
            stage = stage_of(turn, self.chunks, c, spec.dk_stages)
            factors = []
            for i in cutlass.range_constexpr(2):
                half = load_half(factors_at[i] + 8 * c)
                factors.append(prmt(half, half, 0x1010))
            if const_expr(c == 0):
                ready = cutlass.Boolean(False)
            await_stage(bars.dk_full + group * spec.dk_stages, stage, phases, 0, ready)
            words = []
            for h in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    words.append(shared_words((source ^ (16 * h)) + stage * CODE_BOX + 8 * CODES * i, 4))
            release(bars.dk_empty + (stage + zero_after(words, at.limit)))  # as soon as they have come: the ring is a tile deep
            if const_expr(c + 1 < self.chunks):
                ready = peek_stage(bars.dk_full + group * spec.dk_stages, stage_of(turn, self.chunks, c + 1, spec.dk_stages), phases, 0)
            if tile * TILE + TILE > at.total:  # rows past the end
                for i in cutlass.range_constexpr(2):
                    if tile * TILE + row + 8 * i >= at.total:
                        for h in cutlass.range_constexpr(2):
                            words[2 * h + i].fill(0)
            for h in cutlass.range_constexpr(2):
                operand = operands[h]
                a = cute.recast_tensor(operand, Int32)
                if const_expr(c > 0):
                    warpgroup.wait_group(1)
                for n in cutlass.range_constexpr(4):
                    for i in cutlass.range_constexpr(2):
                        if const_expr(spec.halves):
                            a[4 * n + i], a[4 * n + 2 + i] = codes_as_f16(words[2 * h + i][n])
                        else:
                            a[4 * n + i], a[4 * n + 2 + i] = codes_to_f16(words[2 * h + i][n], factors[i])
                if const_expr(spec.halves):  # noqa: SIM102 - one is decided at compile time
                    if not even:
                        for n in cutlass.range_constexpr(16):
                            a[n] = mul2(a[n], factors[n % 2])
                product(mma, acc, operand, b, c + h == 0, place + (2 * c + h) * (8 * spec.slab), 128)
        if const_expr(not spec.early):
            warpgroup.wait_group(0)

    @cute.jit
    def norm(
        self, io, at, s, bars, exchange, acc: cute.Tensor, columns: cute.Tensor, table: Int32, tile: Int32, turn: Int32, group: Int32,
        phases: cute.Tensor,
    ):  # fmt: skip
        """Waits for the products. From ``dk w`` to ``dx``: ``acc`` becomes ``t = g dxn rstd``, then ``dx = t - x (rstd^2 mean(t x))``."""
        spec = self.spec
        lane = pinned(cute.arch.lane_idx())  # what follows from it is computed for each tile: kept, it would be parked in local memory
        row = 16 * (at.warp % 4) + row_in_eight(lane // 4)
        quad = lane % 4
        xs = cute.make_rmem_tensor((4, self.runs, 2), Int32)
        out = cute.make_rmem_tensor(acc.layout, Float32) if const_expr(spec.halves) else acc
        scale, unit, powers_at, sequences, marks = [], [], [], [], []
        for i in cutlass.range_constexpr(2):
            word = table + 4 * (row + 8 * i)
            scale.append(float_of(load_word(word)))
            entry = table + load_half(table + (8 * TILE + 2 * (row + 8 * i)))
            factor = load_word(entry + 2 * (spec.rows // 32))
            unit.append(float_of(factor & ~(EVEN | APART) if const_expr(spec.halves) else factor))
            marks.append(factor & APART)
            powers_at.append(entry + 2 * (spec.rows // 32) + 4)
            if const_expr(spec.mean):
                sequences.append(load_word(word + 4 * TILE))
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        place = Bundle(row=row, quad=quad, tile=tile, turn=turn, group=group)
        row_values = Bundle(scale0=scale[0], scale1=scale[1], unit0=unit[0], unit1=unit[1], powers0=powers_at[0], powers1=powers_at[1])
        apart = cutlass.Boolean(False)
        if const_expr(spec.folds):
            apart = (marks[0] | marks[1]) != 0
        if const_expr(spec.mean):
            # the warp has rows of other sequences, or whose dv is not added in FP16
            if cute.arch.vote_any_sync((sequences[0] >= 0) | (sequences[1] >= 0) | apart):
                others = [address_of(io.mean, n ^ (n >> 31), at.column0 + 8 * quad) for n in sequences]
                self.derive(at, s, bars, acc, out, columns, xs, sums, place, row_values, marks, others, phases)
            else:
                self.derive(at, s, bars, acc, out, columns, xs, sums, place, row_values, None, None, phases)
        elif const_expr(spec.folds):
            if cute.arch.vote_any_sync(apart):
                self.derive(at, s, bars, acc, out, columns, xs, sums, place, row_values, marks, None, phases)
            else:
                self.derive(at, s, bars, acc, out, columns, xs, sums, place, row_values, None, None, phases)
        else:
            self.derive(at, s, bars, acc, out, columns, xs, sums, place, row_values, None, None, phases)
        sums = [sums[i] for i in range(2)]
        release(bars.used + group)
        if const_expr(spec.need_x):
            for i in cutlass.range_constexpr(2):
                sums[i] = quad_sum(sums[i])
            if const_expr(spec.cluster > 1):
                sums = self.exchange(at, exchange, sums, turn // spec.groups)
            lane = pinned(cute.arch.lane_idx())
            row = 16 * (at.warp % 4) + row_in_eight(lane // 4)
            for i in cutlass.range_constexpr(2):
                self.write(io, at, out, xs, scale[i], sums[i], lane % 4, tile * TILE + row + 8 * i, i)

    @cute.jit
    def derive(
        self, at, s, bars, acc: cute.Tensor, out: cute.Tensor, columns: cute.Tensor, xs: cute.Tensor, sums: cute.Tensor, place, rows,
        marks, bases, phases: cute.Tensor,
    ):  # fmt: skip
        """``t`` from the products, to their place where that is FP32, and its sums. ``bases``: addresses of the rows' means, or None: that
        beside the table. ``marks``: where dv may be added in FP16, what the table says of the rows
        (others add it in FP32; a row's bits are those it would have among rows like it), or None: it is, of both."""
        spec = self.spec
        quad, row, tile, turn, group = place.quad, place.row, place.tile, place.turn, place.group
        scale, unit, powers_at = (rows.scale0, rows.scale1), (rows.unit0, rows.unit1), (rows.powers0, rows.powers1)
        ends = tile * TILE + TILE > at.total
        folded = spec.folds and marks is None
        halves: Any = cute.recast_tensor(acc, Int32) if const_expr(spec.halves) else None
        row_at = s.rows + row * 128 + ((quad ^ (row % 8)) << 4)
        extra_at = s.extra + row * 64 + (((quad // 2) ^ (row // 2 % 4)) << 4) + quad % 2 * 8
        for j in cutlass.range_constexpr(self.subs):
            stage = stage_of(turn, self.subs, j, spec.x_stages)
            powers, ratios = [], []
            if const_expr(spec.dv is not None):
                for i in cutlass.range_constexpr(2):
                    word = load_word(powers_at[i] + 4 * j)
                    near, far = word, word  # of a row that the table marks ``APART`` the one is 0, of others the other
                    if const_expr(spec.folds and not folded):
                        near, far = word if marks[i] == 0 else Int32(0), Int32(0) if marks[i] == 0 else word
                    if const_expr(spec.folds):
                        ratios.append([prmt(near, near, selector) for selector in (0x1010, 0x3232)])
                    if const_expr(not folded):
                        powers.append(pair_to_float(far, False))
            if const_expr(j == 0):
                ready = cutlass.Boolean(False)
            await_stage(bars.x_full + group * spec.x_stages, stage, phases, 1, ready)
            if const_expr(j + 1 < self.subs):
                ready = peek_stage(bars.x_full + group * spec.x_stages, stage_of(turn, self.subs, j + 1, spec.x_stages), phases, 1)
            for q in cutlass.range_constexpr(2 * j, 2 * j + 2):
                extras = {}
                for i in cutlass.range_constexpr(2):
                    h = q % 2
                    words = shared_words((row_at ^ (64 * h)) + stage * X_BOX + 1024 * i, 4)
                    for n in cutlass.range_constexpr(4):
                        xs[n, q, i] = words[n]
                    if const_expr(spec.dv is not None):
                        extras[q, i] = shared_words((extra_at ^ (32 * h)) + stage * DV_BOX + 512 * i, 2)
                if ends:
                    for i in cutlass.range_constexpr(2):
                        if tile * TILE + row + 8 * i >= at.total:
                            for n in cutlass.range_constexpr(4):
                                xs[n, q, i] = Int32(0)
                            if const_expr(spec.dv is not None):
                                extras[q, i].fill(0)
                if const_expr(q % 2 == 1):
                    release(bars.x_empty + stage)
                if const_expr(q == 0 and spec.early):  # the first of ``x`` and dv came to registers under the last products
                    warpgroup.wait_group(0)
                gain = cute.make_rmem_tensor(8, Float32)
                load_shared(s.gains.iterator + (32 * q + 8 * quad), gain)
                means = cute.make_rmem_tensor(8, Float32)
                if const_expr(spec.mean and bases is None):
                    load_shared(s.means + (group * spec.slab + 32 * q + 8 * quad), means)
                for i in cutlass.range_constexpr(2):
                    xf = self.x_of(xs, q, i)
                    if const_expr(bases is not None):
                        load_generic(bases[i] + 128 * q, means)
                    extra = []
                    if const_expr(spec.dv is not None and not folded):
                        for n in cutlass.range_constexpr(2):
                            extra += e4m3x4_to_float(extras[q, i][n])
                    if const_expr(spec.halves):
                        products = []
                        for n in cutlass.range_constexpr(4):
                            word = halves[i + 2 * (4 * q + n)]
                            if const_expr(spec.folds):
                                word = fma2(codes_as_f16(extras[q, i][n // 2])[n % 2], ratios[i][q % 2], word)
                            products += pair_to_float(word, True)
                    for e in cutlass.range_constexpr(8):
                        index = e % 2 + 2 * i + 4 * (4 * q + e // 2)
                        d = products[e] if const_expr(spec.halves) else acc[index]
                        if const_expr(spec.dv is not None and spec.mean and not folded):
                            d = fma(d, unit[i], fma(extra[e], powers[i][q % 2], means[e]))
                        elif const_expr(spec.dv is not None and not folded):
                            d = fma(d, unit[i], extra[e] * powers[i][q % 2])
                        elif const_expr(spec.mean):
                            d = fma(d, unit[i], means[e])
                        else:
                            d = d * unit[i]
                        d = d * scale[i]
                        if const_expr(spec.need_norm):
                            columns[e, q] = fma(d, xf[e], columns[e, q])
                        out[index] = d * gain[e]
                        sums[i] = fma(out[index], xf[e], sums[i])

    @cute.jit
    def write(self, io, at, acc: cute.Tensor, xs: cute.Tensor, scale, total, quad: Int32, token: Int32, i: cutlass.Constexpr):
        """A row of ``dx``; ``total``: sum of ``t x`` over all columns."""
        spec = self.spec
        column = at.column0 + 8 * quad
        address = address_of(io.dx, token, column)
        if token < at.total:
            share = -scale * scale * (total * Float32(1.0 / spec.columns))
            for q in cutlass.range_constexpr(self.runs):
                xf = self.x_of(xs, q, i, True)
                out = cute.make_rmem_tensor(4, Int32)
                for e in cutlass.range_constexpr(0, 8, 2):
                    pair = []
                    for n in cutlass.range_constexpr(2):
                        pair.append(fma(xf[e + n], share, acc[n + 2 * i + 4 * (4 * q + e // 2)]))
                    out[e // 2] = float_to_pair(pair[0], pair[1], self.half)
                store_words(address + 64 * q, out)
        elif token < at.limit:
            zeros = cute.make_rmem_tensor(4, Int32)
            zeros.fill(0)
            for q in cutlass.range_constexpr(self.runs):
                store_words(address + 64 * q, zeros)


def row_in_eight(j):
    """Row of a group of eight that lanes ``4 j`` to ``4 j + 3`` hold: rows that are served together (2 by 16 bytes, 4 by 8) lie 5, 4 and 1
    apart, so that the swizzles of rows of 128 and of 64 bytes put them into different banks."""
    return (j % 2 * 5) ^ (j // 2 % 2 * 4) ^ (j // 4 * 2)


def stage_of(turn, count: int, i: int, stages: int):
    """Stage of the ``i``-th of a tile's ``count`` fillings: known at compile time where a tile takes all of a ring, or its whole rounds."""
    return Int32(i % stages) if count % stages == 0 else (turn * count + i) % stages


@cute.jit
def peek_stage(full, stage: Int32, phases: cute.Tensor, ring: cutlass.Constexpr):
    """Whether a stage is full, asked early: the answer takes as long as a load."""
    return cute.arch.mbarrier_test_wait(full + stage, (phases[ring] >> stage) & 1)


@cute.jit
def await_stage(full, stage: Int32, phases: cute.Tensor, ring: cutlass.Constexpr, ready):
    """Wait for a stage by a warpgroup's own barrier of it: with one for all, a warpgroup ahead of the others would take the filling before
    the last for its own. ``ready``: what :func:`peek_stage` has said."""
    if not ready:
        cute.arch.mbarrier_wait(full + stage, (phases[ring] >> stage) & 1)
    phases[ring] = phases[ring] ^ (1 << stage)


def zero_after(words, count: Int32):
    """0, known once loads of shared memory have come: an arrival at an address that it is part of does not overtake them. ``words``: their
    registers; ``count``: what is not negative, unknown at compile time (a shift by 32 leaves nothing)."""
    last = words[0][3] | words[1][3] | words[2][3] | words[3][3]
    return Int32(inline_ptx(T.i32(), [last, 32 + (count >> 31)], "shr.b32 $0, $1, $2;", "=r,r,r"))


def store_words(address: Int64, words: cute.Tensor):
    """16 bytes to global memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(4)))


def store_word(address, word):
    """A word to shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = word


def store_half(address, word):
    """The lower half of a word to shared memory."""
    effect([Int32(address), Int32(word)], "{.reg .b16 l, h; mov.b32 {l, h}, $1; st.shared.b16 [$0], l;}", "r,r")


def load_word(address):
    """A word of shared memory."""
    return shared_words(address, 1)[0]


@kernel_cache
def compile_input_gradient_of_codes(arch: str, offsets_dtype: str | None, spec: InputSpec):
    """Compile for ``arch``. Arguments at launch: those of ``compile_input_gradient``."""
    tokens = symbol()
    return build(
        arch,
        InputGradientOfCodes(spec),
        *fake_operand(spec.dk, tokens, spec.rows),
        *fake_operand(spec.dv, tokens, spec.columns),
        fake("float32", (symbol(), spec.columns), compact=True) if spec.mean else None,
        fake("bfloat16", (spec.rows, spec.columns), compact=True),
        fake(spec.dtype, (tokens, spec.columns)),
        fake("float32", (spec.columns,), compact=True),
        fake("float32", (tokens,), align=4),
        fake_offsets(offsets_dtype),
        fake(spec.dtype, (tokens, spec.columns), compact=True) if spec.need_x else None,
        fake("float32", (symbol(), spec.columns), compact=True) if spec.need_norm else None,
        Int32(1),
    )
