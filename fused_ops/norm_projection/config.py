"""What is compiled for a call of the kernel that normalizes and projects, and how it is laid out. No cutlass here."""

from dataclasses import dataclass
from functools import cached_property

from fused_ops.rmsnorm_quantize.config import NormSpec

HALF = 64
"""Rows of a stage: what a multiplying warpgroup holds in registers as its left operand."""
DEPTH = 64
"""K of a piece of the weight, and columns of a row under one 128-byte swizzle."""
NORM_WARPS = 4
"""Warps that normalize. A warpgroup that loads follows, and two that multiply."""
THREADS = 32 * NORM_WARPS + 384
REGISTERS = {False: (104, 24, 192), True: (120, 24, 176)}
"""Of a thread of each kind, in FP16 (True) or not: 64 rows x 384 columns are 96 registers of a multiplying thread, sums of 128 columns 64,
or 32 in FP16."""
COLUMN_TILES = (128, 64)
"""Columns of a product, largest first: as many as registers hold sums of beside the left operand."""
RUN_COLUMNS = 64
"""Columns of which a thread's sums of a row are consecutive, a quarter of them."""
MAX_COLUMNS = 384
"""Of x: the left operand's registers."""
SHARED_BYTES = 227 * 1024
X_STAGES = 2
"""Halves in flight."""
CLUSTER = 1
"""CTAs that share what they read of the weight; the first draws tiles for all. Two read half as much of it from L2, and take as long."""
MAX_PIECES = 8
"""Pieces of the weight in flight, at most."""
ITEMS = 3
"""Tiles whose places may be known ahead."""


@dataclass(frozen=True)
class ProjectionSpec:
    """Compile key: nothing in it depends on data.

    ``contracted``, ``columns``: K and N. ``weight_dtype``: of the norm's weight. ``norm_width``, ``width``: columns under one given
    exponent of the normed rows and of the product. ``dense``: one sequence, no offsets. ``cluster``: CTAs that share what they read of w.
    ``dtype``: of x. ``halves``: rows, weight and sums are FP16, in units of the given exponents (``weight.FoldedWeight``), not BF16 and
    FP32.
    """

    contracted: int
    columns: int
    weight_dtype: str
    norm_width: int
    width: int
    dense: bool
    centred: bool = True
    cluster: int = CLUSTER
    dtype: str = "bfloat16"
    halves: bool = False

    @property
    def direct(self) -> bool:
        """The norm's warps read x themselves. Rows of BF16 come by TMA, to the place where 16-bit rows are made of them; others are kept
        from their factors to their codes as FP32, upper halves in that place, lower halves in one that all of them share."""
        return self.dtype != "bfloat16"

    @property
    def stages(self) -> int:
        """Halves in flight."""
        return X_STAGES

    @cached_property
    def norm(self) -> NormSpec:
        """The norm's own key, as of BF16 rows whatever x is: sums in the same order, so that equal values have equal results."""
        return NormSpec(self.contracted, "bfloat16", self.weight_dtype, 0, self.norm_width, dense=self.dense, centred=self.centred)

    @property
    def column_tile(self) -> int:
        """Columns of a product; 0 if N is no multiple of one."""
        return next((n for n in COLUMN_TILES if self.columns % n == 0), 0)

    @property
    def column_tiles(self) -> int:
        """Products of a row."""
        return self.columns // self.column_tile

    @property
    def steps(self) -> int:
        """Pieces of a row of x."""
        return -(-self.contracted // DEPTH)

    @property
    def offset(self) -> int:
        """Products by which the second warpgroup's tiles start later, so that the two never want rows at once."""
        return self.column_tiles // 2

    @property
    def looks(self) -> int:
        """The product behind which a warpgroup looks for the rows of its next half: time enough for them to come, and to be normed."""
        return (self.column_tiles - 1) // 2

    @property
    def units(self) -> int:
        """Entries of the table of the product's factors, one for 32 columns: whole vectors of four, as they are read."""
        return (self.columns // 32 + 3) // 4 * 4

    @property
    def stage_bytes(self) -> int:
        """64 rows of x."""
        return HALF * 128 * self.steps

    @property
    def piece_bytes(self) -> int:
        """A piece of the weight."""
        return self.column_tile * 128

    @property
    def pieces(self) -> int:
        """Pieces of the weight in flight: what shared memory has left."""
        vectors = 4 * self.contracted * (1 + (ITEMS + NORM_WARPS if self.centred else 0))
        halves = self.stages + 1 if self.direct else self.stages  # lower bits of rows that are not BF16 take the place of one
        most = min(MAX_PIECES, (SHARED_BYTES - 3072 - vectors - halves * self.stage_bytes) // self.piece_bytes)
        return most // self.steps * self.steps if most >= self.steps else most

    @property
    def whole(self) -> bool:
        """Pieces in flight are whole products', so that places within a product are constants."""
        return self.pieces % self.steps == 0


def unsupported(spec: ProjectionSpec) -> str:
    """Why the kernel cannot serve, "" if it can."""
    if spec.dtype not in ("float32", "bfloat16", "float16"):
        return f"x has dtype {spec.dtype}; the kernel serves float32, bfloat16 and float16"
    if spec.contracted % DEPTH or not DEPTH <= spec.contracted <= MAX_COLUMNS:
        return f"x has {spec.contracted} columns; the kernel serves multiples of {DEPTH} up to {MAX_COLUMNS}"
    if spec.columns % 64 or spec.columns < 64:
        return f"w has {spec.columns} rows; the kernel serves multiples of 64"
    for name, width in (("x", spec.norm_width), ("the product", spec.width)):
        if width % 32:
            return f"blocks of {name} are {width} columns wide; the kernel serves multiples of 32"
    return ""
