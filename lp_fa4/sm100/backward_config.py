"""What the backward kernels agree on: variants, schedules, workspaces. No ``cutlass`` here.

Units of work: a key tile is 128 keys of one sequence, a query tile 128 queries, an item one key tile of one key/value head (or, for
deterministic dQ, all key tiles of a sequence). Query tile ``i`` of sequence ``b`` owns the row ``offsets_q[b] // 128 + b + i`` of the
workspaces (dense or shared queries: ``b * ceil(Q / 128) + i``).
"""

from dataclasses import dataclass

from lp_fa4.sm100.config import ARCHS, HEAD_DIMS

TILE = 128
"""Keys of a key tile, queries of a query tile."""
PAIR = 2 * TILE
"""Keys of a pair of CTAs (``backward_pair_kernel``)."""
BLOCK_FACTORS = 4
"""Values of a block of 32 queries for the two-CTA kernel (``backward_pair_tables``)."""
STAT_POWER = 3
"""Place of a query's power of two on FP16 sums of dQ among its statistics (``BackwardSpec.stats``)."""
DQ_COLUMNS = 32
"""Columns of dQ in flight between tensor memory and its reduction."""


@dataclass(frozen=True)
class BackwardSpec:
    """Compile-time choices of the main kernel (the compile key; no number in it depends on data).

    Attributes:
        head_dim: 64 or 128. group: query heads per key/value head.
        causal: aligned at the ends. centred: P - l/K instead of P in dV. shared: one set of queries for all sequences.
        mxfp8: dK and dV leave as MXFP8 in 32 x 32 blocks instead of BF16.
        dq_half: dQ is added up in FP16 under a power of two.
        deterministic: reductions of one CTA to the same place are performed one after the other.
        p_scale_log2: of ``AttentionConfig.p_scale_backward_log2``; P leaves exp2 with it, so dS carries it too.
    """

    head_dim: int = 128
    group: int = 1
    causal: bool = False
    centred: bool = True
    shared: bool = False
    mxfp8: bool = False
    dq_half: bool = False
    deterministic: bool = False
    p_scale_log2: int = 8

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim}; sm100 kernels serve {', '.join(map(str, HEAD_DIMS))}")
        if self.causal and self.centred:
            raise ValueError("causal and centred are both True; the sums that pay for centring would be per row")

    @property
    def stats(self) -> int:
        """Values of a query: ``a`` (added to its scaled scores), ``D`` (subtracted from dP), ``c`` (subtracted from P), and the power of
        two on FP16 sums of its dQ."""
        return stat_values(self.dq_half)


@dataclass(frozen=True)
class BackwardTuning:
    """Schedule of one variant on one target.

    Attributes:
        stages: query tiles (Q, dO, statistics) in flight.
        compute_registers, reduce_registers, other_registers: per thread after the split; two compute warpgroups, one of each other.
    """

    stages: int = 2
    compute_registers: int = 144
    reduce_registers: int = 96
    other_registers: int = 128

    def __post_init__(self) -> None:
        if 2 * self.compute_registers + self.reduce_registers + self.other_registers > 512:
            raise ValueError(
                f"registers are 2 x {self.compute_registers} + {self.reduce_registers} + {self.other_registers}; "
                "at most 512 fit four warpgroups"
            )


def backward_tuning(arch: str, spec: BackwardSpec, pairs: bool = False) -> BackwardTuning:
    """Tuning row of a variant, by pairs of CTAs or not, on ``"sm_100a"`` or ``"sm_103a"``."""
    if arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}; allowed are {', '.join(map(repr, ARCHS))}")
    return BackwardTuning(compute_registers=152, other_registers=112) if pairs else BackwardTuning()


@dataclass(frozen=True)
class PrepassSpec:
    """Compile-time choices of the pre-pass: see ``backward_prepass``. ``token_blocks``: one exponent of dO for 32 rows and the whole head
    dimension, for the two-CTA kernel."""

    head_dim: int
    jagged: bool
    centred: bool
    fold_l: bool
    delta_quantized: bool
    p_scale_log2: int
    out_fp32: bool
    causal: bool = False
    dq_half: bool = False
    dq_scale_log2: int | None = None
    token_blocks: bool = False


def stat_values(dq_half: bool) -> int:
    """Statistics of a query: see ``BackwardSpec.stats``."""
    return 4 if dq_half else 3


def tile_rows(queries: int | None, total: int, batch: int) -> int:
    """Workspace rows of query tiles: ``batch * ceil(queries / 128)``, or the tile rule's bound where queries are jagged (None)."""
    return total // TILE + batch if queries is None else batch * -(-queries // TILE)
