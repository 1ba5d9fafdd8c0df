"""Dependent launches: kernels that may begin before those before them on the stream have ended (programmatic dependent launch).

Launches run one after another here, and nothing about that changes. What a checked run adds: until a warp of a dependent launch has
executed ``griddepcontrol.wait``, or read a flag that such a launch raised (``ld.acquire.gpu`` of what it wrote; that it is the right flag
is not checked), or learnt of another's by a barrier, it may touch nothing in global memory that was written by a launch which may still
run. (What such a launch only reads is not known: a write over it is let pass.) Which launches those are: the one before, whose CTAs have
but to ask (``griddepcontrol.launch_dependents``) or to end; and if that one is dependent too and asked before it waited, whatever it ran
beside itself. "CUDA C++ Programming Guide", programmatic dependent launch and synchronization; PTX ISA, "griddepcontrol"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import RaceError
from .memory import host_read
from .ptx import Instr

if TYPE_CHECKING:
    from .capture import Launch


def waited(g: Any) -> bool:
    """Whether a warp of this one's cluster has waited and this one knows; then it need not be asked again."""
    if g.clock is not None and any(g.clock.vc[0, agent] >= epoch for agent, epoch in g.cluster.waits):
        g.past = None
    return g.past is None


def learn(g: Any) -> None:
    """A warp knows that what it waited for is there, and others learn it by barriers."""
    g.past = None
    if g.clock is not None:
        g.cluster.waits.append((g.clock.agent, int(g.clock.vc[0, g.clock.agent])))


class Written:
    """What launches that may still run have written: bytes that are not what they were when these launches began."""

    def __init__(self, parts: list[tuple[Launch, int, int, np.ndarray]]) -> None:
        self.parts = [(launch, lo, hi, then != host_read(lo, hi - lo)) for launch, lo, hi, then in parts]

    def touch(self, g: Any, I: Instr, addresses: np.ndarray, n: int) -> None:
        """``n`` bytes at each address are read or written before the wait."""
        if waited(g):
            return
        for launch, lo, hi, changed in self.parts:
            inside = (addresses >= lo) & (addresses + n <= hi)
            if inside.any() and changed[(addresses[inside] - lo)[:, None] + np.arange(n)].any():
                if {"ld", "acquire", "gpu"} <= set(I.parts):
                    learn(g)
                    return
                raise RaceError(
                    f"dependent launch: {g.where(I)} touches before griddepcontrol.wait what was written since {launch.name[:80]} began, "
                    "which may still run"
                )


class Dependents:
    """The launches of a stream in turn."""

    def __init__(self) -> None:
        self.running: list[tuple[Launch, int, int, np.ndarray]] = []

    def begin(self, launch: Launch, extents: list[tuple[int, int]]) -> Written | None:
        """What ``launch`` may not touch; ``None`` if it begins when all before it is over. ``extents``: what it may touch, at least."""
        self.now = [(launch, lo, hi, host_read(lo, hi - lo).copy()) for lo, hi in extents]
        return Written(self.running) if launch.dependent else None

    def end(self, past: Written | None, late: bool) -> None:
        """The launch is over; ``late``: all of its CTAs waited before they let others begin."""
        self.running = self.now if past is None or late else [*self.running, *self.now]
