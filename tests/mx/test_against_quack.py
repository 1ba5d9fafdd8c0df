"""Quack as a second opinion: its scale packing and its MXFP8 quantizer, where the two formats coincide."""

import pytest
import torch
from quack.blockscaled import utils

from lp_fa4.mx import encode_scale, scatter_sf


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 12), (384, 8)])
def test_atoms_are_quacks(rows, blocks):
    """Square blocks repeat a byte over 32 rows: Quack packs the repeated grid to the same buffer."""
    scale = torch.randint(0, 255, (rows // 32, blocks), dtype=torch.uint8)
    packed = utils.pack_scale_2d_to_blocked_contig(scale.repeat_interleave(32, 0).view(1, rows, blocks))
    assert torch.equal(scatter_sf(scale, rows, 32 * blocks, None, 1), packed[0])


def test_scale_byte_is_quacks_rceil():
    from quack.blockscaled.quantize import to_mx

    x = torch.randn(64, 32) * 2.0 ** torch.randint(-100, 100, (64, 1))
    _, scale = to_mx(x.bfloat16(), 32)
    assert torch.equal(scale.view(torch.uint8).flatten(), encode_scale(x.bfloat16().abs().amax(1)))
