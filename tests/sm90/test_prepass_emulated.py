"""The pre-pass of the Hopper backward with FP16 scores, executed from its PTX (``tests.sm90.prepass``)."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

CASES = {
    "jagged queries, a sequence without keys": (dict(lengths=[100, 0, 31], queries=[70, 3, 65], shared=False, heads=1, kv_heads=1), 0),
    "shared queries, aligned, gradient of the LSE": (dict(lengths=[100, 31], queries=70, align=True, dlse=True), 0),
    "head 64, sums that give the centre back": (
        dict(lengths=[50], queries=70, dim=64, align=True, centred=False, block=[128, 64], shared=False),
        0,
    ),
    "rows of q past the bound": (dict(lengths=[100], queries=70, dim=64, bounded=False), 2),
    "scores past 2^6": (dict(lengths=[100], queries=70, dim=64, q_scale=40.0), 1),
}


def test_emulated():
    """Statistics and codes of every row; whether FP16 does."""
    problems = [json.dumps({"heads": 1, "kv_heads": 1, "bounded": True, **fields}) for fields, _ in CASES.values()]
    done = subprocess.run([sys.executable, "-m", "tests.sm90.prepass", *problems], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    needs = [max(json.loads(line)["need"]) for line in done.stdout.splitlines() if line.startswith("{")]
    assert dict(zip(CASES, needs, strict=True)) == {name: need for name, (_, need) in CASES.items()}
