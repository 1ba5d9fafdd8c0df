"""What the assembler made of the backward, and that the emulator sees planted faults of it (each in a process of its own)."""

import pytest

from tests.processes import lines
from tests.sm100.test_compiled import SHARED_LIMIT


@pytest.mark.parametrize("arch, names", [("sm_100a", ("module",)), ("sm_103a", ("full",))])
def test_no_spill_and_block_scaled_products(arch, names):
    """No stack, no local memory, registers as launched, tensor and shared memory within limits; every product is block-scaled FP8."""
    found = lines("tests.sm100.backward_compiled", arch, *names)
    assert len(found) == len(names)
    for report in found:
        sass = report["sass"]
        assert report["stack"] == 0 and report["local"] == 0 and not {"STL", "LDL"} & sass.keys(), report
        assert report["reg"] == 128  # 512 threads; redistributed by setmaxnreg
        assert report["columns"] <= 512 and report["smem"] <= SHARED_LIMIT, report
        # of 4 k-blocks each: S, dP, dQ, dQ of the last query tile; dV, dK, dK of the last (A from tensor memory)
        assert report["products"] == {"smem scaled=True": 16, "tmem scaled=True": 12}, report
        assert "UTCCP" in sass and "HMMA" not in sass


def test_pairs_have_no_spill_and_plain_products():
    """The two-CTA kernel: the same limits; every product is plain FP8 over a pair, and no scale is copied to tensor memory."""
    (report,) = lines("tests.sm100.backward_compiled", "sm_103a", "pair_module")
    sass = report["sass"]
    assert report["stack"] == 0 and report["local"] == 0 and not {"STL", "LDL"} & sass.keys(), report
    assert report["reg"] == 128 and report["columns"] <= 512 and report["smem"] <= SHARED_LIMIT, report
    # S and dP have 4 k-blocks, dQ of 256 keys 8, twice (the last query tile's apart); dV 4, dK 4, twice (A from tensor memory)
    assert report["products"] == {"UTCQMMA.2CTA smem scaled=False": 24, "UTCQMMA.2CTA tmem scaled=False": 12}, report
    assert "UTCCP" not in sass and "HMMA" not in sass


@pytest.mark.emulator
@pytest.mark.parametrize("arguments", [("--part", "0/3"), ("--pairs", "--part", "0/2")])
def test_planted_faults_are_seen(arguments):
    """A third of the sites, half of the two-CTA kernel's: waits of the MMA role deleted, fences that publish dS deleted, operands and
    scales on accumulators."""
    sites = lines("tests.sm100.backward_faults", "--schedules", "1", *arguments)
    assert len(sites) >= 8
    missed = [f"{s['kind']} {s['where']}" for s in sites if s["acts"] and not s["caught"]]
    assert not missed, missed
