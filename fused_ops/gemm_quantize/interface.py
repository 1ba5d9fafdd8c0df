"""``gemm_quantize``: checks, operator ``fused_ops::gemm_quantize``, public function."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.gemm_quantize import reference
from fused_ops.gemm_quantize.config import blackwell_spec_of, spec_of
from fused_ops.gemm_quantize.weights import bound_factor
from fused_ops.operands import Matrix, Weight, check_device, check_matrix, flatten, unflatten
from fused_ops.scale_layout.interface import check_scatter, scatter_scales_op, sf_shape
from lp_fa4.mx import MXTensor, check_exponent, check_offsets, encode_scale, scale_rows
from lp_fa4.operator import custom_op


@custom_op("fused_ops::gemm_quantize", mutates_args=())
def gemm_quantize_op(
    x: list[Tensor],
    x_scale: list[Tensor],
    x_block: list[int],
    w: list[Tensor],
    w_scale: list[Tensor],
    w_block: list[int],
    offsets: Tensor | None,
    block: list[int],
    exponent: Tensor | None,
    backend: str = "auto",
    scale_axes: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scale of the product, its swizzled scales of axis 0 and of axis 1, uint8; empty where not asked for."""
    axes, shape, dense = tuple(scale_axes or ()), (block[0], block[1]), offsets is None
    tokens, columns = x[0].shape[0], w[0].shape[0]
    hopper, reason = spec_of(x, x_block, w, w_block, block, dense, w_scale)
    blackwell, other = blackwell_spec_of(x, x_block, w, w_block, block, dense, axes)
    long = f"x has {tokens} rows; the kernel counts them in 32 bits" if tokens >= 2**31 else ""
    chosen = choose("gemm_quantize", x[0].device, backend, {"sm90": reason or long, "sm100": other or long})
    atoms: tuple[Tensor | None, Tensor | None] = (None, None)
    if chosen == "sm100":
        from fused_ops.gemm_quantize import sm100

        assert blackwell is not None
        codes, scale, atoms = sm100.gemm_quantize(x, x_scale, x_block, w, w_scale, w_block, offsets, exponent, blackwell)
    elif chosen == "sm90":
        from fused_ops.gemm_quantize import sm90

        assert hopper is not None
        codes, scale = sm90.gemm_quantize(x, x_scale, w, w_scale, offsets, exponent, hopper)
    else:
        left = unflatten(x, x_scale, x_block, offsets)
        out = reference.gemm_quantize(left, unflatten(w, w_scale, w_block), shape, offsets, exponent)  # type: ignore[arg-type]
        codes, scale = out.codes, out.scale_bytes
    if axes and chosen != "sm100":
        made = [scatter_scales_op(scale, block, tokens, columns, offsets, axis, chosen) if axis in axes else None for axis in (0, 1)]
        atoms = (made[0], made[1])
    first, second = (codes.new_empty(0) if a is None else a for a in atoms)
    return codes, scale, first, second


@gemm_quantize_op.register_fake
def _(x, x_scale, x_block, w, w_scale, w_block, offsets, block, exponent, backend="auto", scale_axes=None):
    tokens, columns = x[0].shape[0], w[0].shape[0]
    rows = 1 if block[0] == 0 else scale_rows(tokens, offsets)
    shapes = [sf_shape(tokens, columns, offsets, axis) if axis in (scale_axes or ()) else (0,) for axis in (0, 1)]
    wanted = ((tokens, columns), (rows, -(-columns // block[1])), *shapes)
    return tuple(x[0].new_empty(shape, dtype=torch.uint8) for shape in wanted)


def projection_exponent(norm_weight: Tensor, w: Tensor, width: int, *, centred: bool = False) -> Tensor:
    """Static exponents that no projection of an RMSNorm output can exceed: int32 ``[N / width]``.

    ``x * rstd`` has norm at most ``sqrt(C)``, so ``|y_j| <= sqrt(C) * |norm_weight * w_j|`` (Cauchy-Schwarz), twice that when the
    rows were centred. ``w [N, C]`` is the matrix that multiplies (rotated, if it is).
    """
    scaled = w.detach().to(torch.float32) * norm_weight.detach().to(torch.float32)
    bound = torch.linalg.vector_norm(scaled, dim=1).reshape(-1, width).amax(dim=1)
    return encode_scale(bound * bound_factor(w.shape[1], centred)).to(torch.int32) - 127


def _checked(x: Matrix, w: Weight, block: tuple[int, int], offsets: Tensor | None, exponent: int | Tensor | None) -> Tensor | None:
    """The offsets of a call whose arguments are right, or an error that names the one that is not."""
    tokens, contracted = check_matrix("x", x)
    columns, _ = check_matrix("w", w, contracted, pair=True)
    if isinstance(x, MXTensor) and x.offsets is not None:
        if offsets is not None and offsets is not x.offsets:
            raise ValueError("offsets is given but x is a jagged MXTensor with its own; give one of them")
        offsets = x.offsets
    elif isinstance(x, MXTensor) and offsets is not None:
        raise ValueError("offsets is given but x is a dense MXTensor: its groups do not start at the sequences; quantize it with offsets")
    if offsets is not None:
        check_offsets(offsets, tokens, "offsets", x.device)
    for part in w if isinstance(w, tuple) else (w,):
        check_device(x.device, w=part)
        if isinstance(part, MXTensor) and part.offsets is not None:
            raise ValueError("w is a jagged MXTensor; a weight is dense")
    if len(block) != 2 or block[0] not in (0, 32, 128) or block[1] < 1 or (block[1] != 32 and columns % block[1]):
        raise ValueError(
            f"block is {block} for {columns} columns; allowed are (32, 32), and (32, D), (128, D), (0, D) with D dividing the columns"
        )
    if (block[0] == 0) != (exponent is not None):
        raise ValueError(f"block is {block} and exponent is {exponent}; a static block (0, D) takes an exponent, no other does")
    if exponent is not None:
        check_exponent(exponent, -(-columns // block[1]))
    return offsets


def _run(x, w, block, offsets, exponent, backend, axes) -> tuple[MXTensor, Tensor, Tensor]:
    offsets = _checked(x, w, block, offsets, exponent)
    left, right = flatten(x), flatten(w)
    given = None if exponent is None else torch.as_tensor(exponent, device=x.device)
    codes, scale, *atoms = gemm_quantize_op(*left, *right, offsets, list(block), given, backend, axes)
    return MXTensor.from_bytes(codes, scale, block, offsets), atoms[0], atoms[1]


def gemm_quantize(
    x: Matrix,
    w: Weight,
    block: tuple[int, int] = (32, 32),
    *,
    offsets: Tensor | None = None,
    exponent: int | Tensor | None = None,
    backend: str = "auto",
) -> MXTensor:
    """MXFP8 of ``x @ w.T``: FP32 sums, quantized in the epilogue.

    Args:
        x: ``[T, C]``: MXTensor, or a float tensor (BF16 on tensor cores).
        w: ``[N, C]``: MXTensor, float tensor, or a pair ``(hi, lo)`` of MXTensors whose sum is the weight.
        block: blocks of the result: ``(32, 32)``, ``(32, D)``, ``(128, D)``, or ``(0, D)`` with ``exponent``.
        offsets: jagged tokens; taken from ``x`` when that is a jagged MXTensor.
        exponent: static exponents, an int or integers ``[N / D]`` (uint8: their scale bytes): see :func:`projection_exponent`.
        backend: ``"auto"`` (a kernel where the device has one), ``"reference"``, ``"sm90"`` or ``"sm100"``. A kernel adds up in another
            order, and FP8 products in sums of some 14 bits over at most 128 of C, so a code may be the next one where the sum lies beside a
            rounding boundary; given the sums, every byte is the same.

    Returns: MXTensor ``[T, N]`` with the groups of ``offsets``; payload 0 past ``offsets[-1]``.

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
    return _run(x, w, block, offsets, exponent, backend, None)[0]


def gemm_quantize_scatter(
    x: Matrix,
    w: Weight,
    block: tuple[int, int] = (32, 32),
    *,
    axes: Sequence[int] = (0, 1),
    offsets: Tensor | None = None,
    exponent: int | Tensor | None = None,
    backend: str = "auto",
) -> tuple[MXTensor, tuple[Tensor | None, Tensor | None]]:
    """:func:`gemm_quantize`, and ``scatter_scales`` of its result for the ``axes`` asked for; on Blackwell written by the same epilogue.

    Returns: the product, and the swizzled buffers of axis 0 and of axis 1, None where not asked for.
    """
    check_scatter(axes, block)
    out, first, second = _run(x, w, block, offsets, exponent, backend, list(axes))
    return out, (first if 0 in axes else None, second if 1 in axes else None)
