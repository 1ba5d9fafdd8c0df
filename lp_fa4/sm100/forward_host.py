"""Forward attention on Blackwell: checks, scale layouts, work list, launch. The kernel is ``forward_kernel.py``."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lp_fa4.compile import arch_of, build, fake, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.config import LOG2_E
from lp_fa4.mx import MXTensor
from lp_fa4.problem import AttentionProblem, ForwardResult
from lp_fa4.sm100.config import ARCHS, HEAD_DIMS, KEY_TILE, QUERY_TILE, ForwardSpec, ForwardTuning, forward_tuning
from lp_fa4.sm100.scale_atoms import SF_ATOM, scale_atoms

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@kernel_cache
def _compile_sm100_forward(arch: str, spec: ForwardSpec, tuning: ForwardTuning) -> Any:
    """Compile one variant. No tensor, no length: token counts, heads, strides and the batch are symbols."""
    from lp_fa4.sm100.forward_kernel import Forward

    return build(arch, Forward(spec, tuning), *fake_arguments(spec))


def fake_arguments(spec: ForwardSpec) -> list[Any]:
    """Descriptions of the kernel's arguments, in order (all but the stream)."""
    from cutlass import Float32, Int32

    dim, heads, kv_heads = spec.head_dim, symbol(), symbol()
    queries, tokens, rows, batch = symbol(), symbol(), symbol(), symbol()

    def scales(h):
        return fake("uint8", (symbol(), h, SF_ATOM), align=16) if spec.block_scaled else fake("uint8", (symbol(), h), align=1)

    per_row = lambda: fake("float32", (heads, rows), align=4, compact=True)  # noqa: E731
    per_sequence = lambda: fake("float32", (batch, kv_heads, dim), align=16, compact=True)  # noqa: E731
    return [
        fake("uint8", (queries, heads, dim), align=16),
        fake("uint8", (tokens, kv_heads, dim), align=16),
        fake("uint8", (tokens, kv_heads, dim), align=16),
        scales(heads),
        scales(kv_heads),
        scales(kv_heads),
        fake("int32", (symbol(), 8), align=16, compact=True),
        fake("int32", (symbol(),), align=4),
        fake("bfloat16", (rows, heads, dim), align=16, compact=True),
        fake(spec.save, (rows, heads, dim), align=16, compact=True) if spec.save else None,
        per_row(),
        per_row(),
        per_row(),
        per_sequence() if spec.centred else None,
        per_sequence() if spec.v_mean else None,
        Float32(1.0),
        Int32(1),
    ]


def token_scales(x: MXTensor) -> Tensor:
    """Scales of an operand with one exponent per 32 tokens and head, uint8 ``[scale rows, heads]``; static ones through a stride of 0."""
    rows = x.scale_bytes[..., 0]
    return rows.expand(x.shape[0] // 32 + 1, -1) if x.is_static else rows


def unsupported(features: Any) -> str:
    """Why a call with these ``lp_fa4.dispatch.Features`` is not served here; "" if it is."""
    if features.head_dim not in HEAD_DIMS:
        return f"head_dim is {features.head_dim}; sm100 kernels serve {', '.join(map(str, HEAD_DIMS))}"
    if features.config.operand_scales == "outside":
        if features.blocks is None:
            return 'config.operand_scales is "outside"; it needs operands quantized with one exponent per 32 tokens and head (mx_attention)'
        return _config_reason(features.config) or _outside_reason(features.config, features.blocks, features.head_dim, features.causal)
    return _config_reason(features.config)


def _outside_reason(config: Any, blocks: tuple[tuple[int, int], ...], head_dim: int, causal: bool) -> str:
    """Why scales cannot stay outside the products for operands with these blocks; "" if they can."""
    for name, block in zip("qkv", blocks, strict=True):
        if block[1] != head_dim:
            return f'{name} has blocks {block}; with operand_scales="outside" the width must be head_dim = {head_dim}'
    if blocks[2][0] != 0 and config.center_p and not causal:
        return (
            f'v has blocks {blocks[2]} and P is centred; with operand_scales="outside" V needs a static exponent or center_p=False '
            "(folded into P, the constant would leave E4M3's range where an exponent is large)"
        )
    return ""


def _config_reason(config: Any) -> str:
    if config.key_tile != KEY_TILE:
        return f"config.key_tile is {config.key_tile}; sm100 kernels have tiles of {KEY_TILE} keys"
    if config.softmax_stabilizer:
        return "config.softmax_stabilizer is True; it is served by the reference only"
    if not config.round_p:
        return "config.round_p is False; it is served by the reference only"
    return ""


def forward_spec(problem: AttentionProblem) -> ForwardSpec:
    """The variant that serves a problem. ``ValueError`` in words if none does."""
    config = problem.config
    block_scaled = config.operand_scales == "auto"
    reason = _config_reason(config)
    if not block_scaled and not reason:
        blocks = (problem.q.block, problem.k.block, problem.v.block)
        reason = _outside_reason(config, blocks, problem.head_dim, problem.causal)
    if problem.q_mean is not None:
        reason = "q_mean (Q smoothing) is served by the reference only"
    if problem.softmax_scale is None or not 0.0 < problem.softmax_scale < float("inf"):
        reason = f"softmax_scale is {problem.softmax_scale}; sm100 kernels need a positive, finite one"
    if reason:
        raise ValueError(reason)
    same = problem.v_mean is None and config.save_out_dtype == torch.bfloat16
    return ForwardSpec(
        head_dim=problem.head_dim,
        group=problem.group,
        shared_q=problem.shared_q,
        causal=problem.causal,
        centred=problem.centred,
        v_mean=problem.v_mean is not None,
        save="" if same else _NAMES[config.save_out_dtype],
        block_scaled=block_scaled,
        fold_v=not block_scaled and not problem.v.is_static,
        p_scale=config.p_scale,
        p_scale_log2=config.p_scale_log2,
        threshold=float(config.rescale_threshold),
    )


def forward(problem: AttentionProblem) -> ForwardResult:
    """Attention of every sequence; the signature and result of ``lp_fa4.reference.forward``.

    ``config.p_scale`` chooses where P's scale comes from, ``config.operand_scales="outside"`` the variant with plain f8f6f4 products.

    Raises: ``ValueError`` for what these kernels do not serve.
    """
    from lp_fa4.sm90.worklist import work_list

    device = problem.device
    arch = arch_of(device)
    if arch not in ARCHS:
        raise ValueError(f"{device} compiles for {arch}; sm100 kernels are for {', '.join(ARCHS)}")
    make = partial(work_list, query_tile=2 * QUERY_TILE)
    return run(problem, arch, forward_spec(problem), make, multiprocessors(device))


def drawing_pays(problem: AttentionProblem, items: int, processors: int) -> bool:
    """Whether CTAs should draw their items (Cluster Launch Control): where items differ in length and there are more than CTAs.

    Equal items end together however they are dealt out, and then a fixed stride spares the launches and the ring. Nothing here reads data:
    ``items`` is the list's capacity. What drawing is worth: README.md, "Work distribution".
    """
    unequal = problem.causal or (problem.batch > 1 and problem.offsets_k is not None)
    return unequal and items > processors


def run(
    problem: AttentionProblem, arch: str, spec: ForwardSpec, make_work_list: Any, processors: int, drawn: bool | None = None
) -> ForwardResult:
    """Allocate, lay out scales, list the work, launch. ``drawn``: how CTAs get their items; None: drawn where it pays."""
    p, device = problem, problem.device
    rows, heads, dim = p.rows, p.heads, p.head_dim
    jagged = p.queries is None
    # rows past the last sequence belong to no work item: written here, everything else by the kernel
    blank = jagged or p.tokens == 0
    new = torch.zeros if blank else torch.empty
    out = new(rows, heads, dim, dtype=torch.bfloat16, device=device)
    saved = new(rows, heads, dim, dtype=p.config.save_out_dtype, device=device) if spec.save else None
    lse, row_max, row_sum = (torch.full((heads, rows), fill, device=device) for fill in (-torch.inf, -torch.inf, 0.0))
    result = ForwardResult(out, lse, out if saved is None else saved, row_max, row_sum)
    if p.batch == 0 or rows == 0 or p.tokens == 0:
        return result
    offsets_k = p.offsets_k
    if offsets_k is None:  # one sequence; made on the device, so that a graph can capture it
        offsets_k = torch.arange(2, dtype=torch.int32, device=device) * p.tokens
    records, state = make_work_list(
        offsets_k,
        p.offsets_q if jagged else None,
        rows=p.q.shape[0],
        tokens=p.tokens,
        heads=heads,
        queries=p.queries,
        shared_q=p.shared_q,
    )
    if spec.block_scaled:
        scales = [scale_atoms(p.q, 1), scale_atoms(p.k, 1), scale_atoms(p.v, 0)]
    else:
        scales = [token_scales(x) for x in (p.q, p.k, p.v)]
    assert p.softmax_scale is not None
    items = records.shape[0]
    if drawn is None:
        drawn = drawing_pays(p, items, processors)
    compiled = _compile_sm100_forward(arch, spec, forward_tuning(arch, spec, drawn))
    launch(
        compiled,
        device,
        p.q.codes,
        p.k.codes,
        p.v.codes,
        *scales,
        records,
        state,
        out,
        saved,
        lse,
        row_max,
        row_sum,
        p.v_sum.contiguous() if spec.centred and p.v_sum is not None else None,
        p.v_mean.contiguous() if p.v_mean is not None else None,
        p.softmax_scale * LOG2_E,
        items if drawn else min(processors, items),
    )
    return result
