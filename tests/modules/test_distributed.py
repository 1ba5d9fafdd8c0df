"""PMA under DDP, FSDP2 and TorchRec's DistributedModelParallel: two processes, gloo, CPU.

In every case one rank's batch is empty: all its samples without events, or no samples at all. A rank that skipped work, left a
gradient None or chose another dtype for it would hang the others in a collective; the processes therefore have a deadline.
Each worker compares with the same step computed alone, on both ranks' batches, in its own process.
"""

import copy
import datetime
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from modules import PMA

WORLD = 2
DIM, SEEDS = 64, 3
BUSY = (0, 1, 31, 33, 128, 5)
EMPTY_KINDS = {"samples without events": (0, 0, 0), "no samples": ()}
PRECISIONS = ("mxfp8", "bf16")

pytestmark = pytest.mark.distributed


def launch(worker, tmp_path, seconds=60):
    """Run ``worker(rank)`` in two processes with a gloo group; an exception of either, or the deadline, fails the test."""
    running = mp.spawn(start, (worker, str(tmp_path / "rendezvous")), nprocs=WORLD, join=False)
    deadline = time.monotonic() + seconds
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < deadline, f"{worker.__name__} hangs: not done after {seconds} s"
    finally:
        for process in running.processes:
            if process.is_alive():
                process.kill()


def start(rank, worker, file):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # with it, torch.empty is NaN
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=30))
    try:
        worker(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # All is checked. Leave without the interpreter's teardown, in which a thread of TorchRec's libraries aborts the process now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


def batch(lengths, seed=1):
    return torch.randn(sum(lengths), DIM, generator=torch.Generator().manual_seed(seed)), offsets(lengths)


class Scorer(nn.Module):
    """PMA and a head, with a buffer that DDP broadcasts."""

    def __init__(self, precision):
        super().__init__()
        self.pma = PMA(DIM, 2, SEEDS, precision=precision)
        self.head = nn.Linear(DIM, 1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, values, bounds):
        return self.head(self.pma(values, bounds)).square().sum()


def gradients(model, batches):
    """Gradients of the mean over ranks, computed in one process."""
    alone = copy.deepcopy(model)
    for values, bounds in batches:
        (alone(values, bounds) / WORLD).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def ddp_worker(rank):
    for precision in PRECISIONS:
        for kind, empty in EMPTY_KINDS.items():
            for who_is_empty in range(WORLD):
                torch.manual_seed(rank)  # DDP broadcasts rank 0's parameters and buffers
                model = Scorer(precision)
                model.steps.fill_(rank + 1)
                parallel = nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
                batches = [batch(empty if r == who_is_empty else BUSY) for r in range(WORLD)]
                parallel(*batches[rank]).backward()
                assert model.steps == 1
                expected = gradients(model, batches)
                for name, p in model.named_parameters():
                    assert p.grad is not None and p.grad.dtype == p.dtype, (precision, kind, name)
                    assert torch.equal(p.grad, expected[name]), (precision, kind, name)
                with torch.no_grad():
                    parallel.module.pma.seed_embs.sub_(p.grad.sum())
                parallel(*batches[rank]).backward()  # a second step: the reducer was left in a usable state


def test_ddp_with_one_rank_empty(tmp_path):
    launch(ddp_worker, tmp_path)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("empty", EMPTY_KINDS.values(), ids=EMPTY_KINDS)
def test_an_empty_batch_alone_gives_zero_gradients(precision, empty):
    model = Scorer(precision)
    values, bounds = batch(empty)
    values.requires_grad_()
    model(values, bounds).backward()
    for name, p in model.pma.named_parameters():
        assert p.grad is not None and p.grad.dtype == p.dtype and not p.grad.any(), name
    assert values.grad is not None and values.grad.shape == (0, DIM)


def fsdp_worker(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for precision in PRECISIONS:
        for kind, empty in EMPTY_KINDS.items():
            torch.manual_seed(0)
            with torch.device("meta"):
                model = Scorer(precision)
            fully_shard(model.pma, mesh=mesh)
            fully_shard(model, mesh=mesh)
            model.to_empty(device="cpu")
            model.pma.reset_parameters()
            model.head.reset_parameters()
            model.steps.zero_()
            whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
            assert torch.equal(whole["pma.kv_norm.weight"], torch.ones(DIM)), "reset_parameters did not reach the norm"
            assert all(p.isfinite().all() and p.any() for p in whole.values())
            alone = Scorer(precision)
            alone.load_state_dict({**whole, "steps": torch.zeros(())})
            batches = [batch(BUSY if r == 0 else empty) for r in range(WORLD)]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model(*batches[rank])
            assert torch.equal(loss, alone(*batches[rank])), (precision, kind)
            loss.backward()
            expected = gradients(alone, batches)
            for name, p in model.named_parameters():
                assert p.grad is not None, (precision, kind, name)
                # The busy rank's gradient plus exact zeros, halved: exact whatever the order.
                assert torch.equal(p.grad.full_tensor(), expected[name]), (precision, kind, name)
            optimizer.step()
            for name, p in model.named_parameters():
                torch.testing.assert_close(
                    p.full_tensor(), whole[name] - 0.1 * expected[name], msg=lambda text, at=f"{precision}, {kind}, {name}": f"{at}: {text}"
                )
            model(*batches[rank])  # the parameters gather again after the step


def test_fsdp2_from_the_meta_device_with_one_rank_empty(tmp_path):
    launch(fsdp_worker, tmp_path)


ROWS = 40
LEARNING_RATE = 0.05


class Recommender(nn.Module):
    """An EmbeddingCollection whose rows PMA pools, and a head."""

    def __init__(self, precision):
        from modules.torchrec import JaggedPooling, embedding_collection

        super().__init__()
        self.embeddings = embedding_collection({"item": (ROWS, ("item", "viewed")), "action": (5, ("action",))}, DIM)
        self.pooling = JaggedPooling(PMA(DIM, 2, SEEDS, precision=precision), ("item", "action"), validate=True)
        self.head = nn.Linear(DIM, 1)

    def forward(self, keyed):
        return self.head(self.pooling(self.embeddings(keyed)))


def ids(lengths, seed):
    """item, action (equal lengths) and viewed (others), a KeyedJaggedTensor that an EmbeddingCollection survives."""
    from modules.torchrec import keyed_jagged

    generator = torch.Generator().manual_seed(seed)
    count = torch.tensor(lengths, dtype=torch.int32)
    total = int(count.sum())
    viewed = torch.ones_like(count)
    return keyed_jagged(
        {
            "item": (torch.randint(0, ROWS, (total,), generator=generator), count),
            "viewed": (torch.randint(0, ROWS, (len(lengths),), generator=generator), viewed),
            "action": (torch.randint(0, 5, (total,), generator=generator), count),
        }
    )


def copy_rows(sharded, whole):
    """Write the rows of the local shards of a ShardedTensor from the whole tensor."""
    for shard in sharded.local_shards():
        begin, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.detach().copy_(whole[begin : begin + count])


def gather(sharded, shape):
    """The whole tensor of a ShardedTensor, on every rank."""
    whole = torch.zeros(shape)
    for shard in sharded.local_shards():
        begin, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        whole[begin : begin + count] = shard.tensor
    dist.all_reduce(whole)
    return whole


def dmp_worker(rank):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    cpu = torch.device("cpu")
    # The fused kernel is named because TorchRec 1.8's default for the CPU, "dense", corrupts memory in this very setting, without us.
    by_rows = row_wise(compute_kernel="fused")
    for precision in PRECISIONS:
        torch.manual_seed(0)
        alone = Recommender(precision)
        for kind, empty in {"both busy": (4, 0, 37), "samples without events": (0, 0, 0)}.items():
            sharder = EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE})
            tables = construct_module_sharding_plan(
                alone.embeddings,
                per_param_sharding={"item": by_rows, "action": by_rows},
                sharder=sharder,
                local_size=WORLD,
                world_size=WORLD,
                device_type="cpu",
            )
            parallel = DistributedModelParallel(
                copy.deepcopy(alone),
                env=ShardingEnv.from_process_group(dist.group.WORLD),
                device=cpu,
                plan=ShardingPlan({"embeddings": tables}),
                sharders=[sharder],
            )
            state = parallel.state_dict()
            for name, whole in alone.state_dict().items():
                if name.startswith("embeddings."):
                    assert state[name].local_shards()[0].metadata.shard_sizes[0] < whole.shape[0], "not sharded by rows"
                    copy_rows(state[name], whole)
                else:
                    state[name].copy_(whole)
            batches = [ids(BUSY, 5), ids(empty, 6)]
            logits = parallel(batches[rank])
            expected = alone(batches[rank])
            assert torch.equal(logits, expected), (precision, kind)
            dense = dict(in_backward_optimizer_filter(parallel.named_parameters()))
            assert sorted(dense) == sorted(n for n, _ in alone.named_parameters() if not n.startswith("embeddings."))
            optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=LEARNING_RATE))
            logits.square().sum().backward()  # the tables' update is fused into this
            optimizer.step()
            reference = copy.deepcopy(alone)
            step = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
            for each in batches:
                (reference(each).square().sum() / WORLD).backward()
            step.step()
            state = parallel.state_dict()
            for name, whole in reference.state_dict().items():
                got = gather(state[name], whole.shape) if name.startswith("embeddings.") else state[name]
                # The same FP32 terms; a row that occurs several times, and the two ranks, may be added in another order.
                torch.testing.assert_close(
                    got, whole, rtol=1e-5, atol=1e-6, msg=lambda text, at=f"{precision}, {kind}, {name}": f"{at}: {text}"
                )


def test_sharded_by_torchrec_equals_unsharded(tmp_path):
    launch(dmp_worker, tmp_path)
