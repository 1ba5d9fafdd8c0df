"""A sequence's result depends on that sequence alone: bit for bit, whatever its batch mates are, hold, or lack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lp_fa4 import reference
from lp_fa4.config import DEFAULT
from lp_fa4.interface import flash_attn_varlen_func
from tests.attention.helpers import make, run, same_bits, whole
from tests.conftest import HOSTILE_LENGTHS, offsets_of

LENGTHS = (31, 33, 1, 32, 127, 129)
QUERIES = 5
HEADS, DIM = 2, 32


def pieces(lengths=LENGTHS, seed=0):
    """Per sequence: queries, keys, values, gradient of the output."""
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(n, HEADS, DIM, generator=g) for n in (QUERIES, length, length, QUERIES)) for length in lengths]


def drop_in(parts, causal=False, config=None):
    """Run the drop-in on sequences joined; per sequence: output, LSE, gradients of q, k, v."""
    q, k, v, dout = (torch.cat([p[i] for p in parts]) if parts else torch.zeros(0, HEADS, DIM) for i in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = offsets_of([p[0].shape[0] for p in parts]), offsets_of([p[1].shape[0] for p in parts])
    out, lse, _ = flash_attn_varlen_func(*leaves, cu_q, cu_k, QUERIES, 200, causal=causal, return_attn_probs=True, config=config)
    out.backward(dout)
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    results = []
    for b in range(len(parts)):
        rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(bounds_k[b], bounds_k[b + 1])
        results.append((out[rows].detach(), lse[:, rows].detach(), leaves[0].grad[rows], leaves[1].grad[keys], leaves[2].grad[keys]))
    return results


def compare(a, b):
    for x, y, what in zip(a, b, ("out", "lse", "dq", "dk", "dv"), strict=True):
        same_bits(x, y, what)


def others_are_as_before(after, before, victim):
    """Every sequence but one."""
    for b in range(len(LENGTHS)):
        if b != victim:
            compare(after[b], before[b])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("change", ["scale", "nan", "inf", "-inf"])
@pytest.mark.parametrize("victim", range(len(LENGTHS)))
def test_a_neighbour_changes_nothing(change, victim, causal):
    """B1: one sequence scaled by 1e4 or not finite; every other bit stays."""
    parts = pieces()
    before = drop_in(parts, causal)
    changed = list(parts)
    q, k, v, dout = (x.clone() for x in parts[victim])
    if change == "scale":
        q, k, v, dout = q * 1e4, k * 1e4, v * 1e4, dout * 1e4
    else:
        k[k.shape[0] // 2, 0, 3] = v[0, 1, 7] = float(change)
    changed[victim] = q, k, v, dout
    after = drop_in(changed, causal)
    others_are_as_before(after, before, victim)
    if change != "scale":
        visible = after[victim][0][-1]  # the last row sees every key, causal or not
        assert torch.isnan(visible[0]).all() and torch.isnan(visible[1]).any(), "the sequence itself must show it"


def test_non_finite_queries_stay_in_their_rows():
    """A NaN in q reaches its own scale block of queries and no other sequence; dK and dV of that sequence show it."""
    parts = pieces()
    before = drop_in(parts)
    parts[3][0][2, 0, 0] = torch.nan
    after = drop_in(parts)
    others_are_as_before(after, before, 3)
    assert torch.isnan(after[3][0][2, 0]).all() and torch.isnan(after[3][3][:, 0]).any()
    same_bits(after[3][0][:, 1], before[3][0][:, 1], "the other head")


def test_non_finite_dout_stays_in_its_sequence():
    parts = pieces()
    before = drop_in(parts)
    parts[1][3][0, 0, 0] = torch.inf
    after = drop_in(parts)
    others_are_as_before(after, before, 1)
    assert torch.isnan(after[1][4][:, 0]).any()


@pytest.mark.parametrize("causal", [False, True])
def test_permuting_sequences_permutes_results(causal):
    """G3."""
    parts = pieces()
    order = [4, 0, 5, 2, 1, 3]
    straight, permuted = drop_in(parts, causal), drop_in([parts[i] for i in order], causal)
    for place, i in enumerate(order):
        compare(permuted[place], straight[i])


def test_alone_and_in_a_batch_of_64():
    """G3."""
    parts = pieces([LENGTHS[i % 6] for i in range(64)])
    together = drop_in(parts)
    for b in (0, 17, 40, 63):
        compare(drop_in([parts[b]])[0], together[b])


def test_empty_sequences_can_be_dropped():
    """A1: out 0, LSE -inf, no gradient; everything else as without them."""
    lengths = [0, 5, 0, 3, 0]
    parts = pieces(lengths)
    results = drop_in(parts)
    without = drop_in([parts[1], parts[3]])
    for i, b in enumerate((1, 3)):
        compare(results[b], without[i])
    for b in (0, 2, 4):
        out, lse, dq, dk, _ = results[b]
        assert (out == 0).all() and torch.isneginf(lse).all() and (dq == 0).all() and dk.shape[0] == 0


def test_empty_sequences_give_shared_queries_nothing():
    """A1 for shared queries: dQ is the same sum without them, bit for bit."""
    full, short = make([0, 50, 0, 130, 0], 6, 2), make([50, 130], 6, 2)
    result = reference.forward(full.problem)
    dout = torch.randn(result.out.shape)
    grads = reference.backward(full.problem, result, dout)
    keep = torch.cat([torch.arange(6, 12), torch.arange(18, 24)])
    alone = reference.forward(short.problem)
    same_bits(result.out[keep], alone.out, "out")
    other = reference.backward(short.problem, alone, dout[keep])
    same_bits(grads.dq, other.dq, "dq")
    same_bits(whole(grads.dk), whole(other.dk), "dk")
    gone = torch.cat([torch.arange(0, 6), torch.arange(12, 18), torch.arange(24, 30)])
    assert (result.out[gone] == 0).all() and torch.isneginf(result.lse[:, gone]).all() and (grads.dv_mean[[0, 2, 4]] == 0).all()


def test_no_queries_give_keys_zero_gradients():
    """A3: sequences whose queries are empty get dK and dV of exactly 0 (memory from ``empty`` is poison here)."""
    q, k, v = torch.randn(9, 2, 32), torch.randn(30, 2, 32), torch.randn(30, 2, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    flash_attn_varlen_func(*leaves, offsets_of([0, 5, 4, 0]), offsets_of([7, 5, 3, 15]), 5, 15).sum().backward()
    for x in (k.grad, v.grad):
        assert (x[:7] == 0).all() and (x[15:] == 0).all() and (x[7:15] != 0).any(-1).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_last_offset_are_never_read(causal):
    """B6: the tail is NaN; results as without it, gradient of the tail 0."""
    parts = pieces()
    want = drop_in(parts, causal)
    nan = torch.full((37, HEADS, DIM), torch.nan)
    q, k, v, dout = (torch.cat([*[p[i] for p in parts], nan]).requires_grad_() for i in range(4))
    cu_q, cu_k = offsets_of([QUERIES] * 6), offsets_of(LENGTHS)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, QUERIES, 200, causal=causal, return_attn_probs=True)
    out.backward(dout.detach())
    n, t = int(cu_q[-1]), int(cu_k[-1])
    assert (out[n:] == 0).all() and torch.isneginf(lse[:, n:]).all()
    assert (q.grad[n:] == 0).all() and (k.grad[t:] == 0).all() and (v.grad[t:] == 0).all()
    for i, x in enumerate((out[:n], lse[:, :n], q.grad[:n], k.grad[:t], v.grad[:t])):
        same_bits(x.detach(), torch.cat([w[i] for w in want], 1 if i == 1 else 0), ("out", "lse", "dq", "dk", "dv")[i])


def test_mx_operands_past_the_last_offset_are_never_read():
    """B6 on MXFP8 operands: payload and scale bytes of the tail are 0xFF."""
    case, longer = make(HOSTILE_LENGTHS, 7, 2), make(HOSTILE_LENGTHS, 7, 2, tail=64)
    end = int(case.problem.offsets_k[-1])
    for x in (longer.problem.k, longer.problem.v):
        x.codes[end:] = 0xFF
        x.scale_bytes[end // 32 + len(HOSTILE_LENGTHS) :] = 0xFF
    (a, ga, _), (b, gb, _) = run(case), run(longer)
    for x, y, what in zip(a, b, a._fields, strict=True):
        same_bits(x, y, what)
    same_bits(ga.dq, gb.dq, "dq")
    for x, y in ((ga.dk, gb.dk), (ga.dv, gb.dv)):
        same_bits(x.codes, y.codes[:end], "codes")
        assert (y.codes[end:] == 0).all()


def test_twice_is_the_same():
    """G2's CPU part: every output and gradient repeats bit for bit, FP16 dQ too."""
    for config in (DEFAULT, DEFAULT.with_(dq_dtype=torch.float16)):
        case = make(HOSTILE_LENGTHS, 17, 4, 2, mode="dense", config=config)
        (a, ga, _), (b, gb, _) = run(case), run(case)
        for x, y in (*zip(a, b, strict=True), (ga.dq, gb.dq), (ga.dk.codes, gb.dk.codes), (ga.dv.codes, gb.dv.codes)):
            same_bits(x, y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_width(dtype):
    """D6: int32 and int64 offsets give the same bits."""
    q, k, v = torch.randn(12, 2, 32), torch.randn(70, 2, 32), torch.randn(70, 2, 32)
    base = flash_attn_varlen_func(q, k, v, offsets_of([4, 4, 4]), offsets_of([33, 0, 37]), 4, 37)
    same_bits(base, flash_attn_varlen_func(q, k, v, offsets_of([4, 4, 4], dtype), offsets_of([33, 0, 37], dtype), 4, 37))


def test_70000_sequences_of_two_events():
    """D4's CPU part, shortened to 2000: the batch is no grid axis anywhere."""
    case = make([2] * 2000, 1, 1, dim=32, mode="shared")
    result = reference.forward(case.problem)
    assert torch.isfinite(result.out).all() and result.out.shape == (2000, 1, 32)


@pytest.mark.parametrize("mode", ["shared", "dense"])
def test_equal_queries_alone_and_in_a_batch(mode):
    """G3 where the pre-pass takes all sequences at once: one sequence's rows, keys and values by itself give the same bits."""
    together = make(LENGTHS, 40, 2, mode=mode)
    result, grads, dout = run(together)
    p = together.problem
    starts = p.offsets_k.tolist()
    for b in (1, 4):
        keys, rows = slice(starts[b], starts[b + 1]), slice(40 * b, 40 * b + 40)
        q = together.q if mode == "shared" else together.q[rows]
        alone = make([LENGTHS[b]], 40, 2, mode=mode, tensors=(q, together.k[keys], together.v[keys]))
        single, other, _ = run(alone, dout[rows])
        same_bits(result.out[rows], single.out, "out")
        same_bits(whole(grads.dk)[keys], whole(other.dk), "dk")
        same_bits(whole(grads.dv)[keys], whole(other.dv), "dv")
        if mode == "dense":
            same_bits(grads.dq[rows], other.dq, "dq")


@pytest.mark.parametrize("dq_dtype", [torch.float32, torch.float16])
def test_the_future_changes_nothing_before_it(dq_dtype):
    """Causal rounding is causal: keys, values and queries from token 64 on are replaced, by larger ones that would move any shared scale or
    mean; outputs, LSE and dQ of the rows before them keep every bit, FP16 dQ too. (A block of 32 tokens shares a scale, hence the cut.)
    """
    g = torch.Generator().manual_seed(0)
    before = [torch.randn(200, 2, 32, generator=g) for _ in range(3)]
    after = [torch.cat([x[:64], 50.0 * torch.randn(136, 2, 32, generator=g)]) for x in before]
    dout = torch.randn(200, 2, 32, generator=g)
    config = DEFAULT.with_(dq_dtype=dq_dtype)
    (a, ga, _), (b, gb, _) = (
        run(make([200], 0, 2, mode="packed", dim=32, causal=True, config=config, tensors=t), dout) for t in (before, after)
    )
    same_bits(a.out[:64], b.out[:64], "out")
    same_bits(a.lse[:, :64], b.lse[:, :64], "lse")
    same_bits(ga.dq[:64], gb.dq[:64], "dq")
    assert (a.out[64:] != b.out[64:]).any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    queries=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    causal=st.booleans(),
    tail=st.integers(0, 3),
)
def test_any_batch_is_its_sequences_one_by_one(lengths, queries, causal, tail):
    """G3 as a property: jagged queries and keys, empties of either, a NaN tail; joined or alone, the same bits."""
    g = torch.Generator().manual_seed(sum(lengths))
    parts = [tuple(torch.randn(n, HEADS, DIM, generator=g) for n in (q, k, k, q)) for q, k in zip(queries, lengths, strict=False)]
    joined = [torch.cat([p[i] for p in parts] + [torch.full((tail, HEADS, DIM), torch.nan)]).requires_grad_() for i in range(3)]
    cu_q, cu_k = offsets_of([p[0].shape[0] for p in parts]), offsets_of(lengths)
    out, lse, _ = flash_attn_varlen_func(*joined, cu_q, cu_k, 6, 70, causal=causal, return_attn_probs=True)
    out.backward(torch.cat([p[3] for p in parts] + [torch.zeros(tail, HEADS, DIM)]))
    for b, part in enumerate(parts):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        grads = joined[0].grad[rows], joined[1].grad[keys], joined[2].grad[keys]
        compare((out[rows].detach(), lse[:, rows].detach(), *grads), drop_in([part], causal)[0])
