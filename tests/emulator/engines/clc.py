"""Cluster launch control: a running cluster takes the place of one that has not started.

The response is 16 bytes; its encoding is this emulator's own, read back only by ``query_cancel``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..memory import CTA_SHIFT
from ..numerics import u8, u32, u64
from ..ptx import Instr
from ..registry import op
from .bulk import load_operation
from .mbarrier import at

_OFFSET = (1 << CTA_SHIFT) - 1


@op("clusterlaunchcontrol.try_cancel", allow="async shared::cta mbarrier::complete_tx::bytes multicast::cluster::all b128")
def try_cancel(g: Any, I: Instr, m: np.ndarray) -> None:
    machine, cluster = g.machine, g.cluster
    for lane in np.flatnonzero(m):
        a, b = int(g.addr(I.args[0])[lane]), int(g.addr(I.args[1])[lane])
        ranks = range(len(cluster.ctas)) if "multicast::cluster::all" in I.parts else [a >> CTA_SHIFT]
        targets = [((r << CTA_SHIFT) | a & _OFFSET, (r << CTA_SHIFT) | b & _OFFSET) for r in ranks]
        tokens = []
        for d, bar in targets:
            g.memory.check_shared_range(d, 16, lambda: g.where(I))
            if cluster.checker is not None:
                tokens.append(cluster.checker.issue_on_barrier(g, I, bar))
                cluster.checker.shared_range(tokens[-1], d, 16, write=True)

        def complete(targets: Any = targets, tokens: Any = tokens) -> None:
            taken = machine.pending.popleft() if machine.pending else None
            value = np.array([1 | taken[0] << 32, taken[1] | taken[2] << 32] if taken else [0, 0], u64)
            for i, (d, bar) in enumerate(targets):
                g.memory.arena[d : d + 16] = value.view(u8)
                if tokens:
                    cluster.checker.complete(tokens[i])
                at(cluster, bar).complete(16)

        load_operation(g, complete)


@op(
    "clusterlaunchcontrol.query_cancel",
    allow="is_canceled get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z pred b128 b32",
    writes=True,
)
def query_cancel(g: Any, I: Instr, m: np.ndarray) -> None:
    q = g.Q[I.args[1].idx]
    if "is_canceled" in I.parts:
        np.copyto(g.P[I.args[0].idx], (q[:, 0] & u64(1)).astype(bool), where=m)
        return
    axis = next((x[-1] for x in I.parts if x.startswith("get_first_ctaid::")), None)
    if axis is None:
        raise I.unsupported("query_cancel as a vector")
    value = {"x": q[:, 0] >> u64(32), "y": q[:, 1] & u64(0xFFFFFFFF), "z": q[:, 1] >> u64(32)}[axis]
    np.copyto(g.U[I.args[0].idx], value.astype(u32), where=m)
