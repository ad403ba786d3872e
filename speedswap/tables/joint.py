"""The part of a store whose rows the ranks of a job own together: calls that other stores have no use for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from speedswap.collectives import RankGroup
    from speedswap.tables.shards import Owners
    from speedswap.tables.table import Table

__all__ = ["JointRows"]


class JointRows(ABC):
    """Rows that ranks own together, as one of them sees them. Every rank makes each of these calls.

    Attributes:
        group: the ranks.
        own: the table of the rows that this rank owns.
        owners: which rank owns a row.
        torn: why the ranks' rows are not those of one step, until they are replaced; None if they are.
    """

    group: RankGroup
    own: Table
    owners: Owners
    torn: str | None = None

    @abstractmethod
    def make_step(self, table: Table, *arguments: Any) -> Any:
        """Return the training step of a table over these rows, with the arguments of an ordinary one's maker."""

    @abstractmethod
    def scatter_last(self, rows: Tensor, values: Mapping[str, Tensor]) -> bool:
        """Send rows to their owners; of a row that several ranks write the last rank's stays.

        Args:
            rows: unique ids, shape (n,).
            values: tensors by column name.

        Returns:
            Whether rows were written by several ranks.
        """

    @abstractmethod
    def read_part(self, column: str) -> Tensor:
        """Copy the rows of this rank's range of ids, from their owners.

        Returns:
            A DTensor of shape (num_embeddings, ...), in host memory, which ``full_tensor()`` makes whole.

        Raises:
            TableTooLargeError: the range does not fit into free memory.
        """

    @abstractmethod
    def write_part(self, column: str, values: Any) -> None:
        """Overwrite all rows, of which each rank gives its range.

        Args:
            values: a DTensor, shape (num_embeddings, ...).
        """

    @abstractmethod
    def save(self, path: Path, *, overwrite: bool) -> None:
        """Save the rows of all ranks as a table; see :meth:`Table.save`."""

    @abstractmethod
    def saving(self) -> AbstractContextManager[bool]:
        """Surround the writing of a file about the rows; provide whether this rank is the one that writes it."""
