"""Manifests with flipped bits, cut short or from another source: noticed, or harmless."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import torch

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken

ROWS, DIM = 40, 4
# Of every JSON type, and numbers just outside various ranges.
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 41, 2**31, 2**32, 2**62, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x", "weight", "float32", "data-0.bin", "../data-0.bin", "data-x.bin", "/etc/passwd", "\x00",
    [], [0], [[]], [1, 2, 3, 4, 5], [DIM], [-1], {}, {"kind": "normal"}, {"a": {}}, "€" * 300,
]  # fmt: skip


def _round(seed: int, folder: Path) -> str:
    draw = random.Random(seed)
    path = folder / "table"
    expected = _made(draw, path)
    manifest = path / "MANIFEST"
    whole = manifest.read_bytes()
    kind = draw.choice(["flip", "flip", "cut", "field", "field", "field", "two fields", "junk"])
    for _ in range(40):
        damaged = _damaged(draw, whole, kind)
        manifest.write_bytes(damaged)
        detectable = kind in ("flip", "cut", "junk") and damaged != whole
        _open(path, draw.choice(["r", "r+"]), expected, detectable, damaged)
    manifest.write_bytes(whole)
    with speedswap.Table.open(path) as table:
        _compare(table, expected)
    return kind


def _made(draw: random.Random, path: Path) -> dict[str, torch.Tensor]:
    """Create a table with random rows, some of them with state; return its columns as they must be read."""
    init = draw.choice([None, speedswap.init.normal(std=0.5), torch.nn.init.ones_])
    stored = draw.choice([None, None, torch.bfloat16, torch.int8])
    with speedswap.Table.create(ROWS, DIM, path=path, init=init, stored_dtype=stored, zero_row=3) as table:
        if draw.random() < 0.7:
            table.scatter(torch.tensor([1, 5, 39]), torch.randn(3, DIM))
        table.attributes["note"] = "kept"
        return {name: table.read(column=name) for name in table.columns}


def _damaged(draw: random.Random, whole: bytes, kind: str) -> bytes:
    if kind == "flip":
        place = draw.randrange(len(whole))
        return whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
    if kind == "cut":
        return whole[: draw.randrange(len(whole))]
    if kind == "junk":
        return draw.choice([b"", b"\n", b"00000000\n", draw.randbytes(300), whole * 2, whole + b" ", b"[" * 100_000])
    data = json.loads(whole.partition(b"\n")[2])
    for _ in range(2 if kind == "two fields" else 1):
        _replace(draw, data)
    body = json.dumps(data).encode()
    return b"%08x\n" % zlib.crc32(body) + body


def _replace(draw: random.Random, data: Any) -> None:
    """Replace, remove or add one value anywhere in nested JSON."""
    places = [
        (holder, key)
        for holder in _holders(data)
        for key in (holder if isinstance(holder, dict) else range(len(holder)))
    ]
    holder, key = draw.choice(places)
    how = draw.random()
    if how < 0.1:
        del holder[key]
    elif how < 0.2 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = draw.choice(_VALUES)


def _holders(data: Any) -> list[Any]:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    below = [holder for value in inner for holder in _holders(value)]
    return [data, *below] if isinstance(data, (dict, list)) and data else below


def _open(path: Path, mode: str, expected: dict[str, torch.Tensor], detectable: bool, damaged: bytes) -> None:
    try:
        with speedswap.Table.open(path, mode=mode) as table:
            if detectable:
                raise Broken(f"a damaged manifest was taken for a good one\n{damaged!r}")
            # A manifest with a valid checksum is believed; the table must be usable as described.
            for name in table.columns:
                table.read(column=name)
            table.gather(torch.tensor([0, table.num_embeddings - 1]))
            repr(table)
    except SpeedswapError:
        return
    except Exception as error:
        raise Broken(f"{type(error).__name__} for a manifest that somebody else wrote: {error}\n{damaged!r}") from error


def _compare(table: speedswap.Table, expected: dict[str, torch.Tensor]) -> None:
    for name, values in expected.items():
        if not torch.equal(table.read(column=name), values):
            raise Broken(f"opening damaged manifests changed column {name!r} of the rows")


ATTACK = Attack(
    name="manifests",
    promise="a manifest that is damaged or foreign is refused, and its rows are as they were",
    round=_round,
    quick=3,
)
