"""mbarrier objects: arrivals, transaction counts, phases, waits.

The object is kept beside shared memory, by its shared-window address. A phase completes when no arrival is pending and
the transaction count is zero (PTX ISA, "mbarrier: phase completion").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BarrierError
from ..ptx import Instr, Mem, Reg
from ..registry import Wait, op

MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """One mbarrier. ``clock`` gathers the clocks of this phase's arrivals, ``released`` is the last phase's; phases before
    ``observed`` were waited for by a warp of the barrier's CTA, each step of it by the instruction in ``observers`` (all of these
    are the race checker's)."""

    __slots__ = (
        "address", "agent", "clock", "expected", "observed", "observers", "pending", "phase", "released", "sequence", "transactions",
    )  # fmt: skip

    def __init__(self, address: int, expected: int) -> None:
        self.address, self.expected, self.pending = address, expected, expected
        self.transactions, self.phase = 0, 0
        self.clock: Any = None
        self.released: Any = None
        self.agent, self.sequence, self.observed = -1, 0, 0
        self.observers: list[tuple[int, int]] = []

    def describe(self) -> str:
        return f"phase {self.phase}, {self.pending}/{self.expected} arrivals pending, {self.transactions} bytes pending"

    def _complete(self) -> None:
        if self.pending < 0:
            raise BarrierError(f"mbarrier {self.address:#x}: more than {self.expected} arrivals in phase {self.phase}")
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self.released = self.clock
            # the clock is kept: a later phase's completion implies the earlier ones

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        self._complete()

    def expect(self, n: int) -> None:
        self.transactions += n
        if abs(self.transactions) > MAX_COUNT:
            raise BarrierError(f"mbarrier {self.address:#x}: transaction count {self.transactions} out of range")

    def complete(self, n: int) -> None:
        self.transactions -= n
        if abs(self.transactions) > MAX_COUNT:
            raise BarrierError(f"mbarrier {self.address:#x}: transaction count {self.transactions} out of range")
        self._complete()


def at(cluster: Any, address: int, what: Any = None) -> MBarrier:
    """The mbarrier at a shared-window address."""
    b = cluster.barriers.get(int(address))
    if b is None:
        raise BarrierError(f"mbarrier at {int(address):#x} is not initialised" + (f"; {what()}" if what else ""))
    return b


class PhaseWait(Wait):
    """A sleeping ``try_wait``: until the phase of the given parity completes, or its time limit passes."""

    timeout = True

    def __init__(self, barrier: MBarrier, parity: int) -> None:
        self.barrier, self.parity = barrier, parity

    def ready(self) -> bool:
        return (self.barrier.phase & 1) != self.parity

    def describe(self) -> str:
        return f"mbarrier {self.barrier.address:#x} parity {self.parity} ({self.barrier.describe()})"


_SCOPES = "cta cluster shared shared::cta shared::cluster b64"


@op("mbarrier.init", allow=_SCOPES)
def init(g: Any, I: Instr, m: np.ndarray) -> None:
    for a, n in zip(g.addr(I.args[0])[m], g.ev(I.args[1])[m], strict=True):
        a, n = int(a), int(n)
        if not 1 <= n <= MAX_COUNT or a % 8:
            raise BarrierError(f"mbarrier.init of {a:#x} with count {n}: 8-byte alignment, 1..{MAX_COUNT}; {g.where(I)}")
        g.memory.check_shared_range(a, 8, lambda: g.where(I))
        old = g.cluster.barriers.get(a)
        b = g.cluster.barriers[a] = MBarrier(a, n)
        if g.clock is not None:
            g.cluster.checker.barrier_init(g, I, b, old)


@op("mbarrier.inval", allow=_SCOPES)
def inval(g: Any, I: Instr, m: np.ndarray) -> None:
    for a in g.addr(I.args[0])[m]:
        g.cluster.barriers.pop(int(a), None)
        if g.clock is not None:
            g.cluster.checker.barrier_inval(int(a))


@op("mbarrier.arrive", allow=f"{_SCOPES} release relaxed expect_tx noComplete", writes=True)
def arrive(g: Any, I: Instr, m: np.ndarray) -> None:
    if "noComplete" in I.parts:
        raise I.unsupported("mbarrier.arrive.noComplete")
    args = I.args if isinstance(I.args[0], Mem) else I.args[1:]
    expect = "expect_tx" in I.parts
    counts = g.ev(args[1])[m] if len(args) > 1 else None
    addresses = g.addr(args[0])[m]
    for i, a in enumerate(addresses):
        b = at(g.cluster, a, lambda: g.where(I))
        if g.clock is not None:
            g.cluster.checker.barrier_arrive(g, I, b, relaxed="relaxed" in I.parts)
        try:
            if expect:
                b.expect(int(counts[i]))
                b.arrive()
            else:
                b.arrive(int(counts[i]) if counts is not None else 1)
        except BarrierError as error:
            raise BarrierError(f"{error}; {g.where(I)}") from None
    if isinstance(I.args[0], Reg):  # the state token: phase parity is all that try_wait with a token needs
        g.D[I.args[0].idx][m] = [at(g.cluster, a).phase for a in addresses]
    g.machine.events += 1


@op("mbarrier.arrive_drop", allow="")
def arrive_drop(g: Any, I: Instr, m: np.ndarray) -> None:
    raise I.unsupported("mbarrier.arrive_drop")


@op("mbarrier.expect_tx", allow=f"{_SCOPES} relaxed")
def expect_tx(g: Any, I: Instr, m: np.ndarray) -> None:
    for a, n in zip(g.addr(I.args[0])[m], g.ev(I.args[1])[m], strict=True):
        at(g.cluster, a, lambda: g.where(I)).expect(int(n))


@op("mbarrier.complete_tx", allow=f"{_SCOPES} relaxed")
def complete_tx(g: Any, I: Instr, m: np.ndarray) -> None:
    for a, n in zip(g.addr(I.args[0])[m], g.ev(I.args[1])[m], strict=True):
        at(g.cluster, a, lambda: g.where(I)).complete(int(n))
    g.machine.events += 1


@op("mbarrier.try_wait", "mbarrier.test_wait", allow=f"{_SCOPES} parity acquire relaxed", writes=True)
def try_wait(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    if "parity" not in I.parts:
        raise I.unsupported("mbarrier wait on a state token")
    A = I.args
    addresses, parities = g.addr(A[1]), g.ev(A[2]) & 1
    lanes = np.flatnonzero(m)
    pairs = {(int(addresses[n]), int(parities[n])) for n in lanes}
    waits = {pair: PhaseWait(at(g.cluster, pair[0], lambda: g.where(I)), pair[1]) for pair in pairs}
    ok = {pair: w.ready() for pair, w in waits.items()}
    counts = g.machine.wait_counts.setdefault(I.index, [0, 0])
    counts[0] += 1
    if not any(ok.values()) and "try_wait" in I.parts:
        counts[1] += 1
        timed_out = g.state.pop("timeout", False)
        limit = g.machine.scheduler.early_timeout
        if not timed_out and not (limit and g.machine.rng.random() < limit):
            return next(iter(waits.values()))
    result = g.P[A[0].idx]
    if len(ok) == 1:
        np.copyto(result, next(iter(ok.values())), where=m)
    else:
        for n in lanes:
            result[n] = ok[int(addresses[n]), int(parities[n])]
    if g.clock is not None and "relaxed" not in I.parts:
        for pair, passed in ok.items():
            if passed:
                g.cluster.checker.barrier_acquire(g, I, waits[pair].barrier)
    return None
