"""Centre and quantize ordinary tensors on the GPU for the drop-in functions (the counterpart of ``reference.prepare``).

K and V lose the mean of at most 64 of their sequence's rows instead of all: softmax does not see K's, the output gets
V's back exactly, and any vector near the mean serves the rounding. One quantize launch each for q, k and v; k's and
v's vectors and v's sums are three small ones.
"""

from typing import NamedTuple

from torch import Tensor

from lp_fa4 import reference
from lp_fa4.common.sequence_vectors import sample_mean, sum_tiles
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor
from lp_fa4.sm90.forward_host import equal_offsets
from lp_fa4.sm90.quantize import quantize


class Prepared(NamedTuple):
    """``lp_fa4.reference.Prepared`` and ``lse_shift``: fp32 ``[H, N]``, what centring K took from the LSE, or None.

    ``v`` carries its transposed copy.
    """

    q: MXTensor
    k: MXTensor
    v: MXTensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    v_sum: Tensor | None
    lse_shift: Tensor | None


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
) -> Prepared:
    """Quantize ``q [N, H, D]``, ``k``, ``v [T, Hkv, D]`` in blocks ``(32 or 128, D)``, centred where that is allowed.

    ``softmax_scale`` enters ``lse_shift`` only.
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
    rows = block[0]
    if causal or not config.center_p:
        q8, _, _ = quantize(q, offsets_q, block=rows)
        k8, _, _ = quantize(k, offsets_k, block=rows)
        v8, _, _ = quantize(v, offsets_k, block=rows, order="accumulator")
        return Prepared(q8, k8, v8, None, None, None, None)
    k_mean, v_mean = sample_mean(k, offsets_k), sample_mean(v, offsets_k)
    q8, _, shift = quantize(q, offsets_q, block=rows, vectors=k_mean, factor=softmax_scale)
    k8, _, _ = quantize(k, offsets_k, block=rows, means=k_mean)
    v8, parts, _ = quantize(v, offsets_k, block=rows, means=v_mean, order="accumulator", sums=True)
    assert parts is not None
    return Prepared(q8, k8, v8, k_mean, v_mean, sum_tiles(parts, offsets_k), shift)
