"""The quantize pass in front of attention: one launch writes payload, scales and, where asked, the transposed copy.

``x [T, H, D]`` (FP32, FP16 or BF16, any strides with D contiguous) minus its sequence's vector, in blocks of 32 or 128
tokens by D. A CTA holds one 128-token tile of one head in registers: load, subtract, maximum, quantize, store; with the
codes also through shared memory for the copy (``tile_transpose``). Optional by-products of the same read:

* ``sums``: FP32 column sums of the centred, unrounded values per tile, in a fixed order (``sequence_vectors`` adds
  the tiles of a sequence up);
* ``dots``: FP32 dot product of every row with a vector of its sequence, e.g. the scores that a subtracted mean of K
  would have had.

Bytes are those of ``lp_fa4.mx.quantize_mx`` for the same FP32 values. Every row, scale and position is written, pads
and slack included.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Uint32, const_expr
from torch import Tensor

from lp_fa4.common.numbers import byte_of_amax_bits, e4m3x4, inverse_of_byte, magnitude_max, warp_max
from lp_fa4.common.sequence import TILE, find_sequence, region_groups
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol
from lp_fa4.mx import MXTensor
from lp_fa4.mx.layout import group_rows
from lp_fa4.sm90.operands import MXTensorWithCopy
from lp_fa4.sm90.tile_transpose import THREADS, shared_words, store_columns, word_index

WARPS = THREADS // 32


@dataclass(frozen=True)
class QuantizeSpec:
    """Compile key: see the module's docstring. ``order``: of the transposed copy, or None. ``group``: for ``dots``, heads
    of x per head of its vectors."""

    head_dim: int
    dtype: str
    block: int = 128
    order: str | None = None
    centred: bool = False
    sums: bool = False
    dots: bool = False
    group: int = 1

    @property
    def lanes(self) -> int:
        """Threads that share a row; each holds 8 of its columns."""
        return self.head_dim // 8

    @property
    def passes(self) -> int:
        """Rows a thread holds."""
        return TILE * self.lanes // THREADS

    @property
    def blocks(self) -> int:
        """Scale blocks of a tile."""
        return TILE // self.block


class Quantize:
    """One CTA per 128-token tile (tile rule) and head."""

    def __init__(self, spec: QuantizeSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        transposed: cute.Tensor,
        sums: cute.Tensor,
        vectors: cute.Tensor,
        dots: cute.Tensor,
        factor: Float32,
        stream,
    ):
        heads = Int32(x.shape[1])
        tiles = Int32(x.shape[0]) // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(x, offsets, means, codes, scales, transposed, sums, vectors, dots, factor, heads).launch(
            grid=[tiles * heads, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.jit
    def load(self, x: cute.Tensor, token: Int32, head: Int32, column: Int32, out: cute.Tensor):
        """Eight elements of one row as FP32."""
        raw = cute.make_rmem_tensor(8, x.element_type)
        pointer = x.iterator + cute.crd2idx((token, head, column), x.layout)
        source = cute.make_ptr(x.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), raw)
        for i in cutlass.range_constexpr(8):
            out[i] = raw[i].to(Float32)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        transposed: cute.Tensor,
        sums: cute.Tensor,
        vectors: cute.Tensor,
        dots: cute.Tensor,
        factor: Float32,
        heads: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        tile_row, head = bid // heads, bid % heads
        batch = Int32(offsets.shape[0]) - 1
        smem = cutlass.utils.SmemAllocator()
        maxima = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 4)), byte_alignment=16)
        b = find_sequence(offsets, batch, tile_row, TILE)
        begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
        first = TILE * (tile_row - (begin // TILE + b))
        limit = end
        if b == batch - 1:
            limit = Int32(x.shape[0])  # slack past the last sequence: written, never read
        row0, column = tid // spec.lanes, 8 * (tid % spec.lanes)
        step = THREADS // spec.lanes
        mean = cute.make_rmem_tensor(8, Float32)
        mean.fill(0.0)
        if const_expr(spec.centred):
            self.load(means, b, head, column, mean)
        values = cute.make_rmem_tensor((8, spec.passes), Float32)
        top = cute.make_rmem_tensor(4, Int32)
        top.fill(0)
        # Rows of other sequences are loaded where this one ends, and replaced by zeros: no branch between the loads.
        for p in cutlass.range_constexpr(spec.passes):
            token = cutlass.max(cutlass.min(begin + first + row0 + p * step, end - 1), 0)
            self.load(x, token, head, column, values[None, p])
        for p in cutlass.range_constexpr(spec.passes):
            token = begin + first + row0 + p * step
            block = (p * step) // spec.block
            for i in cutlass.range_constexpr(8):
                values[i, p] = values[i, p] - mean[i] if token < end else Float32(0.0)
                top[block] = magnitude_max(top[block], values[i, p])
            if const_expr(spec.dots):
                self.row_dot(values, p, vectors, dots, b, head, column, token, end, limit, factor)
        warp, lane = tid // 32, tid % 32
        for g in cutlass.range_constexpr(spec.blocks):
            most = warp_max(top[g])
            if lane == 0:
                maxima[warp, g] = most
        cute.arch.sync_threads()
        tile = cute.make_rmem_tensor(1, Uint32)
        if const_expr(spec.order is not None):
            tile = smem.allocate_tensor(Uint32, cute.make_layout(shared_words(spec.head_dim)), byte_alignment=16)
        bytes_ = cute.make_rmem_tensor(4, Int32)
        for g in cutlass.range_constexpr(spec.blocks):
            most = maxima[0, g]
            for w in cutlass.range_constexpr(1, WARPS):
                most = cutlass.max(most, maxima[w, g])
            bytes_[g] = byte_of_amax_bits(most)
        for p in cutlass.range_constexpr(spec.passes):
            byte = bytes_[(p * step) // spec.block]
            inverse = inverse_of_byte(byte)
            words = cute.make_rmem_tensor(2, Uint32)
            for w in cutlass.range_constexpr(2):
                code = e4m3x4(*[values[4 * w + i, p] * inverse for i in range(4)])
                words[w] = Uint32(code if byte != 255 else Int32(0))
            row = row0 + p * step
            if begin + first + row < limit:
                pointer = codes.iterator + cute.crd2idx((begin + first + row, head, column), codes.layout)
                target = cute.make_ptr(Uint32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=8)
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))
            if const_expr(spec.order is not None):
                at = word_index(row, column // 16, spec.head_dim) + (column // 8) % 2 * 2
                tile[at], tile[at + 1] = words[0], words[1]
        region = region_groups(offsets, batch, b, Int32(scales.shape[0]))
        if (tid < 4) & (first // 32 + tid < region):
            group_byte = Int32(0)
            if begin + first + 32 * tid < end:
                group_byte = bytes_[0]
                for g in cutlass.range_constexpr(1, spec.blocks):
                    group_byte = bytes_[g] if tid == g else group_byte
            scales[begin // 32 + b + first // 32 + tid, head, 0] = cutlass.Uint8(group_byte)
        if const_expr(spec.sums):
            self.column_sums(smem, values, sums, tile_row, head)
        if const_expr(spec.order is not None):
            cute.arch.sync_threads()
            position = 32 * (begin // 32 + b) + first
            store_columns(tile, transposed, head, position, 32 * region - first, spec.head_dim, spec.order)

    @cute.jit
    def row_dot(self, values, p: cutlass.Constexpr, vectors, dots, b, head, column, token, end, limit, factor):
        """``factor * row . vectors[b, head // group]`` by the threads of a row; 0 for rows of no sequence."""
        spec = self.spec
        vector = cute.make_rmem_tensor(8, Float32)
        self.load(vectors, b, head // spec.group, column, vector)
        dot = Float32(0.0)
        for i in cutlass.range_constexpr(8):
            dot = dot + values[i, p] * vector[i]
        for i in cutlass.range_constexpr(4 if spec.lanes == 16 else 3):
            dot = dot + cute.arch.shuffle_sync_bfly(dot, offset=1 << i)
        if (column == 0) & (token < limit):
            dots[head, token] = dot * factor if token < end else Float32(0.0)

    @cute.jit
    def column_sums(self, smem, values, sums, tile_row, head):
        """FP32 sums over the tile's rows: per thread, per warp, then over the warps in order."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        parts = smem.allocate_tensor(Float32, cute.make_layout((spec.head_dim, WARPS)), byte_alignment=16)
        warp, lane, column = tid // 32, tid % 32, 8 * (tid % spec.lanes)
        for i in cutlass.range_constexpr(8):
            part = values[i, 0]
            for p in cutlass.range_constexpr(1, spec.passes):
                part = part + values[i, p]
            part = part + cute.arch.shuffle_sync_bfly(part, offset=16)
            if const_expr(spec.lanes == 8):
                part = part + cute.arch.shuffle_sync_bfly(part, offset=8)
            if lane < spec.lanes:
                parts[column + i, warp] = part
        cute.arch.sync_threads()
        if tid < spec.head_dim:
            total = parts[tid, 0]
            for w in cutlass.range_constexpr(1, WARPS):
                total = total + parts[tid, w]
            sums[tile_row, head, tid] = total


@kernel_cache
def _compile_quantize(arch: str, offsets_dtype: str, spec: QuantizeSpec):
    d = spec.head_dim
    tokens, heads, rows, vector_heads, batch = (symbol() for _ in range(5))
    return build(
        arch,
        Quantize(spec),
        fake(spec.dtype, (tokens, heads, d)),
        fake(offsets_dtype, (symbol(),), align=4 if offsets_dtype == "int32" else 8),
        fake("float32", (batch, heads, d), compact=True) if spec.centred else None,
        fake("uint8", (tokens, heads, d), compact=True),
        fake("uint8", (rows, heads, 1), align=1, compact=True),
        fake("uint8", (heads, d, symbol(32)), compact=True) if spec.order is not None else None,
        fake("float32", (symbol(), heads, d), compact=True) if spec.sums else None,
        fake("float32", (symbol(), vector_heads, d), compact=True) if spec.dots else None,
        fake("float32", (heads, tokens), align=4, compact=True) if spec.dots else None,
        Float32(1.0),
    )


def quantize(
    x: Tensor,
    offsets: Tensor,
    *,
    block: int = 128,
    order: str | None = None,
    means: Tensor | None = None,
    sums: bool = False,
    vectors: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[MXTensor, Tensor | None, Tensor | None]:
    """``x [T, H, D]`` in blocks ``(block, D)``, D 64 or 128, sequences by int ``offsets [B + 1]``, B >= 1, T >= 1.

    Args:
        order: also write the transposed copy (the result is then an ``MXTensorWithCopy``).
        means: fp32 ``[B, H, D]`` subtracted first.
        sums: also return the tiles' column sums of what is quantized, fp32 ``[T // 128 + B, H, D]`` (zeros for a tile
            without tokens).
        vectors: fp32 ``[B, H / group, D]``; also return ``factor * x . vectors`` of every row, fp32 ``[H, T]``.
    """
    tokens, heads, head_dim = x.shape
    batch = offsets.shape[0] - 1
    if x.stride(-1) != 1 or any(s * x.element_size() % 16 for s in x.stride()[:-1]) or x.data_ptr() % 16:
        x = x.contiguous() if x.data_ptr() % 16 == 0 and not x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    empty = x.new_empty
    codes = empty((tokens, heads, head_dim), dtype=torch.uint8)
    scales = empty((group_rows(tokens, batch), heads, 1), dtype=torch.uint8)
    copy = empty((heads, head_dim, 32 * group_rows(tokens, batch)), dtype=torch.uint8) if order is not None else None
    parts = empty((group_rows(tokens, batch, TILE), heads, head_dim), dtype=torch.float32) if sums else None
    dots = empty((heads, tokens), dtype=torch.float32) if vectors is not None else None
    group = heads // vectors.shape[1] if vectors is not None else 1
    spec = QuantizeSpec(head_dim, dtype_name(x), block, order, means is not None, sums, vectors is not None, group)
    compiled = _compile_quantize(arch_of(x.device), dtype_name(offsets), spec)
    launch(compiled, x.device, x, offsets, means, codes, scales, copy, parts, vectors, dots, factor)
    made = MXTensor.from_bytes(codes, scales, (block, head_dim), offsets, 0)
    if copy is not None:
        made = MXTensorWithCopy(made.payload, made.scale, made.block, made.offsets, made.token_dim, copy)
    return made, parts, dots
