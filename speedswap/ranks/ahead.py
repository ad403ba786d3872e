"""Rows fetched from their owners ahead of their step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from speedswap import kernels
from speedswap._words import warn
from speedswap.collectives import Errand, Kind, Levels, Parcel, RankGroup, Task, packed, unpacked
from speedswap.errors import IdError, PeerError
from speedswap.ranks.route import LentRows, Route, Wanted, ask, ask_ahead, ids_of_tables, send_back, starts_of
from speedswap.tables import Block, Prefetched, Table, prefetch
from speedswap.tables.owners import Owners

_CPU = torch.device("cpu")
_DENSE = torch.contiguous_format
_DIGEST = (1 << 60) - 1
_INDEX_BYTES = 8
_MOST_CHANGES = 64  # tensors of changed rows


class LookupsAhead(Errand):
    """All of a batch's lookups in tables owned by ranks: one message sends the ids, and one returns the rows.

    Args:
        group: the ranks.
    """

    kind = Kind.ERRAND

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self._group = group
        self._lookups: list[RowsAhead] = []
        self._of_turn: list[weakref.ref[RowsAhead]] = []
        self._current_at = -1  # the main lane's `changes` when the rows were renewed

    def add(self, lookup: RowsAhead) -> RowsAhead:
        """Add a lookup, and return it."""
        lookup.place = len(self._lookups)
        self._lookups.append(lookup)
        self._of_turn.append(weakref.ref(lookup))
        return lookup

    def start(self) -> None:
        """Announce the errand, with all of its lookups."""
        self.about = hash(tuple(each.number for each in self._lookups))  # the same in every process
        self._group.ahead.announce(self)

    def prepare(self) -> list[int]:
        for each in self._lookups:
            each.prepare()
        return ids_of_tables([each.wanted for each in self._lookups])[0]

    def run(self, task: Task, counts: list[int]) -> None:
        lookups = self._lookups
        routes = ask_ahead(task, [(each.owners, each.wanted) for each in lookups], counts)
        parcels = [each.lend(route) for each, route in zip(lookups, routes, strict=True)]
        for each, weights in zip(lookups, task.send_parcels(parcels), strict=True):
            each.receive(weights)

    def let_go(self) -> None:
        self._lookups = []  # they refer to this errand

    # ------------------------------------------------------------------ in the batch's turn

    @property
    def is_current(self) -> bool:
        """True if all ranks have the rows as their owners do, so that lookups need no round."""
        return self._current_at == self._group.main.changes

    def renew(self, task: Task) -> bool:
        """Update the rows of all remaining lookups, in one round; every rank must call this.

        Rows that changed since they were lent are sent again. If any rank must request its rows, all ranks request and
        fetch the rows of all remaining lookups.

        Args:
            task: the ranks' common task.

        Returns:
            False if other ranks know of other lookups: each lookup is then fetched separately.
        """
        lookups = [each for ref in self._of_turn if (each := ref()) is not None and not each.is_taken]
        self._current_at, is_there = -1, all(each.is_there() for each in lookups)
        try:
            if (is_there and self._renew(task, lookups)) or self._fetch(task, lookups):
                self._current_at = self._group.main.changes
        finally:
            if not self.is_current:  # rows may have been sent, but not received
                for each in lookups:
                    each.take()
        return self.is_current

    def _fetch(self, task: Task, lookups: list[RowsAhead]) -> bool:
        """Fetch the rows of all remaining lookups; return False if other ranks know of other lookups."""
        try:
            for each in lookups:
                if not each.is_prepared:
                    each.prepare()
        except IdError:
            return False  # its lookup raises it
        tables = hash(tuple(each.number for each in lookups))
        routes = ask(
            task,
            [(each.owners, each.wanted) for each in lookups],
            [each.row_bytes for each in lookups if each.device.type == "cpu"],
            together=tables,
        )
        if routes is None:
            return False
        parcels = [each.lend(route) for each, route in zip(lookups, routes, strict=True)]
        for each, weights in zip(lookups, send_back(task, parcels), strict=True):
            each.receive(weights)
        self.is_done = True
        return True

    def _digest_of(self, lookups: Sequence[RowsAhead]) -> int:
        """Return the note by which ranks compare their remaining lookups."""
        return hash((self.time, *(each.place for each in lookups))) & _DIGEST  # the same in every process

    def _renew(self, task: Task, lookups: list[RowsAhead]) -> bool:
        agreed = self._digest_of(lookups)
        if (levels := task.lane.levels) is not None:
            return self._renew_on_hosts(task, lookups, agreed, levels)
        parcels = [each.lend_again() for each in lookups]
        rows, sent, *_ = packed([*_heads_of(parcels), *parcels])
        most = sum(len(each.wanted.rows) * some.row_bytes for each, some in zip(lookups, parcels, strict=True))
        most += _INDEX_BYTES * len(parcels) * len(sent)
        into = torch.empty(most // rows.shape[1], rows.shape[1], dtype=torch.uint8, device="cpu")
        came = None
        with task.promised():
            lines = task.round(sent, note=2 * agreed + (len(rows) > 0))
            if any(note // 2 != agreed for note in lines.notes):
                return False
            if any(note % 2 for note in lines.notes):
                came = task.prepared(rows, sent, lines.counts, into[: sum(lines.counts)])()
        if came is not None:
            for each, some, of_ranks in zip(lookups, *_received(came, parcels, lines.counts), strict=True):
                each.receive_again(some, of_ranks)
        return True

    def _renew_on_hosts(self, task: Task, lookups: list[RowsAhead], agreed: int, levels: Levels) -> bool:
        """Update the rows if the ranks of each host have requested them together."""
        chosen = [each.refreshed() for each in lookups]
        with task.promised():
            notes = task.round(note=2 * agreed + any(some.any() for some in chosen)).notes
            if any(note // 2 != agreed for note in notes):
                return False
            if any(note % 2 for note in notes):
                parcels = [each.route.parcel(each.block.weight) for each in lookups]
                for each, some in zip(lookups, levels.send_some(parcels, chosen), strict=True):
                    each.update(*some)
        return True


class LookupsOnGpu(LookupsAhead):
    """All of a batch's lookups on a GPU: their ids go to the owners ahead of their step, which gather the rows there.

    Owners send current weights in the batch's turn. So only the program's thread uses the GPUs' communicator, and every
    rank uses it in the same order.

    Args:
        group: the ranks.
    """

    def run(self, task: Task, counts: list[int]) -> None:
        lookups = [each for each in self._lookups if isinstance(each, RowsOnGpu)]
        routes = ask_ahead(task, [(each.owners, each.wanted) for each in lookups], counts)
        for each, route in zip(lookups, routes, strict=True):
            each.route = route
        asked = [each for each in lookups if len(each.route.union)]
        rows = prefetch((each.own, each.route.union, each.device) for each in asked)
        for each, pending in zip(asked, rows, strict=True):
            each.pending = pending

    def _renew(self, task: Task, lookups: list[RowsAhead]) -> bool:
        agreed = self._digest_of(lookups)
        post = task.prepared_parcels([each.lend(each.route) for each in lookups])
        with task.promised():
            if any(note != agreed for note in task.round(note=agreed).notes):
                return False
            came = post()
        for each, weights in zip(lookups, came, strict=True):
            each.receive(weights)
        return True


class Lender(Protocol):
    """The store of the rows that ranks own; see :class:`speedswap.ranks.ShardedStore`."""

    name: str
    number: int
    row_bytes: int
    own: Table
    owners: Owners
    group: RankGroup
    lent: weakref.WeakSet[RowsAhead]


class RowsAhead(Prefetched):
    """A batch's rows being fetched from their owners, and the rows that this rank lends for other ranks' batches.

    The background thread fetches them while earlier steps still change rows. So owners record which lent rows change
    afterwards, and :meth:`renew` sends those again in the batch's turn.

    Args:
        store: the store of all ranks' rows.
        ids: the lookup's ids.
        errand: fetches the rows, with those of the batch's other lookups.

    Attributes:
        number: the table's number, the same on every rank.
        row_bytes: bytes of a row of weights.
        own: the table of this rank's rows.
        owners: the division of the table's rows.
        place: the index among the errand's lookups.
        device: where the rows are needed.
        is_prepared: True once the lookup's rows are known.
    """

    device = _CPU
    is_prepared = False

    def __init__(self, store: Lender, ids: Tensor, errand: LookupsAhead) -> None:
        self.number = store.number
        self.row_bytes = store.row_bytes
        self.own, self.owners = store.own, store.owners
        self.place = 0
        self._store = store
        self._ids = ids
        self.errand = errand
        self.is_taken = False
        self._changed: list[Tensor] | None = []  # places changed since the block was gathered; None for all
        self._weights: Tensor
        self._version: int
        self.wanted: Wanted
        self.local: Tensor
        self.route: Route
        self.block: Block

    def take(self) -> None:
        """Record that the lookup is being made, and return None: :meth:`ShardedStore.look_up` has the rows."""
        with self.own.lock:
            self._changed, self.is_taken = None, True
            self._store.lent.discard(self)

    # ------------------------------------------------------------------ in the thread

    def prepare(self) -> None:
        """Find the rows, without other ranks."""
        self.wanted, self.local = Wanted.found(self.owners, self._ids, f"table {self._store.name!r}")
        self.is_prepared = True

    def lend(self, route: Route) -> Parcel:
        """Gather the rows requested from this rank, and return their weights."""
        self.route = route
        with self.own.lock:
            self._store.lent.add(self)
            self._changed = []
            self.block, self._version = self.own.lease(route.union, device=_CPU), self.own.version
        return route.parcel(self.block.weight)

    def is_of(self, ids: Tensor) -> bool:
        """Return whether these are the rows of a lookup of the given ids."""
        rows = self.wanted.rows.index_select(0, self.local.reshape(-1))
        return rows.numel() == ids.numel() and torch.equal(rows, ids.reshape(-1).long())

    def receive(self, weights: Tensor) -> None:
        """Take the weights of the rows that this rank requested."""
        self._weights = weights

    # ------------------------------------------------------------------ in the batch's turn

    def note_change(self, rows: Tensor | range | None) -> None:
        """Record that places of this rank's rows are about to change; all of them if None."""
        if rows is None:
            self._changed = None
        elif self._changed is not None:
            self._changed.append(torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows.cpu().long())
            if len(self._changed) > _MOST_CHANGES:  # e.g. after its loop was left
                self._changed = [self.route.union[self._has_changed()]]

    def _has_changed(self) -> Tensor:
        """Return which of the rows that this rank lent have changed since they were gathered."""
        every = kernels.unique(torch.cat(self._changed))[0] if self._changed else self.route.union[:0]
        if not len(every):
            return torch.zeros(len(self.route.union), dtype=torch.bool)
        return kernels.places_among(every, self.route.union) >= 0

    def has_turn(self) -> bool:
        self._store.group.ahead.wait_for(self.errand)
        ended = self.errand.ended
        if self.is_taken or ended is None or self.place:  # one lookup of the batch reports it
            return True
        self._store.group.ahead.note_end(self.errand)
        rank, failed = ended
        if failed:
            raise PeerError(f"rank {rank} failed when it took a batch ahead of its turn; its own error says why")
        warn(
            "SW408",
            f"rank {rank} ran out of batches, so this rank's remaining ones are skipped; give every rank the same "
            "number of batches (some may be empty)",
        )
        return False

    def is_there(self) -> bool:
        """Return whether the rows have arrived, can be updated, and have not been taken."""
        self.errand.wait()
        error = self.errand.error
        if error is not None and not isinstance(error, PeerError):
            raise error
        return self.errand.is_done and self._changed is not None

    @property
    def is_current(self) -> bool:
        """True if the rows can be taken without a round."""
        return self.errand.is_current and not self.is_taken

    def taken(self) -> tuple[Tensor, Tensor, LentRows]:
        """Take the rows, which are current; see :meth:`ShardedStore.look_up`."""
        self.take()
        found = self._weights, self.local, LentRows(self.route, self.block, self._version)
        del self._weights, self.block  # the lookup's graph shows when they are no longer needed
        return found

    def refreshed(self) -> Tensor:
        """Update the rows that this rank lent; return which of the requested ones have changed, in order."""
        own, route = self.own, self.route
        with own.lock:
            has_changed, self._changed = self._has_changed(), []
            if len(places := has_changed.nonzero().squeeze(1)):
                fresh = own.lease(route.union[places], device=_CPU)
                for name, values in fresh.columns.items():
                    self.block.columns[name].index_copy_(0, places, values)
            self._version = own.version
        return has_changed[route.positions]

    def lend_again(self) -> Parcel:
        """Update the rows that this rank lent.

        Returns:
            The rows to send to other ranks again, as bytes, shape (k, 8 + row_bytes), in rank order: each row's index
            among those that the rank requested here, and its weight.
        """
        again, route, weight = self.refreshed().nonzero().squeeze(1), self.route, self.block.weight
        starts = starts_of(route.received)
        ends = torch.searchsorted(again, starts + torch.tensor(route.received))
        sent = ends.diff(prepend=ends.new_zeros(1))
        numbers = again - torch.repeat_interleave(starts, sent)
        rows = torch.empty(len(again), _INDEX_BYTES + weight.shape[1] * weight.element_size(), dtype=torch.uint8)
        rows[:, :_INDEX_BYTES] = numbers.unsqueeze(1).view(torch.uint8)
        rows[:, _INDEX_BYTES:] = weight.detach().index_select(0, route.positions[again]).view(torch.uint8)
        return Parcel(rows, sent.tolist(), [])

    def receive_again(self, rows: Tensor, received: list[int]) -> None:
        """Take rows that their owners sent again, ``received`` from each rank; see :meth:`lend_again`."""
        of_owner = torch.repeat_interleave(starts_of(self.wanted.sent), torch.tensor(received))
        # A slice of a single row counts as contiguous, so contiguous() would not copy it.
        numbers, weights = (part.clone(memory_format=_DENSE) for part in rows.tensor_split((_INDEX_BYTES,), dim=1))
        self.update(numbers.view(torch.int64).squeeze(1) + of_owner, weights.view(self._weights.dtype))

    def update(self, places: Tensor, weights: Tensor) -> None:
        """Replace the weights of some of the rows that this rank requested, given by their indices."""
        self._weights.index_copy_(0, places, weights)


class RowsOnGpu(RowsAhead):
    """A batch's rows on a GPU: each rank's part is gathered there ahead; weights are sent in the batch's turn.

    Args:
        store, errand: as for :class:`RowsAhead`.
        ids: the lookup's ids, on the CPU or the device.
        device: the GPU.

    Attributes:
        pending: the rows being gathered; None once they are taken, or if no rank requests any.
    """

    pending: Prefetched | None = None

    def __init__(self, store: Lender, ids: Tensor, errand: LookupsAhead, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if ids.is_cuda:  # copied in program order; the thread waits
            ids, given = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True), ids
            ids.copy_(given, non_blocking=True)
            self._copied = torch.cuda.current_stream(device).record_event()
        super().__init__(store, ids, errand)
        self.device = device

    def prepare(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        super().prepare()
        self.local = torch.empty(self.local.shape, dtype=torch.int64, pin_memory=True).copy_(self.local)

    def lend(self, route: Route) -> Parcel:
        """Return the weights of the rows requested from this rank, as they are now."""
        with self.own.lock:
            pending, self.pending = self.pending, None
            found = None if pending is None or route is not self.route else pending.take()
            self.route = route
            self.block = self.own.lease(route.union, device=self.device) if found is None else found[0]
            self._version = self.own.version
        return route.parcel(self.block.weight)

    def taken(self) -> tuple[Tensor, Tensor, LentRows]:
        weights, local, lent = super().taken()
        return weights, local.to(self.device, non_blocking=True), lent


def _heads_of(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Return the header of several lookups' rows: for each rank that receives any, the number of rows per lookup."""
    if len(parcels) == 1:
        return []
    counts = torch.tensor([parcel.sent for parcel in parcels]).T
    gets_any = counts.any(1)
    return [Parcel(counts[gets_any].contiguous(), gets_any.long().tolist(), [])]


def _received(came: Tensor, parcels: Sequence[Parcel], counts: list[int]) -> tuple[list[Tensor], list[list[int]]]:
    """Return each lookup's rows and how many came from each rank, from the merged parcels of all ranks."""
    if len(parcels) == 1:
        return [came], [counts]
    head_bytes = _INDEX_BYTES * len(parcels)
    none = came.new_zeros(head_bytes)
    heads = [part.view(-1)[:head_bytes] if len(part) else none for part in torch.split(came, counts)]
    of_ranks = torch.stack(heads).view(torch.int64)
    head = Parcel(of_ranks[:1], [], of_ranks.any(1).long().tolist())
    received = of_ranks.T.tolist()
    rows = [Parcel(parcel.rows, [], some) for parcel, some in zip(parcels, received, strict=True)]
    return unpacked(came, [head, *rows])[1:], received
