"""How far the Hopper backward may be from the reference: one rule for every test that executes it in the emulator."""

import torch

from lp_fa4 import reference
from tests.gpu import problems


def plain(x) -> torch.Tensor:
    """A gradient, MXFP8 or not, in FP32."""
    return x.dequantize() if hasattr(x, "dequantize") else x.float()


def relative(ours, theirs) -> float:
    """Frobenius difference of two gradients."""
    a, b = plain(ours), plain(theirs)
    assert bool(torch.isfinite(a).all())
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def exact(p, dout) -> dict[str, torch.Tensor]:
    """dQ, dK and dV in FP64 on the reconstructed operands."""
    q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
    if p.v_mean is not None:
        v = v + p.v_mean.double()[problems.row_sequences(p.offsets_k, p.tokens)]
    arguments = dict(offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q, softmax_scale=p.softmax_scale, causal=p.causal)
    rows = p.rows if p.offsets_q is None else int(p.offsets_q[-1])
    dout = torch.where((torch.arange(p.rows, device=dout.device) < rows)[:, None, None], dout, 0)
    return dict(zip(("dq", "dk", "dv"), reference.exact_gradients(dout, q, k, v, **arguments), strict=True))


def whole(p, gradients, name: str) -> torch.Tensor:
    """A gradient in FP64, dV with its mean part."""
    value = plain(getattr(gradients, name)).double()
    if name == "dv" and gradients.dv_mean is not None:
        inside = torch.arange(p.tokens, device=value.device) < p.offsets_k[-1]
        value = value + gradients.dv_mean.double()[problems.row_sequences(p.offsets_k, p.tokens)] * inside[:, None, None]
    return value


ALLOWED = {"bf16": 2e-3, "mxfp8": 5e-3}
ALLOWED_DS = {"bf16": 0.02, "mxfp8": 0.04}
ALLOWED_HALVES = {"bf16": 0.037, "mxfp8": 0.08}
EXCESS, EXCESS_DV = 1.08, 2.0


def compare(p, dout, ours, theirs, *, with_truth: bool = True) -> dict[str, float]:
    """Relative differences of two backwards' gradients by name, and ``excess_*``, the error of ours against exact gradients over that of
    theirs (``with_truth``; a gradient of the LSE is not in it)."""
    report = {n: relative(getattr(ours, n), getattr(theirs, n)) for n in ("dq", "dk", "dv")}
    for n, truth in (exact(p, dout) if with_truth else {}).items():
        a, b = ((whole(p, x, n) - truth).norm() for x in (ours, theirs))
        report[f"excess_{n}"] = float(a / b) if b > 0 else 1.0
    if ours.dv_mean is not None:
        report["dv_mean"] = relative(ours.dv_mean, theirs.dv_mean)
    return report


def assert_agrees(report: dict[str, float], grads: str, halves: bool = True) -> None:
    """The differences allowed between the kernels and the reference; ``grads``: "bf16" or "mxfp8"; ``halves``: sums may be FP16.

    With FP32 sums those of dV are those of another exponent under the same rounding: a power of two changes an E4M3 code only where it
    becomes subnormal. dQ and dK: p is cut to BF16 where it becomes part of dS (0.2% of a value, root mean square), so that some codes of dS
    fall on the other side of a tie. A change of d before rounding to steps of s changes the rounded value by sqrt(d * s) in the root mean
    square: sqrt(0.002 * 0.07) = 1.2%, and as much again from MXFP8. With ``halves`` a row of dO has a factor of its own, so that codes of
    dO, P and dS are other, independent roundings: sqrt(2) times E4M3's 2.6%, and as much again from MXFP8.

    Errors against exact gradients must stay those of the reference, to the fluctuation of a small problem (and FP16's rounding, 0.1% a
    value). Those of a dV whose mean part is exact may be twice as large: what is left of a sequence of one key is FP16's rounding.
    """
    for key, value in report.items():
        if key.startswith("excess"):
            assert value <= (EXCESS_DV if key == "excess_dv" and "dv_mean" in report else EXCESS), (key, report)
        elif halves and key != "dv_mean":
            assert value <= ALLOWED_HALVES[grads], (key, report)
        else:
            allowed = ALLOWED_DS if key in ("dq", "dk") or (key == "dv" and "dv_mean" not in report) else ALLOWED
            assert value <= allowed[grads], (key, report)
