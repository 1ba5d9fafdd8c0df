"""Thousands of training steps of PMA on random jagged batches: does anything drift, grow, or fail to come back from a checkpoint?

    python -m tests.soak --device cuda --steps 2000 --out soak.json
    python -m tests.soak --device cpu --steps 20

Two copies of a model see the same batches. One runs eagerly; the other replays a captured CUDA graph (on a CPU: runs the graph that
``torch.compile`` traced). After every step their losses must have the same bits, after every tenth all parameters. Now and then the eager
model's loss and gradients are also taken on tensors of just the batch's size, without the spare capacity that a graph needs: the same loss
to the bit, gradients up to the order of FP32 sums. Half-way both models, optimizers and all, are saved; a tenth of the steps later fresh
models are loaded from there, run to the same step, and must have the same bits. Memory and kernels compiled must not grow after a warm-up.
"""

import argparse
import functools
import gc
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lp_fa4.compile import compile_count
from modules import PMA

WARM = 0.1
"""Share of the steps after which nothing may grow: the largest batch has been seen."""
TRIMMED = 25
"""Steps between looks at a batch without spare capacity."""
ORDER = 1e-5
"""Relative difference of a gradient's norm that another order of FP32 sums may make: parts of the sum over tokens follow the capacity."""


class Model(nn.Module):
    """PMA, one linear layer on the pooled vectors, and a loss whose sums do not depend on the capacity."""

    def __init__(self, dim: int, heads: int, seeds: int) -> None:
        super().__init__()
        self.pma = PMA(dim, heads, seeds)
        self.head = nn.Linear(dim, 1)

    def forward(self, values: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        pooled = self.pma(values, offsets).float().mean(1)
        return nn.functional.binary_cross_entropy_with_logits(self.head(pooled)[:, 0], target)


def batch_of(step: int, samples: int, capacity: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Events of ``step``'s own seed, NaN past the last; offsets; targets. In every tenth step half of the samples are empty, in every
    fiftieth all of them."""
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 2 * capacity // samples, (samples,), generator=g)
    if step % 10 == 3:
        lengths[: samples // 2] = 0
    if step % 50 == 7:
        lengths[:] = 0
    while int(lengths.sum()) > capacity:
        lengths[int(lengths.argmax())] //= 2
    x = torch.randn(int(lengths.sum()), dim, generator=g) * torch.exp2(torch.randint(-4, 5, (int(lengths.sum()), 1), generator=g).float())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    room = torch.full((capacity, dim), torch.nan)
    room[: x.shape[0]] = x
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    return room.to(device, kind), offsets.to(device), torch.rand(samples, generator=g).round().to(device)


class Eager:
    """A model and its optimizer, run as a user does."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = Model(*shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, capturable=device.type == "cuda")

    def gradients(self, call: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and gradients of all parameters."""
        loss = call(*given)
        return loss.detach(), torch.autograd.grad(loss, list(self.model.parameters()))

    def update(self, grads: tuple[Tensor, ...]) -> None:
        """The optimizer's step."""
        for p, grad in zip(self.model.parameters(), grads, strict=True):
            p.grad = grad
        self.optimizer.step()

    def step(self, values: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        """One training step; returns the loss."""
        loss, grads = self.gradients(self.model, values, offsets, target)
        self.update(grads)
        return loss

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Traced(Eager):
    """The graph that ``torch.compile`` makes of the model, for every batch."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        super().__init__(shape, device)
        self.compiled = torch.compile(self.model, fullgraph=True, dynamic=True, backend="aot_eager")

    def step(self, values: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        loss, grads = self.gradients(self.compiled, values, offsets, target)
        self.update(grads)
        return loss


class Replayed(Eager):
    """Forward and backward captured once, on buffers of its own."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, samples: int, capacity: int) -> None:
        super().__init__(shape, device)
        self.values = torch.full((capacity, shape[0]), torch.nan, dtype=torch.bfloat16, device=device)
        self.offsets = torch.zeros(samples + 1, dtype=torch.int32, device=device)
        self.target = torch.zeros(samples, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=device)
        self.grads: tuple[Tensor, ...] = ()

    def capture(self) -> None:
        """Once, after the first load (a later one copies into the same parameters). On one stream for every model: BLAS keeps a workspace
        of 32 MiB for each stream that it has seen."""
        given = self.values, self.offsets, self.target
        stream = side_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.gradients(self.model, *given)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.loss, self.grads = self.gradients(self.model, *given)

    def step(self, values: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        if self.graph is None:
            self.capture()
        assert self.graph is not None
        self.values.copy_(values)
        self.offsets.copy_(offsets)
        self.target.copy_(target)
        self.graph.replay()
        self.update(self.grads)
        return self.loss


@functools.cache
def side_stream() -> torch.cuda.Stream:
    """That graphs are captured on."""
    return torch.cuda.Stream()


def digest(side: Eager) -> str:
    """Of all parameters' bits."""
    text = hashlib.sha256()
    for p in side.model.parameters():
        text.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(device: torch.device) -> dict[str, int]:
    """Bytes in use now, after what only cycles hold is gone (autograd leaves a step's gradients in one now and then): on the device
    allocated and reserved, and of the process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "resident": resident()}
    return {"resident": resident()}


def trimmed(side: Eager, values: Tensor, offsets: Tensor, target: Tensor) -> list[str]:
    """What differs without the spare capacity: a loss to the bit, gradients by more than the order of sums."""
    (loss, grads), (other, others) = (
        side.gradients(side.model, x, offsets, target) for x in (values, values[: int(offsets[-1])].contiguous())
    )
    found = [] if torch.equal(loss, other) else [f"losses {float(loss)} and {float(other)}"]
    for (name, _), a, b in zip(side.model.named_parameters(), grads, others, strict=True):
        if float((a - b).norm()) > ORDER * float(a.norm()):
            found.append(f"{name} by {float((a - b).norm() / a.norm()):.1e}")
    return found


def differences(one: Eager, other: Eager) -> list[str]:
    """Names of the parameters whose bits differ."""
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p, q) and not (p.isnan() & q.isnan()).all()]


def soak(
    device: torch.device,
    steps: int,
    shape: tuple[int, int, int],
    samples: int,
    capacity: int,
    say: Callable[[str], None],
    most_seconds: float = float("inf"),
) -> dict[str, Any]:
    """Run it; returns the record. ``failures`` is empty if everything held."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    def pair() -> tuple[Eager, Eager]:
        eager = Eager(shape, device)
        return eager, Replayed(shape, device, samples, capacity) if device.type == "cuda" else Traced(shape, device)

    eager, other = pair()
    failures: list[str] = []
    losses, marks = [], []
    half, saved, began, restored = steps // 2, io.BytesIO(), time.monotonic(), False
    for step in range(steps):
        if step == half:
            torch.save([eager.state(), other.state()], saved)
        if step == half + max(1, steps // 10):
            again = pair()
            saved.seek(0)
            for side, state in zip(again, torch.load(saved, map_location=device, weights_only=True), strict=True):
                side.load(state)
            for past in range(half, step):
                given = batch_of(past, samples, capacity, shape[0], device)
                for side in again:
                    side.step(*given)
            if [digest(side) for side in again] != [digest(eager), digest(other)]:
                failures.append(f"run again from the checkpoint of step {half}, step {step} has other bits")
            restored = True
            del again, given, side, state
        given = batch_of(step, samples, capacity, shape[0], device)
        a, b = eager.step(*given), other.step(*given)
        if not torch.equal(a, b):
            failures.append(f"step {step}: losses {float(a)} and {float(b)}")
        if step % TRIMMED == 0 and device.type == "cuda":  # BLAS on a CPU has an order for every number of rows
            failures += [f"step {step}, without spare capacity: {text}" for text in trimmed(eager, *given)]
        if step % 10 == 0 or step == steps - 1:
            failures += [f"step {step}: {name} has other bits in the graph" for name in differences(eager, other)]
            losses.append(float(a))
        last_loss = float(a) if step % max(1, steps // 20) == 0 else 0.0
        del given, a, b
        if step >= WARM * steps and step % max(1, steps // 20) == 0:
            marks.append({"step": step, "kernels": compile_count(), **memory(device)})
            say(f"step {step}: loss {last_loss:.4f}, {marks[-1]}")
        if len(failures) > 20 or time.monotonic() - began > most_seconds:
            steps = step + 1
            break
    ended, seconds = digest(eager), time.monotonic() - began
    say(f"{steps} steps twice in {seconds:.1f} s")
    last = {"step": steps, "kernels": compile_count(), **memory(device)}
    marks.append(last)
    if not restored:
        failures.append(f"stopped after {steps} steps, before the checkpoint was tried")
    ends = half + max(1, steps // 10)
    parts = [
        m for m in ([m for m in marks if m["step"] <= half], [m for m in marks if m["step"] > ends]) if m
    ]  # not over the restored models
    slack = {
        "kernels": 0,
        "allocated": 0,
        "reserved": 2**25,
        "resident": 2**25,
    }  # the allocators keep a block or two for a new mixture of sizes
    for name, most in slack.items():
        grown = [part[-1][name] - part[0][name] for part in parts if name in part[0]]
        if any(n > most for n in grown):
            failures.append(f"{name} grew by {grown}")
    if "allocated" in last and last["allocated"] - marks[0]["allocated"] > 2**20:  # restored models are gone, and all that they took
        failures.append(f"allocated grew by {last['allocated'] - marks[0]['allocated']} over everything")
    if not all(map(torch.isfinite, torch.tensor(losses))):
        failures.append("a loss is not finite")
    return {
        "steps": steps,
        "samples": samples,
        "capacity": capacity,
        "shape": dict(zip(("dim", "heads", "seeds"), shape, strict=True)),
        "failures": failures,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "seconds": round(seconds, 1),
        "restored_from": half,
        "digest": ended,
        "memory": marks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=70)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    shape = chosen.dim, chosen.heads, chosen.seeds
    record = soak(
        device, chosen.steps, shape, chosen.samples, chosen.capacity, lambda text: print(text, file=sys.stderr, flush=True), chosen.seconds
    )
    if chosen.out:
        from benchmarks.harness import environment

        chosen.out.write_text(json.dumps({**record, "environment": environment(device)}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in record.items() if k != "memory"}, indent=1))
    return len(record["failures"])


if __name__ == "__main__":
    sys.exit(main())
