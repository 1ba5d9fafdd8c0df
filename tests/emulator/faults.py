"""Planted faults: does the emulator see what it claims to see?

One at a time, in kernels that hardware has proven: every mbarrier wait, every ``tcgen05.wait`` and every proxy fence is
deleted, and every TMEM region is moved onto its neighbour. A fault counts as caught if any schedule gives a race report,
an error (deadlock, bounds, barrier misuse), or a wrong result. The unplanted kernel is run first under the same schedules and must
be clean.

``python -m tests.emulator.faults CASE ...`` prints one table per kernel; ``--list`` names the cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import api, capture
from .errors import EmulatorError
from .kernels import Case
from .simt import ENGINE, Compiled

KINDS = ("mbarrier wait", "tcgen05.wait", "wgmma wait", "proxy fence", "TMEM region")


@dataclass
class Site:
    """A place to plant a fault: an instruction of a kernel, or a TMEM region (role, first column, width).

    ``slept``: it put a warp to sleep in some unplanted run. ``acts``: it brought its warp knowledge (for a fence: generic
    writes not yet carried over) and the warp then touched memory, issued or released something. A wait that is followed
    only by the warp's exit (a producer's tail) orders nothing.
    """

    kernel: str
    kind: str
    where: str
    unit: int = -1
    region: tuple[str, int, int] | None = None
    executed: bool = False
    acts: bool = False
    slept: bool = False
    caught: str = ""


@dataclass
class Regions:
    """TMEM regions of a kernel, seen in an unplanted run."""

    spans: dict[tuple[str, int], int] = field(default_factory=dict)

    def owner(self, role: str, column: int) -> tuple[str, int] | None:
        """The region an access belongs to. Loads read accumulators; stores feed operands first, accumulators else."""
        order = {"ld": ("d", "sf", "a"), "st": ("a", "sf", "d")}.get(role, (role,))
        for r in order:
            inside = [k for k, n in self.spans.items() if k[0] == r and k[1] <= column < k[1] + n]
            if inside:
                return max(inside, key=lambda k: k[1])
        return None


def _kind(opcode: str) -> str | None:
    if opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return "mbarrier wait"
    if opcode.startswith("tcgen05.wait"):
        return "tcgen05.wait"
    if opcode.startswith("wgmma.wait_group"):
        return "wgmma wait"
    if opcode.startswith("fence.proxy"):
        return "proxy fence"
    return None


@contextmanager
def deleted(program: Compiled, unit: int) -> Iterator[None]:
    """The instruction of ``unit`` does nothing; a deleted wait says that it succeeded."""
    u = program.units[unit]
    original = u.run

    def nothing(g: Any, I: Any, m: Any) -> None:
        if I.parts[0] == "mbarrier":
            g.P[I.args[0].idx][m] = True

    u.run = nothing
    try:
        yield
    finally:
        u.run = original


class Campaign:
    """All faults of one case."""

    def __init__(self, case: Case, waivers: Any, schedules: list[api.Schedule], log: Any = None) -> None:
        self.case, self.waivers, self.schedules = case, waivers, schedules
        self.log = log or (lambda text: None)
        self.limit = 20_000_000
        self.programs: dict[str, Compiled] = {}
        self.regions: dict[str, Regions] = {}
        self.sites: list[Site] = []

    def _run(self, s: api.Schedule, hooks: dict[str, Any] | None = None) -> tuple[str, api.Result | None]:
        """One run of the case: what was seen ("" if nothing), and the result."""
        result = api.Result(s)
        runtime = capture.runtime()

        def handler(launch: capture.Launch) -> None:
            machine = api.run(
                launch, capture.device_memory.extents, s, check=True, waivers=self.waivers, collect=True,
                step_limit=self.limit, column_hook=(hooks or {}).get(launch.name),
            )  # fmt: skip
            result.launches.append(launch)
            result.machines.append(machine)

        from . import hostpatch

        runtime.handler = handler
        capture.device_memory.clear()
        try:
            with hostpatch.device(self.case.arch):
                value = self.case.call()
        except EmulatorError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", None
        except Exception as error:  # a wild value can break NumPy itself: seen, all the same
            return f"{type(error).__name__}: {str(error)[:100]}", None
        finally:
            runtime.handler = None
        if result.reports:
            return f"report: {result.reports[0].kind}", result
        try:
            self.case.verify(value)
        except AssertionError as error:
            return f"wrong result: {str(error)[:80]}", result
        return "", result

    def baseline(self) -> None:
        """Run unplanted under every schedule; must be clean. Finds sites and whether they ever act."""
        if self.case.prepare:
            api.record(self.case.prepare, self.case.arch)
        acting: dict[str, set[int]] = {}
        slept: dict[str, set[int]] = {}
        hits: dict[str, list[int]] = {}
        steps = 0
        seen: dict[str, Any] = {}

        def recorder(name: str) -> Any:
            regions = self.regions.setdefault(name, Regions())

            def hook(role: str, column: int) -> int:
                if role in ("d", "a", "sf"):
                    regions.spans.setdefault((role, column), 0)
                return column

            return hook

        _, launches = api.record(self.case.call, self.case.arch)
        hooks = {launch.name: recorder(launch.name) for launch, _ in launches}
        for s in self.schedules:
            what, result = self._run(s, hooks)
            if what or result is None:
                raise AssertionError(f"{self.case.name}: the unplanted kernel is not clean under {s}: {what}")
            for launch, machine in zip(result.launches, result.machines, strict=True):
                self.programs[launch.name] = machine.compiled
                acts = acting.setdefault(launch.name, set())
                acts |= machine.ordered
                slept.setdefault(launch.name, set()).update(i for i, (_, n) in machine.wait_counts.items() if n)
                old = hits.setdefault(launch.name, [0] * len(machine.hits))
                hits[launch.name] = [a + b for a, b in zip(old, machine.hits, strict=True)]
                seen[launch.name] = machine
                steps = max(steps, machine.steps)
        self.limit = 20 * steps + 20_000
        for name, program in self.programs.items():
            for u in program.units:
                kind = _kind(u.instrs[0].op) if u.kind == ENGINE else None
                if kind:
                    I = u.instrs[0]
                    executed = hits[name][u.index] > 0
                    self.sites.append(
                        Site(
                            name,
                            kind,
                            f"line {I.line} {I.loc}",
                            u.index,
                            executed=executed,
                            acts=executed and I.index in acting[name],
                            slept=I.index in slept[name],
                        )
                    )
            spans = self.regions[name].spans
            for role, column in spans:
                later = [c for r, c in spans if r == role and c > column]
                width = {"sf": 4, "a": 8}.get(role, 128)
                spans[role, column] = min([width, *(c - column for c in later)])
            for role, column in sorted(spans, reverse=True):  # the K steps of one operand in TMEM are one region
                before = next((k for k in spans if k[0] == role == "a" and k[1] + spans[k] == column), None)
                if before is not None:
                    spans[before] += spans.pop((role, column))
            for (role, column), width in sorted(spans.items()):
                self.sites.append(
                    Site(name, "TMEM region", f"{role} at column {column}", region=(role, column, width), executed=True, acts=True)
                )

    def _shift(self, site: Site) -> Any:
        """Move a region onto live data of another: an operand or scale factors to the start of an accumulator that does
        not hold them, an accumulator half over its neighbour."""
        regions = self.regions[site.kernel]
        role, column, width = site.region or ("", 0, 0)
        accumulators = sorted((c, n) for (r, c), n in regions.spans.items() if r == "d")
        others = [c for c, n in accumulators if not c <= column < c + n]
        if role != "d" and others:
            delta = min(others, key=lambda c: abs(c - column)) - column
        else:
            delta = max(width // 2, 1) * (-1 if column and column == max(c for _, c in regions.spans) else 1)

        def hook(r: str, c: int) -> int:
            return c + delta if regions.owner(r, c) == (role, column) else c

        return {site.kernel: hook}

    def plant(self) -> None:
        for n, site in enumerate(self.sites):
            if not site.executed:
                continue
            t = time.time()
            for s in self.schedules:
                if site.region is not None:
                    what, _ = self._run(s, self._shift(site))
                else:
                    with deleted(self.programs[site.kernel], site.unit):
                        what, _ = self._run(s)
                if what:
                    site.caught = f"{s}: {what}"
                    break
            self.log(
                f"{n + 1}/{len(self.sites)} {site.kind} {site.where} acts={site.acts} slept={site.slept} -> "
                f"{site.caught or 'MISSED'} ({time.time() - t:.1f} s)"
            )

    def table(self) -> str:
        lines = [
            f"### {self.case.name} ({self.case.arch})",
            "",
            "| kind | sites | executed | ever slept | act | caught of acting | caught of slept or acting |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind in (*KINDS, "all"):
            chosen = [x for x in self.sites if kind in (x.kind, "all")]
            if not chosen:
                continue
            run, acts = [x for x in chosen if x.executed], [x for x in chosen if x.acts]
            either = [x for x in chosen if x.acts or x.slept]
            lines.append(
                f"| {kind} | {len(chosen)} | {len(run)} | {sum(x.slept for x in run)} | {len(acts)} | "
                f"{sum(bool(x.caught) for x in acts)} of {len(acts)} | {sum(bool(x.caught) for x in either)} of {len(either)} |"
            )
        missed = [x for x in self.sites if x.executed and not x.caught]
        lines += [
            "",
            *(
                f"* missed{'' if x.acts else ' (slept, orders nothing)' if x.slept else ' (never sleeps or acts)'}: "
                f"{x.kind}, {x.where}, kernel {x.kernel[:60]}"
                for x in missed
            ),
        ]
        return "\n".join(lines)


def campaign_cases() -> dict[str, Any]:
    """Name → (case builder, waivers)."""
    from . import kernels as k
    from .waivers import EARLY_USE, FA4_BACKWARD_SM100, FA4_FORWARD_SM100, NONE

    return {
        "fa4_forward_sm100": (lambda: k.fa4_forward("sm_100a", 256, 512), FA4_FORWARD_SM100),
        "fa4_backward_sm100": (lambda: k.fa4_backward("sm_100a", 256, 256), FA4_BACKWARD_SM100),
        "fa4_backward_sm100_512": (lambda: k.fa4_backward("sm_100a", 512, 512), FA4_BACKWARD_SM100),
        "quack_mxfp8_sm100": (lambda: k.quack_mxfp8_gemm("sm_100a", 712, 192, 640), EARLY_USE),
        "quack_bf16_sm100": (lambda: k.quack_gemm("sm_100a", 256, 192, 640), EARLY_USE),
        "fa4_forward_sm90": (lambda: k.fa4_forward("sm_90a", 256, 512), NONE),
        "quack_bf16_sm90": (lambda: k.quack_gemm("sm_90a", 256, 192, 640), NONE),
    }


def summary(arch: str, case: str, schedules: int = 1) -> dict[str, Any]:
    """Plant every fault of a case that acts; how many were caught, and where the others are."""
    builder, waivers = campaign_cases()[case]
    campaign = Campaign(builder(), waivers, api.schedules(schedules))
    campaign.baseline()
    campaign.sites = [x for x in campaign.sites if x.acts]
    campaign.plant()
    missed = [f"{x.kind} {x.where}" for x in campaign.sites if not x.caught]
    return {"acting": len(campaign.sites), "caught": len(campaign.sites) - len(missed), "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?")
    parser.add_argument("--site", type=int, action="append", help="only this site (1-based, as logged)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write every site as JSON")
    args = parser.parse_args()
    cases = campaign_cases()
    if args.list or args.case not in cases:
        print("\n".join(cases))
        return
    builder, waivers = cases[args.case]
    capture.install("sm_90a" if "sm90" in args.case else "sm_100a")
    started = time.time()
    campaign = Campaign(builder(), waivers, api.schedules(args.schedules), log=lambda x: print(x, file=sys.stderr, flush=True))
    campaign.baseline()
    print(f"baseline clean under {[str(s) for s in campaign.schedules]}, {len(campaign.sites)} sites", file=sys.stderr)
    if args.site:
        campaign.sites = [campaign.sites[i - 1] for i in args.site]
    campaign.plant()
    print(campaign.table())
    print(f"\n{time.time() - started:.0f} s", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps([asdict(x) for x in campaign.sites], indent=1))


if __name__ == "__main__":
    main()
