"""Third-party kernels that hardware has proven: what the emulator is tested on.

Each function builds a ``Case``: host code to compile (under ``FakeTensorMode`` where the library wants CUDA tensors at
compile time), host code to run, and a comparison with plain torch. Tolerances: the kernels round P, dS and outputs to
bfloat16 (unit roundoff 2^-9), so errors are a few 1e-3 of the value's scale; each bound is about twice the largest error
seen over all schedules, and every planted fault that reaches the output exceeds it by far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """A kernel call with its check. ``prepare`` compiles; ``call`` runs; ``verify`` raises AssertionError."""

    name: str
    arch: str
    prepare: Callable[[], Any] | None
    call: Callable[[], Any]
    verify: Callable[[Any], None]


def close(name: str, x: torch.Tensor, y: torch.Tensor, bound: float) -> None:
    """Largest absolute error at most ``bound`` (NaN fails)."""
    error = (x.float() - y.float()).abs().max().item() if x.numel() else 0.0
    assert error <= bound, f"{name}: largest error {error:.4g}, allowed {bound:.4g}"


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, H, D] float32 → output and log-sum-exp [B, H, S]."""
    groups = q.shape[2] // k.shape[2]
    qt, kt, vt = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))
    s = qt @ kt.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(~torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]), float("-inf"))
    return (s.softmax(-1) @ vt).transpose(1, 2), torch.logsumexp(s, -1)


# --- flash-attn-4 --------------------------------------------------------------------------------------------------
def _calls(function: Callable[..., Any], *operands: torch.Tensor) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A case's two: compile ``function`` under ``FakeTensorMode``, and call it."""

    def prepare() -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            function(*map(_fake, operands))

    return prepare, lambda: function(*operands)


def _gradients(wanted: list[torch.Tensor]) -> Callable[[Any], None]:
    """A case's comparison of dQ, dK and dV."""

    def verify(value: Any) -> None:
        for name, x, y in zip(("dq", "dk", "dv"), value, wanted, strict=True):
            # P, dS and the result are rounded to bf16; dk and dv of a group sum over its heads
            close(name, x, y, 0.006 * max(1.0, y.abs().max().item()) + 0.004)

    return verify


def fa4_forward(
    arch: str,
    sq: int,
    sk: int,
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    dim: int = 128,
    causal: bool = False,
    batch: int = 1,
    growing: bool = False,
) -> Case:
    """Dense forward. ``growing``: scores grow along the kernel's walk (from the last key to the first), so that
    the row maximum moves far and outputs are rescaled."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = kv_heads or heads

    def draw(s: int, h: int) -> torch.Tensor:
        return torch.randn(batch, s, h, dim, generator=generator).bfloat16()

    q, k, v = draw(sq, heads), draw(sk, kv_heads), draw(sk, kv_heads)
    if growing:
        k = (k * torch.linspace(6, 0.1, sk)[:, None, None]).bfloat16()
    out, lse = attention_reference(q.float(), k.float(), v.float(), causal)

    def forward(*tensors: torch.Tensor) -> Any:
        from flash_attn.cute.interface import _flash_attn_fwd

        return _flash_attn_fwd(*tensors, causal=causal, return_lse=True)[:2]

    def verify(value: Any) -> None:
        # a few keys decide a row: |out| up to 4, so the bound follows the scale of bf16 rounding
        close("out", value[0], out, 0.02 if causal or growing else 0.005)
        close("lse", value[1], lse, 1e-4)

    name = f"fa4 forward {batch}x{sq}x{sk} h{heads}/{kv_heads} d{dim}{' causal' if causal else ''}{' growing' if growing else ''}"
    return Case(name, arch, *_calls(forward, q, k, v), verify)


def fa4_varlen_forward(arch: str, lengths_q: list[int], lengths_k: list[int], *, heads: int = 1, kv_heads: int = 1, dim: int = 128) -> Case:
    """Jagged forward; a length may be 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(t: int, h: int) -> torch.Tensor:
        return torch.randn(t, h, dim, generator=generator).bfloat16()

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    q, k, v = draw(sum(lengths_q), heads), draw(sum(lengths_k), kv_heads), draw(sum(lengths_k), kv_heads)
    cq, ck = offsets(lengths_q), offsets(lengths_k)

    def forward(q: Any, k: Any, v: Any, cq: Any, ck: Any) -> Any:
        from flash_attn.cute.interface import _flash_attn_fwd

        return _flash_attn_fwd(
            q, k, v, cu_seqlens_q=cq, cu_seqlens_k=ck, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), return_lse=True
        )[:2]

    def verify(value: Any) -> None:
        for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            rows, keys = slice(int(cq[b]), int(cq[b + 1])), slice(int(ck[b]), int(ck[b + 1]))
            if not nq:
                continue
            if not nk:
                close(f"out of empty sequence {b}", value[0][rows], torch.zeros(nq, heads, dim), 0.0)
                assert torch.isneginf(value[1][:, rows]).all(), f"lse of empty sequence {b} is not -inf"
                continue
            out, lse = attention_reference(q[rows][None].float(), k[keys][None].float(), v[keys][None].float())
            # one key gives |out| up to 4: the bound follows the scale of bf16 rounding
            close(f"out of sequence {b}", value[0][rows], out[0], 0.02)
            close(f"lse of sequence {b}", value[1][:, rows], lse[0], 1e-4)

    name = f"fa4 varlen forward q{lengths_q} k{lengths_k} h{heads}/{kv_heads} d{dim}"
    return Case(name, arch, *_calls(forward, q, k, v, cq, ck), verify)


def fa4_backward(arch: str, sq: int, sk: int, *, heads: int = 1, kv_heads: int | None = None, dim: int = 128, causal: bool = False) -> Case:
    """Dense backward (preprocess, main, postprocess kernels)."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = kv_heads or heads

    def draw(s: int, h: int) -> torch.Tensor:
        return torch.randn(1, s, h, dim, generator=generator).bfloat16()

    q, k, v, dout = draw(sq, heads), draw(sk, kv_heads), draw(sk, kv_heads), draw(sq, heads)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, lse = attention_reference(*leaves, causal)
    out.backward(dout.float())
    grads = [x.grad for x in leaves]
    out, lse = out.detach().bfloat16().contiguous(), lse.detach().contiguous()

    def backward(*tensors: torch.Tensor) -> Any:
        from flash_attn.cute.interface import _flash_attn_bwd

        return _flash_attn_bwd(*tensors, causal=causal)[:3]

    operands = (q, k, v, out, dout, lse)

    name = f"fa4 backward {sq}x{sk} h{heads}/{kv_heads} d{dim}{' causal' if causal else ''}"
    return Case(name, arch, *_calls(backward, *operands), _gradients(grads))


def fa4_varlen_backward(arch: str, lengths_q: list[int], lengths_k: list[int], *, heads: int = 1, dim: int = 128) -> Case:
    """Jagged backward."""
    generator = torch.Generator().manual_seed(0)

    def draw(t: int) -> torch.Tensor:
        return torch.randn(t, heads, dim, generator=generator).bfloat16()

    cq, ck = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    q, k, v, dout = draw(sum(lengths_q)), draw(sum(lengths_k)), draw(sum(lengths_k)), draw(sum(lengths_q))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    outs, lses = [], []
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(int(cq[b]), int(cq[b + 1])), slice(int(ck[b]), int(ck[b + 1]))
        if nk == 0 or nq == 0:
            outs.append(torch.zeros(nq, heads, dim))
            lses.append(torch.full((heads, nq), float("-inf")))
            continue
        o, l = attention_reference(leaves[0][rows][None], leaves[1][keys][None], leaves[2][keys][None])
        outs.append(o[0])
        lses.append(l[0])
    full = torch.cat(outs)
    full.backward(dout.float())
    grads = [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]
    operands = (q, k, v, full.detach().bfloat16(), dout, torch.cat(lses, 1).detach().contiguous(), cq, ck)

    def backward(q: Any, k: Any, v: Any, o: Any, do: Any, lse: Any, cq: Any, ck: Any) -> Any:
        from flash_attn.cute.interface import _flash_attn_bwd

        return _flash_attn_bwd(
            q, k, v, o, do, lse, cu_seqlens_q=cq, cu_seqlens_k=ck, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k)
        )[:3]

    return Case(f"fa4 varlen backward q{lengths_q} k{lengths_k} h{heads} d{dim}", arch, *_calls(backward, *operands), _gradients(grads))


# --- Quack ---------------------------------------------------------------------------------------------------------
def quack_gemm(arch: str, m: int, n: int, k: int) -> Case:
    """Dense bf16 GEMM, x @ w.T."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(r, k, generator=generator).bfloat16() for r in (m, n))
    reference = x.float() @ w.float().T

    def call() -> Any:
        from quack.gemm_interface import gemm

        return gemm(x, w.T, tuned=False)

    return Case(
        f"quack bf16 gemm {m}x{n}x{k}", arch, None, call, lambda v: close("out", v, reference, 2**-8 * reference.abs().max().item())
    )


def _mx_operand(rows: int, k: int, generator: torch.Generator) -> Any:
    """A block-scaled operand whose rows differ in magnitude, pads of the scale buffer set to 0xFF; and its values."""
    from quack.blockscaled.operand import BlockScaledOperand
    from quack.blockscaled.quantize import pack_scale_2d_to_blocked_contig, to_mx

    spread = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    q, s = to_mx((torch.randn(rows, k, generator=generator) * spread).bfloat16(), 32)
    values = q.float() * s.float().repeat_interleave(32, -1)
    packed = pack_scale_2d_to_blocked_contig(s.view(1, rows, k // 32)).squeeze(0)
    op = BlockScaledOperand.from_parts(q, packed, "mxfp8")
    scale = op.scale.view(torch.uint8)
    rm, rk = scale.shape[-5], scale.shape[-4]
    row = torch.arange(rm * 128).view(rm, 4, 32).transpose(1, 2)[:, None, :, :, None]
    block = torch.arange(rk * 4).view(rk, 4)[None, :, None, None, :]
    scale[((row >= rows) | (block >= (k + 31) // 32)).expand(scale.shape)] = 0xFF
    return op, values


def quack_mxfp8_gemm(arch: str, m: int, n: int, k: int) -> Case:
    """Dense MXFP8 GEMM; scale pads hold 0xFF (NaN)."""
    generator = torch.Generator().manual_seed(0)
    (a, av), (b, bv) = _mx_operand(m, k, generator), _mx_operand(n, k, generator)
    reference = av @ bv.T

    def call() -> Any:
        from quack.gemm_interface import gemm

        return gemm(a, b.mT, tuned=False)

    return Case(
        f"quack mxfp8 gemm {m}x{n}x{k}", arch, None, call, lambda v: close("out", v, reference, 2**-8 * reference.abs().max().item())
    )


def quack_rmsnorm(arch: str, m: int, n: int) -> Case:
    """RMSNorm forward and backward through autograd."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, n, generator=generator).bfloat16()
    w = torch.randn(n, generator=generator)
    dout = torch.randn(m, n, generator=generator).bfloat16()
    xr, wr = x.float().requires_grad_(), w.clone().requires_grad_()
    out = xr * torch.rsqrt(xr.pow(2).mean(-1, keepdim=True) + 1e-6) * wr
    out.backward(dout.float())

    def call() -> Any:
        from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

        y, _, rstd = rmsnorm_fwd(x, w, store_rstd=True)
        dx, dw, *_ = rmsnorm_bwd(x, w, dout, rstd)
        return y, dx, dw

    def verify(value: Any) -> None:
        for name, got, want in zip(("out", "dx", "dw"), value, (out.detach(), xr.grad, wr.grad), strict=True):
            close(name, got, want, 2**-8 * want.abs().max().item())

    return Case(f"quack rmsnorm {m}x{n}", arch, None, call, verify)


def _pack_scales(scale: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] scale bytes → Quack's blocked buffer [1, rm, rk, 32, 4, 4]."""
    from quack.blockscaled.quantize import pack_scale_2d_to_blocked_contig

    rows, blocks = scale.shape
    padded = torch.full(((rows + 127) // 128 * 128, (blocks + 3) // 4 * 4), 0xFF, dtype=torch.uint8)
    padded[:rows, :blocks] = scale
    return pack_scale_2d_to_blocked_contig(padded.view(torch.float8_e8m0fnu)[None])


def _quantized(rows: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload [rows, k], scale bytes [rows, ceil(k / 32)], values; rows of different magnitude; k need not divide by 32."""
    from quack.blockscaled.quantize import to_mx

    full = (k + 31) // 32 * 32
    x = torch.zeros(rows, full)
    x[:, :k] = torch.randn(rows, k, generator=generator) * torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    q, s = to_mx(x.bfloat16(), 32)
    return q[:, :k], s.view(torch.uint8), (q.float() * s.float().repeat_interleave(32, -1))[:, :k]


def quack_mxfp8_varlen_m(arch: str, lengths: list[int], n: int, k: int) -> Case:
    """Grouped MXFP8 GEMM, ragged rows: sequence i's scales start at tile ``cu[i] // 128 + i``; pads hold 0xFF."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    qa, sa, va = _quantized(total, k, generator)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = torch.full((((total + 127) // 128 + len(lengths) - 1) * 128, sa.shape[1]), 0xFF, dtype=torch.uint8)
    for i, m in enumerate(lengths):
        at = (int(cu[i]) // 128 + i) * 128
        padded[at : at + m] = sa[int(cu[i]) : int(cu[i + 1])]
    weights = [_quantized(n, k, generator) for _ in lengths]
    reference = torch.cat([va[int(cu[i]) : int(cu[i + 1])] @ weights[i][2].T for i in range(len(lengths))])

    def call() -> Any:
        from quack.blockscaled.operand import BlockScaledOperand
        from quack.gemm_interface import gemm

        a = BlockScaledOperand.from_parts(qa, _pack_scales(padded), "mxfp8")
        b = BlockScaledOperand.from_parts(torch.stack([w[0] for w in weights]), torch.cat([_pack_scales(w[1]) for w in weights]), "mxfp8")
        return gemm(a, b.mT, cu_seqlens_m=cu, tuned=False)

    return Case(
        f"quack mxfp8 varlen_m {lengths}x{n}x{k}",
        arch,
        None,
        call,
        lambda v: close("out", v, reference, 2**-8 * reference.abs().max().item()),
    )


def quack_mxfp8_varlen_k(arch: str, lengths: list[int], m: int, n: int) -> Case:
    """Grouped MXFP8 GEMM, ragged contraction (weight gradients): scales of 4 blocks start at ``cu[i] // 128 + i``."""
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    tiles = (total + 127) // 128 + len(lengths) - 1
    parts: list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]] = []
    for rows in (m, n):
        scales = torch.full((rows, tiles * 4), 0xFF, dtype=torch.uint8)
        payload, values = [], []
        for i, k in enumerate(lengths):
            q, s, v = _quantized(rows, k, generator)
            at = (int(cu[i]) // 128 + i) * 4
            scales[:, at : at + s.shape[1]] = s
            payload.append(q)
            values.append(v)
        # the ragged operands keep M or N contiguous
        parts.append((torch.cat(payload, 1).view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn), scales, values))
    reference = torch.stack([parts[0][2][i] @ parts[1][2][i].T for i in range(len(lengths))])

    def call() -> Any:
        from quack.blockscaled.operand import BlockScaledOperand
        from quack.gemm_interface import gemm

        a, b = (BlockScaledOperand.from_parts(q, _pack_scales(s), "mxfp8") for q, s, _ in parts)
        return gemm(a, b.mT, cu_seqlens_k=cu, tuned=False)

    return Case(
        f"quack mxfp8 varlen_k {lengths} {m}x{n}",
        arch,
        None,
        call,
        lambda v: close("out", v, reference, 2**-8 * reference.abs().max().item()),
    )


def quack_quantized_output(arch: str, m: int, n: int, k: int) -> Case:
    """Dense MXFP8 GEMM whose epilogue quantizes: payload and scales against the quantizer applied to the fp32 product."""
    generator = torch.Generator().manual_seed(0)
    (a, av), (b, bv) = _mx_operand(m, k, generator), _mx_operand(n, k, generator)
    reference = av @ bv.T

    def call() -> Any:
        from quack.gemm_interface import gemm

        return gemm(a, b.mT, out_dtype="mxfp8", tuned=False)

    def verify(value: Any) -> None:
        got = value.dequantize(torch.float32)
        blocks = reference.view(m, n // 32, 32)
        # E4M3 keeps 3 mantissa bits: half a unit is 2^-4 of an element; small elements of a block are subnormal, at
        # most half of 2^-9 scale units, and the scale is at most 2 * amax / 448
        bound = blocks.abs() * 2.0**-4 + blocks.abs().amax(-1, keepdim=True) * (2.0**-9 / 448) * 2
        error = (got.view(m, n // 32, 32) - blocks).abs()
        worst = (error - bound).max().item()
        assert worst <= 0, f"quantized output exceeds half a unit by {worst:.4g}"

    return Case(f"quack mxfp8 gemm, quantized output {m}x{n}x{k}", arch, None, call, verify)
