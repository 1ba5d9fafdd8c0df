"""Third-party cases that exist on Hopper only; see ``kernels.py``."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any
from unittest import mock

import torch

from . import kernels
from .kernels import Case, close


def quack_fp8_gemm(arch: str, m: int, n: int, k: int) -> Case:
    """E4M3 x E4M3 GEMM with BF16 output; operands are exact in E4M3, sums are FP32: one rounding to BF16."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    reference = x.float() @ w.float().T

    def call() -> Any:
        from quack.gemm_interface import gemm

        return gemm(x, w.T, out_dtype=torch.bfloat16, tuned=False)

    return Case(f"quack fp8 gemm {m}x{n}x{k}", arch, None, call, lambda v: close("out", v, reference, 2**-8 * reference.abs().max().item()))


def quack_rmsnorm(arch: str, m: int, n: int, blocks: int = 3) -> Case:
    """As ``kernels.quack_rmsnorm``; the backward, persistent, runs on few thread blocks that each take several rows."""
    case = kernels.quack_rmsnorm(arch, m, n)

    def call() -> Any:
        module = importlib.import_module("quack.rmsnorm")  # the package has a function of that name

        with mock.patch.object(module, "get_sm_count", lambda *_: blocks):
            return case.call()

    return dataclasses.replace(case, call=call)
