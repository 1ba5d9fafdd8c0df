"""Low-precision attention core: the MXFP8 format, its layouts, and jagged block-scaled attention, forward and backward."""

from lp_fa4 import debug
from lp_fa4.config import AttentionConfig
from lp_fa4.interface import flash_attn_func, flash_attn_varlen_func, is_supported, mx_attention, mx_attention_backward
from lp_fa4.mx import MXTensor, quantize_mx

__all__ = [
    "AttentionConfig",
    "MXTensor",
    "debug",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "is_supported",
    "mx_attention",
    "mx_attention_backward",
    "quantize_mx",
]
