"""Schedulers: who runs next.

``eager``   asynchronous operations complete as they are issued; warps run in turn.
``lazy``    they complete only when no warp can go on.
``random``  warps in random order, completions at random times.
``pct``     random priorities over warps and asynchronous queues, the highest that can run does; now and then one
            priority is drawn anew (probabilistic concurrency testing: finds orders that a fair shuffle almost never takes).

All randomness is the machine's seeded generator, so a (scheduler, seed) pair reproduces a run.
"""

from __future__ import annotations

from typing import Any

NAMES = ("eager", "lazy", "random", "pct")


class Scheduler:
    """Common parts. ``resident`` is how many clusters are started before anything has to wait for room."""

    eager = False
    #: chance that a try_wait that would sleep returns false instead (its time limit may pass at any moment)
    early_timeout = 0.0

    def __init__(self, resident: int) -> None:
        self.resident = resident

    def run(self, machine: Any) -> None:
        raise NotImplementedError

    def _fill(self, machine: Any) -> None:
        while len(machine.resident) < self.resident and machine.admit() is not None:
            pass

    @staticmethod
    def _retire(machine: Any) -> None:
        for cluster in [c for c in machine.resident if not c.live]:
            if not any(_belongs(q, cluster) for q in machine.async_queues):
                machine.retire(cluster)

    @staticmethod
    def _stuck(machine: Any, state: dict[str, int]) -> None:
        """Nothing can run: start another cluster, or let time limits pass, or report a deadlock."""
        if machine.admit() is not None:
            return
        if state.get("events") == machine.events and state.get("rounds", 0) >= 2:
            raise machine.deadlock()
        if state.get("events") != machine.events:
            state["events"], state["rounds"] = machine.events, 0
        state["rounds"] += 1
        released = [g.release_timeouts() for c in machine.resident for g in c.gangs]
        if not any(released):
            raise machine.deadlock()


def _belongs(queue: Any, cluster: Any) -> bool:
    return isinstance(queue, tuple) and len(queue) > 1 and queue[1] == cluster.number


class Fair(Scheduler):
    """Round robin (``eager``, ``lazy``) or shuffled (``random``)."""

    def __init__(self, kind: str, resident: int) -> None:
        super().__init__(resident)
        self.kind = kind
        self.eager = kind == "eager"
        self.early_timeout = 0.1 if kind == "random" else 0.0

    def run(self, machine: Any) -> None:
        rng, shuffled = machine.rng, self.kind == "random"
        state: dict[str, int] = {}
        spins, seen = 0, -1
        while True:
            self._fill(machine)
            if not machine.resident:
                if machine.async_queues:
                    machine.complete_one(next(iter(machine.async_queues)))
                    continue
                return
            gangs = [g for c in machine.resident for g in c.gangs if g.fragments]
            if shuffled:
                rng.shuffle(gangs)
            progress = False
            for g in gangs:
                if shuffled and rng.random() < 0.3:
                    continue
                if g.runnable() and g.run():
                    progress = True
            queues = machine.async_queues
            if queues and (not progress or (shuffled and rng.random() < 0.5)):
                machine.complete_one(rng.choice(list(queues)) if shuffled else next(iter(queues)))
                progress = True
            self._retire(machine)
            if progress:
                # warps that spin on memory make progress for ever: let other clusters in; from then on in short turns, or thousands of
                # completions would take a long spin each
                spins, seen = (spins + 1, seen) if machine.events == seen else (0, machine.events)
                if spins > (1 if machine.spins else 8):
                    machine.spins = True
                    machine.admit()
                    if queues:
                        machine.complete_one(next(iter(queues)))
            elif machine.resident and not (shuffled and any(g.runnable() for g in gangs)):
                self._stuck(machine, state)


class Pct(Scheduler):
    early_timeout = 0.1
    CHANGE = 0.03

    def run(self, machine: Any) -> None:
        rng = machine.rng
        priority: dict[Any, float] = {}
        state: dict[str, int] = {}
        last, repeats = None, 0
        while True:
            self._fill(machine)
            queues = machine.async_queues
            if not machine.resident and not queues:
                return
            agents: list[Any] = [g for c in machine.resident for g in c.gangs if g.fragments]
            agents += list(queues)
            for a in agents:
                if a not in priority:
                    priority[a] = rng.random()
            agents.sort(key=priority.__getitem__, reverse=True)
            ran = None
            for a in agents:
                if isinstance(a, tuple):
                    machine.complete_one(a)
                    ran = a
                elif a.runnable() and a.run():
                    ran = a
                if ran is not None:
                    break
            self._retire(machine)
            if ran is None:
                if machine.resident:
                    self._stuck(machine, state)
                continue
            if isinstance(ran, tuple) and ran not in queues:
                priority.pop(ran, None)
            # a warp that spins at the top of the order would starve the one it waits for
            repeats = repeats + 1 if ran is last else 0
            last = ran
            if repeats > 3:
                priority[ran] = min(priority.values()) - rng.random()
                machine.admit()
            if rng.random() < self.CHANGE:
                priority[rng.choice(list(priority))] = rng.random()


def make(name: str, resident: int | None = None) -> Scheduler:
    """A scheduler by name.

    Raises:
        ValueError: unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r}: known are {', '.join(NAMES)}")
    if name == "pct":
        return Pct(resident or 2)
    return Fair(name, resident or (2 if name == "random" else 1))
