"""PMA, forward and backward, on the Blackwell kernels that exist: a function for ``tests.emulator.worker`` (``Worker.call``)."""

import importlib
from contextlib import ExitStack
from unittest import mock


def compare(arch: str, dim: int, heads: int, seeds: int, lengths: list[int]) -> dict:
    """Errors of a module's output and gradients in dB against FP64, by tensor: ours, and the reference's with the same choices. ``names``:
    the kernels that ran. Operations without a kernel for this architecture run on the reference."""
    import torch

    from lp_fa4 import dispatch
    from modules import Numerics
    from tests.emulator.api import Schedule
    from tests.emulator.ours import emulated
    from tests.modules.common import batch, exact, make, ratios, run

    backend = importlib.import_module("fused_ops.backend")
    choose = backend.choose
    only = lambda name, device: "" if name == "sm100" else f"{name} is not emulated here"  # noqa: E731

    def chosen(operation, device, name, reason):
        words = reason if isinstance(reason, str) else reason.get("sm100", "")
        return "reference" if words else choose(operation, device, "sm100" if name == "auto" else name, reason)

    choices = Numerics(scales="square", key_projection="e4m3x2")
    module = make(dim=dim, num_heads=heads, num_seeds=seeds, numerics=choices)
    x, offsets = batch(lengths, extra=5, dtype=torch.bfloat16, offsets_dtype=torch.int32)
    torch.use_deterministic_algorithms(False)  # the reducing kernels, as a user runs them
    with ExitStack() as stack:
        for patched in (dispatch, backend):
            stack.enter_context(mock.patch.object(patched, "device_reason", only))
        for operation in ("rmsnorm_quantize", "gemm_quantize", "gemm_norm_backward"):
            interface = importlib.import_module(f"fused_ops.{operation}.interface")
            stack.enter_context(mock.patch.object(interface, "choose", chosen))
        launches = stack.enter_context(emulated(Schedule("eager", 0), arch, check=True)).launches
        got = run(module, x, offsets)
    want = run(make(dim=dim, num_heads=heads, num_seeds=seeds, numerics=choices, backend="reference"), x, offsets)
    truth = exact(module, x, offsets)
    used = sum(lengths)
    clean = not got[1][used:].any() and not any(got[0][b].any() for b, n in enumerate(lengths) if n == 0)
    return {
        "ours": {k: float(v) for k, v in ratios(got, truth).items()},
        "reference": {k: float(v) for k, v in ratios(want, truth).items()},
        "names": [launch.name for launch in launches],
        "clean": bool(clean),
    }
