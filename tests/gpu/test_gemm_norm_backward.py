"""GEMM + norm backward on the device: errors against FP64 (``tests.fused_ops.gemm_norm_cases.check``), bits where they must repeat."""

import pytest
import torch

from fused_ops import gemm_norm_backward
from lp_fa4.mx import quantize_mx
from tests.gpu.problems import DEVICE, offsets_of, poison

pytestmark = pytest.mark.gpu

SIZE = (128, 256)
"""Small, and two CTAs share the columns."""
LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 4095, 0)


def run(lengths, rows, columns, needs=(True, True, True), **options):
    """Arguments, results and errors of one checked call of the kernels."""
    from fused_ops.gemm_norm_backward.kernel import gemm_norm_backward as kernel
    from tests.fused_ops.gemm_norm_cases import check, problem

    arguments = problem(lengths, rows, columns, device="cuda", **options)
    poison()
    got = kernel(*arguments, *needs)
    check(arguments, got, needs)
    return arguments, got


@pytest.mark.parametrize(
    "size", [(64, 64), (128, 128), (384, 384), (512, 512), (192, 256), (256, 192), (768, 768), (512, 384), (64, 512), (448, 128)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes(size, dtype):
    run(LENGTHS, *size, capacity=50, dtype=dtype)


@pytest.mark.parametrize("size", [(384, 384), (512, 512)])
def test_many_launches_agree(size):
    """The roles of a cluster meet by barriers alone: launches from cold and warm caches, on few tiles a cluster, give the same bits."""
    from fused_ops.gemm_norm_backward.kernel import gemm_norm_backward as kernel

    arguments, first = run((1062, 236, 3981, 1097, 3840, 906, 2764, 3718, 2396), *size)
    large = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    for i in range(40):
        if i % 2:
            large.fill_(i)
        for got, want in zip(kernel(*arguments, True, True, True), first, strict=True):
            assert torch.equal(got, want), f"launch {i}"


def test_weight_gradient_begins_beside_the_input_gradient():
    """On multiprocessors that clusters of four leave free: right, the same bits every time, rows of dx those of a call alone."""
    from fused_ops.gemm_norm_backward.kernel import free_beside
    from fused_ops.gemm_norm_backward.kernel import gemm_norm_backward as kernel

    lengths = torch.randint(1, 4096, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    arguments, first = run(lengths, 512, 512)
    dk, dv, _, _, x, _, _, xn, _ = arguments
    if free_beside(dk, dv, x, xn) == 0:
        pytest.skip("clusters of four fill this device, or the driver does not say that they do not")
    for _ in range(20):
        for got, want in zip(kernel(*arguments, True, True, True), first, strict=True):
            assert torch.equal(got, want)
    assert torch.equal(kernel(*arguments, True, False, False)[0], first[0])


@pytest.mark.parametrize(
    ("dk", "dv", "xn", "dtype"),
    [
        ((32, 128), None, (32, 32), "bfloat16"),
        ((128, 128), (0, 32), (0, 128), "float16"),
        ((0, 128), (32, 32), "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16", "float16"),
        ("bfloat16", (32, 64), (128, 64), "bfloat16"),
        ((32, 64), "bfloat16", (32, 128), "bfloat16"),
        ((32, 32), (32, 32), (0, 128), "float32"),
        ("bfloat16", (128, 128), (32, 64), "float32"),
    ],
)
def test_operands(dk, dv, xn, dtype):
    run(LENGTHS, *SIZE, capacity=9, dk=dk, dv=dv, xn=xn, dtype=dtype, mean=dv is not None, int64=dk == (32, 128))


@pytest.mark.parametrize("tokens", [1, 31, 33, 4095])
@pytest.mark.parametrize("dense", [False, True])
def test_lengths(tokens, dense):
    run(None if dense else [0, tokens, 0], *SIZE, tokens=tokens)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], []])
def test_nothing(lengths):
    _, got = run(lengths, *SIZE, capacity=70)
    assert all(bool((x == 0).all()) for x in got)


def test_a_million_rows_and_three(one_at_a_time):
    run([1_000_003 - 50_000 * 7, *[50_000] * 7], *SIZE)


def test_seventy_thousand_sequences():
    lengths = torch.randint(0, 9, (70_000,), generator=torch.Generator().manual_seed(0)).tolist()
    run(lengths, *SIZE, capacity=1000)


def test_not_finite():
    """NaN and infinities stay in their rows of dx and show in the sums."""
    run(LENGTHS, *SIZE, bad=(40, 300, 700), capacity=9)


def test_strided_and_expanded():
    """A gap after each row of x; gradients of stride 0, as a sum's are; rows that start at odd addresses are copied."""
    arguments, _ = run(LENGTHS, *SIZE, strided=True)
    dk, _, mean, w, x, gain, rstd, xn, _ = arguments
    rows, columns = SIZE
    row, left = (torch.randn(1, n, device=DEVICE).bfloat16() for n in (columns, rows))
    for dv in (row.expand(x.shape), torch.randn(x.shape[0], columns + 1, device=DEVICE).bfloat16()[:, 1:]):
        a = gemm_norm_backward(dk, dv, w, x, gain, rstd, xn, dv_mean=mean)
        b = gemm_norm_backward(dk, dv.contiguous(), w, x, gain, rstd, xn, dv_mean=mean)
        assert torch.equal(a.dx, b.dx) and torch.equal(a.dnorm_weight, b.dnorm_weight)
    a = gemm_norm_backward(left.expand(x.shape[0], rows), None, w, x, gain, rstd, xn)
    b = gemm_norm_backward(left.expand(x.shape[0], rows).contiguous(), None, w, x, gain, rstd, xn)
    assert torch.equal(a.dx, b.dx) and torch.equal(a.dw_k, b.dw_k)


def test_offsets_past_two_to_the_31(one_at_a_time):
    """6 M rows of 384: the last rows equal those of a call of their own, and dW is that of the only rows that are not 0."""
    rows, tail = 6_000_000, 4_992
    offsets, own = (torch.tensor(o, device=DEVICE) for o in ([0, rows - tail, rows], [0, tail]))
    generator = torch.Generator("cuda").manual_seed(0)
    made = {}
    for name in ("dk", "dv", "xn"):
        short = quantize_mx(torch.randn(tail, 384, device=DEVICE, generator=generator), (32, 32), own)
        codes = torch.zeros(rows, 384, dtype=torch.uint8, device=DEVICE)
        codes[-tail:] = short.codes
        scale = torch.zeros(rows // 32 + 2, 12, dtype=torch.uint8, device=DEVICE)
        scale[(rows - tail) // 32 + 1 :][: tail // 32] = short.scale_bytes[: tail // 32]
        made[name] = (type(short).from_bytes(codes, scale, (32, 32), offsets), short)
    x = torch.zeros(rows, 384, device=DEVICE, dtype=torch.bfloat16)
    x[-tail:] = torch.randn(tail, 384, device=DEVICE, generator=generator)
    w, gain = torch.randn(384, 384, device=DEVICE, generator=generator).bfloat16(), torch.ones(384, device=DEVICE)
    rstd = torch.ones(rows, device=DEVICE)
    big = gemm_norm_backward(made["dk"][0], made["dv"][0], w, x, gain, rstd, made["xn"][0])
    small = gemm_norm_backward(made["dk"][1], made["dv"][1], w, x[-tail:].clone(), gain, rstd[-tail:].clone(), made["xn"][1])
    assert torch.equal(big.dx[-tail:], small.dx)
    torch.testing.assert_close(big.dw_k, small.dw_k, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(big.dnorm_weight, small.dnorm_weight, rtol=1e-5, atol=1e-2)


def test_repeats_bitwise_and_subsets():
    from fused_ops.gemm_norm_backward.kernel import gemm_norm_backward as kernel

    arguments, first = run((5000, 3, 0, 20_000), *SIZE)
    for bits in range(1, 8):
        needs = tuple(bool(bits >> i & 1) for i in range(3))
        for need, got, want in zip(needs, kernel(*arguments, *needs), first, strict=True):
            assert got is None if not need else torch.equal(got, want)


def test_graph_replays_with_other_lengths():
    arguments, _ = run([100, 28, 0, 200], *SIZE, dk=(0, 128), dv=(0, 128))
    dk, dv, mean, w, x, gain, rstd, xn, _ = arguments

    def call():
        return gemm_norm_backward(dk, dv, w, x, gain, rstd, xn, dv_mean=mean)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    dk.offsets.copy_(offsets_of([0, 300, 1, 20]))
    graph.replay()
    want = call()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_is_not_served_is_said():
    arguments, _ = run([100, 28], *SIZE)
    dk, dv, mean, w, x, gain, rstd, xn, _ = arguments
    with pytest.raises(ValueError, match="w_k is float32; the kernels serve bfloat16"):
        gemm_norm_backward(dk, dv, w.float(), x, gain, rstd, xn, dv_mean=mean, backend="sm90")
    with pytest.raises(ValueError, match="dv has dtype float32; the kernels serve bfloat16 and MXTensors"):
        gemm_norm_backward(dk, dv.dequantize(), w, x, gain, rstd, xn, dv_mean=mean, backend="sm90")
