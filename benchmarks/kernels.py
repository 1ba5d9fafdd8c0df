"""``python -m benchmarks kernels``: attention kernels against their limits and against what a user could install instead.

Every shape is checked first (a few rows against FP64), then all variants are timed in one process on random data, twice: *burst*, in
turn, each launch behind a pause on a cool device and behind a queued wait, so that host time does not count; and *sustained*, each
variant back to back for a while, when power decides the clock. Ratios are between like and like. The result names each variant's
share of the nearer limit: MMA (FP8 peak), exp2 (16 a clock and multiprocessor) or memory (operands read once, results written once).
Few queries take some 20 us, of which a launch by itself is a fifth: they are also timed as calls that follow one another in a CUDA graph,
and beside kernels that read K and V and do nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.config import parse_command_line, setting
from benchmarks.harness import Timing, check_known, check_timed, format_table, pick_device, say, write_record

FP8_FLOPS_PER_CLOCK = 8192
"""Dense FP8 operations of one Hopper multiprocessor a clock."""
EXP2_PER_CLOCK = 16
CLOCK_HZ = 1.755e9
"""What an H200 holds under these loads; limits are stated at it, not measured."""
MEMORY_BYTES_PER_SECOND = 4.2e12
FEW_QUERIES = 64
"""Shapes of up to so many are also timed in graphs, beside kernels that read their operands."""
READ_ALONE = "K and V read"
"""Name of those kernels' rows, before their form."""


@dataclass(frozen=True)
class Shape:
    """One attention problem."""

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int = 128
    jagged: bool = False
    shared: bool = True
    causal: bool = False

    def lengths(self) -> list[int]:
        """Keys per sequence; jagged: uniform in 1 … keys, a fixed seed."""
        if not self.jagged:
            return [self.keys] * self.batch
        draw = torch.rand(self.batch, generator=torch.Generator().manual_seed(1))
        return torch.clamp((draw * self.keys).long(), 1, self.keys).tolist()

    def offsets(self, device: torch.device) -> torch.Tensor:
        """int32 ``[batch + 1]`` of the keys."""
        return torch.tensor([0, *self.lengths()]).cumsum(0).to(torch.int32).to(device)

    def flops(self) -> float:
        """Of the two products of a forward; half for a causal square."""
        full = 4.0 * self.queries * sum(self.lengths()) * self.heads * self.head_dim
        return full / 2 if self.causal else full

    def limits(self, multiprocessors: int) -> dict[str, float]:
        """Milliseconds at each limit."""
        clocks = multiprocessors * CLOCK_HZ
        scores = self.flops() / (4.0 * self.head_dim)
        keys = 2 * sum(self.lengths()) * self.heads * self.head_dim
        outputs = 2 * self.batch * self.queries * self.heads * self.head_dim
        return {
            "mma": self.flops() / (FP8_FLOPS_PER_CLOCK * clocks) * 1e3,
            "exp2": scores / (EXP2_PER_CLOCK * clocks) * 1e3,
            "memory": (keys + outputs) / MEMORY_BYTES_PER_SECOND * 1e3,
        }


SHAPES = {
    s.name: s
    for s in (
        Shape("pma_4096_jagged", 768, 3, 512, 4096, jagged=True),
        Shape("pma_4096", 768, 3, 512, 4096),
        Shape("pma_8192_jagged", 384, 3, 512, 8192, jagged=True),
        Shape("pma_8192", 384, 3, 512, 8192),
        Shape("pma_16384_jagged", 384, 3, 512, 16384, jagged=True),
        Shape("pma_16384", 384, 3, 512, 16384),
        Shape("pma_16384_jagged_768", 768, 3, 512, 16384, jagged=True),
        Shape("llm_8192", 4, 16, 8192, 8192, shared=False),
        Shape("llm_8192_causal", 4, 16, 8192, 8192, shared=False, causal=True),
        Shape("few_queries", 1, 16, 8, 16384),
        Shape("few_queries_1", 1, 16, 1, 16384),
    )
}


@dataclass(frozen=True)
class KernelsConfig:
    """What to time."""

    shapes: list[str] = setting(help="names of benchmarks.kernels.SHAPES", factory=lambda: ["pma_4096_jagged", "pma_4096", "llm_8192"])
    baselines: list[str] = setting(help="flash_attn_4, cudnn_fp8", factory=lambda: ["flash_attn_4", "cudnn_fp8"])
    works: list[str] = setting(
        help="names of benchmarks.kernels_fused.all_works(): producers and consumers of the operands",
        factory=lambda: ["norm-static-384-1.5", "backward-384-1.5"],
    )
    forward: bool = setting(True, help="time the forward")
    backward: bool = setting(True, help="time the backward and the whole training call")
    rounds: int = setting(12, help="timed rounds, burst")
    pause: float = setting(0.005, help="seconds before a burst launch")
    sustained: float = setting(0.4, help="seconds back to back per variant; 0 for burst only")
    seconds: float = setting(0.0, help="stop starting new shapes after this many seconds; 0 for never")
    device: str = setting("auto", help="where to run")
    out: Path = setting(Path("out/kernels"), help="folder of the JSON record")


def time_burst(
    variants: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, pause: float, before: Callable[[], Any] = lambda: None
) -> dict[str, Timing]:
    """Milliseconds of single launches on a device that rested: variants in turn, the order rotated. ``before``: runs ahead of each, not
    timed."""
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            torch.cuda.synchronize(device)
            time.sleep(pause)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(5_000_000)  # some 2.5 ms in which the host queues everything
            before()
            start.record()
            variants[name]()
            stop.record()
            torch.cuda.synchronize(device)
            if turn > 0:
                samples[name].append(start.elapsed_time(stop))
    return {name: Timing.of(values) for name, values in samples.items()}


def time_sustained(variants: Mapping[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds a launch, back to back, in the second half of ``seconds``."""
    result = {}
    for name, call in variants.items():
        torch.cuda.synchronize(device)
        begin, per_launch = time.monotonic(), 0.0
        while time.monotonic() - begin < seconds or not per_launch:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            late = time.monotonic() - begin > seconds / 2
            start.record()
            for _ in range(16):
                call()
            stop.record()
            torch.cuda.synchronize(device)
            if late:
                per_launch = start.elapsed_time(stop) / 16
        result[name] = per_launch
    return result


def time_graphs(
    graphs: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device, replays: int, before: Callable[[], Any] | None = None
) -> dict[str, Timing]:
    """Milliseconds a call of calls captured one behind the other in a CUDA graph; graphs in turn, behind a queued wait. Ahead of each
    replay runs, not timed, ``before``, or the graph itself."""
    captured = {}
    for name, calls in graphs.items():
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        captured[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured[name]):
            for call in calls:
                call()
        captured[name].replay()
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in captured.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            torch.cuda._sleep(100_000)
            (before or graph.replay)()
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize(device)
            samples[name].append(start.elapsed_time(stop) / len(graphs[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def few_calls(problems: Sequence[Any]) -> dict[str, list[Callable[[], Any]]]:
    """The forward of each problem, V's codes with a copy and alone, and the kernels that read its K and V."""
    from benchmarks.kernels_read import forms, reader
    from lp_fa4.sm90.forward_host import forward

    calls: dict[str, list[Callable[[], Any]]] = {
        "lp_fa4 static": [functools.partial(forward, p) for p in problems],
        "lp_fa4 static, V as it is": [functools.partial(forward, without_copy(p)) for p in problems],
    }
    sink = torch.zeros(1, dtype=torch.int32, device=problems[0].device)
    for name, spec in forms().items():
        calls[f"{READ_ALONE} ({name})"] = [reader(spec, p.k.codes, p.v.codes, sink) for p in problems]
    return calls


def time_few(
    calls: Mapping[str, Sequence[Callable[[], Any]]], device: torch.device, rounds: int, pause: float
) -> dict[str, dict[str, Timing]]:
    """Calls of three problems each, by the manner of calling: one by itself, launched or as a graph, behind a kernel that fills L2 with
    other bytes (and neighbours take different problems: what L2 still had of one would be a gift to the next); one behind the same; and
    calls that follow one another, of one problem, and of three in turn, so that none finds its keys in L2."""
    from benchmarks.kernels_read import EVICTING, reader

    other = torch.zeros(1 << 27, dtype=torch.uint8, device=device)
    evict = reader(EVICTING, other, other.clone(), torch.zeros(1, dtype=torch.int32, device=device))
    turns = {name: itertools.cycle([*own[i % 3 :], *own[: i % 3]]) for i, (name, own) in enumerate(calls.items())}
    cold = {f"{name} {i}": own[(i + j) % 3 :][:1] for i in range(3) for j, (name, own) in enumerate(calls.items())}
    apart = time_graphs(cold, device, -(-rounds // 3), evict)
    return {
        "a launch, L2 cold": time_burst({n: lambda n=n: next(turns[n])() for n in calls}, device, rounds, pause, evict),  # type: ignore[misc]
        "a call a graph, L2 cold": {n: Timing.of([x for i in range(3) for x in apart[f"{n} {i}"].samples]) for n in calls},
        "a call a graph, behind the same": time_graphs({n: own[:1] for n, own in calls.items()}, device, rounds),
        "20 calls a graph": time_graphs({n: [own[0]] * 20 for n, own in calls.items()}, device, rounds),
        "21 calls a graph, three problems": time_graphs({n: [*own] * 7 for n, own in calls.items()}, device, rounds),
    }


def few_rows(times: Mapping[str, Mapping[str, Timing]]) -> dict[str, Timing]:
    """Of :func:`time_few`, what is recorded: the forward in every manner, and of the kernels that read, the fastest in each."""
    rows: dict[str, Timing] = {}
    for manner, by_name in times.items():
        reads = {name: timing for name, timing in by_name.items() if name.startswith(READ_ALONE)}
        best = min(reads, key=lambda name: reads[name].median)
        rows |= {f"{name}, {manner}": t for name, t in by_name.items() if name not in reads or name == best}
    return rows


def problem_of(shape: Shape, device: torch.device, block: int = 0) -> Any:
    """Random operands with one static exponent (``block`` 0) or one per ``block`` keys, centred, a mean of V to add; V with its transposed
    copy."""
    from lp_fa4.config import AttentionConfig
    from lp_fa4.mx import MXTensor, scale_rows
    from lp_fa4.problem import AttentionProblem
    from lp_fa4.sm90.operands import MXTensorWithCopy
    from lp_fa4.sm90.transpose import transposed_copy

    offsets = shape.offsets(device)
    tokens, d = sum(shape.lengths()), shape.head_dim
    offsets_q = None if shape.shared else torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * shape.queries

    def operand(rows: int, places: torch.Tensor | None) -> MXTensor:
        codes = torch.empty(rows, shape.heads, d, dtype=torch.uint8, device=device)
        for piece in codes.split(1 << 18):
            piece.copy_(torch.randn(piece.shape, device=device).to(torch.float8_e4m3fn).view(torch.uint8))
        grid = 1 if block == 0 else scale_rows(rows, places)
        scale = torch.full((grid, shape.heads, 1), 127, dtype=torch.uint8, device=device)
        return MXTensor.from_bytes(codes, scale, (block, d), places, 0)

    q = operand(shape.queries * (1 if shape.shared else shape.batch), offsets_q)
    k, v = operand(tokens, offsets), operand(tokens, offsets)
    v = MXTensorWithCopy(v.payload, v.scale, v.block, v.offsets, 0, transposed_copy(v.codes, offsets, "accumulator"))
    vectors = None if shape.causal else torch.randn(shape.batch, shape.heads, d, device=device)
    sums = None
    if not shape.causal:
        sums = torch.zeros(shape.batch, shape.heads, d, device=device)
        sequence = torch.repeat_interleave(torch.arange(shape.batch, device=device), torch.tensor(shape.lengths(), device=device))
        for rows, index in zip(v.payload.split(1 << 18), sequence.split(1 << 18), strict=True):
            sums.index_add_(0, index, rows.float())
    centred = not shape.causal
    return AttentionProblem(
        q,
        k,
        v,
        offsets_q=offsets_q,
        offsets_k=offsets,
        shared_q=shape.shared,
        causal=shape.causal,
        v_mean=vectors,
        v_sum=sums,
        config=AttentionConfig(center_p=centred, center_p_backward=centred),
    )


def without_copy(problem: Any) -> Any:
    """The problem with V's codes alone, as the module hands them over: the kernel turns them itself."""
    from lp_fa4.mx import MXTensor

    v = problem.v
    return dataclasses.replace(problem, v=MXTensor(v.payload, v.scale, v.block, v.offsets, v.token_dim))


def checked(shape: Shape, problem: Any, result: Any) -> float:
    """Relative error of the last sequence's last head against FP64; refuses a wrong result before it is timed."""
    b, h = shape.batch - 1, shape.heads - 1
    lo, hi = problem.offsets_k[-2].item(), problem.offsets_k[-1].item()
    q = problem.q.payload[-shape.queries :, h].double()
    k, v = (x.payload[lo:hi, h].double() for x in (problem.k, problem.v))
    s = q @ k.t() / shape.head_dim**0.5
    if shape.causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    truth = torch.softmax(s, -1) @ v
    if problem.v_mean is not None:
        truth = truth + problem.v_mean[b, h].double()
    error = float((result.out[-shape.queries :, h].double() - truth).norm() / truth.norm())
    if not error < 0.05:
        raise RuntimeError(f"{shape.name}: relative error {error:.3g} against FP64; a wrong kernel is not timed")
    return error


def variants_of(shape: Shape, device: torch.device, baselines: Sequence[str]) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Name to call, and notes (error, what a baseline refused)."""
    from benchmarks import kernels_baselines
    from lp_fa4.sm90.forward_host import forward

    problem = problem_of(shape, device)
    notes: dict[str, Any] = {"relative_error": checked(shape, problem, forward(problem))}
    variants: dict[str, Callable[[], Any]] = {"lp_fa4 static": lambda: forward(problem)}
    if shape.shared:
        plain = without_copy(problem)
        notes["relative_error_plain"] = checked(shape, plain, forward(plain))
        variants["lp_fa4 static, V as it is"] = lambda: forward(plain)
    else:
        tiles = problem_of(shape, device, 128)
        variants["lp_fa4 (128, D)"] = lambda: forward(tiles)
        from lp_fa4 import flash_attn_func

        q, k, v = (
            torch.randn(shape.batch, n, shape.heads, shape.head_dim, device=device, dtype=torch.bfloat16)
            for n in (shape.queries, shape.keys, shape.keys)
        )

        def drop_in() -> Any:
            with torch.no_grad():
                return flash_attn_func(q, k, v, causal=shape.causal, backend="sm90")

        variants["lp_fa4 drop-in, BF16 in"] = drop_in
    variants |= kernels_baselines.served(kernels_baselines, baselines, shape, device, notes)
    return variants, notes


def main(argv: Sequence[str]) -> int:
    """The command."""
    config = parse_command_line(KernelsConfig, argv, "kernels", "Attention kernels against their limits and against other libraries.")
    device = pick_device(config.device)
    check_timed(device, config.device, "kernels are timed")
    check_known("shapes", config.shapes, SHAPES)
    from benchmarks.kernels_fused import all_works, run_works
    from benchmarks.kernels_producers import table as works_table

    check_known("works", config.works, all_works())
    if config.backward:
        from benchmarks.kernels_backward import run as run_backward

        run_backward(config, {name: SHAPES[name] for name in config.shapes}, device)
    start, results, table = time.monotonic(), [], []
    path = config.out / "forward.json"
    for name in config.shapes if config.forward else ():
        if config.seconds and time.monotonic() - start > config.seconds:
            say(f"{name}: not started, {config.seconds:g} s are over")
            continue
        shape = SHAPES[name]
        variants, notes = variants_of(shape, device, config.baselines)
        timings = time_burst(variants, device, config.rounds, config.pause)
        sustained = time_sustained(variants, device, config.sustained) if config.sustained else {}
        if shape.queries <= FEW_QUERIES:
            timings |= few_rows(time_few(few_calls([problem_of(shape, device) for _ in range(3)]), device, config.rounds, config.pause))
        limits = shape.limits(torch.cuda.get_device_properties(device).multi_processor_count)
        nearest = max(limits, key=lambda k: limits[k])
        for variant, timing in timings.items():
            tflops = shape.flops() / timing.median / 1e9
            share = limits[nearest] / timing.median if variant.startswith("lp_fa4") else None
            results.append(
                {
                    "shape": name,
                    "variant": variant,
                    "ms": timing,
                    "tflops": tflops,
                    "sustained_ms": sustained.get(variant),
                    "sustained_tflops": shape.flops() / sustained[variant] / 1e9 if variant in sustained else None,
                    "limits_ms": limits,
                    "share_of_limit": share,
                    "notes": notes,
                }
            )
            percent = None if share is None else f"{100 * share:.0f}% ({nearest})"
            long = f"{shape.flops() / sustained[variant] / 1e9:.0f}" if variant in sustained else None
            table.append([name, variant, f"{timing.median:.3f}", f"{tflops:.0f}", long, percent])
        write_record(path, "kernels", config, results, device)
        del variants
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    if table:
        print(format_table(["shape", "variant", "burst ms", "burst TFLOP/s", "sustained TFLOP/s", "share of limit (burst)"], table))
        print(f"\nwritten: {path}")
    rows: list[dict] = []
    for made in run_works(config.works, config.rounds, device):
        rows += made
        write_record(config.out / "fused.json", "kernels", config, rows, device)
    if rows:
        print(works_table(rows))
        print(f"\nwritten: {config.out / 'fused.json'}")
    return 0
