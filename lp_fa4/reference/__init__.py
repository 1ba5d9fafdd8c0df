"""Attention in plain PyTorch, on any device: the definition of right for every kernel.

``forward`` and ``backward`` round where the kernels round (:class:`lp_fa4.config.AttentionConfig` says where) and compute products in
FP32 on the reconstructed operands. ``exact_attention`` is the truth that both are measured against: differentiable, in FP64.
``prepare`` centres and quantizes ordinary tensors for the drop-in functions.
"""

from lp_fa4.reference.backward import backward
from lp_fa4.reference.exact import exact_attention, exact_gradients
from lp_fa4.reference.forward import forward
from lp_fa4.reference.prepare import Prepared, centre, prepare, sequence_sums
from lp_fa4.reference.rounding import fake_quantize, round_e4m3

__all__ = [
    "Prepared",
    "backward",
    "centre",
    "exact_attention",
    "exact_gradients",
    "fake_quantize",
    "forward",
    "prepare",
    "round_e4m3",
    "sequence_sums",
]
