"""The bulk-copy unit: ``cp.async.bulk`` (1-D), TMA tensors (load, multicast, store, reduce), ``st.async``.

Loads complete on an mbarrier by transaction bytes; stores and reductions belong to the issuing thread's bulk groups.
All operations are unordered among themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..codegen import SIZE_OF_TYPE
from ..errors import MemoryFaultError
from ..memory import (
    CTA_SHIFT,
    host_read,
    read_chunks,
    read_shared_chunks,
    swizzle,
    write_chunks,
    write_shared_chunks,
)
from ..numerics import bf16_to_f32, f16, f32, f32_to_bf16, i32, u8, u16
from ..ptx import Instr, Mem, TensorMem, Vec
from ..registry import Wait, op
from ..tensormap import Box, TensorMap, box
from ..tensormap import read as read_descriptor
from .mbarrier import at

_OFFSET = (1 << CTA_SHIFT) - 1


# --- bulk groups -------------------------------------------------------------------------------------------------
class Group:
    """Bulk operations of one thread between two commits. ``epoch`` is the race checker's."""

    def __init__(self) -> None:
        self.pending = 0
        self.epoch = 0
        self.read_epoch = 0


class Groups:
    """Bulk groups of one lane: the open one and those committed, oldest first."""

    def __init__(self) -> None:
        self.open, self.committed = Group(), []  # type: ignore[var-annotated]

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = Group()


class GroupWait(Wait):
    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    def ready(self) -> bool:
        return not any(x.pending for x in self.groups)

    def describe(self) -> str:
        return f"bulk groups ({[x.pending for x in self.groups]} operations pending)"


def _groups(g: Any, lane: int) -> Groups:
    return g.state.setdefault("bulk", {}).setdefault(lane, Groups())


@op("cp.async.bulk.commit_group", allow="")
def commit_group(g: Any, I: Instr, m: np.ndarray) -> None:
    for lane, groups in g.state.get("bulk", {}).items():
        if m[lane]:
            groups.commit()


@op("cp.async.bulk.wait_group", allow="read")
def wait_group(g: Any, I: Instr, m: np.ndarray) -> Wait | None:
    older: list[Group] = []
    for lane, groups in g.state.get("bulk", {}).items():
        if m[lane]:
            keep = I.args[0].value
            older += groups.committed[: len(groups.committed) - keep] if keep else groups.committed
    wait = GroupWait(older)
    if not wait.ready():
        return wait
    if g.clock is not None:
        for x in older:
            g.cluster.checker.group_waited(g, x, reads_only="read" in I.parts)
    return None


def store_operation(g: Any, lane: int, action: Any) -> None:
    """Run ``action`` as an operation of the lane's open bulk group."""
    group = _groups(g, lane).open
    group.pending += 1

    def complete() -> None:
        action()
        group.pending -= 1

    g.machine.submit((None, g.cluster.number, next(_serial)), complete)


def _counter() -> Any:
    n = 0
    while True:
        n += 1
        yield n


_serial = _counter()


def load_operation(g: Any, action: Any) -> None:
    """Submit an operation that is ordered with nothing."""
    g.machine.submit((None, g.cluster.number, next(_serial)), action)


# --- reductions ----------------------------------------------------------------------------------------------------
def reduce_into(kind: str, dtype: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """``old (kind) new`` on raw bytes of elements ``dtype``; returns bytes of the same shape."""
    if dtype in ("f32", "s32", "u32", "u64", "s64", "f64"):
        t = np.dtype({"f": "f", "s": "i", "u": "u"}[dtype[0]] + str(int(dtype[1:]) // 8))
        a, b = np.ascontiguousarray(old).view(t), np.ascontiguousarray(new).view(t)
        r = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[kind](a, b)
        return r.astype(t).view(u8).reshape(old.shape)
    a, b = np.ascontiguousarray(old).view(u16), np.ascontiguousarray(new).view(u16)
    if dtype == "bf16":
        fa, fb = bf16_to_f32(a), bf16_to_f32(b)
    else:
        fa, fb = a.view(f16).astype(f32), b.view(f16).astype(f32)
    r = {"add": np.add, "min": np.fmin, "max": np.fmax}[kind](fa, fb)
    out = f32_to_bf16(r) if dtype == "bf16" else r.astype(f16).view(u16)
    return np.ascontiguousarray(out).view(u8).reshape(old.shape)


_DTYPE_OF_ELEMENT = {6: "f16", 7: "f32", 9: "f64", 10: "bf16", 3: "s32", 2: "u32", 8: "f32"}


# --- 1-D bulk copies -----------------------------------------------------------------------------------------------
_CACHE = "L2::cache_hint mbarrier::complete_tx::bytes bulk_group"


def _one(g: Any, a: Any, lane: int, view: str = "U") -> int:
    """Value of an operand on one lane."""
    if isinstance(a, Mem):
        return int(g.addr(a, view)[lane])
    return int(g.ev(a, view)[lane])


@op("cp.async.bulk.shared", allow=f"{_CACHE} shared::cluster shared::cta global multicast::cluster")
def bulk_load(g: Any, I: Instr, m: np.ndarray) -> None:
    """global → shared, or shared::cta → shared::cluster; completes on an mbarrier of the destination CTA."""
    A = I.args
    from_global = "global" in I.parts
    multicast = "multicast::cluster" in I.parts
    for lane in np.flatnonzero(m):
        dst, n, mbar = _one(g, A[0], lane), _one(g, A[2], lane), _one(g, A[3], lane)
        src = _one(g, A[1], lane, "D" if from_global else "U")
        if (dst | src | n) & 15:
            raise MemoryFaultError(f"cp.async.bulk of {n} bytes {src:#x} -> {dst:#x}: 16-byte multiples only; {g.where(I)}")
        targets = [(dst, mbar)]
        if multicast:
            mask = _one(g, A[4], lane, "H")
            targets = [((r << CTA_SHIFT) | dst & _OFFSET, (r << CTA_SHIFT) | mbar & _OFFSET) for r in range(16) if mask >> r & 1]
        if from_global:
            g.memory.globals.check_range(src, src + n, lambda: g.where(I))
            if g.past is not None:
                g.past.touch(g, I, np.array([src]), n)
        else:
            g.memory.check_shared_range(src, n, lambda: g.where(I))
        for d, b in targets:
            g.memory.check_shared_range(d, n, lambda: g.where(I))
            checker, token = g.cluster.checker, None
            if checker is not None:
                token = checker.issue_on_barrier(g, I, b)
                checker.shared_range(token, d, n, write=True)
                if not from_global:
                    checker.shared_range(token, src, n, write=False)

            def complete(d: int = d, b: int = b, src: int = src, n: int = n, token: Any = token) -> None:
                source = host_read(src, n) if from_global else g.memory.arena[src : src + n]
                g.memory.arena[d : d + n] = source
                if token is not None:
                    g.cluster.checker.complete(token)
                at(g.cluster, b).complete(n)

            load_operation(g, complete)
        g.machine.add("bulk_load_bytes", n * len(targets))


_REDUCE = "add min max and or f32 f16 bf16 noftz s32 u32 u64 s64 f64 b32 b64"


@op("cp.async.bulk.global", "cp.reduce.async.bulk.global", allow=f"{_CACHE} {_REDUCE} global shared::cta")
def bulk_store(g: Any, I: Instr, m: np.ndarray) -> None:
    """shared → global copy or reduction, in the thread's bulk group."""
    A, reduce = I.args, I.parts[1] == "reduce"
    kind = next((x for x in ("add", "min", "max", "and", "or") if x in I.parts), "add")
    for lane in np.flatnonzero(m):
        dst, src, n = _one(g, A[0], lane, "D"), _one(g, A[1], lane), _one(g, A[2], lane)
        if (dst | src | n) & 15:
            raise MemoryFaultError(f"bulk store of {n} bytes {src:#x} -> {dst:#x}: 16-byte multiples only; {g.where(I)}")
        g.memory.globals.check_range(dst, dst + n, lambda: g.where(I))
        if g.past is not None:
            g.past.touch(g, I, np.array([dst]), n)
        g.memory.check_shared_range(src, n, lambda: g.where(I))
        if g.cluster.checker is not None:
            token = g.cluster.checker.issue_in_group(g, I, _groups(g, lane).open)
            g.cluster.checker.shared_range(token, src, n, write=False)

        def action(dst: int = dst, src: int = src, n: int = n) -> None:
            data = g.memory.arena[src : src + n]
            target = host_read(dst, n)
            target[:] = reduce_into(kind, I.parts[-1], target, data) if reduce else data

        store_operation(g, lane, action)
        g.machine.add("bulk_store_bytes", n)


@op("cp.reduce.async.bulk.shared", allow="")
def bulk_reduce_shared(g: Any, I: Instr, m: np.ndarray) -> None:
    raise I.unsupported("bulk reduction into distributed shared memory")


# --- TMA tensors ---------------------------------------------------------------------------------------------------
_TENSOR = f"1d 2d 3d 4d 5d tile {_CACHE} global shared::cta shared::cluster multicast::cluster cta_group::1 cta_group::2 add min max and or"


def _coordinates(g: Any, tensor: TensorMem, lane: int) -> list[int]:
    return [int(g.ev(x)[lane].view(i32)) for x in tensor.items[1].items]


def _descriptor(g: Any, I: Instr, tensor: TensorMem, lane: int) -> tuple[TensorMap, list[int]]:
    address = int(g.ev(tensor.items[0], "D")[lane])
    if address & 63:
        raise MemoryFaultError(f"TMA descriptor at {address:#x} is not aligned to 64 bytes; {g.where(I)}")
    g.memory.globals.check_range(address, address + 64, lambda: g.where(I))
    t, c = read_descriptor(address), _coordinates(g, tensor, lane)
    named = next((int(x[0]) for x in I.parts if x in ("1d", "2d", "3d", "4d", "5d")), 0)
    if not len(c) == named == t.rank:
        raise MemoryFaultError(f"TMA: {named}-D instruction, {len(c)} coordinates, descriptor of rank {t.rank}; {g.where(I)}")
    return t, c


def _check_box(g: Any, I: Instr, b: Box) -> None:
    used = b.valid > 0
    if used.any():
        lo, hi = int(b.addresses[used].min()), int((b.addresses + b.valid)[used].max())
        g.memory.globals.check_range(lo, hi, lambda: g.where(I))
    if g.past is not None:
        for n in np.unique(b.valid[used]):
            g.past.touch(g, I, b.addresses[b.valid == n], int(n))


def _shared_chunks(g: Any, I: Instr, t: TensorMap, base: int, b: Box) -> np.ndarray:
    """Shared addresses of the chunks; the swizzle works on address bits."""
    align = {0: 16, 1: 128, 2: 128, 3: 128}[t.swizzle]
    if base % align:
        raise MemoryFaultError(f"TMA shared address {base:#x} is not aligned to {align} bytes (swizzle {t.swizzle}); {g.where(I)}")
    g.memory.check_shared_range(base, b.nbytes, lambda: g.where(I))
    return swizzle(base + np.arange(b.addresses.size) * b.chunk, t.swizzle)


def fetch(b: Box) -> np.ndarray:
    """The box's bytes ``[chunks, chunk]``; zero outside the tensor."""
    data = np.zeros((b.addresses.size, b.chunk), u8)
    whole = b.valid == b.chunk
    data[whole] = read_chunks(b.addresses[whole], b.chunk)
    for i in np.flatnonzero((b.valid > 0) & ~whole):
        data[i, : b.valid[i]] = host_read(int(b.addresses[i]), int(b.valid[i]))
    return data


def put(b: Box, data: np.ndarray) -> None:
    """Write the box's bytes that lie inside the tensor."""
    whole = b.valid == b.chunk
    write_chunks(b.addresses[whole], data[whole])
    for i in np.flatnonzero((b.valid > 0) & ~whole):
        host_read(int(b.addresses[i]), int(b.valid[i]))[:] = data[i, : b.valid[i]]


@op("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", allow=_TENSOR)
def tensor_copy(g: Any, I: Instr, m: np.ndarray) -> None:
    if "tile" not in I.parts:
        raise I.unsupported("TMA without .tile")
    if isinstance(I.args[1], TensorMem):
        for lane in np.flatnonzero(m):
            _load(g, I, int(lane))
        return
    # Kernels issue stores from whole warps, with equal operands: each lane's is performed, the profile counts one a warp.
    moved = {(int(lane) // 32, *_store(g, I, int(lane))) for lane in np.flatnonzero(m)}
    g.machine.add("tma_store_bytes", sum(x[-1] for x in moved))


def _load(g: Any, I: Instr, lane: int) -> None:
    A = I.args
    t, c = _descriptor(g, I, A[1], lane)
    dst, mbar = _one(g, A[0], lane), _one(g, A[2], lane)
    pair = "cta_group::2" in I.parts
    targets = [(dst, mbar)]
    if "multicast::cluster" in I.parts:
        mask = _one(g, A[3], lane, "H")
        if mask >> len(g.cluster.ctas):
            raise MemoryFaultError(f"multicast mask {mask:#x} in a cluster of {len(g.cluster.ctas)}; {g.where(I)}")
        # With cta_group::2 the barrier is the one of the even or odd CTA of each pair, as in the operand.
        targets = [
            (
                (r << CTA_SHIFT) | dst & _OFFSET,
                (((r & ~1) | mbar >> CTA_SHIFT & 1) if pair else r) << CTA_SHIFT | mbar & _OFFSET,
            )
            for r in range(16)
            if mask >> r & 1
        ]
    b = box(t, c)
    _check_box(g, I, b)
    for d, barrier in targets:
        shared = _shared_chunks(g, I, t, d, b)
        token = None
        if g.cluster.checker is not None:
            token = g.cluster.checker.issue_on_barrier(g, I, barrier)
            g.cluster.checker.shared_chunks(token, shared, b.chunk, write=True)

        def complete(shared: np.ndarray = shared, barrier: int = barrier, token: Any = token) -> None:
            write_shared_chunks(g.memory.arena, shared, fetch(b))
            if token is not None:
                g.cluster.checker.complete(token)
            at(g.cluster, barrier).complete(b.nbytes)

        load_operation(g, complete)
    g.machine.add("tma_load_bytes", b.nbytes)


def _store(g: Any, I: Instr, lane: int) -> tuple[int, ...]:
    """Issue one lane's store; returns what tells it from others, its bytes last."""
    A = I.args
    t, c = _descriptor(g, I, A[0], lane)
    src = _one(g, A[1], lane)
    b = box(t, c)
    _check_box(g, I, b)
    shared = _shared_chunks(g, I, t, src, b)
    if g.cluster.checker is not None:
        token = g.cluster.checker.issue_in_group(g, I, _groups(g, lane).open)
        g.cluster.checker.shared_chunks(token, shared, b.chunk, write=False)
    kind = next((x for x in ("add", "min", "max", "and", "or") if x in I.parts), None)
    # CuTe writes code 2 for signed and unsigned words alike
    if kind is not None and (t.element not in _DTYPE_OF_ELEMENT or (t.element == 2 and kind in ("min", "max"))):
        raise I.unsupported(f"TMA reduction of element type {t.element}")

    def action() -> None:
        data = read_shared_chunks(g.memory.arena, shared, b.chunk)
        if kind is not None:
            data = reduce_into(kind, _DTYPE_OF_ELEMENT[t.element], fetch(b), data)
        put(b, data)

    store_operation(g, lane, action)
    return (t.address, src, *c, b.nbytes)


@op("cp.async.bulk.prefetch", allow="L2 tensor global tile 1d 2d 3d 4d 5d L2::cache_hint")
def prefetch(g: Any, I: Instr, m: np.ndarray) -> None:
    """A hint."""


# --- st.async ------------------------------------------------------------------------------------------------------
@op("st.async", allow="weak shared::cluster mbarrier::complete_tx::bytes v2 v4 b32 b64 u32 u64 s32 s64 f32 f64")
def store_async(g: Any, I: Instr, m: np.ndarray) -> None:
    A, size = I.args, SIZE_OF_TYPE[I.parts[-1]]
    regs = list(A[1].items) if isinstance(A[1], Vec) else [A[1]]
    n = size * len(regs)
    dst, bars = g.addr(A[0]), g.addr(A[2])
    values = np.stack([g.ev(r, {4: "U", 8: "D"}[size]) for r in regs], 1)
    for lane in np.flatnonzero(m):
        d, b = int(dst[lane]), int(bars[lane])
        if d % n:
            raise MemoryFaultError(f"st.async of {n} bytes at {d:#x}; {g.where(I)}")
        g.memory.check_shared_range(d, n, lambda: g.where(I))
        token, value = None, values[lane].copy()
        if g.cluster.checker is not None:
            token = g.cluster.checker.issue_on_barrier(g, I, b)
            g.cluster.checker.shared_range(token, d, n, write=True)

        def complete(d: int = d, b: int = b, v: np.ndarray = value, token: Any = token) -> None:
            g.memory.arena[d : d + n] = v.view(u8)
            if token is not None:
                g.cluster.checker.complete(token)
            at(g.cluster, b).complete(n)

        load_operation(g, complete)
