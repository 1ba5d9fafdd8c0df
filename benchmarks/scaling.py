"""Weak scaling of the module's step: ``python -m benchmarks module --world-size N``.

N processes, one a GPU, each with the whole batch of the configuration, under DistributedDataParallel. Per shape and precision:

    alone     rank 0's step while the others wait: the time to compare with
    no_sync   all ranks at once, gradients not exchanged
    step      all ranks at once, gradients averaged

Times are the median over rounds of the slowest rank. Scaling is events a second of all ranks over those of one alone; the communication
share is ``1 - no_sync / step``. Jagged batches come twice: as drawn by every rank for itself, and dealt out by
:func:`modules.balance.deal`, with the imbalance that this removes.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.config import UserError
from benchmarks.harness import format_table, say, write_record
from benchmarks.module import Batch, ModuleConfig, Shape, make_batch, make_module, shapes_of
from modules.balance import deal, imbalance


def lengths_of_ranks(config: ModuleConfig, index: int, balanced: bool) -> list[list[int]]:
    """Every rank's lengths for row ``index`` of the table."""
    drawn = [list(shapes_of(config, rank)[index].lengths) for rank in range(config.world_size)]
    if not balanced:
        return drawn
    everything = [n for lengths in drawn for n in lengths]
    return [[everything[i] for i in part] for part in deal(everything, config.world_size)]


def _seconds(call: Callable[[], Any], device: torch.device, warmup: int, rounds: int, together: bool) -> list[float]:
    """Seconds of every round, from a common start where ranks run ``together``."""
    found = []
    for turn in range(warmup + rounds):
        if together:
            dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        if turn >= warmup:
            found.append(time.perf_counter() - begin)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(config: ModuleConfig, device: torch.device, rank: int, model: nn.Module, batch: Batch) -> dict[str, float]:
    """Milliseconds of the slowest rank: ``alone``, ``no_sync``, ``step``."""
    ids = [device.index] if device.type == "cuda" else None
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def step(module: nn.Module) -> None:
        for p in (batch.values, *model.parameters()):
            p.grad = None
        module(batch.values, batch.offsets).backward(batch.dout)

    def without_exchange() -> None:
        with parallel.no_sync():
            step(parallel)

    step(model)  # compiles on every rank
    dist.barrier()
    alone = _seconds(lambda: step(model), device, config.warmup, config.rounds, False) if rank == 0 else []
    dist.barrier()
    found: dict[str, float] = {}
    for name, call in (("no_sync", without_exchange), ("step", lambda: step(parallel))):
        mine = torch.tensor(_seconds(call, device, config.warmup, config.rounds, True), dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found[name] = 1e3 * statistics.median(mine.tolist())
    if alone:
        found["alone"] = 1e3 * statistics.median(alone)
    return found


def measure(config: ModuleConfig, rank: int, device: torch.device) -> list[dict[str, Any]]:
    """Every row, in a process group of ``config.world_size`` ranks that all call this; empty on all but rank 0."""
    rows: list[dict[str, Any]] = []
    models = {name: make_module(config, name, device) for name in config.precisions}
    for index, shape in enumerate(shapes_of(config)):
        for balanced in (False, True) if shape.kind == "jagged" and config.world_size > 1 else (False,):
            ranks = lengths_of_ranks(config, index, balanced)
            totals = [sum(lengths) for lengths in ranks]
            batch = make_batch(config, Shape(shape.keys, shape.kind, tuple(ranks[rank])), device, config.seed + rank)
            for name, model in models.items():
                ms = _measure(config, device, rank, model, batch)
                if rank == 0:
                    speed = sum(totals) / ms["step"] / (totals[0] / ms["alone"])
                    row = {"keys": shape.keys, "kind": shape.kind, "balanced": balanced, "precision": name, "events": totals, "ms": ms}
                    row |= {"scaling": speed, "communication": 1 - ms["no_sync"] / ms["step"], "imbalance": imbalance(totals)}
                    say(f"{shape.name}{', balanced' if balanced else ''}, {name}: {speed:.3f}x on {config.world_size}")
                    rows.append(row)
            del batch
    return rows


def _worker(rank: int, config: ModuleConfig, kind: str, rendezvous: str, out: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    options: dict[str, Any] = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=180),
        **options,
    )
    rows = measure(config, rank, device)
    dist.barrier()
    if rank == 0:
        path = Path(out)
        write_record(path, "module scaling", config, rows, device)
        print(report(config, rows), flush=True)
        print(f"\nwritten: {path}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def report(config: ModuleConfig, rows: list[dict[str, Any]]) -> str:
    """The table."""
    table = [
        [
            f"{r['keys']} {r['kind']}{' balanced' if r['balanced'] else ''}",
            r["precision"].upper(),
            *(f"{r['ms'][key]:.2f}" for key in ("alone", "no_sync", "step")),
            f"{r['scaling']:.3f}×",
            f"{100 * r['communication']:.1f}%",
            f"{100 * r['imbalance']:.1f}%",
        ]
        for r in rows
    ]
    title = f"Weak scaling on {config.world_size}: B {config.batch} a rank, milliseconds of the slowest rank (median of {config.rounds})"
    return format_table(["events", "precision", "alone", "no_sync", "step", "throughput", "communication", "imbalance"], table, title)


def run_scaling(config: ModuleConfig, device: torch.device) -> int:
    """Start the processes and wait for them. Raises ``UserError`` if there are not enough GPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < config.world_size:
        raise UserError(f"world_size: got {config.world_size}, this machine has {torch.cuda.device_count()} CUDA device(s)")
    with tempfile.TemporaryDirectory() as folder:
        out = str(config.out / f"{config.name}_x{config.world_size}.json")
        mp.spawn(_worker, (config, device.type, f"{folder}/rendezvous", out), nprocs=config.world_size)
    return 0
