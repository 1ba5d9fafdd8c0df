"""The whole module on the kernels of each architecture, executed by the emulator: norm, projections, attention, and the backward of all."""

import pytest

from tests.emulator.worker import Worker
from tests.modules.pma_emulated import LENGTHS, STEPS

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

NORM = ("rmsnorm_quantizevectors SampledMean", "rmsnorm_quantizestaged StagedNorm", "commonsequence_vectors SumTiles")
WEIGHTS = (
    "coordinateskernel BalancedCoordinates",
    "gemm_quantizeweights_kernel ProjectionWeight",
    "gemm_quantizeweights_kernel Bound",
)
BACK = ("gemm_norm_backwardweight_gradient WeightGradient", "gemm_norm_backwardinput_gradient InputGradient")
BLACKWELL = (
    *NORM,
    *WEIGHTS,
    "gemm_quantizesm100 BlackwellGemm",
    "commonscatter_scales ScatterScales",
    "sm100forward_kernel Forward",
    "sm100backward_prepass Prepass",
    "sm100backward_kernel Backward",
    "sm100backward_postpass Postpass",
    *BACK,
    "gemm_norm_backwardsums AddParts",
)
"""Every kernel of a training step on Blackwell."""


def compare(arch: str, **arguments) -> dict:
    """``pma_emulated.compare`` in a process of its own: every tensor's error against FP64 at most 1.12 times (1 dB) that of the CPU
    reference with the same choices, zeros where they are due, every launch compiled for ``arch``."""
    worker = Worker(arch)
    try:
        report = worker.call("tests.modules.pma_emulated:compare", lengths=LENGTHS, **arguments)
    finally:
        worker.close()
    found, allowed = report["found"], report["allowed"]
    assert len(allowed) > 5 and all(found[name] > allowed[name] - 1 for name in allowed), (found, allowed)
    assert report["clean"] and report["targets"] == [arch]
    return report["kernels"]


def test_hopper():
    """Static scales, two heads of 64."""
    ran = " ".join(compare("sm_90a", dim=128, heads=2, seeds=64, numerics={"scales": "static", "key_projection": "e4m3x2"}))
    for part in ("rmsnorm_quantize", "gemm_quantize", "forward", "backward", "gemm_norm_backward"):
        assert part in ran, (part, ran)


@pytest.mark.parametrize("step, products", [("square", 1), ("token", 2)])
def test_blackwell(step, products):
    """Every fused operation of forward and backward is launched, as code for sm_100a, and nothing else is (``STEPS``)."""
    ran = compare("sm_100a", **STEPS[step])
    assert set(ran) == {*BLACKWELL, "sm90worklist WorkList"}, ran
    assert ran["gemm_quantizesm100 BlackwellGemm"] == products
    once = ("rmsnorm_quantizestaged StagedNorm", "sm100forward_kernel Forward", "sm100backward_kernel Backward", *BACK)
    assert all(ran[name] == 1 for name in once), ran
