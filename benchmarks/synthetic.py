"""Long histories with labels from a known rule, for the training command: what a public data set does not have.

Every other item is of a kind that counts. A user likes the two kinds of items to two independent degrees, and rates 1 … 5 accordingly,
with noise. A target is a random item ``c``; its label is drawn with probability

    sigmoid( sharpness * mean_j w_j / deviation  +  appeal_c ),    w = (rating - 3) / 2 over the events of the kind that counts

so it depends on every such event of the history and on no other: attention has to tell them apart. The rule's own normalized entropy is
the least that any model can reach, and is reported beside the models'. One request a user; training and held-out users are different.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.config import setting
from benchmarks.data import UNKNOWN, Dataset, Interactions, Requests


@dataclass(frozen=True)
class SyntheticConfig:
    """How many users, how long their histories are, how sharp the rule is."""

    users: int = setting(2048, "training users, one request each")
    held_out_users: int = setting(512, "held-out users")
    items: int = setting(300, "items")
    shortest: int = setting(16, "events of the shortest history")
    longest: int = setting(16384, "events of the longest; lengths are log-uniform between the two, and one user has exactly this")
    targets: int = setting(16, "ratings to predict in a request")
    sharpness: float = setting(2.0, "deviation over users of the label's logit")
    seed: int = setting(0, "of the data; runs differ by their own seeds")

    def __post_init__(self) -> None:
        for name in ("users", "held_out_users", "items", "targets", "shortest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.longest < self.shortest:
            raise ValueError(f"longest: got {self.longest}, expected at least shortest = {self.shortest}")


@dataclass(frozen=True)
class SyntheticDataset(Dataset):
    """A data set whose labels' probabilities are known. probability: float64 of every event, 0.5 where it is not a target."""

    probability: np.ndarray

    def floor(self, requests: Requests) -> float:
        """Normalized entropy of the rule itself on the targets of ``requests``."""
        at = np.concatenate([np.arange(a, b) for a, b in zip(requests.start, requests.stop, strict=True)])
        p, label = self.probability[at], self.label[at]
        cross = -np.mean(np.where(label > 0, np.log(p), np.log1p(-p)))
        base = float(np.mean(label, dtype=np.float64))
        return float(cross / -(base * math.log(base) + (1 - base) * math.log(1 - base)))


def make_synthetic(config: SyntheticConfig) -> SyntheticDataset:
    """The data set of a configuration; the same bytes for the same configuration."""
    draw = np.random.default_rng(config.seed)
    appeal = draw.standard_normal(config.items)
    users = config.users + config.held_out_users
    length = np.exp(draw.uniform(math.log(config.shortest), math.log(config.longest + 1), users)).astype(np.int64)
    length = np.clip(length, config.shortest, config.longest)
    length[config.users // 2] = config.longest
    size = length + config.targets
    stop = np.cumsum(size)
    begin, start = stop - size, stop - config.targets
    total = int(stop[-1])
    item = draw.integers(0, config.items, total)
    rating = np.empty(total)
    probability = np.full(total, 0.5)
    time = np.empty(total)
    counts = item % 2 == 0
    mood = np.zeros(users)
    for u in range(users):
        likes = 0.5 * draw.standard_normal(2)
        history = slice(begin[u], start[u])
        fit = np.where(counts[history], likes[0], likes[1]) + draw.standard_normal(length[u])
        rating[history] = np.clip(np.rint(3 + fit), 1, 5)
        mood[u] = np.mean((rating[history] - 3) / 2, where=counts[history]) if counts[history].any() else 0.0
        target = slice(start[u], stop[u])
        rating[target] = 3.0
        # One second an event, the request a second after the last; users one after the other.
        time[history] = begin[u] + np.arange(length[u])
        time[target] = begin[u] + length[u]
    logit = config.sharpness * np.repeat(mood / mood.std(), config.targets)
    for u in range(users):
        target = slice(start[u], stop[u])
        probability[target] = 1 / (1 + np.exp(-(logit[config.targets * u : config.targets * (u + 1)] + appeal[item[target]])))
    probability = np.clip(probability, 1e-9, 1 - 1e-9)
    label = (draw.random(total) < probability).astype(np.float32)
    user = np.repeat(np.arange(users), size)
    events = Interactions(user, item, rating, time, tuple(map(str, range(users))), tuple(map(str, range(config.items))))
    requests = Requests(begin, start, stop, time[start])
    training = np.arange(users) < config.users
    return SyntheticDataset(
        events=events,
        item_index=item + 1 + UNKNOWN,
        rating_index=rating.astype(np.int64),
        label=label,
        num_items=config.items + 1,
        num_ratings=6,
        split_time=float(time[start[config.users]]),
        train=requests.take(training),
        held_out=requests.take(~training),
        probability=probability,
    )
