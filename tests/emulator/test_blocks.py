"""Equal instructions side by side do what they do one by one: random runs, whose registers repeat so that every hazard occurs."""

import random

import pytest
import torch

from .ptx import parse
from .simt import STRAIGHT, Compiled, grouped
from .test_core import launch
from .test_engines_sm90 import run

WORDS, HALVES = [f"%r{n}" for n in range(20, 44)], [f"%rd{n}" for n in range(40, 48)]
FORMS = (
    "add.u32 {a}, {b}, {c};", "xor.b32 {a}, {b}, {c};", "shl.b32 {a}, {b}, 3;", "mul.lo.u32 {a}, {b}, 2654435761;", "not.b32 {a}, {b};",
    "mul.rn.f32 {a}, {b}, {c};", "max.f32 {a}, {b}, {c};", "fma.rn.f32 {a}, {b}, {c}, {d};", "min.s32 {a}, {b}, {c};", "mov.b32 {a}, {b};",
    "mov.b64 {x}, {{{b}, {c}}};", "mov.b64 {{{a}, {e}}}, {y};", "add.rn.f32x2 {x}, {y}, {z};", "cvt.u64.u32 {x}, {b};",
    "and.b64 {x}, {y}, {z};",
    "setp.lt.s32 %p1, {b}, {c};\nselp.b32 {a}, {c}, {d}, %p1;", "cvt.rn.satfinite.e4m3x2.f32 %h0, {b}, {c};\nmov.b32 {a}, {{%h0, %h1}};",
    "ld.global.b32 {a}, [%rd30+{n}];", "st.global.b32 [%rd30+{n}], {b};", "mov.u32 {a}, %laneid;",
)  # fmt: skip


def body(seed, length=160):
    """Each thread fills its registers from its own 64 words, runs at random, and leaves them there."""
    rng = random.Random(seed)
    lines = ["mov.u32 %r19, %tid.x;", "mul.wide.u32 %rd29, %r19, 256;", "add.s64 %rd30, %rd0, %rd29;", "mov.b32 %r18, 0;"]
    lines += ["mov.b32 {%h0, %h1}, %r18;", "setp.ne.b32 %p1, %r18, 0;"]
    lines += [f"ld.global.b32 {r}, [%rd30+{4 * n}];" for n, r in enumerate(WORDS)]
    lines += [f"cvt.u64.u32 {x}, {WORDS[n]};" for n, x in enumerate(HALVES)]
    while len(lines) < length:  # unrolled: the same form several times, on registers in order, strided, or drawn
        form, many = rng.choice(FORMS), rng.choice((1, 4, 8))
        start, stride = rng.randrange(24), rng.choice((1, 2, 3, 0))
        for n in range(many):
            place = {k: WORDS[(start + stride * n) % 24] if stride and k == "a" else rng.choice(WORDS) for k in "abcd"}
            place["e"] = rng.choice([r for r in WORDS if r != place["a"]])
            lines.append(form.format(**place, **{k: rng.choice(HALVES) for k in "xyz"}, n=4 * rng.randrange(64)))
    lines += [f"cvt.u32.u64 %r19, {x};\nxor.b32 {WORDS[n]}, {WORDS[n]}, %r19;" for n, x in enumerate(HALVES)]
    return "\n".join(lines + [f"st.global.b32 [%rd30+{4 * n}], {r};" for n, r in enumerate(WORDS)])


@pytest.mark.parametrize("seed", range(12))
def test_side_by_side_is_one_by_one(seed):
    """A whole warp runs groups; a warp of which a thread is missing runs one instruction after another."""
    data = torch.randint(-(2**31), 2**31, (32, 64), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    whole, part = data.clone(), data.clone()
    text = body(seed)
    run(text, whole, block=32)
    run(text, part, block=31)
    assert not torch.equal(whole, data)
    assert torch.equal(whole[:31], part[:31]) and torch.equal(part[31], data[31])
    compiled = Compiled(parse(launch(text, whole, block=32).ptx, launch(text, whole, block=32).name))
    groups = [g for u in compiled.units if u.kind == STRAIGHT for g in grouped(u.instrs)]
    assert sorted(I.index for g in groups for I in g) == sorted(I.index for u in compiled.units if u.kind == STRAIGHT for I in u.instrs)
    assert max(map(len, groups)) > 2, "nothing was grouped"
