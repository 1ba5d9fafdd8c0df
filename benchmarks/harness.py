"""What every command shares: the record of a run (versions, commit, machine), tables, and timing by interleaved variants.

A figure means something only together with what produced it, so `write_record` puts one `environment` beside every result. A comparison
means something only when its variants met the same machine state, so `time_interleaved` runs them in turn, round after round.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.config import UserError, to_dict

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "flash-attn-4",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "recbole",
    "numpy",
)


def versions() -> dict[str, str]:
    """Installed versions of the packages that can change a result; absent packages are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


COMMIT_FILE = Path(__file__).with_name("commit.txt")
"""Holds the commit in an archive of the repository (``git archive`` fills it in), a placeholder in a checkout."""


def commit() -> dict[str, Any]:
    """The source's commit and whether tracked files differ from it. Outside a checkout: the commit of the archive that the source came
    in (what was changed since is then unknown, None), or None."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True, encoding="utf-8")
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        archived = COMMIT_FILE.read_text(encoding="utf-8").strip() if COMMIT_FILE.exists() else ""
        return {"commit": archived if archived and not archived.startswith("$") else None, "modified": None}
    head = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "modified": None if head is None or changes is None else bool(changes)}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine: processor, cores, torch's threads, and the accelerator if `device` is one."""
    device = torch.device(device)
    info: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info["gpu"] = properties.name
        info["compute_capability"] = f"{properties.major}.{properties.minor}"
        info["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        info["sm_count"] = properties.multi_processor_count
        info["cuda"] = torch.version.cuda
    return info


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Everything beside a result that is needed to repeat it: date, commit, versions, machine."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return {"date": now.isoformat(), **commit(), "versions": versions(), "machine": machine(device)}


def check_timed(device: torch.device, name: str, what: str) -> None:
    """Refuse a device, called ``name`` in the configuration, on which ``what`` ("kernels are timed") is not."""
    if device.type != "cuda":
        raise UserError(f"device = {name!r}: {what} on a CUDA device")


def check_known(key: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names of a list in the configuration that there are not."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"{key} = {unknown}: known are {', '.join(known)}")


def pick_device(name: str) -> torch.device:
    """The torch device called `name` ("auto": the first CUDA device, else the CPU); UserError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device = {name!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"device = {name!r}: this machine has {count} CUDA device(s)")
    return device


def _jsonable(value: Any) -> Any:
    """`value` for strict JSON: dataclasses to dicts, tensors and numpy scalars to numbers, NaN and infinities to their names."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return _jsonable(to_dict(value)) if hasattr(value, "__dataclass_fields__") else str(value)


def write_record(path: str | Path, command: str, config: Any, results: Any, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Write ``{"command", "config", "environment", "results"}`` as JSON, replacing the file only once it is whole.

    NaN and infinities, which JSON lacks, are written as the texts "nan", "inf" and "-inf". The setting ``out``, a folder of the machine
    that ran, is left out. Returns what was written.
    """
    settings = {name: value for name, value in to_dict(config).items() if name != "out"}
    record = _jsonable({"command": command, "config": settings, "environment": environment(device), "results": results})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(target)
    return record


def format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """A text table: first column left, the others right aligned; numbers should come formatted, None shows as a dash."""
    cells = [["–" if c is None else str(c) for c in row] for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"row {row} has {len(row)} cells, the table has {len(columns)} columns")
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [rule, line(columns), rule, *map(line, cells), rule]
    return "\n".join([title, *lines] if title else lines)


def say(text: str = "") -> None:
    """One line of progress for a human, on stderr, so that stdout stays for the result."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one variant over all rounds."""

    median: float
    best: float
    p90: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Statistics of at least one sample."""
        ordered = sorted(samples)
        p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
        return cls(statistics.median(samples), ordered[0], p90, tuple(samples))


LEAD_CYCLES = 10_000_000
"""What a GPU waits, some 5 ms, at the start of a round, so that launches are queued before the first of them runs: without it the time of a
small work is that of the host."""


def time_interleaved(
    variants: Mapping[str, Callable[[], Any]], device: torch.device | str = "cpu", *, warmup: int = 3, rounds: int = 20
) -> dict[str, Timing]:
    """Time several variants in turn: every round runs each of them once, in an order that rotates, so that clocks, heat and caches favour
    none.

    Args:
        variants: name to a function without arguments; what it returns is dropped.
        device: where the work runs. On CUDA each run is timed by a pair of events on the current stream, with one synchronisation a
            round; on the CPU by the wall clock.
        warmup: untimed rounds first (compilation, allocation).
        rounds: timed rounds, at least 1.

    Returns:
        name to `Timing`.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds = {rounds}, warmup = {warmup}: expected rounds >= 1 and warmup >= 0")
    device, names = torch.device(device), list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        shift = turn % max(len(names), 1)
        pending = []
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(LEAD_CYCLES)
        for name in names[shift:] + names[:shift]:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    variants[name]()
                    stop.record()
                pending.append((name, start, stop))
            else:
                begin = time.perf_counter()
                variants[name]()
                elapsed = (time.perf_counter() - begin) * 1e3
                if turn >= warmup:
                    samples[name].append(elapsed)
        if pending:
            torch.cuda.synchronize(device)
            if turn >= warmup:
                for name, start, stop in pending:
                    samples[name].append(start.elapsed_time(stop))
    return {name: Timing.of(values) for name, values in samples.items()}
