"""Sizes past 32 bits on the device: element offsets, buffers, padded products. Overflow gives finite, repeatable, wrong numbers, so results
are compared bit by bit with the same sequence on its own."""

import dataclasses

import pytest
import torch

from lp_fa4 import flash_attn_varlen_func
from lp_fa4.mx import MXTensor, group_rows, quantize_mx
from lp_fa4.problem import ForwardResult
from modules import PMA
from tests.attention.helpers import same_bits
from tests.gpu.problems import DEVICE, Case, offsets_of
from tests.modules.common import make, weights_of

pytestmark = pytest.mark.gpu

HEADS, DIM = 2, 128
LAST = 333
BEFORE = [8192] * 1025
"""1,025 sequences of 8,192 keys and a last one: more than 2^31 elements of two heads of 128 lie before it."""


def at_the_end(small: MXTensor, offsets: torch.Tensor) -> MXTensor:
    """The only sequence of ``small`` as the last of a batch whose others are zeros."""
    before = int(offsets[-2])
    codes = torch.zeros(before + LAST, HEADS, DIM, dtype=torch.uint8, device=DEVICE)
    codes[before:] = small.codes
    scale = torch.zeros(group_rows(codes.shape[0], len(offsets) - 1, 32), *small.scale_bytes.shape[1:], dtype=torch.uint8, device=DEVICE)
    first = before // 32 + len(offsets) - 2
    scale[first : first + small.scale_bytes.shape[0]] = small.scale_bytes[: scale.shape[0] - first]
    return MXTensor.from_bytes(codes, scale, small.block, offsets, 0)


@pytest.mark.parametrize("queries", [4, 40, 130])
def test_attention_past_two_to_the_31_elements(queries):
    """Forward and backward, by each of the three forward kernels: the last sequence has the bits that it has alone."""
    from lp_fa4.sm90.backward_host import backward
    from lp_fa4.sm90.forward_host import forward

    alone = Case((LAST,), queries=queries, heads=HEADS, kv_heads=HEADS, dim=DIM, block=(32, 32), mean=False).make(queries)
    lengths = [*BEFORE, LAST]
    offsets = offsets_of(lengths, torch.int64)
    assert int(offsets[-2]) * HEADS * DIM > 2**31
    k, v = (at_the_end(x, offsets) for x in (alone.k, alone.v))
    v_sum = torch.zeros(len(lengths), HEADS, DIM, device=DEVICE)
    v_sum[-1] = alone.v_sum[0]
    whole = dataclasses.replace(alone, k=k, v=v, offsets_k=offsets, v_sum=v_sum)
    small, large = forward(alone), forward(whole)
    rows = slice(-queries, None)
    for name in ForwardResult._fields:
        a, b = getattr(large, name), getattr(small, name)
        same_bits(a[rows] if a.dim() == 3 else a[:, rows].contiguous(), b, name)
    dout = torch.zeros(whole.rows, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    dout[rows] = torch.randn(queries, HEADS, DIM, device=DEVICE)
    theirs, ours = backward(alone, small, dout[rows].clone(), deterministic=True), backward(whole, large, dout, deterministic=True)
    first = int(offsets[-2]) // 32 + len(lengths) - 1
    for name in ("dk", "dv"):
        a, b = getattr(ours, name), getattr(theirs, name)
        same_bits(a.codes[-LAST:].contiguous(), b.codes, name)
        groups = -(-LAST // 32)
        same_bits(a.scale_bytes[first : first + groups].contiguous(), b.scale_bytes[:groups].contiguous(), f"{name} scale")
    # the others' keys are 0 and so is their dO: they add zeros to the sum over samples
    torch.testing.assert_close(ours.dq, theirs.dq, rtol=1e-6, atol=0)


def test_drop_in_past_two_to_the_31_elements():
    """BF16 keys and values of 4.3 GB each, views of one tensor whose rows are twice as far apart."""
    lengths = [*BEFORE, LAST]
    offsets_k, offsets_q = offsets_of(lengths), offsets_of([0] * len(BEFORE) + [7])
    tokens = sum(lengths)
    both = torch.zeros(tokens, 2 * HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    both[-LAST:] = torch.randn(LAST, 2 * HEADS, DIM, device=DEVICE)
    q, dout = (torch.randn(7, HEADS, DIM, device=DEVICE).bfloat16() for _ in range(2))
    seen = []
    for x, oq, ok in ((both, offsets_q, offsets_k), (both[-LAST:].clone(), offsets_of([7]), offsets_of([LAST]))):
        leaves = [t.detach().requires_grad_() for t in (q, x[:, :HEADS], x[:, HEADS:])]
        out, lse, _ = flash_attn_varlen_func(*leaves, oq, ok, 7, 8192, return_attn_probs=True, deterministic=True, backend="sm90")
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        seen.append((out, lse, dq, dk[-LAST:].clone(), dv[-LAST:].clone()))
        assert not dk[:-LAST].any() and not dv[:-LAST].any()
        del dk, dv, leaves
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *seen, strict=True):
        same_bits(a, b, name)


def test_module_past_two_to_the_31_elements():
    """8.4 million events of 256: the last sample's vectors and gradient are what it has alone."""
    module: PMA = make(dim=HEADS * DIM, num_heads=HEADS, num_seeds=33).to(DEVICE)
    lengths = [*BEFORE, LAST]
    x = torch.zeros(sum(lengths), HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)
    x[-LAST:] = torch.randn(LAST, HEADS * DIM, device=DEVICE)
    seen = []
    for events, offsets in ((x, offsets_of(lengths)), (x[-LAST:].clone(), offsets_of([LAST]))):
        leaf = events.detach().requires_grad_()
        out = module(leaf, offsets)
        (grad,) = torch.autograd.grad(out, leaf, weights_of(out.cpu()).to(DEVICE))
        seen.append((out[-1].clone(), grad[-LAST:].clone()))
        del grad, out, leaf
    for name, a, b in zip(("out", "events' gradient"), *seen, strict=True):
        same_bits(a, b, name)


def test_nothing_is_padded_to_the_longest():
    """40,000 short sequences and one of 60,000: batch times longest is past 2^31, and no buffer of that size exists."""
    lengths = [60_000, *[2] * 40_000]
    assert len(lengths) * max(lengths) > 2**31
    module = make(dim=64, num_heads=1, num_seeds=2).to(DEVICE)
    x = torch.randn(sum(lengths), 64, device=DEVICE).bfloat16()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    leaf = x.detach().requires_grad_()
    out = module(leaf, offsets_of(lengths))
    torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - base < 2**29
    for b, rows in ((0, slice(0, 60_000)), (40_000, slice(-2, None))):
        alone = module(x[rows].clone(), offsets_of([lengths[b]]))
        same_bits(out[b].detach(), alone[0].detach(), f"sample {b}")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seventy_thousand_samples(dtype):
    """More samples than a grid's second axis holds, through quantize, norm, projection, attention and back."""
    module = make(dim=64, num_heads=1, num_seeds=1).to(DEVICE)
    x = torch.randn(140_000, 64, device=DEVICE).bfloat16().requires_grad_()
    offsets = (torch.arange(70_001, device=DEVICE) * 2).to(dtype)
    out = module(x, offsets)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    for b in (0, 65_535, 65_536, 69_999):
        leaf = x[2 * b : 2 * b + 2].detach().clone().requires_grad_()
        alone = module(leaf, offsets_of([2], dtype))
        (own,) = torch.autograd.grad(alone, leaf, torch.ones_like(alone))
        same_bits(out[b].detach(), alone[0].detach(), f"sample {b}")
        same_bits(grad[2 * b : 2 * b + 2].contiguous(), own, f"gradient of sample {b}")


def test_strides_past_two_to_the_31():
    """Two rows whose distance is 2^31 elements, of every float operand; nothing between them is touched."""
    room = torch.empty(2**31 + 256, dtype=torch.bfloat16, device=DEVICE)
    x = room.as_strided((2, 256), (2**31, 1))
    x.copy_(torch.randn(2, 256, device=DEVICE))
    module = make(dim=256, num_heads=2, num_seeds=3).to(DEVICE)
    offsets = offsets_of([1, 1])
    same_bits(module(x, offsets).detach(), module(x.contiguous(), offsets).detach(), "PMA")
    heads = x.unflatten(1, (2, 128))
    outs = [flash_attn_varlen_func(t, t, t, offsets, offsets, 1, 1, backend="sm90") for t in (heads, heads.contiguous())]
    same_bits(*outs, "drop-in")
    same_bits(quantize_mx(x, offsets=offsets).codes, quantize_mx(x.contiguous(), offsets=offsets).codes, "quantize_mx")
