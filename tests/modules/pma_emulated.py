"""The whole module on one architecture's kernels, in the emulator: a function for ``tests.emulator.worker`` (``Worker(arch).call``).

Every operation is told to run as that architecture's kernel or to raise, so that nothing of a step can be the reference's in silence.
``python -m tests.modules.pma_emulated``: the steps of ``STEPS`` on ``sm_100a``, one JSON line each.
"""

import json
import re
from collections import Counter
from typing import Any

from tests.emulator.api import Schedule
from tests.emulator.ours import served
from tests.emulator.waivers import OURS_SM90

LENGTHS = [33, 0, 70, 1]
STEPS: dict[str, dict[str, Any]] = {
    "square": {"dim": 128, "heads": 2, "seeds": 64, "numerics": {"scales": "square", "key_projection": "e4m3x2"}},
    "token": {"dim": 128, "heads": 1, "seeds": 40, "numerics": {"scales": "token", "key_projection": "bf16"}, "value_proj": True},
}
"""Training steps that take every operation's kernel for Blackwell: heads of 64 with 32 x 32 blocks and E4M3 weights; a head of 128 with
token blocks, BF16 weights and a value projection."""


def short(name: str) -> str:
    """Class of a launched kernel, after its file: ``forward_kernel Forward`` of a mangled name."""
    found = re.match(r"kernel_cutlass_[a-z]+_(?:lp_fa4|fused_ops)(\w+?)([A-Z]\w*?)_object_at", name)
    return " ".join(found.groups()) if found else name


def compare(
    arch: str,
    *,
    dim: int,
    heads: int,
    seeds: int,
    lengths: list[int],
    numerics: dict,
    value_proj: bool = False,
    schedule: str = "eager",
) -> dict:
    """Decibels of a module's output and gradients against FP64, by tensor: ``found`` by the kernels, ``allowed`` by the CPU reference with
    the same choices; ``apart``: of the kernels' against that reference's. ``kernels``: launches by kernel; ``targets``: what they were
    compiled for. ``clean``: rows past the end and empty samples are exactly 0. ``numerics``: fields of ``modules.Numerics``."""
    import torch

    from modules import Numerics
    from tests.modules.common import batch, exact, make, ratios, run

    choices = Numerics(**numerics)
    shape: dict[str, Any] = {"dim": dim, "num_heads": heads, "num_seeds": seeds, "numerics": choices, "value_proj": value_proj}
    torch.manual_seed(0)
    x, offsets = batch(lengths, extra=5, dim=dim, dtype=torch.bfloat16, offsets_dtype=torch.int32)
    torch.use_deterministic_algorithms(False)  # the reducing kernels, as a user runs them
    module = make(**shape)
    with served(Schedule(schedule), arch, check=True, waivers=OURS_SM90) as result:
        got = run(module, x, offsets)
    want = run(make(**shape, backend="reference"), x, offsets)
    truth = exact(module, x, offsets)
    used, empty = sum(lengths), [b for b, n in enumerate(lengths) if n == 0]
    return {
        "found": {k: float(v) for k, v in ratios(got, truth).items()},
        "allowed": {k: float(v) for k, v in ratios(want, truth).items()},
        "apart": {k: float(v) for k, v in ratios(got, want).items()},
        "kernels": Counter(short(launch.name) for launch in result.launches),
        "targets": sorted({m[1] for launch in result.launches if (m := re.search(r"\.target\s+(\w+)", launch.ptx))}),
        "clean": not bool(got[1][used:].any()) and not any(bool(got[0][b].any()) for b in empty),
    }


def main() -> None:
    """Print one JSON line per step of ``STEPS``."""
    for name, step in STEPS.items():
        print(json.dumps({"name": name, **compare("sm_100a", lengths=LENGTHS, **step)}), flush=True)


if __name__ == "__main__":
    main()
