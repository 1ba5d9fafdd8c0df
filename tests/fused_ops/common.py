"""Shared by the tests of fused operations: hostile jagged batches, closeness in dB, block-wise comparison."""

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor
from tests.conftest import HOSTILE_LENGTHS, offsets_of

EXTRA = 37
"""Rows past ``offsets[-1]``, always NaN."""


def db(value: Tensor, truth: Tensor) -> float:
    """SQNR in dB; fails by being NaN if one of them is."""
    truth = truth.double()
    return float(10 * torch.log10(truth.square().sum() / (value.double() - truth).square().sum().clamp(min=1e-300)))


def hostile(columns: int, dtype: torch.dtype = torch.float32, lengths=HOSTILE_LENGTHS, extra: int = EXTRA) -> tuple[Tensor, Tensor, int]:
    """``x [T + extra, columns]`` whose rows differ in size by 2^±6, NaN past the last offset; offsets; T."""
    offsets = offsets_of(lengths)
    used = int(offsets[-1])
    x = torch.randn(used + extra, columns) * 2.0 ** torch.randint(-6, 7, (used + extra, 1))
    x = x.to(dtype)
    x[used:] = torch.nan
    return x, offsets, used


def rows_of(x: MXTensor, sequence: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes that belong to one sequence."""
    start, stop = int(offsets[sequence]), int(offsets[sequence + 1])
    first = start // 32 + sequence
    scale = x.scale_bytes if x.is_static else x.scale_bytes[first : first + -(-(stop - start) // 32)]
    return x.codes[start:stop], scale


def assert_same_bytes(a: MXTensor, b: MXTensor) -> None:
    """Codes and scales are equal, or the first difference is named."""
    for name, left, right in (("codes", a.codes, b.codes), ("scale", a.scale_bytes, b.scale_bytes)):
        assert left.shape == right.shape, f"{name}: {list(left.shape)} and {list(right.shape)}"
        wrong = (left != right).nonzero()
        assert len(wrong) == 0, f"{name}: {len(wrong)} differ, first at {wrong[0].tolist()}"
