"""Faster tracing of kernels: the DSL works out the source line of every operation it builds; here each place is worked out once.

It walks a code object's position table from its start for each operation, and asks of every frame below the kernel whether it is its
own; a fifth of the time that a kernel takes to compile. What it finds is the same.
"""

from __future__ import annotations

from typing import Any


def remember() -> None:
    """Cache what ``cutlass._mlir_helpers.op`` finds out about frames. Left alone if it is not built as expected."""
    from cutlass._mlir_helpers import op

    names = ("_fast_frameinfo", "_is_framework_stack_frame")
    if not all(callable(getattr(op, name, None)) for name in names):
        return
    place, ours = (getattr(op, name) for name in names)
    # by identity (to hash a code object is to hash all of it); the code is kept, so that its place is not given to another
    places: dict[tuple[int, int], tuple[Any, Any]] = {}
    owners: dict[tuple[int, Any], tuple[Any, bool]] = {}

    def frameinfo(frame: Any) -> Any:
        key = id(frame.f_code), frame.f_lasti
        if key not in places:
            places[key] = frame.f_code, place(frame)
        return places[key][1]

    def framework(frame: Any) -> bool:
        key = id(frame.f_code), frame.f_globals.get("__name__")
        if key not in owners:
            owners[key] = frame.f_code, ours(frame)
        return owners[key][1]

    frameinfo.__wrapped__, framework.__wrapped__ = place, ours  # type: ignore[attr-defined]
    op._fast_frameinfo, op._is_framework_stack_frame = frameinfo, framework
