"""A few inputs of every property on emulated kernels, under other schedules and with the race checker; ``tests.properties.emulated`` runs
more. A process for each architecture: the DSL fixes its target at the first import."""

import pytest

from tests.emulator.worker import Worker

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

ARCHS = ("sm_90a", "sm_100a")


@pytest.fixture(scope="module", params=ARCHS)
def worker(request):
    made = Worker(request.param)
    yield made
    made.close()


def run(worker: Worker, **options) -> None:
    """All of these pass. Of three inputs the first is the simplest there is."""
    reports = worker.call("tests.properties.emulated:reports", examples=3, **options)["reports"]
    for report in reports:
        assert "error" not in report, f"{report['test']}\n{report['error']}"
    assert reports


def test_fused(worker):
    """Norm, swizzle and projection: samples apart, before a NaN tail; strides and widths of offsets."""
    run(worker, only="rmsnorm_center_quantize,scatter_scales,gemm_quantize", properties="isolation,views")


@pytest.mark.parametrize("worker", ["sm_90a"], indirect=True)
def test_attention(worker):
    """Forward and backward: samples apart; samples without keys or queries among others, on dirty memory. (Blackwell's backward takes
    minutes here; ``tests/sm100`` has its cases, and a campaign its properties.)"""
    run(worker, only="flash_attn_varlen_func", properties="isolation,nothing", narrow=True)


def test_named(worker):
    """Golden bytes, every scale byte, both ends of FP32."""
    run(worker, named=True, only="golden,scale,tiny")


OPERATIONS = {"rmsnorm_center_quantize", "gemm_quantize", "scatter_scales", "flash_attn_varlen_func"}


def test_seventy_thousand_samples_or_three(worker):
    """No launch puts samples on an axis that ends at 65,535, there are no more CTAs than 32 bits count, and what was compiled for three
    samples serves any number."""
    found = worker.call("tests.properties.emulated_cases:launches", samples=[3, 40, 70_000])
    assert set(found) == OPERATIONS
    for name, seen in found.items():
        assert len(seen["grids"]) >= 3, name
        assert all(x < 2**31 and y <= 65_535 and z <= 65_535 for x, y, z in seen["grids"]), (name, seen)
    # every number of samples runs all operations in turn: after the first round nothing is compiled
    assert len({n for seen in found.values() for n in seen["compiled"][1:]}) == 1


def test_no_samples_and_spare_rows(worker):
    """A batch of no samples whose tensors have rows all the same: no launch with an empty grid."""
    assert len(worker.call("tests.properties.emulated_cases:no_samples")) >= 10


def test_uniform_attention(worker):
    """dV of 1/keys on a scale of its own: a fixed scale of 1 makes it 0 from 1,024 keys on. E4M3 rounds one number here, 6.25% at most."""
    assert abs(worker.call("tests.properties.emulated_cases:uniform", keys=1024)["bias"]) < 0.0625
