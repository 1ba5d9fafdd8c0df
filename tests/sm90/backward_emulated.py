"""Run the backward's kernels in the emulator on one small problem and compare with the reference.

    python -m tests.sm90.backward_emulated '{"lengths": [100, 31], "queries": 70}' [SCHEDULE:SEED ...]

Keys are those of ``tests.gpu.problems.Case``, and ``grads`` ("bf16", "mxfp8"), ``dq_dtype`` ("float32", "float16"), ``deterministic``,
``growth`` (dO times growth every 40 rows), ``size`` (of dO), ``cluster`` (true: two CTAs share query tiles whatever the lengths). Prints
one JSON line a schedule: relative differences to the reference, and ``excess_*``, the error against exact gradients over that of the
reference. A process of its own: the emulated architecture is fixed at import.
"""

import dataclasses
import json
import sys
from unittest import mock

import torch

from lp_fa4 import reference
from tests.emulator import api
from tests.gpu import problems

MULTIPROCESSORS = 4


def plain(x) -> torch.Tensor:
    """A gradient, MXFP8 or not, in FP32."""
    return x.dequantize() if hasattr(x, "dequantize") else x.float()


def relative(ours, theirs) -> float:
    """Frobenius difference of two gradients."""
    a, b = plain(ours), plain(theirs)
    assert bool(torch.isfinite(a).all())
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def exact(p, dout) -> dict[str, torch.Tensor]:
    """dQ, dK and, where it has no mean part, dV in FP64 on the reconstructed operands."""
    q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
    if p.v_mean is not None:
        v = v + p.v_mean.double()[problems.row_sequences(p.offsets_k, p.tokens)]
    arguments = dict(offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q, softmax_scale=p.softmax_scale, causal=p.causal)
    rows = p.rows if p.offsets_q is None else int(p.offsets_q[-1])
    dout = torch.where((torch.arange(p.rows) < rows)[:, None, None], dout, 0)
    names = ("dq", "dk") if p.centred_backward else ("dq", "dk", "dv")
    return dict(zip(names, reference.exact_gradients(dout, q, k, v, **arguments), strict=False))


def main(text: str, schedules: list[str]) -> None:
    fields = json.loads(text)
    grads, deterministic, growth = fields.pop("grads", "bf16"), fields.pop("deterministic", False), fields.pop("growth", 1.0)
    of_all = fields.pop("size", 1.0)
    cluster_keys = 0 if fields.pop("cluster", False) else None
    dq_dtype = getattr(torch, fields.pop("dq_dtype", "float32"))
    problems.DEVICE = torch.device("cpu")
    case = problems.Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    p = case.make()
    p = dataclasses.replace(p, config=p.config.with_(grad_format=grads, dq_dtype=dq_dtype))
    result = reference.forward(p)
    size = of_all * growth ** (torch.arange(p.rows) // 40).float()
    dout = (torch.randn(p.rows, p.heads, p.head_dim, generator=torch.Generator().manual_seed(5)) * size[:, None, None]).bfloat16()
    theirs = reference.backward(p, result, dout)

    def call():
        from lp_fa4.sm90 import backward_host as module
        from lp_fa4.sm90 import recode

        with (
            mock.patch.object(module, "arch_of", lambda device: "sm_90a"),
            mock.patch.object(recode, "arch_of", lambda device: "sm_90a"),
            mock.patch.object(module, "multiprocessors", lambda device: MULTIPROCESSORS),
            mock.patch.object(module, "CLUSTER_KEYS", cluster_keys),
        ):
            return module.backward(p, result, dout, deterministic=deterministic)

    for name in schedules:
        kind, _, seed = name.partition(":")
        ours, run = api.call_under(call, "sm_90a", api.Schedule(kind, int(seed or 0)), check=True)
        report = {n: relative(getattr(ours, n), getattr(theirs, n)) for n in ("dq", "dk", "dv")}
        for n, truth in exact(p, dout).items():
            a, b = ((plain(getattr(x, n)) - truth).norm() for x in (ours, theirs))
            report[f"excess_{n}"] = float(a / b) if b > 0 else 1.0
        if ours.dv_mean is not None:
            report["dv_mean"] = relative(ours.dv_mean, theirs.dv_mean)
        print(json.dumps({"schedule": name, "steps": run.steps, **report}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["eager"])
