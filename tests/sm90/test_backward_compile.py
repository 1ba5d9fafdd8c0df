"""What ptxas makes of the backward's main kernel: no spill, no serialized wgmma, on a machine without a GPU.

ptxas serializes every wgmma of a function, without a word that the DSL shows, when registers run short or when an accumulator is read
where it cannot follow the group (C7512, C7514). The SASS tells: a wait for every product instead of one for every wait in the source.
"""

import json
import subprocess
import sys

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytest.importorskip("triton", reason="its package carries the disassembler")

WAITS = 9
"""Waits in the source: two in each of the three kinds of step, three at a segment's end (one with a single tile, two otherwise)."""

VARIANTS = [
    {},
    {"mxfp8": True, "deterministic": True},
    {"mxfp8": True, "dq_half": True, "cluster": True},
    {"shared": False, "long": True, "cluster": True},
    {"shared": False, "long": True, "causal": True, "centred": False, "fold": True, "k_static": False, "v_static": False, "mxfp8": True},
    {"shared": False, "long": True, "group": 4},
    {"head_dim": 64, "shared": False, "fold": True, "k_static": False, "v_static": False, "dq_half": True},
]


def test_no_spill_and_no_serialized_wgmma(tmp_path):
    command = [sys.executable, "-m", "tests.sm90.backward_report", str(tmp_path), json.dumps(VARIANTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [r["variant"] for r in reports] == VARIANTS
    for r in reports:
        assert r["stack"] == 0 and r["local"] == 0, r
        assert r["products"] == (42 if r["variant"].get("head_dim") == 64 else 54), r
        late = r["variant"].get("causal") and r["variant"].get("fold")  # S after dQ: one more
        assert r["waits"] == WAITS + bool(late), r


def test_shared_memory_fits():
    """227 KB a CTA; the kernel would fail only at launch."""
    from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE, STAT_FLOATS
    from lp_fa4.sm90.backward_main import A_STAGES, B_STAGES, REGISTERS, THREADS, staging_bytes

    for d in (64, 128):
        codes = A_STAGES * 3 * QUERY_TILE * d + B_STAGES * QUERY_TILE * d + 2 * 2 * KEY_TILE * d + KEY_TILE * d + 2 * QUERY_TILE * KEY_TILE
        small = 4 * STAT_FLOATS * A_STAGES + 8 * staging_bytes(d) + 2048
        assert codes + small <= 227 * 1024
    # setmaxnreg deals out the registers of the launch (168 a thread): a split past them never returns
    assert REGISTERS[0] * 128 + 2 * REGISTERS[1] * 128 <= 168 * THREADS


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_other_kernels_compile(dtype):
    from lp_fa4.sm90.backward_layout import PrepassSpec
    from lp_fa4.sm90.backward_postpass import compile_postpass
    from lp_fa4.sm90.backward_prepass import compile_prepass

    default = PrepassSpec(128, True, False, True, True, True, 8, False, True)
    other = PrepassSpec(64, False, True, False, False, False, 8, True, False, dq_half=True, k_static=False, v_static=False)
    for spec in (default, other):
        compile_prepass("sm_90a", spec, dtype, spec is other)
    compile_postpass("sm_90a", 128, 1, False, True, True, False, dtype)
    compile_postpass("sm_90a", 64, 4, True, False, False, True, dtype)
