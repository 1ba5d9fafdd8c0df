"""What the properties are tried on: each operation as a function from a list of samples to a list of their results.

A subject is ``fn(samples, tail, choices) -> (per sample results, shared results)``, each a dict of tensors. It joins the samples into one
jagged batch with ``tail`` NaN rows behind it, runs the public function, and takes the results apart. Data come from a sample's own seed, so
that a sample is the same wherever it stands.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fused_ops import gemm_norm_backward, gemm_quantize, rmsnorm_center_quantize
from lp_fa4 import MXTensor, flash_attn_varlen_func, mx_attention, mx_attention_backward, quantize_mx
from modules import PMA, Numerics
from tests.conftest import offsets_of

Results = tuple[list[dict[str, Tensor]], dict[str, Tensor]]
COLUMNS, HEADS, DIM = 64, 2, 32


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


@dataclass(frozen=True)
class Choices:
    """What a batch shares."""

    dtype: torch.dtype = torch.float32
    causal: bool = False
    wide_offsets: bool = False
    strided: bool = False

    def offsets(self, lengths) -> Tensor:
        return offsets_of(lengths, torch.int64 if self.wide_offsets else torch.int32)


def join(pieces: list[Tensor], tail: int, choices: Choices, *shape: int) -> Tensor:
    """One tensor of all pieces and a NaN tail; ``strided``: a view with gaps between rows and columns."""
    x = torch.cat([*pieces, torch.full((tail, *shape), torch.nan)]).to(choices.dtype)
    if not choices.strided:
        return x
    room = torch.full((x.shape[0], *x.shape[1:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    room[..., ::2] = x
    return room[..., ::2]


def split(x: Tensor, offsets: Tensor) -> list[Tensor]:
    return [x[a:b] for a, b in pairwise(offsets.tolist())]


def split_mx(x: MXTensor, offsets: Tensor, tail: int) -> list[dict[str, Tensor]]:
    """Codes and scale bytes of each sequence. Rows that no sequence owns must be 0."""
    out = []
    for b, (start, stop) in enumerate(pairwise(offsets.tolist())):
        first = start // 32 + b
        out.append({"codes": x.codes[start:stop], "scale": x.scale_bytes[first : first + -(-(stop - start) // 32)]})
    assert x.codes[x.shape[0] - tail :].count_nonzero() == 0
    return out


def zero_tail(x: Tensor, offsets: Tensor) -> None:
    assert (x[int(offsets[-1]) :] == 0).all(), "what lies past the last offset must be 0"


def quantized(samples: list[Sample], tail: int, choices: Choices) -> Results:
    offsets = choices.offsets([s.length for s in samples])
    x = join([s.rows(s.length, COLUMNS) for s in samples], tail, choices, COLUMNS)
    return split_mx(quantize_mx(x, (32, 32), offsets), offsets, tail), {}


def normed(samples: list[Sample], tail: int, choices: Choices) -> Results:
    offsets = choices.offsets([s.length for s in samples])
    x = join([s.rows(s.length, COLUMNS) for s in samples], tail, choices, COLUMNS)
    out = rmsnorm_center_quantize(x, torch.linspace(0.5, 2, COLUMNS), 1e-6, offsets)
    zero_tail(out.rstd, offsets)
    parts = split_mx(out.xn, offsets, tail)
    for b, (part, rstd) in enumerate(zip(parts, split(out.rstd, offsets), strict=True)):
        part.update(rstd=rstd, mean=out.mean[b], total=out.total[b])
    return parts, {}


def _weight(rows: int, columns: int) -> Tensor:
    return torch.randint(-4, 5, (rows, columns), generator=torch.Generator().manual_seed(3)).float()


def product(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """On small integers: sums are exact, so BLAS may add them in whatever order the batch's size suggests."""
    offsets = choices.offsets([s.length for s in samples])
    x = join([s.rows(s.length, COLUMNS, whole=True) for s in samples], tail, choices, COLUMNS)
    return split_mx(gemm_quantize(x, _weight(96, COLUMNS), offsets=offsets), offsets, tail), {}


def norm_backward(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """On small integers, as ``product``."""
    offsets = choices.offsets([s.length for s in samples])
    plain = Choices(wide_offsets=choices.wide_offsets)
    dk, dv, xn = (
        quantize_mx(join([s.rows(s.length, n, salt=i, whole=True) for s in samples], tail, plain, n), offsets=offsets)
        for i, n in enumerate((96, COLUMNS, COLUMNS))
    )
    x = join([s.rows(s.length, COLUMNS, salt=9) for s in samples], tail, choices, COLUMNS)
    rstd = join([torch.full((s.length,), 2.0**-s.exponent) for s in samples], tail, plain)
    dx, _, _ = gemm_norm_backward(dk, dv, _weight(96, COLUMNS), x, torch.linspace(0.5, 2, COLUMNS), rstd, xn)
    zero_tail(dx, offsets)
    return [{"dx": part} for part in split(dx, offsets)], {}


def drop_in(samples: list[Sample], tail: int, choices: Choices) -> Results:
    offsets_q, offsets_k = choices.offsets([s.queries for s in samples]), choices.offsets([s.length for s in samples])
    q, dout = (join([s.rows(s.queries, 2 * HEADS, DIM, salt=i) for s in samples], tail, choices, 2 * HEADS, DIM) for i in (0, 1))
    k, v = (join([s.rows(s.length, HEADS, DIM, salt=i) for s in samples], tail, choices, HEADS, DIM) for i in (2, 3))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse, _ = flash_attn_varlen_func(*leaves, offsets_q, offsets_k, 8, 300, causal=choices.causal, return_attn_probs=True)
    grads = torch.autograd.grad(out, leaves, dout)
    for x, offsets in zip((out.detach(), *grads), (offsets_q, offsets_q, offsets_k, offsets_k), strict=True):
        zero_tail(x, offsets)
    columns = [split(out.detach(), offsets_q), split(lse.detach().t(), offsets_q), split(grads[0], offsets_q)]
    columns += [split(g, offsets_k) for g in grads[1:]]
    return [dict(zip(("out", "lse", "dq", "dk", "dv"), parts, strict=True)) for parts in zip(*columns, strict=True)], {}


SHARED_QUERIES = 5


def attention(samples: list[Sample], tail: int, choices: Choices) -> Results:
    """``mx_attention`` with queries that all samples share, and its backward."""
    offsets = choices.offsets([s.length for s in samples])
    q = quantize_mx(torch.randn(SHARED_QUERIES, HEADS, DIM, generator=torch.Generator().manual_seed(7)), token_dim=0)
    k, v = (
        quantize_mx(join([s.rows(s.length, HEADS, DIM, salt=i) for s in samples], tail, choices, HEADS, DIM), offsets=offsets, token_dim=0)
        for i in (2, 3)
    )
    out, lse, result = mx_attention(q, k, v, shared_q=True, return_result=True)
    dout = torch.cat([s.rows(SHARED_QUERIES, HEADS, DIM, salt=1) for s in samples] or [torch.zeros(0, HEADS, DIM)])
    grads = mx_attention_backward(dout, result, q, k, v, shared_q=True)
    rows = torch.arange(len(samples) + 1) * SHARED_QUERIES
    parts = [{"out": o, "lse": x} for o, x in zip(split(out, rows), split(lse.t(), rows), strict=True)]
    for name, grad in (("dk", grads.dk), ("dv", grads.dv)):
        for part, pieces in zip(parts, split_mx(grad, offsets, tail), strict=True):
            part.update({f"{name} {key}": x for key, x in pieces.items()})
    return parts, {"dq": grads.dq}


def _module(**options) -> PMA:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = PMA(dim=COLUMNS, num_heads=HEADS, num_seeds=SHARED_QUERIES, **options)
        with torch.no_grad():
            module.seed_embs.normal_()
    return module


def pma(samples: list[Sample], tail: int, choices: Choices, **options) -> Results:
    module = _module(**options)
    offsets = choices.offsets([s.length for s in samples])
    x = join([s.rows(s.length, COLUMNS) for s in samples], tail, choices, COLUMNS).requires_grad_()
    out = module(x, offsets)
    dout = torch.stack([s.rows(SHARED_QUERIES, COLUMNS, salt=1) for s in samples]) if samples else torch.zeros(out.shape)
    dx, *shared = torch.autograd.grad(out, [x, *module.parameters()], dout.to(out.dtype))
    zero_tail(dx, offsets)
    parts = [{"out": o, "dx": g} for o, g in zip(out.detach(), split(dx, offsets), strict=True)]
    return parts, dict(zip((n for n, _ in module.named_parameters()), shared, strict=True))


def pma_post(samples: list[Sample], tail: int, choices: Choices) -> Results:
    return pma(samples, tail, choices, numerics="post")


def pma_static(samples: list[Sample], tail: int, choices: Choices) -> Results:
    return pma(samples, tail, choices, numerics=Numerics(scales="static", key_projection="e4m3x2"), value_proj=True)


EXACT = {
    "quantize_mx": quantized,
    "rmsnorm_center_quantize": normed,
    "gemm_quantize": product,
    "gemm_norm_backward": norm_backward,
    "flash_attn_varlen_func": drop_in,
    "mx_attention": attention,
}
"""Every bit of a sample is its own, whatever the batch."""

MODULES = {"PMA": pma, "PMA post": pma_post, "PMA static value_proj": pma_static}
"""The same up to BLAS, which adds up a product of another number of rows in another order."""
