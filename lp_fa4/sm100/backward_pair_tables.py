"""Factors of the two-CTA backward, from exponents and bounds: plain tensor operations on the device, no value is read by the host.

The products of that kernel have no scales, so whatever a product cannot take is applied to P and dS before they are coded. An exponent that
varies along the contracted axis is folded into the codes; what is left is one power of two for all that an accumulator adds up:

* dV sums over the queries of a sequence and of a group's heads: P carries dO's exponents relative to their largest, ``2^o_ref``.
* dK sums over the same: dS carries q's exponents, and ``2^E`` is its scale.
* dQ of 32 queries sums over the pair's keys (and its drain over all keys): dS carries k's exponents, and ``2^F`` is its scale.

E and F are bounds, so that dS can be coded as it is made, in either CTA, without a maximum over both: with p <= 1 (the forward's exact
maximum; 1 / l where dO is not divided by l) and Cauchy-Schwarz, ``|dS| <= |v| |dO_q| + |D_q|``, for the largest norm of V's rows in the
sequence and of dO8's rows in a block of 32 queries. What that costs against scales from dS itself is in ``BACKWARD.md``.
"""

import torch
from torch import Tensor

from lp_fa4.mx import MXTensor
from lp_fa4.problem import AttentionProblem
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, TILE

BLOCKS = TILE // 32
HEADROOM = 1.0625
"""On the bound: P may exceed 1, and sums the exact ones, by rounding."""
LEAST = 2.0**-126
"""Stands for 0 where a factor is divided by."""


def pair_tables(
    p: AttentionProblem, offsets_k: Tensor, offsets_q: Tensor, stats: Tensor, blocks: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of query blocks, of key groups and of results; ``stats`` are changed in place (``a`` and ``c`` get dO's exponents).

    Args:
        p: the problem, its operands with one exponent per 32 tokens and head. offsets_k, offsets_q: int ``[B + 1]`` (shared: zeros).
        stats: fp32 ``[R, H, n * 128]``, blocks: fp32 ``[R, H, 16]`` of ``backward_prepass``. norms: fp32 ``[G, Hkv]`` of
            ``backward_pair_norms``.
    Returns: fp32 ``[R, H, 16]``, of each of a tile's four blocks: q's scale, that times 2^-E, 2^-F, and dQ's factor; fp32 ``[G, Hkv, 2]``,
        scales of k and v; fp32 ``[B, Hkv, 2]``, factors of dV and dK. A block whose scale is a NaN has NaN factors, and no part in others'.
    """
    batch, kv_heads, group = p.batch, p.kv_heads, p.group
    unit = 2.0**-p.config.p_scale_backward_log2
    sequence, q_rows = _owners(p, offsets_q, blocks.shape[0])
    scale, norm, delta = (blocks.unflatten(-1, (BLOCKS, BLOCK_FACTORS))[..., i] for i in range(3))
    owned = torch.isfinite(scale) & (q_rows >= 0)[:, None, None]

    def largest(x: Tensor) -> Tensor:
        """Largest of ``[R, H, 4]`` in a sequence and key/value head, at least ``LEAST``: ``[B, Hkv]``."""
        x = torch.where(owned, x, 0.0).unflatten(1, (kv_heads, group)).amax((2, 3))
        return _largest(x, sequence, batch)

    def spread(x: Tensor) -> Tensor:
        """``[B, Hkv]`` at the blocks of each sequence and head: ``[R, H, 1]``."""
        return x[sequence].repeat_interleave(group, 1)[..., None]

    top = largest(torch.where(norm > 0, scale, 0.0))  # 2^o_ref
    top = torch.where(top > LEAST, top, 1.0)  # where all of dO is 0
    shift = scale / spread(top)
    kinds = stats.unflatten(-1, (-1, BLOCKS, 32))
    kinds[:, :, 0] += torch.log2(shift)[..., None]
    kinds[:, :, 2] *= shift[..., None]

    key_group = torch.arange(norms.shape[0], device=p.device)
    first = offsets_k[:-1] // 32 + torch.arange(batch, dtype=offsets_k.dtype, device=p.device)
    key_sequence = (torch.searchsorted(first.contiguous(), key_group.to(first.dtype), right=True) - 1).clamp(min=0)
    keys = torch.stack([_factors(x, norms.shape[0]) for x in (p.k, p.v)], -1)
    exists = (key_group - first[key_sequence]) * 32 < (offsets_k[1:] - offsets_k[:-1])[key_sequence]
    value_norm = _largest(norms.nan_to_num(0.0, 0.0, 0.0), key_sequence, batch)
    key_scale = _largest(torch.where(exists[:, None], keys[..., 0], 0.0).nan_to_num(0.0, 0.0, 0.0), key_sequence, batch)

    bound = (spread(value_norm) * norm + delta) / (unit * spread(top)) * (HEADROOM / 448.0)
    q_scale = _query_factors(p.q, q_rows)
    for_keys = _power_above(largest(bound * q_scale))
    for_queries = _power_above(torch.where(owned, bound * spread(key_scale), 1.0))
    assert p.softmax_scale is not None
    dq = for_queries * spread(top) * (unit * p.softmax_scale)
    factors = torch.stack([q_scale, q_scale / spread(for_keys), 1.0 / for_queries, dq], -1).flatten(-2).contiguous()
    results = torch.stack([top * unit, for_keys * top * (unit * p.softmax_scale)], -1).contiguous()
    return factors, keys.contiguous(), results


def _owners(p: AttentionProblem, offsets_q: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sequence of each workspace row ``[R]``, and its first group of 32 queries among q's scales, or -1 where it owns nothing."""
    row = torch.arange(rows, device=p.device)
    if p.queries is not None:
        per = -(-p.queries // TILE)
        return row // per, row % per * BLOCKS
    first = offsets_q[:-1].to(torch.int64) // TILE + torch.arange(p.batch, device=p.device)
    sequence = (torch.searchsorted(first, row, right=True) - 1).clamp(min=0)
    tile = row - first[sequence]
    many = (offsets_q[1:] - offsets_q[:-1])[sequence]
    return sequence, torch.where(tile * TILE < many, offsets_q[sequence] // 32 + sequence + tile * BLOCKS, -1)


def _query_factors(x: MXTensor, rows: Tensor) -> Tensor:
    """Scales of q at four groups from each of ``rows``: ``[R, H, 4]``."""
    scales = _decode(x.scale_bytes[..., 0])
    index = rows[:, None] + torch.arange(BLOCKS, device=rows.device)
    return scales[index.clamp(0, scales.shape[0] - 1)].transpose(1, 2)


def _factors(x: MXTensor, groups: int) -> Tensor:
    """Scales of 32 keys: ``[G, Hkv]``, a static one for all, 1 past the last."""
    scales = _decode(x.scale_bytes[..., 0])
    if x.is_static:
        return scales.expand(groups, -1)
    return torch.nn.functional.pad(scales, (0, 0, 0, groups - scales.shape[0]), value=1.0)


def _decode(byte: Tensor) -> Tensor:
    """E8M0 bytes in FP32: 255 is NaN."""
    return torch.where(byte == 255, torch.nan, torch.exp2(byte.to(torch.float32) - 127.0))


def _largest(x: Tensor, sequence: Tensor, batch: int) -> Tensor:
    """Largest of ``x [n, h]`` in each sequence, at least ``LEAST``: ``[B, h]``."""
    out = torch.full((batch, x.shape[1]), LEAST, device=x.device)
    return out.scatter_reduce(0, sequence[:, None].expand_as(x), x, "amax")


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below ``x``, from 2^-100 to 2^120."""
    mantissa, exponent = torch.frexp(x.clamp(2.0**-100, 2.0**120))
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))
