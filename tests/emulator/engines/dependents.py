"""``griddepcontrol``: see ``tests/emulator/dependents.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dependents import learn, waited
from ..ptx import Instr
from ..registry import op


@op("griddepcontrol.wait", allow="wait")
def wait(g: Any, I: Instr, m: np.ndarray) -> None:
    learn(g)
    g.machine.waited = True


@op("griddepcontrol.launch_dependents", allow="launch_dependents")
def launch_dependents(g: Any, I: Instr, m: np.ndarray) -> None:
    if g.past is not None and not waited(g):
        g.machine.early = True
