"""The emulator itself, on kernels of a few lines: semantics, faults it must stop at, races it must see."""

import gc
import itertools
import struct
import weakref
from unittest import mock

import numpy as np
import pytest
import torch

from tests.emulator import api
from tests.emulator.capture import Launch
from tests.emulator.check import Waivers
from tests.emulator.errors import (
    BarrierError,
    DeadlockError,
    EmulatorError,
    MemoryFaultError,
    RaceError,
    StepLimitError,
    UnsupportedError,
)
from tests.emulator.ptx import parse

pytestmark = pytest.mark.emulator

ALL = [api.Schedule(n, seed) for n, seed in (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("pct", 3), ("pct", 4))]


def launch(body, *tensors, grid=1, block=32, cluster=1, shared=0, registers=""):
    """A kernel whose parameters p0, p1, ... are the addresses of ``tensors``, loaded into %rd0, %rd1, ..."""
    names = [f"p{i}" for i in range(len(tensors))]
    loads = "".join(f"ld.param.b64 %rd{i}, [{n}];\n" for i, n in enumerate(names))
    ptx = f"""
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({", ".join(f".param .u64 {n}" for n in names)})
{{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
{registers}
{loads}
mov.u32 %r0, %tid.x;
mov.u32 %r1, smem;
shr.u32 %r2, %r0, 5;
{body}
ret;
}}
"""
    ptx = ptx.replace("mov.u32 %r1, smem;", "mov.b32 %r1, smem;")
    values = {n: struct.pack("<Q", t.data_ptr()) for n, t in zip(names, tensors, strict=True)}
    return Launch("k", ptx, (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), shared, values)


def run(body, *tensors, schedule=None, check=False, limit=200_000, waivers=None, **shape):
    extents = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    return api.run(launch(body, *tensors, **shape), extents, schedule, check=check, step_limit=limit, waivers=waivers)


ELEMENTWISE = """
mov.u32 %r3, %ctaid.x;
mad.lo.s32 %r4, %r3, 64, %r0;
setp.ge.s32 %p0, %r4, 100;
@%p0 bra DONE;
mul.wide.s32 %rd2, %r4, 4;
add.s64 %rd3, %rd0, %rd2;
add.s64 %rd4, %rd1, %rd2;
ld.global.b32 %r5, [%rd3];
fma.rn.f32 %r6, %r5, 0f40000000, 0f3F800000;
st.global.b32 [%rd4], %r6;
DONE:
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_elementwise_with_a_guarded_tail(schedule):
    x, y = torch.randn(100), torch.full((100,), float("nan"))
    run(ELEMENTWISE, x, y, grid=2, block=64, schedule=schedule)
    assert torch.equal(y, 2 * x + 1)


def test_lanes_with_different_trip_counts_reconverge():
    y = torch.zeros(64, dtype=torch.int32)
    body = """
mov.b32 %r3, 0;
mov.b32 %r4, 0;
LOOP:
setp.gt.u32 %p0, %r4, %r0;
@%p0 bra OUT;
add.u32 %r3, %r3, %r4;
add.u32 %r4, %r4, 1;
bra LOOP;
OUT:
shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1;
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd3, %rd0, %rd2;
st.global.b32 [%rd3], %r5;
"""
    run(body, y, block=64)
    t = np.arange(64) ^ 1
    assert np.array_equal(y.numpy(), t * (t + 1) // 2)


def test_a_store_outside_every_tensor_stops_with_address_and_line():
    x, y = torch.randn(100), torch.zeros(90)
    with pytest.raises(MemoryFaultError, match=r"outside every tensor.*PTX line \d+: st\.global"):
        run(ELEMENTWISE, x, y, grid=2, block=64)


def test_a_misaligned_load_stops():
    with pytest.raises(MemoryFaultError, match="not aligned to the 8 bytes"):
        run("add.s64 %rd2, %rd0, 4;\nld.global.b64 %rd3, [%rd2];", torch.zeros(8))


def test_shared_memory_is_bounded_by_the_launch():
    with pytest.raises(MemoryFaultError, match="outside the"):
        run("add.u32 %r3, %r1, 256;\nst.shared.b32 [%r3], %r0;", shared=256)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("frobnicate.b32 %r3, %r4;", "opcode frobnicate.b32 is not modelled"),
        ("add.sat.s32 %r3, %r4, %r5;", "qualifier .sat of add"),
        ("cvt.rna.tf32.f32 %r3, %r4;", "form of cvt"),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r3}, [%r4];", "tcgen05.ld"),
        ("mov.u32 %r3, %envreg3;", "special register %envreg3"),
    ],
)
def test_what_is_not_modelled_stops_with_its_line(line, what):
    with pytest.raises(UnsupportedError, match=what) as caught:
        run(line)
    assert "PTX line" in str(caught.value)


BARRIER = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
READY:
bar.sync 0;
"""
WAIT = """
WAITING:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra WAITING;
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_barrier_nobody_arrives_on_is_a_deadlock(schedule):
    with pytest.raises(DeadlockError, match="mbarrier 0x400 parity 0"):
        run(BARRIER + WAIT, block=64, shared=64, schedule=schedule)


def test_more_arrivals_than_expected():
    with pytest.raises(BarrierError, match="more than 1 arrivals"):
        run(BARRIER + "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;\nmbarrier.arrive.shared.b64 _, [%r1];", shared=64)


def test_an_uninitialised_barrier():
    with pytest.raises(BarrierError, match="not initialised"):
        run("mbarrier.arrive.shared.b64 _, [%r1];", shared=64)


def test_lines_inside_inline_assembly_are_those_of_its_statement():
    text = """.version 8.8
.target sm_90a
.visible .entry k() {
.reg .b32 %r<2>;
.loc 1 40 5
mov.b32 %r0, 1;
.loc 1 50 5
// begin inline asm
{
.loc 1 52 5
mov.b32 %r1, %r0;
}
// end inline asm
.loc 1 60 5
ret;
}
.file 1 "/somewhere/kernel.py"
"""
    assert [I.loc for I in parse(text, "k").instrs] == ["kernel.py:40", "kernel.py:50", "kernel.py:60"]


def test_an_endless_loop_meets_the_step_limit():
    with pytest.raises(StepLimitError, match="more than 5000 steps"):
        run("LOOP:\nbra LOOP;", limit=5000)


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_clusters_that_wait_for_one_another_run_concurrently(first, schedule):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    body = f"""
mov.u32 %r3, %ctaid.x;
setp.ne.u32 %p0, %r3, {first};
@%p0 bra WAITER;
st.release.gpu.global.b32 [%rd0], 7;
bra DONE;
WAITER:
ld.acquire.gpu.global.b32 %r4, [%rd0];
setp.ne.u32 %p1, %r4, 7;
@%p1 bra WAITER;
st.global.b32 [%rd1], %r4;
DONE:
"""
    run(body, flag, out, grid=2, schedule=schedule)
    assert out.item() == 7


@pytest.mark.parametrize("name", ["random", "pct"])
def test_a_seed_reproduces_a_run(name):
    x, y = torch.randn(100), torch.zeros(100)
    steps = [run(ELEMENTWISE, x, y, grid=2, block=64, schedule=api.Schedule(name, 5)).steps for _ in range(2)]
    assert steps[0] == steps[1]


# --- races ---------------------------------------------------------------------------------------------------------------
EXCHANGE = """
shl.b32 %r3, %r0, 2;
add.u32 %r3, %r1, %r3;
st.shared.b32 [%r3], %r0;
{sync}
xor.b32 %r4, %r0, 32;
shl.b32 %r4, %r4, 2;
add.u32 %r4, %r1, %r4;
ld.shared.b32 %r5, [%r4];
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_two_warps_exchange_through_shared_memory(schedule):
    run(EXCHANGE.format(sync="bar.sync 0;"), block=64, shared=256, check=True, schedule=schedule)
    with pytest.raises(RaceError, match=r"(read of unwritten|write after read|read after write)"):
        run(EXCHANGE.format(sync=""), block=64, shared=256, check=True, schedule=schedule)


REDUCE = """
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd3, %rd0, %rd2;
add.s64 %rd4, %rd1, %rd2;
mov.u32 %r7, 0;
AGAIN:
ld.global.b32 %r3, [%rd3];
setp.ne.u32 %p1, %r3, 0;
{reduce}
st.global.b32 [%rd4], %r4;
add.s64 %rd3, %rd3, 512;
add.s64 %rd4, %rd4, 512;
add.u32 %r7, %r7, 1;
setp.lt.u32 %p3, %r7, 4;
@%p3 bra AGAIN;
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_predicates_reduced_at_a_barrier(schedule):
    """Four rounds of 128 threads at one barrier: all true, all but one of the last warp, only that one, none."""
    x = torch.ones(4, 128, dtype=torch.int32)
    x[1, 101], x[2], x[3] = 0, 0, 0
    x[2, 101] = 7
    select = "selp.b32 %r4, 1, 0, %p2;"
    for reduce, want in (
        (f"barrier.cta.red.and.pred %p2, 3, 128, %p1;\n{select}", (1, 0, 0, 0)),
        (f"barrier.cta.red.or.aligned.pred %p2, 3, 128, !%p1;\n{select}", (0, 1, 1, 1)),
        (f"bar.red.or.pred %p2, 0, %p1;\n{select}\nbar.sync 0;", (1, 1, 1, 0)),
        ("bar.red.popc.u32 %r4, 3, 128, %p1;", (128, 127, 1, 0)),
    ):
        out = torch.full((4, 128), -1, dtype=torch.int32)
        run(REDUCE.format(reduce=reduce), x, out, block=128, check=True, schedule=schedule)
        assert out.tolist() == [[w] * 128 for w in want], reduce


def test_a_barrier_that_reduces_orders_and_is_not_mixed():
    reduce = "setp.ne.u32 %p1, %r0, 99;\nbar.red.and.pred %p2, 0, %p1;"
    run(EXCHANGE.format(sync=reduce), block=64, shared=256, check=True)
    mixed = "setp.lt.u32 %p0, %r0, 32;\n@%p0 bra FIRST;\n{one}\nbra END;\nFIRST:\n{other}\nEND:\n"
    forms = ("bar.sync 1, 64;", "bar.arrive 1, 64;", "bar.red.or.pred %p2, 1, 64, %p0;", "bar.red.and.pred %p2, 1, 64, %p0;")
    for one, other in itertools.permutations(forms, 2):
        if "red" in one + other:
            with pytest.raises(BarrierError, match="some threads reduce"):
                run(mixed.format(one=one, other=other), block=64)
    with pytest.raises(UnsupportedError, match="reduction"):
        run("bar.red.popc.pred %p2, 0, %p1;")


#: where hand-written PTX is: it has no source lines
UNNAMED = frozenset({""})


def test_a_race_report_names_both_accesses_and_the_missing_edge():
    with pytest.raises(RaceError) as caught:
        run(EXCHANGE.format(sync=""), block=64, shared=256, check=True, waivers=Waivers(uninitialised=UNNAMED))
    text = str(caught.value)
    assert "st.shared.b32" in text and "ld.shared.b32" in text and "a barrier from warp" in text and "shared 0x" in text


STORE = """
shl.b32 %r3, %r0, 2;
add.u32 %r3, %r1, %r3;
st.shared.b32 [%r3], %r0;
{fence}
bar.sync 0;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 256;
cp.async.bulk.commit_group;
{wait}
st.shared.b32 [%r1], 0;
DONE:
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_bulk_store_needs_a_proxy_fence_before_and_a_wait_before_reuse(schedule):
    out = torch.zeros(64, dtype=torch.int32)
    parts = {"fence": "fence.proxy.async.shared::cta;", "wait": "cp.async.bulk.wait_group.read 0;"}
    run(STORE.format(**parts), out, block=64, shared=256, check=True, schedule=schedule)
    assert out.tolist() == list(range(64))
    with pytest.raises(RaceError, match="missing proxy fence"):
        run(STORE.format(**{**parts, "fence": ""}), out, block=64, shared=256, check=True, schedule=schedule)
    with pytest.raises(RaceError, match="write after read"):
        run(STORE.format(**{**parts, "wait": ""}), out, block=64, shared=256, check=True, schedule=schedule)


LOAD = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
add.u32 %r6, %r1, 1024;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd0], 128, [%r1];
READY:
bar.sync 0;
{wait}
shl.b32 %r3, %r0, 2;
and.b32 %r3, %r3, 127;
add.u32 %r3, %r3, %r1;
ld.shared.b32 %r4, [%r3+1024];
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_bulk_load_is_read_only_after_its_barrier(schedule):
    x = torch.arange(32, dtype=torch.int32)
    run(LOAD.format(wait=WAIT), x, block=64, shared=2048, check=True, schedule=schedule)
    with pytest.raises(RaceError, match="read after write"):
        run(LOAD.format(wait=""), x, block=64, shared=2048, check=True, schedule=schedule)


TMEM = """
setp.ne.u32 %p0, %r2, 0;
@%p0 bra REST;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
REST:
bar.sync 0;
ld.shared.b32 %r6, [%r1];
shl.b32 %r7, %r2, 21;
add.u32 %r7, %r7, %r6;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r7], {{%r0, %r2}};
{st}
tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r8, %r9}}, [%r7];
{ld}
mov.b64 %rd5, {{%r8, %r9}};
mov.b64 {{%r10, %r11}}, %rd5;
add.u32 %r12, %r10, %r11;
{late}
mul.wide.u32 %rd2, %r0, 4;
add.s64 %rd3, %rd0, %rd2;
st.global.b32 [%rd3], %r12;
bar.sync 0;
@%p0 bra DONE;
{dealloc}
DONE:
"""
TMEM_PARTS = {
    "st": "tcgen05.wait::st.sync.aligned;",
    "ld": "tcgen05.wait::ld.sync.aligned;",
    "late": "",
    "dealloc": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 64;",
}


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_tensor_memory_needs_its_waits(schedule):
    out = torch.zeros(128, dtype=torch.int32)

    def go(**changes):
        run(TMEM.format(**{**TMEM_PARTS, **changes}), out, block=128, shared=64, check=True, schedule=schedule)

    go()
    t = torch.arange(128)
    assert torch.equal(out.long(), t + t // 32)
    with pytest.raises(RaceError, match=r"wait::st"):
        go(st="")
    with pytest.raises(RaceError, match="value read early"):  # the packing moves are no use, the addition is
        go(ld="", late="tcgen05.wait::ld.sync.aligned;")
    with pytest.raises(EmulatorError, match="TMEM allocated"):
        go(dealloc="")


def test_dealloc_while_a_load_is_in_flight():
    out = torch.zeros(128, dtype=torch.int32)
    with pytest.raises(RaceError, match="wait::ld"):
        run(TMEM.format(**{**TMEM_PARTS, "ld": ""}), out, block=128, shared=64, check=True, waivers=Waivers(early_use=UNNAMED))


def test_a_waiver_holds_at_its_line_only():
    out = torch.zeros(128, dtype=torch.int32)
    early = TMEM.format(**{**TMEM_PARTS, "ld": "", "late": "tcgen05.wait::ld.sync.aligned;"})
    run(early, out, block=128, shared=64, check=True, waivers=Waivers(early_use=UNNAMED))
    with pytest.raises(RaceError, match="value read early"):
        run(early, out, block=128, shared=64, check=True, waivers=Waivers(early_use=frozenset({"kernel.py:7"})))


PAIR = """
setp.ne.u32 %p0, %r0, 0;
mul.lo.u32 %r3, %r0, 16;
add.u32 %r3, %r3, %r1;
st.shared.v4.b32 [%r3+128], {{%r0, %r0, %r0, %r0}};
fence.proxy.async.shared::cta;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1+64], 32;
ld.shared.b32 %r6, [%r1+64];
mov.u32 %r8, %cluster_ctarank;
setp.ne.u32 %p2, %r8, {leader};
@%p2 bra WAITING;
@%p0 bra WAITING;
mov.b64 %rd10, {descriptor};
mov.b16 %h0, 3;
tcgen05.cp.cta_group::2.32x128b.warpx4 [%r6], %rd10;
tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h0;
WAITING:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra WAITING;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r10}}, [%r6];
tcgen05.wait::ld.sync.aligned;
mul.lo.u32 %r9, %r8, 32;
add.u32 %r9, %r9, %r0;
mul.wide.u32 %rd2, %r9, 4;
add.s64 %rd3, %rd0, %rd2;
st.global.b32 [%rd3], %r10;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r6, 32;
"""


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_pairs_columns_are_allocated_in_both_ctas_at_once(schedule, leader):
    """The CTA that goes on first may write both, before the other's allocation has returned."""
    out = torch.full((64,), -1, dtype=torch.int32)
    body = PAIR.format(leader=leader, descriptor=(1024 + 128) >> 4 | (128 >> 4) << 32 | 1 << 46)
    run(body, out, grid=2, cluster=2, shared=1024, check=True, schedule=schedule)
    assert out.tolist() == [*range(32), *range(32)]


def test_a_finished_run_holds_no_memory():
    machine = run(EXCHANGE.format(sync="bar.sync 0;"), block=64, shared=256, check=True)
    assert machine.steps > 0 and not machine.resident and not machine.async_queues
    launched = weakref.WeakSet()
    from tests.emulator import machine as module

    class Watched(module.Cluster):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            launched.add(self.memory)

    gc.disable()
    try:
        with mock.patch.object(module, "Cluster", Watched):
            run(EXCHANGE.format(sync="bar.sync 0;"), block=64, shared=256, check=True)
            with pytest.raises(RaceError):
                run(EXCHANGE.format(sync=""), block=64, shared=256, check=True)
        assert not launched  # without the cycle collector
    finally:
        gc.enable()


CLUSTER = """
mov.u32 %r8, %cluster_ctarank;
xor.b32 %r9, %r8, 1;
setp.ne.u32 %p0, %r0, 0;
mapa.shared::cluster.u32 %r10, %r1, %r9;
@%p0 bra WAITED;
st.shared::cluster.b32 [%r10], %r8;
WAITED:
{sync}
ld.shared.b32 %r11, [%r1];
@%p0 bra DONE;
mul.wide.u32 %rd2, %r8, 4;
add.s64 %rd3, %rd0, %rd2;
st.global.b32 [%rd3], %r11;
DONE:
"""
CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_distributed_shared_memory_needs_a_cluster_barrier(schedule):
    out = torch.full((2,), -1, dtype=torch.int32)
    run(CLUSTER.format(sync=CLUSTER_SYNC), out, grid=2, cluster=2, shared=64, check=True, schedule=schedule)
    assert out.tolist() == [1, 0]
    with pytest.raises(RaceError):
        run(CLUSTER.format(sync=""), out, grid=2, cluster=2, shared=64, check=True, schedule=schedule)


# --- proxy fences and other CTAs -------------------------------------------------------------------------------------------
# CTA 0 fills a stage of CTA {reader} by bulk copies, twice; that CTA's warp 0 reads it in between and releases it to CTA 0.
REFILL = """
mov.u32 %r8, %cluster_ctarank;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.init.shared.b64 [%r1+8], {arrivals};
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
shl.b32 %r7, %r0, 2;
add.u32 %r7, %r7, %r1;
setp.lt.u32 %p3, %r0, 32;
setp.eq.u32 %p2, %r8, {reader};
and.pred %p3, %p3, %p2;
mapa.shared::cluster.u32 %r10, %r1, {reader};
mapa.shared::cluster.u32 %r11, %r1, 0;
@!%p3 bra PRODUCER;
READER:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
@!%p1 bra READER;
ld.shared.b32 %r12, [%r7+256];
{in_reader}
{release}
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 1;
@!%p1 bra AGAIN;
ld.shared.b32 %r13, [%r7+256];
bra DONE;
PRODUCER:
setp.eq.u32 %p2, %r8, 0;
setp.eq.u32 %p3, %r0, 32;
and.pred %p3, %p3, %p2;
@!%p3 bra DONE;
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r10], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10+256], [%rd0], 128, [%r10];
EMPTY:
mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p1, [%r1+8], 0;
@!%p1 bra EMPTY;
{in_producer}
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r10], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10+256], [%rd0], 128, [%r10];
DONE:
barrier.cluster.arrive;
barrier.cluster.wait;
"""
PROXY_FENCE = "fence.proxy.async.shared::cta;"
ONE_ARRIVES = "setp.ne.u32 %p0, %r0, 0;\n@!%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11+8];"
ALL_ARRIVE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11+8];"


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("release, arrivals", [(ONE_ARRIVES, 1), (ALL_ARRIVE, 32)], ids=["one arrives", "all arrive"])
@pytest.mark.parametrize("reader", [0, 1])
def test_readers_fence_a_stage_that_another_cta_fills_again(reader, release, arrivals, schedule):
    """Of generic reads the copy must know by a proxy fence. In the CTA of the reads: after them, before they are released to the CTA that
    starts the copy, whose own fence is enough only for reads of its own (seen on an H200: 3 of 60 launches wrong with a fence there)."""
    x = torch.arange(32, dtype=torch.int32)

    def go(in_reader="", in_producer=""):
        places = dict(reader=reader, release=release, arrivals=arrivals, in_reader=in_reader, in_producer=in_producer)
        run(REFILL.format(**places), x, grid=2, block=64, cluster=2, shared=1024, check=True, schedule=schedule)

    go(in_reader=PROXY_FENCE)
    with pytest.raises(RaceError, match="missing proxy fence"):
        go()
    if reader == 0:
        go(in_producer=PROXY_FENCE)
    else:
        with pytest.raises(RaceError, match=r"missing proxy fence[^$]*in a warp of CTA \(1, 0, 0\) \(before it releases"):
            go(in_producer=PROXY_FENCE)


# --- a CTA's exit ----------------------------------------------------------------------------------------------------------
SECOND = "SECOND:\nmbarrier.try_wait.parity.shared.b64 %p1, [%r1+8], 0;\n@!%p1 bra SECOND;\n"
IN_USE = "CTA exits while its shared memory or barriers are in use"

REMOTE = """
mov.u32 %r8, %cluster_ctarank;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p2, %r8, 0;
@%p2 bra FIRST;
@%p0 bra DONE;
mapa.shared::cluster.u32 %r10, %r1, 0;
{touch}
bra DONE;
FIRST:
{wait}
DONE:
"""
REMOTE_TOUCHES = {
    "arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];",
    "write": "st.shared::cluster.b32 [%r10+64], 1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];",
    "write after the arrival": "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];\nst.shared::cluster.b32 [%r10+64], 1;",
}


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("touch", REMOTE_TOUCHES)
def test_a_cta_stays_until_others_are_done_with_it(touch, schedule):
    def go(wait):
        body = REMOTE.format(touch=REMOTE_TOUCHES[touch], wait=wait)
        run(body, grid=2, cluster=2, shared=128, check=True, schedule=schedule)

    with pytest.raises(RaceError, match=rf"{IN_USE} at CTA \(0, 0, 0\)"):
        go("")
    if touch == "write after the arrival":
        with pytest.raises(RaceError, match=r"shared 0x[0-9a-f]*\n.*st\.shared::cluster"):
            go(WAIT)
    else:
        go(WAIT)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_a_cta_stays_until_its_own_copies_are_over(schedule):
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    load = LOAD[: LOAD.index("shl.b32")]
    run(load.format(wait=WAIT), x, block=64, shared=2048, check=True, schedule=schedule)
    with pytest.raises(RaceError, match=rf"{IN_USE}[^$]*cp\.async\.bulk\.shared[^$]*wait on mbarrier"):
        run(load.format(wait=""), x, block=64, shared=2048, check=True, schedule=schedule)
    store = STORE[: STORE.index("{wait}")] + "{wait}\nDONE:\n"
    fence = "fence.proxy.async.shared::cta;"
    run(store.format(fence=fence, wait="cp.async.bulk.wait_group.read 0;"), out, block=64, shared=256, check=True, schedule=schedule)
    with pytest.raises(RaceError, match=rf"{IN_USE}[^$]*cp\.async\.bulk\.global[^$]*wait_group in warp 0 of CTA 0"):
        run(store.format(fence=fence, wait=""), out, block=64, shared=256, check=True, schedule=schedule)


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_an_arrival_of_the_ctas_own_warp_needs_nobody_to_wait_for_it(schedule):
    body = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra READY;\nmbarrier.init.shared.b64 [%r1], 64;\nREADY:\nbar.sync 0;\n"
    run(body + "mbarrier.arrive.shared.b64 _, [%r1];", block=64, shared=64, check=True, schedule=schedule)


SCOPES = {
    "nothing said": ("", "", False),
    "cluster scope": (".release.cluster", "", True),
    "a fence between": ("", "fence.acq_rel.cluster;", True),
    "a fence too narrow": ("", "fence.acq_rel.cta;", False),
}


@pytest.mark.parametrize("schedule", ALL, ids=str)
@pytest.mark.parametrize("case", SCOPES)
def test_one_arrival_of_another_cta_tells_of_an_earlier_one_only_at_cluster_scope(case, schedule):
    """A remote arrival is of ``.cta`` scope unless it says more; then each has to be waited for on its own barrier."""
    scope, between, told = SCOPES[case]
    second = f"mbarrier.arrive{scope}.shared::cluster.b64 _, [%r10];"
    touch = f"mbarrier.arrive.shared::cluster.b64 _, [%r10+8];\n{between}\n{second}"
    init = "mbarrier.init.shared.b64 [%r1], 1;"
    body = REMOTE.replace(init, f"{init}\nmbarrier.init.shared.b64 [%r1+8], 1;")
    options = dict(grid=2, cluster=2, shared=128, check=True, schedule=schedule)
    run(body.format(touch=touch, wait=WAIT + SECOND), **options)
    if told:
        run(body.format(touch=touch, wait=WAIT), **options)
    else:
        with pytest.raises(RaceError, match=rf"{IN_USE} at CTA \(0, 0, 0\), mbarrier 0x408"):
            run(body.format(touch=touch, wait=WAIT), **options)
    run(body.format(touch=touch + "\nbarrier.cluster.arrive;", wait="barrier.cluster.arrive;\nbarrier.cluster.wait;"), **options)


COMMITS = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra DONE;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.init.shared.b64 [%r1+8], 1;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+8];
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
{first}
{second}
DONE:
"""


@pytest.mark.parametrize("schedule", ALL, ids=str)
def test_each_commits_arrival_is_waited_for_on_its_own_barrier(schedule):
    run(COMMITS.format(first=WAIT, second=SECOND), shared=64, check=True, schedule=schedule)
    with pytest.raises(RaceError, match=rf"{IN_USE} at CTA \(0, 0, 0\), mbarrier 0x408"):
        run(COMMITS.format(first=WAIT, second=""), shared=64, check=True, schedule=schedule)
