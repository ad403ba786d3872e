"""A training of a model whose table ranks own, which goes on from its last checkpoint with any number of ranks."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import speedswap
from speedswap.collectives import Lane

__all__ = ["Doom", "Training", "expected", "train"]

ROWS, DIM, SAMPLES, GLOBAL_BATCH, SEED = 700, 5, 40, 10, 3
_OF_FILES = ("mkdir", "rename", "link", "fsync")


@dataclass
class Doom:
    """The instant at which a rank ends by SIGKILL: at a call within one of its steps, or within a checkpoint.

    Attributes:
        rank: that ends.
        step: the number of the training step, from this start of the job on.
        place: ``step`` or ``checkpoint``.
        call: the number of the call, of an exchange between ranks or of one that changes files, from 0. Where there
            are fewer, the rank ends after the step.
    """

    rank: int
    step: int
    place: str
    call: int

    def arm(self) -> Callable[[str], None]:
        """Count the calls; return a function that starts counting in another place."""
        left = [-1]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
                return function(*args, **kwargs)

            return call

        for name in ("exchange_lines", "exchange_rows"):
            setattr(Lane, name, counted(getattr(Lane, name)))
        for name in _OF_FILES:
            setattr(os, name, counted(getattr(os, name)))

        def begin(place: str) -> None:
            left[0] = self.call if place == self.place else -1

        return begin


@dataclass
class Training:
    """The settings of a job.

    Attributes:
        folder: of its files.
        steps: optimizer steps in all.
        on_disk: whether the ranks' rows are in files.
        optimizer: ``Adam``, ``Adagrad`` or ``SGD``.
    """

    folder: Path
    steps: int
    on_disk: bool = False
    optimizer: str = "Adam"

    def parts(self, group: dist.ProcessGroup | None) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        """Return model and optimizer."""
        torch.manual_seed(2)
        each = speedswap.Disk(self.folder / "rows", cache_bytes=1 << 16) if self.on_disk else "auto"
        place = "auto" if group is None else speedswap.Ranks(each, group, reduction="sum")
        rows = speedswap.Embedding(ROWS, DIM, padding_idx=1, seed=SEED, dtype=torch.float64, storage=place)
        model = nn.ModuleDict({"rows": rows, "head": nn.Linear(DIM, 1, dtype=torch.float64)})
        make: Any = getattr(torch.optim, self.optimizer)
        settings = {"lr": 0.05, "momentum": 0.9} if self.optimizer == "SGD" else {"lr": 0.05}
        return model, make(model.parameters(), **settings)

    def sampler(self) -> speedswap.batching.elastic.ElasticSampler:
        return speedswap.batching.elastic.ElasticSampler(SAMPLES, global_batch_size=GLOBAL_BATCH, seed=SEED)


def loss_of(model: nn.ModuleDict, samples: Tensor) -> Tensor:
    """Return the share of some samples in the loss of a global batch."""
    ids = torch.stack([samples, samples * 17 % ROWS, samples * samples % 50], dim=1)
    found = model["head"](model["rows"](ids).tanh().sum(1))
    return (found.squeeze(1) - samples / SAMPLES).square().sum() / GLOBAL_BATCH


def expected(training: Training) -> dict[str, Tensor]:
    """Return the final state of one uninterrupted process."""
    model, optimizer = training.parts(None)
    sampler = training.sampler()
    for _ in range(training.steps):
        samples = torch.tensor(sampler.global_batch(sampler.batch))
        sampler.advance()
        optimizer.zero_grad()
        loss_of(model, samples).backward()
        optimizer.step()
    return result_of(model, optimizer)


def result_of(model: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return rows, dense layers and the rows' state; every rank calls this."""
    state = optimizer.state_dict()["state"][0]
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    return {"rows": model["rows"].read(), "head": model["head"].weight.detach(), **whole}


def train(training: Training, doom: Doom | None = None, tell: Callable[[str], None] = print) -> None:
    """Train in a process of a job, as torchrun has described it in the environment.

    ``result.pt`` has the final state, and ``history`` a line per step that has a checkpoint.

    Args:
        training: the job.
        doom: the end of a rank.
        tell: called when the ranks have found each other.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    begin: Callable[[str], None] = lambda place: None  # noqa: E731
    if doom is not None and doom.rank == rank:
        begin = doom.arm()
    model, optimizer = training.parts(dist.group.WORLD)
    tell("together")
    sampler, checkpoints = training.sampler(), training.folder / "checkpoints"
    done, history = 0, Counter[str]()
    if any(checkpoints.glob("0*")):
        loaded = speedswap.load_checkpoint(checkpoints, model, optimizer, extra={"sampler": sampler})
        done, history = loaded.step, Counter(loaded.extra["history"])
    else:
        speedswap.save_checkpoint(checkpoints, model, optimizer, extra={"sampler": sampler, "history": {}})
    first = done
    while done < training.steps:
        is_doomed = doom is not None and done - first == doom.step
        samples = torch.tensor(sampler.global_batch(sampler.batch))
        sizes = speedswap.batching.elastic.even_sizes(len(samples), world_size)
        mine = samples[sum(sizes[:rank]) :][: sizes[rank]]
        sampler.advance()
        begin("step" if is_doomed else "")
        optimizer.zero_grad()
        loss_of(model, mine).backward()
        for parameter in model["head"].parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        done += 1
        history[str(world_size)] += 1
        begin("checkpoint" if is_doomed else "")
        extra = {"sampler": sampler, "history": dict(history)}
        speedswap.save_checkpoint(checkpoints, model, optimizer, step=done, extra=extra)
        begin("")
        if is_doomed and doom is not None and doom.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)  # there were fewer calls
    result = result_of(model, optimizer)
    if rank == 0:
        torch.save({"history": json.dumps(history), **result}, training.folder / "result.pt")
    model["rows"].table.close()
    dist.barrier()
    dist.destroy_process_group()
