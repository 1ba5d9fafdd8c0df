"""Lanes that did not meet: the emulator runs a warp in lock step and its race checker takes a warp as one, so neither sees a lane that
arrives on an mbarrier for others whose accesses nothing orders before its arrival. This looks for those, beside the checker.

``watching()`` counts, for each ``mbarrier.arrive`` of some lanes of a warp, the places where other lanes of it read or wrote shared memory
since they last met (``bar.warp.sync``, ``bar``). Most are of no consequence: the barrier hands over something else. ``HARMLESS`` says what,
function by function; anything else is a finding.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

FORWARD_READS = (
    *(f"forward_consumer.py {function}" for function in ("first_tile", "mask_tile", "tiles_of_item")),
    *(f"forward_epilogue.py {function}" for function in ("row_numbers", "value_factor")),
)
HARMLESS = {
    ("backward_main BackwardMain", "backward_compute.py probabilities", "backward_compute.py step"): "Q^T, which products read",
    **{
        ("backward_main BackwardMain", f"backward_halves.py {access}", "backward_halves.py step"): "Q^T, which products read"
        for access in ("means", "probabilities", "score_scale", "step")
    },
    **{
        ("kernel NormProjection", f"roles.py {access}", "roles.py free_piece"): "pieces of the weight, which products read"
        for access in ("multiply", "quantize")
    },
    **{
        ("forward_kernel Forward", access, f"forward_consumer.py {arrival}"): "V, which products read"
        for access in FORWARD_READS
        for arrival in ("consume", "next_tile")
    },
}
"""(kernel, access, arrival): what the arrival hands over. A product's reads end at every lane's ``wgmma.wait_group``."""


@contextlib.contextmanager
def watching() -> Iterator[Counter[tuple[str, str, str]]]:
    """Counts of (kernel's entry name, ``file.py:line`` of an access, of an arrival)."""
    import numpy as np

    from tests.emulator import api, memory, registry

    registry.load_engines()
    found: Counter[tuple[str, str, str]] = Counter()
    (owner,) = (c for c in vars(memory).values() if isinstance(c, type) and "load_shared" in vars(c))

    def noted(old: Any) -> Any:
        def access(self: Any, g: Any, instr: Any, m: Any, *more: Any) -> Any:
            unmet = g.state.setdefault("unmet", {})
            for lane in range(32) if m is None else np.flatnonzero(m):
                unmet.setdefault(int(lane), set()).add(instr.loc)
            return old(self, g, instr, m, *more)

        return access

    def arriving(run: Any) -> Any:
        def arrive(g: Any, instr: Any, m: Any) -> Any:
            if not m.all():
                places = set().union(*(p for lane, p in g.state.get("unmet", {}).items() if not m[lane]))
                found.update((g.machine.launch.name, place, instr.loc) for place in places)
            return run(g, instr, m)

        return arrive

    def meeting(run: Any) -> Any:
        def meet(g: Any, instr: Any, m: Any) -> Any:
            g.state.pop("unmet", None)
            return run(g, instr, m)

        return meet

    new = {name: arriving(o.run) for name, o in registry.OPS.items() if name == "mbarrier.arrive"}
    new |= {name: meeting(o.run) for name, o in registry.OPS.items() if name.split(".")[0] in ("bar", "barrier")}
    with contextlib.ExitStack() as stack:
        for name in ("load_shared", "store_shared"):
            stack.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name))))
        operations = {name: dataclasses.replace(registry.OPS[name], run=run) for name, run in new.items()}
        stack.enter_context(mock.patch.dict(registry.OPS, operations))
        api.compiled.cache_clear()  # programs hold the operations they were made of
        stack.callback(api.compiled.cache_clear)
        yield found


def unexplained(found: Counter[tuple[str, str, str]]) -> list[str]:
    """What is not in ``HARMLESS``, a line each. Needs lines of callers (``cases.listing``)."""
    from tests.sanitizer.pairs import function_of
    from tests.sanitizer.report import kernel_of

    lines = set()
    for name, access, arrival in found:
        kernel = kernel_of(name)
        key = kernel, function_of(access, kernel), function_of(arrival, kernel)
        if key not in HARMLESS:
            lines.add(f"{kernel}: {access} ({key[1]}), then {arrival} ({key[2]})")
    return sorted(lines)


def of_probes(arch: str, names: list[str]) -> dict[str, int]:
    """How many places each probe (``probes``) has, for ``tests.emulator.worker``."""
    from tests.sanitizer.probes import emulated

    counts = {}
    for name in names:
        with watching() as found:
            emulated(arch, [name], 1)
        counts[name] = len(found)
    return counts
