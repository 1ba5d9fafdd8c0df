"""Sums of w over a query tile and all that follow it in its sequence: the coherent part of dV where P is not centred by the caller.

The main kernel then multiplies ``P - c`` on every query tile that sees all of a warp's keys, because a sum of one sign loses its last bits
inside the tensor core (0.35% over 512 queries), and adds what it left out: ``sum c * dO8`` over those tiles, which are a suffix of the
sequence's. The pre-pass leaves one such sum a tile; here they become suffix sums, in place, in FP32 and in a fixed order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from lp_fa4.compile import build, fake, fake_offsets, kernel_cache, symbol
from lp_fa4.sm90.backward_layout import QUERY_TILE

AHEAD = 8
"""Tiles whose sums are read before the first is written: latencies overlap."""


class Suffix:
    """One CTA a sequence and head, a thread a column. ``jagged``: queries come from offsets."""

    def __init__(self, head_dim: int, jagged: bool):
        self.head_dim, self.jagged = head_dim, jagged

    @cute.jit
    def __call__(self, sums: cute.Tensor, offsets_q: cute.Tensor, queries: Int32, batch: Int32, stream):
        grid = batch * Int32(sums.shape[1])
        self.kernel(sums, offsets_q, queries).launch(grid=[grid, 1, 1], block=[self.head_dim, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sums: cute.Tensor, offsets_q: cute.Tensor, queries: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        heads = Int32(sums.shape[1])
        b, head = bid // heads, bid % heads
        tiles = (queries + (QUERY_TILE - 1)) // QUERY_TILE
        row = b * tiles
        if const_expr(self.jagged):
            start = Int32(offsets_q[b])
            tiles = (Int32(offsets_q[b + 1]) - start + (QUERY_TILE - 1)) // QUERY_TILE
            row = start // QUERY_TILE + b
        total = Float32(0.0)
        for done in cutlass.range(0, tiles, AHEAD, unroll=1):
            some = cute.make_rmem_tensor(AHEAD, Float32)
            for i in cutlass.range_constexpr(AHEAD):
                some[i] = Float32(0.0)
                if done + i < tiles:
                    some[i] = sums[row + (tiles - 1 - i) - done, head, tid]
            for i in cutlass.range_constexpr(AHEAD):
                total = total + some[i]
                if done + i < tiles:
                    sums[row + (tiles - 1 - i) - done, head, tid] = total


@kernel_cache
def compile_suffix(arch: str, head_dim: int, jagged: bool, offsets_dtype: str):
    """Compile for ``arch``. Arguments: sums, fp32 ``[tile rows, H, D]`` (rows: ``backward_layout``), changed in place; offsets_q (read if
    jagged); queries a sequence (if not jagged); sequences."""
    return build(
        arch,
        Suffix(head_dim, jagged),
        fake("float32", (symbol(), symbol(), head_dim), compact=True),
        fake_offsets(offsets_dtype),
        Int32(1),
        Int32(1),
    )
