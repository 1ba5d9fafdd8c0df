"""Rings of places in shared memory that barriers guard: the next place, and a warp's arrival."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def turn(place: Int32, phase: Int32, count: cutlass.Constexpr):
    """The next place of a ring of ``count``, and the phase of its barriers."""
    place = place + 1
    if place == count:
        place, phase = Int32(0), phase ^ 1
    return place, phase


@cute.jit
def release(barrier):
    """One arrival per warp, after all its lanes have read."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
