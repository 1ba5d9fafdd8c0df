"""Cases of the GEMM + norm backward kernels for ``tests.emulator.worker`` (JSON arguments only), and what counts as right, on a GPU too.

Right: against FP64 on the operands as stored, at most twice the error of the reference (FP32 sums in another order) plus what the rounding
of the result's own dtype adds. Where FP64 is not finite the kernel must not be either, and only there. Rows past the last offset are 0.
"""

from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor

from fused_ops.gemm_norm_backward import kernel, reference
from fused_ops.gemm_norm_backward.config import RUN, InputSpec
from fused_ops.gemm_norm_backward.kernel import gemm_norm_backward
from fused_ops.operands import to_float
from fused_ops.rmsnorm_quantize.reference import inside, per_token
from lp_fa4.mx import MXTensor, quantize_mx
from tests.conftest import offsets_of
from tests.emulator.kernels import Case
from tests.emulator.ours import host
from tests.fused_ops.kernel_cases import poison

EPS = 1e-6
SUMS = {"dx": 2e-6, "dnorm_weight": 2e-6, "dw_k": 2e-6}
"""Relative Frobenius error that FP32 sums may have beside the reference's own: a thousand terms in another order."""
CUT = 2.0**-25
"""Mean loss of an addition in a tensor core, which cuts instead of rounding; dW has up to ``RUN / 16`` of them in a row."""
FP8 = 2.0**-11
"""The same with FP8 products, whose sums of 128 tokens the tensor cores cut at 13 bits under the largest of what they add: 2^-12, by
emulation with such sums. (Rounding dW once to BF16 costs 2^-10.)"""
PLACE = 2.0**-10
"""Of dnorm_weight, where the products of dk and the weight are summed in FP16: a place of FP16 is at most that part of the number. A sum is
rounded once an instruction of 16 products, and once more with dv; each is off by a place over the root of 12, independently."""
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-25}


def operand(values: Tensor, kind, offsets, exponent: int = 2):
    """``kind``: a block, or "bfloat16"."""
    if kind == "bfloat16":
        return values.bfloat16()
    return quantize_mx(values, tuple(kind), offsets, token_dim=0, exponent=exponent if kind[0] == 0 else None)


def problem(
    lengths,
    rows: int,
    columns: int,
    *,
    dk=(32, 32),
    dv=(32, 32),
    xn=(0, 64),
    mean: bool = True,
    dtype: str = "bfloat16",
    capacity: int = 0,
    tokens: int = 0,
    weight: str = "bfloat16",
    int64: bool = False,
    strided: bool = False,
    even: bool = False,
    loud: bool = False,
    bad=(),
    seed: int = 0,
    device: str = "cpu",
):
    """Arguments of ``kernel.gemm_norm_backward`` up to ``offsets``. ``lengths`` None: dense, ``tokens`` rows. Rows past the end are NaN.
    ``even``: rows of one size, so that most blocks have their neighbours' exponent. ``loud``: all codes are 448, all weights nearly 2, so
    that sums in FP16 come as near to its end as they can (of 128 rows; dv's exponent is the largest that is added to them there)."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    offsets = None if lengths is None else offsets_of(lengths, torch.int64 if int64 else torch.int32).to(device)
    used = tokens if lengths is None else sum(lengths)
    capacity = 0 if lengths is None else capacity
    total = used + capacity

    def sized(n):
        return (
            random(total, n)
            if even
            else random(total, n) * torch.exp2(torch.randint(-9, 3, (total, 1), generator=generator, device=device).float())
        )

    x = (sized(columns) + 0.1 * random(1, columns)).to(getattr(torch, dtype))
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
    spread = torch.exp2(torch.randint(-15, 16, (rows // 32,), generator=generator, device=device).float()).repeat_interleave(32)
    if dtype == "float16":
        spread = spread * 2.0**-6  # dx fits
    values = dict(dk=sized(rows) * (1.0 if even else spread), dv=sized(columns), xn=x.float() * rstd[:, None])
    for row, what in zip(bad, (torch.nan, torch.inf, -torch.inf), strict=False):
        values["dk"][row, (7 * row) % rows] = what
        values["dv"][row - 1, (5 * row) % columns] = what
    if capacity:
        for t in (x, rstd, *values.values()):
            t[used:] = torch.nan
    made = {name: operand(v, kind, offsets) for (name, v), kind in zip(values.items(), (dk, dv, xn), strict=True) if kind is not None}
    for name, kind in (("dk", dk), ("dv", dv), ("xn", xn)):
        if capacity and kind is not None and kind != "bfloat16":
            made[name].codes[used:] = 0x7F
    if strided:  # rows with a gap after them
        x = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :columns]
    w = random(rows, columns) / columns**0.5
    w = quantize_mx(w) if weight == "mx" else w.to(getattr(torch, weight))
    if loud:
        w.fill_(1.9921875)
        for name, exponent in (("dk", 120), ("dv", 128)):
            made[name].codes.fill_(0x7E)
            made[name].scale_bytes.fill_(exponent)
    gain = torch.rand(columns, generator=generator, device=device) + 0.5
    batch = 1 if lengths is None else len(lengths)
    dv_mean = random(batch, columns) if mean else None
    return made["dk"], made.get("dv"), dv_mean, w, x, gain, rstd, made["xn"], offsets


def truth(dk, dv, dv_mean, w, x, gain, rstd, xn, offsets):
    """FP64: dx, dnorm_weight, dw_k."""
    valid = inside(offsets, x.shape[0])

    def rows(matrix):
        values = to_float(matrix).double()
        return values if valid is None else torch.where(valid, values, 0.0)

    dxn = rows(dk) @ to_float(w).double()
    if dv is not None:
        dxn += rows(dv)
    if dv_mean is not None:
        bounds = torch.tensor([0, x.shape[0]], device=x.device) if offsets is None else offsets
        dxn += per_token(dv_mean.double(), bounds, x.shape[0])
    factor = rstd.double() if valid is None else torch.where(valid[:, 0], rstd.double(), 0.0)
    xhat = rows(x) * factor[:, None]
    scaled = dxn * gain.double()
    dx = factor[:, None] * (scaled - xhat * (scaled * xhat).mean(dim=1, keepdim=True))
    return dx, (dxn * xhat).sum(0), rows(dk).t() @ rows(xn)


def error_of(value: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error over what is finite; infinite if anything is finite on one side only."""
    value = value.double()
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(value), finite):
        return float("inf")
    value, exact = value[finite], exact[finite]
    return float((value - exact).norm() / exact.norm().clamp(min=1e-30))


def fp8_products(dk, xn) -> bool:
    """Whether the Hopper kernel of dW multiplies codes as they are."""
    return isinstance(dk, MXTensor) and isinstance(xn, MXTensor) and not dk.is_static and xn.is_static


def half_sums(arguments, arch: str = "sm_90a") -> bool:
    """Whether the kernel of dx sums products in FP16."""
    dk, dv, mean, _, x, _, _, _, offsets = arguments
    left, right = kernel.kind(dk), kernel.kind(dv)
    assert left is not None
    sizes = dk.shape[1], x.shape[1], str(x.dtype).removeprefix("torch.")
    return InputSpec(
        *sizes, left, right, mean is not None, offsets is None, True, True, warp_mma=arch != "sm_90a", half_sums=True
    ).halves  # fmt: skip


def check(arguments, got, needs=(True, True, True), arch: str = "sm_90a") -> dict[str, float]:
    """See the module's docstring; returns the errors."""
    exact = truth(*arguments)
    theirs = reference.gemm_norm_backward(*arguments, True, True, True)
    dtype = arguments[4].dtype
    errors = {}
    for name, need, mine, want, right in zip(SUMS, needs, got, theirs, exact, strict=True):
        assert (mine is not None) == need, name
        if mine is None:
            continue
        assert mine.shape == want.shape and mine.dtype == want.dtype, name
        errors[name], reference_error = error_of(mine, right), error_of(want, right)
        assert reference_error < 1, f"{name}: the reference itself is off by {reference_error:.3g}"
        allowed = 2 * reference_error + SUMS[name] + (ROUNDING[dtype] * 0.1 if name == "dx" else 0.0)
        if name == "dnorm_weight" and half_sums(arguments, arch):
            allowed += PLACE * ((arguments[0].shape[1] / 16 + 1) / 12) ** 0.5
        if name == "dw_k":
            allowed += FP8 if fp8_products(arguments[0], arguments[7]) else CUT * min(RUN, arguments[0].shape[0]) / 16
        assert errors[name] <= allowed, f"{name}: error {errors[name]:.3g}, allowed {allowed:.3g}"
    if arguments[-1] is not None and got[0] is not None:
        assert bool((got[0][int(arguments[-1][-1]) :] == 0).all()), "dx past the last offset is not 0"
    return errors


def backward(arch: str, lengths, rows: int, columns: int, *, needs=(True, True, True), run: int = RUN, free: int = 0, **options) -> Case:
    """One call of the kernels. ``run``: tokens of a segment of dW; ``free``: multiprocessors on which it begins beside dx."""
    poison()
    arguments = problem(lengths, rows, columns, **options)

    def call():
        beside = mock.patch.object(kernel, "free_beside", lambda *_: free)
        with host(arch), mock.patch.object(kernel, "RUN", run), beside:
            return gemm_norm_backward(*arguments, *needs)

    name = f"gemm_norm_backward {lengths} {rows}x{columns} {options}"
    return Case(name, arch, None, call, lambda got: print(check(arguments, got, needs, arch)))


def alone(arguments, b: int):
    """The arguments of sequence ``b`` by itself."""
    dk, dv, mean, w, x, gain, rstd, xn, offsets = arguments
    begin, end = offsets[b : b + 2].tolist()

    def cut(matrix):
        if not isinstance(matrix, MXTensor):
            return None if matrix is None else matrix[begin:end]
        first, count = begin // 32 + b, (end - begin) // 32 + 1
        scale = matrix.scale_bytes if matrix.is_static else matrix.scale_bytes[first : first + count]
        own = torch.tensor([0, end - begin], dtype=offsets.dtype, device=offsets.device)
        return MXTensor.from_bytes(matrix.codes[begin:end].clone(), scale.clone(), matrix.block, own)

    dk, dv, xn = cut(dk), cut(dv), cut(xn)
    return dk, dv, None if mean is None else mean[b : b + 1], w, x[begin:end].clone(), gain, rstd[begin:end].clone(), xn, dk.offsets


def neighbours(arch: str, lengths, rows: int, columns: int, **options) -> Case:
    """A sequence's rows of dx are the same bits alone and among others."""
    poison()
    arguments = problem(lengths, rows, columns, **options)
    count = len(lengths)

    def call():
        with host(arch):
            return [gemm_norm_backward(*a, True, False, False)[0] for a in (arguments, *(alone(arguments, b) for b in range(count)))]

    def verify(got):
        for b, (begin, end) in enumerate(pairwise(arguments[-1].tolist())):
            assert torch.equal(got[0][begin:end], got[1 + b]), f"sequence {b}"

    return Case(f"gemm_norm_backward alone and among others {lengths} {rows}x{columns} {options}", arch, None, call, verify)
