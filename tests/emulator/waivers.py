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
#: required before the accumulator may be reused.
EARLY_USE = Waivers(early_use=frozenset({"gemm_sm100.py:2348"}))

#: flash-attn-4's sm_100 forward has no ``tcgen05.wait::ld`` at all: not after the softmax warps load S
#: (flash_fwd_sm100.py:2645), not where the correction warps load O to rescale it (3141) and to write it out (3242). (Both calls
#: in that file, 2881 and 2934, are commented out, with the loads they stood behind.) Each load's registers are used before
#: the warp signals anyone, so the use is taken as the wait; a signal before the first use is still reported.
FA4_FORWARD_SM100 = Waivers(completes_on_use=frozenset({"flash_fwd_sm100.py:2645", "flash_fwd_sm100.py:3141", "flash_fwd_sm100.py:3242"}))

#: flash-attn-4's sm_100 backward masks S before the ``wait::ld`` of its load (flash_bwd_sm100.py:3578). Its MMA warp ends
#: with a release (``pipeline_Kt.consumer_release`` at 2926, with head size 64 ``handle_Q.release`` at 3077) whose arrival
#: no warp waits for, so it may land after the CTA's last warp has exited.
FA4_BACKWARD_SM100 = Waivers(
    early_use=frozenset({"flash_bwd_sm100.py:3578"}),
    in_flight_at_exit=frozenset({"flash_bwd_sm100.py:2926", "flash_bwd_sm100.py:3077"}),
)

#: Quack's RMSNorm loads whole tiles of rows (rmsnorm.py:251); lanes of rows past M read shared memory that nothing filled,
#: compute on it and store nothing.
QUACK_RMSNORM = Waivers(uninitialised=frozenset({"rmsnorm.py:251"}))

#: This project's Hopper forward for few queries loads only tiles that hold keys of the sequence; its products of 64 keys read
#: past them, and those scores are masked by selection (under poison, the numbers are right). V's rows are cleared instead.
OURS_SM90 = {"forward_few": Waivers(uninitialised=frozenset({"forward_consumer.py"}))}
