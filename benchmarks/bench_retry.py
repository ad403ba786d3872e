"""The cost of being ready for an out-of-memory: a tensor in four chunks, compared with the plain loop and toma.

python benchmarks/bench_retry.py [--device cpu|cuda] [--quick] [--json FILE]

The tensor is the one of toma's own benchmark. Each chunk is added to in place (the work), or left alone (no work:
only overhead). toma is found at run time (the extra ``benchmarks``).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any

import script
import torch

from speedswap.apps.bench.measure import in_turn
from speedswap.batching import retry
from speedswap.compat import toma as compat

SHAPE, STEP, CHUNKS = (128, 256, 256), 32, 4
Body = Callable[[torch.Tensor, int, int], object]


def work(chunk: torch.Tensor, start: int, end: int) -> None:
    chunk += 1


def no_work(chunk: torch.Tensor, start: int, end: int) -> None:
    pass


def native(tensor: torch.Tensor, body: Body) -> None:
    for start in range(0, len(tensor), STEP):
        body(tensor[start : start + STEP], start, start + STEP)


def after_a_failure(tensor: torch.Tensor, body: Body) -> Callable[[], object]:
    """Return a function that has run out of memory once, and therefore looks at the free memory in each call."""
    has_failed = False

    def fails_once(chunk: torch.Tensor, start: int, end: int) -> None:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        body(chunk, start, end)

    function = retry.chunked(fails_once, initial=2 * STEP, key=object(), grow_after=None)
    function(tensor)
    return lambda: function(tensor)


def ours(tensor: torch.Tensor, body: Body) -> dict[str, Callable[[], object]]:
    chunked, decorated = retry.chunked(body, initial=STEP), compat.toma.chunked(body, initial_step=STEP)
    return {
        "native loop": lambda: native(tensor, body),
        "speedswap.retry": lambda: chunked(tensor),
        "speedswap.retry, after a failure": after_a_failure(tensor, body),
        **named("speedswap.compat.toma", compat, decorated, tensor, body),
    }


def theirs(tensor: torch.Tensor, body: Body) -> dict[str, Callable[[], object]]:
    try:
        toma = importlib.import_module("toma")
    except ImportError:
        return {}
    decorated = toma.toma.chunked(body, initial_step=STEP)
    return named("toma", toma, lambda tensor: decorated(tensor, toma_initial_step=STEP), tensor, body)


def named(
    name: str, toma: Any, decorated: Callable[[torch.Tensor], object], tensor: torch.Tensor, body: Body
) -> dict[str, Callable[[], object]]:
    return {
        f"{name}: simple": lambda: toma.simple.chunked(body, tensor, STEP),
        f"{name}: no cache": lambda: toma.explicit.chunked(body, tensor, STEP, toma_cache_type=toma.NoBatchsizeCache),
        f"{name}: explicit": lambda: toma.explicit.chunked(body, tensor, STEP),
        f"{name}: toma": lambda: decorated(tensor),
    }


def verify(tensor: torch.Tensor) -> None:
    for name, candidate in (ours(tensor, work) | theirs(tensor, work)).items():
        tensor.zero_()
        candidate()
        assert bool((tensor == 1).all()), name


def measure(tensor: torch.Tensor, body: Body, repeats: int) -> dict[str, Any]:
    """Measure medians, the overhead over the native loop, and the ratio of toma's overhead to each."""
    candidates = ours(tensor, body) | theirs(tensor, body)
    seconds = in_turn({name: lambda call, run=run: run() for name, run in candidates.items()}, repeats=repeats)
    overhead = {name: took - seconds["native loop"] for name, took in seconds.items() if name != "native loop"}
    peers = {name: f"toma: {name.partition(': ')[2] or 'toma'}" for name in overhead if name.startswith("speedswap")}
    return {
        "seconds": seconds,
        "times_native": {name: took / seconds["native loop"] for name, took in seconds.items()},
        "overhead_seconds": overhead,
        "overhead_seconds_a_chunk": {name: above / CHUNKS for name, above in overhead.items()},
        "times_faster": {
            name: {peer: seconds[peer] / seconds[name]} for name, peer in peers.items() if peer in seconds
        },
        "times_less_overhead": {  # None if ours is within the noise of the work
            name: {peer: overhead[peer] / overhead[name] if overhead[name] > 0 else None}
            for name, peer in peers.items()
            if peer in overhead
        },
    }


def show(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, took in found["seconds"].items():
        line = f"  {name:<34} {took * 1e3:10.4f} ms {found['times_native'][name]:9.2f} x native"
        if name in found["overhead_seconds_a_chunk"]:
            line += f"   {found['overhead_seconds_a_chunk'][name] * 1e6:10.1f} us above it a chunk"
        for peer, times in found["times_less_overhead"].get(name, {}).items():
            line += f", {f'{times:.0f} times' if times else 'immeasurably'} less than {peer}"
        print(line, flush=True)


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure chunks that work, and chunks that do nothing."""
    tensor = torch.zeros(SHAPE, device=device)
    peer = importlib.metadata.version("toma") if theirs(tensor, no_work) else None
    print(f"{CHUNKS} chunks of a tensor {SHAPE} on {device}; toma {peer or 'is not installed: pip install toma'}")
    verify(tensor)
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "shape": SHAPE, "chunks": CHUNKS, "toma": peer}
    for name, body in (("work", work), ("no_work", no_work)):
        results[name] = measure(tensor, body, 5 if quick else 15)
        show(name.replace("_", " "), results[name])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("retry", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
