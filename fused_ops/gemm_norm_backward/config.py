"""What is compiled for a call of the GEMM + norm backward, and how it is laid out. No cutlass here."""

from dataclasses import dataclass

from torch import Tensor

from fused_ops.operands import Weight
from lp_fa4.mx import MXTensor

TILE = 64
"""Tokens of one step: the rows of a warpgroup's MMA (input gradient), the depth of a stage (weight gradient)."""
SLABS = {(False, False): 192, (True, False): 128, (False, True): 128, (True, True): 96}
"""Most columns of a CTA's part of the weight, by (products by warps, FP32 ``x``): accumulators are half as many registers of a thread, FP32
``x`` is as many again (16 bits: half of that). Products by warps hold the weight's words in registers too."""
MAX_SLAB, WARP_MMA_COLUMNS = SLABS[False, False], SLABS[True, False]
SHARED_BYTES = 216 * 1024
"""Shared memory for a CTA's part of the weight."""
RUN = 32_768
"""Most tokens that one accumulator of the weight gradient sums: tensor cores cut each of their additions (2,048 of them) instead of
rounding it, so a sum shrinks by up to 2^-25 of itself with each; longer runs are cut and added in FP32."""
STAGES = 3
CODE_TILES = {1: 192, 2: 192, 3: 192, 4: 128}
"""Where both operands of the weight gradient are codes: warpgroups of a CTA to the most columns that their registers hold."""
CODE_BYTES = 220 * 1024
"""Shared memory of that kernel's stages and tables."""
ROLES_BYTES, ROLES_SLAB = 227 * 1024, 144 * 1024
"""Shared memory of the input gradient's kernel with roles, and of its part of the weight."""
MAX_DK_STAGES = 6
FP8_STEP, FP8_SLOTS = 128, 2
"""With FP8 products: tokens of a step of the weight gradient; operands and tables of it in shared memory."""
FP8_TILES = {1: 256, 2: 256, 3: 192}
"""With FP8 products: warpgroups of a CTA to the most columns whose sums, and those of a step, their registers hold."""
SHARES = 64
"""Runs of the weight gradient are this long, in some unit, but for those of crossing units, which may begin before the others."""
HEAD_START = 0.096
"""Time of the input gradient, over that of a unit of the weight gradient for all tokens of a tile (1.54 ms over 14.4 at 1.5 M x 512, less
what runs beside it are slower)."""
BESIDE_TOKENS = 1 << 18
"""From so many tokens on there are such runs."""
SINGLE = "mx", "bfloat16"


@dataclass(frozen=True)
class Operand:
    """How a matrix of gradients or activations is stored: E4M3 codes in blocks of ``width`` columns (and 32 tokens, or static), or BF16
    (``width`` 0)."""

    width: int
    static: bool = False

    @property
    def mx(self) -> bool:
        """Codes and scales, not BF16."""
        return self.width > 0


@dataclass(frozen=True)
class InputSpec:
    """Compile key of the input gradient. ``rows``: of the weight, ``columns``: of ``x``. ``mean``: a row per sequence is added to ``dv``.

    ``warp_mma``: products by warps (any architecture) instead of warpgroups (Hopper). ``half_sums``: with roles, sums of products are
    FP16 where ``x`` is BF16, scaled so that none can leave its range (``input_gradient_codes``). ``beside``: the weight gradient may
    begin on multiprocessors that no cluster fits into.

    A cluster of ``cluster`` CTAs shares the columns; each holds its slab of the weight in shared memory for the whole launch.
    """

    rows: int
    columns: int
    dtype: str
    dk: Operand
    dv: Operand | None
    mean: bool
    dense: bool
    need_x: bool
    need_norm: bool
    warp_mma: bool = False
    half_sums: bool = False
    beside: bool = False

    @property
    def wide(self) -> bool:
        """``x`` and ``dx`` are FP32."""
        return self.dtype == "float32"

    @property
    def roles(self) -> bool:
        """Whether the gradients are codes and of sizes that the kernel with roles serves (``input_gradient_codes``)."""
        codes = self.dk.mx and (self.dv is None or self.dv.mx)
        return codes and not self.warp_mma and not self.wide and self.rows % 128 == 0 and roles_cluster_of(self.rows, self.columns) > 0

    @property
    def halves(self) -> bool:
        """Whether sums of products are FP16: what they round is under what BF16 rounds off ``dx``."""
        return self.half_sums and self.roles and self.dtype == "bfloat16"

    @property
    def folds(self) -> bool:
        """Whether dv is added to those sums in FP16, where a row's exponents allow it."""
        return self.halves and self.dv is not None

    @property
    def cluster(self) -> int:
        """CTAs that share the columns of a row."""
        return roles_cluster_of(self.rows, self.columns) if self.roles else cluster_of(self.rows, self.columns, self.warp_mma, self.wide)

    @property
    def slab(self) -> int:
        """Columns of one CTA."""
        return self.columns // self.cluster

    @property
    def groups(self) -> int:
        """Computing warpgroups of a CTA: with roles three where their accumulators fit 160 registers, else two."""
        return 3 if self.roles and self.slab <= 128 else 2

    @property
    def early(self) -> bool:
        """With roles: registers hold the first of ``x`` and dv beside the last products."""
        return self.groups == 2 or self.halves

    @property
    def registers(self) -> tuple[int, int]:
        """With roles: registers of a computing thread, and of one of the first warpgroup."""
        return {2: (232, 40), 3: (160, 32)}[self.groups]

    @property
    def table_words(self) -> int:
        """With roles: words of a tile's table: two and a half a row, and exponents."""
        return TILE // 2 * (5 + 2 * self.entry_words)

    @property
    def entry_words(self) -> int:
        """With roles: words of a row's exponents: a half for every 32 columns of dk and of this CTA's of dv, a factor."""
        return self.rows // 64 + self.slab // 64 + 1

    @property
    def x_stages(self) -> int:
        """With roles: stages of ``x`` and dv, 64 columns each."""
        return 4

    @property
    def dk_stages(self) -> int:
        """With roles: stages of dk, 128 columns each, in what shared memory is left."""
        words = 2 * self.groups * self.cluster * TILE + (self.groups + 1) * self.slab + self.groups * self.table_words
        barriers = 6 * self.groups + (self.groups + 1) * (MAX_DK_STAGES + self.x_stages)
        front = -(-(4 * words + 8 * barriers + 16) // 1024) * 1024
        rest = ROLES_BYTES - front - 2 * self.rows * self.slab - self.x_stages * TILE * 192
        return min(MAX_DK_STAGES, rest // (128 * TILE))

    @property
    def lookup(self) -> bool:
        """Whether a row's sequence matters."""
        scaled = [x for x in (self.dk, self.dv) if x is not None and x.mx and not x.static]
        return not self.dense and bool(self.mean or scaled)


@dataclass(frozen=True)
class WeightSpec:
    """Compile key of the weight gradient ``[rows, columns]``.

    With FP8 products, ``across``: units (a CTA or a pair) that two tiles have beside whole rounds of units, the middle one of an odd number
    for either tile; their runs may be longer than others'. ``beside``: they begin beside the input gradient, on multiprocessors that its
    clusters leave free."""

    rows: int
    columns: int
    dk: Operand
    xn: Operand
    dense: bool
    warp_mma: bool = False
    run: int = RUN
    across: int = 0
    beside: bool = False

    @property
    def codes(self) -> bool:
        """Both operands are codes, on Hopper: the kernel with roles and FP16 products (``weight_gradient_codes``)."""
        return self.dk.mx and self.xn.mx and not self.warp_mma

    @property
    def fp8(self) -> bool:
        """Of two operands of codes only dk's exponents change along the tokens: FP8 products (``weight_gradient_fp8``)."""
        return self.codes and not self.dk.static and self.xn.static

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the result in one CTA."""
        if self.codes:  # 64 rows a warpgroup; of the tiles whose accumulators fit the largest, of those the one with most warpgroups
            fits = [
                (64 * g, n)
                for g, limit in (FP8_TILES if self.fp8 else CODE_TILES).items()
                for n in (64, 128, 192, 256)
                if n <= limit and self.rows % (64 * g) == 0 and self.columns % n == 0
            ]
            return max(fits, key=lambda tile: (tile[0] * tile[1], tile[0]))
        # three warpgroups if the pieces of a step share out evenly; accumulators and the operands of the next step share registers
        groups = next(n for n in (3, 2, 1) if self.rows // 64 % n == 0 and (n != 3 or (self.columns % 192 == 0 and not self.warp_mma)))
        limit = WARP_MMA_COLUMNS if self.warp_mma else 192 if groups == 3 else 256
        return 64 * groups, next(n for n in (256, 192, 128, 64) if n <= limit and self.columns % n == 0)

    @property
    def groups(self) -> int:
        """Computing warpgroups of a CTA, 64 rows of the result each."""
        return self.tile[0] // 64

    @property
    def tile_rows(self) -> int:
        """Rows of the result in one CTA."""
        return self.tile[0]

    @property
    def tile_columns(self) -> int:
        """Columns of the result in one CTA."""
        return self.tile[1]

    @property
    def tiles(self) -> int:
        """CTAs that see the same tokens."""
        return self.rows // self.tile_rows * (self.columns // self.tile_columns)

    @property
    def code_stages(self) -> int:
        """Steps of codes in shared memory, beside the FP16 operands and tables of ``STAGES`` of them."""
        step = TILE * (self.tile_rows + self.tile_columns)
        return max(3, min(8, (CODE_BYTES - STAGES * (2 * TILE * self.tile_columns + step // 16)) // step))

    @property
    def part(self) -> int:
        """With FP8 products: columns of xn whose sums of a step are in registers at once."""
        return 128 if self.groups < 3 and self.tile_columns % 128 == 0 else 64

    @property
    def pair(self) -> int:
        """With FP8 products: CTAs, one or two, that share what they read of xn."""
        return 2 if self.rows // self.tile_rows % 2 == 0 else 1

    @property
    def units(self) -> int:
        """With FP8 products: units (a CTA or a pair) that see the same tokens."""
        return self.tiles // self.pair

    @property
    def crossing(self) -> int:
        """With FP8 products: units of ``across``."""
        return self.across * self.units // 2

    @property
    def crossing_parts(self) -> int:
        """With FP8 products: parts of a tile that they leave."""
        return (self.across + 1) // 2

    def fit_across(self, multiprocessors: int) -> int:
        """The largest ``across`` for so many multiprocessors."""
        across = multiprocessors // self.pair * 2 // self.units
        return across - (across % 2 if self.units % 2 else 0)

    @property
    def fp8_stages(self) -> int:
        """With FP8 products: steps of codes in shared memory, beside xn turned and tables of ``FP8_SLOTS`` of them."""
        step = FP8_STEP * (self.tile_rows + self.tile_columns)
        return max(2, min(4, (CODE_BYTES - FP8_SLOTS * FP8_STEP * (self.tile_columns + self.tile_rows // 16)) // step))

    def splits(self, tokens: int, multiprocessors: int) -> int:
        """Runs of tokens: whole waves of CTAs, none longer than ``RUN``; one wave where the kernel itself cuts its run."""
        wave = max(1, multiprocessors // self.tiles)
        waves = 1 if self.codes else -(-tokens // (wave * self.run))
        return max(1, min(wave * waves, -(-tokens // TILE)))

    @property
    def lookup(self) -> bool:
        """Whether a row's sequence matters."""
        return not self.dense and any(x.mx and not x.static for x in (self.dk, self.xn))


def cluster_of(rows: int, columns: int, warp_mma: bool = False, wide: bool = False) -> int:
    """Smallest cluster whose slabs of a ``[rows, columns]`` weight fit registers and shared memory; 0 if none does. ``wide``: FP32."""
    for n in (1, 2, 4, 8):
        slab = columns // n
        if columns % (32 * n) == 0 and slab <= SLABS[warp_mma, wide] and rows * slab * 2 <= SHARED_BYTES:
            return n
    return 0


def roles_cluster_of(rows: int, columns: int) -> int:
    """The same for the kernel with roles, whose slabs are whole boxes of 64 columns; 0 if none does."""
    for n in (1, 2, 4, 8):
        slab = columns // n
        if columns % (64 * n) == 0 and slab <= MAX_SLAB and rows <= 1024 and rows * slab * 2 <= ROLES_SLAB:
            return n
    return 0


def unsupported(tokens: int, rows: int, columns: int, dtype: str, weight: str, operands: dict[str, tuple[str, int]]) -> str:
    """Why the kernels cannot serve, "" if they can.

    ``weight``: "mx", "pair" or a dtype. ``operands``: name to ("mx", block columns) or (dtype, 0).
    """
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"x has dtype {dtype}; the kernels serve bfloat16, float16 and float32"
    if weight not in SINGLE:
        return f"w_k is {'a pair (hi, lo)' if weight == 'pair' else weight}; the kernels serve bfloat16 and one MXTensor"
    for name, size in (("rows of w_k", rows), ("columns of x", columns)):
        if size % 64 or size < 64:
            return f"there are {size} {name}; the kernels serve multiples of 64"
    if cluster_of(rows, columns, True, dtype == "float32") == 0:
        most = SLABS[True, dtype == "float32"]
        return (
            f"w_k is [{rows}, {columns}]; the kernels hold at most {SHARED_BYTES // 2048} K elements in slabs of an eighth of the columns, "
            f"which are at most {most} where x is {dtype}"
        )
    for name, (kind, width) in operands.items():
        if kind not in SINGLE:
            return f"{name} has dtype {kind}; the kernels serve bfloat16 and MXTensors"
        if kind == "mx" and width % 32:
            return f"{name} has blocks of {width} columns; the kernels serve multiples of 32"
    if tokens >= 2**31 - TILE:
        return f"x has {tokens} rows; the kernels count them in 32 bits"
    return ""


def kind_of(matrix: Weight) -> tuple[str, int]:
    """("mx", columns of a block), ("pair", 0) or (dtype, 0)."""
    if isinstance(matrix, Tensor):
        return str(matrix.dtype).removeprefix("torch."), 0
    return ("mx", matrix.block[1]) if isinstance(matrix, MXTensor) else ("pair", 0)


def reasons_against(x: Tensor, w_k: Weight, dk: Weight, dv: Weight | None, xn: Weight | None) -> dict[str, str]:
    """By backend: why its kernels cannot serve these arguments, "" if they can."""
    rows, columns = w_k.shape if isinstance(w_k, (Tensor, MXTensor)) else w_k[0].shape
    operands = {name: kind_of(m) for name, m in (("dk", dk), ("dv", dv), ("xn", xn)) if m is not None}
    reason = unsupported(x.shape[0], rows, columns, kind_of(x)[0], kind_of(w_k)[0], operands)
    return dict.fromkeys(("sm90", "sm100"), reason)
