"""``compute-sanitizer`` over every kernel, on a GPU: a process for each tool and case, all at once, and one JSON of what they say.

    python -m tests.sanitizer OUT.json [--tools memcheck,racecheck] [--only attention] [--jobs 24] [--seconds 500]

Each case runs one operation twice on a small hostile batch, on the kernels of the device. Every allocation is the driver's own
(``PYTORCH_NO_CUDA_MEMORY_CACHING``), so that bounds and first reads are those of the tensors. Errors of driver calls are not asked for: the
CUDA bindings probe for entry points that a driver may lack, and what fails in earnest raises in Python.
"""

import argparse
import glob
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
    "racecheck": ["--racecheck-report", "all"],
    "synccheck": [],
}
LENGTHS = (0, 33, 130, 1, 300)
CASES: dict[str, dict[str, Any]] = {
    "norm": dict(subjects=["rmsnorm_center_quantize", "rmsnorm_center_quantize static"]),
    "scales": dict(subjects=["scatter_scales"]),
    "projection": dict(subjects=["gemm_quantize"], dtypes=["bfloat16", "float32"]),
    "projection backward": dict(subjects=["gemm_norm_backward"]),
    "attention, few queries": dict(subjects=["mx_attention"]),
    "attention, split keys": dict(subjects=["mx_attention 40"]),
    "attention": dict(subjects=["mx_attention 140"]),
    "attention, atomics": dict(subjects=["mx_attention 140"], deterministic=False),
    "drop-in": dict(subjects=["flash_attn_varlen_func"]),
    "drop-in, causal": dict(subjects=["flash_attn_varlen_func"], causal=True),
    "module": dict(subjects=["PMA"]),
    "module, static, value projection": dict(subjects=["PMA static value_proj"]),
}


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

    case = CASES[name]
    subjects = {s.name: s for s in subjects_at(HOPPER).values()}
    samples = [Sample(n, 2 + 45 * (i % 3), 2, change="constant" if i == 1 else "") for i, n in enumerate(LENGTHS)]
    for _ in range(2):
        for dtype in case.get("dtypes", ["bfloat16"]):
            for subject in case["subjects"]:
                choices = Choices(getattr(torch, dtype), case.get("causal", False), deterministic=case.get("deterministic", True))
                subjects[subject](samples, 7, choices)
    torch.cuda.synchronize()
    print("kernels: " + json.dumps(sorted(set(kernels))), flush=True)


def parse(text: str) -> dict[str, Any]:
    """Summary lines, and reports by their first line and place, most frequent first."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    summaries = [line for line in lines if "SUMMARY" in line]
    reports: dict[str, int] = {}
    for i, line in enumerate(lines):
        head = re.match(
            r"(Invalid|Uninitialized|Error:|Warning:|Barrier error|Potential|Divergent|Leaked|Program hit|Out-of-range|Race)", line
        )
        if head:
            near = [re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)", "*", x) for x in lines[i : i + 4] if x and "Host Frame" not in x]
            reports[" | ".join(near)[:400]] = reports.get(" | ".join(near)[:400], 0) + 1
    worst = sorted(reports.items(), key=lambda item: -item[1])[:12]
    counts = [int(n) for line in summaries for n in re.findall(r"SUMMARY: (\d+)", line)]
    return {"summary": summaries, "count": sum(counts) if counts else None, "reports": [{"what": w, "times": n} for w, n in worst]}


def table(record: dict[str, Any]) -> str:
    """Markdown: reports of each tool by case; "-" where a run did not end."""
    runs = {(r["case"], r["tool"]): r for r in record["runs"]}
    cell = lambda r: "-" if r is None or r["exit"] or r["count"] is None else str(r["count"])  # noqa: E731
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
            command = [tool, "--tool", name, *TOOLS[name], "--print-limit", "200", sys.executable, "-m", "tests.sanitizer", str(chosen.out)]
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
    return sum(r["exit"] != 0 or r["count"] != 0 for r in record["runs"])


if __name__ == "__main__":
    sys.exit(main())
