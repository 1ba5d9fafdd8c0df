"""What a PMA module rounds, and where: one frozen object, and its two presets.

``Numerics()`` is the project's own design; ``Numerics.post()`` is the recipe it is compared with. The rounding points inside
the attention core are :class:`lp_fa4.config.AttentionConfig`, carried in ``attention``.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lp_fa4.config import AttentionConfig
from lp_fa4.kernel_store import source_digest

_PROJECTIONS = ("auto", "bf16", "e4m3x2", "e4m3")
_SCALES = ("auto", "square", "token", "static")
_SOURCES = source_digest("fused_ops", "lp_fa4", "modules")
"""Stands in every ``key``, so in every trace: PyTorch keeps compiled graphs on disk by their text, and one traced with another version of
the operators has other sizes of workspaces in it."""


@dataclass(frozen=True)
class Numerics:
    """Rounding points of the module around the attention core. Hashable; ``key`` is its text form for operator arguments.

    Attributes:
        attention: choices of the core.
        align: ``attention.align_do``, which makes rows of dO of equal magnitudes exact; None: where the backend has it (Hopper, reference).
        center: take a mean per sequence away from the normed events before they are rounded (``xc``). The softmax does not see
            the shift of K, the mean of V is added to the output, and what is left rounds finer. Needs ``attention.center_p``'s sums,
            which it provides.
        key_projection: ``"bf16"``: 16-bit rows times BF16 weight; ``"e4m3x2"``: E4M3 rows times the weight as E4M3 hi + lo;
            ``"e4m3"``: E4M3 times E4M3. ``"auto"``: ``"bf16"`` on the reference, and on Hopper where one kernel norms and projects
            (events of up to 384 channels, no value projection); elsewhere on kernels ``"e4m3x2"``. Neither writes a BF16
            row. The value projection, where there is one, follows it.
        query_projection: ``"fp32"`` or ``"e4m3"``: the operands of ``Wq`` in the forward; its gradients are FP32 products. (There are Q
            rows, once a step, whatever the batch.)
        hadamard: rotate each head of Wq and Wk by a Hadamard matrix, whose order, the head dimension, must be a power of two. None: where
            it is one. Folded into the weights it costs next to nothing; it changes nothing on independent channels and gives back 5 to 8 dB
            where four channels of a head are four times louder in queries and keys alike (``configs/numerics_outliers.yaml``).
        coordinates: ``"balanced"``: choose the coordinates of each head so that E4M3 loses least of a score
            (``fused_ops.balanced_coordinates``): 0.3 to 0.6 dB of the output and of every gradient on independent channels, 2 to 7 dB where
            the spectra of queries and keys fall in directions of their own. One small kernel and two products of weights a step.
            ``"plain"``: those of the projections.
        q_smoothing: round ``q - mean(q)`` and add the mean's scores in FP32: helps where seeds are alike.
        scales: blocks of q, k and xn: ``"square"`` (32, 32); ``"token"`` (32, D); ``"static"`` (0, D), exponents of xn and k from the
            bounds that the weights give, no amax. ``"auto"``: what the backend multiplies fastest, static on Hopper, which has no
            block-scaled MMA, square elsewhere. The choice costs under 0.02 dB either way.
        dq_dtype: of the sums behind the queries' gradient: ``torch.float16`` or ``torch.float32``, which replaces ``attention.dq_dtype``.
            None: FP16 where that is faster and bounded (Hopper, with ``attention.dq_scale="bound"``), unless gradients must repeat bit for
            bit; ``attention``'s own elsewhere. Between groups of samples the sums are FP32 (``MEASURED.md``).
    """

    attention: AttentionConfig = field(default_factory=AttentionConfig)
    center: bool = True
    key_projection: str = "auto"
    query_projection: str = "fp32"
    hadamard: bool | None = None
    align: bool | None = None
    coordinates: str = "balanced"
    q_smoothing: bool = False
    scales: str = "auto"
    dq_dtype: torch.dtype | None = None
    key: str = field(init=False, compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        for name, allowed in (
            ("key_projection", _PROJECTIONS),
            ("query_projection", ("fp32", "e4m3")),
            ("coordinates", ("balanced", "plain")),
            ("scales", _SCALES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(map(repr, allowed))}")
        if not isinstance(self.attention, AttentionConfig):
            raise TypeError(f"attention is {type(self.attention).__name__}; it must be an AttentionConfig")
        if self.dq_dtype not in (None, torch.float16, torch.float32):
            raise ValueError(f"dq_dtype is {self.dq_dtype!r}; allowed are torch.float16, torch.float32 and None")
        values = {name: getattr(self, name) for name in _PLAIN}
        values["sources"] = _SOURCES
        values["dq_dtype"] = self.dq_dtype and str(self.dq_dtype).removeprefix("torch.")
        object.__setattr__(self, "key", json.dumps({**values, "attention": self.attention.key}, sort_keys=True))

    @classmethod
    def post(cls, **changes: Any) -> "Numerics":
        """The conventional recipe: every operand of every product is E4M3 with one rounding, nothing is centred."""
        choices: dict[str, Any] = dict(
            attention=AttentionConfig.post(),
            center=False,
            key_projection="e4m3",
            query_projection="e4m3",
            hadamard=False,
            align=False,
            coordinates="plain",
            dq_dtype=torch.float32,
        )
        return cls(**{**choices, **changes})

    @classmethod
    def preset(cls, name: "str | Numerics", **changes: Any) -> "Numerics":
        """``"default"``, ``"post"``, or an object as it is; fields of it or of ``attention`` changed by name."""
        if isinstance(name, Numerics):
            base = name
        elif name in ("default", "post"):
            base = cls.post() if name == "post" else cls()
        else:
            raise ValueError(f'numerics is {name!r}; allowed are "default", "post" and a Numerics object')
        own = {k: v for k, v in changes.items() if k in _PLAIN or k == "attention"}
        inner = {k: v for k, v in changes.items() if k not in own}
        base = replace(base, **own)
        return replace(base, attention=base.attention.with_(**inner)) if inner else base

    @classmethod
    def from_key(cls, key: str) -> "Numerics":
        """Inverse of ``key``, of any version's."""
        values = json.loads(key)
        values.pop("sources", None)
        dq_dtype = values["dq_dtype"] and getattr(torch, values["dq_dtype"])
        return cls(**{**values, "attention": AttentionConfig.from_key(values["attention"]), "dq_dtype": dq_dtype})

    def for_backend(self, name: str, deterministic: bool = False) -> "Numerics":
        """The same with ``scales``, ``key_projection``, ``align`` and ``dq_dtype`` settled for a backend."""
        changes: dict[str, Any] = {}
        align = self.align
        if align is None:
            align = name != "sm100" and self.attention.fold_l_into_do
            changes["align"] = align
        dq_dtype = self.dq_dtype
        if dq_dtype is None:
            half = name == "sm90" and self.attention.dq_scale == "bound" and not deterministic
            dq_dtype = torch.float16 if half else self.attention.dq_dtype
            changes["dq_dtype"] = dq_dtype
        if (align, dq_dtype) != (self.attention.align_do, self.attention.dq_dtype):
            changes["attention"] = self.attention.with_(align_do=align, dq_dtype=dq_dtype)
        if self.scales == "auto":
            changes["scales"] = "static" if name == "sm90" else "square"
        if self.key_projection == "auto":
            changes["key_projection"] = "bf16" if name == "reference" else "e4m3x2"
        return replace(self, **changes) if changes else self

    def rotates(self, head_dim: int) -> bool:
        """Whether the heads are rotated."""
        return self.hadamard if self.hadamard is not None else head_dim & (head_dim - 1) == 0

    def block(self, head_dim: int) -> tuple[int, int]:
        """Blocks of q, k, xn and v; ``scales`` must be settled."""
        return {"square": (32, 32), "token": (32, head_dim), "static": (0, head_dim)}[self.scales]


_PLAIN = ("align", "center", "key_projection", "query_projection", "hadamard", "coordinates", "q_smoothing", "scales", "dq_dtype")
