"""Blackwell's tensor core and tensor memory: alloc, ld, st, wait, cp, mma, commit.

``cp``, ``mma`` and ``commit`` of a CTA (or of a pair, issued by one CTA) execute in issue order on one queue. ``ld`` and
``st`` are asynchronous to their warp until ``tcgen05.wait``.

Layouts. D of a one-CTA M = 128 product: row r in lane r, one 32-bit column per N. Pairs (``cta_group::2``): M = 256 puts
rows 0-127 in the even CTA, 128-255 in the odd one, B split by N between both; M = 128 puts 64 rows in each CTA, columns
0..N/2 in lanes 0-63, N/2..N in lanes 64-127. Scale factors: row r of a 128-row block in lane r % 32 (and the same in all
four lane quadrants), column ``sf + r // 32``, byte ``SF_ID``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import EmulatorError, MemoryFaultError, UnsupportedError
from ..matrix import operand_addresses, operand_words
from ..memory import CTA_SHIFT
from ..numerics import DECODE, DECODE_E2M1, bf16_to_f32, f16, f32, u8, u16, u32
from ..ptx import Instr, Mem, Not, Reg, Vec
from ..registry import Wait, op
from .mbarrier import at

_OFFSET = (1 << CTA_SHIFT) - 1


def _column(g: Any, role: str, column: int) -> int:
    """First column of an access. ``role``: d (accumulator), a (operand), sf (scale factors), ld, st. The fault harness
    hooks in here to record the regions a kernel uses and to shift one of them."""
    hook = g.machine.column_hook
    return column if hook is None else hook(role, column)


_GROUP = "cta_group::1 cta_group::2 sync aligned"


def _first(g: Any, a: Any, m: np.ndarray, view: str = "U") -> int:
    lane = int(np.argmax(m))
    return int(g.addr(a, view)[lane]) if isinstance(a, Mem) else int(g.ev(a, view)[lane])


# --- allocation ----------------------------------------------------------------------------------------------------
class AllocationWait(Wait):
    def __init__(self, tmem: Any, n: int) -> None:
        self.tmem, self.n = tmem, n

    def ready(self) -> bool:
        start = self.tmem.allocate(self.n)
        if start is None:
            return False
        del self.tmem.allocated[start]
        return True

    def describe(self) -> str:
        return f"{self.n} free TMEM columns (allocated: {self.tmem.allocated})"


class PairAllocation(Wait):
    """``cta_group::2``: one warp of each CTA of the pair allocates, together."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.served: set[int] = set()
        self.start: int | None = None

    def ready(self) -> bool:
        return len(self.arrived) == 2

    def describe(self) -> str:
        return f"tcgen05.alloc of the peer CTA (arrived: {sorted(self.arrived)})"


def _fresh(g: Any, ctas: list[Any], start: int, n: int) -> None:
    """Nothing is written in newly allocated columns."""
    if g.clock is not None:
        for cta in ctas:
            g.cluster.checker.tmem_allocated(cta.rank, start, n)


def _allocate(g: Any, I: Instr, n: int) -> int | Wait:
    """First column, in the CTA or in both CTAs of the pair, or what to wait for."""
    if "cta_group::2" not in I.parts:
        start = g.cta.tmem.allocate(n)
        if start is None:
            return AllocationWait(g.cta.tmem, n)
        _fresh(g, [g.cta], start, n)
        return start
    ctas = _pair(g, I)
    pairs = g.cluster.pair_allocations
    request = pairs.setdefault(ctas[0].rank, PairAllocation())
    request.arrived.add(g.cta.rank)
    if not request.ready():
        return request
    if request.start is None:
        start = ctas[0].tmem.allocate(n)
        if start is None:
            return AllocationWait(ctas[0].tmem, n)
        if ctas[1].tmem.allocate(n) != start:
            raise EmulatorError(f"the CTAs of a pair hold different allocations; {g.where(I)}")
        request.start = start
        _fresh(g, ctas, start, n)  # of both now: the first to go on may use both, long before the other goes on
    request.served.add(g.cta.rank)
    if len(request.served) == 2:
        del pairs[ctas[0].rank]
    return request.start


@op("tcgen05.alloc", aligned=True, allow=f"{_GROUP} shared::cta b32")
def alloc(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    for w in np.unique(g.warp[m]):
        mask = m & (g.warp == w)
        a, n = _first(g, I.args[0], mask), _first(g, I.args[1], mask)
        if n not in (32, 64, 128, 256, 512):
            raise EmulatorError(f"tcgen05.alloc of {n} columns: a power of two from 32 to 512; {g.where(I)}")
        if not g.cta.tmem.permit:
            raise EmulatorError(f"tcgen05.alloc after relinquish_alloc_permit; {g.where(I)}")
        g.memory.check_shared_range(a, 4, lambda: g.where(I))
        start = _allocate(g, I, n)
        if isinstance(start, Wait):
            return start
        if g.clock is not None:
            g.memory.checker.warp_access(g, I, np.array([a]), 4, write=True)
        g.memory.words[a >> 2] = start
        g.machine.events += 1
    return None


@op("tcgen05.dealloc", aligned=True, allow=f"{_GROUP} b32")
def dealloc(g: Any, I: Instr, m: np.ndarray) -> None:
    start, n = _first(g, I.args[0], m), _first(g, I.args[1], m)
    if g.clock is not None:
        g.cluster.checker.tmem_freed(g, I, start, n)
    g.cta.tmem.free(start, n, lambda: g.where(I))
    g.machine.events += 1


@op("tcgen05.relinquish_alloc_permit", aligned=True, allow=_GROUP)
def relinquish(g: Any, I: Instr, m: np.ndarray) -> None:
    g.cta.tmem.permit = False


# --- ld, st --------------------------------------------------------------------------------------------------------
_SHAPES = "32x32b x1 x2 x4 x8 x16 x32 x64 x128 b32"


def _place(g: Any, I: Instr, address: Any, m: np.ndarray, n: int, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Lane (row) and first column per active lane; checks ownership and allocation."""
    a = g.addr(address)[m]
    first = int(a[0])
    plain = a.size == g.W == 32 and g.machine.column_hook is None and first >> 16 == g.first_warp % 4 * 32
    if plain and np.logical_and.reduce(a == first):  # a warp's own quadrant, one column
        g.cta.tmem.check(first & 0xFFFF, n, lambda: g.where(I))
        return (first >> 16) + g.lane, a & 0xFFFF
    row, col = (a >> 16) + g.lane[m], a & 0xFFFF
    if g.machine.column_hook is not None:
        col = col + (_column(g, role, int(col[0])) - int(col[0]))
    if (row >> 5 != g.warp[m] % 4).any():
        raise MemoryFaultError(f"warp accesses TMEM lanes {int(row.min())}..{int(row.max())} outside its quadrant; {g.where(I)}")
    for c in np.unique(col):
        g.cta.tmem.check(int(c), n, lambda: g.where(I))
    return row, col


def _check_shape(I: Instr) -> None:
    if "32x32b" not in I.parts:
        raise I.unsupported("shape of tcgen05.ld/st")


def register_rows(I: Instr, regs: list[Any]) -> Any:
    """Rows of an instruction's 32-bit registers, as a slice where they follow one another."""
    if I.plan is None:
        rows = [r.idx for r in regs]
        follow = rows == list(range(rows[0], rows[0] + len(rows)))
        I.plan = slice(rows[0], rows[0] + len(rows)) if follow else np.array(rows)
    return I.plan


@op("tcgen05.ld", aligned=True, allow=f"sync aligned {_SHAPES}", check=_check_shape, writes=True)
def load(g: Any, I: Instr, m: np.ndarray) -> None:
    regs = list(I.args[0].items) if isinstance(I.args[0], Vec) else [I.args[0]]
    row, col = _place(g, I, I.args[1], m, len(regs), "ld")
    if g.clock is not None:
        g.cluster.checker.tmem_load(g, I, int(col[0]), len(regs), regs)
    words = g.cta.tmem.words
    if row.size == 32 and np.logical_and.reduce(col == col[0]):
        v = words[int(row[0]) : int(row[0]) + 32, int(col[0]) : int(col[0]) + len(regs)].T
    else:
        v = words[row[:, None], col[:, None] + np.arange(len(regs))].T
    if row.size == g.W:
        g.U.whole[register_rows(I, regs)] = v
    else:
        for j, r in enumerate(regs):
            g.U[r.idx][m] = v[j]
    g.machine.add("tmem_load_bytes", 4 * v.size)


@op("tcgen05.st", aligned=True, allow=f"sync aligned {_SHAPES}", check=_check_shape)
def store(g: Any, I: Instr, m: np.ndarray) -> None:
    regs = list(I.args[1].items) if isinstance(I.args[1], Vec) else [I.args[1]]
    row, col = _place(g, I, I.args[0], m, len(regs), "st")
    if g.clock is not None:
        g.cluster.checker.tmem_store(g, I, int(col[0]), len(regs))
    if row.size == g.W and all(r.__class__ is Reg for r in regs):
        v = g.U.whole[register_rows(I, regs)].T.copy()
    else:
        v = np.stack([g.ev(r)[m] for r in regs], 1)
    words = g.cta.tmem.words
    if row.size == 32 and np.logical_and.reduce(col == col[0]):
        place: Any = (slice(int(row[0]), int(row[0]) + 32), slice(int(col[0]), int(col[0]) + len(regs)))
    else:
        place = (row[:, None], col[:, None] + np.arange(len(regs)))

    def finish() -> None:
        words[place] = v

    machine = g.machine
    # A store may land any time up to wait::st; the adversary sometimes holds it back until then.
    if not machine.scheduler.eager and machine.rng.random() < 0.5:
        g.state.setdefault("tmem_stores", []).append((m.copy(), finish))
    else:
        finish()
    machine.add("tmem_store_bytes", 4 * v.size)


@op("tcgen05.wait", aligned=True, allow="wait::ld wait::st sync aligned")
def wait(g: Any, I: Instr, m: np.ndarray) -> None:
    kind = "ld" if "wait::ld" in I.parts else "st"
    if kind == "st":
        held, keep = g.state.get("tmem_stores", []), []
        for mask, finish in held:
            if (mask & m).any():
                finish()
            else:
                keep.append((mask, finish))
        g.state["tmem_stores"] = keep
    if g.clock is not None:
        g.cluster.checker.tmem_wait(g, I, kind)


@op("tcgen05.fence", allow="fence::before_thread_sync fence::after_thread_sync")
def fence(g: Any, I: Instr, m: np.ndarray) -> None:
    """Orders tcgen05 operations around thread synchronisation. Not checked: see the README."""


# --- the in-order queue ----------------------------------------------------------------------------------------------
def _queue(g: Any) -> tuple[str, int, int]:
    return ("tensor core", g.cluster.number, g.cta.rank)


def _pair(g: Any, I: Instr) -> list[Any]:
    """CTAs an operation works on: its own, or the pair."""
    if "cta_group::2" not in I.parts:
        return [g.cta]
    even = g.cta.rank & ~1
    return g.cluster.ctas[even : even + 2]


@op("tcgen05.commit", allow=f"{_GROUP} mbarrier::arrive::one shared::cluster multicast::cluster b64")
def commit(g: Any, I: Instr, m: np.ndarray) -> None:
    for lane in np.flatnonzero(m):
        a = int(g.addr(I.args[0])[lane])
        targets = [a]
        if "multicast::cluster" in I.parts:
            mask = int(g.ev(I.args[1], "H")[lane])
            targets = [(r << CTA_SHIFT) | a & _OFFSET for r in range(16) if mask >> r & 1]
        for x in targets:
            at(g.cluster, x, lambda: g.where(I))
        token = g.cluster.checker.issue_commit(g, I) if g.clock is not None else None

        def complete(targets: list[int] = targets, token: Any = token) -> None:
            for x in targets:
                b = at(g.cluster, x)
                if token is not None:
                    g.cluster.checker.commit_arrives(token, b)
                b.arrive()

        g.machine.submit(_queue(g), complete)


def _check_copy(I: Instr) -> None:
    if "32x128b" not in I.parts or "warpx4" not in I.parts:
        raise I.unsupported("shape of tcgen05.cp")


@op("tcgen05.cp", allow=f"{_GROUP} 32x128b warpx4", check=_check_copy)
def copy(g: Any, I: Instr, m: np.ndarray) -> None:
    """32 rows of 128 bits from shared memory to four columns, replicated to the four lane quadrants."""
    for lane in np.flatnonzero(m):
        column, d = _column(g, "sf", int(g.addr(I.args[0])[lane]) & 0xFFFF), int(g.ev(I.args[1], "D")[lane])
        ctas = _pair(g, I)
        addresses = operand_addresses(d, 32, 16, False, 1)
        token = g.cluster.checker.issue_tensor(g, I) if g.clock is not None else None
        for cta in ctas:
            cta.tmem.check(column, 4, lambda: g.where(I))
            g.memory.check_shared(addresses[:, ::16] + (cta.rank << CTA_SHIFT), 16, lambda: g.where(I))
            if token is not None:
                g.cluster.checker.shared_words(token, operand_words(d, 32, 16, False, 1) + (cta.rank << (CTA_SHIFT - 2)), write=False)
                g.cluster.checker.tmem_range(token, cta.rank, 15, column, 4, write=True)

        def complete(ctas: Any = ctas, addresses: np.ndarray = addresses, column: int = column) -> None:
            for cta in ctas:
                v = g.memory.arena[addresses + (cta.rank << CTA_SHIFT)].view(u32)
                cta.tmem.words[:, column : column + 4] = np.tile(v, (4, 1))

        g.machine.submit(_queue(g), complete)


# --- mma -------------------------------------------------------------------------------------------------------------
_FORMATS = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "f8f6f4": {0: "e4m3", 1: "e5m2"}, "mxf8f6f4": {0: "e4m3", 1: "e5m2"}}
_MMA = (
    f"{_GROUP} kind::f16 kind::f8f6f4 kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4 block_scale scale_vec::1X scale_vec::2X "
    "scale_vec::4X block16 block32 collector::a::fill collector::a::use collector::a::lastuse collector::a::discard"
)


class Product:
    """One decoded ``tcgen05.mma``: shapes, formats, operand sources."""

    def __init__(self, g: Any, I: Instr, lane: int) -> None:
        A = I.args
        self.g, self.I = g, I
        self.ctas = _pair(g, I)
        self.kind = next(x for x in I.parts if x.startswith("kind::")).removeprefix("kind::")
        self.scaled = "block_scale" in I.parts
        self.d = _column(g, "d", int(g.addr(A[0])[lane]) & 0xFFFF)
        self.a_in_tmem = isinstance(A[1], Mem)
        self.a = int(g.addr(A[1])[lane]) if self.a_in_tmem else int(g.ev(A[1], "D")[lane])
        if self.a_in_tmem:
            self.a = self.a & ~0xFFFF | _column(g, "a", self.a & 0xFFFF)
        self.b = int(g.ev(A[2], "D")[lane])
        idesc = self.idesc = int(g.ev(A[3])[lane])
        rest = list(A[4:])
        if self.scaled:
            self.sfa, self.sfb = (_column(g, "sf", int(g.addr(x)[lane]) & 0xFFFF) for x in rest[:2])
            rest = rest[2:]
        if rest and isinstance(rest[0], Vec):  # disable-output-lane
            if any(int(g.ev(x)[lane]) for x in rest[0].items):
                raise I.unsupported("disable-output-lane")
            rest = rest[1:]
        if len(rest) != 1:
            raise I.unsupported(f"{len(rest)} operands after the descriptors")
        p = rest[0]
        self.accumulate = not g.predicate(p.operand, lane) if isinstance(p, Not) else g.predicate(p, lane)
        self.n = (idesc >> 17 & 63) << 3
        self.a_mn, self.b_mn = bool(idesc >> 15 & 1), bool(idesc >> 16 & 1)
        known = 0x3F << 17 | 7 << 7 | 7 << 10 | 3 << 15
        if self.scaled:
            self.m = (idesc >> 27 & 3) << 7
            known |= 3 << 27 | 3 << 29 | 3 << 4 | 1 << 23
            self.scale_format = "ue8m0" if idesc >> 23 & 1 else "e4m3"
            self.sf_ids = (idesc >> 29 & 3, idesc >> 4 & 3)
        else:
            self.m = (idesc >> 24 & 31) << 4
            known |= 31 << 24 | 3 << 4
            if idesc >> 4 & 3 != 1:
                raise I.unsupported(f"accumulator type {idesc >> 4 & 3}")
        if idesc & ~known:
            raise I.unsupported(f"instruction descriptor {idesc:#010x}, bits {idesc & ~known:#x}")
        if self.m not in ((128, 256) if len(self.ctas) == 2 else (128,)) or not self.n or (self.scaled and self.m != 128 * len(self.ctas)):
            raise I.unsupported(f"M {self.m}, N {self.n} with {len(self.ctas)} CTA")
        if self.kind in ("mxf4", "mxf4nvf4"):
            self.format, self.k, self.element = ("e2m1", "e2m1"), 64, 0.5
            if self.a_in_tmem or self.a_mn or self.b_mn:
                raise I.unsupported("FP4 operand that is not K-major in shared memory")
        else:
            codes = (idesc >> 7 & 7, idesc >> 10 & 7)
            table = _FORMATS[self.kind]
            if codes[0] not in table or codes[1] not in table:
                raise I.unsupported(f"operand types {codes} of kind {self.kind}")
            self.format = (table[codes[0]], table[codes[1]])
            self.element, self.k = (2, 16) if self.kind == "f16" else (1, 32)
        # rows per CTA
        self.a_rows, self.b_rows = self.m // len(self.ctas), self.n // len(self.ctas)
        self.split_columns = len(self.ctas) == 2 and self.m == 128
        if self.split_columns and self.a_in_tmem:
            raise I.unsupported("A in TMEM with M 128 on two CTAs")
        self.d_columns = self.n // 2 if self.split_columns else self.n
        if self.scaled:
            self.vector, self.sf_bytes = self._scale_shape()

    def _scale_shape(self) -> tuple[int, tuple[list[int], list[int]]]:
        """Elements per scale, and which bytes of the scale columns this product reads."""
        ia, ib = self.sf_ids
        parts = self.I.parts
        if self.kind == "mxf8f6f4":
            return 32, ([ia], [ib])
        if "block16" in parts or "scale_vec::4X" in parts:
            return 16, ([0, 1, 2, 3], [0, 1, 2, 3])
        if ia > 2 or ib > 2:
            raise self.I.unsupported(f"scale ids {self.sf_ids} with two scales per row")
        return 32, ([ia, ia + 1], [ib, ib + 1])

    # shared-memory geometry: FP4 counts bytes
    def _geometry(self) -> tuple[int, int]:
        return (self.k // 2, 1) if self.element == 0.5 else (self.k, int(self.element))

    def _operand_args(self, which: str) -> tuple[Any, ...]:
        k, e = self._geometry()
        if which == "a":
            return (self.a, self.a_rows, k, self.a_mn, e)
        return (self.b, self.b_rows, k, self.b_mn, e)

    def _values(self, raw: np.ndarray, fmt: str) -> np.ndarray:
        if fmt == "bf16":
            return bf16_to_f32(raw)
        if fmt == "f16":
            return raw.view(f16).astype(f32)
        if fmt == "e2m1":
            return np.stack([DECODE_E2M1[raw & 15], DECODE_E2M1[raw >> 4]], -1).reshape(len(raw), -1)
        return DECODE[fmt][raw]

    def _shared_operand(self, which: str, cta: Any) -> np.ndarray:
        at_ = operand_addresses(*self._operand_args(which)) + (cta.rank << CTA_SHIFT)
        arena = self.g.memory.arena
        raw = arena.view(u16)[at_ >> 1] if self._geometry()[1] == 2 else arena[at_]
        return self._values(raw, self.format[0 if which == "a" else 1])

    def _tmem_operand(self, cta: Any) -> np.ndarray:
        lane, c = self.a >> 16, self.a & 0xFFFF
        words = int(self.k * self.element) // 4
        raw = np.ascontiguousarray(cta.tmem.words[lane : lane + self.a_rows, c : c + words])
        raw = raw.view(u16 if self.element == 2 else u8)
        return self._values(raw.reshape(self.a_rows, self.k), self.format[0])

    def _scales(self, cta: Any, address: int, rows: int, ids: list[int]) -> np.ndarray:
        c, r = address & 0xFFFF, np.arange(rows)
        column = c + r // 32
        quadrants = [np.stack([(cta.tmem.words[r % 32 + 32 * q, column] >> u32(8 * i)) & u32(255) for i in ids], 1) for q in range(4)]
        if not all((quadrants[0] == x).all() for x in quadrants[1:]):
            raise EmulatorError(f"scale factors at TMEM column {c} differ between lane quadrants; {self.g.where(self.I)}")
        return DECODE[self.scale_format][quadrants[0]]

    def check(self) -> None:
        """Bounds of every operand; what the race checker has to know."""
        g, I, checker = self.g, self.I, self.g.cluster.checker
        token = checker.issue_tensor(g, I) if checker is not None else None
        _, e = self._geometry()
        for cta in self.ctas:
            base = cta.rank << CTA_SHIFT
            cta.tmem.check(self.d, self.d_columns, lambda: g.where(I))
            for which in ("a", "b"):
                if which == "a" and self.a_in_tmem:
                    cta.tmem.check(self.a & 0xFFFF, int(self.k * self.element) // 4, lambda: g.where(I))
                    if token is not None:
                        checker.tmem_range(token, cta.rank, 15, self.a & 0xFFFF, int(self.k * self.element) // 4, write=False)
                    continue
                args = self._operand_args(which)
                words = operand_words(*args)
                if (int(words[-1]) << 2) + 4 > g.memory.shared_size:
                    g.memory.check_shared(operand_addresses(*args) + base, e, lambda: g.where(I))
                if token is not None:
                    checker.shared_words(token, words + (base >> 2), write=False)
            if self.scaled:
                for sf, rows in ((self.sfa, 128), (self.sfb, self.n)):
                    columns = (rows + 31) // 32
                    cta.tmem.check(sf & 0xFFFF, columns, lambda: g.where(I))
                    if token is not None:
                        checker.tmem_range(token, cta.rank, 15, sf & 0xFFFF, columns, write=False)
            if token is not None:
                if self.accumulate:
                    checker.tmem_range(token, cta.rank, 15, self.d, self.d_columns, write=False)
                checker.tmem_range(token, cta.rank, 15, self.d, self.d_columns, write=True)

    def execute(self) -> None:
        b = np.concatenate([self._shared_operand("b", cta) for cta in self.ctas])
        for cta in self.ctas:
            a = self._tmem_operand(cta) if self.a_in_tmem else self._shared_operand("a", cta)
            bb = b
            if self.scaled:
                sa = self._scales(cta, self.sfa, self.a_rows, self.sf_bytes[0])
                sb = self._scales(cta, self.sfb, self.n, self.sf_bytes[1])
                a, bb = a * np.repeat(sa, self.vector, 1), b * np.repeat(sb, self.vector, 1)
            product = a @ bb.T
            if self.split_columns:
                half = self.n // 2
                product = np.concatenate([product[:, :half], product[:, half:]], 0)
            t = cta.tmem.words[: product.shape[0], self.d : self.d + self.d_columns].view(f32)
            if self.accumulate:
                t += product
            else:
                t[:] = product


@op("tcgen05.mma", allow=_MMA)
def mma(g: Any, I: Instr, m: np.ndarray) -> None:
    for lane in np.flatnonzero(m):
        try:
            p = Product(g, I, int(lane))
            p.check()
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}; {g.where(I)}") from None
        g.machine.submit(_queue(g), p.execute)
        g.machine.add("mma_flops", 2 * p.m * p.n * p.k)
        g.machine.add(f"mma_flops_{int(8 * p.element)}bit", 2 * p.m * p.n * p.k)
        rows = p.b_rows + (0 if p.a_in_tmem else p.a_rows)
        g.machine.add("mma_shared_bytes", int(len(p.ctas) * rows * p.k * p.element))
