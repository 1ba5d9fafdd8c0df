"""The plan of tensor memory: columns, lifetimes, and that wrong plans are refused."""

import pytest

from lp_fa4.sm100.config import ForwardSpec, ForwardTuning, forward_tuning
from lp_fa4.sm100.tmem_plan import COLUMNS, Region, TmemPlan, forward_plan, prologue_columns


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scaled", [True, False])
def test_plans_fit(dim, scaled):
    plan = forward_plan(dim, scaled)
    assert plan.used <= COLUMNS and plan.allocation <= COLUMNS
    assert plan.check() is plan


def test_full_plan_is_aliased():
    plan = forward_plan(128)
    assert plan.used == COLUMNS
    for i in (0, 1):
        for name in ("SFP", "SFV"):
            assert plan[f"S{i}"].start <= plan[f"{name}{i}"].start < plan[f"S{i}"].end
        for name in ("SFQ", "SFK"):
            assert plan[f"S{1 - i}"].start <= plan[f"{name}{i}"].start < plan[f"S{1 - i}"].end
        assert prologue_columns(plan, i)[0] == plan[f"O{i}"].start


def test_half_the_head_dimension_needs_no_alias():
    plan = forward_plan(64)
    regions = plan.regions
    for i, a in enumerate(regions):
        for b in regions[i + 1 :]:
            if a.heir_of != b.name and b.heir_of != a.name:
                assert a.end <= b.start or b.end <= a.start, (a, b)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_barrier_is_refused(missing):
    barriers = tuple(i != missing for i in (0, 1))
    with pytest.raises(ValueError, match=f"S{missing} .*SFQ{1 - missing}|SFQ{1 - missing} .*S{missing}"):
        forward_plan(128, s_read_barriers=barriers)


@pytest.mark.parametrize("name, columns", [("SFV0", -4), ("SFQ0", -12), ("SFK1", 128), ("SFQ1", 216), ("SFP1", 128), ("O0", -1)])
def test_a_moved_region_is_refused(name, columns):
    with pytest.raises(ValueError, match=name):
        forward_plan(128).moved(name, columns).check()


def test_outside_tensor_memory_is_refused():
    with pytest.raises(ValueError, match="there are 512"):
        TmemPlan((Region("S0", 500, 128, frozenset({0})),)).check()
    with pytest.raises(KeyError, match="no TMEM region 'X'"):
        forward_plan(128)["X"]


def test_variants_that_do_not_exist_are_refused_in_words():
    with pytest.raises(ValueError, match="head_dim is 96; sm100 kernels serve 64, 128"):
        ForwardSpec(96)
    with pytest.raises(ValueError, match="p_scale is 'row'"):
        ForwardSpec(128, p_scale="row")
    with pytest.raises(ValueError, match="P is centred"):
        ForwardSpec(128, p_scale="fresh")
    with pytest.raises(ValueError, match="fold_v is True"):
        ForwardSpec(128, block_scaled=False, fold_v=True)
    with pytest.raises(ValueError, match="at most 512"):
        ForwardTuning(softmax_registers=200)
    with pytest.raises(ValueError, match="arch is 'sm_90a'"):
        forward_tuning("sm_90a", ForwardSpec(128))
