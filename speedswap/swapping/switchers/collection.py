"""A full collection of rows behind a switcher: its table, the rows that indexes name, and its files."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from speedswap import kernels
from speedswap._warnings import users_level
from speedswap.collectives import RankGroup, of_all_ranks
from speedswap.errors import DuplicateIdError, DuplicateRowsWarning
from speedswap.swapping.arguments import disk_options
from speedswap.swapping.switchers import arrays, files
from speedswap.swapping.switchers.files import ColumnArray
from speedswap.tables import Table
from speedswap.tables import init as initializers
from speedswap.tables.disk.options import DiskArguments, DiskOptions
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.init import Initializer
from speedswap.tables.record import Column
from speedswap.tables.table.files import discard
from speedswap.tables.whole_table import as_numpy

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Collection", "warn_of_duplicates"]


@dataclass(eq=False, repr=False)
class Collection:
    """Rows of one shape and dtype in a :class:`speedswap.Table`, made when an init method is called.

    Args:
        num_rows: number of rows.
        row_shape: shape of one row.
        row_dtype: any torch dtype with a fixed item size.
        storage: where the rows live, as for :meth:`speedswap.Table.create`.
        name: its name in messages.
        path: the directory of a collection on disk.
        process_group: the ranks that own the rows together.
        engine: how rows go to a GPU and back, as for :meth:`speedswap.Table.create`.
        disk: its settings for a collection on disk.
    """

    init_methods: ClassVar[str] = "an init method"
    file_suffix: ClassVar[str] = ".npy"

    num_rows: int
    row_shape: tuple[int, ...]
    row_dtype: torch.dtype
    storage: str
    name: str
    path: Path | None = None
    process_group: dist.ProcessGroup | None = None
    engine: str = "auto"
    disk: DiskArguments = field(default_factory=DiskArguments)
    said_duplicates: bool = field(default=False, init=False)
    _table: Table | None = field(default=None, init=False)

    @property
    def table(self) -> Table:
        """The collection's table.

        Raises:
            RuntimeError: no init method was called yet.
        """
        if self._table is None:
            raise RuntimeError(
                f"{type(self).__name__} has no collection of {self.name!r} yet; call {self.init_methods} first"
            )
        return self._table

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that own the rows together; None for a process alone."""
        return None if self.process_group is None else RankGroup.of(self.process_group)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        return (self.num_rows, *self.row_shape)

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the table's column and the shape of all its rows for each name in the collection's files."""
        return {"weight": ("weight", self.shape)}

    def column_arrays(self, table: Table) -> dict[str, ColumnArray]:
        """Return the columns of a table of this collection as arrays, by name."""
        return {name: ColumnArray(table, column, shape) for name, (column, shape) in self.columns().items()}

    # ------------------------------------------------------------------ making it

    def __post_init__(self) -> None:
        options = disk_options(type(self).__name__, self.disk).require()
        if self.storage != "disk":
            options.require_none("in memory, without a diskname")

    def make(self, init: Initializer) -> None:
        """Put a new table with these initial values in place of the previous one."""
        path = self.place()
        if self._table is not None and path is None:
            # Freed first, so that the two are never in memory together.
            self._table.close()
            self._table = None
        self._replace(self.new_table(path, init, seed=int(torch.randint(2**62, ()).item())))

    def new_table(self, path: Path | None, init: Initializer, seed: int) -> Table:
        """Return a new table of this collection's rows."""
        return self._table_at(path, init, seed, exist_ok=False)

    def _table_at(self, path: Path | None, init: Initializer, seed: int, *, exist_ok: bool) -> Table:
        """Return a new table of this collection's rows; of ranks also the one that is there, if ``exist_ok`` is set."""
        create = Table.create
        if self.process_group is not None:
            from speedswap.ranks.creating import create_sharded

            create = partial(create_sharded, self.process_group, exist_ok=exist_ok)
        return create(
            self.num_rows,
            self.width,
            dtype=self.row_dtype,
            storage=self.storage,
            engine=self.engine,
            path=path,
            init=init,
            seed=seed,
            name=self.name,
            **self.disk,
        )

    def place(self) -> Path | None:
        """Return the directory for a new table; None for one in memory.

        Raises:
            FileExistsError: the collection's directory exists.
        """
        if self.path is None or self.process_group is not None:  # ranks find it out together
            return self.path
        TableDirectory.discard_scratch(self.path)
        if self.path.exists():
            raise FileExistsError(
                f"diskname is {str(self.path)!r}, which exists; open it with loadCupy({str(self.path)!r}), or give "
                "another name"
            )
        return self.path

    def _replace(self, table: Table) -> None:
        if self._table is not None:
            self._table.close()
        self._table = table

    def _open(self, path: Path) -> None:
        """Continue with an existing table on disk."""
        if self._table is not None and (files := self._table.store.files) is not None and files.lives_at(path):
            return
        table = self.open_table(path)
        try:
            self._check_opened(table)
        except BaseException:
            table.close()
            raise
        self._replace(table)

    def open_table(self, path: Path) -> Table:
        """Open an existing table of this collection's rows."""
        if self.process_group is None:
            disk = DiskOptions(**self.disk)._asdict()
            del disk["scratch"]  # what is opened is not scratch
            return Table.open(path, **disk)
        table = self._table_at(path, initializers.zeros(), seed=0, exist_ok=True)
        if not table.was_found:
            table.remove()
            raise ValueError(f"loadFileName is {str(path)!r}, where there is no table of process_group")
        return table

    def table_columns(self) -> list[Column]:
        """Return the columns of the table, without their initial values."""
        return [Column("weight", (self.width,), self.row_dtype, initializers.zeros())]

    def _check_opened(self, table: Table) -> None:
        wanted = (self.num_rows, self.width, self.row_dtype)
        found = (table.num_embeddings, table.embedding_dim, table.dtype)
        if found != wanted:
            raise ValueError(f"{str(table.path)!r} has rows, width and dtype {found}, but {wanted} is needed")

    @property
    def width(self) -> int:
        """Items in a row."""
        return max(1, math.prod(self.row_shape))

    # ------------------------------------------------------------------ rows

    def checked_ids(self, positive: Any, negative: Any = None) -> Tensor:
        """Return positive indexes followed by negative ones, flat; raise IdError if one is out of range."""
        what = f"the collection of {self.name!r}"
        ids = arrays.checked_ids(positive, "retrievedPosIndexes", self.num_rows, what).reshape(-1)
        if negative is None:
            return ids
        others = arrays.checked_ids(negative, "retrievedNegIndexes", self.num_rows, what).reshape(-1)
        return torch.cat([ids, others.to(ids.device)])

    def gather(self, ids: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Copy rows of every column of the table, in the order of the ids."""
        block = self.table.gather(ids, device=None if _lives_on_gpu(self.table) else device)
        return {name: rows.to(device) for name, rows in block.columns.items()}

    def scatter(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write rows; of rows with equal ids the last one wins, of the last rank, and a warning says so once."""
        if _lives_on_gpu(self.table):
            values = {name: rows.cuda() for name, rows in values.items()}
        if (joint := self.table.store.joint) is not None:
            with self.table.lock:
                last, rows = _last_of_each(ids, values)
                if joint.scatter_last(last, rows) or len(last) < len(ids):
                    self._warn_of_duplicates(ids)
                self.table.store.commit()
            return
        try:
            self.table.scatter(ids, values)
        except DuplicateIdError:
            self._warn_of_duplicates(ids)
            self.table.scatter(*_last_of_each(ids, values))

    def _warn_of_duplicates(self, ids: Tensor) -> None:
        if not self.said_duplicates:
            self.said_duplicates = True
            warn_of_duplicates(ids, self.name)

    # ------------------------------------------------------------------ whole

    @of_all_ranks
    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """Return the whole collection as a NumPy array, a copy.

        A dtype that NumPy lacks (bfloat16) is returned as float32, which holds it exactly.

        Raises:
            TableTooLargeError: it does not fit into the free memory.
        """
        return as_numpy(self.table.read()).reshape(self.shape)

    @of_all_ranks
    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Write the whole collection to a ``.npy`` file, in pieces; the suffix is added where it is missing.

        The file appears complete or not at all, and replaces one of that name. ``numpy.load`` reads it. Of ranks that
        own the rows together, which all call this, the first one writes it.
        """
        files.write_npy(files.with_suffix(saveFileName, self.file_suffix), self.column_arrays(self.table)["weight"])

    @of_all_ranks
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Read the whole collection from a ``.npy`` file, without an init method or after one.

        A collection on disk also takes the directory of an existing one: it continues with that, and nothing is copied.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError, TypeError: its array has another shape or dtype, or it is damaged or pickled. The collection is
                unchanged.
        """
        path = Path(loadFileName)
        if self.storage == "disk" and path.is_dir():
            self._open(path)
        else:
            self._read_file(path if path.exists() else files.with_suffix(path, self.file_suffix))

    def _read_file(self, path: Path) -> None:
        self.fill(lambda table: files.read_npy(path, self.column_arrays(table)["weight"]))

    def fill(self, load: Callable[[Table], Any]) -> None:
        """Fill the table, a new one if there is none yet; a new one is removed if that fails."""
        if self._table is not None:
            load(self._table)
            return
        self.make(initializers.zeros())
        assert self._table is not None
        try:
            load(self._table)
        except BaseException:
            failed, self._table = self._table, None
            discard(failed)
            raise


def warn_of_duplicates(ids: Tensor, name: str) -> None:
    """Warn that some of the written rows have equal ids, and how many are lost."""
    num_rows = len(kernels.last_occurrences(ids))
    warnings.warn(
        f"{len(ids)} indexes of the collection of {name!r} name only {num_rows} rows: of the rows with one index the "
        f"last is kept, and the other {len(ids) - num_rows} updates are lost. speedswap.Embedding sums the gradients "
        "of equal ids instead. (Said once.)",
        DuplicateRowsWarning,
        stacklevel=users_level(),
    )


def _last_of_each(ids: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each id once, with the rows at its last occurrence."""
    positions = kernels.last_occurrences(ids)
    return ids[positions], {name: rows.index_select(0, positions.to(rows.device)) for name, rows in values.items()}


def _lives_on_gpu(table: Table) -> bool:
    return table.storage == "device" and torch.cuda.is_available()
