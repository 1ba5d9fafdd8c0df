"""The warp that finds tiles and loads their halves, and how CTAs that share the weight agree on tiles: the first of them draws for all."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fused_ops.norm_projection.config import DEPTH, HALF, ITEMS
from fused_ops.places import bulk_copy, first_sequence, place
from fused_ops.rings import turn
from fused_ops.rmsnorm_quantize.arithmetic import prefetch
from lp_fa4.common.numbers import inline_ptx

FIELDS = 6
"""int32 of an item: first token, end, limit, row, region, tile; the tile is ``MISSING`` for one that does not exist, ``OVER`` after the
last."""
MISSING, OVER = -1, -2
MAIL_FIELDS = 8
"""int32 of a tile's place as CTAs of a cluster send it: an item's, and the sequence."""
MAIL_BYTES = 4 * MAIL_FIELDS
MAILS = 2
"""Tiles that may be told ahead."""


@cute.jit
def bring_rows(spec: cutlass.Constexpr, io, s, bars):
    """The warp that finds tiles and loads their halves."""
    if const_expr(spec.cluster == 1):
        draw_tiles(spec, io, s, bars)
    else:
        if io.rank == 0:
            draw_tiles(spec, io, s, bars)
        else:
            take_tiles(spec, io, s, bars)


@cute.jit
def draw(spec: cutlass.Constexpr, io) -> Int32:
    """The first of as many tiles as a cluster has CTAs. Called by a whole warp."""
    drawn = Int32(0)
    if cute.arch.lane_idx() == 0:
        drawn = cute.arch.atomic_add(io.ticket.iterator, Int32(spec.cluster))
    return io.step + cute.arch.shuffle_sync(drawn, 0)


@cute.jit
def next_tile(spec: cutlass.Constexpr, io, tile: Int32, left: Int32, following: Int32, near: Int32):
    """(place, its number, ``MISSING`` if there is none, the state behind it) of the next tile that has a row."""
    token, end, limit, row, region, number = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(MISSING)
    while (number == MISSING) & (tile < io.tiles):
        token, end, limit, row, region, near = place(spec.dense, io.offsets, io.tokens, tile, near)
        if token < limit:
            number = tile
        tile, left = tile + 1, left - 1
        if left == 0:
            tile, left, following = following, Int32(spec.cluster), draw(spec, io)
    if number == MISSING:
        end, limit = Int32(0), Int32(0)
    return token, end, limit, row, region, number, tile, left, following, near


@cute.jit
def draw_tiles(spec: cutlass.Constexpr, io, s, bars):
    """Tiles are drawn, and those without a row passed over. The first CTA of a cluster draws for all of it, as many at a time as it has
    CTAs: the weight runs past all of them at once. Of the last tiles some do not exist."""
    stage, phase, slot, slot_phase, mail, mail_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(1)
    near = first_sequence(spec.dense, io.offsets, cutlass.min(io.first, io.tiles - 1))
    tile, left, following = Int32(io.first), Int32(spec.cluster), Int32(io.tiles)
    if tile < io.tiles:
        following = draw(spec, io)
    while tile < io.tiles:
        token, end, limit, row, region, number, tile, left, following, near = next_tile(spec, io, tile, left, following, near)
        if number != MISSING:
            mine = near
            if const_expr(spec.cluster > 1):
                cute.arch.mbarrier_wait(bars.mail_empty + mail, mail_phase)
                for r in cutlass.range_constexpr(1, spec.cluster):
                    *theirs, tile, left, following, near = next_tile(spec, io, tile, left, following, near)
                    send(s, bars, mail, (*theirs, near, near), r)
                mail, mail_phase = turn(mail, mail_phase, MAILS)
            stage, phase, slot, slot_phase = bring_tile(
                spec, io, s, bars, (token, end, limit, row, region, number), mine, stage, phase, slot, slot_phase
            )
    if const_expr(spec.cluster > 1):
        cute.arch.mbarrier_wait(bars.mail_empty + mail, mail_phase)
        for r in cutlass.range_constexpr(1, spec.cluster):
            send(s, bars, mail, (Int32(0),) * 5 + (Int32(OVER),) + (Int32(0),) * 2, r)
    tell_over(s, bars, slot, slot_phase)


@cute.jit
def take_tiles(spec: cutlass.Constexpr, io, s, bars):
    """The same of a CTA that is told its tiles by the first of its cluster."""
    stage, phase, slot, slot_phase, mail, mail_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(0), Int32(0)
    number = Int32(MISSING)
    while number != OVER:
        cute.arch.mbarrier_wait(bars.mail_full + mail, mail_phase)
        token, end, limit, row, region, number, near = (s.mail[i, mail] for i in range(7))
        cute.arch.fence_view_async_shared()  # what is sent there next is written behind this
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.mail_full + mail, MAIL_BYTES)
            cute.arch.mbarrier_arrive(bars.mail_empty + mail, 0)
        mail, mail_phase = turn(mail, mail_phase, MAILS)
        if number != OVER:
            stage, phase, slot, slot_phase = bring_tile(
                spec, io, s, bars, (token, end, limit, row, region, number), near, stage, phase, slot, slot_phase
            )
    tell_over(s, bars, slot, slot_phase)


@cute.jit
def send(s, bars, mail: Int32, values, rank: cutlass.Constexpr):
    """Eight numbers to another CTA's mail."""
    target = (s.mail.iterator + mail * MAIL_FIELDS).toint()
    text = (
        "{.reg .b32 d, b; mapa.shared::cluster.u32 d, $0, $1; mapa.shared::cluster.u32 b, $2, $1;\n"
        " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [d], {$3, $4, $5, $6}, [b];}"
    )
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(2):
            inline_ptx(
                None,
                [Int32(target + 16 * i), Int32(rank), Int32((bars.mail_full + mail).toint()), *values[4 * i : 4 * i + 4]],
                text,
                "r,r,r,r,r,r,r,~{memory}",
                side_effects=True,
            )


@cute.jit
def bring_tile(spec: cutlass.Constexpr, io, s, bars, fields, near: Int32, stage: Int32, phase: Int32, slot: Int32, slot_phase: Int32):
    """A tile's place and mean, and its halves; returns the places and phases behind them."""
    item, one, lane = s.item, cute.make_layout(1), cute.arch.lane_idx()
    x_atom, x_tensor = io.x
    mean = Int32(s.mean.toint())
    token, end = fields[0], fields[1]
    cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
    cute.arch.fence_view_async_shared()
    with cute.arch.elect_one():
        for i, value in enumerate(fields):
            item[i, slot] = value
        if const_expr(spec.centred):
            source = (io.means.iterator + cute.crd2idx((Int64(near), 0), io.means.layout)).toint()
            cute.arch.mbarrier_arrive_and_expect_tx(bars.item_full + slot, 4 * spec.contracted)
            bulk_copy(mean + slot * (4 * spec.contracted), source, 4 * spec.contracted, (bars.item_full + slot).toint())
        else:
            cute.arch.mbarrier_arrive(bars.item_full + slot)
    slot, slot_phase = turn(slot, slot_phase, ITEMS)
    if const_expr(spec.direct):
        for half in cutlass.range(2, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase)
            for i in cutlass.range_constexpr(HALF // 32):
                if token + HALF * half + 32 * i + lane < end:
                    prefetch(x_tensor, token + HALF * half + 32 * i + lane, spec.contracted)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars.full + stage)
            stage, phase = turn(stage, phase, spec.stages)
    else:
        x = cute.local_tile(cute.domain_offset((token, 0), x_tensor), (HALF, DEPTH), (None, None))
        target, source = cpasync.tma_partition(x_atom, 0, one, cute.group_modes(s.x, 0, 2), cute.group_modes(x, 0, 2))
        for half in cutlass.range(2, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase)
            cute.arch.fence_view_async_shared()  # rows there were written and read by threads
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, spec.stage_bytes)
            for k in cutlass.range_constexpr(spec.steps):
                cute.copy(x_atom, source[None, half, k], target[None, stage * spec.steps + k], tma_bar_ptr=bars.full + stage)
            stage, phase = turn(stage, phase, spec.stages)
    return stage, phase, slot, slot_phase


@cute.jit
def tell_over(s, bars, slot: Int32, slot_phase: Int32):
    """The item behind the last."""
    cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
    with cute.arch.elect_one():
        s.item[5, slot] = Int32(OVER)
        cute.arch.mbarrier_arrive(bars.item_full + slot)
