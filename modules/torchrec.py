"""TorchRec at the edge: pool what an EmbeddingCollection returns, and hand it KeyedJaggedTensors that it survives.

This is the only file of the project that imports torchrec. `PMA` itself takes plain tensors, ``values`` [T, dim] and ``offsets`` [B+1];
everything here only unwraps TorchRec's containers into those two, so that compilation, export and sharding meet plain tensors:

    ids (KeyedJaggedTensor) ── EmbeddingCollection ──> {feature: JaggedTensor} ── JaggedPooling(PMA) ──> [B, num_seeds, dim]
                                 sharded or not

Offsets are derived here from whatever the container holds. TorchRec 1.8 splits a KeyedJaggedTensor whose batch is of length zero with an
IndexError (`lengths` is empty, so there is nothing to unbind), and such a batch is ordinary at the end of a stream; see
`checked_keyed_jagged`. Variable batch size per feature (VBE: another number of samples in every feature) is refused, because pooling
combines the features of one sample.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

try:
    from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
    from torchrec.distributed.types import LazyAwaitable
except ImportError as error:
    raise ImportError(
        f"modules.torchrec needs the package 'torchrec' with FBGEMM for this machine ({error}); "
        "modules.PMA works without it on plain tensors"
    ) from error

__all__ = ["JaggedPooling", "checked_keyed_jagged", "embedding_collection", "jagged_offsets", "keyed_jagged", "resolve"]

Combine = Literal["sum", "concat", "separate"]


def resolve(value: Any) -> Any:
    """The value of a LazyAwaitable (what a sharded module returns before its communication ends); anything else as it is."""
    return value.wait() if isinstance(value, LazyAwaitable) else value


def _names(known: Sequence[str], missing: str) -> str:
    near = difflib.get_close_matches(missing, known, n=1)
    return f"has {', '.join(map(repr, known)) or 'no features'}" + (f"; did you mean {near[0]!r}?" if near else "")


def _complete_cumsum(lengths: Tensor) -> Tensor:
    """Offsets [B+1] of `lengths` [B], in its dtype, on its device, without a host read."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


def jagged_offsets(jagged: JaggedTensor) -> Tensor:
    """Offsets [B+1] of a JaggedTensor, int32 or int64 as it holds them.

    Read from its offsets, or computed from its lengths; offsets of size 0 (a batch without samples) count as [0].
    """
    offsets = jagged.offsets_or_none()
    if offsets is not None and offsets.numel() > 0:
        return offsets
    lengths = jagged.lengths_or_none()
    if lengths is None:
        lengths = jagged.values().new_empty(0, dtype=torch.int32)
    return _complete_cumsum(lengths)


def _require_uniform(keyed: KeyedJaggedTensor) -> None:
    if keyed.variable_stride_per_key():
        raise ValueError(
            f"the KeyedJaggedTensor has a variable batch size per feature (stride_per_key = {keyed.stride_per_key()} for keys "
            f"{keyed.keys()}); pooling needs the same samples in every feature: expand it first (one stride for all keys)"
        )


def _validate_keyed(keyed: KeyedJaggedTensor) -> None:
    """Host checks of a uniform KeyedJaggedTensor; ValueError names what is wrong, where, and the rule."""
    keys, rows = keyed.keys(), keyed.values().shape[0]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise ValueError(f"keys = {keys}: {twice[0]!r} is there twice")
    offsets = keyed.offsets_or_none()
    lengths = keyed.lengths_or_none()
    if lengths is None:
        lengths = torch.diff(offsets) if offsets is not None and offsets.numel() else torch.empty(0, dtype=torch.int64)
    if len(keys) == 0:
        if lengths.numel():
            raise ValueError(f"lengths has {lengths.numel()} entries and there are no keys")
        return
    if lengths.numel() % len(keys):
        raise ValueError(f"lengths has {lengths.numel()} entries, expected a multiple of the {len(keys)} keys (one per key and sample)")
    if offsets is not None and offsets.numel() > 0 and offsets.numel() != lengths.numel() + 1:
        raise ValueError(f"offsets has {offsets.numel()} entries, expected lengths' {lengths.numel()} + 1")
    stride = lengths.numel() // len(keys)
    if keyed.stride() != stride:
        raise ValueError(f"stride = {keyed.stride()}, but lengths has {lengths.numel()} entries for {len(keys)} keys: expected {stride}")
    if bool((lengths < 0).any()):
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths[{at}] = {int(lengths[at])} (key {keys[at // stride]!r}, sample {at % stride}): expected at least 0")
    if int(lengths.sum()) != rows:
        raise ValueError(f"lengths sum to {int(lengths.sum())}, but values has {rows} rows")
    given = offsets is not None and offsets.numel() > 0
    if given and (int(offsets[0]) != 0 or not torch.equal(torch.diff(offsets).to(lengths.dtype), lengths)):
        raise ValueError("offsets disagree with lengths: expected offsets[0] = 0 and offsets[i+1] - offsets[i] = lengths[i]")
    cached = keyed.length_per_key_or_none()
    true = lengths.view(len(keys), stride).sum(1).tolist()
    if cached is not None and list(cached) != true:
        raise ValueError(f"length_per_key = {list(cached)}, but lengths give {true} for keys {keys}")


def checked_keyed_jagged(keyed: KeyedJaggedTensor, *, validate: bool = False) -> KeyedJaggedTensor:
    """`keyed`, made safe for an EmbeddingCollection.

    A batch without samples (`lengths` of size 0) comes back with the per-feature views that TorchRec fails to derive from it; every other
    one is returned as it is. An unsharded collection then serves it. A sharded one reshapes the lengths again and fails in the same way:
    give a rank that has nothing one sample without events instead, and drop its row.

    Args:
        keyed: ids (or float rows) of several features, one stride for all keys, already on the device of the collection.
        validate: check on the host that keys, stride, lengths, offsets and values agree. Reads device data.

    Raises:
        ValueError: variable batch size per feature, or (with `validate`) the first disagreement, by name and value.
    """
    _require_uniform(keyed)
    if validate:
        _validate_keyed(keyed)
    if not keyed.keys() or keyed.stride() > 0:
        return keyed
    values, weights = keyed.values(), keyed.weights_or_none()
    lengths = keyed.lengths().new_empty(0)
    offsets = lengths.new_zeros(1)
    keys = keyed.keys()
    views = {
        key: JaggedTensor(values=values[:0], weights=None if weights is None else weights[:0], lengths=lengths, offsets=offsets)
        for key in keys
    }
    return KeyedJaggedTensor(
        keys=keys,
        values=values[:0],
        weights=None if weights is None else weights[:0],
        lengths=lengths,
        offsets=offsets,
        stride=0,
        length_per_key=[0] * len(keys),
        offset_per_key=[0] * (len(keys) + 1),
        jt_dict=views,
    )


def keyed_jagged(features: Mapping[str, tuple[Tensor, Tensor]]) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor from plain tensors.

    Args:
        features: name to (values [T_f] or [T_f, ...], lengths [B]), integer lengths, the same B for every feature, 0 allowed.

    Raises:
        ValueError: no features, or another number of samples in one of them.
    """
    if not features:
        raise ValueError("features is empty: expected at least one name with (values, lengths)")
    samples = {name: int(lengths.shape[0]) for name, (_, lengths) in features.items()}
    if len(set(samples.values())) > 1:
        raise ValueError(f"features have different numbers of samples {samples}: expected one batch size")
    keyed = KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([values for values, _ in features.values()]),
        lengths=torch.cat([lengths for _, lengths in features.values()]),
        stride=next(iter(samples.values())),
    )
    return checked_keyed_jagged(keyed)


def embedding_collection(
    tables: Mapping[str, tuple[int, Sequence[str]]], dim: int, device: torch.device | str | None = None
) -> EmbeddingCollection:
    """An EmbeddingCollection of FP32 tables of one width, initialised like `nn.Embedding`, ready to be sharded.

    Args:
        tables: table name to (rows, names of the features that look up in it).
        dim: width of every row.
        device: of the tables; "meta" for a model that DistributedModelParallel materialises.

    Raises:
        ValueError: a table's name that TorchRec cannot keep, because `nn.ModuleDict` has it ("items", "keys", "values", ...).
    """
    for name in tables:
        if hasattr(nn.ModuleDict, name):
            raise ValueError(f"tables: {name!r} is an attribute of nn.ModuleDict, where TorchRec keeps tables: expected another name")
    configs = [
        EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=list(features))
        for name, (rows, features) in tables.items()
    ]
    return EmbeddingCollection(tables=configs, device=None if device is None else torch.device(device))


def _same_lengths(name: str, offsets: Tensor, first: str, expected: Tensor) -> None:
    """Host check that two features have the same number of events in every sample."""
    mine, theirs = torch.diff(offsets), torch.diff(expected).to(offsets.dtype)
    if not torch.equal(mine, theirs):
        at = int((mine != theirs).nonzero()[0])
        raise ValueError(
            f"sample {at} has {int(mine[at])} events in {name!r} and {int(theirs[at])} in {first!r}: features that are "
            "combined describe the same events"
        )
    if int(offsets[0]) != int(expected[0]):
        raise ValueError(f"{name!r} has offsets[0] = {int(offsets[0])} and {first!r} {int(expected[0])}: expected 0")


class JaggedPooling(nn.Module):
    """Pools jagged sequences of embeddings in TorchRec's containers with `PMA` (or any module with its signature).

    Args:
        pool: called as ``pool(values, offsets, validate=bool)`` with values [T, dim] and offsets [B+1]; returns [B, num_seeds, dim].
        features: the features to pool, by the names of the container's entries. None takes all of them, in the container's order.
        combine: how several features become one sequence. The features describe the same events, so they have the same lengths: "sum"
            adds the rows of an event, all of width dim; "concat" puts them side by side, their widths adding up to dim; "separate" pools
            each feature on its own with the same parameters (lengths may differ) and returns a dict.
        validate: check values on the host in every call (offsets, lengths, agreement between features). Reads device data.

    The state dict holds `pool`'s entries under the prefix ``pool.``; the module adds none.
    """

    def __init__(
        self,
        pool: nn.Module,
        features: str | Sequence[str] | None = None,
        *,
        combine: Combine = "sum",
        validate: bool = False,
    ) -> None:
        super().__init__()
        if combine not in get_args(Combine):
            raise ValueError(f"combine = {combine!r}: expected one of {', '.join(map(repr, get_args(Combine)))}")
        names = [features] if isinstance(features, str) else None if features is None else list(features)
        if names is not None:
            if not names:
                raise ValueError("features is empty: expected at least one name, or None for all")
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"features = {names}: {twice[0]!r} is there twice")
        self.pool = pool
        self.features = names
        self.combine: Combine = combine
        self.validate = validate

    def extra_repr(self) -> str:
        return f"features={self.features}, combine={self.combine!r}, validate={self.validate}"

    def forward(self, sequences: JaggedTensor | Mapping[str, JaggedTensor] | KeyedJaggedTensor) -> Tensor | dict[str, Tensor]:
        """Pool one batch.

        Args:
            sequences: a JaggedTensor with float values [T, width]; a dict of them, such as an EmbeddingCollection returns (also before
                the communication of a sharded one has ended); or a KeyedJaggedTensor with float values [T, width]. Weights are not used:
                an EmbeddingCollection made with `need_indices=True` stores ids there.

        Returns:
            [B, num_seeds, dim]; with combine "separate" and anything but a JaggedTensor, a dict of them by feature. A sample without
            events pools to 0; a batch without samples gives [0, num_seeds, dim].

        Raises:
            TypeError: another container, or values that are ids.
            ValueError: a feature that is not there, features that do not fit together, variable batch size per feature; with `validate`,
                malformed lengths or offsets.
        """
        sequences = resolve(sequences)
        if isinstance(sequences, JaggedTensor):
            if self.features is not None and len(self.features) > 1:
                raise ValueError(f"features = {self.features}: a JaggedTensor holds one feature; pass a dict of them")
            return self._pool([("values", sequences)])
        named = self._select(sequences)
        if self.combine == "separate":
            return {name: self._pool([(name, jagged)]) for name, jagged in named}
        return self._pool(named)

    def _select(self, sequences: Mapping[str, JaggedTensor] | KeyedJaggedTensor) -> list[tuple[str, JaggedTensor]]:
        """The chosen features with their names, in the chosen order."""
        if isinstance(sequences, KeyedJaggedTensor):
            keyed = checked_keyed_jagged(sequences, validate=self.validate)
            known = keyed.keys()
            if not keyed.values().is_floating_point():
                raise TypeError(
                    f"the KeyedJaggedTensor's values are {keyed.values().dtype} ids: look them up with an EmbeddingCollection "
                    "first, and pool what it returns"
                )
            sequences = keyed.to_dict()
        elif isinstance(sequences, Mapping):
            known = list(sequences)
        else:
            raise TypeError(f"sequences is a {type(sequences).__name__}: expected a JaggedTensor, a dict of them or a KeyedJaggedTensor")
        chosen = known if self.features is None else self.features
        if not chosen:
            raise ValueError("sequences holds no features: expected at least one")
        for name in chosen:
            if name not in sequences:
                raise ValueError(f"features: {name!r} is not in the batch, which {_names(known, name)}")
        return [(name, resolve(sequences[name])) for name in chosen]

    def _pool(self, named: list[tuple[str, JaggedTensor]]) -> Tensor:
        """Check that the features fit together, make one sequence of them, pool it."""
        first, offsets = named[0][0], jagged_offsets(named[0][1])
        rows = [jagged.values() for _, jagged in named]
        for (name, jagged), values in zip(named, rows, strict=True):
            if not values.is_floating_point():
                raise TypeError(f"{name!r}: values are {values.dtype} ids; look them up with an EmbeddingCollection first")
            if values.dim() != 2:
                raise ValueError(f"{name!r}: values has shape {tuple(values.shape)}, expected [events, width]")
            other = jagged_offsets(jagged)
            if other.shape != offsets.shape:
                raise ValueError(
                    f"{name!r} has {other.shape[0] - 1} samples and {first!r} has {offsets.shape[0] - 1}: features that are combined "
                    'need the same samples (combine="separate" pools each on its own)'
                )
            if values.shape[0] != rows[0].shape[0]:
                raise ValueError(
                    f"{name!r} has {values.shape[0]} events and {first!r} has {rows[0].shape[0]}: features that are combined describe "
                    'the same events (combine="separate" pools each on its own)'
                )
            if self.validate:
                _same_lengths(name, other, first, offsets)
        widths = [int(values.shape[1]) for values in rows]
        dim = getattr(self.pool, "dim", None)
        if self.combine == "concat":
            values = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        else:
            if len(set(widths)) > 1:
                named_widths = dict(zip([name for name, _ in named], widths, strict=True))
                raise ValueError(f'features have widths {named_widths}: combine="sum" needs one width ("concat" adds them up)')
            values = rows[0]
            for more in rows[1:]:
                values = values + more
        if isinstance(dim, int) and values.shape[1] != dim:
            sum_of = f" ({' + '.join(map(str, widths))})" if self.combine == "concat" else ""
            raise ValueError(f"events have width {values.shape[1]}{sum_of}, but the pooling module's dim is {dim}")
        return self.pool(values, offsets, validate=self.validate)
