"""Named cases of bytes and compilations, as functions of a place: a GPU (``tests/gpu/test_robust.py``) or the emulator
(``tests.properties.emulated``)."""

import torch
from torch import Tensor

from fused_ops import gemm_quantize, rmsnorm_quantize
from lp_fa4 import quantize_mx
from lp_fa4.compile import compile_count
from lp_fa4.mx import MXTensor
from tests.mx.test_bytes import BYTE_TABLE
from tests.properties.subjects import Choices, Place, Sample, subjects_at


def product(place: Place, x: Tensor | MXTensor, w: Tensor | MXTensor, block: tuple[int, int] = (32, 32)) -> MXTensor:
    """The kernel's product."""
    with place.around():
        return gemm_quantize(x, w, block, backend=place.backend)


def golden_bytes(place: Place) -> None:
    """The table of amax, byte and payload, each row in a block of its own, from a product's epilogue.

    Rows are sums of BF16 numbers times 1: 448.5 and 511.9 are FP32 sums that no BF16 number holds. Tensor cores may flush what lies near
    the end of FP32's exponents.
    """
    rows = [(s * a, byte, s * payload) for a, byte, payload, _ in BYTE_TABLE for s in (1, -1) if a == 0 or 1e-30 < abs(a) < 1e30]
    rest = torch.zeros(32 * len(rows), 64)
    for i, (amax, _, _) in enumerate(rows):
        rest[32 * i + 17, 5] = amax
    parts = []
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    x, weight = torch.cat(parts, 1).to(place.device), torch.eye(64).bfloat16().repeat(1, 3).to(place.device)
    got = product(place, x, weight)
    for i, (amax, byte, payload) in enumerate(rows):
        assert int(got.scale_bytes[i, 0]) == byte, (amax, byte, int(got.scale_bytes[i, 0]))
        assert float(got.codes[32 * i + 17, 5].view(torch.float8_e4m3fn)) == payload, amax
        assert int(got.codes[32 * i : 32 * i + 32].view(torch.float8_e4m3fn).float().count_nonzero()) == (payload != 0), amax
        assert int(got.scale_bytes[i, 1]) == 0, "a zero block's byte is 0"


def scale_bytes(place: Place) -> None:
    """Byte b stands for 2^(b - 127), 255 for NaN: rows of one 1.0 under every byte, times 1. Products under 2^-100 may be flushed."""
    rows = torch.arange(32 * 256)
    codes = torch.zeros(32 * 256, 64, dtype=torch.uint8)
    codes[rows, rows % 32] = 0x38
    codes[255 * 32 :] = 0  # as quantization leaves a NaN block
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 2).contiguous()
    x = MXTensor.from_bytes(codes.to(place.device), scale.to(place.device), (32, 32))
    got = product(place, x, quantize_mx(torch.eye(64).to(place.device)))
    for b in range(28, 256):
        values = got.codes[32 * b : 32 * b + 32, :32].view(torch.float8_e4m3fn).float()
        if b == 255:
            assert int(got.scale_bytes[b, 0]) == 255 and not values.any()
        else:  # 2^(b - 127) = 256 * 2^(b - 127 - 8)
            assert int(got.scale_bytes[b, 0]) == b - 8, b
            assert torch.equal(values, 256.0 * torch.eye(32, device=values.device)), b


def tiny_and_huge_rows(place: Place) -> None:
    """A norm's output at every end of FP32: bytes of the definition, given the kernel's ``rstd``; zero blocks among others, -0.0 too."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(70, 64, generator=g)
    x[32:64, 32:] = -0.0
    for exponent in (-148, -140, -130, -127, -126, -125, -118, -60, 0, 60, 110, 120):
        weight = torch.ldexp(torch.rand(64, generator=g) + 0.5, torch.tensor(exponent))
        given = x.to(place.device), weight.to(place.device)
        with place.around():
            got, rstd = rmsnorm_quantize(*given, backend=place.backend)
        want = quantize_mx(given[0] * rstd[:, None] * given[1])
        for name, a, b in (("codes", got.codes, want.codes), ("scale", got.scale_bytes, want.scale_bytes)):
            assert torch.equal(a, b), f"2^{exponent}: {int((a != b).sum())} of {name} differ"


def compilations(place: Place) -> None:
    """Batches of other sizes compile nothing: not for lengths, samples, capacity or queries of a kind."""
    how = Choices(dtype=torch.bfloat16)
    for name, subject in subjects_at(place).items():
        if "PMA" in name and place.device == "cpu":
            continue  # the same kernels
        counts = []
        for i, lengths in enumerate(([33, 5], [0, 1, 0], [70], [2, 31, 32, 1], [64, 64])):
            subject([Sample(n, 2, 5 + 3 * i) for n in lengths], i, how)
            counts.append(compile_count())
        assert counts[1] == counts[-1], f"{name}: {counts}"


CASES = {f.__name__: f for f in (golden_bytes, scale_bytes, tiny_and_huge_rows, compilations)}
