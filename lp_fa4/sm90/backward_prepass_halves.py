"""What the pre-pass does to a query's statistics so that the main kernel's FP16 arithmetic (``backward_halves``) has them exactly.

Scores and dP are sums in FP16 there: nothing leaves its range while no row's codes, of q and of dO, have magnitudes that sum to more than
``ROW_SUM`` (``448 * 146 < 65504``). Exponents of dO are chosen so; codes of q are looked at. Then, for all that is made of a row:

* the scale of the scores is rounded to FP16's precision, and m, which is a score, becomes one under the rounded scale;
* m is rounded to a grid on which ``a = s + e - e_ref - m`` is an FP16 number, where a row of dO is at most 2^16 smaller than its chunk's
  largest. Only ``m + log2 l`` matters: ``l 2^(m - rounded m)`` stands for l, and dO / l, c and the suffix sums follow. So do the factors of
  ``align``: the row's largest |dO| / l is then within 2^-8 (log2 units; 2^-7 from |m| = 8 on) of a power of two;
* l becomes that of P as the kernel has it: an exponential in FP16 is cut toward 0, ``KEPT`` of it is left on average;
* c is rounded, before it enters the suffix sums (a power of two does not change how);
* b is in units of V's codes under the sequence's largest exponent: a mean of dP's over the keys, so as small as they are.

FP16 does not do where a score may be past 2^6: it would round it by more than E4M3's rounding of P (``LARGEST_REFERENCE``). Nor where a
gradient of the LSE takes b out of its range, or where exponents take the scale of the scores out of it.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import absolute, effect, inline_ptx

LARGEST_REFERENCE = 64.0
"""log2 units. FP16 rounds a score by 2^-12 of it, so that P is off by 2^-6.5 here."""
LARGEST_SCALE = 2.0**15
"""From products of codes to log2 units."""
KEPT = 1.0 - 2.0**-11 * 0.7213
"""Half of FP16's unit over the mean mantissa is what ``ex2.approx.f16x2`` cuts off (an H200, every input: 3.4e-4 on average)."""


def flag(trouble, bit: int):
    """Set a bit of a word of shared memory."""
    effect([trouble.iterator.toint(), Int32(bit)], "red.shared.or.b32 [$0], $1;", "r,r")


def eleven_bits(x):
    """FP32 rounded to FP16's precision (not to its range); NaN stays NaN. By Veltkamp's split: times 2^13 + 1, and back."""
    text = "{.reg .f32 t, d; mul.rn.f32 t, $1, 0f46000400; sub.rn.f32 d, t, $1; sub.rn.f32 $0, t, d;}"
    return Float32(inline_ptx(T.f32(), [x], text, "=&f,f"))


@cute.jit
def rounded_scale(scale):
    """A factor on scores as FP16 has its mantissa, and over itself (1 of 0)."""
    rounded = eleven_bits(scale)
    usable = scale > 2.0**-100 and scale < 2.0**100
    rounded = rounded if usable else scale
    return rounded, rounded / scale if usable else Float32(1.0)


@cute.jit
def on_grid(m):
    """m rounded to 2^(n - 11), 2^n the least power of two above |m| + 8: its sum with an integer of at most 8 in magnitude is an FP16
    number. As it is past ``LARGEST_REFERENCE``, or NaN."""
    text = (
        "{.reg .f32 t, b; .reg .b32 e; abs.f32 t, $1; add.rn.f32 t, t, 0f41000000; mov.b32 e, t; shr.u32 e, e, 23; add.s32 e, e, 13;\n"
        " min.s32 e, e, 254; shl.b32 e, e, 23; or.b32 e, e, 0x00400000; mov.b32 b, e; add.rn.f32 t, $1, b; sub.rn.f32 $0, t, b;}"
    )
    rounded = Float32(inline_ptx(T.f32(), [m], text, "=&f,f"))
    return rounded if absolute(m) <= LARGEST_REFERENCE else m


def byte_of_norm_bits(bits):
    """E8M0 byte of a row from the bits of 2^-8 of its L1 norm: smallest e under which that of its codes before rounding is at most 128,
    after it at most 136; 255 if it is not finite."""
    text = (
        "{.reg .pred p; .reg .b32 e; add.u32 e, $1, 0x7FFFFF; shr.u32 e, e, 23; add.u32 e, e, 1; min.u32 e, e, 254;\n"
        " setp.ge.u32 p, $1, 0x7F800000; selp.b32 $0, 255, e, p;}"
    )
    return Int32(inline_ptx(T.i32(), [bits], text, "=r,r"))


def norm_of_codes(low, high):
    """L1 norm of eight E4M3 codes, to 2^-10 of it (two sums of FP16): 448 * 146 * (1 + 2^-10) is still under 65504. NaN of a NaN."""
    text = (
        "{.reg .b16 a, b, c, d; .reg .b32 w, x, y, z; .reg .f32 f, g; and.b32 w, $1, 0x7F7F7F7F; and.b32 y, $2, 0x7F7F7F7F;\n"
        " mov.b32 {a, b}, w; mov.b32 {c, d}, y; cvt.rn.f16x2.e4m3x2 w, a; cvt.rn.f16x2.e4m3x2 x, b; cvt.rn.f16x2.e4m3x2 y, c;\n"
        " cvt.rn.f16x2.e4m3x2 z, d; add.rn.f16x2 w, w, x; add.rn.f16x2 y, y, z; add.rn.f16x2 w, w, y; mov.b32 {a, b}, w;\n"
        " cvt.f32.f16 f, a; cvt.f32.f16 g, b; add.f32 $0, f, g;}"
    )
    return Float32(inline_ptx(T.f32(), [low, high], text, "=f,r,r"))
