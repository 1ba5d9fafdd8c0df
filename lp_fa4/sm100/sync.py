"""Barriers between warps, TMA and the tensor core: mbarrier waits and arrivals with the fences that tensor memory needs.

Work on tensor memory (``tcgen05.mma``, ``.cp``, ``.ld``, ``.st``) that two threads order through an mbarrier needs
``tcgen05.fence::before_thread_sync`` before the arrival and ``::after_thread_sync`` after the wait (PTX ISA, tcgen05 memory consistency).
"""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op


class BarrierPlaces:
    """A kernel's mbarriers in one array: each name is an attribute, the place of the first barrier of that name.

    A subclass has ``sizes``: names in their order, how many barriers each has, and how many arrivals complete a phase of one.
    """

    def sizes(self) -> list[tuple[str, int, int]]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> int:
        at = 0
        for known, many, _ in self.sizes():
            if known == name:
                return at
            at += many
        raise AttributeError(name)

    @property
    def arrivals(self) -> list[int]:
        """Arrivals of each barrier in order."""
        return [arrivals for _, many, arrivals in self.sizes() for _ in range(many)]


@dsl_user_op
def tensor_fence(when: str, *, loc=None, ip=None) -> None:
    """``tcgen05.fence::{before,after}_thread_sync``."""
    llvm.inline_asm(
        None,
        [],
        f"tcgen05.fence::{when}_thread_sync;",
        "",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def wait(barrier, phase) -> None:
    """Wait until the phase of parity ``phase`` is over: for data that TMA brought, or for buffers that are free again."""
    cute.arch.mbarrier_wait(barrier, phase)


def wait_tensor(barrier, phase) -> None:
    """The same, before work on tensor memory that the arrivals order."""
    cute.arch.mbarrier_wait(barrier, phase)
    tensor_fence("after")


def ring_place(count, stages: int):
    """Stage and phase parity of use ``count`` (from 0) of a ring of ``stages`` buffers, a power of two."""
    return count & (stages - 1), count >> (stages.bit_length() - 1) & 1


@cute.jit
def arrive(barrier):
    """One arrival per warp, after all its lanes got here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def arrive_tensor(barrier):
    """One arrival per warp, after all its lanes finished their work on tensor memory (which they have waited for)."""
    tensor_fence("before")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def commit(barrier):
    """Arrive when every tensor-core operation issued so far by this thread is done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier, None, tcgen05.CtaGroup.ONE)


@cute.jit
def drain(barriers, count, stages: cutlass.Constexpr):
    """Wait until all buffers of a ring used ``count`` times are free again, each on its own barrier (commits on two barriers arrive in
    any order): a producer's last act, so that the tensor core's last arrivals find this CTA's barriers alive."""
    for i in cutlass.range_constexpr(stages):
        use = count - 1 - i
        if use >= 0:
            wait(barriers + use % stages, use // stages & 1)
