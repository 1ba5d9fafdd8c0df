"""From an ``AttentionProblem`` to the Hopper forward's launches."""

from lp_fa4.compile import build, fake, kernel_cache, symbol
from lp_fa4.sm90.forward_config import ForwardSpec
from lp_fa4.sm90.worklist import FIELDS


@kernel_cache
def _compile_forward(arch: str, spec: ForwardSpec):
    from cutlass import Float32, Int32

    from lp_fa4.sm90.forward_kernel import Forward

    d = spec.head_dim
    heads, kv_heads, batch, rows, keys = (symbol() for _ in range(5))
    scales = fake("uint8", (symbol(), kv_heads), align=1)
    vectors = fake("float32", (batch, kv_heads, d), compact=True)
    out = fake("bfloat16", (rows, heads, d), compact=True)
    stats = fake("float32", (heads, rows), align=4, compact=True)
    return build(
        arch,
        Forward(spec),
        fake("uint8", (symbol(), heads, d)),
        fake("uint8", (keys, kv_heads, d)),
        fake("uint8", (kv_heads, d, symbol(32)), compact=True),
        fake("uint8", (symbol(), heads), align=1),
        scales,
        scales,
        vectors,
        vectors,
        out,
        out,
        stats,
        stats,
        stats,
        fake("int32", (symbol(), FIELDS), compact=True),
        fake("int32", (symbol(),), align=4),
        Float32(1.0),
        Int32(1),
    )
