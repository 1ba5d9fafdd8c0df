"""Scatter and gather of scales: the definition is ``lp_fa4.mx.layout``; here block shapes other than 32×32 are spread first.

Only scale bytes move (1 per 1024 payload bytes): the payload stays at its unpadded place.
"""

import torch
from torch import Tensor

from lp_fa4.mx.layout import GROUP, gather_sf, scale_rows, scatter_sf, token_rows


def square_grid(scale: Tensor, block: tuple[int, int], tokens: int, columns: int, offsets: Tensor | None) -> Tensor:
    """The scale grid as if the blocks were 32×32: uint8 ``[rows, ceil(columns / 32)]``, 0 in rows of no group."""
    wide = scale if block[1] == GROUP else scale.repeat_interleave(block[1] // GROUP, dim=1)
    if block[0] != 0:
        return wide
    rows = scale_rows(tokens, offsets)
    if offsets is None:
        return wide.expand(rows, -1).contiguous()
    grid = torch.zeros(rows + 1, wide.shape[1], dtype=torch.uint8, device=scale.device)
    grid[token_rows(offsets, tokens)] = wide
    return grid[:-1].contiguous()


def scatter_scales(scale: Tensor, block: tuple[int, int], tokens: int, columns: int, offsets: Tensor | None, axis: int) -> Tensor:
    """uint8 scale grid of any block shape to ``[row tiles, k tiles, 32, 4, 4]``; every pad is 0."""
    return scatter_sf(square_grid(scale, block, tokens, columns, offsets), tokens, columns, offsets, axis)


def gather_scales(sf: Tensor, tokens: int, columns: int, offsets: Tensor | None, axis: int) -> Tensor:
    """Inverse: uint8 ``[rows, ceil(columns / 32)]``."""
    return gather_sf(sf, tokens, columns, offsets, axis)
