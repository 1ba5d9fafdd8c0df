"""``dx`` and ``dnorm_weight`` in one pass over the tokens: GEMM, dequantize-and-add, norm backward, nothing in between stored.

On Hopper, gradients in codes have a kernel with roles of its own (``input_gradient_codes``) where their sizes allow it.

    dxn  = dk @ w_k + dv + dv_mean_b                     FP32, in the accumulators
    dx   = rstd * (g * dxn - xhat * mean_c(g * dxn * xhat))
    parts[i] = sum over the rows of warp i of dxn * xhat

``dk``'s codes become FP16 in registers, two instructions for two of them, and are the MMA's A operand: each under its exponent relative
to the largest of its row, which the epilogue multiplies back where it adds ``dv``. The weight is BF16 in memory and FP16 in shared memory,
under one power of two. FP16 holds 11 bits over 2^14 and some over another 2^24, so nothing is lost that an FP32 sum would keep, exponents
may differ from block to block at no cost, and no accumulator is rescaled. (Gradients in BF16 meet the weight in BF16.)

A cluster shares the columns of a row: each CTA keeps its slab of ``w_k`` in shared memory for the whole launch, so that nothing is read
from L2 again and again, and the CTAs exchange one number a row. Each warpgroup walks tiles of 64 consecutive tokens by itself; sequences
matter to a row's scales alone, not to the tiling.

The order of a contraction is free, and that of the columns too: a thread's 16 consecutive codes serve four MMA steps, and its accumulators
are runs of 8 consecutive columns. So every operand goes from global memory to registers and back in whole sectors, without shared memory.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hop
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum

from fused_ops.gemm_norm_backward.arguments import fake_operand
from fused_ops.gemm_norm_backward.config import TILE, InputSpec
from fused_ops.gemm_norm_backward.rows import (
    GROUP,
    address_of,
    codes_to_f16,
    float_to_pair,
    generic_of_shared,
    load_byte,
    load_words,
    pair_to_float,
    prefetch_line,
    relative_factor,
    scale_address,
    search,
    search_alone,
)
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.matrices import shared_words, warp_mma
from lp_fa4.common.numbers import bits_of, e4m3x4_to_float, float_of, pinned, quad_sum, scale_of_byte, warp_max
from lp_fa4.common.rows import fma
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol

HEAD = 6
"""The row's largest codes are multiplied by 2^6: 448 becomes 28,672 of FP16's 65,504."""
X_AFTER, DV_AFTER = 2, 4
"""Groups of MMAs after whose issue ``x`` and ``dv`` are asked for: early enough to arrive with the products, late enough for registers."""
DEPTH = 64
"""Contraction of one group of MMAs: a thread's 16 codes of a row, in 4 steps."""
PIECES = 6
"""Pieces of 16 bytes of the weight that a thread asks for at once where a launch begins (23 instead of 27 us for the first tiles)."""


class InputGradient:
    """See the module's docstring; launch arguments: :func:`compile_input_gradient`."""

    def __init__(self, spec: InputSpec):
        self.spec = spec
        self.runs = spec.slab // 32
        self.half = spec.dtype == "float16"
        self.words = 8 if spec.wide else 4  # of eight elements of x and dx
        self.element = Float16 if spec.dk.mx else BFloat16
        self.threads = 128 * spec.groups

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
        mma = None if const_expr(spec.warp_mma) else self.products()
        self.kernel(mma, dk, dk_scale, dv, dv_scale, mean, w, x, gain, rstd, offsets, dx, parts).launch(
            grid=[clusters * spec.cluster, 1, 1],
            block=[128 * spec.groups, 1, 1],
            cluster=[spec.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    def products(self):
        """The warpgroup's MMA: 64 rows of codes from registers with the slab."""
        major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        sums = Float16 if self.spec.halves else Float32
        return hop.make_trivial_tiled_mma(self.element, self.element, major, major, sums, (1, 1, 1), (64, self.spec.slab), source)

    def weight_layout(self):
        """The slab in shared memory: [columns, contraction], K-major; for warps, in the order of their operands' registers."""
        spec = self.spec
        if spec.warp_mma:
            return cute.make_layout(spec.slab * spec.rows)
        atom = hop.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.element, spec.rows)
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(atom, self.element), (spec.slab, spec.rows), order=(0, 1))

    def weight_place(self, k):
        """k = 64 b + 16 t + 4 s + 2 h + i of a thread's codes lies at 64 b + 16 s + 8 h + 2 t + i of the contraction."""
        return k // 64 * 64 + k // 4 % 4 * 16 + k // 2 % 2 * 8 + k // 16 % 4 * 2

    def storage(self, layout):
        """Shared memory of a CTA. ``sums``: what the cluster's CTAs send, by warpgroup, slot and sender; a slot is full, then empty.
        ``means``: each warp's copy of the mean of the sequence that it last met."""
        spec = self.spec

        @cute.struct
        class Storage:
            bars: cute.struct.Align[cute.struct.MemRange[Int64, 4 * spec.groups], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 2 * spec.groups * spec.cluster * TILE], 16]
            gain: cute.struct.Align[cute.struct.MemRange[Float32, spec.slab], 16]
            means: cute.struct.Align[cute.struct.MemRange[Float32, 4 * spec.groups * spec.slab if spec.mean else 4], 16]
            top: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            w: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(layout)], 1024]

        return Storage

    @cute.kernel
    def kernel(
        self,
        mma,
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
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tid // 128)
        rank = bid % spec.cluster
        layout = self.weight_layout()
        store = cutlass.utils.SmemAllocator().allocate(self.storage(layout))
        slab = Int32(store.w.data_ptr().toint())
        gains = store.gain.get_tensor(cute.make_layout(spec.slab))
        column0 = rank * spec.slab
        if const_expr(spec.cluster > 1):  # noqa: SIM102 - one is decided at compile time
            if warp == 0:
                with cute.arch.elect_one():
                    for i in cutlass.range_constexpr(4 * spec.groups):
                        cute.arch.mbarrier_init(store.bars.data_ptr() + i, 1 if i % 4 < 2 else 4 * spec.cluster)
                cute.arch.mbarrier_init_fence()
        unit, back = Float32(1.0), Float32(1.0)
        if const_expr(spec.dk.mx):
            unit, back = self.weight_unit(w, store.top.data_ptr(), column0)
        self.load_weight(w, gain, slab, gains, column0, unit)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if const_expr(spec.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        batch, total = Int32(1), Int32(x.shape[0])
        if const_expr(not spec.dense):
            batch = Int32(offsets.shape[0]) - 1
            total = Int32(offsets[batch])
        io = Bundle(dk=dk, dk_scale=dk_scale, dv=dv, dv_scale=dv_scale, mean=mean, x=x, rstd=rstd, offsets=offsets, dx=dx)
        at = Bundle(
            batch=batch,
            total=total,
            limit=Int32(x.shape[0]),
            column0=column0,
            rank=rank,
            group=group,
            warp=warp,
            unit=back,
        )
        exchange = Bundle(bars=store.bars.data_ptr() + 4 * group, sums=store.sums.data_ptr() + 2 * spec.cluster * TILE * group)
        means = store.means.data_ptr() + (warp * spec.slab if const_expr(spec.mean) else 0)
        here = Bundle(exchange=exchange, gains=gains, means=means)
        b = slab + 8 * (tid % 32)
        if const_expr(not spec.warp_mma):
            thread = mma.get_slice(0)
            b = thread.make_fragment_B(thread.partition_B(store.w.get_tensor(layout.outer, swizzle=layout.inner)))
        columns = cute.make_rmem_tensor(self.runs, Float32)
        columns.fill(0.0)
        # Each warpgroup takes a run of tiles, so that it seldom meets another sequence.
        runs, tiles = grid // spec.cluster * spec.groups, cute.ceil_div(at.limit, TILE)
        run = bid // spec.cluster * spec.groups + group
        first, last = Int32(Int64(tiles) * run // runs), Int32(Int64(tiles) * (run + 1) // runs)
        turn, cached = Int32(0), Int32(-1)
        # Of the tile to come: places (sequences, rows of scales), dk and its exponents.
        places = cute.make_rmem_tensor(8, Int32)
        places.fill(0)
        codes = cute.make_rmem_tensor((4 if spec.dk.mx else 8, spec.rows // DEPTH, 2), Uint32)
        bytes_ = cute.make_rmem_tensor((spec.rows // DEPTH, 2), Int32)
        self.locate(io, at, first, places)
        self.load_codes(io, at, first, places, codes, bytes_, True)
        for tile in cutlass.range(first, last, unroll=1):
            cached = self.tile(mma, b, io, at, here, columns, places, codes, bytes_, tile, turn, cached)
            turn = turn + 1
        if const_expr(spec.need_norm):
            lane = tid % 32
            row = (bid // spec.cluster * spec.groups + group) * 4 + warp % 4
            for q in cutlass.range_constexpr(self.runs):
                parts[row, column0 + 32 * q + 8 * (lane % 4) + run_element(lane)] = columns[q] if total > 0 else Float32(0.0)
        if const_expr(spec.cluster > 1):  # nobody leaves while another may still send to it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def weight_unit(self, w: cute.Tensor, top, column0: Int32):
        """The power of two that brings the largest finite weight of this CTA's columns to [2^14, 2^15), and its reciprocal."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        eighths = spec.slab // 8
        largest, count = Int32(0), spec.rows * eighths
        for first in cutlass.range(tid, count, PIECES * self.threads, unroll=1):
            pieces = []
            for m in cutlass.range_constexpr(PIECES):  # the last again where there is none
                i = cutlass.min(first + m * self.threads, count - 1)
                words = cute.make_rmem_tensor(4, Uint32)
                load_words(address_of(w, i // eighths, column0 + 8 * (i % eighths)), words)
                pieces.append(words)
            for words in pieces:
                for n in cutlass.range_constexpr(4):
                    for bits in ((Int32(words[n]) << 16) & 0x7FFF0000, Int32(words[n]) & 0x7FFF0000):
                        largest = cutlass.max(largest, bits if bits < 0x7F800000 else Int32(0))
        if tid == 0:
            cute.make_tensor(top, cute.make_layout(4))[0] = Int32(0)
        cute.arch.sync_threads()
        largest = warp_max(largest)
        if tid % 32 == 0:
            cute.arch.atomic_max(top, largest)
        cute.arch.sync_threads()
        exponent = cute.make_tensor(top, cute.make_layout(4))[0] >> 23
        unit = cutlass.min(cutlass.max(268 - exponent, 15), 239)
        return float_of(unit << 23), float_of((254 - unit) << 23)

    @cute.jit
    def load_weight(self, w: cute.Tensor, gain: cute.Tensor, slab: Int32, gains: cute.Tensor, column0: Int32, unit: Float32):
        """This CTA's columns of ``w [rows, columns]`` times ``unit``, both axes in the order of the registers, and the norm's weight."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        eighths = spec.slab // 8
        count = spec.rows // 2 * eighths
        for first in cutlass.range(tid, count, PIECES // 2 * self.threads, unroll=1):
            pieces = []
            for m in cutlass.range_constexpr(PIECES // 2):
                i = cutlass.min(first + m * self.threads, count - 1)
                words = cute.make_rmem_tensor((4, 2), Uint32)
                for n in cutlass.range_constexpr(2):
                    load_words(address_of(w, i // eighths * 2 + n, column0 + 8 * (i % eighths)), words[None, n])
                pieces.append(words)
            for m in cutlass.range_constexpr(PIECES // 2):
                if first + m * self.threads < count:
                    self.store_pieces(pieces[m], first + m * self.threads, slab, unit)
        for i in cutlass.range(tid, spec.slab, self.threads):
            gains[i] = gain[column0 + i]

    @cute.jit
    def store_pieces(self, words: cute.Tensor, i: Int32, slab: Int32, unit: Float32):
        """Two rows of eight columns of the weight, the ``i``-th such piece, to their places in the slab."""
        spec = self.spec
        k, chunk = i // (spec.slab // 8) * 2, i % (spec.slab // 8)
        place = self.weight_place(k)  # and column 32 q + 8 t + 2 j + i of a thread's runs lies at 32 q + 8 j + 2 t + i
        for e in cutlass.range_constexpr(8):
            pair = [pair_to_float(words[e // 2, n], False)[e % 2] for n in range(2)]
            word = float_to_pair(*(n * unit if const_expr(spec.dk.mx) else n for n in pair), spec.dk.mx)
            column = chunk // 4 * 32 + e // 2 * 8 + chunk % 4 * 2 + e % 2
            if const_expr(spec.warp_mma):  # [16 of the contraction, 8 columns, lane, half]
                lane = column % 8 * 4 + place // 2 % 4
                at = 8 * ((place // 16 * (spec.slab // 8) + column // 8) * 32 + lane) + place // 8 % 2 * 4
            else:  # [64 of the contraction, columns], rows of 128 bytes whose 16-byte pieces are exchanged by the column
                at = (place // 64 * spec.slab + column) * 128 + ((place // 8 % 8) ^ (column % 8)) * 16 + place % 8 * 2
            pointer = cute.make_ptr(Int32, slab + at, cute.AddressSpace.smem, assumed_align=4)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = word

    @cute.jit
    def row_of(self, at, tile: Int32, i: cutlass.Constexpr):
        """This thread's row ``i`` (of two) of a tile; the last one that has values where it has none: what comes of it is not stored, and
        adds nothing to sums that is not there already, since its ``rstd`` counts as 0."""
        row = tile * TILE + at.warp % 4 * 16 + cute.arch.lane_idx() // 4 + 8 * i
        return cutlass.max(cutlass.min(row, at.total - 1), 0)

    @cute.jit
    def locate(self, io, at, tile: Int32, places: cute.Tensor):
        """Where this thread's rows (``r`` and ``r + 8``) of a tile lie. ``places``: their rows of the scales (2), their sequences (2), the
        sequence of the whole tile (-1 if it has several, or a row past the end); the sequence of the first row, where it begins and ends,
        kept from tile to tile."""
        token0 = tile * TILE
        low, high = places[5], places[5]
        if const_expr(self.spec.lookup):
            if (token0 >= places[7]) & (token0 < at.total):
                low = search(io.offsets, low, at.batch, token0)
                places[5], places[6], places[7] = low, Int32(io.offsets[low]), Int32(io.offsets[low + 1])
            high = low
            if cutlass.min(token0 + TILE, at.total) > places[7]:
                high = search(io.offsets, low, at.batch, token0 + TILE - 1)
        for i in cutlass.range_constexpr(2):
            row = self.row_of(at, tile, i)
            places[i], places[2 + i] = row // GROUP, Int32(0)
            if const_expr(self.spec.lookup):
                b, begin = low, places[6]
                if low < high:
                    b = search_alone(io.offsets, low, high, row)
                    begin = Int32(io.offsets[b])
                places[i], places[2 + i] = begin // GROUP + b + (row - begin) // GROUP, b
        places[4] = low if (low == high) & (token0 + TILE <= at.total) else Int32(-1)

    @cute.jit
    def load_codes(self, io, at, tile: Int32, places: cute.Tensor, codes: cute.Tensor, bytes_: cute.Tensor, early: cutlass.Constexpr):
        """This thread's part of ``dk``: its exponents and the first of its chunks (``early``), or the rest."""
        spec = self.spec
        quad = cute.arch.lane_idx() % 4
        chunks = spec.rows // DEPTH
        for i in cutlass.range_constexpr(2):
            row = address_of(io.dk, self.row_of(at, tile, i), 16 * quad)
            if const_expr(spec.dk.mx and early):
                scales = scale_address(io.dk_scale, places[i], spec.dk.static)
                if const_expr(spec.dk.width == 32):
                    scales = scales + quad // 2
                for c in cutlass.range_constexpr(chunks):
                    if const_expr(spec.dk.width == 32):
                        bytes_[c, i] = load_byte(scales + 2 * c)
                    elif const_expr(spec.dk.width % DEPTH == 0):
                        bytes_[c, i] = load_byte(scales + DEPTH * c // spec.dk.width)
                    else:
                        bytes_[c, i] = load_byte(scales + (DEPTH * c + 16 * quad) // spec.dk.width)
            item = 1 if const_expr(spec.dk.mx) else 2
            for c in cutlass.range_constexpr(chunks):
                for j in cutlass.range_constexpr(item if (c < chunks // 2) == early else 0):
                    part = cute.make_rmem_tensor(4, Uint32)
                    load_words(row + (item * DEPTH * c + 16 * j), part)
                    for n in cutlass.range_constexpr(4):
                        codes[4 * j + n, c, i] = part[n]

    @cute.jit
    def keep_mean(self, io, at, here, sequence: Int32, cached: Int32) -> Int32:
        """Bring a tile's mean to this warp's shared memory, unless it is there; returns whose is."""
        if (sequence >= 0) & (sequence != cached):
            lane = cute.arch.lane_idx()
            kept = cute.make_tensor(here.means, cute.make_layout(self.spec.slab))
            cute.arch.sync_warp()
            for n in cutlass.range_constexpr(self.runs):
                kept[lane + 32 * n] = io.mean[Int64(sequence), at.column0 + lane + 32 * n]
            cute.arch.sync_warp()
            cached = sequence
        return cached

    @cute.jit
    def tile(
        self,
        mma,
        b,
        io,
        at,
        here,
        columns: cute.Tensor,
        places: cute.Tensor,
        codes: cute.Tensor,
        bytes_: cute.Tensor,
        tile: Int32,
        turn: Int32,
        cached: Int32,
    ) -> Int32:
        """One tile of 64 rows, this CTA's columns. ``places``, ``codes``, ``bytes_`` are of this tile, on return of the next."""
        spec = self.spec
        lane = cute.arch.lane_idx()
        quad = lane % 4
        chunks = spec.rows // DEPTH
        row0 = tile * TILE + at.warp % 4 * 16 + lane // 4
        rows, rows_of_scales, sequences, whole = [row0, row0 + 8], [places[0], places[1]], [places[2], places[3]], places[4]
        bases = [Int64(0), Int64(0)]
        self.load_codes(io, at, tile, places, codes, bytes_, False)
        self.prefetch(io, at, tile + 1)
        tops = [Int32(0), Int32(0)]
        if const_expr(spec.dk.mx):
            for i in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(chunks):
                    tops[i] = cutlass.max(tops[i], bytes_[c, i] if bytes_[c, i] < 255 else Int32(0))
                for offset in (1, 2):
                    tops[i] = cutlass.max(tops[i], cute.arch.shuffle_sync_bfly(tops[i], offset=offset))
        xs = cute.make_rmem_tensor((self.words, self.runs, 2), Uint32)
        scale = cute.make_rmem_tensor(2, Float32)
        dvs, dv_bytes = None, None
        if const_expr(spec.dv is not None):
            dvs = cute.make_rmem_tensor((2 if spec.dv.mx else 4, self.runs, 2), Uint32)
            dv_bytes = cute.make_rmem_tensor((self.runs, 2), Int32)
        if const_expr(spec.warp_mma):
            acc = cute.make_rmem_tensor(spec.slab // 2, Float32)
            acc.fill(0.0)
            operands = [cute.make_rmem_tensor(16, Int32)] * 2
        else:
            acc = cute.make_rmem_tensor(mma.partition_shape_C((TILE, spec.slab)), Float32)
            operands = [mma.make_fragment_A(mma.partition_shape_A((TILE, DEPTH))) for _ in range(2)]
        for c in cutlass.range_constexpr(chunks):
            a = cute.recast_tensor(operands[c % 2], Int32)
            if const_expr(c >= 2 and not spec.warp_mma):
                warpgroup.wait_group(1)
            for s in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(2):
                    if const_expr(spec.dk.mx):
                        factor = relative_factor(bytes_[c, i], tops[i], HEAD)
                        a[4 * s + i], a[4 * s + 2 + i] = codes_to_f16(codes[s, c, i], factor)
                    else:
                        a[4 * s + i], a[4 * s + 2 + i] = Int32(codes[2 * s, c, i]), Int32(codes[2 * s + 1, c, i])
            if const_expr(spec.warp_mma):
                self.multiply_by_warps(acc, a, b, c)
            else:
                warpgroup.fence()
                atom = cute.make_mma_atom(mma.op)
                atom.set(warpgroup.Field.ACCUMULATE, c > 0)
                for s in cutlass.range_constexpr(4):
                    cute.gemm(atom, acc, operands[c % 2][None, None, s], b[None, None, 4 * c + s], acc)
                    atom.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
            if const_expr(c == min(X_AFTER, chunks - 1)):
                self.load_x(io, at, tile, xs, scale)
            if const_expr(spec.dv is not None and c == min(DV_AFTER, chunks - 1)):
                self.load_dv(io, at, tile, rows_of_scales, dvs, dv_bytes)
        self.locate(io, at, tile + 1, places)
        if const_expr(spec.mean):
            cached = self.keep_mean(io, at, here, whole, cached)
            for i in cutlass.range_constexpr(2):
                # one address for the mean of a row, whether here or in global memory: selecting values would cost a select for each
                bases[i] = generic_of_shared(Int32(here.means.toint())) + 32 * quad
                if whole < 0:
                    bases[i] = address_of(io.mean, sequences[i], at.column0 + 8 * quad)
        if const_expr(not spec.warp_mma):
            warpgroup.wait_group(0)

        units = [Float32(1.0), Float32(1.0)]
        if const_expr(spec.dk.mx):
            units = [scale_of_byte(top) * (at.unit * Float32(2.0**-HEAD)) for top in tops]
        factors = [Float32(1.0), Float32(1.0)]
        sums = [Float32(0.0), Float32(0.0)]
        for q in cutlass.range_constexpr(self.runs):
            gain = cute.make_rmem_tensor(8, Float32)
            load_shared(here.gains.iterator + (32 * q + 8 * quad), gain)
            column_sums = [Float32(0.0)] * 8
            for i in cutlass.range_constexpr(2):
                xf = self.x_of(xs, q, i)
                extra = self.dv_of(dvs, q, i)
                if const_expr(spec.dv is not None and spec.dv.mx):
                    factors[i] = scale_of_byte(dv_bytes[q, i])
                base = cute.make_rmem_tensor(8, Float32)
                if const_expr(spec.mean):
                    load_generic(bases[i] + 128 * q, base)
                for e in cutlass.range_constexpr(8):
                    index = e % 2 + 2 * i + 4 * (4 * q + e // 2)
                    d = acc[index]
                    if const_expr(spec.dv is not None and spec.mean):
                        d = fma(d, units[i], fma(extra[e], factors[i], base[e]))
                    elif const_expr(spec.dv is not None):
                        d = fma(d, units[i], extra[e] * factors[i])
                    elif const_expr(spec.mean):
                        d = fma(d, units[i], base[e])
                    else:
                        d = d * units[i]
                    xhat = xf[e] * scale[i]
                    column_sums[e] = column_sums[e] + d * xhat
                    acc[index] = d * gain[e]
                    sums[i] = sums[i] + acc[index] * xhat
            if const_expr(spec.need_norm):
                columns[q] = columns[q] + sum_rows(column_sums)
        if const_expr(spec.need_x):
            for i in cutlass.range_constexpr(2):
                sums[i] = quad_sum(sums[i])
            if const_expr(spec.cluster > 1):
                sums = self.exchange(at, here.exchange, sums, turn)
        self.load_codes(io, at, tile + 1, places, codes, bytes_, True)  # after the exchange, whose fence waits for what is in flight
        if const_expr(spec.need_x):
            for i in cutlass.range_constexpr(2):
                if rows[i] < at.total:
                    share = scale[i] * (sums[i] * Float32(1.0 / spec.columns))
                    for q in cutlass.range_constexpr(self.runs):
                        xf = self.x_of(xs, q, i, True)
                        out = cute.make_rmem_tensor((4, self.words // 4), Int32)
                        for e in cutlass.range_constexpr(0, 8, 2):
                            pair = []
                            for n in cutlass.range_constexpr(2):
                                d = acc[n + 2 * i + 4 * (4 * q + e // 2)]
                                pair.append(scale[i] * (d - xf[e + n] * share))
                            if const_expr(spec.wide):
                                out[e], out[e + 1] = bits_of(pair[0]), bits_of(pair[1])
                            else:
                                out[e // 2] = float_to_pair(pair[0], pair[1], self.half)
                        for n in cutlass.range_constexpr(self.words // 4):
                            store_words(io.dx, rows[i], at.column0 + 32 * q + 8 * quad + 4 * n, out[None, n])
                elif rows[i] < at.limit:
                    zeros = cute.make_rmem_tensor(4, Int32)
                    zeros.fill(0)
                    for q in cutlass.range_constexpr(self.runs):
                        for n in cutlass.range_constexpr(self.words // 4):
                            store_words(io.dx, rows[i], at.column0 + 32 * q + 8 * quad + 4 * n, zeros)
        return cached

    @cute.jit
    def multiply_by_warps(self, acc: cute.Tensor, a: cute.Tensor, b: Int32, c: cutlass.Constexpr):
        """One chunk of the contraction: 16 rows of this warp with the slab, whose words a lane finds side by side."""
        for s in cutlass.range_constexpr(4):
            for j in cutlass.range_constexpr(self.spec.slab // 8):
                words = shared_words(b + 256 * ((4 * c + s) * (self.spec.slab // 8) + j), 2)
                kind = "f16" if self.spec.dk.mx else "bf16"
                warp_mma(kind, acc, 4 * j, [a[4 * s + n] for n in range(4)], words[0], words[1])

    @cute.jit
    def load_x(self, io, at, tile: Int32, xs: cute.Tensor, scale: cute.Tensor):
        """This thread's part of ``x`` and ``rstd``, which is 0 past the end."""
        for i in cutlass.range_constexpr(2):
            row = self.row_of(at, tile, i)
            factor = io.rstd[Int64(row)]
            scale[i] = factor if tile * TILE + at.warp % 4 * 16 + cute.arch.lane_idx() // 4 + 8 * i < at.total else Float32(0.0)
            address = address_of(io.x, row, at.column0 + 8 * (cute.arch.lane_idx() % 4))
            for q in cutlass.range_constexpr(self.runs):
                load_words(address + 16 * self.words * q, xs[None, q, i])

    @cute.jit
    def load_dv(self, io, at, tile: Int32, rows_of_scales, dvs: cute.Tensor, bytes_: cute.Tensor):
        """This thread's part of ``dv`` and its exponents."""
        kind = self.spec.dv
        for i in cutlass.range_constexpr(2):
            address = address_of(io.dv, self.row_of(at, tile, i), at.column0 + 8 * (cute.arch.lane_idx() % 4))
            for q in cutlass.range_constexpr(self.runs):
                load_words(address + (32 if kind.mx else 64) * q, dvs[None, q, i])
            if const_expr(kind.mx):
                scales = scale_address(io.dv_scale, rows_of_scales[i], kind.static)
                even = kind.width == 32 or self.spec.slab % kind.width == 0
                if const_expr(even):
                    scales = scales + at.column0 // kind.width
                for q in cutlass.range_constexpr(self.runs):
                    if const_expr(even):
                        bytes_[q, i] = load_byte(scales + 32 * q // kind.width)
                    else:
                        bytes_[q, i] = load_byte(scales + (at.column0 + 32 * q) // kind.width)

    @cute.jit
    def x_of(self, xs: cute.Tensor, q: cutlass.Constexpr, i: cutlass.Constexpr, again: cutlass.Constexpr = False):
        """Eight values of ``x``; ``again``: unpacked anew, because the compiler would rather keep them all than unpack them twice."""
        out = []
        for n in cutlass.range_constexpr(self.words):
            word = pinned(xs[n, q, i]) if const_expr(again) else xs[n, q, i]
            out += [float_of(word)] if const_expr(self.spec.wide) else pair_to_float(word, self.half)
        return out

    @cute.jit
    def dv_of(self, dvs: cute.Tensor, q: cutlass.Constexpr, i: cutlass.Constexpr):
        """Eight values of ``dv``, codes without their exponent."""
        out = []
        if const_expr(self.spec.dv is not None):
            if const_expr(self.spec.dv.mx):
                for n in cutlass.range_constexpr(2):
                    out += e4m3x4_to_float(Int32(dvs[n, q, i]))
            else:
                for n in cutlass.range_constexpr(4):
                    out += pair_to_float(dvs[n, q, i], False)
        return out

    @cute.jit
    def exchange(self, at, exchange, sums, turn: Int32):
        """Sums of the two rows over the cluster, added in the order of the CTAs; the same bits in each of them.

        Two slots take turns, so that nobody waits for one to be empty.
        """
        from quack.utils import store_shared_remote

        spec = self.spec
        lane = cute.arch.lane_idx()
        slot, use = turn % 2, turn // 2
        full, empty = exchange.bars + slot, exchange.bars + (2 + slot)
        sent = exchange.sums + slot * (spec.cluster * TILE)
        row = at.warp % 4 * 16 + lane // 4
        # With roles, a sum of the rank's kept from tile to tile would be parked in local memory, and all of the cluster wait for it.
        rank = pinned(at.rank) if const_expr(spec.roles) else at.rank
        if at.warp % 4 == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * TILE * spec.cluster)
        cute.arch.mbarrier_wait(empty, (use + 1) % 2)
        for n in cutlass.range_constexpr(0, spec.cluster, 4):
            target = lane % 4 + n
            if target < spec.cluster:
                for i in cutlass.range_constexpr(2):
                    store_shared_remote(sums[i], sent + (rank * TILE + row + 8 * i), full, target)
        cute.arch.mbarrier_wait(full, use % 2)
        found = cute.make_tensor(sent, cute.make_layout(spec.cluster * TILE))
        out = []
        for i in cutlass.range_constexpr(2):
            total = found[row + 8 * i]
            for n in cutlass.range_constexpr(1, spec.cluster):
                total = total + found[n * TILE + row + 8 * i]
            out.append(total)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane < spec.cluster:
            cute.arch.mbarrier_arrive(empty, lane)
        return out

    @cute.jit
    def prefetch(self, io, at, tile: Int32):
        """Ask for the next tile's rows in L2, this CTA's columns (of ``dk``: its share)."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        local = tid % 128
        row = tile * TILE + local // 2
        if row < at.total:
            share = spec.rows // spec.cluster
            wanted = [(io.dk, at.rank * share, share * (1 if spec.dk.mx else 2))]
            wanted.append((io.x, at.column0, spec.slab * self.words // 2))
            if const_expr(spec.dv is not None):
                wanted.append((io.dv, at.column0, spec.slab * (1 if spec.dv.mx else 2)))
            for source, column, size in wanted:
                address = (source.iterator + cute.crd2idx((Int64(row), column), source.layout)).toint()
                for line in cutlass.range_constexpr(0, size, 256):
                    if line + 128 * (local % 2) < size:
                        prefetch_line(address + line + 128 * (local % 2))


@cute.jit
def run_element(lane):
    """Element of a run of 8 columns whose sum :func:`sum_rows` leaves in a lane."""
    return lane // 16 * 4 + lane // 8 % 2 * 2 + lane // 4 % 2


@cute.jit
def sum_rows(values):
    """Sums of 8 values over the 8 lanes that share their columns; a lane keeps one of them (:func:`run_element`)."""
    lane = cute.arch.lane_idx()
    for bit in cutlass.range_constexpr(3):
        offset = 16 >> bit
        upper = lane // offset % 2 == 1
        n = len(values) // 2
        kept = []
        for i in cutlass.range_constexpr(n):
            keep = values[n + i] if upper else values[i]
            send = values[i] if upper else values[n + i]
            kept.append(keep + cute.arch.shuffle_sync_bfly(send, offset=offset))
        values = kept
    return values[0]


@cute.jit
def load_shared(pointer, out: cute.Tensor):
    """Eight FP32 from shared memory."""
    aligned = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(8)), out)


@cute.jit
def load_generic(address: Int64, out: cute.Tensor):
    """Eight FP32 from shared or global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.generic, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(8)), out)


@cute.jit
def store_words(target: cute.Tensor, row: Int32, column: Int32, words: cute.Tensor):
    """16 bytes of a row."""
    pointer = target.iterator + cute.crd2idx((Int64(row), column), target.layout)
    aligned = cute.make_ptr(Int32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(words, cute.make_tensor(aligned, cute.make_layout(4)))


@kernel_cache
def compile_input_gradient(arch: str, offsets_dtype: str | None, spec: InputSpec):
    """Compile for ``arch``. Arguments at launch, in order:

    dk: uint8 or bf16 ``[T, rows]``; dk_scale: uint8 ``[groups or 1, blocks]`` or None; dv, dv_scale: the same of ``columns``, or None;
    mean: fp32 ``[B, columns]`` or None; w: bf16 ``[rows, columns]``; x ``[T, columns]``; gain: fp32 ``[columns]``; rstd: fp32 ``[T]``;
    offsets or None; dx: like x, or None; parts: fp32 ``[clusters * warps, columns]``, or None; clusters.
    """
    tokens = symbol()
    return build(
        arch,
        InputGradient(spec),
        *fake_operand(spec.dk, tokens, spec.rows),
        *fake_operand(spec.dv, tokens, spec.columns),
        fake("float32", (symbol(), spec.columns), compact=True) if spec.mean else None,
        fake("bfloat16", (spec.rows, spec.columns), compact=True),
        fake(spec.dtype, (tokens, spec.columns)),
        fake("float32", (spec.columns,), compact=True),
        fake("float32", (tokens,), align=4),
        None if spec.dense else fake_offsets(offsets_dtype),
        fake(spec.dtype, (tokens, spec.columns), compact=True) if spec.need_x else None,
        fake("float32", (symbol(), spec.columns), compact=True) if spec.need_norm else None,
        Int32(1),
    )
