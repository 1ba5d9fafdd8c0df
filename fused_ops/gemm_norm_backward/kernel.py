"""The kernels' side of ``gemm_norm_backward``: which kernel for what, workspaces, launches. Formulas: ``reference``.

Against the reference, what differs is the order of FP32 sums (inside the MMA, over a row's columns, over the rows), and on Hopper what
``interface`` names: sums of 11 bits in dx's product, of 13 in dW's. Every product of the two GEMMs is exact, since codes under their
exponents and the weight are BF16 numbers.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from fused_ops.gemm_norm_backward.config import (
    BESIDE_TOKENS,
    HEAD_START,
    RUN,
    SHARES,
    TILE,
    InputSpec,
    Operand,
    WeightSpec,
    reasons_against,
)
from fused_ops.operands import Weight, to_float
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.compile import arch_of, dtype_name, launch, multiprocessors
from lp_fa4.mx import MXTensor


def kind(matrix: Tensor | MXTensor | None) -> Operand | None:
    """How a matrix is stored."""
    if matrix is None:
        return None
    return Operand(matrix.block[1], matrix.is_static) if isinstance(matrix, MXTensor) else Operand(0)


def operand(matrix: Tensor | MXTensor | None) -> tuple[Operand | None, Tensor | None, Tensor | None]:
    """How a matrix is stored, its payload and its scales, as the kernels take them."""
    if matrix is None:
        return None, None, None
    if isinstance(matrix, Tensor):
        return kind(matrix), aligned_rows(matrix), None
    return kind(matrix), spread(aligned_rows(matrix.codes)), matrix.scale_bytes.contiguous()


def spread(matrix: Tensor) -> Tensor:
    """The matrix with rows that do not overlap (an expanded one is copied), as TMA wants them."""
    return matrix if matrix.stride(0) >= matrix.shape[1] or matrix.shape[0] == 1 else matrix.contiguous()


@functools.cache
def _resident(index: int, size: int) -> int:
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(index):
        torch.cuda.mem_get_info()  # the driver's calls want a context, which this thread may not have had a reason to make
        return HardwareInfo(index).get_max_active_clusters(size)


def clusters_of(device: torch.device, size: int) -> int:
    """Clusters that are resident together: two CTAs fit anywhere; of larger ones the driver knows how many fit (30 of 4 on 132
    multiprocessors, because not all groups of them have 16 or 18), and one more would run alone after all others."""
    if size <= 2 or device.type != "cuda":
        return max(1, multiprocessors(device) // size)
    return _resident(device.index if device.index is not None else torch.cuda.current_device(), size)


def added(device: torch.device, wide: Tensor | None, narrow: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Sums over the first dimension of parts of ``dw_k`` and of ``dnorm_weight``, in order; None of None."""
    from fused_ops.gemm_norm_backward.sums import compile_add_parts

    sums = [None if parts is None else torch.empty(parts.shape[1:], dtype=torch.float32, device=device) for parts in (wide, narrow)]
    arguments: list[Tensor | None] = []
    for parts, total in zip((wide, narrow), sums, strict=True):
        arguments += [None, None] if parts is None or total is None else [parts.flatten(1), total.flatten()]
    if wide is not None or narrow is not None:
        launch(compile_add_parts(arch_of(device), wide is not None, narrow is not None), device, *arguments)
    return sums[0], sums[1]


def input_gradient(
    dk: Tensor | MXTensor,
    dv: Tensor | MXTensor | None,
    dv_mean: Tensor | None,
    w_k: Tensor | MXTensor,
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    offsets: Tensor | None,
    need_x: bool,
    need_norm: bool,
    beside: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """``(dx, dnorm_weight)``, the latter in parts that are still to be added; None where not needed. T >= 1, B >= 1.

    ``beside``: the next launch begins beside this one."""
    from fused_ops.gemm_norm_backward.input_gradient import compile_input_gradient
    from fused_ops.gemm_norm_backward.input_gradient_codes import compile_input_gradient_of_codes

    device, (rows, columns) = x.device, w_k.shape
    (dk_kind, dk, dk_scale), (dv_kind, dv, dv_scale) = operand(dk), operand(dv)
    assert dk_kind is not None
    spec = InputSpec(
        rows,
        columns,
        dtype_name(x),
        dk_kind,
        dv_kind,
        mean=dv_mean is not None,
        dense=offsets is None,
        need_x=need_x,
        need_norm=need_norm,
        warp_mma=arch_of(device) != "sm_90a",
        half_sums=True,
        beside=beside,
    )
    tiles = -(-x.shape[0] // TILE)
    clusters = min(clusters_of(device, spec.cluster), -(-tiles // spec.groups))
    dx = torch.empty(x.shape, dtype=x.dtype, device=device) if need_x else None
    parts = torch.empty(clusters * spec.groups * 4, columns, dtype=torch.float32, device=device) if need_norm else None
    compile_it = compile_input_gradient_of_codes if spec.roles else compile_input_gradient
    launch(
        compile_it(arch_of(device), None if offsets is None else dtype_name(offsets), spec),
        device,
        dk,
        dk_scale,
        dv,
        dv_scale,
        None if dv_mean is None else dv_mean.to(torch.float32).contiguous(),
        to_float(w_k).to(torch.bfloat16).contiguous() if isinstance(w_k, MXTensor) else w_k.contiguous(),
        spread(aligned_rows(x)),
        norm_weight.to(torch.float32).contiguous(),
        rstd.contiguous(),
        offsets,
        dx,
        parts,
        clusters,
    )
    return dx, parts


def free_beside(dk: Tensor | MXTensor, dv: Tensor | MXTensor | None, x: Tensor, xn: Tensor | MXTensor) -> int:
    """Multiprocessors that clusters of four of the input gradient leave free (12 of 132), where the weight gradient can begin; else 0."""
    device, (tokens, rows), columns = x.device, dk.shape, x.shape[1]
    left, extra, right = (kind(matrix) for matrix in (dk, dv, xn))
    assert left is not None and right is not None
    if arch_of(device) != "sm_90a" or tokens < BESIDE_TOKENS:
        return 0
    dx = InputSpec(rows, columns, dtype_name(x), left, extra, mean=True, dense=True, need_x=True, need_norm=True)
    dw = WeightSpec(rows, columns, left, right, dense=True)
    free = multiprocessors(device) - clusters_of(device, dx.cluster) * dx.cluster if dx.roles and dw.fp8 else 0
    return free if dw.fit_across(free) > 0 else 0


def weight_runs(dk: Tensor | MXTensor, xn: Tensor | MXTensor, dense: bool, free: int = 0) -> tuple[WeightSpec, Tensor, int]:
    """What the weight gradient is compiled for; where it leaves FP32 parts ``[n, N, C]`` that are still to be added; how much longer runs
    of crossing units are than others', times ``SHARES``. ``free``: multiprocessors on which it begins beside the input gradient."""
    device, (tokens, rows), columns = dk.device, dk.shape, xn.shape[1]
    left, right = kind(dk), kind(xn)
    assert left is not None and right is not None
    spec = WeightSpec(rows, columns, left, right, dense=dense, warp_mma=arch_of(device) != "sm_90a", run=RUN)
    count, share = multiprocessors(device), SHARES
    runs, held = spec.splits(tokens, count), count // spec.pair
    if spec.fp8 and free > 0:
        spec = dataclasses.replace(spec, across=spec.fit_across(free), beside=True)
        runs = max(1, (held - spec.crossing) // spec.units)
        # with H units ahead by h and U in all, each tile by one unit in 1: all end together after (Q - H h) / U and h more
        units = spec.crossing + runs * spec.units
        share += round(SHARES * HEAD_START * units / max(0.5, spec.units - spec.crossing * HEAD_START))
    elif spec.fp8 and runs == held // spec.units:  # units that are left over take a share of two tiles
        spec = dataclasses.replace(spec, across=spec.fit_across(count - runs * spec.tiles))
    parts = torch.empty(runs + spec.crossing_parts, rows, columns, dtype=torch.float32, device=device)
    return spec, parts, share


def weight_gradient(
    dk: Tensor | MXTensor, xn: Tensor | MXTensor, offsets: Tensor | None, runs: tuple[WeightSpec, Tensor, int] | None = None
) -> Tensor:
    """``dk^T @ xn`` in FP32 parts ``[n, N, C]`` that are still to be added. T >= 1, B >= 1. ``runs``: of :func:`weight_runs`."""
    from fused_ops.gemm_norm_backward.weight_gradient import compile_weight_gradient
    from fused_ops.gemm_norm_backward.weight_gradient_codes import compile_weight_gradient_of_codes
    from fused_ops.gemm_norm_backward.weight_gradient_fp8 import compile_weight_gradient_fp8

    device = dk.device
    spec, parts, share = runs or weight_runs(dk, xn, offsets is None)
    (_, dk, dk_scale), (_, xn, xn_scale) = operand(dk), operand(xn)
    compile_it = compile_weight_gradient_of_codes if spec.codes else compile_weight_gradient
    if spec.fp8:
        compile_it = compile_weight_gradient_fp8
    compiled = compile_it(arch_of(device), None if offsets is None else dtype_name(offsets), spec)
    launch(compiled, device, dk, dk_scale, xn, xn_scale, offsets, parts, *([share] if spec.fp8 else []))
    return parts


def gemm_norm_backward(
    dk: Tensor | MXTensor,
    dv: Tensor | MXTensor | None,
    dv_mean: Tensor | None,
    w_k: Weight,
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    xn: Tensor | MXTensor | None,
    offsets: Tensor | None,
    need_x: bool,
    need_norm: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The reference's operation on a Hopper GPU; what is not needed comes back as None.

    Raises: ``ValueError`` for what :func:`reasons_against` names.
    """
    reason = reasons_against(x, w_k, dk, dv, xn)["sm90"]
    if reason:
        raise ValueError(reason)
    assert isinstance(w_k, (Tensor, MXTensor))
    if x.shape[0] == 0 or (offsets is not None and offsets.shape[0] == 1):  # no token belongs to a sequence
        zeros = [torch.zeros(x.shape, dtype=x.dtype, device=x.device)]
        zeros += [torch.zeros(shape, dtype=torch.float32, device=x.device) for shape in (norm_weight.shape, w_k.shape)]
        return tuple(z if need else None for z, need in zip(zeros, (need_x, need_norm, need_w), strict=True))  # type: ignore[return-value]
    need_w, need_input = need_w and xn is not None, need_x or need_norm
    dx, narrow, wide, runs, free = None, None, None, None, 0
    if need_w:  # its memory before dx is launched: dW may write there beside it
        free = free_beside(dk, dv, x, xn) if need_input else 0  # type: ignore[arg-type]
        runs = weight_runs(dk, xn, offsets is None, free)  # type: ignore[arg-type]
    if need_input:
        dx, narrow = input_gradient(dk, dv, dv_mean, w_k, x, norm_weight, rstd, offsets, need_x, need_norm, free > 0)
    if need_w:
        wide = weight_gradient(dk, xn, offsets, runs)  # type: ignore[arg-type]
    dw, dgamma = added(x.device, wide, narrow)
    return dx, dgamma, dw
