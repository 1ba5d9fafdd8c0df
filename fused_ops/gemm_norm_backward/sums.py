"""Sums of the partial results that the kernels of the GEMM + norm backward leave, in their order, in one launch.

``wide`` are the parts of ``dw_k``: few rows of many columns, a thread has four columns of all rows. ``narrow`` are those of
``dnorm_weight``: many rows of few columns, 32 threads have every 32nd row of four columns each, and their sums are added in order. So each
result is bitwise repeatable. Two sums by ``torch`` took 18 us, a hundredth of the whole at 1.5 M x 384.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from lp_fa4.compile import build, fake, kernel_cache, symbol

THREADS = 128
AHEAD = 8
"""Rows that a thread asks for at once."""
SLICES = 32
"""Threads that share the rows of a narrow column."""
COLUMNS = 4 * THREADS // SLICES
"""Narrow columns of a CTA."""


class AddParts:
    """See the module's docstring; launch arguments: :func:`compile_add_parts`."""

    @cute.jit
    def __call__(self, wide: cute.Tensor, wide_sum: cute.Tensor, narrow: cute.Tensor, narrow_sum: cute.Tensor, stream):
        first, second = Int32(0), Int32(0)
        if const_expr(wide is not None):
            first = cute.ceil_div(Int32(wide.shape[1]), 4 * THREADS)
        if const_expr(narrow is not None):
            second = cute.ceil_div(Int32(narrow.shape[1]), COLUMNS)
        self.kernel(wide, wide_sum, narrow, narrow_sum, first).launch(
            grid=[first + second, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, wide: cute.Tensor, wide_sum: cute.Tensor, narrow: cute.Tensor, narrow_sum: cute.Tensor, first: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        found = smem.allocate_tensor(Float32, cute.make_layout((COLUMNS, SLICES)), byte_alignment=16)
        cute.arch.griddepcontrol_wait()  # what came before on the stream is over from here on
        if bid < first:
            if const_expr(wide is not None):
                column = 4 * (bid * THREADS + tid)
                if column < wide.shape[1]:
                    store(wide_sum, column, self.rows_of(wide, column, Int32(0), 1))
        else:
            if const_expr(narrow is not None):
                column, slice_ = (bid - first) * COLUMNS + 4 * (tid // SLICES), tid % SLICES
                if column < narrow.shape[1]:
                    total = self.rows_of(narrow, column, slice_, SLICES)
                    for e in cutlass.range_constexpr(4):
                        found[4 * (tid // SLICES) + e, slice_] = total[e]
                cute.arch.sync_threads()
                column = (bid - first) * COLUMNS + tid
                if (tid < COLUMNS) & (column < narrow.shape[1]):
                    total = Float32(0.0)
                    for n in cutlass.range_constexpr(SLICES):
                        total = total + found[tid, n]
                    narrow_sum[column] = total

    @cute.jit
    def rows_of(self, parts: cute.Tensor, column: Int32, first: Int32, step: cutlass.Constexpr):
        """Four columns of every ``step``-th row from ``first`` on, added in order."""
        rows, columns = Int32(parts.shape[0]), Int64(parts.shape[1])
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        base = parts.iterator.toint() + 4 * Int64(column)
        for row in cutlass.range(first, rows, step * AHEAD, unroll=1):
            some = []
            for n in cutlass.range_constexpr(AHEAD):  # the last again where there is none
                at = cutlass.min(row + step * n, rows - 1)
                words = cute.make_rmem_tensor(4, Float32)
                pointer = cute.make_ptr(Float32, base + 4 * (at * columns), cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
                some.append(words)
            for n in cutlass.range_constexpr(AHEAD):
                if row + step * n < rows:
                    for e in cutlass.range_constexpr(4):
                        total[e] = total[e] + some[n][e]
        return total


@cute.jit
def store(out: cute.Tensor, column: Int32, values: cute.Tensor):
    """Four columns of a result."""
    pointer = cute.make_ptr(Float32, out.iterator.toint() + 4 * Int64(column), cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(4)))


@kernel_cache
def compile_add_parts(arch: str, wide: bool, narrow: bool):
    """Compile for ``arch``. Arguments at launch, None where there is none: FP32 parts ``[n, E]`` and their sum ``[E]``, E a multiple of 4,
    in few and in many rows."""
    arguments = []
    for there in (wide, narrow):
        columns = symbol(4)
        arguments += [fake("float32", (symbol(), columns), compact=True), fake("float32", (columns,))] if there else [None, None]
    return build(arch, AddParts(), *arguments)
