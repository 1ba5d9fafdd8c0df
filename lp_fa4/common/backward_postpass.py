"""After the backward's main kernel, on every architecture: dQ from partial sums to rows, and the mean part of dV.

A main kernel leaves the sums of a query tile as it had them; :meth:`Postpass.rows` of its architecture knows how. The rest is here.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.backward_rows import first_unit, query_unit
from lp_fa4.compile import build, fake, fake_offsets, symbol

THREADS = 256


class QueryTile(NamedTuple):
    """A query tile of one head, or a part of it. ``row``: workspace row. ``first``: its first row of dq. ``left``: rows to the sequence's
    end. ``rows``, ``buffers``: workspace rows of a buffer of sums, and buffers. ``sums``, ``step``: row of the column sums of dO (their
    chunk), and rows of them a sequence."""

    row: Int32
    head: Int32
    part: Int32
    first: Int32
    left: Int32
    rows: Int32
    buffers: Int32
    sums: Int32
    step: Int32


class Postpass:
    """One CTA per part of a query tile and head, then one per sequence and key/value head. A subclass has ``tile`` (queries of a tile),
    ``chunk`` (queries of a row of column sums of dO, a multiple of it), and :meth:`rows`; ``shares``: those sums are over the keys."""

    tile: int
    chunk: int
    shares = False

    def __init__(self, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool):
        self.head_dim, self.group, self.jagged, self.shared, self.centred, self.half = head_dim, group, jagged, shared, centred, half
        self.width = 8 if half else 4  # values in 16 bytes
        pieces = self.tile * head_dim // self.width
        self.split = pieces // THREADS if self.splits() else 1  # CTAs of a tile
        self.rounds = pieces // THREADS // self.split

    def splits(self) -> bool:
        """Whether a tile has a CTA for every 16 bytes of a thread: few tiles, many buffers."""
        return self.shared

    def rows(self, partial: Any, scales: Any, dq: Any, place: QueryTile, factor: Any) -> None:
        """Write rows of dq: the sum over buffers of ``partial``, times ``factor``, or, where sums are FP16, freed of their powers of two,
        which ``scales`` knows."""
        raise NotImplementedError(f"{type(self).__name__}.rows: how a main kernel leaves its sums is known to its architecture only")

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor,
        scales: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        buffers: Int32,
        factor: Float32,
        stream,
    ):
        grid = tile_rows * Int32(dq.shape[1]) * self.split
        if const_expr(self.centred):
            grid = grid + Int32(dv_mean.shape[0]) * Int32(dv_mean.shape[1])
        self.kernel(partial, scales, dq, offsets_q, offsets_k, sums, dv_mean, queries, tile_rows, buffers, factor).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        partial: cute.Tensor,
        scales: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        buffers: Int32,
        factor: Float32,
    ):
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        heads = Int32(dq.shape[1])
        batch = Int32(offsets_k.shape[0]) - 1
        tiles = tile_rows * heads * self.split
        if bid < tiles:
            row, head, part = bid // self.split // heads, bid // self.split % heads, bid % self.split
            unit = query_unit(self.jagged, offsets_q, batch, row, self.tile, queries)
            chunk = first_unit(self.jagged, unit, self.chunk) + unit.index // (self.chunk // self.tile)
            first, step = unit.start + self.tile * unit.index, (queries + (self.chunk - 1)) // self.chunk
            place = QueryTile(row, head, part, first, unit.queries - self.tile * unit.index, tile_rows, buffers, chunk, step)
            self.rows(partial, scales, dq, place, factor)
        elif const_expr(self.centred):
            self.mean(offsets_q, offsets_k, sums, dv_mean, bid - tiles, queries)
        if const_expr(self.jagged):  # rows of dq past the last sequence
            for row in cutlass.range(Int32(offsets_q[batch]) + bid, Int32(dq.shape[0]), grid, unroll=1):
                for i in cutlass.range(tid, heads * self.head_dim, THREADS, unroll=1):
                    dq[row, i // self.head_dim, i % self.head_dim] = dq.element_type(0.0)

    @cute.jit
    def mean(self, offsets_q, offsets_k, sums, dv_mean, index, queries):
        """w = (1 / K) sum_q dO, summed over the query heads of a key/value head; 0 for a sequence without keys."""
        tid, _, _ = cute.arch.thread_idx()
        kv_heads = Int32(dv_mean.shape[1])
        b, hk = index // kv_heads, index % kv_heads
        keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
        chunks = (queries + (self.chunk - 1)) // self.chunk
        first = b * chunks
        if const_expr(self.jagged):
            start = Int32(offsets_q[b])
            chunks = (Int32(offsets_q[b + 1]) - start + (self.chunk - 1)) // self.chunk
            first = start // self.chunk + b
        if tid < self.head_dim:
            total = Float32(0.0)
            if keys > 0:
                for i in cutlass.range(chunks * self.group, unroll=1):
                    total = total + sums[first + i // self.group, hk * self.group + i % self.group, tid]
                if const_expr(not self.shares):
                    total = total / Float32(keys)
            dv_mean[b, hk, tid] = total


def build_postpass(arch: str, kernel: Postpass, offsets_dtype: str, scales: Any, dq_dtype: str = "float32") -> Any:
    """Compile ``kernel`` for ``arch``. Arguments at launch, in order:

    partial: sums of dQ, fp32 or fp16, flat, buffers after one another; scales: as ``scales`` describes, or None; dq: ``dq_dtype``
    ``[N, H, D]``;
    offsets_q (read if jagged), offsets_k: ``[B + 1]``; sums: fp32 ``[chunk rows, H, D]``, column sums of dO; dv_mean: fp32 ``[B, Hkv, D]``
    or None; queries (if not jagged); tile rows of a buffer; buffers; factor on FP32 sums.
    """
    heads, d = symbol(), kernel.head_dim
    return build(
        arch,
        kernel,
        fake("float16" if kernel.half else "float32", (symbol(),), align=16),
        scales,
        fake(dq_dtype, (symbol(), heads, d), compact=True),
        fake_offsets(offsets_dtype),
        fake_offsets(offsets_dtype),
        fake("float32", (symbol(), heads, d), compact=True),
        fake("float32", (symbol(), symbol(), d), compact=True) if kernel.centred else None,
        Int32(1),
        Int32(1),
        Int32(1),
        Float32(1.0),
    )
