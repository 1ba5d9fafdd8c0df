"""dK and dV of a key tile from tensor memory to global memory, BF16 or MXFP8. The reduction warps do it, under the
products of the next key tile; a thread owns a row (key)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from lp_fa4.common.numbers import bf16x2, byte_of_amax_bits, e4m3x4, effect, inverse_of_byte
from lp_fa4.sm100.atoms import load_columns
from lp_fa4.sm100.backward_work import block_amax

BLOCK = 32


@cute.jit
def store_gradients(kernel: cutlass.Constexpr, args, bars, tmem, item, thread: Int32):
    """Read dV, then dK, and write the rows that exist. Each may be overwritten as soon as it is in registers: dV is wanted first."""
    bar = kernel.barriers
    live = item.row + thread < item.keys
    store(kernel, args.dv, args.dv_scale, args, tmem, "dV", Float32(1.0), item, thread, live, bars + bar.dv_read)
    store(kernel, args.dk, args.dk_scale, args, tmem, "dK", args.dk_factor, item, thread, live, bars + bar.dk_read)


@cute.jit
def store(kernel: cutlass.Constexpr, target, scales, args, tmem, name: cutlass.Constexpr, factor, item, thread, live, barrier):
    """One gradient, 32 columns at a time, times ``factor``; ``barrier``: it has been read."""
    spec = kernel.spec
    size = 1 if spec.mxfp8 else 2
    row = row_address(target, args, item, thread, spec.head_dim * size)
    group_row = item.first_key // BLOCK + item.sequence + item.row // BLOCK + thread // BLOCK
    for c in cutlass.range_constexpr(spec.head_dim // BLOCK):
        values = load_columns(tmem, kernel.plan[name].start + c * BLOCK, BLOCK, thread)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(c == spec.head_dim // BLOCK - 1):
            kernel.arrive_read(barrier)
        for i in cutlass.range_constexpr(BLOCK):
            values[i] = values[i] * factor
        words = cute.make_rmem_tensor(BLOCK * size // 4, Int32)
        if const_expr(spec.mxfp8):
            byte = byte_of_amax_bits(block_amax(values, live))
            inverse = inverse_of_byte(byte)
            for i in cutlass.range_constexpr(BLOCK // 4):
                word = e4m3x4(*[values[4 * i + j] * inverse for j in range(4)])
                words[i] = word if byte < 255 else Int32(0)
            if thread % BLOCK == 0 and live:
                at = scales + (Int64(group_row) * args.kv_heads + item.head) * (spec.head_dim // BLOCK) + c
                effect([at, byte], "{.reg .b16 h; cvt.u16.u32 h, $1; st.global.b8 [$0], h;}", "l,r")
        else:
            for i in cutlass.range_constexpr(BLOCK // 2):
                words[i] = bf16x2(values[2 * i], values[2 * i + 1])
        if live:
            for i in cutlass.range_constexpr(0, BLOCK * size // 4, 4):
                four = [words[i + j] for j in range(4)]
                effect([row + (c * BLOCK * size + 4 * i), *four], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")


@cute.jit
def store_zeros(kernel: cutlass.Constexpr, args, item, thread: Int32):
    """dV and dK of a key tile that no query sees."""
    size = kernel.spec.head_dim * (1 if kernel.spec.mxfp8 else 2)
    if item.row + thread < item.keys:
        for base in (args.dv, args.dk):
            row = row_address(base, args, item, thread, size)
            for i in cutlass.range_constexpr(size // 16):
                effect([row + 16 * i], "{.reg .b32 z; mov.b32 z, 0; st.global.v4.b32 [$0], {z, z, z, z};}", "l")


@cute.jit
def row_address(base: Int64, args, item, thread, size: cutlass.Constexpr):
    """Address of this thread's row of dK or dV."""
    return base + (Int64(item.first_key + item.row + thread) * args.kv_heads + item.head) * size
