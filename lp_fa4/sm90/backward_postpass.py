"""After the backward's main kernel: dQ from accumulator order to rows. See ``lp_fa4.common.backward_postpass``."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int64, const_expr

from lp_fa4.common import backward_postpass as common
from lp_fa4.common.numbers import effect
from lp_fa4.compile import fake, kernel_cache, symbol
from lp_fa4.sm90.backward_layout import CHUNK, QUERY_TILE
from lp_fa4.sm90.backward_ops import bf16x2

THREADS = common.THREADS


class Postpass(common.Postpass):
    """Tiles of 64 queries, column sums of dO by chunks of 512, powers of two of FP16 sums by chunk."""

    tile, chunk = QUERY_TILE, CHUNK

    def splits(self) -> bool:
        """FP16 sums of shared queries have a buffer a sequence."""
        return self.half and self.shared

    @cute.jit
    def rows(self, partial, scales, dq, place, factor):
        """A tile's eight warps' shares follow each other; 16 bytes hold the columns (2t, 2t + 1) of rows g and g + 8 of one block of 8
        columns (FP32) or of two (FP16). ``scales``: what FP16 sums of a chunk must be multiplied by."""
        d, width = self.head_dim, self.width
        tid, _, _ = cute.arch.thread_idx()
        heads = Int64(dq.shape[1])
        size = QUERY_TILE * d * 16 // width
        source = partial.iterator.toint() + (Int64(place.row) * heads + place.head) * size
        step = Int64(place.rows) * heads * size
        for p in cutlass.range_constexpr(self.rounds):
            piece = tid + THREADS * (self.rounds * place.part + p)
            total = cute.make_rmem_tensor(width, Float32)
            total.fill(0.0)
            for r in cutlass.range(place.buffers, unroll=4):
                kind = Float16 if const_expr(self.half) else Float32
                pointer = cute.make_ptr(kind, source + Int64(r) * step + 16 * piece, cute.AddressSpace.gmem, assumed_align=16)
                more = cute.make_rmem_tensor(width, kind)
                cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), more)
                scale = factor
                if const_expr(self.half):
                    scale = scales[place.sums + (r * place.step if const_expr(self.shared) else 0), place.head]
                for i in cutlass.range_constexpr(width):
                    total[i] = total[i] + Float32(more[i]) * scale
            warp, rest = piece // (8 * d // width), piece % (8 * d // width)
            j, lane = rest // 32, rest % 32
            row = 16 * (warp % 4) + lane // 4
            for c in cutlass.range_constexpr(width // 4):
                column = d // 2 * (warp // 4) + 8 * (j * (width // 4) + c) + 2 * (lane % 4)
                for r in cutlass.range_constexpr(2):
                    if row + 8 * r < place.left:
                        at = dq.iterator + cute.crd2idx((place.first + row + 8 * r, place.head, column), dq.layout)
                        two = [total[4 * c + 2 * r], total[4 * c + 2 * r + 1]]
                        if const_expr(dq.element_type == BFloat16):
                            effect([at.toint(), bf16x2(*two)], "st.global.b32 [$0], $1;", "l,r")
                        else:
                            effect([at.toint(), *two], "st.global.v2.f32 [$0], {$1, $2};", "l,f,f")


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
):
    """Compile for ``arch``; arguments: ``lp_fa4.common.backward_postpass.build_postpass``. Scales: fp32 ``[chunk rows, H]``."""
    scales = fake("float32", (symbol(), symbol()), align=4, compact=True) if half else None
    return common.build_postpass(arch, Postpass(head_dim, group, jagged, shared, centred, half), offsets_dtype, scales, dq_dtype)
