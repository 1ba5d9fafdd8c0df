"""The producers of MXFP8 operands against their limits and against what they replace: norm + quantize, projection + quantize, scales.

    python -m benchmarks.kernels_producers [WORK ...] [--rounds N] [--out FILE.json]

A work is timed with all its variants in turn, in one process, on random data. ``bytes`` are those that it must move (inputs read once,
results written once), so the share is of the device's own copy, timed beside it on as many bytes. Before a work is timed, a small one of
its kind must agree with the definition: no figure is printed for a kernel that is wrong.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import format_table, say, time_interleaved, write_record

HEAD_DIM = 128
COPY = "copy"
"""Variant of every work: a copy that reads and writes as many bytes together as the work must move."""


@dataclass(frozen=True)
class Work:
    """One row group of the table. ``variants``: name to call, ``ours`` first; ``flops``: of its products, 0 for none."""

    name: str
    variants: dict[str, Callable[[], object]]
    bytes: float
    flops: float = 0.0
    notes: dict[str, float] = field(default_factory=dict)


def lengths_of(tokens: int, longest: int = 4096) -> Tensor:
    """Sequence lengths, uniform in 1 … ``longest``, that add up to ``tokens``; on the host."""
    draw = torch.randint(1, longest + 1, (4 * tokens // longest + 8,), generator=torch.Generator().manual_seed(1))
    ends = draw.cumsum(0)
    count = int((ends < tokens).sum())
    return torch.cat([draw[:count], torch.tensor([tokens - int(draw[:count].sum())])])


def offsets_of(tokens: int, device: torch.device) -> Tensor:
    """int32 offsets of jagged sequences."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths_of(tokens).cumsum(0)]).to(device, torch.int32)


def events(tokens: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """BF16 rows with a common mean, ``[tokens, columns]``, and int32 offsets of jagged sequences."""
    x = torch.empty(tokens, columns, dtype=torch.bfloat16, device=device)
    for piece in x.split(1 << 19):
        piece.normal_(0.3, 1.0)
    return x, offsets_of(tokens, device)


def copy_of(count: float, device: torch.device) -> Callable[[], object]:
    """A copy that moves ``count`` bytes, half of them read."""
    source = torch.empty(int(count) // 2 // 4, dtype=torch.int32, device=device).fill_(7)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def norm_bytes(tokens: int, columns: int, sequences: int, *, block: int, centred: bool, keep: bool, copied: bool) -> float:
    """Bytes of ``rmsnorm_quantize``: rows, codes, ``rstd``, scales; centred also 64 rows a sequence and its two sums."""
    count = tokens * ((4.0 if copied else 3.0) * columns + 4)
    count += tokens // 32 * (columns // block) if block else 0
    count += sequences * columns * (64 * 2 + 12) if centred else 0
    return count + (tokens * 2.0 * columns if keep else 0)


def quack_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 rows and ``rstd`` by Quack's kernel."""
    from quack.rmsnorm import rmsnorm_fwd

    rows, _, rstd = rmsnorm_fwd(x, weight, eps=1e-6, store_rstd=True)
    return rows, rstd


def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 rows and ``rstd`` as one would write them."""
    xf = x.float()
    rstd = (xf.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
    return (xf * rstd * weight).to(torch.bfloat16), rstd[:, 0]


def norm_and_cast(x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 of the rows times ``inverse`` (a power of two a column), and ``rstd``."""
    xf = x.float()
    rstd = (xf.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
    return (xf * rstd * weight * inverse).clamp(-448, 448).to(torch.float8_e4m3fn), rstd[:, 0]


def cast(x: Tensor, inverse: Tensor) -> Tensor:
    """E4M3 of the rows times ``inverse``."""
    return (x.float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)


def centre_and_cast(x: Tensor, mean: Tensor, sequence: Tensor, inverse: Tensor) -> Tensor:
    """E4M3 of the rows less their sequence's row of ``mean``, times ``inverse``. ``sequence``: a row's, int64."""
    return ((x.float() - mean[sequence]) * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)


def cast_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 of 32 x 32 blocks counted from the first row, and their E8M0: a power of two that takes a block's largest magnitude to at most
    448."""
    blocks = x.view(-1, 32, x.shape[1] // 32, 32).float()
    byte = ((blocks.abs().amax(dim=(1, 3)) / 448).view(torch.int32) + 0x7FFFFF) >> 23
    inverse = ((254 - byte) << 23).view(torch.float32)
    return (blocks * inverse[:, None, :, None]).to(torch.float8_e4m3fn).view(x.shape), byte.to(torch.uint8)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of rows and what belongs to them or to columns, compiled once a width for any number of rows. Unless dynamo is told that
    widths are constants, it makes them variables at the second one, and the kernel takes three times as long."""
    made = torch.compile(function)

    def call(x: Tensor, *others: Tensor) -> Any:
        for tensor in (x, *others):
            of_rows = tensor.shape[0] == x.shape[0]
            (torch._dynamo.mark_dynamic if of_rows else torch._dynamo.mark_static)(tensor, 0)
            for dim in range(1, tensor.dim()):
                torch._dynamo.mark_static(tensor, dim)
        return made(x, *others)

    return call


def norm_work(tokens: int, columns: int, device: torch.device, *, kind: str) -> Work:
    """``kind``: "static" (the module's blocks, centred), "static plain" (not centred), "copied" (centred, codes with tokens innermost
    too), "kept" (centred, BF16 of the rows too), "square"."""
    from fused_ops import rmsnorm_center_quantize, rmsnorm_quantize
    from lp_fa4.common.sequence_vectors import sample_means
    from lp_fa4.sm90.quantize import quantize

    centred, keep, heads = kind in ("static", "kept", "copied"), kind == "kept", columns // HEAD_DIM if kind == "copied" else 0
    block = (32, 32) if kind == "square" else (0, HEAD_DIM)
    x, offsets = events(tokens, columns, device)
    weight = torch.rand(columns, device=device) + 0.5

    def ours() -> object:
        if centred:
            return rmsnorm_center_quantize(x, weight, offsets=offsets, block=block, keep=keep, copy_heads=heads)
        return rmsnorm_quantize(x, weight, offsets=offsets, block=block)

    def unfused(normed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> object:
        """Norm to BF16, then a pass of its own that centres and quantizes."""
        rows = normed(x, weight)[0].view(tokens, -1, HEAD_DIM)
        if not centred:
            return quantize(rows, offsets, block=32)
        return quantize(rows, offsets, block=32, means=sample_means([rows], offsets)[0], sums=True, order="accumulator" if heads else None)

    width = block[1] if block[0] else 0
    count = norm_bytes(tokens, columns, offsets.shape[0] - 1, block=width, centred=centred, keep=keep, copied=heads > 0)
    variants: dict[str, Callable[[], object]] = {"rmsnorm_quantize": ours, "norm, then quantize": lambda: unfused(quack_norm)}
    inverse = torch.full((columns,), 8.0, device=device)
    if kind in ("static", "square"):
        variants["compiled norm, then quantize"] = lambda: unfused(compiled(norm))
        sequence = torch.repeat_interleave(offsets.diff().long()) if centred else offsets

        def none_of_ours() -> object:
            """Quack's norm, then what ``torch.compile`` makes of the pass; of ours the 64 rows' mean alone, and no sums."""
            rows = quack_norm(x, weight)[0]
            if not centred:
                return compiled(cast_squares)(rows)
            mean = sample_means([rows.view(tokens, -1, HEAD_DIM)], offsets)[0]
            return compiled(centre_and_cast)(rows, mean.view(-1, columns), sequence, inverse)

        variants["norm, then a compiled quantize"] = none_of_ours
    if kind == "static plain":
        variants["norm and cast, compiled together"] = lambda: compiled(norm_and_cast)(x, weight, inverse)
    variants[COPY] = copy_of(count, device)
    return Work(f"rmsnorm_quantize {kind}, {tokens / 1e6:g} M x {columns}", variants, count, 6.0 * tokens * columns)


def product_bytes(tokens: int, contracted: int, columns: int, element: int, parts: int) -> float:
    """Bytes of ``gemm_quantize`` with static exponents: x of ``element`` bytes, weights, codes."""
    return tokens * (float(element) * contracted + columns) + parts * element * contracted * columns


def product_work(tokens: int, columns: int, device: torch.device, *, form: str) -> Work:
    """A square projection of normed events, exponents given. ``form``: "pair" (E4M3, weight hi + lo, in bounded rows), "single" (hi alone),
    "bf16"."""
    from fused_ops import gemm_quantize
    from fused_ops.operands import split_e4m3
    from lp_fa4.mx import MXTensor
    from lp_fa4.sm90.quantize import quantize

    x, offsets = events(tokens, columns, device)
    weight = torch.randn(columns, columns, device=device) / columns**0.5
    rounded, exponent = weight.bfloat16(), torch.full((columns // HEAD_DIM,), 127 - 4, dtype=torch.uint8, device=device)
    codes = torch.empty(tokens, columns, dtype=torch.uint8, device=device)
    for target, source in zip(codes.split(1 << 19), x.split(1 << 19), strict=True):
        target.copy_((source * 16).to(torch.float8_e4m3fn).view(torch.uint8))
    scale = torch.full((1, columns // HEAD_DIM), 127 - 4, dtype=torch.uint8, device=device)
    x8 = MXTensor.from_bytes(codes, scale, (0, HEAD_DIM), offsets)
    blocks = ("in bounded rows", (32, columns), True), ("in blocks", (32, HEAD_DIM), False)
    weights = {name: split_e4m3(weight, block, bounded=bounded) for name, block, bounded in blocks}

    def ours(kind: str = "in bounded rows") -> object:
        if form == "bf16":
            return gemm_quantize(x, rounded, (0, HEAD_DIM), offsets=offsets, exponent=exponent)
        return gemm_quantize(x8, weights[kind] if form == "pair" else weights[kind][0], (0, HEAD_DIM), exponent=exponent)

    def unfused() -> object:
        return quantize((x @ rounded.t()).view(tokens, -1, HEAD_DIM), offsets, block=32)

    parts = 2 if form == "pair" else 1
    count = product_bytes(tokens, columns, columns, 2 if form == "bf16" else 1, parts)
    variants: dict[str, Callable[[], object]] = {"gemm_quantize": ours, "cuBLAS BF16, then quantize": unfused}
    inverse = torch.full((columns,), 16.0, device=device)
    variants["cuBLAS BF16, then a compiled cast"] = lambda: compiled(cast)(x @ rounded.t(), inverse)
    variants["cuBLAS BF16 alone"] = lambda: x @ rounded.t()
    if form != "bf16":
        variants["weight in blocks, FP32 sums"] = lambda: ours("in blocks")
    variants[COPY] = copy_of(count, device)
    return Work(f"gemm_quantize {form}, {tokens / 1e6:g} M x {columns}", variants, count, 2.0 * parts * tokens * columns**2)


def both_work(tokens: int, columns: int, device: torch.device, *, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Norm and projection as the module calls them, exponents given: in one kernel, and in two, by either form of the key projection.
    ``dtype``: of the events."""
    from fused_ops import gemm_quantize, projection_weight, rmsnorm_center_quantize, rmsnorm_project

    x, offsets = events(tokens, columns, device)
    x = x.to(dtype)
    gain = torch.rand(columns, device=device) + 0.5
    weight = torch.randn(columns, columns, device=device) / columns**0.5
    heads, block = columns // HEAD_DIM, (0, HEAD_DIM)
    whole = projection_weight(weight, gain, heads, "bf16", (32, HEAD_DIM), centred=True)
    split = projection_weight(weight, gain, heads, "e4m3x2", (32, columns), centred=True, bounded=True)

    def codes() -> object:
        norm = rmsnorm_center_quantize(x, gain, offsets=offsets, block=block)
        return norm, gemm_quantize(norm.xn, split.weight, block, exponent=split.bound)

    def rows() -> object:
        norm = rmsnorm_center_quantize(x, gain, offsets=offsets, block=block, keep=True)
        assert norm.normed is not None
        return norm, gemm_quantize(norm.normed, whole.rounded, block, offsets=offsets, exponent=whole.bound)

    count = norm_bytes(tokens, columns, offsets.shape[0] - 1, block=0, centred=True, keep=False, copied=False) + tokens * 1.0 * columns
    count += tokens * (x.element_size() - 2.0) * columns
    variants: dict[str, Callable[[], object]] = {
        "rmsnorm_project": lambda: rmsnorm_project(x, gain, whole.rounded, whole.bound, offsets=offsets),
        "norm, then E4M3 hi + lo": codes,
        "norm with BF16 rows, then BF16": rows,
        COPY: copy_of(count, device),
    }
    name = "rmsnorm_project" if dtype == torch.bfloat16 else f"rmsnorm_project of {str(dtype).removeprefix('torch.')}"
    return Work(f"{name}, {tokens / 1e6:g} M x {columns}", variants, count, 2.0 * tokens * columns**2)


def scale_bytes(tokens: int, columns: int, sequences: int) -> float:
    """Bytes of ``scatter_scales`` for one axis: the compact grid of 32 x 32 blocks, whole 128 x 4 atoms for every tile of 128 tokens."""
    grid, tiles = (tokens // 32 + sequences) * (columns / 32), tokens // 128 + sequences
    return grid + 4.0 * tiles * -(-columns // 128) * 128


def scale_work(tokens: int, columns: int, device: torch.device) -> Work:
    """The compact scales of 32 x 32 blocks to the swizzled buffer of each axis, and back."""
    from fused_ops import gather_scales, scatter_scales
    from lp_fa4.mx import MXTensor, scale_rows

    offsets = offsets_of(tokens, device)
    grid = torch.randint(100, 140, (scale_rows(tokens, offsets), columns // 32), device=device).to(torch.uint8)
    x = MXTensor.from_bytes(torch.empty(tokens, columns, dtype=torch.uint8, device=device), grid, (32, 32), offsets)
    made, count = scatter_scales(x, 1), scale_bytes(tokens, columns, offsets.shape[0] - 1)
    variants: dict[str, Callable[[], object]] = {
        "scatter_scales, for a sum over columns": lambda: scatter_scales(x, 1),
        "scatter_scales, for a sum over tokens": lambda: scatter_scales(x, 0),
        "gather_scales": lambda: gather_scales(made, tokens, columns, offsets, axis=1),
        "scatter_scales in PyTorch": lambda: scatter_scales(x, 1, backend="reference"),
        COPY: copy_of(count, device),
    }
    return Work(f"scale_layout, {tokens / 1e6:g} M x {columns}", variants, count)


SIZES = [(millions, columns) for millions in (1.5, 6) for columns in (384, 512)]


def _works() -> dict[str, Callable[[torch.device], Work]]:
    makers: dict[str, Callable[[int, int, torch.device], Work]] = {}
    for kind in ("static", "copied", "square", "static plain", "kept"):
        makers[f"norm-{kind.replace(' ', '-')}"] = partial(norm_work, kind=kind)
    for form in ("pair", "single", "bf16"):
        makers[f"gemm-{form}"] = partial(product_work, form=form)
    makers["both"] = both_work
    makers["both-float32"] = partial(both_work, dtype=torch.float32)
    makers["scale"] = scale_work
    made: dict[str, Callable[[torch.device], Work]] = {}
    for name, maker in makers.items():
        only = {
            "norm-static-plain": SIZES[:1],
            "norm-kept": SIZES[:1],
            "both-float32": SIZES[:1],
            "both": [size for size in SIZES if size[1] == 384],
        }
        for millions, columns in only.get(name, SIZES):
            made[f"{name}-{columns}-{millions:g}"] = partial(maker, int(millions * 1e6), columns)
    return made


WORKS: dict[str, Callable[[torch.device], Work]] = _works()
"""Name on the command line to what makes the work."""


def check(device: torch.device) -> None:
    """Small problems of every kind against the definitions; a wrong kernel is not timed."""
    from fused_ops import rmsnorm_center_quantize

    x, offsets = events(5000, 384, device)
    weight = torch.rand(384, device=device) + 0.5
    for block in ((32, 32), (0, HEAD_DIM)):
        mine = rmsnorm_center_quantize(x, weight, offsets=offsets, block=block)
        theirs = rmsnorm_center_quantize(x, weight, offsets=offsets, block=block, backend="reference")
        apart = float((mine.xn.codes != theirs.xn.codes).float().mean())
        if apart > 2e-3:
            raise RuntimeError(f"rmsnorm_quantize: {apart:.3g} of the codes differ from the definition's: not timed")
    from fused_ops import gemm_quantize, rmsnorm_project
    from fused_ops.operands import split_e4m3

    weight = torch.randn(384, 384, device=device) / 20
    exponent = torch.zeros(3, dtype=torch.int32, device=device)
    normed = rmsnorm_center_quantize(x, torch.ones(384, device=device), offsets=offsets, block=(0, HEAD_DIM)).xn
    made = [
        rmsnorm_project(x, torch.ones(384, device=device), weight.bfloat16(), exponent, offsets=offsets, backend=b)
        for b in ("auto", "reference")
    ]
    for mine, theirs, most in zip(*((m.norm.xn, m.product) for m in made), (1e-2, 0.1), strict=True):  # FP16 rows beside BF16 ones
        apart = float((mine.codes != theirs.codes).float().mean())
        if apart > most:
            raise RuntimeError(f"rmsnorm_project: {apart:.3g} of the codes differ from the definition's: not timed")
    pair = split_e4m3(weight, (32, 384), bounded=True)
    for left, right in ((normed, pair), (normed, pair[0]), (x, weight.bfloat16())):
        places = dict(offsets=offsets) if isinstance(left, Tensor) else {}
        codes = [gemm_quantize(left, right, (0, HEAD_DIM), exponent=exponent, backend=b, **places).codes for b in ("auto", "reference")]
        apart = float((codes[0] != codes[1]).float().mean())
        if apart > (1e-2 if isinstance(right, Tensor) else 3e-2):  # sums in FP16
            raise RuntimeError(f"gemm_quantize: {apart:.3g} of the codes differ from the definition's: not timed")


def rows_of(work: Work, rounds: int, device: torch.device) -> list[dict]:
    """Time one work: a dict for each variant."""
    times = time_interleaved(work.variants, device, warmup=2, rounds=rounds)
    ours, copy = next(iter(work.variants)), times[COPY].median
    return [
        dict(
            work=work.name, variant=name, ms=t.median, best_ms=t.best, bytes=work.bytes, tb_per_s=work.bytes / t.median / 1e9,
            tflops=work.flops / t.median / 1e9, share_of_copy=copy / t.median if name == ours else None,
            ratio=t.median / times[ours].median, notes=work.notes,
        )
        for name, t in times.items()
    ]  # fmt: skip


def measure(names: list[str], rounds: int, device: torch.device) -> Iterator[list[dict]]:
    """Rows of each work named."""
    check(device)
    for name in names:
        yield rows_of(WORKS[name](device), rounds, device)
        torch.cuda.empty_cache()


def table(rows: list[dict]) -> str:
    """What is printed."""

    def percent(share: float | None) -> str | None:
        return None if share is None else f"{100 * share:.0f}%"

    def cells(r: dict) -> tuple:
        numbers = (f"{r['ms']:.3f}", f"{r['tb_per_s']:.2f}", f"{r['tflops']:.0f}")
        return r["work"], r["variant"], *numbers, percent(r["share_of_copy"]), f"{r['ratio']:.2f}"

    return format_table(("work", "variant", "ms", "TB/s", "TFLOP/s", "of copy", "time over ours"), map(cells, rows))


def command(name: str, text: str | None, works: Collection[str], measure: Callable[..., Iterator[list[dict]]], arguments: list[str]) -> int:
    """The command line of a table of works: ``[WORK ...] [--rounds N] [--out FILE]``; ``measure`` yields their rows."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    parser.add_argument("works", nargs="*", metavar="WORK", help=", ".join(works))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", default=None)
    options = parser.parse_args(arguments)
    names = options.works or list(works)
    unknown = [work for work in names if work not in works]
    if unknown:
        parser.error(f"{unknown} unknown; known are {', '.join(works)}")
    device, rows = torch.device("cuda", 0), []
    for made in measure(names, options.rounds, device):
        rows += made
        say(f"{made[0]['work']}: {made[0]['ms']:.3f} ms")
        if options.out:
            write_record(options.out, name, {"works": names, "rounds": options.rounds}, rows, device)
    print(table(rows))
    return 0


def main(arguments: list[str]) -> int:
    """Command line; see the module's text."""
    return command("kernels_producers", __doc__, WORKS, measure, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
