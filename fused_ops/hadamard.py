"""The per-head Hadamard rotation of the query and key projections.

Scores are unchanged by an orthogonal ``R`` on both sides, ``(R q) . (R k) = q . k``; the rotation spreads a channel that is
large in both over the whole head, so that E4M3 rounds it relative to the head and not to the outlier. It is folded into the
projections (``R Wq``, ``R Wk``), so neither the attention core nor the activations pay for it. ``R`` is symmetric and its own
inverse: ``R R = 1``.
"""

import torch
from torch import Tensor


def hadamard_matrix(n: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sylvester's Hadamard matrix over ``sqrt(n)``: ``[n, n]``, symmetric, orthogonal.

    Entry ``(i, j)`` is ``(-1)**popcount(i & j) / sqrt(n)``. Raises ``ValueError`` unless ``n`` is a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n is {n}; a Hadamard rotation needs a power of two")
    index = torch.arange(n, dtype=torch.int32, device=device)
    parity = index[:, None] & index[None, :]
    shift = 1
    while shift < n.bit_length():
        shift *= 2
    while shift > 1:  # fold the bits onto the lowest: few launches, for this runs in every step
        shift //= 2
        parity = parity ^ (parity >> shift)
    parity = parity & 1
    return (1 - 2 * parity).to(dtype) * n**-0.5


_kept: dict[tuple[int, int | None], tuple[Tensor, torch.cuda.Event | None]] = {}
"""Matrices of CUDA devices, and the event after which any stream may read one; None once it has happened."""


def rotation(n: int, device: torch.device) -> Tensor:
    """:func:`hadamard_matrix`, kept for GPUs, where making it costs more launches than using it.

    Nothing waits: while the stream that makes it has not come that far, and in a graph capture that meets none, it is made once more.
    """
    if device.type != "cuda":
        return hadamard_matrix(n, device)
    key = (n, device.index)
    matrix, event = _kept.get(key, (None, None))
    if matrix is not None and event is None:
        return matrix
    if torch.cuda.is_current_stream_capturing():
        return hadamard_matrix(n, device)
    if matrix is None:
        matrix, event = hadamard_matrix(n, device), torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        _kept[key] = (matrix, event)
        return matrix
    assert event is not None
    if not event.query():
        return hadamard_matrix(n, device)
    _kept[key] = (matrix, None)
    return matrix


def rotate_rows(weight: Tensor, heads: int) -> Tensor:
    """``R W`` for each head: ``weight [heads * D, C]`` to FP32 of the same shape. Applied twice it is the identity."""
    rows, columns = weight.shape
    per_head = weight.to(torch.float32).reshape(heads, rows // heads, columns)
    return (rotation(rows // heads, weight.device) @ per_head).reshape(rows, columns)
