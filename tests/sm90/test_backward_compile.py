"""What ptxas makes of the backward's main kernel: no spill, no serialized wgmma, on a machine without a GPU.

ptxas serializes every wgmma of a function, without a word that the DSL shows, when registers run short or when an accumulator is read
where it cannot follow the group (C7512, C7514). The SASS tells: a wait for every product instead of one for every wait in the source.
"""

import itertools
import json

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytest.importorskip("triton", reason="its package carries the disassembler")

from tests.processes import lines

WAITS = 9
"""Waits in the source: two in each of the two kinds of step (three with FP16 sums), one at a segment's end, two for each half of dQ (for
all of it)."""

VARIANTS = [
    {},
    {"mxfp8": True, "deterministic": True},
    {"mxfp8": True, "dq_half": True, "cluster": True},
    {"shared": False, "long": True, "cluster": True},
    {"shared": False, "long": True, "causal": True, "centred": False, "suffix": True, "fold": True, "k_static": False, "v_static": False},
    {"shared": False, "long": True, "causal": True, "centred": False, "suffix": True, "mxfp8": True},
    {"shared": False, "long": True, "group": 4, "tiles": True, "whole": True, "jagged": True, "k_static": False, "v_static": False},
    {"shared": False, "long": True, "group": 4, "causal": True, "centred": False, "suffix": True, "dq_half": True},
    {"head_dim": 64, "shared": False, "fold": True, "k_static": False, "v_static": False, "dq_half": True},
    {"instead": True, "mxfp8": True, "dq_half": True, "dq_grouped": True},
    {"halves": True, "mxfp8": True},
    {"halves": True, "mxfp8": True, "dq_half": True, "dq_grouped": True},
    {"halves": True, "shared": False, "long": True, "mxfp8": True},
    {"halves": True, "shared": False, "long": True, "causal": True, "centred": False, "suffix": True, "mxfp8": True, "dq_half": True},
    {
        **{"halves": True, "shared": False, "long": True, "causal": True, "centred": False, "suffix": True},
        **{"group": 4, "recoded": True, "k_static": False, "v_static": False},
    },
    {
        **{"halves": True, "shared": False, "long": True, "group": 4, "recoded": True, "whole": True},
        **{"k_static": False, "v_static": False},
    },
    {
        **{"halves": True, "shared": False, "recoded": True, "whole": True, "jagged": True, "dq_half": True},
        **{"k_static": False, "v_static": False},
    },
    {"halves": True, "head_dim": 64, "shared": False, "deterministic": True},
]


def test_no_spill_and_no_serialized_wgmma(tmp_path):
    reports = lines("tests.sm90.backward_report", str(tmp_path), json.dumps(VARIANTS))
    assert [r["variant"] for r in reports] == VARIANTS
    for r in reports:
        assert r["stack"] == 0 and r["local"] == 0, r
        fewer = 8 * (r["variant"].get("head_dim") == 64) + 4 * r["variant"].get("halves", False)
        assert r["products"] == 32 - fewer, r
        assert r["waits"] == WAITS, r


def test_shared_memory_fits():
    """227 KB a CTA; the kernel would fail only at launch."""
    from lp_fa4.sm90.backward_layout import KEY_TILE, QUERY_TILE, BackwardSpec
    from lp_fa4.sm90.backward_main import HALF_REGISTERS, REGISTERS, THREADS, stages, staging_bytes

    for d, half, long, halves in itertools.product((64, 128), *[(False, True)] * 3):
        spec = BackwardSpec(head_dim=d, dq_half=half, long=long, halves=halves)
        a, b, buffers = stages(spec)
        codes = a * 3 * QUERY_TILE * d + b * QUERY_TILE * d + 2 * spec.key_stages * KEY_TILE * d + KEY_TILE * d + 2 * QUERY_TILE * KEY_TILE
        sums = buffers * spec.dq_tile_bytes // 2 + 8 * staging_bytes(spec)
        assert codes + sums + 4 * spec.stat_span[1] * a + 3072 <= 227 * 1024, spec
    # setmaxnreg deals out the registers of the launch: a split past them never returns
    for split in (REGISTERS, HALF_REGISTERS):
        assert (split[0] + 2 * split[1] + split[2]) * 128 <= 65536 // THREADS * THREADS


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_other_kernels_compile(dtype):
    from lp_fa4.sm90.backward_layout import PrepassSpec
    from lp_fa4.sm90.backward_postpass import compile_postpass
    from lp_fa4.sm90.backward_prepass import compile_prepass
    from lp_fa4.sm90.backward_suffix import compile_suffix

    default = PrepassSpec(128, True, False, True, True, True, 8, False, True)
    other = PrepassSpec(64, False, True, False, True, False, 8, True, False, dq_half=True, k_static=False, v_static=False, suffix=True)
    packed = PrepassSpec(128, True, False, True, True, True, 6, False, True, halves=True, align=True)
    for spec in (default, other, packed):
        compile_prepass("sm_90a", spec, dtype, spec is other)
    compile_suffix("sm_90a", 64, True, dtype)
    compile_postpass("sm_90a", 128, 1, False, True, True, False, dtype)
    compile_postpass("sm_90a", 64, 4, True, False, False, True, dtype, "bfloat16")
