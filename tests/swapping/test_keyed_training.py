"""Embeddings with an id map: keys to rows as they come, in the plain loop and under a lookahead."""

from __future__ import annotations

import copy
import io
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import speedswap
from speedswap.errors import IdMapError, IdMapFullError, SpeedswapWarning

DIM = 4
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


def drifting(step: int, size: int = 12) -> Tensor:
    """Return the keys of a batch; every one has new keys."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(9, (size,), generator=generator) + 3 * step) * 2**40 - 7


def model(id_map: speedswap.IdMap, device: str, **arguments: Any) -> speedswap.Embedding:
    return speedswap.Embedding(id_map.num_rows, DIM, seed=3, id_map=id_map, **arguments).to(device)


def loss_of(rows: Tensor) -> Tensor:
    return (rows * torch.linspace(-1, 1, DIM, device=rows.device) - 0.3).square().sum()


def train(items: nn.Module, optimizer: Optimizer, batches: Iterable[Any], steps: int | None = None) -> list[float]:
    losses = []
    for step, keys in enumerate(batches):
        if step == steps:
            break
        optimizer.zero_grad()
        loss = loss_of(items(keys))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def columns(items: speedswap.Embedding) -> dict[str, Tensor]:
    return {name: items.table.read(column=name) for name in items.table.columns}


def assert_same(ours: speedswap.Embedding, theirs: speedswap.Embedding) -> None:
    mine, others = columns(ours), columns(theirs)
    assert mine.keys() == others.keys()
    for name, values in others.items():
        assert torch.equal(mine[name], values), name
    assert torch.equal(ours.id_map.to_bytes(), theirs.id_map.to_bytes())


# ---- the plain loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_map_that_never_evicts_trains_as_keys_numbered_beforehand(name: str, device: str) -> None:
    batches = [drifting(step).to(device) for step in range(10)]
    numbers: dict[int, int] = {}
    numbered = [
        torch.tensor([numbers.setdefault(key, len(numbers) + 1) for key in keys.tolist()], device=device)
        for keys in batches
    ]
    users = speedswap.IdMap(100)
    ours = model(users, device)
    theirs = speedswap.Embedding(101, DIM, seed=3, padding_idx=0).to(device)
    losses = [
        train(each, OPTIMIZERS[name](each.parameters()), loop) for each, loop in ((ours, batches), (theirs, numbered))
    ]
    assert losses[0] == losses[1]
    mine, others = columns(ours), columns(theirs)
    assert all(torch.equal(mine[name], others[name]) for name in others)
    assert len(users) == len(numbers)


def test_only_a_training_lookup_adds(device: str) -> None:
    users = speedswap.IdMap(10)
    items = model(users, device)
    keys = torch.tensor([5, -5], device=device)
    with torch.no_grad():
        assert items(keys).eq(0).all()
    assert items.eval()(keys).eq(0).all()
    items.train().weight.requires_grad_(False)
    assert items(keys).eq(0).all()
    assert len(users) == 0
    items.weight.requires_grad_(True)
    assert not items(keys).eq(0).any()
    assert len(users) == 2
    with torch.no_grad():
        found = items(torch.tensor([[-5], [6]], device=device)).cpu()
    assert torch.equal(found, torch.stack([items.table.read(2, 3), torch.zeros(1, DIM)]))


@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_evicted_row_starts_anew(name: str, evict: str, device: str) -> None:
    """Weight and optimizer state of the key that comes are those of a key that comes to an empty table."""
    items = model(speedswap.IdMap(2, evict=evict), device)
    made = items.table.read()
    optimizer = OPTIMIZERS[name](items.parameters())
    train(items, optimizer, [torch.tensor([1, 2, 2], device=device)] * 3)
    fresh = {name: items.table.read(0, 1, column=name) for name in items.table.columns}  # row 0 is never trained
    assert not torch.equal(items.table.read(1, 2), made[1:2])
    optimizer.zero_grad()
    items(torch.tensor([3], device=device))
    assert items.id_map.lookup(torch.tensor([1, 2, 3])).tolist() == [0, 2, 1]
    for column in items.table.columns:
        expected = made[1:2] if column == "weight" else fresh[column]
        assert torch.equal(items.table.read(1, 2, column=column), expected), column


def test_an_evicted_key_leaves_the_step_that_it_was_in(device: str) -> None:
    """Two lookups in one step: the second takes the first one's row, and the first one's gradient with it."""
    items = model(speedswap.IdMap(1, evict="lru"), device, init=speedswap.init.constant(1.0))
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    first, second = (items(torch.tensor([key], device=device)) for key in (1, 2))
    (10 * first.sum() + 3 * second.sum()).backward()
    optimizer.step()
    assert items.table.read(1, 2).eq(1 - 3).all()
    optimizer.zero_grad()
    items(torch.tensor([2], device=device)).sum().backward()
    (items(torch.tensor([3], device=device)).sum() * 5).backward()  # now after its gradient has come
    optimizer.step()
    assert items.table.read(1, 2).eq(1 - 5).all()


def test_keys_without_a_row_of_their_own_train_nothing(device: str) -> None:
    items = model(speedswap.IdMap(5, admit_after=2), device)
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    made = items.table.read()
    train(items, optimizer, [torch.tensor([7, 8, 9], device=device)])
    assert torch.equal(items.table.read(), made)
    train(items, optimizer, [torch.tensor([8], device=device)])
    assert (items.table.read() != made).any(dim=1).tolist() == [False, True, False, False, False, False]


def test_strings(device: str) -> None:
    words = speedswap.IdMap(10, keys="hashed")
    items = model(words, device)
    assert items(["a", "b", "a"]).shape == (3, DIM)
    assert items(["a"]).device.type == torch.device(device).type
    batches: list[Any] = [["a", "b"], pd.Series(["b", "c", "c"]), ["d", "a"]]
    plain = model(speedswap.IdMap(10, keys="hashed"), device)
    plain(["a", "b", "a"])
    plain(["a"])
    losses = []
    for each, loop in ((plain, batches), (items, speedswap.lookahead(batches, {items: lambda batch: batch}))):
        losses.append(train(each, torch.optim.Adam(each.parameters()), loop))
    assert losses[0] == losses[1]
    assert_same(items, plain)


def test_lists_of_integers_in_a_lookahead(device: str) -> None:
    losses = []
    keys = [[7, 8], [8, 9, 9]]
    for batches in ([torch.tensor(each, device=device) for each in keys], keys):
        items = model(speedswap.IdMap(10), device)
        loop = speedswap.lookahead(batches, {items: lambda batch: batch})
        losses.append(train(items, torch.optim.Adam(items.parameters()), loop))
    assert losses[0] == losses[1]


def test_bags(device: str) -> None:
    """Keys without a row count in no bag."""
    words = speedswap.IdMap(10)
    bag = speedswap.EmbeddingBag(11, DIM, mode="mean", seed=1, id_map=words).to(device)
    ids = torch.tensor([5, 500, 5, 5000], device=device)
    bag(ids[:2], torch.tensor([0], device=device))
    bag.eval()
    rows = bag.table.read(0, 3)
    found = bag(ids, torch.tensor([0, 3], device=device)).cpu()
    torch.testing.assert_close(found, torch.stack([(2 * rows[1] + rows[2]) / 3, torch.zeros(DIM)]))


def test_bags_of_strings(device: str) -> None:
    bag = speedswap.EmbeddingBag(11, DIM, mode="sum", seed=1, id_map=speedswap.IdMap(10, keys="hashed")).to(device)
    found = bag(np.array([["a", "b"], ["c", "a"]]))
    rows = bag.table.read(0, 4)
    torch.testing.assert_close(found.cpu(), torch.stack([rows[1] + rows[2], rows[3] + rows[1]]))
    torch.testing.assert_close(bag(["a", "b", "c", "a"], torch.tensor([0, 2], device=device)), found)
    with pytest.raises(ValueError, match=r"offsets\[1\] is 3, but input has 2 ids"):
        bag(["d", "e"], torch.tensor([0, 3], device=device))
    assert len(bag.id_map) == 3


def test_a_map_and_its_table_must_fit() -> None:
    users = speedswap.IdMap(10)
    with pytest.raises(ValueError, match="num_embeddings is 12, but the id map has rows for 10 keys; give 10, its cap"):
        speedswap.Embedding(12, DIM, id_map=users)
    assert speedswap.Embedding(10, DIM, id_map=speedswap.IdMap(10)).num_embeddings == 11
    with pytest.raises(ValueError, match="padding_idx is 3, but row 0 is for keys"):
        speedswap.Embedding(11, DIM, padding_idx=3, id_map=users)
    given = speedswap.Embedding.from_pretrained(torch.ones(11, DIM), freeze=False).table
    with pytest.raises(ValueError, match="kind 'given', which cannot be computed again"):
        speedswap.Embedding(11, DIM, table=given, id_map=users)
    table = speedswap.Table.create(11, DIM)
    assert speedswap.Embedding(11, DIM, table=table, id_map=users).padding_idx == 0
    assert speedswap.Embedding(11, DIM, table=table).id_map is users
    with pytest.raises(ValueError, match="has an id map already"):
        speedswap.Embedding(11, DIM, table=table, id_map=speedswap.IdMap(10))


# ---- lookahead -------------------------------------------------------------------------------------------------------


def both(device: str, optimizer: str, **settings: Any) -> Iterable[tuple[speedswap.Embedding, Optimizer]]:
    for _ in range(2):
        items = model(speedswap.IdMap(**settings), device)
        yield items, OPTIMIZERS[optimizer](items.parameters())


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("evict", ["lru", "lfu"])
@pytest.mark.parametrize("admit_after", [1, 2])
def test_lookahead_is_the_plain_loop(depth: int, evict: str, admit_after: int, device: str) -> None:
    batches = [drifting(step, size=12 if step != 6 else 0).to(device) for step in range(16)]
    results = []
    for ahead, (items, optimizer) in enumerate(both(device, "adam", capacity=12, evict=evict, admit_after=admit_after)):
        loop = speedswap.lookahead(batches, {items: lambda keys: keys}, depth=depth) if ahead else batches
        results.append((train(items, optimizer, loop), items))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("stop", ["break", "error", "full"])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_that_had_no_turn_never_came(depth: int, stop: str, device: str) -> None:
    """After it the model goes on like one that was trained without a lookahead."""
    batches = [drifting(step).to(device) for step in range(12)]

    def loader() -> Iterable[Tensor]:
        for step, keys in enumerate(batches):
            if step == 5 and stop == "error":
                raise OSError("the disk is gone")
            yield torch.arange(50, device=device) if step == 5 and stop == "full" else keys

    results = []
    for ahead, (items, optimizer) in enumerate(both(device, "adam", capacity=12, evict="lru")):
        if ahead:
            loop = speedswap.lookahead(loader(), {items: lambda keys: keys}, depth=depth)
            if stop == "break":
                train(items, optimizer, loop, steps=5)
            else:
                with pytest.raises((OSError, IdMapFullError)):
                    train(items, optimizer, loop)
        else:
            train(items, optimizer, batches[:5])
        train(items, optimizer, batches[7:])
        results.append(items)
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:SW407")
@pytest.mark.parametrize("depth", [1, 3])
def test_a_full_map_raises_in_the_lookup_of_the_plain_loop(depth: int, device: str) -> None:
    """The loop can go on after it; and a batch has room if those that would take it are skipped."""
    batches = [torch.arange(*keys, device=device) for keys in ((4,), (4, 12), (12, 16), (2, 18), (3, 8), (18, 22))]
    results = []
    for ahead, (items, optimizer) in enumerate(both(device, "adam", capacity=12)):
        full = []
        for step, keys in enumerate(speedswap.lookahead(batches, {items: lambda keys: keys}, depth=depth * ahead)):
            if step != 1:
                try:
                    train(items, optimizer, [keys])
                except IdMapFullError:
                    full.append(step)
        results.append((full, items))
    assert results[1][0] == results[0][0] == [3, 5]
    assert_same(results[1][1], results[0][1])


def test_evaluation_and_saving_in_between_see_the_present_batch(device: str) -> None:
    batches = [drifting(step).to(device) for step in range(10)]
    seen: list[list[Tensor]] = []
    for ahead, (items, optimizer) in enumerate(both(device, "adam", capacity=14, evict="lru")):
        looks = []
        for keys in speedswap.lookahead(batches, {items: lambda keys: keys}, depth=3) if ahead else batches:
            with torch.no_grad():
                looks.append(items(keys))
            train(items, optimizer, [keys])
            with torch.no_grad():
                looks += [items(keys), items(keys + 3 * 2**40), *items.state_dict().values()]
            looks.append(torch.tensor(len(items.id_map)))
        seen.append(looks)
    assert len(seen[0]) == len(seen[1]) == 60
    assert all(torch.equal(ours, plain) for ours, plain in zip(*seen, strict=True))


@pytest.mark.filterwarnings("ignore:SW407")
@pytest.mark.parametrize("what", ["in order", "reversed", "skipped", "evaluated", "restored", "unannounced", "twice"])
def test_lookups_out_of_turn_are_those_of_the_plain_loop(what: str, device: str) -> None:
    """Two lookups per step, and: in another order; not at all; a lookahead within; an earlier state; further ones."""
    batches = [[drifting(2 * step + place, size=3).to(device) for place in range(2)] for step in range(10)]
    seen = []
    for ahead, (items, optimizer) in enumerate(both(device, "adam", capacity=8, evict="lfu", admit_after=2)):
        losses, saved = [], items.state_dict()
        for step, batch in enumerate(speedswap.lookahead(batches, {items: lambda batch: batch}, depth=3 * ahead)):
            if what == "skipped" and step % 4 == 2:
                continue
            if what == "evaluated":
                with torch.no_grad():
                    inner = speedswap.lookahead(batch, {items: lambda keys: keys})
                    losses += [loss_of(items(keys)).item() for keys in inner]
            if what == "restored" and step == 3:
                saved = items.state_dict()
            if what == "restored" and step == 7:
                items.load_state_dict(saved)
            lookups = batch[::-1] if what == "reversed" else batch
            extra = {"unannounced": [batches[step - 1][0] + 2**40], "twice": [batch[0]]}.get(what, [])
            optimizer.zero_grad()
            loss = torch.stack([loss_of(items(keys)) for keys in (*lookups, *extra)]).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seen.append((losses, items))
    assert seen[0][0] == seen[1][0]
    assert_same(seen[1][1], seen[0][1])


def test_rows_that_could_not_be_reset_start_anew_later(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    items = model(speedswap.IdMap(1, evict="lru"), device, init=speedswap.init.constant(5.0))
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    train(items, optimizer, [torch.tensor([1], device=device)])

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(speedswap.Table, "reset_rows", full)
        with pytest.raises(OSError, match="no room"):
            items(torch.tensor([2], device=device))
    optimizer.zero_grad()
    assert items(torch.tensor([2], device=device)).eq(5).all()


# ---- copies ----------------------------------------------------------------------------------------------------------


def trained(device: str = "cpu") -> tuple[speedswap.Embedding, Optimizer]:
    items = model(speedswap.IdMap(12, evict="lru"), device)
    optimizer = torch.optim.Adagrad(items.parameters(), lr=0.1)
    train(items, optimizer, [drifting(step).to(device) for step in range(6)])
    return items, optimizer


def test_a_state_dict_has_the_map(device: str) -> None:
    items, _ = trained(device)
    assert sorted(items.state_dict()) == ["id_map", "weight"]
    saved = io.BytesIO()
    torch.save(items.state_dict(), saved)
    saved.seek(0)
    other = model(speedswap.IdMap(12, evict="lru"), device)
    other.load_state_dict(torch.load(saved, weights_only=True))
    keys = drifting(5).to(device)
    assert torch.equal(other.eval()(keys), items.eval()(keys))
    with pytest.raises(RuntimeError, match=r"Missing key.*id_map"):
        other.load_state_dict({"weight": items.table.read()})


def test_a_map_that_the_module_lacks_is_an_unexpected_key_as_in_torch(device: str) -> None:
    items, _ = trained(device)
    for plain in (speedswap.Embedding(13, 4), speedswap.EmbeddingBag(13, 4), nn.Embedding(13, 4)):
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "id_map"'):
            plain.load_state_dict(items.state_dict())
        found = plain.load_state_dict(items.state_dict(), strict=False)
        assert (found.missing_keys, found.unexpected_keys) == ([], ["id_map"])
        assert torch.equal(plain.state_dict()["weight"], items.table.read())


def test_a_map_that_a_table_of_a_collection_lacks_is_an_unexpected_key() -> None:
    id_map = speedswap.IdMap(8)
    config = {"name": "item", "num_embeddings": 9, "embedding_dim": 4}
    keyed = speedswap.EmbeddingCollection([speedswap.EmbeddingConfig(**config, id_map=id_map)])
    plain = speedswap.EmbeddingCollection([speedswap.EmbeddingConfig(**config)])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "embeddings.item.id_map"'):
        plain.load_state_dict(keyed.state_dict())
    assert list(speedswap.Embedding(13, DIM).state_dict()) == ["weight"]


def test_a_deep_copy_goes_its_own_way(device: str) -> None:
    items, _ = trained(device)
    other = copy.deepcopy(items)
    assert_same(other, items)
    other(torch.tensor([10**6], device=device))
    assert other.id_map.lookup(torch.tensor([10**6])).tolist() != [0]
    assert items.id_map.lookup(torch.tensor([10**6])).tolist() == [0]


# ---- DataLoader workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_looks_up_and_does_not_add(method: str) -> None:
    users = speedswap.IdMap(10)
    users.add(torch.tensor([5, -6]))
    batches = [torch.tensor([[-6, 7], [5, 5]])] * 2
    settings: dict[str, Any] = {"batch_size": None, "num_workers": 1, "multiprocessing_context": method}
    found = list(DataLoader(batches, collate_fn=users.lookup, **settings))  # type: ignore[arg-type]
    assert [rows.tolist() for rows in found] == [[[2, 0], [1, 1]]] * 2
    if method == "spawn":  # where adding is refused as in any pickled map
        return
    with pytest.raises(IdMapError, match="only looks up here; add keys in the process that trains"):
        list(DataLoader(batches, collate_fn=users.add, **settings))  # type: ignore[arg-type]
    assert len(users) == 2


def test_process_that_is_killed_before_its_first_commit_leaves_the_map(tmp_path: Path) -> None:
    """Rows on disk without their map would be looked up by keys as if these were ids."""
    items = speedswap.Embedding(9, 2, id_map=speedswap.IdMap(8), path=tmp_path / "items")
    shutil.copytree(tmp_path / "items", tmp_path / "left")
    left = speedswap.Embedding(9, 2, table=speedswap.Table.open(tmp_path / "left"))
    assert left.id_map is not None
    assert left.id_map.capacity == items.id_map.capacity == 8


# ---------------------------------------------------------------------- a forward pass that runs twice


MAPS: dict[str, dict[str, Any]] = {
    "admit_after": {"capacity": 64, "admit_after": 2},
    "lru": {"capacity": 8, "evict": "lru"},  # as many as two lookups have
    "lfu": {"capacity": 64, "evict": "lfu", "admit_after": 2},
    "strings": {"capacity": 64, "keys": "exact"},
}


def looked_up_twice(kind: str, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return a module over an id map, and a function that looks keys up in it."""
    if kind == "collection":
        config = speedswap.EmbeddingConfig(
            name="a", num_embeddings=settings["capacity"], embedding_dim=2, id_map=speedswap.IdMap(**settings), seed=3
        )
        tables = speedswap.EmbeddingCollection([config])
        return tables, lambda keys: tables({"a": keys})["a"].values()
    if kind == "bag":
        bag = speedswap.EmbeddingBag(settings["capacity"], 2, mode="sum", id_map=speedswap.IdMap(**settings), seed=3)
        return bag, lambda keys: bag(keys.unsqueeze(1))
    items = speedswap.Embedding(settings["capacity"], 2, id_map=speedswap.IdMap(**settings), seed=3)
    return items, items


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("settings", MAPS)
@pytest.mark.parametrize("kind", ["embedding", "bag", "collection"])
def test_a_checkpoint_neither_adds_nor_counts_keys_again(kind: str, settings: str, ahead: bool) -> None:
    """Two lookups in each step, of which the second may admit keys of the first, and take their rows."""
    is_text = settings == "strings"
    if is_text and kind == "bag":
        return  # of numbers alone
    ends = []
    for repeats in (False, True):
        module, look_up = looked_up_twice(kind, MAPS[settings])
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        numbers = [torch.randint(12, (2, 4), generator=generator) for _ in range(12)]
        batches: list[Any] = [[[f"{n}" for n in some.tolist()] for some in each] for each in numbers]
        batches = batches if is_text else [[*each] for each in numbers]
        given = {module: (lambda both: {"a": both[0]}) if kind == "collection" else (lambda both: both)}
        if kind == "bag":
            given = {module: lambda both: [each.unsqueeze(1) for each in both]}
        seen = []

        def part(keys: Any, factor: Tensor, look_up: Any = look_up) -> Tensor:
            return look_up(keys) * factor

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "SW407")
            for both in speedswap.lookahead(batches, given) if ahead else batches:  # type: ignore[type-var]
                factors = [torch.full((2,), 2.0, requires_grad=True) for _ in both]
                each = [
                    checkpoint(part, keys, factor, use_reentrant=False) if repeats else part(keys, factor)
                    for keys, factor in zip(both, factors, strict=True)
                ]
                sum((one.square().sum() for one in each), start=torch.zeros(())).backward()
                seen += [*(one.detach() for one in each), *(factor.grad for factor in factors)]
                optimizer.step()
                optimizer.zero_grad()
        maps = [each.id_map for each in module.modules() if getattr(each, "id_map", None) is not None]
        tables = [each.table for each in module.modules() if isinstance(getattr(each, "table", None), speedswap.Table)]
        ends.append([*seen, *(each.to_bytes() for each in maps), *(table.read() for table in tables)])
    assert len(ends[0]) == 4 * 12 + len(maps) + len(tables)
    assert all(torch.equal(ours, plain) for ours, plain in zip(*ends, strict=True))


def test_a_reentrant_checkpoint_adds_no_keys_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward pass is one without gradients."""
    monkeypatch.setattr("speedswap._words._said", set())
    items = speedswap.Embedding(8, 2, id_map=speedswap.IdMap(8))
    factor = torch.ones(2, requires_grad=True)
    out = checkpoint(lambda keys, factor: items(keys) * factor, torch.tensor([7]), factor, use_reentrant=True)
    seen = out.detach().clone()
    with pytest.warns(SpeedswapWarning, match=r"SW410.*give checkpoint use_reentrant=False"):
        out.sum().backward()
    assert torch.equal(factor.grad, seen[0])
    assert items.id_map is not None
    assert len(items.id_map) == 0


def test_the_same_keys_with_other_rows_in_one_checkpoint_are_refused() -> None:
    items = speedswap.Embedding(8, 2, id_map=speedswap.IdMap(8, admit_after=2))
    factor = torch.ones(2, requires_grad=True)
    keys = torch.tensor([7])
    out = checkpoint(lambda factor: items(keys) * factor + items(keys) * factor, factor, use_reentrant=False)
    with pytest.raises(IdMapError, match=r"a later lookup .* has changed their rows: leave these lookups out"):
        out.sum().backward()


def test_a_checkpoint_over_a_row_that_has_passed_to_another_key_is_refused() -> None:
    items = speedswap.Embedding(2, 2, id_map=speedswap.IdMap(2, evict="lru"))
    factor = torch.ones(2, requires_grad=True)
    out = checkpoint(lambda factor: items(torch.tensor([1, 2])) * factor, factor, use_reentrant=False)
    items(torch.tensor([3]))
    with pytest.raises(IdMapError, match=r"a later lookup .* has changed their rows"):
        out.sum().backward()


@pytest.mark.parametrize("settings", MAPS)
def test_a_batch_that_is_tried_again_counts_its_keys_once(settings: str) -> None:
    ends = []
    for fits in (True, False):
        items = speedswap.Embedding(64, 2, id_map=speedswap.IdMap(**{**MAPS[settings], "capacity": 64}), seed=3)
        optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
        splitter = speedswap.BatchSplitter(items, check=False)
        limit = [100]

        def loss_of(numbers: Tensor, items: Any = items, limit: list[int] = limit) -> Tensor:
            keys = [str(each) for each in numbers.tolist()] if settings == "strings" else numbers
            out = items(keys)
            if len(numbers) > limit[0]:
                raise torch.OutOfMemoryError("out of memory")
            return out.square().mean()

        for step in range(4):
            limit[0] = 100 if fits or step % 2 == 0 else 3
            splitter.backward(loss_of, torch.randint(40, (8,), generator=torch.Generator().manual_seed(step)))
            optimizer.step()
            optimizer.zero_grad()
        assert items.id_map is not None
        saved = items.id_map._saved()
        ends.append([saved.rows.numbers, saved.rows.counts, saved.probation.numbers, saved.probation.counts])
    for plain, again in zip(*ends, strict=True):
        assert plain is again is None or torch.equal(plain, again)


def test_lookups_without_a_step_hold_no_memory() -> None:
    """Neither the rows that were reset, nor the keys, of lookups whose graphs are gone."""
    items = speedswap.Embedding(8, 2, id_map=speedswap.IdMap(8, evict="lru"))
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    kept = items(torch.arange(4)).sum()
    for some in range(50):
        items(torch.arange(8) + 8 * some)
    assert len(items._step.key_passes) > 50  # the first one's gradient is still to come
    before = items.read()
    kept.backward()  # its keys have lost their rows
    optimizer.step()
    assert torch.equal(items.read(), before)
    del kept
    items(torch.arange(8))
    assert len(items._step.key_passes) <= 3


def test_a_gradient_that_comes_after_a_step_is_not_that_of_a_rows_next_key() -> None:
    items = speedswap.Embedding(2, 2, id_map=speedswap.IdMap(2, evict="lru"))
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    kept = items(torch.tensor([1, 2])).sum()
    items(torch.tensor([3])).sum().backward()  # takes the row of 1
    optimizer.step()
    optimizer.zero_grad()
    before = items.read()
    kept.backward()
    optimizer.step()
    assert (items.read() != before).any(1).tolist() == [False, False, True]
