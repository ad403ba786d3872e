"""A training job for torchrun: it goes on from its last checkpoint with however many ranks it finds itself started.

    elastic_job.py DIRECTORY EPOCHS [DOOMED_LOCAL_RANKS DOOMED_STEP]

On the node whose environment has DOOMED, the ranks stop before that step and wait for the SIGKILL that the test sends.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from speedswap import BatchSplitter
from speedswap.batching import elastic

SAMPLES, GLOBAL_BATCH, MAX_MICRO_BATCH, SEED = 41, 8, 2, 5


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), features, features.square().sum(1, keepdim=True))


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def save(path: Path, state: dict[str, object]) -> None:
    """Save atomically: a kill at any instant leaves the old checkpoint or the new one."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def train(directory: Path, epochs: int) -> None:
    doomed_step = int(os.environ.get("DOOMED", -1))
    model, optimizer, scheduler = training()
    sampler = elastic.ElasticSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=SEED)
    plan = elastic.plan(GLOBAL_BATCH, MAX_MICRO_BATCH)
    replica = DistributedDataParallel(model)
    splitter = BatchSplitter(replica, micro_batch_size=max(plan.micro_batch_sizes))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    history: list[dict[str, object]] = []  # the record of each checkpointed step

    checkpoint = directory / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        history = saved.pop("history")
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    loader = DataLoader(data(), batch_sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for ids, features, targets in sampler.batches(loader):
            if len(history) == doomed_step:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # which comes when the agent ends
                (directory / f"doomed.{os.getpid()}").touch()
                signal.pause()
            optimizer.zero_grad()
            shares: list[list[int]] = [[] for _ in range(plan.world_size)]
            dist.all_gather_object(shares, ids.tolist())
            seen = [sample for share in shares for sample in share]
            splitter.backward(lambda x, y: mse_loss(replica(x), y), features, targets)
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            history.append({"epoch": epoch, "seen": seen, "lr": lr, "world_size": plan.world_size})
            if plan.rank == 0:
                save(checkpoint, {"history": history, **{name: part.state_dict() for name, part in parts.items()}})
            dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
