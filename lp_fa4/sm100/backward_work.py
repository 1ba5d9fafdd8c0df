"""Work items of the backward as every warp role sees them, and small device helpers of its roles."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import absolute, bits_of, inline_ptx
from lp_fa4.sm100.backward_config import TILE


class KeyTile(NamedTuple):
    """One key tile of one key/value head. ``row``: its first key within the sequence. ``tile_row``: workspace row of the first query tile.
    ``first_query``, ``first_row``: rows of the first query in q and in dO. ``first``, ``per``: first query tile that meets it, and how many
    per query head. ``steps``: of all heads of the group; 0: no query sees it. ``rotation``: query tiles
    after ``first`` where it starts."""

    sequence: Int32
    head: Int32
    tile: Int32
    row: Int32
    first_key: Int32
    keys: Int32
    tile_row: Int32
    queries: Int32
    first_query: Int32
    first_row: Int32
    first: Int32
    per: Int32
    steps: Int32
    rotation: Int32


class Item(NamedTuple):
    """A record of the work list: key tiles ``begin`` to ``end`` of a sequence."""

    sequence: Int32
    begin: Int32
    end: Int32
    first_key: Int32
    keys: Int32
    tile_row: Int32
    queries: Int32
    first_query: Int32


@cute.jit
def item_count(args):
    """Items of all key/value heads."""
    return args.total[0] * args.kv_heads


@cute.jit
def fetch(args, index: Int32):
    """Item ``index``. The load warp runs ahead, so the other roles find the record in the first-level cache."""
    record = cute.make_rmem_tensor(8, Int32)
    cute.autovec_copy(args.items[index // args.kv_heads, None], record)
    return Item(*[record[i] for i in range(8)])


@cute.jit
def key_tile(spec: cutlass.Constexpr, args, item: Item, index: Int32, tile: Int32):
    """Key tile ``tile`` of ``item``, which is number ``index``."""
    first_row = item.first_query
    if const_expr(spec.shared):
        first_row = item.sequence * item.queries
    row = tile * TILE
    tiles = (item.queries + (TILE - 1)) // TILE
    first = Int32(0)
    if const_expr(spec.causal):
        first = cutlass.min(cutlass.max(row - item.keys + item.queries, 0) // TILE, tiles)
    per = tiles - first
    return KeyTile(
        item.sequence,
        index % args.kv_heads,
        tile,
        row,
        item.first_key,
        item.keys,
        item.tile_row,
        item.queries,
        item.first_query,
        first_row,
        first,
        per,
        per * spec.group,
        tile % cutlass.max(per, 1),
    )


@cute.jit
def query_step(spec: cutlass.Constexpr, item: KeyTile, s: Int32):
    """Query head and query tile of step ``s``. Neighbouring key tiles start at different query tiles, so that their dQ reductions do not
    meet."""
    head, tile = item.head, s
    if const_expr(spec.group > 1):
        head, tile = head * spec.group + s // item.per, s % item.per
    tile = tile + item.rotation
    return head, item.first + (tile - item.per if tile >= item.per else tile)


@cute.jit
def dq_row(spec: cutlass.Constexpr, args, item: KeyTile, tile: Int32):
    """Row of dQ's workspace for a query tile: one of several buffers where queries are shared."""
    row = item.tile_row + tile
    if const_expr(spec.shared):
        row = Int32(cute.arch.block_idx()[0]) % args.replicas * args.dq_rows + tile
    return row


def largest_of(a, b, c):
    """Largest of three, NaN if one is."""
    return Float32(inline_ptx(T.f32(), [a, b, c], "max.NaN.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def warp_amax(x):
    """Largest magnitude of a warp's values, NaN if one is."""
    return Float32(inline_ptx(T.f32(), [x], "redux.sync.max.abs.NaN.f32 $0, $1, 0xffffffff;", "=f,f", side_effects=True))


@cute.jit
def block_amax(values, live):
    """Largest magnitude, as bits, of 32 values of each of a warp's lanes (a 32 x 32 block), NaN if one is. Lanes that are not ``live`` have
    no say."""
    tops = [largest_of(absolute(values[i]), absolute(values[i + 1]), absolute(values[i + 2])) for i in (0, 3)]
    for i in cutlass.range_constexpr(6, 30, 4):
        tops[0] = largest_of(tops[0], absolute(values[i]), absolute(values[i + 1]))
        tops[1] = largest_of(tops[1], absolute(values[i + 2]), absolute(values[i + 3]))
    top = largest_of(tops[0], absolute(values[30]), absolute(values[31]))
    top = largest_of(top, tops[1], tops[1])
    return bits_of(warp_amax(top if live else Float32(0.0)))
