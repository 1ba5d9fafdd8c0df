"""Tensor memory of the two-CTA backward: the same columns in both CTAs of a pair. No scale enters it (plain f8f6f4 products).

Slots, the five products in the order in which one thread issues them for both CTAs (t: query tile)::

    slot   0               1                   2                3                    4
           S(t+1) = K Q^T  dK += dS(t)^T Q(t)  dQ = dS(t) K     dP(t+1) = V dO^T     dV += P(t+1)^T dO(t+1)

====================  =========================  ===============================================================
what                  where                      free because
====================  =========================  ===============================================================
P                     the two ends of S          made of these scores, lane by lane
dQ (half its width)   S, between the halves of P barrier ``s_read``: S(t+1) is in registers
S                     S                          barrier ``dq_read``: dQ of the tile before last is in registers
dS^T                  dP                         made of this dP, lane by lane
dP                    dP                         dK, which reads dS there, was issued before
====================  =========================  ===============================================================

dQ of a pair has 64 rows in each CTA, its two halves of columns one above the other: half as many columns as in the one-CTA kernel. So it
fits between the halves of P, dP never waits for it to be read, and the same places serve both head dimensions.
"""

from lp_fa4.sm100.backward_plan import BLOCK_COLUMNS
from lp_fa4.sm100.tmem_plan import Region, TmemPlan


def _slots(*slots: int) -> frozenset[int]:
    return frozenset(slots)


def pair_plan(head_dim: int, *, s_read: bool = True, dq_read: bool = True) -> TmemPlan:
    """Columns of the two-CTA backward at ``head_dim`` 64 or 128, checked.

    ``s_read``, ``dq_read``: the MMA warp waits until S (dQ) is in registers before dQ (S) is written over it. Without one the check fails:
    that is why the barriers exist.
    """
    s, dp, dv = 0, 128, 256
    every = _slots(0, 1, 2, 3, 4)
    half = 2 * BLOCK_COLUMNS
    return TmemPlan(
        (
            Region("S", s, 128, _slots(0, 1) if s_read else every),
            Region("P0", s, half, _slots(1, 2, 3, 4), heir_of="S"),
            Region("P1", s + 128 - half, half, _slots(1, 2, 3, 4), heir_of="S"),
            Region("dQ", s + 32, head_dim // 2, _slots(2, 3, 4) if dq_read else every),
            Region("dP", dp, 128, _slots(3, 4, 0)),
            Region("dS0", dp, half, _slots(4, 0, 1), heir_of="dP"),
            Region("dS1", dp + 64, half, _slots(4, 0, 1), heir_of="dP"),
            Region("dV", dv, head_dim, every),
            Region("dK", dv + head_dim, head_dim, every),
        )
    ).check()
