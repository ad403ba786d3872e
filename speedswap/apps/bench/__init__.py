"""Measurements of this machine: rows to the compute device and back, and training steps, with floors and peers.

``speedswap bench`` runs it; the folder ``benchmarks`` of the repository has more. From Python::

    from speedswap.apps.bench import step, transfer, transfer_figure

    found = transfer.run("cpu", quick=True)
    transfer_figure(found).savefig("transfer.png")
"""

from speedswap.apps.bench import step, transfer
from speedswap.apps.bench.plots import step_figure, transfer_figure

__all__ = ["step", "step_figure", "transfer", "transfer_figure"]
