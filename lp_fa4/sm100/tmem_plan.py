"""Who owns which TMEM columns, and when: the single place where columns are assigned.

Tensor memory has 128 lanes of 512 columns (32 bits each). The forward's accumulators S0, S1, O0, O1 take all of them at head dimension 128,
so P and every scale factor (SF) live inside an S region whose scores the softmax already holds in registers.

A plan is a list of :class:`Region`; each says in which *slots* of the steady state it is alive. The slots of the forward are its four
products in the order in which one thread issues them, for key tile n::

    slot    0          1               2          3
            O0 += P0 V  S0 = Q0 K(n+1)  O1 += P1 V  S1 = Q1 K(n+1)

:meth:`TmemPlan.check` refuses two regions that share a column and a slot. It runs when a kernel object is made, that is at trace time.
"""

from dataclasses import dataclass

COLUMNS = 512
"""32-bit columns of tensor memory per multiprocessor."""
SF_COLUMNS = 4
"""Columns of the scales of 128 rows (or columns) of one operand over at most 128 elements of the contraction (4 blocks of 32)."""
P_COLUMNS = 32
"""Columns of 128 E4M3 values per row: P of one key tile."""


@dataclass(frozen=True)
class Region:
    """``width`` columns from ``start``; ``alive``: slots in which its content may still be read or written.

    ``heir_of``: the region whose columns this one takes over lane by lane, inside the threads that read it (P replaces the scores it was
    made of): these two never conflict, whatever the slots say.
    """

    name: str
    start: int
    width: int
    alive: frozenset[int]
    heir_of: str = ""

    @property
    def end(self) -> int:
        """First column after the region."""
        return self.start + self.width

    def meets(self, other: "Region") -> bool:
        """Whether the two share a column and a slot without a hand-over between them."""
        if self.name == other.heir_of or other.name == self.heir_of:
            return False
        return self.start < other.end and other.start < self.end and bool(self.alive & other.alive)


@dataclass(frozen=True)
class TmemPlan:
    """Regions by name. ``plan["S0"].start`` is a column."""

    regions: tuple[Region, ...]

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(f"no TMEM region {name!r}; there are {', '.join(r.name for r in self.regions)}")

    @property
    def distance(self) -> int:
        """Columns from each region of tile 0 that the softmax touches (S, P, SFP) to its twin of tile 1: one number, or ``ValueError``."""
        names = [r.name[:-1] for r in self.regions if r.name in ("S0", "P0", "SFP0")]
        distances = {self[f"{n}1"].start - self[f"{n}0"].start for n in names}
        if len(distances) != 1:
            raise ValueError(f"TMEM distances of tile 1's {', '.join(names)} are {sorted(distances)}; they must be one number")
        return distances.pop()

    @property
    def used(self) -> int:
        """Columns up to the last one used."""
        return max(r.end for r in self.regions)

    @property
    def allocation(self) -> int:
        """Columns to allocate: the power of two, 32 at least, that holds them."""
        return max(32, 1 << (self.used - 1).bit_length())

    def check(self) -> "TmemPlan":
        """Return self, or raise ``ValueError`` that names the two regions, their columns and the slots they share."""
        for i, a in enumerate(self.regions):
            if a.start < 0 or a.end > COLUMNS:
                raise ValueError(f"TMEM region {a.name} is columns {a.start}..{a.end - 1}; there are {COLUMNS}")
            for b in self.regions[i + 1 :]:
                if a.meets(b):
                    raise ValueError(
                        f"TMEM regions {a.name} (columns {a.start}..{a.end - 1}) and {b.name} ({b.start}..{b.end - 1}) "
                        f"are both alive in slots {sorted(a.alive & b.alive)}"
                    )
        return self

    def moved(self, name: str, columns: int) -> "TmemPlan":
        """The same plan, unchecked, with one region shifted (to show that a wrong plan is caught)."""
        return TmemPlan(
            tuple(Region(r.name, r.start + columns, r.width, r.alive, r.heir_of) if r.name == name else r for r in self.regions)
        )


def _slots(*slots: int) -> frozenset[int]:
    return frozenset(slots)


def forward_plan(head_dim: int, block_scaled: bool = True, s_read_barriers: tuple[bool, bool] = (True, True)) -> TmemPlan:
    """Columns of the forward at ``head_dim`` 64 or 128, checked.

    ``s_read_barriers[i]``: the MMA warp waits until softmax i holds S_i in registers before it copies the other tile's scales into S_i's
    columns. Without it S_i counts as alive until P_i is waited for, and at head dimension 128 the check fails: that is why the two barriers
    exist. ``block_scaled=False``: the variant whose scales never enter tensor memory.

    At head dimension 64 the two O leave half of their columns, so every scale has columns of its own, nothing is aliased and no barrier is
    needed. Tile 1's regions lie 128 columns from tile 0's, so that one softmax code serves both.
    """
    every = _slots(0, 1, 2, 3)
    own = head_dim <= 64
    s, o = (0, 128), (256, 384)
    regions = []
    for i in (0, 1):
        pv, qk, pv_other, qk_other = 2 * i, 2 * i + 1, (2 * i + 2) % 4, (2 * i + 3) % 4
        # S_i is written in its own slot; with the barrier its last reader is done before the other tile's scores start.
        s_alive = _slots(qk, pv_other) if s_read_barriers[i] else _slots(qk, pv_other, qk_other)
        regions += [
            Region(f"S{i}", s[i], 128, s_alive),
            Region(f"O{i}", o[i], head_dim, every),
            # P_i may exist as soon as S_i has been read (in pv_other) and is read until its own product ends.
            Region(f"P{i}", s[i], P_COLUMNS, _slots(pv_other, qk_other, pv), heir_of=f"S{i}"),
        ]
        if not block_scaled:
            continue
        if own:
            at = o[i] + head_dim
            places = {"SFP": at, "SFV": at + 4, "SFQ": at + 8, "SFK": at + 12}
        else:
            places = {"SFP": s[i] + 32, "SFV": s[i] + 36, "SFQ": s[1 - i] + 40, "SFK": s[1 - i] + 44}
        regions += [
            Region(f"SFP{i}", places["SFP"], SF_COLUMNS, _slots(pv_other, qk_other, pv), heir_of=f"S{i}"),
            Region(f"SFV{i}", places["SFV"], SF_COLUMNS, _slots(pv)),
            Region(f"SFQ{i}", places["SFQ"], SF_COLUMNS, _slots(qk)),
            Region(f"SFK{i}", places["SFK"], SF_COLUMNS, _slots(qk)),
        ]
    return TmemPlan(tuple(regions)).check()


def prologue_columns(plan: TmemPlan, tile: int) -> tuple[int, int]:
    """Columns of SFQ and SFK for the very first scores of a CTA: inside O of the same tile, which no product has touched yet.

    (The steady-state place of tile 1 would be inside S0, which is just being written.) Where scales have columns of their own, those.
    """
    if "SFQ0" in [r.name for r in plan.regions] and plan["SFQ0"].start >= plan["S1"].end:
        return plan[f"SFQ{tile}"].start, plan[f"SFK{tile}"].start
    return plan[f"O{tile}"].start, plan[f"O{tile}"].start + SF_COLUMNS
