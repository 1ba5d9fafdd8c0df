"""The numerics report: its ratios, its truth, its lengths, its gates; and that it sees a broken quantizer."""

import json
import math

import pytest
import torch

import lp_fa4.mx.quantize
from benchmarks import __main__ as command
from benchmarks import numerics
from benchmarks.config import ConfigError, load
from benchmarks.harness import ROOT
from benchmarks.numerics import ROWS, Lengths, NumericsConfig, Ratio, Truth, draw_lengths, make_problem, measure

SMALL = ["shape={dim: 64, heads: 2, seeds: 32}", "lengths={batch: 5, low: 0, high: 90}", "name=small"]


def test_ratio_adds_over_chunks():
    y, t = torch.randn(300), torch.randn(300)
    whole, parts = Ratio(), Ratio()
    whole.add(y, t)
    for piece in range(3):
        parts.add(y[piece::3], t[piece::3])
    want = 10 * math.log10(float(t.double().square().sum() / (y - t).double().square().sum()))
    assert whole.db == pytest.approx(want, abs=1e-6) and parts.db == pytest.approx(want, abs=1e-6)
    same = Ratio()
    same.add(t, t)
    assert same.db == math.inf


@pytest.mark.parametrize("kind", ["uniform", "linear", "lognormal"])
@pytest.mark.parametrize("total", [None, 5000, 760])
def test_lengths(kind, total):
    drawn = draw_lengths(Lengths(40, kind, 3, 400, total), torch.Generator().manual_seed(0))
    assert len(drawn) == 40 and drawn[0] == 400 and all(3 <= n <= 400 for n in drawn)
    assert total is None or sum(drawn) == total


def test_production_shape():
    config = load(NumericsConfig, ROOT / "configs/numerics_production.yaml")
    drawn = draw_lengths(config.lengths, torch.Generator().manual_seed(0))
    assert (len(drawn), sum(drawn), max(drawn)) == (768, 5_856_019, 14_980)
    assert (config.shape.dim, config.shape.heads, config.shape.seeds) == (384, 3, 512)


def test_every_config_loads():
    files = sorted((ROOT / "configs").glob("numerics_*.yaml"))
    assert len(files) >= 5
    for file in files:
        load(NumericsConfig, file)


@pytest.mark.parametrize("loss", ["randn", "mean", "heavy"])
def test_truth_is_the_reference_with_one_backward(loss):
    """Chunked and sequence by sequence, it equals autograd of the whole batch in FP64."""
    from modules.reference import pma

    config = load(NumericsConfig, None, [*SMALL, f"data={{loss: {loss}}}", "chunk_tokens=100"])
    problem = make_problem(config)
    truth = Truth(problem, torch.float64)
    chunks = list(problem.chunks())
    assert len(chunks) > 1
    parts = [truth(*chunk) for chunk in chunks]
    leaves = {name: p.double().requires_grad_() for name, p in problem.parameters.items()}
    values = torch.cat([c[0] for c in chunks]).double().requires_grad_()
    offsets = torch.tensor([0, *problem.lengths]).cumsum(0)
    names = ("seed_embs", "query_norm.weight", "kv_norm.weight", "query_proj.weight", "key_proj.weight")
    out = pma(values, offsets, *(leaves[n] for n in names), heads=2)
    out.backward(torch.cat([c[2] for c in chunks]).double())
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), out.detach())
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), values.grad)
    for name, grad in truth.finish().items():
        torch.testing.assert_close(grad, leaves[name].grad)


def test_fp32_truth_is_good_enough():
    config = load(NumericsConfig, None, [*SMALL, "truth=float32"])
    assert measure(config)["truth"]["first_samples_db"] > 80


def test_chunks_do_not_change_the_batch():
    whole, pieces = (make_problem(load(NumericsConfig, None, [*SMALL, f"chunk_tokens={n}"])) for n in (10**6, 1))
    ((values, _, dout),) = whole.chunks()
    parts = list(pieces.chunks())
    assert len(parts) == 5
    assert torch.equal(values, torch.cat([p[0] for p in parts])) and torch.equal(dout, torch.cat([p[2] for p in parts]))


def test_a_broken_quantizer_shows(monkeypatch):
    """One exponent too small clips the largest elements of every block: each row of the report falls."""
    config = load(NumericsConfig, None, [*SMALL, "bf16=false", "variants={default: {}}"])
    good = measure(config)["fp64"]["default"]
    honest = lp_fa4.mx.quantize._byte_of_bits

    def broken(bits):
        byte = honest(bits)
        return torch.where((byte > 0) & (byte < 255), byte - 1, byte)

    monkeypatch.setattr(lp_fa4.mx.quantize, "_byte_of_bits", broken)
    bad = measure(config)["fp64"]["default"]
    assert all(bad[row] < good[row] - 2 for row in ROWS), (good, bad)


def test_the_command(tmp_path, capsys):
    """Table on stdout, JSON on disk, exit code 1 for a missed gate and 0 for a reached one."""
    gates = "gates={default: [10, 10, 10, 10, 10, %d]}"
    assert command.main(["numerics", *SMALL, f"out={tmp_path}", gates % 10]) == 0
    printed = capsys.readouterr().out
    assert all(row in printed for row in ROWS) and "against FP64" in printed and "against BF16" in printed and "18.84" in printed
    record = json.loads((tmp_path / "small.json").read_text())
    assert set(record["results"]["fp64"]) == {"default", "post", "bf16"} and set(record["results"]["bf16"]) == {"default", "post"}
    assert command.main(["numerics", *SMALL, f"out={tmp_path}", gates % 99]) == 1
    assert "MISSED default: key_proj.weight is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["variants={a: {hadamar: true}}"], "variants.a: unknown option 'hadamar'; known are preset"),
        (["variants={a: {preset: best}}"], "variants.a: numerics is 'best'"),
        (["variants={a: {p_scale_log2: 8}}"], "p_scale_log2 .* rescale_threshold is"),
        (["variants={a: {dq_dtype: int77}}"], "dq_dtype is 'int77'"),
        (["gates={b: [1, 2, 3, 4, 5, 6]}"], "gates.b: no such variant"),
        (["gates={default: [1]}"], "gates.default: 1 numbers"),
        (["lengths={low: 9, high: 3}"], "low 9, high 3"),
        (["lengths={batch: 2, low: 0, high: 3, total: 7}"], "total is 7"),
        (["data={loss: men}"], "Did you mean 'mean'"),
        (["shapes={}"], "unknown key 'shapes'"),
    ],
)
def test_mistakes_are_named(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load(numerics.NumericsConfig, None, overrides)
