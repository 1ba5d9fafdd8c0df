"""The machine: a grid's clusters, CTAs and asynchronous operations, run to completion under a scheduler."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from .capture import Launch
from .errors import DeadlockError, EmulatorError, StepLimitError
from .memory import CTA_SHIFT, SHARED_LIMIT, SHARED_RESERVED, ClusterMemory, GlobalMemory, TensorMemory, host_read
from .ptx import parse
from .simt import Compiled, Gang

#: CTAs that can be resident at once: the multiprocessors of the emulated device.
MULTIPROCESSORS = 148
DEFAULT_STEP_LIMIT = 20_000_000


class CTA:
    """One thread block: its place, the addresses of its variables, barriers and tensor memory."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        machine = cluster.machine
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.tmem = TensorMemory(machine.poison)
        self.named_barriers: dict[int, Any] = {}
        self.symbols = dict(machine.parameter_addresses)
        for name, offset in machine.shared_layout.items():
            self.symbols[name] = (rank << CTA_SHIFT) + offset
        self.symbols.update(machine.local_layout)
        self.gangs: list[Gang] = []


class Cluster:
    """CTAs that share a shared-memory window, and their mbarriers (by shared-window address)."""

    def __init__(self, machine: Machine, base: tuple[int, int, int], number: int) -> None:
        self.machine, self.number = machine, number
        self.shape = machine.cluster_shape
        sx, sy, sz = self.shape
        ranks = sx * sy * sz
        self.memory = ClusterMemory(machine, ranks, machine.poison, machine.shared_size)
        self.barriers: dict[int, Any] = {}
        self.cluster_barrier: Any = None
        self.pair_allocations: dict[int, Any] = {}
        self.live = machine.threads * ranks
        self.checker: Any = None
        #: agent and epoch of each ``griddepcontrol.wait`` (``dependents.py``)
        self.waits: list[tuple[int, int]] = []
        self.ctas = [CTA(self, r, (base[0] + r % sx, base[1] + r // sx % sy, base[2] + r // (sx * sy))) for r in range(ranks)]
        self.gangs: list[Gang] = []
        width = machine.width
        for cta in self.ctas:
            cta.gangs = [Gang(self, cta, first, width) for first in range(0, machine.threads, width)]
            self.gangs += cta.gangs
        if machine.make_checker is not None:
            self.checker = machine.make_checker(self)
            self.memory.checker = self.checker

    def release(self) -> None:
        """Drop memory, registers and shadow state now: they sit in reference cycles, and the cycle collector counts
        objects, not bytes."""
        for g in self.gangs:
            g.memory = g.clock = None
            g.release()
        for cta in self.ctas:
            cta.gangs, cta.tmem = [], None
            cta.__dict__.pop("warpgroups", None)
        self.gangs, self.memory, self.checker = [], None, None
        self.barriers, self.pair_allocations, self.cluster_barrier = {}, {}, None


class Machine:
    """One launch in execution.

    Args:
        launch: what to run.
        extents: global memory the kernel may touch, as (first byte, one past the last byte).
        width: lanes per gang; 32 for checking and for warp-level adversarial schedules.
        poison: fill registers, shared and tensor memory with 0xFF bytes at start.
        scheduler: chooses what runs next (see ``schedule.py``).
        seed: of every random choice.
        step_limit: units of program, over all warps, before the run is stopped.
        make_checker: builds a race checker for a cluster, or None.
        compiled: reuse of a compiled program.
    """

    def __init__(
        self,
        launch: Launch,
        extents: list[tuple[int, int]],
        *,
        scheduler: Any,
        width: int = 128,
        poison: bool = True,
        seed: int = 0,
        step_limit: int = DEFAULT_STEP_LIMIT,
        make_checker: Callable[[Cluster], Any] | None = None,
        compiled: Compiled | None = None,
        fidelity: Any = None,
    ) -> None:
        self.launch, self.scheduler, self.poison, self.fidelity = launch, scheduler, poison, fidelity
        self.compiled = compiled or Compiled(parse(launch.ptx, launch.name), fidelity)
        self.grid, self.block, self.cluster_shape = launch.grid, launch.block, launch.cluster
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        program = self.compiled.program
        if program.required_threads:
            needed = tuple(program.required_threads) + (1,) * (3 - len(program.required_threads))
            if needed != tuple(launch.block):
                raise EmulatorError(f"launched with block {launch.block}, .reqntid asks for {needed}")
        for axis in range(3):
            if launch.grid[axis] % launch.cluster[axis]:
                raise EmulatorError(f"grid {launch.grid} is not a multiple of the cluster {launch.cluster}")
        self.width = min(width, (self.threads + 31) // 32 * 32)
        self.rng = random.Random(seed)
        self.make_checker = make_checker
        self.step_limit, self.steps = step_limit, 0
        self.hits = [0] * len(self.compiled.units)
        self.events = 0
        self.spins = False  # whether warps have been seen to spin on memory
        self._layout(program)
        self._parameters(extents)
        self.async_queues: dict[Any, deque[Callable[[], None]]] = {}
        self._unique = 0
        gx, gy, gz = launch.grid
        cx, cy, cz = launch.cluster
        #: clusters not started yet, in launch order; cluster launch control takes from here too
        self.pending = deque((x, y, z) for z in range(0, gz, cz) for y in range(0, gy, cy) for x in range(0, gx, cx))
        self.resident: list[Cluster] = []
        self.max_resident = max(1, MULTIPROCESSORS // (cx * cy * cz))
        self.started = 0
        #: waits that ever put a warp to sleep: instruction index → (executed, slept)
        self.wait_counts: dict[int, list[int]] = {}
        #: instructions whose wait or fence brought its warp anything new (race checker)
        self.ordered: set[int] = set()
        #: waits and fences (instruction index) that work but bring the race checker's clocks nothing; and by which edges
        #: what they would have brought came all the same, in agents
        self.muted: frozenset[int] = frozenset()
        self.covers: dict[str, int] = {}
        self.reports: list[Any] = []
        #: what a dependent launch reads before it waits must agree with (``dependents.py``); whether a warp waited, and one let others
        #: begin before it did
        self.past: Any = None
        self.waited = self.early = False
        #: fault harness: (role, column) → column
        self.column_hook: Any = None
        #: counts for the profile: bytes and operations by name
        self.tally: dict[str, int] = {}

    # --- set-up ----------------------------------------------------------------------------------------------------
    def _layout(self, program: Any) -> None:
        offset = SHARED_RESERVED
        self.shared_layout: dict[str, int] = {}
        for name, (align, size) in program.shared.items():
            if size:
                offset = (offset + align - 1) // align * align
                self.shared_layout[name] = offset
                offset += size
        align = max([a for a, size in program.shared.values() if not size], default=16)
        offset = (offset + align - 1) // align * align
        for name, (_, size) in program.shared.items():
            if not size:
                self.shared_layout[name] = offset
        self.dynamic_smem = self.launch.smem
        self.shared_size = offset + self.launch.smem
        if self.shared_size > SHARED_LIMIT:
            raise EmulatorError(f"{self.shared_size} bytes of shared memory (reserved part included): at most {SHARED_LIMIT}")
        self.local_layout: dict[str, int] = {}
        at = 0
        for name, (align, size) in program.local.items():
            at = (at + align - 1) // align * align
            self.local_layout[name] = at
            at += size
        self.local_size = (at + 15) // 16 * 16

    def _parameters(self, extents: list[tuple[int, int]]) -> None:
        params = self.launch.params
        total = sum((len(b) + 127) // 128 * 128 for b in params.values()) + 128
        self._parameter_buffer = ctypes.create_string_buffer(total + 128)
        start = at = (ctypes.addressof(self._parameter_buffer) + 127) // 128 * 128
        self.parameter_addresses: dict[str, int] = {}
        for name, data in params.items():
            ctypes.memmove(at, data, len(data))
            self.parameter_addresses[name] = at
            at += (len(data) + 127) // 128 * 128
        self.globals = GlobalMemory([*extents, (start, at + 1)])
        self._loaded: dict[Any, np.ndarray] = {}

    def parameter(self, name: str, offset: int, size: int, count: int, I: Any) -> np.ndarray:
        """``[1, count]`` words of a kernel parameter."""
        found = self._loaded.get((name, offset, size, count))
        if found is None:
            if name not in self.parameter_addresses:
                raise EmulatorError(f"parameter {name!r} was not passed; {I.where()}")
            a, n = self.parameter_addresses[name] + offset, size * count
            if a % n:
                raise EmulatorError(f"address {a:#x} is not aligned to the {n} bytes accessed; {I.where()}")
            self.globals.check_range(a, a + n, I.where)
            found = self._loaded[name, offset, size, count] = host_read(a, n).view(f"u{size}").reshape(1, count).copy()
        return found

    # --- services for engines ----------------------------------------------------------------------------------------
    def submit(self, queue: Any, complete: Callable[[], None]) -> None:
        """Hand over an asynchronous operation. Operations of one ``queue`` complete in order; None is unordered."""
        if self.scheduler.eager:
            complete()
            self.events += 1
            return
        if queue is None:
            self._unique += 1
            queue = ("unordered", self._unique)
        self.async_queues.setdefault(queue, deque()).append(complete)

    def complete_one(self, queue: Any) -> None:
        """Complete the oldest operation of a queue."""
        operations = self.async_queues[queue]
        operation = operations.popleft()
        if not operations:
            del self.async_queues[queue]
        operation()
        self.events += 1

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self.step_limit:
            raise StepLimitError(f"more than {self.step_limit} steps\n{self.dump()}")

    def add(self, name: str, n: int) -> None:
        self.tally[name] = self.tally.get(name, 0) + n

    # --- running -----------------------------------------------------------------------------------------------------
    def admit(self) -> Cluster | None:
        """Start the next pending cluster if there is room."""
        if not self.pending or len(self.resident) >= self.max_resident:
            return None
        cluster = Cluster(self, self.pending.popleft(), self.started)
        self.started += 1
        self.resident.append(cluster)
        return cluster

    def retire(self, cluster: Cluster) -> None:
        self.resident.remove(cluster)
        if cluster.checker is not None:
            cluster.checker.finish()
        for cta in cluster.ctas:
            if cta.tmem.allocated:
                raise EmulatorError(f"CTA {cta.ctaid} ended with TMEM allocated: {cta.tmem.allocated}")
        cluster.release()

    def release(self) -> None:
        """Drop memory, registers and operations in flight; counts, tally, reports and launch stay."""
        for cluster in self.resident:
            cluster.release()
        self.resident, self.pending, self.async_queues = [], deque(), {}
        self.scheduler = self.column_hook = self.past = None

    def run(self) -> None:
        """Run the whole grid.

        Raises:
            DeadlockError, StepLimitError, or whatever an instruction raises.
        """
        with np.errstate(all="ignore"):
            self.scheduler.run(self)

    def dump(self) -> str:
        """Where every warp is and what it waits for; barriers; asynchronous operations in flight."""
        out = []
        for cluster in self.resident:
            for g in cluster.gangs:
                for f in g.fragments:
                    unit = self.compiled.units[f.pc]
                    at = unit.instrs[0].where() if unit.instrs else "end"
                    warps = sorted({int(w) for w in g.warp[f.mask]})
                    wait = f.wait.describe() if f.wait is not None else "runnable"
                    out.append(f"CTA {g.cta.ctaid} warps {warps} ({int(f.mask.sum())} lanes) wait for {wait}; at {at}")
            bars = {f"{k:#x}": b.describe() for k, b in sorted(cluster.barriers.items())}
            out.append(f"mbarriers of cluster {cluster.number}: {bars}")
        queues = {str(k): len(v) for k, v in self.async_queues.items()}
        out.append(f"asynchronous operations in flight: {queues}; clusters not started: {len(self.pending)}")
        return "\n".join(out)

    def deadlock(self) -> DeadlockError:
        return DeadlockError(f"no warp and no asynchronous operation can proceed\n{self.dump()}")
