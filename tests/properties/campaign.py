"""Every property on every operation of a place, a process for each operation (emulated: and property), and the record of what was tried.

    python -m tests.properties.campaign sm90 OUT.json --examples 100 --jobs 14
    python -m tests.properties.campaign reference OUT.json --examples 100 --jobs 2
    python -m tests.properties.campaign sm_90a OUT.json --examples 4 --jobs 2        # in the emulator; sm_100a too

Inputs are other ones every time. Emulated properties try two at a time, the simplest there is and a random one, and begin no other two
after ``0.75 --seconds``; with ``--together`` a process has all properties of its operation, whose kernels are then compiled once.
The record holds the number of inputs by property and operation, and the tests that failed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.processes import ROOT, environment

EMULATED = ("sm_90a", "sm_100a")


def commands(place: str, examples: int, seconds: float, together: bool) -> dict[str, list[str]]:
    """A command for each operation, or some, by its name."""
    from tests.properties import test_batches, test_layouts_kernels
    from tests.properties.subjects import SUBJECTS, Place, subjects_at

    if place in EMULATED:
        words = ["tests.properties.emulated", place, "--random", "--exactly", "--examples", "2", "--rounds", str(-(-examples // 2))]
        names = {s.name: test_batches for s in subjects_at(Place("", "sm90")).values()}
        if together:
            return {n: [sys.executable, "-m", *words, "--only", n] for n in (*names, "layouts")}
        words += ["--seconds", str(0.75 * seconds)]
        without = test_layouts_kernels.HOPPERS_OWN if place != "sm_90a" else ()
        tests = [(n, t) for n, m in {**names, "layouts": test_layouts_kernels}.items() for t in vars(m) if t.startswith("test_")]
        return {f"{n}: {t}": [sys.executable, "-m", *words, "--only", n, "--properties", t] for n, t in tests if t not in without}
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "no:warnings", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", "-rf"]
    batches = [n for n in vars(test_batches) if n.startswith("test_")]
    here = {name: s for name, s in SUBJECTS.items() if s.place.name == place}
    made: dict[str, list[str]] = {}
    for name, s in here.items():  # processes that share a GPU wait for each other: light operations share one
        own = s.name if place == "reference" or "attention" in s.name or "flash" in s.name or "PMA" in s.name else "fused operations"
        made.setdefault(own, list(plain)).extend(f"tests/properties/test_batches.py::{test}[{name}]" for test in batches)
    layouts = "tests/properties/test_layouts_kernels.py" if place == "sm90" else "tests/properties/test_layouts.py"
    return {**made, "layouts": [*plain, layouts]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("place", choices=["reference", "sm90", *EMULATED])
    parser.add_argument("out", type=Path)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600, help="what has not ended by then is stopped and counts as failed")
    parser.add_argument("--together", action="store_true", help="emulated: all properties of an operation in one process")
    parser.add_argument("--only", default="", help="operations (emulated: and properties) whose name contains one of these, separated by ;")
    chosen = parser.parse_args()
    from benchmarks.harness import environment as recorded
    from tests.properties.tally import total

    begin, failed = time.monotonic(), []
    running: dict[str, tuple[subprocess.Popen, Any, float]] = {}
    ended: dict[str, float] = {}
    only = chosen.only.split(";")
    everything = commands(chosen.place, chosen.examples, chosen.seconds, chosen.together)
    waiting = {n: c for n, c in everything.items() if any(x in n for x in only)}
    waiting = dict(
        sorted(waiting.items(), key=lambda item: ("flash" not in item[0], "PMA" not in item[0], "attention" not in item[0]))
    )  # the longest first
    device = "cuda" if chosen.place == "sm90" else "cpu"
    logs = chosen.out.parent / (chosen.out.stem + "-logs")
    logs.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"place": chosen.place, "examples": chosen.examples, "failures": failed, "seconds": ended}
    with tempfile.TemporaryDirectory() as folder:
        examples = 2 if chosen.place in EMULATED else chosen.examples
        env = environment(LP_FA4_TALLY=folder, LP_FA4_EXAMPLES=str(examples), HYPOTHESIS_STORAGE_DIRECTORY=folder)
        env.update(PYTHONUNBUFFERED="1")
        while waiting or running:
            late = time.monotonic() - begin > chosen.seconds
            while waiting and len(running) < chosen.jobs and not late:
                name = next(iter(waiting))
                command = waiting.pop(name)
                log = (logs / (re.sub(r"\W+", "_", name) + ".txt")).open("w+")
                running[name] = (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT), log, time.monotonic())
            for name, (process, log, since) in list(running.items()):
                if process.poll() is None and late:
                    process.terminate()
                    failed.append(f"{name}: stopped after {chosen.seconds} s")
                elif process.poll() is None:
                    continue
                del running[name]
                ended[name] = round(time.monotonic() - since, 1)
                process.wait()
                log.seek(0)
                text = log.read()
                tests = re.findall(r"^FAILED (\S+?::\S+(?: [^-\]]*\])?)", text, re.M)
                tests += [json.loads(line)["test"] for line in text.splitlines() if line.startswith("{") and '"error"' in line]
                failed.extend(tests or ([] if process.returncode == 0 or late else [f"{name}: exit {process.returncode}"]))
                print(f"{name}: exit {process.returncode}, {ended[name]} s, failed {tests}", flush=True)
                inputs = total(Path(folder))
                record["inputs"] = {p: sum(n for s in kinds.values() for n in s.values()) for p, kinds in inputs.items()}
                record["by_property"] = inputs
                chosen.out.write_text(json.dumps({**record, "environment": recorded(device)}, indent=1) + "\n", encoding="utf-8")
            if late and waiting:
                failed.extend(f"{name}: not begun" for name in waiting)
                waiting = {}
            time.sleep(0.1)
    chosen.out.write_text(json.dumps({**record, "environment": recorded(device)}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"failures": failed, "inputs": record.get("inputs")}))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
