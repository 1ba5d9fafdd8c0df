"""Processes that compile into one cache folder, with other keys and with the same: each gets the kernel it asked for. No GPU: what is
compared is the machine code (``tests/gpu/test_robust_processes.py`` runs kernels)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, answer, environment

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")

PROGRAM = """
import hashlib, json, sys
import lp_fa4.compile
lp_fa4.compile.extra_options = f"--keep-cubin --dump-dir {sys.argv[2]}"
from fused_ops.scale_layout.kernel import _compile_gather_scales
dtype, axis = json.loads(sys.argv[1])
made = _compile_gather_scales("sm_90a", dtype, axis, dtype is None)
print(json.dumps(hashlib.sha256(made.artifacts.CUBIN).hexdigest()))
"""


def start(key: list, folder: Path, place: Path) -> subprocess.Popen:
    place.mkdir()
    caches = {name: str(folder) for name in ("CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(key), str(place)]
    return subprocess.Popen(command, env=environment(**caches), cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_one_cache_folder_for_many_processes(tmp_path):
    """Two keys one after the other, then both twice at once: the same code for the same key, other code for the other."""
    keys, cache = (["int32", 0], ["int64", 1]), tmp_path / "cache"
    cache.mkdir()
    first = [answer(start(key, cache, tmp_path / f"first{i}")) for i, key in enumerate(keys)]
    assert first[0] != first[1]
    together = [start(keys[i % 2], cache, tmp_path / f"again{i}") for i in range(4)]
    assert [answer(p) for p in together] == first * 2
