"""The same kernels, the same inputs, on an H200 and here: see ``hardware.py``."""

from dataclasses import asdict

import pytest

from . import hardware
from .fidelity import HOPPER

pytestmark = pytest.mark.emulator


def errors(worker, name, **fidelity):
    return worker.call("tests.emulator.hardware:errors", name=name, **fidelity)


@pytest.mark.parametrize(
    ("name", "exact"), [(name, e) for name, bounds in hardware.BOUNDS.items() for e in (0, 1) if bounds[e] is not None]
)
def test_emulator_agrees_with_the_gpu(sm90, name, exact):
    bound = hardware.BOUNDS[name][exact]
    for key, found in errors(sm90, name, **(asdict(HOPPER) if exact else {})).items():
        assert found["error"] <= bound, f"{key}: {found}"
        assert bound > 0 or found["differ"] == 0, f"{key}: {found}"


def test_fourteen_bits_imitate_the_gpus_fp8_sums_best(sm90):
    """The switch is calibrated: where 14 bits meet every number of the GPU's (above), a bit more or fewer, or FP32 sums, miss thousands."""
    for bits in (0, 13, 15):
        found = errors(sm90, "tma, wgmma fp8: normal", fp8_accumulator_bits=bits)["out"]
        assert found["differ"] > 1000 and found["error"] > 2.0**-12, (bits, found)
