"""Arithmetic of the norm kernels, each step rounded by itself, and loads and stores of eight elements."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx


def mul(a, b):
    """``a * b`` rounded by itself."""
    return Float32(inline_ptx(T.f32(), [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f"))


def sub(a, b):
    """``a - b`` rounded by itself."""
    return Float32(inline_ptx(T.f32(), [a, b], "sub.rn.f32 $0, $1, $2;", "=f,f,f"))


def bf16x2_mul(a, b):
    """Products of two pairs of BF16."""
    return Int32(inline_ptx(T.i32(), [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r"))


def rsqrt(x):
    """``1 / sqrt(x)``, both steps rounded to nearest as on the CPU."""
    return Float32(inline_ptx(T.f32(), [x], "{.reg .f32 s; sqrt.rn.f32 s, $1; rcp.rn.f32 $0, s;}", "=f,f"))


@cute.jit
def row_rstd(total: Float32, lanes: cutlass.Constexpr, columns: cutlass.Constexpr, eps: Float32) -> Float32:
    """``rstd`` of a row of ``columns`` in all of the ``lanes`` that share it, from each one's sum of squares."""
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << i)
    return rsqrt(total / Float32(columns) + eps)


def nan_unless_finite(x):
    """``x``, or NaN where ``x`` is infinite (``x * 0 + x``): a static block marks an overflow instead of saturating it."""
    return Float32(inline_ptx(T.f32(), [x], "fma.rn.f32 $0, $1, 0f00000000, $1;", "=f,f"))


def half_place(column, columns: int):
    """Where the staged kernel keeps the FP32 of a column: first fours of all eights, then second fours."""
    return column % 8 // 4 * (columns // 2) + column // 8 * 4 + column % 4


@cute.jit
def load(source: cute.Tensor, row, column: Int32, out: cute.Tensor):
    """As many elements of a row as ``out`` has, at a multiple of their size, in one access; 64-bit offsets."""
    pointer = source.iterator + cute.crd2idx((Int64(row), column), source.layout)
    size = cute.size(out) * source.element_type.width // 8
    aligned = cute.make_ptr(source.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=size)
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(out.shape)), out)


@cute.jit
def load8(source: cute.Tensor, row, column: Int32, out: cute.Tensor):
    """Eight elements of a row into registers of the same type, 16 bytes at a time; 64-bit offsets."""
    pointer = source.iterator + cute.crd2idx((Int64(row), column), source.layout)
    aligned = cute.make_ptr(source.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(aligned, cute.make_layout(8)), out)


@cute.jit
def load8_float(source: cute.Tensor, row, column: Int32, out: cute.Tensor):
    """The same, converted to FP32."""
    raw = cute.make_rmem_tensor(8, source.element_type)
    load8(source, row, column, raw)
    for i in cutlass.range_constexpr(8):
        out[i] = raw[i].to(Float32)


@cute.jit
def prefetch(source: cute.Tensor, row, columns: cutlass.Constexpr):
    """Ask for a row, into L2."""
    address = (source.iterator + cute.crd2idx((Int64(row), 0), source.layout)).toint()
    count = Int32(columns * source.element_type.width // 8)
    inline_ptx(None, [address, count], "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", side_effects=True)


@cute.jit
def store(values: cute.Tensor, target: cute.Tensor, row, column: Int32, align: cutlass.Constexpr):
    """A thread's registers to consecutive bytes of a row of ``target``."""
    pointer = target.iterator + cute.crd2idx((Int64(row), column), target.layout)
    aligned = cute.make_ptr(values.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    cute.autovec_copy(values, cute.make_tensor(aligned, cute.make_layout(values.shape)))
