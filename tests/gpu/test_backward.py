"""The Hopper backward on a GPU against FP64, the reference, and itself.

Errors are relative in the Frobenius norm against FP64 attention on the reconstructed operands; the kernel may have at most twice the
error of the reference, which rounds at nearly the same points, plus one rounding of the gradient's own format.
"""

import dataclasses
import functools

import pytest
import torch

from lp_fa4 import reference
from lp_fa4.mx import MXTensor
from tests.gpu import problems
from tests.gpu.problems import DEVICE, poison, relative, row_sequences

pytestmark = pytest.mark.gpu

Case = functools.partial(problems.Case, bounded=True)
"""Queries as the quantizers code them: sums in FP16 hold their products. See ``test_unbounded_queries`` for others."""
HOSTILE = (0, 1, 31, 32, 33, 0, 127, 128, 129, 300, 1000, 0)
FORMAT_ROUNDING = {"bf16": 2.0**-9, "mxfp8": 2.0**-5}
JAGGED = (5, 0, 1, 129, 128, 127, 33, 200, 64, 7, 300, 2)


def gradient(p, seed=0, mean=0.0, scale=None):
    """dO, BF16."""
    g = torch.Generator(device=DEVICE).manual_seed(100 + seed)
    dout = torch.randn(p.rows, p.heads, p.head_dim, device=DEVICE, generator=g) + mean
    return (dout if scale is None else dout * scale).to(torch.bfloat16)


def run(p, result, dout, **kwargs):
    """Backward on dirty memory."""
    from lp_fa4.sm90.backward_host import backward

    poison()
    return backward(p, result, dout, **kwargs)


def configured(p, **changes):
    return dataclasses.replace(p, config=p.config.with_(**changes))


def values(x):
    return x.dequantize() if isinstance(x, MXTensor) else x.float()


def whole_dv(p, grads):
    """dV with its mean part added back."""
    dv = values(grads.dv).double()
    if grads.dv_mean is not None:
        inside = torch.arange(p.tokens, device=DEVICE) < p.offsets_k[-1]
        dv = dv + grads.dv_mean.double()[row_sequences(p.offsets_k, p.tokens)] * inside[:, None, None]
    return dv


def truth_of(p, dout):
    q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
    if p.v_mean is not None:
        v = v + p.v_mean.double()[row_sequences(p.offsets_k, p.tokens)]
    arguments = dict(offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q, softmax_scale=p.softmax_scale, causal=p.causal)
    rows = p.rows if p.offsets_q is None else int(p.offsets_q[-1])
    dout = torch.where((torch.arange(p.rows, device=DEVICE) < rows)[:, None, None], dout, 0)
    return reference.exact_gradients(dout, q, k, v, **arguments)


def check(p, dout, factor=2.0, result=None, **kwargs):
    """Errors of (dq, dk, dv), asserted against the reference's."""
    result = reference.forward(p) if result is None else result
    ours, theirs = run(p, result, dout, **kwargs), reference.backward(p, result, dout)
    out = {}
    for name, truth in zip(("dq", "dk", "dv"), truth_of(p, dout), strict=True):
        a, b = ((whole_dv(p, g) if name == "dv" else values(getattr(g, name))) for g in (ours, theirs))
        error, allowed = relative(a, truth), relative(b, truth)
        out[name] = (error, allowed)
        assert error <= factor * allowed + (0.0 if name == "dq" else FORMAT_ROUNDING[p.config.grad_format]), (
            f"{name}: {error:.3g}, reference {allowed:.3g}"
        )
    if ours.dv_mean is not None:
        allowed = 1e-4 * theirs.dv_mean.abs() + 1e-6 + 2.0**-24 * summands(p, dout)
        assert bool(((ours.dv_mean - theirs.dv_mean).abs() <= allowed).all()), "dv_mean"
    return out


def summands(p, dout):
    """Magnitudes that each element of dv_mean is a sum of, added up: FP32 adds in another order here, and where a sum cancels its error is
    a part of these, not of itself."""
    offsets_q = p.offsets_q if p.offsets_q is not None else torch.arange(p.batch + 1, device=DEVICE) * (p.rows // p.batch)
    keys = (p.offsets_k[1:] - p.offsets_k[:-1])[:, None, None]
    sums = reference.sequence_sums(dout.abs(), offsets_q).unflatten(1, (-1, p.group)).sum(2)
    return torch.where(keys > 0, sums / keys.clamp(min=1), 0.0)


CASES = {
    "module": Case(HOSTILE, queries=512, heads=3, kv_heads=3),
    "int64 and slack": Case(HOSTILE, queries=130, slack=77, dtype=torch.int64),
    "one query": Case(HOSTILE, queries=1),
    "three queries, not shared": Case(HOSTILE, queries=3, shared=False),
    "129 queries": Case(HOSTILE, queries=129, shared=False),
    "jagged queries": Case(HOSTILE, queries=JAGGED, shared=False, slack=9),
    "uncentred": Case(HOSTILE, queries=128, centred=False),
    "head 64": Case(HOSTILE, queries=128, dim=64),
    "groups of 128": Case(HOSTILE, queries=200, block=(128, 128), shared=False),
    "groups of 32, head 64": Case(HOSTILE, queries=70, block=(32, 64), dim=64),
    "square": Case(HOSTILE, queries=96, block=(32, 32)),
    "grouped heads": Case(HOSTILE, queries=128, heads=16, kv_heads=4, block=(128, 128), shared=False),
    "causal": Case((300, 128, 513, 1, 1000), queries=(300, 128, 513, 1, 1000), shared=False, causal=True, block=(128, 128)),
    "causal, fewer keys": Case((0, 5, 130, 257), queries=(40, 200, 140, 300), shared=False, causal=True),
    "causal, fewer queries, head 64": Case((200, 1000, 385), queries=(40, 200, 128), shared=False, causal=True, dim=64, block=(32, 64)),
    "long queries": Case((700, 90), queries=2150, shared=False),
    "causal, long queries": Case((2300, 90), queries=(2200, 2070), shared=False, causal=True),
    "long queries, groups of 128": Case((700, 90), queries=2150, shared=False, block=(128, 128)),
    "causal, long queries, groups of 128": Case((2300, 90), queries=(2200, 2070), shared=False, causal=True, block=(128, 128)),
    "long": Case((16384, 3000), queries=128),
    "sharp": Case((4096, 40), queries=128, block=(128, 128), score_std=4.0),
}


@pytest.mark.parametrize("grads", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", CASES)
def test_error(name, grads):
    p = configured(CASES[name].make(), grad_format=grads)
    print(name, grads, check(p, gradient(p)))


@pytest.mark.parametrize("name", ["module", "jagged queries", "grouped heads", "causal", "causal, long queries, groups of 128"])
def test_unbounded_queries(name):
    """Codes of q whose products FP16 does not hold: the form with FP32 sums."""
    p = dataclasses.replace(CASES[name], bounded=False).make()
    print(name, check(p, gradient(p)))


@pytest.mark.parametrize("dq_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_sums_that_overflow(shared, dq_dtype):
    """All queries of the first sequence are one, and dO has one column of one sign: FP16 sums of dV overflow there, the item is done again.
    The other's sums do not: its bits are those without the first."""
    lengths, queries = (40, 300), 512

    def same(q, k, v, offsets):
        q[:queries] = q[0]

    p = configured(Case(lengths, queries=queries, shared=shared).make(20, same), dq_dtype=dq_dtype)
    dout = 0.01 * gradient(p)
    dout[:queries, :, 5] = 1.0
    check(p, dout)
    got = run(p, reference.forward(p), dout)
    calm = dout.clone()
    calm[:queries] = gradient(p)[:queries]
    alone = run(p, reference.forward(p), calm)
    for name in ("dk", "dv"):
        a, b = (values(getattr(g, name))[lengths[0] :] for g in (got, alone))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", ["module", "jagged queries", "head 64", "groups of 32, head 64", "causal", "long queries", "long"])
def test_fp16_sums_of_dq(name):
    """FP16 sums under a bound: as right as the reference's, which bounds tighter; huge and tiny dO neither overflow nor vanish."""
    p = configured(CASES[name].make(19), dq_dtype=torch.float16)
    for scale in (1.0, 1e-8, 1e8):
        print(name, scale, check(p, gradient(p, scale=scale)))
    result, dout = reference.forward(p), gradient(p)
    a, b = (run(p, result, dout, deterministic=True) for _ in range(2))
    assert torch.equal(a.dq, b.dq)


@pytest.mark.parametrize("last", [0.0, 1e4, 1e8, float("nan")])
def test_groups_of_fp16_dq(last, monkeypatch):
    """Sequences that share a buffer of FP16 dQ, and a row's power of two: whatever the last one's dO is, the others' dK and dV have the
    bits that they have with a buffer each; dQ is as right as the reference's, in rows too where only the others have gradients."""
    from lp_fa4.sm90 import backward_host

    lengths, queries = (0, 300, 129, 1, 0, 40, 1000, 64, 5, 200, 128, 70, 260), 130
    p = configured(Case(lengths, queries=queries, heads=3, kv_heads=3).make(23), dq_dtype=torch.float16)
    result, dout = reference.forward(p), gradient(p)
    dout[:queries] *= 1e8  # of a sequence without keys: no part of anything
    dout[queries : 2 * queries] *= 1e-4
    monkeypatch.setattr(backward_host, "DQ_GROUP", 1)
    apart = run(p, result, dout)
    monkeypatch.undo()
    dout[-queries:] *= last
    ours = run(p, result, dout)
    begin = int(p.offsets_k[-2])
    for name in ("dk", "dv"):
        a, b = (values(getattr(g, name))[:begin] for g in (ours, apart))
        assert torch.equal(a, b), name
    if last == last:
        check(p, dout)
    dout[-queries:] = gradient(p)[-queries:]
    dout[-queries + 1 :] *= 0.0
    dout[-queries] *= 1e8 if last == last else last  # one row alone: the others keep what they are, under powers of their own
    calm = dout.nan_to_num(0.0)  # the same in those
    ours, theirs, truth = run(p, result, dout), reference.backward(p, result, calm), truth_of(p, calm)[0]
    assert relative(ours.dq[1:], truth[1:]) <= 2.0 * relative(theirs.dq[1:], truth[1:])


@pytest.mark.parametrize("falls", [(0, -1, 0), (-3, 0, -4), (0, -5, -1), (-9, 0, 0), (0, 0, -40), None])
@pytest.mark.parametrize(
    "queries, dtype, heads, shared", [(330, torch.float16, 4, False), (2150, torch.float32, 2, False), (330, torch.float16, 2, True)]
)
def test_tiles_of_q_of_different_size(falls, queries, dtype, heads, shared):
    """Where exponents of q differ in a chunk, by little (its turned codes come under one) and by much (another launch); rows of dO that
    make up for it, so that gradients of k count all tiles alike. None: one tile of zeros, one of NaN in another sequence."""
    lengths = (700, 90, 0, 257)
    sizes = torch.ones(queries, device=DEVICE)
    for i, fall in enumerate(falls or ()):
        sizes[128 * i : 128 * i + 128] = 2.0**fall

    def edit(q, k, v, offsets):
        q *= sizes.repeat(1 if shared else len(lengths))[:, None, None]
        if falls is None:
            q[128:256] = 0.0

    def spoil(q, k, v, offsets):
        edit(q, k, v, offsets)
        q[:128] = torch.nan

    case = Case(lengths, queries=queries, heads=heads, kv_heads=2, shared=shared, block=(128, 128))
    p = configured(case.make(7, edit=edit), dq_dtype=dtype, grad_format="bf16")
    dout = gradient(p).float()
    print(check(p, (dout / sizes.repeat(len(lengths))[:, None, None].clamp(min=2.0**-9)).bfloat16()))
    if falls is None and not shared:
        bad = configured(case.make(7, edit=spoil), dq_dtype=dtype, grad_format="bf16")
        good, broken = (run(x, reference.forward(x), dout.bfloat16()) for x in (p, bad))
        assert bool(broken.dk[:700].isnan().any())
        for name in ("dk", "dv"):
            assert torch.equal(getattr(good, name)[700:], getattr(broken, name)[700:]), name


def test_after_our_forward():
    """The whole path: the kernels' own forward feeds the backward."""
    from lp_fa4.sm90.forward_host import forward

    p = CASES["module"].make(1)
    print(check(p, gradient(p), result=forward(p)))


def test_conventional_recipe():
    p = Case(HOSTILE, queries=128, centred=False).make(2)
    p = configured(p, fold_l_into_do=False, delta_from="original", center_p_backward=False)
    print(check(p, gradient(p)))


def test_gradient_of_lse():
    p = Case(HOSTILE, queries=65, shared=False).make(3)
    result, dout = reference.forward(p), gradient(p)
    dlse = torch.randn(p.heads, p.rows, device=DEVICE)
    ours, theirs = run(p, result, dout, dlse=dlse), reference.backward(p, result, dout, dlse=dlse)
    for name in ("dq", "dk"):
        # codes of dO under another factor of their row, so two independent roundings of dO and of dS: sqrt(2) times E4M3's 2.6% at most,
        # and as much again from MXFP8
        assert relative(values(getattr(ours, name)), values(getattr(theirs, name)).double()) < (0.037 if name == "dq" else 0.05), name


@pytest.mark.parametrize("growth", [0.25, 4.0])
def test_rows_of_very_different_size(growth):
    """dO grows (shrinks) fourfold every 40 rows: the scale of dS has to move inside a sequence, warps disagree."""
    p = Case((700, 33), queries=400, shared=False).make(4)
    steps = (torch.arange(p.rows, device=DEVICE) % 400 // 40).float()
    print(check(p, gradient(p, scale=(growth**steps)[:, None, None])))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_size_per_sequence(scale):
    """Each sequence is as right as the largest."""
    p = Case(HOSTILE, queries=33, shared=False).make(5)
    sizes = torch.where(torch.arange(len(HOSTILE), device=DEVICE) % 2 == 1, scale, 1.0).repeat_interleave(33)
    dout = gradient(p, scale=sizes[:, None, None])
    ours = run(p, reference.forward(p), dout)
    truth = truth_of(p, dout)
    for b in range(len(HOSTILE)):
        keys = slice(int(p.offsets_k[b]), int(p.offsets_k[b + 1]))
        rows = slice(33 * b, 33 * (b + 1))
        assert relative(ours.dq[rows], truth[0][rows]) < 0.1
        if HOSTILE[b] > 1:  # one key: dS is 0
            assert relative(values(ours.dk)[keys], truth[1][keys]) < 0.12
            assert relative(whole_dv(p, ours)[keys], truth[2][keys]) < 0.12


@pytest.mark.parametrize("grads", ["bf16", "mxfp8"])
def test_zeros(grads):
    """Sequences without queries or without keys, an empty batch, slack: exact zeros on dirty memory."""
    p = configured(Case((7, 5, 3, 15), queries=(0, 5, 4, 0), shared=False, slack=6).make(6), grad_format=grads)
    ours = run(p, reference.forward(p), gradient(p))
    for x in (values(ours.dk), values(ours.dv)):
        assert not bool(x[:7].any()) and not bool(x[15:].any()) and bool(torch.isfinite(x).all())
    assert not bool(ours.dq[9:].any())
    p = configured(Case((0, 0, 0), queries=33).make(7), grad_format=grads)
    ours = run(p, reference.forward(p), gradient(p))
    assert not bool(ours.dq.any()) and ours.dk.shape[0] == 0 and not bool(ours.dv_mean.any())
    p = configured(Case((0, 40, 0), queries=33, shared=False).make(8), grad_format=grads)
    ours = run(p, reference.forward(p), gradient(p))
    assert not bool(ours.dq[:33].any()) and not bool(ours.dq[66:].any()) and not bool(ours.dv_mean[[0, 2]].any())


@pytest.mark.parametrize("keys", [512, 2048, 20000, 100000])
def test_uniform_attention(keys):
    """P = 1/K on a fixed scale vanishes or is biased; here dV's mean bias stays under 2%, with and without centring."""

    def edit(q, k, v, offsets):
        q[:] *= 0.01

    for centred in (True, False):
        p = Case((keys,), queries=128, heads=1, kv_heads=1, centred=centred, mean=False).make(9, edit)
        dout = gradient(p, mean=1.0)
        dv = whole_dv(p, run(p, reference.forward(p), dout))
        truth = truth_of(p, dout)[2]
        bias = float((dv * truth).sum() / (truth * truth).sum()) - 1.0
        print("bias", keys, centred, bias)
        assert abs(bias) < 0.02


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("queries", [512, 8192])
def test_sums_over_queries_are_not_biased(queries, centred):
    """dO with a mean: a sum left inside the tensor core loses what falls under its last bits, always towards 0.

    Centring takes the coherent part out of the sum, by the caller or by the kernel, and what is left is unbiased to 0.1%.
    """
    p = Case((256,), queries=queries, heads=1, kv_heads=1, shared=False, centred=centred, mean=False).make(10)
    dout = gradient(p, mean=1.0)
    result = reference.forward(p)
    ours, theirs = run(p, result, dout), reference.backward(p, result, dout)
    truth = truth_of(p, dout)
    for name, a, b, t in (("dk", values(ours.dk), values(theirs.dk), truth[1]), ("dv", whole_dv(p, ours), whole_dv(p, theirs), truth[2])):
        bias, allowed = (float((x.double() * t).sum() / (t * t).sum()) - 1.0 for x in (a, b))
        print("bias", queries, centred, name, bias, "reference", allowed)
        assert abs(bias) < 1e-3 + abs(allowed), name


@pytest.mark.parametrize("block", [(32, 32), (128, 128)])
def test_isolation(block):
    """One sequence full of NaN, or much larger: every other's dK, dV, dQ are bit-identical, with deterministic dQ (it alone
    is done with FP32 sums then)."""
    lengths = (31, 33, 1, 32, 127, 129, 200)
    case = Case(lengths, queries=70, block=block, shared=False)
    clean_p = case.make(11)
    dout = gradient(clean_p)
    clean = run(clean_p, reference.forward(clean_p), dout, deterministic=True)
    for value in (torch.nan, 1e3):

        def edit(q, k, v, offsets, value=value):
            k[offsets[3] : offsets[4]] *= value
            v[offsets[3] : offsets[4]] *= value

        p = case.make(11, edit)
        ours = run(p, reference.forward(p), dout, deterministic=True)
        for b in range(len(lengths)):
            if b == 3:
                continue
            keys, rows = slice(int(p.offsets_k[b]), int(p.offsets_k[b + 1])), slice(70 * b, 70 * b + 70)
            for x, y in zip(ours[1:3], clean[1:3], strict=True):
                assert torch.equal(values(x)[keys], values(y)[keys]), (value, b)
            assert torch.equal(ours.dq[rows], clean.dq[rows]), (value, b)
            assert torch.equal(ours.dv_mean[b], clean.dv_mean[b])


def test_nan_codes_of_a_neighbour():
    """NaN payloads right behind a sequence's last key (static exponents keep them) do not leak into it."""
    case = Case((40, 200, 90), queries=64, shared=False)
    p = case.make(12)
    dout = gradient(p)
    clean = run(p, reference.forward(p), dout, deterministic=True)
    result = reference.forward(p)
    p.k.codes[40:240] = 0x7F
    p.v.codes[40:240] = 0x7F
    ours = run(p, result, dout, deterministic=True)
    for b, keys in ((0, slice(0, 40)), (2, slice(240, 330))):
        assert torch.equal(values(ours.dk)[keys], values(clean.dk)[keys]) and torch.equal(values(ours.dv)[keys], values(clean.dv)[keys])
        assert torch.equal(ours.dq[64 * b : 64 * b + 64], clean.dq[64 * b : 64 * b + 64])


@pytest.mark.parametrize("shared", [True, False])
def test_repeats(shared):
    """dK and dV always repeat bit for bit; dQ does with ``deterministic=True``, and otherwise moves only within FP32 rounding."""
    p = Case((3000, 10, 777, 128, 4096), queries=256, heads=4, kv_heads=2, shared=shared).make(13)
    result, dout = reference.forward(p), gradient(p)
    exactly = [run(p, result, dout, deterministic=True) for _ in range(3)]
    loosely = [run(p, result, dout) for _ in range(5)]
    for g in exactly[1:] + loosely:
        assert torch.equal(values(g.dk), values(exactly[0].dk)) and torch.equal(values(g.dv), values(exactly[0].dv))
    for g in exactly[1:]:
        assert torch.equal(g.dq, exactly[0].dq)
    for g in loosely:
        assert relative(g.dq, exactly[0].dq.double()) < 1e-5


def test_order_of_sequences():
    """Permuting the sequences permutes dK and dV bit for bit."""
    lengths = (300, 5, 129, 64)
    p = Case(lengths, queries=100, shared=False).make(14)
    order = [2, 0, 3, 1]
    keys = torch.cat([torch.arange(int(p.offsets_k[b]), int(p.offsets_k[b + 1])) for b in order]).to(DEVICE)
    rows = torch.cat([torch.arange(100 * b, 100 * b + 100) for b in order]).to(DEVICE)
    offsets = torch.tensor([0, *torch.tensor([lengths[b] for b in order]).cumsum(0)], dtype=torch.int32, device=DEVICE)

    def take(x, index, offs):
        return MXTensor.from_bytes(x.codes[index], x.scale_bytes, x.block, offs, 0)

    other = dataclasses.replace(
        p,
        q=take(p.q, rows, p.q.offsets),
        k=take(p.k, keys, offsets),
        v=take(p.v, keys, offsets),
        offsets_k=offsets,
        v_mean=p.v_mean[order],
        v_sum=p.v_sum[order],
    )
    result, dout = reference.forward(p), gradient(p)
    moved = result._replace(
        **{n: getattr(result, n)[rows] for n in ("out", "centred_out")},
        **{n: getattr(result, n)[:, rows] for n in ("lse", "row_max", "row_sum")},
    )
    a, b = run(p, result, dout, deterministic=True), run(other, moved, dout[rows], deterministic=True)
    for x, y, index in ((a.dk, b.dk, keys), (a.dv, b.dv, keys), (a.dq, b.dq, rows)):
        if isinstance(x, MXTensor):
            assert torch.equal(x.codes[index], y.codes)
        else:
            assert torch.equal(x[index], y)


def test_no_host_read_and_one_compilation():
    """No synchronisation, and no compile key that depends on data."""
    from lp_fa4.compile import compile_count

    problems = [Case(lengths, queries=64).make(15) for lengths in ((5, 200), (0, 1, 2), (1000,), (0,) * 9 + (3,))]
    prepared = [(p, reference.forward(p), gradient(p)) for p in problems]
    run(*prepared[0])
    torch.cuda.synchronize()
    count = compile_count()
    torch.cuda.set_sync_debug_mode("error")
    try:
        from lp_fa4.sm90.backward_host import backward

        for p, result, dout in prepared:
            backward(p, result, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compile_count() == count


def test_graph_replay_with_other_lengths():
    """A captured backward serves other lengths in the same buffers."""
    from lp_fa4.sm90.backward_host import backward

    p = Case((200, 30, 0, 26), queries=64).make(16)
    result, dout = reference.forward(p), gradient(p)
    static = [x.clone() for x in (result.centred_out, result.row_max, result.row_sum)]
    held = result._replace(centred_out=static[0], row_max=static[1], row_sum=static[2])
    backward(p, held, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backward(p, held, dout)
    for lengths in ((1, 255, 0, 0), (64, 64, 64, 64), (0, 0, 0, 0)):
        p.offsets_k.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0)]))
        again = reference.forward(p)
        for x, y in zip(static, (again.centred_out, again.row_max, again.row_sum), strict=True):
            x.copy_(y)
        graph.replay()
        fresh = backward(p, held, dout)
        torch.cuda.synchronize()
        assert torch.equal(values(out.dk), values(fresh.dk)) and torch.equal(values(out.dv), values(fresh.dv)), lengths
        torch.testing.assert_close(out.dq, fresh.dq, rtol=1e-4, atol=1e-6)


def test_seventy_thousand_sequences():
    p = Case((2,) * 70_000, queries=1, heads=1, kv_heads=1, mean=False, centred=False).make(17)
    from lp_fa4.sm90.forward_host import forward

    result, dout = forward(p), gradient(p)
    ours = run(p, result, dout)
    k, v, q = (x.dequantize() for x in (p.k, p.v, p.q))
    s = torch.softmax((k.view(70_000, 2, -1) @ q[0, 0]) * p.softmax_scale, -1)
    truth = s[:, :, None] * dout.float()
    assert relative(values(ours.dv).view(70_000, 2, -1), truth.double()) < 0.05
    ds = s * ((v.view(70_000, 2, -1) * dout.float()).sum(-1) - (s * (v.view(70_000, 2, -1) * dout.float()).sum(-1)).sum(-1, keepdim=True))
    assert relative(values(ours.dk).view(70_000, 2, -1), (ds[:, :, None] * q[0, 0] * p.softmax_scale).double()) < 0.06


def test_refusals():
    p = Case((40,), queries=8).make(18)
    result = reference.forward(p)
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        run(p, result, gradient(p).float())
    with pytest.raises(ValueError, match=r"config\.grad_block"):
        run(configured(p, grad_block=(32, 128)), result, gradient(p))
