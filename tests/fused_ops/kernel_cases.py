"""Cases of the fused kernels for ``tests.emulator.worker`` (JSON arguments only), and what counts as right, on a GPU too.

Right, for the norm: ``rstd``, mean and total differ from the reference's by the order of FP32 sums, so they are compared with a
tolerance. Given the kernel's own ``rstd`` and mean, everything else is compared bit by bit with the definition; against the reference as
it is, codes may differ where a last bit of ``rstd`` moves an element across a rounding boundary, and their number is bounded.
"""

import torch
from torch import Tensor

from fused_ops.gemm_quantize import reference as product
from fused_ops.gemm_quantize.interface import projection_exponent
from fused_ops.operands import flatten, split_e4m3, to_float
from fused_ops.rmsnorm_quantize import reference
from fused_ops.rmsnorm_quantize.interface import norm_exponent
from fused_ops.rmsnorm_quantize.kernel import KernelOutput, rmsnorm_quantize
from fused_ops.scale_layout import reference as layout
from fused_ops.scale_layout.interface import sf_shape
from fused_ops.scale_layout.kernel import gather_scales, scatter_scales
from lp_fa4.mx import MXTensor, cast_e4m3, expand_scale, inverse_scale, quantize_mx
from tests.conftest import offsets_of
from tests.emulator.kernels import Case, close
from tests.emulator.ours import host
from tests.fused_ops.sum_error import half_sum_error, sum_error

EPS = 1e-6
RSTD_TOLERANCE = 4e-7
"""Relative, against FP64: a sum of n squares, n <= 8192, in trees of depth under 60, whose error the root halves; two more roundings."""
CODES_APART = 2e-3
"""Share of codes that may differ from the reference's: a relative change of 2e-7 moves 2e-7 * 2^4 of E4M3's elements, and a block whose
maximum sits at a power of two may change its byte, 1024 codes at once."""


def poison() -> None:
    """Fresh memory is poison, in a process of its own."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def values(tokens: int, columns: int, dtype: torch.dtype, used: int, seed: int, device: str = "cpu") -> Tensor:
    """Rows of sizes 2^±20 around a common mean, a zero row, a denormal row, NaN past ``used``."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size = torch.randint(-20, 21, (tokens, 1), generator=generator, device=device).float()
    if dtype == torch.float16:
        size = size / 2
    x = (torch.randn(tokens, columns, generator=generator, device=device) + 0.5) * torch.exp2(size)
    x[5:6] = 0.0
    x[7:8] *= 1e-6
    x[used:] = torch.nan
    return x.to(dtype)


def check_norm(x: Tensor, weight: Tensor, offsets, block, exponent, center: bool, keep: bool, got: KernelOutput) -> None:
    """See the module's docstring."""
    want = reference.rmsnorm_quantize(x, weight, EPS, offsets, block, exponent, center, keep)
    valid = torch.ones(x.shape[0], 1, dtype=torch.bool, device=x.device) if offsets is None else reference.inside(offsets, x.shape[0])
    xf = torch.where(valid, x.float(), 0.0) if x.dim() == 2 else x.float()
    exact = (xf.double().square().mean(dim=-1) + EPS).rsqrt()
    exact = torch.where(valid[:, 0], exact, 0.0) if x.dim() == 2 else exact
    torch.testing.assert_close(got.rstd.double(), exact, rtol=RSTD_TOLERANCE, atol=0, equal_nan=True)
    xf = xf * got.rstd[..., None] * weight.float()
    if center:
        bounds = torch.tensor([0, x.shape[0]], device=x.device) if offsets is None else offsets
        xf = xf - reference.per_token(got.mean, bounds, x.shape[0])
        scale = weight.float().abs().max() * x.shape[-1] ** 0.5
        torch.testing.assert_close(got.mean, want.mean, rtol=0, atol=float(1e-6 * scale), equal_nan=True)
        exact = reference.segment_sum(xf.double(), bounds) if bounds.shape[0] > 1 else xf.new_zeros(got.total.shape).double()
        slack = reference.segment_sum(xf.abs(), bounds) if bounds.shape[0] > 1 else exact
        error = (got.total.double() - exact).abs()
        assert bool(((error <= 1e-6 * slack + 1e-30) | (error.isnan() & exact.isnan())).all()), f"total: {error.nan_to_num().max()}"
    mx = quantize_mx(xf, block, offsets, token_dim=0 if offsets is not None else -2, exponent=exponent)
    for name, mine, theirs in (("codes", got.codes, mx.codes), ("scales", got.scales, mx.scale_bytes)):
        wrong = (mine != theirs).nonzero()
        assert mine.shape == theirs.shape and len(wrong) == 0, f"{name}: {len(wrong)} differ, first at {wrong[:1].tolist()}"
    apart = float((got.codes != want.xn.codes).float().mean()) if got.codes.numel() else 0.0
    assert apart <= CODES_APART or center, f"{apart:.3g} of the codes are not the reference's"
    if keep:
        assert torch.equal(got.normed.view(torch.int16), xf.to(torch.bfloat16).view(torch.int16)) or torch.equal(
            got.normed.nan_to_num(), xf.to(torch.bfloat16).nan_to_num()
        ), "normed"
    if got.copy is not None:
        assert torch.equal(got.copy, reference.transposed(mx.codes, offsets, got.copy.shape[0])), "copy with tokens innermost"
    for axis in (0, 1):
        if got.atoms[axis] is not None:
            atoms = layout.scatter_scales(mx.scale_bytes, block, *x.shape, offsets, axis)
            assert torch.equal(got.atoms[axis], atoms), f"atoms of axis {axis}"


SUM_ERROR = 2.0**-20
"""Of sums of BF16 products, relative to the sum of magnitudes: an FP32 sum of at most 64 instructions, each of which rounds a running sum
that is no more than that."""


def check_product(x, w, block, offsets, exponent, codes: Tensor, scales: Tensor, *, exact: bool = False, bound=None) -> float:
    """Codes and scales of ``x @ w^T`` against FP64: every byte is that of a sum within the kernel's error, every code that of such a sum
    under the kernel's own byte. ``exact``: the sums have no error, so all bytes are the definition's. ``bound``: of the error of elements
    ``[S, 2]`` of the product, where it is not that of ``gemm_quantize``. Returns the share of codes that are not the definition's.

    The error of FP8 sums (``tests.fused_ops.sum_error``) differs from element to element, so it is computed for those elements alone whose
    bytes are not those of the exact sums."""
    want = product.gemm_quantize(x, w, block, offsets, exponent)
    for name, mine, theirs in (("codes", codes, want.codes), ("scales", scales, want.scale_bytes)):
        assert mine.shape == theirs.shape, f"{name}: {list(mine.shape)}, the definition's are {list(theirs.shape)}"
        wrong = (mine != theirs).nonzero() if exact else []
        assert len(wrong) == 0, f"{name}: {len(wrong)} differ, first at {wrong[:1].tolist()}"
    left, right = to_float(x).double(), to_float(w).double()
    if offsets is not None:
        rows = torch.arange(left.shape[0], device=left.device)
        left = torch.where((rows < offsets[-1])[:, None], left, 0.0)
    sums = left @ right.t()

    def error_of(other: Tensor) -> Tensor:
        """Largest error of the elements ``other``, 0 elsewhere."""
        if isinstance(x, Tensor) and bound is None:
            return torch.where(other, left.abs() @ right.abs().t() * SUM_ERROR, 0.0)
        out = torch.zeros_like(sums)
        at = other.nonzero()
        out[at[:, 0], at[:, 1]] = sum_error(x, w, offsets, at) if bound is None else bound(at)
        return out

    if block[0]:
        exact_bytes = quantize_mx(sums, block, offsets, token_dim=0).scale_bytes
        error = error_of(expand_scale((scales != exact_bytes).float(), sums.shape, block, offsets, 0).expand(sums.shape) > 0)
        low, high = (
            quantize_mx((sums.abs() + sign * error).clamp(min=0), block, offsets, token_dim=0).scale_bytes.int() for sign in (-1, 1)
        )
        fine = (scales.int() >= low) & (scales.int() <= high)
        assert bool(fine.all()), f"scales: {(~fine).sum()} wrong, first at {(~fine).nonzero()[:1].tolist()}"
    inverse = expand_scale(inverse_scale(scales), sums.shape, block, offsets, 0).double()
    got = codes.view(torch.float8_e4m3fn).float()

    def code_of(values: Tensor) -> Tensor:
        return cast_e4m3((values * inverse).clamp(-1e6, 1e6).float()).float()

    error = error_of((got != code_of(sums)) & torch.isfinite(sums))
    bad = inverse == 0 if block[0] else ~torch.isfinite(sums)
    fine = torch.where(bad, codes == (0 if block[0] else 0x7F), (got >= code_of(sums - error)) & (got <= code_of(sums + error)))
    if offsets is not None:
        fine = torch.where((rows < offsets[-1])[:, None], fine, codes == 0)
    wrong = (~fine).nonzero()
    assert len(wrong) == 0, f"codes: {len(wrong)} of {codes.numel()} wrong, first at {wrong[:1].tolist()}"
    return float((codes != want.codes).float().mean()) if codes.numel() else 0.0


def operands(
    tokens: int, used: int, contracted: int, columns: int, form: str, x_block, w_block, offsets, seed: int, exact: bool, device: str = "cpu"
):
    """x and w in the form asked for, with "bounded" behind it the weight in bounded rows: rows of sizes 2^±20 (MXFP8), NaN past ``used``;
    ``exact``: few entries of -1, 0, 1."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(tokens, contracted, generator=generator, device=device)
    w = torch.randn(columns, contracted, generator=generator, device=device)
    if exact:
        x, w = x.round().clamp(-1, 1), w.round().clamp(-1, 1)
    size = torch.randint(-20, 21, (tokens, 1), generator=generator, device=device).float()
    spread = torch.exp2(torch.randint(-3, 4, (columns, 1), generator=generator, device=device).float())
    x, w = x * torch.exp2(size), w * spread
    x[used:] = torch.nan
    if form == "bf16":
        return x.to(torch.bfloat16), w.to(torch.bfloat16)
    static = torch.full((contracted // x_block[1],), 8, dtype=torch.int32, device=device) if x_block[0] == 0 else None
    if static is not None:
        static[: static.shape[0] // 2] = 11
    left = quantize_mx(x, x_block, offsets, token_dim=0, exponent=static)
    parts = split_e4m3(w, w_block, bounded=form.endswith("bounded"))
    if seed % 2:  # scales of its own for what hi leaves
        parts = (parts[0], quantize_mx(w - parts[0].dequantize(), w_block))
    return left, parts if form.startswith("e4m3x2") else parts[0]


def gemm(
    arch: str,
    lengths: list[int] | None,
    contracted: int,
    columns: int,
    *,
    form: str = "e4m3x2",
    x_block: tuple[int, int] = (32, 32),
    w_block: tuple[int, int] = (32, 32),
    block: tuple[int, int] = (32, 32),
    tokens: int = 0,
    capacity: int = 0,
    bad: list[int] | None = None,
    exact: bool = False,
    int64: bool = False,
    axes: tuple[int, ...] = (),
    given: int = 6,
    given_bytes: bool = False,
    seed: int = 0,
) -> Case:
    """``lengths`` None: dense, ``tokens`` rows. ``bad``: rows of x that hold a NaN. ``given``: exponent of a static result,
    ``given_bytes``: as scale bytes. Odd ``seed``: the low part of the weight has scales of its own."""
    poison()
    offsets = None if lengths is None else offsets_of(lengths, torch.int64 if int64 else torch.int32)
    used = tokens if lengths is None else sum(lengths)
    x_block, w_block, block = (x_block[0], x_block[1]), (w_block[0], w_block[1]), (block[0], block[1])
    x, w = operands(used + capacity, used, contracted, columns, form, x_block, w_block, offsets, seed, exact)
    for row in bad or []:
        (x if isinstance(x, Tensor) else x.codes)[row, 3] = torch.nan if isinstance(x, Tensor) else 0x7F
    exponent = None
    if block[0] == 0:
        exponent = torch.full((columns // block[1],), given, dtype=torch.int32)
        exponent[:1] -= 9
        exponent = (exponent + 127).to(torch.uint8) if given_bytes else exponent

    def call() -> tuple[Tensor, Tensor, tuple]:
        from fused_ops.gemm_quantize import config, sm90, sm100

        left, right = flatten(x), flatten(w)
        operands_ = left.payloads, left.blocks, right.payloads, right.blocks, block, offsets is None
        with host(arch):
            if arch != "sm_90a":
                spec, reason = config.blackwell_spec_of(*operands_, axes)
                assert spec is not None and not reason, reason
                return sm100.gemm_quantize(*left, *right, offsets, exponent, spec)
            hopper, reason = config.spec_of(*operands_, right.scales)
            assert hopper is not None and not reason, reason
            return *sm90.gemm_quantize(left.payloads, left.scales, right.payloads, right.scales, offsets, exponent, hopper), (None, None)

    def verify(got: tuple[Tensor, Tensor, tuple]) -> None:
        apart = check_product(x, w, block, offsets, exponent, *got[:2], exact=exact)
        assert apart <= 0.01, f"{apart:.3g} of the codes are not the definition's"
        for axis, atoms in enumerate(got[2]):
            if atoms is not None:
                assert torch.equal(atoms, layout.scatter_scales(got[1], block, used + capacity, columns, offsets, axis)), f"axis {axis}"

    name = f"gemm_quantize {lengths or tokens} {contracted}x{columns} {form} x{x_block} w{w_block} {block}"
    return Case(name, arch, None, call, verify)


def norm(
    arch: str,
    lengths: list[int] | None,
    columns: int,
    *,
    dtype: str = "bfloat16",
    weight_dtype: str = "float32",
    block: tuple[int, int] = (32, 32),
    center: bool = False,
    keep: bool = False,
    axes: tuple[int, ...] = (),
    capacity: int = 0,
    shape: list[int] | None = None,
    int64: bool = False,
    bad: list[int] | None = None,
    strided: bool = False,
    copy_heads: int = 0,
    bound: bool = False,
    seed: int = 0,
) -> Case:
    """``bound``: the exponents are the kernel's own. ``lengths`` None: dense ``shape``. ``capacity``: NaN rows past the end. ``bad``: rows
    with a NaN, an infinity and minus infinity."""
    poison()
    kind = getattr(torch, dtype)
    offsets = None if lengths is None else offsets_of(lengths, torch.int64 if int64 else torch.int32)
    used = sum(lengths) if lengths is not None else 0
    if lengths is None:
        rows = int(torch.tensor(shape).prod())
        x = values(rows, columns, kind, rows, seed).reshape(*shape, columns)
    else:
        x = values(used + capacity, columns, kind, used, seed)
    for row, what in zip(bad or [], (torch.nan, torch.inf, -torch.inf), strict=False):
        x.view(-1, columns)[row, (7 * row) % columns] = what
    if strided:
        x = torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., :columns]
    generator = torch.Generator().manual_seed(seed + 1)
    weight = ((torch.rand(columns, generator=generator) + 0.5) * torch.exp2(torch.randint(-3, 4, (columns,), generator=generator))).to(
        getattr(torch, weight_dtype)
    )
    width = (block[0], block[1])
    exponent = norm_exponent(weight, width[1], centred=center) if width[0] == 0 else None
    if exponent is not None and not bound:
        exponent[:1] -= 12  # too small on purpose: large values saturate
    given = (x, weight, EPS, offsets, width, None if bound else exponent, center, keep)

    def call() -> KernelOutput:
        with host(arch):
            return rmsnorm_quantize(*given, tuple(axes), copy_heads)

    name = f"rmsnorm_quantize {lengths or shape} {columns} {dtype} {block} center={center}"
    return Case(name, arch, None, call, lambda got: check_norm(x, weight, offsets, width, exponent, center, keep, got))


def folded(w, norm_width, exponent, width, product_exponent) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_ops.norm_projection.weight`` in plain form: factors of rows and product, and the weight in units of both, FP32."""
    of_rows = torch.exp2(exponent.float()).repeat_interleave(norm_width)
    of_product = torch.exp2(product_exponent.float()).repeat_interleave(width)[:, None]
    return of_rows, of_product, w.float() * (of_rows / of_product)


def in_halves(w, norm_width, exponent, width, product_exponent) -> bool:
    """Whether FP16 can hold the sums, where the rows' exponents are the norm's bound."""
    return bool((folded(w, norm_width, exponent, width, product_exponent)[2].square().sum(dim=1) <= 144.0**2).all())


def check_norm_projection(x, gain, w, offsets, norm_width, exponent, width, product_exponent, center, got, own: bool = True) -> float:
    """The norm's results as :func:`check_norm` has them; the product as that of the rows that the kernel's own ``rstd`` and mean make:
    rounded to BF16; or, where the exponents are the norm's ``own`` and FP16 holds the sums, to FP16 in units of their exponents, with the
    weight in FP16 in units of both. Returns the share of the product's codes that are not those of the sums in FP32."""
    plain = KernelOutput(got.codes, got.scale, got.rstd, got.mean, got.total, None, (None, None), got.copy)
    check_norm(x, gain, offsets, (0, norm_width), exponent, center, False, plain)
    xf = x.float() * got.rstd[:, None] * gain.float()
    if center:
        bounds = torch.tensor([0, x.shape[0]], device=x.device) if offsets is None else offsets
        xf = xf - reference.per_token(got.mean, bounds, x.shape[0])
    if not own or not in_halves(w, norm_width, exponent, width, product_exponent):
        return check_product(xf.to(torch.bfloat16), w, (0, width), offsets, product_exponent, got.product, got.product_scale)
    of_rows, of_product, whole = folded(w, norm_width, exponent, width, product_exponent)
    rows, weight = (xf / of_rows).half(), whole.half()

    def bound(at: Tensor) -> Tensor:
        return half_sum_error(rows, weight, at) * of_product[at[:, 1], 0].double()

    made = rows.float() * of_rows, weight.float() * of_product / of_rows
    return check_product(*made, (0, width), offsets, product_exponent, got.product, got.product_scale, bound=bound)


def norm_projection(
    arch: str,
    lengths: list[int] | None,
    contracted: int,
    columns: int,
    *,
    norm_width: int = 64,
    width: int = 64,
    center: bool = True,
    tokens: int = 0,
    capacity: int = 0,
    dtype: str = "bfloat16",
    weight_dtype: str = "float32",
    int64: bool = False,
    bad: list[int] | None = None,
    strided: bool = False,
    bound: bool = True,
    cluster: int = 2,
    small: int = 0,
    seed: int = 0,
) -> Case:
    """Norm and projection in one kernel, see :func:`check_norm_projection`. ``lengths`` None: one sequence of ``tokens``. ``bound``: the
    norm's exponents are the kernel's own, else too small for its first block. ``small``: by how much the exponent of the product's first
    block is too small: large values saturate, and FP16 cannot hold all sums."""
    poison()
    offsets = None if lengths is None else offsets_of(lengths, torch.int64 if int64 else torch.int32)
    used = tokens if lengths is None else sum(lengths)
    x = values(used + capacity, contracted, getattr(torch, dtype), used, seed)
    for row, what in zip(bad or [], (torch.nan, torch.inf, -torch.inf), strict=False):
        x[row, (7 * row) % contracted] = what
    if strided:
        x = torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., :contracted]
    generator = torch.Generator().manual_seed(seed + 1)
    gain = ((torch.rand(contracted, generator=generator) + 0.5) * torch.exp2(torch.randint(-3, 4, (contracted,), generator=generator))).to(
        getattr(torch, weight_dtype)
    )
    w = torch.randn(columns, contracted, generator=generator).to(torch.bfloat16)
    exponent = norm_exponent(gain, norm_width, centred=center)
    if not bound:
        exponent[:1] -= 12
    product_exponent = projection_exponent(gain, w, width, centred=center)
    product_exponent[:1] -= small

    def call():
        from fused_ops.norm_projection import kernel

        with host(arch):
            return kernel.norm_projection(
                x, gain, w, EPS, offsets, norm_width, None if bound else exponent, width, product_exponent, center, cluster
            )

    def verify(got) -> None:
        check_norm_projection(x, gain, w, offsets, norm_width, exponent, width, product_exponent, center, got, bound)

    return Case(f"norm_projection {lengths or tokens} {contracted}x{columns}", arch, None, call, verify)


def scatter(
    arch: str, lengths: list[int] | None, columns: int, *, axis: int, block: list[int], tokens: int = 0, capacity: int = 0, seed: int = 0
) -> Case:
    """Scales of random rows to the buffer of ``axis`` and back; ``lengths`` None: dense, ``tokens`` rows."""
    poison()
    offsets = None if lengths is None else offsets_of(lengths)
    tokens = tokens if lengths is None else sum(lengths) + capacity
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator) * torch.exp2(torch.randint(-20, 20, (tokens, 1), generator=generator))
    exponent = torch.randint(-9, 9, (columns // block[1],), generator=generator) if block[0] == 0 else None
    mx: MXTensor = quantize_mx(x, (block[0], block[1]), offsets, token_dim=0, exponent=exponent)

    def call() -> tuple[Tensor, Tensor]:
        with host(arch):
            shape = sf_shape(tokens, columns, offsets, axis)
            made = scatter_scales(mx.scale_bytes, mx.block, tokens, columns, offsets, axis, shape)
            return made, gather_scales(made, tokens, columns, offsets, axis)

    def verify(got: tuple[Tensor, Tensor]) -> None:
        want = layout.scatter_scales(mx.scale_bytes, mx.block, tokens, columns, offsets, axis)
        assert torch.equal(got[0], want)
        assert torch.equal(got[1], layout.gather_scales(want, tokens, columns, offsets, axis))

    return Case(f"scatter_scales {lengths or tokens} {columns} axis={axis} {block}", arch, None, call, verify)


def head_rows(arch: str, rows: int, heads: int, width: int, *, bad: bool = False, apart: int = 0, seed: int = 0) -> Case:
    """Rows of heads of very different size, one with nothing but zeros; ``bad``: a NaN in one head, an infinity in another; ``apart``:
    elements between rows."""
    poison()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads * width + apart, generator=generator)[:, : heads * width].unflatten(1, (heads, width))
    x = x * torch.exp2(torch.arange(heads) * 9.0 - 12)[:, None] if not apart else x
    if heads > 2:
        x[:, 2] = 0.0
    if bad:
        x[rows // 2, 0, 1], x[0, 1, width - 1] = torch.nan, -torch.inf

    def call():
        from fused_ops.head_quantize import kernel

        with host(arch):
            return kernel.head_quantize(x)

    def verify(got) -> None:
        from fused_ops.head_quantize import reference

        for name, mine, theirs in zip(("codes", "scale"), got, reference.head_quantize(x), strict=True):
            assert torch.equal(mine, theirs), name

    return Case(f"head_quantize {rows}x{heads}x{width}", arch, None, call, verify)


def weight(
    arch: str,
    heads: int,
    rows: int,
    columns: int,
    *,
    form: str = "e4m3x2",
    width: int = 32,
    rotate: bool = True,
    dtype: str = "float32",
    bounded: bool = False,
    bad: bool = False,
    seed: int = 0,
) -> Case:
    """A projection's weight (``bad``: an infinite element in its first row) against the plain form: bytes where nothing is rotated, else
    all but codes beside a rounding boundary."""
    poison()
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(heads * rows, columns, generator=generator) * torch.exp2(torch.randint(-3, 4, (heads * rows, 1), generator=generator))
    w, gain = w.to(getattr(torch, dtype)), torch.rand(columns, generator=generator) + 0.5
    if bad:
        w[0, 1] = torch.inf

    def call():
        from fused_ops.gemm_quantize import weights_kernel

        with host(arch):
            return weights_kernel.projection_weight(w, gain, heads, form, width, rotate, True, bounded)

    def verify(got) -> None:
        from fused_ops.gemm_quantize import weights

        rounded, parts, scales, bound = got
        wanted = weights.reference(w, gain, heads, form, (32, width), rotate, True, bounded)
        assert torch.equal(bound, wanted.bound)
        assert float((rounded != wanted.rounded).float().mean()) <= (0.01 if rotate else 0.0)
        if form == "bf16":
            return
        pairs = [wanted.weight] if isinstance(wanted.weight, MXTensor) else list(wanted.weight)
        apart = [float((codes != part.codes).float().mean()) for codes, part in zip(parts, pairs, strict=True)]
        assert apart[0] <= (1e-3 if rotate else 0.0) and sum(apart) <= (0.05 if rotate else 0.0), apart
        mine = sum(MXTensor.from_bytes(codes, scales, (32, width)).dequantize() for codes in parts)
        whole = to_float(wanted.weight)
        if rotate:
            atol = float(whole.abs().max()) * 2.0 ** (-9 if bounded else -18)
            torch.testing.assert_close(mine, whole, rtol=2**-7, atol=atol)
        else:
            assert torch.equal(scales, pairs[0].scale_bytes)

    return Case(f"projection_weight {heads}x{rows}x{columns} {form} {width} {rotate} {bounded}", arch, None, call, verify)


def uneven(q: Tensor, w: Tensor, kind: str) -> None:
    """Queries ``[rows, heads, D]`` and key weights ``[heads * D, C]`` made hard to balance, in place; ``kind`` "random": left."""
    if kind == "lopsided":
        q[..., : q.shape[2] // 2] *= 4
        w.unflatten(0, (q.shape[1], 2, -1))[:, 1] *= 4
    elif kind == "one channel":
        q[..., 1:] = 0
        w *= 1e4
    elif kind == "overflow":
        q[-1, 0, 3] = 1e30


def coordinates(
    arch: str,
    rows: int,
    heads: int,
    width: int,
    columns: int,
    *,
    rotate: bool = True,
    dtype: str = "float32",
    kind: str = "random",
    apart: int = 0,
    seed: int = 0,
) -> Case:
    """Balanced coordinates against the plain form, whose covariances have more digits, and against their own inverse; ``kind``: "lopsided",
    "one channel", "overflow"; ``apart``: elements between rows of q."""
    poison()
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads * width + apart, generator=generator)[:, : heads * width].unflatten(1, (heads, width))
    w, gain = torch.randn(heads * width, columns, generator=generator), torch.rand(columns, generator=generator) + 0.5
    uneven(q, w, kind)
    w = w.to(getattr(torch, dtype))

    def call():
        from fused_ops.coordinates import kernel

        with host(arch):
            return kernel.balanced_coordinates(q, w, gain, rotate)

    def verify(got) -> None:
        from fused_ops.coordinates import reference

        for name, mine, theirs in zip(("keys", "queries"), got, reference.balanced_coordinates(q, w, gain, rotate), strict=True):
            close(name, mine, theirs, 2**-9)
        close("inverse", got[0].transpose(1, 2) @ got[1], torch.eye(width).expand(heads, width, width), 2**-12)

    return Case(f"balanced_coordinates {rows}x{heads}x{width}x{columns} {kind}", arch, None, call, verify)
