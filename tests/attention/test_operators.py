"""The operators under ``opcheck``, ``torch.compile`` and ``torch.export``; imports that must stay lazy."""

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from lp_fa4 import ops
from lp_fa4.config import DEFAULT, DROP_IN, AttentionConfig
from lp_fa4.interface import _arguments, flash_attn_func, flash_attn_varlen_func, mx_attention
from tests.attention.helpers import make, random_mx, same_bits
from tests.conftest import offsets_of

CASES = [([196, 257], 2), ([0, 0], 1), ([1], 1), ([0, 3, 0, 128], 4), ([], 1)]
"""F5: lengths that are no multiple of 128, totals of 0 and 1, an empty batch."""

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
"""Everything but tracing, which the differentiable operator gets in full."""


@pytest.mark.parametrize("lengths, kv_heads", CASES)
@pytest.mark.parametrize("dtype, causal, queries", [(torch.float32, False, -1), (torch.bfloat16, True, 7)])
def test_opcheck_flash_attention(lengths, kv_heads, dtype, causal, queries):
    batch = len(lengths)
    q = torch.randn(7 * batch, 4, 32, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(lengths), kv_heads, 32, dtype=dtype, requires_grad=True) for _ in range(2))
    offsets = offsets_of([7] * batch), offsets_of(lengths)
    opcheck(torch.ops.lp_fa4.flash_attention_forward.default, (q, k, v, *offsets, queries, 0.125, causal, False, DROP_IN.key, "auto", True))


CONFIGS = [DEFAULT, AttentionConfig.post(), DEFAULT.with_(grad_format="bf16"), DEFAULT.with_(grad_block=(128, 32), dq_dtype=torch.float16)]


@pytest.mark.parametrize("lengths, config", [*((c[0], DEFAULT) for c in CASES), *((CASES[0][0], c) for c in CONFIGS[1:])])
def test_opcheck_mx_attention(lengths, config):
    case = make(lengths, 7, 2, 1, 32, config=config)
    arguments = _arguments(case.problem)
    opcheck(torch.ops.lp_fa4.attention_forward.default, (*arguments, "auto", True), test_utils=CHECKS)
    out, lse, centred, top, total = ops.attention_forward(*arguments, "reference", True)
    dout = torch.randn(out.shape)
    backward = (dout, None, out, lse, centred, top, total, *arguments, "auto", False, [True, True, False])
    opcheck(torch.ops.lp_fa4.attention_backward.default, backward, test_utils=CHECKS)


def test_opcheck_sequence_sums():
    opcheck(torch.ops.lp_fa4.sequence_sums.default, (torch.randn(196, 2, 32), offsets_of([57, 0, 130])))


def test_compiled_over_changing_totals():
    """F4: one graph, dynamic shapes, totals that include 0 and 1; bits and gradients as eager."""

    def step(q, k, v, cu_q, cu_k):
        out, lse, _ = flash_attn_varlen_func(q * 2.0, k, v, cu_q, cu_k, 10, 300, return_attn_probs=True)
        return out + 1.0, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, queries in (
        ([100, 0, 33], [4, 4, 4]),
        ([0, 0, 0], [1, 1, 1]),
        ([0, 1, 0], [0, 1, 0]),
        ([129, 64, 7, 1], [3, 2, 1, 9]),
        ([1], [1]),
    ):
        q = torch.randn(sum(queries), 2, 32, requires_grad=True)
        k, v = (torch.randn(sum(lengths), 1, 32, requires_grad=True) for _ in range(2))
        sides = []
        for function in (step, compiled):
            out, lse = function(q, k, v, offsets_of(queries), offsets_of(lengths))
            sides.append((out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for a, b in zip(*sides, strict=True):
            same_bits(a, b)


def test_number_of_compilations_does_not_grow():
    """Twenty batches of other sizes: no more graphs than after the first two."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(flash_attn_func, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for i in range(20):
        q, k = torch.randn(2 + i, 3 + i, 2, 32), torch.randn(2 + i, 5 + 7 * i, 2, 32)
        compiled(q, k, k.clone())
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1] <= 2


def test_compiled_with_the_default_compiler():
    q, k, v = (torch.randn(2, n, 2, 32) for n in (5, 40, 40))
    same_bits(torch.compile(flash_attn_func, fullgraph=True, dynamic=True)(q, k, v), flash_attn_func(q, k, v))


def test_compiled_on_mx_operands():
    k = random_mx((70, 2, 32), offsets_of([30, 40]))
    q = random_mx((4, 2, 32))

    def call(q, k):
        return mx_attention(q, k, k, shared_q=True)

    for a, b in zip(torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(q, k), call(q, k), strict=True):
        same_bits(a, b)


class Attend(torch.nn.Module):
    def forward(self, q, k, v, cu_q, cu_k):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 10, 300, return_attn_probs=True)[:2]


def test_exported_with_dynamic_rows_and_batch():
    """F6: exported once, run with other rows and another batch, no keys at all included. (Without ``strict=True`` PyTorch wants the
    offsets' dimension to start at 3: it asks whether an operator's output with one row per sequence is contiguous.)"""
    rows, tokens, bounds = (torch.export.Dim(n) for n in ("rows", "tokens", "bounds"))
    arguments = (torch.randn(10, 2, 32), torch.randn(100, 2, 32), torch.randn(100, 2, 32), offsets_of([5, 5]), offsets_of([50, 50]))
    program = torch.export.export(
        Attend(), arguments, dynamic_shapes=({0: rows}, {0: tokens}, {0: tokens}, {0: bounds}, {0: bounds}), strict=True
    )
    for lengths, queries in (([0, 60, 4], [3, 2, 2]), ([0, 0], [1, 2]), ([1, 1, 1, 1], [1, 1, 1, 1])):
        q, k, v = torch.randn(sum(queries), 2, 32), torch.randn(sum(lengths), 2, 32), torch.randn(sum(lengths), 2, 32)
        call = (q, k, v, offsets_of(queries), offsets_of(lengths))
        for a, b in zip(program.module()(*call), Attend()(*call), strict=True):
            same_bits(a, b)


def test_checkpointing_gives_the_same_bits():
    """G4's attention part: recomputation is the same operator on the same bytes."""
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(2, n, 2, 32, requires_grad=True) for n in (5, 40, 40))
    plain = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), (q, k, v))
    for reentrant in (False, True):
        out = checkpoint(flash_attn_func, q, k, v, use_reentrant=reentrant)
        out.square().sum().backward()
        for x, g in zip((q, k, v), plain, strict=True):
            same_bits(x.grad, g)
            x.grad = None


def test_selective_checkpoint_can_name_the_operator():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(str(op))
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.lp_fa4.flash_attention_forward.default else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = (torch.randn(2, n, 2, 32, requires_grad=True) for n in (5, 40, 40))
    plain = torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), (q, k, v))
    out = checkpoint(flash_attn_func, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), plain, strict=True):
        same_bits(a, b)
    assert any("flash_attention_forward" in name for name in seen)


def test_saved_tensors_are_fp8():
    """What the graph keeps of q, k and v is their codes: one byte an element."""
    q, k, v = (torch.randn(2, n, 2, 32, requires_grad=True) for n in (5, 400, 400))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        flash_attn_func(q, k, v)
    large = [x for x in kept if x.numel() >= k.numel()]
    assert large and all(x.dtype == torch.uint8 for x in large)


def test_imports_need_neither_cutlass_nor_a_driver():
    """F9."""
    code = (
        "import sys; sys.modules.update({'cutlass': None, 'quack': None, 'torchrec': None, 'flash_attn': None})\n"
        "import torch, lp_fa4.interface as i\n"
        "x = torch.randn(1, 40, 2, 32, requires_grad=True); i.flash_attn_func(x, x, x).sum().backward()\n"
        "assert x.grad is not None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**__import__("os").environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
