"""Compile the GEMM + norm backward for sm_90a and report what ptxas made of it, one JSON line a kernel:

python -m tests.fused_ops.gemm_norm_report
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCAL_LIMITS = {
    ("dx", 384): 96, ("dx", 512): 4, ("dW", 384): 56, ("dW", 512): 4,
    ("dx of codes", 384): 16, ("dx of codes", 512): 24, ("dW of codes", 384): 0, ("dW of codes", 512): 0,
    ("dW in FP8 of codes", 384): 2, ("dW in FP8 of codes", 512): 4,
}  # fmt: skip
"""Words parked in local memory, a tile of 64 rows, on Hopper. "dx" and "dW" there: BF16 operands, whose pieces take
twice the registers of codes; "of codes": MXFP8, the module's call. On Blackwell: what ``test_what_ptxas_made_for_blackwell`` allows."""


def main(arch: str) -> None:
    """Print one JSON line per kernel."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
        from fused_ops.gemm_norm_backward.config import InputSpec, Operand, WeightSpec
        from fused_ops.gemm_norm_backward.input_gradient import compile_input_gradient
        from fused_ops.gemm_norm_backward.input_gradient_codes import compile_input_gradient_of_codes
        from fused_ops.gemm_norm_backward.weight_gradient import compile_weight_gradient
        from fused_ops.gemm_norm_backward.weight_gradient_codes import compile_weight_gradient_of_codes
        from fused_ops.gemm_norm_backward.weight_gradient_fp8 import compile_weight_gradient_fp8
        from tests.emulator import locations
        from tests.sm90.backward_report import tool

        locations.remember()  # compiles in three quarters of the time
        hopper = arch == "sm_90a"
        for (kernel, size), limit in LOCAL_LIMITS.items():
            of_codes = kernel.endswith("of codes")
            if of_codes and not hopper:
                continue
            before = set(Path(folder).glob("*.cubin"))
            if kernel.startswith("dx"):
                flags = dict(mean=True, dense=False, need_x=True, need_norm=True, warp_mma=not hopper)
                kind = Operand(32) if of_codes or not hopper else Operand(0)
                spec = InputSpec(size, size, "bfloat16", kind, kind, **flags)
                assert spec.roles == of_codes
                (compile_input_gradient_of_codes if of_codes else compile_input_gradient)(arch, "int32", spec)
            else:
                fp8 = "FP8" in kernel
                left, right = (Operand(32), Operand(128, fp8 or not hopper)) if of_codes or not hopper else (Operand(0), Operand(0))
                across = 3 if fp8 and size == 512 and hopper else 0  # what 132 multiprocessors have beside dx
                spec = WeightSpec(size, size, left, right, dense=False, warp_mma=not hopper, across=across, beside=across > 0)
                assert spec.codes == of_codes and spec.fp8 == fp8
                compile_it = compile_weight_gradient_of_codes if of_codes else compile_weight_gradient
                (compile_weight_gradient_fp8 if fp8 else compile_it)(arch, "int32", spec)
            (cubin,) = set(Path(folder).glob("*.cubin")) - before
            sass = subprocess.run([tool(), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
            names = dict(wgmma="[HQ]GMMA", mma="HMMA", waits=r"WARPGROUP\.DEPBAR", local="(?:STL|LDL)")
            names["drains"] = r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0"
            limits = dict(local_limit=limit, drain_limit=3 if kernel.startswith("dW in FP8") else 2)  # a wait for each part's sums
            counts = {name: len(re.findall(rf"\b{pattern}\b", sass)) for name, pattern in names.items()}
            print(json.dumps({"kernel": kernel, "size": size, **limits, **counts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
