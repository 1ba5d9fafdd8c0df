"""Work list of the Hopper backward, its kernel in the emulator: every key tile of every head exactly once, those of a sequence and head
together; and the zeros that its launches leave."""

import itertools
import json
import subprocess
import sys

import pytest

from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

LENGTHS = [0, 1, 127, 128, 129, 0, 700, 5]
ROWS = [3, 9, 0, 200, 64, 1, 65, 2000]
HEADS = 3
CASES = {
    "equal queries": dict(lengths=LENGTHS, queries=130, slack=13, scales=75),
    "pairs of tiles, int64": dict(lengths=LENGTHS, queries=130, keys=2 * KEY_TILE, dtype="int64"),
    "jagged queries": dict(lengths=LENGTHS, queries=ROWS, slack=1),
    "more sequences than threads": dict(lengths=[3] * 300, queries=5),
    "whole sequences": dict(lengths=LENGTHS, queries=64, serial=True, scales=32),
}


@pytest.fixture(scope="module")
def made():
    command = [sys.executable, "-m", "tests.sm90.items_emulated", json.dumps(list(CASES.values()))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(CASES, reports, strict=True))


def walk(items, total, keys):
    """(sequence, head, item of the sequence) in the order in which the kernel takes them, decoded as it does."""
    out = []
    for t in range(total * HEADS):
        b, first, _, _, length, *_ = items[t // HEADS]
        count = -(-length // keys)
        head, n = divmod(t - first * HEADS, count)
        out.append((b, head, n))
    return out


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].get("serial")])
def test_every_tile_once(made, name):
    case, items, (total, counter, *_) = CASES[name], made[name]["items"], made[name]["state"]
    lengths, rows, keys = case["lengths"], case["queries"], case.get("keys", KEY_TILE)
    batch, jagged = len(lengths), isinstance(rows, list)
    assert len(items) == (sum(lengths) + case.get("slack", 0)) // keys + batch >= total and counter == 0
    seen = walk(items, total, keys)
    want = {(b, h, n) for b, length in enumerate(lengths) for h in range(HEADS) for n in range(-(-length // keys))}
    assert len(seen) == len(want) and set(seen) == want
    pairs = [(b, h) for b, h, _ in seen]
    assert sum(x != y for x, y in itertools.pairwise(pairs)) == len(set(pairs)) - 1, "a head's tiles are not together"
    order = list(dict.fromkeys(b for b, _ in pairs))
    if jagged:
        tiles = [-(-rows[b] // QUERY_TILE) for b in order]
        assert all(16 * x >= 15 * y for x, y in itertools.pairwise(tiles)), "sequences with more queries come first"
    else:
        assert order == sorted(order)
    starts, firsts = ([0, *itertools.accumulate(x)] for x in (lengths, rows if jagged else [rows] * batch))
    for b, _, _, start, length, tile_row, queries, scale_row in items[:total]:
        assert (start, length, scale_row) == (starts[b], lengths[b], starts[b] // 32 + b)
        assert queries == (rows[b] if jagged else rows)
        assert tile_row == (firsts[b] // QUERY_TILE + b if jagged else b * -(-rows // QUERY_TILE))


def test_serial_takes_whole_sequences(made):
    items, (total, *_) = made["whole sequences"]["items"], made["whole sequences"]["state"]
    assert total == len(LENGTHS) == len(items)
    assert items[0][:3] == [6, 0, 0], "the longest first"
    assert sorted(x[0] for x in items) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("name", CASES)
def test_zeros(made, name):
    case = CASES[name]
    scales = [case["scales"]] * 2 if "scales" in case else []
    assert made[name]["zeroed"] == [case.get("slack", 0)] * 2 + scales
