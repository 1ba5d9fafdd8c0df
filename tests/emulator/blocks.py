"""Instructions of one kind, side by side: a straight run's equal and independent instructions become one NumPy call each.

A call on 32 lanes costs its overhead, not its arithmetic. Compilers unroll, so that a run holds the same instruction many times on
other registers. :func:`grouped` orders a run anew, as its data dependences allow (memory operations keep their order), such that equal
instructions meet; :func:`stacked` turns such a group into one instruction whose register operands are :class:`Block`, rows of the
register file, for the same emitters to emit. Element by element nothing changes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .ptx import SINK, FloatImm, Imm, Instr, Not, Pair, Reg, Vec, registers_of

#: Opcodes whose emitters read and write operands through ``Codegen`` only.
_ELEMENTWISE = {
    "add", "sub", "mul", "fma", "mad", "max", "min", "and", "or", "xor", "not", "neg", "abs", "copysign", "shl", "shr", "shf", "prmt",
    "lop3", "selp", "setp", "cvt", "mov", "ex2", "lg2", "sqrt", "rsqrt", "rcp", "tanh",
}  # fmt: skip
#: Straight-line opcodes without a destination, or with effects beside it: they keep their order.
_ORDERED = {"ld", "ldu", "st", "prefetch", "prefetchu", "pragma", "discard", "applypriority", "griddepcontrol", "nanosleep", "nop"}
_FEWEST, _MOST = 3, 64


class Block(Reg):
    """One operand of a group: a register of each of its instructions."""

    __slots__ = ("rows", "written")

    def __init__(self, cls: Any, rows: list[int], written: bool) -> None:
        super().__init__(cls, -1, f"rows {rows}")
        self.rows, self.written = rows, written


def _form(a: Any, written: bool) -> Any:
    """What two operands must share to stand in one group; None: not in any."""
    if isinstance(a, Reg):
        return (a.cls,)
    if isinstance(a, (Imm, FloatImm)) and not written:
        return a
    if isinstance(a, (Vec, Pair)):
        items = [_form(x, written) for x in a.items]
        return None if None in items else (type(a), *items)
    if isinstance(a, Not):
        inner = _form(a.operand, written)
        return None if inner is None else (Not, inner)
    return a if a is SINK else None


def _kind(I: Instr) -> Any:
    if I.parts[0] not in _ELEMENTWISE or I.guard is not None or not I.args or I.parts[-1] == "b128":
        return None
    if "hi" in I.parts and I.parts[-1] in ("u64", "s64"):  # element by element in Python
        return None
    forms = [_form(a, n == 0) for n, a in enumerate(I.args)]
    return None if None in forms else (I.op, *forms)


def grouped(instrs: list[Instr]) -> list[list[Instr]]:
    """The run in an order that its dependences allow, cut into groups of equal, independent instructions (most of them single)."""
    kinds = [_kind(I) for I in instrs]
    after: list[list[int]] = [[] for _ in instrs]
    waits = [0] * len(instrs)
    writer: dict[Any, int] = {}
    readers: dict[Any, list[int]] = defaultdict(list)
    ordered = -1
    for n, I in enumerate(instrs):
        before = set()
        effects = I.parts[0] in _ORDERED
        if effects:
            before.add(ordered)
            ordered = n
        has_destination = not effects or I.parts[0] in ("ld", "ldu")
        written = {(r.cls, r.idx) for r in registers_of(I.args[0])} if has_destination and I.args else set()
        read = {(r.cls, r.idx) for a in (I.args[1:] if has_destination else I.args) for r in registers_of(a)}
        if I.guard is not None:
            read |= {(I.guard.cls, I.guard.idx)} | written
        for key in read:
            before.add(writer.get(key, -1))
        for key in written:
            before.add(writer.get(key, -1))
            before.update(readers.pop(key, ()))
            writer[key] = n
        for key in read - written:
            readers[key].append(n)
        before.discard(-1)
        before.discard(n)
        for b in before:
            after[b].append(n)
        waits[n] = len(before)
    left: dict[Any, int] = defaultdict(int)
    for k in kinds:
        left[k] += 1
    ready: dict[Any, list[int]] = defaultdict(list)
    for n, w in enumerate(waits):
        if not w:
            ready[kinds[n]].append(n)
    out: list[list[Instr]] = []
    while ready:
        kind = None if None in ready else max(ready, key=lambda k: (len(ready[k]) == left[k], len(ready[k])))
        chosen = sorted(ready.pop(kind))
        if kind is not None and len(chosen) > _MOST:
            chosen, ready[kind] = chosen[:_MOST], chosen[_MOST:]
        left[kind] -= len(chosen)
        if kind is None or len(chosen) < _FEWEST:
            out += [[instrs[n]] for n in chosen]
        else:
            out.append([instrs[n] for n in chosen])
        for c in chosen:
            for n in after[c]:
                waits[n] -= 1
                if not waits[n]:
                    ready[kinds[n]].append(n)
    return out


def _stack(operands: list[Any], written: bool) -> Any:
    first = operands[0]
    if isinstance(first, Reg):
        return Block(first.cls, [a.idx for a in operands], written)
    if isinstance(first, (Vec, Pair)):
        return type(first)(tuple(_stack(list(items), written) for items in zip(*(a.items for a in operands), strict=True)))
    return Not(_stack([a.operand for a in operands], written)) if isinstance(first, Not) else first


def stacked(group: list[Instr]) -> Instr:
    """One instruction that does all of a group."""
    first = group[0]
    args = [_stack([I.args[n] for I in group], n == 0) for n in range(len(first.args))]
    whole = Instr(first.op, args, None, False, first.line, first.loc)
    whole.index = first.index
    return whole
