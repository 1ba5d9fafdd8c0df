"""``lp_fa4.debug.watch`` on the device's kernels: silent where numbers are sound, and it names what is not, for every public operation."""

import math

import pytest
import torch

from lp_fa4 import debug, flash_attn_varlen_func, mx_attention, mx_attention_backward, quantize_mx
from tests.gpu.problems import DEVICE, offsets_of
from tests.modules.common import make

pytestmark = pytest.mark.gpu

LENGTHS = (40, 0, 33, 100)


def module_step(module, x):
    x = x.detach().requires_grad_()
    out = module(x, offsets_of(LENGTHS))
    torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out))
    return out.detach()


def events(dim: int, extra: int = 7) -> torch.Tensor:
    x = torch.randn(sum(LENGTHS) + extra, dim, device=DEVICE).bfloat16()
    x[sum(LENGTHS) :] = torch.nan
    return x


@pytest.mark.parametrize("shadow", ["fp32", "bf16"])
@pytest.mark.parametrize("seeds", [4, 100])
@pytest.mark.parametrize("options", [{}, {"value_proj": True}])
def test_sound_modules(options, seeds, shadow):
    """Empty samples and a NaN tail are sound; watching changes no bit; two roundings to E4M3 leave more than 22 dB everywhere."""
    module = make(dim=128, num_heads=2, num_seeds=seeds, **options).to(DEVICE)
    x = events(128)
    before = module_step(module, x)
    with debug.watch(shadow=shadow) as report:
        after = module_step(module, x)
    assert report.first is None, str(report)
    assert torch.equal(before, after)
    assert report.tensors and min(m.sqnr for m in report.tensors) > 22, str(report)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_event_is_named(bad):
    module = make(dim=128, num_heads=2, num_seeds=4).to(DEVICE)
    x = events(128)
    x[45, 3] = bad
    with debug.watch() as report:
        module_step(module, x)
    first = report.first
    assert (first.operator, first.tensor, first.sample, first.token, first.index) == ("modules::pma_attention", "values", 2, 5, (45, 3))
    assert {f.sample for f in report.faults if f.sample is not None} == {2}, str(report)


def test_what_a_kernel_makes_is_named():
    """Finite events and weights whose product overflows: the first fault is the norm's, with its block."""
    module = make(dim=128, num_heads=2, num_seeds=4).to(DEVICE)
    with torch.no_grad():
        module.kv_norm.weight[70] = 3e38
    with debug.watch() as report:
        module_step(module, events(128))
    assert (report.first.operator, report.first.role) == ("fused_ops::rmsnorm_project", "output"), str(report)


@pytest.mark.parametrize("causal", [False, True])
def test_drop_in(causal):
    q = torch.randn(32, 4, 64, device=DEVICE).bfloat16()
    k, v = (torch.randn(sum(LENGTHS) + 5, 2, 64, device=DEVICE).bfloat16() for _ in range(2))
    for x in (k, v):
        x[-5:] = torch.nan

    def call():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, offsets_of([8] * 4), offsets_of(LENGTHS), 8, 100, causal=causal, backend="sm90")
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    with debug.watch() as report:
        call()
    assert report.first is None, str(report)
    assert report.sqnr("lp_fa4::flash_attention_forward", "out") > 22
    v[50, 1, 7] = math.inf
    with debug.watch() as report:
        call()
    assert (report.first.tensor, report.first.kind, report.first.sample, report.first.token) == ("v", "inf", 2, 10)


def test_mx_attention():
    offsets = offsets_of(LENGTHS)
    q = quantize_mx(torch.randn(9, 4, 64, device=DEVICE), token_dim=0)
    k, v = (quantize_mx(torch.randn(sum(LENGTHS), 2, 64, device=DEVICE), offsets=offsets, token_dim=0) for _ in range(2))
    with debug.watch() as report:
        out, _, result = mx_attention(q, k, v, shared_q=True, return_result=True, backend="sm90")
        mx_attention_backward(torch.randn_like(out), result, q, k, v, shared_q=True, backend="sm90")
    assert report.first is None, str(report)
    assert report.sqnr("lp_fa4::attention_forward", "out") > 22 and report.sqnr("lp_fa4::attention_backward", "dk") > 22
