"""Training steps with Zipf's ids, compared with torch and FBGEMM; over the table's size; and beside compute.

``speedswap bench step`` measures the same without FBGEMM.

    python benchmarks/bench_step.py [--device cpu|cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import fbgemm
import script

from speedswap.apps.bench import step
from speedswap.apps.bench.measure import show_peers


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Run the benchmark and print its figures as it goes; return them, with the ``peers`` found here."""
    peers = fbgemm.step_peers(device)
    show_peers(peers)
    there = peers["FBGEMM"].present
    found = step.run(device, quick=quick, others=lambda kind: fbgemm.contestants(kind, device) if there else [])
    return {"peers": {name: peer._asdict() for name, peer in peers.items()}, **found}


def main(argv: Sequence[str] | None = None) -> int:
    return script.main("step", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
