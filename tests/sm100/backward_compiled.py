"""Compile variants of the backward's main kernels for one target in a process of its own, and report what the assembler made.

``python -m tests.sm100.backward_compiled sm_103a [NAME ...]``: one JSON line per variant, as ``tests.sm100.compiled``. ``pair_NAME``: the
same variant by pairs of CTAs.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.sm100.compiled import inspect

VARIANTS = {
    "module": {"head_dim": 128, "shared": True, "mxfp8": True},
    "default": {"head_dim": 128},
    "full": {"head_dim": 128, "causal": True, "centred": False, "group": 4, "dq_half": True, "deterministic": True},
    "half": {"head_dim": 128, "shared": True, "mxfp8": True, "dq_half": True},
    "d64": {"head_dim": 64, "shared": True, "mxfp8": True},
    "d64_causal": {"head_dim": 64, "causal": True, "centred": False, "group": 2, "dq_half": True},
}


def compile_variant(arch: str, name: str, folder: Path) -> dict:
    """Compile one of ``VARIANTS`` (or ``pair_NAME``) and inspect it."""
    from lp_fa4.sm100.backward_config import BackwardSpec, backward_tuning
    from lp_fa4.sm100.backward_kernel import Backward, compile_main
    from lp_fa4.sm100.backward_pair_kernel import PairBackward, compile_pair

    pair = name.startswith("pair_")
    spec = BackwardSpec(**VARIANTS[name.removeprefix("pair_")])
    tuning = backward_tuning(arch, spec, pair)
    before = set(folder.glob("*.cubin"))
    (compile_pair if pair else compile_main)(arch, spec, tuning)
    (cubin,) = set(folder.glob("*.cubin")) - before
    report = inspect(cubin, masked_first=True)
    if keep := os.environ.get("KEEP_CUBIN"):
        cubin.rename(Path(keep) / f"{name}_{arch}.cubin")
    else:
        cubin.unlink()
    kernel = (PairBackward if pair else Backward)(spec, tuning)
    return {"name": name, "arch": arch, **report, "columns": kernel.plan.allocation, "smem": kernel.shared_bytes()}


def main(arch: str, names: list[str]) -> None:
    """Print one JSON line per variant."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
        from tests.emulator import locations

        locations.remember()  # compiles in three quarters of the time
        for name in names or [how + n for how in ("", "pair_") for n in VARIANTS]:
            print(json.dumps(compile_variant(arch, name, Path(folder))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
