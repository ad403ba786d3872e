"""The step benchmark on a user's own ids, read from a file: an embedding's training step, ours and plain torch's."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedswap.apps.bench import step
from speedswap.apps.bench.measure import IdBatch, lacking, renumbered
from speedswap.apps.bench.step import COLUMNS, VERIFIED_LOOKUPS, VERIFIED_STEPS
from speedswap.apps.errors import BenchmarkError, named
from speedswap.apps.files import PARQUET, opened, parquet_opened
from speedswap.apps.options import WIDEST, one_of, whole

_MOST_IDS = 1 << 23
_STEPS, _LOOPS = 8, 5
_NPY = b"\x93NUMPY"


def run(device: str, path: Path, *, column: str | None, dim: int, optimizer: str, batch: int) -> dict[str, Any]:
    """Run the benchmark and print its figures, and at the end how many times faster a step is with speedswap.

    Args:
        device: ``cpu`` or ``cuda``: the compute device.
        path: the file of ids, as for :func:`read_ids`.
        column: the column of a Parquet file.
        dim: numbers in a row.
        optimizer: sgd, adagrad or adam.
        batch: ids in a step.

    Returns:
        The figures, as JSON can hold them: ``workload``, ``trainers``, and ``times_faster`` than the ``fastest``
        of torch's.

    Raises:
        BenchmarkError: the ids cannot be read or looked up, or the table does not fit.
        SettingsError: a number is out of range, or the optimizer is another one.
        WrongResultError: a trainer's result differs from torch's.
    """
    whole(1, WIDEST)(named("dim"), dim)
    whole(1, 2**31)(named("batch"), batch)
    one_of([*COLUMNS])(named("optimizer"), optimizer)
    ids = read_ids(path, column)
    batch = min(batch, len(ids))
    row_bytes, rows = 4 * COLUMNS[optimizer] * dim, int(ids.max()) + 1
    if lacking(rows * row_bytes):
        unique, ids = torch.unique(ids, return_inverse=True)
        print(f"ids up to {rows - 1:,} are numbered from 0 to {len(unique) - 1:,}; in training speedswap.IdMap does so")
        rows = len(unique)
    if missing := lacking(rows * row_bytes):
        raise BenchmarkError(f"a table of {rows:,} rows does not fit: {missing}; give a smaller {named('dim')}")
    print(f"{len(ids):,} ids, steps of {batch:,} in {rows:,} rows of {dim}", flush=True)
    hosts = ids[: len(ids) // batch * batch].view(-1, batch)
    batches = [IdBatch(host, host.to(device)) for host in hosts]
    batches *= -(-_STEPS // len(batches))
    plan = step.StepPlan(rows, dim, batch, _STEPS, _LOOPS, {}, (), ())
    sample = renumbered(batches[:VERIFIED_STEPS], VERIFIED_LOOKUPS)
    found = step.compare(optimizer, device, plan, batches, sample)
    step.show_steps(optimizer, found)
    seconds = {name: one["seconds"] for name, one in found["trainers"].items() if "seconds" in one}
    fastest = min((name for name in seconds if name.startswith("torch")), key=seconds.__getitem__)
    times = seconds[fastest] / seconds["speedswap"]
    said = f"{times:.1f}×" if times >= 1 else f"{times:.2f}×, which is slower: torch's nn.Embedding suits them better"
    print(f"\nCompared with {fastest}, the fastest of plain torch:\non your machine, your ids: {said}")
    workload = {"rows": rows, "dim": dim, "lookups": batch, "optimizer": optimizer, "ids": len(ids)}
    return {"device": device, "workload": workload, **found, "fastest": fastest, "times_faster": times}


def read_ids(path: Path, column: str | None = None) -> Tensor:
    """Return the first 8,388,608 ids of a file, int64, in their order.

    Args:
        path: .npy with whole numbers of any shape; Parquet; or text, plain or gzip, with whole numbers separated by
            white space or commas.
        column: of a Parquet file; by default the only one with whole numbers.

    Raises:
        BenchmarkError: the file cannot be read, has no ids, or one of them is not a whole number of 0 or more.
    """
    with opened(path, "the file of ids", BenchmarkError) as file:
        kind = file.peek(len(_NPY))[: len(_NPY)]
        if column is not None and not kind.startswith(PARQUET):
            raise BenchmarkError(f"{named('column')} is {column!r}, but {path} is not Parquet: leave it out")
        try:
            if kind == _NPY:
                values = _of_array(path)
            elif kind.startswith(PARQUET):
                values = _of_parquet(path, column)
            else:
                text = io.TextIOWrapper(file, "utf-8-sig")
                words = (word for line in text for word in line.replace(",", " ").split())
                values = np.fromiter(map(int, islice(words, _MOST_IDS)), np.int64)
        except BenchmarkError:
            raise
        except (ValueError, OverflowError) as error:  # also NumPy's and pyarrow's
            remedy = "give whole numbers of 64 bits without a heading; speedswap.IdMap makes rows of any keys"
            raise BenchmarkError(f"the file of ids {path} cannot be used ({error}): {remedy}") from error
    if not len(values):
        raise BenchmarkError(f"{path} has no ids: give a file with whole numbers")
    if (wrong := values < 0).any():
        first = int(wrong.argmax())
        raise BenchmarkError(f"id {first:,} of {path} is {values[first]}: leave out ids below 0, which no table has")
    return torch.from_numpy(values)


def _of_array(path: Path) -> npt.NDArray[np.int64]:
    values = np.load(path, mmap_mode="r", allow_pickle=False)
    if not np.issubdtype(values.dtype, np.integer):
        raise BenchmarkError(f"{path} holds {values.dtype}: give whole numbers")
    return np.array(values.reshape(-1)[:_MOST_IDS], np.int64)


def _of_parquet(path: Path, column: str | None) -> npt.NDArray[np.int64]:
    pieces, count = [np.empty(0, np.int64)], 0
    with parquet_opened(path, "the file of ids", BenchmarkError) as file:
        from pyarrow import types

        names = [each.name for each in file.schema_arrow if types.is_integer(each.type)]
        wanted = column if column is not None or len(names) != 1 else names[0]
        if wanted not in names:
            among = f"one of {', '.join(names)}" if names else "another file: it has no column of whole numbers"
            raise BenchmarkError(f"{named('column')} of {path} is {column!r}: give {among}")
        for batch in file.iter_batches(columns=[wanted]):
            pieces.append(batch.column(0).drop_null().to_numpy().astype(np.int64))
            count += len(pieces[-1])
            if count >= _MOST_IDS:
                break
    return np.concatenate(pieces)[:_MOST_IDS]
