"""Work list of the Hopper backward: every key tile of every head exactly once, those of a sequence and head together."""

import itertools

import pytest
import torch

from lp_fa4.sm90.backward_items import item_capacity, work_items
from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE

LENGTHS = (0, 1, 127, 128, 129, 0, 700, 5)


def offsets_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def walk(items, total, heads, keys):
    """(sequence, head, item of the sequence) in the order in which the kernel takes them, decoded as it does."""
    out = []
    for t in range(int(total) * heads):
        b, first, _, _, length, *_ = items[t // heads].tolist()
        count = -(-length // keys)
        head, n = divmod(t - first * heads, count)
        out.append((b, head, n))
    return out


@pytest.mark.parametrize("keys", [KEY_TILE, 2 * KEY_TILE])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("jagged", [False, True])
def test_every_tile_once(keys, dtype, jagged):
    rows = (3, 9, 0, 200, 64, 1, 65, 2)
    ok, heads, tokens = offsets_of(LENGTHS, dtype), 3, sum(LENGTHS) + 13
    oq = offsets_of(rows, dtype) if jagged else None
    items, total = work_items(ok, oq, queries=None if jagged else 130, tokens=tokens, serial=False, keys=keys)
    assert items.dtype == torch.int32 and items.shape[0] == item_capacity(tokens, len(LENGTHS), False, keys) >= int(total)
    seen = walk(items, total, heads, keys)
    want = {(b, h, n) for b, length in enumerate(LENGTHS) for h in range(heads) for n in range(-(-length // keys))}
    assert len(seen) == len(want) and set(seen) == want
    pairs = [(b, h) for b, h, _ in seen]
    assert sum(x != y for x, y in itertools.pairwise(pairs)) == len(set(pairs)) - 1, "a head's tiles are not together"
    if jagged:
        order = list(dict.fromkeys(b for b, _ in pairs))
        assert order == sorted(order, key=lambda b: -rows[b]), "sequences with more queries come first, equal ones in order"
    for b, _, _, start, length, tile_row, queries, scale_row in items[: int(total)].tolist():
        assert (start, length) == (int(ok[b]), LENGTHS[b]) and scale_row == start // 32 + b
        assert queries == (rows[b] if jagged else 130)
        assert tile_row == (int(oq[b]) // QUERY_TILE + b if jagged else b * 3)


def test_serial_takes_whole_sequences():
    ok = offsets_of(LENGTHS)
    items, total = work_items(ok, None, queries=64, tokens=sum(LENGTHS), serial=True)
    assert int(total) == len(LENGTHS) == items.shape[0]
    assert items[0, 0] == 6, "the longest first"
    assert sorted(items[:, 0].tolist()) == list(range(len(LENGTHS)))
