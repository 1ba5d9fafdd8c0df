"""Emitters of straight-line instructions: arithmetic, logic, moves, comparisons, conversions, loads and stores.

Semantics follow the PTX ISA. Approximate functions (ex2, lg2, rcp, rsqrt, sqrt, tanh, sin, cos) are computed exactly
rounded from float32 NumPy; hardware differs by its documented few ulp (``fidelity.py`` adds that error on request).
``.ftz`` flushes only if the fidelity switch asks for it. Fused multiply-add goes through float64: products are exact
there, and the double rounding is a last-bit event.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .codegen import SIZE_OF_TYPE, VIEW_OF_TYPE, Codegen, alu, only
from .numerics import u32
from .ptx import SINK, FloatImm, Imm, Instr, Mem, Pair, Reg, Sym, Vec

_INT = "u16 s16 u32 s32 u64 s64 b16 b32 b64"
_WIDE = {"H": ("U", "u32"), "h": ("S", "i32"), "U": ("D", "u64"), "S": ("L", "i64")}


def _flush(c: Codegen, I: Instr) -> list[str]:
    """Flush a subnormal float32 result to zero where the instruction says .ftz and the switch is on."""
    if "ftz" not in I.parts or not (c.fidelity and c.fidelity.ftz):
        return []
    v = c.val(I.args[0], "F")
    return [f"cp({v},0,where=(np.abs({v})<f32(1.1754944e-38)){'&' + c.mask if c.where else ''})"]


@alu("add", "sub")
def _add(c: Codegen, I: Instr) -> list[str]:
    op, t, A = I.parts[0], I.parts[-1], I.args
    name = "add" if op == "add" else "subtract"
    if t == "f32x2":
        only(I, "rn rm ftz f32x2")
        if "rm" in I.parts:
            if op == "sub":
                raise I.unsupported("sub.rm.f32x2")
            return c.pairs(A[0], f"N.add_down({c.val(A[1], 'X')},{c.val(A[2], 'X')})")
        return c.pairs(A[0], f"np.{name}({c.val(A[1], 'X')},{c.val(A[2], 'X')})")
    if t in ("bf16", "f16") and I.parts[-2] == "f32":  # add.rn.f32.f16: the first operand is narrow
        only(I, "rn f32 bf16 f16")
        narrow = f"bf16_to_f32({c.val(A[1], 'H')})" if t == "bf16" else f"{c.val(A[1], 'H')}.view(f16).astype(f32)"
        return c.assign(A[0], f"np.{name}({narrow},{c.val(A[2], 'F')})", "F")
    if t in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half(c, I, {"add": "{a}+{b}", "sub": "{a}-{b}"}[op])
    if t in ("s16x2", "u16x2") and op == "add":
        return _short_pairs(c, I, "add")
    only(I, f"{_INT} rn rm rp f32 f64 ftz")
    view = VIEW_OF_TYPE[t]
    if "rm" in I.parts or "rp" in I.parts:
        if op == "sub" or t != "f32":
            raise I.unsupported("directed rounding outside add.f32")
        name = "add_down" if "rm" in I.parts else "add_up"
        return c.assign(A[0], f"N.{name}({c.val(A[1], view)},{c.val(A[2], view)})", view)
    return c.ufunc(name, view, I, A[1], A[2]) + _flush(c, I)


def _words(c: Codegen, x: Any) -> str:
    """A pair operand as 32-bit words of every lane, one written in the instruction too."""
    return c.val(x, "U") if isinstance(x, Reg) else f"np.tile({c.named(('pair', x.value), np.array([x.value & 0xFFFFFFFF], u32))},g.W)"


def _halves(c: Codegen, x: Any, t: str) -> str:
    """Operand of type f16, bf16 or a pair of either as an array of its elements, f16 or float32 (bf16); a pair's lie side by side."""
    dtype, packed = "u16" if t.startswith("bf") else "f16", t.endswith("x2")
    elements = f"{_words(c, x) if packed else c.val(x, 'H')}.view({dtype})"
    return f"bf16_to_f32({elements})" if t.startswith("bf") else elements


def _half(c: Codegen, I: Instr, expression: str) -> list[str]:
    """Element-wise arithmetic on f16/bf16, packed or not: f16 as NumPy rounds it, once (add, mul: by way of float32, which has enough
    bits for that), bf16 through float32."""
    only(I, "rn f16x2 bf16x2 f16 bf16 ftz NaN relu")
    t, A = I.parts[-1], I.args
    value = expression.format(**{n: _halves(c, x, t) for n, x in zip("abc", A[1:], strict=False)})
    if "relu" in I.parts:
        if I.parts[0] != "fma":
            raise I.unsupported(f".relu of {I.parts[0]}")
        value = f"N.clamped({value})"
    value = f"f32_to_bf16({value})" if t.startswith("bf") else f"({value}).astype(f16,copy=False)"
    return c.assign(A[0], f"{value}.view({'u32' if t.endswith('x2') else 'u16'})", "U" if t.endswith("x2") else "H")


def _short_pairs(c: Codegen, I: Instr, name: str) -> list[str]:
    """Element-wise arithmetic on pairs of 16-bit integers."""
    only(I, "s16x2 u16x2" + (" relu" if I.parts[-1] == "s16x2" and name != "add" else ""))
    dtype = "i16" if I.parts[-1] == "s16x2" else "u16"
    a, b = (f"{_words(c, x)}.view({dtype})" for x in I.args[1:])
    value = f"np.{name}({a},{b})"
    return c.assign(I.args[0], f"{f'np.maximum({value},i16(0))' if 'relu' in I.parts else value}.view(u32)", "U")


@alu("mul")
def _mul(c: Codegen, I: Instr) -> list[str]:
    t, A = I.parts[-1], I.args
    if t == "f32x2":
        only(I, "rn ftz f32x2")
        return c.pairs(A[0], f"np.multiply({c.val(A[1], 'X')},{c.val(A[2], 'X')})")
    if t in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half(c, I, "{a}*{b}")
    only(I, f"lo hi wide rn ftz f32 f64 {_INT}")
    view = VIEW_OF_TYPE[t]
    if "lo" in I.parts or view in "FE":
        return c.ufunc("multiply", view, I, A[1], A[2]) + _flush(c, I)
    if view in _WIDE and ("wide" in I.parts or "hi" in I.parts):
        wide, dtype = _WIDE[view]
        product = f"{_widened(c, A[1], view)}*{_widened(c, A[2], view)}"
        if "wide" in I.parts:
            return c.assign(A[0], product, wide)
        return c.assign(A[0], f"({product})>>{dtype}({SIZE_OF_TYPE[t] * 8})", view)
    if "hi" in I.parts and view in "DL":
        return c.assign(A[0], f"g.mul_hi64({c.val(A[1], view)},{c.val(A[2], view)})", view)
    raise I.unsupported("form of mul")


def _widened(c: Codegen, x: Any, view: str) -> str:
    wide, dtype = _WIDE[view]
    if not isinstance(x, Imm):
        return f"{c.val(x, view)}.astype({dtype})"
    bits = 16 if view in "Hh" else 32  # of the operand: -1 is 0xFFFFFFFF to an unsigned product
    value = x.value & ((1 << bits) - 1)
    return c.const(wide, value - (1 << bits) if view in "hS" and value >> (bits - 1) else value)


@alu("mul24")
def _mul24(c: Codegen, I: Instr) -> list[str]:
    raise I.unsupported("mul24")


@alu("mad")
def _mad(c: Codegen, I: Instr) -> list[str]:
    only(I, f"lo wide {_INT}")
    t, A = I.parts[-1], I.args
    view = VIEW_OF_TYPE[t]
    if "lo" in I.parts:
        return c.assign(A[0], f"{c.val(A[1], view)}*{c.val(A[2], view)}+{c.val(A[3], view)}", view)
    wide, _ = _WIDE[view]
    return c.assign(A[0], f"{_widened(c, A[1], view)}*{_widened(c, A[2], view)}+{c.val(A[3], wide)}", wide)


@alu("fma")
def _fma(c: Codegen, I: Instr) -> list[str]:
    t, A = I.parts[-1], I.args
    if t == "f32x2":
        only(I, "rn ftz f32x2")
        return c.pairs(A[0], f"({c.val(A[1], 'X')}.astype(f64)*{c.val(A[2], 'X')}+{c.val(A[3], 'X')})")
    if t in ("bf16", "f16") and I.parts[-2] == "f32":  # fma.rn.f32.bf16: mixed precision
        only(I, "rn f32 bf16 f16")
        a, b = (f"bf16_to_f32({c.val(x, 'H')})" if t == "bf16" else f"{c.val(x, 'H')}.view(f16).astype(f32)" for x in A[1:3])
        return c.assign(A[0], f"{a}.astype(f64)*{b}+{c.val(A[3], 'F')}", "F")
    if t in ("f16x2", "bf16x2", "f16", "bf16"):
        # rounded once to f16; to bf16 through float32, which its conversion takes
        return _half(c, I, "{a}.astype(f64)*{b}+{c}" if "bf16" not in t else "({a}.astype(f64)*{b}+{c}).astype(f32)")
    only(I, "rn f32 f64 ftz")
    if t == "f64":
        return c.assign(A[0], f"{c.val(A[1], 'E')}*{c.val(A[2], 'E')}+{c.val(A[3], 'E')}", "E")
    a, b = A[1], A[2]
    if not isinstance(a, Reg):
        a, b = b, a
    first = f"{c.val(a, 'F')}.astype(f64)" if isinstance(a, Reg) else f"f64({c.val(a, 'F')})"
    second = c.val(b, "F") if isinstance(b, Reg) else f"f64({c.val(b, 'F')})"
    return c.assign(A[0], f"{first}*{second}+{c.val(A[3], 'F')}", "F") + _flush(c, I)


@alu("max", "min")
def _max(c: Codegen, I: Instr) -> list[str]:
    t, A, op = I.parts[-1], I.args, I.parts[0]
    if t in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half(c, I, f"N.half_{op}({{a}},{{b}},{'NaN' in I.parts})")
    if t in ("s16x2", "u16x2"):
        return _short_pairs(c, I, {"max": "maximum", "min": "minimum"}[op])
    only(I, f"f32 f64 ftz NaN xorsign abs relu {_INT}")
    if "relu" in I.parts:  # integers: the result is clamped at 0
        if t != "s32" or len(A) != 3:
            raise I.unsupported(f".relu of {t}")
        name = {"max": "maximum", "min": "minimum"}[op]
        return c.assign(A[0], f"np.maximum(np.{name}({c.val(A[1], 'S')},{c.val(A[2], 'S')}),0)", "S")
    if "xorsign" in I.parts or "abs" in I.parts:
        raise I.unsupported("max/min .xorsign.abs")
    view = VIEW_OF_TYPE[t]
    name = {"max": "maximum", "min": "minimum"}[op]
    if view in "FE" and "NaN" not in I.parts:
        name = {"max": "fmax", "min": "fmin"}[op]
    if len(A) == 3:
        return c.ufunc(name, view, I, A[1], A[2])
    a, b, d = (c.val(x, view) for x in A[1:])
    return c.assign(A[0], f"np.{name}(np.{name}({a},{b}),{d})", view)


@alu("and", "or", "xor")
def _logic(c: Codegen, I: Instr) -> list[str]:
    only(I, "b16 b32 b64 pred")
    name = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}[I.parts[0]]
    return c.ufunc(name, VIEW_OF_TYPE[I.parts[-1]], I, *I.args[1:])


@alu("not")
def _not(c: Codegen, I: Instr) -> list[str]:
    only(I, "b16 b32 b64 pred")
    return c.ufunc("logical_not" if I.parts[-1] == "pred" else "invert", VIEW_OF_TYPE[I.parts[-1]], I, I.args[1])


@alu("lop3")
def _lop3(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32")
    a, b, d = (c.val(x, "U") for x in I.args[1:4])
    return c.assign(I.args[0], f"N.lop3(u32({a}),u32({b}),u32({d}),{I.args[4].value})", "U")


@alu("neg")
def _neg(c: Codegen, I: Instr) -> list[str]:
    if I.parts[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half(c, I, "-{a}")
    only(I, "f32 f64 ftz s16 s32 s64")
    return c.ufunc("negative", VIEW_OF_TYPE[I.parts[-1]], I, I.args[1])


@alu("abs")
def _abs(c: Codegen, I: Instr) -> list[str]:
    if I.parts[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        return _half(c, I, "np.abs({a})")
    only(I, "f32 f64 ftz s16 s32 s64")
    return c.ufunc("absolute", VIEW_OF_TYPE[I.parts[-1]], I, I.args[1])


@alu("copysign")
def _copysign(c: Codegen, I: Instr) -> list[str]:
    only(I, "f32")
    return c.ufunc("copysign", "F", I, I.args[2], I.args[1])


@alu("shl", "shr")
def _shift(c: Codegen, I: Instr) -> list[str]:
    only(I, _INT)
    op, t, A = I.parts[0], I.parts[-1], I.args
    view, bits, signed = VIEW_OF_TYPE[t], SIZE_OF_TYPE[t] * 8, t[0] == "s"
    name = "left_shift" if op == "shl" else "right_shift"
    if isinstance(A[2], Imm):
        n = A[2].value
        if n >= bits and not signed:
            return c.assign(A[0], c.const(view, 0), view)
        return [f"np.{name}({c.val(A[1], view)},{c.const(view, min(n, bits - 1))},out={c.val(A[0], view)}{c.where})"]
    dtype = {"U": "u32", "S": "i32", "D": "u64", "L": "i64", "H": "u16", "h": "i16"}[view]
    n = f"np.minimum({c.val(A[2], 'U')},u32({bits - 1})).astype({dtype})"
    value = f"np.{name}({c.val(A[1], view)},{n})"
    if not signed:
        value = f"np.where({c.val(A[2], 'U')}>u32({bits - 1}),{c.const(view, 0)},{value})"
    return c.assign(A[0], value, view)


@alu("shf")
def _funnel(c: Codegen, I: Instr) -> list[str]:
    only(I, "l r wrap clamp b32")
    lo, hi, n = (f"u32({c.val(x, 'U')})" for x in I.args[1:4])
    return c.assign(I.args[0], f"N.funnel({lo},{hi},{n},{'l' in I.parts},{'wrap' in I.parts})", "U")


@alu("prmt")
def _prmt(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32")
    a, b, s = (f"u32({c.val(x, 'U')})" for x in I.args[1:4])
    if isinstance(I.args[3], Imm) and not I.args[3].value & 0x8888:
        picks = tuple(I.args[3].value >> 4 * i & 7 for i in range(4))
        return c.assign(I.args[0], f"N.prmt_picks({c.val(I.args[1], 'U')},{c.val(I.args[2], 'U')},{picks})", "U")
    return c.assign(I.args[0], f"N.prmt({a},{b},{s})", "U")


@alu("bfe")
def _bfe(c: Codegen, I: Instr) -> list[str]:
    only(I, "u32")
    a, p, n = (f"u32({c.val(x, 'U')})" for x in I.args[1:4])
    return c.assign(I.args[0], f"N.bit_field({a},{p},{n})", "U")


@alu("bfi")
def _bfi(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32")
    a, b, p, n = (f"u32({c.val(x, 'U')})" for x in I.args[1:5])
    return c.assign(I.args[0], f"N.bit_insert({a},{b},{p},{n})", "U")


@alu("popc")
def _popc(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32 b64")
    return c.assign(I.args[0], f"np.bitwise_count({c.val(I.args[1], VIEW_OF_TYPE[I.parts[-1]])})", "U")


@alu("clz")
def _clz(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32")
    return c.assign(I.args[0], f"N.clz32({c.val(I.args[1], 'U')})", "U")


@alu("bfind")
def _bfind(c: Codegen, I: Instr) -> list[str]:
    only(I, "u32 s32")
    return c.assign(I.args[0], f"N.leading_bit({c.val(I.args[1], 'U')},{I.parts[-1] == 's32'})", "U")


@alu("brev")
def _brev(c: Codegen, I: Instr) -> list[str]:
    only(I, "b32")
    return c.assign(I.args[0], f"N.bit_reverse({c.val(I.args[1], 'U')})", "U")


@alu("div", "rem")
def _div(c: Codegen, I: Instr) -> list[str]:
    only(I, f"rn full approx ftz f32 f64 {_INT}")
    t, A = I.parts[-1], I.args
    view = VIEW_OF_TYPE[t]
    if view in "FE":
        return c.ufunc("divide", view, I, A[1], A[2]) + _flush(c, I)
    a, b = c.val(A[1], view), c.val(A[2], view)
    if t[0] == "u":
        safe = f"np.where({b}==0,{c.const(view, 1)},{b})"
        value = f"{a}//{safe}" if I.parts[0] == "div" else f"{a}%{safe}"
        zero = c.const(view, -1) if I.parts[0] == "div" else a
        return c.assign(A[0], f"np.where({b}==0,{zero},{value})", view)
    safe = f"np.where({b}==0,{c.const(view, 1)},{b})"  # C semantics: truncation, remainder has the dividend's sign
    value = f"np.fmod({a},{safe})" if I.parts[0] == "rem" else f"({a}-np.fmod({a},{safe}))//{safe}"
    return c.assign(A[0], value, view)


@alu("sad")
def _sad(c: Codegen, I: Instr) -> list[str]:
    only(I, "s32 u32")
    v = VIEW_OF_TYPE[I.parts[-1]]
    a, b, d = (c.val(x, v) for x in I.args[1:4])
    return c.assign(I.args[0], f"np.where({a}>{b},{a}-{b},{b}-{a})+{d}", v)


@alu("mov")
def _mov(c: Codegen, I: Instr) -> list[str]:
    only(I, f"f32 f64 f16 pred b128 {_INT}")
    t, A = I.parts[-1], I.args
    if t == "b128":
        if isinstance(A[1], Vec):
            sel = f"[{c.mask}]" if c.where else ""
            return [
                f"Q[{A[0].idx}]{'[' + c.mask + ',' + str(j) + ']' if c.where else f'[:,{j}]'}={c.val(x, 'D')}{sel}"
                for j, x in enumerate(A[1].items)
            ]
        if isinstance(A[0], Vec):
            return [f"cp({c.val(x, 'D')},Q[{A[1].idx}][:,{j}]{c.where})" for j, x in enumerate(A[0].items) if x is not SINK]
        mask = f",where={c.mask}[:,None]" if c.where else ""
        return [f"cp(Q[{A[0].idx}],Q[{A[1].idx}]{mask})"]
    if isinstance(A[0], Vec) or isinstance(A[1], Vec):  # unpack or pack halves
        vec, whole, unpack = (A[0], A[1], True) if isinstance(A[0], Vec) else (A[1], A[0], False)
        if t not in ("b64", "b32") or len(vec.items) != 2:
            raise I.unsupported(f"mov with a vector of {len(vec.items)}")
        rows, part = ("U2", "U") if t == "b64" else ("H2", "H")
        half = [c.half(whole, rows, j) if isinstance(whole, Reg) else _half_of_constant(c, whole, t, j) for j in (0, 1)]
        out = []
        for j, x in enumerate(vec.items):
            if x is SINK:
                continue
            dst, src = (c.val(x, part), half[j]) if unpack else (half[j], c.val(x, part))
            out.append(f"cp({dst},{src}{c.where})")
        return out
    if isinstance(A[1], Sym):
        view = {8: "D", 4: "U"}[SIZE_OF_TYPE[t]]
        return c.assign(A[0], c.val(A[1], view), view)
    return c.assign(A[0], c.val(A[1], VIEW_OF_TYPE[t]), VIEW_OF_TYPE[t])


def _half_of_constant(c: Codegen, x: Any, t: str, j: int) -> str:
    bits = 32 if t == "b64" else 16
    value = x.value if isinstance(x, Imm) else x.bits
    return c.const("U" if t == "b64" else "H", value >> (bits * j) & ((1 << bits) - 1))


@alu("selp")
def _selp(c: Codegen, I: Instr) -> list[str]:
    only(I, f"f32 f64 f16 {_INT}")
    v, A = VIEW_OF_TYPE[I.parts[-1]], I.args
    return c.assign(A[0], f"np.where({c.val(A[3], 'P')},{c.val(A[1], v)},{c.val(A[2], v)})", v)


@alu("slct")
def _slct(c: Codegen, I: Instr) -> list[str]:
    raise I.unsupported("slct")


_COMPARE = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal",
}  # fmt: skip
_UNORDERED = {f"{k}u": v for k, v in _COMPARE.items() if k not in ("lo", "ls", "hi", "hs")}


@alu("setp")
def _setp(c: Codegen, I: Instr) -> list[str]:
    only(I, f"{' '.join(_COMPARE)} {' '.join(_UNORDERED)} num nan and or xor ftz f32 f64 f16 bf16 {_INT}")
    p, A, t = I.parts, I.args, I.parts[-1]
    if t in ("f16", "bf16"):
        a, b = (f"bf16_to_f32({c.val(x, 'H')})" if t == "bf16" else c.val(x, "f") for x in A[1:3])
        view = "F"
    else:
        view = VIEW_OF_TYPE[t]
        a, b = c.val(A[1], view), c.val(A[2], view)
    compare = p[1]
    if view not in "FE":
        value = f"np.{_COMPARE[compare]}({a},{b})"
    else:
        nan = f"(np.isnan({a})|np.isnan({b}))"
        if compare == "nan":
            value = nan
        elif compare == "num":
            value = f"~{nan}"
        elif compare in _UNORDERED:
            value = f"(np.{_UNORDERED[compare]}({a},{b})|{nan})"
        elif compare == "ne":
            value = f"(({a}!={b})&~{nan})"
        else:
            value = f"np.{_COMPARE[compare]}({a},{b})"
    extra = next((x for x in p[2:] if x in ("and", "or", "xor")), None)
    dst = A[0].items if isinstance(A[0], Pair) else (A[0],)
    sign = {"and": "&", "or": "|", "xor": "^", None: ""}[extra]
    tail = f"{sign}{c.val(A[3], 'P')}" if extra else ""
    if len(dst) == 1:
        return c.assign(dst[0], f"({value}){tail}", "P")
    out = [f"_c={value}"]
    out += [] if dst[0] is SINK else c.assign(dst[0], f"(_c){tail}", "P")
    return out + ([] if dst[1] is SINK else c.assign(dst[1], f"(~_c){tail}", "P"))


_MODES = ["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "ftz", "sat", "satfinite", "relu"]


@alu("cvt")
def _cvt(c: Codegen, I: Instr) -> list[str]:
    A, types = I.args, [x for x in I.parts[1:] if x not in _MODES]
    if "relu" in I.parts or "rna" in I.parts or len(types) != 2 or "pack" in I.parts:
        raise I.unsupported("form of cvt")
    d, s = types
    mode = next((m for m in ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi") if m in I.parts), None)
    if d in ("e4m3x2", "e5m2x2") and s in ("f32", "f16x2"):
        if mode != "rn" or "satfinite" not in I.parts:
            raise I.unsupported("rounding of cvt to FP8")
        if s == "f16x2":
            return c.assign(A[0], f"N.F16_TO_FP8['{d[:4]}'][{_halves(c, A[1], s)}.view(u16)].view(u16)", "H")
        hi, lo = (c.val(x, "F") for x in A[1:3])
        return c.assign(A[0], f"N.f32_to_fp8x2('{d[:4]}',{hi},{lo})", "H")
    if d == "ue8m0x2" and s == "f32":
        if mode not in ("rz", "rp"):
            raise I.unsupported("rounding of cvt to ue8m0")
        hi, lo = (f"N.f32_to_ue8m0({c.val(x, 'F')},{mode == 'rp'},{'satfinite' in I.parts})" for x in A[1:3])
        return c.assign(A[0], f"({hi}.astype(u16)<<u16(8))|{lo}", "H")
    if d == "e2m1x2" and s == "f32":
        hi, lo = (f"N.f32_to_e2m1({c.val(x, 'F')})" for x in A[1:3])
        return c.assign(A[0], f"({hi}.astype(u16)<<u16(4))|{lo}", "H")
    if s in ("e4m3x2", "e5m2x2") and d == "f16x2":
        return c.assign(A[0], f"N.FP8_TO_F16['{s[:4]}'][{c.val(A[1], 'H')}.view(u8)].view(u32)", "U")
    if s == "ue8m0x2" and d == "bf16x2":
        v = c.val(A[1], "H")
        lo, hi = (f"f32_to_bf16(N.DECODE['ue8m0'][{x}]).astype(u32)" for x in (f"{v}&u16(255)", f"{v}>>u16(8)"))
        return c.assign(A[0], f"{lo}|({hi}<<u32(16))", "U")
    if d in ("bf16x2", "f16x2") and s == "f32":
        if mode != "rn" or "satfinite" in I.parts:
            raise I.unsupported("rounding of a packed cvt")
        f = (lambda x: f"f32_to_bf16({x})") if d == "bf16x2" else (lambda x: f"np.asarray({x}).astype(f16).view(u16)")
        hi, lo = (f(c.val(x, "F")) for x in A[1:3])
        return c.assign(A[0], f"({hi}.astype(u32)<<u32(16))|{lo}", "U")
    if d == "bf16" and s == "f32":
        if mode != "rn":
            raise I.unsupported("rounding of cvt.bf16.f32")
        return c.assign(A[0], f"f32_to_bf16({c.val(A[1], 'F')})", "H")
    if d == "f32" and s == "bf16":
        return c.assign(A[0], f"bf16_to_f32({c.val(A[1], 'H')})", "F")
    if "satfinite" in I.parts or d not in VIEW_OF_TYPE or s not in VIEW_OF_TYPE or "x2" in d + s:
        raise I.unsupported("form of cvt")
    src = c.truncated(A[1], s)
    if s in ("s8", "u8"):
        src = f"{src}.astype({'np.int8' if s == 's8' else 'u8'})"
    if "sat" in I.parts:
        if (d, s) != ("f32", "f32"):
            raise I.unsupported("cvt.sat")
        src = f"np.clip(np.nan_to_num({src},nan=0.0,posinf=1.0,neginf=0.0),0,1)"
    if s[0] in "bf" and "f" in s and d[0] in "us":
        f = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}[mode or ""]
        bits = SIZE_OF_TYPE[d] * 8
        lo, hi = (0, 2**bits - 1) if d[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        dtype = {"U": "u32", "S": "i32", "D": "u64", "L": "i64", "H": "u16", "h": "i16"}[VIEW_OF_TYPE[d]]
        wide = f"np.clip({f}({src}.astype(f64)),{float(lo)},{float(hi)})"
        wide = f"np.where(np.isnan({src}),{0.0},{wide})"
        return _widen_to_register(c, A[0], f"{wide}.astype({dtype})", d)
    if mode in ("rni", "rzi", "rmi", "rpi") and d == s and d in ("f32", "f64"):
        f = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}[mode]
        return c.assign(A[0], f"{f}({src})", VIEW_OF_TYPE[d])
    if mode in ("rz", "rm", "rp") and d[0] == "f":
        raise I.unsupported("directed rounding of cvt")
    return _widen_to_register(c, A[0], src, d)


def _widen_to_register(c: Codegen, dst: Reg, value: str, d: str) -> list[str]:
    """A destination register may be wider than the type: sign- or zero-extend to its class."""
    view = VIEW_OF_TYPE[d]
    if d in ("s8", "u8", "b8"):
        value = f"np.asarray({value}).astype({'np.int8' if d == 's8' else 'u8'})"
    if dst.cls in (32, 64) and SIZE_OF_TYPE[d] * 8 < dst.cls and d[0] in "usb":
        view = {32: "S", 64: "L"}[dst.cls] if d[0] == "s" else {32: "U", 64: "D"}[dst.cls]
    return c.assign(dst, value, view)


@alu("ex2")
def _ex2(c: Codegen, I: Instr) -> list[str]:
    t = I.parts[-1]
    if t in ("f16x2", "bf16x2", "f16", "bf16"):
        if ("ftz" in I.parts) != t.startswith("bf"):
            raise I.unsupported(f"ex2 of {t} {'with' if 'ftz' in I.parts else 'without'} .ftz")
        I.parts = [x for x in I.parts if x != "approx"]
        return _half(c, I, "np.exp2({a})" if t.startswith("bf") else "N.EX2_F16[{a}.view(u16)]")
    only(I, "approx ftz f32")
    if c.fidelity and c.fidelity.ex2_ulp:
        c.env["fidelity_ex2"] = c.fidelity.ex2
        return c.assign(I.args[0], f"fidelity_ex2({c.val(I.args[1], 'F')})", "F") + _flush(c, I)
    return c.ufunc("exp2", "F", I, I.args[1]) + _flush(c, I)


@alu("lg2", "sqrt", "tanh", "sin", "cos")
def _unary(c: Codegen, I: Instr) -> list[str]:
    if I.parts[-1] in ("f16x2", "bf16x2", "f16", "bf16"):
        I.parts = [x for x in I.parts if x != "approx"]
        return _half(c, I, f"np.{dict(lg2='log2').get(I.parts[0], I.parts[0])}({{a}}.astype(f32))")
    only(I, "approx rn ftz f32")
    return c.ufunc({"lg2": "log2"}.get(I.parts[0], I.parts[0]), "F", I, I.args[1]) + _flush(c, I)


@alu("rcp")
def _rcp(c: Codegen, I: Instr) -> list[str]:
    only(I, "approx rn ftz f32")
    return c.assign(I.args[0], f"f32(1)/{c.val(I.args[1], 'F')}", "F") + _flush(c, I)


@alu("rsqrt")
def _rsqrt(c: Codegen, I: Instr) -> list[str]:
    only(I, "approx ftz f32")
    return c.assign(I.args[0], f"f32(1)/np.sqrt({c.val(I.args[1], 'F')})", "F") + _flush(c, I)


@alu("cvta")
def _cvta(c: Codegen, I: Instr) -> list[str]:
    only(I, "to global shared shared::cta shared::cluster param local const u64 u32")
    v, to = c.val(I.args[1], "D"), "to" in I.parts
    if any(x.startswith("shared") for x in I.parts):
        return c.assign(I.args[0], f"{v}{'-' if to else '+'}u64(g.shared_base)", "D")
    if "local" in I.parts:
        return c.assign(I.args[0], f"{v}{'-' if to else '+'}u64(g.local_base)", "D")
    return c.assign(I.args[0], v, "D")


@alu("mapa")
def _mapa(c: Codegen, I: Instr) -> list[str]:
    """The shared-window address of the same variable in CTA ``rank`` of the cluster (bits 24 and up hold the rank)."""
    only(I, "shared::cluster u32 u64")
    v = "D" if I.parts[-1] == "u64" else "U"
    if v == "D" and "shared::cluster" not in I.parts:
        raise I.unsupported("mapa on a generic address")
    t = "u64" if v == "D" else "u32"
    return c.assign(I.args[0], f"({c.val(I.args[1], v)}&{t}(0xffffff))|({t}({c.val(I.args[2], 'U')})<<{t}(24))", v)


@alu("isspacep", "getctarank")
def _space(c: Codegen, I: Instr) -> list[str]:
    raise I.unsupported(I.parts[0])


@alu("createpolicy")
def _policy(c: Codegen, I: Instr) -> list[str]:
    return c.assign(I.args[0], c.const("D", 0), "D")


@alu("prefetch", "prefetchu", "pragma", "discard", "applypriority", "nanosleep", "nop")
def _nothing(c: Codegen, I: Instr) -> list[str]:
    """Hints."""
    return ["pass"]


# --- ld, st ---------------------------------------------------------------------------------------------------------
_LDST = (
    "global shared shared::cta shared::cluster param local const relaxed acquire release volatile weak cta cluster gpu sys "
    "v2 v4 v8 nc mmio L1::no_allocate L1::evict_last L1::evict_first L1::evict_normal L1::evict_unchanged L2::128B L2::256B "
    "L2::64B L2::cache_hint L2::evict_last L2::evict_first L2::evict_normal ca cg cs lu cv wb wt unified "
    "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
)


def _address(c: Codegen, m: Mem, space: str) -> str:
    if isinstance(m.base, Reg):
        base = c.val(m.base, "D" if m.base.cls == 64 else "U")
        return f"{base}.astype(i64)+{m.offset}" if m.offset else f"{base}.astype(i64)"
    if isinstance(m.base, (Sym, Imm)):
        base = f"g.address({m.base.name!r})" if isinstance(m.base, Sym) else str(m.base.value)
        return f"np.full(g.W,{base}+{m.offset},i64)"
    raise ValueError(m)


def _loaded(r: Reg, t: str, size: int, j: int) -> tuple[str, str]:
    """View of a destination register, and value ``j`` of what was loaded as that view takes it."""
    view, column = {16: "H", 32: "U", 64: "D"}[r.cls], f"_v[:,{j}]"
    if t in ("s8", "s16", "s32") and r.cls > 8 * size:
        view, column = {"H": "h", "U": "S", "D": "L"}[view], f"{column}.view('i{size}')"
    return view, column


@alu("ld", "ldu", "st")
def _ldst(c: Codegen, I: Instr) -> list[str] | None:
    if "async" in I.parts:
        return None
    only(I, _LDST)
    load, t = I.parts[0] != "st", I.parts[-1]
    space = next((x.split("::")[0] for x in I.parts[1:] if x.split("::")[0] in ("global", "shared", "param", "local", "const")), "generic")
    count = {"v2": 2, "v4": 4, "v8": 8}.get(next((x for x in I.parts if x in ("v2", "v4", "v8")), ""), 1)
    size = SIZE_OF_TYPE[t]
    mem, data = (I.args[1], I.args[0]) if load else (I.args[0], I.args[1])
    regs = [data] if count == 1 else list(data.items)
    if size == 16:
        raise I.unsupported("128-bit register load or store")
    mask = c.mask if c.where else "None"
    if load and space == "param" and isinstance(mem.base, Sym):  # one value for all lanes
        value = f"g.machine.parameter({mem.base.name!r},{mem.offset},{size},{count},{c.instr(I)})"
        out = [f"_v={value}"]
        for j, r in enumerate(regs):
            if isinstance(r, Reg):
                view, column = _loaded(r, t, size, j)
                out += [f"cp({view}[{r.idx}],{column},casting='unsafe'{c.where})"]
        return out
    head = [f"_a={_address(c, mem, space)}"]
    where = f"g,{c.instr(I)},{mask},_a"
    if load:
        out = [*head, f"_v=g.memory.load_{space}({where},{size},{count})"]
        for j, r in enumerate(regs):
            if not isinstance(r, Reg):
                continue
            view, column = _loaded(r, t, size, j)
            if c.where:
                out.append(f"{view}[{r.idx}][{mask}]={column}")
            else:
                out.append(f"cp({view}[{r.idx}],{column},casting='unsafe')")
        return out
    out = [*head, f"_v=np.empty((g.W,{count}),'u{size}')"]
    for j, r in enumerate(regs):
        view = {1: "H", 2: "H", 4: "U", 8: "D"}[size]
        if isinstance(r, Reg):
            view = {16: "H", 32: "U", 64: "D"}[r.cls]
        elif isinstance(r, FloatImm):
            view = {4: "U", 8: "D"}[size]
        out.append(f"cp(_v[:,{j}],{c.val(r, view)},casting='unsafe')")
    return [*out, f"g.memory.store_{space}({where},_v)"]
