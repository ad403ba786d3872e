"""The rows of a checkpoint's tensor looked up and trained as torch can: in memory, and in a mapping of its file.

Each candidate has a process for itself, so that its memory is its own. All of them train with the lazy Adam that they
have: torch's ``SparseAdam``, whose state is as large as the table twice over, and ``Adam`` of speedswap.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import speedswap
from speedswap import Disk, init

STEPS = 8
_TENSOR = "model.shard_0.weight"

Opened = tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer | None]


def memory_of_process() -> dict[str, int]:
    """Return the bytes of this process's own memory, and the most that it ever had in memory, mapped files included."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) << 10 for name, key in (("anonymous", "RssAnon"), ("peak", "VmHWM"))}


def mapped(file: Path, dim: int, *, shared: bool = False) -> Tensor:
    """Return the rows of a file's only tensor as torch maps them: private, copied page by page as they are written."""
    nbytes = file.stat().st_size
    begin = 8 + int.from_bytes(file.open("rb").read(8), "little")
    return torch.from_file(str(file), shared, nbytes, dtype=torch.uint8)[begin:].view(torch.bfloat16).view(-1, dim)


def by_torch(weight: Tensor) -> Opened:
    items = nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
    return items, torch.optim.SparseAdam(items.parameters(), lr=1e-3)


def by_speedswap(file: Path, dim: int) -> Opened:
    base = init.of_tensors(file, _TENSOR)
    place = Disk(file.parent / "of peers", cache_bytes=512 << 20, commit_seconds=None)
    items = speedswap.Embedding(base.num_embeddings, dim, dtype=torch.bfloat16, init=base, storage=place)
    return items, torch.optim.Adam(items.parameters(), lr=1e-3)


def only_read(file: Path, dim: int) -> Opened:
    rows = mapped(file, dim, shared=True)  # a private mapping of more than the memory is refused
    return lambda ids: rows.index_select(0, ids), None


def in_copy(file: Path, dim: int) -> Opened:
    """Train a copy of the file in place; copying it is part of opening it."""
    copy = file.with_suffix(".trained")
    shutil.copyfile(file, copy)
    return by_torch(mapped(copy, dim, shared=True))


CANDIDATES: Mapping[str, Callable[[Path, int], Opened]] = {
    "speedswap": by_speedswap,
    "nn.Embedding": lambda file, dim: by_torch(mapped(file, dim).clone()),
    "mmap, only read": only_read,
    "mmap, copy on write": lambda file, dim: by_torch(mapped(file, dim)),
    "mmap, shared": in_copy,
}


def of_candidate(name: str, file: Path, rows: int, dim: int, lookups: int) -> dict[str, Any]:
    """Open a candidate, look up and train; return its seconds, the least of all steps, and its memory."""
    torch.optim.SparseAdam(nn.Embedding(1, 1, sparse=True).parameters())  # torch imports a lot for the first one
    before, begin = memory_of_process(), time.perf_counter()
    look_up, optimizer = CANDIDATES[name](file, dim)
    found: dict[str, Any] = {"open_seconds": time.perf_counter() - begin}
    generator = torch.Generator().manual_seed(6)
    took: dict[str, list[float]] = {"lookup_seconds": [], "step_seconds": []}
    for _ in range(STEPS):
        ids, others = torch.randint(rows, (2, lookups), generator=generator)
        with torch.no_grad():
            begin = time.perf_counter()
            rows_of_ids = look_up(others)
            took["lookup_seconds"].append(time.perf_counter() - begin)
            found.setdefault("sum_of_bits", rows_of_ids.view(torch.int16).sum().item())
        if optimizer is not None:
            begin = time.perf_counter()
            look_up(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            took["step_seconds"].append(time.perf_counter() - begin)
    found |= {what: min(each[1:]) for what, each in took.items() if each}
    return found | {"anonymous_bytes": memory_of_process()["anonymous"] - before["anonymous"]}


def in_its_process(name: str, *arguments: Any) -> dict[str, Any]:
    """Return the figures of a candidate, from a process that ends with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(of_candidate, name, *arguments).result()
