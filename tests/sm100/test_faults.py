"""The emulator sees what breaks the new barriers and the plan of tensor memory."""

import pytest

from tests.sm100.test_compiled import lines

pytestmark = pytest.mark.emulator


def test_missing_barriers_and_misplaced_scales_are_seen():
    """Either new wait deleted, each of the ten scale regions that can be misplaced on a live accumulator."""
    sites = lines("tests.sm100.faults", "--schedules", "2")
    waits = [s for s in sites if s["kind"] == "mbarrier wait"]
    regions = [s for s in sites if s["kind"] == "TMEM region"]
    assert len(waits) == 2 and len(regions) == 10
    missed = [s["where"] for s in sites if not s["caught"]]
    assert not missed, missed
