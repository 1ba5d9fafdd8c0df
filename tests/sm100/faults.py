"""Planted faults of the scheme "scales in dead scores": ``python -m tests.sm100.faults [--all] [--part I/N]``, in a process of its own.

On the compiled kernel, one at a time: either new wait is deleted, every scale region is moved by whole tiles onto an accumulator that is
alive. Each must be seen (a race report, an error, or a wrong result) under some schedule; the unplanted kernel must be clean under all.
``--all``: every wait, fence and region of the kernel; ``--part 3/8``: sites 3, 11, 19, .... One JSON line per fault.
"""

import argparse
import json
import sys
from dataclasses import asdict

from lp_fa4.sm100.tmem_plan import forward_plan
from tests.emulator import api, capture
from tests.emulator.faults import Campaign
from tests.emulator.waivers import NONE
from tests.sm100.cases import case


def chosen(site) -> bool:
    """The two new waits (the only mbarrier waits written in the MMA role itself) and the scale regions of the steady state.

    The prologue's regions lie inside O0 and O1; the accumulator next to them has not started either, so moving them there is no fault.
    """
    if site.kind == "mbarrier wait":
        return "forward_mma.py" in site.where
    return site.region is not None and site.region[0] == "sf" and site.region[1] < forward_plan(128)["O0"].start


def main() -> None:
    """Print one JSON line per fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--part", default="1/1", help="I/N: sites I, I + N, ... of the list")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    capture.install("sm_100a")
    planted = case("sm_100a", {"shared": 256, "keys": [300, 200], "heads": 1, "mean": True}, {"processors": 1})
    campaign = Campaign(planted, NONE, api.schedules(arguments.schedules), log=lambda text: print(text, file=sys.stderr, flush=True))
    campaign.baseline()
    if not arguments.all:
        campaign.sites = [site for site in campaign.sites if chosen(site)]
    campaign.sites = campaign.sites[part - 1 :: parts]
    campaign.plant()
    for site in campaign.sites:
        print(json.dumps(asdict(site)))
    if arguments.all:
        print(campaign.table(), file=sys.stderr)


if __name__ == "__main__":
    main()
