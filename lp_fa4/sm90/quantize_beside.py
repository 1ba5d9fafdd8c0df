"""The quantize pass beside the forward that reads its results: sequence after sequence, on some of the multiprocessors.

The pass waits for memory and the forward for arithmetic. So a few multiprocessors quantize q, k and v, a sequence and head (a *unit*) at a
time in the order of the forward's items, while the others attend to the units that are complete; when the last is, they join. A CTA fills
its multiprocessor with four groups of threads. Each draws tiles from the list by itself: a tile comes by TMA while the one before it is
quantized, and its codes leave by TMA. A unit counts its tiles. Once they are all there, a later task adds up the unit's sums of V and
raises its flag, for which the forward's producer waits (``wait_for``). Nothing here waits for the forward, and no task for a later one.

Sequences are of one length, a multiple of 128 (queries and keys each their own), elements of 16 bits, and every query head has its own
key/value head. The list: for each unit K's tiles, V's, q's. With the last goes the sum of a unit some way before it, whose tiles are done
by then (``TASKS``). At first all multiprocessors quantize, until there is work for the forward.

Codes, scales and sums are those of ``quantize``.
"""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T

from lp_fa4.common.bundle import Bundle
from lp_fa4.common.numbers import effect, inline_ptx
from lp_fa4.common.sequence import TILE
from lp_fa4.common.sequence_vectors import RUNS
from lp_fa4.compile import arch_of, build, fake, fake_offsets, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.sm90.quantize import WARPS, Place, Quantize, QuantizeSpec, Work, store8
from lp_fa4.sm90.tile_transpose import THREADS

GROUPS = 4
"""Of a CTA: it has all of a multiprocessor's threads."""
ATTENDED, MARGIN = 1.45, 1.15
"""Time of the forward for a tile of queries times one of keys over that of a tile that is quantized (1.16 us to 0.8, a multiprocessor);
what is added to the share of the latter: a pass that is late costs more than one that is early."""
TELLS = 4
"""The warp of a group that stores codes and tells; the first asks for tiles."""
TOLD = 4
"""Tiles that one fence tells of: a fence takes a warp, and so its group, 1,000 clocks."""
TASKS = TOLD + 1
"""Tasks a group after which a tile that it drew is there and told."""


def look_at(address):
    """A global word, and what was written before it."""
    return Int32(inline_ptx(T.i32(), [address], "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l,~{memory}", side_effects=True))


@cute.jit
def wait_for(address, least: Int32):
    """Until the word at a global ``address`` is at least ``least``: what was written before it got there is visible then, to bulk copies
    too."""
    seen = look_at(address)
    while seen < least:
        inline_ptx(None, [], "nanosleep.u32 200;", "~{memory}", side_effects=True)
        seen = look_at(address)
    inline_ptx(None, [], "fence.proxy.async;", "~{memory}", side_effects=True)


def tell(address):
    """Adds one to a global word, behind everything that this thread has seen."""
    effect([address, Int32(1)], "red.release.gpu.global.add.s32 [$0], $1;", "l,r,~{memory}")


class QuantizeBeside(Quantize):
    """``specs``: of v, k and q, blocks of 128, v with sums. Launch arguments: those of ``Quantize`` in this order, the sums of V by
    sequence, counts of ``Beside``, the factor on dot products, and how many CTAs."""

    @cute.jit
    def __call__(self, operands, v_sum, counts, factor: Float32, ctas: Int32, stay: Int32, stream):
        d = self.specs[0].head_dim
        heads, batch = Int32(operands[0][0].shape[1]), Int32(operands[0][1].shape[0] - 1)
        k_tiles, q_tiles = (Int32(operands[i][0].shape[0]) // batch // TILE for i in (0, 2))
        each = 2 * k_tiles + q_tiles
        lag = 1 + TASKS * GROUPS * stay // each
        first = (lag + (ctas - stay) // q_tiles) * each // (GROUPS * ctas) + 1
        tile = cute.make_layout((TILE, d), stride=(d, 1))
        copies = []
        for i in cutlass.range_constexpr(3):
            x, codes = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=[0, 2, 1])) for t in (operands[i][0], operands[i][3]))
            copies.append(
                (
                    cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (TILE, d)),
                    cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), codes, tile, (TILE, d)),
                )
            )
        self.kernel(
            tuple(copies), operands, v_sum, counts, factor, heads, batch * heads, k_tiles, q_tiles, each,
            stay, lag, first, Float32(1.0) / Float32(heads), Float32(1.0) / Float32(each),
        ).launch(grid=[ctas, 1, 1], block=[GROUPS * THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)  # fmt: skip

    def thread(self):
        """Number of this thread in its group."""
        return cute.arch.thread_idx()[0] % THREADS

    def meet(self):
        """A barrier of the group."""
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=THREADS)

    def element(self, spec):
        """Type of an operand's elements."""
        return BFloat16 if spec.dtype == "bfloat16" else Float16

    @cute.kernel
    def kernel(
        self, copies, operands, v_sum, counts, factor: Float32, heads: Int32, units: Int32, k_tiles: Int32, q_tiles: Int32, each: Int32,
        stay: Int32, lag: Int32, first: Int32, one_head: Float32, one_each: Float32,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group, warp = warp // WARPS, warp % WARPS
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        d, smem = self.specs[0].head_dim, cutlass.utils.SmemAllocator()

        def of_group(dtype, size, align=16):
            whole = smem.allocate_tensor(dtype, cute.make_layout(GROUPS * size), byte_alignment=align)
            return Int32(whole.iterator.toint()) + group * (size * dtype.width // 8)

        def tensor(dtype, address, shape, align=16):
            return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align), cute.make_layout(shape))

        v_spec = self.specs[0]
        floats = max(v_spec.parts * v_spec.part_floats, RUNS * d)
        source, target = of_group(BFloat16, TILE * d, 128), of_group(Uint8, TILE * d, 128)
        parts, numbers, barrier = of_group(Float32, floats), of_group(Int32, 2 * WARPS * 4), of_group(Int64, 4)
        shared = Bundle(
            maxima=tensor(Int32, numbers, (WARPS, 4)),
            units=tensor(Int32, numbers + 16 * WARPS, (WARPS, 4)),
            tile=None,
            parts=tensor(Float32, parts, floats),
            source=source,
            target=target,
            full=cute.make_ptr(Int64, barrier, cute.AddressSpace.smem, assumed_align=8),
            drawn=barrier + 16,
            counter=(counts.iterator + 2 * units).toint(),
            workers=ctas * GROUPS,
            counts=counts,
            copies=copies,
            operands=operands,
            one_head=one_head,
            one_each=one_each,
            heads=heads,
            each=each,
            number=units,
            sizes=(k_tiles, q_tiles),
        )
        ahead = Int32(0)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(shared.full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()  # another lane may be the first to use it
            self.fetch(self.record(group * ctas + cta, shared), shared)
            if cta < stay or first > 1:  # noqa: SIM108 - one of the two alone has effects
                ahead = self.draw(shared)
            else:
                ahead = units * each
        self.meet()
        unit, step, b, head = self.next(shared)
        count, told, left = Int32(0), (Int32(-1),) * TOLD, first - 2 if cta >= stay else Int32(2**30)
        while unit < units:
            now = (count, told, ahead)
            if step < k_tiles:
                self.task(1, operands, k_tiles, b, head, step, factor, now, shared)
            elif step < 2 * k_tiles:
                self.task(0, operands, k_tiles, b, head, step - k_tiles, factor, now, shared)
            else:
                self.task(2, operands, q_tiles, b, head, step - 2 * k_tiles, factor, now, shared)
            if count % TOLD == TOLD - 1:
                told = (Int32(-1),) * TOLD
            told, count = (unit, *told[:-1]), count + 1
            if step == each - 1 and unit >= lag:
                if warp == TELLS:
                    self.finish(told, shared)
                told = (Int32(-1),) * TOLD
                self.add_up(operands[0], v_sum, counts, unit - lag, units, k_tiles, each, shared)
            unit, step, b, head = self.next(shared)
            left = left - 1
            if warp == 0:
                if left >= 0:  # noqa: SIM108 - one of the two alone has effects
                    ahead = self.draw(shared)
                else:
                    ahead = units * each  # enough for a multiprocessor that the forward waits for
        self.meet()
        if warp == TELLS:
            self.finish(told, shared)
        last = units - lag + group * stay + cta
        if cta < stay:
            while last < units:
                if last >= 0:
                    self.add_up(operands[0], v_sum, counts, last, units, k_tiles, each, shared)
                last = last + GROUPS * stay

    def draw(self, shared):
        """How many tasks were drawn before, in the first lane of a warp; waited for where it is used."""
        text = "{.reg .pred p; setp.eq.s32 p, $2, 0; mov.b32 $0, 0; @p atom.relaxed.gpu.global.add.s32 $0, [$1], 1;}"
        return Int32(inline_ptx(T.i32(), [shared.counter, cute.arch.lane_idx()], text, "=&r,l,r,~{memory}", side_effects=True))

    @cute.jit
    def finish(self, told, shared):
        """A warp that stores codes tells units of a task each (none: -1): they are there."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            inline_ptx(None, [], "fence.acq_rel.gpu;", "~{memory}", side_effects=True)
            for unit in told:
                if unit >= 0:
                    address = (shared.counts.iterator + unit).toint()
                    effect([address, Int32(1)], "red.relaxed.gpu.global.add.s32 [$0], $1;", "l,r,~{memory}")

    @cute.jit
    def split(self, index: Int32, size: Int32, one: Float32):
        """Quotient and rest. ``one``: one over ``size``."""
        quotient = Int32(Float32(index) * one)  # to one
        rest = index - quotient * size
        if rest < 0:
            quotient, rest = quotient - 1, rest + size
        if rest >= size:
            quotient, rest = quotient + 1, rest - size
        return quotient, rest

    @cute.jit
    def record(self, task: Int32, shared):
        """Of a task: unit (past the last: none), step, sequence, head."""
        unit, step = self.split(task, shared.each, shared.one_each)
        b, head = self.split(unit, shared.heads, shared.one_head)
        return unit, step, b, head

    @cute.jit
    def fetch(self, record, shared):
        """A task for the group to read, its tile on its way to the group's buffer, its vector to the nearest cache; called by a warp."""
        unit, step, b, head = record
        if cute.arch.lane_idx() == 0:
            effect([shared.drawn, unit, step, b, head], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r")
        if unit < shared.number:
            cute.arch.fence_view_async_shared()  # the tile before has been read
            k_tiles, q_tiles = shared.sizes
            if step < k_tiles:
                self.fetch_of(1, b, b * k_tiles + step, head, shared)
            elif step < 2 * k_tiles:
                self.fetch_of(0, b, b * k_tiles + step - k_tiles, head, shared)
            else:
                self.fetch_of(2, b, b * q_tiles + step - 2 * k_tiles, head, shared)

    @cute.jit
    def next(self, shared):
        """Of the group's next task: unit, step, sequence, head. The unit is past the last where there is none."""
        words, place = cute.make_rmem_tensor(4, Int32), cute.make_ptr(Int32, shared.drawn, cute.AddressSpace.smem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(4)), words)
        return tuple(cute.arch.make_warp_uniform(words[i]) for i in range(4))

    def staged(self, dtype, address):
        """A tile in shared memory."""
        d = self.specs[0].head_dim
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=128)
        return cute.make_tensor(pointer, cute.make_layout((TILE, d), stride=(d, 1)))

    @cute.jit
    def fetch_of(self, which: cutlass.Constexpr, b: Int32, tile: Int32, head: Int32, shared):
        """The same of one operand. ``tile``: its number among all of a head."""
        d, kind = self.specs[0].head_dim, self.element(self.specs[which])
        atom, whole = shared.copies[which][0]
        source = cute.local_tile(whole[None, None, head], (TILE, d), (tile, 0))
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(self.staged(kind, shared.source), 0, 2), cute.group_modes(source, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.full, 2 * TILE * d)
        cute.copy(atom, source, to, tma_bar_ptr=shared.full)
        vectors = shared.operands[which][7 if which == 2 else 2]
        if 4 * cute.arch.lane_idx() < d:
            address = (vectors.iterator + cute.crd2idx((b, head, 4 * cute.arch.lane_idx()), vectors.layout)).toint()
            effect([address], "{.reg .b32 a, b, c, d; ld.global.v4.b32 {a, b, c, d}, [$0];}", "l")

    @cute.jit
    def task(self, which: cutlass.Constexpr, operands, tiles: Int32, b: Int32, head: Int32, tile: Int32, factor: Float32, now, shared):
        """A tile of one operand. On the way the group's next tile is asked for, and every fourth time the last four are told. ``now``:
        tasks of the group before, units of those not told yet (-1: none), and what was drawn."""
        spec = self.specs[which]
        _, _, means, codes, scales, _, sums, vectors, dots = operands[which]
        tid, d = self.thread(), spec.head_dim
        first, begin = tile * TILE, b * tiles * TILE
        end = begin + tiles * TILE
        at = Place(head, b, begin, end, first, end, tid // spec.lanes, 8 * (tid % spec.lanes))
        mean = self.mean_of(spec, means, at)
        raw = cute.make_rmem_tensor((spec.words, spec.passes), Uint32)
        cute.arch.mbarrier_wait(shared.full, now[0] % 2)
        source = shared.source + at.row0 * (2 * d) + 2 * at.column
        for p in cutlass.range_constexpr(spec.passes):
            words = cute.make_ptr(Uint32, source + p * spec.step * (2 * d), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(words, cute.make_layout(4)), raw[None, p])
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS
        count, told, ahead = now
        following = (Int32(0),) * 4
        if warp == 0:
            following = self.record(shared.workers + cute.arch.shuffle_sync(ahead, 0), shared)
        elif warp == TELLS:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the codes' buffer is free
        self.measure(spec, raw, mean, at, shared)
        if warp == 0:
            self.fetch(following, shared)
        elif warp == TELLS and count % TOLD == TOLD - 1:
            self.finish(told, shared)
        bytes_, inverses = self.to_codes(spec, raw, mean, at, (codes, vectors, dots), factor, shared)
        cute.arch.fence_view_async_shared()
        self.meet()
        if warp == TELLS:
            self.store_of(which, b * tiles + tile, head, shared)
        row, last = b * (tiles + 1) + tile, tile == tiles - 1
        if tid < 4 + Int32(last):  # a byte for each group, and behind the last tile for the spare one
            scales[(begin + first) // 32 + b + tid, head, 0] = Uint8(bytes_[0] if tid < 4 else Int32(0))
        if const_expr(spec.sums):
            if last and tid < d:  # of the spare tile
                sums[row + 1, head, tid] = Float32(0.0)
            self.store_sums(spec, at, shared, means, sums, row, bytes_[0], inverses[0])

    @cute.jit
    def store_of(self, which: cutlass.Constexpr, tile: Int32, head: Int32, shared):
        """A tile's codes on their way to memory."""
        d = self.specs[0].head_dim
        atom, whole = shared.copies[which][1]
        target = cute.local_tile(whole[None, None, head], (TILE, d), (tile, 0))
        source, target = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(self.staged(Uint8, shared.target), 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def put(self, spec: cutlass.Constexpr, words, target, token: Int32, row: Int32, at, shared):
        """Eight codes of a row to the buffer that leaves by TMA."""
        address = shared.target + row * spec.head_dim + at.column
        store8(words, address, cute.AddressSpace.smem)

    @cute.jit
    def blank(self, spec: cutlass.Constexpr, at, bytes_, codes, shared):
        """Zeros for the codes of a tile that is not finite."""
        words = cute.make_rmem_tensor(2, Uint32)
        words.fill(0)
        for p in cutlass.range_constexpr(spec.passes):
            self.put(spec, words, Int64(0), Int32(0), at.row0 + p * spec.step, at, shared)

    @cute.jit
    def add_up(self, operand, v_sum, counts, unit: Int32, units: Int32, tiles: Int32, tasks: Int32, shared):
        """Sums of V over a unit's tiles, in the order of ``sequence_vectors``, once they are all there; then its flag."""
        parts, sums = operand[6], shared.parts
        quads = self.specs[0].head_dim // 4
        tid = self.thread()
        quad, run = tid % quads, tid // quads
        wait_for((counts.iterator + unit).toint(), tasks)
        self.meet()  # sums of the tile before have been read
        b, head = self.split(unit, shared.heads, shared.one_head)
        row, each = b * (tiles + 1), cute.ceil_div(tiles, RUNS)
        total = cute.make_rmem_tensor(4, Float32)
        total.fill(0.0)
        if run < RUNS:
            for i in cutlass.range(cutlass.min(each * run, tiles), cutlass.min(each * (run + 1), tiles), unroll=8):
                piece = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(cute.local_tile(parts[row + i, head, None], (4,), (quad,)), piece)
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + piece[j]
            for j in cutlass.range_constexpr(4):
                sums[(run * quads + quad) * 4 + j] = total[j]
        self.meet()
        if run == 0:
            for i in cutlass.range_constexpr(1, RUNS):
                for j in cutlass.range_constexpr(4):
                    total[j] = total[j] + sums[(i * quads + quad) * 4 + j]
            cute.autovec_copy(total, cute.local_tile(v_sum[b, head, None], (4,), (quad,)))
        self.meet()
        if tid == 0:
            tell((counts.iterator + units + unit).toint())


def ctas_of(device: torch.device, key_tiles: int, query_tiles: int) -> int:
    """Multiprocessors that quantize while the others attend: about as many as keep those busy."""
    each = 2 * key_tiles + query_tiles
    share = MARGIN * each / (each + ATTENDED * key_tiles * query_tiles)
    return max(int(multiprocessors(device) * min(share, 1.0)), 1)


def everyone_of(device: torch.device) -> int:
    """Multiprocessors that quantize at first."""
    return multiprocessors(device)


@kernel_cache
def _compile_beside(arch: str, *specs: QuantizeSpec):
    d = specs[0].head_dim
    operands = []
    heads, batch = symbol(), symbol()
    for spec in specs:
        tokens, rows = symbol(), symbol()
        operands.append(
            (
                fake(spec.dtype, (tokens, heads, d)),
                fake_offsets(spec.offsets),
                fake("float32", (batch, heads, d), compact=True) if spec.centred else None,
                fake("uint8", (tokens, heads, d), compact=True),
                fake("uint8", (rows, heads, 1), align=1, compact=True),
                None,
                fake("float32", (symbol(), heads, d), compact=True) if spec.sums else None,
                fake("float32", (batch, heads, d), compact=True) if spec.dots else None,
                fake("float32", (heads, tokens), align=4, compact=True) if spec.dots else None,
            )
        )
    v_sum, counts = fake("float32", (batch, heads, d), compact=True), fake("int32", (symbol(),), align=4)
    return build(arch, QuantizeBeside(specs), tuple(operands), v_sum, counts, Float32(1.0), Int32(1), Int32(1))


class Beside:
    """The pass over v, k and q (``works`` in this order), to be started in front of a launch that depends on it.

    ``v_sum``: fp32 ``[B, H, D]``, sums of V by sequence. ``counts``: int32 ``[2 * B * H + 1]``: tiles that are there, flags (``flags``),
    tasks that were drawn. ``ctas``: multiprocessors that quantize."""

    def __init__(self, works: list[Work], factor: float):
        self.works, self.factor = works, factor
        v, offsets = works[0].x, works[0].offsets
        batch = offsets.shape[0] - 1
        self.ctas, units = ctas_of(v.device, *(works[i].x.shape[0] // batch // TILE for i in (0, 2))), batch * v.shape[1]
        self.v_sum = torch.empty(batch, *v.shape[1:], dtype=torch.float32, device=v.device)
        self.counts = torch.zeros(2 * units + 1, dtype=torch.int32, device=v.device)
        self.flags = self.counts[units:]

    def start(self) -> None:
        """Launch it."""
        device = self.v_sum.device
        compiled = _compile_beside(arch_of(device), *(w.spec for w in self.works))
        launch(
            compiled, device, tuple(w.arguments for w in self.works), self.v_sum, self.counts, self.factor, everyone_of(device), self.ctas
        )
