"""Roles that feed the backward's main kernel: the copy warp, and three warps that turn tiles.

The copy warp brings K and V (TMA), and the codes of Q and dO with their statistics (bulk copies of ready-made images, see
``backward_prepass``). FP8 wgmma takes K-major operands only, so dV, dK and dQ need Q^T, dO^T and K^T: the turning warps make them in
shared memory, 16 tokens by 32 columns at a time, with a 16-bit transposing ``ldmatrix``, four byte permutations and a ``stmatrix``.
No transposed copy exists in global memory: that saves a quarter of the L2 traffic, which bounds this kernel.

Orders of the transposed tokens (any order is right if both operands of a contraction use it): Q^T and dO^T hold tokens
``2t, 2t+1, 8+2t, 8+2t+1`` at bytes ``4t…4t+3`` of a run of 16 (the accumulator's own order), K^T holds ``0, 8, 1, 9, …`` (the order in
which dS passes a 16-bit transposing ``stmatrix``).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from lp_fa4.sm90.backward_layout import CHUNK_TILES, KEY_TILE, QUERY_TILE, STAT_FLOATS
from lp_fa4.sm90.backward_ops import advance, arrive, effect, mask_of, pick_pairs

ACCUMULATOR_ORDER = ("6420", "7531")
PAIRS_ORDER = ("6240", "7351")
TURN_WARPS = 3
STAT_BYTES = 4 * STAT_FLOATS


class Item:
    """One work item's fields, decoded from the list: plain registers. Sequence ``b``, key tiles ``[n0, n1)``, first token ``k0`` and
    length ``klen``, query tile row ``qrow``, queries ``qlen``, scale row ``krow``, key/value head ``hk``."""

    def __init__(self, items, t, kv_heads):
        entry = t // kv_heads
        self.hk = t % kv_heads
        self.b, self.n0, self.n1, self.k0, self.klen, self.qrow, self.qlen, self.krow = (Int32(items[entry, i]) for i in range(8))
        self.tiles = (self.qlen + (QUERY_TILE - 1)) // QUERY_TILE


def query_span(spec, item, n):
    """First query tile that meets key tile ``n``, first chunk and number of chunks (per query head)."""
    first = Int32(0)
    if spec.causal:  # query i sees key j if j <= i + klen - qlen
        first = cutlass.max(n * KEY_TILE - item.klen + item.qlen, Int32(0)) // QUERY_TILE
    chunk = first // CHUNK_TILES
    chunks = cutlass.max((item.tiles + (CHUNK_TILES - 1)) // CHUNK_TILES - chunk, Int32(0))
    if spec.causal:
        chunks = cutlass.max(cutlass.min(chunks, item.tiles - first), Int32(0))
    return first, chunk, chunks


def segment(spec, item, first, chunk, chunks, s, n):
    """Segment ``s`` of an item: (query head, first tile, tiles, tile to start with). Neighbouring key tiles start at different query
    tiles, so that their dQ reductions do not meet."""
    head = item.hk * spec.group + s // chunks
    c = chunk + s % chunks
    low = cutlass.max(first, CHUNK_TILES * c)
    count = cutlass.min(CHUNK_TILES * c + CHUNK_TILES, item.tiles) - low
    return head, low, count, n % count


@cute.jit
def copy_warp(spec, stages: cutlass.Constexpr, items, total, kv_heads, bars, tma, smem, glob):
    """Producer. ``tma``: (K atom, K tensor, V atom, V tensor); ``smem``: tensors and addresses; ``glob``: addresses of the images."""
    bid, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    heads = kv_heads * spec.group
    tile_bytes = spec.tile_bytes
    group = lambda x: cute.group_modes(x, 0, 2)  # noqa: E731
    stage, phase, kphase = Int32(0), Int32(1), Int32(1)
    for t in cutlass.range(bid, total, grid, unroll=1):
        item = Item(items, t, kv_heads)
        k_head = cute.domain_offset((item.k0, 0), tma.k_tensor[None, None, item.hk])
        v_head = cute.domain_offset((item.k0, 0), tma.v_tensor[None, None, item.hk])
        shape = (KEY_TILE, spec.head_dim)
        one = cute.make_layout(1)
        k_smem, k_gmem = cpasync.tma_partition(tma.k, 0, one, group(smem.k), group(cute.local_tile(k_head, shape, (None, 0))))
        v_smem, v_gmem = cpasync.tma_partition(tma.v, 0, one, group(smem.v), group(cute.local_tile(v_head, shape, (None, 0))))
        for n in cutlass.range(item.n0, item.n1, unroll=1):
            first, chunk, chunks = query_span(spec, item, n)
            if chunks > 0:
                cute.arch.mbarrier_wait(bars.k_empty, kphase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, 2 * KEY_TILE * spec.head_dim)
                cute.copy(tma.k, k_gmem[None, n], k_smem, tma_bar_ptr=bars.k_full)
                cute.copy(tma.v, v_gmem[None, n], v_smem, tma_bar_ptr=bars.k_full)
                kphase = kphase ^ 1
                for s in cutlass.range(chunks * spec.group, unroll=1):
                    head, low, count, turn = segment(spec, item, first, chunk, chunks, s, n)
                    for _ in cutlass.range(count, unroll=1):
                        do_tile = Int64((item.qrow + low + turn) * heads + head)
                        q_tile = do_tile
                        if cutlass.const_expr(spec.shared):
                            q_tile = Int64((low + turn) * heads + head)
                        cute.arch.mbarrier_wait(bars.a_empty + stage, phase)
                        with cute.arch.elect_one():
                            full = bars.a_full + stage
                            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * tile_bytes + STAT_BYTES)
                            address = Int32(full.toint())
                            bulk(smem.q_address + stage * tile_bytes, glob.q + q_tile * tile_bytes, tile_bytes, address)
                            bulk(smem.stat_address + stage * STAT_BYTES, glob.stats + do_tile * STAT_BYTES, STAT_BYTES, address)
                            bulk(smem.do_address + stage * tile_bytes, glob.do + do_tile * tile_bytes, tile_bytes, address)
                        stage, phase = advance(stage, phase, stages)
                        turn = turn + 1
                        if turn == count:
                            turn = Int32(0)


def bulk(shared, source, size: int, barrier):
    """Asynchronous copy of ``size`` contiguous bytes."""
    effect(
        [shared, source, Int32(size), barrier],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r",
    )


@cute.jit
def turning_warps(spec, stages: cutlass.Constexpr, turned: cutlass.Constexpr, items, total, kv_heads, bars, smem, warp):
    """Make Q^T and dO^T of every query tile, and K^T of every key tile. ``warp``: 0 to 2."""
    bid, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    tile_bytes = spec.tile_bytes
    stage, phase, out, out_phase = Int32(0), Int32(0), Int32(0), Int32(1)
    kphase, kt_phase = Int32(0), Int32(1)
    for t in cutlass.range(bid, total, grid, unroll=1):
        item = Item(items, t, kv_heads)
        for n in cutlass.range(item.n0, item.n1, unroll=1):
            first, chunk, chunks = query_span(spec, item, n)
            for s in cutlass.range(chunks * spec.group, unroll=1):
                _, _, count, _ = segment(spec, item, first, chunk, chunks, s, n)
                for i in cutlass.range(count, unroll=1):
                    cute.arch.mbarrier_wait(bars.a_full + stage, phase)
                    cute.arch.mbarrier_wait(bars.b_empty + out, out_phase)
                    a, b = stage * tile_bytes, out * tile_bytes
                    turn_tile(smem.do_address + a, smem.dot_address + b, spec.head_dim, QUERY_TILE, ACCUMULATOR_ORDER, warp, None)
                    turn_tile(smem.q_address + a, smem.qt_address + b, spec.head_dim, QUERY_TILE, ACCUMULATOR_ORDER, warp, None)
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    arrive(bars.b_full + out)
                    arrive(bars.a_empty + stage)
                    stage, phase = advance(stage, phase, stages)
                    out, out_phase = advance(out, out_phase, turned)
                    if s + i == 0:  # K^T is needed one query tile later than Q^T and dO^T
                        cute.arch.mbarrier_wait(bars.k_full, kphase)
                        cute.arch.mbarrier_wait(bars.kt_empty, kt_phase)
                        turn_tile(smem.k_address, smem.kt_address, spec.head_dim, KEY_TILE, PAIRS_ORDER, warp, item.klen - n * KEY_TILE)
                        cute.arch.fence_view_async_shared()
                        cute.arch.sync_warp()
                        arrive(bars.kt_full)
                        arrive(bars.k_empty)
                        kphase, kt_phase = kphase ^ 1, kt_phase ^ 1


@cute.jit
def turn_tile(
    source: Int32, target: Int32, head_dim: cutlass.Constexpr, tokens: cutlass.Constexpr, order: cutlass.Constexpr, warp: Int32, limit
):
    """``[tokens, D]`` codes to ``[D, tokens]``, both in the swizzle of their row length (64 or 128 bytes). ``limit``: tokens at or past
    it become 0 (None: all are kept)."""
    lane = cute.arch.lane_idx()
    wide, runs = head_dim // 32, tokens // 16
    matrix, row = lane // 8, lane % 8
    for block in cutlass.range(warp, wide * runs, TURN_WARPS, unroll=1):
        run, column = block // wide, block % wide
        chunk = 2 * column + (matrix >> 1)
        if cutlass.const_expr(head_dim == 128):
            at = (16 * run + 8 * (matrix & 1) + row) * 128 + ((chunk ^ row) << 4)
        else:
            at = (16 * run + 8 * (matrix & 1) + row) * 64 + ((chunk ^ (row >> 1)) << 4)
        w = cute.make_rmem_tensor(4, Int32)
        load_transposed(source + at, w)
        if cutlass.const_expr(limit is not None):
            left = limit - (16 * run + 2 * (lane % 4))
            low, high = mask_of(left), mask_of(left - 8)
            w[0], w[1], w[2], w[3] = w[0] & low, w[1] & high, w[2] & low, w[3] & high
        even, odd = order
        d = 32 * column + 16 * (matrix >> 1) + 2 * row + (matrix & 1)
        to = d * tokens + ((run ^ (d & 7 if cutlass.const_expr(tokens == 128) else (d >> 1) & 3)) << 4)
        words = [pick_pairs(w[i], w[i + 1], which) for i in (0, 2) for which in (even, odd)]
        effect(
            [target + to, *words],
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
            "r,r,r,r,r",
        )


def load_transposed(address, words):
    """Four 8 x 8 matrices of 16-bit units, transposed: lane ``l`` gives the address of row ``l % 8`` of matrix ``l // 8``."""
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T

    from lp_fa4.common.numbers import inline_ptx

    kind = llvm.StructType.get_literal([T.i32()] * 4)
    result = inline_ptx(
        kind,
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        side_effects=True,
    )
    for i in range(4):
        words[i] = Int32(llvm.extractvalue(T.i32(), result, [i]))
