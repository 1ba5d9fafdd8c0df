"""What the race checker lets pass, kernel by kernel, with the reason.

A waiver weakens one rule at named source lines of one kernel; the same omission at any other line is reported. Lines are
those of Quack 0.6.5 and flash-attn-4 4.0.0b36 and move with a new version: then the cases fail until someone has looked.
Kernels of this project use ``NONE``, but for one read.
"""

from __future__ import annotations

from .check import Waivers

NONE = Waivers()

#: Quack's sm_100 GEMM waits once, after the last ``tcgen05.ld`` of a tile (gemm_sm100.py, ``acc_release_idx``), and
#: converts each subtile before that. It runs right on hardware, whose register scoreboard holds the use. The wait is still
#: required before the accumulator may be reused. With two CTAs a tile, epilogue warps of the second release accumulators to the
#: first by arrivals of ``.cta`` scope (2359); before it exits, the first waits for the last accumulator's release only
#: (``PipelineUmmaAsync.producer_tail``), which by the letter does not tell of the others'.
QUACK_GEMM_SM100 = Waivers(early_use=frozenset({"gemm_sm100.py:2348"}), known_by_others=frozenset({"gemm_sm100.py:2359"}))

#: flash-attn-4's sm_100 forward has no ``tcgen05.wait::ld`` at all: not after the softmax warps load S
#: (flash_fwd_sm100.py:2645), not where the correction warps load O to rescale it (3141) and to write it out (3242). (Both calls
#: in that file, 2881 and 2934, are commented out, with the loads they stood behind.) Each load's registers are used before
#: the warp signals anyone, so the use is taken as the wait; a signal before the first use is still reported.
#: Before it exits, its load warp waits for the release of Q's last stage only (1745); that of the first (2045) is an earlier
#: ``tcgen05.commit`` of the same warp, on another barrier, which nobody waits for. With two CTAs a tile, correction warps of the
#: second give O back to the first by arrivals of ``.cta`` scope (2988), which the first waits for only if another tile follows.
FA4_FORWARD_SM100 = Waivers(
    completes_on_use=frozenset({"flash_fwd_sm100.py:2645", "flash_fwd_sm100.py:3141", "flash_fwd_sm100.py:3242"}),
    known_by_others=frozenset({"flash_fwd_sm100.py:2045", "flash_fwd_sm100.py:2988"}),
)

#: flash-attn-4's sm_100 backward masks S before the ``wait::ld`` of its load (flash_bwd_sm100.py:3578). When its CTA exits,
#: several things may not be over. Arrivals of the MMA warp's last ``tcgen05.commit``s on barriers that nobody waits for again:
#: one more "S is there" (2898), the releases of dS and K transposed (2925, 2926), with head size 64 those of P and dS (3045,
#: 3077). And the last store of dK and dV, which alone of its stages is not waited for (4891: ``epi_stage < num_epi_stages - 1``):
#: it may still read shared memory, as a TMA store (4883) or, with grouped heads, a bulk reduction (inline assembly that carries
#: the line of ``__call__``, 659). Warps of the second CTA release dQ, dK and dV to the first by arrivals of ``.cta`` scope (4216,
#: 4915; of jagged sequences 4448, 4506), of which the first learns by later ones, on other barriers. By the letter all of this is
#: undefined; hardware lets it pass.
FA4_BACKWARD_SM100 = Waivers(
    early_use=frozenset({"flash_bwd_sm100.py:3578"}),
    known_by_others=frozenset(f"flash_bwd_sm100.py:{line}" for line in (2898, 3045, 4216, 4448, 4506, 4915)),
    in_flight_at_exit=frozenset(f"flash_bwd_sm100.py:{line}" for line in (659, 2925, 2926, 3077, 4883)),
)

#: Quack's RMSNorm loads whole tiles of rows (rmsnorm.py:251); lanes of rows past M read shared memory that nothing filled,
#: compute on it and store nothing.
QUACK_RMSNORM = Waivers(uninitialised=frozenset({"rmsnorm.py:251"}))

#: This project's Hopper forward for few queries loads only tiles that hold keys of the sequence; its products of 64 keys read
#: past them, and those scores are masked by selection (under poison, the numbers are right). V's rows are cleared instead.
OURS_SM90 = {"forward_few": Waivers(uninitialised=frozenset({"wgmma.py"}))}

#: And its Blackwell forward: a row that saw no key has products that were never issued, so its O in tensor memory is whatever was there;
#: the epilogue reads it with the tile's other rows and selects 0 instead. A CTA whose items have no keys at all never wrote it.
OURS = {**OURS_SM90, "lp_fa4sm100forward_kernel": Waivers(uninitialised=frozenset({"atoms.py"}))}
