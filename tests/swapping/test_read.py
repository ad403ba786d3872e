"""Rows of an embedding as a plain tensor: all of them, or some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import speedswap
from speedswap.errors import IdError, TableTooLargeError
from speedswap.tables import whole_table as export

ROWS, DIM = 30, 5


@pytest.fixture(params=["device", "pinned", "pageable", "disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The storage of a table, as arguments of an embedding."""
    if request.param == "pinned" and not torch.cuda.is_available():
        pytest.skip("pinned memory needs a GPU")
    return {"storage": request.param, **({"path": tmp_path / "t"} if request.param == "disk" else {})}


def rows_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", [speedswap.Embedding, speedswap.EmbeddingBag])
def test_all_rows_are_read_as_a_copy(kind: type[speedswap.Embedding], place: dict[str, Any]) -> None:
    """Changes of the tensor do not reach the table, and it has no gradient."""
    items = kind.from_pretrained(rows_of(), freeze=False, **place)
    found = items.read()
    assert torch.equal(found, rows_of())
    assert (found.device.type, found.requires_grad) == ("cpu", False)
    found.zero_()
    assert torch.equal(items.table.read(), rows_of())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_ids_of_any_integer_dtype_and_shape_are_read(dtype: torch.dtype, place: dict[str, Any], device: str) -> None:
    items = speedswap.Embedding.from_pretrained(rows_of(), **place)
    for ids in (torch.tensor([[3, 29, 3], [0, 1, 2]]), torch.tensor(7), torch.empty(2, 0)):
        found = items.read(ids.to(device, dtype))
        assert (found.device.type, found.requires_grad) == (device, False)
        assert torch.equal(found.cpu(), rows_of()[ids.long()])


def test_one_number_reads_one_row() -> None:
    items = speedswap.Embedding.from_pretrained(rows_of())
    assert torch.equal(items.read(5), rows_of()[5])


def test_rows_stored_as_int8_are_read_as_floats(device: str) -> None:
    """They are what a lookup gives."""
    items = speedswap.Embedding.from_pretrained(rows_of(), stored_dtype=torch.int8).to(device)
    ids = torch.tensor([4, 4, 9], device=device)
    assert torch.equal(items.read(ids), items(ids))
    assert torch.equal(items.read()[9], items.read(9))
    assert (items.read() - rows_of()).abs().max() <= rows_of().abs().max() / 127 / 2 * 1.001


@pytest.mark.parametrize("bad", [30, -1])
def test_an_id_outside_the_table_is_an_error(bad: int, device: str) -> None:
    items = speedswap.Embedding.from_pretrained(rows_of())
    with pytest.raises(IdError, match=rf"ids\[0, 1\] is {bad}, but table 'table' has rows 0 to 29"):
        items.read(torch.tensor([[3, bad]], device=device))
    with pytest.raises(IdError, match=f"is {bad}, but"):
        items.read(bad)


@pytest.mark.parametrize("bad", [torch.ones(30, dtype=torch.bool), torch.ones(2), [1, 2], True, 1.0])
def test_what_is_no_id_is_refused(bad: Any) -> None:
    """A mask reads as zeros and ones where it is taken for ids."""
    with pytest.raises(TypeError, match=r"ids (has dtype|is a)"):
        speedswap.Embedding.from_pretrained(rows_of()).read(bad)


def test_all_rows_that_do_not_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    items = speedswap.Embedding.from_pretrained(rows_of())
    monkeypatch.setattr(export, "available_bytes", lambda: 500)
    with pytest.raises(TableTooLargeError, match="read fewer rows"):
        items.read()
    assert items.read(torch.tensor([1])).shape == (1, DIM)


def test_rows_of_a_step_are_seen_at_once(device: str) -> None:
    """Inside a lookahead they are written behind the next step."""
    items = speedswap.Embedding.from_pretrained(torch.zeros(ROWS, DIM), freeze=False).to(device)
    optimizer = torch.optim.SGD(items.parameters(), lr=1.0)
    expected = torch.zeros(ROWS, DIM)
    batches = [torch.arange(i, i + 6, device=device) for i in range(5)]
    for ids in speedswap.lookahead(batches, {items: lambda ids: ids}):
        items(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected[ids.cpu()] -= 1
        assert torch.equal(items.read(ids).cpu(), expected[ids.cpu()])
        assert torch.equal(items.read(), expected)


def test_keys_are_read_where_an_id_map_has_them() -> None:
    words = speedswap.Embedding(9, 2, id_map=speedswap.IdMap(9, keys="hashed"))
    words(["a", "b"])
    rows = words.table.read()
    assert torch.equal(words.read(["b", "a", "none"]), rows[[2, 1, 0]])
    assert torch.equal(words.read("b"), rows[2])
    assert torch.equal(words.read(np.array([["b"], ["a"]])), rows[torch.tensor([[2], [1]])])
    assert torch.equal(words.read(torch.tensor([2, 1])), words.read([*"ba"]))  # a tensor has rows
    config = speedswap.EmbeddingConfig(
        name="w", num_embeddings=9, embedding_dim=2, id_map=speedswap.IdMap(9, keys="exact")
    )
    tables = speedswap.EmbeddingCollection([config])
    tables({"w": ["a", "b"]})
    assert torch.equal(tables.embeddings["w"].read(["b"]), tables.tables["w"].read()[2:3])
    assert len(words.id_map) == 2  # nothing was added


def test_keys_without_an_id_map_are_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"ids is a list; pass a tensor.* an embedding with id_map=speedswap.IdMap"):
        speedswap.Embedding(1000, 8)(["a"])
