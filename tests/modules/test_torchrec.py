"""JaggedPooling and its helpers: every TorchRec container, every malformed one, against PMA on plain tensors."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.types import LazyAwaitable

from modules import PMA
from modules.torchrec import JaggedPooling, checked_keyed_jagged, embedding_collection, jagged_offsets, keyed_jagged

DIM, SEEDS = 64, 3
LENGTHS = (0, 1, 31, 33, 0, 5)
EVENTS = sum(LENGTHS)


@pytest.fixture(params=["mxfp8", "bf16"])
def pma(request):
    torch.manual_seed(0)
    return PMA(DIM, 2, SEEDS, precision=request.param)


def lengths(values=LENGTHS, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def offsets(values=LENGTHS, dtype=torch.int32):
    return torch.tensor([0, *torch.tensor(values, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


def rows(count=EVENTS, width=DIM, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def empty_keyed(width=None, dtype=torch.int64):
    """Keys and a batch without samples: lengths of size 0, not zeros."""
    shape = (0,) if width is None else (0, width)
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.empty(shape, dtype=dtype), lengths=torch.empty(0, dtype=torch.int32))


def table(features=("a", "b"), dim=DIM, count=50):
    torch.manual_seed(2)
    return embedding_collection({"t": (count, features)}, dim)


def ids(count=EVENTS, seed=3):
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", ["lengths", "offsets", "both"])
def test_jagged_tensor_equals_plain_tensors(pma, dtype, given):
    values = rows()
    jagged = JaggedTensor(
        values=values,
        lengths=lengths(dtype=dtype) if given != "offsets" else None,
        offsets=offsets(dtype=dtype) if given != "lengths" else None,
    )
    pooled = JaggedPooling(pma, validate=True)(jagged)
    assert torch.equal(pooled, pma(values, offsets(dtype=dtype)))
    assert torch.equal(pooled[0], torch.zeros(SEEDS, DIM)) and torch.equal(pooled[4], torch.zeros(SEEDS, DIM))
    assert jagged_offsets(jagged).dtype == dtype


def test_rows_past_the_last_offset_are_never_read(pma):
    values = rows()
    longer = torch.cat([values, torch.full((7, DIM), torch.nan)]).requires_grad_()
    pooled = JaggedPooling(pma, validate=True)(JaggedTensor(values=longer, offsets=offsets()))
    assert torch.equal(pooled, pma(values, offsets()))
    pooled.sum().backward()
    assert torch.equal(longer.grad[len(values) :], torch.zeros(7, DIM))


def test_sum_and_concat_and_separate_of_a_dict(pma):
    a, b = rows(seed=4), rows(seed=5)
    named = {name: JaggedTensor(values=v, lengths=lengths()) for name, v in (("a", a), ("b", b), ("other", rows(9, seed=6)))}
    named["other"] = JaggedTensor(values=rows(9, seed=6), lengths=lengths((9,)))
    assert torch.equal(JaggedPooling(pma, ["a", "b"], validate=True)(named), pma(a + b, offsets()))
    halves = {"x": JaggedTensor(values=a[:, :40], lengths=lengths()), "y": JaggedTensor(values=b[:, :24], lengths=lengths())}
    joined = JaggedPooling(pma, ["x", "y"], combine="concat", validate=True)(halves)
    assert torch.equal(joined, pma(torch.cat([a[:, :40], b[:, :24]], 1), offsets()))
    swapped = JaggedPooling(pma, ["y", "x"], combine="concat")(halves)
    assert torch.equal(swapped, pma(torch.cat([b[:, :24], a[:, :40]], 1), offsets()))
    apart = JaggedPooling(pma, combine="separate", validate=True)(named)
    assert list(apart) == ["a", "b", "other"]
    assert torch.equal(apart["a"], pma(a, offsets())) and apart["other"].shape == (1, SEEDS, DIM)
    assert torch.equal(JaggedPooling(pma, "b")(named), pma(b, offsets()))


def test_one_name_sums_all_features_by_default(pma):
    a, b = rows(seed=4), rows(seed=5)
    named = {"a": JaggedTensor(values=a, lengths=lengths()), "b": JaggedTensor(values=b, lengths=lengths())}
    assert torch.equal(JaggedPooling(pma)(named), pma(a + b, offsets()))


@pytest.mark.parametrize("name", ["items", "keys", "pop"])
def test_names_that_a_collection_cannot_keep(name):
    with pytest.raises(ValueError, match=f"tables: '{name}' is an attribute of nn.ModuleDict"):
        embedding_collection({name: (10, ["a"])}, 8)


def test_embedding_collection_output_and_gradients(pma):
    collection = table()
    keyed = keyed_jagged({"a": (ids(), lengths()), "b": (ids(seed=7), lengths())})
    pooled = JaggedPooling(pma, ["a", "b"], validate=True)(collection(keyed))
    weight = collection.embeddings["t"].weight
    events = weight[ids()] + weight[ids(seed=7)]
    assert torch.equal(pooled, pma(events, offsets()))
    pooled.square().sum().backward()
    got, weight.grad = weight.grad.clone(), None
    pma.zero_grad()
    pma(weight[ids()] + weight[ids(seed=7)], offsets()).square().sum().backward()
    # The same rows are added into the table's gradient; only the order of those FP32 additions may differ.
    torch.testing.assert_close(got, weight.grad, rtol=1e-5, atol=1e-6)


def test_ids_kept_as_weights_are_not_weights(pma):
    collection = EmbeddingCollection(tables=table().embedding_configs(), need_indices=True)
    out = collection(keyed_jagged({"a": (ids(), lengths()), "b": (ids(), lengths())}))
    assert out["a"].weights_or_none() is not None
    plain = {name: JaggedTensor(values=out[name].values(), lengths=out[name].lengths()) for name in ("a", "b")}
    assert torch.equal(JaggedPooling(pma)(out), JaggedPooling(pma)(plain))


def test_keyed_jagged_tensor_of_float_rows(pma):
    a, b = rows(seed=4), rows(3, seed=5)
    keyed = KeyedJaggedTensor(keys=["a", "b"], values=torch.cat([a, b]), lengths=torch.cat([lengths(), lengths((0, 3, 0, 0, 0, 0))]))
    apart = JaggedPooling(pma, combine="separate", validate=True)(keyed)
    assert torch.equal(apart["a"], pma(a, offsets()))
    assert torch.equal(apart["b"], pma(b, offsets((0, 3, 0, 0, 0, 0))))
    assert torch.equal(JaggedPooling(pma, "b", validate=True)(keyed), apart["b"])


class Later(LazyAwaitable):
    def __init__(self, value):
        super().__init__()
        self._value = value

    def _wait_impl(self):
        return self._value


def test_what_a_sharded_collection_returns_is_awaited(pma):
    named = {"a": JaggedTensor(values=rows(), lengths=lengths())}
    assert torch.equal(JaggedPooling(pma, "a")(Later(named)), pma(rows(), offsets()))
    assert torch.equal(JaggedPooling(pma, "a")({"a": Later(named["a"])}), pma(rows(), offsets()))


class TestBatchWithoutSamples:
    """TorchRec fails to split such a KeyedJaggedTensor; here it pools to [0, seeds, dim] with the graph intact."""

    @pytest.mark.parametrize("combine", ["sum", "separate"])
    @pytest.mark.parametrize("validate", [False, True])
    def test_keyed_float_rows(self, pma, combine, validate):
        out = JaggedPooling(pma, combine=combine, validate=validate)(empty_keyed(DIM, torch.float32))
        for pooled in out.values() if combine == "separate" else [out]:
            assert pooled.shape == (0, SEEDS, DIM)

    @pytest.mark.parametrize("validate", [False, True])
    def test_through_an_embedding_collection(self, pma, validate):
        collection = table()
        keyed = checked_keyed_jagged(empty_keyed(), validate=validate)
        pooled = JaggedPooling(pma, ["a", "b"], validate=validate)(collection(keyed))
        assert pooled.shape == (0, SEEDS, DIM)
        pooled.sum().backward()
        for name, parameter in [*pma.named_parameters(), *collection.named_parameters()]:
            assert parameter.grad is not None and not parameter.grad.any(), name

    def test_weights_and_repetition(self):
        keyed = KeyedJaggedTensor(
            keys=["a"], values=torch.empty(0, dtype=torch.int64), weights=torch.empty(0), lengths=torch.empty(0, dtype=torch.int64)
        )
        once = checked_keyed_jagged(keyed)
        assert checked_keyed_jagged(once).to_dict()["a"].weights().shape == (0,)
        assert once.offsets().tolist() == [0] and once.stride() == 0

    @pytest.mark.parametrize("kind", ["lengths", "offsets"])
    def test_jagged_tensor_with_nothing_in_it(self, pma, kind):
        nothing = {kind: torch.empty(0, dtype=torch.int64)}
        pooled = JaggedPooling(pma, validate=True)(JaggedTensor(values=torch.empty(0, DIM), **nothing))
        assert pooled.shape == (0, SEEDS, DIM)

    def test_a_dict_of_them(self, pma):
        named = {n: JaggedTensor(values=torch.empty(0, DIM), lengths=torch.empty(0, dtype=torch.int32)) for n in "ab"}
        assert JaggedPooling(pma, validate=True)(named).shape == (0, SEEDS, DIM)


def test_all_samples_empty_keeps_every_parameter_in_the_graph(pma):
    collection = table()
    none = torch.empty(0, dtype=torch.int64)
    keyed = keyed_jagged({"a": (none, lengths((0, 0))), "b": (none, lengths((0, 0)))})
    pooled = JaggedPooling(pma, ["a", "b"], validate=True)(collection(keyed))
    assert torch.equal(pooled, torch.zeros(2, SEEDS, DIM))
    pooled.sum().backward()
    for name, parameter in [*pma.named_parameters(), *collection.named_parameters()]:
        assert parameter.grad is not None and not parameter.grad.any(), name


def keyed(**changes):
    fields = {"keys": ["a", "b"], "values": torch.arange(4), "lengths": torch.tensor([1, 1, 2, 0])} | changes
    return KeyedJaggedTensor(**fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": torch.tensor([1, 1, 2])}, r"lengths has 3 entries.*multiple of the 2 keys"),
        ({"lengths": torch.tensor([1, 1, 2, 1])}, r"lengths sum to 5.*values has 4 rows"),
        ({"lengths": torch.tensor([1, 1, 3, -1])}, r"lengths\[3\] = -1 \(key 'b', sample 1\)"),
        ({"length_per_key": [1, 3]}, r"length_per_key = \[1, 3\].*\[2, 2\]"),
        ({"stride": 3}, r"stride = 3.*expected 2"),
        ({"keys": ["a", "a"]}, r"'a' is there twice"),
        ({"lengths": None, "offsets": torch.tensor([0, 1, 2, 3, 5])}, r"lengths sum to 5.*values has 4 rows"),
        ({"offsets": torch.tensor([0, 1, 2, 3, 4])}, r"offsets disagree with lengths"),
        ({"offsets": torch.tensor([0, 1, 2, 4])}, r"offsets has 4 entries"),
    ],
)
def test_malformed_keyed_jagged_tensor_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        checked_keyed_jagged(keyed(**changes), validate=True)


def test_well_formed_ones_pass_unchanged():
    for good in (keyed(), keyed(lengths=None, offsets=torch.tensor([0, 1, 2, 4, 4])), keyed(stride=2), keyed().sync()):
        assert checked_keyed_jagged(good, validate=True) is good


def test_variable_batch_size_is_refused_in_words(pma):
    variable = KeyedJaggedTensor(keys=["a", "b"], values=rows(4), lengths=torch.tensor([1, 1, 2]), stride_per_key_per_rank=[[2], [1]])
    for refuse in (checked_keyed_jagged, JaggedPooling(pma)):
        with pytest.raises(ValueError, match=r"variable batch size.*stride_per_key = \[2, 1\]"):
            refuse(variable)
    looked_up = table()(
        KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(4), lengths=torch.tensor([1, 1, 2]), stride_per_key_per_rank=[[2], [1]])
    )
    with pytest.raises(ValueError, match=r"'b' has 1 samples and 'a' has 2"):
        JaggedPooling(pma)(looked_up)


def test_misuse_is_named(pma):
    def jagged(count, width, lens):
        return JaggedTensor(values=rows(count, width), lengths=lengths(lens))

    pair = {"clicks": jagged(3, DIM, (1, 2)), "orders": jagged(3, DIM, (2, 1))}
    with pytest.raises(ValueError, match=r"'click' is not in the batch, which has 'clicks', 'orders'; did you mean 'clicks'"):
        JaggedPooling(pma, "click")(pair)
    with pytest.raises(ValueError, match=r"sample 0 has 2 events in 'orders' and 1 in 'clicks'"):
        JaggedPooling(pma, validate=True)(pair)
    with pytest.raises(ValueError, match=r"'orders' has 4 events and 'clicks' has 3"):
        JaggedPooling(pma)(pair | {"orders": jagged(4, DIM, (2, 2))})
    with pytest.raises(ValueError, match=r"widths \{'clicks': 64, 'orders': 32\}"):
        JaggedPooling(pma)(pair | {"orders": jagged(3, 32, (1, 2))})
    with pytest.raises(ValueError, match=r"width 96 \(64 \+ 32\).*dim is 64"):
        JaggedPooling(pma, combine="concat")(pair | {"orders": jagged(3, 32, (1, 2))})
    with pytest.raises(ValueError, match=r"width 32.*dim is 64"):
        JaggedPooling(pma)(jagged(3, 32, (1, 2)))
    with pytest.raises(ValueError, match=r"holds one feature"):
        JaggedPooling(pma, ["a", "b"])(jagged(3, DIM, (1, 2)))
    with pytest.raises(TypeError, match=r"int64 ids"):
        JaggedPooling(pma)(keyed())
    with pytest.raises(TypeError, match=r"'a': values are torch.int64 ids"):
        JaggedPooling(pma)({"a": JaggedTensor(values=torch.arange(3), lengths=lengths((1, 2)))})
    with pytest.raises(ValueError, match=r"'a': values has shape \(3,\)"):
        JaggedPooling(pma)({"a": JaggedTensor(values=torch.ones(3), lengths=lengths((1, 2)))})
    with pytest.raises(TypeError, match=r"sequences is a Tensor"):
        JaggedPooling(pma)(rows())
    with pytest.raises(ValueError, match=r"no features"):
        JaggedPooling(pma)({})
    with pytest.raises(ValueError, match=r"combine = 'mean': expected one of 'sum', 'concat', 'separate'"):
        JaggedPooling(pma, combine="mean")
    with pytest.raises(ValueError, match=r"'a' is there twice"):
        JaggedPooling(pma, ["a", "a"])
    with pytest.raises(ValueError, match=r"features is empty"):
        JaggedPooling(pma, [])
    with pytest.raises(ValueError, match=r"different numbers of samples \{'a': 2, 'b': 1\}"):
        keyed_jagged({"a": (torch.arange(3), lengths((1, 2))), "b": (torch.arange(3), lengths((3,)))})
    with pytest.raises(ValueError, match=r"features is empty"):
        keyed_jagged({})


@pytest.mark.parametrize("bad", [(1, -1, 2), (2, 5)])
def test_malformed_lengths_are_seen_with_validate(pma, bad):
    jagged = JaggedTensor(values=rows(3), lengths=lengths(bad))
    with pytest.raises(ValueError, match="offsets"):
        JaggedPooling(pma, validate=True)(jagged)


def test_a_non_finite_event_stays_in_its_sample(pma):
    values = rows()
    clean = JaggedPooling(pma)(JaggedTensor(values=values, lengths=lengths()))
    broken = values.clone()
    broken[10] = torch.nan  # sample 2
    pooled = JaggedPooling(pma, validate=True)(JaggedTensor(values=broken, lengths=lengths()))
    assert pooled[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(pooled[others], clean[others])


def test_state_dict_is_the_pooling_modules_own(pma):
    wrapped = JaggedPooling(pma, ["a"])
    assert list(wrapped.state_dict()) == [f"pool.{name}" for name in pma.state_dict()]
    assert "combine='sum'" in repr(wrapped)


class Core(nn.Module):
    def __init__(self, pma):
        super().__init__()
        self.pma = pma

    def forward(self, values, offsets):
        return self.pma(values, offsets)


def test_core_exports_with_dynamic_events_and_batch(pma):
    """The plain-tensor core under the TorchRec shell. torch.export specialises on a batch of exactly one sample (the strides of
    a size-1 dimension are free), so an exported program serves batches of two or more, and any number of events, 0 and 1 too.
    """
    tokens, entries = torch.export.Dim("tokens", min=0, max=4096), torch.export.Dim("entries", min=3, max=512)
    program = torch.export.export(Core(pma), (rows(), offsets()), dynamic_shapes=({0: tokens}, {0: entries}), strict=False).module()
    for lens in (LENGTHS, (3, 1), (0, 1), (1, 1), (0, 0, 0), (7, 0, 130)):
        values = rows(sum(lens))
        assert torch.equal(program(values, offsets(lens)), pma(values, offsets(lens))), lens


def test_the_shell_compiles_without_a_graph_break(pma):
    """A dict of JaggedTensors in, whatever the lengths: one graph, no recompilation that would fail on 0 or 1."""
    pooling = JaggedPooling(pma, ["a", "b"])
    compiled = torch.compile(pooling, dynamic=True, fullgraph=True, backend="aot_eager")
    for lens in ((3, 0, 5), (1, 70), (0, 0), (2,)):
        named = {name: JaggedTensor(values=rows(sum(lens), seed=seed), lengths=lengths(lens)) for seed, name in enumerate(("a", "b"))}
        assert torch.equal(compiled(named), pooling(named)), lens


def test_import_without_torchrec_says_what_is_missing():
    code = "import sys; sys.modules['torchrec'] = None\nimport modules\ntry:\n import modules.torchrec\nexcept ImportError as e: print(e)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=True)
    assert "modules.torchrec needs the package 'torchrec'" in done.stdout and "modules.PMA works without it" in done.stdout
