"""Balanced coordinates of a head's queries and keys.

E4M3 rounds every number by a share of itself. So each operand gives a score ``q . k`` an error of that share squared times
``sum_i var(q_i) var(k_i)``. Scores do not change under ``q -> A^-1 q``, ``k -> A k`` with any invertible symmetric ``A``, but it does:
with covariances Cq and Ck it is least where ``A Ck A = A^-1 Cq A^-1`` and no channel stands out (which the Hadamard rotation ``R`` behind
it sees to), and is then ``(sum sqrt(mu))^2 / D`` over the eigenvalues mu of ``Cq Ck``, against ``sum mu`` for signals as large: never more,
and the less the further Cq and Ck are from being each other's inverse. One step towards it, small enough to be inverted by a product::

    A = 1 + c (Cq - Ck),   both with trace D;   c = min(1/6, 0.6 / |Cq - Ck|)

Cq is that of the projected seeds, Ck that of normed events with independent channels, ``Wk diag(gain)^2 Wk^T``. A is a choice of
coordinates, nothing that is learned: only the rounding depends on it, and no gradient goes through it. Folded into the projections it costs
some products of ``D x D`` matrices a step. Where a covariance overflows, or is not a number, A is 1.
"""

import torch
from torch import Tensor

from fused_ops.hadamard import rotation

STEP, REACH = 1 / 6, 0.6
"""Largest c, and largest norm of ``c (Cq - Ck)``, of which the 32nd power is left of the inverse's error: 8e-8."""
LEAST = 1e-30
"""Least trace that is divided by."""


def _normalised(covariance: Tensor) -> Tensor:
    trace = covariance.diagonal(dim1=1, dim2=2).sum(dim=1)
    return covariance * (covariance.shape[1] / trace.clamp_min(LEAST))[:, None, None]


def balanced_coordinates(q: Tensor, w: Tensor, gain: Tensor, rotate: bool) -> tuple[Tensor, Tensor]:
    """``R A`` and ``R A^-1``, FP32 ``[H, D, D]``: what queries and keys of a head are multiplied by."""
    heads, dim = q.shape[1:]
    rows = q.detach().to(torch.float32).transpose(0, 1)
    weight = (w.detach().to(torch.float32) * gain.detach().to(torch.float32)).unflatten(0, (heads, dim))
    apart = _normalised(rows.transpose(1, 2) @ rows) - _normalised(weight @ weight.transpose(1, 2))
    apart = torch.where(apart.isfinite().all(dim=(1, 2), keepdim=True), apart, 0.0)
    second = apart @ apart
    fourth = second @ second
    norm = torch.linalg.vector_norm(fourth, dim=(1, 2)).sqrt().sqrt()  # at least the largest eigenvalue's magnitude
    c = (REACH / norm).clamp_max(STEP)[:, None, None]
    one = torch.eye(dim, device=q.device)
    step, power = c * apart, c.square() * second
    inverse = (one - step) @ (one + power)
    power = c.square().square() * fourth
    for last in (False, False, True):
        inverse = inverse @ (one + power)
        power = power if last else power @ power
    basis = one + step
    if rotate:
        turn = rotation(dim, q.device)
        basis, inverse = turn @ basis, turn @ inverse
    return basis, inverse
