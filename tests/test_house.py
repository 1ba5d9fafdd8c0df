"""The house itself: imports point down, nothing heavy is imported early, and what the README shows exists and runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {
    "lp_fa4": {"lp_fa4"},
    "fused_ops": {"fused_ops", "lp_fa4"},
    "modules": {"modules", "fused_ops", "lp_fa4"},
    "benchmarks": {"benchmarks", "modules", "fused_ops", "lp_fa4"},
}
OPTIONAL = ("cutlass", "quack", "flash_attn", "torchrec", "fbgemm_gpu", "triton", "tensordict", "numpy", "yaml", "matplotlib")
DOCUMENTS = sorted(p for p in ROOT.rglob("*.md") if ".venv" not in p.parts and "site-packages" not in p.parts)


def sources(*rooms):
    return [p for room in rooms for p in sorted((ROOT / room).rglob("*.py"))]


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


@pytest.mark.parametrize("path", sources(*LAYERS), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = path.relative_to(ROOT).parts[0]
    for name in imported(ast.parse(path.read_text())):
        top = name.split(".")[0]
        assert top not in LAYERS or top in LAYERS[room], f"{path.relative_to(ROOT)} imports {name}"
        assert top != "tests", f"{path.relative_to(ROOT)} imports {name}"
        assert top != "torchrec" or path.name == "torchrec.py" or room == "benchmarks", f"{path.relative_to(ROOT)} imports {name}"


def test_no_function_is_written_twice():
    """But for names, docstrings and constructors, of more than two lines."""

    def plain(function):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        tree = ast.parse("\n".join(map(ast.unparse, body)))
        text = ast.unparse(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = "x"
            elif isinstance(node, ast.arg):
                node.arg, node.annotation = "x", None
        return ast.dump(tree) if len(text) > 100 else None

    seen = {}
    for path in sources(*LAYERS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__" and (key := plain(node)):
                seen.setdefault(key, []).append((node.name, f"{path.relative_to(ROOT)}:{node.lineno}"))
    twice = [places for places in seen.values() if len(places) > 1]
    assert not twice, twice


def test_packages_import_with_none_of_the_optional_stack():
    """No driver, no kernel stack, no TorchRec: the library imports, and its CPU path runs forward and backward."""
    code = f"""
import sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import torch, lp_fa4, fused_ops, modules
pma = modules.PMA(dim=64, num_heads=2, num_seeds=4, precision="mxfp8")
out = pma(torch.randn(70, 64), torch.tensor([0, 33, 33, 70]))
out.square().sum().backward()
assert out.isfinite().all() and all(p.grad is not None and p.grad.isfinite().all() for p in pma.parameters())
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document):
    text = document.read_text()
    named = set(re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text))
    named |= {w for w in re.findall(r"`([\w./-]+)`", text) if re.match(r"(lp_fa4|fused_ops|modules|benchmarks|configs|tests)/", w)}
    for path in sorted(named):
        if "://" not in path:
            assert (document.parent / path).exists() or (ROOT / path).exists(), f"{document.relative_to(ROOT)} names {path}"


@pytest.mark.parametrize("page, least", [("README.md", 2), ("modules/README.md", 1)])
def test_examples_run(page, least):
    """Each Python block of a page runs as written, in its own process."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
    assert len(blocks) >= least
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, cwd=ROOT)
