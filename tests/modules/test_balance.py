"""Batches dealt out by length: a partition, even counts, even sums, the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.balance import BalancedBatchSampler, deal, imbalance


@given(st.lists(st.integers(0, 16384), max_size=60), st.integers(1, 9))
def test_deal_is_a_partition(lengths, ranks):
    dealt = deal(lengths, ranks)
    assert sorted(i for part in dealt for i in part) == list(range(len(lengths)))
    counts = [len(part) for part in dealt]
    assert max(counts) - min(counts) <= 1


def lengths_of(kind, samples=4096):
    generator = torch.Generator().manual_seed(0)
    if kind == "uniform":
        return torch.randint(1, 16385, (samples,), generator=generator).tolist()
    return torch.randn(samples, generator=generator).mul(1.2).exp().mul(1500).clamp(0, 16384).long().tolist()


@pytest.mark.parametrize("kind", ["uniform", "lognormal"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("batch_size", [16, 128])
def test_imbalance_goes(kind, ranks, batch_size):
    lengths = lengths_of(kind)
    fair = BalancedBatchSampler(lengths, batch_size, ranks=ranks).mean_imbalance()
    drawn = BalancedBatchSampler(lengths, batch_size, ranks=ranks, balance=False).mean_imbalance()
    assert fair < 0.02 and fair < drawn / 5, (fair, drawn)


def test_ranks_agree_and_cover_the_pass():
    lengths = lengths_of("lognormal", 203)
    for drop_last in (True, False):
        samplers = [BalancedBatchSampler(lengths, 8, rank=r, ranks=3, seed=5, drop_last=drop_last) for r in range(3)]
        for s in samplers:
            s.set_epoch(2)
        batches = [list(s) for s in samplers]
        assert {len(b) for b in batches} == {len(samplers[0])}
        seen = sorted(i for rank in batches for batch in rank for i in batch)
        assert len(set(seen)) == len(seen) == (192 if drop_last else 203)
        first = list(samplers[0])
        samplers[0].set_epoch(3)
        assert list(samplers[0]) != first, "epochs differ"


def test_words():
    assert imbalance([4, 2]) == pytest.approx(1 / 3) and imbalance([0, 0]) == 0 and imbalance([]) == 0
    with pytest.raises(ValueError, match="rank is 2"):
        BalancedBatchSampler([1, 2], 1, rank=2, ranks=2)
    with pytest.raises(ValueError, match="negative"):
        BalancedBatchSampler([1, -2], 1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        BalancedBatchSampler([1], 0)
    with pytest.raises(ValueError, match="ranks is 0"):
        deal([1], 0)
