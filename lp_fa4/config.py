"""Numeric choices of the attention core: what is rounded, where, and on which scale.

One frozen object, :class:`AttentionConfig`, is read by the reference and by every kernel, so that "the same rounding points" is a fact
about an object and not a hope. ``lp_fa4/NUMERICS.md`` has what happens between them, how backends differ, and what is lost. The defaults
are the project's own design; :meth:`AttentionConfig.post` is the conventional recipe (normalised P in the backward, no centring) kept for
comparison.

Why the bound on P: the lazy running maximum lets ``p = exp2(s - m)`` reach ``2**rescale_threshold`` before it is scaled by
``2**p_scale_log2`` and rounded to E4M3, whose largest value is 448. Past that bound P saturates without a NaN or an error while the row
sum does not, so the output is silently wrong. ``__post_init__`` refuses it.
"""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

HEAD_DIMS = tuple(range(32, 257, 32))
"""Head dimensions that the reference serves: whole 32-wide scale blocks. Kernels serve a part of them (``is_supported``)."""

P_LIMIT_LOG2 = math.log2(448.0)
"""E4M3's largest value: scale and lazy threshold of P must stay under it together."""

P_SCALES = ("constant", "softmax_max", "fresh")

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True)
class AttentionConfig:
    """Rounding points of attention, forward and backward. Hashable; ``key`` is its text form for operator arguments.

    Forward, per query row, over key tiles of ``key_tile`` keys (log2 domain, ``s = softmax_scale * log2(e) * q . k``)::

        m    running maximum, moved only when a tile exceeds it by more than rescale_threshold
        p    = exp2(s - m);   l += p   (unrounded)
        c    = exp2(mean over the first tile of s - m), carried through rescaling like m; 0 unless center_p
        O    = ( E4M3((p - c) * 2**p_scale_log2) * 2**-p_scale_log2 @ v8 + c * v_sum ) / l

    Backward (``m``, ``l`` of the exact row maximum, so ``p <= 1``)::

        dO8  = quantize(dO / l)   if fold_l_into_do   else   quantize(dO), and p is normalised by l
        D    = rowsum(dO8 * Oc)   if delta_from == "quantized"   else   from dO itself
        dV   = ( E4M3((p - l/K) * 2**p_scale_backward_log2) * 2**-p_scale_backward_log2 )^T @ dO8
        dS8  = quantize(p * (dO8 @ v8^T - D)) in ds_block;   dQ = dS8 @ k8;   dK = dS8^T @ q8

    Attributes:
        center_p: subtract ``c`` (forward) and ``l/K`` (backward) from P before it is rounded. Never applies to causal attention: the sums
            that pay for it would be per row.
        center_p_backward: the backward's half of it; needs ``center_p`` and ``fold_l_into_do``.
        p_scale: where P's scale in the forward comes from. ``"constant"``: ``2**p_scale_log2``. ``"softmax_max"`` and ``"fresh"``: every 32
            keys of a row have their own, the smallest power of two under which none saturates; they round alike and differ in how a kernel
            finds it, from the block's largest score (one more exponential) or from P itself. Uncentred P, Blackwell and the reference.
        operand_scales: where the scales of q, k and v meet the products. ``"auto"``: the backend's own way (Blackwell: inside block-scaled
            MMA; Hopper: outside). ``"outside"``: plain FP8 products, for operands with one exponent per 32 tokens and head. If V's
            exponent varies along the keys it is then folded into P (and the running maximum), which needs uncentred P.
            With ``do_block=(32, 0)`` and ``ds_block=None`` Blackwell's backward then works by pairs of multiprocessors.
        p_scale_log2: power of two on P in the forward.
        rescale_threshold: tau, in log2 units. 0 is the plain running maximum.
        key_tile: keys per tile of the running maximum, a multiple of 32.
        p_scale_backward_log2: power of two on P in the backward, where P <= 1. Where Hopper sums dV in FP16 (static exponents, or one for
            each whole tile) P is coded 2^2 smaller, 2^6 by default, so that the sum of 512 queries on one key stays in range; E4M3 loses
            nothing by it (``lp_fa4/NUMERICS.md``).
        fold_l_into_do: divide dO by the row sum before it is quantized, so that P's size does not fall with the length.
        delta_from: which dO the row term D is made of. ``"quantized"`` keeps the row sums of dS near 0.
        align_do: give P a factor f in (1/2, 1] and dO / l the factor 1 / f, a row at a time, with max|dO| / (l f) a power of two: then the
            row's largest element is exact in E4M3, and so is every row of equal magnitudes, as a mean loss has them. Reference, Hopper.
        do_block: blocks of dO8: ``(32, 32)``, ``(32, 0)`` or ``(1, 0)``, one exponent a row (0: the whole head dimension).
        ds_block: (queries, keys) under one scale of dS; multiples of 32, or ``(0, 0)`` for one scale a sequence and head; ``None`` is the
            kernel's own tile, which for the reference is ``(64, key_tile)``.
        dq_dtype: ``torch.float32``, or ``torch.float16`` to accumulate dQ in FP16, one partial a key tile.
        dq_scale: power of two on FP16 partials: ``"bound"`` takes the largest that cannot overflow, per sequence and head (per row if
            causal; Hopper, shared queries: per row and group of up to eight sequences); an int is a fixed log2.
        grad_format: ``"mxfp8"`` or ``"bf16"`` for dK and dV.
        grad_block: blocks of MXFP8 dK and dV.
        two_level: kernels add each key tile's partial O in FP32 instead of accumulating inside the tensor core. The reference always has
            FP32 sums.
        softmax_stabilizer: where a row's maximum is attained more than once, raise the reference maximum by 1/2 (log2 units), so that P is
            not exactly 1 at several places at once (Qiu and Yao 2025 show how that biases low-precision rounding).
        save_out_dtype: dtype in which the centred output is kept for the backward.
        round_p, round_do, round_ds: False leaves that tensor in FP32. For tests and ablations, reference only.
    """

    center_p: bool = True
    center_p_backward: bool = True
    p_scale: str = "constant"
    operand_scales: str = "auto"
    p_scale_log2: int = 7
    rescale_threshold: float = 1.75
    key_tile: int = 128
    p_scale_backward_log2: int = 8
    fold_l_into_do: bool = True
    delta_from: str = "quantized"
    align_do: bool = False
    do_block: tuple[int, int] = (32, 32)
    ds_block: tuple[int, int] | None = (32, 32)
    dq_dtype: torch.dtype = torch.float32
    dq_scale: str | int = "bound"
    grad_format: str = "mxfp8"
    grad_block: tuple[int, int] = (32, 32)
    two_level: bool = True
    softmax_stabilizer: bool = False
    save_out_dtype: torch.dtype = torch.bfloat16
    round_p: bool = True
    round_do: bool = True
    round_ds: bool = True
    key: str = field(init=False, compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        self._check()
        values = asdict(self)
        values.pop("key")
        for name in ("dq_dtype", "save_out_dtype"):
            values[name] = str(values[name]).removeprefix("torch.")
        object.__setattr__(self, "key", json.dumps(values, sort_keys=True))

    def _check(self) -> None:
        if self.rescale_threshold < 0:
            raise ValueError(f"rescale_threshold is {self.rescale_threshold}; it must be at least 0 (0 is the plain running maximum)")
        if self.p_scale_log2 + self.rescale_threshold > P_LIMIT_LOG2:
            raise ValueError(
                f"p_scale_log2 + rescale_threshold is {self.p_scale_log2} + {self.rescale_threshold} = "
                f"{self.p_scale_log2 + self.rescale_threshold:g}; it must be at most log2(448) = {P_LIMIT_LOG2:.3f}, or P saturates in E4M3"
            )
        _one_of("p_scale", self.p_scale, P_SCALES)
        _one_of("operand_scales", self.operand_scales, ("auto", "outside"))
        if self.p_scale != "constant" and self.center_p:
            raise ValueError(
                f"p_scale is {self.p_scale!r} with center_p=True; scales made from data are for uncentred P: set center_p=False"
            )
        if self.p_scale != "constant" and self.operand_scales == "outside":
            raise ValueError(f'p_scale is {self.p_scale!r} with operand_scales="outside"; plain products take a constant scale of P')
        if self.p_scale_backward_log2 > P_LIMIT_LOG2:
            raise ValueError(f"p_scale_backward_log2 is {self.p_scale_backward_log2}; it must be at most log2(448) = {P_LIMIT_LOG2:.3f}")
        if self.key_tile < 32 or self.key_tile % 32:
            raise ValueError(f"key_tile is {self.key_tile}; it must be a positive multiple of 32")
        if self.align_do and not self.fold_l_into_do:
            raise ValueError(
                "align_do needs fold_l_into_do (its factor rides in the row sum that dO is divided by); set one of them otherwise"
            )
        if self.center_p and self.center_p_backward and not self.fold_l_into_do:
            raise ValueError(
                "center_p_backward needs fold_l_into_do (its constant l/K is that of unnormalised P); set one of them otherwise"
            )
        _one_of("delta_from", self.delta_from, ("quantized", "original"))
        _one_of("grad_format", self.grad_format, ("mxfp8", "bf16"))
        _one_of("dq_dtype", self.dq_dtype, (torch.float32, torch.float16))
        _one_of("save_out_dtype", self.save_out_dtype, (torch.float32, torch.bfloat16))
        _one_of("do_block", tuple(self.do_block), ((32, 32), (32, 0), (1, 0)))
        if tuple(self.grad_block) != (32, 32) and (self.grad_block[0] not in (32, 128) or self.grad_block[1] not in HEAD_DIMS):
            raise ValueError(f"grad_block is {self.grad_block}; allowed are (32, 32), (32, head_dim) and (128, head_dim)")
        if not (self.dq_scale == "bound" or (isinstance(self.dq_scale, int) and not isinstance(self.dq_scale, bool))):
            raise ValueError(f'dq_scale is {self.dq_scale!r}; it must be "bound" or an int, the log2 of a fixed factor')
        if self.ds_block is not None and tuple(self.ds_block) != (0, 0) and any(n <= 0 or n % 32 for n in self.ds_block):
            raise ValueError(
                f"ds_block is {self.ds_block}; allowed are positive multiples of 32, (0, 0) for one scale a sequence, and None"
            )

    @classmethod
    def post(cls, **changes: Any) -> "AttentionConfig":
        """The conventional recipe: plain running maximum, no centring, normalised P on 2^8 in the backward, D from the original dO."""
        choices: dict[str, Any] = dict(
            center_p=False,
            center_p_backward=False,
            p_scale_log2=8,
            rescale_threshold=0.0,
            fold_l_into_do=False,
            delta_from="original",
            dq_scale=9,
        )
        return cls(**{**choices, **changes})

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "AttentionConfig":
        """``"default"`` or ``"post"``, with some fields changed."""
        _one_of("preset", name, ("default", "post"))
        return cls.post(**changes) if name == "post" else cls(**changes)

    @classmethod
    def from_key(cls, key: str) -> "AttentionConfig":
        """Inverse of ``key``."""
        values = json.loads(key)
        for name in ("dq_dtype", "save_out_dtype"):
            values[name] = getattr(torch, values[name])
        for name in ("do_block", "ds_block", "grad_block"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)

    def with_(self, **changes: Any) -> "AttentionConfig":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(repr(a) for a in allowed)}")


DEFAULT = AttentionConfig()
"""The design's choices for MXFP8 operands."""

DROP_IN = AttentionConfig(grad_format="bf16", dq_dtype=torch.float16)
"""The same for ``flash_attn_func``: gradients leave as ordinary tensors, so dK and dV are never rounded to FP8, and dQ is summed in FP16,
whose rounding is far under that of the E4M3 operands (dQ's error against FP64 is the same to 0.003 dB)."""

DROP_IN_WITH_LSE = DROP_IN.with_(dq_dtype=torch.float32)
"""For calls that return the LSE: it may have a gradient, which the bound on FP16 sums does not know."""
