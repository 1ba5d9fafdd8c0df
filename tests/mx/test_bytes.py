"""Every byte of the format: the named cases, the exhaustive ones, and the properties behind them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_fa4.mx import cast_e4m3, decode_scale, encode_scale, inverse_scale, quantize_mx

NEXT_AFTER_448 = torch.nextafter(torch.tensor(448.0), torch.tensor(torch.inf)).item()

# amax, scale byte, payload, dequantized value (None: only the payload is checked)
BYTE_TABLE = [
    (0.0, 0, 0.0, 0.0),
    (-0.0, 0, 0.0, 0.0),
    (1.0, 119, 256.0, 1.0),
    (448.0, 127, 448.0, 448.0),
    (NEXT_AFTER_448, 128, 224.0, 448.0),
    (448.5, 128, 224.0, 448.0),
    (500.0, 128, 256.0, 512.0),
    (511.0, 128, 256.0, 512.0),
    (511.9, 128, 256.0, 512.0),
    (512.0, 128, 256.0, 512.0),
    (1e-6, 99, 256.0, 256.0 * 2.0**-28),
    (5.7e-35, 5, 288.0, 288.0 * 2.0**-122),
    (2.8e-36, 1, 240.0, 240.0 * 2.0**-126),
    (1e-38, 0, 1.75, 1.75 * 2.0**-127),
    (1e-40, 0, 0.017578125, 0.017578125 * 2.0**-127),
    (65504.0, 135, 256.0, 65536.0),
    (torch.finfo(torch.bfloat16).max, 247, 256.0, math.inf),  # 256 * 2**120 = 2**128 is past FP32
]


@pytest.mark.parametrize(("amax", "byte", "payload", "value"), BYTE_TABLE)
@pytest.mark.parametrize("sign", [1, -1])
def test_byte_table(amax, byte, payload, value, sign):
    x = torch.zeros(32, 32)
    x[17, 5] = sign * amax
    q = quantize_mx(x)
    assert q.scale_bytes.tolist() == [[byte]]
    assert q.payload.float()[17, 5].item() == sign * payload
    assert q.payload.float().count_nonzero() == (payload != 0)
    assert q.dequantize()[17, 5].item() == sign * value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_blocks_are_nan_with_zero_payload(bad):
    x = torch.randn(64, 64)
    clean = quantize_mx(x)
    x[3, 40] = bad
    q = quantize_mx(x)
    assert q.scale_bytes[0, 1] == 255
    assert q.codes[:32, 32:].count_nonzero() == 0
    assert q.dequantize()[:32, 32:].isnan().all()
    for rows, columns in ((slice(0, 32), slice(0, 32)), (slice(32, 64), slice(0, 64))):
        assert torch.equal(q.codes[rows, columns], clean.codes[rows, columns])
        assert q.dequantize()[rows, columns].isfinite().all()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_block_among_others(zero):
    """C1: no scale of 0/0, no byte of the neighbours changes, and the sign of a zero is no bit of a scale."""
    x = torch.randn(96, 96)
    clean = quantize_mx(x)
    x[32:64, 32:64] = zero
    q = quantize_mx(x)
    assert q.scale_bytes[1, 1] == 0 and (q.codes[32:64, 32:64] & 0x7F).count_nonzero() == 0
    assert (q.dequantize()[32:64, 32:64] == 0).all() and torch.isfinite(q.dequantize()).all()
    kept = torch.ones(96, 96, dtype=torch.bool)
    kept[32:64, 32:64] = False
    assert torch.equal(q.codes[kept], clean.codes[kept]) and (q.scale_bytes == clean.scale_bytes).sum() == 8
    assert quantize_mx(torch.full((64, 64), zero)).scale_bytes.count_nonzero() == 0


def test_decode_all_256_bytes():
    got = decode_scale(torch.arange(256, dtype=torch.uint8))
    want = torch.tensor([2.0 ** (b - 127) for b in range(255)], dtype=torch.float64).to(torch.float32)
    assert torch.equal(got[:255], want)
    assert got[0] == 2.0**-127  # not 0: the byte is an exponent, not an FP32 exponent field
    assert got[255].isnan()


def test_inverse_of_all_bytes_is_exact():
    byte = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(decode_scale(byte).double() * inverse_scale(byte).double(), torch.ones(255, dtype=torch.float64))
    assert inverse_scale(torch.tensor([255], dtype=torch.uint8)).item() == 0


def test_round_up_never_clips_any_bfloat16():
    codes = torch.arange(2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(torch.bfloat16).float()
    x = x[x.isfinite()]
    byte = encode_scale(x)
    scaled = x.double() * 2.0 ** (127 - byte.double())
    assert (scaled <= 448).all()
    smaller = byte > 0  # and it is the smallest such exponent
    assert (scaled[smaller] * 2 > 448).all()
    q = quantize_mx(x.reshape(-1, 1).expand(-1, 1), (32, 1))  # a mixed column: its largest element decides
    assert q.payload.float().isfinite().all()


def test_amax_keeps_fp32():
    """448.5 rounds to 448 in BF16: an amax taken in BF16 would choose a scale that clips."""
    assert encode_scale(torch.tensor(448.5)).item() == 128
    assert encode_scale(torch.tensor(448.5).bfloat16()).item() == 127


def test_cast_rounds_to_nearest_even_on_every_midpoint():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    low, high = codes[:-1], codes[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(0x7E) % 2 == 0, low, high)
    assert torch.equal(cast_e4m3(middle).double(), even)
    assert torch.equal(cast_e4m3(-middle).double(), -even)
    step = torch.finfo(torch.float32).eps
    assert torch.equal(cast_e4m3(middle * (1 + step)).double(), high)
    assert torch.equal(cast_e4m3(middle * (1 - step)).double(), low)


def test_cast_saturates_and_keeps_nan():
    x = torch.tensor([449.0, 464.0, 465.0, 1e30, math.inf, -math.inf, math.nan, -math.nan])
    assert cast_e4m3(x).view(torch.uint8).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-120, 120), st.integers(1, 70), st.integers(1, 70))
def test_payload_uses_the_rounded_scale(seed, exponent, tokens, columns):
    """Each element errs by half a step of E4M3 at its block's scale: 1/16 relative, or half the smallest subnormal."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q = quantize_mx(x)
    step = decode_scale(q.scale_bytes).repeat_interleave(32, 0).repeat_interleave(32, 1)[:tokens, :columns].double()
    error = (q.dequantize().double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, step * 2.0**-10)).all()


def test_static_exponent():
    x = torch.randn(40, 3, 64)
    q = quantize_mx(x, (32, 64), token_dim=0, exponent=torch.tensor([-5, -6, -4]))
    assert q.block == (0, 64) and q.scale_bytes.tolist() == [[[122], [121], [123]]]
    for head, e in enumerate((-5, -6, -4)):
        assert torch.equal(q.payload[:, head].float(), cast_e4m3(x[:, head] * 2.0**-e).float())
    assert torch.equal(quantize_mx(x[:, 0], (32, 64), exponent=-5).codes, q.codes[:, 0])


def test_static_exponent_bound():
    x = torch.full((4, 32), 500.0)
    with pytest.raises(ValueError, match=r"exponent puts a value at 500, past 448"):
        quantize_mx(x, exponent=0, validate=True)
    assert (quantize_mx(x, exponent=0).payload.float() == 448).all()
    x[1, 1] = math.inf
    assert quantize_mx(x, exponent=1).payload.float().isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_input_dtypes_agree(dtype):
    x = torch.randn(70, 96).bfloat16().clamp(-4, 4).to(dtype)
    assert torch.equal(quantize_mx(x).codes, quantize_mx(x.float()).codes)


def row_sums(x, **arguments):
    """Sums of the magnitudes of a row's codes, a block's columns each, and the bytes."""
    made = quantize_mx(x, bounded_rows=True, **arguments)
    width = made.block[1]
    return made.payload.float().abs().unflatten(-1, (-1, width)).sum(-1), made


@pytest.mark.parametrize("block", [(32, 32), (32, 64), (128, 64), (128, 192)])
@pytest.mark.parametrize("kind", ["normal", "sparse", "constant", "rounds up", "spread", "outlier"])
def test_bounded_rows(block, kind):
    """No row's codes sum to more than 146 and, of the largest row of a block, to no less than a third of it (an exponent would be wasted);
    exponents are never below those of the plain rule."""
    x = torch.randn(200, 192) * 2.0**-3
    x = {
        "normal": x,
        "sparse": torch.where(torch.rand_like(x) < 0.01, x, 0.0),
        "constant": torch.full_like(x, 3.7) * torch.linspace(0.5, 2, 200)[:, None],
        "rounds up": 1.0626 * torch.exp2(torch.randint(-3, 3, x.shape).float()),
        "spread": x * torch.exp2(torch.randint(-20, 20, (200, 1)).float()),
        "outlier": torch.where(torch.arange(192) == 7, 300 * x, x),
    }[kind]
    sums, made = row_sums(x, block=block)
    assert float(sums.max()) <= 146
    assert bool((made.scale_bytes >= quantize_mx(x, block).scale_bytes).all())
    largest = torch.nn.functional.pad(sums, (0, 0, 0, -200 % block[0])).unflatten(0, (-1, block[0])).amax(1)
    assert bool(((largest >= 146 / 3) | (largest == 0)).all())


def test_bounded_rows_of_sequences():
    """Jagged blocks are those of each sequence alone, in ``[T, H, D]`` too."""
    x, offsets = torch.randn(170, 3, 64) * torch.exp2(torch.arange(170) % 11.0)[:, None, None], torch.tensor([0, 40, 40, 169])
    made = quantize_mx(x, (128, 64), offsets, token_dim=0, bounded_rows=True)
    for start, end, row in ((0, 40, 0), (40, 169, 3)):
        alone = quantize_mx(x[start:end], (128, 64), token_dim=0, bounded_rows=True)
        assert torch.equal(alone.codes, made.codes[start:end])
        assert torch.equal(alone.scale_bytes, made.scale_bytes[row : row + alone.scale_bytes.shape[0]])


def test_bounded_rows_at_the_ends_of_fp32():
    for size in (2.0**-140, 2.0**-126, 2.0**121):
        sums, made = row_sums(torch.randn(64, 64) * size, block=(32, 64))
        assert float(sums.max()) <= 146 and bool((made.scale_bytes < 255).all())
    x = torch.randn(64, 64)
    x[3, 5] = math.nan
    sums, made = row_sums(x, block=(32, 64))
    assert made.scale_bytes.flatten().tolist()[0] == 255 and not made.codes[:32].any() and made.scale_bytes[1, 0] < 255


def test_bounded_rows_are_refused_in_words():
    with pytest.raises(ValueError, match=r"block is \(0, 64\) with bounded_rows"):
        quantize_mx(torch.randn(32, 64), (0, 64), exponent=0, bounded_rows=True)
    with pytest.raises(ValueError, match=r"block is \(32, 512\) with bounded_rows"):
        quantize_mx(torch.randn(32, 512), (32, 512), bounded_rows=True)
