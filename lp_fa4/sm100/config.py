"""What a forward kernel is compiled for: its variant (:class:`ForwardSpec`) and its schedule (:class:`ForwardTuning`)."""

from dataclasses import dataclass, replace

from lp_fa4.config import P_SCALES

HEAD_DIMS = (64, 128)
ARCHS = ("sm_100a", "sm_103a")
KEY_TILE = 128
QUERY_TILE = 128
"""Rows of one Q tile; a work item has two of them."""


@dataclass(frozen=True)
class ForwardSpec:
    """One variant of the forward. Everything here is known without looking at data.

    Attributes:
        head_dim: 64 or 128. group: query heads per key/value head.
        shared_q: every sequence has the same queries. causal: aligned at the ends. centred: P is centred (``AttentionConfig.center_p``).
        v_mean: the output gets a mean of V added back. save: dtype name of the separate centred output, "" where it is the output itself.
        block_scaled: scales inside the MMA (any block shape); False: one exponent per 32 tokens and head, applied outside it, and plain
            f8f6f4 MMA.
        fold_v: without block_scaled: V's exponents vary along the keys and are folded into P; False: one exponent a head, applied at the
            end.
        p_scale: how P's scale is chosen, one of ``P_SCALES``. p_scale_log2, threshold: of ``AttentionConfig``.
    """

    head_dim: int
    group: int = 1
    shared_q: bool = False
    causal: bool = False
    centred: bool = True
    v_mean: bool = False
    save: str = ""
    block_scaled: bool = True
    fold_v: bool = False
    p_scale: str = "constant"
    p_scale_log2: int = 7
    threshold: float = 1.75

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim}; sm100 kernels serve {', '.join(map(str, HEAD_DIMS))}")
        if self.p_scale not in P_SCALES:
            raise ValueError(f"p_scale is {self.p_scale!r}; allowed are {', '.join(map(repr, P_SCALES))}")
        if self.p_scale != "constant" and self.centred:
            raise ValueError(f"p_scale is {self.p_scale!r} but P is centred; data-dependent scales of P need center_p=False")
        if self.p_scale != "constant" and not self.block_scaled:
            raise ValueError(f"p_scale is {self.p_scale!r} but block_scaled is False; without block-scaled MMA P's scale is constant")
        if self.fold_v and (self.block_scaled or self.centred):
            raise ValueError(
                f"fold_v is True with block_scaled {self.block_scaled} and centred {self.centred}; V's exponents are folded into P only "
                "without block-scaled MMA and for uncentred P (the constant would leave E4M3's range where an exponent is large)"
            )
        if self.save not in ("", "bfloat16", "float32"):
            raise ValueError(f'save is {self.save!r}; allowed are "", "bfloat16" and "float32"')

    @property
    def p_shift(self) -> int:
        """Power of two that exp2's argument carries: P leaves exp2 already scaled."""
        return self.p_scale_log2 if self.p_scale == "constant" else 0


@dataclass(frozen=True)
class ForwardTuning:
    """Schedule of one variant on one target.

    Attributes:
        stages: key tiles (and value tiles) in flight, a power of two.
        softmax_registers, correction_registers, other_registers: per thread after the split; 2 softmax warpgroups, one of each other.
        exp2_on_fma: of every 32 exponentials, how many run as a polynomial on the FMA pipe instead of MUFU; a multiple of 2.
        drawn: CTAs draw their items one by one (Cluster Launch Control); False: each walks a fixed stride of the list.
    """

    stages: int = 4
    softmax_registers: int = 192
    correction_registers: int = 64
    other_registers: int = 64
    exp2_on_fma: int = 0
    drawn: bool = False

    def __post_init__(self) -> None:
        if 2 * self.softmax_registers + self.correction_registers + self.other_registers > 512:
            raise ValueError(
                f"registers are 2 x {self.softmax_registers} + {self.correction_registers} + {self.other_registers}; "
                "at most 512 fit four warpgroups"
            )
        if self.stages < 1 or self.stages & (self.stages - 1):
            raise ValueError(f"stages is {self.stages}; it must be a power of two")
        if not 0 <= self.exp2_on_fma <= 32 or self.exp2_on_fma % 2:
            raise ValueError(f"exp2_on_fma is {self.exp2_on_fma}; it must be an even number from 0 to 32")


# exp2_on_fma is predicted, not measured (README.md, "Roofline"): at 16 exponentials a clock an SM of sm_100 needs 1,024 clocks for a
# 128 x 128 tile whose products take 512; with 10 of 32 on the FMA pipe MUFU and issue slots both end near 720. sm_103's MUFU is twice as
# fast. Registers are the splits at which ptxas spills nothing in any variant (tests/sm100/compiled.py).
_TUNING = {
    ("sm_100a", 128): ForwardTuning(exp2_on_fma=8),
    ("sm_100a", 64): ForwardTuning(exp2_on_fma=8, correction_registers=72, other_registers=56),
    ("sm_103a", 128): ForwardTuning(exp2_on_fma=0),
    ("sm_103a", 64): ForwardTuning(exp2_on_fma=0, correction_registers=72, other_registers=56),
}


def forward_tuning(arch: str, spec: ForwardSpec, drawn: bool = False) -> ForwardTuning:
    """Tuning row of a variant on ``"sm_100a"`` or ``"sm_103a"``; ``drawn``: see :class:`ForwardTuning`."""
    if arch not in ARCHS:
        raise ValueError(f"arch is {arch!r}; allowed are {', '.join(map(repr, ARCHS))}")
    return replace(_TUNING[arch, spec.head_dim], drawn=drawn)
