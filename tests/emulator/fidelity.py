"""Fidelity switches: where hardware computes less exactly than float32 NumPy. All off by default.

``emulate(..., fidelity=Fidelity(fp8_accumulator_bits=14))`` asks whether a kernel's numbers survive what hardware does.
``HOPPER`` is all of it that is known bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .numerics import f32, f64, u32


@dataclass(frozen=True)
class Fidelity:
    """What to imitate.

    Attributes:
        fp8_accumulator_bits: significant bits that Hopper's FP8 products keep while they are summed: 14 is what an H200 does, bit by bit
            (``test_hardware.py``; DeepSeek-V3, 2024, section 3.3.2); 0 is float32. Used by ``engines/wgmma.py``.
        half_accumulator_bits: the same of products of BF16 and FP16, whose sums are then cut off at 24 bits: 26 on an H200.
        ftz: instructions marked ``.ftz`` flush subnormal float32 results to zero.
        ex2_ulp: largest error of ``ex2.approx``, in units in the last place; the PTX ISA bounds it by 2. The error is a
            function of the operand's bits: the same input always gives the same output, as in a table-driven unit.
    """

    fp8_accumulator_bits: int = 0
    half_accumulator_bits: int = 0
    ftz: bool = False
    ex2_ulp: int = 0

    def __post_init__(self) -> None:
        for name in ("fp8_accumulator_bits", "half_accumulator_bits"):
            if not 0 <= getattr(self, name) <= 30:
                raise ValueError(f"{name} = {getattr(self, name)}: 0 (off) to 30")
        if not 0 <= self.ex2_ulp <= 16:
            raise ValueError(f"ex2_ulp = {self.ex2_ulp}: 0 (off) to 16")

    def ex2(self, x: np.ndarray) -> np.ndarray:
        """2^x with an error of up to ``ex2_ulp``; exact at integers, as hardware is."""
        x = np.asarray(x, f32)
        exact = np.exp2(x.astype(f64)).astype(f32)
        if not self.ex2_ulp:
            return exact
        hashed = (x.view(u32) * u32(2654435761)) >> u32(16)
        steps = (hashed % u32(2 * self.ex2_ulp + 1)).astype(np.int64) - self.ex2_ulp
        spacing = np.where(np.isfinite(exact), np.spacing(np.abs(exact)), 0)
        off = (exact + steps * spacing).astype(f32)
        return np.where((x == np.rint(x)) | ~np.isfinite(exact), exact, np.maximum(off, 0))


HOPPER = Fidelity(fp8_accumulator_bits=14, half_accumulator_bits=26)
"""Sums of ``wgmma`` as an H200 makes them."""
