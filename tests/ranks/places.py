"""The place of rows that a scenario's ranks own."""

from __future__ import annotations

from dataclasses import replace

import speedswap
from speedswap.tables import as_storage


def owned(group, *, each="auto", path=None, reduction="mean"):
    """Return the place of rows that the ranks of a group own; for no group, that of a process alone."""
    each = as_storage(each, path)
    return replace(each, local_to_rank=True) if group is None else speedswap.Ranks(each, group, reduction)
