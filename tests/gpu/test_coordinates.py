"""Balanced coordinates on the device, in one launch."""

import pytest
import torch

from fused_ops import balanced_coordinates
from tests.fused_ops.kernel_cases import uneven
from tests.gpu.problems import DEVICE, poison

pytestmark = pytest.mark.gpu


def problem(rows, heads, width, columns, dtype=torch.bfloat16, kind="random"):
    q, w = torch.randn(rows, heads, width, device=DEVICE), torch.randn(heads * width, columns, device=DEVICE)
    uneven(q, w, kind)
    return q, w.to(dtype), (torch.rand(columns, device=DEVICE) + 0.5).to(dtype)


@pytest.mark.parametrize(("rows", "heads", "width", "columns"), [(1, 1, 64, 64), (33, 2, 64, 128), (512, 3, 128, 384), (4099, 5, 128, 644)])
@pytest.mark.parametrize("kind", ["random", "lopsided", "one channel", "overflow"])
def test_against_the_reference(rows, heads, width, columns, kind):
    """The kernel's covariances are sums of BF16 products; what it chose is inverted within 2^-12."""
    for dtype in (torch.bfloat16, torch.float32):
        q, w, gain = problem(rows, heads, width, columns, dtype, kind)
        poison()
        for rotate in (True, False):
            keys, queries = balanced_coordinates(q, w, gain, rotate=rotate)
            for mine, theirs in zip((keys, queries), balanced_coordinates(q, w, gain, rotate=rotate, backend="reference"), strict=True):
                assert float((mine - theirs).abs().max()) < 2**-9
            assert float((keys.transpose(1, 2).double() @ queries.double() - torch.eye(width, device=DEVICE)).abs().max()) < 2**-12


def test_layouts_and_repetition():
    q, w, gain = problem(512, 3, 128, 384)
    want = balanced_coordinates(q, w, gain)
    apart = torch.randn(1153 * 512 + 1, device=DEVICE)[1:].view(512, 1153)  # neither aligned nor a multiple of four apart
    apart[:, :384] = q.flatten(1)
    for rows in (q, q.transpose(0, 1).contiguous().transpose(0, 1), apart[:, :384].unflatten(1, (3, 128))):
        for found, before in zip(balanced_coordinates(rows, w, gain), want, strict=True):
            assert torch.equal(found, before)


def test_graph_replays_on_other_values():
    q, w, gain = problem(512, 3, 128, 384)
    balanced_coordinates(q, w, gain)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = balanced_coordinates(q, w, gain)
    q[..., :64] *= 5
    graph.replay()
    for found, want in zip(got, balanced_coordinates(q, w, gain), strict=True):
        assert torch.equal(found, want)
