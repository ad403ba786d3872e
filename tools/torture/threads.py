"""Several threads: each with a private embedding, or all on one table."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap.errors import TableClosedError
from speedswap.tables import Column
from torture.attack import Attack, Broken
from torture.interrupts import Trainer

__all__ = ["ATTACK"]

_SECONDS = 15.0  # after which a thread that has not ended hangs


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    play = rng.choice([_training, _training, _one_table, _one_table, _one_table, _garbage])
    with _frequent_switches():
        return play(rng, folder)


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let Python change threads after about every thousand instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _run(functions: list[Callable[[], None]]) -> None:
    """Run functions in a thread each, from one moment on; raise the first of their errors."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def guarded(function: Callable[[], None]) -> None:
        try:
            barrier.wait(_SECONDS)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise Broken(f"a thread has not ended within {_SECONDS:.0f} s")


# ---------------------------------------------------------------------- an embedding for each thread


def _training(rng: random.Random, folder: Path) -> str:
    """Check that threads that share nothing train as one alone does."""
    trainers = [Trainer(rng, folder / str(place), (2, 10, 30)) for place in range(rng.choice([2, 2, 3, 5]))]

    def train(trainer: Trainer, *, in_memory: bool) -> list[dict[str, Tensor]]:
        trainer.begin("table", in_memory=in_memory)
        trainer.train()
        rows = trainer.rows()
        trainer.close()
        return rows

    expected = [train(trainer, in_memory=True) for trainer in trainers]
    found: list[list[list[dict[str, Tensor]]]] = [[] for _ in trainers]
    before = torch.get_rng_state()

    def job(place: int) -> Callable[[], None]:
        return lambda: found[place].append(train(trainers[place], in_memory=False))

    _run([job(place) for place in range(len(trainers))])
    for trainer, alone, (ours,) in zip(trainers, expected, found, strict=True):
        for columns, rows in zip(ours, alone, strict=True):
            if columns.keys() != rows.keys():
                raise Broken(f"columns {sorted(columns)} in a thread, {sorted(rows)} alone: {trainer}")
            for name, values in rows.items():
                if not torch.equal(columns[name], values):
                    gap = float((columns[name] - values).abs().max())
                    raise Broken(f"{name} differs by {gap:.3g} from training in one thread: {trainer}")
    if not torch.equal(before, torch.get_rng_state()):
        raise Broken(f"torch's random numbers are not as before: {trainers[0]}")
    return f"{len(trainers)} trainers"


# ---------------------------------------------------------------------- one table for all


class _Shared:
    """A table whose rows hold one number each, in every column."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rows, self.dim = rng.choice([(64, 8), (500, 33), (5000, 64)])
        settings: dict[str, Any] = {"path": folder / "table"} if rng.random() < 0.5 else {"storage": "pageable"}
        self.table = speedswap.Table.create(self.rows, self.dim, **settings)
        self.items = speedswap.Embedding(self.rows, self.dim, table=self.table)
        self.items.weight.requires_grad_(False)
        self.folder = folder
        self.added = 0
        self.closes = rng.random() < 0.5
        self.calls = rng.choice([20, 100])
        self.seed = rng.randrange(2**31)

    def operation(self, name: str, number: int) -> Callable[[], None]:
        """Return a thread's loop of one operation."""
        rng = random.Random(self.seed + number)
        generator = torch.Generator().manual_seed(self.seed + number)

        def loop() -> None:
            for _ in range(self.calls if name not in ("save", "add") else 5):
                try:
                    getattr(self, f"_{name}")(rng, generator)
                except TableClosedError:
                    if not self.closes:
                        raise
                    return

        return loop

    def _some(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.rows, generator=generator)[: self.rows // 2]

    def _scatter(self, rng: random.Random, generator: torch.Generator) -> None:
        rows = self._some(generator)
        value = float(rng.randrange(1, 1000))
        self.table.scatter(rows, torch.full((len(rows), self.dim), value))

    def _write(self, rng: random.Random, generator: torch.Generator) -> None:
        start = rng.randrange(self.rows)
        count = rng.randrange(1, self.rows - start + 1)
        self.table.write(start, torch.full((count, self.dim), float(rng.randrange(1, 1000))))

    def _gather(self, rng: random.Random, generator: torch.Generator) -> None:
        self._require_whole(self.table.gather(self._some(generator), columns=["weight"]).weight, "gather")

    def _read(self, rng: random.Random, generator: torch.Generator) -> None:
        self._require_whole(self.table.read(), "read")

    def _look_up(self, rng: random.Random, generator: torch.Generator) -> None:
        self._require_whole(self.items(self._some(generator)), "lookup")

    def _look_ahead(self, rng: random.Random, generator: torch.Generator) -> None:
        batches = [self._some(generator) for _ in range(3)]
        items = speedswap.Embedding(self.rows, self.dim, table=self.table)
        items.weight.requires_grad_(False)
        for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):
            self._require_whole(items(ids), "lookup with lookahead")

    def _score(self, rng: random.Random, generator: torch.Generator) -> None:
        queries = torch.full((2, self.dim), 1.0 / self.dim)
        values = self.items.score(queries, 5).values
        if not torch.allclose(values, values.round(), atol=1e-2):
            raise Broken(f"score gave {values.tolist()} in a table of whole numbers: {self}")

    def _save(self, rng: random.Random, generator: torch.Generator) -> None:
        place = self.folder / f"saved-{rng.randrange(2**62)}"
        self.table.save(place)
        with speedswap.Table.open(place, mode="r") as saved:
            self._require_whole(saved.read(), "save")

    def _add(self, rng: random.Random, generator: torch.Generator) -> None:
        name = f"column_{rng.randrange(2**62)}"
        self.table.add_columns([Column(name, (rng.choice([1, 4]),), torch.float32, speedswap.init.constant(2.0))])
        values = self.table.read(column=name)
        if not bool((values == 2).all()):
            raise Broken(f"column {name!r} begins with {values.unique().tolist()[:8]}, not with 2: {self}")

    def _flush(self, rng: random.Random, generator: torch.Generator) -> None:
        self.table.flush()

    def _close(self, rng: random.Random, generator: torch.Generator) -> None:
        time.sleep(rng.random() * 0.05)
        self.table.close()

    def _require_whole(self, rows: Tensor, what: str) -> None:
        torn = (rows != rows[:, :1]).any(1)
        if bool(torn.any()):
            row = rows[torn][0].tolist()
            raise Broken(f"{what} gave a row that was never written: {sorted(set(row))[:8]}, {int(torn.sum())}: {self}")

    def __str__(self) -> str:
        return f"{self.table!r}, {self.calls} calls, closes {self.closes}"


def _one_table(rng: random.Random, folder: Path) -> str:
    shared = _Shared(rng, folder)
    names = ["scatter", "write", "gather", "read", "look_up", "look_ahead", "score", "save", "add", "flush"]
    chosen = ["scatter", *rng.choices(names, k=rng.choice([1, 2, 4]))]
    if shared.closes:
        chosen.append("close")
    try:
        _run([shared.operation(name, number) for number, name in enumerate(chosen)])
    except Broken as broken:
        raise Broken(f"{broken} ({', '.join(chosen)})") from broken
    if shared.closes:
        for call in (lambda: shared.table.gather(torch.tensor([0])), shared.table.read, shared.table.flush):
            try:
                call()
            except TableClosedError:
                continue
            raise Broken(f"a closed table was used without an error: {shared}")
    shared.table.close()
    return "one table, closed meanwhile" if shared.closes else "one table"


# ---------------------------------------------------------------------- tables that are freed


def _garbage(rng: random.Random, folder: Path) -> str:
    """Check that unclosed tables may be freed by any thread that collects them."""

    def makes(number: int) -> Callable[[], None]:
        def loop() -> None:
            for turn in range(8):
                path = folder / f"table-{number}-{turn}" if turn % 2 else None
                items = speedswap.Embedding(30, 4, path=path, init=speedswap.init.zeros())
                optimizer = torch.optim.Adagrad(items.parameters(), lr=1.0)
                items(torch.arange(5)).sum().backward()
                optimizer.step()
                items.itself = [items]  # type: ignore[assignment]

        return loop

    def collects() -> None:
        for _ in range(10):
            gc.collect()

    _run([*(makes(number) for number in range(rng.choice([1, 2, 3]))), collects])
    gc.collect()
    for path in sorted(folder.iterdir()):
        with speedswap.Table.open(path) as table:
            values = table.read()
        if not torch.allclose(values[:5], torch.tensor(-1.0)) or bool(values[5:].any()):
            raise Broken(f"a table that was freed has {values[:6].tolist()}, not -1 in rows 0 to 4, and 0 elsewhere")
    return "garbage"


ATTACK = Attack(
    name="threads",
    promise="threads with embeddings of their own train as one does; one table serves several, or says it is closed",
    round=_round,
    seconds=60.0,
    quick=4,
)
