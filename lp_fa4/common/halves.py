"""Packed FP16 arithmetic on the device: two numbers of a register at once. Packed values are Int32; the lower half comes first."""

from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx


def pair(x):
    """An FP32 rounded to FP16, in both halves."""
    text = "{.reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h};}"
    return Int32(inline_ptx(T.i32(), [x], text, "=r,f"))


def half_of(x, upper: int):
    """One half as FP32."""
    text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {'lh'[upper]};}}"
    return Float32(inline_ptx(T.f32(), [x], text, "=f,r"))


def fma2(a, b, c):
    """``a b + c``, rounded once."""
    return Int32(inline_ptx(T.i32(), [a, b, c], "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r"))


def add2(a, b):
    """``a + b``."""
    return Int32(inline_ptx(T.i32(), [a, b], "add.rn.f16x2 $0, $1, $2;", "=r,r,r"))


def mul2(a, b):
    """``a b``."""
    return Int32(inline_ptx(T.i32(), [a, b], "mul.rn.f16x2 $0, $1, $2;", "=r,r,r"))


def max2(a, b):
    """The larger ones; a NaN beside a number is left out."""
    return Int32(inline_ptx(T.i32(), [a, b], "max.f16x2 $0, $1, $2;", "=r,r,r"))


def exp2_2(x):
    """``2**x`` cut towards zero at FP16 (exact at integers), down to 2^-24, infinity from 2^16 on.

    By halves: of ``ex2.approx.f16x2`` ptxas packs the results anew for every reader.
    """
    text = (
        "{.reg .b16 l, h; .reg .b32 a, b; mov.b32 {l, h}, $1; ex2.approx.f16 l, l; ex2.approx.f16 h, h;\n"
        " cvt.u32.u16 a, l; cvt.u32.u16 b, h; prmt.b32 $0, a, b, 0x5410;}"
    )
    return Int32(inline_ptx(T.i32(), [x], text, "=r,r"))


def max3_2(a, b, c):
    """Largest of three as signed integers, one instruction: numbers that are not negative in their order, NaN above all."""
    return Int32(inline_ptx(T.i32(), [a, b, c], "{.reg .b32 m; max.s16x2 m, $1, $2; max.s16x2 $0, m, $3;}", "=r,r,r,r"))


def e4m3_of(a, b):
    """Four E4M3 codes of two pairs, ``a``'s lower half in the lowest byte: nearest even, saturating; NaN becomes 0x7F."""
    text = "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, $1; cvt.rn.satfinite.e4m3x2.f16x2 h, $2; mov.b32 $0, {l, h};}"
    return Int32(inline_ptx(T.i32(), [a, b], text, "=r,r,r"))


def tied(x, earlier, zero):
    """``x``, available only once ``earlier`` is: a dependency that no compiler can see through. ``zero``: 0 at run time. One LOP3."""
    text = "{.reg .b32 b; and.b32 b, $2, $3; or.b32 $0, $1, b;}"
    return Int32(inline_ptx(T.i32(), [x, earlier, zero], text, "=r,r,r,r"))


def floor(x):
    """Largest integer that is not above an FP32."""
    return Float32(inline_ptx(T.f32(), [x], "cvt.rmi.f32.f32 $0, $1;", "=f,f"))


def bits_from(place):
    """A word whose bits from ``place`` on are set; from 32 on: none. ``place`` >= 0."""
    return Int32(inline_ptx(T.i32(), [Int32(-1), place], "shl.b32 $0, $1, $2;", "=r,r,r"))


def chosen(mask, a, b):
    """Bits of ``a`` where ``mask`` has ones, else of ``b``: one LOP3."""
    return Int32(inline_ptx(T.i32(), [mask, a, b], "lop3.b32 $0, $1, $2, $3, 0xca;", "=r,r,r,r"))
