"""Shared by all tests: fresh memory is poison, jagged batches are hostile.

Every test runs with ``torch.empty`` filled with NaN (floats) or the largest value (integers, so that an E8M0
scale is 0xFF = NaN): whatever reads memory it did not write, fails.
"""

import pytest
import torch

HOSTILE_LENGTHS = (0, 1, 31, 32, 33, 0, 127, 128, 129, 0)
"""Sequence lengths around every boundary of groups (32) and tiles (128), empties first, last and in the middle."""


def offsets_of(lengths, dtype=torch.int32) -> torch.Tensor:
    """Lengths to offsets ``[B + 1]``."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype)


@pytest.fixture(autouse=True)
def poison_empty(request):
    """``torch.empty`` and friends return NaN, 0x7FFF…, 0xFF.

    Not on a GPU, where the switch would also choose the deterministic kernels: GPU tests poison the
    caching allocator themselves.
    """
    if request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
