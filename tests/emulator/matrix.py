"""Matrix operands in shared memory: descriptors of ``wgmma`` and ``tcgen05`` → byte addresses.

A 64-bit descriptor holds start address [0:13], leading byte offset [16:29], stride byte offset [32:45] (all >> 4), and
the swizzle. K-major operands keep K contiguous; MN-major ones keep M or N contiguous. Both architectures lay operands
out alike; only the field that names the swizzle differs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .errors import UnsupportedError
from .memory import swizzle

#: tcgen05: bits 61-63 → swizzle mode of ``memory.swizzle``
_TCGEN05_SWIZZLE = {0: 0, 2: 3, 4: 2, 6: 1}
#: wgmma: bits 62-63
_WGMMA_SWIZZLE = {0: 0, 1: 3, 2: 2, 3: 1}
_ROW = {0: 16, 1: 32, 2: 64, 3: 128}


@lru_cache(maxsize=65536)
def operand_addresses(descriptor: int, rows: int, k: int, mn_major: bool, element: int, wgmma: bool = False) -> np.ndarray:
    """Byte offsets in the CTA's shared memory of a ``rows`` x ``k`` operand of ``element``-byte items.

    Raises:
        UnsupportedError: a descriptor field that is not modelled (base offset, relative leading dimension, 128B-32B atom).
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    base_offset = descriptor >> 49 & 7
    if wgmma:
        mode, unknown = _WGMMA_SWIZZLE[descriptor >> 62 & 3], descriptor >> 52 & 0x3FF
    else:
        kind = descriptor >> 61 & 7
        if kind not in _TCGEN05_SWIZZLE:
            raise UnsupportedError(f"matrix descriptor {descriptor:#018x}: swizzle field {kind}")
        # bits 46-48 hold the constant 1; bit 52 selects how the leading offset is read
        mode, unknown = _TCGEN05_SWIZZLE[kind], (descriptor >> 52 & 0x1FF) | ((descriptor >> 46 & 7) & ~1)
    if base_offset or unknown:
        raise UnsupportedError(f"matrix descriptor {descriptor:#018x}: base offset {base_offset}, other bits {unknown:#x}")
    row = _ROW[mode]
    i, j = np.arange(rows)[:, None], np.arange(k)[None, :]
    if not mn_major:
        b = j * element
        if mode == 0:
            a = i % 8 * 16 + i // 8 * stride + b // 16 * leading + b % 16
        else:
            if k * element > row:
                raise UnsupportedError(f"matrix descriptor {descriptor:#018x}: {k * element} bytes of K in a swizzle row of {row}")
            a = i % 8 * row + i // 8 * stride + b
    else:
        b = i * element
        if mode == 0:
            a = b // 16 * stride + b % 16 + j % 8 * 16 + j // 8 * leading
        else:
            a = b % row + b // row * leading + j % 8 * row + j // 8 * stride
    return swizzle(start + a, mode)


@lru_cache(maxsize=65536)
def operand_words(descriptor: int, rows: int, k: int, mn_major: bool, element: int, wgmma: bool = False) -> np.ndarray:
    """The 4-byte words (offset >> 2) that the operand touches, each once."""
    return np.unique(operand_addresses(descriptor, rows, k, mn_major, element, wgmma) >> 2)
