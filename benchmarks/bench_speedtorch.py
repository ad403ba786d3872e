"""SpeedTorch's own benchmark with its import changed: 131,072 rows of 128 through a DataGadget, each way.

Compared with what its authors chose: a pinned torch tensor, indexed on the host and copied. Both are verified.

    python benchmarks/bench_speedtorch.py [--device cpu|cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import script
import torch

import speedswap.compat.speedtorch as SpeedTorch
from speedswap.apps.bench.measure import in_turn

ROWS, DIM, TABLE_ROWS = 131_072, 128, 1_000_000


def run(device: str, quick: bool) -> dict[str, Any]:
    """Move rows each way, compared with torch alone."""
    rows, table_rows = (ROWS // 16, TABLE_ROWS // 16) if quick else (ROWS, TABLE_ROWS)
    numbers = np.random.default_rng(0).random((table_rows, DIM), dtype=np.float32)
    with TemporaryDirectory() as folder:
        path = Path(folder, "numbers.npy")
        np.save(path, numbers)
        gadget = SpeedTorch.DataGadget(str(path), CPUPinn=device != "cpu")
        gadget.gadgetInit()
    near = device if device == "cpu" else "cuda"
    pinned = torch.from_numpy(numbers.copy())
    if device != "cpu":
        pinned = pinned.pin_memory()
    drawn = [torch.randperm(table_rows)[:rows] for _ in range(4)]
    values = torch.rand(rows, DIM, device=near)

    def torch_insert(call: int) -> None:
        pinned[drawn[call % 4]] = values.cpu()

    candidates = {
        "speedswap, to the device": lambda call: gadget.getData(drawn[call % 4]),
        "torch, to the device": lambda call: pinned[drawn[call % 4]].to(near),
        "speedswap, from the device": lambda call: gadget.insertData(values, drawn[call % 4]),
        "torch, from the device": torch_insert,
    }
    expected = torch.from_numpy(numbers)[drawn[0]]
    if not torch.equal(gadget.getData(drawn[0]).cpu(), expected):
        raise SystemExit("getData returns other rows than the file has")
    gadget.insertData(values, drawn[1])
    if not torch.equal(gadget.getData(drawn[1]), values):
        raise SystemExit("what insertData wrote is not what getData returns")
    seconds = in_turn(candidates, repeats=5 if quick else 9)
    report: dict[str, Any] = {
        "device": device,
        "rows": rows,
        "row_bytes": 4 * DIM,
        "table_rows": table_rows,
        "seconds": seconds,
        "times_faster": {
            way: seconds[f"torch, {way}"] / seconds[f"speedswap, {way}"] for way in ("to the device", "from the device")
        },
    }
    for name, took in seconds.items():
        print(f"{name:<28} {1000 * took:8.3f} ms  {4 * DIM * rows / took / 1e9:6.2f} GB/s")
    for way, times in report["times_faster"].items():
        print(f"{way}: {times:.2f} × torch")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("speedtorch", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
