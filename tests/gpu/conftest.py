"""What the tests on a device share."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_at_a_time() -> Iterator[None]:
    """For tests that fill much of the device's memory: of all processes that run tests on this machine, one has its turn."""
    with open(Path(tempfile.gettempdir()) / "lp_fa4_large_test.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()
