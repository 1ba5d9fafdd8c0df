"""Run the backward's kernels in the emulator on one small problem and compare with the reference.

    python -m tests.sm90.backward_emulated '{"lengths": [100, 31], "queries": 70}' [SCHEDULE:SEED ...]

One problem, or a list of them that share compiled kernels. Keys are those of ``tests.gpu.problems.Case``, and ``grads`` ("bf16", "mxfp8"),
``dq_dtype`` ("float32", "float16"), ``deterministic``,
``growth`` (dO times growth every 40 rows), ``size`` (of dO), ``cluster`` (true: two CTAs share query tiles whatever the lengths),
``whole`` (true: dV with its mean part, BF16 dQ), ``align`` (of dO's rows), ``fall`` (q times two to this from row 128 on), ``chunk`` (query
tiles that are summed inside the tensor core, instead of 32: long loops on few queries), ``sink`` (true: all queries are one and dO is one
column of ones, nearly, so that FP16 sums of dV overflow), ``sizes`` (of each sequence's dO), ``dq_group`` (sequences that share a buffer of
FP16 dQ), ``most`` (queries that a sequence is said to have at most), ``extreme`` (true: dQ as large as its bound allows, to a factor of 2),
``probe`` (true: dK and dV keep their bits with a buffer of dQ a sequence, and with NaN and 10^4 in the last sequence's dO).
Prints one JSON line a schedule: relative differences to the reference, and ``excess_*``, the error against exact gradients over that of the
reference. Lanes that did not meet (``tests.sanitizer.lanes``) end it with an error. A process of its own: the emulated architecture is
fixed at import.
"""

import dataclasses
import importlib
import json
import sys
from unittest import mock

import torch

from lp_fa4 import reference
from tests.emulator import api
from tests.gpu import problems
from tests.sanitizer.cases import listing
from tests.sanitizer.lanes import unexplained, watching
from tests.sm90.agreement import compare

MULTIPROCESSORS = 4


def set_chunk(tiles: int) -> None:
    """Chunks of ``tiles`` query tiles in every kernel and in the host's sizes."""
    for name in ("layout", "load", "store", "prepass", "postpass", "host"):
        module = importlib.import_module(f"lp_fa4.sm90.backward_{name}")
        for field, value in (("CHUNK_TILES", tiles), ("CHUNK", tiles * 64)):
            if hasattr(module, field):
                setattr(module, field, value)
    importlib.import_module("lp_fa4.sm90.backward_postpass").Postpass.chunk = tiles * 64


def main(text: str, schedules: list[str]) -> None:
    problem_or_more = json.loads(text)
    for fields in problem_or_more if isinstance(problem_or_more, list) else [problem_or_more]:
        execute(fields, schedules)


def execute(fields: dict, schedules: list[str]) -> None:
    grads, deterministic, growth = fields.pop("grads", "bf16"), fields.pop("deterministic", False), fields.pop("growth", 1.0)
    of_all = fields.pop("size", 1.0)
    cluster_keys = 0 if fields.pop("cluster", False) else None
    chunk = fields.pop("chunk", None)
    dq_dtype = getattr(torch, fields.pop("dq_dtype", "float32"))
    problems.DEVICE = torch.device("cpu")
    whole, fall, align = fields.pop("whole", False), fields.pop("fall", 0), fields.pop("align", False)
    sink = fields.pop("sink", False)
    sizes, dq_group, probe = fields.pop("sizes", None), fields.pop("dq_group", None), fields.pop("probe", False)
    extreme, most = fields.pop("extreme", False), fields.pop("most", None)

    def edit(q, k, v, offsets):
        q[128:].mul_(2.0**fall)
        if sink:
            q[:] = q[:1].clone()
        if (
            extreme
        ):  # near equal probabilities; every code of k and v is 448, of one sign in a key; every product of dO and v meets its bound
            q.mul_(0.3)
            for x in (k, v):
                x[:] = 0.875
                x[::2] *= -1.0

    case = problems.Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    p = case.make(edit=edit)
    p = dataclasses.replace(p, queries_most=most, config=p.config.with_(grad_format=grads, dq_dtype=dq_dtype, align_do=align))
    result = reference.forward(p)
    size = of_all * growth ** (torch.arange(p.rows) // 40).float()
    dout = (torch.randn(p.rows, p.heads, p.head_dim, generator=torch.Generator().manual_seed(5)) * size[:, None, None]).bfloat16()
    if sink:
        dout = 0.01 * dout
        dout[..., 5] = 1.0
    if extreme:
        dout = torch.ones_like(dout)
    if sizes is not None:
        dout = dout * torch.tensor(sizes).repeat_interleave(p.rows // len(sizes))[:, None, None].bfloat16()
    theirs = reference.backward(p, result, dout)
    if whole:
        mean = theirs.dv_mean[problems.row_sequences(p.offsets_k, p.tokens)]
        theirs = theirs._replace(dv=theirs.dv.float() + mean, dv_mean=None)

    def call(dout=dout, dq_group=dq_group):
        from lp_fa4.sm90 import backward_host as module
        from lp_fa4.sm90 import recode

        if chunk is not None:
            set_chunk(chunk)
        with (
            mock.patch.object(module, "DQ_GROUP", dq_group or module.DQ_GROUP),
            mock.patch.object(module, "arch_of", lambda device: "sm_90a"),
            mock.patch.object(recode, "arch_of", lambda device: "sm_90a"),
            mock.patch.object(module, "multiprocessors", lambda device: MULTIPROCESSORS),
            mock.patch.object(module, "CLUSTER_KEYS", cluster_keys),
        ):
            kinds = dict(whole=True, dq_dtype=torch.bfloat16) if whole else {}
            return module.backward(p, result, dout, deterministic=deterministic, **kinds)

    with listing(), watching() as lanes:
        for name in schedules:
            kind, _, seed = name.partition(":")
            ours, run = api.call_under(call, "sm_90a", api.Schedule(kind, int(seed or 0)), check=True)
            report = compare(p, dout, ours, theirs)
            print(json.dumps({"schedule": name, "steps": run.steps, **report}), flush=True)
            if probe:

                def again(*changed, schedule=api.Schedule(kind, int(seed or 0))):  # noqa: B008
                    return api.call_under(lambda: call(*changed), "sm_90a", schedule, check=True)[0]

                isolated(p, dout, ours, again)
    assert not unexplained(lanes), unexplained(lanes)


def isolated(p, dout, ours, again) -> None:
    """Others than the last sequence keep all bits of dK and dV, whatever its dO is, and however dQ is summed."""
    last, q = int(p.offsets_k[-2]), p.rows // p.batch
    loud, broken = dout.clone(), dout.clone()
    loud[-q:] *= 1e4
    broken[-q:, :, 0] = float("nan")
    for name, changed, group in (("a buffer a sequence", dout, 1), ("10^4", loud, None), ("NaN", broken, None)):
        other = again(changed, *(() if group is None else (group,)))
        for part in ("dk", "dv"):
            a, b = (x.codes if hasattr(x, "codes") else x for x in (getattr(ours, part), getattr(other, part)))
            assert torch.equal(a[:last].view(torch.uint8), b[:last].view(torch.uint8)), (name, part)
        a, b = ours.dq.float(), other.dq.float()
        print(name, "dq differs by", float((a - b).norm() / a.norm()), "not finite", int((~torch.isfinite(b)).sum()), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["eager"])
