"""The parts of a checkpoint that the ranks have written, and the manifest that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from speedswap.swapping.checkpoints.manifest import Manifest, SavedTable, SavedTensor, saved_table
from speedswap.swapping.table_module import TableModule

__all__ = ["SavedPart", "merged"]


@dataclass(frozen=True)
class SavedPart:
    """The part of a checkpoint that one rank has written.

    Attributes:
        tables: those whose rows it has, by the names of their modules.
        content: its plain data.
        tensors: the places of its tensors, by name.
        bytes_written: by it.
    """

    tables: dict[str, SavedTable]
    content: dict[str, Any]
    tensors: dict[str, SavedTensor]
    bytes_written: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> SavedPart:
        """Return the part that :meth:`to_json` has described."""
        tables = {name: saved_table(entry) for name, entry in data["tables"].items()}
        tensors = {name: SavedTensor(**entry) for name, entry in data["tensors"].items()}
        return cls(tables, data["content"], tensors, data["bytes_written"])


def merged(token: str, step: int, parts: Sequence[SavedPart], modules: Mapping[str, TableModule]) -> Manifest:
    """Return the description of a whole checkpoint.

    Args:
        token, step: of it.
        parts: of all ranks, in their order.
        modules: of the tables, by their names in the model.
    """
    first = parts[0]
    tables = []
    for name, module in modules.items():
        table = first.tables[name]
        if module._step.is_sharded:
            shards = tuple(part.tables[name] for part in parts)
            whole = replace(table, copy="", deltas=(), path="", commit=0, shards=shards)
            table = replace(whole, num_embeddings=module.table.num_embeddings)
        tables.append(table)
    content = {key: value for part in reversed(parts) for key, value in part.content.items()}
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    return Manifest(token, step, content, tensors, tuple(tables))
