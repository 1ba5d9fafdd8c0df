"""What must hold of PMA under data parallelism: one function a property, run by every rank of a group of any size.

Each takes a :class:`Context`, asserts, and returns the figures it saw (on rank 0). They run on GPUs over NCCL and on a CPU over gloo.

The single-process run that gradients are compared with sees the ranks' batches concatenated. Everything that is rounded to FP8 is rounded
within one sequence, so the two runs add the same FP32 terms, in another order: ``ORDER`` bounds what that may change, relative to the
gradient's norm. (A sum of n terms moves by some sqrt(n) * 2^-24 of their size; 1e-5 is n = 28,000 with cancellation to spare.) The queries'
gradient is summed in FP32 for that; ``ddp_fp16`` is the default on Hopper, where samples that share a sum depend on the batch.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules import PMA, Numerics
from modules.balance import BalancedBatchSampler
from tests.conftest import HOSTILE_LENGTHS

ORDER = 1e-5
CUT = 2.0**-12
"""Of the key projection's gradient on Hopper: FP8 products, whose sums the tensor core cuts to 14 bits, over runs of tokens that depend on
the batch (``fused_ops/README.md``)."""


@dataclass(frozen=True)
class Context:
    """A rank's place, and how large its problems are."""

    rank: int
    world: int
    device: torch.device
    folder: Path
    dim: int
    heads: int
    seeds: int
    scale: int
    steps: int
    dtype: torch.dtype = torch.float32

    def pma(self, precision: str = "mxfp8", dq_dtype: torch.dtype | None = torch.float32, seed: int = 0) -> PMA:
        """FP32 parameters, the same on every rank."""
        torch.manual_seed(seed)
        module = PMA(self.dim, self.heads, self.seeds, precision=precision, numerics=Numerics(dq_dtype=dq_dtype))
        with torch.no_grad():
            module.seed_embs.normal_()
            for proj in (module.query_proj, module.key_proj):
                proj.weight.normal_(0, self.dim**-0.5)
        return module.to(self.device)

    def batch(self, lengths, seed: int) -> tuple[Tensor, Tensor]:
        """Events and offsets."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(sum(lengths), self.dim, generator=generator).to(self.dtype)
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return values.to(self.device), offsets.to(self.device)

    def lengths(self, seed: int, samples: int = 6) -> list[int]:
        """Random lengths with every boundary among them."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 300 * self.scale, (samples,), generator=generator).tolist()
        return [*drawn, *HOSTILE_LENGTHS]


class Loss(nn.Module):
    """A loss that is linear in the pooled vectors, so that their gradient is the same bits whatever the batch; and a buffer."""

    def __init__(self, pma: PMA) -> None:
        super().__init__()
        self.pma = pma
        weight = torch.randn(pma.num_seeds, pma.dim, generator=torch.Generator().manual_seed(9))
        self.register_buffer("weight", weight.to(pma.seed_embs.device))

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return (self.pma(values, offsets).float() * self.weight).sum()


def concatenated(context: Context, batches) -> tuple[Tensor, Tensor]:
    """The ranks' batches as one."""
    values, lengths = [v for v, _ in batches], [o.diff() for _, o in batches]
    total = torch.cat(lengths)
    offsets = torch.cat([total.new_zeros(1), total.cumsum(0, dtype=total.dtype)])
    return torch.cat(values), offsets


def alone(context: Context, model: nn.Module, batches) -> dict[str, Tensor]:
    """Gradients of the mean over ranks, by one process on the concatenated batch."""
    (model(*concatenated(context, batches)) / context.world).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(context: Context, got: dict[str, Tensor], want: dict[str, Tensor], bound: float, what: str = "") -> float:
    """Largest relative difference of norms, each at most ``bound``; exact zeros must meet exact zeros."""
    found = {}
    for name, reference in want.items():
        value = got[name]
        assert value is not None, f"{name} has no gradient"
        assert value.dtype == reference.dtype and value.isfinite().all(), name
        norm = float(reference.double().norm())
        if norm == 0:
            assert not value.any(), name
            continue
        found[name] = float((value.double() - reference.double()).norm()) / norm
    cut = max(bound, CUT) if context.device.type == "cuda" else bound
    assert all(error <= (cut if name.endswith("key_proj.weight") else bound) for name, error in found.items()), (what, found)
    return max(found.values(), default=0.0)


def kinds_of_batches(context: Context) -> dict[str, list[list[int]]]:
    """Lengths of every rank's batch."""
    world, busy = context.world, [context.lengths(10 + r) for r in range(context.world)]
    none: list[list[int]] = [[0, 0, 0]] * world
    return {
        "all busy": busy,
        "first rank without events": [[0, 0, 0], *busy[1:]],
        "last rank without samples": [*busy[:-1], []],
        "no events anywhere": none,
        "no samples anywhere": [[] for _ in range(world)],
    }


def ddp(context: Context, precision: str = "mxfp8", bound: float = ORDER, dq_dtype: torch.dtype | None = torch.float32) -> dict[str, Any]:
    """DDP's gradients are the single process's; empty ranks do not hang it and give zeros; a second step works."""
    found = {}
    for kind, lengths in kinds_of_batches(context).items():
        model = Loss(context.pma(precision, dq_dtype))
        expected_model = copy.deepcopy(model)
        parallel = wrap(context, model)
        batches = [context.batch(n, 20 + r) for r, n in enumerate(lengths)]
        parallel(*batches[context.rank]).backward()
        got = {name: p.grad.clone() for name, p in model.named_parameters()}
        found[kind] = compare(context, got, alone(context, expected_model, batches), bound, f"{precision}, {kind}")
        parallel(*batches[context.rank]).backward()
    return found


def ddp_bf16(context: Context) -> dict[str, Any]:
    """The same in BF16, whose attention rounds dQ's sum over a batch to BF16: once a rank, and once in all."""
    return ddp(context, "bf16", 2.0**-7)


def ddp_fp16(context: Context) -> dict[str, Any]:
    """The module's default on Hopper: a sum of n FP16 terms is off by some sqrt(n) 2^-12, here n < 200, in each of the two runs."""
    if context.device.type != "cuda":
        return {"not run": "on a CPU these sums are FP32"}
    return ddp(context, bound=2.0**-8, dq_dtype=None)


def wrap(context: Context, model: nn.Module, **options: Any) -> nn.parallel.DistributedDataParallel:
    """DDP on the rank's device."""
    ids = [context.device.index] if context.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)


def no_sync(context: Context) -> dict[str, Any]:
    """Accumulating over micro-batches without communication, then with: the sum of all."""
    model = Loss(context.pma())
    expected_model = copy.deepcopy(model)
    parallel = wrap(context, model)
    rounds = [[context.batch(context.lengths(100 * i + r), 50 * i + r) for r in range(context.world)] for i in range(3)]
    for batches in rounds[:-1]:
        with parallel.no_sync():
            parallel(*batches[context.rank]).backward()
    parallel(*rounds[-1][context.rank]).backward()
    for batches in rounds:
        expected = alone(context, expected_model, batches)
    return {"error": compare(context, {name: p.grad for name, p in model.named_parameters()}, expected, ORDER)}


def shard(context: Context, model: nn.Module) -> nn.Module:
    """FSDP2 over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(context.device.type, (context.world,))
    fully_shard(model.pma, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp(context: Context) -> dict[str, Any]:
    """The same under FSDP2, parameters gathered and gradients scattered."""
    found = {}
    for kind, lengths in kinds_of_batches(context).items():
        model = Loss(context.pma())
        expected_model = copy.deepcopy(model)
        model = shard(context, model)
        batches = [context.batch(n, 20 + r) for r, n in enumerate(lengths)]
        model(*batches[context.rank]).backward()
        got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        found[kind] = compare(context, got, alone(context, expected_model, batches), ORDER, kind)
    return found


def train_steps(context: Context, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, batches_of) -> list[float]:
    """Losses (sum over ranks) of some steps; every step's global batch is the same whatever the number of ranks."""
    losses = []
    for i in range(first, first + count):
        loss = model(*batches_of(i))
        optimizer.zero_grad()
        (loss * context.world / PARTS).backward()  # the mean over ranks is then the sum over parts, divided by their number
        optimizer.step()
        total = loss.detach().clone()
        if context.world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    return losses


PARTS = 4
"""Parts of every global batch of the checkpoint case; any number of ranks that divides it has whole parts."""


def checkpoint(context: Context, new_world: Callable[[int], "Context | None"]) -> dict[str, Any]:
    """Model and optimizer saved by all ranks, restored by one (and back), go on as if nothing had happened.

    ``new_world(n)`` replaces the process group by one of the first ``n`` ranks and returns this rank's context, None where it has no part.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def fresh(c: Context) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Any]]:
        model = shard(c, Loss(c.pma(seed=4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def batches_of(i: int) -> tuple[Tensor, Tensor]:
            parts = [c.batch(c.lengths(1000 * i + part, 3), 77 * i + part) for part in range(PARTS)]
            share = PARTS // c.world
            return concatenated(c, parts[c.rank * share : (c.rank + 1) * share])

        return model, optimizer, batches_of

    def save(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, folder: Path) -> None:
        state, slots = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": slots}, checkpoint_id=str(folder / name))

    def load(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, folder: Path) -> None:
        state, slots = get_state_dict(model, optimizer)
        holder = {"model": state, "optimizer": slots}
        dcp.load(holder, checkpoint_id=str(folder / name))
        set_state_dict(model, optimizer, model_state_dict=holder["model"], optim_state_dict=holder["optimizer"])

    if PARTS % context.world:
        return {"not run": f"{context.world} ranks do not divide {PARTS} parts"}
    model, optimizer, batches_of = fresh(context)
    train_steps(context, model, optimizer, 0, 3, batches_of)
    save(model, optimizer, "many", context.folder)
    expected = train_steps(context, model, optimizer, 3, 3, batches_of)
    one = new_world(1)
    got: list[float] = []
    if one is not None:
        model, optimizer, batches_of = fresh(one)
        load(model, optimizer, "many", one.folder)
        got = train_steps(one, model, optimizer, 3, 3, batches_of)
        save(model, optimizer, "one", one.folder)
        onwards = train_steps(one, model, optimizer, 6, 2, batches_of)
        (one.folder / "onwards").write_text("\n".join(map(repr, onwards)))
    many = new_world(context.world)
    assert many is not None
    model, optimizer, batches_of = fresh(many)
    load(model, optimizer, "one", many.folder)
    back = train_steps(many, model, optimizer, 6, 2, batches_of)
    onwards = [float(line) for line in (many.folder / "onwards").read_text().splitlines()]
    # Losses are sums of products with a mean near 0; AdamW makes of a gradient near 0 a step of a sign that its order of addition decides.
    scale = max(map(abs, expected))
    error = max([abs(a - b) / scale for a, b in zip(got, expected, strict=False)] + [0.0])
    back_error = max(abs(a - b) / scale for a, b in zip(back, onwards, strict=True))
    assert error < 1e-3 and back_error < 1e-3, (got, expected, back, onwards)
    return {"to one rank": error, "back": back_error, "losses": expected, "losses of one rank": got}


def many_steps(context: Context) -> dict[str, Any]:
    """Random lengths, ranks without events or samples in every pattern, step after step, without a hang."""
    model = Loss(context.pma())
    parallel = wrap(context, model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(11)
    begin, empty = time.perf_counter(), 0
    for i in range(context.steps):
        states = torch.randint(0, 5, (context.world,), generator=generator).tolist()  # 0: no samples, 1: no events
        if i % 20 == 7:
            states = [i % 2] * context.world
        empty += sum(s < 2 for s in states)
        kinds: dict[int, list[int]] = {0: [], 1: [0] * (1 + i % 5)}
        lengths = kinds.get(states[context.rank]) if states[context.rank] < 2 else context.lengths(i * context.world + context.rank, 4)
        loss = parallel(*context.batch(lengths, i))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert parameters.isfinite().all()
    highest, lowest = parameters.clone(), parameters.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    assert torch.equal(highest, lowest), "ranks have drifted apart"
    return {"steps": context.steps, "empty rank batches": empty, "seconds": time.perf_counter() - begin}


def recommender(context: Context) -> dict[str, Any]:
    """The training command's model (TorchRec embeddings, not sharded) under DDP, fed by the balanced sampler."""
    from benchmarks.data import make_batch
    from benchmarks.synthetic import SyntheticConfig, make_synthetic
    from benchmarks.train import ModelConfig, build_model
    from benchmarks.train_model import features

    data = make_synthetic(
        SyntheticConfig(users=32 * context.world, held_out_users=8, items=40, shortest=8, longest=256 * context.scale, targets=4)
    )
    model_config = ModelConfig(dim=context.dim, num_heads=context.heads, num_seeds=8, hidden=(32,), dropout=0.0)
    torch.manual_seed(0)
    parallel = wrap(context, build_model(model_config, data, "mxfp8").to(context.device))
    lengths = (data.train.start - data.train.begin).tolist()
    options = dict(rank=context.rank, ranks=context.world)
    sampler = BalancedBatchSampler(lengths, 8, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=5e-3)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for chosen in sampler:
            batch = make_batch(data, data.train.take(torch.tensor(chosen).numpy()))
            loss = nn.functional.binary_cross_entropy_with_logits(parallel(features(batch, context.device)), batch.label.to(context.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / context.world)
    assert losses[-1] < losses[0], losses
    drawn = BalancedBatchSampler(lengths, 8, balance=False, **options).mean_imbalance()
    return {"first loss": losses[0], "last loss": losses[-1], "imbalance": sampler.mean_imbalance(), "imbalance as drawn": drawn}


def other_device(context: Context) -> dict[str, Any]:
    """Tensors on ``cuda:1`` while the current device is 0: the bits of ``cuda:0``. Tensors on two devices are refused by name."""
    if context.device.type != "cuda" or torch.cuda.device_count() < 2 or context.rank != 0:
        return {"not run": "needs two CUDA devices"}
    from fused_ops import rmsnorm_quantize
    from lp_fa4 import quantize_mx
    from lp_fa4.compile import multiprocessors

    assert torch.cuda.current_device() == 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        results = []
        for index in (0, 1):
            device = torch.device("cuda", index)
            pma = copy.deepcopy(context.pma()).to(device)
            values, offsets = (t.to(device) for t in context.batch(context.lengths(3), 3))
            leaf = values.clone().requires_grad_()
            out = pma(leaf, offsets)
            weight = torch.linspace(-1, 1, out[0].numel()).reshape(out.shape[1:]).to(device)
            grads = torch.autograd.grad(out, [leaf, *pma.parameters()], weight.to(out.dtype).expand(out.shape))
            mx = quantize_mx(values, (32, 32), offsets, token_dim=0)
            xn, rstd = rmsnorm_quantize(values, pma.kv_norm.weight, 1e-6, offsets)
            assert torch.cuda.current_device() == 0
            assert all(t.device == device for t in (out, *grads, mx.codes, xn.codes, rstd))
            results.append([out, *grads, mx.codes, mx.scale_bytes, xn.codes, xn.scale_bytes, rstd])
        for i, (first, second) in enumerate(zip(*results, strict=True)):
            assert torch.equal(first, second.to("cuda:0")), f"result {i} differs between the devices"
        pma = context.pma()
        values, offsets = context.batch([5, 40], 3)
        for arguments in ((values.to("cuda:1"), offsets), (values, offsets.to("cuda:1"))):
            try:
                pma(*arguments)
            except ValueError as error:
                assert "cuda:0" in str(error) and "cuda:1" in str(error), error
            else:
                raise AssertionError("tensors on two devices were accepted")
        counts = [multiprocessors(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        real = [torch.cuda.get_device_properties(i).multi_processor_count for i in range(torch.cuda.device_count())]
        assert counts == real
        return {"results equal bitwise": len(results[0]), "multiprocessors": counts}
    finally:
        torch.use_deterministic_algorithms(False)


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "ddp": ddp,
    "no_sync": no_sync,
    "fsdp": fsdp,
    "many_steps": many_steps,
    "recommender": recommender,
    "other_device": other_device,
    "ddp_bf16": ddp_bf16,
    "ddp_fp16": ddp_fp16,
}
"""Cases by name; ``run`` adds ``checkpoint``, which replaces the process group, and ``scaling``, which times."""
