"""``custom_op``: a dispatcher operator whose arithmetic is its own, and whose calls can be watched."""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Watcher(Protocol):
    """Sees every real call of every operator, nested ones too: an operator's inner calls come between its ``entered`` and its ``left``."""

    def entered(self, name: str, function: Callable, args: tuple, kwargs: dict) -> int:
        """Before the body runs. Returns a number for the call."""
        ...

    def left(self, call: int, name: str, function: Callable, args: tuple, kwargs: dict, result: object) -> None:
        """After it returned; not called if it raised."""


watchers: list[Watcher] = []
"""Of the whole process: the backward of a GPU's operators runs on threads of its own. Filled by ``lp_fa4.debug``, empty otherwise."""


def _device_type(args) -> str | None:
    for a in args:
        if isinstance(a, Tensor):
            return a.device.type
        if isinstance(a, (list, tuple)) and (found := _device_type(a)) is not None:
            return found
    return None


def _watched(name: str, fn: Callable, args: tuple, kwargs: dict):
    seeing = tuple(watchers)
    calls = [w.entered(name, fn, args, kwargs) for w in seeing]
    result = fn(*args, **kwargs)
    for w, call in zip(seeing, calls, strict=True):
        w.left(call, name, fn, args, kwargs, result)
    return result


def custom_op(name: str, *, mutates_args=()) -> Callable:
    """``torch.library.custom_op`` whose implementation runs with autocast off.

    An operator's body is below the dispatcher, but autocast stays on inside it and would turn its FP32 products into BF16 ones: what an
    operator computes must not depend on who calls it.
    """

    def register(fn: Callable):
        @functools.wraps(fn)
        def body(*args, **kwargs):
            kind = _device_type((*args, *kwargs.values()))
            if kind is None or not torch.is_autocast_enabled(kind):
                return _watched(name, fn, args, kwargs) if watchers else fn(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return _watched(name, fn, args, kwargs) if watchers else fn(*args, **kwargs)

        return torch.library.custom_op(name, mutates_args=mutates_args)(body)

    return register
