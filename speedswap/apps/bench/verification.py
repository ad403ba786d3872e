"""Does everyone who is timed train as torch does?"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speedswap.apps.bench.errors import WrongResultError
from speedswap.apps.bench.trainers import LEARNING_RATE, SPARSE, Contestant
from speedswap.apps.bench.workload import Batch, zipf_batches

__all__ = ["verify"]

_NUM_ROWS, _DIM, _LOOKUPS, _STEPS = 5000, 32, 4096, 3


def verify(optimizer: str, one: Contestant, device: str) -> None:
    """Check that one trains a small table as torch's sparse optimizer does in double precision.

    The gradients are eighths, so that their sum over an id's lookups is the same in any order; what is left are the
    roundings of the update itself, and these are close: ``rtol`` 1e-5, ``atol`` 1e-6 after three steps. A trainer that
    touches every row drifts apart from the second step on by definition, and takes one.

    Raises:
        WrongResultError: names the trainer, and the first row that is not what it should be.
    """
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(_NUM_ROWS, _DIM, generator=generator) - 0.5
    grad = torch.randint(-16, 17, (_LOOKUPS, _DIM), generator=generator) / 8
    batches = zipf_batches(_NUM_ROWS, _LOOKUPS, _STEPS, device, seed=5)
    taken = batches[:1] if one.dense else batches
    expected = _expected(optimizer, weights, taken, grad)
    trainer = one.make(_NUM_ROWS, _DIM, optimizer, device)
    try:
        trainer.load(weights)
        deque(trainer.steps(taken, grad.to(device)), maxlen=0)
        found = trainer.weights()
    finally:
        trainer.close()
    wrong = ~torch.isclose(found, expected, rtol=1e-5, atol=1e-6).all(dim=1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise WrongResultError(
            f"{one.name} trains {int(wrong.sum())} rows of {_NUM_ROWS} wrongly with {optimizer}: row {row} is "
            f"{found[row, :4].tolist()}… after {len(taken)} steps, and should be {expected[row, :4].tolist()}…"
        )


def _expected(optimizer: str, weights: Tensor, batches: Sequence[Batch], grad: Tensor) -> Tensor:
    embedding = nn.Embedding(_NUM_ROWS, _DIM, sparse=True, dtype=torch.float64)
    embedding.weight.data.copy_(weights)
    stepping = SPARSE[optimizer](list(embedding.parameters()), lr=LEARNING_RATE[optimizer])
    for batch in batches:
        embedding(batch.host).backward(grad.double())
        stepping.step()
        stepping.zero_grad()
    return embedding.weight.detach().float()
