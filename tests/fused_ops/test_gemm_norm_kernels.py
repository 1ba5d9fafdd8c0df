"""The GEMM + norm backward kernels without a GPU: executed by the emulator under adversarial schedules with the race checker (cases, and
what is right: ``gemm_norm_cases``), and what ptxas made of them. ``EMULATOR_SCHEDULES=8`` runs more schedules."""

import os

import pytest

from tests.emulator.worker import Worker
from tests.processes import lines

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "1"))
LENGTHS = [0, 1, 33, 0, 70, 0]
NO_W = [True, True, False]
CASES = {
    "two CTAs share the columns, several tiles, bad rows": dict(
        lengths=[0, 1, 33, 0, 70, 0], rows=64, columns=384, capacity=9, int64=True, bad=[3, 40, 77], needs=NO_W
    ),
    "dnorm alone": dict(
        lengths=[0, 150], rows=64, columns=128, dv=None, mean=False, dk=[0, 64], dtype="float16", needs=[False, True, False]
    ),
    "roles: two CTAs, several tiles, bad rows": dict(
        lengths=[0, 1, 33, 0, 70, 120, 0], rows=128, columns=384, capacity=9, int64=True, bad=[3, 40, 77], needs=NO_W
    ),
    "roles: four CTAs, three warpgroups, blocks of other sizes": dict(
        lengths=[150, 1, 31, 190], rows=128, columns=512, capacity=3, dk=[32, 64], dv=[128, 128], needs=NO_W
    ),
    "roles: no dv, FP16, static": dict(
        lengths=[0, 150], rows=256, columns=128, dv=None, mean=False, dk=[0, 64], dtype="float16", needs=[False, True, False]
    ),
    "roles: dense, rows with gaps, every stage is filled again": dict(
        lengths=None, tokens=577, rows=128, columns=64, strided=True, needs=[True, False, False]
    ),
    "roles: most tiles have one exponent": dict(
        lengths=[300, 0, 131, 7], rows=128, columns=128, capacity=9, even=True, bad=[333], needs=NO_W
    ),
    "roles: the largest sums": dict(lengths=[90, 60], rows=128, columns=64, mean=False, loud=True, needs=NO_W),
    "roles: no mean, exponents of dv near and far": dict(lengths=[33, 117], rows=128, columns=64, mean=False, needs=NO_W),
    "roles: static exponents": dict(lengths=[33, 117], rows=256, columns=64, dk=[0, 64], dv=[0, 32], needs=NO_W),
    "roles: sums in stages that are filled again": dict(
        lengths=[300, 0, 601], rows=128, columns=192, capacity=9, bad=[3, 340], needs=[False, True, False]
    ),
    "the first runs of dW begin beside dx": dict(lengths=[300, 0, 131, 7], rows=128, columns=128, capacity=3, even=True, free=2),
    "a run of dW beside dx belongs to two tiles": dict(
        lengths=[300, 0, 731, 407], rows=128, columns=512, capacity=3, xn=[0, 128], even=True, bad=[3], free=3
    ),
    "a pair's run of dW belongs to two tiles": dict(lengths=[301, 0, 231], rows=256, columns=512, capacity=3, xn=[0, 128], free=2),
    "everything": dict(lengths=LENGTHS, rows=64, columns=64, capacity=9, xn=[32, 32]),
    "dense, BF16 gradients, FP16 rows with gaps": dict(
        lengths=None, tokens=65, rows=64, columns=64, dk="bfloat16", dv=None, xn="bfloat16", mean=False, dtype="float16", strided=True
    ),
    "FP32 rows, two CTAs, several tiles, bad rows": dict(
        lengths=[0, 1, 33, 0, 70, 0], rows=64, columns=192, capacity=9, bad=[3, 40, 77], dtype="float32", needs=NO_W
    ),
    "dense, BF16 gradients, FP32 rows with gaps": dict(
        lengths=None, tokens=65, rows=128, columns=64, dk="bfloat16", dv="bfloat16", dtype="float32", strided=True, needs=NO_W
    ),
    "mixed operands, a weight in MXFP8": dict(
        lengths=[40, 50], rows=128, columns=64, capacity=5, dk=[128, 64], dv="bfloat16", xn="bfloat16", weight="mx"
    ),
    "three warpgroups of dW": dict(lengths=[31, 100, 0], rows=192, columns=192, xn=[32, 64], needs=[False, False, True]),
    "three warpgroups of dW, BF16": dict(
        lengths=[31, 100, 0], rows=192, columns=192, dk="bfloat16", xn="bfloat16", needs=[False, False, True]
    ),
    "four warpgroups of dW, both scaled, bad rows": dict(
        lengths=[1, 200, 0], rows=256, columns=64, dk=[32, 64], xn=[128, 64], capacity=40, bad=[3, 40], needs=[False, False, True]
    ),
    "segments of dW, every stage is filled again": dict(
        lengths=[31, 1400, 0, 733], rows=64, columns=64, xn=[32, 64], run=512, needs=[False, False, True]
    ),
    "FP8 products, two pairs of CTAs, three warpgroups, bad rows": dict(
        lengths=[31, 500, 0, 33, 200], rows=384, columns=384, capacity=40, bad=[3, 40], needs=[False, False, True]
    ),
    "FP8 products, two warpgroups, blocks of other sizes, every stage is filled again": dict(
        lengths=[1, 700, 0, 333], rows=128, columns=256, dk=[128, 64], xn=[0, 128], needs=[False, False, True]
    ),
    "FP8 products, most steps have one exponent": dict(
        lengths=[31, 700, 0, 333], rows=128, columns=64, capacity=40, even=True, bad=[3], needs=[False, False, True]
    ),
    "FP8 products, dense": dict(lengths=None, tokens=333, rows=64, columns=64, needs=[False, False, True]),
    "no tokens in any sequence": dict(lengths=[0, 0], rows=64, columns=64, capacity=5),
    "no sequence": dict(lengths=[], rows=64, columns=64, capacity=5),
    "no rows": dict(lengths=None, tokens=0, rows=64, columns=64),
}


ON_BLACKWELL = (
    "two CTAs share the columns, several tiles, bad rows",
    "dense, BF16 gradients, FP16 rows with gaps",
    "FP32 rows, two CTAs, several tiles, bad rows",
    "three warpgroups of dW",
)
"""Cases that also run with products by warps; what else the other cases test has the same code there."""


@pytest.fixture(scope="module")
def workers():
    """One process per architecture, started when it is first asked for."""
    made: dict[str, Worker] = {}

    def worker(arch: str) -> Worker:
        if arch not in made:
            made[arch] = Worker(arch)
        return made[arch]

    yield worker
    for one in made.values():
        one.close()


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "name"), [*(("sm_90a", n) for n in CASES), *(("sm_100a", n) for n in ON_BLACKWELL)])
def test_emulated(workers, arch, name):
    answer = workers(arch).run("tests.fused_ops.gemm_norm_cases:backward", CASES[name], schedules=SCHEDULES)
    assert len(answer["schedules"]) == SCHEDULES


@pytest.mark.emulator
@pytest.mark.parametrize("options", [dict(), dict(even=True), dict(mean=False, even=True), dict(dk=[0, 64], dv=[0, 32])], ids=str)
def test_rows_do_not_depend_on_their_neighbours(workers, options):
    """dv is added in FP16 or in FP32 by a row's own exponents, whichever branch its warp takes."""
    arguments = dict(lengths=[37, 3, 90, 101], rows=128, columns=128, **options)
    workers("sm_90a").run("tests.fused_ops.gemm_norm_cases:neighbours", arguments, schedules=1)


def test_what_ptxas_made_for_hopper():
    """No product is serialized (each would be followed by a wait for all), and next to nothing is spilled."""
    for report in lines("tests.fused_ops.gemm_norm_report", "sm_90a"):
        assert report["wgmma"] >= 4 and report["waits"] <= report["wgmma"] + 1 and report["mma"] == 0, report
        assert report["drains"] <= report["drain_limit"], report
        assert report["local"] <= report["local_limit"], report


def test_what_ptxas_made_for_blackwell():
    """Products by warps, next to nothing is spilled."""
    for report in lines("tests.fused_ops.gemm_norm_report", "sm_103a"):
        assert report["mma"] > 0 and report["wgmma"] == 0 and report["local"] <= 4, report
