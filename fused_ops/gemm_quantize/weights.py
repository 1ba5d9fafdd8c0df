"""A projection's weight as its kernel reads it, from one small kernel: rotated, split or rounded, and the bound of its product's exponents.

    exact  = R w                     per head; R = Hadamard / sqrt(D), or w itself
    hi, lo = MX(exact), E4M3((exact - hi) / scale)      or hi alone; in bounded rows or not (``fused_ops.operands.split_e4m3``)
    BF16(exact) always, which the backward reads
    bytes  = E8M0 of  max over a head's rows of |gain * exact_j| * factor        (``interface.projection_exponent``)

A CTA holds a head's rows of 128 columns, a column a thread, so the transform is butterflies within registers; a second kernel adds a row's
squares over the CTAs, in order. Bounded rows are whole ones: the exact weight goes through memory, and a third kernel codes it. What
differs from the plain PyTorch form (:func:`reference`) is the order of FP32 sums.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.gemm_quantize.config import FORMS
from fused_ops.hadamard import rotate_rows
from fused_ops.operands import Weight, check_bounded, split_e4m3
from lp_fa4.mx import MXTensor, encode_scale

ROWS = (32, 64, 128)
"""Rows of a head that a thread's registers hold."""


@dataclass(frozen=True)
class WeightSpec:
    """Compile key: ``columns`` K, ``rows`` of a head, ``form`` of ``FORMS``, ``width``: K under a scale (32, 64 or 128, or all of it where
    rows are ``bounded``)."""

    columns: int
    rows: int
    form: str
    width: int
    rotate: bool
    dtype: str
    gain_dtype: str
    bounded: bool = False

    @property
    def chunks(self) -> int:
        """CTAs of a head."""
        return -(-self.columns // 128)


class ProjectionWeight(NamedTuple):
    """``weight``: as ``gemm_quantize`` reads it. ``bound``: scale bytes ``[heads]``, uint8, at most 254, of what ``gemm_quantize`` takes as
    ``exponent``. ``rounded``: BF16 of the exact weight ``[N, C]``."""

    weight: Weight
    bound: Tensor
    rounded: Tensor


def bound_factor(columns: int, centred: bool) -> float:
    """What a row's norm is multiplied by: ``|x * rstd| <= sqrt(C)``, twice that when the rows were centred, and both operands may have
    been rounded to E4M3."""
    return columns**0.5 * (2 if centred else 1) * (1 + 1 / 16) ** 2


def reference(
    w: Tensor, gain: Tensor, heads: int, form: str, block: tuple[int, int], rotate: bool, centred: bool, bounded: bool = False
) -> ProjectionWeight:
    """See the module's docstring."""
    exact = rotate_rows(w, heads) if rotate else w.detach().to(torch.float32)
    norms = torch.linalg.vector_norm(exact * gain.detach().to(torch.float32), dim=1).reshape(heads, -1).amax(dim=1)
    bound = encode_scale(norms * bound_factor(w.shape[1], centred)).clamp(max=254)
    rounded = exact.to(torch.bfloat16)
    if form == "bf16":
        return ProjectionWeight(rounded, bound, rounded)
    pair = split_e4m3(exact, block, bounded=bounded)
    return ProjectionWeight(pair if form == "e4m3x2" else pair[0], bound, rounded)


def unsupported(w: Tensor, gain: Tensor, heads: int, block: tuple[int, int], bounded: bool = False) -> str:
    """Why the kernel cannot serve, "" if it can."""
    rows, columns = w.shape
    if rows % heads or rows // heads not in ROWS:
        return f"w has {rows} rows in {heads} heads; the kernel serves heads of 32, 64 and 128 rows"
    if columns % 32 or block[0] != 32 or (not bounded and (block[1] not in (32, 64, 128) or columns % block[1])):
        return f"w has {columns} columns and block is {block}; the kernel serves (32, 32), (32, 64) and (32, 128) that divide them"
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return "" if w.dtype in kinds and gain.dtype in kinds else f"w and gain are {w.dtype} and {gain.dtype}"


def projection_weight(
    w: Tensor,
    gain: Tensor,
    heads: int,
    form: str,
    block: tuple[int, int] = (32, 32),
    *,
    rotate: bool = False,
    centred: bool = False,
    bounded: bool = False,
    backend: str = "auto",
) -> ProjectionWeight:
    """``w [heads * D, C]`` as ``gemm_quantize`` reads it, and the scales that bound its product with an RMSNorm's output.

    Args:
        gain: the norm's weight ``[C]``.
        form: ``"e4m3"``, ``"e4m3x2"`` (a pair hi + lo) or ``"bf16"``; ``block``: of the scales, where there are any.
        rotate: apply the Hadamard matrix to each head's rows. ``centred``: the norm's output had its mean taken away.
        bounded: E4M3 in bounded rows, whose products Hopper may sum in FP16; ``block`` is ``(32, C)`` then, C at most 1,024.
        backend: ``"auto"``, ``"reference"``, ``"sm90"`` or ``"sm100"``; they differ in the order of FP32 sums.

    Raises: ``ValueError`` naming argument, value and what is allowed.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; allowed are {', '.join(map(repr, FORMS))}")
    if w.dim() != 2 or heads < 1 or w.shape[0] % heads or gain.shape != w.shape[1:]:
        raise ValueError(f"w is {list(w.shape)}, gain {list(gain.shape)}, heads {heads}; allowed are [heads * D, C], [C] and whole heads")
    if bounded and form != "bf16":
        check_bounded(block, w.shape[1])
    if choose("projection_weight", w.device, backend, unsupported(w, gain, heads, block, bounded)) == "reference":
        return reference(w, gain, heads, form, block, rotate, centred, bounded)
    from fused_ops.gemm_quantize import weights_kernel

    rounded, parts, scales, bound = weights_kernel.projection_weight(
        w.detach(), gain.detach(), heads, form, block[1], rotate, centred, bounded
    )
    if scales is None:
        return ProjectionWeight(rounded, bound, rounded)
    made = [MXTensor.from_bytes(codes, scales, block) for codes in parts]
    return ProjectionWeight(made[0] if form == "e4m3" else (made[0], made[1]), bound, rounded)
