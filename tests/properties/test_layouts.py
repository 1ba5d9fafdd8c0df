"""Transposes and swizzles lose nothing and invent nothing, for every shape, block, size of numbers and stride."""

import importlib
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_ops import gather_scales, gemm_quantize, scatter_scales
from fused_ops.scale_layout.interface import sf_shape
from lp_fa4 import quantize_mx, reference
from lp_fa4.config import DEFAULT
from lp_fa4.mx import scale_rows, token_rows
from tests.attention.helpers import make, same_bits
from tests.conftest import offsets_of
from tests.properties import tally
from tests.properties.test_batches import lengths, near, tails, tried

sizes = st.one_of(st.sampled_from((1, 31, 32, 33, 96, 127, 128, 129, 160)), st.integers(1, 200))
exponents = st.integers(-126, 120)


def numbers(seed, exponent, *shape):
    """Rows and columns of different sizes, some zero blocks, everything within FP32."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    return x * torch.ldexp(torch.ones(shape[-2], 1), torch.randint(-4, 5, (shape[-2], 1), generator=g) + exponent)


@tried
@given(
    tokens=sizes, columns=sizes, lead=st.integers(0, 2), exponent=exponents, seed=st.integers(0, 99), bad=st.sampled_from((0.0, torch.nan))
)
def test_transpose_invariance(tokens, columns, lead, exponent, seed, bad):
    """The bytes of the transpose are the transposed bytes, from a view or a copy: one payload serves both contraction axes."""
    tally.count("transpose invariance", "quantize_mx", "reference")
    x = numbers(seed, exponent, *[2] * lead, tokens, columns)
    x[..., tokens // 2, columns // 2] = bad
    straight = quantize_mx(x).transpose()
    for turned in (x.transpose(-1, -2), x.transpose(-1, -2).contiguous()):
        other = quantize_mx(turned)
        same_bits(straight.codes.contiguous(), other.codes.contiguous(), "codes")
        same_bits(straight.scale_bytes.contiguous(), other.scale_bytes.contiguous(), "scale")
    same_bits(straight.dequantize().contiguous(), quantize_mx(x).dequantize().transpose(-1, -2).contiguous(), "values")


@tried
@given(groups=st.integers(1, 9), blocks=st.integers(1, 9), seed=st.integers(0, 99))
def test_swizzle_of_a_transpose(groups, blocks, seed):
    """The buffer for one axis is that of the transpose for the other. (Whole blocks: a partial group of tokens fills its 32 rows of the
    MMA, a partial block of columns only the rows that there are.)"""
    tally.count("transpose invariance", "scatter_scales", "reference")
    x = numbers(seed, 0, 32 * groups, 32 * blocks)
    for axis in (0, 1):
        same_bits(scatter_scales(quantize_mx(x), axis), scatter_scales(quantize_mx(x.t()), 1 - axis), f"axis {axis}")


@tried
@given(m=sizes, n=sizes, k=sizes, seed=st.integers(0, 99))
def test_product_of_transposes(m, n, k, seed):
    """``(A B^T)^T = B A^T`` byte for byte, on integers, whose sums are exact."""
    tally.count("transpose invariance", "gemm_quantize", "reference")
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (rows, k), generator=g).float() for rows in (m, n))
    straight, turned = gemm_quantize(quantize_mx(a), quantize_mx(b)), gemm_quantize(quantize_mx(b), quantize_mx(a))
    same_bits(straight.transpose().codes.contiguous(), turned.codes, "codes")
    same_bits(straight.transpose().scale_bytes.contiguous(), turned.scale_bytes, "scale")


@pytest.mark.parametrize("axis", [0, 1])
@tried
@given(
    jagged=st.one_of(st.none(), st.lists(lengths, max_size=5)),
    tokens=sizes,
    tail=tails,
    heads=st.integers(1, 4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_swizzle_round_trip(axis, jagged, tokens, tail, heads, seed, data):
    """Any block and any bytes; every byte of the buffer that no scale fills is 0, and the buffer has the size that consumers are told."""
    tally.count("swizzle round trip", f"scatter_scales axis {axis}", "reference")
    columns = 32 * heads * data.draw(st.integers(1, 3), "head dimension / 32")
    block = data.draw(st.sampled_from(((32, 32), (32, columns // heads), (128, columns // heads))), "block")
    offsets = None if jagged is None else offsets_of(jagged)
    rows = tokens if jagged is None else sum(jagged) + tail
    x = quantize_mx(numbers(seed, 0, rows, columns), block, offsets)
    swizzled = scatter_scales(x, axis)
    assert tuple(swizzled.shape) == sf_shape(rows, columns, offsets, axis)
    back = gather_scales(swizzled, rows, columns, offsets, axis=axis).view(torch.uint8)
    want = x.scale_bytes.repeat_interleave(block[1] // 32, dim=1)
    used = torch.zeros(scale_rows(rows, offsets), dtype=torch.bool)
    used[torch.arange(rows) // 32 if offsets is None else token_rows(offsets, rows)[: sum(jagged)]] = True
    same_bits(back[used], want[used], "scales")
    assert back[~used].count_nonzero() == 0
    # each scale is written once for its 32 rows of the MMA, and there is nothing else
    assert int(swizzled.to(torch.int64).sum()) == 32 * int(want[used].to(torch.int64).sum())


@tried
@given(
    jagged=st.lists(lengths, min_size=1, max_size=4),
    queries=st.integers(1, 40),
    rows=st.sampled_from((256, 1024, 4096)),
    seed=st.integers(0, 99),
    causal=st.booleans(),
)
def test_split_counts(jagged, queries, rows, seed, causal):
    """The reference in pieces of rows and heads: statistics the same up to the order of FP32 sums, and its output within an E4M3 tie or two
    of P, 40 dB and more."""
    tally.count("split-count invariance", "mx_attention", "reference")
    module = importlib.import_module("lp_fa4.reference.rounding")
    config = DEFAULT.with_(save_out_dtype=torch.float32)
    p = make(jagged, queries, 4, 2, 32, mode="dense", causal=causal, seed=seed, config=config).problem
    whole = reference.forward(p)
    with mock.patch.object(module, "CHUNK_ELEMENTS", rows):
        pieces = reference.forward(p)
    seen = whole.row_sum > 0
    assert torch.equal(pieces.row_sum > 0, seen) and torch.equal(pieces.lse.isneginf(), whole.lse.isneginf())
    torch.testing.assert_close(pieces.lse[seen], whole.lse[seen], rtol=0, atol=1e-5)
    near(pieces.centred_out, whole.centred_out, 1e-4, "out")


@pytest.mark.parametrize("tail", [0, 32, 127])
def test_transposed_copy_of_spare_rows_alone(tail):
    """No sequence, but rows: all zeros, and no launch with an empty grid."""
    transpose = pytest.importorskip("lp_fa4.sm90.transpose", reason="the kernel stack is an optional dependency")
    made = transpose.transposed_copy(torch.ones(tail, 2, 64, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32), "accumulator")
    assert made.shape == (2, 64, 32 * (tail // 32)) and not made.any()
