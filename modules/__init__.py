"""Neural-network modules: pooling by multi-head attention (PMA) over jagged events, in MXFP8 or BF16."""

from modules.numerics import Numerics
from modules.pma import PMA

__all__ = ["PMA", "Numerics"]
