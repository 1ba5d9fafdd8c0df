"""Memory: bounds-checked global memory, the shared-memory window of a cluster, local memory, tensor memory.

*Global* addresses are host addresses: kernels read and write the caller's tensors where they lie. Every access is
checked against the extents of the tensors that were handed to the call (plus the kernel's parameters).

*Shared* memory of a cluster is one anonymous mapping with 16 MiB per CTA: a shared-window address is
``rank << 24 | offset``, so ``mapa`` and the peer-bit masks that two-CTA kernels compute by hand just work. Fresh pages
read as poison (0xFF bytes: NaN in every float format) when poisoning is on.

*Tensor memory* is 128 lanes by 512 columns of 32-bit words per CTA.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MemoryFaultError
from .numerics import u8, u32
from .ptx import Instr

if TYPE_CHECKING:
    from .simt import Gang

#: Byte offset at which a CTA's own shared memory starts; the first kibibyte is the system's.
SHARED_RESERVED = 1024
#: Largest shared memory of a CTA, the reserved part included (both sm_90 and sm_100: 228 KiB).
SHARED_LIMIT = 228 * 1024
CTA_SHIFT = 24

_BASE = 4096
_min, _max, _or = np.minimum.reduce, np.maximum.reduce, np.bitwise_or.reduce
_SHIFT = {1 << i: i for i in range(8)}


class _WholeMemory:
    """Array interface over all host addresses from ``_BASE`` on; only ever indexed after a bounds check."""

    def __init__(self, size: int, count: int) -> None:
        shape = (((1 << 47) - _BASE) // (size * count), count)
        self.__array_interface__ = {
            "shape": shape,
            "typestr": f"|u{size}" if size == 1 else f"<u{size}",
            "data": (_BASE, False),
            "version": 3,
        }


HOST = {(size, n): np.asarray(_WholeMemory(size, n)) for size in (1, 2, 4, 8) for n in (1, 2, 4, 8)}
HOST_BYTES = HOST[1, 1][:, 0]


def host_read(address: int, n: int) -> np.ndarray:
    """View of ``n`` bytes of host memory (checked by the caller)."""
    return HOST_BYTES[address - _BASE : address - _BASE + n]


def host_gather(addresses: np.ndarray, n: int) -> np.ndarray:
    """Copy ``[len(addresses), n]`` bytes."""
    return HOST_BYTES[addresses[:, None] + (np.arange(n) - _BASE)]


def host_scatter(addresses: np.ndarray, data: np.ndarray) -> None:
    HOST_BYTES[addresses[:, None] + (np.arange(data.shape[1]) - _BASE)] = data


class GlobalMemory:
    """The extents a kernel may touch."""

    def __init__(self, extents: list[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for lo, hi in sorted(extents):
            if merged and lo < merged[-1][1]:  # views that overlap are one allocation; neighbours stay apart
                merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
            else:
                merged.append((lo, hi))
        self.extents = merged
        self._starts = [lo for lo, _ in merged]
        self._last = (0, 0)

    def _holds(self, lo: int, hi: int) -> bool:
        """Whether ``[lo, hi)`` lies in one extent; that one is asked first the next time."""
        if self._last[0] <= lo and hi <= self._last[1]:
            return True
        i = bisect_right(self._starts, lo) - 1
        found = i >= 0 and hi <= self.extents[i][1]
        if found:
            self._last = self.extents[i]
        return found

    def check_range(self, lo: int, hi: int, what: Any) -> None:
        """Raise unless ``[lo, hi)`` lies in one extent. ``what`` is called for the message's origin."""
        if self._holds(lo, hi):
            return
        i = bisect_right(self._starts, lo) - 1
        near = f"; nearest tensor [{self.extents[i][0]:#x}, {self.extents[i][1]:#x})" if i >= 0 else ""
        raise MemoryFaultError(f"global access [{lo:#x}, {hi:#x}) is outside every tensor of the call{near}; {what()}")

    def check(self, a: np.ndarray, n: int, what: Any) -> None:
        """Check ``n`` bytes at each address."""
        if not a.size:
            return
        lo, hi = int(_min(a, None)), int(_max(a, None)) + n
        if self._holds(lo, hi):
            return
        for x in np.unique(a):
            self.check_range(int(x), int(x) + n, what)


class ClusterMemory:
    """Loads and stores of one cluster's threads. Data come and go as ``[lanes, count]`` unsigned words."""

    def __init__(self, machine: Any, ranks: int, poison: bool, shared_size: int) -> None:
        self.machine, self.ranks, self.shared_size = machine, ranks, shared_size
        self.globals: GlobalMemory = machine.globals
        self.arena = np.frombuffer(mmap.mmap(-1, ranks << CTA_SHIFT), u8)
        self.base = self.arena.ctypes.data
        self.views = {(s, n): self.arena.view(f"u{s}").reshape(-1, n) for s in (1, 2, 4, 8) for n in (1, 2, 4, 8)}
        self.words = self.arena.view(u32)
        if poison:
            for r in range(ranks):
                self.arena[r << CTA_SHIFT : (r << CTA_SHIFT) + shared_size].fill(0xFF)
        self.checker: Any = None

    # --- checks --------------------------------------------------------------------------------------------------
    def check_shared(self, a: np.ndarray, n: int, what: Any) -> tuple[int, int] | None:
        """Each ``[a, a + n)`` must lie in the shared memory of a CTA of the cluster; returns the least and the largest address if
        all are of one CTA."""
        if not a.size:
            return None
        lo, hi = int(_min(a, None)), int(_max(a, None))
        if lo >= 0 and lo >> CTA_SHIFT == hi >> CTA_SHIFT < self.ranks and (hi & 0xFFFFFF) + n <= self.shared_size:
            return lo, hi
        offset = a & 0xFFFFFF
        if int(a.max()) >> CTA_SHIFT >= self.ranks or int(a.min()) < 0 or int(offset.max()) + n > self.shared_size:
            bad = int(a[np.argmax((a >> CTA_SHIFT >= self.ranks) | (a < 0) | (offset + n > self.shared_size))])
            raise MemoryFaultError(
                f"shared access of {n} bytes at {bad:#x} is outside the {self.shared_size:#x} bytes of a CTA "
                f"({self.ranks} in the cluster); {what()}"
            )
        return None

    def check_shared_range(self, a: int, n: int, what: Any) -> None:
        if a >> CTA_SHIFT >= self.ranks or a < 0 or (a & 0xFFFFFF) + n > self.shared_size:
            raise MemoryFaultError(f"shared access of {n} bytes at {a:#x} is outside the CTA's {self.shared_size:#x} bytes; {what()}")

    @staticmethod
    def _aligned(a: np.ndarray, n: int, I: Instr) -> None:
        if int(_or(a, None)) & (n - 1):
            bad = int(a[np.argmax((a & (n - 1)) != 0)])
            raise MemoryFaultError(f"address {bad:#x} is not aligned to the {n} bytes accessed; {I.where()}")

    # --- global --------------------------------------------------------------------------------------------------
    def load_global(self, g: Gang, I: Instr, m: Any, a: np.ndarray, size: int, count: int) -> np.ndarray:
        if m is not None:
            a = a[m]
        n = size * count
        self._aligned(a, n, I)
        self.globals.check(a, n, lambda: g.where(I))
        if g.past is not None:
            g.past.touch(g, I, a, n)
        return HOST[size, count][(a - _BASE) >> _SHIFT[n]]

    def store_global(self, g: Gang, I: Instr, m: Any, a: np.ndarray, v: np.ndarray) -> None:
        if m is not None:
            a, v = a[m], v[m]
        count, size = v.shape[1], v.dtype.itemsize
        n = size * count
        self._aligned(a, n, I)
        self.globals.check(a, n, lambda: g.where(I))
        if g.past is not None:
            g.past.touch(g, I, a, n)
        HOST[size, count][(a - _BASE) >> _SHIFT[n]] = v
        self.machine.events += 1

    load_const = load_global

    def load_param(self, g: Gang, I: Instr, m: Any, a: np.ndarray, size: int, count: int) -> np.ndarray:
        a = a if m is None else a[m]
        self._aligned(a, size * count, I)
        self.globals.check(a, size * count, lambda: g.where(I))
        return HOST[size, count][(a - _BASE) >> _SHIFT[size * count]]

    # --- shared --------------------------------------------------------------------------------------------------
    def load_shared(self, g: Gang, I: Instr, m: Any, a: np.ndarray, size: int, count: int) -> np.ndarray:
        if m is not None:
            a = a[m]
        n = size * count
        self._aligned(a, n, I)
        ends = self.check_shared(a, n, lambda: g.where(I))
        if self.checker is not None:
            self.checker.warp_access(g, I, a, n, False, ends)
        if ends and ends[0] == ends[1]:  # one value for all lanes
            at = ends[0] >> _SHIFT[n]
            return self.views[size, count][at : at + 1]
        return self.views[size, count][a >> _SHIFT[n]]

    def store_shared(self, g: Gang, I: Instr, m: Any, a: np.ndarray, v: np.ndarray) -> None:
        if m is not None:
            a, v = a[m], v[m]
        count, size = v.shape[1], v.dtype.itemsize
        n = size * count
        self._aligned(a, n, I)
        ends = self.check_shared(a, n, lambda: g.where(I))
        if self.checker is not None:
            self.checker.warp_access(g, I, a, n, True, ends)
        self.views[size, count][a >> _SHIFT[n]] = v

    # --- generic: the shared window, local rows and global memory are disjoint host ranges -----------------------
    def _in_shared(self, a: np.ndarray, m: Any, g: Gang, I: Instr) -> bool:
        x = a if m is None else a[m]
        inside = (x >= self.base) & (x < self.base + self.arena.size)
        if inside.all():
            return True
        if inside.any():
            raise I.unsupported(f"one generic access to both shared and global memory, {g.where(I)}")
        return False

    def load_generic(self, g: Gang, I: Instr, m: Any, a: np.ndarray, size: int, count: int) -> np.ndarray:
        if self._in_shared(a, m, g, I):
            return self.load_shared(g, I, m, a - self.base, size, count)
        return self.load_global(g, I, m, a, size, count)

    def store_generic(self, g: Gang, I: Instr, m: Any, a: np.ndarray, v: np.ndarray) -> None:
        if self._in_shared(a, m, g, I):
            self.store_shared(g, I, m, a - self.base, v)
        else:
            self.store_global(g, I, m, a, v)

    # --- local ---------------------------------------------------------------------------------------------------
    def _local(self, g: Gang, I: Instr, m: Any, a: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        lanes = np.arange(g.W) if m is None else np.flatnonzero(m)
        a = a[lanes]
        self._aligned(a, n, I)
        if a.size and (int(a.min()) < 0 or int(a.max()) + n > g.local.shape[1]):
            raise MemoryFaultError(f"local access outside the {g.local.shape[1]} bytes of a thread; {g.where(I)}")
        return lanes, a

    def load_local(self, g: Gang, I: Instr, m: Any, a: np.ndarray, size: int, count: int) -> np.ndarray:
        lanes, a = self._local(g, I, m, a, size * count)
        data = g.local[lanes[:, None], a[:, None] + np.arange(size * count)]
        return np.ascontiguousarray(data).view(f"u{size}")

    def store_local(self, g: Gang, I: Instr, m: Any, a: np.ndarray, v: np.ndarray) -> None:
        n = v.shape[1] * v.dtype.itemsize
        lanes, a = self._local(g, I, m, a, n)
        data = np.ascontiguousarray(v[lanes]).view(u8).reshape(len(lanes), n)
        g.local[lanes[:, None], a[:, None] + np.arange(n)] = data


class TensorMemory:
    """Tensor memory of one CTA with its allocator. Columns are allocated in powers of two from 32 to 512."""

    LANES, COLUMNS = 128, 512

    def __init__(self, poison: bool) -> None:
        self.poison = poison
        self.words = np.full((self.LANES, self.COLUMNS), 0xFFFFFFFF if poison else 0, u32)
        self.allocated: dict[int, int] = {}
        self.permit = True

    def allocate(self, n: int) -> int | None:
        """First free column of an aligned block of ``n``, or None if the warp has to wait."""
        for start in range(0, self.COLUMNS - n + 1, n):
            if all(start + n <= s or s + k <= start for s, k in self.allocated.items()):
                self.allocated[start] = n
                return start
        return None

    def free(self, start: int, n: int, what: Any) -> None:
        if self.allocated.get(start) != n:
            raise MemoryFaultError(f"tcgen05.dealloc of {n} columns at {start}: allocated are {self.allocated}; {what()}")
        del self.allocated[start]
        if self.poison:
            self.words[:, start : start + n] = 0xFFFFFFFF

    def check(self, column: int, n: int, what: Any) -> None:
        """``[column, column + n)`` must lie in one allocation."""
        if not any(s <= column and column + n <= s + k for s, k in self.allocated.items()):
            raise MemoryFaultError(f"TMEM columns [{column}, {column + n}) are not allocated ({self.allocated}); {what()}")


def swizzle(a: np.ndarray, mode: int) -> np.ndarray:
    """TMA and matrix-descriptor swizzle on byte addresses: 0 none, 1 32 B, 2 64 B, 3 128 B (address bits 4-6 ^= 7-9)."""
    if mode == 3:
        return a ^ (((a >> 7) & 7) << 4)
    if mode == 2:
        return a ^ (((a >> 7) & 3) << 4)
    if mode == 1:
        return a ^ (((a >> 7) & 1) << 4)
    return a


class _Whole16:
    __array_interface__ = {"shape": (((1 << 47) - _BASE) // 16,), "typestr": "|V16", "data": (_BASE, False), "version": 3}  # noqa: RUF012


_HOST16 = np.asarray(_Whole16())


def read_chunks(addresses: np.ndarray, n: int) -> np.ndarray:
    """Copy ``[len(addresses), n]`` bytes of host memory; 16-byte chunks at aligned addresses go the fast way."""
    if n == 16 and not (addresses & 15).any():
        return _HOST16[(addresses - _BASE) >> 4].view(u8).reshape(-1, 16)
    return host_gather(addresses, n)


def write_chunks(addresses: np.ndarray, data: np.ndarray) -> None:
    if data.shape[1] == 16 and not (addresses & 15).any():
        _HOST16[(addresses - _BASE) >> 4] = np.ascontiguousarray(data).view("V16").reshape(-1)
    else:
        host_scatter(addresses, data)


def read_shared_chunks(arena: np.ndarray, addresses: np.ndarray, n: int) -> np.ndarray:
    if n == 16 and not (addresses & 15).any():
        return arena.view("V16")[addresses >> 4].view(u8).reshape(-1, 16)
    return arena[addresses[:, None] + np.arange(n)]


def write_shared_chunks(arena: np.ndarray, addresses: np.ndarray, data: np.ndarray) -> None:
    if data.shape[1] == 16 and not (addresses & 15).any():
        arena.view("V16")[addresses >> 4] = np.ascontiguousarray(data).view("V16").reshape(-1)
    else:
        arena[addresses[:, None] + np.arange(data.shape[1])] = data
