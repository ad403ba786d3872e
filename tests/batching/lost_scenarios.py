"""Checks of what happens when a rank is gone for good."""

from __future__ import annotations

import os

import torch
from ranks_common import raised, small_model
from torch.nn.parallel import DistributedDataParallel

import speedswap
from speedswap import errors


def check_a_rank_that_dies_in_the_middle_of_a_batch_is_missed(rank, world_size):
    ddp = DistributedDataParallel(small_model())
    splitter = speedswap.BatchSplitter(ddp, micro_batch_size=2)

    def loss_fn(x):
        if rank == world_size - 1:
            os._exit(0)  # torchrun takes it for finished, and does not stop the others
        return ddp(x).square().mean()

    error = raised(lambda: splitter.backward(loss_fn, torch.zeros(4, 6).double()))
    assert type(error) is errors.PeerError, repr(error)
    assert all(parameter.grad is None for parameter in ddp.parameters())
