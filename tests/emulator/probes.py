"""Small DSL kernels that only the emulator's own tests use; run inside a worker."""

from __future__ import annotations

from typing import Any

import torch

from . import api, capture, tensormap

_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "u8": torch.uint8, "s32": torch.int32}
_TORCH.update(s64=torch.int64, f64=torch.float64, fp8=torch.float8_e4m3fn)


def encode(arch: str, dtype: str, shape: list[int], stride: list[int], box: list[int], swizzle_bits: int) -> dict[str, Any]:
    """Let CuTe encode a TMA descriptor for a strided tensor; returns the decoded fields, and word 2 as it is.

    The address field is returned relative to the tensor.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import cpasync
    from cutlass.cute.runtime import make_fake_tensor

    types = {
        "f16": cutlass.Float16, "bf16": cutlass.BFloat16, "f32": cutlass.Float32, "u8": cutlass.Uint8, "s32": cutlass.Int32,
        "s64": cutlass.Int64, "f64": cutlass.Float64, "fp8": cutlass.Float8E4M3FN,
    }  # fmt: skip

    @cute.kernel
    def prefetch(atom: cute.CopyAtom, tensor: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == 0:
            cpasync.prefetch_descriptor(atom)

    @cute.jit
    def host(tensor: cute.Tensor):
        strides, n = [], 1
        for extent in box:
            strides.append(n)
            n *= extent
        layout = cute.make_layout(tuple(box), stride=tuple(strides))
        if cutlass.const_expr(swizzle_bits > 0):
            layout = cute.make_composed_layout(cute.make_swizzle(swizzle_bits, 4, 3), 0, layout)
        atom, view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, tuple(box))
        prefetch(atom, view).launch(grid=(1, 1, 1), block=(32, 1, 1))

    base = torch.zeros(1 << 22, dtype=torch.uint8).view(_TORCH[dtype])
    tensor = torch.as_strided(base, shape, stride)
    fake = make_fake_tensor(
        types[dtype],
        tuple(cute.sym_int() for _ in shape),
        stride=tuple(1 if s == 1 else cute.sym_int64(divisibility=64) for s in stride),
        assumed_align=16,
    )

    def call() -> None:
        cute.compile(host, fake, options="--enable-tvm-ffi")(tensor)

    _, launches = api.record(call, arch)
    raw = next(b for b in launches[0][0].params.values() if len(b) == 128)
    t = tensormap.decode(raw[:64])
    return {
        "offset": t.address - tensor.data_ptr(), "element": t.element, "swizzle": t.swizzle, "dims": list(t.dims),
        "strides": list(t.strides), "box": list(t.box), "unknown": t.flags,
    }  # fmt: skip


def two_variants(arch: str) -> dict[str, Any]:
    """Two kernels of one name that differ in a constant, both alive: each launch must run its own PTX."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    @cute.kernel
    def fill(out: cute.Tensor, value: cutlass.Constexpr):
        tidx, _, _ = cute.arch.thread_idx()
        out[tidx] = cutlass.Float32(value)

    @cute.jit
    def host(out: cute.Tensor, value: cutlass.Constexpr):
        fill(out, value).launch(grid=(1, 1, 1), block=(32, 1, 1))

    a, b = torch.zeros(32), torch.zeros(32)

    def call() -> None:
        fake = make_fake_compact_tensor(cutlass.Float32, (32,))
        one, two = (cute.compile(host, fake, v, options="--enable-tvm-ffi") for v in (1.0, 2.0))
        one(a)
        two(b)
        one(a)

    _, result = api.call_under(call, arch, api.Schedule("eager"))
    return {"a": a[0].item(), "b": b[0].item(), "names": len({x.name for x in result.launches}), "launches": len(result.launches)}


def unknown_library(arch: str) -> dict[str, Any]:
    """A launch whose PTX was never recorded must say so."""
    runtime = capture.runtime()
    known, runtime.ptx_of_cubin = runtime.ptx_of_cubin, {}
    record = runtime.record_artifacts
    runtime.record_artifacts = lambda *a: None  # type: ignore[method-assign]
    try:
        two_variants(arch)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        runtime.ptx_of_cubin = known
        runtime.record_artifacts = record  # type: ignore[method-assign]
    return {"error": "", "text": ""}
