"""Tensor-free compilation of kernels, and its cache.

A kernel is compiled from dtypes, integers and flags only: a function decorated with :func:`kernel_cache` receives the
architecture and constexprs, describes its tensors with :func:`fake` and returns :func:`build` of them. So every kernel
compiles for every target on a machine without a GPU, and no number that depends on data can enter a key.

    @kernel_cache
    def _compile_scale(arch, dtype, width):
        tokens = symbol()
        return build(arch, Scale(width), fake(dtype, (tokens, width)), fake("float32", (tokens, width)))

    launch(_compile_scale(arch_of(x.device), dtype_name(x), 128), x.device, x, out)

Compiled functions take torch tensors (and Python numbers) directly. They read the current stream of the tensors'
device at every launch: nothing about a stream, a pointer or a device is kept between calls. ``cutlass`` is imported on
the first compilation, never before.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lp_fa4.kernel_store import compile_or_load

__all__ = [
    "arch_of",
    "build",
    "capability_of",
    "compile_count",
    "dtype_name",
    "fake",
    "fake_offsets",
    "kernel_cache",
    "launch",
    "multiprocessors",
    "symbol",
]

_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}
extra_options = ""
"""Appended to every compilation. Tests that look at PTX or SASS set ``--keep-ptx --keep-cubin --dump-dir DIR`` here, in
a process of their own; the compiled function then has them as ``artifacts.PTX`` and ``artifacts.CUBIN``."""

_lock = threading.RLock()
_compilations = 0


@functools.cache
def _asked(question: Callable[[int], Any], index: int) -> Any:
    return question(index)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, asked once: a step wants to know some thirty times, at 10 us each."""
    ask = torch.cuda.get_device_capability
    return ask(device) if device.index is None else _asked(ask, device.index)


def arch_of(device: torch.device) -> str:
    """Compilation target of a CUDA device: ``sm_90a``, ``sm_100a`` or ``sm_103a``. ``ValueError`` for any other."""
    if device.type != "cuda":
        raise ValueError(f"device is {device}; kernels run on CUDA devices")
    capability = capability_of(device)
    if capability not in _ARCHS:
        allowed = ", ".join(f"{a}.{b}" for a, b in _ARCHS)
        raise ValueError(f"{device} has compute capability {capability[0]}.{capability[1]}; kernels exist for {allowed}")
    return _ARCHS[capability]


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device (looked up per device, not once per process)."""
    return _multiprocessors(device.index if device.index is not None else torch.cuda.current_device())


def dtype_name(x: Tensor) -> str:
    """Name of a tensor's dtype as :func:`fake` takes it. ``TypeError`` for dtypes no kernel reads."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"dtype is {x.dtype}; allowed are {', '.join(map(str, _DTYPES))}")
    return _DTYPES[x.dtype]


def kernel_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a compile function on its positional arguments: ``arch`` first, then constexprs (hashable, no tensors)."""
    cache: dict[tuple, Any] = {}

    @functools.wraps(function)
    def compiled(arch: str, *key: Any) -> Any:
        full = (arch, *key)
        hit = cache.get(full)
        if hit is not None:
            return hit
        with _lock:
            if full not in cache:
                for value in full:
                    if isinstance(value, Tensor):
                        raise TypeError(f"{function.__name__}: a tensor of shape {list(value.shape)} in a compile key")
                global _compilations
                _compilations += 1
                # options ask for what a compilation leaves beside the kernel, and a file has nothing of it
                cache[full] = function(*full) if extra_options else compile_or_load(function, full)
            return cache[full]

    compiled.cache = cache  # type: ignore[attr-defined]
    return compiled


def compile_count() -> int:
    """Kernels compiled so far in this process (for tests: it must not grow with the data)."""
    return _compilations


def symbol(divisibility: int = 1) -> Any:
    """A tensor extent known at launch only; ``divisibility`` is a promise the caller keeps."""
    import cutlass.cute as cute

    return cute.sym_int64(divisibility=divisibility)


def fake(dtype: str, shape: tuple[Any, ...], *, align: int = 16, compact: bool = False, stride: tuple[Any, ...] | None = None) -> Any:
    """Describe a tensor argument without a tensor.

    Args:
        dtype: a name of :func:`dtype_name`.
        shape: ints or :func:`symbol`.
        align: bytes the data pointer and every stride but the last are a multiple of.
        compact: row-major with no gaps (strides follow the shape); otherwise any strides, the last one 1.
        stride: explicit strides instead.
    """
    import cutlass
    import cutlass.cute as cute

    kinds = {
        "float32": cutlass.Float32,
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
        "uint8": cutlass.Uint8,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
    }
    kind = kinds[dtype]
    if compact:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=align)
    if stride is None:
        step = max(1, align * 8 // kind.width)
        stride = (*(cute.sym_int64(divisibility=step) for _ in shape[:-1]), 1)
    return cute.runtime.make_fake_tensor(kind, shape, stride=stride, assumed_align=align)


def fake_offsets(dtype: str | None) -> Any:
    """Describe offsets ``[B + 1]`` of a jagged dimension, "int32" or "int64"; None, for none, stays None."""
    return None if dtype is None else fake(dtype, (symbol(),), align=4 if dtype == "int32" else 8)


def build(arch: str, function: Any, *arguments: Any) -> Any:
    """Compile a ``@cute.jit`` callable for ``arch``; its last parameter must be the stream, which is added here."""
    import cutlass.cute as cute

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} {extra_options}".strip()
    return cute.compile(function, *arguments, stream, options=options)


def launch(compiled: Any, device: torch.device, *arguments: Any) -> None:
    """Call a compiled function on tensors of ``device``, on that device's current stream."""
    if device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            compiled(*arguments)
    else:
        compiled(*arguments)
