"""Problems, truths and error measures that the attention tests share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lp_fa4 import reference
from lp_fa4.config import DEFAULT, AttentionConfig
from lp_fa4.mx import MXTensor, quantize_mx
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients
from tests.conftest import offsets_of


def sqnr(value: Tensor, truth: Tensor) -> float:
    """Signal to quantization noise in dB; +inf where equal. NaN in either is an error, not a pass."""
    value, truth = value.detach().double(), truth.detach().double()
    assert torch.isfinite(truth).all(), "the truth is not finite"
    assert torch.isfinite(value).all(), "the value is not finite"
    noise = ((value - truth) ** 2).sum()
    return float("inf") if noise == 0 else float(10 * torch.log10((truth**2).sum() / noise))


def same_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """Bitwise equality, NaN equal to NaN; names the first difference."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.contiguous().view(size) != b.contiguous().view(size)
    if differs.any():
        first = differs.nonzero()[0].tolist()
        index = tuple(first)
        raise AssertionError(f"{what}: {int(differs.sum())} elements differ, first at {first}: {a[index]} and {b[index]}")


@dataclass
class Case:
    """Ordinary tensors, the problem made of them, and their exact counterparts."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: AttentionProblem
    arguments: dict

    def exact(self) -> tuple[Tensor, Tensor]:
        return reference.exact_attention(self.q, self.k, self.v, **self.arguments)

    def exact_gradients(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference.exact_gradients(dout, self.q, self.k, self.v, **self.arguments)


def make(
    lengths,
    queries=4,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 64,
    *,
    mode: str = "shared",
    causal: bool = False,
    config: AttentionConfig = DEFAULT,
    block: tuple[int, int] = (32, 32),
    score_std: float = 1.0,
    mean: float = 0.0,
    seed: int = 0,
    tail: int = 0,
    tensors: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Case:
    """A problem of one ``mode``: ``shared`` queries, ``dense`` (every sequence its own), ``jagged`` (``queries`` is a list), ``packed``
    (self-attention: queries are the tokens). ``tail`` rows lie past ``offsets[-1]`` and are NaN."""
    kv_heads = heads if kv_heads is None else kv_heads
    g = torch.Generator().manual_seed(seed)
    offsets_k = offsets_of(lengths)
    tokens, batch = int(offsets_k[-1]), len(lengths)
    offsets_q = None
    if mode == "jagged":
        offsets_q = offsets_of(queries)
    elif mode == "packed":
        offsets_q = offsets_k
    elif mode == "dense":
        offsets_q = offsets_of([queries] * batch)
    rows = queries if mode == "shared" else int(offsets_q[-1])
    if tensors is None:
        q = torch.randn(rows, heads, dim, generator=g) * score_std
        k = torch.randn(tokens, kv_heads, dim, generator=g)
        v = torch.randn(tokens, kv_heads, dim, generator=g) + mean
    else:
        q, k, v = tensors
    if tail:
        k, v = (torch.cat([x, torch.full((tail, *x.shape[1:]), torch.nan)]) for x in (k, v))
    made = reference.prepare(q, k, v, offsets_q, offsets_k, causal, config, block)
    problem = AttentionProblem(
        made.q,
        made.k,
        made.v,
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        shared_q=mode == "shared",
        causal=causal,
        v_mean=made.v_mean,
        v_sum=made.v_sum,
        config=config,
    )
    return Case(q, k, v, problem, dict(offsets_q=offsets_q, offsets_k=offsets_k, shared_q=mode == "shared", causal=causal))


def whole(x: MXTensor | Tensor) -> Tensor:
    return x.float() if isinstance(x, Tensor) else x.dequantize()


def full_dv(grads: Gradients, problem: AttentionProblem) -> Tensor:
    """dV with the part that ``dv`` leaves out."""
    dv = whole(grads.dv)
    if grads.dv_mean is not None:
        lengths = problem.offsets_k.diff().long()
        n = int(lengths.sum())
        dv[:n] += grads.dv_mean.repeat_interleave(lengths, 0)
    return dv


def run(case: Case, dout: Tensor | None = None, seed: int = 1) -> tuple[ForwardResult, Gradients, Tensor]:
    """Forward and backward of the reference; ``dout`` random unless given."""
    result = reference.forward(case.problem)
    if dout is None:
        dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(seed))
    return result, reference.backward(case.problem, result, dout), dout


def random_mx(shape, offsets=None, seed=0, block=(32, 32)) -> MXTensor:
    return quantize_mx(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), block, offsets, token_dim=0)
