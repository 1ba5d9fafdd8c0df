"""GEMM + quantize: FP32 sums, amax and rounding from FP32, exact weights in two forms."""

import pytest
import torch
from torch.library import opcheck

from fused_ops import gemm_quantize, gemm_quantize_scatter, projection_weight, scatter_scales
from fused_ops.gemm_quantize.config import SHARED_BYTES, GemmSpec, unsupported
from fused_ops.gemm_quantize.interface import gemm_quantize_op, projection_exponent
from fused_ops.hadamard import rotate_rows
from fused_ops.operands import flatten, split_e4m3, to_float
from lp_fa4.mx import quantize_mx
from tests.conftest import offsets_of
from tests.fused_ops.common import assert_same_bytes, db, hostile, rows_of


@pytest.mark.parametrize("block", [(32, 32), (32, 96), (128, 96)])
def test_identity_weight_is_the_quantizer(block):
    x, offsets, _ = hostile(96)
    x8 = quantize_mx(x, (32, 32), offsets)
    want = quantize_mx(x8.dequantize() + 0.0, block, offsets)  # a sum of products has no -0
    assert_same_bytes(gemm_quantize(x8, torch.eye(96), block), want)
    assert_same_bytes(gemm_quantize(x8, quantize_mx(torch.eye(96)), block), want)


def test_amax_is_fp32():
    """C5: 448 + 0.5 leaves the accumulator as 448.5; BF16 would round it to 448 and the byte to 127."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([448.0, 0.5])
    w = torch.zeros(32, 32)
    w[0, :2] = 1.0
    assert gemm_quantize(x, w).scale_bytes.tolist() == [[128]]
    x[0, 1] = 0.0
    assert gemm_quantize(x, w).scale_bytes.tolist() == [[127]]


def test_forms_of_the_weight():
    """One E4M3 rounding of W costs what its 31 dB say; hi + lo and BF16 cost nothing beside the result's own rounding."""
    x, offsets, used = hostile(256)
    w = torch.randn(128, 256)
    x8 = quantize_mx(x, (32, 32), offsets)
    exact = x8.dequantize().double() @ w.double().t()
    ratio = {
        name: db(gemm_quantize(x8, form).dequantize()[:used], exact[:used])
        for name, form in (("fp32", w), ("bf16", w.bfloat16()), ("pair", split_e4m3(w)), ("single", quantize_mx(w)))
    }
    assert ratio["fp32"] > 30
    assert ratio["bf16"] > ratio["fp32"] - 0.1 and ratio["pair"] > ratio["fp32"] - 0.1
    assert ratio["single"] < ratio["fp32"] - 2
    hi, lo = split_e4m3(w)
    assert db(hi.dequantize() + lo.dequantize(), w) > 55  # 4 + 4 significant bits and a sign


@pytest.mark.parametrize("kind", ["randn", "constant", "one large", "small", "zeros"])
@pytest.mark.parametrize("columns", [32, 384, 1024])
def test_bounded_rows(kind, columns):
    """Codes of a row sum to less than 143 in every block, and to no less than half of what is allowed if the block is not too small; the
    pair is as near to the weight as 2^-10 of a unit."""
    w = torch.randn(96, columns) * torch.exp2(torch.randint(-3, 4, (96, 1)))
    w = {"randn": w, "constant": torch.ones(96, columns), "one large": w, "small": w * 2.0**-100, "zeros": torch.zeros_like(w)}[kind]
    if kind == "one large":
        w[40] *= 2.0**20
    hi, lo = pair = split_e4m3(w, (32, columns), bounded=True)
    assert hi.scale is lo.scale or torch.equal(hi.scale_bytes, lo.scale_bytes)
    sums = sum(part.codes.view(torch.float8_e4m3fn).double().abs().sum(dim=1) for part in pair).unflatten(0, (-1, 32)).amax(dim=1)
    assert float(sums.max()) <= 142.5
    assert kind == "zeros" or columns == 32 or float(sums.min()) > 125 / 2 * 0.9
    unit = torch.exp2(hi.scale_bytes.double() - 127).repeat_interleave(32, 0)
    assert bool(((to_float(pair).double() - w).abs() <= unit * 2.0**-10 + w.abs() * 2.0**-8).all())


def test_bounded_rows_refuse_parts_of_rows():
    w = torch.randn(32, 64)
    for block, wide in (((32, 32), w), ((32, 1056), torch.randn(32, 1056))):
        with pytest.raises(ValueError, match="allowed are whole rows, up to 1024 columns"):
            split_e4m3(wide, block, bounded=True)
        with pytest.raises(ValueError, match="allowed are whole rows, up to 1024 columns"):
            projection_weight(wide, torch.ones(wide.shape[1]), 1, "e4m3x2", block, bounded=True)
    assert projection_weight(w, torch.ones(64), 1, "bf16", (32, 32), bounded=True).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["mx", "bf16"])
@pytest.mark.parametrize("block", [(32, 32), (128, 64), (0, 64)])
def test_isolation_and_tail(form, block):
    lengths = [31, 33, 1, 32, 127, 129]
    x, offsets, used = hostile(64, lengths=lengths)
    w = torch.randn(64, 64)
    exponent = 20 if block[0] == 0 else None

    def run(values):
        operand = quantize_mx(values, (32, 32), offsets) if form == "mx" else values.bfloat16()
        return gemm_quantize(operand, w.bfloat16(), block, offsets=None if form == "mx" else offsets, exponent=exponent)

    clean = run(x)
    assert (clean.codes[used:] == 0).all()
    for victim in range(len(lengths)):
        for change in (1e4, torch.nan):
            other = x.clone()
            other[offsets[victim] : offsets[victim + 1]] *= change
            got = run(other)
            for b in set(range(len(lengths))) - {victim}:
                for mine, theirs in zip(rows_of(got, b, offsets), rows_of(clean, b, offsets), strict=True):
                    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("lengths", [[], [0], [0] * 8])
def test_nothing(lengths):
    x = torch.zeros(0, 64)
    offsets = offsets_of(lengths)
    got = gemm_quantize(quantize_mx(x, (32, 32), offsets), torch.randn(96, 64))
    assert got.shape == (0, 96) and got.offsets is offsets
    assert gemm_quantize(x, torch.randn(96, 64)).shape == (0, 96)


def test_static_bound():
    """|xn @ w_j| <= sqrt(C) |g * w_j|: attained by a row along g * w_j, so the bound is as tight as one number can be."""
    g, w = torch.rand(64) + 0.5, torch.randn(32, 64)
    rows = w * g
    xn = rows / rows.square().mean(1, keepdim=True).sqrt() * g
    exponent = projection_exponent(g, w, 32)
    product = (xn.double() @ w.double().t()).abs()
    assert (product <= 448 * 2.0 ** exponent.double()).all()
    assert product.max() > 448 * 2.0 ** (exponent.double() - 1.2)  # a power of two, and 13% for rounded operands
    assert torch.equal(projection_exponent(g, w, 32, centred=True), exponent + 1)
    got = gemm_quantize(xn, w, (0, 32), exponent=exponent)
    assert db(got.dequantize(), xn @ w.t()) > 28


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_with_swizzled_scales(axes):
    x, offsets, _ = hostile(64)
    x8, w = quantize_mx(x, (32, 32), offsets), torch.randn(96, 64)
    got, atoms = gemm_quantize_scatter(x8, w, axes=axes)
    assert_same_bytes(got, gemm_quantize(x8, w))
    for axis in (0, 1):
        assert (atoms[axis] is None) == (axis not in axes)
        assert axis not in axes or torch.equal(atoms[axis], scatter_scales(got, axis))
    with pytest.raises(ValueError, match=r"axes is \(2,\)"):
        gemm_quantize_scatter(x8, w, axes=(2,))


@pytest.mark.parametrize("rotate", [False, True])
def test_weight_in_every_form(rotate):
    """hi + lo adds up to the weight to 55 dB, BF16 to its own; the bound is that of the exact weight."""
    w, gain = torch.randn(128, 96), torch.rand(96) + 0.5
    exact = rotate_rows(w, 2) if rotate else w
    for form, block, floor in (("e4m3x2", (32, 32), 55), ("e4m3x2", (32, 96), 50), ("bf16", (32, 32), 50), ("e4m3", (32, 32), 28)):
        made, bound, rounded = projection_weight(w, gain, 2, form, block, rotate=rotate, centred=True)
        assert torch.equal(rounded, exact.bfloat16())
        assert db(to_float(made), exact) > floor
        assert torch.equal(bound.int() - 127, projection_exponent(gain, exact, 64, centred=True))
    with pytest.raises(ValueError, match="form is 'fp4'"):
        projection_weight(w, gain, 2, "fp4")
    with pytest.raises(ValueError, match="heads 3"):
        projection_weight(w, gain, 3, "bf16")


def test_operator():
    for tokens in (196, 257):
        offsets = offsets_of([tokens - 90, 0, 80])
        x, w = torch.randn(tokens, 64), torch.randn(96, 64)
        for left in (x, x.bfloat16(), quantize_mx(x, (32, 32), offsets)):
            for right in (w, quantize_mx(w), split_e4m3(w)):
                opcheck(gemm_quantize_op, (*flatten(left), *flatten(right), offsets, [32, 32], None))
        opcheck(gemm_quantize_op, (*flatten(x), *flatten(w), None, [0, 96], torch.tensor(4)))
        opcheck(gemm_quantize_op, (*flatten(x), *flatten(w), offsets, [32, 96], None, "auto", [0, 1]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x=torch.zeros(4, 32)), r"w has shape \[32, 64\]; its last axis must be 32"),
        (dict(x=[1]), "x is list"),
        (dict(x=torch.zeros(4, 64, dtype=torch.float64)), "x has dtype torch.float64"),
        (dict(x=torch.zeros(4, 2, 64)), r"x has shape \[4, 2, 64\]"),
        (dict(w=(torch.zeros(32, 64), torch.zeros(32, 64))), "w is Tensor; allowed is"),
        (dict(w=(quantize_mx(torch.ones(32, 64)),)), "w has 1 parts"),
        (dict(block=(0, 32)), "a static block"),
        (dict(exponent=1), "exponent is 1"),
        (dict(block=(0, 32), exponent=300), "exponent is 300; allowed is -127 to 127"),
        (dict(block=(0, 32), exponent=0.5), "exponent is 0.5, a float"),
        (dict(block=(0, 32), exponent=torch.tensor([1, 2, 3])), r"exponent has shape \[3\]; it must be \[\] or \[1\]"),
        (dict(block=(64, 32)), r"block is \(64, 32\)"),
        (dict(x=quantize_mx(torch.ones(4, 64)), offsets=torch.tensor([0, 4])), "x is a dense MXTensor"),
        (dict(w=torch.zeros(32, 64, device="meta")), "w is on meta"),
    ],
)
def test_errors(change, words):
    arguments = {"x": torch.zeros(4, 64), "w": torch.zeros(32, 64), **change}
    with pytest.raises((TypeError, ValueError), match=words):
        gemm_quantize(**arguments)


def test_layouts():
    """Hopper's kernel: column tiles cover the columns and fit the shared memory beside enough stages; CTAs share x in pairs or not."""
    for form, static in (("bf16", True), ("bf16", False), ("e4m3", True), ("e4m3x2", False)):
        for contracted in (32, 96, 384, 512, 1024):
            for columns in (32, 96, 224, 384, 512, 640, 1024):
                blocks = (0, 0) if form == "bf16" else (0, contracted)
                spec = GemmSpec(contracted, columns, form, *blocks, True, blocks[1], 0 if static else 32, 32, False)
                assert unsupported(spec) == ""
                widest = 192 if spec.wide or spec.halves else 128
                assert 0 < columns - (spec.column_tiles - 1) * spec.column_tile <= spec.column_tile <= widest
                assert spec.ahead or spec.column_tile <= 128 or spec.wide
                assert spec.weight_bytes + spec.stages * spec.stage_bytes + spec.fixed_bytes <= SHARED_BYTES
                assert spec.stages * spec.slabs >= (8 if spec.wide else 4) and spec.column_tiles % spec.cluster == 0
                assert spec.rounds * spec.slabs == spec.steps and spec.column_tile % spec.run == 0 == columns % spec.run
    assert GemmSpec(384, 384, "bf16", 0, 0, True, 0, 0, 128, False).column_tile == 192  # x is read twice, not three times
    for columns, tile in ((384, 192), (512, 128)):
        assert GemmSpec(columns, columns, "e4m3x2", 0, columns, True, columns, 0, 128, False, one_scale=True).column_tile == tile
