"""What the backward's main kernel needs of dO: its codes in 32 x 32 blocks with both scale layouts, statistics of each query, zeros.

One CTA per query tile (128 queries) and head; a warp owns 32 queries, so every maximum stays inside a warp::

    dO8 = E4M3(dO / l * 2^-e)          e: exponent of a 32 x 32 block
    D   = rowsum(dO8 * Oc) - dlse / l  (or from dO before rounding)
    a, c                               see lp_fa4.common.backward_rows

A row that does not exist or sees no key has a = -inf and no part in its block's exponent. A block with a NaN or infinity has byte 255 and
codes 0. Codes keep dO's place (jagged rows), scales go by the 128-row tile rule.

For the two-CTA kernel (``token_blocks``) a block is 32 queries and the whole head dimension, its exponent is applied outside the products:
no scale layouts, D is stored as ``-D * 2^-e``, and of each block ``2^e``, the largest norm of a row of dO8 and the largest ``|D|``, both
times the largest P that the row can have (1, or 1 / l where dO is not divided by l).
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from lp_fa4.common.backward_rows import eight_columns, fake_results, power_of_sums, query_unit, statistics
from lp_fa4.common.numbers import bits_of, byte_of_amax_bits, e4m3x4, e4m3x4_to_float, effect, float_of, inverse_of_byte, scale_of_byte
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol
from lp_fa4.sm100.atoms import SF_BYTES
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, STAT_POWER, TILE, PrepassSpec, stat_values

THREADS = 128
COLUMNS = 8
"""Columns of a thread."""
LEAST_EXPONENT = -100
"""Of a block of dO that the two-CTA kernel reads: smaller values become 0."""


class Prepass:
    """``spec``: compile-time choices. Launch arguments: :func:`compile_prepass`."""

    def __init__(self, spec: PrepassSpec):
        self.spec = spec
        self.lanes = spec.head_dim // COLUMNS  # threads of a row
        self.rows = 32 // self.lanes  # rows of a warp at once
        self.rounds = 32 // self.rows

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        out: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        dlse: cute.Tensor | None,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        do8: cute.Tensor,
        sf: cute.Tensor | None,
        sf_t: cute.Tensor | None,
        blocks: cute.Tensor | None,
        stats: cute.Tensor,
        sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        key_exponents: cute.Tensor | None,
        queries: Int32,
        softmax_scale: Float32,
        stream,
    ):
        grid = Int32(stats.shape[0]) * Int32(stats.shape[1])
        self.kernel(
            dout,
            out,
            row_max,
            row_sum,
            dlse,
            offsets_q,
            offsets_k,
            do8,
            sf,
            sf_t,
            blocks,
            stats,
            sums,
            dk,
            dv,
            key_exponents,
            queries,
            softmax_scale,
        ).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        dout: cute.Tensor,
        out: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        dlse: cute.Tensor | None,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        do8: cute.Tensor,
        sf: cute.Tensor | None,
        sf_t: cute.Tensor | None,
        blocks: cute.Tensor | None,
        stats: cute.Tensor,
        sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        key_exponents: cute.Tensor | None,
        queries: Int32,
        softmax_scale: Float32,
    ):
        spec = self.spec
        bid, _, _ = cute.arch.block_idx()
        heads = Int32(stats.shape[1])
        batch = Int32(offsets_k.shape[0]) - 1
        tile_row, head = bid // heads, bid % heads
        unit = query_unit(spec.jagged, offsets_q, batch, tile_row, TILE, queries)
        b, start, tile = unit.sequence, unit.start, unit.index
        left = unit.queries - TILE * tile
        smem = cutlass.utils.SmemAllocator()
        column_sums = smem.allocate_tensor(Float32, cute.make_layout((4, spec.head_dim), stride=(spec.head_dim, 1)), byte_alignment=16)
        self.zero(dk, dv, offsets_k, batch)
        if const_expr(spec.jagged):
            self.zero_codes(do8, Int32(offsets_q[batch]))
        if left > 0:  # the tile rule leaves rows that own nothing
            keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
            # scale group of the last key that row 0 of the tile sees, and of the sequence's last
            last = keys - 1
            if const_expr(spec.causal):
                last = TILE * tile + keys - (left + TILE * tile)
            group_row = Int32(offsets_k[b]) // 32 + b
            power = (key_exponents, group_row, last, softmax_scale)
            place = (tile_row, head, start + TILE * tile, cutlass.min(left, TILE), keys, power)
            self.tile(dout, out, row_max, row_sum, dlse, do8, sf, sf_t, blocks, stats, sums, column_sums, place)

    @cute.jit
    def zero(self, dk: cute.Tensor, dv: cute.Tensor, offsets_k: cute.Tensor, batch: Int32):
        """Zero the rows of dK and dV past the last sequence."""
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        end, width = Int32(offsets_k[batch]), Int32(dk.shape[1])  # bytes a row, a multiple of 16
        dk_base, dv_base = dk.iterator.toint(), dv.iterator.toint()
        for row in cutlass.range(end + bid, Int32(dk.shape[0]), grid, unroll=1):
            for i in cutlass.range(tid, width // 16, THREADS, unroll=1):
                offset = Int64(row) * width + 16 * i
                for base in (dk_base, dv_base):
                    effect([base + offset], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")

    @cute.jit
    def zero_codes(self, do8: cute.Tensor, end: Int32):
        """Zero the rows of dO8 past the last sequence that a tile of 128 can reach: no NaN code may meet a 0 of P."""
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        row_bytes = Int32(do8.shape[1]) * self.spec.head_dim
        stop = cutlass.min(end + TILE, Int32(do8.shape[0]))
        for row in cutlass.range(end + bid, stop, grid, unroll=1):
            for i in cutlass.range(tid, row_bytes // 16, THREADS, unroll=1):
                at = do8.iterator.toint() + Int64(row) * row_bytes + 16 * i
                effect([at], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")

    @cute.jit
    def tile(self, dout, out, row_max, row_sum, dlse, do8, sf, sf_t, blocks, stats, sums, column_sums, place):
        """One query tile of one head. ``place``: workspace row, head, first row of dO, rows, keys of the sequence, and
        what :meth:`power` takes."""
        spec, lanes = self.spec, self.lanes
        tile_row, head, first, left, keys, power = place
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        column = COLUMNS * (lane % lanes)
        raw = cute.make_rmem_tensor((COLUMNS, self.rounds), BFloat16)
        inverse = cute.make_rmem_tensor(self.rounds, Float32)
        total = cute.make_rmem_tensor(COLUMNS, Float32)
        total.fill(0.0)
        peak = Int32(0)
        for i in cutlass.range_constexpr(self.rounds):
            r = 32 * warp + self.rows * i + lane // lanes
            row = first + cutlass.min(r, left - 1)
            x = eight_columns(dout, row, head, column)
            length = row_sum[head, row]
            exists = r < left
            sees = exists and length > 0.0
            factor = Float32(1.0)
            if const_expr(spec.fold_l):
                factor = Float32(1.0) / length
            inverse[i] = factor if sees else Float32(0.0)
            for j in cutlass.range_constexpr(COLUMNS):
                value = Float32(x[j])
                total[j] = total[j] + (value if exists else Float32(0.0))
                bits = bits_of(value * factor) & 0x7FFFFFFF
                peak = cutlass.max(peak, bits if sees else Int32(0))
                raw[j, i] = x[j]
        # four lanes hold a block's 32 columns, lanes a row apart its rows
        for shift in range(5) if spec.token_blocks else (0, 1, *range(lanes.bit_length() - 1, 5)):
            peak = cutlass.max(peak, cute.arch.shuffle_sync_bfly(peak, offset=1 << shift))
        for shift in range(lanes.bit_length() - 1, 5):
            for j in cutlass.range_constexpr(COLUMNS):
                total[j] = total[j] + cute.arch.shuffle_sync_bfly(total[j], offset=1 << shift)
        byte = byte_of_amax_bits(peak)
        if const_expr(spec.token_blocks):
            # D is divided by 2^e: a block of zeros has e = 0, and no other an e below LEAST_EXPONENT
            byte = cutlass.max(byte, 127 + LEAST_EXPONENT) if peak > 0 else Int32(127)
        else:
            self.write_scales(sf, sf_t, tile_row, head, warp, lane, byte)
        up, down = inverse_of_byte(byte), scale_of_byte(byte)
        norm, peak_delta = Float32(0.0), Float32(0.0)
        stat = stats.iterator.toint() + (Int64(tile_row) * Int32(stats.shape[1]) + head) * (4 * stat_values(spec.dq_half) * TILE)
        for i in cutlass.range_constexpr(self.rounds):
            r = 32 * warp + self.rows * i + lane // lanes
            row = first + cutlass.min(r, left - 1)
            exists = r < left
            sees = inverse[i] > 0.0
            delta, square = Float32(0.0), Float32(0.0)
            o = eight_columns(out, row, head, column)
            words = []
            for half in cutlass.range_constexpr(2):
                four = [Float32(raw[4 * half + j, i]) * inverse[i] for j in range(4)]
                word = e4m3x4(*[x * up for x in four])
                word = word if sees and byte < 255 else Int32(0)
                words.append(word)
                if const_expr(spec.delta_quantized):
                    four = [x * down for x in e4m3x4_to_float(word)]
                for j in cutlass.range_constexpr(4):
                    delta = delta + four[j] * Float32(o[4 * half + j])
                if const_expr(spec.token_blocks):
                    for x in e4m3x4_to_float(word):
                        square = square + x * x
            if exists:
                at = do8.iterator.toint() + (Int64(row) * Int32(do8.shape[1]) + head) * spec.head_dim + column
                effect([at, *words], "st.global.v2.b32 [$0], {$1, $2};", "l,r,r")
            for shift in range(lanes.bit_length() - 1):
                delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1 << shift)
                if const_expr(spec.token_blocks):
                    square = square + cute.arch.shuffle_sync_bfly(square, offset=1 << shift)
            a, c = Float32(-math.inf), Float32(0.0)
            length, m = row_sum[head, row], row_max[head, row]
            if const_expr(dlse is not None):
                delta = delta - dlse[head, row] * inverse[i]
            if sees:
                s = spec.p_scale_log2
                a, c = statistics(spec.fold_l, spec.centred, length, m, keys, float(s), 2.0**s)
            delta = delta if sees else Float32(0.0)
            if const_expr(spec.token_blocks):
                most = Float32(1.0)  # the largest P of this row
                if const_expr(not spec.fold_l):
                    most = Float32(1.0) / length if sees else Float32(0.0)
                norm = cute.arch.fmax(norm, square * most * most)
                peak_delta = cute.arch.fmax(peak_delta, cute.arch.fmax(delta, -delta) * most)
                delta = -delta * up
            if lane % lanes == 0:
                for kind, value in enumerate((a, delta, c)):
                    effect([stat + 4 * (TILE * kind + r), value], "st.global.f32 [$0], $1;", "l,f")
            if const_expr(spec.dq_half):
                largest = Int32(0)
                for j in cutlass.range_constexpr(COLUMNS):
                    largest = cutlass.max(largest, bits_of(Float32(raw[j, i])) & 0x7FFFFFFF)
                for shift in range(lanes.bit_length() - 1):
                    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << shift))
                if lane % lanes == 0:
                    value = self.power(power, head, Int32(stats.shape[1]), r, largest, sees)
                    effect([stat + 4 * (TILE * STAT_POWER + r), value], "st.global.f32 [$0], $1;", "l,f")
        if const_expr(spec.token_blocks):
            for shift in range(lanes.bit_length() - 1, 5):
                norm = cute.arch.fmax(norm, cute.arch.shuffle_sync_bfly(norm, offset=1 << shift))
                peak_delta = cute.arch.fmax(peak_delta, cute.arch.shuffle_sync_bfly(peak_delta, offset=1 << shift))
            if lane == 0:
                for kind, value in enumerate((down, cute.math.sqrt(norm) * down, peak_delta)):
                    blocks[tile_row, head, warp * BLOCK_FACTORS + kind] = value
        if lane < lanes:
            for j in cutlass.range_constexpr(COLUMNS):
                column_sums[warp, column + j] = total[j]
        cute.arch.sync_threads()
        if tid < spec.head_dim:
            sums[tile_row, head, tid] = (column_sums[0, tid] + column_sums[1, tid]) + (column_sums[2, tid] + column_sums[3, tid])

    @cute.jit
    def power(self, power, head, heads, r, largest, sees):
        """Power of two under which no FP16 sum of this row's dQ can overflow (``power_of_sums``). The exponents are those of the groups
        that this row sees, so that a causal row never depends on later groups of keys.
        """
        key_exponents, group_row, last, softmax_scale = power
        if const_expr(self.spec.dq_scale_log2 is not None):
            return float_of(Int32((127 + self.spec.dq_scale_log2) << 23))
        seen = last
        if const_expr(self.spec.causal):
            seen = last + r
        # a row whose dQ is 0 bounds nothing (where queries are shared, the least power of all sequences is taken); one that is not finite
        # may have any
        result = Int32(0)
        if largest == 0 or not sees:
            result = Int32(100)
        elif largest < 0x7F800000:
            kv_head = head * Int32(key_exponents.shape[1]) // heads
            exponents = key_exponents[group_row + seen // 32, kv_head]
            result = power_of_sums(self.spec.head_dim, softmax_scale, largest, exponents)
        return float_of((result + 127) << 23)

    @cute.jit
    def write_scales(self, sf, sf_t, tile_row, head, warp, lane, byte):
        """This warp's bytes in both atoms: 32 rows (queries) of four column blocks, and, along tokens, one byte of each column."""
        place = (Int64(tile_row) * Int32(sf.shape[1]) + head) * SF_BYTES + lane * 16
        bytes_ = []
        for block in cutlass.range_constexpr(4):
            found = Int32(0)
            if const_expr(block < self.spec.head_dim // 32):
                found = cute.arch.shuffle_sync(byte, 4 * block)
            bytes_.append(found)
            at = sf_t.iterator.toint() + place + (4 * block + warp)
            effect([at, found], "{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h;}", "l,r")
        word = bytes_[0] | (bytes_[1] << 8) | (bytes_[2] << 16) | (bytes_[3] << 24)
        effect([sf.iterator.toint() + place + 4 * warp, word], "st.global.b32 [$0], $1;", "l,r")


@kernel_cache
def compile_prepass(arch: str, spec: PrepassSpec, offsets_dtype: str, has_dlse: bool):
    """Compile for ``arch``. Arguments at launch, in order:

    those of ``fake_results``; offsets_q (read if jagged), offsets_k: ``[B + 1]``; do8: uint8 ``[R, H, D]``; sf, sf_t: uint8
    ``[tile rows, H, 512]``, scales along the head dimension and along tokens, blocks: None; or, with ``token_blocks``, None, None and fp32
    ``[tile rows, H, 16]``, four values of each of a tile's four blocks (the last unused); stats: fp32 ``[tile rows, H, stats * 128]``;
    sums: fp32 ``[tile rows, H, D]``, column sums of dO; dk, dv: uint8 ``[T, bytes]``, to be zeroed past the last sequence;
    key_exponents: int32 ``[groups, Hkv]`` (``backward_host.key_exponents``), or None where dQ is summed in FP32; queries per sequence (if
    not jagged); softmax scale.
    """
    heads, rows, d = symbol(), symbol(), spec.head_dim
    scales = lambda: fake("uint8", (symbol(), heads, SF_BYTES), compact=True)  # noqa: E731
    grad = lambda: fake("uint8", (symbol(), symbol(16)), compact=True)  # noqa: E731
    blocks = fake("float32", (symbol(), heads, TILE // 32 * BLOCK_FACTORS), compact=True)
    return build(
        arch,
        Prepass(spec),
        *fake_results(heads, rows, d, spec.out_fp32, has_dlse),
        fake_offsets(offsets_dtype),
        fake_offsets(offsets_dtype),
        fake("uint8", (rows, heads, d), compact=True),
        *([None, None, blocks] if spec.token_blocks else [scales(), scales(), None]),
        fake("float32", (symbol(), heads, stat_values(spec.dq_half) * TILE), compact=True),
        fake("float32", (symbol(), heads, d), compact=True),
        grad(),
        grad(),
        fake("int32", (symbol(), symbol()), align=4, compact=True) if spec.dq_half else None,
        Int32(1),
        Float32(1.0),
    )
