"""The key/value side of PMA in MXFP8, as dispatcher operators.

``modules::pma_attention`` is the whole forward as ONE operator with a registered gradient: norm + quantize, key projection + quantize,
attention. What it keeps for the backward is FP8 (and a few FP32 rows), and a selective-checkpoint policy can name it. The backward is
a few operators, so that what one has read (the centred output, k, then xn) is freed before a later one allocates gradients:

    pma_attention_prepass     where a backend's backward comes in halves: what it reads of the output and its gradient
    pma_attention_backward    attention's gradients: dq, and dk, dv as MXFP8
    pma_weight_gradients      of the projections, the last that reads xn
    pma_input_gradients       of the events and the norm's weight

All take and return plain tensors, FP8 as uint8, and the numeric choices as text (``Numerics.key``).
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fused_ops import (
    balanced_coordinates,
    gemm_norm_backward,
    gemm_quantize,
    head_quantize,
    projection_weight,
    rmsnorm_center_quantize,
    rmsnorm_project,
    rmsnorm_quantize,
)
from fused_ops.gemm_norm_backward.reference import weight_gradient
from fused_ops.gemm_quantize.weights import ProjectionWeight
from fused_ops.hadamard import rotate_rows
from fused_ops.norm_projection.interface import rows_unserved
from fused_ops.operands import MAX_BOUNDED_COLUMNS, to_float
from fused_ops.rmsnorm_quantize.reference import per_token
from lp_fa4 import dispatch
from lp_fa4.mx import MXTensor, check_on_host, quantize_mx, scale_rows
from lp_fa4.operator import custom_op
from lp_fa4.ops import finish_backward, run_backward, run_forward, run_prepass
from lp_fa4.problem import AttentionProblem, ForwardResult
from modules.coordinates import transform
from modules.numerics import Numerics
from modules.queries import turn, turn_back


@lru_cache(maxsize=64)
def _numerics(key: str) -> Numerics:
    return Numerics.from_key(key)


@lru_cache(maxsize=64)
def _with_bf16_keys(numerics: Numerics) -> Numerics:
    return replace(numerics, key_projection="bf16")


def _choose(device: torch.device, head_dim: int, key: str, backend: str, deterministic: bool) -> tuple[str, Numerics, dispatch.Features]:
    opts = _numerics(key)
    features = dispatch.Features(head_dim, shared_q=True, q_mean=opts.q_smoothing, config=opts.attention)
    name = dispatch.choose(device, features, backend)
    return name, opts.for_backend(name, deterministic), features


_choose_once = lru_cache(maxsize=256)(_choose)
"""For GPUs, whose answer does not change while the process lives: a step asks four times, and finding packages costs."""


def _settle(device: torch.device, head_dim: int, key: str, backend: str, *, say: bool = False) -> tuple[str, Numerics]:
    """The backend that serves the module's attention on ``device``, and the numerics settled for it.

    Fake and real implementations, forward and backward, all ask here, so that they agree.
    """
    choose = _choose_once if device.type == "cuda" else _choose
    deterministic = torch.are_deterministic_algorithms_enabled()
    name, opts, features = choose(device, int(head_dim), key, backend, deterministic)  # a trace may give a number as a symbol
    if say and backend == "auto":
        dispatch.announce(name, device, features)
    return name, opts


def _projection(w: Tensor, gain: Tensor | None, heads: int, numerics: Numerics, rotate: bool) -> ProjectionWeight:
    """A projection weight as the products read it, forward and backward; rotated by the Hadamard matrix if that is on. ``gain``: the norm's
    weight, where exponents are wanted.

    In blocks as wide as a head unless scales are square: whoever multiplies adds up a whole block before its factor changes. Where they are
    static, in bounded whole rows: then one factor serves a row, and Hopper sums in FP16.
    """
    block = (32, 32) if numerics.scales == "square" else (32, w.shape[0] // heads)
    bounded = numerics.scales == "static" and w.shape[1] <= MAX_BOUNDED_COLUMNS
    block = (32, w.shape[1]) if bounded else block
    gain = w.new_ones(w.shape[1]) if gain is None else gain
    return projection_weight(w, gain, heads, numerics.key_projection, block, rotate=rotate, centred=numerics.center, bounded=bounded)


def _backward_weight(projection: ProjectionWeight) -> Tensor:
    """The key projection in one piece, BF16, which holds E4M3 under its exponents exactly; where the forward had it in two, of both."""
    weight = projection.weight
    return weight.dequantize(torch.bfloat16) if isinstance(weight, MXTensor) else projection.rounded


def row_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """FP32 ``rows [B, C] @ matrix [C, N]``, summed in FP64: BLAS adds up an FP32 product in an order that depends on ``B``, and a sample's
    numbers must not depend on its batch. There is a row a sample, so it costs next to nothing."""
    return (rows.to(torch.float64) @ matrix.to(torch.float64)).to(torch.float32)


def _one_kernel(values: Tensor, norm_weight: Tensor, w_k: Tensor, w_v: Tensor | None, heads: int, key: str, opts: Numerics) -> bool:
    """Whether norm and key projection are one kernel, which multiplies 16-bit rows that it never writes: where the choice is open or is
    that, and the kernel serves. The value projection would need the rows in memory."""
    width = w_k.shape[0] // heads
    wanted = _numerics(key).key_projection in ("auto", "bf16") and opts.center and opts.scales == "static" and w_v is None
    if not wanted or values.device.type != "cuda":
        return False
    return not rows_unserved(values, norm_weight, w_k.shape[0], width)


def _empty(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return like.new_empty(0, dtype=dtype)


@custom_op("modules::pma_attention", mutates_args=())
def pma_attention(
    values: Tensor,
    offsets: Tensor,
    q: Tensor,
    norm_weight: Tensor,
    w_k: Tensor,
    w_v: Tensor | None,
    eps: float,
    numerics: str,
    backend: str,
    out_dtype: torch.dtype,
    backward: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Pool ``values [T, dim]`` with ``q [Q, H, D]`` (FP32, shared by every sequence), whose coordinates are chosen in here.

    Returns ``out [B, Q, dim]`` in ``out_dtype`` and what the backward reads: centred_out (empty unless ``backward``), row_max, row_sum;
    q codes and scale, q_mean and its scores; k codes and scale; xn codes and scale; v codes and scale (empty when v is xn); rstd; mean
    and total of the normed rows, ``[B, dim]``; the key projection as the gradient of the normed rows reads it, BF16; the matrices of
    balanced coordinates, of keys and of queries, empty where they are plain.
    """
    queries, heads, head_dim = q.shape
    check_on_host(offsets, values.shape[0])
    name, opts = _settle(q.device, head_dim, numerics, backend, say=True)
    batch, dim = offsets.shape[0] - 1, heads * head_dim
    block = opts.block(head_dim)
    one_kernel = name == "sm90" and _one_kernel(values, norm_weight, w_k, w_v, heads, numerics, opts)
    if one_kernel:
        opts = _with_bf16_keys(opts)
    for_keys = for_queries = None
    turned, rotates = w_k, opts.rotates(head_dim)
    if opts.coordinates == "balanced":
        for_keys, for_queries = balanced_coordinates(q, w_k, norm_weight, rotate=rotates)
        turned, rotates = transform(for_keys, w_k), False
    projection = _projection(turned, norm_weight, heads, opts, rotates)
    q = turn(q, opts, for_queries)

    normed: Tensor | None = None
    mean = total = None
    keys: MXTensor | None = None
    if one_kernel:
        assert isinstance(projection.weight, Tensor)
        made = rmsnorm_project(
            values, norm_weight, projection.weight, projection.bound, eps, offsets, width=head_dim, product_width=head_dim
        )
        (xn, rstd, mean, total, _), keys = made
    elif opts.center:
        xn, rstd, mean, total, normed = rmsnorm_center_quantize(
            values, norm_weight, eps, offsets, block, keep=opts.key_projection == "bf16"
        )
    else:
        xn, rstd = rmsnorm_quantize(values, norm_weight, eps, offsets, block)

    def project(weight: ProjectionWeight) -> MXTensor:
        exponent = weight.bound if opts.scales == "static" else None
        if opts.key_projection == "bf16" and normed is not None:
            return gemm_quantize(normed, weight.weight, block, offsets=offsets, exponent=exponent)
        return gemm_quantize(xn, weight.weight, block, exponent=exponent)

    k = (project(projection) if keys is None else keys).reshape_heads(heads)
    v, v_mean, v_sum = xn, mean, total
    if w_v is not None:
        value_weight = _projection(w_v, norm_weight, heads, opts, False)
        v = project(value_weight)
        if mean is not None and total is not None:
            exact = to_float(value_weight.weight)
            v_mean, v_sum = row_product(mean, exact.t()), row_product(total, exact.t())
    q_mean = q.mean(dim=0) if opts.q_smoothing else None
    qc = q if q_mean is None else q - q_mean
    # Static: one exponent a head over all queries, for the seeds' projection is small and its bound would be loose.
    q8 = head_quantize(qc) if opts.scales == "static" else quantize_mx(qc, block, token_dim=0)

    def per_head(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.reshape(batch, heads, head_dim)

    mean_scores = None
    if q_mean is not None:
        # The mean query meets the keys before they are rounded: one more column a head in the key projection.
        folded = torch.einsum("hd,hdc->hc", q_mean, to_float(projection.weight).unflatten(0, (heads, head_dim)))
        rows = xn.dequantize() if normed is None else normed.to(torch.float32)
        mean_scores = (folded @ rows.t()).contiguous()
    normed = None  # two bytes a channel of every event, which attention does not need
    problem = AttentionProblem(
        q8,
        k,
        v.reshape_heads(heads),
        offsets_k=offsets,
        shared_q=True,
        v_mean=per_head(v_mean),
        v_sum=per_head(v_sum),
        q_mean=q_mean,
        mean_scores=mean_scores,
        config=opts.attention,
    )
    result = run_forward(name, problem, backward)
    out = result.out.reshape(batch, queries, dim).to(out_dtype)
    if backward and out.data_ptr() == result.centred_out.data_ptr():  # an operator may not return one memory twice
        out = out.clone()
    own_v = w_v is not None
    return (
        out,
        result.centred_out if backward else _empty(values, opts.attention.save_out_dtype),
        result.row_max,
        result.row_sum,
        q8.codes,
        q8.scale_bytes,
        _empty(values) if q_mean is None else q_mean,
        _empty(values) if mean_scores is None else mean_scores,
        k.codes,
        k.scale_bytes,
        xn.codes,
        xn.scale_bytes,
        v.codes if own_v else _empty(values, torch.uint8),
        v.scale_bytes if own_v else _empty(values, torch.uint8),
        rstd,
        _empty(values) if mean is None else mean,
        _empty(values) if total is None else total,
        _backward_weight(projection),
        _empty(values) if for_keys is None else for_keys,
        _empty(values) if for_queries is None else for_queries,
    )


@pma_attention.register_fake
def _(values, offsets, q, norm_weight, w_k, w_v, eps, numerics, backend, out_dtype, backward):
    queries, heads, head_dim = q.shape
    _, opts = _settle(q.device, head_dim, numerics, backend)
    tokens, dim = values.shape
    batch = offsets.shape[0] - 1

    def empty(*shape, dtype=torch.float32):
        return values.new_empty(shape, dtype=dtype)

    def mx(block, rows_of, offs):
        rows = 1 if block[0] == 0 else scale_rows(rows_of, offs)
        return rows, head_dim // block[1]

    rows, per = mx(opts.block(head_dim), tokens, offsets)
    q_rows, q_per = mx(opts.block(head_dim), queries, None)
    byte = torch.uint8
    v_shapes = ((tokens, dim), (rows, heads * per)) if w_v is not None else ((0,), (0,))
    sums = (batch, dim) if opts.center else (0,)
    return (
        empty(batch, queries, dim, dtype=out_dtype),
        empty(*((batch * queries, heads, head_dim) if backward else (0,)), dtype=opts.attention.save_out_dtype),
        empty(heads, batch * queries),
        empty(heads, batch * queries),
        empty(queries, heads, head_dim, dtype=byte),
        empty(q_rows, heads, q_per, dtype=byte),
        empty(*((heads, head_dim) if opts.q_smoothing else (0,))),
        empty(*((heads, tokens) if opts.q_smoothing else (0,))),
        empty(tokens, heads, head_dim, dtype=byte),
        empty(rows, heads, per, dtype=byte),
        empty(tokens, dim, dtype=byte),
        empty(rows, heads * per, dtype=byte),
        empty(*v_shapes[0], dtype=byte),
        empty(*v_shapes[1], dtype=byte),
        empty(tokens),
        empty(*sums),
        empty(*sums),
        empty(dim, dim, dtype=torch.bfloat16),
        *(empty(*((heads, head_dim, head_dim) if opts.coordinates == "balanced" else (0,))) for _ in range(2)),
    )


def _gradient(codes: Tensor, scale: Tensor, block: tuple[int, int], offsets: Tensor) -> MXTensor | Tensor:
    """A gradient as the operators hand it on: MXFP8 bytes with a scale, or a float tensor and an empty one."""
    return MXTensor.from_bytes(codes, scale, block, offsets) if scale.numel() or codes.dtype == torch.uint8 else codes


def _saved_problem(saved: list[Tensor], offsets: Tensor, w_v: Tensor | None, numerics: str, backend: str) -> tuple[str, AttentionProblem]:
    """The backend and the forward's problem again, from what the forward kept but its first three (the output and its statistics)."""
    q_codes, q_scale, q_mean, mean_scores, k_codes, k_scale, xn_codes, xn_scale, v_codes, v_scale, _, mean, total = saved[:13]
    heads, head_dim = q_codes.shape[1:]
    name, opts = _settle(q_codes.device, head_dim, numerics, backend)
    batch = offsets.shape[0] - 1
    block = opts.block(head_dim)
    xn = MXTensor.from_bytes(xn_codes, xn_scale, block, offsets)
    v8 = xn if w_v is None else MXTensor.from_bytes(v_codes, v_scale, block, offsets)
    v_mean = v_sum = None
    if opts.center:
        v_mean, v_sum = mean, total
        if w_v is not None:
            exact = to_float(_projection(w_v, None, heads, opts, False).weight)
            v_mean, v_sum = row_product(mean, exact.t()), row_product(total, exact.t())
        v_mean, v_sum = (rows.reshape(batch, heads, head_dim) for rows in (v_mean, v_sum))
    return name, AttentionProblem(
        MXTensor.from_bytes(q_codes, q_scale, block),
        MXTensor.from_bytes(k_codes, k_scale, block, offsets),
        v8.reshape_heads(heads),
        offsets_k=offsets,
        shared_q=True,
        v_mean=v_mean,
        v_sum=v_sum,
        q_mean=q_mean if opts.q_smoothing else None,
        mean_scores=mean_scores if opts.q_smoothing else None,
        config=opts.attention,
    )


def _result(saved: list[Tensor]) -> ForwardResult:
    """The forward's result as a backward reads it, which works from the centred output, the maximum and the sum."""
    centred_out, row_max, row_sum = saved[:3]
    return ForwardResult(centred_out, row_max, centred_out, row_max, row_sum)


def in_halves(backend: str) -> bool:
    """Whether a backend's backward comes in halves, of which the first alone reads the output and its gradient."""
    return hasattr(dispatch.module(backend), "prepare_backward")


@custom_op("modules::pma_attention_prepass", mutates_args=())
def pma_attention_prepass(
    dout: Tensor, offsets: Tensor, w_v: Tensor | None, saved: list[Tensor], numerics: str, backend: str
) -> list[Tensor]:
    """First half of attention's backward; ``saved``: what the forward kept. Returns what the second half reads in place of the centred
    output, row_max, row_sum and dout."""
    name, problem = _saved_problem(saved[3:], offsets, w_v, numerics, backend)
    return run_prepass(name, problem, _result(saved), dout.reshape(problem.rows, problem.heads, problem.head_dim))


@pma_attention_prepass.register_fake
def _(dout, offsets, w_v, saved, numerics, backend):
    name, problem = _saved_problem(saved[3:], offsets, None, numerics, backend)  # shapes are the same whoever made V
    return dispatch.module(name).workspaces(problem, deterministic=torch.are_deterministic_algorithms_enabled())


@custom_op("modules::pma_attention_backward", mutates_args=())
def pma_attention_backward(
    dout: Tensor,
    query_side: list[Tensor],
    offsets: Tensor,
    w_v: Tensor | None,
    saved: list[Tensor],
    numerics: str,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention's part: dq FP32 ``[Q, H, D]``; dk and its scale, dv and its scale, ``[T, dim]`` MXFP8 bytes or BF16 and an empty scale;
    dv_mean ``[B, dim]``, what was kept out of dv, empty if it is complete.

    ``query_side``: what the prepass returned or, of a backend whose backward comes in one piece, the forward's centred_out, row_max and
    row_sum. ``saved``: what the forward kept beside these three. ``needs``: of q, of k, of v."""
    name, problem = _saved_problem(saved, offsets, w_v, numerics, backend)
    if in_halves(name):
        grads = finish_backward(name, problem, query_side)
    else:
        flat = dout.reshape(problem.rows, problem.heads, problem.head_dim)
        grads = run_backward(name, problem, _result(query_side), flat, None, False, tuple(needs))
    batch, heads, head_dim = problem.batch, problem.heads, problem.head_dim

    def parts(grad: MXTensor | Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(grad, Tensor):
            return grad.flatten(1), _empty(dout, torch.uint8)
        plain = grad.flatten_heads()
        return plain.codes, plain.scale_bytes

    dv_mean = _empty(dout) if grads.dv_mean is None else grads.dv_mean.reshape(batch, heads * head_dim)
    return turn_back(grads.dq, _settle(dout.device, head_dim, numerics, backend)[1], saved[-1]), *parts(grads.dk), *parts(grads.dv), dv_mean


@pma_attention_backward.register_fake
def _(dout, query_side, offsets, w_v, saved, numerics, backend, needs):
    queries, heads, head_dim = saved[0].shape
    tokens, dim = saved[6].shape
    _, opts = _settle(dout.device, head_dim, numerics, backend)
    config = opts.attention

    def empty(*shape, dtype=torch.float32):
        return dout.new_empty(shape, dtype=dtype)

    if config.grad_format == "bf16":
        grad = [(empty(tokens, dim, dtype=torch.bfloat16), empty(0, dtype=torch.uint8)) for _ in range(2)]
    else:
        scale = (scale_rows(tokens, offsets), dim // config.grad_block[1])
        grad = [(empty(tokens, dim, dtype=torch.uint8), empty(*scale, dtype=torch.uint8)) for _ in range(2)]
    centred = config.center_p and config.center_p_backward and config.fold_l_into_do
    mean = empty(*((offsets.shape[0] - 1, dim) if centred else (0,)))
    return empty(queries, heads, head_dim), *grad[0], *grad[1], mean


def _flow(
    dv: MXTensor | Tensor, dv_mean: Tensor, w_v: Tensor | None, heads: int, opts: Numerics, backend: str
) -> tuple[MXTensor | Tensor, Tensor | None]:
    """Gradient of the normed rows through the values, and the row per sequence that belongs to it. Kernels take a product in BF16."""
    mean = dv_mean if dv_mean.dim() == 2 else None
    if w_v is None:
        return dv, mean
    exact = to_float(_projection(w_v, None, heads, opts, False).weight)
    through = None if mean is None else row_product(mean, exact)
    if backend == "reference":
        return to_float(dv) @ exact, through
    return (dv if isinstance(dv, Tensor) else dv.dequantize(torch.bfloat16)) @ exact.to(torch.bfloat16), through


@custom_op("modules::pma_weight_gradients", mutates_args=())
def pma_weight_gradients(
    grads: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    norm_weight: Tensor,
    w_k: Tensor,
    w_v: Tensor | None,
    saved: list[Tensor],
    heads: int,
    numerics: str,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of w_k and w_v in their dtypes, empty where ``needs`` says so. ``grads``: dk, its scale, dv, its scale, dv_mean; ``saved``:
    codes and scale of xn, rstd, mean and total, the key projection, matrices of coordinates. The last that reads xn, which may be
    freed before the events' gradient is allocated."""
    dk_codes, dk_scale, dv_codes, dv_scale, dv_mean = grads
    xn_codes, xn_scale, rstd, mean, total, weight, for_keys, _ = saved
    _, opts = _settle(values.device, w_k.shape[0] // heads, numerics, backend)
    block = opts.attention.grad_block
    xn = MXTensor.from_bytes(xn_codes, xn_scale, opts.block(w_k.shape[0] // heads), offsets)
    dw_k = dw_v = None
    if needs[0]:
        dk = _gradient(dk_codes, dk_scale, block, offsets)
        dw_k = gemm_norm_backward(dk, None, weight, values, norm_weight, rstd, xn, needs=(False, False, True)).dw_k
        assert dw_k is not None
        if for_keys.numel():
            dw_k = transform(for_keys.transpose(1, 2), dw_k)
        elif opts.rotates(w_k.shape[0] // heads):
            dw_k = rotate_rows(dw_k, heads)
    if w_v is not None and needs[1]:
        # dV = dv + w_b and xn = xc + mean_b per sequence b; the columns of dv alone sum to 0 only where w was taken out of them.
        dv = _gradient(dv_codes, dv_scale, block, offsets)
        dw_v = weight_gradient(dv, xn, offsets)
        if dv_mean.dim() == 2:  # then the rows were centred: P is centred only with their sums
            length = (offsets[1:] - offsets[:-1]).to(torch.float32)[:, None]
            dw_v += dv_mean.t() @ (total + length * mean)
        elif opts.center:
            dw_v += weight_gradient(dv, per_token(mean, offsets, values.shape[0]), offsets)
    return (
        _empty(values, w_k.dtype) if dw_k is None else dw_k.to(w_k.dtype),
        _empty(values, (w_k if w_v is None else w_v).dtype) if dw_v is None or w_v is None else dw_v.to(w_v.dtype),
    )


@pma_weight_gradients.register_fake
def _(grads, values, offsets, norm_weight, w_k, w_v, saved, heads, numerics, backend, needs):
    own = w_k if w_v is None else w_v
    return (
        w_k.new_empty(w_k.shape if needs[0] else (0,)),
        own.new_empty(own.shape if needs[1] and w_v is not None else (0,)),
    )


@custom_op("modules::pma_input_gradients", mutates_args=())
def pma_input_gradients(
    grads: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    w_v: Tensor | None,
    rstd: Tensor,
    heads: int,
    numerics: str,
    backend: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of values and norm_weight in their dtypes, empty where ``needs`` says so. ``grads`` as in the weights' gradients;
    ``weight``: the key projection as the forward saved it."""
    dk_codes, dk_scale, dv_codes, dv_scale, dv_mean = grads
    name, opts = _settle(values.device, weight.shape[0] // heads, numerics, backend)
    block = opts.attention.grad_block
    dk = _gradient(dk_codes, dk_scale, block, offsets)
    d_normed, d_mean = _flow(_gradient(dv_codes, dv_scale, block, offsets), dv_mean, w_v, heads, opts, name)
    plain = isinstance(dk, Tensor)
    dx, dnorm, _ = gemm_norm_backward(
        dk, d_normed, weight, values, norm_weight, rstd, None, dv_mean=d_mean,
        offsets=offsets if plain else None, needs=(needs[0], needs[1], False),
    )  # fmt: skip
    return (
        _empty(values, values.dtype) if dx is None else dx,
        _empty(values, norm_weight.dtype) if dnorm is None else dnorm.to(norm_weight.dtype),
    )


@pma_input_gradients.register_fake
def _(grads, values, offsets, norm_weight, weight, w_v, rstd, heads, numerics, backend, needs):
    return (
        values.new_empty(values.shape if needs[0] else (0,)),
        norm_weight.new_empty(norm_weight.shape if needs[1] else (0,)),
    )


def _pma_setup(ctx, inputs, output):
    values, offsets, _, norm_weight, w_k, w_v, ctx.eps, ctx.numerics, ctx.backend, *_ = inputs
    ctx.has_value = w_v is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(values, offsets, norm_weight, w_k, *([w_v] if w_v is not None else []), *output[1:])


def _pma_backward(ctx, dout, *_):
    values, offsets, norm_weight, w_k, *rest = ctx.saved_tensors
    w_v = rest.pop(0) if ctx.has_value else None
    need = ctx.needs_input_grad
    need_x, need_q, need_norm, need_k, need_v = need[0], need[2], need[3], need[4], ctx.has_value and need[5]
    if dout is None or not any((need_x, need_q, need_norm, need_k, need_v)):
        return (None,) * 11
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each operator below frees what the next ones do not read
    heads, choices = rest[3].shape[1], (ctx.numerics, ctx.backend)
    need_kv = need_x or need_norm
    query_side = rest[:3]
    if in_halves(_settle(dout.device, rest[3].shape[2], *choices)[0]):
        query_side = torch.ops.modules.pma_attention_prepass(dout, offsets, w_v, rest, *choices)
    del rest[:3]
    dq, *grads = torch.ops.modules.pma_attention_backward(
        dout, query_side, offsets, w_v, rest, *choices, [need_q, need_kv or need_k, need_kv or need_v]
    )
    kept = rest[6:8] + rest[10:]
    rstd, weight = rest[10], rest[13]
    del rest, query_side
    dw_k = dw_v = dx = dnorm = None
    if need_k or need_v:
        dw_k, dw_v = torch.ops.modules.pma_weight_gradients(
            grads, values, offsets, norm_weight, w_k, w_v, kept, heads, *choices, [need_k, need_v]
        )
    del kept
    if need_kv:
        dx, dnorm = torch.ops.modules.pma_input_gradients(
            grads, values, offsets, norm_weight, weight, w_v, rstd, heads, *choices, [need_x, need_norm]
        )
    picked = [g if n else None for g, n in zip((dq, dnorm, dw_k, dw_v), (need_q, need_norm, need_k, need_v), strict=True)]
    return dx if need_x else None, None, *picked, *(None,) * 5


pma_attention.register_autograd(_pma_backward, setup_context=_pma_setup)
