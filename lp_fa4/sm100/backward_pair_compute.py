"""Compute warps of the two-CTA backward: P from scores, dS from P and dP, and every exponent of the operands.

Two warpgroups of four warps. A thread owns a row (key) and 64 queries, as in ``backward_compute``. Products are plain, so with the factors
of ``backward_pair_tables`` (all powers of two; k, v: of this warp's 32 keys, q, o: of a block of 32 queries)::

    p  = exp2(S * (softmax_scale * log2(e) * 2^k * 2^q) + a)    a = s - m + o - o_ref: the exponent of dO rides in P
    P8 = E4M3(p - c)                                             dV = 2^(o_ref - s) * P8^T dO8
    dS = p (dP * 2^v - D)                                        D in units of dO8's codes
    dK = 2^E * E4M3(dS * 2^(q - E))^T Q8                         one E for a sequence and head
    dQ = 2^F * E4M3(dS * 2^(k - F)) K8                           one F for a block of 32 queries

dS is coded twice, because neither product can take the other's exponents. E and F come from bounds, not from dS: no maximum is taken, and
nothing has to be agreed upon between the CTAs. The codes for dQ belong in the shared memory of the CTA that owns their queries: warpgroup
0's (queries 0 to 63) in CTA 0, warpgroup 1's in CTA 1. What belongs in the other CTA is staged, and a warp sends its 32 rows by a bulk
copy; a warp of that CTA (:func:`relay_role`) tells the leader when it has come.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import e4m3x4, effect, pinned
from lp_fa4.sm100.atoms import load_columns, store_columns
from lp_fa4.sm100.backward_atoms import BLOCKS
from lp_fa4.sm100.backward_compute import BLOCK, HALF, four, probabilities
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, TILE
from lp_fa4.sm100.backward_pair_sync import arrive_leader, cta_rank, in_cta
from lp_fa4.sm100.backward_plan import BLOCK_COLUMNS
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import arrive, wait, wait_tensor

ROW_BYTES = HALF
"""Bytes of a key's row of dS in shared memory: the codes of one CTA's queries."""


class Place(NamedTuple):
    """Where a compute thread is. ``group``: warpgroup. ``thread``: 0..127, the key's row. ``ds_row``: address of the first 16 bytes of its
    row of dS, in place or staged, swizzled as shared memory operands of 64 bytes are: the others follow by XOR."""

    kernel: Any
    bars: Any
    tmem: Any
    group: Int32
    thread: Int32
    ds_row: Int32


class Row(NamedTuple):
    """A thread's key: whether it exists, and the factors of its block of 32 keys (``scale``: on scores)."""

    live: Any
    scale: Float32
    key: Float32
    value: Float32


@cute.jit
def compute_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, group: Int32, thread: Int32):
    """Serve this CTA's half of the pair's items."""
    rank = cta_rank()
    spec, stages = kernel.spec, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0]) // 2
    index = Int32(cute.arch.block_idx()[0]) // 2
    rows = Int32(shared.ds_bytes.toint()) + rank * (TILE * ROW_BYTES)
    if group != rank:
        rows = Int32(shared.ds_sent.toint())
    here = Place(kernel, bars, tmem, group, thread, rows + thread * ROW_BYTES + (thread >> 1 & 3) * 16)
    turn = Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, 2 * n)
            if item.steps > 0:
                first = item.row + rank * TILE
                row = key_row(args, item, first, thread)
                for s in cutlass.range(item.steps, unroll=1):
                    now = turn + s
                    _, tile = query_step(spec, item, s)
                    # columns of this warpgroup that this key may see: low <= column < high
                    high = item.queries - tile * TILE - group * HALF
                    low, masked = Int32(0), tile * TILE + TILE > item.queries
                    if const_expr(spec.causal):
                        diagonal = first - item.keys + item.queries - tile * TILE
                        low = diagonal + thread - group * HALF
                        masked = masked or diagonal + (TILE - 1) > 0
                    if masked:
                        query_tile(here, shared, row, now, now % stages, low, high, True)
                    else:
                        query_tile(here, shared, row, now, now % stages, low, high, False)
                turn += item.steps
        index += step


@cute.jit
def key_row(args, item, first, thread):
    """This thread's row. A row past the sequence's end has no factors of its own; none of its values is used."""
    last = item.first_key // BLOCK + item.sequence + (item.keys - 1) // BLOCK
    group = cutlass.min(item.first_key // BLOCK + item.sequence + first // BLOCK + thread // BLOCK, last)
    key = args.key_factors[group, item.head, 0]
    return Row(first + thread < item.keys, args.scale * key, key, args.key_factors[group, item.head, 1])


@cute.jit
def query_tile(here, shared, row, now, stage, low, high, masked: cutlass.Constexpr):
    """P and dS of this thread's row and one query tile."""
    kernel, bars = here.kernel, here.bars
    bar, plan, stages = kernel.barriers, kernel.plan, kernel.tuning.stages
    phase = now & 1
    tmem = here.tmem + here.group * HALF
    wait_tensor(bars + bar.s_full, phase)
    r = load_columns(tmem, plan["S"].start, HALF, here.thread)
    cute.arch.fence_view_async_tmem_load()
    arrive_leader(bars + bar.s_read)
    wait(bars + bar.stat_full + stage, now // stages & 1)
    stats = shared.stats.iterator + (stage * (kernel.spec.stats * TILE) + here.group * HALF)
    factors = shared.factors.iterator + (stage * BLOCKS + 2 * here.group) * BLOCK_FACTORS
    for b in cutlass.range_constexpr(2):
        pair_probabilities(here, stats, factors, row, r, b, low, high, masked)
    cute.arch.fence_view_async_tmem_store()
    arrive_leader(bars + bar.p_ready)

    wait_tensor(bars + bar.dp_full, phase)
    ds_row = pinned(here.ds_row)
    for b in cutlass.range_constexpr(2):
        d = load_columns(tmem, plan["dP"].start + BLOCK * b, BLOCK, here.thread)
        cute.arch.fence_view_async_tmem_load()
        score_gradients(here, ds_row, tmem, stats, factors, row, r, d, b)
    cute.arch.fence_view_async_tmem_store()
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive(bars + bar.stat_empty + stage)
    send_rows(here, shared)
    arrive_leader(bars + bar.ds_ready)


@cute.jit
def send_rows(here, shared):
    """Bulk copy of this warp's rows of dS to the other CTA, whose ``ds_in`` counts the bytes, if they belong there."""
    rank, size = cta_rank(), 32 * ROW_BYTES
    if here.group != rank:
        cute.arch.sync_warp()
        offset = pinned(here.thread) // 32 * size
        source = Int32(shared.ds_sent.toint()) + offset
        target = in_cta(Int32(shared.ds_bytes.toint()) + rank * (TILE * ROW_BYTES) + offset, here.group)
        barrier = in_cta(Int32((here.bars + here.kernel.barriers.ds_in).toint()), here.group)
        text = f"cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], {size}, [$2];"
        with cute.arch.elect_one():
            effect([target, source, barrier], text, "r,r,r")


@cute.jit
def relay_role(kernel: cutlass.Constexpr, args, bars):
    """One warp: wait for the dS that the other CTA sends of each query tile, and tell the leader."""
    spec, bar = kernel.spec, kernel.barriers
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0]) // 2
    index = Int32(cute.arch.block_idx()[0]) // 2
    turn = Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, 2 * n)
            for s in cutlass.range(item.steps, unroll=1):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bars + bar.ds_in, TILE * ROW_BYTES)
                wait(bars + bar.ds_in, turn + s & 1)
                arrive_leader(bars + bar.ds_shared)
            turn += item.steps
        index += step


@cute.jit
def block_factors(factors, b: cutlass.Constexpr):
    """Factors of block ``b`` of 32 queries."""
    values = cute.make_rmem_tensor(BLOCK_FACTORS, Float32)
    cute.autovec_copy(cute.make_tensor((factors + b * BLOCK_FACTORS).align(16), cute.make_layout(BLOCK_FACTORS)), values)
    return values


@cute.jit
def pair_probabilities(here, stats, factors, row, r, b: cutlass.Constexpr, low, high, masked: cutlass.Constexpr):
    """``probabilities`` of block ``b``, whose scale holds the exponents of q and k, into the columns of this warpgroup's P."""
    plan = here.kernel.plan
    tmem = here.tmem + here.group * (plan["P1"].start - plan["P0"].start)
    probabilities(here, row.scale * block_factors(factors, b)[0], tmem, stats, r, b, low, high, masked)


@cute.jit
def score_gradients(here, ds_row, tmem, stats, factors, row, r, d, b: cutlass.Constexpr):
    """dS of block ``b``: its codes for dK to tensor memory, those for dQ to shared memory. A row past the sequence's end is 0: its key
    belongs to another sequence."""
    blocks = block_factors(factors, b)
    for_keys, for_queries = blocks[1], blocks[2] * row.key
    for j in cutlass.range_constexpr(0, BLOCK, 4):
        delta = four(stats, 1, BLOCK * b + j)
        for i in cutlass.range_constexpr(0, 4, 2):
            at = BLOCK * b + j + i
            pair = cute.arch.fma_packed_f32x2((d[j + i], d[j + i + 1]), (row.value, row.value), (delta[i], delta[i + 1]))
            d[j + i], d[j + i + 1] = cute.arch.mul_packed_f32x2(pair, (r[at], r[at + 1]))
    words = cute.make_rmem_tensor(BLOCK_COLUMNS, Float32)
    encode(d, for_keys, row.live, words)
    store_columns(tmem, here.kernel.plan["dS0"].start + BLOCK_COLUMNS * b, BLOCK_COLUMNS, here.thread, words)
    encode(d, for_queries, row.live, words)
    bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Int32), words.layout)
    for half in cutlass.range_constexpr(2):
        four_words = [bits[4 * half + i] for i in range(4)]
        effect([ds_row ^ (16 * (2 * b + half)), *four_words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")


@cute.jit
def encode(values, factor, live, words):
    """32 values times ``factor`` to E4M3, 0 in a row that is not ``live``."""
    bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Int32), words.layout)
    for i in cutlass.range_constexpr(BLOCK_COLUMNS):
        x, y = cute.arch.mul_packed_f32x2((values[4 * i], values[4 * i + 1]), (factor, factor))
        z, w = cute.arch.mul_packed_f32x2((values[4 * i + 2], values[4 * i + 3]), (factor, factor))
        word = e4m3x4(x, y, z, w)
        bits[i] = word if live else Int32(0)
