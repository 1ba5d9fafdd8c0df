"""Where the scales of an MXFP8 tensor lie: groups, tiles and the 512-byte atoms of the tensor cores.

Two rules place everything; both are computable from ``offsets[b]`` and ``b`` alone, with no prefix sum over padded
lengths and no host read of device data:

* **groups**: group ``g`` (32 tokens) of sequence ``b`` owns the row ``offsets[b] // 32 + b + g`` of the compact scale
  grid;
* **tiles**: tile ``i`` (128 tokens) of sequence ``b`` owns the tile ``offsets[b] // 128 + b + i`` of a swizzled
  buffer.

Both are injective because ``floor((x + n) / t) + 1 >= floor(x / t) + ceil(n / t)`` for all integers ``x, n >= 0``.

A swizzled scale-factor (SF) buffer is ``[row tiles, k tiles, 32, 4, 4]`` bytes: one 512-byte atom holds the scales of
128 rows by 4 blocks of 32 along the contraction; the byte of row ``r`` and block ``j`` is at ``[r % 32, r // 32 % 4,
j % 4]`` of its atom. This is the layout that ``tcgen05.cp`` and cuBLAS expect (PTX ISA, "scale factor layout";
cuBLAS, "1D block scaling factors layout").
"""

import torch
from torch import Tensor

GROUP = 32
"""Tokens that share one scale."""
SF_TILE = 128
"""Rows of one scale-factor atom; also the tokens covered by its four blocks along a contraction over tokens."""


def group_rows(tokens: int, batch: int, size: int = GROUP) -> int:
    """Rows of a jagged scale grid with groups of ``size`` tokens: ``tokens // size + batch``.

    ``tokens`` is the capacity, ``values.shape[0]``, which may exceed ``offsets[-1]``.
    """
    return tokens // size + batch


def scale_rows(tokens: int, offsets: Tensor | None, size: int = GROUP) -> int:
    """Rows of the compact grid along the token axis: jagged by the group rule, dense ``ceil(tokens / size)``."""
    if offsets is None:
        return -(-tokens // size)
    return group_rows(tokens, offsets.shape[0] - 1, size)


def sf_tiles(tokens: int, offsets: Tensor | None) -> int:
    """128-token tiles of a swizzled buffer along the token axis (the tile rule when jagged)."""
    return scale_rows(tokens, offsets, SF_TILE)


def check_offsets(
    offsets: Tensor, tokens: int, name: str = "offsets", device: torch.device | None = None, *, validate: bool = False
) -> None:
    """Refuse offsets that do not describe ``tokens`` rows, in words.

    Dtype, shape and device are always checked. ``validate=True`` also reads the values, which waits for the device:
    ``offsets[0]`` must be 0, the sequence non-decreasing, and ``offsets[-1]`` at most ``tokens``.

    Raises: ``TypeError`` for the type and the dtype, ``ValueError`` for everything else.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} is a {type(offsets).__name__}; it must be a tensor, int32 or int64 [batch + 1]")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {offsets.dtype}; allowed are torch.int32 and torch.int64")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(offsets.shape)}; it must be [batch + 1] with at least one element")
    if device is not None and offsets.device != device:
        raise ValueError(f"{name} is on {offsets.device} but the values are on {device}; both must be on one device")
    if not validate:
        return
    host = offsets.tolist()
    if host[0] != 0:
        raise ValueError(f"{name}[0] is {host[0]}; it must be 0")
    for i in range(1, len(host)):
        if host[i] < host[i - 1]:
            raise ValueError(f"{name}[{i}] is {host[i]}, less than {name}[{i - 1}] = {host[i - 1]}; offsets must not decrease")
    if host[-1] > tokens:
        raise ValueError(f"{name}[-1] is {host[-1]}; it must be at most the number of values, {tokens}")


def check_on_host(offsets: Tensor | None, tokens: int, name: str = "offsets") -> None:
    """:func:`check_offsets` with the values, where they lie on a CPU and reading them waits for nothing. For bodies of operators: what is
    traced has no values."""
    if offsets is not None and offsets.device.type == "cpu":
        check_offsets(offsets, tokens, name, validate=True)


def sequence_ids(offsets: Tensor, tokens: int) -> Tensor:
    """Sequence of each of ``tokens`` rows, int64 ``[tokens]``; rows at or past ``offsets[-1]`` get ``batch``."""
    rows = torch.arange(tokens, device=offsets.device)
    return torch.searchsorted(offsets[1:].to(torch.int64).contiguous(), rows, right=True)


def token_rows(offsets: Tensor, tokens: int, size: int = GROUP) -> Tensor:
    """Row of each token in a jagged grid with groups of ``size`` tokens, int64 ``[tokens]``.

    Tokens at or past ``offsets[-1]`` get the row after the last, ``group_rows(tokens, batch, size)``, so that a grid
    with one spare row can absorb them.
    """
    batch = offsets.shape[0] - 1
    rows = torch.arange(tokens, device=offsets.device)
    seq = sequence_ids(offsets, tokens)
    start = offsets.to(torch.int64)[torch.clamp(seq, max=batch)]
    row = start // size + seq + (rows - start) // size
    return torch.where(seq < batch, row, group_rows(tokens, batch, size))


def _group_places(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each row of the compact grid: is it a group of some sequence (bool), and its place in 32-token units of the
    tile rule.

    The place of group ``g`` of sequence ``b`` is ``4 * (offsets[b] // 128 + b) + g``.
    """
    batch = offsets.shape[0] - 1
    start = offsets.to(torch.int64)
    rows = torch.arange(group_rows(tokens, batch), device=offsets.device)
    if batch == 0:
        return torch.zeros_like(rows, dtype=torch.bool), rows
    first = start[:-1] // GROUP + torch.arange(batch, device=offsets.device)
    seq = torch.clamp(torch.searchsorted(first, rows, right=True) - 1, min=0)
    group = rows - first[seq]
    length = start[1:][seq] - start[:-1][seq]
    return group * GROUP < length, 4 * (start[:-1][seq] // SF_TILE + seq) + group


def _to_atoms(grid: Tensor) -> Tensor:
    """``[rows, blocks]`` bytes, multiples of 128 and 4, to ``[rows/128, blocks/4, 32, 4, 4]``."""
    rows, blocks = grid.shape
    return grid.reshape(rows // SF_TILE, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def _from_atoms(sf: Tensor) -> Tensor:
    """Inverse of :func:`_to_atoms`."""
    row_tiles, k_tiles = sf.shape[:2]
    return sf.permute(0, 3, 2, 1, 4).reshape(row_tiles * SF_TILE, k_tiles * 4)


def _pad(grid: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(grid, (0, columns - grid.shape[1], 0, rows - grid.shape[0]))


def _ceil(x: int, to: int) -> int:
    return -(-x // to) * to


def scatter_sf(scale: Tensor, tokens: int, columns: int, offsets: Tensor | None, axis: int) -> Tensor:
    """Compact grid of 32×32 blocks to the swizzled SF buffer of an MMA that contracts over ``axis``.

    Args:
        scale: uint8 ``[rows, ceil(columns / 32)]``, rows by :func:`scale_rows`.
        tokens, columns: size of the payload ``[tokens, columns]``.
        offsets: int ``[B + 1]`` or None.
        axis: 1 contracts over columns (MMA rows are tokens, each byte repeats over its 32 tokens); 0 contracts over
            tokens (MMA rows are columns). The token axis follows the tile rule, so a sequence starts at a tile of its
            own.

    Returns: uint8 ``[row tiles, k tiles, 32, 4, 4]``. Every pad is 0, which decodes to 2^-127 and meets payload 0.
    """
    blocks = -(-columns // GROUP)
    if offsets is None:
        by_token = _pad(scale, _ceil(-(-tokens // GROUP), 4), blocks)
    else:
        used, place = _group_places(offsets, tokens)
        padded = torch.zeros(4 * sf_tiles(tokens, offsets) + 1, blocks, dtype=scale.dtype, device=scale.device)
        by_token = padded.index_copy(0, torch.where(used, place, padded.shape[0] - 1), scale)[:-1]
    if axis == 1:
        return _to_atoms(_pad(by_token.repeat_interleave(GROUP, dim=0), by_token.shape[0] * GROUP, _ceil(blocks, 4)))
    if axis == 0:
        by_column = by_token.t().repeat_interleave(GROUP, dim=0)[:columns]
        return _to_atoms(_pad(by_column, _ceil(columns, SF_TILE), by_token.shape[0]))
    raise ValueError(f"axis is {axis}; allowed are 0 (contract over tokens) and 1 (contract over columns)")


def gather_sf(sf: Tensor, tokens: int, columns: int, offsets: Tensor | None, axis: int) -> Tensor:
    """Inverse of :func:`scatter_sf`: uint8 ``[scale_rows, ceil(columns / 32)]``; rows that belong to no group are
    0.
    """
    if axis not in (0, 1):
        raise ValueError(f"axis is {axis}; allowed are 0 (contract over tokens) and 1 (contract over columns)")
    blocks = -(-columns // GROUP)
    flat = _from_atoms(sf)
    by_token = flat[::GROUP, :blocks] if axis == 1 else flat[: blocks * GROUP : GROUP].t()
    rows = scale_rows(tokens, offsets)
    if offsets is None:
        return by_token[:rows].contiguous()
    used, place = _group_places(offsets, tokens)
    if by_token.shape[0] == 0:
        return torch.zeros(rows, blocks, dtype=sf.dtype, device=sf.device)
    picked = by_token[torch.where(used, place, 0)]
    return torch.where(used[:, None], picked, torch.zeros_like(picked))
