"""Shared by the tests of PMA: modules, batches, and the FP64 truth with its gradients."""

import torch
from torch import Tensor

from modules import PMA
from modules import reference as truth
from tests.conftest import offsets_of
from tests.fused_ops.common import db

DIM, HEADS, SEEDS = 128, 2, 48


def make(seed: int = 0, **options) -> PMA:
    """A PMA whose seeds and projections make scores of deviation about 1, so that softmax is neither flat nor one-hot."""
    torch.manual_seed(seed)
    shape = {"dim": DIM, "num_heads": HEADS, "num_seeds": SEEDS, **options}
    module = PMA(**shape)
    with torch.no_grad():
        module.seed_embs.normal_()
        for norm in (module.query_norm, module.kv_norm):
            norm.weight.copy_(torch.rand(module.dim) + 0.5)
        for proj in (module.query_proj, module.key_proj):
            proj.weight.normal_(0, module.dim**-0.5)
    return module


def batch(lengths, extra: int = 0, dim: int = DIM, dtype=torch.float32, offsets_dtype=torch.int64) -> tuple[Tensor, Tensor]:
    """Events whose rows differ in size by 2^±4, NaN past the last offset; offsets."""
    offsets = offsets_of(lengths, offsets_dtype)
    used = int(offsets[-1])
    x = (torch.randn(used + extra, dim) * 2.0 ** torch.randint(-4, 5, (used + extra, 1))).to(dtype)
    x[used:] = torch.nan
    return x, offsets


def run(module: PMA, x: Tensor, offsets: Tensor, dout: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """Output, gradient of the events, gradients of the parameters (which are left clean)."""
    x = x.detach().requires_grad_()
    out = module(x, offsets)
    out.backward(weights_of(out) if dout is None else dout)
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return out.detach(), x.grad, grads


def weights_of(out: Tensor) -> Tensor:
    """A gradient of the output that depends on a row's place in its sample only, not on the batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape[1:], generator=generator).to(out.dtype).expand(out.shape)


def exact(module: PMA, x: Tensor, offsets: Tensor, dout: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same in FP64."""
    used = int(offsets[-1])
    events = x[:used].detach().double().requires_grad_()
    leaves = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    out = truth.pma(
        events,
        offsets,
        leaves["seed_embs"],
        leaves["query_norm.weight"],
        leaves["kv_norm.weight"],
        leaves["query_proj.weight"],
        leaves["key_proj.weight"],
        leaves.get("value_proj.weight"),
        heads=module.num_heads,
        eps=module.eps,
    )
    out.backward((weights_of(out) if dout is None else dout).double())
    grad = torch.zeros(x.shape, dtype=torch.float64)
    grad[:used] = 0.0 if events.grad is None else events.grad
    return out.detach(), grad, {name: p.grad for name, p in leaves.items()}


def ratios(got, want) -> dict[str, float]:
    """dB of the output, the events' gradient and each parameter's."""
    return {
        "out": db(got[0], want[0]),
        "events": db(got[1], want[1]),
        **{name: db(got[2][name], want[2][name]) for name in want[2]},
    }


def assert_identical(got, want) -> None:
    """Bit for bit: output, events' gradient, every parameter's gradient, None included."""
    assert torch.equal(got[0], want[0]), "output"
    assert (got[1] is None) == (want[1] is None) and (got[1] is None or torch.equal(got[1], want[1])), "events' gradient"
    assert got[2].keys() == want[2].keys()
    for name, grad in got[2].items():
        other = want[2][name]
        assert (grad is None) == (other is None) and (grad is None or torch.equal(grad, other)), name
