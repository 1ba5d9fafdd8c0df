"""The quantize pass beside the forward, executed from its PTX (``tests.sm90.beside``): nothing differs from the pass before the forward."""

import pytest

from tests.emulator.worker import Worker

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

CASES = {
    "tiles for several groups, units for a few more than wait": (
        dict(batch=3, queries=128, keys=256, heads=2, dim=128, odd=False),
        1,
        0,
        "eager",
    ),
    "elements that are not finite": (dict(batch=3, queries=128, keys=128, heads=2, dim=128, odd=True), 1, 2, "pct"),
    "head 64, FP16, a unit with fewer tiles than groups": (
        dict(batch=1, queries=128, keys=128, heads=1, dim=64, odd=False, dtype="float16"),
        2,
        1,
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
    shape, ctas, more, schedule = CASES[name]
    assert worker.call("tests.sm90.beside:differences", ctas=ctas, more=more, schedule=schedule, check=True, **shape) == {"differ": []}


def test_what_is_quantized_beside():
    """Long equal sequences of 16-bit elements that a bulk copy can fetch, as many heads on both sides; nothing else."""
    import torch

    from lp_fa4.sm90.preparation import beside_pays

    def pays(batch=768, queries=512, keys=4096, heads=3, kv_heads=3, dtype=torch.bfloat16, rows=128, strides=None):
        q, k = (torch.empty(batch * n, h, 128, dtype=dtype, device="meta") for n, h in ((queries, heads), (keys, kv_heads)))
        v = k if strides is None else k.as_strided(k.shape, strides)
        return beside_pays(q, k, v, batch, rows)

    assert pays() and pays(batch=384, keys=8192) and pays(dtype=torch.float16)
    for odd in (
        dict(keys=4000),
        dict(queries=500),
        dict(kv_heads=1),
        dict(dtype=torch.float32),
        dict(rows=32),
        dict(strides=(128, 0, 1)),
        dict(batch=1),
    ):
        assert not pays(**odd), odd
