"""The module command on a CPU: what it explains, what it measures there, and that its record draws again."""

import json

import pytest

from benchmarks import module
from benchmarks.config import load
from benchmarks.module import ModuleConfig, shapes_of, stage_of

TINY = ["device=cpu", "batch=3", "seeds=4", "keys=[40]", "dim=64", "heads=2", "compile=false", "warmup=1", "rounds=2"]


def test_without_a_gpu_it_says_what_it_needs(capsys, monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    assert module.main(["--config", "configs/module_post.yaml"]) == 2
    text = capsys.readouterr().out
    assert "compute capability 9.0" in text and "16384 jagged" in text and "device=cpu" in text


def test_runs_and_draws_again(tmp_path, capsys):
    assert module.main([*TINY, f"out={tmp_path}"]) == 0
    table = capsys.readouterr().out.split("\n\nwritten")[0]
    assert "40 jagged" in table and "MXFP8" in table
    record = json.loads((tmp_path / "module.json").read_text())
    rows = record["results"]["shapes"]
    assert [r["kind"] for r in rows] == ["uniform", "jagged"] and rows[0]["tokens"] == 120
    assert rows[0]["db_against_fp64"]["mxfp8"]["out"] > 18
    assert module.main([f"record={tmp_path / 'module.json'}", f"out={tmp_path}"]) == 0
    assert capsys.readouterr().out.strip() == table.strip()


def test_a_wrong_module_is_not_timed(monkeypatch):
    config = load(ModuleConfig, None, TINY)
    monkeypatch.setattr(module.truth_module, "pool_sequence", lambda events, *a: events.sum() * events.new_ones(4, 64))
    with pytest.raises(RuntimeError, match="dB against FP64"):
        module.run(config, module.torch.device("cpu"))


def test_figure_of_stages(tmp_path):
    config = ModuleConfig()
    stages = {name: {"ms": dict.fromkeys(module.STAGES, 1.5)} for name in config.precisions}
    rows = [{"keys": k, "kind": "jagged", **{n: {"stages": s} for n, s in stages.items()}} for k in (4096, 8192)]
    module.draw(tmp_path / "a.png", config, rows, "note")
    assert (tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "kernel, stage",
    [
        ("kernel_cutlass_kernel_lp_fa4sm90forward_kernelForward_object_at__tensorptri8gmem", "attention forward"),
        ("kernel_cutlass_kernel_lp_fa4sm90backward_mainMain_object", "attention backward"),
        ("kernel_cutlass_kernel_fused_opsrmsnorm_quantizekernelNorm", "norm"),
        ("kernel_cutlass_kernel_fused_opsgemm_norm_backwardinput_gradient", "projection + norm backward"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object", "attention backward"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", "attention forward"),
        ("nvjet_tst_192x192_64x4", None),
    ],
)
def test_kernels_say_their_stage(kernel, stage):
    assert stage_of(kernel) == stage


def test_jagged_lengths():
    config = load(ModuleConfig, "configs/module_post.yaml")
    shapes = shapes_of(config)
    assert [s.name for s in shapes][:2] == ["4096 uniform", "4096 jagged"]
    jagged = shapes[5]
    assert max(jagged.lengths) <= 16384 and 0.45 < jagged.tokens / shapes[4].tokens < 0.55
    assert shapes_of(config, 1)[5].lengths != jagged.lengths, "ranks draw lengths of their own"


def test_world_size_option(tmp_path, capfd):
    assert module.main(["--world-size", "2", *TINY, "kinds=[jagged]", "rounds=1", f"out={tmp_path}"]) == 0
    rows = json.loads((tmp_path / "module_x2.json").read_text())["results"]
    assert len(rows) == 4 and {r["balanced"] for r in rows} == {True, False}
    assert "Weak scaling on 2" in capfd.readouterr().out
