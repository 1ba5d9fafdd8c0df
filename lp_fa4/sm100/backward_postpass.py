"""After the backward's main kernel: dQ from tile images to rows (summed over its buffers, scaled), and the mean part of dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm100.backward_config import STAT_POWER, TILE, stat_values
from lp_fa4.sm100.backward_work import effect

THREADS = 256


class Postpass:
    """One CTA per query tile and head, then one per sequence and key/value head."""

    def __init__(self, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool):
        self.head_dim, self.group, self.jagged, self.shared, self.centred, self.half = head_dim, group, jagged, shared, centred, half
        self.width = 8 if half else 4  # values in 16 bytes
        pieces = TILE * head_dim // self.width
        self.split = pieces // THREADS if shared else 1  # CTAs of a tile: few tiles, many buffers
        self.rounds = pieces // THREADS // self.split

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor,
        stats: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        replicas: Int32,
        factor: Float32,
        stream,
    ):
        grid = tile_rows * Int32(dq.shape[1]) * self.split
        if const_expr(self.centred):
            grid = grid + Int32(dv_mean.shape[0]) * Int32(dv_mean.shape[1])
        self.kernel(partial, stats, dq, offsets_q, offsets_k, sums, dv_mean, queries, tile_rows, replicas, factor).launch(
            grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        partial: cute.Tensor,
        stats: cute.Tensor | None,
        dq: cute.Tensor,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        sums: cute.Tensor,
        dv_mean: cute.Tensor | None,
        queries: Int32,
        tile_rows: Int32,
        replicas: Int32,
        factor: Float32,
    ):
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        heads = Int32(dq.shape[1])
        batch = Int32(offsets_k.shape[0]) - 1
        tiles = tile_rows * heads * self.split
        if bid < tiles:
            tile_row, head, part = bid // self.split // heads, bid // self.split % heads, bid % self.split
            per = (queries + (TILE - 1)) // TILE
            if const_expr(self.jagged):
                b = find_sequence(offsets_q, batch, tile_row, TILE)
                start = Int32(offsets_q[b])
                tile = tile_row - (start // TILE + b)
                left = Int32(offsets_q[b + 1]) - start - TILE * tile
            else:
                start, tile = tile_row // per * queries, tile_row % per
                left = queries - TILE * tile
            self.rows(partial, stats, dq, tile_row, head, part, start + TILE * tile, left, tile_rows, replicas, factor)
        elif const_expr(self.centred):
            self.mean(offsets_q, offsets_k, sums, dv_mean, bid - tiles, queries)
        if const_expr(self.jagged):  # rows of dq past the last sequence
            for row in cutlass.range(Int32(offsets_q[batch]) + bid, Int32(dq.shape[0]), grid, unroll=1):
                for i in cutlass.range(tid, heads * self.head_dim, THREADS, unroll=1):
                    dq[row, i // self.head_dim, i % self.head_dim] = Float32(0.0)

    @cute.jit
    def rows(self, partial, stats, dq, tile_row, head, part, first, left, tile_rows, replicas, factor):
        """One tile, or a part of it: 16 bytes of an image hold neighbouring columns of a row (see ``backward_reduce``). ``stats`` hold the
        power of two on a row's FP16 sums (where queries are shared, one for all sequences)."""
        d, width = self.head_dim, self.width
        tid, _, _ = cute.arch.thread_idx()
        heads = Int64(dq.shape[1])
        kind = Float16 if self.half else Float32
        size = TILE * d * 16 // width
        source = partial.iterator.toint() + (Int64(tile_row) * heads + head) * size
        step = Int64(tile_rows) * heads * size
        for p in cutlass.range_constexpr(self.rounds):
            piece = tid + THREADS * (self.rounds * part + p)
            chunks = d // width
            warp, rest = piece // (32 * chunks), piece % (32 * chunks)
            # neighbouring threads take neighbouring chunks of a row: whole sectors are written
            row, chunk = 32 * warp + rest // chunks, rest % chunks
            place = warp * (32 * chunks) + 32 * chunk + row % 32
            if row < left:
                total = cute.make_rmem_tensor(width, Float32)
                total.fill(0.0)
                for r in cutlass.range(replicas, unroll=8):
                    pointer = cute.make_ptr(kind, source + Int64(r) * step + 16 * place, cute.AddressSpace.gmem, assumed_align=16)
                    more = cute.make_rmem_tensor(width, kind)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), more)
                    for i in cutlass.range_constexpr(width):
                        total[i] = total[i] + Float32(more[i])
                scale = factor
                if const_expr(self.half):
                    scale = Float32(1.0) / stats[tile_row, head, STAT_POWER * TILE + row]
                at = dq.iterator.toint() + ((Int64(first) + row) * heads + head) * (4 * d) + 4 * width * chunk
                for i in cutlass.range_constexpr(0, width, 4):
                    four = [total[i + j] * scale for j in range(4)]
                    effect([at + 4 * i, *four], "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f")

    @cute.jit
    def mean(self, offsets_q, offsets_k, sums, dv_mean, index, queries):
        """w = (1 / K) sum_q dO, summed over the query heads of a key/value head; 0 for a sequence without keys."""
        tid, _, _ = cute.arch.thread_idx()
        kv_heads = Int32(dv_mean.shape[1])
        b, hk = index // kv_heads, index % kv_heads
        keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
        tiles = (queries + (TILE - 1)) // TILE
        first = b * tiles
        if const_expr(self.jagged):
            start = Int32(offsets_q[b])
            tiles = (Int32(offsets_q[b + 1]) - start + (TILE - 1)) // TILE
            first = start // TILE + b
        if tid < self.head_dim:
            total = Float32(0.0)
            if keys > 0:
                for i in cutlass.range(tiles * self.group, unroll=1):
                    total = total + sums[first + i // self.group, hk * self.group + i % self.group, tid]
                total = total / Float32(keys)
            dv_mean[b, hk, tid] = total


@kernel_cache
def compile_postpass(arch: str, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool, offsets_dtype: str):
    """Compile for ``arch``. Arguments: sums of dQ (fp32 or fp16 ``[replicas * tile rows, H, 128 * D]``); the pre-pass's statistics where
    sums are FP16, or None; dq: fp32 ``[N, H, D]``; offsets_q (read if jagged), offsets_k; column sums of dO (pre-pass); dv_mean: fp32
    ``[B, Hkv, D]`` or None; queries (if not jagged); tile rows of a buffer; buffers; factor on FP32 sums."""
    heads = symbol()
    offsets = lambda: fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8)  # noqa: E731
    return build(
        arch,
        Postpass(head_dim, group, jagged, shared, centred, half),
        fake("float16" if half else "float32", (symbol(), heads, TILE * head_dim), compact=True),
        fake("float32", (symbol(), heads, stat_values(True) * TILE), compact=True) if half else None,
        fake("float32", (symbol(), heads, head_dim), compact=True),
        offsets(),
        offsets(),
        fake("float32", (symbol(), heads, head_dim), compact=True),
        fake("float32", (symbol(), symbol(), head_dim), compact=True) if centred else None,
        Int32(1),
        Int32(1),
        Int32(1),
        Float32(1.0),
    )
