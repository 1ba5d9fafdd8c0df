"""The matrices on many cores: ``python -m tests.sm100.campaign forward backward pairs [--jobs 20] [--queries 256 512] --out FOLDER``.

A mode is a process: it compiles its kernels and works out the references once, then forks a child for each run, the longest first. A run is
a row (a mode at a number of queries) on one of its lists of keys under a schedule. All modes share ``--jobs`` places. As a run ends, a JSON
line goes to ``FOLDER/runs.jsonl`` (processor time, or what it raised), so that a campaign that is stopped has lost nothing but what was
running; started again, it leaves out what is there. A line names the programs that ran (``programs``: a digest of PTX, no line numbers).

``--merge FILE FOLDER ...``: the rows of one matrix all of whose runs are right, as the document FILE. A run counts only if its programs are
those that the sources make now: they are compiled again for that.
"""

import argparse
import fcntl
import gc
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import commit
from tests.processes import environment
from tests.sm100 import backward_matrix, backward_pair_matrix, matrix

MATRICES: dict[str, Any] = {"forward": matrix, "backward": backward_matrix, "pairs": backward_pair_matrix}
ARCH = "sm_100a"


def program_digest(launches: list[Any]) -> str:
    """Of the PTX of ``launches``, each program once, without what follows from the place of a source line (``.loc``, labels of it, the
    debug sections at the end)."""
    texts = set()
    for launch in launches:
        code = re.split(r"^\s*\.(?:file|section)\b", launch.ptx, maxsplit=1, flags=re.M)[0]
        assert ".entry" in code and "ret;" in code, "the program's text was not found"
        texts.add(re.sub(r"^\s*(?:\.loc\b.*|\$L__tmp\d+:)\n", "", code, flags=re.M))
    return hashlib.sha256("\0".join(sorted(texts)).encode()).hexdigest()[:16]


class Mode:
    """The rows of one mode in this process: cases, compiled kernels and their digests, by number of queries and list of keys."""

    def __init__(self, which: str, name: str, rows: list[tuple[int, str]]) -> None:
        from tests.emulator import api, capture

        capture.install(ARCH)
        self.which, self.name = which, name
        self.cases = {row: MATRICES[which].case_of(ARCH, name, *row) for row in rows}
        self.programs = {}
        for row, planned in self.cases.items():
            _, recorded = api.record(planned.call, ARCH)
            self.programs[row] = program_digest([launch for launch, _ in recorded])
            for launch, _ in recorded:
                api.compiled(launch.ptx, launch.name)

    def run(self, queries: int, keys: str, schedule: str) -> dict:
        """One run; what it raised is in ``error``. ``digest``: of dQ where it has to repeat itself."""
        from tests.emulator import api
        from tests.emulator.waivers import NONE

        line: dict[str, Any] = {"which": self.which, "name": self.name, "queries": queries, "keys": keys, "schedule": schedule}
        line["programs"] = self.programs[queries, keys]
        started, planned = time.process_time(), self.cases[queries, keys]
        kind, seed = schedule.split(":")
        try:
            value, _ = api.call_under(planned.call, ARCH, api.Schedule(kind, int(seed)), check=True, waivers=NONE)
            planned.verify(value)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[-2500:]
        else:
            if getattr(planned.verify, "repeatable", False):
                line["digest"] = hashlib.sha256(value.dq.numpy().tobytes()).hexdigest()[:16]
        line["seconds"] = round(time.process_time() - started, 1)
        return line


class Places:
    """``--jobs`` places shared by processes: bytes in a pipe."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self.ends = ends

    @classmethod
    def of(cls, jobs: int) -> "Places":
        read, write = os.pipe()
        os.set_blocking(read, False)
        fcntl.fcntl(write, 1031, max(4096, jobs))  # F_SETPIPE_SZ
        os.write(write, b"." * jobs)
        return cls((read, write))

    def take(self, seconds: float) -> bool:
        """True once a place is ours; False if none was free for that long."""
        if not select.select([self.ends[0]], [], [], seconds)[0]:
            return False
        try:
            return bool(os.read(self.ends[0], 1))
        except BlockingIOError:
            return False

    def leave(self) -> None:
        os.write(self.ends[1], b".")


def _append(file: Path, line: dict) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def run_mode(which: str, name: str, todo: list[tuple[int, str, str]], places: Places, file: Path, source: str) -> None:
    """The runs ``todo`` of one mode, each in a child, as places are free."""
    while not places.take(1.0):
        pass
    waiting = list(todo)
    running: set[int] = set()

    def run(queries: int, keys: str, schedule: str) -> None:
        line = {**mode.run(queries, keys, schedule), "commit": source}
        _append(file, line)
        print(which, name, queries, keys, schedule, f"{line['seconds']} s, {line.get('error', 'right')[-300:]}", flush=True)

    try:
        mode = Mode(which, name, sorted({(queries, keys) for queries, keys, _ in todo}))
        run(*waiting.pop())  # the shortest, here: the emulator makes its code as a program runs, and children have it then
    finally:
        places.leave()
    gc.freeze()  # children share these objects: their memory is not written to by a collection
    while waiting or running:
        if waiting and places.take(0.1):
            child = os.fork()
            if not child:
                run(*waiting[0])
                os._exit(0)
            waiting.pop(0)
            running.add(child)
        ended, _ = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        if ended:
            running.discard(ended)
            places.leave()
        elif not waiting:
            time.sleep(0.1)
    gc.unfreeze()


def campaign(tasks: list[dict], jobs: int, folder: Path, source: str) -> int:
    """Run ``tasks`` (runs), ``jobs`` at a time; returns how many of them are not right."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "runs.jsonl"
    done = {_key(line) for line in _lines([folder]) if "error" not in line}
    modes: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    for task in sorted(tasks, key=lambda t: -t["queries"]):
        if _key(task) not in done:
            modes.setdefault((task["which"], task["name"]), []).append((task["queries"], task["keys"], task["schedule"]))
    places = Places.of(jobs)
    running: list[subprocess.Popen] = []

    def stop(*_: Any) -> None:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    threads = environment(OPENBLAS_NUM_THREADS="1")
    waiting = list(modes.items())
    while waiting or running:
        while waiting and len(running) < jobs:
            (which, name), todo = waiting.pop(0)
            order = {"which": which, "name": name, "todo": todo, "ends": places.ends, "file": str(file), "commit": source}
            command = [sys.executable, "-m", "tests.sm100.campaign", "--mode", json.dumps(order)]
            running.append(subprocess.Popen(command, env=threads, pass_fds=places.ends, start_new_session=True))
        time.sleep(0.2)
        running = [process for process in running if process.poll() is None]
    right = {_key(line) for line in _lines([folder]) if "error" not in line}
    return sum(_key(task) not in right for task in tasks)


def _key(task: dict) -> tuple:
    return tuple(task[k] for k in ("which", "name", "queries", "keys", "schedule"))


def _lines(folders: list[Path]) -> list[dict]:
    files = [folder / "runs.jsonl" for folder in folders]
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def merge(folders: list[Path], which: str, schedules: int) -> dict:
    """Rows of a matrix that are whole and right, and what failed. A repeatable row whose dQ differs between runs has failed."""
    from tests.emulator import api

    module = MATRICES[which]
    wanted = [(keys, str(s)) for keys in module.KEYS for s in api.schedules(schedules)]
    lines = [line for line in _lines(folders) if line["which"] == which and (line["keys"], line["schedule"]) in wanted]
    passed: list[dict] = []
    failed, other = [], 0
    for name in [n for n in module.MODES if any(line["name"] == n for line in lines)]:
        of_mode = [line for line in lines if line["name"] == name]
        rows = sorted({(line["queries"], line["keys"]) for line in of_mode})
        order = json.dumps({"which": which, "name": name, "rows": rows})
        command = [sys.executable, "-m", "tests.sm100.campaign", "--programs", order]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        programs = {(queries, keys): digest for queries, keys, digest in json.loads(made.splitlines()[-1])}
        for queries in sorted({queries for queries, _ in rows}):
            mine = [x for x in of_mode if x["queries"] == queries and x["programs"] == programs[queries, x["keys"]]]
            other += sum(line["queries"] == queries for line in of_mode) - len(mine)
            right = {(x["keys"], x["schedule"]): x for x in mine if "error" not in x}
            wrong = [f"{name} {queries} {x['keys']} {x['schedule']}: {x['error'][-300:]}" for x in mine if "error" in x]
            for keys in module.KEYS:
                if len({line.get("digest") for (k, _), line in right.items() if k == keys}) > 1:
                    wrong.append(f"{name} {queries} {keys}: dq differs from run to run")
            failed += wrong
            if len(right) == len(wanted) and not wrong:
                seconds = round(sum(line["seconds"] for line in right.values()))
                row = {"mode": name, "queries": queries, "runs": len(right), "seconds": seconds}
                used = {part: sorted({line[part] for line in right.values()}) for part in ("programs", "commit")}
                passed.append({**row, **used})
    return {
        "command": f"python -m tests.sm100.campaign {which} --schedules {schedules}",
        "keys": module.KEYS,
        "rows_of_the_list": len(module.MODES) * len(module.QUERIES),
        "schedules": schedules,
        "runs_of_other_programs": other,
        "failed": failed,
        "passed": passed,
    }


def main() -> None:
    """Run what is asked for, or put results together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrices", nargs="*", metavar="forward|backward|pairs", help="which lists (default: all)")
    parser.add_argument("--modes", nargs="+", help="some rows only")
    parser.add_argument("--queries", type=int, nargs="+")
    parser.add_argument("--keys", nargs="+", help="some lists only")
    parser.add_argument("--schedules", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("campaign"))
    parser.add_argument("--mode", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--programs", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--merge", nargs="+", type=Path, metavar=("FILE", "FOLDER"))
    arguments = parser.parse_args()
    which = arguments.matrices or list(MATRICES)
    if arguments.mode:
        order = arguments.mode
        todo = [(queries, keys, schedule) for queries, keys, schedule in order["todo"]]
        run_mode(order["which"], order["name"], todo, Places(tuple(order["ends"])), Path(order["file"]), order["commit"])
    elif arguments.programs:
        order = arguments.programs
        mode = Mode(order["which"], order["name"], [(queries, keys) for queries, keys in order["rows"]])
        print(json.dumps([(*row, digest) for row, digest in mode.programs.items()]))
    elif arguments.merge:
        file, *folders = arguments.merge
        document = merge(folders, which[0], arguments.schedules)
        rows = document.pop("passed")
        text = json.dumps(document, indent=1)[:-2] + ',\n "passed": [\n' + ",\n".join(f"  {json.dumps(r)}" for r in rows) + "\n ]\n}\n"
        file.write_text(text)
        print(f"{len(rows)} of {document['rows_of_the_list']} rows, {len(document['failed'])} failures")
    else:
        from tests.emulator import api

        schedules = [str(s) for s in api.schedules(arguments.schedules)]
        tasks = [
            {"which": kind, "name": name, "queries": queries, "keys": keys, "schedule": schedule}
            for kind in which
            for keys in arguments.keys or MATRICES[kind].KEYS
            for queries in arguments.queries or MATRICES[kind].QUERIES
            for name in arguments.modes or MATRICES[kind].MODES
            for schedule in schedules
        ]
        wrong = campaign(tasks, arguments.jobs, arguments.out, (commit()["commit"] or "")[:12])
        print(f"{len(tasks) - wrong} of {len(tasks)} runs are right")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
