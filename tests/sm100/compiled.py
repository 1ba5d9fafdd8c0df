"""Compile variants for one target in a process of its own, and report what the assembler made: ``python -m tests.sm100.compiled sm_103a``.

Every variant, with a fixed walk through the work list and (``NAME_drawn``) with drawn items. One JSON line each: registers at launch, stack
and local bytes, dynamic shared memory, columns of tensor memory, counts of instructions in the SASS, and issue slots of the loops over key
tiles. ``fa4`` in place of a target: flash-attn-4's BF16 forward for sm_100a.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = {
    "default": {"head_dim": 128},
    "full": {"head_dim": 128, "centred": False, "causal": True, "group": 4, "v_mean": True, "save": "float32", "p_scale": "fresh"},
    "softmax_max": {"head_dim": 128, "centred": False, "p_scale": "softmax_max"},
    "d64": {"head_dim": 64, "shared_q": True, "v_mean": True, "save": "bfloat16"},
    "d64_causal": {"head_dim": 64, "centred": False, "causal": True, "group": 2, "p_scale": "fresh"},
    "module": {"head_dim": 128, "shared_q": True, "v_mean": True, "save": "bfloat16"},
    "unscaled": {"head_dim": 128, "block_scaled": False},
    "folded": {"head_dim": 128, "block_scaled": False, "centred": False, "fold_v": True},
}
_COUNTED = (
    r"\b(UTC[A-Z]*MMA[.0-9A-Z]*|UTCCP|UTMALDG|UBLKCP|LDTM|STTM|MUFU\.EX2|STL|LDL|F2FP\.[A-Z0-9.]*E4M3|USETMAXREG|FFMA2|FADD2|"
    r"FMNMX3?|HMMA|UTCBAR|UGETNEXTWORKID)"
)


def _tool(name: str) -> str:
    """A CUDA binary tool: from the PATH, or the copy that triton ships."""
    from shutil import which

    found = which(name)
    if found:
        return found
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inspect(cubin: Path, masked_first: bool = False) -> dict:
    """Resources and instruction counts of a compiled kernel. ``masked_first``: of ``steady_state``."""
    usage = _run(_tool("cuobjdump"), "--dump-resource-usage", str(cubin))
    out = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    sass = _run(_tool("cuobjdump"), "-sass", str(cubin))
    products: dict[str, int] = {}
    for name, a, rest in re.findall(r"\b(UTC\w*MMA[.\w]*)\s+(\w+)\[\w+\],(.*?);", sass):
        # a block-scaled product names the scales' place after the instruction descriptor
        kind = f"{'smem' if a == 'gdesc' else 'tmem'} scaled={'tmem' in rest.split('idesc')[1]}"
        kind = kind if name == "UTCQMMA" else f"{name} {kind}"
        products[kind] = products.get(kind, 0) + 1
    counts: dict[str, int] = {}
    for name in re.findall(_COUNTED, sass):
        counts[name] = counts.get(name, 0) + 1
    return {**out, "products": products, "sass": counts, "issue": steady_state(sass, masked_first)}


def steady_state(sass: str, masked_first: bool = False) -> dict[str, int]:
    """Issue slots of one turn of the two loops over key tiles, as ``softmax`` (one Q tile, no mask) and ``mma`` (two Q tiles).

    A loop is a backward branch and what lies before it. Where a forward branch skips to the block after an unconditional one (if and else),
    the second block is left out: it is the first key tile's, or a partial one's (``masked_first``: in the softmax loop the first is). So is
    a block with a MEMBAR that a branch skips and no other replaces: it clears rows of a partial tile. Spins lie outside the loops.
    """
    code = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", sass)]
    index = {at: i for i, (at, _) in enumerate(code)}

    def target(text: str) -> int:
        found = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        return index.get(int(found[1], 16), -1) if found else -1

    bodies = [(target(text), i + 1) for i, (_, text) in enumerate(code) if 0 <= target(text) <= i]
    found = {}
    for role, opcode, least in (("softmax", "MUFU.EX2", 64), ("mma", "UTC", 8)):
        fitting = [b for b in bodies if sum(opcode in text for _, text in code[slice(*b)]) >= least]
        if not fitting:
            continue
        first, last = min(fitting, key=lambda b: b[1] - b[0])
        skipped: set[int] = set()
        for i in range(first, last):
            other = target(code[i][1])
            if i < other < last and code[i][1].startswith("BRA.U"):
                join = target(code[other - 1][1]) if code[other - 1][1].startswith("BRA 0x") else -1
                if other < join <= last:
                    skipped |= set(range(i + 1, other) if masked_first and role == "softmax" else range(other, join))
                elif any(text == "MEMBAR.ALL.CTA" for _, text in code[i + 1 : other]):
                    skipped |= set(range(i + 1, other))
        found[role] = last - first - len(skipped)
    return found


def compile_variant(arch: str, name: str, folder: Path) -> dict:
    """Compile one of ``VARIANTS`` (or ``NAME_drawn``) and inspect it."""
    from lp_fa4.sm100.config import ForwardSpec, forward_tuning
    from lp_fa4.sm100.forward_host import _compile_sm100_forward
    from lp_fa4.sm100.forward_kernel import Forward

    spec = ForwardSpec(**VARIANTS[name.removesuffix("_drawn")])
    tuning = forward_tuning(arch, spec, name.endswith("_drawn"))
    before = set(folder.glob("*.cubin"))
    _compile_sm100_forward(arch, spec, tuning)
    (cubin,) = set(folder.glob("*.cubin")) - before
    report = inspect(cubin)
    cubin.unlink()
    kernel = Forward(spec, tuning)
    return {"name": name, "arch": arch, **report, "columns": kernel.plan.allocation, "smem": kernel.shared_bytes()}


def compile_fa4() -> dict:
    """flash-attn-4's forward (its host code compiles for the emulated device, which keeps what it compiles)."""
    from tests.emulator import api, capture
    from tests.emulator.kernels import fa4_forward

    os.environ["CUTE_DSL_KEEP_CUBIN"] = "1"
    capture.install("sm_100a")
    made = fa4_forward("sm_100a", 256, 256)
    assert made.prepare is not None
    api.record(made.prepare, "sm_100a")
    (cubin,) = Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.cubin")
    return {"name": "fa4", "arch": "sm_100a", **inspect(cubin)}


def main(arch: str, names: list[str]) -> None:
    """Print one JSON line per variant."""
    if arch == "fa4":
        print(json.dumps(compile_fa4()))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
        from tests.emulator import locations

        locations.remember()  # compiles in three quarters of the time
        for name in names or [n + how for n in VARIANTS for how in ("", "_drawn")]:
            print(json.dumps(compile_variant(arch, name, Path(folder))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
