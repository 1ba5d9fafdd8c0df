"""How ``lp_fa4.debug`` looks at the operators of this package."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lp_fa4.debug import Rows, Seen, describe, mx, named, spread
from lp_fa4.debug.attention import exact_gradients
from lp_fa4.mx import MXTensor
from lp_fa4.reference.exact import exact_attention
from modules.mxfp8 import _settle
from modules.queries import turn_back
from modules.reference import rms_norm


def _samples(offsets: Tensor, rows: int = 1, axis: int = 0) -> Rows:
    return Rows.even(offsets.shape[0] - 1, rows, axis)


def _inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["values"]], "values", Rows.jagged(a["offsets"]))
    yield from named([a["q"], a["norm_weight"], a["w_k"], a["w_v"]], "q norm_weight w_k w_v")


def _forward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    out, centred, row_max, row_sum = result[:4]
    offsets, q = a["offsets"], a["q"]
    queries, heads, head_dim = q.shape
    truth = None
    if shadow:
        xn = rms_norm(a["values"].to(torch.float32), a["norm_weight"].to(torch.float32), a["eps"])
        w_k, w_v = a["w_k"].to(torch.float32), a["w_v"]
        v = xn if w_v is None else xn @ w_v.to(torch.float32).t()
        k, v = ((x.unflatten(1, (heads, head_dim))) for x in (xn @ w_k.t(), v))
        truth = exact_attention(q, k, v, offsets_k=offsets, shared_q=True, dtype=torch.float32)[0]
    yield from named([out], "out", _samples(offsets), shadow=truth)
    yield from named([centred], "centred_out", _samples(offsets, queries))
    yield from named([row_max], "row_max", _samples(offsets, queries, 1), minus_inf=True)
    yield from named([row_sum], "row_sum", _samples(offsets, queries, 1))


def _backward_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["dout"]], "dout", _samples(a["offsets"]))


def _backward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    dq, dk, dk_scale, dv, dv_scale, dv_mean = result
    offsets, saved, w_v = a["offsets"], a["saved"], a["w_v"]
    q_codes, q_scale, q_mean, _, k_codes, k_scale, xn_codes, xn_scale, v_codes, v_scale, _, mean = saved[:12]
    _, heads, head_dim = q_codes.shape
    opts = _settle(a["dout"].device, head_dim, a["numerics"], a["backend"])[1]
    block, grad_block = opts.block(head_dim), opts.attention.grad_block
    truth: Sequence[Tensor | None] = (None, None, None)
    if shadow and all(a["needs"]):
        own = (xn_codes, xn_scale) if w_v is None else (v_codes, v_scale)
        q = MXTensor.from_bytes(q_codes, q_scale, block).dequantize()
        k = MXTensor.from_bytes(k_codes, k_scale, block, offsets).dequantize()
        v = MXTensor.from_bytes(*own, block, offsets).dequantize()
        if opts.q_smoothing:
            q = q + q_mean
        if opts.center:
            v = v + spread(mean if w_v is None else mean @ w_v.to(torch.float32).t(), offsets, v.shape[0])
        dout = a["dout"].reshape(-1, heads, head_dim)
        v = v.unflatten(1, (heads, head_dim))
        truth = exact_gradients(dout, q, k, v, offsets_k=offsets, shared_q=True)
        truth = (turn_back(truth[0], opts, saved[-1]), *truth[1:])
    keys = Rows.jagged(offsets)
    yield from named([dq], "dq", shadow=truth[0])
    yield from named([mx(dk, dk_scale, offsets, grad_block[0])], "dk", keys, shadow=None if opts.q_smoothing else truth[1])
    rest = None if truth[2] is None else truth[2].flatten(1) - spread(dv_mean, offsets, dv.shape[0])
    yield from named([mx(dv, dv_scale, offsets, grad_block[0])], "dv", keys, shadow=rest)
    yield from named([dv_mean], "dv_mean", _samples(offsets))


def _prepass(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    """Images and statistics in a kernel's own layout, of which a row without keys is infinite: their use is seen in what follows."""
    return iter(())


def _nothing(_: Mapping[str, Any]) -> Iterator[Seen]:
    """Inputs that the operator before has just made."""
    return iter(())


def _weights(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    yield from named(result, "dw_k dw_v")


def _events(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    yield from named([result[0]], "dvalues", Rows.jagged(a["offsets"]))
    yield from named([result[1]], "dnorm_weight")


def _query_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["seeds"], a["norm_weight"], a["proj"]], "seeds norm_weight proj")


def _queries(a: Mapping[str, Any], result: Tensor, shadow: bool) -> Iterator[Seen]:
    seeds, weight, proj = (a[name].to(torch.float32) for name in ("seeds", "norm_weight", "proj"))
    yield from named([result], "q", shadow=rms_norm(seeds, weight, a["eps"]) @ proj.t() if shadow else None)


def _plain_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["q"]], "q")
    yield from named([a["k"], a["v"]], "k v", Rows.jagged(a["offsets"]))


def _plain(a: Mapping[str, Any], result: Tensor, shadow: bool) -> Iterator[Seen]:
    q, k, v = a["q"], a["k"], a["v"]
    truth = exact_attention(q, k, v, offsets_k=a["offsets"], shared_q=True, dtype=torch.float32)[0] if shadow else None
    yield from named([result], "out", _samples(a["offsets"]), shadow=truth)


def _plain_backward_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["dout"]], "dout", _samples(a["offsets"]))
    yield from _plain_inputs(a)


def _plain_backward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    truth: Sequence[Tensor | None] = (None, None, None)
    if shadow:
        dout = a["dout"].flatten(0, 1)
        truth = exact_gradients(dout, a["q"], a["k"], a["v"], offsets_k=a["offsets"], shared_q=True)
    rows = (None, Rows.jagged(a["offsets"]), Rows.jagged(a["offsets"]))
    for name, grad, t, r in zip(("dq", "dk", "dv"), result, truth, rows, strict=True):
        yield from named([grad], name, r, shadow=t)


describe("modules::pma_attention", _inputs, _forward)
describe("modules::pma_attention_prepass", _backward_inputs, _prepass)
describe("modules::pma_attention_backward", _backward_inputs, _backward)
describe("modules::pma_weight_gradients", _nothing, _weights)
describe("modules::pma_input_gradients", _nothing, _events)
describe("modules::project_queries", _query_inputs, _queries)
describe("modules::jagged_attention", _plain_inputs, _plain)
describe("modules::jagged_attention_backward", _plain_backward_inputs, _plain_backward)
