"""``python -m benchmarks clocks``: at which clock the Hopper attention kernels run, and whether it is power that sets it.

On codes that are all 0, or all 1, a kernel executes what it executes on random ones and toggles few bits. If both take the same
milliseconds, power does not bound them; if they take the same number of clocks and other milliseconds, it does. Each is measured as a
*burst* (single launches on a device that rested, the median) and *sustained* (launches queued without a gap, the second half of them). The
clock is counted by the multiprocessors themselves (``benchmarks.stamp``); watts, the driver's clock and how often it names the power cap
are those of ``nvidia-smi`` meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.config import UserError, parse_command_line, setting
from benchmarks.harness import check_known, check_timed, format_table, pick_device, say, write_record
from benchmarks.kernels import SHAPES, Shape, without_copy

CONSTANTS = {"ones": 0x38, "zeros": 0x00}
"""E4M3 codes of a constant operand."""
POWER_CAP = 0x4
"""Bit of ``nvidia-smi``'s reasons: the software power cap."""
QUERY = "timestamp,power.draw.instant,clocks.sm,clocks_throttle_reasons.active"


@dataclass(frozen=True)
class ClocksConfig:
    """What to measure."""

    shapes: list[str] = setting(help="names of benchmarks.kernels.SHAPES", factory=lambda: ["llm_8192", "pma_4096_jagged"])
    backward: bool = setting(True, help="also the backward, with what it launches before and after")
    rounds: int = setting(7, help="single launches of each")
    pause: float = setting(0.02, help="seconds before a single launch")
    sustained: float = setting(0.9, help="seconds without a gap; the second half counts")
    device: str = setting("auto", help="where to run")
    out: Path = setting(Path("out/clocks"), help="folder of the JSON record")


def clock_of(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Clock in GHz and seconds between two stamps (int64 ``[CTAs, 3]``): medians over the multiprocessors that both have met."""
    first = {row[0]: row for row in before.tolist()}
    spans = [(cycles - first[at][1], end - first[at][2]) for at, cycles, end in after.tolist() if at in first]
    spans = [(cycles, nanoseconds) for cycles, nanoseconds in spans if nanoseconds > 0]
    if not spans:
        raise RuntimeError("no multiprocessor is in both stamps")
    return statistics.median(c / t for c, t in spans), statistics.median(t for _, t in spans) / 1e9


@dataclass(frozen=True)
class Sample:
    """A line of ``nvidia-smi``: seconds since the epoch, watts, MHz, whether the power cap is a reason for the clock."""

    time: float
    watts: float
    mhz: float
    capped: bool


def samples_of(text: str) -> list[Sample]:
    """Lines of ``nvidia-smi --query-gpu`` of :data:`QUERY`; a last one that is cut off is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            moment, watts, mhz, reasons = (part.strip() for part in line.split(","))
            at = datetime.datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            found.append(Sample(at, float(watts), float(mhz), bool(int(reasons, 16) & POWER_CAP)))
    return found


def power_of(samples: Sequence[Sample], begin: float, end: float) -> dict[str, float | None]:
    """Medians of the samples between two times, and the share of them under the power cap; None where there are none."""
    seen = [s for s in samples if begin <= s.time <= end]
    if not seen:
        return {"watts": None, "smi_mhz": None, "power_capped": None}
    watts, mhz = (statistics.median(values) for values in ([s.watts for s in seen], [s.mhz for s in seen]))
    return {"watts": watts, "smi_mhz": mhz, "power_capped": sum(s.capped for s in seen) / len(seen)}


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Callable[[], list[Sample]]]:
    """``nvidia-smi`` on ``device``, every 20 ms; yields a function that reads what it said so far (nothing where it is not installed)."""
    command = ["nvidia-smi", "-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}", f"--query-gpu={QUERY}"]
    with tempfile.TemporaryFile("w+") as file:
        try:
            running = subprocess.Popen([*command, "--format=csv,noheader,nounits", "-lms", "20"], stdout=file, stderr=subprocess.STDOUT)
        except FileNotFoundError:
            say("nvidia-smi was not found: no watts")
            yield list
            return

        def read() -> list[Sample]:
            file.seek(0)
            return samples_of(file.read())

        try:
            yield read
        finally:
            running.terminate()
            running.wait()
            if not read():
                file.seek(0)
                say(f"nvidia-smi gave no sample: no watts ({file.read(200).strip()!r})")


def constant(problem: Any, byte: int) -> Any:
    """The problem with every code of Q, K and V (and of V's copy) ``byte``, which stands for 0 or 1, and V's sums those of that."""
    from lp_fa4.mx import MXTensor
    from lp_fa4.sm90.operands import MXTensorWithCopy

    def filled(x: MXTensor) -> MXTensor:
        made = MXTensor.from_bytes(torch.full_like(x.codes, byte), x.scale_bytes, x.block, x.offsets, x.token_dim)
        if not isinstance(x, MXTensorWithCopy) or x.transposed is None:
            return made
        return MXTensorWithCopy(made.payload, made.scale, made.block, made.offsets, made.token_dim, torch.full_like(x.transposed, byte))

    sums = problem.v_sum
    if sums is not None:
        lengths = (problem.offsets_k[1:] - problem.offsets_k[:-1]).float()
        sums = (lengths[:, None, None] * (byte != 0)).expand_as(sums).contiguous()
    return dataclasses.replace(problem, q=filled(problem.q), k=filled(problem.k), v=filled(problem.v), v_sum=sums)


def calls_of(shape: Shape, device: torch.device, what: str) -> dict[str, Callable[[], Any]]:
    """Calls by the data that they run on; the forward of shared queries also on V without its copy."""
    from benchmarks import kernels, kernels_backward
    from lp_fa4.sm90.backward_host import backward
    from lp_fa4.sm90.forward_host import forward

    if what == "forward":
        problem = kernels.problem_of(shape, device)
        problems = {"random": problem, **{name: constant(problem, byte) for name, byte in CONSTANTS.items()}}
        if shape.shared:
            problems["random, V as it is"] = without_copy(problem)
        return {name: functools.partial(forward, p) for name, p in problems.items()}
    problem, dout = kernels_backward.problem_of(shape, device, "mxfp8", "float16")
    given = {"random": (problem, dout)}
    given |= {name: (constant(problem, byte), torch.full_like(dout, float(byte != 0))) for name, byte in CONSTANTS.items()}
    return {name: functools.partial(backward, p, forward(p), d) for name, (p, d) in given.items()}


def burst(call: Callable[[], Any], device: torch.device, rounds: int, pause: float) -> dict[str, float]:
    """Milliseconds and GHz of single launches behind a queued wait: those of the median launch."""
    from benchmarks.stamp import stamp, stamps

    before, after = stamps(device), stamps(device)
    found = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize(device)
        time.sleep(pause)
        torch.cuda._sleep(5_000_000)  # some 2.5 ms in which the host queues everything
        stamp(before)
        call()
        stamp(after)
        torch.cuda.synchronize(device)
        if turn:
            ghz, seconds = clock_of(before, after)
            found.append((seconds * 1e3, ghz))
    ms, ghz = sorted(found)[len(found) // 2]
    return {"ms": ms, "ghz": ghz}


def sustained(call: Callable[[], Any], device: torch.device, ms: float, seconds: float) -> dict[str, float]:
    """Milliseconds and GHz of launches without a gap, in the second half of about ``seconds``, and when that half ran."""
    from benchmarks.stamp import stamp, stamps

    before, after, launches = stamps(device), stamps(device), max(2, int(seconds / 2 / (ms * 1.15e-3)))
    torch.cuda.synchronize(device)
    for _ in range(launches):
        call()
    stamp(before)
    half = torch.cuda.Event()
    half.record()
    for _ in range(launches):
        call()
    stamp(after)
    while not half.query():
        time.sleep(0.005)
    begin = time.time()
    torch.cuda.synchronize(device)
    ghz, span = clock_of(before, after)
    return {"ms": span * 1e3 / launches, "ghz": ghz, "begin": begin, "end": time.time()}


def measure(shape: Shape, device: torch.device, what: str, config: ClocksConfig, samples: Callable[[], list[Sample]]) -> list[dict]:
    """Rows of one shape and pass."""
    calls = calls_of(shape, device, what)
    rows: list[dict[str, Any]] = []
    for data, call in calls.items():
        call()  # compiled here
        rows.append({"data": data, "mode": "burst", **burst(call, device, config.rounds, config.pause)})
    for data, call in calls.items() if config.sustained else ():
        ms = next(row["ms"] for row in rows if row["data"] == data)
        made = sustained(call, device, ms, config.sustained)
        power = power_of(samples(), made.pop("begin"), made.pop("end"))
        rows.append({"data": data, "mode": "sustained", **made, **power})
    flops = shape.flops() * (1 if what == "forward" else 2.5)
    return [{"shape": shape.name, "what": what, **r, "mclocks": r["ms"] * r["ghz"], "tflops": flops / r["ms"] / 1e9} for r in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    columns = ["shape", "pass", "data", "mode", "ms", "GHz", "million clocks", "TFLOP/s", "W", "under the cap"]
    cells = [
        [
            *(r[key] for key in ("shape", "what", "data", "mode")),
            f"{r['ms']:.3f}",
            f"{r['ghz']:.3f}",
            f"{r['mclocks']:.2f}",
            f"{r['tflops']:.0f}" if "tflops" in r else None,
            None if r.get("watts") is None else f"{r['watts']:.0f}",
            None if r.get("power_capped") is None else f"{100 * r['power_capped']:.0f}%",
        ]
        for r in rows
    ]
    return format_table(columns, cells)


def main(argv: Sequence[str]) -> int:
    """The command."""
    config = parse_command_line(ClocksConfig, argv, "clocks", "Clocks of the attention kernels on random and on constant operands.")
    device = pick_device(config.device)
    check_timed(device, config.device, "clocks are counted")
    check_known("shapes", config.shapes, SHAPES)
    if config.rounds < 1:
        raise UserError(f"rounds = {config.rounds}: expected at least 1")
    waiting = burst(lambda: torch.cuda._sleep(3_000_000), device, config.rounds, config.pause)
    rows: list[dict[str, Any]] = [{"shape": "", "what": "a kernel that waits", "data": "", "mode": "burst", **waiting}]
    rows[0]["mclocks"] = waiting["ms"] * waiting["ghz"]
    path = config.out / "forward_clocks.json"
    with watched(device) as samples:
        for name in config.shapes:
            for what in ("forward", "backward") if config.backward else ("forward",):
                rows += measure(SHAPES[name], device, what, config, samples)
                write_record(path, "clocks", config, rows, device)
                torch.cuda.empty_cache()
    print(table(rows))
    print(f"\nwritten: {path}")
    return 0
