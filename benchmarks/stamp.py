"""A kernel that notes which multiprocessor a CTA is on, how many cycles that has counted, and the time.

``clock64`` counts a multiprocessor's own cycles and ``globaltimer`` nanoseconds, so two launches around other work give the clock at which
the work ran, whatever the driver was asked for.
"""

import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T
from torch import Tensor

from lp_fa4.common.numbers import inline_ptx
from lp_fa4.compile import arch_of, build, fake, kernel_cache, launch, multiprocessors, symbol

CTAS = 4
"""CTAs a multiprocessor, so that few are missed."""


class Stamp:
    """One warp a CTA; ``out``: int64 ``[CTAs, 3]``."""

    @cute.jit
    def __call__(self, out: cute.Tensor, stream):
        self.kernel(out).launch(grid=[Int32(out.shape[0]), 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        multiprocessor = Int64(Int32(inline_ptx(T.i32(), [], "mov.u32 $0, %smid;", "=r", side_effects=True)))
        cycles = Int64(inline_ptx(T.i64(), [], "mov.u64 $0, %clock64;", "=l", side_effects=True))
        nanoseconds = Int64(inline_ptx(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", side_effects=True))
        if tid == 0:
            out[bid, 0] = multiprocessor
            out[bid, 1] = cycles
            out[bid, 2] = nanoseconds


@kernel_cache
def compile_stamp(arch: str):
    """The kernel for ``arch``."""
    return build(arch, Stamp(), fake("int64", (symbol(), 3), align=8, compact=True))


def stamps(device: torch.device) -> Tensor:
    """Room for one launch: int64 ``[CTAs, 3]`` of multiprocessor, cycles, nanoseconds."""
    return torch.zeros(CTAS * multiprocessors(device), 3, dtype=torch.int64, device=device)


def stamp(out: Tensor) -> None:
    """Write ``out`` on the current stream."""
    launch(compile_stamp(arch_of(out.device)), out.device, out)
