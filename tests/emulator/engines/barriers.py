"""Named barriers of a CTA (``bar``, ``barrier``) and the cluster barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BarrierError
from ..ptx import Instr, Not
from ..registry import Wait, op


class Generation:
    """A counting barrier that starts over when full. ``clock`` is the race checker's, joined by arrivals; ``edge`` holds
    what those who wait for the current generation will learn when it is full, ``reduction`` what its threads reduce."""

    __slots__ = ("arrived", "clock", "edge", "generation", "name", "reduction")

    def __init__(self, name: str) -> None:
        self.name, self.arrived, self.generation = name, 0, 0
        self.clock: Any = None
        self.edge: list[Any] = [None]
        self.reduction: Reduction | None = None


class Reduction:
    """Predicates of one generation: how many are true, of how many threads."""

    def __init__(self, kind: str) -> None:
        self.kind, self.true, self.threads = kind, 0, 0

    def value(self) -> int:
        return {"and": int(self.true == self.threads), "or": int(self.true > 0), "popc": self.true}[self.kind]


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
    b.arrived, b.generation, b.reduction = 0, b.generation + 1, None
    b.edge[0], b.clock, b.edge = b.clock, None, [None]
    g.machine.events += 1
    return True


class ReductionWait(GenerationWait):
    """Waits, then writes what the generation's threads reduced."""

    def __init__(self, barrier: Generation, gang: Any, target: np.ndarray, lanes: np.ndarray) -> None:
        super().__init__(barrier, gang)
        self.reduction, self.target, self.lanes = barrier.reduction, target, lanes

    def ready(self) -> bool:
        if not super().ready():
            return False
        self.write()
        return True

    def write(self) -> None:
        assert self.reduction is not None
        self.target[self.lanes] = self.reduction.value()


def _named(g: Any, I: Instr, m: np.ndarray, wait: bool, kind: str = "") -> list[tuple[np.ndarray, Wait | None]]:
    operands = I.args[1:-1] if kind else I.args
    ids = g.ev(operands[0])
    counts = g.ev(operands[1]) if len(operands) > 1 else None
    parts: list[tuple[np.ndarray, Wait | None]] = []
    for i in np.unique(ids[m]):
        lanes = m & (ids == i)
        if i > 15:
            raise BarrierError(f"named barrier {i}: 0 to 15 exist; {g.where(I)}")
        b = g.cta.named_barriers.setdefault(int(i), Generation(f"named barrier {i}"))
        # The count must be a multiple of the warp size; a warp counts as 32 however many lanes arrive.
        total = int(counts[lanes][0]) if counts is not None else (g.machine.threads + 31) // 32 * 32
        warps = np.unique(g.warp[lanes]).size
        waiting = _reduced(g, I, b, kind, lanes) if kind else GenerationWait(b, g)
        if not kind and b.reduction is not None:
            raise BarrierError(f"named barrier {i}: some threads reduce at it and some do not; {g.where(I)}")
        try:
            full = arrive(g, b, 32 * warps, total, release=True)
        except BarrierError as error:
            raise BarrierError(f"{error}; {g.where(I)}") from None
        if wait and full:
            if g.clock is not None:
                g.clock.acquire(waiting.edge[0], b.name)
            if isinstance(waiting, ReductionWait):
                waiting.write()
        parts.append((lanes, waiting if wait and not full else None))
    return parts


def _reduced(g: Any, I: Instr, b: Generation, kind: str, lanes: np.ndarray) -> ReductionWait:
    """Join the reduction of the barrier's generation."""
    if b.reduction is None and not b.arrived:
        b.reduction = Reduction(kind)
    if b.reduction is None or b.reduction.kind != kind:
        raise BarrierError(f"{b.name}: some threads reduce at it and some do not, or otherwise; {g.where(I)}")
    source = I.args[-1]
    true = ~g.ev(source.operand, "P") if isinstance(source, Not) else g.ev(source, "P")
    b.reduction.true += int((true & lanes).sum())
    b.reduction.threads += int(lanes.sum())
    return ReductionWait(b, g, (g.U if kind == "popc" else g.P)[I.args[0].idx], lanes)


@op("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", aligned=True, allow="aligned")
def bar_sync(g: Any, I: Instr, m: np.ndarray) -> Any:
    return _named(g, I, m, True)


@op("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive", aligned=True, allow="aligned")
def bar_arrive(g: Any, I: Instr, m: np.ndarray) -> Any:
    return _named(g, I, m, False)


def _check_reduction(I: Instr) -> None:
    kinds = [x for x in I.parts if x in ("and", "or", "popc")]
    if len(kinds) != 1 or I.parts[-1] != ("u32" if kinds[0] == "popc" else "pred") or not 3 <= len(I.args) <= 4:
        raise I.unsupported("form of a reduction at a barrier")


@op(
    *("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red"),
    aligned=True,
    allow="aligned and or popc pred u32",
    check=_check_reduction,
    writes=True,
)
def bar_red(g: Any, I: Instr, m: np.ndarray) -> Any:
    """A barrier whose threads all get the conjunction, disjunction or number of their predicates."""
    return _named(g, I, m, True, next(x for x in ("and", "or", "popc") if x in I.parts))


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
