"""The synthetic long-history data: its shape, its rule, and that the training command learns it."""

import numpy as np
import pytest

from benchmarks import train
from benchmarks.config import ConfigError, load
from benchmarks.data import make_batch
from benchmarks.synthetic import SyntheticConfig, make_synthetic

SMALL = SyntheticConfig(users=96, held_out_users=32, items=40, shortest=4, longest=300, targets=5)


@pytest.fixture(scope="module")
def data():
    return make_synthetic(SMALL)


def test_requests(data):
    length = data.train.start - data.train.begin
    assert len(data.train) == 96 and len(data.held_out) == 32 and length.max() == 300 and length.min() >= 4
    batch = make_batch(data, data.train)
    assert int(batch.lengths.sum()) == len(batch.item) == int(length.sum()) and len(batch.label) == 96 * 5
    assert batch.item.min() >= 1 and batch.item.max() < data.num_items and batch.rating.max() < data.num_ratings
    last = data.train.stop.max()
    assert last <= data.held_out.begin.min(), "training and held-out users are different"


def test_the_rule_reads_the_history(data):
    """The probability follows from the ratings of the items that count, and from the item's appeal."""
    mood = []
    for begin, start in zip(data.train.begin, data.train.start, strict=True):
        weight = (data.rating_index[begin:start] - 3) / 2
        counts = (data.item_index[begin:start] - 1) % 2 == 0
        mood.append(weight[counts].mean() if counts.any() else 0.0)
    logit = np.log(data.probability / (1 - data.probability))
    per_user = np.array([logit[a:b].mean() for a, b in zip(data.train.start, data.train.stop, strict=True)])
    assert np.corrcoef(mood, per_user)[0, 1] > 0.9
    assert 0.3 < data.floor(data.train) < 0.9


def test_same_bytes(data):
    again = make_synthetic(SMALL)
    assert np.array_equal(again.label, data.label) and np.array_equal(again.item_index, data.item_index)


def test_configuration():
    overrides = ["data.synthetic.longest=64", "data.synthetic.shortest=8"]
    config = load(train.TrainConfig, "configs/train_long.yaml", overrides)
    assert config.data.synthetic is not None and config.data.synthetic.longest == 64
    with pytest.raises(ConfigError, match="longest"):
        load(train.TrainConfig, "configs/train_long.yaml", ["data.synthetic.longest=2"])


def test_training(tmp_path, capsys):
    """Both precisions learn the rule, and the report names its floor."""
    sizes = [
        f"data.synthetic.{key}={value}" for key, value in dict(users=256, held_out_users=64, items=20, shortest=16, longest=48).items()
    ]
    small = ["model.dim=32", "model.num_seeds=4", "model.hidden=[32]", "train.steps=100", "train.batch_size=16", "evaluate.points=1"]
    run = ["seeds=[0]", "device=cpu", "jobs=1", f"output={tmp_path / 'long'}"]
    assert train.main(["--config", "configs/train_long.yaml", *sizes, *small, *run]) == 0
    text = capsys.readouterr().out
    assert "the rule that drew the labels has an NE of" in text
    assert train.redraw(tmp_path / "long.json", tmp_path / "again") in text
