"""A short form of ``tests.soak``: the traced graph against eager, memory, and a checkpoint half-way, bit for bit."""

import subprocess
import sys

from tests.processes import ROOT, environment


def test_twenty_steps():
    """In a process of its own, whose memory is its own too."""
    command = [sys.executable, "-m", "tests.soak", *["--steps", "20", "--dim", "64", "--seeds", "5", "--samples", "4", "--capacity", "120"]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '"failures": []' in done.stdout
