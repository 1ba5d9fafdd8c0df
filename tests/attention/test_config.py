"""Numeric choices: what is refused and why, and that they survive being sent through an operator."""

import dataclasses

import pytest
import torch

from lp_fa4.config import DEFAULT, DROP_IN, AttentionConfig


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(p_scale_log2=8), "log2\\(448\\) = 8.807"),
        (dict(rescale_threshold=4.0), "p_scale_log2 \\+ rescale_threshold is 7 \\+ 4"),
        (dict(rescale_threshold=-1.0), "rescale_threshold is -1"),
        (dict(p_scale="row"), "p_scale is 'row'; allowed are 'constant', 'softmax_max', 'fresh'"),
        (dict(p_scale="fresh"), "p_scale is 'fresh' with center_p=True"),
        (dict(operand_scales="inside"), "operand_scales is 'inside'; allowed are 'auto', 'outside'"),
        (dict(p_scale="fresh", center_p=False, operand_scales="outside"), "plain products take a constant scale of P"),
        (dict(p_scale_backward_log2=9), "p_scale_backward_log2 is 9"),
        (dict(key_tile=100), "key_tile is 100; it must be a positive multiple of 32"),
        (dict(fold_l_into_do=False), "center_p_backward needs fold_l_into_do"),
        (dict(delta_from="out"), "delta_from is 'out'; allowed are 'quantized', 'original'"),
        (dict(grad_format="fp32"), "grad_format is 'fp32'"),
        (dict(dq_dtype=torch.bfloat16), "dq_dtype is torch.bfloat16"),
        (dict(dq_scale="auto"), "dq_scale is 'auto'"),
        (dict(dq_scale=True), "dq_scale is True"),
        (dict(do_block=(1, 32)), "do_block is \\(1, 32\\)"),
        (dict(ds_block=(16, 32)), "ds_block is \\(16, 32\\)"),
        (dict(grad_block=(64, 32)), "grad_block is \\(64, 32\\)"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_rule(changes, words):
    with pytest.raises(ValueError, match=words):
        AttentionConfig(**changes)


def test_p_on_2_to_the_8_needs_a_small_threshold():
    """C8: offset + tau <= log2(448). 0.807 is allowed beside 8, 0.81 is not."""
    AttentionConfig(p_scale_log2=8, rescale_threshold=0.807)
    with pytest.raises(ValueError):
        AttentionConfig(p_scale_log2=8, rescale_threshold=0.81)


@pytest.mark.parametrize(
    "config",
    [
        DEFAULT,
        DROP_IN,
        AttentionConfig.post(),
        DEFAULT.with_(ds_block=None, dq_dtype=torch.float16, dq_scale=9),
        AttentionConfig.post(p_scale="fresh"),
    ],
)
def test_key_carries_everything(config):
    again = AttentionConfig.from_key(config.key)
    assert again == config and again.key == config.key and hash(again) == hash(config)
    assert all(getattr(again, f.name) == getattr(config, f.name) for f in dataclasses.fields(config))


def test_post_preset():
    post = AttentionConfig.preset("post", grad_format="bf16")
    assert (post.center_p, post.fold_l_into_do, post.delta_from, post.dq_scale, post.grad_format) == (False, False, "original", 9, "bf16")
    with pytest.raises(ValueError, match="preset is 'pots'; allowed are 'default', 'post'"):
        AttentionConfig.preset("pots")
