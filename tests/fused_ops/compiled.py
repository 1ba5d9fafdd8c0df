"""Compile the fused kernels for one target in a process of its own and report resources: ``python -m tests.fused_ops.compiled sm_103a``.

One JSON line per variant, as ``tests.sm100.compiled`` has them.
"""

import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

NORMS = {
    "module": dict(columns=384, dtype="bfloat16", weight_dtype="float32", block_tokens=0, width=128, centred=True),
    "module 512, kept": dict(columns=512, dtype="bfloat16", weight_dtype="float32", block_tokens=0, width=128, centred=True, keep=True),
    "module, copied": dict(columns=384, dtype="bfloat16", weight_dtype="float32", block_tokens=0, width=128, centred=True, copy=128),
    "module 512, copied": dict(columns=512, dtype="bfloat16", weight_dtype="float32", block_tokens=0, width=128, centred=True, copy=128),
    "square, atoms": dict(
        columns=512, dtype="bfloat16", weight_dtype="bfloat16", block_tokens=32, width=32, centred=True, sf_columns=True, sf_tokens=True
    ),
    "token blocks of 384": dict(columns=384, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=128),
    "384, kept, an atom": dict(
        columns=384, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=32, centred=True, keep=True, sf_columns=True
    ),
    "512, kept": dict(columns=512, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=128, centred=True, keep=True),
    "square 512": dict(columns=512, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=32),
    "square 480": dict(columns=480, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=32, centred=True),
    "256 of FP32": dict(columns=256, dtype="float32", weight_dtype="float32", block_tokens=32, width=32, centred=True, sf_tokens=True),
    "1024": dict(columns=1024, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=32, centred=True),
    "tile blocks": dict(columns=384, dtype="bfloat16", weight_dtype="float32", block_tokens=128, width=128, centred=True),
    "8192, dense": dict(
        columns=8192, dtype="bfloat16", weight_dtype="float32", block_tokens=32, width=32, dense=True, centred=True, keep=True
    ),
}


PRODUCTS = {
    "module, pair": dict(form="e4m3x2", x_tokens=0, x_width=128, w_width=128, block_tokens=0, width=128, one_scale=True),
    "module, bounded pair": dict(form="e4m3x2", x_tokens=0, x_width=128, w_width=384, block_tokens=0, width=128, one_scale=True),
    "module, pair of two scales": dict(form="e4m3x2", x_tokens=0, x_width=128, w_width=128, block_tokens=0, width=128),
    "module, BF16": dict(form="bf16", x_tokens=0, x_width=0, w_width=0, block_tokens=0, width=128),
    "token blocks": dict(form="e4m3", x_tokens=32, x_width=128, w_width=128, block_tokens=32, width=128),
    "square blocks, pair": dict(form="e4m3x2", x_tokens=32, x_width=32, w_width=32, block_tokens=32, width=32),
}
"""Of the Hopper kernel, 384 by 384."""
BLACKWELL = {
    "pair, both layouts": dict(form="e4m3x2", block_tokens=32, width=32, sf_columns=True, sf_tokens=True),
    "BF16, static": dict(form="bf16", block_tokens=0, width=128),
    "wide, blocks of a tile": dict(form="e4m3x2", block_tokens=128, width=64, contracted=1024),
}
"""Of the Blackwell kernel, 384 by 384 unless said."""
WGMMA = {"wgmma": r"\b[HQ]GMMA\b", "waits": r"\bWARPGROUP\.DEPBAR\b"}
"""Counted in a product's SASS: a wait for every instruction would mean that the assembler serialized them."""


def main(arch: str, names: list[str]) -> None:
    """Print one JSON line per variant."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder)
        from fused_ops.rmsnorm_quantize.config import NormSpec
        from fused_ops.rmsnorm_quantize.kernel import _compile_norm_quantize, _compile_staged_norm
        from fused_ops.rmsnorm_quantize.vectors import _compile_norm_bound, _compile_norm_mean
        from fused_ops.scale_layout.kernel import ScatterSpec, _compile_gather_scales, _compile_scatter_scales
        from tests.emulator import locations
        from tests.sm100.compiled import _run, _tool, inspect

        locations.remember()  # compiles in three quarters of the time

        def compile_norm(name):
            spec = NormSpec(**NORMS[name])
            (_compile_staged_norm if spec.stages else _compile_norm_quantize)(arch, None if spec.dense else "int32", spec)

        variants = {name: lambda name=name: compile_norm(name) for name in NORMS}
        variants["mean"] = lambda: _compile_norm_mean(arch, "int64", "bfloat16", "float32", 384, 128, True, True)
        variants["mean of wide rows"] = lambda: _compile_norm_mean(arch, "int32", "bfloat16", "float32", 4096)
        variants["bound"] = lambda: _compile_norm_bound(arch, "float32", 384, 128)
        from fused_ops.head_quantize.kernel import _compile_head_quantize

        variants["heads"] = lambda: _compile_head_quantize(arch, 128)
        from fused_ops.coordinates.kernel import _compile_balanced_coordinates

        variants["coordinates"] = lambda: _compile_balanced_coordinates(arch, 128, True, "bfloat16", "bfloat16")
        from fused_ops.gemm_quantize.weights import WeightSpec
        from fused_ops.gemm_quantize.weights_kernel import (
            _compile_bounded_rows,
            _compile_projection_bound,
            _compile_projection_weight,
        )

        spec_of_weight = WeightSpec(384, 128, "e4m3x2", 128, True, "float32", "float32")
        variants["weight"] = lambda: _compile_projection_weight(arch, spec_of_weight)
        variants["bounded rows"] = lambda: _compile_bounded_rows(arch, 512, "e4m3x2")
        variants["bound of a weight"] = lambda: _compile_projection_bound(arch, 128, 12)
        if arch == "sm_90a":
            from fused_ops.gemm_quantize.config import GemmSpec
            from fused_ops.gemm_quantize.sm90 import _compile_gemm_quantize

            for key, choice in PRODUCTS.items():
                spec = GemmSpec(384, 384, w_static=False, dense=False, **choice)
                variants[f"product: {key}"] = lambda spec=spec: _compile_gemm_quantize(arch, "int32", spec)
            from fused_ops.norm_projection.config import ProjectionSpec
            from fused_ops.norm_projection.kernel import _compile_norm_projection
            from fused_ops.norm_projection.weight import _compile_folded_weight

            whole = ProjectionSpec(384, 384, "float32", 128, 128, dense=False)
            variants["product: with the norm"] = lambda: _compile_norm_projection(arch, "int32", whole)
            halves = replace(whole, halves=True)
            variants["product: with the norm, in FP16"] = lambda: _compile_norm_projection(arch, "int32", halves, True)
            variants["folded weight"] = lambda: _compile_folded_weight(arch, whole)
            variants["product: with the norm of FP32"] = lambda: _compile_norm_projection(arch, "int32", replace(whole, dtype="float32"))
        else:
            from fused_ops.gemm_quantize.config import BlackwellSpec
            from fused_ops.gemm_quantize.sm100 import _compile_blackwell_gemm

            for key, choice in BLACKWELL.items():
                made = BlackwellSpec(**{"contracted": 384, "columns": 384, "dense": False, **choice})
                variants[f"product: {key}"] = lambda made=made: _compile_blackwell_gemm(arch, "int32", made)
        for axis in (0, 1):
            variants[f"scatter {axis}"] = lambda axis=axis: _compile_scatter_scales(arch, "int32", ScatterSpec(axis, 32, False, False))
            variants[f"gather {axis}"] = lambda axis=axis: _compile_gather_scales(arch, "int32", axis, False)
        for name in names or variants:
            before = set(Path(folder).glob("*.cubin"))
            variants[name]()
            (cubin,) = set(Path(folder).glob("*.cubin")) - before
            report = {"name": name, **inspect(cubin)}
            if name.startswith("product"):
                sass = _run(_tool("cuobjdump"), "-sass", str(cubin))
                report.update({key: len(re.findall(pattern, sass)) for key, pattern in WGMMA.items()})
            print(json.dumps(report), flush=True)
            cubin.unlink()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
