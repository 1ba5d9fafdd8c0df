"""Tensor-core atoms of the forward, their operand layouts, and the copies between shared memory, tensor memory and registers.

Operands: Q and K are K-major in shared memory (head dimension contiguous); V stays ``[token, head_dim]``, an MN-major B operand, so no
transposed copy exists on Blackwell; P is a K-major A operand in tensor memory. A scale-factor atom is 512 bytes: 128 rows by 4 blocks of 32
along the contraction.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as scaled
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from lp_fa4.sm100.config import KEY_TILE, QUERY_TILE, ForwardSpec
from lp_fa4.sm100.tmem_plan import TmemPlan

F8 = cutlass.Float8E4M3FN
SF = cutlass.Float8E8M0FNU
SF_BYTES = 512
ONE = tcgen05.CtaGroup.ONE
LANE_STRIDE = 1 << 16
"""Distance of two lanes in a tensor memory address."""


class Atoms:
    """Atoms and layouts of one variant. Layouts are made where they are used: one kept from the host's trace does not reach the kernel."""

    def __init__(self, spec: ForwardSpec, plan: TmemPlan, stages: int):
        self.spec, self.plan, self.stages = spec, plan, stages
        self.tile_qk = (QUERY_TILE, KEY_TILE, spec.head_dim)
        self.tile_pv = (QUERY_TILE, spec.head_dim, KEY_TILE)

    def _mma(self, n, source, b_major):
        op = tcgen05.MmaMXF8F6F4Op if self.spec.block_scaled else tcgen05.MmaF8F6F4Op
        if self.spec.block_scaled:
            made = op(F8, F8, (QUERY_TILE, n, 32), ONE, source, OperandMajorMode.K, b_major)
        else:
            made = op(F8, F8, Float32, (QUERY_TILE, n, 32), ONE, source, OperandMajorMode.K, b_major)
        return cute.make_tiled_mma(cute.make_mma_atom(made))

    def qk(self):
        """A fresh ``S = Q K^T`` atom. Fresh per use: ``set`` rebinds an atom's value, which then may not dominate a later use."""
        return self._mma(KEY_TILE, tcgen05.OperandSource.SMEM, OperandMajorMode.K)

    def pv(self):
        """A fresh ``O += P V`` atom."""
        return self._mma(self.spec.head_dim, tcgen05.OperandSource.TMEM, OperandMajorMode.MN)

    def q_layout(self, stages=4):
        """Shared memory of Q: two tiles of each of two work items."""
        return helpers.make_smem_layout_a(self.qk(), self.tile_qk, F8, stages)

    def k_layout(self):
        """Shared memory of K, ``stages`` tiles."""
        return helpers.make_smem_layout_b(self.qk(), self.tile_qk, F8, self.stages)

    def v_layout(self):
        """Shared memory of V, ``stages`` tiles."""
        return helpers.make_smem_layout_b(self.pv(), self.tile_pv, F8, self.stages)

    def sf_layout(self, operand, stages):
        """Shared memory of scale factors of operand ``"q"``, ``"k"``, ``"p"`` or ``"v"``: 512 bytes a stage."""
        if operand in "qk":
            make = scaled.make_smem_layout_sfa if operand == "q" else scaled.make_smem_layout_sfb
            return make(self.qk(), self.tile_qk, 32, stages)
        make = scaled.make_smem_layout_sfa if operand == "p" else scaled.make_smem_layout_sfb
        return make(self.pv(), self.tile_pv, 32, stages)

    def sf_columns(self, operand, tmem, column):
        """Scale factors of an operand in tensor memory, from ``column``."""
        one = cute.slice_(self.sf_layout(operand, 1), (None, None, None, 0))
        mma, tile = (self.qk(), self.tile_qk) if operand in "qk" else (self.pv(), self.tile_pv)
        make = scaled.make_tmem_layout_sfa if operand in "qp" else scaled.make_tmem_layout_sfb
        return cute.make_tensor(cute.recast_ptr(tmem + column, dtype=SF), make(mma, tile, 32, one))

    def scores(self, tmem, tile):
        """S of one Q tile as the accumulator of :meth:`qk`."""
        mma = self.qk()
        return cute.make_tensor(
            tmem + self.plan[f"S{tile}"].start, mma.make_fragment_C(mma.partition_shape_C((QUERY_TILE, KEY_TILE))).layout
        )

    def output(self, tmem, tile):
        """O of one Q tile as the accumulator of :meth:`pv`."""
        mma = self.pv()
        shape = mma.partition_shape_C((QUERY_TILE, self.spec.head_dim))
        return cute.make_tensor(tmem + self.plan[f"O{tile}"].start, mma.make_fragment_C(shape).layout)

    def probabilities(self, tmem, tile):
        """P of one Q tile as the A operand of :meth:`pv`, k-blocks last.

        ``make_fragment_A`` keeps the layout but not the address of a tensor-memory tensor, so the address is set here.
        """
        mma = self.pv()
        start = cute.recast_ptr(tmem + self.plan[f"P{tile}"].start, dtype=F8)
        layout = helpers.make_smem_layout_a(mma, self.tile_pv, F8, 1).outer
        fragment = mma.make_fragment_A(cute.make_tensor(start, layout)).layout
        return cute.make_tensor(start, cute.slice_(fragment, (None, None, None, 0)))


def columns(tmem, start, width):
    """``width`` columns of all 128 lanes as a plain (lane, column) tensor."""
    return cute.make_tensor(tmem + start, cute.make_layout((128, width), stride=(LANE_STRIDE, 1)))


def loader(tensor, width, thread):
    """Copy ``width`` columns a step from tensor memory to the registers of the threads that own the lanes."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
    return tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)


def storer(tensor, width, thread):
    """The inverse of :func:`loader`."""
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), Float32)
    return tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)


@cute.jit
def load_columns(tmem, start: cutlass.Constexpr, width: cutlass.Constexpr, thread):
    """This thread's lane, ``width`` columns, as a register tensor. The caller waits (``fence_view_async_tmem_load``)."""
    tensor = columns(tmem, start, width)
    copy = loader(tensor, min(width, 32), thread)
    registers = cute.make_rmem_tensor(copy.partition_D(cute.make_identity_tensor((128, width))).shape, Float32)
    cute.copy(copy, copy.partition_S(tensor), registers)
    return registers


@cute.jit
def store_columns(tmem, start: cutlass.Constexpr, width: cutlass.Constexpr, thread, values):
    """Store ``width`` 32-bit registers to this thread's lane. The caller waits (``fence_view_async_tmem_store``)."""
    tensor = columns(tmem, start, width)
    copy = storer(tensor, width, thread)
    shape = copy.partition_S(cute.make_identity_tensor((128, width))).shape
    cute.copy(copy, cute.make_tensor(values.iterator, cute.make_layout(shape)), copy.partition_D(tensor))


def sides_of_copy(atom, shared, tiles):
    """Shared and global side of a TMA copy of whole tiles (stages, and tiles, in the last mode)."""
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3))


@cute.jit
def copy_scales(source, stage, target):
    """``tcgen05.cp`` of one 512-byte atom from shared memory to tensor memory, written to all four lane quadrants."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(ONE), SF)
    target = cute.filter_zeros(target)
    copy = tcgen05.make_s2t_copy(atom, target)
    part = copy.get_slice(0)
    descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(cute.filter_zeros(source)))
    cute.copy(copy, descriptors[None, None, None, None, stage], part.partition_D(target))


@cute.jit
def load_scales(source, tile, head, target, stage, barrier):
    """Bulk copy of the 512-byte atom (tile, head) of ``source [tiles, heads, 512]`` to shared memory."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), SF, num_bits_per_copy=SF_BYTES * 8)
    start = (source.iterator + cute.crd2idx((tile, head, 0), source.layout)).align(16)
    there = cute.make_tensor((target.iterator + stage * SF_BYTES).align(16), cute.make_layout(SF_BYTES))
    with cute.arch.elect_one():
        cute.copy(atom, cute.make_tensor(start, cute.make_layout(SF_BYTES)), there, mbar_ptr=barrier)


@cute.jit
def clear_block(tile, stage, rows, dim: cutlass.Constexpr):
    """Write zeros to rows ``rows`` to the end of their block of 32, in one stage of a payload tile (rows of ``dim`` bytes one after
    another, each swizzled in itself); the tensor core may read them afterwards. Called by one warp, once the tile has landed.

    These rows are another sequence's, or nobody's. They meet a 0, but a code of NaN times 0 is NaN.
    """
    base = tile.iterator.toint() + stage * (KEY_TILE * dim)
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    for at in cutlass.range(rows * dim + 16 * cute.arch.lane_idx(), (rows + 31 & -32) * dim, 512, unroll=1):
        there = cute.make_ptr(Int32, base + at, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(zeros, cute.make_tensor(there, cute.make_layout(4)))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def multiply(mma, accumulator, a, b, sfa, sfb, keep, keys, skip: cutlass.Constexpr):
    """``accumulator (+)= a b`` over the k-blocks of 32. ``keep``: add to what is there. ``skip``: leave out blocks at or past ``keys``.

    Skipping is not an optimization: the scale of a block past the end of a sequence is a pad, and a pad of 255 is a NaN that even P = 0
    does not silence. Block 0 may be left out too (an empty sequence): the accumulator then keeps what it held. Whole tiles have a path of
    their own without a branch per block: the MMA warp shares its scheduler's issue slots with two softmax warps.
    """
    blocks = cute.size(a, mode=[2])
    if const_expr(skip):
        if keys > 32 * (blocks - 1):
            for block in cutlass.range_constexpr(blocks):
                _multiply_block(mma, accumulator, a, b, sfa, sfb, block, keep)
        else:
            for block in cutlass.range_constexpr(blocks - 1):
                if block * 32 < keys:
                    _multiply_block(mma, accumulator, a, b, sfa, sfb, block, keep)
    else:
        for block in cutlass.range_constexpr(blocks):
            _multiply_block(mma, accumulator, a, b, sfa, sfb, block, keep)


@cute.jit
def _multiply_block(mma, accumulator, a, b, sfa, sfb, block: cutlass.Constexpr, keep):
    atom = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    atom.set(tcgen05.Field.ACCUMULATE, keep if block == 0 else True)
    if const_expr(sfa is not None):
        atom.set(tcgen05.Field.SFA, sfa[None, None, block].iterator)
        atom.set(tcgen05.Field.SFB, sfb[None, None, block].iterator)
    cute.gemm(atom, accumulator, a[None, None, block], b[None, None, block], accumulator)
