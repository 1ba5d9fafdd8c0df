"""The projection whose epilogue quantizes, on the device: bytes against FP64 sums (``tests.fused_ops.kernel_cases.check_product``)."""

import pytest
import torch

from fused_ops import gemm_quantize, projection_weight, rmsnorm_center_quantize
from fused_ops.gemm_quantize.interface import projection_exponent
from fused_ops.hadamard import rotate_rows
from fused_ops.operands import split_e4m3, to_float
from lp_fa4.mx import MXTensor, quantize_mx
from tests.fused_ops.kernel_cases import check_product, operands
from tests.gpu.problems import DEVICE, offsets_of, poison

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 4095, 0)
APART = 0.01
"""Share of codes that may not be the definition's: sums that lie within 2^-12 of themselves of a boundary, eight boundaries an octave."""

# K, N, form, block of x, block of w, block of the result
CASES = [
    (384, 384, "e4m3x2", (0, 128), (32, 128), (0, 128)),
    (384, 384, "bf16", None, None, (0, 128)),
    (512, 512, "e4m3x2", (0, 128), (32, 128), (0, 128)),
    (512, 512, "bf16", None, None, (32, 128)),
    (128, 128, "e4m3x2", (32, 128), (32, 128), (32, 128)),
    (128, 384, "e4m3", (32, 32), (32, 32), (32, 32)),
    (384, 128, "e4m3x2", (32, 32), (32, 32), (128, 64)),
    (1024, 1024, "e4m3", (32, 128), (128, 128), (128, 128)),
    (1024, 1024, "e4m3x2", (0, 64), (32, 1024), (32, 64)),
    (1024, 512, "bf16", None, None, (32, 32)),
    (96, 160, "e4m3x2", (32, 96), (32, 32), (32, 32)),
    (32, 96, "bf16", None, None, (0, 96)),
    (2048, 64, "e4m3x2", (128, 512), (32, 512), (32, 32)),
    (512, 512, "bf16", None, None, (0, 128)),
    (256, 640, "bf16", None, None, (0, 64)),
    (96, 224, "bf16", None, None, (0, 32)),
    (128, 224, "e4m3x2", (0, 64), (32, 64), (0, 32)),
    (64, 576, "e4m3", (32, 32), (32, 64), (0, 96)),
    (384, 384, "e4m3x2 bounded", (0, 384), (32, 384), (0, 128)),
    (512, 512, "e4m3x2 bounded", (0, 512), (32, 512), (0, 128)),
    (512, 512, "e4m3 bounded", (0, 512), (32, 512), (0, 128)),
    (160, 224, "e4m3x2 bounded", (0, 160), (32, 160), (0, 32)),
    (1024, 96, "e4m3x2 bounded", (0, 1024), (32, 1024), (0, 96)),
    (512, 512, "e4m3x2 bounded", (0, 128), (32, 512), (0, 128)),
    (384, 384, "e4m3x2", (0, 384), (32, 384), (0, 128)),
]
"""Pairs of CTAs that share x, column tiles that the columns do not fill, an odd number of them; sums in FP16; what would be such sums but
for exponents of x that differ, or a weight whose rows are too long."""
APART_HALVES = 0.03
"""Where sums are FP16 ones, rounded to 2^-12 of themselves 24 to 64 times."""


def run(x, w, block, offsets, exponent):
    """The kernel's codes and scales, memory poisoned before."""
    poison()
    kwargs = {} if isinstance(x, MXTensor) else dict(offsets=offsets)
    return gemm_quantize(x, w, block, exponent=exponent, backend="sm90", **kwargs)


def given(block, columns):
    """Exponents for a static result, one of them small on purpose: large values saturate."""
    if block[0]:
        return None
    exponent = torch.full((columns // block[1],), 6, dtype=torch.int32, device=DEVICE)
    exponent[:1] -= 9
    return exponent


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_bytes(case):
    contracted, columns, form, x_block, w_block, block = case
    offsets, used = offsets_of(LENGTHS), sum(LENGTHS)
    x, w = operands(used + 50, used, contracted, columns, form, x_block, w_block, offsets, 0, False, str(DEVICE))
    for row in (40, 300, 700):
        (x if form == "bf16" else x.codes)[row, row % contracted] = torch.nan if form == "bf16" else 0x7F
    exponent = given(block, columns)
    for lower in (0, 12) if form == "bf16" and exponent is not None else (0,):  # up to 0 they are multiplied into the weight
        some = exponent if exponent is None else exponent - lower
        got = run(x, w, block, offsets, some)
        apart = check_product(x, w, block, offsets, some, got.codes, got.scale_bytes)
        assert apart <= (APART_HALVES if form.endswith("bounded") else APART), apart
        again = run(x, w, block, offsets, some)
        assert torch.equal(got.codes, again.codes) and torch.equal(got.scale_bytes, again.scale_bytes)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES[:9], ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
def test_exact_sums_give_the_bytes_of_the_definition(case, seed):
    """``seed`` 1: the low part of a weight has scales of its own."""
    contracted, columns, form, x_block, w_block, block = case
    for tokens in (0, 1, 31, 33, 4095):
        lengths = [tokens] if tokens < 4095 else [0, 4095 - 640, 0, 512, 127, 1, 0]
        offsets = offsets_of(lengths)
        x, w = operands(tokens + 5, tokens, contracted, columns, form, x_block, w_block, offsets, seed, True, str(DEVICE))
        exponent = given(block, columns)
        got = run(x, w, block, offsets, exponent)
        check_product(x, w, block, offsets, exponent, got.codes, got.scale_bytes, exact=True)


@pytest.mark.parametrize("contracted", [128, 384, 512, 1024])
def test_a_million_rows_and_three(contracted, one_at_a_time):
    """Every byte, sequence by sequence, for the definition is FP64 here; blocks of 32 tokens and, at 384, the module's static ones."""
    lengths = [1_000_003 - 50_000 * 17, *[50_000] * 17]
    offsets = offsets_of(lengths)
    heads = 64 if contracted == 1024 else 128  # columns whose weights fit the shared memory
    for x_block, block in (((32, 128), (32, heads)), ((0, 128), (0, heads)))[: 2 if contracted == 384 else 1]:
        x, w = operands(1_000_003, 1_000_003, contracted, 128, "e4m3x2", x_block, (32, 128), offsets, 0, False, str(DEVICE))
        got, begin = run(x, w, block, offsets, given(block, 128)), 0
        for b, n in enumerate(lengths):
            row, part, alone = begin // 32 + b, slice(begin, begin + n), offsets_of([n])
            rows = slice(row, row + n // 32 + 1)
            left = MXTensor.from_bytes(x.codes[part], x.scale_bytes if x_block[0] == 0 else x.scale_bytes[rows], x_block, alone)
            scales = got.scale_bytes if block[0] == 0 else got.scale_bytes[rows]
            assert check_product(left, w, block, alone, given(block, 128), got.codes[part], scales) <= APART
            begin += n


def test_exponents_far_below_the_sums():
    """Where a sum under the inverse of its exponent passes FP32's end, codes are NaN; where it is only large, they saturate; 0 stays 0."""
    codes = torch.randint(-1, 2, (200, 128), device=DEVICE).float().to(torch.float8_e4m3fn).view(torch.uint8)
    codes[7] = 0
    w = split_e4m3(torch.randint(-1, 2, (128, 128), device=DEVICE).float(), (32, 128))
    scale = torch.full((1, 1), 127, device=DEVICE, dtype=torch.uint8)
    for exponent in (-60, -90, -120, -126):
        for base in (0, 20, 60):
            x = MXTensor.from_bytes(codes, scale + base, (0, 128), offsets_of([150, 50]))
            e = torch.tensor([exponent], dtype=torch.int32, device=DEVICE)
            got = run(x, w, (0, 128), None, e)
            want = gemm_quantize(x, w, (0, 128), exponent=e, backend="reference")
            assert torch.equal(got.codes, want.codes), (exponent, base)


@pytest.mark.parametrize("exponent", [-60, -6, 0, 6])
def test_bf16_near_fp32s_ends(exponent):
    """Weights that pass BF16's end over their exponents, sums that pass FP32's, sums whose products would, small ones."""
    offsets, e = offsets_of([150, 50]), torch.tensor([exponent], dtype=torch.int32, device=DEVICE)
    for of_x, of_w, least in ((-100, 100, -1), (60, 40, -1), (100, 100, 0), (-60, -50, -1)):
        x, w = (torch.randint(least, 2, (rows, 128), device=DEVICE).float() for rows in (200, 128))
        x, w = (x * 2.0**of_x).bfloat16(), (w * 2.0**of_w).bfloat16()
        x[7] = 0
        got = run(x, w, (0, 128), offsets, e)
        want = gemm_quantize(x, w, (0, 128), offsets=offsets, exponent=e, backend="reference")
        assert torch.equal(got.codes, want.codes), (of_x, of_w)


def test_offsets_past_two_to_the_31(one_at_a_time):
    """6 M rows of 384: the last rows equal those of a call of their own."""
    rows, tail = 6_000_000, 5_000
    codes = torch.zeros(rows, 384, device=DEVICE, dtype=torch.uint8)
    codes[-tail:] = torch.randn(tail, 384, device=DEVICE).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.full((1, 3), 127, device=DEVICE, dtype=torch.uint8)
    weight = split_e4m3(torch.randn(384, 384, device=DEVICE), (32, 128))
    results = []
    for part, offsets in ((codes, offsets_of([rows - tail, tail])), (codes[-tail:].clone(), offsets_of([0, tail]))):
        results.append(run(MXTensor.from_bytes(part, scale, (0, 128), offsets), weight, (0, 128), None, given((0, 128), 384)))
    assert torch.equal(results[0].codes[-tail:], results[1].codes) and bool((results[0].codes[:-tail] & 0x7F == 0).all())


def test_strided_rows():
    x = torch.randn(300, 384, device=DEVICE)
    weight = torch.randn(128, 384, device=DEVICE).bfloat16()
    want = gemm_quantize(x.bfloat16(), weight, backend="sm90")
    for pad in (16, 3):
        wide = torch.full((300, 384 + pad), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        wide[:, :384] = x
        assert torch.equal(gemm_quantize(wide[:, :384], weight, backend="sm90").codes, want.codes)
    assert torch.equal(gemm_quantize(x.bfloat16().t().contiguous().t(), weight, backend="sm90").codes, want.codes)
    repeated = x[:1].bfloat16().expand(300, 384)
    assert torch.equal(
        gemm_quantize(repeated, weight, backend="sm90").codes, gemm_quantize(repeated.contiguous(), weight, backend="sm90").codes
    )


def test_the_modules_projection_and_a_graph():
    """Norm and projection with static exponents: nothing clips, "auto" takes the kernel, a graph replays with other lengths."""
    offsets = offsets_of([100, 28, 0, 200])
    x, gain = torch.randn(400, 384, device=DEVICE).bfloat16(), torch.rand(384, device=DEVICE) + 0.5
    w = torch.randn(384, 384, device=DEVICE) / 20
    pair = split_e4m3(w, (32, 128))
    exponent = projection_exponent(gain, w, 128, centred=True)

    def call():
        norm = rmsnorm_center_quantize(x, gain, offsets=offsets, block=(0, 128))
        return norm.xn, gemm_quantize(norm.xn, pair, (0, 128), exponent=exponent)

    xn, got = call()
    assert check_product(xn, pair, (0, 128), offsets, exponent, got.codes, got.scale_bytes) <= APART
    assert int((got.codes & 0x7F).max()) < 0x7E
    assert torch.equal(got.codes, gemm_quantize(xn, pair, (0, 128), exponent=exponent, backend="sm90").codes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        xn, got = call()
    offsets.copy_(offsets_of([0, 300, 1, 60]))
    graph.replay()
    assert check_product(xn, pair, (0, 128), offsets, exponent, got.codes, got.scale_bytes) <= APART


@pytest.mark.parametrize("form", ["e4m3x2", "e4m3"])
def test_bounded_rows(form):
    """The longest sums that a bounded weight can make, of codes of one sign and 448, do not leave FP16, whatever the exponents; a NaN stays
    in its row; and such a weight's bytes on the device are the reference's."""
    offsets, gain = offsets_of([130, 70]), torch.ones(512, device=DEVICE)
    w = torch.rand(512, 512, device=DEVICE) + 0.5
    made, theirs = (projection_weight(w, gain, 4, form, (32, 512), bounded=True, backend=b).weight for b in ("sm90", "reference"))
    pairs = [m if isinstance(m, tuple) else (m,) for m in (made, theirs)]
    for a, b in zip(*pairs, strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scale_bytes, b.scale_bytes)
    codes = torch.full((200, 512), 0x7E, dtype=torch.uint8, device=DEVICE)
    codes[3], codes[70] = 0xFE, codes[70] ^ (torch.arange(512, device=DEVICE) % 2 * 0x80).to(torch.uint8)
    codes[9, 100] = 0x7F
    x = MXTensor.from_bytes(codes, torch.full((1, 1), 127, dtype=torch.uint8, device=DEVICE), (0, 512), offsets)
    for shift in (10, 20, 8, -10, -60):
        exponent = torch.full((4,), shift, dtype=torch.int32, device=DEVICE)
        got = run(x, made, (0, 128), None, exponent)
        assert check_product(x, made, (0, 128), offsets, exponent, got.codes, got.scale_bytes) <= APART_HALVES
        assert bool((got.codes[9] == 0x7F).all()) and int((got.codes[:9] == 0x7F).sum()) == 0


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("form", ["e4m3x2", "e4m3", "bf16"])
def test_weight(form, rotate):
    """The device's transform adds up in another order than a product with the matrix: a few codes differ, their sums do not."""
    w, gain = torch.randn(384, 384, device=DEVICE) / 20, torch.rand(384, device=DEVICE) + 0.5
    poison()
    (mine, bound, _), (theirs, wanted, _) = (
        projection_weight(w, gain, 3, form, (32, 128), rotate=rotate, centred=True, backend=b) for b in ("sm90", "reference")
    )
    assert torch.equal(bound, wanted)
    exact = rotate_rows(w, 3) if rotate else w
    for part in (mine, theirs):
        error = (to_float(part) - exact).norm() / exact.norm()
        assert float(error) < {"e4m3x2": 4e-3, "bf16": 3e-3, "e4m3": 4e-2}[form]
    if not rotate and form != "bf16":
        for a, b in zip(*((m if isinstance(m, tuple) else (m,)) for m in (mine, theirs)), strict=True):
            assert torch.equal(a.codes, b.codes) and torch.equal(a.scale_bytes, b.scale_bytes)


def test_what_no_kernel_serves_is_said():
    x = torch.randn(40, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"backend='sm90' cannot serve gemm_quantize: x and w are torch.float32"):
        gemm_quantize(x, torch.randn(64, 64, device=DEVICE), backend="sm90")
    assert torch.equal(gemm_quantize(x, x).codes, quantize_mx(x @ x.t(), (32, 32)).codes)  # "auto": the reference, and a warning says so
