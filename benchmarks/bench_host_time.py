"""The host's part of a training step on a GPU: its calls, counted, and the seconds of its processor.

The GPU is the simulated one of the tests. Kernels that move and pool rows do nothing; those that find them have 80 ids.
Ten tables of one collection are trained by fused Adam, plain and with a lookahead. Calls of functions, of Python and of
C, are those of all threads, the package's and torch's, without what the simulation itself calls. Seconds include the
simulation, some of whose streams and events are in Python, unlike a GPU's: they serve to compare one version with
another.

    python benchmarks/bench_host_time.py [--quick] [--json FILE]
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import script
import torch
from torch import Tensor

import speedswap
from speedswap.kernels import finish_transfers
from speedswap.kernels.cuda.launch import kernel_handle

TABLES, LOOKUPS, ROWS, DIM = 10, 8, 1000, 4
BLOCKS, STEPS = 20, 20
_SIMULATION = "simulated_gpu"
_IDLE = ("gather_w16", "scatter_w16", "pool_float32", "find_starts", "sum_chunks_float32", "join_chunks_float32")
ROOT = Path(__file__).resolve().parent.parent


class Calls:
    """Calls of functions outside the simulation, in each thread that is told to count them.

    Attributes:
        counting: whether to count; None once no more will be.
        python, c: how many there were of functions in Python, and in C.
    """

    def __init__(self) -> None:
        self.counting: bool | None = False
        self.python = self.c = 0
        self._thread = threading.local()

    def here(self, *_: object) -> None:
        """Count the calling thread's."""
        sys.setprofile(None if self.counting is None else self.count)

    def count(self, frame: FrameType, event: str, _: Any) -> None:
        """Count an event, as a thread's profile function."""
        depth = getattr(self._thread, "depth", 0)  # of calls within the simulation
        if event == "return":
            self._thread.depth = max(0, depth - 1)
        elif event == "call" and (depth or _SIMULATION in frame.f_code.co_filename):
            self._thread.depth = depth + 1
        elif event in ("call", "c_call") and not depth and self.counting:
            self.python += event == "call"
            self.c += event == "c_call"
        if self.counting is None:
            sys.setprofile(None)


def steps(calls: Calls, ahead: bool) -> Iterator[None]:
    """Take steps, one for each item."""
    names = [f"t{number}" for number in range(TABLES)]
    configs = [speedswap.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in names]
    collection = speedswap.EmbeddingBagCollection(configs, storage="pinned", device="cuda")
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(ROWS, (60, TABLES, LOOKUPS), generator=generator).cuda()
    batches = itertools.cycle([dict(zip(names, batch, strict=True)) for batch in drawn])
    for batch in speedswap.lookahead(batches, {collection: lambda batch: batch}, depth=int(ahead)):
        optimizer.zero_grad()
        pooled: Tensor = collection(batch).values()
        pooled.register_hook(calls.here)  # called by the thread of the backward pass
        pooled.sum().backward()
        optimizer.step()
        yield


def figures(quick: bool) -> dict[str, Any]:
    """Return the figures of a process that has the simulated GPU."""
    import simulated_gpu

    torch.set_num_threads(1)
    for kernel in _IDLE:
        simulated_gpu.call("idle", kernel_handle(0, kernel))
    found: dict[str, Any] = {"workload": {"tables": TABLES, "lookups": LOOKUPS, "rows": ROWS, "dim": DIM}}
    for name in ("plain", "lookahead"):
        calls = Calls()
        threading.setprofile(calls.count)  # the threads of transfers begin with the first steps
        loop = steps(calls, name == "lookahead")
        for _ in range(10):
            next(loop)
            finish_transfers()
        gc.collect()
        gc.disable()
        with simulated_gpu.counted() as counts:
            calls.counting = True
            calls.here()
            next(loop)
            finish_transfers()
            calls.counting = None
        threading.setprofile(None)  # type: ignore[arg-type]
        found[name] = {
            "python": calls.python,
            "c": calls.c,
            "launches": counts.launches,
            "waits": len(counts.round_trips),
            "cpu_seconds": min(seconds(loop) for _ in range(2 if quick else BLOCKS)),
        }
        gc.enable()
    return found


def seconds(loop: Iterator[None]) -> float:
    """Return the processor's seconds per step."""
    before = time.process_time()
    for _ in range(STEPS):
        next(loop)
    return (time.process_time() - before) / STEPS


def measure(quick: bool) -> dict[str, Any]:
    """Run the benchmark in a process with the simulated GPU, and print its figures.

    Returns:
        The figures, as JSON can hold them, ``plain`` and with a ``lookahead``: per step the calls of functions in
        ``python`` and in ``c``, ``launches`` of the package's kernels, ``waits`` of the host for the GPU, and
        ``cpu_seconds``, the least of several blocks of steps.
    """
    command = [sys.executable, str(ROOT / "tools" / "on_simulated_gpu.py"), __file__, *["--quick"] * quick]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(run.stdout)
    for name in ("plain", "lookahead"):
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in found[name].items()), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("host-time", __doc__, lambda _, quick: measure(quick), argv, cpu_alone=True)


if __name__ == "__main__" and _SIMULATION in sys.modules:
    print(json.dumps(figures("--quick" in sys.argv)))
elif __name__ == "__main__":
    sys.exit(main())
