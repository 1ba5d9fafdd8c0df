"""What one 128 x 128 tile of the backward costs, by executed instructions: ``python -m tests.sm100.backward_tile_profile [half] [pairs]``.

Two runs that differ only in their number of query tiles are subtracted, so prologue, epilogue and set-up drop out. One JSON line: warp
instructions and bytes of a tile by class, and the clocks that each unit needs for them at the rates of ``tests.emulator.profile``.
``half``: FP16 sums of dQ. ``pairs``: the kernel with two CTAs, a tile of one of them.
"""

import json
import sys

from tests.emulator import api, capture
from tests.emulator.profile import Profile, profile
from tests.sm100.backward_cases import case

ARCH = "sm_100a"


def counts(queries: int, half: bool, pairs: bool) -> Profile:
    """Profile of the main kernel on one key tile (two: one of each CTA)."""
    changes = {"grad_format": "mxfp8", "dq_dtype": "float16" if half else "float32"}
    keys = 256 if pairs else 128
    made = case(ARCH, {"shared": queries, "keys": [keys], "heads": 1, "mean": True}, {"processors": 1}, changes, pairs=pairs)
    _, result = api.call_under(made.call, ARCH, api.Schedule("eager", width=32))
    name = "backward_pair_kernel" if pairs else "backward_kernel"
    return profile(next(m for m, launch in zip(result.machines, result.launches, strict=True) if name in launch.name))


def main() -> None:
    """Print one JSON line."""
    capture.install(ARCH)
    half, pairs = "half" in sys.argv[1:], "pairs" in sys.argv[1:]
    few, many = (counts(queries, half, pairs) for queries in (256, 512))
    tiles = (512 - 256) // 128 * (2 if pairs else 1)

    def tile(a: dict, b: dict) -> dict:
        return {k: (b.get(k, 0) - a.get(k, 0)) / tiles for k in sorted(b)}

    one = Profile(tile(few.classes, many.classes), tile(few.tally, many.tally))  # type: ignore[arg-type]
    print(json.dumps({**one.classes, **one.tally, "clocks": one.cycles(ARCH)}))


if __name__ == "__main__":
    main()
