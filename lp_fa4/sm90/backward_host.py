"""Attention backward on Hopper: from an ``AttentionProblem`` and its forward's result to gradients, in four steps.

``backward_prepass`` (dO8, statistics, zeros) → ``backward_suffix`` (only where P is not centred by the caller) → ``backward_items`` (work
list, more zeros) → ``backward_main`` (dK, dV, dQ) → ``backward_postpass`` (dQ rows, mean of dV). Where this differs from the reference in
rounding: dO has one exponent a row instead of one per 32 x 32 block (its products fold exponents into P, so finer ones are free); dS has
one running exponent per 64 keys for all queries of a chunk (no Hopper MMA scales blocks, and both axes of dS are contracted), whatever
``config.ds_block`` says; where no exponent differs inside a tile all sums but dQ's are FP16 (``backward_halves``), else p meets dS as BF16;
P is centred on query tiles that see all keys of a warp, also where ``config`` does not ask for it (``fold_l_into_do`` only);
FP16 dQ of shared queries is added up in FP16 over a few sequences, under one power of two a row (``DQ_GROUP``).
``BACKWARD.md`` has the reasons and the measurements.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lp_fa4.common.backward_host import aligned_rows, check_arguments, device_offsets, empty_gradients, nothing_to_do, wrapped
from lp_fa4.compile import arch_of, dtype_name, launch, multiprocessors
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor
from lp_fa4.mx.layout import group_rows
from lp_fa4.problem import AttentionProblem, ForwardResult, Gradients
from lp_fa4.sm90.backward_layout import CHUNK, HEADROOM, KEY_TILE, QUERY_TILE, STAT_FLOATS, BackwardSpec, PrepassSpec, chunk_rows, rows_of
from lp_fa4.sm90.forward_host import HEAD_DIMS, token_blocks

SHARED_REPLICAS = 8
"""Buffers that a shared dQ is spread over: few enough to stay in L2, enough that CTAs rarely meet."""

DQ_GROUP = 8
"""Sequences that add their FP16 dQ of shared queries to one buffer, neighbours in the batch, in FP16 under one power of two a row: PMA's
buffers of 512 queries and 768 sequences, 288 MiB, are 36 then, and the few at work at one time stay in L2. Between groups sums are FP32."""

DQ_GROUP_KEYS = 65536
"""Keys of a group on average at most, as far as whole sequences go: FP16 adds up a product per 128 of them, so 512 times."""

HALVES = True
"""FP16 sums where exponents allow. What they cannot hold is found on the device, and goes to a second launch of the form with FP32 sums."""

CLUSTER_KEYS: int | None = None
"""Keys a sequence, on average, from which two CTAs take neighbouring key tiles and share the query side (None: never; it halves the
reads of the query side, and L2 is not what limits the kernel: no gain so far)."""


def reason_against_backward(head_dim: int, config: AttentionConfig) -> str:
    """Why these kernels cannot serve a backward with this head dimension and these choices, in words; "" if they can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; the Hopper kernels serve {', '.join(map(str, HEAD_DIMS))}"
    required: dict[str, object] = dict(round_p=True, round_do=True, round_ds=True)
    if config.grad_format == "mxfp8":
        required["grad_block"] = (32, 32)
    for name, value in required.items():
        if getattr(config, name) != value:
            return f"config.{name} is {getattr(config, name)}; the Hopper backward serves {value}"
    return ""


def cluster_pays(p: AttentionProblem, deterministic: bool) -> bool:
    """Whether two CTAs take neighbouring key tiles and share the query side (from host numbers only)."""
    return CLUSTER_KEYS is not None and not p.causal and not deterministic and p.tokens >= p.batch * CLUSTER_KEYS


def dq_buffers(p: AttentionProblem) -> int:
    """Buffers of FP16 dQ of shared queries where groups of sequences share one. From shapes alone, which may be symbols (of a trace)."""
    return torch.sym_max(-(-p.batch // DQ_GROUP), p.tokens // DQ_GROUP_KEYS) + 1  # a size that may be 1 would be guarded, and traced again


def _check(problem: AttentionProblem, result: ForwardResult, dout: Tensor) -> None:
    reason = reason_against_backward(problem.head_dim, problem.config)
    if reason:
        raise ValueError(reason)
    check_arguments(problem, result, dout, "Hopper")
    if problem.softmax_scale is None or not 0.0 <= problem.softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale is {problem.softmax_scale}; the Hopper kernels need a finite one of at least 0")


def backward(
    problem: AttentionProblem,
    result: ForwardResult,
    dout: Tensor,
    *,
    deterministic: bool = False,
    dlse: Tensor | None = None,
    dq_dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` on a Hopper GPU; see ``Gradients`` for shapes.

    Args:
        problem, result: of the forward (of this module's or the reference's: only ``centred_out``, ``row_max``, ``row_sum`` are read).
        dout: bf16 ``[R, H, D]``. dlse: fp32 ``[H, R]`` or None.
        deterministic: bitwise repeatable dQ (dK and dV always are). Shared queries: one dQ buffer a CTA. Others, and FP16 dQ (a buffer a
            sequence then): one CTA takes all key tiles of a sequence and head in order, so fewer than one (sequence, head) pair a
            multiprocessor leaves some idle.
        dq_dtype: of dq, fp32 or bf16. whole: dv with its mean part, added in FP32 before it is rounded, and no dv_mean.

    Raises: ``ValueError`` for what these kernels do not serve.
    """
    prepared = prepare_backward(problem, result, dout, deterministic=deterministic, dlse=dlse)
    return _finish(problem, prepared, deterministic, dq_dtype, whole)


@dataclass(frozen=True)
class _Sizes:
    """What both halves of a backward derive from a problem's shapes: rows of the workspaces, and offsets on the device."""

    spec: BackwardSpec
    offsets_k: Tensor
    offsets_q: Tensor
    tile_rows: int
    chunk_rows: int
    dq_rows: int
    replicas: int
    single: bool  # no sequence should have more than a chunk of queries, though offsets could say so


def _sizes(p: AttentionProblem, deterministic: bool, whole: bool = False) -> _Sizes:
    device, batch, queries = p.device, p.batch, p.queries
    offsets_k = p.offsets_k if p.offsets_k is not None else torch.arange(2, dtype=torch.int32, device=device) * p.tokens
    offsets_q = offsets_k  # not read
    if queries is None:
        assert p.offsets_q is not None
        offsets_q = p.offsets_q.to(offsets_k.dtype)
    half = p.config.dq_dtype == torch.float16
    # a power of the caller's is for one sequence's sums
    grouped = half and p.shared_q and not deterministic and not isinstance(p.config.dq_scale, int) and DQ_GROUP > 1
    fold = (not p.q.is_static and p.q.block[0] % QUERY_TILE != 0) or p.k.block[0] == 32
    spec = BackwardSpec(
        head_dim=p.head_dim,
        group=p.group,
        causal=p.causal,
        centred=p.centred_backward,
        shared=p.shared_q,
        long=p.group > 1 or (p.rows if queries is None else queries) > CHUNK,
        fold=fold,
        tiles=not fold and not p.q.is_static,
        mxfp8=p.config.grad_format == "mxfp8",
        k_static=p.k.is_static,
        v_static=p.v.is_static,
        dq_half=half,
        dq_grouped=grouped,
        deterministic=deterministic,
        cluster=cluster_pays(p, deterministic),
        suffix=not p.centred_backward and p.config.fold_l_into_do,
        whole=whole and p.centred_backward,
        jagged=whole and p.centred_backward and queries is None,
        halves=HALVES and not fold and not cluster_pays(p, deterministic) and p.config.fold_l_into_do,
    )
    tile_rows = rows_of(queries, p.rows, batch, QUERY_TILE)
    dq_rows = -(-p.q.shape[0] // QUERY_TILE) if p.shared_q else tile_rows
    replicas = 1
    if p.shared_q:
        shares = dq_buffers(p) if grouped else batch
        replicas = shares if half else multiprocessors(device) if deterministic else SHARED_REPLICAS
    single = spec.halves and p.group == 1 and queries is None and p.queries_most is not None and p.queries_most <= CHUNK
    return _Sizes(spec, offsets_k, offsets_q, tile_rows, rows_of(queries, p.rows, batch, CHUNK), dq_rows, replicas, single)


def workspaces(problem: AttentionProblem, *, deterministic: bool = False) -> list[Tensor]:
    """What ``prepare_backward`` fills: images of dO and of Q, statistics, column sums of dO, factors of dQ (empty unless it is FP16),
    coherent part of dV (empty unless needed), dQ sums. Uninitialised, from shapes alone."""
    return [] if nothing_to_do(problem) else _workspaces(problem, _sizes(problem, deterministic))


def _workspaces(p: AttentionProblem, z: _Sizes) -> list[Tensor]:
    heads, d = p.heads, p.head_dim
    empty = lambda kind, *shape: torch.empty(shape, dtype=kind, device=p.device)  # noqa: E731
    return [
        empty(torch.uint8, z.tile_rows, heads, 2 * z.spec.tile_bytes),
        empty(torch.uint8, z.dq_rows, heads, 2 * z.spec.tile_bytes),
        empty(torch.float32, z.tile_rows, heads, STAT_FLOATS),
        empty(torch.float32, z.chunk_rows, heads, d),
        empty(torch.float32, z.tile_rows, heads, QUERY_TILE)
        if z.spec.dq_grouped
        else empty(torch.float32, z.chunk_rows if z.spec.dq_half else 0, heads),
        empty(torch.float32, z.tile_rows if z.spec.suffix else 0, heads, d),
        empty(p.config.dq_dtype, z.replicas * z.dq_rows, heads, z.spec.dq_tile),
        empty(torch.int32, z.chunk_rows if z.spec.halves else 0, heads),
    ]


def _query_codes(p: AttentionProblem) -> tuple[Tensor, Tensor]:
    """Codes of q and scale bytes ``[rows, H]``: blocks narrower than a head are coded again, under one exponent."""
    offsets = None
    if p.q.scale.shape[-1] != 1:
        offsets = torch.arange(2, dtype=torch.int32, device=p.device) * p.q.shape[0] if p.shared_q else device_offsets(p)[1]
    return token_blocks(p.q, offsets)[:2]


def prepare_backward(
    problem: AttentionProblem, result: ForwardResult, dout: Tensor, *, deterministic: bool = False, dlse: Tensor | None = None
) -> list[Tensor]:
    """The backward's first half: everything that reads ``result`` and ``dout``, which may be freed before ``finish_backward`` allocates
    the gradients of k and v. Arguments as of ``backward``; returns the filled ``workspaces``."""
    _check(problem, result, dout)
    if dlse is not None and problem.config.dq_dtype == torch.float16 and problem.config.dq_scale == "bound":
        raise ValueError('dlse is given with FP16 dQ under dq_scale="bound", which bounds dO alone; give an int, or dq_dtype=torch.float32')
    p, config = problem, problem.config
    if nothing_to_do(p):
        return []
    from lp_fa4.sm90.backward_prepass import compile_prepass
    from lp_fa4.sm90.backward_suffix import compile_suffix

    z, half = _sizes(p, deterministic), config.dq_dtype == torch.float16
    spaces = _workspaces(p, z)
    do_tiles, q_tiles, stats, sums, dq_scale, suffix, partial, need = spaces
    q, q_scale = _query_codes(p)
    prepass = PrepassSpec(
        head_dim=p.head_dim,
        shared=p.shared_q,
        jagged=p.queries is None,
        centred=z.spec.centred,
        fold_l=config.fold_l_into_do,
        delta_quantized=config.delta_from == "quantized",
        p_scale_log2=config.p_scale_backward_log2 - (HEADROOM if z.spec.halves else 0),
        out_fp32=result.centred_out.dtype == torch.float32,
        q_static=p.q.is_static,
        dq_half=half,
        dq_grouped=z.spec.dq_grouped,
        dq_scale_log2=config.dq_scale if half and isinstance(config.dq_scale, int) else None,
        k_static=z.spec.k_static,
        v_static=z.spec.v_static,
        causal=p.causal,
        suffix=z.spec.suffix,
        align=config.align_do,
        rows=chunk_rows(p.queries),
        halves=z.spec.halves,
        recode=z.spec.halves and z.spec.tiles,
        single=z.single,
    )
    launch(
        compile_prepass(arch_of(p.device), prepass, dtype_name(z.offsets_k), dlse is not None),
        p.device,
        aligned_rows(dout),
        aligned_rows(result.centred_out),
        result.row_max,
        result.row_sum,
        dlse,
        q,
        q_scale,
        _top_scale(p.k) if half or z.spec.halves else None,
        _top_scale(p.v) if half or z.spec.halves else None,
        z.offsets_q,
        z.offsets_k,
        do_tiles,
        q_tiles,
        stats,
        sums,
        suffix if z.spec.suffix else None,
        dq_scale if half else None,
        need if z.spec.halves else None,
        partial.view(-1).view(torch.float32),
        p.queries or 0,
        p.softmax_scale,
    )
    if z.spec.suffix:
        kernel = compile_suffix(arch_of(p.device), p.head_dim, p.queries is None, dtype_name(z.offsets_k))
        launch(kernel, p.device, suffix, z.offsets_q, p.queries or 0, p.batch)
    return spaces


def finish_backward(
    problem: AttentionProblem,
    prepared: list[Tensor],
    *,
    deterministic: bool = False,
    dq_dtype: torch.dtype = torch.float32,
    whole: bool = False,
) -> Gradients:
    """The backward's second half, from what ``prepare_backward`` returned for the same problem and choice."""
    return _finish(problem, list(prepared), deterministic, dq_dtype, whole)


def _finish(problem: AttentionProblem, prepared: list[Tensor], deterministic: bool, dq_dtype: torch.dtype, whole: bool) -> Gradients:
    """``finish_backward``; empties ``prepared``, so that images that nobody else holds are freed before dq is allocated."""
    p, device = problem, problem.device
    mxfp8 = p.config.grad_format == "mxfp8"
    if nothing_to_do(p):
        return empty_gradients(p)
    from lp_fa4.sm90.backward_items import item_capacity, work_items
    from lp_fa4.sm90.backward_main import compile_main
    from lp_fa4.sm90.backward_postpass import compile_postpass

    arch, d, kv_heads, batch, queries = arch_of(device), p.head_dim, p.kv_heads, p.batch, p.queries
    do_tiles, q_tiles, stats, sums, dq_scale, suffix, partial, need = prepared
    prepared.clear()
    z = _sizes(p, deterministic, whole)
    spec, offsets_k, offsets_q = z.spec, z.offsets_k, z.offsets_q
    k, k_scale, _ = token_blocks(p.k, offsets_k)
    v, v_scale, _ = token_blocks(p.v, offsets_k)
    capacity = item_capacity(p.tokens, batch, spec.serial, spec.item_keys) * kv_heads
    ctas = 2 * min(multiprocessors(device) // 2, capacity) if spec.cluster else min(multiprocessors(device), capacity)
    empty = lambda kind, *shape: torch.empty(shape, dtype=kind, device=device)  # noqa: E731
    dk, dv = (empty(torch.uint8 if mxfp8 else torch.bfloat16, p.tokens, kv_heads, d) for _ in range(2))
    groups = group_rows(p.tokens, batch) if mxfp8 else 1
    scales = [empty(torch.uint8, groups, kv_heads, d // 32) for _ in range(2)]
    group = -(-batch // z.replicas) if spec.dq_grouped else 0  # sequences that share a buffer
    buffers = -(-batch // group) if group else z.replicas
    powers = empty(torch.float32, buffers * z.dq_rows, p.heads, QUERY_TILE) if group else None
    items, state = work_items(
        arch,
        offsets_k,
        offsets_q,
        [x.view(torch.uint8).flatten(1) for x in (dk, dv)],
        [x.view(-1) for x in scales] if mxfp8 else [],
        queries=queries,
        serial=spec.serial,
        keys=spec.item_keys,
        need=need if spec.halves else None,
        slots=capacity if spec.halves else 0,
        shared=spec.shared,
        dq_group=group,
        dq_scale=None if powers is None else dq_scale.flatten(1),
        common=None if powers is None else powers.flatten(1),
    )
    scratch = empty(torch.float32, ctas if spec.long else 1, 2, KEY_TILE * d)
    apart = spec.centred and not spec.whole
    dv_mean = empty(torch.float32, batch, kv_heads, d) if apart else None
    arguments = (
        k,
        v,
        k_scale,
        v_scale,
        items,
        state,
        q_tiles,
        do_tiles,
        stats,
        partial,
        powers,
        dk,
        dv,
        *scales,
        scratch,
        suffix if spec.suffix else sums,
        group or z.replicas,
        z.dq_rows,
        ctas,
    )
    first = replace(spec, tiles=False, recoded=spec.tiles, long=spec.long and not z.single) if spec.halves else spec
    launch(compile_main(arch, first), device, *arguments)
    if spec.halves:
        launch(compile_main(arch, replace(spec, halves=False, instead=True)), device, *arguments)
    del do_tiles, q_tiles, stats, suffix, scratch, arguments
    dq = empty(dq_dtype, *p.q.shape)
    launch(
        compile_postpass(
            arch, d, p.group, queries is None, p.shared_q, apart, spec.dq_half, dtype_name(offsets_k), dtype_name(dq), spec.dq_grouped
        ),
        device,
        partial.view(-1),
        (dq_scale if powers is None else powers) if spec.dq_half else None,
        dq,
        offsets_q,
        offsets_k,
        sums,
        dv_mean,
        p.q.shape[0] if p.shared_q else queries or 0,
        z.dq_rows,
        buffers,
        1.0,
    )
    if mxfp8:
        return Gradients(dq, *(wrapped(x, s, p) for x, s in zip((dk, dv), scales, strict=True)), dv_mean)
    return Gradients(dq, dk, dv, dv_mean)


def _top_scale(x: MXTensor) -> Tensor:
    """The largest scale byte of a token group and head, ``[rows, H]``: what re-coding to the head's width gives it."""
    scale = x.scale_bytes
    return (scale[..., 0] if scale.shape[-1] == 1 else scale.amax(-1)).contiguous()
