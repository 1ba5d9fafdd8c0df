"""Norm and projection as one operation: the same bytes as the two, whatever serves it."""

import pytest
import torch
from torch.library import opcheck

from fused_ops import gemm_quantize, projection_weight, rmsnorm_center_quantize, rmsnorm_project
from fused_ops.norm_projection.config import MAX_COLUMNS, NORM_WARPS, REGISTERS, THREADS, ProjectionSpec, unsupported
from fused_ops.norm_projection.interface import rmsnorm_project_op
from tests.fused_ops.common import assert_same_bytes, hostile

EPS = 1e-6


def operands(columns: int = 64, rows: int = 96, dtype: torch.dtype = torch.bfloat16):
    x, offsets, _ = hostile(columns, dtype)
    gain, w = torch.rand(columns) + 0.5, torch.randn(rows, columns)
    made = projection_weight(w, gain, rows // 32, "bf16", (32, 32), centred=True)
    return x, offsets, gain, made


@pytest.mark.parametrize("jagged", [True, False])
@pytest.mark.parametrize("copy_heads", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_is_the_norm_and_the_product_of_its_rows(jagged, copy_heads, dtype):
    x, offsets, gain, made = operands(dtype=dtype)
    if not jagged:
        x, offsets = x[: int(offsets[-1])], None
    got = rmsnorm_project(x, gain, made.rounded, made.bound, EPS, offsets, width=32, product_width=32, copy_heads=copy_heads)
    norm = rmsnorm_center_quantize(x, gain, EPS, offsets, (0, 32), keep=True, copy_heads=copy_heads)
    product = gemm_quantize(norm.normed, made.rounded, (0, 32), offsets=offsets, exponent=made.bound)
    assert_same_bytes(got.norm.xn, norm.xn)
    assert_same_bytes(got.product, product)
    for name in ("rstd", "mean", "total"):
        assert torch.equal(getattr(got.norm, name), getattr(norm, name)), name
    assert got.norm.normed is None
    if copy_heads:
        assert torch.equal(got.norm.xn.transposed, norm.xn.transposed)


def bytes_of(made):
    norm = made.norm
    return norm.xn.codes, norm.xn.scale_bytes, norm.rstd, norm.mean, norm.total, made.product.codes, made.product.scale_bytes


def test_equal_values_of_another_dtype_are_equal():
    """FP32 rows are normed as they are and rounded once: BF16 values give the bits that BF16 rows give, values between them do not."""
    x, offsets, gain, made = operands()
    fine = x.float() * (1 + 2.0**-10)  # a fourth of a BF16 step above

    def call(rows):
        return bytes_of(rmsnorm_project(rows, gain, made.rounded, made.bound, EPS, offsets, width=32, product_width=32))

    for got, want in zip(call(x.float()), call(x), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(fine.bfloat16().nan_to_num(), x.nan_to_num())
    assert not torch.equal(call(fine)[2].view(torch.int32), call(x)[2].view(torch.int32))


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing(tokens):
    gain, w = torch.ones(64), torch.ones(32, 64, dtype=torch.bfloat16)
    got = rmsnorm_project(
        torch.full((tokens, 64), torch.nan).bfloat16(), gain, w, 0, offsets=torch.zeros(3, dtype=torch.int32), product_width=32, width=64
    )
    assert got.product.shape == (tokens, 32) and not got.product.codes.any() and not got.norm.rstd.any()
    assert got.norm.total.shape == (2, 64) and not got.norm.total.any()


def test_operator():
    x, offsets, gain, made = operands()
    given = torch.tensor([3, 4])
    opcheck(rmsnorm_project_op, (x, gain, made.rounded, EPS, offsets, 32, given, 32, made.bound))
    opcheck(rmsnorm_project_op, (x[: int(offsets[-1])], gain, made.rounded, EPS, None, 32, None, 96, torch.tensor(5), 2))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (dict(w=torch.ones(32, 64)), "w is"),
        (dict(w=torch.ones(32, 32).bfloat16()), "w has shape"),
        (dict(x=torch.ones(2, 3, 64).bfloat16()), "x has shape"),
        (dict(product_width=24), "product_width is 24"),
        (dict(width=48), "block is"),
        (dict(copy_heads=3), "copy_heads is 3"),
        (dict(product_exponent=300), "exponent"),
        (dict(backend="sm91"), "backend is"),
        (dict(backend="sm90"), "cannot serve"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_errors(change, word):
    given = dict(x=torch.ones(4, 64).bfloat16(), weight=torch.ones(64), w=torch.ones(32, 64).bfloat16(), product_exponent=4, width=64)
    with pytest.raises((TypeError, ValueError), match=word):
        rmsnorm_project(**{"product_width": 32, **given, **change})


def test_what_one_kernel_serves():
    spec = dict(contracted=384, columns=384, weight_dtype="float32", norm_width=128, width=128, dense=False)
    for dtype in ("bfloat16", "float32", "float16"):
        assert unsupported(ProjectionSpec(**spec, dtype=dtype)) == ""
    for change, word in (
        (dict(contracted=MAX_COLUMNS + 64), "448 columns"),
        (dict(contracted=96), "96 columns"),
        (dict(dtype="float64"), "dtype float64"),
        (dict(columns=96), "96 rows"),
        (dict(norm_width=48), "blocks of x are 48"),
        (dict(width=48), "blocks of the product are 48"),
    ):
        assert word in unsupported(ProjectionSpec(**{**spec, **change}))
    for contracted in range(64, MAX_COLUMNS + 1, 64):
        for columns in (64, 128, 192, 384, 4096):
            made = ProjectionSpec(**{**spec, "contracted": contracted, "columns": columns})
            assert made.pieces >= 4 and made.columns == made.column_tile * made.column_tiles


def test_registers_are_shared_out():
    """What the roles ask for together is no more than the launch gave the CTA: a multiprocessor's, by whole eights a thread."""
    for norm, load, multiply in REGISTERS.values():
        assert 32 * NORM_WARPS * norm + 128 * load + 256 * multiply <= THREADS * (65536 // THREADS // 8 * 8)
