"""Compact scale grid to the swizzled buffer of one axis, jagged or dense, in one launch; and where an atom's bytes come from.

A CTA owns one 128-token tile of the tile rule and writes its part of the buffer, a 32-bit word a thread at a time, pads included (0). So
one launch serves any number of sequences, and every byte of the buffer is written exactly once.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from torch import Tensor

from lp_fa4.common.sequence import find_sequence
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.mx import GROUP, SF_TILE

THREADS = 128
WORDS = 128
"""32-bit words of an atom: word ``4 * (r % 32) + r // 32`` holds the four blocks of MMA row ``r``."""


def atom_source(axis: int, k_tile, word, byte: int):
    """Group of the tile and first column under byte ``byte`` of word ``word``: atom ``k_tile`` along columns.

    Axis 1: MMA rows are tokens, the atom covers 128 columns. Axis 0: MMA rows are the atom's 128 columns, its bytes the tile's four groups.
    """
    if axis == 1:
        return word % 4, SF_TILE * k_tile + GROUP * byte
    return Int32(byte), SF_TILE * k_tile + 32 * (word % 4) + word // 4


@dataclass(frozen=True)
class ScatterSpec:
    """Compile key. ``width``: columns under one scale; ``static``: one row of scales for all tokens; ``dense``: no offsets; ``span``:
    columns that an atom serves, 128, or fewer where each atom belongs to one narrower head (the rest of it is pad)."""

    axis: int
    width: int
    static: bool
    dense: bool
    span: int = SF_TILE


class ScatterScales:
    """One CTA per 128-token tile."""

    def __init__(self, spec: ScatterSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, scale: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, tokens: Int32, columns: Int32, stream):
        tiles = Int32(out.shape[1 - self.spec.axis])
        self.kernel(scale, offsets, out, tokens, columns).launch(grid=[tiles, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, scale: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, tokens: Int32, columns: Int32):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        row, groups = 4 * tile, cute.ceil_div(tokens, GROUP) - 4 * tile
        if cutlass.const_expr(not spec.dense):
            b = find_sequence(offsets, Int32(offsets.shape[0]) - 1, tile, SF_TILE)
            begin = Int32(offsets[b])
            first = 4 * (tile - (begin // SF_TILE + b))
            row = begin // GROUP + b + first
            groups = cute.ceil_div(Int32(offsets[b + 1]) - begin, GROUP) - first
        for at in cutlass.range(tid, Int32(out.shape[spec.axis]) * WORDS, THREADS):
            k_tile, word = at // WORDS, at % WORDS
            made = Int32(0)
            for byte in cutlass.range_constexpr(4):
                group, column = atom_source(spec.axis, k_tile, word, byte)
                end = columns
                if cutlass.const_expr(spec.span < SF_TILE):
                    column -= (SF_TILE - spec.span) * k_tile
                    end = cutlass.min(columns, spec.span * (k_tile + 1))
                if (group < groups) & (column < end):
                    source = Int64(0) if cutlass.const_expr(spec.static) else Int64(row + group)
                    made = made | (Int32(scale[source, column // spec.width]) << (8 * byte))
            if cutlass.const_expr(spec.axis == 1):
                out[Int64(tile), k_tile, word] = made
            else:
                out[Int64(k_tile), tile, word] = made


@kernel_cache
def _compile_scatter_scales(arch: str, offsets_dtype: str | None, spec: ScatterSpec):
    return build(
        arch,
        ScatterScales(spec),
        fake("uint8", (symbol(), symbol()), align=1),
        fake_offsets(offsets_dtype),
        fake("int32", (symbol(), symbol(), WORDS), compact=True),
        Int32(1),
        Int32(1),
    )


def scatter_scales(
    scale: Tensor,
    block: tuple[int, int],
    tokens: int,
    columns: int,
    offsets: Tensor | None,
    axis: int,
    shape: tuple[int, ...],
    span: int = SF_TILE,
) -> Tensor:
    """Scales ``[rows, columns / width]`` to the swizzled buffer, uint8 ``shape``: the bytes of ``lp_fa4.mx.layout.scatter_sf`` (``span``:
    see :class:`ScatterSpec`)."""
    out = torch.empty(shape, dtype=torch.uint8, device=scale.device)
    if not out.numel():
        return out
    if offsets is not None and offsets.shape[0] == 1:  # no sequence owns a tile
        return out.zero_()
    spec = ScatterSpec(axis, block[1], block[0] == 0, offsets is None, span)
    compiled = _compile_scatter_scales(arch_of(scale.device), None if offsets is None else dtype_name(offsets), spec)
    words = out.view(torch.int32).reshape(shape[0], shape[1], WORDS)
    launch(compiled, scale.device, scale, offsets, words, tokens, columns)
    return out
