"""Error of the reference against FP64.

Table of tolerances (dB of signal to noise, a floor; each stands 1.5 dB or more under what was seen, for the seeds' spread):

| what | floor | reason |
|---|---|---|
| out, centred, s = 1/3 | 30 | P - c is small where attention is flat: E4M3's 31.5 dB applies to the deviation only |
| out, centred, s = 1 | 25 | q, k and P each carry E4M3's noise, 31.5 dB relative to themselves |
| out, uncentred or causal | 24 | P itself carries it |
| dq, dk | 21 | q, k, v, dO, dS and the recomputed P, six roundings |
| dv | 22 | dO and P: 28 dB; short sequences average over few queries |
| lse | 0.12 absolute | one key: a score of standard deviation 1 whose q and k each carry 2.7% rms; four standard deviations |
"""

import dataclasses

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.config import DEFAULT, AttentionConfig
from lp_fa4.mx import quantize_mx
from lp_fa4.problem import AttentionProblem
from tests.attention.helpers import Case, full_dv, make, run, sqnr, whole
from tests.conftest import HOSTILE_LENGTHS, offsets_of


def check(case: Case, out: float, dqk: float = 21.0, dv: float = 22.0) -> None:
    result, grads, dout = run(case)
    truth, lse = case.exact()
    assert sqnr(result.out, truth) >= out
    gq, gk, gv = case.exact_gradients(dout)
    assert sqnr(grads.dq, gq) >= dqk
    assert sqnr(whole(grads.dk), gk) >= dqk
    assert sqnr(full_dv(grads, case.problem), gv) >= dv
    blind = torch.isneginf(lse)
    assert torch.equal(torch.isneginf(result.lse), blind)
    assert (result.out.transpose(0, 1)[blind] == 0).all()


@pytest.mark.parametrize("mode", ["shared", "dense", "jagged", "packed"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_every_kind_of_queries(mode, kv_heads):
    queries = [3, 0, 33, 8, 1, 5, 2, 64, 7, 0] if mode == "jagged" else 33
    check(make(HOSTILE_LENGTHS, queries, 2, kv_heads, 32, mode=mode, mean=0.5), 24.0)


@pytest.mark.parametrize("mode", ["dense", "jagged", "packed"])
def test_causal(mode):
    queries = [3, 0, 33, 8, 40, 5, 200, 64, 7, 2] if mode == "jagged" else 40
    check(make(HOSTILE_LENGTHS, queries, 2, 1, 32, mode=mode, causal=True), 23.0)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 192, 224, 256])
def test_every_head_dimension(dim):
    check(make([129, 40], 9, 1, dim=dim), 25.0)


@pytest.mark.parametrize("block", [(32, 32), (32, 64), (128, 64)])
def test_every_block(block):
    check(make(HOSTILE_LENGTHS, 5, 2, block=block, mode="dense"), 25.0)


@pytest.mark.parametrize("queries", [1, 3, 4, 31, 33, 127, 128, 129])
def test_few_queries_and_rows_around_a_tile(queries):
    """B7."""
    check(make([130, 0, 40], queries, 1), 22.0, 19.0, 20.0)  # one query is 128 numbers: 3 dB of spread


def test_non_causal_with_unequal_lengths():
    """B10: 4 queries against 1 to 300 keys, each sequence by itself as good as the rest."""
    lengths = list(range(1, 301, 23))
    case = make(lengths, 4, 1, dim=32)
    result, _, _ = run(case)
    truth, _ = case.exact()
    per = [sqnr(result.out[4 * b : 4 * b + 4], truth[4 * b : 4 * b + 4]) for b in range(len(lengths))]
    assert min(per) > 20.0  # one sequence has 128 output numbers: 3 dB below the batch's floor


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 257])
@pytest.mark.parametrize("before", [0, 33])
def test_any_length_after_any_offset(length, before):
    """B2: no length needs padding, wherever its sequence starts."""
    check(make([before, length], 5, 1, dim=32, seed=length), 20.0, 18.0, 20.0)  # few numbers: up to 5 dB of spread


@pytest.mark.parametrize("length", [1, 33, 200])
def test_one_key_returns_its_value(length):
    """Attention over equal values is that value: centring leaves nothing to round."""
    v = torch.full((length, 1, 32), 0.7310)
    case = make([length], 3, 1, dim=32, tensors=(torch.randn(3, 1, 32), torch.randn(length, 1, 32), v))
    result, _, _ = run(case)
    torch.testing.assert_close(result.out.float(), torch.full_like(result.out.float(), 0.7310), rtol=2**-8, atol=0)


def test_flat_attention_profits_from_centring():
    """s = 1/3, values centred in both: centring P as well gains at least 5 dB in the forward and 6 in dV."""
    errors = {}
    for name, config in (("centred", DEFAULT), ("plain", DEFAULT.with_(center_p=False, center_p_backward=False))):
        case = make([600, 500], 32, 1, score_std=1 / 3, config=config)
        made = reference.prepare(case.q, case.k, case.v, None, case.problem.offsets_k, False, DEFAULT)
        problem = AttentionProblem(
            made.q, made.k, made.v, offsets_k=case.problem.offsets_k, shared_q=True, v_mean=made.v_mean, v_sum=made.v_sum, config=config
        )
        case.problem = problem
        result, grads, dout = run(case)
        errors[name] = sqnr(result.out, case.exact()[0]), sqnr(full_dv(grads, problem), case.exact_gradients(dout)[2])
    assert errors["centred"][0] > errors["plain"][0] + 5.0, errors
    assert errors["centred"][1] > errors["plain"][1] + 6.0, errors


def test_rising_maximum_does_not_hurt_with_length():
    """C8: every key tile exceeds the last by just under the lazy threshold, so P stays as large as it can;
    the error must not grow with length, and E4M3 must beat E5M2 (which has the range but not the mantissa)."""
    config = DEFAULT.with_(center_p=False, center_p_backward=False)
    errors = {}
    for length in (512, 4096):
        for step in (1.7, 1.8):  # below tau the maximum never moves between neighbours, above it always does
            tile = torch.arange(length) // config.key_tile
            level = (tile % 4) * step * 0.6931 + (tile // 4) * 0.01  # natural units; climbs, falls back, climbs
            k = torch.zeros(length, 1, 32)
            k[:, 0, 0] = level
            q = torch.zeros(4, 1, 32)
            q[:, 0, 0] = 32**0.5
            v = torch.randn(length, 1, 32, generator=torch.Generator().manual_seed(1)) + 1.0
            case = make([length], 4, 1, dim=32, config=config, tensors=(q, k, v))
            p = case.problem
            exact, _ = reference.exact_attention(*(x.dequantize() for x in (p.q, p.k, p.v)), shared_q=True)
            errors[length, step] = sqnr(reference.forward(p).out, exact)
    assert min(errors.values()) > 35.0  # P's rounding averages over hundreds of keys; saturation would leave 3 to 17 dB


def test_e4m3_beats_e5m2_for_p(monkeypatch):
    """C8's second half, on ordinary data."""
    case = make([700], 16, 1, config=DEFAULT.with_(center_p=False, center_p_backward=False))
    p = case.problem
    exact, _ = reference.exact_attention(*(x.dequantize() for x in (p.q, p.k, p.v)), offsets_k=p.offsets_k, shared_q=True)
    e4m3 = sqnr(reference.forward(p).out, exact)
    module = __import__("lp_fa4.reference.forward", fromlist=["forward"])
    monkeypatch.setattr(module, "codes_to_float", lambda x: x.to(torch.float8_e5m2).to(torch.float32) / 256.0)
    e5m2 = sqnr(reference.forward(p).out, exact)
    assert e4m3 > e5m2 + 4.0


@pytest.mark.parametrize("length", [512, 2048, 20000, 100000])
@pytest.mark.parametrize("center", [True, False])
def test_uniform_attention_keeps_dv(length, center):
    """C9: K = 0. A normalised P of 1/L on a fixed scale dies with L; dividing dO by the row sum instead keeps dV's mean within 7% (one E4M3
    rounding of a constant is at most 6.25%), centred within 1%."""
    config = DEFAULT.with_(center_p=center, center_p_backward=center, grad_format="bf16")
    q, k = torch.randn(2, 1, 32), torch.zeros(length, 1, 32)
    v = torch.randn(length, 1, 32, generator=torch.Generator().manual_seed(0))
    case = make([length], 2, 1, dim=32, config=config, tensors=(q, k, v))
    _, grads, dout = run(case)
    mean, expected = full_dv(grads, case.problem).mean(0), dout.sum(0) / length
    assert abs((mean * expected).sum() / (expected**2).sum() - 1) < (0.001 if center else 0.07)


def test_normalised_p_on_a_fixed_scale_dies_with_length():
    """The other side of C9, and why the default folds 1/l into dO: the conventional recipe loses dV at 262144 keys and more."""
    case = make(
        [300000],
        1,
        1,
        dim=32,
        config=AttentionConfig.post(grad_format="bf16"),
        tensors=(torch.randn(1, 1, 32), *[torch.zeros(300000, 1, 32)] * 2),
    )
    _, grads, _ = run(case)
    assert (grads.dv == 0).all()


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_few_queries_long_sequences(queries, batch):
    """G11: 16k keys; as good as a short sequence."""
    case = make([16384] * batch, queries, 1, dim=32, score_std=0.5)
    result, _, _ = run(case)
    assert sqnr(result.out, case.exact()[0]) > 25.0
    assert (result.lse - case.exact()[1]).abs().max() < 20.0  # k_mean is not in the problem's LSE: only finite is asked here


def test_delta_from_quantized_do_when_tokens_share_a_mean():
    """D from the original dO costs query gradients several dB when tokens share a mean. Values are not centred here, so the mean stays."""
    errors = {}
    for source in ("quantized", "original"):
        config = DEFAULT.with_(delta_from=source, center_p=False, center_p_backward=False)
        case = make([500, 300], 64, 1, config=config, mean=3.0)
        _, grads, dout = run(case)
        errors[source] = sqnr(grads.dq, case.exact_gradients(dout)[0])
    assert errors["quantized"] > errors["original"] + 3.0


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e4])
def test_fp16_dq_on_its_bound_is_as_good_as_fp32(size):
    """Neither tiny gradients (mean losses over large batches) nor heavy ones lose anything; 0.1 dB is allowed for FP16's own rounding."""
    errors = {}
    for dtype in (torch.float32, torch.float16):
        case = make([300, 0, 1000], 40, 2, mode="dense", config=DEFAULT.with_(dq_dtype=dtype))
        result = reference.forward(case.problem)
        dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1)) * size
        dout[::7] *= 30.0
        grads = reference.backward(case.problem, result, dout)
        errors[dtype] = sqnr(grads.dq, case.exact_gradients(dout)[0])
    assert errors[torch.float16] > errors[torch.float32] - 0.1


def test_fp16_dq_on_a_fixed_scale_underflows_and_overflows():
    """Why the bound is the default."""
    config = DEFAULT.with_(dq_dtype=torch.float16, dq_scale=9)
    case = make([1000], 40, 2, mode="dense", config=config)
    result = reference.forward(case.problem)
    dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1))
    exact = case.exact_gradients(dout)[0]
    assert sqnr(reference.backward(case.problem, result, dout * 1e-9).dq * 1e9, exact) < 10.0
    assert not torch.isfinite(reference.backward(case.problem, result, dout * 1e5).dq).all()


@pytest.mark.parametrize(
    "changes",
    [
        dict(ds_block=(128, 128)),
        dict(ds_block=None),
        dict(ds_block=(0, 0)),
        dict(do_block=(32, 0)),
        dict(do_block=(1, 0)),
        dict(key_tile=64),
    ],
)
def test_block_shapes_hardly_matter(changes):
    """Within 0.5 dB of the default on ordinary data."""
    base, other = make([200, 77], 70, 1, mode="dense"), make([200, 77], 70, 1, mode="dense", config=DEFAULT.with_(**changes))
    (_, a, dout), (_, b, _) = run(base), run(other)
    truth = base.exact_gradients(dout)
    assert abs(sqnr(a.dq, truth[0]) - sqnr(b.dq, truth[0])) < 0.5
    assert abs(sqnr(whole(a.dk), truth[1]) - sqnr(whole(b.dk), truth[1])) < 0.5


def test_post_preset_runs_at_its_own_rounding_points():
    check(make(HOSTILE_LENGTHS, 33, 2, config=AttentionConfig.post()), 24.0, 20.0)


def test_gradient_formats():
    case = make(HOSTILE_LENGTHS, 8, 2)
    base = run(case)[1]
    for changes in (dict(grad_format="bf16"), dict(grad_block=(32, 64)), dict(grad_block=(128, 64))):
        other = run(make(HOSTILE_LENGTHS, 8, 2, config=DEFAULT.with_(**changes)))[1]
        assert sqnr(whole(other.dk), whole(base.dk)) > 28.0 and sqnr(whole(other.dv), whole(base.dv)) > 28.0  # one E4M3 rounding: 31.5 dB


def test_q_smoothing_helps_similar_queries():
    """Queries that share a large mean: quantizing what is left of them and adding the mean's scores, of unrounded keys, in FP32."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(32, 2, 64, generator=g) * 0.2 + torch.randn(1, 2, 64, generator=g)
    case = make([300, 40, 0], 32, 2, tensors=(q, torch.randn(340, 2, 64, generator=g), torch.randn(340, 2, 64, generator=g)))
    plain = sqnr(run(case)[0].out, case.exact()[0])
    p = case.problem
    mean = q.mean(0)
    smooth = AttentionProblem(
        quantize_mx(q - mean, token_dim=0), p.k, p.v, offsets_k=p.offsets_k, shared_q=True, v_mean=p.v_mean, v_sum=p.v_sum, q_mean=mean
    )
    keys = reference.centre(case.k, p.offsets_k)[0]
    better = dataclasses.replace(smooth, mean_scores=torch.einsum("hd,thd->ht", mean, keys))
    case.problem = smooth
    half = sqnr(run(case)[0].out, case.exact()[0])
    case.problem = better
    result, grads, dout = run(case)
    assert plain + 0.5 < half < sqnr(result.out, case.exact()[0]) - 2.0
    gq, gk, gv = case.exact_gradients(dout)
    assert sqnr(grads.dq, gq) > 20.0 and sqnr(whole(grads.dk), gk) > 20.0 and sqnr(full_dv(grads, better), gv) > 20.0


def test_stabilizer_keeps_p_from_being_one_at_several_places():
    """Repeated keys: each row's maximum is attained many times. The result must be as good, and the reported maximum above the true one."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(50, 1, 64, generator=g).repeat(6, 1, 1)
    tensors = (torch.randn(16, 1, 64, generator=g), k, torch.randn(300, 1, 64, generator=g))
    plain, stable = make([300], 16, 1, tensors=tensors), make([300], 16, 1, tensors=tensors, config=DEFAULT.with_(softmax_stabilizer=True))
    a, b = run(plain)[0], run(stable)[0]
    torch.testing.assert_close(b.row_max, a.row_max + 0.5)
    torch.testing.assert_close(b.lse, a.lse, rtol=1e-5, atol=1e-5)
    assert sqnr(b.out, stable.exact()[0]) > sqnr(a.out, plain.exact()[0]) - 0.5
    check(stable, 25.0)


def test_pieces_of_a_sequence_do_not_change_it(monkeypatch):
    """Large sequences are computed in pieces of rows and heads: the same up to the order of FP32 sums."""
    module = __import__("lp_fa4.reference.rounding", fromlist=["chunks"])
    for causal in (False, True):
        case = make([300, 70], 200, 4, 2, 32, mode="dense", causal=causal, config=DEFAULT.with_(grad_format="bf16"))
        a, ga, dout = run(case)
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 13)
        b, gb, _ = run(case, dout)
        monkeypatch.undo()
        # P and dS may fall on the other side of an E4M3 tie after an FP32 difference of one ulp: rare, so 45 dB and not equality
        assert sqnr(b.out, a.out) > 45 and sqnr(gb.dq, ga.dq) > 45 and sqnr(gb.dk, ga.dk) > 45 and sqnr(gb.dv, ga.dv) > 45


def test_exact_gradients_are_those_of_finite_differences():
    """The truth itself: FP64 autograd against central differences, relative error 1e-6 (step 1e-6 in FP64: about 1e-9 expected)."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, h, 2, dtype=torch.float64, generator=g).requires_grad_() for n, h in ((7, 2), (6, 1), (6, 1))]
    for causal in (False, True):
        arguments = dict(offsets_k=offsets_of([0, 2, 4]), offsets_q=offsets_of([1, 4, 2]), causal=causal)
        assert torch.autograd.gradcheck(
            lambda q, k, v, a=arguments: reference.exact_attention(q, k, v, **a)[0], tensors, atol=1e-6, rtol=1e-6
        )


def test_backward_is_the_finite_difference_of_the_truth():
    """A step along a random direction changes the FP64 loss by what the reference's gradients say, within the quantization error (5%: noise
    of 25 dB is 5.6% in norm, and a random direction sees a fraction of it)."""
    case = make([200, 0, 90], 32, 2, mode="dense", score_std=0.5)
    _, grads, dout = run(case)
    g = torch.Generator().manual_seed(3)
    for index, gradient in enumerate((grads.dq, whole(grads.dk), full_dv(grads, case.problem))):
        tensors = [x.double() for x in (case.q, case.k, case.v)]
        direction = gradient.double() + gradient.abs().mean() * torch.randn(gradient.shape, generator=g, dtype=torch.float64)
        losses = []
        for sign in (1, -1):
            moved = list(tensors)
            moved[index] = moved[index] + sign * 1e-4 * direction
            losses.append((reference.exact_attention(*moved, **case.arguments)[0] * dout).sum())
        slope = (losses[0] - losses[1]) / 2e-4
        assert abs((gradient.double() * direction).sum() / slope - 1) < 0.05


def test_lse_of_uncentred_keys():
    case = make(HOSTILE_LENGTHS, 5, 2, config=DEFAULT.with_(center_p=False, center_p_backward=False))
    result = reference.forward(case.problem)
    torch.testing.assert_close(result.lse.double(), case.exact()[1], atol=0.12, rtol=0)
    rebuilt = (result.row_max + result.row_sum.log2()) * 0.6931471805599453
    torch.testing.assert_close(rebuilt, result.lse)
    assert (result.row_sum[~torch.isneginf(result.lse)] >= 1.0 - 1e-6).all(), "the row sum is taken against the exact maximum"
