"""Planted faults of the scheme "scales in dead scores": ``python -m tests.sm100.faults [--all] [--drawn]``, in a process of its own.

On the compiled kernel, one at a time: either new wait is deleted, or the fence behind cleared rows of V; every scale region is moved by
whole tiles onto an accumulator that is alive. Each must be seen (a race report, an error, or a wrong result) under some schedule; the
unplanted kernel must be clean under all.
``--all``: every wait, fence and region of the kernel, and for each that is missed, what else orders the same. ``--drawn``: the kernel whose
CTAs draw their items (Cluster Launch Control). ``--part 3/8``: sites 3, 11, 19, ...; ``--merge FILE...``: one document of all parts' files.
One JSON line per fault.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from lp_fa4.sm100.tmem_plan import forward_plan
from tests.emulator import api, capture
from tests.emulator.faults import Campaign, Site
from tests.emulator.waivers import NONE
from tests.sm100.cases import case

PLAN = forward_plan(128)
WALKED = ({"shared": 256, "keys": [300, 200], "heads": 1, "mean": True}, {"processors": 1})
DRAWN = ({"shared": 256, "keys": [300, 200, 129, 31, 1], "heads": 1, "mean": True}, {"processors": 1, "drawn": True})
"""One CTA draws five items, so that the ring of two wraps."""


class Planted(Campaign):
    """A campaign that knows where the prologue's scales can do harm.

    Those of the very first scores lie inside O0 and O1, of which nothing has started. When tile 1's are copied, S0 alone is alive: they are
    moved there. When tile 0's are copied nothing is, so no place is wrong; those two regions are left out of ``chosen``.
    """

    def _shift(self, site: Site) -> dict[str, Callable[[str, int], int]]:
        if site.region is None or site.region[0] != "sf" or site.region[1] < PLAN["O1"].start:
            return super()._shift(site)
        regions = self.regions[site.kernel]
        role, column, _ = site.region
        target = PLAN["S0"].start

        def hook(r: str, c: int) -> int:
            return c - column + target if regions.owner(r, c) == (role, column) else c

        return {site.kernel: hook}


def chosen(site: Site) -> bool:
    """The two new waits (the only mbarrier waits written in the MMA role itself), the proxy fence after rows of V were cleared, and the
    scale regions (see :class:`Planted`)."""
    if site.kind == "mbarrier wait":
        return "forward_mma.py" in site.where
    if site.kind == "proxy fence":
        return "atoms.py" in site.where
    if site.region is None or site.region[0] != "sf":
        return False
    return not PLAN["O0"].start <= site.region[1] < PLAN["O0"].end


def main() -> None:
    """Print one JSON line per fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--merge", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="totals and every site, as JSON")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    if arguments.merge:
        campaign = Campaign.of([json.loads(path.read_text()) for path in arguments.merge])
    else:
        capture.install("sm_100a")
        planted = case("sm_100a", *(DRAWN if arguments.drawn else WALKED))
        campaign = Planted(planted, NONE, api.schedules(arguments.schedules), log=lambda text: print(text, file=sys.stderr, flush=True))
        campaign.baseline()
        if not arguments.all:
            campaign.sites = [site for site in campaign.sites if chosen(site)]
        campaign.sites = campaign.sites[part - 1 :: parts]
        campaign.plant()
        if arguments.all:
            campaign.explain()
        for site in campaign.sites:
            print(json.dumps(asdict(site)))
    if arguments.all or arguments.merge:
        print(campaign.table(), file=sys.stderr)
    if arguments.out:
        arguments.out.write_text(json.dumps(campaign.document(), indent=1) + "\n")


if __name__ == "__main__":
    main()
