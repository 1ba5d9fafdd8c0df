"""``MXTensor``: payload, scale, block shape and sequence boundaries, carried as one object."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lp_fa4.mx.layout import GROUP, scale_rows, token_rows


def decode_scale(byte: Tensor) -> Tensor:
    """E8M0 to FP32: byte ``b`` is ``2**(b - 127)``, 0 included (2^-127, an FP32 subnormal); 255 is NaN. uint8 in,
    float32 out.
    """
    wide = byte.to(torch.int32)
    bits = torch.where(wide == 0, 0x00400000, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def expand_scale(factors: Tensor, shape: Sequence[int], block: tuple[int, int], offsets: Tensor | None, token_dim: int) -> Tensor:
    """Spread one factor per block over the elements of ``shape``; jagged rows past ``offsets[-1]`` get 0 (static
    blocks: their factor).

    ``factors`` is shaped like the scale of an ``MXTensor`` with this shape, block, offsets and token axis. The result
    broadcasts to ``shape``.
    """
    if block[0] != 0:
        if offsets is None:
            factors = factors.repeat_interleave(GROUP, dim=token_dim).narrow(token_dim, 0, shape[token_dim])
        else:
            factors = torch.cat(
                [factors, torch.zeros_like(factors[:1])] if factors.shape[0] else [factors.new_zeros(1, *factors.shape[1:])]
            )
            factors = factors[token_rows(offsets, shape[0])]
    if factors.shape[-1] == 1:
        return factors
    return factors.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]


@dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """An MXFP8 tensor.

    Attributes:
        payload: ``float8_e4m3fn``, any shape with a token axis and a last axis of columns.
        scale: ``float8_e8m0fnu``, the payload's shape with the token axis replaced by scale rows (32 tokens each; one
            row if static) and the last axis by ``ceil(columns / block[1])``.
        block: (tokens, columns) under one scale. ``(128, D)`` repeats its byte over four rows; ``(0, D)`` is static:
            one scale for all tokens.
        offsets: int ``[B + 1]`` if the token axis (then axis 0) is jagged.
        token_dim: the token axis, non-negative.

    Frozen; holds no gradient. ``codes`` and ``scale_bytes`` are the uint8 views that cross operator boundaries and
    that every PyTorch function accepts.
    """

    payload: Tensor
    scale: Tensor
    block: tuple[int, int]
    offsets: Tensor | None = None
    token_dim: int = 0

    @property
    def shape(self) -> torch.Size:
        """Shape of the values."""
        return self.payload.shape

    @property
    def device(self) -> torch.device:
        """Device of the payload."""
        return self.payload.device

    @property
    def codes(self) -> Tensor:
        """The E4M3 codes as uint8, sharing memory."""
        return self.payload.view(torch.uint8)

    @property
    def scale_bytes(self) -> Tensor:
        """The E8M0 bytes as uint8, sharing memory."""
        return self.scale.view(torch.uint8)

    @property
    def is_static(self) -> bool:
        """Whether one given exponent serves all tokens of a column block."""
        return self.block[0] == 0

    @classmethod
    def from_bytes(
        cls,
        codes: Tensor,
        scale_bytes: Tensor,
        block: tuple[int, int],
        offsets: Tensor | None = None,
        token_dim: int = 0,
    ) -> "MXTensor":
        """Wrap uint8 codes and scales, as operators return them; shapes that do not match are refused."""
        shape = list(codes.shape)
        axis = token_dim % codes.dim()
        shape[axis] = 1 if block[0] == 0 else scale_rows(shape[axis], offsets)
        shape[-1] = -(-shape[-1] // block[1])
        if list(scale_bytes.shape) != shape:
            raise ValueError(f"scale has shape {list(scale_bytes.shape)}; a payload {list(codes.shape)} in blocks {block} needs {shape}")
        return cls(codes.view(torch.float8_e4m3fn), scale_bytes.view(torch.float8_e8m0fnu), block, offsets, axis)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, ``payload * 2**(byte - 127)``, computed in FP32. Jagged rows past ``offsets[-1]`` are 0; a byte
        of 255 gives NaN.
        """
        factors = expand_scale(decode_scale(self.scale_bytes), self.shape, self.block, self.offsets, self.token_dim)
        values = self.payload.to(torch.float32) * factors
        if self.offsets is not None and self.is_static:
            inside = torch.arange(self.shape[0], device=self.device) < self.offsets[-1]
            values = torch.where(inside.reshape(-1, *[1] * (values.dim() - 1)), values, 0.0)
        return values.to(dtype)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MXTensor":
        """Move every part to ``device``. The dtype is fixed by the format: use ``dequantize`` for another one."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to() moves an MXTensor between devices; {device} is a dtype: call dequantize({device})")
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MXTensor":
        """Copy every part to page-locked memory (what a ``DataLoader`` with ``pin_memory=True`` calls)."""
        return self._map(lambda t: t.pin_memory())

    def clone(self) -> "MXTensor":
        """Copy every part."""
        return self._map(lambda t: t.clone())

    def __repr__(self) -> str:
        jagged = "" if self.offsets is None else f", sequences={self.offsets.shape[0] - 1}"
        sizes = f"shape={list(self.shape)}, block={self.block}, token_dim={self.token_dim}{jagged}"
        return f"{type(self).__name__}({sizes}, device={self.device})"

    def __getstate__(self) -> dict[str, Any]:
        """Fields with bytes for FP8, whose storages a plain ``pickle`` cannot restore."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"payload": self.codes, "scale": self.scale_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        formats = {"payload": torch.float8_e4m3fn, "scale": torch.float8_e8m0fnu}
        for name, value in state.items():
            object.__setattr__(self, name, value.view(formats[name]) if name in formats else value)

    def _map(self, fn) -> "MXTensor":  # FP8 dtypes lack many kernels: everything runs on the bytes
        offsets = None if self.offsets is None else fn(self.offsets)
        payload, scale = fn(self.codes).view(torch.float8_e4m3fn), fn(self.scale_bytes).view(torch.float8_e8m0fnu)
        return replace(self, payload=payload, scale=scale, offsets=offsets)

    def transpose(self) -> "MXTensor":
        """Swap tokens and columns without touching a byte: dense tensors in ``(32, 32)`` blocks only."""
        if self.block != (32, 32) or self.offsets is not None or self.token_dim != self.payload.dim() - 2:
            raise ValueError(
                f"transpose() of block {self.block}, {'dense' if self.offsets is None else 'jagged'}, "
                f"token_dim {self.token_dim}: "
                "only dense [..., T, C] in (32, 32) blocks transposes for free"
            )
        return replace(self, payload=self.payload.transpose(-1, -2), scale=self.scale.transpose(-1, -2))

    def reshape_heads(self, heads: int) -> "MXTensor":
        """``[T, H*D]`` to ``[T, H, D]``; a block may not cross a head."""
        columns = self.shape[-1]
        if self.payload.dim() != 2 or columns % heads or (columns // heads) % self.block[1]:
            raise ValueError(
                f"heads is {heads} for shape {list(self.shape)} in blocks {self.block}; heads must divide the columns into whole blocks"
            )
        payload = self.payload.unflatten(1, (heads, columns // heads))
        return replace(self, payload=payload, scale=self.scale.unflatten(1, (heads, self.scale.shape[1] // heads)))

    def flatten_heads(self) -> "MXTensor":
        """``[T, H, D]`` to ``[T, H*D]``; the head dimension must hold whole blocks."""
        if self.payload.dim() != 3 or self.token_dim != 0 or self.shape[-1] % self.block[1]:
            raise ValueError(
                f"flatten_heads() needs [T, H, D] with D a multiple of the block's columns; shape is {list(self.shape)}, block {self.block}"
            )
        return replace(self, payload=self.payload.flatten(1), scale=self.scale.flatten(1))


def cat(tensors: Sequence[MXTensor]) -> MXTensor:
    """Join jagged tensors along their tokens: the sequences of the first, then those of the second, …; no byte is
    requantized.

    Each part must be jagged, unstatic, in the same blocks, and filled: ``offsets[-1]`` equal to its number of rows
    (not checked: that would read the device).
    """
    first = tensors[0]
    pieces, base = [], 0
    for i, t in enumerate(tensors):
        if t.offsets is None or t.is_static or t.block != first.block or t.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"tensors[{i}] has block {t.block}, shape {list(t.shape)}; "
                f"cat() joins jagged tensors like tensors[0]: {first.block}, {list(first.shape)}"
            )
        pieces.append(t.offsets[:-1].to(torch.int64) + base)
        base += t.shape[0]
    codes = torch.cat([t.codes for t in tensors])
    pieces.append(torch.full((1,), base, dtype=torch.int64, device=first.device))
    offsets = torch.cat(pieces).to(max((t.offsets.dtype for t in tensors if t.offsets is not None), key=lambda d: d.itemsize))
    scale = torch.zeros(scale_rows(base, offsets), *first.scale.shape[1:], dtype=torch.uint8, device=first.device)
    per_token = torch.cat([t.scale_bytes[token_rows(t.offsets, t.shape[0])] for t in tensors])  # type: ignore[arg-type]
    scale[token_rows(offsets, base)] = per_token
    return MXTensor.from_bytes(codes, scale, first.block, offsets, 0)


def _flatten(t: MXTensor):
    return [t.payload, t.scale, t.offsets], (t.block, t.token_dim)


def _unflatten(leaves, context) -> MXTensor:
    payload, scale, offsets = leaves
    return MXTensor(payload, scale, context[0], offsets, context[1])


torch.utils._pytree.register_pytree_node(MXTensor, _flatten, _unflatten, serialized_type_name="lp_fa4.mx.MXTensor")
torch.serialization.add_safe_globals([MXTensor])
