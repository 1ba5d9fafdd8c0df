"""The records of the campaigns: as one table, random inputs by property and place; and several runs of one place as one record.

python -m tests.properties.records
python -m tests.properties.records --merge RUN.json RUN.json --out benchmarks/results/cpu/properties_sm_100a.json
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tests.processes import ROOT

RECORDS = {
    "reference": "benchmarks/results/cpu/properties_reference.json",
    "H200": "benchmarks/results/h200/properties.json",
    "emulated sm_90a": "benchmarks/results/cpu/properties_sm_90a.json",
    "emulated sm_100a": "benchmarks/results/cpu/properties_sm_100a.json",
}

SHOWN = ("inputs", "seconds")
"""What a record keeps of each run, beside its commit."""


def load() -> dict[str, dict[str, Any]]:
    """Each place's record."""
    return {place: json.loads((ROOT / path).read_text(encoding="utf-8")) for place, path in RECORDS.items()}


def cell(record: dict[str, Any]) -> str:
    """Failures that are open, and that were mended since."""
    mended = len(record.get("mended", {}))
    return str(len(record["failures"]) or "none") + (f" ({mended} mended)" if mended else "")


def table() -> str:
    """Markdown: a line a property, "inputs / operations" in each place, then sums, failures and commits."""
    records = load()
    by_place = {place: next(iter(record["by_property"].values())) for place, record in records.items()}
    lines = ["| property | " + " | ".join(records) + " |", "|---" * (len(records) + 1) + "|"]
    for about in sorted({about for found in by_place.values() for about in found}):
        cells = [found.get(about, {}) for found in by_place.values()]
        lines.append(f"| {about} | " + " | ".join(f"{sum(c.values()):,} / {len(c)}" if c else "-" for c in cells) + " |")
    lines.append("| all | " + " | ".join(f"{sum(record['inputs'].values()):,}" for record in records.values()) + " |")
    lines.append("| failures | " + " | ".join(cell(record) for record in records.values()) + " |")
    commits = [record["environment"]["commit"][:7] for record in records.values()]
    lines.append("| commit | " + " | ".join(commits) + " |")
    return "\n".join(lines)


def merge(runs: list[dict[str, Any]], mended: dict[str, str]) -> dict[str, Any]:
    """Inputs added up, failures of all, what each run was, and the last one's surroundings. A process that was stopped by time has tried
    what it counts; ``unfinished`` names those that no run finished. ``mended``: failures that have been since, and the test of each.
    A record of runs is taken as they were."""
    inputs: dict[str, dict[str, dict[str, int]]] = {}
    for run in runs:
        for place, properties in run["by_property"].items():
            for about, subjects in properties.items():
                found = inputs.setdefault(place, {}).setdefault(about, {})
                for subject, n in subjects.items():
                    found[subject] = found.get(subject, 0) + n
    failures = [failure for run in runs for failure in run["failures"]]
    late = {text.rsplit(": ", 1)[0] for text in failures if re.search(r": (stopped after|not begun)", text)}
    late |= {name for run in runs for name in run.get("unfinished", [])}
    ended = {
        name for run in runs for name in run.get("seconds", {}) if not any(text.startswith(f"{name}: stopped") for text in run["failures"])
    }
    return {
        "place": runs[0]["place"],
        "failures": [text for text in failures if not re.search(r": (stopped after|not begun)", text) and text not in mended],
        "mended": {text: test for run in runs for text, test in run.get("mended", {}).items()}
        | {text: test for text, test in mended.items() if text in failures},
        "unfinished": sorted(name for name in late - ended if name.split(": ")[0] not in ended),  # an operation's process has all its tests
        "inputs": {place: sum(n for s in kinds.values() for n in s.values()) for place, kinds in inputs.items()},
        "by_property": inputs,
        "runs": [one for r in runs for one in r.get("runs") or [{"commit": r["environment"]["commit"], **{k: r.get(k) for k in SHOWN}}]],
        "environment": runs[-1]["environment"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--merge", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--mended", nargs=2, action="append", default=[], metavar=("FAILURE", "TEST"))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if not chosen.merge:
        print(table())
        return
    text = json.dumps(merge([json.loads(path.read_text(encoding="utf-8")) for path in chosen.merge], dict(chosen.mended)), indent=1) + "\n"
    chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
