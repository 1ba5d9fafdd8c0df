"""Square 32 x 32 blocks re-coded to one exponent per 32 tokens and head.

Hopper's MMAs take no scales, so an exponent must be constant along the contraction over D. The new exponent of a row of
blocks is the largest of its blocks'; codes of the others are multiplied by a power of two at most 1 and rounded again.
That is exact as long as a code stays normal in E4M3 (2^-6) and loses low bits below: a block whose largest element is
``2^-n`` of its neighbour's keeps ``max(0, min(4, 18 - n))`` significant bits of that element. Byte 255 (NaN) wins.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32

from lp_fa4.common.numbers import e4m3x4, e4m3x4_to_float, exp2
from lp_fa4.common.sequence import TILE, find_sequence, region_groups
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.mx import MXTensor
from lp_fa4.sm90.tile_transpose import THREADS, load16, store16


class Recode:
    """One CTA per 128-token tile and head; a thread takes 16 codes at a time, which one block covers."""

    def __init__(self, head_dim: int, static: bool):
        self.head_dim, self.static = head_dim, static

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        stream,
    ):
        heads = Int32(codes.shape[1])
        tiles = Int32(codes.shape[0]) // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(codes, scales, offsets, out, out_scales, heads).launch(grid=[tiles * heads, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        out_scales: cute.Tensor,
        heads: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        tile_row, head = bid // heads, bid % heads
        batch = Int32(offsets.shape[0]) - 1
        b = find_sequence(offsets, batch, tile_row, TILE)
        begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
        first = TILE * (tile_row - (begin // TILE + b))
        blocks, chunks = self.head_dim // 32, self.head_dim // 16
        group_row = 0 if cutlass.const_expr(self.static) else begin // 32 + b + first // 32
        limit = end
        if b == batch - 1:
            limit = Int32(codes.shape[0])  # slack past the last sequence is written as zeros
        for i in cutlass.range_constexpr(TILE * chunks // THREADS):
            row, chunk = (tid + i * THREADS) // chunks, (tid + i * THREADS) % chunks
            token = begin + first + row
            words = cute.make_rmem_tensor(4, Uint32)
            words.fill(0)
            if token < end:
                scale_row = group_row if cutlass.const_expr(self.static) else group_row + row // 32
                top = Int32(0)
                for j in cutlass.range_constexpr(blocks):
                    top = cutlass.max(top, Int32(scales[scale_row, head, j]))
                mine = Int32(scales[scale_row, head, chunk // 2])
                load16(codes, (token, head, 16 * chunk), words)
                factor = exp2(cutlass.Float32(mine - top))
                for w in cutlass.range_constexpr(4):
                    four = e4m3x4_to_float(Int32(words[w]))
                    words[w] = Uint32(e4m3x4(*[x * factor for x in four]))
                if top == 255:
                    words.fill(0)
            if token < limit:
                store16(out, (token, head, 16 * chunk), words)
        region = region_groups(offsets, batch, b, Int32(out_scales.shape[0]))
        if cutlass.const_expr(self.static):
            if (tid == 0) & (tile_row == 0):
                top = Int32(0)
                for j in cutlass.range_constexpr(blocks):
                    top = cutlass.max(top, Int32(scales[0, head, j]))
                out_scales[0, head, 0] = cutlass.Uint8(top)
        elif (tid < 4) & (first // 32 + tid < region):
            top = Int32(0)
            if begin + first + 32 * tid < end:
                for j in cutlass.range_constexpr(blocks):
                    top = cutlass.max(top, Int32(scales[group_row + tid, head, j]))
            out_scales[group_row + tid, head, 0] = cutlass.Uint8(top)


@kernel_cache
def _compile_recode(arch: str, offsets_dtype: str, head_dim: int, static: bool):
    heads, tokens, rows = symbol(), symbol(), symbol()
    return build(
        arch,
        Recode(head_dim, static),
        fake("uint8", (tokens, heads, head_dim)),
        fake("uint8", (rows, heads, head_dim // 32), align=1),
        fake_offsets(offsets_dtype),
        fake("uint8", (tokens, heads, head_dim)),
        fake("uint8", (rows, heads, 1), align=1),
    )


def recode(x: MXTensor, offsets: torch.Tensor) -> MXTensor:
    """``x [T, H, D]`` in blocks 32 columns wide to blocks ``(32, D)``, or ``(0, D)`` if static. ``offsets``: int ``[B+1]``."""
    tokens, heads, head_dim = x.shape
    codes = torch.empty_like(x.codes, memory_format=torch.contiguous_format)
    scales = torch.zeros(x.scale.shape[0], heads, 1, dtype=torch.uint8, device=x.device)
    if tokens and heads:
        compiled = _compile_recode(arch_of(x.device), dtype_name(offsets), head_dim, x.is_static)
        launch(compiled, x.device, x.codes, x.scale_bytes, offsets, codes, scales)
    return MXTensor.from_bytes(codes, scales, (0 if x.is_static else 32, head_dim), x.offsets, 0)
