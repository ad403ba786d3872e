"""Which dtypes rows can have: those whose items are so many bytes and nothing else."""

from __future__ import annotations

import torch

__all__ = ["check_dtype"]

_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless rows can have this dtype.

    Raises:
        TypeError: not a torch dtype, or a quantized one: its scales are not in the rows.

    >>> check_dtype(torch.bfloat16)
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; pass a torch.dtype")
    if dtype in _QUANTIZED:
        raise TypeError(f"dtype is {dtype}, whose scales are not in the rows; store the integers (int_repr()) instead")
