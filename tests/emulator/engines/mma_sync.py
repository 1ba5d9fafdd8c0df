"""``mma.sync.m16n8k16``: a warp's product of 16-bit operands held in registers, summed in FP32.

Lane ``l`` holds, of A, rows ``l // 4`` and ``l // 4 + 8`` at columns ``2 (l % 4)``, ``+ 1`` and both ``+ 8``; of B the same columns of the
contraction at column ``l // 4``; of C and D the rows of A at columns ``2 (l % 4)``, ``+ 1`` (PTX ISA, "matrix fragments for
mma.m16n8k16").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..numerics import f32, u16, u32
from ..ptx import Instr
from ..registry import op
from .wgmma import decode


def _check(I: Instr) -> None:
    kinds = I.parts[-4:]
    if "row" not in I.parts or "col" not in I.parts or kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2] or kinds[1] == "f32":
        raise I.unsupported("form of mma.sync (known: m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32)")


@op("mma.sync", aligned=True, allow="sync aligned m16n8k16 row col f32 f16 bf16", check=_check, writes=True)
def multiply(g: Any, I: Instr, m: np.ndarray) -> None:
    warps = m.reshape(-1, 32)
    if (warps.any(1) != warps.all(1)).any():
        raise EmulatorError(f"part of a warp executes a warp-wide instruction; {g.where(I)}")

    def words(vector: Any) -> np.ndarray:
        return np.stack([g.ev(r) for r in vector.items]).astype(u32).reshape(len(vector.items), -1, 8, 4)

    def halves(vector: Any) -> np.ndarray:
        raw = np.ascontiguousarray(words(vector)).view(u16)
        return decode(raw, I.parts[-3]).reshape(*raw.shape[:3], 4, 2)

    d, a, b, c = I.args
    n = warps.shape[0]
    a_tile = halves(a).reshape(2, 2, n, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(n, 16, 16)
    b_tile = halves(b).transpose(1, 0, 3, 4, 2).reshape(n, 16, 8)
    old = np.ascontiguousarray(words(c)).view(f32).reshape(2, 2, n, 8, 4).transpose(2, 0, 3, 4, 1).reshape(n, 16, 8)
    new = np.ascontiguousarray(a_tile @ b_tile + old, f32).reshape(n, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1).view(u32)
    for register, value in zip(d.items, np.ascontiguousarray(new), strict=True):
        g.U[register.idx][m] = value[m]
    g.machine.add("mma_flops", 2 * 16 * 8 * 16 * int(warps.any(1).sum()))
