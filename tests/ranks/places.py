"""The place of rows that a scenario's ranks own."""

from __future__ import annotations

import speedswap
from speedswap.tables import as_storage


def owned(group, *, each="auto", path=None, reduction="mean"):
    """Return the place of rows that the ranks of a group own; for no group, that of one process."""
    each = as_storage(each, path)
    return each if group is None else speedswap.Ranks(each, group, reduction)
