"""FP8 attention forward on Hopper: layouts, barriers and shared memory; the roles live in ``forward_producer`` and
``forward_consumer``.

Q and K are E4M3 rows ``[tokens, heads, D]``; so is V, or else V^T is the copy of ``transpose`` in "accumulator" order. A persistent CTA
draws work items (``worklist``); one warp loads by TMA, others turn a plain V (``forward_turn``), two warpgroups compute. What lies beyond
a sequence's end in a K tile is masked, in a tile of V zeroed, in a Q tile not stored.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass import Float8E4M3FN as E4M3
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import LayoutEnum

from lp_fa4.common.bundle import Bundle
from lp_fa4.sm90.forward_config import KEY_TILE, PLAIN_TILES, QUERY_TILE, ForwardSpec
from lp_fa4.sm90.forward_consumer import consume
from lp_fa4.sm90.forward_producer import ITEM, produce
from lp_fa4.sm90.forward_turn import turn_values

THREADS = 384
"""Without a warpgroup that turns V."""


def shared_layout(dtype, shape, inner: int):
    """Row-major, swizzled for TMA and wgmma; ``inner`` elements are contiguous."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, inner)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=(0, 1, 2))


def codes_of(x, modes):
    """An operand's bytes as E4M3, its modes in the order of ``modes``."""
    codes = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=E4M3), x.layout)
    return cute.make_tensor(codes.iterator, cute.select(codes.layout, mode=modes))


def first_stage(layout):
    """Layout of one stage."""
    return cute.select(layout, mode=[0, 1])


def tiled_mma(columns: int, groups: int, register_a: bool, result=Float32):
    """E4M3 x E4M3 -> FP32, 64 rows a warpgroup, both operands contiguous along the contraction."""
    source = warpgroup.OperandSource.RMEM if register_a else warpgroup.OperandSource.SMEM
    k = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(E4M3, E4M3, k, k, result, (groups, 1, 1), (64, columns), source)


class Forward:
    """The kernel for one :class:`ForwardSpec`."""

    def __init__(self, spec: ForwardSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        out: cute.Tensor,
        centred: cute.Tensor,
        lse: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        parts: cute.Tensor,
        part_stats: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        again: cute.Tensor,
        flags: cute.Tensor,
        scale_log2: Float32,
        stretch: Float32,
        ctas: Int32,
        zero: Int32,
        wide: Int32,
        stream,
    ):
        spec = self.spec
        d = spec.head_dim

        g_q, g_k = codes_of(q, [0, 2, 1]), codes_of(k, [0, 2, 1])
        g_v = codes_of(v, [0, 2, 1] if spec.turns else [1, 2, 0])
        l_q = shared_layout(E4M3, (QUERY_TILE, d, 2), d)
        l_k = shared_layout(E4M3, (KEY_TILE, d, spec.stages), d)
        l_v = shared_layout(E4M3, (d, KEY_TILE, spec.stages), KEY_TILE)
        l_p = shared_layout(E4M3, (KEY_TILE, d, PLAIN_TILES), d)
        l_o = shared_layout(BFloat16, (64, d, 2 * spec.outputs), d)
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_atom, t_q = cpasync.make_tiled_tma_atom(load, g_q, first_stage(l_q), (QUERY_TILE, d))
        k_atom, t_k = cpasync.make_tiled_tma_atom(load, g_k, first_stage(l_k), (KEY_TILE, d))
        if const_expr(spec.turns):
            v_atom, t_v = cpasync.make_tiled_tma_atom(load, g_v, first_stage(l_p), (KEY_TILE, d))
        else:
            v_atom, t_v = cpasync.make_tiled_tma_atom(load, g_v, first_stage(l_v), (d, KEY_TILE))
        store = cpasync.CopyBulkTensorTileS2GOp()

        def result(x):
            rows = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))
            return cpasync.make_tiled_tma_atom(store, rows, first_stage(l_o), (64, d))

        whole = const_expr(spec.split_keys == 0)
        o_atom, t_o = result(out) if whole else (q_atom, t_q)
        c_atom, t_c = result(centred) if const_expr(whole and spec.outputs == 2) else (o_atom, t_o)
        mma_qk, mma_pv = tiled_mma(KEY_TILE, 2, False), tiled_mma(d, 2, True)
        mma_out = tiled_mma(d, 1, True)
        mma_halves, mma_half_sums = tiled_mma(KEY_TILE, 2, False, Float16), tiled_mma(d, 2, True, Float16)
        self.kernel(
            mma_qk, mma_halves, mma_half_sums, mma_pv, mma_out, q_atom, t_q, k_atom, t_k, v_atom, t_v, o_atom, t_o, c_atom, t_c,
            q_scale, k_scale, v_scale, v_sum, v_mean,
            out, centred, lse, maximum, total, parts, part_stats,
            records, state, again, flags, scale_log2, stretch, zero, wide, l_q, l_k, l_v, l_p, l_o,
        ).launch(grid=[ctas, 1, 1], block=[spec.threads, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=spec.waits)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma_qk: cute.TiledMma,
        mma_halves: cute.TiledMma,
        mma_half_sums: cute.TiledMma,
        mma_pv: cute.TiledMma,
        mma_out: cute.TiledMma,
        q_atom: cute.CopyAtom,
        t_q: cute.Tensor,
        k_atom: cute.CopyAtom,
        t_k: cute.Tensor,
        v_atom: cute.CopyAtom,
        t_v: cute.Tensor,
        o_atom: cute.CopyAtom,
        t_o: cute.Tensor,
        c_atom: cute.CopyAtom,
        t_c: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        v_sum: cute.Tensor,
        v_mean: cute.Tensor,
        out: cute.Tensor,
        centred: cute.Tensor,
        lse: cute.Tensor,
        maximum: cute.Tensor,
        total: cute.Tensor,
        parts: cute.Tensor,
        part_stats: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        again: cute.Tensor,
        flags: cute.Tensor,
        scale_log2: Float32,
        stretch: Float32,
        zero: Int32,
        wide: Int32,
        l_q: cute.ComposedLayout,
        l_k: cute.ComposedLayout,
        l_v: cute.ComposedLayout,
        l_p: cute.ComposedLayout,
        l_o: cute.ComposedLayout,
    ):
        spec = self.spec
        stages, d, whole = spec.stages, spec.head_dim, const_expr(spec.split_keys == 0)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 4 + 4 * stages + PLAIN_TILES]
            valid: cute.struct.Align[cute.struct.MemRange[Int32, PLAIN_TILES], 8]
            item: cute.struct.Align[cute.struct.MemRange[Int32, ITEM * 2], 16]
            exponents: cute.struct.Align[cute.struct.MemRange[Float32, 8 * stages], 16]
            vectors: cute.struct.Align[cute.struct.MemRange[Float32, 2 * max(spec.vectors, 1) * d], 16]
            q: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_v)], 1024]
            plain: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_p) if spec.turns else 0], 1024]
            o: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(l_o)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        base = storage.barriers.data_ptr()
        bars = Bundle(  # the consumers count on the order from ``k_full`` to ``v_empty``
            q_full=base,
            q_empty=base + 2,
            k_full=base + 4,
            k_empty=base + 4 + stages,
            v_full=base + 4 + 2 * stages,
            v_empty=base + 4 + 3 * stages,
            tail=base + 4 + 4 * stages,  # of the copied V's last tile
            plain_full=base + 4 + 4 * stages,
        )
        if warp == 0:
            for atom in (q_atom, k_atom, v_atom, o_atom, c_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # Of a stage that also holds what lanes stored: the arrival that announces the copies, and one behind the stores.
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(bars.q_full + i, 2)
                    cute.arch.mbarrier_init(bars.q_empty + i, 8)
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(bars.k_full + i, 2 if spec.scaled else 1)
                    cute.arch.mbarrier_init(bars.v_full + i, spec.turning_warps if spec.turns else 1)
                    for empty in (bars.k_empty, bars.v_empty):
                        cute.arch.mbarrier_init(empty + i, 8)
                for i in cutlass.range_constexpr(PLAIN_TILES):
                    cute.arch.mbarrier_init(bars.plain_full + i, 1)
            cute.arch.mbarrier_init_fence()
        s = Bundle(
            q=storage.q.get_tensor(l_q.outer, swizzle=l_q.inner),
            k=storage.k.get_tensor(l_k.outer, swizzle=l_k.inner),
            v=storage.v.get_tensor(l_v.outer, swizzle=l_v.inner),
            plain=storage.plain.get_tensor(l_p.outer, swizzle=l_p.inner) if spec.turns else None,
            valid=storage.valid.get_tensor(cute.make_layout(PLAIN_TILES)),
            o=storage.o.get_tensor(l_o.outer, swizzle=l_o.inner),
            item=storage.item.get_tensor(cute.make_layout((ITEM, 2))),
            q_at=storage.q.data_ptr(),
            k_at=storage.k.data_ptr(),
            k_bytes=cute.cosize(l_k),
            exponents=storage.exponents.get_tensor(cute.make_layout((8, stages))),
            vectors=storage.vectors.get_tensor(cute.make_layout((d, max(spec.vectors, 1), 2))),
        )
        cute.arch.sync_threads()
        t = Bundle(
            q_atom=q_atom, q=t_q, k_atom=k_atom, k=t_k, v_atom=v_atom, v=t_v,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            vectors=[x for x in (v_sum, v_mean) if x is not None],
            out=(o_atom, t_o, out), centred=(c_atom, t_c, centred), lse=lse, maximum=maximum, sum=total,
            parts=parts, part_stats=part_stats, records=records, state=state, again=again,
            flags=flags, heads=Int32(lse.shape[0]) if whole else None,
            scale_log2=scale_log2, stretch=stretch, zero=zero, wide=wide,
        )  # fmt: skip
        if warp < 4:
            cute.arch.setmaxregister_decrease(spec.registers[1])
            if warp == 0:
                produce(spec, t, s, bars)
            elif const_expr(spec.turns and spec.threads == THREADS):
                turn_values(spec, s, bars, warp - 1)
        elif warp >= THREADS // 32:
            cute.arch.setmaxregister_decrease(spec.registers[1])
            if const_expr(spec.threads > THREADS):
                turn_values(spec, s, bars, warp - THREADS // 32)
        else:
            cute.arch.setmaxregister_increase(spec.registers[0])
            store = cute.make_tiled_copy_C(cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), BFloat16), mma_out)
            mma = Bundle(qk=mma_qk, halves=mma_halves, half_sums=mma_half_sums, pv=mma_pv, out=mma_out, store=store)
            consume(spec, t, s, bars, mma)
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0)
