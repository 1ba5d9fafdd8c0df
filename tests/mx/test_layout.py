"""Groups, tiles and atoms: every scale has one place, and a sequence shares no block with another."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_fa4.mx import (
    decode_scale,
    encode_scale,
    gather_sf,
    group_rows,
    quantize_mx,
    scale_rows,
    scatter_sf,
    sf_tiles,
    token_rows,
)
from tests.conftest import HOSTILE_LENGTHS, offsets_of


def loop_quantize(x, offsets, block, rows):
    """Jagged quantization written as loops over sequences, groups and columns: the second opinion."""
    bt, bc = block
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    scale = torch.zeros(rows, -(-x.shape[1] // bc), dtype=torch.uint8)
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        for first in range(start, end, bt):
            last = min(first + bt, end)
            for j in range(scale.shape[1]):
                tile = x[first:last, j * bc : (j + 1) * bc]
                byte = encode_scale(tile.abs().amax())
                codes[first:last, j * bc : (j + 1) * bc] = (tile / decode_scale(byte)).to(torch.float8_e4m3fn).view(torch.uint8)
                for g in range((first - start) // 32, (last - 1 - start) // 32 + 1):
                    scale[start // 32 + b + g, j] = byte
    return codes, scale


@pytest.mark.parametrize("block", [(32, 32), (32, 96), (128, 96)])
@pytest.mark.parametrize("extra", [0, 45])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_jagged_equals_the_loop(block, extra, dtype):
    offsets = offsets_of(HOSTILE_LENGTHS, dtype)
    tokens = int(offsets[-1]) + extra
    magnitude = 2.0 ** torch.randint(-12, 12, (tokens, 1))  # plain randn cannot tell block shapes apart
    x = torch.randn(tokens, 96) * magnitude
    x[int(offsets[-1]) :] = torch.nan
    q = quantize_mx(x, block, offsets)
    codes, scale = loop_quantize(x, offsets, block, tokens // 32 + len(HOSTILE_LENGTHS))
    assert torch.equal(q.scale_bytes, scale)
    assert torch.equal(q.codes, codes)
    assert q.dequantize()[int(offsets[-1]) :].count_nonzero() == 0


def test_heads_are_columns():
    offsets = offsets_of([5, 40, 0, 64])
    x = torch.randn(109, 3, 64)
    flat = quantize_mx(x.reshape(109, 192), (32, 64), offsets)
    heads = quantize_mx(x, (32, 64), offsets, token_dim=0)
    assert torch.equal(flat.reshape_heads(3).codes, heads.codes) and torch.equal(heads.flatten_heads().scale_bytes, flat.scale_bytes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=12), st.integers(0, 200))
def test_rows_are_injective_and_within_bounds(lengths, extra):
    offsets = offsets_of(lengths)
    tokens = sum(lengths) + extra
    for size in (32, 128):
        row = token_rows(offsets, tokens, size)
        owners: dict[int, tuple[int, int]] = {}
        for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            for t in range(start, end):
                assert row[t] < group_rows(tokens, len(lengths), size)
                assert owners.setdefault(int(row[t]), (b, (t - start) // size)) == (b, (t - start) // size)
        assert (row[sum(lengths) :] == group_rows(tokens, len(lengths), size)).all()


def test_isolation():
    """Another sequence's outliers, NaN included, change no byte of this one."""
    offsets = offsets_of([31, 33, 1, 32, 127, 129])
    x = torch.randn(int(offsets[-1]), 64)
    clean = quantize_mx(x, (32, 32), offsets)
    for b, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        for bad in (x[start:end] * 1e4, torch.full((end - start, 64), torch.nan)):
            y = x.clone()
            y[start:end] = bad
            q = quantize_mx(y, (32, 32), offsets)
            rows = torch.ones(len(x), dtype=torch.bool)
            rows[start:end] = False
            assert torch.equal(q.codes[rows], clean.codes[rows]), b
            groups = token_rows(offsets, len(x))[rows].unique()
            assert torch.equal(q.scale_bytes[groups], clean.scale_bytes[groups]), b


def naive_sf(scale, tokens, columns, offsets, axis):
    """The SF buffer by its address formula, a byte at a time."""
    tiles, blocks = sf_tiles(tokens, offsets), -(-columns // 32)
    shape = (tiles, -(-blocks // 4)) if axis == 1 else (-(-columns // 128), tiles)
    out = torch.zeros(*shape, 32, 4, 4, dtype=torch.uint8)
    spans = [(0, tokens)] if offsets is None else list(itertools.pairwise(offsets.tolist()))
    for b, (start, end) in enumerate(spans):
        first_group, first_tile = (0, 0) if offsets is None else (start // 32 + b, start // 128 + b)
        for g in range(-(-(end - start) // 32)):
            for j in range(blocks):
                byte = scale[first_group + g, j]
                if axis == 1:
                    for r in range(32 * g, 32 * g + 32):
                        out[first_tile + r // 128, j // 4, r % 32, r // 32 % 4, j % 4] = byte
                else:
                    for c in range(32 * j, min(32 * j + 32, columns)):
                        out[c // 128, first_tile + g // 4, c % 32, c // 32 % 4, g % 4] = byte
    return out


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("columns", [32, 96, 160, 100])
@pytest.mark.parametrize("lengths", [None, HOSTILE_LENGTHS, (300,), (0, 0, 0), ()])
def test_scatter_places_each_byte(axis, columns, lengths):
    offsets = None if lengths is None else offsets_of(lengths)
    tokens = 300 if lengths is None else sum(lengths) + 17
    scale = torch.randint(1, 255, (scale_rows(tokens, offsets), -(-columns // 32)), dtype=torch.uint8)
    sf = scatter_sf(scale, tokens, columns, offsets, axis)
    assert torch.equal(sf, naive_sf(scale, tokens, columns, offsets, axis))
    back = gather_sf(sf, tokens, columns, offsets, axis)
    if offsets is None:
        assert torch.equal(back, scale)
    else:
        live = token_rows(offsets, tokens)[: sum(lengths)].unique()
        dead = torch.ones(len(scale), dtype=torch.bool)
        dead[live] = False
        assert torch.equal(back[live], scale[live]) and back[dead].count_nonzero() == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_dense_round_trip_everywhere(axis):
    for tokens in range(1, 301):
        for blocks in range(1, 21):
            scale = torch.randint(0, 256, (scale_rows(tokens, None), blocks), dtype=torch.uint8)
            assert torch.equal(gather_sf(scatter_sf(scale, tokens, 32 * blocks, None, axis), tokens, 32 * blocks, None, axis), scale)


def test_extent_is_the_capacity_not_the_shape():
    """A buffer longer than its sequences gives the same bytes, tile for tile, as a trimmed one, and zeros behind."""
    offsets = offsets_of([100, 60])
    x = torch.randn(300, 64)
    long, trimmed = quantize_mx(x, offsets=offsets), quantize_mx(x[:160], offsets=offsets)
    for axis in (0, 1):
        a = scatter_sf(long.scale_bytes, 300, 64, offsets, axis)
        b = scatter_sf(trimmed.scale_bytes, 160, 64, offsets, axis)
        if axis == 1:
            a, b = a.transpose(0, 1), b.transpose(0, 1)
        assert torch.equal(a[:, : b.shape[1]], b) and a[:, b.shape[1] :].count_nonzero() == 0


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_no_tokens(lengths):
    offsets = offsets_of(lengths)
    q = quantize_mx(torch.empty(0, 64), offsets=offsets)
    assert q.shape == (0, 64) and q.scale.shape == (len(lengths), 2)
    assert q.scale_bytes.count_nonzero() == 0 and q.dequantize().shape == (0, 64)
