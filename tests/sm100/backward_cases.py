"""Problems for the Blackwell backward, its run in the emulator, and what counts as right. ``case`` builds one for a worker.

The forward's results come from the reference. Scale pads are 0xFF wherever no scale belongs, fresh memory is poison.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from lp_fa4 import reference
from lp_fa4.mx import MXTensor, sequence_ids
from lp_fa4.problem import AttentionProblem, Gradients
from lp_fa4.sm100 import backward_host
from tests.emulator.kernels import Case
from tests.sm100.cases import poisoned, problem, reference_atoms

PAIRS: dict[str, Any] = {"operand_scales": "outside", "do_block": (32, 0), "ds_block": None}
"""Fields of a configuration that takes the kernel with two CTAs; its operands have one exponent per 32 tokens and head."""
FORMAT = {"bf16": 2.0**-9, "mxfp8": 2.0**-5}
"""Error of rounding dK and dV once more, relative to the largest of a row or block: both sides carry it, in different places."""


def gradient(p: AttentionProblem, seed: int, growth: float) -> torch.Tensor:
    """dO, BF16; ``growth``: larger by this factor every 40 rows."""
    generator = torch.Generator().manual_seed(100 + seed)
    size = growth ** (torch.arange(p.rows) // 40 % 6).float()
    return (torch.randn(p.rows, p.heads, p.head_dim, generator=generator) * size[:, None, None]).to(torch.bfloat16)


def values(x: MXTensor | torch.Tensor) -> torch.Tensor:
    """A gradient in FP64."""
    return x.dequantize(torch.float64) if isinstance(x, MXTensor) else x.double()


def per_token(p: AttentionProblem, x: torch.Tensor) -> torch.Tensor:
    """``[B, ...]`` spread over the tokens of each sequence, 0 past the last."""
    assert p.offsets_k is not None
    ids = sequence_ids(p.offsets_k, p.tokens)
    return torch.cat([x, torch.zeros_like(x[:1])])[ids]


class Judge:
    """Right: per sequence and head, the error of each gradient against FP64 is at most twice that of the reference, which rounds at the
    same points. The floor is FP32 accumulation in another order (1e-5), or the gradient's own format; for dK of a sequence with one key,
    which is 0 (dP - D, two sums of the same products), half an FP32 unit of the part that D takes away. The mean of dV, a sum over queries
    in FP32 on both sides, is the reference's within 1e-4 and half an FP32 unit of what cancels in the sum. Gradients of rows that belong to
    no sequence are exactly 0; a NaN shows where the reference has it and nowhere else.
    ``repeatable``: dQ is the same bit for bit in every run."""

    def __init__(self, p: AttentionProblem, dout: torch.Tensor, dlse: torch.Tensor | None, repeatable: bool = False):
        self.p, self.dout = p, dout
        self.result = reference.forward(p)
        self.want = reference.backward(p, self.result, dout, dlse=dlse)
        q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
        if p.v_mean is not None:
            v = v + per_token(p, p.v_mean.double())
        rows = p.rows if p.offsets_q is None else int(p.offsets_q[-1])
        inside = (torch.arange(p.rows) < rows)[:, None, None]
        arguments: dict[str, Any] = dict(offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q)
        arguments |= dict(softmax_scale=p.softmax_scale, causal=p.causal)
        if dlse is None:
            self.exact = reference.exact_gradients(torch.where(inside, dout, 0), q, k, v, **arguments)
        else:
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = reference.exact_attention(*leaves, **arguments)
            seen = torch.isfinite(lse)
            total = (out * torch.where(inside, dout, 0)).sum() + torch.where(seen, lse * dlse, 0.0).sum()
            self.exact = torch.autograd.grad(total, leaves)
        self.worst: dict[str, float] = {}
        self.repeatable, self.first = repeatable, None

    def taken_away(self, b: int, h: int) -> float:
        """Norm of ``softmax_scale dP^T Q`` of sequence ``b``, which has one key, and key/value head ``h``: dK before D is taken from dP."""
        p = self.p
        assert p.offsets_k is not None
        at = slice(int(p.offsets_k[b]), int(p.offsets_k[b]) + 1)
        mine = slice(h * p.group, (h + 1) * p.group)
        many = p.queries or 0
        rows = slice(b * many, b * many + many) if p.offsets_q is None else slice(int(p.offsets_q[b]), int(p.offsets_q[b + 1]))
        q = p.q.dequantize(torch.float64)[slice(None) if p.shared_q else rows, mine]
        dp = torch.einsum("qhd,kd->qh", self.dout[rows, mine].double(), p.v.dequantize(torch.float64)[at, h])
        return float((torch.einsum("qh,qhd->d", dp, q) * (p.softmax_scale or 1.0)).norm())

    def cancelling(self) -> torch.Tensor:
        """Sum of ``|dO|`` over a sequence's queries, by its number of keys: the mean of dV is the signed one. FP64 ``[B, Hkv, D]``."""
        p = self.p
        assert p.offsets_k is not None
        many = p.queries or 0
        bounds = [b * many for b in range(p.batch + 1)] if p.offsets_q is None else p.offsets_q.tolist()
        sums = torch.stack([self.dout[a:b].double().abs().sum(0) for a, b in pairwise(bounds)])
        keys = p.offsets_k.diff()[:, None, None]
        return torch.where(keys > 0, sums.unflatten(1, (p.kv_heads, p.group)).sum(2) / keys.clamp(min=1), 0.0)

    def whole(self, grads: Gradients, name: str) -> torch.Tensor:
        x = values(getattr(grads, name))
        if name == "dv" and grads.dv_mean is not None:
            x = x + per_token(self.p, grads.dv_mean.double())
        return x

    def groups(self, name: str) -> list[slice]:
        """Rows of each sequence."""
        p = self.p
        if name == "dq" and p.shared_q:
            return [slice(0, p.q.shape[0])]
        if name == "dq" and p.offsets_q is None:
            many = p.queries or 0
            return [slice(b * many, b * many + many) for b in range(p.batch)]
        bounds = (p.offsets_q if name == "dq" else p.offsets_k).tolist()  # type: ignore[union-attr]
        return [slice(a, b) for a, b in pairwise(bounds)]

    def __call__(self, got: Gradients) -> None:
        fmt = self.p.config.grad_format
        if self.repeatable:
            self.first = got.dq if self.first is None else self.first
            assert torch.equal(got.dq, self.first), "dq differs from run to run"
        assert (got.dv_mean is None) == (self.want.dv_mean is None)
        if got.dv_mean is not None:
            apart = (got.dv_mean - self.want.dv_mean).abs()
            allowed = 1e-6 + 1e-4 * self.want.dv_mean.abs() + 2.0**-24 * self.cancelling()
            right = (apart <= allowed) | (got.dv_mean == self.want.dv_mean)
            assert right.all(), f"mean of dv: {apart[~right].max():.3e} from the reference, allowed {allowed[~right].min():.3e}"
        for name, exact in zip(("dq", "dk", "dv"), self.exact, strict=True):
            ours, theirs = self.whole(got, name), self.whole(self.want, name)
            groups = self.groups(name)
            assert (values(getattr(got, name))[groups[-1].stop :] == 0).all(), f"{name}: rows past the last sequence"
            floor = 1e-5 + (0.0 if name == "dq" else FORMAT[fmt])
            for sequence, rows in enumerate(groups):
                for h in range(ours.shape[1]):
                    if rows.stop <= rows.start:
                        continue
                    a, b, c = ours[rows, h], theirs[rows, h], exact[rows, h]
                    where = f"{name} rows {rows.start}..{rows.stop - 1}, head {h}"
                    seen = torch.isfinite(b)
                    assert torch.equal(torch.isfinite(a), seen), f"{where}: NaN leaks or hides"
                    a, b, c = a[seen], b[seen], c[seen].nan_to_num()
                    error, allowed = (a - c).norm(), 2 * (b - c).norm() + floor * c.norm()
                    if name == "dk" and rows.stop - rows.start == 1:
                        allowed = allowed + 2.0**-24 * self.taken_away(sequence, h)
                    assert error <= allowed, f"{where}: error {error:.3e}, allowed {allowed:.3e}, of {c.norm():.3e}"
                    apart = float((a - b).norm() / b.norm().clamp(min=1e-300))
                    self.worst[name] = max(self.worst.get(name, 0.0), apart)


def run(p: AttentionProblem, result, dout, *, arch: str, processors: int = 2, deterministic: bool = False, dlse=None) -> Gradients:
    """Launch the kernels for ``p`` on ``processors`` CTAs (call inside ``emulate``)."""
    with mock.patch.object(backward_host, "scale_atoms", poisoned(reference_atoms)):
        return backward_host.run(p, result, dout, arch, processors, deterministic=deterministic, dlse=dlse)


def case(
    arch: str,
    problem_of: dict,
    run_of: dict | None = None,
    config: dict | None = None,
    growth: float = 1.0,
    lse: bool = False,
    pairs: bool = False,
    broken: str = "",
) -> Case:
    """A case of ``problem(**problem_of)`` with some fields of its configuration changed (``config``); ``lse``: the LSE has a gradient.
    ``pairs``: by the kernel with two CTAs (``PAIRS``, token blocks). ``broken``: ``"v"``, the second sequence's first 32 values are a NaN
    block as quantization leaves it, or ``"do"``, one of its gradients is infinite."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    changes = dict(config or {})
    if pairs:
        dim = problem_of.get("dim", 128)
        problem_of = {"blocks": ((32, dim),) * 3, **problem_of}
        changes = {**PAIRS, **changes}
    if "dq_dtype" in changes:
        changes["dq_dtype"] = getattr(torch, changes["dq_dtype"])
    p = problem(**problem_of)
    p = replace(p, config=p.config.with_(grad_format="bf16").with_(**changes))
    for x, offsets in ((p.q, p.offsets_q), (p.k, p.offsets_k), (p.v, p.offsets_k)):
        if offsets is not None:
            x.codes[int(offsets[-1]) :] = 0x7F  # NaN: nothing past the last sequence may be read
    dout = gradient(p, problem_of.get("seed", 0), growth)
    if broken:
        first = int(p.offsets_k[1])  # type: ignore[index]
        if broken == "v":
            p.v.codes[first : first + 32] = 0
            p.v.scale_bytes[first // 32 + 1] = 255
        else:
            dout[int(p.offsets_q[1]) + 3, 0, 5] = torch.inf  # type: ignore[index]
    dlse = torch.randn(p.heads, p.rows, generator=torch.Generator().manual_seed(7)) if lse else None
    judge = Judge(p, dout, dlse, (run_of or {}).get("deterministic", False))
    return Case(str(problem_of), arch, None, lambda: run(p, judge.result, dout, arch=arch, dlse=dlse, **(run_of or {})), judge)
