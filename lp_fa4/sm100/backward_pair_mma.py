"""MMA warp of a pair's leader: five products per query tile for both CTAs, and their order.

Per query tile t (see ``backward_pair_plan`` for what lies where)::

    S(t) = K Q^T    dK += dS(t-1)^T Q(t-1)    dQ = dS(t-1) K    dP(t) = V dO^T    dV += P(t)^T dO(t)

dK needs dS in tensor memory (``ds_ready``), dQ also what the CTAs sent to each other (``ds_shared``). The buffers of dS are free again once
dP of the next tile is there, because dQ was issued before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from lp_fa4.sm100.backward_pair_atoms import product
from lp_fa4.sm100.backward_pair_sync import commit_pair
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile
from lp_fa4.sm100.sync import tensor_fence


@cute.jit
def mma_role(kernel: cutlass.Constexpr, args, shared, bars, tmem):
    """Issue every product of this pair's items."""
    spec, bar, stages = kernel.spec, kernel.barriers, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0]) // 2
    index = Int32(cute.arch.block_idx()[0]) // 2
    turn, tiles = Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, 2 * n)
            if item.steps > 0:
                buffer = tiles & 1
                await_pair(bars + bar.kv_full + buffer, tiles >> 1 & 1)
                for s in cutlass.range(item.steps, unroll=1):
                    now = turn + s
                    stage, filled = now % stages, now // stages & 1
                    past, last = (now - 1) % stages, (now - 1) & 1
                    await_pair(bars + bar.q_full + stage, filled)
                    # dQ that was last written over these columns: of the item before, or of the tile before last
                    if s == 0:
                        if now > 0:
                            await_pair(bars + bar.dq_read, last)
                    elif s > 1:
                        await_pair(bars + bar.dq_read, now & 1)
                    scores(kernel, shared, bars, tmem, buffer, stage)
                    if s > 0:
                        await_pair(bars + bar.ds_ready, last)
                        if s == 1 and tiles > 0:
                            await_pair(bars + bar.dk_read, tiles - 1 & 1)
                        key_gradient(kernel, shared, tmem, past, s > 1)
                        commit_pair(bars + bar.q_empty + past)
                    await_pair(bars + bar.s_read, now & 1)
                    if s > 0:
                        await_pair(bars + bar.ds_shared, last)
                        query_gradient(kernel, shared, bars, tmem, buffer)
                    await_pair(bars + bar.do_full + stage, filled)
                    probabilities_gradient(kernel, shared, bars, tmem, buffer, stage)
                    await_pair(bars + bar.p_ready, now & 1)
                    if s == 0 and tiles > 0:
                        await_pair(bars + bar.dv_read, tiles - 1 & 1)
                    value_gradient(kernel, shared, tmem, stage, s > 0)
                    commit_pair(bars + bar.do_empty + stage)
                turn += item.steps
                # the last query tile's dK and dQ
                stage = (turn - 1) % stages
                await_pair(bars + bar.ds_ready, turn - 1 & 1)
                if item.steps == 1 and tiles > 0:
                    await_pair(bars + bar.dk_read, tiles - 1 & 1)
                key_gradient(kernel, shared, tmem, stage, item.steps > 1)
                commit_pair(bars + bar.dkv_full)
                commit_pair(bars + bar.q_empty + stage)
                if item.steps > 1:
                    await_pair(bars + bar.dq_read, turn & 1)
                await_pair(bars + bar.ds_shared, turn - 1 & 1)
                query_gradient(kernel, shared, bars, tmem, buffer)
                commit_pair(bars + bar.kv_empty + buffer)
                tiles += 1
        index += step


def await_pair(barrier, phase):
    """Wait at a barrier of the leader for both CTAs."""
    cute.arch.mbarrier_wait(barrier, phase)
    tensor_fence("after")


@cute.jit
def scores(kernel: cutlass.Constexpr, shared, bars, tmem, buffer, stage):
    """``S = K Q^T``."""
    mma = kernel.atoms.scores()
    a = mma.make_fragment_A(shared.k)[None, None, None, buffer]
    b = mma.make_fragment_B(shared.q)[None, None, None, stage]
    product(mma, kernel.atoms.accumulator("S", tmem), a, b, False)
    commit_pair(bars + kernel.barriers.s_full)


@cute.jit
def probabilities_gradient(kernel: cutlass.Constexpr, shared, bars, tmem, buffer, stage):
    """``dP = V dO^T``."""
    mma = kernel.atoms.scores()
    a = mma.make_fragment_A(shared.v)[None, None, None, buffer]
    b = mma.make_fragment_B(shared.do)[None, None, None, stage]
    product(mma, kernel.atoms.accumulator("dP", tmem), a, b, False)
    commit_pair(bars + kernel.barriers.dp_full)


@cute.jit
def value_gradient(kernel: cutlass.Constexpr, shared, tmem, stage, keep):
    """``dV += P^T dO``."""
    mma = kernel.atoms.key_gradient()
    b = mma.make_fragment_B(shared.dot)[None, None, None, stage]
    product(mma, kernel.atoms.accumulator("dV", tmem), kernel.atoms.blocks("P", tmem), b, keep)


@cute.jit
def key_gradient(kernel: cutlass.Constexpr, shared, tmem, stage, keep):
    """``dK += dS^T Q``."""
    mma = kernel.atoms.key_gradient()
    b = mma.make_fragment_B(shared.qt)[None, None, None, stage]
    product(mma, kernel.atoms.accumulator("dK", tmem), kernel.atoms.blocks("dS", tmem), b, keep)


@cute.jit
def query_gradient(kernel: cutlass.Constexpr, shared, bars, tmem, buffer):
    """``dQ = dS K`` over the 256 keys of the pair."""
    mma = kernel.atoms.query_gradient()
    a = mma.make_fragment_A(shared.ds)[None, None, None, 0]
    b = mma.make_fragment_B(shared.kt)[None, None, None, buffer]
    product(mma, kernel.atoms.accumulator("dQ", tmem), a, b, False)
    commit_pair(bars + kernel.barriers.dq_full)
