"""A process per architecture: the DSL fixes its target at import, and pytest's own process must stay as it is.

``Worker(arch).run("tests.emulator.kernels:fa4_forward", {...})`` builds a ``Case`` in a child process, runs it under the
schedules asked for with the race checker, and returns a summary; a failure comes back as ``WorkerError`` with the child's
traceback. One child serves many cases (importing the DSL takes seconds).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from tests.processes import environment

_ROOT = Path(__file__).resolve().parents[2]
_MARK = "@@emulator "


class WorkerError(Exception):
    """The child's exception, with its type's name first."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}\n{text}")
        self.kind = kind


class Worker:
    """A child process that emulates one architecture."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        env = environment(OPENBLAS_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.emulator.worker", arch],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=_ROOT,
        )  # fmt: skip

    def run(
        self, builder: str, arguments: dict[str, Any], *, schedules: int = 2, check: bool = True, waivers: str = "NONE", seed: int = 0
    ) -> dict[str, Any]:
        """Run a case; returns ``{"case", "schedules", "steps", "seconds", "tally"}``.

        Args:
            builder: ``module:function`` that returns a ``kernels.Case``; called with ``arch`` and ``arguments``.
            waivers: name in ``waivers.py``.
        """
        return self._ask(dict(builder=builder, arguments=arguments, schedules=schedules, check=check, waivers=waivers, seed=seed))

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Call ``module:function(arch, **arguments)`` in the child; returns its (JSON) value."""
        return self._ask(dict(function=function, arguments=arguments))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                if isinstance(answer.get("error"), list):
                    raise WorkerError(*answer["error"])
                return answer
        raise WorkerError("WorkerDied", f"exit status {self.process.wait()}")

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=60)


def _serve(arch: str, out: TextIO) -> None:
    import time

    from . import api, capture
    from . import waivers as named

    capture.install(arch)
    prepared: set[str] = set()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "function" in request:
                module, function = request["function"].split(":")
                value = getattr(importlib.import_module(module), function)(arch, **request["arguments"])
                print(_MARK + json.dumps(value), file=out, flush=True)
                continue
            module, function = request["builder"].split(":")
            case = getattr(importlib.import_module(module), function)(arch, **request["arguments"])
            if case.prepare is not None and case.name not in prepared:
                api.record(case.prepare, arch)
                prepared.add(case.name)
            started = time.time()
            results = api.emulate(
                case.call, arch=arch, schedules=request["schedules"], verify=case.verify, check=request["check"],
                waivers=getattr(named, request["waivers"]), seed=request["seed"],
            )  # fmt: skip
            tally: dict[str, int] = {}
            for machine in results[0].machines:
                for name, n in machine.tally.items():
                    tally[name] = tally.get(name, 0) + n
            answer: dict[str, Any] = {
                "case": case.name, "schedules": [str(r.schedule) for r in results], "steps": results[0].steps,
                "seconds": time.time() - started, "tally": tally,
            }  # fmt: skip
        except Exception as error:
            answer = {"error": [type(error).__name__, traceback.format_exc()]}
        print(_MARK + json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.stdout)
    from .capture import leave

    leave()
