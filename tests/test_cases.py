"""``tests/README.md`` maps cases to tests: every test it names exists, and no case lacks a tier that it is due."""

import ast
import functools
import json
import re
from pathlib import Path

import pytest

from tests.properties import records
from tests.sanitizer.report import table

HERE = Path(__file__).parent
TIERS = ("CPU", "emulator", "H200", "two processes")
CASES = (
    *("A1", "A2", "A3", "A5", "A7", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "B10"),
    *("C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9", "C10", "C11", "C13", "D1", "D2", "D3", "D4", "D6"),
    *("E2", "E3", "E5", "E6", "E7", "E8", "F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9", "F10"),
    *("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G10", "G11"),
)


def rows() -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    """Case to the tiers it is due and the tests named under each tier."""
    found = {}
    for line in (HERE / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(TIERS) and re.match(r"[A-G]\d+ ", cells[0]):
            named = {tier: re.findall(r"`([^`]+)`", cell) for tier, cell in zip(TIERS, cells[2:], strict=True)}
            found[cells[0].split()[0]] = [t.strip() for t in cells[1].split(",")], named
    return found


@functools.cache
def functions(path: Path) -> dict[str, bool]:
    """Functions of a file, those of classes as ``Class::function``, and whether they are marked ``gpu``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = any(isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n) and "mark.gpu" in ast.unparse(n) for n in tree.body)
    out = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for f in inner:
            if isinstance(f, ast.FunctionDef):
                marks = " ".join(map(ast.unparse, f.decorator_list))
                out[before + f.name] = whole or "mark.gpu" in marks or "every_subject" in marks
    return out


def test_every_case_has_its_tiers():
    found = rows()
    assert sorted(found) == sorted(CASES)
    for case, (due, named) in found.items():
        assert set(due) <= set(TIERS), (case, due)
        for tier in due:
            assert named[tier], f"{case} has no test under {tier}"


@pytest.mark.parametrize("case", CASES)
def test_named_tests_exist(case):
    for tier, names in rows()[case][1].items():
        for name in names:
            path, _, function = name.partition("::")
            file = HERE / ("properties/test_batches.py" if path == "properties" else path)
            assert file.is_file(), f"{case}: {path}"
            assert function in functions(file), f"{case}: {name}"
            assert tier != "H200" or functions(file)[function], f"{case}: {name} does not run on a GPU"


def test_tables_are_those_of_the_records():
    """``python -m tests.properties.records`` and ``python -m tests.sanitizer benchmarks/results/h200/sanitizer.json --table``."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    record = json.loads((HERE.parent / "benchmarks/results/h200/sanitizer.json").read_text(encoding="utf-8"))
    assert records.table() in text and table(record) in text
    assert not any(r["failures"] for r in records.load().values())


def test_every_failure_has_its_test():
    """The tests that the page names beside failures found exist."""
    section = (HERE / "README.md").read_text(encoding="utf-8").split("## Failures found")[1].split("## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "::" in line]
    assert len(rows) > 10
    for row in rows:
        for name in re.findall(r"`([^`]+::[^`]+)`", row):
            path, _, function = name.partition("::")
            assert function in functions(HERE / path), name
