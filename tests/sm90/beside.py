"""The drop-in's forward with its quantize pass beside it against the same one after the other: every output, in the emulator."""

import importlib

import torch

from lp_fa4.config import DROP_IN


def call(batch: int, queries: int, keys: int, heads: int, dim: int, dtype: torch.dtype, odd: bool) -> tuple[torch.Tensor, ...]:
    """All that ``flash_attention_forward`` returns. ``odd``: elements that are not finite, blocks of one value, large and small ones."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, n, heads, dim, generator=g).to(dtype) for n in (queries, keys, keys))
    k, v = k + 0.5, v - 1.0
    if odd:
        k[0, 5, 0, 3], v[1, -1, 0, 7], q[1, 3, 0, 5] = torch.inf, torch.nan, torch.nan
        v[2, :128], k[2, :128, -1] = 1.5, 0.25
        k[1] *= 1000.0
        v[0, :128, -1] *= 1e-3
    offsets = [torch.arange(batch + 1) * n for n in (queries, keys)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return torch.ops.lp_fa4.flash_attention_forward(*flat, *offsets, queries, dim**-0.5, False, False, DROP_IN.key, "sm90", True)


def differences(
    arch: str, *, ctas: int, more: int, schedule: str, check: bool, dtype: str = "bfloat16", **shape: int
) -> dict[str, list[int]]:
    """Numbers of the outputs that differ by a bit. ``ctas``: that quantize; ``more``: for a while."""
    from tests.emulator.api import Schedule
    from tests.emulator.ours import chosen, emulated

    preparation, beside = (importlib.import_module(f"lp_fa4.sm90.{name}") for name in ("preparation", "quantize_beside"))
    kept, made = (preparation.beside_pays, beside.ctas_of, beside.everyone_of), []
    try:
        with chosen(arch), emulated(Schedule(schedule, 0), arch, check=check):
            for answer in (False, True):
                preparation.beside_pays = lambda *_, answer=answer: answer
                beside.ctas_of, beside.everyone_of = lambda *_: ctas, lambda *_: ctas + more
                made.append(call(dtype=getattr(torch, dtype), **shape))
    finally:
        preparation.beside_pays, beside.ctas_of, beside.everyone_of = kept
    pairs = enumerate(zip(*made, strict=True))
    return {"differ": [i for i, (a, b) in pairs if a.numel() and not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]}
