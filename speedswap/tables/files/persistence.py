"""Durability of a table's rows and attributes, also when the process ends without closing the table.

Rows that a process has written stay when it is killed, but the manifest is as it was last saved. So the attributes that
go with the rows, such as an optimizer's step count, are also written to ``SCALARS`` after each step: a few hundred
bytes, without waiting for the disk. They count as long as the manifest is the one that they name.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from speedswap.errors import TableFormatError
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.id_map import IdMap

if TYPE_CHECKING:
    from speedswap.tables.groups import RecordGroups

__all__ = ["Persistence", "ScalarsFile", "read_scalars"]

_NAME, _UNFINISHED = "SCALARS", "SCALARS.tmp"
_MAX_BYTES = 4096

_log = logging.getLogger("speedswap")


class Persistence:
    """The durable side of a local store. It outlives the Table object, to which it must not refer.

    Args:
        groups: the store's memory.
        attributes: plain data that is saved with the rows.
        id_maps: keys to rows, saved with them.
        lagging: whether the attributes may be of an earlier step than the rows, as they were found.

    Attributes:
        live: functions by key for attributes that change at every step, called when attributes are saved. A result of
            None leaves the attribute as it is. They must not refer to the table either.
    """

    def __init__(
        self, groups: RecordGroups, attributes: dict[str, Any], id_maps: dict[str, IdMap], *, lagging: bool
    ) -> None:
        self._groups = groups
        self._id_maps = id_maps
        self._saved_versions: dict[str, int] = {}  # of the id maps as their files have them
        self._attributes = attributes
        self._lagging = lagging
        self._owner_pid = os.getpid()
        directory = groups.directory
        self._scalars = ScalarsFile(directory) if directory is not None and directory.writable else None
        self.live: dict[str, Callable[[], Any]] = {}

    def note_attributes(self) -> dict[str, Any]:
        """Bring the attributes up to date, and return them."""
        for key, source in self.live.items():
            value = source()
            if value is not None:
                self._attributes[key] = value
        return self._attributes

    def save_manifest(self) -> None:
        directory = self._groups.directory
        if directory is not None:
            self._save_id_maps(directory)
            self._groups.save_manifest(self.note_attributes())
            if self._id_maps:
                directory.discard_keys(keep=self._groups.key_files.values())
            if self._scalars is not None:
                self._scalars.manifest_has_changed()
                self.keep_scalars()

    def _save_id_maps(self, directory: TableDirectory) -> None:
        """Write id maps that have changed to new files, durably, for the next manifest."""
        files = dict(self._groups.key_files)
        for name, id_map in self._id_maps.items():
            version = id_map.version
            if self._saved_versions.get(name) != version:
                files[name] = directory.save_keys(id_map.to_bytes())
                self._saved_versions[name] = version
        if files != self._groups.key_files:
            directory.sync()
            self._groups.key_files = files

    def read_id_maps(self, *, frozen: bool) -> None:
        """Read the id maps that the manifest names.

        Raises:
            TableFormatError: one is damaged, or of another number of rows.
        """
        directory = self._groups.directory
        assert directory is not None
        for name, file in self._groups.key_files.items():
            what = f"{directory.path / file}"
            found = IdMap.from_bytes(
                directory.read_keys(file), frozen=frozen, left_open=directory.was_left_open, what=what
            )
            if found.num_rows > self._groups.num_embeddings:
                raise TableFormatError(
                    f"{what} is damaged: it has rows 0 to {found.capacity}, but the table "
                    f"{self._groups.num_embeddings} rows"
                )
            self._id_maps[name] = found
            if not directory.was_left_open:
                self._saved_versions[name] = found.version

    def keep_scalars(self, *, known: bool = True) -> None:
        """Write the attributes that change at every step where they survive a killed process.

        Args:
            known: False where they would have to be waited for; the file then says that they are not known.
        """
        if self._scalars is None or not (self.live or self._lagging) or not self.is_needed:
            return
        if not known or not self.live:
            self._scalars.write(None)
            return
        now = {key: source() for key, source in self.live.items()}
        self._scalars.write({k: self._attributes.get(k) if value is None else value for k, value in now.items()})

    def close(self) -> None:
        """Close the scalars' file; the table's memory stays open."""
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None  # the table may be another process's from now on

    def flush(self) -> None:
        """Make everything that has arrived durable."""
        for group in self._groups:
            group.memory.flush()
        self.save_manifest()

    @property
    def is_needed(self) -> bool:
        """True if the table has files, and this process may write them."""
        directory = self._groups.directory
        return directory is not None and directory.writable and os.getpid() == self._owner_pid


class ScalarsFile:
    """``SCALARS`` of a table that is open for writing.

    Args:
        directory: the table's.
    """

    def __init__(self, directory: TableDirectory) -> None:
        self._directory = directory
        self._file: OpenFile | None = None
        self._manifest: str | None = None
        self._last: dict[str, Any] | None = {}
        self._has_failed = False

    def write(self, attributes: dict[str, Any] | None) -> None:
        """Replace the file's content.

        Args:
            attributes: by name, with None for one that was removed; None in place of the whole where they are not
                known, so that those of the manifest are of an earlier step than the rows.
        """
        if self._has_failed or (attributes == self._last and self._manifest is not None):
            return
        if self._manifest is None:
            self._manifest = self._directory.manifest_checksum
        body = json.dumps({"manifest": self._manifest, "attributes": attributes}).encode()
        if len(body) > _MAX_BYTES - 16 and attributes is not None:
            self.write(None)
            return
        try:
            self._put(b"%08x\n%s\n" % (zlib.crc32(body), body))
            self._last = attributes
        except OSError as error:
            self._give_up(error)

    def _put(self, text: bytes) -> None:
        if self._file is not None:
            # In one call, which a kill does not interrupt, over the previous text; the rest of a longer one stays.
            os.pwrite(self._file.fd, text, 0)
            return
        # An existing file may be a hard link to something precious.
        files = self._directory.files
        files.remove(_UNFINISHED)
        file = OpenFile(files.create(_UNFINISHED))
        os.pwrite(file.fd, text, 0)
        files.rename(_UNFINISHED, _NAME)
        self._file = file

    def manifest_has_changed(self) -> None:
        """Note that the manifest was saved: what is written from now on goes with the new one."""
        self._manifest = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: OSError) -> None:
        """Leave the file without a meaning rather than with a stale one."""
        self._has_failed = True
        with suppress(OSError):
            if self._file is not None:
                os.ftruncate(self._file.fd, 0)
            else:
                self._directory.files.remove(_NAME)
        _log.warning(
            "the step count cannot be kept with the rows of %s at every step (%s); it is saved when the table is "
            "flushed or closed",
            self._directory.path,
            error,
        )


def read_scalars(directory: TableDirectory, attributes: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a table's attributes as of its last step, and whether some of them may be of an earlier one.

    Args:
        directory: the table's.
        attributes: those of its manifest.

    Raises:
        TableFormatError: SCALARS is not a regular file.
    """
    unclean = directory.was_left_open and bool(attributes)
    try:
        file = OpenFile(directory.files.open(_NAME))
    except FileNotFoundError:
        return attributes, unclean
    newer = _parsed(os.pread(file.fd, _MAX_BYTES, 0))
    file.close()
    if newer is None or newer["manifest"] != directory.manifest_checksum:
        return attributes, unclean
    if newer["attributes"] is None:
        return attributes, True
    merged = attributes | newer["attributes"]
    return {name: value for name, value in merged.items() if value is not None}, False


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Return the content of a file; None if it is damaged."""
    checksum, _, rest = raw.partition(b"\n")
    body, end, _ = rest.partition(b"\n")
    if not end or checksum != b"%08x" % zlib.crc32(body):
        return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"manifest", "attributes"}:
        return None
    return found if found["attributes"] is None or isinstance(found["attributes"], dict) else None
