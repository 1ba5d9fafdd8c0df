"""``mma.sync`` of the emulator against the layout in the PTX ISA, element by element."""

import pytest
import torch

from .test_engines_sm90 import run


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_every_element_in_its_lane(kind):
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    c = torch.randint(-99, 99, (16, 8), generator=generator).float()
    words = torch.zeros(10, 32, dtype=torch.int32)
    out = torch.full((4, 32), -1.0)
    for lane in range(32):
        row, pair = lane // 4, 2 * (lane % 4)
        halves = [a[r, k : k + 2] for k, r in ((pair, row), (pair, row + 8), (pair + 8, row), (pair + 8, row + 8))]
        halves += [b[k : k + 2, row] for k in (pair, pair + 8)]
        words[:6, lane] = torch.stack(halves).contiguous().view(torch.int32)[:, 0]
        words[6:, lane] = torch.stack([c[r, pair + e] for r in (row, row + 8) for e in (0, 1)]).view(torch.int32)
    body = "and.b32 %r10, %r0, 31;\nmul.wide.u32 %rd40, %r10, 4;\nadd.s64 %rd41, %rd0, %rd40;\nadd.s64 %rd42, %rd1, %rd40;\n"
    body += "".join(f"ld.global.b32 %d{i}, [%rd41+{128 * i}];\n" for i in range(10))
    body += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%d10, %d11, %d12, %d13}}, "
    body += "{%d0, %d1, %d2, %d3}, {%d4, %d5}, {%d6, %d7, %d8, %d9};\n"
    body += "".join(f"st.global.b32 [%rd42+{128 * i}], %d{10 + i};\n" for i in range(4))
    run(body, words, out, registers=".reg .b32 %d<16>;")
    want = a.float() @ b.float() + c
    for lane in range(32):
        for i in range(4):
            assert out[i, lane] == want[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
