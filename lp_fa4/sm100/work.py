"""Work items as every warp role sees them: two Q tiles of one head of one sequence, and how many key tiles each has to visit.

Note [Drawn items]: a CTA starts with item ``blockIdx.x``. Without ``tuning.drawn`` it goes on in strides of ``gridDim.x``. With it, the
grid has a CTA per record and a running CTA takes the place of one that has not started (Cluster Launch Control): the longest item not yet
begun, whoever is free. The load warp draws, as it is the first to need an item and the last tiles of the one before hide the answer's
latency, drops records past the list's end, and hands the rest on through a ring of ``RING`` entries in shared memory. Drawing as late as
that matters: an item drawn early waits behind a long one while other CTAs run dry.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from lp_fa4.sm100.config import KEY_TILE, QUERY_TILE, ForwardSpec
from lp_fa4.sm100.sync import arrive, wait

RING = 2
"""Drawn items that may wait to be read; the phase arithmetic below is that of two."""
ENTRY = 4
"""Words of a ring entry: item, key tiles of its Q tiles 0 and 1, whether its queries are loaded anew."""
READERS = 13
"""Warps that read the ring: 8 softmax, 4 correction, 1 MMA."""
NONE = 2**31 - 1
"""Index that no list reaches: there is no next item."""


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


@cute.jit
def first_index(kernel: cutlass.Constexpr, args):
    """This CTA's first item, and the index that ends its walk: ``while index < end``."""
    index, end = Int32(cute.arch.block_idx()[0]), args.state[0]
    if const_expr(kernel.tuning.drawn):
        index = index if index < end else Int32(NONE)
        end = Int32(NONE)
    return index, end


@cute.jit
def read_drawn(kernel: cutlass.Constexpr, shared, bars, turn: Int32):
    """Entry ``turn`` (items drawn by this CTA before it) of the ring: ``(index, steps0, steps1, fresh)``. Once per warp of ``READERS``."""
    bar = kernel.barriers
    slot = turn & (RING - 1)
    wait(bars + bar.drawn_full + slot, turn >> 1 & 1)
    entry = [shared.drawn[j, slot] for j in range(ENTRY)]
    arrive(bars + bar.drawn_empty + slot)
    return entry[0], entry[1], entry[2], entry[3]


@cute.jit
def next_index(kernel: cutlass.Constexpr, shared, bars, index: Int32, turn: Int32):
    """Index of the item after ``index``, the ``turn``-th of this CTA (note [Drawn items])."""
    following = index + Int32(cute.arch.grid_dim()[0])
    if const_expr(kernel.tuning.drawn):
        following, _, _, _ = read_drawn(kernel, shared, bars, turn)
    return following


@cute.jit
def request_item(kernel: cutlass.Constexpr, shared, bars):
    """Ask for the next item; the answer comes asynchronously. The load warp's."""
    answered = bars + kernel.barriers.answered
    cute.arch.fence_proxy("async.shared", space="cta")  # the answer before was read by ordinary loads
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
        cute.arch.issue_clc_query(answered, shared.answer.iterator, multicast=False)


@cute.jit
def receive_item(kernel: cutlass.Constexpr, shared, bars, requests: Int32):
    """Answer to request number ``requests``: ``(index, granted)``."""
    wait(bars + kernel.barriers.answered, requests & 1)
    index, _, _, granted = cute.arch.clc_response(shared.answer.iterator)
    return index, granted


@cute.jit
def hand_on(kernel: cutlass.Constexpr, shared, bars, turn: Int32, index: Int32, steps0: Int32, steps1: Int32, fresh: Int32):
    """Write entry ``turn`` of the ring."""
    bar = kernel.barriers
    slot = turn & (RING - 1)
    wait(bars + bar.drawn_empty + slot, (turn >> 1 & 1) ^ 1)
    with cute.arch.elect_one():
        shared.drawn[0, slot] = index
        shared.drawn[1, slot] = steps0
        shared.drawn[2, slot] = steps1
        shared.drawn[3, slot] = fresh
        cute.arch.mbarrier_arrive(bars + bar.drawn_full + slot)
