"""Packed 16-bit arithmetic and its conversions, against torch, over bit patterns: each result is one rounding of the exact
value (but for ``fma`` of bfloat16, which is rounded to float32 first)."""

import numpy as np
import pytest
import torch

from . import numerics
from .errors import UnsupportedError
from .test_engines_sm90 import run

LOAD = "mov.u32 %r20, %ctaid.x;\nmov.u32 %r21, %ntid.x;\nmad.lo.u32 %r20, %r20, %r21, %r0;\nmul.wide.u32 %rd40, %r20, 4;\n"
LOAD += "".join(f"add.s64 %rd4{1 + i}, %rd{i}, %rd40;\n" for i in range(4))
LOAD += "".join(f"ld.global.b32 %r2{4 + i}, [%rd4{1 + i}];\n" for i in range(3))
STORE = "st.global.b32 [%rd44], %r27;\n"
DTYPE = {"f16": torch.float16, "bf16": torch.bfloat16}
EXACT = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "max": lambda a, b, c: torch.fmax(a, b),
    "min": lambda a, b, c: torch.fmin(a, b),
}


def patterns(kind, seed):
    """Every bit pattern but those of NaN, in an order of its own."""
    x = torch.arange(65536).to(torch.int32).to(torch.int16)[torch.randperm(65536, generator=torch.Generator().manual_seed(seed))]
    return torch.where(x.view(DTYPE[kind]).isnan(), torch.zeros(1, dtype=torch.int16), x)


@pytest.mark.parametrize("kind", DTYPE)
@pytest.mark.parametrize("op", EXACT)
def test_each_element_is_rounded_once(op, kind):
    a, b, c = (patterns(kind, seed) for seed in range(3))
    out = torch.zeros_like(a)
    sources = "%r24, %r25, %r26" if op == "fma" else "%r24, %r25"
    rounding = "" if op in ("max", "min") else ".rn"
    run(f"{LOAD}{op}{rounding}.{kind}x2 %r27, {sources};\n{STORE}", a, b, c, out, grid=64, block=512)
    exact = EXACT[op](*(x.view(DTYPE[kind]).double() for x in (a, b, c)))
    # to half NumPy rounds float64 once; to bfloat16 torch goes by way of float32, as the emulator does
    want = torch.from_numpy(exact.numpy().astype("float16")) if kind == "f16" else exact.to(torch.bfloat16)
    got = out.view(DTYPE[kind])
    assert torch.equal(got.nan_to_num(1.5), want.nan_to_num(1.5))


def packed(op, *words):
    """Words (int) of one instruction on words, the operands in registers; then with the last of them in the instruction."""
    tensors = [torch.full((1,), w - (w >> 31 << 32), dtype=torch.int32) for w in (*words, *[0] * (3 - len(words)))]
    body = "".join(f"ld.global.b32 %r2{4 + i}, [%rd{i}];\n" for i in range(3))
    results = []
    for last in (f"%r2{3 + len(words)}", str(words[-1])):
        out = torch.zeros(1, dtype=torch.int32)
        sources = [f"%r2{4 + i}" for i in range(len(words) - 1)] + [last]
        run(f"{body}{op} %r27, {', '.join(sources)};\nst.global.b32 [%rd3], %r27;\n", *tensors, out, block=1)
        results.append(int(out) & 0xFFFFFFFF)
    assert results[0] == results[1], (op, list(map(hex, results)))
    return results[0]


@pytest.mark.parametrize(
    ("op", "words", "want"),
    [
        ("add.rn.f16x2", (0x3C004000, 0x7BFF8001), 0x7BFF4000),  # 65504 + 1; 2 - 2^-24
        ("add.rn.f16x2", (0x4C007BFF, 0x7BFF7BFF), 0x7C007C00),  # 65504 + 16 ties to infinity
        ("fma.rn.f16x2", (0x3C013C01, 0x3C013C01, 0xBC020000), 0x00103C02),  # (1 + 2^-10)^2 - (1 + 2^-9) = 2^-20; 1 + 2^-9 + 2^-20
        ("fma.rn.relu.f16x2", (0x3C007E00, 0xBC003C00, 0x00003C00), 0x00007E00),  # -1 is clamped, NaN stays
        ("max.f16x2", (0x80007E00, 0x00003C00), 0x00003C00),  # +0 is above -0; the number beside NaN
        ("min.f16x2", (0x80007E00, 0x00003C00), 0x80003C00),
        ("max.NaN.f16x2", (0x3C007E00, 0x40003C00), 0x40007E00),
        ("max.s16x2", (0x7C008001, 0x3C01FFFF), 0x7C00FFFF),  # of positive FP16 pairs their maxima too
        ("min.s16x2", (0x7C008001, 0x3C01FFFF), 0x3C018001),
        ("max.u16x2", (0x7C008001, 0x3C01FFFF), 0x7C00FFFF),
        ("min.u16x2", (0x7C008001, 0x3C01FFFF), 0x3C018001),
        ("max.relu.s16x2", (0x7C008001, 0x3C01FFFF), 0x7C000000),
        ("add.s16x2", (0x7FFF8001, 0x0001FFFF), 0x80008000),  # no carry from pair to pair
        ("neg.f16x2", (0x7C000000,), 0xFC008000),
        ("abs.f16x2", (0xFC008001,), 0x7C000001),
        ("ex2.approx.f16x2", (0x40004B80,), 0x44007800),  # 2^2; 2^15
        ("ex2.approx.f16x2", (0x4C00CE00,), 0x7C000001),  # 2^16 is infinity, 2^-24 the smallest number
        ("ex2.approx.f16x2", (0xFC007C00,), 0x00007C00),  # of -infinity 0
    ],
)
def test_pairs_on_given_numbers(op, words, want):
    assert packed(op, *words) == want, hex(packed(op, *words))


@pytest.mark.parametrize("op", ["ex2.approx.ftz.f16x2", "ex2.approx.ftz.f16", "ex2.approx.bf16x2", "add.rn.relu.f16x2", "fma.rn.sat.f16x2"])
def test_forms_that_do_not_exist_or_are_not_modelled(op):
    body = f"{op} %r27, {'%r24, %r25, %r26' if 'fma' in op else '%r24, %r25' if 'add' in op else '%r24'};\n"
    with pytest.raises(UnsupportedError, match=op.split(".")[0]):
        run(body.replace("%r2", "%h") if op.endswith("f16") else body, torch.zeros(1), block=1)


def test_exponential_of_every_half():
    """Cut off towards zero, as measured (``test_hardware.py``): never above 2^x, and less than a step below it."""
    a = patterns("f16", 0)
    out = torch.zeros_like(a)
    run(f"{LOAD}ex2.approx.f16x2 %r27, %r24;\n{STORE}", a, a, a, out, grid=64, block=512)
    x, got = a.view(torch.float16).double(), out.view(torch.float16).numpy()
    assert (got[x >= 16] == np.inf).all() and (got[x < -24] == 0).all()
    held = ((x < 16) & (x >= -24) & (x != -(2.0**-24))).numpy()
    got, exact = got[held], np.exp2(x.numpy()[held])
    with np.errstate(over="ignore"):
        assert (got <= exact).all() and (exact < np.nextafter(got, np.float16(np.inf)).astype(np.float64)).all()


def test_conversions_over_every_half():
    a = patterns("f16", 0)
    out = torch.zeros_like(a)
    run(f"{LOAD}cvt.rn.satfinite.e4m3x2.f16x2 %h0, %r24;\nmov.b32 %r27, {{%h0, 0}};\n{STORE}", a, a, a, out, grid=64, block=512)
    want = a.view(torch.float16).float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out.view(torch.uint8).reshape(-1, 4)[:, :2].reshape(-1), want)
    # and back: a code is exact in f16
    run(f"{LOAD}mov.b32 {{%h0, %h1}}, %r24;\ncvt.rn.f16x2.e4m3x2 %r27, %h0;\n{STORE}", a, a, a, out, grid=64, block=512)
    codes = a.view(torch.uint8).reshape(-1, 4)[:, :2].reshape(-1)
    assert torch.equal(out.view(torch.float16).nan_to_num(1.5), codes.view(torch.float8_e4m3fn).half().nan_to_num(1.5))


def test_two_floats_to_two_halves():
    x, y = (torch.randn(32768, generator=torch.Generator().manual_seed(s)) * 2.0 ** torch.randint(-26, 18, (32768,)) for s in (0, 1))
    out = torch.zeros(65536, dtype=torch.int16)
    body = f"{LOAD}mov.b32 %f1, %r24;\nmov.b32 %f2, %r25;\ncvt.rn.f16x2.f32 %r27, %f1, %f2;\n{STORE}"
    run(body, x, y, x, out, grid=64, block=512, registers=".reg .f32 %f<4>;")
    got = out.view(torch.float16).reshape(-1, 2)  # the first source is the upper half
    assert torch.equal(got[:, 1], x.half()) and torch.equal(got[:, 0], y.half())


@pytest.mark.parametrize("fmt, dtype, limit", [("e4m3", torch.float8_e4m3fn, 448), ("e5m2", torch.float8_e5m2, 57344)])
def test_floats_to_fp8_around_every_tie(fmt, dtype, limit):
    """Each code's value, each midpoint of two, their neighbours as floats; and floats of every exponent."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].sort().values
    x = torch.cat([values, (values[1:] + values[:-1]) / 2])
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf)), x.nextafter(torch.tensor(-torch.inf))])
    bits = torch.randint(-(2**31), 2**31, (1 << 17,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.cat([x, bits.view(torch.float32), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    want = torch.where(x.isnan(), 0x7F, x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    hi, lo = x.numpy(), x.flip(0).numpy()
    assert (numerics.f32_to_fp8x2(fmt, hi, lo) == (want.numpy().astype("uint16") << 8 | want.flip(0).numpy())).all()


def test_bytes_picked_by_a_constant():
    """Every place of every byte; the general form takes the selector from a register."""
    a, b = (
        torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(s)).to(torch.int32).numpy().view("uint32")
        for s in (0, 1)
    )
    for selector in (0x0123, 0x4567, 0x7531, 0x6420, 0x5140, 0x7777, 0x3210):
        want = numerics.prmt(a, b, numerics.u32(selector))
        assert (numerics.prmt_picks(a, b, tuple(selector >> 4 * i & 7 for i in range(4))) == want).all()
        run(
            f"{LOAD}prmt.b32 %r27, %r24, %r25, {selector};\n{STORE}",
            *(torch.from_numpy(x.view("int32")) for x in (a, b, b)),
            out := torch.zeros(32, dtype=torch.int32),
        )
        assert (out.numpy().view("uint32") == want).all()
