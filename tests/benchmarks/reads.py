"""Kernels of ``benchmarks.kernels_read`` in the emulator; called by a worker of ``tests.emulator``."""

import torch

from benchmarks.kernels_read import UNLIKELY, ReadSpec, compile_read
from lp_fa4.compile import launch
from tests.emulator import emulate

SIZE, MULTIPROCESSORS = 1 << 16, 3
SPECS = {
    "words": ReadSpec(2048, 2, 128),
    "words, persistent": ReadSpec(2048, 4, 128, ctas=1, once=False),
    "copies": ReadSpec(8192, 2),
    "copies, persistent": ReadSpec(4096, 3, ctas=1, once=False),
}


def places(arch: str, name: str) -> dict[str, list[int]]:
    """Where a word was planted, and what the sink held afterwards: nothing planted first, then words of either tensor, its first and last
    among them."""
    spec = SPECS[name]
    step = 1 if spec.threads else spec.piece // 4
    count = SIZE // 4 // step
    planted = [-1] + [step * i for i in sorted({0, 1, count // 3, count - 1, count, count + 1, count + count // 2, 2 * count - 1})]
    found: list[int] = []

    def call() -> None:
        found.clear()
        for place in planted:
            both = torch.zeros(2, SIZE // 4, dtype=torch.int32)
            if place >= 0:
                both.view(-1)[place] = UNLIKELY
            a, b = both.view(torch.uint8)
            sink = torch.zeros(1, dtype=torch.int32)
            launch(compile_read(arch, spec), a.device, a, b, sink, spec.grid(SIZE, MULTIPROCESSORS))
            found.append(int(sink))

    emulate(call, arch=arch, schedules=1, check=True)
    return {"planted": planted, "found": found}
