"""Checkpoints that are damaged, hostile or of another model are refused, and nothing is changed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swapping.checkpoints.trainings import OPTIMIZERS, Training, assert_same
from torch import nn

import speedswap
from speedswap.errors import CheckpointError, TableClosedError, TableTooLargeError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint with a copy of each table, changes of one, and tensors in two files."""
    path = tmp_path_factory.mktemp("saved")
    training = Training(OPTIMIZERS["adam"]).run(range(2))
    training.save(path, 2)
    training.model.item.table.write(5, torch.ones(1, 4, dtype=torch.float64))
    with torch.no_grad():
        training.model.layers[2].bias.add_(1)
    return training.save(path, 3).path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copied")
    return tmp_path / "copied"


def refuse(path: Path, match: str = "cannot be read") -> None:
    """Expect an error, and an unchanged training."""
    training = Training(OPTIMIZERS["adam"]).run(range(1))
    before = training.state()
    before = json.loads(json.dumps(before, default=lambda tensor: tensor.tolist()))
    with pytest.raises(CheckpointError, match=match):
        training.load(path)
    after = json.loads(json.dumps(training.state(), default=lambda tensor: tensor.tolist()))
    assert_same(after, before)


@pytest.mark.release
def test_every_file_that_is_cut_or_missing_is_noticed(saved: Path, copied: Path) -> None:
    files = sorted(path.relative_to(saved) for path in saved.rglob("*") if path.is_file())
    assert {name.suffix for name in files} >= {".safetensors", ".log"}
    for name in files:
        if name.name in ("LOCK", "OWNER"):
            continue
        raw = (saved / name).read_bytes()
        # A log ends in unused space, and has two copies of its heads.
        in_log = name.name in ("rows.log", "HEAD")
        for cut in (None, 0, 1, *(() if in_log else (len(raw) // 2, len(raw) - 1))):
            os.unlink(copied / name)
            if cut is not None:
                (copied / name).write_bytes(raw[:cut])
            refuse(copied, "cannot be read|where there is no checkpoint")
            (copied / name).write_bytes(raw)


def test_flipped_bits_are_noticed(saved: Path, copied: Path) -> None:
    draw = random.Random(1)
    for path in sorted(copied.rglob("*")):
        if path.suffix == ".safetensors" or path.name in ("CHECKPOINT", "MANIFEST"):
            raw = path.read_bytes()
            for _ in range(4):
                damaged = bytearray(raw)
                damaged[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
                os.unlink(path)
                path.write_bytes(damaged)
                refuse(copied)
            path.write_bytes(raw)


@pytest.mark.parametrize("call", ["pread", "preadv", "open"])
def test_a_read_error_is_named_with_its_file(call: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk or its cable has failed: the checkpoint may be whole, and should not be removed."""
    training, real = Training(OPTIMIZERS["adam"]), getattr(os, call)
    for failing in range(4):
        calls = itertools.count()

        def fails(*args: Any, calls: Any = calls, last: int = failing, **settings: Any) -> Any:
            if next(calls) == last:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **settings)

        monkeypatch.setattr(os, call, fails)
        with pytest.raises(CheckpointError) as refused:
            training.load(saved)
        monkeypatch.undo()
        assert re.match(rf"{saved}.* cannot be read \(Input/output error\), .* and load it again$", str(refused.value))
        assert isinstance(refused.value.__cause__, OSError)
        training.load(saved)


def change(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change the description, with a valid checksum."""
    data = json.loads((folder / "CHECKPOINT").read_bytes().partition(b"\n")[2])
    how(data)
    body = json.dumps(data).encode()
    os.unlink(folder / "CHECKPOINT")
    (folder / "CHECKPOINT").write_bytes(b"%08x\n" % zlib.crc32(body) + body)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a version": lambda data: data.update(version=2),
    "no step": lambda data: data.update(step=-1),
    "another format": lambda data: data.update(format="pickle"),
    "no content": lambda data: data.update(content=[]),
    "content without a model": lambda data: data["content"].pop("model"),
    "a tensor elsewhere": lambda data: next(iter(data["tensors"].values())).update(file="../../secret"),
    "a tensor's wrong name": lambda data: next(iter(data["tensors"].values())).update(key="nothing"),
    "a copy elsewhere": lambda data: data["tables"][0].update(copy="/etc"),
    "a copy above": lambda data: data["tables"][0].update(copy=".."),
    "other columns": lambda data: data["tables"][0]["columns"].pop("weight"),
    "other rows": lambda data: data["tables"][0].update(num_embeddings=10**12),
    "unknown fields": lambda data: data["tables"][0].update(more=1),
    "no tables": lambda data: data.update(tables=None),
    "changes of more rows": lambda data: data["tables"][1]["deltas"][0].update(rows=10**15),
    "an id map that is missing": lambda data: data["tables"][0]["id_maps"].update({"": "nowhere"}),
    "an unknown kind": lambda data: data["content"].update(extra={"$pickle": "gASVKA=="}),
    "an unknown tensor": lambda data: data["content"].update(extra={"$tensor": "nowhere"}),
    "keys that are lists": lambda data: data["content"].update(extra={"$dict": [[[1], 2]]}),
    "a dtype": lambda data: data["content"].update(extra={"$dtype": "os"}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_description_is_refused(kind: str, copied: Path) -> None:
    change(copied, HOSTILE[kind])
    refuse(copied, "cannot be read|make the model")


def test_deep_nesting_is_refused(copied: Path) -> None:
    body = b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    os.unlink(copied / "CHECKPOINT")
    (copied / "CHECKPOINT").write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    refuse(copied)


def header(**entry: Any) -> bytes:
    given = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()
    return len(given).to_bytes(8, "little") + given


@pytest.mark.parametrize(
    "raw",
    [
        (2**63).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        header(shape=[2**62], data_offsets=[0, 2**64]),
        header(shape=[2**40], data_offsets=[0, 2**42]),
        header(shape=[2**32, 2**32, 0], data_offsets=[0, 0]) + bytes(8),
        header(shape=[-2], data_offsets=[0, 8]) + bytes(8),
        header(shape=[2.0]) + bytes(8),
        header(data_offsets=[8, 16]) + bytes(16),
        header(dtype="O") + bytes(8),
        header(shape=[1] * 100) + bytes(8),
        header() + bytes(9),
        header() + bytes(7),
        b"",
    ],
)
def test_a_hostile_file_of_tensors_is_refused_without_allocating(raw: bytes, copied: Path) -> None:
    for path in copied.glob("*.safetensors"):
        os.unlink(path)
        path.write_bytes(raw)
    refuse(copied)


@pytest.mark.parametrize("name", ["CHECKPOINT", "tensors-1.safetensors", "table-1-0"])
def test_links_and_pipes_are_not_followed(name: str, copied: Path, tmp_path: Path) -> None:
    (copied / name).rename(tmp_path / "elsewhere")
    (copied / name).symlink_to(tmp_path / "elsewhere")
    refuse(copied)
    (copied / name).unlink()
    os.mkfifo(copied / name)
    refuse(copied)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path, saved: Path) -> None:
    refuse(tmp_path / "nowhere", "where there is no checkpoint; give the path that save_checkpoint was given")
    with pytest.raises(CheckpointError, match=r"step is 7, where there are checkpoints of steps 3; give"):
        speedswap.load_checkpoint(saved.parent, nn.Linear(1, 1), step=7)


def test_another_model_or_optimizer_is_named(tmp_path: Path) -> None:
    def make(
        rows: int = 10, dim: int = 4, out: int = 1, dtype: torch.dtype = torch.float32, **settings: Any
    ) -> nn.Module:
        items = speedswap.Embedding(rows, dim, storage="pageable", name="items", dtype=dtype, seed=1, **settings)
        return nn.Sequential(items, nn.Linear(4, out))

    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    speedswap.save_checkpoint(tmp_path, model, optimizer, extra=[1])

    def load(match: str, other: nn.Module, make_optimizer: Any = None, **settings: Any) -> None:
        its = None if make_optimizer is None else make_optimizer(other.parameters())
        with pytest.raises(CheckpointError, match=match):
            speedswap.load_checkpoint(tmp_path, other, its, **settings)

    adam = torch.optim.Adam
    load(r"table 'items' of the model \(0\) has 12 rows, but the checkpoint .* has 10; make", make(rows=12))
    load(r"column 'weight' of .* is \(5,\) of torch.float32 per row, but in .* it is \(4,\) of", make(dim=5), adam)
    load("is .* of torch.float64 per row, but", make(dtype=torch.float64))
    load(r"'1.weight' is \(2, 4\) of torch.float32 in the model, but \(1, 4\) of torch.float32 in", make(out=2))
    load(r"the model has tables at \[\], but the checkpoint .* at \['0'\]", nn.Sequential(nn.Identity(), model[1]))
    load("'weight' is .* in the model, but missing in the checkpoint", nn.Linear(4, 1))
    load("optimizer is SGD, but the checkpoint .* has Adam; give the same", make(), lambda p: torch.optim.SGD(p, 0.1))
    load(r"groups of \[1\] parameters, but in the checkpoint .* of \[3\]", make(), lambda params: adam([next(params)]))
    load("extra has 'scheduler', but the checkpoint", make(), extra={"scheduler": object()})
    load("column 'max_exp_avg_sq' of .*, but in the .* it is not there", make(), lambda p: adam(p, amsgrad=True))
    load("id maps", make(rows=10, id_map=speedswap.IdMap(9)))


def test_other_initial_values_are_refused_where_rows_start_anew(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        items = speedswap.Embedding(5, 2, id_map=speedswap.IdMap(4, evict="lru"), seed=seed)
        return items, torch.optim.Adagrad(items.parameters())

    speedswap.save_checkpoint(tmp_path, *make(3))
    with pytest.raises(CheckpointError, match=r"has seed 4, but .* has 3, on which resetting rows depends; .*=3"):
        speedswap.load_checkpoint(tmp_path, *make(4))
    speedswap.load_checkpoint(tmp_path, make(4)[0])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"step": -1}, "step is -1; give the number of steps taken"),
        ({"keep": 0}, "keep is 0; give 1 or more"),
        ({"keep": np.int64(-1)}, "keep is -1; give 1 or more"),
        ({"keep": 2.0}, "keep is 2.0; give 1 or more, steps to keep, or None for all"),
        ({"keep": "3"}, "keep is '3'; give 1 or more, steps to keep"),
        ({"keep": [1, 2.5]}, r"keep is \[1, 2.5\]; give 1 or more, steps to keep"),
        ({"extra": {"f": lambda: 0}}, "extra.f is a function, which a checkpoint cannot hold without pickle; give"),
        ({"extra": [torch.eye(2).to_sparse()]}, "extra.0 is a tensor of layout torch.sparse_coo"),
        ({"extra": "x" * 9_000_000}, "the plain data of the checkpoint .extra and others. takes 90.* bytes as JSON"),
        ({"optimizer": 5}, "optimizer is an int; give an optimizer of torch, a list of them, or None"),
    ],
)
def test_arguments_that_do_not_fit_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        speedswap.save_checkpoint(tmp_path, nn.Linear(1, 1), **settings)
    assert not [path for path in tmp_path.iterdir() if re.match(r"\d", path.name)]


def test_a_state_dict_of_a_table_larger_than_memory_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    items = speedswap.Embedding(1000, 8, storage="pageable")
    optimizer = torch.optim.Adam(items.parameters())
    items(torch.tensor([1])).sum().backward()
    optimizer.step()
    monkeypatch.setattr("speedswap.tables.whole_table.available_bytes", lambda: 1000)
    for state_dict in (items.state_dict, optimizer.state_dict):
        with pytest.raises(
            TableTooLargeError, match=r"GiB of memory are free; .* use speedswap.save_checkpoint\(path, "
        ):
            state_dict()


def test_plain_data_comes_back_as_it_was(tmp_path: Path) -> None:
    import collections

    extra = {
        "numbers": [1, -(2**80), 0.1, float("inf"), True, None],
        "nested": {"tuple": (1, [2, (3,)]), "empty": {}, "text": "ü", 5: "five", "$tensor": "no tensor"},
        "counter": collections.Counter([3, 3, 7]),
        "bytes": b"\x00\xff",
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
        "bits": torch.tensor([[1, 2]], dtype=torch.uint32),
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 3),
        "dtype": torch.float16,
    }
    array = np.arange(3, dtype=np.uint32)
    speedswap.save_checkpoint(tmp_path, nn.Linear(1, 1), extra=extra | {"array": array, "number": np.float32(0.1)})
    found = speedswap.load_checkpoint(tmp_path, nn.Linear(1, 1)).extra
    assert found.pop("array").tolist() == array.tolist()
    assert found.pop("number") == float(np.float32(0.1))
    assert_same(found, extra)


def test_files_of_tensors_are_those_of_safetensors(saved: Path) -> None:
    """Other programs read them."""
    reader = pytest.importorskip("safetensors.torch")
    found: dict[str, torch.Tensor] = {}
    for path in sorted(saved.glob("*.safetensors")):
        found |= reader.load_file(path)
    model = Training(OPTIMIZERS["adam"]).model
    speedswap.load_checkpoint(saved, model)
    assert torch.equal(found["model.layers.2.bias"], model.layers[2].bias)
    assert torch.equal(found["model.layers.2.weight"], model.layers[2].weight)
    assert found["rows"].tolist() == [5]
    assert torch.equal(found["weight"], torch.ones(1, 4, dtype=torch.float64))


def keyed(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    items = speedswap.Embedding(11, 4, seed=3, name="items", id_map=speedswap.IdMap(10, **settings))
    model = nn.Sequential(items, nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters())


@pytest.mark.parametrize("settings", [{"keys": "hashed"}, {"admit_after": 2}, {"evict": "lru"}])
def test_an_id_map_of_other_settings_is_refused_before_anything_changes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = keyed()
    model(torch.tensor([10**9, 7])).sum().backward()
    optimizer.step()
    speedswap.save_checkpoint(tmp_path, model, optimizer)
    other, of_other = keyed(**settings)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    ((name, value),) = settings.items()
    message = (
        rf"the id map of table 'items' in checkpoint .* was made with {name}=.*, but this map with {value!r}; make"
    )
    with pytest.raises(CheckpointError, match=message):
        speedswap.load_checkpoint(tmp_path, other, of_other)
    assert list(other[0].table.columns) == ["weight"]
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_collections_map_of_other_settings_is_named(tmp_path: Path) -> None:
    def collection(**settings: Any) -> speedswap.EmbeddingCollection:
        maps = {"user": speedswap.IdMap(10), "item": speedswap.IdMap(10, **settings)}
        configs = [speedswap.EmbeddingConfig(name=name, embedding_dim=4, id_map=own) for name, own in maps.items()]
        return speedswap.EmbeddingCollection(configs)

    speedswap.save_checkpoint(tmp_path, collection())
    with pytest.raises(CheckpointError, match=r"the id map of table 'item' in checkpoint .* made with evict=None, but"):
        speedswap.load_checkpoint(tmp_path, collection(evict="lru"))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_closed_table_is_named_before_anything_changes(where: str, tmp_path: Path) -> None:
    id_map = speedswap.IdMap(10)
    items = speedswap.Embedding(11, 4, id_map=id_map, path=tmp_path / "items" if where == "disk" else None)
    optimizer = torch.optim.Adam(items.parameters())
    items(torch.tensor([10**9, 7])).sum().backward()
    optimizer.step()
    speedswap.save_checkpoint(tmp_path / "saved", items, optimizer)
    items(torch.tensor([8]))
    before = id_map.to_bytes()
    items.table.close()
    with pytest.raises(TableClosedError, match=f"table {items.table.name!r} is closed"):
        speedswap.load_checkpoint(tmp_path / "saved", items, optimizer)
    assert torch.equal(id_map.to_bytes(), before)


@pytest.mark.parametrize("name", ["", "0"])
def test_a_table_that_was_moved_away_is_to_be_put_back(name: str, tmp_path: Path) -> None:
    """It must not be removed: the checkpoint is whole again once the table is back."""
    items = speedswap.Embedding(9, 4, path=tmp_path / "items")
    speedswap.save_checkpoint(tmp_path / "checkpoints", nn.Sequential(items) if name else items)
    expected = items.read()
    items.table.close()
    (tmp_path / "items").rename(tmp_path / "elsewhere")
    other = speedswap.Embedding(9, 4)
    model = nn.Sequential(other) if name else other
    which = f"table {name!r}" if name else "the table"
    where = re.escape(f"refers to {which} at {tmp_path / 'items'}, which is not there; put the table's directory back")
    with pytest.raises(CheckpointError, match=where) as refused:
        speedswap.load_checkpoint(tmp_path / "checkpoints", model)
    assert "remove" not in str(refused.value)
    (tmp_path / "elsewhere").rename(tmp_path / "items")
    speedswap.load_checkpoint(tmp_path / "checkpoints", model)
    assert torch.equal(other.read(), expected)


@pytest.mark.parametrize("changed", [False, True], ids=["copy", "changed row"])
@pytest.mark.parametrize("what", ["weight", "momentum_buffer"])
def test_values_that_the_table_cannot_store_are_refused(what: str, changed: bool, tmp_path: Path) -> None:
    """They would become infinite; the table holds what it held."""

    def training(**stored: Any) -> tuple[speedswap.Embedding, torch.optim.Optimizer]:
        items = speedswap.Embedding(60, 4, seed=1, **stored)
        optimizer = torch.optim.SGD(items.parameters(), lr=1e-9, momentum=0.9)
        items(torch.arange(60)).sum().backward()
        optimizer.step()
        return items, optimizer

    items, optimizer = training()
    if changed:
        speedswap.save_checkpoint(tmp_path, items, optimizer, step=1)
    items.table.write(7, torch.full((1, 4), 1e6), column=what)
    speedswap.save_checkpoint(tmp_path, items, optimizer, step=2)
    key = "stored_dtype" if what == "weight" else "state_dtype"
    items, optimizer = training(**{key: torch.float16})
    before = items.read()
    with pytest.raises(CheckpointError, match=f"column '{what}' has the value 1e\\+06, but is stored as torch.float16"):
        speedswap.load_checkpoint(tmp_path, items, optimizer)
    assert torch.equal(items.read(), before)
    items, optimizer = training(**{key: torch.bfloat16})
    assert speedswap.load_checkpoint(tmp_path, items, optimizer).step == 2


@pytest.mark.parametrize(
    "extra, error, message",
    [
        (
            np.arange(3, dtype=">i4"),
            TypeError,
            "extra.x is an array of >i4, .*; give numbers in this machine's byte order",
        ),
        (10**5000, ValueError, "extra.x is an int of 16610 bits, of at most 14000; give bytes"),
    ],
    ids=["array", "int"],
)
def test_extra_that_could_not_be_read_again_is_refused(
    extra: object, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        speedswap.save_checkpoint(tmp_path, nn.Linear(1, 1), extra={"x": extra})
    largest = 2**14_000 - 1
    speedswap.save_checkpoint(tmp_path, nn.Linear(1, 1), extra={"x": largest})
    assert speedswap.load_checkpoint(tmp_path, None).extra == {"x": largest}
