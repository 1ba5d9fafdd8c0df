"""The key/value side of PMA in BF16: plain PyTorch around one attention operator, flash-attn-4 where a GPU serves it, SDPA elsewhere."""

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lp_fa4.mx import check_offsets
from lp_fa4.operator import custom_op

log = logging.getLogger(__name__)


def _bounds(offsets: Tensor) -> list[tuple[int, int, int]]:
    host = offsets.tolist()
    return [(b, *pair) for b, pair in enumerate(pairwise(host)) if pair[1] > pair[0]]


@custom_op("modules::jagged_attention", mutates_args=())
def jagged_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """BF16 attention of shared ``q [Q, H, D]`` over jagged ``k``, ``v`` ``[T, H, D]``: ``[B, Q, H, D]``, 0 where there is no key.

    One SDPA call a sequence, which reads the offsets on the host: for CPUs, and GPUs that flash-attn-4 does not serve.
    """
    check_offsets(offsets, k.shape[0], validate=True)
    out = q.new_zeros(offsets.shape[0] - 1, *q.shape)
    query = q.transpose(0, 1)[None]
    for b, start, stop in _bounds(offsets):
        key, value = (t[start:stop].transpose(0, 1)[None] for t in (k, v))
        out[b] = F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
    return out


@jagged_attention.register_fake
def _(q, k, v, offsets):
    return q.new_empty((offsets.shape[0] - 1, *q.shape))


@custom_op("modules::jagged_attention_backward", mutates_args=())
def jagged_attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v at flash-attention's rounding points: operands, P and dS in their dtype, sums in FP32."""
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    dq = torch.zeros_like(q, dtype=torch.float32).transpose(0, 1)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    query = q.transpose(0, 1).to(torch.float32)

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).to(torch.float32)

    for b, start, stop in _bounds(offsets):
        key, value = (t[start:stop].transpose(0, 1).to(torch.float32) for t in (k, v))
        grad = dout[b].transpose(0, 1).to(torch.float32)
        p = torch.softmax(query @ key.transpose(1, 2) * scale, dim=-1)
        dp = grad @ value.transpose(1, 2)
        ds = rounded(p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * scale)
        dq += ds @ key
        dk[start:stop] = (ds.transpose(1, 2) @ query).transpose(0, 1).to(dtype)
        dv[start:stop] = (rounded(p).transpose(1, 2) @ grad).transpose(0, 1).to(dtype)
    return dq.transpose(0, 1).to(dtype).contiguous(), dk, dv


@jagged_attention_backward.register_fake
def _(dout, q, k, v, offsets):
    return q.new_empty(q.shape), torch.empty_like(k), torch.empty_like(v)


def _jagged_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _jagged_backward(ctx, dout):
    return (*torch.ops.modules.jagged_attention_backward(dout, *ctx.saved_tensors), None)


jagged_attention.register_autograd(_jagged_backward, setup_context=_jagged_setup)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _fa4_rows(rows: Tensor, k: Tensor, v: Tensor, offsets: Tensor, queries: int) -> Tensor:
    """flash-attn-4 on ``rows [B * Q, H, D]``; differentiable by its own autograd."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    starts = torch.arange(offsets.shape[0], device=rows.device, dtype=torch.int32) * queries
    out = flash_attn_varlen_func(rows, k, v, cu_seqlens_q=starts, cu_seqlens_k=offsets.to(torch.int32), max_seqlen_q=queries)
    return out[0] if isinstance(out, tuple) else out


@custom_op("modules::fa4_attention", mutates_args=())
def fa4_attention(rows: Tensor, k: Tensor, v: Tensor, offsets: Tensor, queries: int) -> Tensor:
    """flash-attn-4 as one opaque operator for ``torch.compile`` and ``torch.export``, which cannot trace its launcher."""
    return _fa4_rows(rows, k, v, offsets, queries)


@fa4_attention.register_fake
def _(rows, k, v, offsets, queries):
    return torch.empty_like(rows)


@custom_op("modules::fa4_attention_backward", mutates_args=())
def fa4_attention_backward(
    dout: Tensor, rows: Tensor, k: Tensor, v: Tensor, offsets: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients. The public function gives them only through autograd, so the forward runs again."""
    with torch.enable_grad():
        rows, k, v = (t.detach().requires_grad_() for t in (rows, k, v))
        out = _fa4_rows(rows, k, v, offsets, queries)
    dq, dk, dv = torch.autograd.grad(out, (rows, k, v), dout)
    return dq, dk, dv


@fa4_attention_backward.register_fake
def _(dout, rows, k, v, offsets, queries):
    return torch.empty_like(rows), torch.empty_like(k), torch.empty_like(v)


def _fa4_setup(ctx, inputs, output):
    *tensors, ctx.queries = inputs
    ctx.save_for_backward(*tensors)


def _fa4_backward(ctx, dout):
    return (*torch.ops.modules.fa4_attention_backward(dout, *ctx.saved_tensors, ctx.queries), None, None)


fa4_attention.register_autograd(_fa4_backward, setup_context=_fa4_setup)


def _attend_fa4(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    batch, queries = offsets.shape[0] - 1, q.shape[0]
    if batch == 0 or k.shape[0] == 0:  # nothing to launch on: zeros that stay attached to every input
        return q.new_zeros(batch, *q.shape) + 0 * (q.sum() + k.sum() + v.sum())
    rows = q.expand(batch, *q.shape).reshape(batch * queries, *q.shape[1:])
    # Eager calls go to the public function itself: its backward has what its forward saved.
    attend = fa4_attention if torch.compiler.is_compiling() else _fa4_rows
    out = attend(rows, k, v, offsets, queries).unflatten(0, (batch, queries))
    # flash-attn-4 leaves the rows of a sample without keys undefined; here they are 0.
    return torch.where((offsets[1:] > offsets[:-1])[:, None, None, None], out, 0.0)


@torch.compiler.assume_constant_result
def _bf16_choice(kind: str, index: int | None, backend: str) -> str:
    return _bf16_choice_once(kind, index, backend)


@lru_cache(maxsize=32)
def _bf16_choice_once(kind: str, index: int | None, backend: str) -> str:
    reason = "the tensors are on the CPU"
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability(index)
        if importlib.util.find_spec("flash_attn") is None:
            reason = "flash-attn-4 is not installed"
        elif major not in (9, 10):
            reason = f"flash-attn-4 does not serve sm_{major}{minor}"
        else:
            reason = ""
    if backend == "fa4" and reason:
        raise ValueError(f"backend is 'fa4' but {reason}; allowed here are 'auto' and 'sdpa'")
    chosen = "sdpa" if backend == "sdpa" or reason else "fa4"
    if backend == "auto":
        level = logging.WARNING if reason and kind == "cuda" else logging.INFO
        log.log(level, "PMA precision='bf16' on %s runs on %s%s", kind, chosen, f": {reason}" if reason else "")
    return chosen


def _bf16_attention(device: torch.device, backend: str) -> Attend:
    return jagged_attention if _bf16_choice(device.type, device.index, backend) == "sdpa" else _attend_fa4


def pma_bf16(
    values: Tensor, offsets: Tensor, q: Tensor, norm_weight: Tensor, w_k: Tensor, w_v: Tensor | None, eps: float,
    backend: str,
) -> Tensor:  # fmt: skip
    """The key/value side in BF16, plain PyTorch around one attention operator: ``[B, Q, dim]`` BF16."""
    _, heads, head_dim = q.shape
    valid = (torch.arange(values.shape[0], device=values.device) < offsets[-1])[:, None]
    # Rows past the last offset may hold anything; as zeros they reach neither a value nor a gradient.
    x = torch.where(valid, values, 0.0).to(torch.float32)
    xn = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * norm_weight.to(torch.float32)
    xn = xn.to(torch.bfloat16)
    k = F.linear(xn, w_k.to(torch.bfloat16)).unflatten(1, (heads, head_dim))
    v = (xn if w_v is None else F.linear(xn, w_v.to(torch.bfloat16))).unflatten(1, (heads, head_dim))
    return _bf16_attention(values.device, backend)(q.to(torch.bfloat16), k, v, offsets).flatten(2)
