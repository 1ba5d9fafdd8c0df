"""Kernels that read and do nothing else: they look at all that they are said to read."""

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")

from benchmarks.kernels_read import UNLIKELY, ReadSpec, forms
from tests.benchmarks.reads import SPECS
from tests.emulator.worker import Worker


@pytest.fixture(scope="module")
def worker():
    with_device = Worker("sm_90a")
    yield with_device
    with_device.close()


@pytest.mark.emulator
@pytest.mark.parametrize("name", SPECS)
def test_every_place_is_read(worker, name):
    seen = worker.call("tests.benchmarks.reads:places", name=name)
    assert dict(zip(seen["planted"], seen["found"], strict=True)) == {p: UNLIKELY if p >= 0 else 0 for p in seen["planted"]}


def test_grids():
    """No form leaves bytes of the shape of few queries unread, or has more CTAs than runs."""
    size = 16384 * 16 * 128
    for name, spec in forms().items():
        grid = spec.grid(size, 132)
        assert 0 < grid <= -(-2 * size // (spec.piece * spec.pieces)), name
        assert spec.ctas or grid * spec.piece * spec.pieces >= 2 * size, name
        assert spec.threads or spec.piece * spec.pieces * max(spec.ctas, 1) <= 224 << 10, name
    with pytest.raises(ValueError, match="100 bytes are no multiple of 8192"):
        ReadSpec(4096, 2, 256).grid(100, 132)
