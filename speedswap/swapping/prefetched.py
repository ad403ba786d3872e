"""The three stages of a lookup: requested by a module, announced by a lookahead, prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from speedswap import kernels
from speedswap.swapping.graphs import leaving_transforms
from speedswap.tables import Block, Prefetched, Table, prefetch


@final
@dataclass(slots=True)
class Request:
    """A lookup of one table's rows.

    Attributes:
        given: the tensors that a lookahead may have announced for it; empty if there are no ids.
        device: where the rows are needed.
        ids_of: returns the ids, int32 or int64, any shape, on that device; called if the lookup was not announced.
        found_of: returns their rows and each id's index among them, if several lookups find these together; or None.
        followed_by: the caller's next lookups in tables of ranks: the training steps, each with its ids.
    """

    given: tuple[Tensor, ...]
    device: torch.device
    ids_of: Callable[[], Tensor]
    found_of: Callable[[], tuple[Tensor, Tensor]] | None = None
    followed_by: Sequence[tuple[Any, Tensor]] = ()

    @classmethod
    def of(cls, request: Request | Tensor) -> Request:
        """Return the lookup of plain ids."""
        if isinstance(request, Request):
            return request
        return cls((request,), request.device, lambda: request)


# Their values may be keys as well as ids.
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32}


@leaving_transforms
def ids_of(request: Request | Tensor) -> Tensor:
    """Return the ids of a lookup."""
    return request.ids_of() if isinstance(request, Request) else request


class Announced(NamedTuple):
    """A lookup that a later batch will make in a table.

    Attributes:
        table: the table.
        given: the tensors that the model will look up with, which identify this lookup among the batch's.
        device: the device on which the lookup will need its rows.
        ids: rows of the table, int32 or int64, any shape, at least one. They are not modified afterwards, unless they
            are one of ``given``.
        asked: the lookup's keys, as the module keeps them, if an id map assigned these rows.
        batch: the object that the module has read the ids from, to look them up in the same form; or None.
        found: the rows and each id's index among them, if they are known.
        sources: the objects that the ids were read from, apart from ``given``; ``has_changed()`` returns whether one
            was overwritten since.
    """

    table: Table
    given: tuple[Tensor, ...]
    device: torch.device
    ids: Tensor
    asked: Any = None
    batch: Any = None
    found: tuple[Tensor, Tensor] | None = None
    sources: Sequence[Any] = ()


class PrefetchedLookup:
    """A later lookup whose rows are being prefetched; made by :func:`prefetch_lookups`.

    Attributes:
        transfer: the transfer of the rows.
        sources: objects that must not change before the lookup's turn.
    """

    transfer: Prefetched

    def __init__(self, lookup: Announced, given: Sequence[GivenTensor]) -> None:
        self.table = lookup.table
        self.device = lookup.device
        self.asked = lookup.asked
        self.batch = lookup.batch
        self._given = given
        self.sources: Sequence[Any] = [*given, *lookup.sources]
        own = [each.ids for each in given if each.tensor is lookup.ids]
        ids = lookup.ids
        self.ids = own[0] if own else ids if ids.is_cuda else _copied(ids, lookup.device)
        self._found: tuple[Block, Tensor] | None = None
        self._found_version = -1
        self._rows_version = 0

    def matches(self, given: Sequence[Tensor], device: torch.device) -> bool:
        """Return whether rows for these tensors were prefetched, to this device."""
        if device != self.device or len(given) != len(self._given):
            return False
        return all(before.equals(now) for before, now in zip(self._given, given, strict=True))

    def take(self) -> tuple[Block, Tensor] | None:
        """Take the rows in their current state.

        Returns:
            The rows, and each id's index among them, of the given ids' shape; None if they are stale and must be read
            again.
        """
        with self.table.lock:
            if self._found_version < 0:
                # A training lookup may reuse what a lookup in inference mode found.
                with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                    self._found = self.transfer.take()
                self._found_version = self.table.version
                self._rows_version = self._version_of_rows()
            is_current = self._found_version == self.table.version and self._rows_version == self._version_of_rows()
            return self._found if is_current else None

    def _version_of_rows(self) -> int:
        """Return the version of the found rows; any optimizer step changes it, even a failed one."""
        return self._found[0].weight._version if self._found is not None else 0


def prefetch_lookups(lookups: Sequence[Announced]) -> list[PrefetchedLookup]:
    """Start all lookups of a batch together."""
    # Lookups in several tables may share tensors.
    given = {(id(tensor), each.device): tensor for each in lookups for tensor in each.given}
    kept = {(key, device): GivenTensor(tensor, device) for (key, device), tensor in given.items()}
    prefetched = [PrefetchedLookup(each, [kept[id(tensor), each.device] for tensor in each.given]) for each in lookups]
    known = [each.found for each in lookups]
    transfers = prefetch([(each.table, each.ids, each.device) for each in prefetched], known)
    for each, transfer in zip(prefetched, transfers, strict=True):
        each.transfer = transfer
    return prefetched


def have_changed(lookups: Iterable[PrefetchedLookup]) -> bool:
    """Return whether a source of a batch's ids has been overwritten since they were announced."""
    return any(source.has_changed() for source in {source for each in lookups for source in each.sources})


class GivenTensor:
    """A tensor at the time its lookup was announced: a copy; or, in GPU memory, the tensor and its version.

    Args:
        tensor: the tensor, of any dtype and shape.
        device: the lookup's device.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor = tensor
        self._version = None if tensor.is_inference() else tensor._version
        self._is_copied = not tensor.is_cuda or self._version is None
        self.ids = _copied(tensor, device) if self._is_copied else tensor.detach()

    def has_changed(self) -> bool:
        """Return whether the tensor has been overwritten since; GPU memory of inference mode is not compared."""
        if self._is_copied:
            return self.tensor.is_cpu and not kernels.have_same_bits(self.tensor, self.ids)
        return self._version != self.tensor._version

    def equals(self, now: Tensor) -> bool:
        """Return whether a tensor equals the announced one. GPU memory that has changed since equals no tensor."""
        if now.numel() != self.ids.numel():
            return False
        if is_unchanged(self.tensor, self._version, now):
            return True
        if not self._is_copied and self._version != self.tensor._version:
            return False
        ids, now = self.ids.to(now.device, non_blocking=now.is_cuda).reshape(-1), now.detach().reshape(-1)
        if now.dtype != ids.dtype:
            if not {now.dtype, ids.dtype} <= _INTEGERS:
                return False
            ids, now = ids.long(), now.long()
        return torch.equal(now, ids)


def is_unchanged(given: Tensor, version: int | None, now: Tensor) -> bool:
    """Return whether a tensor is the same GPU memory as a given one, unchanged; comparing values would wait for the
    GPU.

    CPU memory may be written without changing a tensor's version.

    Args:
        given: the tensor.
        version: its version when it was given; None for a tensor of inference mode, which has none.
        now: the tensor to compare.
    """
    if now.is_cpu or version is None or version != given._version:
        return False
    if now is given:
        return True
    # Or a different view of it, e.g. from indexing the batch again: views share the version counter.
    same_memory = now.data_ptr() == given.data_ptr() and now.dtype == given.dtype
    same_order = (now.shape, now.stride()) == (given.shape, given.stride()) or (
        now.is_contiguous() and given.is_contiguous()
    )
    return same_memory and same_order and not now.is_inference() and now._version == version


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy; for a GPU it is pinned, so that the transfer does not block."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
