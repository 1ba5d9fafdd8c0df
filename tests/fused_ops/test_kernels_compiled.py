"""What the assembler made of the fused kernels, for every target (each in a process of its own): no stack, no local memory, two CTAs of 256
threads or one of 512 on a multiprocessor (coordinates: one of 256, a head, alone there), and E4M3 conversions by the hardware."""

import pytest

from tests.processes import lines

NAMES = {
    "sm_90a": (),
    "sm_100a": (),
    "sm_103a": ("module", "square, atoms", "product: pair, both layouts", "tile blocks", "mean", "scatter 0", "gather 1"),
}
"""Variants of ``tests.fused_ops.compiled``; none named: all."""


@pytest.mark.parametrize("arch", NAMES)
def test_no_spill(arch):
    found = lines("tests.fused_ops.compiled", arch, *NAMES[arch])
    assert len(found) >= max(6, len(NAMES[arch]))
    for report in found:
        sass = report["sass"]
        assert report["stack"] == 0 and report["local"] == 0 and not {"STL", "LDL"} & sass.keys(), report
        if report["name"].startswith("product") and arch != "sm_90a":
            scaled = [key for key in report["products"] if "scaled=True" in key]
            assert bool(scaled) == ("BF16" not in report["name"]) and report["products"], report
            continue
        if report["name"].startswith("product"):  # registers are shared out anew by role; a wait is meant for each sum of up to 128 of K
            assert report["waits"] <= report["wgmma"] // (1 if "square" in report["name"] else 4), report
            continue
        if report["name"] == "coordinates":  # writes no codes
            continue
        assert report["reg"] <= 128, report
        assert report["name"].startswith(("mean", "bound", "folded", "scatter", "gather")) or "F2FP.SATFINITE.E4M3" in sass, report
