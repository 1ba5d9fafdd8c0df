"""A pytest plugin that runs the Hopper GPU tests here, on the CPU: kernels are emulated, shapes cut down.

``python -m pytest -o addopts= -p tests.emulator.gpu_suite -m gpu tests/gpu/test_backward.py -k "jagged and bf16"``

Environment: ``EMULATOR_SCHEDULE`` (``name:seed``, default eager:0), ``EMULATOR_CHECK=1`` (race checker), ``EMULATOR_HOPPER=1`` (sums
of products as an H200 makes them, ``fidelity.HOPPER``), ``EMULATOR_LONGEST`` (sequences and query counts are cut to this many rows,
default 140). Tests that time, use streams or graphs, or allocate for huge batches make no sense here; choose with ``-k``. Kernel sources
must not change while it runs: the DSL reads them again when it compiles.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.emulator import capture
from tests.emulator.api import Schedule

capture.install("sm_90a")

from tests.emulator.fidelity import HOPPER  # noqa: E402
from tests.emulator.ours import emulated  # noqa: E402
from tests.gpu import problems  # noqa: E402

_LONGEST = int(os.environ.get("EMULATOR_LONGEST", "140"))
_NAME, _, _SEED = os.environ.get("EMULATOR_SCHEDULE", "eager:0").partition(":")
_make = problems.Case.make


def _small(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The same case with shorter sequences and few heads (grouped ones stay grouped)."""
    ratio = self.heads // self.kv_heads
    kv_heads = 1 if ratio > 1 else min(self.kv_heads, 2)
    queries = min(self.queries, _LONGEST) if isinstance(self.queries, int) else self.queries
    lengths = tuple(min(n, _LONGEST) for n in self.lengths)
    case = dataclasses.replace(self, lengths=lengths, queries=queries, heads=kv_heads * min(ratio, 2), kv_heads=kv_heads)
    return _make(case, *args, **kwargs)


problems.DEVICE = torch.device("cpu")
problems.poison = lambda megabytes=64: None
problems.Case.make = _small  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    fidelity = HOPPER if os.environ.get("EMULATOR_HOPPER") == "1" else None
    with emulated(Schedule(_NAME, int(_SEED or 0)), check=os.environ.get("EMULATOR_CHECK") == "1", fidelity=fidelity):
        yield
