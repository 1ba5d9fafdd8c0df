"""Compile variants of the backward's main kernel for sm_90a and report what ptxas made of them, one JSON line each.

    python -m tests.sm90.backward_report FOLDER '[{"mxfp8": true}, ...]'

A process of its own: the DSL reads its dump settings when it is imported.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PATTERNS = {"products": r"\bQGMMA\b", "waits": r"\bWARPGROUP\.DEPBAR\b", "local": r"\b(?:LDL|STL)\b"}


def tool() -> str:
    """Path of ``cuobjdump``, which Triton's package carries."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def main(folder: str, variants: list[dict]) -> None:
    os.environ.update(CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
    from lp_fa4.sm90.backward_layout import BackwardSpec
    from lp_fa4.sm90.backward_main import compile_main
    from tests.emulator import locations

    locations.remember()  # compiles in three quarters of the time
    for variant in variants:
        for old in Path(folder).glob("*.cubin"):
            old.unlink()
        compile_main("sm_90a", BackwardSpec(**variant))
        (cubin,) = Path(folder).glob("*.cubin")
        run = lambda *flags: subprocess.run([tool(), *flags, str(cubin)], capture_output=True, text=True, check=True).stdout  # noqa: E731, B023
        sass, usage = run("-sass"), run("--dump-resource-usage")
        report = {name: len(re.findall(pattern, sass)) for name, pattern in PATTERNS.items()}
        report["stack"] = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
        print(json.dumps({"variant": variant, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
