"""How the fused operations carry matrices across an operator boundary: plain tensors, bytes for MXFP8.

A matrix is given to a public function as a float tensor, as an ``MXTensor``, or (weights only) as a pair ``(hi, lo)`` of
MXTensors whose sum is the matrix. An operator takes it as a list of payloads, a list of scales (empty when the payload is
a float tensor) and the block of each MXTensor in one flat list.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor, cast_e4m3, expand_scale, inverse_scale, quantize_mx
from lp_fa4.mx.quantize import ROW_UNITS, row_units

Matrix = Tensor | MXTensor
Weight = Tensor | MXTensor | tuple[MXTensor, MXTensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Flat(NamedTuple):
    """A matrix as an operator takes it: see the module's docstring."""

    payloads: list[Tensor]
    scales: list[Tensor]
    blocks: list[int]


def flatten(matrix: Weight) -> Flat:
    """Take a matrix apart for an operator's arguments."""
    if isinstance(matrix, Tensor):
        return Flat([matrix], [], [])
    parts = [matrix] if isinstance(matrix, MXTensor) else list(matrix)
    return Flat([p.codes for p in parts], [p.scale_bytes for p in parts], [n for p in parts for n in p.block])


def unflatten(payloads: Sequence[Tensor], scales: Sequence[Tensor], blocks: Sequence[int], offsets: Tensor | None = None) -> Weight:
    """Inverse of :func:`flatten`; ``offsets`` makes the MXTensors jagged."""
    if not scales:
        return payloads[0]
    parts = [
        MXTensor.from_bytes(payload, scale, (blocks[2 * i], blocks[2 * i + 1]), offsets)
        for i, (payload, scale) in enumerate(zip(payloads, scales, strict=True))
    ]
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def to_float(matrix: Weight) -> Tensor:
    """The matrix in FP32 (dequantized, hi + lo added)."""
    if isinstance(matrix, Tensor):
        return matrix.to(torch.float32)
    if isinstance(matrix, MXTensor):
        return matrix.dequantize()
    return matrix[0].dequantize() + matrix[1].dequantize()


PAIR_LIMIT = 125
"""Bounded rows of two parts (:func:`split_e4m3`): an element's two codes have magnitudes of at most ``1 + 1/17 + 18/289`` times its own, or
2^-9 more, so that of up to 1,024 columns they add up to 142.1; products may be summed in FP16 up to 143, counted to half a percent."""
MAX_BOUNDED_COLUMNS = 1024
PAIR_SHIFTS = 12
"""Most that it raises an exponent: ``448 * 1024 <= PAIR_LIMIT * 2**PAIR_SHIFTS``."""


def split_e4m3(weight: Tensor, block: tuple[int, int] = (32, 32), *, bounded: bool = False) -> tuple[MXTensor, MXTensor]:
    """``weight`` as E4M3 hi + lo under one scale: ``hi = MX(w)``, ``lo = E4M3((w - hi) / scale)``; 7 to 8 significant bits, like BF16.

    Two accumulating FP8 products with it replace one BF16 product (numerics: "exact Wk"). Both parts hold the same scale tensor. What is
    left of an element is at most half its last place, 16 units of the scale, and is kept to 2^-10 of a unit.

    ``bounded``: exponents are raised, as ``quantize_mx`` does for bounded rows, until a row's codes, both parts, have magnitudes that sum
    to less than 143, so that Hopper's ``gemm_quantize`` may take the product from FP16 sums, whatever it meets. For blocks of whole rows.
    The pair is 50 to 60 dB from the weight then (64 otherwise; BF16 55), one part alone as before.

    Raises: ``ValueError`` for ``bounded`` blocks that are not whole rows of at most 1,024 columns.
    """
    if bounded:
        check_bounded(block, weight.shape[-1])
    hi = quantize_mx(weight, block)
    if bounded:
        scaled = weight.to(torch.float32) * expand_scale(inverse_scale(hi.scale_bytes), hi.shape, block, None, 0)
        units = torch.nn.functional.pad(row_units(scaled).sum(dim=1, dtype=torch.int32), (0, -hi.shape[0] % 32)).unflatten(0, (-1, 32))
        most, shift = units.amax(dim=1), torch.zeros_like(units[:, 0])
        for i in range(PAIR_SHIFTS):
            shift += (most > PAIR_LIMIT * ROW_UNITS << i).to(torch.int32)
        scale = hi.scale_bytes.to(torch.int32) + shift[:, None]
        raised = torch.where(hi.scale_bytes == 255, 255, scale.clamp(max=254)).to(torch.uint8)
        factor = expand_scale(inverse_scale(raised), hi.shape, block, None, 0)
        payload = cast_e4m3(torch.where(factor == 0, 0.0, weight.detach().to(torch.float32) * factor))
        hi = MXTensor(payload, raised.view(torch.float8_e8m0fnu), block)
    left = (weight.to(torch.float32) - hi.dequantize()) * expand_scale(inverse_scale(hi.scale_bytes), hi.shape, block, None, 0)
    return hi, MXTensor(cast_e4m3(torch.where(torch.isfinite(left), left, 0.0)), hi.scale, block)


def check_bounded(block: tuple[int, int], columns: int) -> None:
    """``ValueError`` unless ``block`` holds whole rows of ``columns``, few enough for bounded ones."""
    if block[1] != columns or columns > MAX_BOUNDED_COLUMNS:
        raise ValueError(
            f"block is {block} with bounded and {columns} columns; allowed are whole rows, up to {MAX_BOUNDED_COLUMNS} columns"
        )


def check_matrix(name: str, matrix: object, columns: int | None = None, *, pair: bool = False) -> tuple[int, int]:
    """Shape ``[rows, columns]`` of a matrix argument, or an error that names it.

    Raises: ``TypeError`` for anything but a float tensor, an MXTensor or (``pair``) two MXTensors; ``ValueError`` for
    the shape.
    """
    parts: list[Any] = list(matrix) if pair and isinstance(matrix, tuple) else [matrix]
    if pair and isinstance(matrix, tuple) and len(parts) != 2:
        raise TypeError(f"{name} has {len(parts)} parts; a split weight is a pair (hi, lo) of MXTensors")
    for part in parts:
        if isinstance(part, Tensor) and len(parts) == 1:
            if part.dtype not in FLOATS:
                raise TypeError(f"{name} has dtype {part.dtype}; allowed are {', '.join(map(str, FLOATS))}, or MXTensor")
        elif not isinstance(part, MXTensor):
            allowed = "a float tensor, an MXTensor" + (" or a pair (hi, lo) of MXTensors" if pair else "")
            raise TypeError(f"{name} is {type(part).__name__}; allowed is {allowed}")
        shape = part.shape
        if len(shape) != 2:
            raise ValueError(f"{name} has shape {list(shape)}; it must be a matrix [rows, columns]")
        if columns is not None and shape[1] != columns:
            raise ValueError(f"{name} has shape {list(shape)}; its last axis must be {columns}")
    if len(parts) == 2 and parts[0].shape != parts[1].shape:
        raise ValueError(f"{name} has parts of shapes {list(parts[0].shape)} and {list(parts[1].shape)}; they must agree")
    return parts[0].shape[0], parts[0].shape[1]


def check_device(device: torch.device, **named: Tensor | MXTensor | None) -> None:
    """All of ``named`` live on ``device``, or an error that names the first that does not."""
    for name, value in named.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} is on {value.device}; it must be on {device} like the first argument")
