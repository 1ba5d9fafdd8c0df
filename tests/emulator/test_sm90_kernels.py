"""Kernels that hardware has proven, sm_90a: right numbers and no race under every schedule.

One kernel needs a waiver; see ``campaign.py``.
"""

import os

import pytest

from tests.emulator.campaign import CASES

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "3"))


@pytest.mark.parametrize(
    ("builder", "arguments", "waivers"), CASES["sm_90a"], ids=[f"{c[0].split(':')[1]}-{i}" for i, c in enumerate(CASES["sm_90a"])]
)
def test_right_and_free_of_races(sm90, builder, arguments, waivers):
    answer = sm90.run("tests.emulator." + builder, arguments, schedules=SCHEDULES, waivers=waivers)
    assert len(answer["schedules"]) == SCHEDULES
