"""Dependent launches: kernels that may begin before those before them on the stream have ended (programmatic dependent launch).

Launches run one after another here, and nothing about that changes. What a checked run adds: until a warp of a dependent launch has
executed ``griddepcontrol.wait``, what it reads of global memory must be what was there before any launch began that may still run, and it
may write nothing. Which launches those are: the one before, whose CTAs have but to ask (``griddepcontrol.launch_dependents``) or to end;
and if that one is dependent too and asked before it waited, whatever it ran beside itself. "CUDA C++ Programming Guide", programmatic
dependent launch and synchronization; PTX ISA, "griddepcontrol".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RaceError
from .memory import host_gather, host_read
from .ptx import Instr

if TYPE_CHECKING:
    from .capture import Launch


def reaches_global(I: Instr) -> bool:
    """Whether an instruction other than a load or store may read or write global memory."""
    kind = I.parts[0]
    if kind in ("atom", "red"):
        return not any(p.startswith("shared") for p in I.parts)
    return I.op.startswith(("cp.async", "cp.reduce", "st.async")) and not any(x in I.op for x in ("group", "prefetch", "mbarrier.arrive"))


class Past:
    """What launches that may still run could read and write, as it was when each of them began."""

    def __init__(self, launch: Launch, extents: list[tuple[int, int]]) -> None:
        self.parts = [(launch, lo, hi, host_read(lo, hi - lo).copy()) for lo, hi in extents]

    def read(self, g: Any, I: Instr, addresses: np.ndarray, n: int) -> None:
        """``n`` bytes at each address are read before the wait."""
        now = host_gather(addresses, n)
        for launch, lo, hi, then in self.parts:
            inside = (addresses >= lo) & (addresses + n <= hi)
            if inside.any() and not np.array_equal(then[(addresses[inside] - lo)[:, None] + np.arange(n)], now[inside]):
                raise RaceError(
                    f"dependent launch: {g.where(I)} reads before griddepcontrol.wait what was written since {launch.name[:80]} began, "
                    "which may still run"
                )

    def write(self, g: Any, I: Instr) -> None:
        """Something is written, or done asynchronously, before the wait."""
        name = self.parts[-1][0].name[:80] if self.parts else "a launch"
        raise RaceError(f"dependent launch: {g.where(I)} before griddepcontrol.wait, beside {name}, which may still run")


class Dependents:
    """The launches of a stream in turn."""

    def __init__(self) -> None:
        self.running: Past | None = None

    def begin(self, launch: Launch, extents: list[tuple[int, int]]) -> Past | None:
        """What ``launch`` has to agree with; ``None`` if it begins when all before it is over. ``extents``: what it may touch, at least."""
        self.now = Past(launch, extents)
        return self.running if launch.dependent else None

    def end(self, past: Past | None, late: bool) -> None:
        """The launch is over; ``late``: all of its CTAs waited before they let others begin."""
        if past is not None and not late:
            self.now.parts = [*past.parts, *self.now.parts]
        self.running = self.now
