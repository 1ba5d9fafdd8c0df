"""SIMT core: a gang of warps in lock step, with divergence.

A *gang* is ``W`` lanes (32 or a multiple). Its lanes live in *fragments*: sets of lanes at one program counter. The
fragment with the smallest counter runs first and fragments that meet are merged, which reconverges structured control
flow. ``aligned`` operations wait until all live lanes of each of their warps have arrived.

With ``W = 32`` a gang is one warp: the unit of the race checker and of the adversarial schedulers. Wider gangs are
faster and serve runs that look only at numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import alu as _alu  # noqa: F401  registers the emitters
from .blocks import grouped, stacked
from .codegen import Codegen
from .errors import EmulatorError
from .numerics import f16, f32, f64, i16, i32, i64, u8, u16, u32, u64
from .ptx import FloatImm, Imm, Instr, Program, Reg, Sreg, Sym
from .registry import Wait, find

if TYPE_CHECKING:
    from .machine import CTA, Cluster

count_nonzero = np._core.multiarray.count_nonzero  # without its wrapper: the fastest question about a few lanes

STRAIGHT, BRANCH, EXIT, ENGINE = range(4)
#: Backward branches a gang may take before it yields to others: a spinning warp must not keep the machine.
QUANTUM = 200


class Unit:
    """A schedulable piece of program: a straight run, a branch, an exit, or one engine operation."""

    __slots__ = ("aligned", "full", "index", "instrs", "kind", "n", "part", "run", "target")

    def __init__(self, kind: int, instrs: list[Instr]) -> None:
        self.kind, self.instrs, self.n = kind, instrs, len(instrs)
        self.target: Any = None
        self.aligned = False
        self.run: Callable[..., Any] | None = None
        self.full: Callable[..., None] | None = None
        self.part: Callable[..., None] | None = None
        self.index = -1


_AXES = ["%tid", "%ntid", "%ctaid", "%nctaid", "%cluster_ctaid", "%cluster_nctaid", "%clusterid", "%nclusterid"]
SPECIAL_REGISTERS = {f"{base}.{axis}" for base in _AXES for axis in "xyz"} | set(
    [
        "%laneid",
        "%warpid",
        "%nwarpid",
        "%smid",
        "%cluster_ctarank",
        "%cluster_nctarank",
        "%clock",
        "%clock64",
        "%globaltimer",
        "%dynamic_smem_size",
        "%lanemask_eq",
        "%lanemask_lt",
        "%lanemask_le",
        "%lanemask_gt",
        "%lanemask_ge",
    ]
)

_VIEW = re.compile(r"\b(U|S|F|D|L|E|H|h|f|X|U2|H2|P|Q)(w?)\[")


def _header(body: list[str]) -> str:
    """Binds the views of registers that a body uses."""
    used = dict.fromkeys(x for line in body for x in _VIEW.findall(line))
    return "  " + ";".join(f"{x}w=g.{x}.whole" if w else f"{x}=g.{x}" for x, w in used) + "\n" if used else ""


class _Rows(dict[int, Any]):
    """Rows of registers seen one way, each made when it is first used: a warp uses few of a program's registers."""

    def __init__(self, whole: np.ndarray, halves: bool = False) -> None:
        self.whole, self.halves = whole, halves

    def __missing__(self, i: int) -> Any:
        row = self.whole[i]
        self[i] = row = (row[:, 0], row[:, 1]) if self.halves else row
        return row


class RegisterFile:
    """Registers of one gang, with their views. Kept for the next gang when one ends: pages and views are what is dear."""

    def __init__(self, counts: dict[Any, int], width: int) -> None:
        r16, r32, r64 = (np.empty((max(counts[n], 1), width), t) for n, t in ((16, u16), (32, u32), (64, u64)))
        p, q = np.empty((max(counts["p"], 1), width), bool), np.empty((max(counts[128], 1), width, 2), u64)
        self.whole, self.zeroed = (r16, r32, r64), (p, q)
        self.views: dict[str, Any] = {
            "P": _Rows(p), "Q": q, "U": _Rows(r32), "S": _Rows(r32.view(i32)), "F": _Rows(r32.view(f32)),
            "D": _Rows(r64), "L": _Rows(r64.view(i64)), "E": _Rows(r64.view(f64)),
            "H": _Rows(r16), "h": _Rows(r16.view(i16)), "f": _Rows(r16.view(f16)),
            "X": _Rows(r64.view(f32).reshape(-1, width, 2)),
            "U2": _Rows(r64.view(u32).reshape(-1, width, 2), True), "H2": _Rows(r32.view(u16).reshape(-1, width, 2), True),
        }  # fmt: skip

    def fill(self, byte: int) -> None:
        """Every register's bytes; predicates and 128-bit registers are zero."""
        for a in self.whole:
            a.view(u8).fill(byte)
        for a in self.zeroed:
            a.fill(0)


_RECENT: list[Compiled] = []


class Compiled:
    """A program as units, ready to run."""

    def __init__(self, program: Program, fidelity: Any = None) -> None:
        self.program = program
        self.units: list[Unit] = []
        self.codegen = Codegen(fidelity)
        #: register files of gangs that have ended
        self.spare: list[RegisterFile] = []
        at: dict[int, int] = {}
        starts = set(program.labels.values())
        run: list[Instr] = []

        def close() -> None:
            if run:
                at[run[0].index] = len(self.units)
                self.units.append(Unit(STRAIGHT, list(run)))
                run.clear()

        for i, I in enumerate(program.instrs):
            if i in starts:
                close()
            unknown = [a for a in I.args if isinstance(a, Sreg) and a.name not in SPECIAL_REGISTERS]
            if unknown:
                raise I.unsupported(f"special register {unknown[0]} is not modelled")
            if I.parts[0] in ("bra", "ret", "exit"):
                close()
                unit = Unit(BRANCH if I.parts[0] == "bra" else EXIT, [I])
            elif self.codegen.emit(I) is not None:
                run.append(I)
                continue
            else:
                found = find(I)
                close()
                unit = Unit(ENGINE, [I])
                unit.run, unit.aligned = found.run, found.aligned
            at[i] = len(self.units)
            self.units.append(unit)
        close()
        at[len(program.instrs)] = len(self.units)
        self.units.append(Unit(EXIT, []))
        for n, unit in enumerate(self.units):
            unit.index = n
            if unit.kind == BRANCH:
                unit.target = at[program.labels[unit.instrs[0].label or ""]]
        self._generate()

    def registers(self, width: int) -> RegisterFile:
        """A register file for a gang; one that an ended gang has left, if there is one. Only the latest programs keep theirs."""
        if self not in _RECENT:
            _RECENT.append(self)
            if len(_RECENT) > 8:
                _RECENT.pop(0).spare.clear()
        if self.spare and self.spare[-1].whole[0].shape[1] != width:
            self.spare.clear()
        return self.spare.pop() if self.spare else RegisterFile(self.program.counts, width)

    def _generate(self) -> None:
        c, out = self.codegen, []
        for unit in self.units:
            if unit.kind != STRAIGHT:
                continue
            for mode in ("full", "part"):
                body: list[str] = []
                for group in grouped(unit.instrs) if mode == "full" else ([I] for I in unit.instrs):
                    I = group[0]
                    if len(group) > 1:
                        c.where, c.mask = "", None
                        body += c.emit_block(stacked(group))
                        continue
                    if I.guard is None:
                        c.where, c.mask = (",where=m", "m") if mode == "part" else ("", None)
                        body += c.emit(I) or []
                        continue
                    guard = f"{'~' if I.gneg else ''}P[{I.guard.idx}]"
                    body.append(f"_m={guard}{'&m' if mode == 'part' else ''}")
                    body.append("if _m.any():")
                    c.where, c.mask = ",where=_m", "_m"
                    body += ["  " + x for x in c.emit(I) or []]
                out.append(f"def {mode}{unit.index}(g,m):\n{_header(body)}" + "".join(f"  {x}\n" for x in body))
        exec(compile("\n".join(out), f"<{self.program.entry[:40]}>", "exec"), c.env)
        for unit in self.units:
            if unit.kind == STRAIGHT:
                unit.full, unit.part = c.env[f"full{unit.index}"], c.env[f"part{unit.index}"]


class Fragment:
    """Lanes at one program counter."""

    __slots__ = ("full", "lanes", "mask", "pc", "wait")

    def __init__(self, pc: int, mask: np.ndarray, wait: Wait | None = None) -> None:
        self.pc, self.wait = pc, wait
        self.narrow(mask)

    def narrow(self, mask: np.ndarray) -> None:
        """Take other lanes."""
        self.mask, self.lanes = mask, int(count_nonzero(mask))
        self.full = self.lanes == mask.size

    def runnable(self) -> bool:
        return self.wait is None or self.wait.ready()


class Reconverge(Wait):
    """An aligned operation waits for the rest of its warp."""

    def __init__(self, gang: Gang) -> None:
        self.gang, self.seen = gang, 0

    def ready(self) -> bool:
        return False  # cleared by the gang itself once other fragments have moved

    def describe(self) -> str:
        return "the other lanes of its warp (aligned instruction)"


class Gang:
    """``W`` lanes of a CTA: registers, predicates, special registers, fragments."""

    def __init__(self, cluster: Cluster, cta: CTA, first: int, width: int) -> None:
        self.cluster, self.cta, self.W, self.first = cluster, cta, width, first
        self.machine = cluster.machine
        self.memory = cluster.memory
        self.units = cluster.machine.compiled.units
        self.shared_base = cluster.memory.base
        self._file = cluster.machine.compiled.registers(width)
        self._file.fill(0xFF if cluster.machine.poison else 0)
        self.__dict__.update(self._file.views)
        thread = np.arange(first, first + width)
        self.thread, self.lane, self.warp = thread, thread % 32, thread // 32
        self.first_warp = first // 32
        self._special: dict[str, np.ndarray] = {}
        alive = thread < cluster.machine.threads
        self.fragments = [Fragment(0, alive)]
        self.live = alive.copy()
        local = cluster.machine.local_size
        self.local = np.full((width, max(local, 8)), 0xFF if cluster.machine.poison else 0, u8)
        self.local_base: Any = None
        if local:
            self.local_base = self.local.ctypes.data + np.arange(width, dtype=u64) * u64(self.local.shape[1])
        #: state of engines that keep something per gang (commit groups, pending loads), by engine name
        self.state: dict[str, Any] = {}
        #: race checker's clock and taint of this warp (None when checking is off)
        self.clock: Any = None
        self.agent = -1
        #: of a dependent launch, until this gang has waited (``dependents.py``)
        self.past: Any = cluster.machine.past

    # --- operands --------------------------------------------------------------------------------------------------
    def special(self, name: str) -> np.ndarray:
        """Value of a special register, one per lane."""
        found = self._special.get(name)
        if found is None:
            found = self._special[name] = self._make_special(name)
        return found

    def _make_special(self, name: str) -> np.ndarray:
        cluster, cta = self.cluster, self.cta
        bx, by, _ = cluster.machine.block
        base, _, axis = name.partition(".")
        n = "xyz".find(axis) if axis else -1
        per_axis = {
            "%ntid": cluster.machine.block, "%ctaid": cta.ctaid, "%nctaid": cluster.machine.grid,
            "%cluster_nctaid": cluster.shape, "%cluster_ctaid": [c % s for c, s in zip(cta.ctaid, cluster.shape, strict=True)],
            "%clusterid": [c // s for c, s in zip(cta.ctaid, cluster.shape, strict=True)],
            "%nclusterid": [g // s for g, s in zip(cluster.machine.grid, cluster.shape, strict=True)],
        }  # fmt: skip
        single = {
            "%cluster_ctarank": cta.rank, "%cluster_nctarank": len(cluster.ctas), "%smid": cta.rank, "%clock": 0,
            "%dynamic_smem_size": cluster.machine.dynamic_smem, "%nwarpid": (cluster.machine.threads + 31) // 32,
        }  # fmt: skip
        if base == "%tid" and n >= 0:
            return (self.thread, self.thread // bx, self.thread // (bx * by))[n].astype(u32) % u32((bx, by, 1 << 30)[n])
        if base in per_axis and n >= 0:
            return np.full(self.W, per_axis[base][n], u32)
        if name in single:
            return np.full(self.W, single[name], u32)
        if name == "%laneid":
            return self.lane.astype(u32)
        if name == "%warpid":
            return self.warp.astype(u32)
        if name in ("%globaltimer", "%clock64"):
            return np.zeros(self.W, u64)
        if name.startswith("%lanemask_"):
            bit, kind = u32(1) << self.lane.astype(u32), name[len("%lanemask_") :]
            return {"eq": bit, "lt": bit - u32(1), "le": (bit - u32(1)) | bit, "gt": ~((bit - u32(1)) | bit), "ge": ~(bit - u32(1))}[kind]
        raise AssertionError(name)

    def address(self, name: str) -> int:
        """Address of a variable in its own state space."""
        try:
            return self.cta.symbols[name]
        except KeyError:
            raise EmulatorError(f"variable {name!r} has no address") from None

    def symbol(self, name: str) -> np.ndarray:
        return np.full(self.W, self.address(name), u64)

    def ev(self, a: Any, view: str = "U") -> np.ndarray:
        """Operand as one value per lane."""
        if isinstance(a, Reg):
            return getattr(self, view)[a.idx]
        if isinstance(a, Imm):
            dtype, bits = {"U": (u32, 32), "D": (u64, 64), "H": (u16, 16), "P": (np.bool_, 1)}[view]
            return np.full(self.W, a.value & ((1 << bits) - 1), dtype)
        if isinstance(a, FloatImm):
            return np.full(self.W, a.bits, u32 if a.width == 32 else u64)
        if isinstance(a, Sreg):
            return self.special(a.name)
        if isinstance(a, Sym):
            return self.symbol(a.name)
        raise EmulatorError(f"operand {a!r} cannot be read")

    def addr(self, mem: Any, view: str = "U") -> np.ndarray:
        """Addresses of a memory operand, int64 per lane."""
        base = mem.base
        if isinstance(base, Reg):
            view = "D" if base.cls == 64 else "U"
        b = self.ev(base, view).astype(i64)
        return b + mem.offset if mem.offset else b

    def predicate(self, p: Any, lane: int) -> bool:
        """Value of a predicate operand (register or immediate) on a lane."""
        if isinstance(p, Imm):
            return bool(p.value)
        return bool(self.P[p.idx][lane])

    @staticmethod
    def mul_hi64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]).astype(a.dtype)

    def where(self, I: Instr, m: np.ndarray | None = None) -> str:
        """CTA, warp and instruction, for messages."""
        warps = f"warp {self.first_warp}" if self.W == 32 else f"warps {self.first_warp}-{self.first_warp + self.W // 32 - 1}"
        return f"CTA {self.cta.ctaid} {warps}: {I.where()}"

    def release(self) -> None:
        """Drop the registers; the gang still knows its place, for messages."""
        for name in (*self._file.views, "local", "local_base", "shared_base"):
            setattr(self, name, None)
        self.machine.compiled.spare.append(self._file)
        self.state, self.past = {}, None
        self._special = {}

    # --- running ---------------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        return not self.fragments

    def runnable(self) -> bool:
        fragments = self.fragments
        if len(fragments) == 1:
            w = fragments[0].wait
            return w is None or w.__class__ is Reconverge or w.ready()
        return any(f.runnable() for f in fragments)

    def release_timeouts(self) -> bool:
        """Let every sleeping ``try_wait`` return false (its time limit passed). True if there was one."""
        found = False
        for f in self.fragments:
            if f.wait is not None and f.wait.timeout:
                f.wait = None
                self.state["timeout"] = True
                found = True
        return found

    def run(self) -> bool:
        """Run until every fragment sleeps or ended, or the quantum is used up; True if anything was executed."""
        units, fragments, machine = self.units, self.fragments, self.machine
        progress, turns, steps = False, 1 if machine.spins else QUANTUM, 0
        hits = machine.hits
        taint_step = None if self.clock is None else self.clock.taint_step
        registers = None if self.clock is None else self.clock.registers
        while fragments:
            if len(fragments) == 1:
                f = fragments[0]
                if f.wait is not None:
                    if f.wait.__class__ is not Reconverge and not f.wait.ready():
                        break
                    f.wait = None
                alone = True
            else:
                f = self._pick()
                if f is None:
                    break
                alone = len(fragments) == 1
            while True:
                unit = units[f.pc]
                kind = unit.kind
                steps += 1
                hits[f.pc] += 1
                if taint_step is not None and self.clock.tainted:
                    taint_step(self, unit, f.mask)
                if registers is not None:
                    registers.step(f.pc)
                if kind == STRAIGHT:
                    if f.full:
                        unit.full(self, None)
                    else:
                        unit.part(self, f.mask)
                    f.pc += 1
                    progress = True
                elif kind == BRANCH:
                    I = unit.instrs[0]
                    progress = True
                    if I.guard is None:
                        taken = True
                    else:
                        p = self.P[I.guard.idx]
                        t = p if f.full else p & f.mask
                        n, lanes = count_nonzero(t), f.lanes
                        if I.gneg:
                            n = lanes - n
                        if n == 0:
                            taken = False
                        elif n == lanes:
                            taken = True
                        else:
                            t = (~p if I.gneg else p) & f.mask
                            fragments.append(Fragment(unit.target, t))
                            f.narrow(f.mask & ~t)
                            f.pc += 1
                            break
                    if taken:
                        if unit.target <= f.pc:
                            turns -= 1
                        f.pc = unit.target
                        if turns < 0:
                            machine.count(steps)
                            return True
                    else:
                        f.pc += 1
                    if not alone:
                        break
                elif kind == ENGINE:
                    if unit.aligned and not f.full and not alone and not self._whole_warps(f.mask):
                        f.wait = Reconverge(self)
                        break
                    I, m = unit.instrs[0], f.mask
                    if I.guard is not None:
                        p = self.P[I.guard.idx]
                        m = m & (~p if I.gneg else p)
                        if not count_nonzero(m):
                            f.pc += 1
                            continue
                    result = unit.run(self, I, m)
                    if result is None:
                        f.pc += 1
                        progress = True
                    elif isinstance(result, Wait):
                        f.wait = result
                        break
                    else:
                        f.pc += 1
                        progress = True
                        rest = f.mask & ~m
                        parts = ([(rest, None)] if rest.any() else []) + result
                        f.narrow(parts[0][0])
                        f.wait = parts[0][1]
                        fragments.extend(Fragment(f.pc, mask, wait) for mask, wait in parts[1:])
                        break
                else:
                    I0 = unit.instrs[0] if unit.instrs else None
                    m = f.mask
                    if I0 is not None and I0.guard is not None:
                        p = self.P[I0.guard.idx]
                        m = m & (~p if I0.gneg else p)
                    if m.any():
                        self.live &= ~m
                        self.cluster.live -= int(m.sum())
                        machine.events += 1
                    progress = True
                    f.narrow(f.mask & ~m)
                    if f.lanes:
                        f.pc += 1
                        continue
                    fragments.remove(f)
                    break
                if not alone and any(x is not f and x.pc <= f.pc for x in fragments):
                    break
        machine.count(steps)
        return progress

    def _whole_warps(self, mask: np.ndarray) -> bool:
        """All live lanes of every warp that ``mask`` touches are in it."""
        m, live = mask.reshape(-1, 32), self.live.reshape(-1, 32)
        return not (m.any(1) & (m != live).any(1)).any()

    def _pick(self) -> Fragment | None:
        """Merge fragments that met, then the runnable one with the smallest program counter."""
        fragments = self.fragments
        fragments.sort(key=lambda x: x.pc)
        i = 0
        while i + 1 < len(fragments):
            a, b = fragments[i], fragments[i + 1]
            mergeable = all(x.wait is None or x.wait.__class__ is Reconverge for x in (a, b))
            if a.pc == b.pc and mergeable:
                a.narrow(a.mask | b.mask)
                a.wait = None
                del fragments[i + 1]
            else:
                i += 1
        if len(fragments) == 1 and fragments[0].wait.__class__ is Reconverge:
            fragments[0].wait = None
        for f in fragments:
            if f.wait.__class__ is Reconverge and self._whole_warps(f.mask):
                f.wait = None
            if f.runnable():
                f.wait = None
                return f
        return None
