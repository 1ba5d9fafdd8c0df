"""What surrounds the two-CTA backward: the rule of choice, words for what is not served, its plan of tensor memory, its factors."""

import dataclasses

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.sm100.backward_config import PAIR, TILE, BackwardSpec, backward_tuning, tile_rows
from lp_fa4.sm100.backward_host import backward, reason_against_backward, takes_pairs
from lp_fa4.sm100.backward_items import work_items
from lp_fa4.sm100.backward_kernel import Backward
from lp_fa4.sm100.backward_pair_kernel import PairBackward
from lp_fa4.sm100.backward_pair_plan import pair_plan
from lp_fa4.sm100.backward_pair_tables import pair_tables
from lp_fa4.sm100.tmem_plan import COLUMNS
from tests.sm100.backward_cases import PAIRS
from tests.sm100.cases import offsets, problem

TOKEN = ((32, 128),) * 3


def test_pairs_are_taken_where_every_scale_is_wanted_outside():
    assert not takes_pairs(AttentionConfig())
    assert not takes_pairs(AttentionConfig(operand_scales="outside"))
    assert takes_pairs(AttentionConfig(**PAIRS)) and reason_against_backward(128, AttentionConfig(**PAIRS)) == ""
    for changes, words in (
        ({"operand_scales": "auto"}, r"do_block is \(32, 0\); the sm100 backward serves \(32, 32\), and \(32, 0\) with operand_scales"),
        ({"ds_block": (32, 32)}, r"ds_block is \(32, 32\); the sm100 backward serves None"),
        ({"grad_block": (32, 128)}, r"grad_block is \(32, 128\); the sm100 backward serves \(32, 32\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(reason_against_backward(128, AttentionConfig(**{**PAIRS, **changes})))


def test_operands_in_other_blocks_are_refused_in_words():
    p = problem([5], shared=3)
    p = dataclasses.replace(p, config=p.config.with_(**PAIRS))
    result = reference.forward(p)
    with pytest.raises(ValueError, match=r"q has blocks \(32, 32\).* the width must be head_dim = 128"):
        backward(p, result, torch.zeros_like(result.out))


@pytest.mark.parametrize("dim", [64, 128])
def test_plan_and_shared_memory_fit(dim):
    assert pair_plan(dim).used <= COLUMNS == pair_plan(dim).allocation
    for half in (False, True):
        spec = BackwardSpec(dim, dq_half=half)
        tuning = backward_tuning("sm_100a", spec, True)
        assert PairBackward(spec, tuning).shared_bytes() <= 227 * 1024
        assert PairBackward(spec, tuning).plan.used <= Backward(spec, tuning).plan.used


@pytest.mark.parametrize("missing", ["s_read", "dq_read"])
def test_a_missing_barrier_is_refused(missing):
    with pytest.raises(ValueError, match=r"S \(.*dQ \("):
        pair_plan(128, **{missing: False})


MOVES = (("P0", 40), ("P1", -40), ("dQ", -20), ("dQ", 30), ("dS0", -16), ("dS1", 128), ("dV", -1), ("dK", 1))


@pytest.mark.parametrize("name, columns", MOVES)
def test_a_moved_region_is_refused(name, columns):
    with pytest.raises(ValueError, match=name):
        pair_plan(128).moved(name, columns).check()


def test_work_items_cover_every_pair_of_tiles_once():
    keys, queries = [300, 0, 31, 257], [10, 500, 300, 129]
    items, total = work_items(
        offsets(keys), offsets(queries), queries=None, tokens=sum(keys), causal=False, serial=False, keys_per_item=PAIR
    )
    rows = items[: int(total)].tolist()
    assert {(r[0], r[1]) for r in rows} == {(b, n) for b in range(4) for n in range(-(-keys[b] // PAIR))} and len(rows) == 5


@pytest.mark.parametrize("growth, static", [(1.0, False), (8.0, False), (1.0, True)])
def test_no_code_of_ds_saturates_and_factors_are_powers_of_two(growth, static):
    """dS under the factors, made in FP64 from what the kernel multiplies: at most 448, and not needlessly small (Cauchy-Schwarz and the
    largest norms cost some 2^5 here)."""
    blocks, exponents = (((0, 128),) * 3, (-6, -6, -6)) if static else (TOKEN, (None, None, None))
    keys, queries = [200, 0, 40], [130, 7, 33]
    p = problem(keys, queries=queries, heads=2, kv_heads=1, blocks=blocks, exponents=exponents, changes=PAIRS, seed=3)
    rows = tile_rows(None, p.rows, p.batch)
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(rows, 2, 4, 4)
    q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
    v = torch.where(torch.isfinite(v), v, 0)
    norms = torch.zeros(p.tokens // 32 + p.batch, 1)
    ok, oq = p.offsets_k, p.offsets_q
    assert ok is not None and oq is not None and p.softmax_scale is not None
    made = []
    for b in range(p.batch):
        first_q, first_k = int(oq[b]), int(ok[b])
        for g in range(-(-keys[b] // 32)):
            part = v[first_k + 32 * g : first_k + min(32 * g + 32, keys[b])]
            norms[first_k // 32 + b + g] = part.norm(dim=-1).amax(0)
        size = growth ** (torch.arange(queries[b]) // 40).double()
        do = torch.randn(queries[b], 2, 128, generator=generator, dtype=torch.float64) * size[:, None, None]
        for h in range(2):
            s = p.softmax_scale * q[first_q : first_q + queries[b], h] @ k[first_k : first_k + keys[b], 0].T
            prob = torch.exp(s - s.amax(1, keepdim=True)) if keys[b] else s
            dp = do[:, h] @ v[first_k : first_k + keys[b], 0].T
            total = prob.sum(1, keepdim=True)
            delta = (prob * dp).sum(1, keepdim=True) / total if keys[b] else do[:, h, :1] * 0
            for g in range(-(-queries[b] // 32)):
                part = slice(32 * g, min(32 * g + 32, queries[b]))
                scale = torch.exp2((do[part, h].abs().amax() / 448).log2().ceil())
                values = [scale, do[part, h].norm(dim=-1).amax(), delta[part].abs().amax()]
                table[first_q // TILE + b + g // 4, h, g % 4, :3] = torch.stack(values).float()
            made.append((b, h, prob * (dp - delta)))
    stats = torch.zeros(rows, 2, 3 * TILE)
    factors, key_factors, results = pair_tables(p, ok, oq, stats, table.flatten(-2), norms)
    for x in (factors[..., 1::4], factors[..., 2::4]):
        mantissa = torch.frexp(x[torch.isfinite(x) & (x > 0)])[0]
        assert (mantissa == 0.5).all()
    largest = [0.0, 0.0]
    for b, h, ds in made:
        first_q, first_k = int(oq[b]), int(ok[b])
        for g in range(-(-ds.shape[0] // 32)):
            four = factors[first_q // TILE + b + g // 4, h, 4 * (g % 4) : 4 * (g % 4) + 4].double()
            part = ds[32 * g : 32 * g + 32] / float(results[b, 0, 0])
            for j in range(-(-ds.shape[1] // 32)):
                block = part[:, 32 * j : 32 * j + 32].abs()
                key = float(key_factors[first_k // 32 + b + j, 0, 0])
                for i, top in enumerate((block.amax() * four[1], block.amax() * four[2] * key)):
                    largest[i] = max(largest[i], float(top))
    assert max(largest) <= 448 and min(largest) >= 448 / 2**6, largest
