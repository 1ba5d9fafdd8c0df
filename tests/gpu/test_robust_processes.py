"""Several processes that compile into one cache folder, with other head dimensions and the same, one after another and at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, answer, environment

PROGRAM = """
import json, sys, torch
from lp_fa4 import mx_attention, mx_attention_backward, quantize_mx
dim = int(sys.argv[1])
g = torch.Generator("cuda").manual_seed(dim)
offsets = torch.tensor([0, 70, 70, 333], device="cuda")
q = quantize_mx(torch.randn(5, 2, dim, device="cuda", generator=g), token_dim=0)
k, v = (quantize_mx(torch.randn(333, 2, dim, device="cuda", generator=g), offsets=offsets, token_dim=0) for _ in range(2))
out, lse, result = mx_attention(q, k, v, shared_q=True, return_result=True, backend="sm90")
want, _ = mx_attention(q, k, v, shared_q=True, backend="reference")
assert float((out.float() - want.float()).norm()) < 0.1 * float(want.float().norm())
grads = mx_attention_backward(torch.ones_like(out), result, q, k, v, shared_q=True, deterministic=True, backend="sm90")
print(json.dumps([out.view(torch.int16).long().sum().item(), grads.dk.codes.long().sum().item(), grads.dv.codes.long().sum().item()]))
"""


def start(dim: int, folder: Path) -> subprocess.Popen:
    """A process with its caches in ``folder``."""
    caches = {name: str(folder) for name in ("CUTE_DSL_CACHE_DIR", "TMPDIR", "QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(dim)], env=environment(**caches), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.gpu
def test_one_cache_folder_for_many_processes(tmp_path):
    """Head dimensions 64 and 128 into an empty folder; then four at once, two of each, find what is there: the same bits."""
    first = {dim: answer(start(dim, tmp_path)) for dim in (64, 128)}
    together = [(dim, start(dim, tmp_path)) for dim in (64, 128, 64, 128)]
    for dim, process in together:
        assert answer(process) == first[dim]
