"""A splitter's state is what memory allows, whatever the batch before it was saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedswap.batching import BatchSplitter


@pytest.mark.parametrize("most", [20, 10**9])
def test_resumed_run_splits_as_the_first_one_did_although_the_last_batch_was_short(most):
    """Memory holds ``most`` samples at once; an epoch ends with a batch of 3."""
    model = nn.Linear(4, 1)

    def sizes(splitter, batch_size):
        seen = []

        def loss_fn(inputs):
            if len(inputs) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            seen.append(len(inputs))
            return model(inputs).square().mean()

        splitter.backward(loss_fn, torch.ones(batch_size, 4))
        return seen

    first = BatchSplitter(model, check=False)
    sizes(first, 64)
    usual = sizes(first, 64)
    assert sizes(first, 3) == [3]
    resumed = BatchSplitter(model, check=False)
    resumed.load_state_dict(first.state_dict())
    assert sizes(resumed, 64) == usual
