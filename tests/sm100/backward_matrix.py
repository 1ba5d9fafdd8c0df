"""The whole list of the backward: every mode by every number of queries, under 16 schedules by ``python -m tests.sm100.campaign backward``.

Sequences of 0, 1, 31, 33, 127, 128, 129, 300 and 700 keys (the longest in runs of its own), adversarial schedules with the race checker,
scale pads 0xFF. Minutes a row, so not part of the test suite.
"""

from tests.emulator.kernels import Case
from tests.sm100.backward_cases import case

QUERIES = (1, 128, 256, 512)
KEYS = {"edges": [0, 1, 31, 33, 127, 128, 129, 300], "long": [0, 700]}
"""Keys of each sequence, by the name of the list: a row runs each list under each schedule. ``edges``: around a block, a tile and more than
two tiles. ``long``: six tiles of one sequence add up their dQ."""
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


def row(mode: dict, queries: int, keys: list[int]) -> dict:
    """Arguments of ``backward_cases.case`` for a mode at ``queries`` rows a sequence."""
    problem_of = {"keys": keys, "heads": 1, **mode["problem_of"]}
    if problem_of.pop("dense", False):
        problem_of["queries"] = [queries] * len(keys)
    else:
        problem_of["shared"] = queries
    return {**mode, "problem_of": problem_of}


def case_of(arch: str, name: str, queries: int, keys: str) -> Case:
    """One row on one list of ``KEYS`` as a case."""
    return case(arch, **row(MODES[name], queries, KEYS[keys]))
