"""A sample's result is its own: properties that hold for every batch, tried on random ones that shrink to a readable failure.

``LP_FA4_EXAMPLES=1000 python -m pytest tests/properties --hypothesis-show-statistics`` tries that many of each, other ones every time;
without it the same modest number is tried on every machine. ``subjects`` has the operations, on the reference and, where there is one, on a
GPU (marker ``gpu``); ``python -m tests.properties.emulated`` runs the same properties on kernels in the emulator.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.helpers import same_bits
from tests.poison import FILLS, fresh
from tests.properties import tally
from tests.properties.subjects import SUBJECTS, Choices, Sample

MANY = int(os.environ.get("LP_FA4_EXAMPLES", "0"))
tried = settings(
    max_examples=MANY or 12,
    derandomize=os.environ.get("LP_FA4_RANDOM", str(int(MANY > 0))) == "0",
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # the fixture poisons memory, the same for all
)
BOUNDARIES = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
every_subject = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.gpu] if s.place.device == "cuda" else []) for n, s in SUBJECTS.items()]
)

lengths = st.one_of(st.sampled_from(BOUNDARIES), st.integers(0, 70))
samples = st.builds(
    Sample,
    length=lengths,
    queries=st.integers(0, 6),
    seed=st.integers(0, 99),
    exponent=st.sampled_from((0, 0, 0, -20, -8, 5)),
    change=st.sampled_from(("", "", "", "zero", "constant")),
)
batches = st.lists(samples, max_size=4)
choices = st.builds(
    Choices,
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    causal=st.booleans(),
    wide_offsets=st.booleans(),
    strided=st.booleans(),
    deterministic=st.booleans(),
    many=st.sampled_from((140, 140, 100, 64, 200)),
)
tails = st.integers(0, 40)


def one_more(about: str, name: str) -> None:
    """Count an input."""
    tally.count(about, SUBJECTS[name].name, SUBJECTS[name].place.name)


HALVES = ("seed_embs", "query_norm.weight", "query_proj.weight")


def near(got: torch.Tensor, want: torch.Tensor, allowed: float, what: str) -> None:
    """Energy of the difference, of that of the wanted; NaN in one and not in the other is a difference."""
    assert got.shape == want.shape and torch.equal(got.isnan(), want.isnan()), what
    a, b = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (got, want))
    found, size = float((a - b).square().sum()), float(b.square().sum())
    assert found <= allowed * size + 1e-12, f"{what}: {found / max(size, 1e-300):.2e} of its energy"


def all_bits(got: list[dict], shared: dict, want: list[dict], other: dict) -> None:
    """Every result of every sample, and those that samples share, is the other run's bit for bit."""
    for b, (part, whole) in enumerate(zip(got, want, strict=True)):
        for key in whole:
            same_bits(part[key], whole[key], f"sample {b}: {key}")
    for key in other:
        same_bits(shared[key], other[key], key)


def same(got: dict, want: dict, name: str, what: str, *, how: Choices | None = None, shared: bool = False) -> None:
    """Every bit.

    Of a module on the reference, what another order of a product's sums can do: a code beside a boundary may be the next one (1/8 of a
    value at most), which the few codes of a small sample feel at 30 dB and more. Of kernels, sums over all samples, and over a row's keys
    where ``how`` is not deterministic, may be FP32 sums in another order: 2^-24 for each of up to 2,000 terms, in the norm some 1e-5, in
    energy 1e-10; cancellation between terms takes up to a factor of 30 of the norm. The module's gradients of its queries' side are
    FP16 sums over samples that the batch puts together: 2^-12 for each of some 50 terms, 0.2% of the norm.
    """
    subject = SUBJECTS[name]
    halves = HALVES if "PMA" in name and "post" not in name else ()
    assert got.keys() == want.keys()
    for key in want:
        loose = shared or (key == "dq" and how is not None and not how.deterministic)
        if not subject.exact:
            near(got[key], want[key], 1e-3, f"{what}: {key}")
        elif subject.place.kernels and loose:
            near(got[key], want[key], 1e-5 if key in halves else 1e-7, f"{what}: {key}")
        else:
            same_bits(got[key], want[key], f"{what}: {key}")


@every_subject
@tried
@given(
    batch=st.lists(samples, min_size=2, max_size=4), change=st.sampled_from(("nan", "inf", "-inf", "large")), data=st.data(), how=choices
)
def test_isolation(name, batch, change, data, how):
    """Another sample at 1e4 times its size, or not finite: not one bit changes, of modules neither (their products keep their shapes)."""
    one_more("isolation of samples", name)
    victim = data.draw(st.integers(0, len(batch) - 1), "victim")
    if change == "large":  # FP16 has to hold it
        batch = [replace(s, exponent=min(s.exponent, -8)) for s in batch]
    changed = [replace(s, change=change) if b == victim else s for b, s in enumerate(batch)]
    before, _ = SUBJECTS[name](batch, 3, how)
    after, _ = SUBJECTS[name](changed, 3, how)
    for b in range(len(batch)):
        if b != victim and SUBJECTS[name].place.kernels:
            same(after[b], before[b], name, f"sample {b}", how=how)
        elif b != victim:
            for key in before[b]:
                same_bits(after[b][key], before[b][key], f"sample {b}: {key}")


@every_subject
@tried
@given(batch=batches, data=st.data(), how=choices)
def test_permutation(name, batch, data, how):
    one_more("permutation", name)
    order = data.draw(st.permutations(range(len(batch))), "order")
    straight, _ = SUBJECTS[name](batch, 0, how)
    permuted, _ = SUBJECTS[name]([batch[i] for i in order], 0, how)
    for place, i in enumerate(order):
        same(permuted[place], straight[i], name, f"sample {i}", how=how)


@every_subject
@tried
@given(batch=batches, places=st.lists(st.integers(0, 4), min_size=1, max_size=3), how=choices)
def test_empty_samples_can_be_dropped(name, batch, places, how):
    """Sums over all samples keep every bit too, of attention; an empty sample's own results are 0."""
    one_more("dropping empty samples", name)
    batch = [replace(s, length=max(s.length, 1), queries=max(s.queries, 1)) for s in batch]
    empty = Sample(0, 0, 1)
    filled = list(batch)
    for place in places:
        filled.insert(min(place, len(filled)), empty)
    got, shared = SUBJECTS[name](filled, 0, how)
    want, alone = SUBJECTS[name](batch, 0, how)
    kept = [part for part, s in zip(got, filled, strict=True) if s is not empty]
    for b, (part, other) in enumerate(zip(kept, want, strict=True)):
        same(part, other, name, f"sample {b}", how=how)
    same(shared, alone, name, "sum over samples", shared=True)
    for part, s in zip(got, filled, strict=True):
        if s is empty:
            assert all((x == 0).all() or (key == "lse" and torch.isneginf(x).all()) for key, x in part.items())


@every_subject
@tried
@given(first=batches, second=batches, how=choices)
def test_concatenation(name, first, second, how):
    """Two batches in one are the two batches."""
    one_more("concatenating batches", name)
    together, _ = SUBJECTS[name](first + second, 0, how)
    apart = SUBJECTS[name](first, 0, how)[0] + SUBJECTS[name](second, 0, how)[0]
    for b, (part, other) in enumerate(zip(together, apart, strict=True)):
        same(part, other, name, f"sample {b}", how=how)


@every_subject
@tried
@given(batch=batches, tail=tails, how=choices)
def test_capacity_past_the_last_offset(name, batch, tail, how):
    """NaN rows behind the last sample change nothing, and what is returned for them is 0 (which the subjects check)."""
    one_more("capacity tail irrelevance", name)
    long, shared = SUBJECTS[name](batch, tail, how)
    trimmed, other = SUBJECTS[name](batch, 0, how)
    for b, (part, want) in enumerate(zip(long, trimmed, strict=True)):
        same(part, want, name, f"sample {b}", how=how)
    same(shared, other, name, "sum over samples", shared=True)


@every_subject
@tried
@given(batch=batches, how=choices)
def test_views_and_widths(name, batch, how):
    """Strides and the width of the offsets choose nothing."""
    one_more("strides and offset widths", name)
    plain = replace(how, strided=False, wide_offsets=False, deterministic=True)
    got, shared = SUBJECTS[name](batch, 2, replace(plain, strided=True, wide_offsets=True))
    want, other = SUBJECTS[name](batch, 2, plain)
    all_bits(got, shared, want, other)


@every_subject
@tried
@given(batch=batches, tail=tails, how=choices)
def test_fresh_memory(name, batch, tail, how):
    """Whatever unwritten memory holds: zeros, what reads as NaN in E4M3, or in every other format."""
    one_more("contents of fresh memory", name)
    how = replace(how, deterministic=True)
    results = []
    for byte in FILLS:
        with fresh(byte):
            results.append(SUBJECTS[name](batch, tail, how))
    want, other = results[0]
    for got, shared in results[1:]:
        all_bits(got, shared, want, other)


@every_subject
@tried
@given(batch=batches, tail=tails, how=choices)
def test_nothing_seen_is_nothing(name, batch, tail, how):
    """Samples without keys: output, dQ and statistics of nothing; samples without queries: dK and dV exactly 0; all else finite; on dirty
    memory."""
    one_more("nothing seen is nothing", name)
    subject = SUBJECTS[name]
    with fresh(0xFF):
        parts, _ = subject(batch, tail, how)
    for part, sample in zip(parts, batch, strict=True):
        assert all(x.isfinite().all() for key, x in part.items() if key != "lse")
        if sample.length == 0:
            assert all((x == 0).all() or (key == "lse" and torch.isneginf(x).all()) for key, x in part.items())
        elif sample.queries == 0 and "dq" in part:
            assert not part["dk"].any() and not part["dv"].any()
