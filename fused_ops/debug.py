"""How ``lp_fa4.debug`` looks at the operators of this package."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.gemm_norm_backward import reference
from fused_ops.operands import to_float, unflatten
from lp_fa4.debug import Rows, Seen, describe, named, spread
from lp_fa4.mx import MXTensor


def _matrix(name: str, parts: Any, offsets: Tensor | None = None, rows: Rows | None = None) -> Iterator[Seen]:
    """A matrix as operators take it apart, in all its pieces."""
    if not parts[0]:
        return
    payloads, scales, blocks = parts
    whole = unflatten(payloads, scales, blocks, offsets)
    for i, piece in enumerate(whole if isinstance(whole, tuple) else (whole,)):
        yield Seen(name if not isinstance(whole, tuple) else f"{name}[{i}]", piece, rows)


def _norm_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from named([a["x"]], "x", Rows.jagged(a["offsets"]))
    yield from named([a["weight"]], "weight")


def _norm(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    codes, scale, rstd, mean, total, normed, *_ = result
    x, offsets, block = a["x"], a["offsets"], a["block"]
    xn = MXTensor.from_bytes(codes, scale, (block[0], block[1]), offsets, 0 if offsets is not None else x.dim() - 2)
    rows = Rows.jagged(offsets)
    source = None
    if shadow:
        xf = x.to(torch.float32)
        source = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + a["eps"]) * a["weight"].to(torch.float32)
        source = source - spread(mean, offsets, x.shape[0])
    yield from named([rstd], "rstd", rows)
    yield from named([mean, total], "mean total", None if offsets is None else Rows.even(offsets.shape[0] - 1))
    yield Seen("xn", xn, rows, source, rounded=True)
    yield from named([normed], "normed", rows, shadow=source)


def _norm_project_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from _norm_inputs(a)
    yield from named([a["w"]], "w")


def _norm_project(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    codes, scale, rstd, mean, total, _, product, product_scale = result
    block = {"block": (0, a["width"])}
    yield from _norm({**a, **block}, (codes, scale, rstd, mean, total, rstd.new_empty(0)), shadow)
    x, offsets = a["x"], a["offsets"]
    truth = None
    if shadow:
        xf = x.to(torch.float32)
        rows = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + a["eps"]) * a["weight"].to(torch.float32)
        truth = (rows - spread(mean, offsets, x.shape[0])) @ a["w"].to(torch.float32).t()
    made = MXTensor.from_bytes(product, product_scale, (0, a["product_width"]), offsets, 0)
    yield Seen("product", made, Rows.jagged(offsets), truth, rounded=True)


def _product_operands(a: Mapping[str, Any]) -> tuple[Any, Any]:
    return unflatten(a["x"], a["x_scale"], a["x_block"], a["offsets"]), unflatten(a["w"], a["w_scale"], a["w_block"])


def _product_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    yield from _matrix("x", (a["x"], a["x_scale"], a["x_block"]), a["offsets"], Rows.jagged(a["offsets"]))
    yield from _matrix("w", (a["w"], a["w_scale"], a["w_block"]))


def _product(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    block = a["block"]
    out = MXTensor.from_bytes(result[0], result[1], (block[0], block[1]), a["offsets"], 0)
    truth = None
    if shadow:
        x, w = _product_operands(a)
        truth = to_float(x) @ to_float(w).t()
    yield Seen("product", out, Rows.jagged(a["offsets"]), truth, rounded=True)


def _backward_inputs(a: Mapping[str, Any]) -> Iterator[Seen]:
    offsets, rows = a["offsets"], Rows.jagged(a["offsets"])
    yield from _matrix("dk", (a["dk"], a["dk_scale"], a["dk_block"]), offsets, rows)
    yield from _matrix("dv", (a["dv"], a["dv_scale"], a["dv_block"]), offsets, rows)
    yield from named([a["dv_mean"]], "dv_mean", None if offsets is None else Rows.even(offsets.shape[0] - 1))
    yield from _matrix("w_k", (a["w_k"], a["w_scale"], a["w_block"]))
    yield from named([a["x"], a["rstd"]], "x rstd", rows)
    yield from named([a["norm_weight"]], "norm_weight")
    yield from _matrix("xn", (a["xn"], a["xn_scale"], a["xn_block"]), offsets, rows)


def _backward(a: Mapping[str, Any], result: Sequence[Tensor], shadow: bool) -> Iterator[Seen]:
    truth: Sequence[Tensor | None] = (None, None, None)
    if shadow:
        dk, dv, xn = (unflatten(a[n], a[f"{n}_scale"], a[f"{n}_block"], a["offsets"]) if a[n] else None for n in ("dk", "dv", "xn"))
        weight = unflatten(a["w_k"], a["w_scale"], a["w_block"])
        x = a["x"].to(torch.float32)
        truth = reference.gemm_norm_backward(dk, dv, a["dv_mean"], weight, x, a["norm_weight"], a["rstd"], xn, a["offsets"], *a["needs"])  # type: ignore[arg-type]
    rows = (Rows.jagged(a["offsets"]), None, None)
    for name, grad, t, r in zip(("dx", "dnorm_weight", "dw_k"), result, truth, rows, strict=True):
        if grad.numel():
            yield Seen(name, grad, r, t)


def _nothing(*_: Any) -> Iterator[Seen]:
    """Bytes that only change places."""
    return iter(())


describe("fused_ops::rmsnorm_quantize", _norm_inputs, _norm)
describe("fused_ops::rmsnorm_project", _norm_project_inputs, _norm_project)
describe("fused_ops::gemm_quantize", _product_inputs, _product)
describe("fused_ops::gemm_norm_backward", _backward_inputs, _backward)
describe("fused_ops::scatter_scales", _nothing, _nothing)
describe("fused_ops::gather_scales", _nothing, _nothing)
