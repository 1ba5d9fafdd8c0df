"""The emulator's own promises: planted faults are caught, and it stays fast enough to use."""

import pytest

pytestmark = pytest.mark.emulator

#: Producers' tails: waits before a warp's end for slots that nobody fills again. The arrival they wait for is ordered
#: before the CTA's end anyway (the accumulator's commit comes later on the same queue, or the arriving warp is of this CTA).
REDUNDANT = ["flash_fwd_sm100.py:1745", "flash_fwd_sm100.py:2563", "flash_fwd_sm100.py:3100"]


def test_every_acting_fault_in_a_forward_kernel_is_caught(sm100):
    """Waits, fences and TMEM regions of flash-attn-4's forward, one fault at a time, eager schedule only; the
    waits of ``REDUNDANT`` change nothing. Kernels the checker was not developed on:
    ``python -m tests.emulator.faults``; figures in the README."""
    got = sm100.call("tests.emulator.faults:summary", case="fa4_forward_sm100", schedules=1)
    assert got["acting"] >= 35
    assert {x.split()[-1] for x in got["missed"]} <= set(REDUNDANT)


@pytest.mark.parametrize(("check", "limit"), [(False, 0.5), (True, 3.0)])
def test_speed(sm100, check, limit):
    """Processor time, so that a busy machine does not fail it."""
    assert sm100.call("tests.emulator.probes:seconds", check=check)["seconds"] <= limit
