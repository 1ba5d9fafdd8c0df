"""``gemm_quantize`` on Hopper: ``x [T, K] @ w [N, K]^T`` on wgmma, quantized from the accumulators; the product never reaches memory.

A persistent CTA keeps the weights of up to 128 output columns in shared memory (192 where sums are FP16 or stay in one accumulator) and
walks 128-token tiles, by the tile rule, or, where no exponent depends on a row's sequence, 64 rows of all at a time: the CTAs of the same
rows run side by side, so x comes from L2 for all but the first of them. Roles: ``sm90_roles``; from sums to codes: ``sm90_epilogue``.

What the definition leaves open is the order and width of the sums. FP8 wgmma aligns the 32 products of an instruction and its accumulator
to the largest exponent among them, cuts each off 13 places below it, and the result at 14 bits. At most 128 of K (four instructions) meet
in one such sum (``GemmSpec.chunk``), which is then scaled, exactly, and added in FP32; where a weight's two parts have one scale, the low
part's four come first, under largest terms that are a sixteenth of those to come. So a chunk's sum is off by less than ``4 * 34 * 2^-13``
of its largest term or partial sum (a sixteenth more with a low part), and by less where some of its terms are 0: the tests hold every
code to the bound of its own sum (``tests.fused_ops.sum_error``), which for random rows is some 2^-10 of ``sum |x_k w_k|``; the error itself
is 2^-16 of that on average (four times as much with the low part after the high one). A code's own rounding is 2^-4. Where every partial
sum fits 13 bits it is exact. Where a weight's rows are bounded and one factor serves all of K (``GemmSpec.halves``,
``sm90_roles.sums_fit``), a row is one FP16 sum, which no codes of x can make leave FP16, rounded to nearest once an instruction: 2^-11 of
itself, 24 times for 384 of K in two parts. BF16 products are summed in one FP32 accumulator, under given exponents in units of them
(``sm90_roles.fold_into_weight``: no rounding changes). Everything after the sum is the definition's, bit for bit.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass import Float8E4M3FN as E4M3
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers as hopper
from torch import Tensor

from fused_ops.gemm_quantize.config import ITEM_SLOTS, TILE, GemmSpec, unsupported
from fused_ops.gemm_quantize.sm90_roles import FIELDS, HALF, bring_weights, consume, fill_tables, fold_inverse, produce
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.bundle import Bundle
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.mx import scale_rows, sf_tiles
from lp_fa4.mx.quantize import static_bytes
from lp_fa4.sm90.forward_kernel import first_stage, shared_layout

THREADS = 384
REGISTERS = (240, 24)
"""Of a computing and of a loading thread."""


class GemmQuantize:
    """The kernel for one :class:`GemmSpec`."""

    def __init__(self, spec: GemmSpec):
        self.spec = spec
        self.kind = E4M3 if spec.scaled else BFloat16

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w_hi: cute.Tensor,
        w_lo: cute.Tensor,
        x_scale: cute.Tensor,
        w_hi_scale: cute.Tensor,
        w_lo_scale: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        spec = self.spec
        l_x = shared_layout(self.kind, (HALF, spec.stage_columns, spec.stages * spec.slabs), spec.stage_columns)
        l_w = shared_layout(self.kind, (spec.column_tile, spec.stage_columns, spec.steps * spec.parts), spec.stage_columns)
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(spec.cluster > 1) else load

        def operand(matrix, layout, rows, op=load, ctas=1):
            tensor = cute.make_tensor(cute.recast_ptr(matrix.iterator, dtype=self.kind), matrix.layout)
            return cpasync.make_tiled_tma_atom(op, tensor, first_stage(layout), (rows, spec.stage_columns), num_multicast=ctas)

        x_atom, t_x = operand(x, l_x, HALF, shared, spec.cluster)
        ordered = self.ordered if const_expr(spec.direct) else lambda w: w
        hi_atom, t_hi = operand(ordered(w_hi), l_w, spec.column_tile)
        lo_atom, t_lo = operand(ordered(w_lo), l_w, spec.column_tile) if const_expr(spec.parts == 2) else (hi_atom, t_hi)
        k = OperandMajorMode.K
        mma = hopper.make_trivial_tiled_mma(self.kind, self.kind, k, k, Float32, (1, 1, 1), (64, spec.column_tile))
        halves, source = None, warpgroup.OperandSource.RMEM
        if const_expr(spec.halves):
            halves = hopper.make_trivial_tiled_mma(self.kind, self.kind, k, k, Float16, (1, 1, 1), (64, spec.column_tile), source)
        tokens = Int32(x.shape[0])
        tiles = cute.ceil_div(tokens, HALF if spec.flat else TILE)
        if const_expr(not (spec.dense or spec.flat)):
            tiles = tokens // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(
            mma, halves, x_atom, t_x, hi_atom, t_hi, lo_atom, t_lo, x_scale, w_hi_scale, w_lo_scale, offsets, given, codes, scales,
            tokens, tiles, l_x, l_w,
        ).launch(
            # No cluster of one: it is placed otherwise, and CTAs of a tile that are not neighbours find less of x in L2 (1 to 3% slower).
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1] if spec.cluster > 1 else None, stream=stream, min_blocks_per_mp=1
        )  # fmt: skip

    def ordered(self, w):
        """The weight with row ``r q / 4 + 2 j + c`` of r (``GemmSpec.run``) at ``8 j + 2 q + c`` (j < r / 8, q < 4, c < 2): a thread, whose
        sums are of columns ``8 j + 2 q + c`` (q its place in four lanes), has a quarter of r in order."""
        step, run = w.stride[0], self.spec.run
        shape = (2, 4, run // 8, self.spec.columns // run)
        order = cute.make_layout((shape, w.shape[1]), stride=((step, run // 4 * step, 2 * step, run * step), 1))
        return cute.make_tensor(w.iterator, order)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        halves: cute.TiledMma,
        x_atom: cute.CopyAtom,
        t_x: cute.Tensor,
        hi_atom: cute.CopyAtom,
        t_hi: cute.Tensor,
        lo_atom: cute.CopyAtom,
        t_lo: cute.Tensor,
        x_scale: cute.Tensor,
        w_hi_scale: cute.Tensor,
        w_lo_scale: cute.Tensor,
        offsets: cute.Tensor,
        given: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        tokens: Int32,
        tiles: Int32,
        l_x: cute.ComposedLayout,
        l_w: cute.ComposedLayout,
    ):
        spec = self.spec
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        tile_blocks, blocks = spec.column_tile // 32, max(spec.column_tile // spec.width, 1)
        x_table = 4 * max(spec.x_blocks, 1) if spec.x_tokens else 1

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 1 + 2 * spec.stages + 2 * ITEM_SLOTS]
            item: cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * ITEM_SLOTS], 16]
            maxima: cute.struct.Align[cute.struct.MemRange[Int32, 2 * 8 * blocks], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, tile_blocks], 16]
            w_factors: cute.struct.Align[cute.struct.MemRange[Float32, spec.w_table], 16]
            x_factors: cute.struct.Align[cute.struct.MemRange[Float32, x_table * ITEM_SLOTS], 16]
            staging: cute.struct.Align[cute.struct.MemRange[Uint32, 4 if spec.direct else 8 * 512], 128]
            x: cute.struct.Align[cute.struct.MemRange[self.kind, cute.cosize(l_x)], 1024]
            w: cute.struct.Align[cute.struct.MemRange[self.kind, cute.cosize(l_w)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        base = storage.barriers.data_ptr()
        bars = Bundle(
            w_full=base,
            full=base + 1,
            empty=base + 1 + spec.stages,
            item_full=base + 1 + 2 * spec.stages,
            item_empty=base + 1 + 2 * spec.stages + ITEM_SLOTS,
        )
        s = Bundle(
            item=storage.item.get_tensor(cute.make_layout((FIELDS, ITEM_SLOTS))),
            maxima=storage.maxima.get_tensor(cute.make_layout((blocks, 8, 2))),
            inverse=storage.inverse.get_tensor(cute.make_layout(tile_blocks)),
            w_factors=storage.w_factors.get_tensor(cute.make_layout(spec.w_table)),
            x_factors=storage.x_factors.get_tensor(cute.make_layout((x_table, ITEM_SLOTS))),
            staging=storage.staging.data_ptr(),
            x=storage.x.get_tensor(l_x.outer, swizzle=l_x.inner),
            w=storage.w.get_tensor(l_w.outer, swizzle=l_w.inner),
            x_at=storage.x.data_ptr(),
            w_at=storage.w.data_ptr(),
        )
        t = Bundle(
            x=(x_atom, t_x), w=[(hi_atom, t_hi), (lo_atom, t_lo)], x_scale=x_scale, w_scale=[w_hi_scale, w_lo_scale],
            offsets=offsets, given=given, codes=codes, scales=scales, tokens=tokens, tiles=tiles, threads=THREADS,
            column=cta % spec.column_tiles, first=cta // spec.column_tiles, step=ctas // spec.column_tiles, rank=cta % spec.cluster,
        )  # fmt: skip
        if warp == 0:
            for atom in (x_atom, hi_atom, lo_atom):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars.w_full, 1)
                for i in cutlass.range_constexpr(spec.stages):
                    cute.arch.mbarrier_init(bars.full + i, 1)
                    cute.arch.mbarrier_init(bars.empty + i, 4 * spec.cluster)
                for i in cutlass.range_constexpr(ITEM_SLOTS):
                    cute.arch.mbarrier_init(bars.item_full + i, 1)
                    cute.arch.mbarrier_init(bars.item_empty + i, 8)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            bring_weights(spec, t, s, bars)
        fill_tables(spec, t, s)
        if const_expr(spec.cluster > 1):  # no arrival before the other CTA's barriers exist
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        careful = fold_inverse(spec, t, s) if const_expr(spec.folded) else Int32(0)
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if warp == 0:
                produce(spec, t, s, bars)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            consume(spec, t, s, bars, mma, halves, careful)
        if const_expr(spec.cluster > 1):  # the other CTA may still write and arrive here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


@kernel_cache
def _compile_gemm_quantize(arch: str, offsets_dtype: str | None, spec: GemmSpec):
    kind, tokens = "uint8" if spec.scaled else "bfloat16", symbol()

    def scale():
        return fake("uint8", (symbol(), symbol()), align=1, compact=True) if spec.scaled else None

    w = [fake(kind, (spec.columns, spec.contracted)) for _ in range(2)]
    return build(
        arch,
        GemmQuantize(spec),
        fake(kind, (tokens, spec.contracted)),
        w[0],
        w[1] if spec.parts == 2 else None,
        scale(),
        scale(),
        scale() if spec.scale_parts == 2 else None,
        fake_offsets(offsets_dtype),
        fake("uint8", (1, spec.columns // spec.width), align=1, compact=True) if spec.static else None,
        fake("uint8", (tokens, spec.columns), compact=True),
        fake("uint8", (symbol(), spec.columns // spec.width), align=1, compact=True),
        Int32(1),
    )


def given_bytes(exponent: Tensor, blocks: int, device: torch.device) -> Tensor:
    """Scale bytes ``[blocks]`` of exponents; themselves where they are such bytes, so that no launch copies them."""
    if exponent.dtype == torch.uint8 and exponent.shape == (blocks,) and exponent.device == device and exponent.is_contiguous():
        return exponent
    return static_bytes(exponent, blocks, device)


def gemm_quantize(
    x: list[Tensor],
    x_scale: list[Tensor],
    w: list[Tensor],
    w_scale: list[Tensor],
    offsets: Tensor | None,
    exponent: Tensor | None,
    spec: GemmSpec,
) -> tuple[Tensor, Tensor]:
    """The reference's operation on a Hopper GPU: codes and scales, uint8. Operands as ``fused_ops.operands.flatten`` has them.

    Raises: ``ValueError`` for what :func:`unsupported` names.
    """
    reason = unsupported(spec)
    if reason:
        raise ValueError(reason)
    (rows,), device = x, x[0].device
    tokens, blocks = rows.shape[0], spec.columns // spec.width
    codes = torch.empty(tokens, spec.columns, dtype=torch.uint8, device=device)
    given = None if exponent is None else given_bytes(exponent, blocks, device)[None]
    scales = torch.empty(scale_rows(tokens, offsets) if given is None else 1, blocks, dtype=torch.uint8, device=device)
    if tokens == 0 or (offsets is not None and offsets.shape[0] == 1):  # no token belongs to a sequence
        return codes.zero_(), scales.zero_() if given is None else scales.copy_(given)
    tiles = -(-tokens // HALF) if spec.flat else sf_tiles(tokens, offsets)
    ctas = max(min(multiprocessors(device) // spec.column_tiles, tiles), 1) * spec.column_tiles
    weights = [aligned_rows(part) for part in w]
    factors = [part.contiguous() for part in w_scale]
    launch(
        _compile_gemm_quantize(arch_of(device), None if offsets is None else dtype_name(offsets), spec),
        device,
        aligned_rows(rows),
        weights[0],
        weights[1] if spec.parts == 2 else None,
        x_scale[0].contiguous() if spec.scaled else None,
        factors[0] if spec.scaled else None,
        factors[1] if spec.scale_parts == 2 else None,
        offsets,
        given,
        codes,
        scales,
        ctas,
    )
    return codes, scales
