"""How many random inputs each property was tried on, by subject and place; kept for a run's record.

``LP_FA4_TALLY=FOLDER python -m pytest tests/properties`` leaves one JSON file a process there; ``tests.properties.campaign`` adds them up.
"""

import json
import os
from collections import Counter
from pathlib import Path

_counts: Counter[tuple[str, str, str]] = Counter()


def count(about: str, subject: str, place: str) -> None:
    """One more input."""
    _counts[about, subject, place] += 1
    save()


def inputs() -> int:
    """How many so far in this process."""
    return _counts.total()


def save() -> None:
    """Write this process's counts to the folder that ``LP_FA4_TALLY`` names, if it does."""
    folder = os.environ.get("LP_FA4_TALLY")
    if folder and _counts:
        Path(folder).mkdir(parents=True, exist_ok=True)
        rows = [[*key, n] for key, n in sorted(_counts.items())]
        file = Path(folder, f"tally-{os.getpid()}.json")
        file.with_suffix(".new").write_text(json.dumps(rows), encoding="utf-8")
        file.with_suffix(".new").replace(file)  # whole or not at all: a campaign reads while its processes run


def total(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Inputs by place, property and subject, over all processes of a run."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for path in sorted(folder.glob("tally-*.json")):
        for about, subject, place, n in json.loads(path.read_text(encoding="utf-8")):
            subjects = out.setdefault(place, {}).setdefault(about, {})
            subjects[subject] = subjects.get(subject, 0) + n
    return out
