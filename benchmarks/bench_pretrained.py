"""Tables over a released model's tensors: the published size, torch's ways, cold rows, rows ahead of their step,
float8, and files of changed rows.

    python benchmarks/bench_pretrained.py [--quick] [--json FILE]

The published size is that of a language model's memory, 320,001,536 rows of 160 bfloat16 in 128 tensors, as a file of
holes: only what speedswap does is measured there. Cold rows are those of a real file, whose pages are dropped from the
system's cache before each reading; rows of speedswap's own log on the same disk are the comparison. Values are checked.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pretrained.peers import CANDIDATES, STEPS, in_its_process, mapped, memory_of_process
from script import main as run_script
from torch import Tensor

import speedswap
from speedswap import Disk, Table, init, kernels
from speedswap._machine import physical_bytes

PUBLISHED = (320_001_536, 160, 128)
LOOKUPS = 65_536
NAME = "model.shard_{}.weight"
PATTERN = "model.shard_*.weight"


def file_of(path: Path, rows: int, dim: int, tensors: int, *, filled: bool = False) -> None:
    """Write a safetensors file of bfloat16 rows in several tensors: of holes, or of random bytes."""
    entries, end = {}, 0
    for number in range(tensors):
        count = rows // tensors + (number < rows % tensors)
        begin, end = end, end + count * dim * 2
        entries[NAME.format(number)] = {"dtype": "BF16", "shape": [count, dim], "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + end)
        if filled:
            block, left = os.urandom(16 << 20), end
            while left:
                left -= file.write(block[: min(left, len(block))])
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def timed(into: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    into[name] = time.perf_counter() - begin


def train(items: speedswap.Embedding, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    items(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def published(folder: Path, quick: bool) -> dict[str, Any]:
    """Make, open and train a table of the published size over a file of holes."""
    rows, dim, tensors = PUBLISHED
    lookups, steps = (4096, 3) if quick else (LOOKUPS, 12)
    cache = 64 << 20 if quick else 1 << 30
    file_of(folder / "holes.safetensors", rows, dim, tensors)
    place = Disk(folder / "published", cache_bytes=cache, commit_seconds=None)
    seconds: dict[str, float] = {}
    with timed(seconds, "made"):
        base = init.of_tensors(folder / "holes.safetensors", PATTERN)
        Table.create(rows, dim, dtype=torch.bfloat16, init=base, storage=place).close()
    with timed(seconds, "opened"):
        table = Table.open(place)
    before = memory_of_process()
    items = speedswap.Embedding(rows, dim, table=table)
    optimizer = torch.optim.Adam(items.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    took, processor = [], []
    for _ in range(steps):
        ids = torch.randint(rows, (lookups,), generator=generator)
        begin, used = time.perf_counter(), time.process_time()
        train(items, optimizer, ids)
        took.append(time.perf_counter() - begin)
        processor.append(time.process_time() - used)
    after = memory_of_process()
    with timed(seconds, "committed"):
        table.flush()
    table.close()
    warm = slice(steps // 2, None)  # the cache has its memory by then
    found = {
        "rows": rows, "dim": dim, "tensors": tensors, "lookups": lookups, "cache_bytes": cache, "seconds": seconds,
        "peak_bytes_opened": before["peak"],
        "step_seconds": statistics.median(took[warm]),
        "step_processor_seconds": statistics.median(processor[warm]),
        "anonymous_bytes": after["anonymous"] - before["anonymous"],
    }  # fmt: skip
    print(
        f"{rows:,} × {dim}: made in {seconds['made']:.3f} s, opened in {seconds['opened']:.3f} s, "
        f"{before['peak'] >> 20} MiB at most; a step of {lookups:,} lookups {found['step_seconds']:.2f} s, "
        f"{found['step_processor_seconds']:.2f} s of processor time, {found['anonymous_bytes'] >> 20} MiB more memory",
        flush=True,
    )
    return found


def peers(folder: Path, quick: bool) -> dict[str, Any]:
    """Compare a table that torch can hold; and say what torch would need at the published size."""
    (rows, lookups), dim = ((20_000, 1000) if quick else (4_000_000, LOOKUPS)), PUBLISHED[1]
    file = folder / "peers.safetensors"
    file_of(file, rows, dim, 1, filled=True)
    found: dict[str, Any] = {"rows": rows, "dim": dim, "lookups": lookups, "steps": STEPS, "candidates": {}}
    for name in CANDIDATES:
        found["candidates"][name] = entry = in_its_process(name, file, rows, dim, lookups)
        shown = ", ".join(f"{what.partition('_')[0]} {entry[what]:.3f} s" for what in entry if "seconds" in what)
        print(f"{rows:,} × {dim}, {name}: {shown}, {entry['anonymous_bytes'] >> 20} MiB of memory", flush=True)
    assert len({entry.pop("sum_of_bits") for entry in found["candidates"].values()}) == 1
    weight, memory = PUBLISHED[0] * dim * 2, physical_bytes()
    needed = {name: 3 * weight if name == "nn.Embedding" else 2 * weight for name in CANDIDATES if "read" not in name}
    del needed["speedswap"]
    found["published"] = {
        name: f"cannot be trained: weight and state in memory need {nbytes:,} bytes, and this machine has {memory:,}"
        for name, nbytes in needed.items()
        if nbytes > memory
    }
    return found


def dropped(file: Path) -> None:
    """Drop a file's pages from the system's cache, unless they are mapped."""
    gc.collect()
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def by_faults(file: Path, ids: Tensor, dim: int) -> Tensor:
    """Return rows of a file of one tensor as its mapping gives them, one page fault after another."""
    items = speedswap.Embedding.from_file(file, NAME.format(0))
    assert items.embedding_dim == dim
    return items.table.gather(ids).weight


def by_mapping(file: Path, ids: Tensor, dim: int) -> Tensor:
    """Return rows of a file as torch's mapping gives them, for which the system reads what is around them, too."""
    return mapped(file, dim).index_select(0, ids)


def of_base(file: Path, ids: Tensor, dim: int) -> Tensor:
    base = init.of_tensors(file, PATTERN)
    into = torch.empty(len(ids), dim, dtype=torch.bfloat16)
    base.rows.fill(into, ids)
    return into


def cold_reads(folder: Path, quick: bool) -> dict[str, Any]:
    """Read random rows that are not in memory, through page faults, announced, and out of speedswap's own log."""
    rows, lookups, repeats = (100_000, 2000, 1) if quick else (10_000_000, LOOKUPS, 3)
    dim = PUBLISHED[1]
    file = folder / "cold.safetensors"
    file_of(file, rows, dim, 1, filled=True)
    generator = torch.Generator().manual_seed(2)
    readers: Mapping[str, Callable[[Path, Tensor, int], Tensor]] = {
        "plain mmap": by_mapping,
        "page faults": by_faults,
        "announced": of_base,
    }
    rates: dict[str, list[float]] = {name: [] for name in (*readers, "log", "log and base")}
    of_log = min(rows, 2_000_000)
    log, mixed = (Disk(folder / name, cache_bytes=256 << 20, commit_seconds=None) for name in ("log", "mixed"))
    bases = {log: None, mixed: init.of_tensors(file, PATTERN)}  # the second table is written for a part
    for place, base in bases.items():
        size = of_log if base is None else rows
        with Table.create(size, dim, dtype=torch.bfloat16, init=base, storage=place) as table:
            for start in range(0, of_log, 100_000):
                table.write(start, torch.ones(min(100_000, of_log - start), dim, dtype=torch.bfloat16), commit=False)
    for _ in range(repeats):
        ids = torch.randint(rows, (lookups,), generator=generator).unique()
        seen = []
        for name, read in readers.items():
            dropped(file)
            begin = time.perf_counter()
            seen.append(read(file, ids, dim))
            rates[name].append(len(ids) / (time.perf_counter() - begin))
        for each in seen[1:]:
            assert torch.equal(each.view(torch.int16), seen[0].view(torch.int16))
        with Table.open(log) as table:
            dropped(folder / "log" / "rows.log")
            ids = torch.randint(of_log, (lookups,), generator=generator).unique()
            begin = time.perf_counter()
            assert bool((table.gather(ids).weight == 1).all())
            rates["log"].append(len(ids) / (time.perf_counter() - begin))
        with Table.open(mixed) as table:
            dropped(folder / "mixed" / "rows.log")
            dropped(file)
            ids = torch.randint(2 * of_log, (lookups,), generator=generator).unique()
            begin = time.perf_counter()
            table.gather(ids)
            rates["log and base"].append(len(ids) / (time.perf_counter() - begin))
    best = {name: max(some) for name, some in rates.items()}
    print("cold rows a second: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in best.items()), flush=True)
    return {"rows": rows, "dim": dim, "lookups": lookups, "rows_per_second": rates}


def ahead(folder: Path, quick: bool) -> dict[str, Any]:
    """Train on cold rows under lookahead, beside other work that takes as long as reading them, or longer."""
    rows, lookups, steps = (100_000, 2000, 3) if quick else (10_000_000, LOOKUPS, 5)
    dim, file = PUBLISHED[1], folder / "cold.safetensors"
    if not file.exists():
        file_of(file, rows, dim, 1, filled=True)
    generator = torch.Generator().manual_seed(3)
    found: dict[str, Any] = {"rows": rows, "dim": dim, "lookups": lookups}

    def laps(name: str, wait: float) -> list[float]:
        dropped(file)
        base = init.of_tensors(file, PATTERN)
        place = Disk(folder / f"ahead {name}", cache_bytes=512 << 20, commit_seconds=None)
        items = speedswap.Embedding(rows, dim, dtype=torch.bfloat16, init=base, storage=place)
        optimizer = torch.optim.Adam(items.parameters(), lr=1e-3)
        speedswap.attach(optimizer, items)
        batches: Any = [torch.randint(rows, (lookups,), generator=generator) for _ in range(steps)]
        if wait:
            batches = speedswap.lookahead(batches, {items: lambda ids: ids})
        took, begin = [], time.perf_counter()
        for ids in batches:
            train(items, optimizer, ids)
            time.sleep(wait)
            took.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        items.table.close()
        return took[1:]

    found["alone"] = statistics.median(laps("alone", 0))
    for factor in (1.0, 2.0):
        wait = factor * found["alone"]
        found[f"{factor} times as much work"] = lap = statistics.median(laps(str(factor), wait))
        print(f"a step {found['alone']:.2f} s; beside {wait:.2f} s of other work {lap:.2f} s", flush=True)
    return found


def float8(folder: Path, quick: bool) -> dict[str, Any]:
    """Decode rows of float8 with an exponent for 32 values, as torch does and as bases do."""
    rows, dim, repeats = (2048, 256, 3) if quick else (LOOKUPS, 256, 20)
    generator = torch.Generator().manual_seed(4)
    raw = torch.randint(127, (rows, dim), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(100, 150, (rows, dim // 32), dtype=torch.uint8, generator=generator)
    out, ids = torch.empty(rows, dim, dtype=torch.bfloat16), torch.arange(rows)

    def by_torch() -> Tensor:
        scales = torch.exp2(exponents.float() - 127).unsqueeze(-1)
        return (raw.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 32)) * scales).flatten(1).bfloat16()

    def by_base() -> Tensor:
        kernels.decode_rows(raw, exponents, (1, 32), ids, out)
        return out

    assert torch.equal(by_torch(), by_base())
    found: dict[str, Any] = {"rows": rows, "dim": dim, "seconds": {}, "processor_seconds": {}}
    for name, decode in {"torch": by_torch, "base": by_base}.items():
        took, processor = [], []
        for _ in range(repeats):
            begin, used = time.perf_counter(), time.process_time()
            decode()
            took.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
        found["seconds"][name] = statistics.median(took)
        found["processor_seconds"][name] = statistics.median(processor)
    shown = (f"{name} {took * 1e3:.1f} ms" for name, took in found["seconds"].items())
    print(f"float8, {rows:,} × {dim}: " + ", ".join(shown), flush=True)
    return found


def changed(folder: Path, quick: bool) -> dict[str, Any]:
    """Save the rows that changed, find them since a commit, load them onto the base, and merge them into its copy."""
    rows, dim, tensors, count = (20_000, 160, 8, 1000) if quick else (2_000_000, 160, 8, 100_000)
    model = folder / "model"
    model.mkdir()
    file_of(model / "model.safetensors", rows, dim, tensors, filled=True)
    base, file = init.of_tensors(model, PATTERN), folder / "rows.safetensors"
    place = Disk(folder / "trained", cache_bytes=256 << 20, commit_seconds=None)
    generator = torch.Generator().manual_seed(5)
    seconds: dict[str, float] = {}
    with Table.create(rows, dim, dtype=torch.bfloat16, init=base, storage=place, name="model") as table:
        for value in (1.0, 2.0):
            commit = table.hold()
            ids = torch.randint(rows, (count,), generator=generator).unique()
            table.scatter(ids, torch.full((len(ids), dim), value, dtype=torch.bfloat16))
        with timed(seconds, "changed_since"):
            found = table.changed_since(commit)
        assert torch.equal(found, ids)
        since = len(ids)
        with timed(seconds, "save_rows"):
            table.save_rows(file)
        sample = torch.randint(rows, (count,), generator=generator).unique()
        expected = table.gather(sample).weight.view(torch.int16)
        saved = len(table.store.log.written(0, rows))
    other = Disk(folder / "other", cache_bytes=256 << 20, commit_seconds=None)
    with Table.create(rows, dim, dtype=torch.bfloat16, init=base, storage=other, name="model") as table:
        with timed(seconds, "load_rows"):
            table.load_rows(file)
            table.flush()
        assert torch.equal(table.gather(sample).weight.view(torch.int16), expected)
    before = memory_of_process()["peak"]
    with timed(seconds, "merge_rows"):
        speedswap.merge_rows(model, file, folder / "merged")
    more = memory_of_process()["peak"] - before
    merged = torch.empty(len(sample), dim, dtype=torch.bfloat16)
    init.of_tensors(folder / "merged", PATTERN).rows.fill(merged, sample)
    assert torch.equal(merged.view(torch.int16), expected)
    nbytes = {"model": (model / "model.safetensors").stat().st_size, "rows": file.stat().st_size}
    print(
        f"{saved:,} changed rows of {rows:,}: {nbytes['rows'] >> 20} of {nbytes['model'] >> 20} MiB; "
        + ", ".join(f"{name} {took:.3f} s" for name, took in seconds.items())
        + f"; the merge with {more >> 20} MiB more memory at most",
        flush=True,
    )
    counts = {"rows": rows, "dim": dim, "since": since, "saved": saved}
    return {**counts, "bytes": nbytes, "seconds": seconds, "merge_peak_bytes": more}


SECTIONS: Mapping[str, Callable[[Path, bool], dict[str, Any]]] = {
    "published": published,
    "peers": peers,
    "cold": cold_reads,
    "ahead": ahead,
    "float8": float8,
    "changed": changed,
}


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Measure every section in a temporary folder, and return its figures."""
    with TemporaryDirectory() as folder:
        return {name: section(Path(folder), quick) for name, section in SECTIONS.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    return run_script("pretrained", __doc__, measure, argv, cpu_alone=True)


if __name__ == "__main__":
    sys.exit(main())
