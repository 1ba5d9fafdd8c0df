"""Public attention functions.

* :func:`flash_attn_func`, :func:`flash_attn_varlen_func`: flash_attn's signatures on ordinary tensors; MXFP8 inside, forward and backward.
* :func:`mx_attention`, :func:`mx_attention_backward`: on MXFP8 operands that someone else produced.
* :func:`is_supported`: what runs where, in words.

``backend="auto"`` takes the best backend for the device and says once which; a backend asked for by name serves or raises.
"""

import math

import torch
from torch import Tensor

from lp_fa4 import ops
from lp_fa4.config import DEFAULT, DROP_IN, DROP_IN_WITH_LSE, AttentionConfig
from lp_fa4.dispatch import is_supported
from lp_fa4.mx import MXTensor, check_offsets
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients, check_head_dim, check_softmax_scale

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "is_supported", "mx_attention", "mx_attention_backward"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def mx_attention(
    q: MXTensor,
    k: MXTensor,
    v: MXTensor,
    *,
    offsets_k: Tensor | None = None,
    offsets_q: Tensor | None = None,
    shared_q: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    config: AttentionConfig | None = None,
    v_mean: Tensor | None = None,
    v_sum: Tensor | None = None,
    q_mean: Tensor | None = None,
    mean_scores: Tensor | None = None,
    validate: bool = False,
    return_result: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, ForwardResult]:
    """``softmax(softmax_scale * q k^T) v`` of every sequence, on MXFP8 operands.

    Args:
        q: ``[B*Q, H, D]`` dense, ``[N, H, D]`` with offsets_q, or ``[Q, H, D]`` with shared_q. k, v: ``[T, Hkv, D]``; T may exceed
            offsets_k[-1].
        offsets_k, offsets_q: int32 or int64 ``[B + 1]``; default the operands' own; neither: one sequence.
        softmax_scale: default ``1 / sqrt(D)``. causal: aligned at the ends of queries and keys.
        deterministic: for the backward; ``torch.use_deterministic_algorithms(True)`` counts as well.
        config: numeric choices, default :data:`lp_fa4.config.DEFAULT`.
        v_mean: fp32 ``[B, Hkv, D]``, what was subtracted from V, added to the output. v_sum: fp32 ``[B, Hkv, D]``, sum over keys of the
            unrounded V that was quantized; where it is needed and not given it is taken from the payload. q_mean, mean_scores: Q
            smoothing, see :class:`AttentionProblem`.
        validate: also check the values of the offsets (reads them on the host).
        return_result: also return the :class:`ForwardResult` that :func:`mx_attention_backward` needs.

    Returns: ``out`` bf16 ``[B*Q or N, H, D]`` and ``lse`` fp32 ``[H, B*Q or N]``, natural logarithm. A row that sees no key is 0, lse -inf.
    A value that is not finite makes its own sequence's rows NaN and no other's. No gradient flows through MXFP8 operands.

    Raises: ``ValueError`` or ``TypeError`` naming the argument, its value and what is allowed.
    """
    problem = _make_problem(
        q, k, v, offsets_k, offsets_q, shared_q, softmax_scale, causal, config, v_mean, v_sum, q_mean, mean_scores, validate
    )
    del deterministic  # the forward always is
    out, lse, centred, row_max, row_sum = ops.attention_forward(*_arguments(problem), backend, return_result)
    if not return_result:
        return out, lse
    return out, lse, ForwardResult(out, lse, centred if centred.dim() == 3 else out, row_max, row_sum)


def mx_attention_backward(
    dout: Tensor,
    result: ForwardResult,
    q: MXTensor,
    k: MXTensor,
    v: MXTensor,
    *,
    offsets_k: Tensor | None = None,
    offsets_q: Tensor | None = None,
    shared_q: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
    config: AttentionConfig | None = None,
    v_mean: Tensor | None = None,
    v_sum: Tensor | None = None,
    q_mean: Tensor | None = None,
    mean_scores: Tensor | None = None,
    dlse: Tensor | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """Gradients of ``sum(dout * out)`` (and ``sum(dlse * lse)``) for the call that gave ``result``; the other arguments as there.

    ``dout``: like the output. ``dlse``: fp32 like the LSE, or None. ``needs``: whether q, k and v want theirs; the others' are 0.
    ``deterministic``: bits that repeat, at the price of more dQ buffers where queries are shared.

    Returns: :class:`Gradients`: ``dq`` fp32 like q (summed over sequences if shared), ``dk`` and ``dv`` MXFP8 with sequence-local groups or
    bf16 by ``config.grad_format``, and ``dv_mean``, the part of dV that is the same for every key of a sequence, or None.
    """
    problem = _make_problem(
        q, k, v, offsets_k, offsets_q, shared_q, softmax_scale, causal, config, v_mean, v_sum, q_mean, mean_scores, False
    )
    if list(dout.shape) != list(result.out.shape):
        raise ValueError(f"dout has shape {list(dout.shape)}; it must be that of the output, {list(result.out.shape)}")
    centred = result.centred_out if result.centred_out is not result.out else result.out.new_empty(0)
    dq, dk, dk_scale, dv, dv_scale, dv_mean = ops.attention_backward(
        dout, dlse, result.out, result.lse, centred, result.row_max, result.row_sum, *_arguments(problem), backend, deterministic, needs
    )
    block, offsets = problem.config.grad_block, problem.offsets_k

    def whole(codes: Tensor, scale: Tensor) -> MXTensor | Tensor:
        return codes if codes.dtype == torch.bfloat16 else MXTensor.from_bytes(codes, scale, block, offsets, 0)

    return Gradients(dq, whole(dk, dk_scale), whole(dv, dv_scale), dv_mean if dv_mean.dim() == 3 else None)


def _make_problem(
    q, k, v, offsets_k, offsets_q, shared_q, softmax_scale, causal, config, v_mean, v_sum, q_mean, mean_scores, validate
) -> AttentionProblem:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, MXTensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}; mx_attention takes MXTensors (quantize_mx makes them), flash_attn_func ordinary tensors"
            )
    config = DEFAULT if config is None else config
    if config.center_p and not causal and v_sum is None:
        offsets = offsets_k if offsets_k is not None else k.offsets if k.offsets is not None else v.offsets
        v_sum = ops.sequence_sums(v.dequantize(), offsets)
    problem = AttentionProblem(
        q,
        k,
        v,
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        shared_q=shared_q,
        softmax_scale=softmax_scale,
        causal=causal,
        v_mean=v_mean,
        v_sum=v_sum,
        q_mean=q_mean,
        mean_scores=mean_scores,
        config=config,
    )
    if validate:
        problem.validate()
    return problem


def _arguments(p: AttentionProblem) -> tuple:
    """A problem as operator arguments."""
    tensors = (p.q.codes, p.q.scale_bytes, p.k.codes, p.k.scale_bytes, p.v.codes, p.v.scale_bytes)
    sums = (p.offsets_q, p.offsets_k, p.v_mean, p.v_sum, p.q_mean, p.mean_scores)
    return *tensors, *sums, ops.layout_of(p.q, p.k, p.v), p.shared_q, p.softmax_scale, p.causal, p.config.key


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
    config: AttentionConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash_attn's function of this name, computed in MXFP8. Differentiable.

    Args:
        q: ``[B, Sq, H, D]``; k, v: ``[B, Sk, Hkv, D]``, H a multiple of Hkv. float32, float16 or bfloat16, each its own; any strides. D: a
            multiple of 32 up to 256. Causal masks are aligned at the ends of queries and keys.
        softmax_scale: default ``1 / sqrt(D)``. deterministic: gradients that repeat bit for bit, as under
            ``torch.use_deterministic_algorithms(True)``; the output always does.
        dropout_p, window_size, softcap, alibi_slopes: only the defaults are served (and ``window_size=(-1, 0)``, which is causal).
        return_attn_probs: also return the LSE, fp32 ``[B, H, Sq]`` (differentiable), and an empty tensor (flash_attn fills it under dropout
            only).
        backend, config: not in flash_attn; see :func:`mx_attention`. Default config :data:`lp_fa4.config.DROP_IN`, or
            :data:`lp_fa4.config.DROP_IN_WITH_LSE` with return_attn_probs.

    Returns: ``[B, Sq, H, D]`` in q's dtype (rounded through bfloat16). Gradients in each operand's dtype. Rows that see no key are 0.

    Raises: ``NotImplementedError`` for what flash_attn has and this does not, ``ValueError`` or ``TypeError`` for the rest, naming the
    argument, its value and what is allowed.
    """
    _check_axes(q, k, v, "batch", "tokens", "heads", "head_dim")
    batch, queries = q.shape[:2]
    if k.shape != v.shape:
        raise ValueError(f"v has shape {list(v.shape)} but k has {list(k.shape)}; they must be equal")
    if k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]} but q has {batch}; they must be equal")
    causal = _check_flash(q, k, v, dropout_p, causal, window_size, softcap, alibi_slopes)
    offsets_q, offsets_k = _equal_offsets(batch, queries, k.shape[1], q.device)
    out, lse = _flash(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        offsets_q,
        offsets_k,
        softmax_scale,
        causal,
        deterministic,
        backend,
        config,
        return_attn_probs,
        queries,
    )
    out = out.reshape(q.shape)
    if not return_attn_probs:
        return out
    return out, lse.reshape(q.shape[2], batch, queries).transpose(0, 1).contiguous(), q.new_empty(0)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    backend: str = "auto",
    config: AttentionConfig | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """flash_attn's function of this name, computed in MXFP8. Differentiable.

    Args:
        q: ``[N, H, D]``; k, v: ``[T, Hkv, D]``; dtypes, strides and D as in :func:`flash_attn_func`. Rows past the last offset are never
            read, their output is 0 and their gradients are 0.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[B + 1]`` on the operands' device. max_seqlen_q, max_seqlen_k: ints. The first is a
            hint, which costs time where it is too small; the second is accepted and not needed.
        block_table: only None is served. Others as in :func:`flash_attn_func`.
        validate: also check the values of the offsets (reads them on the host).

    Returns: ``[N, H, D]`` in q's dtype; with return_attn_probs also the LSE, fp32 ``[H, N]``, and an empty tensor.

    Raises: as :func:`flash_attn_func`.
    """
    _check_axes(q, k, v, "tokens", "heads", "head_dim")
    if block_table is not None:
        raise NotImplementedError(f"block_table is a tensor of shape {list(block_table.shape)}; only None is served (keys are not paged)")
    if k.shape != v.shape:
        raise ValueError(f"v has shape {list(v.shape)} but k has {list(k.shape)}; they must be equal")
    causal = _check_flash(q, k, v, dropout_p, causal, window_size, softcap, alibi_slopes)
    check_offsets(cu_seqlens_q, q.shape[0], "cu_seqlens_q", q.device, validate=validate)
    check_offsets(cu_seqlens_k, k.shape[0], "cu_seqlens_k", q.device, validate=validate)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} elements but cu_seqlens_k has {cu_seqlens_k.shape[0]}; they must be equal"
        )
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n < 0:
            raise ValueError(f"{name} is {n}; it must be at least 0")
    choices = (softmax_scale, causal, deterministic, backend, config, return_attn_probs)
    out, lse = _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, *choices, -1 - max_seqlen_q)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _check_axes(q: Tensor, k: Tensor, v: Tensor, *axes: str) -> None:
    """Refuse, in words, what is no tensor with these axes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            hint = "; mx_attention takes MXTensors" if isinstance(x, MXTensor) else ""
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor{hint}")
        if x.dim() != len(axes):
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be [{', '.join(axes)}]")


def _equal_offsets(batch: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 offsets of ``batch`` sequences of ``queries`` and of ``keys`` rows, made on the device; one launch where they are equal."""
    if torch.compiler.is_compiling() or min(queries, keys) == 0:  # sizes that a graph must not depend on; a step of 0 is none
        each = torch.arange(batch + 1, device=device, dtype=torch.int64)
        return each * queries, each * keys
    offsets = torch.arange(0, (batch + 1) * queries, queries, device=device, dtype=torch.int64)
    return offsets, offsets if queries == keys else torch.arange(0, (batch + 1) * keys, keys, device=device, dtype=torch.int64)


def _flash(
    q, k, v, offsets_q, offsets_k, softmax_scale, causal, deterministic, backend, config, with_lse, queries=-1
) -> tuple[Tensor, Tensor]:
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    check_softmax_scale(scale)
    if config is None:
        config = DROP_IN_WITH_LSE if with_lse else DROP_IN
    backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    made = ops.flash_attention_forward(q, k, v, offsets_q, offsets_k, queries, scale, causal, deterministic, config.key, backend, backward)
    return made[0], made[1]


def _check_flash(q, k, v, dropout_p, causal, window_size, softcap, alibi_slopes) -> bool:
    """Checks that both drop-ins share; returns whether the mask is causal."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} has dtype {x.dtype}; allowed are {', '.join(map(str, FLOATS))}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; all operands must be on one device")
    check_head_dim(q.shape[-1])
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}; they must be equal")
    if k.shape[-2] < 1 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads and k has {k.shape[-2]}; the first must be a multiple of the second")
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is {dropout_p}; only 0.0 is served")
    if softcap != 0.0:
        raise NotImplementedError(f"softcap is {softcap}; only 0.0 is served")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes is given; only None is served")
    window = tuple(-1 if n is None else n for n in window_size)
    if window == (-1, 0) or (causal and window == (-1, -1)):
        return True
    if window != (-1, -1):
        raise NotImplementedError(f"window_size is {tuple(window_size)}; only (-1, -1), no window, and (-1, 0), causal, are served")
    return False
