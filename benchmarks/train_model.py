"""The recommendation model of the training command: TorchRec embeddings, PMA over the history, an interaction MLP with the candidate.

    history  (item, rating, gap) ── EmbeddingCollection ── sum per event ── PMA ──> [R, seeds, dim] ─┐
    candidates (item) ───────────── the same item table ──────────────────────────> [N, dim] ────────┴─ interaction ──> logit [N]

A request is pooled once, whatever the number of its candidates. The interaction sees, for every candidate, the pooled vectors (through
one linear layer, computed once a request), the candidate's embedding, and its dot product with each pooled vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data import GAP_BUCKETS, Batch
from modules.torchrec import JaggedPooling, embedding_collection, keyed_jagged, resolve

HISTORY = ("item", "rating", "gap")


def features(batch: Batch, device: torch.device) -> Any:
    """The batch as a KeyedJaggedTensor with keys item, rating, gap (events of the history) and candidate, on `device`."""
    history = {name: (getattr(batch, name), batch.lengths) for name in HISTORY}
    return keyed_jagged({**history, "candidate": (batch.candidate, batch.candidates)}).to(device)


class Interaction(nn.Module):
    """Logits of candidates from the pooled vectors of their requests.

    Args:
        dim: width of the candidate's embedding and of every pooled vector.
        num_seeds: pooled vectors of a request.
        hidden: widths of the MLP's hidden layers, at least one.
        dropout: on the hidden layers' outputs, in training.
    """

    def __init__(self, dim: int, num_seeds: int, hidden: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.request = nn.Linear(num_seeds * dim, hidden[0])
        self.candidate = nn.Linear(dim, hidden[0], bias=False)
        self.match = nn.Linear(num_seeds, hidden[0], bias=False)
        layers: list[nn.Module] = [nn.ReLU(), nn.Dropout(dropout)]
        for width, following in pairwise(hidden):
            layers += [nn.Linear(width, following), nn.ReLU(), nn.Dropout(dropout)]
        self.head = nn.Sequential(*layers, nn.Linear(hidden[-1], 1))

    def forward(self, pooled: Tensor, candidate: Tensor, counts: Tensor) -> Tensor:
        """Args: pooled [R, num_seeds, dim]; candidate [N, dim]; counts [R] integers that sum to N. Returns: logits [N]."""
        total = candidate.shape[0]
        request = self.request(pooled.flatten(1)).repeat_interleave(counts, dim=0, output_size=total)
        repeated = pooled.repeat_interleave(counts, dim=0, output_size=total)
        match = (repeated @ candidate.unsqueeze(-1)).squeeze(-1) / math.sqrt(candidate.shape[1])
        return self.head(request + self.candidate(candidate) + self.match(match)).squeeze(-1)


class RatingModel(nn.Module):
    """Predicts the logit that each candidate is rated at or above the threshold.

    Args:
        pool: the pooling module, `PMA` with `dim` and `num_seeds`.
        num_items, num_ratings: rows of the item and rating tables, with the row for unknown values.
        dim, num_seeds: as of `pool`.
        hidden, dropout: see `Interaction`.
        embedding_scale: standard deviation of the initial embeddings.
        validate: host checks of every batch, see `JaggedPooling`.
    """

    def __init__(
        self,
        pool: nn.Module,
        *,
        num_items: int,
        num_ratings: int,
        dim: int,
        num_seeds: int,
        hidden: Sequence[int],
        dropout: float = 0.0,
        embedding_scale: float = 0.1,
        validate: bool = True,
    ) -> None:
        super().__init__()
        tables = {
            "item": (num_items, ("item", "candidate")),
            "rating": (num_ratings, ("rating",)),
            "gap": (GAP_BUCKETS, ("gap",)),
        }
        self.embeddings = embedding_collection(tables, dim)
        for parameter in self.embeddings.parameters():
            nn.init.normal_(parameter, std=embedding_scale)
        self.pooling = JaggedPooling(pool, HISTORY, combine="sum", validate=validate)
        self.interaction = Interaction(dim, num_seeds, hidden, dropout)

    def forward(self, keyed: Any) -> Tensor:
        """Args: keyed, a KeyedJaggedTensor with the keys of `features`. Returns: FP32 logits [N], N candidates of all requests."""
        rows = resolve(self.embeddings(keyed))
        pooled = self.pooling({name: rows[name] for name in HISTORY})
        candidate = rows["candidate"]
        return self.interaction(pooled.float(), candidate.values(), candidate.lengths()).float()
