"""Checkpoints under paths of any kind: links, names that are taken, new directories; and what they cannot hold."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import speedswap
from speedswap.swapping.checkpoints.folders import Folders
from speedswap.swapping.checkpoints.saving import TablesToSave


def training(path: Path | None = None, table: speedswap.Table | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a table in memory, at a path, or given; and its optimizer."""
    made = speedswap.Embedding(50, 4, seed=1, **({"table": table} if table is not None else {"path": path}))
    model = nn.Sequential(made, nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> torch.Tensor:
    """Train a step, and return the rows after it."""
    optimizer.zero_grad()
    model(torch.arange(first, first + 5)).square().sum().backward()
    optimizer.step()
    rows: torch.Tensor = model[0].read()
    return rows


@pytest.mark.parametrize("linked", ["checkpoints", "table", "both", "all"])
def test_a_training_goes_on_from_a_checkpoint_behind_links(linked: str, tmp_path: Path) -> None:
    """A link to another disk leads elsewhere, and so does the path from there back to the table."""
    far = tmp_path / "far" / "away"
    far.mkdir(parents=True)
    if linked == "all":
        (tmp_path / "run").symlink_to(far)
    run = tmp_path / "run" if linked == "all" else tmp_path
    if linked in ("checkpoints", "both"):
        (far / "saved").mkdir()
        (tmp_path / "saved").symlink_to(far / "saved")
    if linked in ("table", "both"):
        training(far / "table")[0][0].table.close()
        (tmp_path / "table").symlink_to(far / "table")
        trained = training(table=speedswap.Table.open(run / "table"))
    else:
        trained = training(run / "table")
    expected = step(*trained, 0)
    speedswap.save_checkpoint(run / "saved", *trained)
    step(*trained, 2)
    for first in (3, 9):  # the second is of the commit that the first has left
        trained[0][0].table.close()
        trained = training(table=speedswap.Table.open(run / "table"))
        speedswap.load_checkpoint(run / "saved", *trained)
        assert torch.equal(trained[0][0].read(), expected)
        expected = step(*trained, first)
        speedswap.save_checkpoint(run / "saved", *trained)
        step(*trained, first + 1)
    assert len(trained[0][0].table.commits.held) == 1


def test_a_link_to_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Such as one that is called ``latest``, wherever it is."""
    trained = training(tmp_path / "run" / "table")
    expected = step(*trained, 0)
    saved = speedswap.save_checkpoint(tmp_path / "run" / "saved", *trained)
    step(*trained, 2)
    (tmp_path / "latest").symlink_to(saved.path)
    speedswap.load_checkpoint(tmp_path / "latest", *trained)
    assert torch.equal(trained[0][0].read(), expected)


@pytest.mark.parametrize("stored", ["beside it", "in it"])
def test_a_checkpoint_on_a_read_only_file_system_is_loaded(stored: str, small_disk: Path, tmp_path: Path) -> None:
    """A table elsewhere trains on; one on the same file system is read, or copied."""
    place = tmp_path / "table" if stored == "beside it" else small_disk / "table"
    model, optimizer = training(place)
    step(model, optimizer, 3)
    expected = step(model, optimizer, 6)
    speedswap.save_checkpoint(small_disk / "saved", model, optimizer, step=2)
    if stored == "in it":
        model[0].table.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    if stored == "in it":
        with pytest.raises(OSError, match=r"cannot be written \(Read-only file system\); open it with mode='r'"):
            speedswap.Table.open(place)
        model, optimizer = training(table=speedswap.Table.create(50, 4))
    else:
        step(model, optimizer, 9)
    assert speedswap.load_checkpoint(small_disk / "saved", model, optimizer).step == 2
    assert torch.equal(model[0].read(), expected)
    if stored == "in it":
        with speedswap.Table.open(place, mode="r") as table:
            assert torch.equal(table.read(), expected)
    with pytest.raises(OSError, match="Read-only file system"):
        speedswap.save_checkpoint(small_disk / "saved", model, optimizer, step=3)
    assert not torch.equal(step(model, optimizer, 9), expected)


def test_an_old_checkpoint_that_was_moved_is_removed_as_the_link_that_is_there(tmp_path: Path) -> None:
    """The target stays."""
    trained = training()
    saved = speedswap.save_checkpoint(tmp_path / "saved", *trained)
    saved.path.rename(tmp_path / "moved")
    saved.path.symlink_to(tmp_path / "moved")
    for number in (1, 2):
        speedswap.save_checkpoint(tmp_path / "saved", *trained, step=number)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["000003-step-2"]
    speedswap.load_checkpoint(tmp_path / "moved", *trained)


@pytest.mark.parametrize("kind", ["link", "file", "broken link"])
def test_names_that_are_taken_are_cleared(kind: str, tmp_path: Path) -> None:
    """By a link that no save has left, whose target stays."""
    (tmp_path / "saved").mkdir()
    precious = tmp_path / "precious"
    if kind == "link":
        precious.mkdir()
    for name in (".unfinished", ".removed"):
        if kind == "file":
            (tmp_path / "saved" / name).write_text("")
        else:
            (tmp_path / "saved" / name).symlink_to(precious)
    trained = training()
    for number in (1, 2):
        speedswap.save_checkpoint(tmp_path / "saved", *trained, step=number)
    assert precious.exists() == (kind == "link")


def test_new_directories_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: a checkpoint in a directory that a power failure takes back is none."""
    synced, sync = set[Path](), os.fsync

    def syncs(fd: int) -> None:
        sync(fd)
        synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", syncs)
    speedswap.save_checkpoint(tmp_path / "a" / "b" / "saved", *training())
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "saved"} <= synced


def test_commits_are_not_let_go_for_want_of_file_descriptors(tmp_path: Path) -> None:
    """A checkpoint that is unreadable for that reason is not taken for a removed one."""
    trained = training(tmp_path / "table")
    speedswap.save_checkpoint(tmp_path / "saved", *trained)
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with suppress(OSError):
            used.extend(iter(lambda: os.open(os.devnull, os.O_RDONLY), None))
        for _ in range(2):  # the directory and a file
            os.close(used.pop())
        found = Folders(tmp_path / "saved").read()
        assert (len(found.manifests), found.unknown) == (1, [])
        used.append(os.open(os.devnull, os.O_RDONLY))
        found = Folders(tmp_path / "saved").read()
        assert not found.manifests
        assert "Too many open files" in found.unknown[0]
    finally:
        for fd in used:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# ---- what it cannot hold ---------------------------------------------------------------------------------------------

ITSELF: list[Any] = []
ITSELF.append(ITSELF)
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("extra", "error"),
    [({"epoch": [1, {"loader": object()}]}, TypeError), (ITSELF, ValueError), (DEEP, ValueError)],
    ids=["an object", "itself", "deep"],
)
def test_extra_that_cannot_be_written_is_refused_before_tables_are(
    extra: Any, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = training()
    monkeypatch.setattr(TablesToSave, "save", lambda *given: pytest.fail("a table is written"))
    with pytest.raises(error, match=r"^extra\.(epoch\.1\.loader is an object|0\.0.*or is nested more than 100 deep)"):
        speedswap.save_checkpoint(tmp_path / "saved", *trained, extra=extra)
    assert not list((tmp_path / "saved").iterdir())


ODD = {
    "scalar": torch.tensor(3.0),
    "no rows": torch.empty(0, 3),
    "no columns": torch.empty(3, 0),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "expanded": torch.ones(1, 3).expand(5, 3),
    "strided": torch.arange(6.0)[::2],
    "halves": torch.arange(3).bfloat16(),
    "booleans": torch.tensor([True, False]),
    "one bool": torch.tensor(True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "eighths": torch.arange(3.0).to(torch.float8_e4m3fn),
    "uint16": torch.arange(3).to(torch.uint16),
}


def test_odd_tensors_come_back(tmp_path: Path) -> None:
    """As buffers: of any dtype and strides, without values or dimensions, and two over one memory."""
    both = torch.arange(4.0)

    def made(values: dict[str, torch.Tensor]) -> nn.Module:
        model = nn.Sequential(speedswap.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[1].weight
        for name, value in values.items():
            model[1].register_buffer(name, value)
        return model

    values = {**ODD, "whole": both, "end": both[2:]}
    model = made(values)
    speedswap.save_checkpoint(tmp_path, model)
    found = made({name: torch.zeros_like(value) for name, value in values.items()})
    speedswap.load_checkpoint(tmp_path, found)
    for name, value in values.items():
        other = found[1].get_buffer(name)
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        assert other.resolve_neg().tolist() == value.resolve_neg().tolist(), name
    assert found[2].weight is found[1].weight
    assert torch.equal(found[1].weight, model[1].weight)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.empty(3, device="meta"), "on meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_tensors_that_are_not_dense_are_refused_by_name(
    make: Callable[[], torch.Tensor], kind: str, tmp_path: Path
) -> None:
    model = nn.Sequential(speedswap.Embedding(9, 4))
    model.register_buffer("odd", make())
    with pytest.raises(TypeError, match=f"^model.odd is .*{kind}.*; give a dense one"):
        speedswap.save_checkpoint(tmp_path / "saved", model)
    assert not list((tmp_path / "saved").iterdir())
