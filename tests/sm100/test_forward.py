"""The Blackwell forward, executed by the emulator under adversarial schedules, against the reference and FP64.

Every case is one kernel variant (compiled once) on hostile lengths. ``python -m tests.sm100.matrix`` runs the whole list of shapes and
modes under 16 schedules each.
"""

import pytest
import torch

from tests.emulator import emulate
from tests.sm100.cases import FP32, POST, Judge, problem, run

pytestmark = pytest.mark.emulator


def check(p, schedules, **options) -> None:
    emulate(lambda: run(p, **options), arch="sm_100a", schedules=schedules, verify=Judge(p))


def test_shared_queries_centred():
    """The module's case: shared queries, one and a half Q tiles, P centred, mean of V added back, a spare capacity."""
    check(problem([31, 0, 300, 129], shared=200, mean=True, capacity=50), 4)


def test_jagged_queries_causal_gqa():
    """Jagged queries, more queries than keys (rows that see nothing), two query heads per key head, P uncentred as causal asks."""
    check(problem([300, 31, 1, 0], queries=[300, 130, 5, 40], heads=2, kv_heads=1, causal=True, sharpness=2), 4)


def test_head_dim_64():
    """Scales with columns of their own; three heads; a second Q tile that lacks rows."""
    check(problem([33, 127, 0, 260], queries=[1, 257, 30, 128], heads=3, dim=64), 3)


@pytest.mark.parametrize("p_scale", ["softmax_max", "fresh"])
def test_data_dependent_scales_of_p(p_scale):
    """Row scales of P through shared memory; sharp scores, so that blocks of P differ by many powers of two; no lazy maximum."""
    check(problem([128, 300], queries=[64, 129], sharpness=4, config=POST), 3, p_scale=p_scale)


@pytest.mark.parametrize("blocks, exponents", [(((32, 128), (128, 128), (32, 128)), (None, None, None)), (((32, 32),) * 3, (-5, -5, -4))])
def test_other_blocks(blocks, exponents):
    """Token blocks, 128-token blocks and static scales reach the MMA as 32-element scales; same kernel as the default's."""
    check(problem([129, 0, 40], queries=[130, 7, 1], blocks=blocks, exponents=exponents, config=FP32), 1)


def test_scales_outside_the_mma_static_v():
    """Token blocks of Q and K applied to score rows and columns, V static, P centred: the plain f8f6f4 kernel."""
    blocks, exponents = ((32, 128), (32, 128), (32, 128)), (None, None, -4)
    check(problem([33, 0, 257], shared=130, mean=True, blocks=blocks, exponents=exponents), 3, block_scaled=False)


def test_scales_outside_the_mma_folded_v():
    """V's exponents folded into P: blocks of V that differ by 2^20 and blocks of zeros, which still count in the row sum."""
    p = problem([300, 31, 0], queries=[129, 40, 3], blocks=((32, 128), (128, 128), (32, 128)), config=POST)
    p.v.payload.view(torch.uint8)[0:32] = 0
    p.v.scale_bytes[0] = 0
    p.v.scale_bytes[2] -= 20
    check(p, 3, block_scaled=False)


def test_lazy_maximum_moves_often():
    """Scores so sharp that rows rescale in most tiles, on the plain running maximum of the conventional preset."""
    check(problem([700], shared=256, heads=1, sharpness=8, config=POST), 2)


def test_no_keys_at_all():
    """Neither a launch nor a NaN: zeros and -inf."""
    p = problem([0, 0], shared=5)
    Judge(p)(run(p))
