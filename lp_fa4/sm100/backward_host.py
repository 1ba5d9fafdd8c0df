"""Backward attention on Blackwell: from an ``AttentionProblem`` and its forward's result to gradients, in three launches and a work list.

``backward_prepass`` (dO8, statistics) → ``backward_kernel`` (dK, dV, dQ) → ``backward_postpass`` (dQ rows, mean of dV). The rounding points
are the reference's: dO and dS in 32 x 32 blocks. Or, by :func:`takes_pairs`, ``backward_pair_kernel`` in the middle, with one exponent of
dO for 32 rows and a head.
"""

import torch
from torch import Tensor

from lp_fa4.common.backward_host import aligned_rows, check_arguments, device_offsets, empty_gradients, nothing_to_do, wrapped
from lp_fa4.compile import arch_of, dtype_name, launch, multiprocessors
from lp_fa4.config import LOG2_E, AttentionConfig
from lp_fa4.mx.layout import group_rows
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients
from lp_fa4.sm100.backward_config import BLOCK_FACTORS, PAIR, STAT_POWER, TILE, BackwardSpec, PrepassSpec, backward_tuning, tile_rows
from lp_fa4.sm100.backward_items import item_capacity, work_items
from lp_fa4.sm100.backward_pair_tables import pair_tables
from lp_fa4.sm100.config import ARCHS, HEAD_DIMS
from lp_fa4.sm100.forward_host import token_scales
from lp_fa4.sm100.scale_atoms import SF_ATOM, scale_atoms

SHARED_REPLICAS = {torch.float32: 8, torch.float16: 32}
"""Buffers that a shared dQ is spread over: few enough to stay in L2, enough that CTAs rarely meet; in FP16 also that no buffer takes so
many additions that their rounding shows (768 sequences of 4,096 keys: 768 a buffer, an error of about 2^-12 sqrt(768 / 2) = 0.5%)."""


def takes_pairs(config: AttentionConfig) -> bool:
    """The rule of choice between the two main kernels: pairs of CTAs where every scale is wanted outside the products, dO's too. Not
    by default: it is predicted to help where dQ's reductions bind (``BACKWARD.md``), and has to be measured first."""
    return config.operand_scales == "outside" and tuple(config.do_block) == (32, 0)


def reason_against_pairs(blocks: tuple[tuple[int, int], ...], head_dim: int) -> str:
    """Why the two-CTA kernel cannot serve operands q, k, v with these scale blocks; "" if it can."""
    for name, block in zip("qkv", blocks, strict=True):
        if block[1] != head_dim:
            return (
                f'{name} has blocks {block}; with operand_scales="outside" and do_block=(32, 0) (pairs of CTAs) '
                f"the width must be head_dim = {head_dim}"
            )
    return ""


def reason_against_backward(head_dim: int, config: AttentionConfig) -> str:
    """Why these kernels cannot serve a backward with this head dimension and these choices, in words; "" if they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; sm100 kernels serve {', '.join(map(str, HEAD_DIMS))}"
    pairs = takes_pairs(config)
    required: dict[str, object] = dict(round_p=True, round_do=True, round_ds=True)
    if config.align_do:
        return "config.align_do is True; the sm100 backward serves False"
    if tuple(config.do_block) != (32, 32) and not pairs:
        return (
            f"config.do_block is {config.do_block}; the sm100 backward serves (32, 32), and (32, 0) with "
            'operand_scales="outside" (pairs of CTAs)'
        )
    if pairs:
        required["ds_block"] = None
    if config.grad_format == "mxfp8":
        required["grad_block"] = (32, 32)
    for name, value in required.items():
        if getattr(config, name) != value:
            return f"config.{name} is {getattr(config, name)}; the sm100 backward serves {value}"
    if not pairs and config.ds_block not in ((32, 32), None):
        return f"config.ds_block is {config.ds_block}; the sm100 backward serves (32, 32) and None, which is the same"
    return ""


def _check(problem: AttentionProblem, result: ForwardResult, dout: Tensor, dlse: Tensor | None) -> None:
    reason = reason_against_backward(problem.head_dim, problem.config)
    if not reason and takes_pairs(problem.config):
        reason = reason_against_pairs((problem.q.block, problem.k.block, problem.v.block), problem.head_dim)
    if reason:
        raise ValueError(reason)
    check_arguments(problem, result, dout, "sm100")
    if problem.softmax_scale is None or not 0.0 < problem.softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale is {problem.softmax_scale}; sm100 kernels need a positive, finite one")
    if dlse is not None and problem.config.dq_dtype == torch.float16 and problem.config.dq_scale == "bound":
        raise ValueError('dlse is given with FP16 dQ under dq_scale="bound", which bounds dO alone; give an int, or dq_dtype=torch.float32')


def backward(
    problem: AttentionProblem, result: ForwardResult, dout: Tensor, *, deterministic: bool = False, dlse: Tensor | None = None
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` on a Blackwell GPU; see ``Gradients`` for shapes.

    Args:
        problem, result: of the forward (of this module's or the reference's: only ``centred_out``, ``row_max``, ``row_sum`` are read).
        dout: bf16 ``[R, H, D]``. dlse: fp32 ``[H, R]`` or None.
        deterministic: bitwise repeatable dQ (dK and dV always are). Shared queries: one dQ buffer a CTA. Others: one CTA takes all key
            tiles of a sequence and head in order, so fewer than one (sequence, head) pair a multiprocessor leaves some idle.

    Raises: ``ValueError`` for what these kernels do not serve.
    """
    device = problem.device
    _check(problem, result, dout, dlse)
    arch = arch_of(device)
    if arch not in ARCHS:
        raise ValueError(f"{device} compiles for {arch}; sm100 kernels are for {', '.join(ARCHS)}")
    return run(problem, result, dout, arch, multiprocessors(device), deterministic=deterministic, dlse=dlse)


def run(
    problem: AttentionProblem,
    result: ForwardResult,
    dout: Tensor,
    arch: str,
    processors: int,
    *,
    deterministic: bool = False,
    dlse: Tensor | None = None,
) -> Gradients:
    """Allocate, lay out scales, list the work, launch."""
    _check(problem, result, dout, dlse)
    p, config, device = problem, problem.config, problem.device
    mxfp8 = config.grad_format == "mxfp8"
    if nothing_to_do(p):
        return empty_gradients(p)
    from lp_fa4.sm100.backward_kernel import compile_main
    from lp_fa4.sm100.backward_pair_kernel import compile_pair
    from lp_fa4.sm100.backward_pair_norms import compile_norms
    from lp_fa4.sm100.backward_postpass import compile_postpass
    from lp_fa4.sm100.backward_prepass import compile_prepass

    assert p.softmax_scale is not None
    d, heads, kv_heads, batch, queries = p.head_dim, p.heads, p.kv_heads, p.batch, p.queries
    offsets_k, offsets_q = device_offsets(p)
    half = config.dq_dtype == torch.float16
    spec = BackwardSpec(
        head_dim=d,
        group=p.group,
        causal=p.causal,
        centred=p.centred_backward,
        shared=p.shared_q,
        mxfp8=mxfp8,
        dq_half=half,
        deterministic=deterministic,
        p_scale_log2=config.p_scale_backward_log2,
    )
    serial = deterministic and not p.shared_q
    pairs = takes_pairs(config)
    keys = PAIR if pairs else TILE
    items, total = work_items(offsets_k, offsets_q, queries=queries, tokens=p.tokens, causal=p.causal, serial=serial, keys_per_item=keys)
    # of CTAs, or of pairs: who takes an item
    workers = min(max(processors // (keys // TILE), 1), item_capacity(p.tokens, batch, serial, keys) * kv_heads)
    rows = tile_rows(queries, p.rows, batch)
    dq_rows = -(-p.q.shape[0] // TILE) if p.shared_q else rows
    replicas = 1 if not p.shared_q else workers if deterministic else min(SHARED_REPLICAS[config.dq_dtype], workers)
    empty = lambda kind, *shape: torch.empty(shape, dtype=kind, device=device)  # noqa: E731
    do8 = empty(torch.uint8, p.rows, heads, d)
    sf_do, sf_dot = (None if pairs else empty(torch.uint8, rows, heads, SF_ATOM) for _ in range(2))
    blocks = empty(torch.float32, rows, heads, TILE // 32 * BLOCK_FACTORS) if pairs else None
    stats = empty(torch.float32, rows, heads, spec.stats * TILE)
    sums = empty(torch.float32, rows, heads, d)
    partial = torch.zeros(replicas * dq_rows, heads, TILE * d, dtype=config.dq_dtype, device=device)
    dk, dv = (empty(torch.uint8 if mxfp8 else torch.bfloat16, p.tokens, kv_heads, d) for _ in range(2))
    groups = group_rows(p.tokens, batch) if mxfp8 else 1
    scales = [torch.zeros(groups, kv_heads, d // 32, dtype=torch.uint8, device=device) for _ in range(2)]
    dq = empty(torch.float32, *p.q.shape)
    dv_mean = empty(torch.float32, batch, kv_heads, d) if spec.centred else None
    prepass = PrepassSpec(
        head_dim=d,
        jagged=queries is None,
        centred=spec.centred,
        fold_l=config.fold_l_into_do,
        delta_quantized=config.delta_from == "quantized",
        p_scale_log2=config.p_scale_backward_log2,
        out_fp32=result.centred_out.dtype == torch.float32,
        causal=p.causal,
        dq_half=half,
        dq_scale_log2=config.dq_scale if half and isinstance(config.dq_scale, int) else None,
        token_blocks=pairs,
    )
    offsets_dtype = dtype_name(offsets_k)
    launch(
        compile_prepass(arch, prepass, offsets_dtype, dlse is not None),
        device,
        aligned_rows(dout),
        aligned_rows(result.centred_out),
        result.row_max,
        result.row_sum,
        dlse,
        offsets_q,
        offsets_k,
        do8,
        sf_do,
        sf_dot,
        blocks,
        stats,
        sums,
        dk.view(torch.uint8).flatten(1),
        dv.view(torch.uint8).flatten(1),
        key_exponents(p, offsets_k) if half else None,
        queries or 0,
        p.softmax_scale,
    )
    if half and p.shared_q and not isinstance(config.dq_scale, int):
        share_powers(stats, batch)
    unit = p.softmax_scale * 2.0**-config.p_scale_backward_log2
    tuning = backward_tuning(arch, spec, pairs)
    operands = (p.q.codes, p.k.codes, p.v.codes, do8)
    outputs = (items, total, partial, dk, dv, *scales, replicas, dq_rows, p.softmax_scale * LOG2_E)
    if pairs:
        assert blocks is not None
        norms = empty(torch.float32, group_rows(p.tokens, batch), kv_heads)
        launch(compile_norms(arch, d, offsets_dtype), device, p.v.codes, token_scales(p.v), offsets_k, norms)
        factors, key_factors, results = pair_tables(p, offsets_k, offsets_q, stats, blocks, norms)
        unit = 1.0  # the kernel's sums have it
        launch(compile_pair(arch, spec, tuning), device, *operands, stats, factors, key_factors, results, *outputs, 2 * workers)
    else:
        atoms = [scale_atoms(x, axis) for x, axis in ((p.q, 1), (p.q, 0), (p.k, 1), (p.k, 0), (p.v, 1))]
        launch(compile_main(arch, spec, tuning), device, *operands, *atoms, sf_do, sf_dot, stats, *outputs, unit, workers)
    launch(
        compile_postpass(arch, d, p.group, queries is None, p.shared_q, spec.centred, half, offsets_dtype),
        device,
        partial.view(-1),
        stats if half else None,
        dq,
        offsets_q,
        offsets_k,
        sums,
        dv_mean,
        p.q.shape[0] if p.shared_q else queries or 0,
        dq_rows,
        replicas,
        1.0 if half else unit,
    )
    if mxfp8:
        return Gradients(dq, *(wrapped(x, s, p) for x, s in zip((dk, dv), scales, strict=True)), dv_mean)
    return Gradients(dq, dk, dv, dv_mean)


def share_powers(stats: Tensor, batch: int) -> None:
    """One power of two for all sequences of a shared query, whose FP16 sums meet in one buffer: the least of theirs, lowered by the number
    of sequences (the bounds of all of them may add up). ``stats [batch * tiles, H, 4 * 128]``, changed in place."""
    powers = stats.unflatten(0, (batch, -1))[..., STAT_POWER * TILE :]
    powers.copy_((powers.amin(0, keepdim=True) * 2.0 ** -(batch - 1).bit_length()).expand_as(powers))


def key_exponents(p: AttentionProblem, offsets_k: Tensor) -> Tensor:
    """Largest exponent of K plus largest of V among a sequence's first groups of 32 keys up to each group: int32 ``[groups, Hkv]``.

    One running maximum over all groups, which a sequence's number times 2^9 starts anew at each sequence.
    """
    rows, batch = group_rows(p.tokens, p.batch), p.batch
    first = offsets_k[:-1] // 32 + torch.arange(batch, dtype=offsets_k.dtype, device=p.device)
    group = torch.arange(rows, dtype=offsets_k.dtype, device=p.device)
    base = ((torch.searchsorted(first.contiguous(), group, right=True) - 1).clamp(min=0) * 512)[:, None]
    total = None
    for x in (p.k, p.v):
        byte = x.scale_bytes.to(torch.int64)
        top = torch.where(byte == 255, 0, byte).amax(-1)
        if x.is_static:
            top = top[:1].expand(rows, -1)
        elif top.shape[0] < rows:  # one sequence, quantized without offsets
            top = torch.nn.functional.pad(top, (0, 0, 0, rows - top.shape[0]))
        running = torch.cummax(base + top, 0).values - base - 127
        total = running if total is None else total + running
    assert total is not None
    return total.to(torch.int32).contiguous()
