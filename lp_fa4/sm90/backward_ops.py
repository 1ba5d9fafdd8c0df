"""PTX and small device helpers of the backward kernels."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import absolute, bf16x2, e4m3x4, effect, f16x2, inline_ptx, pinned

__all__ = [
    "absolute",
    "arrive",
    "bf16x2",
    "e4m3x4",
    "effect",
    "f16x2",
    "mask_of",
    "pick_pairs",
    "pinned",
    "redux_max",
    "release",
    "rescale_codes",
    "to_codes",
]


def pick_pairs(a, b, selector: str):
    """Four bytes of two words; ``selector`` as written in PTX, lowest byte last."""
    return Int32(inline_ptx(T.i32(), [a, b], f"prmt.b32 $0, $1, $2, 0x{selector};", "=r,r,r"))


def larger(a, b):
    """The larger of two; NaN wins."""
    return Float32(inline_ptx(T.f32(), [a, b], "max.NaN.f32 $0, $1, $2;", "=f,f,f"))


def redux_max(x):
    """Largest of a warp's non-negative FP32 values, by integer order: a NaN wins."""
    return Int32(inline_ptx(T.i32(), [x], "{.reg .b32 v; mov.b32 v, $1; redux.sync.max.s32 $0, v, 0xffffffff;}", "=r,f", side_effects=True))


def redux_min(x):
    """Smallest of a warp's non-negative FP32 values given as their bits."""
    return Int32(inline_ptx(T.i32(), [x], "redux.sync.min.s32 $0, $1, 0xffffffff;", "=r,r", side_effects=True))


def mask_of(below):
    """16-bit halves of a word that hold tokens: 0, 1 or 2 tokens left give 0, 0xFFFF, 0xFFFFFFFF."""
    return Int32(
        inline_ptx(
            T.i32(),
            [below],
            "{.reg .pred p, q; setp.gt.s32 p, $1, 0; setp.gt.s32 q, $1, 1; selp.b32 $0, 0xFFFF, 0, p; @q mov.b32 $0, 0xFFFFFFFF;}",
            "=&r,r",
        )
    )


def mask_from(first):
    """16-bit halves of a word from the ``first`` on: at most 0, 1 and more give 0xFFFFFFFF, 0xFFFF0000, 0."""
    return Int32(
        inline_ptx(
            T.i32(),
            [first],
            "{.reg .pred p, q; setp.le.s32 p, $1, 1; setp.le.s32 q, $1, 0; selp.b32 $0, 0xFFFF0000, 0, p; @q mov.b32 $0, 0xFFFFFFFF;}",
            "=&r,r",
        )
    )


def rescale_codes(word, factor2):
    """Four E4M3 codes times a power of two given as packed FP16 (``factor2``), rounded again."""
    return Int32(
        inline_ptx(
            T.i32(),
            [word, factor2],
            "{.reg .b16 l, h; .reg .b32 x, y;\n mov.b32 {l, h}, $1;\n cvt.rn.f16x2.e4m3x2 x, l;\n cvt.rn.f16x2.e4m3x2 y, h;\n"
            " mul.rn.f16x2 x, x, $2;\n mul.rn.f16x2 y, y, $2;\n"
            " cvt.rn.satfinite.e4m3x2.f16x2 l, x;\n cvt.rn.satfinite.e4m3x2.f16x2 h, y;\n mov.b32 $0, {l, h};}",
            "=r,r,r",
        )
    )


def half2(x):
    """One FP32 to both halves of packed FP16."""
    return Int32(inline_ptx(T.i32(), [x], "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f"))


def to_codes(values, codes, factors=None):
    """32 accumulators (columns 2t, 2t+1 of each 8) to eight A-operand words; ``factors`` scales the two halves of 16."""
    for word in range(8):
        q, r = word // 2, word % 2
        i, j = 8 * q + 2 * r, 8 * q + 2 * r + 4
        four = [values[i], values[i + 1], values[j], values[j + 1]]
        if factors is not None:
            four = [x * factors[q // 2] for x in four]
        codes[word] = e4m3x4(*four)


PAIR_LOSS = 1.0 + 0.25 * 2.0**-7 * 0.7213
"""What :func:`low_of` and :func:`high_of` lose on average, as a factor: a quarter of BF16's unit over the mean mantissa."""


def pair_of(a, b):
    """Two FP32 of at least 0, cut to BF16, in one word, ``a`` low."""
    return Int32(inline_ptx(T.i32(), [a, b], "prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f"))


def low_of(pair):
    """Lower value of :func:`pair_of` as FP32. What was cut off is replaced by the upper bits of the other, its exponent: a quarter of a
    unit for any usual size, where half a unit was cut off on average. 0 stays 0 if both are."""
    return Float32(inline_ptx(T.f32(), [pair], "prmt.b32 $0, $1, $1, 0x1032;", "=f,r"))


def high_of(pair):
    """Upper value of :func:`pair_of` as FP32: the word itself, see :func:`low_of`."""
    return Float32(inline_ptx(T.f32(), [pair], "mov.b32 $0, $1;", "=f,r"))


@cute.jit
def arrive(barrier):
    """One arrival for this warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def leave_keys(spec, bars):
    """Where K and V have one stage: one arrival for this warp, which has read what it wants of them."""
    if const_expr(spec.key_stages == 1):
        arrive(bars.kv_empty)


@cute.jit
def release(spec, barrier, peer):
    """One arrival for this warp on a barrier of this CTA and, in a cluster, on the other's."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
        if const_expr(spec.cluster):
            cute.arch.mbarrier_arrive(barrier, peer)


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """Next stage of a ring; the phase flips at its end."""
    if const_expr(stages == 2):
        return stage ^ 1, phase ^ stage
    stage = stage + 1
    if stage == stages:
        stage, phase = Int32(0), phase ^ 1
    return stage, phase


def shared_floats(address, count: int, align: int):
    """``count`` FP32 words of shared memory as registers."""
    out = cute.make_rmem_tensor(count, Float32)
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=align)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), out)
    return out


def strong_floats(address):
    """Four FP32 words of global memory from L2."""
    kind = llvm.StructType.get_literal([T.f32()] * 4)
    text = "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];"
    result = inline_ptx(kind, [address], text, "=f,=f,=f,=f,l,~{memory}", side_effects=True)
    return [Float32(llvm.extractvalue(T.f32(), result, [i])) for i in range(4)]


def power_for(bits, target: int):
    """Power of two (FP32 bits) that brings a magnitude with these bits to ``[2^target, 2^(target + 1))``; 1 for 0, Inf and NaN."""
    return Float32(
        inline_ptx(
            T.f32(),
            [bits],
            "{.reg .pred p, q; .reg .b32 e; shr.u32 e, $1, 23; setp.ge.u32 p, e, 255; setp.eq.u32 q, $1, 0;\n"
            f" sub.s32 e, {254 + target}, e; min.s32 e, e, 250; max.s32 e, e, 4; shl.b32 e, e, 23;\n"
            " @p mov.b32 e, 0x3F800000; @q mov.b32 e, 0x3F800000; mov.b32 $0, e;}",
            "=f,r",
        )
    )


def reciprocal_power(x):
    """Reciprocal of a normal power of two, exactly."""
    return Float32(inline_ptx(T.f32(), [x], "{.reg .b32 e; mov.b32 e, $1; sub.s32 e, 0x7F000000, e; mov.b32 $0, e;}", "=f,f"))
