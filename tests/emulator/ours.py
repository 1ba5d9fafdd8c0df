"""This project's own kernels on the emulator: their host code runs on CPU tensors, every launch is emulated.

``emulated(schedule)`` is a context in which ``lp_fa4``'s launches run here. Only the tensors of a launch are readable and
writable in it, so bounds are those of the kernel's own arguments.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from . import api, capture, hostpatch
from .api import Result, Schedule

#: packages whose modules hold ``arch_of``, ``launch`` and ``multiprocessors`` by name
_PACKAGES = {"sm_90a": ("lp_fa4.sm90",), "sm_100a": ("lp_fa4.sm100",), "sm_103a": ("lp_fa4.sm100",)}


def _modules(arch: str) -> list[Any]:
    for name in _PACKAGES[arch]:
        package = importlib.import_module(name)
        for info in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{name}.{info.name}")
    return [m for n, m in list(sys.modules.items()) if m is not None and n.split(".")[0] in ("lp_fa4", "fused_ops", "modules")]


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

    def run(launch: capture.Launch) -> None:
        result.launches.append(launch)
        result.machines.append(api.run(launch, capture.device_memory.extents, schedule, **options))

    def launch(compiled: Any, device: torch.device, *arguments: Any) -> None:
        previous, runtime.handler = runtime.handler, run
        capture.device_memory.clear()
        try:
            with hostpatch.device(arch):
                compiled(*arguments)
        finally:
            runtime.handler = previous
            capture.device_memory.clear()

    replaced = {"arch_of": lambda device: arch, "multiprocessors": lambda device: multiprocessors, "launch": launch}
    with contextlib.ExitStack() as stack:
        for module in _modules(arch):
            for name, value in replaced.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield result
