"""``flash_attn_func`` and ``flash_attn_varlen_func``: flash_attn's signatures, every argument served or refused in words."""

import dataclasses
import inspect
import itertools
import logging
import types

import pytest
import torch

from lp_fa4 import dispatch, reference
from lp_fa4.config import DEFAULT, HEAD_DIMS
from lp_fa4.interface import flash_attn_func, flash_attn_varlen_func, is_supported, mx_attention, mx_attention_backward
from lp_fa4.mx import quantize_mx
from lp_fa4.problem import AttentionProblem
from tests.attention.helpers import make, random_mx, run, same_bits, sqnr, whole
from tests.conftest import HOSTILE_LENGTHS, offsets_of


def tensors(batch=2, sq=5, sk=40, heads=4, kv_heads=2, dim=32, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, s, h, dim, generator=g).to(dtype) for s, h in ((sq, heads), (sk, kv_heads), (sk, kv_heads))]


def test_signatures_are_flash_attns():
    """flash_attn 2.8's argument names, order and defaults; ours come after, keyword only."""
    common = dict(
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    )
    need = inspect.Parameter.empty
    dense = dict(q=need, k=need, v=need, **common)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    varlen = dict(**dict.fromkeys(names, need), **common, block_table=None)
    for function, expected in ((flash_attn_func, dense), (flash_attn_varlen_func, varlen)):
        found = inspect.signature(function).parameters
        assert list(found)[: len(expected)] == list(expected)
        assert {n: found[n].default for n in expected} == expected
        assert all(found[n].kind == inspect.Parameter.KEYWORD_ONLY for n in list(found)[len(expected) :])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", [(5, 40), (40, 5), (33, 33), (1, 1)])
def test_dense_against_the_truth(causal, sq, sk):
    """Output, LSE and gradients; causal masks are aligned at the ends, rows before the first key are 0 with LSE -inf."""
    q, k, v = (x.requires_grad_() for x in tensors(3, sq, sk))
    out, lse, nothing = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (3, 4, sq) and nothing.numel() == 0
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(dout)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    truth, truth_lse = reference.exact_attention(
        *(x.flatten(0, 1) for x in exact), offsets_q=offsets_of([sq] * 3), offsets_k=offsets_of([sk] * 3), causal=causal
    )
    truth.backward(dout.flatten(0, 1).double())
    blind = max(0, sq - sk) if causal else 0
    assert (out[:, :blind] == 0).all() and torch.isneginf(lse[..., :blind]).all()
    assert sqnr(out.flatten(0, 1), truth) > 22  # small cases: 3 dB of spread under the accuracy table
    torch.testing.assert_close(lse.double().transpose(0, 1).flatten(1), truth_lse.detach(), atol=0.15, rtol=0)
    for x, e in zip((q, k, v), exact, strict=True):
        if e.grad.abs().max() > 1e-12:  # one key: dq and dk are 0 in truth
            assert sqnr(x.grad, e.grad) > 19


def test_dense_and_varlen_are_one_function():
    q, k, v = tensors()
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    other, other_lse, _ = flash_attn_varlen_func(*packed, offsets_of([5, 5]), offsets_of([40, 40]), 5, 40, return_attn_probs=True)
    same_bits(out.flatten(0, 1), other)
    same_bits(lse.transpose(0, 1).flatten(1), other_lse)


def test_windows_that_mean_causal():
    q, k, v = tensors()
    causal = flash_attn_func(q, k, v, causal=True)
    same_bits(flash_attn_func(q, k, v, window_size=(-1, 0)), causal)
    same_bits(flash_attn_func(q, k, v, causal=True, window_size=(-1, 0)), causal)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(dropout_p=0.1), NotImplementedError, "dropout_p is 0.1; only 0.0 is served"),
        (dict(softcap=30.0), NotImplementedError, "softcap is 30.0; only 0.0 is served"),
        (dict(window_size=(128, 0)), NotImplementedError, r"window_size is \(128, 0\)"),
        (dict(window_size=(-1, 5)), NotImplementedError, r"window_size is \(-1, 5\)"),
        (dict(softmax_scale=float("nan")), ValueError, "softmax_scale is nan; it must be finite"),
        (dict(softmax_scale=-float("inf")), ValueError, "softmax_scale is -inf"),
        (dict(alibi_slopes=torch.ones(4)), NotImplementedError, "alibi_slopes is given; only None is served"),
        (dict(backend="fast"), ValueError, "backend is 'fast'; allowed are 'auto', 'reference', 'sm90', 'sm100'"),
        (dict(backend="sm90"), ValueError, "backend='sm90' cannot serve this call: .*(CUDA|kernels)"),
        (dict(backend="sm100"), ValueError, "backend='sm100' cannot serve this call: .*(CUDA|kernels)"),
    ],
)
def test_what_is_not_served_is_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words):
        flash_attn_func(*tensors(), **arguments)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda t: (t[0].numpy(), t[1], t[2]), TypeError, "q is a ndarray; it must be a tensor"),
        (lambda t: (t[0], quantize_mx(t[1]), t[2]), TypeError, "k is a MXTensor; it must be a tensor; mx_attention takes MXTensors"),
        (lambda t: (t[0][0], t[1], t[2]), ValueError, r"q has shape \[5, 4, 32\]; it must be \[batch, tokens, heads, head_dim\]"),
        (lambda t: (t[0], t[1], t[2][:, 1:]), ValueError, "v has shape .* but k has"),
        (lambda t: (t[0][:1], t[1], t[2]), ValueError, "k has batch 2 but q has 1"),
        (lambda t: (t[0][:, :, :3], t[1], t[2]), ValueError, "q has 3 heads and k has 2; the first must be a multiple"),
        (lambda t: (torch.cat([t[0], t[0]], -1), t[1], t[2]), ValueError, "k has head_dim 32 but q has 64"),
        (lambda t: [x.double() for x in t], TypeError, "q has dtype torch.float64; allowed are torch.float32, torch.float16"),
        (lambda t: (t[0], t[1].to("meta"), t[2]), ValueError, "k is on meta but q is on cpu"),
    ],
)
def test_shapes_dtypes_and_devices(change, error, words):
    with pytest.raises(error, match=words):
        flash_attn_func(*change(tensors()))


@pytest.mark.parametrize("dim", [16, 48, 72, 80, 100, 288])
def test_head_dimensions_that_cannot_be_served(dim):
    """E3."""
    with pytest.raises(ValueError, match=f"head_dim is {dim}; allowed are 32, 64, 96, 128, 160, 192, 224, 256"):
        flash_attn_func(*tensors(dim=dim))
    ok, reason = is_supported("cpu", head_dim=dim)
    assert not ok and f"head_dim is {dim}; allowed are 32, 64" in reason


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(cu_seqlens_k=torch.tensor([0.0, 40.0, 80.0])), TypeError, "cu_seqlens_k has dtype torch.float32"),
        (dict(cu_seqlens_q=torch.tensor([[0, 5, 10]])), ValueError, r"cu_seqlens_q has shape \[1, 3\]"),
        (dict(cu_seqlens_q=torch.tensor([0, 10])), ValueError, "cu_seqlens_q has 2 elements but cu_seqlens_k has 3"),
        (dict(cu_seqlens_k=torch.tensor([0, 40, 80], device="meta")), ValueError, "cu_seqlens_k is on meta but the values are on cpu"),
        (dict(block_table=torch.zeros(2, 3)), NotImplementedError, r"block_table is a tensor of shape \[2, 3\]; only None"),
        (dict(cu_seqlens_q=[0, 5, 10]), TypeError, "cu_seqlens_q is a list; it must be a tensor"),
        (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q is -1"),
        (dict(cu_seqlens_k=torch.tensor([1, 40, 80])), ValueError, r"cu_seqlens_k\[0\] is 1; it must be 0"),
        (dict(cu_seqlens_k=torch.tensor([0, 40, -(2**31)], dtype=torch.int32)), ValueError, r"cu_seqlens_k\[2\] is -2147483648, less than"),
        (dict(cu_seqlens_k=torch.tensor([0, 50, 40])), ValueError, r"cu_seqlens_k\[2\] is 40, less than cu_seqlens_k\[1\] = 50"),
        (dict(cu_seqlens_q=torch.tensor([0, 5, 11])), ValueError, r"cu_seqlens_q\[-1\] is 11; it must be at most the number of values, 10"),
    ],
)
def test_varlen_arguments(change, error, words):
    """E6, and the value checks behind ``validate=True``, which a CPU makes in any case; D6: an int32 sum that has wrapped around is one of
    them."""
    q, k, v = (x.flatten(0, 1) for x in tensors())
    arguments = dict(cu_seqlens_q=offsets_of([5, 5]), cu_seqlens_k=offsets_of([40, 40]), max_seqlen_q=5, max_seqlen_k=40)
    for validate in (True, False):
        with pytest.raises(error, match=words):
            flash_attn_varlen_func(q, k, v, **{**arguments, **change}, validate=validate)


@pytest.mark.parametrize("shapes", [(0, 5, 40), (2, 0, 40), (2, 5, 0), (2, 0, 0)])
def test_nothing_to_do(shapes):
    """A2: no batch, no queries, no keys; zeros attached to the graph, gradients 0."""
    q, k, v = (x.requires_grad_() for x in tensors(*shapes))
    out = flash_attn_func(q, k, v)
    assert out.shape == q.shape and (out == 0).all() and out.requires_grad
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and (x.grad == 0).all()


@pytest.mark.parametrize("lengths", [[], [0], [0] * 8])
def test_no_tokens(lengths):
    """A2 for varlen and MXFP8 operands."""
    batch = len(lengths)
    q, k, v = (x.requires_grad_() for x in (torch.randn(3 * batch, 2, 32), torch.zeros(0, 2, 32), torch.zeros(0, 2, 32)))
    out = flash_attn_varlen_func(q, k, v, offsets_of([3] * batch), offsets_of(lengths), 3, 0)
    out.sum().backward()
    assert out.shape == q.shape and (out == 0).all() and (q.grad == 0).all() and k.grad.shape == (0, 2, 32)
    mq, mk = random_mx((4, 2, 32)), random_mx((0, 2, 32), offsets_of(lengths))
    out, lse, result = mx_attention(mq, mk, mk, shared_q=True, return_result=True)
    assert out.shape == (4 * batch, 2, 32) and (out == 0).all() and torch.isneginf(lse).all()
    grads = mx_attention_backward(out, result, mq, mk, mk, shared_q=True)
    assert (grads.dq == 0).all() and grads.dk.shape == (0, 2, 32) and grads.dv_mean.shape == (batch, 2, 32)


def test_strides_do_not_matter():
    """E2: K and V as halves of one projection, q as a transposed view, for several head dimensions; and the gradient of a view."""
    for dim in (32, 64, 96):
        both = torch.randn(2, 40, 2, 2 * dim)
        k, v = both[..., :dim], both[..., dim:]
        q = torch.randn(2, 4, 5, dim).transpose(1, 2)
        assert not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
        same_bits(flash_attn_func(q, k, v), flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous()))
    leaf, grads = both.requires_grad_(), []
    for change in (lambda x: x, lambda x: x.contiguous()):
        out = flash_attn_func(change(q), change(leaf[..., :dim]), change(leaf[..., dim:]))
        grads.append(torch.autograd.grad(out.transpose(1, 2).sum(), leaf)[0])  # the gradient arrives expanded, not contiguous
    same_bits(*grads)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dq, dk, dv", list(itertools.product(DTYPES, DTYPES, (torch.float32, torch.bfloat16))))
def test_mixed_dtypes(dq, dk, dv):
    """E8's attention part: each operand its own dtype; output in q's, gradients in each one's."""
    q, k, v = (x.to(t).requires_grad_() for x, t in zip(tensors(), (dq, dk, dv), strict=True))
    out = flash_attn_func(q, k, v)
    out.float().square().sum().backward()
    assert (out.dtype, q.grad.dtype, k.grad.dtype, v.grad.dtype) == (dq, dq, dk, dv)
    base = flash_attn_func(*(x.detach().float() for x in (q, k, v)))
    torch.testing.assert_close(out.float(), base, rtol=2**-8, atol=2**-10)  # fp16 subnormals; bf16 is where the output was rounded


def test_under_autocast():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(flash_attn_func(q, k, v), flash_attn_func(q, k, v))
        assert flash_attn_func(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)))
def test_only_some_inputs_need_gradients(which):
    """G10: None for the others, the same bits for those."""
    full = [x.requires_grad_() for x in tensors()]
    dout = torch.randn(2, 5, 4, 32)
    flash_attn_func(*full).backward(dout)
    some = [x.detach().clone().requires_grad_(w) for x, w in zip(full, which, strict=True)]
    out = flash_attn_func(*some)
    assert out.requires_grad == any(which)
    if any(which):
        out.backward(dout)
    for x, y, w in zip(some, full, which, strict=True):
        if w:
            same_bits(x.grad, y.grad)
        else:
            assert x.grad is None


def test_inference():
    q, k, v = tensors()
    base = flash_attn_func(q, k, v)
    with torch.inference_mode():
        same_bits(flash_attn_func(*(x.clone() for x in (q, k, v))), base)
    with torch.no_grad():
        same_bits(flash_attn_func(q.requires_grad_(), k, v), base.detach())


def test_gradient_through_the_lse():
    """``return_attn_probs`` gives a differentiable LSE: alone, and with the output. K has a mean, so its correction counts."""
    sides = []
    for exact in (False, True):
        q, k, v = tensors()
        leaves = [x.double() if exact else x for x in (q, k + 1.0, v)]
        leaves = [x.requires_grad_() for x in leaves]
        if exact:
            offsets = dict(offsets_q=offsets_of([5, 5]), offsets_k=offsets_of([40, 40]))
            lse = reference.exact_attention(*(x.flatten(0, 1) for x in leaves), **offsets)[1]
        else:
            lse = flash_attn_func(*leaves, return_attn_probs=True)[1].transpose(0, 1).flatten(1)
        weight = torch.linspace(-1, 1, lse.numel()).reshape(lse.shape)
        grads = torch.autograd.grad((lse * weight).sum(), leaves, allow_unused=True)
        sides.append((lse.detach(), *grads))
    (lse, dq, dk, dv), (lse_x, dq_x, dk_x, _) = sides
    torch.testing.assert_close(lse.double(), lse_x, atol=0.15, rtol=0)
    assert sqnr(dq, dq_x) > 25 and sqnr(dk, dk_x) > 22
    assert dv is None or (dv == 0).all()


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in tensors())
    (gradient,) = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_mx_attention_and_its_backward():
    """The public pair on MXFP8 operands equals the reference, for shared, dense and jagged queries."""
    for mode in ("shared", "dense", "jagged"):
        queries = list(range(len(HOSTILE_LENGTHS))) if mode == "jagged" else 6
        case = make(HOSTILE_LENGTHS, queries, 4, 2, mode=mode)
        p = case.problem
        want, grads, dout = run(case)
        arguments = dict(shared_q=p.shared_q, v_mean=p.v_mean, v_sum=p.v_sum)
        out, lse, result = mx_attention(p.q, p.k, p.v, **arguments, return_result=True, validate=True)
        for x, y, name in zip(result, want, want._fields, strict=True):
            same_bits(x, y, name)
        same_bits(out, want.out)
        same_bits(lse, want.lse)
        got = mx_attention_backward(dout, result, p.q, p.k, p.v, **arguments)
        same_bits(got.dq, grads.dq)
        same_bits(got.dk.codes, grads.dk.codes)
        same_bits(got.dv.scale_bytes, grads.dv.scale_bytes)
        same_bits(got.dv_mean, grads.dv_mean)
        assert got.dk.offsets is p.offsets_k


def test_mx_attention_takes_missing_sums_from_the_payload():
    case = make(HOSTILE_LENGTHS, 5, 2)
    p = case.problem
    out, _ = mx_attention(p.q, p.k, p.v, shared_q=True)
    exact, _ = reference.exact_attention(*(x.dequantize() for x in (p.q, p.k, p.v)), offsets_k=p.offsets_k, shared_q=True)
    assert sqnr(out, exact) > 28  # P's rounding only


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(q=torch.zeros(4, 2, 32)), TypeError, "q is a Tensor; mx_attention takes MXTensors"),
        (dict(q=random_mx((4, 32))), ValueError, r"q has shape \[4, 32\]; it must be \[tokens, heads, head_dim\]"),
        (dict(v=random_mx((70, 2, 64), offsets_of([30, 40]))), ValueError, r"v has shape \[70, 2, 64\] but k has \[70, 2, 32\]"),
        (dict(q=random_mx((4, 3, 32))), ValueError, "q has 3 heads and k has 2"),
        (dict(k=random_mx((70, 2, 32)), v=random_mx((70, 2, 32)), offsets_k=offsets_of([30, 40])), ValueError, "k was quantized"),
        (dict(shared_q=False), ValueError, "q was quantized without offsets"),
        (dict(q=random_mx((5, 2, 32)), shared_q=False), ValueError, "q has 5 rows, no multiple of the batch 2"),
        (dict(offsets_q=offsets_of([2, 2])), ValueError, "offsets_q is given with shared_q=True"),
        (dict(v_mean=torch.zeros(2, 2, 16)), ValueError, r"v_mean is torch.float32 \[2, 2, 16\] .* it must be torch.float32 \[2, 2, 32\]"),
        (dict(v_sum=torch.zeros(2, 2, 32).half()), ValueError, "v_sum is torch.float16"),
        (dict(q_mean=torch.zeros(2, 2, 32)), ValueError, "q_mean is"),
        (dict(mean_scores=torch.zeros(2, 70)), ValueError, "mean_scores is given but q_mean is None"),
        (dict(softmax_scale=float("nan")), ValueError, "softmax_scale is nan; it must be finite"),
        (dict(offsets_k=torch.tensor([0, 80, 70]), validate=True), ValueError, r"offsets_k\[2\] is 70, less than"),
    ],
)
def test_mx_attention_refuses_in_words(arguments, error, words):
    k = random_mx((70, 2, 32), offsets_of([30, 40]))
    with pytest.raises(error, match=words):
        mx_attention(**{**dict(q=random_mx((4, 2, 32)), k=k, v=k, shared_q=True), **arguments})


def test_static_operands_need_no_offsets():
    """Static exponents belong to no sequence: queries and keys without offsets of their own."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(6, 2, 32, generator=g), torch.randn(70, 2, 32, generator=g)
    q8, k8 = (quantize_mx(x, (0, 32), None, token_dim=0, exponent=-6) for x in (q, k))
    offsets = offsets_of([30, 40])
    out, _ = mx_attention(q8, k8, k8, offsets_k=offsets)
    exact, _ = reference.exact_attention(q, k, k, offsets_q=offsets_of([3, 3]), offsets_k=offsets)
    assert sqnr(out, exact) > 24


def test_is_supported_names_reasons():
    """F10: a table of device and feature to reason; never a stack dump."""
    assert is_supported("cpu", head_dim=128) == (True, "served by backend 'reference'")
    for dim in HEAD_DIMS:
        assert is_supported("cpu", head_dim=dim, causal=True, jagged_q=True, group=4)[0]
    for name in ("sm90", "sm100"):
        ok, reason = is_supported("cpu", head_dim=128, backend=name)
        assert not ok and name in reason
    if not torch.cuda.is_available():
        assert is_supported("cuda:1", head_dim=128) == (False, "device is cuda:1, and this process sees no CUDA device")
    ok, reason = is_supported("cpu", head_dim=128, backend="sm70")
    assert not ok and "backend is 'sm70'; allowed are" in reason


def test_auto_says_once_what_it_took(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())
    with caplog.at_level(logging.WARNING, logger="lp_fa4"):
        for _ in range(3):
            flash_attn_func(*tensors())
        flash_attn_func(*tensors(), backend="reference")
    assert [r.getMessage() for r in caplog.records] == ["lp_fa4: attention on cpu runs on backend 'reference'"]


def test_auto_says_each_reason_once(caplog, monkeypatch):
    """A second reason for the slow path is said, too."""
    monkeypatch.setattr(dispatch, "_announced", set())
    monkeypatch.setattr(dispatch, "reason_against", lambda name, device, features: f"{name}: {features.head_dim}")
    with caplog.at_level(logging.WARNING, logger="lp_fa4"):
        for dim in (96, 96, 160, 96):
            dispatch.announce("reference", torch.device("cuda"), dispatch.Features(dim))
    assert ["sm90: 96" in r.getMessage() for r in caplog.records] == [True, False]
    assert "sm90: 160" in caplog.records[1].getMessage()


class Kernels:
    """Stands for a kernel backend: the reference's arithmetic behind the hooks that ``lp_fa4.dispatch`` documents."""

    calls: list

    def __init__(self):
        self.calls = []

    def unsupported(self, features):
        return "causal is True; these kernels serve False" if features.causal else ""

    def prepare(self, q, k, v, offsets_q, offsets_k, causal, config, block, softmax_scale):
        self.calls.append("prepare")
        made = reference.prepare(q, k, v, offsets_q, offsets_k, causal, config, block)
        return types.SimpleNamespace(**made._asdict(), lse_shift=torch.full((q.shape[1], q.shape[0]), 2.0))

    def forward(self, problem):
        self.calls.append(f"forward {problem.q.block}")
        return reference.forward(problem)

    def backward(self, problem, result, dout, *, deterministic=False):
        self.calls.append(f"backward {dout.dtype} {dout.is_contiguous()} {deterministic}")
        return reference.backward(problem, result, dout)


def test_a_kernel_backend_is_called_through_its_hooks(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(
        dispatch, "_kernel_reason", lambda name, device, features: kernels.unsupported(features) if name == "sm90" else "none"
    )
    monkeypatch.setattr(dispatch, "module", lambda name: kernels if name == "sm90" else reference)
    monkeypatch.setattr(dispatch, "_announced", set())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    q, k, v = (x.requires_grad_() for x in tensors())
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, deterministic=True)
    out.transpose(1, 2).sum().backward()
    assert kernels.calls == ["prepare", "forward (128, 32)", "backward torch.bfloat16 True True"]
    plain, plain_lse, _ = flash_attn_func(*tensors(), return_attn_probs=True, backend="reference")
    assert sqnr(out, plain) > 25
    assert (lse - plain_lse - 2.0).abs().max() < 1.0  # the stand-in's shift, not the reference's (another block shape moves it by less)
    kernels.calls.clear()
    flash_attn_func(q, k, v, causal=True)  # auto goes to what can serve
    assert kernels.calls == []
    with pytest.raises(ValueError, match="backend='sm90' cannot serve this call: causal is True; these kernels serve False"):
        flash_attn_func(q, k, v, causal=True, backend="sm90")
    with pytest.raises(NotImplementedError, match="a gradient of the LSE is not served by backend 'sm90'"):
        flash_attn_func(q, k, v, return_attn_probs=True)[1].sum().backward()


def test_explicit_reference_is_what_auto_takes_here():
    same_bits(flash_attn_func(*tensors(), backend="reference"), flash_attn_func(*tensors()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [65504.0, -65504.0, 64000.0, 61440.0])
def test_values_at_the_end_of_fp16_stay_finite(value, causal):
    """The average of such values is one of them; roundings to E4M3 and BF16 made it 65,536, which FP16 does not hold. Non-finite ones are
    still seen, and so is an output of wider values that does not fit."""
    q, k, v = (x.half() for x in tensors())
    v = torch.full_like(v, value)
    out = flash_attn_func(q, k, v, causal=causal)
    assert out.dtype == torch.float16 and torch.isfinite(out).all()
    assert (out.float() / value - 1).abs().max() <= 2**-4 + 2**-8  # half a step of E4M3, and of BF16
    v[0, 3, 1, 2] = torch.inf
    shown = flash_attn_func(q, k, v, causal=causal)
    assert torch.isnan(shown[0, -1, 2:]).any() and torch.isfinite(shown[1]).all()
    assert torch.isinf(flash_attn_func(q, k, torch.full_like(v, 1e6, dtype=torch.float32), causal=causal)).any()


def test_softmax_scale():
    q, k, v = tensors()
    same_bits(flash_attn_func(q, k, v, softmax_scale=32**-0.5), flash_attn_func(q, k, v))
    flat = flash_attn_func(q, k, v, softmax_scale=0.0)
    torch.testing.assert_close(flat, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(flat), rtol=2**-7, atol=1e-3)
    negative = flash_attn_func(q, k, v, softmax_scale=-(32**-0.5))
    torch.testing.assert_close(negative, flash_attn_func(-q, k, v), rtol=0, atol=1e-6)


def test_gradients_are_of_full_shape_for_unused_heads():
    """Grouped heads: dk and dv sum over the query heads that share them."""
    case = make([40, 33], 5, 4, 1, mode="dense")
    _, grads, dout = run(case)
    assert whole(grads.dk).shape == (73, 1, 64)
    assert sqnr(whole(grads.dk), case.exact_gradients(dout)[1]) > 20


def test_queries_each():
    """What the dense function tells the kernels: the number of queries beside the offsets; anything else is refused."""
    q, k, v = (random_mx((rows, 2, 32), offsets_of([rows // 2] * 2)) for rows in (6, 40, 40))
    problem = AttentionProblem(q, k, v, queries_each=3, config=DEFAULT.with_(center_p=False, center_p_backward=False))
    assert problem.queries == 3 and problem.rows == 6 and problem.offsets_q is not None
    assert dataclasses.replace(problem, queries_each=None).queries is None
    with pytest.raises(ValueError, match="queries_each is 2 but q has 6 rows in 2 sequences; it must be their quotient"):
        dataclasses.replace(problem, queries_each=2)
