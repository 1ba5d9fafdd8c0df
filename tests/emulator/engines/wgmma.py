"""Hopper's warpgroup tensor core: ``wgmma.mma_async``, ``fence``, ``commit_group``, ``wait_group``.

A product belongs to a warpgroup: it exists once all four warps have issued it, and completes as a whole at a time that
the scheduler picks, after the products issued before it. Only then are the operands read (shared memory and the A
registers) and the accumulator registers written; from issue to completion these hold poison. ``wait_group`` of a warp
waits for groups that this warp committed.

Layouts (PTX ISA, "Asynchronous warpgroup level matrix"): warp w of the group holds rows 16 w to 16 w + 15; a thread holds
rows ``lane // 4`` and ``+ 8``. Accumulator element i of a thread: row ``+ 8 (i // 2 % 2)``, column
``8 (i // 4) + 2 (lane % 4) + i % 2``. A from registers: register r has row ``+ 8 (r % 2)`` and the ``32 / bits`` elements
from ``k = (128 / bits) (r // 2) + (32 / bits) (lane % 4)`` on.

Sums are FP32 in an order of NumPy's choice; FP16 accumulators are rounded once an instruction, to the nearest, ties to even. With
``fidelity.fp8_accumulator_bits`` and ``half_accumulator_bits`` they are summed as Hopper does it (``narrow_product``).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np

from .. import check_sm90
from ..errors import EmulatorError, UnsupportedError
from ..matrix import operand_addresses, operand_words
from ..memory import CTA_SHIFT
from ..numerics import DECODE, bf16_to_f32, f16, f32, f64, i64, u8, u16, u32
from ..ptx import Imm, Instr, Not, Reg, Vec
from ..registry import Wait, op

WARPS = 4
ROWS = 64
_KINDS = {("bf16", "bf16"): 16, ("f16", "f16"): 16} | {(a, b): 32 for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")}


# --- decoding ------------------------------------------------------------------------------------------------------
class Shape:
    """Static part of an instruction: extents, formats, which operand is where. Computed once per instruction."""

    def __init__(self, I: Instr) -> None:
        shape = next((m for m in (re.fullmatch(r"m64n(\d+)k(\d+)", x) for x in I.parts) if m), None)
        if shape is None or len(I.parts) != 8:
            raise I.unsupported("form of wgmma.mma_async (known: m64nNkK.d.a.b, dense)")
        self.n, self.k = int(shape.group(1)), int(shape.group(2))
        self.d, self.a, self.b = I.parts[-3:]
        if self.n % 8 or not 8 <= self.n <= 256:
            raise I.unsupported(f"wgmma N = {self.n}")
        if _KINDS.get((self.a, self.b)) != self.k or self.d not in ("f32", "f16") or (self.d, self.a) == ("f16", "bf16"):
            raise I.unsupported(f"wgmma types {self.d}.{self.a}.{self.b} with K = {self.k}")
        self.element = 32 // self.k
        A = I.args
        self.accumulators = _indices(I, A[0], self.n // (2 if self.d == "f32" else 4))
        self.a_registers = _indices(I, A[1], 4) if isinstance(A[1], Vec) else None
        flags = A[4:]
        transposable = 0 if self.element == 1 else (1 if self.a_registers is not None else 2)
        if len(flags) != 2 + transposable or not all(isinstance(x, Imm) for x in flags):
            raise I.unsupported(f"wgmma with {len(flags)} immediates")
        signs = [x.value for x in flags[:2]]
        if any(s not in (1, -1) for s in signs):
            raise I.unsupported(f"wgmma imm-scale {signs}")
        self.sign = signs[0] * signs[1]
        trans = [x.value for x in flags[2:]]
        self.b_mn_major = bool(trans and trans[-1])
        self.a_mn_major = bool(len(trans) == 2 and trans[0])
        #: products of one code have one shape
        self.code = 1 + self.n * 64 + self.k


def _indices(I: Instr, vec: Any, count: int) -> np.ndarray:
    if not isinstance(vec, Vec) or len(vec.items) != count or not all(isinstance(x, Reg) and x.cls == 32 for x in vec.items):
        raise I.unsupported(f"wgmma operand {vec!r}: expected {count} 32-bit registers")
    found = np.array([x.idx for x in vec.items])
    if np.unique(found).size != count:
        raise I.unsupported("wgmma operand with a register named twice")
    return found


_shapes: dict[int, tuple[Instr, Shape]] = {}


def shape_of(I: Instr) -> Shape:
    known = _shapes.get(id(I))
    if known is None or known[0] is not I:
        known = _shapes[id(I)] = (I, Shape(I))
    return known[1]


def _check(I: Instr) -> None:
    shape_of(I)


def decode(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Elements as stored (uint8 codes or uint16 bits) → float32."""
    if fmt == "bf16":
        return bf16_to_f32(raw)
    if fmt == "f16":
        return raw.view(f16).astype(f32)
    return DECODE[fmt][raw]


# --- warpgroups and their products ---------------------------------------------------------------------------------
class Warpgroup:
    """Products of one warpgroup: how many each warp has issued, and those not complete, by number."""

    def __init__(self) -> None:
        self.issued = [0] * WARPS
        self.pending: dict[int, Product] = {}


class Product:
    """One ``wgmma.mma_async`` of a warpgroup. ``parts[w]``: gang and lanes of warp w once it has issued."""

    def __init__(self, I: Instr, shape: Shape, number: int) -> None:
        self.I, self.shape, self.number = I, shape, number
        self.parts: list[tuple[Any, slice] | None] = [None] * WARPS
        self.before: list[np.ndarray | None] = [None] * WARPS
        self.descriptors: tuple[int, ...] = ()
        self.accumulate = False
        self.done = False
        #: race checker: clock of each warp at its issue; agent and epoch of the reads
        self.clocks: list[Any] = [None] * WARPS
        self.agent, self.epoch = -1, 0

    def join(self, group: Warpgroup, g: Any, warp: int, lanes: slice, descriptors: tuple[int, ...], accumulate: bool) -> bool:
        """One warp issues; True when it is the last of the four."""
        if any(p is not None for p in self.parts) and (descriptors, accumulate) != (self.descriptors, self.accumulate):
            raise EmulatorError(f"warps of one warpgroup issue different operands; {g.where(self.I)}")
        self.descriptors, self.accumulate = descriptors, accumulate
        self.parts[warp] = (g, lanes)
        mine = self.shape.accumulators
        registers = g.U[0].base
        chained = False
        for other in group.pending.values():
            if other is self or other.parts[warp] is None:
                continue
            theirs = other.shape.accumulators
            if np.array_equal(theirs, mine):
                chained = True
            elif np.intersect1d(theirs, mine).size:
                raise EmulatorError(f"accumulators overlap those of a product in flight ({other.I.where()}); {g.where(self.I)}")
            if other.shape.a_registers is not None and np.intersect1d(other.shape.a_registers, mine).size:
                raise EmulatorError(f"accumulators overlap the A registers of a product in flight ({other.I.where()}); {g.where(self.I)}")
        if g.clock is not None:
            self.clocks[warp] = g.clock.vc.copy()
            g.clock.vc[0, g.clock.agent] += 1
        if not chained:
            if accumulate:
                self.before[warp] = registers[mine, lanes]
            if g.machine.poison:
                registers[mine, lanes] = 0xFFFFFFFF
        return all(p is not None for p in self.parts)

    # --- completion --------------------------------------------------------------------------------------------------
    def _registers(self, index: np.ndarray) -> np.ndarray:
        """Registers ``index`` of the 128 threads, ``[len(index), 128]``."""
        return np.concatenate([g.U[0].base[index, lanes] for g, lanes in self.parts], 1)  # type: ignore[misc]

    def _shared(self, descriptor: int, rows: int, mn_major: bool, fmt: str) -> np.ndarray:
        g = self.parts[0][0]  # type: ignore[index]
        s = self.shape
        addresses = operand_addresses(descriptor, rows, s.k, mn_major, s.element, True) + (g.cta.rank << CTA_SHIFT)
        if s.element == 2:
            return decode(g.memory.arena.view(u16)[addresses >> 1], fmt)
        return decode(g.memory.arena[addresses], fmt)

    def _a(self) -> np.ndarray:
        s = self.shape
        if s.a_registers is None:
            return self._shared(self.descriptors[0], ROWS, s.a_mn_major, s.a)
        words = self._registers(s.a_registers)  # [4, 128]
        items = np.ascontiguousarray(words.T).view(u8 if s.element == 1 else u16)  # [128, 4 registers x elements]
        n = items.shape[1] // 4
        # thread (warp, row, quarter), register (k half, row half), element
        items = items.reshape(WARPS, 8, 4, 2, 2, n).transpose(0, 4, 1, 3, 2, 5)
        return decode(np.ascontiguousarray(items).reshape(ROWS, s.k), s.a)

    def _accumulator(self) -> np.ndarray:
        s = self.shape
        words = np.concatenate(
            [
                before if before is not None else g.U[0].base[s.accumulators, lanes]
                for before, (g, lanes) in zip(self.before, self.parts, strict=True)  # type: ignore[misc]
            ],
            1,
        )
        if s.d == "f32":
            return words.view(f32).reshape(s.n // 8, 2, 2, WARPS, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(ROWS, s.n)
        pairs = np.ascontiguousarray(words.reshape(s.n // 8, 2, WARPS, 8, 4).transpose(2, 1, 3, 0, 4)).view(f16)
        return pairs.reshape(ROWS, s.n).astype(f32)

    def _write(self, d: np.ndarray) -> None:
        s = self.shape
        if s.d == "f32":
            words = d.reshape(WARPS, 2, 8, s.n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(s.n // 2, 128).view(u32)
        else:
            pairs = np.ascontiguousarray(d.astype(f16)).view(u32).reshape(WARPS, 2, 8, s.n // 8, 4)
            words = pairs.transpose(3, 1, 0, 2, 4).reshape(s.n // 4, 128)
        for w, (g, lanes) in enumerate(self.parts):  # type: ignore[misc]
            g.U[0].base[s.accumulators, lanes] = words[:, 32 * w : 32 * w + 32]

    def execute(self) -> None:
        s = self.shape
        g = self.parts[0][0]  # type: ignore[index]
        a, b = self._a(), self._shared(self.descriptors[-1], s.n, s.b_mn_major, s.b)
        if s.sign < 0:
            a = -a
        c = self._accumulator() if self.accumulate else None
        bits = getattr(g.machine.fidelity, "fp8_accumulator_bits" if s.element == 1 else "half_accumulator_bits", 0)
        if bits:
            d = narrow_product(a, b, c, bits, (s.a, s.b), s.d)
        else:
            d = a @ b.T
            if c is not None:
                d += c
        self._write(np.ascontiguousarray(d, f32))
        self.done = True


#: smallest exponent of a normal number: below it the significand is not normalized
_SMALLEST = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "f32": -126}
_ZERO = -(1 << 10)


def _exponents(x: np.ndarray, fmt: str) -> np.ndarray:
    """Exponent of each element as the multiplier sees it (subnormal numbers: that of the smallest normal one)."""
    return np.maximum(np.frexp(x)[1] - 1, _SMALLEST[fmt])


def narrow_product(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, bits: int, formats: tuple[str, str] = ("e4m3", "e4m3"), d: str = "f32"
) -> np.ndarray:
    """``a [M, K] @ b [N, K].T + c`` as Hopper's tensor core sums it, of ``formats``, to ``d``.

    Significands are aligned to the largest exponent of the summands and cut off, towards zero, ``bits - 1`` places behind its point
    (FP8: DeepSeek-V3, 2024, section 3.3.2: some 14 bits survive); a product's exponent is the sum of its factors', so it may stand one
    higher than that. The sum of all is exact. To FP32 it is cut off again at ``bits`` significant bits, at most 24; to FP16 it is
    rounded to the nearest, ties to even. (Xie et al., "MMA-Sim", 2025: exponents, cuts and roundings; the H200's numbers:
    ``test_hardware.py``.)
    """
    left, right = _exponents(a, formats[0]), _exponents(b, formats[1])
    out = np.empty((a.shape[0], b.shape[0]), f64)
    for row in range(a.shape[0]):
        products = a[row].astype(f64) * b  # [N, K]
        largest = np.where(products == 0, _ZERO, left[row] + right).max(1)
        if c is not None:
            largest = np.maximum(largest, np.where(c[row] == 0, _ZERO, _exponents(c[row], d)))
        unit = np.exp2(np.maximum(largest, 2 * _SMALLEST["f32"]).astype(f64) - (bits - 1))
        out[row] = np.trunc(products / unit[:, None]).sum(1)
        if c is not None:
            out[row] += np.trunc(c[row] / unit)
        out[row] *= unit
    if d == "f16":
        return out.astype(f16).astype(f32)
    unit = np.exp2(_exponents(out, d).astype(f64) - (min(bits, 24) - 1))
    return (np.trunc(out / unit) * unit).astype(f32)


# --- instructions --------------------------------------------------------------------------------------------------
def _warps(g: Any, I: Instr, m: np.ndarray) -> list[tuple[Any, int, slice]]:
    """Warpgroup, warp in it and lanes in the gang for each warp that executes."""
    if g.W != 32 and g.W % 128:
        raise UnsupportedError(f"wgmma in a gang of {g.W} lanes; {g.where(I)}")
    out = []
    groups = g.cta.__dict__.setdefault("warpgroups", {})
    for w in range(g.W // 32):
        lanes = slice(32 * w, 32 * w + 32)
        active = m[lanes]
        if not active.any():
            continue
        if not active.all():
            raise EmulatorError(f"{int(active.sum())} lanes of a warp execute a warpgroup instruction; {g.where(I)}")
        number = g.first_warp + w
        out.append((groups.setdefault(number // WARPS, Warpgroup()), number % WARPS, lanes))
    return out


class Groups:
    """Products of one warp: those not committed, and committed groups, oldest first."""

    def __init__(self) -> None:
        self.open: list[Product] = []
        self.committed: list[list[Product]] = []


def _groups(g: Any, warp: int) -> Groups:
    return g.state.setdefault("wgmma", {}).setdefault(warp, Groups())


_SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (16, 32))


@op("wgmma.mma_async", aligned=True, allow=f"sync aligned f32 f16 bf16 e4m3 e5m2 {_SHAPES}", check=_check, writes=True)
def mma_async(g: Any, I: Instr, m: np.ndarray) -> None:
    s, A = shape_of(I), I.args
    for group, warp, lanes in _warps(g, I, m):
        sources = [A[2]] if s.a_registers is not None else [A[1], A[2]]
        values = [g.ev(x, "D")[lanes] for x in sources]
        for x in values:
            if (x != x[0]).any():
                raise EmulatorError(f"matrix descriptor differs between lanes; {g.where(I)}")
        descriptors = tuple(int(x[0]) for x in values)
        accumulate = _predicate(g, I, A[3], lanes)
        number = group.issued[warp]
        group.issued[warp] += 1
        product = group.pending.get(number)
        if product is None:
            product = group.pending[number] = Product(I, s, number)
            _check_operands(g, product, descriptors)
        elif product.I is not I:
            raise EmulatorError(f"warps of one warpgroup issue different products ({product.I.where()}); {g.where(I)}")
        complete = product.join(group, g, warp, lanes, descriptors, accumulate)
        _groups(g, warp).open.append(product)
        if g.clock is not None:
            g.clock.registers.product(g, I, s.code)
            for r in A[0].items:
                g.clock.tainted[r.cls, r.idx] = (I, number)
            g.clock.taint_key = None
        if complete:
            if g.clock is not None:
                _declare(product)
            _submit(g, group, product)


@lru_cache(maxsize=4096)
def _row_words(descriptor: int, shape: tuple[int, int, bool, int], first: int, count: int) -> np.ndarray:
    """The 4-byte words of rows ``first`` to ``first + count`` of an operand, sorted."""
    rows, k, mn_major, element = shape
    return np.unique(operand_addresses(descriptor, rows, k, mn_major, element, True)[first : first + count] >> 2)


def _declare(product: Product) -> None:
    """Tell the race checker what is read, once all four warps have issued."""
    s = product.shape
    g = product.parts[0][0]  # type: ignore[index]
    base = g.cta.rank << (CTA_SHIFT - 2)
    b = operand_words(product.descriptors[-1], s.n, s.k, s.b_mn_major, s.element, True) + base
    epoch = None
    for w, (gang, _) in enumerate(product.parts):  # type: ignore[misc]
        words = [b]
        if s.a_registers is None:
            words.append(_row_words(product.descriptors[0], (ROWS, s.k, s.a_mn_major, s.element), 16 * w, 16) + base)
        product.agent, epoch = check_sm90.product_read(gang, product.I, g.first_warp // WARPS, epoch, product.clocks[w], words)
    product.epoch = epoch or 0


def _waited(g: Any, I: Instr, products: list[Product]) -> None:
    for p in products:
        check_sm90.product_waited(g, I, p.agent, p.epoch)
    if products:
        check_sm90.accumulators_waited(g, I, max(p.number for p in products))


def _predicate(g: Any, I: Instr, p: Any, lanes: slice) -> bool:
    if isinstance(p, Imm):
        return bool(p.value)
    if isinstance(p, Not):
        raise I.unsupported("negated scale-d")
    row = g.P[p.idx][lanes]
    if (row != row[0]).any():
        raise EmulatorError(f"scale-d differs between lanes; {g.where(I)}")
    return bool(row[0])


def _check_operands(g: Any, product: Product, descriptors: tuple[int, ...]) -> None:
    s = product.shape
    operands = [(descriptors[-1], s.n, s.b_mn_major)]
    if s.a_registers is None:
        operands.append((descriptors[0], ROWS, s.a_mn_major))
    for d, rows, mn_major in operands:
        try:
            words = operand_words(d, rows, s.k, mn_major, s.element, True)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}; {g.where(product.I)}") from None
        edge = np.array([words[0] * 4, words[-1] * 4], i64) + (g.cta.rank << CTA_SHIFT)
        g.memory.check_shared(edge, 4, lambda: g.where(product.I))


def _submit(g: Any, group: Warpgroup, product: Product) -> None:
    s = product.shape

    def complete() -> None:
        product.execute()
        del group.pending[product.number]

    g.machine.submit(("wgmma", g.cluster.number, g.cta.rank, (g.first_warp + _first(g, product)) // WARPS), complete)
    g.machine.add("mma_flops", 2 * ROWS * s.n * s.k)
    g.machine.add(f"mma_flops_{8 * s.element}bit", 2 * ROWS * s.n * s.k)
    g.machine.add("mma_shared_bytes", (s.n + (ROWS if s.a_registers is None else 0)) * s.k * s.element)


def _first(g: Any, product: Product) -> int:
    return next(p[1].start // 32 for p in product.parts if p is not None and p[0] is g)


@op("wgmma.fence", aligned=True, allow="sync aligned")
def fence(g: Any, I: Instr, m: np.ndarray) -> None:
    """Orders the warp's accesses to registers before its next products (``check_registers.py``)."""
    _warps(g, I, m)
    if g.clock is not None and g.clock.registers is not None:
        g.clock.registers.fence(I)


@op("wgmma.commit_group", aligned=True, allow="sync aligned")
def commit_group(g: Any, I: Instr, m: np.ndarray) -> None:
    for _, warp, _lanes in _warps(g, I, m):
        groups = _groups(g, warp)
        groups.committed.append(groups.open)
        groups.open = []


class GroupsWait(Wait):
    def __init__(self, products: list[Product]) -> None:
        self.products = products

    def ready(self) -> bool:
        return all(p.done for p in self.products)

    def describe(self) -> str:
        left = [p for p in self.products if not p.done]
        missing = [w for w in range(WARPS) if left and left[0].parts[w] is None]
        more = f", first not issued by warps {missing} of the warpgroup" if missing else ""
        return f"{len(left)} wgmma products{more}"


@op("wgmma.wait_group", aligned=True, allow="sync aligned")
def wait_group(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    keep = I.args[0].value
    older: list[Product] = []
    warps = _warps(g, I, m)
    for _, warp, _lanes in warps:
        committed = _groups(g, warp).committed
        for products in committed[: len(committed) - keep] if keep else committed:
            older += products
    wait = GroupsWait(older)
    counts = g.machine.wait_counts.setdefault(I.index, [0, 0])
    counts[0] += 1
    if not wait.ready():
        counts[1] += 1
        return wait
    if g.clock is not None:
        _waited(g, I, older)
    for _, warp, _lanes in warps:
        groups = _groups(g, warp)
        groups.committed = groups.committed[len(groups.committed) - keep :] if keep else []
    return None
