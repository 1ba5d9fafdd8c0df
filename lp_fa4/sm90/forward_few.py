"""FP8 attention for few queries on Hopper: one CTA per 256 keys of a sequence and key/value head, one warpgroup, no loop.

The products are turned round: keys are the MMA's 64 rows and (query, head of the group) pairs its columns, so that a few
queries do not pay for 64 rows of one, and the query heads that share a key/value head share its loads:
``S^T = K Q^T``, then ``O^T = V^T P^T`` with P^T through shared memory. V without a copy that has tokens innermost is turned where it
lies in shared memory. All loads of a CTA start at once; what a CTA waits for, its two neighbours on the multiprocessor hide. Each CTA
leaves its part, ``forward_merge`` adds the parts: O's columns in the order in which threads hold them, FP16 and times 2^-10
(``FEW_PARTS``), and for each query a record of row sum, reference, maximum and centre.

The slot of a CTA follows the tile rule (256 tokens), so there is no work list. With centred P every CTA of a sequence needs
the same centre: it takes the mean score of the sequence's first 32 keys, which it loads before its own (from L2).
Shared memory is kept under 75 KB, so that three CTAs share a multiprocessor.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float8E4M3FN as E4M3
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from lp_fa4.common.matrices import load_matrices
from lp_fa4.common.numbers import e4m3x4, effect, exp2, exponent_of_byte, f16x2, scale_of_byte
from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol
from lp_fa4.sm90.forward_config import FEW_KEYS as KEYS
from lp_fa4.sm90.forward_config import FewSpec
from lp_fa4.sm90.forward_consumer import visible_factor
from lp_fa4.sm90.forward_kernel import codes_of, first_stage, shared_layout
from lp_fa4.sm90.forward_turn import loaded_from, selector_of, store_block, stored_to
from lp_fa4.sm90.transpose import load16
from lp_fa4.sm90.wgmma import low_half, product

THREADS = 128
READ_ONCE = 0x12F0000000000000
"""The copies' cache policy, L2 evict_first: no other CTA reads a CTA's keys and values, and what the merge reads should stay in L2."""
HEAD_KEYS = 32
"""First keys of the sequence whose mean score is the centre, and keys of one load."""


@cute.jit
def column_max(x: Float32) -> Float32:
    """Maximum over the eight lanes that hold the same columns."""
    for i in cutlass.range_constexpr(3):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=4 << i))
    return x


@cute.jit
def column_sum(x: Float32) -> Float32:
    """Sum over the eight lanes that hold the same columns."""
    for i in cutlass.range_constexpr(3):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=4 << i)
    return x


@cute.jit
def store_byte(address: Int32, value: Int32):
    """One byte to shared memory."""
    target = cute.make_tensor(cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=1), cute.make_layout(1))
    target[0] = Uint8(value & 255)


def place_of(target, index) -> Int64:
    """Address of an element in device memory."""
    return Int64((target.iterator + cute.crd2idx(index, target.layout)).toint())


@cute.jit
def store_run(place: Int64, values: cute.Tensor):
    """Registers to device memory, in one store."""
    size = cute.size(values)
    target = cute.make_ptr(values.element_type, place, cute.AddressSpace.gmem, assumed_align=4 * size)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(size)))


@cute.jit
def key_scale_byte(scales: cute.Tensor, block: cutlass.Constexpr, kv_head: Int32, row: Int32, group: Int32, last: Int32) -> Int32:
    """Scale byte of 32-token ``group`` of the sequence whose groups start at ``row``; groups past its last repeat that one."""
    at = Int32(0)
    if const_expr(block > 0):
        at = row + cutlass.min(group, last)
    return Int32(scales[at, kv_head])


class FewQueries:
    """The kernel for one :class:`FewSpec`."""

    def __init__(self, spec: FewSpec):
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
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        scale_log2: Float32,
        stream,
    ):
        spec = self.spec
        d, n = spec.head_dim, spec.columns

        l_q = shared_layout(E4M3, (n, d, 1), d)
        l_k = shared_layout(E4M3, (HEAD_KEYS, d, KEYS // HEAD_KEYS + int(spec.centred)), d)
        l_a = shared_layout(E4M3, (64, d, KEYS // 64), d)
        l_v = shared_layout(E4M3, (d, 128, 2), 128)
        l_p = shared_layout(E4M3, (n, 128, 2), 128)
        load = cpasync.CopyBulkTensorTileG2SOp()
        l_whole = shared_layout(E4M3, (KEYS, d, 1), d)  # K of a CTA that has all of its keys: one load instead of eight
        whole_atom, t_whole = cpasync.make_tiled_tma_atom(load, codes_of(k, [0, 2, 1]), first_stage(l_whole), (KEYS, d))
        k_atom, t_k = cpasync.make_tiled_tma_atom(load, codes_of(k, [0, 2, 1]), first_stage(l_k), (HEAD_KEYS, d))
        l_w = shared_layout(E4M3, (128, d, 2), d) if spec.turns else l_v  # as V arrives
        if const_expr(spec.turns):
            v_atom, t_v = cpasync.make_tiled_tma_atom(load, codes_of(v, [0, 2, 1]), first_stage(l_w), (128, d))
        else:
            v_atom, t_v = cpasync.make_tiled_tma_atom(load, codes_of(v, [1, 2, 0]), first_stage(l_v), (d, 128))
        slots, kv_heads = Int32(parts.shape[0]), Int32(k.shape[1])
        mma = hopper_mma(n)
        self.kernel(
            mma,
            k_atom,
            t_k,
            whole_atom,
            t_whole,
            v_atom,
            t_v,
            q,
            q_scale,
            k_scale,
            v_scale,
            offsets,
            parts,
            stats,
            scale_log2,
            kv_heads,
            l_q,
            l_k,
            l_whole,
            l_a,
            l_v,
            l_w,
            l_p,
        ).launch(grid=[slots * kv_heads, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        k_atom: cute.CopyAtom,
        t_k: cute.Tensor,
        whole_atom: cute.CopyAtom,
        t_whole: cute.Tensor,
        v_atom: cute.CopyAtom,
        t_v: cute.Tensor,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor,
        v_scale: cute.Tensor,
        offsets: cute.Tensor,
        parts: cute.Tensor,
        stats: cute.Tensor,
        scale_log2: Float32,
        kv_heads: Int32,
        l_q: cute.ComposedLayout,
        l_k: cute.ComposedLayout,
        l_whole: cute.ComposedLayout,
        l_a: cute.ComposedLayout,
        l_v: cute.ComposedLayout,
        l_w: cute.ComposedLayout,
        l_p: cute.ComposedLayout,
    ):
        spec = self.spec
        n = spec.columns
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        slot, kv_head = bid // kv_heads, bid % kv_heads
        batch = Int32(offsets.shape[0]) - 1
        queries = Int32(parts.shape[2])

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, n], 16]
            reduced: cute.struct.Align[cute.struct.MemRange[Float32, 4 * 4 * n], 16]
            kept: cute.struct.Align[cute.struct.MemRange[Float32, 4 * n], 16]
            q: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_k)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[E4M3, cute.cosize(l_v)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        bars = storage.barriers.data_ptr()
        s_q = storage.q.get_tensor(l_q.outer, swizzle=l_q.inner)
        s_k = storage.k.get_tensor(l_k.outer, swizzle=l_k.inner)
        s_v = storage.v.get_tensor(l_v.outer, swizzle=l_v.inner)
        s_w = storage.v.get_tensor(l_w.outer, swizzle=l_w.inner)
        # the MMA takes 64 keys: the sequence's first 32 with the first 32 of this CTA behind them, then this CTA's by 64
        head = storage.k.data_ptr()
        own = head + (HEAD_KEYS * spec.head_dim if const_expr(spec.centred) else 0)
        s_head = cute.make_tensor(cute.recast_ptr(head, l_a.inner, dtype=E4M3), l_a.outer)
        s_own = cute.make_tensor(cute.recast_ptr(own, l_a.inner, dtype=E4M3), l_a.outer)
        s_whole = cute.make_tensor(cute.recast_ptr(own, l_whole.inner, dtype=E4M3), l_whole.outer)
        s_p = cute.make_tensor(cute.recast_ptr(own, l_p.inner, dtype=E4M3), l_p.outer)  # over K, which is read by then
        factors = storage.factors.get_tensor(cute.make_layout(n))
        reduced = storage.reduced.get_tensor(cute.make_layout((n, 4, 4)))
        kept = storage.kept.get_tensor(cute.make_layout((4, n)))
        places = tuple(Int32(x.toint()) for x in (storage.q.data_ptr(), head, own, storage.v.data_ptr()))
        if tid == 0:
            for atom in (k_atom, whole_atom, v_atom):
                cpasync.prefetch_descriptor(atom)
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init(bars + 1, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # what came before on the stream is over from here on
        cute.arch.griddepcontrol_launch_dependents()  # behind it: the merge reads what earlier launches left before it waits
        b = find_sequence(offsets, batch, slot, KEYS)
        first_key = Int32(offsets[b])
        keys = Int32(offsets[b + 1]) - first_key
        start = KEYS * (slot - (first_key // KEYS + b))
        if (start == 0) | (start < keys):
            if tid < 32:
                self.load((k_atom, t_k, s_k), (whole_atom, t_whole, s_whole), (v_atom, t_v, s_w), bars, kv_head, first_key, keys, start, b)
            self.load_queries(q, q_scale, k_scale, places[0], factors, b, kv_head, queries, scale_log2)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            self.compute(
                mma,
                s_q,
                s_head,
                s_own,
                s_v,
                s_p,
                bars,
                factors,
                reduced,
                kept,
                places,
                kv_heads >> 31,
                k_scale,
                v_scale,
                parts,
                stats,
                slot,
                kv_head,
                b,
                first_key,
                keys,
                start,
            )

    @cute.jit
    def load(self, k_operand, whole_operand, v_operand, bars, kv_head: Int32, first_key: Int32, keys: Int32, start: Int32, b: Int32):
        """All loads of a CTA, by one warp; tiles that hold no key of the sequence are left out. ``..._operand``: (atom, tensor, stages)."""
        spec = self.spec
        (k_atom, t_k, s_k), (whole_atom, t_whole, s_whole), (v_atom, t_v, s_v) = k_operand, whole_operand, v_operand
        once = Int64(READ_ONCE)
        d = spec.head_dim
        one = cute.make_layout(1)
        left = keys - start
        k_tiles = cutlass.max(cutlass.min(cute.ceil_div(left, HEAD_KEYS), KEYS // HEAD_KEYS), 0)
        v_tiles = cutlass.max(cutlass.min(cute.ceil_div(left, 128), KEYS // 128), 0)
        k = cute.domain_offset((first_key, 0), t_k[None, None, kv_head])
        head = cute.local_tile(k, (HEAD_KEYS, d), (None, 0))
        own = cute.local_tile(cute.domain_offset((start, 0), k), (HEAD_KEYS, d), (None, 0))
        if const_expr(spec.turns):
            v = cute.domain_offset((first_key + start, 0), t_v[None, None, kv_head])
            v = cute.local_tile(v, (128, d), (None, 0))
        else:
            v = cute.domain_offset((0, 32 * (first_key // 32 + b) + start), t_v[None, None, kv_head])
            v = cute.local_tile(v, (d, 128), (0, None))
        k_smem, k_gmem = cpasync.tma_partition(k_atom, 0, one, cute.group_modes(s_k, 0, 2), cute.group_modes(own, 0, 2))
        _, h_gmem = cpasync.tma_partition(k_atom, 0, one, cute.group_modes(s_k, 0, 2), cute.group_modes(head, 0, 2))
        v_smem, v_gmem = cpasync.tma_partition(v_atom, 0, one, cute.group_modes(s_v, 0, 2), cute.group_modes(v, 0, 2))
        extra = 1 if const_expr(spec.centred) else 0
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars, (k_tiles + extra) * (HEAD_KEYS * d))
            cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, v_tiles * (128 * d))
        if const_expr(spec.centred):
            cute.copy(k_atom, h_gmem[None, 0], k_smem[None, 0], tma_bar_ptr=bars)
        if left >= KEYS:
            whole = cute.domain_offset((first_key + start, 0), t_whole[None, None, kv_head])
            whole = cute.group_modes(cute.local_tile(whole, (KEYS, d), (None, 0)), 0, 2)
            w_smem, w_gmem = cpasync.tma_partition(whole_atom, 0, one, cute.group_modes(s_whole, 0, 2), whole)
            cute.copy(whole_atom, w_gmem[None, 0], w_smem[None, 0], tma_bar_ptr=bars, cache_policy=once)
            k_tiles = Int32(0)
        for i in cutlass.range(k_tiles, unroll=1):
            cute.copy(k_atom, k_gmem[None, i], k_smem[None, i + extra], tma_bar_ptr=bars, cache_policy=once)
        for i in cutlass.range(v_tiles, unroll=1):
            cute.copy(v_atom, v_gmem[None, i], v_smem[None, i], tma_bar_ptr=bars + 1, cache_policy=once)

    @cute.jit
    def load_queries(
        self, q, q_scale, k_scale, base: Int32, factors: cute.Tensor, b: Int32, kv_head: Int32, queries: Int32, scale_log2: Float32
    ):
        """Column ``i`` is query ``i // group`` of head ``kv_head * group + i % group``; columns past the last are zero."""
        spec = self.spec
        d, n = spec.head_dim, spec.columns
        tid, _, _ = cute.arch.thread_idx()
        first_row = Int32(0) if const_expr(spec.shared) else b * queries
        chunks = d // 16
        for piece in cutlass.range(tid, n * chunks, THREADS, unroll=1):
            column, chunk = piece // chunks, piece % chunks
            words = cute.make_rmem_tensor(4, Uint32)
            words.fill(0)
            if column < queries * spec.group:
                load16(q, (first_row + column // spec.group, kv_head * spec.group + column % spec.group, 16 * chunk), words)
            at = column * d + 16 * chunk
            at = at ^ (((at >> 7) & (chunks - 1)) << 4)
            pointer = cute.make_ptr(Uint32, base + at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(4)))
        if tid < n:
            query, head = cutlass.min(tid // spec.group, queries - 1), kv_head * spec.group + tid % spec.group
            row = Int32(0)
            if const_expr(not spec.query_static):
                row = (Int32(0) if const_expr(spec.shared) else first_row // 32 + b) + query // 32
            factor = scale_log2 * scale_of_byte(Int32(q_scale[row, head]))
            if const_expr(spec.key_scale == 0):
                factor = visible_factor(factor * scale_of_byte(Int32(k_scale[0, kv_head])))
            factors[tid] = factor

    @cute.jit
    def compute(
        self, mma, s_q, s_head, s_own, s_v, s_p, bars, factors, reduced, kept, places, zero: Int32, k_scale, v_scale, parts, stats,
        slot: Int32, kv_head: Int32, b: Int32, first_key: Int32, keys: Int32, start: Int32,
    ):  # fmt: skip
        """Scores, softmax over this CTA's keys, P V; results to ``parts`` and ``stats``.

        ``places``: addresses of Q, of the first keys, of this CTA's keys (and P), of V. ``zero``: as in ``wgmma.described``.
        """
        spec = self.spec
        d, n = spec.head_dim, spec.columns
        q_place, head_place, k_place, v_place = places
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        queries = Int32(parts.shape[2])
        part = mma.get_slice(0)
        a_k, a_head = part.make_fragment_A(part.partition_A(s_own)), part.make_fragment_A(part.partition_A(s_head))
        b_q = part.make_fragment_B(part.partition_B(s_q))
        a_v, b_p = part.make_fragment_A(part.partition_A(s_v)), part.make_fragment_B(part.partition_B(s_p))
        shape = mma.partition_shape_C((64, n))
        blocks = KEYS // 64
        scores = [cute.make_rmem_tensor(shape, Float32) for _ in range(blocks + int(spec.centred))]
        # what the softmax needs of the scales is loaded while K arrives
        row, last = first_key // 32 + b, cutlass.max(cute.ceil_div(keys, 32) - 1, 0)
        scales, exponents, undo = [], [], []
        top = Float32(0.0)
        for m in cutlass.range_constexpr(len(scores)):
            group = start // 32 + 2 * m + warp // 2 if const_expr(m < blocks) else warp // 2
            if const_expr(spec.key_scale > 0):
                scales.append(scale_of_byte(key_scale_byte(k_scale, spec.key_scale, kv_head, row, group, last)))
            if const_expr(spec.value_scale > 0 and m < blocks):
                e = exponent_of_byte(key_scale_byte(v_scale, spec.value_scale, kv_head, row, group, last))
                exponents.append(Float32(-100.0) if e < -100.0 else e)
                undo.append(exp2(-exponents[m]))
                top = exponents[0] if const_expr(m == 0) else cute.arch.fmax(top, exponents[m])
        cute.arch.mbarrier_wait(bars, 0)
        for m in cutlass.range_constexpr(len(scores)):
            keys_m = a_k[None, None, None, m] if const_expr(m < blocks) else a_head[None, None, None, 0]
            place = k_place + m * (64 * d) if const_expr(m < blocks) else head_place
            product(mma, scores[m], keys_m, b_q[None, None, None, 0], True, low_half(q_place), d, low_half(place), d, zero)
        warpgroup.wait_group(0)
        for m in cutlass.range_constexpr(len(scores)):
            for j in cutlass.range_constexpr(n // 8):
                for c in cutlass.range_constexpr(2):
                    factor = factors[8 * j + 2 * (lane % 4) + c]
                    if const_expr(spec.key_scale > 0):
                        factor = visible_factor(factor * scales[m])
                    for r in cutlass.range_constexpr(2):
                        i = c + 2 * r + 4 * j
                        key = 16 * warp + lane // 4 + 8 * r
                        limit = keys - start - 64 * m if const_expr(m < blocks) else cutlass.min(keys, HEAD_KEYS)
                        scores[m][i] = scores[m][i] * factor if key < limit else -Float32.inf
        # over the warp, then over the four warps: largest score, largest with V's exponent, sum of the first keys' scores
        for j in cutlass.range_constexpr(n // 8):
            for c in cutlass.range_constexpr(2):
                value, high, total = -Float32.inf, -Float32.inf, Float32(0.0)
                for r in cutlass.range_constexpr(2):
                    i = c + 2 * r + 4 * j
                    for m in cutlass.range_constexpr(blocks):
                        value = cute.arch.fmax(value, scores[m][i])
                        if const_expr(spec.value_scale > 0):
                            high = cute.arch.fmax(high, scores[m][i] + exponents[m])
                    if const_expr(spec.centred):
                        first = scores[blocks][i]
                        total = total + (Float32(0.0) if first == -Float32.inf else first)
                value = column_max(value)
                if const_expr(spec.value_scale > 0):
                    high = column_max(high)
                if const_expr(spec.centred):
                    total = column_sum(total)
                if lane < 4:
                    column = 8 * j + 2 * lane + c
                    reduced[column, warp, 0] = value
                    if const_expr(spec.value_scale > 0):
                        reduced[column, warp, 1] = high
                    if const_expr(spec.centred):
                        reduced[column, warp, 2] = total
        if const_expr(spec.centred and spec.value_scale > 0):  # noqa: SIM102 (the outer one is resolved at compile time)
            if lane == 0:
                reduced[warp, 0, 3] = top
        cute.arch.sync_threads()
        if const_expr(spec.centred and spec.value_scale > 0):
            top = cute.arch.fmax(cute.arch.fmax(reduced[0, 0, 3], reduced[1, 0, 3]), cute.arch.fmax(reduced[2, 0, 3], reduced[3, 0, 3]))
            cute.arch.sync_threads()  # that corner takes sums below
        count = Float32(cutlass.max(cutlass.min(keys, HEAD_KEYS), 1))
        totals = []
        for j in cutlass.range_constexpr(n // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * j + 2 * (lane % 4) + c
                which = 1 if const_expr(spec.value_scale > 0) else 0
                value, high, mean = -Float32.inf, -Float32.inf, Float32(0.0)
                for w in cutlass.range_constexpr(4):
                    value = cute.arch.fmax(value, reduced[column, w, 0])
                    high = cute.arch.fmax(high, reduced[column, w, which])
                    if const_expr(spec.centred):
                        mean = mean + reduced[column, w, 2]
                if const_expr(spec.centred):
                    mean = mean * cute.arch.rcp_approx(count)
                    high = cute.arch.fmax(high, mean + top)
                reference = Float32(0.0) if high == -Float32.inf else high
                total = Float32(0.0)
                for m in cutlass.range_constexpr(blocks):
                    offset = spec.p_scale_log2 - reference
                    if const_expr(spec.value_scale > 0):
                        offset = offset + exponents[m]
                    center = exp2(mean + offset) if const_expr(spec.centred) else Float32(0.0)
                    p = [exp2(scores[m][c + 2 * r + 4 * j] + offset) for r in range(2)]
                    sum_ = p[0] + p[1]
                    total = total + (sum_ * undo[m] if const_expr(spec.value_scale > 0) else sum_)
                    word = e4m3x4(p[0] - center, p[1] - center, Float32(0.0), Float32(0.0))
                    for r in cutlass.range_constexpr(2):
                        key = 64 * m + 16 * warp + lane // 4 + 8 * r
                        code = (word >> (8 * r)) & 255
                        if start + key >= keys:  # p is 0 there, p minus the centre is not
                            code = Int32(0)
                        # "accumulator" order of V^T: token t of a run of 16 lies at 4 (t % 8 / 2) + t % 2 + 2 (t / 8)
                        position = (64 * m + 16 * warp) % 128 + 4 * (lane // 8) + (lane // 4) % 2 + 2 * r
                        at = (m // 2) * (128 * n) + column * 128 + (((position >> 4) ^ (column & 7)) << 4) + (position & 15)
                        store_byte(k_place + at, code)
                totals.append(total)
                if tid < 4:
                    kept[1, column], kept[2, column], kept[3, column] = reference, value, mean
        for offset in (4, 8, 16):  # all columns' sums at once: one by one their latencies would add up
            totals = [total + cute.arch.shuffle_sync_bfly(total, offset=offset) for total in totals]
        if lane < 4:
            for i in cutlass.range_constexpr(n // 4):
                reduced[8 * (i // 2) + 2 * lane + i % 2, warp, 3] = totals[i]
        # P's fence and barrier stand here, not behind the wait for V, which most CTAs reach before V does
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(bars + 1, 0)
        if const_expr(spec.turns):
            self.turn(v_place, keys - start)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        elif keys - start <= KEYS - 32:
            for h in cutlass.range_constexpr(2):
                if keys - start - 128 * h <= 96:
                    self.clear(v_place + h * (128 * d), keys - start - 128 * h)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
        halves = [cute.make_rmem_tensor(mma.partition_shape_C((d, n)), Float32) for _ in range(2)]
        for h in cutlass.range_constexpr(2):
            values, p = low_half(v_place + h * (128 * d)), low_half(k_place + h * (128 * n))
            product(mma, halves[h], a_v[None, None, None, h], b_p[None, None, None, h], True, p, 128, values, 128, zero)
        if tid < n:
            query, head = tid // spec.group, kv_head * spec.group + tid % spec.group
            if query < queries:
                total = (reduced[tid, 0, 3] + reduced[tid, 1, 3]) + (reduced[tid, 2, 3] + reduced[tid, 3, 3])
                record = cute.make_rmem_tensor(4, Float32)
                record[0] = total * 2.0**-spec.p_scale_log2
                for i in cutlass.range_constexpr(1, 4):
                    record[i] = kept[i, tid]
                store_run(place_of(stats, (slot, head, query, 0)), record)
        # a thread's columns of a query side by side, in the order that ``forward_merge.column_of`` undoes
        width, targets = d // 32, []
        for i in cutlass.range_constexpr(n // 4):
            column = 8 * (i // 2) + 2 * (lane % 4) + i % 2
            query, head = column // spec.group, kv_head * spec.group + column % spec.group
            targets.append((query, place_of(parts, (slot, head, query, width * (8 * warp + lane // 4)))))
        warpgroup.wait_group(0)
        for j in cutlass.range_constexpr(n // 8):
            for c in cutlass.range_constexpr(2):
                query, place = targets[2 * j + c]
                if query < queries:
                    sums = cute.make_rmem_tensor(width, Float32)
                    for m in cutlass.range_constexpr(d // 64):
                        for r in cutlass.range_constexpr(2):
                            i = c + 2 * r + 4 * j + (n // 2) * m
                            sums[2 * m + r] = halves[0][i] + halves[1][i]
                    if const_expr(spec.parts == "float16"):
                        words = cute.make_rmem_tensor(width // 2, Int32)
                        for m in cutlass.range_constexpr(width // 2):
                            words[m] = f16x2(sums[2 * m] * 2.0**-10, sums[2 * m + 1] * 2.0**-10)
                        store_run(place, words)
                    else:
                        store_run(place, sums)

    @cute.jit
    def turn(self, base: Int32, valid: Int32):
        """V's two tiles to V^T in their place; keys from ``valid`` on are other sequences', or what no load wrote, and become 0."""
        d = self.spec.head_dim
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        if valid < KEYS:
            zero, chunks = Uint32(0), d // 16
            for i in cutlass.range(cutlass.max(valid, 0) * chunks + tid, KEYS * chunks, THREADS, unroll=1):
                effect([base + 16 * i, zero, zero, zero, zero], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
            cute.arch.sync_threads()
        wide = d // 32  # columns of blocks; a warp has one of them in both tiles, or in one where there are but two
        column, tile = warp % wide, base + warp // wide * (128 * d)
        source, target = tile + loaded_from(column, d), tile + stored_to(column)
        at = [(h * (128 * d), run) for h in range(d // 64) for run in range(8)]
        words = [load_matrices(source + far + run * (16 * d), transposed=True) for far, run in at]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(len(at)):
            far, run = at[i]
            store_block(words[i], (target ^ (run << 4)) + far, selector_of())

    @cute.jit
    def clear(self, tile: Int32, valid: Int32):
        """Zero a V^T tile's keys from the group after ``valid`` on: other sequences' codes, or what no load wrote."""
        d = self.spec.head_dim
        tid, _, _ = cute.arch.thread_idx()
        zeros = cute.make_rmem_tensor(4, Uint32)
        zeros.fill(0)
        first = cutlass.max(cute.ceil_div(valid, 32), 0) * 2
        for chunk in cutlass.range(first, 8, unroll=1):
            if tid < d:
                address = tile + tid * 128 + ((chunk ^ (tid % 8)) << 4)
                pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=16)
                cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(4)))


def hopper_mma(columns: int):
    """E4M3 x E4M3 -> FP32, 64 rows by ``columns``, both operands in shared memory."""
    k = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(E4M3, E4M3, k, k, Float32, (1, 1, 1), (64, columns), warpgroup.OperandSource.SMEM)


@kernel_cache
def _compile_few(arch: str, offsets_dtype: str, spec: FewSpec):
    d = spec.head_dim
    heads, kv_heads, slots, queries = (symbol() for _ in range(4))
    return build(
        arch,
        FewQueries(spec),
        fake("uint8", (symbol(), heads, d)),
        fake("uint8", (symbol(), kv_heads, d)),
        fake("uint8", (symbol(), kv_heads, d)) if spec.turns else fake("uint8", (kv_heads, d, symbol(32)), compact=True),
        fake("uint8", (symbol(), heads), align=1),
        *[fake("uint8", (symbol(), kv_heads), align=1) for _ in range(2)],
        fake_offsets(offsets_dtype),
        fake(spec.parts, (slots, heads, queries, d), compact=True),
        fake("float32", (slots, heads, queries, 4), compact=True),
        Float32(1.0),
    )
