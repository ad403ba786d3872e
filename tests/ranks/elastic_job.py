"""A job of four processes, then of three, then of five, under torchrun's agent, which restarts it when one is killed.

    elastic_job.py FOLDER

The agent forks the ranks, so that torch is imported once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # once for all ranks: the first optimizer's step of each would import it
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torture.elastic_training import Doom, Training, expected, train

STEPS = 28
# The rank, and its call in a step or in a checkpoint (an exchange, or a change of files) at which each start ends. Of
# the first rank's calls in a checkpoint those from 19 on publish it.
DOOMS = {
    4: [(call % 4, "step", call) for call in (0, 2, 5, 8)] + [(0, "checkpoint", call) for call in (4, 19, 21, 22, 24)],
    3: [(call % 3, "step", call) for call in (1, 4, 7)] + [(1, "checkpoint", call) for call in (1, 7, 15, 18)],
}


def life(training: Training, world_size: int) -> None:
    """Train until the doom of this start of the job, which each rank reads on its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's, which forked this process
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    doom = None
    if restart < len(DOOMS.get(world_size, [])):
        rank, place, call = DOOMS[world_size][restart]
        doom = Doom(rank, 1, place, call)
    train(training, doom)


def launch(training: Training, world_size: int) -> int:
    """Run the job until it ends, or runs out of restarts; return how often a rank was killed."""
    kills = len(DOOMS.get(world_size, []))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"{world_size}",
        start_method="fork",
        max_restarts=max(0, kills - 1),
        monitor_interval=0.02,
    )
    try:
        elastic_launch(config, life)(training, world_size)
    except ChildFailedError:
        return kills
    return 0


if __name__ == "__main__":
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise ranks find the addresses of former ones
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the ranks collect only their own objects
    job = Training(Path(sys.argv[1]), STEPS)
    began = time.time()
    killed = {size: launch(job, size) for size in (4, 3, 5)}
    found, wanted = torch.load(job.folder / "result.pt"), expected(job)
    history = json.loads(found.pop("history"))
    worst = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    print(json.dumps({"killed": killed, "steps": history, "worst": worst, "seconds": time.time() - began}))
