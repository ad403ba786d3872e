"""Softmax losses over rows that ranks own, each with its own samples and negatives; one process has all of them."""

from __future__ import annotations

import torch
from places import owned

import speedswap
from speedswap.losses import LogUniformSampler, full_softmax, in_batch, sampled_softmax, target_ranks

ROWS, DIM, SAMPLES, STEPS = 60, 3, 6, 3


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    hidden = torch.randn(SAMPLES, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(ROWS, (SAMPLES,), generator=generator)
    return hidden, targets, LogUniformSampler(8, ROWS).sample(generator=generator)


def train(group, size, from_batch):
    """Train on every rank's batches, with the mean of their losses; rank 1 has no samples in the last step.

    Returns:
        Rows, biases, the gradient of this rank's hidden vectors, and of the whole table: losses and ranks of targets.
    """
    rows, biases = (
        speedswap.Embedding(ROWS, dim, dtype=torch.float64, seed=dim, padding_idx=5, storage=owned(group))
        for dim in (DIM, 1)
    )
    optimizer = torch.optim.Adam([*rows.parameters(), *biases.parameters()], lr=0.1)
    mine = range(size) if group is None else [group.rank()]
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for rank in mine:
            hidden, targets, negatives = batch_of(rank, step)
            if (rank, step) == (1, STEPS - 1):
                hidden, targets = hidden[:0], targets[:0]
            hidden.requires_grad_()
            negatives = in_batch() if from_batch else negatives
            losses.append(sampled_softmax(hidden, targets, rows, negatives, bias=biases))
            grads.append(hidden)
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    whole = []
    for rank in mine:
        hidden, targets, _ = batch_of(rank, 9)
        count = SAMPLES - 2 * rank  # ranks have unequal numbers
        hidden = hidden[:count].requires_grad_()
        loss = full_softmax(hidden, targets[:count], rows.table, bias=biases.table, reduction="sum", chunk=None)
        loss.backward()
        exclude = torch.full((count, 1), rank)
        ranks = target_ranks(hidden, targets[:count], rows, bias=biases, exclude=exclude)
        whole.append((loss.item(), hidden.grad, ranks))
    return rows.read(), biases.read(), [each.grad for each in grads], whole


def train_both(group, size):
    return [train(group, size, from_batch) for from_batch in (False, True)]


def misfit(group):
    """Give rank 1 targets that do not fit; return each rank's error."""
    rows = speedswap.Embedding(ROWS, DIM, storage=owned(group))
    targets = torch.ones(SAMPLES + group.rank()).long()
    try:
        sampled_softmax(torch.ones(SAMPLES, DIM), targets, rows, torch.arange(5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
