"""Kernels that hardware has proven, sm_100a: right numbers and no race under every schedule.

CI runs three schedules each (eager with the checker sees nearly every race; pct moves warps and completions). The campaign
of eight, with its record: ``python -m tests.emulator.campaign sm_100a``.
"""

import os

import pytest

from tests.emulator.campaign import CASES

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "3"))


@pytest.mark.parametrize(
    ("builder", "arguments", "waivers"), CASES["sm_100a"], ids=[f"{c[0].split(':')[1]}-{i}" for i, c in enumerate(CASES["sm_100a"])]
)
def test_right_and_free_of_races(sm100, builder, arguments, waivers):
    answer = sm100.run("tests.emulator." + builder, arguments, schedules=SCHEDULES, waivers=waivers)
    assert len(answer["schedules"]) == SCHEDULES
