"""PMA against FP64 truth, on hostile batches, in every dtype: values, gradients, isolation, empties, misuse in words."""

import copy
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from modules import PMA, Numerics, mxfp8
from tests.conftest import HOSTILE_LENGTHS
from tests.modules.common import DIM, HEADS, SEEDS, assert_identical, batch, exact, make, ratios, run, weights_of

LENGTHS = [0, 31, 1, 200, 0, 33, 128, 257]
VARIANTS = {
    "default": dict(),
    "value_proj": dict(value_proj=True),
    "pair": dict(numerics=Numerics(key_projection="e4m3x2")),
    "single": dict(numerics=Numerics(key_projection="e4m3")),
    "token": dict(numerics=Numerics(scales="token")),
    "static": dict(numerics=Numerics(scales="static", key_projection="e4m3x2"), value_proj=True),
    "unrotated": dict(numerics=Numerics(hadamard=False)),
    "smoothing": dict(numerics=Numerics(q_smoothing=True)),
    "stabilizer": dict(numerics=Numerics.preset("default", softmax_stabilizer=True)),
    "fp16 dQ": dict(numerics=Numerics.preset("default", dq_dtype=torch.float16)),
    "bf16 dK": dict(numerics=Numerics.preset("default", grad_format="bf16"), value_proj=True),
    "uncentred P": dict(numerics=Numerics.preset("default", center_p=False, center_p_backward=False), value_proj=True),
    "post": dict(numerics="post"),
    "post value_proj": dict(numerics="post", value_proj=True),
    "bf16": dict(precision="bf16"),
    "bf16 value_proj": dict(precision="bf16", value_proj=True),
}

# dB against FP64 that each group of variants has to reach: output, events' gradient, parameters' gradients. From what E4M3 gives: every
# operand at 31 dB, several of them in a row, softmax scores of deviation 1 and gradients that cancel over few samples. BF16: 52 dB each.
FLOOR = {"bf16 dK": (24, 20, 19), "bf16": (44, 40, 38), "post": (20, 17, 16), "": (24, 20, 19)}


def floors(name):
    return next(v for k, v in FLOOR.items() if name.startswith(k))


@pytest.mark.parametrize("name", VARIANTS)
def test_against_fp64(name):
    module = make(**VARIANTS[name])
    x, offsets = batch(LENGTHS, extra=19)
    dout = torch.randn(len(LENGTHS), SEEDS, DIM)
    got, want = run(module, x, offsets, dout), exact(module, x, offsets, dout)
    assert got[0].dtype == x.dtype and list(got[0].shape) == [len(LENGTHS), SEEDS, DIM]
    out, events, parameters = floors(name)
    found = ratios(got, want)
    assert found.pop("out") >= out and found.pop("events") >= events, found
    assert min(found.values()) >= parameters, found
    assert (got[1][int(offsets[-1]) :] == 0).all()


def test_default_beats_post_on_every_row():
    x, offsets = batch(LENGTHS)
    better, worse = (ratios(run(m, x, offsets), exact(m, x, offsets)) for m in (make(), make(numerics="post")))
    assert all(better[row] > worse[row] + 1 for row in better), (better, worse)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257])
@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_any_length(length, precision):
    """B2: the right answer for any length, padding invisible."""
    module = make(precision=precision)
    x, offsets = batch([length, 257 - length % 97])
    found = ratios(run(module, x, offsets), exact(module, x, offsets))
    out, events, _ = floors("bf16" if precision == "bf16" else "")
    assert found["out"] >= out and found["events"] >= events


@pytest.mark.parametrize("name", ["default", "value_proj", "post", "smoothing", "static", "bf16 value_proj"])
def test_empty_samples(name):
    """A1: a sample without events pools to exactly 0 and changes nothing for the others, gradients of parameters included."""
    module = make(**VARIANTS[name])
    lengths = [0, 5, 0, 40, 0]
    x, offsets = batch(lengths)
    got = run(module, x, offsets)
    filled = [i for i, n in enumerate(lengths) if n]
    assert (got[0][[0, 2, 4]] == 0).all()
    without = run(module, x, offsets[[0, 2, 4]])
    kept = got[0][filled], got[1], got[2]
    if module.value_proj is None:
        assert_identical(kept, without)
    else:  # the means of V are a product over samples, which BLAS sums in another order for another number of them
        assert min(ratios(kept, without).values()) > 60
    assert all(torch.isfinite(g).all() for g in got[2].values())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lengths", [[], [0], [0] * 8])
@pytest.mark.parametrize("extra", [0, 3])
def test_nothing_at_all(name, lengths, extra):
    """A2, G1: zeros of the right shape; gradients are zeros, never None, in the dtypes of a full batch."""
    module = make(**VARIANTS[name])
    x, offsets = batch(lengths, extra)
    out, grad, grads = run(module, x, offsets)
    assert list(out.shape) == [len(lengths), SEEDS, DIM] and out.dtype == torch.float32 and out.is_contiguous()
    assert list(grad.shape) == [extra, DIM] and (grad == 0).all() and (out == 0).all()
    for key, p in module.named_parameters():
        assert grads[key] is not None and grads[key].dtype == p.dtype and (grads[key] == 0).all(), key


@pytest.mark.parametrize("name", ["default", "value_proj", "static", "token", "post", "smoothing", "fp16 dQ", "bf16"])
def test_isolation(name):
    """B1: one sample at 1e4 times its size or full of NaN leaves the output and event gradients of every other bit-identical."""
    module = make(**VARIANTS[name])
    lengths = [31, 33, 1, 32, 127, 129]
    x, offsets = batch(lengths)
    out, grad, _ = run(module, x, offsets)
    for victim in range(len(lengths)):
        rows = slice(int(offsets[victim]), int(offsets[victim + 1]))
        others = [b for b in range(len(lengths)) if b != victim]
        for change in (1e4, torch.nan):
            changed = x.clone()
            changed[rows] *= change
            other_out, other_grad, other_grads = run(module, changed, offsets)
            assert torch.equal(other_out[others], out[others])
            assert torch.equal(other_grad[: rows.start], grad[: rows.start]) and torch.equal(other_grad[rows.stop :], grad[rows.stop :])
            if change != change:
                assert torch.isnan(other_out[victim]).all(), "a NaN must be seen"
                assert torch.isnan(other_grads["key_proj.weight"]).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_one_bad_number_is_seen(bad, precision):
    """C6: one element of one event: NaN in that sample's rows, nowhere else."""
    module = make(precision=precision)
    x, offsets = batch([40, 50, 60])
    clean = module(x, offsets)
    x[int(offsets[1]) + 7, 3] = bad
    got = module(x, offsets)
    assert torch.isnan(got[1]).any()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", ["default", "static", "post", "bf16"])
def test_tail_is_never_read(name):
    """B5, B6: NaN past the last offset; equal to the trimmed batch, gradient 0 there."""
    module = make(**VARIANTS[name])
    x, offsets = batch(HOSTILE_LENGTHS, extra=140)
    used = int(offsets[-1])
    got, trimmed = run(module, x, offsets), run(module, x[:used], offsets)
    assert (got[1][used:] == 0).all()
    assert_identical((got[0], got[1][:used], got[2]), trimmed)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-38, 2.8e-36, 5.7e-35, 1e-6, 1e18])
@pytest.mark.parametrize("name", ["default", "static", "post"])
def test_sizes_of_events(size, name):
    """C1, C2: zero and tiny events (far under eps), and huge ones, stay finite and right."""
    module = make(**VARIANTS[name])
    x, offsets = torch.randn(70, DIM) * size, torch.tensor([0, 30, 70])
    out, grad, grads = run(module, x, offsets)
    assert all(torch.isfinite(t).all() for t in (out, grad, *grads.values()))
    if size == 0.0:
        assert (out == 0).all()
    elif size >= 1e-6:
        assert ratios((out, grad, grads), exact(module, x, offsets))["out"] > floors(name)[0]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_dtypes(x_dtype, w_dtype, autocast, precision):
    """E8: the output follows the events, or autocast; gradients follow what they belong to; autocast changes no bit of the computation."""
    module = make(precision=precision, value_proj=True).to(w_dtype)
    x, offsets = batch([0, 40, 70])
    x = (x / 4).to(x_dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        out, grad, grads = run(module, x, offsets)
    assert out.dtype == (autocast or x_dtype) and grad.dtype == x_dtype
    assert all(g.dtype == w_dtype for g in grads.values())
    plain = module(x, offsets)
    # every output is a BF16 number in another dtype; FP16 alone may lose bits of it
    assert torch.equal(out.to(x_dtype), plain) if x_dtype == torch.float16 else torch.equal(out, plain.to(out.dtype))
    found = ratios((out, grad, grads), exact(module, x, offsets))
    out_floor, events, parameters = floors("bf16" if precision == "bf16" else "")
    assert found.pop("out") > out_floor and found.pop("events") > events and min(found.values()) > parameters


def test_widths_of_offsets_and_strides():
    """E2, E6: int32 and int64 offsets, slices of wider tensors and transposed views: the same bits."""
    module = make()
    x, offsets = batch([40, 0, 70])
    want = run(module, x, offsets)
    assert_identical(run(module, x, offsets.int()), want)
    wide = torch.randn(x.shape[0], 2 * DIM)
    wide[:, DIM:] = x
    assert_identical(run(module, wide[:, DIM:], offsets), want)
    assert_identical(run(module, x.t().contiguous().t(), offsets), want)
    dout = torch.randn(DIM, 3, SEEDS)
    assert_identical(run(module, x, offsets, dout.permute(1, 2, 0)), run(module, x, offsets, dout.permute(1, 2, 0).contiguous()))


def test_containers():
    """A JaggedTensor by its methods alone; a batch of no samples may come with offsets of no elements (A7)."""
    module = make()
    x, offsets = batch([40, 0, 70])
    jagged = SimpleNamespace(values=lambda: x, offsets=lambda: offsets)
    assert torch.equal(module(jagged), module(x, offsets))
    nothing = SimpleNamespace(values=lambda: torch.empty(0, DIM), offsets=lambda: torch.empty(0, dtype=torch.int64))
    assert list(module(nothing).shape) == [0, SEEDS, DIM]


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_nested_tensor(precision):
    """PyTorch's own jagged layout: the same bits, gradients through it; layouts that are something else are refused in words."""
    module = make(precision=precision)
    x, offsets = batch([40, 0, 70])
    x.requires_grad_()
    want = torch.autograd.grad(module(x, offsets).square().sum(), x)[0]
    nested = torch.nested.nested_tensor_from_jagged(x, offsets)
    out = module(nested)
    assert torch.equal(out, module(x, offsets))
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(nested), out)
    assert torch.equal(torch.autograd.grad(out.square().sum(), x)[0], want)
    holes = torch.nested.narrow(torch.randn(2, 20, DIM), 1, torch.tensor([0, 1]), torch.tensor([3, 4]), layout=torch.jagged)
    for other in (nested.transpose(1, 2), torch.nested.nested_tensor([torch.randn(3, DIM)], layout=torch.strided), holes):
        with pytest.raises(ValueError, match=rf"a nested tensor must be torch.jagged, \[batch, any, {DIM}\] and without holes"):
            module(other)
    with pytest.raises(ValueError, match="offsets is given beside a NestedTensor"):
        module(nested, offsets)


@pytest.mark.parametrize("name", ["default", "value_proj", "bf16 value_proj"])
def test_every_subset_of_gradients(name):
    """G10: None where nothing is wanted, the same bits where something is."""
    module = make(**VARIANTS[name])
    x, offsets = batch([0, 33, 20])
    _, grad, grads = run(module, x, offsets)
    names = [n for n, _ in module.named_parameters()]
    for bits in range(2 ** (len(names) + 1)):
        wanted = [n for i, n in enumerate(names) if bits >> i & 1]
        for n, p in module.named_parameters():
            p.requires_grad_(n in wanted)
        events = x.clone().requires_grad_(bool(bits >> len(names)))
        out = module(events, offsets)
        assert out.requires_grad == bool(bits)
        if not bits:
            continue
        out.backward(weights_of(out))
        assert (events.grad is None) if not events.requires_grad else torch.equal(events.grad, grad)
        for n, p in module.named_parameters():
            assert (p.grad is None) if n not in wanted else torch.equal(p.grad, grads[n]), n
            p.grad = None


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_inference(precision):
    module = make(precision=precision)
    x, offsets = batch([40, 70])
    want = module(x, offsets)
    with torch.inference_mode():
        assert torch.equal(module(x, offsets), want)
    with torch.no_grad():
        out = module(x, offsets)
    assert torch.equal(out, want) and not out.requires_grad
    assert torch.equal(module.eval()(x, offsets), want)
    assert torch.equal(module.requires_grad_(False)(x, offsets), want)


@pytest.mark.parametrize("numerics", ["default", "post"])
def test_inference_keeps_no_centred_output(numerics, monkeypatch):
    """What only a backward reads is not asked for where none can come: without gradients, or with nothing that wants one."""
    asked = []
    run_forward = mxfp8.run_forward
    monkeypatch.setattr(mxfp8, "run_forward", lambda name, p, backward: asked.append(backward) or run_forward(name, p, backward))
    module = make(numerics=numerics)
    x, offsets = batch([40, 70])
    module(x, offsets)
    with torch.no_grad():
        module(x, offsets)
        module(x.clone().requires_grad_(), offsets)
    module.requires_grad_(False)
    module(x, offsets)
    module(x.clone().requires_grad_(), offsets)
    assert asked == [True, False, False, False, True]


def test_state_dict_moves_between_precisions():
    """G6: five (six) plain float tensors, nothing else; strict loading both ways; safe to unpickle."""
    golden = ["seed_embs", "query_norm.weight", "kv_norm.weight", "query_proj.weight", "key_proj.weight"]
    for value_proj in (False, True):
        modules = [make(seed=i, precision=p, value_proj=value_proj) for i, p in enumerate(("mxfp8", "bf16", "mxfp8"))]
        states = [m.state_dict() for m in modules]
        for state in states:
            assert list(state) == golden + ["value_proj.weight"] * value_proj
            assert all(t.dtype == torch.float32 for t in state.values())
        assert not list(modules[0].buffers())
        modules[1].load_state_dict(states[0], strict=True)
        modules[2].load_state_dict(modules[1].state_dict(), strict=True)
        file = io.BytesIO()
        torch.save(modules[2].state_dict(), file)
        file.seek(0)
        fresh = make(seed=9, value_proj=value_proj)
        fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
        x, offsets = batch([40, 70])
        assert torch.equal(fresh(x, offsets), modules[0](x, offsets))


def test_copies_and_pickles():
    module = make(numerics="post")
    x, offsets = batch([40, 70])
    want = run(module, x, offsets)
    assert_identical(run(copy.deepcopy(module), x, offsets), want)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert_identical(run(torch.load(file, weights_only=False), x, offsets), want)


def test_nothing_is_cached():
    """G5: every way of changing a weight is seen by the next call, train and eval."""
    module = make()
    x, offsets = batch([40, 70])
    seen = [module(x, offsets)]

    def fresh():
        out = module(x, offsets)
        assert all(not torch.equal(out, old) for old in seen)
        seen.append(out)

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x, offsets).sum().backward()
    optimizer.step()
    fresh()
    module.key_proj.weight.data.copy_(torch.randn(DIM, DIM))
    fresh()
    module.eval()
    module.kv_norm.weight.data.mul_(1.5)
    fresh()
    module.train()
    module.load_state_dict(make(seed=5).state_dict())
    fresh()


def test_what_is_kept_for_the_backward():
    """E5: payloads cross as uint8; per event one byte a channel for xn and for k, beside the events themselves."""
    module = make()
    x, offsets = batch([300, 200], dtype=torch.bfloat16)
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x, offsets)
    per_event = [t for t in kept if t.shape[:1] == (500,)]
    wide = [t for t in per_event if t.dim() > 1 and t.data_ptr() != x.data_ptr()]
    assert [t.dtype for t in wide] == [torch.uint8] * 2
    assert not any(t.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) for t in kept)


def test_meta_device():
    """G7: no storage until to_empty; reset_parameters fills everything."""
    with torch.device("meta"):
        module = PMA(DIM, HEADS, SEEDS, value_proj=True)
    also = PMA(DIM, HEADS, SEEDS, value_proj=True, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for m in (module, also) for p in m.parameters())
    assert also.seed_embs.dtype == torch.bfloat16
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert module.seed_embs.std() > 0 and (module.kv_norm.weight == 1).all()
    x, offsets = batch([40, 70])
    assert torch.isfinite(module(x, offsets)).all()


def test_repeats_bit_for_bit():
    module = make(value_proj=True)
    x, offsets = batch(LENGTHS)
    first = run(module, x, offsets)
    for _ in range(3):
        assert_identical(run(module, x, offsets), first)


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
@pytest.mark.parametrize("options", [dict(validate=True), dict()], ids=["validate", "on a CPU"])
def test_values_of_offsets(precision, options):
    """On a CPU, where reading them waits for nothing, always: lengths in place of offsets are the commonest mistake."""
    module = make(precision=precision)
    x, _ = batch([40, 70])
    for offsets, words in (
        ([1, 40, 110], r"offsets\[0\] is 1"),
        ([0, 50, 40, 110], r"offsets\[2\] is 40, less than"),
        ([0, 111], r"offsets\[-1\] is 111; it must be at most the number of values, 110"),
    ):
        with pytest.raises(ValueError, match=words):
            module(x, torch.tensor(offsets), **options)
    module(x, torch.tensor([0, 40, 110]), **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, x, o: m(x), "offsets is None"),
        (lambda m, x, o: m(x[:, :64], o), r"values has shape \[110, 64\]; it must be \[tokens, 128\]"),
        (lambda m, x, o: m(x[None], o), r"values has shape \[1, 110, 128\]"),
        (lambda m, x, o: m(x.double(), o), "values has dtype torch.float64"),
        (lambda m, x, o: m(x, o.float()), "offsets has dtype torch.float32"),
        (lambda m, x, o: m(x, o.tolist()), "offsets is a list; it must be a tensor"),
        (lambda m, x, o: m(x, o[None]), r"offsets has shape \[1, 3\]"),
        (lambda m, x, o: m(x, o.to("meta")), "offsets is on meta but the values are on cpu"),
        (lambda m, x, o: m(x.to("meta"), o), "values is on meta but the module is on cpu"),
        (lambda m, x, o: m([x], o), "values is list; it must be a tensor"),
        (lambda m, x, o: m(SimpleNamespace(values=lambda: x, offsets=lambda: o), o), "offsets is given beside a SimpleNamespace"),
    ],
)
def test_misuse(call, words):
    x, offsets = batch([40, 70])
    with pytest.raises((TypeError, ValueError), match=words):
        call(make(), x, offsets)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(dim=0), "dim is 0; it must be at least 1"),
        (dict(dim=128.0), "dim is 128.0; it must be an integer"),
        (dict(num_heads="2"), "num_heads is '2'; it must be an integer"),
        (dict(num_heads=3), "num_heads must divide dim"),
        (dict(num_seeds=-1), "num_seeds is -1"),
        (dict(eps=-1e-6), "eps is -1e-06; it must be at least 0 and finite"),
        (dict(eps=float("inf")), "eps is inf"),
        (dict(eps=float("nan"), precision="bf16"), "eps is nan"),
        (dict(precision="fp8"), "precision is 'fp8'; allowed are 'mxfp8', 'bf16'"),
        (dict(backend="cuda"), "backend is 'cuda' with precision='mxfp8'; allowed are 'auto'"),
        (dict(backend="sm90", precision="bf16"), "backend is 'sm90' with precision='bf16'"),
        (dict(numerics="best"), 'numerics is \'best\'; allowed are "default", "post"'),
        (dict(num_heads=8), "head_dim is 16; allowed are 32, 64"),
        (dict(dim=96, num_heads=1, numerics=Numerics(hadamard=True)), "head dimension is 96; it must be a power of two"),
        (dict(numerics=Numerics(center=False)), "numerics.center is False but"),
    ],
)
def test_misconstruction(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        PMA(**{"dim": DIM, "num_heads": HEADS, "num_seeds": SEEDS, **options})


@pytest.mark.parametrize("options", [dict(backend="sm90"), dict(backend="sm100"), dict(precision="bf16", backend="fa4")])
def test_a_backend_by_name_serves_or_says_why(options):
    x, offsets = batch([40, 70])
    with pytest.raises(ValueError, match=r"CPU|cpu"):
        make(**options)(x, offsets)


def test_text_form():
    """It names what is not the default, numerics too."""
    assert "precision='mxfp8', backend='auto'\n" in repr(make())
    assert "numerics='post'" in repr(make(numerics="post"))
    assert "numerics=Numerics(" in repr(make(numerics=Numerics(scales="static")))


def test_bf16_takes_any_head_dimension():
    module = make(num_heads=8, precision="bf16")
    x, offsets = batch([40, 0, 70])
    assert ratios(run(module, x, offsets), exact(module, x, offsets))["out"] > 44


def test_no_kernel_stack_needed():
    """F9: imports and runs where neither a DSL, a driver, torchrec nor flash-attn is installed."""
    code = """
import sys
for name in ("cutlass", "quack", "torchrec", "fbgemm_gpu", "flash_attn", "triton", "cuda"):
    sys.modules[name] = None
import torch, lp_fa4, fused_ops, modules
for precision in ("mxfp8", "bf16"):
    m = modules.PMA(64, 2, 8, precision=precision)
    m(torch.randn(9, 64, requires_grad=True), torch.tensor([0, 4, 9])).sum().backward()
"""
    environment = {**__import__("os").environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
