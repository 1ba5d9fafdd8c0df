"""Straight-line PTX → NumPy source.

A maximal run of instructions without branch, barrier or engine operation becomes one Python function over the lanes of
a gang, in two forms: ``full`` (every lane active, writes straight into the register rows) and ``part`` (a mask ``m``).
The register file is seen through typed rows of the same storage, one letter per view::

    P predicate   H/h u16/s16   f float16   U/S/F u32/s32/f32   D/L/E u64/s64/f64
    X float32 pairs of a 64-bit register   U2/H2 the two halves of a 64/32-bit register   Q 128-bit

Emitters live in ``alu.py`` (arithmetic, moves, conversions, ld/st); each returns lines of source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numerics
from .blocks import Block
from .errors import UnsupportedError
from .numerics import f32, f64, i16, i32, i64, u8, u16, u32, u64
from .ptx import FloatImm, Imm, Instr, Not, Reg, Sreg, Sym

VIEW_OF_TYPE = {
    "b32": "U", "u32": "U", "s32": "S", "f32": "F", "b64": "D", "u64": "D", "s64": "L", "f64": "E", "b16": "H",
    "u16": "H", "s16": "h", "f16": "f", "bf16": "H", "b8": "H", "u8": "H", "s8": "h", "pred": "P", "f32x2": "X",
    "f16x2": "U", "bf16x2": "U", "b128": "Q",
}  # fmt: skip
DTYPE_OF_VIEW = {
    "U": u32, "S": i32, "F": f32, "D": u64, "L": i64, "E": f64, "H": u16, "h": i16, "f": np.float16, "P": np.bool_,
}  # fmt: skip
SIZE_OF_TYPE = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip

#: Register class that each view shows; a register of another class has another number space.
CLASS_OF_VIEW = {
    "P": "p", "H": 16, "h": 16, "f": 16, "U": 32, "S": 32, "F": 32, "D": 64, "L": 64, "E": 64, "X": 64, "Q": 128,
}  # fmt: skip

Emitter = Callable[["Codegen", Instr], list[str]]
EMITTERS: dict[str, Emitter] = {}


def alu(*opcodes: str) -> Callable[[Emitter], Emitter]:
    """Register an emitter for base opcodes (the part before the first dot)."""

    def register(f: Emitter) -> Emitter:
        for name in opcodes:
            EMITTERS[name] = f
        return f

    return register


class Codegen:
    """Emits source for one program. ``where`` is ``,where=m`` or empty; ``mask`` the name of the mask or None."""

    def __init__(self, fidelity: Any = None) -> None:
        self.fidelity = fidelity
        self.where = ""
        self.mask: str | None = None
        self.constants: dict[Any, str] = {}
        #: lines around a group: rows written out of order go by a copy
        self.before: list[str] = []
        self.after: dict[str, str] = {}
        self.env: dict[str, Any] = {"np": np, "cp": np.copyto, "N": numerics, "u8": u8, "u16": u16, "u32": u32}
        self.env.update(u64=u64, i16=i16, i32=i32, i64=i64, f32=f32, f64=f64, f16=np.float16)
        for name in ("bf16_to_f32", "f32_to_bf16"):
            self.env[name] = getattr(numerics, name)

    # --- operands ------------------------------------------------------------------------------------------------
    def named(self, key: Any, value: Any) -> str:
        """Name of a constant in the generated module."""
        if key not in self.constants:
            self.constants[key] = f"K{len(self.constants)}"
            self.env[self.constants[key]] = value
        return self.constants[key]

    def instr(self, I: Instr) -> str:
        return self.named(("instr", I.index), I)

    def const(self, view: str, value: int | float) -> str:
        dtype = np.dtype(DTYPE_OF_VIEW[view])
        if dtype.kind in "ui":
            bits = dtype.itemsize * 8
            array = np.array([int(value) & ((1 << bits) - 1)], f"u{bits // 8}").view(dtype)[0]
        else:
            array = dtype.type(value)
        return self.named((view, value), array)

    def val(self, a: Any, view: str) -> str:
        """Source text of operand ``a`` read (or written) as ``view``."""
        if isinstance(a, Reg):
            if a.cls != CLASS_OF_VIEW[view]:
                raise UnsupportedError(f"register {a} of {a.cls} bits as {view}")
            if isinstance(a, Block):
                return self.block(a, view)
            return f"{view}[{a.idx}]"
        if isinstance(a, Imm):
            if view == "P":
                return "True" if a.value else "False"
            if view == "F":
                return self.named(("Fbits", a.value), np.array([a.value & 0xFFFFFFFF], u32).view(f32)[0])
            return self.const(view, a.value)
        if isinstance(a, FloatImm):
            if view in "US" and a.width == 32:
                return self.const(view, a.bits)
            if view in "DL" and a.width == 64:
                return self.const(view, a.bits)
            bits = np.array([a.bits], u32 if a.width == 32 else u64)
            return self.named(("float", a.bits, a.width), bits.view(f32 if a.width == 32 else f64)[0])
        if isinstance(a, Sreg):
            return f"g.special({a.name!r})"
        if isinstance(a, Sym):
            return f"g.symbol({a.name!r})"
        if isinstance(a, Not):
            return f"~{self.val(a.operand, view)}"
        raise UnsupportedError(f"operand {a!r} as {view}")

    # --- common shapes of an emitted line ------------------------------------------------------------------------
    def assign(self, dst: Any, expression: str, view: str) -> list[str]:
        return [f"cp({self.val(dst, view)},{expression},casting='unsafe'{self.where})"]

    def ufunc(self, name: str, view: str, I: Instr, *sources: Any, out: str | None = None) -> list[str]:
        args = ",".join(self.val(x, view) for x in sources)
        return [f"np.{name}({args},out={self.val(I.args[0], out or view)}{self.where})"]

    def pairs(self, dst: Reg, expression: str) -> list[str]:
        """Assign to a 64-bit register seen as two floats per lane."""
        mask = f",where={self.mask}[:,None]" if self.where else ""
        return [f"cp({self.val(dst, 'X')},{expression},casting='unsafe'{mask})"]

    def half(self, whole: Reg, view: str, j: int) -> str:
        """Half ``j`` of a register, by view ``U2`` or ``H2``."""
        if isinstance(whole, Block):
            return f"{self.block(whole, view)}[...,{j}]"
        return f"{view}[{whole.idx}][{j}]"

    def block(self, a: Block, view: str) -> str:
        """Rows of a block of registers; a name for those that are written but do not lie in even steps (see ``after``)."""
        first, step = a.rows[0], a.rows[1] - a.rows[0]
        if step > 0 and a.rows == list(range(first, first + step * len(a.rows), step)):
            return f"{view}w[{first}:{a.rows[-1] + 1}{f':{step}' if step > 1 else ''}]"
        rows = f"{view}w[{self.named(('rows', *a.rows), np.array(a.rows))}]"
        if not a.written:
            return rows
        name = f"_w{view}{a.rows[0]}"
        if rows not in self.after:
            self.before.append(f"{name}={rows}")
            self.after[rows] = name
        return name

    def emit_block(self, I: Instr) -> list[str]:
        """Source of a group of instructions as one (``blocks.stacked``)."""
        self.before, self.after = [], {}
        body = self.emit(I) or []
        return [*self.before, *body, *(f"{rows}={name}" for rows, name in self.after.items())]

    def truncated(self, a: Any, t: str) -> str:
        """Source operand of type ``t`` whose register may be wider: its low bits, seen as ``t``."""
        view = VIEW_OF_TYPE[t]
        if not isinstance(a, Reg) or a.cls == CLASS_OF_VIEW[view]:
            return self.val(a, view)
        size, dtype = SIZE_OF_TYPE[t], np.dtype(DTYPE_OF_VIEW[view])
        if a.cls not in (32, 64) or size * 8 >= a.cls:
            raise UnsupportedError(f"register {a} of {a.cls} bits as {t}")
        low = self.half(a, "U2", 0) if a.cls == 64 else self.val(a, "U")
        return f"{low}.view(i32)" if dtype == np.int32 else f"{low}.astype(u{dtype.itemsize * 8}).view(np.{dtype.name})"

    def emit(self, I: Instr) -> list[str] | None:
        """Source of an instruction, or None if its opcode is not straight-line (an engine has it)."""
        f = EMITTERS.get(I.parts[0])
        if f is None:
            return None
        try:
            return f(self, I)
        except UnsupportedError as error:
            if "PTX line" in str(error):
                raise
            raise I.unsupported(str(error)) from None


def only(I: Instr, allowed: str) -> None:
    """Stop on any qualifier that is not in ``allowed`` (space separated)."""
    known = allowed.split()
    for part in I.parts[1:]:
        if part not in known:
            raise I.unsupported(f"qualifier .{part} of {I.parts[0]} is not modelled (known: {allowed})")
