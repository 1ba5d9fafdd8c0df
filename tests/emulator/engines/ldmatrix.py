"""``ldmatrix`` and ``stmatrix``: 8x8 matrices of 16-bit elements between shared memory and a warp's registers.

Lane i gives the address of row i % 8 of matrix i // 8 (16 bytes). In registers, lane l holds elements ``2 (l % 4)`` and
``+ 1`` of row ``l // 4``; with ``.trans`` the same elements of the transposed matrix (PTX ISA, "ldmatrix").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..numerics import u16, u32
from ..ptx import Instr, Mem, Reg, Vec
from ..registry import op

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_ALLOW = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16"


def _check(I: Instr) -> None:
    if "m8n8" not in I.parts or "b16" not in I.parts or not any(x in I.parts for x in ("shared", "shared::cta")):
        raise I.unsupported("form of ldmatrix/stmatrix (known: m8n8, b16, shared)")


def _operands(g: Any, I: Instr, m: np.ndarray) -> tuple[Mem, list[Reg], np.ndarray]:
    """Address operand, registers, and the mask of the lanes whose addresses count."""
    n = next(_COUNTS[x] for x in I.parts if x in _COUNTS)
    mem, data = (I.args[1], I.args[0]) if I.parts[0] == "ldmatrix" else I.args[:2]
    registers = list(data.items) if isinstance(data, Vec) else [data]
    if len(registers) != n:
        raise I.unsupported(f"{len(registers)} registers for {n} matrices")
    warps = m.reshape(-1, 32)
    if (warps.any(1) != warps.all(1)).any():
        raise EmulatorError(f"part of a warp executes a warp-wide instruction; {g.where(I)}")
    return mem, registers, m & (g.lane < 8 * n)


@op("ldmatrix", aligned=True, allow=_ALLOW, check=_check, writes=True)
def load(g: Any, I: Instr, m: np.ndarray) -> None:
    mem, registers, rows = _operands(g, I, m)
    n = len(registers)
    data = g.memory.load_shared(g, I, rows, g.addr(mem), 4, 4)  # one row of 16 bytes a lane
    tiles = np.ascontiguousarray(data).view(u16).reshape(-1, n, 8, 8)
    if "trans" in I.parts:
        tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
    words = tiles.reshape(-1, n, 64).view(u32)
    for j, r in enumerate(registers):
        g.U[r.idx][m] = words[:, j].reshape(-1)


@op("stmatrix", aligned=True, allow=_ALLOW, check=_check)
def store(g: Any, I: Instr, m: np.ndarray) -> None:
    mem, registers, rows = _operands(g, I, m)
    n = len(registers)
    words = np.stack([g.ev(r).reshape(-1, 32) for r in registers], 1)  # [warps, n, 32]
    tiles = words.view(u16).reshape(-1, n, 8, 8)
    if "trans" in I.parts:
        tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
    values = np.zeros((g.W // 32, 32, 4), u32)
    values[:, : 8 * n] = tiles.reshape(-1, 8 * n, 8).view(u32)
    g.memory.store_shared(g, I, rows, g.addr(mem), values.reshape(g.W, 4))
