"""Kernels whose numbers the GPU rounds in its own way: products of E4M3 codes summed in FP16 or FP32, and packed FP16 arithmetic.

``hardware.py`` records what an H200 makes of them. Inputs are drawn on the CPU. Imports the DSL when called.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEPS, ROWS, COLUMNS = 4, 64, 64
DATA = ("normal", "any code", "largest", "smallest")
"""Codes of the products: normal numbers; every pattern, in a few rows NaN too; 256, 288 and their negatives; below 2^-3, subnormal too."""

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


def codes(kind: str, rows: int, seed: int, rows_with_nan: int = 0) -> Tensor:
    """E4M3 codes, uint8 ``[rows, 32 STEPS]``; of NaN only in the first rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, 32 * STEPS)
    anything = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if kind == "normal":
        return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    if kind == "largest":
        return anything & 0x81 | 0x78
    if kind == "smallest":
        return anything & 0x9F
    finite = torch.where((anything & 0x7F) == 0x7F, anything & 0xF0, anything)
    finite[:rows_with_nan] = anything[:rows_with_nan]
    return finite


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[DATA, ROWS, K]`` and ``[DATA, COLUMNS, K]``, accumulators ``[DATA, ROWS, COLUMNS]`` (FP16)."""
    a = torch.stack([codes(kind, ROWS, seed, rows_with_nan=8) for seed, kind in enumerate(DATA)])
    b = torch.stack([codes(kind, COLUMNS, 10 + seed) for seed, kind in enumerate(DATA)])
    generator = torch.Generator().manual_seed(20)
    size = torch.tensor([8.0, 2000.0, 30000.0, 2.0**-14]).view(-1, 1, 1)
    return a, b, (torch.randn(len(DATA), ROWS, COLUMNS, generator=generator) * size).half()


def words() -> Tensor:
    """Three operands of packed arithmetic, int32 ``[3, 32768]``: every FP16 pattern in an order of its own."""
    orders = (torch.randperm(65536, generator=torch.Generator().manual_seed(30 + i)) for i in range(3))
    return torch.stack([order.to(torch.int32).to(torch.int16).view(torch.int32) for order in orders])


def _kernels() -> Any:
    import cutlass
    from cutlass import Float8E4M3FN, Int32, Uint8, const_expr, cute
    from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
    from cutlass.cutlass_dsl import T
    from cutlass.utils import LayoutEnum, hopper_helpers
    from lp_fa4.common.numbers import inline_ptx

    K = 32 * STEPS

    class Sums:
        """One warpgroup a batch: accumulators after each of ``STEPS`` products. ``a``: uint8 [n, ROWS, K], ``b``: uint8 [n, COLUMNS, K],
        ``c``: [n, ROWS, COLUMNS] of the accumulators' dtype, ``out``: [n, STEPS, ROWS, COLUMNS]."""

        def __init__(self, dtype: str, registers: bool):
            self.dtype, self.registers = getattr(cutlass, dtype), registers

        @cute.jit
        def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, stream):
            k = OperandMajorMode.K
            source = warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM
            mma = hopper_helpers.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k, k, self.dtype, (1, 1, 1), (ROWS, COLUMNS), source)
            self.kernel(a, b, c, out, mma).launch(grid=[a.shape[0], 1, 1], block=[128, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, mma: cute.TiledMma):
            thread, _, _ = cute.arch.thread_idx()
            batch, _, _ = cute.arch.block_idx()
            kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, Float8E4M3FN, K)
            atom = warpgroup.make_smem_layout_atom(kind, Float8E4M3FN)
            storage = cutlass.utils.SmemAllocator()
            shared, as_bytes = [], []
            for source, rows in ((a, ROWS), (b, COLUMNS)):
                layout = cute.tile_to_shape(atom, (rows, K), order=(0, 1))
                tile = storage.allocate_tensor(Float8E4M3FN, layout.outer, 1024, layout.inner)
                bytes_of = cute.make_tensor(cute.recast_ptr(tile.iterator, layout.inner, dtype=Uint8), layout.outer)
                for row in cutlass.range(rows, unroll=1):
                    bytes_of[row, thread] = source[batch, row, thread]
                shared.append(tile)
                as_bytes.append(bytes_of)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            part = mma.get_slice(thread)
            left, right = part.partition_A(shared[0]), mma.make_fragment_B(part.partition_B(shared[1]))
            fragment = mma.make_fragment_A(left)
            if const_expr(self.registers):
                target, origin = cute.recast_tensor(fragment, Uint8), part.partition_A(as_bytes[0])
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
def _compiled(arch: str, what: str, registers: bool = False) -> Any:
    from lp_fa4.compile import build, fake

    sums, packed = _kernels()
    if what == "packed":
        return build(arch, packed(), *(fake("int32", (n, 32768), compact=True) for n in (3, len(OPERATIONS))))
    n = len(DATA)
    shapes = [
        ("uint8", (n, ROWS, 32 * STEPS)),
        ("uint8", (n, COLUMNS, 32 * STEPS)),
        (what, (n, ROWS, COLUMNS)),
        (what, (n, STEPS, ROWS, COLUMNS)),
    ]
    name = {"float16": "Float16", "float32": "Float32"}[what]
    return build(arch, sums(name, registers), *(fake(dtype, shape, compact=True) for dtype, shape in shapes))


def sums(arch: str, place: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    """Accumulators of ``dtype`` after each step, ``[DATA, STEPS, ROWS, COLUMNS]``: the same with A in registers and in shared memory."""
    a, b, c = map(place, operands())
    out = [torch.full((len(DATA), STEPS, ROWS, COLUMNS), float("nan"), dtype=dtype, device=a.device) for _ in range(2)]
    for registers in (False, True):
        _compiled(arch, str(dtype).removeprefix("torch."), registers)(a, b, c.to(dtype), out[registers])
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
