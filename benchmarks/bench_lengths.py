"""Samples of different lengths in limited memory: padding computed, and work lost to running out of memory.

Twelve batches of sentences, of which every fourth has a few long ones, through an attention layer. On a GPU torch's
allocator ends the memory, on the CPU tensors are counted.

    python benchmarks/bench_lengths.py [--device cpu|cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import script
import torch
import torch.nn.functional as F
from peers import find_peer
from torch import Tensor, nn

import speedswap
from speedswap._words import pip_install
from speedswap.apps.bench.measure import show_peers
from speedswap.batching import Padded
from speedswap.batching.memory import is_out_of_memory, limited

MEMORY = 8 << 20
VOCABULARY = 200
WIDTH = 32


class Reader(nn.Module):
    """An attention layer, which takes memory with the square of the length, between embeddings and scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        scores = (self.query(hidden) @ hidden.transpose(1, 2)).masked_fill((ids == 0)[:, None], -1e9)
        return self.out(F.gelu(self.wide(scores.softmax(-1) @ hidden)))


class Corpus:
    """Batches of sentences, mostly short; every fourth batch has a few long ones."""

    def __init__(self, device: str, batches: int, samples: int) -> None:
        generator = random.Random(0)
        torch.manual_seed(1)
        self.device = device
        self.batches = []
        for number in range(batches):
            lengths = [min(200, max(2, int(generator.lognormvariate(3.0, 0.7)))) for _ in range(samples)]
            if number % 4 == 3:
                lengths[:3] = [160, 180, 200]
            ids = torch.randint(1, VOCABULARY, (samples, max(lengths)), device=device)
            self.batches.append(
                (ids * (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).to(device), lengths)
            )

    @property
    def tokens(self) -> int:
        return sum(sum(lengths) for _, lengths in self.batches)


class Counted:
    """The sum of a model's losses over tokens, which keeps the shape of what it is called with."""

    def __init__(self, model: Reader) -> None:
        self.model = model
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, ids: Tensor) -> Tensor:
        self.shapes.append((ids.shape[0], ids.shape[1]))
        return F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum")

    def tokens(self, samples: int) -> tuple[int, int]:
        """Return the tokens of the calls that have made up the batch, padding included, and of those before, lost."""
        kept = 0
        while samples > 0:
            count, longest = self.shapes.pop()
            samples, kept = samples - count, kept + count * longest
        lost = sum(count * longest for count, longest in self.shapes)
        self.shapes.clear()
        return kept, lost


Step = Callable[[Counted, Tensor, list[int]], None]


def splitting(model: Reader, *, cuts: bool, **options: Any) -> Step:
    """Return a step of a splitter, which is told the lengths or not."""
    splitter = speedswap.BatchSplitter(model, memory=MEMORY, reduction="sum", check=False, **options)

    def step(loss_fn: Counted, ids: Tensor, lengths: list[int]) -> None:
        splitter.backward(loss_fn, Padded(ids, lengths) if cuts else ids)

    return step


def finding(model: Reader) -> Step:
    """Return a step of accelerate's ``find_executable_batch_size``, around each batch; it keeps the size it finds."""
    from accelerate.utils import find_executable_batch_size

    given: list[Any] = []

    @find_executable_batch_size(starting_batch_size=64)
    def loop(batch_size: int) -> None:
        loss_fn, ids = given
        model.zero_grad()
        try:
            with limited(MEMORY, [ids.device]):
                for some in ids.split(batch_size):
                    loss_fn(some).backward()
        except RuntimeError as error:
            if is_out_of_memory(error):  # in words that it knows
                raise RuntimeError("CUDA out of memory.") from None
            raise

    def step(loss_fn: Counted, ids: Tensor, lengths: list[int]) -> None:
        given[:] = loss_fn, ids
        loop()

    return step


def run(device: str, quick: bool) -> dict[str, Any]:
    """Take the gradients of the same batches in each way, and compare them."""
    peer = find_peer("accelerate", "accelerate", pip_install("accelerate", extra="benchmarks"))
    show_peers({"accelerate": peer})
    corpus = Corpus(device, batches=4 if quick else 12, samples=32)
    ways: dict[str, Callable[[Reader], Step]] = {
        "speedswap, samples, padded to the batch": lambda model: splitting(model, cuts=False),
        "speedswap, samples": lambda model: splitting(model, cuts=True),
        "speedswap, tokens": lambda model: splitting(model, cuts=True, micro_batch_tokens="auto"),
        "speedswap, 512 tokens": lambda model: splitting(model, cuts=True, micro_batch_tokens=512),
    }
    if peer.present:
        ways["accelerate, find_executable_batch_size"] = finding
    rows: dict[str, Any] = {}
    for name, make in ways.items():
        model = Reader().to(device)
        step, loss_fn = make(model), Counted(model)
        kept = lost = batches_retried = 0
        squares = 0.0
        begin = time.perf_counter()
        for ids, lengths in corpus.batches:
            model.zero_grad()
            step(loss_fn, ids, lengths)
            of_batch, in_vain = loss_fn.tokens(len(lengths))
            kept, lost, batches_retried = kept + of_batch, lost + in_vain, batches_retried + (in_vain > 0)
            squares += sum(
                float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None
            )
        rows[name] = {
            "padding_share": 1 - corpus.tokens / kept,
            "lost_share": lost / (kept + lost),
            "batches_retried": batches_retried,
            "seconds": time.perf_counter() - begin,
            "squared_gradients": squares,
        }
    wanted = next(iter(rows.values()))["squared_gradients"]
    for name, row in rows.items():
        if not math.isclose(row.pop("squared_gradients"), wanted, rel_tol=1e-4):
            raise SystemExit(f"{name} does not give the gradients of the others")
    return {
        "device": device,
        "peers": {"accelerate": peer._asdict()},
        "memory_bytes": MEMORY,
        "batches": len(corpus.batches),
        "tokens": corpus.tokens,
        "ways": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("lengths", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
