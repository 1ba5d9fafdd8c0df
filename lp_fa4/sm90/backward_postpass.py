"""After the backward's main kernel: dQ from accumulator order to rows. See ``lp_fa4.common.backward_postpass``."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr

from lp_fa4.common import backward_postpass as common
from lp_fa4.common.numbers import effect
from lp_fa4.compile import fake, kernel_cache, symbol
from lp_fa4.sm90.backward_layout import CHUNK, QUERY_TILE
from lp_fa4.sm90.backward_ops import bf16x2

THREADS = common.THREADS


class Postpass(common.Postpass):
    """Tiles of 64 queries, column sums of dO by chunks of 2,048, powers of two of FP16 sums by chunk, or by row where ``grouped``."""

    tile, chunk, shares, grouped = QUERY_TILE, CHUNK, True, False

    def splits(self) -> bool:
        """FP16 sums of shared queries have a buffer a sequence."""
        return self.half and self.shared

    @cute.jit
    def rows(self, partial, scales, dq, place, factor):
        """A tile's eight warps' shares follow each other; 16 bytes hold the columns (2t, 2t + 1) of rows g and g + 8 of one block of 8
        columns (FP32) or of two (FP16). ``scales``: what FP16 sums of a chunk, or of a row and buffer, must be multiplied by.

        A warp takes a share (a part of one where a tile has several CTAs): all loads before the first store."""
        d, width = self.head_dim, self.width
        tid, _, _ = cute.arch.thread_idx()
        heads, kind = Int64(dq.shape[1]), Float16 if const_expr(self.half) else Float32
        size = QUERY_TILE * d * 16 // width
        source = partial.iterator.toint() + (Int64(place.row) * heads + place.head) * size
        step, pieces = Int64(place.rows) * heads * size, 8 * d // width
        piece = tid + THREADS * place.part if const_expr(self.splits()) else tid // 32 * pieces + tid % 32
        warp, rest = piece // pieces, piece % pieces
        lane = rest % 32
        line = 16 * (warp % 4) + lane // 4  # first of the two rows of this thread's values
        total = cute.make_rmem_tensor((width, self.rounds), Float32)
        total.fill(0.0)
        for r in cutlass.range(place.buffers, unroll=16 if self.splits() else 1):
            more = cute.make_rmem_tensor((width, self.rounds), kind)
            for p in cutlass.range_constexpr(self.rounds):
                pointer = cute.make_ptr(kind, source + Int64(r) * step + 16 * (piece + 32 * p), cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), more[None, p])
            scale = [factor] * 2
            if const_expr(self.grouped):
                scale = [scales[place.row + r * place.rows, place.head, line + 8 * i] for i in range(2)]
            elif const_expr(self.half):
                scale = [scales[place.sums + (r * place.step if const_expr(self.shared) else 0), place.head]] * 2
            for i in cutlass.range_constexpr(width * self.rounds):
                total[i] = total[i] + Float32(more[i]) * scale[i // 2 % 2]
        first = rest // 32 * (width // 4)  # block of eight columns of the first value
        column = d // 2 * (warp // 4) + 8 * first
        for r in cutlass.range_constexpr(2):
            row = line + 8 * r
            at = (dq.iterator + cute.crd2idx((place.first + row, place.head, column), dq.layout)).toint()
            values = [(total[4 * i + 2 * r], total[4 * i + 2 * r + 1]) for i in range(width // 4 * self.rounds)]
            if const_expr(dq.element_type == BFloat16 and len(values) % 4 == 0):
                for q in cutlass.range_constexpr(len(values) // 4):
                    words = transposed_in_quads([bf16x2(*two) for two in values[4 * q : 4 * q + 4]])
                    if row < place.left:
                        effect([at + 16 * (4 * q + lane % 4), *words], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")
            elif row < place.left:
                for i, two in enumerate(values):
                    if const_expr(dq.element_type == BFloat16):
                        effect([at + 16 * i + 4 * (lane % 4), bf16x2(*two)], "st.global.b32 [$0], $1;", "l,r")
                    else:
                        effect([at + 32 * i + 8 * (lane % 4), *two], "st.global.v2.f32 [$0], {$1, $2};", "l,f,f")


def transposed_in_quads(words):
    """Lane t of each four neighbours has word t of four blocks; it gets the four words of block t."""
    lane = cute.arch.lane_idx()
    odd, upper = lane % 2 == 1, lane // 2 % 2 == 1

    def pick(condition, a, b):
        return Int32(cutlass.select_(condition, a, b))

    def swap(a, b, condition, distance):
        """(what this lane keeps of a and b, what its partner sends of the same)."""
        return pick(condition, b, a), Int32(cute.arch.shuffle_sync_bfly(pick(condition, a, b), offset=distance))

    halves = []
    for i in (0, 2):  # blocks (0, 1), then (2, 3): this lane keeps the one of its own parity
        mine, other = swap(words[i], words[i + 1], odd, 1)
        halves.append((pick(odd, other, mine), pick(odd, mine, other)))
    pairs = [swap(halves[0][i], halves[1][i], upper, 2) for i in range(2)]
    return [pick(upper, other, mine) for mine, other in pairs] + [pick(upper, mine, other) for mine, other in pairs]


@kernel_cache
def compile_postpass(
    arch: str,
    head_dim: int,
    group: int,
    jagged: bool,
    shared: bool,
    centred: bool,
    half: bool,
    offsets_dtype: str,
    dq_dtype: str = "float32",
    grouped: bool = False,
):
    """Compile for ``arch``; arguments: ``lp_fa4.common.backward_postpass.build_postpass``. Scales: fp32 ``[chunk rows, H]``, or where
    ``grouped`` ``[tile rows of all buffers, H, 64]``."""
    scales = fake("float32", (symbol(), symbol(), *[QUERY_TILE] * grouped), align=4, compact=True) if half else None
    kernel = Postpass(head_dim, group, jagged, shared, centred, half)
    kernel.grouped = grouped
    return common.build_postpass(arch, kernel, offsets_dtype, scales, dq_dtype)
