"""Eight neighbouring elements of a row in one or two 16-byte loads; their extremes as they are, their values as FP32."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import float_of, inline_ptx

_EXTREMES = {"float32": "{}.NaN.f32 $0, $1, $2;", "bfloat16": "{}.NaN.bf16x2 $0, $1, $2;", "float16": "{}.NaN.f16x2 $0, $1, $2;"}


def words_of(dtype: str) -> int:
    """32-bit words of eight elements."""
    return 8 if dtype == "float32" else 4


def elements(address, out):
    """Fill ``out`` (a register tensor) from a 16-byte aligned global address."""
    pointer = cute.make_ptr(out.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(cute.size(out))), out)


def eight(x, index, out):
    """Eight elements of one row, from a 16-byte aligned index, as they are: ``out`` holds words, or FP32 values of an FP32 tensor."""
    elements((x.iterator + cute.crd2idx(index, x.layout)).toint(), out)


def wide(words, dtype: str):
    """Elements that lie in 32-bit words, the lower half first, as FP32."""
    if dtype == "float32":
        return [float_of(Int32(word)) for word in words]
    if dtype == "bfloat16":
        return [float_of(Int32(half)) for word in words for half in (word << 16, word & Uint32(0xFFFF0000))]
    text = "{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {0};}}"
    return [Float32(inline_ptx(T.f32(), [word], text.format(half), "=f,r")) for word in words for half in "lh"]


def extreme(a, b, dtype: str, which: str):
    """Elementwise "max" or "min" of two words of elements; NaN wins."""
    kind = "f" if dtype == "float32" else "r"
    if kind == "f":
        value = inline_ptx(T.f32(), [float_of(Int32(a)), float_of(Int32(b))], _EXTREMES[dtype].format(which), "=f,f,f")
        return Uint32(inline_ptx(T.i32(), [Float32(value)], "mov.b32 $0, $1;", "=r,f"))
    return Uint32(inline_ptx(T.i32(), [a, b], _EXTREMES[dtype].format(which), "=r,r,r"))


def fma(a, b, c):
    """``a * b + c``, rounded once."""
    return Float32(inline_ptx(T.f32(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))
