"""Centre and quantize ordinary tensors: the pass in front of attention for the drop-in functions.

Subtracting a sequence's mean key shifts every score of a row by one number, which softmax does not see (the LSE does, and is corrected);
subtracting its mean value shifts the output by that mean. What is left is smaller, so E4M3 resolves it better. Causal attention gets
neither: a mean over the whole sequence would carry the future into the rounding of the past.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor, quantize_mx, sequence_ids


class Prepared(NamedTuple):
    """Operands of :class:`lp_fa4.problem.AttentionProblem`; ``k_mean``, ``v_mean``, ``v_sum`` fp32 ``[B, Hkv, D]``, None if causal."""

    q: MXTensor
    k: MXTensor
    v: MXTensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    v_sum: Tensor | None


def sequence_sums(x: Tensor, offsets: Tensor | None) -> Tensor:
    """Sum of each sequence's rows, fp32 ``[B, ...]``; ``x [T, ...]``. Rows past ``offsets[-1]`` are not read; an empty sequence gives 0.

    On a CPU each sequence is summed pairwise; elsewhere in token order, without reading the offsets on the host.
    """
    if offsets is not None and x.device.type != "cpu":
        flat = x.to(torch.float32).flatten(1).contiguous()
        sums = torch.segment_reduce(flat, "sum", offsets=offsets, axis=0, unsafe=True, initial=0.0)
        return sums.unflatten(1, x.shape[1:])
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    sums = torch.zeros(len(bounds) - 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    for b in range(len(bounds) - 1):
        if bounds[b] < bounds[b + 1]:
            sums[b] = x[bounds[b] : bounds[b + 1]].to(torch.float32).sum(0)
    return sums


def centre(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``x [T, H, D]`` minus its sequence means in FP32, the means ``[B, H, D]``, and the sums of what is left (near 0).

    Rows past ``offsets[-1]`` are 0 in the result.
    """
    if offsets is not None and x.device.type != "cpu":
        return _centre_on_device(x, offsets)
    bounds = [0, x.shape[0]] if offsets is None else offsets.tolist()
    batch = len(bounds) - 1
    means = torch.zeros(batch, *x.shape[1:], dtype=torch.float32, device=x.device)
    sums = torch.zeros_like(means)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for b in range(batch):
        lo, hi = bounds[b], bounds[b + 1]
        if lo < hi:
            rows = x[lo:hi].to(torch.float32)
            means[b] = rows.mean(0)
            rows = rows - means[b]
            out[lo:hi] = rows
            sums[b] = rows.sum(0)
    return out, means, sums


def _centre_on_device(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`centre` without a host read."""
    lengths = (offsets[1:] - offsets[:-1]).clamp(min=1).to(torch.float32)
    means = sequence_sums(x, offsets) / lengths.reshape(-1, *[1] * (x.dim() - 1))
    sequence = sequence_ids(offsets, x.shape[0])
    inside = (sequence < lengths.shape[0]).reshape(-1, *[1] * (x.dim() - 1))
    spread = torch.cat([means, torch.zeros_like(means[:1]) if means.shape[0] else means.new_zeros(1, *means.shape[1:])])[sequence]
    out = torch.where(inside, x.to(torch.float32) - spread, 0.0)
    return out, means, sequence_sums(out, offsets)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    causal: bool,
    config: AttentionConfig,
    block: tuple[int, int] = (32, 32),
) -> Prepared:
    """Quantize ``q [N, H, D]``, ``k``, ``v [T, Hkv, D]`` (any float dtypes and strides) in ``block``, centred where that is allowed.

    ``offsets_q`` must be given for dense queries too (``arange(B + 1) * Q``) unless there is one sequence.
    """
    q8 = quantize_mx(q, block, offsets_q, token_dim=0)
    if causal or not config.center_p:
        return Prepared(q8, quantize_mx(k, block, offsets_k, token_dim=0), quantize_mx(v, block, offsets_k, token_dim=0), None, None, None)
    kc, k_mean, _ = centre(k, offsets_k)
    vc, v_mean, v_sum = centre(v, offsets_k)
    return Prepared(
        q8, quantize_mx(kc, block, offsets_k, token_dim=0), quantize_mx(vc, block, offsets_k, token_dim=0), k_mean, v_mean, v_sum
    )
