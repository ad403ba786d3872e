"""Everything in a table's files read and checked, for ``speedswap verify``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from speedswap.apps.running import show_progress
from speedswap.errors import TableFormatError
from speedswap.tables import Table
from speedswap.tables.files.manifest import part_of_ranks
from speedswap.tables.store import Checked

__all__ = ["Verified", "verify"]

_MOST_SHOWN = 20
_OF_A_TABLE = re.compile(r"MANIFEST|LOCK|HEAD.*|(rows|data|keys).*\.(log|bin)")


class Verified(NamedTuple):
    """The outcome for one table.

    Attributes:
        path: its directory.
        rows: rows of the table; None where its files do not tell.
        touched: rows that were ever written, which are the ones that were read; None where that is not known.
        checked: bytes read, damaged rows, and problems.
        part: whose rows these are, if the table is one of several ranks' part of another.
    """

    path: Path
    rows: int | None
    touched: int | None
    checked: Checked
    part: str | None = None

    @property
    def whole(self) -> bool:
        """True if nothing is wrong."""
        return not self.checked.problems

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON can hold it, with damaged rows as pairs: the first, and the one after the last."""
        return {
            "path": str(self.path),
            **({} if self.part is None else {"part": self.part}),
            "whole": self.whole,
            "rows": self.rows,
            "bytes_read": self.checked.nbytes,
            "touched_rows": self.touched,
            "damaged_rows": [[rows.start, rows.stop] for rows in self.checked.damaged],
            "problems": self.checked.problems,
        }

    def lines(self) -> list[str]:
        """Return the outcome as lines of text."""
        problems = self.checked.problems
        if not problems:
            rows = f"{self.rows:,} rows" + ("" if self.touched is None else f", {self.touched:,} of them written")
            whose = "" if self.part is None else f" ({self.part})"
            return [f"{self.path}{whose} is whole: {rows}; {self.checked.nbytes:,} bytes read; every checksum matches"]
        more = len(problems) - _MOST_SHOWN
        shown = [each if str(self.path) in each else f"{self.path}: {each}" for each in problems[:_MOST_SHOWN]]
        return [*shown, f"{self.path}: and {more:,} more"] if more > 0 else shown


def verify(path: Path, *, shown: bool = False) -> Verified:
    """Read everything in a table's files, and check whatever has a checksum. Nothing is changed.

    Args:
        path: the table's directory.
        shown: True for a progress bar on standard error.

    Raises:
        FileNotFoundError: there is nothing, or a directory without a file of a table.
        OSError: the files cannot be opened, so that nothing is known of them.
    """
    try:
        with Table.open(path, mode="r") as table:
            files = table.store.files
            assert files is not None
            touched = files.facts().get("touched_rows")
            touched = touched if isinstance(touched, int) else None
            total = len(table) if touched is None else touched
            with show_progress(total, shown=shown, unit=" rows") as progress:
                checked, part = files.verify(progress.update), part_of_ranks(table.columns["weight"])
                return Verified(path, len(table), touched, checked, part)
    except TableFormatError as error:
        if path.is_dir() and not any(_OF_A_TABLE.fullmatch(each.name) for each in path.iterdir()):
            raise FileNotFoundError(f"path is {str(path)!r}, where there is no table") from error
        return Verified(path, None, None, Checked(problems=[str(error)]))
