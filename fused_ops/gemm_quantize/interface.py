"""``gemm_quantize``: checks, operator ``fused_ops::gemm_quantize``, public function."""

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.gemm_quantize import reference
from fused_ops.gemm_quantize.config import spec_of
from fused_ops.operands import Matrix, Weight, check_device, check_matrix, flatten, unflatten
from lp_fa4.mx import MXTensor, check_offsets, encode_scale, scale_rows
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
) -> tuple[Tensor, Tensor]:
    """Codes and scale of the product, uint8."""
    spec, reason = spec_of(x, x_block, w, w_block, block, offsets is None)
    if not reason and x[0].shape[0] >= 2**31:
        reason = f"x has {x[0].shape[0]} rows; the kernel counts them in 32 bits"
    words = {"sm90": reason, "sm100": "this version has no sm100 kernel for it"}
    if choose("gemm_quantize", x[0].device, backend, words) == "sm90":
        from fused_ops.gemm_quantize import sm90

        assert spec is not None
        return sm90.gemm_quantize(x, x_scale, w, w_scale, offsets, exponent, spec)
    left = unflatten(x, x_scale, x_block, offsets)
    out = reference.gemm_quantize(left, unflatten(w, w_scale, w_block), (block[0], block[1]), offsets, exponent)  # type: ignore[arg-type]
    return out.codes, out.scale_bytes


@gemm_quantize_op.register_fake
def _(x, x_scale, x_block, w, w_scale, w_block, offsets, block, exponent, backend="auto"):
    tokens, columns = x[0].shape[0], w[0].shape[0]
    rows = 1 if block[0] == 0 else scale_rows(tokens, offsets)
    codes = x[0].new_empty((tokens, columns), dtype=torch.uint8)
    return codes, x[0].new_empty((rows, -(-columns // block[1])), dtype=torch.uint8)


def projection_exponent(norm_weight: Tensor, w: Tensor, width: int, *, centred: bool = False) -> Tensor:
    """Static exponents that no projection of an RMSNorm output can exceed: int32 ``[N / width]``.

    ``x * rstd`` has norm at most ``sqrt(C)``, so ``|y_j| <= sqrt(C) * |norm_weight * w_j|`` (Cauchy-Schwarz), twice that when the
    rows were centred. ``w [N, C]`` is the matrix that multiplies (rotated, if it is).
    """
    scaled = w.detach().to(torch.float32) * norm_weight.detach().to(torch.float32)
    bound = torch.linalg.vector_norm(scaled, dim=1).reshape(-1, width).amax(dim=1)
    rounded = (1 + 1 / 16) ** 2  # both operands may have been rounded to E4M3
    return encode_scale(bound * (w.shape[1] ** 0.5 * (2 if centred else 1) * rounded)).to(torch.int32) - 127


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
        exponent: static exponents, an int or integers ``[N / D]``: see :func:`projection_exponent`.
        backend: ``"auto"`` (a kernel where the device has one), ``"reference"``, ``"sm90"`` or ``"sm100"``. A kernel adds up in another
            order, and FP8 products in sums of some 14 bits over at most 128 of C, so a code may be the next one where the sum lies beside a
            rounding boundary; given the sums, every byte is the same.

    Returns: MXTensor ``[T, N]`` with the groups of ``offsets``; payload 0 past ``offsets[-1]``.

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
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
    left, right = flatten(x), flatten(w)
    given = None if exponent is None else torch.as_tensor(exponent, device=x.device)
    codes, scale = gemm_quantize_op(*left, *right, offsets, list(block), given, backend)
    return MXTensor.from_bytes(codes, scale, block, offsets)
