"""Work items of the backward's main kernel, made on the device: no value is read by the host.

An item is one key tile of one sequence (or, ``serial``, all key tiles of a sequence); the kernel takes each once per key/value head. Where
items differ in cost (jagged queries, causal masks, whole sequences) they are sorted, longest first, in a stable order, so that the list
is the same from run to run; elsewhere they are equal and stay in memory order.
"""

import torch
from torch import Tensor

from lp_fa4.sm100.backward_config import TILE

FIELDS = 8
"""int32 fields: sequence, first key tile, end key tile, first key, keys, workspace row of the first query tile, queries, first row in q."""


def item_capacity(tokens: int, batch: int, serial: bool, keys: int = TILE) -> int:
    """Upper bound of the number of items of ``keys`` keys, from shapes alone."""
    return batch if serial else tokens // keys + batch


def work_items(
    offsets_k: Tensor, offsets_q: Tensor, *, queries: int | None, tokens: int, causal: bool, serial: bool, keys_per_item: int = TILE
) -> tuple[Tensor, Tensor]:
    """Items int32 ``[capacity, 8]`` (``FIELDS``) and their number, int32 ``[1]``.

    Args:
        offsets_k: int ``[B + 1]``, B >= 1. offsets_q: the same (shared queries: zeros). queries: of a sequence, None where they are
            jagged. tokens: rows of k. keys_per_item: of a key tile (a pair of CTAs takes two of them as one).
    """
    batch, device = offsets_k.shape[0] - 1, offsets_k.device
    first_key = offsets_k[:-1].to(torch.int32)
    keys = offsets_k[1:].to(torch.int32) - first_key
    sequence = torch.arange(batch, dtype=torch.int32, device=device)
    first_query = offsets_q[:-1].to(torch.int32)
    if queries is None:
        rows = offsets_q[1:].to(torch.int32) - first_query
        tile_row = first_query // TILE + sequence
    else:
        rows = torch.full_like(first_key, queries)
        tile_row = sequence * -(-queries // TILE)
    tiles = (keys + (keys_per_item - 1)) // keys_per_item
    if serial:
        fields = torch.stack([sequence, torch.zeros_like(tiles), tiles, first_key, keys, tile_row, rows, first_query], 1)
        order = torch.argsort(tiles.to(torch.int64) * rows, descending=True, stable=True)
        return fields[order].contiguous(), torch.full((1,), batch, dtype=torch.int32, device=device)
    ends = torch.cumsum(tiles, 0, dtype=torch.int64)
    item = torch.arange(item_capacity(tokens, batch, serial, keys_per_item), dtype=torch.int64, device=device)
    owner = torch.searchsorted(ends, item, right=True).clamp(max=batch - 1)
    tile = (item - (ends - tiles)[owner]).to(torch.int32)
    columns = [x[owner] for x in (sequence, first_key, keys, tile_row, rows, first_query)]
    fields = torch.stack([columns[0], tile, tile + 1, *columns[1:]], 1)
    if queries is None or causal:
        cost = (columns[4] + (TILE - 1)) // TILE
        if causal:
            hidden = tile * keys_per_item - columns[2] + columns[4]
            cost = (cost - hidden.clamp(min=0) // TILE).clamp(min=0)
        cost = torch.where(item < ends[-1], cost, -1)  # unused entries last
        fields = fields[torch.argsort(cost, descending=True, stable=True)]
    return fields.contiguous(), ends[-1:].to(torch.int32)
