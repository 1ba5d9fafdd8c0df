"""Compiled kernels on disk, for processes that start often: a step's kernels take a minute to compile and a moment to load.

Off unless the environment names a folder: ``LP_FA4_CACHE_DIR=~/.cache/lp_fa4 torchrun ...``. A kernel's file is named by a hash of all
that it is made from: the compile function and its arguments, the sources of this package and of the function's own, and the versions of
Python, cutlass, tvm_ffi and quack. So no file is ever stale, and none is ever written twice; remove the folder to be rid of all. What no
hash sees is a module's constant changed while the process runs: whoever tunes kernels so must leave this off. The files are code that
is run: the folder must be one that only its user writes.

Processes may share it: one compiles a kernel, the others wait for it; a file appears whole or not at all. One that cannot be loaded is
compiled again.
"""

import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

VARIABLE = "LP_FA4_CACHE_DIR"
_SYMBOL = "kernel"
_log = logging.getLogger("lp_fa4")


def source_digest(*packages: str) -> str:
    """SHA-256 of the Python sources of packages, in hexadecimal; some 10 ms."""
    digest = hashlib.sha256()
    for package in packages:
        for root in import_module(package).__path__:
            for source in sorted(Path(root).rglob("*.py")):
                text = source.read_bytes()
                digest.update(f"{package}/{source.relative_to(root).as_posix()}:{len(text)}:".encode() + text)
    return digest.hexdigest()


@functools.cache
def _fingerprint(packages: tuple[str, ...]) -> bytes:
    """Of the packages' sources and of the versions that turn them into code."""
    import cutlass
    import quack
    import tvm_ffi

    versions = (sys.version_info[:2], cutlass.__version__, tvm_ffi.__version__, quack.__version__)
    return repr((versions, source_digest(*packages))).encode()


def _file(folder: str, function: Callable[..., Any], key: tuple) -> Path | None:
    """Where the kernel of ``function(*key)`` lies, or None if its arguments do not say all that they are in words."""
    words = repr(key)
    if " at 0x" in words:
        return None
    own = function.__module__.partition(".")[0]
    text = f"{function.__module__}.{function.__qualname__}{words}".encode()
    name = hashlib.sha256(_fingerprint(tuple(sorted({"lp_fa4", own}))) + text).hexdigest()
    return Path(folder).expanduser() / f"{name}.o"


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keeps other processes from compiling the same kernel meanwhile; a file system without locks lets them."""
    with open(file.with_suffix(".lock"), "w") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)  # released when it is closed, or its process dies
        except (ImportError, OSError):
            pass
        yield


def _load(file: Path) -> Any:
    """The function in ``file``, or None."""
    import cutlass.cute as cute

    if not file.exists():
        return None
    try:
        return cute.runtime.load_module(str(file), enable_tvm_ffi=True)[_SYMBOL]
    except Exception as error:  # whatever a loader says of a broken file
        _log.warning("lp_fa4: %s cannot be loaded and is compiled again: %s", file, error)
        return None


def compile_or_load(function: Callable[..., Any], key: tuple) -> Any:
    """``function(*key)``, a compiled kernel, or the same from the folder that the environment names."""
    folder = os.environ.get(VARIABLE)
    file = _file(folder, function, key) if folder else None
    if file is None:
        return function(*key)
    if (loaded := _load(file)) is not None:
        return loaded
    file.parent.mkdir(parents=True, exist_ok=True)
    with _alone(file):
        if (loaded := _load(file)) is not None:
            return loaded
        made = function(*key)
        part = file.with_suffix(f".{os.getpid()}.o")
        made.export_to_c(object_file_path=str(part), function_name=_SYMBOL)
        os.replace(part, file)
        return made
