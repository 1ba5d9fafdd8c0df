"""Compile variants of the forward for sm_90a and report what ptxas made of them, one JSON line each.

    python -m tests.sm90.forward_report FOLDER '[{"head_dim": 128}, ...]'

A process of its own: compile options hold for all of its compilations.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.sm90.backward_report import tool

LONG_JUMP = 50
"""Instructions."""


def main_loop(sass: str, products: int, halves: bool = False) -> list[str]:
    """Instructions of the loop over whole tiles as it runs when no tile is done twice: of the loops with so many ``products`` (``halves``:
    some with FP16 sums) the shortest one that votes, if one does, without what is jumped over farther than ``LONG_JUMP``."""
    lines = [m for line in sass.splitlines() if (m := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line))]
    address = {int(m[1], 16): i for i, m in enumerate(lines)}
    text = [m[2] for m in lines]
    jumps = {i: address.get(int(m[1], 16), i) for i, x in enumerate(text) if (m := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", x))}
    loops = [(begin, end) for end, begin in jumps.items() if begin < end]
    loops = [(begin, end) for begin, end in loops if sum("QGMMA" in x for x in text[begin:end]) >= products]
    loops = [(begin, end) for begin, end in loops if any("F16.E4M3" in x for x in text[begin:end]) == halves]
    votes = [(begin, end) for begin, end in loops if any("VOTE" in x for x in text[begin:end])]
    begin, end = min(votes or loops, key=lambda x: x[1] - x[0])
    body = []
    while begin < end:
        body.append(text[begin])
        over = jumps.get(begin, 0)
        begin = over if begin + LONG_JUMP < over < end else begin + 1
    return body


def count(pattern: str, text: str) -> int:
    """Instructions that match."""
    return len(re.findall(pattern, text))


def main(folder: str, variants: list[dict]) -> None:
    import lp_fa4.compile

    lp_fa4.compile.extra_options = f"--keep-cubin --dump-dir {folder}"
    from lp_fa4.sm90.forward_config import KEY_TILE, ForwardSpec
    from lp_fa4.sm90.forward_host import _compile_forward
    from tests.emulator import locations

    locations.remember()  # compiles in three quarters of the time
    cubin = Path(folder) / "report.cubin"
    for variant in variants:
        spec = ForwardSpec(**variant)
        cubin.write_bytes(_compile_forward("sm_90a", spec).artifacts.CUBIN)
        sass = subprocess.run([tool(), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
        products = spec.head_dim // 32 + KEY_TILE // 32  # k-steps of Q K and of P V
        loop = "\n".join(main_loop(sass, products, spec.halves))
        report = dict(
            products=count(r"\bQGMMA\b", sass),
            waits=count(r"\bWARPGROUP\.DEPBAR\b", sass),
            local=count(r"\b(?:LDL|STL)\b", sass),
            turned=count(r"\bLDSM\b", sass),
            turned_stores=count(r"\bSTSM\b", sass),
            loop=loop.count("\n") + 1,
            loop_local=count(r"\b(?:LDL|STL)\b", loop),
            loop_exp2=count(r"\bMUFU\.EX2\b", loop),
            loop_conversions=count(r"\bF2FP\.SATFINITE\.E4M3", loop),
            loop_shuffles=count(r"\bSHFL\b", loop),
            loop_permutes=count(r"\bPRMT\b", loop),
            loop_exp2_in_turn=count(r"\bMUFU\.EX2\b", loop.partition("BAR.ARV")[0]),
            loop_maxima=count(r"\bV?[IF]MNMX3?\b", loop),
        )
        print(json.dumps({"variant": variant, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
