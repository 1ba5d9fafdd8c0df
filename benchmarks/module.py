"""``python -m benchmarks module``: the whole PMA module, forward and backward, in BF16 and in MXFP8.

The shapes are those of the published table (B 768, Q 512, D 384, H 3; up to 4,096, 8,192 and 16,384 events a sample, every sample full
or lengths drawn uniformly). BF16 is the best that a user could build from what can be installed: norm and key projection fused by
``torch.compile``, flash-attn-4 called eagerly so that its backward has what its forward saved. MXFP8 is ``PMA(precision="mxfp8")`` under
``torch.compile(fullgraph=True, dynamic=True)``. Both see the same tensors, in turns, round after round; what is reported is the median.

Before anything is timed, output and event gradients of a few samples are compared with FP64: a wrong module is not timed.

Per shape: milliseconds of forward, backward and step, peak memory, and the time of every stage as the profiler sees its kernels.
``--world-size N`` runs N processes, one a GPU, under DDP, every one with the whole batch (weak scaling).
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import plots
from benchmarks.config import UserError, parse_command_line, setting
from benchmarks.harness import format_table, pick_device, say, write_record
from modules import PMA
from modules import reference as truth_module

Kind = Literal["uniform", "jagged"]
Precision = Literal["bf16", "mxfp8"]

LEAST_DB = {"bf16": 30.0, "mxfp8": 18.0}
"""Output and event gradients of the checked samples must reach this against FP64: far below what the numerics report measures
(above 40 and 29), far above what any wrong result gives."""

STAGES = ("norm", "projection", "attention forward", "attention backward", "projection + norm backward", "other")
_KERNELS: tuple[tuple[str, str], ...] = (
    # A part of the kernel's name and its stage; the first that matches counts.
    ("rmsnorm_quantize", "norm"),
    ("norm_projection", "projection"),  # one kernel for both
    ("fused_opscoordinates", "projection"),
    ("gemm_norm_backward", "projection + norm backward"),
    ("gemm_quantize", "projection"),
    ("sm90forward", "attention forward"),
    ("sm90transpose", "attention forward"),
    ("sm90worklist", "attention forward"),
    ("sm90recode", "attention forward"),
    ("sm90backward", "attention backward"),
    ("flash_fwd", "attention forward"),
    ("flashattnforward", "attention forward"),
    ("flashattentionforward", "attention forward"),
    ("flash_bwd", "attention backward"),
    ("flashattentionbackward", "attention backward"),
)


@dataclass(frozen=True)
class ModuleConfig:
    """`python -m benchmarks module`."""

    name: str = setting("module", "name of the result files")
    dim: int = setting(384, "width of events, seeds and output")
    heads: int = setting(3, "attention heads")
    seeds: int = setting(512, "learned queries per sample")
    batch: int = setting(768, "samples")
    keys: tuple[int, ...] = setting((4096, 8192, 16384), "events of a sample, or their upper limit")
    kinds: tuple[Kind, ...] = setting(("uniform", "jagged"), "uniform: every sample is full; jagged: lengths drawn uniformly in 1 … keys")
    precisions: tuple[Precision, ...] = setting(("bf16", "mxfp8"), "what to time; the first is the baseline")
    numerics: str = setting("default", "preset of what is rounded where in MXFP8: default or post")
    backend: str = setting("auto", "attention backend of PMA in MXFP8")
    compile: bool = setting(True, "torch.compile the module (MXFP8) and the norm and projection (BF16)")
    warmup: int = setting(3, "untimed rounds")
    rounds: int = setting(12, "timed rounds")
    stages: bool = setting(True, "profile one step of each for the breakdown")
    check: bool = setting(True, "compare a few samples with FP64 before timing")
    world_size: int = setting(1, "processes, one a GPU, under DDP; every one has the whole batch")
    device: str = setting("auto", "auto, cuda or cuda:N; cpu only for shapes that a CPU can take")
    seed: int = setting(0, "of everything random")
    out: Path = setting(Path("out/module"), "folder of JSON and PNG")
    record: Path | None = setting(None, "JSON record of a finished run: print its table and draw its figure again, without a GPU")

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "seeds", "batch", "rounds", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for name in ("keys", "kinds", "precisions"):
            if not getattr(self, name):
                raise ValueError(f"{name}: got an empty list, expected at least one")


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    keys: int
    kind: str
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.keys} {self.kind}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def shapes_of(config: ModuleConfig, rank: int = 0) -> list[Shape]:
    """Every row of the table; jagged lengths come from the seed, the rank and the row alone."""
    shapes = []
    for keys in config.keys:
        for kind in config.kinds:
            lengths = [keys] * config.batch
            if kind == "jagged":
                generator = torch.Generator().manual_seed(config.seed + keys + 7919 * rank)
                lengths = torch.randint(1, keys + 1, (config.batch,), generator=generator).tolist()
            shapes.append(Shape(keys, kind, tuple(lengths)))
    return shapes


# ---- the two modules -----------------------------------------------------------------------------------------------


def _norm_linear(x: Tensor, norm: Tensor, proj: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    xn = F.rms_norm(x, (x.shape[1],), norm, eps)
    return xn, F.linear(xn, proj)


def _query(seeds: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    return F.linear(F.rms_norm(seeds, (seeds.shape[1],), norm, eps), proj)


class Bf16(nn.Module):
    """The module as a user would write it today in BF16: see the file's text. Parameters have PMA's names."""

    def __init__(self, pma: PMA, compiled: bool) -> None:
        super().__init__()
        self.pma = pma
        self.norm_linear: Callable[..., Any] = torch.compile(_norm_linear, dynamic=True) if compiled else _norm_linear
        self.query: Callable[..., Any] = torch.compile(_query) if compiled else _query

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        p = self.pma
        heads, queries, batch = p.num_heads, p.num_seeds, offsets.shape[0] - 1
        q = self.query(p.seed_embs, p.query_norm.weight, p.query_proj.weight, p.eps).unflatten(1, (heads, -1))
        xn, k = self.norm_linear(values, p.kv_norm.weight, p.key_proj.weight, p.eps)
        k, v = k.unflatten(1, (heads, -1)), xn.unflatten(1, (heads, -1))
        if values.device.type == "cuda":
            from flash_attn.cute.interface import flash_attn_varlen_func

            rows = q.expand(batch, *q.shape).reshape(batch * queries, *q.shape[1:])
            starts = torch.arange(batch + 1, device=values.device, dtype=torch.int32) * queries
            out = flash_attn_varlen_func(rows, k, v, cu_seqlens_q=starts, cu_seqlens_k=offsets, max_seqlen_q=queries)
            out = out[0] if isinstance(out, tuple) else out
        else:
            from modules.bf16 import jagged_attention

            out = jagged_attention(q, k, v, offsets)
        return out.reshape(batch, queries, -1)


def make_pma(config: ModuleConfig, precision: str, device: torch.device) -> PMA:
    """The module with BF16 parameters; the same ones in either precision. Scores have a deviation near 1."""
    torch.manual_seed(config.seed)
    options: dict[str, Any] = {"numerics": config.numerics, "backend": config.backend} if precision == "mxfp8" else {}
    pma = PMA(config.dim, config.heads, config.seeds, precision=precision, dtype=torch.bfloat16, **options)
    with torch.no_grad():
        pma.seed_embs.normal_()
        for proj in (pma.query_proj, pma.key_proj):
            proj.weight.normal_(0, config.dim**-0.5)
    return pma.to(device)


def make_module(config: ModuleConfig, precision: str, device: torch.device) -> nn.Module:
    """What is timed: callable with ``(values, offsets)``."""
    pma = make_pma(config, precision, device)
    if precision == "bf16":
        return Bf16(pma, config.compile)
    return torch.compile(pma, fullgraph=True, dynamic=True) if config.compile else pma  # type: ignore[return-value]


# ---- one shape -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Inputs of one shape, shared by all variants."""

    values: Tensor
    offsets: Tensor
    dout: Tensor


def make_batch(config: ModuleConfig, shape: Shape, device: torch.device, seed: int) -> Batch:
    """Random events and output gradient, BF16, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(shape.tokens, config.dim, dtype=torch.bfloat16, device=device)
    for part in values.split(1 << 20):
        part.normal_(generator=generator)
    dout = torch.empty(len(shape.lengths), config.seeds, config.dim, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    offsets = torch.tensor([0, *shape.lengths]).cumsum(0).to(torch.int32).to(device)
    return Batch(values.requires_grad_(), offsets, dout)


def leaves_of(module: nn.Module, batch: Batch) -> list[Tensor]:
    """What gradients are taken of."""
    return [batch.values, *module.parameters()]


def step(module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """Forward and backward; gradients are returned, not accumulated."""
    out = module(batch.values, batch.offsets)
    return torch.autograd.grad(out, leaves_of(module, batch), batch.dout)


def sqnr(value: Tensor, reference: Tensor) -> float:
    """dB of ``value`` against FP64 ``reference``."""
    noise = float((value.to(torch.float64) - reference).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(reference.square().sum()) / noise)


def check(config: ModuleConfig, shape: Shape, batch: Batch, modules: dict[str, nn.Module], samples: int = 2) -> dict[str, dict[str, float]]:
    """SQNR of a few samples' outputs and event gradients against FP64; refuses a module that is wrong."""
    chosen = sorted({0, len(shape.lengths) - 1, *range(samples)})[:samples] if samples < len(shape.lengths) else range(len(shape.lengths))
    bounds = batch.offsets.tolist()
    found: dict[str, dict[str, float]] = {}
    for name, module in modules.items():
        out = module(batch.values, batch.offsets)
        grad = torch.autograd.grad(out, batch.values, batch.dout)[0]
        got_out, got_dx, want_out, want_dx = [], [], [], []
        p = {key.rsplit("pma.", 1)[-1].removeprefix("_orig_mod."): value.detach().double() for key, value in module.named_parameters()}
        q = truth_module.seed_queries(p["seed_embs"], p["query_norm.weight"], p["query_proj.weight"], config.heads, 1e-6)
        for b in chosen:
            events = batch.values[bounds[b] : bounds[b + 1]].detach().double().requires_grad_()
            exact = truth_module.pool_sequence(events, q, p["kv_norm.weight"], p["key_proj.weight"], None, 1e-6)
            want_dx.append(torch.autograd.grad(exact, events, batch.dout[b].double())[0])
            want_out.append(exact.detach())
            got_out.append(out[b].detach())
            got_dx.append(grad[bounds[b] : bounds[b + 1]])
        ratio = {"out": sqnr(torch.cat(got_out), torch.cat(want_out)), "events": sqnr(torch.cat(got_dx), torch.cat(want_dx))}
        del out, grad
        for row, db in ratio.items():
            if not db >= LEAST_DB[name]:
                raise RuntimeError(f"{shape.name}, {name}: {row} has {db:.1f} dB against FP64, at least {LEAST_DB[name]:g} is expected")
        found[name] = ratio
    return found


def timed(modules: dict[str, nn.Module], batch: Batch, device: torch.device, warmup: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of forward, backward and step of every variant, in turns that rotate; one synchronisation a round.

    A timed step follows an untimed one of its own kind, as in a training loop: the clock that the power limit leaves depends on what ran
    before (by 4 to 7% at 16,384 events), which would be a pause or the other variant, by turns.

    ``host``: what the process itself was busy launching a step; on a GPU it runs ahead, so it counts only where it is the longest.
    """
    names = list(modules)
    samples: dict[str, dict[str, list[float]]] = {n: {"forward": [], "backward": [], "step": [], "host": []} for n in names}
    for turn in range(warmup + rounds):
        shift = turn % len(names)
        clocks = []
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # some 10 ms: the host gets ahead, as it is in a training loop
        for name in names[shift:] + names[:shift]:
            step(modules[name], batch)
            clock, begin = _Clock(device), time.perf_counter()
            clock.mark()
            out = modules[name](batch.values, batch.offsets)
            clock.mark()
            grads = torch.autograd.grad(out, leaves_of(modules[name], batch), batch.dout)
            clock.mark()
            host = (time.perf_counter() - begin) * 1e3
            del out, grads
            clocks.append((name, clock, host))
        for name, clock, host in clocks:
            forward, backward = clock.milliseconds()
            if turn >= warmup:
                for key, value in (("forward", forward), ("backward", backward), ("step", forward + backward), ("host", host)):
                    samples[name][key].append(value)
    return samples


class _Clock:
    """Marks in time: CUDA events on the current stream, or the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        if self.device.type == "cuda":
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


def peak_memory(module: nn.Module, batch: Batch, device: torch.device) -> dict[str, float]:
    """GiB: ``peak`` of everything allocated during a step, ``inputs`` what was there before it."""
    if device.type != "cuda":
        return {}
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    grads = step(module, batch)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del grads
    return {"peak": peak / 2**30, "inputs": before / 2**30}


def stage_of(kernel: str) -> str | None:
    """The stage that a kernel's name betrays, or None."""
    flat = kernel.lower().replace("::", "").replace(".", "")
    return next((stage for part, stage in _KERNELS if part in flat), None)


def stages(module: nn.Module, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Milliseconds of every stage of one step, from the kernels that the profiler saw; the largest kernels by name.

    Kernels of ours and of flash-attn-4 say what they are. What a compiler made does not: it is the norm and projection before the
    attention's forward, and their backward after its backward. The query side, a few rows, is counted with them.
    """
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step(module, batch)
        torch.cuda.synchronize(device)
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    kernels = sorted((e for e in events if e.name[:1] != "#"), key=lambda e: e.time_range.start)
    total = dict.fromkeys(STAGES, 0.0)
    largest: dict[str, float] = {}
    after_backward = False
    seen_forward = False
    for event in kernels:
        ms = event.time_range.elapsed_us() / 1e3
        stage = stage_of(event.name)
        if stage == "attention forward":
            seen_forward = True
        if stage == "attention backward":
            after_backward = True
        if stage is None:
            if event.name.lower().startswith(("memcpy", "memset")):
                stage = "other"
            elif after_backward:
                stage = "projection + norm backward"
            elif not seen_forward:
                is_gemm = any(part in event.name.lower() for part in ("gemm", "nvjet", "cutlass", "xmma"))
                stage = "projection" if is_gemm else "norm"
            else:
                stage = "other"
        total[stage] += ms
        largest[event.name] = largest.get(event.name, 0.0) + ms
    top = sorted(largest.items(), key=lambda item: -item[1])[:16]
    return {"ms": total, "largest": [{"kernel": name[:160], "ms": ms} for name, ms in top], "kernels": len(kernels)}


def measure_shape(config: ModuleConfig, shape: Shape, modules: dict[str, nn.Module], device: torch.device, seed: int) -> dict[str, Any]:
    """Everything about one row of the table."""
    batch = make_batch(config, shape, device, seed)
    quality = check(config, shape, batch, modules) if config.check else {}
    samples = timed(modules, batch, device, config.warmup, config.rounds)
    result: dict[str, Any] = {"keys": shape.keys, "kind": shape.kind, "tokens": shape.tokens, "samples": len(shape.lengths)}
    result["db_against_fp64"] = quality
    for name, module in modules.items():
        times = {key: {"median": statistics.median(v), "best": min(v), "samples": v} for key, v in samples[name].items()}
        breakdown = stages(module, batch, device) if config.stages else {}
        result[name] = {"ms": times, "memory_gib": peak_memory(module, batch, device), "stages": breakdown}
    return result


# ---- report --------------------------------------------------------------------------------------------------------


def report(config: ModuleConfig, results: Sequence[dict[str, Any]]) -> str:
    """The table."""
    base = config.precisions[0]
    rows: list[list[str | None]] = []
    for r in results:
        for name in config.precisions:
            ms = {k: v["median"] for k, v in r[name]["ms"].items()}
            memory = r[name]["memory_gib"].get("peak")
            ratios: list[str | None] = [None] * 2
            if name != base:
                ratios[0] = f"{r[base]['ms']['step']['median'] / ms['step']:.2f}×"
                if memory is not None:
                    ratios[1] = f"{100 * memory / r[base]['memory_gib']['peak']:.0f}%"
            rows.append(
                [
                    f"{r['keys']} {r['kind']}",
                    f"{r['tokens'] / 1e6:.2f} M",
                    name.upper(),
                    *(f"{ms[key]:.2f}" for key in ("forward", "backward", "step")),
                    ratios[0],
                    None if memory is None else f"{memory:.1f}",
                    ratios[1],
                ]
            )
    title = (
        f"PMA, B {config.batch}, Q {config.seeds}, D {config.dim}, H {config.heads}: milliseconds (median of {config.rounds}), GiB at peak"
    )
    columns = ["events", "total", "precision", "forward", "backward", "step", "speedup", "GiB", "of " + base.upper()]
    return format_table(columns, rows, title)


def draw(path: Path, config: ModuleConfig, results: Sequence[dict[str, Any]], note: str) -> None:
    """Stacked bars: the stages of a step, a pair of bars a shape."""
    shown = [r for r in results if all(r[name]["stages"] for name in config.precisions)]
    if not shown:
        return
    columns = len(shown)
    with plots.figure(path, 1, columns, size=(2.3 * columns + 2.4, 4.4)) as (drawing, axes):
        for i, (axis, r) in enumerate(zip([axes] if columns == 1 else list(axes), shown, strict=True)):
            for x, name in enumerate(config.precisions):
                bottom, parts = 0.0, r[name]["stages"]["ms"]
                for index, stage in enumerate(STAGES):
                    height = parts[stage]
                    color = plots.PALETTE[index] if index < len(plots.PALETTE) else plots.FAINT
                    axis.bar(x, height, 0.7, bottom=bottom, color=color, label=stage if (x, i) == (0, 0) else None)
                    bottom += height
                axis.text(x, bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=9)
            axis.set_xticks(range(len(config.precisions)), [name.upper() for name in config.precisions])
            axis.set_title(f"{r['keys']} {r['kind']}")
            axis.grid(axis="x", visible=False)
            axis.margins(y=0.1)
            if i == 0:
                axis.set_ylabel("milliseconds of a step, kernels only")
        handles, labels = (axes if columns == 1 else axes[0]).get_legend_handles_labels()
        drawing.legend(handles[::-1], labels[::-1], loc="outside right center")
        plots.footnote(drawing, note)


def needs(config: ModuleConfig) -> str:
    """What the command would need, for a machine without a GPU."""
    lines = [
        "This table is measured on a GPU, and this machine has none that PyTorch sees. It needs:",
        "  * an NVIDIA GPU of compute capability 9.0 (H100, H200), CUDA 13, PyTorch 2.11 or later with CUDA",
        "  * pip install 'lp-fa4[kernels,benchmarks]': nvidia-cutlass-dsl, quack-kernels, flash-attn-4 (the BF16 baseline)",
        "  * memory for the BF16 step, about 11 bytes an event and channel:",
    ]
    for shape in shapes_of(config):
        # x, xn, k and dk, dv, dx as BF16, less what is freed on the way: 4.2 kB an event at width 384 (measured).
        gib = shape.tokens * config.dim * 10.8 / 2**30
        lines.append(f"      {shape.name:>16}: {shape.tokens / 1e6:6.2f} M events, about {gib:.0f} GiB")
    lines += [
        "On a CPU the module runs through its reference, with the same bytes in every quantized tensor; shapes that a CPU can take:",
        "  python -m benchmarks module device=cpu batch=4 seeds=32 'keys=[256]' dim=128 heads=2 compile=false rounds=3",
    ]
    return "\n".join(lines)


def redraw(config: ModuleConfig) -> int:
    """Table and figure of a finished run."""
    from benchmarks.config import from_dict

    assert config.record is not None
    try:
        read = json.loads(config.record.read_text(encoding="utf-8"))
        old, rows = from_dict(ModuleConfig, read["config"]), read["results"]["shapes"]
    except OSError as error:
        raise UserError(f"{config.record}: cannot read the record: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config.record}: not a record of this command ({type(error).__name__}: {error})") from None
    print(report(old, rows), flush=True)
    draw(config.out / f"{old.name}.png", old, rows, note_of(read["environment"]))
    return 0


def note_of(environment: dict[str, Any]) -> str:
    """The footnote of a figure."""
    machine, commit = environment["machine"], (environment["commit"] or "no commit")[:10] + ("+" if environment["modified"] else "")
    return f"{machine.get('gpu', machine['cpu'])} · torch {environment['versions'].get('torch')} · {environment['date'][:10]} · {commit}"


def run(config: ModuleConfig, device: torch.device, save: Callable[[list[dict[str, Any]]], Any] | None = None) -> list[dict[str, Any]]:
    """One process's rows; ``save`` gets those that are done after each."""
    modules: dict[str, nn.Module] = {name: make_module(config, name, device) for name in config.precisions}
    results: list[dict[str, Any]] = []
    for shape in shapes_of(config):
        say(f"{shape.name}: {shape.tokens:,} events")
        results.append(measure_shape(config, shape, modules, device, config.seed))
        if save is not None:
            save(results)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def main(argv: Sequence[str]) -> int:
    """The command. ``--world-size N`` is short for ``world_size=N``. Returns 2 where there is no GPU to measure on."""
    arguments: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument == "--world-size":
            arguments.append(f"world_size={next(rest, '')}")
        elif argument.startswith("--world-size="):
            arguments.append("world_size=" + argument.partition("=")[2])
        else:
            arguments.append(argument)
    config = parse_command_line(ModuleConfig, arguments, "module", __doc__.split("\n\n")[1])
    if config.record is not None:
        return redraw(config)
    device = pick_device(config.device)
    if device.type == "cpu" and config.device == "auto":
        print(needs(config))
        return 2
    if config.world_size > 1:
        from benchmarks.scaling import run_scaling

        return run_scaling(config, device)
    path = config.out / f"{config.name}.json"

    def save(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return write_record(path, "module", config, {"shapes": rows, "compiled_kernels": _compilations()}, device)

    results = run(config, device, save)
    record = save(results)
    draw(config.out / f"{config.name}.png", config, results, note_of(record["environment"]))
    print(report(config, results), flush=True)
    print(f"\nwritten: {path}")
    return 0


def _compilations() -> int:
    from lp_fa4.compile import compile_count

    return compile_count()
