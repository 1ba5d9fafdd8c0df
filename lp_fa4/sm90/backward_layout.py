"""What the backward kernels agree on: compile-time choices, tile images, statistics and workspace sizes. No ``cutlass`` here.

Units of work: a key tile is 128 keys of one sequence, a query tile 64 queries, a chunk 32 query tiles (2,048 queries, the longest sum
that stays inside the tensor core's accumulator), an item one key tile of one key/value head (or two neighbours, see
``BackwardSpec.cluster``).

Images of a query tile: the bytes of its codes as shared memory wants them, swizzle included, ``[64, D]``, followed by those of the turned
codes ``[D, 64]`` (queries of each run of 16 in the order of ``backward_load``).

Query rows are laid out by the tile rule with 64: tile ``i`` of sequence ``b`` is row ``offsets_q[b] // 64 + b + i`` of the workspaces
(dense or shared: ``b * ceil(Q / 64) + i``), chunks by the same rule with 2,048. Every workspace tile is written whole, rows past the
sequence's end as zeros, so that the main kernel needs no bound on its query side.
"""

from dataclasses import dataclass

KEY_TILE = 128
QUERY_TILE = 64
CHUNK_TILES = 32
CHUNK = QUERY_TILE * CHUNK_TILES
ITEM_FIELDS = 8
"""int32 fields of a work item: sequence, first item of the sequence, whether it needs FP32 sums, first token, tokens, first query tile row,
queries, scale row."""

HEADROOM = 2
"""Powers of two by which P is coded smaller where sums are FP16: those of dV over 512 queries with all of their weight on one key, and dO
of one sign, do not overflow then (codes of dO are about 1)."""
COUNTER, TROUBLE, COUNTER_INSTEAD, CLEAR, REDO = range(1, 6)
"""Words of the item list's state, behind the number of items: the counter that CTAs draw from; whether anything is left to the form with
FP32 sums, and the counter that it draws from; sequences that are not left to it whole (of those that are the items say so); from ``REDO``
on, an item and head each, whether all but its dQ is, because a sum of dV or dK overflowed."""
RECODED = 4
"""Powers of two by which exponents of q may differ in a chunk whose turned codes come under the largest. Codes of about 1 then have E4M3's
last three bits, on what counts 2^-4 of the others; what differs by more is left to the second launch, and its codes as they are."""
NEED_ROWS, NEED_QUERIES = 1, 2
"""What of a chunk and head leaves FP16, as the pre-pass says: rows as they meet this sequence's keys, or codes of q. Where sequences share
their queries only the first one's chunks tell of these."""

STAT_FLOATS = 320
"""FP32 words of one query tile and head in memory. ``STAT_*`` are offsets into them.

Packed FP16 for ``halves``: a and c of two neighbouring queries a word, those of query ``8 j + 2 t`` and its neighbour at words
``16 (j // 2) + 4 t + j % 2`` and two further on; b at ``STAT_B2 + 16 (j // 4) + 4 t + j % 4``: what a lane reads is 16 bytes together.
"""
STAT_AC2, STAT_B2 = 0, 64
STAT_S0 = 96  # two factors on S, one for each 32 queries: softmax_scale * log2(e) * 2^e_q
STAT_Q0 = 98  # two factors 2^(e_q - e_ref) that fold the exponents of q into the codes of dS that meet q
STAT_DQ, STAT_DV, STAT_DK = 100, 101, 102  # factors of the three results
STAT_VT = 103  # 2^e_v, e_v the largest exponent of v in the sequence and head: unit of the packed b
STAT_A, STAT_B, STAT_C = 128, 192, 256  # FP32, one value a query


@dataclass(frozen=True)
class BackwardSpec:
    """Compile-time choices of the backward kernels (the compile key; no number in it depends on data).

    Attributes:
        head_dim: 64 or 128.
        group: query heads per key/value head.
        causal: bottom-right aligned mask.
        centred: P - l/K instead of P in dV, whose coherent part the caller adds.
        suffix: P - l/K on query tiles that see all of a warp's keys, and their coherent part added here (see ``backward_suffix``).
        whole: ``centred``, and the coherent part, ``sum dO / K``, is added here too. jagged: with ``whole``, queries come from offsets.
        shared: one set of queries for all sequences; dQ goes to ``replicas`` buffers.
        long: some key tile may meet more than one chunk (more than 2,048 queries, or grouped heads): partial sums leave the tensor core.
        fold: exponents of q or of k differ inside a tile, so dS is coded twice.
        tiles: exponents of q differ from query tile to query tile, not inside one; those of k not inside a key tile.
        recoded: they did, and the pre-pass has brought the turned codes of q to the chunk's largest (``halves``).
        mxfp8: dK and dV leave as MXFP8 in 32 x 32 blocks instead of BF16.
        k_static, v_static: one exponent a head instead of one per 32 keys.
        dq_half: dQ is added up in FP16, scaled so that no sum can overflow (one buffer a sequence).
        dq_grouped: neighbouring sequences have one buffer, under one power of two a row and head that ``backward_items`` finds
            (``dq_half`` and ``shared``). Otherwise each has its own, and a power a chunk and head, which the statistics know.
        deterministic: reductions from one CTA are performed one after the other.
        halves: scores and dP in FP16 (``backward_halves``); static exponents of k and v, no groups. Done only where the pre-pass
            found that FP16 holds them; instead: by this kernel only where it does not.
        cluster: two CTAs take neighbouring key tiles and share what they read of the query side (not if ``causal`` or ``serial``).
    """

    head_dim: int = 128
    group: int = 1
    causal: bool = False
    centred: bool = True
    shared: bool = True
    long: bool = False
    fold: bool = False
    tiles: bool = False
    recoded: bool = False
    mxfp8: bool = False
    k_static: bool = True
    v_static: bool = True
    dq_half: bool = False
    dq_grouped: bool = False
    deterministic: bool = False
    cluster: bool = False
    suffix: bool = False
    whole: bool = False
    jagged: bool = False
    halves: bool = False
    instead: bool = False

    @property
    def mean_row(self) -> bool:
        """Whether an item's share of the column sums of dO is one row, which comes with its keys."""
        return self.whole and not self.long

    @property
    def stat_span(self) -> tuple[int, int]:
        """First of a tile's statistics that the kernel wants in shared memory, and their number."""
        return (0, 128) if self.halves else (96, STAT_FLOATS - 96)

    @property
    def key_stages(self) -> int:
        """Stages of K and V: one where they go to registers at once."""
        return 1 if self.halves else 2

    @property
    def item_keys(self) -> int:
        """Keys of an item: one key tile, or one for each CTA of a cluster (the last may be empty)."""
        return KEY_TILE * (2 if self.cluster else 1)

    @property
    def serial(self) -> bool:
        """One CTA takes all key tiles of a sequence and head, in order."""
        return self.deterministic and (self.dq_half or not self.shared)

    @property
    def drawn(self) -> bool:
        """CTAs draw the next item of the list as they become free; otherwise each takes every so manieth."""
        return not (self.cluster or self.deterministic)

    @property
    def follows(self) -> bool:
        """Warps take over the smallest scale of dS in their warpgroup: a gain in long loops only, and not where it would spill."""
        return self.long and not self.cluster and (self.group == 1 or self.tiles or self.recoded or self.causal)

    def packed_store(self, which: int) -> bool:
        """Whether dV (``which`` 0) or dK (1) leaves as MXFP8 right from its FP16 sums: nothing is added to them in FP32."""
        return self.halves and self.mxfp8 and not self.long and (which == 1 or not (self.suffix or self.whole))

    @property
    def rows_by_tma(self) -> bool:
        """Whether dK and dV leave as BF16 rows right from their FP16 sums, by TMA. FP32 sums of dQ leave no room for whole rows."""
        return self.halves and not (self.mxfp8 or self.long or self.suffix) and self.dq_half

    @property
    def one_segment(self) -> bool:
        """Whether an item is one walk over all query tiles of its sequence, in an order that does not show in its sums."""
        return self.halves and not (self.long or self.causal)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a query tile's codes."""
        return QUERY_TILE * self.head_dim

    @property
    def dq_tile(self) -> int:
        """Elements of a query tile's dQ."""
        return QUERY_TILE * self.head_dim

    @property
    def dq_tile_bytes(self) -> int:
        """Bytes of a query tile's dQ sums."""
        return self.dq_tile * (2 if self.dq_half else 4)


@dataclass(frozen=True)
class PrepassSpec:
    """Compile-time choices of the pre-pass: see ``backward_prepass``. ``rows``: no chunk has more queries (:func:`chunk_rows`).
    ``dq_grouped``: the power of two on FP16 sums of dQ is not this sequence's alone, so no statistic has it. ``recode``: turned codes of q
    come under one exponent a chunk where they hold it. ``single``: sequences of more than one chunk are left to the second launch."""

    head_dim: int
    shared: bool
    jagged: bool
    centred: bool
    fold_l: bool
    delta_quantized: bool
    p_scale_log2: int
    out_fp32: bool
    q_static: bool
    dq_half: bool = False
    dq_scale_log2: int | None = None
    dq_grouped: bool = False
    k_static: bool = True
    v_static: bool = True
    causal: bool = False
    suffix: bool = False
    align: bool = False
    rows: int = CHUNK
    halves: bool = False
    recode: bool = False
    single: bool = False


def chunk_rows(queries: int | None) -> int:
    """Queries of a chunk for which the pre-pass keeps shared memory, where sequences have ``queries`` each (None: jagged): few sizes."""
    return CHUNK if queries is None else min(CHUNK, max(256, 1 << (queries - 1).bit_length()))


def rows_of(queries: int | None, total: int, batch: int, size: int) -> int:
    """Workspace rows of ``size`` queries: ``batch * ceil(queries / size)``, or the tile rule's bound where queries are jagged (None)."""
    if queries is None:
        return total // size + batch
    return batch * -(-queries // size)
