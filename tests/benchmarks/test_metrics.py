"""NE and AUC against definitions written as plain loops, with ties, extremes and degenerate sets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.metrics import auc, entropy, normalized_entropy


def brute_auc(scores, labels):
    pairs = [(a, b) for a, x in zip(scores, labels, strict=True) if x for b, y in zip(scores, labels, strict=True) if not y]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def brute_ne(logits, labels):
    loss = sum(math.log1p(math.exp(-z if y else z)) for z, y in zip(logits, labels, strict=True)) / len(labels)
    p = sum(labels) / len(labels)
    return loss / -(p * math.log(p) + (1 - p) * math.log(1 - p))


both_labels = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40).filter(
    lambda rows: len({y for _, y in rows}) == 2
)


@given(both_labels)
@settings(max_examples=200, deadline=None)
def test_against_the_definitions_with_many_ties(rows):
    scores, labels = [float(s) for s, _ in rows], [y for _, y in rows]
    s, y = torch.tensor(scores), torch.tensor(labels, dtype=torch.float32)
    assert auc(s, y) == pytest.approx(brute_auc(scores, labels), abs=1e-12)
    assert normalized_entropy(s, y) == pytest.approx(brute_ne(scores, labels), rel=1e-9)


def test_known_values():
    y = torch.tensor([0.0, 0, 1, 1])
    assert auc(torch.tensor([1.0, 2, 3, 4]), y) == 1.0
    assert auc(torch.tensor([4.0, 3, 2, 1]), y) == 0.0
    assert auc(torch.zeros(4), y) == 0.5
    assert auc(torch.tensor([0.0, 1, 1, 2]), y) == 0.875
    # A constant at the base rate is exactly 1, at any base rate; every other constant is worse.
    for p in (0.5, 0.25, 0.999):
        labels = (torch.arange(1000) < 1000 * p).float()
        logit = math.log(p / (1 - p))
        assert normalized_entropy(torch.full((1000,), logit, dtype=torch.float64), labels) == pytest.approx(1.0, abs=1e-12)
        assert normalized_entropy(torch.full((1000,), logit + 0.3), labels) > 1.0
    assert entropy(0.5) == pytest.approx(math.log(2)) and entropy(0.0) == entropy(1.0) == 0.0


def test_auc_depends_on_order_only():
    generator = torch.Generator().manual_seed(0)
    s, y = torch.randn(500, generator=generator), (torch.rand(500, generator=generator) < 0.3).float()
    assert auc(s, y) == auc(s.exp(), y) == pytest.approx(1 - auc(-s, y), abs=1e-12)


def test_large_logits_do_not_overflow():
    y = torch.tensor([1.0, 0.0])
    assert normalized_entropy(torch.tensor([200.0, -200.0]), y) == pytest.approx(0.0, abs=1e-12)
    assert normalized_entropy(torch.tensor([-1e4, 1e4]), y) == pytest.approx(1e4 / math.log(2))


@pytest.mark.parametrize("measure", [auc, normalized_entropy])
def test_undefined_is_nan_and_nan_is_seen(measure):
    assert math.isnan(measure(torch.empty(0), torch.empty(0)))
    assert math.isnan(measure(torch.tensor([1.0, 2.0]), torch.ones(2)))
    assert math.isnan(measure(torch.tensor([1.0, 2.0]), torch.zeros(2)))
    assert math.isnan(measure(torch.tensor([1.0, math.nan]), torch.tensor([0.0, 1.0])))
    with pytest.raises(ValueError, match=r"expected one vector length"):
        measure(torch.ones(3), torch.ones(2))
