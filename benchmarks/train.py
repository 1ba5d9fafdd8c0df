"""``python -m benchmarks train``: one recommendation model, trained in BF16 and in MXFP8, compared by normalized entropy.

The task: will the next rating reach the threshold, given the user's whole earlier history? `benchmarks.data` describes the requests and
the split in time, `benchmarks.train_model` the model. For every seed the model is trained once in each precision from the same initial
parameters on the same batches in the same order, so the difference of a pair is due to the precision alone, and the spread over seeds
says how much of it is noise. Runs do not depend on one another and are spread over processes; how many has no influence on any figure.

Results: a table, a JSON record (configuration, versions, commit, machine, every curve) and a PNG with the learning curves.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue as queues
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import harness, plots
from benchmarks.config import UserError, from_dict, parse_command_line, setting
from benchmarks.data import (
    Batch,
    Columns,
    Dataset,
    Requests,
    evaluation_batches,
    make_batch,
    make_dataset,
    read_interactions,
    shipped_file,
    training_batches,
)
from benchmarks.metrics import auc, entropy, normalized_entropy
from benchmarks.synthetic import SyntheticConfig, SyntheticDataset, make_synthetic

Precision = Literal["bf16", "mxfp8"]


def _at_least(owner: Any, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(owner, name)
        if value < bound:
            raise ValueError(f"{name}: got {value}, expected at least {bound}")


@dataclass(frozen=True)
class DataConfig:
    """Which interactions, and how they are split."""

    path: Path | None = setting(None, "file in RecBole's atomic format; null: MovieLens-100K as the recbole wheel ships it")
    user: str = setting("user_id", "column of the user")
    item: str = setting("item_id", "column of the item")
    rating: str = setting("rating", "column of the rating")
    time: str = setting("timestamp", "column of the time in seconds")
    threshold: float = setting(4.0, "a rating of at least this is a positive label")
    held_out: float = setting(0.2, "share of events in the held-out tail, the last in time")
    max_history: int | None = setting(None, "longest history, the latest events; null: the whole history")
    synthetic: SyntheticConfig | None = setting(None, "long histories with labels from a known rule, instead of a file")


@dataclass(frozen=True)
class ModelConfig:
    """The model; see `benchmarks.train_model.RatingModel` and `modules.PMA`."""

    dim: int = setting(64, "width of embeddings, events and pooled vectors")
    num_heads: int = setting(2, "attention heads; dim / num_heads must be a head dimension that PMA serves")
    num_seeds: int = setting(4, "learned queries, pooled vectors of a request")
    value_proj: bool = setting(False, "project the values too")
    numerics: str = setting("default", "preset of what is rounded where in MXFP8: default or post")
    backend: str = setting("auto", "attention backend of PMA")
    hidden: tuple[int, ...] = setting((64, 32), "widths of the interaction MLP's hidden layers")
    dropout: float = setting(0.1, "on the hidden layers, in training")

    def __post_init__(self) -> None:
        _at_least(self, dim=1, num_heads=1, num_seeds=1, dropout=0.0)
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden: got {list(self.hidden)}, expected at least one width of at least 1")
        if self.dropout >= 1:
            raise ValueError(f"dropout: got {self.dropout}, expected less than 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a cosine decay to 5% of the peak."""

    steps: int = setting(600, "optimizer steps of one run")
    batch_size: int = setting(64, "requests of one step")
    learning_rate: float = setting(4e-3, "peak, of everything but the embeddings")
    embedding_learning_rate: float = setting(2e-2, "peak, of the embedding tables")
    weight_decay: float = setting(1e-2, "of everything but the embeddings")
    warmup: int = setting(50, "steps of linear warm-up")

    def __post_init__(self) -> None:
        _at_least(self, steps=1, batch_size=1, learning_rate=0.0, embedding_learning_rate=0.0, weight_decay=0.0, warmup=0)


@dataclass(frozen=True)
class EvaluationConfig:
    """How the held-out tail is judged."""

    batch_size: int = setting(256, "requests of one forward pass")
    points: int = setting(12, "points of the held-out learning curve")
    requests: int = setting(1200, "held-out requests of each point, evenly spaced in time; the final figures use all")

    def __post_init__(self) -> None:
        _at_least(self, batch_size=1, points=1, requests=1)


@dataclass(frozen=True)
class TrainConfig:
    """Everything a comparison needs."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    precisions: tuple[Precision, ...] = setting(("bf16", "mxfp8"), "what to compare; the first is the baseline")
    seeds: tuple[int, ...] = setting((0, 1, 2, 3, 4), "each seed trains the model once in every precision")
    device: str = setting("cpu", "cpu, cuda, cuda:N, or auto: the first CUDA device if there is one")
    threads: int = setting(1, "torch threads of one run on the CPU; the operations are small, a second thread hardly helps")
    jobs: int | None = setting(None, "runs at a time, in processes of their own; null: one per core on the CPU, 1 on a GPU")
    output: Path = setting(Path("out/train_ml100k"), "where results go: this path with .json and .png")
    record: Path | None = setting(None, "JSON record of a finished comparison: draw its figure again to output, without training")

    def __post_init__(self) -> None:
        _at_least(self, threads=1)
        for name in ("precisions", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: got {list(values)}, expected at least one, none of them twice")
        if self.jobs is not None:
            _at_least(self, jobs=1)


@dataclass(frozen=True)
class Point:
    """One point of a learning curve. `training` is the mean over the steps since the last point; both are normalized entropies."""

    step: int
    training: float
    held_out: float


@dataclass(frozen=True)
class Judgement:
    """Figures on the whole held-out tail."""

    ne: float
    auc: float


@dataclass(frozen=True)
class Run:
    """What one training run gave. ne, auc: on the whole held-out tail. seconds: of its training steps and of that evaluation.

    served: the same parameters, evaluated in other precisions (a checkpoint is precision-free); of the baseline's runs only.
    """

    precision: str
    seed: int
    ne: float
    auc: float
    curve: tuple[Point, ...]
    served: dict[str, Judgement]
    train_seconds: float
    evaluate_seconds: float


Progress = Callable[[str, int, int, float], None]
"""Called after every step with (precision, seed, step, training loss of the step)."""


class TrainingError(UserError):
    """Training cannot go on: the loss is not finite."""


def load_data(config: DataConfig) -> Dataset:
    """Read and split the interactions that `config` names, or make them."""
    if config.synthetic is not None:
        return make_synthetic(config.synthetic)
    columns = Columns(config.user, config.item, config.rating, config.time)
    events = read_interactions(config.path or shipped_file(), columns)
    return make_dataset(events, threshold=config.threshold, held_out=config.held_out, max_history=config.max_history)


def build_model(config: ModelConfig, data: Dataset, precision: str) -> torch.nn.Module:
    """The model in one precision, initialised from torch's global generator: the same parameters for every precision."""
    from benchmarks.train_model import RatingModel
    from modules import PMA

    try:
        pool = PMA(
            config.dim,
            config.num_heads,
            config.num_seeds,
            precision=precision,
            value_proj=config.value_proj,
            backend="auto" if precision == "bf16" else config.backend,
            numerics=config.numerics,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None
    return RatingModel(
        pool,
        num_items=data.num_items,
        num_ratings=data.num_ratings,
        dim=config.dim,
        num_seeds=config.num_seeds,
        hidden=config.hidden,
        dropout=config.dropout,
        validate=True,
    )


def evaluate(model: torch.nn.Module, data: Dataset, requests: Requests, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits and labels of every target of `requests`, on the CPU, in their order."""
    from benchmarks.train_model import features

    training = model.training
    model.eval()
    logits, labels = [], []
    with torch.no_grad():
        for chosen in evaluation_batches(requests, batch_size):
            batch: Batch = make_batch(data, chosen)
            logits.append(model(features(batch, device)).cpu())
            labels.append(batch.label)
    model.train(training)
    return torch.cat(logits), torch.cat(labels)


def judge(model: torch.nn.Module, data: Dataset, config: TrainConfig, device: torch.device) -> Judgement:
    """NE and AUC of `model` on the whole held-out tail."""
    logits, labels = evaluate(model, data, data.held_out, config.evaluate.batch_size, device)
    return Judgement(normalized_entropy(logits, labels), auc(logits, labels))


def _schedule(step: int, config: OptimizerConfig) -> float:
    """Factor on the peak learning rates at `step`, counted from 0."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / config.steps)))


def train_once(
    config: TrainConfig, data: Dataset, precision: str, seed: int, device: torch.device, progress: Progress | None = None
) -> Run:
    """Train one model in one precision from one seed and judge it on the held-out tail.

    Parameters, batches and their order depend on `seed` alone, dropout on `seed` alone too; the precision changes only the arithmetic.

    Raises:
        TrainingError: the loss is NaN or infinite.
    """
    from benchmarks.train_model import features

    torch.manual_seed(seed)
    model = build_model(config.model, data, precision).to(device)
    tables = {id(p) for p in model.embeddings.parameters()}  # type: ignore[operator, union-attr]
    dense = [p for p in model.parameters() if id(p) not in tables]
    sparse = [p for p in model.parameters() if id(p) in tables]
    optimizer = torch.optim.AdamW(
        [
            {"params": sparse, "lr": config.train.embedding_learning_rate, "weight_decay": 0.0},
            {"params": dense, "lr": config.train.learning_rate, "weight_decay": config.train.weight_decay},
        ],
        betas=(0.9, 0.99),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, config.train))
    base = entropy(data.base_rate(data.train))
    sampled = np.unique(np.linspace(0, len(data.held_out) - 1, min(config.evaluate.requests, len(data.held_out))).astype(np.int64))
    sample = data.held_out.take(sampled)
    stops = set(np.unique(np.linspace(0, config.train.steps, config.evaluate.points + 1).round().astype(int)[1:]).tolist())
    batches = training_batches(data.train, config.train.batch_size, seed)
    curve, losses, seconds = [], [], 0.0
    for step in range(1, config.train.steps + 1):
        begin = time.perf_counter()
        batch = make_batch(data, next(batches))
        logits = model(features(batch, device))
        loss = F.binary_cross_entropy_with_logits(logits, batch.label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        value = loss.item()
        seconds += time.perf_counter() - begin
        if not math.isfinite(value):
            raise TrainingError(f"{precision}, seed {seed}: the training loss is {value} at step {step} of {config.train.steps}")
        losses.append(value)
        if progress is not None:
            progress(precision, seed, step, value)
        if step in stops:
            held_out = normalized_entropy(*evaluate(model, data, sample, config.evaluate.batch_size, device))
            curve.append(Point(step, statistics.fmean(losses) / base, held_out))
            losses = []
    begin = time.perf_counter()
    judgement = judge(model, data, config, device)
    evaluate_seconds = time.perf_counter() - begin
    served: dict[str, Judgement] = {}
    if precision == config.precisions[0]:
        for other in config.precisions[1:]:
            same = build_model(config.model, data, other).to(device)
            same.load_state_dict(model.state_dict())
            served[other] = judge(same, data, config, device)
    return Run(
        precision=precision,
        seed=seed,
        ne=judgement.ne,
        auc=judgement.auc,
        curve=tuple(curve),
        served=served,
        train_seconds=seconds,
        evaluate_seconds=evaluate_seconds,
    )


# Runs in processes of their own. A worker gets configuration, data and the queue once, at its start.
_worker: dict[str, Any] = {}


def _quiet() -> None:
    """TorchRec's import logs a note about torch.fx that says nothing to a reader of this command."""
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _leave_with_parent() -> None:
    """End this process when its parent is gone, killed for one: a run that nobody waits for would hold a core for minutes."""
    parent = torch.multiprocessing.parent_process()
    assert parent is not None, "only a worker process has a parent to leave with"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start_worker(config: TrainConfig, data: Dataset, reports: Any) -> None:
    _leave_with_parent()
    _quiet()
    logging.getLogger("lp_fa4").setLevel(logging.ERROR)  # which backend serves the CPU need not be said by every worker
    torch.set_num_threads(config.threads)
    _worker.update(config=config, data=data, reports=reports)


def _run_in_worker(precision: str, seed: int) -> Run:
    def progress(*report: Any) -> None:
        _worker["reports"].put(report)

    return train_once(_worker["config"], _worker["data"], precision, seed, torch.device("cpu"), progress)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Progress]:
    """A progress bar over the steps of all runs; yields what to call after a step."""
    from tqdm import tqdm

    # A log file gets a line every 15 seconds instead of a moving bar.
    live = sys.stderr.isatty()
    with tqdm(total=total, unit="step", disable=not shown, dynamic_ncols=live, mininterval=0.2 if live else 15, smoothing=0.05) as bar:

        def progress(precision: str, seed: int, step: int, loss: float) -> None:
            if bar.n == 0:
                bar.unpause()  # the pace is that of the steps, without the start of the processes
            bar.set_description(f"{precision} seed {seed}", refresh=False)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        yield progress


def _train_in_processes(config: TrainConfig, data: Dataset, order: Sequence[tuple[str, int]], jobs: int, progress: Progress) -> list[Run]:
    context = torch.multiprocessing.get_context("spawn")
    reports = context.Queue()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(config, data, reports))
    try:
        futures: list[Future[Run]] = [pool.submit(_run_in_worker, precision, seed) for precision, seed in order]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
            while True:
                try:
                    progress(*reports.get_nowait())
                except queues.Empty:
                    break
            for future in done:
                future.result()  # an error of one run ends all
        return [future.result() for future in futures]
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def train_all(config: TrainConfig, data: Dataset, *, show_progress: bool = True) -> list[Run]:
    """Every precision of every seed, seed by seed, in as many processes as the configuration says."""
    device = harness.pick_device(config.device)
    order = [(precision, seed) for seed in config.seeds for precision in config.precisions]
    jobs = config.jobs or (1 if device.type == "cuda" else max(1, harness.cores() // config.threads))
    jobs = min(jobs, len(order))
    if device.type == "cuda" and jobs > 1:
        raise UserError(f"jobs: got {jobs} with device {config.device!r}, expected 1: runs on one GPU would slow one another down")
    with _bar(len(order) * config.train.steps, show_progress) as progress:
        if jobs > 1:
            return _train_in_processes(config, data, order, jobs, progress)
        before = torch.get_num_threads()
        torch.set_num_threads(config.threads)
        try:
            return [train_once(config, data, precision, seed, device, progress) for precision, seed in order]
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True)
class Part:
    """One side of the split: its requests, the ratings to predict, and the share of them that reaches the threshold.

    floor: normalized entropy of the rule that drew the labels, where one did: the least that a model can reach.
    """

    requests: int
    ratings: int
    base_rate: float
    floor: float | None = None

    @staticmethod
    def of(data: Dataset, requests: Requests) -> Part:
        """Of `requests`, one side of `data`."""
        floor = data.floor(requests) if isinstance(data, SyntheticDataset) else None
        return Part(len(requests), requests.targets, data.base_rate(requests), floor)

    def __str__(self) -> str:
        return f"{self.requests:,} requests, {self.ratings:,} ratings, base rate {self.base_rate:.1%}"


@dataclass(frozen=True)
class Figures:
    """Mean and sample standard deviation over seeds (0 with one seed)."""

    mean: float
    deviation: float

    @staticmethod
    def of(values: Sequence[float]) -> Figures:
        """From the values, one per seed."""
        return Figures(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Comparison:
    """One precision against the baseline: pairs of runs with the same seed.

    difference, auc_difference: precision minus baseline, over the pairs. spread: largest minus smallest NE of the baseline over its
    seeds. within: the mean difference is no larger than the spread; None with one seed, which shows no spread. served, served_auc: the
    baseline's parameters evaluated in this precision, minus the same evaluated in the baseline. No training noise is left in these two,
    so they show an error of the arithmetic long before it leaves the spread.
    """

    precision: str
    baseline: str
    difference: Figures
    auc_difference: Figures
    served: Figures
    served_auc: Figures
    spread: float
    within: bool | None


def compare(runs: Sequence[Run], precision: str, baseline: str) -> Comparison:
    """Pair the runs of two precisions by seed."""
    by = {(run.precision, run.seed): run for run in runs}
    seeds = [run.seed for run in runs if run.precision == baseline]
    reference = [by[baseline, seed].ne for seed in seeds]
    difference = Figures.of([by[precision, seed].ne - by[baseline, seed].ne for seed in seeds])
    spread = max(reference) - min(reference)
    return Comparison(
        precision=precision,
        baseline=baseline,
        difference=difference,
        auc_difference=Figures.of([by[precision, seed].auc - by[baseline, seed].auc for seed in seeds]),
        served=Figures.of([by[baseline, seed].served[precision].ne - by[baseline, seed].ne for seed in seeds]),
        served_auc=Figures.of([by[baseline, seed].served[precision].auc - by[baseline, seed].auc for seed in seeds]),
        spread=spread,
        within=None if len(seeds) < 2 else abs(difference.mean) <= spread,
    )


def _signed(figures: Figures) -> str:
    return f"{figures.mean:+.4f} ± {figures.deviation:.4f}"


def report(config: TrainConfig, runs: Sequence[Run], comparisons: Sequence[Comparison], held_out: Part) -> str:
    """The table and the verdict, as text."""
    rows: list[list[str | None]] = []
    for precision in config.precisions:
        mine = [run for run in runs if run.precision == precision]
        ne, area = Figures.of([r.ne for r in mine]), Figures.of([r.auc for r in mine])
        pace = statistics.fmean(r.train_seconds for r in mine) / config.train.steps * 1e3
        rows.append(
            [
                precision.upper(),
                f"{ne.mean:.4f} ± {ne.deviation:.4f}",
                f"{min(r.ne for r in mine):.4f} … {max(r.ne for r in mine):.4f}",
                f"{area.mean:.4f} ± {area.deviation:.4f}",
                f"{statistics.fmean(r.curve[-1].training for r in mine):.4f}",
                f"{pace:.0f} ms",
            ]
        )
    for c in comparisons:
        name, base = c.precision.upper(), c.baseline.upper()
        rows.append([f"{name} − {base}", _signed(c.difference), None, _signed(c.auc_difference), None, None])
        rows.append([f"{base} served in {name} − {base}", _signed(c.served), None, _signed(c.served_auc), None, None])
    seeds = len(config.seeds)
    positive = f"≥ {config.data.threshold:g}" if held_out.floor is None else "positive"
    rule = "" if held_out.floor is None else f"; the rule that drew the labels has an NE of {held_out.floor:.4f}"
    title = (
        f"Held-out tail: {held_out.ratings:,} ratings after the split, {held_out.base_rate:.1%} of them {positive} "
        f"(the base rate of NE){rule}.\n"
        f"Mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}; NE below 1 beats the base rate, lower is better."
    )
    columns = ["precision", "NE", "NE, best … worst", "AUC", "training NE", "step"]
    lines = [harness.format_table(columns, rows, title)]
    for c in comparisons:
        name, base = c.precision.upper(), c.baseline.upper()
        if c.within is None:
            lines.append(f"One seed shows no spread: nothing can be said about {name} against {base}. Name more seeds.")
        else:
            verdict = "within" if c.within else "OUTSIDE"
            lines.append(
                f"{name}'s NE is {verdict} the seed-to-seed spread of {base}: |{c.difference.mean:+.4f}| "
                f"{'≤' if c.within else '>'} {c.spread:.4f} (largest minus smallest NE of {base})."
            )
    return "\n".join(lines)


def draw(path: Path, config: TrainConfig, runs: Sequence[Run], comparisons: Sequence[Comparison], held_out: Part, note: str) -> None:
    """The figure: learning curves (mean and range over seeds) and the final NE of every pair of runs."""
    sampled = min(config.evaluate.requests, held_out.requests)
    with plots.figure(path, 1, 2, size=(11.5, 4.4)) as (drawing, (left, right)):
        for index, precision in enumerate(config.precisions):
            mine = [run for run in runs if run.precision == precision]
            steps = [point.step for point in mine[0].curve]
            color = plots.color(precision, index)
            dashes = "-" if index == 0 else (0, (4, 2))
            tail = np.array([[point.held_out for point in run.curve] for run in mine])
            training = np.array([[point.training for point in run.curve] for run in mine])
            left.fill_between(steps, tail.min(0), tail.max(0), color=color, alpha=0.13, linewidth=0)
            left.plot(steps, tail.mean(0), color=color, linestyle=dashes, label=f"{precision.upper()} held-out, {sampled:,} requests")
            left.plot(
                steps, training.mean(0), color=color, linestyle=dashes, linewidth=1, alpha=0.55, label=f"{precision.upper()} training"
            )
        left.set_title("Learning curves: mean and range over seeds")
        left.set_xlabel(f"step ({config.train.batch_size} requests each)")
        left.set_ylabel("normalized entropy")
        left.set_xlim(left=0)
        left.legend()
        for index, precision in enumerate(config.precisions):
            final = {run.seed: run.ne for run in runs if run.precision == precision}
            places = np.arange(len(config.seeds)) + (index - (len(config.precisions) - 1) / 2) * 0.22
            values = [final[seed] for seed in config.seeds]
            color = plots.color(precision, index)
            right.plot(places, values, marker="o", markersize=7, linestyle="none", color=color, label=precision.upper())
            right.axhline(statistics.fmean(values), color=color, linewidth=1, linestyle="-" if index == 0 else (0, (4, 2)))
        right.set_xticks(range(len(config.seeds)), [str(seed) for seed in config.seeds])
        right.grid(axis="x", visible=False)
        right.margins(y=0.25)
        right.set_xlabel("seed")
        right.set_ylabel("normalized entropy")
        right.set_title(f"All {held_out.requests:,} held-out requests")
        if comparisons:
            c = comparisons[0]
            text = f"{c.precision.upper()} − {c.baseline.upper()}: {_signed(c.difference)}"
            right.text(0.02, 0.03, text, transform=right.transAxes)
        right.legend(ncols=len(config.precisions), loc="upper right")
        plots.footnote(drawing, note)


def _note(source: str, environment: dict[str, Any]) -> str:
    machine, commit = environment["machine"], (environment["commit"] or "no commit")[:10] + ("+" if environment["modified"] else "")
    return f"{source} · NE over the base rate of the held-out tail · {machine.get('gpu', machine['cpu'])} · {commit}"


def redraw(record: Path, output: Path) -> str:
    """Draw the figure of a finished comparison again, from its JSON record, and return its table.

    Raises:
        UserError: the record cannot be read, or is not one of this command.
    """
    try:
        read = json.loads(record.read_text(encoding="utf-8"))
        config = from_dict(TrainConfig, read["config"])
        results = read["results"]
        runs = [
            Run(
                **{
                    **run,
                    "curve": tuple(Point(**point) for point in run["curve"]),
                    "served": {name: Judgement(**judgement) for name, judgement in run["served"].items()},
                }
            )
            for run in results["runs"]
        ]
        held_out, source = Part(**results["held_out"]), results["source"]
    except OSError as error:
        raise UserError(f"{record}: cannot read the record: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record}: not a record of this command ({type(error).__name__}: {error})") from None
    comparisons = [compare(runs, precision, config.precisions[0]) for precision in config.precisions[1:]]
    draw(Path(f"{output}.png"), config, runs, comparisons, held_out, _note(source, read["environment"]))
    return report(config, runs, comparisons, held_out)


def main(argv: Sequence[str]) -> int:
    """Run the command; see the module's text. Returns 0, also where the difference is outside the spread: that is a finding."""
    config = parse_command_line(TrainConfig, argv, "train", __doc__.split("\n\n")[1])
    if config.record is not None:
        print(redraw(config.record, config.output), flush=True)
        return 0
    _quiet()
    begin = time.perf_counter()
    device = harness.pick_device(config.device)
    data = load_data(config.data)
    training, held_out = Part.of(data, data.train), Part.of(data, data.held_out)
    source = "synthetic" if config.data.synthetic is not None else (config.data.path or shipped_file()).name
    lengths = np.concatenate([r.start - r.begin for r in (data.train, data.held_out)])
    harness.say(
        f"{source}: {len(data.events):,} events of {len(data.events.users):,} users and {len(data.events.items):,} items; "
        f"histories of 0 to {lengths.max()} events, mean {lengths.mean():.0f}"
    )
    harness.say(f"training: {training}; held out: {held_out}")
    harness.say(
        f"{len(config.seeds)} seeds x {', '.join(config.precisions)}: {config.train.steps} steps of {config.train.batch_size} requests each"
    )
    runs = train_all(config, data)
    seconds = time.perf_counter() - begin
    comparisons = [compare(runs, precision, config.precisions[0]) for precision in config.precisions[1:]]
    json_path, png_path = Path(f"{config.output}.json"), Path(f"{config.output}.png")
    results = {
        "source": source,
        "held_out": asdict(held_out),
        "training": asdict(training),
        "split_time": data.split_time,
        "comparisons": [asdict(c) for c in comparisons],
        "runs": [asdict(run) for run in runs],
        "seconds": seconds,
    }
    record = harness.write_record(json_path, "train", config, results, device)
    draw(png_path, config, runs, comparisons, held_out, _note(source, record["environment"]))
    harness.say(f"wrote {json_path} and {png_path} after {seconds / 60:.1f} minutes")
    print(report(config, runs, comparisons, held_out), flush=True)
    return 0
