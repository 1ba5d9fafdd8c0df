"""Device helpers that both kernels share: the sequence and the scales of a row, codes to BF16."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import bf16x2, e4m3x4_to_float, float_of, inline_ptx

GROUP = 32


def pinned64(x):
    """The same 64 bits, opaque to the compiler."""
    return Int64(inline_ptx(T.i64(), [Int64(x)], "mov.b64 $0, $1;", "=l,l", side_effects=True))


def prefetch_line(address):
    """Ask for one line of global memory in L2."""
    inline_ptx(None, [address], "prefetch.global.L2 [$0];", "l", side_effects=True)


@cute.jit
def search(offsets: cute.Tensor, low: Int32, batch: Int32, token: Int32) -> Int32:
    """The largest ``b`` in ``[low, batch)`` with ``offsets[b] <= token``, given that ``low`` is one. Whole warps, uniform arguments."""
    lane = cute.arch.lane_idx()
    count = batch - low
    while count > 1:
        step = (count + 31) // 32
        probe = low + lane * step
        inside = False
        if probe < low + count:
            inside = Int32(offsets[probe]) <= token
        hits = cute.arch.popc(cute.arch.vote_ballot_sync(inside))
        first = low + (hits - 1) * step
        count = cutlass.min(step, low + count - first)
        low = first
    return low


@cute.jit
def search_alone(offsets: cute.Tensor, low: Int32, high: Int32, token: Int32) -> Int32:
    """The same for one thread, in ``[low, high]``: no step at all where they are equal, as in a tile of one sequence."""
    while low < high:
        middle = (low + high + 1) // 2
        if Int32(offsets[middle]) <= token:
            low = middle
        else:
            high = middle - 1
    return low


def address_of(source: cute.Tensor, row, column):
    """Address of an element of a matrix whose rows are contiguous; 64 bits."""
    item = source.element_type.width // 8
    return source.iterator.toint() + (Int64(row) * Int64(source.stride[0]) + column) * item


@cute.jit
def load_words(address: Int64, out: cute.Tensor):
    """``out``'s words from global memory, aligned to their number of bytes, up to 16."""
    align = min(16, 4 * cute.size(out))
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=align)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(cute.size(out))), out)


def load_byte(address: Int64) -> Int32:
    """One byte of global memory."""
    text = "{.reg .b16 v; ld.global.u8 v, [$1]; cvt.u32.u16 $0, v;}"
    return Int32(inline_ptx(T.i32(), [address], text, "=r,l"))


def scale_address(scale: cute.Tensor, row, static: bool):
    """Address of the first scale of a row; static scales have one row."""
    base = scale.iterator.toint()
    return base if static else base + Int64(row) * scale.shape[1]


def generic_of_shared(address):
    """Generic address of a place in shared memory."""
    return Int64(inline_ptx(T.i64(), [address], "{.reg .u64 a; cvt.u64.u32 a, $1; cvta.shared.u64 $0, a;}", "=l,r"))


@cute.jit
def codes_to_bf16(word, factor: Int32):
    """Four E4M3 codes times a power of two, given as a pair of BF16, as two words of BF16: exact wherever BF16 has the exponent."""
    a, b, c, d = e4m3x4_to_float(Int32(word))
    out = []
    for pair in (bf16x2(a, b), bf16x2(c, d)):
        out.append(Int32(inline_ptx(T.i32(), [pair, factor], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")))
    return out


def bf16_factor(byte: Int32) -> Int32:
    """``2**(byte - 127)`` as a pair of BF16: subnormal for 0, NaN for 255."""
    text = (
        "{.reg .pred p, q; .reg .b32 v; setp.eq.s32 p, $1, 0; setp.eq.s32 q, $1, 255; mul.lo.s32 v, $1, 0x00800080;\n"
        " @p mov.b32 v, 0x00400040; @q mov.b32 v, 0x7FC07FC0; mov.b32 $0, v;}"
    )
    return Int32(inline_ptx(T.i32(), [byte], text, "=r,r"))


@cute.jit
def codes_to_f16(word, factor: Int32):
    """Four E4M3 codes times a power of two, given as a pair of FP16, as two words of FP16."""
    out = []
    for i in cutlass.range_constexpr(2):
        text = f"{{.reg .b16 l, h; .reg .b32 v; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 v, {'lh'[i]}; mul.rn.f16x2 $0, v, $2;}}"
        out.append(Int32(inline_ptx(T.i32(), [Int32(word), factor], text, "=r,r,r")))
    return out


def codes_as_f16(word):
    """Four E4M3 codes as two words of FP16."""
    out = []
    for i in range(2):
        text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {'lh'[i]};}}"
        out.append(Int32(inline_ptx(T.i32(), [Int32(word)], text, "=r,r")))
    return out


@cute.jit
def relative_factor(byte: Int32, top: Int32, head: cutlass.Constexpr) -> Int32:
    """``2**(byte - top + head)`` as a pair of FP16, ``byte <= top``; NaN for byte 255. 0 under 2^-25."""
    exponent = cutlass.max(byte - top + head, -40)
    pair = float_to_pair(float_of((exponent + 127) << 23), float_of((exponent + 127) << 23), True)
    if byte == 255:
        pair = Int32(0x7E007E00)
    return pair


@cute.jit
def pair_to_float(word, half: cutlass.Constexpr):
    """BF16 pair (``half`` False) or FP16 pair to two FP32."""
    if cutlass.const_expr(half):
        out = []
        for i in cutlass.range_constexpr(2):
            text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {'lh'[i]};}}"
            out.append(Float32(inline_ptx(T.f32(), [Int32(word)], text, "=f,r")))
        return out
    low = Float32(inline_ptx(T.f32(), [Int32(word)], "{.reg .b32 v; shl.b32 v, $1, 16; mov.b32 $0, v;}", "=f,r"))
    high = Float32(inline_ptx(T.f32(), [Int32(word)], "{.reg .b32 v; and.b32 v, $1, 0xFFFF0000; mov.b32 $0, v;}", "=f,r"))
    return [low, high]


@cute.jit
def float_to_pair(a, b, half: cutlass.Constexpr):
    """Two FP32 to a pair of BF16 (``half`` False) or FP16."""
    if cutlass.const_expr(half):
        return Int32(inline_ptx(T.i32(), [a, b], "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f"))
    return bf16x2(a, b)
