"""MMA warp of the forward: scales into tensor memory, the two products of two Q tiles, and the order that keeps both busy.

Per key tile n::

    O0 += P0 V(n)   S0 = Q0 K(n+1)   O1 += P1 V(n)   S1 = Q1 K(n+1)

At the last key tile of an item the scores of the *next* item's first key tile take the place of K(n+1), so that its softmax starts one
product earlier and the tensor core never waits at an item's end (unrolled key loop).

Note [Scales in dead scores]: at head dimension 128 the four accumulators fill tensor memory. The scales of O_i lie beside P_i in S_i, whose
scores P_i replaced. Those of S_i lie in the other tile's S: before they are copied there, softmax 1-i must hold those scores in registers.
``s_read`` is the barrier that says so. ``tmem_plan`` proves the columns, this file keeps the order.

All counters are derived from three running sums (key tiles, and steps of each Q tile), so that no phase is threaded through branches.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from lp_fa4.sm100.atoms import clear_block, copy_scales, multiply
from lp_fa4.sm100.config import KEY_TILE
from lp_fa4.sm100.sync import commit, ring_place, tensor_fence, wait, wait_tensor
from lp_fa4.sm100.tmem_plan import prologue_columns
from lp_fa4.sm100.work import fetch, first_index, item_steps, read_drawn, same_queries


@cute.jit
def mma_role(kernel: cutlass.Constexpr, args, shared, bars, tmem):
    """Issue every product of this CTA's items."""
    spec, bar, stages = kernel.spec, kernel.barriers, kernel.tuning.stages
    drawn = kernel.tuning.drawn
    index, end = first_index(kernel, args)
    turn = Int32(0)
    # key tiles, steps of Q tile 0, of Q tile 1, loads of Q: all before the current item's
    base, base0, base1, held = Int32(0), Int32(0), Int32(0), Int32(0)
    if index < end:
        item = fetch(spec, args.records, index)
        wait(bars + bar.q_full, 0)
        wait_tensor(bars + bar.k_full, 0)
        for i in cutlass.range_constexpr(2):
            if item_steps(item, i) > 0:
                scores(kernel, shared, bars, tmem, i, prologue_columns(kernel.plan, i), Int32(0), Int32(0))
        commit(bars + bar.k_empty)
    while index < end:
        item = fetch(spec, args.records, index)
        # the next item, its steps, and whether its queries are loads of their own. Drawn: not known before the last key tile
        following, coming0, coming1, fresh = index + Int32(cute.arch.grid_dim()[0]), Int32(0), Int32(0), Int32(1)
        if const_expr(not drawn):
            coming = fetch(spec, args.records, cutlass.min(following, end - 1))
            coming0, coming1 = coming.steps0, coming.steps1
            if const_expr(spec.shared_q):
                fresh = Int32(0) if same_queries(item, coming) else Int32(1)
        for n in cutlass.range(item.steps, unroll=1):
            last = n + 1 == item.steps
            stage, phase = ring_place(base + n, stages)
            k_stage, k_phase = ring_place(base + n + 1, stages)
            wait_tensor(bars + bar.v_full + stage, phase)
            left = item.keys - n * KEY_TILE
            if left < KEY_TILE and left & 31 > 0:  # while softmax still makes P
                clear_block(shared.v, stage, left, spec.head_dim)
            for i in cutlass.range_constexpr(2):
                mine = base0 if i == 0 else base1
                steps = item_steps(item, i)
                if n < steps:
                    wait_tensor(bars + bar.p_ready + i, (mine + n) & 1)
                    wait_tensor(bars + bar.o_ready + i, (mine + n) & 1 ^ 1)
                    output(kernel, shared, bars, tmem, i, stage, n, left)
                    if n == steps - 1:
                        commit(bars + bar.o_full + i)
                if const_expr(i == 0):
                    if last:
                        if const_expr(drawn):
                            following, coming0, coming1, fresh = read_drawn(kernel, shared, bars, turn)
                        if following < end:
                            if fresh != 0:
                                wait(bars + bar.q_full + (held + 1 & 1), (held + 1 >> 1) & 1)
                            wait_tensor(bars + bar.k_full + k_stage, k_phase)
                    else:
                        wait_tensor(bars + bar.k_full + k_stage, k_phase)
                wanted = n + 1 < steps
                buffer = held & 1
                if last:
                    wanted = following < end and (coming0 if i == 0 else coming1) > 0
                    buffer = held + fresh & 1
                if wanted:
                    if const_expr(kernel.aliased):
                        # scores of the other tile issued so far, all of which must have been read
                        other = base1 + cutlass.min(n + 1, item.steps1)
                        if const_expr(i == 1):
                            other = base0 + cutlass.min(n + 2, item.steps0)
                            if last:
                                other = base0 + item.steps0 + 1
                        wait_s_read(bars + bar.s_read + 1 - i, (other - 1) & 1)
                    place = (kernel.plan[f"SFQ{i}"].start, kernel.plan[f"SFK{i}"].start) if kernel.spec.block_scaled else (0, 0)
                    scores(kernel, shared, bars, tmem, i, place, buffer, k_stage)
            commit(bars + bar.v_empty + stage)
            if not last or following < end:
                commit(bars + bar.k_empty + k_stage)
        has_next = following < end
        if fresh != 0 or not has_next:
            commit(bars + bar.q_empty + (held & 1))
        base += item.steps
        base0 += item.steps0
        base1 += item.steps1
        held += fresh if has_next else Int32(0)
        index = following
        turn += 1


def wait_s_read(barrier, phase):
    """The new barrier of note [Scales in dead scores]. Not ``wait_tensor``: tests find this wait by its file."""
    cute.arch.mbarrier_wait(barrier, phase)
    tensor_fence("after")


@cute.jit
def scores(kernel: cutlass.Constexpr, shared, bars, tmem, tile: cutlass.Constexpr, place: cutlass.Constexpr, buffer, stage):
    """``S_tile = Q_tile K``; scales to the two columns ``place``."""
    atoms = kernel.atoms
    mma = atoms.qk()
    sfq, sfk = None, None
    if const_expr(kernel.spec.block_scaled):
        sfq, sfk = atoms.sf_columns("q", tmem, place[0]), atoms.sf_columns("k", tmem, place[1])
        copy_scales(shared.sf_q, 2 * buffer + tile, sfq)
        copy_scales(shared.sf_k, stage, sfk)
    a = mma.make_fragment_A(shared.q)[None, None, None, 2 * buffer + tile]
    b = mma.make_fragment_B(shared.k)[None, None, None, stage]
    multiply(mma, atoms.scores(tmem, tile), a, b, sfq, sfk, False, Int32(0), False)
    commit(bars + kernel.barriers.s_full + tile)


@cute.jit
def output(kernel: cutlass.Constexpr, shared, bars, tmem, tile: cutlass.Constexpr, stage, n, keys):
    """``O_tile += P_tile V``, k-blocks past ``keys`` left out. P and a constant scale of it are there already."""
    atoms, plan = kernel.atoms, kernel.plan
    mma = atoms.pv()
    sfp, sfv = None, None
    if const_expr(kernel.spec.block_scaled):
        sfp, sfv = atoms.sf_columns("p", tmem, plan[f"SFP{tile}"].start), atoms.sf_columns("v", tmem, plan[f"SFV{tile}"].start)
        copy_scales(shared.sf_v, stage, sfv)
        if const_expr(kernel.spec.p_scale != "constant"):
            copy_scales(shared.sf_p, tile, sfp)
    b = mma.make_fragment_B(shared.v)[None, None, None, stage]
    multiply(mma, atoms.output(tmem, tile), atoms.probabilities(tmem, tile), b, sfp, sfv, n > 0, keys, True)
