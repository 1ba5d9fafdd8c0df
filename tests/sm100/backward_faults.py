"""Planted faults of the backward's plan of tensor memory and of the sharing of dS: ``python -m tests.sm100.backward_faults [--all]``.

On the compiled kernel, one at a time: each wait written in the MMA role is deleted, each region of scales, P and dS is moved onto an
accumulator, the fences that publish dS are deleted. Each must be seen (a race report, an error, or a wrong result) under some schedule; the
unplanted kernel must be clean under all. ``--all``: every wait, fence and region. ``--part i/n``: every n-th site, from the i-th.
``--pairs``: of the kernel with two CTAs. One JSON line per fault. ``--out FILE``: totals and every site as JSON, written after each fault;
``--merge FILE...``: one document of all parts' files.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lp_fa4.sm100.backward_plan import backward_plan
from tests.emulator import api, capture
from tests.emulator.faults import Campaign
from tests.emulator.waivers import NONE
from tests.sm100.backward_cases import case

HARMLESS = ("sf", backward_plan(128)["SFDS_Q"].start)
"""Scales of dS for the first 32 keys of dQ: the harness moves them onto dQ itself, whose first product reads them before it writes there in
the emulator, and no other reads them."""


ROLES = ("backward_mma.py", "backward_compute.py", "backward_pair_mma.py", "backward_pair_compute.py")


def chosen(site) -> bool:
    """Waits of the MMA role, fences of the compute role, regions that the products read."""
    if site.region is not None:
        return site.region[0] in ("sf", "a") and tuple(site.region[:2]) != HARMLESS
    return site.kind in ("mbarrier wait", "proxy fence") and any(role in site.where for role in ROLES)


def main() -> None:
    """Print one JSON line per fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--list", action="store_true", help="only name the sites")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.merge:
        campaign = Campaign.of([json.loads(path.read_text()) for path in arguments.merge])
        campaign.out = arguments.out
        campaign.save()
        print(campaign.table())
        return
    capture.install("sm_100a")
    queries = 300 if arguments.pairs else 200  # a pair waits for dQ of the query tile before last
    planted = case("sm_100a", {"shared": queries, "keys": [200, 31], "heads": 1, "mean": True}, {"processors": 1}, pairs=arguments.pairs)
    campaign = Campaign(planted, NONE, api.schedules(arguments.schedules), log=lambda text: print(text, file=sys.stderr, flush=True))
    campaign.baseline()
    campaign.sites = [site for site in campaign.sites if site.executed and (arguments.all or chosen(site))]
    part, parts = map(int, arguments.part.split("/"))
    campaign.sites = campaign.sites[part::parts]
    campaign.out = arguments.out
    if not arguments.list:
        campaign.plant()
        campaign.save()
    for site in campaign.sites:
        print(json.dumps(asdict(site)))


if __name__ == "__main__":
    main()
