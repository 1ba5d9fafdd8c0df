"""What surrounds the kernel: capability, words for what is not served, and where every scale byte lies."""

from unittest import mock

import pytest
import torch

import lp_fa4
from lp_fa4.config import P_SCALES, AttentionConfig
from lp_fa4.dispatch import Features
from lp_fa4.mx import quantize_mx
from lp_fa4.sm100.forward_host import drawing_pays, forward_spec, unsupported
from lp_fa4.sm100.scale_atoms import reference_atoms
from tests.sm100.cases import offsets, problem


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_forward_is_chosen_on_blackwell(capability):
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: capability),
    ):
        for dim in (64, 128):
            assert lp_fa4.is_supported("cuda", head_dim=dim, backward=False) == (True, "served by backend 'sm100'")
        served, reason = lp_fa4.is_supported("cuda", head_dim=96, backward=False, backend="sm100")
        assert not served and "head_dim is 96; sm100 kernels serve 64, 128" in reason
        config = AttentionConfig(key_tile=64)
        served, reason = lp_fa4.is_supported("cuda", head_dim=128, backward=False, backend="sm100", config=config)
        assert not served and "config.key_tile is 64; sm100 kernels have tiles of 128 keys" in reason


def test_other_devices_are_refused_in_words():
    p = problem([5], shared=3)
    with pytest.raises(ValueError, match="device is cpu; kernels run on CUDA devices"):
        lp_fa4.sm100.forward(p)
    with (
        mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        mock.patch("lp_fa4.sm100.forward_host.arch_of", lambda device: "sm_90a"),
        pytest.raises(ValueError, match="compiles for sm_90a; sm100 kernels are for sm_100a, sm_103a"),
    ):
        lp_fa4.sm100.forward(p)


def test_items_are_drawn_where_they_differ():
    jagged, one, causal = problem([300, 5, 40], shared=3), problem([300], shared=3), problem([300], queries=[300], causal=True)
    assert drawing_pays(jagged, 6, 4) and not drawing_pays(jagged, 6, 6)
    assert not drawing_pays(one, 6, 4)
    assert drawing_pays(causal, 6, 4)


def test_variants_are_refused_in_words():
    outside, token = {"operand_scales": "outside"}, ((32, 128),) * 3
    with pytest.raises(ValueError, match=r'q has blocks \(32, 32\); with operand_scales="outside" the width must be head_dim = 128'):
        forward_spec(problem([5], shared=3, changes=outside))
    with pytest.raises(ValueError, match=r"v has blocks \(32, 128\) and P is centred"):
        forward_spec(problem([5], shared=3, blocks=token, changes=outside))
    assert forward_spec(problem([5], queries=[3], causal=True, blocks=token, changes=outside)).fold_v
    assert not forward_spec(problem([5], shared=3, blocks=token, exponents=(None, None, -4), changes=outside)).fold_v


@pytest.mark.parametrize("p_scale", P_SCALES)
def test_the_config_chooses_the_scale_of_p(p_scale):
    assert forward_spec(problem([5], shared=3, config="post", changes={"p_scale": p_scale})).p_scale == p_scale


def test_capability_knows_the_operands():
    config = AttentionConfig(operand_scales="outside")
    features = Features(128, config=config, blocks=((32, 128), (32, 128), (0, 128)))
    assert unsupported(features) == ""
    assert "v has blocks (32, 128) and P is centred" in unsupported(features._replace(blocks=((32, 128),) * 3))
    assert unsupported(features._replace(blocks=((32, 128),) * 3, causal=True)) == ""
    assert "k has blocks (32, 32)" in unsupported(features._replace(blocks=((32, 128), (32, 32), (0, 128))))
    assert "needs operands quantized with one exponent" in unsupported(features._replace(blocks=None))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("block, exponent", [((32, 32), None), ((32, 0), None), ((128, 0), None), ((32, 32), -3)])
@pytest.mark.parametrize("jagged", [True, False])
def test_every_scale_byte(dim, block, exponent, jagged):
    """Byte of token t and column block c (axis 1), and of column d and token block g (axis 0), in the atom of its tile and head."""
    lengths = [31, 0, 129, 260, 1] if jagged else [300]
    tokens, heads, start = sum(lengths), 3, offsets(lengths)
    x = torch.randn(tokens, heads, dim) * torch.exp2(torch.randint(-9, 9, (tokens, heads, 1)).float())
    width = block[1] or dim
    scale = torch.randint(-9, 9, (heads * dim // width,)) if exponent is not None else None
    mx = quantize_mx(x, (block[0], width), offsets=start if jagged else None, token_dim=0, exponent=scale)
    per_token = mx.dequantize() / mx.payload.float()  # the scale of each element, NaN where the code is 0
    by_row, by_column = reference_atoms(mx, 1), reference_atoms(mx, 0)
    for b, many in enumerate(lengths):
        first = int(start[b]) // 128 + b
        for t in torch.randperm(many)[:40].tolist():
            token, tile = int(start[b]) + t, first + t // 128
            for h in range(heads):
                atom = by_row[tile, h].view(32, 4, 4)
                for c in range(dim // 32):
                    want = per_token[token, h, 32 * c : 32 * c + 32].nan_to_num(0).max()
                    r = t % 128
                    assert atom[r % 32, r // 32, c] == (torch.log2(want) + 127 if want > 0 else atom[r % 32, r // 32, c])
                atom = by_column[tile, h].view(32, 4, 4)
                for d in range(0, dim, 7):
                    want = per_token[token, h, d]
                    if not torch.isnan(want):
                        assert atom[d % 32, d // 32, t % 128 // 32] == torch.log2(want) + 127
