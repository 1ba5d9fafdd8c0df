"""The module's numeric options: each does what it says on data made for it, and nothing where there is nothing to do."""

import importlib

import pytest
import torch

from fused_ops import balanced_coordinates
from fused_ops.hadamard import hadamard_matrix
from lp_fa4.config import AttentionConfig
from modules import Numerics
from modules.coordinates import transform
from modules.mxfp8 import row_product
from modules.queries import query_heads, turn, turn_back
from tests.modules.common import DIM, HEADS, batch, exact, make, ratios, run

_RowSide = importlib.import_module("lp_fa4.reference.backward")._RowSide  # the package has a function of the module's name
LENGTHS = [200, 0, 33, 257, 128]


def measured(prepare=lambda module: None, event_mean=0.0, **options):
    module = make(numerics=Numerics.preset(options.pop("preset", "default"), **options))
    torch.manual_seed(1)
    x, offsets = batch(LENGTHS)
    x = torch.randn_like(x) + event_mean * torch.randn(DIM)
    with torch.no_grad():
        prepare(module)
    return ratios(run(module, x, offsets), exact(module, x, offsets))


def outliers(module):
    """Queries and keys share four loud channels a head."""
    for proj in (module.query_proj, module.key_proj):
        proj.weight.unflatten(0, (HEADS, -1))[:, :4] *= 6
        proj.weight *= 0.5


def alike(module):
    """Seeds that share most of themselves."""
    module.seed_embs.mul_(0.3).add_(torch.randn(DIM))


def test_hadamard_helps_shared_outlier_channels_only():
    plain, turned = measured(outliers, hadamard=False), measured(outliers)
    assert turned["out"] > plain["out"] + 1.5
    plain, turned = measured(hadamard=False), measured()
    assert abs(turned["out"] - plain["out"]) < 0.5


def test_aligned_rows_of_equal_magnitudes_are_exact():
    """A mean loss: all elements of a row of dO are alike, and 1 / l no power of two. Nothing is lost, as if dO were not rounded."""
    generator = torch.Generator().manual_seed(0)
    do = torch.tensor([0.3, -1e-4, 0.0, 7.0])[:, None] * torch.where(torch.rand(4, 128, generator=generator) < 0.5, -1.0, 1.0)
    row_max, row_sum = torch.randn(4, generator=generator), 1 + 1000 * torch.rand(4, generator=generator)
    plain, aligned, exact = (
        _RowSide.make(AttentionConfig(align_do=align, round_do=rounded, do_block=(1, 0)), do, do, row_max, row_sum, None)
        for align, rounded in ((False, True), (True, True), (True, False))
    )
    torch.testing.assert_close(aligned.do8, exact.do8, rtol=1e-6, atol=0)
    assert (plain.do8 * plain.row_sum[:, None] - do).abs().max() > 1e-3 * do.abs().max()
    # P dO is what it was: P has the factor that dO / l lost.
    factor = torch.exp2(row_max - aligned.row_max)
    torch.testing.assert_close(factor[:, None] * exact.do8, do / row_sum[:, None])
    assert (factor > 0.5).all() and (factor <= 1).all() and factor[2] == 1


def lopsided(module):
    """Queries loud in one half of each head's channels, keys in the other."""
    for proj, half in ((module.query_proj, 0), (module.key_proj, 1)):
        proj.weight.unflatten(0, (HEADS, 2, -1))[:, half] *= 4
        proj.weight *= 0.5


def test_balanced_coordinates_help_where_queries_and_keys_differ():
    plain, turned = measured(lopsided, coordinates="plain"), measured(lopsided)
    assert all(turned[row] > plain[row] + 1 for row in ("out", "events", "query_proj.weight")), (plain, turned)
    plain, turned = measured(coordinates="plain"), measured()
    assert all(turned[row] > plain[row] - 0.3 for row in plain), (plain, turned)


@pytest.mark.parametrize("prepare", ["ordinary", "alike", "one channel", "zero"])
def test_balanced_coordinates_change_no_score(prepare):
    """To FP32's precision, whatever the weights: far from it, and where there is nothing to balance."""
    module = make()
    with torch.no_grad():
        if prepare == "alike":
            alike(module)
        elif prepare == "one channel":
            module.query_proj.weight.unflatten(0, (HEADS, -1))[:, 1:] = 0
            module.key_proj.weight.mul_(1e4)
        elif prepare == "zero":
            module.query_proj.weight.zero_()
        q = query_heads(module.seed_embs, module.query_norm.weight, module.query_proj.weight, HEADS, module.eps, Numerics())
        for_keys, for_queries = balanced_coordinates(q, module.key_proj.weight, module.kv_norm.weight)
        one = torch.eye(DIM // HEADS)
        assert (for_keys.transpose(1, 2) @ for_queries - one).abs().max() < 2e-5 and for_keys.isfinite().all()
        rows = torch.randn(50, DIM)
        keys, plain = rows @ transform(for_keys, module.key_proj.weight).t(), rows @ module.key_proj.weight.t()
        back = turn_back(q, Numerics(), for_queries)  # leaves an operator, of which a trace knows the strides
        assert back.is_contiguous() and back.shape == q.shape
        got = torch.einsum("qhd,khd->hqk", turn(q, Numerics(), for_queries), keys.unflatten(1, (HEADS, -1)))
        want = torch.einsum("qhd,khd->hqk", q, plain.unflatten(1, (HEADS, -1)))
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_q_smoothing_helps_similar_seeds():
    assert measured(alike, q_smoothing=True)["out"] > measured(alike)["out"] + 1.5
    assert abs(measured(q_smoothing=True)["out"] - measured()["out"]) < 0.5


def test_centring_helps_events_that_share_a_mean():
    centred, plain = measured(event_mean=2.0), measured(event_mean=2.0, center=False, center_p=False, center_p_backward=False)
    assert centred["out"] > plain["out"] + 3 and centred["events"] > plain["events"] + 1


def test_exact_key_weights():
    """BF16 and hi + lo weights both beat one E4M3 rounding of Wk; rows that stay BF16 beat rows that were rounded."""
    single, pair, exact_rows = (measured(key_projection=form)["out"] for form in ("e4m3", "e4m3x2", "bf16"))
    assert single + 0.3 < pair < exact_rows


def test_query_projection_in_fp32():
    assert measured()["out"] > measured(query_projection="e4m3")["out"] + 0.3


def test_scales_hardly_matter():
    """Rule 1 and 2: block shape, and exponents from a bound, within 0.3 dB on this batch."""
    found = [measured(scales=s) for s in ("square", "token", "static")]
    for row in found[0]:
        values = [f[row] for f in found]
        assert max(values) - min(values) < 0.3, (row, values)


def test_rotation_where_it_exists():
    """On by default for head dimensions that are powers of two; others go without, and asking for it there is refused at construction."""
    assert Numerics().rotates(64) and not Numerics().rotates(96) and not Numerics(hadamard=False).rotates(64)
    module = make(dim=192, num_heads=2)
    x, offsets = batch(LENGTHS, dim=192)
    assert ratios(run(module, x, offsets), exact(module, x, offsets))["out"] > 24


def test_settled_scales():
    assert Numerics().for_backend("sm90").scales == "static" and Numerics().for_backend("reference").scales == "square"
    assert Numerics(scales="token").for_backend("sm90").scales == "token"
    assert Numerics(scales="static").block(128) == (0, 128)


def test_settled_sums_of_dq():
    """FP16 on Hopper unless bits must repeat, somebody says otherwise, or there is no bound; elsewhere as ``attention`` has it."""
    half, single = torch.float16, torch.float32

    def settled(numerics, *arguments):
        found = numerics.for_backend(*arguments)
        assert found.dq_dtype == found.attention.dq_dtype and found.for_backend(*arguments) == found
        return found.dq_dtype

    assert settled(Numerics(), "sm90") == half and settled(Numerics(), "sm90", True) == single
    assert settled(Numerics(), "sm100") == settled(Numerics(), "reference") == single
    assert settled(Numerics(attention=AttentionConfig(dq_scale=9)), "sm90") == single
    for name in ("sm90", "sm100", "reference"):
        assert settled(Numerics(dq_dtype=single), name) == settled(Numerics.post(), name) == single
        assert settled(Numerics(dq_dtype=half), name, True) == settled(Numerics.preset("post", dq_dtype=half, dq_scale=9), name) == half
        assert settled(Numerics(attention=AttentionConfig(dq_dtype=half)), name) == half


def test_query_side_is_the_formula():
    module = make()
    arguments = (module.seed_embs, module.query_norm.weight, module.query_proj.weight, HEADS, module.eps)
    q = query_heads(*arguments, Numerics())
    s = module.seed_embs.double()
    want = (
        s
        * torch.rsqrt(s.square().mean(-1, keepdim=True) + module.eps)
        * module.query_norm.weight.double()
        @ module.query_proj.weight.double().t()
    )
    torch.testing.assert_close(q.flatten(1).double(), want, rtol=0, atol=1e-4)
    assert torch.equal(turn(q, Numerics(hadamard=False)), q)
    turned = turn(q, Numerics(hadamard=True))
    torch.testing.assert_close(turned, q @ hadamard_matrix(DIM // HEADS), rtol=0, atol=1e-5)
    assert q.dtype == torch.float32 and list(q.shape) == [module.num_seeds, HEADS, DIM // HEADS]


def test_rows_of_a_product_do_not_depend_on_how_many_there_are():
    """Means of samples through the value projection: the same bits alone and among others, whatever BLAS does with so many rows."""
    rows, matrix = torch.randn(200, 384) * torch.exp2(torch.randint(-9, 9, (200, 1))), torch.randn(384, 256)
    for count in (1, 2, 3, 7, 16, 64, 200):
        whole = row_product(rows[:count], matrix)
        for b in {0, count // 2, count - 1}:
            assert torch.equal(whole[b], row_product(rows[b : b + 1], matrix)[0])


def test_presets_and_text_form():
    for numerics in (
        Numerics(),
        Numerics.post(),
        Numerics.preset("post", dq_dtype=torch.float16, dq_scale=9),
        Numerics.preset("default", hadamard=True, ds_block=(128, 128)),
        Numerics(dq_dtype=torch.float32),
    ):
        again = Numerics.from_key(numerics.key)
        assert again == numerics and again.key == numerics.key and hash(again) == hash(numerics)
        assert Numerics.from_key(numerics.key.replace('"sources": "', '"sources": "of another version ')) == numerics
    assert Numerics.preset(Numerics.post()) == Numerics.post()
    assert Numerics.preset("default", key_tile=64).attention == AttentionConfig(key_tile=64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(key_projection="fp8"), "key_projection is 'fp8'; allowed are 'auto', 'bf16', 'e4m3x2', 'e4m3'"),
        (dict(query_projection="e4m3x2"), "query_projection is 'e4m3x2'"),
        (dict(scales="row"), "scales is 'row'; allowed are 'auto'"),
        (dict(attention="post"), "attention is str"),
        (dict(dq_dtype=torch.bfloat16), "dq_dtype is torch.bfloat16; allowed are torch.float16"),
    ],
)
def test_misuse(options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Numerics(**options)
