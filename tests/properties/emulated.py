"""The properties on kernels that the emulator executes, under a schedule of their own each and with the race checker.

    python -m tests.properties.emulated sm_90a [--examples 4] [--only mx_attention] [--properties isolation,permutation]
    python -m tests.properties.emulated sm_90a --named

Prints one line of JSON a test (``{"test", "inputs", "seconds"}``, with ``"error"`` if it failed) and exits with the number of failures.
A process of its own: the DSL fixes its target at the first import, so nothing may have imported it before.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.emulator import capture, waivers

if TYPE_CHECKING:
    from tests.properties import subjects

ARCHS = ("sm_90a", "sm_100a")
_turns = itertools.count()


@contextlib.contextmanager
def emulating(arch: str) -> Iterator[None]:
    """Calls on CPU tensors go to the kernels of ``arch``; every call is run under another schedule."""
    from tests.emulator.api import Schedule
    from tests.emulator.ours import served

    turn = next(_turns)
    schedule = Schedule(("eager", "pct", "lazy", "random")[turn % 4], turn)
    with served(schedule, arch, multiprocessors=2, check=True, waivers=waivers.OURS):
        yield


def place_of(arch: str, narrow: bool) -> "subjects.Place":
    """The emulated device: one head of 64, BF16."""
    import torch

    from tests.emulator.ours import BACKENDS
    from tests.properties import subjects

    return subjects.Place(
        f"emulated {arch}", BACKENDS[arch], heads=1, dim=64, dtypes=(torch.bfloat16,), around=lambda: emulating(arch), narrow=narrow
    )


def tests_of(
    arch: str, only: str, exactly: bool, properties: str, named: bool, narrow: bool
) -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Operation (or case), property and test of everything that is asked for."""
    from tests.properties import subjects, test_batches, test_layouts_kernels
    from tests.properties.named import CASES

    def wanted(name: str, words: str) -> bool:
        return not words or any(word.strip() in name for word in words.split(","))

    place = place_of(arch, narrow)
    made = subjects.subjects_at(place)
    subjects.SUBJECTS.update(made)
    if named:
        for name, case in CASES.items():
            if wanted(name, only):
                yield name, "named", functools.partial(case, place)
        return
    if wanted("layouts", only):
        for about, test in vars(test_layouts_kernels).items():
            if (
                about.startswith("test_")
                and wanted(about, properties)
                and (arch == "sm_90a" or about not in test_layouts_kernels.HOPPERS_OWN)
            ):
                for more in [{"axis": 0}, {"axis": 1}] if "swizzle" in about else [{}]:
                    yield "layouts", about, functools.partial(test, place=place, **more)
    tests = {n: t for n, t in vars(test_batches).items() if n.startswith("test_")}
    for (name, subject), (about, test) in itertools.product(made.items(), tests.items()):
        operation = subject.name == only if exactly else wanted(subject.name, only)
        if operation and wanted(about, properties):
            yield name, about, functools.partial(test, name=name)


def run(
    arch: str,
    *,
    examples: int = 4,
    random: bool = False,
    only: str = "",
    exactly: bool = False,
    properties: str = "",
    named: bool = False,
    narrow: bool = False,
    seconds: float = float("inf"),
    rounds: int = 1,
) -> Iterator[dict[str, Any]]:
    """A report of each test (``main`` has the arguments). The first call in a process fixes ``examples`` and ``random``."""
    os.environ.setdefault("LP_FA4_EXAMPLES", str(examples))
    os.environ.setdefault("LP_FA4_RANDOM", str(int(random)))
    from tests.properties import tally

    started = time.monotonic()
    late = lambda: time.monotonic() - started > seconds  # noqa: E731
    for name, about, test in tests_of(arch, only, exactly, properties, named, narrow):
        if late():
            return
        before, since = tally.inputs(), time.process_time()
        report: dict[str, Any] = {"test": f"{about}[{name}]"}
        try:
            for turn in range(rounds):
                if turn == 0 or not late():
                    test()
        except Exception as error:
            report["error"] = "".join(traceback.format_exception(error))[-4000:]
        report.update(inputs=tally.inputs() - before, seconds=round(time.process_time() - since, 1))
        tally.save()
        yield report


def reports(arch: str, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """``run`` for ``tests.emulator.worker``."""
    return {"reports": list(run(arch, **options))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", choices=ARCHS)
    parser.add_argument("--examples", type=int, default=4, help="inputs a property and operation; the first is always the simplest one")
    parser.add_argument("--random", action="store_true", help="other inputs every time")
    parser.add_argument("--only", default="", help="operations whose name contains this, or several, separated by commas")
    parser.add_argument("--exactly", action="store_true", help="the operation has the name that --only gives, no other")
    parser.add_argument("--properties", default="", help="tests whose name contains this, or several, separated by commas")
    parser.add_argument("--named", action="store_true", help="the named cases instead")
    parser.add_argument("--narrow", action="store_true", help="one kernel of each kind: not causal, deterministic")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other test or round after so long")
    parser.add_argument("--rounds", type=int, default=1, help="how often each test is run, with other inputs if they are random")
    chosen = parser.parse_args()
    capture.install(chosen.arch)
    failures = 0
    for report in run(**vars(chosen)):
        failures += "error" in report
        print(json.dumps(report), flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
