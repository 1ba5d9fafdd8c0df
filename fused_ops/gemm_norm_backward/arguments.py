"""Arguments that the kernels of the GEMM + norm backward have in common, described for their compilation."""

from typing import Any

from fused_ops.gemm_norm_backward.config import Operand
from lp_fa4.compile import fake, symbol


def fake_operand(kind: Operand | None, tokens: Any, columns: int) -> tuple[Any, Any]:
    """A matrix ``[tokens, columns]``, stored as ``kind`` says, and its scale bytes; None for what it does not have."""
    if kind is None:
        return None, None
    matrix = fake("uint8" if kind.mx else "bfloat16", (tokens, columns))
    return matrix, fake("uint8", (symbol(), -(-columns // kind.width)), align=1, compact=True) if kind.mx else None
