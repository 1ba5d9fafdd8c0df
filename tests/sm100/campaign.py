"""The matrices on many cores: ``python -m tests.sm100.campaign forward backward pairs [--jobs 20] [--queries 256 512] --out FOLDER``.

A row (a mode at a number of queries) is cut into parts of a few schedules. A part is a process of its own; the largest start first. As one
ends, a JSON line goes to ``FOLDER/parts.jsonl`` (what it raised, where it failed), so that a campaign that is stopped has lost nothing but
what was running; started again, it leaves out what is there. ``--merge FILE FOLDER ... --commit C``: the rows of one matrix all of whose
schedules are right, as the document FILE.
"""

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.sm100 import backward_matrix, backward_pair_matrix, matrix

MATRICES: dict[str, Any] = {"forward": matrix, "backward": backward_matrix, "pairs": backward_pair_matrix}
PARTS = {512: 4, 256: 2}
"""Parts of a row by its queries; 1 of others."""


def run_part(which: str, name: str, queries: int, part: int, parts: int, schedules: int) -> dict:
    """Every ``parts``-th schedule of a row; raises where one is wrong or has a race. ``digest``: of dQ where it has to repeat itself."""
    from tests.emulator import api, capture
    from tests.emulator.waivers import NONE

    started = time.time()
    arch, module = "sm_100a", MATRICES[which]
    capture.install(arch)
    planned = module.case_of(arch, name, queries)
    chosen = api.schedules(schedules)[part::parts]
    digests = set()
    for schedule in chosen:
        try:
            value, _ = api.call_under(planned.call, arch, schedule, check=True, waivers=NONE)
            planned.verify(value)
        except Exception as error:
            error.add_note(f"{which} {name} queries={queries}, schedule {schedule}")
            raise
        if getattr(planned.verify, "repeatable", False):
            digests.add(hashlib.sha256(value.dq.numpy().tobytes()).hexdigest()[:16])
    return {"passed": [str(s) for s in chosen], "seconds": round(time.time() - started), "digest": sorted(digests)}


def campaign(tasks: list[dict], jobs: int, folder: Path) -> int:
    """Run ``tasks``, ``jobs`` at a time; returns how many failed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "parts.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {_key(line) for line in lines if "passed" in line}
    waiting = [task for task in tasks if _key(task) not in done]
    running: dict[subprocess.Popen, dict] = {}
    failed, started = 0, time.time()

    def stop(*_: Any) -> None:
        for process in running:
            process.kill()
        sys.exit(f"stopped: {len(waiting)} parts had not started, {len(running)} were running")

    signal.signal(signal.SIGTERM, stop)
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            command = [sys.executable, "-m", "tests.sm100.campaign", "--part", json.dumps(task)]
            running[subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)] = task
        time.sleep(0.2)
        for process, task in [(p, t) for p, t in running.items() if p.poll() is not None]:
            assert process.stdout is not None
            text = process.stdout.read()
            right = process.returncode == 0
            result = json.loads(text.splitlines()[-1]) if right else {"error": text[-3000:]}
            failed += not right
            del running[process]
            with file.open("a") as out:
                out.write(json.dumps({**task, **result}) + "\n")
            words = f"{result['seconds']} s" if right else f"FAILED: {text[-400:]}"
            print(f"{time.time() - started:.0f} s: {_key(task)} {words}", flush=True)
    return failed


def _key(task: dict) -> tuple:
    return tuple(task[k] for k in ("which", "name", "queries", "part", "parts", "schedules"))


def merge(folders: list[Path], which: str, commit: str, schedules: int) -> dict:
    """Rows of a matrix that are whole and right, and what failed. A repeatable row whose dQ differs between parts has failed."""
    lines = [json.loads(line) for folder in folders for line in (folder / "parts.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["which"] == which]
    rows: list[dict] = []
    failed = [f"{x['name']} queries={x['queries']} part {x['part']}/{x['parts']}: {x['error'][-300:]}" for x in lines if "error" in x]
    for name, queries in dict.fromkeys((x["name"], x["queries"]) for x in lines):
        mine = [x for x in lines if (x["name"], x["queries"]) == (name, queries) and "passed" in x]
        seen = {s for x in mine for s in x["passed"]}
        if len({d for x in mine for d in x["digest"]}) > 1:
            failed.append(f"{name} queries={queries}: dq differs from run to run")
        elif len(seen) == schedules:
            rows.append({"mode": name, "queries": queries, "schedules": schedules, "seconds": sum(x["seconds"] for x in mine)})
    module = MATRICES[which]
    order = list(module.MODES)
    rows.sort(key=lambda x: (order.index(x["mode"]), x["queries"]))
    return {
        "command": f"python -m tests.sm100.campaign {which} --schedules {schedules}",
        "commit": commit,
        "keys": module.KEYS,
        "rows_of_the_list": len(order) * len(module.QUERIES),
        "failed": failed,
        "passed": rows,
    }


def main() -> None:
    """Run the parts asked for, or put their results together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrices", nargs="*", metavar="forward|backward|pairs", help="which lists (default: all)")
    parser.add_argument("--modes", nargs="+", help="some rows only")
    parser.add_argument("--queries", type=int, nargs="+")
    parser.add_argument("--schedules", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--parts", type=int, help="of a row; by default as many as its queries take")
    parser.add_argument("--out", type=Path, default=Path("campaign"))
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--merge", nargs="+", type=Path, metavar=("FILE", "FOLDER"))
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    which = arguments.matrices or list(MATRICES)
    if arguments.part:
        print(json.dumps(run_part(**arguments.part)))
    elif arguments.merge:
        file, *folders = arguments.merge
        document = merge(folders, which[0], arguments.commit, arguments.schedules)
        rows = document.pop("passed")
        text = json.dumps(document, indent=1)[:-2] + ',\n "passed": [\n' + ",\n".join(f"  {json.dumps(r)}" for r in rows) + "\n ]\n}\n"
        file.write_text(text)
        print(f"{len(rows)} of {document['rows_of_the_list']} rows, {len(document['failed'])} failures")
    else:
        tasks = []
        for kind in which:
            module = MATRICES[kind]
            for queries in arguments.queries or module.QUERIES:
                parts = arguments.parts or PARTS.get(queries, 1)
                for name in arguments.modes or module.MODES:
                    task = {"which": kind, "name": name, "queries": queries, "parts": parts, "schedules": arguments.schedules}
                    tasks += [{**task, "part": part} for part in range(parts)]
        tasks.sort(key=lambda task: -task["queries"])
        sys.exit(1 if campaign(tasks, arguments.jobs, arguments.out) else 0)


if __name__ == "__main__":
    main()
