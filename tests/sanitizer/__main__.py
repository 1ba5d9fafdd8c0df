"""``compute-sanitizer`` over every kernel, on a GPU: a process for each tool and operation, many at once, and one JSON of what they say.

    python -m tests.sanitizer OUT.json [--tools memcheck,racecheck] [--only attention] [--jobs 24] [--seconds 500]
    python -m tests.sanitizer OUT.json --emulated          # the same operations and probes under the emulator's race checker
    python -m tests.sanitizer OUT.json --merge RECORDS     # several runs in one record, with a reason for every report that has one
    python -m tests.sanitizer OUT.json --table

Each case (``cases``) runs its operations on a small hostile batch, on the kernels of the device; probes (``probes``) are the smallest
kernels that hand memory over as ours do. Every allocation is the driver's own (``PYTORCH_NO_CUDA_MEMORY_CACHING``), so that bounds and
first reads are those of the tensors. Errors of driver calls are not asked for: the CUDA bindings probe for entry points that a driver may
lack, and what fails in earnest raises in Python. A report is explained by ``pairs`` alone, where the record holds the evidence.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import ROOT, environment
from tests.sanitizer.cases import CASES, title
from tests.sanitizer.probes import PROBES
from tests.sanitizer.report import commits, merge, parse, table

RACECHECK = ["--tool", "racecheck", "--racecheck-report", "analysis"]
TOOLS = {
    "memcheck": ["--tool", "memcheck", "--report-api-errors", "no"],
    "initcheck": ["--tool", "initcheck"],
    "racecheck": [*RACECHECK, "--racecheck-indirect-barrier-dependency"],
    "synccheck": ["--tool", "synccheck"],
}
PROBED = {
    "racecheck": [n for n in PROBES if "bulk store" not in n],
    "initcheck": [n for n in PROBES if "bulk store" in n],
    "emulator": list(PROBES),
}
"""Probes of a tool."""


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


@dataclass
class Job:
    """A process: a tool (``emulator``: the emulator's race checker) on a case or a probe; ``index``: of an operation, None for all (probes
    have one, the emulator takes them in turn)."""

    tool: str
    case: str
    index: int | None = None
    since: float = 0.0
    log: Path = field(default_factory=Path)
    process: subprocess.Popen | None = None

    @property
    def operation(self) -> str:
        """The operation it takes, "" for all."""
        return "" if self.index is None else title(CASES[self.case][self.index])

    def command(self, sanitizer: str) -> list[str]:
        """What to start."""
        python = [sys.executable, "-m", "tests.sanitizer.cases", self.case, "--tool", self.tool]
        python += [] if self.index is None else ["--index", str(self.index)]
        if self.tool == "emulator":
            return python
        limit = "50000" if self.tool == "initcheck" else "1000"  # more than there are: one kind of report may hide another
        return [sanitizer, *TOOLS[self.tool], "--show-backtrace", "no", "--print-limit", limit, *python]

    def start(self, sanitizer: str, logs: Path) -> None:
        """Start it."""
        self.log = logs / (re.sub(r"\W+", "_", f"{self.case} {'' if self.index is None else self.index} {self.tool}") + ".txt")
        self.since = time.monotonic()
        with self.log.open("w") as file:
            env = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1", OPENBLAS_NUM_THREADS="1")
            self.process = subprocess.Popen(self.command(sanitizer), stdout=file, stderr=subprocess.STDOUT, env=env, cwd=ROOT)

    def end(self) -> dict[str, Any]:
        """What it said; killed if it still runs."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
        text = self.log.read_text(errors="replace")
        run: dict[str, Any] = {"tool": self.tool, "case": self.case}
        run |= {"operation": self.operation} if self.operation else {}
        run |= {"seconds": round(time.monotonic() - self.since, 1), "exit": self.process.wait(), **parse(text, self.tool)}
        listed = re.search(r"^kernels: (.*)$", text, re.M)
        run["kernels"] = json.loads(listed[1]) if listed else None
        return run


def jobs(tools: list[str], only: str) -> list[Job]:
    """Everything that is asked for, the longest first."""
    found = []
    for case, tool in itertools.product(reversed(CASES), tools):
        found += [Job(tool, case)] if tool == "emulator" else [Job(tool, case, i) for i in reversed(range(len(CASES[case])))]
    found += [Job(tool, f"probe: {name}") for tool in tools for name in PROBED.get(tool, [])]
    return [job for job in found if only in f"{job.case}: {job.operation}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", help="what 'CASE: OPERATION' must contain")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=500, help="what has not ended by then is killed and says so")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--table", action="store_true", help="print OUT.json as a table, and the commits of its runs, instead")
    chosen = parser.parse_args()
    if chosen.table:
        record = json.loads(chosen.out.read_text(encoding="utf-8"))
        print(table(record), commits(record), sep="\n\n")
        return 0
    if chosen.merge:
        record = merge([json.loads(path.read_text(encoding="utf-8")) for path in chosen.merge])
        chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(table(record))
        return sum(run["exit"] != 0 or run["unexplained"] != 0 for run in record["runs"])
    tool = "" if chosen.emulated else find_tool()
    if tool is None:
        print("compute-sanitizer was not found", file=sys.stderr)
        return 2
    from benchmarks.harness import environment as recorded

    record = {"runs": [], "environment": recorded("cpu" if chosen.emulated else "cuda")}
    if tool:
        record["tool"] = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    waiting = jobs(["emulator"] if chosen.emulated else chosen.tools.split(","), chosen.only)
    running: list[Job] = []
    deadline = time.monotonic() + chosen.seconds
    logs = chosen.out.parent / (chosen.out.stem + "-logs")
    logs.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        late = time.monotonic() > deadline
        while waiting and len(running) < chosen.jobs and not late:
            running.append(waiting.pop(0))
            running[-1].start(tool, logs)
        for job in [j for j in running if late or (j.process is not None and j.process.poll() is not None)]:
            running.remove(job)
            run = job.end()
            record["runs"].append(run)
            chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            what = f"{run['case']} {run.get('operation', '')}"
            print(f"{run['tool']:10} {what:48} exit {run['exit']:3} {run['seconds']:6.1f} s  {run['summary']}", flush=True)
        if late and waiting:
            record["not_run"] = [[j.tool, j.case, j.index] for j in waiting]
            chosen.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            waiting = []
        time.sleep(0.2)
    return sum(run["exit"] != 0 for run in record["runs"])


if __name__ == "__main__":
    sys.exit(main())
