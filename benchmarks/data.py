"""Interactions with timestamps, from a file in RecBole's atomic format, as jagged prediction requests without leakage.

The format: text, tab-separated, one event a line; the header names every column as ``name:type`` with type token, float, token_seq or
float_seq. Four columns are used (user, item, rating, timestamp; their names can be chosen), others are ignored.

A request is what a recommender meets: a user at a moment, with everything that user did STRICTLY before it, and the items rated at that
moment. Several ratings of one user with the same timestamp are one request with several candidates, so none of them sees another. With
events sorted by (user, timestamp) both parts are slices, and nothing is copied until a batch is made:

    events of a user:   e0 e1 e2 | e3 e4 | e5 ...            e3, e4 share a timestamp
    request:            [ history )[targets)

The split is one moment for all users: requests before it train, requests from it on are the held-out tail. A training request's history
and targets lie before the split by construction; a held-out request may look back at anything strictly earlier than itself, as a system
in service would. Vocabularies (items, rating levels) are made from training events alone; what only the tail knows has index 0.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.config import UserError

SHIPPED = "recbole/dataset_example/ml-100k/ml-100k.inter"
COLUMN_TYPES = ("token", "float", "token_seq", "float_seq")
UNKNOWN = 0
"""Index of an item or a rating level that no training event has."""

GAP_BUCKETS = 32
"""Time from an event to the request in buckets of log2 seconds: bucket i holds gaps in [2^i, 2^(i+1)), the last
everything longer.
"""


class DataError(UserError):
    """A data file that is missing or malformed; the message names file, line and column."""


@dataclass(frozen=True)
class Columns:
    """Names of the four columns in the header, without their types."""

    user: str = "user_id"
    item: str = "item_id"
    rating: str = "rating"
    time: str = "timestamp"


@dataclass(frozen=True)
class Interactions:
    """Events sorted by (user, timestamp); ties keep the file's order. Arrays of one length.

    user, item: int64 index into `users`, `items` (tokens in order of first appearance in the file). rating: float64. time: float64,
    seconds.
    """

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    users: tuple[str, ...]
    items: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.user)


def shipped_file() -> Path:
    """MovieLens-100K as the `recbole` wheel ships it; the package is located, not imported.

    Raises:
        DataError: the wheel is not installed, or does not hold the file.
    """
    remedy = "install it (pip install --no-deps recbole) or name a file of the same format with data.path=FILE"
    try:
        files = importlib.metadata.files("recbole") or []
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"data.path: not set, and 'recbole', which ships MovieLens-100K, is missing: {remedy}") from None
    for file in files:
        if file.as_posix() == SHIPPED:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise DataError(f"data.path: not set, and the installed 'recbole' does not hold {SHIPPED}: {remedy}")


def _header(line: str, path: Path, wanted: Sequence[str]) -> tuple[int, list[int]]:
    """Number of columns, and where each wanted column stands."""
    names: dict[str, int] = {}
    kinds = []
    fields = line.split("\t")
    for number, field in enumerate(fields, start=1):
        name, colon, kind = field.partition(":")
        if not colon or not name or kind not in COLUMN_TYPES:
            raise DataError(f"{path}:1: column {number}: header {field!r} is not name:type with type {', '.join(COLUMN_TYPES)}")
        if name in names:
            raise DataError(f"{path}:1: column {number}: {name!r} is also column {names[name] + 1}")
        names[name] = number - 1
        kinds.append(kind)
    for name, kind in zip(wanted, ("token", "token", "float", "float"), strict=True):
        if name not in names:
            raise DataError(f"{path}:1: no column {name!r}; the header has {', '.join(names)}")
        if kinds[names[name]] != kind:
            found = kinds[names[name]]
            raise DataError(f"{path}:1: column {names[name] + 1} ({name}): type {found!r}, expected {kind!r}")
    return len(fields), [names[name] for name in wanted]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the data file: {error.strerror or error}") from None
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    for number, line in enumerate(raw.rstrip(b"\r\n").split(b"\n"), start=1):
        try:
            yield number, line.rstrip(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            column = line[: error.start].count(b"\t") + 1
            where = f"{path}:{number}: column {column}"
            raise DataError(f"{where}: not UTF-8 text (byte {error.start + 1} of the line)") from None


def read_interactions(path: str | Path, columns: Columns | None = None) -> Interactions:
    """Read a file in RecBole's atomic format.

    Args:
        path: the file, conventionally ``*.inter``.
        columns: names of the four columns; MovieLens' by default.

    Raises:
        DataError: naming file, line and column of the first thing that is wrong: no such file, no header, a missing column, a line with
            another number of columns, an empty token, a rating or timestamp that is not a finite number, text that is not UTF-8, a file
            without events. A blank line is wrong too, unless it ends the file.
    """
    path = Path(path)
    columns = columns or Columns()
    wanted = (columns.user, columns.item, columns.rating, columns.time)
    lines = _lines(path)
    count, places = _header(next(lines)[1], path, wanted)
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    user: list[int] = []
    item: list[int] = []
    rating: list[float] = []
    time: list[float] = []
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != count:
            at = min(len(fields), count) + (len(fields) > count)
            raise DataError(f"{path}:{number}: column {at}: the line has {len(fields)} columns, the header {count}")
        for place, name, vocabulary, out in (
            (places[0], wanted[0], users, user),
            (places[1], wanted[1], items, item),
        ):
            token = fields[place]
            if not token:
                raise DataError(f"{path}:{number}: column {place + 1} ({name}): empty")
            out.append(vocabulary.setdefault(token, len(vocabulary)))
        for place, name, numbers in ((places[2], wanted[2], rating), (places[3], wanted[3], time)):
            try:
                value = math.nan if "_" in fields[place] else float(fields[place])
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                where = f"{path}:{number}: column {place + 1} ({name})"
                raise DataError(f"{where}: {fields[place]!r} is not a finite number")
            numbers.append(value)
    if not user:
        raise DataError(f"{path}:1: the file has a header and no events")
    u, t = np.asarray(user, dtype=np.int64), np.asarray(time, dtype=np.float64)
    order = np.lexsort((t, u))  # stable: ties keep the file's order
    return Interactions(
        user=u[order],
        item=np.asarray(item, dtype=np.int64)[order],
        rating=np.asarray(rating, dtype=np.float64)[order],
        time=t[order],
        users=tuple(users),
        items=tuple(items),
    )


@dataclass(frozen=True)
class Requests:
    """Prediction requests as slices of the sorted events. int64 arrays of one length; time is float64.

    History of request r: events [begin[r], start[r]), all strictly earlier than time[r]. Targets: events [start[r], stop[r]), all at
    time[r]. begin is the user's first event, or later where a longest history was asked for.
    """

    begin: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    time: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: np.ndarray) -> Requests:
        """The requests at `index` (integers or a mask)."""
        return Requests(self.begin[index], self.start[index], self.stop[index], self.time[index])

    @property
    def targets(self) -> int:
        """Number of ratings to predict."""
        return int((self.stop - self.start).sum())


def make_requests(events: Interactions, max_history: int | None = None) -> Requests:
    """One request for every (user, timestamp) of `events`.

    Args:
        events: sorted events.
        max_history: keep only this many of the latest events of a history; None keeps all.
    """
    new_user = np.append(True, events.user[1:] != events.user[:-1])
    new_time = np.append(True, events.time[1:] != events.time[:-1]) | new_user
    start = np.flatnonzero(new_time)
    stop = np.append(start[1:], len(events))
    first = np.flatnonzero(new_user)
    begin = first[np.cumsum(new_user)[start] - 1]
    if max_history is not None:
        if max_history < 1:
            raise UserError(f"data.max_history = {max_history}: expected at least 1, or null for the whole history")
        begin = np.maximum(begin, start - max_history)
    return Requests(begin, start, stop, events.time[start])


@dataclass(frozen=True)
class Dataset:
    """Events, their features, and the two sets of requests.

    item_index, rating_index: int64 features of every event, 0 (`UNKNOWN`) for what no training event has. label: float32, 1 where the
    rating reaches the threshold. split_time: the first moment of the held-out tail.
    """

    events: Interactions
    item_index: np.ndarray
    rating_index: np.ndarray
    label: np.ndarray
    num_items: int
    num_ratings: int
    split_time: float
    train: Requests
    held_out: Requests

    def base_rate(self, requests: Requests) -> float:
        """Share of positive labels among the targets of `requests`."""
        return float(np.mean(self.label[ranges(requests.start, requests.stop)], dtype=np.float64))


def ranges(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The integers of the ranges [start[i], stop[i]), one after the other, int64."""
    length = stop - start
    before = np.cumsum(length) - length
    return np.arange(int(length.sum()), dtype=np.int64) + np.repeat(start - before, length)


def _index(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """1 + position in the sorted array `known`, or 0."""
    at = np.searchsorted(known, values)
    found = known[np.minimum(at, len(known) - 1)] == values
    return np.where(found, at + 1, UNKNOWN)


def _level(rating: np.ndarray, training: np.ndarray, most: int = 64) -> tuple[np.ndarray, int]:
    """Ratings as levels: the distinct training values if they are few, else `most` bins of equal training mass."""
    known = np.unique(training)
    if len(known) <= most:
        return _index(rating, known), len(known) + 1
    edges = np.unique(np.quantile(training, np.linspace(0, 1, most + 1)[1:-1]))
    return np.searchsorted(edges, rating, side="right") + 1, len(edges) + 2


def make_dataset(events: Interactions, *, threshold: float = 4.0, held_out: float = 0.2, max_history: int | None = None) -> Dataset:
    """Split `events` at one moment for all users and build the features from the part before it.

    Args:
        events: sorted events.
        threshold: a rating of at least this is a positive label.
        held_out: share of events in the tail, in (0, 1). The split is moved to the next distinct timestamp, so that events of one moment
            are never divided.
        max_history: see `make_requests`.

    Raises:
        UserError: the split leaves either side without events, or either side has labels of one kind only.
    """
    if not 0 < held_out < 1:
        raise UserError(f"data.held_out = {held_out}: expected a share between 0 and 1")
    split_time = float(np.sort(events.time)[min(len(events) - 1, round(len(events) * (1 - held_out)))])
    early = events.time < split_time
    if not early.any():
        raise UserError(f"data.held_out = {held_out}: no event is earlier than the split at time {split_time:g}")
    label = (events.rating >= threshold).astype(np.float32)
    for name, part in (("training", label[early]), ("held-out", label[~early])):
        if part.min() == part.max():
            raise UserError(f"data.threshold = {threshold}: every {name} rating has label {part[0]:g}")
    known = np.unique(events.item[early])
    levels, num_ratings = _level(events.rating, events.rating[early])
    requests = make_requests(events, max_history)
    return Dataset(
        events=events,
        item_index=_index(events.item, known),
        rating_index=levels,
        label=label,
        num_items=len(known) + 1,
        num_ratings=num_ratings,
        split_time=split_time,
        train=requests.take(requests.time < split_time),
        held_out=requests.take(requests.time >= split_time),
    )


@dataclass(frozen=True)
class Batch:
    """Requests of one step as plain tensors on the CPU.

    item, rating, gap: int64 [T], the histories one after the other. lengths: int32 [R] events of each history, 0
        allowed.
    candidate: int64 [N] items to judge. candidates: int32 [R] of them in each request, at least 1. label: float32 [N].
    """

    item: Tensor
    rating: Tensor
    gap: Tensor
    lengths: Tensor
    candidate: Tensor
    candidates: Tensor
    label: Tensor


def make_batch(data: Dataset, requests: Requests) -> Batch:
    """Gather the histories, candidates and labels of `requests`."""
    length = requests.start - requests.begin
    history = ranges(requests.begin, requests.start)
    target = ranges(requests.start, requests.stop)
    gap = np.repeat(requests.time, length) - data.events.time[history]
    bucket = np.clip(np.floor(np.log2(np.maximum(gap, 1.0))), 0, GAP_BUCKETS - 1).astype(np.int64)
    return Batch(
        item=torch.from_numpy(data.item_index[history]),
        rating=torch.from_numpy(data.rating_index[history]),
        gap=torch.from_numpy(bucket),
        lengths=torch.from_numpy(length.astype(np.int32)),
        candidate=torch.from_numpy(data.item_index[target]),
        candidates=torch.from_numpy((requests.stop - requests.start).astype(np.int32)),
        label=torch.from_numpy(data.label[target]),
    )


def training_batches(requests: Requests, size: int, seed: int) -> Iterator[Requests]:
    """Batches of `size` requests forever: passes over all of them, each in a new order that `seed` alone decides.

    A pass drops its incomplete last batch, unless there are fewer requests than `size`.
    """
    if size < 1:
        raise UserError(f"train.batch_size = {size}: expected at least 1")
    generator = np.random.default_rng(seed)
    size = min(size, len(requests))
    while True:
        order = generator.permutation(len(requests))
        for at in range(0, len(order) - size + 1, size):
            yield requests.take(order[at : at + size])


def evaluation_batches(requests: Requests, size: int) -> Iterator[Requests]:
    """Every request once, in batches of `size`, in the order given."""
    for at in range(0, len(requests), size):
        yield requests.take(np.arange(at, min(at + size, len(requests))))
