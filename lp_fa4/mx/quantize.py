"""The definition of every MXFP8 byte, in plain PyTorch.

* **Scale.** ``amax`` of a block in FP32; the exponent is the smallest ``e`` with ``amax * 2**-e <= 448`` (rounded up,
  so that no element clips); the byte is ``e + 127``, at least 0. An all-zero block has byte 0. A block with any NaN or
  infinity has byte 255.
* **Payload.** Round to nearest even of ``x * 2**-e`` to E4M3, the factor built from exponent bits. In a block of byte
  255 every payload is 0: the block still decodes to NaN, and a neighbour whose tile overlaps it reads 0, not NaN.
* **Static blocks.** The caller gives the exponent and vouches for the bound; there is no amax. A finite value past
  448 saturates as the hardware's conversion does, a NaN or infinity becomes the payload NaN of that element alone.
* **Bounded rows.** Exponents may be raised until the codes of no row of a block have magnitudes that sum to more than
  ``ROW_SUM``. Whatever E4M3 codes such a row meets, its product stays within ``448 * ROW_SUM = 65408``, in FP16's
  range, so that attention may take its scores from FP16 sums. E4M3 loses next to nothing by it: codes are of magnitude
  1 instead of 2^6, and what falls under its least normal number, 2^-6, is off by 2^-10 at most. (A row 2^9 smaller than
  its block's largest is lost, as one 2^16 smaller is otherwise.) Codes do not exist before the exponent does, so the
  sum is that of the elements, counted in whole units of 2^-9 under the exponent of the largest magnitude: integers,
  which every device adds up alike in any order. Rounding to a code adds 1/17 at most, 2^-10 to a subnormal one;
  ``ROW_LIMIT`` leaves room for both, and for what counting left out, up to 256 elements.

All arithmetic on scales is on integer bits, so that the same input gives the same bytes on every device.
"""

import torch
from torch import Tensor

from lp_fa4.mx.layout import GROUP, check_offsets, scale_rows, token_rows
from lp_fa4.mx.tensor import MXTensor, decode_scale, expand_scale

__all__ = ["E4M3_MAX", "cast_e4m3", "decode_scale", "encode_scale", "inverse_scale", "quantize_mx"]

E4M3_MAX = 448.0
_MANTISSA = 0x7FFFFF
_MANTISSA_OF_448 = 0x600000  # 448 = 1.75 * 2**8
_INF_BITS = 0x7F800000
ROW_SUM = 146
ROW_LIMIT = 137
ROW_UNITS = 2**9
ROW_SHIFTS = 10
"""Most that bounding rows raises an exponent: ``448 * 256 <= ROW_LIMIT * 2**ROW_SHIFTS``."""
NAN_BYTE = 255


def _magnitude_bits(x: Tensor) -> Tensor:
    """FP32 magnitude as int32 bits: ordered like the magnitudes, every NaN above infinity. So a maximum never loses a
    NaN.
    """
    return x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF


def _byte_of_bits(bits: Tensor) -> Tensor:
    exponent = (bits >> 23) - 8 + ((bits & _MANTISSA) > _MANTISSA_OF_448).to(torch.int32)
    return torch.where(bits >= _INF_BITS, NAN_BYTE, exponent.clamp(min=0)).to(torch.uint8)


def encode_scale(amax: Tensor) -> Tensor:
    """E8M0 byte of a block whose largest magnitude is ``amax``: smallest ``e`` with ``amax * 2**-e <= 448``, plus 127.

    Any float dtype in (taken to FP32 first), uint8 out, same shape. 0 and everything up to 448·2^-127 give 0; NaN and
    infinity 255.
    """
    return _byte_of_bits(_magnitude_bits(amax))


def row_units(scaled: Tensor) -> Tensor:
    """Magnitudes of ``x * 2**-e`` in whole units of 2^-9, int32; 0 of what is not finite."""
    return (torch.where(scaled.isfinite(), scaled, 0.0).abs() * ROW_UNITS).to(torch.int32)


def row_shift(units: Tensor) -> Tensor:
    """What an exponent is raised by, int32, where a row's magnitudes sum to at most ``units`` under it."""
    shift = torch.zeros_like(units)
    for i in range(ROW_SHIFTS):
        shift += (units > ROW_LIMIT * ROW_UNITS << i).to(units.dtype)
    return shift


def inverse_scale(byte: Tensor) -> Tensor:
    """``2**(127 - byte)`` in FP32 from exponent bits, 0 for byte 255 (whose payload is 0). uint8 in, float32 out."""
    exponent = 254 - byte.to(torch.int32)
    bits = torch.where(exponent > 0, exponent << 23, 0x00400000)  # byte 254: 2**-127 is subnormal
    return torch.where(byte == NAN_BYTE, 0, bits).to(torch.int32).view(torch.float32)


def cast_e4m3(x: Tensor) -> Tensor:
    """Round to nearest even to ``torch.float8_e4m3fn``; magnitudes past 448, infinity included, saturate
    (``cvt.rn.satfinite``).

    NaN stays NaN. The bits of a NaN are 0x7F, whatever the input's.
    """
    codes = x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.where(torch.isnan(x), 0x7F, codes.view(torch.uint8)).to(torch.uint8).view(torch.float8_e4m3fn)


def _check_block(block: tuple[int, int], columns: int) -> None:
    tokens, width = block
    if tokens not in (0, GROUP, 128) or width < 1:
        raise ValueError(f"block is {block}; allowed are (32, 32), (32, columns), (128, columns); with an exponent (0, columns)")
    if width != 32 and columns % width:
        raise ValueError(f"block is {block} but the last axis has {columns} elements, no multiple of {width}; only width 32 may be partial")


def check_exponent(exponent: int | Tensor, blocks: int) -> None:
    """Refuse what is no static exponent of ``blocks`` column blocks. A tensor's values are not read: they are clamped to -127 to 127; uint8
    holds scale bytes, taken as they are.
    """
    if not isinstance(exponent, Tensor):
        if not isinstance(exponent, int):
            raise TypeError(f"exponent is {exponent}, a {type(exponent).__name__}; it must be an int or an integer tensor")
        if not -127 <= exponent <= 127:
            raise ValueError(f"exponent is {exponent}; allowed is -127 to 127")
        return
    if exponent.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"exponent has dtype {exponent.dtype}; it must be an int, an integer tensor, or uint8 scale bytes")
    if exponent.dim() > 1 or (exponent.dim() == 1 and exponent.shape[0] not in (1, blocks)):
        raise ValueError(f"exponent has shape {list(exponent.shape)}; it must be [] or [{blocks}], one for each column block")


def static_bytes(exponent: int | Tensor, blocks: int, device: torch.device) -> Tensor:
    """Scale bytes of a static tensor, uint8 ``[blocks]``, from an exponent, an integer tensor or uint8 bytes that expand to them."""
    check_exponent(exponent, blocks)
    if isinstance(exponent, int):
        return torch.full((blocks,), exponent + 127, dtype=torch.uint8, device=device)
    if exponent.dtype == torch.uint8:
        return exponent.expand(blocks).clone()  # an operator may return it, and no operator returns its input
    return (exponent.to(torch.int32).expand(blocks) + 127).clamp(0, 254).to(torch.uint8)


def _block_bits_dense(bits: Tensor, block: tuple[int, int]) -> Tensor:
    """``[..., T, C]`` magnitude bits to the block maxima ``[..., ceil(T/bt), ceil(C/bc)]``."""
    tokens, columns = bits.shape[-2:]
    bt, bc = block
    rows, blocks = -(-tokens // bt), -(-columns // bc)
    padded = torch.nn.functional.pad(bits, (0, blocks * bc - columns, 0, rows * bt - tokens))
    return padded.reshape(*bits.shape[:-2], rows, bt, blocks, bc).amax(dim=(-3, -1))


def _block_bits_jagged(bits: Tensor, block: tuple[int, int], offsets: Tensor) -> Tensor:
    """``[T, C]`` magnitude bits to the maxima of 32-token rows ``[R, ceil(C/bc)]`` (a 128-token block repeats over
    its four rows).
    """
    tokens, columns = bits.shape
    bt, bc = block
    blocks = -(-columns // bc)
    per_token = torch.nn.functional.pad(bits, (0, blocks * bc - columns)).reshape(tokens, blocks, bc).amax(dim=-1)
    rows = token_rows(offsets, tokens, bt)
    grid = torch.zeros(scale_rows(tokens, offsets, bt) + 1, blocks, dtype=torch.int32, device=bits.device)
    grid = grid.scatter_reduce(0, rows[:, None].expand(-1, blocks), per_token, reduce="amax")
    if bt == GROUP:
        return grid[:-1]
    fine = torch.zeros(scale_rows(tokens, offsets) + 1, blocks, dtype=torch.int32, device=bits.device)
    fine_rows = token_rows(offsets, tokens)[:, None].expand(-1, blocks)
    return fine.scatter_reduce(0, fine_rows, grid[rows], reduce="amax")[:-1]


def _block_maxima(bits: Tensor, block: tuple[int, int], offsets: Tensor | None) -> Tensor:
    """Maxima of int32 ``[..., T, C]`` in the rows and columns of a scale tensor (a 128-token block repeats over its four rows)."""
    if offsets is not None:
        return _block_bits_jagged(bits, block, offsets)
    maxima = _block_bits_dense(bits, block)
    if block[0] != GROUP:
        maxima = maxima.repeat_interleave(block[0] // GROUP, dim=-2)[..., : scale_rows(bits.shape[-2], None), :]
    return maxima


def quantize_mx(
    x: Tensor,
    block: tuple[int, int] = (32, 32),
    offsets: Tensor | None = None,
    *,
    token_dim: int = -2,
    exponent: int | Tensor | None = None,
    bounded_rows: bool = False,
    validate: bool = False,
) -> MXTensor:
    """Quantize ``x`` to MXFP8.

    Args:
        x: float tensor ``[..., T, C]``, or with ``token_dim`` elsewhere (attention operands are ``[T, H, D]`` with
            ``token_dim=0``). Strided inputs are read as they are. Gradients stop here.
        block: (tokens, columns) that share a scale: ``(32, 32)``; ``(32, D)``; ``(128, D)`` (the byte repeats over
            four rows of the grid); with ``exponent`` it becomes ``(0, columns)``. Columns are counted along the last
            axis and never cross it.
        offsets: int32/int64 ``[B + 1]``, jagged sequences along the token axis, which must then be axis 0. Blocks
            start at each sequence's first token; rows past ``offsets[-1]`` are never read and get payload 0.
        exponent: static exponent ``e`` (payload ``x * 2**-e``): an int, or an integer tensor that expands to the
            column blocks; uint8 holds scale bytes, ``e + 127``. The caller vouches for ``|x| <= 448 * 2**e``: larger
            finite values saturate.
        bounded_rows: the codes of a row of a block sum to at most ``ROW_SUM``. For blocks of at most 256 columns whose
            exponents come from the data.
        validate: read the offsets' values (waits for the device) and, for a static exponent, check the bound.

    Returns: ``MXTensor`` with a payload like ``x`` and scales ``[..., rows, ceil(C / block[1])]`` (for ``token_dim``
    0 of ``[T, H, D]``: ``[rows, H, D / block[1]]``), rows by ``lp_fa4.mx.scale_rows``.

    Raises: ``TypeError`` or ``ValueError`` naming the argument, its value and what is allowed.

    The byte rules are the module's docstring (OCP Microscaling Formats 1.0, with the scale rounded up instead of
    down).
    """
    x = x.detach()
    if not x.dtype.is_floating_point or x.element_size() == 1:
        raise TypeError(f"x has dtype {x.dtype}; allowed are float32, float64, bfloat16 and float16")
    if x.dim() < 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must have a token axis and a last axis of columns")
    if not -x.dim() <= token_dim < x.dim():
        raise ValueError(f"token_dim is {token_dim} for x of shape {list(x.shape)}; allowed is {-x.dim()} to {x.dim() - 2}")
    axis = token_dim % x.dim()
    if axis == x.dim() - 1:
        raise ValueError(f"token_dim is {token_dim}, the last axis; the last axis holds the columns of a block")
    columns = x.shape[-1]
    if exponent is not None:
        block = (0, block[1])
    elif block[0] == 0:
        raise ValueError(f"block is {block}, a static block, but exponent is None; give the exponent")
    _check_block(block, columns)
    if bounded_rows and (block[0] == 0 or block[1] > 256):
        raise ValueError(f"block is {block} with bounded_rows; allowed are (32, 32), (32, columns) and (128, columns), up to 256 columns")
    if offsets is not None:
        if axis != 0:
            raise ValueError(f"token_dim is {token_dim} for x of shape {list(x.shape)}; jagged tokens (offsets given) must be axis 0")
        check_offsets(offsets, x.shape[0], "offsets", x.device, validate=validate)
    if block[0] == 0:
        assert exponent is not None
        return _quantize_static(x, block, offsets, axis, exponent, validate)

    # Blocks never cross the last axis, so any axes between tokens and columns join the columns while the width
    # divides them.
    moved = x.movedim(axis, -2) if axis != 0 else x.flatten(1)
    width = block[1]
    if axis == 0 and columns % width:
        pad = -(-columns // width) * width - columns
        moved = torch.nn.functional.pad(x, (0, pad)).flatten(1)
    scale = _byte_of_bits(_block_maxima(_magnitude_bits(moved), block, offsets))
    if bounded_rows:
        scaled = moved.to(torch.float32) * expand_scale(inverse_scale(scale), moved.shape, block, offsets, moved.dim() - 2)
        pad = -moved.shape[-1] % width
        units = torch.nn.functional.pad(row_units(scaled), (0, pad)).unflatten(-1, (-1, width)).sum(-1, dtype=torch.int32)
        shift = row_shift(_block_maxima(units, (block[0], 1), offsets))
        scale = torch.where(scale == NAN_BYTE, NAN_BYTE, (scale.to(torch.int32) + shift).clamp(max=254)).to(torch.uint8)
    scale = scale.reshape(scale.shape[0], *x.shape[1:-1], -(-columns // width)) if axis == 0 else scale.movedim(-2, axis)
    factor = expand_scale(inverse_scale(scale), x.shape, block, offsets, axis)
    payload = cast_e4m3(torch.where(factor == 0, 0.0, x.to(torch.float32) * factor))
    return MXTensor(payload, scale.contiguous().view(torch.float8_e8m0fnu), block, offsets, axis)


def _quantize_static(
    x: Tensor, block: tuple[int, int], offsets: Tensor | None, axis: int, exponent: int | Tensor, validate: bool
) -> MXTensor:
    columns, width = x.shape[-1], block[1]
    inner = tuple(n for d, n in enumerate(x.shape[:-1]) if d != axis)
    blocks = -(-columns // width)
    count = blocks
    for n in inner:
        count *= n
    scale = static_bytes(exponent, count, x.device).reshape(*inner, blocks).unsqueeze(axis)
    scaled = x.to(torch.float32) * expand_scale(inverse_scale(scale), x.shape, block, offsets, axis)
    if validate and bool((scaled.abs() > E4M3_MAX).any()):
        worst = float(scaled.abs().nan_to_num(0.0, 0.0).amax())
        raise ValueError(f"exponent puts a value at {worst:g}, past 448; a static exponent must bound every value")
    scaled = torch.where(torch.isfinite(scaled), scaled, torch.nan)
    if offsets is not None:
        rows = torch.arange(x.shape[0], device=x.device)
        inside = rows < offsets[-1]
        scaled = torch.where(inside.reshape(-1, *[1] * (x.dim() - 1)), scaled, 0.0)
    return MXTensor(cast_e4m3(scaled), scale.contiguous().view(torch.float8_e8m0fnu), block, offsets, axis)
