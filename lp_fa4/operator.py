"""``custom_op``: a dispatcher operator whose arithmetic is its own."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def _device_type(args) -> str | None:
    for a in args:
        if isinstance(a, Tensor):
            return a.device.type
        if isinstance(a, (list, tuple)) and (found := _device_type(a)) is not None:
            return found
    return None


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
                return fn(*args, **kwargs)
            with torch.autocast(kind, enabled=False):
                return fn(*args, **kwargs)

        return torch.library.custom_op(name, mutates_args=mutates_args)(body)

    return register
