"""``head_quantize`` by its definition, on the CPU."""

import pytest
import torch

from fused_ops import head_quantize
from lp_fa4.mx.quantize import ROW_SUM


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Largest sum of the magnitudes of a row's codes, of each head."""
    return head_quantize(x).payload.double().nan_to_num(0.0).abs().sum(dim=2).amax(dim=0)


def test_one_exponent_a_head():
    """The smallest under which no row clips and none sums to more than 146: 17 elements of 8 have exponent 0, of 9 exponent 1."""
    x = torch.randn(40, 5, 32) * 2**-4
    x[7, 0], x[8, 1], x[:, 2] = 0.0, 0.0, 0.0
    x[7, 0, :17], x[8, 1, :17] = -8.0, 9.0
    x[9, 3, 3], x[9, 4, 5] = -130.0, 150.0  # one element is a sum too
    got = head_quantize(x)
    assert got.block == (0, 32) and got.scale_bytes.flatten().tolist() == [127, 128, 0, 127, 128]
    back = got.dequantize()
    assert bool((back[7, 0, :17] == -8.0).all()) and bool((back[:, 2] == 0).all())
    torch.testing.assert_close(back, x, rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["normal", "constant", "up", "one", "spread", "small"])
def test_no_row_sums_to_more_than_the_bound(width, kind):
    """Also where every element rounds up, or is subnormal, and where rows differ by 2^20; and never less than a third of it, which would
    waste an exponent."""
    x = torch.randn(64, 4, width) * torch.exp2(torch.linspace(-3, 3, 64))[:, None, None] * torch.exp2(torch.arange(4) * 30.0 - 60)[:, None]
    if kind != "normal":
        size = torch.exp2(torch.randint(-30 if kind == "spread" else -2, 3, x.shape).float())
        x = {
            "constant": torch.full_like(x, 3.7) * torch.linspace(0.5, 2, 64)[:, None, None],
            "up": 1.0626 * size,
            "one": x * (torch.arange(width) == 5),
            "spread": 1.0626 * size,
            "small": torch.where(torch.arange(width) == 0, 1.0, 1.6 * 2**-16) * torch.linspace(100, 1000, 64)[:, None, None],
        }[kind].expand(x.shape)
    sums = row_sums(x)
    assert bool((sums <= ROW_SUM).all()) and bool((sums >= ROW_SUM / 3).all())


def test_large_and_small_numbers_keep_the_bound():
    x = torch.randn(8, 2, 128) * torch.tensor([2.0**-140, 2.0**122])[:, None]
    assert bool((row_sums(x) <= ROW_SUM).all())


def test_what_is_not_finite_is_seen_and_stays_alone():
    x = torch.ones(4, 2, 32)
    x[1, 0, 2], x[2, 1, 3] = torch.nan, torch.inf
    got = head_quantize(x)
    back = got.dequantize()
    assert got.scale_bytes.flatten().tolist() == [254, 254]
    assert back.isnan().sum() == 2 and back[1, 0, 2].isnan() and back[2, 1, 3].isnan()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4, 2, 32, dtype=torch.int32), TypeError, "x has dtype torch.int32"),
        (torch.zeros(4, 32), ValueError, r"x has shape \[4, 32\]"),
        (torch.zeros(0, 2, 32), ValueError, r"x has shape \[0, 2, 32\]"),
        (torch.zeros(4, 2, 288), ValueError, r"x has shape \[4, 2, 288\].*D at most 256"),
    ],
)
def test_refusals(x, error, message):
    with pytest.raises(error, match=message):
        head_quantize(x)


def test_a_backend_that_cannot_serve_says_why():
    with pytest.raises(ValueError, match="backend='sm90' cannot serve head_quantize"):
        head_quantize(torch.zeros(4, 2, 32), backend="sm90")
