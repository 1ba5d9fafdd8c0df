"""What ptxas makes of the Hopper forward and its companions, on a machine without a GPU.

The loop over whole tiles must stay what it was tuned to be: no spill, no serialized wgmma (ptxas then waits after every product, and
no message shows), no byte permutes between the scores and the FP8 operand, one exponential a score.
"""

import json

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytest.importorskip("triton", reason="its package carries the disassembler")

from lp_fa4.sm90.forward_config import PLAIN_TILES, ForwardSpec, order_of
from tests.processes import lines

VARIANTS = [
    {"head_dim": 128, "retries": False, "halves": True, "half_sums": True, "together": 2},
    {"head_dim": 128, "centred": False, "mean": False, "causal": True, "shared": False, "group": 4, "halves": True},
    {"head_dim": 128, "key_scale": 128, "value_scale": 128, "query_static": False, "shared": False, "retries": False, "halves": True},
    {
        **{"head_dim": 128, "centred": False, "mean": False, "causal": True, "shared": False, "query_static": False},
        **{"key_scale": 128, "value_scale": 128, "halves": True},
    },
    {"head_dim": 128, "key_scale": 32, "value_scale": 32, "query_static": False, "shared": False},
    {"head_dim": 128, "split_keys": 1024},
    {"head_dim": 128, "keep": False, "values": "plain", "retries": False, "halves": True, "half_sums": True, "together": 2},
    {"head_dim": 64, "key_scale": 128, "value_scale": 128, "query_static": False, "shared": False, "retries": False, "halves": True},
    {"head_dim": 64, "values": "plain", "retries": False, "halves": True, "half_sums": True, "together": 2},
]
for _v in VARIANTS:
    _v["lag"], _v["tied"] = order_of(_v["head_dim"], "causal" in _v, _v.get("value_scale", 0), "halves" in _v)
VARIANTS[0]["lag"] = 4
LOCAL = 64
"""Words parked outside the loop: once a work item."""
LOCAL_IN_LOOP = 4
INSTRUCTIONS = [466, 373, 417, 380, 607, 492, 466, 372, 395]
"""Of a warp, a tile (with ``half_sums`` of one that is a group by itself)."""
IN_TURN = 12
"""Exponentials that ptxas may place before the hand-over of the turn. 26 of 64: 5% slower; all: a quarter, and nothing else shows it."""


def test_main_loop(tmp_path):
    reports = lines("tests.sm90.forward_report", str(tmp_path), json.dumps(VARIANTS))
    assert [r["variant"] for r in reports] == VARIANTS
    for i, r in enumerate(reports):
        steps = r["variant"]["head_dim"] // 32 + 4  # k-steps of Q K and of P V
        resumes = r["variant"].get("split_keys", 0) > 0
        folded = r["variant"].get("value_scale", 0) == 32
        turned = {64: 4, 128: 8}[r["variant"]["head_dim"]] if r["variant"].get("values") == "plain" else 0
        turned *= PLAIN_TILES * ForwardSpec(128).stages  # the loop is written out for each buffer and stage
        assert r["turned"] == turned and r["turned_stores"] >= turned, r
        halves, together = r["variant"].get("halves", False), r["variant"].get("together", 1)
        loops = 2 + (together if together > 1 else 0)  # with FP16 scores: of whole tiles (groups, the rest), of cut ones
        assert r["products"] == 3 * steps + (steps - 4 if resumes else 0) + (loops * steps + steps - 4 if halves else 0), r
        assert r["waits"] == 6 + int(resumes) + (1 + 2 * loops if halves else 0), r
        assert r["loop_local"] <= LOCAL_IN_LOOP and r["local"] <= LOCAL, r
        assert r["loop"] <= INSTRUCTIONS[i] and r["loop_exp2_in_turn"] <= IN_TURN, r
        assert r["loop_exp2"] <= 64 + 16 and r["loop_conversions"] == 32, r
        assert r["loop_shuffles"] == (4 if folded else 0), r
        assert r["loop_permutes"] == (32 + int(r["variant"].get("key_scale", 0) > 0) if halves else 0), r


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_companions_compile(dtype):
    from lp_fa4.common import sequence_vectors
    from lp_fa4.sm90 import forward_merge, quantize, recode, transpose, worklist
    from lp_fa4.sm90.forward_config import FewSpec, ForwardSpec
    from lp_fa4.sm90.forward_few import _compile_few

    _compile_few("sm_90a", dtype, FewSpec(128, 8))
    _compile_few("sm_90a", dtype, FewSpec(64, 64, group=4, key_scale=32, value_scale=32, query_static=False, shared=False, values="plain"))
    for dim in (64, 128) if dtype == "int32" else (128,):  # offsets are read in one way, whatever the width of a head
        transpose._compile_transpose("sm_90a", dtype, dim, "accumulator")
        for static in (False, True):
            recode._compile_recode("sm_90a", dtype, dim, static)
        for x in ("bfloat16", "float16", "float32"):
            spec = quantize.QuantizeSpec(dim, x, dtype, 32, "accumulator", centred=True, sums=True, dots=True, group=2)
            quantize._compile_quantize("sm_90a", spec)
            sequence_vectors._compile_means("sm_90a", dtype, dim, x, x)
        sequence_vectors._compile_sum("sm_90a", dtype, dim)
        forward_merge._compile_merge("sm_90a", dtype, ForwardSpec(dim, split_keys=1024))
    for form in ((True, False, 0, False), (False, True, 0, False), (False, False, 1024, False), (False, False, 0, True)):
        worklist._compile_worklist("sm_90a", dtype, "int32", 128, *form)


def test_shared_memory_fits():
    """227 KB a CTA; the kernel would fail only at launch."""
    from lp_fa4.sm90.forward_config import PLAIN_TILES

    for dim, stages in ((64, 3), (128, 3)):
        operands = 2 * 128 * dim + (stages * 2 + PLAIN_TILES) * 128 * dim
        staging = 4 * 64 * dim * 2
        assert operands + staging + 2 * 2 * dim * 4 + 1024 <= 227 * 1024


def test_scale_of_p():
    """What the wide threshold needs: the row's first exponent of P is positive, and P's bound is the configuration's."""
    from lp_fa4.sm90.forward_config import ForwardSpec

    for blocks in (0, 32, 128):
        spec = ForwardSpec(128, value_scale=blocks)
        assert spec.p_log2 + spec.growth == spec.p_scale_log2 + spec.threshold and spec.p_log2 > 0


def test_compile_cache():
    """One compilation a key; a tensor in a key is refused."""
    import torch

    from lp_fa4 import compile as c
    from lp_fa4.common import sequence_vectors

    sequence_vectors._compile_sum("sm_90a", "int32", 64)
    before = c.compile_count()
    sequence_vectors._compile_sum("sm_90a", "int32", 64)
    assert c.compile_count() == before
    with pytest.raises(TypeError, match="compile key"):
        c.kernel_cache(lambda arch, x: x)("sm_90a", torch.zeros(1))
