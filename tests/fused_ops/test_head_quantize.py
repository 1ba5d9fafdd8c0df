"""``head_quantize`` by its definition, on the CPU."""

import pytest
import torch

from fused_ops import head_quantize


def test_one_exponent_a_head():
    """The smallest under which no row clips: a maximum of 448 has exponent 0, the next larger number 1."""
    x = torch.randn(40, 3, 32)
    x[7, 0, 3], x[9, 1, 5], x[:, 2] = -448.0, 448.5, 0.0
    x[:, :2].clamp_(-448.5, 448.5)
    got = head_quantize(x)
    assert got.block == (0, 32) and got.scale_bytes.flatten().tolist() == [127, 128, 0]
    back = got.dequantize()
    assert back[7, 0, 3] == -448.0 and bool((back[:, 2] == 0).all())
    torch.testing.assert_close(back, x, rtol=2**-4, atol=2**-9)


def test_what_is_not_finite_is_seen_and_stays_alone():
    x = torch.ones(4, 2, 32)
    x[1, 0, 2], x[2, 1, 3] = torch.nan, torch.inf
    back = head_quantize(x).dequantize()
    assert back.isnan().sum() == 2 and back[1, 0, 2].isnan() and back[2, 1, 3].isnan()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4, 2, 32, dtype=torch.int32), TypeError, "x has dtype torch.int32"),
        (torch.zeros(4, 32), ValueError, r"x has shape \[4, 32\]"),
        (torch.zeros(0, 2, 32), ValueError, r"x has shape \[0, 2, 32\]"),
    ],
)
def test_refusals(x, error, message):
    with pytest.raises(error, match=message):
        head_quantize(x)


def test_a_backend_that_cannot_serve_says_why():
    with pytest.raises(ValueError, match="backend='sm90' cannot serve head_quantize"):
        head_quantize(torch.zeros(4, 2, 32), backend="sm90")
