"""``PMA``: pooling by multi-head attention. Learned seed queries read a user's jagged history into a fixed number of vectors.

    q   = RMSNorm(seeds) Wq^T          [Q, dim], the same for every sample
    xn  = RMSNorm(events)              [T, dim]
    k   = xn Wk^T;   v = xn            (or xn Wv^T with value_proj=True)
    out = softmax(q k^T / sqrt(D)) v   per head and sample: [B, Q, dim]

The precision is the module's own: no ambient FP8 context, no cached FP8 copy of a weight, nothing in the state dict but plain
float parameters. A checkpoint moves between precisions as it is.
"""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from lp_fa4.mx import check_offsets
from modules import functional
from modules.numerics import Numerics

PRECISIONS = ("mxfp8", "bf16")


class PMA(nn.Module):
    """Pool jagged events by attention with learned seeds.

    Args:
        dim: width of events, seeds and output, ``num_heads * D``.
        num_heads: heads; the head dimension ``D = dim / num_heads`` must be a multiple of 32 up to 256.
        num_seeds: learned queries ``Q`` per sample.
        precision: ``"mxfp8"``, or ``"bf16"``: flash-attn-4 on a GPU that it serves, SDPA elsewhere.
        value_proj: add ``Wv``; by default the values are the normed events.
        backend: ``"auto"``, or the name of one: see ``lp_fa4.is_supported``. For ``precision="bf16"``: ``"auto"``, ``"fa4"``, ``"sdpa"``.
        numerics: ``"default"``, ``"post"`` or a :class:`modules.Numerics`: what is rounded where (``mxfp8`` only).
        eps: of both RMSNorms.
        device, dtype: of the parameters; ``device="meta"`` then ``to_empty`` and ``reset_parameters`` work.

    ``torch.compile(fullgraph=True, dynamic=True)`` serves every batch with one graph (and one each for 0 and 1 events, as PyTorch
    specialises those sizes); ``torch.export`` with dynamic events and samples, from two samples up.

    Parameters: ``seed_embs [Q, dim]``, ``query_norm.weight``, ``kv_norm.weight`` ``[dim]``, ``query_proj.weight``,
    ``key_proj.weight`` (``value_proj.weight``) ``[dim, dim]``.

    Raises: ``ValueError`` or ``TypeError`` naming argument, value and what is allowed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        *,
        precision: str = "mxfp8",
        value_proj: bool = False,
        backend: str = "auto",
        numerics: str | Numerics = "default",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("num_heads", num_heads), ("num_seeds", num_seeds)):
            if not isinstance(value, Integral):
                raise TypeError(f"{name} is {value!r}; it must be an integer")
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= eps < float("inf"):
            raise ValueError(f"eps is {eps}; it must be at least 0 and finite")
        if dim % num_heads:
            raise ValueError(f"dim is {dim} and num_heads {num_heads}; num_heads must divide dim")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; allowed are {', '.join(map(repr, PRECISIONS))}")
        self.dim, self.num_heads, self.num_seeds, self.eps = dim, num_heads, num_seeds, eps
        self.head_dim = dim // num_heads
        self.precision, self.backend = precision, backend
        self.numerics = Numerics.preset(numerics)
        functional.check_backend(precision, backend, self.head_dim, self.numerics)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.seed_embs = nn.Parameter(torch.empty(num_seeds, dim, **factory))
        self.query_norm = nn.RMSNorm(dim, eps=eps, **factory)
        self.kv_norm = nn.RMSNorm(dim, eps=eps, **factory)
        self.query_proj = nn.Linear(dim, dim, bias=False, **factory)
        self.key_proj = nn.Linear(dim, dim, bias=False, **factory)
        self.value_proj = nn.Linear(dim, dim, bias=False, **factory) if value_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform seeds (as in the Set Transformer), norms at 1, projections as ``nn.Linear`` starts."""
        nn.init.xavier_uniform_(self.seed_embs)
        for module in (self.query_norm, self.kv_norm, self.query_proj, self.key_proj, self.value_proj):
            if module is not None:
                module.reset_parameters()

    def extra_repr(self) -> str:
        sizes = f"dim={self.dim}, num_heads={self.num_heads}, num_seeds={self.num_seeds}"
        text = f"{sizes}, precision={self.precision!r}, backend={self.backend!r}"
        presets = {Numerics(): "", Numerics.post(): ", numerics='post'"}
        return text + presets.get(self.numerics, f", numerics={self.numerics}")

    def forward(self, values: Any, offsets: Tensor | None = None, *, validate: bool = False) -> Tensor:
        """Pool each sequence.

        Args:
            values: ``[T, dim]`` events of all samples, float32, bfloat16 or float16; rows past ``offsets[-1]`` are never read and get
                gradient 0. Or anything with ``values()`` and ``offsets()``, then without ``offsets``: a TorchRec ``JaggedTensor``, a
                PyTorch nested tensor of layout ``torch.jagged`` with shape ``[B, any, dim]`` and no holes.
            offsets: int32 or int64 ``[B + 1]``, first 0, non-decreasing. A sample without events pools to zeros.
            validate: also check the offsets' values, which waits for the device (on a CPU they always are).

        Returns: ``[B, num_seeds, dim]`` in the dtype of ``values``, or of autocast where that is on.

        Raises: ``TypeError``/``ValueError`` naming argument, value and what is allowed.
        """
        events, bounds = self._unpack(values, offsets)
        check_offsets(bounds, events.shape[0], "offsets", events.device, validate=validate)
        kind = events.device.type
        if torch.is_autocast_enabled(kind):
            out_dtype = torch.get_autocast_dtype(kind)
            # The precision is this module's state: autocast chooses the output's dtype and nothing else.
            with torch.autocast(kind, enabled=False):
                return self._pool(events, bounds, out_dtype)
        return self._pool(events, bounds, events.dtype)

    def _pool(self, values: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
        numerics = self.numerics if self.precision == "mxfp8" else None
        q = functional.query_heads(self.seed_embs, self.query_norm.weight, self.query_proj.weight, self.num_heads, self.eps, numerics)
        w_v = None if self.value_proj is None else self.value_proj.weight
        if numerics is None:
            return functional.pma_bf16(values, offsets, q, self.kv_norm.weight, self.key_proj.weight, w_v, self.eps, self.backend).to(
                out_dtype
            )
        return functional.pma_mxfp8(
            values, offsets, q, self.kv_norm.weight, self.key_proj.weight, w_v, self.eps, numerics, self.backend, out_dtype
        )

    def _unpack(self, values: Any, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        nested = isinstance(values, Tensor) and values.is_nested
        if nested:
            if values.layout != torch.jagged or values.dim() != 3 or values._ragged_idx != 1 or values.lengths() is not None:
                raise ValueError(f"values is {values!r}; a nested tensor must be torch.jagged, [batch, any, {self.dim}] and without holes")
        elif not isinstance(values, Tensor) and not (
            callable(getattr(values, "values", None)) and callable(getattr(values, "offsets", None))
        ):
            raise TypeError(f"values is {type(values).__name__}; it must be a tensor, or have values() and offsets() like a JaggedTensor")
        if nested or not isinstance(values, Tensor):
            if offsets is not None:
                raise ValueError(f"offsets is given beside a {type(values).__name__}, which has its own; give one of them")
            values, offsets = values.values(), values.offsets()
        if offsets is None:
            raise ValueError("offsets is None; a values tensor needs offsets [batch + 1]")
        if values.dim() != 2 or values.shape[1] != self.dim:
            raise ValueError(f"values has shape {list(values.shape)}; it must be [tokens, {self.dim}]")
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"values has dtype {values.dtype}; allowed are torch.float32, torch.bfloat16, torch.float16")
        if values.device != self.seed_embs.device:
            raise ValueError(f"values is on {values.device} but the module is on {self.seed_embs.device}; they must agree")
        if isinstance(offsets, Tensor) and offsets.shape == (0,):  # a batch of no samples, as some jagged containers give it
            offsets = offsets.new_zeros(1)
        return values, offsets
