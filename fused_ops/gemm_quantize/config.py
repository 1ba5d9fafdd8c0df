"""What is compiled for a call of the projection kernel, and how it is laid out. No cutlass here."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
"""Tokens of a work item by the tile rule (else ``GemmSpec.flat``); each of two consumer warpgroups computes 64 of them."""
MAX_COLUMNS = 128
"""Output columns of a CTA: 64 accumulators a thread, next to two sets of partial sums."""
MAX_DIRECT_COLUMNS = 192
"""Where sums stay in one accumulator, 96 a thread (``GemmSpec.wide``), or are FP16 (``GemmSpec.halves``): the more columns, the fewer bytes
of shared memory a product reads, and the fewer CTAs read x."""
SHARED_BYTES = 227 * 1024
WIDE_FIXED_BYTES, DIRECT_FIXED_BYTES = 2 * 1024, 4 * 1024
FIXED_BYTES = 24 * 1024
"""Shared memory beside operands: codes on their way out (16 KiB), factors, barriers, the alignment of the tiles."""
MIN_STAGES, MAX_STAGES = 4, 14
LARGEST_ROW = 143.0
"""Magnitudes of a row of the weight's codes, both parts, add up to at most this where sums are taken in FP16: 448 x 143 is 64,064, and FP16
ends at 65,504: 2% for what rounding adds to partial sums and to the sum of the magnitudes."""
MAX_HALVES_CONTRACTED = 1024
"""K up to which that is enough: at 65,504 a rounding adds 16, and there is one for each 32 of K and part."""
MIN_DIRECT_BYTES = 64 * 1024
"""Of x in flight that its wider column tiles leave at least: of 512 columns in tiles of 192, which leave half, a call took 1.6 times as
long."""
DIRECT_SLABS = 2
"""See ``GemmSpec.slabs``."""
ITEM_SLOTS = 4
"""Tiles whose places the loading warp may have written ahead."""
FORMS = {"e4m3": 1, "e4m3x2": 2, "bf16": 1}
"""Operand forms and how many products a column of the weight takes: E4M3, E4M3 with the weight as hi + lo, BF16."""


@dataclass(frozen=True)
class GemmSpec:
    """Compile key: nothing in it depends on data.

    ``contracted``, ``columns``: K and N of ``x [T, K] @ w [N, K]^T``. ``form``: a key of ``FORMS``. ``x_tokens``, ``x_width``: the scale
    block of x, 0 tokens for static (0 columns: x has no scales). ``w_static``: one row of scales for all of w's rows, else one for 32.
    ``w_width``: K under one scale of w. ``block_tokens``, ``width``: block of the result. ``dense``: one sequence, no offsets.
    ``turns``: the warpgroups multiply in turn, one's products beside the other's epilogue. ``one_scale``: both parts of w have the same
    scales, so that their products add up together. ``shared``: CTAs of a tile share what they read of x in pairs where that is worth it
    (``cluster``).
    """

    contracted: int
    columns: int
    form: str
    x_tokens: int
    x_width: int
    w_static: bool
    w_width: int
    block_tokens: int
    width: int
    dense: bool
    turns: bool = True
    one_scale: bool = False
    shared: bool = True

    @property
    def static(self) -> bool:
        """Exponents of the result are given."""
        return self.block_tokens == 0

    @property
    def scaled(self) -> bool:
        """Operands have scales: partial sums are multiplied by their factor when they are added up."""
        return self.form != "bf16"

    @property
    def direct(self) -> bool:
        """A thread stores its sums' codes as they lie: exponents are known before the first tile, and nothing is exchanged about them."""
        return self.wide or self.folded

    @property
    def flat(self) -> bool:
        """No exponent depends on the sequence a row is of: an item is 64 rows of all, for a warpgroup, and every CTA has as many."""
        return self.direct

    @property
    def wide(self) -> bool:
        """Sums of a row stay in one accumulator, and exponents are given."""
        return self.static and not self.scaled

    @property
    def run(self) -> int:
        """Columns of which a quarter lie in a thread, where it stores them as they lie."""
        return 64 if self.columns % 64 == 0 and self.column_tile % 64 == 0 else 32

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside operands."""
        if self.direct:
            return WIDE_FIXED_BYTES if self.wide else DIRECT_FIXED_BYTES
        return FIXED_BYTES

    @property
    def parts(self) -> int:
        """Products of a column."""
        return FORMS[self.form]

    @property
    def element(self) -> int:
        """Bytes of an operand's element."""
        return 2 if self.form == "bf16" else 1

    @property
    def stage_columns(self) -> int:
        """K of one run of a stage: a row of the 128-byte swizzle."""
        return 128 // self.element

    @property
    def steps(self) -> int:
        """Runs of ``stage_columns`` in a row of x, each under one swizzle."""
        return -(-self.contracted // self.stage_columns)

    @property
    def slabs(self) -> int:
        """Such runs in a stage: of BF16 two, for a stage costs a wait and its return."""
        return next(n for n in (DIRECT_SLABS, 1) if self.steps % n == 0) if self.wide else 1

    @property
    def rounds(self) -> int:
        """Stages of a row of x."""
        return self.steps // self.slabs

    @property
    def stage_bytes(self) -> int:
        """64 rows of x."""
        return 64 * 128 * self.slabs

    @property
    def chunk(self) -> int:
        """K that is summed by the tensor core before the sum is scaled and added in FP32: every factor is constant over it, and 128 at
        most, for FP8 sums keep some 14 bits. BF16 sums stay in one accumulator."""
        if not self.scaled:
            return self.stage_columns
        widths = [w for w in (self.x_width, self.w_width) if w < self.contracted]
        return next(c for c in (128, 64, 32) if all(w % c == 0 for w in widths))

    @property
    def unit(self) -> int:
        """Columns that a tile must hold whole: a block of the result, unless its exponents are given."""
        return 32 if self.static else self.width

    @property
    def scale_parts(self) -> int:
        """Sums of a chunk that have a factor of their own."""
        return 1 if self.one_scale else self.parts

    @property
    def folded(self) -> bool:
        """The inverse of the result's exponents is part of w's factors: all three are known before the first tile."""
        return self.static and self.scaled and self.x_tokens == 0

    @property
    def halves(self) -> bool:
        """Sums may be FP16: one factor serves all of K where x's static exponents are equal, which the kernel finds out, and whether FP16
        holds them (``sm90_roles.sums_fit``). A weight has its exponents so on purpose (``fused_ops.operands.split_e4m3``)."""
        one = self.w_width >= self.contracted and self.scale_parts == 1
        return self.folded and one and self.contracted <= MAX_HALVES_CONTRACTED

    @property
    def ahead(self) -> bool:
        """A warpgroup may read its rows of x into registers before its turn: a barrier's parity tells no more than two fillings of a stage
        apart, and the other warpgroup's half may still be on its way."""
        return self.stages >= 2 * self.rounds

    @property
    def column_tile(self) -> int:
        """Output columns of a CTA, whose weights stay in shared memory: the fewest tiles that fit, of equal size."""
        row = self.parts * self.steps * 128
        left = SHARED_BYTES - self.fixed_bytes - MAX_DIRECT_COLUMNS * row
        if self.halves and self.columns % MAX_DIRECT_COLUMNS == 0 and left >= 2 * self.rounds * self.stage_bytes:
            return MAX_DIRECT_COLUMNS
        limit, rows = (MAX_DIRECT_COLUMNS, MIN_DIRECT_BYTES) if self.wide else (MAX_COLUMNS, MIN_STAGES * self.stage_bytes)
        most = min(limit, (SHARED_BYTES - self.fixed_bytes - rows) // row) // self.unit * self.unit
        if most <= 0:
            return 0
        tiles, units = -(-self.columns // most), -(-self.columns // self.unit)
        return -(-units // tiles) * self.unit

    @property
    def sets(self) -> int:
        """Of partial sums: two, of which one is made while the other is added up, where registers hold them."""
        return 2 if self.column_tile <= MAX_COLUMNS else 1

    @property
    def column_tiles(self) -> int:
        """CTAs that share a row of x."""
        return -(-self.columns // self.column_tile)

    @property
    def cluster(self) -> int:
        """CTAs that share what they read of x: of BF16 rows two, which are twice as long as those of E4M3, and whose products are fewer."""
        return 2 if self.shared and self.wide and self.column_tiles % 2 == 0 else 1

    @property
    def weight_bytes(self) -> int:
        """Weights of a CTA."""
        return self.parts * self.steps * 128 * self.column_tile

    @property
    def stages(self) -> int:
        """Stages of x: what shared memory has left."""
        return min(MAX_STAGES, (SHARED_BYTES - self.fixed_bytes - self.weight_bytes) // self.stage_bytes)

    @property
    def x_blocks(self) -> int:
        """Scales of a row of x."""
        return self.contracted // self.x_width if self.x_width else 0

    @property
    def w_blocks(self) -> int:
        """Scales of a row of w."""
        return -(-self.contracted // self.w_width) if self.w_width else 0

    @property
    def chunks(self) -> int:
        """Chunks along K."""
        return -(-self.contracted // self.chunk)

    @property
    def w_table(self) -> int:
        """Factors of w in shared memory, whole vectors of four."""
        return (self.column_tile // 32 * self.chunks * self.scale_parts + 3) // 4 * 4


def form_of(x: Sequence[Tensor], x_blocks: Sequence[int], w: Sequence[Tensor], w_blocks: Sequence[int]) -> tuple[str, str]:
    """Form of operands as ``fused_ops.operands.flatten`` has them, or "" and why no kernel multiplies them."""
    if not x_blocks and not w_blocks:
        if x[0].dtype != torch.bfloat16 or w[0].dtype != torch.bfloat16:
            return "", f"x and w are {x[0].dtype} and {w[0].dtype}; the kernel multiplies bfloat16 by bfloat16 or MXFP8 by MXFP8"
        return "bf16", ""
    if not x_blocks or not w_blocks:
        return "", "one of x and w is MXFP8 and the other is not; the kernel multiplies bfloat16 by bfloat16 or MXFP8 by MXFP8"
    if len(w) == 2 and tuple(w_blocks[:2]) != tuple(w_blocks[2:]):
        return "", f"w has parts in blocks {tuple(w_blocks[:2])} and {tuple(w_blocks[2:])}; the kernel serves equal ones"
    return ("e4m3x2" if len(w) == 2 else "e4m3"), ""


def spec_of(
    x: Sequence[Tensor],
    x_blocks: Sequence[int],
    w: Sequence[Tensor],
    w_blocks: Sequence[int],
    block: Sequence[int],
    dense: bool,
    w_scale: Sequence[Tensor] = (),
) -> tuple[GemmSpec | None, str]:
    """The Hopper kernel's compile key of a call on flattened operands, or None and why there is none. ``w_scale``: whether both parts of w
    have one scale tensor is part of the key."""
    form, reason = form_of(x, x_blocks, w, w_blocks)
    if reason:
        return None, reason
    x_block, w_block = ((x_blocks[0], x_blocks[1]), (w_blocks[0], w_blocks[1])) if form != "bf16" else ((0, 0), (0, 0))
    spec = GemmSpec(
        x[0].shape[1], w[0].shape[0], form, min(x_block[0], 32), x_block[1], w_block[0] == 0, w_block[1], block[0], block[1], dense,
        one_scale=len(w_scale) == 2 and w_scale[0].data_ptr() == w_scale[1].data_ptr(),
    )  # fmt: skip
    return spec, unsupported(spec)


def unsupported(spec: GemmSpec) -> str:
    """Why the Hopper kernel cannot serve, "" if it can."""
    if spec.contracted % 32 or spec.contracted < 32:
        return f"x has {spec.contracted} columns; the kernel serves multiples of 32"
    if spec.columns % 32 or spec.columns < 32:
        return f"w has {spec.columns} rows; the kernel serves multiples of 32"
    for name, width in (("x", spec.x_width), ("w", spec.w_width)):
        if width % 32:
            return f"{name} has blocks {width} columns wide; the kernel serves multiples of 32"
    if spec.width % 32 or (not spec.static and spec.width > MAX_COLUMNS):
        return f"block is {spec.width} columns wide; the kernel serves multiples of 32, up to {MAX_COLUMNS} unless exponents are given"
    if spec.column_tile == 0:
        return f"x has {spec.contracted} columns; weights of one block of {spec.unit} columns do not fit the shared memory"
    if not spec.turns and spec.rounds >= spec.stages:  # a turn also keeps a warpgroup from a stage that is two fillings ahead
        return f"turns is off and a row of x has {spec.rounds} stages; only fewer than the ring's {spec.stages} are told apart"
    return ""


TENSOR_COLUMNS = 512
"""Columns of Blackwell's tensor memory, half of which hold two accumulators of 128 x 128."""


@dataclass(frozen=True)
class BlackwellSpec:
    """Compile key of the Blackwell kernel. ``contracted``, ``columns``: K and N; ``form``: a key of ``FORMS``; ``block_tokens``, ``width``:
    block of the result; ``dense``: one sequence, no offsets; ``sf_columns``, ``sf_tokens``: also the result's swizzled scales for an MMA
    that contracts over columns (axis 1), over tokens (axis 0)."""

    contracted: int
    columns: int
    form: str
    block_tokens: int
    width: int
    dense: bool
    sf_columns: bool = False
    sf_tokens: bool = False

    @property
    def static(self) -> bool:
        """Exponents of the result are given."""
        return self.block_tokens == 0

    @property
    def scaled(self) -> bool:
        """The MMA scales blocks of 32."""
        return self.form != "bf16"

    @property
    def parts(self) -> int:
        """Products of a column."""
        return FORMS[self.form]

    @property
    def want_atoms(self) -> bool:
        """Any swizzled scales."""
        return self.sf_columns or self.sf_tokens

    @property
    def stage_columns(self) -> int:
        """K of one stage: a row of the 128-byte swizzle."""
        return 128 if self.scaled else 64

    @property
    def steps(self) -> int:
        """Stages of a row of x."""
        return -(-self.contracted // self.stage_columns)

    @property
    def column_tiles(self) -> int:
        """CTAs that share a row of x; each has 128 columns."""
        return -(-self.columns // TILE)

    @property
    def unit(self) -> int:
        """Columns under one byte in the epilogue."""
        return 32 if self.static else self.width

    @property
    def blocks(self) -> int:
        """Units in a CTA's columns."""
        return TILE // self.unit

    @property
    def resident(self) -> bool:
        """Weights stay in shared memory, next to at least three stages of x."""
        return self.steps * self.parts <= 9

    @property
    def stages(self) -> int:
        """Stages of x, with its weights where they do not stay."""
        tile = TILE * 128 + 512
        held = self.steps * self.parts
        left = SHARED_BYTES - FIXED_BYTES - held * (tile if self.resident else 512)
        return min(6, left // (tile if self.resident else tile * (1 + self.parts)))


def unsupported_on_blackwell(spec: BlackwellSpec) -> str:
    """Why the Blackwell kernel cannot serve, "" if it can."""
    if spec.contracted % 32 or spec.contracted < 32:
        return f"x has {spec.contracted} columns; the kernel serves multiples of 32"
    if spec.columns % 32 or spec.columns < 32:
        return f"w has {spec.columns} rows; the kernel serves multiples of 32"
    if spec.width % 32 or (not spec.static and TILE % spec.width):
        return f"block is {spec.width} columns wide; the kernel serves 32, 64 and 128, or multiples of 32 with given exponents"
    if spec.scaled and 4 * spec.steps * (spec.parts + 2) > TENSOR_COLUMNS // 2:
        return f"x has {spec.contracted} columns; the scales of so many do not fit the tensor memory"
    return ""


def blackwell_spec_of(
    x: Sequence[Tensor],
    x_blocks: Sequence[int],
    w: Sequence[Tensor],
    w_blocks: Sequence[int],
    block: Sequence[int],
    dense: bool,
    axes: Sequence[int] = (),
) -> tuple[BlackwellSpec | None, str]:
    """The Blackwell kernel's compile key of a call on flattened operands, or None and why there is none. ``axes``: of swizzled scales."""
    form, reason = form_of(x, x_blocks, w, w_blocks)
    if reason:
        return None, reason
    for name, blocks in (("x", x_blocks), ("w", w_blocks)):
        if blocks and blocks[1] % 32:
            return None, f"{name} has blocks {blocks[1]} columns wide; the kernel serves multiples of 32"
    spec = BlackwellSpec(x[0].shape[1], w[0].shape[0], form, block[0], block[1], dense, 1 in axes, 0 in axes)
    return spec, unsupported_on_blackwell(spec)
