"""The command line itself: what it lists, what it refuses, and its exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as cli

ROOT = Path(__file__).parents[2]


def test_only_commands_that_exist_are_listed(monkeypatch, capsys):
    for name in cli.available():
        assert (ROOT / "benchmarks" / f"{name}.py").exists() or (ROOT / "benchmarks" / name).is_dir()
    monkeypatch.setitem(cli.COMMANDS, "absent", "a command of another installation")
    assert "absent" not in cli.available()
    assert cli.main(["--help"]) == 0 and "train" in capsys.readouterr().out
    assert cli.main([]) == 2


def test_an_unknown_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "unknown command 'trian'" in error and "Did you mean 'train'?" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.stpes=3"], "unknown key 'train.stpes'; did you mean 'train.steps'?"),
        (["precisions=[fp4]"], "precisions[0]: got 'fp4' (str), expected one of 'bf16', 'mxfp8'"),
        (["train.steps=0"], "train.steps: got 0, expected at least 1"),
        (["seeds=[1, 1]"], "seeds: got [1, 1], expected at least one, none of them twice"),
        (["data.path=/nowhere/a.inter"], "/nowhere/a.inter: cannot read the data file: No such file"),
        (["--config", "/nowhere/a.yaml"], "/nowhere/a.yaml: cannot read the configuration: No such file"),
        (["device=cuda:77"], "device = 'cuda:77': this machine has"),
        (["model.hidden=[]"], "model.hidden: got [], expected at least one width"),
    ],
)
def test_errors_of_the_user_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert cli.main(["train", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and error.startswith("error: ") and "\n" not in error


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown command 'nothing'; available: ")


def test_the_shipped_configurations_load():
    from benchmarks import config, kernels, train

    files = sorted((ROOT / "configs").glob("train_*.yaml"))
    assert files
    for file in files:
        assert config.load(train.TrainConfig, file).precisions == ("bf16", "mxfp8")
    for part, other in (("forward", "backward"), ("backward", "forward")):
        chosen = config.load(kernels.KernelsConfig, ROOT / "configs" / f"kernels_{part}.yaml")
        assert getattr(chosen, part) and not getattr(chosen, other) and set(chosen.shapes) <= set(kernels.SHAPES)
