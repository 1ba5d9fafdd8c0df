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

LOCAL_LIMITS = {("dx", 384): 64, ("dx", 512): 4, ("dW", 384): 0, ("dW", 512): 4}
"""Words parked in local memory, a tile of 64 rows, on Hopper."""


def main(arch: str) -> None:
    """Print one JSON line per kernel."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
        from fused_ops.gemm_norm_backward.config import InputSpec, Operand, WeightSpec
        from fused_ops.gemm_norm_backward.input_gradient import compile_input_gradient
        from fused_ops.gemm_norm_backward.weight_gradient import compile_weight_gradient
        from tests.sm90.backward_report import tool

        square, static, warps = Operand(32), Operand(128, True), arch != "sm_90a"
        for (kernel, size), limit in LOCAL_LIMITS.items():
            before = set(Path(folder).glob("*.cubin"))
            if kernel == "dx":
                spec = InputSpec(
                    size, size, "bfloat16", square, square, mean=True, dense=False, need_x=True, need_norm=True, warp_mma=warps
                )
                compile_input_gradient(arch, "int32", spec)
            else:
                compile_weight_gradient(arch, "int32", WeightSpec(size, size, square, static, dense=False, warp_mma=warps))
            (cubin,) = set(Path(folder).glob("*.cubin")) - before
            sass = subprocess.run([tool(), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
            names = dict(wgmma="HGMMA", mma="HMMA", waits=r"WARPGROUP\.DEPBAR", arrives=r"WARPGROUP\.ARRIVE", local="(?:STL|LDL)")
            counts = {name: len(re.findall(rf"\b{pattern}\b", sass)) for name, pattern in names.items()}
            print(json.dumps({"kernel": kernel, "size": size, "local_limit": limit, **counts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
