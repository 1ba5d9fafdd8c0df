"""The fused kernels, executed by the emulator for both architectures under adversarial schedules with the race checker (cases, and what is
right: ``kernel_cases``). ``EMULATOR_SCHEDULES=8`` runs more schedules."""

import os

import pytest

from tests.emulator.worker import Worker

pytestmark = pytest.mark.emulator

SCHEDULES = int(os.environ.get("EMULATOR_SCHEDULES", "2"))
ARCHS = ("sm_90a", "sm_100a")
LENGTHS = [0, 1, 33, 0, 70, 0]

NORMS = {
    "static, centred: the module": dict(lengths=LENGTHS, columns=96, block=[0, 96], center=True, keep=True, capacity=9, bad=[1, 40]),
    "with the copy, tokens innermost": dict(
        lengths=[0, 1, 33, 0, 140], columns=128, block=[0, 64], center=True, copy_heads=2, capacity=70, bound=True
    ),
    "a copy of 192 columns: no whole eights of chunks": dict(
        lengths=[129, 5], columns=192, block=[0, 64], center=True, copy_heads=3, capacity=7, bound=True
    ),
    "one head's copy, token blocks": dict(lengths=None, shape=[141], columns=128, block=[32, 128], copy_heads=1),
    "square, centred, both atoms": dict(lengths=LENGTHS, columns=96, center=True, axes=[0, 1], capacity=37, int64=True, bad=[1, 3, 60]),
    "token blocks over two slabs": dict(lengths=[31, 129], columns=192, block=[32, 192], dtype="float16", weight_dtype="bfloat16"),
    "square blocks, read twice": dict(lengths=[3, 14], columns=480, center=True, capacity=3, bad=[1, 9]),
    "blocks of a tile, read again": dict(lengths=[0, 130, 31], columns=64, block=[128, 64], center=True, capacity=3, axes=[1]),
    "dense, FP32, strided rows": dict(lengths=None, shape=[2, 70], columns=32, dtype="float32", strided=True),
    "one dense sequence, static": dict(lengths=None, shape=[65], columns=64, block=[0, 32], center=True, axes=[0]),
    "no tokens in any sequence": dict(lengths=[0, 0], columns=32, capacity=5, center=True),
}
SCATTERS = {
    "square": dict(lengths=[0, 1, 33, 129, 0], columns=160, block=[32, 32], capacity=200),
    "a partial block of columns": dict(lengths=None, tokens=130, columns=72, block=[32, 32]),
    "wide, repeated over a tile": dict(lengths=[5, 131], columns=192, block=[128, 96]),
    "static": dict(lengths=[0, 40, 0], columns=64, block=[0, 64], capacity=100),
}


PRODUCTS = {
    "the module, static": dict(
        lengths=[5, 131], contracted=128, columns=128, x_block=[0, 64], w_block=[32, 64], block=[0, 64], capacity=70, axes=[0]
    ),
    "static, two scales": dict(lengths=[5, 131], contracted=256, columns=64, x_block=[0, 128], w_block=[32, 128], block=[0, 64], seed=1),
    "static, exponents far below the sums": dict(
        lengths=[40], contracted=128, columns=64, x_block=[0, 128], w_block=[32, 128], block=[0, 32], exact=True, given=-80
    ),
    "bounded rows, one NaN": dict(
        lengths=[5, 131],
        contracted=160,
        columns=96,
        form="e4m3x2 bounded",
        x_block=[0, 160],
        w_block=[32, 160],
        block=[0, 96],
        capacity=30,
        bad=[3],
    ),
    "bounded rows, exact sums in FP16": dict(
        lengths=[40], contracted=64, columns=64, form="e4m3 bounded", x_block=[0, 64], w_block=[32, 64], block=[0, 64], exact=True
    ),
    "192 columns a CTA, sums in FP16": dict(
        lengths=[0, 130, 31],
        contracted=160,
        columns=192,
        form="e4m3x2 bounded",
        x_block=[0, 160],
        w_block=[32, 160],
        block=[0, 64],
        given_bytes=True,
        capacity=3,
    ),
    "192 columns a CTA, rows past FP16": dict(
        lengths=[70], contracted=256, columns=192, x_block=[0, 128], w_block=[32, 256], block=[0, 64]
    ),
    "rows past FP16": dict(lengths=[40], contracted=64, columns=64, form="e4m3", x_block=[0, 64], w_block=[32, 64], block=[0, 32]),
    "static, square blocks of the weight": dict(lengths=[40, 70], contracted=128, columns=64, x_block=[0, 128], block=[0, 64], capacity=3),
    "exact sums, square": dict(lengths=[0, 1, 33, 0, 200, 0], contracted=96, columns=96, exact=True, capacity=9, bad=[1, 40], axes=[0, 1]),
    "blocks of a tile, BF16": dict(lengths=[0, 130, 31], contracted=96, columns=64, form="bf16", block=[128, 64], capacity=3, int64=True),
    "a pair of CTAs, BF16, static": dict(
        lengths=[0, 70, 131], contracted=96, columns=224, form="bf16", block=[0, 32], capacity=7, given_bytes=True
    ),
    "BF16, static, exponents in the weight": dict(
        lengths=[40, 70], contracted=256, columns=64, form="bf16", block=[0, 32], bad=[3], capacity=30, given=0
    ),
    "dense, two tiles of columns": dict(lengths=None, tokens=140, contracted=160, columns=160, form="e4m3", block=[32, 32]),
    "weights that do not stay": dict(lengths=[40], contracted=640, columns=32, x_block=[32, 640], w_block=[32, 640], axes=[1], seed=1),
}
"""``axes``: swizzled scales that Blackwell's epilogue writes too."""


NORM_PROJECTIONS = {
    "six products a row, exponents of its own": dict(
        lengths=[0, 5, 131, 0, 70], contracted=128, columns=192, norm_width=64, width=96, capacity=40, bad=[1, 40, 100], cluster=1
    ),
    "two products a row, not centred, rows apart, two CTAs": dict(
        lengths=None, tokens=140, contracted=64, columns=64, norm_width=32, width=32, center=False, strided=True, cluster=2
    ),
    "two CTAs, tiles without a row between the others": dict(
        lengths=[0, 5, 131, 0, 300, 128, 0, 256],
        contracted=64,
        columns=64,
        norm_width=32,
        width=32,
        capacity=40,
        bad=[1, 40, 100],
        cluster=2,
    ),
    "a product past FP16": dict(lengths=[3, 66], contracted=64, columns=64, norm_width=32, width=32, small=9, cluster=1),
    "exponents of the rows given": dict(lengths=[66], contracted=64, columns=64, bound=False, small=2, cluster=1),
    "FP32 rows, apart, one not finite": dict(
        lengths=[3, 66], contracted=64, columns=64, norm_width=32, width=32, capacity=40, bad=[40], strided=True, dtype="float32", cluster=1
    ),
}
"""Of one kernel, Hopper's."""


WEIGHTS = {
    "pair, rotated": dict(heads=1, rows=128, columns=160, width=32),
    "pair, a block of 128 columns": dict(heads=1, rows=32, columns=256, width=128, rotate=False, dtype="bfloat16"),
    "BF16": dict(heads=2, rows=64, columns=32, form="bf16"),
    "bounded rows, one not finite": dict(heads=2, rows=32, columns=96, width=96, bounded=True, rotate=False, bad=True),
}


HEADS = {
    "three heads, one of zeros": dict(rows=37, heads=3, width=32),
    "not finite, rows apart": dict(rows=33, heads=2, width=64, bad=True, apart=8),
}

COORDINATES = {
    "two heads, columns past a chunk": dict(rows=70, heads=2, width=64, columns=160, dtype="bfloat16"),
    "two chunks of rows apart, not rotated": dict(rows=200, heads=1, width=64, columns=96, rotate=False, kind="lopsided", apart=8),
    "one channel": dict(rows=40, heads=2, width=32, columns=64, kind="one channel"),
    "a covariance that overflows": dict(rows=33, heads=1, width=32, columns=32, kind="overflow"),
}


@pytest.fixture(scope="module", params=ARCHS)
def worker(request):
    made = Worker(request.param)
    yield made
    made.close()


def check(worker, builder: str, arguments: dict) -> None:
    answer = worker.run("tests.fused_ops.kernel_cases:" + builder, arguments, schedules=SCHEDULES)
    assert len(answer["schedules"]) == SCHEDULES


@pytest.mark.parametrize("name", NORMS)
def test_norm(worker, name):
    check(worker, "norm", NORMS[name])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(worker, name, axis):
    check(worker, "scatter", dict(SCATTERS[name], axis=axis))


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(worker, name):
    check(worker, "gemm", PRODUCTS[name])


@pytest.mark.parametrize("name", NORM_PROJECTIONS)
def test_norm_projection(worker, name):
    if worker.arch == "sm_90a":
        check(worker, "norm_projection", NORM_PROJECTIONS[name])


@pytest.mark.parametrize("name", WEIGHTS)
def test_weight(worker, name):
    check(worker, "weight", WEIGHTS[name])


@pytest.mark.parametrize("name", HEADS)
def test_heads(worker, name):
    check(worker, "head_rows", HEADS[name])


@pytest.mark.parametrize("name", COORDINATES)
def test_coordinates(worker, name):
    check(worker, "coordinates", COORDINATES[name])


def test_nothing_is_launched_for_nothing(worker):
    """No sequences at all, and no rows: results without a kernel."""
    check(worker, "norm", dict(lengths=[], columns=32, capacity=5, center=True, axes=[0, 1]))
    check(worker, "norm", dict(lengths=[0, 0, 0], columns=32, block=[0, 32], center=True))
    check(worker, "scatter", dict(lengths=[], columns=32, block=[32, 32], capacity=300, axis=1))
