"""``scatter_scales`` and ``gather_scales``: checks, operators of the same names, public functions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.scale_layout import reference
from lp_fa4.mx import GROUP, SF_TILE, MXTensor, check_offsets, scale_rows, sf_tiles
from lp_fa4.operator import custom_op


def check_scatter(axes: Sequence[int], block: tuple[int, int]) -> None:
    """Refuse, in words, ``axes`` and a block that a producer cannot scatter scales of."""
    if not axes or any(axis not in (0, 1) for axis in axes):
        raise ValueError(f"axes is {tuple(axes)}; allowed are (0,), (1,) and (0, 1)")
    if block[1] % 32:
        raise ValueError(f"block is {block}; scale atoms hold one byte for 32 columns, so its columns must be a multiple of 32")


def sf_shape(tokens: int, columns: int, offsets: Tensor | None, axis: int) -> tuple[int, int, int, int, int]:
    """Shape of the swizzled buffer: ``[row tiles, k tiles, 32, 4, 4]`` bytes. The one place that sizes it."""
    token_tiles, blocks = sf_tiles(tokens, offsets), -(-columns // GROUP)
    if axis == 1:
        return token_tiles, -(-blocks // 4), 32, 4, 4
    return -(-columns // SF_TILE), token_tiles, 32, 4, 4


@custom_op("fused_ops::scatter_scales", mutates_args=())
def scatter_scales_op(
    scale: Tensor, block: list[int], tokens: int, columns: int, offsets: Tensor | None, axis: int, backend: str = "auto"
) -> Tensor:
    """Swizzled buffer, uint8."""
    unsupported = f"there are {tokens} tokens; the kernel counts them in 32 bits" if tokens >= 2**31 else ""
    if choose("scatter_scales", scale.device, backend, unsupported) != "reference":
        from fused_ops.scale_layout import kernel

        shape = sf_shape(tokens, columns, offsets, axis)
        return kernel.scatter_scales(scale, (block[0], block[1]), tokens, columns, offsets, axis, shape)
    return reference.scatter_scales(scale, (block[0], block[1]), tokens, columns, offsets, axis)


@scatter_scales_op.register_fake
def _(scale, block, tokens, columns, offsets, axis, backend="auto"):
    return scale.new_empty(sf_shape(tokens, columns, offsets, axis))


@custom_op("fused_ops::gather_scales", mutates_args=())
def gather_scales_op(sf: Tensor, tokens: int, columns: int, offsets: Tensor | None, axis: int, backend: str = "auto") -> Tensor:
    """Compact grid, uint8."""
    unsupported = f"there are {tokens} tokens; the kernel counts them in 32 bits" if tokens >= 2**31 else ""
    if choose("gather_scales", sf.device, backend, unsupported) != "reference":
        from fused_ops.scale_layout import kernel

        return kernel.gather_scales(sf, tokens, columns, offsets, axis)
    return reference.gather_scales(sf, tokens, columns, offsets, axis)


@gather_scales_op.register_fake
def _(sf, tokens, columns, offsets, axis, backend="auto"):
    return sf.new_empty((scale_rows(tokens, offsets), -(-columns // GROUP)))


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ValueError(f"axis is {axis}; allowed are 0 (contract over tokens) and 1 (contract over columns)")


def scatter_scales(x: MXTensor, axis: int, *, backend: str = "auto") -> Tensor:
    """The scales of ``x [T, C]`` in the swizzled layout of an MMA that contracts over ``axis``.

    The payload is not touched: one payload serves both axes. ``axis=1``: MMA rows are tokens; ``axis=0``: MMA rows are columns and
    each sequence starts at a 128-token tile of its own (``offsets[b] // 128 + b``). Layout, tile rule and atoms: ``lp_fa4.mx.layout``.

    ``backend``: ``"auto"``, ``"reference"``, ``"sm90"`` or ``"sm100"``; the bytes are the same.

    Returns: uint8 ``[row tiles, k tiles, 32, 4, 4]``, written throughout: every pad is 0.

    Raises: ``ValueError`` naming argument, value and what is allowed.
    """
    _check_axis(axis)
    if not isinstance(x, MXTensor):
        raise TypeError(f"x is {type(x).__name__}; it must be an MXTensor")
    if len(x.shape) != 2 or x.token_dim != 0:
        raise ValueError(f"x has shape {list(x.shape)}; scatter_scales takes [tokens, columns] (flatten_heads() first)")
    if x.block[1] % GROUP:
        raise ValueError(f"x has block {x.block}; scale atoms hold one byte for 32 columns, so its columns must be a multiple of 32")
    tokens, columns = x.shape
    return scatter_scales_op(x.scale_bytes.contiguous(), list(x.block), tokens, columns, x.offsets, axis, backend)


def gather_scales(sf: Tensor, tokens: int, columns: int, offsets: Tensor | None = None, *, axis: int, backend: str = "auto") -> Tensor:
    """Inverse of :func:`scatter_scales`: the compact grid of 32×32 blocks, ``float8_e8m0fnu`` ``[rows, ceil(columns / 32)]``.

    ``tokens`` and ``columns`` are the payload's shape (the capacity, when jagged). Rows that belong to no group are 0.
    """
    _check_axis(axis)
    if offsets is not None:
        check_offsets(offsets, tokens, "offsets", sf.device)
    shape = sf_shape(tokens, columns, offsets, axis)
    if sf.dtype != torch.uint8 or tuple(sf.shape) != shape:
        raise ValueError(
            f"sf is {sf.dtype} {list(sf.shape)}; {tokens} tokens by {columns} columns along axis {axis} need uint8 {list(shape)}"
        )
    return gather_scales_op(sf, tokens, columns, offsets, axis, backend).view(torch.float8_e8m0fnu)
