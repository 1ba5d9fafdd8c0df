"""``rmsnorm_quantize`` and ``rmsnorm_center_quantize``: checks, operator ``fused_ops::rmsnorm_quantize``, public functions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.operands import FLOATS, check_device
from fused_ops.rmsnorm_quantize import reference
from fused_ops.rmsnorm_quantize.config import unsupported
from fused_ops.scale_layout.interface import check_scatter, sf_shape
from fused_ops.scale_layout.reference import scatter_scales
from lp_fa4.mx import MXTensor, check_exponent, check_offsets, encode_scale, scale_rows
from lp_fa4.operator import custom_op
from lp_fa4.sm90.operands import MXTensorWithCopy


class CentredNorm(NamedTuple):
    """Result of :func:`rmsnorm_center_quantize`.

    ``xn``: MXFP8 of ``xf - mean``; ``rstd`` FP32 ``[T]``; ``mean`` FP32 ``[B, C]``, what was taken away; ``total`` FP32
    ``[B, C]``, the sum over a sequence of the centred rows before rounding; ``normed`` BF16 ``[T, C]`` of the centred rows,
    or None unless ``keep``.
    """

    xn: MXTensor
    rstd: Tensor
    mean: Tensor
    total: Tensor
    normed: Tensor | None


@custom_op("fused_ops::rmsnorm_quantize", mutates_args=())
def rmsnorm_quantize_op(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offsets: Tensor | None,
    block: list[int],
    exponent: Tensor | None,
    center: bool,
    keep: bool,
    scale_axes: list[int] | None = None,
    backend: str = "auto",
    copy_heads: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes, scale, rstd, mean, total, normed, swizzled scales of axis 0 and of axis 1, codes with tokens innermost: plain tensors, bytes
    for FP8; empty if not asked for."""
    shape, axes = (block[0], block[1]), tuple(scale_axes or ())
    columns, head_dim = x.shape[-1], x.shape[-1] // copy_heads if copy_heads else 0
    reason = unsupported(columns, x.numel() // max(columns, 1), str(x.dtype).removeprefix("torch."), shape[1], head_dim)
    if choose("rmsnorm_quantize", x.device, backend, reason) != "reference":
        from fused_ops.rmsnorm_quantize import kernel

        codes, scale, rstd, mean, total, normed, atoms, copy = kernel.rmsnorm_quantize(
            x, weight, eps, offsets, shape, exponent, center, keep, axes, copy_heads
        )
    else:
        if shape[0] == 0 and exponent is None:
            exponent = norm_exponent(weight, shape[1], centred=center)
        out = reference.rmsnorm_quantize(x, weight, eps, offsets, shape, exponent, center, keep)
        codes, scale, rstd, mean, total, normed = out.xn.codes, out.xn.scale_bytes, out.rstd, out.mean, out.total, out.normed
        swizzled = [scatter_scales(scale, shape, x.shape[0], x.shape[1], offsets, axis) if axis in axes else None for axis in (0, 1)]
        atoms = (swizzled[0], swizzled[1])
        copy = reference.transposed(codes, offsets, copy_heads) if copy_heads else None
    # An operator may not return one tensor twice, so empty results are made one by one.
    if not center:
        mean, total = (x.new_empty(0, dtype=torch.float32) for _ in range(2))
    if not keep:
        normed = x.new_empty(0, dtype=torch.bfloat16)
    first, second, turned = (x.new_empty(0, dtype=torch.uint8) if a is None else a for a in (*atoms, copy))
    return codes, scale, rstd, mean, total, normed, first, second, turned  # type: ignore[return-value]  # filled above


@rmsnorm_quantize_op.register_fake
def _(x, weight, eps, offsets, block, exponent, center, keep, scale_axes=None, backend="auto", copy_heads=0):
    *lead, tokens, columns = x.shape
    rows = 1 if block[0] == 0 else scale_rows(tokens, offsets)
    batch = 1 if offsets is None else offsets.shape[0] - 1
    sums = (batch, columns) if center else (0,)
    return (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty((*lead, rows, -(-columns // block[1])), dtype=torch.uint8),
        x.new_empty((*lead, tokens), dtype=torch.float32),
        x.new_empty(sums, dtype=torch.float32),
        x.new_empty(sums, dtype=torch.float32),
        x.new_empty(x.shape if keep else (0,), dtype=torch.bfloat16),
        *(x.new_empty(sf_shape(tokens, columns, offsets, i) if i in (scale_axes or ()) else (0,), dtype=torch.uint8) for i in (0, 1)),
        x.new_empty((copy_heads, columns // copy_heads, 32 * scale_rows(tokens, offsets)) if copy_heads else (0,), dtype=torch.uint8),
    )


def norm_exponent(weight: Tensor, width: int, *, centred: bool = False) -> Tensor:
    """Static exponents that no RMSNorm output can exceed: int32 ``[C / width]``, from ``weight [C]`` alone.

    ``|x * rstd| <= sqrt(C)`` for every element, hence ``|xf_c| <= sqrt(C) * |weight_c|``, and the mean of a sequence has the
    same bound, so the centred rows have twice that.
    """
    columns = weight.shape[0]
    bound = weight.detach().to(torch.float32).abs().reshape(-1, width).amax(dim=-1) * (columns**0.5 * (2 if centred else 1))
    return encode_scale(bound).to(torch.int32) - 127


def check_rows(x: Tensor, weight: Tensor, eps: float, offsets: Tensor | None, block: tuple[int, int]) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x has dtype {x.dtype}; allowed are {', '.join(map(str, FLOATS))}")
    if x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [..., tokens, columns]")
    columns = x.shape[-1]
    if weight.dtype not in FLOATS:
        raise TypeError(f"weight has dtype {weight.dtype}; allowed are {', '.join(map(str, FLOATS))}")
    if weight.dim() != 1 or weight.shape[0] != columns:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{columns}], the last axis of x")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; it must be at least 0 and finite")
    check_device(x.device, weight=weight)
    if offsets is not None:
        if x.dim() != 2:
            raise ValueError(f"x has shape {list(x.shape)}; with offsets it must be [tokens, columns]")
        check_offsets(offsets, x.shape[0], "offsets", x.device)
    if len(block) != 2 or block[0] not in (0, 32, 128) or block[1] < 1 or (block[1] != 32 and columns % block[1]):
        raise ValueError(
            f"block is {block} for {columns} columns; allowed are (32, 32), and (32, D), (128, D), (0, D) with D dividing the columns"
        )


def given_exponent(weight: Tensor, block: tuple[int, int], exponent: int | Tensor | None) -> Tensor | None:
    if block[0] != 0:
        if exponent is not None:
            raise ValueError(f"exponent is given but block is {block}; only a static block (0, D) takes one")
        return None
    if weight.shape[0] % block[1]:
        raise ValueError(f"block is {block} for {weight.shape[0]} columns; a static block must divide them")
    if exponent is None:  # the operator takes the bound's
        return None
    check_exponent(exponent, weight.shape[0] // block[1])
    return torch.as_tensor(exponent, device=weight.device)


def rmsnorm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offsets: Tensor | None = None,
    block: tuple[int, int] = (32, 32),
    *,
    exponent: int | Tensor | None = None,
    backend: str = "auto",
) -> tuple[MXTensor, Tensor]:
    """MXFP8 of ``x * rsqrt(mean(x^2) + eps) * weight``, FP32 up to the one rounding to E4M3.

    Args:
        x: float32, bfloat16 or float16 ``[..., T, C]``; with ``offsets`` ``[T, C]``.
        weight: ``[C]``.
        offsets: int32/int64 ``[B + 1]``: groups of 32 tokens start at each sequence; rows past ``offsets[-1]`` are not read.
        block: ``(32, 32)``, ``(32, D)``, ``(128, D)``, or ``(0, D)``: static exponents, by default from the bound of
            :func:`norm_exponent`, so that no ``amax`` is needed and nothing clips.
        exponent: for a static block, the exponents to use instead.
        backend: ``"auto"`` (a kernel where the device has one), ``"reference"``, ``"sm90"`` or ``"sm100"``. The kernels sum the squares
            of a row in another order than the reference; given ``rstd``, every byte is the same.

    Returns: ``(xn, rstd)``: MXTensor shaped like ``x``, and FP32 ``[..., T]`` for the backward (0 past ``offsets[-1]``).

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
    check_rows(x, weight, eps, offsets, block)
    codes, scale, rstd, *_ = rmsnorm_quantize_op(
        x, weight, eps, offsets, list(block), given_exponent(weight, block, exponent), False, False, None, backend
    )
    return MXTensor.from_bytes(codes, scale, block, offsets, 0 if offsets is not None else x.dim() - 2), rstd


def _centred(
    x, weight, eps, offsets, block, exponent, keep, scale_axes, backend, copy_heads=0
) -> tuple[CentredNorm, tuple[Tensor, Tensor]]:
    check_rows(x, weight, eps, offsets, block)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; the centred norm takes [tokens, columns]")
    if copy_heads < 0 or (copy_heads and x.shape[1] % copy_heads):
        raise ValueError(f"copy_heads is {copy_heads} for {x.shape[1]} columns; it must divide them, or be 0 for no copy")
    codes, scale, rstd, mean, total, normed, first, second, copy = rmsnorm_quantize_op(
        x, weight, eps, offsets, list(block), given_exponent(weight, block, exponent), True, keep, scale_axes, backend, copy_heads
    )
    xn = MXTensor.from_bytes(codes, scale, block, offsets)
    if copy_heads:
        xn = MXTensorWithCopy(xn.payload, xn.scale, xn.block, xn.offsets, xn.token_dim, copy)
    return CentredNorm(xn, rstd, mean, total, normed if keep else None), (first, second)


def rmsnorm_center_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offsets: Tensor | None = None,
    block: tuple[int, int] = (32, 32),
    *,
    exponent: int | Tensor | None = None,
    keep: bool = False,
    copy_heads: int = 0,
    backend: str = "auto",
) -> CentredNorm:
    """:func:`rmsnorm_quantize` with the mean of each sequence (of 64 of its rows) taken away before the rounding.

    ``x`` is ``[T, C]``; ``offsets=None`` makes it one sequence. ``keep=True`` also returns BF16 of the centred rows. ``copy_heads``: number
    of heads for which ``xn`` also carries the copy with tokens innermost (``MXTensorWithCopy``) that Hopper's attention reads as V; 0 for
    none.
    """
    return _centred(x, weight, eps, offsets, block, exponent, keep, None, backend, copy_heads)[0]


def rmsnorm_center_scatter(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    offsets: Tensor | None = None,
    block: tuple[int, int] = (32, 32),
    *,
    axes: Sequence[int] = (0, 1),
    exponent: int | Tensor | None = None,
    keep: bool = False,
    backend: str = "auto",
) -> tuple[CentredNorm, tuple[Tensor | None, Tensor | None]]:
    """:func:`rmsnorm_center_quantize`, and ``scatter_scales`` of its result for the ``axes`` asked for, written by the same kernel.

    Returns: the norm, and the swizzled buffers of axis 0 and of axis 1, None where not asked for.
    """
    check_scatter(axes, block)
    norm, atoms = _centred(x, weight, eps, offsets, block, exponent, keep, list(axes), backend)
    return norm, (atoms[0] if 0 in axes else None, atoms[1] if 1 in axes else None)
