"""The backward's pre-pass where the main kernel takes FP16 scores, against what it says of itself, in FP64.

    python -m tests.sm90.prepass '{"lengths": [100, 31], "queries": 70}' ...

runs it in the emulator, with the race checker on, in a process of its own (the emulated architecture is fixed at import), and prints a line
a problem. Keys are those of
``tests.gpu.problems.Case``, and ``align``, ``dlse`` (true: the LSE has a gradient), ``q_scale`` (factor on q).
"""

import dataclasses
import json
import math
import sys
from unittest import mock

import torch
from torch import Tensor

from lp_fa4 import reference
from lp_fa4.config import LOG2_E
from lp_fa4.problem import AttentionProblem, ForwardResult
from tests.gpu import problems


def gradients_of_out(p: AttentionProblem, seed: int = 5) -> Tensor:
    """dO, BF16: rows of very different size, one constant, one zero."""
    g = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-6, 3, (p.rows, 1, 1), generator=g).float())
    dout = torch.randn(p.rows, p.heads, p.head_dim, generator=g) * size
    dout[3], dout[5] = 0.375, 0.0
    return dout.bfloat16().to(p.device)


def to_eleven_bits(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 2**11), exponent - 11)


def plain_codes(images: Tensor, dim: int) -> Tensor:
    """Values of the codes of tile images ``[n, 2 * 64 * dim]``, FP64 ``[64 n, dim]``."""
    rows, chunks = torch.arange(64)[:, None], torch.arange(dim // 16)[None]
    places = chunks ^ (rows % 8 if dim == 128 else rows // 2 % 4)
    codes = images[:, : 64 * dim].reshape(-1, 64, dim // 16, 16).gather(2, places[None, :, :, None].expand(images.shape[0], -1, -1, 16))
    return codes.reshape(-1, dim).view(torch.float8_e4m3fn).double()


def packed_rows(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packed a, b, c of tiles' statistics, FP64 ``[64 n]``, and where the layout says they are."""
    from lp_fa4.sm90.backward_layout import STAT_AC2, STAT_B2

    halves = stats.contiguous().view(torch.float16)
    n = torch.arange(64)
    j, t, half = n // 8, n // 2 % 4, n % 2
    ac = STAT_AC2 + 16 * (j // 2) + 4 * t + j % 2
    places = (ac, STAT_B2 + 16 * (j // 4) + 4 * t + j % 4, ac + 2)
    a, b, c = (halves[:, 2 * words + half].double().flatten() for words in places)
    return a, b, c


def check(p: AttentionProblem, result: ForwardResult, dout: Tensor, spaces: list[Tensor], dlse: Tensor | None = None) -> None:
    """Assert what ``backward_prepass_halves`` promises of every row. All on a CPU."""
    from lp_fa4.sm90.backward_layout import STAT_A, STAT_B, STAT_C, STAT_DV, STAT_S0, STAT_VT
    from lp_fa4.sm90.backward_prepass_halves import KEPT

    images, _, stats, _, _, suffix = spaces[:6]
    queries, dim = p.queries, p.head_dim
    offsets_k = p.offsets_k.tolist() if p.offsets_k is not None else [0, p.tokens]
    scale = float(torch.tensor(p.softmax_scale, dtype=torch.float32) * torch.tensor(LOG2_E, dtype=torch.float32))
    ratio = to_eleven_bits(scale) / scale
    offsets_q = p.offsets_q.tolist() if queries is None else [b * queries for b in range(p.batch + 1)]
    for b in range(p.batch):
        keys, rows = offsets_k[b + 1] - offsets_k[b], slice(offsets_q[b], offsets_q[b + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        tiles = -(-count // 64)
        first = b * tiles if queries is not None else offsets_q[b] // 64 + b
        for h in range(p.heads):
            own = stats[first : first + tiles, h]
            codes = plain_codes(images[first : first + tiles, h], dim)
            a, beta, c = packed_rows(own)
            wide = [own[:, at : at + 64].double().flatten() for at in (STAT_A, STAT_B, STAT_C)]
            # rows that do not exist, or see no key
            for x in (codes[count:], c[count:], beta[count:]):
                assert not bool(x.any())
            assert bool(torch.isneginf(a[count:]).all())
            if keys == 0:
                assert bool(torch.isneginf(a).all()) and not bool(codes.any())
                continue
            a, beta, c, codes = a[:count], beta[:count], c[:count], codes[:count]
            wide = [x[:count] for x in wide]
            do, m, sums_of_p = dout[rows, h].double(), result.row_max[h, rows].double() * ratio, result.row_sum[h, rows].double()
            if p.config.align_do:
                mantissa, _ = torch.frexp(do.abs().amax(-1) / (KEPT * sums_of_p))
                m_wanted = m - torch.log2(torch.where(mantissa > 0.5, mantissa, 1.0))
            else:
                m_wanted = m
            unit_of_dv = torch.log2(own[:, STAT_DV].double()).repeat_interleave(64)[:count]  # e_ref - s, of a row's chunk
            # a is exact, and belongs to an m within half a step of the grid
            assert torch.equal(a, wide[0])
            shift = torch.round(a + m_wanted)  # s + e - e_ref
            m_used = shift - a
            step = torch.exp2(torch.ceil(torch.log2(m_wanted.abs() + 8.0)) - 11)
            assert bool(((m_used - m_wanted).abs() <= 0.5001 * step + 1e-5).all())
            e = shift + unit_of_dv
            total = KEPT * sums_of_p * torch.exp2(m - m_used)
            # codes: of dO / l under an exponent that leaves a row's sum at 128 at most, and not half of it
            wanted = do / total[:, None] * torch.exp2(-e)[:, None]
            sums, some = wanted.abs().sum(-1), do.abs().amax(-1) > 0
            assert bool((sums <= 128.001).all()) and bool((sums[some] > 63.9).all())
            assert bool((codes.abs().sum(-1) <= 137).all())
            assert bool(((codes - wanted).abs() <= torch.clamp(wanted.abs() * 2.0**-4, min=2.0**-10) * 1.001).all())
            if p.config.align_do and rows.start == 0:
                assert len(codes[3].unique()) == 1 and float(torch.log2(codes[3, 0])) % 1 == 0, "equal magnitudes are a power of two"
            # b: of the codes, in units of V's, and of the LSE's gradient
            delta = (codes * result.centred_out[rows, h].double()).sum(-1)
            if dlse is not None:
                delta = delta - dlse[h, rows].double() / total * torch.exp2(-e)
            assert float((wide[1] + delta).abs().max()) <= 1e-5 * float(delta.abs().max())
            unit = float(own[0, STAT_VT])
            assert bool(((beta - wide[1] / unit).abs() <= (wide[1] / unit).abs() * 2.0**-11 + 2.0**-24).all())
            # c, one rounding, and the sums that give it back
            seen = torch.full((count,), float(keys), dtype=torch.float64)
            if p.causal:
                seen = (torch.arange(count) + 1.0 + keys - count).clamp(min=1, max=keys).double()
            c_wanted = total / seen * torch.exp2(shift)
            assert bool(((wide[2] - c_wanted).abs() <= 2.0**-10.99 * c_wanted).all())
            assert bool(((c - wide[2]).abs() <= 2.0**-24).all())
            if not p.centred_backward and not p.causal:  # suffix sums: of this and all later tiles
                weight = wide[2] * torch.exp2(e - shift)
                coherent = (weight[:, None] * codes).new_zeros(tiles, dim)
                for tile in range(tiles):
                    coherent[tile] = (weight[64 * tile :, None] * codes[64 * tile :]).sum(0)
                assert problems.relative(suffix[first : first + tiles, h], coherent) < 1e-4
            assert bool((own[:, STAT_S0].half().float() == own[:, STAT_S0]).all()), "the scale of the scores has FP16's precision"


def emulated(text: str) -> None:
    """One problem in the emulator; prints the ``need`` of its chunks."""
    from tests.emulator import api

    fields = json.loads(text)
    problems.DEVICE = torch.device("cpu")
    align, with_dlse, q_scale = fields.pop("align", False), fields.pop("dlse", False), fields.pop("q_scale", 1.0)
    case = problems.Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    p = case.make(edit=lambda q, k, v, offsets: q.mul_(q_scale))
    p = dataclasses.replace(p, config=p.config.with_(align_do=align))
    result, dout = reference.forward(p), gradients_of_out(p)
    dlse = torch.randn(p.heads, p.rows, generator=torch.Generator().manual_seed(6)) if with_dlse else None

    def call():
        from lp_fa4.sm90 import backward_host as module

        with mock.patch.object(module, "arch_of", lambda device: "sm_90a"):
            return module.prepare_backward(p, result, dout, dlse=dlse)

    spaces, _ = api.call_under(call, "sm_90a", api.Schedule("pct", 1), check=True)
    if q_scale == 1.0:
        check(p, result, dout, spaces, dlse)
    print(json.dumps({"need": spaces[-1].flatten().tolist()}))


if __name__ == "__main__":
    for problem in sys.argv[1:]:
        emulated(problem)
