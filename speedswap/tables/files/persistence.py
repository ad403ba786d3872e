"""Attributes and id maps of tables in mapped files, saved with their manifest."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from speedswap.errors import TableFormatError
from speedswap.tables.files.directory import TableDirectory
from speedswap.tables.files.open_directory import OpenFile
from speedswap.tables.id_map import IdMap

if TYPE_CHECKING:
    from speedswap.tables.groups import RecordGroups

__all__ = ["Persistence", "read_scalars"]

_SCALARS = "SCALARS"  # of earlier versions: attributes that changed at every step
_MAX_BYTES = 4096

_log = logging.getLogger("speedswap")


class Persistence:
    """The durable side of a local store. It outlives the Table object, to which it must not refer.

    Args:
        groups: the store's memory.
        attributes: plain data that is saved with the rows.
        id_maps: keys to rows, saved with them.

    Attributes:
        live: functions by key for attributes that change at every step, called when attributes are saved. A result of
            None leaves the attribute as it is. They must not refer to the table either.
    """

    def __init__(self, groups: RecordGroups, attributes: dict[str, Any], id_maps: dict[str, IdMap]) -> None:
        self._groups = groups
        self._id_maps = id_maps
        self._saved_versions: dict[str, int] = {}  # of the id maps as their files have them
        self._attributes = attributes
        self._owner_pid = os.getpid()
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
            if found.part is None and found.num_rows > self._groups.num_embeddings:
                raise TableFormatError(
                    f"{what} is damaged: it has rows 0 to {found.capacity}, but the table "
                    f"{self._groups.num_embeddings} rows"
                )
            self._id_maps[name] = found
            if not directory.was_left_open:
                self._saved_versions[name] = found.version

    def take_scalars(self) -> None:
        """Put the attributes that were found in SCALARS into the manifest: nothing keeps that file up to date."""
        directory = self._groups.directory
        if directory is not None and directory.files.status(_SCALARS) is not None:
            self.save_manifest()
            directory.files.remove(_SCALARS)

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
        file = OpenFile(directory.files.open(_SCALARS))
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
