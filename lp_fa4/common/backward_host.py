"""What the hosts of the backward kernels do alike on every architecture. Plain torch, no ``cutlass``."""

from typing import Any

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor
from lp_fa4.mx.layout import group_rows, scale_rows
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients


def check_arguments(problem: AttentionProblem, result: ForwardResult, dout: Tensor, kernels: str) -> None:
    """``ValueError`` for what no backward kernel serves; ``kernels``: whose, in words."""
    if problem.q_mean is not None:
        raise ValueError("q_mean is given; only the reference adds its scores")
    if list(dout.shape) != list(result.out.shape):
        raise ValueError(f"dout has shape {list(dout.shape)}; it must be that of the output, {list(result.out.shape)}")
    if dout.dtype != torch.bfloat16:
        raise ValueError(f"dout has dtype {dout.dtype}; the {kernels} backward takes torch.bfloat16")


def nothing_to_do(p: AttentionProblem) -> bool:
    """Whether a problem has no queries or no keys, so that every gradient is 0."""
    return p.rows == 0 or p.heads == 0 or p.tokens == 0 or p.batch == 0


def device_offsets(p: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Offsets ``[B + 1]`` of keys and of queries, one dtype, made on the device where the problem has none (so that a graph can capture
    it). Shared queries: zeros."""
    offsets_k = p.offsets_k if p.offsets_k is not None else torch.arange(2, dtype=torch.int32, device=p.device) * p.tokens
    if p.queries is None:
        assert p.offsets_q is not None
        return offsets_k, p.offsets_q.to(offsets_k.dtype)
    return offsets_k, torch.arange(p.batch + 1, dtype=offsets_k.dtype, device=p.device) * (0 if p.shared_q else p.queries)


def aligned_rows(x: Tensor) -> Tensor:
    """Rows that vector loads can read: last stride 1, other strides and the address multiples of 16 bytes. Copies if need be."""
    step = 16 // x.element_size()
    if x.stride(-1) == 1 and all(s % step == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def wrapped(codes: Tensor, scale: Tensor, p: AttentionProblem) -> MXTensor:
    """A gradient of k or v from codes ``[T, Hkv, D]`` and scale bytes of its 32 x 32 blocks (rows may be more than there are)."""
    return MXTensor.from_bytes(codes, scale[: scale_rows(p.tokens, p.offsets_k)], (32, 32), p.offsets_k, 0)


def empty_gradients(p: AttentionProblem) -> Gradients:
    """Gradients of a problem with nothing to do: zeros."""
    zeros = lambda kind, shape: torch.zeros(shape, dtype=kind, device=p.device)  # noqa: E731
    dq = zeros(torch.float32, p.q.shape)
    dv_mean = zeros(torch.float32, (p.batch, p.kv_heads, p.head_dim)) if p.centred_backward else None
    parts: list[Any] = []
    for _ in range(2):
        if p.config.grad_format == "mxfp8":
            scale = zeros(torch.uint8, (group_rows(p.tokens, p.batch), p.kv_heads, -(-p.head_dim // 32)))
            parts.append(wrapped(zeros(torch.uint8, p.k.shape), scale, p))
        else:
            parts.append(zeros(torch.bfloat16, p.k.shape))
    return Gradients(dq, parts[0], parts[1], dv_mean)
