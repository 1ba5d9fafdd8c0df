"""A tile of E4M3 codes through shared memory: written by tokens, read by columns.

FP8 wgmma takes operands whose contraction axis is contiguous, so V in P V needs a copy with tokens innermost. The order of a
contraction is free, so each run of 16 tokens is stored in the order in which the other operand's registers hold it:

* ``"accumulator"``: position ``4t + i`` holds token ``2t + (i & 1) + 8 (i >> 1)``: an FP32 accumulator's columns become the FP8 A
  operand by conversions alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from lp_fa4.common.numbers import transpose4x4

ORDERS = {
    "accumulator": tuple(2 * (p // 4) + (p & 1) + 8 * ((p >> 1) & 1) for p in range(16)),
}
"""Position within a run of 16 -> token within the run."""

THREADS = 256
TILE = 128


def shared_words(head_dim: int) -> int:
    """32-bit words of shared memory for one tile."""
    return TILE * head_dim // 4


@cute.jit
def word_index(row: Int32, chunk: Int32, head_dim: cutlass.Constexpr) -> Int32:
    """First word of 16-byte ``chunk`` of token ``row``: chunks are exchanged by run, so that eight runs read one column
    from different banks."""
    return row * (head_dim // 4) + 4 * (chunk ^ ((row >> 4) & (head_dim // 16 - 1)))


@cute.jit
def store_columns(
    tile: cute.Tensor,
    out: cute.Tensor,
    head: Int32,
    position: Int32,
    limit: Int32,
    head_dim: cutlass.Constexpr,
    order: cutlass.Constexpr,
):
    """Write the shared tile's columns to ``out[head, d, position : position + min(128, limit)]`` (``limit`` % 32 == 0).

    ``tile``: words in shared memory at :func:`word_index`. ``out``: uint8 ``[heads, D, positions]``, 16-byte aligned rows.
    """
    tid, _, _ = cute.arch.thread_idx()
    run, group = tid % 8, tid // 8
    perm = ORDERS[order]
    if (group < head_dim // 4) & (16 * run < limit):
        words = cute.make_rmem_tensor((4, 4), Uint32)
        for i in cutlass.range_constexpr(4):
            rows = []
            for j in cutlass.range_constexpr(4):
                row = 16 * run + perm[4 * i + j]
                rows.append(Int32(tile[word_index(row, group // 4, head_dim) + group % 4]))
            columns = transpose4x4(*rows)
            for d in cutlass.range_constexpr(4):
                words[i, d] = Uint32(columns[d])
        for d in cutlass.range_constexpr(4):
            store16(out, (head, 4 * group + d, position + 16 * run), words[None, d])


@cute.jit
def store16(out: cute.Tensor, index, words: cute.Tensor):
    """Store four words at a 16-byte aligned byte index of a uint8 tensor."""
    address = elem_pointer(out, index).toint()
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(4)))


@cute.jit
def load16(source: cute.Tensor, index, words: cute.Tensor):
    """Load four words from a 16-byte aligned byte index of a uint8 tensor."""
    address = elem_pointer(source, index).toint()
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)


def elem_pointer(x, index):
    """Pointer to one element of a tensor, 64-bit offset."""
    return x.iterator + cute.crd2idx(index, x.layout)
