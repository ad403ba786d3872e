"""Own the full rows: records, storage and files. Knows nothing of models.

:class:`Table` holds the rows; :class:`Block` is what a gather brings to the compute device; :class:`Column` names a
part of a record; ``init`` has the initial values; :func:`gather_rows` and :func:`scatter_rows` take tensors as well.
"""

from speedswap.tables import init
from speedswap.tables.block import Block
from speedswap.tables.record import Column
from speedswap.tables.rows import gather_rows, scatter_rows
from speedswap.tables.table import Table

__all__ = ["Block", "Column", "Table", "gather_rows", "init", "scatter_rows"]
