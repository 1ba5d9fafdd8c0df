"""Softmax warps of the forward: scores to P in E4M3, one thread per row, one warpgroup per Q tile.

Per key tile: read 128 scores, say so (the other tile's scales may now lie where they were), move the lazy maximum, post the factor for O,
exponentiate, round, store P, and only then add up the row: the sum needs no barrier and nobody waits for it.

P leaves exp2 already multiplied by its constant scale (the power of two is part of the argument), and so do the row sum and the centring
constant; nothing is ever multiplied by it.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.common.numbers import bits_of, float_of, scale_of_byte
from lp_fa4.sm100.atoms import F8, SF_BYTES, load_columns, store_columns
from lp_fa4.sm100.config import KEY_TILE, QUERY_TILE
from lp_fa4.sm100.sync import arrive_tensor, wait, wait_tensor
from lp_fa4.sm100.work import fetch, first_index, next_index

BLOCK = 32
BLOCKS = KEY_TILE // BLOCK
P_WORDS = BLOCK // 4
_MAGIC = float(3 << 22)  # adding it rounds to an integer, which then stands in the low bits
_POLY = (0.05500893, 0.24221096, 0.69328293)
"""2^f on [-1/2, 1/2] as 1 + f (c2 + f (c1 + f c0)): least largest relative error with value 1 at 0, 1.01e-4, against E4M3's 2^-4."""


@cute.jit
def softmax_role(kernel: cutlass.Constexpr, args, shared, bars, tmem, warp: Int32, thread: Int32):
    """Serve one Q tile of this CTA's items. ``warp``: 0..7, four a tile; ``thread``: 0..127, the row of the tile.

    One code for both tiles (``tile`` is a number at run time), two loops: key tiles that every row sees whole, and those with a mask.
    """
    spec, plan = kernel.spec, kernel.plan
    index, end = first_index(kernel, args)
    turn, base = Int32(0), Int32(0)
    tile = warp >> 2
    here = Softmax(kernel, bars + tile, tmem + tile * plan.distance, tile, thread, (warp & 3) * 32)
    if const_expr(spec.block_scaled and spec.p_scale == "constant" and not kernel.aliased):
        store_unit_scale(here)
        cute.arch.fence_view_async_tmem_store()
    while index < end:
        item = fetch(spec, args.records, index)
        steps = item.steps0 if tile == 0 else item.steps1
        row = item.row + tile * QUERY_TILE
        row_factor, floor = args.scale, Int32(-40)
        if const_expr(not spec.block_scaled):
            row_factor = args.scale * scale_of_byte(row_byte(spec, args.sf_q, item, row + thread))
        # keys that this row sees, and that every row of the tile sees
        limit, common = item.keys, item.keys
        if const_expr(spec.causal):
            reach = row + 1 + item.keys - item.queries
            common = cutlass.min(limit, cutlass.max(reach, 0))
            limit = cutlass.min(limit, reach + thread)
        whole = cutlass.min(common // KEY_TILE, steps)
        lazy, exact = -Float32.inf, -Float32.inf
        total, centre = Float32(0.0), Float32(0.0)
        for n in cutlass.range(whole, unroll=1):
            lazy, exact, total, centre, floor = key_tile(
                here, args, shared, item, n, base + n, limit, False, row_factor, (lazy, exact, total, centre, floor)
            )
        for n in cutlass.range(whole, steps, unroll=1):
            lazy, exact, total, centre, floor = key_tile(
                here, args, shared, item, n, base + n, limit, True, row_factor, (lazy, exact, total, centre, floor)
            )
        if steps > 0:
            post(here, shared, base + steps - 1, (total, lazy, exact, centre))
        base += steps
        index = next_index(kernel, shared, bars, index, turn)
        turn += 1


class Softmax(NamedTuple):
    """What a softmax thread knows of its place. ``bars``, ``tmem``: shifted so that tile 0's places are this tile's. ``lanes``: first lane
    of tensor memory of its warp (the same number in all lanes, so that addresses need no register of each)."""

    kernel: Any
    bars: Any
    tmem: Any
    tile: Int32
    thread: Int32
    lanes: Int32


@cute.jit
def key_tile(here, args, shared, item, n, turn, limit, masked: cutlass.Constexpr, row_factor, state):
    """One key tile of one row: P to tensor memory, and the new ``(lazy, exact, total, centre, floor)``. ``turn``: tiles so far."""
    kernel, bars = here.kernel, here.bars
    spec, bar, plan = kernel.spec, kernel.barriers, kernel.plan
    lazy, exact, total, centre, floor = state
    seen = limit - n * KEY_TILE
    factors, adds = [args.scale] * BLOCKS, [Int32(0)] * BLOCKS
    if const_expr(not spec.block_scaled):
        k_bytes = key_bytes(args.sf_k, item, n, spec.group, 127)
        factors = [row_factor * scale_of_byte(k_bytes[b]) for b in range(BLOCKS)]
        if const_expr(spec.fold_v):
            adds, floor = value_exponents(key_bytes(args.sf_v, item, n, spec.group, 0), floor)

    wait_tensor(bars + bar.s_full, turn & 1)
    r = load_columns(here.tmem, plan["S0"].start, KEY_TILE, here.lanes)
    cute.arch.fence_view_async_tmem_load()
    if const_expr(kernel.aliased):
        announce_s_read(bars + bar.s_read)
        if const_expr(spec.p_scale == "constant"):
            store_unit_scale(here)  # early: its four registers would otherwise be held until P is stored
    if const_expr(masked):
        # select, never add: scores of pad keys may be NaN
        for j in cutlass.range_constexpr(KEY_TILE):
            r[j] = r[j] if j < seen else -Float32.inf

    tops = [r[BLOCK * b] for b in range(BLOCKS)]
    for j in cutlass.range_constexpr(1, BLOCK):
        for b in cutlass.range_constexpr(BLOCKS):
            tops[b] = cute.arch.fmax(tops[b], r[BLOCK * b + j])
    if const_expr(spec.block_scaled):
        top = largest(tops) * args.scale
        exact = cute.arch.fmax(exact, top)
    else:
        scaled = [tops[b] * factors[b] for b in range(BLOCKS)]
        top = largest(scaled)
        exact = cute.arch.fmax(exact, top)
        if const_expr(spec.fold_v):
            top = largest([scaled[b] + Float32(adds[b]) for b in range(BLOCKS)])
    moved = top > lazy + Float32(spec.threshold)
    factor = cute.math.exp2(lazy - top, fastmath=True) if moved else Float32(1.0)
    lazy = top if moved else lazy
    bias = Float32(spec.p_shift) - (lazy if lazy > -Float32.inf else Float32(0.0))
    total = total * factor
    centre = centre * factor
    # one branch for both: with the wait of post in it ptxas keeps it a branch. By itself the centre would be predicated, and every tile
    # would issue the sum that only the first one needs
    if n > 0:
        post(here, shared, turn - 1, (factor,))
    else:
        if const_expr(spec.centred):
            centre = first_centre(r, factors, bias, seen, masked)
    words = cute.make_rmem_tensor(BLOCKS, Int32)
    parts = cute.make_rmem_tensor(2 * BLOCKS, Float32)
    for b in cutlass.range_constexpr(BLOCKS):
        shift = bias
        if const_expr(spec.fold_v):
            shift = bias + Float32(adds[b])
        probabilities(kernel, r, b, tops[b], factors[b], shift, words)
        store_block(here, r, b, centre, masked, seen)
    if const_expr(spec.p_scale != "constant"):
        share_scales(here, shared, words)
    cute.arch.fence_view_async_tmem_store()
    arrive_tensor(bars + bar.p_ready)

    for b in cutlass.range_constexpr(BLOCKS):
        sum_block(spec, r, b, words, adds[b], parts)
    for b in cutlass.range_constexpr(BLOCKS):
        total = total + (parts[2 * b] + parts[2 * b + 1])
    return lazy, exact, total, centre, floor


def largest(values):
    """Maximum of four; NaN is ignored (it shows up in P)."""
    return cute.arch.fmax(cute.arch.fmax(values[0], values[1]), cute.arch.fmax(values[2], values[3]))


def announce_s_read(barrier):
    """This tile's scores are in registers (the new barrier of the scheme; see ``forward_mma``, note [Scales in dead scores])."""
    arrive_tensor(barrier)


@cute.jit
def post(here, shared, message, values):
    """Leave ``values`` of this row for the correction warps, as soon as they took the message before."""
    bar = here.kernel.barriers
    wait(here.bars + bar.mail_empty, message & 1 ^ 1)
    for j in cutlass.range_constexpr(len(values)):
        shared.mail[here.thread, j, here.tile] = values[j]
    arrive_tensor(here.bars + bar.mail_full)


@cute.jit
def row_byte(spec: cutlass.Constexpr, scales, item, row):
    """Scale byte of a query row (token blocks: one per 32 rows and head)."""
    group = row // BLOCK
    if const_expr(not spec.shared_q):
        group = group + item.first_query // BLOCK + item.sequence
    return Int32(scales[cutlass.min(group, Int32(scales.shape[0]) - 1), item.head])


@cute.jit
def key_bytes(scales, item, n, group: cutlass.Constexpr, pad: cutlass.Constexpr):
    """Scale bytes of the four 32-key blocks of key tile ``n``; ``pad`` for blocks past the end."""
    first = item.first_key // BLOCK + item.sequence + BLOCKS * n
    out = []
    for b in cutlass.range_constexpr(BLOCKS):
        byte = Int32(scales[cutlass.min(first + b, Int32(scales.shape[0]) - 1), item.head // group])
        out.append(byte if n * KEY_TILE + b * BLOCK < item.keys else Int32(pad))
    return out


@cute.jit
def value_exponents(bytes_, floor):
    """Exponents of V by which P is multiplied, and the smallest so far.

    A block of zeros (byte 0) may take any exponent, but its keys count in the row sum: the least of its tile, or of the tiles before, so
    that it neither hides other blocks from P's range nor leaves FP32's.
    """
    least = Int32(255)
    for b in cutlass.range_constexpr(BLOCKS):
        least = cutlass.min(least, bytes_[b] if bytes_[b] > 0 else Int32(255))
    least = floor if least == 255 else least - 127
    return [bytes_[b] - 127 if bytes_[b] > 0 else least for b in range(BLOCKS)], least


@cute.jit
def first_centre(r, factors, bias, seen, masked: cutlass.Constexpr):
    """``exp2(mean)`` over the keys seen in the first tile, of the arguments of P's exp2."""
    total = Float32(0.0)
    for b in cutlass.range_constexpr(BLOCKS):
        part = (Float32(0.0), Float32(0.0))
        for j in cutlass.range_constexpr(0, BLOCK, 2):
            i = BLOCK * b + j
            x, y = r[i], r[i + 1]
            if const_expr(masked):
                x = x if i < seen else Float32(0.0)
                y = y if i + 1 < seen else Float32(0.0)
            part = cute.arch.add_packed_f32x2(part, (x, y))
        total = total + (part[0] + part[1]) * factors[b]
    many = Int32(KEY_TILE)
    if const_expr(masked):
        many = cutlass.max(cutlass.min(seen, KEY_TILE), 1)
    return cute.math.exp2(total / Float32(many) + bias, fastmath=True)


@cute.jit
def probabilities(kernel: cutlass.Constexpr, r, b: cutlass.Constexpr, top, scale, bias, words):
    """Scores of block ``b`` (32 keys) to P in place; ``words[b]``: E8M0 byte of the block's scale, where it depends on data.

    softmax_max: the block's largest P comes from its largest score, and its power of two joins the exponent's argument. fresh: from P
    itself. Bytes by bit arithmetic: adding 0x1FFFFF carries into the exponent exactly if the mantissa exceeds 1.75 (448 is 1.75 * 2^8).
    """
    spec = kernel.spec
    shift = bias
    if const_expr(spec.p_scale == "softmax_max"):
        byte = scale_byte(cute.math.exp2(top * scale + bias, fastmath=True))
        words[b] = byte
        shift = bias - Float32(byte - 127)
    for j in cutlass.range_constexpr(0, BLOCK, 2):
        i = BLOCK * b + j
        x, y = cute.arch.fma_packed_f32x2((r[i], r[i + 1]), (scale, scale), (shift, shift))
        if const_expr(j < kernel.tuning.exp2_on_fma):
            r[i], r[i + 1] = exp2_pair(x, y)
        else:
            r[i], r[i + 1] = cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True)
    if const_expr(spec.p_scale == "fresh"):
        largest = r[BLOCK * b]
        for j in cutlass.range_constexpr(1, BLOCK):
            largest = cute.arch.fmax(largest, r[BLOCK * b + j])
        byte = scale_byte(largest)
        words[b] = byte
        inverse = float_of((254 - byte) << 23)
        for j in cutlass.range_constexpr(0, BLOCK, 2):
            i = BLOCK * b + j
            r[i], r[i + 1] = cute.arch.mul_packed_f32x2((r[i], r[i + 1]), (inverse, inverse))


@cute.jit
def scale_byte(largest):
    """E8M0 byte of a block of P, clamped to 1..254 so that scale and inverse are normal numbers."""
    return cutlass.min(cutlass.max(((bits_of(largest) + 0x1FFFFF) >> 23) - 8, 1), 253)


@cute.jit
def exp2_pair(x, y):
    """Two exponentials on the FMA pipe: round to an integer by addition, a cubic for the rest, the integer added to the exponent bits."""
    x, y = cute.arch.fmax(x, Float32(-126.0)), cute.arch.fmax(y, Float32(-126.0))
    magic = (Float32(_MAGIC), Float32(_MAGIC))
    whole = cute.arch.add_packed_f32x2((x, y), magic)
    back = cute.arch.sub_packed_f32x2(whole, magic)
    f = cute.arch.sub_packed_f32x2((x, y), back)
    p = (Float32(_POLY[0]), Float32(_POLY[0]))
    for c in (*_POLY[1:], 1.0):
        p = cute.arch.fma_packed_f32x2(p, f, (Float32(c), Float32(c)))
    return tuple(float_of(bits_of(p[i]) + (bits_of(whole[i]) << 23)) for i in range(2))


@cute.jit
def store_block(here, r, b: cutlass.Constexpr, centre, masked: cutlass.Constexpr, seen):
    """Round block ``b`` of P to E4M3 and store it to its 8 columns. Masked keys become 0, not -c: their V rows are someone else's."""
    values = cute.make_rmem_tensor(BLOCK, Float32)
    for j in cutlass.range_constexpr(0, BLOCK, 2):
        i = BLOCK * b + j
        if const_expr(here.kernel.spec.centred):
            values[j], values[j + 1] = cute.arch.sub_packed_f32x2((r[i], r[i + 1]), (centre, centre))
        else:
            values[j], values[j + 1] = r[i], r[i + 1]
    if const_expr(here.kernel.spec.centred and masked):
        for j in cutlass.range_constexpr(BLOCK):
            values[j] = values[j] if BLOCK * b + j < seen else Float32(0.0)
    packed = cute.make_rmem_tensor(P_WORDS, Float32)
    codes = cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=F8), cute.make_layout(BLOCK))
    codes.store(values.load().to(F8))
    store_columns(here.tmem, here.kernel.plan["P0"].start + P_WORDS * b, P_WORDS, here.lanes, packed)


@cute.jit
def sum_block(spec: cutlass.Constexpr, r, b: cutlass.Constexpr, words, add, parts):
    """Sum of block ``b`` of the unrounded P, without its scale, into ``parts[2b]`` and ``parts[2b + 1]`` (even and odd keys)."""
    pair = (r[BLOCK * b], r[BLOCK * b + 1])
    for j in cutlass.range_constexpr(2, BLOCK, 2):
        pair = cute.arch.add_packed_f32x2(pair, (r[BLOCK * b + j], r[BLOCK * b + j + 1]))
    if const_expr(spec.p_scale != "constant"):
        factor = float_of(words[b] << 23)
        pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
    if const_expr(spec.fold_v):
        factor = float_of((127 - add) << 23)
        pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
    parts[2 * b], parts[2 * b + 1] = pair


@cute.jit
def store_unit_scale(here):
    """Scale 2^0 of P, every byte 127: one store of four words per lane, the same in all lane quadrants."""
    words = cute.make_rmem_tensor(4, Float32)
    bits = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=Int32), words.layout)
    for j in cutlass.range_constexpr(4):
        bits[j] = Int32(0x7F7F7F7F)
    store_columns(here.tmem, here.kernel.plan["SFP0"].start, 4, here.lanes, words)


@cute.jit
def share_scales(here, shared, words):
    """Row scales of P through shared memory: a warp's ``tcgen05.st`` reaches one lane quadrant, the MMA wants all four, so the MMA warp
    copies the atom with ``tcgen05.cp``. Row r's four bytes lie at word ``(r % 32) * 4 + r // 32``."""
    word = words[0] | (words[1] << 8) | (words[2] << 16) | (words[3] << 24)
    start = shared.sf_p.iterator + here.tile * SF_BYTES
    target = cute.make_tensor(cute.recast_ptr(start.align(16), dtype=Int32), cute.make_layout(128))
    target[(here.thread % 32) * 4 + here.thread // 32] = word
    cute.arch.fence_proxy("async.shared", space="cta")
