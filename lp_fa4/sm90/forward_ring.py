"""The ring of key tiles as the forward's consumers walk it: places, barriers, releases."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from lp_fa4.sm90.forward_config import KEY_TILE

K_FULL, K_EMPTY, V_FULL, V_EMPTY = range(4)
"""A stage's barriers: in this order, all stages of one behind one another (``forward_kernel``)."""


@cute.jit
def release(barrier, was_read: cutlass.Constexpr = False):
    """One arrival per warp. ``was_read``: its lanes loaded what the stage holds, so all of them must have come here first."""
    if const_expr(was_read):
        cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def next_place(spec: cutlass.Constexpr, place):
    """The ring's place behind ``place``: (stage, phase, lower half of the descriptor of the stage's K, address of its first barrier).

    V lies behind K, by a constant. All of it is carried along: made from the stage at every use, descriptors and addresses are twenty
    instructions, a chain of eight of them between the turn and the first product.
    """
    stage, phase, low, barriers = place
    last = stage == spec.stages - 1
    step = Int32(1 - spec.stages) if last else Int32(1)
    flip = Int32(1) if last else Int32(0)
    return stage + step, phase ^ flip, low + step * (KEY_TILE * spec.head_dim // 16), barriers + 8 * step


def barrier_at(spec, place, which: int):
    """One of a stage's barriers."""
    return cute.make_ptr(Int64, place[3] + 8 * spec.stages * which, cute.AddressSpace.smem, assumed_align=8)
