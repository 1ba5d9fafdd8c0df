"""The query side of PMA in plain PyTorch: ``q = RMSNorm(seeds) Wq^T``, and the coordinates that attention multiplies in."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_ops.hadamard import rotation
from lp_fa4.mx import quantize_mx
from lp_fa4.operator import custom_op
from modules.coordinates import transform_heads
from modules.numerics import Numerics


def _normed(seeds: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(seeds.to(torch.float32), seeds.shape[1:], norm_weight.to(torch.float32), eps)


@custom_op("modules::project_queries", mutates_args=())
def project_queries(seeds: Tensor, norm_weight: Tensor, proj: Tensor, eps: float, rounded: bool) -> Tensor:
    """``RMSNorm(seeds) @ Wq^T``, ``[Q, dim]`` FP32; both operands in MXFP8 if ``rounded``, which the gradient passes straight through.

    One operator, so that no compiler puts its sums in another order: coordinates are chosen from all bits of the queries, and would make a
    module that is compiled one of other roundings.
    """
    operands = _normed(seeds, norm_weight, eps), proj.to(torch.float32)
    return F.linear(*(quantize_mx(x).dequantize() for x in operands) if rounded else operands)


@project_queries.register_fake
def _(seeds, norm_weight, proj, eps, rounded):
    return seeds.new_empty((seeds.shape[0], proj.shape[0]), dtype=torch.float32)


def _project_setup(ctx, inputs, output):
    *tensors, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _project_backward(ctx, dq):
    seeds, norm_weight, proj = ctx.saved_tensors
    s, weight = seeds.to(torch.float32), norm_weight.to(torch.float32)
    rstd = torch.rsqrt(s.square().mean(dim=-1, keepdim=True) + ctx.eps)
    normed = s * rstd
    d_scaled = dq @ proj.to(torch.float32)
    d_normed = d_scaled * weight
    d_seeds = rstd * (d_normed - normed * (d_normed * normed).mean(dim=-1, keepdim=True))
    d_proj = dq.t() @ (normed * weight)
    return d_seeds.to(seeds.dtype), (d_scaled * normed).sum(dim=0).to(norm_weight.dtype), d_proj.to(proj.dtype), None, None


project_queries.register_autograd(_project_backward, setup_context=_project_setup)


def query_heads(seeds: Tensor, norm_weight: Tensor, proj: Tensor, heads: int, eps: float, numerics: Numerics | None) -> Tensor:
    """``RMSNorm(seeds) @ Wq^T`` as ``[Q, H, D]`` FP32, before its coordinates are chosen and it is quantized; differentiable.

    There are ``Q`` rows, once a step, so FP32 costs nothing. With ``query_projection="e4m3"`` the forward product takes both operands in
    MXFP8. ``numerics=None`` is BF16 attention.
    """
    rounded = numerics is not None and numerics.query_projection == "e4m3"
    return project_queries(seeds, norm_weight, proj, eps, rounded).unflatten(1, (heads, -1))


def turn(q: Tensor, numerics: Numerics, matrices: Tensor | None = None) -> Tensor:
    """``q [Q, H, D]`` in the coordinates that attention multiplies in: ``matrices [H, D, D]`` of balanced ones, the rotation otherwise."""
    if matrices is not None:
        return transform_heads(q, matrices.transpose(1, 2))
    return q @ rotation(q.shape[-1], q.device) if numerics.rotates(q.shape[-1]) else q


def turn_back(dq: Tensor, numerics: Numerics, matrices: Tensor) -> Tensor:
    """Gradient of :func:`turn`'s argument from that of its result, ``[Q, H, D]``; ``matrices``: empty where the coordinates are plain."""
    if matrices.numel():
        return transform_heads(dq, matrices).contiguous()
    return dq @ rotation(dq.shape[-1], dq.device) if numerics.rotates(dq.shape[-1]) else dq
