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


def main_loop(sass: str) -> list[str]:
    """Instructions of the shortest loop with both products: the loop over whole tiles."""
    lines = [m for line in sass.splitlines() if (m := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line))]
    address = {int(m[1], 16): i for i, m in enumerate(lines)}
    text = [m[2] for m in lines]
    loops = []
    for i, instruction in enumerate(text):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if jump and address.get(int(jump[1], 16), i) < i:
            body = text[address[int(jump[1], 16)] : i]
            if sum("QGMMA" in x for x in body) >= 6:
                loops.append(body)
    return min(loops, key=len)


def count(pattern: str, text: str) -> int:
    """Instructions that match."""
    return len(re.findall(pattern, text))


def main(folder: str, variants: list[dict]) -> None:
    import lp_fa4.compile

    lp_fa4.compile.extra_options = f"--keep-cubin --dump-dir {folder}"
    from lp_fa4.sm90.forward_config import ForwardSpec
    from lp_fa4.sm90.forward_host import _compile_forward

    cubin = Path(folder) / "report.cubin"
    for variant in variants:
        cubin.write_bytes(_compile_forward("sm_90a", ForwardSpec(**variant)).artifacts.CUBIN)
        sass = subprocess.run([tool(), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
        loop = "\n".join(main_loop(sass))
        report = dict(
            products=count(r"\bQGMMA\b", sass),
            waits=count(r"\bWARPGROUP\.DEPBAR\b", sass),
            local=count(r"\b(?:LDL|STL)\b", sass),
            loop=loop.count("\n") + 1,
            loop_local=count(r"\b(?:LDL|STL)\b", loop),
            loop_exp2=count(r"\bMUFU\.EX2\b", loop),
            loop_conversions=count(r"\bF2FP\.SATFINITE\.E4M3", loop),
            loop_shuffles=count(r"\bSHFL\b", loop),
            loop_permutes=count(r"\bPRMT\b", loop),
        )
        print(json.dumps({"variant": variant, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
