"""NCF: its quality compared with the same model in torch's memory, and the speed and memory of training large tables.

    python benchmarks/bench_ncf.py RATINGS --seeds 3 --json ncf.json
    python benchmarks/bench_ncf.py --users 5000000 --items 1000000 --interactions 20000000 --steps 3000 --scratch DIR
        --beside pageable

Quality: the default settings, best of 20 epochs, compared with nn.Embedding and torch's dense Adam on the very same
batches, from the same initial values. Before that, with Adagrad, the losses of the two are compared bit for bit.
Without RATINGS the interactions are made up.

Scale: tables of 64 numbers and Adam's two columns in files, trained with the default settings except the batch size:
steps per second in each tenth of the run, and peak resident memory, including that of ``--beside``'s storage if given.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from ncf.scale import batches_of, run_scale

import speedswap
from speedswap.apps.bench.measure import synchronize, write_json
from speedswap.apps.ncf import NCF, NcfSettings, train
from speedswap.apps.ncf.interactions import NcfSplit, generate_split
from speedswap.apps.ncf.model import Candidates, evaluate
from speedswap.apps.ncf.ratings import read_split
from speedswap.apps.ncf.training import train_step

COMPARED_STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", type=Path, nargs="?", help="as for speedswap ncf")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, every one with another seed")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--users", type=int, default=500_000, help="of the large tables")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--interactions", type=int, default=2_000_000)
    parser.add_argument("--batch", type=int, default=4096, help="interactions per step, each with four negatives")
    parser.add_argument("--steps", type=int, default=400, help="steps on the large tables")
    parser.add_argument("--storage", default="disk", help="of the large tables")
    parser.add_argument(
        "--beside", metavar="STORAGE", help="another one, for the same tables and steps, to compare with"
    )
    parser.add_argument("--scratch", type=Path, help="where their files go; the system's place by default")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--quick", action="store_true", help="fewer epochs, and smaller tables")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if args.quick:
        args.users, args.items, args.interactions = 50_000, 20_000, 200_000
        args.steps = min(args.steps, 100)
    epochs = args.epochs or (3 if args.quick else 20)
    # First, so that the peak of resident memory is that of this part.
    report: dict[str, Any] = {"torch_threads": torch.get_num_threads(), "scale": run_scale(args)}
    runs = [
        NcfSettings(ratings=args.ratings, epochs=epochs, seed=seed, device=args.device) for seed in range(args.seeds)
    ]
    report["adagrad_losses_equal"] = compare_losses(runs[0])
    print(f"Adagrad, {COMPARED_STEPS} losses beside nn.Embedding's: equal to the last bit")
    report["ratings"] = args.ratings.name if args.ratings else "made up"
    report["speedswap"] = [run_speedswap(settings) for settings in runs]
    report["torch_dense_adam"] = [run_dense(settings) for settings in runs]
    for name in ("speedswap", "torch_dense_adam"):
        means = {key: sum(run["best"][key] for run in report[name]) / len(runs) for key in ("hr", "ndcg")}
        report[name + "_mean"] = {key: round(value, 4) for key, value in means.items()}
        print(f"{name:16} mean of {len(runs)}: HR@10 {means['hr']:.4f}  NDCG@10 {means['ndcg']:.4f}")
    if args.json:
        write_json(args.json, "ncf", report)


# ---------------------------------------------------------------------- quality


class DenseNCF(torch.nn.Module):
    """A model of ours with its tables as nn.Embedding in torch's memory."""

    def __init__(self, ours: NCF) -> None:
        super().__init__()
        self.model = ours
        self.model.user = self._dense(ours.user)
        self.model.item = self._dense(ours.item)

    @staticmethod
    def _dense(embedding: speedswap.Embedding) -> torch.nn.Embedding:
        rows = embedding.table.read().to(embedding.weight.device)
        embedding.table.close()
        return torch.nn.Embedding.from_pretrained(rows, freeze=False)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(users, items)
        return scores


def split_of(settings: NcfSettings) -> NcfSplit:
    if settings.ratings is not None:
        return read_split(settings.ratings)
    return generate_split(settings.users, settings.items, settings.interactions, seed=settings.seed)


def model_of(settings: NcfSettings, split: NcfSplit) -> NCF:
    return NCF(split.train.num_users, split.train.num_items, settings).to(settings.compute_device())


def compare_losses(settings: NcfSettings) -> bool:
    """Check that with Adagrad every loss is that of the same model in torch's memory: exactly on the CPU."""
    device = settings.compute_device()
    split = split_of(settings)
    models = [model_of(settings, split), DenseNCF(model_of(settings, split))]
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.02) for model in models]
    for _, batch in zip(range(COMPARED_STEPS), batches_of(settings, split, 0), strict=False):
        batch = batch.to(device)
        ours, theirs = (train_step(m, o, batch) for m, o in zip(models, optimizers, strict=True))
        assert torch.equal(ours, theirs) or device.type != "cpu", f"{ours} is not {theirs}"
        assert torch.allclose(ours, theirs, rtol=1e-4), f"{ours} is far from {theirs}"
    return True


def run_speedswap(settings: NcfSettings) -> dict[str, Any]:
    result = train(settings, progress=False)
    result.model.close()
    assert result.best is not None
    found = {
        "seed": settings.seed,
        "optimizer": settings.optimizer,
        "lr": result.lr,
        "interactions": len(result.split.train),
        "popularity": result.baseline._asdict(),
        "best": result.best._asdict(),
        "training_seconds": round(result.training_seconds, 2),
    }
    say("speedswap", found)
    return found


def run_dense(settings: NcfSettings) -> dict[str, Any]:
    """Train with nn.Embedding and dense Adam; equal batches, candidates, initial values and learning rates."""
    device = settings.compute_device()
    split = split_of(settings)
    candidates = Candidates.draw(
        split, negatives=settings.test_negatives, at_most=settings.test_users, seed=settings.seed
    )
    model = DenseNCF(model_of(settings, split))
    optimizer = settings.make_optimizer(model)
    lr, taken = optimizer.param_groups[0]["lr"], 0
    best, seconds = (0.0, 0.0, 0), 0.0
    steps = settings.epochs * -(-len(split.train) // settings.batch)
    for epoch in range(settings.epochs):
        began = time.perf_counter()
        for batch in batches_of(settings, split, epoch):
            for group in optimizer.param_groups:
                group["lr"] = lr * settings.lr_left(taken / steps)
            train_step(model, optimizer, batch.to(device))
            taken += 1
        synchronize()
        seconds += time.perf_counter() - began
        best = max(best, (*evaluate(model, candidates, device), epoch + 1))
    found = {
        "seed": settings.seed,
        "best": dict(zip(("hr", "ndcg", "number"), best, strict=True)),
        "training_seconds": round(seconds, 2),
    }
    say("torch dense Adam", found)
    return found


def say(name: str, found: dict[str, Any]) -> None:
    best = found["best"]
    print(
        f"{name:16} seed {found['seed']}: HR@10 {best['hr']:.4f}  NDCG@10 {best['ndcg']:.4f}  "
        f"in epoch {best['number']}, {found['training_seconds']:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
