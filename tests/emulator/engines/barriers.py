"""Named barriers of a CTA (``bar``, ``barrier``) and the cluster barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BarrierError
from ..ptx import Instr
from ..registry import Wait, op


class Generation:
    """A counting barrier that starts over when full. ``clock`` is the race checker's, joined by arrivals; ``edge`` holds
    what those who wait for the current generation will learn when it is full."""

    __slots__ = ("arrived", "clock", "edge", "generation", "name")

    def __init__(self, name: str) -> None:
        self.name, self.arrived, self.generation = name, 0, 0
        self.clock: Any = None
        self.edge: list[Any] = [None]


class GenerationWait(Wait):
    def __init__(self, barrier: Generation, gang: Any) -> None:
        self.barrier, self.generation, self.gang = barrier, barrier.generation, gang
        self.edge = barrier.edge

    def ready(self) -> bool:
        if self.barrier.generation == self.generation:
            return False
        if self.gang.clock is not None:
            self.gang.clock.acquire(self.edge[0], self.barrier.name)
        return True

    def describe(self) -> str:
        return f"{self.barrier.name} ({self.barrier.arrived} arrived)"


def arrive(g: Any, b: Generation, n: int, total: int, release: bool) -> bool:
    """Count ``n`` arrivals; True when that completed the generation."""
    b.arrived += n
    if g.clock is not None:
        b.clock = g.clock.release(b.clock) if release else g.clock.release_relaxed(b.clock)
    if b.arrived > total:
        raise BarrierError(f"{b.name}: {b.arrived} arrivals, {total} expected")
    if b.arrived < total:
        return False
    b.arrived, b.generation = 0, b.generation + 1
    b.edge[0], b.clock, b.edge = b.clock, None, [None]
    g.machine.events += 1
    return True


def _named(g: Any, I: Instr, m: np.ndarray, wait: bool) -> list[tuple[np.ndarray, Wait | None]]:
    ids = g.ev(I.args[0])
    counts = g.ev(I.args[1]) if len(I.args) > 1 else None
    parts: list[tuple[np.ndarray, Wait | None]] = []
    for i in np.unique(ids[m]):
        lanes = m & (ids == i)
        if i > 15:
            raise BarrierError(f"named barrier {i}: 0 to 15 exist; {g.where(I)}")
        b = g.cta.named_barriers.setdefault(int(i), Generation(f"named barrier {i}"))
        # The count must be a multiple of the warp size; a warp counts as 32 however many lanes arrive.
        total = int(counts[lanes][0]) if counts is not None else (g.machine.threads + 31) // 32 * 32
        warps = np.unique(g.warp[lanes]).size
        waiting = GenerationWait(b, g)
        try:
            full = arrive(g, b, 32 * warps, total, release=True)
        except BarrierError as error:
            raise BarrierError(f"{error}; {g.where(I)}") from None
        if wait and full and g.clock is not None:
            g.clock.acquire(waiting.edge[0], b.name)
        parts.append((lanes, waiting if wait and not full else None))
    return parts


@op("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", aligned=True, allow="aligned")
def bar_sync(g: Any, I: Instr, m: np.ndarray) -> Any:
    return _named(g, I, m, True)


@op("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive", aligned=True, allow="aligned")
def bar_arrive(g: Any, I: Instr, m: np.ndarray) -> Any:
    return _named(g, I, m, False)


@op("barrier.cluster.arrive", aligned=True, allow="release relaxed aligned")
def cluster_arrive(g: Any, I: Instr, m: np.ndarray) -> None:
    c = g.cluster
    if c.cluster_barrier is None:
        c.cluster_barrier = Generation("cluster barrier")
    b = c.cluster_barrier
    g.state["cluster"] = GenerationWait(b, g)
    if g.clock is not None and "relaxed" not in I.parts:
        g.cluster.checker.released_widely(g.clock)
    # threads that have exited count as arrived
    arrive(
        g,
        b,
        int(m.sum()),
        max(c.live, b.arrived + int(m.sum())) if b.arrived + int(m.sum()) >= c.live else c.live,
        "relaxed" not in I.parts,
    )


@op("barrier.cluster.wait", aligned=True, allow="acquire aligned")
def cluster_wait(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    w = g.state.get("cluster")
    if w is None:
        raise BarrierError(f"barrier.cluster.wait without arrive; {g.where(I)}")
    return None if w.ready() else w
