"""``custom_op``: a dispatcher operator whose arithmetic is its own, and whose calls can be watched."""

import functools
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.library import CustomOpDef


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


class _Inside(threading.local):
    """Whether this thread is in an operator's body."""

    depth = 0


_inside = _Inside()


class _Operator(CustomOpDef):
    """A custom operator that is an ordinary function in the body of another: below the dispatcher it has nothing more to say, and costs
    some 30 us a call."""

    body: Callable

    def __call__(self, *args, **kwargs):
        return self.body(*args, **kwargs) if _inside.depth else super().__call__(*args, **kwargs)


def custom_op(name: str, *, mutates_args=()) -> Callable:
    """``torch.library.custom_op`` whose implementation runs with autocast off.

    An operator's body is below the dispatcher, but autocast stays on inside it and would turn its FP32 products into BF16 ones: what an
    operator computes must not depend on who calls it.
    """

    def register(fn: Callable):
        def run(args: tuple, kwargs: dict):
            return _watched(name, fn, args, kwargs) if watchers else fn(*args, **kwargs)

        @functools.wraps(fn)
        def body(*args, **kwargs):
            if _inside.depth:
                return run(args, kwargs)
            kind = _device_type((*args, *kwargs.values()))
            _inside.depth += 1
            try:
                if kind is None or not torch.is_autocast_enabled(kind):
                    return run(args, kwargs)
                with torch.autocast(kind, enabled=False):
                    return run(args, kwargs)
            finally:
                _inside.depth -= 1

        operator = torch.library.custom_op(name, mutates_args=mutates_args)(body)
        operator.__class__ = _Operator
        operator.body = body  # type: ignore[attr-defined]
        return operator

    return register
