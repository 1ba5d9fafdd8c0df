"""Which backend serves an attention call: the one place where that is decided.

``choose`` looks at the device and at what the call asks for. A kernel backend is a module with ``forward`` and ``backward`` of the
reference's signatures and ``unsupported(features) -> str``, which says in words what it cannot serve ("" if it can). It may have
``prepare``: ``lp_fa4.reference.prepare`` with ``softmax_scale`` added and ``lse_shift`` in its result, which is what centring K took from
the LSE. Modules are imported when first needed.
"""

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch

from lp_fa4.compile import capability_of
from lp_fa4.config import DEFAULT, HEAD_DIMS, AttentionConfig

log = logging.getLogger("lp_fa4")

BACKENDS = ("sm100", "sm90", "reference")
"""Best first."""

_CAPABILITIES = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3))}
_MODULES = {"reference": "lp_fa4.reference", "sm90": "lp_fa4.sm90", "sm100": "lp_fa4.sm100"}
_announced: set[tuple[str, str, str]] = set()


class Features(NamedTuple):
    """What a call asks for. ``group``: query heads per key/value head. ``q_mean``: Q smoothing. ``backward``: whether gradients are wanted.
    ``blocks``: scale blocks of q, k, v, or None where the backend quantizes by itself."""

    head_dim: int
    causal: bool = False
    shared_q: bool = False
    jagged_q: bool = False
    group: int = 1
    q_mean: bool = False
    backward: bool = True
    config: AttentionConfig = DEFAULT
    blocks: tuple[tuple[int, int], ...] | None = None
    softmax_scale: float = 1.0


def _reference_reason(features: Features) -> str:
    if features.head_dim not in HEAD_DIMS:
        return f"head_dim is {features.head_dim}; allowed are {', '.join(map(str, HEAD_DIMS))}"
    return ""


@functools.cache
def _installed(package: str) -> bool:
    """Whether a package can be imported; asked once, for every call of every operator wants to know."""
    return importlib.util.find_spec(package) is not None


@functools.cache
def _asked(question: Callable[[], bool]) -> bool:
    return question()


def device_reason(name: str, device: torch.device) -> str:
    """Why kernels of architecture ``name`` ("sm90", "sm100") cannot run on ``device`` in this process, "" if they can."""
    if not _installed(_MODULES[name]):
        return f"this version has no {name} kernels"
    if device.type != "cuda":
        return f"{name} kernels need a CUDA device, and this is {device.type}"
    if not _asked(torch.cuda.is_available):
        return f"{name} kernels need a CUDA device, and this process sees none"
    capability = capability_of(device)
    if capability not in _CAPABILITIES[name]:
        wanted = " or ".join(map(_dotted, _CAPABILITIES[name]))
        return f"{name} kernels need compute capability {wanted}, and {device} has {_dotted(capability)}"
    if not _installed("cutlass"):
        return f"{name} kernels need the package nvidia-cutlass-dsl (extra 'kernels'), which is not installed"
    return ""


def _kernel_reason(name: str, device: torch.device, features: Features) -> str:
    if reason := device_reason(name, device):
        return reason
    if not all((features.config.round_p, features.config.round_do, features.config.round_ds)):
        return "config.round_p, round_do and round_ds must be True: only the reference can leave a tensor unrounded"
    if features.q_mean:
        return "q_mean (Q smoothing) is served by the reference only"
    if not 0.0 < features.softmax_scale < math.inf:
        return f"softmax_scale is {features.softmax_scale}; the kernels need a positive, finite one"
    backend = module(name)
    if not hasattr(backend, "forward") or not hasattr(backend, "unsupported"):
        return f"this version has no {name} attention kernels"
    if features.backward and not hasattr(backend, "backward"):
        return f"this version has no {name} attention backward"
    return backend.unsupported(features)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def module(name: str) -> ModuleType:
    """The module that holds a backend's ``forward`` and ``backward``."""
    return importlib.import_module(_MODULES[name])


def reason_against(name: str, device: torch.device, features: Features) -> str:
    """Why backend ``name`` cannot serve this call, "" if it can."""
    return _reference_reason(features) if name == "reference" else _kernel_reason(name, device, features)


def choose(device: torch.device, features: Features, backend: str = "auto") -> str:
    """Name of the backend for a call: the best that can serve it, or the one asked for.

    Raises: ``ValueError`` if ``backend`` is unknown or cannot serve, with the reason. An explicit choice is never replaced.
    """
    if backend == "auto":
        reasons = {}
        for name in BACKENDS:
            reasons[name] = reason_against(name, device, features)
            if not reasons[name]:
                return name
        raise ValueError(reasons["reference"])
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are 'auto', {', '.join(repr(b) for b in reversed(BACKENDS))}")
    reason = reason_against(backend, device, features)
    if reason:
        raise ValueError(f"backend={backend!r} cannot serve this call: {reason}")
    return backend


def announce(name: str, device: torch.device, features: Features) -> None:
    """Say once per device type which backend ``"auto"`` took, and on an accelerator why it was not a kernel, each reason once."""
    why = ""
    if name == "reference" and device.type == "cuda":
        why = " (plain PyTorch, slow): " + "; ".join(r for b in BACKENDS if (r := reason_against(b, device, features)))
    if (device.type, name, why) not in _announced:
        _announced.add((device.type, name, why))
        log.warning("lp_fa4: attention on %s runs on backend %r%s", device.type, name, why)


def is_supported(
    device: torch.device | str,
    *,
    head_dim: int,
    backend: str = "auto",
    causal: bool = False,
    shared_q: bool = False,
    jagged_q: bool = False,
    group: int = 1,
    q_mean: bool = False,
    backward: bool = True,
    config: AttentionConfig | None = None,
) -> tuple[bool, str]:
    """Whether attention with these features is served on ``device``, and by what, or why not.

    Args:
        device: as for ``torch.device``, of this process. head_dim: of q, k and v alike.
        backend: ``"auto"`` (any), ``"reference"``, ``"sm90"`` or ``"sm100"``.
        group: query heads per key/value head. q_mean: Q smoothing. backward: also the gradients.
    Returns: ``(True, "served by backend 'name'")`` or ``(False, reason)``.
    """
    features = Features(head_dim, causal, shared_q, jagged_q, group, q_mean, backward, config or DEFAULT)
    device = torch.device(device)
    try:
        name = choose(device, features, backend)
    except ValueError as error:
        return False, str(error)
    if name == "reference" and device.type == "cuda" and not torch.cuda.is_available():
        return False, f"device is {device}, and this process sees no CUDA device"
    return True, f"served by backend {name!r}"
