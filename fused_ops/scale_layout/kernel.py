"""Swizzled buffer of one axis back to the compact scale grid, jagged or dense, in one launch. The way there is
``lp_fa4.common.scatter_scales``, which the attention core needs too.

A CTA owns one 128-token tile of the tile rule and writes its rows of the grid; pads are 0. So one launch serves any number of sequences,
and every byte of the grid is written exactly once.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from lp_fa4.common.scatter_scales import (
    THREADS,
    WORDS,
    ScatterSpec,
    _compile_scatter_scales,
    atom_source,
    scatter_scales,
)
from lp_fa4.common.sequence import find_sequence, region_groups
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.mx import GROUP, SF_TILE, scale_rows

__all__ = ["WORDS", "ScatterSpec", "_compile_scatter_scales", "atom_source", "gather_scales", "scatter_scales"]


class GatherScales:
    """One CTA per 128-token tile: the first MMA row of each 32 x 32 block has its byte."""

    def __init__(self, axis: int, dense: bool):
        self.axis, self.dense = axis, dense

    @cute.jit
    def __call__(self, sf: cute.Tensor, offsets: cute.Tensor, grid: cute.Tensor, tokens: Int32, stream):
        tiles = Int32(sf.shape[1 - self.axis])
        self.kernel(sf, offsets, grid, tokens).launch(grid=[tiles, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sf: cute.Tensor, offsets: cute.Tensor, grid: cute.Tensor, tokens: Int32):
        tid, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        row, groups = 4 * tile, cute.ceil_div(tokens, GROUP) - 4 * tile
        region = groups
        if cutlass.const_expr(not self.dense):
            batch = Int32(offsets.shape[0]) - 1
            b = find_sequence(offsets, batch, tile, SF_TILE)
            begin = Int32(offsets[b])
            first = 4 * (tile - (begin // SF_TILE + b))
            row = begin // GROUP + b + first
            groups = cute.ceil_div(Int32(offsets[b + 1]) - begin, GROUP) - first
            region = region_groups(offsets, batch, b, Int32(grid.shape[0])) - first
        blocks = Int32(grid.shape[1])
        for at in cutlass.range(tid, cutlass.min(region, 4) * blocks, THREADS):
            group, block = at // blocks, at % blocks
            byte = cutlass.Uint8(0)
            if group < groups:
                if cutlass.const_expr(self.axis == 1):
                    byte = sf[Int64(tile), block // 4, 4 * group + block % 4]
                else:
                    byte = sf[Int64(block // 4), tile, 4 * (block % 4) + group]
            grid[Int64(row + group), block] = byte


@kernel_cache
def _compile_gather_scales(arch: str, offsets_dtype: str | None, axis: int, dense: bool):
    return build(
        arch,
        GatherScales(axis, dense),
        fake("uint8", (symbol(), symbol(), 4 * WORDS), compact=True),
        fake_offsets(offsets_dtype),
        fake("uint8", (symbol(), symbol()), align=1, compact=True),
        Int32(1),
    )


def gather_scales(sf: Tensor, tokens: int, columns: int, offsets: Tensor | None, axis: int) -> Tensor:
    """``fused_ops.scale_layout.reference.gather_scales`` on a GPU, the same bytes."""
    out = torch.empty(scale_rows(tokens, offsets), -(-columns // GROUP), dtype=torch.uint8, device=sf.device)
    if not out.numel() or not sf.numel():
        return out.zero_()
    if offsets is not None and offsets.shape[0] == 1:
        return out.zero_()
    compiled = _compile_gather_scales(arch_of(sf.device), None if offsets is None else dtype_name(offsets), axis, offsets is None)
    launch(compiled, sf.device, sf.contiguous().reshape(sf.shape[0], sf.shape[1], 4 * WORDS), offsets, out, tokens)
    return out
