"""Every case of ``cases.py`` with two processes on the CPU."""

import pytest

from tests.distributed.cases import CASES
from tests.distributed.run import run

pytestmark = pytest.mark.distributed


def test_two_processes():
    figures = run("cpu", 2, [*CASES, "checkpoint", "scaling"], seconds=240)
    assert figures["recommender"]["imbalance"] < figures["recommender"]["imbalance as drawn"]
    assert len(figures["scaling"]["rows"]) == 3
    assert figures["many_steps"]["empty rank batches"] > 5
