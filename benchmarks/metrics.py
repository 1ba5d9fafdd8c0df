"""The two figures by which click and rating predictors are judged: normalized entropy and the area under the ROC curve.

Normalized entropy (He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 3): the mean cross-entropy of
the predictions over the entropy of the base rate p, -(p log p + (1 - p) log(1 - p)). 1 is what a predictor that knows only the base rate
gets; lower is better. The base rate used here is that of the very set the predictions are judged on, which is the strictest choice: no
constant predictor can be below 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def entropy(rate: float) -> float:
    """Entropy in nats of a coin with probability `rate`; 0 at 0 and 1."""
    return -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)


def normalized_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean cross-entropy over the entropy of the labels' own base rate, in FP64.

    Args:
        logits: [N], float, any device.
        labels: [N], 0 or 1.

    Returns:
        the ratio; NaN if a logit is NaN, if there are no labels, or if all labels are the same (the ratio is then undefined).
    """
    if logits.shape != labels.shape or logits.dim() != 1:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: expected one vector length for both")
    if labels.numel() == 0:
        return math.nan
    target = labels.double()
    base = entropy(float(target.mean()))
    loss = float(F.binary_cross_entropy_with_logits(logits.double(), target))
    return loss / base if base > 0 else math.nan


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a random positive is scored above a random negative, ties counting one half (Mann-Whitney, mean ranks).

    Args:
        scores: [N], float, any device; only their order matters.
        labels: [N], 0 or 1.

    Returns:
        the probability; NaN if a score is NaN or if there are no positives or no negatives.
    """
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ValueError(f"scores {tuple(scores.shape)} and labels {tuple(labels.shape)}: expected one vector length for both")
    value = scores.detach().to("cpu", torch.float64).numpy()
    positive = labels.detach().to("cpu").numpy() > 0.5
    wins, losses = int(positive.sum()), int((~positive).sum())
    if np.isnan(value).any() or not wins or not losses:
        return math.nan
    _, inverse, count = np.unique(value, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    rank = (last - (count - 1) / 2)[inverse]  # the mean of the ranks first..last of every group of equal scores, counted from 1
    return float((rank[positive].sum() - wins * (wins + 1) / 2) / (wins * losses))
