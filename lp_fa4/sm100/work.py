"""Work items as every warp role sees them: two Q tiles of one head of one sequence, and how many key tiles each has to visit."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from lp_fa4.sm100.config import KEY_TILE, QUERY_TILE, ForwardSpec


class Item(NamedTuple):
    """One work item. ``row``: first query row of tile 0 within its sequence. ``steps0``, ``steps1``: key tiles of the two Q tiles, 0 for a
    tile without rows; a tile with rows takes at least one step, even if it sees no key: its output is then written as 0. ``steps``: of the
    longer one."""

    sequence: Int32
    head: Int32
    row: Int32
    first_query: Int32
    queries: Int32
    first_key: Int32
    keys: Int32
    steps0: Int32
    steps1: Int32
    steps: Int32


@cute.jit
def tile_steps(spec: cutlass.Constexpr, row: Int32, queries: Int32, keys: Int32) -> Int32:
    """Key tiles that the Q tile starting at ``row`` visits."""
    seen = keys
    if const_expr(spec.causal):
        last = cutlass.min(row + QUERY_TILE, queries)
        seen = cutlass.min(keys, cutlass.max(last + keys - queries, 0))
    steps = cutlass.max(cute.ceil_div(seen, KEY_TILE), 1)
    return steps if row < queries else Int32(0)


@cute.jit
def fetch(spec: cutlass.Constexpr, records: cute.Tensor, index: Int32):
    """Item ``index`` of the work list."""
    record = cute.make_rmem_tensor(8, Int32)
    cute.autovec_copy(records[index, None], record)
    row, queries, keys = record[2], record[4], record[6]
    steps0 = tile_steps(spec, row, queries, keys)
    steps1 = tile_steps(spec, row + QUERY_TILE, queries, keys)
    return Item(record[0], record[1], row, record[3], queries, record[5], keys, steps0, steps1, cutlass.max(steps0, steps1))


def item_steps(item: Item, tile: int) -> Int32:
    """Key tiles of Q tile 0 or 1."""
    return item.steps0 if tile == 0 else item.steps1


def scale_tile(spec: ForwardSpec, sequence, first_query):
    """Scale-factor tile of a sequence's first query rows (the tile rule; shared queries are one sequence)."""
    return Int32(0) if spec.shared_q else first_query // QUERY_TILE + sequence


@cute.jit
def same_queries(a: Item, b: Item):
    """Whether two items of shared queries have the same Q tiles."""
    return a.head == b.head and a.row == b.row
