"""Work items of the backward's main kernel, made on the device: no value is read by the host.

An item is one key tile of one sequence (or, ``serial``, all key tiles of a sequence); the kernel takes each once per key/value head: all
key tiles of a sequence's first head, then of its second (field 1 says where the sequence begins), so that the heads at work at one time
are few and their dQ and query operands stay in L2. Where sequences differ in queries they are sorted, longest first, in a stable order, so
that the list is the same from run to run; elsewhere items are equal, or longest first inside each head (causal), and stay in memory order.
"""

import torch
from torch import Tensor

from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE


def item_capacity(tokens: int, batch: int, serial: bool, keys: int = KEY_TILE) -> int:
    """Upper bound of the number of items of ``keys`` keys, from shapes alone."""
    return batch if serial else tokens // keys + batch


def work_items(
    offsets_k: Tensor, offsets_q: Tensor | None, *, queries: int | None, tokens: int, serial: bool, keys: int = KEY_TILE
) -> tuple[Tensor, Tensor]:
    """Items int32 ``[capacity, 8]`` (fields: ``backward_layout.ITEM_FIELDS``) and their number, int32 ``[1]``.

    Args:
        offsets_k: int ``[B + 1]``, B >= 1. offsets_q: the same, or None with ``queries`` a sequence. tokens: rows of k. keys: of an item.
    """
    batch, device = offsets_k.shape[0] - 1, offsets_k.device
    capacity = item_capacity(tokens, batch, serial, keys)
    start = offsets_k[:-1].to(torch.int32)
    length = offsets_k[1:].to(torch.int32) - start
    index = torch.arange(batch, dtype=torch.int32, device=device)
    if queries is None:
        assert offsets_q is not None
        first_query = offsets_q[:-1].to(torch.int32)
        rows = offsets_q[1:].to(torch.int32) - first_query
        tile_row = first_query // QUERY_TILE + index
    else:
        rows = torch.full_like(start, queries)
        tile_row = index * -(-queries // QUERY_TILE)
    tiles = (length + (keys - 1)) // keys
    scale_row = start // 32 + index
    if serial:
        fields = torch.stack([index, torch.zeros_like(index), tiles, start, length, tile_row, rows, scale_row], 1)
        cost = tiles.to(torch.int64) * rows
        order = torch.argsort(cost, descending=True, stable=True)
        return fields[order].contiguous(), torch.full((1,), batch, dtype=torch.int32, device=device)
    columns = [index, torch.zeros_like(index), torch.zeros_like(index), start, length, tile_row, rows, scale_row]
    if queries is None:
        order = torch.argsort(rows, descending=True, stable=True)
        tiles, columns = tiles[order], [x[order] for x in columns]
    ends = torch.cumsum(tiles, 0, dtype=torch.int64)
    columns[1] = (ends - tiles).to(torch.int32)
    item = torch.arange(capacity, dtype=torch.int64, device=device)
    owner = torch.searchsorted(ends, item, right=True).clamp(max=batch - 1)
    return torch.stack(columns, 1)[owner].contiguous(), ends[-1:].to(torch.int32)
