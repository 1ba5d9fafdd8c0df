"""Attention backwards that a user could install instead: flash-attn-4 in BF16, cuDNN in FP8; and flash-attn-4's whole training call.

Each function returns a call without arguments that runs on preallocated inputs, or raises what the library raises. Queries are one copy a
sequence: neither library shares them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels_baselines import graph_call, graph_input

FP8 = torch.float8_e4m3fn


def leaves_of(shape: Any, device: torch.device) -> list[torch.Tensor]:
    """Random BF16 q, k, v ``[rows, H, D]`` that want gradients."""
    rows = (shape.batch * shape.queries, sum(shape.lengths()), sum(shape.lengths()))
    return [torch.randn(n, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16).requires_grad_() for n in rows]


def flash_attn_4_forward(shape: Any, device: torch.device, leaves: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """flash-attn-4's differentiable forward on ``leaves``, dense or packed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def first(x: Any) -> torch.Tensor:
        return x[0] if isinstance(x, tuple) else x

    if not shape.jagged:
        q, k, v = (x.unflatten(0, (shape.batch, -1)) for x in leaves)
        return lambda: first(flash_attn_func(q, k, v, causal=shape.causal))
    offsets_q = torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * shape.queries
    offsets_k, longest = shape.offsets(device), max(shape.lengths())
    return lambda: first(
        flash_attn_varlen_func(
            *leaves,
            cu_seqlens_q=offsets_q,
            cu_seqlens_k=offsets_k,
            max_seqlen_q=shape.queries,
            max_seqlen_k=longest,
            causal=shape.causal,
        )
    )


def flash_attn_4(shape: Any, device: torch.device) -> Callable[[], Any]:
    """flash-attn-4's BF16 backward."""
    leaves = leaves_of(shape, device)
    out = flash_attn_4_forward(shape, device, leaves)()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def cudnn_fp8(shape: Any, device: torch.device) -> Callable[[], Any]:
    """cuDNN's FP8 backward of dense batches through its frontend's graph API, every tensor under one scale, gradients in FP8.

    It refuses packed sequences on Hopper. The casts and the calibration of the scales are not part of the timed call.
    """
    import cudnn

    if shape.jagged:
        raise NotImplementedError("cuDNN's FP8 backward takes no packed sequences on Hopper")
    kinds = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    batch, heads, dim, queries, keys = shape.batch, shape.heads, shape.head_dim, shape.queries, shape.keys
    graph = cudnn.pygraph(io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle)
    bound: dict[Any, torch.Tensor] = {}

    def geometry(rows: int) -> tuple[list[int], list[int]]:
        return [batch, heads, rows, dim], [rows * heads * dim, dim, heads * dim, 1]

    input_ = functools.partial(graph_input, graph, bound)

    def operand(name: str, rows: int) -> Any:
        codes = torch.randn(batch * rows, heads, dim, device=device, dtype=torch.bfloat16).to(FP8)
        return input_(name, *geometry(rows), kinds.FP8_E4M3, codes)

    inputs = {name: operand(name, keys if name in ("k", "v") else queries) for name in ("q", "k", "v", "o", "dO")}
    lse = torch.full((batch, heads, queries, 1), math.log(keys), device=device)
    inputs["stats"] = input_("stats", list(lse.shape), list(lse.stride()), kinds.FLOAT, lse)
    names = ("q", "k", "v", "o", "dO", "s", "dP")
    factors = {f"descale_{n}": 1.0 for n in names} | {f"scale_{n}": 1.0 for n in ("s", "dQ", "dK", "dV", "dP")}
    for name, value in factors.items():
        inputs[name] = input_(name, [1] * 4, [1] * 4, kinds.FLOAT, torch.full((1, 1, 1, 1), value, device=device))
    mask = dict(use_causal_mask=True) if shape.causal else {}
    dq, dk, dv, *tops = graph.sdpa_fp8_backward(attn_scale=1.0 / math.sqrt(dim), **mask, **inputs)
    for tensor, rows in ((dq, queries), (dk, keys), (dv, keys)):
        dims, strides = geometry(rows)
        tensor.set_output(True).set_dim(dims).set_stride(strides).set_data_type(kinds.FP8_E4M3)
        bound[tensor] = torch.empty(batch * rows, heads, dim, device=device, dtype=FP8)
    for tensor in tops:
        tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kinds.FLOAT)
        bound[tensor] = torch.zeros(1, 1, 1, 1, device=device)
    return graph_call(graph, bound, handle, device)
