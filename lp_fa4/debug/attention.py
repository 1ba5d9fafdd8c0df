"""How ``lp_fa4.debug`` looks at the attention operators; exact gradients without autograd, which is off inside operators."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lp_fa4.config import AttentionConfig
from lp_fa4.debug import Rows, Seen, describe, mx, named, spread
from lp_fa4.mx import MXTensor
from lp_fa4.reference.exact import exact_attention


def exact_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_k: Tensor | None = None,
    offsets_q: Tensor | None = None,
    shared_q: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 ``dq, dk, dv`` of ``sum(dout * exact_attention(...)[0])``: ``dS = P * (dO V^T - rowsum(dO * O))``, arguments as there."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    bounds = [0, k.shape[0]] if offsets_k is None else offsets_k.tolist()
    batch, group = len(bounds) - 1, q.shape[1] // k.shape[1]
    per = q.shape[0] if shared_q else q.shape[0] // max(batch, 1)
    rows = [b * per for b in range(batch + 1)] if offsets_q is None else offsets_q.tolist()
    dout, q, k, v = (x.to(torch.float32) for x in (dout, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for (first, last), (start, stop) in zip(pairwise(rows), pairwise(bounds), strict=True):
        own = slice(0, per) if shared_q else slice(first, last)
        qb, do = q[own].transpose(0, 1), dout[first:last].transpose(0, 1)
        kb, vb = (x[start:stop].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        n, m = qb.shape[1], kb.shape[1]
        if n == 0 or m == 0:
            continue
        s = qb @ kb.transpose(1, 2) * scale
        if causal:
            s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=s.device).triu(1 + m - n), -torch.inf)
        p = torch.softmax(s, -1)
        if causal and n > m:
            p[:, : n - m] = 0.0  # rows that see no key
        dp = do @ vb.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[own] += (ds @ kb).transpose(0, 1)
        for out, x in ((dk, ds.transpose(1, 2) @ qb), (dv, p.transpose(1, 2) @ do)):
            out[start:stop] = x.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    return dq, dk, dv


def _query_rows(a: Mapping[str, Any], rows: int, axis: int = 0) -> Rows | None:
    if a.get("offsets_q") is not None:
        return Rows.jagged(a["offsets_q"], axis)
    batch = 1 if a["offsets_k"] is None else a["offsets_k"].shape[0] - 1
    return Rows.even(batch, rows // max(batch, 1), axis)


def _operands(a: Mapping[str, Any]) -> dict[str, MXTensor]:
    found = {}
    for i, name in enumerate("qkv"):
        tokens, columns, jagged = a["layout"][3 * i : 3 * i + 3]
        offsets = a["offsets_q" if name == "q" else "offsets_k"] if jagged else None
        found[name] = MXTensor.from_bytes(a[name], a[f"{name}_scale"], (tokens, columns), offsets, 0)
    return found


def _whole(a: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 queries, keys and values of MXFP8 operands, means added."""
    q, k, v = (x.dequantize() for x in _operands(a).values())
    if a["q_mean"] is not None:
        q = q + a["q_mean"]
    return q, k, v + spread(a["v_mean"], a["offsets_k"], v.shape[0])


def _exact(a: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "offsets_k": a["offsets_k"],
        "offsets_q": a["offsets_q"],
        "shared_q": a.get("shared_q", False),
        "softmax_scale": a["softmax_scale"],
        "causal": a["causal"],
    }


def _mx_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    keys = Rows.jagged(a["offsets_k"])
    for name, x in _operands(a).items():
        rows = keys if name != "q" else None if a["shared_q"] else _query_rows(a, x.shape[0])
        yield Seen(name, x, rows)
    each = None if a["offsets_k"] is None else Rows.even(a["offsets_k"].shape[0] - 1)
    yield from named([a["v_mean"], a["v_sum"]], "v_mean v_sum", each)
    yield from named([a["q_mean"]], "q_mean")
    yield from named([a["mean_scores"]], "mean_scores", Rows.jagged(a["offsets_k"], 1))


def _forward_rows(a: Mapping[str, Any], result: Sequence[Tensor], truth: tuple[Tensor, Tensor] | None) -> Iterator[Seen]:
    out, lse, centred, row_max, row_sum = result[:5]
    rows, across = _query_rows(a, out.shape[0]), _query_rows(a, out.shape[0], 1)
    yield Seen("out", out, rows, truth and truth[0])
    yield Seen("lse", lse, across, truth and truth[1], minus_inf=True)
    yield from named([centred], "centred_out", rows)
    yield Seen("row_max", row_max, across, minus_inf=True)
    yield Seen("row_sum", row_sum, across)


def _mx_forward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    yield from _forward_rows(a, result, exact_attention(*_whole(a), **_exact(a), dtype=torch.float32) if shadow else None)


def _mx_backward_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    rows = _query_rows(a, a["dout"].shape[0])
    yield Seen("dout", a["dout"], rows)
    yield from named([a["dlse"]], "dlse", _query_rows(a, a["dout"].shape[0], 1))
    yield from _mx_inputs(a)


def _mx_backward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    dq, dk, dk_scale, dv, dv_scale, dv_mean = result
    keys = Rows.jagged(a["offsets_k"])
    truth: Sequence[Tensor | None] = (None, None, None)
    if shadow and a["dlse"] is None and all(a["needs"]):
        truth = exact_gradients(a["dout"], *_whole(a), **_exact(a))
    yield Seen("dq", dq, None if a["shared_q"] else _query_rows(a, dq.shape[0]), truth[0])
    tokens = AttentionConfig.from_key(a["config"]).grad_block[0]
    yield Seen("dk", mx(dk, dk_scale, a["offsets_k"], tokens), keys, None if a["q_mean"] is not None else truth[1])
    rest = None if truth[2] is None else truth[2] - spread(dv_mean, a["offsets_k"], dv.shape[0])
    yield Seen("dv", mx(dv, dv_scale, a["offsets_k"], tokens), keys, rest)
    yield from named([dv_mean], "dv_mean")


def _flash_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["q"]], "q", Rows.jagged(a["offsets_q"]))
    yield from named([a["k"], a["v"]], "k v", Rows.jagged(a["offsets_k"]))


def _flash_forward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    truth = exact_attention(a["q"], a["k"], a["v"], **_exact(a), dtype=torch.float32) if shadow else None
    queries, keys = Rows.jagged(a["offsets_q"]), Rows.jagged(a["offsets_k"])
    k_mean, v_mean, _ = result[11:]
    for i, (name, mean, rows) in enumerate((("q", None, queries), ("k", k_mean, keys), ("v", v_mean, keys))):
        source = a[name].to(torch.float32) - spread(mean, a["offsets_k"], a[name].shape[0]) if shadow else None
        yield Seen(
            f"{name} codes",
            mx(result[5 + 2 * i], result[6 + 2 * i], a["offsets_q" if name == "q" else "offsets_k"]),
            rows,
            source,
            rounded=True,
        )
    yield from named(result[11:], "k_mean v_mean v_sum", Rows.even(a["offsets_k"].shape[0] - 1))
    yield from _forward_rows(a, result, truth)


def _flash_operands(a: Mapping[str, Any]) -> dict[str, MXTensor]:
    offsets = {"q": a["offsets_q"], "k": a["offsets_k"], "v": a["offsets_k"]}
    return {name: mx(a[name], a[f"{name}_scale"], offsets[name]) for name in "qkv"}  # type: ignore[misc]


def _flash_backward_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield Seen("dout", a["dout"], Rows.jagged(a["offsets_q"]))
    yield from named([a["dlse"]], "dlse", Rows.jagged(a["offsets_q"], 1))
    for name, x in _flash_operands(a).items():
        yield Seen(name, x, Rows.jagged(x.offsets))


def _flash_backward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    truth: Sequence[Tensor | None] = (None, None, None)
    if shadow and a["dlse"] is None and all(a["needs"]):
        q, k, v = (x.dequantize() for x in _flash_operands(a).values())
        k, v = (x + spread(m, a["offsets_k"], x.shape[0]) for x, m in ((k, a["k_mean"]), (v, a["v_mean"])))
        truth = exact_gradients(a["dout"], q, k, v, **_exact(a))
    for name, x, t in zip(("dq", "dk", "dv"), result, truth, strict=True):
        yield Seen(name, x, Rows.jagged(a["offsets_q" if name == "dq" else "offsets_k"]), t)


def _sum_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield Seen("x", a["x"], Rows.jagged(a["offsets"]))


def _sums(a: Mapping[str, Any], result: Tensor, shadow: bool) -> Iterator[Seen]:
    yield Seen("sums", result, Rows.even(result.shape[0]))


describe("lp_fa4::attention_forward", _mx_inputs, _mx_forward)
describe("lp_fa4::attention_backward", _mx_backward_inputs, _mx_backward)
describe("lp_fa4::flash_attention_forward", _flash_inputs, _flash_forward)
describe("lp_fa4::flash_attention_backward", _flash_backward_inputs, _flash_backward)
describe("lp_fa4::sequence_sums", _sum_inputs, _sums)
