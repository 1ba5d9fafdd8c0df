"""The PMA module on the device, end to end: against FP64 and the CPU, and under what training loops put around it."""

import copy

import pytest
import torch
import torch._dynamo
from torch.utils.checkpoint import checkpoint

from lp_fa4.compile import compile_count
from modules import PMA, Numerics
from tests.fused_ops.common import db
from tests.gpu.problems import DEVICE, offsets_of, poison
from tests.modules.common import exact, make, run

pytestmark = pytest.mark.gpu

HOSTILE = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 2047, 0)
SHAPES = {"D128": dict(dim=384, num_heads=3, num_seeds=512), "D64": dict(dim=128, num_heads=2, num_seeds=48)}
BF16_DB = 48.0
"""One BF16 rounding of the output or a gradient has some 54 dB; this is its share beside an error of twice the reference's."""


def events(lengths, dim, extra=0, dtype=torch.bfloat16, seed=0):
    """Events whose rows differ in size by 2^±4, NaN past the last offset; on the device."""
    generator = torch.Generator().manual_seed(seed)
    used = sum(lengths)
    x = torch.randn(used + extra, dim, generator=generator) * 2.0 ** torch.randint(-4, 5, (used + extra, 1), generator=generator)
    x[used:] = torch.nan
    return x.to(dtype).to(DEVICE), offsets_of(lengths)


def on_device(module: PMA) -> PMA:
    """The same parameters on the device."""
    return copy.deepcopy(module).to(DEVICE)


def gpu_run(module, x, offsets):
    x = x.detach().requires_grad_()
    out = module(x, offsets)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape[1:], generator=generator).to(out.dtype).to(DEVICE).expand(out.shape)
    out.backward(dout)
    grads = {name.removeprefix("_orig_mod."): p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return out.detach(), x.grad, grads


def flat(result):
    return {"out": result[0], "events": result[1], **result[2]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("numerics", ["default", "post", "e4m3x2", "plain"])
@pytest.mark.parametrize("value_proj", [False, True])
def test_against_the_reference_on_the_cpu(shape, numerics, value_proj):
    """Error against FP64 at most twice that of the CPU reference with the same choices, plus a BF16 rounding."""
    choice = {
        "default": Numerics(scales="static"),
        "post": Numerics.post(scales="static"),
        "e4m3x2": Numerics(scales="static", key_projection="e4m3x2"),
        "plain": Numerics(scales="static", key_projection="bf16", coordinates="plain"),
    }[numerics]
    module = make(numerics=choice, value_proj=value_proj, **SHAPES[shape])
    x, offsets = events(HOSTILE, module.dim, extra=70)
    got = as_good_as_the_reference(module, x, offsets)
    used = sum(HOSTILE)
    assert torch.equal(got["events"][used:], torch.zeros_like(got["events"][used:])), "gradient past the last offset"
    assert not got["out"][[0, 5, 11]].any(), "samples without events"


def as_good_as_the_reference(module, x, offsets):
    """Asserts error against FP64 of at most twice that of the CPU reference with the same choices, plus a BF16 rounding; the results."""
    poison()
    got = flat(gpu_run(on_device(module), x, offsets))
    x, offsets = x.cpu(), offsets.cpu()
    want = flat(run(module, x, offsets))
    truth = flat(exact(module, x, offsets))
    for name, reference in truth.items():
        least = -10 * torch.log10(torch.tensor(4 * 10 ** (-db(want[name], reference) / 10) + 10 ** (-BF16_DB / 10)))
        found = db(got[name].cpu(), reference)
        assert found >= float(least), f"{name}: {found:.1f} dB, the CPU reference has {db(want[name], reference):.1f}"
    return got


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [(-30, 0), (0, -30), (-60, -60), (40, -40), (4, 0), (2, 2), (6, 0)])
def test_weights_of_any_size(shape, sizes):
    """Projections times powers of two: scores near 0, of the usual size from queries and keys that are not, and of a deviation of 64."""
    module = make(numerics=Numerics(scales="static", key_projection="bf16"), **{**SHAPES[shape], "num_seeds": 70})
    with torch.no_grad():
        for proj, size in zip((module.query_proj, module.key_proj), sizes, strict=True):
            proj.weight.mul_(2.0**size)
    as_good_as_the_reference(module, *events((0, 1, 33, 300, 900), module.dim))


@pytest.mark.parametrize("lengths", [(), (0, 0, 0), (1,), (0, 300)])
def test_empty_and_single(lengths):
    module = on_device(make(**SHAPES["D128"]))
    x, offsets = events(lengths, module.dim)
    poison()
    out, dx, grads = gpu_run(module, x, offsets)
    assert out.shape == (len(lengths), 512, 384) and out.isfinite().all() and dx.isfinite().all()
    for b, n in enumerate(lengths):
        assert n or not out[b].any()
    for name, grad in grads.items():
        assert grad is not None and grad.isfinite().all(), name
        assert sum(lengths) or not grad.any(), name


@pytest.mark.parametrize("precision", ["mxfp8"])
def test_no_host_synchronization(precision):
    module = on_device(make(precision=precision, **SHAPES["D128"]))
    x, offsets = events(HOSTILE, module.dim)
    gpu_run(module, x, offsets)  # compiles
    torch.cuda.synchronize()
    leaf = x.detach().requires_grad_()
    dout = torch.randn(len(HOSTILE), 512, 384, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(leaf, offsets).backward(dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_stream():
    module = on_device(make(**SHAPES["D128"]))
    x, offsets = events(HOSTILE, module.dim)
    with torch.no_grad():
        want = module(x, offsets)
    stream = torch.cuda.Stream()
    late = torch.empty_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # whatever runs on another stream meanwhile sees what was not yet written
        late.copy_(x)
        leaf = late.detach().requires_grad_()
        got = module(leaf, offsets)
        got.backward(torch.ones_like(got))
        module.zero_grad(set_to_none=True)
    stream.synchronize()
    assert torch.equal(got, want)
    assert leaf.grad.isfinite().all()


def test_checkpointing_and_autocast(deterministic):
    module = on_device(make(**SHAPES["D128"]))
    x, offsets = events(HOSTILE, module.dim)
    want = flat(gpu_run(module, x, offsets))

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, values, bounds):
            return checkpoint(self.inner, values, bounds, use_reentrant=False)

    got = flat(gpu_run(Checkpointed(), x, offsets))
    for name, value in want.items():
        assert torch.equal(got[name if name in ("out", "events") else f"inner.{name}"], value), name
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = module(x, offsets)
        assert out.dtype == torch.bfloat16 and torch.equal(out, want["out"])
        assert torch.equal(module(x.float(), offsets), want["out"])


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


def test_deterministic_gradients_repeat(deterministic):
    module = on_device(make(**SHAPES["D128"]))
    x, offsets = events((700, 0, 129, 2000) * 8, module.dim)
    first = flat(gpu_run(module, x, offsets))
    for _ in range(4):
        again = flat(gpu_run(module, x, offsets))
        for name, value in first.items():
            assert torch.equal(again[name], value), name


def test_graph_replay_with_other_lengths(deterministic):
    """Capacity padding: one captured forward and backward serves other lengths, bit for bit what an eager call gives."""
    module = on_device(make(**SHAPES["D128"]))
    batch, capacity = 12, 6000
    x, offsets = events((500,) * batch, module.dim, extra=0)
    static_x = torch.zeros(capacity, module.dim, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    static_offsets = offsets.clone()
    dout = torch.randn(batch, 512, 384, device=DEVICE, dtype=torch.bfloat16)
    leaves = [static_x, *module.parameters()]
    with torch.no_grad():
        static_x[: x.shape[0]] = x
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(module(static_x, static_offsets), leaves, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(static_x, static_offsets)
        grads = torch.autograd.grad(out, leaves, dout)
    generator = torch.Generator().manual_seed(3)
    for trial in range(6):
        lengths = [0] * batch if trial == 5 else torch.randint(0, 1000, (batch,), generator=generator).tolist()
        while sum(lengths) > capacity:
            lengths[lengths.index(max(lengths))] //= 2
        x, offsets = events(lengths, module.dim, extra=capacity - sum(lengths), seed=trial)
        with torch.no_grad():
            static_x.copy_(x)
        static_offsets.copy_(offsets)
        graph.replay()
        leaf = x.detach().requires_grad_()
        eager = module(leaf, offsets)
        wanted = torch.autograd.grad(eager, [leaf, *module.parameters()], dout)
        assert torch.equal(out, eager), f"output, {lengths}"
        for name, got, want in zip(("events", *(n for n, _ in module.named_parameters())), grads, wanted, strict=True):
            assert torch.equal(got, want), f"{name}, {lengths}"


def test_graphed_callable():
    """PyTorch's own way to a graphed module, forward and backward apart, as a training loop calls it: what eager calls give. Gradients of
    the queries' side are sums in FP16, whose order is the hardware's."""
    module = on_device(make(**SHAPES["D128"]))
    eager, batch, capacity = copy.deepcopy(module), 12, 6000
    static_x = torch.zeros(capacity, module.dim, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(module, (static_x, offsets_of((500,) * batch)))
    generator = torch.Generator().manual_seed(5)
    for trial in range(4):
        lengths = torch.randint(0, 500, (batch,), generator=generator).tolist()
        x, offsets = events(lengths, module.dim, extra=capacity - sum(lengths), seed=trial)
        got, want = flat(gpu_run(graphed, x, offsets)), flat(gpu_run(eager, x, offsets))
        for name, value in want.items():
            if name in ("out", "events"):
                assert torch.equal(got[name], value), (trial, name)
            else:
                assert db(got[name].cpu(), value.cpu().double()) > 45, (trial, name)


@pytest.fixture(params=[True, False], ids=["repeating", "as it comes"])
def repeating(request):
    if request.param:
        request.getfixturevalue("deterministic")
    return request.param


@pytest.mark.parametrize("options", [dict(), dict(value_proj=True)])
def test_compile_serves_every_batch(options, repeating):
    """One graph without a break; neither graphs nor kernels grow with the data, over 50 random batches. Where gradients need not repeat,
    those of the queries' side are sums in FP16, in no order."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = on_device(make(dim=256, num_heads=2, num_seeds=64, **options))
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    counts = []
    for trial in range(50):
        samples = int(torch.randint(2, 40, (1,), generator=generator))
        lengths = torch.randint(0, 500, (samples,), generator=generator).tolist()
        x, offsets = events(lengths, module.dim, seed=trial)
        got = flat(gpu_run(compiled, x, offsets))
        counts.append((torch._dynamo.utils.counters["stats"]["unique_graphs"], compile_count()))
        if trial % 10 == 0:
            want = flat(gpu_run(module, x, offsets))
            counts[-1] = (counts[-1][0], compile_count())
            assert torch.equal(got["events"], want["events"]), trial
            for name, value in want.items():  # gradients of the query side are FP32 sums, which a compiler may order otherwise
                assert db(got[name].cpu(), value.cpu().double()) > (100 if repeating else 45), (trial, name)
    assert counts[-1] == counts[1], counts


def test_compilers_own_graphs(deterministic):
    """``mode="reduce-overhead"``: the compiler captures forward and backward in CUDA graphs, skips none, replays with other lengths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = on_device(make(**SHAPES["D128"]))
    compiled, batch, capacity = torch.compile(module, fullgraph=True, mode="reduce-overhead"), 12, 6000
    generator = torch.Generator().manual_seed(5)
    for trial in range(6):
        lengths = torch.randint(0, 500, (batch,), generator=generator).tolist()
        x, offsets = events(lengths, module.dim, extra=capacity - sum(lengths), seed=trial)
        torch.compiler.cudagraph_mark_step_begin()
        got = {name: value.clone() for name, value in flat(gpu_run(compiled, x, offsets)).items()}
        for name, value in flat(gpu_run(module, x, offsets)).items():
            same = torch.equal(got[name], value) if name in ("out", "events") else db(got[name].cpu(), value.cpu().double()) > 100
            assert same, (trial, name)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_compiled_balanced_coordinates(deterministic):
    module = on_device(make(**SHAPES["D128"]))
    assert module.numerics.coordinates == "balanced"
    x, offsets = events(HOSTILE, module.dim)
    got = flat(gpu_run(torch.compile(module, fullgraph=True, dynamic=True), x, offsets))
    for name, value in flat(gpu_run(module, x, offsets)).items():
        assert db(got[name].cpu(), value.cpu().double()) > 100, name  # the same codes; of the query side's gradients another order of sums


def test_no_bf16_copy_of_what_is_quantized():
    """Of the size of a BF16 copy of the events or above, forward and backward allocate the events' gradient alone."""
    module = on_device(make(**SHAPES["D128"]))
    tokens = 200_000
    x, offsets = events((tokens // 4,) * 4, module.dim)
    gpu_run(module, x, offsets)
    leaf = x.detach().requires_grad_()
    dout = torch.randn(4, 512, 384, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    try:
        out = module(leaf, offsets)
        forward = torch.cuda.memory._snapshot()["device_traces"][DEVICE.index]
        grads = torch.autograd.grad(out, [leaf, *module.parameters()], dout)
        trace = torch.cuda.memory._snapshot()["device_traces"][DEVICE.index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    del grads
    copy_size = 2 * tokens * module.dim

    def large(part):
        return [entry["size"] for entry in part if entry["action"] == "alloc" and entry["size"] >= copy_size]

    assert not large(forward), [size / copy_size for size in large(forward)]
    assert len(large(trace)) == 1, [size / copy_size for size in large(trace)]


@pytest.mark.parametrize("options", [dict(), dict(value_proj=True), dict(numerics="post")], ids=["default", "value_proj", "post"])
@pytest.mark.parametrize("shape", SHAPES)
def test_inference(shape, options):
    """The bits of training, with less memory: what only a backward reads is not written."""
    module = on_device(make(**SHAPES[shape], **options))
    x, offsets = events(HOSTILE, module.dim, extra=5)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = module(x, offsets)
        return out.detach(), torch.cuda.max_memory_allocated() - before

    peak()
    want, more = peak()
    with torch.no_grad():
        peak()
        out, less = peak()
    assert torch.equal(out, want)
    if shape == "D128":  # elsewhere other tensors make the peak
        assert less < more - want.nbytes // 2, (less, more, want.nbytes)


def test_two_devices_raise_with_both_names():
    module = on_device(make(**SHAPES["D64"]))
    x, offsets = events((5, 40), module.dim)
    with pytest.raises(ValueError, match=r"cpu.*cuda:0|cuda:0.*cpu"):
        module(x.cpu(), offsets)
    with pytest.raises(ValueError, match=r"cpu.*cuda:0|cuda:0.*cpu"):
        module(x, offsets.cpu())
