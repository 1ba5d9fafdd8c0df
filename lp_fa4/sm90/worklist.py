"""The forward's work list, built on the GPU: longest first, empty sequences included, no host read.

One item is one query tile of one head of one sequence (and one split of its keys). Its record is eight int32::

    sequence, head, first query row of the tile, first row of the sequence's queries, their number,
    first key row of the sequence, number of its keys, split

Two launches: one CTA sorts the sequences by their number of key tiles (a counting sort, 1,024 bins; longer ones share
the last) and gives each its place, then one warp per sequence writes the records. ``state[0]`` is the number of items,
``state[1]`` the counter that persistent CTAs draw items from, zeroed here at every launch; ``state[2:4]`` the same of a second list, which
is empty here (a kernel may note items in it that another launch is to do again). The order of equal-length
sequences is not fixed from run to run; results do not depend on it.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol

FIELDS = 8
AGAIN, _PLACES = 2, 4
"""Where ``state`` holds the second list's numbers, and the places of sequences."""
_BINS = 1024
_SORT_THREADS = 1024
_EXPAND_WARPS = 8
_KEY_TILE = 128


class WorkList:
    """Sort and expand. ``jagged_q``: query counts from offsets; otherwise ``queries`` rows a sequence.

    ``split_keys``: keys per split (0: one split); ``shared_q``: the queries start at row 0 of q for every sequence.
    """

    def __init__(self, query_tile: int, jagged_q: bool, shared_q: bool, split_keys: int, in_order: bool = False):
        self.query_tile, self.jagged_q, self.shared_q, self.split_keys = query_tile, jagged_q, shared_q, split_keys
        self.in_order = in_order

    @cute.jit
    def __call__(
        self,
        offsets_k: cute.Tensor,
        offsets_q: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        queries: Int32,
        heads: Int32,
        stream,
    ):
        batch = Int32(offsets_k.shape[0]) - 1
        if cutlass.const_expr(not self.in_order):
            self.sort(offsets_k, offsets_q, state, queries, heads).launch(grid=[1, 1, 1], block=[_SORT_THREADS, 1, 1], stream=stream)
        self.expand(offsets_k, offsets_q, records, state, queries, heads).launch(
            grid=[cute.ceil_div(batch, _EXPAND_WARPS), 1, 1], block=[32 * _EXPAND_WARPS, 1, 1], stream=stream
        )

    @cute.jit
    def sizes(self, offsets_k: cute.Tensor, offsets_q: cute.Tensor, queries: Int32, b: Int32):
        """(key length, query tiles, splits) of sequence ``b``."""
        keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
        rows = queries
        if cutlass.const_expr(self.jagged_q):
            rows = Int32(offsets_q[b + 1]) - Int32(offsets_q[b])
        splits = Int32(1)
        if cutlass.const_expr(self.split_keys > 0):
            splits = cutlass.max(cute.ceil_div(keys, self.split_keys), 1)
        return keys, cute.ceil_div(rows, self.query_tile), splits

    @cute.jit
    def bin(self, keys: Int32) -> Int32:
        """Bin of a sequence, the longest in bin 0."""
        tiles = cute.ceil_div(keys, _KEY_TILE)
        if cutlass.const_expr(self.split_keys > 0):
            tiles = cutlass.min(tiles, self.split_keys // _KEY_TILE)
        return _BINS - 1 - cutlass.min(tiles, _BINS - 1)

    @cute.kernel
    def sort(self, offsets_k: cute.Tensor, offsets_q: cute.Tensor, state: cute.Tensor, queries: Int32, heads: Int32):
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        batch = Int32(offsets_k.shape[0]) - 1
        smem = cutlass.utils.SmemAllocator()
        bins = smem.allocate_tensor(Int32, cute.make_layout(_BINS), byte_alignment=16)
        totals = smem.allocate_tensor(Int32, cute.make_layout(32), byte_alignment=16)
        bins[tid] = Int32(0)
        cute.arch.sync_threads()
        for b in cutlass.range(tid, batch, _SORT_THREADS, unroll=1):
            keys, tiles, splits = self.sizes(offsets_k, offsets_q, queries, b)
            cute.arch.atomic_add(bins.iterator + self.bin(keys), tiles * splits * heads, sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        mine = bins[tid]
        running = mine
        for i in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(running, offset=1 << i, mask_and_clamp=0)
            running = running + (left if lane >= (1 << i) else 0)
        if lane == 31:
            totals[warp] = running
        cute.arch.sync_threads()
        if warp == 0:
            value = totals[lane]
            total = value
            for i in cutlass.range_constexpr(5):
                left = cute.arch.shuffle_sync_up(total, offset=1 << i, mask_and_clamp=0)
                total = total + (left if lane >= (1 << i) else 0)
            totals[lane] = total - value
            if lane == 31:
                state[0] = total
                for i in cutlass.range_constexpr(1, _PLACES):
                    state[i] = Int32(0)
        cute.arch.sync_threads()
        bins[tid] = totals[warp] + running - mine
        cute.arch.sync_threads()
        for b in cutlass.range(tid, batch, _SORT_THREADS, unroll=1):
            keys, tiles, splits = self.sizes(offsets_k, offsets_q, queries, b)
            state[_PLACES + b] = cute.arch.atomic_add(bins.iterator + self.bin(keys), tiles * splits * heads, sem="relaxed", scope="cta")

    @cute.kernel
    def expand(
        self,
        offsets_k: cute.Tensor,
        offsets_q: cute.Tensor,
        records: cute.Tensor,
        state: cute.Tensor,
        queries: Int32,
        heads: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        b, lane = bid * _EXPAND_WARPS + tid // 32, tid % 32
        batch = Int32(offsets_k.shape[0]) - 1
        if b < batch:
            keys, tiles, splits = self.sizes(offsets_k, offsets_q, queries, b)
            rows, first_row = queries, b * queries
            if cutlass.const_expr(self.jagged_q):
                first_row = Int32(offsets_q[b])
                rows = Int32(offsets_q[b + 1]) - first_row
            if cutlass.const_expr(self.shared_q):
                first_row = Int32(0)
            first_key = Int32(offsets_k[b])
            if cutlass.const_expr(self.in_order):
                start = b * tiles * heads
                if b == 0 and lane < _PLACES:
                    state[lane] = batch * tiles * heads if lane == 0 else Int32(0)
            else:
                start = state[_PLACES + b]
            # Query tiles of one head are neighbours: they read the same keys at about the same time. The last tile of a
            # causal sequence sees the most keys, so it comes first.
            for i in cutlass.range(lane, tiles * splits * heads, 32, unroll=1):
                tile, rest = tiles - 1 - i % tiles, i // tiles
                split, head = rest % splits, rest // splits
                record = cute.make_rmem_tensor(FIELDS, Int32)
                record[0], record[1], record[2], record[3] = b, head, tile * self.query_tile, first_row
                record[4], record[5], record[6], record[7] = rows, first_key, keys, split
                cute.autovec_copy(record, records[start + i, None])


@kernel_cache
def _compile_worklist(
    arch: str,
    offsets_k_dtype: str,
    offsets_q_dtype: str,
    query_tile: int,
    jagged_q: bool,
    shared_q: bool,
    split_keys: int,
    in_order: bool,
):
    count = symbol()

    def offsets(dtype):
        return fake(dtype, (count,), align=4 if dtype == "int32" else 8)

    return build(
        arch,
        WorkList(query_tile, jagged_q, shared_q, split_keys, in_order),
        offsets(offsets_k_dtype),
        offsets(offsets_q_dtype),
        fake("int32", (symbol(), FIELDS), align=16, compact=True),
        fake("int32", (symbol(),), align=4),
        Int32(1),
        Int32(1),
    )


def work_list(
    offsets_k: Tensor,
    offsets_q: Tensor | None,
    *,
    rows: int,
    tokens: int,
    heads: int,
    queries: int | None,
    shared_q: bool,
    query_tile: int,
    split_keys: int = 0,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """Records ``[capacity, 8]`` and state ``[4 + B]`` (both int32) of a forward; B >= 1.

    ``rows``: rows of q; ``tokens``: rows of k; ``queries``: rows per sequence, or None with ``offsets_q``.
    ``split_keys`` needs at most one query tile per sequence where queries are jagged. ``in_order``: sequences as they come, which are of
    one length; nothing is sorted.
    """
    batch = offsets_k.shape[0] - 1
    tiles = batch * -(-queries // query_tile) if queries is not None else rows // query_tile + batch
    if split_keys:
        splits = tokens // split_keys + batch
        tiles = splits * (-(-queries // query_tile) if queries is not None else -(-rows // query_tile))
    capacity = heads * tiles
    if capacity >= 2**31:
        raise ValueError(f"{capacity} work items ({heads} heads); at most 2^31 - 1 are allowed")
    records = torch.empty(capacity, FIELDS, dtype=torch.int32, device=offsets_k.device)
    state = torch.empty(_PLACES + batch, dtype=torch.int32, device=offsets_k.device)
    jagged = queries is None
    assert not jagged or offsets_q is not None
    query_offsets = offsets_q if jagged else offsets_k
    compiled = _compile_worklist(
        arch_of(offsets_k.device),
        dtype_name(offsets_k),
        dtype_name(query_offsets),  # type: ignore[arg-type]
        query_tile,
        jagged,
        shared_q,
        split_keys,
        in_order,
    )
    launch(compiled, offsets_k.device, offsets_k, query_offsets, records, state, 0 if jagged else queries, heads)
    return records, state
