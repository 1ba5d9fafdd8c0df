"""The attention operators as PyTorch's dispatcher sees them: plain tensors and flags in, plain tensors out.

FP8 payloads and scales cross as uint8. The numeric choices cross as ``AttentionConfig.key``, a string. Every operator has a fake
implementation, so that ``torch.compile`` and ``torch.export`` never run it, and none returns a tensor that shares memory with another.

Operators::

    lp_fa4::attention_forward, lp_fa4::attention_backward                    on MXFP8 operands; no autograd
    lp_fa4::flash_attention_forward, lp_fa4::flash_attention_backward        on ordinary tensors; differentiable
    lp_fa4::sequence_sums                                                    per-sequence sums
"""

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from lp_fa4 import dispatch
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor, check_on_host, scale_rows
from lp_fa4.operator import custom_op
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients

Optional = Tensor | None

_config = functools.lru_cache(maxsize=256)(AttentionConfig.from_key)
"""Read once, not at every call: 50 us of a processor's time."""

_LAYOUT_INTS = 3  # per operand: block tokens, block columns, jagged scale grid (0 or 1)


def layout_of(*tensors: MXTensor) -> list[int]:
    """Blocks and jaggedness of some MXTensors as ints, for an operator."""
    return [n for t in tensors for n in (t.block[0], t.block[1], int(t.offsets is not None))]


def _operand(codes: Tensor, scale: Tensor, layout: Sequence[int], index: int, offsets: Optional) -> MXTensor:
    tokens, columns, jagged = layout[_LAYOUT_INTS * index : _LAYOUT_INTS * (index + 1)]
    return MXTensor.from_bytes(codes, scale, (tokens, columns), offsets if jagged else None, 0)


def _pick(device: torch.device, features: dispatch.Features, backend: str, *, say: bool) -> str:
    name = dispatch.choose(device, features, backend)
    if say and backend == "auto":
        dispatch.announce(name, device, features)
    return name


def _keeps_centred(v_mean: Optional, config: AttentionConfig) -> bool:
    """Whether the centred output differs from the output and has to be kept beside it."""
    return v_mean is not None or config.save_out_dtype != torch.bfloat16


# MXFP8 operands


def _problem(
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    offsets_q: Optional,
    offsets_k: Optional,
    v_mean: Optional,
    v_sum: Optional,
    q_mean: Optional,
    mean_scores: Optional,
    layout: Sequence[int],
    shared_q: bool,
    softmax_scale: float,
    causal: bool,
    config: str,
) -> AttentionProblem:
    return AttentionProblem(
        _operand(q, q_scale, layout, 0, offsets_q),
        _operand(k, k_scale, layout, 1, offsets_k),
        _operand(v, v_scale, layout, 2, offsets_k),
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        shared_q=shared_q,
        softmax_scale=softmax_scale,
        causal=causal,
        v_mean=v_mean,
        v_sum=v_sum,
        q_mean=q_mean,
        mean_scores=mean_scores,
        config=_config(config),
    )


def problem_features(p: AttentionProblem, *, backward: bool) -> dispatch.Features:
    """What a problem asks of a backend."""
    blocks = (p.q.block, p.k.block, p.v.block)
    jagged = p.offsets_q is not None
    assert p.softmax_scale is not None
    return dispatch.Features(
        p.head_dim, p.causal, p.shared_q, jagged, p.group, p.q_mean is not None, backward, p.config, blocks, p.softmax_scale
    )


@custom_op("lp_fa4::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    offsets_q: Optional,
    offsets_k: Optional,
    v_mean: Optional,
    v_sum: Optional,
    q_mean: Optional,
    mean_scores: Optional,
    layout: Sequence[int],
    shared_q: bool,
    softmax_scale: float,
    causal: bool,
    config: str,
    backend: str,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``out, lse, centred_out, row_max, row_sum`` of :class:`ForwardResult`; ``centred_out`` is empty where it equals ``out``."""
    p = _problem(
        q, q_scale, k, k_scale, v, v_scale, offsets_q, offsets_k, v_mean, v_sum, q_mean, mean_scores,
        layout, shared_q, softmax_scale, causal, config,
    )  # fmt: skip
    check_on_host(offsets_q, q.shape[0], "offsets_q")
    check_on_host(offsets_k, k.shape[0], "offsets_k")
    name = _pick(q.device, problem_features(p, backward=backward), backend, say=True)
    result = dispatch.module(name).forward(p)
    return _without_twin(result, _keeps_centred(v_mean, p.config))


def _without_twin(result: ForwardResult, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    centred = result.centred_out if keep else result.out.new_empty(0)
    return result.out, result.lse, centred, result.row_max, result.row_sum


def _fake_result(q: Tensor, rows, v_mean: Optional, config: AttentionConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, heads, dim = q.shape
    out = q.new_empty(rows, heads, dim, dtype=torch.bfloat16)
    if _keeps_centred(v_mean, config):
        centred = q.new_empty(rows, heads, dim, dtype=config.save_out_dtype)
    else:
        centred = q.new_empty(0, dtype=torch.bfloat16)
    per_row = [q.new_empty(heads, rows, dtype=torch.float32) for _ in range(3)]
    return out, per_row[0], centred, per_row[1], per_row[2]


@attention_forward.register_fake
def _(
    q, q_scale, k, k_scale, v, v_scale, offsets_q, offsets_k, v_mean, v_sum, q_mean, mean_scores,
    layout, shared_q, softmax_scale, causal, config, *rest,
):  # fmt: skip
    batch = 1 if offsets_k is None else offsets_k.shape[0] - 1
    return _fake_result(q, batch * q.shape[0] if shared_q else q.shape[0], v_mean, _config(config))


@custom_op("lp_fa4::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Optional,
    out: Tensor,
    lse: Tensor,
    centred_out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    offsets_q: Optional,
    offsets_k: Optional,
    v_mean: Optional,
    v_sum: Optional,
    q_mean: Optional,
    mean_scores: Optional,
    layout: Sequence[int],
    shared_q: bool,
    softmax_scale: float,
    causal: bool,
    config: str,
    backend: str,
    deterministic: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``dq`` fp32, ``dk, dk_scale, dv, dv_scale`` (uint8, or bf16 with empty scales), ``dv_mean`` (empty if dv is complete)."""
    p = _problem(
        q, q_scale, k, k_scale, v, v_scale, offsets_q, offsets_k, v_mean, v_sum, q_mean, mean_scores,
        layout, shared_q, softmax_scale, causal, config,
    )  # fmt: skip
    name = _pick(q.device, problem_features(p, backward=True), backend, say=False)
    centred = centred_out if _keeps_centred(v_mean, p.config) else out
    grads = run_backward(name, p, ForwardResult(out, lse, centred, row_max, row_sum), dout, dlse, deterministic, tuple(needs))
    dk, dk_scale = _plain(grads.dk)
    dv, dv_scale = _plain(grads.dv)
    return grads.dq, dk, dk_scale, dv, dv_scale, dout.new_empty(0, dtype=torch.float32) if grads.dv_mean is None else grads.dv_mean


def run_forward(name: str, p: AttentionProblem, backward: bool, beside: object = None) -> ForwardResult:
    """A backend's forward. Where no ``backward`` follows and the backend can go without it, ``centred_out`` is the output. ``beside``: what
    the backend's ``prepare`` left to be done beside the forward."""
    choices: dict[str, object] = {} if beside is None else {"beside": beside}
    if not backward and p.v_mean is not None and _takes(name, "keep_centred", "forward"):
        choices["keep_centred"] = False
    return dispatch.module(name).forward(p, **choices)


def run_backward(
    name: str,
    p: AttentionProblem,
    result: ForwardResult,
    dout: Tensor,
    dlse: Optional,
    deterministic: bool,
    needs: tuple[bool, ...] = (True, True, True),
    **results: object,
) -> Gradients:
    """A backend's backward. Kernels take dO in BF16, and compute all three gradients whether needed or not. ``results``: what only some
    backends take (:func:`_takes`)."""
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    backend = dispatch.module(name)
    if name == "reference":
        return backend.backward(p, result, dout, deterministic=deterministic, dlse=dlse, needs=needs)
    dout = dout.to(torch.bfloat16).contiguous()
    if dlse is None:
        return backend.backward(p, result, dout, deterministic=deterministic, **results)
    if not _takes(name, "dlse"):
        raise NotImplementedError(f"a gradient of the LSE is not served by backend {name!r}; use backend='reference', or detach the LSE")
    return backend.backward(p, result, dout, deterministic=deterministic, dlse=dlse.to(torch.float32).contiguous(), **results)


@functools.cache
def _takes(name: str, argument: str, function: str = "backward") -> bool:
    """Whether a backend's backward (or its forward) has an argument of this name."""
    return argument in inspect.signature(getattr(dispatch.module(name), function)).parameters


def run_prepass(name: str, p: AttentionProblem, result: ForwardResult, dout: Tensor) -> list[Tensor]:
    """First half of a backward that comes in halves."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return dispatch.module(name).prepare_backward(p, result, dout.to(torch.bfloat16).contiguous(), deterministic=deterministic)


def finish_backward(name: str, p: AttentionProblem, prepared: list[Tensor]) -> Gradients:
    """Second half of a backward that comes in halves."""
    return dispatch.module(name).finish_backward(p, prepared, deterministic=torch.are_deterministic_algorithms_enabled())


def _plain(x: MXTensor | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(x, Tensor):
        return x, x.new_empty(0, dtype=torch.uint8)
    return x.codes, x.scale_bytes


@attention_backward.register_fake
def _(
    dout, dlse, out, lse, centred_out, row_max, row_sum,
    q, q_scale, k, k_scale, v, v_scale, offsets_q, offsets_k, v_mean, v_sum, q_mean, mean_scores,
    layout, shared_q, softmax_scale, causal, config, *rest,
):  # fmt: skip
    cfg = _config(config)
    tokens, heads, dim = k.shape
    dq = q.new_empty(q.shape, dtype=torch.float32)
    if cfg.grad_format == "bf16":
        grads = [t for _ in range(2) for t in (k.new_empty(k.shape, dtype=torch.bfloat16), k.new_empty(0))]
    else:
        shape = (scale_rows(tokens, offsets_k), heads, dim // cfg.grad_block[1])
        grads = [t for _ in range(2) for t in (k.new_empty(k.shape), k.new_empty(shape))]
    batch = 1 if offsets_k is None else offsets_k.shape[0] - 1
    mean = (batch, heads, dim) if cfg.center_p and cfg.center_p_backward and cfg.fold_l_into_do and not causal else (0,)
    return dq, *grads, q.new_empty(mean, dtype=torch.float32)


@custom_op("lp_fa4::sequence_sums", mutates_args=())
def sequence_sums(x: Tensor, offsets: Optional) -> Tensor:
    """Sum of each sequence's rows: ``x [T, ...]`` to fp32 ``[B, ...]``."""
    return dispatch.module("reference").sequence_sums(x, offsets)


@sequence_sums.register_fake
def _(x, offsets):
    batch = 1 if offsets is None else offsets.shape[0] - 1
    return x.new_empty(batch, *x.shape[1:], dtype=torch.float32)


# Ordinary tensors


def _drop_in_block(name: str, head_dim: int) -> tuple[int, int]:
    """Scale blocks that a backend likes best. Hopper has no block-scaled MMA: one exponent per 128-token tile and head costs its loop
    nothing, and E4M3's error does not depend on the block's shape."""
    return (128, head_dim) if name == "sm90" else (32, 32)


def _flash_features(q: Tensor, k: Tensor, causal: bool, config: str, backward: bool, softmax_scale: float) -> dispatch.Features:
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    cfg = _config(config)
    return dispatch.Features(q.shape[2], causal, False, True, group, backward=backward, config=cfg, softmax_scale=softmax_scale)


@custom_op("lp_fa4::flash_attention_forward", mutates_args=())
def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    queries: int,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    config: str,
    backend: str,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Centre, quantize, attend. ``q [N, H, D]``, ``k, v [T, Hkv, D]``, any float dtypes and strides. ``queries``: of every sequence,
    or, where they are jagged, -1, less their largest number if that is known.

    Returns ``out`` (q's dtype), ``lse``, and what the backward needs: ``centred_out`` (empty unless ``backward``), ``row_max, row_sum``;
    codes and scales of q, k, v; and ``k_mean, v_mean, v_sum`` (empty where nothing was centred).
    """
    cfg = _config(config)
    check_on_host(offsets_q, q.shape[0], "cu_seqlens_q")
    check_on_host(offsets_k, k.shape[0], "cu_seqlens_k")
    name = _pick(q.device, _flash_features(q, k, causal, config, backward, softmax_scale), backend, say=True)
    impl = dispatch.module(name)
    block = _drop_in_block(name, q.shape[2])
    if name != "reference" and hasattr(impl, "prepare"):
        more = dict(equal=queries >= 0) if _takes(name, "equal", "prepare") else {}
        made = impl.prepare(q, k, v, offsets_q, offsets_k, causal, cfg, block, softmax_scale, **more)
        shift = made.lse_shift
    else:
        made = dispatch.module("reference").prepare(q, k, v, offsets_q, offsets_k, causal, cfg, block)
        shift = None if made.k_mean is None else softmax_scale * _row_dots(q, made.k_mean, offsets_q)
    p = AttentionProblem(
        made.q,
        made.k,
        made.v,
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        softmax_scale=softmax_scale,
        causal=causal,
        v_mean=made.v_mean,
        v_sum=made.v_sum,
        queries_each=None if queries < 0 else queries,
        queries_most=-1 - queries if queries < -1 else None,
        config=cfg,
    )
    result = run_forward(name, p, backward, getattr(made, "beside", None))
    lse = result.lse
    if shift is not None:
        lse = lse + shift
    means = [q.new_empty(0, dtype=torch.float32) if m is None else m for m in (made.k_mean, made.v_mean, made.v_sum)]
    codes = [t for mx in (made.q, made.k, made.v) for t in (mx.codes, mx.scale_bytes)]
    keep = backward and (_keeps_centred(made.v_mean, cfg) or q.dtype != torch.bfloat16)
    centred = result.centred_out if keep else q.new_empty(0)
    out = _rounded_out(result.out, q.dtype, v.dtype)
    return out, lse, centred, result.row_max, result.row_sum, *codes, *means  # type: ignore[return-value]


def _rounded_out(out: Tensor, dtype: torch.dtype, v_dtype: torch.dtype) -> Tensor:
    """A kernel's BF16 output in the dtype that is returned.

    An average of FP16 values fits FP16, but BF16 and E4M3 may round one near the end, from 61,440 up, to 65,536, which does not: it becomes
    the largest that there is, not inf. NaN stays. Of wider values an output past FP16 is past FP16.
    """
    if dtype == torch.float16 and v_dtype == torch.float16:
        end = torch.finfo(torch.float16).max
        out = out.to(torch.float32).clamp(-end, end)  # 65504 is no BF16 number
    return out.to(dtype)


def _row_sequences(offsets_q: Tensor, rows: int) -> Tensor:
    """Sequence of each query row; rows past the last offset get the last sequence (their LSE is -inf whatever is added)."""
    index = torch.searchsorted(offsets_q[1:].contiguous(), torch.arange(rows, device=offsets_q.device, dtype=offsets_q.dtype), right=True)
    return index.clamp(max=offsets_q.shape[0] - 2)


def _row_dots(q: Tensor, k_mean: Tensor, offsets_q: Tensor) -> Tensor:
    """``q_i . k_mean[sequence of i]``, fp32 ``[H, N]``."""
    rows, heads, _ = q.shape
    if rows == 0 or k_mean.shape[0] == 0:
        return q.new_zeros(heads, rows, dtype=torch.float32)
    mean = k_mean[_row_sequences(offsets_q, rows)].repeat_interleave(heads // k_mean.shape[1], 1)
    inside = (torch.arange(rows, device=q.device) < offsets_q[-1])[:, None]
    return torch.where(inside, (q.to(torch.float32) * mean).sum(-1), 0.0).t().contiguous()


@flash_attention_forward.register_fake
def _(q, k, v, offsets_q, offsets_k, queries, softmax_scale, causal, deterministic, config, backend, backward):
    cfg = _config(config)
    name = _pick(q.device, _flash_features(q, k, causal, config, backward, softmax_scale), backend, say=False)
    block = _drop_in_block(name, q.shape[2])
    rows, heads, dim = q.shape
    centred = cfg.center_p and not causal
    codes = []
    for x, offsets in ((q, offsets_q), (k, offsets_k), (v, offsets_k)):
        codes.append(x.new_empty(x.shape, dtype=torch.uint8))
        codes.append(x.new_empty((scale_rows(x.shape[0], offsets), x.shape[1], dim // block[1]), dtype=torch.uint8))
    mean_shape = (offsets_k.shape[0] - 1, k.shape[1], dim) if centred else (0,)
    means = [q.new_empty(mean_shape, dtype=torch.float32) for _ in range(3)]
    keep = backward and (centred or cfg.save_out_dtype != torch.bfloat16 or q.dtype != torch.bfloat16)
    saved = q.new_empty((rows, heads, dim), dtype=cfg.save_out_dtype) if keep else q.new_empty(0)
    per_row = [q.new_empty((heads, rows), dtype=torch.float32) for _ in range(3)]
    return q.new_empty((rows, heads, dim)), per_row[0], saved, per_row[1], per_row[2], *codes, *means


@custom_op("lp_fa4::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    dout: Tensor,
    dlse: Optional,
    out: Tensor,
    centred_out: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v: Tensor,
    v_scale: Tensor,
    k_mean: Tensor,
    v_mean: Tensor,
    v_sum: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    queries: int,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    config: str,
    backend: str,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv`` in the dtypes given. An operand that is not needed comes back 0."""
    cfg = _config(config)
    name = _pick(q.device, _flash_features(q, k, causal, config, True, softmax_scale), backend, say=False)
    block = _drop_in_block(name, q.shape[2])
    centred = v_mean.dim() == 3
    p = AttentionProblem(
        MXTensor.from_bytes(q, q_scale, block, offsets_q, 0),
        MXTensor.from_bytes(k, k_scale, block, offsets_k, 0),
        MXTensor.from_bytes(v, v_scale, block, offsets_k, 0),
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        softmax_scale=softmax_scale,
        causal=causal,
        v_mean=v_mean if centred else None,
        v_sum=v_sum if centred else None,
        queries_each=None if queries < 0 else queries,
        queries_most=-1 - queries if queries < -1 else None,
        config=cfg,
    )
    saved = centred_out if centred_out.dim() == 3 else out
    shifted = dlse is not None and k_mean.dim() == 3 and q.shape[0] > 0 and k_mean.shape[0] > 0 and needs[0]
    results: dict[str, object] = {}
    if _takes(name, "whole"):  # no pass over dQ or dV afterwards
        results = dict(whole=True, dq_dtype=torch.bfloat16 if q_dtype == torch.bfloat16 and not shifted else torch.float32)
    kept = ForwardResult(out, row_sum, saved, row_max, row_sum)
    grads = run_backward(name, p, kept, dout, dlse, deterministic, tuple(needs), **results)
    dq = grads.dq
    if shifted:
        assert dlse is not None
        # lse = lse of the centred keys + softmax_scale * q . k_mean
        mean = k_mean[_row_sequences(offsets_q, q.shape[0])].repeat_interleave(p.group, 1)
        sees = torch.isneginf(row_max).logical_not()
        dq = dq + torch.where(sees, dlse, 0.0).t()[..., None] * mean * softmax_scale
    dk, dv = (x if isinstance(x, Tensor) else x.dequantize() for x in (grads.dk, grads.dv))
    if grads.dv_mean is not None and needs[2]:
        dv = _own(dv, v_dtype) if dv.dtype == v_dtype else dv.to(torch.float32)
        _add_rows(dv, grads.dv_mean, offsets_k)
    return tuple(_own(x, t) for x, t in zip((dq, dk, dv), (q_dtype, k_dtype, v_dtype), strict=True))  # type: ignore[return-value]


def _own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, contiguous and alone in its memory: no output of an operator may share it with an input or another output. What a
    backward has just allocated is not copied."""
    whole = x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if x.dtype == dtype and whole and x.is_contiguous() else torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _add_rows(x: Tensor, mean: Tensor, offsets: Tensor) -> None:
    """Adds to ``x [T, ...]``, in place, its sequence's row of the FP32 ``mean [B, ...]``: a sum in FP32, rounded once to x's dtype. Rows
    past ``offsets[-1]`` stay as they are."""
    if x.shape[0] == 0 or mean.shape[0] == 0:
        return
    sequence = torch.searchsorted(offsets[1:].contiguous(), torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype), right=True)
    x += torch.cat([mean, torch.zeros_like(mean[:1])])[sequence]


@flash_attention_backward.register_fake
def _(dout, dlse, out, centred_out, row_max, row_sum, q, q_scale, k, k_scale, v, *rest):
    return tuple(x.new_empty(x.shape, dtype=t) for x, t in zip((q, k, v), rest[-4:-1], strict=True))


def _flash_setup(ctx, inputs, output):
    q, k, v, offsets_q, offsets_k, queries, softmax_scale, causal, deterministic, config, backend, _ = inputs
    out, _, centred, row_max, row_sum, *kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out if centred.dim() != 3 else out.new_empty(0), centred, row_max, row_sum, *kept, offsets_q, offsets_k)
    ctx.scalars = (queries, softmax_scale, causal, deterministic, config, backend)
    ctx.dtypes = [q.dtype, k.dtype, v.dtype]
    ctx.out_shape, ctx.out_dtype = out.shape, out.dtype


def _flash_backward(ctx, dout, dlse, *unused):
    none = (None,) * 12
    if dout is None and dlse is None:
        return none
    saved = ctx.saved_tensors
    if dout is None:
        dout = saved[2].new_zeros(ctx.out_shape, dtype=ctx.out_dtype)
    needs = list(ctx.needs_input_grad[:3])
    out, centred, row_max, row_sum, *kept, offsets_q, offsets_k = saved
    out = out if out.dim() == 3 else centred  # only its shape is read where the centred output is kept
    grads = flash_attention_backward(
        dout, dlse, out, centred, row_max, row_sum, *kept, offsets_q, offsets_k, *ctx.scalars, *ctx.dtypes, needs
    )
    return *(g if n else None for g, n in zip(grads, needs, strict=True)), *none[3:]


flash_attention_forward.register_autograd(_flash_backward, setup_context=_flash_setup)
