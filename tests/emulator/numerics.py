"""Scalar formats and arithmetic that NumPy lacks: bfloat16, FP8, FP4, E8M0, single-rounding fma, directed rounding."""

from __future__ import annotations

import numpy as np
import torch

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i16, i32, i64 = np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

_codes = torch.arange(256, dtype=torch.uint8)
#: Value of every code of an 8-bit format, float32.
DECODE = {
    "e4m3": _codes.view(torch.float8_e4m3fn).float().numpy(),
    "e5m2": _codes.view(torch.float8_e5m2).float().numpy(),
    "ue8m0": _codes.view(torch.float8_e8m0fnu).float().numpy(),
}
#: Value of every E2M1 code (4 bits), float32.
DECODE_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], f32)


def bf16_to_f32(h: np.ndarray) -> np.ndarray:
    return (h.astype(u32) << 16).view(f32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; NaN becomes the canonical 0x7FFF, as ``cvt.rn.bf16.f32`` gives."""
    b = np.asarray(x, f32).view(u32)
    r = ((b + (u32(0x7FFF) + ((b >> u32(16)) & u32(1)))) >> u32(16)).astype(u16)
    return np.where(np.isnan(x), u16(0x7FFF), r)


def _fp8_table(dtype: torch.dtype, limit: float) -> np.ndarray:
    """Code of a float32 by its upper 16 bits and whether any lower bit is set: nearest even, saturating, NaN → 0x7F.

    That is enough: no two values that share both lie on different sides of a tie, which has at most 4 bits of mantissa.
    """
    i = np.arange(1 << 17, dtype=u32)
    x = ((i >> u32(1)) << u32(16) | i & u32(1)).view(f32)
    codes = torch.from_numpy(np.clip(x, -limit, limit)).to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(x), u8(0x7F), codes).astype(u16)


_FP8_LOW = {"e4m3": _fp8_table(torch.float8_e4m3fn, 448.0), "e5m2": _fp8_table(torch.float8_e5m2, 57344.0)}
_FP8_HIGH = {k: t << u16(8) for k, t in _FP8_LOW.items()}
_BITS15 = u32(0x7FFF)


def _fp8_index(x: np.ndarray) -> np.ndarray:
    b = np.asarray(x, f32).view(u32)
    return (b | ((b & _BITS15) + _BITS15)) >> u32(15)


def f32_to_fp8x2(fmt: str, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    """``cvt.rn.satfinite.{e4m3,e5m2}x2.f32``: nearest even, saturating, NaN → 0x7F; two codes in 16 bits."""
    return _FP8_HIGH[fmt][_fp8_index(hi)] | _FP8_LOW[fmt][_fp8_index(lo)]


#: Code of every FP16 bit pattern (uint8), as :func:`f32_to_fp8x2` gives it, and FP16 of every code.
F16_TO_FP8 = {k: t[_fp8_index(np.arange(1 << 16, dtype=u16).view(f16).astype(f32))].astype(u8) for k, t in _FP8_LOW.items()}
FP8_TO_F16 = {k: DECODE[k].astype(f16) for k in ("e4m3", "e5m2")}


def _ex2_f16() -> np.ndarray:
    x = np.arange(1 << 16, dtype=u16).view(f16)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.exp2(x.astype(f64))
        nearest = exact.astype(f16)
        cut = np.where(nearest > exact, np.nextafter(nearest, f16(0)), nearest)
    return np.select([x >= 16, x == f16(-(2.0**-24))], [f16(np.inf), f16(1)], cut)


#: ``ex2.approx.f16`` of every bit pattern, as an H200 gives it: 2^x cut off towards zero (but for the number nearest to 1 below it).
EX2_F16 = _ex2_f16()


def half_max(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """``max`` of f16 (or float32 for bf16): -0 is below +0; of a number and NaN the number, or NaN with ``nan``."""
    return np.where((a == 0) & (b == 0), a + b, (np.maximum if nan else np.fmax)(a, b))


def half_min(a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """``min``, as :func:`half_max`."""
    return -half_max(-a, -b, nan)


def clamped(x: np.ndarray) -> np.ndarray:
    """``.relu``: +0 for what is not above 0, NaN stays."""
    return np.where(x <= 0, x.dtype.type(0), x)


def f32_to_ue8m0(x: np.ndarray, up: bool, saturate: bool) -> np.ndarray:
    """``cvt.{rz,rp}{.satfinite}.ue8m0x2.f32`` on one element: the exponent of |x|, rounded down or up. Beyond 2^127:
    254 if it saturates, else 255 (NaN)."""
    b = np.asarray(x, f32).view(u32) & u32(0x7FFFFFFF)
    e, mantissa = (b >> u32(23)).astype(i64), b & u32(0x7FFFFF)
    if up:  # a subnormal at most 2^-127 stays at code 0
        e = np.where(e == 0, (mantissa > u32(0x400000)).astype(i64), e + (mantissa != 0))
    e = np.minimum(e, 254 if saturate else 255)
    return np.where(np.isnan(x), 255, e).astype(u8)


def f32_to_e2m1(x: np.ndarray) -> np.ndarray:
    """``cvt.rn.satfinite.e2m1x2.f32`` on one element: nearest, ties to even code, saturating at 6, NaN → 6."""
    a = np.abs(np.asarray(x, f32))
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], f32)
    code = np.searchsorted(bounds, a, side="left").astype(u8)
    tie = np.isin(a, bounds) & (code % 2 == 1)
    code = np.where(np.isnan(x), u8(7), code + tie.astype(u8))
    return (code | (np.signbit(x).astype(u8) << u8(3))).astype(u8)


def add_down(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float32, rounded towards minus infinity."""
    exact = a.astype(f64) + b.astype(f64)
    r = exact.astype(f32)
    return np.where(r.astype(f64) > exact, np.nextafter(r, f32(-np.inf)), r)


def add_up(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b in float32, rounded towards plus infinity."""
    return -add_down(-a, -b)


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt.b32`` in its default mode: four selector nibbles pick bytes of b:a; bit 3 replicates the byte's sign."""
    both = a.astype(u64) | (b.astype(u64) << u64(32))
    out = np.zeros(np.broadcast(a, b, selector).shape, u32)
    for i in range(4):
        s = (selector >> u32(4 * i)) & u32(15)
        byte = (both >> ((s & u32(7)).astype(u64) * u64(8))).astype(u32) & u32(255)
        byte = np.where(s & u32(8), np.where(byte & u32(128), u32(255), u32(0)), byte)
        out |= byte << u32(8 * i)
    return out


def prmt_picks(a: np.ndarray, b: np.ndarray, picks: tuple[int, ...]) -> np.ndarray:
    """``prmt.b32`` by a constant selector that copies bytes ``picks`` of b:a as they are."""
    out = np.empty(np.broadcast_shapes(np.shape(a), np.shape(b), (1,)), u32)
    bytes_ = out.view(u8).reshape(*out.shape, 4)
    sources = [x.view(u8).reshape(*x.shape, 4) for x in (np.ascontiguousarray(a, u32), np.ascontiguousarray(b, u32))]
    for i, pick in enumerate(picks):
        bytes_[..., i] = sources[pick >> 2][..., pick & 3]
    return out


def funnel(lo: np.ndarray, hi: np.ndarray, n: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """``shf.{l,r}.{wrap,clamp}.b32``: shift hi:lo and keep one word."""
    n = (n & u32(31)) if wrap else np.minimum(n, u32(32))
    both = lo.astype(u64) | (hi.astype(u64) << u64(32))
    if left:
        return ((both << n.astype(u64)) >> u64(32)).astype(u32)
    return (both >> n.astype(u64)).astype(u32)


def bit_field(a: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfe.u32``."""
    pos, length = pos & u32(255), length & u32(255)
    wide = a.astype(u64) >> np.minimum(pos, u32(32)).astype(u64)
    return (wide & ((u64(1) << np.minimum(length, u32(32)).astype(u64)) - u64(1))).astype(u32)


def bit_insert(a: np.ndarray, b: np.ndarray, pos: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfi.b32``: put the low ``length`` bits of a into b at ``pos``."""
    pos, length = np.minimum(pos & u32(255), u32(32)).astype(u64), np.minimum(length & u32(255), u32(32)).astype(u64)
    mask = (((u64(1) << length) - u64(1)) << pos) & u64(0xFFFFFFFF)
    return (((a.astype(u64) << pos) & mask) | (b.astype(u64) & ~mask & u64(0xFFFFFFFF))).astype(u32)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """``lop3.b32``: any logical function of three words, by its truth table."""
    out = np.zeros(np.broadcast(a, b, c).shape, u32)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def clz32(a: np.ndarray) -> np.ndarray:
    """Leading zeros of a 32-bit word."""
    return (32 - np.frexp(a.astype(f64))[1]).astype(u32) * (a != 0) + u32(32) * (a == 0)


def leading_bit(a: np.ndarray, signed: bool) -> np.ndarray:
    """``bfind``: position of the most significant non-sign bit, 0xFFFFFFFF if there is none."""
    a = np.where(signed & (a >> u32(31) != 0), ~a, a)
    return np.where(a == 0, u32(0xFFFFFFFF), u32(31) - clz32(a))


def bit_reverse(a: np.ndarray) -> np.ndarray:
    """``brev.b32``."""
    out = np.zeros_like(a)
    for i in range(32):
        out |= ((a >> u32(i)) & u32(1)) << u32(31 - i)
    return out
