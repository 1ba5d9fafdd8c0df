"""The whole module on Hopper's kernels, executed by the emulator: norm, projection, attention, and the backward of all three."""

import contextlib
import importlib
from unittest import mock

import pytest

pytestmark = pytest.mark.emulator
OPERATIONS = ("rmsnorm_quantize", "gemm_quantize", "gemm_norm_backward")


@pytest.fixture
def hopper(monkeypatch):
    """Calls on CPU tensors go to the sm_90 kernels, which the emulator runs."""
    from tests.emulator import capture

    capture.install("sm_90a")
    from lp_fa4 import dispatch
    from tests.emulator.api import Schedule
    from tests.emulator.ours import emulated

    backend = importlib.import_module("fused_ops.backend")
    only = lambda name, device: "" if name == "sm90" else f"{name} is not emulated here"  # noqa: E731
    for module in (dispatch, backend):
        monkeypatch.setattr(module, "device_reason", only)
    choose = backend.choose
    for operation in OPERATIONS:
        module = importlib.import_module(f"fused_ops.{operation}.interface")
        monkeypatch.setattr(
            module, "choose", lambda op, device, name, reason: choose(op, device, "sm90" if name == "auto" else name, reason)
        )
    with emulated(Schedule("eager", 0)) as result:
        yield result


def test_module_equals_the_reference(hopper):
    """Error against FP64 at most 1.12 times (1 dB) that of the reference with the same choices; every step of it was a kernel's."""
    import torch

    from modules import Numerics
    from tests.modules.common import batch, exact, make, ratios, run

    choices = Numerics(scales="static", key_projection="e4m3x2")
    module = make(dim=128, num_heads=2, num_seeds=64, numerics=choices)
    x, offsets = batch([33, 0, 70, 1], extra=5, dtype=torch.bfloat16, offsets_dtype=torch.int32)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # the reducing kernels, as a user runs them
    try:
        got = run(module, x, offsets)
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
    names = " ".join(launch.name for launch in hopper.launches)
    reference = make(dim=128, num_heads=2, num_seeds=64, numerics=choices, backend="reference")
    with contextlib.ExitStack() as stack:
        for operation in OPERATIONS:
            fused = importlib.import_module(f"fused_ops.{operation}.interface")
            stack.enter_context(mock.patch.object(fused, "choose", lambda *a: "reference"))
        want = run(reference, x, offsets)
    truth = exact(module, x, offsets)
    found, allowed = ratios(got, truth), ratios(want, truth)
    assert all(found[name] > allowed[name] - 1 for name in allowed), (found, allowed)
    assert not got[1][104:].any() and not got[0][1].any()
    for part in ("rmsnorm_quantize", "gemm_quantize", "forward", "backward", "gemm_norm_backward"):
        assert part in names, (part, names)
