"""Hopper's engines one opcode at a time, against formulas written here from the PTX ISA, not from the engines."""

import numpy as np
import pytest
import torch

from tests.emulator import api
from tests.emulator.engines.wgmma import narrow_product
from tests.emulator.errors import DeadlockError, EmulatorError, MemoryFaultError, RaceError, UnsupportedError
from tests.emulator.fidelity import Fidelity
from tests.emulator.test_core import ALL, launch

pytestmark = pytest.mark.emulator


def run(body, *tensors, schedule=None, check=False, limit=200_000, fidelity=None, **shape):
    """Execute a body with ``tensors`` at %rd0, %rd1, ...; see ``test_core.launch``."""
    extents = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    return api.run(launch(body, *tensors, **shape), extents, schedule, check=check, step_limit=limit, fidelity=fidelity)


TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LAZY, EAGER = api.Schedule("lazy"), api.Schedule("eager")

# Thread 0 initialises an mbarrier at smem; 128 threads copy the first tensor of ``n`` bytes to smem + 1024 by bulk copy.
FILL = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
READY:
bar.sync 0;
@%p0 bra WAITING;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {n};
add.u32 %r3, %r1, 1024;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], {n}, [%r1];
WAITING:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra WAITING;
"""


# --- operands in shared memory -------------------------------------------------------------------------------------
def numbers(rng, rows, columns, kind):
    """Small random values exact in ``kind``: their bits and their float32 values."""
    x = torch.from_numpy(rng.integers(-8, 9, (rows, columns)).astype(np.float32) / 4).to(TORCH[kind])
    return x.view(torch.uint8 if x.element_size() == 1 else torch.uint16).numpy(), x.float().numpy()


def placed(bits, swizzle, mn_major):
    """Bytes of an operand as wgmma wants it, and (leading, stride) of its descriptor. Written from the canonical layouts.

    Rows are M or N. K-major: 8-row groups of ``swizzle``-byte rows, 16-byte pieces exchanged by row. MN-major: rows of
    ``swizzle`` bytes of one k. Without swizzle: 8 x 16-byte core matrices, groups along K first.
    """
    size = bits.dtype.itemsize
    major = bits if not mn_major else bits.T  # outer x contiguous
    outer, inner = major.shape[0], major.shape[1] * size
    raw = np.ascontiguousarray(major).view(np.uint8).reshape(outer, inner)
    if not swizzle:
        out = np.zeros((inner // 16, outer // 8, 8, 16), np.uint8)
        for c in range(inner // 16):
            for o in range(outer):
                out[c, o // 8, o % 8] = raw[o, 16 * c : 16 * c + 16]
        pieces, groups = outer // 8 * 128, 128  # distance of neighbours along the contiguous and along the outer axis
        return out.reshape(-1), (groups, pieces) if mn_major else (pieces, groups)
    atoms = -(-inner // swizzle)
    out = np.zeros((atoms, outer, swizzle), np.uint8)
    shift = {128: 0, 64: 1, 32: 2}[swizzle]
    for o in range(outer):
        for c in range(inner // 16):
            a, piece = divmod(16 * c, swizzle)
            piece = piece // 16 ^ (o >> shift) % (swizzle // 16)
            out[a, o, 16 * piece : 16 * piece + 16] = raw[o, 16 * c : 16 * c + 16]
    return out.reshape(-1), (outer * swizzle, 8 * swizzle)


def descriptor(address, leading, stride, swizzle):
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return address >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | mode << 62


def accumulators(n):
    return [f"%d{i}" for i in range(n)]


def rows_and_columns(registers, packed=False):
    """Row and column of each (register, thread): PTX ISA, accumulator fragments of wgmma."""
    for i in range(registers):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4
            if packed:
                for half in range(2):
                    yield i, t, half, row + 8 * (i % 2), 8 * (i // 2) + 2 * (t % 4) + half
            else:
                yield i, t, 0, row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


def unpacked(out, n, packed=False):
    """Matrix [64, n] of the registers that 128 threads stored, ``out [registers, 128]`` (float32, or f16 pairs)."""
    m = np.zeros((64, n), np.float32)
    values = out.view(np.float16).reshape(out.shape[0], 128, 2) if packed else out[..., None]
    for i, t, half, row, column in rows_and_columns(out.shape[0], packed):
        m[row, column] = values[i, t, half]
    return m


def store_all(names, base="%rd1"):
    """Thread t stores register i to ``base[i][t]``."""
    lines = ["mul.wide.u32 %rd40, %r0, 4;", f"add.s64 %rd41, {base}, %rd40;"]
    return "\n".join([*lines, *(f"st.global.b32 [%rd41+{512 * i}], {r};" for i, r in enumerate(names))]) + "\n"


def load_all(names, base):
    lines = ["mul.wide.u32 %rd40, %r0, 4;", f"add.s64 %rd41, {base}, %rd40;"]
    return "\n".join([*lines, *(f"ld.global.b32 {r}, [%rd41+{512 * i}];" for i, r in enumerate(names))]) + "\n"


def a_fragments(bits):
    """A [64, K] as the four registers of 128 threads, from the PTX ISA's figures."""
    size = bits.dtype.itemsize
    each = 4 // size
    out = np.zeros((4, 128, each), bits.dtype)
    for r in range(4):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (r % 2)
            k = r // 2 * 4 * each + t % 4 * each
            out[r, t] = bits[row, k : k + each]
    return out.view(np.uint32)[..., 0]


class Product:
    """One product of a warpgroup: PTX, tensors and the right answer."""

    def __init__(self, n, a="bf16", b=None, *, swizzle=128, a_mn=False, b_mn=False, registers=False, k_steps=1, seed=0):
        b = b or a
        rng = np.random.default_rng(seed)
        self.n, self.k = n, 16 if TORCH[a].itemsize == 2 else 32
        k = self.k * k_steps
        self.a_bits, a_values = numbers(rng, 64, k, a)
        b_bits, b_values = numbers(rng, n, k, b)
        self.a_values, self.b_values = a_values, b_values
        self.answer = a_values @ b_values.T
        b_bytes, b_step = placed(b_bits, swizzle, b_mn)
        a_bytes, a_step = placed(self.a_bits, swizzle, a_mn)
        offset = (len(a_bytes) + 1023) // 1024 * 1024
        image = np.zeros((offset + len(b_bytes) + 15) // 16 * 16, np.uint8)
        image[: len(a_bytes)], image[offset : offset + len(b_bytes)] = a_bytes, b_bytes
        self.image = torch.from_numpy(image)
        self.a_desc = descriptor(1024 + 1024, *a_step, swizzle)
        self.b_desc = descriptor(1024 + 1024 + offset, *b_step, swizzle)
        self.registers = registers
        self.kind = f"{a}.{b}"
        self.transposed = "" if self.k == 32 else (f", {int(b_mn)}" if registers else f", {int(a_mn)}, {int(b_mn)}")
        self.shared = 2048 + image.size

    def source(self):
        return "{%a0, %a1, %a2, %a3}" if self.registers else "%rd20"

    def mma(self, step=0, accumulate=0, signs="1, 1", d="f32", advance=2):
        names = accumulators(self.n // (2 if d == "f32" else 4))
        return (
            f"mov.b64 %rd20, {self.a_desc + advance * step};\nmov.b64 %rd21, {self.b_desc + advance * step};\n"
            f"setp.ne.b32 %p2, {accumulate}, 0;\n"
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{d}.{self.kind} {{{', '.join(names)}}}, {self.source()}, %rd21, "
            f"%p2, {signs}{self.transposed};\n"
        )

    def execute(self, body, *extra, schedule=None, check=False, d="f32", **options):
        """Fill shared memory, run ``body``, store the accumulators; returns [64, n]."""
        count = self.n // (2 if d == "f32" else 4)
        out = torch.full((count, 128), float("nan"), dtype=torch.float32)
        tensors = [self.image, out, *extra]
        text = FILL.format(n=self.image.numel())
        if self.registers:
            a = torch.from_numpy(a_fragments(self.a_bits[:, : self.k]).view(np.int32).copy())
            tensors.append(a)
            text += load_all(["%a0", "%a1", "%a2", "%a3"], f"%rd{len(tensors) - 1}")
        text += body + store_all(accumulators(count))
        registers = ".reg .b32 %d<128>;\n.reg .b32 %a<4>;"
        run(text, *tensors, block=128, shared=self.shared, registers=registers, schedule=schedule, check=check, **options)
        return unpacked(out.numpy(), self.n, packed=d == "f16")


FENCE, COMMIT, WAIT = "wgmma.fence.sync.aligned;\n", "wgmma.commit_group.sync.aligned;\n", "wgmma.wait_group.sync.aligned 0;\n"


# --- wgmma: values --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("kinds", [("bf16",), ("f16",), ("e4m3",), ("e5m2",), ("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
@pytest.mark.parametrize("n", [8, 136, 256])
def test_product_of_types(n, kinds, registers):
    p = Product(n, *kinds, swizzle=32, registers=registers)
    got = p.execute(FENCE + p.mma() + COMMIT + WAIT)
    assert np.array_equal(got, p.answer)  # exact: small integers over 16


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_product_of_layouts(kind, a_mn, b_mn, swizzle):
    p = Product(64, kind, swizzle=swizzle, a_mn=a_mn, b_mn=b_mn)
    assert np.array_equal(p.execute(FENCE + p.mma() + COMMIT + WAIT), p.answer)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize(("swizzle", "steps"), [(64, 2), (128, 4)])
def test_steps_along_k_inside_a_swizzle_row(swizzle, steps, kind):
    """Descriptors advance by 32 bytes; the products of a chain add up without a wait between them."""
    p = Product(40, kind, swizzle=swizzle, k_steps=steps)
    body = FENCE + "".join(p.mma(s, accumulate=int(s > 0)) for s in range(steps)) + COMMIT + WAIT
    for schedule in ALL:
        assert np.array_equal(p.execute(body, schedule=schedule), p.answer), schedule


@pytest.mark.parametrize(("signs", "factor"), [("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
def test_signs(signs, factor):
    p = Product(16, "bf16")
    assert np.array_equal(p.execute(FENCE + p.mma(signs=signs) + COMMIT + WAIT), factor * p.answer)


def test_accumulators_that_go_in():
    p = Product(16, "e4m3")
    start = "".join(f"mov.b32 {r}, 0f40000000;\n" for r in accumulators(8))
    assert np.array_equal(p.execute(start + FENCE + p.mma(accumulate=1) + COMMIT + WAIT), p.answer + 2)


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("kind", "n"), [("f16", 24), ("e4m3", 8), ("e4m3", 64), ("e4m3", 128), ("e4m3", 136), ("e4m3", 256), ("e5m2", 40)])
def test_f16_accumulators(kind, n, registers):
    """Pairs of columns, the first in the lower half, in half of the registers."""
    p = Product(n, kind, swizzle=32, registers=registers)
    want = p.answer.astype(np.float16)
    for fidelity in (None, Fidelity(fp8_accumulator_bits=14)):  # exact either way: multiples of 1/16 below 128
        assert np.array_equal(p.execute(FENCE + p.mma(d="f16") + COMMIT + WAIT, d="f16", fidelity=fidelity), want)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_f16_accumulators_are_rounded_by_each_product(schedule):
    """About 1,000 the step of FP16 is 1/2 and that of a product 1/16: each of four roundings is seen in the result."""
    p, n = Product(64, "e4m3", k_steps=4, seed=3), 64
    a, b = p.a_values, p.b_values
    want = np.full((64, n), 1001.5, np.float16)
    once = want + p.answer
    for k in range(0, 128, 32):
        want = (want.astype(np.float64) + a[:, k : k + 32] @ b[:, k : k + 32].T).astype(np.float16)
    assert (once.astype(np.float16) != want).mean() > 0.2
    start = "".join(f"mov.b32 {r}, 0x63D363D3;\n" for r in accumulators(n // 4))
    chain = "".join(p.mma(s, accumulate=1, d="f16") for s in range(4))
    got = p.execute(start + FENCE + chain + COMMIT + WAIT, d="f16", schedule=schedule, check=True)
    assert np.array_equal(got, want)


# --- wgmma: time ----------------------------------------------------------------------------------------------------
def test_operands_are_read_late_and_results_come_late():
    """What a program may not rely on, it does not get: under ``lazy`` nothing happens before the wait."""
    p = Product(16, "bf16", registers=True)
    spoil = "mov.b32 %a0, 0;\nmov.b32 %a1, 0;\nmov.b32 %a2, 0;\nmov.b32 %a3, 0;\n"
    body = FENCE + p.mma() + COMMIT + spoil + WAIT
    assert np.array_equal(p.execute(body, schedule=EAGER), p.answer)
    assert np.array_equal(p.execute(body, schedule=LAZY), 0 * p.answer)
    early = FENCE + p.mma() + COMMIT + "".join(f"mov.b32 %d{64 + i}, %d{i};\n" for i in range(8)) + WAIT
    early += "".join(f"mov.b32 %d{i}, %d{64 + i};\n" for i in range(8))
    assert np.array_equal(p.execute(early, schedule=EAGER), p.answer)
    assert np.isnan(p.execute(early, schedule=LAZY)).all()


def test_wait_group_leaves_the_last_groups_in_flight():
    p = Product(16, "bf16", k_steps=2)
    second = p.mma(1)
    for i in reversed(range(8)):
        second = second.replace(f"%d{i},", f"%d{64 + i},").replace(f"%d{i}}}", f"%d{64 + i}}}")
    body = FENCE + p.mma(0) + COMMIT + second + COMMIT + "wgmma.wait_group.sync.aligned 1;\n"
    first = p.execute(body, schedule=LAZY)
    assert np.array_equal(first, Product(16, "bf16", k_steps=2).execute(FENCE + p.mma(0) + COMMIT + WAIT))
    moved = body + "".join(f"mov.b32 %d{i}, %d{64 + i};\n" for i in range(8))
    assert np.isnan(p.execute(moved, schedule=LAZY)).all()
    moved = body + WAIT + "".join(f"mov.b32 %d{i}, %d{64 + i};\n" for i in range(8))
    assert np.array_equal(p.execute(moved, schedule=LAZY), p.answer - first)


def test_not_committed_is_not_waited_for():
    p = Product(16, "bf16")
    assert np.isnan(p.execute(FENCE + p.mma() + WAIT, schedule=LAZY)).all()


# --- wgmma: the fence between registers and products ----------------------------------------------------------------
TOUCH = {
    "nothing": "",
    "a copy of the sums": "mov.b32 %d64, %d0;\n",
    "sums renamed": "mov.b64 %rd25, {%d0, %d1};\nmov.b64 {%d0, %d1}, %rd25;\n",
    "sums written": "add.f32 %d1, %d1, %d1;\n",
    "sums set": "mov.b32 %d1, 0;\n",
    "sums read": "add.f32 %d64, %d1, %d1;\n",
    "written, then renamed": "add.f32 %d64, %d64, %d64;\nmov.b32 %d1, %d64;\n",
    "A written": "xor.b32 %a2, %a2, %a2;\n",
    "A loaded": "ld.shared.b32 %a2, [%r1+1024];\n",
    "A set under a predicate": "@%p0 mov.b32 %a3, %a2;\n",
}
HARMLESS = ("nothing", "a copy of the sums", "sums renamed")


@pytest.mark.parametrize("schedule", [EAGER, api.Schedule("pct", 3)], ids=str)
@pytest.mark.parametrize("touch", TOUCH)
def test_a_register_access_before_a_product_needs_a_fence(touch, schedule):
    p = Product(16, "e4m3", registers=True)
    rest = p.mma(accumulate=1) + COMMIT + WAIT
    between = FENCE + p.mma() + COMMIT + WAIT + TOUCH[touch]
    p.execute(between + FENCE + rest, check=True, schedule=schedule)
    if touch in HARMLESS:
        p.execute(between + rest, check=True, schedule=schedule)
        return
    with pytest.raises(RaceError, match=r"missing wgmma\.fence"):
        p.execute(between + rest, check=True, schedule=schedule)


def test_the_first_product_needs_a_fence():
    p = Product(16, "bf16")
    with pytest.raises(RaceError, match=r"missing wgmma\.fence at first product"):
        p.execute(p.mma() + COMMIT + WAIT, check=True)
    chain = "".join(Product(16, "bf16", k_steps=2).mma(s, accumulate=s) for s in range(2))
    Product(16, "bf16", k_steps=2).execute(FENCE + chain + COMMIT + WAIT, check=True)


def test_products_of_two_shapes_on_the_same_sums_need_a_fence():
    p = Product(16, "bf16", swizzle=32, k_steps=1)
    smaller = p.mma().replace("m64n16k16", "m64n8k16").replace(", %d4, %d5, %d6, %d7", "")
    for fence in (FENCE, ""):
        body = FENCE + p.mma() + COMMIT + WAIT + fence + smaller + COMMIT + WAIT
        if fence:
            p.execute(body, check=True)
        else:
            with pytest.raises(RaceError, match=r"missing wgmma\.fence at accumulators"):
                p.execute(body, check=True)


OVERWRITE = """
mul.wide.u32 %rd30, %r0, 16;
cvt.u32.u64 %r10, %rd30;
add.u32 %r10, %r10, %r1;
st.shared.v4.b32 [%r10+1024], {%r0, %r0, %r0, %r0};
"""


@pytest.mark.parametrize("width", [32, 128])
def test_a_warpgroup_is_one_product_however_its_warps_are_scheduled(width):
    p = Product(48, "e4m3", swizzle=128, k_steps=4)
    body = FENCE + "".join(p.mma(s, accumulate=int(s > 0)) for s in range(4)) + COMMIT + WAIT
    for name in ("random", "pct"):
        for seed in range(4):
            assert np.array_equal(p.execute(body, schedule=api.Schedule(name, seed, width)), p.answer)


# --- wgmma: Hopper's narrow FP8 sums --------------------------------------------------------------------------------
def long_sum(steps, promote, fidelity):
    """Sum over ``steps`` chunks of 32 values near 1 (one operand, read again and again): [64, 8]. Every ``promote`` chunks the
    accumulators are added in FP32 to a second set and start again."""
    p = Product(8, "e4m3", swizzle=32)
    rng = np.random.default_rng(7)
    codes = torch.from_numpy(1 + rng.integers(0, 3, (72, 32)).astype(np.float32) / 8).to(TORCH["e4m3"])
    bits = codes.view(torch.uint8).numpy()
    image, b = placed(bits[:64], 32, False)[0], placed(bits[64:], 32, False)[0]
    p.image[: image.size], p.image[2048 : 2048 + b.size] = torch.from_numpy(image), torch.from_numpy(b)
    zero = "".join(f"mov.b32 %d{64 + i}, 0;\n" for i in range(4))
    add = "".join(f"add.f32 %d{64 + i}, %d{64 + i}, %d{i};\n" for i in range(4))
    body = zero
    for first in range(0, steps, promote):
        chain = "".join(p.mma(0, accumulate=int(i > 0)) for i in range(min(promote, steps - first)))
        body += FENCE + chain + COMMIT + WAIT + add
    body += "".join(f"mov.b32 %d{i}, %d{64 + i};\n" for i in range(4))
    values = codes.float().numpy()
    return p.execute(body, fidelity=fidelity), steps * (values[:64] @ values[64:].T)


def test_narrow_sums_need_two_levels():
    """With 14 bits a chain of 8,192 positive products loses percents, always downwards; sums of 128 in FP32 repair it.

    Bounds: cutting 33 addends of a sum S at S 2^-14 loses at most 33 S 2^-14 a step, half of that on average.
    """
    narrow = Fidelity(fp8_accumulator_bits=14)
    (exact, truth), (one, _), (two, _) = long_sum(256, 256, None), long_sum(256, 256, narrow), long_sum(256, 4, narrow)
    assert np.allclose(exact, truth, rtol=1e-6)
    bias_one, bias_two = (float((x / truth - 1).mean()) for x in (one, two))
    assert bias_one < -0.02 and -0.004 < bias_two <= 0, (bias_one, bias_two)
    assert np.array_equal(long_sum(4, 4, narrow)[0] <= long_sum(4, 4, None)[0], np.ones((64, 8), bool))


def summed(pairs, c=None, bits=14, d="f32", formats=("e4m3", "e4m3")):
    """The narrow sum of the products of pairs of numbers."""
    a, b = np.array(pairs, np.float32).T
    return float(narrow_product(a[None], b[None], None if c is None else np.array([[c]], np.float32), bits, formats, d)[0, 0])


def test_narrow_product_on_given_numbers():
    """Largest term 8 = 2^3 with 4 bits: everything is cut to multiples of 2^(3 - 3) = 1, towards zero."""
    pairs = [(2.0, 4.0), (1.0, 1.75), (-1.0, 1.75), (0.5, 1.0)]
    assert summed(pairs, bits=4) == 8 + 1 - 1 + 0
    assert summed(pairs, -3.75, bits=4) == 8 + 1 - 1 + 0 - 3
    assert summed(pairs, 100.0, bits=24) == 108.5
    # a product's exponent is that of its factors: 2.25 = 1.5 1.5 stands at 2^0, so 0.25 beside it stays; the sum 2.5 is then cut to 3 bits
    assert summed([(1.5, 1.5), (0.5, 0.5)], bits=3) == 2.5 and summed([(1.5, 1.5)], bits=3) == 2.0
    assert summed([(1.125, 1.0)] * 5, bits=4) == 5.5  # 5.625: nothing is cut before the sum
    # codes below the smallest normal one stand at its exponent, 2^-6 (E5M2: 2^-14), not at their own
    assert summed([(2.0**-9, 1.0), (2.0**-9, 1.75)], bits=4) == 2.0**-9 + 2.0**-9
    assert summed([(2.0**-9, 1.0), (2.0**-9, 1.75)], bits=4, formats=("e5m2", "e4m3")) == 2.75 * 2.0**-9
    assert np.isnan(summed([(np.nan, 0.0)])) and np.isnan(summed([(1.0, 1.0)], np.nan, d="f16"))


def test_narrow_product_to_f16_on_given_numbers():
    """Cut off as for FP32, then one rounding to the nearest, ties to even."""
    for sign in (1, -1):
        assert summed([(sign, 1.0)], sign * 2048.0, d="f16") == sign * 2048
        assert summed([(sign, 1.0)], sign * 2050.0, d="f16") == sign * 2052
        assert summed([(sign, 448.0)], sign * 65056.0, d="f16") == sign * 65504
        with np.errstate(over="ignore"):
            assert summed([(sign, 16.0)], sign * 65504.0, d="f16") == sign * np.inf  # half a step past the largest number
        assert summed([(sign, 8.0)], sign * 65504.0, d="f16") == sign * 65504
    assert summed([(1.0, 0.5), (0.25, 0.25)], 1024.0, d="f16") == 1024  # 2^-4 beside 2^10 is cut: a tie is left
    assert summed([(1.0, 0.5), (0.25, 0.5)], 1024.0, d="f16") == 1025  # 2^-3 is not
    assert summed([(2.0**-9, 2.0**-9)], 3 * 2.0**-24, d="f16") == 2.0**-18 + 3 * 2.0**-24  # subnormal numbers, exact


# --- wgmma: refusals ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%d0, %d1, %d2, %d3}, %rd3, %rd4, 1, 1, 1;", "m64n8k8|tf32"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.f16 {%d0, %d1, %d2, %d3}, %rd3, %rd4, 1, 1, 1, 0, 0;", "types f32.bf16.f16"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%d0, %d1, %d2}, %rd3, %rd4, 1, 1, 1;", "expected 4"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%d0, %d1, %d2, %d2}, %rd3, %rd4, 1, 1, 1;", "named twice"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%d0, %d1, %d2, %d3}, %rd3, %rd4, 1, 1, 1, 0, 0;", "4 immediates"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %rd3, %rd4, 1, 2, 1, 0, 0;", "imm-scale"),
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %rd3, %rd4, %r5, 0, 1, 1, 1, 0, 0;", r"\.sp of"),
        ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%d0};", "m16n8"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%d0}, [%r1];", "ldmatrix"),
        ("atom.global.exch.b128 %q0, [%rd0], %q0;", "b128"),
        ("red.global.inc.s32 [%rd0], %d0;", "inc of s32"),
        ("cp.async.ca.shared.global [%r1], [%rd0], 12;", "cp.async of 12"),
    ],
)
def test_what_is_not_modelled_stops_with_its_line(line, what):
    with pytest.raises(UnsupportedError, match=what) as caught:
        run(line, torch.zeros(16), block=128, shared=4096, registers=".reg .b32 %d<16>;\n.reg .b128 %q<2>;")
    assert "PTX line" in str(caught.value)


@pytest.mark.parametrize(("bit", "what"), [(49, "base offset"), (52, "other bits")])
def test_descriptor_fields_that_are_not_modelled(bit, what):
    p = Product(16, "bf16")
    p.b_desc |= 1 << bit
    with pytest.raises(UnsupportedError, match=what):
        p.execute(FENCE + p.mma() + COMMIT + WAIT)


def test_operand_outside_shared_memory():
    p = Product(16, "bf16")
    p.b_desc += 100 * 1024 >> 4
    with pytest.raises(MemoryFaultError, match="outside"):
        p.execute(FENCE + p.mma() + COMMIT + WAIT)


def test_three_warps_do_not_make_a_product():
    p = Product(16, "bf16")
    body = "setp.eq.u32 %p5, %r2, 3;\n@%p5 bra SKIP;\n" + FENCE + p.mma() + COMMIT + WAIT + "SKIP:\n"
    with pytest.raises(DeadlockError, match=r"not issued by warps \[3\]"):
        p.execute(body)


def test_half_a_warp_or_different_operands():
    p = Product(16, "bf16")
    with pytest.raises(EmulatorError, match="16 lanes of a warp"):
        p.execute("and.b32 %r9, %r0, 16;\nsetp.eq.u32 %p5, %r9, 0;\n" + FENCE + p.mma().replace("wgmma", "@%p5 wgmma") + COMMIT + WAIT)
    varied = p.mma().replace("wgmma", "cvt.u64.u32 %rd22, %r2;\nadd.s64 %rd21, %rd21, %rd22;\nwgmma")
    with pytest.raises(EmulatorError, match="different operands"):
        p.execute(FENCE + varied + COMMIT + WAIT, schedule=api.Schedule("eager", width=32))


# --- wgmma: races ---------------------------------------------------------------------------------------------------
def test_no_race_is_reported_in_a_right_program():
    p = Product(16, "bf16", k_steps=4)
    body = FENCE + "".join(p.mma(s, accumulate=int(s > 0)) for s in range(4)) + COMMIT + WAIT + "bar.sync 0;\n" + OVERWRITE
    for schedule in ALL:
        p.execute(body, schedule=schedule, check=True)


def test_shared_memory_reused_before_the_wait():
    p = Product(16, "bf16")
    with pytest.raises(RaceError, match=r"write after read(?s:.*)wgmma.wait_group in warpgroup 0"):
        p.execute(FENCE + p.mma() + COMMIT + "bar.sync 0;\n" + OVERWRITE + WAIT, check=True)


def test_accumulators_read_before_the_wait():
    p = Product(16, "bf16")
    with pytest.raises(RaceError, match=r"value read early(?s:.*)wgmma.wait_group between"):
        p.execute(FENCE + p.mma() + COMMIT + "add.f32 %d64, %d0, %d0;\n" + WAIT, check=True)


def test_accumulators_as_registers_of_the_next_product_before_the_wait():
    p = Product(8, "bf16", registers=True)
    again = p.mma().replace("{%a0, %a1, %a2, %a3}", "{%d0, %d1, %d2, %d3}").replace("{%d0, %d1, %d2, %d3},", "{%d64, %d65, %d66, %d67},", 1)
    with pytest.raises(RaceError, match="value read early"):
        p.execute(FENCE + p.mma() + COMMIT + again + COMMIT + WAIT, check=True)


def test_a_generic_write_needs_a_proxy_fence_before_wgmma_reads_it():
    p = Product(16, "bf16")
    tail = "bar.sync 0;\n" + FENCE + p.mma() + COMMIT + WAIT
    with pytest.raises(RaceError, match=r"missing proxy fence"):
        p.execute(OVERWRITE + tail, check=True)
    p.execute(OVERWRITE + "fence.proxy.async.shared::cta;\n" + tail, check=True)


def test_a_generic_write_needs_a_barrier_before_wgmma_reads_it():
    p = Product(16, "bf16")
    with pytest.raises(RaceError, match=r"read after write|write after read"):
        p.execute(OVERWRITE + "fence.proxy.async.shared::cta;\n" + FENCE + p.mma() + COMMIT + WAIT, check=True)


# --- ldmatrix, stmatrix ---------------------------------------------------------------------------------------------
def matrix_addresses(count):
    """Lane i's address: row i of 16 bytes, in a scattered order."""
    return "and.b32 %r10, %r0, 31;\nmul.lo.u32 %r11, %r10, 5;\nand.b32 %r11, %r11, 31;\nshl.b32 %r11, %r11, 4;\nadd.u32 %r11, %r11, %r1;\n"


def row_at(lane):
    return lane * 5 % 32


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans):
    values = torch.arange(count * 64, dtype=torch.int16)
    registers = values.view(torch.int32).reshape(count, 32).contiguous()
    out = torch.full((256,), -1, dtype=torch.int16)
    names = [f"%d{i}" for i in range(count)]
    vector = "{" + ", ".join(names) + "}"
    body = "mul.wide.u32 %rd40, %r0, 4;\nadd.s64 %rd41, %rd0, %rd40;\n"
    body += "".join(f"ld.global.b32 {r}, [%rd41+{128 * i}];\n" for i, r in enumerate(names)) + matrix_addresses(count)
    body += f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 [%r11], {vector};\nbar.sync 0;\n"
    body += "shl.b32 %r12, %r0, 4;\nadd.u32 %r12, %r12, %r1;\nld.shared.v4.b32 {%d4, %d5, %d6, %d7}, [%r12];\n"
    body += "mul.wide.u32 %rd42, %r0, 16;\nadd.s64 %rd43, %rd1, %rd42;\nst.global.v4.b32 [%rd43], {%d4, %d5, %d6, %d7};\n"
    run(body, registers, out, shared=512, registers=".reg .b32 %d<16>;")
    rows = out.numpy().reshape(32, 8)
    for lane in range(32):
        for j in range(count):
            for e in range(2):
                value = int(registers[j, lane].view(torch.int32)) >> (16 * e) & 0xFFFF
                row, column = (lane // 4, lane % 4 * 2 + e) if not trans else (lane % 4 * 2 + e, lane // 4)
                assert rows[row_at(8 * j + row), column] == value
    untouched = {row_at(i) for i in range(32)} - {row_at(i) for i in range(8 * count)}
    assert all((rows[r] == -1).all() for r in untouched)  # poison of shared memory is -1 too


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    memory = torch.arange(256, dtype=torch.int16)
    out = torch.zeros(count, 32, dtype=torch.int32)
    names = [f"%d{i}" for i in range(count)]
    body = "mul.wide.u32 %rd42, %r0, 16;\nadd.s64 %rd43, %rd0, %rd42;\nld.global.v4.b32 {%d4, %d5, %d6, %d7}, [%rd43];\n"
    body += "shl.b32 %r12, %r0, 4;\nadd.u32 %r12, %r12, %r1;\nst.shared.v4.b32 [%r12], {%d4, %d5, %d6, %d7};\nbar.sync 0;\n"
    body += matrix_addresses(count)
    body += f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 {{{', '.join(names)}}}, [%r11];\n"
    body += "mul.wide.u32 %rd40, %r0, 4;\nadd.s64 %rd41, %rd1, %rd40;\n"
    body += "".join(f"st.global.b32 [%rd41+{128 * i}], {r};\n" for i, r in enumerate(names))
    run(body, memory, out, shared=512, registers=".reg .b32 %d<16>;")
    rows = memory.numpy().reshape(32, 8)
    for j in range(count):
        for lane in range(32):
            at = [(lane // 4, lane % 4 * 2 + e) if not trans else (lane % 4 * 2 + e, lane // 4) for e in range(2)]
            low, high = (int(rows[row_at(8 * j + r), c]) for r, c in at)
            assert int(out[j, lane]) == low | high << 16


def test_matrix_rows_are_aligned_to_16_bytes():
    with pytest.raises(MemoryFaultError, match="not aligned to the 16 bytes"):
        run("shl.b32 %r3, %r0, 3;\nadd.u32 %r3, %r3, %r1;\nstmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r4};", shared=1024)


# --- atomics --------------------------------------------------------------------------------------------------------
def c_int(x, bits=32):
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("schedule", ALL[::2], ids=str)
def test_atomic_add_returns_every_place_once(schedule, space):
    """128 threads of four warps draw tickets from one counter."""
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    start = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra GO;\nst.shared.b32 [%r1], 0;\nGO:\nbar.sync 0;\n"
    op = {
        "global": "atom.global.add.u32 %r5, [%rd0], 1;\n",
        "shared": "atom.shared.add.u32 %r5, [%r1], 1;\n",
        "generic": "atom.add.u32 %r5, [%rd0], 1;\n",
    }[space]
    body = start + op + "mul.wide.u32 %rd2, %r0, 4;\nadd.s64 %rd3, %rd1, %rd2;\nst.global.b32 [%rd3], %r5;\n"
    run(body, counter, out, block=128, shared=64, schedule=schedule, check=True)
    assert sorted(out.tolist()) == list(range(128))
    assert space == "shared" or counter.item() == 128


@pytest.mark.parametrize(
    ("op", "start", "value", "want"),
    [
        ("add.u32", 5, 7, 12),
        ("add.s32", -5, 3, -2),
        ("min.s32", -5, 3, -5),
        ("max.s32", -5, 3, 3),
        ("min.u32", -5, 3, 3),
        ("max.u32", -5, 3, -5),
        ("and.b32", 12, 10, 8),
        ("or.b32", 12, 10, 14),
        ("xor.b32", 12, 10, 6),
        ("exch.b32", 12, 10, 10),
        ("inc.u32", 9, 9, 0),
        ("inc.u32", 8, 9, 9),
        ("dec.u32", 0, 9, 9),
        ("dec.u32", 12, 9, 9),
        ("dec.u32", 5, 9, 4),
    ],
)
def test_atomic_operations(op, start, value, want):
    cell, old = torch.tensor([start], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = f"setp.ne.u32 %p0, %r0, 0;\n@%p0 bra END;\natom.global.{op} %r5, [%rd0], {value};\nst.global.b32 [%rd1], %r5;\nEND:\n"
    run(body, cell, old)
    assert (cell.item(), old.item()) == (want, start)


@pytest.mark.parametrize(("expected", "want"), [(5, 9), (6, 5)])
def test_compare_and_swap(expected, want):
    cell = torch.tensor([5], dtype=torch.int64)
    body = (
        f"setp.ne.u32 %p0, %r0, 0;\n@%p0 bra END;\nmov.b64 %rd3, {expected};\n"
        f"mov.b64 %rd4, 9;\natom.global.cas.b64 %rd5, [%rd0], %rd3, %rd4;\nEND:\n"
    )
    run(body, cell)
    assert cell.item() == want


def test_float_reductions_scalar_vector_and_packed():
    x = torch.zeros(32, dtype=torch.float32)
    body = (
        "mov.b32 %r5, 0f3F000000;\nred.relaxed.gpu.global.add.f32 [%rd0], %r5;\n"
        "red.global.add.v4.f32 [%rd0+16], {%r5, %r5, %r5, 0f40000000};\n"
    )
    run(body, x, registers="")
    assert x[0] == 16 and x[4:8].tolist() == [16, 16, 16, 64] and x[1:4].sum() == 0
    for kind, dtype, one in (("f16x2", torch.float16, 0x3C003C00), ("bf16x2", torch.bfloat16, 0x3F803F80)):
        y = torch.zeros(4, dtype=dtype)
        run(f"mov.b32 %r5, {one};\nred.global.add.noftz.{kind} [%rd0], %r5;\n", y)
        assert y.tolist() == [32, 32, 0, 0]


def test_a_plain_read_beside_atomics_is_a_race():
    start = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra GO;\nst.shared.b32 [%r1], 0;\nGO:\nbar.sync 0;\natom.shared.add.u32 %r5, [%r1], 1;\n"
    run(start + "bar.sync 0;\nld.shared.b32 %r6, [%r1];\n", block=64, shared=64, check=True)
    with pytest.raises(RaceError, match=r"read after write|write after read"):
        run(start + "ld.shared.b32 %r6, [%r1];\n", block=64, shared=64, check=True)


# --- bulk reductions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "dtype"), [("f32", torch.float32), ("noftz.f16", torch.float16), ("noftz.bf16", torch.bfloat16), ("s32", torch.int32)]
)
def test_bulk_reduce_add(kind, dtype):
    x = torch.arange(64).to(dtype)
    out = torch.full((64,), 3).to(dtype)
    n = 64 * x.element_size()
    body = FILL.format(n=n) + (
        "fence.proxy.async.shared::cta;\n@%p0 bra END;\nadd.u32 %r4, %r1, 1024;\n"
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [%rd1], [%r4], {n};\n"
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind} [%rd1], [%r4], {n};\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nEND:\n"
    )
    for schedule in ALL:
        got = out.clone()
        run(body, x, got, shared=4096, schedule=schedule, check=True)
        assert torch.equal(got, out + 2 * x)


# --- cp.async -------------------------------------------------------------------------------------------------------
COPY = """
mul.wide.u32 %rd2, %r0, {size};
add.s64 %rd3, %rd0, %rd2;
cvt.u32.u64 %r4, %rd2;
add.u32 %r4, %r4, %r1;
cp.async.{cache}.shared.global [%r4], [%rd3], {size}{rest};
cp.async.commit_group;
"""
READ = """
shl.b32 %r5, %r0, 2;
add.u32 %r5, %r5, %r1;
ld.shared.b32 %r6, [%r5];
mul.wide.u32 %rd4, %r0, 4;
add.s64 %rd5, %rd1, %rd4;
st.global.b32 [%rd5], %r6;
"""


@pytest.mark.parametrize(("cache", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async(cache, size):
    x, out = torch.arange(64 * size // 4, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = COPY.format(cache=cache, size=size, rest="") + "cp.async.wait_group 0;\nbar.sync 0;\n" + READ
    for schedule in ALL:
        out.zero_()
        run(body, x, out, block=64, shared=1024, schedule=schedule, check=True)
        assert torch.equal(out, x[:64])


@pytest.mark.parametrize("wait", ["wait_group 0", "wait_all"])
def test_cp_async_short_source_fills_zeros(wait):
    x, out = torch.arange(1, 33, dtype=torch.int32), torch.full((32,), -1, dtype=torch.int32)
    body = "setp.lt.u32 %p4, %r0, 20;\nselp.b32 %r9, 4, 0, %p4;\n" + COPY.format(cache="ca", size=4, rest=", %r9")
    run(body + f"cp.async.{wait};\n" + READ, x[:20].clone(), out, shared=256, schedule=LAZY)
    assert torch.equal(out, torch.where(torch.arange(32) < 20, x, 0).int())


def test_cp_async_lands_late():
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = COPY.format(cache="ca", size=4, rest="")
    run(body + READ, x, out, shared=256, schedule=LAZY)
    assert (out == -1).all()
    run(body + "cp.async.wait_group 1;\n" + READ, x, out, shared=256, schedule=LAZY)
    assert (out == -1).all()
    run(body + "cp.async.commit_group;\ncp.async.wait_group 1;\n" + READ, x, out, shared=256, schedule=LAZY)
    assert torch.equal(out, x)
    with pytest.raises(RaceError, match=r"read after write(?s:.*)cp.async.wait_group"):
        run(body + READ, x, out, shared=256, check=True)


def test_cp_async_wait_is_only_the_threads_own():
    """Another warp's copy needs a barrier after the wait."""
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = COPY.format(cache="ca", size=4, rest="") + "cp.async.wait_group 0;\nxor.b32 %r0, %r0, 32;\n" + READ
    with pytest.raises(RaceError, match=r"read after write|write after read"):
        run(body, x, out, block=64, shared=256, check=True)


def test_cp_async_arrives_on_an_mbarrier():
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    init = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra READY;\nmbarrier.init.shared.b64 [%r1+512], 32;\nREADY:\nbar.sync 0;\n"
    wait = "WAITING:\nmbarrier.try_wait.parity.shared.b64 %p1, [%r1+512], 0;\n@!%p1 bra WAITING;\n"
    body = init + COPY.format(cache="ca", size=4, rest="") + "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+512];\n" + wait + READ
    for schedule in ALL:
        out.zero_()
        run(body, x, out, shared=1024, schedule=schedule, check=True)
        assert torch.equal(out, x)


# --- registers, local memory, conversions -----------------------------------------------------------------------------
def test_redux():
    x, out = torch.randint(-1000, 1000, (64,), dtype=torch.int32), torch.zeros(3, 64, dtype=torch.int32)
    body = "mul.wide.u32 %rd2, %r0, 4;\nadd.s64 %rd3, %rd0, %rd2;\nadd.s64 %rd4, %rd1, %rd2;\nld.global.b32 %r3, [%rd3];\n"
    for i, op in enumerate(("max.s32", "add.s32", "min.u32")):
        body += f"redux.sync.{op} %r4, %r3, 0xffffffff;\nst.global.b32 [%rd4+{256 * i}], %r4;\n"
    run(body, x, out, block=64)
    w = x.reshape(2, 32)
    assert torch.equal(out[0].reshape(2, 32), w.max(1, True).values.expand(2, 32))
    assert torch.equal(out[1].reshape(2, 32), w.sum(1, True).int().expand(2, 32))
    least = torch.from_numpy(w.numpy().view(np.uint32).min(1).view(np.int32).copy())
    assert torch.equal(out[2].reshape(2, 32), least[:, None].expand(2, 32))


def test_local_memory_is_each_threads_own_and_bounded():
    out = torch.zeros(32, dtype=torch.int32)
    local = ".local .align 8 .b8 mine[16];"
    body = "mov.b64 %rd2, mine;\nst.local.v2.b32 [%rd2+8], {%r0, %r0};\nld.local.b32 %r3, [%rd2+12];\n"
    body += "mul.wide.u32 %rd4, %r0, 4;\nadd.s64 %rd5, %rd0, %rd4;\nst.global.b32 [%rd5], %r3;\n"
    run(body, out, registers=local)
    assert torch.equal(out, torch.arange(32, dtype=torch.int32))
    with pytest.raises(MemoryFaultError, match="local access outside"):
        run("mov.b64 %rd2, mine;\nst.local.b32 [%rd2+16], %r0;\n", out, registers=local)


@pytest.mark.parametrize("n", [16, 25, 264])
def test_setmaxnreg_range(n):
    with pytest.raises(UnsupportedError, match="setmaxnreg"):
        run(f"setmaxnreg.inc.sync.aligned.u32 {n};", block=128)


@pytest.mark.parametrize(("down", "up", "fits"), [(24, 240, True), (32, 232, True), (64, 216, True), (64, 224, False), (24, 248, False)])
def test_registers_of_a_cta(down, up, fits):
    """384 threads are launched with 168 registers each, 8 of 65,536 / 384 rounded down: one warpgroup's, given up, go to the other two."""
    body = (
        f"setp.lt.u32 %p0, %r0, 128;\n@%p0 bra DOWN;\nsetmaxnreg.inc.sync.aligned.u32 {up};\nbra END;\n"
        f"DOWN:\nsetmaxnreg.dec.sync.aligned.u32 {down};\nEND:\n"
    )
    for schedule in (*ALL, api.Schedule("eager", width=128)):
        if fits:
            run(body, block=384, schedule=schedule)
        else:
            with pytest.raises(DeadlockError, match=f"setmaxnreg.inc to {up}"):
                run(body, block=384, schedule=schedule)


def test_registers_only_go_the_way_that_is_said():
    for direction, n in (("inc", 160), ("dec", 176)):
        with pytest.raises(EmulatorError, match=f"setmaxnreg.{direction} to {n} of a warp that has 168"):
            run(f"setmaxnreg.{direction}.sync.aligned.u32 {n};", block=384)


def test_a_conversion_reads_the_low_bits_of_a_wider_register():
    x, out = torch.tensor([-(2**40) - 3, 2**33 + 5], dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    body = (
        "ld.global.v2.b64 {%rd2, %rd3}, [%rd0];\ncvt.s64.s32 %rd4, %rd2;\n"
        "cvt.u64.u32 %rd5, %rd3;\ncvt.s64.s8 %rd6, %rd2;\ncvt.u64.u16 %rd7, %rd2;\n"
    )
    body += "st.global.v2.b64 [%rd1], {%rd4, %rd5};\nst.global.v2.b64 [%rd1+16], {%rd6, %rd7};\n"
    run(body, x, out, block=1)
    assert out.tolist() == [-3, 5, -3, 65533]


def test_a_register_of_another_class_stops():
    with pytest.raises(UnsupportedError, match="register %rd0 of 64 bits as U"):
        run("add.u32 %r3, %rd0, 1;", torch.zeros(1))


def test_fp8_from_f16_pairs_and_integer_relu():
    x, out = torch.tensor([1.3, -500.0, 0.001, 3.0]).half(), torch.zeros(3, dtype=torch.int32)
    body = (
        "ld.global.v2.b32 {%r3, %r4}, [%rd0];\ncvt.rn.satfinite.e4m3x2.f16x2 %h0, %r3;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 %h1, %r4;\nmov.b32 %r5, {%h0, %h1};\n"
    )
    body += (
        "min.relu.s32 %r6, -4, 7;\nmax.relu.s32 %r7, -4, -3;\nst.global.b32 [%rd1], %r5;\n"
        "st.global.b32 [%rd1+4], %r6;\nst.global.b32 [%rd1+8], %r7;\n"
    )
    run(body, x, out, block=1)
    assert torch.equal(out[:1].view(torch.uint8), x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    assert out[1:].tolist() == [0, 0]
