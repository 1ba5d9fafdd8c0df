"""The fused norm and the scale scatter on the device: bits against the definition (``tests.fused_ops.kernel_cases.check_norm``)."""

import pytest
import torch

from fused_ops import gather_scales, rmsnorm_center_quantize, rmsnorm_center_scatter, rmsnorm_quantize, scatter_scales
from fused_ops.rmsnorm_quantize.interface import norm_exponent
from lp_fa4.mx import MXTensor
from tests.gpu.problems import DEVICE, offsets_of, poison, rows_of_kind

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 640, 4095, 0)


COLUMNS = {torch.bfloat16: (32, 96, 128, 384, 512, 1024, 2880, 8192), torch.float16: (384,), torch.float32: (96, 384, 8192)}


@pytest.mark.parametrize(("dtype", "columns"), [(dtype, columns) for dtype, widths in COLUMNS.items() for columns in widths])
@pytest.mark.parametrize("block", [(32, 32), (0, 32), (32, 0), (128, 0)])
def test_bits_of_the_definition(dtype, columns, block):
    from fused_ops.rmsnorm_quantize.kernel import rmsnorm_quantize as kernel
    from tests.fused_ops.kernel_cases import EPS, check_norm, values

    block = (block[0], block[1] or columns)
    offsets, used = offsets_of(LENGTHS), sum(LENGTHS)
    weight = torch.rand(columns, device=DEVICE) + 0.5
    # Swizzled scales, and not: two kernels.
    for center, keep, axes in ((False, True, (0, 1)), (True, True, ()), (False, False, ())):
        x = values(used + 50, columns, dtype, used, 0, str(DEVICE))
        for row, bad in zip((40, 300, 700), (torch.nan, torch.inf, -torch.inf), strict=True):
            x[row, row % columns] = bad
        exponent = norm_exponent(weight, block[1], centred=center) if block[0] == 0 else None
        poison()
        got = kernel(x, weight, EPS, offsets, block, exponent, center, keep, axes)
        check_norm(x, weight, offsets, block, exponent, center, keep, got)


@pytest.mark.parametrize("columns", [128, 384, 512, 1024])
@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 4095])
def test_bits_at_every_size(tokens, columns):
    from fused_ops.rmsnorm_quantize.kernel import rmsnorm_quantize as kernel
    from tests.fused_ops.kernel_cases import EPS, check_norm

    weight = torch.rand(columns, device=DEVICE) + 0.5
    offsets = offsets_of([tokens] if tokens < 4095 else [0, 4095 - 640, 0, 512, 127, 1, 0])
    for kind in ("random", "outlier", "spread", "not finite"):
        x = rows_of_kind(kind, tokens + 40, tokens, columns)
        for block, center, heads in (((32, 32), False, 0), ((0, 128), True, columns // 128), ((32, 128), True, 0)):
            exponent = norm_exponent(weight, block[1], centred=center) if block[0] == 0 else None
            poison(4)
            got = kernel(x, weight, EPS, offsets, block, exponent, center, False, (), heads)
            check_norm(x, weight, offsets, block, exponent, center, False, got)


@pytest.mark.parametrize("columns", [128, 384, 512, 1024])
def test_a_million_rows_and_three(columns, one_at_a_time):
    """All bits, sequence by sequence (groups are a sequence's own), for the definition holds many copies of what it looks at."""
    from fused_ops.rmsnorm_quantize.kernel import rmsnorm_quantize as kernel
    from tests.fused_ops.kernel_cases import EPS, check_norm, values

    lengths = [1_000_003 - 50_000 * 17, *[50_000] * 17]
    offsets, x = offsets_of(lengths), values(1_000_003, columns, torch.bfloat16, 1_000_003, 0, str(DEVICE))
    weight = torch.rand(columns, device=DEVICE) + 0.5
    for block, center in (((32, 32), False), ((0, 128), True)):
        exponent = norm_exponent(weight, block[1], centred=center) if block[0] == 0 else None
        got, begin = kernel(x, weight, EPS, offsets, block, exponent, center, False), 0
        for b, n in enumerate(lengths):
            row, part = begin // 32 + b, slice(begin, begin + n)
            mine = got._replace(
                codes=got.codes[part],
                scales=got.scales if block[0] == 0 else got.scales[row : row + n // 32 + 1],
                rstd=got.rstd[part],
                mean=got.mean[b : b + 1] if center else None,
                total=got.total[b : b + 1] if center else None,
            )
            check_norm(x[part], weight, offsets_of([n]), block, exponent, center, False, mine)
            begin += n


def test_offsets_past_two_to_the_31(one_at_a_time):
    """6 M rows of 384: the last rows equal those of a call of their own, the copy with tokens innermost too."""
    rows, tail = 6_000_000, 5_000
    x = torch.zeros(rows, 384, device=DEVICE, dtype=torch.bfloat16)
    x[-tail:] = torch.randn(tail, 384, device=DEVICE)
    weight = torch.rand(384, device=DEVICE) + 0.5
    big, _ = rmsnorm_quantize(x, weight, offsets=torch.tensor([0, rows - tail, rows], device=DEVICE))
    small, _ = rmsnorm_quantize(x[-tail:].clone(), weight, offsets=torch.tensor([0, tail], device=DEVICE))
    assert torch.equal(big.codes[-tail:], small.codes)
    first = (rows - tail) // 32 + 1
    assert torch.equal(big.scale_bytes[first : first + tail // 32], small.scale_bytes[: tail // 32])
    del big
    large = rmsnorm_center_quantize(x, weight, offsets=torch.tensor([0, rows - tail, rows], device=DEVICE), block=(0, 128), copy_heads=3)
    alone = rmsnorm_center_quantize(x[-tail:].clone(), weight, offsets=torch.tensor([0, tail], device=DEVICE), block=(0, 128), copy_heads=3)
    assert torch.equal(large.xn.codes[-tail:], alone.xn.codes) and torch.equal(large.total[1:], alone.total)
    used = -(-tail // 32) * 32
    assert torch.equal(large.xn.transposed[..., 32 * first : 32 * first + used], alone.xn.transposed[..., :used])


@pytest.mark.parametrize("block", [(32, 32), (0, 128), (128, 128)])
def test_strided_and_repeated_rows(block):
    """Rows apart, one row for all (stride 0), columns apart: as of a compact copy."""
    x, weight = torch.randn(300, 768, device=DEVICE).bfloat16(), torch.rand(384, device=DEVICE) + 0.5
    offsets = offsets_of([100, 0, 200])
    for rows in (x[:, :384], x[:, 8:392], x[:, 3:387], x[:1, :384].expand(300, 384), x[:, :384].t().contiguous().t(), x[:, ::2]):
        mine, theirs = (rmsnorm_center_quantize(r, weight, offsets=offsets, block=block) for r in (rows, rows.contiguous()))
        assert torch.equal(mine.xn.codes, theirs.xn.codes) and torch.equal(mine.xn.scale_bytes, theirs.xn.scale_bytes)
        assert torch.equal(mine.rstd, theirs.rstd) and torch.equal(mine.total, theirs.total)


def test_public_functions_choose_the_kernel_and_repeat_bitwise():
    offsets = offsets_of(LENGTHS)
    x, weight = torch.randn(sum(LENGTHS), 384, device=DEVICE).bfloat16(), torch.rand(384, device=DEVICE) + 0.5
    norm, atoms = rmsnorm_center_scatter(x, weight, offsets=offsets)
    for axis in (0, 1):
        scattered = scatter_scales(norm.xn, axis)
        assert torch.equal(scattered, atoms[axis])
        assert torch.equal(scattered, scatter_scales(norm.xn, axis, backend="reference"))
    again = rmsnorm_center_quantize(x, weight, offsets=offsets)
    assert torch.equal(again.total, norm.total) and torch.equal(again.xn.codes, norm.xn.codes)
    plain = rmsnorm_center_quantize(x, weight, offsets=offsets, backend="reference")
    apart = (plain.xn.codes != norm.xn.codes).float().mean()
    assert float(apart) < 2e-3


@pytest.mark.parametrize("axis", [0, 1])
def test_swizzle_of_every_small_shape(axis):
    """Every M up to 300 and every number of scale columns that K up to 640 has (the last may be of fewer than 32 columns): there and back;
    every 13th M against the definition."""
    bytes_ = torch.randint(1, 255, (10, 20), dtype=torch.uint8, device=DEVICE)
    for tokens in range(1, 301):
        for columns in range(32 - tokens % 32, 641, 32):
            scale = bytes_[: -(-tokens // 32), : -(-columns // 32)].contiguous()
            x = MXTensor.from_bytes(torch.zeros(tokens, columns, dtype=torch.uint8, device=DEVICE), scale, (32, 32))
            made = scatter_scales(x, axis)
            assert torch.equal(gather_scales(made, tokens, columns, axis=axis).view(torch.uint8), scale)
            if tokens % 13 == 1:
                assert torch.equal(made, scatter_scales(x, axis, backend="reference"))


def test_graph_replays_with_other_lengths():
    offsets = offsets_of([100, 28, 0, 200])
    x, weight = torch.randn(400, 384, device=DEVICE).bfloat16(), torch.rand(384, device=DEVICE) + 0.5
    rmsnorm_center_quantize(x, weight, offsets=offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rmsnorm_center_quantize(x, weight, offsets=offsets)
    offsets.copy_(offsets_of([0, 300, 1, 60]))
    graph.replay()
    want = rmsnorm_center_quantize(x, weight, offsets=offsets)
    assert torch.equal(got.xn.codes, want.xn.codes) and torch.equal(got.xn.scale_bytes, want.xn.scale_bytes)
    assert torch.equal(got.mean, want.mean) and torch.equal(got.total, want.total)


@pytest.mark.parametrize(("columns", "heads"), [(64, 1), (192, 3), (320, 5), (384, 3), (512, 4), (384, 6), (1024, 8), (2048, 16)])
@pytest.mark.parametrize("block", [(0, 128), (32, 64)])
def test_copy_with_tokens_innermost(columns, heads, block):
    """It is the copy that the attention's own kernel would make, for every length and for slack."""
    from lp_fa4.sm90.transpose import transposed_copy

    block, offsets = (block[0], min(block[1], columns // heads)), offsets_of(LENGTHS)
    x, weight = torch.randn(sum(LENGTHS) + 70, columns, device=DEVICE).bfloat16(), torch.rand(columns, device=DEVICE) + 0.5
    x[sum(LENGTHS) :] = torch.nan
    poison()
    got = rmsnorm_center_quantize(x, weight, offsets=offsets, block=block, copy_heads=heads)
    assert torch.equal(got.xn.transposed, transposed_copy(got.xn.codes.unflatten(1, (heads, -1)), offsets, "accumulator"))
    plain = rmsnorm_center_quantize(x, weight, offsets=offsets, block=block)
    assert torch.equal(plain.xn.codes, got.xn.codes) and torch.equal(plain.total, got.total)
