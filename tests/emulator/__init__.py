"""A CPU emulator for CuTe DSL kernels: their PTX runs on NumPy, under adversarial schedules, with a race checker.

See README.md. ``from tests.emulator import emulate``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Schedule", "emulate", "record", "run", "schedules"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
