"""The consumer of MXFP8 gradients against its limits and against the BF16 path: GEMM + norm backward and the weight gradient.

    python -m benchmarks.kernels_fused [WORK ...] [--rounds N] [--out FILE.json]

``python -m benchmarks kernels`` times it, and the producers, beside the attention kernels (:func:`run_works`).

Table and protocol are those of ``benchmarks.kernels_producers``. What it replaces, in BF16: ``dv += dk @ w_k`` by cuBLAS in place (one pass
less than a product and a sum, which is what autograd makes of a module and has a row of its own), Quack's RMSNorm backward or a compiled
one, and ``dk^T @ xn`` by cuBLAS. Its dK, dV and xn are BF16 already.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from benchmarks import kernels_producers
from benchmarks.kernels_producers import COPY, HEAD_DIM, Work, copy_of, events, rows_of
from lp_fa4.mx import MXTensor, scale_rows


def codes(tokens: int, columns: int, block: tuple[int, int], offsets: torch.Tensor, exponent: int) -> MXTensor:
    """Random codes; exponents around ``exponent``, one for each block."""
    made = torch.empty(tokens, columns, dtype=torch.uint8, device=offsets.device)
    for piece in made.split(1 << 19):
        piece.copy_((torch.randn(piece.shape, device=made.device) * 64).to(torch.float8_e4m3fn).view(torch.uint8))
    shape = (scale_rows(tokens, offsets) if block[0] else 1, columns // block[1])
    scale = torch.randint(exponent + 125, exponent + 130, shape, device=made.device).to(torch.uint8)
    return MXTensor.from_bytes(made, scale, block, offsets)


def bytes_of(tokens: int, columns: int, sequences: int) -> dict[str, float]:
    """Bytes that must move: for dx and the norm, for dW, for both as two kernels."""
    scales = tokens / 32 * (columns / 32)
    first = tokens * (columns + columns + 2.0 * columns + 2.0 * columns + 4) + 2 * scales + 4.0 * sequences * columns
    second = tokens * 2.0 * columns + scales
    return {"input": first, "weight": second, "both": first + second}


@lru_cache(maxsize=1)
def compiled_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """RMSNorm backward as one would write it, compiled for each shape: one kernel for any width is slower than a width's own."""

    def norm(dxn: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xhat, d = x.float() * rstd[:, None], dxn.float()
        scaled = d * gain
        dx = rstd[:, None] * (scaled - xhat * (scaled * xhat).mean(dim=1, keepdim=True))
        return dx.to(torch.bfloat16), (d * xhat).sum(0)

    return torch.compile(norm, dynamic=False)


def backward_work(tokens: int, columns: int, device: torch.device) -> Work:
    """The module's call: square blocks of dK and dV, static blocks of xn, a mean of dV per sequence."""
    from fused_ops import gemm_norm_backward

    x, offsets = events(tokens, columns, device)
    sequences = offsets.shape[0] - 1
    gain = torch.rand(columns, device=device) + 0.5
    w = (torch.randn(columns, columns, device=device) / columns**0.5).bfloat16()
    rstd = torch.empty(tokens, device=device)
    for rows, out in zip(x.split(1 << 18), rstd.split(1 << 18), strict=True):
        out.copy_(torch.rsqrt(rows.float().square().mean(-1) + 1e-6))
    dk, dv = (codes(tokens, columns, (32, 32), offsets, -6) for _ in range(2))
    xn = codes(tokens, columns, (0, HEAD_DIM), offsets, -6)
    mean = torch.randn(sequences, columns, device=device)
    dk16, dv16, xn16 = (m.payload.to(torch.bfloat16) for m in (dk, dv, xn))

    def quack_norm() -> object:
        from quack.rmsnorm import rmsnorm_bwd

        return rmsnorm_bwd(x, gain, dv16, rstd)

    def product() -> object:
        return dv16.addmm_(dk16, w, beta=0.5, alpha=2**-6)  # 0.5: dv stays bounded over the rounds

    def weight() -> object:
        return dk16.t() @ xn16

    def by_autograd() -> object:
        from quack.rmsnorm import rmsnorm_bwd

        total = (dk16 @ w).add_(dv16)
        return rmsnorm_bwd(x, gain, total, rstd), weight()

    def whole(norm: Callable[[], object]) -> Callable[[], object]:
        return lambda: (product(), norm(), weight())

    def ours(*needs: bool) -> Callable[[], object]:
        assert len(needs) == 3  # dx, dnorm_weight, dw_k
        return lambda: gemm_norm_backward(dk, dv, w, x, gain, rstd, xn, dv_mean=mean, needs=needs)

    count = bytes_of(tokens, columns, sequences)
    variants: dict[str, Callable[[], object]] = {
        "gemm_norm_backward": ours(True, True, True),
        "  dx and norm alone": ours(True, True, False),
        "  dW alone": ours(False, False, True),
        "BF16: cuBLAS, Quack norm": whole(quack_norm),
        "BF16: cuBLAS, a sum, Quack norm": by_autograd,
        "BF16: cuBLAS, compiled norm": whole(lambda: compiled_norm()(dv16, x, rstd, gain)),
        "  BF16 dv += dk w": product,
        "  BF16 Quack norm": quack_norm,
        "  BF16 dW": weight,
        COPY: copy_of(count["both"], device),
    }
    notes = {f"bytes of {name}": value for name, value in count.items()}
    return Work(f"gemm_norm_backward, {tokens / 1e6:g} M x {columns}", variants, count["both"], 4.0 * tokens * columns * columns, notes)


def _works() -> dict[str, Callable[[torch.device], Work]]:
    made: dict[str, Callable[[torch.device], Work]] = {}
    for millions, columns in ((1.5, 384), (1.5, 512), (6, 384), (6, 512)):
        made[f"backward-{columns}-{millions:g}"] = partial(backward_work, int(millions * 1e6), columns)
    return made


WORKS: dict[str, Callable[[torch.device], Work]] = _works()
"""Name on the command line to what makes the work."""


def check(device: torch.device, columns: int) -> None:
    """A small problem of this kind against the reference; a wrong kernel is not timed."""
    from fused_ops import gemm_norm_backward

    tokens = 5000
    x, offsets = events(tokens, columns, device)
    dk, dv = (codes(tokens, columns, (32, 32), offsets, -6) for _ in range(2))
    xn = codes(tokens, columns, (0, HEAD_DIM), offsets, -6)
    w, gain = (torch.randn(columns, columns, device=device) / columns**0.5).bfloat16(), torch.rand(columns, device=device) + 0.5
    rstd, mean = torch.rsqrt(x.float().square().mean(-1) + 1e-6), torch.randn(offsets.shape[0] - 1, columns, device=device)
    mine, theirs = (gemm_norm_backward(dk, dv, w, x, gain, rstd, xn, dv_mean=mean, backend=b) for b in ("auto", "reference"))
    for name, a, b in zip(mine._fields, mine, theirs, strict=True):
        assert a is not None and b is not None
        error = float((a.double() - b.double()).norm() / b.double().norm())
        # dx is BF16; sums of FP8 products have 13 bits, of the products of dk and the weight 11
        if not error < {"dx": 4e-3, "dw_k": 2.0**-11, "dnorm_weight": 2.0**-10}[name]:
            raise RuntimeError(f"gemm_norm_backward: {name} differs from the reference by {error:.3g}: not timed")


def measure(names: list[str], rounds: int, device: torch.device) -> Iterator[list[dict]]:
    """Rows of each work named."""
    checked: set[int] = set()
    for name in names:
        columns = int(name.split("-")[1])
        if columns not in checked:
            check(device, columns)
            checked.add(columns)
        yield rows_of(WORKS[name](device), rounds, device)
        torch.cuda.empty_cache()


def all_works() -> list[str]:
    """Names of the producers' and the consumers' works."""
    return [*kernels_producers.WORKS, *WORKS]


def run_works(names: Sequence[str], rounds: int, device: torch.device) -> Iterator[list[dict]]:
    """Rows of works of either kind, producers first."""
    for known, timed in ((kernels_producers.WORKS, kernels_producers.measure), (WORKS, measure)):
        chosen = [n for n in names if n in known]
        if chosen:
            yield from timed(chosen, rounds, device)


def main(arguments: list[str]) -> int:
    """Command line; see the module's text."""
    return kernels_producers.command("kernels_fused", __doc__, WORKS, measure, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
