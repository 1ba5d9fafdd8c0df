"""The emulator's own promises: planted faults are caught, and it stays fast enough to use."""

import pytest

pytestmark = pytest.mark.emulator


def test_acting_faults_in_a_forward_kernel_are_caught(sm100):
    """Waits, fences and TMEM regions of flash-attn-4's forward, one fault at a time, eager schedule only. What is missed must
    be redundant: the same kernel with that edge left out of the clocks has no race. Kernels the checker was not developed
    on: ``python -m tests.emulator.faults``; figures in the README."""
    got = sm100.call("tests.emulator.faults:summary", case="fa4_forward_sm100", schedules=1)
    assert got["acting"] >= 35 and got["caught"] >= 0.9 * got["acting"], got
    assert all(text.startswith("redundant") for text in got["missed"].values()), got["missed"]


@pytest.mark.parametrize(("check", "limit"), [(False, 0.5), (True, 3.0)])
def test_speed(sm100, check, limit):
    """Processor time, so that a busy machine does not fail it."""
    assert sm100.call("tests.emulator.probes:seconds", check=check)["seconds"] <= limit
