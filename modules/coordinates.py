"""Matrices of a head's coordinates (``fused_ops.balanced_coordinates``) applied to weights, queries and their gradients."""

import torch
from torch import Tensor


def transform(matrices: Tensor, rows: Tensor) -> Tensor:
    """``matrices[h] @ rows[h]`` for a weight ``rows [H * D, C]`` and ``matrices [H, D, D]``: FP32 ``[H * D, C]``."""
    heads, dim = matrices.shape[:2]
    return (matrices @ rows.to(torch.float32).unflatten(0, (heads, dim))).flatten(0, 1)


def transform_heads(q: Tensor, matrices: Tensor) -> Tensor:
    """``q[:, h] @ matrices[h]`` for ``q [Q, H, D]``: FP32 ``[Q, H, D]``."""
    return (q.transpose(0, 1) @ matrices).transpose(0, 1)
