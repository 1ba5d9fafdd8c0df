"""``gemm_norm_backward``: checks, operator ``fused_ops::gemm_norm_backward``, public function."""

from typing import NamedTuple

import torch
from torch import Tensor

from fused_ops.backend import choose
from fused_ops.gemm_norm_backward import reference
from fused_ops.gemm_norm_backward.config import reasons_against
from fused_ops.operands import FLOATS, Matrix, Weight, check_device, check_matrix, flatten, unflatten
from lp_fa4.mx import MXTensor, check_offsets
from lp_fa4.operator import custom_op


class GemmNormGradients(NamedTuple):
    """``dx`` ``[T, C]`` in x's dtype, ``dnorm_weight`` FP32 ``[C]``, ``dw_k`` FP32 ``[N, C]``; None where ``needs`` says so."""

    dx: Tensor | None
    dnorm_weight: Tensor | None
    dw_k: Tensor | None


@custom_op("fused_ops::gemm_norm_backward", mutates_args=())
def gemm_norm_backward_op(
    dk: list[Tensor],
    dk_scale: list[Tensor],
    dk_block: list[int],
    dv: list[Tensor],
    dv_scale: list[Tensor],
    dv_block: list[int],
    dv_mean: Tensor | None,
    w_k: list[Tensor],
    w_scale: list[Tensor],
    w_block: list[int],
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    xn: list[Tensor],
    xn_scale: list[Tensor],
    xn_block: list[int],
    offsets: Tensor | None,
    needs: list[bool],
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dnorm_weight, dw_k; a result that is not needed has no elements."""
    left, extra, right = (
        unflatten(*m, offsets) if m[0] else None for m in ((dk, dk_scale, dk_block), (dv, dv_scale, dv_block), (xn, xn_scale, xn_block))
    )
    weight = unflatten(w_k, w_scale, w_block)
    compute = reference.gemm_norm_backward
    if choose("gemm_norm_backward", x.device, backend, reasons_against(x, weight, left, extra, right)) != "reference":  # type: ignore[arg-type]
        from fused_ops.gemm_norm_backward import kernel

        compute = kernel.gemm_norm_backward  # type: ignore[assignment]
    grads = compute(left, extra, dv_mean, weight, x, norm_weight, rstd, right, offsets, *needs)  # type: ignore[arg-type]
    dtypes = (x.dtype, torch.float32, torch.float32)
    dx, dgamma, dw = (x.new_empty(0, dtype=dtype) if grad is None else grad for grad, dtype in zip(grads, dtypes, strict=True))
    return dx, dgamma, dw


@gemm_norm_backward_op.register_fake
def _(
    dk, dk_scale, dk_block, dv, dv_scale, dv_block, dv_mean, w_k, w_scale, w_block, x, norm_weight, rstd, xn, xn_scale, xn_block, offsets,
    needs, backend="auto",
):  # fmt: skip
    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        x.new_empty(norm_weight.shape if needs[1] else (0,), dtype=torch.float32),
        x.new_empty(w_k[0].shape if needs[2] else (0,), dtype=torch.float32),
    )


def _offsets_of(**named: Matrix | None) -> Tensor | None:
    """The offsets that the MXTensors share, or None; jagged and dense must not mix."""
    first_name, first = None, None
    for name, value in named.items():
        if not isinstance(value, MXTensor):
            continue
        if first is None:
            first_name, first = name, value
        elif (value.offsets is None) != (first.offsets is None):
            raise ValueError(f"{name} and {first_name} must both be jagged or both dense; one has offsets, the other has none")
    return None if first is None else first.offsets


def gemm_norm_backward(
    dk: Matrix,
    dv: Matrix | None,
    w_k: Weight,
    x: Tensor,
    norm_weight: Tensor,
    rstd: Tensor,
    xn: Matrix | None,
    *,
    dv_mean: Tensor | None = None,
    offsets: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
    backend: str = "auto",
) -> GemmNormGradients:
    """Gradients of ``k = norm(x) @ w_k.T``, ``v = norm(x)`` from ``dk`` and ``dv``, ending at the norm's input and weight.

    Args:
        dk: ``[T, N]``: MXTensor with groups that start at each sequence (or a float tensor).
        dv: ``[T, C]``: the same, or None when nothing reads ``norm(x)`` directly.
        w_k: ``[N, C]``: float tensor, MXTensor, or pair ``(hi, lo)``.
        x: ``[T, C]``: the norm's input; norm_weight ``[C]``; rstd: FP32 ``[T]`` as the forward returned it.
        xn: ``[T, C]``: the norm's output as stored, centred or not. None if ``dw_k``, which alone reads it, is not needed.
        dv_mean: FP32 ``[B, C]``: a constant per sequence that belongs to ``dv`` and was kept out of its rounding.
        offsets: taken from the MXTensors; give it when none of them is one.
        needs: which of (dx, dnorm_weight, dw_k) to compute.
        backend: ``"auto"`` (the kernels where a device has them and they serve the arguments), ``"reference"``, ``"sm90"`` or ``"sm100"``.
            The kernels add in another order; ``dnorm_weight`` and ``dw_k`` are bitwise repeatable. They round nothing but ``dx`` and, on
            Hopper, two things. Where dk and xn are MXTensors and only xn is static, ``dw_k``'s sums of 128 tokens: relative error 2^-12
            (rounding the result to BF16 costs 2^-10), a loss of up to 2^-10 where all terms have one sign. Where dk and dv are MXTensors
            and x is BF16, the sums of ``dk @ w_k``, and dv added to them, to FP16: 7e-4 of them by 384 products, 8e-4 by 512 (rounding dx
            to BF16 costs 1.7e-3); ``dnorm_weight`` is off by as much where its terms do not depend on each other.

    Returns: :class:`GemmNormGradients`. Rows of ``dx`` past ``offsets[-1]`` are 0. Formulas: ``reference``.

    Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        raise TypeError(f"x is {getattr(x, 'dtype', type(x).__name__)}; allowed are {', '.join(map(str, FLOATS))}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [tokens, columns]")
    tokens, columns = x.shape
    heads, _ = check_matrix("w_k", w_k, columns, pair=True)
    for name, matrix, width in (("dk", dk, heads), ("dv", dv, columns), ("xn", xn, columns)):
        if matrix is None and (name == "dv" or (name == "xn" and not needs[2])):
            continue
        rows, _ = check_matrix(name, matrix, width)
        if rows != tokens:
            raise ValueError(f"{name} has {rows} rows; x has {tokens}, and they must agree")
    if norm_weight.dim() != 1 or norm_weight.shape[0] != columns:
        raise ValueError(f"norm_weight has shape {list(norm_weight.shape)}; it must be [{columns}]")
    if rstd.dtype != torch.float32 or rstd.dim() != 1 or rstd.shape[0] != tokens:
        raise ValueError(f"rstd is {rstd.dtype} {list(rstd.shape)}; it must be torch.float32 [{tokens}]")
    found = _offsets_of(dk=dk, dv=dv, xn=xn)
    if any(isinstance(m, MXTensor) for m in (dk, dv, xn)):
        if offsets is not None and found is None:
            raise ValueError("offsets is given but dk, dv or xn is a dense MXTensor; quantize them with offsets")
        offsets = found
    batch = 1 if offsets is None else offsets.shape[0] - 1
    if offsets is not None:
        check_offsets(offsets, tokens, "offsets", x.device)
    if dv_mean is not None and tuple(dv_mean.shape) != (batch, columns):
        raise ValueError(f"dv_mean has shape {list(dv_mean.shape)}; it must be [{batch}, {columns}]")
    first_w = w_k[0] if isinstance(w_k, tuple) else w_k
    check_device(x.device, dk=dk, dv=dv, w_k=first_w, norm_weight=norm_weight, rstd=rstd, xn=xn, dv_mean=dv_mean)
    flat_dv, flat_xn = (([], [], []) if matrix is None else flatten(matrix) for matrix in (dv, xn))
    dx, dgamma, dw = gemm_norm_backward_op(
        *flatten(dk), *flat_dv, dv_mean, *flatten(w_k), x, norm_weight, rstd, *flat_xn, offsets, list(needs), backend
    )
    return GemmNormGradients(*(grad if need else None for grad, need in zip((dx, dgamma, dw), needs, strict=True)))
