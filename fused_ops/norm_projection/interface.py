"""``rmsnorm_project``: checks, operator ``fused_ops::rmsnorm_project``, public function."""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops import backend as backends
from fused_ops.gemm_quantize.interface import gemm_quantize_op
from fused_ops.norm_projection.config import ProjectionSpec, unsupported
from fused_ops.operands import check_device, check_matrix
from fused_ops.rmsnorm_quantize.interface import CentredNorm, check_rows, given_exponent, rmsnorm_quantize_op
from lp_fa4.mx import MXTensor, check_exponent, scale_rows
from lp_fa4.operator import custom_op
from lp_fa4.sm90.operands import MXTensorWithCopy


class NormProjection(NamedTuple):
    """Result of :func:`rmsnorm_project`. ``norm``: as ``rmsnorm_center_quantize`` returns it, ``normed`` None. ``product``: ``[T, N]``."""

    norm: CentredNorm
    product: MXTensor


def rows_unserved(x: Tensor, weight: Tensor, rows: int, width: int) -> str:
    """:func:`unserved` of a jagged call with a BF16 projection of ``rows`` rows, before there is one; exponents ``width`` columns wide."""
    return unserved(x, weight, torch.empty(rows, 0, dtype=torch.bfloat16), width, width, False)


def unserved(x: Tensor, weight: Tensor, w: Tensor, width: int, product_width: int, dense: bool) -> str:
    """Why no single kernel serves, "" if one does."""
    if w.dtype != torch.bfloat16:
        return f"w is {w.dtype}; the kernel multiplies rows rounded to bfloat16 by bfloat16"
    if x.shape[0] >= 2**31:
        return f"x has {x.shape[0]} rows; the kernel counts them in 32 bits"
    dtype, weight_dtype = (str(t.dtype).removeprefix("torch.") for t in (x, weight))
    spec = ProjectionSpec(x.shape[1], w.shape[0], weight_dtype, width, product_width, dense, dtype=dtype)
    return unsupported(spec) or backends.device_reason("sm90", x.device)


@custom_op("fused_ops::rmsnorm_project", mutates_args=())
def rmsnorm_project_op(
    x: Tensor,
    weight: Tensor,
    w: Tensor,
    eps: float,
    offsets: Tensor | None,
    width: int,
    exponent: Tensor | None,
    product_width: int,
    product_exponent: Tensor,
    copy_heads: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes, scale, rstd, mean, total, codes with tokens innermost (empty if not asked for), codes and scale of the product."""
    if backend in ("auto", "sm90") and not unserved(x, weight, w, width, product_width, offsets is None):
        from fused_ops.norm_projection import kernel

        out = kernel.norm_projection(x, weight, w, eps, offsets, width, exponent, product_width, product_exponent, copy_heads=copy_heads)
        assert out.mean is not None and out.total is not None
        copy = x.new_empty(0, dtype=torch.uint8) if out.copy is None else out.copy
        return out.codes, out.scale, out.rstd, out.mean, out.total, copy, out.product, out.product_scale
    codes, scale, rstd, mean, total, normed, _, _, copy = rmsnorm_quantize_op(
        x, weight, eps, offsets, [0, width], exponent, True, True, None, backend, copy_heads
    )
    product, product_scale, _, _ = gemm_quantize_op([normed], [], [], [w], [], [], offsets, [0, product_width], product_exponent, backend)
    return codes, scale, rstd, mean, total, copy, product, product_scale


@rmsnorm_project_op.register_fake
def _(x, weight, w, eps, offsets, width, exponent, product_width, product_exponent, copy_heads=0, backend="auto"):
    tokens, columns = x.shape
    sums = (1 if offsets is None else offsets.shape[0] - 1, columns)
    copy = (copy_heads, columns // copy_heads, 32 * scale_rows(tokens, offsets)) if copy_heads else (0,)

    def empty(*shape, dtype=torch.uint8):
        return x.new_empty(shape, dtype=dtype)

    return (
        empty(tokens, columns),
        empty(1, columns // width),
        empty(tokens, dtype=torch.float32),
        empty(*sums, dtype=torch.float32),
        empty(*sums, dtype=torch.float32),
        empty(*copy),
        empty(tokens, w.shape[0]),
        empty(1, w.shape[0] // product_width),
    )


def rmsnorm_project(
    x: Tensor,
    weight: Tensor,
    w: Tensor,
    product_exponent: int | Tensor,
    eps: float = 1e-6,
    offsets: Tensor | None = None,
    *,
    width: int = 128,
    product_width: int = 128,
    exponent: int | Tensor | None = None,
    copy_heads: int = 0,
    backend: str = "auto",
) -> NormProjection:
    """MXFP8 of the centred norm of ``x`` and of its BF16 rows times ``w``: what these two make, but, where one kernel serves, ``x`` is read
    once and no normed row is written in BF16. Whatever ``x`` is, the norm is FP32 of ``x`` as given, and its rows are rounded once: equal
    values of another dtype give equal results. Where one kernel serves and ``exponent`` is None, rows and weight are rounded to FP16 under
    the exponents instead of BF16, and summed in FP16 (``norm_projection.weight``): the product is nearer to the exact one.

        norm = rmsnorm_center_quantize(x, weight, eps, offsets, (0, width), exponent=exponent, keep=True, copy_heads=copy_heads)
        product = gemm_quantize(norm.normed, w, (0, product_width), offsets=offsets, exponent=product_exponent)

    Args:
        x: ``[T, C]``, float32, bfloat16 or float16. weight: ``[C]``. w: ``[N, C]``, bfloat16.
        product_exponent: static exponents of the product, an int or integers ``[N / product_width]`` (uint8: their scale bytes).
        offsets: int32/int64 ``[B + 1]``; None: one sequence. Rows past ``offsets[-1]`` do not count.
        width, product_width: columns under an exponent of the norm's codes and of the product's.
        exponent: static exponents of the norm's codes; None: those of ``norm_exponent``.
        copy_heads: heads of the codes' copy with tokens innermost, 0 for none; a launch of its own where one kernel serves the rest.
        backend: ``"auto"``, ``"reference"``, ``"sm90"`` or ``"sm100"``. One kernel serves rows of up to 384 columns, multiples of 64, on
            Hopper; the rest are two operations, one after the other, on the backend's kernels. They differ in the order of FP32 sums.

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
    block, product_block = (0, width), (0, product_width)
    check_rows(x, weight, eps, offsets, block)
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [tokens, columns]")
    rows, _ = check_matrix("w", w, x.shape[1])
    if not isinstance(w, Tensor) or w.dtype != torch.bfloat16:
        raise TypeError(f"w is {getattr(w, 'dtype', type(w).__name__)}; allowed is a bfloat16 tensor")
    check_device(x.device, w=w)
    if product_width < 1 or rows % product_width:
        raise ValueError(f"product_width is {product_width} for {rows} rows of w; it must divide them")
    if copy_heads < 0 or (copy_heads and x.shape[1] % copy_heads):
        raise ValueError(f"copy_heads is {copy_heads} for {x.shape[1]} columns; it must divide them, or be 0 for no copy")
    check_exponent(product_exponent, rows // product_width)
    given = torch.as_tensor(product_exponent, device=x.device)
    codes, scale, rstd, mean, total, copy, product, product_scale = rmsnorm_project_op(
        x, weight, w, eps, offsets, width, given_exponent(weight, block, exponent), product_width, given, copy_heads, backend
    )
    xn = MXTensor.from_bytes(codes, scale, block, offsets)
    if copy_heads:
        xn = MXTensorWithCopy(xn.payload, xn.scale, xn.block, xn.offsets, xn.token_dim, copy)
    return NormProjection(CentredNorm(xn, rstd, mean, total, None), MXTensor.from_bytes(product, product_scale, product_block, offsets))
