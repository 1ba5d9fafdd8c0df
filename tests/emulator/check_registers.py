"""``wgmma.fence``: the order between a warp's own register accesses and its products.

PTX ISA, ``wgmma.fence``: it must stand before the first ``wgmma.mma_async`` of a kernel, and between any register access
by a thread and a ``wgmma.mma_async`` that uses the same register, as accumulator or as fragment of A; only accumulators
that pass between products of one shape need none.

Each warp keeps, per register that products use, the time of its last write by an ordinary instruction, of its last read
by one, and of its last product. Time is a count of program units. A product whose registers were touched after the warp's
last fence is reported. Register-to-register moves are no access: they rename a value (the compiler puts such copies between
fence and product when it ties operands), so the time of the *write* goes with the value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .ptx import Instr, Mem, Reg, Vec, registers_of

_Key = tuple[Any, int]


def _registers(a: Any) -> list[_Key]:
    return [(r.cls, r.idx) for r in registers_of(a)]


def _is_product(I: Instr) -> bool:
    return I.op.startswith("wgmma.mma_async")


def _renames(I: Instr) -> bool:
    """A move whose sources are registers only."""
    source = I.args[1] if I.parts[0] == "mov" and len(I.args) == 2 else None
    return I.guard is None and (isinstance(source, Reg) or (isinstance(source, Vec) and all(isinstance(x, Reg) for x in source.items)))


class Layout:
    """Which registers of a program matter, numbered from 0, and what each unit does to them. Computed once per program."""

    def __init__(self, compiled: Any) -> None:
        instrs = compiled.program.instrs
        products = [I for I in instrs if _is_product(I)]
        wanted = {r for I in products for a in I.args[:2] if isinstance(a, Vec) for r in _registers(a)}
        moves = [I for I in instrs if _renames(I)]
        self.has_products = bool(products)
        grew = True
        while grew:
            more = {r for I in moves if wanted.intersection(_registers(I.args[0])) for r in _registers(I.args[1])} - wanted
            wanted |= more
            grew = bool(more)
        self.number = {r: i for i, r in enumerate(sorted(wanted, key=str))}
        self.units = [self._unit(u.instrs) for u in compiled.units]

    def _unit(self, instrs: list[Instr]) -> Any:
        """(written, read, renamed from, renamed to) as index arrays, or None if the unit touches nothing that matters."""
        from .check import _NO_DESTINATION

        origin: dict[_Key, frozenset[_Key] | None] = {}  # None: written here; else values at entry
        read: set[_Key] = set()
        for I in instrs:
            if I.parts[0] in ("wgmma", "bra", "ret", "exit"):
                continue
            if _renames(I):
                found = [origin.get(r, frozenset([r])) for r in _registers(I.args[1])]
                value = None if any(f is None for f in found) else frozenset().union(*found)  # type: ignore[arg-type]
                for r in _registers(I.args[0]):
                    if r in self.number:
                        origin[r] = value
                continue
            writes = I.parts[0] not in _NO_DESTINATION and bool(I.args) and not isinstance(I.args[0], Mem)
            for a in I.args[1:] if writes else I.args:
                read.update(r for r in _registers(a) if r in self.number)
            if writes:
                origin.update((r, None) for r in _registers(I.args[0]) if r in self.number)
        if not origin and not read:
            return None
        index = self.number
        written = np.array([index[r] for r, o in origin.items() if o is None], np.intp)
        pairs = [(index[r], [index[x] for x in o if x in index]) for r, o in origin.items() if o is not None]
        pairs = [(r, o) for r, o in pairs if o]
        width = max((len(o) for _, o in pairs), default=1)
        sources = np.array([(o + o[:1] * width)[:width] for _, o in pairs], np.intp).reshape(-1, width)
        targets = np.array([r for r, _ in pairs], np.intp)
        return written, np.array([index[r] for r in sorted(read, key=str)], np.intp), sources, targets


def layout(compiled: Any) -> Layout:
    found = compiled.__dict__.get("register_layout")
    if found is None:
        found = compiled.__dict__["register_layout"] = Layout(compiled)
    return found


class Registers:
    """Times of one warp."""

    def __init__(self, plan: Layout) -> None:
        n = len(plan.number)
        self.plan, self.now, self.fenced, self.before = plan, 1, 0, 0
        self.fence_at: Instr | None = None
        self.written, self.read, self.produced = (np.zeros(n, np.int64) for _ in range(3))
        self.shape = np.zeros(n, np.int64)

    def step(self, unit: int) -> None:
        """The unit is about to run."""
        effect = self.plan.units[unit]
        if effect is None:
            return
        self.now += 1
        written, read, sources, targets = effect
        if targets.size:
            self.written[targets], self.produced[targets] = self.written[sources].max(1), self.produced[sources].max(1)
            self.shape[targets] = self.shape[sources[:, 0]]
        self.written[written] = self.now
        self.read[read] = self.now

    def fence(self, I: Instr) -> None:
        self.before, self.fence_at = self.fenced, I
        self.now += 1
        self.fenced = self.now

    def product(self, g: Any, I: Instr, shape: int) -> None:
        """Check a product about to be issued."""
        number = self.plan.number
        d = np.array([number[r] for r in _registers(I.args[0])], np.intp)
        a = np.array([number[r] for r in _registers(I.args[1])], np.intp) if isinstance(I.args[1], Vec) else np.zeros(0, np.intp)
        both = np.concatenate([d, a])
        touched = int(max(self.written[both].max(), self.read[both].max()))
        other = self.produced[d][self.shape[d] != shape]
        touched = max(touched, int(other.max(initial=0)), int(self.produced[a].max(initial=0)))
        if self.fenced == 0 or touched > self.fenced:
            late = both[np.maximum(self.written, self.read)[both] > self.fenced]
            first = next((r for r, i in number.items() if late.size and i == late[0]), None)
            if not self.fenced:
                place = "first product of the warp"
            else:
                place = f"register {first[1]} of {first[0]} bits" if first else "accumulators of a product of another shape"
            g.cluster.checker.report(
                "missing wgmma.fence",
                place,
                self.fence_at.where() if self.fence_at else "",
                g.where(I),
                "wgmma.fence between the last access of the product's registers and the product",
                (-2, I.index),
            )  # fmt: skip
        elif self.fence_at is not None and (self.before == 0 or touched > self.before):
            g.machine.ordered.add(self.fence_at.index)
        self.now += 1
        self.produced[d], self.shape[d] = self.now, shape
