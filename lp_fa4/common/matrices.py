"""8 x 8 matrices of 16-bit units from shared memory to the registers of a warp, as products want them."""

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx


def load_matrices(address, transposed: bool = False) -> list[Int32]:
    """Four matrices by ``ldmatrix``, a register each: lane ``l`` gives the shared-memory address of row ``l % 8`` (16 bytes) of matrix
    ``l // 8`` and receives units ``2 (l % 4)`` and the next of row ``l // 4`` of each; ``transposed``: of column ``l // 4``."""
    kind = llvm.StructType.get_literal([T.i32()] * 4)
    form = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    result = inline_ptx(kind, [address], text, "=r,=r,=r,=r,r,~{memory}", side_effects=True)
    return [Int32(llvm.extractvalue(T.i32(), result, [i])) for i in range(4)]
