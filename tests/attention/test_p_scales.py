"""Scales of P made from data: every 32 keys of a row have their own power of two, the smallest under which none saturates."""

import math
from unittest import mock

import pytest
import torch

import lp_fa4
from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import quantize_mx
from lp_fa4.problem import AttentionProblem


def make(keys: int, config: AttentionConfig, sharpness: float = 4.0) -> AttentionProblem:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        quantize_mx(torch.randn(n, 1, 32, generator=generator), (32, 32), offsets=torch.tensor([0, n]), token_dim=0)
        for n in (5, keys, keys)
    )
    return AttentionProblem(q, k, v, softmax_scale=sharpness * 32**-0.5, config=config)


def rounded(p: list[float]) -> list[float]:
    """One block, value by value: exponent from the largest, round to E4M3, scale back."""
    largest = max(p)
    if largest == 0:
        return [0.0] * len(p)
    e = math.ceil(math.log2(largest / 448.0))
    codes = torch.tensor([x * 2.0**-e for x in p]).to(torch.float8_e4m3fn).float()
    return [float(c) * 2.0**e for c in codes]


@pytest.mark.parametrize("mode", ["softmax_max", "fresh"])
@pytest.mark.parametrize("keys", [1, 31, 33, 128])
def test_every_value_of_a_block_is_rounded_on_its_scale(mode, keys):
    """Against the definition in Python floats, one key tile (no maximum moves). The tolerance is that of FP32 sums of 128 terms."""
    problem = make(keys, AttentionConfig.post(p_scale=mode))
    q, k, v = (x.dequantize()[:, 0] for x in (problem.q, problem.k, problem.v))
    s = (q @ k.T * problem.softmax_scale * math.log2(math.e)).tolist()
    got = reference.forward(problem)
    for i, row in enumerate(s):
        p = [2.0 ** (x - max(row)) for x in row]
        blocks = [rounded(p[g : g + 32]) for g in range(0, keys, 32)]
        want = torch.tensor([x for block in blocks for x in block]) @ v / sum(p)
        torch.testing.assert_close(got.out[i, 0].float(), want, rtol=2**-8, atol=1e-5)


def test_small_blocks_keep_their_bits():
    """Where one key takes nearly all of a row, a constant scale flushes the others; scales of their own keep them."""
    exact_of = {}
    for mode in ("constant", "fresh"):
        problem = make(1024, AttentionConfig.post(p_scale=mode, save_out_dtype=torch.float32), sharpness=12.0)
        exact, _ = reference.exact_attention(
            *(x.dequantize(torch.float64) for x in (problem.q, problem.k, problem.v)), offsets_k=problem.offsets_k,
            offsets_q=problem.offsets_q, softmax_scale=problem.softmax_scale,
        )  # fmt: skip
        exact_of[mode] = (reference.forward(problem).centred_out.double() - exact).norm() / exact.norm()
    assert exact_of["fresh"] < exact_of["constant"]


def test_hopper_refuses_in_words():
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
    ):
        config = AttentionConfig.post(p_scale="fresh")
        served, reason = lp_fa4.is_supported("cuda", head_dim=128, backward=False, backend="sm90", config=config)
        assert not served and "config.p_scale is fresh; the Hopper kernels serve constant" in reason
        outside = AttentionConfig(operand_scales="outside")
        assert lp_fa4.is_supported("cuda", head_dim=128, backward=False, backend="sm90", config=outside)[0]


def test_place_of_operand_scales_changes_no_byte_of_the_reference():
    a, b = (reference.forward(make(200, AttentionConfig.post(operand_scales=place))) for place in ("auto", "outside"))
    assert torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)
