"""The attention problem: one validated object that the reference and every kernel take.

Shapes (``N`` query rows in all, ``T`` key rows, ``B`` sequences)::

    q  [N, H, D]      N = Q (shared_q), B*Q (dense) or offsets_q[-1] at most (jagged)
    k  [T, Hkv, D]    v [T, Hkv, D];   H a multiple of Hkv;   T may exceed offsets_k[-1], rows past it are never read

Construction reads shapes, dtypes and devices only, never a value on the device. :meth:`AttentionProblem.validate` reads offsets.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lp_fa4.config import DEFAULT, HEAD_DIMS, AttentionConfig
from lp_fa4.mx import MXTensor, check_offsets


class ForwardResult(NamedTuple):
    """What attention returns and what its backward needs. ``R`` output rows: ``B*Q`` (dense, shared) or ``N`` (jagged).

    ``out``: bf16 ``[R, H, D]``; rows that see no key are 0. ``lse``: fp32 ``[H, R]``, natural logarithm, -inf for such rows.
    ``centred_out``: ``[R, H, D]`` in ``config.save_out_dtype``, the output before ``v_mean`` is added back. ``row_max``: fp32 ``[H, R]``,
    the maximum of ``softmax_scale * log2(e) * q.k`` over the row's keys: **log2 domain**, the exact maximum and not the lazy one, so that
    the backward's P is at most 1 (of scores in FP16, where the Hopper kernel takes them so: to 2^-11 of itself); -inf for a row that
    sees no key. ``row_sum``: fp32 ``[H, R]``, the sum of ``exp2(s - row_max)`` over
    unrounded P, 0 for a row that sees no key. ``lse = (row_max + log2(row_sum)) * ln 2``. Rows past ``offsets_q[-1]`` are 0, lse -inf.
    """

    out: Tensor
    lse: Tensor
    centred_out: Tensor
    row_max: Tensor
    row_sum: Tensor


class Gradients(NamedTuple):
    """``dq``: fp32, the shape of q (summed over sequences if shared). ``dk``, ``dv``: ``[T, Hkv, D]``, MXFP8 with sequence-local groups or
    bf16. With ``v_mean``-style centring of P, ``dv`` is dV minus ``dv_mean`` and ``dv_mean`` is fp32 ``[B, Hkv, D]``:
    ``dV[j] = dv[j] + dv_mean[sequence of j]``; None when dv is complete. Rows past ``offsets_k[-1]`` are 0."""

    dq: Tensor
    dk: "MXTensor | Tensor"
    dv: "MXTensor | Tensor"
    dv_mean: Tensor | None


def check_head_dim(head_dim: int) -> None:
    """Refuse a head dimension that no backend serves."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; allowed are {', '.join(map(str, HEAD_DIMS))}")


def check_softmax_scale(scale: float) -> None:
    """Refuse a factor that is not finite: the maximum of a row of NaN scores would hide it."""
    if not -math.inf < scale < math.inf:
        raise ValueError(f"softmax_scale is {scale}; it must be finite")


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """Everything a forward needs.

    Attributes:
        q, k, v: MXFP8 operands, token axis 0. Scales must belong to the sequences: a jagged operand carries its offsets (dense queries:
            ``arange(B + 1) * Q``), unless it is static, shared or alone in the batch.
        offsets_q: int ``[B + 1]`` or None (dense or shared queries). offsets_k: int ``[B + 1]`` or None (one sequence).
        shared_q: every sequence uses the same ``q [Q, H, D]``.
        softmax_scale: factor on ``q . k``; None is ``1 / sqrt(D)``.
        causal: query i of n sees key j of m if ``j <= i + m - n`` (aligned at the ends, as flash_attn).
        v_mean: fp32 ``[B, Hkv, D]``, added to the output (rows of softmax sum to 1): what was subtracted from V before quantization.
        v_sum: fp32 ``[B, Hkv, D]``, sum over keys of the unrounded centred V; needed where P is centred (``centred``).
        q_mean: fp32 ``[H, D]`` (shared_q) or ``[B, H, D]``: what was subtracted from q before quantization (Q smoothing); its scores are
            added in FP32. Reference only.
        mean_scores: fp32 ``[H, T]``, ``q_mean . k`` of the unrounded keys, before softmax_scale; None takes the reconstructed keys, which
            leaves their rounding in the part of the scores that is common to all queries.
        queries_each: with offsets_q, the queries of every sequence where all have as many (kernels then need no offsets of queries).
        queries_most: with offsets_q, what no sequence's queries should pass, or None: a hint, on which speed may depend and no result does.
        config: numeric choices.

    Raises: ``ValueError`` or ``TypeError`` naming argument, value and rule.
    """

    q: MXTensor
    k: MXTensor
    v: MXTensor
    offsets_q: Tensor | None = None
    offsets_k: Tensor | None = None
    shared_q: bool = False
    softmax_scale: float | None = None
    causal: bool = False
    v_mean: Tensor | None = None
    v_sum: Tensor | None = None
    q_mean: Tensor | None = None
    mean_scores: Tensor | None = None
    queries_each: int | None = None
    queries_most: int | None = None
    config: AttentionConfig = DEFAULT

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if x.payload.dim() != 3:
                raise ValueError(f"{name} has shape {list(x.shape)}; it must be [tokens, heads, head_dim]")
            if x.token_dim != 0:
                raise ValueError(f"{name}.token_dim is {x.token_dim}; attention operands have their tokens at axis 0")
            if x.device != self.q.device:
                raise ValueError(f"{name} is on {x.device} but q is on {self.q.device}; all operands must be on one device")
        if self.k.shape != self.v.shape:
            raise ValueError(f"v has shape {list(self.v.shape)} but k has {list(self.k.shape)}; they must be equal")
        if self.q.shape[2] != self.k.shape[2]:
            raise ValueError(f"k has head_dim {self.k.shape[2]} but q has {self.q.shape[2]}; they must be equal")
        check_head_dim(self.head_dim)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"q has {self.heads} heads and k has {self.kv_heads}; the first must be a multiple of the second")
        for name, mx in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not mx.is_static and mx.block[1] not in (32, self.head_dim):
                raise ValueError(f"{name} has blocks {mx.block}; the width must be 32 or head_dim = {self.head_dim}")
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", 1.0 / math.sqrt(self.head_dim))
        else:
            check_softmax_scale(self.softmax_scale)
        if self.offsets_k is None:
            object.__setattr__(self, "offsets_k", self.k.offsets if self.k.offsets is not None else self.v.offsets)
        if self.offsets_q is None and not self.shared_q:
            object.__setattr__(self, "offsets_q", self.q.offsets)
        self._check_offsets()
        self._check_sums()

    def _check_offsets(self) -> None:
        if self.offsets_k is not None:
            check_offsets(self.offsets_k, self.tokens, "offsets_k", self.device)
        if self.shared_q and self.offsets_q is not None:
            raise ValueError("offsets_q is given with shared_q=True; shared queries [Q, H, D] have no offsets")
        if self.offsets_q is not None:
            check_offsets(self.offsets_q, self.q.shape[0], "offsets_q", self.device)
            if self.offsets_q.shape[0] != self.batch + 1:
                raise ValueError(
                    f"offsets_q has {self.offsets_q.shape[0]} elements but offsets_k has {self.batch + 1}; both must be batch + 1"
                )
            if self.queries_each is not None and self.queries_each * self.batch != self.q.shape[0]:
                rows = self.q.shape[0]
                raise ValueError(
                    f"queries_each is {self.queries_each} but q has {rows} rows in {self.batch} sequences; it must be their quotient"
                )
        elif not self.shared_q:
            if self.batch == 0:
                if self.q.shape[0] != 0:
                    raise ValueError(f"q has {self.q.shape[0]} rows but the batch is empty (offsets_k has one element); it must have none")
            elif self.q.shape[0] % self.batch:
                raise ValueError(f"q has {self.q.shape[0]} rows, no multiple of the batch {self.batch}; give offsets_q or shared_q=True")
        for name, mx, offsets in (("q", self.q, self.offsets_q), ("k", self.k, self.offsets_k), ("v", self.v, self.offsets_k)):
            if mx.is_static or mx.offsets is not None or (name == "q" and self.shared_q) or self.batch == 1:
                continue
            if offsets is not None or self.batch != 1:
                raise ValueError(
                    f"{name} was quantized without offsets, so its groups of 32 tokens cross the {self.batch} sequences; "
                    "pass offsets to quantize_mx (dense queries: arange(batch + 1) * queries)"
                )

    def _check_sums(self) -> None:
        for name in ("v_mean", "v_sum"):
            x = getattr(self, name)
            if x is None:
                continue
            if list(x.shape) != [self.batch, self.kv_heads, self.head_dim] or x.dtype != torch.float32 or x.device != self.device:
                raise ValueError(
                    f"{name} is {x.dtype} {list(x.shape)} on {x.device}; it must be torch.float32 "
                    f"{[self.batch, self.kv_heads, self.head_dim]} on {self.device}"
                )
        if self.q_mean is not None:
            want = [self.heads, self.head_dim] if self.shared_q else [self.batch, self.heads, self.head_dim]
            if list(self.q_mean.shape) != want or self.q_mean.dtype != torch.float32 or self.q_mean.device != self.device:
                raise ValueError(
                    f"q_mean is {self.q_mean.dtype} {list(self.q_mean.shape)} on {self.q_mean.device}; "
                    f"it must be torch.float32 {want} on {self.device}"
                )
        if self.mean_scores is not None:
            x, want = self.mean_scores, [self.heads, self.tokens]
            if self.q_mean is None:
                raise ValueError("mean_scores is given but q_mean is None; they belong together (the gradient of k needs q_mean)")
            if list(x.shape) != want or x.dtype != torch.float32 or x.device != self.device:
                raise ValueError(
                    f"mean_scores is {x.dtype} {list(x.shape)} on {x.device}; it must be torch.float32 {want} on {self.device}"
                )
        if self.config.center_p and not self.causal and self.v_sum is None:
            raise ValueError(
                "v_sum is None but config.center_p is True and causal is False; give the sums, or a config with center_p=False"
            )
        if self.config.grad_format == "mxfp8" and self.config.grad_block[1] not in (32, self.head_dim):
            raise ValueError(f"config.grad_block is {self.config.grad_block}; its width must be 32 or head_dim = {self.head_dim}")

    @property
    def device(self) -> torch.device:
        """Device of every operand."""
        return self.q.device

    @property
    def heads(self) -> int:
        """Query heads ``H``."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Key/value heads ``Hkv``."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """``D``."""
        return self.q.shape[2]

    @property
    def tokens(self) -> int:
        """Rows of k and v, the capacity."""
        return self.k.shape[0]

    @property
    def batch(self) -> int:
        """Sequences ``B``."""
        return 1 if self.offsets_k is None else self.offsets_k.shape[0] - 1

    @property
    def queries(self) -> int | None:
        """Queries per sequence ``Q``, None where they are jagged."""
        if self.queries_each is not None:
            return self.queries_each
        if self.shared_q:
            return self.q.shape[0]
        if self.offsets_q is None:
            return self.q.shape[0] // max(self.batch, 1)
        return None

    @property
    def rows(self) -> int:
        """Output rows ``R``."""
        return self.batch * self.q.shape[0] if self.shared_q else self.q.shape[0]

    @property
    def centred(self) -> bool:
        """Whether the forward's P is centred."""
        return self.config.center_p and not self.causal

    @property
    def centred_backward(self) -> bool:
        """Whether the backward's P is centred, so that ``Gradients.dv_mean`` holds the part of dV that was left out."""
        return self.centred and self.config.center_p_backward and self.config.fold_l_into_do

    def validate(self) -> None:
        """Read offsets on the host and refuse values that describe no batch: not starting at 0, decreasing, past the end."""
        if self.offsets_k is not None:
            check_offsets(self.offsets_k, self.tokens, "offsets_k", self.device, validate=True)
        if self.offsets_q is not None:
            check_offsets(self.offsets_q, self.q.shape[0], "offsets_q", self.device, validate=True)
