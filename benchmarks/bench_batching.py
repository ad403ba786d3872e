"""Splitting batches: its cost, savings and exactness, compared with other libraries in the same run.

Overhead per micro-batch over a loop by hand; one recovery from running out of memory; peak memory of activations by
the size of the batch; the gradient of a contrastive loss, and the time of its second pass; a batch 16 times beyond what
fits, recoveries in a row, and samples computed and discarded until a size is found (on a GPU into CUDA's own limit, on
the CPU into a counted one); memory and time of one sample on each rung of escalation.

    python benchmarks/bench_batching.py [--device cpu|cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import script
import torch
from batching.activations import measure_activations
from batching.contrastive import measure_contrastive
from batching.limits import measure_limits
from batching.overhead import measure_overhead, measure_recovery
from batching.rungs import measure_rungs
from batching.searches import measure_searches
from peers import find_peer

from speedswap._words import pip_install
from speedswap.apps.bench.measure import show_peers

BATCHES = (128, 256, 512, 1024, 2048, 4096, 8192)


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure all parts."""
    repeats = 5 if quick else 50
    # Libraries that accumulate gradients, or retry with less when memory runs out.
    names = ("accelerate", "lightning", "toma")
    peers = {name: find_peer(name, name, pip_install(name, extra="benchmarks")) for name in names}
    show_peers(peers)
    present = {name for name, peer in peers.items() if peer.present}
    return {
        "device": device,
        "torch_threads": torch.get_num_threads(),
        "peers": {name: peer._asdict() for name, peer in peers.items()},
        "overhead": measure_overhead(device, present, repeats=repeats),
        "recovery": measure_recovery(device, present, repeats=max(5, repeats // 5)),
        "activations": measure_activations(device, batches=[*BATCHES[:4]] if quick else [*BATCHES]),
        "contrastive": measure_contrastive(device, quick=quick, repeats=max(5, repeats // 5)),
        "limits": measure_limits(device, quick=quick),
        "searches": measure_searches(device, present, quick=quick),
        "rungs": measure_rungs(device, quick=quick, repeats=max(5, repeats // 10)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("batching", __doc__, run, argv)


if __name__ == "__main__":
    sys.exit(main())
