"""What the backward's main kernel needs of the query side, in one launch: codes of dO and Q as tile images, per-query statistics, zeros.

One CTA takes a chunk (2,048 queries of one sequence and head) in one pass over dO and out, tile by tile::

    dO8 = E4M3(dO / l * 2^-e)          e: exponent of the row (smallest with no clipping)
    b   = -rowsum(dO8 * Oc)            in units of the codes (or from dO before rounding)

and, once e_ref, the largest e of the chunk, is known::

    a   = s + e - e_ref - m            so that exp2(S + a) is P * 2^(s + e - e_ref): the exponent of dO rides in P; s = p_scale_log2
    c   = (l / K) * 2^(s + e - e_ref)  what is subtracted from P in dV, 0 unless centred or suffix; K: keys that the row sees

With ``halves`` (``fold_l``) the main kernel adds up scores in FP16 and works on pairs of statistics; what ``backward_prepass_halves`` says
of l, m, c, s and the exponents then holds for all of the above. Packed a, b and c stand beside those in FP32, and ``need`` says whether a
chunk is out of FP16's reach.

With ``align`` a row has a factor f in (1/2, 1], 1 / f on dO and f on P, so that its largest |dO| / (l f) is a power of two, exact in E4M3:
l f stands for l, and m - log2 f for m, in all of the above.

A row that does not exist or sees no key gets codes 0 and a = -inf. A row with a NaN or infinity becomes NaN codes: seen, not hidden.
Tile images (``backward_layout``) hold the codes and the turned codes, so that plain bulk copies bring both. They are made in shared memory,
a tile at a time, and leave by bulk copies.
"""

import math
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from lp_fa4.common.backward_rows import fake_results, first_unit, power_of_sums, query_unit, statistics
from lp_fa4.common.numbers import (
    absolute,
    bits_of,
    byte_of_amax_bits,
    e4m3x4,
    exp2,
    float_of,
    inverse_of_byte,
    log2,
    scale_of_byte,
)
from lp_fa4.common.rows import wide
from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol
from lp_fa4.mx.quantize import ROW_SUM
from lp_fa4.sm90.backward_layout import (
    CHUNK,
    CHUNK_TILES,
    NEED_QUERIES,
    NEED_ROWS,
    QUERY_TILE,
    RECODED,
    STAT_A,
    STAT_AC2,
    STAT_B,
    STAT_B2,
    STAT_C,
    STAT_DK,
    STAT_DQ,
    STAT_DV,
    STAT_FLOATS,
    STAT_Q0,
    STAT_S0,
    STAT_VT,
    PrepassSpec,
)
from lp_fa4.sm90.backward_load import ACCUMULATOR_ORDER, ONE_HALF2, turn_tiles
from lp_fa4.sm90.backward_ops import effect
from lp_fa4.sm90.backward_prepass_halves import (
    KEPT,
    LARGEST_REFERENCE,
    LARGEST_SCALE,
    byte_of_norm_bits,
    eleven_bits,
    flag,
    norm_of_codes,
    on_grid,
    rounded_scale,
)
from lp_fa4.sm90.backward_prepass_rows import SharedRows, larger_pair, norm_of, widest_pair

THREADS = 256
WARPS = THREADS // 32
IMAGES = 2
"""Buffers for tile images: one is filled while the other leaves."""
SHORT = 1024
"""Queries of a chunk up to which a third CTA a multiprocessor is worth more than registers (PMA's 512: 287 us for 298). Chunks of 2,048 are
too few for that (LLM has 256 on 132 multiprocessors): they ask for the next tile ahead instead (293 us to 236)."""


class Prepass(SharedRows):
    """``spec``: compile-time choices. Launch arguments: :func:`compile_prepass`."""

    def __init__(self, spec: PrepassSpec):
        super().__init__(spec.head_dim, THREADS)
        self.spec = spec
        self.short = spec.rows <= SHORT

    @cute.jit
    def __call__(
        self,
        dout: cute.Tensor,
        out: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        dlse: cute.Tensor | None,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        do_tiles: cute.Tensor,
        q_tiles: cute.Tensor,
        stats: cute.Tensor,
        sums: cute.Tensor,
        suffix: cute.Tensor | None,
        dq_scale: cute.Tensor | None,
        need: cute.Tensor | None,
        dq: cute.Tensor,
        queries: Int32,
        softmax_scale: Float32,
        stream,
    ):
        grid = Int32(sums.shape[0]) * Int32(dout.shape[1])
        dense = dict(min_blocks_per_mp=3, preferred_smem_carveout=100) if self.short else {}
        self.kernel(
            dout,
            out,
            row_max,
            row_sum,
            dlse,
            q,
            q_scale,
            k_scale,
            v_scale,
            offsets_q,
            offsets_k,
            do_tiles,
            q_tiles,
            stats,
            sums,
            suffix,
            dq_scale,
            need,
            dq,
            queries,
            softmax_scale,
        ).launch(grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, **dense)

    @cute.kernel
    def kernel(
        self,
        dout: cute.Tensor,
        out: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        dlse: cute.Tensor | None,
        q: cute.Tensor,
        q_scale: cute.Tensor,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        offsets_q: cute.Tensor,
        offsets_k: cute.Tensor,
        do_tiles: cute.Tensor,
        q_tiles: cute.Tensor,
        stats: cute.Tensor,
        sums: cute.Tensor,
        suffix: cute.Tensor | None,
        dq_scale: cute.Tensor | None,
        need: cute.Tensor | None,
        dq: cute.Tensor,
        queries: Int32,
        softmax_scale: Float32,
    ):
        spec = self.spec
        bid, _, _ = cute.arch.block_idx()
        heads = Int32(dout.shape[1])
        batch = Int32(offsets_k.shape[0]) - 1
        chunk_row, head = bid // heads, bid % heads
        unit = query_unit(spec.jagged, offsets_q, batch, chunk_row, CHUNK, queries)
        b, start, chunk, tile_row = unit.sequence, unit.start, unit.index, first_unit(spec.jagged, unit, QUERY_TILE)
        left = cutlass.min(unit.queries - CHUNK * chunk, Int32(CHUNK))  # rows of this chunk; the tile rule leaves rows that own nothing
        tid, _, _ = cute.arch.thread_idx()
        self.zero(dq)
        smem = cutlass.utils.SmemAllocator()
        rows = SimpleNamespace(
            bytes=smem.allocate_tensor(Int32, cute.make_layout(spec.rows), byte_alignment=16),
            deltas=smem.allocate_tensor(Float32, cute.make_layout(spec.rows), byte_alignment=16),
            inverses=smem.allocate_tensor(Float32, cute.make_layout(spec.rows), byte_alignment=16),
            shares=smem.allocate_tensor(Float32, cute.make_layout(spec.rows if spec.suffix else 4), byte_alignment=16),
            maxima=smem.allocate_tensor(Float32, cute.make_layout(spec.rows if spec.halves and spec.align else 4), byte_alignment=16),
        )
        column_sums = smem.allocate_tensor(
            Float32, cute.make_layout((self.rows, spec.head_dim), stride=(spec.head_dim, 1)), byte_alignment=16
        )
        peaks = smem.allocate_tensor(Int32, cute.make_layout(2 * WARPS + 4), byte_alignment=16)
        trouble = cute.make_tensor(peaks.iterator + 2 * WARPS, cute.make_layout(1))
        codes = smem.allocate_tensor(Int32, cute.make_layout(IMAGES * QUERY_TILE * spec.head_dim // 2), byte_alignment=1024)
        buffers = Int32(codes.iterator.toint())
        if const_expr(spec.halves):  # noqa: SIM102 - known to the compiler, the other is not
            if tid == 0:
                trouble[0] = Int32(0)
        if left > 0:
            if const_expr(spec.single):  # noqa: SIM102 - known to the compiler, the other is not
                if tid == 0 and unit.queries > CHUNK:
                    flag(trouble, NEED_ROWS)
            first = start + CHUNK * chunk
            dq_power = Float32(1.0)
            keys = Int32(offsets_k[b + 1]) - Int32(offsets_k[b])
            tiles = (left + (QUERY_TILE - 1)) // QUERY_TILE
            tile_row = tile_row + CHUNK_TILES * chunk
            results = SimpleNamespace(dout=dout, out=out, row_max=row_max, row_sum=row_sum, dlse=dlse)
            place = SimpleNamespace(head=head, first=first, left=left, tiles=tiles, tile_row=tile_row)
            scale = softmax_scale * math.log2(math.e)
            ratio, top_k, top_v = Float32(1.0), Int32(127), Int32(127)
            if const_expr(spec.halves):
                scale, ratio = rounded_scale(scale)
            if const_expr(spec.halves or spec.dq_half):
                kv_head = head * Int32(v_scale.shape[1]) // heads
                group, groups = Int32(offsets_k[b]) // 32 + b, (keys + 31) // 32
                top_k = self.widest(k_scale, spec.k_static, group, groups, kv_head)
                top_v = self.widest(v_scale, spec.v_static, group, groups, kv_head)
            # queries of the sequence before this chunk, less all of them, for the keys that a row sees where causal
            seen = (keys, CHUNK * chunk - unit.queries)
            self.row_factors(results, place, rows, seen, ratio)
            exponents = top_k + top_v - 2 * 127
            limits = SimpleNamespace(of=dq_scale, exponents=exponents, softmax_scale=softmax_scale, keys=keys)
            self.encode(results, place, do_tiles, rows, seen, buffers, (sums, chunk_row), suffix, column_sums, peaks, limits)
            top = peaks[0]
            for i in cutlass.range_constexpr(1, WARPS):
                top = cutlass.max(top, peaks[i])
            reference = Int32(127) if top == 0 else top
            self.row_statistics(results, place, stats, rows, seen, reference, ratio, top_v, trouble)
            if const_expr(spec.dq_half and not spec.dq_grouped):
                dq_power = self.dq_power(peaks, exponents, softmax_scale)
                dq_scale[chunk_row, head] = Float32(1.0) / dq_power
            scale_row = start // 32 + b
            if const_expr(spec.shared):
                scale_row = Int32(0)
            tops, group_row = (top_k, top_v), scale_row + CHUNK // 32 * chunk
            top_q, recoded = self.query_exponents(q_scale, group_row, (left + 31) // 32, head)
            self.headers(q_scale, stats, place, group_row, reference, (softmax_scale, scale), dq_power, tops, top_q, recoded, trouble)
            exponents_q = SimpleNamespace(of=q_scale, row=group_row, top=top_q, recoded=recoded)
            if const_expr(spec.shared):
                if b == 0:
                    self.copy_queries(q, q_tiles, head, CHUNK * chunk, left, tiles, CHUNK_TILES * chunk, buffers, trouble, exponents_q)
            else:
                self.copy_queries(q, q_tiles, head, first, left, tiles, tile_row, buffers, trouble, exponents_q)
        if const_expr(spec.halves):
            cute.arch.sync_threads()
            if tid == 0:
                need[chunk_row, head] = trouble[0]
        if tid == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def zero(self, dq: cute.Tensor):
        """Zero the dQ sums."""
        bid, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        base = dq.iterator.toint()
        pieces = Int32(dq.shape[0]) // 4
        for i in cutlass.range(bid * THREADS + tid, pieces, grid * THREADS, unroll=4):
            effect([base + Int64(i) * 16], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")

    def inverse_sum(self, total):
        """Factor on dO: 1 / l, or 1."""
        return Float32(1.0) / total if self.spec.fold_l else Float32(1.0)

    def place(self, image, row):
        """Shared address of this thread's eight codes of ``row`` in a tile's image."""
        tid, _, _ = cute.arch.thread_idx()
        lane, r = tid % self.lanes, row % QUERY_TILE
        chunk = (lane // 2) ^ (r % 8 if self.spec.head_dim == 128 else (r // 2) % 4)
        return image + r * self.spec.head_dim + 16 * chunk + 8 * (lane % 2)

    @cute.jit
    def free_image(self, buffers, tile):
        """Shared address of the buffer for a tile's images, once the copy that last used it has read it."""
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            cute.arch.cp_async_bulk_wait_group(IMAGES - 1, read=True)
        cute.arch.sync_threads()
        return buffers + tile % IMAGES * (2 * QUERY_TILE * self.spec.head_dim)

    @cute.jit
    def send_image(self, image, target: Int64, factor=None):
        """Turn a tile's codes, times ``factor`` (packed FP16), and copy both forms to ``target``."""
        tid, _, _ = cute.arch.thread_idx()
        size = QUERY_TILE * self.spec.head_dim
        cute.arch.sync_threads()
        turn_tiles(((image, image + size),), self.spec.head_dim, QUERY_TILE, ACCUMULATOR_ORDER, tid // 32, THREADS // 32, None, factor)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if tid == 0:
            effect([target, image, Int32(2 * size)], "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "l,r,r")
            cute.arch.cp_async_bulk_commit_group()

    def images(self, tensor, tile_row, head, size: int):
        """Address of the first image of a head and the distance to the next tile's, in bytes."""
        heads = Int64(tensor.shape[1])
        return tensor.iterator.toint() + (Int64(tile_row) * heads + head) * size, heads * size

    @cute.jit
    def encode(self, results, place, do_tiles, rows, seen, buffers, sums, suffix, column_sums, peaks, limits):
        """dO8 of the chunk; exponent byte of each row (0: nothing to scale, 255: not finite, -1: no row, or one that sees no key) and its
        rowsum(dO8 * Oc), column sums of dO, divided by the sequence's keys (``sums``: tensor and row), sums of c * dO8 a tile (``suffix``),
        per warp the largest byte and the largest magnitude of dO (``peaks``), and where a power of dQ is a row's, the row's share of it
        (``limits``). All loads of a tile are under way before the first is used."""
        spec, head, left = self.spec, place.head, place.left
        tid, _, _ = cute.arch.thread_idx()
        column = 8 * (tid % self.lanes)
        target, step = self.images(do_tiles, place.tile_row, head, 2 * QUERY_TILE * spec.head_dim)
        dout_at, dout_step = column_of(results.dout, place.first, head, column)
        out_at, out_step = column_of(results.out, place.first, head, column)
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        top, largest = Int32(0), Int32(0)
        for tile in cutlass.range(place.tiles, unroll=1):
            xs, outs = [], []
            for part in cutlass.range_constexpr(self.parts):
                row = Int64(cutlass.min(QUERY_TILE * tile + self.rows * part + tid // self.lanes, left - 1))
                xs.append(eight_values(results.dout, dout_at + row * dout_step))
                outs.append(eight_values(results.out, out_at + row * out_step))
            if const_expr(not self.short):
                for part in cutlass.range_constexpr(self.parts):
                    row = Int64(cutlass.min(QUERY_TILE * (tile + 1) + self.rows * part + tid // self.lanes, left - 1))
                    if tid % 8 == 0:
                        ask_ahead(dout_at + row * dout_step)
                    if tid % (4 if spec.out_fp32 else 8) == 0:
                        ask_ahead(out_at + row * out_step)
            image = self.free_image(buffers, tile)
            row, byte, factor, weight, peak = self.row_scale(xs, rows, tile)
            nothing = row >> 24  # 0, which no compiler can know: else FP32 values are kept, or spilled, instead of widened again
            finite = peak if peak < 0x7F800000 and row < left else Int32(0)
            largest = cutlass.max(largest, finite)
            top = cutlass.max(top, byte if finite > 0 else Int32(0))
            weighted = cute.make_rmem_tensor(8, Float32)
            weighted.fill(0.0)
            deltas = []
            for part in cutlass.range_constexpr(self.parts):
                r = QUERY_TILE * tile + self.rows * part + tid // self.lanes
                words = cute.recast_tensor(xs[part], Int32)
                x, scale = wide([Uint32(words[i] | nothing) for i in range(4)], "bfloat16"), self.from_row(factor, part)
                present = Float32(1.0) if r < left else Float32(0.0)
                for i in cutlass.range_constexpr(8):
                    total[i] = total[i] + x[i] * present
                keep = Int32(0) if scale == 0.0 else Int32(-1)  # x may be anything where no key is seen
                delta = Float32(0.0)
                share = self.from_row(weight, part) if const_expr(spec.suffix) else None
                codes = cute.make_rmem_tensor(2, Int32)
                for i in cutlass.range_constexpr(2):
                    four = [x[4 * i + j] * scale for j in range(4)]
                    codes[i] = e4m3x4(*four) & keep
                    if const_expr(spec.delta_quantized or spec.suffix):
                        quantized = code_values(codes[i])
                    if const_expr(spec.delta_quantized):
                        four = quantized
                    for j in cutlass.range_constexpr(4):
                        delta = delta + four[j] * Float32(outs[part][4 * i + j])
                    if const_expr(spec.suffix):
                        for j in cutlass.range_constexpr(4):
                            weighted[4 * i + j] = weighted[4 * i + j] + share * quantized[j]
                deltas.append(delta)
                effect([self.place(image, r), codes[0], codes[1]], "st.shared.v2.b32 [$0], {$1, $2};", "r,r,r")
            delta = self.of_rows(deltas, lambda a, b: a + b)
            if tid % self.lanes < self.parts:
                rows.bytes[row], rows.deltas[row] = byte, delta if byte > 0 else Float32(0.0)
                if const_expr(spec.dq_grouped):
                    limits.of[place.tile_row + tile, head, row % QUERY_TILE] = self.limit(finite, limits)
            if const_expr(spec.suffix):
                self.sum_rows(weighted, column_sums, suffix, place.tile_row + tile, head)
            self.send_image(image, target + Int64(tile) * step)
        for i in cutlass.range_constexpr(5):
            top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << i))
        if tid % 32 == 0:
            peaks[tid // 32], peaks[WARPS + tid // 32] = top, largest
        share = Float32(0.0) if seen[0] == 0 else Float32(1.0) / Float32(seen[0])
        self.sum_rows(total, column_sums, sums[0], sums[1], head, share)

    @cute.jit
    def row_scale(self, xs, rows, tile):
        """Of the row of a tile that this thread looks after (as others of its row do): row of the chunk, exponent byte, factor that makes
        codes (0: none), weight of its codes in the coherent part, and the bits that ``byte`` was found from."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        row = QUERY_TILE * tile + tid // self.lanes + self.rows * self.own_part()
        inverse, share = rows.inverses[row], Float32(1.0)
        if const_expr(spec.align or not spec.halves):
            peak = self.of_rows([widest_pair(x) for x in xs], larger_pair)
            peak = cutlass.max(peak & 0x7FFF0000, peak << 16)
        if const_expr(spec.align):
            share = mantissa_share(bits_of(float_of(peak) * inverse))
            if const_expr(spec.halves):
                m = rows.maxima[row]
                share = exp2(m - on_grid(m - log2(share)))
            inverse = inverse / share
        if const_expr(spec.halves):
            peak = bits_of(self.of_rows([norm_of(x) for x in xs], lambda a, b: a + b))
        scaled = bits_of(float_of(peak) * inverse)
        byte = cutlass.max(byte_of_norm_bits(scaled) if const_expr(spec.halves) else byte_of_amax_bits(scaled), 1)
        byte = Int32(0) if peak == 0 else byte
        byte = byte if inverse > 0.0 else Int32(-1)
        factor = inverse * inverse_of_byte(byte) if byte > 0 else Float32(0.0)
        factor = Float32(math.nan) if byte == 255 else factor
        if const_expr(spec.suffix):
            share = self.rounded(share * rows.shares[row]) * scale_of_byte(cutlass.max(byte, 0))
        if const_expr(spec.align):
            cute.arch.sync_warp()  # the row's lanes have read its inverse, which one of them overwrites
            if tid % self.lanes < self.parts:
                rows.inverses[row] = inverse
        return row, byte, factor, share, peak

    @cute.jit
    def row_factors(self, results, place, rows, seen, ratio):
        """Factor on dO of each row of the chunk's tiles, 1 / l or 1; 0 where there is no row, or none that sees a key. Where there is a
        coherent part to sum, l / K beside it."""
        tid, _, _ = cute.arch.thread_idx()
        for r in cutlass.range(tid, QUERY_TILE * place.tiles, THREADS, unroll=1):
            inverse, share, m = Float32(0.0), Float32(0.0), Float32(0.0)
            if r < place.left:
                total = results.row_sum[place.head, place.first + r]
                if const_expr(self.spec.halves):
                    m = results.row_max[place.head, place.first + r] * ratio
                if total > 0.0:
                    if const_expr(self.spec.halves):
                        total = total * KEPT
                    if const_expr(self.spec.halves and not self.spec.align):
                        total = total * exp2(m - on_grid(m))
                    inverse = self.inverse_sum(total)
                    if const_expr(self.spec.suffix):
                        share = total / Float32(self.keys_seen(seen, r))
            rows.inverses[r] = inverse
            if const_expr(self.spec.suffix):
                rows.shares[r] = share
            if const_expr(self.spec.halves and self.spec.align):
                rows.maxima[r] = m
        cute.arch.sync_threads()

    def rounded(self, share):
        """l / K as c has it."""
        return eleven_bits(share) if self.spec.halves else share

    def keys_seen(self, seen, row):
        """Keys that a row of the chunk sees. ``seen``: the sequence's, and the chunk's first query minus the sequence's queries."""
        return cutlass.min(seen[0], row + 1 + seen[0] + seen[1]) if self.spec.causal else seen[0]

    @cute.jit
    def row_statistics(self, results, place, stats, rows, seen, reference, ratio, top_v, trouble):
        """a, b and c of each row, a thread a row."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        stat, step = self.images(stats, place.tile_row, place.head, 4 * STAT_FLOATS)
        for r in cutlass.range(tid, QUERY_TILE * place.tiles, THREADS, unroll=1):
            byte, delta = rows.bytes[r], rows.deltas[r]
            a, c = Float32(-math.inf), Float32(0.0)
            if byte >= 0:
                row = place.first + r
                total, m = results.row_sum[place.head, row], results.row_max[place.head, row] * ratio
                if const_expr(spec.halves):
                    m = on_grid(m + log2(total * rows.inverses[r]))
                    total = Float32(1.0) / rows.inverses[r]
                elif const_expr(spec.align):
                    share = Float32(1.0) / (total * rows.inverses[r])
                    total, m = total * share, m - log2(share)
                e = byte if byte > 0 and byte < 255 else reference
                if const_expr(results.dlse is not None):
                    factor = Float32(math.nan) if byte == 255 else rows.inverses[r] * inverse_of_byte(e)
                    delta = delta - results.dlse[place.head, row] * factor
                shift = Float32(e - reference) + float(spec.p_scale_log2)
                keys = self.keys_seen(seen, r)
                a, c = statistics(spec.fold_l, spec.centred or spec.suffix, total, m, keys, shift, exp2(shift))
                c = self.rounded(c)
                if const_expr(spec.halves):  # noqa: SIM102
                    if absolute(m) > LARGEST_REFERENCE:
                        flag(trouble, NEED_ROWS)
            if const_expr(spec.halves):
                values = (a, -delta * inverse_of_byte(top_v), c)
                self.packed_statistics(stat + Int64(r // QUERY_TILE) * step, r % QUERY_TILE, values, trouble)
            at = stat + Int64(r // QUERY_TILE) * step + 4 * (r % QUERY_TILE)
            effect([at + 4 * STAT_A, a], "st.global.f32 [$0], $1;", "l,f")
            effect([at + 4 * STAT_B, -delta], "st.global.f32 [$0], $1;", "l,f")
            effect([at + 4 * STAT_C, c], "st.global.f32 [$0], $1;", "l,f")

    @cute.jit
    def packed_statistics(self, stat, n, values, trouble):
        """FP16 a, b and c of a tile's query ``n`` where the layout wants them."""
        a, b, c = values
        if absolute(b) > 65504.0:
            flag(trouble, NEED_ROWS)
        j, t, half = n // 8, n // 2 % 4, n % 2
        ac = stat + 4 * (STAT_AC2 + 16 * (j // 2) + 4 * t + j % 2) + 2 * half
        for at, value in ((ac, a), (ac + 8, c), (stat + 4 * (STAT_B2 + 16 * (j // 4) + 4 * t + j % 4) + 2 * half, b)):
            effect([at, value], "{.reg .b16 h; cvt.rn.f16.f32 h, $1; st.global.b16 [$0], h;}", "l,f")

    @cute.jit
    def sum_rows(self, values, column_sums, target, row, head, share=None):
        """Sums of this thread's eight columns over all rows of the CTA, times ``share``, to ``target[row, head]``."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(8):
            column_sums[tid // self.lanes, 8 * (tid % self.lanes) + i] = values[i]
        cute.arch.sync_threads()
        if tid < self.spec.head_dim:
            whole = Float32(0.0)
            for i in cutlass.range_constexpr(self.rows):
                whole = whole + column_sums[i, tid]
            target[row, head, tid] = whole if const_expr(share is None) else whole * share

    @cute.jit
    def query_exponents(self, q_scale, row, groups, head):
        """Largest E8M0 byte of q's groups in the chunk (from ``row`` on), NaN apart, and whether the turned codes come under it: groups
        that are neither zeros nor NaN differ little from it."""
        top, low = Int32(0), Int32(254)
        if const_expr(self.spec.q_static):
            top = Int32(q_scale[0, head])
        else:
            for g in cutlass.range(cute.arch.lane_idx(), groups, 32, unroll=2):
                byte = Int32(q_scale[row + g, head])
                if byte < 255:
                    top = cutlass.max(top, byte)
                    low = cutlass.min(low, byte if byte > 0 else Int32(254))
            for i in cutlass.range_constexpr(5):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
                low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, offset=1 << i))
        return top, Int32(top - low <= RECODED)

    @cute.jit
    def headers(self, q_scale, stats, place, group_row, reference, scales, dq_power, tops, top, recoded, trouble):
        """Factors of each tile: one thread a tile. ``scales``: the softmax scale, and the same in log2 units as scores take it. ``top``,
        ``recoded``: of ``query_exponents``."""
        spec, head, left, tiles, tile_row = self.spec, place.head, place.left, place.tiles, place.tile_row
        softmax_scale, scale = scales
        tid, _, _ = cute.arch.thread_idx()
        stat, step = self.images(stats, tile_row, head, 4 * STAT_FLOATS)
        if tid < tiles:
            at = stat + Int64(tid) * step
            unit = scale_of_byte(reference) * 2.0**-spec.p_scale_log2
            for half in cutlass.range_constexpr(2):
                byte = top
                if const_expr(not spec.q_static):
                    inside = QUERY_TILE * tid + 32 * half < left
                    if inside:
                        byte = Int32(q_scale[group_row + 2 * tid + half, head])
                factor = scale_of_byte(byte) * scale
                effect([at + 4 * (STAT_S0 + half), factor], "st.global.f32 [$0], $1;", "l,f")
                if const_expr(spec.halves):  # noqa: SIM102
                    if factor * scale_of_byte(tops[0]) > LARGEST_SCALE:
                        flag(trouble, NEED_ROWS)
                share = exp2(Float32(byte - top))
                if const_expr(spec.recode):
                    share = Float32(1.0) if recoded == 1 else share
                effect([at + 4 * (STAT_Q0 + half), share], "st.global.f32 [$0], $1;", "l,f")
            effect([at + 4 * STAT_DQ, unit * softmax_scale * dq_power], "st.global.f32 [$0], $1;", "l,f")
            effect([at + 4 * STAT_DV, unit], "st.global.f32 [$0], $1;", "l,f")
            effect([at + 4 * STAT_DK, unit * softmax_scale * scale_of_byte(top)], "st.global.f32 [$0], $1;", "l,f")
            if const_expr(spec.halves):
                effect([at + 4 * STAT_VT, scale_of_byte(tops[1])], "st.global.f32 [$0], $1;", "l,f")

    @cute.jit
    def limit(self, bits, limits):
        """2^-power of :meth:`dq_power` for one row, from the bits of its largest magnitude; 0 where it has no gradient, or no keys: it
        bounds nothing, and others may have small ones."""
        power = power_of_sums(self.spec.head_dim, limits.softmax_scale, bits, limits.exponents, norms=self.spec.halves)
        return float_of((127 - power) << 23) if bits != 0 and limits.keys != 0 else Float32(0.0)

    @cute.jit
    def dq_power(self, peaks, exponents, softmax_scale):
        """Power of two under which no FP16 sum of this chunk's dQ can overflow (``power_of_sums``)."""
        spec = self.spec
        if const_expr(spec.dq_scale_log2 is not None):
            return float_of(Int32((127 + spec.dq_scale_log2) << 23))
        largest = peaks[WARPS]
        for i in cutlass.range_constexpr(WARPS + 1, 2 * WARPS):
            largest = cutlass.max(largest, peaks[i])
        power = power_of_sums(spec.head_dim, softmax_scale, largest, exponents, norms=spec.halves)
        if largest == 0:
            power = Int32(0)
        return float_of((power + 127) << 23)

    @cute.jit
    def widest(self, scale, static: cutlass.Constexpr, row, groups, head):
        """Largest E8M0 byte of a sequence's groups, NaN apart."""
        top = Int32(0)
        if const_expr(static):
            top = Int32(scale[0, head])
        else:
            for g in cutlass.range(cute.arch.lane_idx(), groups, 32, unroll=1):
                byte = Int32(scale[row + g, head])
                if byte < 255:
                    top = cutlass.max(top, byte)
            for i in cutlass.range_constexpr(5):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << i))
        return top

    @cute.jit
    def copy_queries(self, q, q_tiles, head, first, left, tiles, tile_row, buffers, trouble, exponents):
        """Q codes as tile images; the turned ones under the chunk's exponent (``recode``)."""
        tid, _, _ = cute.arch.thread_idx()
        factor = None
        if const_expr(self.spec.recode):
            factor = Int32(ONE_HALF2)
            if exponents.recoded == 0 and tid == 0:
                flag(trouble, NEED_QUERIES)
        target, step = self.images(q_tiles, tile_row, head, 2 * QUERY_TILE * self.spec.head_dim)
        for tile in cutlass.range(tiles, unroll=1):
            words = []
            for part in cutlass.range_constexpr(self.parts):
                r = QUERY_TILE * tile + self.rows * part + tid // self.lanes
                two = cute.make_rmem_tensor(2, Int32)
                row = first + cutlass.min(r, left - 1)
                at = q.iterator + cute.crd2idx((row, head, 8 * (tid % self.lanes)), q.layout)
                pointer = cute.make_ptr(Int32, at.toint(), cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), two)
                words.append((r, two))
            if const_expr(not self.short):
                for part in cutlass.range_constexpr(self.parts):
                    r = QUERY_TILE * (tile + 1) + self.rows * part + tid // self.lanes
                    if tid % self.lanes == 0:
                        ask_ahead((q.iterator + cute.crd2idx((first + cutlass.min(r, left - 1), head, 0), q.layout)).toint())
            image = self.free_image(buffers, tiles + tile)  # those of dO may still be leaving
            for r, two in words:
                keep = Int32(-1) if r < left else Int32(0)
                effect([self.place(image, r), two[0] & keep, two[1] & keep], "st.shared.v2.b32 [$0], {$1, $2};", "r,r,r")
            if const_expr(self.spec.halves):
                norm = self.of_rows([norm_of_codes(two[0], two[1]) for _, two in words], lambda a, b: a + b)
                if norm > float(ROW_SUM):
                    flag(trouble, NEED_QUERIES)
            if const_expr(self.spec.recode):
                byte = Int32(exponents.of[exponents.row + 2 * tile, head])
                down = exponents.top - byte if byte > 0 and byte < 255 and exponents.recoded == 1 else Int32(0)
                factor = ONE_HALF2 - down * 0x04000400
            self.send_image(image, target + Int64(tile) * step, factor)


def ask_ahead(address):
    """Bring the 128 bytes at a global address to L2."""
    effect([address], "prefetch.global.L2 [$0];", "l")


def column_of(x, row, head, column):
    """Address of an element of ``x [rows, heads, D]``, and the distance between rows, in bytes."""
    size = x.element_type.width // 8
    return (x.iterator + cute.crd2idx((row, head, column), x.layout)).toint(), Int64(x.stride[0]) * size


def eight_values(x, address):
    """Eight neighbouring elements of ``x``, one load, as they are."""
    values = cute.make_rmem_tensor(8, x.element_type)
    pointer = cute.make_ptr(x.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(8)), values)
    return values


@cute.jit
def mantissa_share(bits):
    """f in (1/2, 1] for which a positive FP32 over f is a power of two, from its bits; 1 where it is 0, subnormal or not finite."""
    mantissa = bits & 0x7FFFFF
    usable = mantissa != 0 and bits >= 0x00800000 and bits < 0x7F800000
    return float_of(mantissa | (126 << 23)) if usable else Float32(1.0)


def code_values(word):
    """Four E4M3 codes to FP32."""
    from lp_fa4.common.numbers import e4m3x4_to_float

    return e4m3x4_to_float(word)


@kernel_cache
def compile_prepass(arch: str, spec: PrepassSpec, offsets_dtype: str, has_dlse: bool):
    """Compile for ``arch``. Arguments at launch, in order:

    those of ``fake_results``; q: uint8 ``[N, H, D]``; q_scale: uint8 ``[rows, H]``; k_scale, v_scale: uint8 ``[rows, Hkv]`` (None unless
    ``dq_half`` or ``halves``); offsets_q (read if jagged), offsets_k: ``[B + 1]``; do_tiles, q_tiles, stats: as the main kernel's; sums:
    fp32 ``[chunk rows, H, D]``, column sums of dO over the keys; suffix: fp32 ``[tile rows, H, D]``, sums of c * dO8 a tile (None
    unless ``suffix``); dq_scale: fp32 ``[chunk rows, H]``, what FP16 sums must be multiplied by (None unless ``dq_half``), or
    ``[tile rows, H, 64]``, what those of a row of this sequence alone would, 0 where it has no gradient or no keys (``dq_grouped``); need:
    int32 ``[chunk rows, H]``, ``NEED_*`` where FP16 scores do not do (None unless ``halves``); dq: as fp32, flat, to be zeroed; queries per
    sequence (if not jagged); softmax scale.
    """
    heads, kv_heads, d = symbol(), symbol(), spec.head_dim
    images = lambda kind, n: fake(kind, (symbol(), heads, n), compact=True)  # noqa: E731
    return build(
        arch,
        Prepass(spec),
        *fake_results(heads, symbol(), d, spec.out_fp32, has_dlse),
        fake("uint8", (symbol(), heads, d)),
        fake("uint8", (symbol(), heads), align=1),
        *[fake("uint8", (symbol(), kv_heads), align=1) if spec.dq_half or spec.halves else None for _ in range(2)],
        fake_offsets(offsets_dtype),
        fake_offsets(offsets_dtype),
        images("uint8", 2 * QUERY_TILE * d),
        images("uint8", 2 * QUERY_TILE * d),
        images("float32", STAT_FLOATS),
        fake("float32", (symbol(), heads, d), compact=True),
        fake("float32", (symbol(), heads, d), compact=True) if spec.suffix else None,
        fake("float32", (symbol(), heads, *[QUERY_TILE] * spec.dq_grouped), align=4, compact=True) if spec.dq_half else None,
        fake("int32", (symbol(), heads), align=4, compact=True) if spec.halves else None,
        fake("float32", (symbol(),), align=16),
        Int32(1),
        Float32(1.0),
    )
