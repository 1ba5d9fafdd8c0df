"""``dw_k = dk^T @ xn`` on Hopper, straight from compact jagged codes, summed in FP32 in a fixed order.

The contraction runs over tokens, along which every exponent changes at each group of 32 of one sequence. No Hopper MMA scales blocks, so
each code becomes BF16 under its exponent (exact) on its way from registers to shared memory; a row finds its group by itself, so a step of
64 tokens may hold any number of sequences, none needs a segment or pads of its own, and what belongs to no sequence enters as 0. BF16 takes
operands with tokens along either axis, FP8 would need both turned.

A CTA owns a tile of the result and a run of tokens. While the MMAs of a step run, the same warps convert the next step
and have the one after in flight. The partial sums are added by the caller, in order: the result is bitwise repeatable.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hop
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import LayoutEnum

from fused_ops.gemm_norm_backward.arguments import fake_weight_gradient
from fused_ops.gemm_norm_backward.config import STAGES, TILE, WeightSpec
from fused_ops.gemm_norm_backward.rows import (
    GROUP,
    address_of,
    bf16_factor,
    codes_to_bf16,
    load_byte,
    load_words,
    pinned64,
    prefetch_line,
    scale_address,
    search,
    search_alone,
)
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.matrices import load_matrices, warp_mma
from lp_fa4.compile import build, kernel_cache

AHEAD = 4
"""Steps of tokens that are asked for in L2 before they are loaded."""


class WeightGradient:
    """See the module's docstring; launch arguments: :func:`compile_weight_gradient`."""

    def __init__(self, spec: WeightSpec):
        self.spec = spec
        self.warps = 4 * spec.groups
        self.left, self.right = spec.tile_rows // 64, spec.tile_columns // 64  # blocks of 64 columns of dk and of xn
        self.blocks = self.left + self.right
        self.units = 8 * self.blocks // self.warps  # pieces of 8 rows x 64 columns of a step for each warp
        # All pieces of a warp are of one block of columns, or their blocks are known when the kernel is compiled.
        self.one_block = self.warps % self.blocks == 0
        self.words = 4 if spec.dk.mx and spec.xn.mx else 8

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
        mma = None if const_expr(spec.warp_mma) else self.products()
        self.kernel(mma, dk, dk_scale, xn, xn_scale, offsets, parts).launch(
            grid=[spec.tiles * Int32(parts.shape[0]), 1, 1], block=[128 * spec.groups, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    def products(self):
        """The warpgroups' MMA: both operands from shared memory, contiguous along the result's axes."""
        shape, major = (self.spec.groups, 1, 1), OperandMajorMode.MN
        return hop.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, shape, (64, self.spec.tile_columns))

    def layouts(self):
        """Layouts of a step's operands in shared memory: tokens are rows of 64-column blocks, 128 bytes each, swizzled."""
        spec = self.spec
        shape = (spec.tile_rows, spec.tile_columns, TILE)
        major = LayoutEnum.COL_MAJOR
        return hop.make_smem_layout_a(major, shape, BFloat16, STAGES), hop.make_smem_layout_b(major, shape, BFloat16, STAGES)

    @cute.kernel
    def kernel(
        self,
        mma,
        dk: cute.Tensor,
        dk_scale: cute.Tensor,
        xn: cute.Tensor,
        xn_scale: cute.Tensor,
        offsets: cute.Tensor,
        parts: cute.Tensor,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tid // 128)
        layout_a, layout_b = self.layouts()

        @cute.struct
        class Storage:
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout_b)], 1024]

        store = cutlass.utils.SmemAllocator().allocate(Storage)
        if const_expr(not spec.warp_mma):
            thread = mma.get_slice(group * 128)
            a = thread.make_fragment_A(thread.partition_A(store.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)))
            b = thread.make_fragment_B(thread.partition_B(store.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)))
        tile, split = bid % spec.tiles, bid // spec.tiles
        wide = spec.columns // spec.tile_columns
        row0, column0 = tile // wide * spec.tile_rows, tile % wide * spec.tile_columns
        batch, total = Int32(1), Int32(dk.shape[0])
        if const_expr(not spec.dense):
            batch = Int32(offsets.shape[0]) - 1
            total = Int32(offsets[batch])
        io = Bundle(dk=dk, dk_scale=dk_scale, xn=xn, xn_scale=xn_scale, offsets=offsets)
        # Steps are dealt out so that all runs are equal to one.
        steps = cute.ceil_div(total, TILE)
        splits = Int32(parts.shape[0])
        first = Int32(Int64(steps) * split // splits)
        last = Int32(Int64(steps) * (split + 1) // splits)
        lane = tid % 32
        block, rows = Int32(0), warp * 8
        if const_expr(self.one_block):
            block, rows = warp % self.blocks, warp // self.blocks * 8
        address, stride, scale_address, scale_stride = Int64(0), Int64(0), Int64(0), Int64(0)
        if const_expr(self.one_block and spec.dk.mx == spec.xn.mx):
            address, stride, scale_address, scale_stride = self.either(io, block, lane % 4, row0, column0)
        at = Bundle(
            row0=row0, column0=column0, batch=batch, total=cutlass.min(total, last * TILE), tile=tile, block=block, row=rows + lane // 4,
            piece=lane % 4, a=Int32(store.a.data_ptr().toint()), b=Int32(store.b.data_ptr().toint()), address=address, stride=stride,
            scale_address=scale_address, scale_stride=scale_stride,
        )  # fmt: skip

        if const_expr(spec.warp_mma):
            acc = cute.make_rmem_tensor(spec.tile_columns // 2, Float32)
        else:
            acc = cute.make_rmem_tensor(mma.partition_shape_C((spec.tile_rows, spec.tile_columns)), Float32)
        acc.fill(0.0)
        codes = [cute.make_rmem_tensor((self.words, self.units), Uint32) for _ in range(2)]
        bytes_ = [cute.make_rmem_tensor(self.units, Int32) for _ in range(2)]
        # the sequence of a step's first row, where it begins and where it ends
        place = cute.make_rmem_tensor(3, Int32)
        place.fill(0)
        self.load(io, at, codes[0], bytes_[0], place, first)
        self.load(io, at, codes[1], bytes_[1], place, first + 1)
        self.convert(at, codes[0], bytes_[0], Int32(0))
        self.load(io, at, codes[0], bytes_[0], place, first + 2)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        stage = Int32(0)
        for step in cutlass.range(first, last, 2, unroll=1):
            for n in cutlass.range_constexpr(2):  # a step past the run is all zeros
                if const_expr(spec.warp_mma):
                    self.multiply_by_warps(at, acc, warp, stage)
                else:
                    atom = cute.make_mma_atom(mma.op)
                    atom.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(atom, acc, a[None, None, k, stage], b[None, None, k, stage], acc)
                    warpgroup.commit_group()
                stage = stage + 1
                if stage == STAGES:
                    stage = Int32(0)
                # The next step's stage was last read two steps ago; everyone has waited for that since.
                self.convert(at, codes[1 - n], bytes_[1 - n], stage)
                if const_expr(not spec.warp_mma):  # before the loads: a fence waits for what is in flight
                    cute.arch.fence_view_async_shared()
                self.load(io, at, codes[1 - n], bytes_[1 - n], place, step + n + 3)
                if const_expr(not spec.warp_mma):
                    warpgroup.wait_group(1)
                cute.arch.sync_threads()
        if const_expr(not spec.warp_mma):
            warpgroup.wait_group(0)
        row = row0 + group * 64 + warp % 4 * 16 + lane // 4
        for j in cutlass.range_constexpr(spec.tile_columns // 8):
            for i in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = acc[2 * i + 4 * j], acc[2 * i + 4 * j + 1]
                place_ = (Int64(split), row + 8 * i, column0 + 8 * j + 2 * (lane % 4))
                pointer = parts.iterator + cute.crd2idx(place_, parts.layout)
                aligned = cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(pair, cute.make_tensor(aligned, cute.make_layout(2)))

    @cute.jit
    def multiply_by_warps(self, at, acc: cute.Tensor, warp: Int32, stage: Int32):
        """A step's products of this warp's 16 rows: tokens are rows in shared memory, so both operands are read transposed."""
        lane = cute.arch.lane_idx()
        row = warp * 16 + lane // 8 % 2 * 8  # of the result; matrices: tokens 0-7 at rows 0-7, 8-15, tokens 8-15 at the same
        for k in cutlass.range_constexpr(TILE // 16):
            token = 16 * k + lane // 16 * 8 + lane % 8
            a = load_matrices(self.place(at.a + stage * (self.left * 8192), token, row), transposed=True)
            token = 16 * k + lane // 8 % 2 * 8 + lane % 8  # matrices: tokens 0-7, 8-15 of 8 columns, then of the next 8
            for j in cutlass.range_constexpr(self.spec.tile_columns // 16):
                column = 16 * j + lane // 16 * 8
                b = load_matrices(self.place(at.b + stage * (self.right * 8192), token, column), transposed=True)
                warp_mma("bf16", acc, 8 * j, a, b[0], b[1])
                warp_mma("bf16", acc, 8 * j + 4, a, b[2], b[3])

    def place(self, base, token, column):
        """Address of 8 columns of a token in a stage."""
        return base + column // 64 * 8192 + token * 128 + (((column // 8 % 8) ^ (token % 8)) << 4)

    def unit(self, at, u: int):
        """(block of 64 columns, row within the step) of this thread's ``u``-th piece."""
        if self.one_block:
            return at.block, at.row + u * (8 * self.warps // self.blocks)
        return u % self.blocks, at.row + u // self.blocks * (8 * self.warps)

    @cute.jit
    def load(self, io, at, codes: cute.Tensor, bytes_: cute.Tensor, place: cute.Tensor, step: Int32):
        """A step's pieces and their exponents into registers; 0 where there is no token."""
        spec = self.spec
        token0 = step * TILE
        if const_expr(spec.lookup):  # noqa: SIM102 - one is decided at compile time
            if (token0 >= place[2]) & (token0 < at.total):
                place[0] = search(io.offsets, place[0], at.batch, token0)
                place[1], place[2] = Int32(io.offsets[place[0]]), Int32(io.offsets[place[0] + 1])
        begin = place[1]
        start = begin // GROUP + place[0]  # the sequence's first row of scales
        whole = token0 + TILE <= at.total
        if const_expr(spec.lookup):
            whole = whole & (token0 + TILE <= place[2])
        if whole:  # 64 tokens of one sequence
            for u in cutlass.range_constexpr(self.units):
                _, row = self.unit(at, u)
                self.load_piece(io, at, codes, bytes_, u, token0 + row, start + (token0 + row - begin) // GROUP)
            self.prefetch(io, at, token0 + AHEAD * TILE)
        else:
            codes.fill(0)
            bytes_.fill(0)
            high = Int32(0)
            if const_expr(spec.lookup):  # noqa: SIM102
                if token0 < at.total:
                    high = search(io.offsets, place[0], at.batch, token0 + TILE - 1)
            for u in cutlass.range_constexpr(self.units):
                _, row = self.unit(at, u)
                token = token0 + row
                if token < at.total:
                    scale_row = token // GROUP
                    if const_expr(spec.lookup):
                        b = search_alone(io.offsets, place[0], high, token)
                        first = Int32(io.offsets[b])
                        scale_row = first // GROUP + b + (token - first) // GROUP
                    self.load_piece(io, at, codes, bytes_, u, token, scale_row)

    @cute.jit
    def load_piece(self, io, at, codes: cute.Tensor, bytes_: cute.Tensor, u: cutlass.Constexpr, token: Int32, scale_row: Int32):
        """16 columns of a row of the operand that the piece belongs to."""
        spec = self.spec
        if const_expr(not self.one_block):
            block, _ = self.unit(at, u)
            if const_expr(block < self.left):
                self.load_from(spec.dk, io.dk, io.dk_scale, codes, bytes_, u, token, scale_row, at.row0 + 64 * block + 16 * at.piece)
            else:
                column = at.column0 + 64 * (block - self.left) + 16 * at.piece
                self.load_from(spec.xn, io.xn, io.xn_scale, codes, bytes_, u, token, scale_row, column)
        elif const_expr(spec.dk.mx == spec.xn.mx):
            self.load_either(at, codes, bytes_, u, token, scale_row)
        else:
            if at.block < self.left:
                self.load_from(spec.dk, io.dk, io.dk_scale, codes, bytes_, u, token, scale_row, at.row0 + 64 * at.block + 16 * at.piece)
            else:
                column = at.column0 + 64 * (at.block - self.left) + 16 * at.piece
                self.load_from(spec.xn, io.xn, io.xn_scale, codes, bytes_, u, token, scale_row, column)

    @cute.jit
    def load_either(self, at, codes: cute.Tensor, bytes_: cute.Tensor, u: cutlass.Constexpr, token: Int32, scale_row: Int32):
        """16 columns of a row of either operand, both stored alike: one piece of code for both, so no branch between the loads."""
        self.load_row(at.address + Int64(token) * at.stride, codes, u, 1 if self.spec.dk.mx else 2)
        if const_expr(self.spec.dk.mx):
            bytes_[u] = load_byte(at.scale_address + Int64(scale_row) * at.scale_stride)

    @cute.jit
    def either(self, io, block: Int32, piece: Int32, row0: Int32, column0: Int32):
        """Where a warp's pieces lie that are all of one operand: address and bytes from row to row, of the payload and of the scales."""
        spec = self.spec
        item = 1 if const_expr(spec.dk.mx) else 2
        left = block < self.left
        first, second = row0 + 64 * block + 16 * piece, column0 + 64 * (block - self.left) + 16 * piece
        address = address_of(io.dk, 0, first) if left else address_of(io.xn, 0, second)
        stride = Int64(io.dk.stride[0]) * item if left else Int64(io.xn.stride[0]) * item
        scale_address, scale_stride = Int64(0), Int64(0)
        if const_expr(spec.dk.mx):
            ours, theirs = io.dk_scale.iterator.toint() + first // spec.dk.width, io.xn_scale.iterator.toint() + second // spec.xn.width
            scale_address = ours if left else theirs
            ours, theirs = self.scale_stride(spec.dk, io.dk_scale), self.scale_stride(spec.xn, io.xn_scale)
            scale_stride = Int64(ours if left else theirs)
        return pinned64(address), pinned64(stride), pinned64(scale_address), pinned64(scale_stride)

    def scale_stride(self, kind, scale):
        """Bytes from row to row of the scales: static ones have one row."""
        return Int32(0 if kind.static else scale.shape[1])

    @cute.jit
    def load_row(self, address: Int64, codes: cute.Tensor, u: cutlass.Constexpr, item: cutlass.Constexpr):
        """16 elements."""
        for j in cutlass.range_constexpr(item):
            part = cute.make_rmem_tensor(4, Uint32)
            load_words(address + 16 * j, part)
            for n in cutlass.range_constexpr(4):
                codes[4 * j + n, u] = part[n]

    @cute.jit
    def load_from(
        self,
        kind: cutlass.Constexpr,
        source: cute.Tensor,
        scale: cute.Tensor,
        codes: cute.Tensor,
        bytes_: cute.Tensor,
        u: cutlass.Constexpr,
        token: Int32,
        scale_row: Int32,
        column: Int32,
    ):
        """16 columns of a row."""
        self.load_row(address_of(source, token, column), codes, u, 1 if kind.mx else 2)
        if const_expr(kind.mx):
            bytes_[u] = load_byte(scale_address(scale, scale_row, kind.static) + column // kind.width)

    @cute.jit
    def convert(self, at, codes: cute.Tensor, bytes_: cute.Tensor, stage: Int32):
        """The pieces in registers to BF16 in shared memory: stages of [blocks, 64 tokens, 64 columns], a row's 16-byte chunks exchanged by
        its number."""
        spec = self.spec
        for u in cutlass.range_constexpr(self.units):
            block, row = self.unit(at, u)
            words = cute.make_rmem_tensor(8, Int32)
            if const_expr(spec.dk.mx and spec.xn.mx):
                self.decode(codes, bytes_, u, words)
            elif const_expr(not spec.dk.mx and not spec.xn.mx):
                self.pass_on(codes, u, words)
            elif const_expr(not self.one_block):
                if const_expr((block < self.left) == spec.dk.mx):
                    self.decode(codes, bytes_, u, words)
                else:
                    self.pass_on(codes, u, words)
            else:
                if (block < self.left) == spec.dk.mx:
                    self.decode(codes, bytes_, u, words)
                else:
                    self.pass_on(codes, u, words)
            if const_expr(self.one_block):
                base = at.a + stage * (self.left * 8192) + block * 8192
                if block >= self.left:
                    base = at.b + stage * (self.right * 8192) + (block - self.left) * 8192
            elif const_expr(block < self.left):
                base = at.a + stage * (self.left * 8192) + block * 8192
            else:
                base = at.b + stage * (self.right * 8192) + (block - self.left) * 8192
            for h in cutlass.range_constexpr(2):
                half = cute.make_rmem_tensor(4, Int32)
                for n in cutlass.range_constexpr(4):
                    half[n] = words[4 * h + n]
                address = base + row * 128 + (((2 * at.piece + h) ^ (row % 8)) << 4)
                pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(half, cute.make_tensor(pointer, cute.make_layout(4)))

    @cute.jit
    def decode(self, codes: cute.Tensor, bytes_: cute.Tensor, u: cutlass.Constexpr, words: cute.Tensor):
        """16 codes to BF16."""
        factor = bf16_factor(bytes_[u])
        for n in cutlass.range_constexpr(4):
            words[2 * n], words[2 * n + 1] = codes_to_bf16(codes[n, u], factor)

    @cute.jit
    def pass_on(self, codes: cute.Tensor, u: cutlass.Constexpr, words: cute.Tensor):
        """16 BF16."""
        for n in cutlass.range_constexpr(8):
            words[n] = Int32(codes[n, u])

    @cute.jit
    def prefetch(self, io, at, token0: Int32):
        """Ask for a later step's rows in L2: the CTAs of a run of tokens share the lines."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        lines = []
        for source, kind, columns in ((io.dk, spec.dk, spec.rows), (io.xn, spec.xn, spec.columns)):
            size = columns * (1 if kind.mx else 2)
            lines.append((source, -(-size // 128)))
        share = -(-TILE // spec.tiles)
        token = token0 + at.tile * share + tid // 8
        if (tid // 8 < share) & (at.tile * share + tid // 8 < TILE) & (token < at.total):
            for source, count in lines:
                address = address_of(source, token, 0)
                for line in cutlass.range_constexpr(0, count, 8):
                    if line + tid % 8 < count:
                        prefetch_line(address + 128 * (line + tid % 8))


@kernel_cache
def compile_weight_gradient(arch: str, offsets_dtype: str | None, spec: WeightSpec):
    """Compile for ``arch``. Arguments at launch: those of ``fake_weight_gradient``."""
    return build(arch, WeightGradient(spec), *fake_weight_gradient(None if spec.dense else offsets_dtype, spec))
