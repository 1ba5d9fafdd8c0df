"""``flash_attn_func`` and ``flash_attn_varlen_func`` on BF16 tensors: the quantize pass and the forward together."""

import pytest
import torch

from lp_fa4 import flash_attn_func, flash_attn_varlen_func
from lp_fa4.config import DROP_IN
from lp_fa4.reference import exact_attention
from tests.gpu.problems import DEVICE, offsets_of, poison, relative

pytestmark = pytest.mark.gpu

FP8_ERROR = 0.06
"""Relative error that E4M3 operands may cause on inputs with common means: three roundings of 2.6% each, and P's."""


def inputs(rows, tokens, heads, kv_heads, dim, dtype=torch.bfloat16):
    g = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(n, h, dim, device=DEVICE, generator=g) + torch.randn(1, h, dim, device=DEVICE, generator=g)
        for n, h in ((rows, heads), (tokens, kv_heads), (tokens, kv_heads))
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_varlen(causal, dim, dtype):
    lengths_k = (0, 1, 31, 33, 128, 129, 500, 1000)
    lengths_q = (3, 0, 31, 40, 128, 100, 129, 300)
    q, k, v = inputs(sum(lengths_q) + 5, sum(lengths_k) + 70, 8, 2, dim, dtype)
    k[-70:], v[-70:], q[-5:] = torch.nan, torch.nan, torch.nan
    oq, ok = offsets_of(lengths_q), offsets_of(lengths_k)
    poison()
    out, lse, _ = flash_attn_varlen_func(q, k, v, oq, ok, 300, 1000, causal=causal, return_attn_probs=True, backend="sm90")
    used_q, used_k = int(oq[-1]), int(ok[-1])
    truth, want = exact_attention(q[:used_q], k[:used_k], v[:used_k], offsets_q=oq, offsets_k=ok, causal=causal)
    assert out.dtype == dtype and bool((out[used_q:] == 0).all())
    assert relative(out[:used_q], truth) < FP8_ERROR
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(lse[:, :used_q]), finite)
    assert float((lse[:, :used_q].double() - want)[finite].abs().mean()) < 0.05


def test_dense_strided():
    """Slices of one projection, [B, S, 3, H, D]."""
    x = (torch.randn(3, 257, 3, 4, 128, device=DEVICE) + 0.5).bfloat16()
    q, k, v = x.unbind(2)
    out = flash_attn_func(q, k, v, backend="sm90")
    offsets = torch.arange(4, device=DEVICE) * 257
    truth, _ = exact_attention(*(t.flatten(0, 1) for t in (q, k, v)), offsets_q=offsets, offsets_k=offsets)
    assert relative(out.flatten(0, 1), truth) < FP8_ERROR
    assert torch.equal(out, flash_attn_func(*(t.contiguous() for t in (q, k, v)), backend="sm90"))


def test_empty():
    q, k, v = inputs(0, 0, 4, 4, 128)
    out = flash_attn_varlen_func(q, k, v, offsets_of([0, 0]), offsets_of([0, 0]), 0, 0, backend="sm90")
    assert out.shape == (0, 4, 128)
    q, k, v = inputs(6, 0, 4, 4, 128)
    out = flash_attn_varlen_func(q, k, v, offsets_of([2, 4]), offsets_of([0, 0]), 4, 0, backend="sm90")
    assert bool((out == 0).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients(causal, dim):
    """Against FP64; rows past the last offset get 0; the dense function's dK and dV are those of the jagged one, bit by bit."""
    queries, keys, batch = 300, 700, 3
    q, k, v = inputs(batch * queries, batch * keys + 40, 4, 2, dim)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    offsets = offsets_of([queries] * batch), offsets_of([keys] * batch)
    poison()
    out = flash_attn_varlen_func(q, k, v, *offsets, queries, keys, causal=causal, backend="sm90")
    dout = torch.randn_like(out) + 0.3
    poison()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    used = batch * keys
    exact = [x.detach().double().requires_grad_() for x in (q, k[:used], v[:used])]
    truth, _ = exact_attention(*exact, offsets_q=offsets[0], offsets_k=offsets[1], causal=causal)
    for name, got, want in zip("qkv", grads, torch.autograd.grad(truth, exact, dout.double()), strict=True):
        assert got.dtype == torch.bfloat16
        assert relative(got[: want.shape[0]], want) < 2 * FP8_ERROR, name
        assert bool((got[want.shape[0] :] == 0).all()), name
    dense = [x.detach()[:n].unflatten(0, (batch, -1)).requires_grad_() for x, n in ((q, batch * queries), (k, used), (v, used))]
    again = flash_attn_func(*dense, causal=causal, backend="sm90")
    assert torch.equal(again.flatten(0, 1), out)
    others = torch.autograd.grad(again, dense, dout.unflatten(0, (batch, -1)))
    for a, b in zip(others[1:], grads[1:], strict=True):
        assert torch.equal(a.flatten(0, 1), b[:used])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("said", [0, 300, 2100, 5000])
def test_gradients_whatever_the_queries_are_said_to_be(causal, said):
    """``max_seqlen_q`` is a hint: gradients are right where it is too small, too large, or right."""
    lengths_q, lengths_k = (300, 0, 2100, 70), (700, 40, 2200, 129)
    leaves = [x.requires_grad_() for x in inputs(sum(lengths_q), sum(lengths_k), 2, 2, 128)]
    offsets = offsets_of(lengths_q), offsets_of(lengths_k)
    poison()
    out = flash_attn_varlen_func(*leaves, *offsets, said, 2200, causal=causal, backend="sm90")
    dout = torch.randn_like(out) + 0.3
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth, _ = exact_attention(*exact, offsets_q=offsets[0], offsets_k=offsets[1], causal=causal)
    wanted = torch.autograd.grad(truth, exact, dout.double())
    poison()
    for name, got, want in zip("qkv", torch.autograd.grad(out, leaves, dout), wanted, strict=True):
        assert relative(got, want) < 2 * FP8_ERROR, name


@pytest.mark.parametrize("causal", [False, True])
def test_copy_of_v_changes_no_bit(causal, monkeypatch):
    """Few queries read V as it is, many a transposed copy: outputs and gradients are the same bits."""
    from lp_fa4.sm90 import preparation

    lengths_k, queries = (0, 1, 129, 700), 200
    inputs_ = inputs(len(lengths_k) * queries, sum(lengths_k) + 3, 4, 2, 128)
    offsets = offsets_of([queries] * len(lengths_k)), offsets_of(lengths_k)
    dout = torch.randn_like(inputs_[0])
    made, prepare = [], preparation.prepare

    def kept(*arguments):
        made.append(prepare(*arguments))
        return made[-1]

    monkeypatch.setattr(preparation, "prepare", kept)
    results = []
    for most in (1024, 0):
        monkeypatch.setattr(preparation, "COPY_QUERIES", most)
        leaves = [x.clone().requires_grad_() for x in inputs_]
        poison()
        out = flash_attn_varlen_func(*leaves, *offsets, queries, 700, causal=causal, deterministic=True, backend="sm90")
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert [hasattr(x.v, "transposed") for x in made] == [False, True]
    for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dim, dtype", [(128, torch.bfloat16), (64, torch.float16)])
def test_quantizing_beside_changes_no_bit(dim, dtype, monkeypatch):
    """Equal sequences are quantized beside the forward, on however many multiprocessors; in a graph too, on other numbers."""
    from lp_fa4.sm90 import preparation, quantize_beside

    batch, queries, keys, heads = 96, 384, 1024, 3
    q, k, v = (x.unflatten(0, (batch, -1)) for x in inputs(batch * queries, batch * keys, heads, heads, dim, dtype))
    k[5, 100, 1, 3], v[7, -1, 2, 0], q[9, 0, 0, 1] = torch.inf, torch.nan, torch.nan
    k[11, :128], v[12, :256] = 0.25, 0.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def call():
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, backend="sm90")
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    def same(ours, theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if i != 2:  # dQ is summed in any order
                assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), i

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "beside_pays", lambda *_: False)
        theirs = call()
        with torch.no_grad():
            plain = flash_attn_func(*leaves, backend="sm90")
    for ctas, more in ((1, 1), (7, 100), (40, 132), (132, 132)):
        with monkeypatch.context() as patched:
            patched.setattr(preparation, "beside_pays", lambda *_: True)
            patched.setattr(quantize_beside, "ctas_of", lambda *_, ctas=ctas: ctas)
            patched.setattr(quantize_beside, "everyone_of", lambda _, more=more: more)
            poison()
            same(call(), theirs)
    monkeypatch.setattr(preparation, "beside_pays", lambda *_: True)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        flash_attn_func(*leaves, backend="sm90")
        with torch.cuda.graph(graph):
            out = flash_attn_func(*leaves, backend="sm90")
        for x in leaves:
            x.copy_(x.flip(0))
        for _ in range(3):
            graph.replay()
            assert torch.equal(out.view(torch.uint8), plain.flip(0).contiguous().view(torch.uint8))


def test_gradient_of_the_lse():
    """Served where the LSE is returned (dQ is then summed in FP32); FP16 sums beside it are refused: their bound is on dO alone."""
    q, k, v = (x.requires_grad_() for x in inputs(200, 300, 2, 2, 64))
    offsets = offsets_of([200]), offsets_of([300])
    out, lse, _ = flash_attn_varlen_func(q, k, v, *offsets, 200, 300, return_attn_probs=True, backend="sm90")
    weight = torch.randn_like(lse)
    grads = torch.autograd.grad((lse * weight).sum(), (q, k), retain_graph=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    _, truth = exact_attention(*exact, offsets_q=offsets[0], offsets_k=offsets[1])
    for got, want in zip(grads, torch.autograd.grad((truth * weight).sum(), exact[:2]), strict=True):
        assert relative(got, want) < 2 * FP8_ERROR
    out, lse, _ = flash_attn_varlen_func(q, k, v, *offsets, 200, 300, return_attn_probs=True, backend="sm90", config=DROP_IN)
    with pytest.raises(ValueError, match="dlse is given with FP16 dQ"):
        (out.float().sum() + lse.sum()).backward()
