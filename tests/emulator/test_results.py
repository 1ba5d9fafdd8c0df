"""The committed records of the campaigns say what the README says, for the cases that are listed today."""

import json
from pathlib import Path

import pytest

from tests.emulator.campaign import CASES, record_name

pytestmark = pytest.mark.emulator

RESULTS = Path(__file__).parent / "results"
HELD_OUT = ["fa4_backward_sm100", "quack_mxfp8_sm100", "fa4_forward_sm90"]
ALSO_HELD_OUT = ["fa4_backward_sm90"]


def faults(name):
    """Record of a fault campaign, and its acting sites."""
    record = json.loads((RESULTS / f"faults_{name}.json").read_text())
    return record, [x for x in record["each"] if x["acts"]]


@pytest.mark.parametrize("arch", CASES)
def test_every_proven_kernel_ran_under_eight_schedules_without_a_race(arch):
    record = json.loads((RESULTS / record_name(arch)).read_text())
    assert [c["number"] for c in record["cases"]] == list(range(len(CASES[arch])))
    for case, (_, _, waivers) in zip(record["cases"], CASES[arch], strict=True):
        assert len(set(case["schedules"])) == 8 and case["races"] == 0 and not case["errors"], case
        assert case["waivers"] == waivers


@pytest.mark.parametrize("name", HELD_OUT)
def test_planted_faults_of_a_held_out_kernel_are_caught(name):
    _, acting = faults(name)
    assert sum(bool(x.get("caught")) for x in acting) >= 0.95 * len(acting)


def test_planted_faults_of_all_held_out_kernels():
    caught = sites = 0
    for name in HELD_OUT + ALSO_HELD_OUT:
        record, acting = faults(name)
        assert (len(acting), sum(bool(x.get("caught")) for x in acting)) == (record["act"], record["caught_of_acting"])
        assert all(x.get("caught") or x.get("explained") for x in record["each"] if x["acts"] or x["slept"])
        sites, caught = sites + len(acting), caught + record["caught_of_acting"]
    assert sites > 100 and caught >= 0.95 * sites
