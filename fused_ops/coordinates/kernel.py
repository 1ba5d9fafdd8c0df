"""``balanced_coordinates`` in one launch, a CTA a head: in plain PyTorch it is some fifty launches of a few microseconds.

Every product is of two symmetric matrices that commute (polynomials of one), or of the warp's own rows and such a one: a warp owns 16 rows,
and in shared memory a matrix and its transpose are the same. The queries' covariance and ``E``, the difference of both, are of two parts,
16 and 22 bits: their last bits depend on who projected the queries, and a coarser rounding would make much of little. ``R + s R E`` and its
inverse are of the same ``E``; rounding its powers to FP16 leaves 2^-12 of ``(s E)^2`` in the inverse. The weights' covariance is a sum of
BF16 products.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32
from torch import Tensor

from fused_ops.coordinates.reference import LEAST, REACH, STEP
from lp_fa4.common.bundle import Bundle
from lp_fa4.common.matrices import load_matrices, warp_mma
from lp_fa4.common.numbers import bf16x2, f16x2
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, symbol

CHUNK = 128
"""Rows of q, or columns of the weight, that are added to a covariance at a time."""
PAD = 8
"""16-bit elements between two rows of shared memory: eight rows of 16 bytes then lie in different banks."""
TILES = 5
"""Matrices in shared memory, one after the other: E in two parts, R, E^2, and a warp's rows of what it multiplies."""
UNIT = 64.0
"""What E's elements are multiples of when they are split, so that what FP16 leaves of them is no subnormal."""


class BalancedCoordinates:
    """Heads of ``width`` channels; ``rotate``: with the Hadamard matrix, or the identity in its place."""

    def __init__(self, width: int, rotate: bool):
        self.width, self.rotate = width, rotate
        self.warps, self.pitch = width // 16, width + PAD
        self.threads = 32 * self.warps

    @cute.jit
    def __call__(self, q: cute.Tensor, w: cute.Tensor, gain: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor, stream):
        self.kernel(q, w, gain, keys, queries).launch(grid=[Int32(q.shape[1]), 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, q: cute.Tensor, w: cute.Tensor, gain: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor):
        width, pitch = self.width, self.pitch
        tid, _, _ = cute.arch.thread_idx()
        head, _, _ = cute.arch.block_idx()
        tile = max(CHUNK * pitch, width * (CHUNK + PAD))

        @cute.struct
        class Storage:
            tiles: cute.struct.Align[cute.struct.MemRange[BFloat16, TILES * tile], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, 4 * self.warps], 16]

        store = cutlass.utils.SmemAllocator().allocate(Storage)
        base = Int32(store.tiles.data_ptr().toint())
        sums = store.sums.get_tensor(cute.make_layout((self.warps, 4)))
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        at = Bundle(tid=tid, lane=lane, warp=warp, head=head, row=warp * 16 + lane // 4, column=2 * (lane % 4), base=base, tile=2 * tile)
        of_queries, of_keys = (cute.make_rmem_tensor(width // 2, Float32) for _ in range(2))
        of_queries.fill(0.0)
        of_keys.fill(0.0)
        self.add_queries(q, of_queries, at)
        cute.arch.sync_threads()
        self.add_keys(w, gain, of_keys, at)
        traces = self.totals([self.trace(of_queries, at), self.trace(of_keys, at)], sums, 0, at)
        factors = [width / cute.arch.fmax(trace, Float32(LEAST)) for trace in traces]
        apart = of_queries
        size = Float32(0.0)
        for i in cutlass.range_constexpr(width // 2):
            apart[i] = of_queries[i] * factors[0] - of_keys[i] * factors[1]
        self.symmetrize(apart, at)
        for i in cutlass.range_constexpr(width // 2):
            size = size + apart[i] * apart[i]
        size = self.totals([size], sums, 2, at)[0]
        inverse = Float32(0.0)
        if (size > 0.0) & (size < Float32(3e38)):
            inverse = cute.math.rsqrt(size)
        rest = cute.make_rmem_tensor(width // 2, Float32)
        for i in cutlass.range_constexpr(width // 2):
            apart[i] = apart[i] * (UNIT * inverse) if inverse > 0.0 else Float32(0.0)
            rest[i] = apart[i] - apart[i].to(Float16).to(Float32)
        # E = apart / |apart| in two parts, its square and its fourth power; |E|'s largest eigenvalue from the latter
        high, low, turn, second = (at.base + n * at.tile for n in range(4))
        self.put(apart, high, at)
        self.put(rest, low, at)
        self.put_rotation(turn, at)
        cute.arch.sync_threads()
        turned, square, fourth = (cute.make_rmem_tensor(width // 2, Float32) for _ in range(3))
        turned.fill(0.0)
        square.fill(0.0)
        fourth.fill(0.0)
        self.multiply(turned, turn, high, at)
        self.multiply(turned, turn, low, at)
        self.multiply(square, high, high, at)
        self.multiply(square, high, low, at)
        self.multiply(square, low, high, at)
        for i in cutlass.range_constexpr(width // 2):
            square[i] = square[i] * UNIT**-2
        self.put(square, second, at)
        cute.arch.sync_threads()
        self.multiply(fourth, second, second, at)
        power = Float32(0.0)
        for i in cutlass.range_constexpr(width // 2):
            power = power + fourth[i] * fourth[i]
        power = self.totals([power], sums, 3, at)[0]
        # s = c |apart|, c = min(STEP, REACH / (|apart| |E|))
        s = Float32(0.0)
        if inverse > 0.0:
            s = cutlass.min(STEP * size * inverse, REACH / cute.math.sqrt(cute.math.sqrt(cute.math.sqrt(power))))
        self.finish(turned, fourth, s, keys, queries, at)

    @cute.jit
    def finish(self, turned, fourth, s, keys, queries, at):
        """``keys = R (1 + s E)`` and ``queries = R (1 - s E) (1 + s^2 E^2) (1 + s^4 E^4) …`` up to the 16th power."""
        scale = s * ((self.width**-0.5 if self.rotate else 1.0) / UNIT)
        x, forward = turned, cute.make_rmem_tensor(self.width // 2, Float32)
        for i in cutlass.range_constexpr(self.width // 2):
            one = self.entry(at.row + 8 * (i // 2 % 2), at.column + 8 * (i // 4) + i % 2)
            forward[i], x[i] = one + turned[i] * scale, one - turned[i] * scale
        self.write(forward, keys, at)
        own, square = at.base + 4 * at.tile, s * s
        power = cute.make_rmem_tensor(self.width // 2, Float32)
        for i in cutlass.range_constexpr(self.width // 2):
            power[i] = x[i] * square
        self.put(power, own, at)
        cute.arch.sync_warp()
        self.multiply(x, own, at.base + 3 * at.tile, at)
        for i in cutlass.range_constexpr(self.width // 2):
            power[i] = fourth[i] * (square * square)
        for turn in cutlass.range(3, unroll=1):
            place = at.base + turn % 2 * (3 * at.tile)  # E's, then its square's: everybody has read them
            self.put(power, place, at)
            cute.arch.sync_warp()  # before a lane overwrites what the warp's others have read
            self.put(x, own, at)
            cute.arch.sync_threads()
            self.multiply(x, own, place, at)
            power.fill(0.0)
            if turn < 2:
                self.multiply(power, place, place, at)
        self.write(x, queries, at)

    # ---- covariances -------------------------------------------------------------------------------------------------

    @cute.jit
    def add_queries(self, q: cute.Tensor, acc: cute.Tensor, at):
        """``acc += hi^T (hi + 2 lo)`` of ``q[:, head] = hi + lo``: twice the covariance's half, of which the other is its transpose."""
        rows, passes = Int32(q.shape[0]), CHUNK * self.width // (4 * self.threads)
        part, line, step = at.tid % (self.width // 4), at.tid // (self.width // 4), 4 * self.threads // self.width
        held = cute.make_rmem_tensor((4, passes), Float32)
        self.load_queries(q, held, line, part, step, at)
        chunk = Int32(0)
        for begin in cutlass.range(0, rows, CHUNK, unroll=1):
            place = at.base + chunk % 2 * (2 * at.tile)
            for p in cutlass.range_constexpr(passes):
                self.store(held, p, place + 2 * ((line + step * p) * self.pitch + 4 * part))
                for i in cutlass.range_constexpr(4):
                    held[i, p] = 2.0 * (held[i, p] - held[i, p].to(BFloat16).to(Float32))
                self.store(held, p, place + at.tile + 2 * ((line + step * p) * self.pitch + 4 * part))
            cute.arch.sync_threads()
            self.load_queries(q, held, begin + CHUNK + line, part, step, at)
            for k in cutlass.range(CHUNK // 16, unroll=1):
                row = 16 * k + at.lane // 16 * 8 + at.lane % 8
                a = load_matrices(place + 2 * (row * self.pitch + at.warp * 16 + at.lane // 8 % 2 * 8), transposed=True)
                row = 16 * k + at.lane // 8 % 2 * 8 + at.lane % 8
                for j in cutlass.range_constexpr(self.width // 16):
                    for rest in cutlass.range_constexpr(2):
                        b = load_matrices(place + rest * at.tile + 2 * (row * self.pitch + 16 * j + at.lane // 16 * 8), transposed=True)
                        warp_mma("bf16", acc, 8 * j, a, b[0], b[1])
                        warp_mma("bf16", acc, 8 * j + 4, a, b[2], b[3])
            chunk = chunk + 1

    @cute.jit
    def load_queries(self, q: cute.Tensor, held: cute.Tensor, row, part, step: cutlass.Constexpr, at):
        """Four channels of every ``step``-th row from ``row`` on; 0 past the last."""
        for p in cutlass.range_constexpr(cute.size(held) // 4):
            values = cute.make_rmem_tensor(4, Float32)
            values.fill(0.0)
            if row + step * p < Int32(q.shape[0]):
                self.load(q, (row + step * p, at.head, 4 * part), values)
            for i in cutlass.range_constexpr(4):
                held[i, p] = values[i]

    @cute.jit
    def add_keys(self, w: cute.Tensor, gain: cute.Tensor, acc: cute.Tensor, at):
        """``acc += (w gain) (w gain)^T`` of the head's rows."""
        columns, passes = Int32(w.shape[1]), CHUNK * self.width // (4 * self.threads)
        part, line, step = at.tid % (CHUNK // 4), at.tid // (CHUNK // 4), 4 * self.threads // CHUNK
        held = cute.make_rmem_tensor((4, passes), Float32)
        self.load_keys(w, gain, held, line, 4 * part, step, at)
        pitch, chunk = CHUNK + PAD, Int32(0)
        for begin in cutlass.range(0, columns, CHUNK, unroll=1):
            place = at.base + chunk % 2 * at.tile
            for p in cutlass.range_constexpr(passes):
                self.store(held, p, place + 2 * ((line + step * p) * pitch + 4 * part))
            cute.arch.sync_threads()
            self.load_keys(w, gain, held, line, begin + CHUNK + 4 * part, step, at)
            for k in cutlass.range(CHUNK // 16, unroll=1):
                a = load_matrices(self.own(place, pitch, k, at))
                for j in cutlass.range_constexpr(self.width // 16):
                    b = load_matrices(self.other(place, pitch, k, j, at))
                    warp_mma("bf16", acc, 8 * j, a, b[0], b[1])
                    warp_mma("bf16", acc, 8 * j + 4, a, b[2], b[3])
            chunk = chunk + 1

    @cute.jit
    def load_keys(self, w: cute.Tensor, gain: cute.Tensor, held: cute.Tensor, line, column, step: cutlass.Constexpr, at):
        """Four columns of every ``step``-th row of the head times their gains; 0 past the last column."""
        held.fill(0.0)
        if column < Int32(w.shape[1]):
            for p in cutlass.range_constexpr(cute.size(held) // 4):
                values = cute.make_rmem_tensor(4, w.element_type)
                self.load(w, (at.head * self.width + line + step * p, column), values)
                for i in cutlass.range_constexpr(4):
                    held[i, p] = values[i].to(Float32) * gain[column + i].to(Float32)

    @cute.jit
    def symmetrize(self, acc: cute.Tensor, at):
        """The mean of a matrix and its transpose, by way of shared memory that nobody reads any more."""
        pitch = self.width + 1
        words = cute.make_tensor(
            cute.make_ptr(Float32, at.base, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(pitch * self.width)
        )
        for i in cutlass.range_constexpr(self.width // 2):
            row, column = at.row + 8 * (i // 2 % 2), at.column + 8 * (i // 4) + i % 2
            words[row * pitch + column] = acc[i]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(self.width // 2):
            row, column = at.row + 8 * (i // 2 % 2), at.column + 8 * (i // 4) + i % 2
            acc[i] = 0.5 * (acc[i] + words[column * pitch + row])
        cute.arch.sync_threads()

    # ---- pieces ------------------------------------------------------------------------------------------------------

    def load(self, source: cute.Tensor, place, values: cute.Tensor):
        """Four elements that lie side by side."""
        kind = source.element_type
        address = (source.iterator + cute.crd2idx(place, source.layout)).toint()
        pointer = cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 2)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), values)

    def store(self, held: cute.Tensor, p: int, address):
        """Four of them as BF16 to shared memory."""
        words = cute.make_rmem_tensor(2, Int32)
        words[0], words[1] = bf16x2(held[0, p], held[1, p]), bf16x2(held[2, p], held[3, p])
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=8)
        cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(2)))

    def own(self, place, pitch: int, k, at):
        """A lane's row of the warp's operand: 16 rows, 16 of the contraction."""
        return place + 2 * ((at.warp * 16 + at.lane % 16) * pitch + 16 * k + at.lane // 16 * 8)

    def other(self, place, pitch: int, k, j: int, at):
        """A lane's row of the other operand: 16 columns of the result, 16 of the contraction."""
        return place + 2 * ((16 * j + at.lane // 16 * 8 + at.lane % 8) * pitch + 16 * k + at.lane // 8 % 2 * 8)

    @cute.jit
    def put_rotation(self, place, at):
        """A warp's rows of the Hadamard matrix times sqrt(width) to shared memory, as :meth:`put`."""
        for i in cutlass.range_constexpr(self.width // 4):
            row, column = at.row + 8 * (i % 2), at.column + 8 * (i // 2)
            self.word(self.half(row, column) | (self.half(row, column + 1) << 16), place + 2 * (row * self.pitch + column))

    def half(self, row, column):
        """An entry as FP16 bits: 1 or -1, or the identity's."""
        if self.rotate:
            return Int32(0x3C00) | ((cute.arch.popc(row & column) & 1) << 15)
        return (1 - cutlass.min(row ^ column, 1)) * 0x3C00

    def entry(self, row, column):
        """An entry of R."""
        if self.rotate:
            return (1 - 2 * (cute.arch.popc(row & column) & 1)).to(Float32) * self.width**-0.5
        return (1 - cutlass.min(row ^ column, 1)).to(Float32)

    @cute.jit
    def put(self, acc: cute.Tensor, place, at):
        """A warp's rows as FP16 to shared memory."""
        for i in cutlass.range_constexpr(self.width // 4):
            row, column = at.row + 8 * (i % 2), at.column + 8 * (i // 2)
            self.word(f16x2(acc[2 * i], acc[2 * i + 1]), place + 2 * (row * self.pitch + column))

    def word(self, value, address):
        """A word to shared memory."""
        word = cute.make_rmem_tensor(1, Int32)
        word[0] = value
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
        cute.autovec_copy(word, cute.make_tensor(pointer, cute.make_layout(1)))

    @cute.jit
    def multiply(self, acc: cute.Tensor, left, right, at):
        """``acc += left @ right``: the warp's rows of one matrix in shared memory, a symmetric one as the other. In a loop: each line runs
        once a launch, and fetching it takes longer."""
        for k in cutlass.range(self.width // 16, unroll=1):
            a = load_matrices(self.own(left, self.pitch, k, at))
            for j in cutlass.range_constexpr(self.width // 16):
                b = load_matrices(self.other(right, self.pitch, k, j, at))
                warp_mma("f16", acc, 8 * j, a, b[0], b[1])
                warp_mma("f16", acc, 8 * j + 4, a, b[2], b[3])

    @cute.jit
    def write(self, acc: cute.Tensor, out: cute.Tensor, at):
        """A warp's rows to a head's matrix."""
        for i in cutlass.range_constexpr(self.width // 4):
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = acc[2 * i], acc[2 * i + 1]
            place = (at.head, at.row + 8 * (i % 2), at.column + 8 * (i // 2))
            address = (out.iterator + cute.crd2idx(place, out.layout)).toint()
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=8)
            cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))

    @cute.jit
    def trace(self, acc: cute.Tensor, at):
        """A thread's part of the trace."""
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.width // 2):
            if at.row + 8 * (i // 2 % 2) == at.column + 8 * (i // 4) + i % 2:
                total = total + acc[i]
        return total

    @cute.jit
    def totals(self, parts: cutlass.Constexpr, sums: cute.Tensor, slot: cutlass.Constexpr, at):
        """Sums over the CTA of a thread's ``parts``, in a fixed order. Each slot is used once."""
        for n in cutlass.range_constexpr(len(parts)):
            value = parts[n]
            for shift in cutlass.range_constexpr(5):
                value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << shift)
            if at.lane == 0:
                sums[at.warp, slot + n] = value
        cute.arch.sync_threads()
        out = []
        for n in cutlass.range_constexpr(len(parts)):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.warps):
                total = total + sums[i, slot + n]
            out.append(total)
        return out


@kernel_cache
def _compile_balanced_coordinates(arch: str, width: int, rotate: bool, dtype: str, gain_dtype: str):
    rows, heads, columns = symbol(), symbol(), symbol(4)
    align = 8 if dtype != "float32" else 16
    return build(
        arch,
        BalancedCoordinates(width, rotate),
        fake("float32", (rows, heads, width)),
        fake(dtype, (symbol(), columns), align=align, compact=True),
        fake(gain_dtype, (columns,), align=2),
        fake("float32", (heads, width, width), compact=True),
        fake("float32", (heads, width, width), compact=True),
    )


def balanced_coordinates(q: Tensor, w: Tensor, gain: Tensor, rotate: bool) -> tuple[Tensor, Tensor]:
    """The reference's operation on a GPU."""
    _, heads, width = q.shape
    if q.stride(2) != 1 or q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    if not w.is_contiguous() or w.data_ptr() % (4 * w.element_size()):
        w = w.clone(memory_format=torch.contiguous_format)
    keys, queries = (torch.empty(heads, width, width, dtype=torch.float32, device=q.device) for _ in range(2))
    compiled = _compile_balanced_coordinates(arch_of(q.device), width, rotate, dtype_name(w), dtype_name(gain))
    launch(compiled, q.device, q, w, gain.contiguous(), keys, queries)
    return keys, queries
