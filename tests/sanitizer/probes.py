"""Smallest kernels whose threads hand memory over as ours do: what ``compute-sanitizer`` says of them, and the emulator's checker.

    python -m tests.sanitizer.cases "probe: reuse, one arrives" --tool racecheck           # launch one, on a GPU
    python -m tests.sanitizer.cases "probe: reuse, one arrives" --tool emulator

Each comes as our kernels have it (``one arrives``: a warp meets at ``bar.warp.sync``, then one lane arrives on the mbarrier for all), as
the tool would like it (``all arrive``: every lane arrives for itself), and wrong (``too early``: the arrival stands before the access). The
first is ordered by PTX's memory model: ``bar.warp.sync`` orders the accesses of the lanes that meet, the arrival releases and the wait
acquires, and causality order is transitive. What the tool says of it beside the other two is what it can and cannot follow. ``not met``
lacks the ``bar.warp.sync``: wrong by the letter, and seen by ``lanes`` alone.

============  ==============================================================================================================
reuse         a stage is read by a warp and then overwritten by one lane of another
reuse, bulk   the same, overwritten by a bulk copy (``cp.async.bulk``), proxy fence before it
publish       a stage is written by a warp and then read by another
relay         a stage is written by one warp, which meets a second at a named barrier; the second arrives, a third reads
same value    every lane of a warp writes one value to one address and reads it; with ``bar.warp.sync`` between (``met``) or not
bulk store    global memory written by ``cp.async.bulk.global.shared``, then read by another kernel; ``plain``: by ordinary stores
============  ==============================================================================================================
"""

import functools
from typing import Any

ROUNDS = 6
PROBES: dict[str, tuple[str, str]] = {
    f"{pattern}, {how}": (pattern, how)
    for pattern, hows in {
        "reuse": ("one arrives", "all arrive", "too early", "not met"),
        "reuse, bulk": ("one arrives", "all arrive", "too early"),
        "publish": ("one arrives", "all arrive", "too early"),
        "relay": ("one arrives", "all arrive", "too early"),
        "same value": ("met", "not met"),
        "bulk store": ("bulk", "plain", "not written"),
    }.items()
    for how in hows
}
"""Every probe by its name: pattern and how it is ordered."""
RACES = {name for name, (_, how) in PROBES.items() if how == "too early"}
"""Those that are wrong."""


def _kernels() -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32, Int64, const_expr

    from lp_fa4.common.numbers import inline_ptx

    def bulk(target, source, barrier):
        inline_ptx(
            None,
            [Int32(target), source, Int32(barrier)],
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], 128, [$2];",
            "r,l,r,~{memory}",
            side_effects=True,
        )

    def bulk_store(target, source):
        inline_ptx(
            None,
            [target, Int32(source)],
            "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], 128;",
            "l,r,~{memory}",
            side_effects=True,
        )

    @cute.jit
    def arrive(one: cutlass.Constexpr, meets: cutlass.Constexpr, barrier):
        """A warp's arrival: by one lane after all have met, or by each."""
        if const_expr(one):
            if const_expr(meets):
                cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier)

    class Probe:
        """Three warps: 0 fills a stage, 1 reads it, 2 helps where there is a relay. ``source``, ``out``: int32 [ROUNDS, 32]."""

        def __init__(self, pattern: str, how: str):
            self.pattern, self.how = pattern, how

        @cute.jit
        def __call__(self, source: cute.Tensor, out: cute.Tensor, stream):
            self.kernel(source, out).launch(grid=[1, 1, 1], block=[96, 1, 1], stream=stream)

        @cute.kernel
        def kernel(self, source: cute.Tensor, out: cute.Tensor):
            pattern, how = self.pattern, self.how
            tid, _, _ = cute.arch.thread_idx()
            warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), tid % 32
            one, early = how != "all arrive", how == "too early"
            publishes = pattern in ("publish", "relay")
            # In a probe of the filling every lane of the reader arrives, and the other way round: one edge is looked at.
            one_full, one_empty = one and publishes, one and not publishes

            @cute.struct
            class Storage:
                bars: cute.struct.MemRange[Int64, 2]
                cells: cute.struct.Align[cute.struct.MemRange[Int32, 32], 128]

            store = cutlass.utils.SmemAllocator().allocate(Storage)
            full, empty = store.bars.data_ptr(), store.bars.data_ptr() + 1
            cells = store.cells.get_tensor(cute.make_layout(32))
            if tid == 0:
                cute.arch.mbarrier_init(full, 32 if publishes and not one_full else 1)
                cute.arch.mbarrier_init(empty, 1 if one_empty else 32)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            if const_expr(pattern == "same value"):
                if warp == 0:
                    for i in cutlass.range_constexpr(ROUNDS):
                        cells[0] = source[i, 0]
                        if const_expr(how == "met"):
                            cute.arch.sync_warp()
                        out[i, lane] = cells[0]
                        cute.arch.sync_warp()
            elif const_expr(pattern == "bulk store"):
                if warp == 0:
                    cells[lane] = source[0, lane]
                    if const_expr(how == "bulk"):
                        cute.arch.fence_view_async_shared()
                        cute.arch.sync_warp()
                        if lane == 0:
                            bulk_store(out.iterator.toint(), store.cells.data_ptr().toint())
                            cute.arch.cp_async_bulk_commit_group()
                            cute.arch.cp_async_bulk_wait_group(0)
                    elif const_expr(how == "plain"):
                        out[0, lane] = cells[lane]
            else:
                for i in cutlass.range(ROUNDS, unroll=1):
                    if warp == 0:
                        cute.arch.mbarrier_wait(empty, (i & 1) ^ 1)
                        if const_expr(pattern == "reuse"):
                            with cute.arch.elect_one():
                                for j in cutlass.range_constexpr(4):
                                    cells[j] = source[i, j]
                                cute.arch.mbarrier_arrive(full)
                        elif const_expr(pattern == "reuse, bulk"):
                            cute.arch.fence_view_async_shared()
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_arrive_and_expect_tx(full, 128)
                                bulk(store.cells.data_ptr().toint(), (source.iterator + 32 * i).toint(), full.toint())
                        elif const_expr(pattern == "publish"):
                            if const_expr(early):
                                arrive(one_full, True, full)
                            cells[lane] = source[i, lane]
                            if const_expr(not early):
                                arrive(one_full, True, full)
                        else:
                            cute.arch.barrier(barrier_id=1, number_of_threads=64)  # the helper may write
                            if const_expr(early):
                                arrive(one_full, True, full)
                            cute.arch.barrier(barrier_id=1, number_of_threads=64)  # and has written
                            if const_expr(not early):
                                arrive(one_full, True, full)
                    elif warp == 1:
                        cute.arch.mbarrier_wait(full, i & 1)
                        if const_expr(early and not publishes):
                            arrive(one_empty, how != "not met", empty)
                        out[i, lane] = cells[lane % 4 if pattern == "reuse" else lane ^ 1]
                        if const_expr(not (early and not publishes)):
                            arrive(one_empty, how != "not met", empty)
                    elif const_expr(pattern == "relay"):
                        cute.arch.barrier(barrier_id=1, number_of_threads=64)
                        cells[lane] = source[i, lane]
                        cute.arch.barrier(barrier_id=1, number_of_threads=64)

    return Probe


@functools.cache
def compiled(arch: str, name: str) -> Any:
    """The probe's launcher: int32 ``[ROUNDS, 32]`` twice."""
    from lp_fa4.compile import build, fake

    shape = (ROUNDS, 32)
    return build(arch, _kernels()(*PROBES[name]), fake("int32", shape, compact=True), fake("int32", shape, compact=True))


def expected(name: str, source: Any) -> Any:
    """What a probe that is right writes to ``out``."""
    import torch

    pattern = PROBES[name][0]
    lanes = torch.arange(32)
    columns = {"reuse": lanes % 4, "same value": 0 * lanes, "bulk store": lanes}.get(pattern, lanes ^ 1)
    return source[:, columns]


def launch(name: str) -> None:
    """On the GPU; of ``bulk store`` what it wrote is read by a second kernel."""
    import torch

    import lp_fa4.compile as compilation

    compilation.extra_options = "--generate-line-info"
    source = torch.arange(32 * ROUNDS, dtype=torch.int32).view(ROUNDS, 32).cuda()
    out = torch.empty_like(source)
    compiled(compilation.arch_of(source.device), name)(source, out)
    if PROBES[name][0] == "bulk store":
        copy = torch.empty_like(source)
        compiled(compilation.arch_of(source.device), "bulk store, plain")(out, copy)
        assert PROBES[name][1] == "not written" or torch.equal(copy[0].cpu(), source[0].cpu())
    elif name not in RACES:
        assert torch.equal(out.cpu(), expected(name, source.cpu()))
    torch.cuda.synchronize()


def emulated(arch: str, names: list[str], schedules: int = 8) -> dict[str, int]:
    """Reports of the emulator's race checker for each probe, under so many schedules; results are checked where nothing is wrong."""
    import torch

    from tests.emulator import api

    def reports(name: str, schedule: api.Schedule) -> int:
        source = torch.arange(32 * ROUNDS, dtype=torch.int32).view(ROUNDS, 32)
        out = torch.zeros_like(source)
        _, result = api.call_under(lambda: compiled(arch, name)(source, out), arch, schedule, check=True, collect=True)
        assert name in RACES or PROBES[name][0] == "bulk store" or torch.equal(out, expected(name, source)), name
        return len(result.reports)

    return {name: sum(reports(name, schedule) for schedule in api.schedules(schedules)) for name in names}
