"""Tensors of every unusual kind, given to everything that takes one: right values, or a clear error, never a crash."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.unusual import KINDS

__all__ = ["ATTACK"]

_CLEAR = (SpeedswapError, TypeError, ValueError)


@dataclass
class _Guard:
    """A table that a call may change: its state before, and the one expected if the call does not raise."""

    read: Callable[[], Tensor]
    before: Tensor
    after: Callable[[], Any]


@dataclass
class _Call:
    """One call: what is done, what torch gives for it (or raises), and what it may change."""

    do: Callable[[], Any]
    expected: Callable[[], Any] | None = None
    guard: _Guard | None = None
    nothing: bool = False  # no ids: nothing to do, whatever the other arguments


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    target = rng.choice(list(_TARGETS))
    count = 20
    for _ in range(count):  # cheap, so that a round has many
        _one(target, rng, folder)
    return target


def _one(target: str, rng: random.Random, folder: Path) -> None:
    rows, dim, asked = rng.choice([2, 7, 40]), rng.choice([1, 3, 16, 65]), rng.choice([0, 1, 5, 30])
    kinds = [rng.choice(list(KINDS)) if rng.random() < 0.6 else "plain" for _ in range(3)]
    text = f"{target} of {rows} × {dim} with {asked} ids; {', '.join(kinds)}"
    try:
        call = _TARGETS[target](rng, rows, dim, asked, kinds)
        call.nothing = asked == 0 or "empty" in kinds
    except Exception:
        return  # torch cannot make such a tensor
    failed, found = True, None
    try:
        found = call.do()
        failed = False
    except _CLEAR:
        pass
    except Exception as error:
        if "Inference tensors cannot be saved" not in str(error):  # which torch says as clearly itself
            raise Broken(f"{type(error).__name__}: {str(error)[:200]}: {text}") from error
    if isinstance(found, Tensor) and (
        found.is_meta or isinstance(found, FakeTensor) or torch._is_functional_tensor(found)
    ):
        return  # traced, without values, as in torch
    try:
        if call.expected is not None and not failed and not _same(found, call.expected()):
            raise Broken(f"{_shown(found)} came out, not {_shown(call.expected())}: {text}")
        if call.guard is not None:
            _check_guard(call.guard, text, failed=failed)
    except _Refused as error:
        if call.nothing:
            return
        raise Broken(f"torch refuses it ({error}), but it was done: {text}") from error


class _Refused(Exception):
    """An operation that torch does not support either."""


def _check_guard(guard: _Guard, text: str, *, failed: bool) -> None:
    found = guard.read()
    if _same(found, guard.before) and failed:
        return
    wanted = guard.before if failed else guard.after()
    if not _same(found, wanted):
        raise Broken(f"the table has {_shown(found)}, not {_shown(wanted)}, failed {failed}: {text}")


def _plain(value: Any) -> Any:
    """Return the tensor without subclass and graph.

    Raises:
        TypeError: it has no values, or not all of them; torch would read what is not there.
    """
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().as_subclass(Tensor)
    if plain.layout == torch.strided and plain.device.type == "cpu" and plain.numel() and not plain.is_nested:
        last = plain.storage_offset() + sum((n - 1) * step for n, step in zip(plain.shape, plain.stride(), strict=True))
        if (last + 1) * plain.element_size() > plain.untyped_storage().nbytes():
            raise TypeError("a tensor without values")
    return plain


def _same(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return False
    found, expected = _plain(found), _plain(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    wide, wanted = found.to(torch.complex128), expected.to(torch.complex128)
    # Sums in another order differ by what their largest terms are rounded by, also where those cancel.
    largest = max([1.0, *wanted[wanted.isfinite()].abs().flatten().tolist()])
    return bool(torch.allclose(wide, wanted, rtol=1e-5, atol=1e-6 * largest, equal_nan=True))


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:100]
    return f"{tuple(value.shape)} of {value.dtype} {str(value.detach().flatten()[:6].tolist())[:120]}"


def _values(rng: random.Random, rows: int, dim: int) -> Tensor:
    return torch.randn(rows, dim, dtype=rng.choice([torch.float32, torch.float32, torch.float64]))


def _ids(rng: random.Random, rows: int, asked: int, *, unique: bool = False) -> Tensor:
    if unique:
        return torch.randperm(rows)[:asked]
    ids = torch.randint(rows, (asked,))
    if asked and rng.random() < 0.1:
        ids[rng.randrange(asked)] = rng.choice([-1, rows, 2**62, -(2**62)])
    return ids


def _gather_rows(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    source = KINDS[kinds[0]](_values(rng, rows, dim), rng)
    ids = KINDS[kinds[1]](_ids(rng, rows, asked), rng)
    out: Any = None
    way = rng.choice(["none", "own", "shared"])
    if way == "own":
        out = KINDS[kinds[2]](torch.zeros(asked, dim, dtype=source.dtype), rng)
    elif way == "shared" and asked and kinds[0] == kinds[1] == "plain":
        source, ids, out = _out(rng, source, ids, asked)
    expected = _expected(lambda: _plain(source)[_index(ids)].clone())

    def do() -> Any:
        return speedswap.gather_rows(source, ids, out=out) if out is not None else speedswap.gather_rows(source, ids)

    return _Call(do, expected)


def _out(rng: random.Random, source: Tensor, ids: Tensor, asked: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an output tensor over the memory of the ids or of the source, with these moved there."""
    items = asked * source.shape[1]
    if rng.random() < 0.5:
        memory = torch.zeros(asked + items + 8, dtype=torch.int64)
        first = rng.randrange(8)
        moved = memory[first : first + asked].copy_(ids)
        room = memory.view(source.dtype)
        start = rng.randrange(len(room) - items)
        return source, moved, room[start : start + items].view(asked, -1)
    room = torch.zeros(source.numel() + items + 8, dtype=source.dtype)
    moved = room[: source.numel()].view_as(source).copy_(source)
    start = rng.randrange(len(room) - items)
    return moved, ids, room[start : start + items].view(asked, -1)


def _index(ids: Any) -> Any:
    return _plain(ids).long() if isinstance(ids, Tensor) else torch.as_tensor(ids)


def _expected(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Evaluate now, while nothing has changed; an error of torch's is raised later."""
    try:
        value = compute()
        if isinstance(value, Tensor) and (value.device.type != "cpu" or value.layout != torch.strided):
            raise TypeError("no values")
        return lambda: value
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:100]}"

        def fails() -> Any:
            raise _Refused(why)

        return fails


def _scatter_rows(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    asked = min(asked, rows)
    target = KINDS[kinds[0]](_values(rng, rows, dim), rng)
    ids = KINDS[kinds[1]](_ids(rng, rows, asked, unique=True), rng)
    dtype = target.dtype if isinstance(target, Tensor) else torch.float32
    values = KINDS[kinds[2]](torch.randn(asked, dim).to(dtype), rng)

    def compute() -> Tensor:
        copy = _plain(target).clone()
        for place, row in enumerate(_index(ids).tolist()):
            copy[range(len(copy))[row]].copy_(_plain(values)[place])
        return copy

    def do() -> Any:
        speedswap.scatter_rows(target, ids, values)
        return target

    return _Call(do, _expected(compute))


def _table(rng: random.Random, rows: int, dim: int) -> tuple[speedswap.Table, Tensor]:
    values = torch.randn(rows, dim)
    table = speedswap.Table.create(rows, dim, storage="pageable")
    table.write(0, values)
    return table, values


def _table_gather(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    table, values = _table(rng, rows, dim)
    ids = KINDS[kinds[0]](_ids(rng, rows, asked), rng)
    return _Call(lambda: table.gather(ids).weight, _expected(lambda: values[_index(ids)]))


def _table_scatter(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    asked = min(asked, rows)
    table, before = _table(rng, rows, dim)
    ids = KINDS[kinds[0]](_ids(rng, rows, asked, unique=True), rng)
    values = KINDS[kinds[1]](torch.randn(asked, dim), rng)

    def compute() -> Tensor:
        copy = before.clone()
        copy[_index(ids)] = _plain(values)
        return copy

    expected = _expected(compute)
    return _Call(lambda: table.scatter(ids, values), guard=_Guard(table.read, before, expected))


def _table_write(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    asked = min(asked, rows)
    table, before = _table(rng, rows, dim)
    values = KINDS[kinds[0]](torch.randn(asked, dim), rng)
    start = rng.randrange(rows - asked + 1)

    def compute() -> Tensor:
        copy = before.clone()
        copy[start : start + len(values)] = _plain(values)
        return copy

    expected = _expected(compute)
    return _Call(lambda: table.write(start, values), guard=_Guard(table.read, before, expected))


def _embedding(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    table, values = _table(rng, rows, dim)
    items = speedswap.Embedding(rows, dim, table=table)
    ids = KINDS[kinds[0]](_ids(rng, rows, asked), rng)
    if rng.random() < 0.5:
        items.weight.requires_grad_(False)
    read = rng.random() < 0.3
    ask = items.read if read else items
    expected = _expected(lambda: values[_index(ids)])
    if read and not isinstance(ids, Tensor):
        expected = _expected(lambda: values if ids is None else values[ids])
    return _Call(lambda: ask(ids), expected)


def _bag(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    table, values = _table(rng, rows, dim)
    mode = rng.choice(["sum", "mean", "max"])
    bags = speedswap.EmbeddingBag(rows, dim, table=table, mode=mode)
    ids = KINDS[kinds[0]](_ids(rng, rows, asked), rng)
    offsets = torch.sort(torch.randint(asked + 1, (3,)))[0]
    offsets[0] = 0
    offsets = KINDS[kinds[1]](offsets, rng)
    weights = KINDS[kinds[2]](torch.randn(asked), rng) if mode == "sum" and rng.random() < 0.5 else None

    def compute() -> Tensor:
        places, plain = _index(ids), None if weights is None else _plain(weights)
        if places.dim() != 1 or places.shape != (len(places) if plain is None else plain.shape[0],):
            raise TypeError("no bags")
        begins = _index(offsets).tolist()
        ends = [*begins[1:], len(places)]
        return torch.stack(
            [
                _pooled(values, places[a:b], mode, None if plain is None else plain[a:b], a <= b)
                for a, b in zip(begins, ends, strict=True)
            ]
        )

    return _Call(lambda: bags(ids, offsets, weights), _expected(compute))


def _pooled(values: Tensor, ids: Tensor, mode: str, weights: Tensor | None, ascending: bool) -> Tensor:
    """Return one bag. Torch's own function reads wherever ids and offsets point."""
    if not ascending:
        raise IndexError("offsets are not ascending")
    rows = values[ids]  # checks them
    if not len(ids):
        return values.new_zeros(values.shape[1])
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    pooled = rows.amax(0) if mode == "max" else rows.sum(0)
    return pooled / len(ids) if mode == "mean" else pooled


def _score(rng: random.Random, rows: int, dim: int, asked: int, kinds: list[str]) -> _Call:
    table, values = _table(rng, rows, dim)
    items = speedswap.Embedding(rows, dim, table=table)
    queries = KINDS[kinds[0]](torch.randn(3, dim), rng)
    k = rng.choice([1, 2, rows])

    def compute() -> Tensor:
        return (_plain(queries).to(values.dtype) @ values.T).topk(k).values

    return _Call(lambda: items.score(queries, k).values, _expected(compute))


_TARGETS: dict[str, Callable[[random.Random, int, int, int, list[str]], _Call]] = {
    "gather_rows": _gather_rows,
    "scatter_rows": _scatter_rows,
    "Table.gather": _table_gather,
    "Table.scatter": _table_scatter,
    "Table.write": _table_write,
    "Embedding": _embedding,
    "EmbeddingBag": _bag,
    "score": _score,
}

ATTACK = Attack(
    name="tensors",
    promise="every unusual tensor gives torch's values or a clear error, before anything has changed",
    round=_round,
    quick=15,
)
