"""The whole list of the forward: every mode by every number of queries, under 16 schedules by ``python -m tests.sm100.campaign forward``.

Sequences of 0, 1, 31, 33, 127, 128, 129, 300 and 700 keys, adversarial schedules with the race checker, scale pads 0xFF. CTAs draw their
items (two run at a time), except in ``walked`` modes. A minute or more a row, so not part of the test suite.
"""

from tests.emulator.kernels import Case
from tests.sm100.cases import case

QUERIES = (1, 128, 256, 512)
KEYS = {"all": [0, 1, 31, 33, 127, 128, 129, 300, 700]}
"""Keys of each sequence, by the name of the list: a row runs each list under each schedule."""
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


def row(name: str, queries: int, keys: list[int]) -> tuple[dict, dict]:
    """Problem and run arguments of one mode at ``queries`` rows a sequence."""
    problem_of, run_of = MODES[name]
    problem_of, run_of = {"keys": keys, "heads": 1, **problem_of}, {"drawn": True, **run_of}
    if problem_of.pop("dense", False):
        problem_of["queries"] = [queries] * len(keys)
    else:
        problem_of["shared"] = queries
    return problem_of, run_of


def case_of(arch: str, name: str, queries: int, keys: str) -> Case:
    """One row on one list of ``KEYS`` as a case."""
    return case(arch, *row(name, queries, KEYS[keys]))
