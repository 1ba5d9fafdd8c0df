"""Operations that ``compute-sanitizer`` and the emulator's race checker look at, and the process that runs them.

    python -m tests.sanitizer.cases CASE --tool TOOL [--index N]       # under a tool, on a GPU; TOOL ``emulator``: in the emulator

Lines that the tool names are those that a reader looks for: an access in a helper that reads or writes for its caller counts as its
caller's.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "fused operations": [
        ("rmsnorm_center_quantize", {}),
        ("rmsnorm_center_quantize static", {}),
        ("scatter_scales", {}),
        ("gemm_quantize", {}),
        ("gemm_quantize", {"dtype": "float32"}),
        ("gemm_norm_backward", {}),
        ("other forms", {}),
    ],
    "few queries": [("mx_attention", {}), ("mx_attention 40", {})],
    "attention": [("mx_attention 140", {}), ("mx_attention 140", {"deterministic": False}), ("static exponents", {})],
    "drop-in": [("flash_attn_varlen_func", {}), ("flash_attn_varlen_func", {"causal": True}), ("quantized beside", {})],
    "module": [("PMA static value_proj", {}), ("PMA post", {})],
}
"""Operations of each case, by their names in ``tests.properties.subjects``, and what is not the default of ``Choices``. In float32
``gemm_quantize`` takes MXFP8 operands; ``mx_attention 40`` splits keys, 140 queries fill two tiles; ``FORMS`` are
below."""


def title(operation: tuple[str, dict[str, Any]]) -> str:
    """Name of an operation of a case: its subject and what is not the default."""
    name, changes = operation
    return ", ".join([name, *(f"{key} {value}" for key, value in changes.items())])


LENGTHS = (0, 33, 130, 1, 300)
FEWER = (130, 0, 1)
"""For initcheck, which is slow where it reports much, and takes an operation once."""
SCHEDULES = 4
"""Of the emulator."""
HELPERS = {
    *(
        "inline_ptx",
        "effect",
        "store",
        "store_words",
        "store_half",
        "store_word",
        "load_half",
        "load_words",
        "load_word",
        "load_byte",
        "load_pair",
        "vector",
    ),
    *("shared_floats", "shared_words", "strong_floats", "bulk", "bulk_copy", "bulk_load"),
    *("load_matrices", "bits_of", "inverse_unit"),
    *("release", "arrive", "arrive_tensor"),
}


def to_caller(location: Any) -> Any:
    """The innermost line of ours that is not in a helper, for the operation that is being built."""
    from cutlass._mlir import ir

    frame = sys._getframe(1)
    while frame is not None and location is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(f"/{part}/" in path for part in ("lp_fa4", "fused_ops")) and name not in HELPERS:
            return ir.Location.file(path, frame.f_lineno, 0)
        frame = frame.f_back  # type: ignore[assignment]
    return location


@contextlib.contextmanager
def listing() -> Iterator[list[str]]:
    """Names of the kernels that are compiled meanwhile, with lines of callers; or loaded, from a folder of their own in the one that the
    environment names (``lp_fa4.kernel_store``), which holds the names as well: processes of several tools compile a kernel once."""
    from unittest import mock

    import lp_fa4.compile as compilation
    from lp_fa4.kernel_store import VARIABLE

    kernels: list[str] = []
    build, compile_or_load = compilation.build, compilation.compile_or_load
    folder = Path(os.environ[VARIABLE]) / "lines" if os.environ.get(VARIABLE) else None

    def listed(arch: str, function: Any, *arguments: Any) -> Any:
        from cutlass._mlir_helpers.op import loc_transform

        kernels.append(f"{type(function).__module__}.{type(function).__name__}")
        with loc_transform(to_caller), mock.patch.object(compilation, "extra_options", "--generate-line-info"):
            return build(arch, function, *arguments)

    def named(function: Any, key: tuple) -> Any:
        if folder is None:
            return function(*key)
        names = folder / (hashlib.sha256(f"{function.__module__}.{function.__qualname__}{key!r}".encode()).hexdigest() + ".json")
        before = len(kernels)

        @functools.wraps(function)
        def naming(*key: Any) -> Any:
            made = function(*key)
            names.write_text(json.dumps(kernels[before:]))
            return made

        made = compile_or_load(naming, key)
        if len(kernels) == before:
            kernels.extend(json.loads(names.read_text()))
        return made

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(compilation, build=listed, compile_or_load=named))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(mock.patch.dict(os.environ, {VARIABLE: str(folder)}))
        yield kernels


def other_forms(lengths: tuple[int, ...], place: Any) -> None:
    """Kernels of fused operations that no subject has: the norm of rows too long for the staged kernel, scales back from the swizzle,
    a weight's gradient from BF16 operands and from codes of which one operand's are static, coordinates of heads, and, on Hopper, norm and
    projection in one, of BF16 and FP32 rows, with a copy of the codes."""
    import torch

    from fused_ops import balanced_coordinates, gather_scales, gemm_norm_backward, rmsnorm_project, rmsnorm_quantize, scatter_scales
    from lp_fa4 import quantize_mx
    from tests.conftest import offsets_of

    device, tokens, g = place.device, sum(lengths), torch.Generator().manual_seed(0)
    offsets = offsets_of(lengths).to(device)
    wide, k, xn = (torch.randn(tokens, n, generator=g).bfloat16().to(device) for n in (640, 128, 128))
    with place.around():
        rmsnorm_quantize(wide, torch.ones(640, device=device), offsets=offsets, backend=place.backend)
        scales = scatter_scales(quantize_mx(k.float(), (32, 32), offsets), 0, backend=place.backend)
        gather_scales(scales, tokens, 128, offsets, axis=0, backend=place.backend)
        ones, weight = torch.ones(tokens, device=device), torch.ones(128, 128, device=device).bfloat16()
        gemm_norm_backward(k, None, weight, xn, ones[:128].float(), ones, xn, offsets=offsets, backend=place.backend)
        groups, static = quantize_mx(k.float(), (32, 32), offsets), quantize_mx(xn.float(), (0, 128), offsets, exponent=-6)
        gemm_norm_backward(groups, None, weight, xn, ones[:128].float(), ones, static, backend=place.backend)
        balanced_coordinates(k.float().unflatten(1, (2, 64)), weight, ones[:128], backend=place.backend)
        if place.backend == "sm90":
            for rows in (k, k.float()):
                rmsnorm_project(rows, ones[:128], weight, 4, offsets=offsets, copy_heads=2, backend=place.backend)


def static_exponents(lengths: tuple[int, ...], place: Any) -> None:
    """Attention on static exponents, forward and backward: with queries whose FP16 sums are certain and with larger ones, which Hopper
    takes through loops of their own; of shared queries, once with FP16 dQ, and causal."""
    import torch

    from lp_fa4 import mx_attention, mx_attention_backward, quantize_mx
    from lp_fa4.config import DEFAULT
    from tests.conftest import offsets_of

    g, offsets = torch.Generator().manual_seed(0), offsets_of(lengths).to(place.device)
    q, k, v, own, dout = (
        torch.randn(n, place.heads, place.dim, generator=g).to(place.device)
        for n in (140, sum(lengths), sum(lengths), sum(lengths), 140 * len(lengths))
    )

    def static(x: Any, exponent: int, offsets: Any = None) -> Any:
        return quantize_mx(x, (0, place.dim), offsets, token_dim=0, exponent=exponent)

    keys, values = static(k, 0, offsets), static(v, 0, offsets)
    given: dict[str, Any] = {"backend": place.backend}
    with place.around():
        for exponent in (0, -5):
            shared = static(q, exponent)
            _, _, result = mx_attention(shared, keys, values, shared_q=True, return_result=True, **given)
            mx_attention_backward(dout.bfloat16(), result, shared, keys, values, shared_q=True, **given)
        half = DEFAULT.with_(dq_dtype=torch.float16)
        mx_attention_backward(dout.bfloat16(), result, shared, keys, values, shared_q=True, config=half, **given)
        causal = static(own, 0, offsets)
        _, _, result = mx_attention(causal, keys, values, causal=True, return_result=True, **given)
        mx_attention_backward(dout[: sum(lengths)].bfloat16(), result, causal, keys, values, causal=True, **given)


def quantized_beside(lengths: tuple[int, ...], place: Any) -> None:
    """The drop-in of equal sequences, whose quantize pass Hopper runs beside the forward, which waits for it a sequence at a time: here of
    short ones too, with as few multiprocessors as make it wait."""
    from unittest import mock

    import torch

    from lp_fa4 import flash_attn_func
    from lp_fa4.sm90 import preparation, quantize_beside

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, place.heads, place.dim, generator=g).bfloat16().to(place.device) for n in (128, 256, 256))
    ask, share = mock.patch.object(preparation, "beside_pays", lambda *_: True), mock.patch.object(quantize_beside, "ctas_of", lambda *_: 1)
    with ask, share, place.around():
        flash_attn_func(q, k, v, backend=place.backend)


FORMS = {"other forms": other_forms, "static exponents": static_exponents, "quantized beside": quantized_beside}
"""Operations that are not subjects."""


def operations(name: str, index: int | None, place: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    """Calls of a case, or one of them."""
    import torch

    from tests.properties.subjects import Choices, Sample, subjects_at

    subjects = {s.name: s for s in subjects_at(place).values()}
    samples = [Sample(n, 2 + 45 * (i % 3), 2, change="constant" if i == 1 else "") for i, n in enumerate(lengths)]
    calls = []
    for subject, changes in CASES[name] if index is None else CASES[name][index : index + 1]:
        if subject in FORMS:
            calls.append(lambda form=FORMS[subject]: form(lengths, place))
            continue
        given = {"dtype": "bfloat16", **changes}
        choices = Choices(**{**given, "dtype": getattr(torch, given["dtype"])})
        calls.append(lambda subject=subjects[subject], choices=choices: subject(samples, 7, choices))
    return calls


@contextlib.contextmanager
def bulk_stored_set() -> Iterator[None]:
    """For initcheck, which does not follow bulk stores (``probes``: "bulk store"): what kernels write by them is set before. These are the
    Hopper forward's outputs, the images that the backward's pre-pass makes, its partial sums over long query loops, and products of the
    BLAS library. That kernels write all of them is what ``test_fresh_memory`` tries."""
    from unittest import mock

    import torch

    empty, like = torch.empty, torch.empty_like

    def known(*shape: Any, **options: Any) -> Any:
        return set_if_stored(empty(*shape, **options), sys._getframe(1).f_code.co_filename)

    def known_like(other: Any, **options: Any) -> Any:
        return set_if_stored(like(other, **options), sys._getframe(1).f_code.co_filename)

    def set_if_stored(made: Any, caller: str) -> Any:
        output = caller.endswith("sm90/forward_host.py") and made.dtype == torch.bfloat16
        backward = caller.endswith("sm90/backward_host.py") and made.dim() == 3
        image = backward and made.dtype == torch.uint8 and made.shape[-1] >= 4096
        partial = backward and made.dtype == torch.float32 and made.shape[1] == 2
        return made.zero_() if output or image or partial else made

    def product(a: Any, b: Any) -> Any:
        out = a.new_zeros(*a.shape[:-1], b.shape[-1])
        return torch.matmul(a, b, out=out) if not (a.requires_grad or b.requires_grad) else torch.matmul(a, b)

    with mock.patch.multiple(torch, empty=known, empty_like=known_like), mock.patch.object(torch.Tensor, "__matmul__", product):
        yield


def on_gpu(name: str, index: int | None, tool: str) -> list[str]:
    """Run a case; returns the kernels that were compiled."""
    with listing() as kernels:
        import torch

        from tests.properties.subjects import HOPPER

        once = tool == "initcheck"
        calls = operations(name, index, HOPPER, FEWER if once else LENGTHS)
        for _ in range(1 if once else 2):
            for call in calls:
                call()
        torch.cuda.synchronize()
    return kernels


def in_emulator(name: str, arch: str = "sm_90a") -> tuple[list[str], list[list[Any]]]:
    """Run a case in the emulator, each operation under several schedules; raises at the race checker's first report. Returns the kernels,
    and what ``lanes`` counts."""
    from tests.emulator import capture

    capture.install(arch)
    from tests.sanitizer.lanes import watching

    with listing() as kernels, watching() as found:
        import torch

        from tests.properties.emulated import place_of

        place = dataclasses.replace(place_of(arch, narrow=False), dtypes=(torch.bfloat16, torch.float32))
        for call in operations(name, None, place):
            for _ in range(SCHEDULES):
                call()
    return kernels, [[*key, n] for key, n in sorted(found.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--tool", required=True)
    parser.add_argument("--index", type=int)
    chosen = parser.parse_args()
    probe = chosen.case.removeprefix("probe: ")
    if probe != chosen.case:
        from tests.sanitizer import probes

        if chosen.tool == "emulator":
            print(f"reports: {probes.emulated('sm_90a', [probe], SCHEDULES)[probe]}")
        else:
            probes.launch(probe)
        kernels = [probe]
    elif chosen.tool == "emulator":
        kernels, found = in_emulator(chosen.case)
        print(f"reports: 0\nlanes: {json.dumps(found)}")
    else:
        with bulk_stored_set() if chosen.tool == "initcheck" else contextlib.nullcontext():
            kernels = on_gpu(chosen.case, chosen.index, chosen.tool)
    print("kernels: " + json.dumps(sorted(set(kernels))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
