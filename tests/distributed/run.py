"""Run the cases of ``cases.py`` in one process a rank, and write what they saw.

    python -m tests.distributed.run --device cuda --out benchmarks/results/h200-x2/distributed.json

One process a GPU over NCCL, or two on the CPU over gloo. Every case has a deadline: a rank that hangs ends the run with the case's name.
All cases share their processes, so that a kernel is compiled once.
"""

import argparse
import dataclasses
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.cases import CASES, Context, checkpoint

SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(dim=64, heads=2, seeds=3, scale=1, steps=30),
    "cuda": dict(dim=384, heads=3, seeds=512, scale=8, steps=200, dtype=torch.bfloat16),
}
SCALING = "configs/module_scaling.yaml"
WAIT = "DISTRIBUTED_WAIT"
"""Environment: a file whose existence lets the cases begin. Until then every rank has compiled its kernels on a small batch and waits, so
that something else can be timed on the machine meanwhile."""


def join(rank: int, world: int, kind: str, folder: Path, number: int) -> None:
    """Make the default process group of the first ``world`` ranks; ``number`` tells one rendezvous from the next."""
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder / f'rendezvous{number}'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
        **({"device_id": torch.device("cuda", rank)} if kind == "cuda" else {}),
    )


def worker(rank: int, world: int, kind: str, folder: Path, names: list[str]) -> None:
    """One rank: every case in turn; figures of rank 0 and the error of any rank go to files."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    join(rank, world, kind, folder, 0)
    context = Context(rank, world, device, folder, **SIZES[kind])
    number = 0

    def new_world(size: int) -> Context | None:
        nonlocal number
        number += 1
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if rank >= size:
            return None
        ready = folder / f"ready{number}"
        if rank == 0:
            ready.touch()
        while not ready.exists():  # a rank that had no part in the last group waits here, without one
            time.sleep(0.05)
        join(rank, size, kind, folder, number)
        return dataclasses.replace(context, world=size)

    def one(name: str) -> dict[str, Any]:
        if name == "checkpoint":
            return checkpoint(context, new_world)
        return scaling(context) if name == "scaling" else CASES[name](context)

    if gate := os.environ.get(WAIT):
        values, offsets = context.batch([70, 0, 200], 0)
        context.pma()(values.requires_grad_(), offsets).float().sum().backward()
        print(f"rank {rank} is ready", file=sys.stderr, flush=True)
        while not Path(gate).exists():
            time.sleep(0.1)
    for name in names:
        (folder / f"at{rank}").write_text(name)
        begin = time.perf_counter()
        failure = ""
        try:
            figures = one(name)
        except Exception:
            failure, figures = f"{name}, rank {rank}:\n{traceback.format_exc()}", {}
        (folder / f"status-{name}-{rank}").write_text(failure)
        if not all_arrive(folder, name, world) or (failure and not dist.is_initialized()):
            os._exit(1)  # the others are in a collective that this rank will not join, or there is no group left
        if kind == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if rank == 0 and not failure:
            figures["seconds of the case"] = round(time.perf_counter() - begin, 2)
            (folder / f"figures-{name}").write_text(json.dumps(figures))
            print(f"{name}: {figures}", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's teardown, in which a thread of TorchRec's libraries aborts the process now and then


def all_arrive(folder: Path, name: str, world: int, seconds: float = 75.0) -> bool:
    """Whether every rank has ended a case, well or badly, within a time: then the next one can begin."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all((folder / f"status-{name}-{r}").exists() for r in range(world)):
            return True
        time.sleep(0.02)
    return False


def scaling(context: Context) -> dict[str, Any]:
    """Weak scaling of the module's step, as ``python -m benchmarks module --world-size N`` measures it."""
    from benchmarks.config import load
    from benchmarks.module import ModuleConfig
    from benchmarks.scaling import measure, report

    small = [] if context.device.type == "cuda" else ["dim=64", "heads=2", "seeds=3", "batch=4", "keys=[40]", "warmup=1", "rounds=2"]
    config = load(ModuleConfig, SCALING, [f"world_size={context.world}", f"device={context.device.type}", *small])
    rows = measure(config, context.rank, context.device)
    if context.rank == 0:
        print(report(config, rows), file=sys.stderr, flush=True)
    return {"rows": rows}


def run(kind: str, world: int, names: list[str], seconds: float, done: dict[str, Any] | None = None) -> dict[str, Any]:
    """Figures of every case. Raises ``AssertionError`` with the tracebacks of all ranks, or the case at which they hang; ``done`` then
    holds the figures of the cases that passed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = mp.spawn(worker, (world, kind, folder, names), nprocs=world, join=False)
        deadline = time.monotonic() + seconds
        gate = Path(os.environ.get(WAIT, os.devnull))
        try:
            while not running.join(timeout=0.5):
                if not gate.exists():  # time counts from there
                    deadline = time.monotonic() + seconds
                places = [(folder / f"at{r}").read_text() if (folder / f"at{r}").exists() else "start" for r in range(world)]
                assert time.monotonic() < deadline, f"not done after {seconds:g} s; ranks are at {places}"
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            assert any(folder.glob("status-*")), str(error)
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.kill()
            figures = {n: json.loads((folder / f"figures-{n}").read_text()) for n in names if (folder / f"figures-{n}").exists()}
            if done is not None:
                done.update(figures)
        failures = [text for file in sorted(folder.glob("status-*")) if (text := file.read_text())]
        missing = [n for n in names if n not in figures]
        assert not failures and not missing, "\n".join(failures) or f"no result of {', '.join(missing)}"
        return figures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--world-size", type=int, help="processes; all GPUs, or two on the CPU")
    parser.add_argument("--cases", nargs="*", default=[*CASES, "checkpoint"], help="also scaling")
    parser.add_argument("--seconds", type=float, default=300.0, help="deadline of the whole run")
    parser.add_argument("--out", type=Path, help="JSON record")
    arguments = parser.parse_args()
    world = arguments.world_size or (torch.cuda.device_count() if arguments.device == "cuda" else 2)
    figures: dict[str, Any] = {}
    failure = ""
    try:
        run(arguments.device, world, arguments.cases, arguments.seconds, figures)
    except AssertionError as error:
        failure = figures["failed"] = str(error)
    if arguments.out is not None:
        from benchmarks.harness import write_record

        settings = {"device": arguments.device, "world_size": world, **SIZES[arguments.device]}
        write_record(arguments.out, "distributed", settings, figures, arguments.device)
    print(json.dumps(figures, indent=1))
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
