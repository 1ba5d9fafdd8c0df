"""GEMM + norm backward: equal to autograd on the operands as stored, segments kept apart, nothing past the end."""

import pytest
import torch
from torch.library import opcheck

from fused_ops import gemm_norm_backward
from fused_ops.gemm_norm_backward.interface import gemm_norm_backward_op
from fused_ops.gemm_norm_backward.reference import weight_gradient
from fused_ops.operands import flatten, split_e4m3, to_float
from lp_fa4.mx import quantize_mx, sequence_ids
from tests.conftest import HOSTILE_LENGTHS, offsets_of
from tests.fused_ops.common import db, hostile

EPS = 1e-6
EXACT = 100
"""dB that FP32 sums of a few thousand terms leave against FP64."""


def problem(dtype=torch.float32, block=(32, 32), lengths=HOSTILE_LENGTHS, heads=96, columns=64):
    x, offsets, used = hostile(columns, dtype, lengths)
    weight = torch.rand(columns) + 0.5
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    rstd[used:] = torch.nan
    dk, dv, xn = (
        quantize_mx(torch.randn(x.shape[0], n) * 2.0 ** torch.randint(-12, 1, (x.shape[0], 1)), block, offsets)
        for n in (heads, columns, columns)  # small enough that dx fits FP16
    )
    return dict(dk=dk, dv=dv, w_k=torch.randn(heads, columns), x=x, norm_weight=weight, rstd=rstd, xn=xn), offsets, used


def truth(a, offsets, used, dv_mean=None):
    """FP64 autograd through the norm; dw as a plain product."""
    x = a["x"][:used].double().requires_grad_()
    g = a["norm_weight"].double().requires_grad_()
    xf = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * g
    dxn = to_float(a["dk"])[:used].double() @ to_float(a["w_k"]).double()
    if a["dv"] is not None:
        dxn = dxn + to_float(a["dv"])[:used].double()
    if dv_mean is not None:
        dxn = dxn + dv_mean.double()[sequence_ids(offsets, used)]
    dx, dg = torch.autograd.grad(xf, (x, g), dxn)
    return dx, dg, to_float(a["dk"])[:used].double().t() @ to_float(a["xn"])[:used].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("form", ["fp32", "bf16", "mx", "pair"])
def test_equals_autograd(dtype, mean, form):
    a, offsets, used = problem(dtype)
    a["w_k"] = {"fp32": lambda w: w, "bf16": lambda w: w.bfloat16(), "mx": quantize_mx, "pair": split_e4m3}[form](a["w_k"])
    dv_mean = torch.randn(len(HOSTILE_LENGTHS), 64) if mean else None
    got = gemm_norm_backward(**a, dv_mean=dv_mean)
    dx, dg, dw = truth(a, offsets, used, dv_mean)
    assert got.dx.dtype == dtype and got.dnorm_weight.dtype == got.dw_k.dtype == torch.float32
    assert (got.dx[used:] == 0).all()
    assert db(got.dx[:used], dx) > {torch.float32: EXACT, torch.bfloat16: 48, torch.float16: 60}[dtype]  # dx's own rounding
    assert db(got.dnorm_weight, dg) > EXACT and db(got.dw_k, dw) > EXACT


@pytest.mark.parametrize("block", [(32, 96), (128, 32), (0, 32)])
def test_blocks_and_float_operands(block):
    a, offsets, used = problem()
    exponent = 4 if block[0] == 0 else None
    a["dk"] = quantize_mx(torch.randn(a["x"].shape[0], 96), block, offsets, exponent=exponent)
    a["dv"] = torch.randn(a["x"].shape[0], 64)
    a["dv"][used:] = torch.nan
    for got, want in zip(gemm_norm_backward(**a), truth(a, offsets, used), strict=True):
        assert db(got[:used] if got.shape[0] == a["x"].shape[0] else got, want) > EXACT
    a["dv"] = None
    assert db(gemm_norm_backward(**a).dx[:used], truth(a, offsets, used)[0]) > EXACT
    for name in ("dk", "xn"):
        a[name] = to_float(a[name])
        a[name][used:] = torch.nan
    plain = gemm_norm_backward(**a, offsets=offsets)
    assert (plain.dx[used:] == 0).all() and torch.isfinite(plain.dw_k).all()


def test_subsets():
    a, _, _ = problem()
    full = gemm_norm_backward(**a)
    for bits in range(8):
        needs = tuple(bool(bits >> i & 1) for i in range(3))
        for need, got, want in zip(needs, gemm_norm_backward(**a, needs=needs), full, strict=True):
            assert got is None if not need else torch.equal(got, want)


def test_isolation():
    """One user's NaN or 1e4: every other user's dx bit for bit the same; the shared sums show it."""
    lengths = [31, 33, 1, 32, 127, 129]
    a, offsets, _ = problem(lengths=lengths)
    clean = gemm_norm_backward(**a).dx
    source = {name: to_float(a[name]).nan_to_num() for name in ("dk", "dv")}
    for victim in range(len(lengths)):
        rows = slice(int(offsets[victim]), int(offsets[victim + 1]))
        for change in (1e4, torch.nan):
            b = dict(a)
            for name, values in source.items():
                changed = values.clone()
                changed[rows] *= change
                b[name] = quantize_mx(changed, (32, 32), offsets)
            b["x"] = a["x"].clone()
            b["x"][rows] *= change
            got = gemm_norm_backward(**b)
            assert torch.equal(got.dx[: rows.start], clean[: rows.start]) and torch.equal(got.dx[rows.stop :], clean[rows.stop :])
            assert torch.isnan(got.dw_k).any() == (change != change)


def test_codes_past_the_end_are_not_read():
    """A buffer's rows past the last offset may hold any byte, NaN too."""
    a, _, used = problem()
    want = gemm_norm_backward(**a)
    for name in ("dk", "dv", "xn"):
        a[name].codes[used:] = 0x7F
    for mine, right in zip(gemm_norm_backward(**a), want, strict=True):
        assert torch.equal(mine, right)


def test_empty_groups_write_zeros():
    """A5: the slot of a sequence without tokens is 0, not whatever the memory held."""
    offsets = offsets_of([0, 64, 0, 32, 0])
    dk, xn = (quantize_mx(torch.randn(96, n), (32, 32), offsets) for n in (64, 32))
    parts = weight_gradient(dk, xn, offsets, per_sequence=True)
    assert parts.shape == (5, 64, 32)
    assert (parts[[0, 2, 4]] == 0).all()
    assert db(parts.sum(0), weight_gradient(dk, xn, offsets)) > EXACT


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("extra", [0, 3])
def test_nothing(lengths, extra):
    offsets = offsets_of(lengths)
    dk, dv, xn = (quantize_mx(torch.full((extra, n), torch.nan), (32, 32), offsets) for n in (96, 64, 64))
    x, rstd = torch.full((extra, 64), torch.nan), torch.full((extra,), torch.nan)
    got = gemm_norm_backward(dk, dv, torch.randn(96, 64), x, torch.ones(64), rstd, xn, dv_mean=torch.zeros(len(lengths), 64))
    assert [list(g.shape) for g in got] == [[extra, 64], [64], [96, 64]]
    assert all((g == 0).all() for g in got)


def test_operator():
    for lengths in ([100, 0, 96], [257]):
        a, offsets, _ = problem(lengths=lengths)
        a["x"], a["rstd"] = a["x"].nan_to_num(), a["rstd"].nan_to_num()
        order = (a["x"], a["norm_weight"], a["rstd"], *flatten(a["xn"]), offsets)
        for w, needs in ((a["w_k"], [True, True, True]), (split_e4m3(a["w_k"]), [True, False, True])):
            mean = torch.randn(len(lengths), 64)
            opcheck(gemm_norm_backward_op, (*flatten(a["dk"]), *flatten(a["dv"]), mean, *flatten(w), *order, needs))
        opcheck(gemm_norm_backward_op, (*flatten(a["dk"]), [], [], [], None, *flatten(a["w_k"]), *order, [False, True, False]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x=torch.zeros(4, 64, dtype=torch.int64)), "x is torch.int64"),
        (dict(w_k=torch.zeros(96, 32)), r"w_k has shape \[96, 32\]; its last axis must be 64"),
        (dict(dv=torch.zeros(4, 32)), r"dv has shape \[4, 32\]; its last axis must be 64"),
        (dict(dv=torch.zeros(5, 64)), "dv has 5 rows"),
        (dict(norm_weight=torch.zeros(3)), "norm_weight has shape"),
        (dict(rstd=torch.zeros(3)), "rstd is torch.float32"),
        (dict(dv_mean=torch.zeros(3, 64)), r"dv_mean has shape \[3, 64\]; it must be \[1, 64\]"),
        (
            dict(xn=quantize_mx(torch.zeros(4, 64)), dk=quantize_mx(torch.zeros(4, 96), (32, 32), torch.tensor([0, 4]))),
            "both be jagged or both dense",
        ),
        (dict(xn=quantize_mx(torch.zeros(4, 64)), offsets=torch.tensor([0, 4])), "offsets is given but"),
        (dict(norm_weight=torch.zeros(64, device="meta")), "norm_weight is on meta"),
    ],
)
def test_errors(change, words):
    a = dict(
        dk=torch.zeros(4, 96), dv=torch.zeros(4, 64), w_k=torch.zeros(96, 64), x=torch.zeros(4, 64), norm_weight=torch.ones(64),
        rstd=torch.ones(4), xn=torch.zeros(4, 64),
    )  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=words):
        gemm_norm_backward(**{**a, **change})
