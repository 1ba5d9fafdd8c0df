"""The backward against autograd of the fake-quantized forward.

Where the definition is straight-through (a rounding has derivative 1), autograd of the forward written with ``x + (round(x) - x).detach()``
is the definition, and the reference must equal it up to FP32 sums: relative error 1e-5. dO, dS and the backward's P are rounded on purpose;
those roundings are switched off for the equality and tested by their formulas below.
"""

import math

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.config import DEFAULT, LOG2_E
from lp_fa4.mx import cast_e4m3, quantize_mx
from lp_fa4.reference.rounding import fake_quantize, round_e4m3
from tests.attention.helpers import full_dv, make, same_bits, whole
from tests.conftest import HOSTILE_LENGTHS, offsets_of

EXACT_BACKWARD = dict(round_do=False, round_ds=False, grad_format="bf16", save_out_dtype=torch.float32)


def through(x, rounded):
    return x + (rounded - x).detach()


def fake_forward(problem, leaves):
    """The forward in differentiable form, on leaves that hold the operands' reconstructed values: one tile, so ``key_tile`` >= every
    length."""
    cfg, p = problem.config, problem
    q, k, v = leaves
    outs, lses = [], []
    bounds = p.offsets_k.tolist()
    rows = p.q.shape[0] // p.batch
    for b in range(p.batch):
        qb = (q if p.shared_q else q[b * rows : (b + 1) * rows]).transpose(0, 1)
        kb, vb = (x[bounds[b] : bounds[b + 1]].transpose(0, 1).repeat_interleave(p.group, 0) for x in (k, v))
        n, m = qb.shape[1], kb.shape[1]
        if m == 0:
            outs.append(qb.new_zeros(n, qb.shape[0], qb.shape[2]))
            continue
        s = qb @ kb.transpose(1, 2) * (p.softmax_scale * LOG2_E)
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if p.causal:
            hidden = torch.arange(m) > torch.arange(n)[:, None] + (m - n)
            s = s.masked_fill(hidden, -torch.inf)
        top = s.amax(-1, keepdim=True).detach()
        blind = torch.isneginf(top)
        prob = torch.exp2(s - torch.where(blind, 0.0, top))
        total = prob.sum(-1, keepdim=True)
        c = torch.exp2((s - top).mean(-1, keepdim=True)).detach() if p.centred else 0.0
        prob8 = prob
        if cfg.round_p:
            scale = 2.0**cfg.p_scale_log2
            prob8 = through(prob, round_e4m3((prob - c) * scale) / scale + c)
        o = prob8 @ vb / total.clamp(min=1e-30)
        if p.centred:  # c * v_sum in place of c * sum of the rounded values: a constant of the forward
            o = o + (c * (p.v_sum[b].repeat_interleave(p.group, 0)[:, None] - vb.sum(1, keepdim=True)).detach() / total)
        outs.append(torch.where(blind, 0.0, o).transpose(0, 1))
        lses.append((top + torch.log2(total))[..., 0] * math.log(2))
    return torch.cat(outs), lses


@pytest.mark.parametrize("mode, causal", [("shared", False), ("dense", False), ("dense", True)])
@pytest.mark.parametrize("round_p", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_equals_autograd_of_the_fake_quantized_forward(mode, causal, round_p, kv_heads):
    config = DEFAULT.with_(**EXACT_BACKWARD, round_p=round_p, key_tile=160)
    case = make(HOSTILE_LENGTHS, 37, 2, kv_heads, mode=mode, causal=causal, config=config)
    p = case.problem
    leaves = [x.dequantize().requires_grad_() for x in (p.q, p.k, p.v)]
    out, _ = fake_forward(p, leaves)
    result = reference.forward(p)
    tolerance = 1e-3 if round_p else 1e-5  # a few P fall on the other side of an E4M3 tie after one ulp of exp2's argument
    close(result.centred_out, out.detach(), tolerance)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    grads = reference.backward(p, result, dout)
    close(grads.dq, dq, tolerance)
    close(whole(grads.dk), dk, 2**-8)  # bf16 output
    if not round_p:
        close(full_dv(grads, p), dv, 2**-7)  # bf16 of dv and of its mean's complement


def close(value, truth, tolerance=1e-5):
    assert (value - truth).norm() <= tolerance * truth.norm()


def test_gradient_of_the_lse():
    """dS gains p * dLSE: autograd through the LSE of reconstructed operands agrees."""
    config = DEFAULT.with_(**EXACT_BACKWARD, round_p=False)
    case = make([40, 129, 3], 5, 2, mode="dense", config=config)
    p = case.problem
    leaves = [x.dequantize().requires_grad_() for x in (p.q, p.k, p.v)]
    out, lses = fake_forward(p, leaves)
    g = torch.Generator().manual_seed(1)
    dout, dlse = torch.randn(out.shape, generator=g), torch.randn(2, 15, generator=g)
    dq, dk, _ = torch.autograd.grad([out, torch.cat(lses, 1)], leaves, [dout, dlse])
    grads = reference.backward(p, reference.forward(p), dout, dlse=dlse)
    close(grads.dq, dq)
    close(whole(grads.dk), dk, 2**-8)


@pytest.mark.parametrize("fold", [True, False])
def test_backward_rounds_where_it_says(fold):
    """One sequence, written out: dO8 from dO / l, D from dO8 and the saved output, P - l/K on 2^8, dS8 in 32x32 blocks."""
    config = DEFAULT.with_(grad_format="bf16", fold_l_into_do=fold, center_p_backward=fold)
    case = make([77], 45, 1, config=config)
    p, result = case.problem, reference.forward(case.problem)
    dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1))
    grads = reference.backward(p, result, dout)
    q, k, v = (x.dequantize()[:, 0] for x in (p.q, p.k, p.v))
    low = result.row_sum[0][:, None]
    prob = torch.exp2(q @ k.t() * (p.softmax_scale * LOG2_E) - result.row_max[0][:, None])
    do8 = fake_quantize(dout[:, 0] / low if fold else dout[:, 0], (32, 32))
    if not fold:
        prob = prob / low
    delta = (do8 * result.centred_out[:, 0].float()).sum(-1, keepdim=True)
    ds8 = fake_quantize(prob * (do8 @ v.t() - delta), (32, 32))
    centre = low / 77 if fold else 0.0
    dv = (round_e4m3((prob - centre) * 256) / 256).t() @ do8
    # 1e-3: an element may fall on the other side of a rounding tie after one ulp of exp2's argument
    close(grads.dq[:, 0], ds8 @ k * p.softmax_scale, 1e-3)
    close(grads.dk[:, 0].float(), ds8.t() @ q * p.softmax_scale, 2**-8 + 1e-3)
    close(grads.dv[:, 0].float(), dv, 2**-8 + 1e-3)
    if fold:
        close(grads.dv_mean[0, 0], dout[:, 0].sum(0) / 77, 1e-6)
    else:
        assert grads.dv_mean is None


def test_forward_rounds_where_it_says():
    """Three key tiles, written as the kernel's loop: lazy maximum, c carried through rescaling, E4M3 of (p - c) * 2^7."""
    case = make([300], 20, 1, score_std=2.0)
    p, cfg = case.problem, case.problem.config
    q, k, v = (x.dequantize()[:, 0] for x in (p.q, p.k, p.v))
    s = q @ k.t() * (p.softmax_scale * LOG2_E)
    m = c = low = acc = None
    moved = 0
    for lo in range(0, 300, 128):
        tile, values = s[:, lo : lo + 128], v[lo : lo + 128]
        top = tile.amax(-1, keepdim=True)
        if m is None:
            m, c = top, torch.exp2((tile - top).mean(-1, keepdim=True))
            low, acc = torch.zeros_like(m), torch.zeros(20, 64)
        else:
            new = torch.where(top > m + cfg.rescale_threshold, top, m)
            moved += int((new != m).sum())
            alpha = torch.exp2(m - new)
            m, c, low, acc = new, c * alpha, low * alpha, acc * alpha
        prob = torch.exp2(tile - m)
        assert prob.max() <= 2**cfg.rescale_threshold * 1.001
        low += prob.sum(-1, keepdim=True)
        acc += round_e4m3((prob - c) * 128) / 128 @ values
    assert 0 < moved < 40, "the data must move some maxima and leave others"
    out = (acc + c * p.v_sum[0, 0]) / low
    result = reference.forward(p)
    close(result.centred_out[:, 0].float(), out, 2**-8 + 1e-3)  # bf16, and rounding ties
    torch.testing.assert_close(result.lse[0], ((m + low.log2()) * math.log(2))[:, 0], rtol=1e-5, atol=1e-5)


def test_rounding_helpers_are_the_formats_own():
    """The reference's fast rounding against the conversion instruction, over every magnitude; and block quantization against
    ``quantize_mx``."""
    every = torch.arange(0, 1 << 16).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([every, torch.randn(10000) * 100, torch.randn(10000) * 1e-3])
    got, want = round_e4m3(x), cast_e4m3(x).float()
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and torch.equal(got.nan_to_num(), want.nan_to_num())
    for rows, columns, block in ((45, 77, (32, 32)), (64, 128, (32, 128)), (1, 1, (32, 32)), (130, 33, (128, 128))):
        y = torch.randn(2, rows, columns) * torch.logspace(-3, 3, columns)
        if block[0] == 32 and (block[1] == 32 or columns % block[1] == 0):
            same_bits(fake_quantize(y, block), quantize_mx(y, block).dequantize())
        y[0, 0, 0] = torch.nan
        got = fake_quantize(y, block)
        assert torch.isnan(got[0, : block[0], : block[1]]).all() and not torch.isnan(got[1]).any()
    assert fake_quantize(torch.zeros(2, 0, 5), (32, 32)).shape == (2, 0, 5)


def test_offsets_helper():
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
