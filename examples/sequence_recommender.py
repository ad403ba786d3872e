"""Predict each user's next item among more items than fit in memory: a small transformer and a sampled softmax.

    python examples/sequence_recommender.py [u.data] [--items 10000000 --path items] [--epochs 20]

The file has a user, an item, a rating and a time per line, separated by tabs, as MovieLens's u.data, plain or gzip;
without one, users walk through made-up items. The model is that of Kang and McAuley, Self-attentive sequential
recommendation, 2018, trained to tell the next item from sampled ones. Each user's last item is kept for the evaluation,
where it is ranked among all items the user has not seen. Only the rows of a batch's items and negatives are in
the model's memory: --items makes the catalogue larger than the data, --path keeps it on disk.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import speedswap
from speedswap.losses import Negatives, UniformSampler, candidates, sampled_softmax, target_ranks

PADDING = 0  # before a sequence that is shorter than others; items are numbered from 1
CACHE_BYTES = 256 << 20  # of rows on disk


class Batch(NamedTuple):
    """Items that users took, those that came next, and negatives for all of them."""

    inputs: Tensor  # (users, length)
    targets: Tensor  # (users, length), PADDING before the first
    negatives: Negatives


class SequenceModel(nn.Module):
    """Vectors of users after each of their items, to be compared with the rows of candidates."""

    def __init__(self, num_items: int, dim: int, length: int, path: str | None) -> None:
        super().__init__()
        init = speedswap.init.normal(std=dim**-0.5)
        place = "auto" if path is None else speedswap.Disk(path, cache_bytes=CACHE_BYTES)
        self.items = speedswap.Embedding(num_items + 1, dim, padding_idx=PADDING, init=init, storage=place)
        self.positions = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, nhead=2, dim_feedforward=2 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        length = inputs.shape[1]
        hidden = self.items(inputs) * self.items.embedding_dim**0.5 + self.positions.weight[-length:]
        future = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        return self.encoder(hidden, mask=future)


def read(path: Path) -> list[list[int]]:
    """Return each user's items by time, as numbers from 1."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [line.split("\t") for line in lines if line.strip()]
    rows.sort(key=lambda row: float(row[3]))
    numbers, users = dict[str, int](), dict[str, list[int]]()
    for user, item, *_ in rows:
        users.setdefault(user, []).append(numbers.setdefault(item, len(numbers) + 1))
    return [items for items in users.values() if len(items) > 2]


def made_up(num_items: int = 60, users: int = 200, steps: int = 12) -> list[list[int]]:
    """Return walks from any item to the ones after it, in a circle."""
    starts = random.Random(0).choices(range(num_items), k=users)
    return [[(start + step) % num_items + 1 for step in range(steps)] for start in starts]


def padded(sequences: Sequence[Sequence[int]], length: int) -> Tensor:
    """Return the last items of each sequence, (sequences, length), with padding before the first."""
    last = [list(each[-length:]) for each in sequences]
    return torch.tensor([[PADDING] * (length - len(each)) + each for each in last])


def batches(users: Sequence[Sequence[int]], size: int, length: int, sampler: UniformSampler) -> Iterator[Batch]:
    order = torch.randperm(len(users)).tolist()
    for first in range(0, len(order), size):
        some = [users[user][:-1] for user in order[first : first + size]]  # without the last item
        inputs, targets = (padded(part, length) for part in ([each[:-1] for each in some], [each[1:] for each in some]))
        yield Batch(inputs, targets, sampler.sample())


def train_epoch(model: SequenceModel, optimizer: torch.optim.Optimizer, loader: Iterator[Batch]) -> float:
    """Take a step for each batch, with the next one's rows prefetched; return the mean loss."""
    model.train()
    losses = []

    def ids(batch: Batch) -> list[Tensor]:
        return [batch.inputs, candidates(batch.targets, batch.negatives, ignore_index=PADDING)]

    for inputs, targets, negatives in speedswap.lookahead(loader, {model.items: ids}):
        loss = sampled_softmax(model(inputs), targets, model.items, negatives, ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model: SequenceModel, users: Sequence[Sequence[int]], length: int) -> dict[str, float]:
    """Rank each user's last item among all items that the user has not seen."""
    model.eval()
    hidden = model(padded([each[:-1] for each in users], length))[:, -1]
    seen = [torch.tensor(each[:-1]) for each in users]
    ranks = target_ranks(hidden, torch.tensor([each[-1] for each in users]), model.items, exclude=seen)
    hits = (ranks <= 10).float()
    return {"HR@10": hits.mean().item(), "NDCG@10": (hits / (ranks + 1).log2()).mean().item()}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", nargs="?", type=Path, help="made-up walks by default")
    parser.add_argument(
        "--items", type=int, default=0, help="rows of the catalogue; as many as the data has by default"
    )
    parser.add_argument("--path", help="a directory for the table, on disk; in memory by default")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--negatives", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--users", type=int, default=1000, help="users in the evaluation")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    users = made_up() if args.ratings is None else read(args.ratings)
    length = min(args.length, max(map(len, users)) - 2)
    num_items = max(args.items, max(map(max, users)))
    model = SequenceModel(num_items, args.dim, length, args.path)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = UniformSampler(args.negatives, num_items + 1)
    print(f"{len(users):,} users, {num_items:,} items: {model.items.table!r}")
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, optimizer, batches(users, args.batch, length, sampler))
        print(f"epoch {epoch}: loss {loss:.4f}")
    found = evaluate(model, users[: args.users], length)
    print(", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    model.items.table.close()
    return found


if __name__ == "__main__":
    main()
