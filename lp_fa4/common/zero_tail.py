"""Rows past the last sequence set to zero, in one launch that reads the last offset on the device."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol

THREADS, CTAS = 256, 128


class ZeroTail:
    """CTA ``i`` of 128 takes every 128th row of the tail, of both tensors."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, offsets: cute.Tensor, stream):
        self.kernel(a, b, offsets).launch(grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, offsets: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        end, width = Int32(offsets[offsets.shape[0] - 1]), Int32(a.shape[1])
        for row in cutlass.range(end + bid, Int32(a.shape[0]), CTAS, unroll=1):
            for i in cutlass.range(tid, width // 4, THREADS, unroll=1):
                for x in (a, b):
                    at = x.iterator.toint() + Int64(row) * width + 4 * i
                    word = cute.make_ptr(Int32, at, cute.AddressSpace.gmem, assumed_align=4)
                    cute.make_tensor(word, cute.make_layout(1))[0] = Int32(0)


@kernel_cache
def compile_zero_tail(arch: str, offsets_dtype: str):
    """Compile for ``arch``. Arguments: two tensors uint8 ``[T, bytes]``, rows of one width, a multiple of 16, whose rows ``offsets[-1]:``
    become 0; offsets ``[B + 1]``."""
    rows, width = symbol(), symbol(16)
    pair = [fake("uint8", (rows, width), compact=True) for _ in range(2)]
    return build(arch, ZeroTail(), *pair, fake_offsets(offsets_dtype))
