"""Where engines register the instructions that are not straight-line.

One file per engine in ``engines/``; it is imported at start-up, and each operation registers itself::

    @op("wgmma.mma_async", aligned=True, allow="sync aligned m64n128k16 ...")
    def mma_async(g: Gang, I: Instr, m: np.ndarray) -> Wait | list | None: ...

``name`` is a dotted prefix of the opcode with ``::`` read as a dot; the longest registered prefix wins. ``m`` is the mask
of active lanes. The result says how execution goes on:

* ``None``: done, next instruction.
* a ``Wait``: nothing has happened yet; run this instruction again when ``wait.ready()``.
* a list of ``(mask, Wait | None)`` that partitions ``m``: done for all, but each part sleeps until its wait is ready.

``aligned`` operations run once all live lanes of each warp have arrived. ``allow`` names every qualifier that is
modelled; others stop at compile time. ``check(I)`` may refuse more at that time. ``writes`` says whether the first
operand is a destination (for the taint analysis of values read early).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ptx import Instr


class Wait:
    """A condition a fragment sleeps on. ``timeout`` waits (``try_wait``) may also return early with false."""

    timeout = False

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Op:
    name: str
    run: Callable[..., Any]
    aligned: bool
    allow: frozenset[str] | None
    check: Callable[[Instr], None] | None
    writes: bool


OPS: dict[str, Op] = {}


def op(
    *names: str,
    aligned: bool = False,
    allow: str | None = None,
    check: Callable[[Instr], None] | None = None,
    writes: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an operation; see the module's text."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in OPS:
                raise ValueError(f"operation {name!r} is registered twice")
            OPS[name] = Op(name, f, aligned, frozenset(allow.split()) if allow is not None else None, check, writes)
        return f

    return register


def find(I: Instr) -> Op:
    """The operation of an instruction.

    Raises:
        UnsupportedError: no engine has the opcode, or a qualifier is not modelled.
    """
    names = I.op.replace("::", ".").split(".")
    for n in range(len(names), 0, -1):
        found = OPS.get(".".join(names[:n]))
        if found is not None:
            break
    else:
        raise I.unsupported(f"opcode {I.op} is not modelled")
    if found.allow is not None:
        named = set(found.name.split("."))
        for part in I.parts:
            if part not in found.allow and part not in named and not all(x in named for x in part.split("::")):
                raise I.unsupported(f"qualifier .{part} of {found.name} is not modelled (known: {' '.join(sorted(found.allow))})")
    if found.check is not None:
        found.check(I)
    return found


def load_engines() -> None:
    """Import every module of ``engines``; each registers its operations."""
    from . import engines

    for info in pkgutil.iter_modules(engines.__path__):
        importlib.import_module(f"{engines.__name__}.{info.name}")
