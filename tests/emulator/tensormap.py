"""TMA descriptors (CUtensorMap) as CuTe encodes them, decoded from their 128 bytes.

The layout is not documented; it was recovered by encoding known tensors and comparing words, and ``test_capture.py``
encodes such tensors again, so a DSL version that moves a bit is noticed. CuTe writes the first 64 bytes only.

==========  =====================================================================================================
words       meaning
==========  =====================================================================================================
0-1         global address, 57 bits; the start of a ragged tensor is moved back so far that it may be negative
2           bits 4-6 rank - 1; 7-10 element type; 13-14 swizzle (0 none, 1 32 B, 2 64 B, 3 128 B); 1 and 18 always set
3-6         strides of dimensions 1..4 in bytes, >> 4 (low 32 bits); word 7 holds 4 more bits of each
8-12        dimensions - 1
13 [24:31]  box extent 0, minus 1; word 14: extents 1..4, minus 1, one byte each
==========  =====================================================================================================
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import UnsupportedError
from .numerics import i64

#: element type code → bytes per element (11: two FP4 codes per byte)
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2, 11: 0.5}
#: bits of word 2 whose meaning is known
_KNOWN_WORD2 = 0x70 | 0x780 | 0x6000
#: bits of word 2 that are set in every descriptor seen
_CONSTANT_WORD2 = 0x40002
#: set for ranks 2, 4, 5 and clear for 1, 3; no effect seen
_RANK_WORD2 = 1 << 21


@dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor; extents are in elements, strides in bytes, dimension 0 first (contiguous)."""

    address: int
    element: int
    element_bytes: float
    swizzle: int
    dims: tuple[int, ...]
    strides: tuple[float, ...]
    box: tuple[int, ...]
    flags: int

    @property
    def rank(self) -> int:
        return len(self.dims)


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> TensorMap:
    """Decode the first 64 bytes of a descriptor.

    Raises:
        UnsupportedError: a field value that is not modelled.
    """
    w = struct.unpack("<16I", raw)
    flags = w[2]
    rank, element = ((flags >> 4) & 7) + 1, (flags >> 7) & 15
    if rank > 5 or element not in ELEMENT_BYTES:
        raise UnsupportedError(f"TMA descriptor: rank {rank}, element type {element}; word 2 is {flags:#010x}")
    if (flags >> 11) & 3:
        raise UnsupportedError(f"TMA descriptor: interleave {(flags >> 11) & 3}; word 2 is {flags:#010x}")
    if flags & ~(_KNOWN_WORD2 | _RANK_WORD2) != _CONSTANT_WORD2 or w[13] & 0xFFFFFF or w[15]:
        raise UnsupportedError(f"TMA descriptor: bits of unknown meaning in words 2, 13, 15: {flags:#010x}, {w[13]:#010x}, {w[15]:#010x}")
    size = ELEMENT_BYTES[element]
    strides = [size] + [(w[3 + i] | ((w[7] >> (4 * i)) & 15) << 32) << 4 for i in range(rank - 1)]
    box = [w[13] >> 24] + [(w[14] >> (8 * i)) & 255 for i in range(4)]
    return TensorMap(
        address=_signed(w[0] | w[1] << 32, 57),
        element=element,
        element_bytes=size,
        swizzle=(flags >> 13) & 3,
        dims=tuple(w[8 + i] + 1 for i in range(rank)),
        strides=tuple(strides),
        box=tuple(b + 1 for b in box[:rank]),
        flags=flags & ~_KNOWN_WORD2,
    )


def read(address: int) -> TensorMap:
    """The descriptor at a (checked) host address."""
    return decode(ctypes.string_at(address, 64))


@dataclass(frozen=True)
class Box:
    """A box at given coordinates as chunks of at most 16 bytes: global addresses, valid bytes of each, chunk size."""

    addresses: np.ndarray
    valid: np.ndarray
    chunk: int

    @property
    def nbytes(self) -> int:
        return self.addresses.size * self.chunk


def box(t: TensorMap, coordinates: list[int]) -> Box:
    """The chunks of the box of ``t`` at ``coordinates`` (dimension 0 first), in shared-memory order."""
    row = int(t.box[0] * t.element_bytes)
    chunk = 16 if row % 16 == 0 else row
    offset, inside = np.zeros(1, i64), np.ones(1, bool)
    for d in range(t.rank - 1, 0, -1):
        x = coordinates[d] + np.arange(t.box[d])
        offset = (offset[:, None] + x * int(t.strides[d])).reshape(-1)
        inside = (inside[:, None] & ((x >= 0) & (x < t.dims[d]))).reshape(-1)
    e = int(coordinates[0] * t.element_bytes) + np.arange(row // chunk) * chunk
    addresses = (offset[:, None] + e).reshape(-1) + t.address
    valid = np.where(e < 0, 0, np.clip(int(t.dims[0] * t.element_bytes) - e, 0, chunk))
    return Box(addresses, (inside[:, None] * valid).reshape(-1), chunk)
