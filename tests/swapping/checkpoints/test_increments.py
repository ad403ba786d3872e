"""A checkpoint writes what has changed since the one before, and shares the rest with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import speedswap

ROWS, DIM = 4000, 32


@pytest.fixture
def items() -> speedswap.Embedding:
    return speedswap.Embedding(ROWS, DIM, storage="pageable", seed=1, name="items")


def step(items: speedswap.Embedding, optimizer: torch.optim.Optimizer, *ids: int) -> None:
    items(torch.tensor(ids)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded(path: Path, step: int | None = None) -> torch.Tensor:
    fresh = speedswap.Embedding(ROWS, DIM, storage="pageable")
    speedswap.load_checkpoint(path, fresh, step=step)
    return fresh.read()


def test_only_changed_rows_are_written(items: speedswap.Embedding, tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(items.parameters())
    step(items, optimizer, 5)
    first = speedswap.save_checkpoint(tmp_path, items, optimizer, step=1, keep=None)
    assert first.bytes_written > ROWS * DIM * 4 * 3
    step(items, optimizer, 7, 3999)
    expected = [items.read()]
    second = speedswap.save_checkpoint(tmp_path, items, optimizer, step=2, keep=None)
    assert 2 * DIM * 4 * 3 < second.bytes_written < 20_000
    items.table.write(100, torch.ones(3, DIM))
    items.table.reset_rows(torch.tensor([9]))
    expected.append(items.read())
    third = speedswap.save_checkpoint(tmp_path, items, optimizer, step=3, keep=None)
    assert third.bytes_written < 20_000
    assert torch.equal(loaded(tmp_path, 2), expected[0])
    assert torch.equal(loaded(tmp_path), expected[1])


def test_an_unchanged_training_writes_its_description_alone(items: speedswap.Embedding, tmp_path: Path) -> None:
    model = torch.nn.ModuleList([items, torch.nn.Linear(200, 200)])
    first = speedswap.save_checkpoint(tmp_path, model)
    second = speedswap.save_checkpoint(tmp_path, model, step=1)
    assert first.bytes_written > 200 * 200 * 4
    assert second.bytes_written < 10_000
    with torch.no_grad():
        model[1].bias.add_(1)
    third = speedswap.save_checkpoint(tmp_path, model, step=2)
    assert 800 < third.bytes_written < 12_000
    other = torch.nn.ModuleList([speedswap.Embedding(ROWS, DIM), torch.nn.Linear(200, 200)])
    speedswap.load_checkpoint(tmp_path, other)
    assert torch.equal(other[1].bias, model[1].bias)
    assert torch.equal(other[1].weight, model[1].weight)


def test_a_copy_is_written_anew_once_half_of_it_has_changed(items: speedswap.Embedding, tmp_path: Path) -> None:
    sizes = []
    for first in range(0, ROWS, 800):
        speedswap.save_checkpoint(tmp_path, items)
        items.table.scatter(torch.arange(first, first + 800), torch.full((800, DIM), float(first)))
        sizes.append(speedswap.save_checkpoint(tmp_path, items).bytes_written)
        assert torch.equal(loaded(tmp_path), items.read())
    table = ROWS * DIM * 4
    assert sizes[0] < table / 4
    assert any(size > table for size in sizes)


def test_rows_written_through_a_view_are_saved(items: speedswap.Embedding, tmp_path: Path) -> None:
    view = items.table.view()
    for value in (1.0, 2.0):
        view[17] = value
        speedswap.save_checkpoint(tmp_path, items)
        assert torch.equal(loaded(tmp_path)[17], torch.full((DIM,), value))


def test_changes_through_a_table_of_a_collection_are_saved(tmp_path: Path) -> None:
    """Its rows lie in a store with others'; its rows are numbered from 0, and theirs are not."""

    def make() -> speedswap.EmbeddingCollection:
        names = ("user", "item")
        configs = [speedswap.EmbeddingConfig(name=name, num_embeddings=50, embedding_dim=4) for name in names]
        return speedswap.EmbeddingCollection(configs, storage="pageable")

    tables = make()
    speedswap.save_checkpoint(tmp_path, tables)
    tables.tables["item"].write(3, torch.ones(1, 4))
    tables.tables["user"].scatter(torch.tensor([8]), torch.full((1, 4), 2.0))
    assert speedswap.save_checkpoint(tmp_path, tables).bytes_written < 12_000
    other = make()
    speedswap.load_checkpoint(tmp_path, other)
    for name, table in tables.tables.items():
        assert torch.equal(other.tables[name].read(), table.read())


def test_another_directory_or_a_loaded_checkpoint_is_no_basis_by_mistake(
    items: speedswap.Embedding, tmp_path: Path
) -> None:
    """Changes count from the checkpoint that this process saved or loaded there, and from no other."""
    one, two = tmp_path / "one", tmp_path / "two"
    speedswap.save_checkpoint(one, items)
    items.table.write(0, torch.ones(1, DIM))
    speedswap.save_checkpoint(two, items)
    items.table.write(1, torch.ones(1, DIM))
    speedswap.save_checkpoint(one, items)
    assert torch.equal(loaded(one), items.read())
    speedswap.load_checkpoint(two, items)
    items.table.write(2, torch.ones(1, DIM))
    assert speedswap.save_checkpoint(two, items).bytes_written < 12_000
    assert torch.equal(loaded(two), items.read())
    assert speedswap.save_checkpoint(one, items).bytes_written > ROWS * DIM * 4
    assert torch.equal(loaded(one), items.read())


@pytest.mark.parametrize(
    "keep, kept",
    [
        (1, [5]),
        (2, [4, 5]),
        ([2, 3], [2, 3, 5]),
        (range(0, 10**15, 2), [2, 4, 5]),
        ([], [5]),
        (None, [1, 2, 3, 4, 5]),
        (9, [1, 2, 3, 4, 5]),
    ],
)
def test_old_checkpoints_are_removed_as_the_caller_chooses(
    keep: int | list[int] | range | None, kept: list[int], items: speedswap.Embedding, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    values = {}
    for number in range(1, 6):
        items.table.write(number, torch.full((1, DIM), float(number)))
        values[number] = items.read()
        speedswap.save_checkpoint(tmp_path, items, step=number, keep=keep)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert [int(name.rpartition("-")[2]) for name in names] == kept
    for number in kept:
        assert torch.equal(loaded(tmp_path, number), values[number])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_is_a_checkpoint_of_its_own(items: speedswap.Embedding, tmp_path: Path) -> None:
    """It can be moved elsewhere, and loaded by its own path, when the others have gone."""
    speedswap.save_checkpoint(tmp_path / "run", items)
    items.table.write(4, torch.ones(1, DIM))
    saved = speedswap.save_checkpoint(tmp_path / "run", items)
    saved.path.rename(tmp_path / "moved")
    assert torch.equal(loaded(tmp_path / "moved"), items.read())


def test_a_file_system_without_links_gets_copies(
    items: speedswap.Embedding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    items.table.write(0, torch.randn(ROWS, DIM))
    speedswap.save_checkpoint(tmp_path, items)
    items.table.write(4, torch.ones(1, DIM))
    assert speedswap.save_checkpoint(tmp_path, items).bytes_written > ROWS * DIM * 4
    assert torch.equal(loaded(tmp_path), items.read())


@pytest.mark.parametrize("lost", ["tensors-1.safetensors", "rows-2-0.safetensors", "table-1-0"])
def test_what_was_lost_is_written_again(lost: str, items: speedswap.Embedding, tmp_path: Path) -> None:
    """The checkpoint before cannot be loaded; the next one can."""
    model = torch.nn.Sequential(items, torch.nn.Linear(DIM, 1))
    optimizer = torch.optim.Adam(model.parameters())
    step(items, optimizer, 5)
    speedswap.save_checkpoint(tmp_path, model, optimizer, step=1)
    step(items, optimizer, 6)
    folder = speedswap.save_checkpoint(tmp_path, model, optimizer, step=2).path
    (shutil.rmtree if lost == "table-1-0" else os.unlink)(folder / lost)
    step(items, optimizer, 7)
    speedswap.save_checkpoint(tmp_path, model, optimizer, step=3)
    again = torch.nn.Sequential(speedswap.Embedding(ROWS, DIM), torch.nn.Linear(DIM, 1))
    speedswap.load_checkpoint(tmp_path, again, torch.optim.Adam(again.parameters()))
    assert torch.equal(again[0].read(), items.read())
    assert torch.equal(again[1].weight, model[1].weight)


def test_numbers_of_any_type_say_what_stays(items: speedswap.Embedding, tmp_path: Path) -> None:
    """And steps of any iterable, which is read once."""
    for number in range(1, 4):
        speedswap.save_checkpoint(tmp_path, items, step=number, keep=None)

    def steps() -> list[str]:
        return sorted(each.name for each in tmp_path.iterdir())

    speedswap.save_checkpoint(tmp_path, items, step=4, keep=(each for each in (1, 2)))
    assert steps() == ["000001-step-1", "000002-step-2", "000004-step-4"]
    speedswap.save_checkpoint(tmp_path, items, step=5, keep=torch.tensor([2, 4]))
    assert steps() == ["000002-step-2", "000004-step-4", "000005-step-5"]
    speedswap.save_checkpoint(tmp_path, items, step=6, keep=np.int64(2))
    assert steps() == ["000005-step-5", "000006-step-6"]
