"""Products of one warpgroup: operands as fragments, or by the lower halves of their descriptors in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.tcgen05.helpers import int_to_smem_descriptor
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx

UPPER_HALF = {128: 0x40000040, 64: 0x80000020}
"""Upper half of the descriptor of a K-major tile by the bytes of its rows: their swizzle, and the distance of eight rows."""


def low_half(address):
    """Lower half of the descriptor of an operand at ``address`` in shared memory. 16 bytes further on it is 1 more: shared memory ends
    long before a sum could leave the field."""
    return (address >> 4) | 0x10000


def described(low, row_bytes: int, zero=None, of_a: bool = False):
    """The descriptor with this lower half. ``zero``: an Int32 that is 0 at run time and unknown at compile time, or None.

    With it the upper half is a number of each operand's own that ptxas keeps in its uniform register; of a constant it makes a copy for
    every product (13 of 22 moves a turn of the forward's loop).
    """
    if zero is not None:
        upper = zero ^ UPPER_HALF[row_bytes] if of_a else zero + UPPER_HALF[row_bytes]
        return int_to_smem_descriptor(Int64(inline_ptx(T.i64(), [low, upper], "mov.b64 $0, {$1, $2};", "=l,r,r")))
    text = f"{{.reg .b32 h; mov.b32 h, {UPPER_HALF[row_bytes]:#x}; mov.b64 $0, {{$1, h}};}}"
    return int_to_smem_descriptor(Int64(inline_ptx(T.i64(), [low], text, "=l,r")))


@cute.jit
def product(
    mma,
    acc,
    a,
    b,
    fresh: cutlass.Constexpr,
    b_low,
    b_bytes: cutlass.Constexpr,
    a_low=None,
    a_bytes: cutlass.Constexpr = 0,
    zero=None,
    fence: cutlass.Constexpr = True,
    summed=None,
):
    """Issue ``acc (+)= a b`` over all K blocks as one wgmma group; ``fresh``: what ``acc`` held does not count. Operands of shared memory
    are given by the lower halves of their descriptors and the bytes of their rows; of the fragments ``a`` and ``b`` only the layouts count
    then. ``zero``: as in :func:`described`. ``fence``: no product before has seen to the registers of this one. ``summed``: whether ``acc``
    holds a sum already, known at run time only (None: ``not fresh``).

    From descriptor fragments the DSL makes 64-bit sums, five uniform instructions more a wgmma, each waiting for the one before.
    """
    if const_expr(fence):
        warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not fresh)
    if const_expr(summed is not None):
        atom.set(warpgroup.Field.ACCUMULATE, summed)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        left, right = a[None, None, k], b[None, None, k]
        if const_expr(a_low is not None):
            left = cute.make_tensor(described(a_low + 2 * k, a_bytes, zero, True), left.layout)
        right = cute.make_tensor(described(b_low + 2 * k, b_bytes, zero), right.layout)
        cute.gemm(atom, acc, left, right, acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def start(mma, acc, a, b, blocks, fresh: cutlass.Constexpr):
    """Issue ``acc (+)= a b`` of fragments over the K blocks given. The caller fences before and commits after."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not fresh)
    for k in blocks:
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


@cute.jit
def issue(mma, acc, a, b, blocks=None, zero: cutlass.Constexpr = True):
    """As :func:`product`, of fragments, over the K blocks given (run-time numbers, or None for all)."""
    warpgroup.fence()
    start(mma, acc, a, b, tuple(range(cute.size(a.shape[2]))) if const_expr(blocks is None) else blocks, zero)
    warpgroup.commit_group()
