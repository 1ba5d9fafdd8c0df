"""Kernels that hardware has proven, sm_90a: right numbers and no race under every schedule, no waiver but one."""

import os

import pytest

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "3"))

CASES = [
    ("kernels_sm90:quack_fp8_gemm", dict(m=200, n=192, k=320), "NONE"),
    ("kernels:quack_gemm", dict(m=200, n=192, k=320), "NONE"),
    ("kernels_sm90:quack_rmsnorm", dict(m=13, n=1024), "QUACK_RMSNORM"),
    ("kernels:fa4_forward", dict(sq=200, sk=300), "NONE"),
    ("kernels:fa4_forward", dict(sq=100, sk=130, dim=64), "NONE"),
    ("kernels:fa4_forward", dict(sq=128, sk=256, heads=2, kv_heads=1, causal=True), "NONE"),
    ("kernels:fa4_varlen_forward", dict(lengths_q=[3, 0, 130], lengths_k=[5, 7, 129]), "NONE"),
    ("kernels:fa4_backward", dict(sq=128, sk=200), "NONE"),
    ("kernels:fa4_backward", dict(sq=128, sk=200, dim=64), "NONE"),
    ("kernels:fa4_backward", dict(sq=128, sk=200, heads=2, kv_heads=1, causal=True), "NONE"),
    ("kernels:fa4_varlen_backward", dict(lengths_q=[3, 0, 130], lengths_k=[5, 7, 129]), "NONE"),
]


@pytest.mark.parametrize(("builder", "arguments", "waivers"), CASES, ids=[f"{b.split(':')[1]}-{i}" for i, (b, _, _) in enumerate(CASES)])
def test_right_and_free_of_races(sm90, builder, arguments, waivers):
    answer = sm90.run("tests.emulator." + builder, arguments, schedules=SCHEDULES, waivers=waivers)
    assert len(answer["schedules"]) == SCHEDULES
