"""Kernels that one process left on disk serve others: a training step with nothing to compile, the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, answer, environment

PROGRAM = """
import json, sys, time
import lp_fa4.compile
if sys.argv[1] == "stored":
    lp_fa4.compile.build = None  # nothing can be compiled
import torch
from modules import PMA
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
pma = PMA(128, 2, 5, backend="sm90", device="cuda")
events = torch.randn(200, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
begin = time.perf_counter()
out = pma(events, torch.tensor([0, 70, 70, 200], device="cuda"))
grads = torch.autograd.grad(out.square().sum(), [events, *pma.parameters()])
sums = [t.contiguous().view(torch.uint8).long().sum().item() for t in (out, *grads)]
print("seconds", time.perf_counter() - begin)
print(json.dumps(sums))
"""


def start(how: str, folder: Path) -> subprocess.Popen:
    more = {"LP_FA4_CACHE_DIR": str(folder), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, how], env=environment(**more), cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.gpu
def test_a_step_with_stored_kernels(tmp_path):
    first = answer(start("new", tmp_path))
    assert len(list(tmp_path.glob("*.o"))) > 8
    for process in [start("stored", tmp_path) for _ in range(2)]:
        assert answer(process) == first
