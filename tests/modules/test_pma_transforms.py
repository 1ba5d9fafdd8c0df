"""PMA under what training loops put around it: operators' contracts, compile, export, checkpointing, flash-attn-4's function."""

import logging
import sys
from types import ModuleType

import pytest
import torch
import torch._dynamo
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lp_fa4.reference
from lp_fa4.sm90 import backward_host
from modules import Numerics, bf16, mxfp8
from modules.queries import project_queries
from tests.conftest import offsets_of
from tests.fused_ops.common import db
from tests.modules.common import DIM, HEADS, SEEDS, assert_identical, batch, exact, make, ratios, run, weights_of

KINDS = [dict(), dict(value_proj=True, numerics="post"), dict(precision="bf16", value_proj=True)]


@pytest.mark.parametrize("numerics", [Numerics(), Numerics.post(), Numerics(scales="static", q_smoothing=True)])
@pytest.mark.parametrize("value_proj", [False, True])
@pytest.mark.parametrize("tokens", [196, 257])
def test_operator(numerics, value_proj, tokens):
    """F4, F5: fake and real agree in shape, stride and dtype; autograd is registered; shapes are dynamic."""
    offsets = offsets_of([tokens - 90, 0, 80])
    leaf = [torch.randn(*shape).requires_grad_() for shape in ((tokens, 64), (40, 2, 32), (64,), (64, 64), (64, 64))]
    x, q, g, w_k, w_v = leaf
    arguments = (x, offsets, q, g, w_k, w_v if value_proj else None, 1e-6, numerics.key, "auto", torch.bfloat16)
    opcheck(mxfp8.pma_attention, (*arguments, True))
    alone = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    opcheck(mxfp8.pma_attention, (*alone, False))


def test_other_operators():
    q, k, v = (torch.randn(n, 2, 32).requires_grad_() for n in (40, 90, 90))
    opcheck(bf16.jagged_attention, (q, k, v, offsets_of([50, 0, 37])))
    arguments = [torch.randn(*shape).requires_grad_() for shape in ((40, 64), (64,), (64, 64))]
    seeds, weight, proj = arguments
    formula = F.linear(F.rms_norm(seeds, weight.shape, weight, 1e-6), proj)
    dq = torch.randn_like(formula)
    want = torch.autograd.grad(formula, arguments, dq)
    for rounded in (False, True):
        opcheck(project_queries, (*arguments, 1e-6, rounded))
        got = project_queries(*arguments, 1e-6, rounded)
        assert (db(got, formula) < 35) == rounded and db(got, formula) > 25  # E4M3's 31 to 32 dB an operand
        for mine, theirs in zip(torch.autograd.grad(got, arguments, dq), want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", KINDS)
def test_compile_of_changing_totals(options):
    """F2, F4: one graph with no break serves every batch; 0 and 1 may have one of their own. The same bits as eager."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = make(**options)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    batches = [[31, 0, 33], [0, 0, 0], [1, 0, 0], [129], []]
    batches += [torch.randint(0, 90, (int(n),), generator=generator).tolist() for n in torch.randint(2, 9, (15,), generator=generator)]
    graphs = []
    for lengths in batches:
        x, offsets = batch(lengths)
        assert_identical(run(compiled, x, offsets), fix(run(module, x, offsets)))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[4], f"compiled again for ordinary batches: {graphs}"
    assert graphs[-1] <= 5


@pytest.fixture
def hopper(monkeypatch):
    """Traces are those of a Hopper GPU."""

    def settle(device, head_dim, key, backend, **_):
        return "sm90", Numerics.from_key(key).for_backend("sm90", torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr(mxfp8, "_settle", settle)
    monkeypatch.setattr(backward_host, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(mxfp8, "_projection", lambda *_: pytest.fail("a projection is quantized for its shape alone"))


CHOICES = [dict(), dict(numerics=Numerics(dq_dtype=torch.float32)), dict(value_proj=True, numerics=Numerics(coordinates="plain"))]


@pytest.mark.parametrize("options", CHOICES)
def test_hoppers_workspaces_of_any_size(options, hopper):
    """The same of a trace whose events and samples are numbers that it does not know, and may not ask for."""
    module = make(precision="mxfp8", **options)

    def step(x, offsets, dout):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(module(x, offsets), [x, *module.parameters()], dout)

    x, offsets = torch.randn(1000, DIM), torch.arange(0, 900, 100, dtype=torch.int32)
    traced = make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, offsets, torch.randn(8, SEEDS, DIM))
    guards = [str(guard.expr) for guard in traced.shape_env.guards]
    assert len(guards) <= 3, guards  # the module's widths, more than one sample, as many outputs' gradients as samples
    assert any("pma_attention_prepass" in str(node.target) for node in traced.graph.nodes)


@pytest.mark.parametrize("options", CHOICES)
def test_hoppers_operators_trace_without_a_kernel(options, hopper):
    """What a trace of the module on Hopper asks of shapes launches nothing: here there is no GPU, and data are fake."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        module = make(precision="mxfp8", **options)
        x, offsets = torch.empty(1000, DIM, requires_grad=True), torch.empty(9, dtype=torch.int32)
        out = module(x, offsets)
        leaves = [x, *module.parameters()]
        grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
        assert out.shape == (8, SEEDS, DIM)
        assert [g.shape for g in grads] == [leaf.shape for leaf in leaves]


def fix(result):
    """A compiled module prefixes the names of its parameters."""
    return result[0], result[1], {f"_orig_mod.{name}": grad for name, grad in result[2].items()}


@pytest.mark.parametrize("options", KINDS)
def test_export(options):
    """F6: dynamic events and samples (at least 2 samples: PyTorch specialises sizes of 1)."""
    module = make(**options)
    x, offsets = batch([31, 0, 33])
    dynamic = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(module, (x, offsets), dynamic_shapes={"values": dynamic, "offsets": dynamic}).module()
    for lengths in ([31, 0, 33], [0, 0], [7, 1], [64, 64, 2, 129]):
        x, offsets = batch(lengths)
        assert torch.equal(program(x, offsets), module(x, offsets))


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(options, reentrant):
    """G4: recomputed, the gradients are bit for bit the same, under autocast too."""
    module = make(**options)
    x, offsets = batch([0, 70, 33])

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, values, bounds):
            return checkpoint(self.inner, values, bounds, use_reentrant=reentrant)

    def named(result):
        return result[0], result[1], {f"inner.{name}": grad for name, grad in result[2].items()}

    assert_identical(run(Checkpointed(), x, offsets), named(run(module, x, offsets)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_identical(run(Checkpointed(), x, offsets), named(run(module, x, offsets)))


def test_selective_checkpointing_can_name_the_operator(monkeypatch):
    """G4: MUST_SAVE on modules::pma_attention keeps its results, so attention's forward runs once."""
    module = make()
    x, offsets = batch([0, 70, 33])
    want = run(module, x, offsets)
    calls = []
    forward = lp_fa4.reference.forward
    monkeypatch.setattr(lp_fa4.reference, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))

    def policy(context, op, *args, **kwargs):
        save = op is torch.ops.modules.pma_attention.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    for contexts, expected in ((lambda: create_selective_checkpoint_contexts(policy), 1), (None, 2)):
        calls.clear()
        events = x.clone().requires_grad_()
        more = {} if contexts is None else {"context_fn": contexts}
        out = checkpoint(module, events, offsets, use_reentrant=False, **more)
        out.backward(weights_of(out))
        got = out.detach(), events.grad, {n: p.grad for n, p in module.named_parameters()}
        module.zero_grad(set_to_none=True)
        assert_identical(got, want)
        assert len(calls) == expected


def test_backward_twice_through_a_retained_graph():
    """The backward frees what it has read, but not while the graph is retained."""
    module = make(value_proj=True)
    x, offsets = batch([40, 0, 70])
    x.requires_grad_()
    out = module(x, offsets)
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(out, leaves, weights_of(out), retain_graph=True)
    second = torch.autograd.grad(out, leaves, weights_of(out))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, weights_of(out))


@pytest.mark.parametrize("options", KINDS)
def test_no_other_derivative_in_silence(options):
    """Second ones, forward mode and ``torch.func``'s are refused, never 0; parameters given from outside are not."""
    module = make(**options)
    x, offsets = batch([40, 70])
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module(x, offsets).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), x)
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError)):
        module(forward_ad.make_dual(x.detach(), torch.ones_like(x)), offsets)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    assert torch.equal(functional_call(module, parameters, (x, offsets)), module(x, offsets))
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.grad(lambda p: functional_call(module, p, (x, offsets)).sum())(parameters)


@pytest.mark.parametrize("kind, index, reason", [("cuda", 0, "flash-attn-4 is not installed"), ("cpu", None, "")])
def test_a_slow_path_of_bf16_is_said_once(kind, index, reason, monkeypatch, caplog):
    """SDPA, a sequence at a time and with offsets read on the host, is no silent stand-in for flash-attn-4 on a GPU."""
    bf16._bf16_choice_once.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(bf16.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert [bf16._bf16_choice_once(kind, index, "auto") for _ in range(2)] == ["sdpa"] * 2
    assert [reason in r.getMessage() for r in caplog.records] == [True] * bool(reason)
    bf16._bf16_choice_once.cache_clear()


@pytest.fixture
def fa4(monkeypatch):
    """A stand-in for flash-attn-4's public function, attention on the CPU that leaves rows of samples without keys undefined."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, starts, offsets):
            ctx.save_for_backward(q, k, v, starts, offsets)
            out = torch.full_like(q, torch.nan)
            for b in range(len(starts) - 1):
                if offsets[b] < offsets[b + 1]:
                    rows, keys = slice(starts[b], starts[b + 1]), slice(offsets[b], offsets[b + 1])
                    out[rows] = bf16.jagged_attention(q[rows], k[keys], v[keys], torch.tensor([0, keys.stop - keys.start]))[0]
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, starts, offsets = ctx.saved_tensors
            dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
            for b in range(len(starts) - 1):
                rows, keys = slice(starts[b], starts[b + 1]), slice(offsets[b], offsets[b + 1])
                bounds = torch.tensor([0, keys.stop - keys.start])
                grads = bf16.jagged_attention_backward(dout[rows][None], q[rows], k[keys], v[keys], bounds)
                dq[rows], dk[keys], dv[keys] = grads
            return dq, dk, dv, None, None

    calls = []

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None):
        calls.append(1)
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == SEEDS
        return Function.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setattr(bf16, "_bf16_choice", lambda kind, index, backend: "fa4")
    return calls


def test_fa4_path(fa4):
    """Expansion of the shared queries, offsets, samples without keys, and the operator that hides the launcher from a tracer."""
    module = make(precision="bf16", value_proj=True)
    x, offsets = batch([0, 70, 33], extra=0)
    got = run(module, x, offsets)
    found = ratios(got, exact(module, x, offsets))
    assert min(found.values()) > 40 and (got[0][0] == 0).all()
    calls = len(fa4)
    for lengths in ([], [0, 0]):  # nothing for it to launch on
        x, offsets = batch(lengths)
        out, dx, grads = run(module, x, offsets)
        assert out.shape == (len(lengths), SEEDS, DIM) and not out.any() and dx.shape == x.shape
        assert all(grad is not None and not grad.any() for grad in grads.values())
    assert len(fa4) == calls
    torch._dynamo.reset()
    rows = torch.randn(2 * SEEDS, HEADS, DIM // HEADS).bfloat16().requires_grad_()
    k, v = (torch.randn(90, HEADS, DIM // HEADS).bfloat16().requires_grad_() for _ in range(2))
    opcheck(
        bf16.fa4_attention,
        (rows, k, v, offsets_of([50, 40]), SEEDS),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    eager = torch.autograd.grad(bf16._fa4_rows(rows, k, v, offsets_of([50, 40]), SEEDS).sum(), (rows, k, v))
    hidden = torch.autograd.grad(bf16.fa4_attention(rows, k, v, offsets_of([50, 40]), SEEDS).sum(), (rows, k, v))
    assert all(torch.equal(a, b) for a, b in zip(eager, hidden, strict=True))
