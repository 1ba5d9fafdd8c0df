"""The forward's producer: one warp that draws work items and keeps Q, K and V tiles coming (V^T, or V for ``forward_turn``)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from lp_fa4.common.numbers import exponent_of_byte, inline_ptx, scale_of_byte
from lp_fa4.sm90.forward_config import KEY_TILE, PLAIN_TILES, QUERY_TILE
from lp_fa4.sm90.quantize_beside import wait_for
from lp_fa4.sm90.worklist import FIELDS

ITEM = FIELDS + 3
"""int32 of a work item in shared memory: its record, then the static scale bytes of q, k and v (0 where not static)."""
EXPONENT_GAP = 80.0
"""Powers of two that V's exponent of a tile may lie under the largest before it in its item; what lies lower counts as zeros."""


def bulk_load(destination, source, count: int, barrier):
    """Start a bulk copy of ``count`` FP32 to shared memory; one thread calls it."""
    inline_ptx(
        None,
        [Int32(destination.toint()), source.toint(), Int32(4 * count), Int32(barrier.toint())],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        side_effects=True,
    )


@cute.jit
def key_tiles(spec: cutlass.Constexpr, row0: Int32, queries: Int32, keys: Int32, split: Int32):
    """(first tile, number of tiles, at least 1) of a work item; both roles must agree."""
    first, last = Int32(0), cute.ceil_div(keys, KEY_TILE)
    if const_expr(spec.causal):
        visible = cutlass.min(row0 + QUERY_TILE, queries) + keys - queries
        last = cutlass.min(last, cute.ceil_div(cutlass.max(visible, 0), KEY_TILE))
    if const_expr(spec.split_keys > 0):
        first = split * (spec.split_keys // KEY_TILE)
        last = cutlass.min(last, first + spec.split_keys // KEY_TILE)
    return first, cutlass.max(last - first, 1)


@cute.jit
def tile_scales(spec: cutlass.Constexpr, t, kv_head: Int32, row: Int32, tile: Int32, last: Int32, out: cute.Tensor):
    """FP32 of a key tile's four groups: K's factors ``2**e`` in ``out[0:4]``, V's exponents in ``out[4:8]`` (one each for blocks of 128).

    Groups past the sequence's ``last`` repeat it.
    """
    k_scale, v_scale = t.k_scale, t.v_scale
    for g in cutlass.range_constexpr(4):
        group = row + cutlass.min(4 * tile + g, last)
        if const_expr(spec.key_scale == 32 or (spec.key_scale > 0 and g == 0)):
            out[g] = scale_of_byte(Int32(k_scale[group, kv_head]))
        if const_expr(spec.value_scale == 32 or (spec.value_scale > 0 and g == 0)):
            exponent = exponent_of_byte(Int32(v_scale[group, kv_head]))
            # a block of zeros (byte 0) must not push P out of FP32, whose sum still needs it
            out[4 + g] = Float32(-100.0) if exponent < -100.0 else exponent


@cute.jit
def raised_exponent(spec: cutlass.Constexpr, exponents: cute.Tensor, top: cute.Tensor, counts):
    """Whether V's one exponent of a tile lies so far under the largest of its item's before it that O, kept in units of the last
    added tile's, would leave FP32: it is raised, and the tile of V must be cleared. NaN stays. ``counts``: whether it is the item's."""
    low = cutlass.Boolean(False)
    if const_expr(spec.value_scale == 128):
        lowest = top[0] - EXPONENT_GAP
        low = exponents[4] < lowest
        if low:
            exponents[4] = lowest
        if counts:
            top[0] = cute.arch.fmax(top[0], exponents[4])
    return low


@cute.jit
def clear_tail(stage_address: Int32, valid: Int32, head_dim: cutlass.Constexpr):
    """Zero the keys of a V^T stage from the group after ``valid`` on: they belong to other sequences, whose NaN codes
    would meet P = 0. Called by one warp."""
    lane = cute.arch.lane_idx()
    first = cutlass.max(cute.ceil_div(valid, 32), 0) * 2  # 16-byte chunks
    zeros = cute.make_rmem_tensor(4, Uint32)
    zeros.fill(0)
    for row in cutlass.range(lane, head_dim, 32, unroll=1):
        for chunk in cutlass.range(first, KEY_TILE // 16, unroll=1):
            address = stage_address + row * KEY_TILE + ((chunk ^ (row % 8)) << 4)
            pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(4)))


@cute.jit
def produce(spec: cutlass.Constexpr, t, s, bars):
    """Producer loop. ``t``: TMA atoms, global tensors; ``s``: shared tensors; ``bars``: barriers (see ``forward_kernel``)."""
    head_dim, stages = spec.head_dim, spec.stages
    lane = cute.arch.lane_idx()
    one, items, exponents, valids = cute.make_layout(1), s.item, s.exponents, s.valid
    v_address, v_shared = Int32(s.v.iterator.toint()), s.plain if spec.turns else s.v
    qi, qp, ki, kp, fp = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0)
    # V as it is: buffer of the next tile, and the stage (and phase) that the tile before in it was turned into
    buffer, ti, tp = Int32(0), Int32(stages - PLAIN_TILES), Int32(1)
    count = t.state[0]
    index = Int32(0)
    if lane == 0:
        index = cute.arch.atomic_add(t.state.iterator + 1, Int32(1), sem="relaxed", scope="gpu")
    index = cute.arch.shuffle_sync(index, 0)
    while index < count:
        item = cute.make_rmem_tensor(FIELDS, Int32)
        cute.autovec_copy(t.records[index, None], item)
        b, head, row0, first_row = item[0], item[1], item[2], item[3]
        queries, first_key, keys, split = item[4], item[5], item[6], item[7]
        kv_head = head // spec.group
        scale_row, last_row = first_key // 32 + b, cutlass.max(cute.ceil_div(keys, 32) - 1, 0)
        first, tiles = key_tiles(spec, row0, queries, keys, split)
        q = cute.local_tile(cute.domain_offset((first_row + row0, 0), t.q[None, None, head]), (QUERY_TILE, head_dim), (0, 0))
        k = cute.local_tile(cute.domain_offset((first_key, 0), t.k[None, None, kv_head]), (KEY_TILE, head_dim), (None, 0))
        if const_expr(spec.turns):
            v = cute.local_tile(cute.domain_offset((first_key, 0), t.v[None, None, kv_head]), (KEY_TILE, head_dim), (None, 0))
        else:
            position = 32 * (first_key // 32 + b)
            v = cute.local_tile(cute.domain_offset((0, position), t.v[None, None, kv_head]), (head_dim, KEY_TILE), (0, None))
        q_smem, q_gmem = cpasync.tma_partition(t.q_atom, 0, one, cute.group_modes(s.q, 0, 2), cute.group_modes(q, 0, 2))
        k_smem, k_gmem = cpasync.tma_partition(t.k_atom, 0, one, cute.group_modes(s.k, 0, 2), cute.group_modes(k, 0, 2))
        v_smem, v_gmem = cpasync.tma_partition(t.v_atom, 0, one, cute.group_modes(v_shared, 0, 2), cute.group_modes(v, 0, 2))
        if const_expr(spec.waits):
            wait_for((t.flags.iterator + b * t.heads + head).toint(), Int32(1))
        static = cute.make_rmem_tensor(3, Int32)
        static.fill(0)
        if const_expr(spec.query_static):
            static[0] = Int32(t.q_scale[0, head])
        if const_expr(spec.key_scale == 0):
            static[1] = Int32(t.k_scale[0, kv_head])
        if const_expr(spec.value_scale == 0):
            static[2] = Int32(t.v_scale[0, kv_head])
        cute.arch.mbarrier_wait(bars.q_empty + qi, qp)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(FIELDS):
                items[i, qi] = item[i]
            for i in cutlass.range_constexpr(3):
                items[FIELDS + i, qi] = static[i]
            cute.arch.mbarrier_arrive(bars.q_full + qi)
            cute.arch.mbarrier_arrive_and_expect_tx(bars.q_full + qi, (QUERY_TILE + 4 * spec.vectors) * head_dim)
            for i in cutlass.range_constexpr(spec.vectors):
                source = t.vectors[i]
                bulk_load(
                    s.vectors.iterator + (qi * spec.vectors + i) * head_dim,
                    source.iterator + cute.crd2idx((b, kv_head, 0), source.layout),
                    head_dim,
                    bars.q_full + qi,
                )
        cute.copy(t.q_atom, q_gmem, q_smem[None, qi], tma_bar_ptr=bars.q_full + qi)
        qi = qi + 1
        if qi == 2:
            qi, qp = Int32(0), qp ^ 1
        if lane == 0:  # drawn early: the next item's number arrives while this one's tiles are loaded
            index = cute.arch.atomic_add(t.state.iterator + 1, Int32(1), sem="relaxed", scope="gpu")
        extra = Int32(0)
        if const_expr(spec.resumes):
            extra = Int32(1) if split > 0 else Int32(0)
        top = cute.make_rmem_tensor(1, Float32)
        top[0] = -Float32.inf
        for i in cutlass.range(tiles + extra, unroll=1):
            tile = first + i - extra
            if const_expr(spec.resumes):
                tile = Int32(0) if i < extra else tile
            scales = cute.make_rmem_tensor(8, Float32)
            scales.fill(0.0)
            if const_expr(spec.scaled):
                tile_scales(spec, t, kv_head, scale_row, tile, last_row, scales)
            cleared = raised_exponent(spec, scales, top, i >= extra)
            cute.arch.mbarrier_wait(bars.k_empty + ki, kp)
            with cute.arch.elect_one():
                if const_expr(spec.scaled):
                    for g in cutlass.range_constexpr(8):
                        exponents[g, ki] = scales[g]
                    cute.arch.mbarrier_arrive(bars.k_full + ki)
                cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full + ki, KEY_TILE * head_dim)
            cute.copy(t.k_atom, k_gmem[None, tile], k_smem[None, ki], tma_bar_ptr=bars.k_full + ki)
            valid = Int32(0) if cleared else keys - tile * KEY_TILE
            if const_expr(spec.turns):
                cute.arch.mbarrier_wait(bars.v_full + ti, tp)
                with cute.arch.elect_one():
                    valids[buffer] = cutlass.max(valid, 0)
                    cute.arch.mbarrier_arrive_and_expect_tx(bars.plain_full + buffer, KEY_TILE * head_dim)
                cute.copy(t.v_atom, v_gmem[None, tile], v_smem[None, buffer], tma_bar_ptr=bars.plain_full + buffer)
                buffer = buffer + 1
                if buffer == PLAIN_TILES:
                    buffer = Int32(0)
                ti = ti + 1
                if ti == stages:
                    ti, tp = Int32(0), tp ^ 1
            else:
                cute.arch.mbarrier_wait(bars.v_empty + ki, kp)
                if valid > KEY_TILE - 32:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.v_full + ki, KEY_TILE * head_dim)
                    cute.copy(t.v_atom, v_gmem[None, tile], v_smem[None, ki], tma_bar_ptr=bars.v_full + ki)
                else:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars.tail, KEY_TILE * head_dim)
                    cute.copy(t.v_atom, v_gmem[None, tile], v_smem[None, ki], tma_bar_ptr=bars.tail)
                    cute.arch.mbarrier_wait(bars.tail, fp)
                    fp = fp ^ 1
                    stage = v_address + ki * (head_dim * KEY_TILE)
                    clear_tail(stage, valid, head_dim)
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(bars.v_full + ki)
            ki = ki + 1
            if ki == stages:
                ki, kp = Int32(0), kp ^ 1
        index = cute.arch.shuffle_sync(index, 0)
    cute.arch.mbarrier_wait(bars.q_empty + qi, qp)
    with cute.arch.elect_one():
        items[0, qi] = Int32(-1)
        for _ in cutlass.range_constexpr(2):
            cute.arch.mbarrier_arrive(bars.q_full + qi)
    if const_expr(spec.turns):
        cute.arch.mbarrier_wait(bars.v_full + ti, tp)
        with cute.arch.elect_one():
            valids[buffer] = Int32(-1)
            cute.arch.mbarrier_arrive(bars.plain_full + buffer)
    if const_expr(spec.waits):  # what comes after this launch comes after the one beside it
        cute.arch.griddepcontrol_wait()
