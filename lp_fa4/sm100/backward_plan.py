"""Tensor memory of the backward: dK and dV stay for a whole key tile, S and dP share what is left with everything else.

The slots of :mod:`lp_fa4.sm100.tmem_plan` are here the five products in the order in which one thread issues them (t: query tile)::

    slot   0               1                   2                3                    4
           S(t+1) = K Q^T  dK += dS(t)^T Q(t)  dQ = dS(t) K     dP(t+1) = V dO^T     dV += P(t+1)^T dO(t+1)

========================  ==========================  ==================================================================
what                      where                       free because
========================  ==========================  ==================================================================
scales of S (K, Q)        dP                          barrier ``dp_read``: dP(t) is in registers
P, its scale              S                           made of these scores, lane by lane
dS^T                      dP                          made of this dP, lane by lane
scales of dK (dS, Q)      dP, beside dS               dS feeds this product
dQ                        dP                          dK, which reads dS and scales there, was issued before
scales of dQ (dS, K)      S, beside P                 barrier ``s_read``: S(t+1) is in registers
dP                        dP                          barrier ``dq_read``: dQ is in registers
scales of dP (V, dO)      S, beside P                 as those of dQ
scales of dV (P, dO)      S, beside P                 barrier ``p_ready``
========================  ==========================  ==================================================================

Two warpgroups share a row of keys, 64 queries each. P and dS lie where their own scores and dP lay (blocks 0 and 1 of 32 queries in the
first half, 2 and 3 in the second), so no warpgroup waits for the other before it stores. The scales of dS are one atom per writer (two for
dK, four for dQ): a word of a row's four bytes would have several.
"""

from lp_fa4.sm100.tmem_plan import SF_COLUMNS, Region, TmemPlan

BLOCK_COLUMNS = 8
"""Columns of 32 E4M3 values per row."""
DS_ATOMS_K, DS_ATOMS_Q = 2, 4
"""Scale atoms of dS for dK (one per warpgroup) and for dQ (one per 32 keys)."""


def _slots(*slots: int) -> frozenset[int]:
    return frozenset(slots)


def backward_plan(head_dim: int, *, dp_read: bool = True, s_read: bool = True) -> TmemPlan:
    """Columns of the backward at ``head_dim`` 64 or 128, checked.

    ``dp_read``, ``s_read``: the MMA warp waits until dP (S) is in registers before it copies the next scales into its columns. Without one
    the check fails at head dimension 128: that is why the barriers exist. At 64, dV and dK leave 128 columns: dQ and every scale have
    columns of their own and neither barrier is needed.
    """
    own = head_dim <= 64
    s, dp, dv = 0, 128, 256
    dk = dv + head_dim
    free = dk + head_dim
    every = _slots(0, 1, 2, 3, 4)
    s_alive = _slots(0, 1) if s_read and not own else every
    dp_alive = _slots(3, 4, 0, 1) if own else _slots(3, 4) if dp_read else _slots(3, 4, 0)
    regions = [
        Region("S", s, 128, s_alive),
        Region("dP", dp, 128, dp_alive),
        Region("dQ", free if own else dp, head_dim, every if own else _slots(2)),
        Region("dV", dv, head_dim, every),
        Region("dK", dk, head_dim, every),
    ]
    for half in (0, 1):
        regions += [
            Region(f"P{half}", s + 64 * half, 2 * BLOCK_COLUMNS, _slots(1, 2, 3, 4), heir_of="S"),
            Region(f"dS{half}", dp + 64 * half, 2 * BLOCK_COLUMNS, _slots(4, 0, 1), heir_of="dP"),
        ]
    in_s = (("SFDS_Q", DS_ATOMS_Q, 2), ("SFK_T", 1, 2), ("SFV", 1, 3), ("SFDO", 1, 3), ("SFP", 1, None), ("SFDO_T", 1, 4))
    in_dp = (("SFDS_K", DS_ATOMS_K, 1), ("SFQ_T", 1, 1), ("SFK", 1, 0), ("SFQ", 1, 0))
    at = free + head_dim
    for start, group in ((s, in_s), (dp, in_dp)):
        if not own:
            at = start + 2 * BLOCK_COLUMNS
        for name, atoms, slot in group:
            alive, heir = (_slots(slot), "") if slot is not None else (_slots(1, 2, 3, 4), "S")
            regions.append(Region(name, at, atoms * SF_COLUMNS, alive, heir_of=heir))
            at += atoms * SF_COLUMNS
    return TmemPlan(tuple(regions)).check()
