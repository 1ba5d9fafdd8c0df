"""Child processes of tests: this repository first on their path, and whatever path this process was started with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(**more: str) -> dict[str, str]:
    """Variables of a child process; one BLAS thread, and ``more``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def answer(process: subprocess.Popen, seconds: float = 280) -> Any:
    """The last line that a child printed, as JSON; its exit status must be 0."""
    text, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0
    return json.loads(text.splitlines()[-1])


def lines(module: str, *arguments: str) -> list[dict]:
    """JSON objects that ``python -m module`` prints, one a line."""
    process = [sys.executable, "-m", module, *arguments]
    env = environment(OPENBLAS_NUM_THREADS="1")
    done = subprocess.run(process, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
