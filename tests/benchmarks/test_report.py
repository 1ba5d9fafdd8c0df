"""The tables of the pages are those of the records."""

from pathlib import Path

import pytest

from benchmarks import __main__ as cli
from benchmarks import report

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": ["accuracy", "decibels", "summary", "module"],
    "modules/MEASURED.md": ["module", "numerics", "training"],
    "lp_fa4/sm90/README.md": ["forward"],
    "lp_fa4/sm90/BACKWARD.md": ["backward"],
    "fused_ops/README.md": ["fused"],
    "fused_ops/rmsnorm_quantize/README.md": ["norm"],
    "fused_ops/gemm_quantize/README.md": ["products"],
    "fused_ops/norm_projection/README.md": ["norm-projection"],
    "fused_ops/gemm_norm_backward/README.md": ["norm-backward"],
}


def test_all_pages_with_tables_are_drawn():
    pages = [*ROOT.glob("*.md"), *(page for room in ("lp_fa4", "fused_ops", "modules", "tests") for page in (ROOT / room).rglob("*.md"))]
    marked = {str(page.relative_to(ROOT)) for page in pages if report.BLOCK.search(page.read_text())}
    assert marked == set(report.PAGES) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_the_records_say(page):
    text = (ROOT / page).read_text()
    assert [block["name"] for block in report.BLOCK.finditer(text)] == PAGES[page]
    assert report.render(text) == text


def test_a_page_that_differs_is_named_and_then_written(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table module -->\n| a figure by hand |\n<!-- end -->\nafter\n")
    assert cli.main(["report", "--check", str(page)]) == 1 and "page.md: differs" in capsys.readouterr().out
    assert "by hand" in page.read_text()
    assert cli.main(["report", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "by hand" not in text and "16,384, jagged" in text
    assert cli.main(["report", "--check", str(page)]) == 0


def test_tables_and_pages_that_do_not_exist_are_refused(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table speed -->\n<!-- end -->\n")
    assert cli.main(["report", str(page)]) == 2 and "table 'speed': allowed are summary, module, forward" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "none.md")]) == 2 and "none.md" in capsys.readouterr().err
