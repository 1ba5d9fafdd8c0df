"""Number formats on the device: E8M0 bytes, E4M3 codes, fast exponentials. Each helper is a few instructions.

E8M0 arithmetic works on integer bits, so that the bytes equal those of ``lp_fa4.mx.quantize`` for every input.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def inline_ptx(result, operands, text, constraints, *, side_effects=False, loc=None, ip=None):
    """One inline-PTX statement; ``operands`` are DSL scalars, the raw result is returned."""
    return llvm.inline_asm(
        result,
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def effect(operands, text, constraints):
    """Inline PTX with a memory effect and no result."""
    inline_ptx(None, operands, text, constraints + ",~{memory}", side_effects=True)


def exp2(x):
    """``2**x`` by MUFU, subnormal results flushed to 0; exact at integers, relative error 2^-22."""
    return Float32(inline_ptx(T.f32(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))


def log2(x):
    """``log2(x)`` by MUFU; -inf at 0."""
    return Float32(inline_ptx(T.f32(), [x], "lg2.approx.f32 $0, $1;", "=f,f"))


def order_after(x, earlier, zero):
    """``x``, available only once ``earlier`` (another FP32) is: a dependency that no compiler can see through.

    ``zero``: an Int32 that is 0 at run time and unknown at compile time. One LOP3.
    """
    text = "{.reg .b32 a, b; mov.b32 a, $1; mov.b32 b, $2; and.b32 b, b, $3; or.b32 a, a, b; mov.b32 $0, a;}"
    return Float32(inline_ptx(T.f32(), [x, earlier, zero], text, "=f,f,f,r"))


def bits_of(x):
    """FP32 bits as Int32."""
    return Int32(inline_ptx(T.i32(), [x], "mov.b32 $0, $1;", "=r,f"))


def float_of(bits):
    """FP32 value of Int32 bits."""
    return Float32(inline_ptx(T.f32(), [bits], "mov.b32 $0, $1;", "=f,r"))


def pinned(x):
    """The same Int32, opaque to code motion: what is computed from it stays where it is written (hoisted, it would hold registers)."""
    return Int32(inline_ptx(T.i32(), [Int32(x)], "mov.b32 $0, $1;", "=r,r", side_effects=True))


def absolute(x):
    """Magnitude of an FP32 (an operand modifier of what consumes it)."""
    return Float32(inline_ptx(T.f32(), [x], "abs.f32 $0, $1;", "=f,f"))


def bf16x2(a, b):
    """Two FP32 to packed BF16, ``a`` low."""
    return Int32(inline_ptx(T.i32(), [a, b], "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f"))


def f16x2(a, b):
    """Two FP32 to packed FP16, ``a`` low."""
    return Int32(inline_ptx(T.i32(), [a, b], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f"))


def e4m3x4(a, b, c, d):
    """Four FP32 to four E4M3 codes, ``a`` in the lowest byte: nearest even, saturating; NaN becomes 0x7F."""
    return Int32(
        inline_ptx(
            T.i32(),
            [a, b, c, d],
            "{.reg .b16 l, h;\n cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;\n cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;\n mov.b32 $0, {l, h};}",
            "=r,f,f,f,f",
        )
    )


def max3(a, b, c):
    """Largest of three signed integers: one instruction."""
    return Int32(inline_ptx(T.i32(), [a, b, c], "{.reg .s32 m; max.s32 m, $2, $3; max.s32 $0, $1, m;}", "=r,r,r,r"))


def scale_of_byte(byte):
    """``2**(byte - 127)`` in FP32: 0 gives 2^-127 (subnormal), 255 gives NaN."""
    return Float32(
        inline_ptx(
            T.f32(),
            [byte],
            "{.reg .pred p, q; .reg .b32 v; setp.eq.s32 p, $1, 0; setp.eq.s32 q, $1, 255; shl.b32 v, $1, 23;\n"
            " @p mov.b32 v, 0x00400000; @q mov.b32 v, 0x7FC00000; mov.b32 $0, v;}",
            "=f,r",
        )
    )


def exponent_of_byte(byte):
    """``byte - 127`` as FP32; 255 gives NaN."""
    return Float32(
        inline_ptx(
            T.f32(),
            [byte],
            "{.reg .pred q; .reg .b32 v; .reg .f32 f; sub.s32 v, $1, 127; cvt.rn.f32.s32 f, v;\n"
            " setp.eq.s32 q, $1, 255; @q mov.b32 f, 0x7FC00000; mov.f32 $0, f;}",
            "=f,r",
        )
    )


def byte_of_amax_bits(bits):
    """E8M0 byte of a block from the largest FP32 magnitude's bits: smallest e with amax <= 448 * 2^e; 255 if not finite."""
    return Int32(
        inline_ptx(
            T.i32(),
            [bits],
            "{.reg .pred p; .reg .b32 e, m, o;\n"
            " shr.u32 e, $1, 23; sub.s32 e, e, 8; and.b32 m, $1, 0x7FFFFF;\n"
            " setp.gt.u32 p, m, 0x600000; selp.b32 o, 1, 0, p; add.s32 e, e, o; max.s32 e, e, 0;\n"
            " setp.ge.u32 p, $1, 0x7F800000; selp.b32 $0, 255, e, p;}",
            "=r,r",
        )
    )


def inverse_of_byte(byte):
    """``2**(127 - byte)`` in FP32 from exponent bits; 0 for byte 255, whose payload is 0."""
    return Float32(
        inline_ptx(
            T.f32(),
            [byte],
            "{.reg .pred p, q; .reg .b32 e; sub.s32 e, 254, $1; setp.le.s32 p, e, 0; shl.b32 e, e, 23;\n"
            " @p mov.b32 e, 0x00400000; setp.eq.s32 q, $1, 255; @q mov.b32 e, 0; mov.b32 $0, e;}",
            "=f,r",
        )
    )


def magnitude_max(bits, x):
    """Running maximum of FP32 magnitudes as integer bits; every NaN is above infinity."""
    return Int32(
        inline_ptx(
            T.i32(),
            [bits, x],
            "{.reg .b32 m; mov.b32 m, $2; and.b32 m, m, 0x7FFFFFFF; max.s32 $0, $1, m;}",
            "=r,r,f",
        )
    )


def warp_max(x):
    """Maximum of a warp's non-negative Int32."""
    return Int32(inline_ptx(T.i32(), [x], "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", side_effects=True))


def prmt(a, b, selector):
    """Pick four bytes of the pair (a, b) by a constant selector."""
    return Int32(inline_ptx(T.i32(), [a, b], f"prmt.b32 $0, $1, $2, 0x{selector:04x};", "=r,r,r"))


def pick(a, b, selector):
    """Pick four bytes of the pair (a, b) by a selector that is known at run time."""
    return Int32(inline_ptx(T.i32(), [a, b, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"))


def transpose4x4(w0, w1, w2, w3):
    """Transpose a 4 x 4 matrix of bytes whose rows are four words: word ``d`` of the result holds byte ``d`` of each."""
    a, b = prmt(w0, w1, 0x5140), prmt(w2, w3, 0x5140)
    c, d = prmt(w0, w1, 0x7362), prmt(w2, w3, 0x7362)
    return prmt(a, b, 0x5410), prmt(a, b, 0x7632), prmt(c, d, 0x5410), prmt(c, d, 0x7632)


def e4m3x4_to_float(word):
    """Four E4M3 codes to four FP32."""
    out = []
    for half in range(2):
        pair = Int32(
            inline_ptx(
                T.i32(),
                [word],
                f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {'lh'[half]};}}",
                "=r,r",
            )
        )
        for lane in range(2):
            out.append(
                Float32(
                    inline_ptx(
                        T.f32(),
                        [pair],
                        f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {'lh'[lane]};}}",
                        "=f,r",
                    )
                )
            )
    return out


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum over the four lanes that share an accumulator row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four lanes that share an accumulator row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)
