"""The backward's main kernel: one persistent CTA per multiprocessor, sixteen warps in five roles.

======  ==========================================  =====================
warps   role                                        file
======  ==========================================  =====================
0-7     P, dS                                       backward_compute.py
8-11    dQ to its sums; dV, dK of a key tile        backward_reduce.py, backward_store.py
12      five products, scales to tensor memory      backward_mma.py
13      TMA                                         backward_load.py
======  ==========================================  =====================

Every role walks the same items (``blockIdx.x``, then strides of ``gridDim.x`` through a list sorted longest first) and counts phases by
itself. dK and dV stay in tensor memory for a whole key tile, over all query tiles and all query heads of the group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm100.atoms import F8, ONE, SF, SF_BYTES
from lp_fa4.sm100.backward_atoms import BackwardAtoms
from lp_fa4.sm100.backward_compute import compute_role
from lp_fa4.sm100.backward_config import TILE, BackwardSpec, BackwardTuning
from lp_fa4.sm100.backward_load import load_role
from lp_fa4.sm100.backward_mma import mma_role
from lp_fa4.sm100.backward_plan import DS_ATOMS_K, DS_ATOMS_Q, backward_plan
from lp_fa4.sm100.backward_reduce import reduce_role, staging_floats
from lp_fa4.sm100.sync import BarrierPlaces, arrive_tensor
from lp_fa4.sm100.tmem_plan import TmemPlan

THREADS = 512
MMA_WARP, LOAD_WARP = 12, 13


@dataclass(frozen=True)
class BackwardBarriers(BarrierPlaces):
    """The kernel's mbarriers.

    ``kv_*``: two key tiles' K and V. ``q_*``, ``do_*``, ``stat_*``: ``stages`` query tiles. Once per query tile: ``s_full``, ``dp_full``,
    ``dq_full`` a product is there (MMA); ``s_read``, ``dp_read`` it is in registers, ``p_ready``, ``ds_ready`` codes are stored (8 compute
    warps); ``dq_read`` dQ is in registers (4 reduction warps). Once per key tile: ``dkv_full`` dV and dK are complete
    (MMA), ``dv_read``, ``dk_read`` they are in registers (4 reduction warps). ``landing``: a tile that the load
    warp has to finish has come.
    """

    stages: int

    def sizes(self) -> list[tuple[str, int, int]]:
        sizes = [("kv_full", 2, 1), ("kv_empty", 2, 1)]
        sizes += [(name, self.stages, 1) for name in ("q_full", "q_empty", "do_full", "do_empty", "stat_full")]
        sizes += [("stat_empty", self.stages, 8), ("s_full", 1, 1), ("s_read", 1, 8), ("p_ready", 1, 8), ("dp_full", 1, 1)]
        sizes += [("dp_read", 1, 8), ("ds_ready", 1, 8), ("dq_full", 1, 1), ("dq_read", 1, 4)]
        sizes += [("dkv_full", 1, 1), ("dv_read", 1, 4), ("dk_read", 1, 4), ("landing", 1, 1)]
        return sizes


class Arguments(NamedTuple):
    """What the roles read and write in global memory. ``q, k, v, do``: TMA tensors (token, dim, head). ``dq, dk, dv, dk_scale, dv_scale``:
    addresses."""

    tma_q: cute.CopyAtom
    q: cute.Tensor
    tma_k: cute.CopyAtom
    k: cute.Tensor
    tma_v: cute.CopyAtom
    v: cute.Tensor
    tma_do: cute.CopyAtom
    do: cute.Tensor
    sf_q: cute.Tensor
    sf_qt: cute.Tensor
    sf_k: cute.Tensor
    sf_kt: cute.Tensor
    sf_v: cute.Tensor
    sf_do: cute.Tensor
    sf_dot: cute.Tensor
    stats: cute.Tensor
    items: cute.Tensor
    total: cute.Tensor
    dq: Int64
    dk: Int64
    dv: Int64
    dk_scale: Int64
    dv_scale: Int64
    kv_heads: Int32
    replicas: Int32
    dq_rows: Int32
    scale: Float32
    dk_factor: Float32


class Shared(NamedTuple):
    """Shared memory tensors. ``ds_bytes``: the same memory as ``ds`` without its swizzle. ``sf_*t``: scales along tokens."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    ds_bytes: cute.Pointer
    sf_q: cute.Tensor
    sf_qt: cute.Tensor
    sf_k: cute.Tensor
    sf_kt: cute.Tensor
    sf_v: cute.Tensor
    sf_do: cute.Tensor
    sf_dot: cute.Tensor
    sf_ds_k: cute.Tensor
    sf_ds_q: cute.Tensor
    stats: cute.Tensor
    staging: cute.Tensor


class Backward:
    """Backward attention of one variant. ``plan`` is given only to show that a wrong one is caught; the right one is checked here."""

    def __init__(self, spec: BackwardSpec, tuning: BackwardTuning, plan: TmemPlan | None = None):
        self.spec, self.tuning = spec, tuning
        self.plan = backward_plan(spec.head_dim) if plan is None else plan
        self.barriers = BackwardBarriers(tuning.stages)
        self.atoms = BackwardAtoms(spec, self.plan)

    arrive_read = staticmethod(arrive_tensor)
    """How ``backward_store`` says that a gradient is in registers."""

    @property
    def aliased(self) -> bool:
        """Whether dQ and the scales lie in dead scores and dead dP, so that their barriers are needed."""
        return self.plan["dQ"].start == self.plan["dP"].start

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, in bytes: what ``shared_memory`` and the barriers take."""
        stages, dim = self.tuning.stages, self.spec.head_dim
        size = -(-(8 * len(self.barriers.arrivals) + 4) // 1024) * 1024
        size += (2 * stages + 4) * TILE * dim + TILE * TILE
        size += (4 * stages + 6 + DS_ATOMS_K + DS_ATOMS_Q) * SF_BYTES
        return size + 4 * self.spec.stats * TILE * stages + 4 * staging_floats(self.spec)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        sf_q: cute.Tensor,
        sf_qt: cute.Tensor,
        sf_k: cute.Tensor,
        sf_kt: cute.Tensor,
        sf_v: cute.Tensor,
        sf_do: cute.Tensor,
        sf_dot: cute.Tensor,
        stats: cute.Tensor,
        items: cute.Tensor,
        total: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dk_scale: cute.Tensor,
        dv_scale: cute.Tensor,
        replicas: Int32,
        dq_rows: Int32,
        scale: Float32,
        dk_factor: Float32,
        ctas: Int32,
        stream,
    ):
        """``q, k, v, do``: uint8 codes [tokens, heads, dim]; ``sf_*``: uint8 [tiles, heads, 512]; ``scale``: softmax scale times log2(e);
        ``dk_factor``: softmax scale times 2^-p_scale_log2. The others: :func:`compile_main`."""
        mma, tile = self.atoms.scores(), self.atoms.tile_s
        kv_heads = Int32(k.shape[1])
        one = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
        load = cpasync.CopyBulkTensorTileG2SOp(ONE)
        first = (None, None, None, 0)
        views = []
        for x in (q, k, v, do):
            typed = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=F8), x.layout)
            views.append(cute.make_tensor(typed.iterator, cute.select(typed.layout, [0, 2, 1])))
        q, k, v, do = views
        key_layout, query_layout = cute.slice_(self.atoms.key_layout(), first), cute.slice_(self.atoms.query_layout(), first)
        tma_k, k = cute.nvgpu.make_tiled_tma_atom_A(load, k, key_layout, tile, mma, one)
        tma_v, v = cute.nvgpu.make_tiled_tma_atom_A(load, v, key_layout, tile, mma, one)
        tma_q, q = cute.nvgpu.make_tiled_tma_atom_B(load, q, query_layout, tile, mma, one)
        tma_do, do = cute.nvgpu.make_tiled_tma_atom_B(load, do, query_layout, tile, mma, one)
        scales = [
            cute.make_tensor(cute.recast_ptr(t.iterator, dtype=SF), t.layout) for t in (sf_q, sf_qt, sf_k, sf_kt, sf_v, sf_do, sf_dot)
        ]
        self.kernel(
            tma_q,
            q,
            tma_k,
            k,
            tma_v,
            v,
            tma_do,
            do,
            *scales,
            stats,
            items,
            total,
            *[t.iterator.toint() for t in (dq, dk, dv, dk_scale, dv_scale)],
            kv_heads,
            replicas,
            dq_rows,
            scale,
            dk_factor,
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
        tma_do: cute.CopyAtom,
        do: cute.Tensor,
        sf_q: cute.Tensor,
        sf_qt: cute.Tensor,
        sf_k: cute.Tensor,
        sf_kt: cute.Tensor,
        sf_v: cute.Tensor,
        sf_do: cute.Tensor,
        sf_dot: cute.Tensor,
        stats: cute.Tensor,
        items: cute.Tensor,
        total: cute.Tensor,
        dq: Int64,
        dk: Int64,
        dv: Int64,
        dk_scale: Int64,
        dv_scale: Int64,
        kv_heads: Int32,
        replicas: Int32,
        dq_rows: Int32,
        scale: Float32,
        dk_factor: Float32,
    ):
        operands = (tma_q, q, tma_k, k, tma_v, v, tma_do, do)
        scales = (sf_q, sf_qt, sf_k, sf_kt, sf_v, sf_do, sf_dot)
        addresses = (dq, dk, dv, dk_scale, dv_scale)
        args = Arguments(*operands, *scales, stats, items, total, *addresses, kv_heads, replicas, dq_rows, scale, dk_factor)
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

        if warp < 8:
            cute.arch.setmaxregister_increase(self.tuning.compute_registers)
            compute_role(self, args, shared, bars, tmem, warp // 4, thread % TILE)
        elif warp < 12:
            cute.arch.setmaxregister_decrease(self.tuning.reduce_registers)
            reduce_role(self, args, shared, bars, tmem, thread - 2 * TILE)
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
            return storage.allocate_tensor(SF, atoms.scale_layout(operand, count), byte_alignment=128)

        def floats(count):
            return storage.allocate_tensor(Float32, cute.make_layout(count), byte_alignment=128)

        q, k, v, do = (tiles(x) for x in (atoms.query_layout(stages), atoms.key_layout(2), atoms.key_layout(2), atoms.query_layout(stages)))
        layout = atoms.ds_layout()
        plain = storage.allocate_tensor(F8, cute.make_layout(TILE * TILE), byte_alignment=1024)
        ds = cute.make_tensor(cute.recast_ptr(plain.iterator, layout.inner, dtype=F8), layout.outer)
        names = (("SFQ", stages), ("SFQ_T", stages), ("SFK", 2), ("SFK_T", 2), ("SFV", 2), ("SFDO", stages), ("SFDO_T", stages))
        atoms_ = [scales(*x) for x in (*names, ("SFDS_K", DS_ATOMS_K), ("SFDS_Q", DS_ATOMS_Q))]
        return Shared(q, k, v, do, ds, plain.iterator, *atoms_, floats(self.spec.stats * TILE * stages), floats(staging_floats(self.spec)))


@kernel_cache
def compile_main(arch: str, spec: BackwardSpec, tuning: BackwardTuning) -> Any:
    """Compile one variant. No tensor, no length. Arguments at launch after those of :meth:`Backward.__call__`'s operands:

    stats: fp32 ``[tile rows, H, stats * 128]``; items: int32 ``[n, 8]``, total: int32 ``[1]`` (``backward_items``);
    dq: fp32 or fp16 ``[rows, H, 128 * D]``, zeroed, of ``replicas`` buffers of ``dq_rows`` rows where queries are shared; dk, dv: bf16 or
    uint8 ``[T, Hkv, D]``; dk_scale, dv_scale: uint8 ``[groups, Hkv, D / 32]``.
    """
    d, heads, kv_heads, tokens = spec.head_dim, symbol(), symbol(), symbol()
    codes = lambda h: fake("uint8", (symbol(), h, d), align=16)  # noqa: E731
    scales = lambda h: fake("uint8", (symbol(), h, SF_BYTES), align=16)  # noqa: E731
    grad = lambda: fake("uint8" if spec.mxfp8 else "bfloat16", (tokens, kv_heads, d), compact=True)  # noqa: E731
    return build(
        arch,
        Backward(spec, tuning),
        codes(heads),
        codes(kv_heads),
        codes(kv_heads),
        codes(heads),
        *[scales(h) for h in (heads, heads, kv_heads, kv_heads, kv_heads, heads, heads)],
        fake("float32", (symbol(), heads, spec.stats * TILE), compact=True),
        fake("int32", (symbol(), 8), compact=True),
        fake("int32", (1,), align=4),
        fake("float16" if spec.dq_half else "float32", (symbol(), heads, TILE * d), compact=True),
        grad(),
        grad(),
        *[fake("uint8", (symbol(), kv_heads, d // 32), align=1, compact=True) for _ in range(2)],
        Int32(1),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        Int32(1),
    )
