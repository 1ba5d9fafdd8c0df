"""Programmatic dependent launch: what a kernel may do before it waits for those before it."""

import dataclasses

import pytest
import torch

from . import api
from .dependents import Dependents
from .errors import RaceError
from .test_core import launch
from .test_engines_sm90 import FILL

AT = "mul.wide.u32 %rd8, %r0, 4;\nadd.s64 %rd9, %rd0, %rd8;\nadd.s64 %rd10, %rd1, %rd8;\n"
LOAD, STORE = "ld.global.b32 %r8, [%rd9];\n", "st.global.b32 [%rd10], %r8;\n"
WAIT, BEGIN = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"
COPY = LOAD + STORE


def run(*launches, **shape):
    """Each of ``(body, source, target, dependent)`` in turn."""
    stream = Dependents()
    tensors = {id(t): t for _, *both, _ in launches for t in both}.values()
    extents = [(t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in tensors]
    for body, source, target, dependent in launches:
        one = dataclasses.replace(launch(AT + body, source, target, **shape), dependent=dependent)
        past = stream.begin(one, extents)
        machine = api.run(one, extents, check=True, past=past)
        stream.end(past, machine.waited and not machine.early)


def judge(right, *launches, **shape):
    """Runs them; where they are not ``right``, a use that comes too early is found."""
    if right:
        run(*launches, **shape)
    else:
        with pytest.raises(RaceError, match="touches before"):
            run(*launches, **shape)


def words(n=4):
    return [torch.arange(32, dtype=torch.int32) + 100 * i for i in range(n)]


@pytest.mark.parametrize(
    "body, right",
    [(WAIT + COPY, True), (COPY, False), (LOAD + WAIT + STORE, False), ("red.global.add.u32 [%rd9], 1;\n" + WAIT + COPY, False)],
    ids=["waits", "never waits", "reads before", "adds before"],
)
def test_what_the_launch_before_wrote(body, right):
    a, b, c, _ = words()
    judge(right, (BEGIN + COPY, a, b, False), (body, b, c, True))
    assert not right or torch.equal(c, a)


def test_what_is_older_may_be_read():
    """By a launch that was not asked to begin early, as by one that was."""
    for begin in ("", BEGIN):
        a, b, c, d = words()
        run((COPY, a, b, False), (begin + COPY, a, c, False), (LOAD + WAIT + STORE, b, d, True))
        assert torch.equal(d, a)


ONE = "setp.ge.u32 %p2, %r0, 32;\n@%p2 bra OTHERS;\ngriddepcontrol.wait;\nOTHERS:\n"


@pytest.mark.parametrize("met", ["bar.sync 0;\n", ""])
def test_one_warp_waits_for_all(met):
    """If the others meet it behind its wait."""
    a, b, c = [torch.arange(64, dtype=torch.int32) + 100 * i for i in range(3)]
    judge(bool(met), (COPY, a, b, False), (ONE + met + COPY, b, c, True), block=64)
    assert not met or torch.equal(c, a)


@pytest.mark.parametrize(
    "load, right", [("ld.acquire.gpu.global.b32 %r9, [%rd9];\n", True), ("ld.relaxed.gpu.global.b32 %r9, [%rd9];\n", False)]
)
def test_a_flag(load, right):
    """Of a launch that is still running: what was written before it was raised may be read."""
    a, b, c, _ = words()
    judge(right, (BEGIN + COPY, a, b, False), (load + COPY, b, c, True))


def test_a_bulk_copy():
    """Of what the launch before wrote, and of what it did not."""
    for source, right in ((0, True), (1, False)):
        t = words()
        judge(right, (COPY, t[0], t[1], False), (FILL.format(n=128) + WAIT + COPY, t[source], t[2], True), shared=2048)


@pytest.mark.parametrize("between, right", [(WAIT + BEGIN, True), (BEGIN + WAIT, False), (WAIT, True)])
def test_a_chain(between, right):
    """The third may read what the first wrote if the second waited for the first before it let the third begin."""
    a, b, c, d = words()
    judge(right, (COPY, a, b, False), (between + COPY, a, c, True), (LOAD + WAIT + STORE, b, d, True))
    assert not right or torch.equal(d, a)


def test_a_launch_that_is_not_dependent():
    a, b, c, _ = words()
    run((BEGIN + COPY, a, b, False), (COPY, b, c, False))
    assert torch.equal(c, a)
