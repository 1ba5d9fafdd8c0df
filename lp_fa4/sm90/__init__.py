"""Kernels for Hopper (sm_90a). See ``README.md`` in this folder for the design and the tuning log.

This module imports nothing heavy; ``cutlass`` is loaded by the first call that needs a kernel.
"""

import torch
from torch import Tensor

from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients

__all__ = ["backward", "finish_backward", "forward", "prepare", "prepare_backward", "unsupported", "workspaces"]


def unsupported(features) -> str:
    """Why these kernels cannot serve a call with ``lp_fa4.dispatch.Features``, "" if they can."""
    from lp_fa4.sm90.backward_host import reason_against_backward
    from lp_fa4.sm90.forward_host import reason_against

    return reason_against(features) or (reason_against_backward(features.head_dim, features.config) if features.backward else "")


def forward(problem: AttentionProblem, *, keep_centred: bool = True, beside=None) -> ForwardResult:
    """Attention forward; signature and results of ``lp_fa4.reference.forward``. ``keep_centred``: whether a backward reads the result; if
    not, ``centred_out`` may be ``out``. ``beside``: the quantize pass of ``prepare``, if that left it to run beside the attention."""
    from lp_fa4.sm90.forward_host import forward as run

    return run(problem, keep_centred=keep_centred, beside=beside)


def backward(
    problem: AttentionProblem,
    result: ForwardResult,
    dout: Tensor,
    *,
    deterministic: bool = False,
    dlse: Tensor | None = None,
    dq_dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> Gradients:
    """Attention backward; signature and results of ``lp_fa4.reference.backward``, dout in BF16. ``dq_dtype``: fp32 or bf16. ``whole``: dv
    has its mean part and ``dv_mean`` is None."""
    from lp_fa4.sm90.backward_host import backward as run

    return run(problem, result, dout, deterministic=deterministic, dlse=dlse, dq_dtype=dq_dtype, whole=whole)


def prepare_backward(
    problem: AttentionProblem, result: ForwardResult, dout: Tensor, *, deterministic: bool = False, dlse: Tensor | None = None
) -> list[Tensor]:
    """The half of ``backward`` that reads ``result`` and ``dout``; they may be freed before ``finish_backward``."""
    from lp_fa4.sm90.backward_host import prepare_backward as run

    return run(problem, result, dout, deterministic=deterministic, dlse=dlse)


def workspaces(problem: AttentionProblem, *, deterministic: bool = False) -> list[Tensor]:
    """What ``prepare_backward`` returns, uninitialised: shapes for a trace."""
    from lp_fa4.sm90.backward_host import workspaces as run

    return run(problem, deterministic=deterministic)


def finish_backward(problem: AttentionProblem, prepared: list[Tensor], *, deterministic: bool = False) -> Gradients:
    """The other half of ``backward``."""
    from lp_fa4.sm90.backward_host import finish_backward as run

    return run(problem, prepared, deterministic=deterministic)


def prepare(q, k, v, offsets_q, offsets_k, causal, config, block, softmax_scale, equal=False):
    """Centre and quantize ordinary tensors; see ``lp_fa4.sm90.preparation.prepare``."""
    from lp_fa4.sm90.preparation import prepare as run

    return run(q, k, v, offsets_q, offsets_k, causal, config, block, softmax_scale, equal)
