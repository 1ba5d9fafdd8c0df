"""What the kernels' benchmark does around its timings, on a machine without a GPU."""

from types import SimpleNamespace

import torch

from benchmarks.kernels_baselines import served


def test_a_baseline_that_refuses_is_a_note(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    ran = []

    def refuses(shape, device):
        raise NotImplementedError(f"no {shape.name}")

    library = SimpleNamespace(works=lambda shape, device: lambda: ran.append(shape.name), refuses=refuses)
    notes = {}
    calls = served(library, ["refuses", "works", "absent"], SimpleNamespace(name="small"), torch.device("cpu"), notes)
    assert list(calls) == ["works"] and ran == ["small"]
    assert notes["refuses"] == "NotImplementedError: no small" and notes["absent"].startswith("AttributeError")
    assert "small: refuses refused: NotImplementedError: no small" in capsys.readouterr().err
