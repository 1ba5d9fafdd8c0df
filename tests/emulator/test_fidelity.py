"""Fidelity switches and the instruction profile."""

import numpy as np
import pytest
import torch

from tests.emulator import api
from tests.emulator.fidelity import Fidelity
from tests.emulator.profile import profile
from tests.emulator.test_core import ELEMENTWISE, launch

pytestmark = pytest.mark.emulator

UNARY = """
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd3, %rd0, %rd2;
add.s64 %rd4, %rd1, %rd2;
ld.global.b32 %r5, [%rd3];
{op}
st.global.b32 [%rd4], %r6;
"""


def apply(op, x, fidelity=None):
    y = torch.zeros_like(x)
    extents = [(t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in (x, y)]
    api.run(launch(UNARY.format(op=op), x, y, block=x.numel()), extents, fidelity=fidelity)
    return y


def test_subnormals_are_flushed_only_where_asked_and_only_with_the_switch():
    x = torch.full((32,), 2.0**-126)
    half = "mul.f32 %r6, %r5, 0f3F000000;"
    flushing = "mul.ftz.f32 %r6, %r5, 0f3F000000;"
    assert apply(half, x, Fidelity(ftz=True)).eq(2.0**-127).all()
    assert apply(flushing, x).eq(2.0**-127).all()
    assert apply(flushing, x, Fidelity(ftz=True)).eq(0).all()


def test_ex2_error_is_bounded_reproducible_and_zero_at_integers():
    x = torch.linspace(-20, 20, 1024)
    exact = torch.exp2(x.double())
    op = "ex2.approx.ftz.f32 %r6, %r5;"
    got = apply(op, x, Fidelity(ex2_ulp=2))
    ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    error = ((got.double() - exact) / ulp).abs()
    assert 1 < error.max() <= 2.5  # two units, and half a unit of the exact result's own rounding
    assert torch.equal(got, apply(op, x, Fidelity(ex2_ulp=2)))
    whole = torch.arange(-10.0, 22.0)
    assert torch.equal(apply(op, whole, Fidelity(ex2_ulp=2)), torch.exp2(whole))


@pytest.mark.parametrize("wrong", [{"fp8_accumulator_bits": 99}, {"half_accumulator_bits": -1}, {"ex2_ulp": -1}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Fidelity(**wrong)


def test_profile_counts_warp_instructions():
    x, y = torch.randn(100), torch.zeros(100)
    extents = [(t.data_ptr(), t.data_ptr() + 400) for t in (x, y)]
    machine = api.run(launch(ELEMENTWISE, x, y, grid=2, block=64), extents, api.Schedule("eager", width=32))
    classes = profile(machine).classes
    # four warps of 32 threads, 100 elements: each warp has some element, so each runs the one fma, load and store
    assert (classes["fp32"], classes["ld.global"], classes["st.global"]) == (4, 4, 4)
    assert profile(machine).cycles("sm_100a")["fp32"] == 1.0
