"""Barriers between the two CTAs of a pair. CTA 0 leads: its MMA warp issues every product, so what it waits for arrives at its own.

Arrivals and waits have the default scope, a CTA, as those of flash-attn-4 and CUTLASS between two CTAs: what passes between them is read
and written by the tensor core and by bulk copies, behind proxy fences, and never by plain loads or stores. A release to the cluster costs a
``MEMBAR.ALL.GPU``, an acquire an invalidation of the first-level cache.
"""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T

from lp_fa4.common.numbers import inline_ptx
from lp_fa4.sm100.sync import tensor_fence

LEADER = 0
BOTH = 3
"""Mask of the CTAs of a pair."""


@cute.jit
def arrive_leader(barrier):
    """One arrival per warp at the leader's barrier, after its lanes finished their work on tensor memory (which they have waited for)."""
    tensor_fence("before")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, LEADER)


@cute.jit
def commit_pair(barrier):
    """Arrive in both CTAs when every tensor-core operation issued so far by this thread is done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier, BOTH, tcgen05.CtaGroup.TWO)


def cta_rank():
    """This CTA's place in its pair. Read where it is needed: a register kept from the kernel's start is one less for every role."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


@cute.jit
def cluster_barrier():
    """Every thread of both CTAs gets here before any goes on."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def in_cta(address, rank):
    """Where the pair's shared memory has CTA ``rank``'s counterpart of this CTA's ``address``."""
    return Int32(inline_ptx(T.i32(), [Int32(address), Int32(rank)], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r"))
