"""The committed records of the campaigns are whole: every row of every list, every planted fault, every compiled variant."""

import json
from pathlib import Path

import pytest

from tests.sm100 import backward_compiled, backward_matrix, backward_pair_matrix, matrix

RESULTS = Path(__file__).parent / "results"
SCHEDULES = 16
MATRICES = {"forward": matrix, "backward": backward_matrix, "backward_pair": backward_pair_matrix}


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", MATRICES)
def test_every_row_was_right_under_sixteen_schedules(name):
    """Each mode at each number of queries, on each list of keys; no run failed."""
    found, module = record(f"{name}_matrix"), MATRICES[name]
    assert not found["failed"]
    rows = {(row["mode"], row["queries"]): row for row in found["passed"]}
    assert set(rows) == {(mode, queries) for mode in module.MODES for queries in module.QUERIES}
    assert len(rows) == len(found["passed"]) == found["rows_of_the_list"]
    for row in rows.values():
        assert row.get("runs", row.get("schedules")) == SCHEDULES * len(module.KEYS), row


@pytest.mark.parametrize("name, least", [("backward_faults", 60), ("backward_pair_faults", 50)])
def test_planted_faults_were_seen(name, least):
    """Of the sites that act, at most one in twenty was missed; ``BACKWARD.md`` says which, and why."""
    found = record(name)
    acting = [site for site in found["each"] if site["acts"]]
    seen = [site for site in acting if site.get("caught")]
    assert len(acting) >= least and len(seen) == found["caught_of_acting"] >= 0.95 * len(acting)


def test_every_variant_was_compiled_without_a_spill():
    """Both targets; every product block-scaled, or plain over a pair."""
    variants = record("backward_compiled")["variants"]
    names = {how + name for how in ("", "pair_") for name in backward_compiled.VARIANTS}
    assert {(v["name"], v["arch"]) for v in variants} == {(name, arch) for name in names for arch in ("sm_100a", "sm_103a")}
    for v in variants:
        pair = v["name"].startswith("pair_")
        assert v["stack"] == 0 and v["local"] == 0 and v["columns"] <= 512 and v["smem"] <= 227 * 1024, v
        assert not {"STL", "LDL", "HMMA"} & v["sass"].keys(), v
        assert all(("2CTA" in kind and "scaled=False" in kind) if pair else "scaled=True" in kind for kind in v["products"]), v
