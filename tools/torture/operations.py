"""Operations on tables in files that are killed half-way: the old table or the new one, and nothing left over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap.errors import TableFormatError
from torture.attack import Attack, Broken
from torture.processes import Calls, child

ROWS, DIM = 300, 4
State = dict[str, Tensor]
Call = Callable[[], None]
COLUMNS = [
    speedswap.Column("momentum", (DIM,), torch.float32, speedswap.init.normal()),
    speedswap.Column("count", (), torch.int64, speedswap.init.zeros()),
]


@dataclass(frozen=True)
class Operation:
    """An operation on the table ``here``, or with it on ``there``.

    Attributes:
        prepare: creates the initial state.
        operate: runs the operation, given the folder; calls ``begin`` just before, and ``done`` afterwards.
        mixes: rows may be partly the old and partly the new ones.
    """

    prepare: Callable[[Path], None]
    operate: Callable[[Path, Call, Call], None]
    mixes: bool = False


# ---------------------------------------------------------------------- what is done


def _nothing(folder: Path) -> None:
    pass


def _unwritten(folder: Path) -> None:
    speedswap.Table.create(ROWS, DIM, path=folder / "here", init=speedswap.init.normal(), seed=3).close()


def _written(folder: Path) -> None:
    with speedswap.Table.create(ROWS, DIM, path=folder / "here") as table:
        table.scatter(torch.arange(0, ROWS, 3), _values(ROWS // 3, 1.0))
        table.attributes["note"] = 1


def _with_columns(folder: Path) -> None:
    _written(folder)
    with speedswap.Table.open(folder / "here") as table:
        table.add_columns(COLUMNS)
        table.write(0, torch.full((ROWS, DIM), 5.0), column="momentum")


def _two(folder: Path) -> None:
    _written(folder)
    with speedswap.Table.create(ROWS // 2, DIM, path=folder / "there", init=speedswap.init.uniform()) as table:
        table.attributes["note"] = 7


def _values(count: int, start: float) -> Tensor:
    return start + torch.arange(float(count * DIM)).view(count, DIM)


def _create(**options: Any) -> Callable[[Path, Call, Call], None]:
    def operate(folder: Path, begin: Call, done: Call) -> None:
        begin()
        table = speedswap.Table.create(ROWS, DIM, path=folder / "here", **options)
        done()
        table.close()

    return operate


def _on_table(work: Callable[[speedswap.Table, Path], None]) -> Callable[[Path, Call, Call], None]:
    def operate(folder: Path, begin: Call, done: Call) -> None:
        table = speedswap.Table.open(folder / "here")
        begin()
        work(table, folder)
        done()
        table.close()

    return operate


def _opened(folder: Path, begin: Call, done: Call) -> None:
    begin()
    speedswap.Table.open(folder / "here").close()
    done()


def _loaded(folder: Path, begin: Call, done: Call) -> None:
    begin()
    speedswap.Table.load(folder / "here")
    done()


def _attached(table: speedswap.Table, folder: Path) -> None:
    items = speedswap.Embedding(ROWS, DIM, table=table)
    speedswap.attach(torch.optim.Adam(items.parameters()), items)


def _noted(table: speedswap.Table, folder: Path) -> None:
    table.attributes["note"] = 2
    table.flush()


def _from_memory(folder: Path, begin: Call, done: Call) -> None:
    table = speedswap.Table.create(ROWS, DIM, init=speedswap.init.uniform(), seed=11)
    begin()
    table.save(folder / "there")
    done()


OPERATIONS = {
    "create": Operation(_nothing, _create()),
    "create, init": Operation(_nothing, _create(init=speedswap.init.normal(), seed=5)),
    "create, function": Operation(_nothing, _create(init=torch.nn.init.ones_)),
    "create in folders": Operation(_nothing, _create(stored_dtype=torch.bfloat16, init=speedswap.init.uniform())),
    "open": Operation(_written, _opened),
    "load": Operation(_written, _loaded),
    "add_columns, unwritten": Operation(_unwritten, _on_table(lambda table, folder: table.add_columns(COLUMNS))),
    "add_columns, written": Operation(_written, _on_table(lambda table, folder: table.add_columns(COLUMNS))),
    "attach, unwritten": Operation(_unwritten, _on_table(_attached)),
    "attach, written": Operation(_written, _on_table(_attached)),
    "reset_columns": Operation(
        _with_columns, _on_table(lambda table, folder: table.reset_columns(COLUMNS)), mixes=True
    ),
    "write": Operation(_with_columns, _on_table(lambda table, folder: table.write(0, _values(ROWS, 9.0))), mixes=True),
    "first scatter": Operation(
        _unwritten,
        _on_table(lambda table, folder: table.scatter(torch.arange(ROWS), _values(ROWS, 9.0))),
        mixes=True,
    ),
    "flush": Operation(_written, _on_table(_noted)),
    "save": Operation(_written, _on_table(lambda table, folder: table.save(folder / "there"))),
    "save from memory": Operation(_nothing, _from_memory),
    "save over": Operation(_two, _on_table(lambda table, folder: table.save(folder / "there", overwrite=True))),
}


# ---------------------------------------------------------------------- a round


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    if draw.random() < 0.1:
        return _made_again(draw, folder)
    name = draw.choice(list(OPERATIONS))
    operation = OPERATIONS[name]
    whole, killed = folder / "whole", folder / "killed"
    for each in (whole, killed):
        each.mkdir()
        operation.prepare(each)
    old = states(whole)
    calls, seconds = _completed(operation, whole, folder / "log-whole")
    new = states(whole)
    how = draw.choice(["before a call", "after a call", "any time"])
    for _ in range(draw.choice([1, 1, 2])):  # the cleanup after a kill may be killed too
        number = draw.randrange(1, calls + 1)
        with child(_dies, operation, killed, 0 if how == "any time" else number, how, log=folder / "log") as process:
            if process.line() is not None and how == "any time":
                time.sleep(draw.uniform(0, 1.5 * seconds))
                process.kill()
            if process.wait() == 1:
                said = process.said()
                if "exists" in said.splitlines()[-1] or "TableFormatError" in said:
                    break  # the previous kill left something there, which is checked below
                raise Broken(f"an operation failed after a kill\n{name}: {said}")
    _check(operation, name, how, whole, killed, old, new)
    return name


_GROUPS = [
    speedswap.EmbeddingConfig(name=f"{dim}", num_embeddings=ROWS, embedding_dim=dim, seed=1) for dim in (2, 3, 5)
]


def _collection(folder: Path, begin: Call, done: Call) -> None:
    begin()
    try:
        speedswap.EmbeddingCollection(_GROUPS, path=folder / "groups").close()
    except FileExistsError:
        speedswap.EmbeddingCollection.open(_GROUPS, folder / "groups").close()
    done()


def _made_again(draw: random.Random, folder: Path) -> str:
    """Kill processes that create a collection; the next one finds it, or creates it."""
    operation = Operation(_nothing, _collection)
    calls, _ = _completed(operation, folder, folder / "log-whole")
    expected, path = _of_collection(folder / "groups"), folder / "killed" / "groups"
    for _ in range(draw.choice([1, 2, 3])):
        number, how = draw.randrange(1, calls + 1), draw.choice(["before a call", "after a call"])
        with child(_dies, operation, path.parent, number, how, log=folder / "log") as process:
            process.line()
            if process.wait() not in (0, -9):
                raise Broken(f"a collection whose maker was killed cannot be made again\n{process.said()}")
    _collection(path.parent, lambda: None, lambda: None)
    found = _of_collection(path)
    if not all(torch.equal(found[name], rows) for name, rows in expected.items()):
        raise Broken(f"a second try to make a collection gives other rows\n{listed(path)}")
    if len([*path.iterdir()]) > len(_GROUPS):
        raise Broken(f"files of a killed maker stay in a collection\n{listed(path)}")
    return "collection"


def _of_collection(path: Path) -> State:
    collection = speedswap.EmbeddingCollection.open(_GROUPS, path)
    rows = {name: table.read() for name, table in collection.tables.items()}
    collection.close()
    return rows


def _completed(operation: Operation, folder: Path, log: Path) -> tuple[int, float]:
    """Run it without a kill; return the number of calls and seconds it takes."""
    with child(_does, operation, folder, log=log) as process:
        line = process.line()
        if line is None or process.wait():
            raise Broken(f"an operation failed\n{process.said()}")
        calls, seconds = line.split()
        return int(calls), float(seconds)


def _does(tell: Callable[[str], None], operation: Operation, folder: Path) -> None:
    calls, before, start = Calls(), 0, 0.0

    def begin() -> None:
        nonlocal before, start
        before, start = calls.number, time.perf_counter()

    operation.operate(folder, begin, lambda: None)
    tell(f"{max(1, calls.number - before)} {time.perf_counter() - start}")


def _dies(tell: Callable[[str], None], operation: Operation, folder: Path, number: int, how: str) -> None:
    def begin() -> None:
        if number:
            Calls(number, before=how == "before a call")
        tell("begins")

    operation.operate(folder, begin, lambda: None)


def states(folder: Path) -> dict[str, State | None]:
    return {name: _state(folder / name) if (folder / name).exists() else None for name in ("here", "there")}


def _state(path: Path) -> State:
    with speedswap.Table.open(path, mode="r") as table:
        state = {column: table.read(column=column) for column in table.columns}
        return {**state, "note": torch.tensor(table.attributes.get("note", 0))}


# ---------------------------------------------------------------------- what must be there


def _check(
    operation: Operation,
    name: str,
    how: str,
    whole: Path,
    killed: Path,
    old: dict[str, State | None],
    new: dict[str, State | None],
) -> None:
    what = f"{name}, killed {how}: {listed(killed)}"
    check_tables(operation, killed, old, new, what)
    left = {path.name for path in killed.iterdir()} - {path.name for path in whole.iterdir()}
    if left:
        raise Broken(f"files of a killed operation stay beside the table\n{sorted(left)}; {what}")
    for place in ("here", "there"):
        if (killed / place).exists() and (whole / place).exists():
            ours, theirs = (len(list((each / place).iterdir())) for each in (killed, whole))
            if ours > theirs:
                raise Broken(f"files of a killed operation stay in the table\n{listed(killed)}; {what}")


def check_tables(
    operation: Operation, folder: Path, old: dict[str, State | None], new: dict[str, State | None], what: str
) -> None:
    """Check that each table in a folder is the old or the new one."""
    for place in ("here", "there"):
        if old[place] is not None or new[place] is not None:
            _check_table(operation, folder / place, old[place], new[place], what)


def _check_table(operation: Operation, path: Path, old: State | None, new: State | None, what: str) -> None:
    """Open the table, or create it again where none has to exist."""
    try:
        with speedswap.Table.open(path):
            pass
        found = _state(path)
    except (FileNotFoundError, TableFormatError) as error:
        if old is not None and new is not None:
            raise Broken(f"a table is lost\n{what}") from error
        try:
            speedswap.Table.create(ROWS, DIM, path=path).close()
        except Exception as refused:
            raise Broken(f"there is a directory that neither opens nor can be made again\n{what}: {error}") from refused
        return
    allowed = [state for state in (old, new) if state is not None]
    if not any(_is(found, state) for state in allowed) and not (operation.mixes and _is_mixed(found, allowed)):
        differing = [sorted(c for c in state if c not in found or not _equal(found[c], state[c])) for state in allowed]
        raise Broken(f"a table is neither the old nor the new one\ncolumns that differ: {differing}; {what}")


def _is(found: State, state: State) -> bool:
    return found.keys() == state.keys() and all(_equal(found[name], state[name]) for name in found)


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours, theirs)


def _is_mixed(found: State, states: list[State]) -> bool:
    if any(found.keys() != state.keys() for state in states):
        return False
    return all(bool(sum(found[name] == state[name] for state in states).all()) for name in found)


def listed(folder: Path) -> str:
    return ", ".join(f"{path.relative_to(folder)} ({path.lstat().st_size})" for path in sorted(folder.rglob("*")))


ATTACK = Attack(
    name="operations",
    promise="a killed operation leaves the old table or the new one, or nothing; the next open or create cleans up",
    round=_round,
    seconds=60.0,
    quick=10,
)
