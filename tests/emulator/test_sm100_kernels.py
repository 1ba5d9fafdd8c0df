"""Kernels that hardware has proven, sm_100a: right numbers and no race under every schedule.

CI runs two schedules each (eager with the checker sees nearly every race; pct moves warps and completions). The campaign
of eight: ``EMULATOR_SCHEDULES=8 pytest tests/emulator``.
"""

import os

import pytest

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "3"))
KERNELS = "tests.emulator.kernels:"
LENGTHS = [1, 33, 127, 129]

CASES = [
    ("quack_gemm", dict(m=256, n=192, k=320), "EARLY_USE"),
    ("quack_mxfp8_gemm", dict(m=200, n=192, k=640), "EARLY_USE"),
    ("quack_mxfp8_varlen_m", dict(lengths=LENGTHS, n=192, k=256), "EARLY_USE"),
    ("quack_mxfp8_varlen_k", dict(lengths=LENGTHS, m=192, n=128), "EARLY_USE"),
    ("quack_quantized_output", dict(m=200, n=192, k=320), "EARLY_USE"),
    ("quack_rmsnorm", dict(m=13, n=1024), "QUACK_RMSNORM"),
    ("fa4_forward", dict(sq=256, sk=512), "FA4_FORWARD_SM100"),
    ("fa4_forward", dict(sq=200, sk=300, dim=64), "FA4_FORWARD_SM100"),
    ("fa4_forward", dict(sq=256, sk=256, heads=4, kv_heads=2, causal=True), "FA4_FORWARD_SM100"),
    ("fa4_forward", dict(sq=512, sk=512), "FA4_FORWARD_SM100"),  # two CTAs
    ("fa4_varlen_forward", dict(lengths_q=[5, 130, 0, 77], lengths_k=[300, 1, 31, 0]), "FA4_FORWARD_SM100"),
    ("fa4_backward", dict(sq=256, sk=256), "FA4_BACKWARD_SM100"),  # two CTAs
    ("fa4_backward", dict(sq=200, sk=300, dim=64), "FA4_BACKWARD_SM100"),
    ("fa4_backward", dict(sq=128, sk=256, heads=2, kv_heads=1, causal=True), "FA4_BACKWARD_SM100"),
    ("fa4_varlen_backward", dict(lengths_q=[5, 130, 0, 77], lengths_k=[300, 1, 31, 0]), "FA4_BACKWARD_SM100"),
]


@pytest.mark.parametrize(("builder", "arguments", "waivers"), CASES, ids=[f"{b}-{i}" for i, (b, _, _) in enumerate(CASES)])
def test_right_and_free_of_races(sm100, builder, arguments, waivers):
    answer = sm100.run(KERNELS + builder, arguments, schedules=SCHEDULES, waivers=waivers)
    assert len(answer["schedules"]) == SCHEDULES
