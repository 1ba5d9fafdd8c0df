"""What the properties are tried on: each operation as a function from a list of samples to a list of their results.

A subject is ``fn(samples, tail, choices) -> (per sample results, shared results)``, each a dict of tensors. It joins the samples into one
jagged batch with ``tail`` NaN rows behind it, runs the public function, and takes the results apart. Data come from a sample's own seed, so
that a sample is the same wherever it stands.

A place says where it runs: on the reference, on a GPU's kernels, or on kernels in the emulator (``tests.properties.emulated``).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from fused_ops import gemm_norm_backward, gemm_quantize, rmsnorm_center_quantize, scatter_scales
from fused_ops.operands import split_e4m3
from lp_fa4 import MXTensor, flash_attn_varlen_func, mx_attention, mx_attention_backward, quantize_mx
from modules import PMA, Numerics
from tests.conftest import offsets_of

Results = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


@contextmanager
def _algorithms(deterministic: bool) -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@dataclass(frozen=True)
class Place:
    """Where subjects run, and what is compiled once there: heads, head dimension, dtypes."""

    name: str = "reference"
    backend: str = "reference"
    device: str = "cpu"
    heads: int = 2
    dim: int = 32
    queries: int = 5
    """That all samples share."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    stretch: bool = False
    """Some samples are eight times as long, and have forty times the queries, so that kernels walk several tiles."""
    around: Callable[[], AbstractContextManager] = nullcontext
    narrow: bool = False
    """Compile one kernel of each kind: neither causal nor with atomics."""

    @property
    def columns(self) -> int:
        return self.heads * self.dim

    @property
    def kernels(self) -> bool:
        return self.backend != "reference"

    def sized(self, sample: "Sample") -> "Sample":
        """The sample as it is here."""
        if self.stretch and sample.seed % 3 == 0:
            return replace(sample, length=8 * sample.length + sample.seed % 8 if sample.length else 0)
        if self.stretch and sample.seed % 3 == 1:
            return replace(sample, queries=40 * sample.queries)
        return sample


REFERENCE = Place()
HOPPER = Place("sm90", "sm90", "cuda", dim=64, dtypes=(torch.bfloat16, torch.float32), stretch=True)


@dataclass(frozen=True)
class Sample:
    """``length`` rows of ``seed``'s numbers, of size ``2**exponent``; ``change`` is ``""``, ``"nan"``, ``"inf"``, ``"zero"``,
    ``"constant"`` or ``"large"`` (times 1e4)."""

    length: int
    queries: int
    seed: int
    exponent: int = 0
    change: str = ""

    def rows(self, count: int, *shape: int, salt: int = 0, whole: bool = False) -> Tensor:
        """``[count, *shape]`` FP32; ``whole``: small integers, whose products add up exactly in any order."""
        g = torch.Generator().manual_seed(1000 * self.seed + salt)
        x = torch.randint(-4, 5, (count, *shape), generator=g).float() if whole else torch.randn(count, *shape, generator=g)
        x = x * 2.0**self.exponent
        if self.change == "zero":
            x.zero_()
        elif self.change == "constant":
            x = x[:1].expand(count, *shape).clone()
        elif self.change == "large":
            x *= 1e4 if not whole else 2.0**13
        elif self.change and count:
            x.view(count, -1)[count // 2, 5] = float(self.change)
        return x


MANY = 140


@dataclass(frozen=True)
class Choices:
    """What a batch shares."""

    dtype: torch.dtype = torch.float32
    causal: bool = False
    wide_offsets: bool = False
    strided: bool = False
    deterministic: bool = True
    many: int = MANY
    """Queries that all samples share, where an operation takes many: one to four tiles of 64."""
    place: Place = REFERENCE

    def offsets(self, lengths) -> tuple[Tensor, Tensor]:
        """On the device, and on the host, where results are taken apart."""
        host = offsets_of(lengths, torch.int64 if self.wide_offsets else torch.int32)
        return host.to(self.place.device), host


def join(pieces: list[Tensor], tail: int, choices: Choices, *shape: int) -> Tensor:
    """One tensor of all pieces and a NaN tail; ``strided``: a view with gaps between rows and columns."""
    x = torch.cat([*pieces, torch.full((tail, *shape), torch.nan)]).to(choices.place.device, choices.dtype)
    if not choices.strided:
        return x
    room = torch.full((x.shape[0], *x.shape[1:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    room[..., ::2] = x
    return room[..., ::2]


def split(x: Tensor, bounds: Tensor) -> list[Tensor]:
    """Rows of each sample, on the host: one copy waits for the device once."""
    x = x.cpu()
    return [x[a:b] for a, b in pairwise(bounds.tolist())]


def split_mx(x: MXTensor, bounds: Tensor, tail: int) -> list[dict[str, Tensor]]:
    """Codes and scale bytes of each sequence. Rows that no sequence owns must be 0."""
    out, codes, scales = [], x.codes.cpu(), x.scale_bytes.cpu()
    for b, (start, stop) in enumerate(pairwise(bounds.tolist())):
        first = start // 32 + b
        out.append({"codes": codes[start:stop], "scale": scales[first : first + -(-(stop - start) // 32)]})
    assert codes[x.shape[0] - tail :].count_nonzero() == 0
    return out


def zero_tail(x: Tensor, bounds: Tensor) -> Tensor:
    """``x`` on the host."""
    x = x.cpu()
    assert (x[int(bounds[-1]) :] == 0).all(), "what lies past the last offset must be 0"
    return x


def quantized(samples: list[Sample], tail: int, choices: Choices) -> Results:
    (offsets, bounds), columns = choices.offsets([s.length for s in samples]), choices.place.columns
    x = join([s.rows(s.length, columns) for s in samples], tail, choices, columns)
    return split_mx(quantize_mx(x, (32, 32), offsets), bounds, tail), {}


def normed(samples: list[Sample], tail: int, choices: Choices, static: bool = False) -> Results:
    """``static``: exponents from the weights' bound and, on kernels, the copy with tokens innermost."""
    place = choices.place
    (offsets, bounds), columns = choices.offsets([s.length for s in samples]), place.columns
    x = join([s.rows(s.length, columns) for s in samples], tail, choices, columns)
    options = {"block": (0, place.dim), "copy_heads": place.heads if place.kernels else 0} if static else {}
    weight = torch.linspace(0.5, 2, columns, device=place.device)
    out = rmsnorm_center_quantize(x, weight, 1e-6, offsets, backend=place.backend, **options)
    rstd = zero_tail(out.rstd, bounds)
    parts: list[dict[str, Tensor]] = [{} for _ in samples]
    if static:
        for part, codes in zip(parts, split(out.xn.codes, bounds), strict=True):
            part["codes"] = codes
    else:
        parts = split_mx(out.xn, bounds, tail)
    mean, total = out.mean.cpu(), out.total.cpu()
    copy = out.xn.transposed.cpu() if static and place.kernels else None  # type: ignore[attr-defined]
    for b, (part, own) in enumerate(zip(parts, split(rstd, bounds), strict=True)):
        part.update(rstd=own, mean=mean[b], total=total[b])
        if copy is not None:
            first = 32 * (int(bounds[b]) // 32 + b)
            part["copy"] = copy[..., first : first + -(-own.shape[0] // 32) * 32]
    return parts, {}


def scattered(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """Swizzled scales of both axes: 128-row tiles belong to one sequence."""
    (offsets, bounds), columns = choices.offsets([s.length for s in samples]), choices.place.columns
    x = quantize_mx(join([s.rows(s.length, columns) for s in samples], tail, choices, columns), (32, 32), offsets)
    made = [scatter_scales(x, axis, backend=choices.place.backend).cpu() for axis in (0, 1)]
    parts = []
    for b, (start, stop) in enumerate(pairwise(bounds.tolist())):
        tiles = slice(start // 128 + b, start // 128 + b + -(-(stop - start) // 128))
        parts.append({"axis 0": made[0][:, tiles], "axis 1": made[1][tiles]})
    return parts, {}


def _weight(rows: int, columns: int, place: Place) -> Tensor:
    return torch.randint(-4, 5, (rows, columns), generator=torch.Generator().manual_seed(3)).float().to(place.device)


def product(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """On small integers: sums are exact, so BLAS may add them in whatever order the batch's size suggests. Kernels take BF16 operands, or,
    where the batch is FP32, MXFP8 rows and a pair of MXFP8 weights."""
    place, columns = choices.place, choices.place.columns
    offsets, bounds = choices.offsets([s.length for s in samples])
    x = join([s.rows(s.length, columns, whole=True) for s in samples], tail, choices, columns)
    weight = _weight(96, columns, place)
    if not place.kernels or choices.dtype == torch.bfloat16:
        w = weight.to(torch.bfloat16) if place.kernels else weight
        return split_mx(gemm_quantize(x, w, offsets=offsets, backend=place.backend), bounds, tail), {}
    made = gemm_quantize(quantize_mx(x, offsets=offsets), split_e4m3(weight, (32, 32)), backend=place.backend)
    return split_mx(made, bounds, tail), {}


def norm_backward(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """On small integers, as ``product``."""
    place, columns = choices.place, choices.place.columns
    rows = columns if place.kernels else 96
    offsets, bounds = choices.offsets([s.length for s in samples])
    plain = replace(choices, dtype=torch.float32, strided=False)
    narrow = replace(choices, dtype=torch.bfloat16) if place.kernels else choices
    dk, dv, xn = (
        quantize_mx(join([s.rows(s.length, n, salt=i, whole=True) for s in samples], tail, plain, n), offsets=offsets)
        for i, n in enumerate((rows, columns, columns))
    )
    x = join([s.rows(s.length, columns, salt=9) for s in samples], tail, narrow, columns)
    rstd = join([torch.full((s.length,), 2.0**-s.exponent) for s in samples], tail, plain)
    weight = _weight(rows, columns, place)
    weight = weight.to(torch.bfloat16) if place.kernels else weight
    gain = torch.linspace(0.5, 2, columns, device=place.device)
    dx, dgain, dw = gemm_norm_backward(dk, dv, weight, x, gain, rstd, xn, backend=place.backend)
    shared = {"dnorm_weight": dgain.cpu(), "dw_k": dw.cpu()} if place.kernels else {}
    return [{"dx": part} for part in split(zero_tail(dx, bounds), bounds)], shared


def drop_in(samples: list[Sample], tail: int, choices: Choices) -> Results:
    heads, dim = choices.place.heads, choices.place.dim
    (offsets_q, rows), (offsets_k, keys) = choices.offsets([s.queries for s in samples]), choices.offsets([s.length for s in samples])
    q, dout = (join([s.rows(s.queries, 2 * heads, dim, salt=i) for s in samples], tail, choices, 2 * heads, dim) for i in (0, 1))
    k, v = (join([s.rows(s.length, heads, dim, salt=i) for s in samples], tail, choices, heads, dim) for i in (2, 3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(
        *leaves,
        offsets_q,
        offsets_k,
        240,
        1040,
        causal=choices.causal,
        deterministic=choices.deterministic,
        return_attn_probs=True,
        backend=choices.place.backend,
    )
    grads = torch.autograd.grad(out, leaves, dout)
    columns = [split(zero_tail(x, at), at) for x, at in zip((out.detach(), *grads), (rows, rows, keys, keys), strict=True)]
    columns.insert(1, split(lse.detach().t(), rows))
    return [dict(zip(("out", "lse", "dq", "dk", "dv"), parts, strict=True)) for parts in zip(*columns, strict=True)], {}


def attention(samples: list[Sample], tail: int, choices: Choices, queries: int = 0, group: int = 1) -> Results:
    """``mx_attention`` with queries that all samples share, ``group`` query heads for one of keys, and its backward."""
    place = choices.place
    heads, dim, queries = place.heads, place.dim, (choices.many if queries == MANY else queries) or place.queries
    offsets, bounds = choices.offsets([s.length for s in samples])
    q = quantize_mx(torch.randn(queries, group * heads, dim, generator=torch.Generator().manual_seed(7)).to(place.device), token_dim=0)
    k, v = (
        quantize_mx(join([s.rows(s.length, heads, dim, salt=i) for s in samples], tail, choices, heads, dim), offsets=offsets, token_dim=0)
        for i in (2, 3)
    )
    shared = {"shared_q": True, "backend": place.backend, "deterministic": choices.deterministic}
    out, lse, result = mx_attention(q, k, v, return_result=True, **shared)
    dout = torch.cat([s.rows(queries, group * heads, dim, salt=1) for s in samples] or [torch.zeros(0, group * heads, dim)])
    dout = dout.to(place.device)
    grads = mx_attention_backward(dout, result, q, k, v, **shared)
    rows = torch.arange(len(samples) + 1) * queries
    parts = [{"out": o, "lse": x} for o, x in zip(split(out, rows), split(lse.t(), rows), strict=True)]
    for name, grad in (("dk", grads.dk), ("dv", grads.dv)):
        for part, pieces in zip(parts, split_mx(grad, bounds, tail), strict=True):
            part.update({f"{name} {key}": x for key, x in pieces.items()})
    return parts, {"dq": grads.dq.cpu()}


def _module(place: Place, queries: int, **options) -> PMA:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        backend = place.backend if place.kernels else "auto"
        module = PMA(dim=place.columns, num_heads=place.heads, num_seeds=queries, backend=backend, **options)
        with torch.no_grad():
            module.seed_embs.normal_()
    return module.to(place.device)


def pma(samples: list[Sample], tail: int, choices: Choices, queries: int = 0, **options) -> Results:
    place, queries = choices.place, queries or (100 if choices.many == 100 else choices.place.queries)
    module = _module(place, queries, **options)
    offsets, bounds = choices.offsets([s.length for s in samples])
    narrow = replace(choices, dtype=torch.bfloat16) if place.kernels else choices
    x = join([s.rows(s.length, place.columns) for s in samples], tail, narrow, place.columns).requires_grad_()
    out = module(x, offsets)
    dout = torch.stack([s.rows(queries, place.columns, salt=1) for s in samples]) if samples else torch.zeros(out.shape)
    dx, *shared = torch.autograd.grad(out, [x, *module.parameters()], dout.to(out.device, out.dtype))
    parts = [{"out": o, "dx": g} for o, g in zip(out.detach().cpu(), split(zero_tail(dx, bounds), bounds), strict=True)]
    return parts, dict(zip((n for n, _ in module.named_parameters()), (x.cpu() for x in shared), strict=True))


pma_static = partial(pma, numerics=Numerics(scales="static", key_projection="e4m3x2"), value_proj=True)

_OPERATIONS: dict[str, Callable[..., Results]] = {
    "quantize_mx": quantized,
    "rmsnorm_center_quantize": normed,
    "rmsnorm_center_quantize static": partial(normed, static=True),
    "scatter_scales": scattered,
    "gemm_quantize": product,
    "gemm_norm_backward": norm_backward,
    "flash_attn_varlen_func": drop_in,
    "mx_attention": attention,
}
_KERNELS: dict[str, Callable[..., Results]] = {
    "mx_attention 40": partial(attention, queries=40, group=2),
    "mx_attention 140": partial(attention, queries=MANY),
}
"""Few queries, some, and many have kernels of their own on Hopper."""
_MODULES: dict[str, Callable[..., Results]] = {"PMA": pma, "PMA post": partial(pma, numerics="post"), "PMA static value_proj": pma_static}


@dataclass(frozen=True)
class Subject:
    """An operation at a place. ``exact``: every bit of a sample is its own, whatever the batch; modules on the reference are so only up to
    BLAS, which adds up a product of another number of rows in another order."""

    name: str
    run: Callable[..., Results]
    place: Place
    exact: bool = True

    def __call__(self, samples: list[Sample], tail: int, choices: Choices) -> Results:
        place = self.place
        dtype = choices.dtype if choices.dtype in place.dtypes else place.dtypes[0]
        choices = replace(choices, place=place, dtype=dtype)
        if place.narrow:
            choices = replace(choices, causal=False, deterministic=True)
        samples = [place.sized(s) for s in samples]
        if not place.kernels:
            return self.run(samples, tail, choices)
        with _algorithms(choices.deterministic), place.around():
            return self.run(samples, tail, choices)


def subjects_at(place: Place) -> dict[str, Subject]:
    """Every operation there, by its name; those of a GPU's kernels carry the place before it."""
    made = {**_OPERATIONS, **(_KERNELS if place.kernels else {}), **_MODULES}
    before = f"{place.name}: " if place.kernels else ""
    return {before + name: Subject(name, run, place, place.kernels or name not in _MODULES) for name, run in made.items()}


SUBJECTS = subjects_at(REFERENCE) | subjects_at(HOPPER)
