"""The least a kernel needs to read two operands once: what few queries are compared with, timed in the same ways.

The peak of memory says nothing of a launch, of the first byte's way and of the last one's. So kernels that do nothing but read are timed
beside the attention, in several forms (``READS``); the fastest one of a manner is that manner's yardstick.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from torch import Tensor

from lp_fa4.common.numbers import effect, inline_ptx
from lp_fa4.compile import arch_of, build, fake, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.sm90.forward_few import READ_ONCE

UNLIKELY = 0x5A3C96E1
"""What words must come to for a thread to store them: so hardly anything is stored, and no load is dead."""


@dataclass(frozen=True)
class ReadSpec:
    """A form of reading.

    Attributes:
        piece: bytes of a bulk copy, or those that a CTA's threads load at a time, 16 each.
        pieces: of a CTA, under way at once: places in shared memory of bulk copies, or loads of a thread into registers.
        threads: of a CTA that loads into registers; 0: bulk copies, which one thread issues and awaits.
        ctas: CTAs a multiprocessor, each of which goes on until nothing is left; 0: as many CTAs as it takes, and none goes on.
        once: what is read leaves L2 first.
    """

    piece: int
    pieces: int
    threads: int = 0
    ctas: int = 0
    once: bool = True

    def grid(self, size: int, multiprocessors: int) -> int:
        """CTAs for two tensors of ``size`` bytes each. ``ValueError`` unless that is a multiple of what is read at a time."""
        run = self.piece * self.pieces
        unit = run if self.threads else self.piece
        if size % unit:
            raise ValueError(f"{size} bytes are no multiple of {unit}")
        most = -(-2 * size // run)
        return min(most, self.ctas * multiprocessors) if self.ctas else most


def forms() -> dict[str, ReadSpec]:
    """What is tried."""
    found = {f"bulk, {n} x {kb} KB": ReadSpec(kb << 10, n) for kb, n in ((32, 2), (16, 4), (16, 2), (32, 1))}
    for kb, n, ctas in ((8, 8, 3), (16, 4, 3), (16, 8, 1)):
        found[f"bulk, ring of {n} x {kb} KB, {ctas} a multiprocessor"] = ReadSpec(kb << 10, n, ctas=ctas)
    for threads, n in ((256, 8), (512, 8), (512, 4), (1024, 4)):
        found[f"words, {threads} threads, {n} each"] = ReadSpec(16 * threads, n, threads)
    found["words, 512 threads, 8 at once, 2 a multiprocessor"] = ReadSpec(8192, 8, 512, ctas=2)
    return found


EVICTING = ReadSpec(4096, 8, 256, once=False)
"""Fills L2. What it reads was not written just before, so nothing is on its way back to memory afterwards."""


@dsl_user_op
def words_at(place, once: bool, *, loc=None, ip=None) -> list[Int32]:
    """The four words at an address of device memory that nobody writes meanwhile."""
    hint, policy = (".L2::cache_hint", ", $5") if once else ("", "")
    text = f"ld.global.nc.L1::no_allocate{hint}.v4.b32 {{$0, $1, $2, $3}}, [$4]{policy};"
    four = llvm.StructType.get_literal([T.i32()] * 4)
    loaded = inline_ptx(four, [Int64(place), Int64(READ_ONCE)], text, "=r,=r,=r,=r,l,l", loc=loc, ip=ip)
    return [Int32(llvm.extractvalue(T.i32(), loaded, [i], loc=loc, ip=ip)) for i in range(4)]


class Read:
    """Reads two tensors of one size; ``sink`` is not written but once in 2**32 words. A dependent launch, as the attention's are: it waits
    for what came before on the stream, and lets the next launch start behind that."""

    def __init__(self, spec: ReadSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, sink: cute.Tensor, ctas: Int32, stream):
        self.kernel(a, b, sink, ctas).launch(grid=[ctas, 1, 1], block=[self.spec.threads or 32, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, sink: cute.Tensor, ctas: Int32):
        if const_expr(self.spec.threads == 0):
            self.copies(a, b, sink, ctas)
        else:
            self.words(a, b, sink, ctas)

    @cute.jit
    def words(self, a: cute.Tensor, b: cute.Tensor, sink: cute.Tensor, ctas: Int32):
        """By loads into registers."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        run = spec.piece * spec.pieces
        half = Int32(a.shape[0]) // run
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        seen = Int32(0)
        for i in cutlass.range(bid, 2 * half, ctas, unroll=1):
            place = Int64(a.iterator.toint()) + Int64(i) * run
            if i >= half:
                place = Int64(b.iterator.toint()) + Int64(i - half) * run
            loaded = [words_at(place + (16 * tid + spec.piece * j), spec.once) for j in range(spec.pieces)]
            nothing = Int32(0)  # there is one sink, so it stays 0; without it ptxas has but five loads under way
            for words in loaded:
                nothing = nothing | (words[0] & (Int32(sink.shape[0]) >> 1))
            for words in loaded:
                seen = seen ^ (words[0] ^ words[1] ^ words[2] ^ words[3] | nothing)
        if seen == UNLIKELY:
            sink[0] = seen

    @cute.jit
    def copies(self, a: cute.Tensor, b: cute.Tensor, sink: cute.Tensor, ctas: Int32):
        """By bulk copies into a ring in shared memory; a CTA takes every ``ctas``-th piece, so its first ones are of ``a``."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        end = 2 * (Int32(a.shape[0]) // spec.piece)
        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate_tensor(Int32, cute.make_layout((spec.piece // 4, spec.pieces)), byte_alignment=128)
        bars = smem.allocate_array(Int64, spec.pieces)
        if tid == 0:
            for j in cutlass.range_constexpr(spec.pieces):
                cute.arch.mbarrier_init(bars + j, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            for j in cutlass.range_constexpr(spec.pieces):
                if bid + ctas * j < end:
                    self.copy(a, b, bid + ctas * j, end, ring, bars, j)
            seen, phase = Int32(0), Int32(0)
            for first in cutlass.range(bid, end, ctas * spec.pieces, unroll=1):
                for j in cutlass.range_constexpr(spec.pieces):
                    piece = first + ctas * j
                    if piece < end:
                        cute.arch.mbarrier_wait(bars + j, phase)
                        seen = seen ^ ring[0, j]
                        if piece + ctas * spec.pieces < end:
                            cute.arch.fence_view_async_shared()
                            self.copy(a, b, piece + ctas * spec.pieces, end, ring, bars, j)
                phase = phase ^ 1
            if seen == UNLIKELY:
                sink[0] = seen

    @cute.jit
    def copy(self, a: cute.Tensor, b: cute.Tensor, piece: Int32, end: Int32, ring: cute.Tensor, bars, j: cutlass.Constexpr):
        """Start the bulk copy of a piece into a place of the ring; called by one thread."""
        spec = self.spec
        cute.arch.mbarrier_arrive_and_expect_tx(bars + j, spec.piece)
        place = Int64(a.iterator.toint()) + Int64(piece) * spec.piece
        if piece >= end // 2:
            place = Int64(b.iterator.toint()) + Int64(piece - end // 2) * spec.piece
        hint, policy = (".L2::cache_hint", ", $4") if const_expr(spec.once) else ("", "")
        text = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [$0], [$1], $2, [$3]{policy};"
        there, bar = Int32((ring.iterator + j * (spec.piece // 4)).toint()), Int32((bars + j).toint())
        effect([there, place, Int32(spec.piece), bar, Int64(READ_ONCE)], text, "r,l,r,r,l")


@kernel_cache
def compile_read(arch: str, spec: ReadSpec):
    """Compile for ``arch``. Arguments: two tensors uint8 ``[bytes]`` of one size, int32 ``[1]`` (the sink), CTAs."""
    size = symbol(128)
    pair = [fake("uint8", (size,), compact=True) for _ in range(2)]
    return build(arch, Read(spec), *pair, fake("int32", (symbol(),), align=4, compact=True), Int32(0))


def reader(spec: ReadSpec, a: Tensor, b: Tensor, sink: Tensor) -> Callable[[], None]:
    """The call that reads two contiguous tensors of one size once. ``sink``: int32 ``[1]``; it holds ``UNLIKELY`` afterwards where the
    exclusive or of all that a thread looked at came to that: every word, of a bulk copy the first one."""
    a, b = (x.view(torch.uint8).view(-1) for x in (a, b))
    grid = spec.grid(a.numel(), multiprocessors(a.device))
    return functools.partial(launch, compile_read(arch_of(a.device), spec), a.device, a, b, sink, grid)
