"""Memory that nobody wrote holds what hurts most: ``fresh(byte)`` fills every tensor that the library's host code allocates.

0xFF is NaN as FP32, BF16, FP16 and E8M0, and -1 as an index; 0x7F is NaN as E4M3, and as FP32 a large finite number; 0x00 is what a lucky
allocator returns. A result that differs between them was made from memory that was never written. The allocator's own free blocks are a
second source (``tests.gpu.problems.poison``).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

FILLS = (0x00, 0x7F, 0xFF)


def _dirty(x: Tensor, byte: int) -> Tensor:
    if type(x) is Tensor and x.device.type != "meta" and x.untyped_storage().nbytes():
        torch.zeros(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(byte)
    return x


def _filling(make: Callable[..., Tensor], byte: int) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args, **kwargs):
        return _dirty(make(*args, **kwargs), byte)

    return made


@contextmanager
def fresh(byte: int) -> Iterator[None]:
    """``torch.empty``, ``empty_like``, ``empty_strided`` and ``Tensor.new_empty`` return memory full of ``byte``."""
    with ExitStack() as stack:
        for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (Tensor, ("new_empty", "new_empty_strided"))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name), byte)))
        yield
