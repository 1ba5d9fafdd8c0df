"""Kernels whose numbers the GPU rounds in its own way: products of E4M3 codes or FP16 summed in FP16 or FP32, and packed FP16 arithmetic.

``hardware.py`` records what an H200 makes of them. Inputs are drawn on the CPU. Imports the DSL when called.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS, ROWS, COLUMNS = 4, 64, 64
DATA = ("normal", "any code", "largest", "smallest")
"""Operands of the products: normal numbers; every pattern (FP16: below 2), two rows with NaN; E4M3 of 256, 288 and their negatives
(FP16: 256 to 512); E4M3 below 2^-3 (FP16: 2^-13), subnormal too."""

#: Packed FP16 arithmetic: PTX of ``$0 = f($1, $2, $3)``, 32-bit registers.
OPERATIONS = {
    "add": "add.rn.f16x2 $0, $1, $2;",
    "sub": "sub.rn.f16x2 $0, $1, $2;",
    "mul": "mul.rn.f16x2 $0, $1, $2;",
    "fma": "fma.rn.f16x2 $0, $1, $2, $3;",
    "fma.relu": "fma.rn.relu.f16x2 $0, $1, $2, $3;",
    "max": "max.f16x2 $0, $1, $2;",
    "min": "min.f16x2 $0, $1, $2;",
    "max.NaN": "max.NaN.f16x2 $0, $1, $2;",
    "min.NaN": "min.NaN.f16x2 $0, $1, $2;",
    "neg": "neg.f16x2 $0, $1;",
    "abs": "abs.f16x2 $0, $1;",
    "to e4m3": "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, $1; cvt.u32.u16 $0, h;}",
    "from e4m3": "{.reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h;}",
    "from f32": "{.reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.f16x2.f32 $0, a, b;}",
    "exponential": "ex2.approx.f16x2 $0, $1;",
}


KINDS = {"fp8": 32 * STEPS, "fp16": 16 * STEPS}
"""Operands, and elements of a row of them."""
_BITS = {
    "fp8": {"largest": (0x81, 0x78), "smallest": (0x9F, 0), "any code": (0xFF, 0)},
    "fp16": {"largest": (0x83FF, 0x5C00), "smallest": (0x87FF, 0), "any code": (0xBFFF, 0)},
}
"""Of every pattern: bits that are kept, and bits that are set."""


def codes(kind: str, data: str, rows: int, seed: int, rows_with_nan: int = 0) -> Tensor:
    """Operand of ``rows``: E4M3 codes as uint8, or FP16; of NaN only in the first rows."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (rows, KINDS[kind]), {"fp8": torch.float8_e4m3fn, "fp16": torch.float16}[kind]
    bits = {"fp8": torch.uint8, "fp16": torch.int16}[kind]
    anything = torch.randint(0, 1 << 8 * dtype.itemsize, shape, generator=generator, dtype=torch.int32)
    if data == "normal":
        x = torch.randn(shape, generator=generator).to(dtype).view(bits)
    else:
        kept, added = _BITS[kind][data]
        x = (anything & kept | added).to(bits)
        x[x.view(dtype).float().isnan()] = 0
        if data == "any code":
            x[:rows_with_nan, 3] = 0x7F if kind == "fp8" else 0x7FFF
    return x if kind == "fp8" else x.view(dtype)


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Operands ``[DATA, ROWS, K]`` and ``[DATA, COLUMNS, K]``, accumulators ``[DATA, ROWS, COLUMNS]`` (FP16)."""
    a = torch.stack([codes(kind, data, ROWS, seed, rows_with_nan=2) for seed, data in enumerate(DATA)])
    b = torch.stack([codes(kind, data, COLUMNS, 10 + seed) for seed, data in enumerate(DATA)])
    generator = torch.Generator().manual_seed(20)
    size = torch.tensor([8.0, 2000.0, 30000.0, 2.0**-14]).view(-1, 1, 1)
    return a, b, (torch.randn(len(DATA), ROWS, COLUMNS, generator=generator) * size).half()


def words() -> Tensor:
    """Three operands of packed arithmetic, int32 ``[3, 32768]``: every FP16 pattern in an order of its own."""
    orders = (torch.randperm(65536, generator=torch.Generator().manual_seed(30 + i)) for i in range(3))
    return torch.stack([order.to(torch.int32).to(torch.int16).view(torch.int32) for order in orders])


def _kernels() -> Any:
    import cutlass
    from cutlass import Float8E4M3FN, Float16, Int32, Uint8, const_expr, cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
    from cutlass.cutlass_dsl import T
    from cutlass.utils import LayoutEnum, hopper_helpers
    from lp_fa4.common.numbers import inline_ptx

    class Sums:
        """One warpgroup a batch: accumulators after each of ``STEPS`` products. ``a``: [n, ROWS, K], ``b``: [n, COLUMNS, K], E4M3 codes as
        uint8 or FP16; ``c``: [n, ROWS, COLUMNS] of the accumulators' dtype, ``out``: [n, STEPS, ROWS, COLUMNS]."""

        def __init__(self, kind: str, dtype: str, registers: bool):
            self.dtype, self.registers = getattr(cutlass, dtype), registers
            self.k, self.element, self.raw = KINDS[kind], *{"fp8": (Float8E4M3FN, Uint8), "fp16": (Float16, Float16)}[kind]

        @cute.jit
        def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, stream):
            k = OperandMajorMode.K
            source = warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM
            element = self.element
            mma = hopper_helpers.make_trivial_tiled_mma(element, element, k, k, self.dtype, (1, 1, 1), (ROWS, COLUMNS), source)
            self.kernel(a, b, c, out, mma).launch(grid=[a.shape[0], 1, 1], block=[128, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, mma: cute.TiledMma):
            thread, _, _ = cute.arch.thread_idx()
            batch, _, _ = cute.arch.block_idx()
            k, element, raw = self.k, self.element, self.raw
            kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, element, k)
            atom = warpgroup.make_smem_layout_atom(kind, element)
            storage = cutlass.utils.SmemAllocator()
            shared, stores = [], []
            for source, rows in ((a, ROWS), (b, COLUMNS)):
                layout = cute.tile_to_shape(atom, (rows, k), order=(0, 1))
                tile = storage.allocate_tensor(element, layout.outer, 1024, layout.inner)
                stored = cute.make_tensor(cute.recast_ptr(tile.iterator, layout.inner, dtype=raw), layout.outer)
                for i in cutlass.range(rows * k // 128, unroll=1):
                    row = (i * 128 + thread) // k
                    stored[row, thread % k] = source[batch, row, thread % k]
                shared.append(tile)
                stores.append(stored)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            part = mma.get_slice(thread)
            left, right = part.partition_A(shared[0]), mma.make_fragment_B(part.partition_B(shared[1]))
            fragment = mma.make_fragment_A(left)
            if const_expr(self.registers):
                target, origin = cute.recast_tensor(fragment, raw), part.partition_A(stores[0])
                for i in cutlass.range_constexpr(cute.size(target)):
                    target[i] = origin[i]
            sums = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), self.dtype)
            start = part.partition_C(c[batch, None, None])
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = start[i]
            for step in cutlass.range_constexpr(STEPS):
                warpgroup.fence()
                product = cute.make_mma_atom(mma.op)
                product.set(warpgroup.Field.ACCUMULATE, True)
                cute.gemm(product, sums, fragment[None, None, step], right[None, None, step], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                stored = part.partition_C(out[batch, step, None, None])
                for i in cutlass.range_constexpr(cute.size(sums)):
                    stored[i] = sums[i]

    class Packed:
        """``OPERATIONS`` of ``words`` [3, n]; ``out``: int32 [OPERATIONS, n]."""

        @cute.jit
        def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
            self.kernel(x, out).launch(grid=[x.shape[1] // 128, 1, 1], block=[128, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, x: cute.Tensor, out: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            i = block * 128 + thread
            a, b, c = x[0, i], x[1, i], x[2, i]
            for j, text in enumerate(OPERATIONS.values()):
                out[j, i] = Int32(inline_ptx(T.i32(), [a, b, c], text, "=r,r,r,r"))

    return Sums, Packed


@functools.cache
def _compiled(arch: str, kind: str, accumulators: str = "", registers: bool = False) -> Any:
    from lp_fa4.compile import build, fake

    sums, packed = _kernels()
    if kind == "packed":
        return build(arch, packed(), *(fake("int32", (n, 32768), compact=True) for n in (3, len(OPERATIONS))))
    n, stored = len(DATA), {"fp8": "uint8", "fp16": "float16"}[kind]
    sides = [fake(stored, (n, rows, KINDS[kind]), compact=True) for rows in (ROWS, COLUMNS)]
    results = [fake(accumulators, (n, *steps, ROWS, COLUMNS), compact=True) for steps in ((), (STEPS,))]
    return build(arch, sums(kind, accumulators.capitalize(), registers), *sides, *results)


def sums(arch: str, place: Callable[[Tensor], Tensor], kind: str, dtype: torch.dtype) -> Tensor:
    """Accumulators of ``dtype`` after each step, ``[DATA, STEPS, ROWS, COLUMNS]``: the same with A in registers and in shared memory."""
    a, b, c = map(place, operands(kind))
    out = [torch.full((len(DATA), STEPS, ROWS, COLUMNS), float("nan"), dtype=dtype, device=a.device) for _ in range(2)]
    for registers in (False, True):
        _compiled(arch, kind, str(dtype).removeprefix("torch."), registers)(a, b, c.to(dtype), out[registers])
    if not torch.equal(*(x.nan_to_num(-1.0) for x in out)):
        raise AssertionError("A from registers: other sums than with A from shared memory")
    return out[0]


def packed(arch: str, place: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Results of ``OPERATIONS`` on ``words``, int32 ``[32768]``; every NaN as 0x7FFF."""
    x = place(words())
    out = torch.zeros(len(OPERATIONS), x.shape[1], dtype=torch.int32, device=x.device)
    _compiled(arch, "packed")(x, out)
    results = dict(zip(OPERATIONS, out, strict=True))
    for name, result in results.items():
        if name != "to e4m3":
            elements = result.view(torch.int16)
            elements[elements.view(torch.float16).isnan()] = 0x7FFF
    return results


def digest(x: Tensor) -> Tensor:
    """64 numbers that tell int32 tensors apart, and roughly where they differ: weighted sums of pieces, 31 bits of each."""
    weights = torch.randint(1 << 30, (x.numel() // 64,), generator=torch.Generator().manual_seed(40)) * 2 + 1
    return ((x.cpu().long().view(64, -1) & 0xFFFFFFFF) * weights).sum(1) >> 3 & 0x7FFFFFFF
