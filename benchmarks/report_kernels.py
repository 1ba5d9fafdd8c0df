"""Tables of the kernels' own pages, drawn from the same records as those of ``benchmarks.report``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import RIVALS, by_shape, markdown, record, source

COPY = "copy"


def works(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of a record by work and variant, in its order."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in record(name)["results"]:
        found.setdefault(row["work"], {})[row["variant"].strip()] = row
    return found


def times(ms: float, ours: float) -> str:
    return f"{ms:.3f}: {ms / ours:.2f} times"


def forward_table() -> str:
    """The forward against its rivals, in bursts and sustained, and its share of the MMA limit."""
    found, rows = record("h200/forward"), []
    results = [row for row in found["results"] if not row["shape"].startswith("few_queries")]

    def ratio(row: dict[str, Any], at: dict[str, dict[str, Any]], key: str) -> str:
        return ", ".join(f"{row[key] / at[name][key]:.2f}" for name in RIVALS)

    for shape, at in by_shape(results):
        ours = [(variant, row) for variant, row in at.items() if variant not in RIVALS]
        for i, (variant, row) in enumerate(ours):
            rivals = [f"{at[name]['tflops']:.0f}, {at[name]['sustained_tflops']:.0f}" if i == 0 else "" for name in RIVALS]
            label = variant.removeprefix("lp_fa4 ").replace("V as it is", "V turned by the kernel")
            limit = row["limits_ms"]["mma"] / row["ms"]["median"]
            measured = f"{row['tflops']:.0f}, {row['sustained_tflops']:.0f}"
            ratios = ratio(row, at, "tflops"), ratio(row, at, "sustained_tflops")
            rows.append([f"{shape}, {label}" if i == 0 else f"… {label}", measured, *rivals, *ratios, f"{limit:.0%}"])
    header = ["TFLOP/s, burst and sustained", "this", *RIVALS.values(), "ratio to each, burst", "sustained", "MMA limit, burst"]
    return markdown(header, rows) + source("h200/forward", found)


def norm_table() -> str:
    """The norm against the copy of as many bytes and the pair of passes; in brackets with a compiled norm, and with a compiled quantize."""
    found, rows = works("h200/producers"), []
    kinds = {"static": "static, centred", "square": "32 x 32, not centred", "copied": "static, centred, with the copy of V"}
    for kind, title in kinds.items():
        for columns in (384, 512):
            cells = [f"{columns} columns, {title}"]
            for tokens in ("1.5 M", "6 M"):
                at = found[f"rmsnorm_quantize {kind}, {tokens} x {columns}"]
                ms = {name: row["ms"] for name, row in at.items()}
                ours = ms["rmsnorm_quantize"]
                others = [ms[name] for name in ("compiled norm, then quantize", "norm, then a compiled quantize") if name in ms]
                over = f"{ms['norm, then quantize'] / ours:.2f}×"
                over += f" ({', '.join(f'{other / ours:.2f}×' for other in others)})" if others else ""
                cells += [f"{ours:.3f}", f"{ms[COPY] / ours:.0%}", over]
            rows.append(cells)
    header = ["work", "1.5 M events, ms", "of the copy", "over the unfused pair", "6 M events, ms", "of the copy", "over the unfused pair"]
    return markdown(header, rows) + source("h200/producers", record("h200/producers"))


def products_table() -> str:
    """GEMM + quantize against cuBLAS, alone and with a quantize pass."""
    found, rows = works("h200/producers"), []
    for kind, title in {"pair": "E4M3 hi + lo", "single": "E4M3", "bf16": "BF16"}.items():
        for tokens in ("1.5 M", "6 M"):
            for columns in (384, 512):
                at = found[f"gemm_quantize {kind}, {tokens} x {columns}"]
                ours = at["gemm_quantize"]
                others = [times(at[name]["ms"], ours["ms"]) for name in ("cuBLAS BF16, then quantize", "cuBLAS BF16 alone")]
                rows.append([f"{tokens}, {columns} x {columns}, {title}", f"{ours['ms']:.3f} ({ours['tflops']:,.0f} TFLOP/s)", *others])
    header = ["work", "ms", "cuBLAS BF16, then a quantize pass", "cuBLAS BF16 alone"]
    return markdown(header, rows) + source("h200/producers", record("h200/producers"))


def norm_projection_table() -> str:
    """Norm and projection in one kernel against two."""
    rows, others = [], ("norm, then E4M3 hi + lo", "norm with BF16 rows, then BF16")
    for work, at in works("h200/producers").items():
        if work.startswith("rmsnorm_project"):
            ours = at["rmsnorm_project"]["ms"]
            title = work.split(", ")[1] + (", FP32 rows" if "float32" in work else "")
            rows.append([title, f"{ours:.3f}", *(times(at[name]["ms"], ours) for name in others), f"{at[COPY]['ms']:.3f}"])
    return markdown(["work", "one kernel", *others, "copy of as many bytes"], rows) + source("h200/producers", record("h200/producers"))


def norm_backward_table() -> str:
    """The GEMM + norm backward against cuBLAS and Quack's norm."""
    rows = []
    for work, at in works("h200/fused").items():
        ms = {name: row["ms"] for name, row in at.items()}
        tokens, columns = work.removeprefix("gemm_norm_backward, ").split(" x ")
        parts = ", ".join(f"{ms[name]:.2f}" for name in ("BF16 dv += dk w", "BF16 Quack norm", "BF16 dW"))
        ours, theirs = ms["gemm_norm_backward"], ms["BF16: cuBLAS, Quack norm"]
        alone = [f"{ms[name]:.2f}" for name in ("dx and norm alone", "dW alone")]
        rows.append([tokens, columns, *alone, f"{ours:.2f}", f"{theirs:.2f} ({parts})", f"{theirs / ours:.2f}"])
    header = ["tokens", "columns", "dx and norm", "dW", "both", "BF16 path (GEMM, norm, dW)", "ratio"]
    return markdown(header, rows) + source("h200/fused", record("h200/fused"))


def fused_table() -> str:
    """A row for each fused operation and shape: its time, the copy's, and how many times as long every path beside it takes."""
    text = ""
    for name in ("h200/producers", "h200/fused"):
        rows: list[Sequence[str]] = []
        for work, at in works(name).items():
            ours = next(iter(at.values()))["ms"]
            rest = [(variant, row["ms"]) for variant, row in list(at.items())[1:] if variant != COPY]
            rows.append([work, f"{ours:.3f}", f"{at[COPY]['ms']:.3f}", "; ".join(f"{variant}: {ms / ours:.2f}" for variant, ms in rest)])
        text += markdown(["work", "ms", "copy", "times as long"], rows) + source(name, record(name)) + "\n"
    return text.rstrip("\n") + "\n"
