"""The size of a cache of hot rows, and the reasons why a table trains without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from speedswap import kernels
from speedswap._words import warn_once

if TYPE_CHECKING:
    from speedswap.kernels import HotRows, Records

HotBytes = int | float | Literal["auto"]
"""GPU memory for records: bytes, or a fraction of the table, or a quarter of what is free."""

# A cache with room for fewer batches costs more than it saves.
BATCHES = 2
_AUTO_SHARE = 4


def require_hot_bytes(hot_bytes: HotBytes | None, engine: str) -> None:
    """Raise ValueError or TypeError unless a pinned table can have such a cache."""
    if hot_bytes is None:
        return
    if isinstance(hot_bytes, bool) or not (isinstance(hot_bytes, int | float) or hot_bytes == "auto"):
        raise TypeError(f"hot_bytes is {hot_bytes!r}; give bytes, a fraction of the table, 'auto', or None")
    if hot_bytes != "auto" and not (0 < hot_bytes < 1 if isinstance(hot_bytes, float) else hot_bytes >= 1):
        raise ValueError(f"hot_bytes is {hot_bytes!r}; give 1 or more bytes, or a fraction of the table below 1")
    if kernels.ENGINES[engine]["gather"] < 1:
        raise ValueError(
            f"hot_bytes is {hot_bytes!r}, but engine is {engine!r}, which reads rows past the GPU's cache; use "
            "'zero_copy', 'staged_out' or 'split_out', or leave hot_bytes out"
        )


def make_cache(
    hot_bytes: HotBytes, groups: Sequence[Records], batch_rows: int, device: torch.device, table: str
) -> HotRows | None:
    """Make the cache of a table's hot rows; None, with a warning, if there is no room for one that is of use.

    Args:
        hot_bytes: as given to :class:`speedswap.Pinned`.
        groups: the table's pinned record groups.
        batch_rows: the rows of a batch.
        device: the GPU.
        table: the table's name, for the warning.
    """
    from speedswap.kernels.cuda.hot import MOST_SLOTS, HotRows

    num_rows, row_bytes = groups[0].num_rows, sum(each.stride for each in groups)
    if isinstance(hot_bytes, float):
        slots = int(hot_bytes * num_rows)
    else:
        room = torch.cuda.mem_get_info(device)[0] // _AUTO_SHARE if hot_bytes == "auto" else hot_bytes
        slots = room // row_bytes
    slots, least = min(slots, num_rows, MOST_SLOTS), min(BATCHES * batch_rows, num_rows, MOST_SLOTS)
    if slots < max(least, 1):
        why = (
            f"makes room for {slots:,} rows, fewer than {BATCHES} batches of {batch_rows:,}; give "
            f"{least * row_bytes:,} bytes or more"
        )
    else:
        try:
            return HotRows(groups, slots, device)
        except torch.OutOfMemoryError as error:
            why = f"is more than the GPU has left ({error}); give less"
    warn_once("SW404", f"hot_bytes={hot_bytes!r} of table {table!r} {why}: it trains without a cache of hot rows")
    return None
