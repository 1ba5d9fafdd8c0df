"""The projection's weight in units of the given exponents, in FP16, and whether FP16 can hold its sums.

Of rows in units of their exponents, and a weight whose element of row n and column k is multiplied by ``2^(e_k - e_n)`` (e_k: the rows'
exponent, e_n: the product's), a sum is the product in units of its codes. Where the rows' exponents are the norm's own bound
(``rmsnorm_quantize.interface.norm_exponent``) a row is at most 448 long, so by Cauchy and Schwarz every partial sum is at most 448 times
the length of a row of the weight. ``flags``: rows of the weight that are longer than ``LONGEST`` (exponents of the product some 64 times
too small for the bound by those lengths), or not finite: BF16 and FP32 serve then.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float16, Float32, Int32
from torch import Tensor

from fused_ops.norm_projection.config import ProjectionSpec
from fused_ops.rmsnorm_quantize.arithmetic import load, store
from lp_fa4.common.numbers import inverse_of_byte, scale_of_byte
from lp_fa4.compile import arch_of, build, fake, kernel_cache, launch

LONGEST = 144.0
"""448 x 144 is 64,512, and FP16 ends at 65,504: 1.5% for what rounding adds to a row and to its partial sums."""
WARPS = 8


class FoldedWeight:
    """A warp a row."""

    def __init__(self, spec: ProjectionSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, w: cute.Tensor, given: cute.Tensor, bound: cute.Tensor, out: cute.Tensor, flags: cute.Tensor, stream):
        self.kernel(w, given, bound, out, flags).launch(
            grid=[self.spec.columns // WARPS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, w: cute.Tensor, given: cute.Tensor, bound: cute.Tensor, out: cute.Tensor, flags: cute.Tensor):
        spec = self.spec
        cta, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        row, lane = WARPS * cta + tid // 32, tid % 32
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        inverse, squares = inverse_of_byte(Int32(bound[0, row // spec.width])), Float32(0.0)
        for i in cutlass.range_constexpr(spec.contracted // 64):
            column = 64 * i + 2 * lane
            factor = scale_of_byte(Int32(given[0, column // spec.norm_width])) * inverse
            raw, folded = cute.make_rmem_tensor(2, w.element_type), cute.make_rmem_tensor(2, Float16)
            load(w, row, column, raw)
            for c in cutlass.range_constexpr(2):
                value = raw[c].to(Float32) * factor
                folded[c] = value.to(Float16)
                squares = squares + value * value
            store(folded, out, row, column, 4)
        for i in cutlass.range_constexpr(5):
            squares = squares + cute.arch.shuffle_sync_bfly(squares, offset=1 << i)
        if lane == 0:
            flag = Int32(1)
            if squares <= LONGEST**2:  # false for a NaN
                flag = Int32(0)
            flags[row] = flag


@kernel_cache
def _compile_folded_weight(arch: str, spec: ProjectionSpec):
    k, n = spec.contracted, spec.columns
    return build(
        arch,
        FoldedWeight(spec),
        fake("bfloat16", (n, k)),
        fake("uint8", (1, k // spec.norm_width), align=1, compact=True),
        fake("uint8", (1, n // spec.width), align=1, compact=True),
        fake("float16", (n, k), compact=True),
        fake("int32", (n,), align=4),
    )


def folded_weight(w: Tensor, given: Tensor, bound: Tensor, spec: ProjectionSpec) -> tuple[Tensor, Tensor]:
    """FP16 ``[N, K]`` of aligned BF16 ``w [N, K]``, and int32 flags ``[N]``: see the module's docstring. ``given``, ``bound``: scale bytes
    of the rows and of the product."""
    out = torch.empty(w.shape, dtype=torch.float16, device=w.device)
    flags = torch.empty(w.shape[0], dtype=torch.int32, device=w.device)
    launch(_compile_folded_weight(arch_of(w.device), spec), w.device, w, given, bound, out, flags)
    return out, flags
