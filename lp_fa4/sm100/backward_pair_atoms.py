"""Tensor-core atoms of the two-CTA backward and their operand layouts: plain E4M3 products over a pair (``cta_group::2``, f8f6f4).

A pair splits A by rows and B by columns: each CTA brings its own 128 keys (64 queries of dQ) and half of the other operand. Where Q, dO and
K serve a second product, the half that a CTA brings is another one (half of the head dimension in place of half of the tokens), so they are
loaded twice. dS is stored once for dQ, with queries contiguous: each CTA holds 64 queries of all 256 keys.
"""

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from lp_fa4.sm100.atoms import F8
from lp_fa4.sm100.backward_atoms import KeyGradientBlocks
from lp_fa4.sm100.backward_config import PAIR, TILE, BackwardSpec
from lp_fa4.sm100.tmem_plan import TmemPlan

K, MN = OperandMajorMode.K, OperandMajorMode.MN
SMEM, TMEM = tcgen05.OperandSource.SMEM, tcgen05.OperandSource.TMEM
TWO = tcgen05.CtaGroup.TWO


class PairAtoms(KeyGradientBlocks):
    """Atoms and layouts of one variant. Layouts are made where they are used: one kept from the host's trace does not reach the kernel."""

    def __init__(self, spec: BackwardSpec, plan: TmemPlan):
        self.spec, self.plan = spec, plan
        self.tile_s = (PAIR, TILE, spec.head_dim)
        self.tile_g = (PAIR, spec.head_dim, TILE)
        self.tile_q = (TILE, spec.head_dim, PAIR)

    def _mma(self, m, n, source, a_major, b_major):
        return cute.make_tiled_mma(cute.make_mma_atom(tcgen05.MmaF8F6F4Op(F8, F8, Float32, (m, n, 32), TWO, source, a_major, b_major)))

    def scores(self):
        """A fresh atom of ``S = K Q^T`` and ``dP = V dO^T`` (fresh per use: ``set`` rebinds an atom's value)."""
        return self._mma(PAIR, TILE, SMEM, K, K)

    def key_gradient(self):
        """A fresh atom of ``dV += P^T dO`` and ``dK += dS^T Q``."""
        return self._mma(PAIR, self.spec.head_dim, TMEM, K, MN)

    def query_gradient(self):
        """A fresh atom of ``dQ = dS K``."""
        return self._mma(TILE, self.spec.head_dim, SMEM, MN, MN)

    def key_layout(self, stages=1):
        """Shared memory of a CTA's 128 rows of K or V, operand A of :meth:`scores`."""
        return helpers.make_smem_layout_a(self.scores(), self.tile_s, F8, stages)

    def query_layout(self, stages=1):
        """Shared memory of a CTA's 64 rows of Q or dO, operand B of :meth:`scores`."""
        return helpers.make_smem_layout_b(self.scores(), self.tile_s, F8, stages)

    def turned_query_layout(self, stages=1):
        """Shared memory of a CTA's half of the columns of Q or dO, operand B of :meth:`key_gradient`: half a row per query."""
        return helpers.make_smem_layout_b(self.key_gradient(), self.tile_g, F8, stages)

    def turned_key_layout(self, stages=1):
        """Shared memory of a CTA's half of the columns of K, operand B of :meth:`query_gradient`: half a row per key of the pair."""
        return helpers.make_smem_layout_b(self.query_gradient(), self.tile_q, F8, stages)

    def ds_layout(self):
        """Shared memory of dS, operand A of :meth:`query_gradient`: a row of 64 bytes (this CTA's queries) per key of the pair."""
        return helpers.make_smem_layout_a(self.query_gradient(), self.tile_q, F8, 1)

    def accumulator(self, name, tmem):
        """S, dP, dV, dK or dQ as an accumulator: this CTA's part, at the same columns in both."""
        mma, shape = {
            "S": (self.scores, (PAIR, TILE)),
            "dP": (self.scores, (PAIR, TILE)),
            "dQ": (self.query_gradient, (TILE, self.spec.head_dim)),
        }.get(name, (self.key_gradient, (PAIR, self.spec.head_dim)))
        mma = mma()
        return cute.make_tensor(tmem + self.plan[name].start, mma.make_fragment_C(mma.partition_shape_C(shape)).layout)


def product(mma, accumulator, a, b, keep):
    """``accumulator (+)= a b`` over blocks of 32, in both CTAs. ``a``: one tensor, or a list with one for each block. ``keep``: add to what
    is there. No block is left out: rows past a sequence's end are 0 in dS, and finite in the other operand (``backward_pair_load``)."""
    for block in range(cute.size(b, mode=[2])):
        atom = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
        atom.set(tcgen05.Field.ACCUMULATE, keep if block == 0 else True)
        cute.gemm(atom, accumulator, a[block] if isinstance(a, list) else a[None, None, block], b[None, None, block], accumulator)
