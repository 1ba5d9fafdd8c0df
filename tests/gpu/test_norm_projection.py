"""Norm and projection in one kernel on the device: bits of the norm's definition, bytes of the product against FP64 sums
(``tests.fused_ops.kernel_cases.check_norm_projection``)."""

import itertools

import pytest
import torch

from fused_ops import gemm_quantize, projection_weight, rmsnorm_center_quantize, rmsnorm_project
from fused_ops.gemm_quantize.interface import projection_exponent
from fused_ops.norm_projection.kernel import norm_projection
from fused_ops.rmsnorm_quantize.interface import norm_exponent
from tests.fused_ops.kernel_cases import EPS, check_norm_projection, in_halves
from tests.gpu.problems import DEVICE, offsets_of, poison, rows_of_kind

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 4095, 0)
APART = {False: 0.01, True: 0.03}
"""As of ``gemm_quantize``: sums that lie within 2^-12 of themselves of a boundary, eight boundaries an octave. In FP16 (True) within
2^-10.4: what 24 roundings of up to 2^-11 come to."""
OF_BF16 = 0.1
"""The same of FP16 rows and weight beside BF16 ones, which are 2^-8.7 apart."""
SHAPES = [(64, 64), (128, 320), (192, 192), (256, 384), (320, 64), (384, 384), (384, 128), (384, 1536)]


def operands(tokens, used, contracted, columns, kind="spread", dtype=torch.bfloat16):
    """x with NaN past ``used``, gain, BF16 w."""
    x = rows_of_kind(kind, tokens, used, contracted, dtype)
    return x, torch.rand(contracted, device=DEVICE) + 0.5, torch.randn(columns, contracted, device=DEVICE).bfloat16()


def run(x, gain, w, offsets, width=32, product_width=32, small=10, **options):
    """The kernel's results, memory poisoned before. ``small``: the product's first exponent is so much too small, on purpose: large values
    saturate, and FP16 cannot hold the sums if it is 10."""
    exponent = norm_exponent(gain, width, centred=options.get("center", True))
    given = projection_exponent(gain, w, product_width, centred=True)
    given[:1] -= small
    poison(4)
    got = norm_projection(x, gain, w, EPS, offsets, width, None, product_width, given, **options)
    halves = in_halves(w, width, exponent, product_width, given)
    assert halves == (small < 10)
    apart = check_norm_projection(x, gain, w, offsets, width, exponent, product_width, given, options.get("center", True), got)
    count = got.product.numel()
    assert apart * count <= APART[halves] * count + 3 * (APART[halves] * count) ** 0.5, apart  # of few codes, three standard deviations
    return got


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_the_definition(shape, cluster):
    contracted, columns = shape
    offsets, used = offsets_of(LENGTHS), sum(LENGTHS)
    x, gain, w = operands(used + 50, used, contracted, columns)
    for row, bad in zip((40, 300, 700), (torch.nan, torch.inf, -torch.inf), strict=True):
        x[row, row % contracted] = bad
    for center, small in itertools.product((True, False), (2, 10)):
        got = run(x, gain, w, offsets, cluster=cluster, center=center, small=small)
        again = run(x, gain, w, offsets, cluster=cluster, center=center, small=small)
        for one, other in zip(got, again, strict=True):
            assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape"), [*((torch.float32, shape) for shape in SHAPES), *((torch.float16, shape) for shape in SHAPES[2:6:3])], ids=str
)
def test_rows_that_are_not_bfloat16(dtype, shape):
    """Bits of the definition on rows of 2^±20 with more digits than BF16 has, apart in memory; bits of BF16 rows where values are equal."""
    contracted, columns = shape
    offsets, used = offsets_of(LENGTHS), sum(LENGTHS)
    x, gain, w = operands(used + 50, used, contracted, columns, dtype=dtype)
    for row, bad in zip((40, 300, 700), (torch.nan, torch.inf, -torch.inf), strict=True):
        x[row, row % contracted] = bad
    x = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :contracted]
    assert dtype == torch.float16 or float((x[:used] == x[:used].bfloat16().float()).float().mean()) < 0.2
    for center, small in itertools.product((True, False), (2, 10)):
        run(x, gain, w, offsets, center=center, cluster=1 + center, small=small)
    run(x[:used], gain, w, None, small=0)
    x, gain, w = operands(used + 50, used, contracted, columns, "random")
    x = x.to(torch.float8_e4m3fn).to(torch.bfloat16)  # in all three dtypes the same
    for small in (2, 10):
        for one, other in zip(run(x, gain, w, offsets, small=small), run(x.to(dtype), gain, w, offsets, small=small), strict=True):
            assert one is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_squares_past_fp32():
    """A row whose sum of squares is infinite has ``rstd`` 0, as the definition in FP32 has it, and a row of zeros less the mean."""
    offsets, exponent = offsets_of([70]), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x, gain, w = operands(70, 70, 64, 64, "random", torch.float32)
    x[40, 3] = torch.finfo(torch.float32).max
    got = norm_projection(x, gain, w, EPS, offsets, 64, exponent, 64, exponent)
    want = rmsnorm_project(x, gain, w, exponent, EPS, offsets, width=64, product_width=64, exponent=exponent, backend="reference")
    assert float(got.rstd[40]) == float(want.norm.rstd[40]) == 0.0 and bool((got.rstd[:40] > 0).all())
    assert float((got.codes[40] != want.norm.xn.codes[40]).float().mean()) <= APART[False]


@pytest.mark.parametrize("contracted", [128, 384])
@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 4095])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_at_every_size(tokens, contracted, dtype):
    offsets = offsets_of([tokens] if tokens < 4095 else [0, 4095 - 640, 0, 512, 127, 1, 0], torch.int64)
    for kind in ("random", "outlier", "spread", "not finite"):
        x, gain, w = operands(tokens + 40, tokens, contracted, 384, kind, dtype)
        run(x, gain, w, offsets, 128, 128, copy_heads=contracted // 128)
        run(x[:tokens], gain.bfloat16(), w, None, 64, 96, small=1)


def test_a_million_rows_and_three(one_at_a_time):
    """All bits, sequence by sequence, for the definition holds many copies of what it looks at."""
    lengths = [1_000_003 - 50_000 * 17, *[50_000] * 17]
    x, gain, w = operands(1_000_003, 1_000_003, 384, 384)
    exponent, given = norm_exponent(gain, 128, centred=True), projection_exponent(gain, w, 128, centred=True)
    got, begin = norm_projection(x, gain, w, EPS, offsets_of(lengths), 128, None, 128, given), 0
    for b, n in enumerate(lengths):
        part = slice(begin, begin + n)
        mine = got._replace(
            codes=got.codes[part], rstd=got.rstd[part], product=got.product[part], mean=got.mean[b : b + 1], total=got.total[b : b + 1]
        )
        assert check_norm_projection(x[part], gain, w, offsets_of([n]), 128, exponent, 128, given, True, mine) <= APART[True]
        begin += n


def test_many_short_sequences():
    """More tiles than tokens fill: most are empty, or hold a row or two."""
    lengths = torch.randint(0, 4, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    x, gain, w = operands(sum(lengths) + 700, sum(lengths), 128, 128)
    for small in (0, 10):
        run(x, gain, w, offsets_of(lengths), 128, 128, small=small)


def test_offsets_past_two_to_the_31(one_at_a_time):
    """6 M rows of 384: the last rows equal those of a call of their own."""
    rows, tail = 6_000_000, 5_000
    x = torch.zeros(rows, 384, device=DEVICE, dtype=torch.bfloat16)
    x[-tail:] = torch.randn(tail, 384, device=DEVICE)
    gain, w = torch.rand(384, device=DEVICE) + 0.5, torch.randn(384, 384, device=DEVICE).bfloat16()
    given = projection_exponent(gain, w, 128, centred=True)
    big = norm_projection(x, gain, w, EPS, offsets_of([rows - tail, tail]), 128, None, 128, given)
    small = norm_projection(x[-tail:].clone(), gain, w, EPS, offsets_of([0, tail]), 128, None, 128, given)
    assert torch.equal(big.codes[-tail:], small.codes) and torch.equal(big.product[-tail:], small.product)
    assert torch.equal(big.rstd[-tail:], small.rstd) and torch.equal(big.total[1:], small.total[1:])


def test_strided_and_repeated_rows():
    x, gain = torch.randn(300, 768, device=DEVICE).bfloat16(), torch.rand(384, device=DEVICE) + 0.5
    w = torch.randn(768, 384, device=DEVICE).bfloat16()
    offsets = offsets_of([100, 0, 200])
    given = torch.full((3,), 3, device=DEVICE, dtype=torch.int32)
    for rows in (x[:, :384], x[:, 8:392], x[:, 3:387], x[:1, :384].expand(300, 384), x[:, :384].t().contiguous().t(), x[:, ::2]):
        mine, theirs = (
            norm_projection(r, gain, v, EPS, offsets, 128, None, 128, given)
            for r, v in ((rows, w[::2]), (rows.contiguous(), w[::2].contiguous()))
        )
        for one, other in zip(mine, theirs, strict=True):
            assert one is None or torch.equal(one, other)


def test_the_module_and_a_graph():
    """The same codes of the norm as of a kernel of its own, which adds up alike; a graph replays with other lengths."""
    offsets = offsets_of([100, 28, 0, 200])
    x, gain, w = operands(400, 400, 384, 384, "random")
    made = projection_weight(w.float(), gain, 3, "bf16", (32, 128), rotate=True, centred=True)

    def call():
        return rmsnorm_project(x, gain, made.rounded, made.bound, EPS, offsets, copy_heads=3)

    def apart():
        norm = rmsnorm_center_quantize(x, gain, EPS, offsets, (0, 128), keep=True, copy_heads=3)
        return norm, gemm_quantize(norm.normed, made.rounded, (0, 128), offsets=offsets, exponent=made.bound)

    def same(got):
        norm, product = apart()
        assert torch.equal(got.norm.xn.codes, norm.xn.codes) and torch.equal(got.norm.xn.scale_bytes, norm.xn.scale_bytes)
        assert torch.equal(got.norm.xn.transposed, norm.xn.transposed) and torch.equal(got.norm.mean, norm.mean)
        assert torch.equal(got.norm.rstd, norm.rstd)
        assert float((got.product.codes != product.codes).float().mean()) <= OF_BF16
        assert int((got.product.codes & 0x7F).max()) < 0x7E  # nothing clips

    same(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            got = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    offsets.copy_(offsets_of([0, 300, 1, 60]))
    graph.replay()
    same(got)


def test_wide_rows_go_through_two_kernels():
    """512 columns: norm and product in turn."""
    offsets, used = offsets_of(LENGTHS), sum(LENGTHS)
    x, gain, w = operands(used + 50, used, 512, 512, "random")
    given = projection_exponent(gain, w, 128, centred=True)
    got = rmsnorm_project(x, gain, w, given, EPS, offsets)
    norm = rmsnorm_center_quantize(x, gain, EPS, offsets, (0, 128), keep=True)
    product = gemm_quantize(norm.normed, w, (0, 128), offsets=offsets, exponent=given)
    assert torch.equal(got.norm.xn.codes, norm.xn.codes) and torch.equal(got.product.codes, product.codes)
