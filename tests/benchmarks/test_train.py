"""The training command: a tiny comparison end to end, what depends on the seed and what does not, and the test of the test."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import lp_fa4.mx.quantize as quantizer
from benchmarks import __main__ as cli
from benchmarks import train
from benchmarks.config import UserError, load
from benchmarks.data import make_batch, training_batches
from benchmarks.metrics import auc, normalized_entropy
from benchmarks.train_model import features
from tests.benchmarks.generated import write_interactions

CPU = torch.device("cpu")
TINY = [
    "model={dim: 32, num_heads: 1, num_seeds: 2, hidden: [16], dropout: 0.1}",
    "train={steps: 6, batch_size: 16, warmup: 2}",
    "evaluate={points: 3, requests: 40}",
    "seeds=[0, 1]",
    "jobs=1",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_interactions(tmp_path_factory.mktemp("data") / "generated.inter")


def configure(file, *overrides):
    return load(train.TrainConfig, None, [*TINY, f"data.path={file}", *overrides])


@pytest.fixture(scope="module")
def tiny(file):
    config = configure(file)
    return config, train.load_data(config.data)


def test_end_to_end_from_the_command_line(file, tmp_path, capsys):
    out = tmp_path / "deep" / "result"
    assert cli.main(["train", *TINY, f"data.path={file}", f"output={out}"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Held-out tail: ") and "(the base rate of NE)" in printed.out
    for row in ("BF16 ", "MXFP8 ", "MXFP8 − BF16", "BF16 served in MXFP8 − BF16"):
        assert any(line.startswith(row) for line in printed.out.splitlines()), row
    assert "seed-to-seed spread of BF16" in printed.out.splitlines()[-1]
    assert "generated.inter: " in printed.err and f"wrote {out}.json and {out}.png" in printed.err
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["command"] == "train" and record["config"]["train"]["steps"] == 6
    results = record["results"]
    assert [(r["precision"], r["seed"]) for r in results["runs"]] == [("bf16", 0), ("mxfp8", 0), ("bf16", 1), ("mxfp8", 1)]
    for run in results["runs"]:
        assert [point["step"] for point in run["curve"]] == [2, 4, 6]
        assert all(0 < value < 3 for value in (run["ne"], run["auc"], *(p["held_out"] for p in run["curve"])))
        assert set(run["served"]) == ({"mxfp8"} if run["precision"] == "bf16" else set())
    comparison = results["comparisons"][0]
    ne = {(r["precision"], r["seed"]): r["ne"] for r in results["runs"]}
    mean = np.mean([ne["mxfp8", s] - ne["bf16", s] for s in (0, 1)])
    assert comparison["difference"]["mean"] == pytest.approx(mean)
    assert comparison["spread"] == pytest.approx(abs(ne["bf16", 0] - ne["bf16", 1]))
    assert comparison["within"] == (abs(mean) <= comparison["spread"])


def test_a_record_is_drawn_again(file, tmp_path, capsys):
    out, again = tmp_path / "a", tmp_path / "b"
    assert cli.main(["train", *TINY, f"data.path={file}", "seeds=[0]", "train.steps=3", f"output={out}"]) == 0
    first = capsys.readouterr().out
    assert cli.main(["train", f"record={out}.json", f"output={again}"]) == 0
    assert capsys.readouterr().out == first
    assert again.with_suffix(".png").read_bytes() == out.with_suffix(".png").read_bytes()
    for text, words in (("{}", "not a record of this command"), ("[", "not a record of this command")):
        (tmp_path / "bad.json").write_text(text)
        assert cli.main(["train", f"record={tmp_path}/bad.json"]) == 2 and words in capsys.readouterr().err
    assert cli.main(["train", f"record={tmp_path}/none.json"]) == 2 and "cannot read the record" in capsys.readouterr().err


def test_processes_do_not_change_a_figure(tiny):
    config, data = tiny
    here = train.train_all(config, data, show_progress=False)
    there = train.train_all(replace(config, jobs=2), data, show_progress=False)
    for a, b in zip(here, there, strict=True):
        assert replace(a, train_seconds=0, evaluate_seconds=0) == replace(b, train_seconds=0, evaluate_seconds=0)


def test_an_error_in_a_process_reaches_the_user(tiny):
    config, data = tiny
    broken = replace(config, jobs=2, train=replace(config.train, embedding_learning_rate=1e30, learning_rate=1e30, warmup=0))
    with pytest.raises(train.TrainingError, match=r"seed \d: the training loss is (nan|inf) at step \d of 6"):
        train.train_all(broken, data, show_progress=False)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_the_seed_decides_everything(tiny, precision):
    config, data = tiny
    first, again, other = (train.train_once(config, data, precision, seed, CPU) for seed in (5, 5, 6))
    assert replace(first, train_seconds=0, evaluate_seconds=0) == replace(again, train_seconds=0, evaluate_seconds=0)
    assert first.ne != other.ne and first.curve != other.curve


def test_precisions_start_from_the_same_parameters(tiny):
    config, data = tiny
    states = []
    for precision in config.precisions:
        torch.manual_seed(3)
        model = train.build_model(config.model, data, precision)
        states.append(model.state_dict())
        assert model.pooling.pool.precision == precision and model.pooling.validate
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_learns_and_meets_users_without_history(file):
    config = configure(file, "precisions=[bf16]", "train={steps: 120, batch_size: 32}", "seeds=[0]")
    data = train.load_data(config.data)
    assert (data.train.begin == data.train.start).any(), "first events of users: empty histories"
    run = train.train_once(config, data, "bf16", 0, CPU)
    # A predictor that knows the base rate has NE 1 and AUC 0.5; 120 steps on these ratings end near 0.9 and 0.7.
    assert run.ne < 0.97 and run.auc > 0.6
    assert run.curve[-1].training < run.curve[0].training


def test_every_parameter_is_trained_in_both_precisions(tiny):
    config, data = tiny
    for precision in config.precisions:
        model = train.build_model(config.model, data, precision)
        batch = make_batch(data, next(training_batches(data.train, 32, 0)))
        torch.nn.functional.binary_cross_entropy_with_logits(model(features(batch, CPU)), batch.label).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), (precision, name)


def test_a_requests_logits_do_not_depend_on_the_batch(tiny):
    """Jagged candidates meet their own request's history, whatever else is in the batch."""
    config, data = tiny
    torch.manual_seed(0)
    model = train.build_model(config.model, data, "mxfp8").eval()
    some = data.held_out.take(np.arange(9))
    with torch.no_grad():
        together = model(features(make_batch(data, some), CPU))
        alone = [model(features(make_batch(data, some.take(np.array([i]))), CPU)) for i in range(9)]
    # The MLP's matrix products may be blocked differently for another number of rows: FP32 rounding.
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.dim=30", "model.num_heads=4"], r"model: .*dim is 30 and num_heads 4"),
        (["model.dim=48"], r"model: .*48"),
        (["model.numerics=fast"], r"model: .*numerics is 'fast'"),
    ],
)
def test_models_that_cannot_be_built_are_named(tiny, file, overrides, words):
    config = configure(file, *overrides)
    with pytest.raises(UserError, match=words):
        train.train_all(config, tiny[1], show_progress=False)


def test_one_seed_claims_nothing():
    run = train.Run("bf16", 0, 0.9, 0.7, (train.Point(1, 0.9, 0.9),), {"mxfp8": train.Judgement(0.901, 0.7)}, 1.0, 1.0)
    comparison = train.compare([run, replace(run, precision="mxfp8", ne=0.91, served={})], "mxfp8", "bf16")
    assert comparison.within is None and comparison.served.mean == pytest.approx(0.001)


@pytest.mark.parametrize(("shift", "within"), [(0.0, True), (0.019, True), (-0.021, False), (0.021, False)])
def test_the_verdict(shift, within):
    def run(precision, seed, ne):
        return train.Run(precision, seed, ne, 0.7, (), {"mxfp8": train.Judgement(ne, 0.7)}, 1.0, 1.0)

    runs = [run("bf16", s, 0.9 + 0.01 * s) for s in range(3)] + [run("mxfp8", s, 0.9 + 0.01 * s + shift) for s in (2, 0, 1)]
    comparison = train.compare(runs, "mxfp8", "bf16")
    assert comparison.spread == pytest.approx(0.02) and comparison.within is within
    assert comparison.difference.mean == pytest.approx(shift) and comparison.difference.deviation == pytest.approx(0, abs=1e-12)


def clips(monkeypatch):
    """Every block's exponent is one too small for its payload: the largest elements saturate at half their value or more."""
    right = quantizer._byte_of_bits

    def small(bits):
        byte = right(bits)
        return torch.where((byte == 0) | (byte == 255), byte, byte - 1)

    monkeypatch.setattr(quantizer, "_byte_of_bits", small)


def decodes_small(monkeypatch):
    """Every block's payload is right and its stored exponent one too small: everything decodes to half its value."""
    right = quantizer.MXTensor

    def small(payload, scale, *rest):
        byte = scale.view(torch.uint8)
        byte = torch.where((byte == 0) | (byte == 255), byte, byte - 1)
        return right(payload, byte.view(torch.float8_e8m0fnu), *rest)

    monkeypatch.setattr(quantizer, "MXTensor", small)


@pytest.fixture(scope="module")
def trained():
    """A model trained in BF16 on MovieLens, and requests of its held-out tail."""
    config = load(train.TrainConfig, None, ["train={steps: 300}", "evaluate={points: 1, requests: 10}"])
    data = train.load_data(config.data)
    small = replace(data, held_out=data.held_out.take(np.arange(0, len(data.held_out), 8)))
    models = []
    with pytest.MonkeyPatch.context() as patch:
        build = train.build_model
        patch.setattr(train, "build_model", lambda *args: models.append(build(*args)) or models[-1])
        run = train.train_once(replace(config, precisions=("bf16",)), small, "bf16", 0, CPU)
    assert run.ne < 0.9 and run.auc > 0.7
    return config, small, models[0], run


def served(trained, numerics):
    config, data, model, run = trained
    same = train.build_model(replace(config.model, numerics=numerics), data, "mxfp8")
    same.load_state_dict(model.state_dict())
    logits, labels = train.evaluate(same, data, data.held_out, 256, CPU)
    assert not math.isnan(auc(logits, labels))
    return normalized_entropy(logits, labels) - run.ne, logits


@pytest.mark.parametrize("numerics", ["default", "post"])
def test_a_broken_quantizer_is_seen(trained, numerics, monkeypatch):
    """The comparison must be able to fail. Seen when the parameters are served: the right quantizer moves NE by 0.00005, one that clips
    by 0.0004 to 0.0025, one whose stored scale is one exponent too small by 0.016 and more: three times the spread over the seeds of a
    full run, 0.006. Seen when the model is trained with it, 200 steps from seed 0: NE 0.887 with the stored scale too small instead of
    0.877; 0.876 with the clipping one, which training learns to live with.
    """
    _, data, model, _ = trained
    exact, _ = train.evaluate(model, data, data.held_out, 256, CPU)
    right, logits = served(trained, numerics)
    assert abs(right) < 2e-4
    noise = (logits - exact).abs().mean()
    with monkeypatch.context() as patch:
        clips(patch)
        clipped, logits = served(trained, numerics)
    assert clipped > max(4 * abs(right), 2e-4)
    assert (logits - exact).abs().mean() > 5 * noise
    with monkeypatch.context() as patch:
        decodes_small(patch)
        halved, _ = served(trained, numerics)
    assert halved > max(50 * abs(right), 5e-3)
