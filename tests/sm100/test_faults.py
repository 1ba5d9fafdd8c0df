"""The emulator sees what breaks the new barriers, the clearing of V's rows and the plan of tensor memory."""

import pytest

from tests.processes import lines

pytestmark = pytest.mark.emulator


def test_missing_barriers_and_misplaced_scales_are_seen():
    """Either new wait deleted, the fence behind the cleared rows; each of the ten scale regions that can be misplaced on a live
    accumulator."""
    sites = lines("tests.sm100.faults", "--schedules", "2")
    waits = [s for s in sites if s["kind"] == "mbarrier wait"]
    regions = [s for s in sites if s["kind"] == "TMEM region"]
    fences = [s for s in sites if s["kind"] == "proxy fence"]
    assert len(waits) == 2 and len(fences) == 1 and len(regions) == 10
    missed = [s["where"] for s in sites if not s["caught"]]
    assert not missed, missed
