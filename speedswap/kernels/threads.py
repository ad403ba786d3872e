"""How many threads the CPU engine uses."""

from __future__ import annotations

import os

import torch

__all__ = ["get_num_threads", "set_num_threads"]

MOST_THREADS = 2**31 - 1
"""The engine starts far fewer, but counts them in 32 bits."""


def _from_environment() -> int | None:
    text = os.environ.get("SPEEDSWAP_NUM_THREADS")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_THREADS)) or not 1 <= int(text) <= MOST_THREADS:
        raise ValueError(f"the environment's SPEEDSWAP_NUM_THREADS is {text!r}; set it to 1 or more, or unset it")
    return int(text)


_num_threads = _from_environment()


def get_num_threads() -> int:
    """Return the number of threads for moving rows: torch's own unless one was set."""
    return torch.get_num_threads() if _num_threads is None else _num_threads


def set_num_threads(num_threads: int | None) -> None:
    """Use ``num_threads`` threads for moving rows; None follows ``torch.get_num_threads()`` again.

    The environment's ``SPEEDSWAP_NUM_THREADS`` sets the initial value.

    Raises:
        ValueError: num_threads is below 1, or above 2**31 - 1.

    >>> set_num_threads(2); get_num_threads()
    2
    >>> set_num_threads(None)
    """
    global _num_threads
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; use 1 or more, or None for torch's number")
    if num_threads is not None and num_threads > MOST_THREADS:
        raise ValueError(f"num_threads is {num_threads}; use at most {MOST_THREADS}, or None for torch's number")
    _num_threads = num_threads
