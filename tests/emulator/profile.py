"""Instruction profile of a run, for roofline pages: what a tile costs, by the unit that pays.

``profile(machine)`` counts executed warp instructions (run with ``width=32``: a gang is a warp) by class, and the work of
the asynchronous units from ``machine.tally``. Cycles follow from the throughputs of one multiprocessor in ``RATES``; they
say which unit binds, not how long a kernel takes: there is no pipeline model here.

``python -m tests.emulator.profile kernels:fa4_forward sm_100a '{"sq": 256, "sk": 512}'`` prints one table per launch.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

#: operations per clock and multiprocessor. Lane rates: CUDA C++ Programming Guide, "Arithmetic Instructions" (compute
#: capability 9.0 and 10.0: 128 FP32, 64 INT32, 16 special functions). Tensor rates: the vendor's dense peak over
#: multiprocessors and clock (H200: 989 TFLOP/s BF16, 132 at 1.83 GHz; B200: 2250, 148 at 1.85 GHz), 8 bits twice and 4 bits
#: four times that.
RATES = {
    "sm_90": {"fp32": 128, "int": 64, "mufu": 16, "shared_bytes": 128, "tensor_flops_bf16": 4096},
    "sm_100": {"fp32": 128, "int": 64, "mufu": 16, "shared_bytes": 128, "tensor_flops_bf16": 8192},
}

_MUFU = {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"}
_FP32 = {"fma", "add", "sub", "mul", "max", "min", "neg", "abs"}
_CONVERT = {"cvt"}


@dataclass(frozen=True)
class Profile:
    """Warp instructions by class, and bytes and operations of the asynchronous units."""

    classes: dict[str, int]
    tally: dict[str, int]

    def cycles(self, arch: str) -> dict[str, float]:
        """Cycles each unit of one multiprocessor needs for the run's work, alone.

        ``tensor``: products at the dense peak of their operands' width. ``shared``: bytes that warps load and store in
        shared memory. ``shared_mma``: operand bytes that the tensor core reads from it. ``shared_copies``: bytes that TMA,
        bulk copies and ``cp.async`` write to or read from it. The three share one port.
        """
        r = RATES["sm_90" if arch.startswith("sm_90") else "sm_100"]
        lanes = {k: 32 * v for k, v in self.classes.items()}
        t = self.tally
        copies = sum(t.get(k, 0) for k in ("tma_load_bytes", "tma_store_bytes", "bulk_load_bytes", "bulk_store_bytes", "cp_async_bytes"))
        out = {
            "tensor": sum(t.get(f"mma_flops_{bits}bit", 0) * bits / 16 for bits in (4, 8, 16)) / r["tensor_flops_bf16"],
            "mufu": lanes.get("mufu", 0) / r["mufu"],
            "fp32": (lanes.get("fp32", 0) + 2 * lanes.get("fp32x2", 0)) / r["fp32"],
            "int": (lanes.get("int", 0) + lanes.get("convert", 0)) / r["int"],
            "shared": t.get("shared_bytes", 0) / r["shared_bytes"],
            "shared_mma": t.get("mma_shared_bytes", 0) / r["shared_bytes"],
            "shared_copies": copies / r["shared_bytes"],
        }
        return {k: round(v, 1) for k, v in out.items()}


def _shared_bytes(I: Any) -> int:
    """Shared-memory bytes that one warp moves with an instruction."""
    if I.parts[0] in ("ldmatrix", "stmatrix"):
        return 128 * int(next(p for p in I.parts if p in ("x1", "x2", "x4"))[1:])
    if I.parts[0] not in ("ld", "st") or not any(p.split("::")[0] == "shared" for p in I.parts):
        return 0
    count = next((int(p[1:]) for p in I.parts if p in ("v2", "v4", "v8")), 1)
    return 32 * count * int(I.parts[-1].lstrip("busf")) // 8


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
    tally = dict(machine.tally)
    for unit, hits in zip(machine.compiled.units, machine.hits, strict=True):
        for I in unit.instrs:
            classes[_class(I)] += hits
            moved = _shared_bytes(I) * hits
            if moved:
                tally["shared_bytes"] = tally.get("shared_bytes", 0) + moved
    return Profile(dict(sorted(classes.items())), dict(sorted(tally.items())))


def main() -> None:
    from . import api, campaign, capture

    builder, arch, *rest = sys.argv[1:]
    capture.install(arch)
    case = campaign.build(arch, builder, json.loads(rest[0]) if rest else {})
    if case.prepare:
        api.record(case.prepare, arch)
    value, result = api.call_under(case.call, arch, api.Schedule("eager", width=32))
    case.verify(value)
    for launch, machine in zip(result.launches, result.machines, strict=True):
        p = profile(machine)
        print(f"{launch.name[:70]}, {launch.grid} thread blocks of {launch.block[0]} threads, clusters of {launch.cluster}")
        for title, table in (("cycles alone", p.cycles(arch)), ("warp instructions", p.classes), ("units", p.tally)):
            print(f"  {title}: " + ", ".join(f"{k} {v:,}" for k, v in table.items()))


if __name__ == "__main__":
    main()
