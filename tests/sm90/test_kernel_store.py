"""Compiled kernels on disk: written once, loaded by whoever asks for the same, compiled again where the file is broken. No GPU: nothing is
run (``tests/gpu/test_kernel_store.py`` runs them)."""

import functools

import pytest

pytest.importorskip("cutlass", reason="the kernel stack is an optional dependency")

from fused_ops.head_quantize.kernel import _compile_head_quantize
from lp_fa4 import kernel_store
from lp_fa4.compile import kernel_cache

COMPILE = _compile_head_quantize.__wrapped__


@functools.wraps(COMPILE)
def refuse(*key):
    raise AssertionError("compiled")


def test_a_kernel_is_compiled_once_and_loaded_after(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_store.VARIABLE, str(tmp_path / "kernels"))
    kernel_cache(COMPILE)("sm_90a", 128)
    (file,) = (tmp_path / "kernels").glob("*.o")
    loaded = kernel_cache(refuse)("sm_90a", 128)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        loaded()
    with pytest.raises(AssertionError, match="compiled"):
        kernel_cache(refuse)("sm_90a", 64)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(AssertionError, match="compiled"):
        kernel_cache(refuse)("sm_90a", 128)
    monkeypatch.delenv(kernel_store.VARIABLE)
    with pytest.raises(AssertionError, match="compiled"):
        kernel_cache(refuse)("sm_90a", 128)


def test_names_of_files(tmp_path, monkeypatch):
    """Every argument is in a name, and so are sources; an argument that says nothing of itself has no file."""
    file = functools.partial(kernel_store._file, str(tmp_path), COMPILE)
    names = {file(("sm_90a", 128)), file(("sm_100a", 128)), file(("sm_90a", 64)), file(("sm_90a", "128"))}
    assert len(names) == 4 and file(("sm_90a", 128)) in names
    assert file(("sm_90a", object())) is None
    monkeypatch.setattr(kernel_store, "_fingerprint", lambda packages: repr(packages).encode())
    assert file(("sm_90a", 128)) not in names
