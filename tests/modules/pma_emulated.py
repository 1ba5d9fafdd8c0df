"""``python -m tests.modules.pma_emulated``: the whole module on Hopper's kernels in the emulator; one line of JSON.

A process of its own: the DSL fixes its target at the first import, so nothing may have imported it before.
"""

import contextlib
import importlib
import json
from collections.abc import Iterator
from unittest import mock

from tests.emulator import capture

OPERATIONS = ("rmsnorm_quantize", "gemm_quantize", "gemm_norm_backward")


@contextlib.contextmanager
def hopper() -> Iterator[object]:
    """Calls on CPU tensors go to the sm_90 kernels, which the emulator runs; yields its result."""
    from lp_fa4 import dispatch
    from tests.emulator.api import Schedule
    from tests.emulator.ours import emulated

    backend = importlib.import_module("fused_ops.backend")
    only = lambda name, device: "" if name == "sm90" else f"{name} is not emulated here"  # noqa: E731
    choose = backend.choose
    always = lambda op, device, name, reason: choose(op, device, "sm90" if name == "auto" else name, reason)  # noqa: E731
    with contextlib.ExitStack() as stack:
        for module in (dispatch, backend):
            stack.enter_context(mock.patch.object(module, "device_reason", only))
        for operation in OPERATIONS:
            stack.enter_context(mock.patch.object(importlib.import_module(f"fused_ops.{operation}.interface"), "choose", always))
        yield stack.enter_context(emulated(Schedule("eager", 0)))


def main() -> None:
    capture.install("sm_90a")
    import torch

    from modules import Numerics
    from tests.modules.common import batch, exact, make, ratios, run

    choices = Numerics(scales="static", key_projection="e4m3x2")
    x, offsets = batch([33, 0, 70, 1], extra=5, dtype=torch.bfloat16, offsets_dtype=torch.int32)
    module = make(dim=128, num_heads=2, num_seeds=64, numerics=choices)
    with hopper() as result:
        got = run(module, x, offsets)
    want = run(make(dim=128, num_heads=2, num_seeds=64, numerics=choices, backend="reference"), x, offsets)
    truth = exact(module, x, offsets)
    report = {
        "found": ratios(got, truth),
        "allowed": ratios(want, truth),
        "kernels": [launch.name for launch in result.launches],
        "tail and empty sample are zero": not got[1][104:].any() and not got[0][1].any(),
    }
    print(json.dumps(report, default=float))


if __name__ == "__main__":
    main()
