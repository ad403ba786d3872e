"""What this machine can do: rows to the compute device and back, and training steps, beside floors and peers.

``speedswap bench`` runs it; the scripts under ``benchmarks`` are the same. From Python::

    from speedswap.apps.bench import step, transfer, transfer_figure

    found = transfer.run("cpu", quick=True)
    transfer_figure(found).savefig("transfer.png")
"""

from speedswap.apps.bench import ceilings, step, transfer
from speedswap.apps.bench.errors import BenchmarkError, WrongResultError
from speedswap.apps.bench.plots import ceilings_figure, step_figure, transfer_figure

__all__ = [
    "BenchmarkError",
    "WrongResultError",
    "ceilings",
    "ceilings_figure",
    "step",
    "step_figure",
    "transfer",
    "transfer_figure",
]
