"""Host code that expects a GPU, on a machine without one.

flash-attn-4 and Quack ask torch for the device's capability and its streams, and hand tensors to compiled functions that
want the device type CUDA. ``device(arch)`` is a context in which

* CPU tensors say ``is_cuda`` (the host code asserts it),
* the capability, the multiprocessor count and the stream are those of the emulated device,
* every call of a compiled CuTe function hands its CPU tensors over as device tensors.

Nothing is patched outside the context, but Quack's CUDA-only custom operators keep the CPU registration that they get.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from . import capture


class _Properties:
    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability
        self.multi_processor_count = 148 if self.major >= 10 else 132
        self.name = "emulated"
        self.L2_cache_size = 120 << 20
        self.total_memory = 141 << 30
        self.shared_memory_per_block_optin = 232448
        self.warp_size = 32


class _Stream:
    cuda_stream = 0
    device = torch.device("cpu")
    device_index = 0


def convert(x: Any) -> Any:
    """CPU tensors in ``x`` (nested tuples and lists) → device tensors."""
    if isinstance(x, torch.Tensor):
        return capture.device_memory.as_device(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(convert, x))
    if isinstance(x, (tuple, list)):
        return type(x)(map(convert, x))
    return x


def _calling(original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *map(convert, args), **{k: convert(v) for k, v in kwargs.items()})
        except Exception:
            capture.runtime().raise_pending()
            raise
        capture.runtime().raise_pending()
        return result

    return call


def _serve_cpu(namespaces: tuple[str, ...]) -> None:
    """Let CUDA-only custom operators of ``namespaces`` accept CPU tensors: the same Python function serves both."""
    from torch._library.custom_ops import OPDEFS

    for name, definition in list(OPDEFS.items()):
        functions = definition._backend_fns
        if name.split("::")[0] in namespaces and "cuda" in functions and "cpu" not in functions and None not in functions:
            definition.register_kernel("cpu")(functions["cuda"])


@contextlib.contextmanager
def device(arch: str) -> Iterator[None]:
    """See the module's text. ``capture.install(arch)`` is called first."""
    capture.install(arch)
    import cutlass.utils
    import torch._subclasses.fake_tensor as fake_tensor
    from cutlass.cutlass_dsl import tvm_ffi_provider as provider

    capability = capture.target_capability_of(arch)
    properties = _Properties(capability)
    count = properties.multi_processor_count
    info = cutlass.utils.HardwareInfo
    with contextlib.ExitStack() as stack:

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        patch(info, "__init__", lambda self, *a, **k: None)
        patch(info, "get_max_active_clusters", lambda self, size=1, *a, **k: count // size)
        patch(info, "get_device_multiprocessor_count", lambda self, *a, **k: count)
        patch(info, "get_l2_cache_size_in_bytes", lambda self, *a, **k: properties.L2_cache_size)
        patch(torch.Tensor, "is_cuda", property(lambda self: True))
        patch(torch.cuda, "get_device_capability", lambda *a, **k: capability)
        patch(torch.cuda, "get_device_properties", lambda *a, **k: properties)
        patch(torch.cuda, "current_stream", lambda *a, **k: _Stream)
        patch(torch.cuda, "current_device", lambda *a, **k: 0)
        patch(torch.cuda, "is_available", lambda: True)
        patch(fake_tensor, "init_gpu_context", lambda *a: None)  # a CUDA build of torch would look for a real device
        for cls in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
            patch(cls, "__call__", _calling(cls.__call__))
        _serve_cpu(("quack",))
        define = torch.library.custom_op

        def custom_op(name: str, fn: Any = None, /, *, device_types: Any = None, **rest: Any) -> Any:
            if name.startswith("quack::"):  # imported only now: as _serve_cpu does
                device_types = None
            return define(name, fn, device_types=device_types, **rest)

        patch(torch.library, "custom_op", custom_op)
        yield
