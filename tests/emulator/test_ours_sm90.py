"""This project's Hopper kernels on small hostile shapes: right numbers and no race under every schedule."""

import os

import pytest

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "3"))
OURS = "tests.emulator.ours:"
LENGTHS = [0, 1, 31, 33, 0, 129, 300, 0]
JAGGED = [5, 0, 1, 130, 7, 33, 64, 2]
SHORT = [0, 1, 33, 0, 129, 0]

#: LSE where scores are FP16, or only their factor is: 2^-11 of scores (the GPU tests' bound)
FP16 = 4e-3

FORWARD = {
    "split keys": dict(lengths=[2100, 0, 1025, 5, 1024], queries=3, heads=2, kv_heads=1),
    "module": dict(lengths=SHORT, queries=33, int64=True, slack=9),
    "FP16 scores, tiles done again": dict(lengths=[650, 0, 97], queries=70, heads=1, kv_heads=1, bounded=True, score_std=2.0, lse=FP16),
    "FP16 scores, causal, head 64": dict(
        lengths=[40, 0, 257, 130], queries=[40, 7, 300, 129], shared=False, causal=True, dim=64, heads=1, kv_heads=1, bounded=True, lse=FP16
    ),
    "groups of 32, jagged": dict(lengths=LENGTHS, queries=JAGGED, shared=False, block=[32, 128], slack=3),
    "causal, grouped heads, head 64": dict(
        lengths=[40, 0, 257, 130],
        queries=[40, 7, 300, 129],
        shared=False,
        causal=True,
        dim=64,
        heads=2,
        kv_heads=1,
        block=[128, 64],
        lse=FP16,
    ),
    "groups of whole tiles, head 64": dict(lengths=[780, 5], queries=66, dim=64, heads=1, kv_heads=1, score_std=3.0, lse=FP16),
    "tiles of an exponent, FP16 scores": dict(lengths=[650], queries=70, heads=1, kv_heads=1, block=[128, 128], bounded=True, lse=FP16),
    "sums that leave FP16": dict(lengths=[300, 31], queries=70, heads=1, kv_heads=1, bounded=True, mean=False, aligned=True, lse=FP16),
    "copied, FP16 scores": dict(lengths=[130, 0, 97], queries=70, heads=1, kv_heads=1, copied=True, bounded=True, lse=FP16),
    "few, copied": dict(lengths=[289, 0, 97], queries=2, heads=1, kv_heads=1, copied=True),
    "square": dict(lengths=[129, 7], queries=130, heads=1, kv_heads=1, block=[32, 32]),
}
BACKWARD = {
    "module": dict(lengths=SHORT, queries=33, config=dict(grad_format="mxfp8"), int64=True, slack=9),
    "groups of 32, jagged, deterministic": dict(
        lengths=SHORT, queries=[5, 1, 0, 7, 130, 2], heads=1, kv_heads=1, shared=False, block=[32, 128], slack=3, deterministic=True,
        config=dict(grad_format="bf16"),
    ),
    "causal, grouped heads, head 64": dict(
        lengths=[40, 0, 200], queries=[40, 7, 129], shared=False, causal=True, dim=64, heads=2, kv_heads=1,
        config=dict(grad_format="bf16", center_p_backward=False),
    ),
    "more than a chunk of queries, gradient of lse, FP16 dQ": dict(
        lengths=[40], queries=520, heads=1, kv_heads=1, dim=64, shared=False, with_dlse=True,
        config=dict(grad_format="mxfp8", dq_dtype="float16", dq_scale=4),
    ),
}  # fmt: skip


def check(worker, builder, arguments):
    answer = worker.run(OURS + builder, arguments, schedules=SCHEDULES, waivers="OURS_SM90")
    assert len(answer["schedules"]) == SCHEDULES


@pytest.mark.parametrize("name", FORWARD)
def test_forward(sm90, name):
    check(sm90, "forward", FORWARD[name])


def test_queries_of_the_next_sequence(sm90):
    options = dict(lengths=[300, 40], queries=[20, 30], shared=False, heads=1, kv_heads=1, mean=False, bounded=True)
    check(sm90, "isolated", options)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(sm90, name):
    check(sm90, "backward", BACKWARD[name])


@pytest.mark.parametrize(("rows", "dim"), [(32, 64), (128, 128)])
def test_prepare(sm90, rows, dim):
    check(sm90, "prepare", dict(lengths=SHORT, rows=rows, dim=dim, heads=1, copied=True))
