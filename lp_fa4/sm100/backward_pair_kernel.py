"""The two-CTA backward: a pair of CTAs takes 256 keys, one tensor core instruction works for both, dQ leaves once for the pair.

======  =================================  =================================================
warps   role                               file
======  =================================  =================================================
0-7     P, dS                              backward_pair_compute.py
8-11    dQ to its sums; dV, dK             backward_pair_reduce.py, backward_store.py
12      five products (leader only)        backward_pair_mma.py
13      TMA                                backward_pair_load.py
14      dS of the other CTA has come       backward_pair_compute.py
======  =================================  =================================================

Work items, statistics and gradients are those of ``backward_kernel``; CTA ``r`` owns keys 128 r .. 128 r + 127 of the pair and, of dQ,
queries 64 r .. 64 r + 63 of each query tile. Products are plain E4M3: every exponent is constant along the head dimension and is applied by
the compute warps (``backward_pair_tables``).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm100.atoms import F8
from lp_fa4.sm100.backward_atoms import BLOCKS
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, TILE, BackwardSpec, BackwardTuning
from lp_fa4.sm100.backward_kernel import LOAD_WARP, MMA_WARP, THREADS
from lp_fa4.sm100.backward_pair_atoms import TWO, PairAtoms
from lp_fa4.sm100.backward_pair_compute import ROW_BYTES, compute_role, relay_role
from lp_fa4.sm100.backward_pair_load import load_role
from lp_fa4.sm100.backward_pair_mma import mma_role
from lp_fa4.sm100.backward_pair_plan import pair_plan
from lp_fa4.sm100.backward_pair_reduce import reduce_role
from lp_fa4.sm100.backward_pair_sync import LEADER, arrive_leader, cluster_barrier, cta_rank
from lp_fa4.sm100.backward_reduce import staging_floats
from lp_fa4.sm100.sync import BarrierPlaces
from lp_fa4.sm100.tmem_plan import TmemPlan

PAIR_SHAPE = (2, 1, 1)
RELAY_WARP = 14


@dataclass(frozen=True)
class PairBarriers(BarrierPlaces):
    """The kernel's mbarriers.

    Both CTAs have all of them. Those of the leader that its MMA warp waits for: ``kv_full``, ``q_full``, ``do_full`` (a load warp of each
    CTA, and the bytes of both), ``s_read``, ``p_ready``, ``ds_ready`` (8 compute warps of each), ``dq_read``, ``dv_read``, ``dk_read`` (4
    reduction warps of each), ``ds_shared`` (a relay warp of each). What the MMA warp completes in both CTAs: ``kv_empty``, ``q_empty``,
    ``do_empty``, ``s_full``, ``dp_full``, ``dq_full``, ``dkv_full``. A CTA's own: ``stat_full``, ``stat_empty``, ``ds_in`` (bytes of dS
    from the other).
    """

    stages: int

    def sizes(self) -> list[tuple[str, int, int]]:
        sizes = [("kv_full", 2, 2), ("kv_empty", 2, 1), ("q_full", self.stages, 2), ("do_full", self.stages, 2)]
        sizes += [(name, self.stages, 1) for name in ("q_empty", "do_empty", "stat_full")]
        sizes += [("stat_empty", self.stages, 8)]
        sizes += [(name, 1, 1) for name in ("s_full", "dp_full", "dq_full", "dkv_full", "ds_in")]
        sizes += [(name, 1, 16) for name in ("s_read", "p_ready", "ds_ready")]
        sizes += [("dq_read", 1, 8), ("dv_read", 1, 8), ("dk_read", 1, 8), ("ds_shared", 1, 2)]
        return sizes


class PairArguments(NamedTuple):
    """What the roles read and write in global memory. ``*t``: the same operand with its token axis contracted. ``q_codes``, ``k_codes``:
    operands as they lie. ``dq, dk, dv, dk_scale, dv_scale``: addresses. ``stats``, ``factors``: of query tiles (``backward_prepass``,
    ``backward_pair_tables``), ``key_factors`` of 32 keys, ``results`` of a sequence and head."""

    tma_q: cute.CopyAtom
    q: cute.Tensor
    tma_qt: cute.CopyAtom
    qt: cute.Tensor
    tma_k: cute.CopyAtom
    k: cute.Tensor
    tma_kt: cute.CopyAtom
    kt: cute.Tensor
    tma_v: cute.CopyAtom
    v: cute.Tensor
    tma_do: cute.CopyAtom
    do: cute.Tensor
    tma_dot: cute.CopyAtom
    dot: cute.Tensor
    q_codes: cute.Tensor
    k_codes: cute.Tensor
    stats: cute.Tensor
    factors: cute.Tensor
    key_factors: cute.Tensor
    results: cute.Tensor
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


class PairShared(NamedTuple):
    """Shared memory tensors. ``ds_bytes``, ``qt_bytes``, ``kt_bytes``: the same memory as ``ds``, ``qt``, ``kt`` without its swizzle.
    ``ds_sent``: rows of dS on their way to the other CTA."""

    q: cute.Tensor
    qt: cute.Tensor
    k: cute.Tensor
    kt: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    dot: cute.Tensor
    ds: cute.Tensor
    qt_bytes: cute.Pointer
    kt_bytes: cute.Pointer
    ds_bytes: cute.Pointer
    ds_sent: cute.Pointer
    stats: cute.Tensor
    factors: cute.Tensor
    staging: cute.Tensor


class PairBackward:
    """Backward attention of one variant by pairs of CTAs. ``plan`` is given only to show that a wrong one is caught."""

    def __init__(self, spec: BackwardSpec, tuning: BackwardTuning, plan: TmemPlan | None = None):
        self.spec, self.tuning = spec, tuning
        self.plan = pair_plan(spec.head_dim) if plan is None else plan
        self.barriers = PairBarriers(tuning.stages)
        self.atoms = PairAtoms(spec, self.plan)

    arrive_read = staticmethod(arrive_leader)
    """How ``backward_store`` says that a gradient is in registers."""

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, in bytes: what ``shared_memory`` and the barriers take."""
        stages, dim = self.tuning.stages, self.spec.head_dim
        size = -(-(8 * len(self.barriers.arrivals) + 4) // 1024) * 1024
        size += 2 * stages * TILE * dim + 2 * 3 * TILE * dim + TILE * TILE + TILE * ROW_BYTES
        size += 4 * (self.spec.stats * TILE + BLOCKS * BLOCK_FACTORS) * stages
        return size + 2 * staging_floats(self.spec)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        stats: cute.Tensor,
        factors: cute.Tensor,
        key_factors: cute.Tensor,
        results: cute.Tensor,
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
        ctas: Int32,
        stream,
    ):
        """``q, k, v, do``: uint8 codes [tokens, heads, dim]; ``scale``: softmax scale times log2(e); ``ctas``: even. The others:
        :func:`compile_pair`."""
        atoms = self.atoms
        scores, keys, queries = atoms.scores(), atoms.key_gradient(), atoms.query_gradient()
        load = cpasync.CopyBulkTensorTileG2SOp(TWO)
        first = (None, None, None, 0)
        rows, turned = [], []
        for x in (q, k, v, do):
            start = cute.recast_ptr(x.iterator, dtype=F8)
            rows.append(cute.make_tensor(start, cute.select(x.layout, [0, 2, 1])))
            turned.append(cute.make_tensor(start, cute.select(x.layout, [2, 0, 1])))
        cluster = cute.tiled_divide(cute.make_layout(PAIR_SHAPE), (scores.thr_id.shape,)).shape
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        key_layout, query_layout = cute.slice_(atoms.key_layout(), first), cute.slice_(atoms.query_layout(), first)
        turned_query_layout = cute.slice_(atoms.turned_query_layout(), first)
        turned_key_layout = cute.slice_(atoms.turned_key_layout(), first)
        tma_q, gq = make_b(load, rows[0], query_layout, atoms.tile_s, scores, cluster)
        tma_qt, gqt = make_b(load, turned[0], turned_query_layout, atoms.tile_g, keys, cluster)
        tma_k, gk = make_a(load, rows[1], key_layout, atoms.tile_s, scores, cluster)
        tma_kt, gkt = make_b(load, turned[1], turned_key_layout, atoms.tile_q, queries, cluster)
        tma_v, gv = make_a(load, rows[2], key_layout, atoms.tile_s, scores, cluster)
        tma_do, gdo = make_b(load, rows[3], query_layout, atoms.tile_s, scores, cluster)
        tma_dot, gdot = make_b(load, turned[3], turned_query_layout, atoms.tile_g, keys, cluster)
        self.kernel(
            tma_q,
            gq,
            tma_qt,
            gqt,
            tma_k,
            gk,
            tma_kt,
            gkt,
            tma_v,
            gv,
            tma_do,
            gdo,
            tma_dot,
            gdot,
            q,
            k,
            stats,
            factors,
            key_factors,
            results,
            items,
            total,
            *[t.iterator.toint() for t in (dq, dk, dv, dk_scale, dv_scale)],
            Int32(k.shape[1]),
            replicas,
            dq_rows,
            scale,
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], cluster=PAIR_SHAPE, stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        q: cute.Tensor,
        tma_qt: cute.CopyAtom,
        qt: cute.Tensor,
        tma_k: cute.CopyAtom,
        k: cute.Tensor,
        tma_kt: cute.CopyAtom,
        kt: cute.Tensor,
        tma_v: cute.CopyAtom,
        v: cute.Tensor,
        tma_do: cute.CopyAtom,
        do: cute.Tensor,
        tma_dot: cute.CopyAtom,
        dot: cute.Tensor,
        q_codes: cute.Tensor,
        k_codes: cute.Tensor,
        stats: cute.Tensor,
        factors: cute.Tensor,
        key_factors: cute.Tensor,
        results: cute.Tensor,
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
    ):
        operands = (tma_q, q, tma_qt, qt, tma_k, k, tma_kt, kt, tma_v, v, tma_do, do, tma_dot, dot, q_codes, k_codes)
        tables = (stats, factors, key_factors, results, items, total)
        addresses = (dq, dk, dv, dk_scale, dv_scale)
        args = PairArguments(*operands, *tables, *addresses, kv_heads, replicas, dq_rows, scale)
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
            cute.arch.alloc_tmem(self.plan.allocation, tmem_slot, is_two_cta=True)
        cluster_barrier()

        if warp < 8:
            cute.arch.setmaxregister_increase(self.tuning.compute_registers)
            compute_role(self, args, shared, bars, tmem_base(tmem_slot), warp // 4, thread % TILE)
        elif warp < 12:
            cute.arch.setmaxregister_decrease(self.tuning.reduce_registers)
            reduce_role(self, args, shared, bars, tmem_base(tmem_slot), thread - 2 * TILE)
        else:
            cute.arch.setmaxregister_decrease(self.tuning.other_registers)
            if warp == MMA_WARP:
                if cta_rank() == LEADER:
                    mma_role(self, args, shared, bars, tmem_base(tmem_slot))
            elif warp == LOAD_WARP:
                load_role(self, args, shared, bars)
            elif warp == RELAY_WARP:
                relay_role(self, args, bars)
        # neither CTA leaves while the other may write its shared memory, arrive at its barriers or use its tensor memory
        cluster_barrier()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
            cute.arch.dealloc_tmem(tmem_base(tmem_slot), self.plan.allocation, is_two_cta=True)

    def shared_memory(self, storage) -> PairShared:
        """Allocate every tensor of :class:`PairShared`."""
        atoms, stages = self.atoms, self.tuning.stages

        def tiles(layout):
            plain = storage.allocate_tensor(F8, cute.make_layout(cute.cosize(layout.outer)), byte_alignment=1024)
            return cute.make_tensor(cute.recast_ptr(plain.iterator, layout.inner, dtype=F8), layout.outer), plain.iterator

        def floats(count):
            return storage.allocate_tensor(Float32, cute.make_layout(count), byte_alignment=128)

        q, _ = tiles(atoms.query_layout(stages))
        qt, qt_bytes = tiles(atoms.turned_query_layout(stages))
        k, _ = tiles(atoms.key_layout(2))
        kt, kt_bytes = tiles(atoms.turned_key_layout(2))
        v, _ = tiles(atoms.key_layout(2))
        do, _ = tiles(atoms.query_layout(stages))
        dot, _ = tiles(atoms.turned_query_layout(stages))
        ds, ds_bytes = tiles(atoms.ds_layout())
        ds_sent = storage.allocate_tensor(F8, cute.make_layout(TILE * ROW_BYTES), byte_alignment=1024).iterator
        stats, factors = floats(self.spec.stats * TILE * stages), floats(BLOCKS * BLOCK_FACTORS * stages)
        return PairShared(
            q, qt, k, kt, v, do, dot, ds, qt_bytes, kt_bytes, ds_bytes, ds_sent, stats, factors, floats(staging_floats(self.spec) // 2)
        )


def tmem_base(slot):
    """Where tensor memory was allocated. Read where it is needed (see ``cta_rank``)."""
    return cute.arch.retrieve_tmem_ptr(Float32, 16, slot)


@kernel_cache
def compile_pair(arch: str, spec: BackwardSpec, tuning: BackwardTuning) -> Any:
    """Compile one variant. No tensor, no length. Arguments at launch after those of :meth:`PairBackward.__call__`'s operands:

    stats: fp32 ``[tile rows, H, stats * 128]``; factors: fp32 ``[tile rows, H, 16]``, key_factors: fp32 ``[groups, Hkv, 2]``, results: fp32
    ``[B, Hkv, 2]`` (``backward_pair_tables``); items: int32 ``[n, 8]`` of 256 keys, total: int32 ``[1]`` (``backward_items``); dq: fp32 or
    fp16 ``[rows, H, 128 * D]``, zeroed, of ``replicas`` buffers of ``dq_rows`` rows where queries are shared; dk, dv: bf16 or uint8
    ``[T, Hkv, D]``; dk_scale, dv_scale: uint8 ``[groups, Hkv, D / 32]``.
    """
    d, heads, kv_heads, tokens = spec.head_dim, symbol(), symbol(), symbol()
    codes = lambda h: fake("uint8", (symbol(), h, d), align=16)  # noqa: E731
    grad = lambda: fake("uint8" if spec.mxfp8 else "bfloat16", (tokens, kv_heads, d), compact=True)  # noqa: E731
    return build(
        arch,
        PairBackward(spec, tuning),
        codes(heads),
        codes(kv_heads),
        codes(kv_heads),
        codes(heads),
        fake("float32", (symbol(), heads, spec.stats * TILE), compact=True),
        fake("float32", (symbol(), heads, BLOCKS * BLOCK_FACTORS), compact=True),
        *[fake("float32", (symbol(), kv_heads, 2), align=8, compact=True) for _ in range(2)],
        fake("int32", (symbol(), 8), compact=True),
        fake("int32", (1,), align=4),
        fake("float16" if spec.dq_half else "float32", (symbol(), heads, TILE * d), compact=True),
        grad(),
        grad(),
        *[fake("uint8", (symbol(), kv_heads, d // 32), align=1, compact=True) for _ in range(2)],
        Int32(1),
        Int32(1),
        Float32(1.0),
        Int32(2),
    )
