"""What one 128 x 128 tile of the forward costs, from executed instructions: ``python -m tests.sm100.tile_profile [fa4]``.

Two runs that differ only in their number of key tiles are subtracted, so prologue, epilogue and set-up drop out: what remains is the steady
state. ``fa4``: the same for flash-attn-4's BF16 forward. One JSON line; README.md of ``lp_fa4/sm100`` has the table.
"""

import json
import sys

from tests.emulator import api, capture
from tests.emulator.profile import profile
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


def main() -> None:
    """Print warp instructions per tile by class."""
    capture.install(ARCH)
    make = fa4_case if "fa4" in sys.argv[1:] else forward_case
    counts = []
    for keys in (256, 768):
        made = make(keys)
        _, result = api.call_under(made.call, ARCH, api.Schedule("eager", width=32))
        seen = profile(result.machines[-1])
        counts.append({**seen.classes, **seen.tally})
    tiles = 2 * (768 - 256) // 128
    print(json.dumps({k: (counts[1].get(k, 0) - counts[0].get(k, 0)) / tiles for k in sorted(counts[1])}))


if __name__ == "__main__":
    main()
