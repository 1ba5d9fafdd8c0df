"""What one 128 x 128 tile of the forward costs, from executed instructions: ``python -m tests.sm100.tile_profile [fa4]``.

Two runs that differ only in their number of key tiles are subtracted, so prologue, epilogue and set-up drop out: what remains is the steady
state. ``fa4``: the same for flash-attn-4's BF16 forward. One JSON line: warp instructions, operations and bytes of a tile, and the clocks
that each unit of a multiprocessor needs for them. README.md of ``lp_fa4/sm100`` has the table.
"""

import json
import sys
from collections.abc import Callable

from tests.emulator import api, capture
from tests.emulator.profile import Profile, profile
from tests.sm100.cases import case

ARCH = "sm_100a"


def forward_case(keys: int):
    """Two full Q tiles of one head over ``keys`` keys; scores so flat that no maximum moves after the first tile."""
    return case(ARCH, {"shared": 256, "keys": [keys], "heads": 1, "sharpness": 0.05}, {"processors": 1})


def fa4_case(keys: int):
    """flash-attn-4's BF16 forward on the same shape."""
    from tests.emulator.kernels import fa4_forward

    made = fa4_forward(ARCH, 256, keys)
    if made.prepare:
        api.record(made.prepare, ARCH)
    return made


def tile(make: Callable, few: int = 256, many: int = 768) -> Profile:
    """Counts of one 128 x 128 tile."""
    seen = []
    for keys in (few, many):
        made = make(keys)
        _, result = api.call_under(made.call, ARCH, api.Schedule("eager", width=32))
        seen.append(profile(result.machines[-1]))
    tiles = 2 * (many - few) // 128

    def one(a: dict, b: dict) -> dict:
        return {k: (b.get(k, 0) - a.get(k, 0)) / tiles for k in sorted(b) if b.get(k, 0) != a.get(k, 0)}

    return Profile(one(seen[0].classes, seen[1].classes), one(seen[0].tally, seen[1].tally))


def main() -> None:
    """Print one JSON line."""
    capture.install(ARCH)
    found = tile(fa4_case if "fa4" in sys.argv[1:] else forward_case)
    print(json.dumps({**found.classes, **found.tally, "clocks": found.cycles(ARCH)}))


if __name__ == "__main__":
    main()
