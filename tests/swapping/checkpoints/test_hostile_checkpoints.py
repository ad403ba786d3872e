"""Checkpoints with right checksums and wrong content, one field at a time: refused before anything has changed."""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swapping.checkpoints.trainings import OPTIMIZERS, Training, assert_same
from torture.hostile import VALUES, fields, replaced, write

from speedswap.errors import CheckpointError
from speedswap.swapping.checkpoints.files import NewFiles, digest_of
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.files.tensor_files import TensorReader


class Attacked:
    """A training, and a checkpoint that is changed under it."""

    def __init__(self, folder: Path) -> None:
        training = Training(OPTIMIZERS["adam"]).run(range(2))
        training.save(folder / "saved", 2)
        training.model.item.table.write(5, torch.ones(1, 4, dtype=torch.float64))
        self.folder = training.save(folder / "saved", 3).path
        self.data = json.loads((self.folder / "CHECKPOINT").read_bytes().partition(b"\n")[2])
        self.training = Training(OPTIMIZERS["adam"]).run(range(1))

    def state(self) -> Any:
        numpy = np.random.get_state()[1:]  # noqa: NPY002
        return copy.deepcopy([self.training.state(), random.getstate(), [torch.as_tensor(each) for each in numpy]])

    def load(self, what: str) -> str:
        """Load, which ends in an error that leaves everything, or in a training that goes on; return which."""
        before = self.state()
        try:
            self.training.load(self.folder)
        except Exception as error:
            assert isinstance(error, CheckpointError) and str(self.folder) in str(error), f"{what}: {error!r}"  # noqa: PT017, PT018
            assert_same(self.state(), before, what)
            return "refused"
        np.random.rand(700), torch.rand(700), torch.randn(7), random.random()  # noqa: NPY002 (nothing is read outside)
        self.training = Training(OPTIMIZERS["adam"]).run(range(1))
        return "loaded"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    return Attacked(tmp_path_factory.mktemp("hostile"))


@pytest.mark.release
def test_any_value_in_any_field_of_the_description(attacked: Attacked) -> None:
    draw, found = random.Random(1), Counter[str]()
    for path in fields(attacked.data):
        for value in (..., *draw.sample(VALUES, 2)):
            write(attacked.folder, replaced(attacked.data, path, value))
            found[attacked.load(f"{path}: {value!r}")] += 1
    assert found["refused"] > 4 * found["loaded"] > 0


STATE = ("content", "optimizers", 0, "state")


@pytest.mark.parametrize(
    "path, value",
    [
        (("content", "random", "numpy", "state", "pos"), 2 * 10**9),  # NumPy reads there without a check
        (("content", "random", "numpy", "state", "pos"), -1),
        (("content", "random", "python", "gauss"), "x"),
        (("content", "random", "torch"), "x"),
        (("content", "random", "cuda"), ["x"]),
        (("content", "random"), []),
        ((*STATE, "state"), []),
        ((*STATE, "state", "$dict", 0, 1, "exp_avg"), ...),
        ((*STATE, "state", "$dict", 0, 1, "exp_avg"), {"$tensor": "optimizers.0.state.2.step"}),
        ((*STATE, "state", "$dict", 4, 1, "step"), "x"),
        ((*STATE, "param_groups", 0, "lr"), "x"),
        ((*STATE, "param_groups", 0, "lr"), ...),
        ((*STATE, "param_groups", 0, "fused"), "x"),
        ((*STATE, "param_groups", 0, "params"), 5),
        (("content", "model", "more"), 5),
        (("content", "extra", "scaler"), {"a": 1}),
        (("tables", 0, "is_initial"), "x"),
        (("tables", 0, "id_maps", ""), [[]]),
    ],
)  # fmt: skip
def test_what_would_fail_late_is_refused_early(path: tuple[Any, ...], value: Any, attacked: Attacked) -> None:
    """When rows have changed already, or in the first step, or in a generator of random numbers."""
    write(attacked.folder, replaced(attacked.data, path, value))
    assert attacked.load(f"{path}: {value!r}") == "refused"


def test_any_tensor_of_another_kind(attacked: Attacked) -> None:
    """With the hash that belongs to it."""
    new = NewFiles(attacked.folder, set())
    for number, (name, place) in enumerate(attacked.data["tensors"].items()):
        tensor = TensorReader(OpenFile(os.open(attacked.folder / place["file"], os.O_RDONLY)), name).read(place["key"])
        bad = {"short": tensor.reshape(-1)[:0], "bytes": torch.full((5056,), 255, dtype=torch.uint8)}
        bad["flat"] = torch.zeros(tensor.numel() + 1, dtype=torch.complex64)
        if name == "random.torch":
            bad["far"] = tensor.clone()
            bad["far"][8:12].view(torch.int32)[0], bad["far"][16:24].view(torch.int64)[0] = 500, 500
        file = f"tensors-9{number:03}.safetensors"
        new.write_tensors(file, bad)
        for key, value in bad.items():
            entry = {"file": file, "key": key, "digest": digest_of(value)}
            write(attacked.folder, replaced(attacked.data, ("tensors", name), entry))
            assert attacked.load(f"{name}: {key}") == "refused" or name.startswith("extra")


@pytest.mark.parametrize("row", [-1, 30, 2**62])
def test_changes_of_rows_that_are_not_there(row: int, attacked: Attacked) -> None:
    (delta,) = attacked.data["tables"][1]["deltas"]
    path = attacked.folder / delta["file"]
    reader = TensorReader(OpenFile(os.open(path, os.O_RDONLY)), "changes")
    tensors = {name: reader.read(name) for name in reader.places} | {"rows": torch.tensor([row])}
    NewFiles(attacked.folder, set()).write_tensors("rows-99-0.safetensors", tensors)
    digests = {name: digest_of(each) for name, each in tensors.items()}
    changed = {**delta, "file": "rows-99-0.safetensors", "digests": digests}
    write(attacked.folder, replaced(attacked.data, ("tables", 1, "deltas", 0), changed))
    try:
        assert attacked.load(f"row {row}") == "refused"
    finally:
        (attacked.folder / "rows-99-0.safetensors").unlink()
