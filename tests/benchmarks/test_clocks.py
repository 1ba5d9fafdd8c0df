"""Clocks from stamps, watts from what ``nvidia-smi`` prints, constant operands, and the stamp's compilation; the rest needs a GPU."""

import datetime

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import clocks
from lp_fa4 import quantize_mx
from lp_fa4.problem import AttentionProblem
from tests.conftest import offsets_of


def test_clock_is_the_median_over_multiprocessors_that_both_stamps_met():
    before = torch.tensor([[0, 1000, 50], [1, 2000, 60], [7, 0, 50], [2, 500, 55]])
    after = torch.tensor([[1, 5800, 2060], [0, 4600, 2050], [2, 1500, 2055], [9, 1, 2050]])
    assert clocks.clock_of(before, after) == (1.8, 2e-6)  # 0 and 1 at 1.8 GHz, 2 at 0.5; 7 and 9 were met once
    with pytest.raises(RuntimeError, match="no multiprocessor"):
        clocks.clock_of(before, torch.tensor([[9, 1, 2050]]))


def test_watts_are_those_of_the_time_that_was_measured():
    text = (
        "2026/01/02 03:04:05.000, 430.50, 1980, 0x0000000000000000\n"
        "2026/01/02 03:04:05.020, 720.00, 1785, 0x0000000000000004\n"
        "2026/01/02 03:04:05.040, 730.00, 1755, 0x0000000000000024\n"
        "2026/01/02 03:04:05.060, 733.00, 1755, 0x0000000000000001\n"
        "Unable to query\n2026/01/02 03:04:05.0"
    )
    samples = clocks.samples_of(text)
    start = datetime.datetime(2026, 1, 2, 3, 4, 5).timestamp()
    assert [s.capped for s in samples] == [False, True, True, False] and samples[1].time == pytest.approx(start + 0.02)
    assert clocks.power_of(samples, start + 0.01, start + 0.05) == {"watts": 725.0, "smi_mhz": 1770.0, "power_capped": 1.0}
    assert clocks.power_of(samples, start + 1, start + 2) == {"watts": None, "smi_mhz": None, "power_capped": None}


def test_constant_operands():
    """Every code is the constant, and V's sums are those of such a V."""
    offsets = offsets_of([3, 0, 40])
    q, k, v = (
        quantize_mx(torch.randn(rows, 2, 32), (0, 32), offs, token_dim=0, exponent=0) for rows, offs in ((5, None), *2 * [(43, offsets)])
    )
    problem = AttentionProblem(q, k, v, offsets_k=offsets, shared_q=True, v_sum=torch.randn(3, 2, 32))
    for name, value in (("ones", 1.0), ("zeros", 0.0)):
        made = clocks.constant(problem, clocks.CONSTANTS[name])
        assert all((x.payload.float() == value).all() for x in (made.q, made.k, made.v))
        assert torch.equal(made.k.scale_bytes, k.scale_bytes) and made.offsets_k is offsets
        assert torch.equal(made.v_sum, torch.tensor([3.0, 0.0, 40.0]).mul(value)[:, None, None].expand(3, 2, 32))


def test_what_it_cannot_do_is_said(monkeypatch, capsys):
    assert cli.main(["clocks", "device=cpu"]) == 2
    assert "device = 'cpu': clocks are counted on a CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(clocks, "pick_device", lambda name: torch.device("cuda"))
    for argument, words in (
        ("shapes=[llm]", "shapes = ['llm']: known are pma_4096_jagged"),
        ("rounds=0", "rounds = 0: expected at least 1"),
    ):
        assert cli.main(["clocks", argument]) == 2 and words in capsys.readouterr().err


def test_table():
    row = {"shape": "a", "what": "forward", "data": "zeros", "mode": "burst", "ms": 1.5, "ghz": 1.8, "mclocks": 2.7, "tflops": 900.0}
    lines = clocks.table([row, {**row, "mode": "sustained", "watts": 720.4, "power_capped": 0.5}]).splitlines()
    assert lines[3].split()[-6:] == ["1.500", "1.800", "2.70", "900", "–", "–"] and lines[4].split()[-2:] == ["720", "50%"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_stamp_compiles(arch):
    pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
    from benchmarks.stamp import compile_stamp

    assert compile_stamp(arch) is compile_stamp(arch)
