"""This project's own kernels on the emulator: their host code runs on CPU tensors, every launch is emulated.

``emulated(schedule)`` is a context in which ``lp_fa4``'s launches run here. Only the tensors of a launch are readable and
writable in it, so bounds are those of the kernel's own arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from . import api, capture, hostpatch
from .api import Result, Schedule
from .kernels import Case

#: packages whose modules hold ``arch_of``, ``launch`` and ``multiprocessors`` by name
_PACKAGES = {"sm_90a": ("lp_fa4.sm90",), "sm_100a": ("lp_fa4.sm100",), "sm_103a": ("lp_fa4.sm100",)}
#: what an architecture's kernels are called where a backend is chosen
BACKENDS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}


def _modules(arch: str) -> list[Any]:
    for name in _PACKAGES[arch]:
        package = importlib.import_module(name)
        for info in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{name}.{info.name}")
    return [m for n, m in list(sys.modules.items()) if m is not None and n.split(".")[0] in ("lp_fa4", "fused_ops", "modules")]


def _patched(stack: contextlib.ExitStack, arch: str, replaced: dict[str, Any]) -> None:
    for module in _modules(arch):
        for name, value in replaced.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))


@contextlib.contextmanager
def host(arch: str, multiprocessors: int = 3) -> Iterator[None]:
    """``lp_fa4``'s host code takes CPU tensors for those of a GPU of ``arch`` with few multiprocessors (so that persistent
    kernels walk several items)."""
    with contextlib.ExitStack() as stack:
        _patched(stack, arch, {"arch_of": lambda device: arch, "multiprocessors": lambda device: multiprocessors})
        yield


@contextlib.contextmanager
def emulated(schedule: Schedule, arch: str = "sm_90a", *, multiprocessors: int = 3, **options: Any) -> Iterator[Result]:
    """Launches of ``lp_fa4`` run under ``schedule``; yields their ``Result``.

    Args:
        schedule: who runs next; see ``api.schedules``.
        multiprocessors: what host code is told; few, so that persistent kernels walk several items.
        options: of ``api.run``: ``check``, ``poison``, ``fidelity``, ``step_limit``.
    """
    runtime = capture.install(arch)
    result = Result(schedule)
    run = api.running(result, options)

    def launch(compiled: Any, device: torch.device, *arguments: Any) -> None:
        previous, runtime.handler = runtime.handler, run
        capture.device_memory.clear()
        try:
            with hostpatch.device(arch):
                compiled(*arguments)
        finally:
            runtime.handler = previous
            capture.device_memory.clear()

    with host(arch, multiprocessors), contextlib.ExitStack() as stack:
        _patched(stack, arch, {"launch": launch})
        yield result


@functools.cache
def import_everything() -> None:
    """Modules that a call would first import while names are replaced would keep what they found then."""
    for name in ("lp_fa4", "fused_ops", "modules"):
        package = importlib.import_module(name)
        for info in pkgutil.walk_packages(package.__path__, f"{name}."):
            if info.name != "modules.torchrec":
                importlib.import_module(info.name)


@contextlib.contextmanager
def chosen(arch: str) -> Iterator[None]:
    """Public functions on CPU tensors take the kernels of ``arch`` or raise: nothing is the reference's in silence, of a module's
    operations neither."""
    import_everything()
    dispatch, backend = importlib.import_module("lp_fa4.dispatch"), importlib.import_module("fused_ops.backend")
    here, choose = BACKENDS[arch], backend.choose

    def only(name: str, device: Any) -> str:
        return "" if name == here else f"{name} is not emulated here"

    def always(what: str, device: Any, name: str, reason: Any) -> Any:
        """A module leaves the choice to each operation, which would take the reference for CPU tensors."""
        return choose(what, device, here if name == "auto" else name, reason)

    with contextlib.ExitStack() as stack:
        for module in (dispatch, backend):
            stack.enter_context(mock.patch.object(module, "device_reason", only))
        for name, module in list(sys.modules.items()):
            if name.startswith("fused_ops.") and getattr(module, "choose", None) is choose and module is not backend:
                stack.enter_context(mock.patch.object(module, "choose", always))
        yield


@contextlib.contextmanager
def served(schedule: Schedule, arch: str, **options: Any) -> Iterator[Result]:
    """``chosen`` and ``emulated``: calls on CPU tensors run the kernels of ``arch`` under ``schedule``."""
    with chosen(arch), emulated(schedule, arch, **options) as result:
        yield result


# --- cases ---------------------------------------------------------------------------------------------------------
def make_problem(seed: int, options: dict[str, Any]) -> Any:
    """An ``AttentionProblem`` on the CPU from the recipe that the GPU tests use."""
    from tests.gpu import problems

    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    if options.pop("int64", False):
        options["dtype"] = torch.int64
    config = dict(options.pop("config", {}))
    if "dq_dtype" in config:
        config["dq_dtype"] = getattr(torch, config["dq_dtype"])
    with mock.patch.object(problems, "DEVICE", torch.device("cpu")):
        problem = problems.Case(**options).make(seed)
    return dataclasses.replace(problem, config=problem.config.with_(**config)) if config else problem


def _name(kernel: str, options: dict[str, Any]) -> str:
    return f"lp_fa4 {kernel} " + " ".join(f"{k}={v}" for k, v in options.items())


def with_copy(problem: Any) -> Any:
    """The problem with V's copy that has tokens innermost beside it (Hopper)."""
    from fused_ops.rmsnorm_quantize.reference import transposed
    from lp_fa4.sm90.operands import MXTensorWithCopy

    v = problem.v
    offsets = torch.arange(problem.batch + 1) * (problem.tokens // problem.batch) if problem.offsets_k is None else problem.offsets_k
    copy = transposed(v.codes.flatten(1), offsets, v.codes.shape[1])
    return dataclasses.replace(problem, v=MXTensorWithCopy(v.payload, v.scale, v.block, v.offsets, v.token_dim, copy))


def forward(arch: str, *, seed: int = 0, copied: bool = False, lse: float = 1e-4, **options: Any) -> Case:
    """Our forward (work list, re-coding, attention), of V as it is or ``copied``. ``options``: of ``tests.gpu.problems.Case``.

    Checked as the GPU tests do, against FP64: at most twice the reference's error plus one rounding to BF16; the LSE within
    ``lse`` (1e-4: the row sum is FP32).
    """
    problem = make_problem(seed, dict(options))
    if copied:
        problem = with_copy(problem)

    def call() -> Any:
        with host(arch):
            module = importlib.import_module(_PACKAGES[arch][0] + ".forward_host")
            return module.forward(problem)

    def verify(value: Any) -> None:
        from tests.gpu import problems

        with mock.patch.object(problems, "DEVICE", torch.device("cpu")):
            problems.check(problem, value, lse_tolerance=lse)

    return Case(_name("forward", options), arch, None, call, verify)


def isolated(arch: str, *, seed: int = 0, code: int = 0x7F, **options: Any) -> Case:
    """Our forward with and without queries of ``code`` in the second sequence: the first one's results are the same bits."""
    problem, spoilt = (make_problem(seed, dict(options)) for _ in range(2))
    first, second = options["queries"][:2]
    spoilt.q.codes[first : first + second] = code

    def call() -> Any:
        with host(arch):
            module = importlib.import_module(_PACKAGES[arch][0] + ".forward_host")
            return module.forward(problem), module.forward(spoilt)

    def verify(value: Any) -> None:
        for name in ("out", "lse", "row_max", "row_sum"):
            one, other = ([getattr(x, name)] if name == "out" else list(getattr(x, name)) for x in value)
            assert all(torch.equal(a[:first], b[:first]) for a, b in zip(one, other, strict=True)), name

    return Case(_name("isolated", options), arch, None, call, verify)


def backward(arch: str, *, seed: int = 0, deterministic: bool = False, with_dlse: bool = False, **options: Any) -> Case:
    """Our backward against ``lp_fa4.reference.backward``. Blackwell's rounds at the same points: codes agree but for ties that the order
    of additions decides, so the relative error is far under one rounding of E4M3 (2^-4). Hopper's: ``sm90.agreement``."""
    from lp_fa4 import reference

    from tests.sm90.agreement import assert_agrees, compare

    problem = make_problem(seed, dict(options))
    result = reference.forward(problem)
    generator = torch.Generator().manual_seed(seed + 100)
    dout = torch.randn(result.out.shape, generator=generator).bfloat16()
    dlse = torch.randn(result.lse.shape, generator=generator) if with_dlse else None
    want = reference.backward(problem, result, dout, dlse=dlse)

    def call() -> Any:
        with host(arch):
            return importlib.import_module(_PACKAGES[arch][0]).backward(problem, result, dout, deterministic=deterministic, dlse=dlse)

    def verify(value: Any) -> None:
        if arch == "sm_90a":
            assert_agrees(compare(problem, dout, value, want, with_truth=dlse is None), problem.config.grad_format)
            return
        for name in ("dq", "dk", "dv", "dv_mean"):
            x, y = getattr(value, name), getattr(want, name)
            assert (x is None) == (y is None), name
            if x is None:
                continue
            x, y = (z.float() if isinstance(z, torch.Tensor) else z.dequantize() for z in (x, y))
            assert torch.isfinite(x).all(), f"{name} is not finite"
            error = float((x - y).norm() / y.norm().clamp(min=1e-20))
            assert error <= 5e-3, f"{name}: relative error {error:.3g}"

    return Case(_name("backward", options), arch, None, call, verify)


def prepare(arch: str, lengths: list[int], *, rows: int = 128, dim: int = 128, heads: int = 2, copied: bool = False, seed: int = 0) -> Case:
    """Centre, quantize, on Hopper bound the rows of q and transpose V where ``copied``: bytes equal those of ``quantize_mx`` on what was
    centred; sums within FP32 rounding."""
    from lp_fa4.config import DEFAULT
    from lp_fa4.mx import quantize_mx

    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = ((torch.randn(tokens, heads, dim, generator=generator) * 3 + 1).bfloat16() for _ in range(3))

    def call() -> Any:
        with host(arch):
            module = importlib.import_module(_PACKAGES[arch][0] + ".preparation")
            with mock.patch.object(module, "COPY_QUERIES", 0) if copied else contextlib.nullcontext():
                return module.prepare(q, k, v, offsets, offsets, False, DEFAULT, (rows, dim), dim**-0.5)

    def verify(value: Any) -> None:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        for name, x, mean in (("q", q, None), ("k", k, value.k_mean), ("v", v, value.v_mean)):
            centred = x.float() if mean is None else x.float() - mean[sequence]
            bounded = name == "q" and arch.startswith("sm_90")
            want, got = quantize_mx(centred, (rows, dim), offsets, token_dim=0, bounded_rows=bounded), getattr(value, name)
            assert torch.equal(got.codes, want.codes), f"{name}: codes"
            assert torch.equal(got.scale_bytes, want.scale_bytes), f"{name}: scales"
            if name == "v":
                sums = torch.zeros_like(value.v_sum, dtype=torch.float64).index_add_(0, sequence, centred.double())
                worst = (value.v_sum - sums).abs().max()
                assert worst <= 1e-4, f"v_sum: error {worst:.3g}"
        copy = getattr(value.v, "transposed", None)
        assert (copy is not None) == copied
        if copied:
            from fused_ops.rmsnorm_quantize.reference import transposed

            assert torch.equal(copy, transposed(value.v.codes.flatten(1), offsets, heads)), "transposed copy of v"

    return Case(f"lp_fa4 prepare {lengths} rows={rows} d{dim}", arch, None, call, verify)
