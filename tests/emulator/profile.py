"""Instruction profile of a run, for roofline pages: what a tile costs, by the unit that pays.

``profile(machine)`` counts executed warp instructions (run with ``width=32``: a gang is a warp) by class, and the work of
the asynchronous units from ``machine.tally``. Cycles follow from the throughputs of one multiprocessor in ``RATES``; they
say which unit binds, not how long a kernel takes: there is no pipeline model here.

``python -m tests.emulator.profile fa4_forward sm_100a sq=256 sk=512`` prints a table.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

#: operations per clock and multiprocessor. Lane rates: CUDA C++ Programming Guide, "Arithmetic Instructions" (compute
#: capability 9.0 and 10.0: 128 FP32, 64 INT32, 16 special functions). Tensor rates: the vendor's dense peak over
#: multiprocessors and clock (H200: 989 TFLOP/s BF16, 132 at 1.83 GHz; B200: 2250, 148 at 1.85 GHz), FP8 twice that.
RATES = {
    "sm_90": {"fp32": 128, "int": 64, "mufu": 16, "shared_bytes": 128, "tensor_flops_bf16": 4096, "tensor_flops_fp8": 8192},
    "sm_100": {"fp32": 128, "int": 64, "mufu": 16, "shared_bytes": 128, "tensor_flops_bf16": 8192, "tensor_flops_fp8": 16384},
}

_MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"}
_FP32 = {"fma", "add", "sub", "mul", "max", "min", "neg", "abs"}
_CONVERT = {"cvt"}


@dataclass(frozen=True)
class Profile:
    """Warp instructions by class, and bytes and operations of the asynchronous units."""

    classes: dict[str, int]
    tally: dict[str, int]

    def cycles(self, arch: str, fp8: bool = False) -> dict[str, float]:
        """Cycles each unit of one multiprocessor needs for the run's work, alone."""
        r = RATES["sm_90" if arch.startswith("sm_90") else "sm_100"]
        lanes = {k: 32 * v for k, v in self.classes.items()}
        flops = self.tally.get("mma_flops", 0)
        out = {
            "tensor": flops / r["tensor_flops_fp8" if fp8 else "tensor_flops_bf16"],
            "mufu": lanes.get("mufu", 0) / r["mufu"],
            "fp32": (lanes.get("fp32", 0) + 2 * lanes.get("fp32x2", 0)) / r["fp32"],
            "int": (lanes.get("int", 0) + lanes.get("convert", 0)) / r["int"],
        }
        return {k: round(v, 1) for k, v in out.items()}


def _class(I: Any) -> str:
    base, t = I.parts[0], I.parts[-1]
    if base in _MUFU:
        return "mufu"
    if base in _FP32 and t == "f32x2":
        return "fp32x2"
    if base in _FP32 and t.startswith(("f32", "f16", "bf16")):
        return "fp32"
    if base in _CONVERT:
        return "convert"
    if base in ("ld", "st"):
        space = next((p.split("::")[0] for p in I.parts if p.split("::")[0] in ("global", "shared", "param", "local")), "generic")
        return f"{base}.{space}"
    if base in ("bra", "ret", "exit"):
        return "branch"
    if base in ("mbarrier", "bar", "barrier", "fence"):
        return "sync"
    if base in ("tcgen05", "wgmma", "cp"):
        return ".".join(I.op.replace("::", ".").split(".")[:2])
    if base == "mov":
        return "mov"
    return "int"


def profile(machine: Any) -> Profile:
    """Profile of a finished run."""
    classes: Counter[str] = Counter()
    for unit, hits in zip(machine.compiled.units, machine.hits, strict=True):
        for I in unit.instrs:
            classes[_class(I)] += hits
    return Profile(dict(sorted(classes.items())), dict(machine.tally))


def main() -> None:
    from . import api, kernels

    name, arch, *pairs = sys.argv[1:]
    arguments = {k: int(v) for k, v in (p.split("=") for p in pairs)}
    case = getattr(kernels, name)(arch, **arguments)
    if case.prepare:
        api.record(case.prepare, arch)
    _, result = api.call_under(case.call, arch, api.Schedule("eager", width=32))
    for launch, machine in zip(result.launches, result.machines, strict=True):
        p = profile(machine)
        print(
            f"{launch.name[:70]}\n  cycles alone: {p.cycles(arch, 'mxfp8' in name)}\n  warp instructions: {p.classes}\n  units: {p.tally}"
        )


if __name__ == "__main__":
    main()
