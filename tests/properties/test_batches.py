"""A sample's result is its own: properties that hold for every batch, tried on random ones that shrink to a readable failure.

``LP_FA4_EXAMPLES=1000 python -m pytest tests/properties --hypothesis-show-statistics`` tries that many of each, other ones every time;
without it the same modest number is tried on every machine. ``subjects`` has the operations.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.helpers import same_bits
from tests.properties.subjects import EXACT, MODULES, Choices, Sample

MANY = int(os.environ.get("LP_FA4_EXAMPLES", "0"))
tried = settings(
    max_examples=MANY or 12,
    derandomize=not MANY,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],  # the fixture poisons memory, the same for all
)
BOUNDARIES = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
SUBJECTS = EXACT | MODULES

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
)
tails = st.integers(0, 40)


def same(got: dict, want: dict, name: str, what: str) -> None:
    """Every bit; of a module, what another order of a product's sums can do: a code beside a boundary may be the next one (1/8 of a value
    at most), which the few codes of a small sample feel at 30 dB and more."""
    assert got.keys() == want.keys()
    for key in want:
        if name in EXACT:
            same_bits(got[key], want[key], f"{what}: {key}")
            continue
        a, b = got[key].double(), want[key].double()
        assert a.shape == b.shape
        assert float((a - b).square().sum()) <= 1e-3 * float(b.square().sum()) + 1e-12, f"{what}: {key}"


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(
    batch=st.lists(samples, min_size=2, max_size=4), change=st.sampled_from(("nan", "inf", "-inf", "large")), data=st.data(), how=choices
)
def test_isolation(name, batch, change, data, how):
    """Another sample at 1e4 times its size, or not finite: not one bit changes, of modules neither (their products keep their shapes)."""
    victim = data.draw(st.integers(0, len(batch) - 1), "victim")
    if change == "large":  # FP16 has to hold it
        batch = [replace(s, exponent=min(s.exponent, -8)) for s in batch]
    changed = [replace(s, change=change) if b == victim else s for b, s in enumerate(batch)]
    before, _ = SUBJECTS[name](batch, 3, how)
    after, _ = SUBJECTS[name](changed, 3, how)
    for b in range(len(batch)):
        if b != victim:
            for key in before[b]:
                same_bits(after[b][key], before[b][key], f"sample {b}: {key}")


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(batch=batches, data=st.data(), how=choices)
def test_permutation(name, batch, data, how):
    order = data.draw(st.permutations(range(len(batch))), "order")
    straight, _ = SUBJECTS[name](batch, 0, how)
    permuted, _ = SUBJECTS[name]([batch[i] for i in order], 0, how)
    for place, i in enumerate(order):
        same(permuted[place], straight[i], name, f"sample {i}")


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(batch=batches, places=st.lists(st.integers(0, 4), min_size=1, max_size=3), how=choices)
def test_empty_samples_can_be_dropped(name, batch, places, how):
    """Sums over all samples keep every bit too, of attention; an empty sample's own results are 0."""
    batch = [replace(s, length=max(s.length, 1), queries=max(s.queries, 1)) for s in batch]
    empty = Sample(0, 0, 1)
    filled = list(batch)
    for place in places:
        filled.insert(min(place, len(filled)), empty)
    got, shared = SUBJECTS[name](filled, 0, how)
    want, alone = SUBJECTS[name](batch, 0, how)
    kept = [part for part, s in zip(got, filled, strict=True) if s is not empty]
    for b, (part, other) in enumerate(zip(kept, want, strict=True)):
        same(part, other, name, f"sample {b}")
    same(shared, alone, name, "sum over samples")
    for part, s in zip(got, filled, strict=True):
        if s is empty:
            assert all((x == 0).all() or (key == "lse" and torch.isneginf(x).all()) for key, x in part.items())


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(first=batches, second=batches, how=choices)
def test_concatenation(name, first, second, how):
    """Two batches in one are the two batches."""
    together, _ = SUBJECTS[name](first + second, 0, how)
    apart = SUBJECTS[name](first, 0, how)[0] + SUBJECTS[name](second, 0, how)[0]
    for b, (part, other) in enumerate(zip(together, apart, strict=True)):
        same(part, other, name, f"sample {b}")


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(batch=batches, tail=tails, how=choices)
def test_capacity_past_the_last_offset(name, batch, tail, how):
    """NaN rows behind the last sample change nothing, and what is returned for them is 0 (which the subjects check)."""
    long, shared = SUBJECTS[name](batch, tail, how)
    trimmed, other = SUBJECTS[name](batch, 0, how)
    for b, (part, want) in enumerate(zip(long, trimmed, strict=True)):
        same(part, want, name, f"sample {b}")
    same(shared, other, name, "sum over samples")


@pytest.mark.parametrize("name", SUBJECTS)
@tried
@given(batch=batches, how=choices)
def test_views_and_widths(name, batch, how):
    """Strides and the width of the offsets choose nothing."""
    plain = replace(how, strided=False, wide_offsets=False)
    got, shared = SUBJECTS[name](batch, 2, replace(how, strided=True, wide_offsets=True))
    want, other = SUBJECTS[name](batch, 2, plain)
    for b, (part, whole) in enumerate(zip(got, want, strict=True)):
        for key in whole:
            same_bits(part[key], whole[key], f"sample {b}: {key}")
    for key in other:
        same_bits(shared[key], other[key], key)
