"""Arguments that the kernels of the GEMM + norm backward have in common, described for their compilation."""

from typing import Any

from fused_ops.gemm_norm_backward.config import Operand, WeightSpec
from lp_fa4.compile import fake, fake_offsets, symbol


def fake_operand(kind: Operand | None, tokens: Any, columns: int) -> tuple[Any, Any]:
    """A matrix ``[tokens, columns]``, stored as ``kind`` says, and its scale bytes; None for what it does not have."""
    if kind is None:
        return None, None
    matrix = fake("uint8" if kind.mx else "bfloat16", (tokens, columns))
    return matrix, fake("uint8", (symbol(), -(-columns // kind.width)), align=1, compact=True) if kind.mx else None


def fake_weight_gradient(offsets_dtype: str | None, spec: WeightSpec) -> tuple[Any, ...]:
    """What a weight's gradient takes, in order:

    dk: uint8 or bf16 ``[T, rows]``; dk_scale: uint8 ``[groups or 1, blocks]`` or None; xn, xn_scale: the same of ``columns``; offsets or
    None; parts: fp32 ``[splits, rows, columns]``.
    """
    tokens = symbol()
    operands = *fake_operand(spec.dk, tokens, spec.rows), *fake_operand(spec.xn, tokens, spec.columns)
    return *operands, fake_offsets(offsets_dtype), fake("float32", (symbol(), spec.rows, spec.columns), compact=True)
