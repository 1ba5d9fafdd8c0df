"""What is compiled for a call of the norm kernel, and the tuning table it is laid out by. No cutlass here."""

from dataclasses import dataclass

ROWS = 128
"""Tokens of one CTA: the tile rule's unit, so both swizzled scale layouts of a tile belong to one CTA."""
MAX_COLUMNS = 8192
MAX_COPIED = 1024
"""Columns whose codes of a tile fit the shared memory, for the copy with tokens innermost; that of wider rows is a pass of its own."""


@dataclass(frozen=True)
class NormTuning:
    """Layout of one CTA. ``resident``: a group of 32 rows stays in registers between its passes; otherwise each pass reads it again.
    ``ctas``: at least so many share a multiprocessor, which caps the registers of a thread. ``prefetch``: the tile's rows are asked for
    at once, into L2."""

    threads: int
    resident: bool
    ctas: int
    prefetch: bool = True


TUNING = (
    # 32 rows x columns / threads <= 48 values a thread. They live as FP32 from the row sums on (the compiler keeps the conversions), next
    # to 24 column sums: under 128 registers, so that two CTAs of 256 threads share a multiprocessor.
    (384, NormTuning(256, True, 2)),
    # 32 values a thread in 512 threads, again under 128 registers. 256 threads at 512 columns spill 30 registers, 512 at 640 three.
    (512, NormTuning(512, True, 1)),
    # A group no longer fits the registers: the second and third pass read the tile from L2 (2 MiB a CTA at 8192 BF16 columns).
    (MAX_COLUMNS, NormTuning(256, False, 2)),
)
"""(columns up to, layout); a column of FP32 counts twice, and BF16 rows kept next to data-dependent blocks count as 128 more."""


SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor; every CTA takes 1 KiB of it beside its own."""


@dataclass(frozen=True)
class StagedLayout:
    """A CTA of the staged kernel. ``ctas``: persistent ones on a multiprocessor. ``threads`` compute; ``turners`` warps turn codes for the
    copy, from ``slots`` buffers of ``rows`` rows. ``items``: tiles whose places may be known ahead. ``stages``: groups of 32 rows in
    flight, at most."""

    ctas: int = 2
    threads: int = 256
    turners: int = 0
    slots: int = 0
    rows: int = 0
    items: int = 4
    stages: int = 3

    @property
    def bytes(self) -> int:
        """Shared memory of one."""
        return SHARED_BYTES // self.ctas - 1024


PLAIN = StagedLayout()
COPIED = (
    (384, StagedLayout(1, turners=7, slots=2, rows=128, stages=4)),
    (512, StagedLayout(1, turners=7, slots=2, rows=128, items=2, stages=2)),
)
"""(columns up to, layout) where the codes are copied with tokens innermost."""


@dataclass(frozen=True)
class NormSpec:
    """Compile key: nothing in it depends on data.

    ``block_tokens``, ``width``: the scale block, 0 tokens for static. ``dense``: sequences of equal length, no offsets. ``centred``:
    subtract the sequence's mean and sum what is left. ``keep``: also BF16 of the normed rows. ``sf_columns``, ``sf_tokens``: also the
    swizzled scales of an MMA that contracts over columns (axis 1), over tokens (axis 0). ``copy``: head dimension of the codes' copy with
    tokens innermost, 0 for none.
    """

    columns: int
    dtype: str
    weight_dtype: str
    block_tokens: int
    width: int
    dense: bool = False
    centred: bool = False
    keep: bool = False
    sf_columns: bool = False
    sf_tokens: bool = False
    copy: int = 0

    @property
    def static(self) -> bool:
        """Exponents are given."""
        return self.block_tokens == 0

    @property
    def blocks(self) -> int:
        """Scale blocks of a row."""
        return self.columns // self.width

    @property
    def chunks(self) -> int:
        """Chunks of 8 columns, the unit of a thread's loads and stores."""
        return self.columns // 8

    @property
    def tuning(self) -> NormTuning:
        """The row of ``TUNING``. Blocks of 128 tokens need a whole tile's maximum first, which no register file holds."""
        width = self.columns * (2 if self.dtype == "float32" else 1) + (128 if self.keep and not self.static else 0)
        found = next((t for limit, t in TUNING if width <= limit), TUNING[-1][1])
        return found if self.block_tokens != 128 else TUNING[-1][1]

    @property
    def stages(self) -> int:
        """Groups of 32 rows in flight in the staged kernel, up to 3; 0 where it does not serve: swizzled scales, blocks of 128 tokens, and
        rows that leave no room for two."""
        if self.block_tokens == 128 or self.sf_columns or self.sf_tokens or self.columns > 512 or self.columns % 32:
            return 0
        if self.reread and self.columns < 480:  # shared out to eight lanes a row, seven slabs each: no registers
            return 0
        layout, group = self.staged, 32 * self.columns * (4 if self.dtype == "float32" else 2)
        vectors = 4 * self.columns * (1 + (layout.items + layout.threads // 32 if self.centred else 0))
        left = layout.bytes - 2048 - 4 * layout.slots * self.slot_words - vectors
        return min(layout.stages, left // group) if 2 * group <= left else 0

    @property
    def staged(self) -> StagedLayout:
        """The staged kernel's layout."""
        return next((layout for most, layout in COPIED if self.columns <= most), COPIED[-1][1]) if self.copy else PLAIN

    @property
    def reread(self) -> bool:
        """In the staged kernel: blocks whose scale depends on the data and whose group is more than its threads' registers hold, 48 values
        each, are read twice from shared memory."""
        return not self.static and 32 * self.columns > 48 * self.staged.threads

    @property
    def copied_rows(self) -> int:
        """Rows whose codes the staged kernel turns together."""
        return self.staged.rows

    @property
    def slot_words(self) -> int:
        """32-bit words of their codes on the way to the copy."""
        return self.copied_rows * self.columns // 4

    @property
    def lanes(self) -> int:
        """Threads that share a row: the most (long runs of one row) that leave at most an eighth of them idle, else the fewest idle."""
        threads = self.staged.threads if self.stages else self.tuning.threads
        choice = [n for n in (32, 16, 8) if n >= threads // 32]  # a group has 32 rows for the CTA to share out
        idle = {n: -(-self.chunks // n) * n for n in choice}
        return next((n for n in choice if 8 * idle[n] <= 9 * self.chunks), min(choice, key=lambda n: idle[n]))

    @property
    def passes(self) -> int:
        """Rows of a group that a thread takes part in."""
        return 32 * self.lanes // self.tuning.threads

    @property
    def slabs(self) -> int:
        """Chunks of a row that a thread takes part in."""
        return -(-self.chunks // self.lanes)


def unsupported(columns: int, tokens: int, dtype: str, width: int, copy: int = 0) -> str:
    """Why the kernel cannot serve, "" if it can. ``copy``: head dimension of the transposed copy, 0 for none."""
    if copy not in (0, 64, 128):
        return f"a copy in heads of {copy} columns is asked for; the kernel serves heads of 64 and 128"
    if columns % 32 or not 32 <= columns <= MAX_COLUMNS:
        return f"x has {columns} columns; the kernel serves multiples of 32 up to {MAX_COLUMNS}"
    if width % 32 or columns % width:
        return f"block is {width} columns wide; the kernel serves multiples of 32 that divide the {columns} columns"
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"x has dtype {dtype}; the kernel serves float32, bfloat16 and float16"
    if tokens >= 2**31:
        return f"x has {tokens} rows; the kernel counts them in 32 bits"
    return ""
