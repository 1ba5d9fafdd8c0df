"""``python -m benchmarks report [FILE ...]``: the tables of Markdown pages (default: of all), drawn from the committed records.

A page marks a table with a line ``<!-- table NAME -->``; everything from there to ``<!-- end -->`` is written anew. ``--check`` writes
nothing and exits with 1 if a page does not say what the records say.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.config import UserError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?P<start><!-- table (?P<name>[\w-]+) -->\n)(?P<table>.*?)(?P<end><!-- end -->)", re.DOTALL)

SHAPES = {
    "pma_4096_jagged": "PMA, up to 4,096 keys, jagged",
    "pma4096j": "PMA, up to 4,096 keys, jagged",
    "pma_4096": "PMA, 4,096 keys",
    "pma4096u": "PMA, 4,096 keys",
    "pma_8192_jagged": "PMA, up to 8,192 keys, jagged",
    "pma_8192": "PMA, 8,192 keys",
    "pma_16384_jagged": "PMA, up to 16,384 keys, jagged",
    "pma_16384": "PMA, 16,384 keys",
    "pma_16384_jagged_768": "PMA, up to 16,384 keys, jagged, 768 samples",
    "llm_8192": "4 × 8,192, 16 heads",
    "llm": "4 × 8,192, 16 heads",
    "llm_8192_causal": "4 × 8,192, 16 heads, causal",
}
DEFAULT_BACKWARD, DEFAULT_TRAINING_CALL = "lp_fa4, mxfp8 dK dV, float16 dQ", "lp_fa4, float16 dQ, training call"
"""What the module and the drop-in run where nobody says otherwise."""
PAGES = (
    "README.md",
    "modules/MEASURED.md",
    "lp_fa4/sm90/README.md",
    "lp_fa4/sm90/BACKWARD.md",
    "fused_ops/README.md",
    "fused_ops/rmsnorm_quantize/README.md",
    "fused_ops/gemm_quantize/README.md",
    "fused_ops/norm_projection/README.md",
    "fused_ops/gemm_norm_backward/README.md",
)
"""The pages with tables."""
RIVALS = {"flash_attn_4": "flash-attn-4 BF16", "cudnn_fp8": "cuDNN FP8"}


def record(name: str) -> dict[str, Any]:
    """The committed record ``benchmarks/results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def by_shape(results: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Each shape in the order of SHAPES, with its rows by variant. One that SHAPES does not name is a ValueError."""
    order = list(SHAPES)
    shapes = sorted({row["shape"] for row in results}, key=order.index)
    return [(SHAPES[shape], {row["variant"]: row for row in results if row["shape"] == shape}) for shape in shapes]


def source(name: str, found: dict[str, Any]) -> str:
    environment = found["environment"]
    machine = environment["machine"]
    where = machine.get("gpu") or f"{machine['cores']} cores of a CPU"
    return f"\n`{name}.json`, {where}, {environment['date'][:10]}, commit {environment['commit'][:7]}.\n"


def module_table() -> str:
    found, rows = record("h200/module_post"), []
    for shape in found["results"]["shapes"]:
        ms = {p: {part: shape[p]["ms"][part]["median"] for part in ("forward", "backward", "step")} for p in ("bf16", "mxfp8")}
        peak = {p: shape[p]["memory_gib"]["peak"] for p in ms}
        rows.append(
            [f"{shape['keys']:,}, {shape['kind']}", f"{shape['tokens'] / 1e6:.2f} M"]
            + [f"{ms['bf16'][part]:.1f} → {ms['mxfp8'][part]:.1f}" for part in ("forward", "backward", "step")]
            + [f"{ms['bf16']['step'] / ms['mxfp8']['step']:.2f}×"]
            + [f"{peak['bf16']:.1f} → {peak['mxfp8']:.1f} ({peak['mxfp8'] / peak['bf16']:.0%})"]
        )
    header = ["keys a sample", "events", "forward, ms", "backward, ms", "step, ms", "step", "peak memory, GiB"]
    return markdown(header, rows) + source("h200/module_post", found)


def numerics_table() -> str:
    """SQNR of the output and of the gradients that have gates, by variant; gates and published figures below their run."""
    text, header = "", ["dB against FP64", "output", "events", "seeds", "query norm", "query proj.", "key proj."]
    for name, title in (("h200/numerics_production", "mean loss"), ("h200/numerics_production_randn", "normal output gradient")):
        found = record(name)
        results, config = found["results"], found["config"]
        reached = {variant: list(row.values())[: len(header) - 1] for variant, row in results["fp64"].items()}
        lines: dict[str, list[str]] = {}
        for variant, decibels in reached.items():
            lines[{"bf16": "BF16"}.get(variant, variant)] = [f"{db:.1f}" for db in decibels]
            if variant in config["gates"]:
                lines[f"gate of {variant}"] = [f"{gate:g}" for gate in config["gates"][variant]]
        if config["data"]["loss"] == "mean":  # the run that the published figures are of, as far as it is known
            lines |= {variant: [f"{db:.1f}" for db in row.values()] for variant, row in results["published"].items()}
        rows = [[f"{title}, {variant}" if i == 0 else f"… {variant}", *cells] for i, (variant, cells) in enumerate(lines.items())]
        text += markdown(header, rows) + source(name, found) + "\n"
    return text.rstrip("\n") + "\n"


def decibels_table() -> str:
    """SQNR of the default and of ``post`` under a mean loss, beside the published figures."""
    found = record("cpu/numerics_mean_loss")
    results = found["results"]
    names = {
        "forward_output": "forward output",
        "event_embs": "event gradient",
        "seed_embs": "seed gradient",
        "query_norm.weight": "query norm gradient",
        "query_proj.weight": "query projection gradient",
        "key_proj.weight": "key projection gradient",
    }
    columns = [results["published"]["published, FP32 dQ"], results["fp64"]["post"], results["fp64"]["default"]]
    rows = [[title, *(f"{column[name]:.2f}" for column in columns)] for name, title in names.items()]
    return markdown(["row", "published", "here, `post` choices", "here, default"], rows) + source("cpu/numerics_mean_loss", found)


def accuracy_table() -> str:
    """Held-out metrics of a recommendation model trained in either precision from the same seeds."""
    found = record("cpu/train_ml100k")
    (pair,), runs = found["results"]["comparisons"], found["results"]["runs"]
    rows = []
    for precision in ("bf16", "mxfp8"):
        metrics = [[run[metric] for run in runs if run["precision"] == precision] for metric in ("ne", "auc")]
        rows.append([precision.upper(), *(f"{statistics.fmean(x):.4f} ± {statistics.stdev(x):.4f}" for x in metrics)])
    apart = [
        ("difference of pairs", "difference", "auc_difference"),
        ("BF16's parameters served in MXFP8, difference", "served", "served_auc"),
    ]
    for title, *kinds in apart:
        rows.append([title, *(f"{pair[kind]['mean']:+.4f} ± {pair[kind]['deviation']:.4f}".replace("-", "−") for kind in kinds)])
    seeds = sum(run["precision"] == "bf16" for run in runs)
    return markdown(["precision", f"NE on the held-out tail, {seeds} seeds", "AUC"], rows) + source("cpu/train_ml100k", found)


def training_table() -> str:
    """Normalized entropy of models trained in either precision from the same seeds."""
    text, rows = "", []
    for name, title in (("h200/train_long", "histories of 16 to 16,384 events"), ("h200/train_ml100k_d64", "MovieLens-100K, heads of 64")):
        found = record(name)
        (pair,) = found["results"]["comparisons"]
        entropies = {p: [run["ne"] for run in found["results"]["runs"] if run["precision"] == p] for p in ("bf16", "mxfp8")}
        apart = {kind: f"{pair[kind]['mean']:+.4f} ± {pair[kind]['deviation']:.4f}" for kind in ("difference", "served")}
        means = [f"{statistics.fmean(x):.4f}" for x in entropies.values()]
        rows.append([f"{title}, {len(entropies['bf16'])} seeds", *means, apart["difference"], f"{pair['spread']:.4f}", apart["served"]])
        text += source(name, found)
    header = ["normalized entropy", "BF16", "MXFP8", "difference of pairs", "spread of BF16's seeds", "BF16 served in MXFP8, difference"]
    return markdown(header, rows) + text


def backward_table() -> str:
    """The backward alone, all its launches counted, then forward and backward with quantization, BF16 in and out."""
    found, rows = record("h200/backward"), []
    for shape, at in by_shape(found["results"]):
        for variant, row in at.items():
            if variant.startswith(tuple(RIVALS)):
                continue
            training = variant.endswith("training call")
            choice = variant.removesuffix("training call").removeprefix("lp_fa4").rstrip(", ")
            rival = at.get("flash_attn_4 training call" if training else "flash_attn_4")
            other = None if training else at.get("cudnn_fp8")
            rows.append(
                [
                    shape,
                    f"forward and backward, BF16 in and out{choice}" if training else variant.removeprefix("lp_fa4, "),
                    f"{row['ms']['median']:.2f}",
                    f"{row['tflops']:.0f}",
                    "–" if rival is None else f"{rival['tflops']:.0f}",
                    "–" if rival is None else f"{rival['ms']['median'] / row['ms']['median']:.2f}×",
                    "–" if other is None else f"{other['tflops']:.0f}",
                    f"{row['peak_gib']:.1f}" + ("" if rival is None else f" / {rival['peak_gib']:.1f}"),
                ]
            )
    header = ["shape", "variant", "ms", "TFLOP/s", "flash-attn-4 BF16", "ratio", "cuDNN FP8", "peak GiB, this / flash-attn-4"]
    return markdown(header, rows) + source("h200/backward", found)


def _span(ratios: Sequence[float], form: str) -> str:
    """The smallest and the largest, once if they read the same; a dash for none."""
    ends = list(dict.fromkeys(format(x, form) for x in (min(ratios), max(ratios)))) if ratios else ["–"]
    return " to ".join(ends) + ("×" if ratios and not form.endswith("%") else "")


def summary_table() -> str:
    """How many times as fast as each rival, smallest and largest over the shapes of a kind; every figure is in another table."""
    kinds = {
        "PMA, jagged": lambda shape: shape.startswith("pma") and "jagged" in shape,
        "PMA, equal lengths": lambda shape: shape.startswith("pma") and "jagged" not in shape,
        "dense self-attention": lambda shape: shape == "llm_8192",
        "causal": lambda shape: shape == "llm_8192_causal",
        "8 queries": lambda shape: shape == "few_queries",
    }
    module = record("h200/module_post")["results"]["shapes"]
    rows = []
    for title, form, ratio in (
        ("the module's training step", ".2f", lambda x: x["bf16"]["ms"]["step"]["median"] / x["mxfp8"]["ms"]["step"]["median"]),
        ("its peak memory", ".0%", lambda x: x["mxfp8"]["memory_gib"]["peak"] / x["bf16"]["memory_gib"]["peak"]),
    ):
        spans = [_span([ratio(x) for x in module if x["kind"] == kind], form) for kind in ("jagged", "uniform")]
        rows.append([title, *spans, *["–"] * (len(kinds) - len(spans))])
    ours = {
        "forward": ("lp_fa4 static", "lp_fa4 static, V as it is", "lp_fa4 (128, D)"),
        "backward": (DEFAULT_BACKWARD,),
        "drop-in, forward": ("lp_fa4 drop-in, BF16 in",),
        "drop-in, forward and backward": (DEFAULT_TRAINING_CALL,),
    }
    for rival, words in (("flash_attn_4", ""), ("cudnn_fp8", ", against cuDNN's FP8")):
        for title, variants in ours.items():
            found = record("h200/forward" if title.endswith("forward") else "h200/backward")["results"]
            other = f"{rival} training call" if title.endswith("and backward") else rival
            at = {(row["shape"], row["variant"]): row["tflops"] for row in found}
            spans = [
                _span([t / at[s, other] for (s, v), t in at.items() if v in variants and (s, other) in at and chosen(s)], ".2f")
                for chosen in kinds.values()
            ]
            if set(spans) != {"–"}:
                rows.append([title + words, *spans])
    return markdown(["", *kinds], rows)


def tables() -> dict[str, Callable[[], str]]:
    """Every table by its name."""
    from benchmarks import report_kernels as kernels

    return {
        "summary": summary_table,
        "module": module_table,
        "forward": kernels.forward_table,
        "backward": backward_table,
        "numerics": numerics_table,
        "training": training_table,
        "accuracy": accuracy_table,
        "decibels": decibels_table,
        "fused": kernels.fused_table,
        "norm": kernels.norm_table,
        "products": kernels.products_table,
        "norm-projection": kernels.norm_projection_table,
        "norm-backward": kernels.norm_backward_table,
    }


def render(text: str) -> str:
    """``text`` with every marked table drawn from the records. Raises UserError naming a table that does not exist."""
    known = tables()

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in known:
            raise UserError(f"table {name!r}: allowed are {', '.join(known)}")
        return f"{match['start']}{known[name]()}{match['end']}"

    return BLOCK.sub(table, text)


def main(argv: Sequence[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    check = "--check" in argv
    stale = 0
    for name in [a for a in argv if a != "--check"] or [str(ROOT / page) for page in PAGES]:
        page = Path(name)
        if not page.is_file():
            raise UserError(f"{name}: cannot read the page: no such file")
        text = page.read_text()
        fresh = render(text)
        if fresh == text:
            continue
        stale += 1
        print(f"{name}: {'differs from the records' if check else 'written'}")
        if not check:
            page.write_text(fresh)
    return int(check and stale > 0)
