"""The whole list of the two-CTA backward: every mode by every number of queries, ``python -m tests.sm100.campaign pairs``.

Sequences around the edges of a tile and of a pair of tiles, and a long one, otherwise as ``backward_matrix``.
"""

from tests.emulator.kernels import Case
from tests.sm100 import backward_matrix
from tests.sm100.backward_cases import case

QUERIES = backward_matrix.QUERIES
KEYS = {"edges": [0, 1, 31, 127, 129, 255, 257, 300], "long": [0, 33, 128, 700]}
STATIC = {"blocks": ((0, 128), (0, 128), (0, 128)), "exponents": (-6, -6, -6)}
MODES: dict[str, dict] = {name: mode for name, mode in backward_matrix.MODES.items() if name != "token_blocks"}
MODES["static"] = {"problem_of": {"mean": True, **STATIC}, "config": {"grad_format": "mxfp8"}}
MODES["wide_blocks"] = {"problem_of": {"dense": True, "blocks": ((32, 128), (128, 128), (128, 128))}}


def case_of(arch: str, name: str, queries: int, keys: str) -> Case:
    """One row on one list of ``KEYS`` as a case."""
    mode = MODES[name]
    more = {"run_of": {"processors": 4, **mode.get("run_of", {})}, "pairs": True}
    return case(arch, **{**backward_matrix.row(mode, queries, KEYS[keys]), **more})
