"""After the backward's main kernel: dQ from accumulator order to rows (summed over replicas), and the mean part of dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm90.backward_layout import CHUNK, CHUNK_TILES, QUERY_TILE
from lp_fa4.sm90.backward_ops import effect

THREADS = 256


class Postpass:
    """One CTA per query tile and head, then one per sequence and key/value head."""

    def __init__(self, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool):
        self.head_dim, self.group, self.jagged, self.shared, self.centred, self.half = head_dim, group, jagged, shared, centred, half
        pieces = QUERY_TILE * head_dim * (2 if half else 4) // 16
        self.split = pieces // THREADS if half and shared else 1  # CTAs of a tile: few tiles, many buffers
        self.rounds = pieces // THREADS // self.split

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor,
        dq_scale: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        replicas: Int32,
        stream,
    ):
        grid = tile_rows * Int32(dq.shape[1]) * self.split
        if const_expr(self.centred):
            grid = grid + Int32(dv_mean.shape[0]) * Int32(dv_mean.shape[1])
        self.kernel(partial, dq_scale, dq, offsets_q, offsets_k, sums, dv_mean, queries, tile_rows, replicas).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        partial: cute.Tensor,
        dq_scale: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        replicas: Int32,
    ):
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        heads = Int32(dq.shape[1])
        batch = Int32(offsets_k.shape[0]) - 1
        tiles = tile_rows * heads * self.split
        if bid < tiles:
            tile_row, head, part = bid // self.split // heads, bid // self.split % heads, bid % self.split
            per = (queries + (QUERY_TILE - 1)) // QUERY_TILE
            if const_expr(self.jagged):
                b = find_sequence(offsets_q, batch, tile_row, QUERY_TILE)
                start = Int32(offsets_q[b])
                tile = tile_row - (start // QUERY_TILE + b)
                left = Int32(offsets_q[b + 1]) - start - QUERY_TILE * tile
                chunk_row = start // CHUNK + b + tile // CHUNK_TILES
            else:
                start, tile = tile_row // per * queries, tile_row % per
                chunk_row = tile_row // per * ((queries + (CHUNK - 1)) // CHUNK) + tile // CHUNK_TILES
                left = queries - QUERY_TILE * tile
            scale = (dq_scale, chunk_row, (queries + (CHUNK - 1)) // CHUNK)
            self.rows(partial, scale, dq, tile_row, head, part, start + QUERY_TILE * tile, left, tile_rows, replicas)
        elif const_expr(self.centred):
            self.mean(offsets_q, offsets_k, sums, dv_mean, bid - tiles, queries)
        if const_expr(self.jagged):  # rows of dq past the last sequence
            for row in cutlass.range(Int32(offsets_q[batch]) + bid, Int32(dq.shape[0]), grid, unroll=1):
                for i in cutlass.range(tid, heads * self.head_dim, THREADS, unroll=1):
                    dq[row, i // self.head_dim, i % self.head_dim] = Float32(0.0)

    @cute.jit
    def rows(self, partial, scale, dq, tile_row, head, part, first, left, tile_rows, replicas):
        """One tile, or a part of it. Its eight warps' shares follow each other; 16 bytes hold the columns (2t, 2t + 1) of rows g and g + 8
        of one block of 8 columns (FP32) or of two (FP16). ``scale``: (factors of FP16 sums, row of this tile's, rows a sequence)."""
        d, width = self.head_dim, 8 if self.half else 4
        tid, _, _ = cute.arch.thread_idx()
        heads = Int64(dq.shape[1])
        size = QUERY_TILE * d * 16 // width
        source = partial.iterator.toint() + (Int64(tile_row) * heads + head) * size
        step = Int64(tile_rows) * heads * size
        for p in cutlass.range_constexpr(self.rounds):
            piece = tid + THREADS * (self.rounds * part + p)
            total = cute.make_rmem_tensor(width, Float32)
            total.fill(0.0)
            for r in cutlass.range(replicas, unroll=4):
                kind = Float16 if const_expr(self.half) else Float32
                pointer = cute.make_ptr(kind, source + Int64(r) * step + 16 * piece, cute.AddressSpace.gmem, assumed_align=16)
                more = cute.make_rmem_tensor(width, kind)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), more)
                factor = Float32(1.0)
                if const_expr(self.half):
                    factor = scale[0][scale[1] + (r * scale[2] if const_expr(self.shared) else 0), head]
                for i in cutlass.range_constexpr(width):
                    total[i] = total[i] + Float32(more[i]) * factor
            warp, rest = piece // (8 * d // width), piece % (8 * d // width)
            j, lane = rest // 32, rest % 32
            row = 16 * (warp % 4) + lane // 4
            for c in cutlass.range_constexpr(width // 4):
                column = d // 2 * (warp // 4) + 8 * (j * (width // 4) + c) + 2 * (lane % 4)
                for r in cutlass.range_constexpr(2):
                    if row + 8 * r < left:
                        at = dq.iterator + cute.crd2idx((first + row + 8 * r, head, column), dq.layout)
                        two = [total[4 * c + 2 * r], total[4 * c + 2 * r + 1]]
                        effect([at.toint(), *two], "st.global.v2.f32 [$0], {$1, $2};", "l,f,f")

    @cute.jit
    def mean(self, offsets_q, offsets_k, sums, dv_mean, index, queries):
        """w = (1 / K) sum_q dO, summed over the query heads of a key/value head; 0 for a sequence without keys."""
        tid, _, _ = cute.arch.thread_idx()
        kv_heads = Int32(dv_mean.shape[1])
        b, hk = index // kv_heads, index % kv_heads
        keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
        chunks = (queries + (CHUNK - 1)) // CHUNK
        first = b * chunks
        if const_expr(self.jagged):
            start = Int32(offsets_q[b])
            chunks = (Int32(offsets_q[b + 1]) - start + (CHUNK - 1)) // CHUNK
            first = start // CHUNK + b
        if tid < self.head_dim:
            total = Float32(0.0)
            if keys > 0:
                for i in cutlass.range(chunks * self.group, unroll=1):
                    total = total + sums[first + i // self.group, hk * self.group + i % self.group, tid]
                total = total / Float32(keys)
            dv_mean[b, hk, tid] = total


@kernel_cache
def compile_postpass(arch: str, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool, offsets_dtype: str):
    """Compile for ``arch``. Arguments: sums of dQ (fp32 or fp16, flat, buffers after one another); factors of
    FP16 sums, fp32 ``[chunk rows, H]``, or None; dq: fp32 ``[N, H, D]``; offsets_q (read
    if jagged), offsets_k; column sums of dO; dv_mean: fp32 ``[B, Hkv, D]`` or None; queries (if not jagged); tile rows; replicas."""
    heads = symbol()
    offsets = lambda: fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8)  # noqa: E731
    return build(
        arch,
        Postpass(head_dim, group, jagged, shared, centred, half),
        fake("float16" if half else "float32", (symbol(),), align=16),
        fake("float32", (symbol(), heads), align=4, compact=True) if half else None,
        fake("float32", (symbol(), heads, head_dim), compact=True),
        offsets(),
        offsets(),
        fake("float32", (symbol(), heads, head_dim), compact=True),
        fake("float32", (symbol(), symbol(), head_dim), compact=True) if centred else None,
        Int32(1),
        Int32(1),
        Int32(1),
    )
