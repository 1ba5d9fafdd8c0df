"""Producers and consumers of MXFP8 around the attention core.

Each operation is a folder: ``reference`` is the definition in plain PyTorch, ``interface`` the public function with its
shape checks and its ``torch.library`` operator. None of them is differentiable: they are the pieces that a module's own
forward and backward are made of (``modules.PMA``).
"""

from fused_ops.coordinates.interface import balanced_coordinates
from fused_ops.gemm_norm_backward.interface import GemmNormGradients, gemm_norm_backward
from fused_ops.gemm_quantize.interface import gemm_quantize, gemm_quantize_scatter
from fused_ops.gemm_quantize.weights import projection_weight
from fused_ops.head_quantize.interface import head_quantize
from fused_ops.norm_projection.interface import NormProjection, rmsnorm_project
from fused_ops.rmsnorm_quantize.interface import CentredNorm, rmsnorm_center_quantize, rmsnorm_center_scatter, rmsnorm_quantize
from fused_ops.scale_layout.interface import gather_scales, scatter_scales

__all__ = [
    "CentredNorm",
    "GemmNormGradients",
    "NormProjection",
    "balanced_coordinates",
    "gather_scales",
    "gemm_norm_backward",
    "gemm_quantize",
    "gemm_quantize_scatter",
    "head_quantize",
    "projection_weight",
    "rmsnorm_center_quantize",
    "rmsnorm_center_scatter",
    "rmsnorm_project",
    "rmsnorm_quantize",
    "scatter_scales",
]
