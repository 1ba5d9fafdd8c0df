"""Attention forwards that a user could install instead, on the same shapes: flash-attn-4 in BF16 and cuDNN in FP8.

Each function returns a call without arguments that runs the work on preallocated inputs, or raises what the library raises.
cuDNN's FP8 takes one scale per tensor; the casts and the calibration that choose them are not part of the timed call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from benchmarks.harness import say

FP8 = torch.float8_e4m3fn


def graph_input(
    graph: Any, bound: dict[Any, torch.Tensor], name: str, dims: list[int], strides: list[int], kind: Any, value: torch.Tensor
) -> Any:
    """An input of a cuDNN graph; ``bound`` keeps the tensor that it stands for."""
    tensor = graph.tensor(dim=dims, stride=strides, data_type=kind, name=name)
    bound[tensor] = value
    return tensor


def graph_call(graph: Any, bound: dict[Any, torch.Tensor], handle: Any, device: torch.device) -> Callable[[], Any]:
    """The finished graph as a call; raises what cuDNN raises for a graph that it does not support."""
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(int(graph.get_workspace_size()), 256), device=device, dtype=torch.uint8)
    return lambda: graph.execute(bound, workspace, handle=handle)


def served(
    library: ModuleType, names: Sequence[str], shape: Any, device: torch.device, notes: dict[str, Any]
) -> dict[str, Callable[[], Any]]:
    """Calls of the functions ``names`` of ``library`` that serve the shape; what the others said goes into ``notes``."""
    calls = {}
    for name in names:
        try:
            call = getattr(library, name)(shape, device)
            call()
            torch.cuda.synchronize(device)
            calls[name] = call
        except Exception as error:  # a baseline may be absent or refuse the shape; that is a result
            notes[name] = f"{type(error).__name__}: {str(error)[:300]}"
            say(f"{shape.name}: {name} refused: {notes[name][:120]}")
    return calls


def flash_attn_4(shape: Any, device: torch.device) -> Callable[[], Any]:
    """flash-attn-4's BF16 forward: dense batches or jagged keys, queries one copy per sequence."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)

    lengths = shape.lengths()
    q, k, v = random(shape.batch * shape.queries), random(sum(lengths)), random(sum(lengths))
    if not shape.jagged:
        q, k, v = (x.unflatten(0, (shape.batch, -1)) for x in (q, k, v))
        return lambda: flash_attn_func(q, k, v, causal=shape.causal)
    offsets_q = torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * shape.queries
    offsets_k = shape.offsets(device)
    return lambda: flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k,
        max_seqlen_q=shape.queries,
        max_seqlen_k=max(lengths),
        causal=shape.causal,
    )


def cudnn_fp8(shape: Any, device: torch.device) -> Callable[[], Any]:
    """cuDNN's FP8 forward through its frontend's graph API; jagged keys as ragged offsets. Output in FP8."""
    import cudnn

    kinds = cudnn.data_type
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
    lengths = shape.lengths()
    batch, heads, dim, queries, keys = shape.batch, shape.heads, shape.head_dim, shape.queries, max(lengths)
    graph = cudnn.pygraph(io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle)
    bound: dict[Any, torch.Tensor] = {}

    input_ = functools.partial(graph_input, graph, bound)

    def codes(rows: int) -> torch.Tensor:
        return torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16).to(FP8)

    def operand(name: str, rows: int, value: torch.Tensor) -> Any:
        strides = [rows * heads * dim, dim, heads * dim, 1]
        return input_(name, [batch, heads, rows, dim], strides, kinds.FP8_E4M3, value)

    def scalar(name: str, value: float) -> Any:
        return input_(name, [1] * 4, [1] * 4, kinds.FLOAT, torch.full((1, 1, 1, 1), value, device=device))

    q = operand("q", queries, codes(batch * queries))
    k, v = (operand(name, keys, codes(sum(lengths) + 256)) for name in ("k", "v"))
    options: dict[str, Any] = dict(attn_scale=1.0 / math.sqrt(dim), use_causal_mask=shape.causal)
    if shape.jagged:
        elements = heads * dim

        def offsets(name: str, starts: torch.Tensor) -> Any:
            value = (starts.long() * elements).view(batch + 1, 1, 1, 1)
            return input_(name, [batch + 1, 1, 1, 1], [1] * 4, kinds.INT64, value)

        starts = torch.arange(batch + 1, device=device) * queries
        ragged_q, ragged_k = offsets("ragged_q", starts), offsets("ragged_k", shape.offsets(device))
        q.set_ragged_offset(ragged_q)
        k.set_ragged_offset(ragged_k)
        v.set_ragged_offset(ragged_k)
        counts = torch.full((batch, 1, 1, 1), queries, dtype=torch.int32, device=device)
        sizes = torch.tensor(lengths, dtype=torch.int32, device=device).view(batch, 1, 1, 1)
        options.update(
            use_padding_mask=True,
            seq_len_q=input_("len_q", [batch, 1, 1, 1], [1] * 4, kinds.INT32, counts),
            seq_len_kv=input_("len_k", [batch, 1, 1, 1], [1] * 4, kinds.INT32, sizes),
        )
    factors = dict(descale_q=1.0, descale_k=1.0, descale_v=1.0, descale_s=1 / 448.0, scale_s=448.0, scale_o=64.0)
    for name, value in factors.items():
        options[name] = scalar(name, value)
    out, stats, amax_s, amax_o = graph.sdpa_fp8(q=q, k=k, v=v, generate_stats=True, **options)
    rows = batch * queries
    out.set_output(True).set_dim([batch, heads, queries, dim]).set_stride([queries * heads * dim, dim, heads * dim, 1])
    out.set_data_type(kinds.FP8_E4M3)
    bound[out] = torch.empty(rows, heads, dim, device=device, dtype=FP8)
    stats.set_output(True).set_data_type(kinds.FLOAT)
    if shape.jagged:
        out.set_ragged_offset(ragged_q)
        stats.set_dim([batch, heads, queries, 1]).set_stride([heads * queries, 1, heads, 1])
        starts_of_stats = (torch.arange(batch + 1, device=device) * queries * heads).long().view(batch + 1, 1, 1, 1)
        stats.set_ragged_offset(input_("ragged_s", [batch + 1, 1, 1, 1], [1] * 4, kinds.INT64, starts_of_stats))
    bound[stats] = torch.empty(batch * heads * queries, device=device, dtype=torch.float32)
    for tensor in (amax_s, amax_o):
        tensor.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(kinds.FLOAT)
        bound[tensor] = torch.zeros(1, 1, 1, 1, device=device)
    return graph_call(graph, bound, handle, device)
