"""The same kernels, the same inputs, on an H200 and here: see ``hardware.py``."""

import pytest

from . import hardware

pytestmark = pytest.mark.emulator


def errors(worker, name, bits=0):
    return worker.call("tests.emulator.hardware:errors", name=name, fp8_accumulator_bits=bits)


@pytest.mark.parametrize("bits", [0, 14])
@pytest.mark.parametrize("name", hardware.CALLS)
def test_emulator_agrees_with_the_gpu(sm90, name, bits):
    bound = hardware.BOUNDS[name][bits == 14]
    for key, found in errors(sm90, name, bits).items():
        assert found["error"] <= bound, f"{key}: {found}"
        assert bound > 0 or found["differ"] == 0, f"{key}: {found}"
        assert found.get("flipped", 0) <= 2.0**-3, f"{key}: {found}"


def test_fourteen_bits_imitate_the_gpus_fp8_sums_best(sm90):
    """The switch is calibrated: with one bit more or fewer, or FP32 sums, the GPU's numbers are met far less well."""
    name = "tma, wgmma fp8: normal"
    best = errors(sm90, name, 14)["out"]
    for bits in (0, 13, 15):
        other = errors(sm90, name, bits)["out"]
        assert best["error"] < 0.6 * other["error"] and best["differ"] < 0.5 * other["differ"], (bits, best, other)
