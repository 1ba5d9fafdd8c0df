"""The public surface: ``emulate`` a call under several schedules, ``record`` its launches, ``run`` one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from . import capture, hostpatch, schedule
from .capture import Launch
from .dependents import Dependents
from .errors import EmulatorError, RaceError
from .machine import DEFAULT_STEP_LIMIT, Machine
from .ptx import parse
from .registry import load_engines
from .simt import Compiled


@dataclass(frozen=True)
class Schedule:
    """A scheduler by name, with its seed and gang width (None: 32 where warps are scheduled apart, 128 otherwise)."""

    name: str = "eager"
    seed: int = 0
    width: int | None = None

    def gang_width(self, checked: bool) -> int:
        if self.width is not None:
            return self.width
        return 32 if checked or self.name == "pct" else 128

    def __str__(self) -> str:
        return f"{self.name}:{self.seed}"


def schedules(n: int, seed: int = 0) -> list[Schedule]:
    """``n`` schedules: eager, pct, lazy, random, then pct and random in turn; seeds count up from ``seed``."""
    out = [Schedule("eager"), Schedule("pct", seed), Schedule("lazy"), Schedule("random", seed + 1)]
    out += [Schedule("pct" if i % 2 == 0 else "random", seed + 2 + i) for i in range(max(0, n - 4))]
    return out[:n]


@dataclass
class Result:
    """What a call did: launches, race reports, and a finished machine per launch (counts only: memory is released)."""

    schedule: Schedule
    launches: list[Launch] = field(default_factory=list)
    machines: list[Machine] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(m.steps for m in self.machines)

    @property
    def reports(self) -> list[Any]:
        return [r for m in self.machines for r in m.reports]


@functools.lru_cache(maxsize=16)
def compiled(ptx: str, entry: str, fidelity: Any = None) -> Compiled:
    """Parse and generate once per program."""
    load_engines()
    return Compiled(parse(ptx, entry), fidelity)


def run(
    launch: Launch,
    extents: list[tuple[int, int]],
    chosen: Schedule | None = None,
    *,
    check: bool = False,
    waivers: Any = None,
    collect: bool = False,
    poison: bool = True,
    step_limit: int = DEFAULT_STEP_LIMIT,
    fidelity: Any = None,
    column_hook: Any = None,
    muted: frozenset[int] = frozenset(),
    past: Any = None,
) -> Machine:
    """Execute one launch; returns the finished machine: its counts, tally and reports, no memory.

    Args:
        check: run the race checker; gangs are one warp wide then.
        waivers: what the checker lets pass for this kernel (``check.Waivers``), or a dict from a part of a kernel's name to
            what it lets pass there.
        collect: leave the checker's reports in ``machine.reports`` instead of raising.
        muted: instructions whose edges the race checker leaves out while the run itself is unchanged (``faults.py``).
        past: of a dependent launch, what it must agree with until it waits (``dependents.py``).

    Raises:
        EmulatorError: with the schedule that led to it appended; ``RaceError`` if the checker reports anything.
    """
    chosen = chosen or Schedule()
    make_checker = None
    if check:
        from .check import Checker

        if isinstance(waivers, dict):
            waivers = next((w for part, w in waivers.items() if part in launch.name), None)
        make_checker = functools.partial(Checker, waivers=waivers)
    machine = Machine(
        launch,
        extents,
        scheduler=schedule.make(chosen.name),
        width=chosen.gang_width(check),
        poison=poison,
        seed=chosen.seed,
        step_limit=step_limit,
        make_checker=make_checker,
        compiled=compiled(launch.ptx, launch.name, fidelity),
        fidelity=fidelity,
    )
    machine.column_hook, machine.muted, machine.past = column_hook, muted, past
    try:
        machine.run()
    except EmulatorError as error:
        error.add_note(f"kernel {launch.name[:80]}, schedule {chosen}")
        raise
    finally:
        machine.release()
    if machine.reports and not collect:
        text = "\n".join(str(r) for r in machine.reports[:8])
        raise RaceError(f"{len(machine.reports)} reports, kernel {launch.name[:80]}, schedule {chosen}\n{text}")
    return machine


def running(result: Result, options: dict[str, Any]) -> Callable[[Launch], None]:
    """What runs a launch after the other under the schedule of ``result``, with ``options`` of :func:`run`, and notes them there."""
    stream = Dependents() if options.get("check") else None

    def handler(launch: Launch) -> None:
        result.launches.append(launch)
        extents = capture.device_memory.extents
        past = stream.begin(launch, extents) if stream else None
        machine = run(launch, extents, result.schedule, past=past, **options)
        result.machines.append(machine)
        if stream:
            stream.end(past, machine.waited and not machine.early)

    return handler


def _launching(function: Callable[[], Any], arch: str, handler: Callable[[Launch], Any]) -> Any:
    """The value of ``function`` on the emulated device; ``handler`` gets its launches."""
    runtime = capture.install(arch)
    previous, runtime.handler = runtime.handler, handler
    capture.device_memory.clear()
    try:
        with hostpatch.device(arch):
            return function()
    finally:
        runtime.handler = previous


def call_under(function: Callable[[], Any], arch: str, chosen: Schedule, **options: Any) -> tuple[Any, Result]:
    """Run ``function`` on the emulated device under one schedule; returns its value and the ``Result``."""
    result = Result(chosen)
    return _launching(function, arch, running(result, options)), result


def record(function: Callable[[], Any], arch: str) -> tuple[Any, list[tuple[Launch, list[tuple[int, int]]]]]:
    """Run ``function`` without executing kernels; returns its value and the launches with their extents."""
    out: list[tuple[Launch, list[tuple[int, int]]]] = []
    value = _launching(function, arch, lambda launch: out.append((launch, list(capture.device_memory.extents))))
    return value, out


def emulate(
    call: Callable[[], Any],
    *,
    arch: str,
    schedules: int | Iterable[Schedule] = 8,
    verify: Callable[[Any], None] | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Result]:
    """Run ``call`` once per schedule and verify each value.

    Args:
        call: host code that launches kernels on CPU tensors; called anew for each schedule, so it makes its own outputs.
        arch: ``sm_90a``, ``sm_100a`` or ``sm_103a``; one per process.
        schedules: how many (see ``schedules``), or which.
        verify: called with the value of ``call``; raises if it is wrong.
        seed: first seed of the random schedules.
        options: ``check`` (race checker), ``poison``, ``step_limit``, ``fidelity``.

    Raises:
        EmulatorError, AssertionError: with the schedule in a note; rerun with ``Schedule(name, seed)`` to reproduce.
    """
    from .api import schedules as make_schedules

    chosen = make_schedules(schedules, seed) if isinstance(schedules, int) else list(schedules)
    results = []
    for s in chosen:
        try:
            value, result = call_under(call, arch, s, **options)
            if verify is not None:
                verify(value)
        except Exception as error:
            error.add_note(f"emulate: failed under schedule {s} (arch {arch})")
            raise
        results.append(result)
    return results
