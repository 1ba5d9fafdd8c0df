"""Run records, tables, figures and the interleaved timer."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import harness, plots
from benchmarks.config import UserError


@dataclass(frozen=True)
class Config:
    path: Path = Path("x/y")
    sizes: tuple[int, ...] = (1, 2)


def test_a_record_is_strict_json_with_everything_needed_to_repeat_it(tmp_path):
    results = {"ne": math.nan, "worst": -math.inf, "array": np.arange(3), "scalar": torch.tensor(1.5), 4: Config()}
    target = tmp_path / "deep" / "run.json"
    record = harness.write_record(target, "demo", Config(), results)
    read = json.loads(target.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == record
    assert read["command"] == "demo" and read["config"] == {"path": "x/y", "sizes": [1, 2]}
    assert read["results"] == {"ne": "nan", "worst": "-inf", "array": [0, 1, 2], "scalar": 1.5, "4": {"path": "x/y", "sizes": [1, 2]}}
    environment = read["environment"]
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0] or environment["versions"]["torch"] == torch.__version__
    assert environment["machine"]["cores"] >= 1 and {"date", "commit", "modified"} <= set(environment)
    assert list(target.parent.iterdir()) == [target], "no partial file is left"


def test_table_aligns_and_refuses_ragged_rows():
    text = harness.format_table(["name", "value"], [["a", "1.5"], ["longer", None]], "title")
    assert text.splitlines() == ["title", "─" * 13, "name    value", "─" * 13, "a         1.5", "longer      –", "─" * 13]
    with pytest.raises(ValueError, match="has 1 cells, the table has 2 columns"):
        harness.format_table(["a", "b"], [["x"]])


def test_timer_interleaves_and_rotates():
    calls = []
    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = harness.time_interleaved(variants, warmup=1, rounds=3)
    assert calls == list("abcbcacababc")
    assert set(timings) == set("abc") and all(len(t.samples) == 3 and t.best <= t.median <= t.p90 for t in timings.values())
    with pytest.raises(ValueError, match="rounds = 0"):
        harness.time_interleaved(variants, rounds=0)


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "meta", "gpu:0"])
def test_devices_that_are_not_there_are_named(name):
    with pytest.raises(UserError, match=f"device = '{name}'"):
        harness.pick_device(name)


def test_figure_is_written_only_when_it_is_whole(tmp_path):
    good = tmp_path / "plots" / "a.png"
    with plots.figure(good) as (drawing, axes):
        axes.plot([1, 2, 3], color=plots.color("mxfp8"))
        plots.footnote(drawing, "note")
    assert good.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RuntimeError), plots.figure(tmp_path / "b.png"):
        raise RuntimeError
    assert not (tmp_path / "b.png").exists()
    assert plots.color("MXFP8") != plots.color("BF16") and plots.color("other", 1) == plots.PALETTE[1]


def test_commit_of_an_archive(tmp_path, monkeypatch):
    """Outside a checkout the commit is the archive's; a file that no archive filled in names none."""
    from benchmarks import harness

    monkeypatch.setattr(harness, "ROOT", tmp_path)
    for text, expected in (("$Format:%H$\n", None), ("0123abcd\n", "0123abcd")):
        file = tmp_path / "commit.txt"
        file.write_text(text, encoding="utf-8")
        monkeypatch.setattr(harness, "COMMIT_FILE", file)
        assert harness.commit() == {"commit": expected, "modified": None}
