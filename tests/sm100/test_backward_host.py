"""What surrounds the backward: capability, words for what is not served, the plan of tensor memory, work items, powers of two."""

import dataclasses
from unittest import mock

import pytest
import torch

import lp_fa4
from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.sm100.backward_config import BackwardSpec, BackwardTuning, backward_tuning
from lp_fa4.sm100.backward_host import key_exponents
from lp_fa4.sm100.backward_items import work_items
from lp_fa4.sm100.backward_plan import backward_plan
from lp_fa4.sm100.tmem_plan import COLUMNS
from tests.sm100.cases import offsets, problem


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_backward_is_chosen_on_blackwell(capability):
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: capability),
    ):
        for dim in (64, 128):
            assert lp_fa4.is_supported("cuda", head_dim=dim) == (True, "served by backend 'sm100'")
        for changes, words in (
            ({"ds_block": (128, 128)}, r"config.ds_block is \(128, 128\); the sm100 backward serves \(32, 32\)"),
            ({"do_block": (1, 0)}, r"config.do_block is \(1, 0\); the sm100 backward serves \(32, 32\)"),
            ({"grad_block": (32, 128)}, r"config.grad_block is \(32, 128\); the sm100 backward serves \(32, 32\)"),
        ):
            served, reason = lp_fa4.is_supported("cuda", head_dim=128, backend="sm100", config=AttentionConfig(**changes))
            assert not served
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(reason)


def test_other_devices_and_wrong_arguments_are_refused_in_words():
    p = problem([5], shared=3)
    result = reference.forward(p)
    dout = torch.zeros_like(result.out)
    with pytest.raises(ValueError, match="device is cpu; kernels run on CUDA devices"):
        lp_fa4.sm100.backward(p, result, dout)
    with pytest.raises(ValueError, match=r"dout has shape \[2, 2, 128\]"):
        lp_fa4.sm100.backward(p, result, dout[:2])
    with pytest.raises(ValueError, match=r"dout has dtype torch.float32"):
        lp_fa4.sm100.backward(p, result, dout.float())
    half = dataclasses.replace(p, config=p.config.with_(dq_dtype=torch.float16))
    with pytest.raises(ValueError, match="dlse is given with FP16 dQ"):
        lp_fa4.sm100.backward(half, result, dout, dlse=torch.zeros_like(result.lse))


def test_variants_that_do_not_exist_are_refused_in_words():
    with pytest.raises(ValueError, match="head_dim is 96; sm100 kernels serve 64, 128"):
        BackwardSpec(96)
    with pytest.raises(ValueError, match="causal and centred are both True"):
        BackwardSpec(128, causal=True)
    with pytest.raises(ValueError, match="at most 512"):
        BackwardTuning(compute_registers=200)
    with pytest.raises(ValueError, match="arch is 'sm_90a'"):
        backward_tuning("sm_90a", BackwardSpec(128))


def test_plan_fills_tensor_memory():
    plan = backward_plan(128)
    assert plan.used == COLUMNS == plan.allocation
    assert backward_plan(64).used <= COLUMNS == backward_plan(64).allocation
    names = {r.name for r in plan.regions}
    for region, home in {
        "SFK": "dP",
        "SFQ": "dP",
        "SFDS_K": "dP",
        "SFQ_T": "dP",
        "SFDS_Q": "S",
        "SFK_T": "S",
        "SFV": "S",
        "SFDO": "S",
    }.items():
        assert region in names and plan[home].start <= plan[region].start < plan[region].end <= plan[home].end


def test_half_the_head_dimension_needs_no_alias():
    regions = backward_plan(64, dp_read=False, s_read=False).regions
    for i, a in enumerate(regions):
        for b in regions[i + 1 :]:
            if a.heir_of != b.name and b.heir_of != a.name:
                assert a.end <= b.start or b.end <= a.start, (a, b)


@pytest.mark.parametrize("missing, words", [("dp_read", "dP .*SFK|SFK.* dP"), ("s_read", "S .*SFDS_Q|SFDS_Q.* S ")])
def test_a_missing_barrier_is_refused(missing, words):
    with pytest.raises(ValueError, match=words):
        backward_plan(128, **{missing: False})


MOVES = (("SFK", -16), ("SFDS_Q", 240), ("SFP", -32), ("SFQ_T", 128), ("dS1", 128), ("P0", 40), ("dK", -1), ("dQ", 8))


@pytest.mark.parametrize("name, columns", MOVES)
def test_a_moved_region_is_refused(name, columns):
    with pytest.raises(ValueError, match=name):
        backward_plan(128).moved(name, columns).check()


@pytest.mark.parametrize("causal", [False, True])
def test_work_items_cover_every_key_tile_once_longest_first(causal):
    keys, queries = [300, 0, 31, 129], [10, 500, 300, 129]
    ok, oq = offsets(keys), offsets(queries)
    items, total = work_items(ok, oq, queries=None, tokens=sum(keys), causal=causal, serial=False)
    rows = items[: int(total)].tolist()
    want = {(b, n) for b in range(4) for n in range(-(-keys[b] // 128))}
    assert len(rows) == len(want) and {(r[0], r[1]) for r in rows} == want
    costs = []
    for b, n, end, first, many, tile_row, asked, _ in rows:
        assert end == n + 1 and first == ok[b] and many == keys[b] and tile_row == int(oq[b]) // 128 + b and asked == queries[b]
        hidden = max(128 * n - many + asked, 0) // 128 if causal else 0
        costs.append(max(-(-asked // 128) - hidden, 0))
    assert costs == sorted(costs, reverse=True)
    whole, many = work_items(ok, oq, queries=None, tokens=sum(keys), causal=causal, serial=True)
    assert int(many) == 4 and sorted(whole[:, 0].tolist()) == [0, 1, 2, 3] and (whole[:, 1] == 0).all()


@pytest.mark.parametrize("static", [False, True])
def test_key_exponents_are_running_maxima_of_each_sequence(static):
    exponents = (None, -5, -4) if static else (None, None, None)
    p = problem([300, 0, 31, 129], shared=3, exponents=exponents)
    got = key_exponents(p, p.offsets_k)
    for b, many in enumerate([300, 0, 31, 129]):
        first = int(p.offsets_k[b]) // 32 + b
        for g in range(-(-many // 32)):
            want = -9 if static else sum(int(x.scale_bytes[first : first + g + 1].amax((0, 2))[1]) - 127 for x in (p.k, p.v))
            assert got[first + g, 1] == want
