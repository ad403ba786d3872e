"""Ways to a weight's gradient other than ``loss.backward()``: torch's effect, or an error; never silence."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap.errors import SpeedswapError
from torture.attack import Attack, Broken
from torture.weight_uses import DIM, ROWS, USES, Net, Player

__all__ = ["ATTACK"]

_SGD: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
]


def _rows(net: Net) -> Tensor:
    items = net.items
    if isinstance(items, speedswap.Embedding):
        return items.table.read()
    values = items.weight.detach().clone()  # type: ignore[union-attr,operator]
    assert isinstance(values, Tensor)
    return values


def _round(seed: int, folder: Path) -> str:
    warnings.simplefilter("ignore")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(ROWS, (7,), generator=generator) for _ in range(2)]
    padding = rng.choice([None, None, int(ids[0][0])])
    ours = speedswap.Embedding(ROWS, DIM, padding, seed=seed, dtype=torch.float64)
    theirs = nn.Embedding(ROWS, DIM, padding, dtype=torch.float64)
    theirs.weight.data.copy_(ours.table.read())
    use, make, frozen = rng.choice(USES), rng.choice(_SGD), rng.random() < 0.25
    trained = rng.random() < 0.5 and not frozen
    if frozen:
        ours.weight.requires_grad_(False)
    players = [Player(Net(items), make, ids, frozen) for items in (ours, theirs)]
    name = use.__name__.strip("_").replace("_", " ")
    text = (
        f"{name}, frozen {frozen}, trained before {trained}, {type(players[0].optimizer).__name__}, padding {padding}"
    )
    if trained:
        for player in players:
            player.train()
            player.optimizer.zero_grad()
    torchs: Exception | None = None
    try:
        use(players[1])
        players[1].train()
    except Exception as error:
        torchs = error
    before = _rows(players[0].net)
    try:
        use(players[0])
        players[0].train()
    except (SpeedswapError, TypeError):  # a TypeError says that rows keep their dtype
        return f"{name}: refused"
    except Exception as error:
        if torchs is None or type(error) is not type(torchs):
            raise Broken(f"{type(error).__name__}: {str(error)[:300]}, where torch {_words(torchs)}: {text}") from error
        return f"{name}: torch refuses too"
    if torchs is not None:
        if torch.equal(before, _rows(players[0].net)) and not players[0].values:
            return f"{name}: torch refuses too"
        raise Broken(f"it had an effect, where torch {_words(torchs)}: {text}")
    _compare(players, text)
    return f"{name}: as torch"


def _words(error: Exception | None) -> str:
    return "works" if error is None else f"raises {type(error).__name__}: {str(error)[:100]}"


def _compare(players: list[Player], text: str) -> None:
    ours, theirs = players
    if len(ours.values) != len(theirs.values):
        raise Broken(f"{len(ours.values)} values came of it, not {len(theirs.values)}: {text}")
    for found, expected in zip(ours.values, theirs.values, strict=True):
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-10, atol=1e-12):
            raise Broken(f"{found.flatten()[:6].tolist()} came of it, not {expected.flatten()[:6].tolist()}: {text}")
    pairs = [(_rows(ours.net), _rows(theirs.net))]
    pairs += [
        (a.detach(), b.detach())
        for a, b in zip(ours.net.layer.parameters(), theirs.net.layer.parameters(), strict=True)
    ]
    for place, (found, expected) in enumerate(pairs):
        if not torch.allclose(found, expected, rtol=1e-10, atol=1e-12):
            rows = (found != expected).reshape(len(found), -1).any(1).nonzero().flatten().tolist()
            what = "the table" if place == 0 else "the layer"
            raise Broken(f"{what} is not as torch makes it, in rows {rows[:8]}: {text}")


ATTACK = Attack(
    name="hooks",
    promise="whatever asks for a weight's gradient, or changes it, does what it does in torch, or is refused",
    round=_round,
    quick=30,
)
