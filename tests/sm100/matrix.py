"""The whole list: ``python -m tests.sm100.matrix [--schedules 16] [--queries 1 128 256 512] [--out FILE] [NAME ...]``.

Every mode of the forward on sequences of 0, 1, 31, 33, 127, 128, 129, 300 and 700 keys, under adversarial schedules with the race checker;
scale pads 0xFF. CTAs draw their items (two run at a time), except in ``walked`` modes. A minute or more a row, so not part of the test
suite; one line per row as it passes, a traceback where it does not.
"""

import argparse
import json
import time
from pathlib import Path

from tests.emulator import api, capture
from tests.emulator.waivers import NONE
from tests.sm100.cases import case

ARCH = "sm_100a"
KEYS = [0, 1, 31, 33, 127, 128, 129, 300, 700]
TOKEN = ((32, 128), (32, 128), (32, 128))
OUTSIDE = {"operand_scales": "outside"}
MODES: dict[str, tuple[dict, dict]] = {
    "shared": ({"mean": True, "capacity": 40}, {}),
    "dense": ({"dense": True}, {}),
    "gqa": ({"dense": True, "heads": 2, "kv_heads": 1}, {}),
    "causal": ({"dense": True, "causal": True}, {}),
    "d64": ({"dim": 64, "mean": True}, {}),
    "post": ({"config": "post", "sharpness": 4}, {}),
    "softmax_max": ({"config": "post", "sharpness": 4, "changes": {"p_scale": "softmax_max"}}, {}),
    "fresh": ({"config": "post", "sharpness": 4, "changes": {"p_scale": "fresh"}}, {}),
    "token_blocks": ({"mean": True, "blocks": TOKEN}, {}),
    "outside_static": ({"mean": True, "blocks": TOKEN, "exponents": (None, None, -4), "changes": OUTSIDE}, {}),
    "outside_folded": ({"config": "post", "blocks": TOKEN, "zeros": True, "changes": OUTSIDE}, {}),
    "walked": ({"mean": True}, {"drawn": False}),
    "walked_causal": ({"dense": True, "heads": 2, "kv_heads": 1, "causal": True}, {"drawn": False}),
}


def row(name: str, queries: int) -> tuple[dict, dict]:
    """Problem and run arguments of one mode at ``queries`` rows a sequence."""
    problem_of, run_of = MODES[name]
    problem_of, run_of = {"keys": KEYS, "heads": 1, **problem_of}, {"drawn": True, **run_of}
    if problem_of.pop("dense", False):
        problem_of["queries"] = [queries] * len(KEYS)
    else:
        problem_of["shared"] = queries
    return problem_of, run_of


def run_row(name: str, queries: int, schedules: int) -> dict:
    """One row under ``schedules`` schedules, one after the other; raises where one is wrong or has a race."""
    started = time.time()
    problem_of, run_of = row(name, queries)
    planned = case(ARCH, problem_of, run_of)
    for schedule in api.schedules(schedules):
        try:
            value, _ = api.call_under(planned.call, ARCH, schedule, check=True, waivers=NONE)
            planned.verify(value)
        except Exception as error:
            error.add_note(f"{name} queries={queries}, schedule {schedule}")
            raise
    return {"mode": name, "queries": queries, "schedules": schedules, "seconds": round(time.time() - started)}


def main() -> None:
    """Run the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODES))
    parser.add_argument("--schedules", type=int, default=16)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 128, 256, 512])
    parser.add_argument("--out", type=Path, help="append one JSON line per row that passed")
    arguments = parser.parse_args()
    capture.install(ARCH)
    for name in arguments.names or MODES:
        for queries in arguments.queries:
            done = run_row(name, queries, arguments.schedules)
            print(f"{name} queries={queries}: {done['schedules']} schedules right, no race ({done['seconds']} s)", flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
