"""Centre and quantize ordinary tensors on the GPU for the drop-in functions (the counterpart of ``reference.prepare``).

K and V lose the mean of at most 64 of their sequence's rows instead of all: softmax does not see K's, the output gets
V's back exactly, and any vector near the mean serves the rounding. One launch quantizes q, k and v; a small one before
it finds the means, a small one after it adds up the sums of V.
"""

from typing import NamedTuple

from torch import Tensor

from lp_fa4 import reference
from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.common.sequence import TILE
from lp_fa4.common.sequence_vectors import sample_means, sum_tiles
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor
from lp_fa4.sm90.forward_host import equal_offsets
from lp_fa4.sm90.quantize import Work, quantize_all
from lp_fa4.sm90.quantize_beside import Beside


class Prepared(NamedTuple):
    """``lp_fa4.reference.Prepared`` and ``lse_shift``: fp32 ``[H, N]``, what centring K took from the LSE, or None.

    ``v`` carries its transposed copy where ``copy_pays``.
    """

    q: MXTensor
    k: MXTensor
    v: MXTensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    v_sum: Tensor | None
    lse_shift: Tensor | None
    beside: Beside | None = None


COPY_QUERIES = 1024
"""Queries that read a key/value head of a sequence, on average, up to which the forward turns V itself. It does so once every 128 queries,
at 5% of its own time; a copy in memory is written once, at a seventh of the quantize pass."""


def copy_pays(q: Tensor, k: Tensor, samples: int) -> bool:
    """Whether V gets a transposed copy: by shapes alone. ``q [N, H, D]``, ``k [T, Hkv, D]`` in ``samples`` sequences."""
    return q.shape[0] * q.shape[1] > COPY_QUERIES * samples * k.shape[1]


BESIDE_KEYS, BESIDE_TILES = 512, 3000
"""Keys of a sequence, and tiles of all operands and heads, from which on the pass goes beside the forward: what was measured from there on
was faster (``README.md``)."""


def beside_pays(q: Tensor, k: Tensor, v: Tensor, samples: int, rows: int) -> bool:
    """Whether equal sequences are quantized beside the forward: by shapes, strides and dtypes alone. ``rows``: of a block."""
    keys, queries = k.shape[0] // samples, q.shape[0] // samples
    whole = rows == TILE and q.shape[1] == k.shape[1] and keys % TILE == 0 and queries % TILE == 0
    large = keys >= BESIDE_KEYS and (2 * k.shape[0] + q.shape[0]) // TILE * k.shape[1] >= BESIDE_TILES
    return whole and large and all(x.element_size() == 2 and min(x.stride()[:2]) > 0 for x in (q, k, v))


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor | None,
    causal: bool,
    config: AttentionConfig,
    block: tuple[int, int],
    softmax_scale: float,
    equal: bool = False,
) -> Prepared:
    """Quantize ``q [N, H, D]``, ``k``, ``v [T, Hkv, D]`` in blocks ``(32 or 128, D)``, centred where that is allowed.

    ``softmax_scale`` enters ``lse_shift`` only. ``equal``: sequences are of one length.
    """
    if block[0] not in (32, 128) or block[1] != q.shape[2]:
        raise ValueError(f"block is {block}; allowed are (32, {q.shape[2]}) and (128, {q.shape[2]})")
    samples = 1 if offsets_k is None else offsets_k.shape[0] - 1
    if q.shape[0] == 0 or k.shape[0] == 0 or samples == 0:  # nothing to launch on, though there may be spare rows
        made = reference.prepare(q, k, v, offsets_q, offsets_k, causal, config, block)
        return Prepared(*made, lse_shift=None)
    if offsets_k is None:
        offsets_k = equal_offsets(k.shape[0], 1, k.device)
    if offsets_q is None:
        offsets_q = equal_offsets(q.shape[0], 1, q.device)
    rows, order = block[0], "accumulator" if copy_pays(q, k, samples) else None
    if causal or not config.center_p:
        works = [Work(v, offsets_k, rows, order=order), Work(k, offsets_k, rows), Work(q, offsets_q, rows, bounded=True)]
        quantize_all(works)
        return Prepared(*(w.made for w in reversed(works)), None, None, None, None)
    k, v = aligned_rows(k), aligned_rows(v)
    k_mean, v_mean = sample_means((k, v), offsets_k)
    works = [
        Work(v, offsets_k, rows, order=order, means=v_mean, sums=True),
        Work(k, offsets_k, rows, means=k_mean),
        Work(q, offsets_q, rows, vectors=k_mean, bounded=True),
    ]
    if equal and order is None and beside_pays(q, k, v, samples, rows):
        beside = Beside(works, softmax_scale)
        return Prepared(*(w.made for w in reversed(works)), k_mean, v_mean, beside.v_sum, works[2].dots, beside)
    quantize_all(works, softmax_scale)
    parts = works[0].parts
    assert parts is not None
    return Prepared(*(w.made for w in reversed(works)), k_mean, v_mean, sum_tiles(parts, offsets_k), works[2].dots)
