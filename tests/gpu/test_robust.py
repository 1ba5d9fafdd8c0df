"""What users of neighbouring libraries ran into, on the device's kernels; ``tests/README.md`` maps each case to its tests."""

import copy
import dataclasses
import io
import itertools
import pickle

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lp_fa4
from lp_fa4 import flash_attn_varlen_func, is_supported, mx_attention, ops, quantize_mx
from lp_fa4.config import DROP_IN
from lp_fa4.mx import MXTensor
from lp_fa4.problem import ForwardResult
from modules import PMA
from tests.attention.helpers import same_bits
from tests.gpu.problems import DEVICE, Case, offsets_of, poison
from tests.modules.common import make, weights_of
from tests.mx.test_bytes import BYTE_TABLE
from tests.poison import FILLS, fresh
from tests.properties import named
from tests.properties.subjects import HOPPER, Choices, Sample, subjects_at

pytestmark = pytest.mark.gpu

SUBJECTS = subjects_at(dataclasses.replace(HOPPER, stretch=False))
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257)
HOW = Choices(dtype=torch.bfloat16)


def mx(rows: int, columns: int = 128, offsets=None, heads: int = 0, seed: int = 0):
    """Random MXFP8 rows, of ``heads`` heads if any."""
    shape = (rows, heads, columns) if heads else (rows, columns)
    x = torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed))
    return quantize_mx(x, offsets=offsets, token_dim=0)


# A: nothing to do


@pytest.mark.parametrize("lengths", [(0,) * 8, (), (0,)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_to_do(name, lengths):
    """No token, and no sample: results of the right shapes, gradients that are exactly 0."""
    for tail in (0, 3):
        parts, shared = SUBJECTS[name]([Sample(n, 4, 1) for n in lengths], tail, HOW)
        assert len(parts) == len(lengths)
        for x in (x for part in [*parts, shared] for key, x in part.items() if key != "lse"):
            assert not x.any()


# B: lengths and pads


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_length_alone_and_together(name):
    """A sample of every length around a boundary of groups or tiles has the same bits alone as among the others."""
    samples = [Sample(n, 4, 50 + i) for i, n in enumerate(LENGTHS)]
    together, _ = SUBJECTS[name](samples, 5, HOW)
    for sample, whole in zip(samples, together, strict=True):
        (alone,), _ = SUBJECTS[name]([sample], 0, HOW)
        for key in whole:
            same_bits(alone[key], whole[key], f"length {sample.length}: {key}")


@pytest.mark.parametrize("queries", [1, 3, 4, 127, 128, 129])
@pytest.mark.parametrize("shared", [True, False])
def test_pads_of_rows(queries, shared):
    """Rows of a query tile that no query fills, and their statistics, hold whatever was there: it reaches nothing."""
    from lp_fa4.sm90.backward_host import backward
    from lp_fa4.sm90.forward_host import forward

    p = Case((1, 130, 0, 300, 31), queries=queries, shared=shared).make(queries)
    dout = torch.randn(p.rows, p.heads, p.head_dim, device=DEVICE).bfloat16()
    seen = []
    for byte in FILLS:
        poison()
        with fresh(byte):
            result = forward(p)
            grads = backward(p, result, dout, deterministic=True)
        seen.append([*result, grads.dq, grads.dk.codes, grads.dk.scale_bytes, grads.dv.codes, grads.dv.scale_bytes, grads.dv_mean])
    for other in seen[1:]:
        for i, (a, b) in enumerate(zip(other, seen[0], strict=True)):
            same_bits(a, b, f"result {i}")


# C: bytes


def test_golden_bytes():
    """The table of amax, byte and payload, each row in a block of its own, from the quantize kernel, subnormal and huge ones too."""
    from lp_fa4.sm90.quantize import quantize

    rows = [(s * a, byte, s * payload) for a, byte, payload, _ in BYTE_TABLE for s in (1, -1)]
    x = torch.zeros(32 * len(rows), 1, 64, device=DEVICE)
    for i, (amax, _, _) in enumerate(rows):
        x[32 * i + 17, 0, 5] = amax
    got, _, _ = quantize(x, offsets_of([x.shape[0]]), block=32, order="accumulator")
    for i, (amax, byte, payload) in enumerate(rows):
        assert int(got.scale_bytes[i, 0]) == byte, amax
        assert float(got.codes[32 * i + 17, 0, 5].view(torch.float8_e4m3fn)) == payload, amax


@pytest.mark.parametrize("name", named.CASES)
def test_named(name):
    named.CASES[name](HOPPER)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_its_block_alone(bad):
    """Byte 255 and payload 0 for the block, and no other block's bytes move."""
    from lp_fa4.sm90.quantize import quantize

    x = torch.randn(200, 2, 64, device=DEVICE)
    offsets = offsets_of([70, 130])
    clean, _, _ = quantize(x, offsets, block=32, order="accumulator")
    x[75, 1, 3] = bad
    got, _, _ = quantize(x, offsets, block=32, order="accumulator")
    block = 70 // 32 + 1
    assert int(got.scale_bytes[block, 1]) == 255 and not got.codes[70:102, 1].any()
    got.codes[70:102, 1] = clean.codes[70:102, 1]
    got.scale_bytes[block, 1] = clean.scale_bytes[block, 1]
    assert torch.equal(got.codes, clean.codes) and torch.equal(got.scale_bytes, clean.scale_bytes)


# E: what is served


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_head_dimensions(dim):
    """Every one that is said to be served, forward and backward, against the same call on the reference; kernels or not, by what
    ``is_supported`` says; strided halves of one projection."""
    offsets = offsets_of([33, 0, 200])
    both = torch.randn(233, 2, 2, dim, device=DEVICE).bfloat16()
    q = torch.randn(2, 12, dim, device=DEVICE).bfloat16().transpose(0, 1).requires_grad_()
    k, v = (both[:, i].detach().requires_grad_() for i in (0, 1))
    served, reason = is_supported(DEVICE, head_dim=dim, backend="sm90", jagged_q=True, config=DROP_IN)
    assert served == (dim in (64, 128)), reason
    assert served or "64, 128" in reason
    sides = []
    for backend in ("auto", "reference"):
        out = flash_attn_varlen_func(q, k, v, offsets_of([4, 4, 4]), offsets, 4, 200, backend=backend)
        sides.append((out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))))
    for a, b in zip(*sides, strict=True):
        assert a.isfinite().all() and float((a.float() - b.float()).norm()) <= 0.1 * float(b.float().norm())
    if not served:
        with pytest.raises(ValueError, match="64, 128"):
            flash_attn_varlen_func(q, k, v, offsets_of([4, 4, 4]), offsets, 4, 200, backend="sm90")


@pytest.mark.parametrize("dim", [48, 72, 80, 100])
def test_head_dimensions_that_nobody_serves(dim):
    q = torch.randn(8, 2, dim, device=DEVICE).bfloat16()
    with pytest.raises(ValueError, match=r"head_dim is .* allowed are"):
        flash_attn_varlen_func(q, q, q, offsets_of([8]), offsets_of([8]), 8, 8)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(x_dtype, w_dtype, autocast):
    """Any mixture runs; the output has the events' dtype or autocast's, gradients that of what they belong to."""
    module = make(dim=128, num_heads=2, num_seeds=8).to(DEVICE, w_dtype)
    x = torch.randn(90, 128, device=DEVICE, dtype=x_dtype).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        out = module(x, offsets_of([40, 0, 50]))
    assert out.dtype == (torch.bfloat16 if autocast else x_dtype)
    out.backward(torch.ones_like(out))
    assert x.grad.dtype == x_dtype and x.grad.isfinite().all()
    assert all(p.grad.dtype == w_dtype and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("backend, dim, words", [("sm100", 128, "capability"), ("sm90", 256, "64, 128"), ("auto", 80, "head_dim")])
def test_reasons_on_this_device(backend, dim, words):
    assert is_supported(DEVICE, head_dim=128) == (True, "served by backend 'sm90'")
    served, reason = is_supported(DEVICE, head_dim=dim, backend=backend)
    assert not served and words in reason


def test_containers_move():
    """Quantized tensors are copied, pickled, saved, concatenated and sent to the host and back without an FP8 operator."""
    x = mx(70, 64, offsets_of([40, 30]), 2)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    copies = [copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=False), x.to("cpu").to(DEVICE)]
    for other in copies:
        same_bits(other.codes, x.codes)
        same_bits(other.scale_bytes, x.scale_bytes)
        assert torch.equal(other.offsets, x.offsets) and other.block == x.block
    assert torch.equal(torch.cat([x.codes, x.codes])[70:], x.codes)
    pinned = x.to("cpu").codes.pin_memory()
    assert torch.equal(pinned.to(DEVICE, non_blocking=True), x.codes)


# F: tracing


@pytest.mark.parametrize("lengths", [(96, 0, 100), (57, 200)])
def test_fake_and_real_agree(lengths):
    """Every operator: sizes, strides and dtypes of its fake results are those of the kernel's; 196 and 257 tokens, no multiple of 128."""
    offsets, tokens = offsets_of(lengths), sum(lengths)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    k, v = (mx(tokens, 64, offsets, 2, seed) for seed in (1, 2))
    p = Case(lengths, queries=7, dim=64).make(0)
    arguments = lp_fa4.interface._arguments(p)
    opcheck(torch.ops.lp_fa4.attention_forward.default, (*arguments, "sm90", True), test_utils=checks)
    out, lse, centred, top, total = ops.attention_forward(*arguments, "sm90", True)
    backward = (torch.randn_like(out), None, out, lse, centred, top, total, *arguments, "sm90", True, [True, True, True])
    opcheck(torch.ops.lp_fa4.attention_backward.default, backward, test_utils=checks)
    q, k, v = (torch.randn(n, 2, 64, device=DEVICE).bfloat16().requires_grad_() for n in (7 * len(lengths), tokens, tokens))
    flash = (q, k, v, offsets_of([7] * len(lengths)), offsets, 7, 0.125, False, True, DROP_IN.key, "sm90", True)
    opcheck(torch.ops.lp_fa4.flash_attention_forward.default, flash, test_utils=checks)
    x, gain = torch.randn(tokens, 128, device=DEVICE).bfloat16(), torch.rand(128, device=DEVICE)
    norm = (x, gain, 1e-6, offsets, [32, 32], None, True, True, [0, 1], "sm90", 2)
    opcheck(torch.ops.fused_ops.rmsnorm_quantize.default, norm, test_utils=checks)
    made, w = mx(tokens, 128, offsets), mx(128)
    gemm = ([made.codes], [made.scale_bytes], [32, 32], [w.codes], [w.scale_bytes], [32, 32], offsets, [32, 32], None, "sm90", [0, 1])
    opcheck(torch.ops.fused_ops.gemm_quantize.default, gemm, test_utils=checks)
    for axis in (0, 1):
        scatter = (made.scale_bytes, [32, 32], tokens, 128, offsets, axis, "sm90")
        opcheck(torch.ops.fused_ops.scatter_scales.default, scatter, test_utils=checks)
        buffer = torch.ops.fused_ops.scatter_scales(*scatter)
        opcheck(torch.ops.fused_ops.gather_scales.default, (buffer, tokens, 128, offsets, axis, "sm90"), test_utils=checks)
    one = ([made.codes], [made.scale_bytes], [32, 32])
    rest = ([w.dequantize().bfloat16()], [], [], x, gain, torch.ones(tokens, device=DEVICE), *one, offsets, [True] * 3, "sm90")
    opcheck(torch.ops.fused_ops.gemm_norm_backward.default, (*one, *one, None, *rest), test_utils=checks)
    module = make(dim=128, num_heads=2, num_seeds=8).to(DEVICE)
    q = torch.randn(8, 2, 64, device=DEVICE).requires_grad_()
    leaves = x.requires_grad_(), offsets, q, module.kv_norm.weight, module.key_proj.weight
    rest = (None, 1e-6, module.numerics.key, "sm90", torch.bfloat16)
    opcheck(torch.ops.modules.pma_attention.default, (*leaves, *rest, True), test_utils=checks)
    opcheck(torch.ops.modules.pma_attention.default, (*(t.detach() for t in leaves), *rest, False), test_utils=checks)


# G: training


def test_two_hundred_repeats_under_a_competing_stream():
    """Deterministic gradients, query groups of eight, shared and own queries, while another stream keeps half the device busy."""
    from lp_fa4.sm90.backward_host import backward
    from lp_fa4.sm90.forward_host import forward

    stream, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    problems = [Case((700, 0, 129, 1500), queries=n, heads=16, kv_heads=2, dim=64, shared=s).make(n) for n, s in ((130, True), (9, False))]
    douts = [torch.randn(p.rows, 16, 64, device=DEVICE).bfloat16() for p in problems]
    first = None
    for _ in range(200):
        with torch.cuda.stream(stream):
            noise = (noise @ noise).clamp(-1, 1)
        seen = []
        for p, dout in zip(problems, douts, strict=True):
            result = forward(p)
            grads = backward(p, result, dout, deterministic=True)
            seen += [result.out, result.lse, grads.dq, grads.dk.codes, grads.dk.scale_bytes, grads.dv.codes, grads.dv.scale_bytes]
        first = first or seen
        assert all(torch.equal(a, b) for a, b in zip(seen, first, strict=True))


def test_alone_and_among_sixty_four():
    """G3 for the whole module: a user's vectors and gradients do not depend on who else is in the batch."""
    name = "sm90: PMA"
    samples = [Sample(int(n), 4, i) for i, n in enumerate(torch.randint(0, 400, (64,), generator=torch.Generator().manual_seed(0)))]
    together, _ = SUBJECTS[name](samples, 0, HOW)
    for i in (0, 17, 63):
        (alone,), _ = SUBJECTS[name]([samples[i]], 0, HOW)
        for key in alone:
            same_bits(alone[key], together[i][key], f"sample {i}: {key}")


def step(module: PMA, x: torch.Tensor, offsets: torch.Tensor, call=None) -> list[torch.Tensor]:
    """Output and all gradients."""
    x = x.detach().requires_grad_()
    out = (call or module)(x, offsets)
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], weights_of(out.cpu()).to(DEVICE))]


@pytest.fixture
def deterministic():
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small():
    """A module, events and offsets."""
    module = make(dim=128, num_heads=2, num_seeds=48).to(DEVICE)
    return module, torch.randn(103, 128, device=DEVICE).bfloat16(), offsets_of([0, 70, 33])


def test_selective_checkpointing_saves_the_operator(small, deterministic):
    """Reentrant, not, and with a policy that names the operator: the same bits, and the forward's kernels run once more or not at all."""
    module, x, offsets = small
    want = step(module, x, offsets)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.modules.pma_attention.default else CheckpointPolicy.PREFER_RECOMPUTE

    options = [dict(use_reentrant=False), dict(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))]
    for option in options:
        got = step(module, x, offsets, lambda a, b, option=option: checkpoint(module, a, b, **option))
        for a, b in zip(got, want, strict=True):
            same_bits(a, b)
    events = x.detach().requires_grad_()
    out = checkpoint(module, events, offsets, use_reentrant=True)
    out.backward(weights_of(out.cpu()).to(DEVICE))
    for a, b in zip((out, events.grad, *(p.grad for p in module.parameters())), want, strict=True):
        same_bits(a, b)


def test_nothing_is_cached(small):
    """An optimizer's step, a write behind autograd's back, a loaded state, eval and train again: every one shows at once."""
    module, x, offsets = small
    seen = [step(module, x, offsets)[0]]

    def changed() -> None:
        seen.append(step(module, x, offsets)[0])
        assert all(not torch.equal(seen[-1], other) for other in seen[:-1])

    state = {k: v.clone() for k, v in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(x, offsets).sum().backward()
    optimizer.step()
    changed()
    module.key_proj.weight.data.copy_(torch.randn_like(module.key_proj.weight))
    changed()
    module.eval()
    with torch.no_grad():
        assert torch.equal(module(x, offsets), seen[-1])
    module.train()
    module.load_state_dict(state)
    assert torch.equal(step(module, x, offsets)[0], seen[0])


def test_every_subset_of_gradients(small, deterministic):
    """None for what does not need one, the same bits for what does; inference and no-grad too."""
    module, x, offsets = small
    want = step(module, x, offsets)
    leaves = [None, *module.parameters()]
    for wanted in itertools.product((False, True), repeat=len(leaves)):
        for p, need in zip(leaves[1:], wanted[1:], strict=True):
            p.requires_grad_(need)
            p.grad = None
        events = x.detach().requires_grad_(wanted[0])
        out = module(events, offsets)
        assert out.requires_grad == any(wanted) and torch.equal(out, want[0])
        if any(wanted):
            out.backward(weights_of(out.cpu()).to(DEVICE))
        for need, leaf, truth in zip(wanted, [events, *leaves[1:]], want[1:], strict=True):
            assert (leaf.grad is not None) == need
            if need:
                same_bits(leaf.grad, truth)
    with torch.inference_mode():
        assert torch.equal(module(x, offsets), want[0])


@pytest.mark.parametrize("queries", [1, 2, 4, 8])
def test_few_queries_long_sequences(queries):
    """16,384 keys, one to four samples: no worse than the reference, and the same bits whatever the batch."""
    from lp_fa4.sm90.forward_host import forward
    from tests.gpu.problems import check

    base = Case((16384,), queries=queries, dim=64, mean=False, centred=False).make(queries)
    alone = forward(base)
    check(base, alone)
    for batch in (2, 4):
        k, v = (MXTensor.from_bytes(x.codes.repeat(batch, 1, 1), x.scale_bytes, x.block, None, 0) for x in (base.k, base.v))
        many = forward(dataclasses.replace(base, k=k, v=v, offsets_k=offsets_of([16384] * batch)))
        for b in range(batch):
            same_bits(many.out[queries * b : queries * (b + 1)], alone.out, f"sample {b} of {batch}")


def test_the_last_dimension_of_lse_and_results():
    """mx_attention returns on kernels what it says: shapes and dtypes of ``ForwardResult``."""
    offsets = offsets_of([70, 0, 30])
    q, k, v = mx(5, 64, None, 4), mx(100, 64, offsets, 2), mx(100, 64, offsets, 2)
    out, lse, result = mx_attention(q, k, v, shared_q=True, return_result=True, backend="sm90")
    assert isinstance(result, ForwardResult) and out.dtype == torch.bfloat16 and tuple(out.shape) == (15, 4, 64)
    assert lse.dtype == torch.float32 and tuple(lse.shape) == (4, 15)
