"""Race-checker accesses of Hopper's engines: products of warpgroups, ``cp.async``, shared-memory atomics.

* A product of a warpgroup reads shared memory as the async proxy, by one agent per warpgroup, in order. Each warp
  vouches for its 16 rows of A and for all of B with its clock at issue. Its reads end together: a ``wait_group`` of any
  warp covers those of all four. Registers in flight are tainted from issue to that wait.
* ``cp.async`` writes as the generic proxy, by one agent per warp, from issue to ``wait_group`` (or an mbarrier's phase).
* Atomics on shared memory never race with one another: they are one agent. A plain access needs an edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .check import Token
from .numerics import i32


def product_read(g: Any, I: Any, key: int, epoch: int | None, clock: np.ndarray, words: list[np.ndarray]) -> tuple[int, int]:
    """Declare the reads of one warp of a product of warpgroup ``key``; returns agent and epoch (made if None)."""
    checker = g.cluster.checker
    agent = checker.new_agent(("wgmma", g.cta.rank, key))
    if epoch is None:
        epoch = checker.sequence[agent] = checker.sequence.get(agent, 0) + 1
    token = Token(agent, epoch, clock, g, I, checker.site(g, I), True)
    for w in words:
        checker.shared_words(token, w, write=False)
    return agent, epoch


def product_waited(g: Any, I: Any, agent: int, epoch: int) -> None:
    vc, withheld = g.clock.vc, g.clock.withheld
    if I.index in g.machine.muted:
        if epoch > vc[0, agent]:
            g.clock.withheld = withheld = np.zeros_like(vc) if withheld is None else withheld
            withheld[:, agent] = np.maximum(withheld[:, agent], epoch)
        return
    if withheld is not None and vc[0, agent] < withheld[0, agent] <= epoch:
        g.machine.covers[I.loc] = g.machine.covers.get(I.loc, 0) + 1
    if epoch > vc[0, agent]:
        g.machine.ordered.add(I.index)
        vc[:, agent] = np.maximum(vc[:, agent], epoch)


def accumulators_waited(g: Any, I: Any, last: int) -> None:
    """The registers of products up to number ``last`` of this warp may be used."""
    if I.index in g.machine.muted:
        return
    tainted = g.clock.tainted
    keep = {r: x for r, x in tainted.items() if x[0].parts[0] != "wgmma" or x[1] > last}
    if len(keep) < len(tainted):
        g.machine.ordered.add(I.index)
        g.clock.tainted, g.clock.taint_key = keep, None


def copy_issued(g: Any, I: Any, destinations: np.ndarray, size: int) -> Token:
    """Declare the writes of a ``cp.async``."""
    checker = g.cluster.checker
    agent = checker.new_agent(("cp.async", g.cta.rank, g.first_warp))
    epoch = checker.sequence[agent] = checker.sequence.get(agent, 0) + 1
    token = Token(agent, epoch, g.clock.vc.copy(), g, I, checker.site(g, I), False)
    g.clock.vc[0, g.clock.agent] += 1
    cells = checker._shared_cells(destinations, size)
    checker._access(checker.shared, "shared", cells, token.vc, agent, epoch, False, False, g, I, token.site, True)
    return token


def copy_waited(g: Any, I: Any, token: Token) -> None:
    """The warp's copies up to this one are seen by it (not yet by the async proxy)."""
    known = g.clock.vc[0]
    if known[token.agent] < token.epoch:
        g.machine.ordered.add(I.index)
        known[token.agent] = token.epoch


def copies_arrive(g: Any, barrier: Any, tokens: list[Token], site: int) -> None:
    """``cp.async.mbarrier.arrive``: the phase that this arrival is part of implies the copies."""
    g.cluster.checker.landed(barrier, site)
    clock = np.zeros((2, g.cluster.checker.capacity), i32) if barrier.clock is None else barrier.clock.copy()
    for t in tokens:
        clock[0, t.agent] = max(int(clock[0, t.agent]), t.epoch)
    barrier.clock = clock


def atomic_access(g: Any, I: Any, addresses: np.ndarray, size: int) -> None:
    """Read-modify-write of shared memory by a warp's atomics."""
    checker, clock = g.cluster.checker, g.clock
    agent = checker.new_agent(("atomic", g.cta.rank, 0))
    epoch = checker.sequence[agent] = checker.sequence.get(agent, 0) + 1
    cells = checker._shared_cells(addresses, size)
    checker._access(checker.shared, "shared", cells, clock.vc, agent, epoch, True, False, g, I, checker.site(g, I), True)
    clock.vc[0, agent] = epoch
