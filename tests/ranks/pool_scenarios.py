"""Scenarios of the pool itself: sums, failures, hangs."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from speedswap.collectives import RankGroup


def add_up(group, number):
    """Return the sum of the ranks' numbers, with where this rank is."""
    total = torch.tensor([number * group.rank()])
    dist.all_reduce(total, group=group)
    return int(total), group.rank(), group.size(), int(os.environ["RANK"]), torch.get_num_threads(), os.getppid()


def raise_on(group, rank):
    """Raise on one rank, while the others wait for it."""
    if group.rank() == rank:
        raise ValueError(f"this is rank {rank}")
    dist.barrier(group)


def end_on(group, rank):
    """End one rank's process; the others notice."""
    if group.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier(group)
    except RuntimeError:
        return "alone"
    return "together"


def hang(group):
    time.sleep(60)


def break_lanes(group):
    """Leave the lanes broken."""
    RankGroup.of(group).main.shut("they are broken")


def agree(group):
    return RankGroup.of(group).agree_on_seed(3)
