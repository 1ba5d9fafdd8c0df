"""Warp-level collectives: shuffles, votes, election, reductions, convergence."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..numerics import i32, i64, u32
from ..ptx import Imm, Instr, Not, Pair, Reg
from ..registry import Wait, op


def _source(kind: Any, b: np.ndarray, c: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lane that each lane reads, and whether it is in range (else the lane reads itself)."""
    clamp, segment = c & 31, (c >> 8) & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    if "idx" in kind:
        source = lowest | (b & 31 & ~segment)
        ok = source <= highest
    elif "bfly" in kind:
        source = lane ^ b
        ok = source <= highest
    elif "up" in kind:
        source = lane - b
        ok = source >= highest
    else:
        source = lane + b
        ok = source <= highest
    return np.where(ok, source, lane), ok


@functools.cache
def _fixed(kind: tuple[str, ...], b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """``_source`` of one warp for the same ``b`` and ``c`` in all lanes."""
    return _source(kind, np.full(32, b & 0xFFFFFFFF, i64), np.full(32, c & 0xFFFFFFFF, i64), np.arange(32))


@op("shfl.sync", aligned=True, allow="idx bfly up down b32", writes=True)
def shuffle(g: Any, I: Instr, m: np.ndarray) -> None:
    A, d, ok_reg = I.args, I.args[0], None
    if isinstance(d, Pair):
        d, ok_reg = d.items
    if g.W == 32 and isinstance(A[2], Imm) and isinstance(A[3], Imm):
        plan = _fixed(tuple(x for x in I.parts if x in ("idx", "bfly", "up", "down")), A[2].value, A[3].value)
        if isinstance(d, Reg):
            np.copyto(g.U[d.idx], g.ev(A[1])[plan[0]], where=m)
        if isinstance(ok_reg, Reg):
            np.copyto(g.P[ok_reg.idx], plan[1], where=m)
        return
    value, b, c = (g.ev(x).reshape(-1, 32) for x in A[1:4])
    source, ok = _source(I.parts, b.astype(i64), c.astype(i64), g.lane.reshape(-1, 32))
    if isinstance(d, Reg):
        np.copyto(g.U[d.idx], np.take_along_axis(value, source, 1).reshape(-1), where=m)
    if isinstance(ok_reg, Reg):
        np.copyto(g.P[ok_reg.idx], ok.reshape(-1), where=m)


@op("elect.sync", aligned=True, allow="", writes=True)
def elect(g: Any, I: Instr, m: np.ndarray) -> None:
    d, p = I.args[0].items
    mask = m.reshape(-1, 32)
    leader = mask.argmax(1)
    chosen = (g.lane.reshape(-1, 32) == leader[:, None]) & mask
    if isinstance(p, Reg):
        np.copyto(g.P[p.idx], chosen.reshape(-1), where=m)
    if isinstance(d, Reg):
        np.copyto(g.U[d.idx], np.repeat(leader, 32).astype(u32), where=m)


def _ballot(bits: np.ndarray) -> np.ndarray:
    return np.repeat(np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view(u32).reshape(-1), 32)


@op("vote.sync", aligned=True, allow="ballot any all uni b32 pred", writes=True)
def vote(g: Any, I: Instr, m: np.ndarray) -> None:
    A = I.args
    p = ~g.ev(A[1].operand, "P") if isinstance(A[1], Not) else g.ev(A[1], "P")
    on, active = (p & m).reshape(-1, 32), m.reshape(-1, 32)
    if "ballot" in I.parts:
        np.copyto(g.U[A[0].idx], _ballot(p & m), where=m)
        return
    if "any" in I.parts:
        r = on.any(1)
    elif "all" in I.parts:
        r = (on | ~active).all(1)
    else:
        r = (on | ~active).all(1) | ~on.any(1)
    np.copyto(g.P[A[0].idx], np.repeat(r, 32), where=m)


@op("match", aligned=True, allow="any sync b32", writes=True)
def match(g: Any, I: Instr, m: np.ndarray) -> None:
    v, active = g.ev(I.args[1]).reshape(-1, 32), m.reshape(-1, 32)
    same = (v[:, :, None] == v[:, None, :]) & active[:, None, :]
    bits = np.packbits(same, axis=2, bitorder="little").view(u32).reshape(-1)
    np.copyto(g.U[I.args[0].idx], bits, where=m)


@op("redux.sync", aligned=True, allow="add min max and or xor u32 s32 b32 f32 abs NaN", writes=True)
def redux(g: Any, I: Instr, m: np.ndarray) -> None:
    kind = next(x for x in ("add", "min", "max", "and", "or", "xor") if x in I.parts)
    view = {"s32": "S", "f32": "F"}.get(I.parts[-1], "U")
    v = g.ev(I.args[1], "U").view({"U": u32, "S": i32, "F": np.float32}[view])
    if "abs" in I.parts:
        v = np.abs(v)
    table: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and}
    table.update({"or": np.bitwise_or, "xor": np.bitwise_xor})
    if view == "F" and "NaN" not in I.parts:
        table.update(min=np.fmin, max=np.fmax)
    out = getattr(g, view)[I.args[0].idx]
    for w in range(g.W // 32):
        lanes = np.flatnonzero(m[w * 32 : w * 32 + 32]) + w * 32
        if lanes.size:
            out[lanes] = table[kind].reduce(v[lanes])


@op("activemask", allow="b32", writes=True)
def activemask(g: Any, I: Instr, m: np.ndarray) -> None:
    np.copyto(g.U[I.args[0].idx], _ballot(m), where=m)


@op("bar.warp", aligned=True, allow="sync")
def warp_sync(g: Any, I: Instr, m: np.ndarray) -> None:
    """Convergence is all that is left of ``__syncwarp`` when lanes run in lock step."""


REGISTERS = 1 << 16
"""Of a multiprocessor."""


class RegistersWait(Wait):
    """``setmaxnreg.inc`` waits until the CTA's pool holds as many."""

    def __init__(self, cta: Any, target: int, wanted: int) -> None:
        self.cta, self.target, self.wanted = cta, target, wanted

    def ready(self) -> bool:
        return self.cta.register_pool >= self.wanted

    def describe(self) -> str:
        return f"setmaxnreg.inc to {self.target}: {32 * self.wanted} registers, {32 * self.cta.register_pool} are free in the CTA's pool"


@op("setmaxnreg", aligned=True, allow="inc dec sync aligned u32")
def setmaxnreg(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    """Registers of a warp go to its CTA's pool or come from it. A CTA owns what it was launched with: for each thread as many as fit, in
    steps of 8, if ``.minnctapersm`` CTAs are to share a multiprocessor, or ``.maxnreg``."""
    n = I.args[0].value
    if not 24 <= n <= 256 or n % 8:
        raise I.unsupported(f"setmaxnreg {n}: PTX allows 24..256 in steps of 8")
    program, state = g.machine.compiled.program, g.cta.__dict__
    warps = (g.machine.threads + 31) // 32
    launched = min(256, (program.maxnreg or REGISTERS // (32 * warps * program.minnctapersm)) // 8 * 8)
    state.setdefault("register_pool", 0)
    held = state.setdefault("registers_held", {})
    mine = [int(g.first_warp + w) for w in range(g.W // 32) if m[32 * w]]
    more = [n - held.get(w, launched) for w in mine]
    if any(x < 0 if "inc" in I.parts else x > 0 for x in more):
        raise EmulatorError(f"setmaxnreg.{'inc' if 'inc' in I.parts else 'dec'} to {n} of a warp that has {n - more[0]}; {g.where(I)}")
    if sum(more) > g.cta.register_pool:
        return RegistersWait(g.cta, n, sum(more))
    g.cta.register_pool -= sum(more)
    held.update(dict.fromkeys(mine, n))
    g.machine.events += 1
    return None


@op("trap", allow="")
def trap(g: Any, I: Instr, m: np.ndarray) -> None:
    raise EmulatorError(f"trap executed; {g.where(I)}")
