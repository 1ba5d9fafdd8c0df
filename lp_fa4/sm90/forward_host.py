"""From an ``AttentionProblem`` to the Hopper forward's launches: work list, transposed V, attention."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lp_fa4.common.backward_host import aligned_rows
from lp_fa4.compile import arch_of, build, dtype_name, fake, kernel_cache, launch, multiprocessors, symbol
from lp_fa4.config import LOG2_E
from lp_fa4.dispatch import Features
from lp_fa4.mx import MXTensor
from lp_fa4.mx.layout import group_rows
from lp_fa4.ops import problem_features
from lp_fa4.problem import AttentionProblem, ForwardResult
from lp_fa4.sm90.forward_config import FEW_COLUMNS, FEW_KEYS, FEW_PARTS, QUERY_TILE, WIDER, FewSpec, ForwardSpec, half_scale, order_of
from lp_fa4.sm90.operands import MXTensorWithCopy

if TYPE_CHECKING:
    from lp_fa4.sm90.quantize_beside import Beside

HEAD_DIMS = (64, 128)
FEW_QUERIES, SPLIT_KEYS = 64, 1024
"""Up to so many queries a sequence's keys are split, so that one long sequence occupies the whole device. (With up to 64 pairs of a
query and a head of the group, ``forward_few`` splits them finer.)"""
_FIELDS = 8


@kernel_cache
def _compile_forward(arch: str, spec: ForwardSpec):
    from cutlass import Float32, Int32

    from lp_fa4.sm90.forward_kernel import Forward

    d = spec.head_dim
    heads, kv_heads, batch, rows = (symbol() for _ in range(4))
    scales = [fake("uint8", (symbol(), kv_heads), align=1) for _ in range(2)]
    vectors = fake("float32", (batch, kv_heads, d), compact=True)
    whole = spec.split_keys == 0
    slots, queries = symbol(), symbol()
    out = fake("bfloat16", (rows, heads, d), compact=True)
    stats = fake("float32", (heads, rows), align=4, compact=True)
    return build(
        arch,
        Forward(spec),
        fake("uint8", (symbol(), heads, d)),
        fake("uint8", (symbol(), kv_heads, d)),
        fake("uint8", (symbol(), kv_heads, d)) if spec.turns else fake("uint8", (kv_heads, d, symbol(32)), compact=True),
        fake("uint8", (symbol(), heads), align=1),
        *scales,
        vectors if whole and spec.centred else None,
        vectors if whole and spec.mean else None,
        out if whole else None,
        out if whole and spec.outputs == 2 else None,
        *([stats] * 3 if whole else [None] * 3),
        None if whole else fake("float32", (slots, heads, queries, d), compact=True),
        None if whole else fake("float32", (4, slots, heads, queries), align=4, compact=True),
        fake("int32", (symbol(), _FIELDS), compact=True),
        fake("int32", (symbol(),), align=4),
        fake("int32", (symbol(), _FIELDS), compact=True) if spec.half_sums else None,
        fake("int32", (symbol(),), align=4) if spec.waits else None,
        Float32(1.0),
        Float32(1.0),
        Int32(1),
        Int32(1),
        Int32(1),
    )


def reason_against(features: Features) -> str:
    """Why the forward cannot serve a call with these features, in words; "" if it can."""
    config = features.config
    if features.head_dim not in HEAD_DIMS:
        return f"head_dim is {features.head_dim}; the Hopper kernels serve {', '.join(map(str, HEAD_DIMS))}"
    required: dict[str, Any] = dict(key_tile=128, two_level=True, softmax_stabilizer=False, round_p=True, p_scale="constant")
    required["save_out_dtype"] = torch.bfloat16
    for name, value in required.items():
        if getattr(config, name) != value:
            return f"config.{name} is {getattr(config, name)}; the Hopper kernels serve {value}"
    if config.p_scale_log2 <= WIDER:
        return f"config.p_scale_log2 is {config.p_scale_log2}; the Hopper kernels serve {WIDER + 1} and more"
    return ""


def _check(problem: AttentionProblem) -> None:
    reason = reason_against(problem_features(problem, backward=False))
    if reason:
        raise ValueError(reason)
    if problem.q_mean is not None:
        raise ValueError("q_mean is given; only the reference adds its scores")
    if problem.softmax_scale is None or not 0.0 <= problem.softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale is {problem.softmax_scale}; the Hopper kernels need a finite one of at least 0")


def equal_offsets(rows: int, batch: int, device: torch.device) -> Tensor:
    """Offsets of ``batch`` equal sequences of ``rows // batch``, made on the device."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * (rows // batch)


def token_blocks(x: MXTensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """Aligned codes ``[T, H, D]``, scale bytes ``[rows, H]`` and tokens under a scale (0, 128 or 32).

    Blocks 32 wide on a wider head are re-coded to the head's width first.
    """
    if x.scale.shape[-1] != 1:
        from lp_fa4.sm90.recode import recode

        assert offsets is not None
        x = recode(x, offsets)
    return aligned_rows(x.codes), x.scale_bytes[..., 0].contiguous(), x.block[0]


def few_columns(problem: AttentionProblem) -> int:
    """Columns of the kernel for few queries (``forward_few``) that serves this problem, 0 if none does."""
    if problem.causal or problem.queries is None:
        return 0
    return next((c for c in FEW_COLUMNS if problem.queries * problem.group <= c), 0)


def split_keys_of(problem: AttentionProblem) -> int:
    """Keys per split, 0 for none: decided by the number of queries alone, so that a sequence's result is bitwise the same
    whatever else the batch holds."""
    if few_columns(problem):
        return FEW_KEYS
    few = problem.queries is not None and problem.queries <= FEW_QUERIES
    return SPLIT_KEYS if few and not problem.causal else 0


def _spec(problem: AttentionProblem, blocks: tuple[int, int, int], keep: bool, values: str, waits: bool) -> ForwardSpec:
    query, key, value = blocks
    split = split_keys_of(problem)
    halves = key == value and value in (0, 128) and split == 0
    half_sums = halves and problem.centred and value == 0
    retries = problem.causal or (value != 128 and not problem.shared_q)  # as measured
    lag, tied = order_of(problem.head_dim, problem.causal, value, halves)
    if half_sums and values == "copied" and not retries:  # as measured
        lag = 4
    return ForwardSpec(
        head_dim=problem.head_dim,
        group=problem.group,
        causal=problem.causal,
        centred=problem.centred,
        mean=problem.v_mean is not None,
        keep=keep,
        shared=problem.shared_q,
        key_scale=key,
        value_scale=value,
        query_static=query == 0,
        values=values,
        split_keys=split,
        parts=FEW_PARTS if few_columns(problem) else "",
        p_scale_log2=problem.config.p_scale_log2,
        threshold=problem.config.rescale_threshold,
        halves=halves,
        half_sums=half_sums,
        together=2 if half_sums else 1,
        retries=retries,
        lag=lag,
        tied=tied,
        waits=waits,
    )


def _outputs(problem: AttentionProblem, filled: bool, keep: bool) -> ForwardResult:
    """Output tensors; ``filled`` with what rows without keys get, or uninitialised."""
    rows, heads, device = problem.rows, problem.heads, problem.device
    shape, stats = (rows, heads, problem.head_dim), (heads, rows)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    centred = torch.empty_like(out) if problem.v_mean is not None and keep else out
    lse, row_max, row_sum = (torch.empty(stats, dtype=torch.float32, device=device) for _ in range(3))
    if filled:
        for x in {out, centred}:
            x.zero_()
        _fill_statistics(lse, row_max, row_sum)
    return ForwardResult(out, lse, centred, row_max, row_sum)


def _fill_statistics(lse: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
    """What rows without keys have."""
    lse.fill_(-torch.inf)
    row_max.fill_(-torch.inf)
    row_sum.zero_()


def _fill_tail(result: ForwardResult, offsets_q: Tensor) -> None:
    """Rows past the last sequence's, which no item of the work list has: 0, and statistics of rows without keys."""
    from lp_fa4.common.zero_tail import compile_zero_tail

    _fill_statistics(result.lse, result.row_max, result.row_sum)
    rows = [x.view(torch.uint8).flatten(1) for x in (result.out, result.centred_out)]
    launch(compile_zero_tail(arch_of(offsets_q.device), dtype_name(offsets_q)), offsets_q.device, *rows, offsets_q)


def _launch_few(problem: AttentionProblem, spec: ForwardSpec, columns: int, offsets_k: Tensor, codes, scales, parts, part_stats) -> None:
    """Splits of 256 keys, a CTA each; fills ``parts`` and ``part_stats``."""
    from lp_fa4.sm90.forward_few import _compile_few

    assert problem.softmax_scale is not None
    few = FewSpec(
        head_dim=spec.head_dim,
        columns=columns,
        group=spec.group,
        centred=spec.centred,
        shared=spec.shared,
        key_scale=spec.key_scale,
        value_scale=spec.value_scale,
        query_static=spec.query_static,
        values=spec.values,
        p_scale_log2=spec.p_scale_log2,
        parts=spec.parts,
    )
    device = parts.device
    compiled = _compile_few(arch_of(device), dtype_name(offsets_k), few)
    launch(compiled, device, *codes, *scales, offsets_k, parts, part_stats, problem.softmax_scale * LOG2_E)


def _launch_forward(
    problem: AttentionProblem, spec: ForwardSpec, offsets_k: Tensor, offsets_q: Tensor | None, codes, scales, parts, part_stats, result,
    beside: "Beside | None",
) -> None:  # fmt: skip
    """Work list and main kernel; fills ``result``, or ``parts`` and ``part_stats`` where keys are split."""
    from lp_fa4.sm90.worklist import AGAIN, work_list

    device = offsets_k.device
    assert problem.softmax_scale is not None
    records, state = work_list(
        offsets_k,
        offsets_q,
        rows=problem.q.shape[0],
        tokens=problem.tokens,
        heads=problem.heads,
        queries=problem.queries,
        shared_q=problem.shared_q,
        query_tile=QUERY_TILE,
        split_keys=spec.split_keys,
        in_order=spec.waits,
    )
    whole = spec.split_keys == 0
    exact = problem.softmax_scale * LOG2_E
    scale = half_scale(exact) if spec.halves else exact
    outputs = [result.out, result.centred_out if spec.outputs == 2 else None, result.lse, result.row_max, result.row_sum]
    again = records.new_empty(2 * records.shape[0], _FIELDS) if spec.half_sums else None

    def run(spec: ForwardSpec, items: Tensor, counts: Tensor, wide: int) -> None:
        launch(
            _compile_forward(arch_of(device), spec),
            device,
            *codes,
            *scales,
            problem.v_sum if whole and spec.centred else None,
            problem.v_mean if whole else None,
            *(outputs if whole else [None] * 5),
            parts,
            part_stats,
            items,
            counts,
            again,
            beside.flags if spec.waits and beside is not None else None,
            scale,
            exact / scale if scale > 0.0 else 1.0,
            min(multiprocessors(device), items.shape[0]),
            0,
            wide,
        )

    if beside is not None:
        beside.start()
    run(spec, records, state, 0)
    if again is not None:  # what left FP16: hardly ever anything
        run(dataclasses.replace(spec, waits=False), again, state[AGAIN:], 1)


def forward(problem: AttentionProblem, *, keep_centred: bool = True, beside: "Beside | None" = None) -> ForwardResult:
    """Attention on a Hopper GPU; see ``ForwardResult`` for shapes and domains.

    Args:
        problem: validated operands; dtypes and layouts as in ``AttentionProblem``. Where ``v`` is an ``MXTensorWithCopy``
            its copy is read, otherwise the kernels turn V themselves.
        keep_centred: whether ``centred_out`` is wanted, as the backward wants it; otherwise it is ``out``.
        beside: the quantize pass of the problem's operands, if it is to run beside the attention.

    No value on the device is read by the host; everything runs on the current stream of the problem's device.
    Raises: ``ValueError`` for what these kernels do not serve.
    """
    _check(problem)
    if problem.rows == 0 or problem.heads == 0 or problem.tokens == 0 or problem.q.shape[0] == 0 or problem.batch == 0:
        return _outputs(problem, filled=True, keep=keep_centred)
    device, batch = problem.device, problem.batch
    offsets_k = problem.offsets_k if problem.offsets_k is not None else equal_offsets(problem.tokens, batch, device)
    offsets_q = query_offsets = problem.offsets_q
    if query_offsets is None and problem.q.scale.shape[-1] != 1:  # needed by re-coding alone
        query_offsets = equal_offsets(problem.q.shape[0], 1 if problem.shared_q else batch, device)
    q, q_scale, q_block = token_blocks(problem.q, query_offsets)
    k, k_scale, k_block = token_blocks(problem.k, offsets_k)
    v, v_scale, v_block = token_blocks(problem.v, offsets_k)
    copy = problem.v.transposed if isinstance(problem.v, MXTensorWithCopy) else None
    if problem.v.scale.shape[-1] != 1:  # a re-coded V has other codes than its copy
        copy = None
    values = v if copy is None else copy
    spec = _spec(problem, (q_block, k_block, v_block), keep_centred, "plain" if copy is None else "copied", beside is not None)
    result = _outputs(problem, filled=False, keep=keep_centred)
    if problem.queries is None:
        assert offsets_q is not None
        _fill_tail(result, offsets_q)
    whole = spec.split_keys == 0
    parts = part_stats = None
    columns = few_columns(problem)
    if not whole:
        assert problem.queries is not None
        shape = (group_rows(problem.tokens, batch, spec.split_keys), problem.heads, problem.queries)
        kind = torch.float16 if spec.parts == "float16" else torch.float32
        parts = torch.empty(*shape, problem.head_dim, dtype=kind, device=device)
        part_stats = torch.empty((*shape, 4) if columns else (4, *shape), dtype=torch.float32, device=device)
    if columns:
        _launch_few(problem, spec, columns, offsets_k, (q, k, values), (q_scale, k_scale, v_scale), parts, part_stats)
    else:
        _launch_forward(problem, spec, offsets_k, offsets_q, (q, k, values), (q_scale, k_scale, v_scale), parts, part_stats, result, beside)
    if not whole:
        from lp_fa4.sm90.forward_merge import merge

        merge(spec, offsets_k, parts, part_stats, v_scale, problem.v_sum if spec.centred else None, problem.v_mean, result)
    return result
