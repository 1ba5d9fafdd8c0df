"""RMSNorm + quantize and the projection of its rows + quantize in one kernel on Hopper: x is read once, no normed row is read back.

    xn = E4M3(xf),  xf = x * rstd * gain - mean        as ``rmsnorm_quantize`` with given exponents has it
    k  = E4M3(BF16(xf) @ w^T)                           as ``gemm_quantize`` of BF16 rows with given exponents has it

A persistent CTA walks 128-token tiles in halves of 64 rows. One warp brings rows by TMA, in the order that wgmma wants (rows that are not
BF16 only into L2); one of two warpgroups finds its rows' factors, four warps turn it into normed 16-bit rows in place and write their
codes, and the warpgroup takes it into registers, the left operand of its products.
The weight (288 KiB at 384 x 384) does not fit: it runs past both warpgroups from L2 in pieces, over and over, each read once for all CTAs
of a cluster (of one, or two). The second warpgroup's halves start in the middle of a round, so that halves are wanted at equal distances.

What the definitions leave open is what they leave open in the kernels of the two: the order of FP32 sums. Under exponents of the norm's
own the product is not of BF16 numbers but of FP16 ones, in units of the exponents and summed in FP16 (``weight``): its error is that of
an instruction's rounding to nearest, once for 16 of K.
"""

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers as hopper
from torch import Tensor

from fused_ops.norm_projection.config import (
    CLUSTER,
    DEPTH,
    HALF,
    ITEMS,
    NORM_WARPS,
    REGISTERS,
    RUN_COLUMNS,
    THREADS,
    ProjectionSpec,
    unsupported,
)
from fused_ops.norm_projection.norm import NormRole
from fused_ops.norm_projection.roles import bring_weight, multiply
from fused_ops.norm_projection.tiles import FIELDS, MAIL_BYTES, MAIL_FIELDS, MAILS, bring_rows
from fused_ops.norm_projection.weight import folded_weight
from fused_ops.rmsnorm_quantize.arithmetic import half_place
from fused_ops.rmsnorm_quantize.vectors import bound_bytes, sampled_mean
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import bits_of, inverse_of_byte, scale_of_byte
from lp_fa4.common.sequence_vectors import sum_tiles
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.mx import scale_rows, sf_tiles
from lp_fa4.mx.quantize import static_bytes
from lp_fa4.sm90.forward_kernel import first_stage, shared_layout
from lp_fa4.sm90.transpose import transposed_copy

TILE = 2 * HALF


class NormProjection:
    """The kernel for one :class:`ProjectionSpec`."""

    def __init__(self, spec: ProjectionSpec):
        self.spec, self.norm = spec, NormRole(spec)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        gain: cute.Tensor,
        w: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        bound: cute.Tensor,
        codes: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        keys: cute.Tensor,
        ticket: cute.Tensor,
        flags: cute.Tensor,
        eps: Float32,
        ctas: Int32,
        stream,
    ):
        spec = self.spec
        kind, sums_kind = (Float16, Float16) if const_expr(spec.halves) else (BFloat16, Float32)
        l_x = shared_layout(kind, (HALF, DEPTH, spec.steps * spec.stages), DEPTH)
        l_w = shared_layout(kind, (spec.column_tile, DEPTH, spec.pieces), DEPTH)
        load = cpasync.CopyBulkTensorTileG2SOp()
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(spec.cluster > 1) else load
        x_atom, t_x = None, x
        if const_expr(not spec.direct):
            x_atom, t_x = cpasync.make_tiled_tma_atom(load, x, first_stage(l_x), (HALF, DEPTH))
        # A thread's sums are of columns 8 j + 2 q + c (q its place in four lanes). Row 8 j + 2 q + c of 64 in a piece is the weight's row
        # 16 q + 2 j + c, so that a thread has 16 consecutive columns, and stores them as they are.
        step, run, count = w.stride[0], RUN_COLUMNS // 4, spec.columns // RUN_COLUMNS
        order = cute.make_layout(((2, 4, run // 2, count), spec.contracted), stride=((step, run * step, 2 * step, RUN_COLUMNS * step), 1))
        w = cute.make_tensor(w.iterator, order)
        w_atom, t_w = cpasync.make_tiled_tma_atom(shared, w, first_stage(l_w), (spec.column_tile, DEPTH), num_multicast=spec.cluster)
        k, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
        mma = hopper.make_trivial_tiled_mma(kind, kind, k, k, sums_kind, (1, 1, 1), (64, spec.column_tile), source)
        tokens = Int32(x.shape[0])
        tiles = cute.ceil_div(tokens, TILE)
        if const_expr(not spec.dense):
            tiles = tokens // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(
            mma, x_atom, t_x, w_atom, t_w, gain, offsets, means, given, bound, codes, rstd, sums, keys, ticket, flags, eps, tokens, tiles,
            l_x, l_w,
        ).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], cluster=[spec.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        x_atom: cute.CopyAtom,
        t_x: cute.Tensor,
        w_atom: cute.CopyAtom,
        t_w: cute.Tensor,
        gain: cute.Tensor,
        offsets: cute.Tensor,
        means: cute.Tensor,
        given: cute.Tensor,
        bound: cute.Tensor,
        codes: cute.Tensor,
        rstd: cute.Tensor,
        sums: cute.Tensor,
        keys: cute.Tensor,
        ticket: cute.Tensor,
        flags: cute.Tensor,
        eps: Float32,
        tokens: Int32,
        tiles: Int32,
        l_x: cute.ComposedLayout,
        l_w: cute.ComposedLayout,
    ):
        spec = self.spec
        columns, pieces, stages = spec.contracted, spec.pieces, spec.stages
        kind = Float16 if const_expr(spec.halves) else BFloat16
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 4 * stages + 2 * ITEMS + 2 * pieces + 2 * MAILS]
            mail: cute.struct.Align[cute.struct.MemRange[Int32, MAIL_FIELDS * MAILS], 16]
            item: cute.struct.Align[cute.struct.MemRange[Int32, FIELDS * ITEMS], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Float32, spec.units], 16]
            pairs: cute.struct.Align[cute.struct.MemRange[Int32, spec.norm.blocks], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Float32, HALF * stages], 16]
            gain: cute.struct.Align[cute.struct.MemRange[Float32, columns], 128]
            mean: cute.struct.Align[cute.struct.MemRange[Float32, ITEMS * columns if spec.centred else 4], 128]
            parts: cute.struct.Align[cute.struct.MemRange[Float32, self.norm.warps * columns if spec.centred else 4], 128]
            x: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(l_x)], 1024]
            low: cute.struct.Align[cute.struct.MemRange[BFloat16, HALF * columns if spec.direct else 8], 128]
            w: cute.struct.Align[cute.struct.MemRange[kind, cute.cosize(l_w)], 1024]

        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        base = storage.barriers.data_ptr()
        item_base, w_base = base + 4 * stages, base + 4 * stages + 2 * ITEMS
        bars = Bundle(
            full=base, normed=base + stages, empty=base + 2 * stages, factored=base + 3 * stages, item_full=item_base,
            item_empty=item_base + ITEMS, w_full=w_base, w_empty=w_base + pieces, mail_full=w_base + 2 * pieces,
            mail_empty=w_base + 2 * pieces + MAILS,
        )  # fmt: skip
        s = Bundle(
            mail=storage.mail.get_tensor(cute.make_layout((MAIL_FIELDS, MAILS))),
            item=storage.item.get_tensor(cute.make_layout((FIELDS, ITEMS))),
            inverse=storage.inverse.get_tensor(cute.make_layout(spec.units)),
            pairs=storage.pairs.get_tensor(cute.make_layout(spec.norm.blocks)),
            factors=storage.factors.get_tensor(cute.make_layout(HALF * stages)),
            gain=storage.gain.get_tensor(cute.make_layout(columns)),
            mean=storage.mean.data_ptr(),
            parts=storage.parts.get_tensor(cute.make_layout((columns, self.norm.warps))) if const_expr(spec.centred) else None,
            rows=storage.x.data_ptr(),
            low=storage.low.data_ptr(),
            x=storage.x.get_tensor(l_x.outer, swizzle=l_x.inner),
            w=storage.w.get_tensor(l_w.outer, swizzle=l_w.inner),
        )
        io = Bundle(
            x=(x_atom, t_x), w=(w_atom, t_w), offsets=offsets, means=means, given=given, codes=codes, rstd=rstd, sums=sums, keys=keys,
            ticket=ticket, tokens=tokens, tiles=tiles, first=cta, step=ctas, eps=eps,
            rank=cta % spec.cluster,
        )  # fmt: skip
        if warp == 0:
            for atom in (x_atom, w_atom):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(bars.full + i, 1)
                    cute.arch.mbarrier_init(bars.normed + i, self.norm.warps)
                    cute.arch.mbarrier_init(bars.empty + i, 4)
                    cute.arch.mbarrier_init(bars.factored + i, 4)
                for i in cutlass.range_constexpr(ITEMS):
                    cute.arch.mbarrier_init(bars.item_full + i, 1)
                    cute.arch.mbarrier_init(bars.item_empty + i, self.norm.warps + 9)  # of the weight's warp too
                for i in cutlass.range_constexpr(pieces):
                    cute.arch.mbarrier_init(bars.w_full + i, 1)
                    cute.arch.mbarrier_init(bars.w_empty + i, 8 * spec.cluster)
                if const_expr(spec.cluster > 1):
                    for i in cutlass.range_constexpr(MAILS):
                        cute.arch.mbarrier_init(bars.mail_full + i, 1)
                        cute.arch.mbarrier_init(bars.mail_empty + i, spec.cluster - 1)
                    cute.arch.mbarrier_init_fence()
                    if io.rank != 0:
                        for i in cutlass.range_constexpr(MAILS):
                            cute.arch.mbarrier_arrive_and_expect_tx(bars.mail_full + i, MAIL_BYTES)
            cute.arch.mbarrier_init_fence()
        # What came before on the stream is over from here on; what comes next may be put in place (and waits in the same way).
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if const_expr(flags is None):
            self.work(io, s, bars, mma, gain, given, bound)
        else:
            flagged = Int32(0)
            for i in cutlass.range(tid % 32, spec.columns, 32, unroll=4):
                flagged = flagged | flags[i]
            if cute.arch.vote_any_sync(flagged != 0) != spec.halves:  # the other kernel's call
                self.work(io, s, bars, mma, gain, given, bound)

    @cute.jit
    def work(self, io, s, bars, mma, gain: cute.Tensor, given: cute.Tensor, bound: cute.Tensor):
        """All of a CTA's work, behind what it has to wait for."""
        spec = self.spec
        columns = spec.contracted
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        table, inverse, pairs = s.gain, s.inverse, s.pairs
        for i in cutlass.range(tid, columns, THREADS, unroll=1):
            value = gain[0, i].to(Float32)
            value = value * inverse_of_byte(Int32(given[0, i // spec.norm_width])) if cute.math.absf(value) < 2.0**120 else Float32.nan
            table[half_place(i, columns)] = value
        for i in cutlass.range(tid, spec.units, THREADS, unroll=1):
            inverse[i] = inverse_of_byte(Int32(bound[0, cutlass.min(32 * i, spec.columns - 32) // spec.width]))
        for i in cutlass.range(tid, spec.norm.blocks, THREADS, unroll=1):
            high = bits_of(scale_of_byte(Int32(given[0, i]))) & Int32(-65536)  # BF16 of a power of two, twice
            pairs[i] = high | ((high >> 16) & 0xFFFF)
        if const_expr(spec.cluster > 1):  # no arrival before the other CTA's barriers exist
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp < NORM_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[spec.halves][0])
            self.norm.run(io, s, bars)
        elif warp < NORM_WARPS + 4:
            cute.arch.setmaxregister_decrease(REGISTERS[spec.halves][1])
            if warp == NORM_WARPS:
                bring_rows(spec, io, s, bars)
            if warp == NORM_WARPS + 1:
                bring_weight(spec, io, s, bars)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[spec.halves][2])
            multiply(spec, io, s, bars, mma)
        if const_expr(spec.cluster > 1):  # the other CTA may still write and arrive here
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


@kernel_cache
def _compile_norm_projection(arch: str, offsets_dtype: str | None, spec: ProjectionSpec, flagged: bool = False):
    tokens, k, n = symbol(), spec.contracted, spec.columns
    return build(
        arch,
        NormProjection(spec),
        fake(spec.dtype, (tokens, k)),
        fake(spec.weight_dtype, (1, k)),
        fake("float16" if spec.halves else "bfloat16", (n, k)),
        fake_offsets(offsets_dtype),
        fake("float32", (symbol(), k), compact=True) if spec.centred else None,
        fake("uint8", (1, k // spec.norm_width), align=1, compact=True),
        fake("uint8", (1, n // spec.width), align=1, compact=True),
        fake("uint8", (tokens, k), compact=True),
        fake("float32", (tokens,), align=4),
        fake("float32", (symbol(), k), compact=True) if spec.centred else None,
        fake("uint8", (tokens, n), compact=True),
        fake("int32", (1,), align=4),
        fake("int32", (n,), align=4) if flagged else None,
        Float32(0.0),
        Int32(1),
    )


class KernelOutput(NamedTuple):
    """Plain tensors, bytes for FP8; ``scale``, ``product_scale``: the given exponents' bytes ``[1, blocks]``. ``mean``, ``total`` are None
    unless centred; ``copy``: uint8 ``[H, D, 32 * rows]``, codes with tokens innermost, or None."""

    codes: Tensor
    scale: Tensor
    rstd: Tensor
    mean: Tensor | None
    total: Tensor | None
    product: Tensor
    product_scale: Tensor
    copy: Tensor | None


def norm_projection(
    x: Tensor,
    gain: Tensor,
    w: Tensor,
    eps: float,
    offsets: Tensor | None,
    width: int,
    exponent: Tensor | None,
    product_width: int,
    product_exponent: Tensor,
    center: bool = True,
    cluster: int = CLUSTER,
    copy_heads: int = 0,
    halves: bool = True,
) -> KernelOutput:
    """The reference's operation on a Hopper GPU: ``x [T, K]`` of float32, bfloat16 or float16, ``gain [K]``, BF16 ``w [N, K]``. ``halves``:
    the product may be of FP16 numbers, which it is where ``exponent`` is None and FP16 holds its sums.

    Raises: ``ValueError`` for what :func:`unsupported` names.
    """
    tokens, columns = x.shape
    spec = ProjectionSpec(columns, w.shape[0], dtype_name(gain), width, product_width, offsets is None, center, cluster, dtype_name(x))
    reason = unsupported(spec)
    if reason:
        raise ValueError(reason)
    empty = x.new_empty
    sequences = 1 if offsets is None else offsets.shape[0] - 1
    nothing = sequences == 0 or tokens == 0
    bounded = exponent is None and center and not nothing  # the mean's kernel makes them
    if bounded:
        given = empty((1, columns // width), dtype=torch.uint8)
    else:
        given = bound_bytes(gain, width, center) if exponent is None else static_bytes(exponent, columns // width, x.device)[None]
    bound = static_bytes(product_exponent, w.shape[0] // product_width, x.device)[None]
    sums = (sequences, columns)
    made = KernelOutput(
        empty(x.shape, dtype=torch.uint8),
        given,
        empty(tokens, dtype=torch.float32),
        empty(sums, dtype=torch.float32) if center else None,
        empty(sums, dtype=torch.float32) if center else None,
        empty((tokens, w.shape[0]), dtype=torch.uint8),
        bound,
        empty((copy_heads, columns // copy_heads, 32 * scale_rows(tokens, offsets)), dtype=torch.uint8) if copy_heads and nothing else None,
    )
    if nothing:  # no token belongs to a sequence
        for tensor in (made.codes, made.rstd, made.mean, made.total, made.product, made.copy):
            if tensor is not None:
                tensor.zero_()
        return made
    rows, vector, bounds = aligned_rows(x), aligned_rows(gain.reshape(1, columns)), offsets
    mean, ordered, parts, tiles = None, None, None, sf_tiles(tokens, offsets)
    ticket = empty(1, dtype=torch.int32) if center else x.new_zeros(1, dtype=torch.int32)  # the mean's kernel makes it 0
    if center:
        bounds = torch.arange(0, 2 * tokens, tokens, device=x.device) if offsets is None else offsets
        mean, ordered = sampled_mean(rows, vector, eps, bounds, given, bound=bounded, ticket=ticket)
        parts = empty((tiles, columns), dtype=torch.float32)
    pairs = -(-min(multiprocessors(x.device), tiles) // spec.cluster)
    ctas = max(min(pairs, multiprocessors(x.device) // spec.cluster), 1) * spec.cluster
    arch, kind, weight = arch_of(x.device), None if offsets is None else dtype_name(offsets), aligned_rows(w)
    forms: list[tuple[ProjectionSpec, Tensor]] = [(spec, weight)]
    flags = None
    if halves and exponent is None:  # rows' exponents are the norm's bound
        folded, flags = folded_weight(weight, given, bound, spec)
        forms = [(replace(spec, halves=True), folded), (spec, weight)]
    for form, factor in forms:
        launch(
            _compile_norm_projection(arch, kind, form, flags is not None),
            x.device,
            rows,
            vector,
            factor,
            offsets,
            ordered,
            given,
            bound,
            made.codes,
            made.rstd,
            parts,
            made.product,
            ticket,
            flags,
            eps,
            ctas,
        )
    if copy_heads:
        starts = torch.arange(0, 2 * tokens, tokens, device=x.device) if bounds is None else bounds
        turned = made.codes.unflatten(1, (copy_heads, columns // copy_heads))
        made = made._replace(copy=transposed_copy(turned, starts, "accumulator"))
    if parts is None:
        return made
    return made._replace(mean=mean, total=sum_tiles(parts.unflatten(1, (1, columns)), bounds).flatten(1))
