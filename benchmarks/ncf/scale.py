"""Training large tables: the scale part of ``bench_ncf.py``."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap.apps.ncf import NCF, NcfSettings
from speedswap.apps.ncf.interactions import NcfBatch, NcfSplit, draw_batches, generate_split
from speedswap.apps.ncf.training import train_step

__all__ = ["batches_of", "run_scale"]

WARM_UP_STEPS = 50


def batches_of(settings: NcfSettings, split: NcfSplit, epoch: int) -> Iterator[NcfBatch]:
    drawn = {"size": settings.batch, "negatives": settings.negatives, "seed": settings.seed}
    return draw_batches(split.train, epoch=epoch, **drawn)


class Large:
    """The large tables and their optimizer, trained for as many steps as are asked for."""

    def __init__(self, args: argparse.Namespace, split: NcfSplit, storage: str) -> None:
        settings = NcfSettings(device=args.device, storage=storage, scratch=args.scratch, batch=args.batch)
        self._device = settings.compute_device()
        began = time.perf_counter()
        self.model = NCF(args.users, args.items, settings).to(self._device)
        self.optimizer = settings.make_optimizer(self.model)
        speedswap.attach(self.optimizer, self.model)
        self.tables = [self.model.user.table, self.model.item.table]
        for table in self.tables:
            table.write(0, table.read(0, 1))  # takes pinned memory, as the first step would
        self.make_seconds = time.perf_counter() - began
        self._losses = self._trained(settings, split, args.lookahead)

    def _trained(self, settings: NcfSettings, split: NcfSplit, lookahead: int) -> Generator[torch.Tensor, None, None]:
        for epoch in itertools.count():
            batches = batches_of(settings, split, epoch)
            for batch in self.model.prefetched(batches, self._device, lookahead):
                yield train_step(self.model, self.optimizer, batch)

    def train(self, steps: int) -> tuple[float, float]:
        """Return the seconds and the mean loss of the next steps."""
        began = time.perf_counter()
        loss = sum(itertools.islice(self._losses, steps), torch.zeros((), device=self._device)).item() / steps
        return time.perf_counter() - began, loss

    def flush(self) -> None:
        for table in self.tables:
            table.flush()

    def close(self) -> None:
        self._losses.close()
        self.model.close()


def run_scale(args: argparse.Namespace) -> dict[str, Any]:
    """Train large tables for a number of steps, with a clock and an eye on memory.

    The steps of ``--beside``'s storage run half before and half after these, each time with the files at rest.
    """
    began = time.perf_counter()
    split = generate_split(args.users, args.items, args.interactions, seed=0)
    generate_seconds = time.perf_counter() - began
    large = Large(args, split, args.storage)
    print(
        f"{len(split.train):,} interactions made in {generate_seconds:.1f} s, tables in {large.make_seconds:.1f} s:",
        *large.tables,
        sep="\n  ",
        flush=True,
    )
    tenth = args.steps // 10
    large.train(WARM_UP_STEPS)
    beside: list[float] = []
    if args.beside is not None:
        large.flush()
        other = Large(args, split, args.beside)
        other.train(WARM_UP_STEPS)
        beside += [tenth / other.train(tenth)[0] for _ in range(2)]
    marks = [large.train(tenth) for _ in range(10)]
    seconds = sum(took for took, _ in marks)
    speeds = [tenth / took for took, _ in marks]
    resident = resident_gib()
    large.flush()
    found = {
        "users": args.users,
        "items": args.items,
        "interactions": len(split.train),
        "width": large.model.user.embedding_dim,
        "optimizer": NcfSettings().optimizer,
        "storage": args.storage,
        "lookahead": args.lookahead,
        "batch": args.batch,
        "scores_a_step": args.batch * (1 + NcfSettings().negatives),
        "steps": 10 * tenth,
        "table_gib": round(sum(table.nbytes for table in large.tables) / 2**30, 3),
        "resident_gib": resident,
        "generate_seconds": round(generate_seconds, 2),
        "make_seconds": round(large.make_seconds, 2),
        "steps_per_second": round(10 * tenth / seconds, 2),
        "steps_per_second_by_tenth": [round(speed, 2) for speed in speeds],
        "loss_by_tenth": [round(loss, 4) for _, loss in marks],
    }
    print(
        f"{found['steps']:,} steps of {found['scores_a_step']:,} scores: {found['steps_per_second']:.1f} steps/s, "
        "by tenth " + " ".join(f"{speed:.1f}" for speed in speeds)
    )
    if args.beside is not None:
        beside += [tenth / other.train(tenth)[0] for _ in range(2)]
        other.close()
        speed = statistics.harmonic_mean(beside)
        ratio = speed / found["steps_per_second"]
        found["beside"] = {"storage": args.beside, "steps_per_second": round(speed, 2), "step_over": round(ratio, 3)}
        said = " ".join(f"{some:.1f}" for some in beside)
        print(f"{args.beside}: {speed:.1f} steps/s ({said}); a step in {args.storage} takes {ratio:.2f} times as long")
    print(", ".join(f"{name} {gib:.2f} GiB" for name, gib in resident.items()), flush=True)
    large.close()
    return found


def resident_gib() -> dict[str, float]:
    """Return the peak of resident memory, and its present size: the process's own, and of files."""
    names = {"VmHWM": "most", "VmRSS": "now", "RssAnon": "now_own", "RssFile": "now_files"}
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(tuple(names))}
    return {name: round(int(fields[key]) / 2**20, 3) for key, name in names.items() if key in fields}
