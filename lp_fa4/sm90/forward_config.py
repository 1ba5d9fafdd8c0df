"""Compile-time choices of the Hopper forward, and the tuning table. No ``cutlass`` here."""

import math
from dataclasses import dataclass

QUERY_TILE = 128
"""Query rows of a work item: two consumer warpgroups of 64."""
KEY_TILE = 128
"""Keys of a tile: V^T then has exactly one 128-byte swizzle row per head column. 96, 160 and 224 lose half the speed."""

PLAIN_TILES = 2
"""Plain V tiles in shared memory, where the kernel turns them itself."""

FEW_KEYS = 256
"""Keys of a CTA of ``forward_few``."""
FEW_COLUMNS = (8, 16, 64)
"""Its widths: query rows times heads of a group, rounded up. Its scalar work grows with them."""

FEW_PARTS = "float16"
"""How its CTAs leave O: times 2**-10, so that nothing but NaN leaves FP16 (256 keys' codes of at most 448 each), or "float32"."""

WIDER = 2
"""Powers of two that P's scale gives to the threshold where V's exponents are not folded into P: with 2**5 and 3.75 instead of 2**7
and 1.75 P's bound is the same, and few tiles move a reference. E4M3 then loses P under 2**-14 of the largest instead of 2**-16."""

LOWER = 2
"""Powers of two that P's scale gives up where its products with V are summed in FP16: a P of E4M3's range times V's largest code then stays
in FP16 by itself, and sums of usual ones do (``ForwardSpec.half_sums``)."""


def half_scale(scale: float) -> float:
    """The nearest number with FP16's eleven bits, whatever its exponent: times a power of two it is a FP16 number."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(mantissa * 2.0**11), exponent - 11)


def order_of(head_dim: int, causal: bool, value_scale: int, halves: bool) -> tuple[int, int]:
    """``lag`` and ``tied`` of a ``ForwardSpec``, as measured (head 64 with FP16 scores: by its order alone): with others ptxas puts most of
    the exponentials before the hand-over of the turn."""
    if halves:
        if value_scale == 128 and not causal:
            return 6 if head_dim == 128 else 3, 4
        return (8 if value_scale == 128 else 6, 4) if causal else (3, 2)
    if value_scale == 128:
        return (6, 2) if causal else (3 if head_dim == 128 else 6, 4)
    return 4, 2


@dataclass(frozen=True)
class FewSpec:
    """Compile key of ``forward_few``; names as in ``ForwardSpec``. ``columns``: a member of ``FEW_COLUMNS``."""

    head_dim: int
    columns: int
    group: int = 1
    centred: bool = True
    shared: bool = True
    key_scale: int = 0
    value_scale: int = 0
    query_static: bool = True
    values: str = "copied"
    p_scale_log2: int = 7
    parts: str = FEW_PARTS

    @property
    def turns(self) -> bool:
        """Whether V is turned in shared memory."""
        return self.values == "plain"


@dataclass(frozen=True)
class ForwardSpec:
    """The compile key of a forward. Nothing in it depends on data.

    Attributes:
        head_dim: 64 or 128.
        group: query heads per key/value head.
        causal: mask aligned at the ends.
        centred: P is centred before it is rounded; needs the sums of V.
        mean: a mean of V is added to the output.
        keep: the output without that mean is stored beside it, for the backward.
        shared: one set of queries for every sequence.
        key_scale, value_scale: keys under one exponent: 0 (static), 128 or 32.
        query_static: one exponent for all queries.
        values: "copied": V^T comes from memory (``transpose``); "plain": V comes as it is, and the producer warpgroup turns it.
        split_keys: keys per split, 0 for none; then the kernel writes partial results for ``forward_merge``.
        p_scale_log2, threshold: power of two on P; growth of the maximum that is left alone (both log2 units).
        stages: K and V^T tiles in flight.
        parts: "float32" or "float16" where the splits are ``forward_few``'s, as that leaves them.
        retries: whole tiles go unseen and are done again where a P is too large; otherwise their maxima come first (``forward_softmax``).
        halves: scores in FP16 where a row's codes allow it (``forward_halves``).
        half_sums: P V of ``together`` tiles is summed in FP16 where scores are FP16; what leaves it is done again, in FP32, by a second
            launch (``worklist``).
        together: key tiles whose P V shares an accumulator, with ``halves``.
        tied: of so many runs of 16 keys one has its exponentials held back, by ``lag``.
        lag: groups of four exponentials that may be under way at once; 0 leaves their order to ptxas.
        waits: q, k and v are still being quantized (``quantize_beside``), by a launch that this one depends on.
    """

    head_dim: int
    group: int = 1
    causal: bool = False
    centred: bool = True
    mean: bool = True
    keep: bool = True
    shared: bool = True
    key_scale: int = 0
    value_scale: int = 0
    query_static: bool = True
    values: str = "copied"
    split_keys: int = 0
    p_scale_log2: int = 7
    threshold: float = 1.75
    stages: int = 3
    retries: bool = True
    halves: bool = False
    half_sums: bool = False
    together: int = 1
    lag: int = 4
    tied: int = 2
    parts: str = ""
    waits: bool = False

    def __post_init__(self) -> None:
        assert not (self.centred and self.causal), "causal rows have no common sum of V"
        assert self.values in ("copied", "plain") and self.stages >= PLAIN_TILES
        assert not self.halves or (self.split_keys == 0 and self.key_scale == self.value_scale in (0, 128)), (
            "exponents of tiles have FP32 scores"
        )
        assert not self.half_sums or (self.halves and self.centred), "sums of positive P would leave FP16"
        owned = 65536 // self.threads // 8 * 8 * self.threads
        assert 256 * self.registers[0] + (self.threads - 256) * self.registers[1] <= owned, "a warpgroup would wait for registers for ever"

    @property
    def threads(self) -> int:
        """Of a CTA: the loading warpgroup, two that compute; one that turns V, where FP16 scores leave it the registers."""
        return 512 if self.turns and self.halves else 384

    @property
    def turning_warps(self) -> int:
        """Warps that turn V: a warpgroup, or three beside the one that loads."""
        return 4 if self.halves else 3

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of the others."""
        return (224, 32) if self.threads == 512 else (240, 24)

    @property
    def turns(self) -> bool:
        """Whether V is turned in shared memory."""
        return self.values == "plain"

    @property
    def scaled(self) -> bool:
        """Whether a stage of K holds exponents."""
        return self.key_scale > 0 or self.value_scale > 0

    @property
    def folded(self) -> bool:
        """Whether V's exponents go into P: those of 32 keys. One of a whole tile enters with the tile's partial O instead."""
        return self.value_scale == 32

    @property
    def p_log2(self) -> int:
        """Power of two on P."""
        return self.p_scale_log2 - (0 if self.folded else WIDER) - (LOWER if self.half_sums else 0)

    @property
    def growth(self) -> float:
        """How far a score may exceed its row's reference, log2 units."""
        return self.threshold + (0 if self.folded else WIDER)

    @property
    def parts_log2(self) -> int:
        """Power of two on ``forward_few``'s parts, beside P's."""
        return -10 if self.parts == "float16" else 0

    @property
    def resumes(self) -> bool:
        """Whether a later split first looks at tile 0: all splits must share the centre, the mean of its scores."""
        return self.split_keys > 0 and self.centred

    @property
    def outputs(self) -> int:
        """BF16 results of an item."""
        return 2 if self.mean and self.keep else 1

    @property
    def vectors(self) -> int:
        """FP32 vectors of length ``head_dim`` that travel with a query tile: the sums, then the mean of V."""
        return int(self.centred) + int(self.mean) if self.split_keys == 0 else 0
