"""Scale factors of attention operands as the tensor cores read them: one 512-byte atom per (128-token tile, head).

``axis`` 1 contracts over the head dimension (Q, K; dO and V in the backward), 0 over tokens (V; Q, K and dO in the backward). A head
dimension below 128 is padded to 128, so that no atom holds two heads. Static scales are one tile that every tile finds through a stride of
0. :func:`scale_atoms` is one launch; :func:`reference_atoms` is the definition, in plain torch.
"""

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor, sf_tiles
from lp_fa4.mx.layout import scatter_sf
from lp_fa4.sm100.config import KEY_TILE

SF_ATOM = 512


def scale_atoms(x: MXTensor, axis: int) -> Tensor:
    """Swizzled scales of ``x [tokens, heads, head_dim]`` on a GPU, uint8 ``[tiles, heads, 512]``, pads 0."""
    from lp_fa4.common.scatter_scales import scatter_scales

    tokens, heads, dim = x.shape
    static = x.is_static
    tokens, offsets = (KEY_TILE, None) if static else (tokens, x.offsets)
    tiles = 1 if static else sf_tiles(tokens, offsets)
    shape = (tiles, heads, 32, 4, 4) if axis == 1 else (heads, tiles, 32, 4, 4)
    grid = x.scale_bytes.reshape(x.scale_bytes.shape[0], -1).contiguous()
    return _finish(scatter_scales(grid, x.block, tokens, heads * dim, offsets, axis, shape, min(dim, KEY_TILE)), x, axis)


def reference_atoms(x: MXTensor, axis: int) -> Tensor:
    """The same bytes on any device."""
    tokens, heads, _ = x.shape
    blocks = KEY_TILE // 32
    grid = x.scale_bytes
    if x.block[1] != 32:
        grid = grid.repeat_interleave(x.block[1] // 32, dim=-1)
    grid = torch.nn.functional.pad(grid, (0, blocks - grid.shape[-1])).reshape(grid.shape[0], heads * blocks)
    static = x.is_static
    if static:
        grid, tokens = grid.expand(blocks, -1), KEY_TILE
    return _finish(scatter_sf(grid, tokens, heads * KEY_TILE, None if static else x.offsets, axis), x, axis)


def _finish(atoms: Tensor, x: MXTensor, axis: int) -> Tensor:
    """Atoms ``[row tiles, k tiles, 32, 4, 4]`` as ``[tiles, heads, 512]``."""
    if axis == 0:
        atoms = atoms.transpose(0, 1)
    atoms = atoms.reshape(atoms.shape[0], x.shape[1], SF_ATOM)
    return atoms[:1].expand(max(1, x.shape[0]), -1, -1) if x.is_static else atoms
