"""Seeds' queries on the device: the definition's bytes, in one launch."""

import pytest
import torch

from fused_ops import head_quantize
from lp_fa4.mx.quantize import ROW_SUM
from tests.gpu.problems import DEVICE, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 64), (33, 2, 64), (512, 3, 128), (4099, 5, 128)])
@pytest.mark.parametrize("bad", [False, True])
def test_bytes(rows, heads, width, bad):
    x = torch.randn(rows, heads, width, device=DEVICE) * torch.exp2(torch.arange(heads, device=DEVICE) * 9.0 - 20)[:, None]
    if bad:
        x[rows // 2, 0, 1], x[0, heads - 1, width - 1] = torch.nan, torch.inf
    poison()
    for rows_of in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        got, want = head_quantize(rows_of), head_quantize(rows_of, backend="reference")
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scale_bytes, want.scale_bytes)


@pytest.mark.parametrize("width", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["constant", "up", "one", "spread"])
def test_sums(width, kind):
    """Rows at the bound on sums: the reference's bytes, and no row past it."""
    size = torch.exp2(torch.randint(-30 if kind == "spread" else -2, 3, (300, 4, width), device=DEVICE).float())
    x = {
        "constant": torch.linspace(0.5, 4, 300, device=DEVICE)[:, None, None].expand(300, 4, width),
        "up": 1.0626 * size,
        "one": torch.randn(300, 4, 1, device=DEVICE) * (torch.arange(width, device=DEVICE) == 5),
        "spread": 1.0626 * size,
    }[kind] * torch.exp2(torch.arange(4, device=DEVICE) * 30.0 - 60)[:, None]
    got, want = head_quantize(x), head_quantize(x, backend="reference")
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale_bytes, want.scale_bytes)
    assert got.payload.double().abs().sum(dim=2).max() <= ROW_SUM


def test_graph_replays_on_other_values():
    x = torch.randn(512, 3, 128, device=DEVICE)
    head_quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = head_quantize(x)
    x.mul_(1000.0)
    graph.replay()
    want = head_quantize(x, backend="reference")
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scale_bytes, want.scale_bytes)
