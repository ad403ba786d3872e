"""Checkpoints with right checksums and a wrong value in one field: refused before anything has changed, or loaded."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import speedswap
from speedswap.errors import CheckpointError
from torture.attack import Attack, Broken
from torture.reference import OPTIMIZERS

__all__ = ["VALUES", "fields", "replaced", "write"]

VALUES: list[Any] = [None, True, -1, 2 * 10**9, 2**70, 0.5, "x", [], [[]], {}, {"a": 1}]
_TRIES = 12


def fields(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested JSON."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from fields(value, (*path, key))


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value in one place; with ``...`` without that place."""
    changed = copy.deepcopy(data)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def write(folder: Path, data: dict[str, Any]) -> None:
    """Write a checkpoint's description, with its checksum."""
    body = json.dumps(data).encode()
    (folder / "CHECKPOINT").unlink()
    (folder / "CHECKPOINT").write_bytes(b"%08x\n" % zlib.crc32(body) + body)


def _trained(optimizer: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    items = speedswap.Embedding(30, 4, dtype=torch.float64, seed=1, id_map=speedswap.IdMap(29))
    model = nn.Sequential(items, nn.Linear(4, 1, bias=False, dtype=torch.float64))
    made = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        made.zero_grad()
        model(torch.arange(step, step + 5) * 10).sum().backward()
        made.step()
    return model, made


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    numpy = np.random.get_state()[1:]  # noqa: NPY002
    table = model[0].table  # type: ignore[index]
    rows = [table.read(column=name).tolist() for name in table.columns]
    dense = {name: value.tolist() for name, value in model[1].state_dict().items()}  # type: ignore[index]
    drawn = torch.get_rng_state().tolist(), random.getstate(), [np.asarray(each).tolist() for each in numpy]
    return repr([rows, table.id_map.to_bytes().tolist(), dense, optimizer.state_dict(), drawn])


def _round(seed: int, folder: Path) -> Counter[str]:
    draw, found = random.Random(seed), Counter[str]()
    name = draw.choice(sorted(OPTIMIZERS))
    saved = speedswap.save_checkpoint(folder / "saved", *_trained(name, 3), step=3, extra={"of": 3}).path
    data = json.loads((saved / "CHECKPOINT").read_bytes().partition(b"\n")[2])
    places, training = [*fields(data)], _trained(name, 1)
    for _ in range(_TRIES):
        path, value = draw.choice(places), draw.choice([..., *VALUES])
        write(saved, replaced(data, path, value))
        before = _state(*training)
        try:
            speedswap.load_checkpoint(saved.parent, *training)
        except CheckpointError:
            found["refused"] += 1
            if _state(*training) != before:
                raise Broken(f"a refused checkpoint has changed something\n{path}: {value!r}") from None
        else:
            found["loaded"] += 1
            np.random.rand(700), torch.rand(700), torch.randn(7), random.random()  # noqa: NPY002 (reads no other memory)
            training = _trained(name, 1)
    return found


ATTACK = Attack(
    name="hostile",
    promise="a checkpoint with a wrong value anywhere is refused as damaged before anything has changed, or loads",
    round=_round,
)
