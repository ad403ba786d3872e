"""The fixed cost of a training step: 64 lookups, compared with torch's sparse gradients on one thread.

A table of 100,000 × 16 in ordinary memory is trained with SGD, and with Adam beside torch's SparseAdam. Both embeddings
are trained to the same weights first, then take turns.

    python benchmarks/bench_small_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import script
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam

import speedswap
from speedswap.apps.bench.measure import in_ms, steps_in_turn
from speedswap.apps.errors import WrongResultError

_ROWS, _DIM, _LOOKUPS = 100_000, 16, 64
_BATCHES = 64
_ATOL = 1e-5

# The time of our step over that of torch's: at most this.
GOALS = {"sgd": 1.6, "adam": 0.95}
_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer]]] = {
    "sgd": (SGD, SGD),
    "adam": (Adam, SparseAdam),
}


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes.

    Returns:
        The figures, as JSON can hold them: per optimizer the median ``seconds`` of a step, ``time_over`` torch's, and
        its ``goal``.

    Raises:
        WrongResultError: the weights that ours has trained differ from torch's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"threads": 1, "workload": {"rows": _ROWS, "dim": _DIM, "lookups": _LOOKUPS}} | {
            name: _compare(name, 400 if quick else 2000, 3 if quick else 15) for name in GOALS
        }
    finally:
        torch.set_num_threads(threads)


def _compare(name: str, steps: int, repeats: int) -> dict[str, Any]:
    batches = torch.randint(_ROWS, (_BATCHES, _LOOKUPS), generator=torch.Generator().manual_seed(0)).unbind()
    embeddings = {
        "speedswap": speedswap.Embedding(_ROWS, _DIM, storage="pageable"),
        "torch": nn.Embedding(_ROWS, _DIM, sparse=True),
    }
    ours, torchs = embeddings.values()
    with torch.no_grad():
        torchs.weight.copy_(ours.read())
    loops = {
        package: _loop(embedding, make(embedding.parameters(), lr=0.01), batches, steps)
        for (package, embedding), make in zip(embeddings.items(), _OPTIMIZERS[name], strict=True)
    }
    for loop in loops.values():
        for _ in loop(0):
            pass
    if not torch.allclose(ours.read(), torchs.weight, atol=_ATOL):
        raise WrongResultError(f"{name}: the rows trained by speedswap differ from those trained by torch")
    seconds = steps_in_turn(loops, steps=steps, repeats=repeats)
    ratio = seconds["speedswap"] / seconds["torch"]
    print(f"{name}: {in_ms(seconds['speedswap'])}, {ratio:.2f} of torch's {in_ms(seconds['torch'])}", flush=True)
    return {"seconds": seconds, "time_over": ratio, "goal": GOALS[name], "met": ratio <= GOALS[name]}


def _loop(
    embedding: nn.Module, optimizer: Optimizer, batches: Sequence[Tensor], steps: int
) -> Callable[[int], Iterator[None]]:
    def loop(repeat: int) -> Iterator[None]:
        for step in range(steps):
            embedding(batches[step % len(batches)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    return loop


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("small-step", __doc__, measure, argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
