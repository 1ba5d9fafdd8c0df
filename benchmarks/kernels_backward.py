"""Time the Hopper backward against flash-attn-4 BF16, in one process, variants interleaved.

    python -m benchmarks.kernels_backward [SHAPE ...] [--rounds N] [--out FILE.json]

Shapes: ``pma4096u pma4096j pma8192u pma8192j pma16384u pma16384j llm llmc`` (u: every sequence that long, j: up to that long, jagged; llm:
4 sequences of 8,192, 16 heads, dense queries; llmc: causal). A row counts everything a backward launches: work list, pre-pass, main
kernel, post-pass. TFLOP/s count the five products of attention's backward once, 10 * H * D per query and key. Before a shape is timed, a
small problem of its kind must agree with the reference: no figure is printed for a kernel that is wrong.

Operands are random codes with static exponents, as the module makes them; the statistics that the forward would hand over are made up at
their typical size, so that only the backward is compiled.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import format_table, say, time_interleaved, write_record
from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor
from lp_fa4.problem import AttentionProblem, ForwardResult

DIM = 128


@dataclass(frozen=True)
class Shape:
    """``queries`` per sequence; ``jagged``: lengths uniform in 1…keys."""

    batch: int
    heads: int
    queries: int
    keys: int
    shared: bool = True
    jagged: bool = False
    causal: bool = False

    def lengths(self) -> Tensor:
        """Keys of each sequence, on the host: the flops are counted from them."""
        if not self.jagged:
            return torch.full((self.batch,), self.keys)
        return torch.randint(1, self.keys + 1, (self.batch,), generator=torch.Generator().manual_seed(1))

    def small(self) -> "Shape":
        """The same kind of problem, small enough for the reference."""
        size = min(self.keys, 300)
        return Shape(2, self.heads, size if self.causal else 200, size, self.shared, self.jagged, self.causal)


def _pma(keys: int, jagged: bool) -> Shape:
    return Shape(768 if keys == 4096 else 384, 3, 512, keys, jagged=jagged)


SHAPES = {f"pma{keys}{'j' if jagged else 'u'}": _pma(keys, jagged) for keys in (4096, 8192, 16384) for jagged in (False, True)}
SHAPES["llm"] = Shape(4, 16, 8192, 8192, shared=False)
SHAPES["llmc"] = Shape(4, 16, 8192, 8192, shared=False, causal=True)


def operand(rows: int, heads: int, generator: torch.Generator, size: float = 1.0) -> MXTensor:
    """Random codes of standard deviation ``size`` under one static exponent."""
    x = torch.randn(rows, heads, DIM, device="cuda", generator=generator, dtype=torch.bfloat16) * (64 * size)
    scale = torch.full((1, heads, 1), 127 - 6, dtype=torch.uint8, device="cuda")
    return MXTensor.from_bytes(x.to(torch.float8_e4m3fn).view(torch.uint8), scale, (0, DIM), None, 0)


def problem(shape: Shape, grads: str, dq_dtype: str) -> tuple[AttentionProblem, Tensor, float]:
    """Operands, dO and floating-point operations."""
    g = torch.Generator(device="cuda").manual_seed(0)
    lengths = shape.lengths()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to("cuda", torch.int32)
    tokens, rows = int(lengths.sum()), shape.batch * shape.queries
    centred = not shape.causal
    p = AttentionProblem(
        operand(shape.queries if shape.shared else rows, shape.heads, g, 0.7),
        operand(tokens, shape.heads, g),
        operand(tokens, shape.heads, g),
        offsets_k=offsets,
        shared_q=shape.shared,
        causal=shape.causal,
        v_sum=torch.zeros(shape.batch, shape.heads, DIM, device="cuda") if centred else None,
        config=AttentionConfig(center_p=centred, center_p_backward=centred, grad_format=grads, dq_dtype=getattr(torch, dq_dtype)),
    )
    dout = torch.randn(rows, shape.heads, DIM, device="cuda", generator=g, dtype=torch.bfloat16)
    pairs = rows * (shape.keys + 1) / 2 if shape.causal else float(lengths.sum()) * shape.queries
    return p, dout, 10 * shape.heads * DIM * pairs


def statistics_of(p: AttentionProblem, dout: Tensor, keys: int) -> ForwardResult:
    """What a forward would hand over, at its typical size: maximum 2^4, row sum 0.08 a key."""
    stats = (p.heads, p.rows)
    row_max, row_sum = torch.full(stats, 4.0, device="cuda"), torch.full(stats, 0.08 * keys, device="cuda")
    return ForwardResult(dout, row_max, dout * 0.01, row_max, row_sum)


def verify(shape: Shape, grads: str, dq_dtype: str) -> None:
    """A small problem of this kind must agree with the reference (the rounding of a gradient's own format allowed)."""
    from lp_fa4.sm90.backward_host import backward

    p, dout, _ = problem(shape.small(), grads, dq_dtype)
    result = reference.forward(p)
    ours, theirs = backward(p, result, dout), reference.backward(p, result, dout)
    for name in ("dq", "dk", "dv"):
        a, b = (x.dequantize() if isinstance(x, MXTensor) else x.float() for x in (getattr(ours, name), getattr(theirs, name)))
        error = float((a - b).norm() / b.norm())
        if not error < 0.03:
            raise RuntimeError(f"{name} of {shape} differs from the reference by {error:.3g}: not timed")


def baseline(shape: Shape, p: AttentionProblem) -> Callable[[], object]:
    """flash-attn-4's backward in BF16, dense or packed."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    g = torch.Generator(device="cuda").manual_seed(3)
    rows = shape.batch * shape.queries
    leaves = [
        torch.randn(n, shape.heads, DIM, device="cuda", generator=g, dtype=torch.bfloat16).requires_grad_()
        for n in (rows, p.tokens, p.tokens)
    ]
    if shape.jagged:
        cu = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.queries
        out = flash_attn_varlen_func(
            *leaves, cu_seqlens_q=cu, cu_seqlens_k=p.offsets_k, max_seqlen_q=shape.queries, max_seqlen_k=int(shape.lengths().max())
        )
    else:
        out = flash_attn_func(*(x.view(shape.batch, -1, shape.heads, DIM) for x in leaves), causal=shape.causal)
    out = out[0] if isinstance(out, tuple) else out
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(name: str, rounds: int = 10) -> list[dict]:
    """Rows of one shape: variant, median milliseconds, TFLOP/s, ratio to flash-attn-4."""
    from lp_fa4.sm90.backward_host import backward

    shape = SHAPES[name]
    variants: dict[str, Callable[[], object]] = {}
    flops = 0.0
    for grads, dq_dtype in (("bf16", "float32"), ("mxfp8", "float32"), ("mxfp8", "float16")):
        verify(shape, grads, dq_dtype)
        p, dout, flops = problem(shape, grads, dq_dtype)
        result = statistics_of(p, dout, shape.keys)
        variants[f"FP8, {grads} dK dV, {dq_dtype} dQ"] = lambda p=p, result=result, dout=dout: backward(p, result, dout)  # type: ignore[misc]
    variants["flash-attn-4 BF16"] = baseline(shape, p)
    times = time_interleaved(variants, "cuda", warmup=2, rounds=rounds)
    base = times["flash-attn-4 BF16"].median
    return [
        dict(shape=name, variant=v, ms=t.median, best_ms=t.best, tflops=flops / t.median / 1e9, ratio=base / t.median)
        for v, t in times.items()
    ]


def main(arguments: list[str]) -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_backward", description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), choices=[*SHAPES, []], metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", default=None)
    options = parser.parse_args(arguments)
    rows: list[dict] = []
    for name in options.shapes:
        rows += measure(name, options.rounds)
        torch.cuda.empty_cache()
        for r in rows[-4:]:
            say(f"{r['shape']:10s} {r['variant']:30s} {r['ms']:8.3f} ms {r['tflops']:7.1f} TFLOP/s {r['ratio']:5.2f}x")
    cells = [(r["shape"], r["variant"], f"{r['ms']:.3f}", f"{r['tflops']:.0f}", f"{r['ratio']:.2f}") for r in rows]
    print(format_table(("shape", "backward", "ms", "TFLOP/s", "over flash-attn-4"), cells))
    if options.out:
        write_record(options.out, "kernels_backward", {"shapes": options.shapes, "rounds": options.rounds}, rows, "cuda")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
