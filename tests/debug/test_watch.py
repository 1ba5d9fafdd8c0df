"""``lp_fa4.debug.watch`` names the operator, tensor, sample and block where numbers first go wrong, and is silent where they do not."""

import math

import pytest
import torch

import fused_ops
import modules.debug  # noqa: F401 (describes its operators)
from lp_fa4 import debug, flash_attn_varlen_func, mx_attention, mx_attention_backward, operator, quantize_mx
from lp_fa4.debug.attention import exact_gradients
from lp_fa4.reference.exact import exact_gradients as by_autograd
from modules import PMA
from tests.conftest import offsets_of
from tests.modules.common import batch, make, run

LENGTHS = (40, 0, 33, 100)
PMA_KINDS = {"default": {}, "value_proj": {"value_proj": True}, "post": {"numerics": "post"}, "bf16": {"precision": "bf16"}}


def drop_in(q, k, v, causal=False):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(*leaves, offsets_of([8] * 4), offsets_of(LENGTHS), 8, 100, causal=causal)
    out.square().sum().backward()
    return out.detach(), [x.grad for x in leaves]


def operands(extra=0):
    g = torch.Generator().manual_seed(0)
    tail = torch.full((extra, 2, 64), torch.nan)
    return torch.randn(32, 4, 64, generator=g), *(torch.cat([torch.randn(173, 2, 64, generator=g), tail]) for _ in range(2))


@pytest.mark.parametrize("kind", PMA_KINDS)
def test_sound_modules_have_no_faults(kind):
    """Empty samples and a NaN tail are sound; watching changes no bit. One rounding to E4M3 leaves 31 dB, of both operands and of P 22 and
    more; BF16's 8 bits leave 50."""
    module = make(**PMA_KINDS[kind])
    x, offsets = batch(LENGTHS, extra=7)
    before = run(module, x, offsets)
    with debug.watch() as report:
        after = run(module, x, offsets)
    assert report.first is None and report.calls > 0, str(report)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert min(m.sqnr for m in report.tensors) > (45 if kind == "bf16" else 22), str(report)
    assert not operator.watchers


@pytest.mark.parametrize("causal", [False, True])
def test_sound_drop_in(causal):
    q, k, v = operands(extra=5)
    with debug.watch() as report:
        drop_in(q, k, v, causal)
    assert report.first is None, str(report)
    assert report.sqnr("lp_fa4::flash_attention_forward", "out") > 22
    assert min(report.sqnr("lp_fa4::flash_attention_backward", n) for n in ("dq", "dk", "dv")) > 22
    with pytest.raises(KeyError, match="was not compared"):
        report.sqnr("lp_fa4::flash_attention_backward", "out")


def test_sound_mx_attention():
    q, k, v = (
        quantize_mx(x, offsets=torch.tensor(o), token_dim=0)
        for x, o in zip(operands(), ([0, 8, 16, 24, 32], *[(0, 40, 40, 73, 173)] * 2), strict=True)
    )
    with debug.watch() as report:
        out, _, result = mx_attention(q, k, v, return_result=True)
        mx_attention_backward(torch.ones_like(out), result, q, k, v)
    assert report.first is None, str(report)
    for operator_name, names in (("forward", ("out", "lse")), ("backward", ("dq", "dk"))):
        assert min(report.sqnr(f"lp_fa4::attention_{operator_name}", n) for n in names) > 22, str(report)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_event_is_named(bad):
    module = make()
    x, offsets = batch(LENGTHS, extra=7)
    x[45, 3] = bad
    with debug.watch() as report:
        run(module, x, offsets)
    first = report.first
    assert (first.operator, first.role, first.tensor) == ("modules::pma_attention", "input", "values")
    assert (first.sample, first.token, first.index, first.block, first.count) == (2, 5, (45, 3), (0, 0), 1)
    assert first.kind == ("nan" if math.isnan(bad) else "inf")
    assert {f.sample for f in report.faults if f.sample is not None} == {2}, "no other sample has a fault"
    assert "sample 2, row 5" in str(report)


def test_the_operator_that_makes_it_comes_first():
    """Finite events, finite weights; the norm's product overflows. The first fault is the norm's output, with its block, not the input."""
    module = make()
    x, offsets = batch(LENGTHS)
    with torch.no_grad():
        module.kv_norm.weight[70] = 3e38
    with debug.watch() as report:
        module(x, offsets)
    first = report.first
    assert (first.operator, first.role) == ("fused_ops::rmsnorm_quantize", "output")
    norm = next(f for f in report.faults if f.tensor == "xn")
    assert norm.block is not None and norm.block[1] == 70 // 32


def test_a_bad_gradient_is_named():
    module = make()
    x, offsets = batch(LENGTHS)
    with debug.watch() as report:
        out = module(x, offsets)
        dout = torch.zeros_like(out)
        dout[3, 2, 1] = math.nan
        out.backward(dout)
    assert (report.first.operator, report.first.tensor, report.first.sample) == ("modules::pma_attention_backward", "dout", 3)


def test_a_bad_weight_is_named():
    module = make()
    x, offsets = batch(LENGTHS)
    with torch.no_grad():
        module.key_proj.weight[5, 6] = math.inf
    with debug.watch() as report:
        module(x, offsets)
    assert (report.first.tensor, report.first.index, report.first.sample) == ("w_k", (5, 6), None)


def test_blocks_count_from_their_sequence():
    q, k, v = operands()
    k[40 + 32, 1, 40] = math.nan  # row 32 of sample 2, its second group; columns 32 to 63
    with debug.watch() as report:
        drop_in(q, k, v)
    assert (report.first.tensor, report.first.sample, report.first.token, report.first.index) == ("k", 2, 32, (72, 1, 40))
    assert report.first.block == (1, 1)
    codes = next(f for f in report.faults if f.tensor == "k codes")
    # the mean of sample 2 takes the NaN along, so all of this column's blocks show it, the first first
    assert (codes.sample, codes.block) == (2, (0, 1))


def test_saturation_is_told_from_the_largest_value():
    """A static exponent that is too small by one power of two cuts; the right one, and amax 448 itself, do not."""
    x = torch.zeros(64, 64)
    x[40, 33] = 448.0
    weight = torch.eye(64)
    for exponent, cut in ((-1, True), (0, False), (1, False)):
        with debug.watch() as report:
            fused_ops.gemm_quantize(x, weight, (0, 32), offsets=offsets_of([8, 56]), exponent=exponent)
        assert (report.first is not None) == cut
        if cut:
            assert (report.first.kind, report.first.tensor, report.first.sample, report.first.token) == ("saturated", "product", 1, 32)
            assert report.first.block == (1, 1) and report.tensors[0].at_limit == 1 / 64**2
    with debug.watch() as report:
        fused_ops.gemm_quantize(x, weight)
    assert report.first is None


def test_rows_without_keys_are_no_fault():
    module = make()
    with debug.watch() as report:
        run(module, torch.zeros(0, module.dim), offsets_of([0, 0]))
        run(module, torch.zeros(0, module.dim), offsets_of([]))
        flash_attn_varlen_func(torch.randn(4, 2, 32), torch.zeros(0, 2, 32), torch.zeros(0, 2, 32), offsets_of([4]), offsets_of([0]), 4, 0)
    assert report.first is None, str(report)


def test_stop_raises_in_the_call_that_shows_it():
    q, k, v = operands()
    v[0, 0, 0] = math.inf
    with (
        pytest.raises(FloatingPointError, match=r"flash_attention_forward \(call 1\): input 'v' is inf at sample 0, row 0"),
        debug.watch(stop=True),
    ):
        drop_in(q, k, v)
    assert not operator.watchers, "an error leaves no watcher behind"
    assert torch.isfinite(drop_in(*operands())[0]).all()


def test_without_a_shadow_nothing_is_compared():
    with debug.watch(shadow=False, limit=1) as report:
        q, k, v = operands()
        drop_in(q, k.fill_(math.nan), v)
    assert report.tensors == [] and len(report.faults) == 1
    with pytest.raises(ValueError, match="limit is 0"), debug.watch(limit=0):
        pass


def test_against_bf16():
    """A shadow rounded to BF16: what is itself BF16 arithmetic equals it, MXFP8 keeps its dB; cut-off values are still told in FP32."""
    module = make()
    x, offsets = batch(LENGTHS, extra=7)
    reports = {}
    for shadow in ("fp32", "bf16"):
        with debug.watch(shadow=shadow) as reports[shadow]:
            run(module, x, offsets)
    assert reports["bf16"].first is None
    pairs = list(zip(reports["fp32"].tensors, reports["bf16"].tensors, strict=True))
    assert all((a.operator, a.tensor) == (b.operator, b.tensor) for a, b in pairs)
    for a, b in pairs:
        assert b.sqnr > 22
        # two independent errors: BF16's rounding leaves 50 dB and more
        assert a.sqnr > 45 or abs(a.sqnr - b.sqnr) < 1.5, (a, b)
    assert any(a.sqnr != b.sqnr for a, b in pairs)
    with debug.watch(shadow="bf16") as report:
        fused_ops.gemm_quantize(torch.full((32, 64), 448.0), torch.eye(64), (0, 32), offsets=offsets_of([32]), exponent=-1)
    assert report.first.kind == "saturated"
    with pytest.raises(ValueError, match="shadow is 'fp16'; allowed"), debug.watch(shadow="fp16"):
        pass


def test_compiled_and_under_autocast():
    """Operators are seen from a compiled graph too."""
    torch._dynamo.reset()
    module = PMA(dim=64, num_heads=2, num_seeds=4)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(70, 64)
    x[60, 0] = math.nan
    with debug.watch() as report, torch.autocast("cpu", torch.bfloat16):
        compiled(x, torch.tensor([0, 33, 70]))
    assert (report.first.tensor, report.first.sample, report.first.token) == ("values", 1, 27)


def test_two_watchers_see_the_same():
    with debug.watch() as outer, debug.watch() as inner:
        drop_in(*operands())
    assert str(outer) == str(inner) and outer.calls == 2


def test_every_operator_is_described():
    """Whoever adds an operator says how to look at it. flash-attn-4's is another library's: its tensors' values only."""
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.split("::")[0] in ("lp_fa4", "fused_ops", "modules")}
    names = {n.split(".")[0] for n in names}
    assert {"modules::pma_attention", "lp_fa4::attention_forward"} <= names
    missing = names - set(debug._descriptions) - {"modules::fa4_attention", "modules::fa4_attention_backward"}
    assert not missing


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_without_autograd(causal, shared):
    """The shadow's formulas against autograd's in FP64: FP32 sums of at most 100 terms, so 1e-5 of the largest."""
    q, k, v = operands()
    rows = offsets_of([8, 3, 21, 0]) if not shared else None
    arguments = {"offsets_k": offsets_of((0, 2, 33, 100)), "offsets_q": rows, "shared_q": shared, "softmax_scale": 0.2, "causal": causal}
    q = q[:8] if shared else q
    dout = torch.randn(32, 4, 64)
    for got, want in zip(exact_gradients(dout, q, k, v, **arguments), by_autograd(dout, q, k, v, **arguments), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
