"""What ``tests.sanitizer`` makes of a tool's words, that its explanations are of code that exists, and the probes in the emulator."""

import ast
import json

import pytest

from tests.emulator.worker import Worker
from tests.processes import ROOT
from tests.sanitizer.cases import CASES, title
from tests.sanitizer.lanes import HARMLESS
from tests.sanitizer.pairs import PAIRS, function_of, sources
from tests.sanitizer.probes import PROBES, RACES
from tests.sanitizer.report import merge, parse, table

ENTRY = "kernel_cutlass_kernel_lp_fa4sm90forward_kernelForward_object_at__tensor"
RACE = f"""
========= Error: Race reported between Read access at {ENTRY}+0x10 in forward_consumer.py:71
=========     and Write access at {ENTRY}+0x20 in forward_producer.py:165 [32 hazards]
=========     and Write access at {ENTRY}+0x30 in forward_producer.py:165 [4 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
UNWRITTEN = f"""
========= Uninitialized __global__ memory read of size 16 bytes
=========     at {ENTRY}+0x2a0 in forward_consumer.py:71
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""


def test_words_become_data():
    found = parse(RACE, "racecheck")
    assert [(p["kernel"], p["write"], p["read"], p["printed"]) for p in found["pairs"]] == [
        ("forward_kernel Forward", "forward_producer.py:165", "forward_consumer.py:71", 2)
    ]
    assert found["others"] == [] and found["summary"]
    found = parse(UNWRITTEN, "initcheck")
    assert [(o["kernel"], o["place"]) for o in found["others"]] == [("forward_kernel Forward", "forward_consumer.py:71")]
    assert parse("reports: 0\n", "emulator")["reports"] == 0 and parse("Traceback\nRaceError: 3", "emulator")["reports"] is None


def test_nothing_is_explained_without_evidence():
    """A run that did not end, a pair that nobody knows, and a known pair whose probe is missing all stay open."""
    pair = PAIRS[0]
    known = {"kernel": pair.kernel, "write": "a.py:1", "read": "b.py:2", "functions": [pair.write, pair.read], "printed": 1}
    run = {"tool": "racecheck", "case": "attention", "exit": 0, "summary": ["x"], "pairs": [known], "others": [], "kernels": []}
    record = merge([{"tool": "version", "runs": [run], "environment": {}}])
    assert record["runs"][0]["unexplained"] == 1 and "missing" in record["runs"][0]["pairs"][0]
    for change in ({"exit": -9, "summary": [], "pairs": []}, {"pairs": [{**known, "functions": ["x", "y"]}]}):
        record = merge([{"tool": "version", "runs": [{**run, **change}], "environment": {}}])
        assert record["runs"][0]["unexplained"] != 0
    assert "| attention |" in table(record)


def test_a_case_by_its_operations():
    """Runs of all of a case's operations replace the run of the case, and the other way round; some of them leave it open."""
    run = {"tool": "memcheck", "case": "few queries", "exit": 0, "summary": ["x"], "pairs": [], "others": [], "kernels": []}
    record = {"tool": "version", "environment": {}}
    apart = [{**run, "operation": title(operation)} for operation in CASES["few queries"]]
    assert merge([{**record, "runs": [run, *apart]}])["runs"] == [{**one, "unexplained": 0} for one in apart]
    assert merge([{**record, "runs": [*apart, run]}])["runs"] == [{**run, "unexplained": 0}]
    assert len({title(operation) for operations in CASES.values() for operation in operations}) == sum(map(len, CASES.values()))
    for runs, cell in ((apart, "0"), (apart[:1], "-"), ([run, apart[0]], "0"), ([], "-")):
        assert f"| few queries | {cell} |" in table({"runs": merge([{**record, "runs": runs}])["runs"]})


def test_explanations_are_of_code_that_exists():
    places = [(p.kernel, x) for p in PAIRS for x in (p.write, p.read)] + [(k, x) for k, *both in HARMLESS for x in both]
    for kernel, place in places:
        file, _, function = place.partition(" ")
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources(file, kernel)]
        names = {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert function in names, (kernel, place)
    assert all(pair.probe in PROBES and pair.reason for pair in PAIRS)
    assert function_of("rows.py:1", "weight_gradient_codes WeightGradientOfCodes") == "rows.py:1"


def test_the_record_leaves_nothing_open():
    """Every report of the committed record has its reason, and the evidence for it lies in the same file; every kernel is in it."""
    record = json.loads((ROOT / "benchmarks/results/h200/sanitizer.json").read_text(encoding="utf-8"))
    again = merge([{**record, "environment": record["environment"][0]}])
    assert again["runs"] and all(run["exit"] == 0 and run["unexplained"] == 0 for run in again["runs"])
    seen = {kernel for run in record["runs"] if run["tool"] == "racecheck" for kernel in run["kernels"]}
    assert not seen & UNSEEN
    assert seen | UNSEEN >= {name for name in kernels() if "sm100" not in name and name not in BASES}


UNSEEN: set[str] = set()
"""Kernels that no racecheck run of the record has met (``tests/README.md`` says why)."""

BASES = {"lp_fa4.common.backward_postpass.Postpass"}
"""Kernels that are only inherited from."""


def kernels() -> set[str]:
    """``module.Class`` of every kernel of ours."""
    found = set()
    for path in [p for package in ("lp_fa4", "fused_ops") for p in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
                if any("cute.kernel" in ast.unparse(d) for f in functions for d in f.decorator_list):
                    found.add(".".join([*path.relative_to(ROOT).with_suffix("").parts, node.name]))
    return found


@pytest.fixture(scope="module")
def worker():
    pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")
    made = Worker("sm_90a")
    yield made
    made.close()


@pytest.mark.emulator
def test_probes(worker):
    """The emulator's checker reports the wrong form of each hand-over and none of the right ones."""
    names = [name for name in PROBES if "bulk store" not in name and "same value" not in name]
    found = worker.call("tests.sanitizer.probes:emulated", names=names, schedules=2)
    assert {name for name, reports in found.items() if reports} == RACES


@pytest.mark.emulator
def test_lanes(worker):
    """A lane that arrives for others which did not meet it is seen; after a meeting, or where each arrives for itself, nothing is."""
    names = [name for name in PROBES if name.startswith("reuse, ") and "early" not in name]
    found = worker.call("tests.sanitizer.lanes:of_probes", names=names)
    assert {name for name, places in found.items() if places} == {"reuse, not met"}
