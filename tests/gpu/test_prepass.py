"""The backward's pre-pass on a GPU, where the main kernel takes FP16 scores: every row's codes and statistics (``tests.sm90.prepass``)."""

import dataclasses

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.problem import AttentionProblem
from tests.gpu.problems import DEVICE, Case, poison
from tests.sm90.prepass import check, gradients_of_out

pytestmark = pytest.mark.gpu

HOSTILE = (0, 1, 31, 32, 33, 0, 127, 128, 129, 300, 1000, 0)
JAGGED = (5, 0, 1, 129, 128, 127, 33, 200, 64, 7, 300, 2)
CASES = {
    "module": Case(HOSTILE, queries=130, bounded=True),
    "jagged queries": Case(HOSTILE, queries=JAGGED, shared=False, slack=9, bounded=True),
    "head 64, groups of 128": Case(HOSTILE, queries=200, dim=64, block=(128, 64), shared=False, bounded=True),
    "uncentred": Case((300, 70), queries=150, centred=False, bounded=True),
    "causal": Case((300, 128, 513), queries=(300, 128, 513), shared=False, causal=True, block=(128, 128), bounded=True),
    "long queries": Case((90, 40), queries=2150, shared=False, bounded=True),
}


def made(p: AttentionProblem, align: bool, dlse):
    """Workspaces of a problem on dirty memory, and all that they were made of, on the CPU."""
    from lp_fa4.sm90.backward_host import prepare_backward

    p = dataclasses.replace(p, config=p.config.with_(align_do=align))
    result, dout = reference.forward(p), gradients_of_out(p)
    poison()
    spaces = [x.cpu() for x in prepare_backward(p, result, dout, dlse=dlse)]
    tensors = ("q", "k", "v", "offsets_k", "offsets_q", "v_mean", "v_sum")
    moved = dataclasses.replace(p, **{n: getattr(p, n).to("cpu") for n in tensors if getattr(p, n) is not None})
    return moved, type(result)(*(x.cpu() for x in result)), dout.cpu(), spaces, None if dlse is None else dlse.cpu()


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows(name, align):
    p = CASES[name].make(1)
    dlse = torch.randn(p.heads, p.rows, device=DEVICE) if name == "module" else None
    arguments = made(p, align, dlse)
    check(*arguments)
    assert not bool(arguments[3][-1].any())


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_size_of_the_gradient(scale):
    """Exponents follow dO to the ends of its range."""
    from lp_fa4.sm90.backward_host import prepare_backward

    p = CASES["uncentred"].make(2)
    result, dout = reference.forward(p), gradients_of_out(p)
    plain, scaled = (
        prepare_backward(p, result, (dout * size).bfloat16()) for size in (1.0, 2.0 ** round(torch.tensor(scale).log2().item()))
    )
    assert torch.equal(plain[0], scaled[0]) and not bool(scaled[-1].any())


def test_where_fp16_does_not_do():
    """A row of q past its bound, a score past 2^6, a gradient of the LSE past FP16: one chunk says so."""
    from lp_fa4.sm90.backward_host import prepare_backward

    def needed(p, dlse=None):
        return prepare_backward(p, reference.forward(p), gradients_of_out(p), dlse=dlse)[-1]

    case = Case((100, 40, 7), queries=70, heads=2, kv_heads=2, shared=False, bounded=True)
    p = case.make(3)
    codes = p.q.codes.clone()
    codes[75, 1, :40] = 0x48  # 4.0
    assert needed(dataclasses.replace(p, q=type(p.q).from_bytes(codes, p.q.scale_bytes, p.q.block, p.q.offsets, 0))).tolist() == [
        [0, 0],
        [0, 2],
        [0, 0],
    ]

    def far(q, k, v, offsets):
        q[75, 1] *= 400.0 / float((q[75, 1] * k[120, 1]).sum())
        q[75, 1] *= 2.0

    assert needed(case.make(3, far)).flatten().tolist().count(1) >= 1
    dlse = torch.zeros(p.heads, p.rows, device=DEVICE)
    assert not bool(needed(p, dlse).any())
    dlse[0, 200] = 1e9
    assert needed(p, dlse).tolist() == [[0, 0], [0, 0], [1, 0]]
