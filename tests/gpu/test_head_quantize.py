"""Seeds' queries on the device: the definition's bytes, in one launch."""

import pytest
import torch

from fused_ops import head_quantize
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
