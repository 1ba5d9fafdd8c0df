"""Where numbers first go wrong: ``watch`` sees every operator of this library, forward and backward, and names the first operator, tensor,
sample and block that holds a value that is not finite, or that was cut off at its format's largest.

    with lp_fa4.debug.watch() as report:
        loss = model(batch)
        loss.backward()
    print(report)          # report.first, report.faults, report.tensors

Every tensor that an operator makes is also compared with the same operator in FP32 on the same inputs (the shadow run), as
signal-to-quantization-noise in dB: noise shows beside the operator that makes it, not beside those that inherit it. With ``shadow="bf16"``
the shadow's results are rounded to BF16, as a BF16 operator with FP32 sums returns them; its operands are the same (an MXFP8 value is a
BF16 number).

Watching waits for the device after every operator and costs a reference computation each: not for CUDA graphs, not for timing. Rows past
``offsets[-1]``, which no operator reads, are not looked at; -inf in the LSE of a row without keys is right and no fault.

Each package describes its own operators (:func:`describe`): ``lp_fa4/debug/attention.py``, ``fused_ops/debug.py``, ``modules/debug.py``. Of
others only the values of float tensors are looked at, without a sample.
"""

import importlib
import inspect
import math
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lp_fa4 import operator
from lp_fa4.mx import GROUP, MXTensor, decode_scale, expand_scale

__all__ = ["Fault", "Measured", "Report", "Rows", "Seen", "describe", "watch"]


@dataclass(frozen=True)
class Rows:
    """Which rows along ``axis`` belong to which sample: ``bounds[b]`` to ``bounds[b + 1]``; what lies past the last is not looked at."""

    bounds: Sequence[int]
    axis: int = 0
    single: bool = False
    """One row a sample: a fault names the sample alone."""

    @classmethod
    def jagged(cls, offsets: Tensor | None, axis: int = 0) -> "Rows | None":
        """By offsets ``[B + 1]``; None for one dense sequence."""
        return None if offsets is None else cls(offsets.tolist(), axis)

    @classmethod
    def even(cls, samples: int, rows: int = 1, axis: int = 0) -> "Rows":
        """``rows`` rows a sample."""
        return cls([b * rows for b in range(samples + 1)], axis, rows == 1)


@dataclass(frozen=True)
class Seen:
    """A tensor as a watcher looks at it.

    ``shadow``: FP32 of the same shape, or None. ``rounded``: the shadow is what was rounded to ``value``, so that it tells whether a code
    at E4M3's end was cut off. ``minus_inf``: whether -inf is a right value (LSE and maxima of rows without keys).
    """

    name: str
    value: Tensor | MXTensor
    rows: Rows | None = None
    shadow: Tensor | None = None
    rounded: bool = False
    minus_inf: bool = False


@dataclass(frozen=True)
class Fault:
    """The first bad value of one tensor in one call.

    ``kind``: ``"nan"``, ``"inf"`` or ``"saturated"``. ``token`` counts from the sample's first row, ``block`` is its ``(group of 32 tokens,
    block of columns)``, the format's own or, of other tensors, of 32 columns; None where a tensor has no samples or no columns. ``index``:
    into the tensor.
    """

    operator: str
    call: int
    role: str
    tensor: str
    kind: str
    count: int
    index: tuple[int, ...]
    sample: int | None = None
    token: int | None = None
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = [f"index {list(self.index)}"]
        if self.sample is not None:
            where = [f"sample {self.sample}", *([] if self.token is None else [f"row {self.token}"]), *where]
        if self.block is not None:
            where.insert(-1, f"block {self.block}")
        what = f"{self.operator} (call {self.call}): {self.role} {self.tensor!r} is {self.kind}"
        return f"{what} at {', '.join(where)}; {self.count} such values"


@dataclass(frozen=True)
class Measured:
    """One tensor that an operator made: dB against its FP32 shadow (+inf: equal), share of MXFP8 codes or values at their format's end."""

    operator: str
    call: int
    tensor: str
    sqnr: float
    at_limit: float


@dataclass
class Report:
    """What ``watch`` saw: ``faults`` in the order in which they appeared (at most ``limit``), ``tensors`` that were compared, ``calls``."""

    limit: int = 100
    faults: list[Fault] = field(default_factory=list)
    tensors: list[Measured] = field(default_factory=list)
    calls: int = 0

    @property
    def first(self) -> Fault | None:
        """The first fault, or None."""
        return self.faults[0] if self.faults else None

    def sqnr(self, operator: str, tensor: str) -> float:
        """The worst dB of a tensor over all calls of an operator (``"out"`` of ``"modules::pma_attention"``).

        Raises: ``KeyError`` if no call was compared.
        """
        found = [m.sqnr for m in self.tensors if (m.operator, m.tensor) == (operator, tensor)]
        if not found:
            names = sorted({f"{m.operator} {m.tensor}" for m in self.tensors})
            raise KeyError(f"{operator} {tensor} was not compared; compared were {', '.join(names) or 'none'}")
        return min(found)

    def __str__(self) -> str:
        lines = [f"{self.calls} calls, {len(self.faults)} tensors with faults" + ("; the first:" if self.faults else "")]
        lines += [f"  {self.first}"] if self.faults else []
        lines += [f"{m.sqnr:8.2f} dB  {m.operator} (call {m.call}) {m.tensor}" for m in sorted(self.tensors, key=lambda m: m.sqnr)]
        return "\n".join(lines)


Inputs = Callable[[Mapping[str, Any]], Iterable[Seen]]
Outputs = Callable[[Mapping[str, Any], Any, bool], Iterable[Seen]]
_descriptions: dict[str, tuple[Inputs, Outputs]] = {}


def describe(name: str, inputs: Inputs, outputs: Outputs) -> None:
    """Tell how to look at operator ``name``: ``inputs(arguments)`` and ``outputs(arguments, result, shadow)`` list its tensors; ``shadow``
    says whether they should carry theirs."""
    _descriptions[name] = inputs, outputs


def named(result: Any, names: str, rows: Rows | None = None, **options: Any) -> Iterator[Seen]:
    """Tensors that share a description. ``result``: a sequence in the order of ``names``, which are separated by spaces."""
    for name, value in zip(names.split(), result, strict=True):
        if value is not None and value.shape.numel():
            yield Seen(name, value, rows, **options)


def mx(codes: Tensor, scale: Tensor, offsets: Tensor | None, tokens: int = GROUP) -> MXTensor | Tensor:
    """Bytes of an operator as an MXTensor, its column blocks by the scale's shape; a float tensor stays one."""
    if codes.dtype != torch.uint8:
        return codes
    return MXTensor.from_bytes(codes, scale, (tokens, -(-codes.shape[-1] // scale.shape[-1])), offsets, 0)


def to_float(x: Tensor | MXTensor) -> Tensor:
    """FP32 values."""
    return x.dequantize() if isinstance(x, MXTensor) else x.to(torch.float32)


def spread(mean: Tensor | None, offsets: Tensor | None, tokens: int) -> Tensor | float:
    """A row per sequence ``[B, ...]`` over its tokens; 0 past the last, and for an empty or missing ``mean``."""
    if mean is None or mean.dim() < 2:
        return 0.0
    bounds = [0, tokens] if offsets is None else offsets.tolist()
    out = mean.new_zeros(tokens, *mean.shape[1:], dtype=torch.float32)
    for b in range(len(bounds) - 1):
        out[bounds[b] : bounds[b + 1]] = mean[b]
    return out


def _limits(x: Tensor | MXTensor) -> Tensor:
    """Bool: the largest finite magnitude of an 8- or 16-bit format that saturates (E4M3, FP16)."""
    if isinstance(x, MXTensor):
        return (x.codes & 0x7F) == 0x7E
    if x.dtype == torch.float8_e4m3fn:
        return (x.view(torch.uint8) & 0x7F) == 0x7E
    return x.abs() == torch.finfo(x.dtype).max if x.dtype == torch.float16 else torch.zeros(x.shape, dtype=torch.bool, device=x.device)


def _cut(x: Tensor | MXTensor, shadow: Tensor | None) -> Tensor:
    """Bool: values that were cut off. At E4M3's end 448 also stands for what rounds to it, so its shadow must lie past 464, halfway to the
    next that there would be; FP16's end counts as it is."""
    at_end = _limits(x)
    if isinstance(x, Tensor) and x.dtype == torch.float16:
        return at_end
    if shadow is None:
        return torch.zeros_like(at_end)
    factor: Tensor | float = 1.0
    if isinstance(x, MXTensor):
        factor = expand_scale(decode_scale(x.scale_bytes), x.shape, x.block, x.offsets, x.token_dim)
    return at_end & (shadow.abs() > 464.0 * factor)


def _look(seen: Seen, role: str, operator_name: str, call: int, narrow: bool) -> tuple[list[Fault], Measured | None]:
    axis = 0 if seen.rows is None else seen.rows.axis
    values = to_float(seen.value).detach()
    if values.dim() == 0:
        values = values[None]
    stop = values.shape[axis] if seen.rows is None else min(values.shape[axis], seen.rows.bounds[-1])

    def inside(x: Tensor) -> Tensor:
        return x.movedim(axis, 0)[:stop]

    kept = inside(values)
    infinite = torch.isinf(kept) & (kept > 0) if seen.minus_inf else torch.isinf(kept)
    shadow = None if seen.shadow is None else seen.shadow.detach().to(torch.float32).reshape(values.shape)
    cut = inside(_cut(seen.value, shadow if seen.rounded else None).reshape(values.shape))
    faults = []
    for kind, flags in (("nan", torch.isnan(kept)), ("inf", infinite), ("saturated", cut)):
        if not flags.any():
            continue
        front = flags.nonzero()[0].tolist()
        index = front[1:].copy()
        index.insert(axis, front[0])
        sample = token = block = None
        if seen.rows is not None:
            sample = bisect_right(seen.rows.bounds, front[0]) - 1
            token = None if seen.rows.single else front[0] - seen.rows.bounds[sample]
        if isinstance(seen.value, MXTensor):
            block = ((front[0] if token is None else token) // GROUP, front[-1] // seen.value.block[1])
        elif token is not None and axis == 0 and values.dim() > 1:
            block = (token // GROUP, front[-1] // GROUP)
        faults.append(Fault(operator_name, call, role, seen.name, kind, int(flags.sum()), tuple(index), sample, token, block))
    if shadow is None or kept.numel() == 0:
        return faults, None
    truth = inside(shadow.to(torch.bfloat16).to(torch.float32) if narrow else shadow)
    both = torch.isfinite(truth) & torch.isfinite(kept)
    truth, got = truth[both].double(), kept[both].double()
    signal, noise = float(truth.square().sum()), float((got - truth).square().sum())
    sqnr = math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)
    at_limit = float(inside(_limits(seen.value).reshape(values.shape)).double().mean())
    return faults, Measured(operator_name, call, seen.name, sqnr, at_limit)


class _Watcher:
    def __init__(self, report: Report, shadow: bool, narrow: bool, stop: bool) -> None:
        self.report, self.shadow, self.narrow, self.stop = report, shadow, narrow, stop
        self.busy = False

    def _arguments(self, function: Callable, args: tuple, kwargs: dict) -> Mapping[str, Any]:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _take(self, tensors: Callable[[], Iterable[Seen]], role: str, name: str, call: int) -> None:
        self.busy = True  # a shadow may call operators
        try:
            with torch.no_grad(), warnings.catch_warnings():
                found = [_look(seen, role, name, call, self.narrow) for seen in tensors()]
        finally:
            self.busy = False
        for faults, measured in found:
            self.report.faults.extend(faults[: max(0, self.report.limit - len(self.report.faults))])
            if measured is not None:
                self.report.tensors.append(measured)
            if faults and self.stop:
                raise FloatingPointError(str(faults[0]))

    def entered(self, name: str, function: Callable, args: tuple, kwargs: dict) -> int:
        if self.busy:
            return 0
        self.report.calls += 1
        call = self.report.calls
        a = self._arguments(function, args, kwargs)
        look = _descriptions[name][0] if name in _descriptions else lambda a: _floats(a.items())
        self._take(lambda: look(a), "input", name, call)
        return call

    def left(self, call: int, name: str, function: Callable, args: tuple, kwargs: dict, result: object) -> None:
        if call == 0:
            return
        a = self._arguments(function, args, kwargs)
        if name in _descriptions:
            self._take(lambda: _descriptions[name][1](a, result, self.shadow), "output", name, call)
        else:
            parts = result if isinstance(result, (tuple, list)) else (result,)
            self._take(lambda: _floats((f"result {i}", x) for i, x in enumerate(parts)), "output", name, call)


def _floats(items: Iterable[tuple[str, Any]]) -> Iterator[Seen]:
    for name, x in items:
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            yield Seen(name, x)


@contextmanager
def watch(*, shadow: bool | str = True, stop: bool = False, limit: int = 100) -> Iterator[Report]:
    """Watch every operator of this library until the block ends, on all threads.

    Args:
        shadow: also run each operator in FP32, for dB and for values that were cut off: True or ``"fp32"`` compares with FP32 results,
            ``"bf16"`` with those rounded to BF16. False looks for NaN and Inf only.
        stop: raise ``FloatingPointError`` at the first fault, from inside the operator's call.
        limit: how many faults are kept.

    Yields: a :class:`Report`, which fills as operators run.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}; it must be at least 1")
    if shadow not in (True, False, "fp32", "bf16"):
        raise ValueError(f"shadow is {shadow!r}; allowed are True, False, 'fp32' and 'bf16'")
    importlib.import_module("lp_fa4.debug.attention")
    for room in ("fused_ops", "modules"):
        if room in sys.modules:
            importlib.import_module(f"{room}.debug")
    report = Report(limit)
    watcher = _Watcher(report, bool(shadow), shadow == "bf16", stop)
    operator.watchers.append(watcher)
    try:
        yield report
    finally:
        operator.watchers.remove(watcher)
