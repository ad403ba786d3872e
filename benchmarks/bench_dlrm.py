"""DLRM: samples per second of ``speedswap dlrm`` and of the same model in plain torch, from the same file.

    python benchmarks/bench_dlrm.py --json dlrm.json

Samples with Zipf's popularity are written to a file in Criteo's format, which all candidates read with the same reader.
Plain torch has an nn.EmbeddingBag per category with sparse gradients, dot products as matrix products, ids modulo the
number of rows, and each of its optimizers that take sparse gradients; ``speedswap dlrm`` is timed as the command
trains, with its id maps and its curve of loss and AUC. Before that, with Adagrad, its losses are compared with those of
torch's embeddings over the same rows: equal to the last bit.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import speedswap
from speedswap.apps.bench.measure import write_json
from speedswap.apps.dlrm import DLRM, DlrmSettings, GeneratedSamples, Samples
from speedswap.apps.dlrm.criteo import MISSING
from speedswap.apps.dlrm.model import COLUMNS, INIT_STD, Scores, interact_in_torch
from speedswap.apps.dlrm.stream import Data
from speedswap.apps.dlrm.training import POINT_SAMPLES, train_step

COMPARED_STEPS = 20
STEPS_A_TURN = 5
WARM_UP_TURNS = 3
OPTIMIZERS = ("sgd", "adagrad", "sparseadam")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each candidate, in turns of a few")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    DlrmSettings.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.device not in (None, "cpu"):
        parser.error(f"device is {args.device!r}: this benchmark measures the CPU; leave it out")
    steps = 60 if args.quick else args.steps
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        samples, test = write_samples(Path(folder), DlrmSettings.of(args), steps * args.batch)
        given = DlrmSettings.of(args, samples=(samples,), test=(test,), device="cpu")
        report = {
            "settings": given.to_json(samples=[], test=[], bottom=list(given.bottom), top=list(given.top)),
            "torch_threads": torch.get_num_threads(),
            "steps": steps,
            "adagrad_losses_equal": compare_losses(given),
            **time_all(given, steps),
        }
    if args.json:
        write_json(args.json, "dlrm", report)


def write_samples(folder: Path, settings: DlrmSettings, count: int) -> tuple[str, str]:
    """Write a file to train on, and one to test on."""
    source = GeneratedSamples(count + 1000, ids=settings.ids, seed=settings.seed)
    paths = folder / "samples.txt", folder / "test.txt"
    for path, left in zip(paths, (count, 1000), strict=True):
        with open(path, "w") as file:
            while left:
                some = source.read(min(left, 4096))
                file.write(text_of(some))
                left -= some.size
    return str(paths[0]), str(paths[1])


def text_of(samples: Samples) -> str:
    """Return samples as the lines of a file."""
    lines = []
    for label, integers, ids in zip(
        samples.labels.tolist(), samples.integers.T.tolist(), samples.ids.T.tolist(), strict=True
    ):
        categories = ("" if each == MISSING else f"{each:08x}" for each in ids)
        lines.append("\t".join([str(int(label)), *map(str, integers), *categories]) + "\n")
    return "".join(lines)


# ---------------------------------------------------------------------- plain torch


class TorchTables(nn.Module):
    """A vector per category from torch's own tables, one for each.

    Args:
        tables: bags, or embeddings.
        rows_of: turns ids, shape (26, n), into rows.
    """

    def __init__(self, tables: Iterable[nn.Module], rows_of: Callable[[Tensor], Iterable[Tensor]]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        self._rows_of = rows_of

    def forward(self, ids: Tensor) -> Tensor:
        offsets = [torch.arange(ids.shape[1])] if isinstance(self.tables[0], nn.EmbeddingBag) else []
        return torch.stack(
            [table(rows, *offsets) for table, rows in zip(self.tables, self._rows_of(ids), strict=True)], dim=1
        )


class PlainDLRM(DLRM):
    """The model without speedswap's loop for dot products."""

    def forward(self, samples: Samples) -> Tensor:
        integers = self.bottom(samples.integers.clamp(min=0).T.float().log1p())
        logits: Tensor = self.top(interact_in_torch(integers, self.embeddings(samples.ids)))
        return logits.squeeze(1)


def optimizers_of(model: DLRM, name: str, lr: float) -> list[Optimizer]:
    if name == "sparseadam":
        return [SparseAdam(model.embeddings.parameters(), lr=lr), Adam(model.dense().values(), lr=lr)]
    return [{"sgd": SGD, "adagrad": Adagrad}[name](model.parameters(), lr=lr)]


def train_in_torch(settings: DlrmSettings, name: str) -> Iterator[int]:
    """Train in plain torch; yield the number of samples after each step."""
    rows, lr = settings.capacity, settings.lr or 0.03
    initial = (INIT_STD * torch.randn(rows, settings.dim) for _ in COLUMNS)
    bags = (nn.EmbeddingBag.from_pretrained(each, freeze=False, mode="sum", sparse=True) for each in initial)
    tables = TorchTables(bags, lambda ids: ids % rows)
    model = PlainDLRM(settings, embeddings=tables)
    optimizers = optimizers_of(model, name, lr)
    for batch in Data(settings).batches():
        F.binary_cross_entropy_with_logits(model(batch.samples), batch.samples.labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield batch.samples.size


def train_in_speedswap(settings: DlrmSettings) -> Iterator[int]:
    """Train as ``speedswap dlrm`` does, with the figures of its progress bar."""
    model = DLRM(settings)
    optimizer = settings.make_optimizer(model)
    speedswap.attach(optimizer, model)
    data, scores, count = Data(settings), Scores(), 0
    for batch in model.prefetched(data.batches(), torch.device("cpu"), settings.lookahead_depth()):
        scores.add(train_step(model, optimizer, batch), batch.samples.labels)
        count += batch.samples.size
        if count >= POINT_SAMPLES:
            assert min(scores.log_loss, scores.auc) > 0
            scores, count = Scores(), 0
        yield batch.samples.size
    model.embeddings.close()


# ---------------------------------------------------------------------- comparisons


def compare_losses(settings: DlrmSettings) -> bool:
    """Check that with Adagrad every loss is that of nn.Embedding, whose sums have the order of the samples."""
    ours = DLRM(settings)
    rows = [table.read() for table in ours.embeddings.collection.tables.values()]
    tables = [nn.Embedding.from_pretrained(each, freeze=False, padding_idx=0) for each in rows]
    maps = [speedswap.IdMap(settings.capacity) for _ in rows]
    numbered = TorchTables(tables, lambda ids: (known.add(some)[0] for known, some in zip(maps, ids, strict=True)))
    theirs = DLRM(settings, embeddings=numbered)
    optimizers = [Adagrad(model.parameters(), lr=0.03) for model in (ours, theirs)]
    data = Data(settings)
    for _, batch in zip(range(COMPARED_STEPS), data.batches(), strict=False):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = F.binary_cross_entropy_with_logits(model(batch.samples), batch.samples.labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert losses[0].equal(losses[1]), f"{losses[0]} is not {losses[1]}"
    print(f"Adagrad, {COMPARED_STEPS} losses beside torch's embeddings: equal to the last bit", flush=True)
    return True


def time_all(settings: DlrmSettings, steps: int) -> dict[str, Any]:
    """Train all candidates in turn, a few steps each, and compare the medians of their rates."""
    training = {"speedswap": train_in_speedswap(settings)}
    training |= {name: train_in_torch(settings, name) for name in OPTIMIZERS}
    rates: dict[str, list[float]] = {name: [] for name in training}
    for turn in range(steps // STEPS_A_TURN):
        for name, candidate in training.items():
            began = time.perf_counter()
            samples = sum(itertools.islice(candidate, STEPS_A_TURN))
            if turn >= WARM_UP_TURNS:
                rates[name].append(samples / (time.perf_counter() - began))
    medians = {name: round(statistics.median(found)) for name, found in rates.items()}
    best = max(OPTIMIZERS, key=medians.__getitem__)
    for name, median in medians.items():
        label = f"speedswap dlrm, {settings.optimizer}" if name == "speedswap" else f"plain torch, {name}"
        print(f"{label:28} {median:9,} samples/s", flush=True)
    ratios = {name: compared(rates["speedswap"], rates[name]) for name in OPTIMIZERS}
    print(f"speedswap dlrm is {ratios[best]:.2f} times as fast as the best of plain torch, {best}")
    return {"samples_per_second": medians, "best_of_torch": best, "ratio": ratios[best], "ratios": ratios}


def compared(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the turns of how many times faster ours is."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    main()
