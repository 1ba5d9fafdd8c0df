"""Roles that feed the backward's main kernel: the key warp, the copy warp, and warps that turn K.

The key warp brings K and V (TMA), the copy warp the codes of Q and dO, plain and turned, with their statistics (bulk copies of ready-made
images, see ``backward_prepass``). FP8 wgmma takes K-major operands only, so dV, dK and dQ need dO^T, Q^T and K^T. The first two are read
once for every key tile and come from global memory: turning them here, once a key tile, cost more than their traffic. K^T is used once: the
dQ warps make it in shared memory, 16 tokens by 32 columns at a time, with a 16-bit transposing ``ldmatrix``, four byte permutations and a
``stmatrix``, while the consumers work on the first two query tiles.

Orders of the transposed tokens (any order is right if both operands of a contraction use it): Q^T and dO^T hold tokens
``2t, 2t+1, 8+2t, 8+2t+1`` at bytes ``4t…4t+3`` of a run of 16 (the accumulator's own order), K^T holds ``0, 8, 1, 9, …`` (the order in
which dS passes a 16-bit transposing ``stmatrix``).
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.common.matrices import load_matrices, shared_words
from lp_fa4.sm90.backward_layout import CHUNK_TILES, COUNTER, COUNTER_INSTEAD, KEY_TILE, QUERY_TILE, REDO, STAT_FLOATS
from lp_fa4.sm90.backward_ops import advance, arrive, effect, mask_of, pick_pairs, pinned, rescale_codes

ACCUMULATOR_ORDER = ("6420", "7531")
PAIRS_ORDER = ("6240", "7351")
ONE_HALF2 = 0x3C003C00
"""1 as packed FP16."""
IN_FLIGHT = 3
DRAWN_BEFORE = 4
"""Query tiles before an item's end from which the next one is drawn."""
RECORD_BYTES = 64
"""An item's record: eight fields (:class:`Item`), then the scale bytes of K and of V for four groups of 32 keys, all int32."""


class Item:
    """A key tile of one key/value head in registers: sequence ``b`` (negative: no more work), key tile ``n``, first token ``k0`` and length
    ``klen``, query tile row ``qrow``, queries ``qlen``, key/value head ``hk``."""

    def __init__(self, record):
        words = [shared_words(record + 16 * i, 4) for i in range(2)]
        self.b, self.n, self.k0, self.klen = (words[0][i] for i in range(4))
        self.qrow, self.qlen, self.hk, self.tag = (words[1][i] for i in range(4))
        self.tiles = (self.qlen + (QUERY_TILE - 1)) // QUERY_TILE
        self.record = record


def query_span(spec, item):
    """First query tile that meets key tile ``n``, first chunk and number of chunks (per query head)."""
    first = Int32(0)
    if spec.causal:  # query i sees key j if j <= i + klen - qlen
        first = cutlass.max(item.n * KEY_TILE - item.klen + item.qlen, Int32(0)) // QUERY_TILE
    chunk = first // CHUNK_TILES
    chunks = cutlass.max((item.tiles + (CHUNK_TILES - 1)) // CHUNK_TILES - chunk, Int32(0))
    if spec.causal:
        chunks = cutlass.max(cutlass.min(chunks, item.tiles - first), Int32(0))
    return first, chunk, chunks


def segment(spec, item, first, chunk, chunks, s):
    """Segment ``s`` of an item: (query head, first tile, tiles, tile to start with). All key tiles walk the chunks in the same order, so
    that CTAs on one head meet the same query operands and sums of dQ while those are in L2; neighbours start at different tiles of a
    chunk, so that their reductions do not meet."""
    turn = item.n // 2 if spec.cluster else item.n
    head, c = item.hk, chunk + s
    if const_expr(spec.group > 1):
        head, c = item.hk * spec.group + s // chunks, chunk + s % chunks
    low = cutlass.max(first, CHUNK_TILES * c)
    count = cutlass.min(CHUNK_TILES * c + CHUNK_TILES, item.tiles) - low
    return head, low, count, turn % count


@cute.jit
def key_warp(spec, items, total, k_scale, v_scale, kv_heads, bars, tma, smem, glob):
    """Producer of keys. ``tma``: (K atom, K tensor, V atom, V tensor); ``smem``: tensors and addresses; ``glob``: addresses, and the state
    of the list (``backward_items``).

    It alone reads the work list and the scales; the other roles find each item's record in shared memory. It draws an item, and asks for
    its keys, while the last query tiles of the one before are computed (``DRAWN_BEFORE``): so neither the list's latencies, one after the
    other, nor the keys' stand between two items, and who is behind still takes fewer.
    """
    bid, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    heads = kv_heads * spec.group
    shape, one = (KEY_TILE, spec.head_dim), cute.make_layout(1)
    group = lambda x: cute.group_modes(x, 0, 2)  # noqa: E731
    kv, kv_phase, free_phase, near_phase, rank = Int32(0), Int32(1), Int32(1), Int32(0), Int32(0)
    if const_expr(spec.cluster):  # both CTAs walk the same items
        rank = bid % 2
        bid, grid = bid // 2, grid // 2
    t = bid
    while t < total:
        entry = t // kv_heads
        fields = [None, *(Int32(items[entry, i]) for i in range(1, 7)), None]  # the others when they are wanted: registers are short
        tiles, key_tiles = (fields[6] + (QUERY_TILE - 1)) // QUERY_TILE, (fields[4] + (spec.item_keys - 1)) // spec.item_keys
        hk, first_tile, end_tile = t % kv_heads, Int32(0), key_tiles
        if const_expr(not spec.serial):  # all key tiles of a head follow each other: their dQ and query operands stay in L2
            within = t - fields[1] * kv_heads
            hk, first_tile = within // key_tiles, within % key_tiles
            if const_expr(spec.cluster):
                first_tile = 2 * first_tile + rank
            end_tile = first_tile + 1
        tag = t
        if const_expr(spec.halves):
            end_tile = end_tile if fields[2] == 0 else first_tile
        elif const_expr(spec.instead):
            tag = Int32(glob.state[REDO + t]) if fields[2] == 0 else Int32(0)
            end_tile = end_tile if fields[2] + tag != 0 else first_tile
        k_head = cute.domain_offset((fields[3], 0), tma.k_tensor[None, None, hk])
        v_head = cute.domain_offset((fields[3], 0), tma.v_tensor[None, None, hk])
        k_smem, k_gmem = cpasync.tma_partition(tma.k, 0, one, group(smem.k), group(cute.local_tile(k_head, shape, (None, 0))))
        v_smem, v_gmem = cpasync.tma_partition(tma.v, 0, one, group(smem.v), group(cute.local_tile(v_head, shape, (None, 0))))
        for n in cutlass.range(first_tile, end_tile, unroll=1):
            item = SimpleNamespace(n=n, k0=fields[3], klen=fields[4], qrow=fields[5], qlen=fields[6], hk=hk, tiles=tiles)
            chunks = query_span(spec, item)[2]
            cute.arch.mbarrier_wait(bars.k_empty + kv, kv_phase)
            record = smem.record + RECORD_BYTES * kv
            store_words(record, (Int32(items[pinned(entry), 0]), n, item.k0, item.klen))
            store_words(record + 16, (item.qrow, item.qlen, item.hk, tag))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.item_full + kv)
            scale_row = Int32(items[pinned(entry), 7])
            store_words(record + 32, scale_bytes(spec.k_static, k_scale, item, scale_row))
            store_words(record + 48, scale_bytes(spec.v_static, v_scale, item, scale_row))
            if const_expr(spec.halves):
                cute.arch.mbarrier_wait(bars.kv_empty, free_phase)
                free_phase = free_phase ^ 1
                cute.arch.fence_view_async_shared()  # K and V were read by loads
            bytes_ = (2 * KEY_TILE + 4 * spec.mean_row) * spec.head_dim if chunks > 0 else 0
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + kv, bytes_)
            if chunks > 0:
                cute.copy(tma.k, k_gmem[None, n], k_smem[None, kv if const_expr(spec.key_stages == 2) else 0], tma_bar_ptr=bars.k_full + kv)
                cute.copy(tma.v, v_gmem[None, n], v_smem[None, kv if const_expr(spec.key_stages == 2) else 0], tma_bar_ptr=bars.k_full + kv)
                if const_expr(spec.mean_row):
                    unit = Int32(items[pinned(entry), 0])
                    if const_expr(spec.jagged):
                        unit = (item.qrow - unit) // CHUNK_TILES + unit
                    source = glob.sums + (Int64(unit) * heads + item.hk) * (4 * spec.head_dim)
                    cute.arch.fence_view_async_shared()  # the row before was read by loads
                    with cute.arch.elect_one():
                        bulk(smem.mean + kv * (4 * spec.head_dim), source, 4 * spec.head_dim, Int32((bars.k_full + kv).toint()))
            kv, kv_phase = advance(kv, kv_phase, 2)
        if const_expr(spec.drawn):
            if end_tile > first_tile:
                cute.arch.mbarrier_wait(bars.near_end, near_phase)
                near_phase = near_phase ^ 1
            drawn = Int32(0)
            if cute.arch.lane_idx() == 0:
                drawn = cute.arch.atomic_add(
                    glob.state.iterator + (COUNTER_INSTEAD if const_expr(spec.instead) else COUNTER), Int32(1), sem="relaxed", scope="gpu"
                )
            t = grid + cute.arch.shuffle_sync(drawn, 0)
        else:
            t = t + grid
    cute.arch.mbarrier_wait(bars.k_empty + kv, kv_phase)
    for i in range(2):
        store_words(smem.record + RECORD_BYTES * kv + 16 * i, [Int32(-1)] * 4)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.item_full + kv)
        cute.arch.mbarrier_arrive(bars.k_full + kv)


@cute.jit
def copy_warp(spec, stages: cutlass.Constexpr, turned: cutlass.Constexpr, kv_heads, bars, smem, glob):
    """Producer of query tiles: the images of Q and dO, plain and turned, with their statistics. Others as for :func:`key_warp`."""
    bid, _, _ = cute.arch.block_idx()
    heads = kv_heads * spec.group
    tile_bytes = spec.tile_bytes
    stat_first, stat_bytes = 4 * spec.stat_span[0], 4 * spec.stat_span[1]
    stage, phase, out, out_phase, kv, kv_phase, more = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(0), Int32(1)
    rank = Int32(0)
    if const_expr(spec.cluster):  # each CTA reads half of the query side for both
        rank = bid % 2
    while more > 0:
        cute.arch.mbarrier_wait(bars.item_full + kv, kv_phase)
        item = Item(smem.record + RECORD_BYTES * kv)
        more = item.b + 1
        cute.arch.sync_warp()  # all lanes have read the record
        arrive(bars.k_empty + kv)
        if more > 0:
            first, chunk, chunks = query_span(spec, item)
            if chunks == 0:
                arrive(bars.near_end)
            for s in cutlass.range(chunks * spec.group, unroll=1):
                head, low, count, turn = segment(spec, item, first, chunk, chunks, s)
                near = cutlass.max(count - DRAWN_BEFORE, 0) if s == chunks * spec.group - 1 else Int32(-1)
                for i in cutlass.range(count, unroll=1):
                    if i == near:
                        arrive(bars.near_end)
                    do_tile = Int64((item.qrow + low + turn) * heads + head)
                    q_tile = do_tile
                    if cutlass.const_expr(spec.shared):
                        q_tile = Int64((low + turn) * heads + head)
                    do_source, q_source = glob.do + do_tile * (2 * tile_bytes), glob.q + q_tile * (2 * tile_bytes)
                    full = bars.a_full + stage
                    cute.arch.mbarrier_wait(bars.a_empty + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, 3 * tile_bytes + stat_bytes)
                        address = Int32(full.toint())
                        source = glob.stats + do_tile * (4 * STAT_FLOATS) + stat_first
                        bulk(smem.stat_address + stage * stat_bytes, source, stat_bytes, address)
                    share_tile(spec, rank, 0, smem.q_address + stage * tile_bytes, q_source, full)
                    share_tile(spec, rank, 1, smem.do_address + stage * tile_bytes, do_source, full)
                    share_tile(spec, rank, 0, smem.dot_address + stage * tile_bytes, do_source + tile_bytes, full)
                    full = bars.t_full + out
                    cute.arch.mbarrier_wait(bars.t_empty + out, out_phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes)
                    share_tile(spec, rank, 1, smem.qt_address + out * tile_bytes, q_source + tile_bytes, full)
                    stage, phase = advance(stage, phase, stages)
                    out, out_phase = advance(out, out_phase, turned)
                    turn = turn + 1
                    if turn == count:
                        turn = Int32(0)
        kv, kv_phase = advance(kv, kv_phase, 2)


@cute.jit
def store_words(address, words):
    """Four int32 words to shared memory, by one lane: the same that arrives on the barrier then."""
    with cute.arch.elect_one():
        effect([address, *words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")


@cute.jit
def share_tile(spec, rank, reader: cutlass.Constexpr, target, source, barrier):
    """Bring a tile, or, in a cluster, let CTA ``reader`` bring it to both."""
    address = Int32(barrier.toint())
    if const_expr(spec.cluster):
        if rank == reader:
            with cute.arch.elect_one():
                effect(
                    [target, source, Int32(spec.tile_bytes), address],
                    "{.reg .b16 m; mov.b16 m, 3; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                    " [$0], [$1], $2, [$3], m;}",
                    "r,l,r,r",
                )
    else:
        with cute.arch.elect_one():
            bulk(target, source, spec.tile_bytes, address)


def scale_bytes(static, scale, item, row):
    """E8M0 bytes of a key tile's four groups; groups past the sequence's end repeat the sequence's first. ``row``: its scale row."""
    if static:
        return (Int32(scale[0, item.hk]),) * 4
    rows = [row + (4 * item.n + g) * Int32(item.n * KEY_TILE + 32 * g < item.klen) for g in range(4)]
    return tuple(Int32(scale[at, item.hk]) for at in rows)


def bulk(shared, source, size: int, barrier):
    """Asynchronous copy of ``size`` contiguous bytes."""
    effect(
        [shared, source, Int32(size), barrier],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r",
    )


@cute.jit
def turn_tiles(
    pairs,
    head_dim: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    order: cutlass.Constexpr,
    warp: Int32,
    warps: cutlass.Constexpr,
    limit,
    factor=None,
):
    """``[tokens, D]`` codes to ``[D, tokens]`` for each (source, target) address, both in the swizzle of their row length (64 or 128
    bytes). ``warp`` of ``warps`` does its share; ``limit``: tokens at or past it become 0 (None: all are kept); ``factor``: a power of two
    on the turned codes, as packed FP16, or None.

    A block is 16 tokens x 32 columns. Three blocks are in flight at a time: one by one, the latencies of ``ldmatrix`` and ``stmatrix``
    add up.
    """
    lane, warp = pinned(cute.arch.lane_idx()), cute.arch.make_warp_uniform(pinned(warp))  # hoisted addresses would spill
    wide = head_dim // 32
    each = wide * (tokens // 16)
    rounds = -(-each // warps)
    matrix, row = lane // 8, lane % 8
    high, low = matrix >> 1, matrix & 1
    # within a block: ldmatrix row 8 low + row, chunk 2 column + high; stmatrix row d = 16 high + 2 row + low, chunk run; both swizzled
    from_row = (8 * low + row) * head_dim
    from_chunk = (high ^ (row if cutlass.const_expr(head_dim == 128) else row >> 1)) << 4
    to_row = (16 * high + 2 * row + low) * tokens
    to_chunk = ((2 * row + low) & 7 if cutlass.const_expr(tokens == 128) else row & 3) << 4
    for source, target in pairs:
        for first in cutlass.range_constexpr(0, rounds, IN_FLIGHT):
            words, targets, present = [], [], []
            for j in cutlass.range_constexpr(min(IN_FLIGHT, rounds - first)):
                block = warp + warps * (first + j)
                run, column = block // wide, block & (wide - 1)
                w = cute.make_rmem_tensor(4, Int32)
                inside = True if cutlass.const_expr(warps * (first + j) + warps <= each) else block < each
                if inside:
                    address = source + from_row + run * (16 * head_dim) + (from_chunk ^ (column << 5))
                    w[0], w[1], w[2], w[3] = load_matrices(address, transposed=True)
                if cutlass.const_expr(limit is not None):
                    left = limit - (16 * run + 2 * (lane % 4))
                    below, above = mask_of(left), mask_of(left - 8)
                    w[0], w[1], w[2], w[3] = w[0] & below, w[1] & above, w[2] & below, w[3] & above
                words.append(w)
                targets.append(target + to_row + column * (32 * tokens) + (to_chunk ^ (run << 4)))
                present.append(inside)
            for j in cutlass.range_constexpr(len(words)):
                w = words[j]
                turned = [pick_pairs(w[i], w[i + 1], which) for i in (0, 2) for which in order]
                if cutlass.const_expr(factor is not None):
                    for i in cutlass.range_constexpr(4):
                        w[i] = turned[i]
                    if factor != ONE_HALF2:
                        for i in cutlass.range_constexpr(4):
                            w[i] = rescale_codes(w[i], factor)
                    turned = [w[i] for i in range(4)]
                if present[j]:
                    effect([targets[j], *turned], "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
