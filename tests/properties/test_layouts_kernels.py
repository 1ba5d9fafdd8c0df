"""Transposes, swizzles and splits on kernels, on random shapes and bytes (``test_layouts`` has the reference's): on a GPU, and by
``tests.properties.emulated`` in the emulator. The last three are of Hopper's kernels."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_ops import gather_scales, gemm_quantize, rmsnorm_center_quantize, rmsnorm_quantize, scatter_scales
from lp_fa4 import quantize_mx, sm90
from lp_fa4.mx import scale_rows, token_rows
from tests.attention.helpers import same_bits
from tests.conftest import offsets_of
from tests.gpu import problems
from tests.gpu.problems import Case, check
from tests.poison import fresh
from tests.properties import tally
from tests.properties.subjects import HOPPER, Place
from tests.properties.test_batches import tails, tried
from tests.properties.test_layouts import numbers, sizes

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("place", [HOPPER], ids=["sm90"])]
HOPPERS_OWN = ("test_transposed_copies", "test_split_counts", "test_splits_of_another_sequence")


@contextmanager
def on(place: Place) -> Iterator[None]:
    """Kernels of ``place``; problems are made on its device."""
    with place.around(), mock.patch.object(problems, "DEVICE", torch.device(place.device)):
        yield


long_lengths = st.one_of(st.sampled_from((0, 1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 2049)), st.integers(0, 3000))


@pytest.mark.parametrize("axis", [0, 1])
@tried
@given(
    jagged=st.one_of(st.none(), st.lists(st.one_of(st.sampled_from((0, 1, 31, 33, 127, 129)), st.integers(0, 700)), max_size=5)),
    tokens=sizes,
    tail=tails,
    heads=st.integers(1, 9),
    seed=st.integers(0, 99),
    wide=st.booleans(),
)
def test_swizzle_round_trip(place: Place, axis, jagged, tokens, tail, heads, seed, wide):
    """The kernel's buffer is the definition's, pads included, and comes back as it was."""
    tally.count("swizzle round trip", f"scatter_scales axis {axis}", place.name)
    columns = 32 * heads
    offsets = None if jagged is None else offsets_of(jagged, torch.int64 if wide else torch.int32).to(place.device)
    rows = tokens if jagged is None else sum(jagged) + tail
    x = quantize_mx(numbers(seed, 0, rows, columns).to(place.device), (32, 32), offsets)
    with on(place):
        made = scatter_scales(x, axis, backend=place.backend)
        back = gather_scales(made, rows, columns, offsets, axis=axis, backend=place.backend).view(torch.uint8)
    same_bits(made, scatter_scales(x, axis, backend="reference"), "buffer")
    used = torch.zeros(scale_rows(rows, offsets), dtype=torch.bool, device=place.device)
    used[torch.arange(rows, device=place.device) // 32 if offsets is None else token_rows(offsets, rows)[: sum(jagged)]] = True
    same_bits(back[used], x.scale_bytes[used], "scales")
    assert back[~used].count_nonzero() == 0


@tried
@given(m=sizes, n=st.integers(1, 6), seed=st.integers(0, 99))
def test_product_of_transposes(place: Place, m, n, seed):
    """``(A B^T)^T = B A^T`` byte for byte, on integers, whose sums are exact."""
    tally.count("transpose invariance", "gemm_quantize", place.name)
    g = torch.Generator().manual_seed(seed)
    m = -(-m // 32) * 32
    a, b = (quantize_mx(torch.randint(-3, 4, (rows, 128), generator=g).float().to(place.device)) for rows in (m, 32 * n))
    with on(place):
        straight, turned = gemm_quantize(a, b, backend=place.backend), gemm_quantize(b, a, backend=place.backend)
    same_bits(straight.transpose().codes.contiguous(), turned.codes, "codes")
    same_bits(straight.transpose().scale_bytes.contiguous(), turned.scale_bytes, "scale")


@tried
@given(
    jagged=st.lists(st.one_of(st.sampled_from((0, 1, 31, 33, 127, 129)), st.integers(0, 700)), max_size=5),
    tail=tails,
    seed=st.integers(0, 99),
)
def test_transposed_copies(place: Place, jagged, tail, seed):
    """The norm's copy with tokens innermost is the one that attention makes of its codes; a sequence's is that of the sequence alone."""
    from lp_fa4.sm90.transpose import transposed_copy

    tally.count("transpose invariance", "transposed copy", place.name)
    offsets = offsets_of(jagged).to(place.device)
    x = torch.cat([numbers(seed, 0, sum(jagged), 128), torch.full((tail, 128), torch.nan)]).to(place.device).bfloat16()
    gain = torch.linspace(0.5, 2, 128, device=place.device)
    with on(place):
        got = rmsnorm_center_quantize(x, gain, offsets=offsets, block=(0, 64), copy_heads=2, backend=place.backend)
        want = transposed_copy(got.xn.codes.unflatten(1, (2, -1)), offsets, "accumulator")
    same_bits(got.xn.transposed, want, "copy")
    for b, length in enumerate(jagged):
        start = int(offsets[b])
        codes = got.xn.codes[start : start + length].unflatten(1, (2, -1)).contiguous()
        with on(place):
            alone = transposed_copy(codes, offsets_of([length]).to(place.device), "accumulator")
        first, width = 32 * (start // 32 + b), -(-length // 32) * 32
        same_bits(want[..., first : first + width].contiguous(), alone[..., :width].contiguous(), f"sequence {b}")


@tried
@given(tokens=sizes, seed=st.integers(0, 99), exponent=st.integers(-100, 90))
def test_square_blocks_serve_both_axes(place: Place, tokens, seed, exponent):
    """Codes and scales of the norm's kernel in square blocks are those of the transposed rows, transposed."""
    tally.count("transpose invariance", "rmsnorm_quantize", place.name)
    x = numbers(seed, exponent, tokens, 128).to(place.device)
    with on(place):
        got, rstd = rmsnorm_quantize(x, torch.ones(128, device=place.device), backend=place.backend)
    turned = quantize_mx((x * rstd[:, None]).t().contiguous())
    same_bits(got.transpose().codes.contiguous(), turned.codes, "codes")
    same_bits(got.transpose().scale_bytes.contiguous(), turned.scale_bytes, "scale")


FORMS = ("few", 1024, 256, "whole")
"""The kernel for few queries (splits of 256 keys), the main kernel with its keys split, and not."""


def at_most(place: Place, lengths: list[int], most: int) -> list[int]:
    """In the emulator, lengths that it can run."""
    return [n if place.stretch else n % most for n in lengths]


def _forced(form):
    if form == "few":
        return nullcontext()
    from lp_fa4.sm90 import forward_host

    keys = 0 if form == "whole" else form
    return mock.patch.multiple(forward_host, few_columns=lambda problem: 0, split_keys_of=lambda problem: keys)


@tried
@given(
    lengths=st.lists(long_lengths, min_size=1, max_size=5),
    queries=st.integers(1, 12),
    seed=st.integers(0, 99),
    sharpness=st.sampled_from((0.3, 1.0, 3.0)),
)
def test_split_counts(place: Place, lengths, queries, seed, sharpness):
    """One result whatever splits the keys, splits without keys included: each within twice the reference's error of FP64, LSE and row
    statistics with it (``tests.gpu.problems.check``); rows without keys exactly 0 and -inf."""
    tally.count("split-count invariance", "mx_attention", place.name)
    lengths, results = at_most(place, lengths, 300), {}
    with on(place):
        p = Case(tuple(lengths), queries=queries, heads=2, kv_heads=2, dim=64, block=(32, 64), score_std=sharpness).make(seed)
        for form in FORMS:
            with _forced(form), fresh(0xFF):
                results[form] = sm90.forward(p)
            check(p, results[form])
    empty = torch.tensor(lengths).repeat_interleave(queries).to(place.device) == 0
    for result in results.values():
        assert not result.out[empty].any() and bool(torch.isneginf(result.lse[:, empty]).all())


@tried
@given(
    lengths=st.lists(long_lengths, min_size=1, max_size=4),
    longer=st.integers(1, 20_000),
    queries=st.integers(1, 64),
    seed=st.integers(0, 99),
)
def test_splits_of_another_sequence(place: Place, lengths, longer, queries, seed):
    """How many splits another sequence has changes no bit of a sequence: one more behind, one more in front."""
    tally.count("split-count invariance", "mx_attention, another's splits", place.name)
    (longer, *lengths), g = at_most(place, [longer, *lengths], 300), torch.Generator(place.device).manual_seed(seed)
    with on(place):
        base = Case(tuple(lengths), queries=queries, dim=64, block="static", mean=False, centred=False).make(seed)
        alone = sm90.forward(base)
    filler = torch.randint(0, 0x70, (longer, 2, 64), dtype=torch.uint8, device=place.device, generator=g)
    for front in (False, True):
        k, v = ([filler, x.codes] if front else [x.codes, filler] for x in (base.k, base.v))
        order = [longer, *lengths] if front else [*lengths, longer]
        offsets = offsets_of(order).to(place.device)
        parts = [type(base.k).from_bytes(torch.cat(x), y.scale_bytes, y.block, offsets, 0) for x, y in ((k, base.k), (v, base.v))]
        with on(place):
            result = sm90.forward(dataclasses.replace(base, k=parts[0], v=parts[1], offsets_k=offsets))
        rows = slice(queries, None) if front else slice(0, queries * len(lengths))
        same_bits(result.out[rows], alone.out, "out")
        same_bits(result.lse[:, rows].contiguous(), alone.lse, "lse")
