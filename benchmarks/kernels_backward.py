"""Backward part of ``python -m benchmarks kernels``: our Hopper backward, and the whole training call, beside what a user could install.

A row of the backward counts everything that it launches: work list, pre-pass, main kernel, post-pass. A row of the training call counts
quantization, forward and backward, BF16 in and out. TFLOP/s count the five products of attention's backward once (with the forward's two
for the training call): 10 (14) * D per query, key and head. Before a shape is timed, a small problem of its kind must agree with the
reference: no figure is printed for a kernel that is wrong.

Operands are random codes with static exponents, as the module makes them; the statistics that the forward would hand over are made up at
their typical size, so that only the backward is compiled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import format_table, say, time_interleaved, write_record
from lp_fa4 import reference
from lp_fa4.config import DROP_IN, AttentionConfig
from lp_fa4.mx import MXTensor
from lp_fa4.problem import AttentionProblem, ForwardResult

VARIANTS = (("bf16", "float32"), ("mxfp8", "float32"), ("mxfp8", "float16"))
"""Formats of (dK and dV, sums of dQ)."""

ALLOWED = {"bf16": 0.037, "mxfp8": 0.05}
"""Difference to the reference: a row of dO has a factor of its own here, so that codes of dO, P and dS are other, independent roundings:
sqrt(2) times E4M3's 2.6%; gradients that differ by so much and are rounded to E4M3 differ by sqrt(0.02 * 0.07) more."""


def small(shape: Any) -> Any:
    """The same kind of problem, small enough for the reference."""
    size = min(shape.keys, 1100)
    return dataclasses.replace(shape, batch=2, keys=size, queries=size if shape.causal else min(shape.queries, 600))


def operand(rows: int, heads: int, dim: int, generator: torch.Generator, size: float = 1.0, exponent: int = -6) -> MXTensor:
    """Random values of standard deviation ``size`` under one static exponent."""
    device = generator.device
    codes = torch.empty(rows, heads, dim, dtype=torch.uint8, device=device)
    for piece in codes.split(1 << 20):
        x = torch.randn(piece.shape, device=device, generator=generator, dtype=torch.bfloat16) * (size * 2.0**-exponent)
        piece.copy_(x.to(torch.float8_e4m3fn).view(torch.uint8))
    scale = torch.full((1, heads, 1), 127 + exponent, dtype=torch.uint8, device=device)
    return MXTensor.from_bytes(codes, scale, (0, dim), None, 0)


def problem_of(shape: Any, device: torch.device, grads: str, dq_dtype: str) -> tuple[AttentionProblem, Tensor]:
    """Operands and dO."""
    g = torch.Generator(device=device).manual_seed(0)
    offsets, tokens, rows = shape.offsets(device), sum(shape.lengths()), shape.batch * shape.queries
    centred, heads, dim = not shape.causal, shape.heads, shape.head_dim
    p = AttentionProblem(
        operand(shape.queries if shape.shared else rows, heads, dim, g, 0.7, 0),  # as quantizers choose it: rows of L1 norm under 146
        operand(tokens, heads, dim, g),
        operand(tokens, heads, dim, g),
        offsets_k=offsets,
        shared_q=shape.shared,
        causal=shape.causal,
        v_sum=torch.zeros(shape.batch, heads, dim, device=device) if centred else None,
        config=AttentionConfig(center_p=centred, center_p_backward=centred, grad_format=grads, dq_dtype=getattr(torch, dq_dtype)),
    )
    return p, torch.randn(rows, heads, dim, device=device, generator=g, dtype=torch.bfloat16)


def statistics_of(p: AttentionProblem, dout: Tensor, keys: int) -> ForwardResult:
    """What a forward would hand over, at its typical size: maximum 2^4, row sum 0.08 a key."""
    row_max = torch.full((p.heads, p.rows), 4.0, device=p.device)
    row_sum = torch.full_like(row_max, 0.08 * keys)
    return ForwardResult(dout, row_max, dout * 0.01, row_max, row_sum)


def verify(shape: Any, device: torch.device, grads: str, dq_dtype: str) -> dict[str, float]:
    """Errors of a small problem of this kind against the reference; refuses wrong ones (a gradient's own rounding is allowed)."""
    from lp_fa4.sm90.backward_host import backward

    p, dout = problem_of(small(shape), device, grads, dq_dtype)
    result = reference.forward(p)
    ours, theirs = backward(p, result, dout), reference.backward(p, result, dout)
    errors = {}
    for name in ("dq", "dk", "dv"):
        a, b = (x.dequantize() if isinstance(x, MXTensor) else x.float() for x in (getattr(ours, name), getattr(theirs, name)))
        errors[name] = float((a - b).norm() / b.norm())
        if not errors[name] < ALLOWED[grads]:
            raise RuntimeError(f"{name} of {shape.name} differs from the reference by {errors[name]:.3g}: not timed")
    return errors


def backward_calls(shape: Any, device: torch.device, baselines: list[str], notes: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Name to call; fills ``notes`` with errors and with what a baseline refused."""
    from benchmarks import kernels_backward_baselines, kernels_baselines
    from lp_fa4.sm90.backward_host import backward

    calls: dict[str, Callable[[], Any]] = {}
    p, dout = problem_of(shape, device, *VARIANTS[0])
    result = statistics_of(p, dout, shape.keys)
    for grads, dq_dtype in VARIANTS:
        name = f"lp_fa4, {grads} dK dV, {dq_dtype} dQ"
        notes[name] = verify(shape, device, grads, dq_dtype)
        other = dataclasses.replace(p, config=p.config.with_(grad_format=grads, dq_dtype=getattr(torch, dq_dtype)))
        calls[name] = lambda other=other: backward(other, result, dout)  # type: ignore[misc]
    return calls | kernels_baselines.served(kernels_backward_baselines, baselines, shape, device, notes)


def training_calls(shape: Any, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Forward and backward, BF16 in and out, one copy of the queries a sequence: ours with its quantization, and flash-attn-4's."""
    from benchmarks.kernels_backward_baselines import flash_attn_4_forward, leaves_of
    from lp_fa4 import flash_attn_func, flash_attn_varlen_func

    leaves = leaves_of(shape, device)
    offsets_q = torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * shape.queries
    offsets_k, longest = shape.offsets(device), max(shape.lengths())

    def ours(dq_dtype: torch.dtype) -> Tensor:
        q, k, v = leaves
        choices: dict[str, Any] = dict(causal=shape.causal, backend="sm90", config=DROP_IN.with_(dq_dtype=dq_dtype))
        if shape.jagged:
            out = flash_attn_varlen_func(q, k, v, offsets_q, offsets_k, shape.queries, longest, **choices)
        else:
            q, k, v = (x.unflatten(0, (shape.batch, -1)) for x in leaves)
            out = flash_attn_func(q, k, v, **choices)
        assert isinstance(out, Tensor)
        return out

    calls: dict[str, Callable[[], Tensor]] = {
        "lp_fa4 training call": lambda: ours(torch.float32),
        "lp_fa4, float16 dQ, training call": lambda: ours(torch.float16),
        "flash_attn_4 training call": flash_attn_4_forward(shape, device, leaves),
    }
    douts = {name: torch.randn_like(call()) for name, call in calls.items()}

    def step(call: Callable[[], Tensor], dout: Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), leaves, dout)

    return {name: step(call, douts[name]) for name, call in calls.items()}


def peak_gib(call: Callable[[], Any], device: torch.device) -> float:
    """Memory that a call adds at its peak to what was allocated before, in GiB."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def measure(shape: Any, device: torch.device, baselines: list[str], rounds: int) -> list[dict[str, Any]]:
    """Rows of one shape: backward alone, then the training call."""
    rows: list[dict[str, Any]] = []
    pairs = shape.flops() / (4.0 * shape.head_dim)
    for kind, products in (("backward", 10), ("training", 14)):
        notes: dict[str, Any] = {}
        calls = backward_calls(shape, device, baselines, notes) if kind == "backward" else training_calls(shape, device)
        times = time_interleaved(calls, device, warmup=2, rounds=rounds)
        base = next((t.median for name, t in times.items() if name.startswith("flash_attn_4")), None)
        for name, t in times.items():
            rows.append(
                {
                    "shape": shape.name,
                    "variant": name,
                    "ms": t,
                    "tflops": products * shape.head_dim * pairs / t.median / 1e9,
                    "over_flash_attn_4": None if base is None else base / t.median,
                    "peak_gib": peak_gib(calls[name], device),
                    "notes": notes.get(name) if name in notes else notes if name == next(iter(times)) else None,
                }
            )
        del calls
        torch.cuda.empty_cache()
    return rows


def run(config: Any, shapes: dict[str, Any], device: torch.device) -> None:
    """Measure ``shapes`` (name to ``benchmarks.kernels.Shape``), print a table and write ``backward.json`` into ``config.out``."""
    start, rows = time.monotonic(), []
    path = config.out / "backward.json"
    for name, shape in shapes.items():
        if config.seconds and time.monotonic() - start > config.seconds:
            say(f"{name}: backward not started, {config.seconds:g} s are over")
            continue
        rows += measure(shape, device, config.baselines, config.rounds)
        write_record(path, "kernels", config, rows, device)
    cells = [
        [
            r["shape"],
            r["variant"],
            f"{r['ms'].median:.3f}",
            f"{r['tflops']:.0f}",
            None if r["over_flash_attn_4"] is None else f"{r['over_flash_attn_4']:.2f}",
            f"{r['peak_gib']:.2f}",
        ]
        for r in rows
    ]
    print(format_table(["shape", "backward", "ms", "TFLOP/s", "over flash-attn-4", "peak GiB"], cells))
    print(f"\nwritten: {path}")
