"""``gemm_quantize`` on Blackwell: block-scaled tcgen05 MMA (or BF16), quantized on the way out of tensor memory.

A persistent CTA owns 128 output columns and walks 128-token tiles (tile rule), with two accumulators in tensor memory, so that one
tile's epilogue runs beside the next tile's products. Weights stay in shared memory where they fit, their scales in tensor memory always.
Six warps:

======  =============================================================  ===============
warps   role                                                           file
======  =============================================================  ===============
0-3     a row a thread: blocks, codes, scales, both swizzled layouts   sm100_epilogue
4       products, scales of x into tensor memory                       here
5       TMA of x and w, bulk copies of their scales                    here
======  =============================================================  ===============

The tensor core sums in FP32, with every 32 products scaled by their two exponents; the order is its own. Everything after the sum is the
definition's, bit for bit.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory as memory
import cutlass.utils.blackwell_helpers as helpers
import cutlass.utils.blockscaled_layout as scaled
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from torch import Tensor

from fused_ops.gemm_quantize.config import TILE, BlackwellSpec, unsupported_on_blackwell
from fused_ops.gemm_quantize.sm100_epilogue import store_role
from fused_ops.places import first_sequence, place
from fused_ops.scale_layout.interface import sf_shape
from fused_ops.scale_layout.kernel import WORDS, scatter_scales
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.bundle import Bundle
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.mx import scale_rows, sf_tiles
from lp_fa4.mx.quantize import static_bytes
from lp_fa4.sm100.atoms import F8, ONE, SF, SF_BYTES, copy_scales, load_scales, multiply, sides_of_copy
from lp_fa4.sm100.sync import commit, drain, wait, wait_tensor

THREADS = 192
MMA_WARP, LOAD_WARP = 4, 5
ACCUMULATORS = 2
SF_COLUMNS = 4
"""Columns of tensor memory that the scales of 128 rows by 128 of K take."""


class Places(NamedTuple):
    """First barrier of each kind, as indices into one array."""

    full: int
    empty: int
    w_full: int
    sums_full: int
    sums_empty: int
    total: int


def places(stages: int) -> Places:
    """Stages of x (and w, where it is not resident), the CTA's weights, and the accumulators."""
    return Places(0, stages, 2 * stages, 2 * stages + 1, 2 * stages + 1 + ACCUMULATORS, 2 * stages + 1 + 2 * ACCUMULATORS)


class BlackwellGemm:
    """The kernel for one :class:`BlackwellSpec`."""

    def __init__(self, spec: BlackwellSpec):
        self.spec = spec
        self.kind = F8 if spec.scaled else BFloat16
        self.tile = (TILE, TILE, spec.stage_columns)
        self.bars = places(spec.stages)
        columns = ACCUMULATORS * TILE + SF_COLUMNS * spec.steps * (spec.parts + 2) * spec.scaled
        self.columns = next(n for n in (256, 512) if n >= columns)

    def mma(self):
        """A fresh atom: ``set`` rebinds an atom's value, which then may not dominate a later use."""
        k, smem = OperandMajorMode.K, tcgen05.OperandSource.SMEM
        if self.spec.scaled:
            op = tcgen05.MmaMXF8F6F4Op(F8, F8, (TILE, TILE, 32), ONE, smem, k, k)
        else:
            op = tcgen05.MmaF16BF16Op(BFloat16, Float32, (TILE, TILE, 16), ONE, smem, k, k)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def x_layout(self, stages):
        """Shared memory of x."""
        return helpers.make_smem_layout_a(self.mma(), self.tile, self.kind, stages)

    def w_layout(self, stages):
        """Shared memory of w."""
        return helpers.make_smem_layout_b(self.mma(), self.tile, self.kind, stages)

    def sf_layout(self, operand: str, stages):
        """Shared memory of the scales of "x" or "w", 512 bytes a stage."""
        make = scaled.make_smem_layout_sfa if operand == "x" else scaled.make_smem_layout_sfb
        return make(self.mma(), self.tile, 32, stages)

    def sf_columns(self, operand: str, tmem, column):
        """Scales of "x" or "w" in tensor memory, from ``column``."""
        one = cute.slice_(self.sf_layout(operand, 1), (None, None, None, 0))
        make = scaled.make_tmem_layout_sfa if operand == "x" else scaled.make_tmem_layout_sfb
        return cute.make_tensor(cute.recast_ptr(tmem + column, dtype=SF), make(self.mma(), self.tile, 32, one))

    def sums(self, tmem, buffer):
        """An accumulator."""
        mma = self.mma()
        return cute.make_tensor(tmem + buffer * TILE, mma.make_fragment_C(mma.partition_shape_C((TILE, TILE))).layout)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_hi: cute.Tensor,
        w_lo: cute.Tensor,
        sf_x: cute.Tensor,
        sf_hi: cute.Tensor,
        sf_lo: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        atoms_columns: cute.Tensor,
        atoms_tokens: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        spec, mma = self.spec, self.mma()
        one = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
        load, first = cpasync.CopyBulkTensorTileG2SOp(ONE), (None, None, None, 0)

        def matrix(tensor):
            return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=self.kind), tensor.layout)

        def atoms(tensor):
            return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=SF), tensor.layout) if const_expr(spec.scaled) else tensor

        x_layout, w_layout = cute.slice_(self.x_layout(1), first), cute.slice_(self.w_layout(1), first)
        x_atom, t_x = cute.nvgpu.make_tiled_tma_atom_A(load, matrix(x), x_layout, self.tile, mma, one)
        hi_atom, t_hi = cute.nvgpu.make_tiled_tma_atom_B(load, matrix(w_hi), w_layout, self.tile, mma, one)
        lo_atom, t_lo = hi_atom, t_hi
        if const_expr(spec.parts == 2):
            lo_atom, t_lo = cute.nvgpu.make_tiled_tma_atom_B(load, matrix(w_lo), w_layout, self.tile, mma, one)
            sf_lo = atoms(sf_lo)
        tokens = Int32(x.shape[0])
        tiles = cute.ceil_div(tokens, TILE)
        if const_expr(not spec.dense):
            tiles = tokens // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(
            x_atom, t_x, hi_atom, t_hi, lo_atom, t_lo, atoms(sf_x), atoms(sf_hi), sf_lo, offsets, given, codes, scales,
            atoms_columns, atoms_tokens, tokens, tiles,
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x_atom: cute.CopyAtom,
        t_x: cute.Tensor,
        hi_atom: cute.CopyAtom,
        t_hi: cute.Tensor,
        lo_atom: cute.CopyAtom,
        t_lo: cute.Tensor,
        sf_x: cute.Tensor,
        sf_hi: cute.Tensor,
        sf_lo: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        atoms_columns: cute.Tensor,
        atoms_tokens: cute.Tensor,
        tokens: Int32,
        tiles: Int32,
    ):
        spec, bars_at = self.spec, self.bars
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        storage = memory.SmemAllocator()
        bars = storage.allocate_array(Int64, bars_at.total)
        tmem_slot = storage.allocate_array(Int32, 1)

        def tiles_of(layout, kind):
            return storage.allocate_tensor(kind, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        held = spec.steps * spec.parts
        sf_w = storage.allocate_tensor(SF, self.sf_layout("w", held), byte_alignment=128) if const_expr(spec.scaled) else None
        sf_stage = storage.allocate_tensor(SF, self.sf_layout("x", spec.stages), byte_alignment=128) if const_expr(spec.scaled) else None
        s = Bundle(
            x=tiles_of(self.x_layout(spec.stages), self.kind),
            w=tiles_of(self.w_layout(held if spec.resident else spec.stages * spec.parts), self.kind),
            sf_x=sf_stage,
            sf_w=sf_w,
            staging=storage.allocate_array(Uint32, 4 * 1024, byte_alignment=128),
            maxima=storage.allocate_tensor(Int32, cute.make_layout((4, 4, 2)), byte_alignment=16),
            found=storage.allocate_tensor(Int32, cute.make_layout((4, 4, 2)), byte_alignment=16),
        )
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(bars_at.total):
                    cute.arch.mbarrier_init(bars + i, 4 if i >= bars_at.sums_empty else 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(self.columns, tmem_slot)
        cute.arch.barrier()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_slot)
        t = Bundle(
            x=(x_atom, t_x), w=[(hi_atom, t_hi), (lo_atom, t_lo)], sf_x=sf_x, sf_w=[sf_hi, sf_lo], offsets=offsets, given=given,
            codes=codes, scales=scales, atoms_columns=atoms_columns, atoms_tokens=atoms_tokens, tokens=tokens, tiles=tiles,
            column=cta % spec.column_tiles, first=cta // spec.column_tiles, step=ctas // spec.column_tiles,
        )  # fmt: skip
        if warp < 4:
            store_role(spec, t, s, bars + bars_at.sums_full, bars + bars_at.sums_empty, tmem)
        elif warp == MMA_WARP:
            self.multiply_role(t, s, bars, tmem)
        else:
            self.load_role(t, s, bars)
        cute.arch.barrier()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem, self.columns)

    @cute.jit
    def load_role(self, t, s, bars):
        """One warp: the CTA's weights and their scales once, then x tile by tile."""
        spec, at = self.spec, self.bars
        view = self.mma().get_slice(0)
        tile_bytes = TILE * 128
        copies = []
        for p in cutlass.range_constexpr(spec.parts):
            w_atom, w_tensor = t.w[p]
            g_w = cute.local_tile(w_tensor, (TILE, spec.stage_columns), (t.column, None))
            copies.append((w_atom, *sides_of_copy(w_atom, s.w, view.partition_B(g_w))))
        held = spec.steps * spec.parts
        if const_expr(spec.resident or spec.scaled):
            count = (tile_bytes if spec.resident else 0) + (SF_BYTES if spec.scaled else 0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars + at.w_full, held * count)
            for p in cutlass.range_constexpr(spec.parts):
                w_atom, w_target, w_source = copies[p]
                for k in cutlass.range_constexpr(spec.steps):
                    if const_expr(spec.resident):
                        cute.copy(w_atom, w_source[None, k], w_target[None, k * spec.parts + p], tma_bar_ptr=bars + at.w_full)
                    if const_expr(spec.scaled):
                        load_scales(t.sf_w[p], t.column, k, s.sf_w, k * spec.parts + p, bars + at.w_full)
        x_atom, x_tensor = t.x
        count = tile_bytes + (SF_BYTES if spec.scaled else 0) + (0 if spec.resident else spec.parts * tile_bytes)
        stage, phase, used = Int32(0), Int32(1), Int32(0)
        near = first_sequence(spec.dense, t.offsets, t.first)
        for tile in cutlass.range(t.first, t.tiles, t.step, unroll=1):
            token, _, limit, _, region, near = place(spec.dense, t.offsets, t.tokens, tile, near)
            if spec.want_atoms | (token < limit) | (region > 0):
                g_x = cute.local_tile(cute.domain_offset((token, 0), x_tensor), (TILE, spec.stage_columns), (0, None))
                x_target, x_source = sides_of_copy(x_atom, s.x, view.partition_A(g_x))
                for k in cutlass.range(spec.steps, unroll=1):
                    wait(bars + at.empty + stage, phase)
                    full = bars + at.full + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, count)
                    cute.copy(x_atom, x_source[None, k], x_target[None, stage], tma_bar_ptr=full)
                    if const_expr(spec.scaled):
                        load_scales(t.sf_x, tile, k, s.sf_x, stage, full)
                    if const_expr(not spec.resident):
                        for p in cutlass.range_constexpr(spec.parts):
                            cute.copy(copies[p][0], copies[p][2][None, k], copies[p][1][None, stage * spec.parts + p], tma_bar_ptr=full)
                    stage = stage + 1
                    if stage == spec.stages:
                        stage, phase = Int32(0), phase ^ 1
                used = used + spec.steps
        drain(bars + at.empty, used, spec.stages)

    @cute.jit
    def multiply_role(self, t, s, bars, tmem):
        """One warp: scales to tensor memory, products of a tile into one accumulator and the other."""
        spec, at = self.spec, self.bars
        mma = self.mma()
        a, b = mma.make_fragment_A(s.x), mma.make_fragment_B(s.w)
        scales_at = ACCUMULATORS * TILE
        if const_expr(spec.resident or spec.scaled):
            wait(bars + at.w_full, 0)
        if const_expr(spec.scaled):
            for i in cutlass.range_constexpr(spec.steps * spec.parts):
                copy_scales(s.sf_w, i, self.sf_columns("w", tmem, scales_at + SF_COLUMNS * i))
        stage, phase, count = Int32(0), Int32(0), Int32(0)
        near = first_sequence(spec.dense, t.offsets, t.first)
        for tile in cutlass.range(t.first, t.tiles, t.step, unroll=1):
            token, _, limit, _, region, near = place(spec.dense, t.offsets, t.tokens, tile, near)
            if spec.want_atoms | (token < limit) | (region > 0):
                buffer = count % ACCUMULATORS
                wait_tensor(bars + at.sums_empty + buffer, (count // ACCUMULATORS & 1) ^ 1)
                sums = self.sums(tmem, buffer)
                for k in cutlass.range_constexpr(spec.steps):
                    wait_tensor(bars + at.full + stage, phase)
                    sfa = None
                    if const_expr(spec.scaled):
                        # A set of columns for each step, so that no copy meets scales that a product of this tile still reads.
                        column = scales_at + SF_COLUMNS * (spec.steps * spec.parts + k) + buffer * (SF_COLUMNS * spec.steps)
                        sfa = self.sf_columns("x", tmem, column)
                        copy_scales(s.sf_x, stage, sfa)
                    for p in cutlass.range_constexpr(spec.parts):
                        held = k * spec.parts + p
                        sfb = self.sf_columns("w", tmem, scales_at + SF_COLUMNS * held) if const_expr(spec.scaled) else None
                        place_of_w = held if const_expr(spec.resident) else stage * spec.parts + p
                        w = b[None, None, None, place_of_w]
                        multiply(self.mma(), sums, a[None, None, None, stage], w, sfa, sfb, held > 0, Int32(0), False)
                    commit(bars + at.empty + stage)
                    stage = stage + 1
                    if stage == spec.stages:
                        stage, phase = Int32(0), phase ^ 1
                commit(bars + at.sums_full + buffer)
                count = count + 1


@kernel_cache
def _compile_blackwell_gemm(arch: str, offsets_dtype: str | None, spec: BlackwellSpec):
    kind, tokens = "uint8" if spec.scaled else "bfloat16", symbol()

    def atoms():
        return fake("uint8", (symbol(), symbol(), SF_BYTES), compact=True) if spec.scaled else None

    w = [fake(kind, (spec.columns, spec.contracted)) for _ in range(2)]
    pair = spec.parts == 2
    words = [fake("int32", (symbol(), symbol(), WORDS), compact=True) for _ in range(2)]
    return build(
        arch,
        BlackwellGemm(spec),
        fake(kind, (tokens, spec.contracted)),
        w[0],
        w[1] if pair else None,
        atoms(),
        atoms(),
        atoms() if pair else None,
        fake_offsets(offsets_dtype),
        fake("uint8", (1, spec.columns // spec.width), align=1, compact=True) if spec.static else None,
        fake("uint8", (tokens, spec.columns), compact=True),
        None if spec.static else fake("uint8", (symbol(), spec.columns // spec.width), align=1, compact=True),
        words[0] if spec.sf_columns else None,
        words[1] if spec.sf_tokens else None,
        Int32(1),
    )


def gemm_quantize(
    x: list[Tensor],
    x_scale: list[Tensor],
    x_block: list[int],
    w: list[Tensor],
    w_scale: list[Tensor],
    w_block: list[int],
    offsets: Tensor | None,
    exponent: Tensor | None,
    spec: BlackwellSpec,
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """The reference's operation on a Blackwell GPU: codes, scales, and the swizzled scales of axis 0 and of axis 1 (None where not asked
    for), uint8. Operands as ``fused_ops.operands.flatten`` has them; their scales are swizzled here.

    Raises: ``ValueError`` for what ``unsupported_on_blackwell`` names.
    """
    reason = unsupported_on_blackwell(spec)
    if reason:
        raise ValueError(reason)
    (rows,), device = x, x[0].device
    tokens, blocks = rows.shape[0], spec.columns // spec.width
    token_tiles = sf_tiles(tokens, offsets)

    def empty(*shape):
        return torch.empty(shape, dtype=torch.uint8, device=device)

    codes = empty(tokens, spec.columns)
    given = static_bytes(exponent, blocks, device)[None] if exponent is not None else None
    scales = empty(scale_rows(tokens, offsets), blocks) if given is None else given
    atoms = (
        empty(spec.column_tiles, token_tiles, 32, 4, 4) if spec.sf_tokens else None,
        empty(token_tiles, spec.column_tiles, 32, 4, 4) if spec.sf_columns else None,
    )
    if tokens == 0 or (offsets is not None and offsets.shape[0] == 1):  # no token belongs to a sequence
        for tensor in (codes, *atoms, *((scales,) if given is None else ())):
            if tensor is not None:
                tensor.zero_()
        return codes, scales, atoms

    def swizzled(scale, block, count, places):
        shape = sf_shape(count, spec.contracted, places, 1)
        made = scatter_scales(scale.contiguous(), (block[0], block[1]), count, spec.contracted, places, 1, shape)
        return made.reshape(shape[0], shape[1], SF_BYTES)

    factors: list[Tensor | None] = [None, None, None]
    if spec.scaled:
        factors[0] = swizzled(x_scale[0], x_block, tokens, offsets)
        for i in range(spec.parts):
            factors[1 + i] = swizzled(w_scale[i], w_block, spec.columns, None)
    ctas = max(min(multiprocessors(device) // spec.column_tiles, token_tiles), 1) * spec.column_tiles
    words = [None if a is None else a.view(torch.int32).reshape(a.shape[0], a.shape[1], WORDS) for a in atoms]
    launch(
        _compile_blackwell_gemm(arch_of(device), None if offsets is None else dtype_name(offsets), spec),
        device,
        aligned_rows(rows),
        aligned_rows(w[0]),
        aligned_rows(w[1]) if spec.parts == 2 else None,
        *factors,
        offsets,
        given,
        codes,
        None if spec.static else scales,
        words[1],
        words[0],
        ctas,
    )
    return codes, scales, atoms
