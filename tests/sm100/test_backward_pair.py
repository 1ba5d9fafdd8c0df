"""The two-CTA backward, executed by the emulator under adversarial schedules with the race checker, against the reference and FP64.

``python -m tests.sm100.campaign pairs`` runs the whole list of shapes and modes.
"""

import pytest

pytestmark = pytest.mark.emulator


def check(worker, schedules: int = 2, **arguments) -> None:
    worker.run("tests.sm100.backward_cases:case", {"pairs": True, **arguments}, schedules=schedules)


def test_jagged(blackwell):
    """Partial tiles of keys and queries, a pair whose second CTA has no key, an empty sequence, spare capacity; MXFP8 gradients."""
    lengths = {"keys": [31, 0, 140, 300], "queries": [140, 5, 70, 200], "capacity": 20}
    check(blackwell, problem_of={**lengths, "heads": 1}, config={"grad_format": "mxfp8"})


def test_shared_queries(blackwell):
    """One pair of CTAs serves both heads and all sequences; static exponents, centred V, FP16 dQ."""
    static = {"blocks": ((0, 128),) * 3, "exponents": (-6, -6, -6)}
    lengths = {"keys": [31, 0, 140], "shared": 140, "heads": 2, "mean": True, "capacity": 50}
    check(blackwell, 1, problem_of={**lengths, **static}, config={"grad_format": "mxfp8", "dq_dtype": "float16"})


def test_causal_gqa(blackwell):
    """More queries than keys, key tiles that no query sees, two query heads per key head."""
    lengths = {"keys": [150, 31, 200, 0], "queries": [140, 70, 5, 40]}
    check(blackwell, 1, problem_of={**lengths, "heads": 2, "kv_heads": 1, "causal": True, "sharpness": 2})


def test_head_dim_64_fp16_sums_deterministic(blackwell):
    """dO that grows eightfold every 40 rows: P and the scales of dS carry its exponents."""
    lengths = {"keys": [33, 150], "queries": [130, 30]}
    changes = {"dq_dtype": "float16"}
    check(blackwell, 1, problem_of={**lengths, "heads": 1, "dim": 64}, config=changes, growth=8.0, run_of={"deterministic": True})


@pytest.mark.parametrize("broken", ["v", "do"])
def test_what_is_not_finite_stays_in_its_sequence(blackwell, broken):
    """It shows in that sequence's gradients where the reference has it, and nowhere else."""
    check(blackwell, 1, problem_of={"keys": [33, 40, 70], "queries": [20, 30, 20], "heads": 1}, broken=broken)
