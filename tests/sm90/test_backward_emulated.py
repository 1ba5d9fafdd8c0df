"""The Hopper backward executed from its PTX, with the race checker on: pre-pass, main kernel, post-pass against the reference.

What may differ, and why: ``agreement.assert_agrees``.
"""

import json
import subprocess
import sys

import pytest

from tests.sm90.agreement import assert_agrees

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
pytestmark = pytest.mark.emulator

SHORT_CHUNKS = dict(heads=1, kv_heads=1, shared=False, grads="mxfp8", chunk=2)

CASES = {
    "module, two heads, aligned dO": dict(bounded=True, lengths=[100, 0, 140], queries=70, align=True),
    "module, MXFP8, FP16 dQ, tails, rows of dO that grow": dict(
        bounded=True, lengths=[150, 0, 20], queries=130, heads=1, kv_heads=1, grads="mxfp8", dq_dtype="float16", growth=3.0
    ),
    "module, MXFP8, FP16 dQ, rows of q past what FP16 sums hold": dict(
        lengths=[150], queries=260, heads=1, kv_heads=1, grads="mxfp8", dq_dtype="float16", growth=4.0
    ),
    "jagged, MXFP8, slack, zero blocks beside a huge dO; a sequence of more queries than said": [
        dict(bounded=True, lengths=[130, 1], queries=[3, 200], slack=17, size=1e9, **SHORT_CHUNKS),
        dict(bounded=True, lengths=[130, 40], queries=[100, 200], most=128, **SHORT_CHUNKS),
    ],
    "causal, square blocks": dict(lengths=[150, 40], queries=[150, 70], heads=1, kv_heads=1, shared=False, causal=True, block=[32, 32]),
    "causal, grouped heads, aligned dO": dict(
        bounded=True, lengths=[150, 40], queries=[150, 70], heads=2, kv_heads=1, shared=False, causal=True, align=True
    ),
    "FP16 dQ, partial sums, dV whole, BF16 results, a tile of q a little, and much, smaller": [
        dict(
            bounded=True,
            lengths=[100],
            queries=200,
            heads=2,
            kv_heads=1,
            shared=False,
            block=[128, 128],
            dq_dtype="float16",
            whole=True,
            fall=fall,
        )
        for fall in (-3, -9)
    ],
    "two CTAs, empty tiles, scale moves at the end": dict(
        bounded=True, lengths=[300, 5], queries=140, heads=1, kv_heads=1, block=[32, 128], grads="mxfp8", dq_dtype="float16", cluster=True
    ),
    "long loop, second chunk, warps follow a scale of dS that moves": dict(
        bounded=True, lengths=[70], queries=600, heads=1, kv_heads=1, shared=False, chunk=8, growth=1.15, dq_dtype="float16"
    ),
    "FP16 dQ: two a buffer, zeros, no keys, one 10,000 times larger; five, as large as allowed": [
        dict(
            bounded=True,
            lengths=[130, 0, 40, 129, 20],
            queries=70,
            heads=1,
            kv_heads=1,
            dim=64,
            dq_dtype="float16",
            dq_group=2,
            sizes=[1.0, 1e6, 0.0, 1e-4, 1e4],
        ),
        dict(
            bounded=True, lengths=[128, 40, 6, 20, 2], queries=33, heads=1, kv_heads=1, dim=64, dq_dtype="float16", mean=False, extreme=True
        ),
    ],
    "head 64, scale of dS moves": dict(bounded=True, lengths=[150], queries=150, heads=1, kv_heads=1, dim=64, growth=8.0),
    "FP16 sums of dV overflow: done again, but for dQ": dict(
        bounded=True, lengths=[40], queries=150, heads=1, kv_heads=1, shared=False, grads="mxfp8", sink=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated(name):
    case = CASES[name]
    problems = case if isinstance(case, list) else [case]
    command = [sys.executable, "-m", "tests.sm90.backward_emulated", json.dumps(problems), "pct:1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(problems)
    for problem, report in zip(problems, reports, strict=True):
        numbers = {key: value for key, value in report.items() if key not in ("schedule", "steps")}
        assert_agrees(numbers, problem.get("grads", "bf16"), halves=problem.get("block", [128])[0] != 32)
