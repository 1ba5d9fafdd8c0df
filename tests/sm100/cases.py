"""Problems for the Blackwell forward, its run in the emulator, and what counts as right.

``case`` builds one for ``tests.emulator.worker``: everything it takes is JSON.

Scale pads are 0xFF (an E8M0 NaN) wherever no scale belongs, in every run: whoever reads one shows it. Rows differ in size by up to 2^6, so
that a wrong scale row is far outside every tolerance.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import torch

from lp_fa4 import reference
from lp_fa4.config import AttentionConfig
from lp_fa4.mx import MXTensor, quantize_mx
from lp_fa4.problem import AttentionProblem, ForwardResult
from lp_fa4.sm100 import forward_host as sm100
from lp_fa4.sm100.scale_atoms import reference_atoms, scale_atoms
from tests.emulator import api, machine
from tests.emulator.kernels import Case
from tests.emulator.ours import host

CONFIGS = {
    "default": AttentionConfig(save_out_dtype=torch.float32),
    "post": AttentionConfig.post(save_out_dtype=torch.float32),
    "bf16": AttentionConfig(),
}
NAN_CODE = 0x7F
"""E4M3's NaN."""


def offsets(lengths: list[int]) -> torch.Tensor:
    """int32 offsets of sequences of these lengths."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def problem(
    keys: list[int],
    *,
    queries: list[int] | None = None,
    shared: int = 0,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 128,
    causal: bool = False,
    mean: bool = False,
    sharpness: float = 1.0,
    blocks: Sequence[Sequence[int]] = ((32, 32), (32, 32), (32, 32)),
    exponents: Sequence[int | None] = (None, None, None),
    capacity: int = 0,
    zeros: bool = False,
    nan: bool = False,
    raw: bool = False,
    config: str = "default",
    changes: dict | None = None,
    seed: int = 0,
) -> AttentionProblem:
    """Random operands. ``queries``: rows per sequence (jagged), or ``shared`` rows for all. ``capacity``: rows of k and v past the last
    sequence. ``sharpness``: standard deviation of the scores, about. ``zeros``: V's first block is 0 and its third smaller by 2^20.
    ``nan``: the second sequence's first block of V (columns 32 to 63) is NaN, as quantization leaves it: byte 255, payload 0. ``raw``: as
    nobody's quantization leaves it: payload NaN under an ordinary scale. Payloads past the last sequence are NaN in every problem.
    ``config``: a key of ``CONFIGS``, with fields ``changes``."""
    cfg = CONFIGS[config].with_(**changes or {})
    generator = torch.Generator().manual_seed(seed)
    kv_heads = kv_heads or heads
    ok, batch = offsets(keys), len(keys)

    def operand(rows: int, h: int, block: Sequence[int], exponent: int | None, off: torch.Tensor | None) -> MXTensor:
        spread = torch.exp2(torch.randint(-3, 4, (rows, 1, 1), generator=generator).float())
        x = torch.randn(rows, h, dim, generator=generator) * (spread if exponent is None else 1.0)
        return quantize_mx(x, (block[0], block[1]), offsets=off, token_dim=0, exponent=exponent)

    oq = None if shared else offsets(queries)  # type: ignore[arg-type]
    q = operand(shared or int(oq[-1]), heads, blocks[0], exponents[0], oq)  # type: ignore[index]
    k = operand(sum(keys) + capacity, kv_heads, blocks[1], exponents[1], ok)
    v = operand(sum(keys) + capacity, kv_heads, blocks[2], exponents[2], ok)
    if zeros:
        v.codes[:32] = 0
        v.scale_bytes[0] = 0
        v.scale_bytes[2] -= 20
    if nan:
        first = int(ok[1])
        v.codes[first : first + 32, :, 32:64] = 0
        v.scale_bytes[first // 32 + 1, :, 1] = 255
    if raw:
        v.codes[int(ok[1]) : int(ok[1]) + 32, :, 32:64] = NAN_CODE
    k.codes[int(ok[-1]) :] = NAN_CODE
    v.codes[int(ok[-1]) :] = NAN_CODE
    sums = None
    if cfg.center_p and not causal:
        values = v.dequantize()
        sums = torch.stack([values[ok[b] : ok[b + 1]].sum(0) for b in range(batch)])
    typical = 12.0 if exponents[1] is None else 1.0  # mean square of the row factors
    return AttentionProblem(
        q,
        k,
        v,
        offsets_q=oq,
        offsets_k=ok,
        shared_q=bool(shared),
        softmax_scale=sharpness * dim**-0.5 / typical,
        causal=causal,
        v_sum=sums,
        v_mean=torch.randn(batch, kv_heads, dim, generator=generator) if mean else None,
        config=cfg,
    )


def host_work_list(offsets_k, offsets_q, *, rows, tokens, heads, queries, shared_q, query_tile):
    """The work list of ``lp_fa4.sm90.worklist``, made by the host: the same records, longest first."""
    ok, records = offsets_k.tolist(), []
    for b in range(len(ok) - 1):
        first = offsets_q[b].item() if offsets_q is not None else 0 if shared_q else b * queries
        many = offsets_q[b + 1].item() - first if offsets_q is not None else queries
        for tile in reversed(range(-(-many // query_tile))):
            records += [[b, h, tile * query_tile, first, many, ok[b], ok[b + 1] - ok[b], 0] for h in range(heads)]
    records.sort(key=lambda r: -r[6])
    capacity = heads * ((len(ok) - 1) * -(-queries // query_tile) if queries is not None else rows // query_tile + len(ok) - 1)
    table = torch.full((capacity, 8), -(2**30), dtype=torch.int32)  # unused records: far out of bounds
    table[: len(records)] = torch.tensor(records, dtype=torch.int32).reshape(-1, 8)
    return table, torch.tensor([len(records), 0], dtype=torch.int32)


def poisoned(make: Callable) -> Callable:
    """``make`` (``scale_atoms`` or, without a launch, ``reference_atoms``) with 0xFF wherever no scale of the operand belongs."""

    def wrapped(x: MXTensor, axis: int) -> torch.Tensor:
        ones = torch.ones_like(x.scale_bytes).view(torch.float8_e8m0fnu)
        real = reference_atoms(replace(x, scale=ones), axis) == 1
        return torch.where(real, make(x, axis), 0xFF)

    return wrapped


def run(
    p: AttentionProblem,
    *,
    processors: int = 2,
    drawn: bool = False,
    device: bool = False,
    arch: str = "sm_100a",
) -> ForwardResult:
    """Launch the kernel for ``p`` on ``processors`` CTAs at a time (call inside ``emulate``). ``drawn``: they draw their items.
    ``device``: the work list and the scale layouts come from their own kernels."""
    from lp_fa4.sm90 import worklist

    spec = sm100.forward_spec(p)
    make = worklist.work_list if device else host_work_list
    atoms = poisoned(sm100.scale_atoms if device else reference_atoms)
    with host(arch), mock.patch.object(sm100, "scale_atoms", atoms), mock.patch.object(machine, "MULTIPROCESSORS", processors):
        return sm100.run(p, arch, spec, partial(make, query_tile=256), processors, drawn)


def case(arch: str, problem_of: dict, run_of: dict | None = None) -> Case:
    """A case of ``problem(**problem_of)``, run with ``run(**run_of)``. Fresh memory is poison."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    p = problem(**problem_of)
    return Case(str(problem_of), arch, None, lambda: run(p, arch=arch, **(run_of or {})), Judge(p))


def atoms_case(arch: str, lengths: list[int], dim: int, block: list[int], exponent: int | None, jagged: bool) -> Case:
    """Scale layouts of both axes from their kernel, byte for byte the definition's."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    generator = torch.Generator().manual_seed(0)
    tokens, heads, start = sum(lengths), 3, offsets(lengths)
    size = torch.exp2(torch.randint(-20, 21, (tokens, heads, 1), generator=generator).float())
    x = torch.randn(tokens, heads, dim, generator=generator) * size
    off = start if jagged else None
    mx = quantize_mx(x, (block[0], block[1]), offsets=off, token_dim=0, exponent=exponent)

    def call():
        with host(arch):
            return [scale_atoms(mx, axis) for axis in (1, 0)]

    def verify(got):
        for axis, atoms in zip((1, 0), got, strict=True):
            want = reference_atoms(mx, axis)
            assert atoms.shape == want.shape
            assert torch.equal(atoms, want), f"axis {axis}: {(atoms != want).sum()} bytes differ"

    return Case("scale atoms", arch, None, call, verify)


def drawn(arch: str, problem_of: dict) -> dict[str, int]:
    """Run a problem with drawn items on two multiprocessors: its items, the records of its list, and the CTAs that were launched."""
    planned = case(arch, problem_of, {"drawn": True})
    with mock.patch(f"{__name__}.host_work_list", side_effect=host_work_list) as listed:
        value, result = api.call_under(planned.call, arch, api.Schedule("pct", 1))
    planned.verify(value)
    records, state = host_work_list(*listed.call_args.args, **listed.call_args.kwargs)
    return {"items": int(state[0]), "records": records.shape[0], "launched": result.machines[-1].started}


class Judge:
    """Right: per sequence and head, the error against FP64 is at most twice that of the reference, which rounds at the same points.

    The floor of 1e-5 of the output's norm is FP32 accumulation in another order. Row sums may differ by 2e-4 (exponentials on the FMA pipe:
    1.01e-4 each) and the LSE by as much; maxima by FP32 rounding of the scores. Everything about rows that see no key is exact.
    """

    def __init__(self, p: AttentionProblem):
        self.p = p
        self.reference = reference.forward(p)
        q, k, v = (x.dequantize(torch.float64) for x in (p.q, p.k, p.v))
        self.exact, self.lse = reference.exact_attention(
            q, k, v, offsets_k=p.offsets_k, offsets_q=p.offsets_q, shared_q=p.shared_q, softmax_scale=p.softmax_scale, causal=p.causal
        )

    def _row_groups(self) -> list[slice]:
        p = self.p
        bounds = p.offsets_q.tolist() if p.offsets_q is not None else [b * (p.queries or 0) for b in range(p.batch + 1)]
        return [slice(a, b) for a, b in pairwise(bounds) if b > a]

    def __call__(self, got: ForwardResult) -> None:
        want = self.reference
        blind = torch.isneginf(want.row_max)
        assert torch.equal(torch.isneginf(got.row_max), blind), "rows that see no key differ"
        assert torch.equal(torch.isneginf(got.lse), blind)
        assert (got.row_sum[blind] == 0).all() and (got.out.transpose(0, 1)[blind] == 0).all()
        assert (got.centred_out.transpose(0, 1)[blind] == 0).all()
        seen = ~blind
        torch.testing.assert_close(got.row_max[seen], want.row_max[seen], rtol=2e-6, atol=1e-5)
        torch.testing.assert_close(got.row_sum[seen], want.row_sum[seen], rtol=2e-4, atol=0)
        torch.testing.assert_close(got.lse[seen].double(), self.lse[seen], rtol=1e-6, atol=2e-4)
        for rows in self._row_groups():
            for h in range(self.p.heads):
                exact, ours, theirs = self.exact[rows, h], got.centred_out[rows, h].double(), want.centred_out[rows, h].double()
                finite = torch.isfinite(exact)
                assert torch.equal(torch.isfinite(ours), finite), f"rows {rows.start}..{rows.stop - 1}, head {h}: NaN leaks or hides"
                error = (ours - exact)[finite].norm()
                allowed = 2 * (theirs - exact)[finite].norm() + 1e-5 * exact[finite].norm()
                assert error <= allowed, f"rows {rows.start}..{rows.stop - 1}, head {h}: error {error:.3e}, allowed {allowed:.3e}"
        # the output is the centred output plus a mean, rounded once
        mean = want.out.float() - want.centred_out
        torch.testing.assert_close(got.out.float(), got.centred_out.float() + mean, rtol=2**-7, atol=2**-7, equal_nan=True)
