"""Load warp of the forward: TMA of Q, K, V payloads and bulk copies of their scale factors."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from lp_fa4.sm100.atoms import F8, SF_BYTES, load_scales, sides_of_copy
from lp_fa4.sm100.config import KEY_TILE, QUERY_TILE
from lp_fa4.sm100.sync import drain, ring_place, wait
from lp_fa4.sm100.work import NONE, fetch, hand_on, receive_item, request_item, same_queries, scale_tile


@cute.jit
def load_role(kernel: cutlass.Constexpr, args, shared, bars):
    """Walk this CTA's items: both Q tiles of an item (two items' worth of buffers), then K and V tile by tile. Shared queries are not
    loaded again for an item with the head and rows of the one before.

    Payloads are addressed at their jagged offset, scales at the 128-row tile rule (split addressing): a tile's payload may reach into the
    next sequence, its scales never do.
    """
    spec, bar = kernel.spec, kernel.barriers
    dim, scaled = spec.head_dim, spec.block_scaled
    stages = kernel.tuning.stages
    sf = SF_BYTES if scaled else 0
    qk, pv = kernel.atoms.qk().get_slice(0), kernel.atoms.pv().get_slice(0)
    count, step = args.state[0], Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0])
    done, base = Int32(0), Int32(0)
    turn, requests, anew = Int32(0), Int32(0), Int32(1)
    while index < count:
        item = fetch(spec, args.records, index)
        kv_head = item.head // spec.group
        g_q = cute.local_tile(cute.domain_offset((item.first_query, 0), args.q[None, None, item.head]), (QUERY_TILE, dim), (None, 0))
        g_k = cute.local_tile(cute.domain_offset((item.first_key, 0), args.k[None, None, kv_head]), (KEY_TILE, dim), (None, 0))
        g_v = cute.local_tile(cute.domain_offset((0, item.first_key), args.v[None, None, kv_head]), (dim, KEY_TILE), (0, None))
        s_q, g_q = sides_of_copy(args.tma_q, shared.q, qk.partition_A(g_q))
        s_k, g_k = sides_of_copy(args.tma_k, shared.k, qk.partition_B(g_k))
        s_v, g_v = sides_of_copy(args.tma_v, shared.v, pv.partition_B(g_v))

        fresh = True
        if const_expr(kernel.tuning.drawn):
            fresh = anew != 0
        elif const_expr(spec.shared_q):
            fresh = done == 0 or not same_queries(item, fetch(spec, args.records, cutlass.max(index - step, 0)))
        if fresh:
            buffer = done & 1
            q_full = bars + bar.q_full + buffer
            wait(bars + bar.q_empty + buffer, ((done >> 1) & 1) ^ 1)
            live = Int32(2) if item.steps1 > 0 else Int32(1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, live * (QUERY_TILE * dim + sf))
            tile = item.row // QUERY_TILE
            for i in cutlass.range_constexpr(2):
                if i < live:
                    cute.copy(args.tma_q, g_q[None, tile + i], s_q[None, 2 * buffer + i], tma_bar_ptr=q_full)
                    if const_expr(scaled):
                        first = scale_tile(spec, item.sequence, item.first_query)
                        load_scales(args.sf_q, first + tile + i, item.head, shared.sf_q, 2 * buffer + i, q_full)
            done += 1

        key_tile = item.first_key // KEY_TILE + item.sequence
        sf_k, sf_v = (args.sf_k, args.sf_v) if scaled else (None, None)
        for n in cutlass.range(item.steps, unroll=1):
            if const_expr(kernel.tuning.drawn):  # noqa: SIM102 (compile time outside, run time inside)
                if n == cutlass.max(item.steps - stages, 0):
                    request_item(kernel, shared, bars)
            stage, phase = ring_place(base + n, stages)
            free = phase ^ 1
            wait(bars + bar.k_empty + stage, free)
            load_tile(
                args.tma_k, g_k[None, n], s_k[None, stage], sf_k, key_tile + n, kv_head, shared.sf_k, stage, bars + bar.k_full + stage
            )
            wait(bars + bar.v_empty + stage, free)
            load_tile(
                args.tma_v, g_v[None, n], s_v[None, stage], sf_v, key_tile + n, kv_head, shared.sf_v, stage, bars + bar.v_full + stage
            )
        base += item.steps
        if const_expr(kernel.tuning.drawn):
            index, anew, requests = draw(kernel, args, shared, bars, item, count, turn, requests)
            turn += 1
        else:
            index += step
    drain(bars + bar.q_empty, done, 2)
    drain(bars + bar.k_empty, base, stages)
    drain(bars + bar.v_empty, base, stages)


@cute.jit
def draw(kernel: cutlass.Constexpr, args, shared, bars, item, count, turn, requests):
    """Receive the item after ``item``, asked for while that was being loaded, and hand it on; returns its index, whether its
    queries have to be loaded, and the requests so far."""
    spec = kernel.spec
    index, granted = receive_item(kernel, shared, bars, requests)
    requests += 1
    while granted != 0 and index >= count:  # a record past the list's end: its place is taken all the same
        request_item(kernel, shared, bars)
        index, granted = receive_item(kernel, shared, bars, requests)
        requests += 1
    if granted == 0:
        index = Int32(NONE)
    coming = fetch(spec, args.records, cutlass.min(index, count - 1))
    fresh = Int32(1)
    if const_expr(spec.shared_q):
        fresh = Int32(0) if same_queries(item, coming) else Int32(1)
    hand_on(kernel, shared, bars, turn, index, coming.steps0, coming.steps1, fresh)
    return index, fresh, requests


@cute.jit
def load_tile(atom, source, target, scales, scale_tile_index, head, scale_target, stage, barrier):
    """One payload tile and its scale atom into ``stage``; ``barrier`` completes when both are there. No scales where ``scales`` is None."""
    expected = cute.size_in_bytes(F8, target.layout) + (SF_BYTES if scales is not None else 0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
    cute.copy(atom, source, target, tma_bar_ptr=barrier)
    if const_expr(scales is not None):
        load_scales(scales, scale_tile_index, head, scale_target, stage, barrier)
