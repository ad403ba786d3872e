"""Rows of safetensors files, read in place: torch's values, no memory for lookups, the file unchanged."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_files import write
from torch import Tensor, nn

import speedswap
from speedswap.errors import TableClosedError, TableFormatError

ROWS, DIM = 300, 5
IDS = torch.tensor([[3, 299], [3, 7]])


def rows_of(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(items: nn.Module, steps: int = 3) -> Tensor:
    optimizer = torch.optim.Adam(items.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        items(IDS + step % 2 - 1).float().square().sum().backward()
        optimizer.step()
    return items(IDS).detach()


@pytest.mark.parametrize("blanks", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_looked_up_and_trained_as_those_of_a_copy(dtype: torch.dtype, blanks: int, tmp_path: Path) -> None:
    """Also if a header of odd length leaves the tensor at an odd place; the file has the same bytes afterwards."""
    rows = rows_of(dtype)
    others = {"first": torch.randn(3), "scales": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    file = write(tmp_path / "model.safetensors", {**others, "items.weight": rows}, blanks)
    before = file.read_bytes()
    items = speedswap.Embedding.from_file(file, "items.weight", freeze=False)
    given = speedswap.Embedding.from_pretrained(rows.clone(), freeze=False)
    assert torch.equal(items(IDS), rows[IDS])
    assert torch.equal(trained(items), trained(given))
    assert not torch.equal(items.read(), rows)
    assert torch.equal(items.read(), given.read())
    items.table.write(0, rows[:2] * 2)
    items.table.view()[7] = 1
    items.table.close()
    assert file.read_bytes() == before
    assert torch.equal(speedswap.Embedding.from_file(file, "items.weight").read(), rows)


def test_frozen_bags_pool_rows_in_place(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"bag": rows_of()})
    bags = speedswap.EmbeddingBag.from_file(str(file), "bag", mode="sum", padding_idx=3)
    assert not bags.weight.requires_grad
    torch.testing.assert_close(bags(IDS), torch.stack([rows_of()[299], rows_of()[7]]))
    values, ids = bags.score(rows_of()[9], k=1)
    torch.testing.assert_close(values, (rows_of() @ rows_of()[9]).max()[None])
    assert ids.item() == (rows_of() @ rows_of()[9]).argmax()


MEMORY = """
import json, sys, torch, speedswap

rows, dim = 1 << 14, 1024
header = json.dumps({"w": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, rows * dim * 4]}}).encode()
header += b" " * (-len(header) % 8)
with open(sys.argv[1], "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + rows * dim * 4)  # 64 MiB of zeros, none of them on the disk


def own():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


ids = torch.arange(0, rows, 3)
small = speedswap.Embedding(4, dim)
small(torch.zeros(20, dtype=torch.int64)).sum().backward()  # starts threads
before = own()
items = speedswap.Embedding.from_file(sys.argv[1], "w")
for some in ids.split(1024):
    items(some)
items.score(torch.ones(dim), k=1)
looked_up = own() - before
before = own()
items.table.scatter(ids[:1000], torch.ones(1000, dim))
print(looked_up, own() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lookups_take_no_memory_and_writes_that_of_the_pages_they_write(tmp_path: Path) -> None:
    """A third of 16,384 rows of 4 KiB is looked up, and all are scored; then 1,000 are written, in two pages each."""
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "large.safetensors")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    looked_up, written = map(int, done.stdout.split())
    assert looked_up < 16 << 20
    assert 1000 * 4096 <= written <= 3 * 1000 * 4096 + (8 << 20)


# ---------------------------------------------------------------------- shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    files = {
        "model-00001-of-00002.safetensors": {"model.embed_tokens.weight": rows_of(), "norm": torch.ones(4)},
        "model-00002-of-00002.safetensors": {"users.weight": rows_of(seed=2), "lm_head.weight": rows_of(seed=3)},
    }
    for file, tensors in files.items():
        write(folder / file, tensors)
    names = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_tensor_is_found_in_a_folder_an_index_and_a_list(shards: Path) -> None:
    files = sorted(shards.glob("*.safetensors"))
    for source in (shards, shards / "model.safetensors.index.json", files[1], [str(file) for file in files]):
        items = speedswap.Embedding.from_file(source, name="users.weight")
        assert torch.equal(items.read(), rows_of(seed=2))
        assert items.table.name == "users.weight"
    files[0].unlink()  # an index opens only what is asked for
    assert torch.equal(speedswap.Embedding.from_file(shards, "users.weight").read(), rows_of(seed=2))
    (shards / "model.safetensors.index.json").unlink()
    assert torch.equal(speedswap.Embedding.from_file(shards, "users.weight").read(), rows_of(seed=2))


def index(folder: Path, text: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def other(folder: Path) -> list[Path]:
    return [write(folder / name, {"rows": rows_of()}) for name in ("a.safetensors", "b.safetensors")]


WRONG: dict[str, tuple[str, type[Exception], Callable[[Path], Any], dict[str, Any]]] = {
    "a name": ("has no tensor 'embed_tokens.weight', but model.embed_tokens.weight", ValueError, lambda f: f, {}),
    "a vector": (
        r"'norm' .* is \(4,\) of torch.float32, but rows in place are a matrix",
        TypeError,
        lambda f: f,
        {"name": "norm"},
    ),
    "no folder": ("does not exist; give a safetensors file, its index", FileNotFoundError, lambda f: f / "none", {}),
    "an empty folder": (r"has no \*\.safetensors files", FileNotFoundError, lambda f: f.parent, {}),
    "a number": ("file is an int; give a safetensors file", TypeError, lambda f: 3, {}),
    "twice": ("has a tensor 'rows', and so has", TableFormatError, other, {"name": "rows"}),
    "no index": ("is not an index of safetensors files", TableFormatError, lambda f: index(f, "{}"), {}),
    "nested": ("is not an index of safetensors files", TableFormatError, lambda f: index(f, "[" * 99_999), {}),
    "elsewhere": (
        "names '../x.safetensors', which is not a file next to it",
        TableFormatError,
        lambda f: index(f, '{"weight_map": {"rows": "../x.safetensors"}}'),
        {},
    ),
    "another shard": (
        "has no tensor 'rows', although its index says so",
        TableFormatError,
        lambda f: index(f, '{"weight_map": {"rows": "model-00002-of-00002.safetensors"}}'),
        {"name": "rows"},
    ),
    "integers": (
        r"of torch.int64, but rows in place are a matrix of floating-point.*Table\.from_file",
        TypeError,
        lambda f: write(f / "i.safetensors", {"i": torch.ones(4, 4, dtype=torch.int64)}),
        {"name": "i"},
    ),
    "8 bits": (
        "of torch.float8_e4m3fn, but rows in place",
        TypeError,
        lambda f: write(f / "i.safetensors", {"i": torch.ones(4, 4).to(torch.float8_e4m3fn)}),
        {"name": "i"},
    ),
    "a dtype": (r"dtype is torch.float64, but the rows are read", TypeError, lambda f: f, {"dtype": torch.float64}),
    "a seed": ("seed is 3, but the rows are read in place", TypeError, lambda f: f, {"seed": 3}),
    "several tensors": ("3 tensors, and scale is None; .* storage=", ValueError, lambda f: f, {"name": "*.weight"}),
    "scales": ("and scale is 'norm'; .* storage=", ValueError, lambda f: f, {"name": "users.weight", "scale": "norm"}),
    "max_norm": (
        "max_norm is 1.0, but a lookup does not change the table",
        ValueError,
        lambda f: f,
        {"name": "users.weight", "max_norm": 1.0},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_in_place_is_refused(case: str, shards: Path) -> None:
    message, kind, source, settings = WRONG[case]
    with pytest.raises(kind, match=message):
        speedswap.Embedding.from_file(source(shards), **{"name": "embed_tokens.weight", **settings})


def test_a_file_that_was_cut_short_or_changes_under_its_rows_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"w": rows_of()})
    raw = file.read_bytes()
    items = speedswap.Embedding.from_file(file, "w", freeze=False)
    other = tmp_path / "other"
    other.write_bytes(raw[:-1])
    os.replace(other, file)  # another file of the same name
    with pytest.raises(TableFormatError, match=f"damaged: it has {len(raw) - 1} bytes, and its tensors end at"):
        speedswap.Embedding.from_file(file, "w")
    assert torch.equal(items(IDS), rows_of()[IDS])
    file.write_bytes(raw)
    items = speedswap.Embedding.from_file(file, "w", freeze=False)
    optimizer = torch.optim.SGD(items.parameters(), lr=0.1)
    items(IDS).sum().backward()
    os.truncate(file, len(raw) // 2)
    for use in (optimizer.step, lambda: items(IDS), lambda: items.read(), lambda: items.table.save(tmp_path / "t")):
        with pytest.raises(TableClosedError, match="was written after its rows were mapped"):
            use()
    items.table.close()
    items.table.close()
    with pytest.raises(TableClosedError, match="is closed"):
        items(IDS)


# ---------------------------------------------------------------------- copies of it


def test_trained_rows_are_saved_copied_and_resumed(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"w": rows_of()})
    model = nn.Sequential(speedswap.Embedding.from_file(file, "w", freeze=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    optimizer.step()
    rows = model[0].read()
    speedswap.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    twin = copy.deepcopy(model)
    assert twin[0].table.storage != "file"
    model[0].table.save(tmp_path / "table")
    with speedswap.Table.open(tmp_path / "table", mode="r") as table:
        assert torch.equal(table.read(), rows)
        assert torch.equal(table.read(column="exp_avg"), model[0].table.read(column="exp_avg"))
    for step in range(2):
        optimizer.zero_grad()
        model(IDS + step - 1).square().sum().backward()
        optimizer.step()
    assert torch.equal(twin[0].read(), rows)
    assert torch.equal(model.state_dict()["0.weight"], model[0].read())

    again = nn.Sequential(speedswap.Embedding.from_file(file, "w", freeze=False))
    after = torch.optim.Adam(again.parameters(), lr=0.1)
    speedswap.load_checkpoint(tmp_path / "saved", again, after)
    assert torch.equal(again[0].read(), rows)
    for step in range(2):
        after.zero_grad()
        again(IDS + step - 1).square().sum().backward()
        after.step()
    assert torch.equal(again[0].read(), model[0].read())
    with pytest.raises(TypeError, match="cannot be pickled; save"):
        pickle.dumps(again)


def test_idle_rows_take_the_steps_they_missed(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"w": rows_of()})
    items, plain = (
        speedswap.Embedding.from_file(file, "w", freeze=False),
        nn.Embedding.from_pretrained(rows_of(), False),
    )
    for module in (items, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
        if module is items:
            speedswap.attach(optimizer, items, idle_rows="dense")
        for step in range(3):
            optimizer.zero_grad()
            module(IDS - step).sum().backward()
            optimizer.step()
    torch.testing.assert_close(items.read(), plain.weight.detach())


def test_files_of_the_safetensors_package_are_read(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"w": rows_of(torch.bfloat16), "b": torch.ones(3)}, tmp_path / "m.safetensors", {"format": "pt"})
    assert torch.equal(speedswap.Embedding.from_file(tmp_path / "m.safetensors", "w").read(), rows_of(torch.bfloat16))
