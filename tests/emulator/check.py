"""The race checker: happens-before by vector clocks, whatever order the run happened to take.

*Agents* are the warps and every asynchronous actor: per mbarrier the copies that complete on it, per thread its bulk
groups, per warp its ``tcgen05.ld``s and ``st``s and the tensor-core queue it feeds. Each has a clock component; an access
is stamped (agent, epoch). An access may follow an earlier conflicting one only if the later one's clock has reached that
stamp. Clocks grow through exactly these edges:

* mbarrier: arrivals (release) → completion of the phase → a successful wait (acquire); copies contribute their own
  writes with their transaction bytes, ``tcgen05.commit`` everything before it on its queue;
* ``bar``/``barrier`` and the cluster barrier; ``.relaxed`` arrivals carry only what an earlier fence published;
* bulk groups: ``wait_group`` (also ``.read``: shared memory may be reused); ``tcgen05.wait::ld`` / ``::st``;
* program order within a warp, and issue order from a warp to what it issues; the tensor-core queue is in order.

A CTA's exit counts as a write of its shared memory and barriers by an agent that knows what its warps knew when they left
(:meth:`Checker.finish`).

Clocks have two rows. Row 0 is happens-before. Row 1 is what of it a *proxy fence* has carried over to the async proxy:
``fence.proxy.async`` sets row 1 to row 0 for what warps of its own CTA did, and both travel along every edge, so the fence
may stand anywhere on the path, as far as that path has not left the CTA of the generic access. An asynchronous access to shared
memory must find earlier generic accesses in row 1.

Shadow state: last writer, and last read per reading agent, for each 4-byte word of shared memory (finer than the 16
bytes a bank group would need, so that neighbouring words of different warps do not alarm) and for each
(lane quadrant, column) of tensor memory. Reads of words that nothing has written are reported too.

Values read early: registers that a ``tcgen05.ld`` fills are tainted until ``wait::ld``. Packing moves pass the taint on;
any other use is reported.

Granularity is the warp: lanes of one warp are never reported against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .check_registers import Registers, layout
from .errors import EmulatorError
from .memory import CTA_SHIFT, TensorMemory
from .numerics import i32
from .ptx import Instr, Mem, Reg, registers_of

MAX_REPORTS = 200
_WORD_SHIFT = CTA_SHIFT - 2
_STEPS = np.arange(64)


@dataclass(frozen=True)
class Report:
    """One race (or use of what is not there): what, where, the two accesses, the edge that is missing."""

    kind: str
    place: str
    first: str
    second: str
    missing: str
    lines: tuple[int, Any]

    def __str__(self) -> str:
        before = f"\n  earlier: {self.first}" if self.first else ""
        return f"{self.kind} at {self.place}{before}\n  now:     {self.second}\n  missing: {self.missing}"


@dataclass(frozen=True)
class Waivers:
    """Known omissions of a kernel, by name; each needs a reason where it is used.

    Each names source lines (``file.py:line``, or ``file.py`` for sources whose lines still move) of the instruction said
    below, so that the same omission elsewhere in the kernel is still reported.

    Attributes:
        early_use: of ``tcgen05.ld``s whose registers may be used before ``wait::ld`` (the hardware's register scoreboard
            holds the use); the wait is still needed before anything else may touch those columns.
        completes_on_use: of ``tcgen05.ld``s for which the first use of their registers counts as the ``wait::ld``.
        in_flight_at_exit: of operations whose access or arrival may come after the CTA's last warp has gone.
        known_by_others: of arrivals from outside a CTA on its barriers that count as known at its exit once a later arrival of the
            same warp, or a later commit of the same queue, is known, though it is on another barrier.
        uninitialised: of reads of never-written shared or tensor memory.
    """

    early_use: frozenset[str] = frozenset()
    completes_on_use: frozenset[str] = frozenset()
    in_flight_at_exit: frozenset[str] = frozenset()
    known_by_others: frozenset[str] = frozenset()
    uninitialised: frozenset[str] = frozenset()


class Shadow:
    """Last writer and last reads of a flat array of cells.

    Writes are numbered; a cell holds the number of its last one (0: never written). Reads are kept per agent, as epoch and site in
    one number. ``last_read``: by agent and region of cells, so that a write looks only at agents that have read near it.
    """

    REGION = 9  # log2 of a region's cells

    def __init__(self, cells: int, capacity: int) -> None:
        self.cells = cells
        self.write = np.zeros(cells, i32)
        self.writes: Any = np.zeros((256, 4), i32)  # agent, epoch, asynchronous, site of each write by its number
        self.count, self.last = 1, (0, 0, False, 0)
        #: reading agent → ``epoch << 32 | site`` per cell
        self.reads: dict[int, np.ndarray] = {}
        self.last_read = np.zeros(((cells >> self.REGION) + 1, capacity), i32)
        #: latest epoch of any access, by agent
        self.last_touch: dict[int, int] = {}

    def number(self, agent: int, epoch: int, asynchronous: bool, site: int) -> int:
        """A write's number."""
        this = (agent, epoch, asynchronous, site)
        if this != self.last:
            if self.count == len(self.writes):
                self.writes = np.concatenate([self.writes, np.zeros_like(self.writes)])
            self.writes[self.count] = self.last = this
            self.count += 1
        return self.count - 1

    def reader(self, agent: int) -> np.ndarray:
        found = self.reads.get(agent)
        if found is None:
            found = self.reads[agent] = np.zeros(self.cells, np.int64)
        return found


_all, _any, _most = np.logical_and.reduce, np.logical_or.reduce, np.maximum.reduce


class Token:
    """An asynchronous operation: its agent and epoch, the clock it was issued with."""

    __slots__ = ("agent", "barrier", "epoch", "gang", "in_order", "instr", "site", "vc")

    def __init__(self, agent: int, epoch: int, vc: np.ndarray, gang: Any, instr: Instr, site: int, in_order: bool) -> None:
        self.agent, self.epoch, self.vc, self.gang, self.instr = agent, epoch, vc, gang, instr
        self.site, self.in_order = site, in_order
        self.barrier = 0


class Landing(NamedTuple):
    """An arrival from outside a CTA on one of its barriers: in which phase, by which agent and when (0: a copy)."""

    barrier: Any
    phase: int
    agent: int
    epoch: int
    site: int


class Clock:
    """Clock and taint of one warp."""

    def __init__(self, checker: Checker, gang: Any) -> None:
        self.checker, self.gang = checker, gang
        self.agent = checker.new_agent(("warp", gang.cta.rank, gang.first_warp))
        self.vc = np.zeros((2, checker.capacity), i32)
        self.vc[:, self.agent] = (1, 0)
        self.published: np.ndarray | None = None
        #: waits that brought something new, not yet followed by an action of this warp
        self.pending_marks: list[int] = []
        #: what muted waits did not bring (see ``Machine.muted``)
        self.withheld: np.ndarray | None = None
        plan = layout(checker.machine.compiled)
        #: times of register accesses, for ``wgmma.fence``
        self.registers = Registers(plan) if plan.has_products else None
        #: register → the load that fills it, and that load's epoch
        self.tainted: dict[tuple[Any, int], tuple[Instr, int]] = {}
        #: its registers, or None once they have changed
        self.taint_key: frozenset[Any] | None = None

    def acted(self) -> None:
        """The warp touches memory, issues or releases: what it waited for before did order something."""
        if self.pending_marks:
            self.checker.machine.ordered.update(self.pending_marks)
            self.pending_marks.clear()

    def release(self, into: np.ndarray | None) -> np.ndarray:
        """Publish this warp's past into an edge; later accesses belong to a new epoch."""
        self.acted()
        out = self.vc.copy() if into is None else np.maximum(into, self.vc)
        self.vc[0, self.agent] += 1
        return out

    def release_relaxed(self, into: np.ndarray | None) -> np.ndarray | None:
        if self.published is None:
            return into
        return self.published if into is None else np.maximum(into, self.published)

    def acquire(self, other: np.ndarray | None, by: str = "") -> None:
        """Learn what an edge brings; ``by`` names it, for what is found out about muted waits."""
        if other is not None:
            if self.withheld is not None:
                missing = self.withheld > self.vc
                n = int((missing & (other >= self.withheld))[0].sum())
                if n:
                    covers = self.checker.machine.covers
                    covers[by] = covers.get(by, 0) + n
            own = self.vc[0, self.agent]
            np.maximum(self.vc, other, out=self.vc)
            self.vc[0, self.agent] = own

    def fence(self, g: Any, I: Instr) -> None:
        parts = I.parts
        if "proxy" in parts:
            if any(p.split("::")[0].split(".")[0] == "async" for p in parts) and "global" not in parts:
                if I.index in self.checker.machine.muted:
                    return
                touched, own = self.checker.generic_touches, self.checker.fenced_by[self.gang.cta.rank]
                if (own & (self.vc[1] < touched) & (self.vc[0] > self.vc[1])).any():
                    self.checker.fence_marks.append((I.index, self.agent, int(self.vc[0, self.agent])))
                np.maximum(self.vc[1], self.vc[0], out=self.vc[1], where=own)
                self.vc[0, self.agent] += 1
            return
        self.published = self.vc.copy()
        if {"cluster", "gpu", "sys", "gl"} & set(parts):
            self.checker.released_widely(self)
        self.vc[0, self.agent] += 1

    def taint_step(self, g: Any, unit: Any, mask: np.ndarray) -> None:
        """Follow tainted registers through the unit that is about to run."""
        if self.taint_key is None:
            self.taint_key = frozenset(self.tainted)
        key = (unit.index, self.taint_key)
        cached = self.checker.taint_cache.get(key)
        if cached is None:
            uses, after = _follow(unit.instrs, set(self.tainted))
            moved = None if len(after) == len(self.taint_key) and all(r == o for r, o in after.items()) else frozenset(after)
            cached = self.checker.taint_cache[key] = uses, after, moved
        uses, after, moved = cached
        if moved is None and not uses:
            return
        checker = self.checker
        for I, reg, origin in uses:
            if origin not in self.tainted:
                continue
            source, epoch = self.tainted[origin]
            if source.loc in checker.waivers.completes_on_use:
                agent = checker.keys["ld", g.cta.rank, g.first_warp]
                self.vc[:, agent] = np.maximum(self.vc[:, agent], epoch)
            elif source.loc not in checker.waivers.early_use:
                wait = "wgmma.wait_group" if source.parts[0] == "wgmma" else "tcgen05.wait::ld"
                checker.report(
                    "value read early", f"register {reg}", source.where(), g.where(I),
                    f"{wait} between the load and this use", (source.index, I.loc),
                )  # fmt: skip
        if moved is not None:
            loads = self.tainted
            self.tainted, self.taint_key = {r: loads[o] for r, o in after.items()}, moved


#: straight-line opcodes whose first operand is not a destination
_NO_DESTINATION = {"st", "fence", "prefetch", "prefetchu", "nanosleep", "griddepcontrol", "pragma", "discard"}


def _follow(instrs: list[Instr], tainted: set[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Uses of tainted registers in a unit, and the taint after it as {register: register it came from}."""
    from .registry import OPS, find

    state = {r: r for r in tainted}
    uses: list[Any] = []
    for I in instrs:
        base = I.parts[0]
        if base in ("bra", "ret", "exit"):
            writes = False
        elif I.op.replace("::", ".").startswith("tcgen05.wait"):
            return uses, state
        elif base in ("mov", "cvt", "ld", "setp") or base in _NO_DESTINATION:
            writes = base not in _NO_DESTINATION
        else:
            try:
                writes = find(I).writes
            except EmulatorError:
                writes = True
        sources = I.args[1:] if writes else I.args
        read = [r for a in sources for r in registers_of(a)]
        if writes and isinstance(I.args[0], Mem):
            read += registers_of(I.args[0])
        if I.guard is not None:
            read.append(I.guard)
        touched = [(r.cls, r.idx) for r in read if (r.cls, r.idx) in state]
        written = [(r.cls, r.idx) for r in registers_of(I.args[0])] if writes and I.args else []
        if touched and base == "mov":  # packing or unpacking: not a use, the value is only renamed
            for w in written:
                state[w] = state[touched[0]]
            continue
        uses += [(I, r, state[(r.cls, r.idx)]) for r in read if (r.cls, r.idx) in state]
        if I.guard is None:
            for w in written:
                state.pop(w, None)
        if uses and touched:  # one report per origin is enough
            for t in touched:
                state.pop(t, None)
    _ = OPS
    return uses, state


class _Queue:
    """The tensor-core queue fed by one warp."""

    def __init__(self, agent: int, capacity: int) -> None:
        self.agent, self.epoch = agent, 1
        self.vc = np.zeros((2, capacity), i32)


class Checker:
    """Shadow state and clocks of one cluster."""

    def __init__(self, cluster: Any, waivers: Waivers | None = None) -> None:
        machine = cluster.machine
        if machine.width != 32:
            raise EmulatorError(f"the race checker needs gangs of one warp, got width {machine.width}")
        self.cluster, self.machine = cluster, machine
        self.waivers = waivers or Waivers()
        ranks = len(cluster.ctas)
        self.capacity = len(cluster.gangs) * 5 + 160 * ranks
        #: by CTA: the agents whose accesses a proxy fence of its warps carries over
        self.fenced_by = np.ones((ranks, self.capacity), np.bool_)
        self.names: list[Any] = []
        self.keys: dict[Any, int] = {}
        self.words_per_rank = cluster.memory.shared_size // 4 + 1
        self.shared = Shadow(self.words_per_rank * ranks, self.capacity)
        self.tmem = Shadow(4 * TensorMemory.COLUMNS * ranks, self.capacity)
        self.is_barrier = np.zeros(self.words_per_rank * ranks, np.bool_)
        #: first cell of any mbarrier and the one past the last
        self.barrier_span = (1 << 40, 0)
        self.barrier_origin: dict[int, tuple[int, int, int]] = {}
        self.sites: list[tuple[Any, Instr]] = []
        self.site_keys: dict[tuple[int, int], int] = {}
        self.sequence: dict[int, int] = {}
        self.queues: dict[int, _Queue] = {}
        #: proxy fences that carried something over, as (instruction, warp's agent, epoch): no asynchronous access is yet
        #: known to come after
        self.fence_marks: list[tuple[int, int, int]] = []
        self.taint_cache: dict[Any, Any] = machine.compiled.__dict__.setdefault("taint_cache", {})
        self.seen: set[Any] = set()
        #: latest epoch of each agent's generic accesses of shared memory (0: none, an asynchronous agent)
        self.generic_touches = np.zeros(self.capacity, i32)
        #: arrivals from outside a CTA on its barriers: the latest of each barrier, agent and site
        self.landings: dict[tuple[int, int, int], Landing] = {}
        #: epochs at which an agent released at cluster scope or wider
        self.wide_releases: dict[int, list[int]] = {}
        self.new_agent("nobody")
        for g in cluster.gangs:
            g.clock = Clock(self, g)

    # --- agents ------------------------------------------------------------------------------------------------------
    def new_agent(self, key: Any) -> int:
        found = self.keys.get(key)
        if found is None:
            found = self.keys[key] = len(self.names)
            self.names.append(key)
            if found >= self.capacity:
                raise EmulatorError(f"race checker: more than {self.capacity} agents")
            if key[0] in ("warp", "cp.async", "atomic"):
                self.fenced_by[:, found] = False
                self.fenced_by[key[1], found] = True
        return found

    def site(self, g: Any, I: Instr) -> int:
        key = (g.clock.agent, I.index)
        found = self.site_keys.get(key)
        if found is None:
            found = self.site_keys[key] = len(self.sites)
            self.sites.append((g, I))
        return found

    # --- reports -----------------------------------------------------------------------------------------------------
    def report(self, kind: str, place: str, first: str, second: str, missing: str, lines: tuple[int, Any]) -> None:
        key = (kind, lines)
        if key in self.seen or len(self.machine.reports) >= MAX_REPORTS:
            return
        self.seen.add(key)
        self.machine.reports.append(Report(kind, place, first, second, missing, lines))

    def _race(self, kind: str, space: str, cell: int, agent: int, site: int, g: Any, I: Instr, proxy: bool) -> None:
        first_g, first_I = self.sites[site]
        if space == "shared":
            rank, word = divmod(cell, self.words_per_rank)
            place = f"shared {rank << CTA_SHIFT | word << 2:#x}"
        else:
            rank, rest = divmod(cell, 4 * TensorMemory.COLUMNS)
            place = f"TMEM of CTA {rank}, lane quadrant {rest // TensorMemory.COLUMNS}, column {rest % TensorMemory.COLUMNS}"
        missing = "fence.proxy.async between the generic and the asynchronous access" if proxy else self._edge(agent)
        if proxy and first_g.cta is not g.cta:
            missing += f", in a warp of CTA {first_g.cta.ctaid} (before it releases to this CTA)"
        self.report(kind, place, first_g.where(first_I), g.where(I), missing, (first_I.index, I.index))

    def _edge(self, agent: int) -> str:
        """What would make an access of ``agent`` known."""
        name = self.names[agent]
        what = name[0]
        if what == "ld":
            return f"tcgen05.wait::ld of warp {name[2]} of CTA {name[1]}, then an edge to here"
        if what == "st":
            return f"tcgen05.wait::st of warp {name[2]} of CTA {name[1]}, then an edge to here"
        if what == "mbarrier":
            return f"a wait on mbarrier {name[1]:#x} (the copy completes there), then an edge to here"
        if what == "bulk":
            return f"cp.async.bulk.wait_group in warp {name[2]} of CTA {name[1]}, then an edge to here"
        if what == "tensor":
            return "tcgen05.commit after it, a wait on that mbarrier, and an edge to here"
        if what == "wgmma":
            return f"wgmma.wait_group in warpgroup {name[2]} of CTA {name[1]}, then an edge to here"
        if what == "cp.async":
            return f"cp.async.wait_group in warp {name[2]} of CTA {name[1]}, then an edge to here"
        if what == "atomic":
            return "a barrier between the atomic and the plain access"
        return f"a barrier from warp {name[2]} of CTA {name[1]} to here"

    # --- the check ---------------------------------------------------------------------------------------------------
    def _access(
        self, shadow: Shadow, space: str, idx: Any, vc: np.ndarray, agent: int, epoch: int, in_order: bool,
        asynchronous: bool, g: Any, I: Instr, site: int, write: bool, near: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Check an access of cells ``idx`` (an index array or a slice; all of them in the range ``near``) against the shadow, then
        record it."""
        if g.clock.pending_marks:
            g.clock.acted()
        crossing = asynchronous and space == "shared"
        if crossing:
            if self.fence_marks:
                after = {i for i, a, e in self.fence_marks if vc[0][a] > e}
                if after:
                    self.machine.ordered |= after
                    self.fence_marks = [x for x in self.fence_marks if x[0] not in after]
        elif space == "shared":
            self.generic_touches[agent] = epoch
        shadow.last_touch[agent] = epoch
        before, known = shadow.write[idx], vc[0]
        first = int(before[0])
        if _all(before == first):  # one write filled these cells
            writer, wrote, by_async, _ = shadow.writes[first].tolist()
            if (vc[1] if crossing and not by_async else known)[writer] < wrote and not (in_order and writer == agent):
                self._conflict(shadow, space, idx, 0, known, g, I, write)
            unwritten = 0 if wrote == 0 else -1
        else:
            writers, epochs, by_asyncs, _ = shadow.writes.take(before, 0).T
            visible = np.where(by_asyncs, known[writers], vc[1][writers]) if crossing else known[writers]
            bad = visible < epochs
            if in_order:
                bad &= writers != agent
            if _any(bad):
                self._conflict(shadow, space, idx, int(np.argmax(bad)), known, g, I, write)
            unwritten = -1 if write or _all(epochs) else int(np.argmin(epochs))
        if near is None:
            near = (idx.start, idx.stop) if isinstance(idx, slice) else (int(np.minimum.reduce(idx)), int(_most(idx)) + 1)
        region = slice(near[0] >> Shadow.REGION, (near[1] - 1 >> Shadow.REGION) + 1)
        if write:
            reads = shadow.last_read[region]
            latest = reads[0] if len(reads) == 1 else _most(reads)
            visible = np.where(self.generic_touches, vc[1], known) if crossing else known
            late_readers = latest > visible
            if in_order:
                late_readers[agent] = False
            if _any(late_readers):
                for r in [r for r in shadow.reads if late_readers[r]]:
                    reads = shadow.reads[r][idx]
                    late = reads >> 32 > visible[r]
                    if _any(late):
                        i = int(np.argmax(late))
                        fence = crossing and bool(self.generic_touches[r]) and int(reads[i]) >> 32 <= known[r]
                        site_of_read = int(reads[i]) & 0xFFFFFFFF
                        kind = "missing proxy fence" if fence else "write after read"
                        self._race(kind, space, self._cell(idx, i), r, site_of_read, g, I, fence)
            shadow.write[idx] = shadow.number(agent, epoch, asynchronous, site)
        else:
            if unwritten >= 0 and not {I.loc, I.loc.split(":")[0]} & self.waivers.uninitialised:
                self._uninitialised(space, self._cell(idx, unwritten), g, I)
            shadow.reader(agent)[idx] = epoch << 32 | site
            last = shadow.last_read[region, agent]
            if len(last) > 1:
                np.maximum(last, epoch, out=last)
            elif last[0] < epoch:
                last[0] = epoch

    def _conflict(self, shadow: Shadow, space: str, idx: Any, i: int, known: np.ndarray, g: Any, I: Instr, write: bool) -> None:
        """Report an access of cell ``idx[i]`` that does not know of the last write there."""
        cell = self._cell(idx, i)
        writer, wrote, _, site = shadow.writes[shadow.write[cell]].tolist()
        unordered = int(known[writer]) < wrote
        kind = ("write after write" if write else "read after write") if unordered else "missing proxy fence"
        self._race(kind, space, cell, writer, site, g, I, not unordered)

    @staticmethod
    def _cell(idx: Any, i: int) -> int:
        return int(idx.start + i) if isinstance(idx, slice) else int(np.asarray(idx).reshape(-1)[i])

    def _uninitialised(self, space: str, cell: int, g: Any, I: Instr) -> None:
        n = self.words_per_rank if space == "shared" else 4 * TensorMemory.COLUMNS
        rank, rest = divmod(cell, n)
        place = (
            f"shared {rank << CTA_SHIFT | rest << 2:#x}"
            if space == "shared"
            else f"TMEM of CTA {rank}, column {rest % TensorMemory.COLUMNS}"
        )
        self.report("read of unwritten memory", place, "", g.where(I), "a write before this read", (-1, I.index))

    def _shared_cells(self, a: np.ndarray, n: int) -> np.ndarray:
        """Cells of ``n`` bytes at each shared-window address."""
        first = a >> 2
        if len(self.cluster.ctas) > 1:
            first = (a >> CTA_SHIFT) * self.words_per_rank + (first & ((1 << _WORD_SHIFT) - 1))
        if n <= 4:
            return first
        return (first[:, None] + _STEPS[: n // 4]).reshape(-1)

    def _shared_slice(self, a: int, n: int) -> slice:
        first = (a >> CTA_SHIFT) * self.words_per_rank + ((a & 0xFFFFFF) >> 2)
        return slice(first, first + (n + 3) // 4)

    # --- warps -------------------------------------------------------------------------------------------------------
    def warp_access(self, g: Any, I: Instr, a: np.ndarray, n: int, write: bool, ends: tuple[int, int] | None = None) -> None:
        """A generic-proxy access of shared memory by a warp. ``ends``: the least and the largest address, if all are of one CTA."""
        c = g.clock
        idx: Any
        row = ends and n >= 4 and ends[1] - ends[0] == 31 * n and len(a) == 32 and _all(a == ends[0] + n * _STEPS[:32])
        if ends and (row or ends[0] == ends[1]):
            idx = self._shared_slice(ends[0], ends[1] - ends[0] + n)
            near = idx.start, idx.stop
        else:
            idx = self._shared_cells(a, n)
            if ends:
                near = self._shared_slice(ends[0], 4).start, self._shared_slice(ends[1], n).stop
            else:
                near = int(np.minimum.reduce(idx)), int(_most(idx)) + 1
        if self.barrier_span[0] < near[1] and near[0] < self.barrier_span[1] and _any(self.is_barrier[idx]):
            cell = self._cell(idx, int(np.argmax(self.is_barrier[idx])))
            rank, word = divmod(cell, self.words_per_rank)
            self.report(
                "data access to a live mbarrier",
                f"shared {rank << CTA_SHIFT | word << 2:#x}",
                "",
                g.where(I),
                "mbarrier.inval before reuse",
                (-1, I.index),
            )
        epoch, site = int(c.vc[0, c.agent]), self.site(g, I)
        self._access(self.shared, "shared", idx, c.vc, c.agent, epoch, True, False, g, I, site, write, near)

    # --- mbarriers ---------------------------------------------------------------------------------------------------
    def barrier_init(self, g: Any, I: Instr, b: Any, old: Any) -> None:
        b.agent = self.new_agent(("mbarrier", b.address))
        if old is not None:
            b.clock = old.clock
            b.sequence = old.sequence
        c = g.clock
        self.barrier_origin[b.address] = (c.agent, int(c.vc[0, c.agent]), self.site(g, I))
        cells = self._shared_slice(b.address, 8)
        self.is_barrier[cells] = True
        self.barrier_span = min(self.barrier_span[0], cells.start), max(self.barrier_span[1], cells.stop)

    def barrier_inval(self, address: int) -> None:
        self.is_barrier[self._shared_slice(address, 8)] = False

    def _initialised(self, g: Any, I: Instr, b: Any) -> None:
        agent, epoch, site = self.barrier_origin[b.address]
        c = g.clock
        if agent != c.agent and c.vc[0, agent] < epoch:
            first_g, first_I = self.sites[site]
            self.report(
                "mbarrier used before its initialisation is visible", f"mbarrier {b.address:#x}", first_g.where(first_I), g.where(I),
                "a barrier after mbarrier.init", (first_I.index, I.index),
            )  # fmt: skip

    def landed(self, b: Any, site: int, agent: int = 0, epoch: int = 0) -> None:
        """An arrival from outside the CTA on a barrier, in the phase that is open now."""
        self.landings[id(b), agent, site] = Landing(b, b.phase, agent, epoch, site)

    def released_widely(self, clock: Clock) -> None:
        """A release at cluster scope or wider by a warp, in its present epoch."""
        self.wide_releases.setdefault(clock.agent, []).append(int(clock.vc[0, clock.agent]))

    def barrier_arrive(self, g: Any, I: Instr, b: Any, relaxed: bool) -> None:
        self._initialised(g, I, b)
        if "cluster" in I.parts and not relaxed:
            self.released_widely(g.clock)
        if b.address >> CTA_SHIFT != g.cta.rank:
            self.landed(b, self.site(g, I), g.clock.agent, int(g.clock.vc[0, g.clock.agent]))
        b.clock = g.clock.release_relaxed(b.clock) if relaxed else g.clock.release(b.clock)

    def barrier_acquire(self, g: Any, I: Instr, b: Any) -> None:
        self._initialised(g, I, b)
        if b.address >> CTA_SHIFT == g.cta.rank and I.index not in self.machine.muted and b.phase > b.observed:
            b.observed = b.phase
            b.observers.append((b.phase, I.index))
        new = b.released is not None and (b.released > g.clock.vc).any()
        if new and I.index in self.machine.muted:
            c = g.clock
            c.withheld = b.released.copy() if c.withheld is None else np.maximum(c.withheld, b.released)
            return
        if new:
            g.clock.pending_marks.append(I.index)
        g.clock.acquire(b.released, I.loc)

    # --- asynchronous operations ---------------------------------------------------------------------------------------
    def issue_on_barrier(self, g: Any, I: Instr, address: int) -> Token:
        """An operation that completes by transaction bytes on the mbarrier at ``address``."""
        from .engines.mbarrier import at

        b = at(self.cluster, address, lambda: g.where(I))
        self._initialised(g, I, b)
        b.sequence += 1
        token = Token(b.agent, b.sequence, g.clock.vc.copy(), g, I, self.site(g, I), False)
        g.clock.vc[0, g.clock.agent] += 1
        token.barrier = address
        return token

    def complete(self, token: Token) -> None:
        b = self.cluster.barriers[token.barrier]
        self.landed(b, token.site)
        clock = np.zeros((2, self.capacity), i32) if b.clock is None else b.clock.copy()
        np.maximum(clock[:, token.agent], token.epoch, out=clock[:, token.agent])
        b.clock = clock

    def issue_in_group(self, g: Any, I: Instr, group: Any) -> Token:
        """An operation of a thread's bulk group."""
        if not group.epoch:
            group.agent = self.new_agent(("bulk", g.cta.rank, g.first_warp))
        self.sequence[group.agent] = group.epoch = self.sequence.get(group.agent, 0) + 1
        token = Token(group.agent, group.epoch, g.clock.vc.copy(), g, I, self.site(g, I), False)
        g.clock.vc[0, g.clock.agent] += 1
        return token

    def group_waited(self, g: Any, group: Any, reads_only: bool) -> None:
        if group.epoch:
            np.maximum(g.clock.vc[:, group.agent], group.epoch, out=g.clock.vc[:, group.agent])

    def _queue(self, g: Any) -> _Queue:
        q = self.queues.get(g.clock.agent)
        if q is None:
            q = self.queues[g.clock.agent] = _Queue(self.new_agent(("tensor", g.cta.rank, g.first_warp)), self.capacity)
        return q

    def issue_tensor(self, g: Any, I: Instr) -> Token:
        """A ``tcgen05.mma`` or ``cp``: in order on the queue of its warp."""
        q = self._queue(g)
        np.maximum(q.vc, g.clock.vc, out=q.vc)
        return Token(q.agent, q.epoch, q.vc, g, I, self.site(g, I), True)

    def issue_commit(self, g: Any, I: Instr) -> Token:
        q = self._queue(g)
        g.clock.acted()
        np.maximum(q.vc, g.clock.vc, out=q.vc)
        vc = q.vc.copy()
        vc[:, q.agent] = q.epoch
        token = Token(q.agent, q.epoch, vc, g, I, self.site(g, I), True)
        q.epoch += 1
        g.clock.vc[0, g.clock.agent] += 1
        return token

    def commit_arrives(self, token: Token, b: Any) -> None:
        self.landed(b, token.site, token.agent, token.epoch)
        b.clock = token.vc if b.clock is None else np.maximum(b.clock, token.vc)

    def _token_access(self, token: Token, shadow: Shadow, space: str, idx: Any, write: bool) -> None:
        self._access(
            shadow, space, idx, token.vc, token.agent, token.epoch, token.in_order, True, token.gang, token.instr, token.site, write
        )

    def shared_range(self, token: Token, a: int, n: int, write: bool) -> None:
        self._token_access(token, self.shared, "shared", self._shared_slice(a, n), write)

    def shared_chunks(self, token: Token, a: np.ndarray, n: int, write: bool) -> None:
        """``n`` bytes at each address; a box that fills a contiguous range goes the fast way."""
        lo, hi = int(a.min()), int(a.max()) + n
        if hi - lo == a.size * n:
            self.shared_range(token, lo, hi - lo, write)
        else:
            self._token_access(token, self.shared, "shared", self._shared_cells(a, n), write)

    def shared_words(self, token: Token, words: np.ndarray, write: bool) -> None:
        """Words by shared-window address >> 2."""
        idx = (words >> _WORD_SHIFT) * self.words_per_rank + (words & ((1 << _WORD_SHIFT) - 1))
        if int(idx[-1]) - int(idx[0]) == idx.size - 1:
            idx = slice(int(idx[0]), int(idx[-1]) + 1)
        self._token_access(token, self.shared, "shared", idx, write)

    # --- tensor memory -------------------------------------------------------------------------------------------------
    def _columns(self, rank: int, quadrants: int, column: int, n: int) -> list[slice]:
        base = rank * 4 * TensorMemory.COLUMNS + column
        return [slice(base + q * TensorMemory.COLUMNS, base + q * TensorMemory.COLUMNS + n) for q in range(4) if quadrants >> q & 1]

    def tmem_range(self, token: Token, rank: int, quadrants: int, column: int, n: int, write: bool) -> None:
        for idx in self._columns(rank, quadrants, column, n):
            self._token_access(token, self.tmem, "tmem", idx, write)

    def _tmem_warp(self, g: Any, I: Instr, kind: str, column: int, n: int, write: bool) -> None:
        c = g.clock
        agent = self.new_agent((kind, g.cta.rank, g.first_warp))
        epoch = self.sequence.setdefault(agent, 1)
        in_order = True
        for idx in self._columns(g.cta.rank, 1 << g.first_warp % 4, column, n):
            self._access(self.tmem, "tmem", idx, c.vc, agent, epoch, in_order, False, g, I, self.site(g, I), write)

    def tmem_load(self, g: Any, I: Instr, column: int, n: int, regs: list[Any]) -> None:
        self._tmem_warp(g, I, "ld", column, n, False)
        agent = self.keys["ld", g.cta.rank, g.first_warp]
        epoch = self.sequence[agent]
        self.sequence[agent] = epoch + 1
        for r in regs:
            if isinstance(r, Reg):
                g.clock.tainted[(r.cls, r.idx)] = (I, epoch)
        g.clock.taint_key = None

    def tmem_store(self, g: Any, I: Instr, column: int, n: int) -> None:
        self._tmem_warp(g, I, "st", column, n, True)

    def tmem_wait(self, g: Any, I: Instr, kind: str) -> None:
        agent = self.new_agent((kind, g.cta.rank, g.first_warp))
        epoch = self.sequence.setdefault(agent, 1)
        if I.index in self.machine.muted:
            return
        if self.tmem.last_touch.get(agent, 0) > g.clock.vc[0, agent]:
            g.clock.pending_marks.append(I.index)
        np.maximum(g.clock.vc[:, agent], epoch, out=g.clock.vc[:, agent])
        self.sequence[agent] = epoch + 1
        if kind == "ld":
            g.clock.tainted.clear()
            g.clock.taint_key = None

    def tmem_allocated(self, rank: int, column: int, n: int) -> None:
        for idx in self._columns(rank, 15, column, n):
            self.tmem.write[idx] = 0

    def tmem_freed(self, g: Any, I: Instr, column: int, n: int) -> None:
        """Freeing is a write: everything that touched the columns must be over."""
        c = g.clock
        for idx in self._columns(g.cta.rank, 15, column, n):
            self._access(self.tmem, "tmem", idx, c.vc, c.agent, int(c.vc[0, c.agent]), True, False, g, I, self.site(g, I), True)

    # --- exit ----------------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """The cluster ended: report what was not over, as far as a CTA's own warps knew, when its last warp left.

        The exit takes the CTA's shared memory and barriers away. It counts as a write of all of them by an agent that knows
        what any warp of the CTA knew at its own exit, so an earlier access or arrival that it does not know of races with it.

        An arrival from outside the CTA is known by a wait for its phase on that very barrier. Others do not tell: nothing
        orders the arrivals of two ``tcgen05.commit``s on different barriers, and a warp's arrival on another CTA's barrier has
        ``.cta`` scope unless it says more, which orders it for nobody there; only a later release of that warp at cluster
        scope does.
        """
        for cta in self.cluster.ctas:
            known = np.max([g.clock.vc[0] for g in cta.gangs], axis=0)
            self._data_at_exit(cta, known)
            for x in self.landings.values():
                if x.barrier.address >> CTA_SHIFT != cta.rank:
                    continue
                if x.barrier.observed > x.phase:
                    self.machine.ordered.add(next(index for phase, index in x.barrier.observers if phase > x.phase))
                elif not self._told(x, known):
                    where = f"mbarrier {x.barrier.address:#x}"
                    self._late(cta, x.site, where, f"a wait on {where} (the arrival's phase)")

    def _told(self, x: Landing, known: np.ndarray) -> bool:
        """Whether another edge has told of an arrival."""
        if x.agent and self.sites[x.site][1].loc in self.waivers.known_by_others:
            return bool(x.epoch <= known[x.agent])
        return any(x.epoch <= e <= known[x.agent] for e in self.wide_releases.get(x.agent, ()))

    def _data_at_exit(self, cta: Any, known: np.ndarray) -> None:
        """The exit as a write of the CTA's words."""
        shadow, words = self.shared, self.words_per_rank
        mine = slice(cta.rank * words, (cta.rank + 1) * words)
        agents, epochs, _, sites = shadow.writes.take(shadow.write[mine], 0).T
        unknown = [(agents, sites, known[agents] < epochs)]
        for r, reads in shadow.reads.items():
            late = reads[mine] >> 32 > known[r]
            if _any(late):
                unknown.append((np.full(words, r), reads[mine] & 0xFFFFFFFF, late))
        for by, sites, late in unknown:
            cells = np.flatnonzero(late)
            for site, i in zip(*np.unique(sites[cells], return_index=True), strict=True):
                cell = int(cells[i])
                self._late(cta, int(site), f"shared {cta.rank << CTA_SHIFT | cell << 2:#x}", self._edge(int(by[cell])))

    def _late(self, cta: Any, site: int, place: str, missing: str) -> None:
        g, I = self.sites[site]
        if I.loc in self.waivers.in_flight_at_exit:
            return
        kind, missing = "CTA exits while its shared memory or barriers are in use", f"{missing}, before the CTA's last warp exits"
        self.report(kind, f"CTA {cta.ctaid}, {place}", g.where(I), "exit of its last warp", missing, (I.index, -1))
