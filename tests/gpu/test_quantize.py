"""Hopper's quantize pass, transposed copies and re-coding: bitwise against the definition."""

import pytest
import torch

from lp_fa4.mx import MXTensor, quantize_mx
from lp_fa4.mx.layout import group_rows
from tests.gpu.problems import DEVICE, offsets_of, poison, relative

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 0)


def values(tokens: int, heads: int, dim: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitude, some blocks zero, one not finite."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    x = torch.randn(tokens, heads, dim, device=DEVICE, generator=g)
    x *= torch.exp2(torch.randint(-12, 6, (tokens, 1, 1), device=DEVICE, generator=g).float())
    x[40:72] = 0.0
    x[200, 0, 5] = torch.nan
    x[300, -1, 7] = torch.inf
    return x.to(dtype)


def transposed_by_hand(codes, offsets, order):
    from lp_fa4.sm90.tile_transpose import ORDERS

    tokens, heads, dim = codes.shape
    bounds = offsets.tolist()
    out = torch.zeros(heads, dim, 32 * group_rows(tokens, len(bounds) - 1), dtype=torch.uint8, device=DEVICE)
    perm = torch.tensor(ORDERS[order], device=DEVICE)
    for b in range(len(bounds) - 1):
        n = bounds[b + 1] - bounds[b]
        padded = torch.zeros(-(-n // 16) * 16, heads, dim, dtype=torch.uint8, device=DEVICE)
        padded[:n] = codes[bounds[b] : bounds[b + 1]]
        runs = padded.unflatten(0, (-1, 16))[:, perm].flatten(0, 1)
        start = 32 * (bounds[b] // 32 + b)
        out[:, :, start : start + runs.shape[0]] = runs.permute(1, 2, 0)
    return out


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("order", ["accumulator"])
@pytest.mark.parametrize("slack", [0, 300])
def test_transposed_copy(dim, order, slack):
    from lp_fa4.sm90.transpose import transposed_copy

    offsets = offsets_of(LENGTHS, torch.int64 if slack else torch.int32)
    codes = torch.randint(0, 255, (sum(LENGTHS) + slack, 3, dim), device=DEVICE, dtype=torch.uint8)
    poison()
    assert torch.equal(transposed_copy(codes, offsets, order), transposed_by_hand(codes, offsets, order))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_is_the_definition(dim, block, dtype):
    from lp_fa4.sm90.quantize import quantize

    offsets = offsets_of(LENGTHS)
    x = values(sum(LENGTHS) + 50, 3, dim, dtype)
    want = quantize_mx(x, (block, dim), offsets, token_dim=0)
    poison()
    got, _, _ = quantize(x, offsets, block=block, order="accumulator")
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scale_bytes, want.scale_bytes)
    assert torch.equal(got.transposed, transposed_by_hand(want.codes, offsets, "accumulator"))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "rounds up", "tiny", "huge"])
def test_bounded_rows_are_the_definition(dim, block, kind):
    """Sums of a row's codes stay at 146 or less: rows of any size, elements that all round up, magnitudes at both ends of FP32."""
    from lp_fa4.sm90.quantize import quantize

    offsets = offsets_of(LENGTHS)
    x = values(sum(LENGTHS) + 50, 3, dim, getattr(torch, kind, torch.float32))
    if kind == "rounds up":
        x = 1.0626 * torch.exp2(torch.randint(-3, 3, x.shape, device=DEVICE).float())
    x = x * {"tiny": 2.0**-132, "huge": 2.0**118}.get(kind, 1.0)
    want = quantize_mx(x, (block, dim), offsets, token_dim=0, bounded_rows=True)
    vectors = torch.randn(len(LENGTHS), 3, dim, device=DEVICE)
    poison()
    got, _, dots = quantize(x, offsets, block=block, bounded=True, vectors=vectors)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scale_bytes, want.scale_bytes)
    sums = got.payload[: sum(LENGTHS)].double().abs().sum(-1)
    assert 40 < float(sums.max()) <= 146
    plain = quantize(x, offsets, block=block, vectors=vectors)[2]
    if kind != "huge":
        torch.testing.assert_close(dots, plain, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_centred_sums_and_dots():
    from lp_fa4.common.sequence_vectors import sample_means, sum_tiles
    from lp_fa4.reference import sequence_sums
    from lp_fa4.sm90.quantize import quantize

    offsets = offsets_of(LENGTHS)
    x = torch.randn(sum(LENGTHS), 4, 128, device=DEVICE).bfloat16() + 1.0
    other = torch.randn(sum(LENGTHS), 4, 128, device=DEVICE)
    mean, mean_of_other = sample_means((x, other), offsets)
    bounds = offsets.tolist()
    for b, n in enumerate(LENGTHS):
        rows = [bounds[b] + i * n // min(n, 64) for i in range(min(n, 64))] if n else []
        for got, values_ in ((mean, x), (mean_of_other, other)):
            want = values_[rows].double().mean(0) if rows else torch.zeros(4, 128, device=DEVICE).double()
            assert relative(got[b], want) < 1e-6 if n else not got[b].any()
    vectors = torch.randn(len(LENGTHS), 2, 128, device=DEVICE)
    poison()
    made, parts, dots = quantize(x, offsets, means=mean, sums=True, vectors=vectors, factor=0.25)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS), device=DEVICE), torch.tensor(LENGTHS, device=DEVICE))
    centred = x.float() - mean[sequence]
    assert torch.equal(made.codes, quantize_mx(centred, (128, 128), offsets, token_dim=0).codes)
    assert relative(sum_tiles(parts, offsets), sequence_sums(centred.double(), offsets).double()) < 1e-4
    want = 0.25 * (centred.double() * vectors.double().repeat_interleave(2, 1)[sequence]).sum(-1).t()
    assert relative(dots, want) < 1e-5


@pytest.mark.parametrize("dim", [64, 128])
def test_recode(dim):
    """Exact where no code becomes subnormal; NaN blocks stay NaN; scales are the blocks' largest."""
    from lp_fa4.sm90.recode import recode

    offsets = offsets_of(LENGTHS)
    x = torch.randn(sum(LENGTHS) + 20, 3, dim, device=DEVICE)
    x[..., :32] *= 8.0
    x[130] = torch.nan
    square = quantize_mx(x, (32, 32), offsets, token_dim=0)
    poison()
    rows = recode(square, offsets)
    assert rows.block == (32, dim)
    assert torch.equal(rows.scale_bytes[..., 0], square.scale_bytes.amax(-1))
    a, b = square.dequantize(), rows.dequantize()
    finite = torch.isfinite(b)
    assert bool(torch.isfinite(a)[finite].all())
    step = torch.exp2(rows.scale_bytes.float() - 127 - 9).repeat_interleave(1, 0)
    assert float((a - b)[finite].abs().max()) <= float(step.max())
    static = quantize_mx(x.nan_to_num(), (0, 32), offsets, token_dim=0, exponent=torch.arange(3 * dim // 32, device=DEVICE) % 3 - 4)
    again = recode(static, offsets)
    assert isinstance(again, MXTensor) and again.block == (0, dim)
    assert relative(again.dequantize(), static.dequantize().double()) < 0.02


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)])
def test_operands_in_one_launch(dim, dtypes):
    """Bytes, copies, sums and dot products of one launch for three operands are those of a launch for each."""
    from lp_fa4.sm90.quantize import Work, quantize, quantize_all

    offsets, queries = offsets_of(LENGTHS), offsets_of([3, 0, 130] + [1] * (len(LENGTHS) - 3), torch.int64)
    k, v = (values(sum(LENGTHS) + 20, 2, dim, t, seed) for seed, t in enumerate(dtypes))
    q = torch.randn(int(queries[-1]) + 7, 6, dim, device=DEVICE).to(dtypes[0])
    means, vectors = (torch.randn(len(LENGTHS), 2, dim, device=DEVICE) for _ in range(2))
    choices = [
        dict(x=v, offsets=offsets, order="accumulator", means=means, sums=True),
        dict(x=k, offsets=offsets, block=32, means=vectors),
        dict(x=q, offsets=queries, vectors=vectors, bounded=True),
    ]
    poison()
    works = [Work(**choice) for choice in choices]
    quantize_all(works, 0.25)
    for work, choice in zip(works, choices, strict=True):
        made, sums, dots = quantize(**choice, factor=0.25)
        assert torch.equal(work.made.codes, made.codes) and torch.equal(work.made.scale_bytes, made.scale_bytes)
        pairs = [(work.parts, sums), (work.dots, dots)]
        if work.copy is not None:
            pairs.append((work.copy, made.transposed))
        for a, b in pairs:
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
