"""Why pairs of accesses that ``racecheck`` reports are no races, by kernel and function; nothing else is explained.

Every reason names a probe (``probes``): the smallest kernel that is ordered in the same way, by PTX's memory model too. A record holds what
the tool says of the probe beside what it says of our kernels, and a pair counts as explained only if the tool reports the probe as well
while the emulator's race checker, which follows mbarriers, named barriers and proxies, and does report the probe's wrong form, finds both
the probe and the case clean (``report.evidence``).
"""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import ROOT


@dataclass(frozen=True)
class Pair:
    """``kernel``: module and class; ``write``, ``read``: ``file.py function`` of either access."""

    kernel: str
    write: str
    read: str
    probe: str
    reason: str


FORWARD, STAGED, PROJECTION, WEIGHT, WEIGHT_FP8, INPUT, BACKWARD = (
    "forward_kernel Forward",
    "staged StagedNorm",
    "kernel NormProjection",
    "weight_gradient_codes WeightGradientOfCodes",
    "weight_gradient_fp8 WeightGradientFp8",
    "input_gradient_codes InputGradientOfCodes",
    "backward_main BackwardMain",
)
MET = "the lanes that read have met at bar.warp.sync or a named barrier when one of them arrives on {}, which the writer waits for"
WRITTEN = "each warp of its writers meets at bar.warp.sync, then one lane arrives on {}, which the readers wait for"
TABLE = "a step's table: " + WRITTEN.format("table")
REUSE, BULK, PUBLISH, RELAY = "reuse, one arrives", "reuse, bulk, one arrives", "publish, one arrives", "relay, one arrives"


def _record(write: str, read: str) -> Pair:
    return Pair(BACKWARD, f"backward_load.py {write}", read, REUSE, "an item's record: " + MET.format("k_empty"))


def _statistics(read: str) -> Pair:
    reason = "a stage's statistics: " + MET.format("a_empty")
    return Pair(BACKWARD, "backward_load.py copy_warp", f"backward_{read}", BULK, reason)


PAIRS: tuple[Pair, ...] = (
    Pair(
        FORWARD,
        "forward_producer.py produce",
        "forward_consumer.py factors_of",
        REUSE,
        "exponents of a stage: " + MET.format("k_empty"),
    ),
    *(
        Pair(FORWARD, "forward_producer.py produce", f"forward_{f}", REUSE, "an item's record: " + MET.format("q_empty"))
        for f in ("consumer.py consume", "epilogue.py finish", "epilogue.py finish_split")
    ),
    Pair(FORWARD, "forward_producer.py produce", "forward_turn.py turn_values", REUSE, "a plain tile's record: " + MET.format("v_full")),
    Pair(
        FORWARD,
        "forward_turn.py clear_rows",
        "forward_turn.py turn_blocks",
        REUSE,
        "a plain tile's rows past its sequence's end: " + MET.format("v_full") + " (by way of the copy that fills the tile again); "
        "before they are read, all that clear them meet at a named barrier",
    ),
    *(_statistics(f"{file}.py {f}") for file in ("compute", "halves") for f in ("probabilities", "score_gradients", "step")),
    *(_statistics(f) for f in ("compute.py segment_factors", "ops.py power_for")),
    *(_statistics(f"halves.py {f}") for f in ("first_exponent", "means", "score_scale", "unit_of")),
    *(
        _record(warp, f"backward_{read}")
        for warp in ("key_warp", "copy_warp")  # the second wrote it when the record was made
        for read in ("load.py __init__", "dq.py largest_scale", "compute.py key_factors")
    ),
    *(
        Pair(BACKWARD, write, "backward_dq.py agree", REUSE, "scales of a buffer of dS: " + MET.format("ds_empty"))
        for write in ("backward_compute.py store_codes", "backward_halves.py step")
    ),
    Pair(
        BACKWARD,
        "backward_compute.py warpgroup_maximum",
        "backward_compute.py warpgroup_maximum",
        RELAY,
        "maxima of a stage: a lane writes, its warpgroup meets at a named barrier and reads; overwritten after every warp released the "
        "stage and the copy warp filled it again",
    ),
    Pair(
        BACKWARD,
        "backward_compute.py note_scale",
        "backward_compute.py follow_scales",
        PUBLISH,
        "a warp's scale one turn of the ring before: " + WRITTEN.format("a_empty") + " (by way of the copy that fills the stage again); "
        "overwritten when every warp has released the stage once more",
    ),
    Pair(STAGED, "staged.py load", "staged.py read", BULK, "rows of a stage: " + MET.format("empty")),
    Pair(STAGED, "staged.py emit", "staged.py store_copy", PUBLISH, "a slot of codes: " + WRITTEN.format("word_full")),
    Pair(PROJECTION, "norm.py put", "roles.py multiply", PUBLISH, "normed rows of a stage: " + WRITTEN.format("normed")),
    *(
        Pair(PROJECTION, "norm.py factors_of_half", read, PUBLISH, "rows' factors of a stage: " + WRITTEN.format("factored"))
        for read in ("norm.py raw_group", "arithmetic.py mul")
    ),
    Pair(WEIGHT, "weight_gradient_codes.py write_table", "weight_gradient_codes.py compute", PUBLISH, TABLE),
    Pair(WEIGHT, "weight_gradient_codes.py write_table", "weight_gradient_codes.py converted", PUBLISH, TABLE),
    Pair(WEIGHT_FP8, "weight_gradient_fp8.py write_step", "weight_gradient_fp8.py sum_run", PUBLISH, TABLE),
    *(
        Pair(INPUT, f"input_gradient_codes.py {write}", f"input_gradient_codes.py {read}", PUBLISH, TABLE)
        for write in ("tabulate", "write_groups", "write_rows")
        for read in ("multiply", "norm", "derive")
    ),
    Pair(
        WEIGHT,
        "weight_gradient_codes.py scan",
        "weight_gradient_codes.py unit",
        RELAY,
        "a segment's largest exponents: three warps meet at a named barrier, one of them then arrives on table, which the readers wait for",
    ),
)


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def sources(name: str, kernel: str = "") -> list[Path]:
    """Files of that name among kernels; of several, those beside ``kernel``'s module."""
    found = [p for package in ("lp_fa4", "fused_ops") for p in sorted((ROOT / package).rglob(name))]
    module = kernel.split()[0] + ".py" if kernel else ""
    beside = [p for p in found if (p.parent / module).is_file()]
    return beside or found


def function_of(place: str, kernel: str = "") -> str:
    """``file.py function`` of ``file.py:line``: the innermost function there, or the place itself."""
    name, _, line = place.partition(":")
    for path in sources(name, kernel):
        inside = [f for f in _functions(path) if f[0] <= int(line or 0) <= f[1]]
        if inside:
            return f"{name} {max(inside)[2]}"
    return place


STORED = "bulk store, bulk"
READS = {
    ("backward_prepass Prepass", "backward_prepass.py eight_values"): "rows of the centred O, which the forward stores by TMA; initcheck "
    "does not follow bulk stores, and this tensor was not set before"
}
"""Why first reads that ``initcheck`` reports are none, by kernel and place; the probe is ``STORED``."""


def explain_read(report: dict[str, Any]) -> str | None:
    """The explanation of a first read."""
    if not report["what"].startswith("Uninitialized __global__ memory read"):
        return None
    return READS.get((report["kernel"], report["function"]))


def explain(report: dict[str, Any]) -> Pair | None:
    """The explanation of a pair of accesses, if there is one."""
    key = (report["kernel"], *report["functions"])
    return next((p for p in PAIRS if (p.kernel, p.write, p.read) == key), None)
