"""MXFP8: E4M3 payloads, E8M0 scales, the blocks they share, and where scales lie for tensor cores.

``quantize`` is the definition of every byte (plain PyTorch, any device), ``tensor`` the object that carries
payload, scale and orientation together, ``layout`` the addresses: groups, tiles and 512-byte scale atoms.
"""

from lp_fa4.mx.layout import (
    GROUP,
    SF_TILE,
    check_offsets,
    check_on_host,
    gather_sf,
    group_rows,
    scale_rows,
    scatter_sf,
    sequence_ids,
    sf_tiles,
    token_rows,
)
from lp_fa4.mx.quantize import (
    E4M3_MAX,
    cast_e4m3,
    check_exponent,
    decode_scale,
    encode_scale,
    inverse_scale,
    quantize_mx,
)
from lp_fa4.mx.tensor import MXTensor, cat, expand_scale

__all__ = [
    "E4M3_MAX",
    "GROUP",
    "SF_TILE",
    "MXTensor",
    "cast_e4m3",
    "cat",
    "check_exponent",
    "check_offsets",
    "check_on_host",
    "decode_scale",
    "encode_scale",
    "expand_scale",
    "gather_sf",
    "group_rows",
    "inverse_scale",
    "quantize_mx",
    "scale_rows",
    "scatter_sf",
    "sequence_ids",
    "sf_tiles",
    "token_rows",
]
