"""Operands that carry an auxiliary copy for Hopper's MMAs."""

from dataclasses import dataclass

from torch import Tensor

from lp_fa4.mx import MXTensor


@dataclass(frozen=True, eq=False, repr=False)
class MXTensorWithCopy(MXTensor):
    """An ``MXTensor`` whose producer also wrote the copy with tokens innermost.

    ``transposed``: uint8 ``[H, D, 32 * (T // 32 + B)]`` as ``lp_fa4.sm90.transpose.transposed_copy`` defines it, in
    "accumulator" order, of exactly this payload. Any method that makes a new tensor (``to``, ``clone``, ``transpose``)
    must drop it; where it is missing the attention forward turns the payload itself.
    """

    transposed: Tensor | None = None

    def _map(self, fn) -> MXTensor:
        return MXTensor(self.payload, self.scale, self.block, self.offsets, self.token_dim)._map(fn)
