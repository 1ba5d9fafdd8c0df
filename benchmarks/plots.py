"""One house style for every figure: light grid, no box, direct labels, a colour that means the same thing everywhere.

Colours are by precision or variant name, from a palette that colour-blind readers can tell apart (Okabe and Ito). Figures are drawn with
the Agg canvas: no display is needed and the user's matplotlib settings are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#22272e", "#8b949e"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NAMED = {"bf16": "#0072b2", "mxfp8": "#d55e00", "fp64": "#22272e", "post": "#8b949e"}

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "svg.hashsalt": "lp-fa4",
}


def color(name: str, index: int = 0) -> str:
    """The colour of a variant: fixed for the names of `NAMED` (case does not matter), else by `index` from the palette."""
    return NAMED.get(name.lower(), PALETTE[index % len(PALETTE)])


@contextmanager
def figure(path: str | Path, rows: int = 1, columns: int = 1, *, size: tuple[float, float] | None = None) -> Iterator[tuple[Figure, Any]]:
    """A figure in the house style, written to `path` when the block ends without an error.

    Args:
        path: output file; its suffix picks the format (.png, .svg, .pdf). Missing folders are made.
        rows, columns: grid of axes.
        size: inches; by default 6.2 x 4 for each of the axes.

    Yields:
        (figure, axes): one Axes, or an array of them as matplotlib's `subplots(squeeze=True)` gives.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    with matplotlib.rc_context(_STYLE):
        drawing = Figure(figsize=size or (6.2 * columns, 4.0 * rows), layout="constrained")
        FigureCanvasAgg(drawing)
        yield drawing, drawing.subplots(rows, columns)
        target.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(target, metadata={"Software": None} if target.suffix == ".png" else None)


def footnote(drawing: Figure, text: str) -> None:
    """A small line under a figure: the data, the machine, the commit it was drawn from."""
    drawing.supxlabel(text, fontsize=7.5, color=FAINT, x=0.01, ha="left")
