"""The committed records of the campaigns say what the README says, for the cases that are listed today."""

import json
from pathlib import Path

import pytest

from tests.emulator.campaign import CASES, record_name

pytestmark = pytest.mark.emulator

RESULTS = Path(__file__).parent / "results"
HELD_OUT = ["fa4_backward_sm100", "quack_mxfp8_sm100", "fa4_forward_sm90", "fa4_backward_sm90"]
DEVELOPED_ON = ["fa4_forward_sm100"]


def faults(name):
    """Record of a fault campaign, and its sites that ever block or order anything."""
    record = json.loads((RESULTS / f"faults_{name}.json").read_text())
    return record, [x for x in record["each"] if x["acts"] or x["slept"]]


@pytest.mark.parametrize("arch", CASES)
def test_every_proven_kernel_ran_under_eight_schedules_without_a_race(arch):
    record = json.loads((RESULTS / record_name(arch)).read_text())
    assert [c["number"] for c in record["cases"]] == list(range(len(CASES[arch])))
    for case, (_, _, waivers) in zip(record["cases"], CASES[arch], strict=True):
        assert len(set(case["schedules"])) == 8 and case["races"] == 0 and not case["errors"], case
        assert case["waivers"] == waivers


@pytest.mark.parametrize("name", HELD_OUT + DEVELOPED_ON)
def test_every_planted_fault_that_was_missed_is_explained(name):
    record, sites = faults(name)
    assert len(record["schedules"]) == 8 and record["slept_or_act"] == len(sites)
    assert record["caught"] == sum(bool(x.get("caught")) for x in sites)
    assert all(x.get("caught") or x["explained"].startswith("redundant under 8 schedules") for x in sites)


def test_planted_faults_of_held_out_kernels_are_caught():
    """At least 95% of the sites that ever block or order anything, of those that order something too."""
    sites = [x for name in HELD_OUT for x in faults(name)[1]]
    for chosen in (sites, [x for x in sites if x["acts"]]):
        assert len(chosen) > 100 and sum(bool(x.get("caught")) for x in chosen) >= 0.95 * len(chosen)
