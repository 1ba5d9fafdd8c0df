"""The roles of the Hopper projection kernel: one producer warp, two warpgroups that compute in turn.

Each warpgroup computes its half (64 tokens) of every 128-token tile, or every other 64 rows (``GemmSpec.flat``: neither role has to be
told which), one warpgroup's products beside the other's epilogue: named barriers pass the turn. Within a turn, the tensor core sums a chunk
of K for one part of the weight while the sums of the chunk before are scaled and added in FP32 (two sets of partial sums in registers).
Sums in FP16 need no promotion: rows of x go to registers before the turn, which is nothing but products then, and arithmetic beside FP16
sums runs at 0.7 of its speed instead of 0.4. Which it is, a CTA finds out from its weight (``sums_fit``); both loops are compiled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cutlass_dsl import T

from fused_ops.gemm_quantize.config import ITEM_SLOTS, LARGEST_ROW
from fused_ops.gemm_quantize.sm90_epilogue import HALF, MEET, block_of, finish, finish_direct, finish_halves
from fused_ops.places import first_sequence, place
from fused_ops.rings import release, turn
from fused_ops.rmsnorm_quantize.arithmetic import bf16x2_mul
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.halves import add2, half_of
from lp_fa4.common.matrices import load_matrices
from lp_fa4.common.numbers import bits_of, inline_ptx, inverse_of_byte, scale_of_byte, warp_max
from lp_fa4.common.sequence import GROUP
from lp_fa4.sm90.forward_halves import magnitudes
from lp_fa4.sm90.wgmma import described, low_half, start

FIELDS = 5
"""int32 of an item in shared memory: first token, sequence's end, end of what is written, first row of scales, rows of scales."""

TURN = 1  # first of two named barriers
LARGEST_FACTOR = 2.0**80
"""Sums of up to 2^15 pairs of E4M3 of up to 448 stay in FP32 under it."""
LARGEST_FOLDED = 2.0**24
"""Inverse of an exponent that a BF16 weight is multiplied by."""


@cute.jit
def bring_weights(spec: cutlass.Constexpr, t, s, bars):
    """Start loading the CTA's weights. Called by one warp."""
    one = cute.make_layout(1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bars.w_full, spec.weight_bytes)
    for p in cutlass.range_constexpr(spec.parts):
        w_atom, w_tensor = t.w[p]
        w = cute.local_tile(w_tensor, (spec.column_tile, spec.stage_columns), (t.column, None))
        w_target, w_source = cpasync.tma_partition(w_atom, 0, one, cute.group_modes(s.w, 0, 2), cute.group_modes(w, 0, 2))
        for k in cutlass.range_constexpr(spec.steps):
            cute.copy(w_atom, w_source[None, k], w_target[None, k * spec.parts + p], tma_bar_ptr=bars.w_full)


@cute.jit
def produce(spec: cutlass.Constexpr, t, s, bars):
    """Load 64 rows of x at a time, K by K, for one warpgroup and the other. Called by one warp.

    Tiles that hold no token and no scale are passed over; the others' places, and their factors of x, go through shared memory.
    """
    lane = cute.arch.lane_idx()
    item, x_factors = s.item, s.x_factors
    stage, phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(1)
    if const_expr(spec.flat):
        for half in cutlass.range(t.first, t.tiles, t.step, unroll=1):
            stage, phase = bring(spec, t, s, bars, HALF * half, 1, stage, phase)
    else:
        near = first_sequence(spec.dense, t.offsets, t.first)
        for tile in cutlass.range(t.first, t.tiles, t.step, unroll=1):
            token, end, limit, row, region, near = place(spec.dense, t.offsets, t.tokens, tile, near)
            if (token < limit) | (region > 0):
                cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
                if const_expr(spec.x_tokens > 0):
                    for i in cutlass.range(lane, 4 * spec.x_blocks, 32, unroll=1):
                        group = i // spec.x_blocks
                        factor = Float32(0.0)
                        if token + GROUP * group < end:
                            factor = scale_of_byte(Int32(t.x_scale[row + group, i % spec.x_blocks]))
                        x_factors[i, slot] = factor
                    cute.arch.sync_warp()
                with cute.arch.elect_one():
                    for i, value in enumerate((token, end, limit, row, region)):
                        item[i, slot] = value
                    cute.arch.mbarrier_arrive(bars.item_full + slot)
                slot, slot_phase = turn(slot, slot_phase, ITEM_SLOTS)
                stage, phase = bring(spec, t, s, bars, token, 2, stage, phase)
        cute.arch.mbarrier_wait(bars.item_empty + slot, slot_phase)
        with cute.arch.elect_one():
            item[0, slot] = Int32(-1)
            cute.arch.mbarrier_arrive(bars.item_full + slot)


@cute.jit
def bring(spec: cutlass.Constexpr, t, s, bars, token: Int32, halves: cutlass.Constexpr, stage: Int32, phase: Int32):
    """Load ``halves`` half tiles of x from row ``token`` on, stage by stage. Returns the next stage's place."""
    x_atom, x_tensor = t.x
    x = cute.local_tile(cute.domain_offset((token, 0), x_tensor), (HALF, spec.stage_columns), (None, None))
    sharing = cute.make_layout(spec.cluster)
    x_target, x_source = cpasync.tma_partition(x_atom, t.rank, sharing, cute.group_modes(s.x, 0, 2), cute.group_modes(x, 0, 2))
    for half in cutlass.range(halves, unroll=1):
        for k in cutlass.range(spec.rounds, unroll=1):
            cute.arch.mbarrier_wait(bars.empty + stage, phase)
            if const_expr(spec.halves):
                cute.arch.fence_view_async_shared()  # threads may have read what was there
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars.full + stage, spec.stage_bytes)
            for i in cutlass.range_constexpr(spec.slabs):
                source, target = x_source[None, half, spec.slabs * k + i], x_target[None, spec.slabs * stage + i]
                if const_expr(spec.cluster > 1):  # half of it, to both
                    cute.copy(x_atom, source, target, tma_bar_ptr=bars.full + stage, mcast_mask=cutlass.Int16(3))
                else:
                    cute.copy(x_atom, source, target, tma_bar_ptr=bars.full + stage)
            stage, phase = turn(stage, phase, spec.stages)
    return stage, phase


@cute.jit
def fill_tables(spec: cutlass.Constexpr, t, s):
    """The CTA's factors of w, those of a static x in them, by all threads: ``w_factors[n, chunk, part]``, n counts 32 columns; and the
    inverse of given exponents ``inverse[n]``, which one CTA also writes as the result's."""
    tid, _, _ = cute.arch.thread_idx()
    tile_blocks = spec.column_tile // 32
    w_factors, inverse = s.w_factors, s.inverse
    if const_expr(spec.scaled):
        for entry in cutlass.range(tid, spec.w_table, t.threads):
            i = cutlass.min(entry, tile_blocks * spec.chunks * spec.scale_parts - 1)
            n, chunk = i % tile_blocks, i // tile_blocks % spec.chunks
            k = chunk * spec.chunk
            row = Int32(0) if const_expr(spec.w_static) else cutlass.min(t.column * tile_blocks + n, spec.columns // 32 - 1)
            byte = Int32(t.w_scale[0][row, k // spec.w_width])
            if const_expr(spec.scale_parts == 2):  # noqa: SIM102 - one is decided at compile time
                if i // (tile_blocks * spec.chunks) == 1:
                    byte = Int32(t.w_scale[1][row, k // spec.w_width])
            factor = scale_of_byte(byte)
            if const_expr(spec.x_tokens == 0):
                factor = factor * scale_of_byte(Int32(t.x_scale[0, k // spec.x_width]))
            w_factors[entry] = factor
    if const_expr(spec.static):
        if tid < tile_blocks:
            column = cutlass.min(t.column * spec.column_tile + 32 * tid, spec.columns - 32)
            inverse[tid] = inverse_of_byte(Int32(t.given[0, column // spec.width]))
        if t.first + t.column == 0:
            given, scales = t.given, t.scales
            for i in cutlass.range(tid, spec.columns // spec.width, t.threads, unroll=1):
                scales[0, i] = given[0, i]


@cute.jit
def fold_inverse(spec: cutlass.Constexpr, t, s) -> Int32:
    """Multiply the inverse of the result's exponents into w's factors, by all threads: sums then come out as they are to be rounded.

    Powers of two: no rounding changes. Returns 0; or 1, and nothing is multiplied, where a sum could pass FP32's end on the way, which the
    epilogue has to see.
    """
    tid, _, _ = cute.arch.thread_idx()
    w_factors, inverse = s.w_factors, s.inverse
    tile_blocks = spec.column_tile // 32
    large = Int32(0)
    for i in cutlass.range(tid % 32, spec.w_table, 32, unroll=1):
        if w_factors[i] * inverse[i % tile_blocks] > LARGEST_FACTOR:
            large = Int32(1)
    large = warp_max(large)
    cute.arch.sync_threads()
    if large == 0:
        for i in cutlass.range(tid, spec.w_table, t.threads, unroll=1):
            w_factors[i] = w_factors[i] * inverse[i % tile_blocks]
    cute.arch.sync_threads()
    return large


@cute.jit
def fold_into_weight(spec: cutlass.Constexpr, s) -> Int32:
    """Multiply the inverse of the result's exponents into the CTA's BF16 weight, in shared memory, by all computing threads.

    Powers of two from 1 to ``LARGEST_FOLDED``: no rounding changes, and a sum that passes FP32's end would have passed it as a code, if not
    one of terms past 2^104 that cancel. Returns 0; or 1, and nothing is multiplied, where one is not, or an element would pass BF16's end.
    """
    tid, _, _ = cute.arch.thread_idx()
    tid, inverse = tid - 128, s.inverse
    count = spec.steps * spec.column_tile * 8  # of 16 bytes; whatever the swizzle, they are in their row
    large = Int32(0)
    for n in cutlass.range_constexpr(spec.column_tile // 32):
        if (inverse[n] < 1.0) | (inverse[n] > LARGEST_FOLDED):
            large = Int32(1)
    for i in cutlass.range(tid, count, 256, unroll=4):
        words = folded_words(spec, s, i)
        for j in cutlass.range_constexpr(4):
            large = large | ((words[j] & Int32(0x7F807F80)) + Int32(0x00800080)) & Int32(-0x7FFF8000)  # a half of exponent 255
    large = any_of(s, large)
    if large == 0:
        for i in cutlass.range(tid, count, 256, unroll=4):
            words = folded_words(spec, s, i)
            cute.autovec_copy(words, words_of_weight(s, i))
        cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=MEET, number_of_threads=256)
    return large


@cute.jit
def any_of(s, flag: Int32) -> Int32:
    """1 if ``flag`` is not 0 of one of the computing threads, else 0. Called by all of them, and by nobody who has maxima to exchange."""
    tid, _, _ = cute.arch.thread_idx()
    met = cute.make_tensor(s.maxima.iterator, cute.make_layout(8))
    flag = Int32(1) if cute.arch.vote_any_sync(flag != 0) else Int32(0)
    if tid % 32 == 0:
        met[tid // 32 - 4] = flag
    cute.arch.barrier(barrier_id=MEET, number_of_threads=256)
    for w in cutlass.range_constexpr(8):
        flag = flag | met[w]
    return flag


def words_of_weight(s, i):
    """Four words of the weight in shared memory."""
    at = cute.make_ptr(Int32, Int32(s.w_at.toint()) + 16 * i, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(at, cute.make_layout(4))


@cute.jit
def folded_words(spec: cutlass.Constexpr, s, i: Int32):
    """Words ``4 i`` … of the weight over the exponents."""
    words, inverse = cute.make_rmem_tensor(4, Int32), s.inverse
    cute.autovec_copy(words_of_weight(s, i), words)
    row = i // 8 % spec.column_tile
    block = row // 64 * 2 + row % 8 // 4 if const_expr(spec.run == 64) else row // 32  # in the order of ``sm90.GemmQuantize.ordered``
    high = bits_of(inverse[block]) & Int32(-65536)  # BF16 of a power of two, twice
    factor = high | ((high >> 16) & 0xFFFF)
    for j in cutlass.range_constexpr(4):
        words[j] = bf16x2_mul(words[j], factor)
    return words


@cute.jit
def free_stage(spec: cutlass.Constexpr, bars, stage, peer):
    """This warp's products have read a stage of x: whoever writes to it, here and in the other CTA of a pair, may fill it again."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.empty + stage)
        if const_expr(spec.cluster > 1):
            cute.arch.mbarrier_arrive(bars.empty + stage, peer)


@cute.jit
def promote(spec: cutlass.Constexpr, s, unit: cutlass.Constexpr, slot: Int32, group: Int32, partial: cute.Tensor, total: cute.Tensor):
    """``total += partial * factor`` of unit ``unit``; the first one starts the total."""
    k, part = unit // spec.scale_parts, unit % spec.scale_parts
    tile_blocks = spec.column_tile // 32
    w_factors, x_factors = s.w_factors, s.x_factors
    row_factor = Float32(1.0)
    if const_expr(spec.x_tokens > 0):
        row_factor = x_factors[group * spec.x_blocks + k * spec.chunk // spec.x_width, slot]
    for n in cutlass.range_constexpr(spec.column_tile // 32):
        block = block_of(spec, n) if const_expr(spec.direct) else n
        factor = w_factors[block + tile_blocks * (k + spec.chunks * part)]
        if const_expr(spec.x_tokens > 0):
            factor = factor * row_factor
        for i in cutlass.range_constexpr(16 * n, 16 * n + 16):
            total[i] = partial[i] * factor + total[i] if const_expr(unit > 0) else scaled_now(partial[i], factor)


def scaled_now(x, factor):
    """``x * factor``, before what comes behind it: left to itself the compiler of 32 x 32 blocks multiplies later, and copies sums that the
    tensor core is still adding up."""
    return Float32(inline_ptx(T.f32(), [x, factor], "mul.rn.f32 $0, $1, $2;", "=f,f,f", side_effects=True))


@cute.jit
def multiply_scaled(spec: cutlass.Constexpr, s, bars, c, total: cute.Tensor, partials, slot: Int32, stage: Int32, phase: Int32):
    """Products of a half tile, chunk by chunk and part by part. Returns the place of the last stage; the last unit's partial sums are still
    to be waited for and added."""
    # A unit is one part of one chunk, or both where they have one scale: the low part first, while sums are as small as its own products,
    # for what an instruction loses is a share of the largest of its terms and its running sum. Chunks do not cross stages.
    per_stage = spec.stage_columns // spec.chunk
    instructions = spec.chunk // 32
    together = spec.parts // spec.scale_parts
    units = spec.chunks * spec.scale_parts
    previous = stage
    for u in cutlass.range_constexpr(units):
        k, part = u // spec.scale_parts, u % spec.scale_parts
        within = k % per_stage
        if const_expr(within == 0 and part == 0):
            if const_expr(k > 0):
                previous = stage
                stage, phase = turn(stage, phase, spec.stages)
            cute.arch.mbarrier_wait(bars.full + stage, phase)
        last = min(within * instructions + instructions, -(-(spec.contracted - (k - within) * spec.chunk) // 32))
        warpgroup.fence()
        for p in cutlass.range_constexpr(together):
            w = c.w[None, None, None, (k // per_stage) * spec.parts + part + together - 1 - p]
            start(c.mma, partials[u % spec.sets], c.x[None, None, None, stage], w, tuple(range(within * instructions, last)), p == 0)
        warpgroup.commit_group()
        done = u - spec.sets + 1  # of one set of partial sums this unit, of two the one before
        if const_expr(done >= 0):
            warpgroup.wait_group(spec.sets - 1)
            if const_expr(u > 0 and within == 0 and part == 0):
                free_stage(spec, bars, previous, c.peer)
            promote(spec, s, done, slot, c.group, partials[done % spec.sets], total)
    return stage, phase


@cute.jit
def multiply_plain(spec: cutlass.Constexpr, bars, c, total: cute.Tensor, stage: Int32, phase: Int32):
    """Products of a half tile in one accumulator. Returns the place of the last stage; the last group is still to be waited for."""
    # A loop: unrolled, all descriptors of a row are computed before it, more than there are uniform registers.
    plain_stage(spec, bars, c, total, stage, phase, Int32(0), True)
    for k in cutlass.range(1, spec.rounds, unroll=1):
        previous = stage
        stage, phase = turn(stage, phase, spec.stages)
        plain_stage(spec, bars, c, total, stage, phase, k, False)
        warpgroup.wait_group(1)
        free_stage(spec, bars, previous, c.peer)
    return stage, phase


@cute.jit
def plain_stage(spec: cutlass.Constexpr, bars, c, total: cute.Tensor, stage: Int32, phase: Int32, k: Int32, first: cutlass.Constexpr):
    """Start the products of a stage. What x does not fill of a row's last one is 0 in both operands."""
    cute.arch.mbarrier_wait(bars.full + stage, phase)
    warpgroup.fence()
    for i in cutlass.range_constexpr(spec.slabs):
        x, w = c.x[None, None, None, spec.slabs * stage + i], c.w[None, None, None, spec.slabs * k + i]
        start(c.mma, total, x, w, (0, 1, 2, 3), first and i == 0)
    warpgroup.commit_group()


@cute.jit
def gather(spec: cutlass.Constexpr, s, bars, c, stage: Int32, phase: Int32):
    """Rows of a half tile to registers, as products' left operands. Returns them and the place of the last stage."""
    tid, _, _ = cute.arch.thread_idx()
    lane = tid % 32
    row = tid % 128 // 32 * 16 + lane % 16
    first = Int32(s.x_at.toint()) + row * 128
    rows = [c.mma.make_fragment_A(c.mma.partition_shape_A((HALF, spec.stage_columns))) for _ in range(spec.steps)]
    for k in cutlass.range_constexpr(spec.rounds):
        if const_expr(k > 0):
            stage, phase = turn(stage, phase, spec.stages)
        cute.arch.mbarrier_wait(bars.full + stage, phase)
        a = cute.recast_tensor(rows[k], Int32)
        for i in cutlass.range_constexpr(4):
            words = load_matrices(first + stage * spec.stage_bytes + 16 * ((lane // 16 + 2 * i) ^ (row % 8)))
            for j in cutlass.range_constexpr(4):
                a[4 * i + j] = words[j]
        free_stage(spec, bars, stage, c.peer)
    return rows, stage, phase


@cute.jit
def multiply_registers(spec: cutlass.Constexpr, s, c, rows, total: cute.Tensor):
    """Start all products of a half tile, in one accumulator. What x does not fill of a row's last stage is 0."""
    low, step = low_half(Int32(s.w_at.toint())), 128 * spec.column_tile // 16
    warpgroup.fence()
    atom = cute.make_mma_atom(c.mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(spec.steps):
        for part in cutlass.range_constexpr(spec.parts - 1, -1, -1):
            for i in cutlass.range_constexpr(4):
                place = low + step * (spec.parts * k + part) + 2 * i
                w = cute.make_tensor(described(place, 128), c.w[None, None, i, 0].layout)
                cute.gemm(atom, total, rows[k][None, None, i], w, total)
                atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def advance(spec: cutlass.Constexpr, stage: Int32, phase: Int32, count: cutlass.Constexpr):
    """The ring's place ``count`` stages on."""
    stage = stage + count % spec.stages
    phase = phase ^ (count // spec.stages % 2)
    if stage >= spec.stages:
        stage, phase = stage - spec.stages, phase ^ 1
    return stage, phase


@cute.jit
def sums_fit(spec: cutlass.Constexpr, s, careful: Int32) -> Int32:
    """1 where FP16 holds all sums of this CTA, whatever the codes of x: one factor, which FP16 has, for all of K, and no row of the weight
    whose magnitudes add up to more than ``LARGEST_ROW``. By all computing threads."""
    tid, _, _ = cute.arch.thread_idx()
    tid, w_factors, tile_blocks = tid - 128, s.w_factors, spec.column_tile // 32
    fits = careful == 0
    for n in cutlass.range_constexpr(tile_blocks):
        fits = fits & (w_factors[n] >= 2.0**-24) & (w_factors[n] <= 2.0**15)
        for k in cutlass.range_constexpr(1, spec.chunks):
            fits = fits & (w_factors[n] == w_factors[n + tile_blocks * k])
    # Two threads a row, eight of a warp without bank conflicts. 32 magnitudes are added up in FP16, their sums in FP32.
    for row in cutlass.range(tid // 2, spec.column_tile, 128, unroll=1):
        total = Float32(0.0)
        for i in cutlass.range(2 * spec.steps * spec.parts, unroll=1):
            sums = Int32(0)
            for j in cutlass.range_constexpr(2):
                chunk = (4 * (tid % 2) + 2 * (i % 2) + j + row) % 8
                words = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(words_of_weight(s, (i // 2 * spec.column_tile + row) * 8 + chunk), words)
                for k in cutlass.range_constexpr(8):
                    sums = add2(sums, magnitudes(words[k // 2], k % 2))
            total = total + (half_of(sums, 0) + half_of(sums, 1))
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        fits = fits & (total <= LARGEST_ROW)  # not of a NaN
    return any_of(s, Int32(0) if fits else Int32(1)) ^ 1


@cute.jit
def consume(spec: cutlass.Constexpr, t, s, bars, mma, halves, careful: Int32):
    """Consumer loop of one thread. ``halves``: the products whose sums are FP16. ``careful``: see ``fold_inverse`` and
    ``fold_into_weight``."""
    cute.arch.mbarrier_wait(bars.w_full, 0)
    if const_expr(spec.wide):
        careful = fold_into_weight(spec, s)
    if const_expr(spec.halves):
        if sums_fit(spec, s, careful) != 0:
            walk(spec, t, s, bars, halves, careful, True)
        else:
            walk(spec, t, s, bars, mma, careful, False)
    else:
        walk(spec, t, s, bars, mma, careful, False)


@cute.jit
def take_turn(spec: cutlass.Constexpr, wg):
    """Wait until the other warpgroup's products are on their way."""
    if const_expr(spec.turns):
        cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)


@cute.jit
def pass_turn(spec: cutlass.Constexpr, wg):
    """The other warpgroup may start its products."""
    if const_expr(spec.turns):
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - wg, number_of_threads=256)


@cute.jit
def walk(spec: cutlass.Constexpr, t, s, bars, mma, careful: Int32, halves: cutlass.Constexpr):
    """A thread's share of every tile. ``halves``: rows of x go to registers, sums are FP16."""
    tid, _, _ = cute.arch.thread_idx()
    item = s.item
    wg = cute.arch.make_warp_uniform((tid - 128) // 128)
    view = mma.get_slice(0)
    c = Bundle(
        mma=mma,
        x=view.make_fragment_A(view.partition_A(s.x)) if const_expr(not halves) else None,
        w=view.make_fragment_B(view.partition_B(s.w)),
        shape=mma.partition_shape_C((HALF, spec.column_tile)),
        group=2 * wg + cute.arch.make_warp_uniform(tid % 128 // 64),
        wg=wg,
        peer=t.rank ^ 1,
    )
    if const_expr(spec.turns):  # noqa: SIM102 - one is decided at compile time
        if wg == 0:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
    slot, slot_phase, parity = Int32(0), Int32(0), Int32(0)
    stage, phase = wg * (spec.rounds % spec.stages), wg * (spec.rounds // spec.stages % 2)
    if const_expr(spec.flat):
        end = t.tokens
        if const_expr(not spec.dense):
            end = Int32(t.offsets[Int32(t.offsets.shape[0]) - 1])
        for half in cutlass.range(t.first + wg * t.step, t.tiles, 2 * t.step, unroll=1):
            at = Bundle(token=HALF * half, end=end, limit=t.tokens, row=None, region=None)
            stage, phase = half_tile(spec, t, s, bars, c, at, slot, stage, phase, parity, careful, halves)
            stage, phase = advance(spec, stage, phase, 1 + spec.rounds)
    else:
        cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
        token = item[0, slot]
        while token >= 0:
            end, limit, row, region = item[1, slot], item[2, slot], item[3, slot] + 2 * wg, item[4, slot] - 2 * wg
            at = Bundle(token=token + HALF * wg, end=end, limit=limit, row=row, region=region)
            stage, phase = half_tile(spec, t, s, bars, c, at, slot, stage, phase, parity, careful, halves)
            stage, phase = advance(spec, stage, phase, 1 + spec.rounds)
            parity = parity ^ 1
            slot, slot_phase = turn(slot, slot_phase, ITEM_SLOTS)
            cute.arch.mbarrier_wait(bars.item_full + slot, slot_phase)
            token = item[0, slot]


@cute.jit
def half_tile(spec: cutlass.Constexpr, t, s, bars, c, at, slot, stage, phase, parity, careful, halves: cutlass.Constexpr):
    """A warpgroup's half of a tile. Returns the place of the half's last stage."""
    rows, partials = None, []
    total = cute.make_rmem_tensor(c.shape, Float16 if const_expr(halves) else Float32)
    if const_expr(halves and spec.ahead):
        rows, stage, phase = gather(spec, s, bars, c, stage, phase)
    take_turn(spec, c.wg)
    if const_expr(halves and not spec.ahead):
        rows, stage, phase = gather(spec, s, bars, c, stage, phase)
    if const_expr(halves):
        multiply_registers(spec, s, c, rows, total)
    elif const_expr(spec.scaled):
        partials = [cute.make_rmem_tensor(c.shape, Float32) for _ in range(spec.sets)]
        stage, phase = multiply_scaled(spec, s, bars, c, total, partials, slot, stage, phase)
    else:
        stage, phase = multiply_plain(spec, bars, c, total, stage, phase)
    pass_turn(spec, c.wg)
    warpgroup.wait_group(0)
    if const_expr(not halves):
        free_stage(spec, bars, stage, c.peer)
        if const_expr(spec.scaled and spec.sets == 2):
            last = spec.chunks * spec.scale_parts - 1
            promote(spec, s, last, slot, c.group, partials[last % 2], total)
    if const_expr(not spec.flat):
        release(bars.item_empty + slot)
    if const_expr(halves):
        finish_halves(spec, t, s, at, total)
    elif const_expr(spec.direct):
        finish_direct(spec, t, s, at, total, careful)
    else:
        finish(spec, t, s, at, total, c.wg, parity)
    return stage, phase
