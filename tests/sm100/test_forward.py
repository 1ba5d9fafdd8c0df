"""The Blackwell forward, executed by the emulator under adversarial schedules with the race checker, against the reference and FP64.

Cases share compiled variants where they can. ``python -m tests.sm100.campaign forward`` runs the whole list of shapes and modes.
"""

import pytest

from tests.sm100.cases import Judge, problem, run

pytestmark = pytest.mark.emulator

MODULE = {"shared": 200, "mean": True}
"""The module's variant: shared queries, one and a half Q tiles, P centred, mean of V added back."""
CAUSAL = {"kv_heads": 1, "causal": True, "config": "post"}
OUTSIDE = {"operand_scales": "outside"}


def check(worker, problem_of: dict, schedules: int = 2, **run_of) -> None:
    worker.run("tests.sm100.cases:case", {"problem_of": problem_of, "run_of": run_of}, schedules=schedules)


def test_shared_queries_centred(blackwell):
    """Every tail, an empty sequence, a spare capacity; the work list and the scale layouts come from their own
    kernels. Three CTAs on two heads draw their items (Cluster Launch Control): the ring wraps, Q is loaded again or not, as it comes."""
    check(blackwell, {**MODULE, "keys": [31, 0, 300, 129, 1], "capacity": 50}, 2, device=True, processors=3, drawn=True)


def test_drawing_takes_the_place_of_launches(blackwell):
    """Two multiprocessors: the CTAs that run draw most records, so few are launched. There are more records than items; every item is
    done, as the result shows."""
    lengths = {"keys": [129, 31, 1, 0, 40], "queries": [300, 0, 5, 40, 1]}
    done = blackwell.call("tests.sm100.cases:drawn", problem_of={**lengths, **CAUSAL})
    assert done["items"] < done["records"]
    assert done["launched"] <= 3


def test_lazy_maximum_moves_often(blackwell):
    """Scores so sharp that rows rescale in most tiles; one CTA walks all items."""
    check(blackwell, {**MODULE, "keys": [700, 1], "shared": 256, "heads": 1, "sharpness": 8}, 2, processors=1)


@pytest.mark.parametrize("blocks, exponents", [(((32, 128), (128, 128), (32, 128)), (None, None, None)), (((32, 32),) * 3, (-5, -5, -4))])
def test_other_blocks(blackwell, blocks, exponents):
    """Token blocks, 128-token blocks and static scales reach the MMA as 32-element scales; one query; Q is loaded once for all samples."""
    check(blackwell, {**MODULE, "keys": [129, 0, 40], "shared": 1, "blocks": blocks, "exponents": exponents}, 1)


def test_nan_stays_in_its_sequence(blackwell):
    """A payload tile reaches into the next sequence; a NaN block there shows in that sequence's columns and nowhere else."""
    check(blackwell, {**MODULE, "keys": [33, 40, 70], "nan": True}, 1)


def test_queries_of_the_next_sequence(blackwell):
    """NaN codes in queries that lie in the last tile of the sequence before: its results keep their bits."""
    options = dict(lengths=[300, 40], queries=[20, 30], shared=False, heads=1, kv_heads=1, mean=False)
    blackwell.run("tests.emulator.ours:isolated", options, schedules=1)


@pytest.mark.parametrize("variant", [{}, {"dim": 64}])
def test_payload_of_others_is_never_multiplied(blackwell, variant):
    """NaN codes under ordinary scales, where no quantization leaves them: in the next sequence and past the last one. Zero probabilities
    do not silence them."""
    check(blackwell, {**MODULE, "keys": [33, 40, 70], "raw": True, "capacity": 60, **variant}, 1)


def test_jagged_queries_causal_gqa(blackwell):
    """Jagged queries, more queries than keys (rows that see nothing), two query heads per key head, the conventional preset."""
    lengths = {"keys": [300, 31, 1, 0], "queries": [300, 130, 5, 40]}
    check(blackwell, {**lengths, **CAUSAL, "sharpness": 2}, drawn=True)


def test_head_dim_64(blackwell):
    """Scales with columns of their own; three heads; a second Q tile that lacks rows."""
    check(blackwell, {"keys": [33, 127, 0, 260], "queries": [1, 257, 30, 128], "heads": 3, "dim": 64})


def test_data_dependent_scales_of_p(blackwell):
    """Row scales of P through shared memory; sharp scores, so that blocks of P differ by many powers of two."""
    check(blackwell, {"keys": [128, 300], "queries": [64, 129], "sharpness": 4, "config": "post", "changes": {"p_scale": "fresh"}})


def test_scales_outside_the_mma_static_v(blackwell):
    """Token blocks of Q and K applied to score rows and columns, V static, P centred: the plain f8f6f4 kernel."""
    blocks, exponents = ((32, 128), (32, 128), (32, 128)), (None, None, -4)
    check(blackwell, {**MODULE, "keys": [33, 0, 257], "blocks": blocks, "exponents": exponents, "changes": OUTSIDE})


def test_scales_outside_the_mma_folded_v(blackwell):
    """V's exponents folded into P: blocks of V that differ by 2^20 and blocks of zeros, which still count in the row sum."""
    blocks = ((32, 128), (128, 128), (32, 128))
    lengths = {"keys": [300, 31, 0], "queries": [129, 40, 3]}
    check(blackwell, {**lengths, "blocks": blocks, "zeros": True, "config": "post", "changes": OUTSIDE})


@pytest.mark.parametrize(
    "dim, block, exponent, jagged",
    [
        (128, (32, 32), None, True),
        (64, (32, 32), None, True),
        (64, (32, 64), None, False),
        (128, (128, 128), None, True),
        (128, (32, 32), -3, True),
    ],
)
def test_scale_layouts_come_from_a_kernel(blackwell, dim, block, exponent, jagged):
    """Every byte, pads included, of both axes; a head dimension of 64 leaves half of each atom empty."""
    arguments = {"lengths": [31, 0, 129, 260, 1], "dim": dim, "block": block, "exponent": exponent, "jagged": jagged}
    blackwell.run("tests.sm100.cases:atoms_case", arguments, schedules=1)


def test_no_keys_at_all():
    """Neither a launch nor a NaN: zeros and -inf."""
    p = problem([0, 0], shared=5)
    Judge(p)(run(p))
