"""What the race checker lets pass, kernel by kernel, with the reason.

A waiver weakens one rule for one named kernel. Kernels of this project use ``NONE``.
"""

from __future__ import annotations

from .check import Waivers

NONE = Waivers()

#: Quack's sm_100 GEMM waits once, after its last ``tcgen05.ld``, and converts earlier subtiles before that; flash-attn-4's
#: sm_100 backward applies its mask before the ``wait::ld`` (flash_bwd_sm100.py, "Load S from TMEM"). Both run right on
#: hardware, whose register scoreboard holds the use. The wait is still required before columns may be reused.
EARLY_USE = Waivers(early_use=True)

#: flash-attn-4's sm_100 forward has no ``tcgen05.wait::ld`` at all (the fence is commented out after the softmax load and
#: in the correction loop of flash_fwd_sm100.py). Each load's registers are used before the warp signals anyone, so the
#: use is taken as the wait; a signal before the first use would still be reported.
FA4_FORWARD_SM100 = Waivers(completes_on_use=True)

#: flash-attn-4's sm_100 backward, as ``EARLY_USE``; in its two-CTA form the MMA warp also ends with
#: ``pipeline_Kt.consumer_release`` (flash_bwd_sm100.py, "dQ = dS @ K" of the tail), whose arrival no warp waits for, so it
#: may land after the CTA's last warp has exited.
FA4_BACKWARD_SM100 = Waivers(early_use=True, in_flight_at_exit=True)

#: Quack's RMSNorm loads whole tiles of rows; lanes of rows past M read shared memory that nothing filled, compute on it and
#: store nothing.
QUACK_RMSNORM = Waivers(uninitialised=True)
