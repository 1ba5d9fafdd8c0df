"""The quantize pass beside the forward, executed from its PTX (``tests.sm90.beside``): nothing differs from the pass before the forward."""

import pytest

from tests.emulator.worker import Worker

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

CASES = {
    "tiles for several groups, units for a few more than wait": (
        dict(batch=3, queries=128, keys=256, heads=2, dim=128, odd=False),
        1,
        "eager",
    ),
    "elements that are not finite": (dict(batch=3, queries=128, keys=128, heads=2, dim=128, odd=True), 2, "pct"),
    "head 64, FP16, a unit with fewer tiles than groups": (
        dict(batch=1, queries=128, keys=128, heads=1, dim=64, odd=False, dtype="float16"),
        2,
        "lazy",
    ),
}


@pytest.fixture(scope="module")
def worker():
    made = Worker("sm_90a")
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_same_bits(worker, name):
    shape, ctas, schedule = CASES[name]
    assert worker.call("tests.sm90.beside:differences", ctas=ctas, schedule=schedule, check=True, **shape) == {"differ": []}
