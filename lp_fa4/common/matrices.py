"""From shared memory to registers: words, and 8 x 8 matrices of 16-bit units as products want them."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx


def shared_words(address, count: int):
    """``count`` words of shared memory, aligned to their size."""
    out = cute.make_rmem_tensor(count, Int32)
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), out)
    return out


def load_matrices(address, transposed: bool = False) -> list[Int32]:
    """Four matrices by ``ldmatrix``, a register each: lane ``l`` gives the shared-memory address of row ``l % 8`` (16 bytes) of matrix
    ``l // 8`` and receives units ``2 (l % 4)`` and the next of row ``l // 4`` of each; ``transposed``: of column ``l // 4``."""
    kind = llvm.StructType.get_literal([T.i32()] * 4)
    form = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    result = inline_ptx(kind, [address], text, "=r,=r,=r,=r,r,~{memory}", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), result, [i])) for i in range(4)]


def warp_mma(kind: str, acc: cute.Tensor, at: int, a, b0, b1):
    """16 x 8 accumulators ``acc[at : at + 4]`` plus the product of ``a`` (four words) and ``b0, b1`` over 16; ``kind``: "f16" or "bf16"."""
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
    text += "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    operands = [*a, b0, b1, *(acc[at + i] for i in range(4))]
    result = inline_ptx(struct, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    for i in range(4):
        acc[at + i] = Float32(llvm.extractvalue(T.f32(), result, [i]))
