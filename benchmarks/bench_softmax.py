"""A training step of a softmax over 100,000 items: torch's over all rows, compared with sampled rows.

python benchmarks/bench_softmax.py [--device cpu|cuda] [--quick] [--json FILE]

A step is a lookup of the inputs, the loss, its backward pass and Adam. Torch's has one weight for inputs and outputs,
dense gradients and the whole matrix of logits, whose bytes the file has too; ``full_softmax`` trains as many rows in
chunks. Then the loss over frozen rows in chunks,
``full_softmax``, forward and backward, compared with ``F.cross_entropy`` over a frozen matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import script
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedswap
from speedswap.apps.bench.measure import in_turn
from speedswap.losses import LogUniformSampler, Negatives, full_softmax, sampled_softmax

ROWS, DIM, SAMPLES, NEGATIVES = 100_000, 64, 512, 1024


def torch_step(rows: Tensor, batches: Callable[[int], tuple[Tensor, Tensor]]) -> Callable[[int], object]:
    """Return a step over a dense weight and all rows."""
    items = nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    optimizer = torch.optim.Adam(items.parameters(), lr=1e-3)

    def step(call: int) -> None:
        inputs, targets = batches(call)
        F.cross_entropy(items(inputs) @ items.weight.T, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sampled_step(
    items: Any, parameters: Any, batches: Callable[[int], tuple[Tensor, Tensor]], negatives: int
) -> Callable[[int], object]:
    """Return a step over a table, or a plain embedding, and sampled rows."""
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    sampler = LogUniformSampler(negatives, items.num_embeddings)

    def step(call: int) -> None:
        inputs, targets = batches(call)
        sampled_softmax(items(inputs), targets, items, sampler).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def full_step(items: Any, parameters: Any, batches: Callable[[int], tuple[Tensor, Tensor]]) -> Callable[[int], object]:
    """Return a step over all rows of a table."""
    optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def step(call: int) -> None:
        inputs, targets = batches(call)
        full_softmax(items(inputs), targets, items).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def verify(rows: Tensor, batches: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    """Compare both losses, and the gradient of hidden vectors, with torch's."""
    inputs, targets = batches(0)
    frozen = speedswap.Embedding.from_pretrained(rows)
    every = Negatives(torch.arange(len(rows), device=rows.device))
    grads, losses = [], []
    for loss_of in (
        lambda hidden: F.cross_entropy(hidden @ rows.T, targets),
        lambda hidden: full_softmax(hidden, targets, frozen),
        lambda hidden: sampled_softmax(hidden, targets, frozen, every),
    ):
        hidden = rows[inputs].requires_grad_()
        losses.append(loss_of(hidden))
        losses[-1].backward()
        grads.append(hidden.grad)
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, grads[0], rtol=1e-3, atol=1e-6)


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure steps, then losses over frozen rows."""
    num_rows, samples, repeats = (10_000, 64, 3) if quick else (ROWS, SAMPLES, 7)
    rows = torch.randn(num_rows, DIM, device=device) * DIM**-0.5

    def batches(call: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(num_rows, (2, samples), generator=torch.Generator().manual_seed(call)).to(device)
        return ids[0], ids[1]

    verify(rows, batches)
    table = speedswap.Embedding.from_pretrained(rows.cpu(), freeze=False).to(device)
    whole = speedswap.Embedding.from_pretrained(rows.cpu(), freeze=False).to(device)
    plain = nn.Embedding.from_pretrained(rows.clone(), freeze=False)
    steps = in_turn(
        {
            "torch, all rows": torch_step(rows, batches),
            "full_softmax, all rows": full_step(whole, whole.parameters(), batches),
            "sampled_softmax over speedswap.Embedding": sampled_step(table, table.parameters(), batches, NEGATIVES),
            "sampled_softmax over nn.Embedding": sampled_step(plain, plain.parameters(), batches, NEGATIVES),
        },
        repeats=repeats,
    )
    frozen = speedswap.Embedding.from_pretrained(rows.cpu())

    def backward(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], object]:
        def step(call: int) -> None:
            inputs, targets = batches(call)
            loss_of(rows[inputs].requires_grad_(), targets).backward()

        return step

    losses = in_turn(
        {
            "F.cross_entropy": backward(lambda hidden, targets: F.cross_entropy(hidden @ rows.T, targets)),
            "full_softmax": backward(lambda hidden, targets: full_softmax(hidden, targets, frozen)),
        },
        repeats=repeats,
    )
    workload = {"rows": num_rows, "dim": DIM, "samples": samples, "negatives": NEGATIVES}
    for title, found in (("a training step", steps), ("loss and gradient of frozen rows", losses)):
        first = next(iter(found.values()))
        print(f"\n{title}: {samples} samples, {num_rows:,} × {DIM} on {device}")
        for name, took in found.items():
            print(f"  {name:<42} {took * 1e3:10.2f} ms {first / took:8.2f} × as fast", flush=True)
    return {
        "threads": torch.get_num_threads(),
        "workload": workload,
        "logits_bytes": samples * num_rows * 4,
        "step_seconds": steps,
        "loss_seconds": losses,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("softmax", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
