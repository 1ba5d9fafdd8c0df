"""``python -m benchmarks numerics``: how much of each output and gradient of PMA survives its low precision.

For every variant of the numeric choices the signal-to-quantization-noise ratio in dB, ``10 log10(sum t^2 / sum (y - t)^2)``,
of the pooled output, the events' gradient and every parameter's gradient, against two references: FP64 truth
(``modules.reference``) and the module in BF16. The figures that a production system published for its own run stand beside
them (B 768, 5,856,019 keys, longest 14,980, D 384, H 3, Q 512, against BF16).

The batch goes through in chunks of whole sequences and parameter gradients are added up in FP64, so a run needs memory for
one chunk: sequences never meet except in those sums. ``truth: float32`` computes each sequence's truth in FP32 (sums in
FP64): some 90 dB and more, several times faster; a run checks that figure on its first sequences.

Exit code 1 if a gate of the configuration is missed.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.config import ConfigError, parse_command_line, setting
from benchmarks.harness import format_table, pick_device, say, write_record
from modules import PMA, Numerics
from modules import reference as truth_module

ROWS = ("forward_output", "event_embs", "seed_embs", "query_norm.weight", "query_proj.weight", "key_proj.weight", "kv_norm.weight")
"""The output, then gradients; the published table has the first six."""

PUBLISHED = {
    "published, FP32 dQ": (18.84, 26.55, 27.68, 28.02, 27.69, 25.15),
    "published, FP16 dQ": (18.84, 26.55, 25.65, 26.02, 25.66, 25.15),
}


@dataclass(frozen=True)
class Shape:
    """The module."""

    dim: int = setting(128, "width of events, seeds and output")
    heads: int = setting(2, "attention heads")
    seeds: int = setting(64, "learned queries per sample")


@dataclass(frozen=True)
class Lengths:
    """How many events each sample has."""

    batch: int = setting(12, "samples")
    kind: Literal["uniform", "linear", "lognormal"] = setting("uniform", "uniform draws, evenly spaced, or log-normal draws")
    low: int = setting(1, "shortest")
    high: int = setting(400, "longest (the first sample gets it)")
    total: int | None = setting(None, "scale the draws so that they add up to this")

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.batch < 1:
            raise ValueError(f"batch is {self.batch}, low {self.low}, high {self.high}; allowed are batch >= 1, 0 <= low <= high")
        if self.total is not None and not self.batch * self.low <= self.total <= self.batch * self.high:
            raise ValueError(f"total is {self.total}; {self.batch} samples of {self.low} to {self.high} cannot add up to it")


@dataclass(frozen=True)
class Data:
    """Events, seeds, weights and loss."""

    projections: Literal["linear", "xavier", "he"] = setting(
        "linear", "scale of Wq and Wk: nn.Linear's default (scores of deviation 1/3), Xavier (1), He (2)"
    )
    loss: Literal["randn", "mean", "heavy"] = setting("randn", "gradient of the output: normal, constant, or normal with log-normal rows")
    event_mean: float = setting(0.0, "size of a mean that all events of a sample share")
    seed_mean: float = setting(0.0, "size of a mean that all seeds share")
    outliers: float = setting(1.0, "factor on the first four channels of Wq and Wk of each head")
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "dtype whose values events, parameters and gradient take")


@dataclass(frozen=True)
class NumericsConfig:
    """`python -m benchmarks numerics`."""

    name: str = setting("default", "title of the report and of its files")
    shape: Shape = setting(factory=Shape)
    lengths: Lengths = setting(factory=Lengths)
    data: Data = setting(factory=Data)
    variants: dict[str, dict[str, Any]] = setting(
        factory=lambda: {"default": {}, "post": {"preset": "post"}},
        help="name to options: preset (default, post) and any field of Numerics or AttentionConfig",
    )
    gates: dict[str, list[float]] = setting(factory=dict, help="variant to the least dB of the first six rows, against FP64")
    truth: Literal["float64", "float32"] = setting("float64", "precision of one sequence's truth; sums are FP64 always")
    bf16: bool = setting(True, "also run the module in BF16 and report against it")
    chunk_tokens: int = setting(16384, "events that go through at once (at least one whole sample)")
    backend: str = setting("auto", "backend of the MXFP8 module")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    seed: int = setting(0, "of everything random")
    out: Path | None = setting(None, "folder for the JSON; default out/numerics")

    def __post_init__(self) -> None:
        for name, options in self.variants.items():
            try:
                numerics_of(options)
            except (TypeError, ValueError) as error:
                raise ValueError(f"variants.{name}: {error}") from None
        for name, limits in self.gates.items():
            if name not in self.variants:
                raise ValueError(f"gates.{name}: no such variant; there are {', '.join(self.variants)}")
            if len(limits) != 6:
                raise ValueError(f"gates.{name}: {len(limits)} numbers; it takes 6, for {', '.join(ROWS[:6])}")


def numerics_of(options: dict[str, Any]) -> Numerics:
    """A variant's options as :class:`modules.Numerics`. Raises ``TypeError``/``ValueError`` for what nobody knows."""
    changes = dict(options)
    preset = changes.pop("preset", "default")
    for key, value in changes.items():
        if key.endswith("_dtype"):
            changes[key] = getattr(torch, str(value), value)
        elif key.endswith("_block") and isinstance(value, list):
            changes[key] = tuple(value)
    base = Numerics.preset(preset)
    known = {f.name for part in (base, base.attention) for f in dataclasses.fields(part) if f.init}
    for key in changes:
        if key not in known:
            raise ValueError(f"unknown option {key!r}; known are preset, {', '.join(sorted(known))}")
    return Numerics.preset(preset, **changes)


# ---- the problem ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One batch, described so that a chunk of it can be made at any time: every sample has a random generator of its own.

    Generators are the device's: another kind of device draws other numbers.
    """

    config: NumericsConfig
    lengths: list[int]
    parameters: dict[str, Tensor]
    device: torch.device

    @property
    def elements(self) -> int:
        """Elements of the whole output."""
        return len(self.lengths) * self.config.shape.seeds * self.config.shape.dim

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """``values``, ``offsets`` and the output's gradient of some whole samples at a time."""
        start = 0
        while start < len(self.lengths):
            stop, tokens = start + 1, self.lengths[start]
            while stop < len(self.lengths) and tokens + self.lengths[stop] <= self.config.chunk_tokens:
                tokens += self.lengths[stop]
                stop += 1
            yield self._chunk(start, stop)
            start = stop

    def _chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        data, shape, dtype = self.config.data, self.config.shape, getattr(torch, self.config.data.dtype)
        values, grads = [], []
        for b in range(start, stop):
            generator = torch.Generator(self.device).manual_seed(self.config.seed * 1_000_003 + b + 1)
            events = torch.randn(self.lengths[b], shape.dim, generator=generator, device=self.device)
            mean = torch.randn(shape.dim, generator=generator, device=self.device)
            values.append(events + data.event_mean * mean)
            grads.append(self._gradient(generator))
        bounds = torch.tensor([0, *self.lengths[start:stop]]).cumsum(0).to(torch.int32)
        flat = torch.cat(values).to(dtype).float()
        return flat.to(self.device), bounds.to(self.device), torch.stack(grads).to(dtype).float().to(self.device)

    def _gradient(self, generator: torch.Generator) -> Tensor:
        shape, loss = self.config.shape, self.config.data.loss
        if loss == "mean":
            return torch.full((shape.seeds, shape.dim), 1.0 / self.elements, device=self.device)
        grad = torch.randn(shape.seeds, shape.dim, generator=generator, device=self.device)
        if loss == "heavy":
            grad = grad * torch.randn(shape.seeds, 1, generator=generator, device=self.device).mul(1.5).exp()
        return grad


def draw_lengths(lengths: Lengths, generator: torch.Generator) -> list[int]:
    """Lengths of the samples, the longest first."""
    low, high, batch = lengths.low, lengths.high, lengths.batch
    if lengths.kind == "linear":
        drawn = torch.linspace(high, low, batch)
    elif lengths.kind == "uniform":
        drawn = low + (high + 1 - low) * torch.rand(batch, generator=generator)
    else:
        drawn = torch.exp(torch.randn(batch, generator=generator)) * (high / math.e**2)
    drawn = drawn.clamp(low, high)
    drawn[0] = high
    result = [int(n) for n in drawn.floor()]
    if lengths.total is not None:
        rest = sum(result[1:])
        wanted = lengths.total - high
        result[1:] = [min(high, max(low, round(n * wanted / max(rest, 1)))) for n in result[1:]]
        step = 1 if sum(result) < lengths.total else -1
        i = 1
        while sum(result) != lengths.total:
            if low <= result[i] + step <= high:
                result[i] += step
            i = i + 1 if i + 1 < batch else 1
    return result


def make_problem(config: NumericsConfig) -> Problem:
    """The batch and the parameters of a configuration."""
    generator = torch.Generator().manual_seed(config.seed)
    shape, data, dtype = config.shape, config.data, getattr(torch, config.data.dtype)
    module = PMA(shape.dim, shape.heads, shape.seeds)
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    seeds = torch.randn(shape.seeds, shape.dim, generator=generator)
    parameters["seed_embs"] = seeds + data.seed_mean * torch.randn(shape.dim, generator=generator)
    for name in ("query_proj.weight", "key_proj.weight"):
        weight = torch.empty(shape.dim, shape.dim)
        if data.projections == "linear":
            weight.uniform_(-(shape.dim**-0.5), shape.dim**-0.5, generator=generator)
        else:
            gain = 1.0 if data.projections == "xavier" else 2.0
            weight.normal_(0.0, math.sqrt(gain / shape.dim), generator=generator)
        weight.unflatten(0, (shape.heads, -1))[:, :4] *= data.outliers
        parameters[name] = weight
    parameters = {name: p.to(dtype).float() for name, p in parameters.items()}
    return Problem(config, draw_lengths(config.lengths, generator), parameters, pick_device(config.device))


# ---- runs ----------------------------------------------------------------------------------------------------------


class Module:
    """One module that sees the chunks: outputs and event gradients come back at once, parameter gradients add up in FP64."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        shape = problem.config.shape
        self.module = PMA(shape.dim, shape.heads, shape.seeds, device=problem.device, **options)
        self.module.load_state_dict(problem.parameters)
        self.sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.module.named_parameters()}
        self.seconds = 0.0
        # On a GPU events come as they do in training, so that the kernels that read BF16 serve them; the values are the same.
        self.dtype = getattr(torch, problem.config.data.dtype) if problem.device.type == "cuda" else torch.float32

    def __call__(self, values: Tensor, offsets: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        begin = time.perf_counter()
        values = values.detach().to(self.dtype).requires_grad_()
        out = self.module(values, offsets)
        out.backward(dout.to(out.dtype))
        for name, p in self.module.named_parameters():
            assert p.grad is not None
            self.sums[name] += p.grad
            p.grad = None
        assert values.grad is not None
        self.seconds += time.perf_counter() - begin
        return out.detach(), values.grad

    def finish(self) -> dict[str, Tensor]:
        """Parameter gradients, FP64."""
        return self.sums


class Truth:
    """The same interface over ``modules.reference``, one sequence at a time in ``dtype``."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        shape = problem.config.shape
        self.dtype, self.heads, self.eps = dtype, shape.heads, 1e-6
        self.leaves = {n: p.to(problem.device, torch.float64).requires_grad_() for n, p in problem.parameters.items()}
        self.q = truth_module.seed_queries(
            self.leaves["seed_embs"], self.leaves["query_norm.weight"], self.leaves["query_proj.weight"], self.heads, self.eps
        )
        self.dq = torch.zeros_like(self.q)
        names = ("kv_norm.weight", "key_proj.weight")
        self.sums = {name: torch.zeros_like(self.leaves[name]) for name in names}
        self.seconds = 0.0

    def __call__(self, values: Tensor, offsets: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
        begin = time.perf_counter()
        outs, grads = [], []
        for b, (start, stop) in enumerate(truth_module.sequences(offsets)):
            events = values[start:stop].to(self.dtype).requires_grad_()
            leaves = [self.q, *(self.leaves[name] for name in self.sums)]
            q, norm, proj = (t.detach().to(self.dtype).requires_grad_() for t in leaves)
            out = truth_module.pool_sequence(events, q, norm, proj, None, self.eps)
            dx, dq, dnorm, dproj = torch.autograd.grad(out, (events, q, norm, proj), dout[b].to(self.dtype))
            self.dq += dq
            for name, grad in zip(self.sums, (dnorm, dproj), strict=True):
                self.sums[name] += grad
            outs.append(out.detach())
            grads.append(dx)
        self.seconds += time.perf_counter() - begin
        return torch.stack(outs), torch.cat(grads)

    def finish(self) -> dict[str, Tensor]:
        """Parameter gradients, FP64."""
        names = ("seed_embs", "query_norm.weight", "query_proj.weight")
        grads = torch.autograd.grad(self.q, [self.leaves[n] for n in names], self.dq)
        return {**self.sums, **dict(zip(names, grads, strict=True))}


class Ratio:
    """Signal and noise power of one row, added up over chunks."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0

    def add(self, value: Tensor, reference: Tensor) -> None:
        wide = reference.to(torch.float64)
        self.signal += float(wide.square().sum())
        self.noise += float((value.to(torch.float64) - wide).square().sum())

    @property
    def db(self) -> float:
        """SQNR; infinite for equality."""
        return math.inf if self.noise == 0.0 else 10.0 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def measure(config: NumericsConfig) -> dict[str, Any]:
    """Run a configuration: ``{"fp64": {variant: {row: dB}}, "bf16": {…}, "tokens", "lengths", "seconds"}``.

    "bf16" itself is one of the variants under "fp64" where the configuration asks for it.
    """
    problem = make_problem(config)
    runs: dict[str, Module] = {
        name: Module(problem, numerics=numerics_of(options), backend=config.backend) for name, options in config.variants.items()
    }
    if config.bf16:
        runs["bf16"] = Module(problem, precision="bf16")
    truth = Truth(problem, getattr(torch, config.truth))
    against: dict[str, dict[str, dict[str, Ratio]]] = {
        "fp64": {name: {row: Ratio() for row in ROWS} for name in runs},
        "bf16": {name: {row: Ratio() for row in ROWS} for name in config.variants if config.bf16},
    }
    done, total = 0, len(problem.lengths)
    for values, offsets, dout in problem.chunks():
        exact = truth(values, offsets, dout)
        results = {name: run(values, offsets, dout) for name, run in runs.items()}
        references = {"fp64": exact, "bf16": results.get("bf16")}
        for kind, table in against.items():
            for name, ratios in table.items():
                for row, value, reference in zip(ROWS[:2], results[name], references[kind] or (), strict=True):
                    ratios[row].add(value, reference)
        done += offsets.shape[0] - 1
        say(f"{config.name}: {done}/{total} samples")
    sums = {"fp64": truth.finish(), **({"bf16": runs["bf16"].finish()} if config.bf16 else {})}
    for kind, table in against.items():
        for name, ratios in table.items():
            for row, value in runs[name].finish().items():
                ratios[row].add(value, sums[kind][row])
    db = {kind: {name: {row: r.db for row, r in ratios.items()} for name, ratios in t.items()} for kind, t in against.items()}
    return {
        **db,
        "published": {name: dict(zip(ROWS, row, strict=False)) for name, row in PUBLISHED.items()},
        "samples": total,
        "tokens": sum(problem.lengths),
        "longest": max(problem.lengths),
        "truth": {"dtype": config.truth, "first_samples_db": check_truth(problem) if config.truth == "float32" else None},
        "seconds": {"truth": truth.seconds, **{name: run.seconds for name, run in runs.items()}},
    }


def check_truth(problem: Problem) -> float:
    """The least SQNR of FP32 truth against FP64 truth over all rows, on the first chunk's first two samples."""
    values, offsets, dout = next(problem.chunks())
    offsets = offsets[:3]
    values, dout = values[: int(offsets[-1])], dout[: offsets.shape[0] - 1]
    pair = [Truth(problem, dtype) for dtype in (torch.float32, torch.float64)]
    (low, low_dx), (high, high_dx) = (t(values, offsets, dout) for t in pair)
    low_sums, high_sums = (t.finish() for t in pair)
    worst = math.inf
    for value, reference in [(low, high), (low_dx, high_dx), *((low_sums[n], high_sums[n]) for n in high_sums)]:
        ratio = Ratio()
        ratio.add(value, reference)
        worst = min(worst, ratio.db)
    return worst


def missed_gates(config: NumericsConfig, results: dict[str, Any]) -> list[str]:
    """One line per gate that is not reached."""
    return [
        f"{name}: {row} is {results['fp64'][name][row]:.2f} dB, the gate is {limit:g}"
        for name, limits in config.gates.items()
        for row, limit in zip(ROWS, limits, strict=False)
        if not results["fp64"][name][row] >= limit
    ]


def report(config: NumericsConfig, results: dict[str, Any]) -> str:
    """Two tables, against FP64 and against BF16, with the published figures beside them."""
    parts = [
        f"{config.name}: {results['samples']} samples, {results['tokens']:,} events, longest {results['longest']:,}; "
        f"dim {config.shape.dim}, {config.shape.heads} heads, {config.shape.seeds} seeds; "
        f"{config.data.projections} init, {config.data.loss} loss. SQNR in dB."
    ]
    for kind, title in (("fp64", "against FP64"), ("bf16", "against BF16")):
        table = results[kind]
        if not table:
            continue
        names = list(table)
        beside = list(results["published"])
        rows = []
        for row in ROWS:
            cells = [f"{table[name][row]:.2f}" for name in names]
            if kind == "fp64":
                gate = ROWS.index(row)
                cells += [f"≥ {limits[gate]:g}" if gate < len(limits) else "" for limits in config.gates.values()]
            cells += [f"{results['published'][p][row]:.2f}" if row in results["published"][p] else "" for p in beside]
            rows.append([row + ("" if row == ROWS[0] else " grad"), *cells])
        gates = [f"gate {name}" for name in config.gates] if kind == "fp64" else []
        parts.append(format_table([title, *names, *gates, *beside], rows))
    parts.append("The published figures are against BF16, on data that were not published in full.")
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """The command. Returns 0, or 1 if a gate is missed."""
    config = parse_command_line(
        NumericsConfig, argv, "numerics", "Signal-to-noise ratio of every output and gradient of PMA, per variant of its numerics."
    )
    if config.backend != "auto" and not config.variants:
        raise ConfigError("variants is empty; there is nothing to measure")
    results = measure(config)
    folder = config.out if config.out is not None else Path("out/numerics")
    path = folder / f"{config.name}.json"
    write_record(path, "numerics", config, results, pick_device(config.device))
    print(report(config, results))
    print(f"\nwritten: {path}")
    missed = missed_gates(config, results)
    for line in missed:
        print(f"MISSED {line}")
    return 1 if missed else 0
