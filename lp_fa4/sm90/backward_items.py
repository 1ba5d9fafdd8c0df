"""Work items of the backward's main kernel, made on the device: no value is read by the host. What that kernel leaves unwritten, and must
be zero, is zeroed by the same launches.

An item is one key tile of one sequence (or, ``serial``, all key tiles of a sequence); the kernel takes each once per key/value head: all
key tiles of a sequence's first head, then of its second (field 1 says where the sequence begins), so that the heads at work at one time
are few and their dQ and query operands stay in L2. Where sequences differ in the work of an item they are sorted, longest first (a counting
sort with bins a sixteenth apart); elsewhere they stay in memory order.

Two launches: one CTA gives each sequence its place, then a warp a sequence writes its items. The second also finds the power of two that
a row has in common in a group of sequences (``join``): it stands between the pre-pass, which knows each one's, and the main kernel.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr
from torch import Tensor

from lp_fa4.common.numbers import bits_of, effect, float_of
from lp_fa4.compile import build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.sm90.backward_layout import (
    CHUNK,
    CLEAR,
    COUNTER,
    COUNTER_INSTEAD,
    ITEM_FIELDS,
    KEY_TILE,
    NEED_QUERIES,
    QUERY_TILE,
    REDO,
    TROUBLE,
)

THREADS = 256
BINS = 1024
ZEROING = 128
"""CTAs of the second launch at least, for what it zeroes."""


def item_capacity(tokens: int, batch: int, serial: bool, keys: int = KEY_TILE) -> int:
    """Upper bound of the number of items of ``keys`` keys, from shapes alone."""
    return batch if serial else tokens // keys + batch


class WorkItems:
    """``jagged``: queries come from offsets; ``serial``, ``keys``: of an item; ``scaled``: the gradients have scale bytes; ``shared``: all
    sequences have the same queries; ``grouped``: some have one power of two of FP16 dQ."""

    def __init__(self, jagged: bool, serial: bool, keys: int, scaled: bool, shared: bool, grouped: bool):
        self.jagged, self.serial, self.keys, self.scaled, self.shared, self.grouped = jagged, serial, keys, scaled, shared, grouped

    @cute.jit
    def __call__(
        self,
        offsets_k: cute.Tensor,
        offsets_q: cute.Tensor,
        items: cute.Tensor,
        state: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dk_scale: cute.Tensor | None,
        dv_scale: cute.Tensor | None,
        need: cute.Tensor | None,
        dq_scale: cute.Tensor | None,
        common: cute.Tensor | None,
        slots: Int32,
        queries: Int32,
        dq_group: Int32,
        stream,
    ):
        batch = Int32(offsets_k.shape[0]) - 1
        self.place(offsets_k, offsets_q, state, slots, queries).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
        grid = cutlass.max((batch + (THREADS // 32 - 1)) // (THREADS // 32), Int32(ZEROING))
        if const_expr(self.grouped):  # a thread a row and column of what they have in common
            grid = cutlass.max(grid, Int32(cute.size(common) + (THREADS - 1)) // THREADS)
        self.write(offsets_k, offsets_q, items, state, dk, dv, dk_scale, dv_scale, need, dq_scale, common, slots, queries, dq_group).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.jit
    def sizes(self, offsets_k: cute.Tensor, offsets_q: cute.Tensor, queries: Int32, b: Int32):
        """(key tiles, queries) of sequence ``b``."""
        tiles = (Int32(offsets_k[b + 1]) - Int32(offsets_k[b]) + (self.keys - 1)) // self.keys
        rows = queries
        if const_expr(self.jagged):
            rows = Int32(offsets_q[b + 1]) - Int32(offsets_q[b])
        return tiles, rows

    def count(self, tiles):
        """Items of a sequence."""
        return Int32(1) if self.serial else tiles

    def bin(self, tiles, rows):
        """Bin of a sequence by the work of one of its items, the most in the first: four bits of mantissa."""
        work = Float32((rows + (QUERY_TILE - 1)) // QUERY_TILE) * (Float32(tiles) if self.serial else Float32(1.0))
        above = (bits_of(work) >> 19) - ((127 << 4) - 1)  # 0 for no work
        return BINS - 1 - cutlass.max(cutlass.min(above, BINS - 1), Int32(0))

    @cute.kernel
    def place(self, offsets_k: cute.Tensor, offsets_q: cute.Tensor, state: cute.Tensor, slots: Int32, queries: Int32):
        """``state``: see :func:`work_items`."""
        tid, _, _ = cute.arch.thread_idx()
        batch = Int32(offsets_k.shape[0]) - 1
        smem = cutlass.utils.SmemAllocator()
        totals = smem.allocate_tensor(Int32, cute.make_layout(THREADS // 32), byte_alignment=16)
        if const_expr(self.jagged or self.serial):
            each = BINS // THREADS
            bins = smem.allocate_tensor(Int32, cute.make_layout(BINS), byte_alignment=16)
            for i in cutlass.range_constexpr(each):
                bins[each * tid + i] = Int32(0)
            cute.arch.sync_threads()
            for b in cutlass.range(tid, batch, THREADS, unroll=1):
                tiles, rows = self.sizes(offsets_k, offsets_q, queries, b)
                cute.arch.atomic_add(bins.iterator + self.bin(tiles, rows), self.count(tiles), sem="relaxed", scope="cta")
            cute.arch.sync_threads()
            mine = Int32(0)
            for i in cutlass.range_constexpr(each):
                mine = mine + bins[each * tid + i]
            before = self.scan(mine, totals, state, batch)
            for i in cutlass.range_constexpr(each):
                here = bins[each * tid + i]
                bins[each * tid + i] = before
                before = before + here
            cute.arch.sync_threads()
            for b in cutlass.range(tid, batch, THREADS, unroll=1):
                tiles, rows = self.sizes(offsets_k, offsets_q, queries, b)
                state[REDO + slots + b] = cute.arch.atomic_add(
                    bins.iterator + self.bin(tiles, rows), self.count(tiles), sem="relaxed", scope="cta"
                )
        else:
            each = (batch + (THREADS - 1)) // THREADS
            first, end = each * tid, cutlass.min(each * tid + each, batch)
            mine = Int32(0)
            for b in cutlass.range(first, end, unroll=4):
                mine = mine + self.sizes(offsets_k, offsets_q, queries, b)[0]
            before = self.scan(mine, totals, state, batch)
            for b in cutlass.range(first, end, unroll=4):
                state[REDO + slots + b] = before
                before = before + self.sizes(offsets_k, offsets_q, queries, b)[0]

    @cute.jit
    def scan(self, mine: Int32, totals: cute.Tensor, state: cute.Tensor, batch: Int32):
        """Sum of ``mine`` over the threads before this one; the sum over all goes to ``state``."""
        tid, _, _ = cute.arch.thread_idx()
        lane, running = tid % 32, mine
        for i in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(running, offset=1 << i, mask_and_clamp=0)
            running = running + (left if lane >= (1 << i) else 0)
        if lane == 31:
            totals[tid // 32] = running
        cute.arch.sync_threads()
        before, all_ = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(THREADS // 32):
            before = before + (totals[i] if i < tid // 32 else 0)
            all_ = all_ + totals[i]
        if tid == 0:
            state[0] = all_
            for word in (COUNTER, TROUBLE, COUNTER_INSTEAD):
                state[word] = Int32(0)
            state[CLEAR] = batch
        return before + running - mine

    @cute.kernel
    def write(
        self,
        offsets_k: cute.Tensor,
        offsets_q: cute.Tensor,
        items: cute.Tensor,
        state: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dk_scale: cute.Tensor | None,
        dv_scale: cute.Tensor | None,
        need: cute.Tensor | None,
        dq_scale: cute.Tensor | None,
        common: cute.Tensor | None,
        slots: Int32,
        queries: Int32,
        dq_group: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        batch = Int32(offsets_k.shape[0]) - 1
        b = bid * (THREADS // 32) + tid // 32
        if b < batch:
            tiles, rows = self.sizes(offsets_k, offsets_q, queries, b)
            k0, row0 = Int32(offsets_k[b]), b * queries
            tile_row = b * ((queries + (QUERY_TILE - 1)) // QUERY_TILE)
            if const_expr(self.jagged):
                row0 = Int32(offsets_q[b])
                tile_row = row0 // QUERY_TILE + b
            start = state[REDO + slots + b]
            fields = [b, start, Int32(0), k0, Int32(offsets_k[b + 1]) - k0, tile_row, rows, k0 // 32 + b]
            if const_expr(self.serial):
                fields[1] = Int32(0)
            if const_expr(need is not None):
                fields[2] = self.needs(need, b, row0, rows)
                if fields[2] != 0 and tid % 32 == 0:
                    state[TROUBLE] = Int32(1)
                    cute.arch.atomic_add(state.iterator + CLEAR, Int32(-1), sem="relaxed", scope="gpu")
            for i in cutlass.range(tid % 32, self.count(tiles), 32, unroll=1):
                at = items.iterator.toint() + Int64(start + i) * (4 * ITEM_FIELDS)
                for half in cutlass.range_constexpr(2):
                    four = fields[4 * half : 4 * half + 4]
                    effect([at + 16 * half, *four], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")
        for x in (dk, dv):  # rows past the last sequence
            width = Int32(x.shape[1])
            for row in cutlass.range(Int32(offsets_k[batch]) + bid, Int32(x.shape[0]), grid, unroll=1):
                for i in cutlass.range(tid, width // 16, THREADS, unroll=1):
                    zero16(x.iterator.toint() + Int64(row) * width + 16 * i)
        for i in cutlass.range(bid * THREADS + tid, slots, grid * THREADS, unroll=1):
            state[REDO + i] = Int32(0)
        if const_expr(self.scaled):  # rows that belong to no group
            for x in (dk_scale, dv_scale):
                size = Int32(x.shape[0])
                for i in cutlass.range(bid * THREADS + tid, size // 16, grid * THREADS, unroll=1):
                    zero16(x.iterator.toint() + Int64(i) * 16)
                if bid == 0 and tid < size % 16:
                    x[size - 1 - tid] = cutlass.Uint8(0)
        if const_expr(self.grouped):
            width = Int32(common.shape[1])
            for i in cutlass.range(bid * THREADS + tid, Int32(common.shape[0]) * width, grid * THREADS, unroll=1):
                self.join(dq_scale, common, batch, dq_group, i // width, i % width)

    @cute.jit
    def join(self, dq_scale: cute.Tensor, common: cute.Tensor, batch: Int32, dq_group: Int32, row: Int32, column: Int32):
        """What FP16 sums of a row and head of dQ must be multiplied by in a group: the least power of two that is no less than the sum of
        the members' own, under which each stays below 2^15; so all sums of any of their key tiles do."""
        tiles = Int32(dq_scale.shape[0]) // batch
        tile, first = row % tiles, row // tiles * dq_group
        total = Float32(0.0)
        for b in cutlass.range(first, cutlass.min(first + dq_group, batch), unroll=8):
            total = total + dq_scale[b * tiles + tile, column]
        up = float_of((bits_of(total) + 0x7FFFFF) & 0x7F800000)
        common[row, column] = up if total > 0.0 else Float32(1.0)

    @cute.jit
    def needs(self, need: cute.Tensor, b: Int32, row0: Int32, rows: Int32):
        """Whether any word of ``need`` that tells of sequence ``b`` is not 0: of its own queries, or of those that all share, which only
        the first sequence's words tell of. A whole warp asks."""
        heads, lane = Int32(need.shape[1]), cute.arch.lane_idx()
        chunks = (rows + (CHUNK - 1)) // CHUNK
        first = row0 // CHUNK + b if const_expr(self.jagged) else b * chunks
        found = Int32(0)
        for i in cutlass.range(lane, chunks * heads, 32, unroll=1):
            found = found | need[first + i // heads, i % heads]
            if const_expr(self.shared):
                found = found | (need[i // heads, i % heads] & NEED_QUERIES)
        return Int32(cute.arch.vote_any_sync(found != 0))


def zero16(address):
    """16 bytes of global memory become 0."""
    effect([address], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")


@kernel_cache
def compile_items(
    arch: str, jagged: bool, serial: bool, keys: int, scaled: bool, needs: bool, shared: bool, grouped: bool, offsets_dtype: str
):
    """Compile for ``arch``. Arguments at launch: as of :func:`work_items`; queries a sequence (if not jagged); sequences a group."""
    rows, width, columns = symbol(), symbol(16), symbol()
    offsets = fake_offsets(offsets_dtype)
    return build(
        arch,
        WorkItems(jagged, serial, keys, scaled, shared, grouped),
        offsets,
        offsets,
        fake("int32", (symbol(), ITEM_FIELDS), compact=True),
        fake("int32", (symbol(),), align=4, compact=True),
        *[fake("uint8", (rows, width), compact=True) for _ in range(2)],
        *[fake("uint8", (symbol(),), compact=True) if scaled else None for _ in range(2)],
        fake("int32", (symbol(), symbol()), align=4, compact=True) if needs else None,
        *[fake("float32", (symbol(), columns), align=4, compact=True) if grouped else None for _ in range(2)],
        *[Int32(1)] * 3,
    )


def work_items(
    arch: str,
    offsets_k: Tensor,
    offsets_q: Tensor,
    gradients: list[Tensor],
    scales: list[Tensor],
    *,
    queries: int | None,
    serial: bool,
    keys: int = KEY_TILE,
    need: Tensor | None = None,
    slots: int = 0,
    shared: bool = False,
    dq_group: int = 0,
    dq_scale: Tensor | None = None,
    common: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Items int32 ``[capacity, 8]`` (fields: ``backward_layout.ITEM_FIELDS``) and state int32 ``[5 + slots + B]``: the items' number, the
    words of ``backward_layout.COUNTER`` and those that follow it, first item of each sequence.

    Args:
        offsets_k: int ``[B + 1]``, B >= 1. offsets_q: the same, read where ``queries`` (of every sequence) is None.
        gradients: two, uint8 ``[T, bytes]``, whose rows past ``offsets_k[-1]`` become 0. scales: two, uint8, flat, that
            become 0; or none. keys: of an item.
        need: int32 ``[chunk rows, H]`` of the pre-pass, or None. slots: one an item and head, if ``need`` is given. shared: all
            sequences have the same queries.
        dq_group: neighbouring sequences that share a buffer of FP16 dQ, or 0. If so: dq_scale: fp32 ``[B * tiles, H * 64]`` of the
            pre-pass; common: the same of groups, ``[ceil(B / dq_group) * tiles, H * 64]``, which is written.
    """
    batch, device = offsets_k.shape[0] - 1, offsets_k.device
    capacity = item_capacity(gradients[0].shape[0], batch, serial, keys)
    items = torch.empty(capacity, ITEM_FIELDS, dtype=torch.int32, device=device)
    state = torch.empty(REDO + slots + batch, dtype=torch.int32, device=device)
    kernel = compile_items(arch, queries is None, serial, keys, bool(scales), need is not None, shared, dq_group > 0, dtype_name(offsets_k))
    launch(
        kernel,
        device,
        offsets_k,
        offsets_q,
        items,
        state,
        *gradients,
        *(scales or (None, None)),
        need,
        dq_scale,
        common,
        slots,
        queries or 0,
        dq_group,
    )
    return items, state
