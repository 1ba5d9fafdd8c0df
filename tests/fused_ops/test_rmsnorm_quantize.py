"""RMSNorm + quantize: one definition (FP32 through gamma, one rounding), groups that never cross sequences, nothing read past the end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from fused_ops import rmsnorm_center_quantize, rmsnorm_quantize
from fused_ops.rmsnorm_quantize.interface import norm_exponent, rmsnorm_quantize_op
from fused_ops.rmsnorm_quantize.reference import MEAN_ROWS
from lp_fa4.mx import quantize_mx
from tests.conftest import HOSTILE_LENGTHS, offsets_of
from tests.fused_ops.common import assert_same_bytes, db, hostile, rows_of

EPS = 1e-6


def norm32(x, weight, eps=EPS):
    """The documented function, FP32, one row at a time."""
    rows = [r * torch.rsqrt(r.square().mean() + eps) * weight.float() for r in x.float()]
    return torch.stack(rows) if rows else x.float()


@pytest.mark.parametrize("rows", [1, 127, 129])
@pytest.mark.parametrize("columns", [32, 96, 512, 2880])
def test_one_rounding_fp32_through_gamma(rows, columns):
    x = (torch.randn(rows, columns) * 2.0 ** torch.randint(-6, 7, (rows, 1))).bfloat16()
    weight = (torch.rand(columns) + 0.5).bfloat16()
    got, rstd = rmsnorm_quantize(x, weight)
    exact = norm32(x, weight)
    want = quantize_mx(exact)
    # The mean of squares may be summed in another order: its last bit moves an element across a rounding boundary now and then,
    # by one code, never a scale by more than one step.
    apart = (got.codes.int() - want.codes.int()).abs()
    same_scale = (got.scale_bytes == want.scale_bytes).float().mean()
    assert same_scale > 0.99 or (got.scale_bytes.numel() < 100 and same_scale == 1)
    assert (apart > 0).float().mean() < 2e-3
    assert db(got.dequantize(), exact) > 29  # E4M3: 2^-4 worst relative error a element, about 31 dB
    torch.testing.assert_close(rstd, torch.rsqrt(x.float().square().mean(-1) + EPS), rtol=1e-6, atol=0)


def test_bf16_in_between_is_a_different_function():
    x, weight = torch.randn(128, 512).bfloat16(), torch.rand(512) + 0.5
    got, _ = rmsnorm_quantize(x, weight)
    rounded = quantize_mx((x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).bfloat16().float() * weight)
    assert (got.codes != rounded.codes).float().mean() > 1e-3


def test_amax_is_fp32():
    weight = torch.ones(32)
    weight[3] = 448.5  # BF16 would make 448 of it, and the byte 127
    got, _ = rmsnorm_quantize(torch.ones(1, 32), weight, eps=0.0)
    assert got.scale_bytes.tolist() == [[128]]
    weight[3] = 448.0
    assert rmsnorm_quantize(torch.ones(1, 32), weight, eps=0.0)[0].scale_bytes.tolist() == [[127]]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_rows(zero):
    x = torch.full((64, 64), zero)
    x[32:] = torch.randn(32, 64)
    got, _ = rmsnorm_quantize(x, torch.ones(64))
    assert (got.scale_bytes[0] == 0).all() and (got.codes[:32] & 0x7F == 0).all()
    assert torch.isfinite(got.dequantize()).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_shows_in_its_group_alone(bad):
    x, offsets, _ = hostile(96)
    weight = torch.rand(96) + 0.5
    clean, _ = rmsnorm_quantize(x, weight, offsets=offsets)
    where = int(offsets[4]) + 5  # sequence 4, its first group
    x[where, 7] = bad
    got, _ = rmsnorm_quantize(x, weight, offsets=offsets)
    group = int(offsets[4]) // 32 + 4
    blocks = slice(0, 1 if bad == bad else 3)  # inf * rstd of 0 is NaN in one element; a NaN takes its row's norm with it
    assert (got.scale_bytes[group, blocks] == 255).all()
    assert (got.codes[int(offsets[4]) : int(offsets[4]) + 32, : 32 * blocks.stop] == 0).all()
    got.scale_bytes[group] = clean.scale_bytes[group]
    got.codes[int(offsets[4]) : int(offsets[4]) + 32] = clean.codes[int(offsets[4]) : int(offsets[4]) + 32]
    assert_same_bytes(got, clean)


def test_relative_error_above_the_subnormals():
    x, offsets, used = hostile(256)
    got, _ = rmsnorm_quantize(x, torch.ones(256), offsets=offsets)
    exact = norm32(x[:used], torch.ones(256))
    normal = got.payload[:used].float().abs() >= 2.0**-6
    assert normal.float().mean() > 0.9
    error = (got.dequantize()[:used] - exact).abs() / exact.abs()
    assert error[normal].max() <= 1 / 16 + 1e-5


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("block", [(32, 32), (32, 64), (128, 64), (0, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_isolation_and_tail(center, block, dtype):
    """B1, B6: a user at 1e4 times the size or full of NaN, and rows past the end, change no other user's bytes."""
    norm = rmsnorm_center_quantize if center else rmsnorm_quantize
    lengths = [31, 33, 1, 32, 127, 129]
    x, offsets, used = hostile(128, dtype, lengths)
    weight = torch.rand(128) + 0.5
    clean = norm(x, weight, offsets=offsets, block=block)
    trimmed = norm(x[:used], weight, offsets=offsets, block=block)
    assert torch.equal(clean[0].codes[:used], trimmed[0].codes)
    assert (clean[0].codes[used:] == 0).all() and (clean[1][used:] == 0).all()
    for victim in range(len(lengths)):
        for change in (1e4, torch.nan):
            other = x.clone()
            other[offsets[victim] : offsets[victim + 1]] *= change
            got = norm(other, weight, offsets=offsets, block=block)
            for b in set(range(len(lengths))) - {victim}:
                for mine, theirs in zip(rows_of(got[0], b, offsets), rows_of(clean[0], b, offsets), strict=True):
                    assert torch.equal(mine, theirs)
                if center:
                    assert torch.equal(got.mean[b], clean.mean[b]) and torch.equal(got.total[b], clean.total[b])


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257])
def test_any_length(length):
    """B2; and a sequence's bytes do not depend on where it starts."""
    x, weight = torch.randn(length, 64), torch.rand(64) + 0.5
    alone, _ = rmsnorm_quantize(x, weight, offsets=offsets_of([length]))
    before = torch.randn(45, 64)
    offsets = offsets_of([45, length])
    pair, _ = rmsnorm_quantize(torch.cat([before, x]), weight, offsets=offsets)
    for mine, theirs in zip(rows_of(pair, 1, offsets), rows_of(alone, 0, offsets_of([length])), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("lengths", [[], [0], [0] * 8])
@pytest.mark.parametrize("extra", [0, 5])
def test_nothing(lengths, extra):
    """A2: no tokens, no sequences."""
    x, offsets = torch.full((extra, 64), torch.nan), offsets_of(lengths)
    for block in [(32, 32), (128, 64), (0, 64)]:
        got = rmsnorm_center_quantize(x, torch.ones(64), offsets=offsets, block=block, keep=True)
        assert got.xn.shape == (extra, 64) and got.rstd.shape == (extra,)
        assert got.mean.shape == got.total.shape == (len(lengths), 64)
        for t in (got.rstd, got.mean, got.total, got.normed, got.xn.dequantize()):
            assert (t == 0).all()
        plain, rstd = rmsnorm_quantize(x, torch.ones(64), offsets=offsets, block=block)
        assert (plain.codes == 0).all() and torch.equal(rstd, got.rstd)


def test_centre():
    """mean: n = min(64, K) rows start + i*K//n; total: sum of what is left, unrounded."""
    lengths = [*HOSTILE_LENGTHS, 300]
    x, offsets, used = hostile(96, lengths=lengths)
    x[:used] += 3 * torch.randn(96)
    weight = torch.rand(96) + 0.5
    got = rmsnorm_center_quantize(x, weight, offsets=offsets, keep=True)
    plain, _ = rmsnorm_quantize(x, weight, offsets=offsets)
    for b, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        xf, k = norm32(x[start:stop], weight), stop - start
        n = min(MEAN_ROWS, k)
        mean = xf[[i * k // n for i in range(n)]].double().mean(0) if k else torch.zeros(96)
        torch.testing.assert_close(got.mean[b].double(), mean.double(), rtol=0, atol=1e-5)
        torch.testing.assert_close(got.total[b], (xf - got.mean[b]).sum(0), rtol=0, atol=1e-3)
        if k > 1:  # rows of one sequence share a mean: centred, they leave less to round
            error, centred_error = plain.dequantize()[start:stop] - xf, got.xn.dequantize()[start:stop] + got.mean[b] - xf
            assert centred_error.square().sum() < error.square().sum()
            assert db(got.normed[start:stop].float(), xf - got.mean[b]) > 45  # BF16: 2^-9


def test_integer_width_of_offsets():
    x, offsets, _ = hostile(64)
    a, b = (rmsnorm_center_quantize(x, torch.ones(64), offsets=o) for o in (offsets, offsets.long()))
    assert_same_bytes(a.xn, b.xn)
    assert torch.equal(a.total, b.total)


def test_strides_are_respected():
    """E2: columns of a wider tensor, and a transposed view."""
    wide = torch.randn(70, 128)
    for x in (wide[:, 64:], torch.randn(64, 70).t()):
        assert_same_bytes(rmsnorm_quantize(x, torch.ones(64))[0], rmsnorm_quantize(x.contiguous(), torch.ones(64))[0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(-20, 20), st.booleans())
def test_static_exponents_never_clip(seed, size, spike):
    """Rule 2: the bound from the norm's weight alone holds, one-hot rows included, which attain it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, generator=generator) * 2.0**size
    x = torch.eye(96)[:64] * 1e3 if spike else torch.randn(64, 96, generator=generator)
    for center, offsets in ((False, None), (True, offsets_of([40, 24]))):
        exponent = norm_exponent(weight, 32, centred=center)
        xf = norm32(x, weight)
        if center:
            got = rmsnorm_center_quantize(x, weight, offsets=offsets, block=(0, 32))
            xf = xf - torch.cat([got.mean[:1].expand(40, -1), got.mean[1:].expand(24, -1)])
        else:
            got = rmsnorm_quantize(x, weight, block=(0, 32))
        bound = (448 * 2.0 ** exponent.double()).repeat_interleave(32)
        assert (xf.double().abs() <= bound * (1 + 1e-6)).all()
        assert torch.equal(got[0].scale_bytes[0].int() - 127, exponent.clamp(-127, 127))


def test_static_costs_little():
    x, offsets, used = hostile(128)
    weight = torch.rand(128) + 0.5
    exact = norm32(x[:used], weight)
    square, static = (rmsnorm_quantize(x, weight, offsets=offsets, block=b)[0].dequantize()[:used] for b in ((32, 32), (0, 64)))
    assert abs(db(square, exact) - db(static, exact)) < 0.1


@pytest.mark.parametrize("tokens", [196, 257])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator(tokens, center, dtype):
    """F4, F5: the fake agrees in size, stride and dtype, also where a length is no multiple of anything."""
    offsets = offsets_of([tokens - 90, 0, 80])
    x = torch.randn(tokens, 96).to(dtype)
    for block, exponent in (([32, 32], None), ([128, 96], None), ([0, 96], torch.zeros(1, dtype=torch.int32))):
        opcheck(rmsnorm_quantize_op, (x, torch.ones(96), EPS, offsets, block, exponent, center, center))
    dense = x.reshape(1, tokens, 96)
    opcheck(rmsnorm_quantize_op, (dense, torch.ones(96), EPS, None, [32, 32], None, False, False))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x=torch.zeros(4, 64, dtype=torch.int32)), "x has dtype torch.int32; allowed"),
        (dict(x=torch.zeros(64)), r"x has shape \[64\]"),
        (dict(weight=torch.ones(32)), r"weight has shape \[32\]; it must be \[64\]"),
        (dict(weight=torch.ones(64, dtype=torch.float64)), "weight has dtype torch.float64"),
        (dict(eps=-1.0), "eps is -1.0"),
        (dict(eps=float("nan")), "eps is nan; it must be at least 0 and finite"),
        (dict(eps=float("inf")), "eps is inf"),
        (dict(block=(16, 32)), r"block is \(16, 32\)"),
        (dict(block=(32, 48)), r"block is \(32, 48\) for 64 columns"),
        (dict(block=(0, 32), exponent=-200), "exponent is -200; allowed is -127 to 127"),
        (dict(block=(0, 32), exponent=torch.tensor([1, 2, 3])), r"exponent has shape \[3\]; it must be \[\] or \[2\]"),
        (dict(exponent=3), r"exponent is given but block is \(32, 32\)"),
        (dict(offsets=torch.tensor([0.0, 4.0])), "offsets has dtype torch.float32"),
        (dict(offsets=torch.tensor([[0, 4]])), "offsets has shape"),
        (dict(x=torch.zeros(2, 4, 64), offsets=torch.tensor([0, 4])), r"x has shape \[2, 4, 64\]; with offsets"),
        (dict(weight=torch.ones(64, device="meta")), "weight is on meta"),
    ],
)
def test_errors(change, words):
    arguments = {"x": torch.zeros(4, 64), "weight": torch.ones(64), **change}
    with pytest.raises((TypeError, ValueError), match=words):
        rmsnorm_quantize(**arguments)
