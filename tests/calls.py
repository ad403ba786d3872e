"""The calls of one training step, and the files of the package that they enter, for tests and as a program.

``python tests/calls.py`` prints each step's calls by file, most first, and the walks of a lookup and a scatter; with
``--json``, the calls for a test, which needs a fresh process.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap.kernels import _C

PACKAGE = Path(speedswap.__file__).parent
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # calls up to Python 3.11, and not since


def calls_by_file(function: Callable[[], object]) -> Counter[str]:
    """Return how many functions of Python are called in each file, and how many of C from there."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" or (event == "call" and frame.f_code.co_name not in COMPREHENSIONS):
            calls[frame.f_code.co_filename] += 1

    _profiled(function, profile)
    return calls


def files_entered(function: Callable[[], object], end: object) -> list[str]:
    """Return the package's files whose functions are called until ``end`` is; in order, each once."""
    files: dict[str, None] = {}
    ended = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal ended
        ended = ended or (argument == end if event == "c_call" else frame.f_code is getattr(end, "__code__", None))
        path = Path(frame.f_code.co_filename)
        if event == "call" and not ended and path.is_relative_to(PACKAGE):
            files[str(path.relative_to(PACKAGE))] = None

    _profiled(function, profile)
    assert ended, f"{end} was not called"
    return list(files)


def _profiled(function: Callable[[], object], profile: Callable[[FrameType, str, Any], None]) -> None:
    gc.disable()  # garbage collected in between makes calls too
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()


def sgd_step() -> Callable[[], None]:
    """Return a training step of 64 lookups in 100,000 rows of 64 values, by torch's SGD."""
    return _warm_step(items := speedswap.Embedding(100_000, 64), torch.optim.SGD(items.parameters(), lr=0.1))


def adam_step() -> Callable[[], None]:
    """Return the same step by Adam."""
    return _warm_step(items := speedswap.Embedding(100_000, 64), torch.optim.Adam(items.parameters()))


def collection_step() -> Callable[[], None]:
    """Return a step by Adam with 64 lookups in each of ten tables of a collection."""
    names = [f"t{i}" for i in range(10)]
    tables = speedswap.EmbeddingCollection(
        [speedswap.EmbeddingConfig(name=name, num_embeddings=100_000, embedding_dim=64) for name in names]
    )
    return _warm_step(tables, torch.optim.Adam(tables.parameters()), names)


STEPS = {"SGD": sgd_step, "Adam": adam_step, "Adam, ten tables of a collection": collection_step}


def _warm_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: list[str] | None = None
) -> Callable[[], None]:
    """Return a training step after warm-up steps, which do all one-time work."""
    ids = torch.arange(0, 64 * 7, 7) % 300  # some twice
    batch: Any = ids if names is None else dict.fromkeys(names, ids)

    def step() -> None:
        optimizer.zero_grad()
        found = model(batch)
        values: Tensor = found if names is None else torch.cat([found[name].values() for name in names])
        values.sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    return step


def lookup_and_scatter() -> dict[str, list[str]]:
    """Return the files from ``Embedding.forward`` to the CPU loop's gather, from ``optimizer.step`` to its scatter."""
    items = speedswap.Embedding(100_000, 64)
    optimizer = torch.optim.Adam(items.parameters())
    ids = torch.arange(64)
    losses: list[Tensor] = []
    for _ in range(5):
        optimizer.zero_grad()
        items(ids).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    lookup = files_entered(lambda: losses.append(items(ids).sum()), _C.gather)
    losses[0].backward()
    return {"lookup": lookup, "scatter": files_entered(optimizer.step, _C.scatter)}


def main() -> None:
    """Print the calls of each step by file, and the walks."""
    torch.set_num_threads(1)
    calls = {name: calls_by_file(make()) for name, make in STEPS.items()}
    if sys.argv[1:] == ["--json"]:
        print(json.dumps(calls))
        return
    for name, counts in calls.items():
        print(f"{sum(counts.values()):6,}  {name}")
        for path, count in counts.most_common(25):
            print(f"{count:14,}  {path}")
    for name, files in lookup_and_scatter().items():
        print(f"{len(files):6,}  files of a {name}\n        " + "\n        ".join(files))


if __name__ == "__main__":
    main()
