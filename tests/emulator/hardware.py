"""The emulator's tie to hardware: kernels of each engine kind, run on a Hopper GPU once, and again here.

On the GPU, ``python -m tests.emulator.hardware FILE`` runs every case and keeps what the kernels returned, with the commit and the
versions that made it. ``test_hardware.py`` runs the same cases on the emulator and compares with that file: bitwise where the order of
additions cannot matter (integers whose sums are exact, conversions), else within a bound that the case states. Inputs are
drawn on the CPU, so both sides see the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import multiprocessing
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

RECORD = Path(__file__).parent / "data" / "h200.pt"
Place = Callable[[Tensor], Tensor]

#: Largest relative error (Frobenius) against the GPU, with sums in FP32 and with the GPU's sums; 0 is bitwise,
#: None not compared: a sum that is rounded elsewhere may overflow elsewhere, and a code that lies on a tie may fall to the other side.
BOUNDS: dict[str, tuple[float | None, float]] = {
    "tma, wgmma bf16: integers": (0.0, 0.0),
    "tma, wgmma bf16: normal": (2.0**-13, 0.0),  # FP32 sums in another order: now and then one BF16 rounding falls elsewhere
    "tma, wgmma fp8: integers": (0.0, 0.0),
    "tma, wgmma fp8: normal": (2.0**-10, 0.0),  # the GPU's narrow sums, then one rounding to BF16
    "quantize, transpose": (0.0, 0.0),
    "wgmma fp8 from registers": (2.0**-10, 2.0**-23),  # attention forward: besides, exp2 and log2 are approximate on the GPU
    "wgmma fp8: sums": (None, 0.0),
    "wgmma fp16: sums": (None, 0.0),
    "packed fp16": (0.0, 0.0),
    "packed fp16: exponential": (0.0, 0.0),
    "the same, FP16 scores": (2.0**-10, 2.0**-23),
    "reduce-add": (None, 2.0**-23),  # attention backward; FP32 additions to dQ in another order
    "the same, FP16 sums": (None, 2.0**-23),
}


def _gemm(kind: str, dtype: torch.dtype) -> Callable[[Place, Any], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    if kind == "integers":
        operands = [torch.randint(-4, 5, (rows, 256), generator=generator).to(dtype) for rows in (200, 192)]
    else:
        operands = [torch.randn(rows, 256, generator=generator).to(dtype) for rows in (200, 192)]

    def call(place: Place, host: Any) -> dict[str, Tensor]:
        from quack.gemm_interface import gemm

        x, w = map(place, operands)
        return {"out": gemm(x, w.T, out_dtype=torch.bfloat16, tuned=False)}

    return call


def _problem(bounded: bool = False) -> Any:
    """``bounded``: of queries whose scores FP16 holds, two tiles of them and a sequence of several tiles of keys."""
    from . import ours

    shape = dict(lengths=[0, 1, 430], queries=70, bounded=True) if bounded else dict(lengths=[0, 1, 33, 129], queries=40)
    return ours.make_problem(3, dict(heads=1, kv_heads=1, **shape))


def _quantize(place: Place, host: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    offsets = place(torch.tensor([0, 0, 1, 34, 163], dtype=torch.int32))
    q = place((torch.randn(163, 1, 128, generator=generator) * 3).bfloat16())
    with host():
        from lp_fa4.sm90.quantize import quantize

        got, _, _ = quantize(q, offsets)
    return {"codes": got.codes, "scales": got.scale_bytes}


def _on(problem: Any, place: Place) -> Any:
    from lp_fa4.mx import MXTensor

    def move(x: Any) -> Any:
        if isinstance(x, MXTensor):
            return MXTensor.from_bytes(place(x.codes), place(x.scale_bytes), x.block, move(x.offsets), x.token_dim)
        return place(x) if isinstance(x, Tensor) else x

    return dataclasses.replace(problem, **{f.name: move(getattr(problem, f.name)) for f in dataclasses.fields(problem)})


def _forward(bounded: bool) -> Callable[[Place, Any], dict[str, Tensor]]:
    """The kernel for any number of queries; few, as here, would take another one."""

    def call(place: Place, host: Any) -> dict[str, Tensor]:
        problem = _on(_problem(bounded), place)
        with host():
            from lp_fa4.sm90 import forward_host

            with mock.patch.object(forward_host, "few_columns", lambda problem: 0):
                result = forward_host.forward(problem)
        return {"out": result.out, "lse": result.lse}

    return call


def _backward(bounded: bool) -> Callable[[Place, Any], dict[str, Tensor]]:
    def call(place: Place, host: Any) -> dict[str, Tensor]:
        from lp_fa4 import reference
        from lp_fa4.config import DROP_IN_WITH_LSE
        from lp_fa4.problem import ForwardResult

        problem = dataclasses.replace(_problem(bounded), config=DROP_IN_WITH_LSE)
        result = reference.forward(problem)
        dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(8)).bfloat16()
        with host():
            from lp_fa4.sm90.backward_host import backward

            got = backward(_on(problem, place), ForwardResult(*map(place, result)), place(dout))
        return {"dq": got.dq, "dk": got.dk, "dv": got.dv}

    return call


def _sums(kind: str) -> Callable[[Place, Any], dict[str, Tensor]]:
    """FP16 and FP32 accumulators after each of four products, of hostile operands too."""

    def call(place: Place, host: Any) -> dict[str, Tensor]:
        from . import halves

        dtypes = (torch.float16, torch.float32)
        return {str(dtype).removeprefix("torch."): halves.sums("sm_90a", place, kind, dtype) for dtype in dtypes}

    return call


def _packed(place: Place, host: Any) -> dict[str, Tensor]:
    from . import halves

    return {name: halves.digest(words) for name, words in halves.packed("sm_90a", place).items() if name != "exponential"}


def _exponential(place: Place, host: Any) -> dict[str, Tensor]:
    """2^x of every FP16 pattern."""
    from . import halves

    return {"2^x": halves.packed("sm_90a", place)["exponential"].view(torch.float16)}


CALLS: dict[str, Callable[[Place, Any], dict[str, Tensor]]] = {
    "tma, wgmma bf16: integers": _gemm("integers", torch.bfloat16),
    "tma, wgmma bf16: normal": _gemm("normal", torch.bfloat16),
    "tma, wgmma fp8: integers": _gemm("integers", torch.float8_e4m3fn),
    "tma, wgmma fp8: normal": _gemm("normal", torch.float8_e4m3fn),
    "quantize, transpose": _quantize,
    "wgmma fp8 from registers": _forward(False),
    "the same, FP16 scores": _forward(True),
    "wgmma fp8: sums": _sums("fp8"),
    "wgmma fp16: sums": _sums("fp16"),
    "packed fp16": _packed,
    "packed fp16: exponential": _exponential,
    "reduce-add": _backward(False),
    "the same, FP16 sums": _backward(True),
}


def errors(arch: str, *, name: str, **fidelity: int) -> dict[str, Any]:
    """Run a case on the emulator; per output: elements that differ from the GPU's and the relative error. ``fidelity``: of ``Fidelity``."""
    from . import ours
    from .api import emulate
    from .fidelity import Fidelity

    want = torch.load(RECORD, weights_only=True)["cases"][name]
    answer: dict[str, Any] = {}

    def compare(got: dict[str, Tensor]) -> None:
        assert got.keys() == want.keys()
        for key, w in want.items():
            g, w = got[key].double(), w.double()
            live = w.isfinite()
            assert torch.equal(g.isfinite(), live), f"{name}: {key} is finite in other places than on the GPU"
            assert torch.equal(g[~live].nan_to_num(0.0), w[~live].nan_to_num(0.0)), f"{name}: {key} has NaN or infinity in other places"
            answer[key] = {"differ": int((g != w)[live].sum())}
            answer[key]["error"] = float((g - w)[live].norm() / w[live].norm())

    def call() -> dict[str, Tensor]:
        return CALLS[name](lambda x: x, lambda: ours.host(arch))

    emulate(call, arch=arch, schedules=1, verify=compare, fidelity=Fidelity(**fidelity))
    return answer


def _recorded(name: str) -> bytes:
    """A case on the GPU of this machine, as a file's bytes (a tensor of another process would have to outlive it)."""
    gpu, file = torch.device("cuda", 0), io.BytesIO()
    out = CALLS[name](lambda x: x.to(gpu), contextlib.nullcontext)
    torch.save({key: value.cpu() for key, value in out.items()}, file)
    return file.getvalue()


def main() -> None:
    """Record on the GPU of this machine: each case in a process of its own, since compiling takes nearly all of the time, and the
    file written anew after each, so that a run that is cut short has what it finished."""
    from benchmarks.harness import environment

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=len(CALLS), help="processes at a time")
    chosen = parser.parse_args()
    document: dict[str, Any] = {"environment": environment("cuda"), "cases": {}}
    with futures.ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_recorded, name): name for name in CALLS}
        for done in futures.as_completed(running):
            name = running[done]
            document["cases"][name] = torch.load(io.BytesIO(done.result()), weights_only=True)
            print(name, {key: list(value.shape) for key, value in document["cases"][name].items()}, flush=True)
            torch.save(document, chosen.file)


if __name__ == "__main__":
    main()
