"""Rows to, from and on a GPU. CuPy is imported when one is first used."""

from speedswap.kernels.cuda.launches import fill, round_rows
from speedswap.kernels.cuda.moves import gather_records, scatter_records
from speedswap.kernels.cuda.status import info, ready

__all__ = ["fill", "gather_records", "info", "ready", "round_rows", "scatter_records"]
