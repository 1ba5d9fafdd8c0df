"""Scatter and gather of scales: the public functions over every block shape (the addresses themselves: tests/mx/test_layout.py)."""

import itertools

import pytest
import torch
from torch.library import opcheck

from fused_ops import gather_scales, scatter_scales
from fused_ops.scale_layout.interface import gather_scales_op, scatter_scales_op, sf_shape
from lp_fa4.mx import quantize_mx, scale_rows
from tests.conftest import offsets_of
from tests.fused_ops.common import hostile


def expected(x, axis):
    """The buffer written one byte at a time, from the layout's two sentences."""
    tokens, columns = x.shape
    sf = torch.zeros(sf_shape(tokens, columns, x.offsets, axis), dtype=torch.uint8)
    bounds = [0, tokens] if x.offsets is None else x.offsets.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        first = 128 * (0 if x.offsets is None else start // 128 + b)  # the sequence's place in rows of the tile rule
        for t in range(0, stop - start, 32):
            for c in range(0, columns, 32):
                row = 0 if x.is_static else (t // 32 if x.offsets is None else start // 32 + b + t // 32)
                byte = x.scale_bytes[row, c // x.block[1]]
                for i in range(32):
                    if axis == 1:
                        r, j = first + t + i, c // 32
                    else:
                        r, j = c + i, (first + t) // 32
                        if r >= columns:
                            continue
                    sf[r // 128, j // 4, r % 32, r // 32 % 4, j % 4] = byte
    return sf


def squared(x):
    """The compact grid of 32x32 blocks of x, rows of no group 0."""
    columns = -(-x.shape[1] // 32)
    rows = scale_rows(x.shape[0], x.offsets)
    grid = torch.zeros(rows, columns, dtype=torch.uint8)
    bounds = [0, x.shape[0]] if x.offsets is None else x.offsets.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for g in range(-(-(stop - start) // 32)):
            row = start // 32 + b + g
            source = x.scale_bytes[0 if x.is_static else row]
            grid[row] = source.repeat_interleave(x.block[1] // 32)[:columns]
    return grid


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [(32, 32), (32, 96), (128, 96), (0, 96)])
@pytest.mark.parametrize("jagged", [True, False])
def test_every_byte(axis, block, jagged):
    x, offsets, used = hostile(96)
    values = x if jagged else x[:used]
    mx = quantize_mx(values, block, offsets if jagged else None, exponent=3 if block[0] == 0 else None)
    sf = scatter_scales(mx, axis)
    assert torch.equal(sf, expected(mx, axis))
    back = gather_scales(sf, *mx.shape, mx.offsets, axis=axis)
    assert back.dtype == torch.float8_e8m0fnu
    assert torch.equal(back.view(torch.uint8), squared(mx))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tokens", [1, 33, 127, 129, 300])
@pytest.mark.parametrize("columns", [32, 96, 160, 2880])
def test_round_trip_dense(axis, tokens, columns):
    mx = quantize_mx(torch.randn(tokens, columns) * 2.0 ** torch.randint(-9, 9, (tokens, 1)))
    back = gather_scales(scatter_scales(mx, axis), tokens, columns, axis=axis)
    assert torch.equal(back.view(torch.uint8), mx.scale_bytes)


@pytest.mark.parametrize("axis", [0, 1])
def test_buffer_longer_than_the_data(axis):
    """B5: 300 rows, 160 of them used. What a sequence finds at its tiles is what a trimmed buffer holds there."""
    x, offsets, used = hostile(64, lengths=[100, 0, 60], extra=140)
    long = scatter_scales(quantize_mx(x, (32, 32), offsets), axis)
    short = scatter_scales(quantize_mx(x[:used], (32, 32), offsets), axis)
    tiles = short.shape[1 - axis]
    assert torch.equal(long.narrow(1 - axis, 0, tiles), short)
    assert long.narrow(1 - axis, tiles, long.shape[1 - axis] - tiles).count_nonzero() == 0


@pytest.mark.parametrize("lengths", [[], [0, 0, 0]])
def test_nothing(lengths):
    mx = quantize_mx(torch.zeros(0, 64), (32, 32), offsets_of(lengths))
    for axis in (0, 1):
        sf = scatter_scales(mx, axis)
        assert sf.numel() == sf.count_nonzero() + sf.numel()
        assert gather_scales(sf, 0, 64, mx.offsets, axis=axis).shape == (len(lengths), 2)


def test_operators():
    for tokens in (196, 257):
        offsets = offsets_of([tokens - 90, 0, 80])
        mx = quantize_mx(torch.randn(tokens, 96), (32, 96), offsets)
        for axis in (0, 1):
            opcheck(scatter_scales_op, (mx.scale_bytes, [32, 96], tokens, 96, offsets, axis))
            opcheck(gather_scales_op, (scatter_scales(mx, axis), tokens, 96, offsets, axis))


def test_errors():
    mx = quantize_mx(torch.ones(64, 64))
    for call, words in (
        (lambda: scatter_scales(mx, 2), "axis is 2; allowed are 0"),
        (lambda: scatter_scales(torch.ones(4, 4), 0), "x is Tensor"),
        (lambda: scatter_scales(mx.reshape_heads(2), 0), r"x has shape \[64, 2, 32\]"),
        (lambda: scatter_scales(quantize_mx(torch.ones(64, 64), (32, 16)), 0), r"x has block \(32, 16\)"),
        (lambda: gather_scales(torch.zeros(3, dtype=torch.uint8), 64, 64, axis=0), r"need uint8 \[1, 1, 32, 4, 4\]"),
        (lambda: gather_scales(scatter_scales(mx, 1), 64, 64, axis=-1), "axis is -1"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            call()
