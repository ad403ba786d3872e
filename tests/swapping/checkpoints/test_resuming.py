"""A training that goes on from a checkpoint ends with the bits of one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from swapping.checkpoints.trainings import CUT, OPTIMIZERS, STEPS, Training, assert_same

import speedswap


def uninterrupted(name: str, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    return Training(OPTIMIZERS[name], **settings).run(range(STEPS)).state()


def cut(name: str, path: Path, **settings: Any) -> None:
    """Train until the cut, save there, inside the loop, and forget the training."""
    torch.manual_seed(7)
    training = Training(OPTIMIZERS[name], **settings)

    def after(step: int) -> None:
        if step == CUT:
            training.save(path, step)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        training.run(range(STEPS), after)
    training.close()


def gone_on(name: str, path: Path, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(99)  # as another process has other random numbers
    training = Training(OPTIMIZERS[name], **settings)
    assert training.load(path) == CUT
    return training.run(range(CUT, STEPS)).state()


@pytest.mark.sweep(7)
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_same_bits_at_any_lookahead(name: str, depth: int, tmp_path: Path) -> None:
    expected = uninterrupted(name)
    cut(name, tmp_path, depth=depth)
    assert_same(gone_on(name, tmp_path, depth=3 - depth), expected)


@pytest.mark.parametrize("there, here", [("pageable", "disk"), ("disk", "pageable"), ("disk", "disk")])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_checkpoint_goes_into_any_storage(name: str, there: str, here: str, tmp_path: Path) -> None:
    """Rows that were saved from memory go on in files, and back."""
    expected = uninterrupted(name)
    folders = [tmp_path / side if storage == "disk" else None for side, storage in (("a", there), ("b", here))]
    cut(name, tmp_path / "saved", folder=folders[0], depth=1)
    assert_same(gone_on(name, tmp_path / "saved", folder=folders[1], depth=1), expected)


def test_several_optimizers_go_on(tmp_path: Path) -> None:
    expected = uninterrupted("adagrad", several=True)
    cut("adagrad", tmp_path, several=True, depth=2)
    assert_same(gone_on("adagrad", tmp_path, several=True), expected)


def test_a_training_goes_back_in_the_same_process(tmp_path: Path) -> None:
    """To the first of two checkpoints, from a later step, and forward again."""
    expected = uninterrupted("adam")
    torch.manual_seed(7)
    training = Training(OPTIMIZERS["adam"])
    training.run(range(STEPS), lambda step: training.save(tmp_path, step, keep=None) if step in (3, CUT) else None)
    assert training.load(tmp_path, step=CUT) == CUT
    assert_same(training.run(range(CUT, STEPS)).state(), expected)
    assert training.load(tmp_path, step=3) == 3
    assert_same(training.run(range(3, STEPS)).state(), expected)


def test_a_checkpoint_from_before_the_first_step_goes_on(tmp_path: Path) -> None:
    for name in OPTIMIZERS:
        expected = uninterrupted(name)
        torch.manual_seed(7)
        Training(OPTIMIZERS[name]).save(tmp_path / name, 0)
        again = Training(OPTIMIZERS[name]).run(range(2))  # whatever it has done before
        again.load(tmp_path / name)
        assert_same(again.run(range(STEPS)).state(), expected, name)


def test_compact_columns_go_on_with_the_same_rounding(tmp_path: Path) -> None:
    """Stochastic rounding draws by the number of the write; deltas hold rows as they are stored."""

    def training() -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        kept = {"stored_dtype": torch.bfloat16, "state_dtype": torch.float16}
        items = speedswap.Embedding(200, 8, seed=5, storage="pageable", **kept)
        return items, torch.optim.Adam(items.parameters(), lr=0.01)

    def step(items: speedswap.Embedding, optimizer: torch.optim.Optimizer, number: int) -> None:
        ids = torch.randint(200, (16,), generator=torch.Generator().manual_seed(number))
        items(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    items, optimizer = training()
    for number in range(6):
        step(items, optimizer, number)
        if number in (0, 2):
            speedswap.save_checkpoint(tmp_path, items, optimizer)
    assert list(tmp_path.glob("*/rows-*"))
    other, its_optimizer = training()
    speedswap.load_checkpoint(tmp_path, other, its_optimizer)
    for number in range(3, 6):
        step(other, its_optimizer, number)
    for column in items.table.columns:
        assert torch.equal(other.table.read(column=column), items.table.read(column=column))


def test_a_collection_goes_on_with_its_id_maps(tmp_path: Path) -> None:
    def training() -> tuple[speedswap.EmbeddingBagCollection, torch.optim.Optimizer]:
        ids = speedswap.IdMap(9, keys="exact", admit_after=2, evict="lfu")
        configs = [
            speedswap.EmbeddingBagConfig(name="user", num_embeddings=10, embedding_dim=4, seed=1, id_map=ids),
            speedswap.EmbeddingBagConfig(name="item", num_embeddings=20, embedding_dim=4, seed=2),
            speedswap.EmbeddingBagConfig(name="wide", num_embeddings=20, embedding_dim=6, seed=3),
        ]
        tables = speedswap.EmbeddingBagCollection(configs, storage="pageable")
        return tables, torch.optim.Adagrad(tables.parameters(), lr=0.1)

    def run(tables: speedswap.EmbeddingBagCollection, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for number in steps:
            draw = torch.Generator().manual_seed(number)
            ids = torch.randint(20, (6, 3), generator=draw)
            features = {"user": ([f"u{key}" for key in ids[:, 0].tolist()], torch.arange(6))}
            features |= {"item": ids[:, 1:2], "wide": ids[:, 2:]}
            tables(features).values().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    expected, optimizer = training()
    run(expected, optimizer, range(8))
    first, its_optimizer = training()
    run(first, its_optimizer, range(4))
    speedswap.save_checkpoint(tmp_path, first, its_optimizer)
    second, another = training()
    speedswap.load_checkpoint(tmp_path, second, another)
    run(second, another, range(4, 8))
    assert_same(dict(second.state_dict()), dict(expected.state_dict()))
    assert_same(another.state_dict(), optimizer.state_dict())


def test_rows_without_an_optimizer_are_loaded_alone(tmp_path: Path) -> None:
    """To predict with, in a process that does not train."""
    training = Training(OPTIMIZERS["adam"]).run(range(3))
    training.save(tmp_path, 3)
    state = torch.get_rng_state()
    model = Training(OPTIMIZERS["sgd"]).model
    torch.set_rng_state(state)
    torch.rand(3)
    before = torch.get_rng_state()
    loaded = speedswap.load_checkpoint(tmp_path, model, random_state=False)
    assert_same(dict(model.state_dict()), dict(training.model.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.extra["scaler"] == training.scaler.state_dict()
