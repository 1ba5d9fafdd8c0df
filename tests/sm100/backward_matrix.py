"""The whole list of the backward: ``python -m tests.sm100.backward_matrix [--schedules 16] [--queries 1 128 256] [NAME ...]``.

Every mode on sequences of 0, 1, 31, 33, 127, 128, 129 and 300 keys, under adversarial schedules with the race checker; scale pads 0xFF.
Minutes a row, so not part of the test suite; one line per row as it passes, a traceback where it does not.
"""

import argparse
import time

from tests.emulator.worker import Worker

KEYS = [0, 1, 31, 33, 127, 128, 129, 300]
REQUEST = 9
"""Schedules of one request."""
TOKEN = ((32, 128), (128, 128), (32, 128))
MODES: dict[str, dict] = {
    "shared": {"problem_of": {"mean": True, "capacity": 40}, "config": {"grad_format": "mxfp8"}},
    "shared_half": {"problem_of": {"mean": True}, "config": {"grad_format": "mxfp8", "dq_dtype": "float16"}},
    "shared_deterministic": {"problem_of": {"mean": True}, "run_of": {"deterministic": True}},
    "dense": {"problem_of": {"dense": True}},
    "dense_half": {"problem_of": {"dense": True}, "config": {"dq_dtype": "float16"}, "run_of": {"deterministic": True}},
    "gqa": {"problem_of": {"dense": True, "heads": 2, "kv_heads": 1}, "config": {"grad_format": "mxfp8"}},
    "causal": {"problem_of": {"dense": True, "causal": True}},
    "causal_half": {"problem_of": {"dense": True, "causal": True}, "config": {"dq_dtype": "float16"}},
    "d64": {"problem_of": {"dim": 64, "mean": True}, "config": {"grad_format": "mxfp8"}},
    "post": {"problem_of": {"config": "post", "sharpness": 4}},
    "token_blocks": {"problem_of": {"mean": True, "blocks": TOKEN}},
    "growth": {"problem_of": {"dense": True}, "growth": 8.0},
    "lse": {"problem_of": {"dense": True}, "lse": True},
}


def row(name: str, queries: int) -> dict:
    """Arguments of ``backward_cases.case`` for one mode at ``queries`` rows a sequence."""
    mode = MODES[name]
    problem_of = {"keys": KEYS, "heads": 1, **mode["problem_of"]}
    if problem_of.pop("dense", False):
        problem_of["queries"] = [queries] * len(KEYS)
    else:
        problem_of["shared"] = queries
    return {**mode, "problem_of": problem_of}


def main() -> None:
    """Run the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODES))
    parser.add_argument("--schedules", type=int, default=16)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 128, 256])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    worker = Worker("sm_100a")
    for name in arguments.names or MODES:
        for queries in arguments.queries:
            started = time.time()
            done: set[str] = set()
            while len(done) < arguments.schedules:  # a few at a time: a request keeps the memory of all its runs
                some = min(REQUEST, arguments.schedules - len(done) + (2 if done else 0))  # eager and lazy come again
                answer = worker.run("tests.sm100.backward_cases:case", row(name, queries), schedules=some, seed=arguments.seed + len(done))
                done |= set(answer["schedules"])
            print(f"{name} queries={queries}: {len(done)} schedules right, no race ({time.time() - started:.0f} s)", flush=True)
    worker.close()


if __name__ == "__main__":
    main()
