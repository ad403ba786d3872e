"""Gather and scatter of random rows, against the floor and against torch and NumPy.

131,072 random rows of a table of 2 GiB: rows of 512 bytes, in huge pages (as speedswap's own tables ask for) and in
ordinary ones, then a sweep of widths. The floor is a copy of the same payload between two contiguous pieces of memory,
measured in the same run. Every call takes other rows.

    python benchmarks/bench_rows.py [--device cpu|cuda] [--threads 2] [--json FILE] [--quick]
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import script
import torch

from speedswap import kernels
from speedswap.apps.bench.measure import in_turn
from speedswap.kernels import _C
from speedswap.kernels.cuda import pinning

ROW_BYTES = 512
SWEEP = (16, 32, 64, 100, 128, 256, 512, 516, 1024, 2048, 4096)
ID_SETS = 24  # enough batches of ids that none finds its rows in the cache


def memory(nbytes: int, *, pinned: bool = False, huge_pages: bool = False) -> torch.Tensor:
    """Make a table of random numbers, so that no page is the kernel's shared page of zeros."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    table = torch.frombuffer(mapping, dtype=torch.float32)
    rows = table[: nbytes // 512 * 128].view(-1, 128)
    kernels.fill_uniform(rows, range(len(rows)), -1.0, 1.0, seed=1, column_key=1)
    if pinned:
        failure = pinning.pin(table.data_ptr(), nbytes)
        if failure is not None:
            raise SystemExit(f"the table of {nbytes} bytes cannot be pinned: {failure}")
    return table


def on_cpu(flat: torch.Tensor, row_bytes: int, count: int, repeats: int) -> dict[str, Any]:
    """Verify and time the candidates for one width on the CPU."""
    table = flat[: flat.numel() // (row_bytes // 4) * (row_bytes // 4)].view(-1, row_bytes // 4)
    generator = torch.Generator().manual_seed(row_bytes)
    sets = [torch.randint(0, len(table), (2 * count,), generator=generator).unique() for _ in range(ID_SETS)]
    sets = [ids[torch.randperm(len(ids), generator=generator)[:count]].clone() for ids in sets]
    values, out, copy = (torch.rand(count, table.shape[1]) for _ in range(3))
    arrays = [ids.numpy() for ids in sets]
    table_array, out_array, values_array = table.numpy(), out.numpy(), values.numpy()

    kernels.gather_rows(table, sets[0], out=out)
    assert torch.equal(out, torch.index_select(table, 0, sets[0]))
    kernels.scatter_rows(table, sets[1], values)
    assert torch.equal(table[sets[1]], values)

    def put(call: int) -> None:
        table_array[arrays[call % ID_SETS]] = values_array

    seconds = in_turn(
        {
            "memcpy": lambda call: out.copy_(copy),
            "gather_rows": lambda call: kernels.gather_rows(table, sets[call % ID_SETS], out=out),
            "torch.index_select": lambda call: torch.index_select(table, 0, sets[call % ID_SETS], out=out),
            "numpy.take": lambda call: np.take(table_array, arrays[call % ID_SETS], 0, out_array, "clip"),
            "scatter_rows": lambda call: kernels.scatter_rows(table, sets[call % ID_SETS], values),
            "torch.index_copy_": lambda call: table.index_copy_(0, sets[call % ID_SETS], values),
            "numpy.put": put,
        },
        repeats=repeats,
    )
    return summary(row_bytes, count, len(table), seconds, {
        "gather_rows": ("memcpy", ["torch.index_select", "numpy.take"]),
        "scatter_rows": ("memcpy", ["torch.index_copy_", "numpy.put"]),
    })  # fmt: skip


def compact_on_cpu(flat: torch.Tensor, row_bytes: int, count: int, repeats: int) -> dict[str, Any]:
    """Measure float32 rows of ``row_bytes`` that records hold in fewer bytes, and the plain copy for comparison."""
    items = row_bytes // 4
    memory_of = flat.view(torch.uint8)
    num_rows = flat.numel() // items
    generator = torch.Generator().manual_seed(row_bytes)
    sets = [torch.randperm(num_rows, generator=generator)[:count] for _ in range(ID_SETS)]
    values, out = torch.rand(count, items), torch.empty(count, items)
    forms = {
        "float32": None,
        "bfloat16": kernels.Stored(torch.bfloat16),
        "bfloat16, stochastic": kernels.Stored(torch.bfloat16, 7),
        "float16": kernels.Stored(torch.float16),
        "int8": kernels.Stored(torch.int8),
    }
    candidates: dict[str, Callable[[int], object]] = {}
    for name, form in forms.items():
        width = row_bytes if form is None else kernels.stored_bytes(form.dtype, items)
        stride = -(-width // 4) * 4
        records = kernels.Records(flat.data_ptr(), stride, num_rows, flat.device, False, memory_of)
        put, get = [kernels.Part(0, values, form)], [kernels.Part(0, out, form)]
        kernels.scatter_records(records, sets[0], put)
        kernels.gather_records(records, sets[0], get)
        expected = values.clone()
        if form is not None and form.dtype != torch.int8:
            kernels.round_rows(expected, sets[0], form)
        assert torch.allclose(out, expected, rtol=0, atol=0.5 / 127 + 1e-6 if name == "int8" else 0)
        candidates[f"scatter {name}"] = lambda call, r=records, p=put: kernels.scatter_records(
            r, sets[call % ID_SETS], p
        )
        candidates[f"gather {name}"] = lambda call, r=records, p=get: kernels.gather_records(r, sets[call % ID_SETS], p)
    seconds = in_turn(candidates, repeats=repeats)
    relative = {name: took / seconds[f"{name.split()[0]} float32"] for name, took in seconds.items()}
    print(f"\n{count:,} rows of {items} float32, stored compactly; the time of float32 is 1")
    for name, took in seconds.items():
        print(f"  {name:<30} {took * 1e3:9.3f} ms {relative[name]:8.2f}")
    return {"items": items, "rows": count, "seconds": seconds, "relative_to_float32": relative}


def in_turns(flat: torch.Tensor, quick: bool, repeats: int) -> dict[str, Any]:
    """Measure a scatter of ascending rows in turns, as from a ring of staging buffers.

    Whether rows are written past the cache is decided by the bytes of a turn, or by those of the whole scatter.
    """
    row_bytes, count, num_buffers, buffer_bytes = 1536, 36_000 if quick else 360_000, 4, 8 << 20
    num_rows, at_once = flat.numel() * 4 // row_bytes, buffer_bytes // row_bytes
    generator = torch.Generator().manual_seed(row_bytes)
    sets = [torch.randperm(num_rows, generator=generator)[:count].sort().values for _ in range(4)]
    buffers = torch.rand(num_buffers, at_once, row_bytes // 4)
    parts = [kernels.records.cpu_parts([kernels.Part(0, buffer)]) for buffer in buffers]

    def scatter(call: int, rows_moved: int) -> None:
        ids = sets[call % len(sets)]
        for turn, first in enumerate(range(0, count, at_once)):
            _C.scatter(
                flat.data_ptr(),
                row_bytes,
                ids.data_ptr() + 8 * first,
                min(at_once, count - first),
                parts[turn % num_buffers],
                kernels.get_num_threads(),
                rows_moved,
            )

    seconds = in_turn(
        {"by the turn": lambda call: scatter(call, 0), "by the move": lambda call: scatter(call, count)},
        repeats=repeats,
    )
    times_faster = seconds["by the turn"] / seconds["by the move"]
    print(f"\n{count:,} rows of {row_bytes} bytes in turns of {at_once:,}, past the cache as decided")
    for name, took in seconds.items():
        print(f"  {name:<26} {took * 1e3:9.3f} ms {count * row_bytes / took / 1e9:8.2f} GB/s")
    return {
        "row_bytes": row_bytes,
        "rows": count,
        "turn_bytes": buffer_bytes,
        "seconds": seconds,
        "times_faster": times_faster,
    }


def on_cuda(flat: torch.Tensor, row_bytes: int, count: int, repeats: int) -> dict[str, Any]:
    """Verify and time rows of a pinned table to and from a GPU, and rows of a table on the GPU."""
    table = flat[: flat.numel() // (row_bytes // 4) * (row_bytes // 4)].view(-1, row_bytes // 4)
    generator = torch.Generator().manual_seed(row_bytes)
    sets = [torch.randint(0, len(table), (2 * count,), generator=generator).unique() for _ in range(ID_SETS)]
    sets = [ids[torch.randperm(len(ids), generator=generator)[:count]].clone() for ids in sets]
    near = [ids.cuda() for ids in sets]
    staging = torch.rand(count, table.shape[1]).pin_memory()
    out, values = torch.empty(staging.shape, device="cuda"), torch.rand(staging.shape, device="cuda")
    pinned = kernels.Records(table.data_ptr(), row_bytes, len(table), table.device, True, table)
    pageable = pinned._replace(pinned=False)
    on_gpu = table[: max(count, 2**30 // row_bytes)].cuda()
    few = [ids % len(on_gpu) for ids in near]
    part, result = [kernels.Part(0, out)], [kernels.Part(0, values)]

    for records in (pinned, pageable):
        kernels.gather_records(records, near[0], part)
        assert torch.equal(out.cpu(), table[sets[0]])
        kernels.scatter_records(records, near[1], result)
        torch.cuda.synchronize()
        assert torch.equal(table[sets[1]], values.cpu())
        table[sets[1]] = 0

    def torch_gather(call: int) -> None:
        torch.index_select(table, 0, sets[call % ID_SETS], out=staging)
        out.copy_(staging, non_blocking=True)

    def torch_scatter(call: int) -> None:
        staging.copy_(values)
        table.index_copy_(0, sets[call % ID_SETS], staging)

    candidates: dict[str, Callable[[int], object]] = {
        "copy to GPU": lambda call: out.copy_(staging, non_blocking=True),
        "gather, pinned": lambda call: kernels.gather_records(pinned, near[call % ID_SETS], part),
        "gather, pageable": lambda call: kernels.gather_records(pageable, sets[call % ID_SETS], part),
        "torch: index_select, copy": torch_gather,
        "copy to host": lambda call: staging.copy_(values, non_blocking=True),
        "scatter, pinned": lambda call: kernels.scatter_records(pinned, near[call % ID_SETS], result),
        "scatter, pageable": lambda call: kernels.scatter_records(pageable, sets[call % ID_SETS], result),
        "torch: copy, index_copy_": torch_scatter,
        "copy on GPU": lambda call: out.copy_(values),
        "gather_rows on GPU": lambda call: kernels.gather_rows(on_gpu, few[call % ID_SETS], out=out),
        "torch.index_select on GPU": lambda call: torch.index_select(on_gpu, 0, few[call % ID_SETS], out=out),
    }
    seconds = in_turn(candidates, repeats=repeats)
    return summary(row_bytes, count, len(table), seconds, {
        "gather, pinned": ("copy to GPU", ["torch: index_select, copy"]),
        "gather, pageable": ("copy to GPU", ["torch: index_select, copy"]),
        "scatter, pinned": ("copy to host", ["torch: copy, index_copy_"]),
        "scatter, pageable": ("copy to host", ["torch: copy, index_copy_"]),
        "gather_rows on GPU": ("copy on GPU", ["torch.index_select on GPU"]),
    })  # fmt: skip


def summary(
    row_bytes: int, count: int, num_rows: int, seconds: dict[str, float], ours: dict[str, tuple[str, list[str]]]
) -> dict[str, Any]:
    """Return the medians, and for each of ours its share of the floor and its speed over each peer's."""
    payload = row_bytes * count
    return {
        "row_bytes": row_bytes,
        "rows": count,
        "table_rows": num_rows,
        "payload_bytes": payload,
        "seconds": seconds,
        "gb_per_second": {name: payload / took / 1e9 for name, took in seconds.items()},
        "achieved_over_floor": {name: seconds[floor] / seconds[name] for name, (floor, _) in ours.items()},
        "times_faster": {
            name: {peer: seconds[peer] / seconds[name] for peer in peers} for name, (_, peers) in ours.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['rows']:,} rows of {result['row_bytes']} bytes from {result['table_rows']:,}")
    for name, took in result["seconds"].items():
        line = f"  {name:<26} {took * 1e3:9.3f} ms {result['gb_per_second'][name]:8.2f} GB/s"
        if name in result["times_faster"]:
            line += f"   {result['achieved_over_floor'][name]:5.2f} of the floor"
            line += "".join(f", {times:.2f} x {peer}" for peer, times in result["times_faster"][name].items())
        print(line, flush=True)


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure both kinds of pages, and all widths in ordinary ones."""
    table_bytes, count, repeats = (2**29, 32_768, 5) if quick else (2**31, 131_072, 15)
    measure = on_cpu if device == "cpu" else on_cuda
    tables = []  # pinned memory must stay where it is until the process ends
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "table_bytes": table_bytes}
    for pages in ("huge_pages", "ordinary_pages"):
        flat = memory(table_bytes, pinned=device == "cuda", huge_pages=pages == "huge_pages")
        tables.append(flat)
        print(f"\n{pages.replace('_', ' ')}:", end="")
        results[pages] = measure(flat, ROW_BYTES, count, 2 * repeats)
        show(results[pages])
        if device == "cpu" and pages == "huge_pages":
            results["compact"] = compact_on_cpu(flat, ROW_BYTES, count, 2 * repeats)
            results["scatter_in_turns"] = in_turns(flat, quick, repeats)
    results["sweep_of_ordinary_pages"] = []
    for row_bytes in SWEEP:
        result = measure(flat, row_bytes, min(count, table_bytes // row_bytes // 4), repeats)
        results["sweep_of_ordinary_pages"].append(result)
        show(result)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("rows", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
