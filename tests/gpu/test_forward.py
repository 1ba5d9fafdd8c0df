"""The Hopper forward on a GPU against FP64, the reference, and itself."""

import dataclasses

import pytest
import torch

from lp_fa4 import sm90
from tests.gpu.problems import DEVICE, Case, check, exact, poison, relative

pytestmark = pytest.mark.gpu

HOSTILE = (0, 1, 31, 32, 33, 0, 127, 128, 129, 300, 1000, 0)


def run(problem, **kwargs):
    """Forward on dirty memory."""
    from lp_fa4.sm90.forward_host import forward

    poison()
    return forward(problem, **kwargs)


CASES = {
    "module": Case(HOSTILE, queries=512, heads=3, kv_heads=3),
    "module, int64 and slack": Case(HOSTILE, queries=130, slack=77, dtype=torch.int64),
    "one query": Case(HOSTILE, queries=1),
    "three queries, not shared": Case(HOSTILE, queries=3, shared=False),
    "jagged queries": Case(HOSTILE, queries=(5, 0, 1, 129, 128, 127, 33, 200, 64, 7, 300, 2), shared=False, slack=9),
    "uncentred": Case(HOSTILE, queries=128, centred=False),
    "centred, no mean": Case(HOSTILE, queries=64, mean=False),
    "head 64": Case(HOSTILE, queries=128, dim=64),
    "groups of 128": Case(HOSTILE, queries=200, block=(128, 128), shared=False),
    "groups of 32": Case(HOSTILE, queries=200, block=(32, 128), shared=False),
    "groups of 32, head 64": Case(HOSTILE, queries=70, block=(32, 64), dim=64),
    "square": Case(HOSTILE, queries=96, block=(32, 32)),
    "square, head 64": Case(HOSTILE, queries=96, block=(32, 32), dim=64, shared=False),
    "grouped heads": Case(HOSTILE, queries=128, heads=16, kv_heads=4, block=(128, 128), shared=False),
    "causal": Case((300, 128, 513, 1, 1000), queries=(300, 128, 513, 1, 1000), shared=False, causal=True, block=(128, 128)),
    "causal, fewer keys": Case((0, 5, 130, 257), queries=(40, 200, 140, 300), shared=False, causal=True),
    "causal, fewer queries, head 64": Case((200, 1000, 385), queries=(40, 200, 128), shared=False, causal=True, dim=64, block=(32, 64)),
    "few queries": Case((5000, 0, 257, 1, 1024), queries=4),
    "few queries, head 64": Case((300, 0, 31, 1513), queries=5, dim=64, block=(128, 64), shared=False),
    "few queries, grouped heads": Case((300, 0, 31, 1513), queries=3, heads=8, kv_heads=2, block=(32, 128), shared=False),
    "few queries, head 64, shared": Case((300, 0, 31, 1, 1513), queries=5, dim=64),
    "few queries, groups of 128, shared": Case((300, 0, 31, 1513), queries=3, heads=8, kv_heads=2, block=(128, 128)),
    "few queries, groups of 32, shared": Case((300, 0, 31, 1513), queries=9, block=(32, 128), centred=False),
    "forty queries": Case((1300, 33, 0), queries=40),
    "split keys": Case((5000, 0, 1025, 1, 1024), queries=40, heads=4, kv_heads=2),
    "split keys, groups of 32, not centred": Case((3000, 64), queries=20, heads=8, block=(32, 128), shared=False, centred=False),
    "long": Case((16384, 3000), queries=128),
    "long, sharp": Case((8192, 40), queries=128, block=(128, 128), score_std=4.0),
}


# FP16 scores need queries whose rows are bounded; as above they are not
CASES |= {
    f"{name}, bounded": dataclasses.replace(case, bounded=True)
    for name, case in CASES.items()
    if case.block in ("static", (128, 128)) and "few" not in name
}


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    problem = CASES[name].make()
    result = run(problem)
    # FP16 scores are rounded to 2^-11 of themselves, and so is their factor; where these are large the LSE shows it
    largest = float(exact(problem)[1].nan_to_num(neginf=0.0).abs().max()) if CASES[name].bounded and problem.rows else 0.0
    print(name, check(problem, result, lse_tolerance=max(4e-3, 2.0**-10 * largest)))
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.block != (32, 32)])
def test_copied_values(name):
    """V^T from memory or made by the kernels: the same bits. With FP16 scores P V of two tiles is in one FP8 accumulator where V is
    turned and P centred, and only there; it cuts its sums at 2^-13 then at other places."""
    from lp_fa4.sm90.operands import MXTensorWithCopy
    from lp_fa4.sm90.transpose import transposed_copy

    problem = CASES[name].make()
    v, offsets = problem.v, problem.offsets_k
    copied = MXTensorWithCopy(v.payload, v.scale, v.block, v.offsets, v.token_dim, transposed_copy(v.codes, offsets, "accumulator"))
    plain, other = run(problem), run(dataclasses.replace(problem, v=copied))
    pairs = CASES[name].bounded and CASES[name].block == "static" and problem.centred
    for field in ("lse", "row_max", "row_sum") if pairs else ("out", "centred_out", "lse", "row_max", "row_sum"):
        assert torch.equal(getattr(plain, field), getattr(other, field)), field
    assert relative(plain.centred_out, other.centred_out.double()) <= 2.0**-9  # half of BF16's last place


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("block", [(128, 128), (32, 128), (32, 32)])
def test_scales_per_sequence(scale, block):
    def edit(q, k, v, offsets):
        for b in range(0, len(offsets) - 1, 2):
            v[offsets[b] : offsets[b + 1]] *= scale
            k[offsets[b] : offsets[b + 1]] *= min(scale, 3.0)

    problem = Case(HOSTILE, queries=33, block=block).make(2, edit)
    result = run(problem)
    check(problem, result)
    truth, _ = exact(problem)
    for b in range(len(HOSTILE)):  # each sequence by itself: a global norm would hide the small ones
        if HOSTILE[b]:
            rows = slice(33 * b, 33 * (b + 1))
            assert relative(result.out[rows], truth[rows]) < 0.05


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 8, 12, 33])  # each width of columns
def test_values_at_the_ends_of_e4m3(queries, dim):
    """Parts of few queries are FP16 times 2^-10, which no finite codes of 256 keys leave: V of the largest codes, of both signs."""
    ends = torch.where(torch.arange(dim) % 3 == 0, -448.0, 448.0)
    lengths = (1000, 0, 256, 31)

    def even(q, k, v, offsets):
        q.zero_()
        v.copy_(ends.to(v.device))

    def sharp(q, k, v, offsets):
        v.copy_(torch.where(v < 0, -448.0, 448.0))

    for centred in (False, True):
        result = run(Case(lengths, queries=queries, dim=dim, centred=centred, mean=False).make(4, even))
        rows = torch.tensor([n > 0 for n in lengths]).repeat_interleave(queries).to(DEVICE)
        # all weights are equal, every sum is a multiple of 56 with at most 11 bits: nothing is rounded
        assert torch.equal(result.out[rows].float(), ends.to(DEVICE).expand(int(rows.sum()), 2, dim)), centred
        assert bool((result.out[~rows] == 0).all())
        for std in (1.0, 6.0):
            problem = Case(lengths, queries=queries, dim=dim, centred=centred, mean=False, score_std=std).make(5, sharp)
            # with scores this large the products' cut sums show in the LSE
            check(problem, run(problem), lse_tolerance=4e-3 if std == 1.0 else 1e-2)


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**-14, 1.0, 2.0**14])
def test_factors_of_tiles(scale):
    """One tile of keys far smaller or larger than the rest: scores from nothing to one key that takes a row."""

    def edit(q, k, v, offsets):
        k[128:256] *= scale

    problem = Case((520, 100), queries=100, block=(128, 128), shared=False, bounded=True).make(2, edit)
    _, lse = exact(problem)
    check(problem, run(problem), lse_tolerance=max(4e-3, 2.0**-9 * float(lse.abs().max())))


@pytest.mark.parametrize("block", ["static", (128, 128), (32, 128)])
def test_magnitudes_within_a_sequence(block):
    """Blocks of V of very different size, one of zeros; rows that attend to small or zero V keep their weights."""

    def edit(q, k, v, offsets):
        v[32:64] *= 2.0**-14 if block != "static" else 0.5
        v[128:256] = 0.0
        v[256:384] *= 2.0**-9 if block != "static" else 0.25
        k[128:160] += 0.5 * q[0].mean(0)

    problem = Case((520,), queries=128, block=block, mean=False, centred=False).make(3, edit)
    check(problem, run(problem))
    problem = Case((520,), queries=128, block=block, mean=False).make(3, edit)
    check(problem, run(problem))


def test_rising_maximum():
    """Keys sorted so that every tile raises the row maximum by just under, and just over, the threshold."""
    for step in (1.7, 1.8, 6.0):

        def edit(q, k, v, offsets, step=step):
            q[:] = 0.01 * q
            q[..., 0] = 4.0
            tile = torch.arange(4096, device=DEVICE) // 128
            k[..., 0] = (tile * step * 0.6931 * 128**0.5 / 4.0)[:, None] / 16

        problem = Case((4096,), queries=128, block=(32, 128), centred=False).make(4, edit)
        check(problem, run(problem))
        problem = Case((4096,), queries=128, block=(128, 128)).make(4, edit)
        check(problem, run(problem))


@pytest.mark.parametrize("block, bounded", [("static", False), ("static", True), ((128, 128), False), ((128, 128), True)])
@pytest.mark.parametrize("centred", [True, False])
def test_rows_that_leave_the_range_of_fp16(block, bounded, centred):
    """Whole tiles are done without maxima, and again where a P was FP16's infinity: rows that rise a little, just under and over that
    bound, and far, all at once or one by one, and fall again."""
    for step in (0.7, 2.8, 3.1, 9.0, 40.0):

        def edit(q, k, v, offsets, step=step):
            tile = torch.arange(k.shape[0], device=DEVICE) // 128
            height = torch.where(tile % 7 < 5, tile, 0) * step
            q[:], q[..., 0] = 0.01 * q, 4.0
            k[..., 0] = (height * 0.6931 * 128**0.5 / 4.0)[:, None]
            if step > 3.0:  # one row a tile rises instead of all
                q[..., 0] = 0.0
                for i in range(1, int(tile[-1]) + 1):
                    row = 37 * i % q.shape[0]
                    q[row, :, i] = 4.0
                    k[128 * i + 11 * i % 100, :, i] = step * 0.6931 * 128**0.5 / 4.0

        problem = Case((1500, 90), queries=128, block=block, centred=centred, bounded=bounded).make(4, edit)
        q, k = problem.q.dequantize(torch.float64), problem.k.dequantize(torch.float64)
        largest = float(torch.einsum("qhd,thd->hqt", q, k).abs().max()) * problem.softmax_scale
        check(problem, run(problem), lse_tolerance=max(4e-3, 2.0**-9 * largest))  # the scores' own error, as in test_negative_scores


@pytest.mark.parametrize("block", ["static", (128, 128)])
@pytest.mark.parametrize("copied", [False, True])
def test_sums_that_leave_fp16(copied, block, monkeypatch):
    """Where a sequence's values follow its keys, sums of centred P V leave FP16: its items, and no others, are done again in FP32."""
    from lp_fa4.sm90 import worklist
    from lp_fa4.sm90.operands import MXTensorWithCopy
    from lp_fa4.sm90.transpose import transposed_copy

    states, listed = [], worklist.work_list
    monkeypatch.setattr(worklist, "work_list", lambda *args, **kwargs: states.append(listed(*args, **kwargs)) or states[-1])

    def problem(aligned):
        def edit(q, k, v, offsets):
            rows = slice(int(offsets[1]), int(offsets[2]))
            row = torch.arange(rows.stop - rows.start, device=q.device)[:, None, None]
            q.mul_(0.02).add_(0.06)
            k[rows] = torch.where(row % 2 == 0, 0.3, -0.3)
            v[rows] = torch.where(row % (2 if aligned else 4) < (1 if aligned else 2), 400.0, -400.0)

        made = Case((700, 300, 97, 0), queries=200, block=block, bounded=True, mean=False).make(6, edit)
        if copied:
            v = made.v
            copy = transposed_copy(v.codes, made.offsets_k, "accumulator")
            made = dataclasses.replace(made, v=MXTensorWithCopy(v.payload, v.scale, v.block, v.offsets, v.token_dim, copy))
        return made

    loud, calm = problem(True), problem(False)
    result, other = run(loud), run(calm)
    check(loud, result)
    check(calm, other)
    items = [int(state[2]) for _, state in states]
    assert items == ([8, 0] if block == "static" else [0, 0]), items  # two heads, 200 rows: four warpgroups a head
    for rows in (slice(0, 200), slice(400, 800)):
        for field in ("out", "centred_out"):
            assert torch.equal(getattr(result, field)[rows], getattr(other, field)[rows]), field
    again = run(loud)
    for field in ("out", "centred_out", "lse", "row_max", "row_sum"):
        assert torch.equal(getattr(result, field), getattr(again, field)), field


def test_negative_scores():
    """Every score far below zero."""

    def edit(q, k, v, offsets):
        q[:] = q.abs()
        k[:] = -k.abs()

    # The tensor core's FP8 sums keep 13 bits and truncate: over 2048 x 2048 products of 128 terms of one sign an H200 lost 2^-10.7 of
    # the sum on average and 2^-9.1 at most (with terms of both signs 2^-11.4 of the sum of magnitudes). The LSE is off by a mean of
    # the scores' errors, so by no more than the largest.
    for queries, bounded in ((64, False), (100, False), (100, True)):
        problem = Case(HOSTILE, queries=queries, bounded=bounded).make(5, edit)
        q, k = problem.q.dequantize(torch.float64), problem.k.dequantize(torch.float64)
        largest = float(torch.einsum("qhd,thd->hqt", q, k).abs().max()) * problem.softmax_scale
        check(problem, run(problem), lse_tolerance=2.0**-9 * largest)


def test_uniform_attention_over_131072_keys():
    """V with mean 1: single-level accumulation in the tensor core is 72% off here."""

    def edit(q, k, v, offsets):
        q[:] *= 0.05
        v[:] = torch.randn_like(v) + 1.0

    for centred, bounded in ((True, False), (False, False), (True, True), (False, True)):
        problem = Case((131072,), queries=128, heads=1, kv_heads=1, centred=centred, mean=False, bounded=bounded).make(6, edit)
        result = run(problem)
        truth, _ = exact(problem)
        bias = float((result.out.double() * truth).sum() / (truth * truth).sum()) - 1.0
        print("bias", centred, bounded, bias)
        assert abs(bias) < 1e-3


@pytest.mark.parametrize("block", ["static", (128, 128), (32, 32)])
def test_isolation(block):
    """One sequence full of NaN, or 10^4 times as large, leaves every other bit-identical; its own rows are NaN."""
    base = Case((31, 33, 1, 32, 127, 129, 200), queries=40, block=block)
    clean = run(base.make(7))

    def spoil(value):
        def edit(q, k, v, offsets):
            for x in (k, v):
                x[offsets[3] : offsets[4]] *= value

        return edit

    for value in (torch.nan, 1e4 if block != "static" else 0.5):
        result = run(base.make(7, spoil(value)))
        for b in range(7):
            rows = slice(40 * b, 40 * (b + 1))
            if b != 3:
                assert torch.equal(result.out[rows], clean.out[rows]), f"sequence {b} changed by {value}"
                assert torch.equal(result.lse[:, rows], clean.lse[:, rows])
            elif value != value:
                assert bool(result.out[rows].isnan().all())


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("block", ["static", (128, 128), (32, 128)])
def test_isolation_of_queries(block, bounded):
    """Queries of one sequence that are NaN, or all 448, lie in the last query tile of the one before; all others keep their bits."""
    queries = (20, 30, 129, 7)
    case = Case((300, 300, 150, 40), queries=queries, shared=False, block=block, bounded=bounded)
    clean = run(case.make(8))
    others = torch.ones(sum(queries), dtype=torch.bool, device=DEVICE)
    others[20:50] = False
    for code in (0x7F, 0x7E):
        problem = case.make(8)
        problem.q.codes[20:50] = code
        result = run(problem)
        for field in ("out", "centred_out"):
            assert torch.equal(getattr(result, field)[others], getattr(clean, field)[others]), (field, code)
        for field in ("lse", "row_max", "row_sum"):
            assert torch.equal(getattr(result, field)[:, others], getattr(clean, field)[:, others]), (field, code)


@pytest.mark.parametrize("centred", [True, False])
def test_rows_past_the_bound_of_fp16(centred):
    """Codes as large as they get, in queries and keys: a warpgroup with a row past FP16's bound has FP32 scores, rows at the bound do not,
    and neither do rows that are not the sequence's count."""

    def largest(x, rows, value):
        codes = x.codes.clone()
        codes[rows] = value
        return dataclasses.replace(x, payload=codes.view(torch.float8_e4m3fn))

    lengths, queries = (300, 129, 260, 70), (128, 100, 128, 90)
    base = Case(lengths, queries=queries, shared=False, centred=centred, mean=False, bounded=True).make(16)
    clean, first = run(base), [0, 128, 228, 356, 446]
    # one row of 448 everywhere, one of NaN codes, one at the bound (128 codes of 1.125); of the second sequence none
    edits = {5: 0x7E, 300: 0x7F, 400: 0x39}
    q = base.q
    for row, code in edits.items():
        q = largest(q, slice(row, row + 1), code)
    problem = dataclasses.replace(base, q=q)
    result = run(problem)
    assert torch.equal(result.out[first[1] : first[2]], clean.out[first[1] : first[2]]) and bool(result.out[300].isnan().all())
    rows = [r for r in range(446) if r != 300]
    truth, lse = exact(problem)
    assert relative(result.out[rows], truth[rows]) <= 2 * relative(clean.out, exact(base)[0]) + 2.0**-8
    span = float(lse[:, rows].abs().max())
    assert float((result.lse[:, rows] - lse[:, rows]).abs().max()) <= max(4e-3, 2.0**-9 * span)
    # K's codes all 448, of both signs: scores of 146 * 448 at the bound, far more past it
    k = largest(base.k, slice(0, 300), 0x7E)
    k = largest(k, slice(7, 290, 3), 0xFE)
    for edited in (dataclasses.replace(base, k=k), dataclasses.replace(problem, k=k)):
        result = run(edited)
        truth, lse = exact(edited)
        assert bool(result.lse[:, rows].isfinite().all())
        assert torch.equal(result.out[first[1] : first[2]], clean.out[first[1] : first[2]])
        scale = float(lse[:, : first[1]].abs().max())
        assert float((result.lse[:, : first[1]] - lse[:, : first[1]]).abs().max()) <= 2.0**-9 * scale + 4e-3


@pytest.mark.parametrize("bounded", [True, False])
def test_permutation_and_alone(bounded):
    """A sequence's result does not depend on its place or its batch mates."""
    case = Case((300, 5, 128, 700, 33), queries=100, block="static", mean=False, centred=False, bounded=bounded)
    problem = case.make(8)
    whole = run(problem)
    offsets = problem.offsets_k.tolist()
    for b in (3, 0, 4):
        part = slice(offsets[b], offsets[b + 1])
        k, v = (
            dataclasses.replace(
                x, payload=x.payload[part].clone(), offsets=torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=DEVICE)
            )
            for x in (problem.k, problem.v)
        )
        alone = run(dataclasses.replace(problem, k=k, v=v, offsets_k=k.offsets))
        assert torch.equal(alone.out, whole.out[100 * b : 100 * (b + 1)])
        assert torch.equal(alone.lse, whole.lse[:, 100 * b : 100 * (b + 1)])


def test_repeats_bitwise():
    problem = CASES["module, bounded"].make(9)
    first = run(problem)
    for _ in range(20):
        again = sm90.forward(problem)
        for x, y in zip(first, again, strict=True):
            assert torch.equal(x, y)


def test_seventy_thousand_sequences():
    lengths = torch.randint(0, 4, (70000,), generator=torch.Generator().manual_seed(0)).tolist()
    problem = Case(tuple(lengths), queries=1, heads=1, kv_heads=1, dim=64).make(10)
    result = run(problem)
    torch.cuda.synchronize()
    q, k, v = (x.dequantize() for x in (problem.q, problem.k, problem.v))
    from tests.gpu.problems import row_sequences

    seq = row_sequences(problem.offsets_k, problem.tokens)
    v = v + problem.v_mean[seq]
    p = torch.exp((k[:, 0] * q[0, 0]).sum(-1) / 8.0)
    total = torch.zeros(70000, device=DEVICE).index_add_(0, seq, p)
    out = torch.zeros(70000, 64, device=DEVICE).index_add_(0, seq, p[:, None] * v[:, 0]) / total.clamp(min=1e-30)[:, None]
    assert relative(result.out[:, 0], out.double()) < 0.05
    assert bool((result.out[torch.tensor(lengths, device=DEVICE) == 0] == 0).all())


def test_strided_operands():
    """K and V as halves of one tensor."""
    problem = CASES["one query"].make(11)
    both = torch.cat([problem.k.codes, problem.v.codes], dim=1)
    k = dataclasses.replace(problem.k, payload=both[:, :2].view(torch.float8_e4m3fn))
    v = dataclasses.replace(problem.v, payload=both[:, 2:].view(torch.float8_e4m3fn))
    plain, strided = run(problem), run(dataclasses.replace(problem, k=k, v=v))
    assert torch.equal(plain.out, strided.out)


def test_empty_batches():
    for case in (Case((), queries=5), Case((0, 0), queries=5)):
        result = run(case.make(12))
        assert bool((result.out == 0).all()) and bool(torch.isneginf(result.lse).all())


@pytest.mark.parametrize("queries, dim", [(128, 128), (128, 64), (3, 128), (48, 64), (48, 128), (100, 128)])
def test_one_output(queries, dim):
    """Without the centred output the output has the same bits. Many rows: a sum rounded once or twice differs in one of thousands."""
    problem = Case((300, 0, 129, 64) + (333, 1000) * 8, queries=queries, dim=dim).make()
    both, one = run(problem), run(problem, keep_centred=False)
    assert one.centred_out is one.out
    for name in ("out", "lse", "row_max", "row_sum"):
        assert torch.equal(getattr(one, name), getattr(both, name)), name


def test_side_stream_and_graph():
    """The current stream is read at every launch, and a captured graph replays with other data and lengths."""
    problem = CASES["module, bounded"].make(13)
    expected = run(problem)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        k = dataclasses.replace(problem.k, payload=problem.k.codes.clone().view(torch.float8_e4m3fn))
        result = sm90.forward(dataclasses.replace(problem, k=k))
    stream.synchronize()
    assert torch.equal(result.out, expected.out)
    offsets = problem.offsets_k.clone()
    captured = dataclasses.replace(
        problem, offsets_k=offsets, k=dataclasses.replace(problem.k, offsets=offsets), v=dataclasses.replace(problem.v, offsets=offsets)
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = sm90.forward(captured)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(inside.out, expected.out)
    offsets.copy_(torch.tensor([0, *[10] * 11, 300], device=DEVICE))
    graph.replay()
    torch.cuda.synchronize()
    eager = sm90.forward(captured)
    assert torch.equal(inside.out, eager.out)


def test_no_host_read():
    problem = CASES["groups of 128"].make(14)
    sm90.forward(problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sm90.forward(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_compilation_for_all_shapes():
    from lp_fa4.compile import compile_count

    for queries in (7, 12, 40, 100):  # few queries have a kernel of their own, in three widths
        sm90.forward(Case((5, 9), queries=queries).make(15))
    before = compile_count()
    for i in range(10):
        sm90.forward(Case((11 * i, 3, 200 + i), queries=1 + 13 * i, slack=i).make(i))
    assert compile_count() == before


def test_refusals():
    problem = Case((40,), queries=4).make(16)
    with pytest.raises(ValueError, match="softmax_scale"):
        sm90.forward(dataclasses.replace(problem, softmax_scale=-1.0))
    with pytest.raises(ValueError, match="key_tile"):
        sm90.forward(dataclasses.replace(problem, config=problem.config.with_(key_tile=64)))
    with pytest.raises(ValueError, match="p_scale_log2 is 2; the Hopper kernels serve 3 and more"):
        sm90.forward(dataclasses.replace(problem, config=problem.config.with_(p_scale_log2=2)))
