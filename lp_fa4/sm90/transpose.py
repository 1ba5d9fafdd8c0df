"""Copies of E4M3 operands with tokens innermost (why: ``tile_transpose``), and square blocks re-coded on the way.

:func:`transposed_copy` maps codes ``[T, H, D]`` to ``[H, D, 32 * (T // 32 + B)]``: sequence ``b`` starts at position
``32 * (offsets[b] // 32 + b)``, each run of 16 tokens in the given order, every position that holds no token 0.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32
from torch import Tensor

from lp_fa4.common.sequence import TILE, find_sequence, region_groups
from lp_fa4.compile import arch_of, build, dtype_name, fake, fake_offsets, kernel_cache, launch, symbol
from lp_fa4.mx.layout import group_rows
from lp_fa4.sm90.tile_transpose import ORDERS, THREADS, load16, shared_words, store_columns, word_index


class TransposeCodes:
    """One CTA per 128-token tile (tile rule) and head: load codes by tokens, store them by columns."""

    def __init__(self, head_dim: int, order: str):
        self.head_dim, self.order = head_dim, order

    @cute.jit
    def __call__(self, codes: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, stream):
        heads = Int32(codes.shape[1])
        tiles = Int32(codes.shape[0]) // TILE + Int32(offsets.shape[0]) - 1
        self.kernel(codes, offsets, out, heads).launch(grid=[tiles * heads, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, codes: cute.Tensor, offsets: cute.Tensor, out: cute.Tensor, heads: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        tile_row, head = bid // heads, bid % heads
        batch = Int32(offsets.shape[0]) - 1
        smem = cutlass.utils.SmemAllocator()
        tile = smem.allocate_tensor(Uint32, cute.make_layout(shared_words(self.head_dim)), byte_alignment=16)
        b = find_sequence(offsets, batch, tile_row, TILE)
        begin, end = Int32(offsets[b]), Int32(offsets[b + 1])
        first = TILE * (tile_row - (begin // TILE + b))  # tokens of the sequence before this tile
        chunks = self.head_dim // 16
        for i in cutlass.range_constexpr(TILE * chunks // THREADS):
            row, chunk = (tid + i * THREADS) // chunks, (tid + i * THREADS) % chunks
            words = cute.make_rmem_tensor(4, Uint32)
            words.fill(0)
            if begin + first + row < end:
                load16(codes, (begin + first + row, head, 16 * chunk), words)
            at = word_index(row, chunk, self.head_dim)
            for j in cutlass.range_constexpr(4):
                tile[at + j] = words[j]
        cute.arch.sync_threads()
        region = 32 * region_groups(offsets, batch, b, Int32(out.shape[2]) // 32)
        position = 32 * (begin // 32 + b) + first
        store_columns(tile, out, head, position, region - first, self.head_dim, self.order)


@kernel_cache
def _compile_transpose(arch: str, offsets_dtype: str, head_dim: int, order: str):
    heads = symbol()
    return build(
        arch,
        TransposeCodes(head_dim, order),
        fake("uint8", (symbol(), heads, head_dim)),
        fake_offsets(offsets_dtype),
        fake("uint8", (heads, head_dim, symbol(32))),
    )


def transposed_copy(codes: Tensor, offsets: Tensor, order: str) -> Tensor:
    """Codes ``[T, H, D]`` (uint8, rows 16-byte aligned) to ``[H, D, 32 * (T // 32 + B)]``, uint8; D is 64 or 128.

    ``offsets``: int ``[B + 1]``. ``order``: a key of ``tile_transpose.ORDERS``. Bitwise: codes are moved, not
    changed. Positions without a token, the slack past ``offsets[-1]`` included, are 0.
    """
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; allowed are {', '.join(map(repr, ORDERS))}")
    tokens, heads, head_dim = codes.shape
    batch = offsets.shape[0] - 1
    positions = 32 * group_rows(tokens, batch)
    out = torch.empty(heads, head_dim, positions, dtype=torch.uint8, device=codes.device)
    if batch == 0:
        return out.zero_()  # spare rows alone, too few for a tile perhaps: nothing to launch
    if positions and heads:
        compiled = _compile_transpose(arch_of(codes.device), dtype_name(offsets), head_dim, order)
        launch(compiled, codes.device, codes, offsets, out)
    return out
