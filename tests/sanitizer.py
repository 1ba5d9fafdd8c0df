"""``compute-sanitizer`` over every kernel, on a GPU: a process for each tool and case, all at once, and one JSON of what they say.

    python -m tests.sanitizer OUT.json [--tools memcheck,racecheck] [--only attention] [--jobs 24] [--seconds 500]

Each case runs its operations twice on a small hostile batch, on the kernels of the device. Every allocation is the driver's own
(``PYTORCH_NO_CUDA_MEMORY_CACHING``), so that bounds and first reads are those of the tensors. Errors of driver calls are not asked for: the
CUDA bindings probe for entry points that a driver may lack, and what fails in earnest raises in Python.
"""

import argparse
import glob
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = {
    "memcheck": ["--report-api-errors", "no"],
    "initcheck": [],
    "racecheck": ["--racecheck-report", "analysis"],
    "synccheck": [],
}
LENGTHS = (0, 33, 130, 1, 300)
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "fused operations": [
        ("rmsnorm_center_quantize", {}),
        ("rmsnorm_center_quantize static", {}),
        ("scatter_scales", {}),
        ("gemm_quantize", {}),
        ("gemm_quantize", {"dtype": "float32"}),
        ("gemm_norm_backward", {}),
    ],
    "few queries": [("mx_attention", {}), ("mx_attention 40", {})],
    "attention": [("mx_attention 140", {}), ("mx_attention 140", {"deterministic": False})],
    "drop-in": [("flash_attn_varlen_func", {}), ("flash_attn_varlen_func", {"causal": True})],
    "module": [("PMA static value_proj", {})],
}
"""Operations of each case, by their names in ``tests.properties.subjects``, and what is not the default of ``Choices``. In float32
``gemm_quantize`` takes MXFP8 operands; ``mx_attention 40`` splits keys, 140 queries fill two tiles."""


def find_tool() -> str | None:
    """Path of ``compute-sanitizer``, or None."""
    places = (
        "/usr/local/cuda*/bin",
        "/usr/local/cuda*/compute-sanitizer",
        "/opt/nvidia/*/*/compute-sanitizer",
        "/usr/local/cuda*/extras/*",
    )
    found = shutil.which("compute-sanitizer")
    return found or next((p for place in places for p in sorted(glob.glob(place + "/compute-sanitizer"))), None)


def run_case(name: str) -> None:
    """In a process of its own, under a tool: run the case; prints the names of the kernels that were compiled."""
    import lp_fa4.compile as compilation

    kernels: list[str] = []
    build = compilation.build

    def listed(arch: str, function: Any, *arguments: Any) -> Any:
        kernels.append(f"{type(function).__module__}.{type(function).__name__}")
        return build(arch, function, *arguments)

    compilation.build = listed
    compilation.extra_options = "--generate-line-info"
    import torch

    from tests.properties.subjects import HOPPER, Choices, Sample, subjects_at

    subjects = {s.name: s for s in subjects_at(HOPPER).values()}
    samples = [Sample(n, 2 + 45 * (i % 3), 2, change="constant" if i == 1 else "") for i, n in enumerate(LENGTHS)]
    for _ in range(2):
        for subject, changes in CASES[name]:
            choices = {"dtype": "bfloat16", **changes}
            subjects[subject](samples, 7, Choices(**{**choices, "dtype": getattr(torch, choices["dtype"])}))
    torch.cuda.synchronize()
    print("kernels: " + json.dumps(sorted(set(kernels))), flush=True)


EXPLAINED = {
    (
        "forward_kernel Forward",
        "forward_producer.py",
        "forward_consumer.py",
    ): "exponents of a stage: its readers meet at sync_warp, one lane of "
    "theirs arrives at the stage's empty barrier, which the producer waits for before it writes",
    (
        "staged StagedNorm",
        "places.py",
        "staged.py",
    ): "rows of a stage: their readers meet at sync_warp, one lane arrives at the stage's empty "
    "barrier, which the loading warp waits for before it starts the next bulk copy",
    ("backward_main BackwardMain", "numbers.py", "backward_compute.py"): "a warp's factors: every lane writes the same value to the same "
    "address and then reads it",
}
"""Pairs of racecheck that are ordered or harmless, by kernel, writing file and reading file: the tool credits a barrier's arrival to the
lane that arrives, not to those that met it before. The emulator's checker follows both and reports none of them."""

BULK_STORED = ("backward_main BackwardMain", "backward_prepass Prepass", "input_gradient InputGradient")
"""Kernels that read what the one before wrote with bulk stores (``cp.async.bulk.global.shared``), which initcheck does not see: the
forward's output, the pre-pass' images, dK and dV. Contents of fresh memory reach no result of theirs (``test_fresh_memory``)."""

ACCESS = re.compile(r"(Read|Write) (?:Thread \([^)]*\)|access) at (\S+?)(?:_object_at\S*|\+0x[0-9a-f]+) in (\S+)")


ACCESS_ALONE = re.compile(r"at (\S+?)(?:_object_at\S*|\+0x[0-9a-f]+) in (\S+)")


def _stored(what: str) -> str | None:
    if "Uninitialized" in what and any(kernel in what for kernel in BULK_STORED):
        return "written by bulk stores of the kernel before, which the tool does not follow"
    return None


def _kernel(name: str) -> str:
    """``module Class`` of a kernel's entry name."""
    found = re.search(r"kernel_cutlass_kernel_(?:lp_fa4|fused_ops)(?:sm90|common)?([a-z_0-9]*)([A-Z]\w*)", name)
    module = found[1].removeprefix("rmsnorm_quantize").removeprefix("gemm_quantize").removeprefix("gemm_norm_backward") if found else ""
    return f"{module} {found[2]}" if found else name[:80]


def parse(text: str) -> dict[str, Any]:
    """Summary lines; pairs of accesses, how often each was printed and, if that is known, why it is no race; other reports."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    pairs: dict[tuple[str, str, str], int] = {}
    others: dict[str, int] = {}
    for i, line in enumerate(lines):
        if "hazard detected" in line or "Race reported" in line:
            follow = lines[i + 1 : i + 3] if "hazard" in line else list(itertools.takewhile(lambda x: x.startswith("and "), lines[i + 1 :]))
            seen = [m for x in [line, *follow] for m in [ACCESS.search(x)] if m]
            for other in seen[1:]:
                write, read = (seen[0], other) if seen[0][1] == "Write" else (other, seen[0])
                key = _kernel(write[2]), write[3], read[3]
                pairs[key] = pairs.get(key, 0) + 1
            if len(seen) < 2:
                others[line[:200]] = others.get(line[:200], 0) + 1
        elif re.match(r"Invalid|Uninitialized|Barrier error|Divergent|Leaked|Program hit|Out-of-range|Unused", line):
            at = ACCESS_ALONE.search(lines[i + 1]) if i + 1 < len(lines) else None
            where = f" at {_kernel(at[1])} in {at[2]}" if at else ""
            others[line + where] = others.get(line + where, 0) + 1

    def reason(key: tuple[str, str, str]) -> str | None:
        return EXPLAINED.get((key[0], key[1].split(":")[0], key[2].split(":")[0]))

    found = [{"kernel": k, "write": w, "read": r, "printed": n, "explained": reason((k, w, r))} for (k, w, r), n in sorted(pairs.items())]
    summaries = [line for line in lines if "SUMMARY" in line]
    clean = bool(summaries) and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    unseen = [{"what": w, "printed": n, "explained": _stored(w)} for w, n in others.items()]
    open_reports = sum(f["explained"] is None for f in [*found, *unseen])
    return {
        "summary": summaries,
        "unexplained": 0 if clean else open_reports if found or others else None,
        "pairs": found,
        "others": unseen,
    }


def table(record: dict[str, Any]) -> str:
    """Markdown by case: reports of each tool that are not explained, explained pairs behind a plus; "-" where a run did not end."""
    runs = {(r["case"], r["tool"]): r for r in record["runs"]}

    def cell(r: dict[str, Any] | None) -> str:
        if r is None or r["exit"] or r["unexplained"] is None:
            return "-"
        known = sum(p["explained"] is not None for p in [*r["pairs"], *r["others"]])
        return str(r["unexplained"]) + (f" + {known}" if known else "")

    lines = ["| case | " + " | ".join(TOOLS) + " | kernels |", "|---" * (len(TOOLS) + 2) + "|"]
    for case in CASES:
        kernels = max((len(r["kernels"] or []) for (c, _), r in runs.items() if c == case), default=0)
        lines.append(f"| {case} | " + " | ".join(cell(runs.get((case, tool))) for tool in TOOLS) + f" | {kernels} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=500, help="what has not ended by then is killed and says so")
    parser.add_argument("--table", action="store_true", help="print OUT.json as a table instead")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.table:
        print(table(json.loads(chosen.out.read_text(encoding="utf-8"))))
        return 0
    if chosen.case:
        run_case(chosen.case)
        return 0
    tool = find_tool()
    if tool is None:
        print("compute-sanitizer was not found", file=sys.stderr)
        return 2
    from benchmarks.harness import environment as recorded
    from tests.processes import ROOT, environment

    version = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    record: dict[str, Any] = {"tool": version, "runs": [], "environment": recorded("cuda")}
    waiting = [(t, c) for c in reversed(CASES) for t in chosen.tools.split(",") if chosen.only in c]
    running: list[tuple[str, str, float, Path, subprocess.Popen]] = []
    deadline = time.monotonic() + chosen.seconds
    env = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    logs = chosen.out.parent / (chosen.out.stem + "-logs")
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < chosen.jobs and time.monotonic() < deadline:
            name, case = waiting.pop(0)
            log = logs / f"{case.replace(', ', '-').replace(' ', '_')}-{name}.txt"
            command = [
                tool,
                "--tool",
                name,
                *TOOLS[name],
                "--print-limit",
                "1000",
                sys.executable,
                "-m",
                "tests.sanitizer",
                str(chosen.out),
            ]
            with log.open("w") as file:
                process = subprocess.Popen([*command, "--case", case], stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
            running.append((name, case, time.monotonic(), log, process))
        late = time.monotonic() > deadline
        for item in list(running):
            name, case, since, log, process = item
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
            running.remove(item)
            text = log.read_text(errors="replace")
            listed = re.search(r"^kernels: (.*)$", text, re.M)
            run = {"tool": name, "case": case, "seconds": round(time.monotonic() - since, 1), "exit": process.wait(), **parse(text)}
            run["kernels"] = json.loads(listed[1]) if listed else None
            record["runs"].append(run)
            chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(f"{name:10} {case:34} exit {run['exit']:3} {run['seconds']:6.1f} s  {run['summary']}", flush=True)
        if late and waiting:
            record["not_run"] = [list(w) for w in waiting]
            chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            waiting = []
        time.sleep(0.2)
    return sum(r["exit"] != 0 or r["unexplained"] != 0 for r in record["runs"])


if __name__ == "__main__":
    sys.exit(main())
