"""The Blackwell backward, executed by the emulator under adversarial schedules with the race checker, against the reference and FP64.

Three launches a case (pre-pass, main kernel, post-pass). ``python -m tests.sm100.campaign backward`` runs the whole list.
"""

import dataclasses

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.sm100 import backward_host
from tests.sm100.backward_cases import values
from tests.sm100.cases import problem

pytestmark = pytest.mark.emulator


def check(worker, schedules: int = 2, **arguments) -> None:
    worker.run("tests.sm100.backward_cases:case", arguments, schedules=schedules)


def test_module(blackwell):
    """Shared queries (one and a bit query tiles), centred, MXFP8 gradients; an empty sequence, spare capacity; a CTA serves both heads."""
    lengths = {"keys": [31, 0, 140], "capacity": 50}
    check(
        blackwell,
        problem_of={**lengths, "shared": 140, "heads": 2, "mean": True},
        config={"grad_format": "mxfp8"},
        run_of={"processors": 3},
    )


def test_jagged_queries_causal_gqa(blackwell):
    """More queries than keys (rows that see nothing), key tiles that no query sees, two query heads per key head."""
    lengths = {"keys": [150, 31, 200, 0], "queries": [140, 70, 5, 40]}
    check(blackwell, problem_of={**lengths, "heads": 2, "kv_heads": 1, "causal": True, "sharpness": 2})


def test_head_dim_64_fp16_sums_deterministic(blackwell):
    """FP16 dQ under data-dependent powers of two, dO that grows eightfold every 40 rows, one CTA for all key tiles of a sequence."""
    lengths = {"keys": [33, 150], "queries": [130, 30]}
    changes = {"dq_dtype": "float16"}
    check(blackwell, problem_of={**lengths, "heads": 1, "dim": 64}, config=changes, growth=8.0, run_of={"deterministic": True})


def test_head_dim_64_and_a_cta_without_a_key_tile(blackwell):
    """Two CTAs, the second's only sequence is empty: it stores P's scale and leaves."""
    lengths = {"keys": [33, 0], "queries": [20, 5]}
    run_of = {"deterministic": True, "processors": 2}
    check(blackwell, 1, problem_of={**lengths, "heads": 1, "dim": 64}, config={"dq_dtype": "float16"}, run_of=run_of)


def test_gradient_of_the_lse_and_other_blocks(blackwell):
    """The LSE has a gradient; token blocks and 128-token blocks reach the MMA as 32-element scales, along both axes."""
    blocks = ((32, 128), (128, 128), (32, 128))
    check(blackwell, 1, problem_of={"keys": [129, 5], "queries": [33, 64], "heads": 1, "blocks": blocks}, lse=True)


def test_nan_stays_in_its_sequence(blackwell):
    """A payload tile reaches into the next sequence; a NaN block there shows in that sequence's gradients and nowhere else."""
    check(blackwell, 1, problem_of={"keys": [33, 40, 70], "queries": [20, 20, 20], "heads": 1, "nan": True})


@pytest.mark.parametrize("grads", ["bf16", "mxfp8"])
def test_no_keys_or_no_queries_at_all(grads):
    """Neither a launch nor a NaN: zeros."""
    for lengths in ({"keys": [0, 0], "shared": 5}, {"keys": [3, 4], "queries": [0, 0]}):
        p = problem(**lengths, heads=1)
        p = dataclasses.replace(p, config=p.config.with_(grad_format=grads))
        result = reference.forward(p)
        dout = torch.ones_like(result.out)
        got, want = backward_host.run(p, result, dout, "sm_100a", 2), reference.backward(p, result, dout)
        for name in ("dq", "dk", "dv", "dv_mean"):
            assert torch.equal(values(getattr(got, name)), values(getattr(want, name))), name
        assert torch.count_nonzero(got.dq) == 0
