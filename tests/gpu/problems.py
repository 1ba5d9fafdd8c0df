"""Attention problems for the GPU tests: hostile shapes, poisoned memory, the error allowed.

An error is relative in the Frobenius norm, against FP64 attention on the reconstructed operands. The kernel may have at
most twice that of the reference, which rounds at the same points, plus one BF16 rounding of the output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor, quantize_mx
from lp_fa4.mx.quantize import row_shift, row_units
from lp_fa4.problem import AttentionProblem, ForwardResult

DEVICE = torch.device("cuda", 0)
BF16_ROUNDING = 2.0**-9


def offsets_of(lengths, dtype=torch.int32) -> Tensor:
    """Lengths to offsets on the GPU."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype).to(DEVICE)


def poison(megabytes: int = 64) -> None:
    """Leave freed blocks full of NaN (as float, bf16 and E8M0) in the caching allocator."""
    blocks = [torch.full((n << 18,), 0xFF, dtype=torch.uint8, device=DEVICE) for n in (1, 2, 4, 8, 4 * megabytes)]
    small = [torch.full((n,), 0xFF, dtype=torch.uint8, device=DEVICE) for n in (64, 512, 4096, 65536) for _ in range(8)]
    del blocks, small


def static_exponent(x: Tensor) -> int:
    """Smallest exponent that bounds every finite value of ``x``."""
    amax = float(x.float().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if x.numel() else 1.0
    return int(torch.tensor(max(amax, 1e-30) / 448.0).log2().ceil())


def quantized(x: Tensor, block, offsets: Tensor | None, bounded: bool = False) -> MXTensor:
    """``block``: (tokens, columns), or "static". ``bounded``: rows whose codes sum to at most 146 (not of blocks narrower than a head)."""
    if block == "static":
        exponent = static_exponent(x)
        shift = int(row_shift(row_units(x.float() * 2.0**-exponent).sum(-1, dtype=torch.int32).amax())) if bounded and x.numel() else 0
        return quantize_mx(x, (0, x.shape[-1]), offsets, token_dim=0, exponent=exponent + shift)
    return quantize_mx(x, block, offsets, token_dim=0, bounded_rows=bounded and block[1] == x.shape[-1])


@dataclass(frozen=True)
class Case:
    """What a problem looks like; ``queries``: per sequence, an int or a list (jagged)."""

    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 128
    heads: int = 2
    kv_heads: int = 2
    dim: int = 128
    block: object = "static"
    shared: bool = True
    causal: bool = False
    centred: bool = True
    mean: bool = True
    slack: int = 0
    dtype: torch.dtype = torch.int32
    score_std: float = 1.0
    bounded: bool = False  # rows of q's codes sum to at most 146, so that FP16 holds their products with any codes
    aligned: bool = False  # values follow keys that half of the queries' weight prefers: sums of centred P V leave FP16

    def make(self, seed: int = 0, edit=None) -> AttentionProblem:
        """Random operands; ``edit(q, k, v, offsets_k)`` may change them before they are quantized."""
        g = torch.Generator(device=DEVICE).manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, device=DEVICE, generator=g, dtype=torch.float32)

        offsets_k = offsets_of(self.lengths, self.dtype)
        batch, tokens = len(self.lengths), sum(self.lengths) + self.slack
        offsets_q = None
        if isinstance(self.queries, int):
            rows = self.queries if self.shared else self.queries * batch
            if not self.shared:
                offsets_q = offsets_of([self.queries] * batch, self.dtype)
        else:
            rows, offsets_q = sum(self.queries) + self.slack, offsets_of(self.queries, self.dtype)
        q = random(rows, self.heads, self.dim) * self.score_std
        k = random(tokens, self.kv_heads, self.dim)
        v = random(tokens, self.kv_heads, self.dim) + 0.5 * random(1, self.kv_heads, self.dim)
        if self.slack:
            k[-self.slack :], v[-self.slack :] = torch.nan, torch.nan
        if self.aligned:
            even = (torch.arange(tokens, device=DEVICE) % 2 == 0)[:, None, None]
            q.mul_(0.02).add_(0.06)
            k.copy_(torch.where(even, 0.3, -0.3))
            v.copy_(torch.where(even, 400.0, -400.0))
        if edit is not None:
            edit(q, k, v, offsets_k)
        config = AttentionConfig(center_p=self.centred, center_p_backward=self.centred)
        v_mean = v_sum = None
        if self.centred and not self.causal:
            v_sum = reference.sequence_sums(v, offsets_k)
            if self.mean:
                lengths = (offsets_k[1:] - offsets_k[:-1]).clamp(min=1)[:, None, None]
                v_mean = v_sum / lengths
                centred = v - v_mean[row_sequences(offsets_k, tokens)]
                v = torch.where((torch.arange(tokens, device=DEVICE) < offsets_k[-1])[:, None, None], centred, v)
                v_sum = reference.sequence_sums(v, offsets_k)
        operands = [quantized(q, self.block, None if self.shared else offsets_q, self.bounded)]
        operands += [quantized(x, self.block, offsets_k) for x in (k, v)]
        if self.slack:
            for x in operands[0 if isinstance(self.queries, tuple) else 1 :]:
                x.codes[-self.slack :] = 0x7F  # NaN: must never be read
        return AttentionProblem(
            *operands,
            offsets_q=offsets_q,
            offsets_k=offsets_k,
            shared_q=self.shared,
            causal=self.causal,
            v_mean=v_mean,
            v_sum=v_sum,
            config=config,
        )


def row_sequences(offsets: Tensor, rows: int) -> Tensor:
    """Sequence of each row, the last one's for slack."""
    at = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].to(torch.int64), at, right=True).clamp(max=offsets.shape[0] - 2)


def exact(p: AttentionProblem) -> tuple[Tensor, Tensor]:
    """FP64 attention on the reconstructed operands: output (mean added) and lse."""
    q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
    if p.v_mean is not None:
        assert p.offsets_k is not None
        v = v + p.v_mean.double()[row_sequences(p.offsets_k, p.tokens)]
    scale = p.softmax_scale
    return reference.exact_attention(
        q, k, v, offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q, softmax_scale=scale, causal=p.causal
    )


def relative(x: Tensor, truth: Tensor) -> float:
    """Frobenius error; infinite if one is not finite where the other is."""
    x = x.double()
    if not torch.equal(torch.isfinite(x), torch.isfinite(truth)):
        return float("inf")
    return float((x - truth).nan_to_num().norm() / truth.nan_to_num().norm().clamp(min=1e-300))


def check(p: AttentionProblem, result: ForwardResult, *, lse_tolerance: float = 4e-3, factor: float = 2.0) -> dict[str, float]:
    """Errors of a result, asserted against the reference's. ``lse_tolerance``: absolute, natural logarithm."""
    truth, lse = exact(p)
    ours = relative(result.out, truth)
    theirs = relative(reference.forward(p).out, truth)
    assert ours <= factor * theirs + BF16_ROUNDING, f"output error {ours:.3g}, the reference's {theirs:.3g}"
    finite = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(result.lse), finite), "lse is -inf where rows see keys, or the reverse"
    worst = float((result.lse.double() - lse)[finite].abs().max()) if bool(finite.any()) else 0.0
    assert worst <= lse_tolerance, f"lse error {worst:.3g}"
    again = (result.row_max + torch.log2(result.row_sum)) * 0.6931471805599453
    assert float((again - result.lse)[finite].abs().max() if bool(finite.any()) else 0.0) <= 1e-4, "row_max, row_sum and lse disagree"
    assert bool((result.row_sum[finite] >= 0.99).all()), "row_sum is taken against a maximum that no score attains"
    assert bool((result.row_sum[~finite] == 0).all())
    return dict(out=ours, reference=theirs, lse=worst)


def rows_of_kind(kind: str, tokens: int, used: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows for norms, NaN past ``used``: "spread" (sizes 2^±20), "random", "outlier" (some elements 2^10 larger), "not finite"."""
    from tests.fused_ops.kernel_cases import values

    x = values(tokens, columns, dtype, used, tokens, str(DEVICE))
    if kind != "spread":
        x[:used] = torch.randn(used, columns, device=DEVICE) + 0.25
    pick = torch.rand(x.shape, device=DEVICE)
    if kind == "outlier":
        x[pick < 1e-3] *= 1024.0
    if kind == "not finite":
        for i, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
            x[:used][(pick[:used] > 3e-4 * i) & (pick[:used] < 3e-4 * i + 1e-4)] = bad
    return x
