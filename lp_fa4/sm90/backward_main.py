"""The backward's main kernel for Hopper: one persistent CTA an SM, dK, dV and dQ from E4M3 operands.

Warps 0 and 1 copy (``backward_load``), warps 4 to 11 compute (``backward_compute``) and store dK and dV (``backward_store``), warps 12 to
15 make K^T and dQ (``backward_dq``). All hand-over is by mbarriers; the computing warpgroups never wait for each other. Layouts and
workspaces: ``backward_layout``. Formulas: ``backward_compute``.
"""

import itertools
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hop
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm90.backward_compute import FIRST, STEADY, end_last, key_factors, pass_tile, segment_factors, start_last
from lp_fa4.sm90.backward_compute import step as full_step
from lp_fa4.sm90.backward_dq import dq_warps
from lp_fa4.sm90.backward_halves import load_keys, report, score_scale, start_scores, widened
from lp_fa4.sm90.backward_halves import step as half_step
from lp_fa4.sm90.backward_layout import CLEAR, ITEM_FIELDS, KEY_TILE, QUERY_TILE, STAT_FLOATS, TROUBLE, BackwardSpec
from lp_fa4.sm90.backward_load import RECORD_BYTES, Item, copy_warp, key_warp, query_span, segment
from lp_fa4.sm90.backward_ops import advance, arrive, leave_keys, pinned, reciprocal_power, shared_floats
from lp_fa4.sm90.backward_store import add_mean, add_partial, add_suffix, settle_partial, store_bf16, store_mxfp8, store_zeros, take_partial
from lp_fa4.sm90.backward_store_halves import (
    PIECE,
    PIECE_BYTES,
    finite_top,
    note_peaks,
    pair_scales,
    send_staged,
    slots,
    stage_rows,
    store_mxfp8_halves,
    store_pair,
)
from lp_fa4.sm90.wgmma import low_half

REGISTERS, HALF_REGISTERS = (32, 208, 64), (32, 184, 112)
"""Feeding, computing and dQ warpgroups: 32 + 2 * 208 + 64 = 512 = 4 * 128, what the launch brings. The second: of ``halves``."""
THREADS = 512


def stages(spec: BackwardSpec) -> tuple[int, int, int]:
    """Stages of (Q, dO, dO^T, statistics) and of Q^T, and buffers of half a dQ tile."""
    if spec.halves:  # K and V have one stage
        return (3, 2, 4) if spec.dq_half and spec.long else (2, 2, 4)
    return (3, 2, 2) if spec.dq_half and not spec.long else (2, 2, 2)


def staging_bytes(spec: BackwardSpec) -> int:
    """Staging of a computing warp: 16 rows of one MXFP8 gradient with their pads, half a BF16 one, or a quarter (half, where sums are
    ``long``) of one in FP32. BF16 rows that leave by TMA: a gradient, and half of one more."""
    if spec.rows_by_tma:
        return PIECE_BYTES * slots(spec)
    return 2304 * (2 if spec.long and spec.dq_half else 1)


def shared_layouts(spec):
    """Layouts of the code tiles in shared memory: K-major, in the swizzle of their row length."""

    def layout(*shape):
        atom = hop.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, Float8E4M3FN, shape[1])
        atom = warpgroup.make_smem_layout_atom(atom, Float8E4M3FN)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    d, (a_stages, b_stages, _) = spec.head_dim, stages(spec)
    return SimpleNamespace(
        q=layout(QUERY_TILE, d, a_stages),
        qt=layout(d, QUERY_TILE, b_stages),
        dot=layout(d, QUERY_TILE, a_stages),
        k=layout(KEY_TILE, d, spec.key_stages),
        one_k=layout(KEY_TILE, d),
        kt=layout(d, KEY_TILE),
        ds=layout(QUERY_TILE, KEY_TILE, 2),
        rows=staged_rows(8 * slots(spec)) if spec.rows_by_tma else None,
    )


def staged_rows(pieces: int):
    """Layout of pieces of a gradient, 16 keys x 64 columns of BF16, in the staging."""
    atom = warpgroup.make_smem_layout_atom(hop.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, PIECE), BFloat16)
    return cute.tile_to_shape(atom, (16, PIECE, pieces), order=(0, 1, 2))


def operand_places(spec: BackwardSpec) -> dict[str, int]:
    """Where each operand begins behind Q, in units of a descriptor (16 bytes), in the order of ``BackwardMain.storage``."""
    a_stages, b_stages, _ = stages(spec)
    counts = {"q": a_stages, "do": a_stages, "qt": b_stages, "dot": a_stages, "k": spec.key_stages * KEY_TILE // QUERY_TILE, "v": 0}
    begins = itertools.accumulate(counts.values(), initial=0)
    return {name: begin * (spec.tile_bytes // 16) for name, begin in zip(counts, begins, strict=False)}


class BackwardMain:
    """``spec``: compile-time choices. Launch arguments are described in :func:`compile_main`."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        items: cute.Tensor,
        state: cute.Tensor,
        q_tiles: cute.Tensor,
        do_tiles: cute.Tensor,
        stats: cute.Tensor,
        dq: cute.Tensor,
        powers: cute.Tensor | None,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dk_scale: cute.Tensor,
        dv_scale: cute.Tensor,
        scratch: cute.Tensor,
        suffix: cute.Tensor,
        replicas: Int32,
        tile_rows: Int32,
        grid: Int32,
        stream,
    ):
        d = self.spec.head_dim
        kind, major = Float8E4M3FN, OperandMajorMode.K

        def mma(atoms, n, source=warpgroup.OperandSource.SMEM, sums=Float32):
            return hop.make_trivial_tiled_mma(kind, kind, major, major, sums, (atoms, 1, 1), (64, n), source)

        layouts = shared_layouts(self.spec)
        scores, keys = Float32, warpgroup.OperandSource.SMEM
        if const_expr(self.spec.halves):  # sums take half of the registers, K and V what that leaves: shared memory has no time for them
            scores, keys = Float16, warpgroup.OperandSource.RMEM
        mmas = SimpleNamespace(
            s=mma(2, QUERY_TILE, keys, scores),
            g=mma(2, d, warpgroup.OperandSource.RMEM, scores),
            q=mma(1, d if const_expr(self.spec.halves) else d // 2),
        )

        def tma(x):
            pointer = cute.recast_ptr(x.iterator, dtype=kind)
            tensor = cute.make_tensor(pointer, cute.make_layout((x.shape[0], d, x.shape[1]), stride=(x.stride[0], 1, x.stride[1])))
            return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layouts.one_k, (KEY_TILE, d))

        k_atom, k_tensor = tma(k)
        v_atom, v_tensor = tma(v)
        address = lambda x: x.iterator.toint()  # noqa: E731

        def stored(x):  # 16 rows in one copy: half rows are a dimension of their own, for no swizzle is wider
            shape, stride = (x.shape[0], PIECE, d // PIECE, x.shape[1]), (x.stride[0], 1, PIECE, x.stride[1])
            tensor = cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))
            tile = (16, PIECE, d // PIECE)
            return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, staged_rows(d // PIECE), tile)

        by_tma = const_expr(self.spec.rows_by_tma)
        dk_atom, dk_tensor = stored(dk) if by_tma else (k_atom, k_tensor)
        dv_atom, dv_tensor = stored(dv) if by_tma else (k_atom, k_tensor)
        self.kernel(
            mmas.s,
            mmas.g,
            mmas.q,
            k_atom,
            k_tensor,
            v_atom,
            v_tensor,
            dk_atom,
            dk_tensor,
            dv_atom,
            dv_tensor,
            k_scale,
            v_scale,
            items,
            state,
            address(q_tiles),
            address(do_tiles),
            address(stats),
            address(dq),
            powers,
            address(dk),
            address(dv),
            address(dk_scale),
            address(dv_scale),
            address(scratch),
            address(suffix),
            Int32(k.shape[1]),
            replicas,
            tile_rows,
        ).launch(
            grid=[grid, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[2, 1, 1] if const_expr(self.spec.cluster) else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def storage(self, layouts):
        """Shared memory of a CTA."""
        spec = self.spec
        a_stages, b_stages, buffers = stages(spec)
        codes = lambda layout: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(layout)], 1024]  # noqa: E731

        @cute.struct
        class Storage:
            bars: cute.struct.MemRange[Int64, 2 * a_stages + 2 * b_stages + 13]
            records: cute.struct.Align[cute.struct.MemRange[Int32, RECORD_BYTES // 2], 128]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, 64], 256]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, 16], 64]
            peak: cute.struct.Align[cute.struct.MemRange[Float32, (24 if spec.follows else 8) * a_stages], 64]
            block_peaks: cute.struct.Align[cute.struct.MemRange[Float32, 64], 128]
            stat: cute.struct.Align[cute.struct.MemRange[Float32, spec.stat_span[1] * a_stages], 1024]
            q: codes(layouts.q)
            do: codes(layouts.q)
            qt: codes(layouts.qt)
            dot: codes(layouts.dot)
            k: codes(layouts.k)
            v: codes(layouts.k)
            kt: codes(layouts.kt)
            ds: codes(layouts.ds)
            dq: cute.struct.Align[cute.struct.MemRange[Float32, buffers * spec.dq_tile_bytes // 8], 1024]
            staging: cute.struct.Align[cute.struct.MemRange[Float32, 2 * staging_bytes(spec)], 1024]
            mean: cute.struct.Align[cute.struct.MemRange[Float32, 2 * spec.head_dim if spec.mean_row else 4], 128]

        return Storage

    @cute.kernel
    def kernel(
        self,
        mma_s: cute.TiledMma,
        mma_g: cute.TiledMma,
        mma_q: cute.TiledMma,
        k_atom: cute.CopyAtom,
        k_tensor: cute.Tensor,
        v_atom: cute.CopyAtom,
        v_tensor: cute.Tensor,
        dk_atom: cute.CopyAtom,
        dk_tensor: cute.Tensor,
        dv_atom: cute.CopyAtom,
        dv_tensor: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        items: cute.Tensor,
        state: cute.Tensor,
        q_tiles: Int64,
        do_tiles: Int64,
        stats: Int64,
        dq: Int64,
        powers: cute.Tensor | None,
        dk: Int64,
        dv: Int64,
        dk_scale: Int64,
        dv_scale: Int64,
        scratch: Int64,
        suffix: Int64,
        kv_heads: Int32,
        replicas: Int32,
        tile_rows: Int32,
    ):
        spec, layouts = self.spec, shared_layouts(self.spec)
        a_stages, b_stages, buffers = stages(spec)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tid, _, _ = cute.arch.thread_idx()
        store = cutlass.utils.SmemAllocator().allocate(self.storage(layouts))
        base = store.bars.data_ptr()
        both = 2 if const_expr(spec.cluster) else 1
        rings = (  # name, stages, arrivals a phase at "full" and at "empty": 8 computing warps, 4 of dQ
            ("a", a_stages, 1, 8 * both),  # Q, dO, dO^T and statistics
            ("t", b_stages, 1, 8 * both),  # Q^T
            ("ds", 2, 8, 4),
            ("k", 2, 1, 13),
            ("kv", 1, 1, 12),  # K and V themselves, where they have one stage
        )
        names = [
            *(f"{ring[0]}_{end}" for ring in rings for end in ("full", "empty")),
            "item_full",
            "near_end",
        ]  # records without keys; for drawing
        sizes = [*(ring[1] for ring in rings for _ in range(2)), 2, 1]
        counts = [*(ring[2 + end] for ring in rings for end in range(2)), 1, 1]
        places = [sum(sizes[:i]) for i in range(len(sizes))]
        bars = SimpleNamespace(**{name: base + place for name, place in zip(names, places, strict=True)})
        if warp == 0:
            with cute.arch.elect_one():
                for place, size, count in zip(places, sizes, counts, strict=True):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(base + place + i, count)
            cute.arch.mbarrier_init_fence()
        address = lambda x: Int32(x.data_ptr().toint())  # noqa: E731
        swizzled = lambda x, layout: x.get_tensor(layout.outer, swizzle=layout.inner)  # noqa: E731
        smem = SimpleNamespace(
            k=swizzled(store.k, layouts.k),
            v=swizzled(store.v, layouts.k),
            q_address=address(store.q),
            do_address=address(store.do),
            qt_address=address(store.qt),
            dot_address=address(store.dot),
            stat_address=address(store.stat),
            record=address(store.records),
            mean=address(store.mean),
        )
        if const_expr(spec.cluster):  # no arrival before the other CTA's barriers exist
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        total = Int32(state[0]) * kv_heads
        registers = HALF_REGISTERS if const_expr(spec.halves) else REGISTERS
        if const_expr(spec.instead):  # nothing is left, as a rule
            total = total if state[TROUBLE] != 0 else Int32(0)
        elif const_expr(spec.halves):
            total = total if state[CLEAR] != 0 else Int32(0)
        if warp < 4:
            cute.arch.setmaxregister_decrease(registers[0])
            glob = SimpleNamespace(q=q_tiles, do=do_tiles, stats=stats, state=state, sums=suffix)
            if warp == 0:
                copy_warp(spec, a_stages, b_stages, kv_heads, bars, smem, glob)
            elif warp == 1:
                tma = SimpleNamespace(k=k_atom, k_tensor=k_tensor, v=v_atom, v_tensor=v_tensor)
                key_warp(spec, items, total, k_scale, v_scale, kv_heads, bars, tma, smem, glob)
        elif warp >= 12:
            cute.arch.setmaxregister_decrease(registers[2])
            slice_q, own = mma_q.get_slice(0), cute.arch.make_warp_uniform(warp - 12)
            kt = swizzled(store.kt, layouts.kt)
            parts = 1 if const_expr(spec.halves) else 2  # of dQ
            halves = [cute.local_tile(kt, (spec.head_dim // parts, KEY_TILE), (part, 0)) for part in range(parts)]
            w = SimpleNamespace(
                bars=bars,
                lane=tid % 32,
                warp=own,
                thread=tid % 128,
                mma_q=mma_q,
                ds=slice_q.make_fragment_A(slice_q.partition_A(swizzled(store.ds, layouts.ds))),
                kt=[slice_q.make_fragment_B(slice_q.partition_B(half)) for half in halves],
                scales=address(store.scales),
                record=smem.record,
                k_address=address(store.k),
                kt_address=address(store.kt),
                ds_address=address(store.ds),
                staging=address(store.dq) + own * (spec.dq_tile_bytes // 8),
                buffers=buffers,
            )
            known = powers.iterator.toint() if const_expr(spec.dq_grouped) else None
            dq_warps(spec, w, dq, stats, known, kv_heads, replicas, tile_rows)
        else:
            cute.arch.setmaxregister_increase(registers[1])
            thread = tid - 128
            own = cute.arch.make_warp_uniform(thread // 32)
            group = own // 4
            lane = pinned(tid % 32)  # else it is read again and again, 160 clocks a time
            slice_s, slice_g = mma_s.get_slice(group * 128), mma_g.get_slice(group * 128)
            tensor = lambda x, layout: swizzled(x, layout)  # noqa: E731
            operand_shape = mma_g.partition_shape_A((KEY_TILE, QUERY_TILE))
            P, dS = mma_g.make_fragment_A(operand_shape), mma_g.make_fragment_A(operand_shape)
            turned = lambda x, layout: slice_g.make_fragment_B(slice_g.partition_B(tensor(x, layout)))  # noqa: E731
            one = lambda x: x[None, None, None, 0]  # noqa: E731
            key_shape = mma_s.partition_shape_A((KEY_TILE, spec.head_dim))
            key_operand = lambda x: (  # noqa: E731
                mma_s.make_fragment_A(key_shape) if const_expr(spec.halves) else one(slice_s.make_fragment_A(slice_s.partition_A(x)))
            )
            w = SimpleNamespace(
                low=pinned(low_half(address(store.q))),
                places=operand_places(spec),
                tile=spec.tile_bytes // 16,
                bars=bars,
                lane=lane,
                warp=own,
                group=group,
                thread=thread,
                mma_s=mma_s,
                mma_g=mma_g,
                k=key_operand(smem.k),
                v=key_operand(smem.v),
                kv_address=address(store.k),
                q=one(slice_s.make_fragment_B(slice_s.partition_B(tensor(store.q, layouts.q)))),
                do=one(slice_s.make_fragment_B(slice_s.partition_B(tensor(store.do, layouts.q)))),
                qt=one(turned(store.qt, layouts.qt)),
                dot=one(turned(store.dot, layouts.dot)),
                score_shape=mma_s.partition_shape_C((KEY_TILE, QUERY_TILE)),
                gradient_shape=mma_g.partition_shape_C((KEY_TILE, spec.head_dim)),
                P_operand=P,
                dS_operand=dS,
                P=cute.recast_tensor(P, Int32),
                dS=cute.recast_tensor(dS, Int32),
                stat=smem.stat_address - 4 * spec.stat_span[0],
                scales=address(store.scales),
                peak=address(store.peak),
                history=address(store.peak) + 32 * a_stages,
                a_stages=a_stages,
                block_peaks=address(store.block_peaks),
                staging=address(store.staging) + own * staging_bytes(spec),
                record=smem.record,
                mean=smem.mean,
                factors=address(store.factors) + 32 * own,
                peer=cute.arch.block_idx()[0] % 2 ^ 1,
                ds_address=address(store.ds),
                ds_line=None,
                column=None,
                zero=None,
                scale_line=None,
                staged_line=None,
            )
            if const_expr(spec.halves):  # registers hold what depends on the lane, and 0 is no constant (``wgmma.described``)
                w.ds_line = pinned(w.ds_address + lane * KEY_TILE + ((own ^ (lane & 7)) << 4))
                w.column = pinned(16 * (lane & 3))
                w.zero = tile_rows >> 31
                w.scale_line = pinned(w.scales + 4 * own)
            rows = None
            if const_expr(spec.rows_by_tma):
                w.staged_line = pinned(w.staging + (lane & 15) * (2 * PIECE) + (((lane >> 4) ^ (lane & 7)) << 4))
                pointer = cute.recast_ptr(store.staging.data_ptr(), layouts.rows.inner, dtype=BFloat16)
                rows = SimpleNamespace(
                    staged=cute.make_tensor(pointer, layouts.rows.outer), atoms=(dv_atom, dk_atom), there=(dv_tensor, dk_tensor)
                )
            grads = SimpleNamespace(
                rows=rows, suffix=suffix, dk=dk, dv=dv, dk_scale=dk_scale, dv_scale=dv_scale, scratch=scratch, state=state.iterator.toint()
            )
            self.consume(w, grads, kv_heads)
        if const_expr(spec.cluster):  # the other CTA may still arrive here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def consume(self, w, grads, kv_heads):
        """Walk the items: segments of at most 32 query tiles each, then the results of the key tile."""
        spec, bars = self.spec, w.bars
        d = spec.head_dim
        bid, _, _ = cute.arch.block_idx()
        scratch = grads.scratch + Int64(bid) * (2 * KEY_TILE * d * 4)
        stage, phase, out, out_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        items, more = Int32(0), Int32(1)
        while more > 0:
            kv = items & 1
            cute.arch.mbarrier_wait(bars.k_full + kv, (items >> 1) & 1)
            item = Item(w.record + RECORD_BYTES * kv)
            more = Int32(item.b >= 0)
            if more > 0:
                more = Int32(1)  # known here: not held through the item
                first, chunk, chunks = query_span(spec, item)
                segments = chunks * spec.group
                if segments == 0:
                    store_zeros(spec, w, item, kv_heads, grads)
                    cute.arch.sync_warp()  # all lanes have read the record
                    leave_keys(spec, bars)
                    arrive(bars.k_empty + kv)
                elif item.klen <= item.n * KEY_TILE + KEY_TILE // 2 * w.group:
                    # none of this warpgroup's keys exists: the last tile of every other sequence
                    for s in cutlass.range(segments, unroll=1):
                        count = segment(spec, item, first, chunk, chunks, s)[2]
                        for _ in cutlass.range(count, unroll=1):
                            pass_tile(spec, w, (stage, phase, out, out_phase))
                            stage, phase, out, out_phase = self.next_tile(stage, phase, out, out_phase)
                    cute.arch.sync_warp()  # all lanes have read the record
                    leave_keys(spec, bars)
                    arrive(bars.k_empty + kv)
                else:
                    fk = fv = Float32(1.0)
                    if const_expr(spec.one_segment):
                        load_keys(spec, w)
                    else:
                        fk, fv = key_factors(spec, w, item)
                    k = w.low + w.places["k"] + pinned(w.warp) // 4 * w.tile + kv * (KEY_TILE // QUERY_TILE * w.tile)
                    keys = (fk, fv, k, k + (w.places["v"] - w.places["k"]), item.klen - item.n * KEY_TILE - 16 * w.warp)
                    if const_expr(spec.halves and not spec.one_segment):
                        load_keys(spec, w)
                        cute.arch.sync_warp()
                        leave_keys(spec, bars)
                    for s in cutlass.range(segments, unroll=1):
                        here = Item(pinned(w.record + RECORD_BYTES * kv)) if const_expr(spec.long) else item  # registers are short
                        _, low, count, turn = segment(spec, here, *query_span(spec, here), s)
                        if const_expr(spec.one_segment):
                            low, count, turn = Int32(0), item.tiles, Int32(0)
                        # ptxas cannot see it, and would keep the descriptors of every product in ordinary registers
                        out, out_phase = cute.arch.make_warp_uniform(out), cute.arch.make_warp_uniform(out_phase)
                        if const_expr(stages(spec)[0] == 2):
                            stage, phase = out, out_phase
                        dV = cute.make_rmem_tensor(w.gradient_shape, Float16 if const_expr(spec.halves) else Float32)
                        dK = cute.make_rmem_tensor(w.gradient_shape, Float16 if const_expr(spec.halves) else Float32)
                        if const_expr(not spec.one_segment):  # there its first product starts it
                            dK.fill(0.0)
                        scores = None
                        if const_expr(spec.one_segment):  # what the products do not need is read while they run
                            scores = [cute.make_rmem_tensor(w.score_shape, Float16) for _ in range(2)]
                            start_scores(spec, w, *scores, stage, phase)
                            cute.arch.sync_warp()
                            leave_keys(spec, bars)
                            fk, fv = key_factors(spec, w, here)
                            keys = (fk, fv, *keys[2:])
                        else:
                            cute.arch.mbarrier_wait(bars.a_full + stage, phase)
                        segment_factors(spec, w, stage)
                        diagonal = here.n * KEY_TILE + 16 * w.warp - here.klen + here.qlen - QUERY_TILE * low
                        now = (stage, phase, out, out_phase)
                        own, factors = keys, (Int32(0), Int32(0))
                        if const_expr(spec.halves):
                            stat = w.stat + stage * (4 * spec.stat_span[1])
                            own = (*keys, None if const_expr(spec.recoded) else score_scale(stat, fk))
                        ahead, there = None, None
                        if const_expr(spec.one_segment):
                            ahead = self.next_tile(*now)
                        made = self.step(
                            FIRST, w, dV, dK, Float32(1.0), factors, own, diagonal - QUERY_TILE * turn, now, now, scores, None, ahead
                        )
                        x, factors = made[0], made[1]
                        if const_expr(spec.one_segment):
                            there = made[2]
                            for i in cutlass.range(count - 1, unroll=1):
                                last = (stage, phase, out, out_phase)
                                stage, phase, out, out_phase = ahead
                                now = ahead
                                ahead = self.next_tile(*now)
                                x, factors, there = self.step(
                                    STEADY, w, dV, dK, x, factors, own, diagonal, now, last, None, i > 0, ahead, there
                                )
                        else:
                            for _ in cutlass.range(count - 1, unroll=1):
                                last, turn = (stage, phase, out, out_phase), self.next_turn(turn, count)
                                stage, phase, out, out_phase = self.next_tile(stage, phase, out, out_phase)
                                now = (stage, phase, out, out_phase)
                                at = diagonal - QUERY_TILE * turn
                                x, factors = self.step(STEADY, w, dV, dK, x, factors, own, at, now, last)
                        again = Item(pinned(w.record + RECORD_BYTES * kv))  # not held through the loop: registers are short
                        left = again.klen - (again.n * KEY_TILE + 16 * w.warp)
                        again.mean = w.mean + kv * (4 * spec.head_dim)
                        if const_expr(not spec.mean_row):  # noqa: SIM102 - known to the compiler, the other is not
                            if s == segments - 1:
                                cute.arch.sync_warp()  # all lanes have read the record
                                arrive(bars.k_empty + kv)
                        start_last(spec, w, dK, (stage, phase, out, out_phase), count > 1 if const_expr(spec.one_segment) else None)
                        if const_expr(spec.group > 1):  # registers are short
                            end_last(spec, w, out)
                        if const_expr(spec.rows_by_tma):
                            self.leave_rows(w, dV, dK, x, out, again, left, grads, kv_heads, kv)
                        elif const_expr(spec.packed_store(0)):  # both are like that
                            self.leave_both(w, dV, dK, x, out, again, left, grads, kv_heads)
                        else:
                            # elsewhere dV leaves under the last product
                            self.leave(
                                w,
                                0,
                                dV,
                                shared_floats(w.factors, 1, 4)[0],
                                s,
                                segments,
                                again,
                                left,
                                grads,
                                kv_heads,
                                scratch,
                            )
                            if const_expr(spec.mean_row):  # one segment
                                cute.arch.sync_warp()  # all lanes have read the record and the sums
                                arrive(bars.k_empty + kv)
                            if const_expr(spec.group == 1):
                                end_last(spec, w, out)
                            factor = shared_floats(w.factors + 4, 1, 4)[0] * reciprocal_power(x)
                            self.leave(w, 1, dK, factor, s, segments, again, left, grads, kv_heads, scratch)
                        stage, phase, out, out_phase = (
                            ahead if const_expr(spec.one_segment) else self.next_tile(stage, phase, out, out_phase)
                        )
                if const_expr(spec.one_segment):
                    more = pinned(Int32(1))  # LLVM finds the number that it came from, and holds that
            items = items + 1
        cute.arch.cp_async_bulk_wait_group(0)

    def step(self, kind, w, dV, dK, x, factors, keys, diagonal, now, last, scores=None, summed=None, following=None, there=None):
        """One query tile; ``factors``, ``scores`` and ``summed`` are of ``halves`` alone."""
        if self.spec.halves:
            return half_step(self.spec, kind, w, dV, dK, x, factors, keys, diagonal, now, last, scores, summed, following, there)
        return full_step(self.spec, kind, w, dV, dK, x, keys, diagonal, now, last), factors

    @cute.jit
    def next_turn(self, turn, count):
        """Query tile after ``turn`` in a segment that starts in the middle."""
        turn = turn + 1
        if turn == count:
            turn = Int32(0)
        return turn

    @cute.jit
    def next_tile(self, stage, phase, out, out_phase):
        """Ring positions of the next query tile: of Q, dO and dO^T, and of Q^T and dS, both in rings of two. One and the same where all
        rings have two stages. From ``pinned`` places come addresses by one instruction each; LLVM knows better, and makes those of a turn
        from those of the turn before by three."""
        a_stages, b_stages, _ = stages(self.spec)
        out, out_phase = advance(out, out_phase, b_stages)
        if const_expr(self.spec.one_segment):  # registers are short elsewhere
            out = pinned(out)
        stage, phase = advance(stage, phase, a_stages) if const_expr(a_stages != b_stages) else (out, out_phase)
        return stage, phase, out, out_phase

    @cute.jit
    def leave_both(self, w, dV, dK, x, out, item, left, grads, kv_heads):
        """dV and dK leave as MXFP8 right from their FP16 sums; what can be known of dV is, under the last product of dK."""
        spec = self.spec
        d, blocks = spec.head_dim, spec.head_dim // 32
        factors = [shared_floats(w.factors, 1, 4)[0], Float32(0.0)]
        words = [cute.recast_tensor(dV, Int32), cute.recast_tensor(dK, Int32)]
        tops = note_peaks(w, 0, words[0], factors[0], blocks, left)
        end_last(spec, w, out)
        factors[1] = shared_floats(w.factors + 4, 1, 4)[0] * reciprocal_power(x)
        tops = tops + note_peaks(w, 1, words[1], factors[1], blocks, left)
        row = (Int64(item.k0 + item.n * KEY_TILE + 16 * w.warp) * kv_heads + item.hk) * d
        scale = (Int64((item.k0 >> 5) + item.b + 4 * item.n + (w.warp >> 1)) * kv_heads + item.hk) * blocks
        rows, scales = (grads.dv + row, grads.dk + row), (grads.dv_scale + scale, grads.dk_scale + scale)
        inverse = pair_scales(spec, w, words, factors, tops, scales, left, grads, item.tag)
        store_pair(spec, w, words, inverse, rows, kv_heads * d, left)

    @cute.jit
    def leave_rows(self, w, dV, dK, x, out, item, left, grads, kv_heads, kv):
        """dV and dK leave as BF16 rows right from their FP16 sums: dV under the last product of dK."""
        spec, words = self.spec, [cute.recast_tensor(dV, Int32), cute.recast_tensor(dK, Int32)]
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # those of the item before
        cute.arch.sync_warp()
        tops = [finite_top(w, words[0], left)]
        stage_rows(spec, w, 0, words[0], shared_floats(w.factors, 1, 4)[0], item.mean if const_expr(spec.mean_row) else None)
        send_staged(spec, w, 0, item, left, grads, kv_heads)
        if const_expr(spec.mean_row):  # the warp has met since its lanes read the record and the mean
            arrive(w.bars.k_empty + kv)
        end_last(spec, w, out)
        tops.append(finite_top(w, words[1], left))
        stage_rows(spec, w, 1, words[1], shared_floats(w.factors + 4, 1, 4)[0] * reciprocal_power(x), None)
        send_staged(spec, w, 1, item, left, grads, kv_heads)
        report(grads, item.tag, tops)

    @cute.jit
    def leave(self, w, which: cutlass.Constexpr, sums, factor, s, segments, item, left, grads, kv_heads, scratch):
        """A segment's sums leave: dV (``which`` 0) or dK (1), to the CTA's partial sums or, after the last segment, as the gradient."""
        spec = self.spec
        if const_expr(spec.long):
            own = scratch + which * (KEY_TILE * spec.head_dim * 4)
            if const_expr(which == 0):
                settle_partial(w)
            if s < segments - 1:
                add_partial(spec, w, widened(spec, w, sums, grads, item.tag), factor, own, s == 0)
            else:
                self.finish(w, which, sums, factor, segments, item, left, grads, kv_heads, own)
        else:
            self.finish(w, which, sums, factor, segments, item, left, grads, kv_heads, scratch)

    @cute.jit
    def finish(self, w, which: cutlass.Constexpr, sums, factor, segments, item, left, grads, kv_heads, scratch):
        """Store a key tile's dV or dK, with the partial sums of earlier segments."""
        spec = self.spec
        d = spec.head_dim
        target, scales = (grads.dk, grads.dk_scale) if which else (grads.dv, grads.dv_scale)
        row = Int64(item.k0 + item.n * KEY_TILE + 16 * w.warp) * kv_heads + item.hk
        scale = scales + (Int64(item.k0 // 32 + item.b + 4 * item.n + w.warp // 2) * kv_heads + item.hk) * (d // 32)
        if const_expr(spec.packed_store(which)):
            words = cute.recast_tensor(sums, Int32)
            store_mxfp8_halves(spec, w, which, words, factor, target + row * d, scale, kv_heads * d, left, grads, item.tag)
        else:
            acc = widened(spec, w, sums, grads, item.tag)
            if const_expr(spec.long):
                self.add_earlier(w, acc, factor, segments, scratch)
                factor = Float32(1.0)
            if const_expr((spec.suffix or spec.whole) and not which):
                if const_expr(not spec.long):
                    for i in cutlass.range_constexpr(d // 2):
                        acc[i] = acc[i] * factor
                    factor = Float32(1.0)
                if const_expr(spec.suffix):
                    add_suffix(spec, w, acc, item, kv_heads, grads.suffix)
                else:
                    add_mean(spec, w, acc, item, kv_heads, grads.suffix)
            if const_expr(spec.mxfp8):
                store_mxfp8(spec, w, which, acc, factor, target + row * d, scale, kv_heads * d, left)
            else:
                store_bf16(spec, w, acc, factor, target + row * (2 * d), kv_heads * (2 * d), left)

    @cute.jit
    def add_earlier(self, w, acc, factor, segments, scratch):
        """Scale one result and add the partial sums of its earlier segments."""
        for i in cutlass.range_constexpr(self.spec.head_dim // 2):
            acc[i] = acc[i] * factor
        if segments > 1:
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.sync_warp()
            take_partial(self.spec, w, acc, scratch)


@kernel_cache
def compile_main(arch: str, spec: BackwardSpec):
    """Compile for ``arch``. Arguments at launch, in order (all row-major and compact unless said otherwise; H = Hkv * group):

    k, v: uint8 ``[T, Hkv, D]`` (strides multiples of 16); k_scale, v_scale: uint8 ``[rows, Hkv]``; items: int32 ``[n, 8]``; state: int32,
    items in use and a counter that is 0 (``backward_items``); q_tiles, do_tiles: uint8 ``[tile rows, H, 2 * 64 * D]``, plain and turned;
    stats: fp32 ``[tile rows, H, 256]``; dq: fp32 or fp16 ``[tile rows, H, 64 * D]`` in accumulator order, zeroed; powers: fp32
    ``[groups * tiles, H, 64]``, of ``backward_items`` (None unless ``dq_grouped``); dk, dv: bf16 or uint8
    ``[T, Hkv, D]``; dk_scale, dv_scale: uint8 ``[groups, Hkv, D / 32]`` (unused with BF16); scratch: fp32 ``[grid, 2, 128 * D]`` (unused
    unless ``long``); suffix: fp32 ``[tile rows, H, D]``, or those of dO over the keys, ``[chunk rows, H, D]`` (unused unless ``suffix`` or
    ``whole``); ints: dQ buffers (``dq_grouped``: sequences a buffer), tile rows of a buffer, CTAs.
    """
    heads, kv_heads, d = symbol(), symbol(), spec.head_dim
    rows = symbol()
    grad = fake("uint8" if spec.mxfp8 else "bfloat16", (rows, kv_heads, d), compact=True)
    grad_scale = fake("uint8", (symbol(), kv_heads, d // 32), align=1, compact=True)
    codes = lambda: fake("uint8", (rows, kv_heads, d))  # noqa: E731
    scale = lambda: fake("uint8", (symbol(), kv_heads), align=1, compact=True)  # noqa: E731
    images = lambda kind, n: fake(kind, (symbol(), heads, n), compact=True)  # noqa: E731
    return build(
        arch,
        BackwardMain(spec),
        codes(),
        codes(),
        scale(),
        scale(),
        fake("int32", (symbol(), ITEM_FIELDS), compact=True),
        fake("int32", (symbol(),), align=4, compact=True),
        images("uint8", 2 * spec.tile_bytes),
        images("uint8", 2 * spec.tile_bytes),
        images("float32", STAT_FLOATS),
        images("float16" if spec.dq_half else "float32", spec.dq_tile),
        fake("float32", (symbol(), heads, QUERY_TILE), align=4, compact=True) if spec.dq_grouped else None,
        grad,
        grad,
        grad_scale,
        grad_scale,
        fake("float32", (symbol(), 2, KEY_TILE * d), compact=True),
        images("float32", d),
        *[Int32(1)] * 3,
    )
