"""Planted faults: does the emulator see what it claims to see?

One at a time, in kernels that hardware has proven: every mbarrier wait, every ``tcgen05.wait`` and every proxy fence is
deleted, and every TMEM region is moved onto its neighbour. A fault counts as caught if any schedule gives a race report,
an error (deadlock, bounds, barrier misuse), or a wrong result. The unplanted kernel is run first under the same schedules and must
be clean. A campaign may hold several problems for one compiled kernel (a long one reuses buffers that a short one fills once):
a site slept, acts or is caught if it is so in any of them.

``python -m tests.emulator.faults CASE ...`` prints one table per kernel; ``--list`` names the cases.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import environment

from . import api, capture
from .errors import EmulatorError
from .kernels import Case
from .simt import ENGINE, Compiled

KINDS = ("mbarrier wait", "tcgen05.wait", "wgmma wait", "wgmma fence", "proxy fence", "TMEM region")

#: kinds whose edge can be left out of the clocks alone
MUTABLE = ("mbarrier wait", "tcgen05.wait", "wgmma wait", "proxy fence")


@dataclass
class Site:
    """A place to plant a fault: an instruction of a kernel, or a TMEM region (role, first column, width).

    ``slept``: it put a warp to sleep in some unplanted run. ``acts``: it ordered something in some unplanted run, which is
    decided by the run's own clocks:

    * a wait: it brought its warp knowledge that the warp had not (some agent's clock grew), and the warp then touched
      memory, issued an operation or released; or it was the first of its CTA to observe the last arrival from outside on a
      barrier, which orders that arrival before the CTA's exit (``Checker.finish``). A wait for the CTA's own warps that is
      followed only by its warp's exit (a producer's tail) orders nothing.
    * a proxy fence: it carried generic accesses to the async proxy that had not been, and an asynchronous access of shared
      memory came after it in happens-before.
    * a ``wgmma.fence``: it was its warp's first before a product, or a product's registers had been touched since the
      fence before.
    * a TMEM region: always.
    """

    kernel: str
    kind: str
    where: str
    unit: int = -1
    region: tuple[str, int, int] | None = None
    executed: bool = False
    acts: bool = False
    slept: bool = False
    #: problem and schedule that showed it, and how
    caught: str = ""
    #: for a site that slept or acted and was missed: what the runs say with this site's edge left out
    explained: str = ""

    @staticmethod
    def key(x: dict[str, Any]) -> tuple[Any, ...]:
        """What names a site in a document."""
        return x["kernel"][:70], x["kind"], x["where"], x["unit"] if x.get("unit", -1) >= 0 else tuple(x["region"])


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
    if opcode.startswith("wgmma.fence"):
        return "wgmma fence"
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
    """All faults of one case, or of several problems for the same compiled kernels."""

    def __init__(self, case: Case | list[Case], waivers: Any, schedules: list[api.Schedule], log: Any = None) -> None:
        self.cases = case if isinstance(case, list) else [case]
        self.waivers, self.schedules = waivers, schedules
        self.log = log or (lambda text: None)
        #: where ``save`` writes what is known so far
        self.out: Path | None = None
        self.environment = environment()
        self.limit = 20_000_000
        self.everything = False
        self.programs: dict[str, Compiled] = {}
        self.regions: dict[str, Regions] = {}
        self.sites: list[Site] = []
        #: sites that are not in ``sites`` because no unplanted run reaches them
        self.unexecuted = 0

    def _run(
        self, case: Case, s: api.Schedule, hooks: dict[str, Any] | None = None, muted: tuple[str, int] | None = None
    ) -> tuple[str, api.Result | None]:
        """One run of the case: what was seen ("" if nothing), and the result. ``muted``: kernel and instruction."""
        result = api.Result(s)
        runtime = capture.runtime()

        def handler(launch: capture.Launch) -> None:
            machine = api.run(
                launch, capture.device_memory.extents, s, check=True, waivers=self.waivers, collect=True,
                step_limit=self.limit, column_hook=(hooks or {}).get(launch.name),
                muted=frozenset([muted[1]] if muted and muted[0] == launch.name else []),
            )  # fmt: skip
            result.launches.append(launch)
            result.machines.append(machine)

        from . import hostpatch

        runtime.handler = handler
        capture.device_memory.clear()
        try:
            with hostpatch.device(case.arch):
                value = case.call()
        except EmulatorError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", None
        except Exception as error:  # a wild value can break NumPy itself: seen, all the same
            return f"{type(error).__name__}: {str(error)[:100]}", None
        finally:
            runtime.handler = None
        if result.reports:
            return f"report: {result.reports[0].kind}", result
        try:
            case.verify(value)
        except AssertionError as error:
            return f"wrong result: {str(error)[:80]}", result
        return "", result

    def baseline(self) -> None:
        """Run every problem unplanted under every schedule; must be clean. Finds sites and whether they ever act."""
        acting: dict[str, set[int]] = {}
        slept: dict[str, set[int]] = {}
        hits: dict[str, list[int]] = {}
        steps = 0

        def recorder(name: str) -> Any:
            regions = self.regions.setdefault(name, Regions())

            def hook(role: str, column: int) -> int:
                if role in ("d", "a", "sf"):
                    regions.spans.setdefault((role, column), 0)
                return column

            return hook

        for case in self.cases:
            if case.prepare:
                api.record(case.prepare, case.arch)
            _, launches = api.record(case.call, case.arch)
            hooks = {launch.name: recorder(launch.name) for launch, _ in launches}
            if self.programs and self.programs.keys() != hooks.keys():
                raise ValueError(f"{case.name} launches other kernels than {self.cases[0].name}")
            for s in self.schedules:
                what, result = self._run(case, s, hooks)
                if what or result is None:
                    raise AssertionError(f"{case.name}: the unplanted kernel is not clean under {s}: {what}")
                for launch, machine in zip(result.launches, result.machines, strict=True):
                    if self.programs.setdefault(launch.name, machine.compiled) is not machine.compiled:
                        raise ValueError(f"{case.name} compiles {launch.name[:70]} anew")
                    acting.setdefault(launch.name, set()).update(machine.ordered)
                    slept.setdefault(launch.name, set()).update(i for i, (_, n) in machine.wait_counts.items() if n)
                    old = hits.setdefault(launch.name, [0] * len(machine.hits))
                    hits[launch.name] = [a + b for a, b in zip(old, machine.hits, strict=True)]
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
        """Plant each site that slept or acts (with ``everything``, each that is executed), until a schedule shows it.

        A site that is known to be caught is not planted again.
        """
        for n, site in enumerate(self.sites):
            if site.caught or not (site.acts or site.slept or (self.everything and site.executed)):
                continue
            t = time.time()
            for case, s in self._runs():
                if site.region is not None:
                    what, _ = self._run(case, s, self._shift(site))
                else:
                    with deleted(self.programs[site.kernel], site.unit):
                        what, _ = self._run(case, s)
                if what:
                    site.caught = f"{self._problem(case)}{s}: {what}"
                    break
            self.log(
                f"{n + 1}/{len(self.sites)} {site.kind} {site.where} acts={site.acts} slept={site.slept} -> "
                f"{site.caught or 'MISSED'} ({time.time() - t:.1f} s)"
            )
            self.save()

    def _runs(self) -> Iterator[tuple[Case, api.Schedule]]:
        """Every problem under every schedule, the cheap one first."""
        for case in self.cases:
            for s in self.schedules:
                yield case, s

    def _problem(self, case: Case) -> str:
        return f"{case.name}, " if len(self.cases) > 1 else ""

    @property
    def name(self) -> str:
        """Its problems."""
        return " + ".join(case.name for case in self.cases)

    def document(self) -> dict[str, Any]:
        """Totals and every site, for a file."""
        executed = [x for x in self.sites if x.executed]
        acting = [x for x in executed if x.acts]
        sites = []
        for x in executed:
            d = asdict(x)
            d["kernel"] = x.kernel[:70]
            sites.append({k: v for k, v in d.items() if k != "executed" and v not in ("", None)})
        return {
            "case": self.name, "arch": self.cases[0].arch, "schedules": [str(s) for s in self.schedules],
            "sites": len(self.sites) + self.unexecuted, "executed": len(executed), "slept_or_act": sum(x.slept or x.acts for x in executed),
            "act": len(acting), "caught_of_acting": sum(bool(x.caught) for x in acting),
            "caught": sum(bool(x.caught) for x in executed), "environment": self.environment, "each": sites,
        }  # fmt: skip

    def save(self) -> None:
        """Write the document, complete or not: ``--again`` goes on from an incomplete one."""
        if self.out:
            self.out.write_text(json.dumps(self.document(), indent=1) + "\n")

    @classmethod
    def of(cls, documents: list[dict[str, Any]]) -> Campaign:
        """The whole of a campaign whose parts ran apart; its sites in program order."""
        first = documents[0]
        named = {(d["case"], d["arch"], *d["schedules"]) for d in documents}
        if len(named) != 1:
            raise ValueError(f"documents of different campaigns: {sorted(named)}")
        schedules = [api.Schedule(n, int(seed)) for n, seed in (x.split(":") for x in first["schedules"])]
        out = cls(Case(first["case"], first["arch"], None, lambda: None, lambda value: None), None, schedules)
        out.sites = [Site(**x, executed=True) for d in documents for x in d["each"]]
        out.sites.sort(key=lambda x: (x.kernel, x.unit < 0, x.unit, x.where))
        out.environment = first["environment"]
        out.unexecuted = sum(d["sites"] - d["executed"] for d in documents)
        return out

    def explain(self) -> None:
        """For each site that slept or acted and was missed: run the kernel as it is, but with this site's edge left out of the clocks.

        No report under any schedule: everything that the site orders is ordered by other edges too, and the edges that
        brought the same knowledge to that warp are named.
        """
        for site in self.sites:
            if not (site.acts or site.slept) or site.caught or site.kind not in MUTABLE:
                continue
            index = self.programs[site.kernel].units[site.unit].instrs[0].index
            covers: dict[str, int] = {}
            seen = []
            for case, s in self._runs():
                what, result = self._run(case, s, muted=(site.kernel, index))
                if what:
                    seen.append(f"{self._problem(case)}{s}: {what}")
                for machine in result.machines if result else []:
                    for by, n in machine.covers.items():
                        covers[by] = covers.get(by, 0) + n
            if seen:
                site.explained = f"orders something that the planted runs did not need: {seen[0]}"
            else:
                by = ", ".join(f"{k} ({n})" for k, n in sorted(covers.items(), key=lambda x: -x[1])[:4])
                site.explained = f"redundant under {len(self.schedules)} schedules; what it brings " + (
                    f"comes too by {by}" if by else "comes by no later edge, and nothing needs it"
                )
                site.explained += "; nothing is in flight at its CTA's exit"
            self.log(f"{site.kind} {site.where}: {site.explained}")

    def table(self) -> str:
        lines = [
            f"### {self.name} ({self.cases[0].arch})",
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
        missed = [x for x in self.sites if (x.acts or x.slept) and not x.caught]
        lines += [
            "",
            *(
                f"* missed{'' if x.acts else ' (slept, orders nothing)'}: {x.kind}, {x.where}{'; ' * bool(x.explained)}{x.explained}"
                for x in missed
            ),
        ]
        return "\n".join(lines)


def campaign_cases() -> dict[str, Any]:
    """Name → (builder of its problems, waivers).

    A campaign for a record has a second, longer problem: more tiles for every ring of buffers.
    """
    from . import kernels as k
    from .waivers import FA4_BACKWARD_SM100, FA4_FORWARD_SM100, NONE, OURS_SM90, QUACK_GEMM_SM100

    return {
        "fa4_forward_sm100": (lambda: [k.fa4_forward("sm_100a", 256, 384, growing=True)], FA4_FORWARD_SM100),
        "fa4_backward_sm100": (lambda: [k.fa4_backward("sm_100a", n, n) for n in (256, 512)], FA4_BACKWARD_SM100),
        "quack_mxfp8_sm100": (
            lambda: [k.quack_mxfp8_gemm("sm_100a", *n) for n in ((712, 192, 640), (1480, 192, 1280))],
            QUACK_GEMM_SM100,
        ),
        "quack_bf16_sm100": (lambda: [k.quack_gemm("sm_100a", *n) for n in ((256, 192, 640), (712, 192, 1280))], QUACK_GEMM_SM100),
        "fa4_forward_sm90": (lambda: [k.fa4_forward("sm_90a", *n) for n in ((256, 512), (384, 1024))], NONE),
        "fa4_backward_sm90": (lambda: [k.fa4_backward("sm_90a", n, n) for n in (256, 512)], NONE),
        "quack_bf16_sm90": (lambda: [k.quack_gemm("sm_90a", *n) for n in ((256, 192, 640), (600, 192, 1280))], NONE),
        **{f"{name}_sm90": (partial(_ours, name), OURS_SM90) for name in OURS},
    }


#: This project's Hopper kernels, on problems that fill every ring of buffers more than once and cut tiles: builder, arguments
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward": (
        "tests.emulator.ours:forward", dict(lengths=[650, 5, 129], queries=130, heads=1, kv_heads=1, block=[32, 128])
    ),
    "forward_few": ("tests.emulator.ours:forward", dict(lengths=[1025, 5], queries=3, heads=1, kv_heads=1)),
    "backward": (
        "tests.emulator.ours:backward", dict(lengths=[300, 5], queries=200, heads=1, kv_heads=1, config=dict(grad_format="mxfp8"))
    ),
    "norm": (
        "tests.fused_ops.kernel_cases:norm", dict(lengths=[200, 0, 333], columns=128, block=[0, 64], center=True, copy_heads=2, bound=True)
    ),
    "gemm_quantize": (
        "tests.fused_ops.kernel_cases:gemm",
        dict(lengths=[5, 700], contracted=256, columns=128, x_block=[0, 64], w_block=[32, 64], block=[0, 64], axes=[0]),
    ),
    "gemm_norm_backward": ("tests.fused_ops.gemm_norm_cases:backward", dict(lengths=[1, 33, 700], rows=128, columns=384)),
}  # fmt: skip


def _ours(name: str) -> list[Case]:
    builder, arguments = OURS[name]
    module, function = builder.split(":")
    return [getattr(importlib.import_module(module), function)("sm_90a", **arguments)]


def summary(arch: str, case: str, schedules: int = 1) -> dict[str, Any]:
    """Plant every fault of a case that acts; how many were caught, and what is found out about the others."""
    builder, waivers = campaign_cases()[case]
    campaign = Campaign(builder(), waivers, api.schedules(schedules))
    campaign.baseline()
    campaign.sites = [x for x in campaign.sites if x.acts]
    campaign.plant()
    campaign.explain()
    missed = {f"{x.kind} {x.where}": x.explained for x in campaign.sites if not x.caught}
    return {"acting": len(campaign.sites), "caught": len(campaign.sites) - len(missed), "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?")
    parser.add_argument("--site", type=int, action="append", help="only this site (1-based, as logged)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="also plant sites that neither sleep nor order anything in the unplanted runs")
    parser.add_argument("--part", help="i/n: plant only every n-th site, from the i-th (0-based) on")
    parser.add_argument("--again", type=Path, help="do not plant again what this record of the same kernel caught")
    parser.add_argument("--merge", type=Path, nargs="+", help="documents of all parts of one campaign: print and write the whole")
    parser.add_argument("--out", type=Path, help="write totals and every site as JSON")
    args = parser.parse_args()
    cases = campaign_cases()
    if args.merge:
        merged = Campaign.of([json.loads(path.read_text()) for path in args.merge])
        print(merged.table())
        if args.out:
            args.out.write_text(json.dumps(merged.document(), indent=1) + "\n")
        return
    if args.list or args.case not in cases:
        print("\n".join(cases))
        return
    builder, waivers = cases[args.case]
    capture.install("sm_90a" if "sm90" in args.case else "sm_100a")
    started = time.time()
    campaign = Campaign(builder(), waivers, api.schedules(args.schedules), log=lambda x: print(x, file=sys.stderr, flush=True))
    campaign.everything, campaign.out = args.all, args.out
    campaign.baseline()
    print(f"baseline clean under {[str(s) for s in campaign.schedules]}, {len(campaign.sites)} sites", file=sys.stderr)
    if args.site:
        campaign.sites = [campaign.sites[i - 1] for i in args.site]
    if args.again:
        caught = {Site.key(x): x.get("caught", "") for x in json.loads(args.again.read_text())["each"]}
        for site in campaign.sites:
            site.caught = caught.get(Site.key(asdict(site)), "")
    if args.part:
        first, step = map(int, args.part.split("/"))
        campaign.sites = campaign.sites[first::step]
    campaign.plant()
    campaign.explain()
    print(campaign.table())
    print(f"\n{time.time() - started:.0f} s", file=sys.stderr)
    campaign.save()


if __name__ == "__main__":
    main()
