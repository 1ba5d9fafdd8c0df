"""``cp.async``: 4, 8 or 16 bytes per thread from global to shared memory, landing at a time the scheduler picks.

Each thread has its own groups. A copy of a warp lands as one; copies are unordered among themselves. ``wait_group n``
waits for all but a thread's last n groups, ``wait_all`` for every earlier copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import check_sm90
from ..errors import MemoryFaultError
from ..memory import host_gather
from ..numerics import i64
from ..ptx import Imm, Instr, Mem, Reg
from ..registry import Wait, op
from .bulk import load_operation
from .mbarrier import at


class Copy:
    """One instruction's copies: lanes, the group of each, whether they have landed."""

    __slots__ = ("done", "group", "mask", "token")

    def __init__(self, mask: np.ndarray, group: np.ndarray) -> None:
        self.mask, self.group, self.done = mask, group, False
        self.token: Any = None


class State:
    """A gang's copies in flight (or not yet waited for) and each lane's number of committed groups."""

    def __init__(self, width: int) -> None:
        self.committed = np.zeros(width, i64)
        self.copies: list[Copy] = []


def _state(g: Any) -> State:
    found = g.state.get("cp.async")
    if found is None:
        found = g.state["cp.async"] = State(g.W)
    return found


_ALLOW = "ca cg shared shared::cta global L2::cache_hint L2::64B L2::128B L2::256B"


@op("cp.async.ca", "cp.async.cg", allow=_ALLOW)
def copy(g: Any, I: Instr, m: np.ndarray) -> None:
    A = I.args
    size = A[2].value
    if size not in ((16,) if "cg" in I.parts else (4, 8, 16)):
        raise I.unsupported(f"cp.async of {size} bytes")
    rest = A[3:-1] if "L2::cache_hint" in I.parts else A[3:]
    count = np.full(g.W, size, i64)
    if rest:
        if len(rest) > 1 or (isinstance(rest[0], Reg) and rest[0].cls == "p"):
            raise I.unsupported("cp.async with ignore-src")
        count = g.ev(rest[0]).astype(i64)
    lanes = np.flatnonzero(m)
    dst, src, count = g.addr(A[0])[lanes], g.addr(A[1], "D")[lanes], count[lanes]
    if (count > size).any():
        raise MemoryFaultError(f"cp.async reads {int(count.max())} bytes for {size}; {g.where(I)}")
    if ((dst | src) % size).any():
        raise MemoryFaultError(f"cp.async of {size} bytes to or from an address that is not aligned to it; {g.where(I)}")
    g.memory.check_shared(dst, size, lambda: g.where(I))
    for n in np.unique(count):
        if n:
            g.memory.globals.check(src[count == n], int(n), lambda: g.where(I))
            if g.past is not None:
                g.past.touch(g, I, src[count == n], int(n))
    state = _state(g)
    operation = Copy(m.copy(), state.committed.copy())
    if g.clock is not None:
        operation.token = check_sm90.copy_issued(g, I, dst, size)
    state.copies.append(operation)

    def complete() -> None:
        data = np.zeros((lanes.size, size), np.uint8)
        for n in np.unique(count):
            if n:
                data[count == n, :n] = host_gather(src[count == n], int(n))
        g.memory.arena[dst[:, None] + np.arange(size)] = data
        operation.done = True

    load_operation(g, complete)
    g.machine.add("cp_async_bytes", size * lanes.size)


@op("cp.async.commit_group", allow="")
def commit_group(g: Any, I: Instr, m: np.ndarray) -> None:
    _state(g).committed[m] += 1


class CopyWait(Wait):
    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies

    def ready(self) -> bool:
        return all(c.done for c in self.copies)

    def describe(self) -> str:
        return f"{sum(not c.done for c in self.copies)} cp.async copies"


@op("cp.async.wait_group", "cp.async.wait_all", allow="")
def wait_group(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    state = _state(g)
    limit = np.full(g.W, np.iinfo(i64).max) if I.parts[2] == "wait_all" else state.committed - I.args[0].value
    older = [c for c in state.copies if (c.mask & m & (c.group < limit)).any()]
    wait = CopyWait(older)
    counts = g.machine.wait_counts.setdefault(I.index, [0, 0])
    counts[0] += 1
    if not wait.ready():
        counts[1] += 1
        return wait
    if g.clock is not None:
        for c in older:
            check_sm90.copy_waited(g, I, c.token)
    state.copies = [c for c in state.copies if (c.mask & ~(m & (c.group < limit))).any()]
    return None


@op("cp.async.mbarrier.arrive", allow="noinc shared shared::cta b64")
def arrive(g: Any, I: Instr, m: np.ndarray) -> None:
    """The mbarrier gets an arrival of each thread once the thread's earlier copies have landed."""
    state = _state(g)
    for lane in np.flatnonzero(m):
        earlier = [c for c in state.copies if c.mask[lane]]
        barrier = at(g.cluster, int(g.addr(I.args[0])[lane]), lambda: g.where(I))
        if "noinc" not in I.parts:
            barrier.pending += 1

        def complete(earlier: list[Copy] = earlier, barrier: Any = barrier) -> None:
            if not all(c.done for c in earlier):
                load_operation(g, complete)
                return
            if g.clock is not None:
                check_sm90.copies_arrive(g, barrier, [c.token for c in earlier], g.cluster.checker.site(g, I))
            barrier.arrive()

        load_operation(g, complete)


_ = (Imm, Mem)
