"""Small DSL kernels that only the emulator's own tests use. Imports the DSL: import it in a worker, never in pytest."""

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from . import api, capture, tensormap

_TYPES = {
    "f16": (torch.float16, cutlass.Float16),
    "bf16": (torch.bfloat16, cutlass.BFloat16),
    "f32": (torch.float32, cutlass.Float32),
    "u8": (torch.uint8, cutlass.Uint8),
    "s32": (torch.int32, cutlass.Int32),
    "fp8": (torch.float8_e4m3fn, cutlass.Float8E4M3FN),
}


@cute.kernel
def _prefetch(atom: cute.CopyAtom, tensor: cute.Tensor):
    tidx, _, _ = cute.arch.thread_idx()
    if tidx == 0:
        cpasync.prefetch_descriptor(atom)


class _Encode:
    """Host function that makes a TMA atom for a box and passes it to a kernel."""

    def __init__(self, box: tuple[int, ...], swizzle_bits: int) -> None:
        self.box, self.swizzle_bits = box, swizzle_bits

    @cute.jit
    def __call__(self, tensor: cute.Tensor):
        strides = tuple(int(torch.tensor((1, *self.box[:i])).prod()) for i in range(len(self.box)))
        layout = cute.make_layout(self.box, stride=strides)
        if cutlass.const_expr(self.swizzle_bits > 0):
            layout = cute.make_composed_layout(cute.make_swizzle(self.swizzle_bits, 4, 3), 0, layout)
        atom, view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, self.box)
        _prefetch(atom, view).launch(grid=(1, 1, 1), block=(32, 1, 1))


def encode(arch: str, dtype: str, shape: list[int], stride: list[int], box: list[int], swizzle_bits: int) -> dict[str, Any]:
    """Let CuTe encode a TMA descriptor for a strided tensor; returns the decoded fields, the address relative to the
    tensor, and the bits of word 2 that have no known meaning."""
    torch_type, cute_type = _TYPES[dtype]
    tensor = torch.as_strided(torch.zeros(1 << 22, dtype=torch.uint8).view(torch_type), shape, stride)
    fake = make_fake_tensor(
        cute_type,
        tuple(cute.sym_int() for _ in shape),
        stride=tuple(1 if s == 1 else cute.sym_int64(divisibility=64) for s in stride),
        assumed_align=16,
    )

    def call() -> None:
        cute.compile(_Encode(tuple(box), swizzle_bits), fake, options="--enable-tvm-ffi")(tensor)

    _, launches = api.record(call, arch)
    t = tensormap.decode(next(b for b in launches[0][0].params.values() if len(b) == 128)[:64])
    return {
        "offset": t.address - tensor.data_ptr(),
        "element": t.element,
        "swizzle": t.swizzle,
        "dims": list(t.dims),
        "strides": list(t.strides),
        "box": list(t.box),
        "unknown": t.flags,
    }


@cute.kernel
def _fill_kernel(out: cute.Tensor, value: cutlass.Constexpr):
    tidx, _, _ = cute.arch.thread_idx()
    out[tidx] = cutlass.Float32(value)


@cute.jit
def _fill(out: cute.Tensor, value: cutlass.Constexpr):
    _fill_kernel(out, value).launch(grid=(1, 1, 1), block=(32, 1, 1))


def two_variants(arch: str) -> dict[str, Any]:
    """Two kernels that differ in a constant, both alive, called in turn: each launch must run its own PTX."""
    a, b = torch.zeros(32), torch.zeros(32)

    def call() -> None:
        fake = make_fake_compact_tensor(cutlass.Float32, (32,))
        one, two = (cute.compile(_fill, fake, v, options="--enable-tvm-ffi") for v in (1.0, 2.0))
        one(a)
        two(b)
        one(a)

    _, result = api.call_under(call, arch, api.Schedule("eager"))
    return {"a": a[0].item(), "b": b[0].item(), "launches": len(result.launches)}


def unknown_library(arch: str) -> dict[str, Any]:
    """A launch whose PTX was never recorded must say so."""
    runtime = capture.runtime()
    known, runtime.ptx_of_cubin = runtime.ptx_of_cubin, {}
    record = runtime.record_artifacts
    runtime.record_artifacts = lambda *a: None  # type: ignore[method-assign]
    try:
        two_variants(arch)
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)}
    finally:
        runtime.ptx_of_cubin = known
        runtime.record_artifacts = record  # type: ignore[method-assign]
    return {"kind": "", "text": ""}


def seconds(arch: str, check: bool) -> dict[str, float]:
    """Processor seconds of flash-attn-4's 256 x 512 x 128 forward, the best of five, compiled and parsed before."""
    import time

    from . import kernels, waivers

    case = kernels.fa4_forward(arch, 256, 512)
    assert case.prepare is not None
    api.record(case.prepare, arch)
    times = []
    for _ in range(5):
        started = time.process_time()
        api.call_under(case.call, arch, api.Schedule("eager"), check=check, waivers=waivers.FA4_FORWARD_SM100)
        times.append(time.process_time() - started)
    return {"seconds": min(times[1:])}


def places(arch: str) -> dict[str, Any]:
    """What ``locations`` remembers of a frame at several places, each seen twice, and what the DSL works out there."""
    from cutlass._mlir_helpers import op

    def walk() -> Any:
        for _ in range(2):
            yield (yield 1), (yield 2)
            yield 3

    def told(info: Any, own: bool) -> list[Any]:
        return [info.filename, info.lineno, info.positions.col_offset, info.function, info.code_context, own]

    remembered, worked_out = [], []
    walking = walk()
    for _ in walking:
        frame = walking.gi_frame
        remembered.append(told(op._fast_frameinfo(frame), op._is_framework_stack_frame(frame)))
        worked_out.append(told(op._fast_frameinfo.__wrapped__(frame), op._is_framework_stack_frame.__wrapped__(frame)))
    return {"remembered": remembered, "worked out": worked_out}
