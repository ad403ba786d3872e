"""The host's part of a training step on a GPU: its calls, counted, and the seconds of its processor.

The GPU is the simulated one of the tests. Kernels that move and pool rows do nothing; those that find them have 80 ids.
Ten tables of one collection are trained by fused Adam, plain and with a lookahead. Calls of functions, of Python and of
C, are those of all threads, the package's and torch's, without what the simulation itself calls. Seconds include the
simulation, whose streams and events are in Python and whose operations compute, unlike a GPU's: they serve to compare
one version with another. ``--against`` gives that version: a checkout with its compiled part in place, measured in the
same run by this script, on this checkout's simulation, with launches that do nothing as well. Each version has several
processes, in turns, and its seconds are the least of them: a shared machine only adds to them.

    python benchmarks/bench_host_time.py [--quick] [--json FILE] [--against CHECKOUT]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import speedswap
from speedswap.kernels import finish_transfers

TABLES, LOOKUPS, ROWS, DIM = 10, 8, 1000, 4
BLOCKS, STEPS, TURNS = 20, 20, 5
_SIMULATION = "simulated_gpu"
_IDLE = ("gather_w16", "scatter_w16", "pool_float32", "find_starts", "sum_chunks_float32", "join_chunks_float32")
_CHILD = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import simulated_gpu
simulated_gpu.switch_on("eager")
runpy.run_path(sys.argv[1], run_name="__main__")
"""
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # calls up to Python 3.11, and not since
ROOT = Path(__file__).resolve().parent.parent
KINDS = ("plain", "lookahead")


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
            self.python += event == "call" and frame.f_code.co_name not in _COMPREHENSIONS
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
        if calls.counting:
            pooled.register_hook(calls.here)  # called by the thread of the backward pass
        pooled.sum().backward()
        optimizer.step()
        yield


def figures(quick: bool) -> dict[str, Any]:
    """Return the figures of a process that has the simulated GPU."""
    import simulated_gpu

    torch.set_num_threads(1)
    launched = _idle_kernels()
    found: dict[str, Any] = {}
    for name in KINDS:
        calls = Calls()
        threading.setprofile(calls.count)  # the threads of transfers begin with the first steps
        loop = steps(calls, name == "lookahead")
        for _ in range(10):
            next(loop)
            finish_transfers()
        gc.collect()
        gc.disable()
        launched.clear()
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
            "launches": counts.launches or len(launched),
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


def _idle_kernels() -> list[str]:
    """Make kernels that move and pool rows do nothing; return where launches by CuPy, as there were once, are noted."""
    import simulated_gpu

    launched: list[str] = []
    if not hasattr(speedswap.kernels._C, "launch"):  # a version that launches kernels by CuPy has none but these
        from simulated_gpu.simulated_cupy import RawKernel

        RawKernel.__call__ = lambda self, *_, **__: launched.append(self.name)  # type: ignore[method-assign]
        return launched
    from speedswap.kernels.cuda.driver import kernel_handle

    for kernel in _IDLE:
        simulated_gpu.call("idle", kernel_handle(0, kernel))
    return launched


def in_turns(roots: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """Return the figures of checkouts, with the least seconds of several processes each."""
    found = [of_checkout(root, quick) for root in roots]
    for _ in range(0 if quick else TURNS - 1):
        for least, root in zip(found, roots, strict=True):
            again = of_checkout(root, quick)
            for name in KINDS:
                least[name]["cpu_seconds"] = min(least[name]["cpu_seconds"], again[name]["cpu_seconds"])
    return found


def of_checkout(root: Path, quick: bool) -> dict[str, Any]:
    """Return the figures of a checkout, from a process that has this one's simulated GPU."""
    command = [sys.executable, "-c", _CHILD, str(ROOT / "tests"), str(Path(__file__).resolve()), *["--quick"] * quick]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=environment)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, in 12 digits."""
    git = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(git, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure(quick: bool, against: Path | None = None) -> dict[str, Any]:
    """Run the benchmark in processes with the simulated GPU, and print its figures.

    Args:
        quick: True for fewer steps.
        against: another checkout.

    Returns:
        The figures, as JSON can hold them, ``plain`` and with a ``lookahead``: per step the calls of functions in
        ``python`` and in ``c``, ``launches`` of the package's kernels, ``waits`` of the host for the GPU, and
        ``cpu_seconds``, the least of several blocks of steps. With another checkout, its figures and its ``commit`` are
        under ``against``, and ``ratios`` has its ``calls`` and ``cpu_seconds`` over these.
    """
    found: dict[str, Any] = {"workload": {"tables": TABLES, "lookups": LOOKUPS, "rows": ROWS, "dim": DIM}}
    ours, *others = in_turns([ROOT] if against is None else [ROOT, against.resolve()], quick)
    found |= ours
    _print("this version", found)
    if against is not None:
        commit, (other,) = commit_of(against), others
        found["against"] = {"commit": commit, **other}
        found["ratios"] = {name: _ratios(other[name], found[name]) for name in KINDS}
        _print(commit, other)
        _print("ratios", found["ratios"])
    return found


def _ratios(other: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    calls = (other["python"] + other["c"]) / (ours["python"] + ours["c"])
    return {"calls": calls, "cpu_seconds": other["cpu_seconds"] / ours["cpu_seconds"]}


def _print(what: str, found: dict[str, Any]) -> None:
    for name in KINDS:
        figures = ", ".join(f"{key} {value:.4g}" for key, value in found[name].items())
        print(f"{what}, {name}: {figures}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    import script  # not in a child: another checkout may lack it

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--against", type=Path)
    own, rest = parser.parse_known_args(argv)
    return script.main("host-time", __doc__, lambda _, quick: measure(quick, own.against), rest, cpu_alone=True)


if __name__ == "__main__" and _SIMULATION in sys.modules:
    print(json.dumps(figures("--quick" in sys.argv)))
elif __name__ == "__main__":
    sys.exit(main())
