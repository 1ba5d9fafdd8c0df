"""Tensor-core atoms of the backward, their operand layouts, and its products.

Rows of S, dP, dV and dK are keys, rows of dQ queries. One payload in shared memory serves two products: Q, dO and K are read K-major (head
dimension contiguous) for S and dP, and as the same bytes MN-major for dK, dV and dQ, where tokens are contracted. Only the scales differ,
so each of them has two atoms. dS is stored once with queries contiguous: K-major in tensor memory for dK, MN-major in shared memory for dQ.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as scaled
from cutlass import const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from lp_fa4.sm100.atoms import F8, ONE, SF
from lp_fa4.sm100.backward_config import TILE, BackwardSpec
from lp_fa4.sm100.backward_plan import BLOCK_COLUMNS
from lp_fa4.sm100.tmem_plan import SF_COLUMNS, TmemPlan

K, MN = OperandMajorMode.K, OperandMajorMode.MN
SMEM, TMEM = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM
BLOCKS = TILE // 32


class KeyGradientBlocks:
    """What the atoms of both backwards (one CTA, pairs) share. A subclass has ``plan``, ``tile_g`` and ``key_gradient``."""

    def blocks(self, name, tmem):
        """P or dS in tensor memory as the A operand of :meth:`key_gradient`: one tensor per block of 32 queries, each where its
        warpgroup left it."""
        mma = self.key_gradient()
        layout = helpers.make_smem_layout_a(mma, self.tile_g, F8, 1).outer
        parts = []
        for block in range(BLOCKS):
            column = self.plan[f"{name}{block // 2}"].start + block % 2 * BLOCK_COLUMNS
            start = cute.recast_ptr(tmem + column, dtype=F8)
            fragment = mma.make_fragment_A(cute.make_tensor(start, layout)).layout
            parts.append(cute.make_tensor(start, cute.slice_(fragment, (None, None, 0, 0))))
        return parts


class BackwardAtoms(KeyGradientBlocks):
    """Atoms and layouts of one variant. Layouts are made where they are used: one kept from the host's trace does not reach the kernel."""

    def __init__(self, spec: BackwardSpec, plan: TmemPlan):
        self.spec, self.plan = spec, plan
        self.tile_s = (TILE, TILE, spec.head_dim)
        self.tile_g = (TILE, spec.head_dim, TILE)

    def _mma(self, n, source, a_major, b_major):
        return cute.make_tiled_mma(cute.make_mma_atom(tcgen05.MmaMXF8F6F4Op(F8, F8, (TILE, n, 32), ONE, source, a_major, b_major)))

    def scores(self):
        """A fresh atom of ``S = K Q^T`` and ``dP = V dO^T`` (fresh per use: ``set`` rebinds an atom's value)."""
        return self._mma(TILE, SMEM, K, K)

    def key_gradient(self):
        """A fresh atom of ``dV += P^T dO`` and ``dK += dS^T Q``."""
        return self._mma(self.spec.head_dim, TMEM, K, MN)

    def query_gradient(self):
        """A fresh atom of ``dQ = dS K``."""
        return self._mma(self.spec.head_dim, SMEM, MN, MN)

    def key_layout(self, stages=1):
        """Shared memory of K or V as the A operand of :meth:`scores`."""
        return helpers.make_smem_layout_a(self.scores(), self.tile_s, F8, stages)

    def query_layout(self, stages=1):
        """Shared memory of Q or dO as the B operand of :meth:`scores`."""
        return helpers.make_smem_layout_b(self.scores(), self.tile_s, F8, stages)

    def turned_queries(self, tensor, stages):
        """The same bytes of Q or dO as the B operand of :meth:`key_gradient`."""
        return _view(tensor, helpers.make_smem_layout_b(self.key_gradient(), self.tile_g, F8, stages))

    def turned_keys(self, tensor, stages):
        """The same bytes of K as the B operand of :meth:`query_gradient`."""
        return _view(tensor, helpers.make_smem_layout_b(self.query_gradient(), self.tile_g, F8, stages))

    def ds_layout(self):
        """Shared memory of dS as the A operand of :meth:`query_gradient`: a row of 128 bytes per key, 128-byte swizzle."""
        return helpers.make_smem_layout_a(self.query_gradient(), self.tile_g, F8, 1)

    def scale_layout(self, operand, stages):
        """Shared memory of scale atoms (512 bytes each); ``operand``: a key of ``_SCALES``."""
        make, mma, tile = self._scales(operand)
        return (scaled.make_smem_layout_sfa if make == "a" else scaled.make_smem_layout_sfb)(mma, tile, 32, stages)

    def _scales(self, operand):
        side, product = _SCALES[operand]
        return side, getattr(self, product)(), self.tile_s if product == "scores" else self.tile_g

    def scales(self, operand, tmem, atom=0):
        """Scale factors of an operand in tensor memory, at the plan's place of ``operand`` (its ``atom``-th group of four columns)."""
        side, mma, tile = self._scales(operand)
        one = cute.slice_(self.scale_layout(operand, 1), (None, None, None, 0))
        make = scaled.make_tmem_layout_sfa if side == "a" else scaled.make_tmem_layout_sfb
        start = tmem + (self.plan[operand].start + atom * SF_COLUMNS)
        return cute.make_tensor(cute.recast_ptr(start, dtype=SF), make(mma, tile, 32, one))

    def accumulator(self, name, tmem):
        """S, dP, dV, dK or dQ as an accumulator."""
        if name in ("S", "dP"):
            mma, shape = self.scores(), (TILE, TILE)
        else:
            mma, shape = (self.query_gradient() if name == "dQ" else self.key_gradient()), (TILE, self.spec.head_dim)
        return cute.make_tensor(tmem + self.plan[name].start, mma.make_fragment_C(mma.partition_shape_C(shape)).layout)


_SCALES = {
    "SFK": ("a", "scores"),
    "SFV": ("a", "scores"),
    "SFQ": ("b", "scores"),
    "SFDO": ("b", "scores"),
    "SFP": ("a", "key_gradient"),
    "SFDS_K": ("a", "key_gradient"),
    "SFQ_T": ("b", "key_gradient"),
    "SFDO_T": ("b", "key_gradient"),
    "SFDS_Q": ("a", "query_gradient"),
    "SFK_T": ("b", "query_gradient"),
}
"""Scales by their region of the plan: operand and product. ``_T``: along tokens."""


def _view(tensor, layout):
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, layout.inner, dtype=F8), layout.outer)


@cute.jit
def product(mma, accumulator, a, b, sfa, sfb, keep, left, skip: cutlass.Constexpr):
    """``accumulator (+)= a b`` over blocks of 32. ``a``, ``sfa``: one tensor, or a list with one for each block. ``keep``: add to what is
    there. ``skip``: leave out blocks at or past ``left`` tokens: the scale of a block past a sequence's end is a pad, and a pad of 255 is a
    NaN that even 0 does not silence."""
    for block in cutlass.range_constexpr(cute.size(b, mode=[2])):
        if const_expr(skip):
            if block * 32 < left:
                _block(mma, accumulator, a, b, sfa, sfb, block, keep)
        else:
            _block(mma, accumulator, a, b, sfa, sfb, block, keep)


@cute.jit
def _block(mma, accumulator, a, b, sfa, sfb, block: cutlass.Constexpr, keep):
    atom = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    atom.set(tcgen05.Field.ACCUMULATE, keep if block == 0 else True)
    rows = a[block] if isinstance(a, list) else a[None, None, block]
    scale = sfa[block] if isinstance(sfa, list) else sfa
    atom.set(tcgen05.Field.SFA, scale[None, None, block].iterator)
    atom.set(tcgen05.Field.SFB, sfb[None, None, block].iterator)
    cute.gemm(atom, accumulator, rows, b[None, None, block], accumulator)
