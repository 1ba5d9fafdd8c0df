"""``atom`` and ``red``: atomic read-modify-write of global and shared memory.

The lanes of a warp are served one after another, in lane order. Packed and vector forms are one operation per element.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import check_sm90
from ..codegen import SIZE_OF_TYPE
from ..errors import MemoryFaultError
from ..memory import host_read
from ..numerics import bf16_to_f32, f16, f32, f32_to_bf16, u16
from ..ptx import FloatImm, Imm, Instr, Mem, Reg, Vec
from ..registry import op

_KINDS = ("add", "min", "max", "inc", "dec", "cas", "exch", "and", "or", "xor")
_ALLOW = (
    f"{' '.join(_KINDS)} global shared shared::cta shared::cluster relaxed acquire release acq_rel cta cluster gpu sys noftz "
    "v2 v4 v8 L2::cache_hint b32 u32 s32 b64 u64 s64 f32 f64 f16 bf16 f16x2 bf16x2"
)
_NUMPY = {"b32": "u4", "u32": "u4", "s32": "i4", "b64": "u8", "u64": "u8", "s64": "i8", "f32": "f4", "f64": "f8"}
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def _check(I: Instr) -> None:
    t, kind = I.parts[-1], next((x for x in _KINDS if x in I.parts), None)
    if kind is None or t not in SIZE_OF_TYPE:
        raise I.unsupported("form of atom/red")
    if t in _FLOATS and (kind not in ("add", "min", "max") or (t in ("f32", "f64") and kind != "add" and not _vector(I))):
        raise I.unsupported(f"{kind} of {t}")
    if t not in _FLOATS and (_vector(I) or (kind in ("inc", "dec") and t != "u32")):
        raise I.unsupported(f"{kind} of {t}")


def _vector(I: Instr) -> int:
    return {"v2": 2, "v4": 4, "v8": 8}.get(next((x for x in I.parts if x in ("v2", "v4", "v8")), ""), 0)


def combine(kind: str, t: str, old: np.ndarray, value: np.ndarray, other: Any) -> np.ndarray:
    """New contents: ``old (kind) value`` on elements of type ``t``, as raw bytes of the same length."""
    if t not in _NUMPY:
        a, b = old.view(u16), value.view(u16)
        fa, fb = (bf16_to_f32(x) if t.startswith("bf") else x.view(f16).astype(f32) for x in (a, b))
        r = {"add": np.add, "min": np.fmin, "max": np.fmax}[kind](fa, fb)
        return (f32_to_bf16(r) if t.startswith("bf") else r.astype(f16).view(u16)).view(np.uint8)
    dtype = np.dtype(_NUMPY[t])
    a, b = old.view(dtype), value.view(dtype)
    if kind in ("min", "max") and dtype.kind == "f":
        r = (np.fmin if kind == "min" else np.fmax)(a, b)
    elif kind == "cas":
        r = np.where(a == b, other.view(dtype), a)
    elif kind == "exch":
        r = b
    elif kind == "inc":
        r = np.where(a >= b, 0, a + dtype.type(1))
    elif kind == "dec":
        r = np.where((a == 0) | (a > b), b, a - dtype.type(1))
    else:
        table = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        r = table[kind](a, b)
    return r.astype(dtype).view(np.uint8)


def _values(g: Any, a: Any, t: str) -> np.ndarray:
    """Operand as raw bytes ``[lanes, size]``."""
    size = SIZE_OF_TYPE[t]
    items = a.items if isinstance(a, Vec) else (a,)
    columns = []
    for x in items:
        if isinstance(x, Reg):
            view = {16: "H", 32: "U", 64: "D"}[x.cls]
        else:
            assert isinstance(x, (Imm, FloatImm))
            view = {2: "H", 4: "U", 8: "D"}[size]
        v = g.ev(x, view)
        if v.dtype.itemsize != size:
            v = v.astype(f"u{size}")
        columns.append(np.ascontiguousarray(v))
    return np.stack(columns, 1).view(np.uint8).reshape(g.W, size * len(items))


@op("atom", "red", allow=f"{_ALLOW} async", check=_check, writes=True)
def atomic(g: Any, I: Instr, m: np.ndarray) -> None:
    if "async" in I.parts:
        raise I.unsupported("red.async")
    A, t = I.args, I.parts[-1]
    kind = next(x for x in _KINDS if x in I.parts)
    returns = not isinstance(A[0], Mem)
    destination = A[0] if returns else None
    mem, operands = (A[1], A[2:]) if returns else (A[0], A[1:])
    value = _values(g, operands[0], t)
    other = _values(g, operands[1], t) if kind == "cas" else None
    n = value.shape[1]
    addresses = g.addr(mem, "D")
    lanes = np.flatnonzero(m)
    memory = g.memory
    shared = any(x.split("::")[0] == "shared" for x in I.parts)
    is_global = "global" in I.parts
    if not shared and not is_global:
        inside = (addresses >= memory.base) & (addresses < memory.base + memory.arena.size)
        if inside[lanes].any() and not inside[lanes].all():
            raise I.unsupported(f"one generic access to both shared and global memory, {g.where(I)}")
        shared = bool(inside[lanes].all())
        if shared:
            addresses = addresses - memory.base
    here = addresses[lanes]
    if (here % n).any():
        raise MemoryFaultError(f"atomic of {n} bytes at {int(here[(here % n).argmax()]):#x} is not aligned; {g.where(I)}")
    if shared:
        memory.check_shared(here, n, lambda: g.where(I))
    else:
        memory.globals.check(here, n, lambda: g.where(I))
        if g.past is not None:
            g.past.touch(g, I, here, n)
    if g.clock is not None and shared:
        check_sm90.atomic_access(g, I, here, n)
    old = np.empty((lanes.size, n), np.uint8)
    for i, lane in enumerate(lanes):
        at = int(addresses[lane])
        cell = memory.arena[at : at + n] if shared else host_read(at, n)
        old[i] = cell
        cell[:] = combine(kind, t, old[i], value[lane], None if other is None else other[lane])
    if destination is not None:
        registers = destination.items if isinstance(destination, Vec) else (destination,)
        parts = old.view(f"u{SIZE_OF_TYPE[t]}")
        for j, r in enumerate(registers):
            if isinstance(r, Reg):
                getattr(g, {16: "H", 32: "U", 64: "D"}[r.cls])[r.idx][lanes] = parts[:, j]
    g.machine.events += 1
