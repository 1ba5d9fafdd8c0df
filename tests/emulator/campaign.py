"""Kernels that hardware has proven, under many schedules with the race checker: the list, and a command that runs it.

``python -m tests.emulator.campaign all --schedules 8 --out tests/emulator/results`` writes one record per architecture, each in
its own process; ``python -m tests.emulator.campaign sm_100a --out FILE`` runs one of them.

Each case runs once per schedule; its result is compared with plain torch each time and every race report counts. What a
case's waivers let pass is measured too: one eager run without them, whose reports are listed by kind and source line.
A case that is wrong or stops is recorded with its error and the command exits with status 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import environment

LENGTHS = [1, 33, 127, 129]
JAGGED_SM100 = dict(lengths_q=[5, 130, 0, 77], lengths_k=[300, 1, 31, 0])
JAGGED_SM90 = dict(lengths_q=[3, 0, 130], lengths_k=[5, 7, 129])

#: architecture → (builder in this package, arguments, name in ``waivers.py``)
CASES: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "sm_100a": [
        ("kernels:quack_gemm", dict(m=256, n=192, k=320), "QUACK_GEMM_SM100"),
        ("kernels:quack_mxfp8_gemm", dict(m=200, n=192, k=640), "QUACK_GEMM_SM100"),
        ("kernels:quack_mxfp8_varlen_m", dict(lengths=LENGTHS, n=192, k=256), "QUACK_GEMM_SM100"),
        ("kernels:quack_mxfp8_varlen_k", dict(lengths=LENGTHS, m=192, n=128), "QUACK_GEMM_SM100"),
        ("kernels:quack_quantized_output", dict(m=200, n=192, k=320), "QUACK_GEMM_SM100"),
        ("kernels:quack_rmsnorm", dict(m=13, n=1024), "QUACK_RMSNORM"),  # forward and backward
        ("kernels:fa4_forward", dict(sq=256, sk=512), "FA4_FORWARD_SM100"),
        ("kernels:fa4_forward", dict(sq=200, sk=300, dim=64), "FA4_FORWARD_SM100"),
        ("kernels:fa4_forward", dict(sq=256, sk=256, heads=4, kv_heads=2, causal=True), "FA4_FORWARD_SM100"),
        ("kernels:fa4_forward", dict(sq=512, sk=512), "FA4_FORWARD_SM100"),  # two CTAs
        ("kernels:fa4_varlen_forward", JAGGED_SM100, "FA4_FORWARD_SM100"),
        ("kernels:fa4_backward", dict(sq=256, sk=256), "FA4_BACKWARD_SM100"),  # two CTAs
        ("kernels:fa4_backward", dict(sq=200, sk=300, dim=64), "FA4_BACKWARD_SM100"),
        ("kernels:fa4_backward", dict(sq=128, sk=256, heads=2, kv_heads=1, causal=True), "FA4_BACKWARD_SM100"),
        ("kernels:fa4_varlen_backward", JAGGED_SM100, "FA4_BACKWARD_SM100"),
        ("kernels:fa4_forward", dict(sq=256, sk=384, growing=True), "FA4_FORWARD_SM100"),  # outputs are rescaled
    ],
    "sm_90a": [
        ("kernels_sm90:quack_fp8_gemm", dict(m=200, n=192, k=320), "NONE"),
        ("kernels:quack_gemm", dict(m=200, n=192, k=320), "NONE"),
        ("kernels_sm90:quack_rmsnorm", dict(m=13, n=1024), "QUACK_RMSNORM"),
        ("kernels:fa4_forward", dict(sq=200, sk=300), "NONE"),
        ("kernels:fa4_forward", dict(sq=100, sk=130, dim=64), "NONE"),
        ("kernels:fa4_forward", dict(sq=128, sk=256, heads=2, kv_heads=1, causal=True), "NONE"),
        ("kernels:fa4_varlen_forward", JAGGED_SM90, "NONE"),
        ("kernels:fa4_backward", dict(sq=128, sk=200), "NONE"),
        ("kernels:fa4_backward", dict(sq=128, sk=200, dim=64), "NONE"),
        ("kernels:fa4_backward", dict(sq=128, sk=200, heads=2, kv_heads=1, causal=True), "NONE"),
        ("kernels:fa4_varlen_backward", JAGGED_SM90, "NONE"),
    ],
}


def record_name(arch: str) -> str:
    """File name of an architecture's record."""
    return f"kernels_{arch.replace('_', '')}.json"


def build(arch: str, builder: str, arguments: dict[str, Any]) -> Any:
    """The ``kernels.Case`` of ``module:function``."""
    module, function = builder.split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)(arch, **arguments)


def _line(report: Any) -> str:
    """Source line of a report's first access (the load that is used early, the arrival that comes late)."""
    return next(iter(re.findall(r"\(([\w.]+\.py:\d+)\)", f"{report.first} {report.second}")), "")


def run_case(arch: str, builder: str, arguments: dict[str, Any], waivers: str, schedules: list[Any], log: Any) -> dict[str, Any]:
    """Run one case under every schedule; never raises for what a kernel does."""
    from . import api
    from . import waivers as named

    case = build(arch, builder, arguments)
    out: dict[str, Any] = {"case": case.name, "waivers": waivers, "schedules": [], "races": 0, "errors": []}
    started = time.time()
    if case.prepare is not None:
        api.record(case.prepare, arch)
    if waivers != "NONE":
        _, result = api.call_under(case.call, arch, api.Schedule("eager"), check=True, collect=True)
        out["waived"] = dict(sorted(Counter(f"{r.kind}, {_line(r)}" for r in result.reports).items()))
    for s in schedules:
        try:
            value, result = api.call_under(case.call, arch, s, check=True, waivers=getattr(named, waivers), collect=True)
            out["races"] += len(result.reports)
            out["errors"] += [f"{s}: {r.kind}, {_line(r)}" for r in result.reports]
            case.verify(value)
            out["launches"], out["steps"] = len(result.launches), result.steps
        except Exception as error:
            out["errors"].append(f"{s}: {type(error).__name__}: {str(error)[:300]}")
        out["schedules"].append(str(s))
    out["seconds"] = round(time.time() - started, 1)
    log(f"{case.name}: {len(out['schedules'])} schedules, {out['races']} races, {len(out['errors'])} errors, {out['seconds']} s")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", choices=[*CASES, "all"])
    parser.add_argument("--part", help="i/n: only every n-th case, from the i-th (0-based) on")
    parser.add_argument("--merge", type=Path, nargs="+", help="documents of all parts of one campaign: write the whole to --out")
    parser.add_argument("--schedules", type=int, default=8)
    parser.add_argument("--only", type=int, action="append", help="only this case (0-based); may be repeated")
    parser.add_argument("--out", type=Path, help="a file; with all, a folder")
    args = parser.parse_args()
    if args.arch == "all":
        folder = args.out or Path(__file__).parent / "results"
        command = [sys.executable, "-m", __spec__.name, "--schedules", str(args.schedules)]
        return max(subprocess.run([*command, arch, "--out", str(folder / record_name(arch))]).returncode for arch in CASES)
    if args.merge:
        parts = [json.loads(path.read_text()) for path in args.merge]
        document = {**parts[0], "cases": sorted((c for p in parts for c in p["cases"]), key=lambda c: c["number"])}
        done = document["cases"]
    else:
        from . import api, capture

        capture.install(args.arch)
        chosen = api.schedules(args.schedules)
        first, step = map(int, args.part.split("/")) if args.part else (0, 1)
        wanted = [i for i in range(len(CASES[args.arch]))[first::step] if args.only is None or i in args.only]
        done = []
        for i in wanted:
            got = run_case(args.arch, *CASES[args.arch][i], chosen, lambda text: print(text, file=sys.stderr, flush=True))
            done.append({"number": i, **got})
        document = {"arch": args.arch, "environment": environment(), "cases": done}
    text = json.dumps(document, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 1 if any(c["errors"] for c in done) else 0


if __name__ == "__main__":
    sys.exit(main())
