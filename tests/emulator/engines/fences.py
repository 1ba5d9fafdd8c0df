"""Memory fences. They order nothing in the run itself (operations are atomic); the race checker needs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ptx import Instr
from ..registry import op

_KINDS = (
    "fence membar proxy async alias generic global shared::cta shared::cluster sc acq_rel acquire release "
    "cta cluster gpu sys gl mbarrier_init sync_restrict::shared::cluster sync_restrict::shared::cta async::generic "
    "async.global async.shared::cta shared"
)


@op("fence", "membar", allow=_KINDS)
def fence(g: Any, I: Instr, m: np.ndarray) -> None:
    if g.clock is not None:
        g.clock.fence(g, I)
