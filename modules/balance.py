"""Batches for data-parallel training on jagged histories: every rank the same number of samples and nearly the same number of events.

Attention with a fixed number of seeds costs time in proportion to the events, so a step lasts as long as the rank with the most of them.
Samples drawn at random give ranks sums that differ; the others wait. Here a global batch is drawn first, the same on every rank, and then
dealt out: longest first, each to the rank that has the fewest events and still has room.
"""

from collections.abc import Iterator, Sequence

import torch

__all__ = ["BalancedBatchSampler", "deal", "imbalance"]


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of ``lengths`` for each rank: counts that differ by at most one, sums as even as longest-first makes them.

    Deterministic: ties go to the lower rank, and the lower position counts as longer. Raises: ``ValueError`` for ``ranks < 1``.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1")
    room = [len(lengths) // ranks + (r < len(lengths) % ranks) for r in range(ranks)]
    total = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < room[r]), key=lambda r: (total[r], r))
        dealt[rank].append(i)
        total[rank] += lengths[i]
    return dealt


def imbalance(totals: Sequence[int]) -> float:
    """How much longer the fullest rank works than the mean: ``max / mean - 1``; 0 where nobody has anything."""
    mean = sum(totals) / max(len(totals), 1)
    return max(totals) / mean - 1 if mean else 0.0


class BalancedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """One rank's batches of sample indices, for ``DataLoader(batch_sampler=...)``.

    Args:
        lengths: events of every sample of the data set.
        batch_size: samples of one rank's batch.
        rank, ranks: of the process group; every rank builds the sampler with the same other arguments.
        seed: with ``set_epoch``, decides the order of the samples.
        balance: False deals the global batch out in the order drawn, as ``DistributedSampler`` does (to measure what balancing gives).
        drop_last: leave the last, incomplete global batch out; otherwise it is dealt out, and a rank may get fewer samples, or none.

    Raises: ``ValueError`` naming argument, value and what is allowed.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        balance: bool = True,
        drop_last: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if ranks < 1 or not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank} and ranks {ranks}; rank must be in 0 … ranks - 1")
        self.lengths = [int(n) for n in lengths]
        if any(n < 0 for n in self.lengths):
            raise ValueError(f"lengths has a negative entry ({min(self.lengths)}); every sample has at least 0 events")
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        self.seed, self.balance, self.drop_last = seed, balance, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; the same on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        size = self.batch_size * self.ranks
        return len(self.lengths) // size if self.drop_last else -(-len(self.lengths) // size)

    def global_batches(self) -> Iterator[list[list[int]]]:
        """Every global batch of the pass as one list of sample indices a rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self.batch_size * self.ranks
        for at in range(0, len(self) * size, size):
            drawn = order[at : at + size]
            if self.balance:
                yield [[drawn[i] for i in part] for part in deal([self.lengths[i] for i in drawn], self.ranks)]
            else:
                yield [drawn[r :: self.ranks] for r in range(self.ranks)]

    def __iter__(self) -> Iterator[list[int]]:
        for dealt in self.global_batches():
            yield dealt[self.rank]

    def mean_imbalance(self) -> float:
        """:func:`imbalance` of the events of each rank, mean over the pass: the share of a step that the other ranks wait."""
        found = [imbalance([sum(self.lengths[i] for i in part) for part in dealt]) for dealt in self.global_batches()]
        return sum(found) / max(len(found), 1)
