"""After the backward's main kernel: dQ from tile images to rows. See ``lp_fa4.common.backward_postpass``."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int64, const_expr

from lp_fa4.common import backward_postpass as common
from lp_fa4.common.numbers import effect
from lp_fa4.compile import fake, kernel_cache, symbol
from lp_fa4.sm100.backward_config import STAT_POWER, TILE, stat_values

THREADS = common.THREADS


class Postpass(common.Postpass):
    """Tiles of 128 queries, column sums of dO by tile, powers of two of FP16 sums by query."""

    tile = chunk = TILE

    @cute.jit
    def rows(self, partial, scales, dq, place, factor):
        """16 bytes of an image hold neighbouring columns of a row (see ``backward_reduce``). ``scales``: the pre-pass's statistics, which
        hold the power of two on a row's FP16 sums (where queries are shared, one for all sequences)."""
        d, width = self.head_dim, self.width
        tid, _, _ = cute.arch.thread_idx()
        heads = Int64(dq.shape[1])
        kind = Float16 if self.half else Float32
        size = TILE * d * 16 // width
        source = partial.iterator.toint() + (Int64(place.row) * heads + place.head) * size
        step = Int64(place.rows) * heads * size
        for p in cutlass.range_constexpr(self.rounds):
            piece = tid + THREADS * (self.rounds * place.part + p)
            chunks = d // width
            warp, rest = piece // (32 * chunks), piece % (32 * chunks)
            # neighbouring threads take neighbouring chunks of a row: whole sectors are written
            row, chunk = 32 * warp + rest // chunks, rest % chunks
            where = warp * (32 * chunks) + 32 * chunk + row % 32
            if row < place.left:
                total = cute.make_rmem_tensor(width, Float32)
                total.fill(0.0)
                for r in cutlass.range(place.buffers, unroll=8):
                    pointer = cute.make_ptr(kind, source + Int64(r) * step + 16 * where, cute.AddressSpace.gmem, assumed_align=16)
                    more = cute.make_rmem_tensor(width, kind)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(width)), more)
                    for i in cutlass.range_constexpr(width):
                        total[i] = total[i] + Float32(more[i])
                scale = factor
                if const_expr(self.half):
                    scale = Float32(1.0) / scales[place.row, place.head, STAT_POWER * TILE + row]
                at = dq.iterator.toint() + ((Int64(place.first) + row) * heads + place.head) * (4 * d) + 4 * width * chunk
                for i in cutlass.range_constexpr(0, width, 4):
                    four = [total[i + j] * scale for j in range(4)]
                    effect([at + 4 * i, *four], "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f")


@kernel_cache
def compile_postpass(arch: str, head_dim: int, group: int, jagged: bool, shared: bool, centred: bool, half: bool, offsets_dtype: str):
    """Compile for ``arch``; arguments: ``lp_fa4.common.backward_postpass.build_postpass``. Scales: fp32 ``[tile rows, H, 4 * 128]``."""
    scales = fake("float32", (symbol(), symbol(), stat_values(True) * TILE), compact=True) if half else None
    return common.build_postpass(arch, Postpass(head_dim, group, jagged, shared, centred, half), offsets_dtype, scales)
