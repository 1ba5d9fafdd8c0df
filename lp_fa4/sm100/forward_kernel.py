"""The forward kernel: one persistent CTA per multiprocessor, sixteen warps in five roles.

======  ==========================================  =====================
warps   role                                        file
======  ==========================================  =====================
0-3     softmax of Q tile 0                         forward_softmax.py
4-7     softmax of Q tile 1                         forward_softmax.py
8-11    correction of O, results                    forward_correction.py
12      both products, scales to tensor memory      forward_mma.py
13      TMA                                         forward_load.py
======  ==========================================  =====================

Every role walks the same items of the work list, sorted longest first (``work.py``, note [Drawn items]), and counts phases by itself;
nothing but the barriers below passes between them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.sm100.atoms import F8, ONE, SF, SF_BYTES, Atoms
from lp_fa4.sm100.config import QUERY_TILE, ForwardSpec, ForwardTuning
from lp_fa4.sm100.forward_correction import correction_role
from lp_fa4.sm100.forward_load import load_role
from lp_fa4.sm100.forward_mma import mma_role
from lp_fa4.sm100.forward_softmax import softmax_role
from lp_fa4.sm100.sync import BarrierPlaces
from lp_fa4.sm100.tmem_plan import COLUMNS, TmemPlan, forward_plan
from lp_fa4.sm100.work import ENTRY, READERS, RING

THREADS = 512
MMA_WARP, LOAD_WARP = 12, 13


@dataclass(frozen=True)
class Barriers(BarrierPlaces):
    """The kernel's mbarriers.

    ``q_*``: two items' worth of Q. ``k_*``, ``v_*``: ``stages`` tiles. Per Q tile: ``s_full`` scores are there (MMA), ``s_read`` scores are
    in registers (4 softmax warps), ``p_ready`` P is stored (4 softmax warps), ``o_ready`` O may be added to (4 correction warps: rescaled,
    or written out), ``o_full`` O is complete (MMA), ``mail_*`` softmax to correction (4 warps each way). Where items are drawn:
    ``answered`` the launch control's answer is there, ``drawn_*`` the load warp's ring of items.
    """

    stages: int
    drawn: bool = False

    def sizes(self) -> list[tuple[str, int, int]]:
        sizes = [("q_full", 2, 1), ("q_empty", 2, 1)]
        sizes += [(name, self.stages, 1) for name in ("k_full", "k_empty", "v_full", "v_empty")]
        sizes += [("s_full", 2, 1), ("s_read", 2, 4), ("p_ready", 2, 4), ("o_ready", 2, 4), ("o_full", 2, 1)]
        sizes += [("mail_full", 2, 4), ("mail_empty", 2, 4)]
        if self.drawn:
            sizes += [("answered", 1, 1), ("drawn_full", RING, 1), ("drawn_empty", RING, READERS)]
        return sizes


class Arguments(NamedTuple):
    """What the roles read and write in global memory. ``q, k``: TMA tensors (token, dim, head); ``v``: (dim, token, head)."""

    tma_q: cute.CopyAtom
    q: cute.Tensor
    tma_k: cute.CopyAtom
    k: cute.Tensor
    tma_v: cute.CopyAtom
    v: cute.Tensor
    sf_q: cute.Tensor
    sf_k: cute.Tensor
    sf_v: cute.Tensor
    records: cute.Tensor
    state: cute.Tensor
    out: cute.Tensor
    saved: cute.Tensor
    lse: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    v_sum: cute.Tensor
    v_mean: cute.Tensor
    scale: Float32


class Shared(NamedTuple):
    """Shared memory tensors. Scale atoms: one per Q tile and buffer, per key tile in flight, and per Q tile for P. ``answer``, ``drawn``:
    16 bytes of launch control, and the ring of drawn items."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    sf_q: cute.Tensor
    sf_k: cute.Tensor
    sf_v: cute.Tensor
    sf_p: cute.Tensor
    mail: cute.Tensor
    answer: cute.Tensor
    drawn: cute.Tensor


class Forward:
    """Forward attention of one variant. ``plan`` is given only to show that a wrong one is caught; the right one is checked here."""

    def __init__(self, spec: ForwardSpec, tuning: ForwardTuning, plan: TmemPlan | None = None):
        self.spec, self.tuning = spec, tuning
        self.plan = forward_plan(spec.head_dim, spec.block_scaled) if plan is None else plan
        self.barriers = Barriers(tuning.stages, tuning.drawn)
        self.atoms = Atoms(spec, self.plan, tuning.stages)

    @property
    def aliased(self) -> bool:
        """Whether scales lie in dead scores, so that the two new barriers are needed."""
        return self.spec.block_scaled and self.plan["SFQ0"].start < self.plan["S1"].end

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, in bytes: what ``shared_memory`` and the barriers take."""
        stages, dim = self.tuning.stages, self.spec.head_dim
        size = 8 * len(self.barriers.arrivals) + 4
        size = -(-size // 1024) * 1024 + (4 + 2 * stages) * QUERY_TILE * dim
        if self.spec.block_scaled:
            size += (4 + 2 * stages + (0 if self.spec.p_scale == "constant" else 2)) * SF_BYTES
        if self.tuning.drawn:
            size += 16 * (1 + RING)
        return size + QUERY_TILE * 4 * 2 * 4

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        sf_q: cute.Tensor,
        sf_k: cute.Tensor,
        sf_v: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        out: cute.Tensor,
        saved: cute.Tensor,
        lse: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream,
    ):
        """``q, k, v``: uint8 codes [tokens, heads, dim]; ``sf_*``: uint8 [tiles, heads, 512], or [scale rows, heads] where scales stay
        outside the MMA; ``scale``: softmax scale times log2(e)."""
        qk, pv = self.atoms.qk(), self.atoms.pv()
        q, k, v = [cute.make_tensor(cute.recast_ptr(t.iterator, dtype=F8), t.layout) for t in (q, k, v)]
        if const_expr(self.spec.block_scaled):
            sf_q, sf_k, sf_v = [cute.make_tensor(cute.recast_ptr(t.iterator, dtype=SF), t.layout) for t in (sf_q, sf_k, sf_v)]
        one = cute.tiled_divide(cute.make_layout((1, 1, 1)), (qk.thr_id.shape,)).shape
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        q, k = [cute.make_tensor(t.iterator, cute.select(t.layout, [0, 2, 1])) for t in (q, k)]
        v = cute.make_tensor(v.iterator, cute.select(v.layout, [2, 0, 1]))
        first = (None, None, None, 0)
        tma_q, q = cute.nvgpu.make_tiled_tma_atom_A(load, q, cute.slice_(self.atoms.q_layout(), first), self.atoms.tile_qk, qk, one)
        tma_k, k = cute.nvgpu.make_tiled_tma_atom_B(load, k, cute.slice_(self.atoms.k_layout(), first), self.atoms.tile_qk, qk, one)
        tma_v, v = cute.nvgpu.make_tiled_tma_atom_B(load, v, cute.slice_(self.atoms.v_layout(), first), self.atoms.tile_pv, pv, one)
        self.kernel(
            tma_q, q, tma_k, k, tma_v, v, sf_q, sf_k, sf_v, records, state, out, saved, lse, row_max, row_sum, v_sum, v_mean, scale
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        q: cute.Tensor,
        tma_k: cute.CopyAtom,
        k: cute.Tensor,
        tma_v: cute.CopyAtom,
        v: cute.Tensor,
        sf_q: cute.Tensor,
        sf_k: cute.Tensor,
        sf_v: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        out: cute.Tensor,
        saved: cute.Tensor,
        lse: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        scale: Float32,
    ):
        args = Arguments(
            tma_q, q, tma_k, k, tma_v, v, sf_q, sf_k, sf_v, records, state, out, saved, lse, row_max, row_sum, v_sum, v_mean, scale
        )
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator()
        arrivals = self.barriers.arrivals
        bars = storage.allocate_array(Int64, len(arrivals))
        tmem_slot = storage.allocate_array(Int32, 1)
        shared = self.shared_memory(storage)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(arrivals)):
                    cute.arch.mbarrier_init(bars + i, arrivals[i])
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(self.plan.allocation, tmem_slot)
        cute.arch.barrier()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_slot)
        if const_expr(self.plan.allocation == COLUMNS):
            # who owns every column starts at column 0; a constant needs no register in any role
            tmem = cute.make_ptr(Float32, 0, mem_space=cute.AddressSpace.tmem, assumed_align=16)

        if warp < 8:
            cute.arch.setmaxregister_increase(self.tuning.softmax_registers)
            softmax_role(self, args, shared, bars, tmem, warp, thread % QUERY_TILE)
        elif warp < 12:
            cute.arch.setmaxregister_decrease(self.tuning.correction_registers)
            correction_role(self, args, shared, bars, tmem, warp - 8, thread - 2 * QUERY_TILE)
        else:
            cute.arch.setmaxregister_decrease(self.tuning.other_registers)
            if warp == MMA_WARP:
                mma_role(self, args, shared, bars, tmem)
            elif warp == LOAD_WARP:
                load_role(self, args, shared, bars)
        cute.arch.barrier()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem, self.plan.allocation)

    def shared_memory(self, storage) -> Shared:
        """Allocate every tensor of :class:`Shared`."""
        atoms, stages = self.atoms, self.tuning.stages

        def tiles(layout):
            return storage.allocate_tensor(F8, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        def scales(operand, count):
            return storage.allocate_tensor(SF, atoms.sf_layout(operand, count), byte_alignment=128)

        q, k, v = tiles(atoms.q_layout()), tiles(atoms.k_layout()), tiles(atoms.v_layout())
        sf_q = sf_k = sf_v = sf_p = None
        if const_expr(self.spec.block_scaled):
            sf_q, sf_k, sf_v = scales("q", 4), scales("k", stages), scales("v", stages)
            if const_expr(self.spec.p_scale != "constant"):
                sf_p = scales("p", 2)
        mail = storage.allocate_tensor(Float32, cute.make_layout((QUERY_TILE, 4, 2)), byte_alignment=16)
        answer = drawn = None
        if const_expr(self.tuning.drawn):
            answer = storage.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
            drawn = storage.allocate_tensor(Int32, cute.make_layout((ENTRY, RING)), byte_alignment=16)
        return Shared(q, k, v, sf_q, sf_k, sf_v, sf_p, mail, answer, drawn)
