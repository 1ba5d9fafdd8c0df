"""MMA warp of the backward: scales into tensor memory, five products per query tile, and their order.

Per query tile t (see ``backward_plan`` for what lies where)::

    S(t) = K Q^T    dK += dS(t-1)^T Q(t-1)    dQ = dS(t-1) K    dP(t) = V dO^T    dV += P(t)^T dO(t)

S of the next tile is issued before the products of dS, so that its exponentials run under them. Every barrier between the products and the
compute warps completes once per query tile: one counter gives all phases.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from lp_fa4.sm100.atoms import copy_scales
from lp_fa4.sm100.backward_atoms import BLOCKS, product
from lp_fa4.sm100.backward_config import TILE
from lp_fa4.sm100.backward_plan import DS_ATOMS_K, DS_ATOMS_Q
from lp_fa4.sm100.backward_work import fetch, item_count, key_tile, query_step
from lp_fa4.sm100.sync import commit, tensor_fence, wait_tensor


@cute.jit
def mma_role(kernel: cutlass.Constexpr, args, shared, bars, tmem):
    """Issue every product of this CTA's key tiles."""
    spec, bar, stages = kernel.spec, kernel.barriers, kernel.tuning.stages
    count, step = item_count(args), Int32(cute.arch.grid_dim()[0])
    index = Int32(cute.arch.block_idx()[0])
    turn, tiles = Int32(0), Int32(0)
    while index < count:
        entry = fetch(args, index)
        for n in cutlass.range(entry.begin, entry.end, unroll=1):
            item = key_tile(spec, args, entry, index, n)
            if item.steps > 0:
                buffer, keys = tiles & 1, item.keys - item.row
                wait_tensor(bars + bar.kv_full + buffer, tiles >> 1 & 1)
                for s in cutlass.range(item.steps, unroll=1):
                    now = turn + s
                    stage, filled = now % stages, now // stages & 1
                    past, last = (now - 1) % stages, (now - 1) & 1
                    wait_tensor(bars + bar.q_full + stage, filled)
                    if const_expr(kernel.aliased):
                        if s > 0:
                            await_warps(bars + bar.dp_read, last)
                        elif now > 0:
                            await_warps(bars + bar.dq_read, last)
                    scores(kernel, shared, bars, tmem, buffer, stage)
                    if s > 0:
                        _, tile = query_step(spec, item, s - 1)
                        await_warps(bars + bar.ds_ready, last)
                        if s == 1 and tiles > 0:
                            await_warps(bars + bar.dk_read, tiles - 1 & 1)
                        key_gradient(kernel, shared, tmem, past, s > 1, item.queries - tile * TILE)
                        commit(bars + bar.q_empty + past)
                    if const_expr(kernel.aliased):
                        await_warps(bars + bar.s_read, now & 1)
                    if s > 0:
                        if const_expr(not kernel.aliased):
                            await_sums(bars + bar.dq_read, now - 1)
                        query_gradient(kernel, shared, bars, tmem, buffer, keys)
                    wait_tensor(bars + bar.do_full + stage, filled)
                    if const_expr(kernel.aliased):  # noqa: SIM102 (compile time outside, run time inside)
                        if s > 0:
                            await_warps(bars + bar.dq_read, last)
                    probabilities_gradient(kernel, shared, bars, tmem, buffer, stage)
                    _, tile = query_step(spec, item, s)
                    await_warps(bars + bar.p_ready, now & 1)
                    if s == 0 and tiles > 0:
                        await_warps(bars + bar.dv_read, tiles - 1 & 1)
                    value_gradient(kernel, shared, tmem, stage, s > 0, item.queries - tile * TILE)
                    commit(bars + bar.do_empty + stage)
                turn += item.steps
                stage, last = (turn - 1) % stages, (turn - 1) & 1
                _, tile = query_step(spec, item, item.steps - 1)
                await_warps(bars + bar.ds_ready, last)
                if item.steps == 1 and tiles > 0:
                    await_warps(bars + bar.dk_read, tiles - 1 & 1)
                key_gradient(kernel, shared, tmem, stage, item.steps > 1, item.queries - tile * TILE)
                commit(bars + bar.dkv_full)
                commit(bars + bar.q_empty + stage)
                if const_expr(not kernel.aliased):
                    await_sums(bars + bar.dq_read, turn - 1)
                query_gradient(kernel, shared, bars, tmem, buffer, keys)
                commit(bars + bar.kv_empty + buffer)
                tiles += 1
        index += step


def await_warps(barrier, phase):
    """Wait for the compute or reduction warps before work on tensor memory. Not ``wait_tensor``: tests find these waits by their file."""
    cute.arch.mbarrier_wait(barrier, phase)
    tensor_fence("after")


@cute.jit
def await_sums(barrier, now):
    """Wait until dQ of the query tile before tile ``now`` is in registers."""
    if now > 0:
        await_warps(barrier, now - 1 & 1)


@cute.jit
def scores(kernel: cutlass.Constexpr, shared, bars, tmem, buffer, stage):
    """``S = K Q^T``."""
    atoms = kernel.atoms
    sfk, sfq = atoms.scales("SFK", tmem), atoms.scales("SFQ", tmem)
    copy_scales(shared.sf_k, buffer, sfk)
    copy_scales(shared.sf_q, stage, sfq)
    mma = atoms.scores()
    a = mma.make_fragment_A(shared.k)[None, None, None, buffer]
    b = mma.make_fragment_B(shared.q)[None, None, None, stage]
    product(mma, atoms.accumulator("S", tmem), a, b, sfk, sfq, False, Int32(0), False)
    commit(bars + kernel.barriers.s_full)


@cute.jit
def probabilities_gradient(kernel: cutlass.Constexpr, shared, bars, tmem, buffer, stage):
    """``dP = V dO^T``."""
    atoms = kernel.atoms
    sfv, sfdo = atoms.scales("SFV", tmem), atoms.scales("SFDO", tmem)
    copy_scales(shared.sf_v, buffer, sfv)
    copy_scales(shared.sf_do, stage, sfdo)
    mma = atoms.scores()
    a = mma.make_fragment_A(shared.v)[None, None, None, buffer]
    b = mma.make_fragment_B(shared.do)[None, None, None, stage]
    product(mma, atoms.accumulator("dP", tmem), a, b, sfv, sfdo, False, Int32(0), False)
    commit(bars + kernel.barriers.dp_full)


@cute.jit
def value_gradient(kernel: cutlass.Constexpr, shared, tmem, stage, keep, queries):
    """``dV += P^T dO``; P and its constant scale are there already."""
    atoms = kernel.atoms
    sfp, sfdo = atoms.scales("SFP", tmem), atoms.scales("SFDO_T", tmem)
    copy_scales(shared.sf_dot, stage, sfdo)
    mma = atoms.key_gradient()
    b = mma.make_fragment_B(atoms.turned_queries(shared.do, kernel.tuning.stages))[None, None, None, stage]
    product(mma, atoms.accumulator("dV", tmem), atoms.blocks("P", tmem), b, sfp, sfdo, keep, queries, True)


@cute.jit
def key_gradient(kernel: cutlass.Constexpr, shared, tmem, stage, keep, queries):
    """``dK += dS^T Q``. Block j of 32 queries finds its scales in the atom of the warpgroup that made it."""
    atoms = kernel.atoms
    sfds = [atoms.scales("SFDS_K", tmem, i) for i in range(DS_ATOMS_K)]
    for i in cutlass.range_constexpr(DS_ATOMS_K):
        copy_scales(shared.sf_ds_k, i, sfds[i])
    sfq = atoms.scales("SFQ_T", tmem)
    copy_scales(shared.sf_qt, stage, sfq)
    mma = atoms.key_gradient()
    b = mma.make_fragment_B(atoms.turned_queries(shared.q, kernel.tuning.stages))[None, None, None, stage]
    scales = [sfds[j * DS_ATOMS_K // BLOCKS] for j in range(BLOCKS)]
    product(mma, atoms.accumulator("dK", tmem), atoms.blocks("dS", tmem), b, scales, sfq, keep, queries, True)


@cute.jit
def query_gradient(kernel: cutlass.Constexpr, shared, bars, tmem, buffer, keys):
    """``dQ = dS K``. Block j of 32 keys finds its scales in the atom of the warps that made it."""
    atoms = kernel.atoms
    sfds = [atoms.scales("SFDS_Q", tmem, i) for i in range(DS_ATOMS_Q)]
    for i in cutlass.range_constexpr(DS_ATOMS_Q):
        copy_scales(shared.sf_ds_q, i, sfds[i])
    sfk = atoms.scales("SFK_T", tmem)
    copy_scales(shared.sf_kt, buffer, sfk)
    mma = atoms.query_gradient()
    a = mma.make_fragment_A(shared.ds)[None, None, None, 0]
    b = mma.make_fragment_B(atoms.turned_keys(shared.k, 2))[None, None, None, buffer]
    product(mma, atoms.accumulator("dQ", tmem), a, b, sfds, sfk, False, keys, True)
    commit(bars + kernel.barriers.dq_full)
