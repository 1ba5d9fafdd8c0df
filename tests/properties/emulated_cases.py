"""Cases of emulated kernels for ``tests.emulator.worker`` (``Worker.call``): launches of very many samples, and long uniform attention."""

from collections.abc import Callable

import torch

from lp_fa4 import flash_attn_varlen_func, quantize_mx
from lp_fa4.compile import compile_count
from tests.emulator.ours import BACKENDS, chosen, host
from tests.properties.emulated import emulating


def launches(arch: str, samples: list[int]) -> dict[str, dict[str, list]]:
    """Of each operation: grids of all its launches for so many samples, two of which have an event, and how many kernels had been compiled
    after each number of samples. The launches are recorded, not run."""
    from tests.emulator import api

    found: dict[str, dict[str, list]] = {}
    with chosen(arch), host(arch, 2):
        for count in samples:
            for name, call in _calls(count, BACKENDS[arch]).items():
                _, made = api.record(call, arch)
                entry = found.setdefault(name, {"grids": [], "compiled": []})
                entry["grids"] += [list(launch.grid) for launch, _ in made]
                entry["compiled"].append(len(made) and compile_count())
    return found


def _calls(samples: int, backend: str) -> dict[str, Callable[[], object]]:
    from fused_ops import gemm_quantize, rmsnorm_center_quantize, scatter_scales

    offsets = torch.zeros(samples + 1, dtype=torch.int32)
    offsets[samples // 3 + 1 :] += 1
    offsets[samples:] += 1
    x, gain = torch.randn(2, 64).bfloat16(), torch.ones(64)
    rows = quantize_mx(torch.randn(2, 64), offsets=offsets)
    weight = quantize_mx(torch.randn(96, 64))
    q, k, v = (torch.randn(2, heads, 64).bfloat16().requires_grad_() for heads in (2, 1, 1))

    def attention() -> None:
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, 1, 1, deterministic=True, backend=backend)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))

    return {
        "rmsnorm_center_quantize": lambda: rmsnorm_center_quantize(x, gain, 1e-6, offsets, backend=backend),
        "gemm_quantize": lambda: gemm_quantize(rows, weight, backend=backend),
        "scatter_scales": lambda: scatter_scales(rows, 1, backend=backend),
        "flash_attn_varlen_func": attention,
    }


def no_samples(arch: str) -> dict[str, list]:
    """Drop-in, module and all, of no samples and three spare rows of NaN: shapes of the results. Nothing is launched for nothing."""
    from tests.properties.emulated import place_of
    from tests.properties.subjects import Choices, subjects_at

    found = {}
    for name, subject in subjects_at(place_of(arch, True)).items():
        if subject.name in ("PMA", "PMA post"):
            continue  # one module's kernels for weights, which are launched, take seconds here
        parts, shared = subject([], 3, Choices(dtype=torch.bfloat16))
        assert parts == [] and not any(x.any() for x in shared.values()), name
        found[name] = sorted(shared)
    return found


def uniform(arch: str, keys: int) -> dict[str, float]:
    """Bias of dV, relative, where every key has the same weight and dO a mean: what a fixed scale on P = 1 / keys would lose."""
    g = torch.Generator().manual_seed(0)
    q = torch.zeros(16, 2, 64).bfloat16()
    k, v = (torch.randn(keys, 1, 64, generator=g).bfloat16() for _ in range(2))
    dout = (1 + torch.randn(16, 2, 64, generator=g)).bfloat16()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = [torch.tensor([0, n], dtype=torch.int32) for n in (16, keys)]
    with emulating(arch):
        out = flash_attn_varlen_func(*leaves, *offsets, 16, keys, deterministic=True, backend=BACKENDS[arch])
        dv = torch.autograd.grad(out, leaves, dout)[2]
    truth = (dout.double().sum((0, 1)) / keys).expand(keys, 1, 64)
    return {"bias": float((dv.double() * truth).sum() / truth.square().sum()) - 1.0}
