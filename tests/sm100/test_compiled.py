"""What the assembler made of the forward, for both targets (each in a process of its own)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_LIMIT = 227 * 1024


def reports(arch: str, *names: str) -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sm100.compiled", arch, *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("arch, names", [("sm_100a", ("full", "folded")), ("sm_103a", ("default",))])
def test_no_spill_and_block_scaled_products(arch, names):
    """No stack, no local memory, registers as launched, tensor and shared memory within limits; both products are block-scaled FP8 (the
    variant with scales outside: plain FP8), none is BF16."""
    found = reports(arch, *names)
    assert len(found) == len(names)
    for report in found:
        sass = report["sass"]
        assert report["stack"] == 0 and report["local"] == 0 and not {"STL", "LDL"} & sass.keys(), report
        assert report["reg"] == 128  # 512 threads; redistributed by setmaxnreg
        assert report["columns"] <= 512 and report["smem"] <= SHARED_LIMIT - 16 * 1024, report
        products = {name for name in sass if "MMA" in name}
        scaled = report["name"] != "folded"
        assert products == {"UTCQMMA"}, products
        assert ("UTCCP" in sass) == scaled
