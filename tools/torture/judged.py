"""Checkpoints among faults: errors that pass, flipped bits, folders that are moved, linked and removed by hand."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import CheckpointError, SpeedswapError
from torture.attack import Attack, Broken

ROWS, DIM = 300, 8
_ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ENOTCONN)
_CALLS = ("open", "pread", "preadv", "listdir", "lstat", "stat")


@dataclass
class _Run:
    """A training, its checkpoints, and what must be loaded from each.

    Attributes:
        rows: what each checkpoint holds, by its folder: the table's rows, and the dense weight.
        damaged: the folders in which a bit was flipped or a file cut, which need not load.
    """

    draw: random.Random
    folder: Path
    on_disk: bool
    rows: dict[Path, tuple[Tensor, Tensor]] = field(default_factory=dict)
    damaged: set[Path] = field(default_factory=set)
    step: int = 0

    def __post_init__(self) -> None:
        place: dict[str, Any] = {"path": self.folder / "table"} if self.on_disk else {"storage": "pageable"}
        self._begin(speedswap.Embedding(ROWS, DIM, seed=1, **place), torch.full((6, DIM), 0.5))

    def _begin(self, items: speedswap.Embedding, weight: Tensor) -> None:
        self.model = nn.Sequential(items, nn.Linear(DIM, 6, bias=False))
        with torch.no_grad():
            self.model[1].weight.copy_(weight)
        self.optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)

    @property
    def items(self) -> speedswap.Embedding:
        found: speedswap.Embedding = self.model[0]
        return found

    def reopen(self) -> None:
        """Go on as another process would."""
        if self.on_disk:
            self.items.table.close()
            items = speedswap.Embedding(ROWS, DIM, table=speedswap.Table.open(self.folder / "table"))
            self._begin(items, self.model[1].weight.detach().clone())

    def save(self, directory: str, keep: int | None, tables: str, **faults: Any) -> None:
        self.step += 1
        ids = torch.tensor(self.draw.choices(range(ROWS), k=10))
        self.optimizer.zero_grad()
        self.model(ids).square().sum().add(1).backward()
        self.optimizer.step()
        if self.draw.random() < 0.5:
            with torch.no_grad():
                self.model[1].weight.add_(1)
        now = self.items.read().clone(), self.model[1].weight.detach().clone()
        place = self.folder / directory
        good = self._good_in(place)
        try:
            with _failing(**faults) if faults else contextlib.nullcontext():
                saved = speedswap.save_checkpoint(
                    place, self.model, self.optimizer, step=self.step, keep=keep, tables=tables
                )
        except (OSError, MemoryError, SpeedswapError) as error:
            if not faults:
                raise
            del error
            self.rows.update(dict.fromkeys(place.glob(f"*-step-{self.step}"), now))
        else:
            self.rows[saved.path] = now
            self.damaged.discard(saved.path)
        left = self._good_in(place)
        least = len(good) if keep is None else min(keep, len(good))
        if len(left) < least:
            raise Broken(f"too few good checkpoints stay\nkeep={keep}: of {good}, {left}; damaged: {self.damaged}")

    def _good_in(self, place: Path) -> list[str]:
        return sorted(each.name for each in self.rows if each.parent == place and each.exists() and self._is_good(each))

    def _is_good(self, folder: Path) -> bool:
        return folder not in self.damaged

    def folders(self) -> list[Path]:
        return sorted(path for path in self.rows if path.exists())

    def move(self, folder: Path, how: str) -> None:
        """Move or link a checkpoint to another directory, or another disk, or remove it."""
        aside = self.folder / f"aside-{self.step}-{self.draw.randrange(10**6)}" / folder.name
        if how != "remove":
            aside.parent.mkdir()
            self.rows[aside] = self.rows[folder]
            if folder in self.damaged:
                self.damaged.add(aside)
        if how == "move":
            folder.rename(aside)
        elif how != "remove":
            shutil.copytree(folder, aside, copy_function=os.link if how == "link" else shutil.copy)
        if how in ("remove", "to another disk"):
            shutil.rmtree(folder)

    def damage(self, folder: Path) -> None:
        """Flip a bit, or cut a file, also for those that share it."""
        file = self.draw.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
        found = os.stat(file)
        for other in self.folders():
            if any(os.path.samestat(os.stat(each), found) for each in other.rglob("*")):
                self.damaged.add(other)
        if self.draw.random() < 0.8:
            with open(file, "r+b") as raw:
                place = self.draw.randrange(found.st_size)
                raw.seek(place)
                byte = raw.read(1)[0] ^ (1 << self.draw.randrange(8))
                raw.seek(place)
                raw.write(bytes([byte]))
        else:
            os.truncate(file, self.draw.randrange(found.st_size))

    def check(self, what: str) -> None:
        """Load every checkpoint: what was not damaged has its rows, and what was damaged has them or says so."""
        for folder in self.folders():
            model = nn.Sequential(speedswap.Embedding(ROWS, DIM, seed=2), nn.Linear(DIM, 6, bias=False))
            before = model[0].read().clone()
            try:
                speedswap.load_checkpoint(folder, model)
            except CheckpointError as error:
                if self._is_good(folder):
                    raise Broken(f"a checkpoint that nothing has damaged cannot be loaded\nafter {what}") from error
                if not torch.equal(model[0].read(), before):
                    raise Broken(f"a checkpoint that is refused has changed rows\nafter {what}") from error
                continue
            rows, weight = self.rows[folder]
            if not (torch.equal(model[0].read(), rows) and torch.equal(model[1].weight, weight)):
                raise Broken(f"a checkpoint is loaded with other bits than it was saved with\nafter {what}: {folder}")


@contextlib.contextmanager
def _failing(draw: random.Random, of: list[Path], rate: float) -> Iterator[None]:
    """Fail some calls on the files of some checkpoints, each by itself, as a disk on a network does."""
    real = {name: getattr(os, name) for name in _CALLS}

    def failing(name: str) -> Any:
        def call(what: Any, *args: Any, **settings: Any) -> Any:
            at = settings.get("dir_fd")
            with contextlib.suppress(OSError, TypeError, ValueError):
                if isinstance(what, int):
                    path = os.readlink(f"/proc/self/fd/{what}")
                else:
                    path = os.path.join("" if at is None else os.readlink(f"/proc/self/fd/{at}"), os.fspath(what))
                is_of = any(path.startswith(str(each)) for each in of)
                fails = is_of and draw.random() < rate
            if "fails" in locals() and fails:
                number = draw.choice(_ERRORS)
                raise OSError(number, os.strerror(number), path)
            return real[name](what, *args, **settings)

        return call

    try:
        for name in _CALLS:
            setattr(os, name, failing(name))
        yield
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def _round(seed: int, folder: Path) -> dict[str, int]:
    draw, kinds = random.Random(seed), Counter[str]()
    torch.manual_seed(seed)
    run = _Run(draw, folder, on_disk=draw.random() < 0.6)
    run.save("last", 1, "auto")
    for _ in range(12):
        what = draw.choice(
            ["save"] * 3 + ["fail"] * 2 + ["damage", "move", "to another disk", "link", "remove", "reopen"]
        )
        old = run.folders()
        if what in ("save", "fail"):
            faults = {"draw": draw, "of": old, "rate": draw.choice([0.05, 0.3, 1.0])} if what == "fail" else {}
            keep, tables = draw.choice([1, 1, 2, 3, None]), draw.choice(["auto", "auto", "auto", "copy"])
            run.save(draw.choice(["last", "last", "best"]), keep, tables, **faults)
        elif what == "reopen":
            run.reopen()
        elif old:
            chosen = draw.choice(old)
            if what == "damage":
                run.damage(chosen)
            else:
                run.move(chosen, what)
        kinds[what] += 1
        run.check(what)
    if run.on_disk:
        run.items.table.close()
    return dict(kinds)


ATTACK = Attack(
    name="judged",
    promise="whatever disks and hands do to other checkpoints, a good one is never let go, nor a damaged one counted",
    round=_round,
    seconds=120.0,
    quick=2,
)
